// What softmax does with scores: scales them, adds to them, takes their powers.

#pragma once

#include <limits>
#include <type_traits>

#include "../compute.h"
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

template <class A>
__device__ __forceinline__ A biased(A logit, A bias) {
  if (logit == -infinity<A>() || bias == -infinity<A>()) {
    return -infinity<A>();
  }
  const A sum = logit + bias;
  return sum == -infinity<A>() ? std::numeric_limits<A>::lowest() : sum;
}

// What exponents are taken relative to: the largest logit, or 0 where all are -inf, so that exp gives 0 and not NaN.
template <class A>
__device__ __forceinline__ A finite_reference(A largest) {
  return largest == -infinity<A>() ? A(0) : largest;
}

template <class A>
constexpr A kLog2E = 1.4426950408889634;

// 2^(scale * (x - reference)).
template <class A>
__device__ __forceinline__ A power_of_difference(A x, A reference, A scale) {
  if constexpr (std::is_same_v<A, float>) {
    // exp2f brings back results below 2^-126, which is not worth its instructions here.
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"((x - reference) * scale));
    return power;
  } else {
    return exp2((x - reference) * scale);
  }
}

}  // namespace ds_sparse
