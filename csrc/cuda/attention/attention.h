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

#include "../../checks.h"
#include "../../dropout.h"
#include "../common/copies.h"
#include "../common/launch.h"
#include "../common/mma.h"
#include "../common/vector.h"

namespace ds_sparse::attention {

constexpr int kTile = 64;         // tokens of a tile
constexpr int kHopperTile = 128;  // and of one on Hopper
constexpr int kThreads = 2 * kTile;  // a warp for each 16 tokens
constexpr float kLog2E = 1.4426950408889634f;
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
  // (1 or H, E, tile): for each entry, a block of 64 tokens, those that a line sees. Null: all.
  const uint2* pairs;
  int64_t pairs_stride;  // of heads

  // The token at `line` of a tile or sub-tile, or -1; of so many that exist.
  __device__ int token(int number, int sub_tile, int line, int length) const {
    const int block = 1 << log_block;
    const int of_tile = lines[number * lines_per_tile + min(line >> log_block, lines_per_tile - 1)];
    const int token = of_tile < 0 ? -1 : (of_tile << log_block) + ((sub_tile * tile + line) & (block - 1));
    return token < length ? token : -1;
  }
  // Of a tile: `copy` counts matrices where all heads share a layout, else batches.
  __device__ int2 batch_and_head(int copy, int number, int heads, int layout_heads) const {
    return layout_heads == 1 ? make_int2(copy / heads, copy % heads) : make_int2(copy, number / tiles_per_head);
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
    const int2 of = lists.batch_and_head(number, tile, heads, layout_heads);
    batch = of.x;
    head = of.y;
    matrix = int64_t{batch} * heads + head;
  }
};

// A matrix added to the scores, or bool: keeps where true. Strides of broadcast dimensions are 0.
struct Bias {
  enum Kind { kNone, kBool, kSame, kFloat };
  const void* data;
  Kind kind;
  int64_t batch_stride, head_stride, row_stride, column_stride;

  // place(e): query and key of element e, both of which exist. What there is to add is asked once, and then loaded
  // together.
  template <class T, int kCount, class F>
  __device__ __forceinline__ void add_to(float (&scores)[kCount], int batch, int head, const F& place) const {
    const int64_t start = batch * batch_stride + head * head_stride;
    const auto add = [&](const auto* from, const auto& value_of) {
      from += start;
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        const int2 at = place(e);
        scores[e] += value_of(from[at.x * row_stride + at.y * column_stride]);
      }
    };
    // Finite ones are arithmetic, however large: three of them, and a factor log2(e), must not reach infinity.
    const auto finite = [](auto x) {
      const float value = static_cast<float>(x);
      return value == -kInfinity ? value : fmaxf(value, -1e30f);
    };
    if (kind == kBool) {
      add(static_cast<const bool*>(data), [](bool keeps) { return keeps ? 0.0f : -kInfinity; });
    } else if (kind == kSame) {
      add(static_cast<const T*>(data), finite);
    } else if (kind == kFloat) {
      add(static_cast<const float*>(data), finite);
    }
  }
};

// Tokens from `first` to `end` - 1; `first` is at most `end`.
struct Range {
  int first, end;

  __device__ bool has(int token) const {
    return static_cast<unsigned>(token - first) < static_cast<unsigned>(end - first);
  }
  __device__ bool has(int token, int count) const { return token >= first && token + count <= end; }
  __device__ Range within(Range other) const {
    const int from = max(first, other.first);
    return {from, max(from, min(end, other.end))};
  }
};

// What tokens see of live blocks where a window limits it, queries and keys being the same tokens: a range of them each,
// and the first few of all, which see everything. All of it is symmetric but for causality.
struct Window {
  const Range* limits;    // (1 or H, T); null: there is no window
  const int32_t* places;  // (1 or H, T), by which causality goes; null: it goes by the order of tokens
  int64_t limits_stride, places_stride;  // of heads
  int num_global;

  __device__ const int32_t* places_of(int head) const { return places + head * places_stride; }
};

// What is done to scores, and to probabilities.
struct Scoring {
  float scale;
  int queries, keys;
  bool causal;
  Bias rpe, attn_mask;
  const float* key_bias;       // null: none
  const uint8_t* key_states;   // of every eight keys, a KeyState
  int64_t key_bias_strides[2], key_states_strides[2];  // of batches and heads
  bool only_masks_keys;  // every bias is 0 or -inf
  const int64_t* dropout_seed;  // null: none
  uint32_t dropout_threshold;
  Window window;

  // Whether scores are products times a positive number, which exponents can take with them, or masked. Exponents of
  // others, which may be large, are differences first.
  bool plain() const {
    return scale > 1e-6f && rpe.kind == Bias::kNone && attn_mask.kind == Bias::kNone &&
           (key_bias == nullptr || only_masks_keys);
  }
  __host__ __device__ bool drops() const { return dropout_seed != nullptr; }

  // Null: none.
  __device__ const float* key_bias_of(int batch, int head) const {
    return key_bias == nullptr ? nullptr : key_bias + batch * key_bias_strides[0] + head * key_bias_strides[1];
  }
  __device__ const uint8_t* key_states_of(int batch, int head) const {
    return key_bias == nullptr ? nullptr : key_states + batch * key_states_strides[0] + head * key_states_strides[1];
  }

  __device__ bool goes_by_places() const { return causal && window.places != nullptr; }

  // What a token's window has; all, and nothing, where there is none.
  __device__ Range limits_of(int head, int token) const {
    return window.limits == nullptr || token < 0 ? Range{0, INT32_MAX} : window.limits[head * window.limits_stride + token];
  }
  __device__ int place_of(int head, int token) const {
    return window.places == nullptr || token < 0 ? 0 : window.places_of(head)[token];
  }

  // What a token of one side may see of the other by the lengths and, unless it goes by places, causality; one that does
  // not exist, -1: nothing, or whatever does not matter. kTransposed: the token is a key.
  template <bool kTransposed>
  __device__ Range range_of(int token) const {
    const bool in_order = causal && !goes_by_places();
    return kTransposed ? Range{in_order ? min(token, queries) : 0, queries}
                       : Range{0, in_order ? min(token + 1, keys) : keys};
  }

  // From products to scores, but for the bias of keys; place(e): query and key of element e, both of which exist.
  template <class T, int kCount, class F>
  __device__ __forceinline__ void finish(float (&products)[kCount], int batch, int head, const F& place) const {
#pragma unroll
    for (float& product : products) {
      product *= scale;
    }
    rpe.add_to<T>(products, batch, head, place);
    attn_mask.add_to<T>(products, batch, head, place);
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
      start_copy<16>(
          to + i * step * kPitch<T, kD> * sizeof(T), exists ? data + token * token_stride + column : data,
          exists ? 16 : 0);
    }
  }
}

// What is added to the scores of eight neighbouring keys: nothing, -inf to all of them, or anything else.
enum KeyState : uint8_t { kNoBias, kAllMasked, kSomeBias };

// Eight neighbouring tokens of the other side: the first, and the lines of the tile that see them. None: 0 owners.
struct Octet {
  static constexpr uint32_t kBiased = 1 << 8;  // beside the owners: some of them have a bias
  int token;
  uint32_t owners;

  __device__ void apply(KeyState state) {
    owners = state == kAllMasked ? 0 : state == kSomeBias && owners != 0 ? owners | kBiased : owners;
  }
};

// The tokens of the other side that a unit walks, kTokens in a step.
template <int kTokens>
struct Other {
  const uint32_t* entries;
  int num_entries, log_block, length;  // tokens that exist
  const uint8_t* states;               // of keys; null: nothing is added to any, or they are no keys

  __device__ int steps() const { return ((num_entries << log_block) + kTokens - 1) / kTokens; }

  __device__ Octet octet(int step, int number) const { return octets(step, number, 1); }
  // Sixteen neighbouring tokens, of blocks of 16 or more, as their first eight.
  __device__ Octet group(int step, int number) const { return octets(step, 2 * number, 2); }

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

 private:
  __device__ __forceinline__ Octet octets(int step, int number, int count) const {
    const int place = step * kTokens + number * 8, entry = place >> log_block;
    if (entry >= num_entries) {
      return {0, 0};
    }
    const uint32_t word = entries[entry];
    Octet octet{static_cast<int>((word & 0xffffffu) << log_block) + (place & ((1 << log_block) - 1)), word >> 24};
    if (octet.token >= length) {
      octet.owners = 0;
    } else if (states != nullptr) {
      const uint8_t* state = states + octet.token / 8;
      const bool alike = count == 1 || octet.token + 8 >= length || state[0] == state[1];
      octet.apply(alike ? static_cast<KeyState>(*state) : kSomeBias);
    }
    return octet;
  }
};

// Which of a strip's scores with kTokens tokens are live. Bit n: lines l of the strip, and bit 8 + n lines l + 8, with
// octet n; `ragged`: elements of that octet are looked at one by one, as some do not exist, come after or have a bias.
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
        flag = octet.owners != 0 && ((octet.owners & Octet::kBiased) != 0 || !whole(octet));
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

// What a token of one side sees of the other, element by element. kTransposed: the token is a key. Where it does not exist,
// -1, nobody looks.
template <bool kTransposed, bool kWindow>
struct Seen {
  Range range, global;
  const int32_t* places;  // null: causality does not go by them
  int place, length;

  __device__ __forceinline__ Seen(const Scoring& scoring, int head, int token)
      : Seen(scoring, head, token, scoring.limits_of(head, token), scoring.place_of(head, token)) {}

  // limits and place: the token's, as a window has them.
  __device__ __forceinline__ Seen(const Scoring& scoring, int head, int token, Range limits, int place)
      : range(scoring.template range_of<kTransposed>(token)), global{0, 0}, places(nullptr), place(place), length(0) {
    if constexpr (kWindow) {
      global = Range{0, scoring.window.num_global}.within(range);
      range = limits.within(range);
      places = scoring.goes_by_places() ? scoring.window.places_of(head) : nullptr;
      length = kTransposed ? scoring.queries : scoring.keys;
    }
  }

  // But for causality by places.
  __device__ __forceinline__ bool has(int token) const { return range.has(token) | (kWindow && global.has(token)); }
  __device__ __forceinline__ bool is_in_order(int token) const {
    return places == nullptr ||
           (kTransposed ? place <= places[min(token, length - 1)] : places[min(token, length - 1)] <= place);
  }

  // Leaves what all 16 lines of a strip see, of which lanes l and l + 16 have line l. By a whole warp.
  __device__ __forceinline__ void restrict_to_strip(bool exists) {
    const auto of_all = [&](Range own) {
      return Range{
          __reduce_max_sync(0xffffffffu, exists ? own.first : 0),
          __reduce_min_sync(0xffffffffu, exists ? own.end : INT32_MAX)};
    };
    range = of_all(range);
    global = of_all(global);
  }
  // Whether none of eight neighbouring tokens has to be looked at, as all are seen.
  __device__ __forceinline__ bool has_all(int token) const {
    return places == nullptr && (range.has(token, 8) || (kWindow && global.has(token, 8)));
  }
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

// Which of a lane's probabilities of a 16 x 16 square dropout keeps: in the order in which it holds products, ones in
// the half of each that is kept. Lines are queries, or with kTransposed keys.
template <bool kTransposed>
struct Kept {
  uint32_t pairs[4];

  // Of a square of neighbouring tokens on both sides, which begin at multiples of 16; by a whole warp.
  static __device__ __forceinline__ Kept of_square(const Dropout& dropout, uint32_t matrix, int first_line, int first_token) {
    const int lane = threadIdx.x % 32, line = first_line + lane / 4, token = first_token + lane % 4 * 2;
    Kept kept;
    if constexpr (kTransposed) {
      // Lanes of two neighbouring keys need halves of the same two results: each makes one of them.
      const int odd = lane / 4 % 2;
      constexpr int low = 0x5410, high = 0x7632;  // halves of two words
      const Philox numbers = dropout.numbers(matrix, token + odd, line);
      const int lows = odd ? 0x1054 : low, highs = odd ? 0x3276 : high;  // of both, in the order of queries
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        const uint32_t first = numbers.word[2 * below], second = numbers.word[2 * below + 1];
        const uint32_t own = __byte_perm(first, second, odd ? high : low);
        const uint32_t other = __shfl_xor_sync(0xffffffffu, __byte_perm(first, second, odd ? low : high), 4);
        kept.pairs[below] = dropout.keeps_of(__byte_perm(own, other, lows));
        kept.pairs[2 + below] = dropout.keeps_of(__byte_perm(own, other, highs));
      }
    } else {
      const Philox numbers = dropout.numbers(matrix, line, token);
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        kept.pairs[pair] = dropout.keeps_of(numbers.word[pair]);
      }
    }
    return kept;
  }

  // Of any tokens: a lane's two lines, and two neighbouring tokens from each of two.
  static __device__ __forceinline__ Kept of_tokens(
      const Dropout& dropout, uint32_t matrix, int line0, int line8, int low_token, int high_token) {
    Kept kept{};
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int line = e % 4 < 2 ? line0 : line8, token = (e < 4 ? low_token : high_token) + e % 2;
      const bool keeps = kTransposed ? dropout.keeps(matrix, token, line) : dropout.keeps(matrix, line, token);
      kept.pairs[e / 2] |= (keeps ? 0xffffu : 0u) << e % 2 * 16;
    }
    return kept;
  }

  __device__ bool operator[](int e) const { return pairs[e / 2] >> e % 2 * 16 & 1; }
};

// The same of a strip and two octets, for any block.
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

// A row's exponents, of e, have an origin near the largest of them; the sum of those exponentials. In the logarithm of
// all, a large origin would leave little of the sum. {-inf, 0} where there are none.
struct RowSum {
  float origin, sum;

  __device__ RowSum(float largest, float sum) : origin(sum > 0 ? largest : -kInfinity), sum(sum) {}
  __device__ float lse() const { return origin == -kInfinity ? -kInfinity : origin + logf(sum); }
};

// The fp32 results of the parts that units cut tiles into: (copies, parts, sub-tiles, tile, width).
struct Parts {
  float* data;
  int parts, width;

  __device__ int64_t line(const Lists& lists, int64_t copy, int part, int sub_tile) const {
    return ((copy * parts + part) * lists.sub_tiles + sub_tile) * lists.tile;
  }
};

// Neighbouring lines of a cut tile, which a thread block puts together from parts.
constexpr int kCutLines = 16;
static_assert(kTile % kCutLines == 0 && kHopperTile % kCutLines == 0);

struct CutLines {
  int batch, head, tile, sub_tile, first_line, first_part, num_parts;
  int64_t matrix, copy;

  __device__ CutLines(const Lists& lists, const int32_t* cuts, int num_cuts, int heads, int layout_heads) {
    uint32_t number = blockIdx.x;
    first_line = number % (lists.tile / kCutLines) * kCutLines;
    number /= lists.tile / kCutLines;
    sub_tile = number % lists.sub_tiles;
    number /= lists.sub_tiles;
    const int32_t* cut = cuts + number % num_cuts * 3;
    copy = number / num_cuts;
    tile = cut[0];
    first_part = cut[1];
    num_parts = cut[2];
    const int2 of = lists.batch_and_head(copy, tile, heads, layout_heads);
    batch = of.x;
    head = of.y;
    matrix = int64_t{batch} * heads + head;
  }
  // Of one of the lines, the token or -1; and its place among the lines of all parts, in one of the tile's.
  __device__ int token(const Lists& lists, int line, int length) const {
    return lists.token(tile, sub_tile, first_line + line, length);
  }
  __device__ int64_t place(const Lists& lists, const Parts& parts, int part, int line) const {
    return parts.line(lists, copy, first_part + part, sub_tile) + first_line + line;
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
