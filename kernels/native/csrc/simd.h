// Vectors as wide as the registers this file is compiled for, and what the language does not have
// for them: fused multiply-add and the transpose of a square tile.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define KDA_INLINE inline __attribute__((always_inline))

namespace kda {

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorBytes)));
};

template <class T>
using Vec = typename VectorOf<T>::type;

template <class T>
inline constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

template <class T>
KDA_INLINE Vec<T> load(const T* from) {
  Vec<T> x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

template <class T>
KDA_INLINE void store(T* to, Vec<T> x) {
  std::memcpy(to, &x, sizeof x);
}

// Ask for `count` numbers that will be read soon; heads of a token lie too far apart for the
// hardware to see a stream.
template <class A>
KDA_INLINE void prefetch(const A* from, int64_t count) {
  const char* line = reinterpret_cast<const char*>(from);
  for (const char* end = line + count * sizeof(A); line < end; line += 64) {
    __builtin_prefetch(line, 0, 2);
  }
}

// a * b + c, rounded once where the hardware can. Products elsewhere are never contracted
// (-ffp-contract=off), so the same expression has the same bits wherever it is inlined.
template <class T>
KDA_INLINE Vec<T> fma(Vec<T> a, Vec<T> b, Vec<T> c) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    return Vec<T>(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c)));
  } else {
    return Vec<T>(_mm512_fmadd_pd(__m512d(a), __m512d(b), __m512d(c)));
  }
#elif defined(__AVX2__) && defined(__FMA__)
  if constexpr (sizeof(T) == 4) {
    return Vec<T>(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c)));
  } else {
    return Vec<T>(_mm256_fmadd_pd(__m256d(a), __m256d(b), __m256d(c)));
  }
#else
  return a * b + c;
#endif
}

template <class T>
KDA_INLINE Vec<T> broadcast(T x) {
  return x - Vec<T>{};
}

namespace detail {

// lanes 0, n, 1, n+1, ... of a ++ b, from lane `first` of each
template <class T, int first, int... i>
KDA_INLINE Vec<T> interleave(Vec<T> a, Vec<T> b, std::integer_sequence<int, i...>) {
  constexpr int n = sizeof...(i);
  return __builtin_shufflevector(a, b, (first + i / 2 + (i % 2) * n)...);
}

// the lanes of x, each in the place that its number has with one bit turned
template <class T, int bit, int... i>
KDA_INLINE Vec<T> exchanged(Vec<T> x, std::integer_sequence<int, i...>) {
  return __builtin_shufflevector(x, x, (i ^ bit)...);
}

}  // namespace detail

// The lanes' sum, halves upon halves.
template <class T, int half = kLanes<T> / 2>
KDA_INLINE T sum_of_lanes(Vec<T> x) {
  if constexpr (half == 0) {
    return x[0];
  } else {
    constexpr auto lanes = std::make_integer_sequence<int, kLanes<T>>{};
    return sum_of_lanes<T, half / 2>(x + detail::exchanged<T, half>(x, lanes));
  }
}

// rows[i][j] <-> rows[j][i] of a tile of kLanes x kLanes: a perfect shuffle of the rows, log2 times
template <class T>
KDA_INLINE void transpose(Vec<T>* rows) {
  constexpr int n = kLanes<T>;
  constexpr auto lanes = std::make_integer_sequence<int, n>{};
  for (int round = 1; round < n; round *= 2) {
    Vec<T> next[n];
    for (int i = 0; i < n / 2; ++i) {
      next[2 * i] = detail::interleave<T, 0>(rows[i], rows[i + n / 2], lanes);
      next[2 * i + 1] = detail::interleave<T, n / 2>(rows[i], rows[i + n / 2], lanes);
    }
    for (int i = 0; i < n; ++i) rows[i] = next[i];
  }
}

}  // namespace kda
