// What both kernels of sparse @ dense on Hopper share: what they know of a step, and how a warp hands over its 16 rows of a
// unit's result.

#pragma once

#include "matmul_dsd.h"
#include "matmul_sm90.h"

namespace ds_sparse::hopper {

constexpr int kStrip = 16;  // rows of a warp

// What a stage is for.
struct alignas(16) Step {
  int batch, head;   // of the result; batch -1 is the end
  int part;          // of the parts of all copies; -1: the tile is whole
  uint16_t live;     // whether there is something to multiply, or a bit for each block
  bool first, last;  // of a unit
};

// Starts a copy of a panel to a box of a tensor, after `fence_stores` of all who wrote it and a barrier.
__device__ __forceinline__ void store_box(
    const CUtensorMap* map, const void* from, int column, int token, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
      "r"(shared_address(from)), "r"(column), "r"(token), "r"(head), "r"(batch)
      : "memory");
}
__device__ __forceinline__ void end_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until what this thread's stores read is free again.
__device__ __forceinline__ void wait_for_stores() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

__device__ __forceinline__ void store_matrices_transposed(void* row, const uint32_t (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
}

// Rounds a warp's 16 x kN sums and writes them to its lines of panels.
template <int kN, class T>
__device__ __forceinline__ void store_to_panels(T* panels, const float (&sums)[kN / 2]) {
  const int lane = threadIdx.x % 32, first = threadIdx.x % kMultiplying / 32 * kStrip;
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
  T* lines = panels + threadIdx.x % kMultiplying / 32 * kStrip * kPanel;
#pragma unroll
  for (int j = 0; j < kN / 16; ++j) {
    uint32_t rounded[4];
    round_columns<T>(rounded, sums, j);
    const int line = j % 4 * 16 + lane / 16 * 8 + lane % 8;
    store_matrices_transposed(
        run_of_short_line<kStrip>(lines + j / 4 * kTileElements, line, lane / 8 % 2), rounded);
  }
}

// The result as warps store it, in boxes of 16 tokens.
template <class T>
CUtensorMap result_map(const TileProduct<T>& p, const Tensor& out) {
  return p.result.transposed ? tensor_map(out, kPanel, kStrip) : tensor_map(out, kStrip);
}

// Hands over a warp's sums at the end of a unit; `token` is the first of its rows in the result. They pass through its
// warpgroup's panels, where what a warp writes nobody else does, so that warps need not wait for each other.
template <int kN, class T>
__device__ __forceinline__ void store_sums(
    const TileProduct<T>& p, T* panels, const CUtensorMap* out, const Step& step, int token,
    const float (&sums)[kN / 2]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (step.part >= 0) {
    float* to = p.part(step.part, warp * kStrip + lane / 4) + lane % 4 * 2;
#pragma unroll
    for (int column = 0; column < kN; column += 8) {
      if (column < p.result.width) {
        const int i = column / 2;
        *reinterpret_cast<float2*>(to + column) = make_float2(sums[i], sums[i + 1]);
        *reinterpret_cast<float2*>(to + 8 * p.result.width + column) = make_float2(sums[i + 2], sums[i + 3]);
      }
    }
    return;
  }
  if (lane == 0) {
    wait_for_stores();
  }
  __syncwarp();
  if (p.result.transposed) {
    store_to_short_lines<kN>(panels, sums);
  } else {
    store_to_panels<kN>(panels, sums);
  }
  fence_stores();
  __syncwarp();
  if (lane == 0) {
#pragma unroll
    for (int column = 0; column < kN; column += kPanel) {
      store_box(
          out, panels + column / kPanel * kTileElements + warp % 4 * kStrip * kPanel,
          p.result.transposed ? token : column, p.result.transposed ? column : token, step.head, step.batch);
    }
    end_stores();
  }
}

}  // namespace ds_sparse::hopper
