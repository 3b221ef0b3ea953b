// Products of few rows with a matrix that is read once, from its first row to its last:
//
//     out[m][n] = sum_k x[m][k] w[n][k]
//
// A matrix that no cache holds takes the time that reading it takes, and the hardware reads ahead
// best along a single line of addresses; so one row of w meets all rows of x before the next one.
// Every sum has the same order whatever stands beside it: a row of x gets the same bits alone and
// among others.
#pragma once

#include <bit>
#include <cstdint>

#include "elementwise.h"

namespace kda {

// Rows of x that share one pass over a row of w: as many as have their two sums in registers.
inline constexpr int kTogether = 8;

template <class T, class A>
struct FewRows {
  const T* x;  // [M, K], rows any distance apart
  int64_t x_stride, M;
  const A* w;  // [N, K], the same
  int64_t w_stride, K;
  A* out;  // [M, N]
  int64_t out_stride;
};

// One row of w with rows m .. m + together - 1 of x; even and odd vectors in sums of their own.
template <int together, class T, class A>
KDA_INLINE void meet(const FewRows<T, A>& product, int64_t m, int64_t n) {
  constexpr int L = kLanes<T>;
  const A* w = product.w + n * product.w_stride;
  const T* x = product.x + m * product.x_stride;
  Vec<T> even[together]{}, odd[together]{};
  int64_t k = 0;
  for (; k + 2 * L <= product.K; k += 2 * L) {
    const Vec<T> w0 = load_wide<T>(w + k), w1 = load_wide<T>(w + k + L);
    for (int r = 0; r < together; ++r) {
      const T* row = x + r * product.x_stride + k;
      even[r] = fma<T>(w0, load(row), even[r]);
      odd[r] = fma<T>(w1, load(row + L), odd[r]);
    }
  }
  for (int r = 0; r < together; ++r) {
    T sum = sum_of_lanes<T>(even[r] + odd[r]);
    for (int64_t rest = k; rest < product.K; ++rest) {
      sum = fma1(widen<T>(w[rest]), x[r * product.x_stride + rest], sum);
    }
    product.out[(m + r) * product.out_stride + n] = narrow<A>(sum);
  }
}

// Columns first .. last - 1 of the result.
template <class T, class A>
void few_rows(const FewRows<T, A>& product, int64_t first, int64_t last) {
  for (int64_t n = first; n < last; ++n) {
    int64_t m = 0;
    for (; m + kTogether <= product.M; m += kTogether) meet<kTogether>(product, m, n);
    for (; m + 2 <= product.M; m += 2) meet<2>(product, m, n);
    if (m < product.M) meet<1>(product, m, n);
  }
}

}  // namespace kda
