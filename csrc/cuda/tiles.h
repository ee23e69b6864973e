// The parts of a tiled matrix product: tiles that travel from device to shared memory while others are multiplied, and
// the sums in registers.

#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <type_traits>

#include "../checks.h"
#include "../compute.h"
#include "mma.h"
#include "vector.h"

namespace ds_sparse {

constexpr int kThreads = 128;  // of a thread block: four warps
constexpr int kStages = 3;     // tiles in flight or in use

// A tile has 128 bytes of each line along the summed dimension.
template <class T>
constexpr int kChunk = 128 / sizeof(T);

// Lines of a tile are 16 bytes further apart than they are long, so that eight of them lie in different banks.
template <class T>
constexpr int pitch_of(int inner) {
  return inner + kRun<T>;
}

template <class T>
constexpr int tile_elements(int outer, int inner) {
  const int one = outer * pitch_of<T>(inner), other = inner * pitch_of<T>(outer);
  return one > other ? one : other;
}

// A dense operand (B, H, tokens, depth) with any strides. `token_inner`: its tokens are neighbours in memory, else its
// depth is. `vector`: neighbours are adjacent and every run of 16 bytes is aligned.
template <class T>
struct Dense {
  const T* data;
  int64_t batch, head, token, depth;  // strides
  int64_t width;                      // elements along depth
  bool token_inner, vector;

  explicit Dense(const torch::stable::Tensor& x, bool depth_first)
      : data(static_cast<const T*>(x.const_data_ptr())),
        batch(stride(x, 0)),
        head(stride(x, 1)),
        token(stride(x, depth_first ? 3 : 2)),
        depth(stride(x, depth_first ? 2 : 3)),
        width(x.size(depth_first ? 2 : 3)),
        token_inner(depth != 1 && token == 1) {
    const int64_t outer = token_inner ? depth : token, inner = token_inner ? token : depth;
    vector = inner == 1 && reinterpret_cast<uintptr_t>(data) % 16 == 0 && outer % kRun<T> == 0 &&
             head % kRun<T> == 0 && batch % kRun<T> == 0;
  }

  __device__ int64_t inner_stride() const { return token_inner ? token : depth; }

 private:
  static int64_t stride(const torch::stable::Tensor& x, int64_t dim) {
    return x.size(dim) == 1 ? (dim < 2 ? 0 : 1) : x.stride(dim);
  }
};

// Where a run of elements is and how many of it exist; what is missing becomes zero.
template <class T>
struct Source {
  const T* from;
  int valid;
};

__device__ __forceinline__ void copy_16_bytes(void* to, const void* from, int valid_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(valid_bytes));
}
__device__ __forceinline__ void end_of_copies() { asm volatile("cp.async.commit_group;"); }
// Until all but the newest `kNewer` groups of this thread's copies are there.
template <int kNewer>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kNewer));
}

// Starts copying kOuter lines of kInner elements; `source(line, element)` says where a run is. Runs whose elements are
// `stride` apart, or not aligned, are read one by one.
template <int kOuter, int kInner, class T, class F>
__device__ __forceinline__ void load_tile(T* tile, bool vector, int64_t stride, const F& source) {
  constexpr int runs = kInner / kRun<T>, count = kOuter * runs;
  if (vector) {
#pragma unroll
    for (int i = 0; i < count; i += kThreads) {
      const int number = i + threadIdx.x;
      if (count % kThreads == 0 || number < count) {
        const int line = number / runs, element = number % runs * kRun<T>;
        const Source<T> run = source(line, element);
        copy_16_bytes(tile + line * pitch_of<T>(kInner) + element, run.from, run.valid * static_cast<int>(sizeof(T)));
      }
    }
    return;
  }
#pragma unroll 1
  for (int number = threadIdx.x; number < count; number += kThreads) {
    const int line = number / runs, element = number % runs * kRun<T>;
    const Source<T> run = source(line, element);
#pragma unroll 1
    for (int e = 0; e < kRun<T>; ++e) {
      tile[line * pitch_of<T>(kInner) + element + e] = e < run.valid ? run.from[e * stride] : T(0.0f);
    }
  }
}

// The elements of a run at `position` that exist, where `size` do in all.
template <class T>
__device__ __forceinline__ int valid_of(int64_t position, int64_t size) {
  return static_cast<int>(max(int64_t{0}, min(int64_t{kRun<T>}, size - position)));
}

// Loads kTokens x kDepth of a dense operand, either way round as it lies in memory. `element_of(token)` is the offset of
// a token's first element, or negative where there is no such token; tokens of a run are neighbours.
template <int kTokens, int kDepth, class T, class F>
__device__ __forceinline__ void load_dense(T* tile, const Dense<T>& x, int64_t first_depth, const F& element_of) {
  const auto at = [&](int token, int depth, bool token_inner) -> Source<T> {
    const int64_t element = element_of(token), along = first_depth + depth;
    const int exist = token_inner ? (along < x.width ? kRun<T> : 0) : valid_of<T>(along, x.width);
    return element < 0 || exist == 0 ? Source<T>{x.data, 0} : Source<T>{x.data + element + along * x.depth, exist};
  };
  if (x.token_inner) {
    load_tile<kDepth, kTokens>(tile, x.vector, x.token, [&](int line, int e) { return at(e, line, true); });
  } else {
    load_tile<kTokens, kDepth>(tile, x.vector, x.depth, [&](int line, int e) { return at(line, e, false); });
  }
}

// kM x kN sums, shared out over the warps.
template <class T, int kM, int kN, bool kFast>
struct Sums {
  static constexpr int kWarpRows = kM == 16 ? 1 : 2, kWarpColumns = kThreads / 32 / kWarpRows;
  static constexpr int kRows = kM / kWarpRows, kColumns = kN / kWarpColumns;  // of one warp

  Compute<T> sum[kRows / 16][kColumns / 8][4];

  static __device__ int lane() { return threadIdx.x % 32; }
  static __device__ int first_row() { return threadIdx.x / 32 / kWarpColumns * kRows; }
  static __device__ int first_column() { return threadIdx.x / 32 % kWarpColumns * kColumns; }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& row : sum) {
#pragma unroll
      for (auto& tile : row) {
#pragma unroll
        for (auto& element : tile) {
          element = 0;
        }
      }
    }
  }

  // Adds a @ b over one chunk; tiles of kM x chunk and chunk x kN, k_inner as mma.h has it.
  __device__ __forceinline__ void add(const T* a, bool a_k_inner, const T* b, bool b_k_inner) {
    using M = Mma<T>;
    const int a_pitch = pitch_of<T>(a_k_inner ? kChunk<T> : kM), b_pitch = pitch_of<T>(b_k_inner ? kChunk<T> : kN);
#pragma unroll
    for (int k = 0; k < kChunk<T>; k += M::kDepth) {
      typename M::FragmentA of_a[kRows / 16];
      typename M::FragmentB of_b[kColumns / 16];
#pragma unroll
      for (int i = 0; i < kRows / 16; ++i) {
        M::read_a(of_a[i], a, a_pitch, a_k_inner, first_row() + 16 * i, k, lane());
      }
#pragma unroll
      for (int j = 0; j < kColumns / 16; ++j) {
        M::read_b(of_b[j], b, b_pitch, b_k_inner, first_column() + 16 * j, k, lane());
      }
#pragma unroll
      for (int i = 0; i < kRows / 16; ++i) {
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
          M::template product<kFast>(sum[i][j], of_a[i], of_b[j / 2], j % 2);
        }
      }
    }
  }

  // Calls f(row, column, this sum, the next one in the row) for all of the lane's, counted from the warp's first ones.
  template <class F>
  __device__ __forceinline__ void for_each_pair(const F& f) const {
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        const int row = 16 * i + lane() / 4, column = 8 * j + lane() % 4 * 2;
        f(row, column, sum[i][j][0], sum[i][j][1]);
        f(row + 8, column, sum[i][j][2], sum[i][j][3]);
      }
    }
  }
};

template <class T>
struct alignas(2 * sizeof(T)) Pair {
  T first, second;
};

// Calls f with a zero of the element type, and whether products may be rounded to TF32.
template <class F>
void with_types(const torch::stable::Tensor& x, bool allow_tf32, const F& f) {
  switch (x.scalar_type()) {
    case ScalarType::Half:
      return f(__half{}, std::true_type{});
    case ScalarType::BFloat16:
      return f(__nv_bfloat16{}, std::true_type{});
    case ScalarType::Float:
      return allow_tf32 ? f(float{}, std::true_type{}) : f(float{}, std::false_type{});
    case ScalarType::Double:
      return f(double{}, std::true_type{});
    default:
      check(false, "matmul takes float16, bfloat16, float32 and float64 on CUDA.");
  }
}

// Calls f with the height of a tile, a compile-time number: the block's, between 16 and 64 (32 in fp64).
template <class T, class F>
void with_tile_height(int64_t block, const F& f) {
  if (block <= 16) {
    return f(std::integral_constant<int, 16>{});
  }
  if constexpr (sizeof(T) <= 4) {
    if (block >= 64) {
      return f(std::integral_constant<int, 64>{});
    }
  }
  f(std::integral_constant<int, 32>{});
}

inline int log2_of(int64_t power) {
  int log = 0;
  while (int64_t{1} << log < power) {
    ++log;
  }
  return log;
}

// Entries in a window: tokens enough to keep a thread block busy, few enough to give every multiprocessor some windows.
inline int window_size(int64_t entries_of_all_heads, int64_t block, int64_t tiles_an_entry, int64_t multiprocessors) {
  constexpr int64_t most = 2048, fewest = 256, windows_a_multiprocessor = 8;
  int64_t tokens = most;
  const int64_t all = entries_of_all_heads * block * tiles_an_entry;
  while (tokens > fewest && all / tokens < multiprocessors * windows_a_multiprocessor) {
    tokens /= 2;
  }
  return static_cast<int>(tokens > block ? tokens / block : 1);
}
constexpr int kMostListed = 2 * 2048 / 8;  // entries that a window's lines may have, with blocks of 8

}  // namespace ds_sparse
