// delta_encode_ on CUDA: one thread block a chunk, one thread an element of the block it is at.
//
// 1. What a chunk takes is counted first, then where each begins is summed up, then all is written: the
//    tensors are read twice and the payload has its exact size.
// 2. That size has to be known on the host: the call waits for the device, as torch.nonzero does.
#include "delta.cuh"

namespace megarl {
namespace {

// A chunk's codes and counts, in shared memory, and the sums of what they take.
struct Chunk {
  uint8_t codes[kDeltaBlocks];
  int counts[kDeltaBlocks];
  int64_t places, values;
};

// All threads call it.
template <typename T>
__device__ void read_chunk(const T* base, const T* now, int64_t size, Chunk* chunk) {
  if (threadIdx.x == 0) chunk->places = chunk->values = 0;
  for (int64_t b = 0; b < blocks_in(size); ++b) {
    const int64_t i = b * kDeltaBlock + threadIdx.x, here = size_of(b, size, kDeltaBlock);
    const T step = i < size ? static_cast<T>(now[i] - base[i]) : T{0};
    const int count = __syncthreads_count(step != 0);
    const bool narrow = !__syncthreads_or(is_wide(step));
    if (threadIdx.x == 0) {
      const uint8_t code = code_of(count, here, narrow);
      chunk->codes[b] = code;
      chunk->counts[b] = count;
      chunk->places += place_bytes(code, here);
      chunk->values += value_bytes(code, count, sizeof(T));
    }
  }
  __syncthreads();
}

// Bytes of every chunk; 0 where nothing changed.
template <typename T>
__global__ void size_kernel(const T* base, const T* now, int64_t numel, int64_t* sizes) {
  __shared__ Chunk chunk;
  const int64_t at = blockIdx.x * kDeltaChunk, size = size_of(blockIdx.x, numel, kDeltaChunk);
  read_chunk(base + at, now + at, size, &chunk);
  if (threadIdx.x == 0) {
    sizes[blockIdx.x] = chunk.values ? blocks_in(size) + chunk.places + chunk.values : 0;
  }
}

// How many threads before this one have `marked`; all threads call it.
__device__ int rank_of(bool marked) {
  __shared__ int warps[kDeltaBlock / 32];
  const unsigned ballot = __ballot_sync(0xffffffff, marked);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane == 0) warps[warp] = __popc(ballot);
  __syncthreads();
  int rank = __popc(ballot & ((1u << lane) - 1));
  for (int w = 0; w < warp; ++w) rank += warps[w];
  __syncthreads();  // the buffer may be used again
  return rank;
}

// Byte `k` of a block's values, of which `picked` are the elements or steps.
template <typename T>
__device__ uint8_t value_byte(const T* picked, int64_t count, bool narrow, int64_t k) {
  if (!narrow) return static_cast<uint8_t>(picked[k / sizeof(T)] >> (8 * (k % sizeof(T))));
  if constexpr (sizeof(T) == 1) {
    const uint8_t second = 2 * k + 1 < count ? picked[2 * k + 1] : 0;
    return static_cast<uint8_t>((picked[2 * k] & 15) | (second << 4));
  } else {
    constexpr int64_t kHalf = sizeof(T) / 2;
    return static_cast<uint8_t>(picked[k / kHalf] >> (8 * (k % kHalf)));
  }
}

// The places of a block of `size` elements, one thread an element of rank `rank` if `marked`.
__device__ void write_places(uint8_t code, int64_t size, bool marked, int rank, uint8_t* out) {
  const uint8_t kind = kind_of(code);
  if (kind == kBitmap) {
    const unsigned ballot = __ballot_sync(0xffffffff, marked);
    const int lane = threadIdx.x % 32;
    const int64_t byte = threadIdx.x / 8;
    if (lane % 8 == 0 && byte < (size + 7) / 8) out[byte] = static_cast<uint8_t>(ballot >> lane);
  } else if (kind < kBitmap && marked) {
    out[rank] = static_cast<uint8_t>(threadIdx.x);
  }
}

template <typename T>
__global__ void write_kernel(T* base, const T* now, int64_t numel, const int64_t* bounds,
                             uint8_t* payload) {
  __shared__ Chunk chunk;
  __shared__ T picked[kDeltaBlock];
  const int64_t index = blockIdx.x, at = index * kDeltaChunk;
  const int64_t size = size_of(index, numel, kDeltaChunk), length = bounds[index + 1] - bounds[index];
  if (threadIdx.x < kDeltaEntry) {
    payload[kDeltaEntry * index + threadIdx.x] = static_cast<uint8_t>(length >> (8 * threadIdx.x));
  }
  if (length == 0) return;  // for all threads alike
  read_chunk(base + at, now + at, size, &chunk);
  uint8_t* out = payload + kDeltaEntry * gridDim.x + bounds[index];
  if (threadIdx.x < blocks_in(size)) out[threadIdx.x] = chunk.codes[threadIdx.x];
  uint8_t *places = out + blocks_in(size), *values = places + chunk.places;
  for (int64_t b = 0; b < blocks_in(size); ++b) {
    const uint8_t code = chunk.codes[b];
    if (code == 0) continue;
    const int64_t i = b * kDeltaBlock + threadIdx.x, here = size_of(b, size, kDeltaBlock);
    const bool there = i < size, narrow = code & kNarrow;
    const T element = there ? now[at + i] : T{0};
    const T step = there ? static_cast<T>(element - base[at + i]) : T{0};
    const int rank = rank_of(step != 0), count = chunk.counts[b];
    write_places(code, here, step != 0, rank, places);
    if (step != 0) picked[rank] = narrow ? step : element;
    if (step != 0) base[at + i] = element;
    __syncthreads();
    const int64_t num_values = value_bytes(code, count, sizeof(T));
    for (int64_t k = threadIdx.x; k < num_values; k += kDeltaBlock) {
      values[k] = value_byte(picked, count, narrow, k);
    }
    places += place_bytes(code, here);
    values += num_values;
    __syncthreads();  // `picked` may be filled again
  }
}

Tensor whole_payload(Tensor& base, const Tensor& now, int64_t num_bytes) {
  Tensor payload = torch::stable::new_empty(base, {num_bytes}, ScalarType::Byte);
  copy_on_device(payload.mutable_data_ptr(), now.const_data_ptr(), num_bytes, base);
  copy_on_device(base.mutable_data_ptr(), now.const_data_ptr(), num_bytes, base);
  return payload;
}

template <typename T>
Tensor encode(Tensor& base, const Tensor& now) {
  const int64_t numel = base.numel(), chunks = num_chunks(numel);
  T* x = static_cast<T*>(base.mutable_data_ptr());
  const T* y = static_cast<const T*>(now.const_data_ptr());
  Tensor sizes = torch::stable::new_empty(base, {chunks}, ScalarType::Long);
  size_kernel<T><<<chunks, kDeltaBlock, 0, current_stream(base)>>>(
      x, y, numel, sizes.mutable_data_ptr<int64_t>());
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  const Tensor bounds = bounds_of(sizes);
  const int64_t found = read_number(bounds, chunks);
  if (found == 0) return torch::stable::new_empty(base, {0}, ScalarType::Byte);
  const int64_t length = kDeltaEntry * chunks + found, whole = numel * static_cast<int64_t>(sizeof(T));
  if (length >= whole) return whole_payload(base, now, whole);

  Tensor payload = torch::stable::new_empty(base, {length}, ScalarType::Byte);
  write_kernel<T><<<chunks, kDeltaBlock, 0, current_stream(base)>>>(
      x, y, numel, bounds.const_data_ptr<int64_t>(),
      static_cast<uint8_t*>(payload.mutable_data_ptr()));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return payload;
}

// base, new [...] of 1, 2 or 4 bytes an element -> payload u8 [P]; base becomes new
Tensor delta_encode_cuda(Tensor base, const Tensor& now) {
  check_delta_encode(base, now);
  const torch::stable::accelerator::DeviceGuard guard(base.get_device_index());
  if (base.numel() == 0) return torch::stable::new_empty(base, {0}, ScalarType::Byte);

  const Tensor x = torch::stable::contiguous(now);
  const auto run = base.element_size() == 1   ? encode<uint8_t>
                   : base.element_size() == 2 ? encode<uint16_t>
                                              : encode<uint32_t>;
  return run(base, x);
}

}  // namespace
}  // namespace megarl

STABLE_TORCH_LIBRARY_IMPL(megarl, CUDA, m) {
  m.impl("delta_encode_", TORCH_BOX(&megarl::delta_encode_cuda));
}
