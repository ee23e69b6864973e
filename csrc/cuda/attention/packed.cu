// Attention over documents that are packed in one row, on Hopper: the passes of fused attention on the blocks of all
// documents, whose tokens lie where spans say.

#include <torch/csrc/stable/library.h>

#include "../../checks.h"
#include "passes.h"
#include "tuning.h"

namespace ds_sparse::attention {
namespace {

void check_aligned(
    const Tensor& x, int64_t dim, const Tensor& query, torch::headeronly::ScalarType type,
    const char* name) {
  check_dim(x, dim, name);
  check_contiguous(x, name);
  check(x.scalar_type() == type, std::string(name) + " has another dtype than the schema says.");
  check(x.device() == query.device(), std::string(name) + " has to be on the device of the other arguments.");
}

AttentionCall call_of(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& exists, const Tensor& spans,
    const std::optional<Tensor>& dropout_seed, int64_t layout_heads, int64_t block, double scale, bool causal,
    double dropout_p) {
  check_attention(query, key, value, {}, {}, {}, dropout_seed, dropout_p, layout_heads, block, kHopperBlockM);
  check_size(query, 0, 1, "query");
  check_size(key, 2, query.size(2), "key");
  check_aligned(spans, 2, query, torch::headeronly::ScalarType::Int, "spans");
  check_size(spans, 1, 2, "spans");
  check(
      reinterpret_cast<uintptr_t>(spans.const_data_ptr()) % 8 == 0,
      "spans has to begin at a multiple of 8 bytes; make a copy.");
  check(
      spans.size(0) > 0 && spans.size(0) < (int64_t{1} << 31) / block,
      "spans has to have 1 block or more, and fewer than 2**31 tokens in them.");
  check_aligned(exists, 2, query, torch::headeronly::ScalarType::Bool, "exists");
  check_size(exists, 0, 1, "exists");
  check_size(exists, 1, spans.size(0) * block, "exists");
  AttentionCall call{query, key, value, layout_heads, block, kHopperBlockM, "hopper", scale, causal, exists};
  call.dropout_seed = dropout_seed;
  call.dropout_p = dropout_p;
  call.spans = &spans;
  return call;
}

std::tuple<Tensor, Tensor, Tensor> packed_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& exists, const Tensor& spans,
    const std::optional<Tensor>& dropout_seed, const Tensor& row_lines, const Tensor& row_entries,
    const Tensor& row_units, const Tensor& row_cuts, int64_t layout_heads, int64_t block, double scale, bool causal,
    double dropout_p) {
  const AttentionCall call =
      call_of(query, key, value, exists, spans, dropout_seed, layout_heads, block, scale, causal, dropout_p);
  const TileTensors tiles{row_lines, row_entries, row_units, row_cuts};
  check_row_tiles(call, tiles);
  return attention_forward(call, tiles);
}

std::tuple<Tensor, Tensor, Tensor> packed_backward(
    const Tensor& grad_output, const std::optional<Tensor>& grad_lse, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& output, const Tensor& rows, const Tensor& exists, const Tensor& spans,
    const std::optional<Tensor>& dropout_seed, const Tensor& row_lines, const Tensor& row_entries,
    const Tensor& row_units, const Tensor& row_cuts, const Tensor& column_lines, const Tensor& column_entries,
    const Tensor& column_units, const Tensor& column_cuts, int64_t layout_heads, int64_t block, double scale,
    bool causal, double dropout_p, bool deterministic) {
  const AttentionCall call =
      call_of(query, key, value, exists, spans, dropout_seed, layout_heads, block, scale, causal, dropout_p);
  const TileTensors row_tiles{row_lines, row_entries, row_units, row_cuts},
      column_tiles{column_lines, column_entries, column_units, column_cuts};
  check_attention_backward(grad_output, grad_lse, query, output, rows, call.queries());
  check_row_tiles(call, row_tiles);
  check_column_tiles(call, column_tiles);
  return attention_backward(call, {grad_output, grad_lse, output, rows}, row_tiles, column_tiles, deterministic);
}

}  // namespace
}  // namespace ds_sparse::attention

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CUDA, m) {
  m.impl("packed_attention_forward", TORCH_BOX(&ds_sparse::attention::packed_forward));
  m.impl("packed_attention_backward", TORCH_BOX(&ds_sparse::attention::packed_backward));
}
