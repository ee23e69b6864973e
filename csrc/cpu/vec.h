// Vectors of W numbers, in the compilers' vector extension: one text for AVX-512, AVX2 and everything else.
//
// Included once for each instruction set, in a namespace of its own, and free of the standard library's inline
// functions: the linker would otherwise keep one copy of a function for all, perhaps the one this machine cannot run.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "kernels.h"

namespace ds_sparse::cpu::DS_SPARSE_ISA {

#define DS_SPARSE_INLINE_MEMBER inline __attribute__((always_inline))
#define DS_SPARSE_INLINE static DS_SPARSE_INLINE_MEMBER

template <class C, int W>
struct VecOf {
  typedef C type __attribute__((vector_size(W * sizeof(C))));
};

template <class C, int W>
using Vec = typename VecOf<C, W>::type;

template <class C>
struct Bits;
template <>
struct Bits<float> {
  using Int = int32_t;
};
template <>
struct Bits<double> {
  using Int = int64_t;
};

template <int... I>
struct Lanes {};
template <int N, int... I>
struct MakeLanes : MakeLanes<N - 1, N - 1, I...> {};
template <int... I>
struct MakeLanes<0, I...> {
  using type = Lanes<I...>;
};

// W multiplicands of O.
template <class O>
struct MultiplicandOf {
  using type = O;
};
template <>
struct MultiplicandOf<BFloat16Pair> {
  using type = uint32_t;
};
template <class O, int W>
using Multiplicands = Vec<typename MultiplicandOf<O>::type, W>;

#if defined(__AVX512F__)
constexpr int vector_bytes = 64;
#else
constexpr int vector_bytes = 32;
#endif

template <class C>
constexpr int native_width = vector_bytes / sizeof(C);

template <class V, class U>
DS_SPARSE_INLINE V bit_cast(const U& x) {
  static_assert(sizeof(V) == sizeof(U));
  V y;
  memcpy(&y, &x, sizeof(V));
  return y;
}

template <class C>
constexpr C infinity = C(__builtin_inf());
template <class C>
constexpr C lowest = C(-__FLT_MAX__);
template <>
constexpr double lowest<double> = -__DBL_MAX__;

template <class V, class U>
DS_SPARSE_INLINE V load_raw(const U* x) {
  V y;
  memcpy(&y, x, sizeof(V));
  return y;
}

template <class C, int W>
DS_SPARSE_INLINE Vec<C, W> load(const C* x) {
  return load_raw<Vec<C, W>>(x);
}

template <class C, int W>
DS_SPARSE_INLINE Vec<C, W> load(const BFloat16* x) {
  auto wide = __builtin_convertvector((load_raw<Vec<uint16_t, W>>(x)), Vec<uint32_t, W>);
  return bit_cast<Vec<C, W>>(wide << 16);
}

template <class C, int W>
DS_SPARSE_INLINE Vec<C, W> load(const Half* x) {
  auto half = load_raw<Vec<uint16_t, W>>(x);
#if defined(__F16C__)
  if constexpr (W == 8) return bit_cast<Vec<C, W>>(_mm256_cvtph_ps(bit_cast<__m128i>(half)));
#if defined(__AVX512F__)
  if constexpr (W == 16) return bit_cast<Vec<C, W>>(_mm512_cvtph_ps(bit_cast<__m256i>(half)));
#endif
#endif
  // The exponent is moved to fp32's by a product, which is exact for subnormal numbers as well; infinity and NaN by an
  // or.
  auto wide = __builtin_convertvector(half, Vec<uint32_t, W>);
  auto scaled = bit_cast<Vec<C, W>>((wide & 0x7fff) << 13) * C(0x1p112f);
  auto bits = bit_cast<Vec<uint32_t, W>>(scaled);
  bits = (wide & 0x7fff) >= 0x7c00 ? bits | 0x7f800000 : bits;
  return bit_cast<Vec<C, W>>(bits | ((wide & 0x8000) << 16));
}

// The numbers that bools of a mask add to the scores.
template <class C, int W>
DS_SPARSE_INLINE Vec<C, W> load(const Keep* x) {
  auto wide = __builtin_convertvector((load_raw<Vec<uint8_t, W>>(x)), Vec<typename Bits<C>::Int, W>);
  return wide != 0 ? Vec<C, W>{} : Vec<C, W>{} - infinity<C>;
}

template <class C, int W>
DS_SPARSE_INLINE void store(C* to, Vec<C, W> x) {
  memcpy(to, &x, sizeof(x));
}

// Round to nearest, ties to even.
template <class C, int W>
DS_SPARSE_INLINE void store(BFloat16* to, Vec<C, W> x) {
#if defined(__AVX512BF16__)
  if constexpr (W == 16) {
    auto rounded = _mm512_cvtneps_pbh(bit_cast<__m512>(x));
    memcpy(to, &rounded, sizeof(rounded));
    return;
  }
#endif
  auto bits = bit_cast<Vec<uint32_t, W>>(x);
  auto rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  rounded = (bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded;
  auto narrow = __builtin_convertvector(rounded, Vec<uint16_t, W>);
  memcpy(to, &narrow, sizeof(narrow));
}

template <class C, int W>
DS_SPARSE_INLINE void store(Half* to, Vec<C, W> x) {
#if defined(__F16C__)
  if constexpr (W == 8) {
    auto half = _mm256_cvtps_ph(bit_cast<__m256>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    memcpy(to, &half, sizeof(half));
    return;
  }
#if defined(__AVX512F__)
  if constexpr (W == 16) {
    auto half = _mm512_cvtps_ph(bit_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    memcpy(to, &half, sizeof(half));
    return;
  }
#endif
#endif
  auto bits = bit_cast<Vec<uint32_t, W>>(x);
  auto magnitude = bits & 0x7fffffff;
  auto normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  // Adding 1/2 leaves the rounded subnormal number in the low bits.
  auto subnormal = bit_cast<Vec<uint32_t, W>>(bit_cast<Vec<float, W>>(magnitude) + 0.5f) - 0x3f000000;
  auto half = magnitude < (113u << 23) ? subnormal : normal;
  half = magnitude >= 0x477ff000 ? magnitude - magnitude + 0x7c00 : half;
  half = magnitude > 0x7f800000 ? magnitude - magnitude + 0x7e00 : half;
  auto narrow = __builtin_convertvector(half | ((bits >> 16) & 0x8000), Vec<uint16_t, W>);
  memcpy(to, &narrow, sizeof(narrow));
}

// sum + left * right, of all numbers of the multiplicands; the left ones are one for all lanes, or one for each.
template <class C, class V>
DS_SPARSE_INLINE V multiply_add(C left, V right, V sum) {
  return sum + left * right;
}

template <class O, int W>
DS_SPARSE_INLINE Multiplicands<O, W> broadcast_multiplicand(O x) {
  return bit_cast<typename MultiplicandOf<O>::type>(x) - Multiplicands<O, W>{};
}

// Number `part` of each of W multiplicands.
template <class O, int W>
DS_SPARSE_INLINE Vec<Compute<O>, W> numbers(Multiplicands<O, W> multiplicands, int64_t part) {
  if constexpr (per_multiplicand<O> == 1)
    return multiplicands;
  else
    return bit_cast<Vec<float, W>>(part == 0 ? multiplicands << 16 : multiplicands & 0xffff0000);
}

#if defined(__AVX512BF16__)
DS_SPARSE_INLINE Vec<float, 16> multiply_add(
    Multiplicands<BFloat16Pair, 16> left, Multiplicands<BFloat16Pair, 16> right, Vec<float, 16> sum) {
  return bit_cast<Vec<float, 16>>(
      _mm512_dpbf16_ps(bit_cast<__m512>(sum), bit_cast<__m512bh>(left), bit_cast<__m512bh>(right)));
}
DS_SPARSE_INLINE Vec<float, 16> multiply_add(
    BFloat16Pair left, Multiplicands<BFloat16Pair, 16> right, Vec<float, 16> sum) {
  return multiply_add(broadcast_multiplicand<BFloat16Pair, 16>(left), right, sum);
}

// The numbers of `first` and then those of `second`, rounded to bf16.
DS_SPARSE_INLINE Vec<uint16_t, 32> narrow(Vec<float, 16> first, Vec<float, 16> second) {
  return bit_cast<Vec<uint16_t, 32>>(_mm512_cvtne2ps_pbh(bit_cast<__m512>(second), bit_cast<__m512>(first)));
}

// Numbers n and n + 16 side by side.
template <int... I>
DS_SPARSE_INLINE Multiplicands<BFloat16Pair, 16> pair_halves(Vec<uint16_t, 32> x, Lanes<I...>) {
  const Vec<uint16_t, 32> order{(I % 2 * 16 + I / 2)...};
  return bit_cast<Multiplicands<BFloat16Pair, 16>>(
      _mm512_permutexvar_epi16(bit_cast<__m512i>(order), bit_cast<__m512i>(x)));
}
DS_SPARSE_INLINE Multiplicands<BFloat16Pair, 16> pair_halves(Vec<uint16_t, 32> x) {
  return pair_halves(x, MakeLanes<32>::type{});
}

// sums[0] and sums[1] += the products of `left` with pairs of a number of each row. The sums are in an order of their
// own, which takes no more than two instructions: fours of columns in turns.
DS_SPARSE_INLINE void add_two_rows(
    Multiplicands<BFloat16Pair, 16> left, const Multiplicands<BFloat16Pair, 16> (&rows)[2], Vec<float, 16> (&sums)[2]) {
  __m512i first = bit_cast<__m512i>(rows[0]), second = bit_cast<__m512i>(rows[1]);
  sums[0] =
      multiply_add(left, bit_cast<Multiplicands<BFloat16Pair, 16>>(_mm512_unpacklo_epi16(first, second)), sums[0]);
  sums[1] =
      multiply_add(left, bit_cast<Multiplicands<BFloat16Pair, 16>>(_mm512_unpackhi_epi16(first, second)), sums[1]);
}

// From the order of add_two_rows to that of memory, or back.
template <int... I>
DS_SPARSE_INLINE void order_columns(Vec<float, 16> (&sums)[2], bool as_in_memory, Lanes<I...>) {
  const Vec<int32_t, 16> to{(I / 4 % 2 * 16 + I / 8 * 4 + I % 4)...}, back{(I / 8 * 16 + I / 4 % 2 * 8 + I % 4)...};
  Vec<int32_t, 16> first = as_in_memory ? to : back, second = first + (as_in_memory ? 8 : 4);
  __m512 low = bit_cast<__m512>(sums[0]), high = bit_cast<__m512>(sums[1]);
  sums[0] = bit_cast<Vec<float, 16>>(_mm512_permutex2var_ps(low, bit_cast<__m512i>(first), high));
  sums[1] = bit_cast<Vec<float, 16>>(_mm512_permutex2var_ps(low, bit_cast<__m512i>(second), high));
}
DS_SPARSE_INLINE void order_columns(Vec<float, 16> (&sums)[2], bool as_in_memory) {
  order_columns(sums, as_in_memory, MakeLanes<16>::type{});
}
#endif

// Weights in the memory of the scores that they are made of: no wider than those, they come after the last read.
template <class O, int W>
DS_SPARSE_INLINE void store_weights(Compute<O>* scores, int64_t column, Vec<Compute<O>, W> weights) {
  store<Compute<O>, W>(reinterpret_cast<Number<O>*>(scores) + column, weights);
}

// One number at a time, through a vector of the same code.
template <class C, class T>
DS_SPARSE_INLINE C load_one(const T* x) {
  if constexpr (sizeof(T) == sizeof(C)) {
    return *x;
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return bit_cast<C>(uint32_t{x->bits} << 16);
  } else {
    T padded[8] = {*x};
    return load<C, 8>(padded)[0];
  }
}

template <class C, class T>
DS_SPARSE_INLINE void store_one(T* to, C x) {
  if constexpr (sizeof(T) == sizeof(C)) {
    *to = x;
  } else {
    T padded[8];
    store<C, 8>(padded, Vec<C, 8>{x});
    *to = padded[0];
  }
}

template <class C, int W>
DS_SPARSE_INLINE Vec<C, W> broadcast(C x) {
  return x - Vec<C, W>{};
}

// first, first + 1 and so on.
template <class C, int... I>
DS_SPARSE_INLINE Vec<C, sizeof...(I)> lanes_from(C first, Lanes<I...>) {
  return first + Vec<C, sizeof...(I)>{I...};
}
template <class C, int W>
DS_SPARSE_INLINE Vec<C, W> lanes_from(C first) {
  return lanes_from<C>(first, typename MakeLanes<W>::type{});
}

// The lanes' halves taken together by `combine`, again and again.
template <class C, int W, class Combine>
DS_SPARSE_INLINE C fold_lanes(Vec<C, W> x, const Combine& combine) {
  if constexpr (W > 2) {
    Vec<C, W / 2> halves[2];
    memcpy(halves, &x, sizeof(x));
    return fold_lanes<C, W / 2>(combine(halves[0], halves[1]), combine);
  } else {
    return combine(x[0], x[1]);
  }
}

template <class C, int W>
DS_SPARSE_INLINE C sum_lanes(Vec<C, W> x) {
  return fold_lanes<C, W>(x, [](auto a, auto b) { return a + b; });
}

template <class C, int W>
DS_SPARSE_INLINE C max_lanes(Vec<C, W> x) {
  return fold_lanes<C, W>(x, [](auto a, auto b) { return a > b ? a : b; });
}

// exp of x <= 0; results below the smallest normal fp32 are 0, NaN stays. Within 1 ulp in fp32: x = n log 2 + r and a
// polynomial of degree 6 in r, 1 + r and then the coefficients with the least largest relative error.
template <class C, int W>
DS_SPARSE_INLINE Vec<C, W> exp_nonpositive(Vec<C, W> x) {
  if constexpr (sizeof(C) == 8) {
    Vec<C, W> y;
    for (int i = 0; i < W; ++i) y[i] = __builtin_exp(x[i]);
    return y;
  } else {
    constexpr C round = 0x1.8p23f, least = -0x1.5d589ep6f;
    auto shifted = x * 0x1.715476p+0f + round;
    auto n = shifted - round;
    auto r = x - n * 0x1.62e4p-1f;
    r = r - n * 0x1.7f7d1cp-20f;
    auto p = r * 0x1.6a2434p-10f + 0x1.1239e2p-7f;
    p = p * r + 0x1.5558f2p-5f;
    p = p * r + 0x1.555492p-3f;
    p = p * r + 0x1.fffffcp-2f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
#if defined(__AVX512F__)
    if constexpr (W == 16) {
      __mmask16 seen = _mm512_cmp_ps_mask(bit_cast<__m512>(x), _mm512_set1_ps(least), _CMP_NLT_UQ);
      return bit_cast<Vec<C, W>>(_mm512_maskz_scalef_ps(seen, bit_cast<__m512>(p), bit_cast<__m512>(n)));
    }
#endif
    auto exponent = (bit_cast<Vec<int32_t, W>>(shifted) - bit_cast<int32_t>(round) + 127) << 23;
    auto y = p * bit_cast<Vec<C, W>>(exponent);
    return x < least ? Vec<C, W>{} : y;
  }
}

// One step of a transpose: rows i and i + S of a square exchange their off-diagonal S x S halves.
template <class C, int W, int S, int... I>
DS_SPARSE_INLINE void exchange(Vec<C, W>& low, Vec<C, W>& high, Lanes<I...>) {
#if defined(__clang__)
  auto new_low = __builtin_shufflevector(low, high, ((I & S) ? W + I - S : I)...);
  auto new_high = __builtin_shufflevector(low, high, ((I & S) ? W + I : I + S)...);
#else
  using Index = Vec<typename Bits<C>::Int, W>;
  auto new_low = __builtin_shuffle(low, high, Index{((I & S) ? W + I - S : I)...});
  auto new_high = __builtin_shuffle(low, high, Index{((I & S) ? W + I : I + S)...});
#endif
  low = new_low;
  high = new_high;
}

template <class C, int W, int S = 1>
DS_SPARSE_INLINE void transpose_square(Vec<C, W> (&rows)[W]) {
  if constexpr (S < W) {
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i)
      if ((i & S) == 0) exchange<C, W, S>(rows[i], rows[i + S], typename MakeLanes<W>::type{});
    transpose_square<C, W, 2 * S>(rows);
  }
}

// to[c * to_stride + r] = from[r * from_stride + c].
template <class C, int W, class From, class To>
static void transpose(const From* from, int64_t from_stride, int64_t rows, int64_t columns, To* to, int64_t to_stride) {
  int64_t full_rows = rows / W * W, full_columns = columns / W * W;
  for (int64_t r = 0; r < full_rows; r += W) {
    for (int64_t c = 0; c < full_columns; c += W) {
      Vec<C, W> square[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) square[i] = load<C, W>(from + (r + i) * from_stride + c);
      transpose_square<C, W>(square);
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) store<C, W>(to + (c + i) * to_stride + r, square[i]);
    }
  }
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = r < full_rows ? full_columns : 0; c < columns; ++c)
      store_one<C>(to + c * to_stride + r, load_one<C>(from + r * from_stride + c));
}

}  // namespace ds_sparse::cpu::DS_SPARSE_ISA
