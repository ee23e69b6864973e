// From a warp's sums to memory: what the passes share on any GPU.

#pragma once

#include <cstdint>

#include "../common/vector.h"

namespace ds_sparse::attention {

// Rounds a warp's 16 x kN sums to T and writes them, by way of its 16 rows of shared memory at `warp_tile`; row_of(row)
// is where a row of the warp tile goes, or null.
template <int kN, int pitch, class T, class F>
__device__ __forceinline__ void store_warp_tile(
    const float (&sums)[kN / 8][4], float factor0, float factor8, T* warp_tile, int columns, const F& row_of) {
  const int lane = threadIdx.x % 32;
  __syncwarp();
#pragma unroll
  for (int n = 0; n < kN / 8; ++n) {
    T* to = warp_tile + lane / 4 * pitch + 8 * n + lane % 4 * 2;
    to[0] = T(sums[n][0] * factor0);
    to[1] = T(sums[n][1] * factor0);
    to[8 * pitch] = T(sums[n][2] * factor8);
    to[8 * pitch + 1] = T(sums[n][3] * factor8);
  }
  __syncwarp();
  constexpr int runs = kN / kRun<T>;
#pragma unroll
  for (int number = lane; number < 16 * runs; number += 32) {
    const int tile_row = number / runs, column = number % runs * kRun<T>;
    T* row = row_of(tile_row);
    if (row != nullptr && column < columns) {
      *reinterpret_cast<uint4*>(row + column) = *reinterpret_cast<const uint4*>(warp_tile + tile_row * pitch + column);
    }
  }
}

// The same in fp32, straight from registers.
template <int kN, class F>
__device__ __forceinline__ void store_sums(
    const float (&sums)[kN / 8][4], float factor0, float factor8, int columns, const F& row_of) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float* row = row_of(lane / 4 + 8 * half);
    const float factor = half ? factor8 : factor0;
    if (row == nullptr) {
      continue;
    }
#pragma unroll
    for (int n = 0; n < kN / 8; ++n) {
      const int column = 8 * n + lane % 4 * 2;
      if (column < columns) {
        *reinterpret_cast<float2*>(row + column) =
            make_float2(sums[n][2 * half] * factor, sums[n][2 * half + 1] * factor);
      }
    }
  }
}

}  // namespace ds_sparse::attention
