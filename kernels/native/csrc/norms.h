// RMS norms and sigmoid gates of one token: the twins of kernels/norms.py.
//
//     y = w x / sqrt(mean(x^2) + eps)          y = w o / sqrt(mean(o^2) + eps) sigmoid(gate)
//
// X, Y and G are number types of memory; everything between is in T.
#pragma once

#include <cmath>
#include <cstdint>

#include "elementwise.h"

namespace kda {

template <class T>
KDA_INLINE T inverse_rms(const T* x, int64_t width, T eps) {
  return T(1) / std::sqrt(dot(x, x, width) / static_cast<T>(width) + eps);
}

// x [width] → y [width]; room [width] is used where X is not T.
template <class T, class X, class Y>
void rms_norm(Y* y, const X* x, const T* weight, int64_t width, T eps, T* room) {
  const T* wide = widened(x, width, room);
  const T factor = inverse_rms(wide, width, eps);
  for (int64_t i = 0; i < width; ++i) y[i] = narrow<Y>(wide[i] * factor * weight[i]);
}

// o [H, V], each head normed, times sigmoid of the gate [H V] → y [H V]; o_stride between heads.
template <class T, class G>
void gated_norm(G* y, const T* o, int64_t o_stride, const G* gate, const T* weight, int64_t heads,
                int64_t V, T eps) {
  for (int64_t h = 0; h < heads; ++h, y += V, o += o_stride, gate += V) {
    const T factor = inverse_rms(o, V, eps);
    for (int64_t i = 0; i < V; ++i) {
      y[i] = narrow<G>(o[i] * factor * weight[i] * sigmoid(widen<T>(gate[i])));
    }
  }
}

// o times sigmoid of the gate.
template <class T, class O, class G>
void gated(G* y, const O* o, const G* gate, int64_t width) {
  for (int64_t i = 0; i < width; ++i) {
    y[i] = narrow<G>(widen<T>(o[i]) * sigmoid(widen<T>(gate[i])));
  }
}

}  // namespace kda
