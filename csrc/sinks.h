// attention_sinks_forward and attention_sinks_backward: their arguments and checks, once for all devices.
#pragma once

#include <cmath>
#include <limits>
#include <optional>
#include <tuple>

#include "checks.h"
#include "tensors.h"

namespace ds_sparse {

// Rows of output, (B, H, T, D), those of a head with one sink; or (B, H, T, g, D), where each of a token's g rows is a
// head. rows: their maxima and sums.
struct SinksCall {
  const Tensor &output, &rows, &sinks;

  int64_t batch() const { return output.size(0); }
  int64_t heads() const { return output.size(1); }
  int64_t tokens() const { return output.size(2); }
  int64_t rows_of_token() const { return output.dim() == 5 ? output.size(3) : 1; }
  int64_t rows_of_head() const { return tokens() * rows_of_token(); }
  int64_t head_dim() const { return output.size(output.dim() - 1); }

  void check_all() const {
    const int64_t dims = output.dim() == 5 ? 5 : 4;
    check_dim(output, dims, "output");
    check(
        output.stride(dims - 1) == 1 || head_dim() <= 1 || output.numel() == 0,
        "output has to have the numbers of a token adjacent in memory.");
    const int64_t group = rows_of_token();
    check(
        dims == 4 || (group > 0 && group <= 16 && (group & (group - 1)) == 0),
        "output has to have 1, 2, 4, 8 or 16 rows a token, got ", group, ".");
    check_statistics(rows, dims, "rows");
    check_size(rows, dims - 1, 2, "rows");
    check_dim(sinks, dims - 3, "sinks");
    check_size(sinks, 0, heads(), "sinks");
    if (dims == 5) check_size(sinks, 1, group, "sinks");
    check_wide(sinks, "sinks");
  }

  void check_gradients(const Tensor& grad_output, const std::optional<Tensor>& grad_lse) const {
    check_dim(grad_output, output.dim(), "grad_output");
    check_like(grad_output, output, "grad_output");
    for (int64_t dim = 0; dim < output.dim(); ++dim) check_size(grad_output, dim, output.size(dim), "grad_output");
    if (grad_lse) check_statistics(*grad_lse, output.dim() - 1, "grad_lse");
  }

 private:
  void check_wide(const Tensor& x, const char* name) const {
    check(x.scalar_type() == lse_type(output), name, " has to be fp32, or fp64 for fp64.");
    check(x.device() == output.device(), name, " has to be on the device of the other arguments.");
    check_contiguous(x, name);
  }

  // Numbers of all rows.
  void check_statistics(const Tensor& x, int64_t dims, const char* name) const {
    check_dim(x, dims, name);
    for (int64_t dim = 0; dim < output.dim() - 1; ++dim) check_size(x, dim, output.size(dim), name);
    check_wide(x, name);
  }
};

// Passes: a device's, forward(call, output, lse, rows) and backward(call, grad_output, grad_lse, grad_sinks), static
// functions that write into their last tensors.
template <class Passes>
struct SinksOperators {
  static std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& output, const Tensor& rows, const Tensor& sinks) {
    const SinksCall call{output, rows, sinks};
    call.check_all();
    Tensor made = empty_in_order_of(output), new_rows = empty_on(rows, rows.sizes()),
           lse = empty_on(rows, {rows.sizes().data(), static_cast<size_t>(rows.dim() - 1)});
    Passes::forward(call, made, lse, new_rows);
    return {made, lse, new_rows};
  }

  static Tensor backward(
      const Tensor& grad_output, const std::optional<Tensor>& grad_lse, const Tensor& output, const Tensor& rows,
      const Tensor& sinks) {
    const SinksCall call{output, rows, sinks};
    call.check_all();
    call.check_gradients(grad_output, grad_lse);
    Tensor grad = empty_on(sinks, sinks.sizes());
    Passes::backward(call, grad_output, grad_lse, grad);
    return grad;
  }
};

#ifdef __CUDACC__
#define DS_SPARSE_ON_DEVICE __host__ __device__
#else
#define DS_SPARSE_ON_DEVICE
#endif

// A row with a sink: what its output is multiplied by, and its new lse, maximum and sum. One without keys has a share
// and a sum of 0. What is not a number in the sum, or in the sink, stays so in all but the maximum.
template <class C>
struct RowWithSink {
  C share, lse, row_max, row_sum;

  DS_SPARSE_ON_DEVICE RowWithSink(C max, C sum, C sink) {
    constexpr C infinity = std::numeric_limits<C>::infinity();
    const bool empty = sum == 0;
    row_max = empty || max < sink ? sink : max;
    if (row_max == -infinity) row_max = 0;
    const C of_keys = empty ? C(0) : sum * std::exp(max - row_max), total = of_keys + std::exp(sink - row_max);
    share = empty ? C(0) : of_keys / total;
    lse = row_max + std::log(total);
    row_sum = empty ? C(0) : total;
  }
};

// A row's part of the gradient of its sink, a logit whose value is 0. max, sum: with the sink. product: that of the
// output and its gradient.
template <class C>
DS_SPARSE_ON_DEVICE C grad_of_sink(C max, C sum, C sink, C product, C grad_lse) {
  constexpr C infinity = std::numeric_limits<C>::infinity();
  const C alone = sink > -infinity ? C(1) : C(0);  // of a row without keys
  const C probability = sum > 0 ? std::exp(sink - max) / sum : alone;
  return probability * (sum == 0 ? grad_lse : grad_lse - product);
}

}  // namespace ds_sparse
