// Rows of queries that are gathered by the block of keys that they have chosen, one for each that a token has chosen,
// so that the rows of a tile see the same keys. Attention runs on those rows as on any others, and what a token's rows
// give is put together. For heads that choose alone, whose neighbouring tokens want different blocks.
#pragma once

#include <vector>

#include "../common/launch.h"
#include "arguments.h"
#include "row_stats.h"

namespace ds_sparse::attention {

// Heads of sequences that are gathered together, as rows take memory: `heads` of each from the first on.
struct GatheredHeads {
  int first_batch, batches, first_head, heads;
};

// Which rows there are, in lists of their own for `heads_of_list` neighbouring heads, of one sequence or of all. If
// causal, the first `own_rows` are the tokens as they are, which see their own block up to themselves: as many as keys
// or more, so that by causality the others, which are behind them, see all of the block that they have chosen.
struct GatheredLists {
  GatheredHeads of;
  const int32_t* tokens;  // (P, rows): the token that a row is of; -1: none
  const int32_t*
      units;  // (P, rows / unit): whether a unit of rows has any; of those behind own rows the block; -1: none
  const int32_t* places;  // (P, T, most): the rows of each token, -1 behind the last
  int rows, own_rows, most, queries, log_unit, heads_of_list,
      lists_of_sequence;  // 0 of a sequence: it has those of all

  // Of heads counted from the first that are gathered.
  __device__ int64_t list_of(int batch, int head) const {
    return int64_t{batch} * lists_of_sequence + head / heads_of_list;
  }
};

// Those, what holds them, and the tiles that attention on the rows walks.
struct GatheredRows {
  GatheredLists lists;
  Tensor of_tokens, of_units;
  std::vector<Tensor> row_tiles, column_tiles;
};

// The blocks that queries have chosen. Rows are in units of as many tokens as blocks have that attention is told of.
struct ChosenToGather {
  ChosenBlocks chosen;
  int queries, keys, unit, most;
  bool causal;

  int columns() const { return (keys + (1 << chosen.log_block) - 1) >> chosen.log_block; }
  int own_rows() const;
  int rows() const;
};

// Whichever heads a call gathers together: all, or so many that rows of queries, filled up to 64 or 128 numbers, stay
// below a GB; at least those that have the same keys, whatever they take.
std::vector<GatheredHeads> heads_to_gather(const ChosenToGather& all, const Tensor& query, int64_t key_heads);

// gathered_rows.cu
GatheredRows gather_chosen(
    const Launcher& launch, const ChosenToGather& all, const GatheredHeads& heads, const Tensor& on, int64_t tile,
    bool with_columns);

// x, (B, H, T, D) of all heads, as (b, h, rows, D) of those that are gathered; zeros in rows of no token, and nothing
// in units of none.
Tensor gather_rows(const Launcher& launch, const GatheredLists& lists, const Tensor& x);

// Statistics of rows for the backward pass, from those of tokens of all heads; and what is wanted besides.
RowsOfBackward gather_row_stats(
    const Launcher& launch, const GatheredLists& lists, const RowsOfBackward& of_tokens, int64_t all_heads,
    int64_t head_dim, const RowsWanted& wanted);

// Outputs, (B, H, T, D), lse and statistics of the heads that are gathered, from those of their rows.
void combine_rows(
    const Launcher& launch, const GatheredLists& lists, const Tensor& of_rows, const Tensor& sums_of_rows,
    Tensor& output, Tensor& lse, Tensor& row_sums);

// Gradients of these heads' queries, from those of rows.
void add_rows(const Launcher& launch, const GatheredLists& lists, const Tensor& of_rows, Tensor& grad_query);

}  // namespace ds_sparse::attention
