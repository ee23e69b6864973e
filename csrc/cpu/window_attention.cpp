// window_attention_forward and window_attention_backward on the CPU; schemas and letters in ../library.cpp. The passes
// are those of attention on a layout.

#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>

#include "attention_passes.h"

namespace ds_sparse::cpu {

namespace {

Attention window_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& key_bias,
    const Tensor& limits, const std::optional<Tensor>& places, int64_t block, int64_t num_global, double scale,
    bool causal) {
  Attention attention(query, key, value, {&key_bias}, block, scale, causal);
  attention.limits = &limits;
  attention.places = places ? &*places : nullptr;
  attention.num_global = num_global;
  return attention;
}

std::tuple<Tensor, Tensor, Tensor> window_attention_forward(
    Tensor query, Tensor key, Tensor value, std::optional<Tensor> key_bias, Tensor limits, std::optional<Tensor> places,
    Tensor row_lines, Tensor row_entries, Tensor row_units, Tensor row_cuts, int64_t layout_heads, int64_t block,
    int64_t tile, int64_t num_global, double scale, bool causal, std::string implementation) {
  check_implementation(implementation, "cpu");
  check_attention(query, key, value, {}, {}, {}, {}, 0, layout_heads, block, tile);
  check_window_attention(query, key, key_bias, limits, places, num_global);
  check_tiles(row_lines, row_entries, row_units, row_cuts, query.size(2), query, layout_heads, block, tile);
  auto attention = window_attention(query, key, value, key_bias, limits, places, block, num_global, scale, causal);
  return attention_forward(
      attention, lists_by_block_row(
                     row_lines, row_entries, row_units, layout_heads, attention.rows, attention.columns, block, tile));
}

std::tuple<Tensor, Tensor, Tensor> window_attention_backward(
    Tensor grad_output, Tensor query, Tensor key, Tensor value, Tensor output, Tensor rows,
    std::optional<Tensor> key_bias, Tensor limits, std::optional<Tensor> places, Tensor row_lines, Tensor row_entries,
    Tensor row_units, Tensor row_cuts, Tensor column_lines, Tensor column_entries, Tensor column_units,
    Tensor column_cuts, int64_t layout_heads, int64_t block, int64_t tile, int64_t num_global, double scale,
    bool causal, bool /*deterministic: always*/, std::string implementation) {
  check_implementation(implementation, "cpu");
  check_attention(query, key, value, {}, {}, {}, {}, 0, layout_heads, block, tile);
  check_attention_backward(grad_output, {}, query, output, rows);
  check_window_attention(query, key, key_bias, limits, places, num_global);
  check_tiles(row_lines, row_entries, row_units, row_cuts, query.size(2), query, layout_heads, block, tile);
  check_tiles(column_lines, column_entries, column_units, column_cuts, key.size(2), query, layout_heads, block, tile);
  auto attention = window_attention(query, key, value, key_bias, limits, places, block, num_global, scale, causal);
  return attention_backward(
      attention, {grad_output, output, rows, {}},
      lists_by_block_row(
          column_lines, column_entries, column_units, layout_heads, attention.columns, attention.rows, block, tile));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CPU, m) {
  m.impl("window_attention_forward", TORCH_BOX(&window_attention_forward));
  m.impl("window_attention_backward", TORCH_BOX(&window_attention_backward));
}

}  // namespace ds_sparse::cpu
