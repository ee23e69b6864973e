// Reading and writing runs of elements 16 bytes at a time, and sums over lanes.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

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
__device__ __forceinline__ Run<T, Count> load_run(const T* from, int64_t stride = 1) {
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

// Sum and maximum over `width` neighbouring lanes, a power of two up to 32; the same bits in each of them.
template <class A>
__device__ __forceinline__ A sum_of_lanes(A x, int width) {
  for (int offset = width / 2; offset > 0; offset /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, offset);
  }
  return x;
}

template <class A>
__device__ __forceinline__ A max_of_lanes(A x, int width) {
  for (int offset = width / 2; offset > 0; offset /= 2) {
    x = max(x, __shfl_xor_sync(0xffffffffu, x, offset));
  }
  return x;
}

}  // namespace ds_sparse
