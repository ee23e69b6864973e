// Sums over rows of grad_output * output, for the passes of fused attention's backward.

#include <torch/csrc/stable/ops.h>

#include "attention_arguments.h"
#include "attention_rows.h"

namespace ds_sparse::attention {
namespace {

constexpr int kLanes = 8;   // of a row
constexpr int kAtOnce = 4;  // rows of a thread, whose reads are under way together
constexpr int kRowsOfBlock = kThreads / kLanes * kAtOnce;
static_assert(kHopperTile % kRowsOfBlock == 0);

template <class T>
__global__ void __launch_bounds__(kThreads) rows_kernel(
    Matrices<const T> grad_output, Matrices<const T> output, const float2* row_sums, const float* grad_lse, float* to,
    int64_t matrices, int64_t padded, int heads, int queries, int width) {
  const int lane = threadIdx.x % kLanes;
  const int64_t tasks_of_matrix = padded / kRowsOfBlock;
  for (int64_t task = blockIdx.x; task < matrices * tasks_of_matrix; task += gridDim.x) {
    const int64_t matrix = task / tasks_of_matrix;
    const int first = static_cast<int>(task % tasks_of_matrix) * kRowsOfBlock + threadIdx.x / kLanes;
    const auto token_of = [&](int i) { return first + i * (kThreads / kLanes); };
    const int batch = matrix / heads, head = matrix % heads;
    const T *a = grad_output.of(batch, head), *b = output.of(batch, head);
    float sums[kAtOnce] = {};
    for (int column = lane * kRun<T>; column < width; column += kLanes * kRun<T>) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int64_t token = min(token_of(i), queries - 1);
        const auto x = load_aligned(a + token * grad_output.token_stride + column);
        const auto y = load_aligned(b + token * output.token_stride + column);
#pragma unroll
        for (int e = 0; e < kRun<T>; ++e) {
          sums[i] += static_cast<float>(x.element[e]) * static_cast<float>(y.element[e]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float sum = sum_of_lanes(sums[i], kLanes);
      const int token = token_of(i);
      if (lane == 0) {
        const int64_t place = matrix * queries + token;
        const float2 of_row = token < queries ? row_sums[place] : make_float2(-kInfinity, 0);  // origin and sum
        Row result = no_row();
        if (of_row.y > 0) {
          const float delta = sum - (grad_lse != nullptr ? grad_lse[place] : 0.0f);
          result = {of_row.x * kLog2E + log2f(of_row.y), delta, of_row.x, 1 / of_row.y};
        }
        float* of_token = to + matrix * 4 * padded + token;
        of_token[0] = result.lse;
        of_token[padded] = result.delta;
        of_token[2 * padded] = result.origin;
        of_token[3 * padded] = result.inverse;
      }
    }
  }
}

}  // namespace

std::pair<Tensor, Rows> make_rows(
    const Launcher& launch, const Tensor& grad_output, const std::optional<Tensor>& grad_lse, const Tensor& output,
    const Tensor& row_sums) {
  if (grad_lse) {
    check_contiguous(*grad_lse, "grad_lse");
  }
  const int64_t batch = output.size(0), heads = output.size(1), queries = output.size(2);
  const int64_t padded = (queries + kHopperTile - 1) / kHopperTile * kHopperTile, rows = batch * heads * padded;
  Tensor data = torch::stable::new_empty(output, {4 * rows}, ScalarType::Float);
  float* to = data.mutable_data_ptr<float>();
  with_element<false>(output, "attention", [&](auto zero) {
    using T = decltype(zero);
    launch(
        rows_kernel<T>, rows / kRowsOfBlock, kThreads, matrices_of<const T>(grad_output), matrices_of<const T>(output),
        reinterpret_cast<const float2*>(row_sums.const_data_ptr<float>()),
        grad_lse ? grad_lse->const_data_ptr<float>() : nullptr, to, batch * heads, padded, static_cast<int>(heads),
        static_cast<int>(queries), static_cast<int>(output.size(3)));
  });
  return {data, Rows{to, padded}};
}

}  // namespace ds_sparse::attention
