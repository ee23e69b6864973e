// Row softmax over windows. Schemas and shapes: csrc/library.cpp; meaning: ds_sparse/reference.py.
//
// Rows of a band are an odd number of elements apart, so that a row begins and ends within runs of 16 bytes that belong
// to its neighbours too: these are read whole and written one by one. Neighbouring lanes share a row and take its runs
// in turn; a lane holds up to kHeld of them. A row that a whole warp cannot hold is read twice, the second time mostly
// from cache.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "../checks.h"
#include "band.h"
#include "elements.h"
#include "launch.h"
#include "logits.h"
#include "vector.h"

namespace ds_sparse {
namespace {

constexpr int kLanes = 32;
constexpr int kHeld = 5;
constexpr int kMostHeads = 256;  // with windows of their own in one launch

// How rows are shared out over warps: `lanes` lanes, a power of two, to each.
struct Shares {
  int64_t rows;
  int width, lanes;

  template <class T>
  Shares(T, int64_t rows, int64_t width) : rows(rows), width(static_cast<int>(width)), lanes(2) {
    while (lanes < kLanes && lanes * kHeld < most_runs<T>()) {
      lanes *= 2;
    }
  }

  // Runs that a row may touch.
  template <class T>
  __host__ __device__ int most_runs() const { return (width - 1 + kRun<T> - 1) / kRun<T> + 1; }

  int64_t thread_blocks(const Launcher& launch) const {
    const int64_t in_block = kThreads / lanes;
    return std::min((rows + in_block - 1) / in_block, launch.multiprocessors() * 128);
  }

  __device__ int rows_of_warp() const { return kLanes / lanes; }
  // The first row of the warp's first share, and how far it is to the next one's.
  __device__ int64_t first() const {
    return (blockIdx.x * int64_t{kThreads} + threadIdx.x) / kLanes * rows_of_warp();
  }
  __device__ int64_t step() const { return gridDim.x * int64_t{kThreads} / kLanes * rows_of_warp(); }
};

// The runs of one row that touch it, and the lane's part of them.
template <class T>
struct RowRuns {
  int64_t first_element, elements;  // of the first run; of all rows
  int before, width, count, lanes;  // elements of the first run that are before the row; of the row; runs

  // Row `row` of `rows`; none has no runs.
  __device__ RowRuns(const Shares& shares, int64_t row, int64_t rows)
      : elements(rows * shares.width), width(shares.width), lanes(shares.lanes) {
    const int64_t element = row * width;
    before = static_cast<int>(element % kRun<T>);
    first_element = element - before;
    count = row < rows ? (before + width - 1) / kRun<T> + 1 : 0;
  }

  // The place in the row of a run's first element: negative where that is another row's.
  __device__ int place(int run) const { return run * kRun<T> - before; }

  // Calls f(i, run) for the lane's share, i < kHeld, of the runs from `first` on.
  template <class F>
  __device__ __forceinline__ void for_each(int first, const F& f) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int run = first + i * lanes + static_cast<int>(threadIdx.x & (lanes - 1));
      if (run < count) {
        f(i, run);
      }
    }
  }

  __device__ __forceinline__ Run<T, kRun<T>> load(const T* data, int run) const {
    const int64_t element = first_element + int64_t{run} * kRun<T>;
    if (element + kRun<T> <= elements) {
      return load_aligned(data + element);
    }
    Run<T, kRun<T>> found{};
#pragma unroll
    for (int e = 0; e < kRun<T>; ++e) {
      if (element + e < elements) {
        found.element[e] = data[element + e];
      }
    }
    return found;
  }

  __device__ __forceinline__ void store(T* data, int run, const Run<T, kRun<T>>& given) const {
    T* to = data + first_element + int64_t{run} * kRun<T>;
    const int at = place(run);
    if (at >= 0 && at + kRun<T> <= width) {
      store_run(to, given);
      return;
    }
#pragma unroll
    for (int e = 0; e < kRun<T>; ++e) {
      if (at + e >= 0 && at + e < width) {
        to[e] = given.element[e];
      }
    }
  }
};

// Of a run that begins at `at`, what is at places begin to end - 1 stays; the rest becomes `other`.
template <class A, int kCount>
__device__ __forceinline__ void leave_within(int at, int begin, int end, A (&run)[kCount], A other) {
  if (at >= begin && at + kCount <= end) {
    return;
  }
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    run[e] = at + e >= begin && at + e < end ? run[e] : other;
  }
}

struct ForwardArguments {
  const float* key_bias;  // null: none
  int64_t bias_stride, batch, heads, tokens;
  // Those of the heads of this launch; one number for all of them, or one each.
  int64_t first_head, count;
  bool of_heads, causal;
  float scale;
  int windows[kMostHeads];
};

template <class T>
__global__ void __launch_bounds__(kThreads, 4) window_softmax_forward_kernel(
    const T* __restrict__ band, T* __restrict__ probs, Shares shares, const __grid_constant__ ForwardArguments p) {
  const int held = kHeld * shares.lanes, most = shares.most_runs<T>();
  const int once = (most + held - 1) / held * held, side = shares.width / 2;
  const bool reads_again = once > held;
  // The rows of this launch, of `count` heads in each batch.
  for (int64_t start = shares.first(); start < shares.rows; start += shares.step()) {
    const int64_t number = start + threadIdx.x % kLanes / shares.lanes, matrix = number / p.tokens;
    const int64_t token = number % p.tokens, batch = matrix / p.count, head = matrix % p.count;
    const int64_t rows = p.batch * p.heads * p.tokens;
    const int64_t row = number < shares.rows ? (batch * p.heads + p.first_head + head) * p.tokens + token : rows;
    const int64_t window = p.windows[p.of_heads ? head : 0];
    const int begin = side - static_cast<int>(min(window, token));
    const int end = side + 1 + (p.causal ? 0 : static_cast<int>(min(window, p.tokens - 1 - token)));
    const float* bias = p.key_bias + batch * p.bias_stride + (token - side);
    const RowRuns<T> runs(shares, row, rows);

    float logits[kHeld][kRun<T>];
    const auto read = [&](int first) {
      Run<T, kRun<T>> scores[kHeld];
      runs.for_each(first, [&](int i, int run) {
        const int at = runs.place(run);
        if (at < end && at + kRun<T> > begin) {
          scores[i] = runs.load(band, run);
        }
      });
      runs.for_each(first, [&](int i, int run) {
        const int at = runs.place(run);
#pragma unroll
        for (int e = 0; e < kRun<T>; ++e) {
          logits[i][e] = static_cast<float>(scores[i].element[e]);
        }
        scale_run(logits[i], p.scale);
        if (p.key_bias != nullptr) {
#pragma unroll
          for (int e = 0; e < kRun<T>; ++e) {
            if (at + e >= begin && at + e < end) {
              logits[i][e] = biased(logits[i][e], bias[at + e]);
            }
          }
        }
        leave_within(at, begin, end, logits[i], -infinity<float>());
      });
    };
    float largest = -infinity<float>(), sum = 0;
    const auto add = [&](int first) {
      float larger = largest;
      runs.for_each(first, [&](int i, int) {
#pragma unroll
        for (const float logit : logits[i]) {
          larger = max(larger, logit);
        }
      });
      const float reference = finite_reference(larger);
      sum *= power_of_difference(largest, reference, kLog2E<float>);
      runs.for_each(first, [&](int i, int) {
#pragma unroll
        for (float& logit : logits[i]) {
          logit = power_of_difference(logit, reference, kLog2E<float>);
          sum += logit;
        }
      });
      largest = larger;
    };
    const auto write = [&](int first, float factor) {
      runs.for_each(first, [&](int i, int run) {
        const int at = runs.place(run);
        Run<T, kRun<T>> result;
#pragma unroll
        for (int e = 0; e < kRun<T>; ++e) {
          result.element[e] = static_cast<T>(logits[i][e] * factor);
        }
        leave_within(at, begin, end, result.element, T(0.0f));
        runs.store(probs, run, result);
      });
    };

    // `add` leaves powers relative to the lane's largest logit where the logits were; a row that is held needs no other
    // sweep.
    float reference = 0, factor = 0;
    for (int at = 0; at < (reads_again ? 2 * once : once); at += held) {
      const int first = at < once ? at : at - once;
      read(first);
      if (at < once) {
        add(first);
      }
      if (at + held == once) {
        reference = finite_reference(max_of_lanes(largest, shares.lanes));
        const float to_reference = power_of_difference(largest, reference, kLog2E<float>);
        sum = sum_of_lanes(sum * to_reference, shares.lanes);
        factor = sum == 0 ? 0.0f : 1 / sum;
        factor *= reads_again ? 1.0f : to_reference;
      }
      if (at >= once) {
        runs.for_each(first, [&](int i, int) {
#pragma unroll
          for (float& logit : logits[i]) {
            logit = power_of_difference(logit, reference, kLog2E<float>);
          }
        });
      }
      if (at >= once || !reads_again) {
        write(first, factor);
      }
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 4) window_softmax_backward_kernel(
    const T* __restrict__ grad, const T* __restrict__ probs, T* __restrict__ grad_scores, Shares shares, float scale) {
  const int held = kHeld * shares.lanes, most = shares.most_runs<T>();
  for (int64_t start = shares.first(); start < shares.rows; start += shares.step()) {
    const RowRuns<T> runs(shares, start + threadIdx.x % kLanes / shares.lanes, shares.rows);
    Run<T, kRun<T>> grads[kHeld], ps[kHeld];
    const auto read = [&](int first) {
      runs.for_each(first, [&](int i, int run) {
        grads[i] = runs.load(grad, run);
        ps[i] = runs.load(probs, run);
      });
    };
    float dot = 0;
    for (int first = 0; first < most; first += held) {
      read(first);
      runs.for_each(first, [&](int i, int run) {
        float products[kRun<T>];
#pragma unroll
        for (int e = 0; e < kRun<T>; ++e) {
          products[e] = static_cast<float>(grads[i].element[e]) * static_cast<float>(ps[i].element[e]);
        }
        leave_within(runs.place(run), 0, runs.width, products, 0.0f);
#pragma unroll
        for (const float product : products) {
          dot += product;
        }
      });
    }
    dot = sum_of_lanes(dot, shares.lanes);
    for (int first = 0; first < most; first += held) {
      if (most > held) {
        read(first);
      }
      runs.for_each(first, [&](int i, int run) {
        Run<T, kRun<T>> result;
#pragma unroll
        for (int e = 0; e < kRun<T>; ++e) {
          const float p = static_cast<float>(ps[i].element[e]);
          result.element[e] = static_cast<T>(scale * p * (static_cast<float>(grads[i].element[e]) - dot));
        }
        runs.store(grad_scores, run, result);
      });
    }
  }
}

void check_width(const Tensor& band) {
  check(band.size(3) < INT32_MAX - 64, "a row of a band has to have fewer than 2**31 - 65 numbers on CUDA, got " +
                                           std::to_string(band.size(3)) + ".");
}

Tensor window_softmax_forward(
    const Tensor& band, const std::optional<Tensor>& key_bias, const std::vector<int64_t>& windows, double scale,
    bool causal) {
  check_window_softmax(band, key_bias, windows);
  check_width(band);
  const int64_t batch = band.size(0), heads = band.size(1), tokens = band.size(2);
  Tensor probs = torch::stable::new_empty(band, band.sizes());
  const Launcher launch(band);
  with_element<false>(band, "window_softmax", [&](auto zero) {
    using T = decltype(zero);
    if (probs.numel() == 0) {
      return;
    }
    check(!key_bias || key_bias->scalar_type() == ScalarType::Float, "key_bias has to be fp32.");
    const Tensor scores = launch.aligned(band);
    ForwardArguments p{
        key_bias ? key_bias->const_data_ptr<float>() : nullptr,
        key_bias && key_bias->size(0) > 1 ? key_bias->stride(0) : 0, batch, heads, tokens, 0, 0, windows.size() > 1,
        causal, static_cast<float>(scale)};
    for (const int64_t in_launch = p.of_heads ? kMostHeads : heads; p.first_head < heads; p.first_head += in_launch) {
      p.count = std::min(in_launch, heads - p.first_head);
      const int64_t numbers = p.of_heads ? p.count : 1;
      std::copy_n(windows.begin() + (p.of_heads ? p.first_head : 0), numbers, p.windows);
      const Shares shares(zero, batch * p.count * tokens, band.size(3));
      launch(
          window_softmax_forward_kernel<T>, shares.thread_blocks(launch), kThreads,
          static_cast<const T*>(scores.const_data_ptr()), static_cast<T*>(probs.mutable_data_ptr()), shares, p);
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
  Tensor grad_scores = torch::stable::new_empty(grad, grad.sizes());
  const Launcher launch(grad);
  with_element<false>(grad, "window_softmax", [&](auto zero) {
    using T = decltype(zero);
    if (grad_scores.numel() == 0) {
      return;
    }
    const Tensor aligned_grad = launch.aligned(grad), aligned_probs = launch.aligned(probs);
    const Shares shares(zero, grad.size(0) * grad.size(1) * grad.size(2), grad.size(3));
    launch(
        window_softmax_backward_kernel<T>, shares.thread_blocks(launch), kThreads,
        static_cast<const T*>(aligned_grad.const_data_ptr()), static_cast<const T*>(aligned_probs.const_data_ptr()),
        static_cast<T*>(grad_scores.mutable_data_ptr()), shares, static_cast<float>(scale));
  });
  return grad_scores;
}

}  // namespace
}  // namespace ds_sparse

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CUDA, m) {
  m.impl("window_softmax_forward", TORCH_BOX(&ds_sparse::window_softmax_forward));
  m.impl("window_softmax_backward", TORCH_BOX(&ds_sparse::window_softmax_backward));
}
