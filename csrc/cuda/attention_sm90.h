// What the passes of fused attention share on Hopper: how tokens are gathered by the copy engine, and which of them a
// strip and a warpgroup see.
//
// A thread block stays on its multiprocessor and takes unit after unit. One warp keeps copies going, through a ring of
// stages in shared memory; two warpgroups have 64 lines of the unit's tile each, a strip of 16 for each warp.

#pragma once

#include "attention.h"
#include "hopper.h"
#include "tensor_map.h"

namespace ds_sparse::attention {

using namespace hopper;

constexpr int kConsumers = 2;  // warpgroups with kHopperTile / kConsumers lines each
constexpr int kHopperThreads = 128 * (1 + kConsumers);
// Registers of a thread that copies, and of one that multiplies.
constexpr int kFewRegisters = 24, kManyRegisters = 240;

// Lines of kD elements as panels.
template <class T, int kD, int kTokens>
using Panels = T[kD / kPanel][kTokens * kPanel];

// Which stage of a ring is next, and the parity of its round.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

__device__ __forceinline__ void arrive_once(Barrier& barrier) {
  if (threadIdx.x % 32 == 0) {
    barrier.arrive();
  }
}

// Copies by a warp: each lane has one box, a panel of up to a block's tokens.
template <class T, int kD, int kTokens>
struct Boxes {
  int panel, line, log_tokens;
  bool any;  // whether this lane has one

  __device__ explicit Boxes(int log_block) {
    constexpr int panels = kD / kPanel;
    const int lane = threadIdx.x % 32;
    log_tokens = min(log_block, log2_of(kTokens));
    panel = lane % panels;
    line = lane / panels << log_tokens;
    any = line < kTokens;
  }

  __device__ int bytes() const { return int{sizeof(T)} * kPanel << log_tokens; }

  __device__ __forceinline__ void copy(
      Panels<T, kD, kTokens>& to, const CUtensorMap* map, Barrier* barrier, int token, int head, int batch) const {
    copy_box(to[panel] + line * kPanel, map, barrier, panel * kPanel, token, head, batch);
  }
};

// A step of the other side, as the copying warp sees it: its box's first token, and a group of 16 for the first lanes.
template <int kTokens>
struct Gathered {
  int token;
  Octet group;

  // The last step may lack tokens: others take their place, which nobody sees.
  template <class B>
  __device__ __forceinline__ Gathered(const Other<kTokens>& other, const B& boxes, int step) {
    const int place = step * kTokens + boxes.line, lane = threadIdx.x % 32;
    const int entry = min(place >> other.log_block, other.num_entries - 1);
    token = static_cast<int>((other.entries[entry] & 0xffffffu) << other.log_block) + (place & ((1 << other.log_block) - 1));
    group = lane < kTokens / 16 ? other.octet(step, 2 * lane) : Octet{0, 0};
  }
};

// What a thread block does next: the copying warp looks it up, and finds the tokens, while the others are at work.
struct Task {
  Work work;
  int steps;
  int tokens[kHopperTile];  // of the tile; -1 where there is none

  // By the copying warp.
  __device__ __forceinline__ void set(const Work& next, int num_steps, const Lists& lists, int length) {
    for (int line = threadIdx.x % 32; line < kHopperTile; line += 32) {
      const int token = lists.token(next.tile, next.sub_tile, line);
      tokens[line] = token < length ? token : -1;
    }
    if (threadIdx.x % 32 == 0) {
      work = next;
      steps = num_steps;
    }
    __syncwarp();
  }
};

// The lines of a tile that a strip has, and those of its warpgroup; bits as in the entries' owners.
struct Lines {
  int strip;
  uint32_t warpgroup;

  __device__ explicit Lines(const Lists& lists) : warpgroup(0) {
    const int number = threadIdx.x / 32 - 4;
    strip = line_of(lists, 16 * number);
    for (int row = number / 4 * 64; row < number / 4 * 64 + 64; row += 16) {
      warpgroup |= 1u << line_of(lists, row);
    }
  }

 private:
  static __device__ int line_of(const Lists& lists, int row) {
    return min(row >> lists.log_block, lists.lines_per_tile - 1);
  }
};

// Bit g of each: group g of a step counts for the strip; for any of the warpgroup; has elements to look at one by one.
struct LiveGroups {
  uint32_t strip = 0, warpgroup = 0, ragged = 0;

  LiveGroups() = default;

  template <class F>
  __device__ __forceinline__ LiveGroups(const Octet* groups, int count, const Lines& lines, const F& whole) {
    const int lane = threadIdx.x % 32;
    bool flag = false;
    if (lane % 8 < count && lane < 24) {
      const Octet group = groups[lane % 8];
      flag = lane < 8    ? group.owners >> lines.strip & 1
             : lane < 16 ? (group.owners & lines.warpgroup) != 0
                         : group.owners != 0 && !whole(group.token);
    }
    const uint32_t votes = __ballot_sync(0xffffffffu, flag);
    strip = votes & 0xffu;
    warpgroup = votes >> 8 & 0xffu;
    ragged = votes >> 16 & 0xffu;
  }
};

// Which of a lane's probabilities (64 x kN) dropout keeps, a bit for each; by rows or, transposed, by columns. A strip's
// lines are neighbours, and begin at a multiple of 16.
template <int kN, bool kTransposed>
__device__ __forceinline__ uint32_t kept_by(
    const Dropout& dropout, uint32_t matrix, int token0, const Octet* groups) {
  static_assert(kN == 64);
  uint32_t bits = 0;
#pragma unroll
  for (int g = 0; g < kN / 16; ++g) {
    const int first = groups[g].token + threadIdx.x % 4 * 2;
    const Kept<kTransposed> kept(dropout, matrix, token0, token0 + 8, first, first + 8);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      bits |= (kept.low[e] != 0 ? 1u : 0u) << (8 * g + e) | (kept.high[e] != 0 ? 1u : 0u) << (8 * g + 4 + e);
    }
  }
  return bits;
}

// Keeps the compiler from using sums before they are there.
template <int kCount>
__device__ __forceinline__ void sums_are_there(float (&sums)[kCount]) {
#pragma unroll
  for (float& sum : sums) {
    asm volatile("" : "+f"(sum)::"memory");
  }
}

// Sums (64 x kN) of a warpgroup: its lines of `own` times all of `other`, over kD columns.
template <int kD, int kN, class T>
__device__ __forceinline__ void multiply_lines(
    float (&sums)[kN / 2], const Panels<T, kD, kHopperTile>& own, int warpgroup, const Panels<T, kD, kN>& other) {
#pragma unroll
  for (int k = 0; k < kD / 16; ++k) {
    const uint64_t a = descriptor(own[k / 4] + 64 * warpgroup * kPanel, 0) + k % 4 * 2;
    const uint64_t b = descriptor(other[k / 4], 0) + k % 4 * 2;
    Products<T>::template from_shared<kN, true>(sums, a, b, k > 0);
  }
}

// sums (64 x kD) += left (64 x kN, in registers) @ lines.
template <int kD, int kN, class T>
__device__ __forceinline__ void multiply_columns(
    float (&sums)[kD / 2], const uint32_t (&left)[kN / 16][4], const Panels<T, kD, kN>& lines) {
#pragma unroll
  for (int j = 0; j < kN / 16; ++j) {
    const uint64_t b = descriptor(lines[0], sizeof(lines[0])) + j * (16 * kPanel * sizeof(T) >> 4);
    Products<T>::template from_registers<kD, false>(sums, left[j], b);
  }
}

// Rounds sums to the left operand of the next product.
template <class T, int kN>
__device__ __forceinline__ void round_sums(uint32_t (&to)[kN / 16][4], const float (&sums)[kN / 2]) {
#pragma unroll
  for (int j = 0; j < kN / 16; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      to[j][e] = LeftOfSums<T>::pack(sums[8 * j + 2 * e], sums[8 * j + 2 * e + 1]);
    }
  }
}

// Writes a lane's sums of two lines, in T or fp32; row_of(half) is where they go, or null.
template <int kD, class T, class F>
__device__ __forceinline__ void store_lines(
    const float (&sums)[kD / 2], float factor0, float factor8, int width, const F& row_of) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    T* row = row_of(half);
    const float factor = half ? factor8 : factor0;
    if (row == nullptr) {
      continue;
    }
#pragma unroll
    for (int n = 0; n < kD / 8; ++n) {
      const float first = sums[4 * n + 2 * half] * factor, second = sums[4 * n + 2 * half + 1] * factor;
      if (8 * n < width) {
        if constexpr (sizeof(T) == 4) {
          *reinterpret_cast<float2*>(row + 8 * n + column) = make_float2(first, second);
        } else {
          *reinterpret_cast<uint32_t*>(row + 8 * n + column) = LeftOfSums<T>::pack(first, second);
        }
      }
    }
  }
}

}  // namespace ds_sparse::attention
