// Finds which groups of 16 tokens count for a warp tile and for its warpgroup, by a producer warp for a step.

#pragma once

#include <cstdint>

#include "scheduler_sm90.h"

namespace ds_sparse::attention {

// The view that the 16 rows of a warp tile have of the other side: all see the tokens in `all` and, with a window, the
// first `all_global`; none of them others than these global ones and those in `any`.
template <Limits kLimits>
struct GroupMask {
  Range all, any, all_global;
  int num_global;

  // A warp tile's for each of the first lanes.
  template <bool kTransposed>
  static __device__ __forceinline__ GroupMask
  of_warp_tile(const Scoring& scoring, const TileLists& lists, const WorkItemOf<kLimits>& item) {
    const int tile_row = threadIdx.x % (kHopperBlockM / 16) * 16, first = item.tokens[tile_row];
    // The range of the row to which causality leaves least.
    const Range range =
        first < 0 ? Range{0, kTransposed ? scoring.queries : scoring.keys}
                  : scoring.template range_of<kTransposed, kLimits>(item.work.batch, kTransposed ? first + 15 : first);
    GroupMask group_mask{range, {0, 0}, {0, 0}, 0};
    if constexpr (by_window(kLimits)) {
      const WindowLimits& window = scoring.window;
      group_mask.any = {INT32_MAX, 0};
      for (int i = tile_row; i < tile_row + 16; ++i) {
        if (item.tokens[i] >= 0) {
          const Range limits = item.limits[i];
          group_mask.all = group_mask.all.within(limits);
          group_mask.any = {min(group_mask.any.first, limits.first), max(group_mask.any.end, limits.end)};
        }
      }
      group_mask.num_global = window.num_global;
      group_mask.all_global = Range{0, window.num_global}.within(range);
      if (scoring.goes_by_places() || lists.pairs != nullptr) {
        group_mask.all = group_mask.all_global = {0, 0};
      }
    }
    if (by_choice(kLimits) && scoring.chosen.differs_in_warp_tile()) {
      group_mask.all = group_mask.all_global = {0, 0};
    }
    return group_mask;
  }

  // A group of 16 tokens: whether no element has to be looked at; whether any may count.
  __device__ __forceinline__ bool is_whole(int token) const {
    return all.has(token, 16) || (by_window(kLimits) && all_global.has(token, 16));
  }
  __device__ __forceinline__ bool reaches(int token) const {
    return !by_window(kLimits) || token < num_global || (token < any.end && token + 16 > any.first);
  }
};

// The view that a warp tile has of a step's groups of 16 tokens. Bit g of each: the group counts for the warp tile; for
// any of its warpgroup; has elements to look at one by one; of these, is seen in part, where that is asked for.
struct LiveGroups {
  uint32_t bits;

  __device__ uint32_t warp_tile() const { return bits & 0xffu; }
  __device__ uint32_t warpgroup() const { return bits >> 8 & 0xffu; }
  __device__ uint32_t ragged() const { return bits >> 16; }
  __device__ uint32_t seen_in_part() const { return bits >> 24; }
  // Tells if all of the kBlockN / 16 groups count for the warp tile, and none has to be looked at.
  template <int kBlockN>
  __device__ bool is_whole() const {
    return (bits & 0xffff00ffu) == (1u << kBlockN / 16) - 1;
  }
};

// Finds them, by a producer warp: a warp tile in each of its first lanes.
struct LiveGroupFinder {
  static constexpr int kWarpTiles = kHopperBlockM / 16;
  int block_row;       // of the tile, as the bits of owners count them
  uint32_t warpgroup;  // all rows of the warp tile's warpgroup

  __device__ explicit LiveGroupFinder(const TileLists& lists) : warpgroup(0) {
    const int warp_tile = threadIdx.x % kWarpTiles;
    block_row = block_row_of(lists, warp_tile);
    for (int other = warp_tile / 4 * 4; other < warp_tile / 4 * 4 + 4; ++other) {
      warpgroup |= 1u << block_row_of(lists, other);
    }
  }

  // The owners in a half of the tile: of a warpgroup's rows. By a whole warp.
  __device__ __forceinline__ uint32_t of_half(int half) const { return __shfl_sync(0xffffffffu, warpgroup, 4 * half); }

  // `group`: in lane g the g-th. kTellsPart: of those that are ragged, whether a bias alone makes them so.
  template <int kGroups, bool kTellsPart, Limits kLimits>
  __device__ __forceinline__ LiveGroups find(const Octet& group, const GroupMask<kLimits>& group_mask) const {
    LiveGroups live{0};
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int token = __shfl_sync(0xffffffffu, group.token, g);
      const uint32_t owners = __shfl_sync(0xffffffffu, group.owners, g);
      const bool ragged = (owners & Octet::kBiased) != 0 || !group_mask.is_whole(token);
      live.bits |= (group_mask.reaches(token) ? owners >> block_row & 1 : 0u) << g |
                   ((owners & warpgroup) != 0 ? 1u : 0u) << (8 + g) | (owners != 0 && ragged ? 1u : 0u) << (16 + g);
      if constexpr (kTellsPart) {
        live.bits |= (owners != 0 && !group_mask.is_whole(token) ? 1u : 0u) << (24 + g);
      }
    }
    return live;
  }

 private:
  static __device__ int block_row_of(const TileLists& lists, int warp_tile) {
    return min(16 * warp_tile >> lists.log_block, lists.block_rows_per_tile - 1);
  }
};

}  // namespace ds_sparse::attention
