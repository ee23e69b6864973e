// Row softmax over live blocks. Schemas and shapes: csrc/library.cpp; meaning: ds_sparse/reference.py.
//
// A warp takes up to 8 token rows, as many as it can work on at once where rows are of average length; they are rows of
// one block row since blocks are 8 or more. `width` neighbouring lanes share a row and take its 16-byte runs in turn,
// whatever the size of its blocks; a lane holds up to kHeld of them. Rows that are longer get more lanes each. One that
// the whole warp cannot hold is read twice, the second time mostly from cache.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "../checks.h"
#include "../compute.h"
#include "launch.h"
#include "logits.h"
#include "vector.h"

namespace ds_sparse {
namespace {

constexpr int kThreads = 128;
constexpr int kLanes = 32;
constexpr int kMostRows = 8;  // of a warp
constexpr int kHeld = 5;

// The live blocks of all heads and where their values are.
struct Blocks {
  const int32_t* row_offsets;
  int64_t layout_heads, rows, values, block;
  int log_block;

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

// The smallest number of lanes that hold `runs` runs, or nearly; a power of two, all of a warp at most.
__device__ __forceinline__ int width_for(int64_t runs, int least) {
  int width = least;
  while (width < kLanes && width * kHeld * 9 / 8 < runs) {
    width *= 2;
  }
  return width;
}

// How the token rows of a tensor of values are shared out: groups of `rows` rows over warps.
template <class T>
struct Shares {
  int64_t groups;
  uint32_t heads;
  int least_width, rows;

  __device__ Shares(const Blocks& blocks, int64_t batch) : heads(static_cast<uint32_t>(blocks.heads())) {
    const int64_t lines = blocks.layout_heads * blocks.rows;
    least_width = width_for(((blocks.entries() << blocks.log_block) / kRun<T> + lines - 1) / lines, kLanes / kMostRows);
    rows = kLanes / least_width;
    groups = batch * heads * blocks.rows * (blocks.block / rows);
  }

  __device__ int64_t first_group() const { return (blockIdx.x * int64_t{kThreads} + threadIdx.x) / kLanes; }
  __device__ int64_t step() const { return gridDim.x * int64_t{kThreads} / kLanes; }
};

// Rows of one block row: where they are, and their elements as `count` runs of 16 bytes each.
template <class T>
struct Group {
  static constexpr int kLogRun = log2_of(kRun<T>);
  uint32_t batch, head, row, first_within;
  int64_t first_element;
  int first_entry, count, width, log_block;

  __device__ Group(const Blocks& blocks, const Shares<T>& shares, int64_t number) : log_block(blocks.log_block) {
    // Block rows of all heads and batches are fewer than 2^32.
    const int log_groups = log_block - log2_of(shares.rows);
    const uint32_t line = static_cast<uint32_t>(number >> log_groups), rows = static_cast<uint32_t>(blocks.rows);
    const uint32_t matrix = line / rows;
    row = line % rows;
    batch = matrix / shares.heads;
    head = matrix % shares.heads;
    first_within = (static_cast<uint32_t>(number) & ((1u << log_groups) - 1)) * shares.rows;
    const int2 entries = blocks.entries_of(head, row);
    first_entry = entries.x;
    first_element = blocks.element_of(batch, head, entries.x) + (first_within << log_block);
    count = (entries.y - entries.x) << log_runs();
    width = width_for(count, shares.least_width);
  }

  __device__ int lane() const { return threadIdx.x & (width - 1); }
  __device__ int first_row() const { return threadIdx.x % kLanes / width; }
  __device__ int rows_at_once() const { return kLanes / width; }

  __device__ int log_runs() const { return log_block - kLogRun; }
  __device__ uint32_t token(int number) const { return (row << log_block) + first_within + number; }
  __device__ int within_block(int run) const { return (run & ((1 << log_runs()) - 1)) << kLogRun; }
  __device__ int64_t element(int number, int run) const {
    return first_element + (int64_t{run >> log_runs()} << 2 * log_block) + ((number << log_block) + within_block(run));
  }
  __device__ int column(int run, const int32_t* columns) const {
    return (columns[first_entry + (run >> log_runs())] << log_block) + within_block(run);
  }

  // Calls f(i, run) for the lane's share, i < kHeld, of the runs from `first` on.
  template <class F>
  __device__ __forceinline__ void for_each_run(int first, const F& f) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int run = first + i * width + lane();
      if (run < count) {
        f(i, run);
      }
    }
  }
};

// Something added to the scores, or a mask to keep where true, of shape (B or 1, H or 1, T or 1, S): strides are 0
// where the size is 1. `data` is null where there is none.
struct Bias {
  const void* data;
  bool keeps;
  int64_t batch, head, token, column;
};

// Those that are there come first.
struct Biases {
  Bias bias[3];
};

template <class T>
__device__ __forceinline__ void add_run(const Run<T, kRun<T>>& bias, Compute<T> (&logits)[kRun<T>]) {
  using A = Compute<T>;
  A sums[kRun<T>];
  bool dropped = false;  // rare; only then it matters whether a sum overflowed
#pragma unroll
  for (int i = 0; i < kRun<T>; ++i) {
    sums[i] = logits[i] + static_cast<A>(bias.element[i]);
    dropped |= sums[i] == -infinity<A>();
  }
  if (dropped) {
#pragma unroll
    for (int i = 0; i < kRun<T>; ++i) {
      sums[i] = biased(logits[i], static_cast<A>(bias.element[i]));
    }
  }
#pragma unroll
  for (int i = 0; i < kRun<T>; ++i) {
    logits[i] = sums[i];
  }
}

// kPlain: scale is positive, and there is nothing else. Then it is left to the exponents, whose differences it scales.
template <class T, bool kPlain>
__global__ void __launch_bounds__(kThreads, kPlain ? 5 : 3) softmax_forward_kernel(
    const T* __restrict__ scores, T* __restrict__ probs, Blocks blocks, const int32_t* __restrict__ columns,
    int64_t batch, const __grid_constant__ Biases biases, Compute<T> scale, bool causal) {
  using A = Compute<T>;
  const Shares<T> shares(blocks, batch);
  const A exponent_scale = kPlain ? scale * kLog2E<A> : kLog2E<A>;
  for (int64_t number = shares.first_group(); number < shares.groups; number += shares.step()) {
    const Group<T> group(blocks, shares, number);
    const int held = kHeld * group.width;
    for (int row = group.first_row(); row < shares.rows; row += group.rows_at_once()) {
      A logits[kHeld][kRun<T>];
      const auto read = [&](int first) {
        Run<T, kRun<T>> runs[kHeld];
        group.for_each_run(first, [&](int i, int run) {
          runs[i] = load_aligned(scores + group.element(row, run));
        });
        if constexpr (kPlain) {
          group.for_each_run(first, [&](int i, int) {
#pragma unroll
            for (int e = 0; e < kRun<T>; ++e) {
              logits[i][e] = static_cast<A>(runs[i].element[e]);
            }
          });
          return;
        }
        int column[kHeld];
        group.for_each_run(first, [&](int i, int run) { column[i] = group.column(run, columns); });
        group.for_each_run(first, [&](int i, int) { scale_run(runs[i], scale, logits[i]); });
        const int token = group.token(row);
        // Those that are there come first.
#pragma unroll 1
        for (const Bias* bias = biases.bias; bias < biases.bias + 3 && bias->data != nullptr; ++bias) {
          const int64_t of_row = group.batch * bias->batch + group.head * bias->head + token * bias->token;
          if (bias->keeps) {
            const uint8_t* data = static_cast<const uint8_t*>(bias->data) + of_row;
            group.for_each_run(first, [&](int i, int) {
              const auto keep = load_run<kRun<T>>(data + column[i] * bias->column, bias->column);
#pragma unroll
              for (int e = 0; e < kRun<T>; ++e) {
                logits[i][e] = keep.element[e] != 0 ? logits[i][e] : -infinity<A>();
              }
            });
          } else {
            const T* data = static_cast<const T*>(bias->data) + of_row;
            group.for_each_run(first, [&](int i, int) {
              add_run(load_run<kRun<T>>(data + column[i] * bias->column, bias->column), logits[i]);
            });
          }
        }
        if (causal) {
          group.for_each_run(first, [&](int i, int) {
#pragma unroll
            for (int e = 0; e < kRun<T>; ++e) {
              logits[i][e] = column[i] + e > token ? -infinity<A>() : logits[i][e];
            }
          });
        }
      };
      A largest = -infinity<A>(), sum = 0;
      const auto add = [&](int first) {
        A larger = largest;
        group.for_each_run(first, [&](int i, int) {
#pragma unroll
          for (const A logit : logits[i]) {
            larger = max(larger, logit);
          }
        });
        const A reference = finite_reference(larger);
        sum *= power_of_difference(largest, reference, exponent_scale);
        group.for_each_run(first, [&](int i, int) {
#pragma unroll
          for (A& logit : logits[i]) {
            logit = power_of_difference(logit, reference, exponent_scale);
            sum += logit;
          }
        });
        largest = larger;
      };
      const auto write = [&](int first, A factor) {
        group.for_each_run(first, [&](int i, int run) {
          Run<T, kRun<T>> result;
#pragma unroll
          for (int e = 0; e < kRun<T>; ++e) {
            result.element[e] = static_cast<T>(logits[i][e] * factor);
          }
          store_run(probs + group.element(row, run), result);
        });
      };

      // `add` leaves powers relative to the lane's largest logit where the logits were; a row that is held needs no other
      // sweep.
      const bool reads_again = group.count > held;
      const int once = (group.count + held - 1) / held * held;
      A reference = 0, factor = 0;
      for (int at = 0; at < (reads_again ? 2 * once : once); at += held) {
        const int first = at < once ? at : at - once;
        read(first);
        if (at < once) {
          add(first);
        }
        if (at + held == once) {
          reference = finite_reference(max_of_lanes(largest, group.width));
          const A to_reference = power_of_difference(largest, reference, exponent_scale);
          sum = sum_of_lanes(sum * to_reference, group.width);
          factor = sum == 0 ? A(0) : 1 / sum;
          factor *= reads_again ? A(1) : to_reference;
        }
        if (at >= once) {
          group.for_each_run(first, [&](int i, int) {
#pragma unroll
            for (A& logit : logits[i]) {
              logit = power_of_difference(logit, reference, exponent_scale);
            }
          });
        }
        if (at >= once || !reads_again) {
          write(first, factor);
        }
      }
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 5) softmax_backward_kernel(
    const T* __restrict__ grad, const T* __restrict__ probs, T* __restrict__ grad_scores, Blocks blocks, int64_t batch,
    Compute<T> scale) {
  using A = Compute<T>;
  const Shares<T> shares(blocks, batch);
  for (int64_t number = shares.first_group(); number < shares.groups; number += shares.step()) {
    const Group<T> group(blocks, shares, number);
    const int held = kHeld * group.width;
    for (int row = group.first_row(); row < shares.rows; row += group.rows_at_once()) {
      Run<T, kRun<T>> grads[kHeld], ps[kHeld];
      const auto read = [&](int first) {
        group.for_each_run(first, [&](int i, int run) {
          grads[i] = load_aligned(grad + group.element(row, run));
          ps[i] = load_aligned(probs + group.element(row, run));
        });
      };
      A dot = 0;
      for (int first = 0; first < group.count; first += held) {
        read(first);
        group.for_each_run(first, [&](int i, int) {
#pragma unroll
          for (int e = 0; e < kRun<T>; ++e) {
            dot += static_cast<A>(grads[i].element[e]) * static_cast<A>(ps[i].element[e]);
          }
        });
      }
      dot = sum_of_lanes(dot, group.width);
      for (int first = 0; first < group.count; first += held) {
        if (group.count > held) {
          read(first);
        }
        group.for_each_run(first, [&](int i, int run) {
          Run<T, kRun<T>> result;
#pragma unroll
          for (int e = 0; e < kRun<T>; ++e) {
            result.element[e] =
                static_cast<T>(scale * static_cast<A>(ps[i].element[e]) * (static_cast<A>(grads[i].element[e]) - dot));
          }
          store_run(grad_scores + group.element(row, run), result);
        });
      }
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
  return {row_offsets.const_data_ptr<int32_t>(), layout_heads, rows, values.size(1), block, log2_of(block)};
}

// A run a thread, and at most a few times what the device holds at once: rows longer than a warp need fewer threads.
int64_t thread_blocks(const Tensor& values, const Launcher& launch) {
  const int64_t runs = values.numel() * static_cast<int64_t>(values.element_size()) / 16;
  return std::min((runs + kThreads - 1) / kThreads, launch.multiprocessors() * 128);
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
  const Bias all[] = {
      bias_of(rpe, 4, scores, heads, tokens, "rpe"),
      bias_of(key_padding_mask, 2, scores, heads, tokens, "key_padding_mask"),
      bias_of(attn_mask, 4, scores, heads, tokens, "attn_mask")};
  Biases biases{};
  std::copy_if(std::begin(all), std::end(all), biases.bias, [](const Bias& bias) { return bias.data != nullptr; });
  const bool plain = biases.bias[0].data == nullptr && !causal && scale > 0;
  const Launcher launch(scores);
  const Tensor aligned_scores = launch.aligned(scores);
  with_element_type(scores, [&](auto zero) {
    using T = decltype(zero);
    launch(
        plain ? softmax_forward_kernel<T, true> : softmax_forward_kernel<T, false>, thread_blocks(scores, launch), kThreads,
        static_cast<const T*>(aligned_scores.const_data_ptr()), static_cast<T*>(probs.mutable_data_ptr()),
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
  const Tensor aligned_grad = launch.aligned(grad), aligned_probs = launch.aligned(probs);
  with_element_type(probs, [&](auto zero) {
    using T = decltype(zero);
    launch(
        softmax_backward_kernel<T>, thread_blocks(probs, launch), kThreads,
        static_cast<const T*>(aligned_grad.const_data_ptr()), static_cast<const T*>(aligned_probs.const_data_ptr()),
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
