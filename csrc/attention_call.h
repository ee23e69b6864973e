// A call of attention, as its operators hand it to a device's passes.
#pragma once

#include <optional>
#include <string>

#include "checks.h"

namespace ds_sparse {

// Limits of live blocks token by token, in a window.
struct WindowTensors {
  const Tensor& limits;
  const std::optional<Tensor>& places;
  int64_t num_global;
};

// Blocks of keys that queries have chosen for themselves, rows_of_token rows of them a token; library.cpp.
struct ChosenTensors {
  const Tensor& bits;
  int64_t rows_of_token;
  const std::optional<Tensor>& offsets;
  int64_t offset;
};

// Tokens of a block row whose queries have chosen: rows of a warp's tile.
constexpr int64_t kChosenRowBlock = 16;

// Schemas and shapes: library.cpp. chosen: query, and what is like it, is (B, H, T, rows of a token, D).
struct AttentionCall {
  const Tensor &query, &key, &value;
  int64_t layout_heads, block, tile;
  std::string implementation;
  double scale;
  bool causal;
  std::optional<Tensor> key_bias, rpe = {}, attn_mask = {}, dropout_seed = {};
  double dropout_p = 0;
  double softcap = 0;  // scaled scores are softcap * tanh(score / softcap); 0: as they are
  std::optional<WindowTensors> window = {};
  std::optional<ChosenTensors> chosen = {};
  // Packed documents: int32 (N, 2), the first token of each block, and its number of tokens.
  const Tensor* spans = nullptr;
  // Tiles were made without waiting for their number, and some may have had no space; see index_fill.
  bool bounded = false;
  // But none has, as all entries that there may be have some.
  bool fits = false;
  // Each sequence has a layout of its own.
  bool by_sequence = false;
  // Forward: the block rows of a tile have so little in common that each is better walked by itself.
  bool rows_differ = false;

  int64_t head_dim() const { return query.size(query.dim() - 1); }
  // Tokens of a block row; `block` is those of a block column.
  int64_t row_block() const { return chosen ? kChosenRowBlock : block; }
  // Tokens as kernels count them: aligned to whole blocks.
  int64_t queries() const {
    return spans ? spans->size(0) * block : query.size(2) * (chosen ? chosen->rows_of_token : 1);
  }
  int64_t keys() const { return spans ? spans->size(0) * block : key.size(2); }
  // Lists of a side are of so many layout heads, each for as many heads of one sequence or of all.
  int64_t all_layout_heads() const { return by_sequence ? query.size(0) * layout_heads : layout_heads; }
  int64_t heads_of_layout() const { return query.size(1) / layout_heads; }
  // How often a list is walked.
  int64_t copies() const { return (by_sequence ? 1 : query.size(0)) * heads_of_layout(); }
};

// Tiles of one side. pairs: int32 (1 or H, E, tile, 2), a bit for each pair in the blocks of 64 tokens that the entries
// are; on Hopper.
struct TileTensors {
  const Tensor &lines, &entries, &units, &cuts;
  const Tensor* pairs = nullptr;  // null: all of them count
  const Tensor* spans = nullptr;  // of packed documents: those of the blocks that lines and then entries are
};

// Results of forward, and their gradients.
struct AttentionResults {
  const Tensor& grad_output;
  const std::optional<Tensor>& grad_lse;
  const Tensor &output, &rows;
};

inline void check_row_tiles(const AttentionCall& call, const TileTensors& rows) {
  check_tiles(
      rows.lines, rows.entries, rows.units, rows.cuts, call.queries(), call.query, call.all_layout_heads(),
      call.row_block(), call.tile, call.bounded);
}

inline void check_column_tiles(const AttentionCall& call, const TileTensors& columns) {
  check_tiles(
      columns.lines, columns.entries, columns.units, columns.cuts, call.keys(), call.query, call.all_layout_heads(),
      call.block, call.tile, call.bounded);
}

}  // namespace ds_sparse
