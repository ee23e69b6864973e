// attention_sinks_forward and attention_sinks_backward: a pass over the rows of an output, and perhaps its gradient.
// Schemas and letters: library.cpp.

#include "../../sinks.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>

#include "arguments.h"

namespace ds_sparse::attention {
namespace {

// As of row_stats.cu.
constexpr int kLanes = 8;             // of a row
constexpr int kAtOnce = 4;            // rows of a thread, whose reads are under way together
constexpr int kBeside = 32 / kLanes;  // rows that a warp reads together
constexpr int kRowsOfWarp = kBeside * kAtOnce, kRowsOfBlock = kThreads / 32 * kRowsOfWarp;
static_assert(kRowsOfWarp == 16);  // in which each of a token's rows, of up to 16, has a place of its own

// Rows by their heads, `rows` of each, of which 2**log_group are a token's; `parts` thread blocks have a head's.
template <class A>
struct SinkRows {
  const Run<A, 2>* max_sums;
  const A* sinks;
  int heads, rows, log_group, parts, head_dim;

  __device__ A sink_of(int head, int row) const { return sinks[(head << log_group) + (row & ((1 << log_group) - 1))]; }
};

// kCount: numbers that are read together.
template <class T, int kCount>
__global__ void __launch_bounds__(kThreads) sinks_kernel(
    SinkRows<Compute<T>> all, Matrices<const T> output, Matrices<T> to, Compute<T>* lse, Run<Compute<T>, 2>* max_sums) {
  using A = Compute<T>;
  const int lane = threadIdx.x % 32, matrix = blockIdx.x / all.parts, batch = matrix / all.heads,
            head = matrix % all.heads;
  const int first = blockIdx.x % all.parts * kRowsOfBlock + threadIdx.x / 32 * kRowsOfWarp;
  // A lane writes rows of its eight lanes, and what is known of one of the warp's.
  const int own = first + lane % kRowsOfWarp;
  const int64_t place = int64_t{matrix} * all.rows + own;
  A own_share = 0;
  if (own < all.rows) {
    const Run<A, 2> given = all.max_sums[place];
    const RowWithSink<A> row(given.element[0], given.element[1], all.sink_of(head, own));
    own_share = row.share;
    if (lane < kRowsOfWarp) {
      lse[place] = row.lse;
      max_sums[place] = {row.row_max, row.row_sum};
    }
  }
  A share[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    share[i] = __shfl_sync(0xffffffffu, own_share, i * kBeside + lane / kLanes);
  }
  const T* from = output.of(batch, head);
  T* made = to.of(batch, head);
  for (int column = lane % kLanes * kCount; column < all.head_dim; column += kLanes * kCount) {
    Run<T, kCount> runs[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = min(first + i * kBeside + lane / kLanes, all.rows - 1);
      runs[i] = load_run<kCount>(from + output.tokens.at(row) + column, 1);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = first + i * kBeside + lane / kLanes;
#pragma unroll
      for (T& x : runs[i].element) {
        x = T(static_cast<A>(x) * share[i]);
      }
      if (row < all.rows) {
        store_run(made + to.tokens.at(row) + column, runs[i]);
      }
    }
  }
}

// The sums of each thread block's rows: (B, H, parts, rows of a token).
template <class T, int kCount>
__global__ void __launch_bounds__(kThreads) grad_sinks_kernel(
    SinkRows<Compute<T>> all, Matrices<const T> output, Matrices<const T> grad_output, int64_t grad_step,
    const Compute<T>* grad_lse, Compute<T>* sums) {
  using A = Compute<T>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, matrix = blockIdx.x / all.parts,
            batch = matrix / all.heads, head = matrix % all.heads;
  const int first = blockIdx.x % all.parts * kRowsOfBlock + warp * kRowsOfWarp, own = first + lane % kRowsOfWarp;
  const T *a = output.of(batch, head), *b = grad_output.of(batch, head);
  A products[kAtOnce] = {};
  for (int column = lane % kLanes * kCount; column < all.head_dim; column += kLanes * kCount) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = min(first + i * kBeside + lane / kLanes, all.rows - 1);
      const auto x = load_run<kCount>(a + output.tokens.at(row) + column, 1);
      const auto y = load_run<kCount>(b + grad_output.tokens.at(row) + column * grad_step, grad_step);
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        products[i] += static_cast<A>(x.element[e]) * static_cast<A>(y.element[e]);
      }
    }
  }
  A product = 0;
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const A of_eight = __shfl_sync(0xffffffffu, sum_of_lanes(products[i], kLanes), lane % kBeside * kLanes);
    product = lane / kBeside % kAtOnce == i ? of_eight : product;
  }
  A grad = 0;
  if (own < all.rows) {
    const int64_t place = int64_t{matrix} * all.rows + own;
    const Run<A, 2> row = all.max_sums[place];
    const A of_lse = grad_lse == nullptr ? A(0) : grad_lse[place];
    grad = grad_of_sink<A>(row.element[0], row.element[1], all.sink_of(head, own), product, of_lse);
  }
  // Both halves of the lanes have all of the warp's rows; those of one sink are a token's rows apart.
  const int group = 1 << all.log_group;
  for (int distance = kRowsOfWarp / 2; distance >= group; distance /= 2) {
    grad += __shfl_xor_sync(0xffffffffu, grad, distance);
  }
  __shared__ A of_warps[kThreads / 32][kRowsOfWarp];
  if (lane < group) {
    of_warps[warp][lane] = grad;
  }
  __syncthreads();
  if (threadIdx.x < group) {
    A sum = 0;
    for (const auto& of_warp : of_warps) {
      sum += of_warp[threadIdx.x];
    }
    sums[int64_t{blockIdx.x} * group + threadIdx.x] = sum;
  }
}

// A thread block for each sink, which has one sum in each of `parts` parts of `batch` sequences.
template <class A>
__global__ void __launch_bounds__(kThreads)
    sum_parts_kernel(const A* sums, A* to, int batch, int heads, int parts, int group) {
  const int head = blockIdx.x / group, lane = threadIdx.x % 32;
  A sum = 0;
  for (int64_t n = threadIdx.x; n < int64_t{batch} * parts; n += kThreads) {
    const int64_t part = (n / parts * heads + head) * parts + n % parts;
    sum += sums[part * group + blockIdx.x % group];
  }
  __shared__ A of_warps[kThreads / 32];
  sum = sum_of_lanes(sum, 32);
  if (lane == 0) {
    of_warps[threadIdx.x / 32] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    sum = 0;
    for (const A of_warp : of_warps) {
      sum += of_warp;
    }
    to[blockIdx.x] = sum;
  }
}

template <class A>
SinkRows<A> rows_of(const SinksCall& call) {
  const int64_t rows = call.rows_of_head();
  return {
      reinterpret_cast<const Run<A, 2>*>(call.rows.const_data_ptr()),
      static_cast<const A*>(call.sinks.const_data_ptr()),
      static_cast<int>(call.heads()),
      static_cast<int>(rows),
      log2_of(call.rows_of_token()),
      static_cast<int>((rows + kRowsOfBlock - 1) / kRowsOfBlock),
      static_cast<int>(call.head_dim())};
}

// Calls f with a zero of the element type and how many numbers of a row are read together.
template <class F>
void with_runs(const SinksCall& call, const F& f) {
  with_element<true>(call.output, "attention with sinks", [&](auto zero) {
    constexpr int kCount = kRun<decltype(zero)>;
    if (call.head_dim() % kCount == 0) {
      f(zero, std::integral_constant<int, kCount>{});
    } else {
      f(zero, std::integral_constant<int, 1>{});
    }
  });
}

struct Passes {
  static void forward(const SinksCall& call, const Tensor& output, const Tensor& lse, const Tensor& rows) {
    const Launcher launch(output);
    with_runs(call, [&](auto zero, auto count) {
      using T = decltype(zero);
      using A = Compute<T>;
      const SinkRows<A> all = rows_of<A>(call);
      launch(
          sinks_kernel<T, count()>, call.batch() * call.heads() * all.parts, kThreads, all,
          matrices_of<const T>(call.output), matrices_of<T>(output), static_cast<A*>(lse.mutable_data_ptr()),
          reinterpret_cast<Run<A, 2>*>(rows.mutable_data_ptr()));
    });
  }

  static void backward(
      const SinksCall& call, const Tensor& grad_output, const std::optional<Tensor>& grad_lse,
      const Tensor& grad_sinks) {
    const Launcher launch(grad_output);
    with_runs(call, [&](auto zero, auto count) {
      using T = decltype(zero);
      using A = Compute<T>;
      const SinkRows<A> all = rows_of<A>(call);
      const int64_t blocks = call.batch() * call.heads() * all.parts, group = call.rows_of_token(),
                    last = grad_output.dim() - 1;
      Tensor sums = empty_on(grad_sinks, {blocks * group});
      A* of_parts = static_cast<A*>(sums.mutable_data_ptr());
      launch(
          grad_sinks_kernel<T, count()>, blocks, kThreads, all, matrices_of<const T>(call.output),
          matrices_of<const T>(grad_output), grad_output.size(last) == 1 ? 1 : grad_output.stride(last),
          grad_lse ? static_cast<const A*>(grad_lse->const_data_ptr()) : nullptr, of_parts);
      launch(
          sum_parts_kernel<A>, grad_sinks.numel(), kThreads, static_cast<const A*>(of_parts),
          static_cast<A*>(grad_sinks.mutable_data_ptr()), static_cast<int>(call.batch()), all.heads, all.parts,
          static_cast<int>(group));
    });
  }
};
using Operators = SinksOperators<Passes>;

}  // namespace
}  // namespace ds_sparse::attention

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CUDA, m) {
  m.impl("attention_sinks_forward", TORCH_BOX(&ds_sparse::attention::Operators::forward));
  m.impl("attention_sinks_backward", TORCH_BOX(&ds_sparse::attention::Operators::backward));
}
