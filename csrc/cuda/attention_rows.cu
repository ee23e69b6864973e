// Sums over rows of grad_output * output, for the passes of fused attention's backward.

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "attention_arguments.h"
#include "attention_rows.h"

namespace ds_sparse::attention {
namespace {

// Eight threads a row.
template <class T>
__global__ void rows_kernel(
    Matrices<const T> grad_output, Matrices<const T> output, const float2* row_sums, const float* grad_lse, float* to,
    int64_t rows, int64_t padded, int heads, int queries, int width) {
  const int lane = threadIdx.x % 8;
  // Whole warps go on together, as lanes add across each other.
  for (int64_t row = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 8; row < (rows + 3) / 4 * 4;
       row += int64_t{gridDim.x} * blockDim.x / 8) {
    const int64_t matrix = row / padded, token = row % padded;
    const bool exists = row < rows && token < queries;
    float sum = 0;
    if (exists) {
      const int batch = matrix / heads, head = matrix % heads;
      const T* a = grad_output.of(batch, head) + token * grad_output.token_stride;
      const T* b = output.of(batch, head) + token * output.token_stride;
      for (int column = lane * kRun<T>; column < width; column += 8 * kRun<T>) {
        const auto x = load_aligned(a + column), y = load_aligned(b + column);
#pragma unroll
        for (int i = 0; i < kRun<T>; ++i) {
          sum += static_cast<float>(x.element[i]) * static_cast<float>(y.element[i]);
        }
      }
    }
    sum = sum_of_lanes(sum, 8);
    if (lane == 0 && row < rows) {
      const int64_t place = matrix * queries + token;
      const float2 of_row = exists ? row_sums[place] : make_float2(-kInfinity, 0);  // origin and sum
      Row result = no_row();
      if (of_row.y > 0) {
        const float delta = sum - (grad_lse != nullptr ? grad_lse[place] : 0.0f);
        result = {of_row.x * kLog2E + log2f(of_row.y), delta, of_row.x, 1 / of_row.y};
      }
      float* first = to + matrix * 4 * padded + token;
      first[0] = result.lse;
      first[padded] = result.delta;
      first[2 * padded] = result.origin;
      first[3 * padded] = result.inverse;
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
        rows_kernel<T>, std::min<int64_t>((rows + 15) / 16, 1 << 20), 128, matrices_of<const T>(grad_output),
        matrices_of<const T>(output), reinterpret_cast<const float2*>(row_sums.const_data_ptr<float>()),
        grad_lse ? grad_lse->const_data_ptr<float>() : nullptr, to, rows, padded, static_cast<int>(heads),
        static_cast<int>(queries), static_cast<int>(output.size(3)));
  });
  return {data, Rows{to, padded}};
}

}  // namespace ds_sparse::attention
