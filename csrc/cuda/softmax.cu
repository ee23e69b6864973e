// Row softmax over live blocks. Schemas and shapes: csrc/library.cpp; meaning: ds_sparse/reference.py.
//
// A token row is shared by `width` neighbouring lanes of a warp, which take its 16-byte runs in turn, whatever the size
// of its blocks. A row costs what its own live blocks cost and may be of any length: it is read twice (maximum and sum
// in one sweep, then the result), the second time mostly from cache. A warp holds at most 8 rows, and they are rows of
// one block row since blocks are 8 or more: its lanes loop equally often.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include "../checks.h"
#include "../compute.h"
#include "launch.h"
#include "vector.h"

namespace ds_sparse {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 32;
constexpr int kMostRowsAWarp = 8;

// The live blocks of all heads and where their values are.
struct Blocks {
  const int32_t* row_offsets;
  int64_t layout_heads, rows, values, block;

  // N, the live blocks of the stored layouts. Only the device knows it without a synchronisation.
  __device__ int64_t entries() const { return row_offsets[layout_heads * rows]; }
  __device__ int64_t heads() const { return layout_heads == 1 ? values / entries() : layout_heads; }

  // Entries [x, y) of block row `row` of `head`.
  __device__ int2 entries_of(int64_t head, int64_t row) const {
    const int64_t at = (layout_heads == 1 ? 0 : head) * rows + row;
    return {row_offsets[at], row_offsets[at + 1]};
  }

  // Where entry n of `head` starts among the elements of the values (B, V, b, b).
  __device__ int64_t element_of(int64_t batch, int64_t head, int64_t entry) const {
    return (batch * values + (layout_heads == 1 ? head * entries() : 0) + entry) * block * block;
  }
};

// All token rows of a tensor of values, and the share of a warp's lanes that each gets.
template <class T>
struct TokenRows {
  int64_t count, tokens, heads;
  int width;

  __device__ TokenRows(const Blocks& blocks, int64_t batch) {
    tokens = blocks.rows * blocks.block;
    heads = blocks.heads();
    count = batch * heads * tokens;
    // The smallest width that holds a row of average length.
    const int64_t runs = blocks.entries() * blocks.block / kRun<T>;
    width = kLanes / kMostRowsAWarp;
    while (width < kLanes && width * blocks.layout_heads * blocks.rows < runs) {
      width *= 2;
    }
  }

  __device__ int lane() const { return threadIdx.x % width; }
  __device__ int64_t first() const { return (blockIdx.x * int64_t{kThreads} + threadIdx.x) / width; }
  __device__ int64_t step() const { return gridDim.x * int64_t{kThreads} / width; }
};

// One token row: which it is, and its elements as `count` runs of 16 bytes.
template <class T>
struct TokenRow {
  int64_t batch, head, token, block, first_element, count;
  int first_entry, log_runs;

  __device__ TokenRow(const Blocks& blocks, const TokenRows<T>& all, int64_t number)
      : batch(number / all.tokens / all.heads),
        head(number / all.tokens % all.heads),
        token(number % all.tokens),
        block(blocks.block),
        log_runs(__ffs(static_cast<int>(block) / kRun<T>) - 1) {
    const int2 entries = blocks.entries_of(head, token / block);
    first_entry = entries.x;
    first_element = blocks.element_of(batch, head, entries.x) + token % block * block;
    count = static_cast<int64_t>(entries.y - entries.x) << log_runs;
  }

  __device__ int64_t within_block(int64_t run) const { return (run & ((int64_t{1} << log_runs) - 1)) * kRun<T>; }
  __device__ int64_t element(int64_t run) const {
    return first_element + (run >> log_runs) * block * block + within_block(run);
  }
  __device__ int64_t column(int64_t run, const int32_t* columns) const {
    return columns[first_entry + (run >> log_runs)] * block + within_block(run);
  }
};

// Something added to the scores, or a mask to keep where true, of shape (B or 1, H or 1, T or 1, S): strides are 0
// where the size is 1. `data` is null where there is none.
struct Bias {
  const void* data;
  bool keeps;
  int64_t batch, head, token, column;
};

struct Biases {
  Bias bias[3];
};

template <class A>
__device__ __forceinline__ A infinity() {
  return std::numeric_limits<A>::infinity();
}

// The scaled score. A finite one that overflows downwards stays finite: only -inf masks.
template <class A>
__device__ __forceinline__ A scaled(A score, A scale) {
  const A product = score * scale;
  return product == -infinity<A>() && isfinite(score) ? std::numeric_limits<A>::lowest() : product;
}

template <class A>
__device__ __forceinline__ A biased(A logit, A bias) {
  if (logit == -infinity<A>() || bias == -infinity<A>()) {
    return -infinity<A>();
  }
  const A sum = logit + bias;
  return sum == -infinity<A>() ? std::numeric_limits<A>::lowest() : sum;
}

// Scale, biases, masks and causality for the run that starts at `column`; dropped elements become -inf.
template <class T>
__device__ __forceinline__ void logits_of(
    const Run<T, kRun<T>>& scores, const TokenRow<T>& row, int64_t column, const Biases& biases, Compute<T> scale,
    bool causal, Compute<T> (&logits)[kRun<T>]) {
  using A = Compute<T>;
#pragma unroll
  for (int i = 0; i < kRun<T>; ++i) {
    logits[i] = scaled(static_cast<A>(scores.element[i]), scale);
  }
#pragma unroll
  for (const Bias& bias : biases.bias) {
    if (bias.data == nullptr) {
      continue;
    }
    const int64_t at = row.batch * bias.batch + row.head * bias.head + row.token * bias.token + column * bias.column;
    if (bias.keeps) {
      const auto keep = load_run<kRun<T>>(static_cast<const uint8_t*>(bias.data) + at, bias.column);
#pragma unroll
      for (int i = 0; i < kRun<T>; ++i) {
        logits[i] = keep.element[i] != 0 ? logits[i] : -infinity<A>();
      }
    } else {
      const auto added = load_run<kRun<T>>(static_cast<const T*>(bias.data) + at, bias.column);
#pragma unroll
      for (int i = 0; i < kRun<T>; ++i) {
        logits[i] = biased(logits[i], static_cast<A>(added.element[i]));
      }
    }
  }
  if (causal && column + kRun<T> > row.token + 1) {
#pragma unroll
    for (int i = 0; i < kRun<T>; ++i) {
      logits[i] = column + i > row.token ? -infinity<A>() : logits[i];
    }
  }
}

// What exponents are taken relative to: the largest logit, or 0 where all are -inf, so that exp gives 0 and not NaN.
template <class A>
__device__ __forceinline__ A finite_reference(A largest) {
  return largest == -infinity<A>() ? A(0) : largest;
}

template <class A>
__device__ __forceinline__ A exp_of_difference(A x, A reference) {
  constexpr A log2_e = 1.4426950408889634;
  return exp2((x - reference) * log2_e);
}

template <class T>
__global__ void __launch_bounds__(kThreads) softmax_forward_kernel(
    const T* __restrict__ scores, T* __restrict__ probs, Blocks blocks, const int32_t* __restrict__ columns,
    int64_t batch, Biases biases, Compute<T> scale, bool causal) {
  using A = Compute<T>;
  const TokenRows<T> rows(blocks, batch);
  for (int64_t number = rows.first(); number < rows.count; number += rows.step()) {
    const TokenRow<T> row(blocks, rows, number);
    A logits[kRun<T>];
    const auto read = [&](int64_t run) {
      const auto raw = load_run<kRun<T>>(scores + row.element(run));
      logits_of<T>(raw, row, row.column(run, columns), biases, scale, causal, logits);
    };

    A largest = -infinity<A>();
    A sum = 0;
    for (int64_t run = rows.lane(); run < row.count; run += rows.width) {
      read(run);
      A larger = largest;
#pragma unroll
      for (int i = 0; i < kRun<T>; ++i) {
        larger = max(larger, logits[i]);
      }
      const A reference = finite_reference(larger);
      sum *= exp_of_difference(largest, reference);
#pragma unroll
      for (int i = 0; i < kRun<T>; ++i) {
        sum += exp_of_difference(logits[i], reference);
      }
      largest = larger;
    }
    const A reference = finite_reference(max_of_lanes(largest, rows.width));
    sum = sum_of_lanes(sum * exp_of_difference(largest, reference), rows.width);
    const A factor = sum == 0 ? A(0) : 1 / sum;

    for (int64_t run = rows.lane(); run < row.count; run += rows.width) {
      read(run);
      Run<T, kRun<T>> result;
#pragma unroll
      for (int i = 0; i < kRun<T>; ++i) {
        result.element[i] = static_cast<T>(exp_of_difference(logits[i], reference) * factor);
      }
      store_run(probs + row.element(run), result);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) softmax_backward_kernel(
    const T* __restrict__ grad, const T* __restrict__ probs, T* __restrict__ grad_scores, Blocks blocks, int64_t batch,
    Compute<T> scale) {
  using A = Compute<T>;
  const TokenRows<T> rows(blocks, batch);
  for (int64_t number = rows.first(); number < rows.count; number += rows.step()) {
    const TokenRow<T> row(blocks, rows, number);
    A dot = 0;
    for (int64_t run = rows.lane(); run < row.count; run += rows.width) {
      const auto g = load_run<kRun<T>>(grad + row.element(run));
      const auto p = load_run<kRun<T>>(probs + row.element(run));
#pragma unroll
      for (int i = 0; i < kRun<T>; ++i) {
        dot += static_cast<A>(g.element[i]) * static_cast<A>(p.element[i]);
      }
    }
    dot = sum_of_lanes(dot, rows.width);
    for (int64_t run = rows.lane(); run < row.count; run += rows.width) {
      const auto g = load_run<kRun<T>>(grad + row.element(run));
      const auto p = load_run<kRun<T>>(probs + row.element(run));
      Run<T, kRun<T>> result;
#pragma unroll
      for (int i = 0; i < kRun<T>; ++i) {
        result.element[i] =
            static_cast<T>(scale * static_cast<A>(p.element[i]) * (static_cast<A>(g.element[i]) - dot));
      }
      store_run(grad_scores + row.element(run), result);
    }
  }
}

// Sizes of the gradient of a bias: (B or 1, H or 1, T or 1, S).
struct BiasShape {
  int64_t batch, heads, tokens, columns;
};

// [first, last) of a dimension of `size`: the one that is given, or all where the bias has 1.
struct Range {
  int64_t first, last;
  __device__ Range(int64_t given, int64_t bias_size, int64_t size)
      : first(bias_size == 1 ? 0 : given), last(bias_size == 1 ? size : given + 1) {}
};

// One output element a thread. Where tokens are summed, threadIdx.y shares out the block rows, and the shares are added
// in order, in fp64: the terms are many, one after the other, and may cancel. A thread finds the entry of its own
// column in a block row by bisection: dead blocks are not read.
template <class T>
__global__ void softmax_bias_backward_kernel(
    const T* __restrict__ values, Compute<T>* __restrict__ grad_bias, Blocks blocks,
    const int32_t* __restrict__ columns, int64_t batch, int64_t heads, BiasShape shape) {
  __shared__ double shares[kThreads];
  const bool sums_tokens = shape.tokens == 1;
  const int64_t outputs = shape.batch * shape.heads * shape.tokens * shape.columns;
  const int64_t block = blocks.block;
  for (int64_t start = blockIdx.x * int64_t{blockDim.x}; start < outputs; start += gridDim.x * int64_t{blockDim.x}) {
    const int64_t output = start + threadIdx.x;
    double sum = 0;
    if (output < outputs) {
      const int64_t column = output % shape.columns;
      const int64_t token = output / shape.columns % shape.tokens;
      const Range over_heads(output / shape.columns / shape.tokens % shape.heads, shape.heads, heads);
      const Range over_batch(output / shape.columns / shape.tokens / shape.heads, shape.batch, batch);
      const Range over_rows(token / block, shape.tokens, blocks.rows);
      const Range over_tokens(token % block, shape.tokens, block);
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
      shares[threadIdx.y * blockDim.x + threadIdx.x] = sum;
      __syncthreads();
      for (unsigned y = 1; threadIdx.y == 0 && y < blockDim.y; ++y) {
        sum += shares[y * blockDim.x + threadIdx.x];
      }
      __syncthreads();
    }
    if (threadIdx.y == 0 && output < outputs) {
      grad_bias[output] = static_cast<Compute<T>>(sum);
    }
  }
}

// Calls f with a zero of the element type.
template <class F>
void with_element_type(const Tensor& x, const F& f) {
  switch (x.scalar_type()) {
    case ScalarType::Half:
      return f(__half{});
    case ScalarType::BFloat16:
      return f(__nv_bfloat16{});
    case ScalarType::Float:
      return f(float{});
    case ScalarType::Double:
      return f(double{});
    default:
      check(false, "softmax takes float16, bfloat16, float32 and float64 on CUDA.");
  }
}

Blocks blocks_of(const Tensor& values, const Tensor& row_offsets, int64_t layout_heads, int64_t block) {
  const int64_t rows = (row_offsets.size(0) - 1) / layout_heads;
  return {row_offsets.const_data_ptr<int32_t>(), layout_heads, rows, values.size(1), block};
}

// A run a thread, and at most a few times what the device holds at once: rows longer than a warp need fewer threads.
int64_t thread_blocks(const Tensor& values, const Launcher& launch) {
  const int64_t runs = values.numel() * static_cast<int64_t>(values.element_size()) / 16;
  return std::min((runs + kThreads - 1) / kThreads, launch.multiprocessors() * 64);
}

// `x` is (B or 1, H or 1, T or 1, S), or (B or 1, S) with 2 dimensions.
Bias bias_of(
    const std::optional<Tensor>& x, int64_t dimensions, const Tensor& scores, int64_t heads, int64_t tokens,
    const char* name) {
  if (!x.has_value()) {
    return {};
  }
  check_dim(*x, dimensions, name);
  check_bias(*x, scores, heads, tokens, name);
  const auto stride = [&](int64_t dim) { return x->size(dim) == 1 ? 0 : x->stride(dim); };
  const bool keeps = x->scalar_type() == ScalarType::Bool;
  if (dimensions == 2) {
    return {x->const_data_ptr(), keeps, stride(0), 0, 0, stride(1)};
  }
  return {x->const_data_ptr(), keeps, stride(0), stride(1), stride(2), stride(3)};
}

Tensor softmax_forward(
    const Tensor& scores, const std::optional<Tensor>& rpe, const std::optional<Tensor>& key_padding_mask,
    const std::optional<Tensor>& attn_mask, const Tensor& row_offsets, const Tensor& columns, int64_t layout_heads,
    int64_t block, double scale, bool causal) {
  check_block(block);
  check_values(scores, block, "scores");
  check_list(columns, scores, "columns");
  Tensor probs = torch::stable::new_empty(scores, scores.sizes());
  if (probs.numel() == 0) {
    return probs;
  }
  const int64_t heads = heads_of(scores.size(1), columns.size(0), layout_heads);
  check_lists(row_offsets, layout_heads, heads, scores);
  const int64_t tokens = (row_offsets.size(0) - 1) / layout_heads * block;
  const Biases biases{
      bias_of(rpe, 4, scores, heads, tokens, "rpe"),
      bias_of(key_padding_mask, 2, scores, heads, tokens, "key_padding_mask"),
      bias_of(attn_mask, 4, scores, heads, tokens, "attn_mask"),
  };
  const Launcher launch(scores);
  with_element_type(scores, [&](auto zero) {
    using T = decltype(zero);
    launch(
        softmax_forward_kernel<T>, thread_blocks(scores, launch), kThreads,
        static_cast<const T*>(scores.const_data_ptr()), static_cast<T*>(probs.mutable_data_ptr()),
        blocks_of(scores, row_offsets, layout_heads, block), columns.const_data_ptr<int32_t>(), scores.size(0), biases,
        static_cast<Compute<T>>(scale), causal);
  });
  return probs;
}

Tensor softmax_backward(
    const Tensor& grad, const Tensor& probs, const Tensor& row_offsets, int64_t layout_heads, int64_t block,
    double scale) {
  check_block(block);
  check_values(probs, block, "probs");
  check_values_like(grad, probs, block, "grad");
  check_lists(row_offsets, layout_heads, layout_heads, probs);
  Tensor grad_scores = torch::stable::new_empty(probs, probs.sizes());
  const Launcher launch(probs);
  with_element_type(probs, [&](auto zero) {
    using T = decltype(zero);
    launch(
        softmax_backward_kernel<T>, thread_blocks(probs, launch), kThreads,
        static_cast<const T*>(grad.const_data_ptr()), static_cast<const T*>(probs.const_data_ptr()),
        static_cast<T*>(grad_scores.mutable_data_ptr()), blocks_of(probs, row_offsets, layout_heads, block),
        probs.size(0), static_cast<Compute<T>>(scale));
  });
  return grad_scores;
}

Tensor softmax_bias_backward(
    const Tensor& values, const Tensor& row_offsets, const Tensor& columns, int64_t layout_heads, int64_t heads,
    int64_t block, const std::vector<int64_t>& shape) {
  check_bias_backward(values, row_offsets, columns, layout_heads, heads, block, shape);
  const bool is_double = values.scalar_type() == ScalarType::Double;
  Tensor grad_bias = torch::stable::new_empty(values, shape, is_double ? ScalarType::Double : ScalarType::Float);
  const Launcher launch(values);
  const dim3 threads = shape[2] == 1 ? dim3(8, kThreads / 8) : dim3(kThreads);
  with_element_type(values, [&](auto zero) {
    using T = decltype(zero);
    launch(
        softmax_bias_backward_kernel<T>, (grad_bias.numel() + threads.x - 1) / threads.x, threads,
        static_cast<const T*>(values.const_data_ptr()), static_cast<Compute<T>*>(grad_bias.mutable_data_ptr()),
        blocks_of(values, row_offsets, layout_heads, block), columns.const_data_ptr<int32_t>(), values.size(0), heads,
        BiasShape{shape[0], shape[1], shape[2], shape[3]});
  });
  return grad_bias;
}

}  // namespace
}  // namespace ds_sparse

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CUDA, m) {
  m.impl("softmax_forward", TORCH_BOX(&ds_sparse::softmax_forward));
  m.impl("softmax_backward", TORCH_BOX(&ds_sparse::softmax_backward));
  m.impl("softmax_bias_backward", TORCH_BOX(&ds_sparse::softmax_bias_backward));
}
