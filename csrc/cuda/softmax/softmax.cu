// Row softmax over live blocks. Schemas and shapes: csrc/library.cpp; meaning: ds_sparse/reference.py.
//
// A thread block takes a row strip (index/strips.py): some neighbouring token rows of a block row, as they lie in
// memory, a piece of each live block, so that whole cache lines are read and written. Neighbouring threads take
// neighbouring runs of 16 bytes; a thread's few are all of one row, and stay in its registers. Nobody waits for what
// comes next: other thread blocks of the multiprocessor work meanwhile. Rows that a thread block cannot hold are read
// twice, the second time mostly from cache.

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <type_traits>

#include "../../checks.h"
#include "../../compute.h"
#include "../../packing.h"
#include "../common/elements.h"
#include "../common/launch.h"
#include "../common/logits.h"
#include "../common/vector.h"
#include "tuning.h"

namespace ds_sparse {
namespace {

constexpr int kLanes = 32;
constexpr int kHeld = SoftmaxTuning::kHeld;
constexpr int kElements = kHeld * 8;  // of 16 bits in those

// The row strips of a layout, and its copies: matrices where all heads share it, else batches.
struct RowStrips {
  const int4* listed;
  uint32_t count, copies;
  uint32_t live;   // blocks of a copy
  uint32_t heads;  // that share the layout; 1 where each has its own
  uint32_t rows;   // block rows of a layout head
  int log_block;
};

// A thread block's rows, in runs of 16 bytes. Of larger types than 16 bits several thread blocks share a row strip.
template <class T>
struct RowStrip {
  static constexpr int kLogThreadBlocks = log2_of(sizeof(T) / 2), kLogRun = log2_of(kRun<T>);
  uint32_t copy, block_row;
  uint32_t runs;  // of all rows; 0: other thread blocks have them
  int first_entry, first_row, log_rows, log_block;
  int log_row;        // of the runs that a row has of a block
  int64_t first_run;  // of the first row in the first block, among those of a tensor

  __device__ explicit RowStrip(const RowStrips& strips) : log_block(strips.log_block) {
    const uint32_t number = blockIdx.x >> kLogThreadBlocks, thread_block = blockIdx.x & ((1 << kLogThreadBlocks) - 1);
    copy = number / strips.count;
    const int4 listed = strips.listed[number % strips.count];
    block_row = listed.x;
    first_entry = listed.y;
    const int log_rows_of_all = log_rows_of(listed.w);
    log_rows = max(log_rows_of_all - kLogThreadBlocks, 0);
    first_row = first_row_of(listed.w) + (thread_block << log_rows);
    log_row = log_block - kLogRun;
    runs = thread_block >> (log_rows_of_all - log_rows) == 0 ? listed.z << (log_row + log_rows) : 0;
    first_run = ((int64_t{copy} * strips.live + first_entry) << (log_block + log_row)) + (first_row << log_row);
  }

  // The runs are numbered piece by piece, as blocks have them.
  __device__ int log_piece() const { return log_row + log_rows; }
  __device__ uint32_t within_piece(uint32_t run) const { return run & ((1u << log_piece()) - 1); }
  // Where a run is, counted from the first one.
  __device__ uint32_t offset(uint32_t run) const {
    return (run >> log_piece() << (log_block + log_row)) + within_piece(run);
  }
  __device__ int token(uint32_t run, const RowStrips& strips) const {
    return ((block_row % strips.rows) << log_block) + first_row + (within_piece(run) >> log_row);
  }
  __device__ int column(uint32_t run, const int32_t* columns) const {
    const int within_block = run & ((1 << log_row) - 1);
    return (columns[first_entry + (run >> log_piece())] << log_block) + (within_block << kLogRun);
  }
};

// Fewer than 2^31: values for so many do not fit into memory.
template <class T>
int64_t thread_blocks(const RowStrips& strips) {
  return int64_t{strips.count} * strips.copies << RowStrip<T>::kLogThreadBlocks;
}

// The threads of a thread block that have runs of the same row. A piece is a power of two of runs, up to as many as
// there are threads, so that all of a thread's are of one row; longer ones are of a row that is alone. Combines what
// the threads of a row have; they all get the same bits.
template <int kThreads>
struct RowThreads {
  uint32_t other_rows;  // the bits by which the numbers of threads of other rows differ

  template <class T>
  __device__ explicit RowThreads(const RowStrip<T>& strip)
      : other_rows(((1u << strip.log_piece()) - 1) & ~((1u << strip.log_row) - 1)) {}

  // Calls f(i, run) for those of the thread's runs from `first` on that some thread of its warp has.
  template <class T, class F>
  __device__ __forceinline__ void for_each_run(const RowStrip<T>& strip, uint32_t first, const F& f) const {
    const uint32_t first_of_warp = first + (threadIdx.x & ~(kLanes - 1));
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (first_of_warp + i * kThreads < strip.runs) {
        f(i, first + i * kThreads + threadIdx.x);
      }
    }
  }

  // f of what the lanes of a warp that have the row have.
  template <class A, class F>
  __device__ __forceinline__ A of_warp(A x, const F& f) const {
    return combine_lanes(x, ~other_rows, f);
  }

  // True where several warps have runs of the thread's row, the same for all threads.
  __device__ bool has_several_warps() const { return (other_rows | kLanes - 1) != kThreads - 1; }

  // Calls f for the threads in the lane's place of all those warps.
  template <class F>
  __device__ __forceinline__ void for_each_place(const F& f) const {
#pragma unroll
    for (int place = threadIdx.x % kLanes; place < kThreads; place += kLanes) {
      if (((place ^ threadIdx.x) & other_rows) == 0) {
        f(place);
      }
    }
  }
};

// A run of elements that are all -inf.
template <class T>
__device__ __forceinline__ uint4 minus_infinities() {
  constexpr uint32_t kWord = std::is_same_v<T, __half>          ? 0xfc00fc00u
                             : std::is_same_v<T, __nv_bfloat16> ? 0xff80ff80u
                                                                : 0xff800000u;
  return std::is_same_v<T, double> ? make_uint4(0, 0xfff00000u, 0, 0xfff00000u)
                                   : make_uint4(kWord, kWord, kWord, kWord);
}

// Something added to the scores, or a mask to keep where true, of shape (B or 1, H or 1, T or 1, S): strides are 0
// where the size is 1. `data` is null where there is none.
struct ScoreBias {
  const void* data;
  bool keeps;
  int64_t batch, head, token, column;
};

// Biases that are given come first.
struct ScoreBiases {
  ScoreBias bias[3];
};

template <class T>
__device__ __forceinline__ void add_run(const Run<T, kRun<T>>& bias, Compute<T> (&logits)[kRun<T>]) {
  using A = Compute<T>;
  A sums[kRun<T>];
  bool dropped = false;  // rare; only then it matters how low a sum is, and what NaN or infinity was added to
#pragma unroll
  for (int i = 0; i < kRun<T>; ++i) {
    sums[i] = logits[i] + static_cast<A>(bias.element[i]);
    dropped |= !(sums[i] >= kLowestBias<A>);
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

template <class T>
struct SoftmaxForward {
  const uint4* scores;
  uint4* probs;
  RowStrips strips;
  const int32_t* columns;
  ScoreBiases biases;
  Compute<T> scale;
  bool causal;
};

// Where a thread block keeps what scores have become with all that is added: each thread in places of its own, 16 bytes
// beside those of the next thread.
template <class T, int kThreads>
struct Logits {
  using A = Compute<T>;
  static constexpr int kRuns = kRun<T> / kRun<A>;
  uint4 runs[kHeld][kRuns][kThreads];

  __device__ void get(int i, A (&to)[kRun<T>]) const {
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      A of_run[kRun<A>];
      unpack<A>(runs[i][run][threadIdx.x], of_run);
#pragma unroll
      for (int e = 0; e < kRun<A>; ++e) {
        to[run * kRun<A> + e] = of_run[e];
      }
    }
  }
  __device__ void set(int i, const A (&from)[kRun<T>]) {
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      A of_run[kRun<A>];
#pragma unroll
      for (int e = 0; e < kRun<A>; ++e) {
        of_run[e] = from[run * kRun<A> + e];
      }
      runs[i][run][threadIdx.x] = pack<A>(of_run);
    }
  }
};

// kPlain: scale is positive, and there is nothing else. Then it is left to the exponents, whose differences it scales.
// Powers are taken again when their sum is known, so that more threads have room.
template <class T, bool kPlain, int kThreads>
__global__ void __launch_bounds__(kThreads, (SoftmaxTuning::kForwardThreads<T, kPlain> / kThreads))
    softmax_forward_kernel(const __grid_constant__ SoftmaxForward<T> p) {
  using A = Compute<T>;
  const RowStrip<T> strip(p.strips);
  const RowThreads<kThreads> row_threads(strip);
  const A exponent_scale = kPlain ? p.scale * kLog2E<A> : kLog2E<A>;
  const uint4* from = p.scores + strip.first_run;
  uint4* to = p.probs + strip.first_run;
  uint4 held[kHeld];
  extern __shared__ __align__(16) unsigned char shared[];
  auto& logits = *reinterpret_cast<Logits<T, kThreads>*>(shared);
  // Adds a bias, of which a row has T or uint8_t, to the thread's logits.
  const auto add = [&](const ScoreBias& bias, const auto* of_row, uint32_t first) {
    for (int i = 0; i < kHeld; ++i) {
      const uint32_t run = first + i * kThreads + threadIdx.x;
      if (run >= strip.runs) {
        break;
      }
      const auto of_run = load_run<kRun<T>>(of_row + strip.column(run, p.columns) * bias.column, bias.column);
      A run_logits[kRun<T>];
      logits.get(i, run_logits);
      if constexpr (sizeof(of_run.element[0]) == 1) {
#pragma unroll
        for (int e = 0; e < kRun<T>; ++e) {
          run_logits[e] = of_run.element[e] != 0 ? run_logits[e] : -infinity<A>();
        }
      } else {
        add_run(of_run, run_logits);
      }
      logits.set(i, run_logits);
    }
  };
  const auto read = [&](uint32_t first) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const uint32_t run = first + i * kThreads + threadIdx.x;
      held[i] = minus_infinities<T>();
      if (run < strip.runs) {
        held[i] = load_once(from + strip.offset(run));
      }
    }
    if constexpr (!kPlain) {
      const int token = strip.token(threadIdx.x, p.strips);
      row_threads.for_each_run(strip, first, [&](int i, uint32_t run) {
        A run_logits[kRun<T>];
        unpack<T>(held[i], run_logits);
        scale_run(run_logits, p.scale);
        const int last = run >= strip.runs ? -1 : p.causal ? token - strip.column(run, p.columns) : kRun<T>;
#pragma unroll
        for (int e = 0; e < kRun<T>; ++e) {
          run_logits[e] = e > last ? -infinity<A>() : run_logits[e];
        }
        logits.set(i, run_logits);
      });
      const uint32_t batch = strip.copy / p.strips.heads;
      const uint32_t head = strip.copy % p.strips.heads + strip.block_row / p.strips.rows;  // one of the two is 0
#pragma unroll 1
      for (const ScoreBias* bias = p.biases.bias; bias < p.biases.bias + 3 && bias->data != nullptr; ++bias) {
        const int64_t of_row = batch * bias->batch + head * bias->head + token * bias->token;
        bias->keeps ? add(*bias, static_cast<const uint8_t*>(bias->data) + of_row, first)
                    : add(*bias, static_cast<const T*>(bias->data) + of_row, first);
      }
    }
  };
  // The i-th of the thread's runs.
  const auto get = [&](int i, A(&to)[kRun<T>]) {
    if constexpr (kPlain) {
      unpack<T>(held[i], to);
    } else {
      logits.get(i, to);
    }
  };
  A row_max = -infinity<A>(), row_sum = 0;
  for (uint32_t first = 0; first < strip.runs; first += kHeld * kThreads) {
    read(first);
    A new_max = row_max;
    row_threads.for_each_run(strip, first, [&](int i, uint32_t) {
      if constexpr (kPlain) {
        new_max = max(new_max, largest_of<T>(held[i]));
      } else {
        A run_logits[kRun<T>];
        get(i, run_logits);
        new_max = max(new_max, largest_of(run_logits));
      }
    });
    new_max = row_threads.of_warp(new_max, [](A a, A b) { return max(a, b); });
    const A reference = finite_reference(new_max);
    row_sum *= power_of_difference(row_max, reference, exponent_scale);
    row_max = new_max;
    row_threads.for_each_run(strip, first, [&](int i, uint32_t) {
      A powers[kRun<T>];
      get(i, powers);
#pragma unroll
      for (A& power : powers) {
        power = power_of_difference(power, reference, exponent_scale);
      }
      row_sum += sum_of(powers);
    });
  }
  row_sum = row_threads.of_warp(row_sum, [](A a, A b) { return a + b; });
  A reference = finite_reference(row_max);
  if (row_threads.has_several_warps()) {
    __shared__ A row_max_of_warp[kThreads], row_sum_of_warp[kThreads];
    row_max_of_warp[threadIdx.x] = row_max;
    row_sum_of_warp[threadIdx.x] = row_sum;
    __syncthreads();
    row_threads.for_each_place([&](int place) { row_max = max(row_max, row_max_of_warp[place]); });
    reference = finite_reference(row_max);
    row_sum = 0;
    row_threads.for_each_place([&](int place) {
      row_sum += row_sum_of_warp[place] * power_of_difference(row_max_of_warp[place], reference, exponent_scale);
    });
  }
  const A factor = row_sum == 0 ? A(0) : 1 / row_sum;
  for (uint32_t first = 0; first < strip.runs; first += kHeld * kThreads) {
    if (strip.runs > kHeld * kThreads) {
      read(first);
    }
    row_threads.for_each_run(strip, first, [&](int i, uint32_t run) {
      A probs[kRun<T>];
      get(i, probs);
#pragma unroll
      for (A& prob : probs) {
        prob = power_of_difference(prob, reference, exponent_scale) * factor;
      }
      if (run < strip.runs) {
        to[strip.offset(run)] = pack<T>(probs);
      }
    });
  }
}

template <class T>
struct SoftmaxBackward {
  const uint4* grad;
  const uint4* probs;
  uint4* grad_scores;
  RowStrips strips;
  Compute<T> scale;
};

template <class T, int kThreads>
__global__ void __launch_bounds__(kThreads, SoftmaxTuning::kBackwardThreads / kThreads)
    softmax_backward_kernel(const __grid_constant__ SoftmaxBackward<T> p) {
  using A = Compute<T>;
  const RowStrip<T> strip(p.strips);
  const RowThreads<kThreads> row_threads(strip);
  uint4 grads[kHeld], probs[kHeld];
  const auto read = [&](uint32_t first) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const uint32_t run = first + i * kThreads + threadIdx.x;
      grads[i] = probs[i] = make_uint4(0, 0, 0, 0);
      if (run < strip.runs) {
        const int64_t at = strip.first_run + strip.offset(run);
        grads[i] = load_once(p.grad + at);
        probs[i] = load_once(p.probs + at);
      }
    }
  };
  A dot = 0;
  for (uint32_t first = 0; first < strip.runs; first += kHeld * kThreads) {
    read(first);
    row_threads.for_each_run(strip, first, [&](int i, uint32_t) {
      A grad[kRun<T>], prob[kRun<T>];
      unpack<T>(grads[i], grad);
      unpack<T>(probs[i], prob);
#pragma unroll
      for (int e = 0; e < kRun<T>; ++e) {
        dot += prob[e] == 0 ? A(0) : grad[e] * prob[e];
      }
    });
  }
  dot = row_threads.of_warp(dot, [](A a, A b) { return a + b; });
  if (row_threads.has_several_warps()) {
    __shared__ A dot_of_warp[kThreads];
    dot_of_warp[threadIdx.x] = dot;
    __syncthreads();
    dot = 0;
    row_threads.for_each_place([&](int place) { dot += dot_of_warp[place]; });
  }
  for (uint32_t first = 0; first < strip.runs; first += kHeld * kThreads) {
    if (strip.runs > kHeld * kThreads) {
      read(first);
    }
    row_threads.for_each_run(strip, first, [&](int i, uint32_t run) {
      A grad[kRun<T>], prob[kRun<T>];
      unpack<T>(grads[i], grad);
      unpack<T>(probs[i], prob);
#pragma unroll
      for (int e = 0; e < kRun<T>; ++e) {
        grad[e] = prob[e] == 0 ? A(0) : p.scale * prob[e] * (grad[e] - dot);  // what is masked may be NaN
      }
      if (run < strip.runs) {
        p.grad_scores[strip.first_run + strip.offset(run)] = pack<T>(grad);
      }
    });
  }
}

// Describes values (B, V, b, b) of so many heads.
RowStrips strips_of(
    const std::optional<Tensor>& listed, const Tensor& values, const Tensor& row_offsets, const Tensor& columns,
    int64_t heads, int64_t layout_heads, int64_t block) {
  check(listed.has_value(), "softmax on CUDA takes the strips of a BlockIndex, none were given.");
  check_rows(*listed, 4, values, "strips");
  return {
      reinterpret_cast<const int4*>(listed->const_data_ptr<int32_t>()),
      static_cast<uint32_t>(listed->size(0)),
      static_cast<uint32_t>(values.size(0) * heads / layout_heads),
      static_cast<uint32_t>(columns.size(0)),
      static_cast<uint32_t>(heads / layout_heads),
      static_cast<uint32_t>((row_offsets.size(0) - 1) / layout_heads),
      log2_of(block)};
}

// Calls f with a constant of the number of threads whose elements are as many as a strip has at most.
template <class F>
void with_threads(int64_t most, const F& f) {
  switch (most) {
    case 128 * kElements:
      return f(std::integral_constant<int, 128>{});
    case 256 * kElements:
      return f(std::integral_constant<int, 256>{});
    case 512 * kElements:
      return f(std::integral_constant<int, 512>{});
    default:
      check(false, "strips have up to 5120, 10240 or 20480 elements, got ", most, ".");
  }
}

// `x` is (B or 1, H or 1, T or 1, S), or (B or 1, S) with 2 dimensions.
ScoreBias bias_of(
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
    const std::optional<Tensor>& attn_mask, const Tensor& row_offsets, const Tensor& columns,
    const std::optional<Tensor>& strips, int64_t most, int64_t layout_heads, int64_t block, double scale, bool causal) {
  check_block(block);
  check_values(scores, block, "scores");
  check_list(columns, scores, "columns");
  Tensor probs = empty_on(scores, scores.sizes());
  if (probs.numel() == 0) {
    return probs;
  }
  const int64_t heads = heads_of(scores.size(1), columns.size(0), layout_heads);
  check_lists(row_offsets, layout_heads, heads, scores);
  const int64_t tokens = (row_offsets.size(0) - 1) / layout_heads * block;
  const ScoreBias all[] = {
      bias_of(rpe, 4, scores, heads, tokens, "rpe"),
      bias_of(key_padding_mask, 2, scores, heads, tokens, "key_padding_mask"),
      bias_of(attn_mask, 4, scores, heads, tokens, "attn_mask")};
  ScoreBiases biases{};
  std::copy_if(std::begin(all), std::end(all), biases.bias, [](const ScoreBias& bias) { return bias.data != nullptr; });
  const bool plain = biases.bias[0].data == nullptr && !causal && scale > 0;
  const Launcher launch(scores);
  const Tensor aligned_scores = launch.aligned(scores);
  with_element<true>(scores, "softmax", [&](auto zero) {
    using T = decltype(zero);
    const SoftmaxForward<T> arguments{
        static_cast<const uint4*>(aligned_scores.const_data_ptr()),
        static_cast<uint4*>(probs.mutable_data_ptr()),
        strips_of(strips, scores, row_offsets, columns, heads, layout_heads, block),
        columns.const_data_ptr<int32_t>(),
        biases,
        static_cast<Compute<T>>(scale),
        causal};
    with_threads(most, [&](auto threads) {
      constexpr int kThreads = decltype(threads)::value;
      const int64_t blocks = thread_blocks<T>(arguments.strips);
      if (plain) {
        launch(softmax_forward_kernel<T, true, kThreads>, blocks, kThreads, arguments);
      } else {
        // The numbers that a strip's warps exchange lie beside it.
        static_assert(sizeof(Logits<T, kThreads>) + 2 * kThreads * sizeof(Compute<T>) <= kPortableMemory);
        launch.with_shared_memory(
            softmax_forward_kernel<T, false, kThreads>, blocks, kThreads, sizeof(Logits<T, kThreads>), arguments);
      }
    });
  });
  return probs;
}

Tensor softmax_backward(
    const Tensor& grad, const Tensor& probs, const Tensor& row_offsets, const Tensor& columns,
    const std::optional<Tensor>& strips, int64_t most, int64_t layout_heads, int64_t block, double scale) {
  check_block(block);
  check_values(probs, block, "probs");
  check_values_like(grad, probs, block, "grad");
  check_list(columns, probs, "columns");
  Tensor grad_scores = empty_on(probs, probs.sizes());
  if (probs.numel() == 0) {
    return grad_scores;
  }
  const int64_t heads = heads_of(probs.size(1), columns.size(0), layout_heads);
  check_lists(row_offsets, layout_heads, heads, probs);
  const Launcher launch(probs);
  const Tensor aligned_grad = launch.aligned(grad), aligned_probs = launch.aligned(probs);
  with_element<true>(probs, "softmax", [&](auto zero) {
    using T = decltype(zero);
    const SoftmaxBackward<T> arguments{
        static_cast<const uint4*>(aligned_grad.const_data_ptr()),
        static_cast<const uint4*>(aligned_probs.const_data_ptr()), static_cast<uint4*>(grad_scores.mutable_data_ptr()),
        strips_of(strips, probs, row_offsets, columns, heads, layout_heads, block), static_cast<Compute<T>>(scale)};
    with_threads(most, [&](auto threads) {
      constexpr int kThreads = decltype(threads)::value;
      launch(softmax_backward_kernel<T, kThreads>, thread_blocks<T>(arguments.strips), kThreads, arguments);
    });
  });
  return grad_scores;
}

}  // namespace
}  // namespace ds_sparse

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CUDA, m) {
  m.impl("softmax_forward", TORCH_BOX(&ds_sparse::softmax_forward));
  m.impl("softmax_backward", TORCH_BOX(&ds_sparse::softmax_backward));
}
