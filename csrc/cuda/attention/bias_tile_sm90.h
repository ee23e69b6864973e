// The part of a bias of pairs of tokens that a step needs, which the copy engine brings beside the step's tokens: in
// boxes of a block of queries by a block of keys, or, of a bias by distance, in a strip for each of these boxes.

#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "../common/mma.h"
#include "../common/tensor_map.h"
#include "distance_values.h"
#include "scheduler_sm90.h"

namespace ds_sparse::attention {

// What a kernel's stages have of it, of kQueries queries and kKeys keys. In a tile so many keys as a box has lie in a
// line, in the swizzle of its width, and the lines of all queries follow each other. Strips follow each other as their
// boxes do; small blocks have most.
template <class T, PairBias kBias, int kQueries, int kKeys, int kStages>
struct BiasTiles {};
template <class T, int kQueries, int kKeys, int kStages>
struct BiasTiles<T, PairBias::kTile, kQueries, kKeys, kStages> {
  alignas(kPanelAlignment) T biases[kStages][kQueries * kKeys];
};
template <class T, int kQueries, int kKeys, int kStages>
struct BiasTiles<T, PairBias::kStrips, kQueries, kKeys, kStages> {
  alignas(kPanelAlignment) float biases[kStages][kQueries / 16 * (kKeys / 16) * (16 + 16)];
};

// Describes it to kernels.
template <PairBias kBias>
struct BiasMap {};
template <>
struct BiasMap<PairBias::kTile> {
  CUtensorMap bias;
};
template <>
struct BiasMap<PairBias::kStrips> {
  DistanceValues values;
};

// As lists of own blocks and of the other side's say.
template <int kQueries, int kKeys>
struct BiasBoxes {
  int log_height, log_width;

  __device__ BiasBoxes(int log_query_block, int log_key_block)
      : log_height(min(log_query_block, log2_of(kQueries))), log_width(min(log_key_block, log2_of(kPanel))) {}

  // The lane's box, if it has one: its first query and key, counted in the tile.
  __device__ int2 box() const {
    const int lane = threadIdx.x % 32, boxes_of_line = kKeys >> log_width;
    return make_int2(lane / boxes_of_line << log_height, lane % boxes_of_line << log_width);
  }

  template <class T>
  static __device__ __forceinline__ int bytes(const T*) {
    return kQueries * kKeys * sizeof(T);
  }
  __device__ __forceinline__ int bytes(const float*) const {
    return (kQueries >> log_height) * (kKeys >> log_width) * length_of_strip() * sizeof(float);
  }

  // By a producer warp: `query` and `key` are those of the lane's box; one that does not exist is behind the last.
  template <class T>
  __device__ __forceinline__ void copy(
      T* tile, const BiasMap<PairBias::kTile>& map, Barrier* barrier, const Bias& bias, int query, int key, int head,
      int batch) const {
    const int2 place = box();
    if (place.x < kQueries) {
      T* to = tile + (((place.y >> log_width) * kQueries + place.x) << log_width);
      tma_load(
          to, &map.bias, barrier, key, query, bias.head_stride == 0 ? 0 : head, bias.batch_stride == 0 ? 0 : batch);
    }
  }
  // Nobody looks at what the strip of one that does not exist has, but it begins at a multiple of 16, too.
  __device__ __forceinline__ void copy(
      float* strips, const BiasMap<PairBias::kStrips>& map, Barrier* barrier, const Bias&, int query, int key, int head,
      int) const {
    const int2 place = box();
    if (place.x < kQueries) {
      const int first = (map.values.middle + key - query - (1 << log_height)) & ~15;
      bulk_load(
          strips + threadIdx.x % 32 * length_of_strip(),
          map.values.of_first_head + head * map.values.head_stride + first, length_of_strip() * int{sizeof(float)},
          barrier);
    }
  }

  // Eight neighbouring keys of a query.
  template <class T>
  __device__ __forceinline__ const T* run(const T* tile, int query, int key) const {
    const int width = 1 << log_width;
    const int place = (((key >> log_width) * kQueries + query) << log_width) + (key & (width - 1));
    // In bytes the swizzle of 128 changes bits 4 to 6 by bits 7 to 9, that of 64 two of them, that of 32 one.
    return tile + (place ^ (place >> 3 & (width - 8)));
  }

  // A strip has the distances of a box's pairs, and before them one that there is no pair of.
  __device__ __forceinline__ int length_of_strip() const { return (1 << log_height) + (1 << log_width); }
  // The number of a pair; those of its neighbours, by distance, are beside it.
  __device__ __forceinline__ const float* of_pair(const float* strips, int query, int key) const {
    const int height = 1 << log_height, width = 1 << log_width;
    const int number = (query >> log_height) * (kKeys >> log_width) + (key >> log_width);
    return strips + number * length_of_strip() + height + (key & (width - 1)) - (query & (height - 1));
  }
};

// Scales a lane's scores (of 64 tokens of the other side, with the warp tile that begins at `warp_tile`) and adds their
// part of a tile. Rows are queries, or with kTransposed keys.
template <class T, bool kTransposed, int kQueries, int kKeys>
__device__ __forceinline__ void scale_and_add_tile(
    float (&scores)[32], const T* tile, const BiasBoxes<kQueries, kKeys>& boxes, int warp_tile, float scale) {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  const int lane = threadIdx.x % 32;
  // The run that a lane points at, of the 16 x 16 numbers of a group: lines of the first eight, and the second.
  const int own = warp_tile + (kTransposed ? lane / 8 % 2 * 8 : lane % 16);
  const int other = kTransposed ? lane % 8 + lane / 16 * 8 : lane / 16 * 8;
  uint32_t pairs[4][4];
#pragma unroll
  for (int g = 0; g < 4; ++g) {
    const int its = other + 16 * g;
    load_matrices<kTransposed>(pairs[g], kTransposed ? boxes.run(tile, its, own) : boxes.run(tile, own, its));
  }
  // Whether any is so low that its sum with a score may have to be raised. -inf is, too.
  bool low = false;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    Pair least = reinterpret_cast<const Pair&>(pairs[0][0]);
#pragma unroll
    for (int i = 1; i < 16; ++i) {
      least = __hmin2(least, reinterpret_cast<const Pair&>(pairs[i / 4][i % 4]));
    }
    low = __any_sync(0xffffffffu, fminf(static_cast<float>(least.x), static_cast<float>(least.y)) < -1e22f);
  }
  const auto add = [&](const auto& added) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const Pair& pair = reinterpret_cast<const Pair&>(pairs[i / 4][i % 4]);
      scores[2 * i] = added(scores[2 * i], static_cast<float>(pair.x));
      scores[2 * i + 1] = added(scores[2 * i + 1], static_cast<float>(pair.y));
    }
  };
  if (low) {
    add([&](float score, float bias) { return biased(score * scale, bias); });
  } else {
    add([&](float score, float bias) { return fmaf(score, scale, bias); });
  }
}

// The same from strips.
template <bool kTransposed, int kQueries, int kKeys>
__device__ __forceinline__ void scale_and_add_strips(
    float (&scores)[32], const float* strips, const BiasBoxes<kQueries, kKeys>& boxes, int warp_tile, float scale) {
  const int lane = threadIdx.x % 32, ahead = lane % 4 * 2 - lane / 4;  // its first column less its first row
#pragma unroll
  for (int g = 0; g < 4; ++g) {
    const float* first = kTransposed ? boxes.of_pair(strips, 16 * g, warp_tile) - ahead
                                     : boxes.of_pair(strips, warp_tile, 16 * g) + ahead;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int further = e / 4 * 8 + e % 2 - e / 2 % 2 * 8;  // 16 x 16 pairs, of which a lane's have six distances
      scores[8 * g + e] = fmaf(scores[8 * g + e], scale, first[kTransposed ? -further : further]);
    }
  }
}

// Tells if the copy engine reads a bias, in the dtype of operands.
inline bool is_read_in_tiles(const Bias& bias) {
  const auto is_whole = [](int64_t stride) { return stride % 8 == 0; };
  return bias.kind == Bias::kSame && bias.column_stride == 1 && bias.row_stride > 0 && is_whole(bias.row_stride) &&
         is_whole(bias.head_stride) && is_whole(bias.batch_stride) && reinterpret_cast<uintptr_t>(bias.data) % 16 == 0;
}

inline CUtensorMap map_of_bias(
    const Bias& bias, ScalarType type, int64_t batch, int64_t heads, int64_t queries, int64_t keys, int height,
    int width) {
  const auto size = [](int64_t stride, int64_t count) { return static_cast<cuuint64_t>(stride == 0 ? 1 : count); };
  const auto bytes = [](int64_t stride) { return static_cast<cuuint64_t>(stride == 0 ? 16 : 2 * stride); };
  return encode_map<4>(
      bias.data, type,
      {static_cast<cuuint64_t>(keys), static_cast<cuuint64_t>(queries), size(bias.head_stride, heads),
       size(bias.batch_stride, batch)},
      {bytes(bias.row_stride), bytes(bias.head_stride), bytes(bias.batch_stride)},
      {static_cast<cuuint32_t>(width), static_cast<cuuint32_t>(height), 1, 1}, 2 * width);
}

}  // namespace ds_sparse::attention
