// window_matmul, unwindow_matmul, window_softmax_forward and window_softmax_backward on the CPU; schemas and letters in
// ../library.cpp.
//
// A task has neighbouring rows of a head, fewer of them the wider the window is.

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <type_traits>
#include <vector>

#include "../implementation.h"
#include "arguments.h"
#include "memory.h"
#include "operands.h"
#include "schedule.h"

namespace ds_sparse::cpu {

namespace {

// Rows of a task whose tokens cost `cost` for each other one; of 64, since a transposed band is read so many at a time.
int64_t task_rows(int64_t tokens, int64_t window, int64_t cost) {
  int64_t of_row = std::max<int64_t>(1, std::min(tokens, 2 * window) * cost);
  return std::clamp<int64_t>(task_cost / of_row / 16 * 16, 16, 64);
}

// Calls the workers with (batch, head, rows), for all rows of all heads, a multiple of `step` and perhaps the rest.
template <class MakeWorker>
void run_rows(const Tensor& like, int64_t window, int64_t step, const MakeWorker& make_worker) {
  int64_t heads = like.size(1), tokens = like.size(2), tasks = blocks_of(tokens, step);
  run_tasks(like.size(0) * heads * tasks, [&] {
    return [&, worker = make_worker()](int64_t task) mutable {
      int64_t matrix = task / tasks, first = task % tasks * step;
      worker(matrix / heads, matrix % heads, WindowRows{tokens, window, first, std::min(step, tokens - first)});
    };
  });
}

template <class T, class O>
void multiply(const Tensor& a, const Tensor& b, int64_t window, Tensor& out) {
  int64_t heads = a.size(1), tokens = a.size(2), head_dim = a.size(3), depth = multiplicands_of<T, O>(head_dim),
          lanes = kernels<T>().lanes, panels_size = padded<T>(tokens) * depth, width = 2 * window + 1;
  auto panels = pack_all<T, O>(b, lanes, padded<T>(head_dim), Form::panels);
  T* bands = static_cast<T*>(out.mutable_data_ptr());
  int64_t step = task_rows(tokens, window, depth);
  run_rows(a, window, step, [&] {
    return [&, left = Buffer<O>(step * depth)](int64_t batch, int64_t head, const WindowRows& rows) {
      int64_t matrix = batch * heads + head;
      pack_tokens<T>(a, batch, head, rows.first, step, depth, left.data());
      products<T, O>().window_matmul(
          rows, left.data(), panels.data() + matrix * panels_size, depth,
          bands + (matrix * tokens + rows.first) * width);
    };
  });
}

// The part of a band that some rows need, in scratch of `band_scratch` numbers; its tokens one after another, or
// multiplicands of them of all rows if transposed.
template <class T, class O>
Band<O> pack_band(
    const T* band, int64_t row_stride, int64_t column_stride, const WindowRows& rows, bool transposed,
    Number<O>* scratch) {
  constexpr int64_t P = per_multiplicand<O>;
  int64_t last = rows.first + rows.rows - 1, begin = rows.begin(rows.first), end = rows.end(last);
  if (!transposed) {
    // Columns that no row has a token for are left out.
    int64_t from = rows.begin(last) == 0 ? rows.window - last : 0,
            until = rows.end(rows.first) == rows.tokens ? rows.window + rows.tokens - rows.first : 2 * rows.window + 1;
    from = std::max<int64_t>(from, 0);
    until = std::min(until, 2 * rows.window + 1);
    int64_t stride = blocks_of(until - from - 1, P) * P + 1;
    products<T, O>().pack_rows(
        band + rows.first * row_stride + from * column_stride, row_stride, column_stride, rows.rows, until - from,
        scratch, stride);
    return {scratch, rows.window - rows.first - from, stride - 1, P};
  }
  auto number = [&](int64_t t, int64_t r) { return band + t * row_stride + (r - t + rows.window) * column_stride; };
  begin = begin / P * P;
  for (int64_t t = begin; t < end; t += P) {
    int64_t there = std::min(P, end - t), from = std::max(rows.first, t + there - 1 - rows.window),
            until = std::min(last, t + rows.window) + 1;
    Number<O>* to = scratch + (t - begin) * rows.rows;
    products<T, O>().pack_dense(
        number(t, from), row_stride - column_stride, column_stride, there, std::max<int64_t>(until - from, 0),
        reinterpret_cast<O*>(to) + from - rows.first, std::max<int64_t>(until - from, 0));
    // Each of two tokens has a row that the other has not.
    if constexpr (P > 1) {
      if (there < P) continue;
      if (int64_t r = t - rows.window; r >= rows.first && r <= last) to[P * (r - rows.first)] = *number(t, r);
      if (int64_t r = t + 1 + rows.window; r >= rows.first && r <= last)
        to[P * (r - rows.first) + 1] = *number(t + 1, r);
    }
  }
  return {scratch, -begin * rows.rows, P, P * rows.rows};
}

int64_t band_scratch(int64_t tokens, int64_t window, int64_t step) {
  return step * (std::min(2 * window, tokens) + step + 2);
}

template <class T, class O>
void unwindow(const Tensor& band, const Tensor& dense, bool transposed, Tensor& out) {
  constexpr int64_t P = per_multiplicand<O>;
  int64_t heads = dense.size(1), tokens = dense.size(2), head_dim = dense.size(3), padded_dim = padded<T>(head_dim),
          window = band.size(3) / 2;
  // Pairs of a transposed band lie apart.
  bool band_in_place =
      std::is_same_v<T, Number<O>> && band.stride(3) == 1 && (P == 1 || (!transposed && (band.stride(2) - 1) % P == 0));
  bool dense_in_place = P == 1 && has_rows<T, O>(dense, padded_dim);
  int64_t lanes = kernels<T>().lanes, packed_size = padded<T>(tokens) / P * padded_dim;
  auto packed = dense_in_place ? Buffer<O>(0) : pack_all<T, O>(dense, lanes, padded_dim, Form::dense);
  int64_t step = task_rows(tokens, window, head_dim / P);
  run_rows(dense, window, step, [&] {
    return [&, output = Buffer<Compute<T>>(step * padded_dim),
            scratch = Buffer<Number<O>>(band_in_place ? 0 : band_scratch(tokens, window, step))](
               int64_t batch, int64_t head, const WindowRows& rows) {
      const T* from = pointer<T>(band) + batch * band.stride(0) + head * band.stride(1);
      int64_t stride = band.stride(2);
      const O* right = packed.data() + (batch * heads + head) * packed_size;
      if (dense_in_place) right = reinterpret_cast<const O*>(tokens_of<T>(dense, batch, head, 0));
      Band<O> left;
      if constexpr (std::is_same_v<T, Number<O>>) {
        if (transposed)
          left = {from, window + rows.first, 1, stride - 1};
        else
          left = {from, window + rows.first * (stride - 1), stride - 1, P};
      }
      if (!band_in_place) left = pack_band<T, O>(from, stride, band.stride(3), rows, transposed, scratch.data());
      products<T, O>().unwindow_matmul(rows, left, right, padded_dim, output.data());
      store_tokens<T>(output.data(), padded_dim, batch, head, rows.first, rows.rows, out);
    };
  });
}

Tensor window_matmul(Tensor a, Tensor b, int64_t window, std::string implementation) {
  check_implementation(implementation, "cpu");
  check_operands({{&a, "a"}, {&b, "b"}}, 3);
  check_size(b, 3, a.size(3), "b");
  check_window(window);
  Tensor out = fresh(empty_on(a, {a.size(0), a.size(1), a.size(2), 2 * window + 1}));
  if (out.numel() == 0) return out;
  for_operands(a.scalar_type(), [&](auto* type, auto* multiplicand) {
    multiply<std::remove_pointer_t<decltype(type)>, std::remove_pointer_t<decltype(multiplicand)>>(a, b, window, out);
  });
  return out;
}

Tensor unwindow_matmul(Tensor band, Tensor dense, bool transposed) {
  check_operands({{&dense, "dense"}, {&band, "band"}}, 3);
  check_band(band, "band");
  Tensor out = fresh(empty_on(dense, dense.sizes()));
  if (out.numel() == 0) return out;
  for_operands(dense.scalar_type(), [&](auto* type, auto* multiplicand) {
    unwindow<std::remove_pointer_t<decltype(type)>, std::remove_pointer_t<decltype(multiplicand)>>(
        band, dense, transposed, out);
  });
  return out;
}

Tensor window_softmax_forward(
    Tensor band, std::optional<Tensor> key_bias, std::vector<int64_t> windows, double scale, bool causal) {
  check_window_softmax(band, key_bias, windows);
  Tensor out = fresh(empty_on(band, band.sizes()));
  if (out.numel() == 0) return out;
  for_dtype(band.scalar_type(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    using C = Compute<T>;
    int64_t heads = band.size(1), tokens = band.size(2), width = band.size(3), window = width / 2;
    run_rows(band, window, task_rows(tokens, window, 8), [&] {
      return [&, scratch = Buffer<C>(padded<T>(width))](int64_t batch, int64_t head, const WindowRows& rows) {
        int64_t at = ((batch * heads + head) * tokens + rows.first) * width;
        const C* bias =
            key_bias ? pointer<C>(*key_bias) + (key_bias->size(0) == 1 ? 0 : batch) * key_bias->stride(0) : nullptr;
        kernels<T>().window_softmax_forward(
            rows, pointer<T>(band) + at, bias, windows[windows.size() == 1 ? 0 : head], scale, causal,
            static_cast<T*>(out.mutable_data_ptr()) + at, scratch.data());
      };
    });
  });
  return out;
}

Tensor window_softmax_backward(Tensor grad, Tensor probs, double scale) {
  check_operands({{&grad, "grad"}, {&probs, "probs"}}, 3);
  check_size(probs, 3, grad.size(3), "probs");
  for (auto [x, name] : {std::pair{&grad, "grad"}, {&probs, "probs"}}) {
    check_band(*x, name);
    check_contiguous(*x, name);
  }
  Tensor out = fresh(empty_on(grad, grad.sizes()));
  if (out.numel() == 0) return out;
  for_dtype(grad.scalar_type(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    int64_t heads = grad.size(1), tokens = grad.size(2), width = grad.size(3), window = width / 2;
    run_rows(grad, window, task_rows(tokens, window, 4), [&] {
      return [&](int64_t batch, int64_t head, const WindowRows& rows) {
        int64_t at = ((batch * heads + head) * tokens + rows.first) * width;
        kernels<T>().window_softmax_backward(
            pointer<T>(grad) + at, pointer<T>(probs) + at, rows.rows, width, scale,
            static_cast<T*>(out.mutable_data_ptr()) + at);
      };
    });
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CPU, m) {
  m.impl("window_matmul", TORCH_BOX(&window_matmul));
  m.impl("unwindow_matmul", TORCH_BOX(&unwindow_matmul));
  m.impl("window_softmax_forward", TORCH_BOX(&window_softmax_forward));
  m.impl("window_softmax_backward", TORCH_BOX(&window_softmax_backward));
}

}  // namespace ds_sparse::cpu
