// Dense @ dense on the live blocks of 16 and 32, on Hopper, 16-bit types, up to 128 numbers a token, which are adjacent
// in both operands. A thread block takes unit after unit of the layout's tiles (matmul_tiles.h): the 64 rows of a tile
// stay in registers while the union of their columns passes, gathered 64 tokens at a time. Of each product a warp has 16
// rows, all or half of one block row, and stores them of the blocks that are live, where they are adjacent bytes: warps
// wait for none of each other's results.

#include <torch/csrc/stable/ops.h>

#include "matmul_sdd.h"
#include "matmul_sm90.h"
#include "mma.h"

namespace ds_sparse {
namespace {

using namespace hopper;

constexpr int kThreads = kMultiplying + 32;  // one warp copies

// Thread blocks on a multiprocessor: as many as its registers and, with as many stages as keep copies going, its shared
// memory have room for.
template <int kPanels>
constexpr int kThreadBlocksOfTiles = kPanels == 1 ? 4 : 3;

// What comes after the rows of a unit.
struct Unit {
  int64_t first_value;  // of the unit's copy of the layout
  int steps;            // -1: there is no unit
};

// A stage has a unit's rows, or a step's columns; of these, each line's places among the values of the copy.
template <class T, int kPanels, int kBlock>
struct Memory {
  static constexpr int kStages = kPanels == 1 ? 5 : 4, kBlocks = kTile / kBlock;
  T stages[kStages][kPanels][kTileElements];
  T results[kMultiplying / 32][16 * kTile];
  Run<int32_t, kBlocks> slots[kStages][kBlocks];
  Unit units[kStages];
  Barrier there[kStages], free[kStages];
};

template <class T, int kPanels, int kBlock>
__device__ __forceinline__ void copy_all(
    const TileLists& lists, Memory<T, kPanels, kBlock>& memory, const CUtensorMap* a, const CUtensorMap* b) {
  using M = Memory<T, kPanels, kBlock>;
  constexpr int kBlocks = M::kBlocks;
  const int lane = threadIdx.x % 32, tasks = lists.tasks();
  // A lane brings a panel of one block of tokens, and one place.
  const int panel = lane % kPanels, number = lane / kPanels;
  const bool has_box = number < kBlocks, has_slot = lane < kBlocks * kBlocks;
  Ring<M::kStages> ring;
  const auto copy = [&](const CUtensorMap* map, const TileTask& task, int token) {
    T* to = memory.stages[ring.stage][panel] + number * kBlock * kPanel;
    copy_box(to, map, &memory.there[ring.stage], panel * kPanel, token, task.head, task.batch);
  };
  constexpr int kBlockBytes = kPanels * kBlock * kLineBytes;
  // A unit is asked for before the one that precedes it is done, and so are entries.
  int4 unit = lists.unit_of(blockIdx.x);
  for (int next = blockIdx.x; next < tasks;) {
    const TileTask task(lists, next, unit);
    next += gridDim.x;
    if (next < tasks) {
      unit = lists.unit_of(next);
    }
    if (task.num_entries == 0) {
      continue;
    }
    const uint32_t* entries = lists.entries + task.first_entry + number;
    const int32_t* slots = lists.slots + int64_t{task.first_entry} * kBlocks + lane;
    int token = 0, slot = 0;
    const auto ask = [&](int entry) {
      const int left = task.num_entries - entry;
      token = has_box && number < left ? static_cast<int>(entries[entry] & 0xffffffu) * kBlock : -1;
      slot = has_slot && lane / kBlocks < left ? slots[entry * kBlocks] : -1;
    };
    const int line = has_box ? lists.lines[task.tile * kBlocks + number] : 0;
    ask(0);
    memory.free[ring.stage].wait(ring.parity ^ 1);
    if (lane == 0) {
      memory.units[ring.stage] = {task.first_value(lists), (task.num_entries + kBlocks - 1) / kBlocks};
      memory.there[ring.stage].arrive_and_expect(kBlocks * kBlockBytes);
    }
    if (has_box) {
      copy(a, task, line * kBlock);  // zeros where there is no line
    }
    ring.next();
    for (int entry = 0; entry < task.num_entries; entry += kBlocks, ring.next()) {
      const int own_token = token, own_slot = slot;
      ask(entry + kBlocks);
      memory.free[ring.stage].wait(ring.parity ^ 1);
      if (has_slot) {
        memory.slots[ring.stage][lane % kBlocks].element[lane / kBlocks] = own_slot;
      }
      __syncwarp();
      if (lane == 0) {
        memory.there[ring.stage].arrive_and_expect(min(kBlocks, task.num_entries - entry) * kBlockBytes);
      }
      // Blocks that are not there leave what was in their place: products whose slots are -1.
      if (own_token >= 0) {
        copy(b, task, own_token);
      }
    }
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
  constexpr int kBlocks = M::kBlocks, kRuns = kBlock / 16, kDepth = kPanels * kPanel / 16;
  constexpr int kStageElements = kPanels * kTileElements;
  const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32), strip = warp * 16;
  const hopper::Operand all_columns(memory.stages[0][0]);
  // Where the lane points at a run of its warp's rows: of their first 16 numbers, in the first stage.
  const T* rows_run = kept_shared(run_of_line(memory.stages[0][0], strip + lane % 16, lane / 16));
  // The warp's part of a block passes through its results, from the lanes that have it as a product's sums, by 16 columns,
  // to those that store it, a run or two each.
  T* results = memory.results[warp];
  T* product_runs[kRuns];
#pragma unroll
  for (int j = 0; j < kRuns; ++j) {
    product_runs[j] = kept_shared(run_of_short_line<kBlock>(results, lane % 16, 2 * j + lane / 16));
  }
  constexpr int kRunsOfLine = kBlock / kRun<T>;
  const T* own_run = kept_shared(run_of_short_line<kBlock>(results, lane / kRunsOfLine, lane % kRunsOfLine));
  out += strip % kBlock * kBlock + lane * kRun<T>;
  Ring<M::kStages> ring;
  const auto is_free = [&]() {
    __syncwarp();
    if (lane == 0) {
      memory.free[ring.stage].arrive();
    }
  };
  for (;;) {
    memory.there[ring.stage].wait(ring.parity);
    int steps = uniform(memory.units[ring.stage].steps);
    if (steps < 0) {
      break;
    }
    T* values = kept(out + memory.units[ring.stage].first_value * (kBlock * kBlock));
    uint32_t rows[kDepth][4];
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      const uint32_t first_run = shared_address(rows_run + ring.stage * kStageElements);
      load_matrices<false>(rows[k], (first_run ^ k % 4 * 32) + k / 4 * kTileBytes);
    }
    is_free();
    ring.next();
    for (; steps > 0; --steps, ring.next()) {
      const hopper::Operand columns = all_columns + uniform(ring.stage * kStageElements * sizeof(T));
      memory.there[ring.stage].wait(ring.parity);
      const auto slots = memory.slots[ring.stage][strip / kBlock];
      float sums[kTile / 2];
      begin_products();
#pragma unroll
      for (int k = 0; k < kDepth; ++k) {
        Products<T>::template from_registers<kTile, true>(
            sums, rows[k], columns.from(k / 4 * kTileBytes + k % 4 * 32), k > 0);
      }
      end_products();
      wait_for_products<0>();
      sums_are_there(sums);
      is_free();
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        if (slots.element[i] >= 0) {
#pragma unroll
          for (int j = 0; j < kRuns; ++j) {
            uint32_t rounded[4];
            round_columns<T>(rounded, sums, i * kRuns + j);
            store_matrices(product_runs[j] + i * 16 * kBlock, rounded);
          }
        }
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        if (slots.element[i] >= 0) {
#pragma unroll
          for (int j = 0; j < kRuns; ++j) {
            const int from = j * 32 * kRun<T>;
            T* to = values + int64_t{slots.element[i]} * (kBlock * kBlock) + from;
            store_run(to, load_aligned(own_run + i * 16 * kBlock + from));
          }
        }
      }
      __syncwarp();
    }
  }
}

template <class T, int kPanels, int kBlock>
__global__ void __launch_bounds__(kThreads, kThreadBlocksOfTiles<kPanels>) sdd_of_tiles_kernel(
    const __grid_constant__ TileLists lists, const __grid_constant__ CUtensorMap a,
    const __grid_constant__ CUtensorMap b, T* out) {
  extern __shared__ unsigned char shared[];
  using M = Memory<T, kPanels, kBlock>;
  auto& memory = *reinterpret_cast<M*>(align_panels(shared));
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < M::kStages; ++stage) {
      memory.there[stage].init(1);
      memory.free[stage].init(kMultiplying / 32);
    }
    fence_barriers();
  }
  __syncthreads();
  if (threadIdx.x < kMultiplying) {
    multiply_all<T, kPanels, kBlock>(memory, out);
  } else {
    copy_all<T, kPanels, kBlock>(lists, memory, &a, &b);
  }
}

}  // namespace

void sdd_of_tiles_on_hopper(
    const Launcher& launch, const Tensor& a, const Tensor& b, const Tensor& out, const TileLists& lists, int64_t block) {
  const Tensor b_lines = torch::stable::transpose(b, 2, 3);
  const auto run = [&](auto zero, auto panels, auto tokens) {
    using T = decltype(zero);
    constexpr int kPanels = decltype(panels)::value, kBlock = decltype(tokens)::value;
    const int64_t most = launch.multiprocessors() * kThreadBlocksOfTiles<kPanels>;
    launch.with_shared_memory(
        sdd_of_tiles_kernel<T, kPanels, kBlock>, std::min<int64_t>(lists.tasks(), most), kThreads,
        sizeof(Memory<T, kPanels, kBlock>) + kPanelAlignment, lists, tensor_map(a, kBlock), tensor_map(b_lines, kBlock),
        static_cast<T*>(out.mutable_data_ptr()));
  };
  const auto with_block = [&](auto zero, auto panels) {
    block == 16 ? run(zero, panels, std::integral_constant<int, 16>{})
                : run(zero, panels, std::integral_constant<int, 32>{});
  };
  const auto with_depth = [&](auto zero) {
    a.size(3) <= kPanel ? with_block(zero, std::integral_constant<int, 1>{})
                        : with_block(zero, std::integral_constant<int, 2>{});
  };
  a.scalar_type() == ScalarType::Half ? with_depth(__half{}) : with_depth(__nv_bfloat16{});
}

}  // namespace ds_sparse
