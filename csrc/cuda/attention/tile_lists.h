// Tiles of tokens with their lists of live blocks, the work tiles that thread blocks take, and the splits of long
// lists, which a second kernel combines. Format: index/tiles.py; schemas and shapes: csrc/library.cpp.
//
// Every pass holds a tile of its own tokens (queries, or keys) and walks those of the other side, kBlockM or fewer at a
// time, gathered from as many live blocks as that takes.

#pragma once

#include <cstdint>

#include "block_spans.h"
#include "tuning.h"

namespace ds_sparse::attention {

// The tiles of one side with their lists, as Python's Tiles has them. Block rows: of the own side, -1 where a tile has
// none.
struct TileLists {
  const int32_t* block_rows;
  const uint32_t* entries;
  const int4* work_tiles;
  int num_work_tiles;  // if bounded, of those that there may be: behind them one tells how many there are
  int block_rows_per_tile, tiles_per_head;
  int heads, layout_heads;  // of a sequence
  // For so many heads of a sequence a list is the same; where these are a group, with the same keys, their work tiles
  // follow each other.
  int heads_of_layout, heads_together;
  bool bounded, by_sequence;
  int log_block, log_other;  // of the tile's own blocks, and of those that entries are
  int tile, sub_tiles;       // tile: its tokens; sub-tiles: of a block that is larger than a tile
  // (1 or H, E, tile): for each entry, a block of 64 tokens, those that a row sees. Null: all.
  const uint2* pairs;
  int64_t pairs_stride;  // of heads
  BlockSpans spans;
  // Spans of the blocks that block rows and entries are, so that nobody waits for one load to start the other; null
  // with spans.
  const int2 *block_row_spans, *entry_spans;

  // The token at `row` of a tile or sub-tile, or -1; of so many that exist. kPacked: spans may say that one does not.
  template <bool kPacked = false>
  __device__ int token(int number, int sub_tile, int tile_row, int length) const {
    const int place = block_row_place(number, tile_row), of_tile = block_rows[place];
    const int in_block = place_in_block(sub_tile, tile_row),
              token = of_tile < 0 ? -1 : (of_tile << log_block) + in_block;
    const bool exists = !kPacked || spans.spans == nullptr || in_block < block_row_spans[place].y;
    return token < length && exists ? token : -1;
  }
  // Packed documents: where that token lies in memory; where there is none, somewhere.
  __device__ int token_in_memory(int number, int sub_tile, int tile_row) const {
    return block_row_spans[block_row_place(number, tile_row)].x + place_in_block(sub_tile, tile_row);
  }
  // Batch and head of a tile, of all whose lists are the same that of number `copy`.
  __device__ int2 batch_and_head(int copy, int number) const {
    // One layout for all, and one for each head, without a division that gives nothing.
    const int layout = layout_heads == 1 && !by_sequence ? 0 : number / tiles_per_head;
    if (by_sequence) {
      return make_int2(layout / layout_heads, layout % layout_heads * heads_of_layout + copy);
    }
    if (heads_of_layout == 1) {
      return make_int2(copy, layout);
    }
    return make_int2(copy / heads_of_layout, layout * heads_of_layout + copy % heads_of_layout);
  }
  // The number of a head's layout.
  __device__ int layout_of(int batch, int head) const {
    return (by_sequence ? batch * layout_heads : 0) + head / heads_of_layout;
  }
  __device__ int count_work_tiles() const { return bounded ? work_tiles[num_work_tiles].y : num_work_tiles; }

 private:
  __device__ int block_row_place(int number, int tile_row) const {
    return number * block_rows_per_tile + min(tile_row >> log_block, block_rows_per_tile - 1);
  }
  __device__ int place_in_block(int sub_tile, int tile_row) const {
    return (sub_tile * tile + tile_row) & ((1 << log_block) - 1);
  }
};

// The work of a thread block: a work tile of one head, or a sub-tile of it, and perhaps some columns of its output.
struct WorkTile {
  int batch, head, sub_tile, column_tile;
  int tile, first_entry, num_entries, split;
  int64_t matrix;  // batch * heads + head
  int64_t copy;    // of those whose lists are the same

  // Of `count` work tiles for each copy. There is none where `tile` is negative.
  __device__ WorkTile(const TileLists& lists, uint32_t number, uint32_t count, uint32_t column_tiles) {
    column_tile = number % column_tiles;
    number /= column_tiles;
    sub_tile = number % lists.sub_tiles;
    number /= lists.sub_tiles;
    uint32_t of_group = 0;
    if (lists.heads_together > 1) {
      of_group = number % lists.heads_together;
      number /= lists.heads_together;
    }
    const int4 listed = lists.work_tiles[number % count];
    number /= count;
    tile = listed.x;
    first_entry = listed.y;
    num_entries = listed.z;
    split = listed.w;
    copy = number * lists.heads_together + of_group;
    const int2 of = lists.batch_and_head(static_cast<int>(copy), tile);
    batch = of.x;
    head = of.y;
    matrix = int64_t{batch} * lists.heads + head;
  }
};

// The fp32 results of the splits of long lists, a work tile each: (copies, splits, sub-tiles, tile, head_dim).
struct SplitResults {
  float* data;
  int splits, head_dim;

  __device__ int64_t first_row(const TileLists& lists, int64_t copy, int split, int sub_tile) const {
    return ((copy * splits + split) * lists.sub_tiles + sub_tile) * lists.tile;
  }
};

// kCombineRows neighbouring rows of a tile whose list is split, which a thread block combines.
struct CombineRows {
  int batch, head, tile, sub_tile, first_row, first_split, num_splits;
  int64_t matrix, copy;

  // There are no splits where lists are bounded and fewer are split than might be.
  __device__ CombineRows(const TileLists& lists, const int32_t* cuts, int num_cuts) {
    uint32_t number = blockIdx.x;
    first_row = number % (lists.tile / kCombineRows) * kCombineRows;
    number /= lists.tile / kCombineRows;
    sub_tile = number % lists.sub_tiles;
    number /= lists.sub_tiles;
    const int32_t* cut = cuts + number % num_cuts * 3;
    copy = number / num_cuts;
    tile = cut[0];
    first_split = cut[1];
    num_splits = cut[2];
    const int2 of = lists.batch_and_head(copy, tile);
    batch = of.x;
    head = of.y;
    matrix = int64_t{batch} * lists.heads + head;
  }
  // The token of one of the rows, or -1; and its place among the rows of all splits, in one of the tile's splits.
  __device__ int token(const TileLists& lists, int tile_row, int length) const {
    return lists.token<true>(tile, sub_tile, first_row + tile_row, length);
  }
  __device__ int64_t place(const TileLists& lists, const SplitResults& splits, int split, int tile_row) const {
    return splits.first_row(lists, copy, first_split + split, sub_tile) + first_row + tile_row;
  }
};

}  // namespace ds_sparse::attention
