// What products with live blocks on Hopper share. Warps copy tiles of 64 x 64 (copy engine) into a ring of stages, each
// warp into one of them, and say of each what is to be done with it; a warpgroup multiplies and stores, again by the
// copy engine.

#pragma once

#include <algorithm>
#include <cstdint>

#include "hopper.h"
#include "launch.h"
#include "tensor_map.h"
#include "vector.h"
#include "windows.h"

namespace ds_sparse::hopper {

constexpr int kMultiplying = 128;                    // threads that multiply
constexpr int kAllThreads = kMultiplying + 128;      // and those that copy, after them
constexpr int kTile = kPanel;                        // tokens on a tile's side
constexpr int kTileElements = kTile * kPanel;        // of a tile that is one panel
constexpr int kTileBytes = kTileElements * 2;        // in 16-bit types
constexpr int kLineBytes = kPanel * 2;               // of a panel's line
constexpr int kMostDepth = 2 * kPanel;               // numbers a token

// Thread blocks on a multiprocessor, as many as shared memory has room for.
template <int kPanels>
constexpr int kThreadBlocks = kPanels == 1 ? 3 : 2;

// The numbers in a list that belong to ascending entries, read for 32 of them at a time; by a whole warp.
class ListReader {
 public:
  __device__ explicit ListReader(const int32_t* list, int entries) : list_(list), entries_(entries) {}

  __device__ int operator[](int entry) {
    if (entry < first_ || entry >= first_ + 32) {
      first_ = entry;
      const int own = min(entry + static_cast<int>(threadIdx.x % 32), entries_ - 1);
      number_ = list_ == nullptr ? own : list_[own];
    }
    return __shfl_sync(0xffffffffu, number_, entry - first_);
  }

 private:
  const int32_t* list_;  // null: numbers are the entries'
  int entries_, first_ = -64, number_ = 0;
};

// The steps of a copying warp, which are those of its stage: to say what a step is about takes longer than to do it. A
// warp with more than one stage, or a stage with more than one warp, could come to a step two rounds ahead of the ring,
// where the parity that it waits for is that of the round before. Warps without a stage have no step.
template <int kStages>
struct OwnSteps {
  static_assert(kStages <= 4);
  const int stage = uniform((threadIdx.x - kMultiplying) / 32);
  uint32_t parity = 1;  // of the round before the stage's next
  int ahead = stage;    // how many steps of all come before its next

  __device__ bool has_none() const { return stage >= kStages; }

  // Calls f(step) for each of its own among the next `steps` of all, counted from 0.
  template <class F>
  __device__ __forceinline__ void among(int steps, const F& f) {
    for (; ahead < steps; ahead += kStages, parity ^= 1) {
      f(ahead);
    }
    ahead -= steps;
  }
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
// Until what all but the newest kNewer groups of this thread's stores read is free again.
template <int kNewer>
__device__ __forceinline__ void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kNewer) : "memory");
}

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

__device__ __forceinline__ void store_matrices_transposed(void* row, const uint32_t (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
}

// The j-th 16 columns of a warp's 16 lines of sums, rounded: four 8 x 8 matrices, those of the upper lines first.
template <class T, int kCount>
__device__ __forceinline__ void round_columns(uint32_t (&to)[4], const float (&sums)[kCount], int j) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    to[e] = round_pair<T>(sums[8 * j + 2 * e], sums[8 * j + 2 * e + 1]);
  }
}

// Rounds a warp's 16 x kN sums and writes them to panels: its lines of each, or, transposed, its columns.
template <int kN, class T>
__device__ __forceinline__ void store_to_panels(T* panels, const float (&sums)[kN / 2], bool transposed) {
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 % 4 * 16;
#pragma unroll
  for (int j = 0; j < kN / 16; ++j) {
    uint32_t rounded[4];
    round_columns<T>(rounded, sums, j);
    T* panel = panels + j / 4 * kTileElements;
    if (transposed) {
      const int line = j % 4 * 16 + lane / 16 * 8 + lane % 8;
      store_matrices_transposed(run_of_line(panel, line, first / 8 + lane / 8 % 2), rounded);
    } else {
      store_matrices(run_of_line(panel, first + lane % 16, j % 4 * 2 + lane / 16), rounded);
    }
  }
}

// Whether the copy engine takes (B, H, outer, inner) with `inner` adjacent.
inline bool takes_boxes(const Tensor& x) {
  bool takes = x.stride(3) == 1 && reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
  for (int dim = 0; dim < 3; ++dim) {
    takes = takes && (x.size(dim) == 1 || (x.stride(dim) > 0 && x.stride(dim) % 8 == 0));
  }
  return takes;
}

}  // namespace ds_sparse::hopper
