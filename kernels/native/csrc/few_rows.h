// Products of rows with the rows of a matrix that lie where they lie:
//
//     out[m][n] = sum_k x[m][k] w[n][k]
//
// A matrix that no cache holds takes the time that reading it takes, and the hardware reads ahead
// best along a single line of addresses; so for few rows of x one row of w meets all of them before
// the next one. Where x has more rows, arithmetic is what takes time, and tiles load less for it.
// Every sum has the same order whatever stands beside it: a row of x gets the same bits alone and
// among others.
#pragma once

#include <bit>
#include <cstdint>

#include "elementwise.h"

namespace kda {

// Rows of x that share one pass over a row of w: as many as have their two sums in registers.
inline constexpr int kTogether = 8;
// Rows of x in one call that stay in a first-level cache while w goes by.
inline constexpr int64_t kFewRows = 24;

// x is in T, w in memory's own A, out in Y.
template <class T, class A, class Y>
struct FewRows {
  const T* x;  // [M, K], rows any distance apart
  int64_t x_stride, M;
  const A* w;  // [N, K], the same
  int64_t w_stride, K;
  Y* out;  // [M, N]
  int64_t out_stride;
};

// Rows n .. n + columns - 1 of w with rows m .. m + rows - 1 of x; even and odd vectors in sums of
// their own.
template <int rows, int columns, class T, class A, class Y>
KDA_INLINE void meet(const FewRows<T, A, Y>& product, int64_t m, int64_t n) {
  constexpr int L = kLanes<T>;
  const A* w = product.w + n * product.w_stride;
  const T* x = product.x + m * product.x_stride;
  Vec<T> even[rows * columns], odd[rows * columns];
#pragma GCC unroll 16
  for (int i = 0; i < rows * columns; ++i) even[i] = odd[i] = Vec<T>{};
  int64_t k = 0;
  for (; k + 2 * L <= product.K; k += 2 * L) {
    Vec<T> w0[columns], w1[columns];
#pragma GCC unroll 16
    for (int c = 0; c < columns; ++c) {
      w0[c] = load_wide<T>(w + c * product.w_stride + k);
      w1[c] = load_wide<T>(w + c * product.w_stride + k + L);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      const T* row = x + r * product.x_stride + k;
      Vec<T> x0 = load(row), x1 = load(row + L);
      if constexpr (columns > 1) keep<T>(x0), keep<T>(x1);
#pragma GCC unroll 16
      for (int c = 0; c < columns; ++c) {
        even[r * columns + c] = fma<T>(w0[c], x0, even[r * columns + c]);
        odd[r * columns + c] = fma<T>(w1[c], x1, odd[r * columns + c]);
      }
    }
  }
  Vec<T> both[rows * columns];
#pragma GCC unroll 16
  for (int i = 0; i < rows * columns; ++i) both[i] = even[i] + odd[i];
  T sums[rows * columns];
  sums_of_lanes<T, rows * columns>(sums, both);
  for (; k < product.K; ++k) {
    for (int i = 0; i < rows * columns; ++i) {
      const T weight = widen<T>(w[i % columns * product.w_stride + k]);
      sums[i] = fma1(weight, x[i / columns * product.x_stride + k], sums[i]);
    }
  }
  Y* out = product.out + m * product.out_stride + n;
#pragma GCC unroll 16
  for (int i = 0; i < rows * columns; ++i) {
    out[i / columns * product.out_stride + i % columns] = narrow<Y>(sums[i]);
  }
}

// `columns` rows of w from row n on with all rows of x, `rows` at a time.
template <int rows, int columns, class T, class A, class Y>
KDA_INLINE void meet_all(const FewRows<T, A, Y>& product, int64_t n) {
  int64_t m = 0;
  for (; m + rows <= product.M; m += rows) meet<rows, columns>(product, m, n);
  for (; m + 2 <= product.M; m += 2) meet<2, columns>(product, m, n);
  if (m < product.M) meet<1, columns>(product, m, n);
}

// Columns first .. last - 1 of the result.
template <class T, class A, class Y>
void few_rows(const FewRows<T, A, Y>& product, int64_t first, int64_t last) {
  int64_t n = first;
  if (product.M > kTogether) {
    for (; n + 2 <= last; n += 2) meet_all<6, 2>(product, n);
  }
  for (; n < last; ++n) meet_all<kTogether, 1>(product, n);
}

}  // namespace kda
