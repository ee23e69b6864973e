// Dense @ dense on the live blocks of 16 and more, on Hopper, 16-bit types, up to 128 numbers a token, which are
// adjacent in both operands. A thread block takes a window of the live blocks (windows.h), and up to 64 of their rows:
// these stay in shared memory while the columns pass, 64 tokens at a time, gathered from as many blocks as that takes.
// Rows are the left operand where there are 64 of them; else the columns are, and the product comes out transposed.

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
  int64_t batch, values;
  int log_block, row_tiles;
};

// What a stage is for.
struct Step {
  int batch, value, row, column;  // where the product goes; batch is -1 after the last one
  int blocks;                     // how many it reaches, where blocks are smaller than a tile
  int rows;                       // which of the tiles of rows it wants
  bool rows_end;                  // nobody wants those after it
};

// kRows: of a tile, and tokens that are copied at once.
template <class T, int kPanels, int kRows>
struct Memory {
  static constexpr int kStages = kPanels == 1 ? 4 : 3;
  T rows[2][kPanels][kRows * kPanel];
  T columns[kStages][kPanels][kTileElements];
  T results[2][kTile * kRows];
  Barrier there[kStages], free[kStages], rows_free[2];
  Step steps[kStages];
};

template <class T, int kPanels, int kRows>
__device__ __forceinline__ void copy_all(
    const Arguments& p, Memory<T, kPanels, kRows>& memory, const CUtensorMap* a, const CUtensorMap* b) {
  constexpr int kStages = Memory<T, kPanels, kRows>::kStages;
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
        int origins[kTile / kRows];
#pragma unroll
        for (int i = 0; i < kTile / kRows; ++i) {
          origins[i] = token + i * kRows < walk.tokens ? columns[entry + i] * block + column : -1;
        }
        const bool begins = step == 0, ends = token + kTile >= walk.tokens;
        const int copies = min(kTile, walk.tokens - token) / kRows;
        memory.free[own.stage].wait(own.parity);
        if (begins) {
          memory.rows_free[rows.stage].wait(rows.parity ^ 1);
        }
        if (elected) {
          memory.steps[own.stage] = Step{batch, value, first_row, column, copies, rows.stage, ends};
          Barrier& there = memory.there[own.stage];
          there.arrive_and_expect((copies + begins) * kPanels * kRows * kLineBytes);
#pragma unroll
          for (int panel = 0; panel < kPanels; ++panel) {
            if (begins) {
              const int row = walk.line % p.rows * block + first_row;
              copy_box(memory.rows[rows.stage][panel], a, &there, panel * kPanel, row, head, batch);
            }
#pragma unroll
            for (int i = 0; i < kTile / kRows; ++i) {
              if (origins[i] >= 0) {
                T* to = memory.columns[own.stage][panel] + i * kRows * kPanel;
                copy_box(to, b, &there, panel * kPanel, origins[i], head, batch);
              }
            }
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

template <class T, int kPanels, int kRows>
__device__ __forceinline__ void multiply_all(
    const Arguments& p, Memory<T, kPanels, kRows>& memory, const CUtensorMap* out_map, T* out) {
  constexpr int kStages = Memory<T, kPanels, kRows>::kStages;
  const bool first_of_warp = threadIdx.x % 32 == 0;
  const hopper::Operand rows(memory.rows[0][0]), columns(memory.columns[0][0]);
  constexpr bool kRowsAreLeft = kRows == kTile;
  int turn = 0;
  for (Ring<kStages> place;; place.next()) {
    memory.there[place.stage].wait(place.parity);
    const Step step = memory.steps[place.stage];
    if (step.batch < 0) {
      break;
    }
    float sums[kRows / 2];
    const hopper::Operand own_rows = rows + uniform(step.rows * sizeof(memory.rows[0]));
    const hopper::Operand own_columns = columns + uniform(place.stage * sizeof(memory.columns[0]));
    begin_products();
#pragma unroll
    for (int k = 0; k < kPanels * kPanel / 16; ++k) {
      const uint64_t of_rows = own_rows.from(k / 4 * kRows * kLineBytes + k % 4 * 32);
      const uint64_t of_columns = own_columns.from(k / 4 * kTileBytes + k % 4 * 32);
      Products<T>::template from_shared<kRows, true>(
          sums, kRowsAreLeft ? of_rows : of_columns, kRowsAreLeft ? of_columns : of_rows, k > 0);
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
    if constexpr (kRowsAreLeft) {
      store_to_panels<kTile>(memory.results[turn], sums, false);
    } else {
      store_as_blocks<kRows>(memory.results[turn], sums);
    }
    fence_stores();
    wait_at<kMultiplying>(2);
    if (threadIdx.x == 0) {
      if constexpr (kRowsAreLeft) {
        store_box(out_map, memory.results[turn], step.column, step.row, step.value, step.batch);
      } else {
        constexpr int block = kRows * kRows;
        T* to = out + (step.batch * p.values + step.value) * block;
        store_bytes(to, memory.results[turn], step.blocks * block * sizeof(T));
      }
      end_stores();
    }
    turn ^= 1;
  }
  if (threadIdx.x == 0) {
    wait_for_stores<0>();
  }
}

template <class T, int kPanels, int kRows>
__global__ void __launch_bounds__(kAllThreads, kThreadBlocks<kPanels, kRows>)
sdd_on_hopper_kernel(
    const __grid_constant__ Arguments p, const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
    const __grid_constant__ CUtensorMap out_map, T* out) {
  extern __shared__ unsigned char shared[];
  auto& memory = *reinterpret_cast<Memory<T, kPanels, kRows>*>(align_panels(shared));
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Memory<T, kPanels, kRows>::kStages; ++stage) {
      memory.there[stage].init(1);
      memory.free[stage].init(kMultiplying / 32);
    }
    memory.rows_free[0].init(kMultiplying / 32);
    memory.rows_free[1].init(kMultiplying / 32);
    fence_barriers();
  }
  __syncthreads();
  if (threadIdx.x < kMultiplying) {
    multiply_all<T, kPanels, kRows>(p, memory, &out_map, out);
  } else {
    copy_all<T, kPanels, kRows>(p, memory, &a, &b);
  }
}

template <class T, int kPanels, int kRows>
void launch_kernel(
    const Launcher& launch, const Arguments& p, const Tensor& a, const Tensor& b, const Tensor& out) {
  const int64_t tasks = p.batch * (p.layout_heads == 1 ? p.heads : 1) * p.lists.windows() * p.row_tiles;
  // Smaller blocks are stored as adjacent bytes.
  const CUtensorMap out_map = kRows == kTile ? tensor_map(out, kTile) : CUtensorMap{};
  launch.with_shared_memory(
      sdd_on_hopper_kernel<T, kPanels, kRows>, tasks, kAllThreads,
      sizeof(Memory<T, kPanels, kRows>) + kPanelAlignment, p, tensor_map(a, kRows), tensor_map(b, kRows), out_map,
      static_cast<T*>(out.mutable_data_ptr()));
}

}  // namespace

bool takes_sdd_on_hopper(const Launcher& launch, const Tensor& a, const Tensor& b, int64_t block) {
  return launch.is_hopper() && a.element_size() == 2 && block >= 16 && a.size(3) > 0 && a.size(3) <= kMostDepth &&
         takes_boxes(a) && takes_boxes(torch::stable::transpose(b, 2, 3));
}

void sdd_on_hopper(
    const Launcher& launch, const Tensor& a, const Tensor& b, const Tensor& out, const Lists& lists,
    const int32_t* columns, int64_t layout_heads, int64_t block) {
  const Arguments arguments{
      lists, columns, static_cast<int>(layout_heads), static_cast<int>(a.size(1)),
      static_cast<int>(lists.lines / layout_heads), a.size(0), out.size(1), log2_of(block),
      static_cast<int>(std::max<int64_t>(1, block / kTile))};
  const Tensor b_lines = torch::stable::transpose(b, 2, 3);
  const bool is_half = a.scalar_type() == ScalarType::Half, one_panel = a.size(3) <= kPanel;
  const auto with_rows = [&](auto zero, auto rows) {
    using T = decltype(zero);
    constexpr int kRows = decltype(rows)::value;
    one_panel ? launch_kernel<T, 1, kRows>(launch, arguments, a, b_lines, out)
              : launch_kernel<T, 2, kRows>(launch, arguments, a, b_lines, out);
  };
  const auto run = [&](auto zero) {
    switch (block) {
      case 16:
        return with_rows(zero, std::integral_constant<int, 16>{});
      case 32:
        return with_rows(zero, std::integral_constant<int, 32>{});
      default:
        return with_rows(zero, std::integral_constant<int, kTile>{});
    }
  };
  is_half ? run(__half{}) : run(__nv_bfloat16{});
}

}  // namespace ds_sparse
