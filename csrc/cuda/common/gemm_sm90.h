// Shared by products with live blocks (by tiles, matmul/product_tiles.h) and of windows on Hopper: warps copy tokens
// 64 at a time into a ring of stages; warpgroups multiply, 64 rows each.

#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>

#include "hopper.h"
#include "launch.h"
#include "mma.h"
#include "tensor_map.h"
#include "vector.h"

namespace ds_sparse::hopper {

constexpr int kWarpgroupThreads = 128;
constexpr int kTile = kPanel;                  // tokens on the side of what it multiplies at once
constexpr int kTileElements = kTile * kPanel;  // of so many tokens that are one panel
constexpr int kTileBytes = kTileElements * 2;  // in 16-bit types
constexpr int kLineBytes = kPanel * 2;         // of a panel's line
constexpr int kMaxHeadDim = 2 * kPanel;        // of both operands

template <class T>
__device__ __forceinline__ uint32_t round_pair(float first, float second) {
  uint32_t pair;
  if constexpr (std::is_same_v<T, __half>) {
    reinterpret_cast<__half2&>(pair) = __floats2half2_rn(first, second);
  } else {
    reinterpret_cast<__nv_bfloat162&>(pair) = __floats2bfloat162_rn(first, second);
  }
  return pair;
}

// The j-th 16 columns of a warp's 16 lines of sums, rounded: four 8 x 8 matrices, those of the upper lines first.
template <class T, int kCount>
__device__ __forceinline__ void round_columns(uint32_t (&to)[4], const float (&sums)[kCount], int j) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    to[e] = round_pair<T>(sums[8 * j + 2 * e], sums[8 * j + 2 * e + 1]);
  }
}

// A warp's 16 rows of up to kMostDepth numbers, kept in registers while columns pass in stages.
template <class T, int kPanels>
struct RowsOfWarp {
  static constexpr int kDepth = kPanels * kPanel / 16;
  uint32_t rows[kDepth][4];

  // `first_run`: where the lane points at a run of their first 16 numbers (`load_matrices`). The stage is free then.
  __device__ __forceinline__ void read(const T* first_run) {
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      load_matrices<false>(rows[k], (shared_address(first_run) ^ k % 4 * 32) + k / 4 * kTileBytes);
    }
    // Without it a warp arrives while its reads wait behind others' stores, and the copy engine overtakes them.
    fence_view_async_shared();
  }

  // sums = rows @ columns, by all of a warpgroup.
  __device__ __forceinline__ void multiply(float (&sums)[kTile / 2], const GmmaDescriptor& columns) const {
    warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      Wgmma<T>::template from_registers<kTile, true>(
          sums, rows[k], columns.from(k / 4 * kTileBytes + k % 4 * 32), k > 0);
    }
    warpgroup_commit_batch();
    warpgroup_wait<0>();
    warpgroup_fence_operand(sums);
  }
};

// Tells if the copy engine takes (B, H, outer, inner) with `inner` adjacent.
inline bool takes_boxes(const Tensor& x) {
  bool takes = x.stride(3) == 1 && reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
  for (int dim = 0; dim < 3; ++dim) {
    takes = takes && (x.size(dim) == 1 || (x.stride(dim) > 0 && x.stride(dim) % 8 == 0));
  }
  return takes;
}

// A copy that the copy engine takes.
inline Tensor copy_for_boxes(const Tensor& x) {
  Tensor copy = empty_on(x, {x.size(0), x.size(1), x.size(2), (x.size(3) + 7) / 8 * 8});
  Tensor numbers = torch::stable::narrow(copy, 3, 0, x.size(3));
  torch::stable::copy_(numbers, x);
  return numbers;
}

// x, or a copy where the copy engine does not take it. Who chooses has seen strides, but of a traced tensor no address,
// and of one that torch.vmap widens not what it becomes.
inline Tensor readable_in_boxes(const Tensor& x) { return takes_boxes(x) ? x : copy_for_boxes(x); }

}  // namespace ds_sparse::hopper
