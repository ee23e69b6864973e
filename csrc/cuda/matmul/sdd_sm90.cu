// Dense @ dense on the live blocks, on Hopper, 16-bit types, up to 128 numbers a token, which are adjacent in both
// operands. A thread block takes unit after unit of the layout's tiles (product_tiles.h): the rows of a tile stay in
// registers, 64 in each warpgroup's, while the union of their columns passes, 64 tokens at a time, gathered where
// blocks are smaller, in an order in which a lane's sums are neighbours. Of each product a warp has 16 rows, all in one
// block row, and stores them of the blocks that are live, from registers: warps wait for none of each other's results.

#include <torch/csrc/stable/ops.h>

#include "../common/gemm_sm90.h"
#include "sdd.h"

namespace ds_sparse {
namespace {

using namespace hopper;

// What comes after the rows of a unit.
struct Unit {
  int64_t first_value;  // of the unit's copy of the layout
  int steps;            // -1: there is no unit
};

template <int kBlock>
struct Shape {
  static constexpr int kGroups = sdd_tile(kBlock) / kTile;      // warpgroups that multiply
  static constexpr int kWarps = kGroups * kMultiplying / 32;    // of those
  static constexpr int kThreads = kWarps * 32 + 32;             // one warp copies
  static constexpr int kLines = kGroups * kTile / kBlock;       // of a tile
  static constexpr int kBox = std::min(kBlock, kTile);          // tokens that are copied together
  static constexpr int kBoxes = kTile / kBox;                   // of a stage, and entries of a step
  static constexpr int kParts = kBlock / kBox;                  // of a block, a step each
  static constexpr int kLaneRun = std::min(kBox / 4, 8);        // neighbouring columns of which a lane has the sums
  static constexpr int kFourRuns = 4 * kLaneRun;                // those of a line's four lanes
};

// Thread blocks on a multiprocessor: as many as its registers and, with as many stages as keep copies going, its shared
// memory have room for.
template <int kPanels, int kBlock>
constexpr int kThreadBlocksOfShape = Shape<kBlock>::kGroups == 2 ? 2 : kPanels == 1 ? 4 : 3;

// A stage has rows of a unit, for one warpgroup, or a step's columns; of these, each line's places among the values of
// the copy.
template <class T, int kPanels, int kBlock>
struct Memory : Shape<kBlock> {
  using S = Shape<kBlock>;
  static constexpr int kStages = S::kParts == 1 && (kPanels == 1 || S::kGroups == 2) ? 5 : 4;
  T stages[kStages][kPanels][kTileElements];
  Run<int32_t, S::kBoxes> slots[kStages][S::kLines];
  Unit units[kStages];  // with the first of the unit's rows
  Barrier there[kStages], free[kStages];
};

template <class T, int kPanels, int kBlock>
__device__ __forceinline__ void copy_all(
    const TileLists& lists, int* taken, Memory<T, kPanels, kBlock>& memory, const CUtensorMap* a, const RunsMap& b) {
  using M = Memory<T, kPanels, kBlock>;
  constexpr int kBox = M::kBox, kBoxes = M::kBoxes, kLines = M::kLines, kParts = M::kParts;
  constexpr int kBoxBytes = kPanels * kBox * kLineBytes;
  const int lane = threadIdx.x % 32, tasks = lists.tasks();
  Ring<M::kStages> ring;
  const auto copy_rows = [&](int number, const TileTask& task, int token) {
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      T* to = memory.stages[ring.stage][panel] + number * kBox * kPanel;
      copy_box(to, a, &memory.there[ring.stage], panel * kPanel, token, task.head, task.batch);
    }
  };
  const auto copy_columns = [&](int number, const TileTask& task, int token) {
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
      for (int first = 0; first < kBox; first += M::kFourRuns) {
        T* to = memory.stages[ring.stage][panel] + (number * kBox + first) * kPanel;
        const int place = task.batch * b.batch + task.head * b.head + (token + first) * b.token;
        copy_runs(to, &b.map, &memory.there[ring.stage], panel * kPanel, place);
      }
    }
  };
  // A lane has one of 32 entries, with its places. A unit's next 32 are asked for before these are copied: memory that is
  // being written answers later than a step lasts.
  struct Entry {
    uint32_t word;
    Run<int32_t, kLines> slots;
  } ahead;
  int lines_ahead[M::kGroups];  // of the next unit, where the lane's box of each group's rows is
  const auto ask = [&](const int4& unit, int first) {
    const int number = first + lane;
    if (number < unit.z) {
      ahead.word = lists.entries[unit.y + number];
      ahead.slots = reinterpret_cast<const Run<int32_t, kLines>*>(lists.slots)[unit.y + number];
    } else {
#pragma unroll
      for (int32_t& slot : ahead.slots.element) {
        slot = -1;
      }
    }
    if (first == 0 && lane < kBoxes) {
#pragma unroll
      for (int group = 0; group < M::kGroups; ++group) {
        lines_ahead[group] = lists.lines[unit.x * kLines + (group * kTile + lane * kBox) / kBlock];
      }
    }
  };
  // A task is drawn when the one before begins. What the lists have for it is asked for when that has been copied: the ring
  // is deep enough for the time that they take to answer.
  int number = blockIdx.x;
  int4 unit = lists.unit_of(number);
  ask(unit, 0);
  const auto go_on = [&](int ticket) {
    number = gridDim.x + __shfl_sync(0xffffffffu, ticket, 0);
    unit = lists.unit_of(number);
    ask(unit, 0);
  };
  while (number < tasks) {
    const TileTask task(lists, number, unit);
    const int ticket = lane == 0 ? atomicAdd(taken, 1) : 0;
    int rows[M::kGroups];
#pragma unroll
    for (int group = 0; group < M::kGroups; ++group) {
      rows[group] = lines_ahead[group] * kBlock + (group * kTile + lane * kBox) % kBlock;
    }
    if (task.num_entries == 0) {
      go_on(ticket);
      continue;
    }
#pragma unroll
    for (int group = 0; group < M::kGroups; ++group, ring.next()) {
      memory.free[ring.stage].wait(ring.parity ^ 1);
      if (lane == 0) {
        if (group == 0) {
          memory.units[ring.stage].first_value = task.first_value(lists);
          memory.units[ring.stage].steps = (task.num_entries + kBoxes - 1) / kBoxes * kParts;
        }
        memory.there[ring.stage].arrive_and_expect(kBoxes * kBoxBytes);
      }
      if (lane < kBoxes) {
        copy_rows(lane, task, rows[group]);  // zeros where there is no line
      }
    }
    for (int first = 0; first < task.num_entries; first += 32) {
      const Entry now = ahead;
      if (first + 32 < task.num_entries) {
        ask(unit, first + 32);
      }
      const int entries = min(32, task.num_entries - first);
      for (int step = 0; step < entries * kParts; step += kBoxes, ring.next()) {
        // With more than one box in a step a block is one box.
        const int box = lane - step / kParts, boxes = min(kBoxes, entries - step / kParts);
        memory.free[ring.stage].wait(ring.parity ^ 1);
        if (box >= 0 && box < kBoxes) {
#pragma unroll
          for (int line = 0; line < kLines; ++line) {
            memory.slots[ring.stage][line].element[box] = now.slots.element[line];
          }
        }
        __syncwarp();
        if (lane == 0) {
          memory.there[ring.stage].arrive_and_expect(boxes * kBoxBytes);
        }
        // Boxes that are not there leave what was in their place: products whose slots are -1.
        if (box >= 0 && box < boxes) {
          copy_columns(box, task, static_cast<int>(now.word & 0xffffffu) * kBlock + step % kParts * kBox);
        }
      }
    }
    go_on(ticket);
  }
  memory.free[ring.stage].wait(ring.parity ^ 1);
  if (lane == 0) {
    memory.units[ring.stage].steps = -1;
    memory.there[ring.stage].arrive();
  }
}

template <class T, int kPanels, int kBlock>
__device__ __forceinline__ void multiply_all(Memory<T, kPanels, kBlock>& memory, T* out) {
  using M = Memory<T, kPanels, kBlock>;
  constexpr int kBox = M::kBox, kBoxes = M::kBoxes, kParts = M::kParts;
  constexpr int kStageElements = kPanels * kTileElements;
  constexpr int kWords = M::kLaneRun / 2, kRunsOfBox = kBox / M::kFourRuns;
  const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32), strip = warp * kStrip;
  const hopper::Operand all_columns(memory.stages[0][0]);
  // Where the lane points at a run of its warp's rows: of their first 16 numbers, in the first stage.
  const T* rows_run = kept_shared(run_of_line(memory.stages[0][0], strip % kTile + lane % 16, lane / 16));
  out += (strip % kBlock + lane / 4) * kBlock + lane % 4 * M::kLaneRun;
  Ring<M::kStages> ring;
  for (;;) {
    memory.there[ring.stage].wait(ring.parity);
    int steps = uniform(memory.units[ring.stage].steps);
    if (steps < 0) {
      break;
    }
    T* values = kept(out + memory.units[ring.stage].first_value * (kBlock * kBlock));
    RowsOfWarp<T, kPanels> rows;
#pragma unroll 1
    for (int group = 0; group < M::kGroups; ++group, ring.next()) {
      memory.there[ring.stage].wait(ring.parity);
      if (M::kGroups == 1 || group == strip / kTile) {
        rows.read(rows_run + ring.stage * kStageElements);
      }
      arrive_once(memory.free[ring.stage], lane);
    }
    // Rounded sums of a lane's two lines, of the first half of a block of 128 columns.
    [[maybe_unused]] alignas(16) uint32_t first_half[2][kTile / 8];
    int part = 0;
    for (; steps > 0; --steps, part ^= kParts - 1, ring.next()) {
      memory.there[ring.stage].wait(ring.parity);
      const auto slots = memory.slots[ring.stage][strip / kBlock];
      if constexpr (kBlock >= kTile) {
        // All of the warpgroup's rows are in one line.
        bool any = false;
#pragma unroll
        for (int32_t slot : slots.element) {
          any |= slot >= 0;
        }
        if (!uniform(any)) {
          arrive_once(memory.free[ring.stage], lane);
          continue;
        }
      }
      const hopper::Operand columns = all_columns + uniform(ring.stage * kStageElements * sizeof(T));
      float sums[kTile / 2];
      rows.multiply(sums, columns);
      arrive_once(memory.free[ring.stage], lane);
      alignas(16) uint32_t words[2][kTile / 8];
#pragma unroll
      for (int i = 0; i < kTile / 4; ++i) {
        words[i % 2][i / 2] = round_pair<T>(sums[2 * i], sums[2 * i + 1]);
      }
      // Both halves of a block's lines are stored together: memory takes halves of 256 bytes with a step between more slowly.
      if (part < kParts - 1) {
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
          for (int line = 0; line < 2; ++line, to += 8 * kBlock) {
#pragma unroll
            for (int run = 0; run < kParts * kRunsOfBox; ++run) {
              const auto& half = run / kRunsOfBox < kParts - 1 ? first_half : words;
              const uint32_t* first = half[line] + (box * kRunsOfBox + run % kRunsOfBox) * kWords;
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
__global__ void __launch_bounds__(Shape<kBlock>::kThreads, kThreadBlocksOfShape<kPanels, kBlock>)
sdd_on_hopper_kernel(
    const __grid_constant__ TileLists lists, int* taken, const __grid_constant__ CUtensorMap a,
    const __grid_constant__ RunsMap b, T* out) {
  extern __shared__ unsigned char shared[];
  using M = Memory<T, kPanels, kBlock>;
  auto& memory = *reinterpret_cast<M*>(align_panels(shared));
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < M::kStages; ++stage) {
      memory.there[stage].init(1);
      memory.free[stage].init(M::kWarps);
    }
    fence_barriers();
  }
  __syncthreads();
  if (threadIdx.x < M::kWarps * 32) {
    multiply_all<T, kPanels, kBlock>(memory, out);
  } else {
    copy_all<T, kPanels, kBlock>(lists, taken, memory, &a, b);
  }
}

}  // namespace

bool takes_sdd_on_hopper(const Launcher& launch, const Tensor& a, const Tensor& b) {
  const Tensor b_lines = torch::stable::transpose(b, 2, 3);
  return launch.is_hopper() && a.element_size() == 2 && a.size(3) > 0 && a.size(3) <= kMostDepth &&
         takes_boxes(a) && takes_boxes(b_lines) && RunsMap::takes(b_lines);
}

void sdd_on_hopper(
    const Launcher& launch, const Tensor& a, const Tensor& b, const Tensor& out, const TileLists& lists,
    int64_t block) {
  const Tensor b_lines = torch::stable::transpose(b, 2, 3);
  const Tensor taken = launch.zeros(a, 1, ScalarType::Int);
  const auto run = [&](auto zero, auto panels, auto tokens) {
    using T = decltype(zero);
    constexpr int kPanels = decltype(panels)::value, kBlock = decltype(tokens)::value;
    using M = Memory<T, kPanels, kBlock>;
    const int64_t most = launch.multiprocessors() * kThreadBlocksOfShape<kPanels, kBlock>;
    launch.with_shared_memory(
        sdd_on_hopper_kernel<T, kPanels, kBlock>, std::min<int64_t>(lists.tasks(), most), M::kThreads,
        sizeof(M) + kPanelAlignment, lists, taken.mutable_data_ptr<int32_t>(), tensor_map(a, M::kBox),
        RunsMap(b_lines, M::kLaneRun), static_cast<T*>(out.mutable_data_ptr()));
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
}

}  // namespace ds_sparse
