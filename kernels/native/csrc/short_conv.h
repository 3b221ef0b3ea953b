// The window of the short convolution, and its taps (architecture 3.2).
//
//     y_t = SiLU( sum_j w[:, j] x_(t - W + 1 + j) )
//
// Taps are added one after the other, each product rounded. A row's raw inputs lie behind its
// window, the W-1 inputs before its first token; the window after any of its tokens is the last W-1
// of both together.
#pragma once

#include <algorithm>
#include <cstdint>

#include "elementwise.h"

namespace kda {

// Raw inputs [T, channels] of one row in their own number type, and its window [W-1, channels]
// (null: zeros).
template <class A>
struct RawRow {
  const A* x;
  int64_t x_stride;
  const A* window;
  int64_t window_stride;
  int64_t width;  // W

  // The input `t`, counted from the row's first token, from -(W-1); null stands for zeros.
  const A* at(int64_t t) const {
    if (t >= 0) return x + t * x_stride;
    return window == nullptr ? nullptr : window + (width - 1 + t) * window_stride;
  }
};

// Inputs t = first-(W-1) .. first+count-1, channels from .. from+channels-1, in T:
// to[(W-1+count)][to_stride].
template <class T, class A>
void widen_inputs(T* to, int64_t to_stride, const RawRow<A>& row, int64_t first, int64_t count,
                  int64_t from, int64_t channels) {
  for (int64_t i = 0; i < row.width - 1 + count; ++i, to += to_stride) {
    const A* x = row.at(first - (row.width - 1) + i);
    if (x == nullptr) {
      std::fill_n(to, channels, T(0));
    } else {
      for (int64_t c = 0; c < channels; ++c) to[c] = widen<T>(x[from + c]);
    }
  }
}

// Weights [D, W], channels from .. from+channels-1, tap-first: to[W][to_stride].
template <class T>
void taps_first(T* to, int64_t to_stride, const T* weight, int64_t width, int64_t from,
                int64_t channels) {
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t j = 0; j < width; ++j) to[j * to_stride + c] = weight[(from + c) * width + j];
  }
}

// One token: W neighbours x [W][channels] and taps [W][channels] → y [channels], after SiLU.
template <class T>
void convolve(T* y, const T* x, const T* taps, int64_t width, int64_t channels) {
  for (int64_t c = 0; c < channels; ++c) y[c] = x[c] * taps[c];
  for (int64_t j = 1; j < width; ++j) {
    const T *xj = x + j * channels, *tap = taps + j * channels;
    for (int64_t c = 0; c < channels; ++c) y[c] = y[c] + xj[c] * tap[c];
  }
  for (int64_t c = 0; c < channels; ++c) y[c] = silu(y[c]);
}

// The window after `after` tokens of the row → to [W-1, channels], which may be the row's own
// window: inputs move towards older places only.
template <class A>
void write_window(A* to, int64_t to_stride, const RawRow<A>& row, int64_t after,
                  int64_t channels) {
  for (int64_t j = 0; j < row.width - 1; ++j, to += to_stride) {
    const A* x = row.at(after - (row.width - 1) + j);
    if (x == nullptr) {
      std::fill_n(to, channels, A{});
    } else {
      std::copy_n(x, channels, to);
    }
  }
}

}  // namespace kda
