// Products of a warp between tiles in shared memory, and the copies that bring these: what the passes share on any GPU.

#pragma once

#include <cstdint>
#include <type_traits>

#include "../common/copies.h"
#include "../common/launch.h"
#include "../common/mma.h"
#include "../common/vector.h"
#include "tile_lists.h"

namespace ds_sparse::attention {

// Where tokens lie in a matrix. Of queries that have chosen their keys, numbers count rows: 2**log_rows of each token.
struct TokenStrides {
  int64_t token, row;
  int log_rows;

  __device__ __forceinline__ int64_t at(int64_t number) const {
    return (number >> log_rows) * token + (number & ((1 << log_rows) - 1)) * row;
  }
};

// A matrix (tokens, D) for each batch and head; strides in elements.
template <class T>
struct Matrices {
  T* data;
  int64_t batch_stride, head_stride;
  TokenStrides tokens;

  __device__ T* of(int batch, int head) const { return data + batch * batch_stride + head * head_stride; }
};

// Rows of a tile are 16 bytes further apart than they are long, so that eight of them lie in different banks.
template <class T, int kHeadDim>
constexpr int kPitch = kHeadDim + kRun<T>;

template <class T, int kHeadDim, int kTokens>
using Tile = T[kTokens * kPitch<T, kHeadDim>];

// Starts copies of kTokens rows, of `columns` elements each, and zeros up to kHeadDim; token_of(row) is -1 where there
// is none.
template <int kHeadDim, int kTokens, class T, class F>
__device__ __forceinline__ void load_tile(
    T* tile, const T* data, const TokenStrides& tokens, int columns, const F& token_of) {
  constexpr int runs = kHeadDim / kRun<T>, step = kThreads / runs;
  static_assert(kThreads % runs == 0 && kTokens % step == 0 || kTokens < step);
  const int column = threadIdx.x % runs * kRun<T>, first = threadIdx.x / runs;
  const uint32_t to = shared_address(tile + first * kPitch<T, kHeadDim> + column);
#pragma unroll
  for (int i = 0; i < (kTokens + step - 1) / step; ++i) {
    const int tile_row = first + i * step;
    if (kTokens % step == 0 || tile_row < kTokens) {
      const int token = token_of(tile_row);
      const bool exists = token >= 0 && column < columns;
      start_copy<16>(
          to + i * step * kPitch<T, kHeadDim> * sizeof(T), exists ? data + tokens.at(token) + column : data,
          exists ? 16 : 0);
    }
  }
}

// Fragments of probabilities, as the left operand of the next product: a lane's sums of 16 x 16 become those of 16 x
// k16 as they are in 16 bits; in fp32 two products of depth 8, whose k run 0 2 4 6 1 3 5 7.
template <class T>
struct AccumulatorAsA {
  uint32_t fragment[1][4];

  __device__ __forceinline__ AccumulatorAsA(const float (&low)[4], const float (&high)[4]) {
    fragment[0][0] = pack(low[0], low[1]);
    fragment[0][1] = pack(low[2], low[3]);
    fragment[0][2] = pack(high[0], high[1]);
    fragment[0][3] = pack(high[2], high[3]);
  }

  static __device__ __forceinline__ uint32_t pack(float first, float second) {
    if constexpr (std::is_same_v<T, __half>) {
      const __half2 pair = __floats2half2_rn(first, second);
      return *reinterpret_cast<const uint32_t*>(&pair);
    } else {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
      return *reinterpret_cast<const uint32_t*>(&pair);
    }
  }

  // sums (16 x kN) += this @ rows `row` to `row` + 15 of a tile whose rows are summed over.
  template <int kN, int pitch>
  __device__ __forceinline__ void multiply_add_to(
      float (&sums)[kN / 8][4], const T* tile, int tile_row, int lane) const {
#pragma unroll
    for (int n = 0; n < kN / 16; ++n) {
      typename Mma<T>::FragmentB b;
      Mma<T>::template read_b<false, pitch>(b, tile, 16 * n, tile_row, lane);
      Mma<T>::template product<true>(sums[2 * n], fragment[0], b, 0);
      Mma<T>::template product<true>(sums[2 * n + 1], fragment[0], b, 1);
    }
  }
};

template <>
struct AccumulatorAsA<float> {
  float fragment[2][4];

  __device__ __forceinline__ AccumulatorAsA(const float (&low)[4], const float (&high)[4])
      : fragment{{low[0], low[2], low[1], low[3]}, {high[0], high[2], high[1], high[3]}} {}

  template <int kN, int pitch>
  __device__ __forceinline__ void multiply_add_to(
      float (&sums)[kN / 8][4], const float* tile, int tile_row, int lane) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* from = tile + (tile_row + 8 * half + 2 * (lane % 4)) * pitch + lane / 4;
#pragma unroll
      for (int n = 0; n < kN / 16; ++n) {
        const float b[4] = {from[16 * n], from[16 * n + pitch], from[16 * n + 8], from[16 * n + 8 + pitch]};
        Mma<float>::product<false>(sums[2 * n], fragment[half], b, 0);
        Mma<float>::product<false>(sums[2 * n + 1], fragment[half], b, 1);
      }
    }
  }
};

// sums (16 x 16) = the warp tile's rows of `own` times rows `row` to `row` + 15 of `other`, over kHeadDim columns.
template <int kHeadDim, class T>
__device__ __forceinline__ void products(float (&sums)[2][4], const T* own, const T* other, int tile_row, int lane) {
#pragma unroll
  for (auto& tile : sums) {
#pragma unroll
    for (float& sum : tile) {
      sum = 0;
    }
  }
#pragma unroll
  for (int k = 0; k < kHeadDim; k += Mma<T>::kDepth) {
    typename Mma<T>::FragmentA a;
    typename Mma<T>::FragmentB b;
    Mma<T>::template read_a<true, kPitch<T, kHeadDim>>(a, own, 0, k, lane);
    Mma<T>::template read_b<true, kPitch<T, kHeadDim>>(b, other, tile_row, k, lane);
    Mma<T>::template product<false>(sums[0], a, b, 0);
    Mma<T>::template product<false>(sums[1], a, b, 1);
  }
}

}  // namespace ds_sparse::attention
