// Tuned sizes of products and softmax of windows, in one place: tiles, stages, thread blocks on a multiprocessor.
// Measurements, and what was tried besides: docs/lab-notebook.md, "Windows".

#pragma once

#include <cstdint>

namespace ds_sparse {

// matmul.cu.
struct WindowMatmulTuning {
  // In a step: rows of a thread block, 32 of them a warp's, and columns. Each tile of columns serves twice the rows
  // that it would serve in tiles of 64.
  static constexpr int kRows = 128, kWarpRows = 32, kColumns = 64;
  static constexpr int kGroup = 32;  // columns that a warp has sums of at a time
  static constexpr int kRing = 3;    // steps in flight or in use
  // Thread blocks on a multiprocessor, at least, where a warp holds kHeld k blocks of its rows in registers.
  static constexpr int kHeldThreadBlocks = 4;
  template <int kHeld>
  static constexpr int kThreadBlocks = kHeld == 1 ? kHeldThreadBlocks : 3;
  static constexpr int64_t kFewestWorkTiles = 8;  // for a multiprocessor, where there is work for them
  static constexpr int64_t kL2Bytes = 280 << 10;  // of L2, for what a multiprocessor is writing
};

// matmul_sm90.cu.
struct WindowMatmulOnHopperTuning {
  // With 64 rows each. One, and four thread blocks, read twice as much; four are slower where windows are short.
  static constexpr int kConsumerWarpgroups = 2;
  static constexpr int kThreadBlocks = 2;  // on a multiprocessor
  template <int kPanels>
  static constexpr int kStages = kPanels == 1 ? 6 : 4;
};

// unwindow_matmul.cu.
struct UnwindowMatmulTuning {
  static constexpr int kWarpTokens = 32;  // of the result
  static constexpr int kRing = 3;         // steps in flight or in use; with two, and more thread blocks, slower
  template <int kColumns>                 // of a thread block's columns of the result
  static constexpr int kThreadBlocks = kColumns > 64 ? 2 : 3;  // on a multiprocessor, at least
};

// softmax.cu.
struct WindowSoftmaxTuning {
  static constexpr int kThreads = 128, kThreadBlocks = 8;  // and how many on a multiprocessor, at least
  static constexpr int kStages = 2;
  static constexpr int kRowsInTurn = 8;           // times that a warp takes rows, where there are enough for all
  static constexpr int kFewestThreadBlocks = 16;  // for a multiprocessor, before a warp takes rows so often
  // Up to eight runs a lane, or four: long rows with two lanes each would meet in banks of shared memory.
  static constexpr int runs_of_lane(int log_lanes) { return log_lanes < 2 ? 4 : 8; }
};

}  // namespace ds_sparse
