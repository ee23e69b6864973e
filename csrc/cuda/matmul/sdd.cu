// Dense @ dense on the live blocks. Schema and shapes: csrc/library.cpp; meaning: ds_sparse/reference.py.
//
// A thread block takes a chunk of the live blocks (chunks.h), in row order. A tile is part of one block row times the
// columns of up to 64 tokens, gathered from as many of its live blocks as that takes; the rows stay in shared memory
// while the columns pass.

#include <torch/csrc/stable/library.h>

#include <optional>
#include <type_traits>

#include "../../checks.h"
#include "../common/gemm_tile.h"
#include "../common/launch.h"
#include "chunks.h"
#include "sdd.h"

namespace ds_sparse {
namespace {

constexpr int kTokens = SddTuning::kTokens;  // columns of a tile

template <class T>
struct Arguments {
  Dense<T> a, b;
  T* out;
  BlockLists lists;
  const int32_t* columns;
  int layout_heads, heads, rows;
  int64_t values, batch;
  int log_block, row_tiles, k_blocks;
};

template <class T, int kM, bool kFast>
struct Memory {
  using Tile = Sums<T, kM, kTokens, kFast>;
  static constexpr int kPitch = Tile::kColumns + kRun<T>;
  using RowTile = T[tile_elements<T>(kM, kBlockK<T>)];

  T columns[kStages][tile_elements<T>(kTokens, kBlockK<T>)];
  T result[kThreads / 32][Tile::kRows * kPitch];
  int32_t listed[kMostListed];
  // Followed by row tiles: of rows that stay as many as the steps ahead may reach.
  __device__ RowTile* rows() { return reinterpret_cast<RowTile*>(this + 1); }
  static constexpr size_t bytes(int k_blocks) {
    return sizeof(Memory) + kStages * (k_blocks <= SddTuning::kKBlocksThatStay ? k_blocks : 1) * sizeof(RowTile);
  }
};

template <class T, int kM, bool kFast>
__global__ void __launch_bounds__(kThreads, SddTuning::kThreadBlocks)
    matmul_sdd_kernel(const __grid_constant__ Arguments<T> p) {
  extern __shared__ __align__(16) unsigned char shared[];
  using Tile = Sums<T, kM, kTokens, kFast>;
  auto& memory = *reinterpret_cast<Memory<T, kM, kFast>*>(shared);
  const int block = 1 << p.log_block, k_blocks = p.k_blocks, chunks = p.lists.chunks();
  const bool rows_stay = k_blocks <= SddTuning::kKBlocksThatStay;
  const int64_t heads_apart = p.layout_heads == 1 ? p.heads : 1;
  const int64_t work_tiles = p.batch * heads_apart * chunks * p.row_tiles;
  constexpr int pitch = Memory<T, kM, kFast>::kPitch;
  T* result = memory.result[threadIdx.x / 32];
  const TileLoader<T, kM, kBlockK<T>> load_rows(p.a);
  const TileLoader<T, kTokens, kBlockK<T>> load_columns(p.b);

  for (int64_t work_tile = blockIdx.x; work_tile < work_tiles; work_tile += gridDim.x) {
    const int first_row = work_tile % p.row_tiles * kM;
    const Chunk chunk(p.lists, work_tile / p.row_tiles % chunks);
    const int given_head = work_tile / p.row_tiles / chunks % heads_apart;
    const int64_t batch = work_tile / p.row_tiles / chunks / heads_apart;
    __syncthreads();
    for (int i = chunk.first_entry + threadIdx.x; i < chunk.entry_after; i += kThreads) {
      memory.listed[i - chunk.first_entry] = p.columns[i];
    }
    __syncthreads();

    const auto row_tile = [&](const Walk& walk, int stage) -> T* {
      return memory.rows()[rows_stay ? walk.number % kStages * k_blocks + walk.k_block : stage];
    };
    const T *a = nullptr, *b = nullptr;  // of the head that is loaded
    const auto load = [&](const Walk& walk, int stage) {
      if (walk.list_begins()) {
        const int head = p.layout_heads == 1 ? given_head : walk.list / p.rows;
        a = p.a.of(batch, head);
        b = p.b.of(batch, head);
      }
      const int depth = walk.k_block * kBlockK<T>;
      if (!rows_stay || walk.token == 0) {
        const int row = walk.list % p.rows;
        load_rows(row_tile(walk, stage), a, first_row, block, depth, [&](int) { return row; });
      }
      const int32_t* listed = memory.listed + (walk.begin - chunk.first_entry);
      load_columns(memory.columns[stage], b, walk.token, walk.tokens, depth, [&](int entry) { return listed[entry]; });
    };
    const auto store = [&](const Walk& walk, const Tile& sums) {
      sums.for_each_pair([&](int row, int column, Compute<T> first, Compute<T> second) {
        store_pair(result + row * pitch + column, first, second);
      });
      __syncwarp();
      const int64_t head = p.layout_heads == 1 ? given_head : 0;
      T* to = p.out + ((batch * p.values + head * p.lists.entries + walk.begin) << 2 * p.log_block);
      constexpr int runs = Tile::kColumns / kRun<T>;
      const int first_line = Tile::lane() / runs, column = Tile::lane() % runs * kRun<T>;
      const int token = walk.token + Tile::first_column() + column;
      to += (int64_t{token >> p.log_block} << 2 * p.log_block) + (token & (block - 1));
#pragma unroll
      for (int i = 0; i < Tile::kRows * runs / 32; ++i) {
        const int row = first_line + i * (32 / runs), row_of_block = first_row + Tile::first_row() + row;
        if (token < walk.tokens && row_of_block < block) {
          store_run(
              to + (row_of_block << p.log_block),
              *reinterpret_cast<const Run<T, kRun<T>>*>(result + row * pitch + column));
        }
      }
      __syncwarp();
    };

    Walk ahead(p.lists, chunk, p.log_block), walk = ahead;
    Tile sums;
    sums.clear();
    const auto load_next = [&](int stage) {
      if (ahead.valid()) {
        load(ahead, stage);
        ahead.next(p.lists, chunk, p.log_block, kTokens, k_blocks);
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
      sums.add(row_tile(walk, stage), !p.a.token_inner, memory.columns[stage], !p.b.token_inner);
      if (walk.k_block + 1 == k_blocks) {
        store(walk, sums);
        sums.clear();
      }
      walk.next(p.lists, chunk, p.log_block, kTokens, k_blocks);
    }
  }
}

Tensor matmul_sdd(
    const Tensor& a, const Tensor& b, const Tensor& row_offsets, const Tensor& columns,
    const std::optional<Tensor>& tile_lines, const std::optional<Tensor>& tile_entries,
    const std::optional<Tensor>& tile_units, const std::optional<Tensor>& tile_slots, int64_t layout_heads,
    int64_t block, bool allow_tf32, const std::string& implementation) {
  check_sdd(a, b, row_offsets, columns, layout_heads, block);
  const ProductTiles tiles{sdd_tile(block), tile_lines, tile_entries, tile_units, tile_slots};
  check_product_tiles(tiles, row_offsets, a, layout_heads, block);
  const int64_t batch = a.size(0), heads = a.size(1), live = columns.size(0);
  Tensor out = empty_on(a, {batch, live * heads / layout_heads, block, block});
  if (out.numel() == 0) {
    return out;
  }
  const Launcher launch(a);
  if (is_for_hopper(launch, implementation)) {
    check(tiles.given(), "implementation is \"hopper\", which needs tile_...");
    sdd_on_hopper(launch, a, b, out, ProductTileLists(tiles, layout_heads, heads, batch, block, live), block);
    return out;
  }
  with_types(a, allow_tf32, [&](auto zero, auto fast) {
    with_tile_height<decltype(zero)>(block, [&](auto height) {
      using T = decltype(zero);
      constexpr int kM = decltype(height)::value;
      const int row_tiles = static_cast<int>(block > kM ? block / kM : 1);
      const int k_blocks = static_cast<int>(std::max<int64_t>(1, (a.size(3) + kBlockK<T> - 1) / kBlockK<T>));
      const BlockLists lists{
          row_offsets.const_data_ptr<int32_t>(), static_cast<int>(row_offsets.size(0) - 1), static_cast<int>(live),
          chunk_size_of(live * batch * heads / layout_heads, block, row_tiles, launch.multiprocessors())};
      const Arguments<T> arguments{
          Dense<T>(a, block, false),
          Dense<T>(b, block, true),
          static_cast<T*>(out.mutable_data_ptr()),
          lists,
          columns.const_data_ptr<int32_t>(),
          static_cast<int>(layout_heads),
          static_cast<int>(heads),
          static_cast<int>(lists.num_lists / layout_heads),
          out.size(1),
          batch,
          log2_of(block),
          row_tiles,
          k_blocks};
      const int64_t work_tiles = batch * (layout_heads == 1 ? heads : 1) * lists.chunks() * row_tiles;
      constexpr bool kFast = decltype(fast)::value;
      static_assert(Memory<T, kM, kFast>::bytes(2) <= kPortableMemory);
      launch.with_shared_memory(
          matmul_sdd_kernel<T, kM, kFast>, work_tiles, kThreads, Memory<T, kM, kFast>::bytes(k_blocks), arguments);
    });
  });
  return out;
}

}  // namespace
}  // namespace ds_sparse

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CUDA, m) { m.impl("matmul_sdd", TORCH_BOX(&ds_sparse::matmul_sdd)); }
