// Turns the product of a query and a key into its probability: scale, biases, masks, dropout.

#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "../../checks.h"
#include "../../dropout.h"
#include "../common/logits.h"

namespace ds_sparse::attention {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kInfinity = __builtin_huge_valf();

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
    const auto add = [&](const auto* from, const auto& added) {
      from += start;
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        const int2 at = place(e);
        scores[e] = added(scores[e], from[at.x * row_stride + at.y * column_stride]);
      }
    };
    const auto with_bias = [](float score, auto bias) { return biased(score, static_cast<float>(bias)); };
    if (kind == kBool) {
      add(static_cast<const bool*>(data), [](float score, bool keeps) { return keeps ? score : -kInfinity; });
    } else if (kind == kSame) {
      add(static_cast<const T*>(data), with_bias);
    } else if (kind == kFloat) {
      add(static_cast<const float*>(data), with_bias);
    }
  }
};

// Below it exponents do not take the scale with them. `packed_attention.py` has it, too.
constexpr float kLeastPlainScale = 1e-6f;

// So many biases of keys there is space for: a multiple of 128, as the copy engine reads a step's of a block at once.
constexpr int space_of_key_bias(int keys) { return (keys + 127) / 128 * 128; }

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

// The tokens of live blocks that tokens see where a window limits them, queries and keys being the same tokens: a range
// of them each, and the first few of all, which see everything. All of it is symmetric but for causality.
struct WindowLimits {
  const Range* limits;                   // (1 or H, T); null: there is no window
  const int32_t* places;                 // (1 or H, T), by which causality goes; null: it goes by the order of tokens
  int64_t limits_stride, places_stride;  // of heads
  int num_global;

  __device__ const int32_t* places_of(int head) const { return places + head * places_stride; }
};

// The blocks of keys that queries have chosen for themselves. The rows of queries are those of tokens, so many of each
// next to each other. A sequence's first token has a position of its own, by which causality goes.
struct ChosenBlocks {
  const uint32_t* bits;                    // (L or B * L, tokens, words); null: nobody has chosen
  int64_t batch_stride, tokens, words;     // batch_stride: in heads of bits
  int heads_of_bits, log_block, log_rows;  // heads that have the same bits; rows of a token
  const void* offsets;                     // of each sequence, or null
  int64_t offset, offsets_stride;
  bool long_offsets;

  // Tells if the 16 rows of a warp tile are of tokens that may have chosen differently.
  __host__ __device__ bool differs_in_warp_tile() const { return bits != nullptr && log_rows < 4; }
  __device__ int64_t first_word(int batch, int head) const {
    return (batch * batch_stride + head / heads_of_bits) * tokens * words;
  }
  __device__ bool has(int64_t first_word, int row, int key) const {
    const int block = key >> log_block;
    return bits[first_word + (row >> log_rows) * words + block / 32] >> block % 32 & 1;
  }
  __device__ int64_t offset_of(int batch) const {
    if (offsets == nullptr) {
      return offset;
    }
    const int64_t at = batch * offsets_stride;
    return long_offsets ? static_cast<const int64_t*>(offsets)[at] : static_cast<const int32_t*>(offsets)[at];
  }
};

// What may limit the tokens that a token sees, beside lengths and their order: a window or pairs given one by one; the
// blocks chosen.
enum class Limits { kNone, kWindow, kChosen, kEither };
constexpr bool by_window(Limits limits) { return limits == Limits::kWindow || limits == Limits::kEither; }
constexpr bool by_choice(Limits limits) { return limits == Limits::kChosen || limits == Limits::kEither; }

// The options of scores and probabilities.
struct Scoring {
  float scale;
  int queries, keys;
  bool causal;
  Bias rpe, attn_mask;
  const float* key_bias;                               // space_of_key_bias; null: none
  const uint8_t* key_states;                           // of every eight keys, a KeyState
  int64_t key_bias_strides[2], key_states_strides[2];  // of batches and heads
  bool only_masks_keys;                                // every bias is 0 or -inf
  const int64_t* dropout_seed;                         // null: none
  uint32_t dropout_threshold;
  float softcap;  // 0: none
  WindowLimits window;
  ChosenBlocks chosen;

  // True where scores are products times a positive number, which exponents can take with them, or masked. Exponents of
  // others, which may be large, are differences first.
  bool plain() const { return plain_but_for_rpe() && rpe.kind == Bias::kNone && !adds_to_keys() && softcap == 0; }
  // The same without a look at rpe, at numbers added to keys, and at a soft cap.
  bool plain_but_for_rpe() const { return scale > kLeastPlainScale && attn_mask.kind == Bias::kNone; }
  bool adds_to_keys() const { return key_bias != nullptr && !only_masks_keys; }
  __host__ __device__ bool drops() const { return dropout_seed != nullptr; }

  // A score with its key's bias. kPlain: 0 or -inf, which is added: a choice would cost a pass 3 % where nothing is.
  template <bool kPlain>
  static __device__ __forceinline__ float with_key_bias(float score, float bias) {
    return kPlain ? score + bias : biased(score, bias);
  }

  // Null: none.
  __device__ const float* key_bias_of(int batch, int head) const {
    return key_bias == nullptr ? nullptr : key_bias + batch * key_bias_strides[0] + head * key_bias_strides[1];
  }
  __device__ const uint8_t* key_states_of(int batch, int head) const {
    return key_bias == nullptr ? nullptr : key_states + batch * key_states_strides[0] + head * key_states_strides[1];
  }

  __device__ bool goes_by_places() const { return causal && window.places != nullptr; }

  // The tokens of a token's window; all, and nothing, where there is none.
  __device__ Range limits_of(int head, int token) const {
    return window.limits == nullptr || token < 0 ? Range{0, INT32_MAX}
                                                 : window.limits[head * window.limits_stride + token];
  }
  __device__ int place_of(int head, int token) const {
    return window.places == nullptr || token < 0 ? 0 : window.places_of(head)[token];
  }

  // The tokens that a token of one side may see of the other by the lengths and, unless it goes by places, causality;
  // one that does not exist, -1: nothing, or whatever does not matter. kTransposed: the token is a key.
  template <bool kTransposed>
  __device__ Range range_of(int token) const {
    const bool in_order = causal && !goes_by_places();
    return kTransposed ? Range{in_order ? min(token, queries) : 0, queries}
                       : Range{0, in_order ? min(token + 1, keys) : keys};
  }
  // The same where queries may have chosen their blocks, and have positions.
  template <bool kTransposed, Limits kLimits>
  __device__ Range range_of(int batch, int token) const {
    if (!by_choice(kLimits) || chosen.bits == nullptr || !causal) {
      return range_of<kTransposed>(token);
    }
    const int64_t position = chosen.offset_of(batch);
    if (kTransposed) {
      const int64_t first = max(token - position, int64_t{0}) << chosen.log_rows;
      return {static_cast<int>(min(first, int64_t{queries})), queries};
    }
    const int64_t end = position + (token >> chosen.log_rows) + 1;
    return {0, static_cast<int>(min(max(end, int64_t{0}), int64_t{keys}))};
  }

  // The derivative of a capped score, softcap * tanh(score / softcap), by the score; 0 where it is masked.
  __device__ __forceinline__ float cap_slope(float capped) const { return slope_of_tanh(capped * inverse_softcap()); }
  static __device__ __forceinline__ float slope_of_tanh(float tanh) { return fmaxf(1 - tanh * tanh, 0.0f); }
  __device__ __forceinline__ float inverse_softcap() const { return fminf(__frcp_rn(softcap), FLT_MAX); }

  // Caps scores, or products where scale_to_cap is the scale over the cap.
  template <class T, int kCount>
  __device__ __forceinline__ void cap(float (&scores)[kCount], float scale_to_cap) const {
#pragma unroll
    for (float& score : scores) {
      score = softcap * tanh_of<T>(score * scale_to_cap);
    }
  }
  // The same, over the cap.
  template <class T, int kCount>
  static __device__ __forceinline__ void to_tanh(float (&scores)[kCount], float scale_to_cap) {
#pragma unroll
    for (float& score : scores) {
      score = tanh_of<T>(score * scale_to_cap);
    }
  }
  // With tensors of 16 bits one instruction, of 11 bits: no fewer than their formats have.
  template <class T>
  static __device__ __forceinline__ float tanh_of(float x) {
    if constexpr (sizeof(T) == 2) {
      asm("tanh.approx.f32 %0, %0;" : "+f"(x));
      return x;
    } else {
      return tanhf(x);
    }
  }

  // From products to scores, but for the bias of keys; place(e): query and key of element e, both of which exist.
  template <class T, int kCount, class F>
  __device__ __forceinline__ void finish(float (&products)[kCount], int batch, int head, const F& place) const {
#pragma unroll
    for (float& product : products) {
      product *= scale;
    }
    if (softcap > 0) {
      cap<T>(products, inverse_softcap());
    }
    rpe.add_to<T>(products, batch, head, place);
    attn_mask.add_to<T>(products, batch, head, place);
  }

  __device__ __forceinline__ Dropout dropout() const {
    return {static_cast<uint64_t>(dropout_seed[0]), static_cast<uint32_t>(dropout_seed[1]), dropout_threshold};
  }
};

// The numbers added to the scores of eight neighbouring keys: nothing, -inf to all of them, or anything else.
enum KeyState : uint8_t { kNoBias, kAllMasked, kSomeBias };

}  // namespace ds_sparse::attention
