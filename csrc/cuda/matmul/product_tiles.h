// The live blocks of a layout in tiles (ds_sparse/tiles.py), as products with blocks of 16 to 128 walk them on Hopper:
// a tile's few lines are multiplied together with the union of their lists.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../../checks.h"

namespace ds_sparse {

struct TileLists {
  const int32_t* lines;     // (tiles, lines_per_tile)
  const uint32_t* entries;  // (E)
  const int32_t* slots;     // (E, lines_per_tile)
  const int4* units;
  int num_units, lines_per_tile, tiles_per_head;
  int layout_heads, heads, live;
  int copies;  // of the layout: matrices where all heads share it, else batches

  TileLists(
      const ProductTiles& tiles, int64_t layout_heads, int64_t heads, int64_t batch, int64_t block, int64_t live)
      : lines(tiles.lines->const_data_ptr<int32_t>()),
        entries(reinterpret_cast<const uint32_t*>(tiles.entries->const_data_ptr<int32_t>())),
        slots(tiles.slots->const_data_ptr<int32_t>()),
        units(reinterpret_cast<const int4*>(tiles.units->const_data_ptr<int32_t>())),
        num_units(static_cast<int>(tiles.units->size(0))),
        lines_per_tile(static_cast<int>(tiles.tile / block)),
        tiles_per_head(static_cast<int>(tiles.lines->size(0) / lines_per_tile / layout_heads)),
        layout_heads(static_cast<int>(layout_heads)),
        heads(static_cast<int>(heads)),
        live(static_cast<int>(live)),
        copies(static_cast<int>(layout_heads == 1 ? batch * heads : batch)) {}

  // What there is to do: each unit of each copy.
  __host__ __device__ int tasks() const { return copies * num_units; }
  // The unit of a task, one without entries where there is no such task.
  __device__ int4 unit_of(int task) const { return task < tasks() ? units[task % num_units] : int4{}; }

  // The task that a thread block has in a turn; tasks() or more: this turn and all after it have none. From turn to turn
  // the grid is rotated by the golden ratio: each copy begins with its longest units, and where a stride meets those of
  // all copies in the same thread blocks, these alone would set the time.
  __device__ int task_of(uint32_t turn) const {
    const uint32_t blocks = gridDim.x, apart = blocks * 40503u >> 16;
    return static_cast<int>(turn * blocks + (blockIdx.x + turn * apart) % blocks);
  }
};

// A unit of one copy.
struct TileTask {
  int copy, batch, head;
  int tile, first_entry, num_entries, part;

  // unit: that of the task, which may be asked for long before.
  __device__ TileTask(const TileLists& lists, int task, const int4& unit)
      : copy(task / lists.num_units), tile(unit.x), first_entry(unit.y), num_entries(unit.z), part(unit.w) {
    batch = lists.layout_heads == 1 ? copy / lists.heads : copy;
    head = lists.layout_heads == 1 ? copy % lists.heads : tile / lists.tiles_per_head;
  }

  // The number of the copy's first block among the values of all batches.
  __device__ int64_t first_value(const TileLists& lists) const { return int64_t{copy} * lists.live; }
};

}  // namespace ds_sparse
