// Scales scores, adds to them and takes their powers, as softmax does.

#pragma once

#include <limits>
#include <type_traits>

#include "../../bias.h"
#include "../../compute.h"
#include "vector.h"

namespace ds_sparse {

template <class A>
__device__ __forceinline__ A infinity() {
  return std::numeric_limits<A>::infinity();
}

// The scaled score. A finite one that overflows downwards stays finite: only -inf masks.
template <class A>
__device__ __forceinline__ A scaled(A score, A scale) {
  const A product = score * scale;
  return product == -infinity<A>() && isfinite(score) ? std::numeric_limits<A>::lowest() : product;
}

// x * scale for a run.
template <class A, int Count>
__device__ __forceinline__ void scale_run(A (&x)[Count], A scale) {
  const bool may_overflow = !(abs(scale) <= 1);
#pragma unroll
  for (A& score : x) {
    score = may_overflow ? scaled(score, scale) : score * scale;
  }
}

// A logit with a bias added. -inf masks, whatever the other is. Finite biases count as kLowestBias or more, and so do
// the sums of several.
template <class A>
__device__ __forceinline__ A biased(A logit, A bias) {
  constexpr A lowest = kLowestBias<A>;
  const A sum = logit + (bias < lowest ? lowest : bias), least = logit < lowest ? logit : lowest;
  const A result = sum < least ? least : sum;  // NaN stays
  return logit == -infinity<A>() || bias == -infinity<A>() ? -infinity<A>() : result;
}

template <class A, int Count>
__device__ __forceinline__ A largest_of(const A (&x)[Count]) {
  A largest = x[0];
#pragma unroll
  for (int i = 1; i < Count; ++i) {
    largest = max(largest, x[i]);
  }
  return largest;
}

template <class A, int Count>
__device__ __forceinline__ A sum_of(const A (&x)[Count]) {
  if constexpr (Count == 1) {
    return x[0];
  } else {
    A pairs[Count / 2];
#pragma unroll
    for (int i = 0; i < Count / 2; ++i) {
      pairs[i] = x[i] + x[i + Count / 2];
    }
    return sum_of(pairs);
  }
}

// The largest element of a run: halves two at a time.
template <class T>
__device__ __forceinline__ Compute<T> largest_of(const uint4& run) {
  if constexpr (sizeof(T) == 2) {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    const auto pair = [](uint32_t word) { return reinterpret_cast<const Pair&>(word); };
    const Pair both = __hmax2(__hmax2(pair(run.x), pair(run.y)), __hmax2(pair(run.z), pair(run.w)));
    return max(static_cast<float>(both.x), static_cast<float>(both.y));
  } else {
    Compute<T> x[kRun<T>];
    unpack<T>(run, x);
    return largest_of(x);
  }
}

// The number that exponents are taken relative to: the largest logit, or 0 where all are -inf, so that exp gives 0 and
// not NaN.
template <class A>
__device__ __forceinline__ A finite_reference(A largest) {
  return largest == -infinity<A>() ? A(0) : largest;
}

template <class A>
constexpr A kLog2E = 1.4426950408889634;

template <class A>
__device__ __forceinline__ A power_of_two(A exponent) {
  if constexpr (std::is_same_v<A, float>) {
    // exp2f brings back results below 2^-126, which is not worth its instructions here.
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
    return power;
  } else {
    return exp2(exponent);
  }
}

// 2^(scale * (x - reference)).
template <class A>
__device__ __forceinline__ A power_of_difference(A x, A reference, A scale) {
  return power_of_two((x - reference) * scale);
}

}  // namespace ds_sparse
