// Routed experts over the tokens that chose them: the twin of kernels/experts.py (architecture 7).
//
//     a = sum_e w_e w2_e act(w1_e x, w3_e x)
//
// A piece is up to kFewRows tokens of one expert, whose matrices are read where they lie. Outputs
// of all choices are kept apart and added up per token in the order of its choices: neither threads
// nor other tokens change a bit.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "few_rows.h"
#include "glu.h"
#include "scratch.h"

namespace kda {

// Choices first .. first + count - 1 of the order are this expert's.
struct ExpertPiece {
  int64_t expert, first, count;
};

struct ExpertPlan {
  std::vector<int64_t> order;  // choices (token * k + place), by expert
  std::vector<ExpertPiece> pieces;
};

// chosen [choices], each below `experts`.
inline ExpertPlan plan_experts(const int64_t* chosen, int64_t choices, int64_t experts) {
  ExpertPlan plan;
  thread_local std::vector<int64_t> begin;  // kept from call to call
  begin.assign(experts + 1, 0);
  for (int64_t c = 0; c < choices; ++c) ++begin[chosen[c] + 1];
  for (int64_t e = 0; e < experts; ++e) begin[e + 1] += begin[e];
  for (int64_t e = 0; e < experts; ++e) {
    for (int64_t at = begin[e]; at < begin[e + 1]; at += kFewRows) {
      plan.pieces.push_back({e, at, std::min(kFewRows, begin[e + 1] - at)});
    }
  }
  plan.order.resize(choices);
  for (int64_t c = 0; c < choices; ++c) plan.order[begin[chosen[c]]++] = c;
  return plan;
}

// Matrices of all experts, contiguous: w13 [E, 2I, L] with the gate first, w2 [E, L, I].
template <class A>
struct Experts {
  const A *w13, *w2;
  int64_t width, inner;  // L, I
  GLUForm form;
};

// Tokens [N, L] in memory's own type, k choices each.
template <class A>
struct Chosen {
  const A* x;
  int64_t x_stride, k;
};

template <class T>
struct ExpertRoom {
  Buffer<T> x, gate_up, hidden;
};

// One piece → the outputs of its choices, out [choices, L].
template <class T, class A>
void run_piece(const ExpertPlan& plan, const ExpertPiece& piece, const Experts<A>& experts,
               const Chosen<A>& tokens, T* out, ExpertRoom<T>& room) {
  const int64_t L = experts.width, I = experts.inner, count = piece.count;
  const int64_t* choices = plan.order.data() + piece.first;
  T *x = room.x.at_least(kFewRows * L), *gate_up = room.gate_up.at_least(kFewRows * 2 * I);
  T* hidden = room.hidden.at_least(kFewRows * I);
  for (int64_t i = 0; i < count; ++i) {
    const A* token = tokens.x + choices[i] / tokens.k * tokens.x_stride;
    for (int64_t d = 0; d < L; ++d) x[i * L + d] = widen<T>(token[d]);
  }
  const A *w13 = experts.w13 + piece.expert * 2 * I * L, *w2 = experts.w2 + piece.expert * L * I;
  few_rows(FewRows<T, A, T>{x, L, count, w13, L, L, gate_up, 2 * I}, 0, 2 * I);
  for (int64_t i = 0; i < count; ++i) {
    const T* gate = gate_up + i * 2 * I;
    glu<T>(hidden + i * I, gate, gate + I, I, experts.form);
  }
  few_rows(FewRows<T, A, T>{hidden, I, count, w2, I, I, x, L}, 0, L);
  for (int64_t i = 0; i < count; ++i) std::copy_n(x + i * L, L, out + choices[i] * L);
}

// The weighted sum of a token's k outputs [k, L] → y [L].
template <class T>
void add_up(T* y, const T* out, const T* weights, int64_t k, int64_t L) {
  std::fill_n(y, L, T(0));
  for (int64_t i = 0; i < k; ++i, out += L) {
    for (int64_t d = 0; d < L; ++d) y[d] = fma1(weights[i], out[d], y[d]);
  }
}

}  // namespace kda
