// The parts of a tiled matrix product: tiles that travel from device to shared memory while others are multiplied, and
// the sums in registers.

#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <type_traits>

#include "../../checks.h"
#include "../../compute.h"
#include "copies.h"
#include "elements.h"
#include "mma.h"
#include "vector.h"

namespace ds_sparse {

constexpr int kThreads = 128;  // of a thread block: four warps
constexpr int kStages = 2;     // tiles in flight or in use; more would leave room for fewer thread blocks

// Elements along the summed dimension that a tile has: 128 bytes.
template <class T>
constexpr int kBlockK = 128 / sizeof(T);

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

// An operand that is made of blocks of `block` tokens, each with `width` elements along depth: a dense one (H, tokens,
// depth) or the stored blocks of a sparse one. Strides are in elements.
template <class T>
struct Operand {
  int64_t block_stride, token_stride, depth_stride;
  int64_t width;
  int log_block;
  bool token_inner;  // a block's tokens are neighbours in memory, else its depth is
  bool vector;       // neighbours are adjacent, runs of 16 bytes aligned, and offsets within a block fit in 32 bits

  static constexpr int64_t kMostElements = UINT32_MAX / sizeof(T);

  Operand(int64_t block, int64_t token_stride, int64_t depth_stride, int64_t width, bool aligned)
      : Operand(block, block * token_stride, token_stride, depth_stride, width, aligned) {}

  Operand(int64_t block, int64_t block_stride, int64_t token_stride, int64_t depth_stride, int64_t width, bool aligned)
      : block_stride(block_stride),
        token_stride(token_stride),
        depth_stride(depth_stride),
        width(width),
        log_block(log2_of(block)),
        token_inner(depth_stride != 1 && token_stride == 1) {
    const int64_t outer = token_inner ? depth_stride : token_stride, inner = token_inner ? token_stride : depth_stride;
    vector = aligned && inner == 1 && outer % kRun<T> == 0 && (token_inner || width % kRun<T> == 0) &&
             block_stride < kMostElements && block * token_stride + width * depth_stride < kMostElements;
  }
};

// A dense tensor (B, H, tokens, depth), or with `depth_first` (B, H, depth, tokens), any strides.
template <class T>
struct Dense : Operand<T> {
  const T* data;
  int64_t batch_stride, head_stride;

  Dense(const torch::stable::Tensor& x, int64_t block, bool depth_first)
      : Operand<T>(
            block, stride(x, depth_first ? 3 : 2), stride(x, depth_first ? 2 : 3), x.size(depth_first ? 2 : 3),
            reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0 && stride(x, 0) % kRun<T> == 0 &&
                stride(x, 1) % kRun<T> == 0),
        data(static_cast<const T*>(x.const_data_ptr())),
        batch_stride(stride(x, 0)),
        head_stride(stride(x, 1)) {}

  __device__ const T* of(int64_t batch, int64_t head) const { return data + batch * batch_stride + head * head_stride; }

 private:
  static int64_t stride(const torch::stable::Tensor& x, int64_t dim) {
    return x.size(dim) == 1 ? (dim < 2 ? 0 : 1) : x.stride(dim);
  }
};

// The same number, which the compiler then keeps in a register instead of computing it again in a loop.
__device__ __forceinline__ uint32_t keep(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Copies tiles of kTokens x kDepth of an operand into shared memory, where they lie as they do in memory. Each begins
// with a block or lies within one, so that a thread finds its runs at the same places in every tile: they are computed
// once, in bytes.
template <class T, int kTokens, int kDepth>
class TileLoader {
 public:
  __device__ explicit TileLoader(const Operand<T>& x)
      : x_(x),
        first_token_(keep(x.token_inner ? threadIdx.x % kRunsOfTokens * kRun<T> : threadIdx.x / kRunsOfDepth)),
        first_depth_(keep(x.token_inner ? threadIdx.x / kRunsOfTokens : threadIdx.x % kRunsOfDepth * kRun<T>)),
        token_step_(keep(x.token_inner ? 0 : kThreads / kRunsOfDepth)),
        depth_step_(keep(x.token_inner ? kThreads / kRunsOfTokens : 0)),
        block_bytes_(static_cast<uint32_t>(x.block_stride) * sizeof(T)),
        first_place_(keep(place(first_token_, first_depth_) * sizeof(T))),
        place_step_(keep(place(token_step_, depth_step_) * sizeof(T))) {
    const uint32_t block = 1u << x.log_block;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const uint32_t token = first_token_ + i * token_step_, depth = first_depth_ + i * depth_step_;
      block_[i] = keep(token >> x.log_block);
      offset_[i] = keep(
          ((token & (block - 1)) * static_cast<uint32_t>(x.token_stride) +
           depth * static_cast<uint32_t>(x.depth_stride)) *
          sizeof(T));
    }
  }

  // Starts copying tokens `token` and on, and depth `depth` and on. Tokens are numbered through the blocks that
  // `block_of(0)`, `block_of(1)`, ... name. What is not there becomes zero: tokens from `tokens` on, and depth from the
  // operand's width on.
  template <class F>
  __device__ __forceinline__ void operator()(
      T* tile, const T* data, int token, int tokens, int depth, const F& block_of) const {
    const int first_block = token >> x_.log_block, within = token & ((1 << x_.log_block) - 1);
    const int tokens_left = tokens - token, depth_left = static_cast<int>(min(x_.width - depth, int64_t{kDepth}));
    if (!x_.vector) {
      const T* start = data + within * x_.token_stride + depth * x_.depth_stride;
      copy_elements(tile, start, first_block, tokens_left, depth_left, block_of);
      return;
    }
    const char* start =
        reinterpret_cast<const char*>(data) + (static_cast<uint32_t>(within) * static_cast<uint32_t>(x_.token_stride) +
                                               static_cast<uint32_t>(depth) * static_cast<uint32_t>(x_.depth_stride)) *
                                                  uint32_t{sizeof(T)};
    const uint32_t to = shared_address(tile) + first_place_;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const bool exists = static_cast<int>(first_token_ + i * token_step_) < tokens_left &&
                          static_cast<int>(first_depth_ + i * depth_step_) < depth_left;
      // A block that does not exist is not read, whatever its number says.
      const uint64_t of_block = uint64_t{static_cast<uint32_t>(block_of(first_block + block_[i]))} * block_bytes_;
      start_copy<16>(to + i * place_step_, start + of_block + offset_[i], exists ? 16 : 0);
    }
  }

 private:
  static constexpr int kRunsOfTokens = kTokens / kRun<T>, kRunsOfDepth = kDepth / kRun<T>;
  static constexpr int kCopies = kTokens * kRunsOfDepth / kThreads;
  static_assert(kTokens * kRunsOfDepth % kThreads == 0);

  __device__ uint32_t place(uint32_t token, uint32_t depth) const {
    return x_.token_inner ? depth * pitch_of<T>(kTokens) + token : token * pitch_of<T>(kDepth) + depth;
  }

  template <class F>
  __device__ __forceinline__ void copy_elements(
      T* tile, const T* start, int first_block, int tokens, int width, const F& block_of) const {
#pragma unroll 1
    for (int number = threadIdx.x; number < kTokens * kDepth; number += kThreads) {
      const int token = x_.token_inner ? number % kTokens : number / kDepth;
      const int depth = x_.token_inner ? number / kTokens : number % kDepth;
      T value = T(0.0f);
      if (token < tokens && depth < width) {
        value = start
            [block_of(first_block + (token >> x_.log_block)) * x_.block_stride +
             (token & ((1 << x_.log_block) - 1)) * x_.token_stride + depth * x_.depth_stride];
      }
      tile[place(token, depth)] = value;
    }
  }

  const Operand<T>& x_;
  // The place of the thread's first run, and from each to the next; in the operand and in the tile.
  uint32_t first_token_, first_depth_, token_step_, depth_step_, block_bytes_, first_place_, place_step_;
  uint32_t block_[kCopies], offset_[kCopies];
};

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

  // Adds a @ b over one k block; tiles of kM x kBlockK and kBlockK x kN, k_inner as mma.h has it.
  __device__ __forceinline__ void add(const T* a, bool a_k_inner, const T* b, bool b_k_inner) {
    if (a_k_inner) {
      b_k_inner ? add<true, true>(a, b) : add<true, false>(a, b);
    } else {
      b_k_inner ? add<false, true>(a, b) : add<false, false>(a, b);
    }
  }

  template <bool kAInner, bool kBInner>
  __device__ __forceinline__ void add(const T* a, const T* b) {
    using M = Mma<T>;
    constexpr int a_pitch = pitch_of<T>(kAInner ? kBlockK<T> : kM), b_pitch = pitch_of<T>(kBInner ? kBlockK<T> : kN);
#pragma unroll
    for (int k = 0; k < kBlockK<T>; k += M::kDepth) {
      typename M::FragmentA of_a[kRows / 16];
      typename M::FragmentB of_b[kColumns / 16];
#pragma unroll
      for (int i = 0; i < kRows / 16; ++i) {
        M::template read_a<kAInner, a_pitch>(of_a[i], a, first_row() + 16 * i, k, lane());
      }
#pragma unroll
      for (int j = 0; j < kColumns / 16; ++j) {
        M::template read_b<kBInner, b_pitch>(of_b[j], b, first_column() + 16 * j, k, lane());
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

// Two neighbouring results, rounded to T.
template <class T>
__device__ __forceinline__ void store_pair(T* to, Compute<T> first, Compute<T> second) {
  if constexpr (std::is_same_v<T, __half>) {
    *reinterpret_cast<__half2*>(to) = __floats2half2_rn(first, second);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(first, second);
  } else {
    *reinterpret_cast<Run<T, 2>*>(to) = {first, second};
  }
}

// Calls f with a zero of the element type, and whether products may be rounded to TF32.
template <class F>
void with_types(const torch::stable::Tensor& x, bool allow_tf32, const F& f) {
  with_element<true>(x, "matmul", [&](auto zero) {
    if constexpr (std::is_same_v<decltype(zero), float>) {
      if (!allow_tf32) {
        return f(zero, std::false_type{});
      }
    }
    f(zero, std::true_type{});
  });
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

}  // namespace ds_sparse
