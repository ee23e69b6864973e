// The band of a product, near the diagonal. Schema and shapes: csrc/library.cpp; meaning: ds_sparse/reference.py; where
// a band has what: band.h.
//
// A thread block has some rows of `a`, and walks the columns of their windows 64 at a time. On Hopper:
// matmul_sm90.cu, where that takes the operands.

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "../../checks.h"
#include "../common/elements.h"
#include "../common/gemm_tile.h"
#include "../common/launch.h"
#include "band.h"
#include "matmul.h"
#include "tuning.h"

namespace ds_sparse {
namespace {

using Tuning = WindowMatmulTuning;
constexpr int kRows = Tuning::kRows, kWarpRows = Tuning::kWarpRows, kColumns = Tuning::kColumns,
              kGroup = Tuning::kGroup, kRing = Tuning::kRing;
constexpr int kFar = 1 << 12;  // steps or columns: as good as any other number as large

template <class T>
struct MatmulArguments {
  TokenRows<T> a, b;
  T* out;
  int64_t batch, heads, tokens, window;
  int64_t row_tiles, column_tiles;
  int64_t pitch;  // of eight rows of the band
  int steps_of_tile, k_blocks;
  bool rows_stay;
};

// kKBlocks: of a step's columns that are in flight together.
template <int kKBlocks>
struct MatmulMemory {
  static constexpr int kRowTile = kRows * kLineBytes, kColumnTile = kColumns * kLineBytes;

  unsigned char columns[kRing][kKBlocks][kColumnTile];
  unsigned char seams[kRows][16];
  // Followed by row tiles: all k blocks of the rows, those of the ring, or none, where they pass through the ring.
  static constexpr size_t bytes(int row_tiles) { return sizeof(MatmulMemory) + row_tiles * kRowTile; }
};

// The part of a band's windows that is in a group: 32 rows and as many columns.
struct GroupEdges {
  int begin, end;  // the first row's window is the columns from begin to end - 1, the next one's a column further
  int lines;       // rows that there are
  uint32_t seams;  // where beginnings of rows wait for ends, or 0

  __device__ bool meets() const { return begin < kGroup && end + kWarpRows > 1; }
  __device__ bool whole() const { return begin + kWarpRows <= 1 && end >= kGroup && lines >= kWarpRows; }
};

// A warp's part of its rows and kGroup columns. A lane's sums are runs of kCount columns.
template <class T, int kCount>
struct Group {
  static constexpr int kRuns = kGroup / (4 * kCount);  // of a lane, in each of its four rows
  static constexpr bool kJoins = kCount * sizeof(T) == 16;

  float sum[2][kGroup / 8][4];

  static __device__ int lane() { return threadIdx.x % 32; }

  __device__ __forceinline__ Run<T, kCount> run(int row, int number) const {
    Run<T, kCount> run;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const float* pair = sum[row / 2][number * (kCount / 2) + i] + row % 2 * 2;
      store_pair(run.element + 2 * i, pair[0], pair[1]);
    }
    return run;
  }

  // Adds products over the runs `run` and the next one of rows and columns. `columns`: the lane's first ones.
  __device__ __forceinline__ void multiply_add(const typename Mma<T>::FragmentA (&rows)[2], uint32_t columns, int run) {
    typename Mma<T>::FragmentB b[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      LineFragments<T, kCount>::read_b(b[j], columns, 2 * j, run);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < kGroup / 8; ++j) {
        Mma<T>::template product<false>(sum[i][j], rows[i], b[j / 2], j % 2);
      }
    }
  }

  // Zero where there is no token; columns `first` to last - 1 are.
  __device__ __forceinline__ void keep_tokens(int first, int last) {
#pragma unroll
    for (int product = 0; product < kGroup / 8; ++product) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int column = static_cast<int>(line_of_column<kCount>(product, e % 2)) + lane() % 4 * kCount;
        const bool is_token = column >= first && column < last;
        sum[0][product][e] = is_token ? sum[0][product][e] : 0.0f;
        sum[1][product][e] = is_token ? sum[1][product][e] : 0.0f;
      }
    }
  }

  // Writes what is in the rows' windows. `to`: the lane's first run; `pitch`: from a row to the eighth one below.
  __device__ __forceinline__ void store(T* to, int64_t pitch, const GroupEdges& edges) const {
    if (edges.whole()) {
#pragma unroll
      for (int row = 0; row < 4; ++row, to += pitch) {
#pragma unroll
        for (int i = 0; i < kRuns; ++i) {
          store_run(to + i * (4 * kCount), run(row, i));
        }
      }
    } else {
      store_some(to, pitch, edges);
    }
  }

 private:
  // A run may be the end of a row and the beginning of the next one. With seams such a beginning waits for the end,
  // which is in a later group or in the same one, so that the run is written whole.
  __device__ __forceinline__ void store_some(T* to, int64_t pitch, const GroupEdges& edges) const {
    const int place = lane() % 4 * kCount - lane() / 4;
    const int after_begin = place - edges.begin, before_end = edges.end - place;
    if (kJoins && edges.seams) {
#pragma unroll
      for (int row = 0; row < 4; ++row) {
#pragma unroll
        for (int i = 0; i < kRuns; ++i) {
          const int column = after_begin + i * (4 * kCount) - row * 8;
          if (column < 0 && column > -kCount) {
            write_seam(edges.seams + (row * 8 + lane() / 4) * 16, run(row, i));
          }
        }
      }
      __syncwarp();
    }
#pragma unroll
    for (int row = 0; row < 4; ++row, to += pitch) {
#pragma unroll
      for (int i = 0; i < kRuns; ++i) {
        const int line = row * 8 + lane() / 4;
        const int column = after_begin + i * (4 * kCount) - row * 8, left = before_end - i * (4 * kCount) + row * 8;
        if (column > -kCount && left > 0 && line < edges.lines) {
          store_part(to + i * (4 * kCount), run(row, i), column, left, line, edges);
        }
      }
    }
  }

  // A run of which a row has the elements from -column to left - 1.
  static __device__ __forceinline__ void store_part(
      T* to, Run<T, kCount> run, int column, int left, int line, const GroupEdges& edges) {
    bool whole = column >= 0 && left >= kCount;
    if constexpr (kJoins) {
      if (!whole && edges.seams) {
        if (column < 0 && line > 0) {
          return;
        }
        if (column >= 0 && line + 1 < min(edges.lines, kWarpRows)) {
          run = joined(run, left, edges.seams + (line + 1) * 16);
          whole = true;
        }
      }
    }
    if (whole) {
      store_run(to, run);
    } else {
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        if (column + e >= 0 && e < left) {
          to[e] = run.element[e];
        }
      }
    }
  }

  static __device__ __forceinline__ void write_seam(uint32_t seam, const Run<T, kCount>& run) {
    if constexpr (kJoins) {
      store_shared(seam, *reinterpret_cast<const uint4*>(&run));
    }
  }

  // `count` elements of a run and the rest of what waits for it.
  static __device__ __forceinline__ Run<T, kCount> joined(const Run<T, kCount>& run, int count, uint32_t seam) {
    const uint4 given = load_shared(seam);
    const uint32_t waiting[] = {given.x, given.y, given.z, given.w};
    Run<T, kCount> both = run;
    uint32_t* words = reinterpret_cast<uint32_t*>(&both);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int bits = max(count * int{8 * sizeof(T)} - 32 * i, 0);
      const uint32_t of_waiting = bits < 32 ? ~0u << bits : 0u;
      words[i] = (words[i] & ~of_waiting) | (waiting[i] & of_waiting);
    }
    return both;
  }
};

// A work tile: some rows of a head, and the steps over columns of their windows. kCount: elements that are written
// together, a run of 16 bytes or a pair. kHeld: k blocks of rows, all of them, which each warp holds in registers; 0:
// rows are read with each step. Two k blocks lie in the ring's later stages while its first one fills.
template <class T, int kCount, int kHeld>
struct RowTile {
  static constexpr int kKBlocks = std::max(kHeld, 1);
  using M = Mma<T>;
  using Fragments = LineFragments<T, kCount>;
  using Memory = MatmulMemory<kKBlocks>;
  static constexpr int kStage = kKBlocks * Memory::kColumnTile;
  static_assert(kHeld != 2 || kHeld * Memory::kRowTile <= (kRing - 1) * kStage);
  static constexpr int kGroups = kColumns / kGroup, kProducts = 4;  // in a step; along a k block

  // The lane, and its places in shared memory: of columns and rows, and what it reads of them.
  struct Places {
    int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * kWarpRows;
    uint32_t columns, rows, of_a, of_b;

    __device__ __forceinline__ explicit Places(Memory& memory) {
      columns = keep(shared_address(memory.columns));
      rows = columns + (kHeld == 2 ? kStage : sizeof(Memory));
      of_a = rows + warp_row * kLineBytes + Fragments::place_of_a(lane);
      of_b = keep(columns + Fragments::place_of_b(lane));
    }
  };

  const MatmulArguments<T>& p;
  const Places& places;
  const int64_t row, top;  // the first of all, and of the warp's
  BandMatrix<T> band;
  const int64_t first;
  const int steps;
  const bool all_tokens;
  const TokenLoader<T, kRows> load_rows;
  TokenLoader<T, kColumns> load_columns;
  // The part of the warp's windows in a group; `last_step`: until the last ones, as far as it matters.
  GroupEdges edges;
  int last_step, past_last, begin;
  T* to;
  uint32_t stage = 0;

  __device__ __forceinline__ RowTile(const MatmulArguments<T>& p, const Places& places, const WorkTile& work)
      : p(p),
        places(places),
        row(work.tile / p.column_tiles * kRows),
        top(row + places.warp_row),
        band(p.out + (work.batch * p.heads + work.head) * p.tokens * (2 * p.window + 1), p.tokens, p.window),
        first(band.aligned(row - p.window) + work.tile % p.column_tiles * p.steps_of_tile * kColumns),
        steps(steps_until(min(row + kRows, p.tokens) + p.window)),
        all_tokens(first >= 0 && first + int64_t{steps} * kColumns <= p.tokens),
        load_rows(p.a, p.a.of(work.batch, work.head), row, row + kRows <= p.tokens),
        load_columns(p.b, p.b.of(work.batch, work.head), first, all_tokens) {
    edges.lines = static_cast<int>(max(int64_t{0}, min(p.tokens - top, int64_t{kWarpRows})));
    // A row's two ends have to be this work tile's.
    edges.seams = p.column_tiles == 1 ? places.columns + offsetof(Memory, seams) + places.warp_row * 16 : 0;
    const int64_t past_first = edges.lines > 0 ? top + p.window + 1 - first : -kRows;
    last_step = keep(static_cast<uint32_t>(past_first >> log2_of(kColumns)));
    past_last = keep(static_cast<uint32_t>(past_first) % kColumns);
    begin = static_cast<int>(max(top - p.window - first, int64_t{-kFar}));
    to = band.at(top + places.lane / 4, first + places.lane % 4 * kCount);
  }

  __device__ __forceinline__ uint32_t free_stage() const { return stage == 0 ? kRing - 1 : stage - 1; }
  __device__ __forceinline__ void next_stage() { stage = stage == kRing - 1 ? 0 : stage + 1; }

  __device__ __forceinline__ void load(int step, int k_block, uint32_t to_stage) {
    if (step < steps) {
      if (!kHeld && (!p.rows_stay || step == 0)) {
        load_rows(places.rows + (p.rows_stay ? k_block : to_stage) * Memory::kRowTile, row, k_block);
      }
#pragma unroll
      for (int i = 0; i < kKBlocks; ++i) {
        load_columns(
            places.columns + to_stage * kStage + i * Memory::kColumnTile, first + int64_t{step} * kColumns,
            k_block + i);
      }
      if (kHeld || k_block + 1 == p.k_blocks) {
        load_columns.advance();
      }
    }
    end_of_copies();
  }

  __device__ __forceinline__ void begin_step(int step) {
    edges.begin = begin;
    edges.end = min(last_step - step, kFar) * kColumns + past_last;
    begin = max(begin - kColumns, -kFar);
  }

  __device__ __forceinline__ void keep_tokens(Group<T, kCount>& group, int step, int offset) const {
    if (!all_tokens) {
      const int64_t column = first + int64_t{step} * kColumns + offset;
      const int from = static_cast<int>(max(-column, int64_t{0}));
      const int until = static_cast<int>(min(p.tokens - column, int64_t{kGroup}));
      if (from > 0 || until < kGroup) {
        group.keep_tokens(from, until);
      }
    }
  }

  // Rows to registers, while the first columns are on their way.
  __device__ __forceinline__ void read_rows(typename M::FragmentA (&a)[kKBlocks * kProducts][2]) {
#pragma unroll
    for (int k_block = 0; k_block < kHeld; ++k_block) {
      load_rows(places.rows + k_block * Memory::kRowTile, row, k_block);
    }
    if constexpr (kHeld == 2) {
      end_of_copies();
      load(0, 0, 0);
    } else {
#pragma unroll 1
      for (int step = 0; step < kRing - 1; ++step) {
        load(step, 0, step);
      }
    }
    wait_for_copies<kRing - 2>();
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kHeld * kProducts; ++k) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        Fragments::read_a(a[k][i], places.of_a + k / kProducts * Memory::kRowTile, 16 * i, k % kProducts * 2);
      }
    }
    if constexpr (kHeld == 2) {
      __syncthreads();
      load(1, 0, 1);
    }
  }

  // All steps with rows that are held.
  __device__ __forceinline__ void multiply_held() {
    typename M::FragmentA a[kKBlocks * kProducts][2];
    read_rows(a);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      wait_for_copies<kRing - 2>();
      __syncthreads();
      load(step + kRing - 1, 0, free_stage());
      begin_step(step);
      uint32_t tile = places.of_b + stage * kStage;
#pragma unroll 1
      for (int offset = 0; offset < kColumns; offset += kGroup) {
        if (edges.meets()) {
          Group<T, kCount> group{};
#pragma unroll
          for (int k = 0; k < kHeld * kProducts; ++k) {
            group.multiply_add(a[k], tile + k / kProducts * Memory::kColumnTile, k % kProducts * 2);
          }
          keep_tokens(group, step, offset);
          group.store(to, p.pitch, edges);
        }
        to += kGroup;
        tile += kGroup * kLineBytes;
        edges.begin -= kGroup;
        edges.end -= kGroup;
      }
      next_stage();
    }
  }

  // Adds the product of a k block that has arrived to the groups that the windows meet.
  template <class F>
  __device__ __forceinline__ void multiply_add(
      Group<T, kCount> (&groups)[kGroups], int k_block, const F& edges_of) const {
    const uint32_t rows = places.of_a + (p.rows_stay ? k_block : stage) * Memory::kRowTile;
    const uint32_t tile = places.of_b + stage * Memory::kColumnTile;
#pragma unroll
    for (int k = 0; k < kProducts; ++k) {
      typename M::FragmentA a[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        Fragments::read_a(a[i], rows, 16 * i, 2 * k);
      }
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        if (edges_of(g).meets()) {
          groups[g].multiply_add(a, tile + g * (kGroup * kLineBytes), 2 * k);
        }
      }
    }
  }

  // All steps, a k block at a time.
  __device__ __forceinline__ void multiply() {
    int ahead = 0, ahead_k_block = 0;
    const auto load_next = [&](uint32_t to_stage) {
      load(ahead, ahead_k_block, to_stage);
      if (++ahead_k_block == p.k_blocks) {
        ahead_k_block = 0;
        ++ahead;
      }
    };
#pragma unroll 1
    for (uint32_t first = 0; first < kRing - 1; ++first) {
      load_next(first);
    }
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      begin_step(step);
      const auto edges_of = [&](int g) {
        return GroupEdges{edges.begin - g * kGroup, edges.end - g * kGroup, edges.lines, edges.seams};
      };
      Group<T, kCount> groups[kGroups] = {};
#pragma unroll 1
      for (int k_block = 0; k_block < p.k_blocks; ++k_block) {
        wait_for_copies<kRing - 2>();
        __syncthreads();
        load_next(free_stage());
        multiply_add(groups, k_block, edges_of);
        next_stage();
      }
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        if (edges_of(g).meets()) {
          keep_tokens(groups[g], step, g * kGroup);
          groups[g].store(to + g * kGroup, p.pitch, edges_of(g));
        }
      }
      to += kColumns;
    }
  }

 private:
  __device__ __forceinline__ int steps_until(int64_t past) const {
    return first < past ? static_cast<int>(min(int64_t{p.steps_of_tile}, (past - first + kColumns - 1) / kColumns)) : 0;
  }
};

template <class T, int kCount, int kHeld>
__global__ void __launch_bounds__(kThreads, Tuning::kThreadBlocks<kHeld>)
    window_matmul_kernel(const __grid_constant__ MatmulArguments<T> p) {
  extern __shared__ __align__(128) unsigned char shared[];
  using Tile = RowTile<T, kCount, kHeld>;
  const typename Tile::Places places(*reinterpret_cast<typename Tile::Memory*>(shared));
  const int64_t tiles_of_head = p.row_tiles * p.column_tiles, work_tiles = p.batch * p.heads * tiles_of_head;
  for (int64_t number = blockIdx.x; number < work_tiles; number += gridDim.x) {
    Tile tile(p, places, WorkTile(number, p.heads, tiles_of_head));
    __syncthreads();  // what the work tile before read is free
    if constexpr (kHeld > 0) {
      tile.multiply_held();
    } else {
      tile.multiply();
    }
  }
}

Tensor window_matmul(const Tensor& a, const Tensor& b, int64_t window, const std::string& implementation) {
  check_operands({{&a, "a"}, {&b, "b"}}, 3);
  check_size(b, 3, a.size(3), "b");
  check_window(window);
  const int64_t batch = a.size(0), heads = a.size(1), tokens = a.size(2);
  Tensor out = empty_on(a, {batch, heads, tokens, 2 * window + 1});
  const Launcher launch(a);
  const bool on_hopper = is_for_hopper(launch, implementation);
  with_element<false>(a, "window_matmul", [&](auto zero) {
    using T = decltype(zero);
    if (out.numel() == 0) {
      return;
    }
    const Tensor rows = in_runs(a), columns = in_runs(b);
    if (on_hopper) {
      window_matmul_on_hopper(launch, rows, columns, out, window);
      return;
    }
    const int k_blocks = static_cast<int>(std::max<int64_t>(1, ceil_div(a.size(3), kBlockK<T>)));
    // Two thread blocks of a multiprocessor have to have space, unless a ring takes no less.
    const bool rows_stay = k_blocks <= kRing || 2 * MatmulMemory<1>::bytes(k_blocks) <= launch.shared_memory();
    const int64_t row_tiles = ceil_div(tokens, kRows), matrices = batch * heads;
    // A tile's columns begin up to 31 bytes before its windows. They are shared out where rows alone are too few.
    const int64_t steps = ceil_div(2 * window + std::min<int64_t>(kRows, tokens) + 32 / sizeof(T) - 1, kColumns);
    const int64_t column_tiles =
        std::min(steps, ceil_div(Tuning::kFewestWorkTiles * launch.multiprocessors(), matrices * row_tiles));
    const MatmulArguments<T> arguments{
        TokenRows<T>(rows),
        TokenRows<T>(columns),
        static_cast<T*>(out.mutable_data_ptr()),
        batch,
        heads,
        tokens,
        window,
        row_tiles,
        column_tiles,
        8 * (2 * window),
        static_cast<int>(ceil_div(steps, column_tiles)),
        k_blocks,
        rows_stay};
    // Rows that are being written should stay in L2 until they are whole, or they leave it in pieces: where windows are
    // wide, thread blocks ask for so much shared memory that fewer are on a multiprocessor.
    const auto bytes_for = [&](int held) {
      const size_t bytes = held == 2 ? MatmulMemory<2>::bytes(0) : MatmulMemory<1>::bytes(rows_stay ? k_blocks : kRing);
      const int64_t fit = std::max<int64_t>(2, Tuning::kL2Bytes / (kRows * (2 * window + 1) * int64_t{sizeof(T)}));
      const bool fewer = held > 0 && fit < Tuning::kHeldThreadBlocks;
      return fewer ? std::max(bytes, launch.shared_memory() / (fit + 1) / 16 * 16 + 16) : bytes;
    };
    static_assert(MatmulMemory<1>::bytes(kRing) <= kPortableMemory && MatmulMemory<2>::bytes(0) <= kPortableMemory);
    const auto run = [&](auto count, auto held) {
      constexpr int kHeld = decltype(held)::value;
      launch.with_shared_memory(
          window_matmul_kernel<T, decltype(count)::value, kHeld>, matrices * row_tiles * column_tiles, kThreads,
          bytes_for(kHeld), arguments);
    };
    const auto with_count = [&](auto count) {
      if constexpr (sizeof(T) == 2) {
        if (k_blocks == 1) {
          return run(count, std::integral_constant<int, 1>{});
        }
        if (k_blocks == 2) {
          return run(count, std::integral_constant<int, 2>{});
        }
      }
      run(count, std::integral_constant<int, 0>{});
    };
    // A run is of two rows at most where these are longer.
    has_whole_runs<T>(window) && window > 0 ? with_count(std::integral_constant<int, kRun<T>>{})
                                            : with_count(std::integral_constant<int, 2>{});
  });
  return out;
}

}  // namespace
}  // namespace ds_sparse

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CUDA, m) { m.impl("window_matmul", TORCH_BOX(&ds_sparse::window_matmul)); }
