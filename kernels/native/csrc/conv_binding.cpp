// The short convolution by itself, as torch sees it. (A layer's core has it inside.)
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "checks.hpp"
#include "scratch.h"
#include "short_conv.h"

namespace kda::ops {
namespace {

using namespace kda::checks;

constexpr int64_t kTogether = 32;  // tokens that are widened together, behind their window

// Tokens first .. first + count - 1 of a row.
struct Piece {
  int64_t row, first, count;
};

std::tuple<Tensor, Tensor, Tensor> short_conv(const Tensor& x, const Tensor& weight,
                                              const Tensor& conv0, IntArrayRef query_start,
                                              IntArrayRef export_rows, IntArrayRef export_after) {
  TORCH_CHECK_VALUE(x.dim() == 2 && weight.dim() == 2 && weight.size(1) > 0,
                    "x must be [tokens, D] and weight [D, W] with a tap, got ", x.sizes(), " and ",
                    weight.sizes());
  const int64_t N = x.size(0), D = x.size(1), W = weight.size(1);
  check_starts(query_start, N);
  check_exports(export_rows, export_after, query_start);
  const int64_t B = count(query_start) - 1, E = count(export_rows);
  check_shape("weight", weight, {D, W});
  check_shape("conv0", conv0, {B, W - 1, D});
  const auto element = x.scalar_type(), type = wide(element);
  check_dtype("x", x, element);
  check_dtype("conv0", conv0, element);
  check_dtype("weight", weight, weight.scalar_type());
  const Tensor raw = D < 2 || x.stride(1) == 1 ? x : x.contiguous();
  const Tensor windows = conv0.contiguous(), taps = typed(weight, type).contiguous();
  const Tensor y = empty({N, D}, type), conv = empty(conv0.sizes(), element);
  const Tensor exported = empty({E, W - 1, D}, element);
  std::vector<Piece> pieces;
  for (int64_t r = 0; r < B; ++r) {
    const int64_t length = query_start[r + 1] - query_start[r];
    for (int64_t first = 0; first < length; first += kTogether) {
      pieces.push_back({r, first, std::min(kTogether, length - first)});
    }
  }
  with_types("x", element, [&](auto number, auto memory) {
    using T = decltype(number);
    using A = decltype(memory);
    const auto row = [&](int64_t r) {
      return kda::RawRow<A>{data<A>(raw) + query_start[r] * raw.stride(0), raw.stride(0),
                            data<A>(windows) + r * (W - 1) * D, D, W};
    };
    std::vector<T> tap_major(W * D);
    kda::taps_first(tap_major.data(), D, data<T>(taps), W, 0, D);
    at::parallel_for(0, count(pieces), 1, [&](int64_t begin, int64_t end) {
      thread_local kda::Buffer<T> room;
      T* inputs = room.at_least((W - 1 + kTogether) * D);
      for (int64_t i = begin; i < end; ++i) {
        const Piece& piece = pieces[i];
        kda::widen_inputs(inputs, D, row(piece.row), piece.first, piece.count, 0, D);
        T* to = mutable_data<T>(y) + (query_start[piece.row] + piece.first) * D;
        for (int64_t t = 0; t < piece.count; ++t) {
          kda::convolve(to + t * D, inputs + t * D, tap_major.data(), W, D);
        }
      }
    });
    for (int64_t r = 0; r < B; ++r) {
      kda::write_window(mutable_data<A>(conv) + r * (W - 1) * D, D, row(r),
                        query_start[r + 1] - query_start[r], D);
    }
    for (int64_t e = 0; e < E; ++e) {
      kda::write_window(mutable_data<A>(exported) + e * (W - 1) * D, D, row(export_rows[e]),
                        export_after[e], D);
    }
  });
  return {y, conv, exported};
}

}  // namespace
}  // namespace kda::ops

using namespace kda::ops;

TORCH_LIBRARY_FRAGMENT(kda_native, m) {
  m.def(
      "short_conv(Tensor x, Tensor weight, Tensor conv0, int[] query_start, int[] export_rows, "
      "int[] export_after) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(kda_native, CPU, m) { m.impl("short_conv", TORCH_FN(short_conv)); }
