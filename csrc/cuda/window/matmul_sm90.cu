// The band of a product, on Hopper: 16-bit types, up to 128 numbers a token, a work tile for every multiprocessor,
// windows of which rows are whole cache lines apart (`BandMatrix`) and end in a later step than they begin.
//
// A thread block takes tile after tile of 128 rows. These stay in registers, 64 in each warpgroup's, while the columns
// of their windows pass through a ring of stages. A step is 64 columns, a cache line of each row. Warps hand over their
// results, 16 rows each, without waiting for each other.

#include <algorithm>
#include <type_traits>

#include "../common/gemm_sm90.h"
#include "band.h"
#include "matmul.h"
#include "tuning.h"

namespace ds_sparse {
namespace {

using namespace hopper;

using Tuning = WindowMatmulOnHopperTuning;
constexpr int kConsumerWarpgroups = Tuning::kConsumerWarpgroups;
constexpr int kRows = kConsumerWarpgroups * kTile, kConsumerWarps = kRows / kWarpTileRows;
constexpr int kBlockThreads = kConsumerWarps * 32 + 32;  // and a producer warp

template <class T>
struct BandArguments {
  T* out;
  int work_tiles, heads, tokens, window, row_tiles;
};

// A stage has rows of a tile, for one warpgroup, or a step's columns.
template <class T, int kPanels>
struct Memory {
  static constexpr int kStages = Tuning::kStages<kPanels>;
  T stages[kStages][kPanels][kTileElements];
  T results[kConsumerWarpgroups][kTileElements];  // of a step
  T seams[kConsumerWarpgroups][kTileElements];    // the line that each row begins in
  Barrier full[kStages], empty[kStages];
};

template <class T>
struct BandWorkTile {
  int batch, head, row, steps;
  int first;  // the first step's first column, which may be before the first token
  BandMatrix<T> band;

  __device__ BandWorkTile(const BandArguments<T>& p, int number)
      : batch(number / p.row_tiles / p.heads),
        head(number / p.row_tiles % p.heads),
        row(number % p.row_tiles * kRows),
        band(p.out + int64_t{number / p.row_tiles} * p.tokens * (2 * int64_t{p.window} + 1), p.tokens, p.window) {
    first = static_cast<int>(band.aligned(row - p.window, hopper::kLineBytes));
    steps = (min(row + kRows, p.tokens) + p.window - first + kTile - 1) / kTile;
  }
};

template <class T, int kPanels>
__device__ __forceinline__ void run_producer(
    const BandArguments<T>& p, Memory<T, kPanels>& memory, const CUtensorMap* a, const CUtensorMap* b) {
  using M = Memory<T, kPanels>;
  PipelineState<M::kStages> pipe;
  const auto copy = [&](const CUtensorMap* map, const BandWorkTile<T>& work, int token) {
    memory.empty[pipe.index].wait(pipe.phase ^ 1);
    memory.full[pipe.index].arrive_and_expect_tx(kPanels * kTileBytes);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      tma_load(
          memory.stages[pipe.index][panel], map, &memory.full[pipe.index], panel * kPanel, token, work.head,
          work.batch);
    }
    pipe.next();
  };
  for (int number = blockIdx.x; number < p.work_tiles; number += gridDim.x) {
    const BandWorkTile<T> work(p, number);
    for (int group = 0; group < kConsumerWarpgroups; ++group) {
      copy(a, work, work.row + group * kTile);
    }
    // Zeros where there is no token.
    for (int step = 0; step < work.steps; ++step) {
      copy(b, work, work.first + step * kTile);
    }
  }
}

// The first `count` of a run's elements, none if that is negative, and the rest of `other`.
__device__ __forceinline__ uint4 joined(const uint4& run, const uint4& other, int count) {
  const uint32_t own[] = {run.x, run.y, run.z, run.w}, rest[] = {other.x, other.y, other.z, other.w};
  const int bits = 16 * max(0, min(count, 8));
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t of_own = __funnelshift_lc(~0u, 0u, max(0, bits - 32 * i));
    words[i] = (own[i] & of_own) | (rest[i] & ~of_own);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// A warp's way from sums to memory, 16 rows and a step's columns: through its lines of a panel, after which a lane has
// a run of each of four rows, and eight lanes have a line.
template <class T>
class WarpTileStore {
 public:
  // The warp's lines of panels.
  __device__ WarpTileStore(T* results, T* seams)
      : matrices_(keep(shared_address(run_of_line(results, lane() % 16, lane() / 16)))),
        runs_(keep(shared_address(run_of_line(results, row(0), place())))),
        seams_(keep(shared_address(run_of_line(seams, row(0), place())))),
        next_seams_(keep(shared_address(run_of_line(seams, row(0) + 1, place())))) {}

  static __device__ int row(int number) { return number * kRowsApart + lane() / 8; }
  static __device__ int place() { return lane() % 8; }

  __device__ __forceinline__ void take(const float (&sums)[kTile / 2]) {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kTile / 16; ++j) {
      uint32_t rounded[4];
      round_columns<T>(rounded, sums, j);
      store_matrices(__cvta_shared_to_generic(matrices_ ^ j * 32), rounded);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      run_[i] = load_shared(of_row(runs_, i));
    }
  }

  // Zeros but for columns `first` to last - 1: an infinity times the zeros that are no token's is none.
  __device__ __forceinline__ void keep_tokens(int first, int last) {
    const uint4 zeros{};
#pragma unroll
    for (uint4& run : run_) {
      run = joined(zeros, joined(run, zeros, last - column()), first - column());
    }
  }

  // `to`: the lane's first run; `pitch`: from a row of the band to the next one.
  __device__ __forceinline__ void store(T* to, int64_t pitch) const {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i, to += kRowsApart * pitch) {
      store_words(to, run_[i]);
    }
  }

  // The same where windows begin: in column `begin` for the first row, for the next one a column further. In memory a
  // row's end is followed by the beginning of the next row, mostly in one cache line: such a beginning waits for the
  // end, in `seams`, so that the line is written whole. There are `rows` rows.
  __device__ __forceinline__ void store_begin(T* to, int64_t pitch, int begin, int rows) const {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i, to += kRowsApart * pitch) {
      const int first = begin + row(i);
      if (row(i) >= rows || first >= kTile) {
        continue;
      }
      if (first <= 0) {
        store_words(to, run_[i]);
      } else if (row(i) > 0) {
        store_shared(of_row(seams_, i), run_[i]);
      } else {
        store_elements(to, run_[i], first - column(), kRun<T>);
      }
    }
  }

  // The same where they end, or rows do; the first row's last column is the one before `end`.
  __device__ __forceinline__ void store_end(T* to, int64_t pitch, int end, int rows) const {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i, to += kRowsApart * pitch) {
      const int last = end + row(i);
      if (row(i) >= rows || last <= 0) {
        continue;
      }
      if (last >= kTile) {
        store_words(to, run_[i]);
      } else if (row(i) + 1 < min(rows, kWarpTileRows)) {
        store_words(to, joined(run_[i], load_shared(of_row(next_seams_, i)), last - column()));
      } else {
        store_elements(to, run_[i], 0, last - column());
      }
    }
  }

 private:
  static constexpr int kLaneRows = 4, kRowsApart = kWarpTileRows / kLaneRows;

  static __device__ int lane() { return threadIdx.x % 32; }
  static __device__ int column() { return place() * kRun<T>; }

  // From the lane's run of a panel's line to that of the i-th of its lines: every fourth, and of eight lines half have
  // their runs swapped (`run_of_line`).
  static __device__ __forceinline__ uint32_t of_row(uint32_t first, int i) {
    return (first ^ i % 2 * 64) + i * (kRowsApart * hopper::kLineBytes);
  }

  static __device__ __forceinline__ void store_words(T* to, const uint4& words) {
    store_run(reinterpret_cast<uint32_t*>(to), reinterpret_cast<const Run<uint32_t, 4>&>(words));
  }
  static __device__ __forceinline__ void store_elements(T* to, const uint4& words, int first, int last) {
    const Run<T, kRun<T>> run = reinterpret_cast<const Run<T, kRun<T>>&>(words);
#pragma unroll
    for (int e = 0; e < kRun<T>; ++e) {
      if (e >= first && e < last) {
        to[e] = run.element[e];
      }
    }
  }

  uint32_t matrices_, runs_, seams_, next_seams_;
  uint4 run_[kLaneRows];
};

template <class T, int kPanels>
__device__ __forceinline__ void run_consumer(const BandArguments<T>& p, Memory<T, kPanels>& memory) {
  using M = Memory<T, kPanels>;
  constexpr int kStageElements = kPanels * kTileElements;
  const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32), group = warp * kWarpTileRows / kTile;
  const int warp_tile = warp * kWarpTileRows,
            above = warp_tile % kTile;  // the warp's first row of a tile, and of its warpgroup's
  const GmmaDescriptor all_columns(memory.stages[0][0]);
  // Where the lane points at a run of its warp's rows: of their first 16 numbers, in the first stage.
  const T* rows_run = kept_shared(run_of_line(memory.stages[0][0], above + lane % 16, lane / 16));
  WarpTileStore<T> results(memory.results[group] + above * kPanel, memory.seams[group] + above * kPanel);
  const int64_t pitch = 2 * int64_t{p.window};
  PipelineState<M::kStages> pipe;
  const auto is_free = [&]() {
    __syncwarp();
    if (lane == 0) {
      memory.empty[pipe.index].arrive();
    }
  };
  for (int number = blockIdx.x; number < p.work_tiles; number += gridDim.x) {
    const BandWorkTile<T> work(p, number);
    RowsOfWarp<T, kPanels> rows;
#pragma unroll 1
    for (int i = 0; i < kConsumerWarpgroups; ++i, pipe.next()) {
      memory.full[pipe.index].wait(pipe.phase);
      if (i == group) {
        rows.read(rows_run + pipe.index * kStageElements);
      }
      is_free();
    }
    // Where the first row's window begins and ends, counted from the step's first column.
    int begin = work.row + warp_tile - p.window - work.first, end = begin + 2 * p.window + 1;
    const int rows_left = p.tokens - work.row - warp_tile;
    T* to =
        work.band.at(work.row + warp_tile + WarpTileStore<T>::row(0), work.first + WarpTileStore<T>::place() * kRun<T>);
    for (int step = 0; step < work.steps; ++step, pipe.next(), begin -= kTile, end -= kTile, to += kTile) {
      memory.full[pipe.index].wait(pipe.phase);
      if (begin - above >= kTile || end - above + kTile - 1 <= 0) {
        is_free();
        continue;
      }
      const GmmaDescriptor columns = all_columns + uniform(pipe.index * kStageElements * sizeof(T));
      float sums[kTile / 2];
      rows.multiply(sums, columns);
      is_free();
      if (begin >= kTile || end + kWarpTileRows - 1 <= 0) {
        continue;
      }
      results.take(sums);
      const int token = work.first + step * kTile;
      if (token < 0 || token + kTile > p.tokens) {
        results.keep_tokens(-token, p.tokens - token);
      }
      // No step has both ends, as windows are wider than a step on each side.
      if (begin + kWarpTileRows - 1 > 0) {
        results.store_begin(to, pitch, begin, rows_left);
      } else if (end < kTile || rows_left < kWarpTileRows) {
        results.store_end(to, pitch, end, rows_left);
      } else {
        results.store(to, pitch);
      }
    }
  }
}

template <class T, int kPanels>
__global__ void __launch_bounds__(kBlockThreads, Tuning::kThreadBlocks) window_matmul_on_hopper_kernel(
    const __grid_constant__ BandArguments<T> p, const __grid_constant__ CUtensorMap a,
    const __grid_constant__ CUtensorMap b) {
  extern __shared__ unsigned char shared[];
  using M = Memory<T, kPanels>;
  auto& memory = *reinterpret_cast<M*>(align_panels(shared));
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < M::kStages; ++stage) {
      memory.full[stage].init(1);
      memory.empty[stage].init(kConsumerWarps);
    }
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < kConsumerWarps * 32) {
    run_consumer<T, kPanels>(p, memory);
  } else if (threadIdx.x == kConsumerWarps * 32) {
    run_producer<T, kPanels>(p, memory, &a, &b);
  }
}

int64_t work_tiles_of(const Tensor& a) { return a.size(0) * a.size(1) * ceil_div(a.size(2), kRows); }

}  // namespace

void window_matmul_on_hopper(
    const Launcher& launch, const Tensor& a, const Tensor& b, const Tensor& out, int64_t window) {
  check(
      a.element_size() == 2 && a.size(3) > 0 && a.size(3) <= kMaxHeadDim && 2 * window % kPanel == 0 &&
          window >= kTile && window < 1 << 29 && a.size(2) < 1 << 29 && work_tiles_of(a) < 1 << 30,
      "implementation is \"hopper\", which is for fp16 and bf16, up to 128 numbers a token and windows of 64 or more, "
      "multiples of 32.");
  const Tensor read_a = readable_in_boxes(a), read_b = readable_in_boxes(b);
  const auto run = [&](auto zero, auto panels) {
    using T = decltype(zero);
    constexpr int kPanels = decltype(panels)::value;
    const BandArguments<T> arguments{
        static_cast<T*>(out.mutable_data_ptr()),
        static_cast<int>(work_tiles_of(a)),
        static_cast<int>(a.size(1)),
        static_cast<int>(a.size(2)),
        static_cast<int>(window),
        static_cast<int>(ceil_div(a.size(2), kRows))};
    launch.with_shared_memory(
        window_matmul_on_hopper_kernel<T, kPanels>,
        std::min<int64_t>(arguments.work_tiles, launch.multiprocessors() * Tuning::kThreadBlocks), kBlockThreads,
        sizeof(Memory<T, kPanels>) + kPanelAlignment, arguments, tensor_map(read_a, kTile), tensor_map(read_b, kTile));
  };
  const auto with_depth = [&](auto zero) {
    a.size(3) <= kPanel ? run(zero, std::integral_constant<int, 1>{}) : run(zero, std::integral_constant<int, 2>{});
  };
  a.scalar_type() == ScalarType::Half ? with_depth(__half{}) : with_depth(__nv_bfloat16{});
}

}  // namespace ds_sparse
