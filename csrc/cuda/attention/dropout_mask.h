// Draws which probabilities dropout keeps, in the order in which a warp's lanes hold products.

#pragma once

#include <cstdint>

#include "../../dropout.h"
#include "mask.h"

namespace ds_sparse::attention {

// Holds which of a lane's probabilities of a 16 x 16 square dropout keeps: in the order in which it holds products,
// ones in the half of each that is kept. Rows are queries, or with kTransposed keys.
template <bool kTransposed>
struct Kept {
  uint32_t pairs[4];

  // Draws a square of neighbouring tokens on both sides, which begin at multiples of 16; by a whole warp. kAsHalves:
  // the threshold is one of keeps_of_halves.
  template <bool kAsHalves = false>
  static __device__ __forceinline__ Kept
  of_square(const Dropout& dropout, uint32_t matrix, int first_row, int first_token) {
    const int lane = threadIdx.x % 32, tile_row = first_row + lane / 4, token = first_token + lane % 4 * 2;
    const auto keeps_of = [&](uint32_t word) {
      return kAsHalves ? dropout.keeps_of_halves(word) : dropout.keeps_of(word);
    };
    Kept kept;
    if constexpr (kTransposed) {
      // Lanes of two neighbouring keys need halves of the same two results: each makes one of them.
      const int odd = lane / 4 % 2;
      constexpr int low = 0x5410, high = 0x7632;  // halves of two words
      const Philox numbers = dropout.numbers(matrix, token + odd, tile_row);
      const int lows = odd ? 0x1054 : low, highs = odd ? 0x3276 : high;  // of both, in the order of queries
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        const uint32_t first = numbers.word[2 * below], second = numbers.word[2 * below + 1];
        const uint32_t own = __byte_perm(first, second, odd ? high : low);
        const uint32_t other = __shfl_xor_sync(0xffffffffu, __byte_perm(first, second, odd ? low : high), 4);
        kept.pairs[below] = keeps_of(__byte_perm(own, other, lows));
        kept.pairs[2 + below] = keeps_of(__byte_perm(own, other, highs));
      }
    } else {
      const Philox numbers = dropout.numbers(matrix, tile_row, token);
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        kept.pairs[pair] = keeps_of(numbers.word[pair]);
      }
    }
    return kept;
  }

  // Draws any tokens: a lane's two rows, and two neighbouring tokens from each of two.
  static __device__ __forceinline__ Kept
  of_tokens(const Dropout& dropout, uint32_t matrix, int tile_row0, int tile_row8, int low_token, int high_token) {
    Kept kept{};
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int tile_row = e % 4 < 2 ? tile_row0 : tile_row8, token = (e < 4 ? low_token : high_token) + e % 2;
      const bool keeps = kTransposed ? dropout.keeps(matrix, token, tile_row) : dropout.keeps(matrix, tile_row, token);
      kept.pairs[e / 2] |= (keeps ? 0xffffu : 0u) << e % 2 * 16;
    }
    return kept;
  }

  __device__ bool operator[](int e) const { return pairs[e / 2] >> e % 2 * 16 & 1; }
};

// The same of a warp tile and two octets, for any block.
template <bool kTransposed>
__device__ __forceinline__ Kept<kTransposed> kept_by(
    const Dropout& dropout, uint32_t matrix, int log_block, int token0, int token8, const Octet* octets) {
  if (log_block >= 4) {
    return Kept<kTransposed>::of_square(dropout, matrix, __shfl_sync(0xffffffffu, token0, 0), octets[0].token);
  }
  const int column = threadIdx.x % 4 * 2;
  return Kept<kTransposed>::of_tokens(
      dropout, matrix, token0, token8, octets[0].token + column, octets[1].token + column);
}

}  // namespace ds_sparse::attention
