// Shared memory of a consumer group of the forward pass on Hopper: stages of keys and values, work
// items with their queries, and the pipelines' barriers.

#pragma once

#include "epilogue_sm90.h"
#include "scores_sm90.h"

namespace ds_sparse::attention {

template <int kHeadDim, Scores kScores>
using ForwardTuningOf = ForwardTuning<kHeadDim, are_plain(kScores), pair_bias_of(kScores)>;

// What stages have of biases of keys.
template <bool kAny, int kBlockN, int kStages>
struct KeyBiases {};
template <int kBlockN, int kStages>
struct KeyBiases<true, kBlockN, kStages> {
  alignas(kPanelAlignment) float key_biases[kStages][kBlockN];
};

template <class T, int kHeadDim, Scores kScores, class Tuned = ForwardTuningOf<kHeadDim, kScores>>
struct alignas(kPanelAlignment) ForwardMemory
    : BiasTiles<T, pair_bias_of(kScores), kHopperBlockM, Tuned::kBlockN, Tuned::kStages>,
      KeyBiases<take_key_bias(kScores), Tuned::kBlockN, Tuned::kStages> {
  using Tuning = Tuned;
  static constexpr PairBias kPairBias = pair_bias_of(kScores);
  static constexpr bool kHasPairBias = have_pair_bias(kScores), kTakesKeyBias = take_key_bias(kScores);
  static constexpr int kBlockN = Tuning::kBlockN, kStages = Tuning::kStages, kWorkStages = Tuning::kWorkStages;
  // Rows that a consumer group has of a tile: all, or, with one warpgroup, half of them.
  static constexpr bool kByHalves = Tuning::kWarpgroups == 1;
  static constexpr int kRows = 64 * Tuning::kWarpgroups, kGroupThreads = 2 * kRows;
  static constexpr bool kOverlaps = kByHalves || Tuning::kConsumerGroups == 1;
  static constexpr int kThreads = kHopperThreads<Tuning::kConsumerGroups, kGroupThreads>;
  static constexpr bool kPacked = are_packed(kScores);
  static constexpr Limits kLimits = limits_of(kScores);
  struct Stage {
    Panels<T, kHeadDim, kBlockN> keys, values;
  };
  Panels<T, kHeadDim, kRows> queries[kWorkStages];  // then the work tile's results
  Stage stages[kStages];
  Octet groups[kStages][kBlockN / 16];
  LiveGroups live[kStages][LiveGroupFinder::kWarpTiles];
  RowMaxSum row_max_sums[kWorkStages][kByHalves ? 1 : kRows];  // of results
  alignas(16) PairsOfStep<kBlockN, kLimits> pairs[kStages];
  WorkItemOf<kLimits> work_items[kWorkStages];
  Barrier work_full[kWorkStages], q_full[kWorkStages],
      work_empty[kWorkStages];  // full but for the queries; with them; done with
  Barrier k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
};

}  // namespace ds_sparse::attention
