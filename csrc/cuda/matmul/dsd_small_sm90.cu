// Sparse @ dense for blocks of 16 and 32, on Hopper, 16-bit types, up to 128 columns, which are adjacent in the dense
// operand. A step (dsd_sm90.h) sums over the tokens of four or two entries of a tile's list. Blocks are the left
// operand, from registers: of each 16 tokens a warp's 16 rows, which are in one line of the tile, have one block, or a
// quarter of one, or nothing. So only blocks that are there are copied and read, as they lie in memory, transposed or
// not.

#include <algorithm>
#include <type_traits>

#include "../../packing.h"
#include "../common/mma.h"
#include "dsd_sm90.h"
#include "tuning.h"

namespace ds_sparse {
namespace {

using namespace hopper;

template <int kBlock>
constexpr int kBlockRows = kProductTile / kBlock;  // of a tile
template <int kBlock>
constexpr int kEntries = kTile / kBlock;  // of a step

// Values of each line of each entry.
template <class T, int kN, int kBlock>
using Shared = Memory<T, kN, SmallDsdTuning<kN>::kStages, T[kEntries<kBlock>][kBlockRows<kBlock>][kBlock * kBlock]>;

// With what each thread block has reserved, of the 228 KB of a multiprocessor.
static_assert(SmallDsdTuning<kPanel>::kThreadBlocks * (sizeof(Shared<__half, kPanel, 16>) + 1024) <= 228 * 1024);

// A stage has a producer warp of its own.
template <class T, int kN, int kBlock>
constexpr int kThreads = (kConsumerWarps + Shared<T, kN, kBlock>::kStages) * 32;

// The bits of a step's blocks that are in so many lines from one on.
template <int kBlock>
__device__ __forceinline__ uint32_t blocks_of_block_rows(int first, int count) {
  uint32_t blocks = 0;
#pragma unroll
  for (int entry = 0; entry < kEntries<kBlock>; ++entry) {
    blocks |= ((1u << count) - 1) << (entry * kBlockRows<kBlock>);
  }
  return blocks << first;
}

// The work tiles of a thread block. A warp asks for 32 of them together, long before most are needed.
class WorkTileIterator {
 public:
  __device__ explicit WorkTileIterator(const ProductTileLists& lists) : lists_(lists) { read(); }

  __device__ bool valid() const { return number_of_work_ < lists_.total_work_tiles(); }
  __device__ ProductWorkTile get() const {
    const auto of_lane = [&](int x) { return __shfl_sync(0xffffffffu, x, lane_of_work_); };
    return {
        lists_, number_of_work_,
        make_int4(of_lane(listed_.x), of_lane(listed_.y), of_lane(listed_.z), of_lane(listed_.w))};
  }
  __device__ void next() {
    number_of_work_ = lists_.number_of_turn(++turn_);
    if (++lane_of_work_ == 32) {
      lane_of_work_ = 0;
      read();
    }
  }

 private:
  __device__ void read() { listed_ = lists_.listed_work_tile(lists_.number_of_turn(turn_ + threadIdx.x % 32)); }

  const ProductTileLists& lists_;
  uint32_t turn_ = 0;
  int number_of_work_ = lists_.number_of_turn(0), lane_of_work_ = 0;
  int4 listed_;  // of the lane's work tile
};

// The steps of a producer warp, which are those of its stage: to say what a step is about takes longer than to do it. A
// warp with more than one stage, or a stage with more than one warp, could come to a step two phases ahead of the
// pipeline, where the parity that it waits for is that of the phase before.
struct OwnSteps {
  const int stage = uniform(threadIdx.x / 32) - kConsumerWarps;
  uint32_t parity = 1;  // of the phase before the stage's next
  int ahead = stage;    // how many steps of all come before its next
};

constexpr int kLanesOfBlock = SmallDsdCopyTuning::kLanesOfBlock, kBlocksAtOnce = 32 / kLanesOfBlock;
template <int kBlock>
constexpr int kBlocksOfLane = kEntries<kBlock> * kBlockRows<kBlock> / kBlocksAtOnce;

// A step of a work tile, and what the lists have for it.
template <int kBlock>
struct Listed {
  ProductWorkTile work;
  int step = -1;                              // -1: there is none
  int left = 0;                               // entries of the work tile, from the step's first one on
  uint32_t entry = 0;                         // that whose tokens the lane copies
  Run<int32_t, kBlocksOfLane<kBlock>> slots;  // of the blocks that the lane copies, in the order of entries and lines
  int block_row = -1;                         // of a consumer warp's rows, for each of the first lanes; -1: none
};

template <class T, int kN, int kBlock>
__device__ __forceinline__ void run_producer(
    const TileProduct<T>& p, const T* values, Shared<T, kN, kBlock>& memory, const CUtensorMap* dense) {
  using M = Shared<T, kN, kBlock>;
  constexpr int kBlockRows = ds_sparse::kBlockRows<kBlock>, kEntries = ds_sparse::kEntries<kBlock>;
  constexpr int kElements = kBlock * kBlock, kElementsAtOnce = kLanesOfBlock * kRun<T>;
  constexpr int kCopied = kBlocksOfLane<kBlock>;
  const int lane = threadIdx.x % 32, first_block = lane / kLanesOfBlock * kCopied;
  OwnSteps own;
  WorkTileIterator work_tiles(p.lists);
  ProductWorkTile work = work_tiles.get();
  const auto look_up = [&]() -> Listed<kBlock> {
    while (work_tiles.valid()) {
      const int steps = max(1, (work.num_entries + kEntries - 1) / kEntries);
      if (own.ahead < steps) {
        Listed<kBlock> found{work, own.ahead, work.num_entries - own.ahead * kEntries};
        const int first = work.first_entry + own.ahead * kEntries;
        const int32_t* slots = p.lists.slots + int64_t{first} * kBlockRows;
        if (lane % kEntries < found.left) {
          found.entry = p.lists.entries[first + lane % kEntries];
        }
        if (first_block / kBlockRows < found.left) {
          found.slots = *reinterpret_cast<const Run<int32_t, kCopied>*>(slots + first_block);
        } else {
#pragma unroll
          for (int32_t& slot : found.slots.element) {
            slot = -1;
          }
        }
        if (lane < kConsumerWarps) {
          found.block_row = p.lists.block_rows[work.tile * kBlockRows + lane * kWarpTileRows / kBlock];
        }
        own.ahead += M::kStages;
        return found;
      }
      own.ahead -= steps;
      work_tiles.next();
      work = work_tiles.get();
    }
    return {work};
  };
  const auto values_of = [&](const ProductWorkTile& of) { return values + of.first_value(p.lists) * kElements; };
  Barrier &full = memory.full[own.stage], &empty = memory.empty[own.stage];
  // Where the lane's first 16 bytes of its first block go; runs are swapped differently in the lines of the next
  // copies.
  constexpr int kRuns = kBlock / kRun<T>;  // of a block's line
  uint32_t to[kRuns];
#pragma unroll
  for (int i = 0; i < kRuns; ++i) {
    T* block = memory.values[own.stage][0][0] + first_block * kElements;
    const int run = lane % kLanesOfBlock + i * kLanesOfBlock;
    to[i] = shared_address(kept_shared(run_of_short_line<kBlock>(block, run / kRuns, run % kRuns)));
  }
  for (Listed<kBlock> next = look_up(); next.step >= 0; own.parity ^= 1) {
    // The lists are read a step ahead, and answer while the stage is still in use.
    const Listed<kBlock> now = next;
    next = look_up();
    empty.wait(own.parity);
    if (lane == 0) {
      full.expect_tx(kTile * kN * sizeof(T));
    }
    __syncwarp();
    if (lane < kEntries * M::kPanels) {
      // Past the list's end there are zeros, as there are outside of tensors; a work tile without an entry has a step
      // of them.
      constexpr int kOutside = 1 << 30;
      const int token = lane % kEntries < now.left ? static_cast<int>(block_of(now.entry)) * kBlock : kOutside;
      tma_load(
          memory.dense[own.stage][lane / kEntries] + lane % kEntries * kBlock * kPanel, dense, &full,
          lane / kEntries * kPanel, token, now.work.head, now.work.batch);
    }
    const T* from = kept(values_of(now.work) + lane % kLanesOfBlock * kRun<T>);
    // Copies that follow each other are of different blocks: under one condition they would become branches.
    constexpr int kMixed = std::min(kCopied, 4);
#pragma unroll
    for (int first = 0; first < kCopied; first += kMixed) {
#pragma unroll
      for (int at = 0; at < kElements / kElementsAtOnce; ++at) {
#pragma unroll
        for (int i = first; i < first + kMixed; ++i) {
          const int number = now.slots.element[i], lines = at / kRuns * kRuns * kElementsAtOnce;
          start_copy_of(
              number, to[at % kRuns] + (i * kElements + lines) * sizeof(T),
              from + int64_t{number} * kElements + at * kElementsAtOnce);
        }
      }
    }
    end_of_copies();
    const uint32_t live = __reduce_or_sync(0xffffffffu, owners_of(now.entry) << (lane % kEntries * kBlockRows));
    if (lane < kConsumerWarpgroups) {
      constexpr int kOwn = kBlockRows / kConsumerWarpgroups;
      memory.steps[own.stage][lane] = Step{
          live & blocks_of_block_rows<kBlock>(lane * kOwn, kOwn), now.work.batch,
          now.left <= kEntries ? now.work.head : -1, p.split_of_all(now.work)};
    }
    if (lane < kConsumerWarps) {
      memory.entries[own.stage] = make_int2(now.work.first_entry, now.work.num_entries);
      memory.tokens[own.stage][lane] = now.block_row < 0 ? -1 : now.block_row * kBlock + lane * kWarpTileRows % kBlock;
    }
    wait_for_copies<0>();
    warp_arrive(full, lane);
  }
  if (own.ahead == 0) {
    empty.wait(own.parity);
    if (lane < kConsumerWarpgroups) {
      memory.steps[own.stage][lane].batch = -1;
    }
    warp_arrive(full, lane);
  }
}

// A dense operand as it lies in memory; its columns are adjacent.
template <class T>
struct DenseRows {
  const T* data;
  int64_t batch_stride, head_stride, token_stride;
};

// Rows of a warp's sums that are not finite, summed again, a number at a time and of their own blocks alone: a step
// multiplies the tokens of all of its blocks with every line of the tile, which has zeros where it has no block, and
// zero times NaN is NaN. What of a warp's sums is a lane's: of the rows at lane / 4 and 8 after it, two columns of 8.
template <int kN, int kBlock, bool kTransposed, class T>
__device__ __forceinline__ void sum_again_if_not_finite(
    float (&sums)[kN / 2], const TileProduct<T>& p, const T* values, const DenseRows<T>& dense, const int2& entries,
    const Step& step) {
  float probe0 = 0, probe8 = 0;
#pragma unroll
  for (int i = 0; i < kN / 2; i += 4) {
    probe0 = fmaf(sums[i], sums[i + 1], probe0);
    probe8 = fmaf(sums[i + 2], sums[i + 3], probe8);
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t lanes_of_row = 0xfu << lane / 4 * 4;
  const uint32_t spoilt0 = __ballot_sync(0xffffffffu, !isfinite(probe0));
  const uint32_t spoilt8 = __ballot_sync(0xffffffffu, !isfinite(probe8));
  if ((spoilt0 | spoilt8) == 0) {
    return;
  }
  const bool again0 = (spoilt0 & lanes_of_row) != 0, again8 = (spoilt8 & lanes_of_row) != 0;
  const int block_row = warp * kWarpTileRows / kBlock, row = warp * kWarpTileRows % kBlock + lane / 4;
  const ProductTileLists& lists = p.lists;
  const int copy = lists.layout_heads == 1 ? step.batch * lists.heads + step.head : step.batch;
  const T* of_copy = values + int64_t{copy} * lists.live * (kBlock * kBlock);
  const T* of_head = dense.data + step.batch * dense.batch_stride + step.head * dense.head_stride + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) {
    sums[i] = (i % 4 < 2 ? again0 : again8) ? 0 : sums[i];
  }
#pragma unroll 1
  for (int entry = entries.x; entry < entries.x + entries.y; ++entry) {
    const int slot = lists.slots[int64_t{entry} * kBlockRows<kBlock> + block_row];
    if (slot < 0) {
      continue;
    }
    const T* value = of_copy + int64_t{slot} * (kBlock * kBlock) + (kTransposed ? row : row * kBlock);
    const T* of_token = of_head + int64_t{block_of(lists.entries[entry])} * kBlock * dense.token_stride;
#pragma unroll 1
    for (int token = 0; token < kBlock; ++token) {
      const float value0 = static_cast<float>(value[0]),
                  value8 = static_cast<float>(value[kTransposed ? 8 : 8 * kBlock]);
#pragma unroll
      for (int i = 0; i < kN / 2; i += 4) {
        if (2 * i < p.result.width) {
          const float x = static_cast<float>(of_token[2 * i]), y = static_cast<float>(of_token[2 * i + 1]);
          sums[i] = again0 ? fmaf(value0, x, sums[i]) : sums[i];
          sums[i + 1] = again0 ? fmaf(value0, y, sums[i + 1]) : sums[i + 1];
          sums[i + 2] = again8 ? fmaf(value8, x, sums[i + 2]) : sums[i + 2];
          sums[i + 3] = again8 ? fmaf(value8, y, sums[i + 3]) : sums[i + 3];
        }
      }
      value += kTransposed ? kBlock : 1;
      of_token += dense.token_stride;
    }
  }
}

template <class T, int kN, int kBlock, bool kTransposed>
__global__ void __launch_bounds__(kThreads<T, kN, kBlock>, SmallDsdTuning<kN>::kThreadBlocks)
    dsd_of_small_blocks_kernel(
        const __grid_constant__ TileProduct<T> p, const T* values, const __grid_constant__ CUtensorMap dense,
        const __grid_constant__ CUtensorMap out, const __grid_constant__ DenseRows<T> dense_rows) {
  let_next_begin();
  extern __shared__ __align__(kPanelAlignment) unsigned char shared[];
  auto& memory = *reinterpret_cast<Shared<T, kN, kBlock>*>(align_panels(shared));
  if (threadIdx.x == 0) {
    memory.init(1);
  }
  __syncthreads();
  if (threadIdx.x >= kConsumerWarps * 32) {
    run_producer<T, kN, kBlock>(p, values, memory, &dense);
    return;
  }
  const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32);
  const int block_row = warp * kWarpTileRows / kBlock, first_row = warp * kWarpTileRows % kBlock;
  const GmmaDescriptor all_dense(memory.dense[0][0], kTileBytes);
  // Where the lane finds a row of one of the four matrices of 8 x 8 that its warp reads of a block.
  constexpr int kSlices = kBlock / 16;  // of 16 tokens, in an entry
  uint32_t of_lane[kSlices];
#pragma unroll
  for (int slice = 0; slice < kSlices; ++slice) {
    const int first_token = slice * 16;
    const int row = kTransposed ? first_token + lane / 16 * 8 + lane % 8 : first_row + lane % 16;
    const int run = kTransposed ? first_row / 8 + lane / 8 % 2 : first_token / 8 + lane / 16;
    of_lane[slice] = shared_address(kept_shared(run_of_short_line<kBlock>(memory.values[0][0][block_row], row, run)));
  }
  run_consumer<kN>(
      p, memory, &out, blocks_of_block_rows<kBlock>(block_row, 1),
      [&](float (&sums)[kN / 2], int stage, uint32_t live, bool add) {
        uint32_t left[kTile / 16][4] = {};
#pragma unroll
        for (int k = 0; k < kTile / 16; ++k) {
          const int entry = k / kSlices;
          if (live >> block_row >> (entry * kBlockRows<kBlock>)&1) {
            load_matrices<kTransposed>(
                left[k], of_lane[k % kSlices] + stage * int{sizeof(memory.values[0])} +
                             entry * int{sizeof(memory.values[0][0])});
          }
        }
        const GmmaDescriptor right = all_dense + uniform(stage * sizeof(memory.dense[0]));
        warpgroup_arrive();
#pragma unroll
        for (int k = 0; k < kTile / 16; ++k) {
          Wgmma<T>::template from_registers<kN>(sums, left[k], right.from(k * 16 * kLineBytes), k > 0 || add);
        }
        warpgroup_commit_batch();
        warpgroup_wait<0>();
        warpgroup_fence_operand(sums);
      },
      [&](float (&sums)[kN / 2], const int2& entries, const Step& step) {
        sum_again_if_not_finite<kN, kBlock, kTransposed>(sums, p, values, dense_rows, entries, step);
      });
}

}  // namespace

template <class T>
void dsd_of_small_blocks(
    const Launcher& launch, const TileProduct<T>& p, const Tensor& values, const Tensor& dense, const Tensor& out,
    bool transposed) {
  const Tensor read_values = readable_in_boxes(values), read_dense = readable_in_boxes(dense);
  const DenseRows<T> rows{
      static_cast<const T*>(read_dense.const_data_ptr()), read_dense.stride(0), read_dense.stride(1),
      read_dense.stride(2)};
  const auto run = [&](auto width, auto block) {
    constexpr int kN = decltype(width)::value, kBlock = decltype(block)::value;
    launch.with_shared_memory(
        transposed ? dsd_of_small_blocks_kernel<T, kN, kBlock, true> : dsd_of_small_blocks_kernel<T, kN, kBlock, false>,
        std::min<int64_t>(p.lists.total_work_tiles(), launch.multiprocessors() * SmallDsdTuning<kN>::kThreadBlocks),
        kThreads<T, kN, kBlock>, sizeof(Shared<T, kN, kBlock>), p, static_cast<const T*>(read_values.const_data_ptr()),
        tensor_map(read_dense, kBlock), result_map(p, out), rows);
  };
  const auto with_block = [&](auto width) {
    p.block == 16 ? run(width, std::integral_constant<int, 16>{}) : run(width, std::integral_constant<int, 32>{});
  };
  p.result.width <= kPanel ? with_block(std::integral_constant<int, kPanel>{})
                           : with_block(std::integral_constant<int, 2 * kPanel>{});
}

template void dsd_of_small_blocks(
    const Launcher&, const TileProduct<__half>&, const Tensor&, const Tensor&, const Tensor&, bool);
template void dsd_of_small_blocks(
    const Launcher&, const TileProduct<__nv_bfloat16>&, const Tensor&, const Tensor&, const Tensor&, bool);

}  // namespace ds_sparse
