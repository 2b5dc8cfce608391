// Large pages for large outputs.
#pragma once

#include "../common.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace megarl {

// Asks for 2 MiB pages where `out` is large.  New memory is given page by page, each at the first write
// to it; at 4 KiB a page that costs more than a memory-bound kernel's work on it.  A hint: where the
// system does not follow it, nothing changes.
inline void advise_large_pages(Tensor& out) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = uintptr_t{2} << 20;
  const int64_t num_bytes = out.numel() * out.element_size();
  if (num_bytes < static_cast<int64_t>(2 * kPage)) return;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(out.mutable_data_ptr());
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage, last = (begin + num_bytes) / kPage * kPage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

}  // namespace megarl
