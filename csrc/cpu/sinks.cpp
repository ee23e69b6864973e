// attention_sinks_forward and attention_sinks_backward on the CPU; schemas and letters in ../library.cpp.

#include "../sinks.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <type_traits>

#include "arguments.h"
#include "memory.h"
#include "operands.h"
#include "schedule.h"

namespace ds_sparse::cpu {

namespace {

// Tokens whose rows are done together, in a core's first cache.
constexpr int64_t tokens_at_once = 32;

// (B, H, T, D) or (B, H, T, g, D) in memory.
template <class T>
struct RowsInMemory {
  T* data;
  int64_t batch, head, token, row, column;

  explicit RowsInMemory(const Tensor& x)
      : data(static_cast<T*>(const_cast<void*>(x.const_data_ptr()))),
        batch(x.stride(0)),
        head(x.stride(1)),
        token(x.stride(2)),
        row(x.dim() == 5 ? x.stride(3) : 0),
        column(x.stride(x.dim() - 1)) {}

  T* at(int64_t b, int64_t h, int64_t first, int64_t i) const {
    return data + b * batch + h * head + first * token + i * row;
  }
};

// Calls the workers that make_worker() makes with (number, batch, head, first token, tokens, row of each, the place of
// the first row among all), where rows are rows_of_token apart.
template <class MakeWorker>
void run_rows(const SinksCall& call, const MakeWorker& make_worker) {
  int64_t heads = call.heads(), tokens = call.tokens(), group = call.rows_of_token(),
          parts = blocks_of(tokens, tokens_at_once), cost = tokens_at_once * std::max<int64_t>(1, call.head_dim()),
          grain = std::max<int64_t>(1, task_cost / 8 / cost);
  torch::stable::parallel_for(0, call.batch() * heads * group * parts, grain, [&](int64_t begin, int64_t end) {
    auto worker = make_worker();
    for (int64_t number = begin; number < end; ++number) {
      int64_t first = number % parts * tokens_at_once, i = number / parts % group, matrix = number / parts / group;
      worker(
          number, matrix / heads, matrix % heads, first, std::min(tokens_at_once, tokens - first), i,
          (matrix * tokens + first) * group + i);
    }
  });
}

template <class T>
void forward(const SinksCall& call, const Tensor& output, const Tensor& lse, const Tensor& rows) {
  using C = Compute<T>;
  const RowsInMemory<const T> given(call.output);
  const RowsInMemory<T> made(output);
  int64_t group = call.rows_of_token(), head_dim = call.head_dim(), width = padded<T>(head_dim);
  const C *of_rows = pointer<C>(call.rows), *sinks = pointer<C>(call.sinks);
  C *lse_to = static_cast<C*>(lse.mutable_data_ptr()), *rows_to = static_cast<C*>(rows.mutable_data_ptr());
  run_rows(call, [&] {
    return [&, numbers = Buffer<C>(tokens_at_once * width)](
               int64_t, int64_t b, int64_t head, int64_t first, int64_t count, int64_t i, int64_t place) {
      kernels<T>().pack_rows(
          given.at(b, head, first, i), given.token, given.column, count, head_dim, numbers.data(), width);
      for (int64_t r = 0; r < count; ++r) {
        int64_t at = place + r * group;
        RowWithSink<C> row(of_rows[2 * at], of_rows[2 * at + 1], sinks[head * group + i]);
        C *from = numbers.data() + r * width, share = row.share;
        for (int64_t c = 0; c < width; ++c) from[c] *= share;
        lse_to[at] = row.lse;
        rows_to[2 * at] = row.row_max;
        rows_to[2 * at + 1] = row.row_sum;
      }
      kernels<T>().store_rows(numbers.data(), width, count, head_dim, false, made.at(b, head, first, i), made.token);
    };
  });
}

// Rows are summed a part at a time, whatever thread has it, and then the parts in their order.
template <class T>
void backward(
    const SinksCall& call, const Tensor& grad_output, const std::optional<Tensor>& grad_lse, const Tensor& grad_sinks) {
  using C = Compute<T>;
  const RowsInMemory<const T> output(call.output), grad(grad_output);
  int64_t heads = call.heads(), group = call.rows_of_token(), head_dim = call.head_dim(),
          parts = blocks_of(call.tokens(), tokens_at_once);
  const C *of_rows = pointer<C>(call.rows), *sinks = pointer<C>(call.sinks),
          *of_lse = grad_lse ? pointer<C>(*grad_lse) : nullptr;
  Buffer<C> sums(call.batch() * heads * group * parts);
  run_rows(call, [&] {
    return [&, products = Buffer<C>(tokens_at_once)](
               int64_t number, int64_t b, int64_t head, int64_t first, int64_t count, int64_t i, int64_t place) {
      kernels<T>().row_dots(
          output.at(b, head, first, i), output.token, output.column, grad.at(b, head, first, i), grad.token,
          grad.column, count, head_dim, products.data());
      C sum = 0;
      for (int64_t r = 0; r < count; ++r) {
        int64_t at = place + r * group;
        sum += grad_of_sink<C>(
            of_rows[2 * at], of_rows[2 * at + 1], sinks[head * group + i], products.data()[r], of_lse ? of_lse[at] : 0);
      }
      sums.data()[number] = sum;
    };
  });
  C* to = static_cast<C*>(grad_sinks.mutable_data_ptr());
  for (int64_t sink = 0; sink < heads * group; ++sink) {
    double sum = 0;
    for (int64_t b = 0; b < call.batch(); ++b)
      for (int64_t part = 0; part < parts; ++part) sum += sums.data()[(b * heads * group + sink) * parts + part];
    to[sink] = static_cast<C>(sum);
  }
}

struct Passes {
  static void forward(const SinksCall& call, const Tensor& output, const Tensor& lse, const Tensor& rows) {
    for_dtype(output.scalar_type(), [&](auto* type) {
      cpu::forward<std::remove_pointer_t<decltype(type)>>(call, fresh(output), lse, rows);
    });
  }

  static void backward(
      const SinksCall& call, const Tensor& grad_output, const std::optional<Tensor>& grad_lse,
      const Tensor& grad_sinks) {
    for_dtype(grad_output.scalar_type(), [&](auto* type) {
      cpu::backward<std::remove_pointer_t<decltype(type)>>(call, grad_output, grad_lse, grad_sinks);
    });
  }
};
using Operators = SinksOperators<Passes>;

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CPU, m) {
  m.impl("attention_sinks_forward", TORCH_BOX(&Operators::forward));
  m.impl("attention_sinks_backward", TORCH_BOX(&Operators::backward));
}

}  // namespace ds_sparse::cpu
