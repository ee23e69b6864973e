// From sums to memory on Hopper, by way of panels that the copy engine reads.

#pragma once

#include <cstdint>

#include "backward.h"
#include "mainloop_sm90.h"

namespace ds_sparse::attention {

// Writes those of `count` rows of panels to memory whose box, of so many neighbouring rows, has no token for its last:
// the copy engine would write the box to the end. By a whole warp, between other uses of the panels by itself.
template <int kHeadDim, class T>
__device__ __forceinline__ void store_short_boxes(
    const T* panels, int panel_elements, const int* tokens, int count, int log_tokens, const BlockSpans& spans, T* to,
    int64_t token_stride, int head_dim) {
  const int runs = head_dim / 8;
#pragma unroll 1
  for (int number = threadIdx.x % 32; number < count * runs; number += 32) {
    const int tile_row = number / runs, run = number % runs;
    const int token = tokens[tile_row], last = tokens[tile_row | ((1 << log_tokens) - 1)];
    if (token >= 0 && last < 0) {
      *reinterpret_cast<uint4*>(to + spans.token(token) * token_stride + 8 * run) =
          *reinterpret_cast<const uint4*>(run_of_line(panels + run / 8 * panel_elements, tile_row, run % 8));
    }
  }
  fence_view_async_shared();
  __syncwarp();
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
template <int kHeadDim, class T>
__device__ __forceinline__ void store_work_tile(
    const float (&sums)[kHeadDim / 2], float factor, const Backward<T>& p, const Sweep<T>& sweep, const WorkItem& item,
    T* lines, int panel_elements, const CUtensorMap* grad, const Matrices<T>& to, const SplitResults& splits,
    float* shares) {
  const WorkTile& work = item.work;
  const int tile_row0 = lane_row();
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
    const BlockSpans& spans = sweep.lists.spans;
    const int* tokens = item.tokens + warp_tile_row();
    const int token = tokens[0];
    if (spans.spans != nullptr && token >= 0 && tokens[15] < 0) {
      store_short_boxes<kHeadDim>(
          lines, panel_elements, tokens, 16, 4, spans, to.of(work.batch, work.head), to.token_stride, p.head_dim);
    } else if (threadIdx.x % 32 == 0 && token >= 0) {
#pragma unroll
      for (int panel = 0; panel < kHeadDim / kPanel; ++panel) {
        tma_store(grad, lines + panel * panel_elements, panel * kPanel, spans.token(token), work.head, work.batch);
      }
      tma_store_arrive();
    }
  }
}

}  // namespace ds_sparse::attention
