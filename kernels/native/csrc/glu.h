// Gated activations: the twins of kernels/glu.py.
//
//     SiTU-GLU(a, b) = b1 tanh(a / b1) sigmoid(a) * b2 tanh(b / b2)      SwiGLU(a, b) = SiLU(a) b
#pragma once

#include <cstdint>
#include <optional>

#include "elementwise.h"

namespace kda {

struct GLUForm {
  bool situ;
  double beta;
  std::optional<double> linear_beta;
};

template <class T>
KDA_INLINE T capped(T x, T cap) {
  return cap * tanh(x / cap);
}

// gate [count], up [count] → y [count].
template <class T, class A>
void glu(A* y, const A* gate, const A* up, int64_t count, const GLUForm& form) {
  const T beta = static_cast<T>(form.beta), linear = static_cast<T>(form.linear_beta.value_or(1));
  if (!form.situ) {
    for (int64_t i = 0; i < count; ++i) {
      y[i] = narrow<A>(silu(widen<T>(gate[i])) * widen<T>(up[i]));
    }
  } else if (!form.linear_beta) {
    for (int64_t i = 0; i < count; ++i) {
      const T a = widen<T>(gate[i]);
      y[i] = narrow<A>(capped(a, beta) * sigmoid(a) * widen<T>(up[i]));
    }
  } else {
    for (int64_t i = 0; i < count; ++i) {
      const T a = widen<T>(gate[i]);
      y[i] = narrow<A>(capped(a, beta) * sigmoid(a) * capped(widen<T>(up[i]), linear));
    }
  }
}

}  // namespace kda
