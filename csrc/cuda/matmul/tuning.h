// Tuned sizes of products of blocks, in one place: tiles, stages, thread blocks on a multiprocessor, how lists are
// shared out. Measurements, and what was tried besides: docs/lab-notebook.md, "Products with live blocks". The height
// of the tiles of dense @ dense on Hopper is `sdd_tile` (csrc/checks.h), as ds_sparse/dispatch has it for the index.

#pragma once

#include <algorithm>
#include <cstdint>

#include "../../checks.h"

namespace ds_sparse {

// Chunks (chunks.h): tokens enough to keep a thread block busy, few enough to give every multiprocessor some of them.
struct ChunkTuning {
  static constexpr int64_t kMostTokens = 2048, kFewestTokens = 256, kChunksOnMultiprocessor = 8;
};

// sdd.cu.
struct SddTuning {
  static constexpr int kThreadBlocks = 4;  // on a multiprocessor, at least
  static constexpr int kTokens = 64;       // columns of a tile
  // Rows of so many k blocks stay for all their columns; longer ones come again with each k block of the columns.
  static constexpr int kKBlocksThatStay = 2;
};

// dsd.cu. kN: columns of a tile.
template <int kN>
struct DsdTuning {
  static constexpr int kThreadBlocks = kN == 128 ? 3 : 4;  // on a multiprocessor, at least
};

// Adding up the splits of lists (dsd.cu).
struct CombineTuning {
  // Numbers that a thread adds up, where splits are, at once: to find out whether there is anything to add takes longer
  // than most additions.
  static constexpr int kAddedTogether = 4;
  static constexpr int kSplitsAtOnce = 8;  // which a thread has on their way
  static constexpr int kRounds = 8;        // of kAddedTogether numbers that a thread makes, where chunks cut lists
};

// sdd_sm90.cu, for blocks of kBlock and kPanels panels of depth.
template <int kPanels, int kBlock>
struct SddOnHopperTuning {
  static constexpr int kConsumerWarpgroups = sdd_tile(kBlock) / 64;  // 64 rows each
  // Thread blocks on a multiprocessor: as many as its registers and, with as many stages as keep copies going, its
  // shared memory have room for.
  static constexpr int kThreadBlocks = kConsumerWarpgroups == 2 ? 2 : kPanels == 1 ? 4 : 3;
  static constexpr int kStages = kBlock <= 64 && (kPanels == 1 || kConsumerWarpgroups == 2) ? 5 : 4;
  // Neighbouring columns of which a lane has the sums.
  static constexpr int kLaneRun = std::min(kBlock / 4, 8);
};

// dsd_small_sm90.cu. kN: columns of a tile.
template <int kN>
struct SmallDsdTuning {
  // Thread blocks on a multiprocessor, as many as shared memory has room for.
  static constexpr int kThreadBlocks = kN == 64 ? 2 : 1;
  static constexpr int kStages = kN == 64 ? 4 : 6;  // each with a producer warp of its own
};
struct SmallDsdCopyTuning {
  static constexpr int kLanesOfBlock = 8;  // which copy it, 128 bytes at a time
};

// dsd_large_sm90.cu. A thread block has a multiprocessor for itself, and as deep a ring as there is room for.
template <int kN>
struct LargeDsdTuning {
  static constexpr int kThreadBlocks = 1, kStages = kN == 64 ? 8 : 6;
};

// transpose.cu.
struct TransposeTuning {
  static constexpr int kThreads = 256;
  static constexpr int kSide = 8;  // of a thread's square, a run of 16 bytes
};

}  // namespace ds_sparse
