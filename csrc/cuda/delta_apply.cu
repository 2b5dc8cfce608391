// delta_apply_ on CUDA: one thread block a chunk.
//
// 1. One kernel checks every chunk and writes nothing, the next one writes.  What the first found is
//    read on the host, for which the call waits for the device: a payload comes over a network, and a
//    damaged one must be an error of this call and not the end of the process.
// 2. A payload may begin at any address: numbers are read byte by byte.
#include "delta.cuh"

namespace megarl {
namespace {

// Where the places and values of a chunk's blocks begin, from the chunk's first byte on.
struct Layout {
  int counts[kDeltaBlocks];
  int64_t places[kDeltaBlocks], values[kDeltaBlocks];
  int64_t length;
};

__device__ int64_t sum_before(int64_t x) {  // over the lanes of the first half of a warp
  int64_t sum = x;
  for (int reach = 1; reach < kDeltaBlocks; reach *= 2) {
    const int64_t more = __shfl_up_sync(0xffff, sum, reach);
    if (threadIdx.x >= reach) sum += more;
  }
  return sum - x;
}

__device__ int count_bits(const uint8_t* bytes, int64_t count) {
  int sum = 0;
  for (int64_t k = 0; k < count; ++k) sum += __popc(bytes[k]);
  return sum;
}

// By the first kDeltaBlocks threads alone, of which each has one block; the others may not call it.
// Returns this block's fault, the same kind on all of them where it is about the whole chunk.
__device__ int read_layout(const uint8_t* chunk, int64_t num_bytes, int64_t size, int64_t item,
                           Layout* layout) {
  const int64_t b = threadIdx.x, blocks = blocks_in(size);
  const int64_t here = b < blocks ? size_of(b, size, kDeltaBlock) : 0;
  if (num_bytes < blocks) return kBadLength;
  const uint8_t code = b < blocks ? chunk[b] : 0;
  if (__any_sync(0xffff, !is_code(code))) return kBadCode;
  const int64_t mine = place_bytes(code, here), places = blocks + sum_before(mine);
  const int64_t values_begin = __shfl_sync(0xffff, places + mine, kDeltaBlocks - 1);
  if (values_begin > num_bytes) return kBadLength;
  const uint8_t kind = kind_of(code);
  const int count = kind == kAll      ? static_cast<int>(here)
                    : kind == kBitmap ? count_bits(chunk + places, mine)
                                      : kind;
  const int64_t taken = value_bytes(code, count, item), values = values_begin + sum_before(taken);
  layout->counts[b] = count;
  layout->places[b] = places;
  layout->values[b] = values;
  if (b == kDeltaBlocks - 1) layout->length = values + taken;
  __syncwarp(0xffff);
  return kNoFault;
}

// Whether these are places of a block of `size` elements, as far as this thread sees it.
__device__ bool are_places(uint8_t code, const uint8_t* places, int64_t size) {
  const int64_t k = threadIdx.x;
  const uint8_t kind = kind_of(code);
  if (kind == kBitmap) {
    return k != size / 8 || size % 8 == 0 || places[k] >> (size % 8) == 0;
  }
  if (kind == kAll || k >= kind) return true;
  return places[k] < size && (k == 0 || places[k] > places[k - 1]);
}

// The least of chunk * kNumFaults + fault goes to `first_fault`.
__global__ void check_kernel(const uint8_t* payload, const int64_t* bounds, int64_t numel,
                             int64_t item, long long* first_fault) {
  __shared__ Layout layout;
  __shared__ int fault;
  const int64_t index = blockIdx.x, size = size_of(index, numel, kDeltaChunk);
  const int64_t num_bytes = bounds[index + 1] - bounds[index];
  if (num_bytes == 0) return;  // for all threads alike
  const uint8_t* chunk = payload + kDeltaEntry * gridDim.x + bounds[index];
  if (threadIdx.x < kDeltaBlocks) {
    const int found = read_layout(chunk, num_bytes, size, item, &layout);
    if (threadIdx.x == 0) fault = found;
  }
  __syncthreads();
  bool sound = true;
  if (fault == kNoFault) {
    for (int64_t b = 0; b < blocks_in(size); ++b) {
      sound &= are_places(chunk[b], chunk + layout.places[b], size_of(b, size, kDeltaBlock));
    }
  }
  const bool disorder = __syncthreads_or(!sound);
  if (threadIdx.x != 0) return;
  const int found = fault != kNoFault          ? fault
                    : disorder                 ? kBadPlace
                    : layout.length != num_bytes ? kBadLength
                                               : kNoFault;
  if (found != kNoFault) atomicMin(first_fault, static_cast<long long>(index * kNumFaults + found));
}

// Value `k` of a block: its step or its bit pattern.
template <typename T>
__device__ T value_at(const uint8_t* values, bool narrow, int64_t k) {
  if constexpr (sizeof(T) == 1) {
    return narrow ? widened<T>(static_cast<T>(values[k / 2] >> (4 * (k % 2)))) : values[k];
  } else {
    const int64_t width = narrow ? sizeof(T) / 2 : sizeof(T);
    T value = 0;
    for (int64_t n = 0; n < width; ++n) {
      value = static_cast<T>(value | static_cast<T>(values[width * k + n]) << (8 * n));
    }
    return narrow ? widened<T>(value) : value;
  }
}

// Of this thread's element of a block: how many marked ones come before it, or -1 if it is not marked.
__device__ int rank_in_bitmap(const uint8_t* places, int64_t size) {
  const int64_t i = threadIdx.x;
  if (i >= size || !((places[i / 8] >> (i % 8)) & 1)) return -1;
  return count_bits(places, i / 8) + __popc(places[i / 8] & ((1 << (i % 8)) - 1));
}

template <typename T>
__global__ void write_kernel(T* base, int64_t numel, const uint8_t* payload, const int64_t* bounds) {
  __shared__ Layout layout;
  const int64_t index = blockIdx.x, size = size_of(index, numel, kDeltaChunk);
  const int64_t num_bytes = bounds[index + 1] - bounds[index];
  if (num_bytes == 0) return;
  const uint8_t* chunk = payload + kDeltaEntry * gridDim.x + bounds[index];
  if (threadIdx.x < kDeltaBlocks) read_layout(chunk, num_bytes, size, sizeof(T), &layout);
  __syncthreads();
  for (int64_t b = 0; b < blocks_in(size); ++b) {
    const uint8_t code = chunk[b], kind = kind_of(code);
    const uint8_t* places = chunk + layout.places[b];
    const int64_t k = threadIdx.x, here = size_of(b, size, kDeltaBlock);
    // Which value this thread has, and for which element of the block.
    const int64_t rank = kind == kBitmap ? rank_in_bitmap(places, here)
                         : k < layout.counts[b] ? k
                                                : -1;
    if (rank < 0) continue;
    const int64_t i = kind < kBitmap ? places[rank] : k;
    const bool narrow = code & kNarrow;
    const T value = value_at<T>(chunk + layout.values[b], narrow, rank);
    T* element = base + index * kDeltaChunk + b * kDeltaBlock + i;
    *element = narrow ? static_cast<T>(*element + value) : value;
  }
}

// Sizes of the chunks as the table says.
__global__ void table_kernel(const uint8_t* payload, int64_t chunks, int64_t* sizes) {
  const int64_t c = blockIdx.x * int64_t{kDeltaBlock} + threadIdx.x;
  if (c < chunks) sizes[c] = payload[kDeltaEntry * c] + 256 * payload[kDeltaEntry * c + 1];
}

template <typename T>
void apply(Tensor& base, const uint8_t* payload, const Tensor& bounds) {
  write_kernel<T><<<bounds.numel() - 1, kDeltaBlock, 0, current_stream(base)>>>(
      static_cast<T*>(base.mutable_data_ptr()), base.numel(), payload,
      bounds.const_data_ptr<int64_t>());
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void check_chunks(const Tensor& base, const uint8_t* payload, const Tensor& bounds) {
  const int64_t none = (bounds.numel() - 1) * kNumFaults;  // after every chunk's
  Tensor fault = torch::stable::new_empty(bounds, {1}, ScalarType::Long);
  torch::stable::fill_(fault, static_cast<double>(none));
  check_kernel<<<bounds.numel() - 1, kDeltaBlock, 0, current_stream(base)>>>(
      payload, bounds.const_data_ptr<int64_t>(), base.numel(), base.element_size(),
      reinterpret_cast<long long*>(fault.mutable_data_ptr<int64_t>()));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  const int64_t first = read_number(fault, 0);
  if (first != none) refuse_delta_chunk(first / kNumFaults, static_cast<int>(first % kNumFaults));
}

// base [...] of 1, 2 or 4 bytes an element, payload u8 [P] of it; base becomes what was encoded
void delta_apply_cuda(Tensor base, const Tensor& payload) {
  check_delta_apply(base, payload);
  const torch::stable::accelerator::DeviceGuard guard(base.get_device_index());
  const int64_t numel = base.numel(), item = base.element_size(), given = payload.numel();
  if (given == 0) return;

  const Tensor in = torch::stable::contiguous(payload);
  const auto* bytes = static_cast<const uint8_t*>(in.const_data_ptr());
  if (given == numel * item) return copy_on_device(base.mutable_data_ptr(), bytes, given, base);
  const int64_t chunks = num_chunks(numel);
  Tensor sizes = torch::stable::new_empty(base, {chunks}, ScalarType::Long);
  table_kernel<<<(chunks + kDeltaBlock - 1) / kDeltaBlock, kDeltaBlock, 0, current_stream(base)>>>(
      bytes, chunks, sizes.mutable_data_ptr<int64_t>());
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  const Tensor bounds = bounds_of(sizes);
  check_delta_table(read_number(bounds, chunks), given - kDeltaEntry * chunks);
  check_chunks(base, bytes, bounds);
  const auto run = item == 1 ? apply<uint8_t> : item == 2 ? apply<uint16_t> : apply<uint32_t>;
  run(base, bytes, bounds);
}

}  // namespace
}  // namespace megarl

STABLE_TORCH_LIBRARY_IMPL(megarl, CUDA, m) {
  m.impl("delta_apply_", TORCH_BOX(&megarl::delta_apply_cuda));
}
