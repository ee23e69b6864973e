// What the passes of fused attention's backward know about each row of scores.

#pragma once

#include <optional>
#include <utility>

#include "attention.h"
#include "launch.h"

namespace ds_sparse::attention {

// Of a row of scores, in powers of two: the log-sum-exp, and its two parts as forward found them; and what is taken off the
// gradients of its probabilities, the sum of grad_output * output less the gradient of lse.
struct __align__(16) Row {
  float lse, delta, origin, log_sum;
};

// One that has no probabilities, or does not exist.
__host__ __device__ constexpr Row no_row() { return {kInfinity, 0.0f, 0.0f, kInfinity}; }

// Rows (B, H, padded T): the copy engine may read a whole block where tokens end within it.
struct Rows {
  const Row* data;
  int64_t padded;

  __device__ const Row* of(int64_t matrix) const { return data + matrix * padded; }
};

// The tensor that holds the rows, and how kernels read it. attention_rows.cu
std::pair<Tensor, Rows> make_rows(
    const Launcher& launch, const Tensor& grad_output, const std::optional<Tensor>& grad_lse, const Tensor& output,
    const Tensor& row_sums);

}  // namespace ds_sparse::attention
