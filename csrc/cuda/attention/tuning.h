// Tuned sizes, in one place: tiles, stages, roles of warps and their registers. Measurements, and what was tried
// besides: docs/lab-notebook.md, "Fused attention".

#pragma once

#include <cstdint>

namespace ds_sparse::attention {

constexpr int kBlockM = 64;         // tokens of a tile
constexpr int kHopperBlockM = 128;  // and of one on Hopper

// On any GPU.

constexpr int kThreads = 2 * kBlockM;  // a warp for each 16 tokens
constexpr int kStages = 2;             // steps in flight or in use

// Columns of an output that a thread block makes: wider ones are split over thread blocks that share the rest.
template <int kHeadDim>
constexpr int kOutputColumns = kHeadDim < 128 ? kHeadDim : 128;

// Tokens of the other side in a step: fewer where their rows are long, for shared memory's sake.
template <class T, int kHeadDim>
constexpr int kStep = kHeadDim * sizeof(T) <= 256   ? 64
                      : kHeadDim * sizeof(T) <= 512 ? 32
                                                    : 16;

// Neighbouring rows of a tile whose list is split, which a thread block combines.
constexpr int kCombineRows = 16;
static_assert(kBlockM % kCombineRows == 0 && kHopperBlockM % kCombineRows == 0);
// Forward, so many splits' results are on their way together, for which a multiprocessor's registers are shared by no
// more thread blocks.
constexpr int kSplitsAtOnce = 4, kCombineBlocks = 4;

// On Hopper. A thread block has a multiprocessor for itself, with its 65536 registers.

constexpr int kConsumerWarpgroups = 2;  // of a consumer group, with kHopperBlockM / kConsumerWarpgroups rows each

// What stages have besides of a bias of pairs of tokens: nothing, tiles of 16-bit numbers, or, of a bias by distance,
// strips of fp32, which take 4 KB.
enum class PairBias { kNone, kTile, kStrips };

template <int kHeadDim, bool kPlain, PairBias kBias = PairBias::kNone>
struct ForwardTuning {
  // Short rows leave room for a second consumer group; half as many keys at a time leave registers for it, or for
  // options.
  static constexpr int kConsumerGroups = kHeadDim == 64 && kPlain ? 2 : 1, kWarpgroups = kConsumerWarpgroups,
                       kBlockN = kHeadDim == 128 && kPlain && kBias == PairBias::kNone ? 128 : 64;
  // 128 KB of keys and values in all; with tiles, which take 16 KB each, or strips 144 KB at most.
  static constexpr int kStages = kBias == PairBias::kTile ? kHeadDim == 64 ? 2 : 3
                                 : kBias == PairBias::kStrips && kHeadDim == 64
                                     ? 3
                                     : 256 * 128 / (kHeadDim * kBlockN * kConsumerGroups),
                       kWorkStages = 2;
  // To start a step's copies takes a warp as long as the step where blocks are small: one for keys and one for values,
  // where there are as many warps.
  static constexpr int kProducerWarps = kConsumerGroups == 1 ? 2 : 1;
  static constexpr int kProducerRegisters = kConsumerGroups == 1 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumerGroups == 1 ? 232 : 112;
};

// Where the halves of a tile have lists that differ, and long rows: a warpgroup for each, by itself.
struct HalvesTuning {
  static constexpr int kConsumerGroups = 2, kWarpgroups = 1, kBlockN = 64, kStages = 3, kWorkStages = 1;
  static constexpr int kProducerWarps = 1, kProducerRegisters = 40, kConsumerRegisters = 232;
};

template <int kHeadDim, PairBias kBias = PairBias::kNone>
struct ColumnsTuning {
  static constexpr int kBlockN = 64;
  // Registers reach for a third warpgroup, which makes the gradients of queries where they are asked for.
  static constexpr bool kHasThirdWarpgroup = kHeadDim == 64;
  static constexpr bool kHasTile = kBias == PairBias::kTile;
  static constexpr int kStages = kHeadDim == 64 ? (kBias == PairBias::kNone ? 4 : 3) : (kHasTile ? 2 : 3),
                       kWorkStages = 2, kOwnStages = kHeadDim == 64 && !kHasTile ? 2 : 1;
  static constexpr int kGradScoreStages = kHasThirdWarpgroup ? 2 : 1;
  static constexpr int kProducerWarps = 2;
  // All that the kernel starts with.
  static constexpr int kProducerRegisters = kHeadDim == 64 ? 40 : 24, kThirdRegisters = 72;
  static constexpr int kConsumerRegisters = kHeadDim == 64 ? 232 : 240, kConsumerRegistersBesideThird = 200;
  static_assert(
      kConsumerRegistersBesideThird * 128 * kConsumerWarpgroups + (kThirdRegisters + kProducerRegisters) * 128 <=
      65536);
};

// Where queries have chosen blocks for themselves, few of a step's are those of both warpgroups' columns if blocks are
// short: the warpgroups do not wait for each other where the gradients of queries have a sweep of their own.
constexpr bool chosen_take_two_sweeps(int64_t head_dim, int64_t block) { return head_dim > 64 && block < 128; }

template <int kHeadDim>
struct RowsTuning {
  static constexpr int kBlockN = 64;
  static constexpr int kStages = 4, kWorkStages = kHeadDim == 64 ? 2 : 1;
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
};

}  // namespace ds_sparse::attention
