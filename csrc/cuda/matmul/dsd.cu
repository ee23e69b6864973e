// Sparse @ dense. Schema and shapes: csrc/library.cpp; meaning: ds_sparse/reference.py.
//
// A thread block takes a chunk of the live blocks (chunks.h) and, of each list, a tile of rows times up to 128 columns.
// The tokens that are summed over are gathered from as many live blocks as 128 bytes take. Lists that chunks cut leave
// sums of their splits, which a second kernel adds in order. On Hopper products of 16-bit types go by tiles instead
// (dsd_small_sm90.cu, dsd_large_sm90.cu), and so do the sums of tiles that are cut.

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <type_traits>

#include "../../checks.h"
#include "../common/gemm_tile.h"
#include "../common/launch.h"
#include "chunks.h"
#include "dsd.h"

namespace ds_sparse {
namespace {

// The sums of the splits of long lists: (batch, heads or 1, chunks, 2, block, width).
template <class C>
struct SplitSums {
  C* data;

  __device__ C* at(int64_t chunk_of_all, Split split, int64_t block, int64_t width) const {
    return data + (2 * chunk_of_all + (split == kStarted)) * block * width;
  }
};

// A product, but for how its operands are read.
template <class T>
struct Product {
  Result<T> result;
  SplitSums<Compute<T>> splits;
  BlockLists lists;
  const int32_t* indices;
  const int32_t* slots;  // null: entries are numbered as values are
  int layout_heads, heads, rows;
  int64_t values_of_batch, batch;
  int log_block;

  __host__ __device__ int64_t heads_apart() const { return layout_heads == 1 ? heads : 1; }
  __host__ __device__ int64_t chunks_of_all() const { return batch * heads_apart() * lists.chunks(); }
};

template <class T>
struct Arguments : Product<T> {
  const T* values_data;
  Operand<T> values;  // tokens are those that are summed over, depth the results'
  Dense<T> dense;
  int row_tiles, column_tiles;
};

template <class T, int kM, int kN>
struct Memory {
  static constexpr int kValues = tile_elements<T>(kM, kBlockK<T>), kDense = tile_elements<T>(kN, kBlockK<T>);
  static constexpr int kResult = tile_elements<T>(kM, kN) - kValues;
  // The result passes through a stage.
  struct Stage {
    T values[kValues];
    T dense[kDense > kResult ? kDense : kResult];
  };
  Stage stages[kStages];
  int32_t listed[kMostListed], slots[kMostListed];
};

template <class T, int kM, int kN, bool kFast>
__global__ void __launch_bounds__(kThreads, DsdTuning<kN>::kThreadBlocks)
    matmul_dsd_kernel(const __grid_constant__ Arguments<T> p) {
  extern __shared__ __align__(16) unsigned char shared[];
  using Tile = Sums<T, kM, kN, kFast>;
  auto& memory = *reinterpret_cast<Memory<T, kM, kN>*>(shared);
  const int block = 1 << p.log_block, chunks = p.lists.chunks();
  const int64_t heads_apart = p.heads_apart();
  const int64_t work_tiles = p.chunks_of_all() * p.row_tiles * p.column_tiles;
  const TileLoader<T, kBlockK<T>, kM> load_values(p.values);
  const TileLoader<T, kBlockK<T>, kN> load_dense(p.dense);

  for (int64_t work_tile = blockIdx.x; work_tile < work_tiles; work_tile += gridDim.x) {
    const int first_column = work_tile % p.column_tiles * kN;
    const int first_row = work_tile / p.column_tiles % p.row_tiles * kM;
    const int64_t chunk_of_all = work_tile / p.column_tiles / p.row_tiles;
    const Chunk chunk(p.lists, chunk_of_all % chunks);
    const int given_head = chunk_of_all / chunks % heads_apart;
    const int64_t batch = chunk_of_all / chunks / heads_apart;
    const int64_t first_value = p.layout_heads == 1 ? int64_t{given_head} * p.lists.entries : 0;
    __syncthreads();
    for (int i = chunk.first_entry + threadIdx.x; i < chunk.entry_after; i += kThreads) {
      memory.listed[i - chunk.first_entry] = p.indices[i];
      memory.slots[i - chunk.first_entry] = p.slots == nullptr ? i : p.slots[i];
    }
    __syncthreads();

    const T* values = p.values_data + ((batch * p.values_of_batch + first_value) << 2 * p.log_block);
    const T* dense = nullptr;  // of the head that is loaded
    const auto load = [&](const Walk& walk, auto& stage) {
      if (walk.list_begins()) {
        dense = p.dense.of(batch, p.layout_heads == 1 ? given_head : walk.list / p.rows);
      }
      const int32_t* listed = memory.listed + (walk.begin - chunk.first_entry);
      const int32_t* slots = memory.slots + (walk.begin - chunk.first_entry);
      load_values(stage.values, values, walk.token, walk.tokens, first_row, [&](int entry) { return slots[entry]; });
      load_dense(stage.dense, dense, walk.token, walk.tokens, first_column, [&](int entry) { return listed[entry]; });
    };
    const auto store_split = [&](const Walk& walk, const Tile& sums) {
      Compute<T>* to = p.splits.at(chunk_of_all, walk.split, block, p.dense.width);
      sums.for_each_pair([&](int row, int column, Compute<T> first, Compute<T> second) {
        row += first_row + Tile::first_row();
        const int64_t at = first_column + Tile::first_column() + column;
        if (row < block && at < p.dense.width) {
          to[row * p.dense.width + at] = first;
          if (at + 1 < p.dense.width) {
            to[row * p.dense.width + at + 1] = second;
          }
        }
      });
    };
    // Through shared memory, so that runs of 16 bytes are written. Other warps may still read `tile`.
    const auto store_result = [&](const Walk& walk, const Tile& sums, T* tile) {
      const bool transposed = p.result.transposed;
      const int pitch = pitch_of<T>(transposed ? kM : kN);
      __syncthreads();
      sums.for_each_pair([&](int row, int column, Compute<T> first, Compute<T> second) {
        row += Tile::first_row();
        column += Tile::first_column();
        if (transposed) {
          tile[column * pitch + row] = static_cast<T>(first);
          tile[(column + 1) * pitch + row] = static_cast<T>(second);
        } else {
          store_pair(tile + row * pitch + column, first, second);
        }
      });
      __syncthreads();
      const int64_t head = p.layout_heads == 1 ? given_head : walk.list / p.rows;
      const int64_t first_token = walk.list % p.rows * block + first_row;
      const int rows = min(kM, block);
      const auto copy = [&](auto runs_, int lines) {
        constexpr int runs = runs_;
        for (int i = threadIdx.x; i < lines * runs; i += kThreads) {
          const int line = i / runs, element = i % runs * kRun<T>;
          const int row = transposed ? element : line, column = transposed ? line : element;
          const T* from = tile + line * pitch + element;
          T* to = p.result.at(batch * p.heads + head, first_token + row, first_column + column);
          if (transposed ? row < rows
                         : first_column + column + kRun<T> <= p.dense.width && p.dense.width % kRun<T> == 0) {
            store_run(to, *reinterpret_cast<const Run<T, kRun<T>>*>(from));
          } else if (!transposed) {
            for (int e = 0; e < kRun<T> && first_column + column + e < p.dense.width; ++e) {
              to[e] = from[e];
            }
          }
        }
      };
      if (transposed) {
        copy(
            std::integral_constant<int, kM / kRun<T>>{},
            static_cast<int>(min(int64_t{kN}, p.dense.width - first_column)));
      } else {
        copy(std::integral_constant<int, kN / kRun<T>>{}, rows);
      }
    };

    Walk ahead(p.lists, chunk, p.log_block), walk = ahead;
    Tile sums;
    sums.clear();
    const auto load_next = [&](int stage) {
      if (ahead.valid()) {
        load(ahead, memory.stages[stage]);
        ahead.next(p.lists, chunk, p.log_block, kBlockK<T>, 1);
      }
      end_of_copies();
    };
    for (int stage = 0; stage < kStages - 1; ++stage) {
      load_next(stage);
    }
    for (int stage = 0, free = kStages - 1; walk.valid(); free = stage, stage = stage + 1 < kStages ? stage + 1 : 0) {
      wait_for_copies<kStages - 2>();
      __syncthreads();
      load_next(free);
      auto& tiles = memory.stages[stage];
      sums.add(tiles.values, p.values.token_inner, tiles.dense, p.dense.token_inner);
      if (walk.list_ends(kBlockK<T>, 1)) {
        if (walk.split == kWhole) {
          store_result(walk, sums, tiles.values);
        } else {
          store_split(walk, sums);
        }
        sums.clear();
      }
      walk.next(p.lists, chunk, p.log_block, kBlockK<T>, 1);
    }
  }
}

constexpr int kAddedTogether = CombineTuning::kAddedTogether;

template <class T>
struct alignas(16) AddedTogether {
  Compute<T> number[kAddedTogether];
};

// Adds `count` splits, first split first; at(split) is where its numbers begin, or null where it has none. Several
// splits are on their way at once.
template <class T, class F>
__device__ __forceinline__ AddedTogether<T> sum_of_splits(int64_t count, const F& at) {
  constexpr int kAtOnce = CombineTuning::kSplitsAtOnce;
  AddedTogether<T> sums{};
  for (int64_t first = 0; first < count; first += kAtOnce) {
    const Compute<T>* from[kAtOnce];
    AddedTogether<T> next[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      // The last split again rather than none: what at reads is asked for without a branch.
      const Compute<T>* split = at(min(first + i, count - 1));
      from[i] = first + i < count ? split : nullptr;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      next[i] = from[i] == nullptr ? AddedTogether<T>{} : *reinterpret_cast<const AddedTogether<T>*>(from[i]);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (int e = 0; e < kAddedTogether; ++e) {
        sums.number[e] += next[i].number[e];
      }
    }
  }
  return sums;
}

// Numbers that a thread block of combine_splits_kernel makes.
constexpr int kAddedAtOnce = CombineTuning::kRounds * kAddedTogether * kThreads;

// Combines the splits of the list that starts in each chunk and goes on after it, first split first.
template <class T>
__global__ void __launch_bounds__(kThreads) combine_splits_kernel(const __grid_constant__ Product<T> p) {
  const int chunks = p.lists.chunks();
  const int64_t block = int64_t{1} << p.log_block, width = p.result.width;
  const int64_t shares = (block * width + kAddedAtOnce - 1) / kAddedAtOnce;
  for (int64_t work_tile = blockIdx.x; work_tile < p.chunks_of_all() * shares; work_tile += gridDim.x) {
    const int64_t chunk_of_all = work_tile / shares, share = work_tile % shares;
    const Chunk chunk(p.lists, chunk_of_all % chunks);
    if (!chunk.last_is_long(p.lists)) {
      continue;
    }
    const int list = chunk.list_after - 1;
    const int64_t more = (p.lists.offsets[list + 1] - 1) / p.lists.chunk_size - chunk_of_all % chunks;
    const int64_t head = p.layout_heads == 1 ? chunk_of_all / chunks % p.heads : list / p.rows;
    const int64_t batch = chunk_of_all / chunks / p.heads_apart();
    const int64_t end = min(block * width, (share + 1) * kAddedAtOnce);
    for (int64_t i = share * kAddedAtOnce + threadIdx.x * kAddedTogether; i < end; i += kThreads * kAddedTogether) {
      const auto sums = sum_of_splits<T>(more + 1, [&](int64_t split) {
        return p.splits.at(chunk_of_all + split, split == 0 ? kStarted : kContinued, block, width) + i;
      });
#pragma unroll
      for (int e = 0; e < kAddedTogether; ++e) {
        const int64_t place = i + e;
        *p.result.at(batch * p.heads + head, list % p.rows * block + place / width, place % width) =
            static_cast<T>(sums.number[e]);
      }
    }
  }
}

// Thread blocks that add up the splits of a tile; the width is a multiple of 8.
__host__ __device__ inline int shares_of_tile(int64_t width) {
  static_assert(kProductTile * 8 % (kAddedTogether * kThreads) == 0);
  return static_cast<int>(kProductTile * width / (kAddedTogether * kThreads));
}

// Combines the splits of tiles' lists. Begins while they are being made.
template <class T>
__global__ void __launch_bounds__(kThreads) combine_tile_splits_kernel(const __grid_constant__ TileProduct<T> p) {
  const int width = static_cast<int>(p.result.width), shares = shares_of_tile(width);
  for (int i = blockIdx.x; i < p.lists.copies * p.num_cuts * shares; i += gridDim.x) {
    const int place = i % shares * kThreads + static_cast<int>(threadIdx.x);
    int row = place * kAddedTogether / width, column = place * kAddedTogether % width;
    if (p.result.transposed) {
      // A warp has 8 columns of a warp tile: of splits and of the result whole sectors of 32 bytes.
      const int columns = place / 32 * 8, lane = place % 32;
      row = columns / width * kWarpTileRows + lane / 2;
      column = columns % width + lane % 2 * kAddedTogether;
    }
    const int32_t* cut = p.cuts + i / shares % p.num_cuts * 3;
    const int copy = i / shares / p.num_cuts;
    const ProductWorkTile work_tile(p.lists, copy * p.lists.num_work_tiles, int4{cut[0], 0, 0, cut[1]});
    const int block_row = p.lists.block_rows[work_tile.tile * p.lists.block_rows_per_tile + row / p.block];
    wait_for_previous();
    if (block_row < 0) {
      continue;
    }
    const int first_split = p.split_of_all(work_tile);
    const int32_t* has_warp_tile = p.warp_tile_of_split(first_split, row);
    const float* numbers = p.split(first_split, row) + column;
    const auto sums = sum_of_splits<T>(cut[2], [&](int64_t split) {
      return has_warp_tile[split * (kProductTile / kWarpTileRows)] == 0 ? nullptr
                                                                        : numbers + split * kProductTile * width;
    });
#pragma unroll
    for (int e = 0; e < kAddedTogether; ++e) {
      *p.result.at(
          int64_t{work_tile.batch} * p.lists.heads + work_tile.head, block_row * p.block + row % p.block, column + e) =
          static_cast<T>(sums.number[e]);
    }
  }
}

template <class T>
void dsd_of_tiles(
    const Launcher& launch, const ProductTileLists& lists, const Tensor& cuts, const Tensor& values,
    const Tensor& dense, const Tensor& out, int64_t block, bool transposed, bool transpose_result) {
  const int64_t tokens = out.size(transpose_result ? 3 : 2), width = dense.size(3);
  // Each tile whose list is not split has one work tile.
  const int64_t tiles = int64_t{lists.tiles_per_head} * lists.layout_heads;
  const int64_t num_splits = lists.num_work_tiles - tiles + cuts.size(0);
  TileProduct<T> product{
      lists,
      {static_cast<T*>(out.mutable_data_ptr()), tokens, width, transpose_result},
      static_cast<int>(block),
      nullptr,
      nullptr,
      static_cast<int>(num_splits),
      cuts.const_data_ptr<int32_t>(),
      static_cast<int>(cuts.size(0))};
  std::optional<Tensor> splits, has_warp_tile;
  if (num_splits > 0) {
    splits = empty_on(dense, {lists.copies, num_splits, kProductTile, width}, ScalarType::Float);
    has_warp_tile = empty_on(dense, {lists.copies, num_splits, kProductTile / kWarpTileRows}, ScalarType::Int);
    product.splits = splits->mutable_data_ptr<float>();
    product.has_warp_tile = has_warp_tile->mutable_data_ptr<int32_t>();
  }
  if (block < 64) {
    dsd_of_small_blocks(launch, product, values, dense, out, transposed);
  } else {
    dsd_of_large_blocks(launch, product, values, dense, out, transposed);
  }
  launch.beside_previous(
      combine_tile_splits_kernel<T>, lists.copies * cuts.size(0) * shares_of_tile(width), kThreads, product);
}

Tensor matmul_dsd(
    const Tensor& values, const Tensor& dense, const Tensor& offsets, const Tensor& indices,
    const std::optional<Tensor>& slots, const std::optional<Tensor>& tile_lines,
    const std::optional<Tensor>& tile_entries, const std::optional<Tensor>& tile_units,
    const std::optional<Tensor>& tile_cuts, const std::optional<Tensor>& tile_slots, int64_t layout_heads,
    int64_t block, bool transpose_result, bool allow_tf32, const std::string& implementation) {
  check_dsd(values, dense, offsets, indices, slots, layout_heads, block);
  const ProductTiles tiles{kProductTile, tile_lines, tile_entries, tile_units, tile_slots, &tile_cuts};
  check_product_tiles(tiles, offsets, values, layout_heads, block);
  const int64_t batch = dense.size(0), heads = dense.size(1), width = dense.size(3);
  const int64_t live = indices.size(0), lines = offsets.size(0) - 1, tokens = lines / layout_heads * block;
  Tensor out = empty_on(dense, {batch, heads, transpose_result ? width : tokens, transpose_result ? tokens : width});
  if (out.numel() == 0) {
    return out;
  }
  const Launcher launch(dense);
  if (is_for_hopper(launch, implementation)) {
    check(tiles.given(), "implementation is \"hopper\", which needs tile_...");
    check(
        values.element_size() == 2 && width <= 128 && width % 8 == 0 && values.numel() > 0,
        "implementation is \"hopper\", which is for fp16 and bf16 and up to 128 numbers a token, a multiple of 8.");
    const ProductTileLists lists(tiles, layout_heads, heads, batch, block, live);
    const auto run = [&](auto zero) {
      dsd_of_tiles<decltype(zero)>(
          launch, lists, *tile_cuts, values, dense, out, block, slots.has_value(), transpose_result);
    };
    values.scalar_type() == ScalarType::Half ? run(__half{}) : run(__nv_bfloat16{});
    return out;
  }
  with_types(values, allow_tf32, [&](auto zero, auto fast) {
    using T = decltype(zero);
    constexpr bool kFast = decltype(fast)::value;
    const auto run = [&](auto height, auto tile_width) {
      constexpr int kM = decltype(height)::value, kN = decltype(tile_width)::value;
      const int column_tiles = static_cast<int>((width + kN - 1) / kN);
      const int row_tiles = static_cast<int>(block > kM ? block / kM : 1);
      const bool transposed = slots.has_value();
      const int size =
          chunk_size_of(live * batch * heads / layout_heads, block, row_tiles * column_tiles, launch.multiprocessors());
      Product<T> product{
          {static_cast<T*>(out.mutable_data_ptr()), tokens, width, transpose_result},
          {},
          {offsets.const_data_ptr<int32_t>(), static_cast<int>(lines), static_cast<int>(live), size},
          indices.const_data_ptr<int32_t>(),
          transposed ? slots->const_data_ptr<int32_t>() : nullptr,
          static_cast<int>(layout_heads),
          static_cast<int>(heads),
          static_cast<int>(lines / layout_heads),
          values.size(1),
          batch,
          log2_of(block)};
      const int64_t chunks = product.chunks_of_all();
      // A list has at most one entry for each block of the other dimension.
      const bool may_split = dense.size(2) / block > size;
      std::optional<Tensor> splits;
      if (may_split) {
        constexpr auto dtype = std::is_same_v<T, double> ? ScalarType::Double : ScalarType::Float;
        splits = empty_on(dense, {chunks, 2, block, width}, dtype);
        product.splits.data = static_cast<Compute<T>*>(splits->mutable_data_ptr());
      }
      const Arguments<T> arguments{
          product,
          static_cast<const T*>(values.const_data_ptr()),
          Operand<T>(
              block, block * block, transposed ? block : 1, transposed ? 1 : block, block,
              reinterpret_cast<uintptr_t>(values.const_data_ptr()) % 16 == 0),
          Dense<T>(dense, block, false),
          row_tiles,
          column_tiles};
      static_assert(sizeof(Memory<T, kM, kN>) <= kPortableMemory);
      launch.with_shared_memory(
          matmul_dsd_kernel<T, kM, kN, kFast>, chunks * row_tiles * column_tiles, kThreads, sizeof(Memory<T, kM, kN>),
          arguments);
      if (may_split) {
        launch(
            combine_splits_kernel<T>, chunks * ((block * width + kAddedAtOnce - 1) / kAddedAtOnce), kThreads, product);
      }
    };
    with_tile_height<T>(block, [&](auto height) {
      if constexpr (sizeof(T) == 2) {
        if (width > 64) {
          return run(height, std::integral_constant<int, 128>{});
        }
      }
      run(height, std::integral_constant<int, 64>{});
    });
  });
  return out;
}

}  // namespace
}  // namespace ds_sparse

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CUDA, m) { m.impl("matmul_dsd", TORCH_BOX(&ds_sparse::matmul_dsd)); }
