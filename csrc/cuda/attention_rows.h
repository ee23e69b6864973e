// What the passes of fused attention's backward know about each row of scores.

#pragma once

#include <optional>
#include <utility>

#include "attention.h"
#include "launch.h"

namespace ds_sparse::attention {

// Of a row of scores: the log-sum-exp, in powers of two, and what is taken off the gradients of its probabilities, the
// sum of grad_output * output less the gradient of lse. A row that has no probabilities, or does not exist, is {inf, 0}.
struct Row {
  float lse, delta;
};

// Rows (B, H, padded T): the copy engine may read a whole block where tokens end within it.
struct Rows {
  const Row* data;
  int64_t padded;

  __device__ const Row* of(int64_t matrix) const { return data + matrix * padded; }
};

// The tensor that holds the rows, and how kernels read it. attention_rows.cu
std::pair<Tensor, Rows> make_rows(
    const Launcher& launch, const Tensor& grad_output, const std::optional<Tensor>& grad_lse, const Tensor& output,
    const Tensor& lse);

}  // namespace ds_sparse::attention
