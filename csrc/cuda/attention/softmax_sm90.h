// The softmax of the forward pass on Hopper: what a lane keeps of its two rows while keys pass.

#pragma once

#include <type_traits>

#include "scores_sm90.h"
#include "softmax.h"

namespace ds_sparse::attention {

// Rescales a lane's sums of two rows.
template <int kCount>
__device__ __forceinline__ void rescale(float (&sums)[kCount], float rescale0, float rescale8) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    sums[i] *= rescale0;
    sums[i + 1] *= rescale0;
    sums[i + 2] *= rescale8;
    sums[i + 3] *= rescale8;
  }
}

// A row_sum of a step beyond this says that a score lies far above row_max: probabilities come near the end of what
// fp16 holds, or, in bf16, leave too little of fp32's range to sums of their products with values.
template <class T>
constexpr float kLargestRowSum = std::is_same_v<T, __half> ? 0x1p15f : 0x1p30f;

// A lane's two rows: the number that exponents are taken relative to, and the sums of exponentials.
template <int kBlockN, bool kPlain>
struct OnlineSoftmax {
  float row_max0 = -kInfinity, row_max8 = -kInfinity, row_sum0 = 0, row_sum8 = 0;
  bool have_row_max = false;  // whether all rows of the warp have a maximum

  __device__ __forceinline__ void reset() {
    row_max0 = row_max8 = -kInfinity;
    row_sum0 = row_sum8 = 0;
    have_row_max = false;
  }

  // Moves row_max to the scores' maxima, times `unit`, where some row's is more than `threshold` above. Returns
  // whether, and by what, to rescale the output.
  __device__ __forceinline__ bool update_row_max(
      const float (&scores)[kBlockN / 2], float softmax_scale_log2, float threshold, float& rescale0, float& rescale8,
      float unit = 1) {
    // Four chains for each row: one would be bound by its latency.
    float largest[16];
#pragma unroll
    for (int i = 0; i < kBlockN / 2; ++i) {
      largest[i % 16] = i < 16 ? scores[i] : fmaxf(largest[i % 16], scores[i]);
    }
#pragma unroll
    for (int i = 4; i < 16; ++i) {
      largest[i % 4] = fmaxf(largest[i % 4], largest[i]);
    }
    const float new0 = fmaxf(row_max0, row_reduce_max(fmaxf(largest[0], largest[1])) * unit);
    const float new8 = fmaxf(row_max8, row_reduce_max(fmaxf(largest[2], largest[3])) * unit);
    const bool moves = __any_sync(0xffffffffu, new0 > row_max0 + threshold || new8 > row_max8 + threshold);
    if (moves) {
      rescale0 = exp2_approx((row_max0 - (new0 == -kInfinity ? 0.0f : new0)) * softmax_scale_log2);
      rescale8 = exp2_approx((row_max8 - (new8 == -kInfinity ? 0.0f : new8)) * softmax_scale_log2);
      row_max0 = new0;
      row_max8 = new8;
      row_sum0 *= rescale0;
      row_sum8 *= rescale8;
    }
    have_row_max = __all_sync(0xffffffffu, row_max0 > -kInfinity && row_max8 > -kInfinity);
    return moves;
  }

  // Tells if some row's maximum, in units of exponents of e, is such that a factor log2(e) would round it visibly.
  __device__ __forceinline__ bool have_large_max() const {
    return __any_sync(0xffffffffu, fmaxf(fabsf(row_max0), fabsf(row_max8)) > 128);
  }
  __device__ __forceinline__ void scale_and_subtract_row_max(float (&scores)[kBlockN / 2], float scale) const {
    const float base0 = row_max0 == -kInfinity ? 0.0f : row_max0, base8 = row_max8 == -kInfinity ? 0.0f : row_max8;
#pragma unroll
    for (int i = 0; i < kBlockN / 2; ++i) {
      scores[i] = fmaf(scores[i], scale, -(i % 4 < 2 ? base0 : base8));
    }
  }

  // Scores become exponentials, whose sums are the lane's.
  __device__ __forceinline__ float2 exponentiate(float (&scores)[kBlockN / 2], float softmax_scale_log2) const {
    return exponentiate(scores, softmax_scale_log2, softmax_scale_log2);
  }
  // kPlain: the factor of maxima may be another one.
  __device__ __forceinline__ float2
  exponentiate(float (&scores)[kBlockN / 2], float softmax_scale_log2, float of_max_log2) const {
    const float base0 = row_max0 == -kInfinity ? 0.0f : row_max0, base8 = row_max8 == -kInfinity ? 0.0f : row_max8;
    const float scaled_max0 = base0 * of_max_log2, scaled_max8 = base8 * of_max_log2;
    float2 sums{0, 0};
#pragma unroll
    for (int i = 0; i < kBlockN / 2; i += 4) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        scores[i + e] = kPlain ? exp2_approx(scores[i + e] * softmax_scale_log2 - (e < 2 ? scaled_max0 : scaled_max8))
                               : exp2_approx((scores[i + e] - (e < 2 ? base0 : base8)) * softmax_scale_log2);
      }
      sums.x += scores[i] + scores[i + 1];
      sums.y += scores[i + 2] + scores[i + 3];
    }
    return sums;
  }
};

}  // namespace ds_sparse::attention
