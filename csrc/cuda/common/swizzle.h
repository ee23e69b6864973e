// Tiles in shared memory whose lines are 128 bytes: eight runs of 16 bytes, in an order of each line's own, so that a
// warp reads products' operands from different banks without space between the lines.
//
// A run's place is linear over XOR in the bits of line and run, so that a thread computes that of its first operand
// once, and all others are an XOR and an addition of constants away (`moved`). Tiles begin at multiples of 128 bytes.

#pragma once

#include <cstdint>

#include "mma.h"
#include "vector.h"

namespace ds_sparse {

constexpr int kLineBytes = 128;

// Where a run of a line is in its tile, in bytes.
__host__ __device__ constexpr uint32_t swizzled(uint32_t line, uint32_t run) {
  return line * kLineBytes + (run ^ (line & 7) ^ (line >> 3 & 3) << 1) * 16;
}

// From the address of a run to that of the one so many lines and runs on; no bit may be set in both.
__device__ __forceinline__ uint32_t moved(uint32_t address, uint32_t lines, uint32_t runs) {
  const uint32_t by = swizzled(lines, runs);
  return (address ^ by % kLineBytes) + by / kLineBytes * kLineBytes;
}

__device__ __forceinline__ float load_float(uint32_t address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}

// A run.
__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 run;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(run.x), "=r"(run.y), "=r"(run.z), "=r"(run.w)
               : "r"(address)
               : "memory");
  return run;
}
__device__ __forceinline__ void store_shared(uint32_t address, const uint4& run) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(run.x), "r"(run.y), "r"(run.z), "r"(run.w)
               : "memory");
}

// Fragments of operands that lie along k, 16 lines each. A product's columns may be any 16 lines: where they are shared
// out as `line_of_column` says, a lane's sums of kCount / 2 neighbouring products are kCount adjacent columns.
template <int kCount>
__host__ __device__ constexpr uint32_t line_of_column(uint32_t product, uint32_t column) {
  return product / (kCount / 2) * (4 * kCount) + column / 2 * kCount + product % (kCount / 2) * 2 + column % 2;
}

// A run is half of what a product sums: 8 of 16 elements, or 4 of 8 of 32 bits, whose pieces of 16 bits a lane reads
// together.
template <class T, int kCount>
struct LineFragments {
  using M = Mma<T>;

  // The lane adds this to a tile's address.
  static __device__ uint32_t place_of_a(int lane) { return swizzled(lane % 16, lane / 16); }
  static __device__ uint32_t place_of_b(int lane) {
    return swizzled(line_of_column<kCount>(lane / 16, lane % 8), lane / 8 % 2);
  }

  // Lines `line` and on, the two runs from `run` on.
  static __device__ __forceinline__ void read_a(typename M::FragmentA& to, uint32_t address, int line, int run) {
    load_matrices<false>(reinterpret_cast<uint32_t (&)[4]>(to), moved(address, line, run));
  }

  // Products `product` and the next one.
  static __device__ __forceinline__ void read_b(typename M::FragmentB& to, uint32_t address, int product, int run) {
    load_matrices<false>(
        reinterpret_cast<uint32_t (&)[4]>(to), moved(address, line_of_column<kCount>(product, 0), run));
  }
};

// Fragments of left operands whose lines lie along k: 16 columns, and as many lines as a product sums.
template <class T>
struct DepthFragments {
  using M = Mma<T>;

  // The lane adds this to a tile's address.
  static __device__ uint32_t place(int lane) { return swizzled(lane % 8 + lane / 16 * 8, lane / 8 % 2); }

  // Lines `line` and on, the 16 columns from a run on.
  static __device__ __forceinline__ void read(typename M::FragmentA& to, uint32_t address, int line, int run) {
    load_matrices<true>(to, moved(address, line, run));
  }
};

// Lane q has 2 q and the next one of eight lines, which right operands have to agree with.
template <>
struct DepthFragments<float> {
  using M = Mma<float>;

  static __device__ uint32_t place(int lane) {
    return swizzled(lane % 4 * 2, lane / 16) + lane / 4 % 4 * sizeof(float);
  }

  static __device__ __forceinline__ void read(M::FragmentA& to, uint32_t address, int line, int run) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      to[e] = load_float(moved(address, line + e / 2, run + e % 2 * 2));
    }
  }
};

}  // namespace ds_sparse
