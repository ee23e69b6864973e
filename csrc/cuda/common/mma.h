// Small matrix products of a warp on tensor cores, and the reading of their operands from shared memory.
//
// A product is 16 x 8 (m x n). Lane l holds of it rows l / 4 and l / 4 + 8, columns 2 * (l % 4) and the one after, in
// this order: PTX's accumulator fragment, the same for every type. Operands are read from tiles that lie either way
// round: `k_inner` says whether neighbours in memory are neighbours along k, the dimension that is summed; `pitch`
// elements lie between a tile's lines.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "copies.h"

namespace ds_sparse {

constexpr int kWarpTileRows = 16;  // of a warp tile: the rows that a warp has of a tile, one product's

// Four 8 x 8 matrices of 16-bit elements, whose rows lanes 8 i to 8 i + 7 point at; transposed as they arrive, or not.
template <bool kTransposed>
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t row) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row));
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row));
  }
}

template <bool kTransposed>
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], const void* row) {
  load_matrices<kTransposed>(to, shared_address(row));
}

// An 8 x 8 matrix of 16-bit elements, of which a lane has a pair, as a result of products: its transpose.
__device__ __forceinline__ uint32_t transposed(uint32_t pair) {
  uint32_t other;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(pair));
  return other;
}

__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], __half) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void multiply_add(
    float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], __nv_bfloat16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void multiply_add_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// An 8 x 8 product over 4.
__device__ __forceinline__ void multiply_add_f64(double& c0, double& c1, double a, double b) {
  asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
               : "+d"(c0), "+d"(c1)
               : "d"(a), "d"(b));
}

// Operand fragments of one product over kDepth, two neighbouring ones for b: `FragmentA` and `FragmentB`, how to read
// them, and `product(c, a, b, j)`: c += a @ (the j-th of b).
template <class T>
struct Mma {
  static constexpr int kDepth = 16;
  using FragmentA = uint32_t[4];
  using FragmentB = uint32_t[4];

  // Rows m to m + 15, k to k + 15.
  template <bool k_inner, int pitch>
  static __device__ __forceinline__ void read_a(FragmentA& to, const T* tile, int m, int k, int lane) {
    const int matrix = lane / 8, line = lane % 8;
    const int along_m = m + matrix % 2 * 8, along_k = k + matrix / 2 * 8;
    const int place = k_inner ? (along_m + line) * pitch + along_k : (along_k + line) * pitch + along_m;
    load_matrices<!k_inner>(to, tile + place);
  }

  // Columns n to n + 15.
  template <bool k_inner, int pitch>
  static __device__ __forceinline__ void read_b(FragmentB& to, const T* tile, int n, int k, int lane) {
    const int matrix = lane / 8, line = lane % 8;
    const int along_n = n + matrix / 2 * 8, along_k = k + matrix % 2 * 8;
    const int place = k_inner ? (along_n + line) * pitch + along_k : (along_k + line) * pitch + along_n;
    load_matrices<!k_inner>(to, tile + place);
  }

  template <bool kFast>
  static __device__ __forceinline__ void product(float (&c)[4], const FragmentA& a, const FragmentB& b, int j) {
    const uint32_t here[2] = {b[2 * j], b[2 * j + 1]};
    multiply_add(c, a, here, T{});
  }
};

// Element e of the fragments of 32- and 64-bit types: a is at row lane / 4 + 8 (e % 2), k lane % 4 + 4 (e / 2); b at
// column lane / 4 + 8 (e / 2), k lane % 4 + 4 (e % 2).
template <class T>
struct WideFragments {
  static constexpr int kDepth = 8;
  using FragmentA = T[4];
  using FragmentB = T[4];

  template <bool k_inner, int pitch>
  static __device__ __forceinline__ void read_a(FragmentA& to, const T* tile, int m, int k, int lane) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int along_m = m + lane / 4 + e % 2 * 8, along_k = k + lane % 4 + e / 2 * 4;
      to[e] = tile[k_inner ? along_m * pitch + along_k : along_k * pitch + along_m];
    }
  }

  template <bool k_inner, int pitch>
  static __device__ __forceinline__ void read_b(FragmentB& to, const T* tile, int n, int k, int lane) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int along_n = n + lane / 4 + e / 2 * 8, along_k = k + lane % 4 + e % 2 * 4;
      to[e] = tile[k_inner ? along_n * pitch + along_k : along_k * pitch + along_n];
    }
  }
};

__device__ __forceinline__ uint32_t round_to_tf32(float x) {
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(x));
  return rounded;
}

// Two numbers that TF32 holds and that together are x but for its last bit, or two where it is near the largest: the
// nearest one, and what is left, cut off. There are no branches, so that the compiler shares the parts among all
// products that take x.
__device__ __forceinline__ void tf32_parts(float x, uint32_t& high, uint32_t& low) {
  constexpr uint32_t kept = 0xffffe000u;
  const uint32_t bits = __float_as_uint(x);
  // Where rounding would reach infinity a number is cut off. Infinities and NaN are left to `low`, beside a finite
  // number, as infinities times a low part of 0 would be NaN.
  const bool rounds = fabsf(x) < __uint_as_float(0x7f7ff000u);
  high = rounds ? (bits + 0x1000u) & kept : bits & 0xff7fe000u;
  low = __float_as_uint(x - __uint_as_float(high)) & kept;
}

template <>
struct Mma<float> : WideFragments<float> {
  // kFast rounds operands to TF32 (10 bits of mantissa). Otherwise three products give fp32's precision (the fourth is
  // below it), and every 8 terms leave the tensor core, which rounds its own sums towards zero.
  template <bool kFast>
  static __device__ __forceinline__ void product(float (&c)[4], const FragmentA& a, const FragmentB& b, int j) {
    uint32_t a_high[4], a_low[4], b_high[2], b_low[2];
    if constexpr (kFast) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        a_high[e] = round_to_tf32(a[e]);
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        b_high[e] = round_to_tf32(b[2 * j + e]);
      }
      multiply_add_tf32(c, a_high, b_high);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        tf32_parts(a[e], a_high[e], a_low[e]);
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        tf32_parts(b[2 * j + e], b_high[e], b_low[e]);
      }
      float sum[4] = {};
      multiply_add_tf32(sum, a_low, b_high);
      multiply_add_tf32(sum, a_high, b_low);
      multiply_add_tf32(sum, a_high, b_high);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        c[e] += sum[e];
      }
    }
  }
};

template <>
struct Mma<double> : WideFragments<double> {
  template <bool kFast>
  static __device__ __forceinline__ void product(double (&c)[4], const FragmentA& a, const FragmentB& b, int j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      multiply_add_f64(c[0], c[1], a[2 * half], b[2 * j + half]);
      multiply_add_f64(c[2], c[3], a[2 * half + 1], b[2 * j + half]);
    }
  }
};

}  // namespace ds_sparse
