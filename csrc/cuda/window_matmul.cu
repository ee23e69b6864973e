// The band of a product, near the diagonal, and the product of a band and dense tokens. Schemas and shapes:
// csrc/library.cpp; meaning: ds_sparse/reference.py; where a band has what: band.h.
//
// window_matmul: a thread block has some rows of `a`, and walks the columns of their windows 64 at a time. A product's
// sums pass through shared memory, so that a row's neighbours are written together. unwindow_matmul: a thread block has
// some rows of the result, and walks the part of the band that they are made of; transposed, those are columns.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <type_traits>

#include "../checks.h"
#include "band.h"
#include "elements.h"
#include "launch.h"
#include "tiles.h"

namespace ds_sparse {
namespace {

constexpr int kColumns = 64;          // of a step of window_matmul
constexpr int64_t kFewestTasks = 16;  // of window_matmul for a multiprocessor, where there is work for them

int64_t parts_of(int64_t all, int64_t part) { return (all + part - 1) / part; }

// Where a product's matrices are among tasks: heads one after another, so that neighbours share what they load.
struct Task {
  int64_t batch, head, part;
  __device__ Task(int64_t number, int64_t heads, int64_t parts)
      : batch(number / parts / heads), head(number / parts % heads), part(number % parts) {}
};

template <class T>
struct MatmulArguments {
  TokenRows<T> a, b;
  T* out;
  int64_t batch, heads, tokens, window;
  int64_t row_tiles, column_parts, steps_in_part;
  int chunks;
  bool rows_stay, whole_runs;
};

template <class T, int kM>
struct MatmulMemory {
  static constexpr int kPitch = pitch_of<T>(kColumns);
  using RowTile = T[tile_elements<T>(kM, kChunk<T>)];

  T columns[kStages][tile_elements<T>(kColumns, kChunk<T>)];
  T result[kM * kPitch];
  // Followed by row tiles: all chunks of the rows, or those of the stages.
  __device__ RowTile* rows() { return reinterpret_cast<RowTile*>(this + 1); }
  static size_t bytes(int row_tiles) { return sizeof(MatmulMemory) + row_tiles * sizeof(RowTile); }
};

// Writes a tile of results to the band; 0 where a row's window has no token.
template <int kCount, class T, int kSize>
__device__ __forceinline__ void store_tile(
    const T (&result)[kSize], const BandMatrix<T>& band, int64_t row, int64_t column) {
  constexpr int pitch = pitch_of<T>(kColumns), runs = kColumns / kCount, step = kThreads / runs;
  constexpr int rows = kSize / pitch;
  const TileEdges edges(band, row, column);
  const bool inside = edges.hold(rows, kColumns), all_tokens = edges.first <= 0 && edges.last >= kColumns;
  const int line = threadIdx.x / runs, c = threadIdx.x % runs * kCount;
  const T* from = result + line * pitch + c;
  T* to = band.at(row + line, column + c);
#pragma unroll 4
  for (int i = 0; i < rows / step; ++i) {
    const int here = line + i * step, begin = edges.begin + here, end = edges.end + here;
    const bool whole = c >= begin && c + kCount <= end && all_tokens;
    if (inside || (here < edges.lines && whole)) {
      store_run(to, *reinterpret_cast<const Run<T, kCount>*>(from));
    } else if (here < edges.lines && c < end && c + kCount > begin) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        if (c + e >= begin && c + e < end) {
          to[e] = c + e >= edges.first && c + e < edges.last ? from[e] : T(0.0f);
        }
      }
    }
    from += step * pitch;
    to += step * (2 * band.window);
  }
}

template <class T, int kM>
__global__ void __launch_bounds__(kThreads, kM == 64 && sizeof(T) == 2 ? 5 : 3) window_matmul_kernel(
    const __grid_constant__ MatmulArguments<T> p) {
  extern __shared__ __align__(16) unsigned char shared[];
  using Tile = Sums<T, kM, kColumns, false>;
  auto& memory = *reinterpret_cast<MatmulMemory<T, kM>*>(shared);
  const int64_t parts = p.row_tiles * p.column_parts, tasks = p.batch * p.heads * parts;

  for (int64_t number = blockIdx.x; number < tasks; number += gridDim.x) {
    const Task task(number, p.heads, parts);
    const int64_t row = task.part / p.column_parts * kM;
    const BandMatrix<T> band(
        p.out + (task.batch * p.heads + task.head) * p.tokens * (2 * p.window + 1), p.tokens, p.window);
    const int64_t first =
        band.aligned(row - p.window) + task.part % p.column_parts * p.steps_in_part * kColumns;
    const int64_t end = min(row + kM, p.tokens) + p.window;
    const int64_t steps = first < end ? min(p.steps_in_part, (end - first + kColumns - 1) / kColumns) : 0;
    const T *a = p.a.of(task.batch, task.head), *b = p.b.of(task.batch, task.head);

    const auto row_tile = [&](int chunk, int stage) -> T* { return memory.rows()[p.rows_stay ? chunk : stage]; };
    int64_t ahead = 0;    // the next step to load,
    int ahead_chunk = 0;  // and its next chunk
    const auto load_next = [&](int stage) {
      if (ahead < steps) {
        const int depth = ahead_chunk * kChunk<T>;
        if (!p.rows_stay || ahead == 0) {
          p.a.template load<kM, kChunk<T>>(row_tile(ahead_chunk, stage), a, row, depth);
        }
        p.b.template load<kColumns, kChunk<T>>(memory.columns[stage], b, first + ahead * kColumns, depth);
        if (++ahead_chunk == p.chunks) {
          ahead_chunk = 0;
          ++ahead;
        }
      }
      end_of_copies();
    };

    __syncthreads();  // what the task before read is free
    load_next(0);
    int stage = 0;
    for (int64_t step = 0; step < steps; ++step) {
      const int64_t column = first + step * kColumns;
      const bool has_part = TileEdges(band, row, column)
                                .meet(Tile::first_row(), Tile::kRows, Tile::first_column(), Tile::kColumns);
      Tile sums;
      sums.clear();
      for (int chunk = 0; chunk < p.chunks; ++chunk, stage = 1 - stage) {
        wait_for_copies<0>();
        __syncthreads();
        load_next(1 - stage);
        if (has_part) {
          sums.template add<true, true>(row_tile(chunk, stage), memory.columns[stage]);
        }
      }
      sums.for_each_pair([&](int line, int c, float one, float next) {
        store_pair(
            memory.result + (Tile::first_row() + line) * pitch_of<T>(kColumns) + Tile::first_column() + c, one, next);
      });
      __syncthreads();
      p.whole_runs ? store_tile<kRun<T>>(memory.result, band, row, column)
                   : store_tile<2>(memory.result, band, row, column);
    }
  }
}

template <class T>
struct UnwindowArguments {
  const T* band;
  int64_t batch_stride, head_stride;
  TokenRows<T> dense;
  T* out;
  int64_t batch, heads, tokens, window, width;
  int64_t tiles;
  int column_tiles;
  bool whole_runs;
};

template <class T, bool kTransposed, int kM, int kN>
struct UnwindowMemory {
  static constexpr int kPitch = pitch_of<T>(kN);
  // Large tiles leave no room for a third one.
  static constexpr int kCount = kM == 64 ? 3 : 2;

  struct Stage {
    T band[(kTransposed ? kChunk<T> : kM) * pitch_of<T>(kTransposed ? kM : kChunk<T>)];
    T dense[kChunk<T> * pitch_of<T>(kN)];
  };
  union {
    Stage stages[kCount];
    T result[kM * kPitch];
  };
};

// One number of the result by its definition: what a row's window does not have cannot matter.
template <bool kTransposed, class T>
__device__ float sum_of_window(
    const BandMatrix<const T>& band, const T* dense, int64_t token_stride, int64_t token) {
  const int64_t end = min(token + band.window + 1, band.tokens);
  float sum = 0;
  for (int64_t other = max(token - band.window, int64_t{0}); other < end; ++other) {
    const T of_band = kTransposed ? *band.at(other, token) : *band.at(token, other);
    sum += static_cast<float>(of_band) * static_cast<float>(dense[other * token_stride]);
  }
  return sum;
}

template <class T, bool kTransposed, int kM, int kN>
__global__ void __launch_bounds__(kThreads, kM == 128 ? 2 : sizeof(T) == 2 ? 4 : 3) unwindow_matmul_kernel(
    const __grid_constant__ UnwindowArguments<T> p) {
  extern __shared__ __align__(16) unsigned char shared[];
  using Tile = Sums<T, kM, kN, false>;
  using Memory = UnwindowMemory<T, kTransposed, kM, kN>;
  using Loader = BandLoader<T, kTransposed ? kChunk<T> : kM, kTransposed ? kM : kChunk<T>>;
  constexpr int kAhead = Memory::kCount - 1;
  auto& memory = *reinterpret_cast<Memory*>(shared);
  const int64_t parts = p.tiles * p.column_tiles, tasks = p.batch * p.heads * parts;

  for (int64_t number = blockIdx.x; number < tasks; number += gridDim.x) {
    const Task task(number, p.heads, parts);
    const int depth = static_cast<int>(task.part % p.column_tiles) * kN;
    const BandMatrix<const T> band(
        p.band + task.batch * p.batch_stride + task.head * p.head_stride, p.tokens, p.window);
    const T* dense = p.dense.of(task.batch, task.head);
    // The tile's tokens, and the other side's that they have in their windows.
    int64_t token = task.part / p.column_tiles * kM;
    if constexpr (kTransposed) {
      token += band.aligned(0);
    }
    if (token >= p.tokens) {
      continue;
    }
    int64_t first = max(token - p.window, int64_t{0});
    if constexpr (!kTransposed) {
      first = band.aligned(first);
    }
    const int64_t end = min(min(token + kM, p.tokens) + p.window, p.tokens);

    const auto row = [&](int64_t other) { return kTransposed ? other : token; };
    const auto column = [&](int64_t other) { return kTransposed ? token : other; };
    const auto load = [&](int64_t other, int stage) {
      if (other < end) {
        Loader::load(memory.stages[stage].band, band, row(other), column(other), p.whole_runs);
        p.dense.template load<kChunk<T>, kN>(memory.stages[stage].dense, dense, other, depth);
      }
      end_of_copies();
    };

    Tile sums;
    sums.clear();
    __syncthreads();  // what the task before read is free
#pragma unroll 1
    for (int stage = 0; stage < kAhead; ++stage) {
      load(first + stage * kChunk<T>, stage);
    }
    int stage = 0, free = kAhead;
    for (int64_t other = first; other < end; other += kChunk<T>) {
      wait_for_copies<kAhead - 1>();
      Loader::clear_beside(memory.stages[stage].band, band, row(other), column(other), p.whole_runs);
      __syncthreads();
      load(other + kAhead * kChunk<T>, free);
      const TileEdges edges(band, row(other), column(other));
      if (kTransposed ? edges.meet(0, kChunk<T>, Tile::first_row(), Tile::kRows)
                      : edges.meet(Tile::first_row(), Tile::kRows, 0, kChunk<T>)) {
        sums.template add<!kTransposed, false>(memory.stages[stage].band, memory.stages[stage].dense);
      }
      free = stage;
      stage = stage == kAhead ? 0 : stage + 1;
    }

    __syncthreads();
    bool finite = true;
    sums.for_each_pair([&](int line, int c, float one, float next) {
      finite = finite && isfinite(one) && isfinite(next);
      store_pair(memory.result + (Tile::first_row() + line) * Memory::kPitch + Tile::first_column() + c, one, next);
    });
    finite = __syncthreads_and(finite);
    T* out = p.out + ((task.batch * p.heads + task.head) * p.tokens + token) * p.width + depth;
    const int begin_line = token < 0 ? static_cast<int>(-token) : 0;
    const int lines = static_cast<int>(min(p.tokens - token, int64_t{kM}));
    const int width = static_cast<int>(min(p.width - depth, int64_t{kN}));
    if (p.width % kRun<T> == 0) {
      constexpr int runs = kN / kRun<T>, step = kThreads / runs;
      const int c = threadIdx.x % runs * kRun<T>;
#pragma unroll 4
      for (int line = threadIdx.x / runs; line < kM; line += step) {
        if (line >= begin_line && line < lines && c < width) {
          store_run(out + line * p.width + c, load_aligned(memory.result + line * Memory::kPitch + c));
        }
      }
    } else {
#pragma unroll 1
      for (int n = threadIdx.x; n < kM * kN; n += kThreads) {
        const int line = n / kN, c = n % kN;
        if (line >= begin_line && line < lines && c < width) {
          out[line * p.width + c] = memory.result[line * Memory::kPitch + c];
        }
      }
    }
    // A number that is not finite, times the zeros beside the windows, has spoilt rows that do not see it.
    if (!finite) {
      __syncthreads();
#pragma unroll 1
      for (int n = threadIdx.x; n < kM * kN; n += kThreads) {
        const int line = n / kN, c = n % kN;
        if (line >= begin_line && line < lines && c < width && !isfinite(static_cast<float>(out[line * p.width + c]))) {
          out[line * p.width + c] = static_cast<T>(
              sum_of_window<kTransposed>(band, dense + depth + c, p.dense.token_stride, token + line));
        }
      }
    }
  }
}

Tensor window_matmul(const Tensor& a, const Tensor& b, int64_t window) {
  check_operands({{&a, "a"}, {&b, "b"}}, 3);
  check_size(b, 3, a.size(3), "b");
  check_window(window);
  const int64_t batch = a.size(0), heads = a.size(1), tokens = a.size(2);
  Tensor out = torch::stable::new_empty(a, {batch, heads, tokens, 2 * window + 1});
  const Launcher launch(a);
  with_element<false>(a, "window_matmul", [&](auto zero) {
    using T = decltype(zero);
    if (out.numel() == 0) {
      return;
    }
    const Tensor rows = in_runs(a), columns = in_runs(b);
    const auto run = [&](auto height) {
      constexpr int kM = decltype(height)::value;
      using Memory = MatmulMemory<T, kM>;
      const int chunks = static_cast<int>(std::max<int64_t>(1, parts_of(a.size(3), kChunk<T>)));
      const bool rows_stay = Memory::bytes(chunks) <= launch.shared_memory();
      const int64_t row_tiles = parts_of(tokens, kM), matrices = batch * heads;
      // A tile's columns begin up to 31 bytes before its windows. They are shared out where rows alone are too few.
      const int64_t steps = parts_of(2 * window + std::min<int64_t>(kM, tokens) + 32 / sizeof(T) - 1, kColumns);
      const int64_t column_parts =
          std::min(steps, parts_of(kFewestTasks * launch.multiprocessors(), matrices * row_tiles));
      const MatmulArguments<T> arguments{
          TokenRows<T>(rows), TokenRows<T>(columns), static_cast<T*>(out.mutable_data_ptr()), batch, heads, tokens,
          window, row_tiles, column_parts, parts_of(steps, column_parts), chunks, rows_stay,
          has_whole_runs<T>(window)};
      launch.with_shared_memory(
          window_matmul_kernel<T, kM>, matrices * row_tiles * column_parts, kThreads,
          Memory::bytes(rows_stay ? chunks : kStages), arguments);
    };
    if constexpr (sizeof(T) == 2) {
      // More rows share the columns that are loaded.
      if (a.size(3) > 64) {
        return run(std::integral_constant<int, 128>{});
      }
    }
    run(std::integral_constant<int, 64>{});
  });
  return out;
}

// A band whose rows are one after another: `x`, or a copy.
Tensor with_adjacent_rows(const Tensor& x) {
  const int64_t width = x.size(3);
  if ((width == 1 || x.stride(3) == 1) && (x.size(2) == 1 || x.stride(2) == width)) {
    return x;
  }
  Tensor copy = torch::stable::new_empty(x, x.sizes());
  torch::stable::copy_(copy, x);
  return copy;
}

Tensor unwindow_matmul(const Tensor& band, const Tensor& dense, bool transposed) {
  check_operands({{&dense, "dense"}, {&band, "band"}}, 3);
  check_band(band, "band");
  const int64_t batch = dense.size(0), heads = dense.size(1), tokens = dense.size(2), width = dense.size(3);
  Tensor out = torch::stable::new_empty(dense, dense.sizes());
  const Launcher launch(dense);
  with_element<false>(dense, "unwindow_matmul", [&](auto zero) {
    using T = decltype(zero);
    if (out.numel() == 0) {
      return;
    }
    const Tensor rows = with_adjacent_rows(band), right = in_runs(dense);
    const auto run = [&](auto is_transposed, auto height, auto tile_width) {
      constexpr bool kTransposed = decltype(is_transposed)::value;
      constexpr int kM = decltype(height)::value, kN = decltype(tile_width)::value;
      // Transposed, the first tile begins up to 31 bytes before the first token.
      const int64_t tiles = parts_of(tokens + (kTransposed ? 32 / sizeof(T) - 1 : 0), kM);
      const int column_tiles = static_cast<int>(parts_of(width, kN));
      const int64_t window = band.size(3) / 2;
      const UnwindowArguments<T> arguments{
          static_cast<const T*>(rows.const_data_ptr()), rows.stride(0), rows.stride(1), TokenRows<T>(right),
          static_cast<T*>(out.mutable_data_ptr()), batch, heads, tokens, window, width, tiles, column_tiles,
          has_whole_runs<T>(window)};
      launch.with_shared_memory(
          unwindow_matmul_kernel<T, kTransposed, kM, kN>, batch * heads * tiles * column_tiles, kThreads,
          sizeof(UnwindowMemory<T, kTransposed, kM, kN>), arguments);
    };
    const auto with_tile = [&](auto is_transposed) {
      if constexpr (sizeof(T) == 2) {
        if (width > 64) {
          return run(is_transposed, std::integral_constant<int, 128>{}, std::integral_constant<int, 128>{});
        }
      }
      run(is_transposed, std::integral_constant<int, 64>{}, std::integral_constant<int, 64>{});
    };
    transposed ? with_tile(std::true_type{}) : with_tile(std::false_type{});
  });
  return out;
}

}  // namespace
}  // namespace ds_sparse

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CUDA, m) {
  m.impl("window_matmul", TORCH_BOX(&ds_sparse::window_matmul));
  m.impl("unwindow_matmul", TORCH_BOX(&ds_sparse::unwindow_matmul));
}
