// Reading and writing runs of elements 16 bytes at a time, and what lanes make of their elements together.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "../../compute.h"

namespace ds_sparse {

constexpr int log2_of(int64_t power) {
  int log = 0;
  while (int64_t{1} << log < power) {
    ++log;
  }
  return log;
}

// Elements of T in 16 bytes.
template <class T>
constexpr int kRun = 16 / sizeof(T);

template <class T, int Count>
struct alignas(sizeof(T) * Count) Run {
  T element[Count];
};

// Count elements, `stride` apart: one load where they are adjacent and aligned, else one by one.
template <int Count, class T>
__device__ __forceinline__ Run<T, Count> load_run(const T* from, int64_t stride) {
  Run<T, Count> run;
  if (stride == 1 && reinterpret_cast<uintptr_t>(from) % sizeof(run) == 0) {
    // As a uint4: the compiler splits 16 bytes of halves into two loads.
    if constexpr (sizeof(run) == sizeof(uint4)) {
      *reinterpret_cast<uint4*>(&run) = *reinterpret_cast<const uint4*>(from);
    } else {
      run = *reinterpret_cast<const Run<T, Count>*>(from);
    }
  } else {
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      run.element[i] = from[i * stride];
    }
  }
  return run;
}

// A run of 16 bytes at an aligned address.
template <class T>
__device__ __forceinline__ Run<T, kRun<T>> load_aligned(const T* from) {
  Run<T, kRun<T>> run;
  *reinterpret_cast<uint4*>(&run) = *reinterpret_cast<const uint4*>(from);
  return run;
}

// The same of what no kernel writes meanwhile and no other thread reads soon, as it lies in memory: halves that are
// apart take a register each.
__device__ __forceinline__ uint4 load_once(const void* from) {
  uint4 run;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(run.x), "=r"(run.y), "=r"(run.z), "=r"(run.w)
               : "l"(from));
  return run;
}

// A run's elements as numbers to compute with.
template <class T>
__device__ __forceinline__ void unpack(const uint4& run, Compute<T> (&to)[kRun<T>]) {
  const uint32_t words[] = {run.x, run.y, run.z, run.w};
#pragma unroll
  for (int i = 0; i < kRun<T>; ++i) {
    if constexpr (std::is_same_v<T, double>) {
      to[i] = __hiloint2double(words[2 * i + 1], words[2 * i]);
    } else if constexpr (std::is_same_v<T, float>) {
      to[i] = __uint_as_float(words[i]);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      to[i] = __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u);
    } else {
      const __half2_raw pair{static_cast<uint16_t>(words[i / 2]), static_cast<uint16_t>(words[i / 2] >> 16)};
      const float2 both = __half22float2(__half2(pair));
      to[i] = i % 2 == 0 ? both.x : both.y;
    }
  }
}

// Those, rounded to T.
template <class T>
__device__ __forceinline__ uint4 pack(const Compute<T> (&from)[kRun<T>]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (std::is_same_v<T, double>) {
      words[i] = i % 2 == 0 ? __double2loint(from[i / 2]) : __double2hiint(from[i / 2]);
    } else if constexpr (std::is_same_v<T, float>) {
      words[i] = __float_as_uint(from[i]);
    } else if constexpr (std::is_same_v<T, __half>) {
      reinterpret_cast<__half2&>(words[i]) = __floats2half2_rn(from[2 * i], from[2 * i + 1]);
    } else {
      reinterpret_cast<__nv_bfloat162&>(words[i]) = __floats2bfloat162_rn(from[2 * i], from[2 * i + 1]);
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// `to` is device memory and aligned to the run: our own outputs are, at every run of a block's row.
template <int Count, class T>
__device__ __forceinline__ void store_run(T* to, const Run<T, Count>& run) {
  if constexpr (sizeof(run) == sizeof(uint4)) {
    // The compiler splits it, be it of halves or of words.
    const uint4 words = *reinterpret_cast<const uint4*>(&run);
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(words.x),
                 "r"(words.y), "r"(words.z), "r"(words.w)
                 : "memory");
  } else {
    *reinterpret_cast<Run<T, Count>*>(to) = run;
  }
}

// The sum over `width` neighbouring lanes, a power of two up to 32; the same bits in each of them.
template <class A>
__device__ __forceinline__ A sum_of_lanes(A x, int width) {
  for (int offset = width / 2; offset > 0; offset /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, offset);
  }
  return x;
}

// Reduces by f(x, y) the lanes whose numbers differ in these bits alone; the same bits in each of them. The compiler
// need not know them: there is no branch, lanes take part in all exchanges and leave out those along other bits.
template <class A, class F>
__device__ __forceinline__ A combine_lanes(A x, uint32_t bits, const F& f) {
#pragma unroll
  for (uint32_t bit = 16; bit > 0; bit /= 2) {
    const A other = __shfl_xor_sync(0xffffffffu, x, bit);
    x = bits & bit ? f(x, other) : x;
  }
  return x;
}

}  // namespace ds_sparse
