// Row softmax over windows. Schemas and shapes: csrc/library.cpp; meaning: ds_sparse/reference.py.
//
// Rows of a band are an odd number of elements apart, so that they begin anywhere in a run of 16 bytes. A warp copies
// neighbouring rows to shared memory as they lie in memory, the next ones while it works on the present ones, puts
// results in their place and writes these as they lie there. A few neighbouring lanes share a row, go through it from
// shared memory as often as they need, and hold nothing: they take in turn the runs that are all the row's, and one by
// one the elements before and after these. Rows that shared memory cannot hold are read from the device's.

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "../../checks.h"
#include "../common/copies.h"
#include "../common/elements.h"
#include "../common/launch.h"
#include "../common/logits.h"
#include "../common/vector.h"
#include "tuning.h"

namespace ds_sparse {
namespace {

using Tuning = WindowSoftmaxTuning;
constexpr int kThreads = Tuning::kThreads, kStages = Tuning::kStages;
constexpr int kLanes = 32;
constexpr int kWarps = kThreads / kLanes;
constexpr int kMostHeads = 256;  // with windows of their own in one launch

// How the rows of some heads are divided: 2^log_lanes lanes to each, and neighbouring ones of a head to a warp.
struct RowPlan {
  int64_t heads, first_head, count;            // of each batch; those of this launch
  int64_t matrices, tokens, pieces, elements;  // a warp takes a piece of a matrix; elements of the whole tensor
  int width, log_lanes, stage_runs;

  template <class T>
  RowPlan(T, const Tensor& band, int64_t first_head, int64_t count)
      : heads(band.size(1)),
        first_head(first_head),
        count(count),
        matrices(band.size(0) * count),
        tokens(band.size(2)),
        elements(band.numel()),
        width(static_cast<int>(band.size(3))),
        log_lanes(1) {
    const int64_t runs = (width - 1) / kRun<T>;
    while (log_lanes < log2_of(kLanes) && Tuning::runs_of_lane(log_lanes) << log_lanes < runs) {
      ++log_lanes;
    }
    pieces = (tokens + rows() - 1) / rows();
    stage_runs = static_cast<int>((int64_t{rows()} * width + 2 * (kRun<T> - 1)) / kRun<T>);
  }

  __host__ __device__ int rows() const { return kLanes >> log_lanes; }
  __device__ uint32_t lane_bits() const { return (1u << log_lanes) - 1; }
  __device__ int lane() const { return threadIdx.x & lane_bits(); }
  __device__ int row() const { return threadIdx.x % kLanes >> log_lanes; }

  // Finds the tensor's head that is matrix `matrix` of the launch.
  __device__ int64_t head(int64_t matrix) const {
    return count == heads ? matrix : matrix / count * heads + first_head + matrix % count;
  }

  int64_t thread_blocks(const Launcher& launch) const {
    const int64_t warps = matrices * pieces, all = (warps + kWarps - 1) / kWarps;
    return std::min(all, std::max(launch.multiprocessors() * Tuning::kFewestThreadBlocks, all / Tuning::kRowsInTurn));
  }
  size_t shared_bytes(int inputs) const { return size_t{16} * kWarps * kStages * inputs * stage_runs; }

  template <class A>
  __device__ A sum(A x) const {
    return combine_lanes(x, lane_bits(), [](A a, A b) { return a + b; });
  }
  template <class A>
  __device__ A max(A x) const {
    return combine_lanes(x, lane_bits(), [](A a, A b) { return ::max(a, b); });
  }
};

// Elements `begin` to end - 1 of what begins with a run: the runs that are all theirs, and the elements beside these.
template <class T>
struct Interval {
  int first, last;  // of the runs; the second is the first that is not theirs
  int begin, before, singles, skipped;

  // `whole`: whether there are to be runs.
  __device__ Interval(int begin, int end, bool whole) : begin(begin) {
    constexpr int kLogRun = log2_of(kRun<T>);
    first = (begin + kRun<T> - 1) >> kLogRun;
    last = whole ? end >> kLogRun : 0;
    skipped = ::max(last - first, 0) * kRun<T>;
    before = skipped > 0 ? first * kRun<T> - begin : end - begin;
    singles = end - begin - skipped;
  }

  // Calls f(element) for those that are in no run, shared out over `lanes`.
  template <class F>
  __device__ __forceinline__ void for_each_single(int lane, int lanes, const F& f) const {
#pragma unroll 1
    for (int i = lane; i < singles; i += lanes) {
      f(begin + i + (i < before ? 0 : skipped));
    }
  }

  // Calls f(run, exists) for the runs, shared out over 2^log_lanes: where there is none for a lane, with the last.
  template <class F>
  __device__ __forceinline__ void for_each_run(const RowPlan& plan, const F& f) const {
    int run = first + plan.lane();
#pragma unroll 4
    for (int turns = (last - first + (1 << plan.log_lanes) - 1) >> plan.log_lanes; turns > 0; --turns) {
      f(::min(run, last - 1), run < last);
      run += 1 << plan.log_lanes;
    }
  }
};

// Neighbouring rows that a warp takes, of one head: piece `piece` of the launch's matrix `matrix`.
template <class T>
struct BandRows {
  int64_t matrix, piece;
  int64_t token, run_element;  // the first token; the first element of the run that the rows begin in
  int number, begin, end;      // of rows; where they begin and end, counted from there

  __device__ BandRows(const RowPlan& plan, int64_t matrix, int64_t piece) : matrix(matrix), piece(piece) {
    token = piece * plan.rows();
    number = static_cast<int>(::min(int64_t{plan.rows()}, plan.tokens - token));
    const int64_t element = (plan.head(matrix) * plan.tokens + token) * plan.width;
    begin = static_cast<int>(element) & (kRun<T> - 1);
    run_element = element - begin;
    end = begin + number * plan.width;
  }
};

// Calls work(rows, inputs, results) for the warp's pieces in turn. Pointers are to the run that the rows begin in, in
// device memory; with kStaged to copies in shared memory, where results take the place of the first input until they
// are written, so that an element of it cannot be read once its result is there.
template <bool kStaged, class T, int kInputs, class Work>
__device__ __forceinline__ void for_all_rows(
    const RowPlan& plan, const T* const (&inputs)[kInputs], T* results, const Work& work) {
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  extern __shared__ __align__(16) unsigned char shared[];
  const auto stage_of = [&](int stage, int input) {
    const int number = (warp * kStages + stage) * kInputs + input;
    return reinterpret_cast<uint4*>(shared) + number * plan.stage_runs;
  };
  const auto start = [&](const BandRows<T>& rows, int stage) {
    if (rows.matrix < plan.matrices) {
      const int count = (rows.end + kRun<T> - 1) >> log2_of(kRun<T>);
      // The tensor may end within the last run.
      const int64_t left = plan.elements - rows.run_element;
      const int whole = left < int64_t{count} * kRun<T> ? count - 1 : count;
#pragma unroll
      for (int input = 0; input < kInputs; ++input) {
        const uint4* from = reinterpret_cast<const uint4*>(inputs[input] + rows.run_element);
        const uint32_t to = shared_address(stage_of(stage, input));
#pragma unroll 4
        for (int run = lane; run < whole; run += kLanes) {
          start_copy<16>(to + run * 16, from + run, 16);
        }
        if (whole < count && lane == 0) {
          start_copy<16>(to + whole * 16, from + whole, static_cast<int>(left % kRun<T> * sizeof(T)));
        }
      }
    }
    end_of_copies();
  };
  const auto write = [&](const BandRows<T>& rows, const uint4* from) {
    T* to = results + rows.run_element;
    const Interval<T> all(rows.begin, rows.end, true);
#pragma unroll 4
    for (int run = all.first + lane; run < all.last; run += kLanes) {
      reinterpret_cast<uint4*>(to)[run] = from[run];
    }
    all.for_each_single(lane, kLanes, [&](int e) { to[e] = reinterpret_cast<const T*>(from)[e]; });
  };

  const int64_t first = blockIdx.x * int64_t{kWarps} + warp, step = gridDim.x * int64_t{kWarps};
  const int64_t matrices = step / plan.pieces, pieces = step % plan.pieces;
  BandRows<T> rows(plan, first / plan.pieces, first % plan.pieces);
  if constexpr (kStaged) {
    start(rows, 0);
  }
  for (int stage = 0; rows.matrix < plan.matrices; stage ^= 1) {
    const bool wraps = rows.piece + pieces >= plan.pieces;
    const BandRows<T> next(plan, rows.matrix + matrices + wraps, rows.piece + pieces - (wraps ? plan.pieces : 0));
    const T* given[kInputs];
    if constexpr (kStaged) {
      start(next, stage ^ 1);
      wait_for_copies<1>();
      __syncwarp();
#pragma unroll
      for (int input = 0; input < kInputs; ++input) {
        given[input] = reinterpret_cast<const T*>(stage_of(stage, input));
      }
      work(rows, given, reinterpret_cast<T*>(stage_of(stage, 0)));
      __syncwarp();
      write(rows, stage_of(stage, 0));
      __syncwarp();
    } else {
#pragma unroll
      for (int input = 0; input < kInputs; ++input) {
        given[input] = inputs[input] + rows.run_element;
      }
      work(rows, given, results + rows.run_element);
    }
    rows = next;
  }
}

template <class T>
struct ForwardArguments {
  const T* band;
  T* probs;
  RowPlan plan;
  const float* key_bias;  // null: none
  int64_t bias_stride;
  bool of_heads, causal;  // whether heads have windows of their own
  float scale;
  int windows[kMostHeads];
};

// kPlain: scale is positive, and there is no bias. Then it is left to the exponents, whose differences it scales.
template <class T, bool kPlain, bool kStaged>
__global__ void __launch_bounds__(kThreads, Tuning::kThreadBlocks)
    window_softmax_forward_kernel(const __grid_constant__ ForwardArguments<T> p) {
  const RowPlan& plan = p.plan;
  const int lane = plan.lane(), lanes = 1 << plan.log_lanes, side = plan.width / 2;
  const float exponent_scale = kPlain ? p.scale * kLog2E<float> : kLog2E<float>;
  for_all_rows<kStaged, T, 1>(plan, {p.band}, p.probs, [&](const BandRows<T>& rows, const auto& inputs, T* results) {
    const T* scores = inputs[0];
    const int64_t token = rows.token + plan.row(), window = p.windows[p.of_heads ? rows.matrix % plan.count : 0];
    const int row = rows.begin + plan.row() * plan.width;
    const bool exists = plan.row() < rows.number;
    int begin = row, end = row;
    if (exists) {
      begin += side - static_cast<int>(min(window, token));
      end += side + 1 + (p.causal ? 0 : static_cast<int>(min(window, plan.tokens - 1 - token)));
    }
    Interval<T> live(begin, end, kPlain);
    const float* bias = nullptr;
    if (!kPlain && p.key_bias != nullptr) {
      bias = p.key_bias + plan.head(rows.matrix) / plan.heads * p.bias_stride + (token - side - row);
    }
    const auto logit = [&](int element) {
      const float score = static_cast<float>(scores[element]);
      if constexpr (kPlain) {
        return score;
      } else {
        const float logit = scaled(score, p.scale);
        return bias == nullptr ? logit : biased(logit, bias[element]);
      }
    };
    const auto run_of = [&](int run) { return reinterpret_cast<const uint4*>(scores)[run]; };

    float row_max = -infinity<float>();
    live.for_each_run(plan, [&](int run, bool) { row_max = max(row_max, largest_of<T>(run_of(run))); });
    live.for_each_single(lane, lanes, [&](int element) { row_max = max(row_max, logit(element)); });
    const float reference = finite_reference(plan.max(row_max));
    // Scaled logits less this are an instruction less than scaled differences. It is rounded, which scales all
    // powers alike: by next to nothing, unless it is far larger than logits are. Then elements are taken one by
    // one.
    const float offset = reference * exponent_scale;
    const bool has_offset = fabsf(offset) < float{1 << 20};
    if (!has_offset) {
      live = Interval<T>(begin, end, false);
    }
    const auto to_powers = [&](int run, float (&powers)[kRun<T>]) {
      unpack<T>(run_of(run), powers);
#pragma unroll
      for (float& power : powers) {
        power = power_of_two(fmaf(power, exponent_scale, -offset));
      }
    };
    const auto power_of = [&](int element) {
      const float x = logit(element);
      return power_of_two(has_offset ? fmaf(x, exponent_scale, -offset) : (x - reference) * exponent_scale);
    };
    float row_sum = 0;
    live.for_each_run(plan, [&](int run, bool exists) {
      float powers[kRun<T>];
      to_powers(run, powers);
      const float of_run = sum_of(powers);
      row_sum += exists ? of_run : 0.0f;
    });
    live.for_each_single(lane, lanes, [&](int element) { row_sum += power_of(element); });
    row_sum = plan.sum(row_sum);
    const float factor = row_sum == 0 ? 0.0f : 1 / row_sum;
    live.for_each_run(plan, [&](int run, bool exists) {
      float powers[kRun<T>];
      to_powers(run, powers);
#pragma unroll
      for (float& power : powers) {
        power *= factor;
      }
      if (exists) {
        reinterpret_cast<uint4*>(results)[run] = pack<T>(powers);
      }
    });
    live.for_each_single(
        lane, lanes, [&](int element) { results[element] = static_cast<T>(power_of(element) * factor); });
    // Numbers beside the window.
    if (exists) {
      for (int element = row + lane; element < begin; element += lanes) {
        results[element] = T(0.0f);
      }
      for (int element = end + lane; element < row + plan.width; element += lanes) {
        results[element] = T(0.0f);
      }
    }
  });
}

template <class T>
struct SoftmaxBackwardArguments {
  const T* grad;
  const T* probs;
  T* grad_scores;
  RowPlan plan;
  float scale;
};

template <class T, bool kStaged>
__global__ void __launch_bounds__(kThreads, Tuning::kThreadBlocks)
    window_softmax_backward_kernel(const __grid_constant__ SoftmaxBackwardArguments<T> p) {
  const RowPlan& plan = p.plan;
  const int lane = plan.lane(), lanes = 1 << plan.log_lanes;
  for_all_rows<kStaged, T, 2>(
      plan, {p.grad, p.probs}, p.grad_scores, [&](const BandRows<T>& rows, const auto& inputs, T* results) {
        const T* grads = inputs[0];
        const T* probs = inputs[1];
        const int row = rows.begin + plan.row() * plan.width;
        const Interval<T> all(row, row + (plan.row() < rows.number ? plan.width : 0), true);
        const auto unpack_run = [&](int run, float (&grad)[kRun<T>], float (&prob)[kRun<T>]) {
          unpack<T>(reinterpret_cast<const uint4*>(grads)[run], grad);
          unpack<T>(reinterpret_cast<const uint4*>(probs)[run], prob);
        };
        float dot = 0;
        all.for_each_run(plan, [&](int run, bool exists) {
          float grad[kRun<T>], prob[kRun<T>];
          unpack_run(run, grad, prob);
          float of_run = 0;
#pragma unroll
          for (int e = 0; e < kRun<T>; ++e) {
            of_run += prob[e] == 0 ? 0.0f : grad[e] * prob[e];
          }
          dot += exists ? of_run : 0.0f;
        });
        all.for_each_single(lane, lanes, [&](int element) {
          const float prob = static_cast<float>(probs[element]);
          dot += prob == 0 ? 0.0f : static_cast<float>(grads[element]) * prob;
        });
        dot = plan.sum(dot);
        all.for_each_run(plan, [&](int run, bool exists) {
          float grad[kRun<T>], prob[kRun<T>];
          unpack_run(run, grad, prob);
#pragma unroll
          for (int e = 0; e < kRun<T>; ++e) {
            grad[e] = prob[e] == 0 ? 0.0f : p.scale * prob[e] * (grad[e] - dot);  // what is masked may be NaN
          }
          if (exists) {
            reinterpret_cast<uint4*>(results)[run] = pack<T>(grad);
          }
        });
        all.for_each_single(lane, lanes, [&](int element) {
          const float prob = static_cast<float>(probs[element]);
          const float grad = prob == 0 ? 0.0f : p.scale * prob * (static_cast<float>(grads[element]) - dot);
          results[element] = static_cast<T>(grad);
        });
      });
}

void check_width(const Tensor& band) {
  check(
      band.size(3) < INT32_MAX - 64, "a row of a band has to have fewer than 2**31 - 65 numbers on CUDA, got ",
      band.size(3), ".");
}

// Runs the kernel that stages rows where shared memory holds those of a thread block.
template <int kInputs, class Arguments>
void run(const Launcher& launch, void (*staged)(Arguments), void (*direct)(Arguments), const Arguments& arguments) {
  const RowPlan& plan = arguments.plan;
  const size_t bytes = plan.shared_bytes(kInputs);
  const bool fits = bytes <= launch.shared_memory();
  launch.with_shared_memory(fits ? staged : direct, plan.thread_blocks(launch), kThreads, fits ? bytes : 0, arguments);
}

Tensor window_softmax_forward(
    const Tensor& band, const std::optional<Tensor>& key_bias, const std::vector<int64_t>& windows, double scale,
    bool causal) {
  check_window_softmax(band, key_bias, windows);
  check_width(band);
  const int64_t heads = band.size(1);
  Tensor probs = empty_on(band, band.sizes());
  const Launcher launch(band);
  with_element<false>(band, "window_softmax", [&](auto zero) {
    using T = decltype(zero);
    if (probs.numel() == 0) {
      return;
    }
    check(!key_bias || key_bias->scalar_type() == ScalarType::Float, "key_bias has to be fp32.");
    const Tensor scores = launch.aligned(band);
    const bool of_heads = windows.size() > 1;
    const int64_t in_launch = of_heads ? kMostHeads : heads;
    for (int64_t first = 0; first < heads; first += in_launch) {
      const int64_t count = std::min(in_launch, heads - first);
      ForwardArguments<T> p{
          static_cast<const T*>(scores.const_data_ptr()),
          static_cast<T*>(probs.mutable_data_ptr()),
          RowPlan(zero, band, first, count),
          key_bias ? key_bias->const_data_ptr<float>() : nullptr,
          key_bias && key_bias->size(0) > 1 ? key_bias->stride(0) : 0,
          of_heads,
          causal,
          static_cast<float>(scale)};
      std::copy_n(windows.begin() + (of_heads ? first : 0), of_heads ? count : 1, p.windows);
      if (scale > 0 && !key_bias) {
        run<1>(launch, window_softmax_forward_kernel<T, true, true>, window_softmax_forward_kernel<T, true, false>, p);
      } else {
        run<1>(
            launch, window_softmax_forward_kernel<T, false, true>, window_softmax_forward_kernel<T, false, false>, p);
      }
    }
  });
  return probs;
}

Tensor window_softmax_backward(const Tensor& grad, const Tensor& probs, double scale) {
  check_operands({{&grad, "grad"}, {&probs, "probs"}}, 3);
  check_size(probs, 3, grad.size(3), "probs");
  for (auto [x, name] : {std::pair{&grad, "grad"}, {&probs, "probs"}}) {
    check_band(*x, name);
    check_contiguous(*x, name);
  }
  check_width(grad);
  Tensor grad_scores = empty_on(grad, grad.sizes());
  const Launcher launch(grad);
  with_element<false>(grad, "window_softmax", [&](auto zero) {
    using T = decltype(zero);
    if (grad_scores.numel() == 0) {
      return;
    }
    const Tensor aligned_grad = launch.aligned(grad), aligned_probs = launch.aligned(probs);
    const SoftmaxBackwardArguments<T> p{
        static_cast<const T*>(aligned_grad.const_data_ptr()), static_cast<const T*>(aligned_probs.const_data_ptr()),
        static_cast<T*>(grad_scores.mutable_data_ptr()), RowPlan(zero, grad, 0, grad.size(1)),
        static_cast<float>(scale)};
    run<2>(launch, window_softmax_backward_kernel<T, true>, window_softmax_backward_kernel<T, false>, p);
  });
  return grad_scores;
}

}  // namespace
}  // namespace ds_sparse

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CUDA, m) {
  m.impl("window_softmax_forward", TORCH_BOX(&ds_sparse::window_softmax_forward));
  m.impl("window_softmax_backward", TORCH_BOX(&ds_sparse::window_softmax_backward));
}
