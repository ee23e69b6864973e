// Sparse @ dense for blocks of 16 and 32, on Hopper, 16-bit types, up to 128 columns, which are adjacent in the dense
// operand. A thread block takes unit after unit of the layout's tiles (matmul_tiles.h). A step sums over 64 tokens, those
// of four or two entries of the tile's list, for all 64 rows of the tile. Blocks are the left operand, from registers: of
// each 16 tokens a warp's 16 rows, which are in one line of the tile, have one block, or a quarter of one, or nothing. So
// only blocks that are there are copied and read, as they lie in memory, transposed or not, and warps do not wait for each
// other.

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <type_traits>

#include "matmul_dsd_sm90.h"
#include "mma.h"

namespace ds_sparse {
namespace {

using namespace hopper;

constexpr int kWarps = kMultiplying / 32;
constexpr int kAllThreads = kMultiplying + 128;  // with those that copy, after them

// Thread blocks on a multiprocessor, as many as shared memory has room for.
template <int kPanels>
constexpr int kThreadBlocks = kPanels == 1 ? 3 : 2;

template <class T, int kN, int kBlock>
struct Memory {
  static constexpr int kPanels = kN / kPanel, kStages = kPanels == 1 ? 4 : 3;
  static constexpr int kSide = kTile / kBlock;  // lines of a tile, and entries of a step
  T dense[kStages][kPanels][kTileElements];
  T result[kPanels][kTileElements];
  T values[kStages][kSide][kSide][kBlock * kBlock];  // of each line of each entry
  Barrier there[kStages], free[kStages];
  Step steps[kStages];
  int tokens[kStages][kWarps];  // of the result, the first of each warp's; -1 where it has none
};

// The tasks of a thread block. A warp asks for the units of 32 together, long before most are needed.
class Tasks {
 public:
  __device__ explicit Tasks(const TileLists& lists) : lists_(lists) { read(); }

  __device__ bool valid() const { return task_ < lists_.tasks(); }
  __device__ TileTask get() const {
    const auto of_lane = [&](int x) { return __shfl_sync(0xffffffffu, x, number_); };
    return {lists_, task_, make_int4(of_lane(units_.x), of_lane(units_.y), of_lane(units_.z), of_lane(units_.w))};
  }
  __device__ void next() {
    task_ = lists_.task_of(++turn_);
    if (++number_ == 32) {
      number_ = 0;
      read();
    }
  }

 private:
  __device__ void read() {
    const int task = lists_.task_of(turn_ + threadIdx.x % 32);
    units_ = task < lists_.tasks() ? lists_.unit_of(task) : int4{};
  }

  const TileLists& lists_;
  uint32_t turn_ = 0;
  int task_ = lists_.task_of(0), number_ = 0;
  int4 units_;  // of the lane's task
};

// The steps of a copying warp, which are those of its stage: to say what a step is about takes longer than to do it. A
// warp with more than one stage, or a stage with more than one warp, could come to a step two rounds ahead of the ring,
// where the parity that it waits for is that of the round before. Warps without a stage have no step.
template <int kStages>
struct OwnSteps {
  static_assert(kStages <= 4);
  const int stage = uniform((threadIdx.x - kMultiplying) / 32);
  uint32_t parity = 1;  // of the round before the stage's next
  int ahead = stage;    // how many steps of all come before its next

  __device__ bool has_none() const { return stage >= kStages; }
};

// A step of a unit, and what the lists have for it.
struct Listed {
  TileTask task;
  int step = -1;       // -1: there is none
  int left = 0;        // entries of the unit, from the step's first one on
  uint32_t entry = 0;  // that whose tokens the lane copies
  int slot = -1;       // of one line of one entry, for each of the first lanes; -1: no block
  int line = -1;       // of a multiplying warp's rows, for each of the first lanes; -1: none
};

template <class T, int kN, int kBlock>
__device__ __forceinline__ void copy_all(
    const TileProduct<T>& p, const T* values, Memory<T, kN, kBlock>& memory, const CUtensorMap* dense) {
  using M = Memory<T, kN, kBlock>;
  constexpr int kSide = M::kSide, kElements = kBlock * kBlock, kAtOnce = 32 * kRun<T>;
  const int lane = threadIdx.x % 32;
  OwnSteps<M::kStages> own;
  if (own.has_none()) {
    return;
  }
  Tasks tasks(p.lists);
  TileTask task = tasks.get();
  const auto look_up = [&]() -> Listed {
    while (tasks.valid()) {
      const int steps = max(1, (task.num_entries + kSide - 1) / kSide);
      if (own.ahead < steps) {
        Listed found{task, own.ahead, task.num_entries - own.ahead * kSide};
        const int first = task.first_entry + own.ahead * kSide;
        if (lane % kSide < found.left) {
          found.entry = p.lists.entries[first + lane % kSide];
        }
        if (lane < kSide * kSide && lane / kSide < found.left) {
          found.slot = p.lists.slots[first * kSide + lane];
        }
        if (lane < kWarps) {
          found.line = p.lists.lines[task.tile * kSide + lane * kStrip / kBlock];
        }
        own.ahead += M::kStages;
        return found;
      }
      own.ahead -= steps;
      tasks.next();
      task = tasks.get();
    }
    return {task};
  };
  const auto values_of = [&](const TileTask& of) { return values + of.first_value(p.lists) * kElements; };
  Barrier &there = memory.there[own.stage], &free = memory.free[own.stage];
  const uint32_t to = shared_address(kept_shared(run_of_short_line<kBlock>(
      memory.values[own.stage][0][0], lane / (kBlock / kRun<T>), lane % (kBlock / kRun<T>))));
  for (Listed next = look_up(); next.step >= 0; own.parity ^= 1) {
    // The lists are read a step ahead, so that values, which are read once, are on their way from device memory while the
    // stage is still in use.
    const Listed now = next;
    next = look_up();
    free.wait(own.parity);
    if (lane == 0) {
      there.expect(kTile * kN * sizeof(T));
    }
    __syncwarp();
    if (lane < kSide * M::kPanels) {
      // Past the list's end there are zeros, as there are outside of tensors; a unit without an entry has a step of them.
      constexpr int kOutside = 1 << 30;
      const int token = lane % kSide < now.left ? static_cast<int>(now.entry & 0xffffffu) * kBlock : kOutside;
      copy_box(
          memory.dense[own.stage][lane / kSide] + lane % kSide * kBlock * kPanel, dense, &there, lane / kSide * kPanel,
          token, now.task.head, now.task.batch);
    }
    const T* from = kept(values_of(now.task) + lane * kRun<T>);
#pragma unroll
    for (int i = 0; i < kSide * kSide; ++i) {
      const int number = __shfl_sync(0xffffffffu, now.slot, i);
      const T* block = from + int64_t{number} * kElements;
#pragma unroll
      for (int at = 0; at < kElements; at += kAtOnce) {
        start_copy_of(number, to + (i * kElements + at) * sizeof(T), block + at);
      }
    }
    end_of_copies();
    const auto live = static_cast<uint16_t>(__ballot_sync(0xffffffffu, now.slot >= 0));
    if (lane == 0) {
      memory.steps[own.stage] =
          Step{now.task.batch, now.task.head, p.part_of_all(now.task), live, now.step == 0, now.left <= kSide};
    }
    if (lane < kWarps) {
      memory.tokens[own.stage][lane] = now.line < 0 ? -1 : now.line * kBlock + lane * kStrip % kBlock;
    }
    if (next.slot >= 0) {
      fetch_ahead(values_of(next.task) + int64_t{next.slot} * kElements, kElements * sizeof(T));
    }
    wait_for_copies<0>();
    __syncwarp();
    if (lane == 0) {
      there.arrive();
    }
  }
  if (own.ahead == 0) {
    free.wait(own.parity);
    if (lane == 0) {
      memory.steps[own.stage].batch = -1;
      there.arrive();
    }
  }
}

template <class T, int kN, int kBlock, bool kTransposed>
__device__ __forceinline__ void multiply_all(
    const TileProduct<T>& p, Memory<T, kN, kBlock>& memory, const CUtensorMap* out) {
  using M = Memory<T, kN, kBlock>;
  constexpr int kSide = M::kSide, kParts = kBlock / 16;  // of 16 tokens, in an entry
  const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32);
  const int line = warp * kStrip / kBlock, first_row = warp * kStrip % kBlock;
  const hopper::Operand all_dense(memory.dense[0][0], kTileBytes);
  // Where the lane finds a row of one of the four matrices of 8 x 8 that its warp reads of a block.
  uint32_t of_lane[kParts];
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int first_token = part * 16;
    const int row = kTransposed ? first_token + lane / 16 * 8 + lane % 8 : first_row + lane % 16;
    const int run = kTransposed ? first_row / 8 + lane / 8 % 2 : first_token / 8 + lane / 16;
    of_lane[part] = shared_address(kept_shared(run_of_short_line<kBlock>(memory.values[0][0][line], row, run)));
  }
  float sums[kN / 2];
  for (Ring<M::kStages> place;; place.next()) {
    memory.there[place.stage].wait(place.parity);
    const Step step = memory.steps[place.stage];
    if (step.batch < 0) {
      break;
    }
    const int token = memory.tokens[place.stage][warp];
    const uint32_t live = step.live >> line;
    uint32_t values[kTile / 16][4] = {};
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k) {
      const int entry = k / kParts;
      if (live >> (entry * kSide) & 1) {
        load_matrices<kTransposed>(
            values[k], of_lane[k % kParts] + place.stage * int{sizeof(memory.values[0])} +
                           entry * int{sizeof(memory.values[0][0])});
      }
    }
    const hopper::Operand dense = all_dense + uniform(place.stage * sizeof(memory.dense[0]));
    begin_products();
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k) {
      Products<T>::template from_registers<kN>(sums, values[k], dense.from(k * 16 * kLineBytes), k > 0 || !step.first);
    }
    end_products();
    wait_for_products<0>();
    sums_are_there(sums);
    __syncwarp();
    if (lane == 0) {
      memory.free[place.stage].arrive();
    }
    if (step.last && token >= 0) {
      store_sums<kN>(p, memory.result[0], out, step, token, sums);
    }
  }
  if (lane == 0) {
    wait_for_stores();
  }
}

template <class T, int kN, int kBlock, bool kTransposed>
__global__ void __launch_bounds__(kAllThreads, kThreadBlocks<kN / kPanel>)
dsd_of_small_blocks_kernel(
    const __grid_constant__ TileProduct<T> p, const T* values, const __grid_constant__ CUtensorMap dense,
    const __grid_constant__ CUtensorMap out) {
  extern __shared__ unsigned char shared[];
  auto& memory = *reinterpret_cast<Memory<T, kN, kBlock>*>(align_panels(shared));
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Memory<T, kN, kBlock>::kStages; ++stage) {
      memory.there[stage].init(1);
      memory.free[stage].init(kWarps);
    }
    fence_barriers();
  }
  __syncthreads();
  // The sums of 64 x 128 need some of the copying warps' registers.
  constexpr bool kSumsAreMany = kN > kPanel;
  if (threadIdx.x < kMultiplying) {
    if constexpr (kSumsAreMany) {
      take_registers<168>();
    }
    multiply_all<T, kN, kBlock, kTransposed>(p, memory, &out);
  } else {
    if constexpr (kSumsAreMany) {
      give_registers<80>();
    }
    copy_all<T, kN, kBlock>(p, values, memory, &dense);
  }
}

}  // namespace

template <class T>
void dsd_of_small_blocks(
    const Launcher& launch, const TileProduct<T>& p, const Tensor& values, const Tensor& dense, const Tensor& out,
    bool transposed) {
  const auto run = [&](auto width, auto block) {
    constexpr int kN = decltype(width)::value, kBlock = decltype(block)::value;
    using M = Memory<T, kN, kBlock>;
    const int64_t most = launch.multiprocessors() * kThreadBlocks<M::kPanels>;
    launch.with_shared_memory(
        transposed ? dsd_of_small_blocks_kernel<T, kN, kBlock, true> : dsd_of_small_blocks_kernel<T, kN, kBlock, false>,
        std::min<int64_t>(p.lists.tasks(), most), kAllThreads, sizeof(M) + kPanelAlignment, p,
        static_cast<const T*>(values.const_data_ptr()), tensor_map(dense, kBlock), result_map(p, out));
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
