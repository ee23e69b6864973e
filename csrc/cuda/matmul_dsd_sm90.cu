// Sparse @ dense for blocks of 64 and more, on Hopper, 16-bit types, up to 128 columns. A thread block takes a window
// of the live blocks (windows.h) and, of each line, 64 rows; 64 tokens are summed over at a time. Blocks may be transposed,
// products take both, and so may the result; either dimension of the dense operand may be adjacent.

#include <torch/csrc/stable/ops.h>

#include "matmul_dsd.h"
#include "matmul_sm90.h"

namespace ds_sparse {
namespace {

using namespace hopper;

// What a stage is for.
struct Step {
  int64_t window_of_all;
  int batch, head, token, row;  // where the result goes: its first token, and that within the line; batch -1 is the end
  Part part;
  bool first, last;  // of a line
  bool empty;        // the line has no block
};

template <class T, int kN>
struct Memory {
  static constexpr int kPanels = kN / kPanel, kStages = kPanels == 1 ? 4 : 3;
  T values[kStages][kTileElements];
  T dense[kStages][kPanels][kTileElements];
  T result[kPanels][kTileElements];
  Barrier there[kStages], free[kStages];
  Step steps[kStages];
};

template <class T, int kN>
__device__ __forceinline__ void copy_all(
    const Product<T>& p, Memory<T, kN>& memory, const CUtensorMap* values, const CUtensorMap* dense,
    bool dense_is_lines) {
  using M = Memory<T, kN>;
  const bool elected = threadIdx.x % 32 == 0;
  const int block = 1 << p.log_block, windows = p.lists.windows(), row_tiles = block / kTile;
  const int64_t tasks = p.windows_of_all() * row_tiles;
  OwnSteps<M::kStages> own;
  if (own.has_none()) {
    return;
  }
  ListReader indices(p.indices, p.lists.entries), slots(p.slots, p.lists.entries);
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int first_row = static_cast<int>(task % row_tiles) * kTile;
    const int64_t window_of_all = task / row_tiles;
    const Window window(p.lists, window_of_all % windows);
    const int given_head = window_of_all / windows % p.heads_apart();
    const int batch = window_of_all / windows / p.heads_apart();
    for (Walk walk(p.lists, window, p.log_block); walk.valid(); walk.next_line(p.lists, window, p.log_block)) {
      const int head = p.layout_heads == 1 ? given_head : walk.line / p.rows;
      const bool empty = walk.tokens == 0;
      // A line without a block has a step, too: its result is zeros.
      own.among(empty ? 1 : (walk.tokens + kTile - 1) / kTile, [&](int step) {
        const int first = step * kTile, entry = walk.begin + (first >> p.log_block), within = first & (block - 1);
        const int token = empty ? 0 : indices[entry] * block + within;
        const int number = empty ? 0 : slots[entry] + (p.layout_heads == 1 ? head * p.lists.entries : 0);
        memory.free[own.stage].wait(own.parity);
        if (elected) {
          memory.steps[own.stage] = Step{
              window_of_all, batch, head, walk.line % p.rows * block + first_row, first_row, walk.part, step == 0,
              first + kTile >= walk.tokens, empty};
          Barrier& there = memory.there[own.stage];
          if (empty) {
            there.arrive();
          } else {
            there.arrive_and_expect(kTile * (kTile + kN) * sizeof(T));
            const bool transposed = p.slots != nullptr;
            copy_box(
                memory.values[own.stage], values, &there, transposed ? first_row : within,
                transposed ? within : first_row, number, batch);
#pragma unroll
            for (int panel = 0; panel < M::kPanels; ++panel) {
              const int column = panel * kPanel;
              copy_box(
                  memory.dense[own.stage][panel], dense, &there, dense_is_lines ? column : token,
                  dense_is_lines ? token : column, head, batch);
            }
          }
        }
        __syncwarp();
      });
    }
  }
  own.among(1, [&](int) {
    memory.free[own.stage].wait(own.parity);
    if (elected) {
      memory.steps[own.stage].batch = -1;
      memory.there[own.stage].arrive();
    }
  });
}

// sums (64 x kN) = or += a tile of values @ 64 tokens.
template <class T, int kN, bool kDenseIsLines, bool kTransposed>
__device__ __forceinline__ void multiply(
    float (&sums)[kN / 2], const hopper::Operand& values, const hopper::Operand& dense, bool first) {
  // 16 tokens on: so many lines, or so many elements of each.
  constexpr uint32_t lines = 16 * kLineBytes, elements = 32;
  begin_products();
#pragma unroll
  for (int k = 0; k < kTile / 16; ++k) {
    Products<T>::template from_shared<kN, !kDenseIsLines, kTransposed>(
        sums, values.from(k * (kTransposed ? lines : elements)), dense.from(k * (kDenseIsLines ? lines : elements)),
        k > 0 || !first);
  }
  end_products();
  wait_for_products<0>();
  sums_are_there(sums);
}

template <class T, int kN>
__device__ __forceinline__ void multiply_all(
    const Product<T>& p, Memory<T, kN>& memory, const CUtensorMap* out, bool dense_is_lines) {
  using M = Memory<T, kN>;
  const int lane = threadIdx.x % 32;
  const hopper::Operand all_values(memory.values[0]);
  // How far panels are apart matters where their lines are tokens; else the second one's lines follow the first one's.
  const hopper::Operand all_dense(memory.dense[0][0], uniform(dense_is_lines ? kTileBytes : 0));
  float sums[kN / 2];
  for (Ring<M::kStages> place;; place.next()) {
    memory.there[place.stage].wait(place.parity);
    const Step step = memory.steps[place.stage];
    if (step.batch < 0) {
      break;
    }
    if (step.empty) {
#pragma unroll
      for (float& sum : sums) {
        sum = 0;
      }
    } else {
      const hopper::Operand values = all_values + uniform(place.stage * sizeof(memory.values[0]));
      const hopper::Operand dense = all_dense + uniform(place.stage * sizeof(memory.dense[0]));
      if (p.slots == nullptr) {
        dense_is_lines ? multiply<T, kN, true, false>(sums, values, dense, step.first)
                       : multiply<T, kN, false, false>(sums, values, dense, step.first);
      } else {
        dense_is_lines ? multiply<T, kN, true, true>(sums, values, dense, step.first)
                       : multiply<T, kN, false, true>(sums, values, dense, step.first);
      }
    }
    __syncwarp();
    if (lane == 0) {
      memory.free[place.stage].arrive();
    }
    if (!step.last) {
      continue;
    }
    if (step.part != kWhole) {
      const int64_t block = int64_t{1} << p.log_block, width = p.result.width;
      float* to = p.parts.at(step.window_of_all, step.part, block, width);
      const int line = step.row + threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) {
        const int row = line + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (column < width) {
          to[row * width + column] = sums[i];
        }
      }
      continue;
    }
    if (threadIdx.x == 0) {
      wait_for_stores<0>();
    }
    wait_at<kMultiplying>(1);
    store_to_panels<kN>(memory.result[0], sums, p.result.transposed);
    fence_stores();
    wait_at<kMultiplying>(2);
    if (threadIdx.x == 0) {
#pragma unroll
      for (int panel = 0; panel < M::kPanels; ++panel) {
        const int column = panel * kPanel;
        store_box(
            out, memory.result[panel], p.result.transposed ? step.token : column,
            p.result.transposed ? column : step.token, step.head, step.batch);
      }
      end_stores();
    }
  }
  if (threadIdx.x == 0) {
    wait_for_stores<0>();
  }
}

template <class T, int kN>
__global__ void __launch_bounds__(kAllThreads, kThreadBlocks<kN / kPanel>)
dsd_on_hopper_kernel(
    const __grid_constant__ Product<T> p, const __grid_constant__ CUtensorMap values,
    const __grid_constant__ CUtensorMap dense, const __grid_constant__ CUtensorMap out, bool dense_is_lines) {
  extern __shared__ unsigned char shared[];
  auto& memory = *reinterpret_cast<Memory<T, kN>*>(align_panels(shared));
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Memory<T, kN>::kStages; ++stage) {
      memory.there[stage].init(1);
      memory.free[stage].init(kMultiplying / 32);
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
    multiply_all<T, kN>(p, memory, &out, dense_is_lines);
  } else {
    if constexpr (kSumsAreMany) {
      give_registers<80>();
    }
    copy_all<T, kN>(p, memory, &values, &dense, dense_is_lines);
  }
}

}  // namespace

bool takes_dsd_on_hopper(const Launcher& launch, const Tensor& values, const Tensor& dense, int64_t block) {
  const int64_t width = dense.size(3);
  return launch.is_hopper() && dense.element_size() == 2 && block >= 16 && width <= kMostDepth && width % 8 == 0 &&
         values.numel() > 0 && takes_boxes(values) &&
         (takes_boxes(dense) || (block >= kTile && takes_boxes(torch::stable::transpose(dense, 2, 3))));
}

template <class T>
void dsd_on_hopper(
    const Launcher& launch, const Product<T>& p, const Tensor& values, const Tensor& dense, const Tensor& out) {
  const bool dense_is_lines = takes_boxes(dense);
  const auto run = [&](auto width) {
    constexpr int kN = decltype(width)::value;
    const CUtensorMap dense_map = tensor_map(dense_is_lines ? dense : torch::stable::transpose(dense, 2, 3), kTile);
    const CUtensorMap values_map = tensor_map(values, kTile), out_map = tensor_map(out, kTile);
    launch.with_shared_memory(
        dsd_on_hopper_kernel<T, kN>, p.windows_of_all() * ((int64_t{1} << p.log_block) / kTile), kAllThreads,
        sizeof(Memory<T, kN>) + kPanelAlignment, p, values_map, dense_map, out_map, dense_is_lines);
  };
  p.result.width <= kPanel ? run(std::integral_constant<int, kPanel>{})
                           : run(std::integral_constant<int, 2 * kPanel>{});
}

template void dsd_on_hopper(
    const Launcher&, const Product<__half>&, const Tensor&, const Tensor&, const Tensor&);
template void dsd_on_hopper(
    const Launcher&, const Product<__nv_bfloat16>&, const Tensor&, const Tensor&, const Tensor&);

}  // namespace ds_sparse
