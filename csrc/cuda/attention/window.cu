// Attention in windows: the passes of fused attention, on live blocks that a window limits token by token.

#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "../../checks.h"
#include "passes.h"

namespace ds_sparse::attention {
namespace {

WindowLimits window_limits_of(const Tensor& limits, const std::optional<Tensor>& places, int64_t num_global) {
  const auto stride = [](const Tensor& x) { return x.size(0) == 1 ? 0 : x.stride(0); };
  return {
      reinterpret_cast<const Range*>(limits.const_data_ptr<int32_t>()),
      places ? places->const_data_ptr<int32_t>() : nullptr, stride(limits) / 2, places ? stride(*places) : 0,
      static_cast<int>(num_global)};
}

// The call of either pass, checked.
Attention window_call(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& key_bias,
    const Tensor& limits, const std::optional<Tensor>& places, int64_t layout_heads, int64_t block, int64_t tile,
    int64_t num_global, double scale, bool causal, const std::string& implementation) {
  check_attention(query, key, value, {}, {}, {}, {}, 0, layout_heads, block, tile);
  check_window_attention(query, key, key_bias, limits, places, num_global);
  Attention call{query, key, value, layout_heads, block, tile, implementation, scale, causal, key_bias};
  call.window = window_limits_of(limits, places, num_global);
  return call;
}

std::tuple<Tensor, Tensor, Tensor> window_attention_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& key_bias,
    const Tensor& limits, const std::optional<Tensor>& places, const Tensor& row_lines, const Tensor& row_entries,
    const Tensor& row_units, const Tensor& row_cuts, int64_t layout_heads, int64_t block, int64_t tile,
    int64_t num_global, double scale, bool causal, const std::string& implementation) {
  return attention_forward(
      window_call(
          query, key, value, key_bias, limits, places, layout_heads, block, tile, num_global, scale, causal,
          implementation),
      {row_lines, row_entries, row_units, row_cuts});
}

std::tuple<Tensor, Tensor, Tensor> window_attention_backward(
    const Tensor& grad_output, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& output,
    const Tensor& rows, const std::optional<Tensor>& key_bias, const Tensor& limits,
    const std::optional<Tensor>& places, const Tensor& row_lines, const Tensor& row_entries, const Tensor& row_units,
    const Tensor& row_cuts, const Tensor& column_lines, const Tensor& column_entries, const Tensor& column_units,
    const Tensor& column_cuts, int64_t layout_heads, int64_t block, int64_t tile, int64_t num_global, double scale,
    bool causal, bool deterministic, const std::string& implementation) {
  return attention_backward(
      window_call(
          query, key, value, key_bias, limits, places, layout_heads, block, tile, num_global, scale, causal,
          implementation),
      {grad_output, {}, output, rows}, {row_lines, row_entries, row_units, row_cuts},
      {column_lines, column_entries, column_units, column_cuts}, deterministic);
}

}  // namespace
}  // namespace ds_sparse::attention

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CUDA, m) {
  m.impl("window_attention_forward", TORCH_BOX(&ds_sparse::attention::window_attention_forward));
  m.impl("window_attention_backward", TORCH_BOX(&ds_sparse::attention::window_attention_backward));
}
