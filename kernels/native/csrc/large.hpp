// Tensors that are larger than any cache, for results that are written once from end to end.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace kda {

// at::empty whose memory, if there is much of it, comes in huge pages where the system has them: a
// long result is new memory, and taking it page by page is a noticeable part of writing it.
inline at::Tensor empty_for_long(at::IntArrayRef sizes, const at::TensorOptions& options) {
  at::Tensor x = at::empty(sizes, options);
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHuge = uintptr_t(2) << 20;
  const auto begin = reinterpret_cast<uintptr_t>(x.mutable_data_ptr());
  const uintptr_t first = (begin + kHuge - 1) / kHuge * kHuge;
  const uintptr_t end = (begin + x.nbytes()) / kHuge * kHuge;
  if (first + 8 * kHuge < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#endif
  return x;
}

}  // namespace kda
