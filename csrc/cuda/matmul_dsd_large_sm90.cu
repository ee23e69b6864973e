// Sparse @ dense for blocks of 64 and 128, on Hopper, 16-bit types, up to 128 columns; either dimension of the dense
// operand may be adjacent. A thread block takes unit after unit of the layout's tiles (matmul_tiles.h), of 128 rows: each of
// two warpgroups multiplies 64 of them, the rows of one block, or half of a larger one's, with the dense lines that both
// share, 64 tokens at a time. A warpgroup whose block is not live goes on to the next step at once.

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <type_traits>

#include "matmul_dsd_sm90.h"

namespace ds_sparse {
namespace {

using namespace hopper;

constexpr int kGroups = 2;  // warpgroups that multiply
constexpr int kWarps = kGroups * kMultiplying / 32;

// A thread block has a multiprocessor for itself, and as deep a ring as there is room for.
template <class T, int kN>
struct Memory {
  static constexpr int kPanels = kN / kPanel, kStages = kPanels == 1 ? 8 : 6;
  static constexpr int kBoxes = kPanels + kGroups;  // of a step, each of which a warp of its own copies
  static constexpr int kThreads = (kWarps + kBoxes) * 32;
  T dense[kStages][kPanels][kTileElements];
  T values[kStages][kGroups][kTileElements];
  T results[kGroups][kPanels][kTileElements];
  Barrier there[kStages], free[kStages];
  Step steps[kStages][kGroups];
  int tokens[kStages][kGroups];  // of the result, the first of each warpgroup's; -1 where it has none
};

// How operands lie in memory.
struct Operands {
  bool blocks_are_transposed, dense_is_lines;
};

template <int kBlock, class T, int kN>
__device__ __forceinline__ void copy_all(
    const TileProduct<T>& p, const Operands& operands, Memory<T, kN>& memory, const CUtensorMap* values,
    const CUtensorMap* dense) {
  using M = Memory<T, kN>;
  constexpr int kLines = kGroups * kTile / kBlock, kParts = kBlock / kTile;  // of a tile; of a block, a step each
  const bool elected = threadIdx.x % 32 == 0;
  const TileLists& lists = p.lists;
  const int tasks = lists.tasks();
  // The warp's: a panel of dense, or, of each block, what belongs to the rows of a warpgroup.
  const int box = uniform(threadIdx.x / 32) - kWarps, group = box - M::kPanels;
  const bool is_dense = group < 0;
  const int line = is_dense ? 0 : group * kTile / kBlock, first_row = group * kTile % kBlock;
  Ring<M::kStages> ring;
  // A unit is asked for before the one that precedes it is done, and so are entries.
  int4 unit = lists.unit_of(blockIdx.x);
  uint32_t turn = 0;
  for (int next = lists.task_of(turn); next < tasks;) {
    const TileTask task(lists, next, unit);
    next = lists.task_of(++turn);
    if (next < tasks) {
      unit = lists.unit_of(next);
    }
    const int32_t* list = is_dense ? reinterpret_cast<const int32_t*>(lists.entries + task.first_entry)
                                   : lists.slots + int64_t{task.first_entry} * kLines + line;
    const int next_in_list = is_dense ? 1 : kLines;
    // A unit without an entry has a step, too: its result is zeros. So few lines leave an entry's sign alone.
    const int steps = max(1, task.num_entries * kParts);
    int word = -1;
    const auto ask = [&](int step) {
      const int entry = step / kParts;
      word = entry < task.num_entries ? list[entry * next_in_list] : -1;
    };
    ask(0);
    const int line_in_head = lists.lines[task.tile * kLines + line];
    const int first_value = lists.layout_heads == 1 ? task.head * lists.live : 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step, ring.next()) {
      const int now = word, within = step % kParts * kTile;
      ask(step + 1);
      Barrier& there = memory.there[ring.stage];
      memory.free[ring.stage].wait(ring.parity ^ 1);
      if (elected) {
        if (!is_dense) {
          memory.steps[ring.stage][group] =
              Step{task.batch, task.head, p.part_of_all(task), now >= 0, step == 0, step + 1 == steps};
          memory.tokens[ring.stage][group] = line_in_head < 0 ? -1 : line_in_head * kBlock + first_row;
        }
        if (now < 0) {
          there.arrive();
        } else {
          there.arrive_and_expect(kTileBytes);
          if (is_dense) {
            const int token = (now & 0xffffff) * kBlock + within, column = box * kPanel;
            copy_box(
                memory.dense[ring.stage][box], dense, &there, operands.dense_is_lines ? column : token,
                operands.dense_is_lines ? token : column, task.head, task.batch);
          } else {
            const bool transposed = operands.blocks_are_transposed;
            copy_box(
                memory.values[ring.stage][group], values, &there, transposed ? first_row : within,
                transposed ? within : first_row, first_value + now, task.batch);
          }
        }
      }
      __syncwarp();
    }
  }
  memory.free[ring.stage].wait(ring.parity ^ 1);
  if (elected) {
    if (!is_dense) {
      memory.steps[ring.stage][group].batch = -1;
    }
    memory.there[ring.stage].arrive();
  }
}

// sums (64 x kN) = or += a tile of values @ 64 tokens.
template <class T, int kN, bool kDenseIsLines, bool kTransposed>
__device__ __forceinline__ void multiply(
    float (&sums)[kN / 2], const hopper::Operand& values, const hopper::Operand& dense, bool add) {
  // 16 tokens on: so many lines, or so many elements of each.
  constexpr uint32_t lines = 16 * kLineBytes, elements = 32;
  begin_products();
#pragma unroll
  for (int k = 0; k < kTile / 16; ++k) {
    Products<T>::template from_shared<kN, !kDenseIsLines, kTransposed>(
        sums, values.from(k * (kTransposed ? lines : elements)), dense.from(k * (kDenseIsLines ? lines : elements)),
        k > 0 || add);
  }
  end_products();
  wait_for_products<0>();
  sums_are_there(sums);
}

template <class T, int kN>
__device__ __forceinline__ void multiply_all(
    const TileProduct<T>& p, const Operands& operands, Memory<T, kN>& memory, const CUtensorMap* out) {
  using M = Memory<T, kN>;
  const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32), group = warp * 32 / kMultiplying;
  const int first_row_of_warp = warp * kStrip % kTile;
  const hopper::Operand all_values(memory.values[0][group]);
  // How far panels are apart matters where their lines are tokens; else the second one's lines follow the first one's.
  const hopper::Operand all_dense(memory.dense[0][0], uniform(operands.dense_is_lines ? kTileBytes : 0));
  float sums[kN / 2];
  bool has_sums = false;
  for (Ring<M::kStages> place;; place.next()) {
    memory.there[place.stage].wait(place.parity);
    const Step step = memory.steps[place.stage][group];
    if (step.batch < 0) {
      break;
    }
    const int token = memory.tokens[place.stage][group];
    has_sums = has_sums && !step.first;
    if (step.live) {
      const hopper::Operand values = all_values + uniform(place.stage * sizeof(memory.values[0]));
      const hopper::Operand dense = all_dense + uniform(place.stage * sizeof(memory.dense[0]));
      if (operands.blocks_are_transposed) {
        operands.dense_is_lines ? multiply<T, kN, true, true>(sums, values, dense, has_sums)
                                : multiply<T, kN, false, true>(sums, values, dense, has_sums);
      } else {
        operands.dense_is_lines ? multiply<T, kN, true, false>(sums, values, dense, has_sums)
                                : multiply<T, kN, false, false>(sums, values, dense, has_sums);
      }
      has_sums = true;
    }
    __syncwarp();
    if (lane == 0) {
      memory.free[place.stage].arrive();
    }
    if (!step.last || token < 0) {
      continue;
    }
    if (!has_sums) {
#pragma unroll
      for (float& sum : sums) {
        sum = 0;
      }
    }
    store_sums<kN>(p, memory.results[group][0], out, step, token + first_row_of_warp, sums);
  }
  if (lane == 0) {
    wait_for_stores();
  }
}

template <class T, int kN, int kBlock>
__global__ void __launch_bounds__(Memory<T, kN>::kThreads, 1)
dsd_of_large_blocks_kernel(
    const __grid_constant__ TileProduct<T> p, const __grid_constant__ CUtensorMap values,
    const __grid_constant__ CUtensorMap dense, const __grid_constant__ CUtensorMap out, const Operands operands) {
  extern __shared__ unsigned char shared[];
  using M = Memory<T, kN>;
  auto& memory = *reinterpret_cast<M*>(align_panels(shared));
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < M::kStages; ++stage) {
      memory.there[stage].init(M::kBoxes);
      memory.free[stage].init(kWarps);
    }
    fence_barriers();
  }
  __syncthreads();
  if (threadIdx.x < kWarps * 32) {
    multiply_all<T, kN>(p, operands, memory, &out);
  } else {
    copy_all<kBlock>(p, operands, memory, &values, &dense);
  }
}

}  // namespace

bool takes_dsd_on_hopper(const Launcher& launch, const Tensor& values, const Tensor& dense, int64_t block) {
  const int64_t width = dense.size(3);
  return launch.is_hopper() && dense.element_size() == 2 && width <= kMostDepth && width % 8 == 0 &&
         values.numel() > 0 && takes_boxes(values) &&
         (takes_boxes(dense) || (block >= kTile && takes_boxes(torch::stable::transpose(dense, 2, 3))));
}

template <class T>
void dsd_of_large_blocks(
    const Launcher& launch, const TileProduct<T>& p, const Tensor& values, const Tensor& dense, const Tensor& out,
    bool transposed) {
  const bool dense_is_lines = takes_boxes(dense);
  const auto run = [&](auto width, auto block) {
    constexpr int kN = decltype(width)::value, kBlock = decltype(block)::value;
    using M = Memory<T, kN>;
    launch.with_shared_memory(
        dsd_of_large_blocks_kernel<T, kN, kBlock>, std::min<int64_t>(p.lists.tasks(), launch.multiprocessors()),
        M::kThreads, sizeof(M) + kPanelAlignment, p, tensor_map(values, kTile),
        tensor_map(dense_is_lines ? dense : torch::stable::transpose(dense, 2, 3), kTile), result_map(p, out),
        Operands{transposed, dense_is_lines});
  };
  const auto with_block = [&](auto width) {
    p.block == 64 ? run(width, std::integral_constant<int, 64>{}) : run(width, std::integral_constant<int, 128>{});
  };
  p.result.width <= kPanel ? with_block(std::integral_constant<int, kPanel>{})
                           : with_block(std::integral_constant<int, 2 * kPanel>{});
}

template void dsd_of_large_blocks(
    const Launcher&, const TileProduct<__half>&, const Tensor&, const Tensor&, const Tensor&, bool);
template void dsd_of_large_blocks(
    const Launcher&, const TileProduct<__nv_bfloat16>&, const Tensor&, const Tensor&, const Tensor&, bool);

}  // namespace ds_sparse
