// Statistics of each row of scores that the passes of fused attention's backward read.

#pragma once

#include <cuda_bf16.h>

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

// A number as columns of a row whose product with ones it is, to 24 bits. They are bf16 whatever operands are: numbers
// of fp16 end at 65504.
struct alignas(16) StatColumns {
  __nv_bfloat16 parts[8];
};
constexpr int kPartsOfStat = 3;

__device__ __forceinline__ StatColumns to_columns(float x) {
  StatColumns columns{};
#pragma unroll
  for (int i = 0; i < kPartsOfStat; ++i) {
    columns.parts[i] = __float2bfloat16(x);
    x -= __bfloat162float(columns.parts[i]);
  }
  return columns;
}

// Statistics of all rows, (B, H, 4, padded T), by their aligned numbers, each member in a plane of its own: the copy
// engine brings whole blocks, past the last token too, and there are as many.
struct RowStatsPlanes {
  float* data;
  int64_t padded;
  // (B, H, 2, padded T), or null: minus lse over `scale_log2`, which exponents multiply products of queries and keys
  // by, and minus delta. Added to these products, and to those of grad_output and values, they leave nothing to look
  // up.
  StatColumns* stat_columns;
  float scale_log2;

  __device__ const float* plane(int64_t matrix, int member) const { return data + (matrix * 4 + member) * padded; }
  __device__ const StatColumns* stat_columns_of(int64_t matrix, int member) const {
    return stat_columns + (matrix * 2 + member) * padded;
  }
  __device__ void set(int64_t matrix, int token, const RowStats& stats) const {
    float* first = data + matrix * 4 * padded + token;
    first[0] = stats.lse;
    first[padded] = stats.delta;
    first[2 * padded] = stats.row_max;
    first[3 * padded] = stats.inverse_sum;
    if (stat_columns != nullptr) {
      StatColumns* of_token = stat_columns + matrix * 2 * padded + token;
      // A row without probabilities has an infinite one, of which there are no parts. NaN stays, so that the row is
      // made again (recompute.cu).
      constexpr float most = 3.3e38f;
      const float of_products = stats.lse / scale_log2;
      of_token[0] = to_columns(of_products > most ? -most : -of_products);
      of_token[padded] = to_columns(-stats.delta);
    }
  }
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

// What a pass wants of rows besides: sums of 0 for the gradients of queries; statistics as columns, for exponents that
// multiply by this number.
struct RowsWanted {
  bool sums = false;
  std::optional<float> stats_scale_log2;
};

// What backward's passes read of rows, and begin their sums with; the tensor holds all.
struct RowsOfBackward {
  Tensor data;
  RowStatsPlanes row_stats;
  GradQuerySums grad_query_sums;
};

// Space for so many rows of each of `matrices`, and so many that are summed.
inline RowsOfBackward empty_rows(
    const Tensor& on, int64_t matrices, int64_t padded, int64_t summed, int64_t head_dim, const RowsWanted& wanted) {
  constexpr int64_t floats = sizeof(StatColumns) / sizeof(float);
  const int64_t rows = matrices * padded, of_stats = wanted.stats_scale_log2 ? 2 * rows * floats : 0;
  const int64_t columns = head_dim <= 64 ? 64 : 128, of_sums = wanted.sums ? matrices * summed * columns : 0;
  Tensor data = empty_on(on, {4 * rows + of_stats + of_sums}, ScalarType::Float);
  float *first = data.mutable_data_ptr<float>(), *behind = first + 4 * rows;
  return {
      data,
      {first, padded, of_stats > 0 ? reinterpret_cast<StatColumns*>(behind) : nullptr,
       wanted.stats_scale_log2.value_or(0)},
      {wanted.sums ? behind + of_stats : nullptr, summed, static_cast<int>(columns)}};
}

// Statistics of all rows, and what is wanted besides. row_stats.cu
RowsOfBackward make_row_stats(
    const Launcher& launch, const Tensor& grad_output, const std::optional<Tensor>& grad_lse, const Tensor& output,
    const Tensor& row_sums, const BlockSpans& spans, const RowsWanted& wanted = {});

}  // namespace ds_sparse::attention
