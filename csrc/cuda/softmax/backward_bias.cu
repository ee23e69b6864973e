// The gradient of what was added to the scores of a softmax over live blocks. Schema and shapes: csrc/library.cpp.

#include <torch/csrc/stable/library.h>

#include <vector>

#include "../../checks.h"
#include "../../compute.h"
#include "../common/elements.h"
#include "../common/launch.h"
#include "../common/vector.h"
#include "tuning.h"

namespace ds_sparse {
namespace {

constexpr int kThreads = SoftmaxBackwardBiasTuning::kThreads, kColumns = SoftmaxBackwardBiasTuning::kColumns;

// The live blocks of all heads and where their values are.
struct Blocks {
  const int32_t* row_offsets;
  uint32_t layout_heads, rows, values;
  uint32_t live;  // of all stored layouts
  int log_block;

  // Entries [x, y) of block row `row` of `head`.
  __device__ int2 entries_of(uint32_t head, uint32_t row) const {
    const int64_t at = (layout_heads == 1 ? 0 : int64_t{head} * rows) + row;
    return {row_offsets[at], row_offsets[at + 1]};
  }

  // Where entry n of `head` starts among the elements of the values (B, V, b, b).
  __device__ int64_t element_of(uint32_t batch, uint32_t head, int entry) const {
    return (int64_t{batch} * values + (layout_heads == 1 ? int64_t{head} * live : 0) + entry) << 2 * log_block;
  }
};

// Sizes of the gradient of a bias: (B or 1, H or 1, T or 1, S).
struct BiasShape {
  int64_t batch, heads, tokens, columns;
};

// [first, last) of a dimension of `size`: the one that is given, or all where the bias has 1.
struct Extent {
  int64_t first, last;
  __device__ Extent(int64_t given, int64_t bias_size, int64_t size)
      : first(bias_size == 1 ? 0 : given), last(bias_size == 1 ? size : given + 1) {}
};

// One output element a thread. Where tokens are summed, threadIdx.y takes turns at block rows, and
// their sums are added in order, in fp64: the terms are many, one after the other, and may cancel. A thread finds the
// entry of its own column in a block row by bisection: dead blocks are not read.
template <class T>
__global__ void softmax_bias_backward_kernel(
    const T* __restrict__ values, Compute<T>* __restrict__ grad_bias, Blocks blocks,
    const int32_t* __restrict__ columns, int64_t batch, int64_t heads, BiasShape shape) {
  __shared__ double partial_sums[kThreads];
  const bool sums_tokens = shape.tokens == 1;
  const int64_t outputs = shape.batch * shape.heads * shape.tokens * shape.columns;
  const int64_t block = int64_t{1} << blocks.log_block;
  for (int64_t start = blockIdx.x * int64_t{blockDim.x}; start < outputs; start += gridDim.x * int64_t{blockDim.x}) {
    const int64_t output = start + threadIdx.x;
    double sum = 0;
    if (output < outputs) {
      const int64_t column = output % shape.columns;
      const int64_t token = output / shape.columns % shape.tokens;
      const Extent over_heads(output / shape.columns / shape.tokens % shape.heads, shape.heads, heads);
      const Extent over_batch(output / shape.columns / shape.tokens / shape.heads, shape.batch, batch);
      const Extent over_rows(token / block, shape.tokens, blocks.rows);
      const Extent over_tokens(token % block, shape.tokens, block);
      for (int64_t head = over_heads.first; head < over_heads.last; ++head) {
        for (int64_t row = over_rows.first + threadIdx.y; row < over_rows.last; row += blockDim.y) {
          const int2 entries = blocks.entries_of(head, row);
          int low = entries.x, high = entries.y;
          while (low < high) {
            const int middle = low + (high - low) / 2;
            if (columns[middle] < column / block) {
              low = middle + 1;
            } else {
              high = middle;
            }
          }
          if (low == entries.y || columns[low] != column / block) {
            continue;
          }
          for (int64_t b = over_batch.first; b < over_batch.last; ++b) {
            const T* value = values + blocks.element_of(b, head, low) + column % block;
            for (int64_t t = over_tokens.first; t < over_tokens.last; ++t) {
              sum += static_cast<Compute<T>>(value[t * block]);
            }
          }
        }
      }
    }
    if (sums_tokens) {
      partial_sums[threadIdx.y * blockDim.x + threadIdx.x] = sum;
      __syncthreads();
      for (unsigned y = 1; threadIdx.y == 0 && y < blockDim.y; ++y) {
        sum += partial_sums[y * blockDim.x + threadIdx.x];
      }
      __syncthreads();
    }
    if (threadIdx.y == 0 && output < outputs) {
      grad_bias[output] = static_cast<Compute<T>>(sum);
    }
  }
}

Blocks blocks_of(
    const Tensor& values, const Tensor& row_offsets, const Tensor& columns, int64_t layout_heads, int64_t block) {
  const int64_t rows = (row_offsets.size(0) - 1) / layout_heads;
  return {row_offsets.const_data_ptr<int32_t>(), static_cast<uint32_t>(layout_heads),    static_cast<uint32_t>(rows),
          static_cast<uint32_t>(values.size(1)), static_cast<uint32_t>(columns.size(0)), log2_of(block)};
}

Tensor softmax_bias_backward(
    const Tensor& values, const Tensor& row_offsets, const Tensor& columns, int64_t layout_heads, int64_t heads,
    int64_t block, const std::vector<int64_t>& shape) {
  check_bias_backward(values, row_offsets, columns, layout_heads, heads, block, shape);
  const bool is_double = values.scalar_type() == ScalarType::Double;
  Tensor grad_bias = empty_on(values, shape, is_double ? ScalarType::Double : ScalarType::Float);
  const Launcher launch(values);
  const dim3 threads = shape[2] == 1 ? dim3(kColumns, kThreads / kColumns) : dim3(kThreads);
  with_element<true>(values, "softmax", [&](auto zero) {
    using T = decltype(zero);
    launch(
        softmax_bias_backward_kernel<T>, (grad_bias.numel() + threads.x - 1) / threads.x, threads,
        static_cast<const T*>(values.const_data_ptr()), static_cast<Compute<T>*>(grad_bias.mutable_data_ptr()),
        blocks_of(values, row_offsets, columns, layout_heads, block), columns.const_data_ptr<int32_t>(), values.size(0),
        heads, BiasShape{shape[0], shape[1], shape[2], shape[3]});
  });
  return grad_bias;
}

}  // namespace
}  // namespace ds_sparse

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CUDA, m) {
  m.impl("softmax_bias_backward", TORCH_BOX(&ds_sparse::softmax_bias_backward));
}
