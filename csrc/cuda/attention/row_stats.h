// What the passes of fused attention's backward know about each row of scores.

#pragma once

#include <optional>
#include <utility>

#include "../common/launch.h"
#include "attention.h"

namespace ds_sparse::attention {

// Of a row of scores: the log-sum-exp of its exponents, of two; what is taken off the gradients of its probabilities, the
// sum of grad_output * output less the gradient of lse; the origin of its exponents, of e, and 1 over their sum, which
// give its probabilities where the origin is too large for the first.
struct Row {
  float lse, delta, origin, inverse;
};

// One that has no probabilities, or does not exist.
__host__ __device__ constexpr Row no_row() { return {kInfinity, 0.0f, kInfinity, 0.0f}; }

// Rows (B, H, 4, padded T), each member in a plane of its own: the copy engine brings whole blocks, past the last token
// too, and there are as many.
struct Rows {
  const float* data;
  int64_t padded;

  __device__ const float* plane(int64_t matrix, int member) const { return data + (matrix * 4 + member) * padded; }
  __device__ Row at(int64_t matrix, int token) const {
    const float* first = plane(matrix, 0) + token;
    return {first[0], first[padded], first[2 * padded], first[3 * padded]};
  }
};

// The tensor that holds the rows, and how kernels read it. row_stats.cu
std::pair<Tensor, Rows> make_rows(
    const Launcher& launch, const Tensor& grad_output, const std::optional<Tensor>& grad_lse, const Tensor& output,
    const Tensor& row_sums, int64_t block);

}  // namespace ds_sparse::attention
