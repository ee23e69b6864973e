// Sparse @ dense for blocks of 64 and 128, on Hopper, 16-bit types, up to 128 columns, which are adjacent in the dense
// operand. The rows of a warpgroup (dsd_sm90.h) are those of one block, or half of a larger one's, which the copy
// engine brings, transposed or not, 64 x 64 values a step.

#include <algorithm>
#include <type_traits>

#include "../../packing.h"
#include "dsd_sm90.h"
#include "tuning.h"

namespace ds_sparse {
namespace {

using namespace hopper;

template <class T, int kN>
using Shared = Memory<T, kN, LargeDsdTuning<kN>::kStages, T[kConsumerWarpgroups][kTileElements]>;

// Boxes of a step, each of which a warp of its own copies.
template <int kN>
constexpr int kBoxes = kN / kPanel + kConsumerWarpgroups;
template <int kN>
constexpr int kThreads = (kConsumerWarps + kBoxes<kN>)*32;

template <int kBlock, class T, int kN>
__device__ __forceinline__ void run_producer(
    const TileProduct<T>& p, Shared<T, kN>& memory, const CUtensorMap* values, const CUtensorMap* dense,
    bool transposed) {
  using M = Shared<T, kN>;
  constexpr int kBlockRows = kProductTile / kBlock,
                kStepsOfBlock = kBlock / kTile;  // of a tile; of a block, a step each
  const int lane = threadIdx.x % 32;
  const ProductTileLists& lists = p.lists;
  const int work_tiles = lists.total_work_tiles();
  // The warp's: a panel of dense, or, of each block, what belongs to the rows of a warpgroup.
  const int box = uniform(threadIdx.x / 32) - kConsumerWarps, group = box - M::kPanels;
  const bool is_dense = group < 0;
  const int block_row = is_dense ? 0 : group * kTile / kBlock, first_row = group * kTile % kBlock;
  PipelineState<M::kStages> pipe;
  // A work tile is asked for before the one that precedes it is done, and so are entries.
  int4 listed = lists.listed_work_tile(blockIdx.x);
  uint32_t turn = 0;
  for (int next = lists.number_of_turn(turn); next < work_tiles;) {
    const ProductWorkTile work(lists, next, listed);
    next = lists.number_of_turn(++turn);
    listed = lists.listed_work_tile(next);
    const int32_t* list = is_dense ? reinterpret_cast<const int32_t*>(lists.entries + work.first_entry)
                                   : lists.slots + int64_t{work.first_entry} * kBlockRows + block_row;
    const int next_in_list = is_dense ? 1 : kBlockRows;
    // A work tile without an entry has a step, too: its result is zeros. So few block rows leave an entry's sign alone.
    const int steps = max(1, work.num_entries * kStepsOfBlock);
    int word = -1;
    const auto ask = [&](int step) {
      const int entry = step / kStepsOfBlock;
      word = entry < work.num_entries ? list[entry * next_in_list] : -1;
    };
    ask(0);
    const int block_row_in_head = lists.block_rows[work.tile * kBlockRows + block_row];
    const int first_value = lists.layout_heads == 1 ? work.head * lists.live : 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step, pipe.next()) {
      const int now = word, within = step % kStepsOfBlock * kTile;
      ask(step + 1);
      Barrier& full = memory.full[pipe.index];
      memory.empty[pipe.index].wait(pipe.phase ^ 1);
      if (!is_dense && lane < kTile / kWarpTileRows) {
        memory.tokens[pipe.index][group * kTile / kWarpTileRows + lane] =
            block_row_in_head < 0 ? -1 : block_row_in_head * kBlock + first_row + lane * kWarpTileRows;
      }
      __syncwarp();
      if (lane == 0) {
        if (!is_dense) {
          memory.steps[pipe.index][group] =
              Step{now >= 0, work.batch, step + 1 == steps ? work.head : -1, p.split_of_all(work)};
        }
        if (now < 0) {
          full.arrive();
        } else {
          full.arrive_and_expect_tx(kTileBytes);
          if (is_dense) {
            tma_load(
                memory.dense[pipe.index][box], dense, &full, box * kPanel,
                static_cast<int>(block_of(now)) * kBlock + within, work.head, work.batch);
          } else {
            tma_load(
                memory.values[pipe.index][group], values, &full, transposed ? first_row : within,
                transposed ? within : first_row, first_value + now, work.batch);
          }
        }
      }
      __syncwarp();
    }
  }
  memory.empty[pipe.index].wait(pipe.phase ^ 1);
  if (lane == 0) {
    if (!is_dense) {
      memory.steps[pipe.index][group].batch = -1;
    }
    memory.full[pipe.index].arrive();
  }
}

// sums (64 x kN) = or += a tile of values @ 64 tokens.
template <class T, int kN, bool kTransposed>
__device__ __forceinline__ void multiply(
    float (&sums)[kN / 2], const GmmaDescriptor& values, const GmmaDescriptor& dense, bool add) {
  constexpr uint32_t lines = 16 * kLineBytes, elements = 32;  // 16 tokens on
  warpgroup_arrive();
#pragma unroll
  for (int k = 0; k < kTile / 16; ++k) {
    Wgmma<T>::template from_shared<kN, false, kTransposed>(
        sums, values.from(k * (kTransposed ? lines : elements)), dense.from(k * lines), k > 0 || add);
  }
  warpgroup_commit_batch();
  warpgroup_wait<0>();
  warpgroup_fence_operand(sums);
}

template <class T, int kN, int kBlock>
__global__ void __launch_bounds__(kThreads<kN>, LargeDsdTuning<kN>::kThreadBlocks) dsd_of_large_blocks_kernel(
    const __grid_constant__ TileProduct<T> p, const __grid_constant__ CUtensorMap values,
    const __grid_constant__ CUtensorMap dense, const __grid_constant__ CUtensorMap out, bool transposed) {
  let_next_begin();
  extern __shared__ __align__(kPanelAlignment) unsigned char shared[];
  auto& memory = *reinterpret_cast<Shared<T, kN>*>(align_panels(shared));
  if (threadIdx.x == 0) {
    memory.init(kBoxes<kN>);
  }
  __syncthreads();
  if (threadIdx.x >= kConsumerWarps * 32) {
    run_producer<kBlock, T, kN>(p, memory, &values, &dense, transposed);
    return;
  }
  const GmmaDescriptor all_values(memory.values[0][uniform(threadIdx.x / kWarpgroupThreads)]);
  const GmmaDescriptor all_dense(memory.dense[0][0], kTileBytes);
  const auto multiply_stage = [&](float (&sums)[kN / 2], int stage, uint32_t, bool add) {
    const GmmaDescriptor of_stage = all_values + uniform(stage * sizeof(memory.values[0]));
    const GmmaDescriptor dense_of_stage = all_dense + uniform(stage * sizeof(memory.dense[0]));
    transposed ? multiply<T, kN, true>(sums, of_stage, dense_of_stage, add)
               : multiply<T, kN, false>(sums, of_stage, dense_of_stage, add);
  };
  run_consumer<kN>(p, memory, &out, 1, multiply_stage, [](const auto&, const int2&, const Step&) {});
}

}  // namespace

template <class T>
void dsd_of_large_blocks(
    const Launcher& launch, const TileProduct<T>& p, const Tensor& values, const Tensor& dense, const Tensor& out,
    bool transposed) {
  const Tensor read_values = readable_in_boxes(values), read_dense = readable_in_boxes(dense);
  const auto run = [&](auto width, auto block) {
    constexpr int kN = decltype(width)::value, kBlock = decltype(block)::value;
    launch.with_shared_memory(
        dsd_of_large_blocks_kernel<T, kN, kBlock>,
        std::min<int64_t>(p.lists.total_work_tiles(), launch.multiprocessors() * LargeDsdTuning<kN>::kThreadBlocks),
        kThreads<kN>, sizeof(Shared<T, kN>), p, tensor_map(read_values, kTile), tensor_map(read_dense, kTile),
        result_map(p, out), transposed);
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
