// Sparse @ dense for blocks of 64 and 128, on Hopper, 16-bit types, up to 128 columns, which are adjacent in the dense
// operand. The rows of a warpgroup (dsd_sm90.h) are those of one block, or half of a larger one's, which the copy
// engine brings, transposed or not, 64 x 64 values a step.

#include <algorithm>
#include <type_traits>

#include "dsd_sm90.h"

namespace ds_sparse {
namespace {

using namespace hopper;

// A thread block has a multiprocessor for itself, and as deep a ring as there is room for.
template <class T, int kN>
using Shared = Memory<T, kN, kN == kPanel ? 8 : 6, T[kGroups][kTileElements]>;

// Boxes of a step, each of which a warp of its own copies.
template <int kN>
constexpr int kBoxes = kN / kPanel + kGroups;
template <int kN>
constexpr int kThreads = (kWarps + kBoxes<kN>) * 32;

template <int kBlock, class T, int kN>
__device__ __forceinline__ void copy_all(
    const TileProduct<T>& p, Shared<T, kN>& memory, const CUtensorMap* values, const CUtensorMap* dense,
    bool transposed) {
  using M = Shared<T, kN>;
  constexpr int kLines = kProductTile / kBlock, kParts = kBlock / kTile;  // of a tile; of a block, a step each
  const int lane = threadIdx.x % 32;
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
    unit = lists.unit_of(next);
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
      if (!is_dense && lane < kTile / kStrip) {
        memory.tokens[ring.stage][group * kTile / kStrip + lane] =
            line_in_head < 0 ? -1 : line_in_head * kBlock + first_row + lane * kStrip;
      }
      __syncwarp();
      if (lane == 0) {
        if (!is_dense) {
          memory.steps[ring.stage][group] =
              Step{now >= 0, task.batch, step + 1 == steps ? task.head : -1, p.part_of_all(task)};
        }
        if (now < 0) {
          there.arrive();
        } else {
          there.arrive_and_expect(kTileBytes);
          if (is_dense) {
            copy_box(
                memory.dense[ring.stage][box], dense, &there, box * kPanel, (now & 0xffffff) * kBlock + within, task.head,
                task.batch);
          } else {
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
  if (lane == 0) {
    if (!is_dense) {
      memory.steps[ring.stage][group].batch = -1;
    }
    memory.there[ring.stage].arrive();
  }
}

// sums (64 x kN) = or += a tile of values @ 64 tokens.
template <class T, int kN, bool kTransposed>
__device__ __forceinline__ void multiply(
    float (&sums)[kN / 2], const hopper::Operand& values, const hopper::Operand& dense, bool add) {
  constexpr uint32_t lines = 16 * kLineBytes, elements = 32;  // 16 tokens on
  begin_products();
#pragma unroll
  for (int k = 0; k < kTile / 16; ++k) {
    Products<T>::template from_shared<kN, false, kTransposed>(
        sums, values.from(k * (kTransposed ? lines : elements)), dense.from(k * lines), k > 0 || add);
  }
  end_products();
  wait_for_products<0>();
  sums_are_there(sums);
}

template <class T, int kN, int kBlock>
__global__ void __launch_bounds__(kThreads<kN>, 1) dsd_of_large_blocks_kernel(
    const __grid_constant__ TileProduct<T> p, const __grid_constant__ CUtensorMap values,
    const __grid_constant__ CUtensorMap dense, const __grid_constant__ CUtensorMap out, bool transposed) {
  let_next_begin();
  extern __shared__ __align__(kPanelAlignment) unsigned char shared[];
  auto& memory = *reinterpret_cast<Shared<T, kN>*>(align_panels(shared));
  if (threadIdx.x == 0) {
    memory.init(kBoxes<kN>);
  }
  __syncthreads();
  if (threadIdx.x >= kWarps * 32) {
    copy_all<kBlock, T, kN>(p, memory, &values, &dense, transposed);
    return;
  }
  const hopper::Operand all_values(memory.values[0][uniform(threadIdx.x / kMultiplying)]);
  const hopper::Operand all_dense(memory.dense[0][0], kTileBytes);
  multiply_all<kN>(p, memory, &out, 1, [&](float (&sums)[kN / 2], int stage, uint32_t, bool add) {
    const hopper::Operand of_stage = all_values + uniform(stage * sizeof(memory.values[0]));
    const hopper::Operand dense_of_stage = all_dense + uniform(stage * sizeof(memory.dense[0]));
    transposed ? multiply<T, kN, true>(sums, of_stage, dense_of_stage, add)
               : multiply<T, kN, false>(sums, of_stage, dense_of_stage, add);
  });
}

}  // namespace

bool takes_dsd_on_hopper(const Launcher& launch, const Tensor& values, const Tensor& dense) {
  return launch.is_hopper() && dense.element_size() == 2 && dense.size(3) <= kMostDepth && dense.size(3) % 8 == 0 &&
         values.numel() > 0 && takes_boxes(values) && takes_boxes(dense);
}

template <class T>
void dsd_of_large_blocks(
    const Launcher& launch, const TileProduct<T>& p, const Tensor& values, const Tensor& dense, const Tensor& out,
    bool transposed) {
  const auto run = [&](auto width, auto block) {
    constexpr int kN = decltype(width)::value, kBlock = decltype(block)::value;
    launch.with_shared_memory(
        dsd_of_large_blocks_kernel<T, kN, kBlock>, std::min<int64_t>(p.lists.tasks(), launch.multiprocessors()),
        kThreads<kN>, sizeof(Shared<T, kN>), p, tensor_map(values, kTile), tensor_map(dense, kTile), result_map(p, out),
        transposed);
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
