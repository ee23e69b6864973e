// Dense @ dense on the live blocks of 64 and more, on Hopper, 16-bit types, up to 128 numbers a token, which are
// adjacent in both operands. A thread block takes a window of the live blocks (windows.h), and 64 of their rows: these
// stay in shared memory while the columns pass, 64 tokens at a time. Smaller blocks: matmul_sdd_tiles_sm90.cu.

#include <torch/csrc/stable/ops.h>

#include "matmul_sdd.h"
#include "matmul_sm90.h"

namespace ds_sparse {
namespace {

using namespace hopper;

struct Arguments {
  Lists lists;
  const int32_t* columns;
  int layout_heads, heads, rows;
  int64_t batch;
  int log_block, row_tiles;
};

// What a stage is for.
struct Step {
  int batch, value, row, column;  // where the product goes; batch is -1 after the last one
  int rows;                       // which of the tiles of rows it wants
  bool rows_end;                  // nobody wants those after it
};

template <class T, int kPanels>
struct Memory {
  static constexpr int kStages = kPanels == 1 ? 4 : 3;
  T rows[2][kPanels][kTileElements];
  T columns[kStages][kPanels][kTileElements];
  T results[2][kTileElements];
  Barrier there[kStages], free[kStages], rows_free[2];
  Step steps[kStages];
};

template <class T, int kPanels>
__device__ __forceinline__ void copy_all(
    const Arguments& p, Memory<T, kPanels>& memory, const CUtensorMap* a, const CUtensorMap* b) {
  constexpr int kStages = Memory<T, kPanels>::kStages;
  const bool elected = threadIdx.x % 32 == 0;
  const int block = 1 << p.log_block, windows = p.lists.windows();
  const int64_t heads_apart = p.layout_heads == 1 ? p.heads : 1;
  const int64_t tasks = p.batch * heads_apart * windows * p.row_tiles;
  OwnSteps<kStages> own;
  if (own.has_none()) {
    return;
  }
  Ring<2> rows;
  ListReader columns(p.columns, p.lists.entries);
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int first_row = static_cast<int>(task % p.row_tiles) * kTile;
    const Window window(p.lists, task / p.row_tiles % windows);
    const int given_head = task / p.row_tiles / windows % heads_apart;
    const int batch = task / p.row_tiles / windows / heads_apart;
    for (Walk walk(p.lists, window, p.log_block); walk.valid(); walk.next_line(p.lists, window, p.log_block)) {
      if (walk.tokens == 0) {
        continue;
      }
      const int head = p.layout_heads == 1 ? given_head : walk.line / p.rows;
      own.among((walk.tokens + kTile - 1) / kTile, [&](int step) {
        const int token = step * kTile, entry = walk.begin + (token >> p.log_block), column = token & (block - 1);
        const int value = (p.layout_heads == 1 ? head * p.lists.entries : 0) + entry;
        const int origin = columns[entry] * block + column;
        const bool begins = step == 0, ends = token + kTile >= walk.tokens;
        memory.free[own.stage].wait(own.parity);
        if (begins) {
          memory.rows_free[rows.stage].wait(rows.parity ^ 1);
        }
        if (elected) {
          memory.steps[own.stage] = Step{batch, value, first_row, column, rows.stage, ends};
          Barrier& there = memory.there[own.stage];
          there.arrive_and_expect((1 + begins) * kPanels * kTileBytes);
#pragma unroll
          for (int panel = 0; panel < kPanels; ++panel) {
            if (begins) {
              const int row = walk.line % p.rows * block + first_row;
              copy_box(memory.rows[rows.stage][panel], a, &there, panel * kPanel, row, head, batch);
            }
            copy_box(memory.columns[own.stage][panel], b, &there, panel * kPanel, origin, head, batch);
          }
        }
        __syncwarp();
      });
      rows.next();
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

template <class T, int kPanels>
__device__ __forceinline__ void multiply_all(Memory<T, kPanels>& memory, const CUtensorMap* out) {
  constexpr int kStages = Memory<T, kPanels>::kStages;
  const bool first_of_warp = threadIdx.x % 32 == 0;
  const hopper::Operand rows(memory.rows[0][0]), columns(memory.columns[0][0]);
  int turn = 0;
  for (Ring<kStages> place;; place.next()) {
    memory.there[place.stage].wait(place.parity);
    const Step step = memory.steps[place.stage];
    if (step.batch < 0) {
      break;
    }
    float sums[kTile / 2];
    const hopper::Operand own_rows = rows + uniform(step.rows * sizeof(memory.rows[0]));
    const hopper::Operand own_columns = columns + uniform(place.stage * sizeof(memory.columns[0]));
    begin_products();
#pragma unroll
    for (int k = 0; k < kPanels * kPanel / 16; ++k) {
      const uint32_t bytes = k / 4 * kTileBytes + k % 4 * 32;
      Products<T>::template from_shared<kTile, true>(sums, own_rows.from(bytes), own_columns.from(bytes), k > 0);
    }
    end_products();
    // A place for the result, while products last: the store before the last one has read its own.
    if (threadIdx.x == 0) {
      wait_for_stores<1>();
    }
    wait_for_products<0>();
    sums_are_there(sums);
    wait_at<kMultiplying>(1);
    if (first_of_warp) {
      // In this order: a copying warp that asks for rows knows, by its own stage, of steps a round ago alone. Rows of lines
      // that ended there have to be free by then, or the parity that it waits for is that of the round before.
      if (step.rows_end) {
        memory.rows_free[step.rows].arrive();
      }
      memory.free[place.stage].arrive();
    }
    store_to_panels<kTile>(memory.results[turn], sums, false);
    fence_stores();
    wait_at<kMultiplying>(2);
    if (threadIdx.x == 0) {
      store_box(out, memory.results[turn], step.column, step.row, step.value, step.batch);
      end_stores();
    }
    turn ^= 1;
  }
  if (threadIdx.x == 0) {
    wait_for_stores<0>();
  }
}

template <class T, int kPanels>
__global__ void __launch_bounds__(kAllThreads, kThreadBlocks<kPanels>)
sdd_on_hopper_kernel(
    const __grid_constant__ Arguments p, const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
    const __grid_constant__ CUtensorMap out) {
  extern __shared__ unsigned char shared[];
  auto& memory = *reinterpret_cast<Memory<T, kPanels>*>(align_panels(shared));
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Memory<T, kPanels>::kStages; ++stage) {
      memory.there[stage].init(1);
      memory.free[stage].init(kMultiplying / 32);
    }
    memory.rows_free[0].init(kMultiplying / 32);
    memory.rows_free[1].init(kMultiplying / 32);
    fence_barriers();
  }
  __syncthreads();
  if (threadIdx.x < kMultiplying) {
    multiply_all<T, kPanels>(memory, &out);
  } else {
    copy_all<T, kPanels>(p, memory, &a, &b);
  }
}

template <class T, int kPanels>
void launch_kernel(
    const Launcher& launch, const Arguments& p, const Tensor& a, const Tensor& b, const Tensor& out) {
  const int64_t tasks = p.batch * (p.layout_heads == 1 ? p.heads : 1) * p.lists.windows() * p.row_tiles;
  launch.with_shared_memory(
      sdd_on_hopper_kernel<T, kPanels>, tasks, kAllThreads, sizeof(Memory<T, kPanels>) + kPanelAlignment, p,
      tensor_map(a, kTile), tensor_map(b, kTile), tensor_map(out, kTile));
}

}  // namespace

bool takes_sdd_on_hopper(const Launcher& launch, const Tensor& a, const Tensor& b) {
  return launch.is_hopper() && a.element_size() == 2 && a.size(3) > 0 && a.size(3) <= kMostDepth &&
         takes_boxes(a) && takes_boxes(torch::stable::transpose(b, 2, 3));
}

void sdd_on_hopper(
    const Launcher& launch, const Tensor& a, const Tensor& b, const Tensor& out, const Lists& lists,
    const int32_t* columns, int64_t layout_heads, int64_t block) {
  const Arguments arguments{
      lists, columns, static_cast<int>(layout_heads), static_cast<int>(a.size(1)),
      static_cast<int>(lists.lines / layout_heads), a.size(0), log2_of(block),
      static_cast<int>(std::max<int64_t>(1, block / kTile))};
  const Tensor b_lines = torch::stable::transpose(b, 2, 3);
  const bool is_half = a.scalar_type() == ScalarType::Half, one_panel = a.size(3) <= kPanel;
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    one_panel ? launch_kernel<T, 1>(launch, arguments, a, b_lines, out)
              : launch_kernel<T, 2>(launch, arguments, a, b_lines, out);
  };
  is_half ? run(__half{}) : run(__nv_bfloat16{});
}

}  // namespace ds_sparse
