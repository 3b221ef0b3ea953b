// New tensors and views of tensors, made without torch's dispatcher: of one token, two hundred of
// them cost a tenth of a step through it. For arguments that no gradient is asked for.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace kda {

using at::IntArrayRef;
using at::Tensor;

inline Tensor empty(IntArrayRef sizes, at::ScalarType dtype) {
  return Tensor(at::detail::empty_cpu(sizes, dtype));
}

// empty() whose memory, if there is much of it, comes in huge pages where the system has them: a
// long result is new memory, and taking it page by page is a noticeable part of writing it.
inline Tensor empty_for_long(IntArrayRef sizes, at::ScalarType dtype) {
  Tensor x = empty(sizes, dtype);
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHuge = uintptr_t(2) << 20;
  const auto begin = reinterpret_cast<uintptr_t>(x.mutable_data_ptr());
  const uintptr_t first = (begin + kHuge - 1) / kHuge * kHuge;
  const uintptr_t end = (begin + x.nbytes()) / kHuge * kHuge;
  if (first + 8 * kHuge < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#endif
  return x;
}

// x in a number type: itself where it is in it already.
inline Tensor typed(const Tensor& x, at::ScalarType dtype) {
  return x.scalar_type() == dtype ? x : x.to(dtype);
}

// The numbers of x under other sizes and strides, from `offset` numbers behind its first.
inline Tensor view_of(const Tensor& x, IntArrayRef sizes, IntArrayRef strides, int64_t offset) {
  Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(x.storage()), x.key_set(), x.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, x.storage_offset() + offset);
  return view;
}

// Columns first .. first + width - 1 of x [N, ...].
inline Tensor columns(const Tensor& x, int64_t first, int64_t width) {
  return view_of(x, {x.size(0), width}, {x.stride(0), x.stride(1)}, first * x.stride(1));
}

// x[i] along its first axis.
inline Tensor entry(const Tensor& x, int64_t i) {
  return view_of(x, x.sizes().slice(1), x.strides().slice(1), i * x.stride(0));
}

}  // namespace kda
