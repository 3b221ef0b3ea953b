// The delta rule over the value channels of a head's state (architecture 3.6).
//
// With alpha = e^g, S~ = S diag(alpha), u = beta (v - S~ k):
//
//     S' = S~ + u k^T          o = S' q = S~ q + u (k . q)
//
// so both reads see the decayed state. A channel's bits depend on nothing but its own row and
// column: sums over K have the order of `dot`, a chain for each residue of the lanes, then halves
// upon halves. Two forms share every product and every sum:
//
//     advance   many tokens over a slice held key-first in a near cache, value channels side by
//               side in vectors. One pass a token writes the previous token's u k^T, decays, and
//               reads with k and with q: each state element is loaded and stored once a token.
//     step      one token over the state where it lies, [V, K], key channels side by side. A decode
//               step is bound by moving states; it must not turn them around as well.
//
// So prefill, any cut of it, and decode give the same bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

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

// Where the key channels of a slice lie: those of one residue of the lanes together, residues in
// the order in which their sums meet.
template <class T>
struct KeyOrder {
  static constexpr int L = kLanes<T>;
  int64_t K;

  int64_t each() const { return (K + L - 1) / L; }
  int64_t rows() const { return L * each(); }
  int64_t place(int64_t d) const { return residue(static_cast<int>(d % L)) * each() + d / L; }

  // The n-th residue; its own inverse: the bits of n from last to first.
  static constexpr int residue(int n) {
    int turned = 0;
    for (int bit = 1; bit < L; bit *= 2, n /= 2) turned = 2 * turned + n % 2;
    return turned;
  }
};

namespace detail {

template <class T, int M, bool write>
KDA_INLINE void pass(T* slice, int64_t K, const T* written, const Vec<T>* u, const T* alpha,
                     const T* k, const T* q, Vec<T>* by_k, Vec<T>* by_q) {
  constexpr int L = kLanes<T>;
  const int64_t each = KeyOrder<T>{K}.each();
  Vec<T> waiting[L][2 * M];  // sums of 2, 4, 8, ... residues that wait for as many others
  int depth = 0;
  for (int n = 0; n < L; n += 2) {
    Vec<T> rk[2][M] = {}, rq[2][M] = {};
    const auto read = [&](int half, int64_t d, T* row) {
      const Vec<T> decay = broadcast(alpha[d]), key = broadcast(k[d]), query = broadcast(q[d]);
      for (int m = 0; m < M; ++m) {
        Vec<T> s = load(row + m * L);
        if constexpr (write) s = fma<T>(u[m], broadcast(written[d]), s);
        s = s * decay;
        rk[half][m] = fma<T>(s, key, rk[half][m]);
        rq[half][m] = fma<T>(s, query, rq[half][m]);
        store(row + m * L, s);
      }
    };
    T* row = slice + n * each * M * L;
    int64_t d = KeyOrder<T>::residue(n);
    for (; d + L / 2 < K; d += L, row += M * L) {
      read(0, d, row);
      read(1, d + L / 2, row + each * M * L);
    }
    if (d < K) read(0, d, row);
    for (int m = 0; m < M; ++m) {
      rk[0][m] = rk[0][m] + rk[1][m];
      rq[0][m] = rq[0][m] + rq[1][m];
    }
    for (int done = n / 2; done % 2 == 1; done /= 2) {
      --depth;
      for (int m = 0; m < M; ++m) {
        rk[0][m] = waiting[depth][m] + rk[0][m];
        rq[0][m] = waiting[depth][M + m] + rq[0][m];
      }
    }
    for (int m = 0; m < M; ++m) waiting[depth][m] = rk[0][m], waiting[depth][M + m] = rq[0][m];
    ++depth;
  }
  for (int m = 0; m < M; ++m) by_k[m] = waiting[0][m], by_q[m] = waiting[0][M + m];
}

template <class T, int M>
void advance(T* slice, const Tokens<T>& in, int64_t column, int64_t first, int64_t last, T* out,
             int64_t out_stride) {
  constexpr int L = kLanes<T>;
  const int64_t K = in.K;
  const KeyOrder<T> order{K};
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
      T* at = slice + (order.place(d) * M + m) * L;
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

// `count` value channels of a state, [count, K], into a slice, [rows of KeyOrder][width], with zeros
// in the lanes beyond them; state null: all zeros. `ahead`, the channels to be loaded next (null:
// none), are asked for, so that they arrive while this slice is worked on.
template <class T>
void load_slice(T* slice, int64_t width, const T* state, int64_t count, int64_t K,
                const T* ahead) {
  constexpr int L = kLanes<T>;
  const KeyOrder<T> order{K};
  if (state == nullptr) {
    std::fill_n(slice, order.rows() * width, T(0));
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
      for (int i = 0; i < L; ++i) store(slice + order.place(d + i) * width + v, tile[i]);
    }
    for (int64_t d = whole ? whole_k : 0; d < K; ++d) {
      for (int64_t i = v; i < v + L; ++i) {
        slice[order.place(d) * width + i] = i < count ? state[i * K + d] : T(0);
      }
    }
  }
}

// The inverse: a slice into its `count` value channels of a state.
template <class T>
void store_slice(const T* slice, int64_t width, T* state, int64_t count, int64_t K) {
  constexpr int L = kLanes<T>;
  const KeyOrder<T> order{K};
  const int64_t whole_k = K / L * L;
  for (int64_t v = 0; v < count; v += L) {
    const bool whole = v + L <= count;
    for (int64_t d = 0; whole && d < whole_k; d += L) {
      Vec<T> tile[L];
      for (int i = 0; i < L; ++i) tile[i] = load(slice + order.place(d + i) * width + v);
      transpose<T>(tile);
      for (int i = 0; i < L; ++i) store(state + (v + i) * K + d, tile[i]);
    }
    for (int64_t d = whole ? whole_k : 0; d < K; ++d) {
      for (int64_t i = v; i < v + L && i < count; ++i) {
        state[i * K + d] = slice[order.place(d) * width + i];
      }
    }
  }
}

namespace detail {

// Lanes 0 .. count - 1 of memory, zeros beyond; and back.
template <class T>
KDA_INLINE Vec<T> load_some(const T* from, int64_t count) {
  Vec<T> x{};
  std::memcpy(&x, from, std::min<int64_t>(count, kLanes<T>) * sizeof(T));
  return x;
}

template <class T>
KDA_INLINE void store_some(T* to, Vec<T> x, int64_t count) {
  std::memcpy(to, &x, std::min<int64_t>(count, kLanes<T>) * sizeof(T));
}

// Token 0 of `in` over `rows` value channels from `channel` on; whole: K is whole vectors.
template <class T, int rows, bool whole>
KDA_INLINE void step_rows(const T* initial, T* final, const Tokens<T>& in, int64_t channel,
                          T* out) {
  constexpr int L = kLanes<T>;
  const int64_t K = in.K;
  const auto at = [&](const T* x, int64_t d) {
    return whole ? load(x + d) : load_some(x + d, K - d);
  };
  const auto decayed = [&](int r, int64_t d) {
    const Vec<T> s = initial == nullptr ? Vec<T>{} : at(initial + (channel + r) * K, d);
    return s * at(in.alpha, d);  // of zeros too: a gate that is NaN shows
  };
  Vec<T> reads[2 * rows];
#pragma GCC unroll 16
  for (int r = 0; r < 2 * rows; ++r) reads[r] = Vec<T>{};
  for (int64_t d = 0; d < K; d += L) {
    const Vec<T> k = at(in.k, d), q = at(in.q, d);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      const Vec<T> s = decayed(r, d);
      reads[r] = fma<T>(s, k, reads[r]);
      reads[rows + r] = fma<T>(s, q, reads[rows + r]);
    }
  }
  T sums[2 * rows], u[rows];
  sums_of_lanes<T, 2 * rows>(sums, reads);
  for (int r = 0; r < rows; ++r) {
    u[r] = in.beta[0] * (in.v[channel + r] - sums[r]);
    out[channel + r] = fma1(u[r], in.kq[0], sums[rows + r]);
  }
  if (final == nullptr) return;
  for (int r = 0; r < rows; ++r) {
    T* to = final + (channel + r) * K;
    for (int64_t d = 0; d < K; d += L) {
      const Vec<T> s = fma<T>(broadcast(u[r]), at(in.k, d), decayed(r, d));
      whole ? store(to + d, s) : store_some(to + d, s, K - d);
    }
  }
}

template <class T, bool whole>
void step(const T* initial, T* final, const Tokens<T>& in, int64_t count, T* out) {
  int64_t channel = 0;
  for (; channel + 8 <= count; channel += 8) {
    // behind this head's channels lie the next one's
    if (initial != nullptr) prefetch(initial + (channel + 8) * in.K, 8 * in.K);
    step_rows<T, 8, whole>(initial, final, in, channel, out);
  }
  for (; channel < count; ++channel) step_rows<T, 1, whole>(initial, final, in, channel, out);
}

}  // namespace detail

// Token 0 of `in` over `count` value channels of a state, [count, K]: from `initial` (null: zeros)
// to `final` (null: dropped), which may be the same memory. Read-outs go to out [count].
template <class T>
void step(const T* initial, T* final, const Tokens<T>& in, int64_t count, T* out) {
  if (in.K % kLanes<T> == 0) {
    detail::step<T, true>(initial, final, in, count, out);
  } else {
    detail::step<T, false>(initial, final, in, count, out);
  }
}

}  // namespace kda
