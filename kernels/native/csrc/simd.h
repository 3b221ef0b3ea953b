// Vectors as wide as the registers this file is compiled for, and what the language does not have
// for them: fused multiply-add and the transpose of a square tile.
#pragma once

#include <bit>
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

// Keep x in its register: a compiler may load it anew for every use, and loads are what a tile of
// products waits for.
template <class T>
KDA_INLINE void keep([[maybe_unused]] Vec<T>& x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#elif defined(__AVX2__)
  asm("" : "+x"(x));
#endif
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

// Vectors a and b, each `groups` sums in as many runs of lanes → twice as many sums in runs of half
// the length, a's before b's.
template <class T, int groups, int... i>
KDA_INLINE Vec<T> merge(Vec<T> a, Vec<T> b, std::integer_sequence<int, i...>) {
  constexpr int L = sizeof...(i), run = L / groups, half = run / 2;
  const Vec<T> low = __builtin_shufflevector(a, b, (i / half * run + i % half)...);
  const Vec<T> high = __builtin_shufflevector(a, b, (i / half * run + i % half + half)...);
  return low + high;
}

// Every run of lanes → its sum in each of its lanes.
template <class T, int run, int... i>
KDA_INLINE Vec<T> sum_of_runs(Vec<T> x, std::integer_sequence<int, i...> lanes) {
  if constexpr (run == 1) {
    return x;
  } else {
    const Vec<T> sum = x + __builtin_shufflevector(x, x, (i ^ run / 2)...);
    return sum_of_runs<T, run / 2>(sum, lanes);
  }
}

}  // namespace detail

// The sums of the lanes of `count` vectors, each halves upon halves, whatever the count: sums[i] of
// x[i]. As many as a power of two are added up together.
template <class T, int count, int groups = 1>
KDA_INLINE void sums_of_lanes(T* sums, const Vec<T>* x) {
  constexpr int L = kLanes<T>, run = L / groups, together = std::bit_floor(unsigned(count));
  constexpr auto lanes = std::make_integer_sequence<int, L>{};
  if constexpr (together < count) {
    sums_of_lanes<T, together, groups>(sums, x);
    sums_of_lanes<T, count - together, groups>(sums + together * groups, x + together);
  } else if constexpr (count > 1 && run > 1) {
    Vec<T> merged[count / 2];
    for (int i = 0; i < count / 2; ++i) {
      merged[i] = detail::merge<T, groups>(x[2 * i], x[2 * i + 1], lanes);
    }
    sums_of_lanes<T, count / 2, 2 * groups>(sums, merged);
  } else if constexpr (run > 1) {
    const Vec<T> sum = detail::sum_of_runs<T, run>(x[0], lanes);
    for (int g = 0; g < groups; ++g) sums[g] = sum[g * run];
  } else {  // every lane is a sum
    for (int i = 0; i < count; ++i) store(sums + i * L, x[i]);
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
