// From products to scores, on Hopper: which kinds of scores have a kernel, biases, masks, dropout.

#pragma once

#include <cstdint>
#include <type_traits>

#include "bias_tile_sm90.h"
#include "dropout_mask.h"
#include "mask_sm90.h"

namespace ds_sparse::attention {

// The kinds of scores that kernels are made for: products times a positive number, which exponents can take with them,
// or masked; the same with documents packed in a row; with dropout, and biases of keys; limited token by token; all
// else; with biases of keys alone, or capped; with a bias of pairs in tiles, or by distance, and perhaps of keys; and
// in blocks that queries have chosen.
enum class Scores { kPlain, kPacked, kDropped, kLimited, kOptions, kBiased, kTiled, kByDistance, kChosen };
constexpr bool are_packed(Scores scores) { return scores == Scores::kPacked; }
constexpr bool are_plain(Scores scores) { return scores != Scores::kOptions; }
constexpr Limits limits_of(Scores scores) {
  return scores == Scores::kLimited   ? Limits::kWindow
         : scores == Scores::kChosen  ? Limits::kChosen
         : scores == Scores::kOptions ? Limits::kEither
                                      : Limits::kNone;
}
constexpr PairBias pair_bias_of(Scores scores) {
  return scores == Scores::kTiled        ? PairBias::kTile
         : scores == Scores::kByDistance ? PairBias::kStrips
                                         : PairBias::kNone;
}
constexpr bool have_pair_bias(Scores scores) { return pair_bias_of(scores) != PairBias::kNone; }
// Plain but for steps with biases: their scores are scaled first, and so are all row maxima. With a soft cap scores are
// capped in all steps, and stay over the cap, which exponents take with them.
constexpr bool may_be_biased(Scores scores) {
  return scores == Scores::kDropped || scores == Scores::kBiased || have_pair_bias(scores);
}
// Backward, statistics of rows come as columns of products.
constexpr bool take_stat_columns(Scores scores) { return are_plain(scores) && !may_be_biased(scores); }
// Thresholds of dropout are those of fp16 numbers; others are left to kOptions.
constexpr bool drops_by_halves(Scores scores) { return scores == Scores::kDropped; }
// Forward, the copy engine brings biases of keys beside the keys.
constexpr bool take_key_bias(Scores scores) { return may_be_biased(scores) && !have_pair_bias(scores); }
// For the sweep by rows, which has no kernels for dropout, biases or soft caps alone.
constexpr Scores with_any_option(Scores scores) { return may_be_biased(scores) ? Scores::kOptions : scores; }

// True where probabilities are dropped.
template <Scores kScores>
__device__ __forceinline__ bool drops(const Scoring& scoring) {
  return kScores == Scores::kDropped || (kScores == Scores::kOptions && scoring.drops());
}

// True where scores are capped.
template <Scores kScores>
__device__ __forceinline__ bool has_softcap(const Scoring& scoring) {
  return (kScores == Scores::kOptions || kScores == Scores::kBiased) && scoring.softcap > 0;
}

// Holds which of a lane's probabilities (64 x 64) dropout keeps; by rows or, transposed, by columns. A warp tile's rows
// are neighbours, and begin at a multiple of 16. kAsHalves: as of Kept.
template <bool kTransposed, bool kAsHalves>
struct KeptOfStep {
  Kept<kTransposed> squares[4];

  __device__ __forceinline__ void find(const Dropout& dropout, uint32_t matrix, int first_token, const Octet* groups) {
#pragma unroll
    for (int g = 0; g < 4; ++g) {
      squares[g] = Kept<kTransposed>::template of_square<kAsHalves>(dropout, matrix, first_token, groups[g].token);
    }
  }
  // In the order of sums.
  __device__ __forceinline__ bool operator[](int i) const { return squares[i / 8][i % 8]; }
  // Masks probabilities that are rounded.
  __device__ __forceinline__ void mask(uint32_t (&probs)[4][4]) const {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      probs[i / 4][i % 4] &= squares[i / 4].pairs[i % 4];
    }
  }
};

// From a lane's products to scores, but for the bias of keys. Rows are queries, or with kTransposed keys.
template <class T, int kBlockN, bool kPlain, bool kTransposed = false>
__device__ __forceinline__ void finish_scores(
    float (&scores)[kBlockN / 2], const Scoring& scoring, const WorkItem& item, const Octet* groups) {
  if constexpr (!kPlain) {
    const int token0 = item.tokens[lane_row()], token8 = item.tokens[lane_row() + 8];
    const int length = kTransposed ? scoring.queries : scoring.keys;
    int first[kBlockN / 16];
#pragma unroll
    for (int g = 0; g < kBlockN / 16; ++g) {
      first[g] = groups[g].token + threadIdx.x % 4 * 2;
    }
    scoring.template finish<T>(scores, item.work.batch, item.work.head, [&](int e) {
      const int mine = max(e % 4 < 2 ? token0 : token8, 0), its = min(first[e / 8] + e % 8 / 4 * 8 + e % 2, length - 1);
      return kTransposed ? make_int2(its, mine) : make_int2(mine, its);
    });
  }
}

// Leaves -inf where scores do not count: groups that are not the warp tile's, and of ragged ones what the row does not
// see. Without branches within a group, as all lanes go through it anyway. pairs: of the step; null: all that the row
// sees. kPacked: groups at the end of a document may have fewer than 16. kToldPart: those that are ragged by a bias
// alone are told apart, and need no look.
template <int kBlockN, bool kTransposed, Limits kLimits, bool kPacked = false, bool kToldPart = false>
__device__ __forceinline__ void mask_scores(
    float (&scores)[kBlockN / 2], const LiveGroups& live, const Octet* groups, const WorkItemOf<kLimits>& item,
    const Scoring& scoring, const uint2 (*pairs)[by_window(kLimits) ? kHopperBlockM : 1]) {
  constexpr uint32_t all = (1u << kBlockN / 16) - 1;
  if (live.warp_tile() != all) {
#pragma unroll
    for (int i = 0; i < kBlockN / 2; ++i) {
      scores[i] = live.warp_tile() >> i / 8 & 1 ? scores[i] : -kInfinity;
    }
  }
  if constexpr (by_window(kLimits)) {
    if (pairs != nullptr) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int block = 0; block < kBlockN / 64; ++block) {
          uint2 words = pairs[block][lane_row() + 8 * half];
          words.x >>= threadIdx.x % 4 * 2;
          words.y >>= threadIdx.x % 4 * 2;
#pragma unroll
          for (int i = 0; i < 16; ++i) {
            // A lane has two of every eight columns; a word has four times as many.
            float& score = scores[32 * block + i / 2 * 4 + 2 * half + i % 2];
            const int bit = i / 2 % 4 * 8 + i % 2;
            score = (i < 8 ? words.x : words.y) >> bit & 1 ? score : -kInfinity;
          }
        }
      }
      return;
    }
  }
  if (const uint32_t ragged = kToldPart ? live.seen_in_part() : live.ragged(); ragged != 0) {
    // A row at a time, and then what causality by places denies: registers are short. mask_of(group): of its tokens.
    const int thread =
        kPacked ? consumer_thread() : threadIdx.x % kConsumerGroupThreads;  // packed, registers are shorter
    const auto keep = [&](int half, const auto& mask_of) {
#pragma unroll
      for (int g = 0; g < kBlockN / 16; ++g) {
        if (ragged >> g & 1) {
          const auto sees = mask_of(groups[g]);
          const int first = groups[g].token + thread % 4 * 2;
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float& score = scores[8 * g + e / 2 * 4 + 2 * half + e % 2];
            score = sees(first + e / 2 * 8 + e % 2) ? score : -kInfinity;
          }
        }
      }
    };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int tile_row = lane_row(thread) + 8 * half;
      if constexpr (kPacked) {
        const int row_end = scoring.causal ? item.tokens[tile_row] + 1 : INT32_MAX;
        keep(half, [&](const Octet& group) {
          const int left = group.owners >> Octet::kLeft, end = left == 0 ? row_end : min(row_end, group.token + left);
          return [=](int token) { return token < end; };
        });
      } else {
        const auto token_mask = item.template mask_of<kTransposed>(tile_row, scoring);
        keep(half, [&](const Octet&) { return [&](int token) { return token_mask.has(token); }; });
      }
    }
    if constexpr (by_window(kLimits)) {
      if (scoring.goes_by_places()) {
        for (int half = 0; half < 2; ++half) {
          const auto token_mask = item.template mask_of<kTransposed>(lane_row() + 8 * half, scoring);
          keep(half, [&](const Octet&) { return [&](int token) { return token_mask.is_in_order(token); }; });
        }
      }
    }
    if constexpr (by_choice(kLimits)) {
      if (scoring.chosen.differs_in_warp_tile()) {
        for (int half = 0; half < 2; ++half) {
          const auto token_mask = item.template mask_of<kTransposed>(lane_row() + 8 * half, scoring);
          if constexpr (kTransposed) {
            keep(half, [&](const Octet&) { return [&](int token) { return token_mask.has_chosen(token); }; });
          } else {  // a group is of one block
            keep(half, [&](const Octet& group) {
              const bool chosen = token_mask.has_chosen(group.token);
              return [=](int) { return chosen; };
            });
          }
        }
      }
    }
  }
}

// Adds the bias of keys, which is not 0 in ragged groups only, where these are the other side.
template <int kBlockN, bool kPlain>
__device__ __forceinline__ void add_key_bias(
    float (&scores)[kBlockN / 2], const LiveGroups& live, const Octet* groups, const Scoring& scoring,
    const WorkTile& work) {
  if (scoring.key_bias != nullptr && live.ragged() != 0) {
    const float* key_bias = scoring.key_bias_of(work.batch, work.head);
#pragma unroll
    for (int g = 0; g < kBlockN / 16; ++g) {
      if (live.ragged() >> g & 1) {
        const int first = groups[g].token + threadIdx.x % 4 * 2;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (e % 4 < 2) {
            const float bias = key_bias[min(first + e / 4 * 8 + e % 2, scoring.keys - 1)];
            float &score0 = scores[8 * g + e], &score8 = scores[8 * g + e + 2];
            score0 = Scoring::with_key_bias<kPlain>(score0, bias);
            score8 = Scoring::with_key_bias<kPlain>(score8, bias);
          }
        }
      }
    }
  }
}

// Scales the scores and adds the bias of keys, where these are the other side; biases: of the step, in shared memory.
template <int kBlockN>
__device__ __forceinline__ void scale_and_add_key_bias(
    float (&scores)[kBlockN / 2], const float (&biases)[kBlockN], float scale) {
  const float* mine = biases + threadIdx.x % 4 * 2;
#pragma unroll
  for (int n = 0; n < kBlockN / 8; ++n) {
    const float2 bias = *reinterpret_cast<const float2*>(mine + 8 * n);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      scores[4 * n + e] = fmaf(scores[4 * n + e], scale, e % 2 ? bias.y : bias.x);
    }
  }
}

// Scales a lane's scores and adds what a stage has of a bias of pairs; as of scale_and_add_tile.
template <class T, PairBias kBias, bool kTransposed, class B, class Boxes>
__device__ __forceinline__ void scale_and_add_pair_bias(
    float (&scores)[32], const B* biases, const Boxes& boxes, int warp_tile, float scale) {
  if constexpr (kBias == PairBias::kTile) {
    scale_and_add_tile<T, kTransposed>(scores, biases, boxes, warp_tile, scale);
  } else {
    scale_and_add_strips<kTransposed>(scores, biases, boxes, warp_tile, scale);
  }
}

// Exponents take soft caps between these with them. Far above, fp32 would round exponents of capped scores by more than
// their differences; far below, the scale over the cap is no number.
constexpr float kLeastPlainCap = 1e-30f, kLargestPlainCap = 1e4f, kLargestScaleToCap = 1e30f;

// The kind that a call's scores are of.
inline Scores scores_of(const Scoring& scoring, const TileLists& lists) {
  const bool chosen = scoring.chosen.bits != nullptr;
  const bool limited = chosen || scoring.window.limits != nullptr || lists.pairs != nullptr;
  const bool has_far_softcap =
      scoring.softcap > 0 && (scoring.softcap < kLeastPlainCap || scoring.softcap > kLargestPlainCap ||
                              scoring.scale / scoring.softcap > kLargestScaleToCap);
  const bool biased = scoring.adds_to_keys() || scoring.softcap > 0;
  if (lists.spans.spans != nullptr) {  // packed.cu gives nothing besides, and a scale that plain scores take
    return Scores::kPacked;
  }
  if (scoring.plain_but_for_rpe() && is_read_in_tiles(scoring.rpe) && !limited && !scoring.drops()) {
    return Scores::kTiled;
  }
  if (scoring.plain_but_for_rpe() && goes_by_distance(scoring.rpe) && !limited && !scoring.drops()) {
    return Scores::kByDistance;
  }
  if (!scoring.plain_but_for_rpe() || scoring.rpe.kind != Bias::kNone || (limited && (scoring.drops() || biased)) ||
      (scoring.drops() && scoring.softcap > 0) || has_far_softcap ||
      scoring.dropout_threshold > Dropout::kLargestHalf) {
    return Scores::kOptions;
  }
  return chosen            ? Scores::kChosen
         : limited         ? Scores::kLimited
         : scoring.drops() ? Scores::kDropped
         : biased          ? Scores::kBiased
                           : Scores::kPlain;
}

// Calls f with the head size, padded, and the kind of scores.
template <class F>
void with_hopper_kernel(const Scoring& scoring, const TileLists& lists, int head_dim, const F& f) {
  const auto with_scores = [&](auto padded) {
    switch (scores_of(scoring, lists)) {
#define DS_SPARSE_SCORES(kind) \
  case Scores::kind:           \
    return f(padded, std::integral_constant<Scores, Scores::kind>{});
      DS_SPARSE_SCORES(kPlain)
      DS_SPARSE_SCORES(kPacked)
      DS_SPARSE_SCORES(kDropped)
      DS_SPARSE_SCORES(kLimited)
      DS_SPARSE_SCORES(kOptions)
      DS_SPARSE_SCORES(kBiased)
      DS_SPARSE_SCORES(kTiled)
      DS_SPARSE_SCORES(kByDistance)
      DS_SPARSE_SCORES(kChosen)
#undef DS_SPARSE_SCORES
    }
  };
  head_dim <= 64 ? with_scores(std::integral_constant<int, 64>{}) : with_scores(std::integral_constant<int, 128>{});
}

}  // namespace ds_sparse::attention
