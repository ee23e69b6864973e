// Statistics of each row of scores that the passes of fused attention's backward read.

#pragma once

#include <optional>

#include "../common/launch.h"
#include "block_spans.h"
#include "scoring.h"

namespace ds_sparse::attention {

// A row of scores: the log-sum-exp of its exponents, of two; what is taken off the gradients of its probabilities,
// the sum of grad_output * output less the gradient of lse; what its exponents, of e, are taken relative to, and 1 over
// their sum, which give its probabilities where that maximum is too large for the first.
struct RowStats {
  float lse, delta, row_max, inverse_sum;
};

// One that has no probabilities, or does not exist.
__host__ __device__ constexpr RowStats no_row_stats() { return {kInfinity, 0.0f, kInfinity, 0.0f}; }

// Statistics of all rows, (B, H, 4, padded T), by their aligned numbers, each member in a plane of its own: the copy
// engine brings whole blocks, past the last token too, and there are as many.
struct RowStatsPlanes {
  const float* data;
  int64_t padded;

  __device__ const float* plane(int64_t matrix, int member) const { return data + (matrix * 4 + member) * padded; }
  __device__ RowStats at(int64_t matrix, int token) const {
    const float* first = plane(matrix, 0) + token;
    return {first[0], first[padded], first[2 * padded], first[3 * padded]};
  }
};

// The gradients of queries in fp32, not scaled yet, as thread blocks add to them: (B, H, padded T / 16) warp tiles,
// each of `columns` / 8 runs in the order in which a warp's lanes hold 16 x 8 sums, four a lane.
struct GradQuerySums {
  float* data;  // null: not asked for
  int64_t padded;
  int columns;

  __device__ float* warp_tile(int64_t matrix, int token) const {
    return data + (matrix * padded + token / 16 * 16) * columns;
  }
};

// What backward's passes read of rows, and begin their sums with; the tensor holds both.
struct RowsOfBackward {
  Tensor data;
  RowStatsPlanes row_stats;
  GradQuerySums grad_query_sums;
};

// Statistics of all rows, and sums of 0 for the gradients of queries where they are asked for. row_stats.cu
RowsOfBackward make_row_stats(
    const Launcher& launch, const Tensor& grad_output, const std::optional<Tensor>& grad_lse, const Tensor& output,
    const Tensor& row_sums, const BlockSpans& spans, bool with_sums = false);

}  // namespace ds_sparse::attention
