// Shared by both kernels of sparse @ dense on Hopper. A thread block takes work tile after work tile of the layout's
// tiles (product_tiles.h), of 128 rows: each of two warpgroups multiplies 64 of them with the dense rows that both
// share, 64 tokens at a time. A warpgroup that has nothing in such a step goes on to the next one at once, and warps
// hand over their results, 16 rows each, without waiting for each other.

#pragma once

#include "../common/gemm_sm90.h"
#include "dsd.h"

namespace ds_sparse::hopper {

constexpr int kConsumerWarpgroups = kProductTile / kTile;  // warpgroups that multiply
constexpr int kConsumerWarps = kProductTile / kWarpTileRows;

// The use of a stage, to a consumer warpgroup.
struct alignas(16) Step {
  uint32_t live;    // a bit for each block of its lines; 0: there is nothing to multiply
  int batch, head;  // of the result, where the work tile ends; head -1: it goes on. batch -1: there is no step any more
  int split;        // of the splits of all copies; -1: the tile is whole
};

// kRing stages, in each of which kernels have values as they need them.
template <class T, int kN, int kRing, class Values>
struct Memory {
  static constexpr int kPanels = kN / kPanel, kStages = kRing;
  T dense[kStages][kPanels][kTileElements];
  Values values[kStages];
  T results[kConsumerWarpgroups][kPanels][kTileElements];
  Barrier full[kStages], empty[kStages];
  Step steps[kStages][kConsumerWarpgroups];
  int tokens[kStages][kConsumerWarps];  // of the result, the first of each warp's; -1 where it has none
  int2 entries[kStages];                // of the work tile: the first, and how many; of small blocks

  // By one thread, before any other comes. `copying`: how many arrive when they have begun all copies of a stage.
  __device__ void init(int copying) {
    for (int stage = 0; stage < kStages; ++stage) {
      full[stage].init(copying);
      empty[stage].init(kConsumerWarps);
    }
    fence_barrier_init();
  }
};

// Rounds a warp's 16 x kN sums and writes them to its lines of panels.
template <int kN, class T>
__device__ __forceinline__ void store_to_panels(T* panels, const float (&sums)[kN / 2]) {
  const int lane = threadIdx.x % 32, first = threadIdx.x % kWarpgroupThreads / 32 * kWarpTileRows;
#pragma unroll
  for (int j = 0; j < kN / 16; ++j) {
    uint32_t rounded[4];
    round_columns<T>(rounded, sums, j);
    store_matrices(run_of_line(panels + j / 4 * kTileElements, first + lane % 16, j % 4 * 2 + lane / 16), rounded);
  }
}

// The same transposed: its part of each panel becomes 64 lines of 16.
template <int kN, class T>
__device__ __forceinline__ void store_to_short_lines(T* panels, const float (&sums)[kN / 2]) {
  const int lane = threadIdx.x % 32;
  T* lines = panels + threadIdx.x % kWarpgroupThreads / 32 * kWarpTileRows * kPanel;
#pragma unroll
  for (int j = 0; j < kN / 16; ++j) {
    uint32_t rounded[4];
    round_columns<T>(rounded, sums, j);
    const int line = j % 4 * 16 + lane / 16 * 8 + lane % 8;
    store_matrices_transposed(
        run_of_short_line<kWarpTileRows>(lines + j / 4 * kTileElements, line, lane / 8 % 2), rounded);
  }
}

// The result as warps store it, in boxes of 16 tokens.
template <class T>
CUtensorMap result_map(const TileProduct<T>& p, const Tensor& out) {
  return p.result.transposed ? tensor_map(out, kPanel, kWarpTileRows) : tensor_map(out, kWarpTileRows);
}

// Hands over a warp's sums at the end of a work tile that is a split of its tile.
template <int kN, class T>
__device__ __forceinline__ void store_split(const TileProduct<T>& p, int split, const float (&sums)[kN / 2]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float* to = p.split(split, warp * kWarpTileRows + lane / 4) + lane % 4 * 2;
#pragma unroll
  for (int column = 0; column < kN; column += 8) {
    if (column < p.result.width) {
      const int i = column / 2;
      *reinterpret_cast<float2*>(to + column) = make_float2(sums[i], sums[i + 1]);
      *reinterpret_cast<float2*>(to + 8 * p.result.width + column) = make_float2(sums[i + 2], sums[i + 3]);
    }
  }
}

// The same of a whole tile; `token` is the first of the warp's rows in the result. Sums pass through the warpgroup's
// panels, where what a warp writes nobody else does.
template <int kN, class T>
__device__ __forceinline__ void store_result(
    const TileProduct<T>& p, T* panels, const CUtensorMap* out, const Step& step, int token,
    const float (&sums)[kN / 2]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  warp_tma_store_wait(lane);
  if (p.result.transposed) {
    store_to_short_lines<kN>(panels, sums);
  } else {
    store_to_panels<kN>(panels, sums);
  }
  fence_view_async_shared();
  __syncwarp();
  if (lane == 0) {
#pragma unroll
    for (int column = 0; column < kN; column += kPanel) {
      tma_store(
          out, panels + column / kPanel * kTileElements + warp % 4 * kWarpTileRows * kPanel,
          p.result.transposed ? token : column, p.result.transposed ? column : token, step.head, step.batch);
    }
    tma_store_arrive();
  }
}

// A consumer warp. own_blocks: of the bits of a step, those of the warp's rows.
// multiply(sums, stage, live, add): sums = or += what the stage has for the warpgroup.
// complete(sums, entries, step): what is left to do for sums that are not zeros, at the last step of a work tile.
template <int kN, class T, class M, class F, class C>
__device__ __forceinline__ void run_consumer(
    const TileProduct<T>& p, M& memory, const CUtensorMap* out, uint32_t own_blocks, const F& multiply,
    const C& complete) {
  const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32), group = warp * 32 / kWarpgroupThreads;
  float sums[kN / 2];
  uint32_t summed = 0;  // what has been live in the work tile so far
  for (PipelineState<M::kStages> pipe;; pipe.next()) {
    memory.full[pipe.index].wait(pipe.phase);
    const Step step = memory.steps[pipe.index][group];
    if (step.batch < 0) {
      break;
    }
    const int token = memory.tokens[pipe.index][warp];
    if (step.live != 0) {
      multiply(sums, pipe.index, step.live, summed != 0);
      summed |= step.live;
    }
    const int2 entries = memory.entries[pipe.index];
    warp_arrive(memory.empty[pipe.index], lane);
    if (step.head < 0) {
      continue;
    }
    const bool has_own = (summed & own_blocks) != 0;
    if (token >= 0 && has_own) {
      complete(sums, entries, step);
    }
    if (token >= 0 && step.split >= 0) {
      if (lane == 0) {
        *p.warp_tile_of_split(step.split, warp * kWarpTileRows) = has_own;
      }
      if (has_own) {
        store_split<kN>(p, step.split, sums);
      }
    } else if (token >= 0) {
      if (!has_own) {  // NaN times the zeros that stand for its blocks may be in them
#pragma unroll
        for (float& sum : sums) {
          sum = 0;
        }
      }
      store_result<kN>(p, memory.results[group][0], out, step, token, sums);
    }
    summed = 0;
  }
  if (lane == 0) {
    tma_store_wait();
  }
}

}  // namespace ds_sparse::hopper
