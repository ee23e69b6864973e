// The live blocks of a layout in tiles (index/tiles.py), as products with blocks of 16 to 128 walk them on Hopper:
// a tile's few block rows are multiplied together with the union of their lists.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../../checks.h"

namespace ds_sparse {

struct ProductTileLists {
  const int32_t* block_rows;  // (tiles, block_rows_per_tile)
  const uint32_t* entries;    // (E)
  const int32_t* slots;       // (E, block_rows_per_tile)
  const int4* work_tiles;
  int num_work_tiles, block_rows_per_tile, tiles_per_head;
  int layout_heads, heads, live;
  int copies;  // of the layout: matrices where all heads share it, else batches

  ProductTileLists(
      const ProductTiles& tiles, int64_t layout_heads, int64_t heads, int64_t batch, int64_t block, int64_t live)
      : block_rows(tiles.lines->const_data_ptr<int32_t>()),
        entries(reinterpret_cast<const uint32_t*>(tiles.entries->const_data_ptr<int32_t>())),
        slots(tiles.slots->const_data_ptr<int32_t>()),
        work_tiles(reinterpret_cast<const int4*>(tiles.units->const_data_ptr<int32_t>())),
        num_work_tiles(static_cast<int>(tiles.units->size(0))),
        block_rows_per_tile(static_cast<int>(tiles.tile / block)),
        tiles_per_head(static_cast<int>(tiles.lines->size(0) / block_rows_per_tile / layout_heads)),
        layout_heads(static_cast<int>(layout_heads)),
        heads(static_cast<int>(heads)),
        live(static_cast<int>(live)),
        copies(static_cast<int>(layout_heads == 1 ? batch * heads : batch)) {}

  // Each work tile of each copy: they are numbered copy by copy.
  __host__ __device__ int total_work_tiles() const { return copies * num_work_tiles; }
  // Tile, first entry, number of entries and split of one, without entries where there is no such work tile.
  __device__ int4 listed_work_tile(int number) const {
    return number < total_work_tiles() ? work_tiles[number % num_work_tiles] : int4{};
  }

  // The work tile that a thread block has in a turn; total_work_tiles() or more: this turn and all after it have none.
  // From turn to turn the grid is rotated by the golden ratio: each copy begins with its longest work tiles, and where
  // a stride meets those of all copies in the same thread blocks, these alone would set the time.
  __device__ int number_of_turn(uint32_t turn) const {
    const uint32_t blocks = gridDim.x, apart = blocks * 40503u >> 16;
    return static_cast<int>(turn * blocks + (blockIdx.x + turn * apart) % blocks);
  }
};

// A work tile of one copy.
struct ProductWorkTile {
  int copy, batch, head;
  int tile, first_entry, num_entries, split;

  // listed: what the lists have for it, which may be asked for long before.
  __device__ ProductWorkTile(const ProductTileLists& lists, int number, const int4& listed)
      : copy(number / lists.num_work_tiles),
        tile(listed.x),
        first_entry(listed.y),
        num_entries(listed.z),
        split(listed.w) {
    batch = lists.layout_heads == 1 ? copy / lists.heads : copy;
    head = lists.layout_heads == 1 ? copy % lists.heads : tile / lists.tiles_per_head;
  }

  // The number of the copy's first block among the values of all batches.
  __device__ int64_t first_value(const ProductTileLists& lists) const { return int64_t{copy} * lists.live; }
};

}  // namespace ds_sparse
