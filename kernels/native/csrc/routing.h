// The choice of experts of one token: the twin of kernels/routing.py (architecture 7).
//
//     s = sigmoid(logits)    pick = top-k of s + bias    w = s / (sum of picked s + 1e-20) factor
//
// Better is greater, NaN the greatest as in torch's sort, and of equals the lower index.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "elementwise.h"

namespace kda {

struct RouterRule {
  int64_t top_k, groups, kept_groups;
  bool renormalise;
  double factor;
};

template <class T>
KDA_INLINE bool better(T a, T b) {
  return a > b || (std::isnan(a) && !std::isnan(b));
}

// The k best of `count` values, best first → places; k is not more than count.
template <class T>
void best(int64_t* places, const T* values, int64_t count, int64_t k) {
  for (int64_t i = 0, filled = 0; i < count; ++i) {
    if (filled == k && !better(values[i], values[places[k - 1]])) continue;
    int64_t at = filled < k ? filled++ : k - 1;
    for (; at > 0 && better(values[i], values[places[at - 1]]); --at) places[at] = places[at - 1];
    places[at] = i;
  }
}

// Values outside of the kept groups become -inf. room: a value and a place for each group.
template <class T>
void keep_groups(T* values, int64_t count, const RouterRule& rule, T* sums, int64_t* kept) {
  const int64_t each = count / rule.groups;
  for (int64_t g = 0; g < rule.groups; ++g) {
    int64_t two[2];
    const T* group = values + g * each;
    best(two, group, each, std::min<int64_t>(2, each));
    sums[g] = group[two[0]] + (each > 1 ? group[two[1]] : T(0));
  }
  best(kept, sums, rule.groups, rule.kept_groups);
  for (int64_t g = 0; g < rule.groups; ++g) {
    if (std::find(kept, kept + rule.kept_groups, g) == kept + rule.kept_groups) {
      std::fill_n(values + g * each, each, -std::numeric_limits<T>::infinity());
    }
  }
}

// Room for the choices of one token among `experts` experts.
template <class T>
struct RouterRoom {
  T *biased, *sums;  // [experts], [groups]
  int64_t* kept;     // [groups]
};

// Scores of one token [experts] → its choices [k]; false if fewer than k are above -inf.
template <class T>
bool choose(int64_t* chosen, const T* scores, const T* bias, int64_t experts,
            const RouterRule& rule, const RouterRoom<T>& room) {
  for (int64_t e = 0; e < experts; ++e) room.biased[e] = scores[e] + bias[e];
  if (rule.groups > 1) keep_groups(room.biased, experts, rule, room.sums, room.kept);
  best(chosen, room.biased, experts, rule.top_k);
  const T last = room.biased[chosen[rule.top_k - 1]];
  return last != -std::numeric_limits<T>::infinity();
}

// The weights [k] of a token's choices.
template <class T>
void weigh(T* weights, const T* scores, const int64_t* chosen, const RouterRule& rule) {
  T sum = 0;
  for (int64_t i = 0; i < rule.top_k; ++i) sum += weights[i] = scores[chosen[i]];
  const T divisor = rule.renormalise ? sum + T(1e-20) : T(1);
  for (int64_t i = 0; i < rule.top_k; ++i) {
    weights[i] = weights[i] / divisor * static_cast<T>(rule.factor);
  }
}

}  // namespace kda
