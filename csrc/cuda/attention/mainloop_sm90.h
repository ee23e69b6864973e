// Products of warpgroups between panels in shared memory: what the passes share on Hopper.

#pragma once

#include <cstdint>

#include "mainloop.h"
#include "pipeline_sm90.h"

namespace ds_sparse::attention {

// The two warpgroups start a step's products in turns, so that one exponentiates while the other multiplies. Each takes
// as many turns.
template <bool kTakes>
struct Turns {
  int warpgroup;

  __device__ explicit Turns(int warpgroup) : warpgroup(warpgroup) {
    if (warpgroup == 1) {
      pass_on();
    }
  }
  __device__ __forceinline__ void wait() const {
    if constexpr (kTakes) {
      named_barrier_sync<2 * 128>(1 + warpgroup);
    }
  }
  __device__ __forceinline__ void pass_on() const {
    if constexpr (kTakes) {
      named_barrier_arrive<2 * 128>(2 - warpgroup);
    }
  }
};

// Sums (64 x kBlockN) of a warpgroup, or, with `add`, what it adds to them: 64 of its tile's rows times kBlockN rows,
// in panels of kTokens, over kHeadDim columns.
template <class T, int kHeadDim, int kBlockN, int kTokens, int kRows = kHopperBlockM>
__device__ __forceinline__ void multiply_rows(
    float (&sums)[kBlockN / 2], const GmmaDescriptor& left, const GmmaDescriptor& right, bool add = false) {
  constexpr int tile_row = kPanel * sizeof(T);
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) {
    // Panels of 64 columns, and 16 columns within them.
    Wgmma<T>::template from_shared<kBlockN, true>(
        sums, left.from(k / 4 * kRows * tile_row + k % 4 * 32), right.from(k / 4 * kTokens * tile_row + k % 4 * 32),
        add || k > 0);
  }
}

// sums (64 x kHeadDim) += left (64 x kBlockN, in registers) @ kBlockN rows, which lie along the sum; `right` knows how
// far apart panels are.
template <class T, int kHeadDim, int kBlockN>
__device__ __forceinline__ void multiply_columns(
    float (&sums)[kHeadDim / 2], const uint32_t (&left)[kBlockN / 16][4], const GmmaDescriptor& right) {
#pragma unroll
  for (int j = 0; j < kBlockN / 16; ++j) {
    Wgmma<T>::template from_registers<kHeadDim>(sums, left[j], right.from(j * 16 * kPanel * sizeof(T)), true);
  }
}

// The same for a warp by itself, and as slowly as products without wgmma are: sums (16 x kBlockN) of its rows, which
// begin at `row`, in the order that wgmma leaves them in.
template <class T, int kHeadDim, int kBlockN, int kRows>
__device__ __forceinline__ void multiply_warp_tile(
    float (&sums)[kBlockN / 2], const Panels<T, kHeadDim, kRows>& left, int tile_row,
    const Panels<T, kHeadDim, kBlockN>& right) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (float& sum : sums) {
    sum = 0;
  }
#pragma unroll 1
  for (int k = 0; k < kHeadDim / 16; ++k) {
    const int panel = k / 4, run = k % 4 * 2;
    uint32_t a[4];
    load_matrices<false>(a, run_of_line(left[panel], tile_row + lane % 16, run + lane / 16));
#pragma unroll
    for (int n = 0; n < kBlockN / 16; ++n) {
      uint32_t b[4];
      load_matrices<false>(b, run_of_line(right[panel], 16 * n + lane / 16 * 8 + lane % 8, run + lane / 8 % 2));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float* of_eight = sums + 8 * n + 4 * j;
        float sum[4] = {of_eight[0], of_eight[1], of_eight[2], of_eight[3]};
        Mma<T>::template product<false>(sum, a, b, j);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          of_eight[e] = sum[e];
        }
      }
    }
  }
}

// Rounds sums to the left operand of the next product.
template <class T, int kBlockN>
__device__ __forceinline__ void round_sums(uint32_t (&to)[kBlockN / 16][4], const float (&sums)[kBlockN / 2]) {
#pragma unroll
  for (int j = 0; j < kBlockN / 16; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      to[j][e] = AccumulatorAsA<T>::pack(sums[8 * j + 2 * e], sums[8 * j + 2 * e + 1]);
    }
  }
}

}  // namespace ds_sparse::attention
