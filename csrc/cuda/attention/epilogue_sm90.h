// From sums to memory on Hopper, by way of panels that the copy engine reads.

#pragma once

#include <cstdint>

#include "backward.h"
#include "mainloop_sm90.h"
#include "scores_sm90.h"

namespace ds_sparse::attention {

// Writes those of 16 rows of panels, from `first` on, that have a token: the copy engine would write all 16, and with
// them the next document's. By a whole warp.
template <int kHeadDim, class T>
__device__ __forceinline__ void store_short_warp_tile(
    const T* panels, int panel_elements, int first, const int* tokens, int first_in_memory, T* to,
    const TokenStrides& in_order, int head_dim) {
  constexpr int runs = kHeadDim / 8;
#pragma unroll 1
  for (int number = lane_asked_anew(); number < 16 * runs; number += 32) {
    const int row = number / runs, run = number % runs;
    if (tokens[first + row] >= 0 && 8 * run < head_dim) {
      *reinterpret_cast<uint4*>(to + in_order.at(first_in_memory + row) + 8 * run) =
          *reinterpret_cast<const uint4*>(run_of_line(panels + run / 8 * panel_elements, first + row, run % 8));
    }
  }
  fence_view_async_shared();
  __syncwarp();
}

// Descriptions of the output: boxes as `Boxes` has them, and of packed documents also a warp tile's.
template <bool kPacked>
struct OutputMaps {
  CUtensorMap box;
};
template <>
struct OutputMaps<true> {
  CUtensorMap box, warp_tile;
};

// Stores the rows of a tile of packed documents, by the scheduler warp and the copy engine: whole boxes, and of the
// others whole warp tiles. What is left is written row by row.
template <class T, int kHeadDim>
__device__ __forceinline__ void store_packed_tile(
    const OutputMaps<true>& maps, const Boxes<T, kHeadDim, kHopperBlockM>& boxes,
    const Panels<T, kHeadDim, kHopperBlockM>& panels, const WorkItem& item, const Matrices<T>& to, int head_dim) {
  constexpr int kPanels = kHeadDim / kPanel;
  static_assert(kHopperBlockM / 16 * kPanels <= 32);
  const int lane = threadIdx.x % 32, rest_of_box = (1 << boxes.log_tokens) - 1;
  const int token = boxes.any ? item.tokens[boxes.tile_row] : -1;
  const bool is_short = token >= 0 && item.tokens[boxes.tile_row + rest_of_box] < 0;
  if (token >= 0 && !is_short) {
    boxes.store(&maps.box, panels, item.in_memory<true>(boxes.tile_row), item.work.head, item.work.batch);
    tma_store_arrive();
  }
  if (!__any_sync(0xffffffffu, is_short)) {
    return;
  }
  const int panel = lane % kPanels, tile_row = lane / kPanels * 16;
  const bool is_left =
      tile_row < kHopperBlockM && item.tokens[tile_row] >= 0 && item.tokens[tile_row | rest_of_box] < 0;
  const bool is_whole = is_left && item.tokens[tile_row + 15] >= 0;
  if (is_whole) {
    tma_store(
        &maps.warp_tile, panels[panel] + tile_row * kPanel, panel * kPanel, item.in_memory<true>(tile_row),
        item.work.head, item.work.batch);
    tma_store_arrive();
  }
  for (uint32_t left = __ballot_sync(0xffffffffu, is_left && !is_whole && panel == 0); left != 0; left &= left - 1) {
    const int first = (__ffs(left) - 1) / kPanels * 16;
    store_short_warp_tile<kHeadDim>(
        panels[0], kHopperBlockM * kPanel, first, item.tokens, item.in_memory<true>(first),
        to.of(item.work.batch, item.work.head), to.tokens, head_dim);
  }
}

// Writes a warp tile's rounded sums (16 x 64) to its rows of a panel, which begin at `row`.
template <class T>
__device__ __forceinline__ void store_rows_to_panel(T* panel, int tile_row, const uint32_t (&rounded)[4][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    store_matrices(run_of_line(panel, tile_row + lane % 16, 2 * j + lane / 16), rounded[j]);
  }
}

// Rounds a warp tile's sums (16 x kHeadDim) and writes them to its rows of panels, which are so many elements apart,
// for the copy engine to read.
template <int kHeadDim, class T>
__device__ __forceinline__ void store_warp_tile_to_panels(
    T* lines, int panel_elements, const float (&sums)[kHeadDim / 2], float factor0, float factor8) {
#pragma unroll
  for (int column = 0; column < kHeadDim; column += kPanel) {
    uint32_t rounded[4][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float factor = e % 2 ? factor8 : factor0, *pair = sums + column / 2 + 8 * j + 2 * e;
        rounded[j][e] = AccumulatorAsA<T>::pack(pair[0] * factor, pair[1] * factor);
      }
    }
    store_rows_to_panel(lines + column / kPanel * panel_elements, 0, rounded);
  }
  fence_view_async_shared();
}

// Writes a lane's sums of two rows in fp32; row_of(half) is where they go, or null.
template <int kHeadDim, class F>
__device__ __forceinline__ void store_sums(
    const float (&sums)[kHeadDim / 2], float factor0, float factor8, int head_dim, const F& row_of) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float* row = row_of(half);
    const float factor = half ? factor8 : factor0;
    if (row == nullptr) {
      continue;
    }
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
      if (8 * n < head_dim) {
        *reinterpret_cast<float2*>(row + 8 * n + column) =
            make_float2(sums[4 * n + 2 * half] * factor, sums[4 * n + 2 * half + 1] * factor);
      }
    }
  }
}

// Writes what a work tile of a sweep has summed for its own tokens: to a split, to a head's share, or to the gradient,
// by way of `rows` of panels that are so many elements apart: they are read until the first lane's stores are done.
template <int kHeadDim, Scores kScores, class T>
__device__ __forceinline__ void store_work_tile(
    const float (&sums)[kHeadDim / 2], float factor, const Backward<T>& p, const Sweep<T>& sweep, const WorkItem& item,
    T* lines, int panel_elements, const CUtensorMap* grad, const Matrices<T>& to, const SplitResults& splits,
    float* shares) {
  constexpr bool kPacked = are_packed(kScores);
  const WorkTile& work = item.work;
  const int tile_row0 = lane_row();
  note_not_finite(sums, item.tokens + tile_row0, p.state);
  if (work.split >= 0) {
    const int64_t place = splits.first_row(sweep.lists, work.copy, work.split, work.sub_tile) + tile_row0;
    store_sums<kHeadDim>(
        sums, factor, factor, p.head_dim, [&](int half) { return splits.data + (place + 8 * half) * splits.head_dim; });
  } else if (shares != nullptr) {
    store_sums<kHeadDim>(sums, factor, factor, p.head_dim, [&](int half) -> float* {
      const int token = item.tokens[tile_row0 + 8 * half];
      return token < 0 ? nullptr : shares + (work.matrix * p.scoring.keys + token) * p.head_dim;
    });
  } else {
    store_warp_tile_to_panels<kHeadDim>(lines, panel_elements, sums, factor, factor);
    __syncwarp();
    const int* tokens = item.tokens + warp_tile_row();
    const int token = tokens[0];
    if (kPacked && token >= 0 && tokens[15] < 0) {
      store_short_warp_tile<kHeadDim>(
          lines, panel_elements, 0, tokens, item.in_memory<true>(warp_tile_row()), to.of(work.batch, work.head),
          to.tokens, p.head_dim);
    } else if (threadIdx.x % 32 == 0 && token >= 0) {
      const int2 place =
          place_of_rows<limits_of(kScores)>(to.tokens, item.in_memory<kPacked>(warp_tile_row()), work.head);
#pragma unroll
      for (int panel = 0; panel < kHeadDim / kPanel; ++panel) {
        tma_store(grad, lines + panel * panel_elements, panel * kPanel, place.x, place.y, work.batch);
      }
      tma_store_arrive();
    }
  }
}

}  // namespace ds_sparse::attention
