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

AttentionCall call_of(const SelectedCall& given, int64_t tile, const std::string& implementation) {
  given.check_all(tile);
  AttentionCall call{given.query, given.key,      given.value, given.bits_heads, given.block,
                     tile,        implementation, given.scale, given.causal,     given.key_bias};
  call.chosen.emplace(ChosenTensors{given.bits, given.rows_of_token(), given.offsets, given.offset});
  call.bounded = call.fits = true;
  call.by_sequence = given.by_sequence();
  return call;
}

// Numbers of rows as those of the rows of tokens.
Tensor of_tokens(const Tensor& x, const SelectedCall& given) {
  std::vector<int64_t> sizes{given.batch(), given.heads(), given.tokens(), given.rows_of_token()};
  sizes.insert(sizes.end(), x.sizes().begin() + 3, x.sizes().end());
  return torch::stable::view(x, sizes);
}

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
  const AttentionCall call = call_of(given, tile, implementation);
  const TileTensors rows = tiles_of(row_lines, row_entries, row_units, row_cuts, "row");
  check_row_tiles(call, rows);
  auto [output, lse, row_sums] = attention_forward(call, rows);
  return {output, of_tokens(lse, given), of_tokens(row_sums, given)};
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
  const AttentionCall call = call_of(given, tile, implementation);
  given.check_results(grad_output, grad_lse, output, rows);
  const TileTensors row_tiles = tiles_of(row_lines, row_entries, row_units, row_cuts, "row");
  const TileTensors column_tiles = tiles_of(column_lines, column_entries, column_units, column_cuts, "column");
  check_row_tiles(call, row_tiles);
  check_column_tiles(call, column_tiles);
  return attention_backward(call, {grad_output, grad_lse, output, rows}, row_tiles, column_tiles, deterministic);
}

}  // namespace
}  // namespace ds_sparse::attention

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CUDA, m) {
  m.impl("selected_attention_forward", TORCH_BOX(&ds_sparse::attention::selected_forward));
  m.impl("selected_attention_backward", TORCH_BOX(&ds_sparse::attention::selected_backward));
}
