// How a producer warp fills a stage: tokens gathered by the copy engine, with what the step is about.

#pragma once

#include <cstdint>

#include "../common/tensor_map.h"
#include "mask_sm90.h"

namespace ds_sparse::attention {

// Rows of kHeadDim elements as panels.
template <class T, int kHeadDim, int kTokens>
using Panels = T[kHeadDim / kPanel][kTokens * kPanel];

// Copies by a warp, in both directions: each lane has one box, a panel of up to a block's tokens.
template <class T, int kHeadDim, int kTokens>
struct Boxes {
  int panel, tile_row, log_tokens;
  bool any;  // whether this lane has one

  __device__ explicit Boxes(int log_block) {
    constexpr int panels = kHeadDim / kPanel;
    const int lane = threadIdx.x % 32;
    log_tokens = min(log_block, log2_of(kTokens));
    panel = lane % panels;
    tile_row = lane / panels << log_tokens;
    any = tile_row < kTokens;
  }

  __device__ int bytes() const { return int{sizeof(T)} * kPanel << log_tokens; }

  __device__ __forceinline__ void copy(
      Panels<T, kHeadDim, kTokens>& to, const CUtensorMap* map, Barrier* barrier, int token, int head,
      int batch) const {
    tma_load(to[panel] + tile_row * kPanel, map, barrier, panel * kPanel, token, head, batch);
  }
  // The way back.
  __device__ __forceinline__ void store(
      const CUtensorMap* map, const Panels<T, kHeadDim, kTokens>& from, int token, int head, int batch) const {
    tma_store(map, from[panel] + tile_row * kPanel, panel * kPanel, token, head, batch);
  }
};

// Coordinates of rows in a tensor map, beside the column and the batch: token and head, or, where there are several
// rows a token, which are heads, the first head and the token. Only blocks that are chosen have several.
template <Limits kLimits>
__device__ __forceinline__ int2 place_of_rows(const TokenStrides& tokens, int number, int head) {
  return by_choice(kLimits) && tokens.log_rows > 0 ? make_int2(head << tokens.log_rows, number >> tokens.log_rows)
                                                   : make_int2(number, head);
}

// What the list says of a step's groups of 16 tokens, by a producer warp: of each in one of the first lanes. It is left
// as it was loaded, so that a warp that asks a step ahead does not wait. A step may lack tokens, or not exist: others
// take their place, which nobody sees.
template <int kTokens, bool kPacked>
struct Listed {
  uint32_t entry;
  int2 span;

  __device__ __forceinline__ explicit Listed(uint32_t entry) : entry(entry), span{0, 0} {}
  __device__ __forceinline__ Listed(const OtherSide<kTokens, kPacked>& other, int step) : span{0, 0} {
    const int number = min(place_of_group(step) >> other.log_block, other.num_entries - 1);
    entry = other.entries[number];
    if constexpr (kPacked) {
      span = other.spans[number];
    }
  }

  // Among the tokens of all entries.
  static __device__ __forceinline__ int place_of_group(int step) {
    return step * kTokens + threadIdx.x % (kTokens / 16) * 16;
  }
};

// Of a work tile's entries those that have an owner in one half of its rows, one after the other, by a whole warp.
struct EntriesOfHalf {
  const uint32_t* entries;
  int num_entries;
  uint32_t owners;
  int first = 0;
  uint32_t ahead, entry = 0, left = 0;  // a lane's entry of the next 32 and of these; which of them are to come

  __device__ __forceinline__ EntriesOfHalf(const uint32_t* entries, int num_entries, uint32_t owners)
      : entries(entries), num_entries(num_entries), owners(owners), ahead(load()) {}

  __device__ __forceinline__ int count() const {
    int owned = 0;
    for (int number = threadIdx.x % 32; number < num_entries; number += 32) {
      owned += (owners_of(entries[number]) & owners) != 0;
    }
    return __reduce_add_sync(0xffffffffu, owned);
  }
  // 0, which nobody owns, where there is no other.
  __device__ __forceinline__ uint32_t next() {
    while (left == 0) {
      if (first >= num_entries) {
        return 0;
      }
      entry = ahead;
      first += 32;
      ahead = load();
      left = __ballot_sync(0xffffffffu, (owners_of(entry) & owners) != 0);
    }
    const int lane = __ffs(left) - 1;
    left &= left - 1;
    return __shfl_sync(0xffffffffu, entry, lane);
  }
  // A step's, each in the lanes of its groups of 16 tokens.
  template <int kTokens>
  __device__ __forceinline__ uint32_t next_of_step(int log_block) {
    uint32_t mine = 0;
    for (int number = 0; number < kTokens >> log_block; ++number) {
      const uint32_t its = next();
      mine = static_cast<int>(threadIdx.x % (kTokens / 16)) * 16 >> log_block == number ? its : mine;
    }
    return mine;
  }

 private:
  __device__ __forceinline__ uint32_t load() const {
    const int number = first + static_cast<int>(threadIdx.x % 32);
    return number < num_entries ? entries[number] : 0;
  }
};

// A step of the other side, as a producer warp sees it: its box's first token, and a group of 16 for the first lanes.
template <int kTokens, bool kPacked>
struct Gathered {
  int token;
  int token_in_memory;
  Octet group;  // the first eight of it stand for all

  template <class B>
  __device__ __forceinline__
  Gathered(const OtherSide<kTokens, kPacked>& other, const B& boxes, const Listed<kTokens, kPacked>& listed, int step) {
    const int place = listed.place_of_group(step), in_block = place & ((1 << other.log_block) - 1);
    const auto of_box = [&](int first) { return __shfl_sync(0xffffffffu, first + in_block, boxes.tile_row / 16); };
    token = of_box(static_cast<int>(block_of(listed.entry) << other.log_block));
    token_in_memory = kPacked ? of_box(listed.span.x) : token;
    group = other.group(listed.entry, listed.span, place);
  }
};

// The pairs of a step's blocks of 64 tokens that count, where they are given one by one.
template <int kTokens, Limits kLimits>
using PairsOfStep = uint2[by_window(kLimits) ? kTokens / 64 : 1][by_window(kLimits) ? kHopperBlockM : 1];

// Brings them, by a producer warp, to where `full` waits for so many more bytes.
template <int kTokens>
__device__ __forceinline__ int bytes_of_pairs(const TileLists& lists) {
  return lists.pairs == nullptr ? 0 : kTokens / 64 * kHopperBlockM * int{sizeof(uint2)};
}
template <int kTokens>
__device__ __forceinline__ void copy_pairs(
    PairsOfStep<kTokens, Limits::kWindow>& to, const TileLists& lists, const WorkTile& work, int step, Barrier* full) {
  const int lane = threadIdx.x % 32;
  if (lists.pairs != nullptr && lane < kTokens / 64) {
    const int entry = work.first_entry + min(step * (kTokens / 64) + lane, work.num_entries - 1);
    const uint2* from = lists.pairs + work.head * lists.pairs_stride + int64_t{entry} * kHopperBlockM;
    bulk_load(to[lane], from, sizeof(to[lane]), full);
  }
}

// Writes what a step is about, by a producer warp, and makes `full` wait for so many bytes and, where they are given,
// for the step's pairs, whose copy it starts.
template <int kTokens, Limits kLimits, bool kPacked, class M>
__device__ __forceinline__ void announce_step(
    M& memory, int stage, Barrier& full, const Gathered<kTokens, kPacked>& here, const LiveGroups& live, int bytes,
    const TileLists& lists, const WorkTile& work, int step) {
  const int lane = threadIdx.x % 32;
  if (lane < kTokens / 16) {
    memory.groups[stage][lane] = here.group;
  }
  if (lane < LiveGroupFinder::kWarpTiles) {
    memory.live[stage][lane] = live;
  }
  __syncwarp();
  if (lane == 0) {
    full.arrive_and_expect_tx(bytes + bytes_of_pairs<kTokens>(lists));
  }
  if constexpr (by_window(kLimits)) {
    copy_pairs<kTokens>(memory.pairs[stage], lists, work, step, &full);
  }
}

}  // namespace ds_sparse::attention
