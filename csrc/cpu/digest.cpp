// digest_partial and digest_copy_ on the CPU.
//
// The inner loop is a 32 x 32 -> 64 bit multiplication and three additions a word, with a 4 KiB table
// of keys in the first-level cache: about as fast as memory can be read.
#include "../digest_math.h"
#include "simd.h"

#include <algorithm>
#include <cstring>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace megarl {
namespace {

constexpr WordKeys kKeys = make_word_keys();

// sums[j]: of the first j keys.  For the + 1 of each byte, which costs the loop nothing that way.
struct KeySums {
  uint64_t first[kBlockWords + 1];
};
constexpr KeySums make_key_sums() {
  KeySums sums{};
  for (int64_t j = 0; j < kBlockWords; ++j) sums.first[j + 1] = sums.first[j] + kKeys.at[j];
  return sums;
}
constexpr KeySums kKeySums = make_key_sums();

struct Products {
  uint64_t sum, high;  // of the products modulo 2^64; of their upper halves
};

// Words that lie anywhere in memory, against keys[0], keys[1], ...
MEGARL_SIMD Products multiply_add(const char* words, const uint32_t* keys, int64_t num_words) {
  uint64_t sum = 0, high = 0;
  for (int64_t j = 0; j < num_words; ++j) {
    uint32_t word;
    std::memcpy(&word, words + 4 * j, 4);
    const uint64_t product = static_cast<uint64_t>(word) * keys[j];
    sum += product;
    high += product >> 32;
  }
  return {sum, high};
}

uint128_t sum_words(const char* words, int64_t first, int64_t num_words) {
  const Products p = multiply_add(words, kKeys.at + first, num_words);
  const uint64_t low = p.sum - (p.high << 32);  // of the lower halves: below 2^42, so exact
  const uint128_t products = (static_cast<uint128_t>(p.high) << 32) + low;
  return products + static_cast<uint128_t>(kKeySums.first[first + num_words] -
                                           kKeySums.first[first]) * kByteOnes;
}

// Bytes [at, end) of one word, `at` and `end` counted in its block.
uint128_t part_of_word(const unsigned char* bytes, int64_t at, int64_t end) {
  uint128_t sum = 0;
  for (int64_t g = at; g < end; ++g) {
    sum += (static_cast<uint128_t>(bytes[g - at] + 1u) << (8 * (g % 4))) * kKeys.at[g / 4];
  }
  return sum;
}

// Bytes [at, end) of one block.
uint128_t sum_block(const char* bytes, int64_t at, int64_t end) {
  const auto* raw = reinterpret_cast<const unsigned char*>(bytes);
  const int64_t first = std::min((at + 3) / 4 * 4, end), last = std::max(end / 4 * 4, first);
  return part_of_word(raw, at, first) + sum_words(bytes + (first - at), first / 4, (last - first) / 4) +
         part_of_word(raw + (last - at), last, end);
}

// `num_bytes` that are contiguous in the whole tensor, from its byte `position` on.
uint64_t sum_run(const char* bytes, int64_t position, int64_t num_bytes) {
  uint64_t total = 0;
  for (int64_t done = 0; done < num_bytes;) {
    const int64_t block = (position + done) / kBlockBytes, at = (position + done) % kBlockBytes;
    const int64_t count = std::min(kBlockBytes - at, num_bytes - done);
    total = add_mod(total, times_block_key(sum_block(bytes + done, at, at + count), block));
    done += count;
  }
  return total;
}

// Bytes [from, to) of the slice in its own order.
uint64_t sum_slice(const char* bytes, const Runs& runs, int64_t from, int64_t to) {
  uint64_t total = 0;
  while (from < to) {
    const int64_t run = from / runs.run_bytes, skipped = from % runs.run_bytes;
    const int64_t count = std::min(runs.run_bytes - skipped, to - from);
    total = add_mod(total, sum_run(bytes + from, runs.begin_of(run) + skipped, count));
    from += count;
  }
  return total;
}

// The sum over parts of `num_bytes`, of each of which `sum(from, to)` is asked, in threads.
template <typename Sum>
int64_t sum_parts(int64_t num_bytes, const Sum& sum) {
  constexpr int64_t kPart = 1 << 18;
  std::vector<uint64_t> parts((num_bytes + kPart - 1) / kPart);
  torch::stable::parallel_for(0, parts.size(), 1, [&](int64_t first, int64_t last) {
    for (int64_t p = first; p < last; ++p) {
      parts[p] = sum(p * kPart, std::min((p + 1) * kPart, num_bytes));
    }
  });
  uint64_t total = 0;
  for (const uint64_t part : parts) total = add_mod(total, part);
  return static_cast<int64_t>(total);
}

// tensor [...] of 1, 2, 4 or 8 bytes an element, full_shape and offset of its dimensions -> i64 []
Tensor digest_partial_cpu(const Tensor& tensor, std::vector<int64_t> full_shape,
                          std::vector<int64_t> offset) {
  check_digest_partial(tensor, full_shape, offset);
  Tensor out = torch::stable::new_zeros(tensor, {}, ScalarType::Long);
  if (tensor.numel() == 0) return out;

  const Tensor x = torch::stable::contiguous(tensor);
  const Runs runs = runs_of(x, full_shape, offset);
  const char* bytes = static_cast<const char*>(x.const_data_ptr());
  *out.mutable_data_ptr<int64_t>() =
      sum_parts(runs.num_runs * runs.run_bytes,
                [&](int64_t from, int64_t to) { return sum_slice(bytes, runs, from, to); });
  return out;
}

// `streaming`: past the caches, which have what is read next, without reading memory to overwrite it.
// Other threads see it after a fence.  Otherwise in loops, which beat memcpy for what is read again.
template <bool streaming>
void copy_bytes(char* to, const char* from, int64_t num_bytes) {
  int64_t done = 0;
#if defined(__x86_64__)
  constexpr int64_t kVector = sizeof(__m128i);
  done = std::min<int64_t>(-reinterpret_cast<uintptr_t>(to) % kVector, num_bytes);
  std::memcpy(to, from, done);
  for (; done + kVector <= num_bytes; done += kVector) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + done));
    auto* place = reinterpret_cast<__m128i*>(to + done);
    streaming ? _mm_stream_si128(place, bytes) : _mm_store_si128(place, bytes);
  }
#endif
  std::memcpy(to + done, from + done, num_bytes - done);
}

// Bytes [at, end) of a whole tensor, block by block, while the first-level cache has them.
uint64_t copy_and_sum(char* to, const char* from, int64_t at, int64_t end, bool read_back) {
  uint64_t total = 0;
  for (int64_t count; at < end; at += count) {
    count = std::min(kBlockBytes, end - at);
    if (read_back) copy_bytes<false>(to + at, from + at, count);
    total = add_mod(total, sum_run((read_back ? to : from) + at, at, count));
    if (!read_back) copy_bytes<true>(to + at, from + at, count);
  }
#if defined(__x86_64__)
  if (!read_back) _mm_sfence();
#endif
  return total;
}

// place and source, contiguous [...] of one type of 1, 2, 4 or 8 bytes an element: copies it.  Of the
// source as it was read, or with `read_back` of the place as it is then -> i64 []
Tensor digest_copy_cpu(Tensor place, const Tensor& source, bool read_back) {
  check_digest_copy(place, source);
  Tensor out = torch::stable::new_zeros(source, {}, ScalarType::Long);
  if (source.numel() == 0) return out;

  const char* from = static_cast<const char*>(source.const_data_ptr());
  char* to = static_cast<char*>(place.mutable_data_ptr());
  *out.mutable_data_ptr<int64_t>() =
      sum_parts(source.numel() * source.element_size(), [&](int64_t at, int64_t end) {
        return copy_and_sum(to, from, at, end, read_back);
      });
  return out;
}

}  // namespace
}  // namespace megarl

STABLE_TORCH_LIBRARY_IMPL(megarl, CPU, m) {
  m.impl("digest_partial", TORCH_BOX(&megarl::digest_partial_cpu));
  m.impl("digest_copy_", TORCH_BOX(&megarl::digest_copy_cpu));
}
