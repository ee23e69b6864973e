// A softmax over rows that pass in steps: what is kept of a row, and its reductions.

#pragma once

#include <cmath>

#include "scoring.h"

namespace ds_sparse::attention {

// The number that a row's exponents, of e, are taken relative to, the largest of them or near it, and the sum of those
// exponentials. In the logarithm of all, a large maximum would leave little of the sum. {-inf, 0} where there are none.
struct RowMaxSum {
  float row_max, row_sum;

  __device__ RowMaxSum(float largest, float sum) : row_max(sum == 0 ? -kInfinity : largest), row_sum(sum) {}
  __device__ float lse() const { return row_sum == 0 ? -kInfinity : row_max + logf(row_sum); }
};

// Sum, or maximum, over the four lanes that share a row.
__device__ __forceinline__ float row_reduce_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
__device__ __forceinline__ float row_reduce_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace ds_sparse::attention
