// The delta rule over one slice of a head's state (architecture 3.6).
//
// With alpha = e^g, S~ = S diag(alpha), u = beta (v - S~ k):
//
//     S' = S~ + u k^T          o = S' q = S~ q + u (k . q)
//
// so both reads see the decayed state, and one pass over it does everything: it writes the
// previous token's u k^T, decays, and reads with k and with q. Each state element is loaded and
// stored once a token. The slice is held key-first, [K][width], value channels side by side in
// vectors: a channel's sums run over K in order, and its bits depend on nothing but its own row and
// column.
//
// Prefill and decode are this one function; a cut between tokens changes no operation and no bit.
#pragma once

#include <algorithm>
#include <cstdint>

#include "simd.h"

namespace kda {

inline constexpr int kMaxVectors = 4;
inline constexpr int kSliceBytes = 16 * 1024;

// How many vectors side by side make a slice for key width K: as many as fill half of a common
// first-level cache. Changes no bit.
inline int slice_vectors(int64_t K) {
  int vectors = kMaxVectors;
  while (vectors > 1 && K * vectors * kVectorBytes > kSliceBytes) vectors /= 2;
  return vectors;
}

// Operands of tokens of one head: alpha, k, q [tokens][K] (q with the scale in it),
// v [tokens][v_stride], beta and kq = k . q [tokens]. Rows of v are whole vectors long.
template <class T>
struct Tokens {
  const T* alpha;
  const T* k;
  const T* q;
  const T* v;
  const T* beta;
  const T* kq;
  int64_t K;
  int64_t v_stride;
};

namespace detail {

template <class T, int M, bool write>
KDA_INLINE void pass(T* slice, int64_t K, const T* written, const Vec<T>* u, const T* alpha,
                     const T* k, const T* q, Vec<T>* by_k, Vec<T>* by_q) {
  constexpr int L = kLanes<T>;
  Vec<T> rk[M] = {}, rq[M] = {};
  for (int64_t d = 0; d < K; ++d) {
    const Vec<T> decay = broadcast(alpha[d]), key = broadcast(k[d]), query = broadcast(q[d]);
    T* row = slice + d * M * L;
    for (int m = 0; m < M; ++m) {
      Vec<T> s = load(row + m * L);
      if constexpr (write) s = fma<T>(u[m], broadcast(written[d]), s);
      s = s * decay;
      rk[m] = fma<T>(s, key, rk[m]);
      rq[m] = fma<T>(s, query, rq[m]);
      store(row + m * L, s);
    }
  }
  for (int m = 0; m < M; ++m) by_k[m] = rk[m], by_q[m] = rq[m];
}

template <class T, int M>
void advance(T* slice, const Tokens<T>& in, int64_t column, int64_t first, int64_t last, T* out,
             int64_t out_stride) {
  constexpr int L = kLanes<T>;
  const int64_t K = in.K;
  Vec<T> u[M] = {}, by_k[M], by_q[M];
  for (int64_t t = first; t < last; ++t) {
    const T *alpha = in.alpha + t * K, *k = in.k + t * K, *q = in.q + t * K;
    if (t == first) {
      pass<T, M, false>(slice, K, k, u, alpha, k, q, by_k, by_q);
    } else {
      pass<T, M, true>(slice, K, k - K, u, alpha, k, q, by_k, by_q);
    }
    const T* v = in.v + t * in.v_stride + column;
    for (int m = 0; m < M; ++m) {
      u[m] = broadcast(in.beta[t]) * (load(v + m * L) - by_k[m]);
      store(out + t * out_stride + m * L, fma<T>(u[m], broadcast(in.kq[t]), by_q[m]));
    }
  }
  const T* k = in.k + (last - 1) * K;
  for (int64_t d = 0; d < K; ++d) {
    for (int m = 0; m < M; ++m) {
      T* at = slice + (d * M + m) * L;
      store(at, fma<T>(u[m], broadcast(k[d]), load(at)));
    }
  }
}

}  // namespace detail

// Tokens first .. last-1 over a slice of `vectors` vectors whose first value channel is `column`;
// read-outs go to out[t * out_stride + channel of the slice]. At least one token.
template <class T>
void advance(T* slice, int vectors, const Tokens<T>& in, int64_t column, int64_t first,
             int64_t last, T* out, int64_t out_stride) {
  switch (vectors) {
    case 1: return detail::advance<T, 1>(slice, in, column, first, last, out, out_stride);
    case 2: return detail::advance<T, 2>(slice, in, column, first, last, out, out_stride);
    case 3: return detail::advance<T, 3>(slice, in, column, first, last, out, out_stride);
    default: return detail::advance<T, 4>(slice, in, column, first, last, out, out_stride);
  }
}

// `count` value channels of a state, [count, K], into a slice [K][width], with zeros in the lanes
// beyond them; state null: all zeros. `ahead`, the channels to be loaded next (null: none), are
// asked for, so that they arrive while this slice is worked on.
template <class T>
void load_slice(T* slice, int64_t width, const T* state, int64_t count, int64_t K,
                const T* ahead) {
  constexpr int L = kLanes<T>;
  if (state == nullptr) {
    std::fill_n(slice, K * width, T(0));
    return;
  }
  const int64_t whole_k = K / L * L;
  for (int64_t v = 0; v < width; v += L) {
    const bool whole = v + L <= count;
    for (int64_t d = 0; whole && d < whole_k; d += L) {
      if (ahead != nullptr) prefetch(ahead + v * K + d * L, L * L);
      Vec<T> tile[L];
      for (int i = 0; i < L; ++i) tile[i] = load(state + (v + i) * K + d);
      transpose<T>(tile);
      for (int i = 0; i < L; ++i) store(slice + (d + i) * width + v, tile[i]);
    }
    for (int64_t d = whole ? whole_k : 0; d < K; ++d) {
      for (int64_t i = v; i < v + L; ++i) {
        slice[d * width + i] = i < count ? state[i * K + d] : T(0);
      }
    }
  }
}

// The inverse: a slice into its `count` value channels of a state.
template <class T>
void store_slice(const T* slice, int64_t width, T* state, int64_t count, int64_t K) {
  constexpr int L = kLanes<T>;
  const int64_t whole_k = K / L * L;
  for (int64_t v = 0; v < count; v += L) {
    const bool whole = v + L <= count;
    for (int64_t d = 0; whole && d < whole_k; d += L) {
      Vec<T> tile[L];
      for (int i = 0; i < L; ++i) tile[i] = load(slice + (d + i) * width + v);
      transpose<T>(tile);
      for (int i = 0; i < L; ++i) store(state + (v + i) * K + d, tile[i]);
    }
    for (int64_t d = whole ? whole_k : 0; d < K; ++d) {
      for (int64_t i = v; i < v + L && i < count; ++i) state[i * K + d] = slice[d * width + i];
    }
  }
}

}  // namespace kda
