// Attention of queries that have chosen blocks of keys for themselves: the passes of fused attention on rectangular
// blocks, 16 rows of queries by a block of keys. The heads that see the same keys are rows of a token, next to each
// other, so that a tile of them shares the keys that it loads.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <string>

#include "../../selected.h"
#include "passes.h"
#include "tuning.h"

namespace ds_sparse::attention {
namespace {

// (B, H, T, g, ...) as (B, H, T * g, ...); a copy where that is no view.
Tensor as_rows(const Tensor& x) {
  std::vector<int64_t> sizes{x.size(0), x.size(1), x.size(2) * x.size(3)};
  for (int64_t dim = 4; dim < x.dim(); ++dim) {
    sizes.push_back(x.size(dim));
  }
  return torch::stable::reshape(x, sizes);
}

// And back, in x's order of memory.
Tensor as_tokens(const Tensor& rows, const Tensor& x) {
  const Tensor of_tokens = torch::stable::view(rows, std::vector<int64_t>(x.sizes().begin(), x.sizes().end()));
  Tensor made = empty_in_order_of(x);
  for (int64_t dim = 0; dim < x.dim(); ++dim) {
    if (x.size(dim) > 1 && made.stride(dim) != of_tokens.stride(dim)) {
      return torch::stable::copy_(made, of_tokens);
    }
  }
  return of_tokens;
}

Tensor with_sizes(const Tensor& x, std::initializer_list<int64_t> sizes) {
  return torch::stable::view(x, std::vector<int64_t>(sizes));
}

// The call on rows.
struct RowsCall {
  Tensor query;
  AttentionCall call;

  RowsCall(const SelectedCall& given, int64_t tile, const std::string& implementation)
      : query(as_rows(given.query)), call{query, given.key,      given.value, given.bits_heads, given.block,
                                          tile,  implementation, given.scale, given.causal,     given.key_bias} {
    call.chosen.emplace(ChosenTensors{given.bits, given.query.size(3), given.offsets, given.offset});
    call.bounded = call.fits = true;
    call.by_sequence = given.by_sequence();
    check_attention(query, given.key, given.value, {}, given.key_bias, {}, {}, 0, given.bits_heads, given.block, tile);
  }
};

TileTensors tiles_of(
    const std::optional<Tensor>& lines, const std::optional<Tensor>& entries, const std::optional<Tensor>& units,
    const std::optional<Tensor>& cuts, const char* name) {
  check(
      lines && entries && units && cuts, name, "_lines, ", name, "_entries, ", name, "_units and ", name,
      "_cuts have to be given on a GPU.");
  return {*lines, *entries, *units, *cuts};
}

std::tuple<Tensor, Tensor, Tensor> selected_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& key_bias,
    const Tensor& bits, const std::optional<Tensor>& offsets, int64_t offset, const std::optional<Tensor>& row_lines,
    const std::optional<Tensor>& row_entries, const std::optional<Tensor>& row_units,
    const std::optional<Tensor>& row_cuts, int64_t bits_heads, int64_t block, int64_t tile, double scale, bool causal,
    const std::string& implementation) {
  const SelectedCall given{query, key, value, key_bias, bits, offsets, offset, bits_heads, block, scale, causal};
  given.check_all();
  const TileTensors rows = tiles_of(row_lines, row_entries, row_units, row_cuts, "row");
  const RowsCall of_rows(given, tile, implementation);
  check_row_tiles(of_rows.call, rows);
  auto [output, lse, row_sums] = attention_forward(of_rows.call, rows);
  const int64_t batch = query.size(0), heads = query.size(1), tokens = query.size(2), group = query.size(3);
  return {
      as_tokens(output, query), with_sizes(lse, {batch, heads, tokens, group}),
      with_sizes(row_sums, {batch, heads, tokens, group, 2})};
}

std::tuple<Tensor, Tensor, Tensor> selected_backward(
    const Tensor& grad_output, const std::optional<Tensor>& grad_lse, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& output, const Tensor& rows, const std::optional<Tensor>& key_bias,
    const Tensor& bits, const std::optional<Tensor>& offsets, int64_t offset, const std::optional<Tensor>& row_lines,
    const std::optional<Tensor>& row_entries, const std::optional<Tensor>& row_units,
    const std::optional<Tensor>& row_cuts, const std::optional<Tensor>& column_lines,
    const std::optional<Tensor>& column_entries, const std::optional<Tensor>& column_units,
    const std::optional<Tensor>& column_cuts, int64_t bits_heads, int64_t block, int64_t tile, double scale,
    bool causal, bool deterministic, const std::string& implementation) {
  const SelectedCall given{query, key, value, key_bias, bits, offsets, offset, bits_heads, block, scale, causal};
  given.check_all();
  const TileTensors row_tiles = tiles_of(row_lines, row_entries, row_units, row_cuts, "row");
  const TileTensors column_tiles = tiles_of(column_lines, column_entries, column_units, column_cuts, "column");
  const RowsCall of_rows(given, tile, implementation);
  check_row_tiles(of_rows.call, row_tiles);
  check_column_tiles(of_rows.call, column_tiles);
  const Tensor grads = as_rows(grad_output), outputs = as_rows(output), row_sums = as_rows(rows);
  const std::optional<Tensor> grad_lse_of_rows = grad_lse ? std::optional(as_rows(*grad_lse)) : std::nullopt;
  check_attention_backward(grads, grad_lse_of_rows, of_rows.query, outputs, row_sums);
  auto [grad_query, grad_key, grad_value] = attention_backward(
      of_rows.call, {grads, grad_lse_of_rows, outputs, row_sums}, row_tiles, column_tiles, deterministic);
  return {as_tokens(grad_query, query), grad_key, grad_value};
}

}  // namespace
}  // namespace ds_sparse::attention

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CUDA, m) {
  m.impl("selected_attention_forward", TORCH_BOX(&ds_sparse::attention::selected_forward));
  m.impl("selected_attention_backward", TORCH_BOX(&ds_sparse::attention::selected_backward));
}
