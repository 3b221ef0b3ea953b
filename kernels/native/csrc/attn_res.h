// Attention Residuals of one token and the RMS norm that reads them: the twin of
// kernels/attn_res.py (architecture 2.1).
//
//     s_j = (c . x_j) / sqrt(mean(x_j^2) + eps)      Mix = sum_j softmax(s)_j x_j
//
// Two passes over the sources, the second from the cache.
#pragma once

#include <algorithm>
#include <cstdint>

#include "norms.h"

namespace kda {

// The sources of one token: entries [m, width] of its bank, their inverse rms [m], and its prefix.
template <class T>
struct Sources {
  const T* bank;
  int64_t stride;
  const T* rms;
  int64_t m;
  const T* prefix;

  const T* at(int64_t j) const { return j < m ? bank + j * stride : prefix; }
};

// The mixture [width] under the pseudo-query c [width]; scores: room for m + 1.
template <class T>
void mix(T* to, const Sources<T>& sources, const T* c, int64_t width, T eps, T* scores) {
  const int64_t count = sources.m + 1;
  for (int64_t j = 0; j < count; ++j) {
    const T* x = sources.at(j);
    scores[j] = dot(c, x, width) * (j < sources.m ? sources.rms[j] : inverse_rms(x, width, eps));
  }
  const T largest = *std::max_element(scores, scores + count);
  T sum = 0;
  for (int64_t j = 0; j < count; ++j) sum += scores[j] = exponential(scores[j] - largest);
  for (int64_t j = 0; j < count; ++j) {
    const T weight = scores[j] / sum, *x = sources.at(j);
    for (int64_t i = 0; i < width; ++i) to[i] = j == 0 ? weight * x[i] : to[i] + weight * x[i];
  }
}

}  // namespace kda
