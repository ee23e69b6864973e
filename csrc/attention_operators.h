// The operators of attention: their parameters, as library.cpp has them, and their checks, once for all devices.
#pragma once

#include <cfloat>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "attention_call.h"

namespace ds_sparse {

// Passes: a device's, forward(call, rows), backward(call, results, rows, columns, deterministic) and
// bias_backward(call, results, rows, shape), static functions.
template <class Passes>
struct AttentionOperators {
  using Three = std::tuple<Tensor, Tensor, Tensor>;

  static Three block_forward(
      const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& rpe,
      const std::optional<Tensor>& key_bias, const std::optional<Tensor>& attn_mask,
      const std::optional<Tensor>& dropout_seed, const Tensor& row_lines, const Tensor& row_entries,
      const Tensor& row_units, const Tensor& row_cuts, int64_t layout_heads, int64_t block, int64_t tile, double scale,
      bool causal, double dropout_p, const std::string& implementation, bool bounded, bool by_sequence,
      bool rows_differ, double softcap) {
    AttentionCall call{query,  key,      value, layout_heads, block,        tile,      implementation, scale,
                       causal, key_bias, rpe,   attn_mask,    dropout_seed, dropout_p, softcap};
    call.bounded = bounded;
    call.by_sequence = by_sequence;
    call.rows_differ = rows_differ;
    return forward(call, {row_lines, row_entries, row_units, row_cuts});
  }

  static Three block_backward(
      const Tensor& grad_output, const std::optional<Tensor>& grad_lse, const Tensor& query, const Tensor& key,
      const Tensor& value, const Tensor& output, const Tensor& rows, const std::optional<Tensor>& rpe,
      const std::optional<Tensor>& key_bias, const std::optional<Tensor>& attn_mask,
      const std::optional<Tensor>& dropout_seed, const Tensor& row_lines, const Tensor& row_entries,
      const Tensor& row_units, const Tensor& row_cuts, const Tensor& column_lines, const Tensor& column_entries,
      const Tensor& column_units, const Tensor& column_cuts, int64_t layout_heads, int64_t block, int64_t tile,
      double scale, bool causal, double dropout_p, bool deterministic, const std::string& implementation, bool bounded,
      bool by_sequence, double softcap) {
    AttentionCall call{query,  key,      value, layout_heads, block,        tile,      implementation, scale,
                       causal, key_bias, rpe,   attn_mask,    dropout_seed, dropout_p, softcap};
    call.bounded = bounded;
    call.by_sequence = by_sequence;
    return backward(
        call, {grad_output, grad_lse, output, rows}, {row_lines, row_entries, row_units, row_cuts},
        {column_lines, column_entries, column_units, column_cuts}, deterministic);
  }

  static Tensor block_bias_backward(
      const Tensor& grad_output, const std::optional<Tensor>& grad_lse, const Tensor& query, const Tensor& key,
      const Tensor& value, const Tensor& output, const Tensor& rows, const std::optional<Tensor>& rpe,
      const std::optional<Tensor>& key_bias, const std::optional<Tensor>& attn_mask,
      const std::optional<Tensor>& dropout_seed, const Tensor& row_lines, const Tensor& row_entries,
      const Tensor& row_units, const Tensor& row_cuts, int64_t layout_heads, int64_t block, int64_t tile, double scale,
      bool causal, double dropout_p, const std::vector<int64_t>& shape, bool bounded, bool by_sequence) {
    // There is one implementation for each device.
    AttentionCall call{query, key,    value,    layout_heads, block,     tile,         "",
                       scale, causal, key_bias, rpe,          attn_mask, dropout_seed, dropout_p};
    call.bounded = bounded;
    call.by_sequence = by_sequence;
    const AttentionResults results{grad_output, grad_lse, output, rows};
    const TileTensors tiles{row_lines, row_entries, row_units, row_cuts};
    check_call(call);
    check_attention_backward(grad_output, grad_lse, query, output, rows);
    check_row_tiles(call, tiles);
    check_attention_bias_shape(shape, query, key);
    return Passes::bias_backward(call, results, tiles, shape);
  }

  static Three window_forward(
      const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& key_bias,
      const Tensor& limits, const std::optional<Tensor>& places, const Tensor& row_lines, const Tensor& row_entries,
      const Tensor& row_units, const Tensor& row_cuts, int64_t layout_heads, int64_t block, int64_t tile,
      int64_t num_global, double scale, bool causal, const std::string& implementation, bool bounded, double softcap) {
    AttentionCall call{query, key, value, layout_heads, block, tile, implementation, scale, causal, key_bias};
    call.window.emplace(WindowTensors{limits, places, num_global});
    call.softcap = softcap;
    call.bounded = bounded;
    return forward(call, {row_lines, row_entries, row_units, row_cuts});
  }

  static Three window_backward(
      const Tensor& grad_output, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& output,
      const Tensor& rows, const std::optional<Tensor>& key_bias, const Tensor& limits,
      const std::optional<Tensor>& places, const Tensor& row_lines, const Tensor& row_entries, const Tensor& row_units,
      const Tensor& row_cuts, const Tensor& column_lines, const Tensor& column_entries, const Tensor& column_units,
      const Tensor& column_cuts, int64_t layout_heads, int64_t block, int64_t tile, int64_t num_global, double scale,
      bool causal, bool deterministic, const std::string& implementation, bool bounded, double softcap) {
    AttentionCall call{query, key, value, layout_heads, block, tile, implementation, scale, causal, key_bias};
    call.window.emplace(WindowTensors{limits, places, num_global});
    call.softcap = softcap;
    call.bounded = bounded;
    return backward(
        call, {grad_output, std::nullopt, output, rows}, {row_lines, row_entries, row_units, row_cuts},
        {column_lines, column_entries, column_units, column_cuts}, deterministic);
  }

 private:
  static Three forward(const AttentionCall& call, const TileTensors& rows) {
    check_call(call);
    check_row_tiles(call, rows);
    return Passes::forward(call, rows);
  }

  static Three backward(
      const AttentionCall& call, const AttentionResults& results, const TileTensors& rows, const TileTensors& columns,
      bool deterministic) {
    check_call(call);
    check_attention_backward(results.grad_output, results.grad_lse, call.query, results.output, results.rows);
    check_row_tiles(call, rows);
    check_column_tiles(call, columns);
    return Passes::backward(call, results, rows, columns, deterministic);
  }

  static void check_call(const AttentionCall& call) {
    const double softcap = call.softcap;
    check(
        softcap == 0 || (softcap >= FLT_MIN && softcap <= FLT_MAX),
        "softcap has to be 0 or a number above it that fp32 holds, got ", softcap, ".");
    // key_bias beside it has 0 and -inf alone, as Python makes it from bools.
    check(
        softcap == 0 || (!call.rpe && (!call.attn_mask || call.attn_mask->scalar_type() == ScalarType::Bool)),
        "softcap is ", softcap, "; beside it there may be bool masks alone.");
    if (!call.window) {
      check_attention(
          call.query, call.key, call.value, call.rpe, call.key_bias, call.attn_mask, call.dropout_seed, call.dropout_p,
          call.layout_heads, call.block, call.tile);
      return;
    }
    check_attention(call.query, call.key, call.value, {}, {}, {}, {}, 0, call.layout_heads, call.block, call.tile);
    check_window_attention(
        call.query, call.key, call.key_bias, call.window->limits, call.window->places, call.window->num_global);
  }
};

}  // namespace ds_sparse
