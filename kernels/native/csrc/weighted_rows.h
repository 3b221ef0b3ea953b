// Sums of weighted rows, and the running softmax that weighs them:
//
//     C[m] += sum_j p[m][j] b[j]
//
// Every number of C adds its products in the order of j, one rounding each, however the sum is
// tiled and wherever the rows b are interrupted.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "elementwise.h"

namespace kda {

template <class T, class A>
struct WeightedRows {
  T* C;  // [M, width], rows any distance apart
  int64_t C_stride, M, width;
  const T* p;  // [M, n]
  int64_t p_stride, n;
  const A* b;  // [n, width]
  int64_t b_stride;
};

namespace detail {

template <int rows, int vectors, class T, class A>
KDA_INLINE void add_tile(const WeightedRows<T, A>& sum, int64_t m, int64_t column) {
  constexpr int L = kLanes<T>;
  T* C = sum.C + m * sum.C_stride + column;
  Vec<T> tile[rows * vectors];
#pragma GCC unroll 32
  for (int i = 0; i < rows * vectors; ++i) {
    tile[i] = load(C + i / vectors * sum.C_stride + i % vectors * L);
  }
  const A* b = sum.b + column;
  const T* p = sum.p + m * sum.p_stride;
  for (int64_t j = 0; j < sum.n; ++j, b += sum.b_stride) {
    Vec<T> row[vectors];
#pragma GCC unroll 32
    for (int v = 0; v < vectors; ++v) {
      row[v] = load_wide<T>(b + v * L);
      keep<T>(row[v]);
    }
#pragma GCC unroll 32
    for (int r = 0; r < rows; ++r) {
      const Vec<T> weight = broadcast(p[r * sum.p_stride + j]);
#pragma GCC unroll 32
      for (int v = 0; v < vectors; ++v) {
        tile[r * vectors + v] = fma<T>(weight, row[v], tile[r * vectors + v]);
      }
    }
  }
#pragma GCC unroll 32
  for (int i = 0; i < rows * vectors; ++i) {
    store(C + i / vectors * sum.C_stride + i % vectors * L, tile[i]);
  }
}

template <int rows, class T, class A>
void add_rows(const WeightedRows<T, A>& sum, int64_t m) {
  constexpr int L = kLanes<T>;
  int64_t column = 0;
  for (; column + 4 * L <= sum.width; column += 4 * L) add_tile<rows, 4>(sum, m, column);
  for (; column + L <= sum.width; column += L) add_tile<rows, 1>(sum, m, column);
  for (; column < sum.width; ++column) {
    for (int64_t r = m; r < m + rows; ++r) {
      T& C = sum.C[r * sum.C_stride + column];
      for (int64_t j = 0; j < sum.n; ++j) {
        const T b = widen<T>(sum.b[j * sum.b_stride + column]);
        C = fma1(sum.p[r * sum.p_stride + j], b, C);
      }
    }
  }
}

template <class T>
KDA_INLINE T largest_of(const T* x, int64_t count, T largest) {
  constexpr int L = kLanes<T>;
  int64_t i = 0;
  if (count >= L) {
    Vec<T> best = load(x);
    for (i = L; i + L <= count; i += L) {
      const Vec<T> next = load(x + i);
      best = next > best ? next : best;
    }
    T lanes[L];
    store(lanes, best);
    for (int half = L / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) lanes[i] = std::max(lanes[i], lanes[i + half]);
    }
    largest = std::max(largest, lanes[0]);
  }
  for (; i < count; ++i) largest = std::max(largest, x[i]);
  return largest;
}

}  // namespace detail

template <class T, class A>
void add_weighted(const WeightedRows<T, A>& sum) {
  int64_t m = 0;
  for (; m + 6 <= sum.M; m += 6) detail::add_rows<6>(sum, m);
  for (; m + 2 <= sum.M; m += 2) detail::add_rows<2>(sum, m);
  if (m < sum.M) detail::add_rows<1>(sum, m);
}

// One block's sums [M, width] join those of earlier ones, scale[m] times. A long sum in blocks
// rounds like a short one.
template <class T>
void join(T* C, const T* block, const T* scale, int64_t M, int64_t width) {
  for (int64_t m = 0; m < M; ++m, C += width, block += width) {
    for (int64_t d = 0; d < width; ++d) C[d] = fma1(C[d], scale[m], block[d]);
  }
}

// A softmax that has seen some of its scores.
template <class T>
struct RunningSoftmax {
  T largest = -std::numeric_limits<T>::infinity();
  T sum = 0;

  // The next `count` scores, of which the first `visible` count, become weights relative to the
  // largest so far; returns what sums of earlier weights must be multiplied by.
  T weigh(T* scores, int64_t visible, int64_t count) {
    std::fill(scores + visible, scores + count, T(0));
    if (visible == 0) return T(1);
    const T now = detail::largest_of(scores, visible, largest);
    const T scale = exponential(largest - now);
    for (int64_t j = 0; j < visible; ++j) scores[j] = exponential(scores[j] - now);
    sum = sum * scale + total(scores, visible);
    largest = now;
    return scale;
  }

 private:
  static T total(const T* x, int64_t count) {
    constexpr int L = kLanes<T>;
    Vec<T> sums{};
    int64_t i = 0;
    for (; i + L <= count; i += L) sums = sums + load(x + i);
    T total;
    sums_of_lanes<T, 1>(&total, &sums);
    for (; i < count; ++i) total += x[i];
    return total;
  }
};

}  // namespace kda
