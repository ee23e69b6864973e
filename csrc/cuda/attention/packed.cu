// Attention over documents that are packed in one row, on Hopper: the passes of fused attention on the blocks of all
// documents, whose tokens lie where spans say.

#include <torch/csrc/stable/library.h>

#include <string>

#include "../../checks.h"
#include "passes.h"
#include "scoring.h"
#include "tuning.h"

namespace ds_sparse::attention {
namespace {

void check_spans(const Tensor& spans, const Tensor& query, const char* name) {
  check_rows(spans, 2, query, name);
  check(
      reinterpret_cast<uintptr_t>(spans.const_data_ptr()) % 8 == 0, name,
      " has to begin at a multiple of 8 bytes; make a copy.");
}

// Checks the spans of block rows and entries of tiles.
void check_spans_of(const TileTensors& tiles, const Tensor& query, const char* name) {
  check_spans(*tiles.spans, query, name);
  check_size(*tiles.spans, 0, tiles.lines.size(0) + tiles.entries.size(0), name);
}

AttentionCall call_of(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& spans, int64_t layout_heads,
    int64_t block, double scale, bool causal, bool bounded, bool fits) {
  check_attention(query, key, value, {}, {}, {}, {}, 0, layout_heads, block, kHopperBlockM);
  check_size(query, 0, 1, "query");
  check_size(key, 2, query.size(2), "key");
  check_spans(spans, query, "spans");
  check(
      spans.size(0) > 0 && spans.size(0) < (int64_t{1} << 31) / block,
      "spans has to have 1 block or more, and fewer than 2**31 tokens in them.");
  check(scale > kLeastPlainScale, "scale has to be above 1e-6 for packed documents, which this kernel reads in place.");
  AttentionCall call{query, key, value, layout_heads, block, kHopperBlockM, "hopper", scale, causal, {}};
  call.spans = &spans;
  call.bounded = bounded;
  call.fits = fits;
  return call;
}

std::tuple<Tensor, Tensor, Tensor> packed_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& spans, const Tensor& row_spans,
    const Tensor& row_lines, const Tensor& row_entries, const Tensor& row_units, const Tensor& row_cuts,
    int64_t layout_heads, int64_t block, double scale, bool causal, bool bounded, bool fits) {
  const AttentionCall call = call_of(query, key, value, spans, layout_heads, block, scale, causal, bounded, fits);
  const TileTensors tiles{row_lines, row_entries, row_units, row_cuts, nullptr, &row_spans};
  check_row_tiles(call, tiles);
  check_spans_of(tiles, query, "row_spans");
  return attention_forward(call, tiles);
}

std::tuple<Tensor, Tensor, Tensor> packed_backward(
    const Tensor& grad_output, const std::optional<Tensor>& grad_lse, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& output, const Tensor& rows, const Tensor& spans, const Tensor& row_spans,
    const Tensor& column_spans, const Tensor& row_lines, const Tensor& row_entries, const Tensor& row_units,
    const Tensor& row_cuts, const Tensor& column_lines, const Tensor& column_entries, const Tensor& column_units,
    const Tensor& column_cuts, int64_t layout_heads, int64_t block, double scale, bool causal, bool deterministic,
    bool bounded, bool fits) {
  const AttentionCall call = call_of(query, key, value, spans, layout_heads, block, scale, causal, bounded, fits);
  const TileTensors row_tiles{row_lines, row_entries, row_units, row_cuts, nullptr, &row_spans},
      column_tiles{column_lines, column_entries, column_units, column_cuts, nullptr, &column_spans};
  check_attention_backward(grad_output, grad_lse, query, output, rows, call.queries());
  check_row_tiles(call, row_tiles);
  check_column_tiles(call, column_tiles);
  check_spans_of(row_tiles, query, "row_spans");
  check_spans_of(column_tiles, query, "column_spans");
  return attention_backward(call, {grad_output, grad_lse, output, rows}, row_tiles, column_tiles, deterministic);
}

}  // namespace
}  // namespace ds_sparse::attention

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CUDA, m) {
  m.impl("packed_attention_forward", TORCH_BOX(&ds_sparse::attention::packed_forward));
  m.impl("packed_attention_backward", TORCH_BOX(&ds_sparse::attention::packed_backward));
}
