// Dense @ dense on the live blocks, on Hopper, 16-bit types, up to 128 numbers a token, which are adjacent in both
// operands. A thread block takes work tile after work tile of the layout's tiles (product_tiles.h): the rows of a tile
// stay in registers, 64 in each warpgroup's, while the union of their columns passes, 64 tokens at a time, gathered
// where blocks are smaller, in an order in which a lane's sums are neighbours. Of each product a warp has 16 rows, all
// in one block row, and stores them of the blocks that are live, from registers: warps wait for none of each other's
// results.

#include <torch/csrc/stable/ops.h>

#include "../../packing.h"
#include "../common/gemm_sm90.h"
#include "../common/pass_state.h"
#include "sdd.h"
#include "tuning.h"

namespace ds_sparse {
namespace {

using namespace hopper;

// Where a work tile's values begin, after its rows.
struct RowsItem {
  int64_t first_value;  // of the work tile's copy of the layout
  int steps;            // -1: there is no work tile
};

template <int kBlock>
struct TileShape {
  static constexpr int kConsumerWarpgroups = sdd_tile(kBlock) / kTile;
  static constexpr int kConsumerWarps = kConsumerWarpgroups * kWarpgroupThreads / 32;  // of all of them
  static constexpr int kThreads = kConsumerWarps * 32 + 32;                            // and a producer warp
  static constexpr int kBlockRows = kConsumerWarpgroups * kTile / kBlock;              // of a tile
  static constexpr int kBox = std::min(kBlock, kTile);  // tokens that are copied together
  static constexpr int kBoxes = kTile / kBox;           // of a stage, and entries of a step
  static constexpr int kStepsOfBlock = kBlock / kBox;   // of a block, a step each
};

// A stage has rows of a work tile, for one warpgroup, or a step's columns; of these, each block row's places among the
// values of the copy.
template <class T, int kPanels, int kBlock>
struct Memory : TileShape<kBlock> {
  using S = TileShape<kBlock>;
  using Tuning = SddOnHopperTuning<kPanels, kBlock>;
  static constexpr int kStages = Tuning::kStages;
  static constexpr int kLaneRun = Tuning::kLaneRun;  // neighbouring columns of which a lane has the sums
  static constexpr int kFourRuns = 4 * kLaneRun;     // those of a row's four lanes
  T stages[kStages][kPanels][kTileElements];
  Run<int32_t, S::kBoxes> slots[kStages][S::kBlockRows];
  RowsItem rows_items[kStages];  // with the first of the work tile's rows
  Barrier full[kStages], empty[kStages];
};

template <class T, int kPanels, int kBlock>
__device__ __forceinline__ void run_producer(
    const ProductTileLists& lists, unsigned* taken, Memory<T, kPanels, kBlock>& memory, const CUtensorMap* a,
    const RunsMap& b) {
  using M = Memory<T, kPanels, kBlock>;
  constexpr int kBox = M::kBox, kBoxes = M::kBoxes, kBlockRows = M::kBlockRows, kStepsOfBlock = M::kStepsOfBlock;
  constexpr int kBoxBytes = kPanels * kBox * kLineBytes;
  const int lane = threadIdx.x % 32, work_tiles = lists.total_work_tiles();
  PipelineState<M::kStages> pipe;
  const auto copy_rows = [&](int number, const ProductWorkTile& work, int token) {
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      T* to = memory.stages[pipe.index][panel] + number * kBox * kPanel;
      tma_load(to, a, &memory.full[pipe.index], panel * kPanel, token, work.head, work.batch);
    }
  };
  const auto copy_columns = [&](int number, const ProductWorkTile& work, int token) {
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
      for (int first = 0; first < kBox; first += M::kFourRuns) {
        T* to = memory.stages[pipe.index][panel] + (number * kBox + first) * kPanel;
        const int place = work.batch * b.batch + work.head * b.head + (token + first) * b.token;
        tma_load_runs(to, &b.map, &memory.full[pipe.index], panel * kPanel, place);
      }
    }
  };
  // A lane has one of 32 entries, with its places. A work tile's next 32 are asked for before these are copied: memory
  // that is being written answers later than a step lasts.
  struct Entry {
    uint32_t word;
    Run<int32_t, kBlockRows> slots;
  } ahead;
  int block_rows_ahead[M::kConsumerWarpgroups];  // of the next work tile, where the lane's box of each group's rows is
  const auto ask = [&](const int4& listed, int first) {
    const int number = first + lane;
    if (number < listed.z) {
      ahead.word = lists.entries[listed.y + number];
      ahead.slots = reinterpret_cast<const Run<int32_t, kBlockRows>*>(lists.slots)[listed.y + number];
    } else {
#pragma unroll
      for (int32_t& slot : ahead.slots.element) {
        slot = -1;
      }
    }
    if (first == 0 && lane < kBoxes) {
#pragma unroll
      for (int group = 0; group < M::kConsumerWarpgroups; ++group) {
        block_rows_ahead[group] = lists.block_rows[listed.x * kBlockRows + (group * kTile + lane * kBox) / kBlock];
      }
    }
  };
  // A work tile is drawn when the one before begins. What the lists have for it is asked for when that has been copied:
  // the ring is deep enough for the time that they take to answer.
  int number = blockIdx.x;
  int4 listed = lists.listed_work_tile(number);
  ask(listed, 0);
  const auto go_on = [&](int ticket) {
    number = gridDim.x + __shfl_sync(0xffffffffu, ticket, 0);
    listed = lists.listed_work_tile(number);
    ask(listed, 0);
  };
  while (number < work_tiles) {
    const ProductWorkTile work(lists, number, listed);
    // Each work tile draws one: the last one leaves 0.
    const int ticket = lane == 0 ? static_cast<int>(atomicInc(taken, work_tiles - 1)) : 0;
    int rows[M::kConsumerWarpgroups];
#pragma unroll
    for (int group = 0; group < M::kConsumerWarpgroups; ++group) {
      rows[group] = block_rows_ahead[group] * kBlock + (group * kTile + lane * kBox) % kBlock;
    }
    if (work.num_entries == 0) {
      go_on(ticket);
      continue;
    }
#pragma unroll
    for (int group = 0; group < M::kConsumerWarpgroups; ++group, pipe.next()) {
      memory.empty[pipe.index].wait(pipe.phase ^ 1);
      if (lane == 0) {
        if (group == 0) {
          memory.rows_items[pipe.index].first_value = work.first_value(lists);
          memory.rows_items[pipe.index].steps = (work.num_entries + kBoxes - 1) / kBoxes * kStepsOfBlock;
        }
        memory.full[pipe.index].arrive_and_expect_tx(kBoxes * kBoxBytes);
      }
      if (lane < kBoxes) {
        copy_rows(lane, work, rows[group]);  // zeros where there is no block row
      }
    }
    for (int first = 0; first < work.num_entries; first += 32) {
      const Entry now = ahead;
      if (first + 32 < work.num_entries) {
        ask(listed, first + 32);
      }
      const int entries = min(32, work.num_entries - first);
      for (int step = 0; step < entries * kStepsOfBlock; step += kBoxes, pipe.next()) {
        // With more than one box in a step a block is one box.
        const int box = lane - step / kStepsOfBlock, boxes = min(kBoxes, entries - step / kStepsOfBlock);
        memory.empty[pipe.index].wait(pipe.phase ^ 1);
        if (box >= 0 && box < kBoxes) {
#pragma unroll
          for (int row = 0; row < kBlockRows; ++row) {
            memory.slots[pipe.index][row].element[box] = now.slots.element[row];
          }
        }
        __syncwarp();
        if (lane == 0) {
          memory.full[pipe.index].arrive_and_expect_tx(boxes * kBoxBytes);
        }
        // Boxes that are not there leave what was in their place: products whose slots are -1.
        if (box >= 0 && box < boxes) {
          copy_columns(box, work, static_cast<int>(block_of(now.word)) * kBlock + step % kStepsOfBlock * kBox);
        }
      }
    }
    go_on(ticket);
  }
  memory.empty[pipe.index].wait(pipe.phase ^ 1);
  if (lane == 0) {
    memory.rows_items[pipe.index].steps = -1;
    memory.full[pipe.index].arrive();
  }
}

template <class T, int kPanels, int kBlock>
__device__ __forceinline__ void run_consumer(Memory<T, kPanels, kBlock>& memory, T* out) {
  using M = Memory<T, kPanels, kBlock>;
  constexpr int kBox = M::kBox, kBoxes = M::kBoxes, kStepsOfBlock = M::kStepsOfBlock;
  constexpr int kStageElements = kPanels * kTileElements;
  constexpr int kWords = M::kLaneRun / 2, kRunsOfBox = kBox / M::kFourRuns;
  const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32), warp_tile = warp * kWarpTileRows;
  const GmmaDescriptor all_columns(memory.stages[0][0]);
  // Where the lane points at a run of its warp's rows: of their first 16 numbers, in the first stage.
  const T* rows_run = kept_shared(run_of_line(memory.stages[0][0], warp_tile % kTile + lane % 16, lane / 16));
  out += (warp_tile % kBlock + lane / 4) * kBlock + lane % 4 * M::kLaneRun;
  PipelineState<M::kStages> pipe;
  for (;;) {
    memory.full[pipe.index].wait(pipe.phase);
    int steps = uniform(memory.rows_items[pipe.index].steps);
    if (steps < 0) {
      break;
    }
    T* values = kept(out + memory.rows_items[pipe.index].first_value * (kBlock * kBlock));
    RowsOfWarp<T, kPanels> rows;
#pragma unroll 1
    for (int group = 0; group < M::kConsumerWarpgroups; ++group, pipe.next()) {
      memory.full[pipe.index].wait(pipe.phase);
      if (M::kConsumerWarpgroups == 1 || group == warp_tile / kTile) {
        rows.read(rows_run + pipe.index * kStageElements);
      }
      warp_arrive(memory.empty[pipe.index], lane);
    }
    // Rounded sums of a lane's two rows, of the first half of a block of 128 columns.
    [[maybe_unused]] alignas(16) uint32_t first_half[2][kTile / 8];
    int step_of_block = 0;
    for (; steps > 0; --steps, step_of_block ^= kStepsOfBlock - 1, pipe.next()) {
      memory.full[pipe.index].wait(pipe.phase);
      const auto slots = memory.slots[pipe.index][warp_tile / kBlock];
      if constexpr (kBlock >= kTile) {
        // All of the warpgroup's rows are in one block row.
        bool any = false;
#pragma unroll
        for (int32_t slot : slots.element) {
          any |= slot >= 0;
        }
        if (!uniform(any)) {
          warp_arrive(memory.empty[pipe.index], lane);
          continue;
        }
      }
      const GmmaDescriptor columns = all_columns + uniform(pipe.index * kStageElements * sizeof(T));
      float sums[kTile / 2];
      rows.multiply(sums, columns);
      warp_arrive(memory.empty[pipe.index], lane);
      alignas(16) uint32_t words[2][kTile / 8];
#pragma unroll
      for (int i = 0; i < kTile / 4; ++i) {
        words[i % 2][i / 2] = round_pair<T>(sums[2 * i], sums[2 * i + 1]);
      }
      // Both halves of a block's rows are stored together: memory takes halves of 256 bytes with a step between more
      // slowly.
      if (step_of_block < kStepsOfBlock - 1) {
#pragma unroll
        for (int i = 0; i < kTile / 4; ++i) {
          first_half[i % 2][i / 2] = words[i % 2][i / 2];
        }
        continue;
      }
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        if (slots.element[box] >= 0) {
          T* to = values + int64_t{slots.element[box]} * (kBlock * kBlock);
#pragma unroll
          for (int row = 0; row < 2; ++row, to += 8 * kBlock) {
#pragma unroll
            for (int run = 0; run < kStepsOfBlock * kRunsOfBox; ++run) {
              const auto& half = run / kRunsOfBox < kStepsOfBlock - 1 ? first_half : words;
              const uint32_t* first = half[row] + (box * kRunsOfBox + run % kRunsOfBox) * kWords;
              store_run(
                  reinterpret_cast<uint32_t*>(to + run * M::kFourRuns),
                  *reinterpret_cast<const Run<uint32_t, kWords>*>(first));
            }
          }
        }
      }
    }
  }
}

template <class T, int kPanels, int kBlock>
__global__ void __launch_bounds__(TileShape<kBlock>::kThreads, (SddOnHopperTuning<kPanels, kBlock>::kThreadBlocks))
    sdd_on_hopper_kernel(
        const __grid_constant__ ProductTileLists lists, unsigned* taken, const __grid_constant__ CUtensorMap a,
        const __grid_constant__ RunsMap b, T* out) {
  extern __shared__ unsigned char shared[];
  using M = Memory<T, kPanels, kBlock>;
  auto& memory = *reinterpret_cast<M*>(align_panels(shared));
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < M::kStages; ++stage) {
      memory.full[stage].init(1);
      memory.empty[stage].init(M::kConsumerWarps);
    }
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < M::kConsumerWarps * 32) {
    run_consumer<T, kPanels, kBlock>(memory, out);
  } else {
    run_producer<T, kPanels, kBlock>(lists, taken, memory, &a, b);
  }
}

}  // namespace

void sdd_on_hopper(
    const Launcher& launch, const Tensor& a, const Tensor& b, const Tensor& out, const ProductTileLists& lists,
    int64_t block) {
  check(
      a.element_size() == 2 && a.size(3) > 0 && a.size(3) <= kMaxHeadDim,
      "implementation is \"hopper\", which is for fp16 and bf16 and up to 128 numbers a token.");
  const Tensor read_a = readable_in_boxes(a);
  Tensor b_rows = readable_in_boxes(torch::stable::transpose(b, 2, 3));
  if (!RunsMap::takes(b_rows)) {
    b_rows = copy_for_boxes(b_rows);
    check(
        RunsMap::takes(b_rows),
        "implementation is \"hopper\", and b has 2^31 tokens or more in all; give \"portable\".");
  }
  StateOfPass state(launch, a);
  unsigned* taken = reinterpret_cast<unsigned*>(&state.get()->row_tickets);
  const auto run = [&](auto zero, auto panels, auto tokens) {
    using T = decltype(zero);
    constexpr int kPanels = decltype(panels)::value, kBlock = decltype(tokens)::value;
    using M = Memory<T, kPanels, kBlock>;
    const int64_t most = launch.multiprocessors() * M::Tuning::kThreadBlocks;
    launch.with_shared_memory(
        sdd_on_hopper_kernel<T, kPanels, kBlock>, std::min<int64_t>(lists.total_work_tiles(), most), M::kThreads,
        sizeof(M) + kPanelAlignment, lists, taken, tensor_map(read_a, M::kBox), RunsMap(b_rows, M::kLaneRun),
        static_cast<T*>(out.mutable_data_ptr()));
  };
  const auto with_block = [&](auto zero, auto panels) {
    switch (block) {
      case 16:
        return run(zero, panels, std::integral_constant<int, 16>{});
      case 32:
        return run(zero, panels, std::integral_constant<int, 32>{});
      case 64:
        return run(zero, panels, std::integral_constant<int, 64>{});
      default:
        return run(zero, panels, std::integral_constant<int, 128>{});
    }
  };
  const auto with_depth = [&](auto zero) {
    a.size(3) <= kPanel ? with_block(zero, std::integral_constant<int, 1>{})
                        : with_block(zero, std::integral_constant<int, 2>{});
  };
  a.scalar_type() == ScalarType::Half ? with_depth(__half{}) : with_depth(__nv_bfloat16{});
  state.done();
}

}  // namespace ds_sparse
