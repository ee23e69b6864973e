// The parts of fused attention that its passes share: tiles of an operand's tokens, what happens to a score, and the
// small products between them. Tile format: ds_sparse/tiles.py; schemas and shapes: csrc/library.cpp.
//
// Every pass holds a tile of its own tokens (queries, or keys) and walks those of the other side, kTile or fewer at a
// time, gathered from as many live blocks as that takes. A warp owns 16 lines of the tile, a strip; live blocks are at
// least 8 tokens wide, so that one bit for each 8 tokens of the other side says all about lines l and one about l + 8.

#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "../checks.h"
#include "../dropout.h"
#include "launch.h"
#include "mma.h"
#include "vector.h"

namespace ds_sparse::attention {

constexpr int kTile = 64;         // tokens of a tile
constexpr int kHopperTile = 128;  // and of one on Hopper
constexpr int kThreads = 2 * kTile;  // a warp for each 16 tokens
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr float kInfinity = __builtin_huge_valf();

// Columns of an output that a thread block makes: wider ones are split over thread blocks that share the rest.
template <int kD>
constexpr int kOutputs = kD < 128 ? kD : 128;

// Tokens of the other side in a step: fewer where their lines are long, for shared memory's sake.
template <class T, int kD>
constexpr int kStep = kD * sizeof(T) <= 256 ? 64 : kD * sizeof(T) <= 512 ? 32 : 16;
constexpr int kStages = 2;

// A matrix (tokens, D) for each batch and head; strides in elements.
template <class T>
struct Matrices {
  T* data;
  int64_t batch_stride, head_stride, token_stride;

  __device__ T* of(int batch, int head) const { return data + batch * batch_stride + head * head_stride; }
};

// Tiles of one side, as Python's Tiles has them.
struct Lists {
  const int32_t* lines;
  const uint32_t* entries;
  const int4* units;
  int num_units;
  int lines_per_tile, tiles_per_head;
  int log_block, tile, sub_tiles;  // tile: its tokens; sub-tiles: of a block that is larger than a tile

  // The token at `line` of a tile or sub-tile, or -1.
  __device__ int token(int number, int sub_tile, int line) const {
    const int block = 1 << log_block;
    const int of_tile = lines[number * lines_per_tile + min(line >> log_block, lines_per_tile - 1)];
    return of_tile < 0 ? -1 : (of_tile << log_block) + ((sub_tile * tile + line) & (block - 1));
  }
};

// What a thread block does: a unit of one head, or a sub-tile of it, and perhaps a share of the output's width.
struct Work {
  int batch, head, sub_tile, share;
  int tile, first_entry, num_entries, part;
  int64_t matrix;  // batch * heads + head
  int64_t copy;    // of the layout's heads: the matrix where all heads share one, else the batch

  __device__ Work(const Lists& lists, int64_t number, int heads, int layout_heads, int shares) {
    share = number % shares;
    number /= shares;
    sub_tile = number % lists.sub_tiles;
    number /= lists.sub_tiles;
    const int4 unit = lists.units[number % lists.num_units];
    number /= lists.num_units;
    tile = unit.x;
    first_entry = unit.y;
    num_entries = unit.z;
    part = unit.w;
    copy = number;
    head = layout_heads == 1 ? number % heads : tile / lists.tiles_per_head;
    batch = layout_heads == 1 ? number / heads : number;
    matrix = int64_t{batch} * heads + head;
  }
};

// A matrix added to the scores, or bool: keeps where true. Strides of broadcast dimensions are 0.
struct Bias {
  enum Kind { kNone, kBool, kSame, kFloat };
  const void* data;
  Kind kind;
  int64_t batch_stride, head_stride, row_stride, column_stride;

  template <class T>
  __device__ __forceinline__ float at(int batch, int head, int i, int j) const {
    const int64_t place = batch * batch_stride + head * head_stride + i * row_stride + j * column_stride;
    float value;
    if (kind == kBool) {
      return static_cast<const bool*>(data)[place] ? 0.0f : -kInfinity;
    } else if (kind == kSame) {
      value = static_cast<float>(static_cast<const T*>(data)[place]);
    } else {
      value = static_cast<const float*>(data)[place];
    }
    // Finite ones are arithmetic, however large: three of them, and a factor log2(e), must not reach infinity.
    return value == -kInfinity ? value : fmaxf(value, -1e30f);
  }
};

// What is done to scores: all but `plain` are options.
struct Scoring {
  float scale;
  int queries, keys;
  bool causal;
  Bias rpe, attn_mask;
  const float* key_bias;  // null: none
  int64_t key_bias_stride;
  const int64_t* dropout_seed;  // null: none
  uint32_t dropout_threshold;

  bool plain() const {
    return scale > 0 && rpe.kind == Bias::kNone && attn_mask.kind == Bias::kNone && key_bias == nullptr &&
           dropout_seed == nullptr;
  }

  // The score, with what is added to it, of a product of query i and key j, both of which exist.
  template <class T>
  __device__ __forceinline__ float score(float product, int batch, int head, int i, int j) const {
    float x = product * scale;
    if (rpe.kind != Bias::kNone) {
      x += rpe.at<T>(batch, head, i, j);
    }
    if (attn_mask.kind != Bias::kNone) {
      x += attn_mask.at<T>(batch, head, i, j);
    }
    if (key_bias != nullptr) {
      x += key_bias[batch * key_bias_stride + j];
    }
    return x;
  }

  __device__ __forceinline__ Dropout dropout() const {
    return {static_cast<uint64_t>(dropout_seed[0]), static_cast<uint32_t>(dropout_seed[1]), dropout_threshold};
  }
};

// Lines of a tile are 16 bytes further apart than they are long, so that eight of them lie in different banks.
template <class T, int kD>
constexpr int kPitch = kD + kRun<T>;

template <class T, int kD, int kTokens>
using Tile = T[kTokens * kPitch<T, kD>];

__device__ __forceinline__ void copy_16_bytes(uint32_t to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0));
}
__device__ __forceinline__ void end_of_copies() { asm volatile("cp.async.commit_group;"); }
// Until all but the newest `kNewer` groups of this thread's copies are there.
template <int kNewer>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kNewer));
}

// Starts copies of kTokens lines, of `width` elements each, and zeros up to kD; token_of(line) is -1 where there is none.
template <int kD, int kTokens, class T, class F>
__device__ __forceinline__ void load_tile(
    T* tile, const T* data, int64_t token_stride, int width, const F& token_of) {
  constexpr int runs = kD / kRun<T>, step = kThreads / runs;
  static_assert(kThreads % runs == 0 && kTokens % step == 0 || kTokens < step);
  const int column = threadIdx.x % runs * kRun<T>, first = threadIdx.x / runs;
  const uint32_t to = shared_address(tile + first * kPitch<T, kD> + column);
#pragma unroll
  for (int i = 0; i < (kTokens + step - 1) / step; ++i) {
    const int line = first + i * step;
    if (kTokens % step == 0 || line < kTokens) {
      const int token = token_of(line);
      const bool exists = token >= 0 && column < width;
      copy_16_bytes(
          to + i * step * kPitch<T, kD> * sizeof(T), exists ? data + token * token_stride + column : data, exists);
    }
  }
}

// Eight neighbouring tokens of the other side: the first, and the lines of the tile that see them. None: 0 owners.
struct Octet {
  int token;
  uint32_t owners;
};

// The tokens of the other side that a unit walks, kTokens in a step.
template <int kTokens>
struct Other {
  const uint32_t* entries;
  int num_entries, log_block, length;  // tokens that exist

  __device__ int steps() const { return ((num_entries << log_block) + kTokens - 1) / kTokens; }

  __device__ Octet octet(int step, int number) const {
    const int place = step * kTokens + number * 8, entry = place >> log_block;
    if (entry >= num_entries) {
      return {0, 0};
    }
    const uint32_t word = entries[entry];
    return {static_cast<int>((word & 0xffffffu) << log_block) + (place & ((1 << log_block) - 1)), word >> 24};
  }

  // The token at `line` of a step, or -1.
  __device__ __forceinline__ int token(int step, int line) const {
    const int place = step * kTokens + line, entry = place >> log_block;
    if (entry >= num_entries) {
      return -1;
    }
    const int token =
        static_cast<int>((entries[entry] & 0xffffffu) << log_block) + (place & ((1 << log_block) - 1));
    return token < length ? token : -1;
  }
};

// Which of a strip's scores with kTokens tokens are live. Bit n: lines l of the strip, and bit 8 + n lines l + 8, with
// octet n; `ragged`: some elements of that octet are dropped one by one, as they do not exist or come after.
template <int kTokens>
struct Live {
  static constexpr int kOctets = kTokens / 8;
  static constexpr uint32_t kAll = ((1u << kOctets) - 1) * 0x101u;
  uint32_t bits = 0, ragged = 0;

  Live() = default;

  // By a whole warp. `whole(octet)`: whether no element of it has to be looked at.
  template <class F>
  __device__ __forceinline__ Live(const Octet* octets, int log_block, const F& whole) {
    const int lane = threadIdx.x % 32, strip = threadIdx.x / 32;
    const int number = lane % 8;
    bool flag = false;
    if (number < kOctets) {
      const Octet octet = octets[number];
      if (lane < 16) {
        const int line = min((strip * 16 + lane / 8 * 8) >> log_block, 7);
        flag = octet.owners >> (log_block >= 6 ? 0 : line) & 1;
      } else if (lane < 24) {
        flag = octet.owners != 0 && !whole(octet);
      }
    }
    const uint32_t votes = __ballot_sync(0xffffffffu, flag);
    bits = votes & 0xffffu;
    ragged = votes >> 16 & 0xffu;
  }

  __device__ bool all() const { return bits == kAll && ragged == 0; }
  __device__ bool none() const { return bits == 0; }
  // Whether any of 16 tokens counts for any line of the strip.
  __device__ bool group(int j) const { return (bits >> 2 * j & 0x303u) != 0; }
};

// Fragments of probabilities, as the left operand of the next product: a lane's sums of 16 x 16 become those of 16 x k16
// as they are in 16 bits; in fp32 two products of depth 8, whose k run 0 2 4 6 1 3 5 7.
template <class T>
struct LeftOfSums {
  uint32_t fragment[1][4];

  __device__ __forceinline__ LeftOfSums(const float (&low)[4], const float (&high)[4]) {
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

  // sums (16 x kN) += this @ lines `line` to `line` + 15 of a tile whose lines are summed over.
  template <int kN, int pitch>
  __device__ __forceinline__ void multiply_add_to(float (&sums)[kN / 8][4], const T* tile, int line, int lane) const {
#pragma unroll
    for (int n = 0; n < kN / 16; ++n) {
      typename Mma<T>::FragmentB b;
      Mma<T>::template read_b<false, pitch>(b, tile, 16 * n, line, lane);
      Mma<T>::template product<true>(sums[2 * n], fragment[0], b, 0);
      Mma<T>::template product<true>(sums[2 * n + 1], fragment[0], b, 1);
    }
  }
};

template <>
struct LeftOfSums<float> {
  float fragment[2][4];

  __device__ __forceinline__ LeftOfSums(const float (&low)[4], const float (&high)[4])
      : fragment{{low[0], low[2], low[1], low[3]}, {high[0], high[2], high[1], high[3]}} {}

  template <int kN, int pitch>
  __device__ __forceinline__ void multiply_add_to(
      float (&sums)[kN / 8][4], const float* tile, int line, int lane) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* from = tile + (line + 8 * half + 2 * (lane % 4)) * pitch + lane / 4;
#pragma unroll
      for (int n = 0; n < kN / 16; ++n) {
        const float b[4] = {from[16 * n], from[16 * n + pitch], from[16 * n + 8], from[16 * n + 8 + pitch]};
        Mma<float>::product<false>(sums[2 * n], fragment[half], b, 0);
        Mma<float>::product<false>(sums[2 * n + 1], fragment[half], b, 1);
      }
    }
  }
};

// sums (16 x 16) = the strip's lines of `own` times lines `line` to `line` + 15 of `other`, over kD columns.
template <int kD, class T>
__device__ __forceinline__ void products(float (&sums)[2][4], const T* own, const T* other, int line, int lane) {
#pragma unroll
  for (auto& tile : sums) {
#pragma unroll
    for (float& sum : tile) {
      sum = 0;
    }
  }
#pragma unroll
  for (int k = 0; k < kD; k += Mma<T>::kDepth) {
    typename Mma<T>::FragmentA a;
    typename Mma<T>::FragmentB b;
    Mma<T>::template read_a<true, kPitch<T, kD>>(a, own, 0, k, lane);
    Mma<T>::template read_b<true, kPitch<T, kD>>(b, other, line, k, lane);
    Mma<T>::template product<false>(sums[0], a, b, 0);
    Mma<T>::template product<false>(sums[1], a, b, 1);
  }
}

// What dropout multiplies a lane's 16 x 16 probabilities by: 0, or one factor. line0 and line8 are the tokens of its lines:
// queries, or with kTransposed keys.
template <bool kTransposed>
struct Kept {
  float low[4], high[4];

  __device__ __forceinline__ Kept(
      const Dropout& dropout, uint32_t matrix, int line0, int line8, int low_token, int high_token) {
    const float factor = dropout.factor();
    const auto keep = [&](uint32_t number) { return number >= dropout.threshold ? factor : 0.0f; };
    if (line8 != line0 + 8 || line0 % 16 >= 8 || high_token != low_token + 8 || low_token % 16 >= 8) {
      // Not a square of tokens that shares numbers: blocks of 8.
      const auto keep_one = [&](int line, int token) {
        const int i = kTransposed ? token : line, j = kTransposed ? line : token;
        return keep(dropout.numbers(matrix, i, j).number(Dropout::element(i, j)));
      };
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        low[e] = keep_one(e < 2 ? line0 : line8, low_token + e % 2);
        high[e] = keep_one(e < 2 ? line0 : line8, high_token + e % 2);
      }
    } else if constexpr (kTransposed) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const Philox numbers = dropout.numbers(matrix, low_token + e, line0);
        const uint32_t of_line0 = line0 % 2 ? numbers.word[1] : numbers.word[0];
        const uint32_t of_line8 = line0 % 2 ? numbers.word[3] : numbers.word[2];
        low[e] = keep(of_line0 & 0xffffu);
        high[e] = keep(of_line0 >> 16);
        low[2 + e] = keep(of_line8 & 0xffffu);
        high[2 + e] = keep(of_line8 >> 16);
      }
    } else {
      const Philox numbers = dropout.numbers(matrix, line0, low_token);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        low[e] = keep(numbers.number(e / 2 + 2 * (e % 2)));
        high[e] = keep(numbers.number(e / 2 + 2 * (e % 2) + 4));
      }
    }
  }
};

// A row's exponents, of e, have an origin near the largest of them: where that is large, their sum's logarithm would be
// lost in one number with it. {-inf, -inf} where there are none.
struct RowSum {
  float origin, log_sum;

  __device__ float lse() const { return log_sum == -kInfinity ? -kInfinity : origin + log_sum; }
};

__device__ __forceinline__ RowSum row_sum(float origin, float sum) {
  return sum > 0 ? RowSum{origin, logf(sum)} : RowSum{-kInfinity, -kInfinity};
}

// The fp32 results of the parts that units cut tiles into: (copies, parts, sub-tiles, tile, width).
struct Parts {
  float* data;
  int parts, width;

  __device__ int64_t line(const Lists& lists, int64_t copy, int part, int sub_tile) const {
    return ((copy * parts + part) * lists.sub_tiles + sub_tile) * lists.tile;
  }
};

// A line of a cut tile that a thread block combines.
struct CutLine {
  int batch, head, token, sub_tile, line, first_part, num_parts;
  int64_t matrix, copy;

  __device__ CutLine(const Lists& lists, const int32_t* cuts, int num_cuts, int heads, int layout_heads) {
    int64_t number = blockIdx.x;
    line = number % lists.tile;
    number /= lists.tile;
    sub_tile = number % lists.sub_tiles;
    number /= lists.sub_tiles;
    const int32_t* cut = cuts + number % num_cuts * 3;
    copy = number / num_cuts;
    first_part = cut[1];
    num_parts = cut[2];
    head = layout_heads == 1 ? copy % heads : cut[0] / lists.tiles_per_head;
    batch = layout_heads == 1 ? copy / heads : copy;
    matrix = int64_t{batch} * heads + head;
    token = lists.token(cut[0], sub_tile, line);
  }
};

// Sum, or maximum, over the four lanes that share a line.
__device__ __forceinline__ float sum_of_four(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
__device__ __forceinline__ float max_of_four(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Rounds a warp's 16 x kN sums to T and writes them, by way of its 16 lines of shared memory at `strip`; row_of(line) is
// where a line of the strip goes, or null.
template <int kN, int pitch, class T, class F>
__device__ __forceinline__ void store_strip(
    const float (&sums)[kN / 8][4], float factor0, float factor8, T* strip, int width, const F& row_of) {
  const int lane = threadIdx.x % 32;
  __syncwarp();
#pragma unroll
  for (int n = 0; n < kN / 8; ++n) {
    T* to = strip + lane / 4 * pitch + 8 * n + lane % 4 * 2;
    to[0] = T(sums[n][0] * factor0);
    to[1] = T(sums[n][1] * factor0);
    to[8 * pitch] = T(sums[n][2] * factor8);
    to[8 * pitch + 1] = T(sums[n][3] * factor8);
  }
  __syncwarp();
  constexpr int runs = kN / kRun<T>;
#pragma unroll
  for (int number = lane; number < 16 * runs; number += 32) {
    const int line = number / runs, column = number % runs * kRun<T>;
    T* row = row_of(line);
    if (row != nullptr && column < width) {
      *reinterpret_cast<uint4*>(row + column) = *reinterpret_cast<const uint4*>(strip + line * pitch + column);
    }
  }
}

// The same in fp32, straight from registers.
template <int kN, class F>
__device__ __forceinline__ void store_sums(
    const float (&sums)[kN / 8][4], float factor0, float factor8, int width, const F& row_of) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float* row = row_of(lane / 4 + 8 * half);
    const float factor = half ? factor8 : factor0;
    if (row == nullptr) {
      continue;
    }
#pragma unroll
    for (int n = 0; n < kN / 8; ++n) {
      const int column = 8 * n + lane % 4 * 2;
      if (column < width) {
        *reinterpret_cast<float2*>(row + column) =
            make_float2(sums[n][2 * half] * factor, sums[n][2 * half + 1] * factor);
      }
    }
  }
}

}  // namespace ds_sparse::attention
