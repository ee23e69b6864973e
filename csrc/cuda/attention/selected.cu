// Attention of queries that have chosen blocks of keys for themselves: the passes of fused attention on rectangular
// blocks, 16 rows of queries by a block of keys. The heads that see the same keys are rows of a token, next to each
// other, so that a tile of them shares the keys that it loads.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "../../selected.h"
#include "gathered_rows.h"
#include "passes.h"

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

// A call whose heads choose alone, on rows that are gathered by block.
class GatheredCall {
 public:
  // call: what is given, which has been checked.
  GatheredCall(const SelectedCall& given, const AttentionCall& call, int64_t most)
      : given_(given), call_(call), query_(squeezed(given.query, 3)), launch_(given.query) {
    check(
        given.rows_of_token() == 1 && given.block >= kLeastUnit && !given.offsets && given.offset == 0,
        "tiles have to be given for ", given.rows_of_token(), " rows a token, blocks of ", given.block,
        ", or queries that do not begin at position 0.");
    check(most > 0, "most has to be 1 or more, got ", most, ".");
    all_ = {chosen_blocks_of(call),         static_cast<int>(given.tokens()),
            static_cast<int>(given.keys()), static_cast<int>(std::min<int64_t>(given.block, kHopperBlockM)),
            static_cast<int>(most),         given.causal};
  }

  std::tuple<Tensor, Tensor, Tensor> forward() const {
    const int64_t batch = given_.batch(), heads = given_.heads(), tokens = given_.tokens();
    Tensor output = empty_in_order_of(query_), lse = empty_on(query_, {batch, heads, tokens}, ScalarType::Float);
    Tensor row_sums = empty_on(query_, {batch, heads, tokens, 2}, ScalarType::Float);
    for (const GatheredHeads& part : heads_to_gather(all_, query_, given_.key.size(1))) {
      const GatheredRows rows = gather_chosen(launch_, all_, part, query_, call_.tile, false);
      const Operands x(*this, rows.lists);
      const auto [of_rows, of_lse, sums] = attention_forward(call_on(x, rows.lists), tiles_in(rows.row_tiles));
      combine_rows(launch_, rows.lists, of_rows, sums, output, lse, row_sums);
    }
    return {unsqueezed(output, 3), unsqueezed(lse, 3), unsqueezed(row_sums, 3)};
  }

  std::tuple<Tensor, Tensor, Tensor> backward(
      const Tensor& grad_output, const std::optional<Tensor>& grad_lse, const Tensor& output, const Tensor& rows,
      bool deterministic) const {
    const Tensor grads = squeezed(grad_output, 3);
    check_alignment(grad_output, "grad_output");
    check_alignment(output, "output");
    const RowsOfBackward stats =
        make_row_stats(launch_, grads, grad_lse, squeezed(output, 3), rows, BlockSpans{nullptr, log2_of(all_.unit)});
    Tensor grad_query = empty_in_order_of(query_), grad_key, grad_value;
    const std::vector<GatheredHeads> parts = heads_to_gather(all_, query_, given_.key.size(1));
    if (parts.size() > 1) {
      grad_key = empty_in_order_of(given_.key);
      grad_value = empty_in_order_of(given_.value);
    }
    for (const GatheredHeads& part : parts) {
      const GatheredRows made = gather_chosen(launch_, all_, part, query_, call_.tile, true);
      const Operands x(*this, made.lists);
      const Tensor of_output = gather_rows(launch_, made.lists, grads);
      const auto stats_of_rows = [&](const RowsWanted& wanted) {
        return gather_row_stats(launch_, made.lists, stats, given_.heads(), given_.head_dim(), wanted);
      };
      auto [of_query, of_key, of_value] = attention_gradients(
          call_on(x, made.lists), of_output, stats_of_rows, tiles_in(made.row_tiles), tiles_in(made.column_tiles),
          deterministic);
      add_rows(launch_, made.lists, of_query, grad_query);
      if (parts.size() == 1) {
        grad_key = of_key;
        grad_value = of_value;
      } else {
        Tensor some_keys = keys_of(grad_key, part), some_values = keys_of(grad_value, part);
        torch::stable::copy_(some_keys, of_key);
        torch::stable::copy_(some_values, of_value);
      }
    }
    return {unsqueezed(grad_query, 3), grad_key, grad_value};
  }

 private:
  static constexpr int64_t kLeastUnit = 64;

  // Rows of queries, and the keys and values of their heads.
  struct Operands {
    Tensor query, key, value;
    std::optional<Tensor> key_bias;

    Operands(const GatheredCall& call, const GatheredLists& lists)
        : query(gather_rows(call.launch_, lists, call.query_)),
          key(call.keys_of(call.given_.key, lists.of)),
          value(call.keys_of(call.given_.value, lists.of)),
          key_bias(call.given_.key_bias) {
      if (key_bias && key_bias->size(0) > 1) {
        key_bias = torch::stable::narrow(*key_bias, 0, lists.of.first_batch, lists.of.batches);
      }
    }
  };

  static TileTensors tiles_in(const std::vector<Tensor>& tiles) { return {tiles[0], tiles[1], tiles[2], tiles[3]}; }

  AttentionCall call_on(const Operands& x, const GatheredLists& lists) const {
    AttentionCall call{
        x.query,
        x.key,
        x.value,
        lists.of.heads / lists.heads_of_list,
        all_.unit,
        call_.tile,
        call_.implementation,
        given_.scale,
        given_.causal,
        x.key_bias};
    call.bounded = call.fits = true;
    call.by_sequence = lists.lists_of_sequence > 0;
    return call;
  }

  Tensor keys_of(const Tensor& x, const GatheredHeads& heads) const {
    const int64_t group = given_.heads() / x.size(1);
    if (heads.batches == x.size(0) && heads.heads == given_.heads()) return x;
    Tensor all = x;
    Tensor sequences = torch::stable::narrow(all, 0, heads.first_batch, heads.batches);
    return torch::stable::narrow(sequences, 1, heads.first_head / group, heads.heads / group);
  }

  const SelectedCall& given_;
  const AttentionCall& call_;
  Tensor query_;
  Launcher launch_;
  ChosenToGather all_;
};

std::tuple<Tensor, Tensor, Tensor> selected_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& key_bias,
    const Tensor& bits, const std::optional<Tensor>& offsets, int64_t offset, const std::optional<Tensor>& row_lines,
    const std::optional<Tensor>& row_entries, const std::optional<Tensor>& row_units,
    const std::optional<Tensor>& row_cuts, int64_t bits_heads, int64_t most, int64_t block, int64_t tile, double scale,
    bool causal, const std::string& implementation) {
  const SelectedCall given{query, key, value, key_bias, bits, offsets, offset, bits_heads, block, scale, causal};
  const AttentionCall call = call_of(given, tile, implementation);
  if (!row_lines && query.numel() > 0) {
    return GatheredCall(given, call, most).forward();
  }
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
    const std::optional<Tensor>& column_cuts, int64_t bits_heads, int64_t most, int64_t block, int64_t tile,
    double scale, bool causal, bool deterministic, const std::string& implementation) {
  const SelectedCall given{query, key, value, key_bias, bits, offsets, offset, bits_heads, block, scale, causal};
  const AttentionCall call = call_of(given, tile, implementation);
  given.check_results(grad_output, grad_lse, output, rows);
  if (!row_lines && query.numel() > 0) {
    return GatheredCall(given, call, most).backward(grad_output, grad_lse, output, rows, deterministic);
  }
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
