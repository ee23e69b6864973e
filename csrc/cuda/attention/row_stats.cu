// Sums over rows of grad_output * output, for the passes of fused attention's backward.

#include <algorithm>

#include "arguments.h"
#include "row_stats.h"

namespace ds_sparse::attention {
namespace {

constexpr int kLanes = 8;             // of a row
constexpr int kAtOnce = 4;            // rows of a thread, whose reads are under way together
constexpr int kBeside = 32 / kLanes;  // rows that a warp reads together
constexpr int kRowsOfWarp = kBeside * kAtOnce, kRowsOfBlock = kThreads / 32 * kRowsOfWarp;
static_assert(kHopperBlockM % kRowsOfBlock == 0 && kRowsOfWarp == 16);

template <class T, bool kPacked>
__global__ void __launch_bounds__(kThreads) row_stats_kernel(
    Matrices<const T> grad_output, Matrices<const T> output, const float2* row_sums, const float* grad_lse,
    RowStatsPlanes to, GradQuerySums sums, int blocks_of_matrix, int heads, int queries, int head_dim,
    BlockSpans spans) {
  const int lane = threadIdx.x % 32, matrix = blockIdx.x / blocks_of_matrix, batch = matrix / heads,
            head = matrix % heads;
  const int first = blockIdx.x % blocks_of_matrix * kRowsOfBlock + threadIdx.x / 32 * kRowsOfWarp;
  // A lane reads of the rows of its eight lanes, and writes what is known of one of the warp's.
  const int own = first + lane % kRowsOfWarp;
  const int64_t place = int64_t{matrix} * queries + own;
  // Tokens behind the last block have no span.
  const int2 span = kPacked ? first < queries ? spans.sixteen(first) : int2{0, 0} : int2{first, queries - first};
  const bool exists = own - first < span.y;
  const float2 of_row = exists ? row_sums[place] : make_float2(-kInfinity, 0);  // row_max and row_sum
  const float of_lse = exists && grad_lse != nullptr ? grad_lse[place] : 0.0f;
  if (sums.data != nullptr && first < sums.padded) {
    float4* of_warp = reinterpret_cast<float4*>(sums.warp_tile(matrix, first));
    for (int i = lane; i < kRowsOfWarp * sums.columns / 4; i += 32) {
      of_warp[i] = make_float4(0, 0, 0, 0);
    }
  }
  const T *a = grad_output.of(batch, head), *b = output.of(batch, head);
  float products[kAtOnce] = {};
  for (int column = lane % kLanes * kRun<T>; column < head_dim; column += kLanes * kRun<T>) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = i * kBeside + lane / kLanes;
      const int64_t token = kPacked ? row < span.y ? span.x + row : 0 : min(first + row, queries - 1);
      const auto x = load_aligned(a + grad_output.tokens.at(token) + column);
      const auto y = load_aligned(b + output.tokens.at(token) + column);
#pragma unroll
      for (int e = 0; e < kRun<T>; ++e) {
        products[i] += static_cast<float>(x.element[e]) * static_cast<float>(y.element[e]);
      }
    }
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const float of_eight = __shfl_sync(0xffffffffu, sum_of_lanes(products[i], kLanes), lane % kBeside * kLanes);
    sum = lane / kBeside % kAtOnce == i ? of_eight : sum;
  }
  if (lane < kRowsOfWarp) {
    RowStats result = no_row_stats();
    if (of_row.y != 0) {
      result = {of_row.x * kLog2E + log2f(of_row.y), sum - of_lse, of_row.x, 1 / of_row.y};
    }
    to.set(matrix, own, result);
  }
}

}  // namespace

RowsOfBackward make_row_stats(
    const Launcher& launch, const Tensor& grad_output, const std::optional<Tensor>& grad_lse, const Tensor& output,
    const Tensor& row_sums, const BlockSpans& spans, const RowsWanted& wanted) {
  if (grad_lse) {
    check_contiguous(*grad_lse, "grad_lse");
  }
  const int64_t batch = output.size(0), heads = output.size(1), head_dim = output.size(output.dim() - 1),
                queries = row_sums.numel() / (2 * batch * heads), block = 1 << spans.log_block;
  const int64_t multiple = std::max<int64_t>(block, kHopperBlockM);
  const int64_t padded = (queries + multiple - 1) / multiple * multiple, matrices = batch * heads;
  const RowsOfBackward made = empty_rows(output, matrices, padded, (queries + 15) / 16 * 16, head_dim, wanted);
  with_element<false>(output, "attention", [&](auto zero) {
    using T = decltype(zero);
    launch(
        spans.spans == nullptr ? row_stats_kernel<T, false> : row_stats_kernel<T, true>,
        matrices * padded / kRowsOfBlock, kThreads, matrices_of<const T>(grad_output), matrices_of<const T>(output),
        reinterpret_cast<const float2*>(row_sums.const_data_ptr<float>()),
        grad_lse ? grad_lse->const_data_ptr<float>() : nullptr, made.row_stats, made.grad_query_sums,
        static_cast<int>(padded / kRowsOfBlock), static_cast<int>(heads), static_cast<int>(queries),
        static_cast<int>(head_dim), spans);
  });
  return made;
}

}  // namespace ds_sparse::attention
