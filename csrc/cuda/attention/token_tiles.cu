// Attention over token pairs, on Hopper: the passes of fused attention on the blocks of 64 tokens that hold pairs,
// which bits name one by one.

#include <torch/csrc/stable/library.h>

#include "../../checks.h"
#include "passes.h"
#include "tile_lists.h"

namespace ds_sparse::attention {
namespace {

constexpr int64_t kBlock = 64;

// The pairs of a side's tiles, as the copy engine reads them.
void check_pairs(
    const Tensor& pairs, const Tensor& entries, const Tensor& query, int64_t layout_heads, const char* name) {
  check_dim(pairs, 4, name);
  check(
      pairs.size(0) == 1 || (layout_heads == 1 && pairs.size(0) == query.size(1)), name,
      " has to be of one head, or of all that share a layout.");
  check_size(pairs, 1, entries.size(0), name);
  check_size(pairs, 2, kHopperBlockM, name);
  check_size(pairs, 3, 2, name);
  check(pairs.scalar_type() == torch::headeronly::ScalarType::Int, name, " has to be int32.");
  check(pairs.device() == entries.device(), name, " has to be on the device of the other arguments.");
  check_contiguous(pairs, name);
  check(
      reinterpret_cast<uintptr_t>(pairs.const_data_ptr()) % 16 == 0, name,
      " has to begin at a multiple of 16 bytes; make a copy.");
}

AttentionCall call_of(const Tensor& query, const Tensor& key, const Tensor& value, int64_t layout_heads, double scale) {
  check_attention(query, key, value, {}, {}, {}, {}, 0, layout_heads, kBlock, kHopperBlockM);
  return {query, key, value, layout_heads, kBlock, kHopperBlockM, "hopper", scale, false, {}};
}

std::tuple<Tensor, Tensor, Tensor> token_tiles_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& row_lines, const Tensor& row_entries,
    const Tensor& row_units, const Tensor& row_cuts, const Tensor& row_pairs, int64_t layout_heads, double scale) {
  check_pairs(row_pairs, row_entries, query, layout_heads, "row_pairs");
  const AttentionCall call = call_of(query, key, value, layout_heads, scale);
  const TileTensors tiles{row_lines, row_entries, row_units, row_cuts, &row_pairs};
  check_row_tiles(call, tiles);
  return attention_forward(call, tiles);
}

std::tuple<Tensor, Tensor, Tensor> token_tiles_backward(
    const Tensor& grad_output, const std::optional<Tensor>& grad_lse, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& output, const Tensor& rows, const Tensor& row_lines, const Tensor& row_entries,
    const Tensor& row_units, const Tensor& row_cuts, const Tensor& row_pairs, const Tensor& column_lines,
    const Tensor& column_entries, const Tensor& column_units, const Tensor& column_cuts, const Tensor& column_pairs,
    int64_t layout_heads, double scale, bool deterministic) {
  check_pairs(row_pairs, row_entries, query, layout_heads, "row_pairs");
  check_pairs(column_pairs, column_entries, query, layout_heads, "column_pairs");
  const AttentionCall call = call_of(query, key, value, layout_heads, scale);
  const TileTensors row_tiles{row_lines, row_entries, row_units, row_cuts, &row_pairs},
      column_tiles{column_lines, column_entries, column_units, column_cuts, &column_pairs};
  check_attention_backward(grad_output, grad_lse, query, output, rows);
  check_row_tiles(call, row_tiles);
  check_column_tiles(call, column_tiles);
  return attention_backward(call, {grad_output, grad_lse, output, rows}, row_tiles, column_tiles, deterministic);
}

}  // namespace
}  // namespace ds_sparse::attention

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CUDA, m) {
  m.impl("token_tiles_forward", TORCH_BOX(&ds_sparse::attention::token_tiles_forward));
  m.impl("token_tiles_backward", TORCH_BOX(&ds_sparse::attention::token_tiles_backward));
}
