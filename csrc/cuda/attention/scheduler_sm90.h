// The roles of warps in a thread block on Hopper, and how they get their work tiles.
//
// A thread block stays on its multiprocessor and takes work tile after work tile, or each of its two consumer groups
// does. A consumer group's two warpgroups multiply: they have 64 rows of the tile each, a warp tile of 16 for each
// warp; or, where halves of tiles are walked by themselves (HalvesTuning), each is a consumer group with one half. Of
// the warps after them one is its scheduler, which writes what the next work tile is about (and, forward, stores the
// results of the last); one or two are producers, which keep a pipeline of stages in shared memory full; or (backward
// by rows) one warp has both roles.

#pragma once

#include <algorithm>
#include <cstdint>

#include "../common/hopper.h"
#include "../common/launch.h"
#include "mask.h"
#include "tile_lists.h"

namespace ds_sparse::attention {

using namespace hopper;

// A consumer group is kConsumerWarpgroups, with the scheduler and producer warps that serve them; the consumer groups
// of a thread block have nothing to do with each other.
constexpr int kConsumerGroupThreads = 128 * kConsumerWarpgroups;
template <int kConsumerGroups, int kGroupThreads = kConsumerGroupThreads>
constexpr int kHopperThreads = kConsumerGroups * kGroupThreads + 128;

// Runs the threads' roles: consume(consumer_group), with kConsumerRegisters each, and for each of the other roles, with
// kProducerRegisters, a warp for each consumer group.
template <
    int kConsumerGroups, int kProducerRegisters, int kConsumerRegisters, int kGroupThreads = kConsumerGroupThreads,
    class M, class... C>
__device__ __forceinline__ void run_roles(const M& consume, const C&... others) {
  static_assert(kConsumerGroups * sizeof...(others) <= 4);
  // What a thread block begins with: its warps would wait for ever for more.
  constexpr int consumers = kConsumerGroups * kGroupThreads, threads = consumers + 128;
  static_assert(consumers * kConsumerRegisters + 128 * kProducerRegisters <= 65536 / threads / 8 * 8 * threads);
  if (threadIdx.x < kConsumerGroups * kGroupThreads) {
    warpgroup_reg_alloc<kConsumerRegisters>();
    consume(kConsumerGroups == 1 ? 0 : uniform(threadIdx.x / kGroupThreads));
  } else {
    warpgroup_reg_dealloc<kProducerRegisters>();
    const int warp = uniform(threadIdx.x / 32 - kConsumerGroups * (kGroupThreads / 32));
    int number = 0;
    ((warp / kConsumerGroups == number++ ? others(warp % kConsumerGroups) : void()), ...);
  }
}

// The thread's number in its consumer group, which the compiler does not ask for again at every use.
__device__ __forceinline__ int consumer_thread() {
  int number;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
  return number % kConsumerGroupThreads;
}

// The lane, for what is rare: what follows from it would else be made beforehand, and take registers all the time.
__device__ __forceinline__ int lane_asked_anew() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// Hands work tiles out in their order, to whichever consumer group is free: persistent thread blocks, dynamic
// scheduling. The first one of a consumer group has the number blockIdx.x + consumer_group * gridDim.x.
struct TileScheduler {
  int* taken;                  // tickets of a PassState
  int walks, consumer_groups;  // of each work tile, by copies and sub-tiles; of all thread blocks

  // A number in the first lane of a warp, which nobody waits for yet.
  __device__ __forceinline__ int draw() const {
    int ticket = 0;
    if (threadIdx.x % 32 == 0) {
      ticket = consumer_groups + atomicAdd(taken, 1);
    }
    return ticket;
  }
  // The work tile of that number; count or more where there is none.
  static __device__ __forceinline__ int tile_of(int ticket) { return __shfl_sync(0xffffffffu, ticket, 0); }
};

// A work tile in the scheduler's pipeline, with its tokens: the scheduler writes it while the one before is at work.
struct WorkItem {
  WorkTile work;
  int steps;                  // -1: there is nothing left to do
  int tokens[kHopperBlockM];  // of the tile; -1 where there is none
  // Packed documents: where the first of each 16 lies in memory; the others follow it.
  int first_in_memory[kHopperBlockM / 16];

  template <bool kPacked>
  __device__ __forceinline__ int in_memory(int tile_row) const {
    return kPacked ? first_in_memory[tile_row / 16] + tile_row % 16 : tokens[tile_row];
  }
};

// And what its tokens see of a window, where kernels serve that; everything where there is none.
template <Limits kLimits>
struct WorkItemOf : WorkItem {
  Range limits[by_window(kLimits) ? kHopperBlockM : 1];
  int places[by_window(kLimits) ? kHopperBlockM : 1];

  // By the scheduler warp.
  template <bool kPacked = false>
  __device__ __forceinline__ void set(
      const WorkTile& next, int num_steps, const TileLists& lists, int length, const Scoring& scoring) {
    for (int tile_row = threadIdx.x % 32; tile_row < kHopperBlockM; tile_row += 32) {
      const int token = lists.token<kPacked>(next.tile, next.sub_tile, tile_row, length);
      tokens[tile_row] = token;
      if constexpr (by_window(kLimits)) {
        limits[tile_row] = scoring.limits_of(next.head, token);
        places[tile_row] = scoring.place_of(next.head, token);
      }
    }
    if (kPacked && threadIdx.x % 32 < kHopperBlockM / 16) {
      const int number = threadIdx.x % 32;
      this->first_in_memory[number] = lists.token_in_memory(next.tile, next.sub_tile, 16 * number);
    }
    if (threadIdx.x % 32 == 0) {
      work = next;
      steps = num_steps;
    }
    __syncwarp();
  }

  template <bool kTransposed>
  __device__ __forceinline__ TokenMask<kTransposed, kLimits> mask_of(int tile_row, const Scoring& scoring) const {
    if constexpr (by_window(kLimits)) {
      return {scoring, work.batch, work.head, tokens[tile_row], limits[tile_row], places[tile_row]};
    }
    return {scoring, work.batch, work.head, tokens[tile_row], {}, 0};
  }
};

// The first row of a warp's tile, and the first of a lane's two rows; the other is 8 below. `thread`: as of
// `consumer_thread`, where that is known.
__device__ __forceinline__ int warp_tile_row(int thread = threadIdx.x % kConsumerGroupThreads) {
  return thread / 32 * 16;
}
__device__ __forceinline__ int lane_row(int thread = threadIdx.x % kConsumerGroupThreads) {
  return warp_tile_row(thread) + thread % 32 / 4;
}

// Calls f with a scheduler of the work tiles of so many copies, and the number of thread blocks of so many consumer
// groups.
template <class F>
void with_scheduler(
    const Launcher& launch, int* tickets, const TileLists& lists, int64_t copies, int consumer_groups, const F& f) {
  const int64_t walks = copies * lists.sub_tiles;
  const int64_t blocks = std::min(walks * lists.num_work_tiles, launch.multiprocessors());
  f(TileScheduler{tickets, static_cast<int>(walks), static_cast<int>(consumer_groups * blocks)}, blocks);
}

}  // namespace ds_sparse::attention
