// The largest product of each query with a key of each block that it sees: what `score="max"` goes by. Of the products
// nothing else is stored. Schema: csrc/library.cpp.
//
// A thread block has 128 queries of a head (64 of large ones), in registers, and walks the keys that any of them sees,
// 64 a step, by cp.async and mma.sync. Blocks end where eight keys do, so that a product of 16 queries and 8 keys is of
// one block. The four lanes of a row keep the maxima of four blocks, one each, and store them together.

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "../../checks.h"
#include "../common/copies.h"
#include "../common/launch.h"
#include "../common/swizzle.h"
#include "tuning.h"

namespace ds_sparse::selection {
namespace {

using Tuning = MaximaTuning;
constexpr int kThreadsOfMaxima = Tuning::kWarps * 32, kKeys = Tuning::kKeys, kStages = Tuning::kStages;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kRunsOfLine = kLineBytes / 16, kPanelNumbers = kLineBytes / 2;

template <class T>
struct Operand {
  const T* data;
  int64_t batch, head, token;  // strides

  explicit Operand(const Tensor& x)
      : data(static_cast<const T*>(x.const_data_ptr())), batch(x.stride(0)), head(x.stride(1)), token(x.stride(2)) {}
};

template <class T>
struct Products {
  Operand<T> query, key;
  const bool* keep;
  const int64_t* positions;
  const int32_t* ranges;
  float* out;
  int64_t keep_apart, positions_apart;  // from sequence to sequence; 0: one for all
  int64_t offset;
  int sequences, heads, heads_of_key, rows, keys, columns, depth, block, blocks_in_ranges;
  int tiles, parts, columns_of_part;
  bool causal;
};

template <int kPanels>
struct Memory {
  static constexpr int kSixteens = Tuning::sixteens(kPanels), kRowsOfWarp = 16 * kSixteens;
  static constexpr int kRows = Tuning::kWarps * kRowsOfWarp;
  static constexpr int kStageBytes = kPanels * kKeys * kLineBytes;
  static_assert(kPanels * kRows * kLineBytes <= kStages * kStageBytes);

  unsigned char stages[kStages * kStageBytes];  // the queries, before they are in registers
  int ends[Tuning::kWarps][2];
};

// NaN where one is.
__device__ __forceinline__ float larger(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// Starts copies of kLines tokens of a head, from `first` on, into panels; beyond `tokens` and `depth` are zeros.
template <class T, int kLines, int kPanels>
__device__ __forceinline__ void copy_lines(
    uint32_t to, const T* from, int64_t apart, int first, int tokens, int depth) {
  constexpr int kRuns = kPanels * kRunsOfLine;
  static_assert(kLines * kRuns % kThreadsOfMaxima == 0);
#pragma unroll
  for (int i = 0; i < kLines * kRuns / kThreadsOfMaxima; ++i) {
    const int number = i * kThreadsOfMaxima + threadIdx.x, line = number / kRuns, run = number % kRuns;
    const int token = first + line;
    const bool exists = token < tokens && run * 8 < depth;
    start_copy<16>(
        to + run / kRunsOfLine * (kLines * kLineBytes) + swizzled(line, run % kRunsOfLine),
        exists ? from + token * apart + run * 8 : from, exists ? 16 : 0);
  }
}

template <class T, int kPanels>
__global__ void __launch_bounds__(kThreadsOfMaxima, Tuning::thread_blocks(kPanels))
    maxima_kernel(const __grid_constant__ Products<T> p) {
  extern __shared__ __align__(128) unsigned char shared[];
  using M = Memory<kPanels>;
  using Fragments = LineFragments<T, 2>;
  using Mma = Mma<T>;
  constexpr int kSixteens = M::kSixteens, kDepth = kPanels * kPanelNumbers / Mma::kDepth, kEights = kKeys / 8;
  auto& memory = *reinterpret_cast<M*>(shared);
  const uint32_t stages = shared_address(memory.stages);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  // The longest tiles first, where queries are causal.
  const int number = blockIdx.x, part = number % p.parts, of_heads = number / p.parts % (p.sequences * p.heads);
  const int first_row = (p.tiles - 1 - number / p.parts / (p.sequences * p.heads)) * M::kRows;
  const int sequence = of_heads / p.heads, head = of_heads % p.heads;
  const int columns_begin = part * p.columns_of_part, columns_end = min(p.columns, columns_begin + p.columns_of_part);

  copy_lines<T, M::kRows, kPanels>(
      stages, p.query.data + sequence * p.query.batch + head * p.query.head, p.query.token, first_row, p.rows, p.depth);
  end_of_copies();

  // The last key that each of the lane's rows sees, and of the warp's and all rows the keys that any of them sees.
  int last_key[kSixteens][2];
  int begin = p.keys, end = 0, all_see = p.keys;
#pragma unroll
  for (int i = 0; i < kSixteens; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + warp * M::kRowsOfWarp + i * 16 + half * 8 + lane / 4;
      last_key[i][half] = -1;
      if (row < p.rows) {
        int64_t position = p.offset + row;
        if (p.positions != nullptr) {
          position = p.positions[sequence * p.positions_apart + row];
        }
        int64_t first = 0, last = p.causal ? min(position, int64_t{p.keys} - 1) : p.keys - 1;
        if (p.ranges != nullptr) {
          const int64_t own = position / p.block;
          const bool exists = position >= 0 && own < p.blocks_in_ranges;
          first = exists ? int64_t{p.ranges[2 * own]} * p.block : p.keys;
          last = min(last, exists ? int64_t{p.ranges[2 * own + 1]} * p.block - 1 : -1);
        }
        last_key[i][half] = static_cast<int>(max(int64_t{-1}, last));
        begin = min(begin, static_cast<int>(max(int64_t{0}, min(int64_t{p.keys}, first))));
        end = max(end, last_key[i][half] + 1);
        all_see = min(all_see, last_key[i][half] + 1);
      }
    }
  }
  begin = __reduce_min_sync(kAllLanes, begin);
  end = __reduce_max_sync(kAllLanes, end);
  all_see = __reduce_min_sync(kAllLanes, all_see);
  const int warp_end = end;
  if (lane == 0) {
    memory.ends[warp][0] = begin;
    memory.ends[warp][1] = end;
  }
  wait_for_copies<0>();
  __syncthreads();
#pragma unroll
  for (int other = 0; other < Tuning::kWarps; ++other) {
    begin = min(begin, memory.ends[other][0]);
    end = max(end, memory.ends[other][1]);
  }
  begin = max(begin, columns_begin * p.block);
  end = min(end, columns_end * p.block);

  typename Mma::FragmentA rows[kSixteens][kDepth];
#pragma unroll
  for (int i = 0; i < kSixteens; ++i) {
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      Fragments::read_a(
          rows[i][k], stages + Fragments::place_of_a(lane) + k / 4 * (M::kRows * kLineBytes),
          warp * M::kRowsOfWarp + i * 16, k % 4 * 2);
    }
  }
  __syncthreads();

  const T* keys = p.key.data + sequence * p.key.batch + head / p.heads_of_key * p.key.head;
  const bool* keep = p.keep == nullptr ? nullptr : p.keep + sequence * p.keep_apart;
  float* out = p.out + (int64_t{of_heads} * p.rows + first_row) * p.columns;
  const int steps = begin < end ? (end - begin + kKeys - 1) / kKeys : 0, depth = (p.depth + 15) / 16;
  const auto load = [&](int step, int stage) {
    if (step < steps) {
      copy_lines<T, kKeys, kPanels>(
          stages + stage * M::kStageBytes, keys, p.key.token, begin + step * kKeys, p.keys, p.depth);
    }
    end_of_copies();
  };
  for (int step = 0; step < kStages - 1; ++step) {
    load(step, step);
  }
  const int first_column = steps > 0 ? begin / p.block : columns_begin;
  int column = first_column, left = p.block;  // keys of the block that are still to come
  float largest[kSixteens][2], kept[kSixteens][2];
#pragma unroll
  for (int i = 0; i < kSixteens; ++i) {
    largest[i][0] = largest[i][1] = kept[i][0] = kept[i][1] = -INFINITY;
  }
  for (int step = 0, stage = 0; step < steps; ++step, stage = stage + 1 < kStages ? stage + 1 : 0) {
    wait_for_copies<kStages - 2>();
    __syncthreads();
    load(step + kStages - 1, stage > 0 ? stage - 1 : kStages - 1);
    const int first_key = begin + step * kKeys;
    const uint32_t columns = stages + stage * M::kStageBytes + Fragments::place_of_b(lane);
    float sums[kSixteens][kEights][4] = {};
    if (first_key < warp_end) {
#pragma unroll
      for (int k = 0; k < kDepth; ++k) {
        if (k < depth) {
#pragma unroll
          for (int pair = 0; pair < kEights / 2; ++pair) {
            typename Mma::FragmentB of_keys;
            Fragments::read_b(of_keys, columns + k / 4 * (kKeys * kLineBytes), 2 * pair, k % 4 * 2);
#pragma unroll
            for (int i = 0; i < kSixteens; ++i) {
              Mma::template product<false>(sums[i][2 * pair], rows[i][k], of_keys, 0);
              Mma::template product<false>(sums[i][2 * pair + 1], rows[i][k], of_keys, 1);
            }
          }
        }
      }
    }
    if (first_key + kKeys > all_see || keep != nullptr) {
      unsigned hidden = 0;  // bit 2 n + j: the j-th of the lane's two keys in the n-th eight
      if (keep != nullptr) {
#pragma unroll
        for (int n = 0; n < 2 * kEights; ++n) {
          const int key = first_key + n / 2 * 8 + lane % 4 * 2 + n % 2;
          hidden |= static_cast<unsigned>(key >= p.keys || !keep[key]) << n;
        }
      }
#pragma unroll
      for (int i = 0; i < kSixteens; ++i) {
#pragma unroll
        for (int n = 0; n < kEights; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int key = first_key + n * 8 + lane % 4 * 2 + e % 2;
            const bool is_dead = key > last_key[i][e / 2] || (hidden >> (2 * n + e % 2) & 1) != 0;
            sums[i][n][e] = is_dead ? -INFINITY : sums[i][n][e];
          }
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
      const int key = first_key + n * 8;
      if (key < end) {
#pragma unroll
        for (int i = 0; i < kSixteens; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            largest[i][half] = larger(largest[i][half], larger(sums[i][n][2 * half], sums[i][n][2 * half + 1]));
          }
        }
        left -= 8;
        const bool is_last = key + 8 >= end;
        if (left == 0 || is_last) {
          const bool stores = column % 4 == 3 || is_last;
          const int mine = column / 4 * 4 + lane % 4;
#pragma unroll
          for (int i = 0; i < kSixteens; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              float of_row = largest[i][half];
              of_row = larger(of_row, __shfl_xor_sync(kAllLanes, of_row, 1));
              of_row = larger(of_row, __shfl_xor_sync(kAllLanes, of_row, 2));
              kept[i][half] = mine == column ? of_row : kept[i][half];
              largest[i][half] = -INFINITY;
              const int row = warp * M::kRowsOfWarp + i * 16 + half * 8 + lane / 4;
              if (stores && mine <= column && first_row + row < p.rows) {
                out[int64_t{row} * p.columns + mine] = kept[i][half];
              }
            }
          }
          ++column;
          left = p.block;
        }
      }
    }
  }
  // Blocks of which no row of the tile sees a key.
  for (int row = warp; row < M::kRows && first_row + row < p.rows; row += Tuning::kWarps) {
    float* of_row = out + int64_t{row} * p.columns;
    for (int i = columns_begin + lane; i < first_column; i += 32) {
      of_row[i] = -INFINITY;
    }
    for (int i = column + lane; i < columns_end; i += 32) {
      of_row[i] = -INFINITY;
    }
  }
}

void check_readable(const Tensor& x, const char* name) {
  bool readable = x.stride(3) == 1 && reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
  for (int dim = 0; dim < 3; ++dim) {
    readable = readable && (x.size(dim) == 1 || x.stride(dim) % 8 == 0);
  }
  check(readable, name, " has to have tokens that begin at multiples of 16 bytes, their numbers adjacent.");
}

Tensor block_maxima(
    const Tensor& query, const Tensor& key, const std::optional<Tensor>& keep, const std::optional<Tensor>& positions,
    const std::optional<Tensor>& ranges, int64_t offset, int64_t columns, int64_t block, bool causal) {
  check_dim(query, 4, "query");
  check_dim(key, 4, "key");
  check_like(key, query, "key");
  check_size(key, 0, query.size(0), "key");
  check_size(key, 3, query.size(3), "key");
  const int64_t batch = query.size(0), heads = query.size(1), rows = query.size(2), depth = query.size(3);
  check(
      query.scalar_type() == ScalarType::Half || query.scalar_type() == ScalarType::BFloat16,
      "query has to be fp16 or bf16.");
  check(depth >= 8 && depth <= 256 && depth % 8 == 0, "head sizes are multiples of 8 up to 256, got ", depth, ".");
  check(block >= 8 && block % 8 == 0, "block has to be a multiple of 8, got ", block, ".");
  check(
      key.size(1) > 0 ? heads % key.size(1) == 0 : heads == 0, "query has ", heads,
      " heads; they have to be a multiple of key's ", key.size(1), ".");
  check(columns >= 1 && product({columns, block}) < INT32_MAX - kKeys, "there may be up to 2^31 keys.");
  check(rows < INT32_MAX - 2 * kKeys, "there may be up to 2^31 queries.");
  check(offset >= 0 && offset <= INT64_MAX - rows, "offset has to be 0 or more, got ", offset, ".");
  check_readable(query, "query");
  check_readable(key, "key");
  const auto check_sequences = [&](const std::optional<Tensor>& x, int64_t size, ScalarType type, const char* name) {
    if (!x) {
      return;
    }
    check_dim(*x, 2, name);
    check(x->scalar_type() == type, name, " has another dtype than it has to have.");
    check(x->device() == query.device(), name, " has to be on the device of the other arguments.");
    check(x->size(0) == 1 || x->size(0) == batch, name, " has to be of one sequence, or of all.");
    check_size(*x, 1, size, name);
    check(x->stride(1) == 1 || size <= 1, name, " has to have the numbers of a sequence adjacent.");
  };
  check_sequences(keep, key.size(2), ScalarType::Bool, "keep");
  check_sequences(positions, rows, ScalarType::Long, "positions");
  if (ranges) {
    check_rows(*ranges, 2, query, "ranges");
  }
  Tensor out = empty_on(query, {batch, heads, rows, columns}, ScalarType::Float);
  if (out.numel() == 0) {
    return out;
  }
  const Launcher launch(query);
  const auto apart = [](const std::optional<Tensor>& x) { return !x || x->size(0) == 1 ? 0 : x->stride(0); };
  const auto run = [&](auto zero, auto panels) {
    using T = decltype(zero);
    using M = Memory<decltype(panels)::value>;
    static_assert(sizeof(M) <= kPortableMemory);
    const int64_t tiles = (rows + M::kRows - 1) / M::kRows;
    // Few tiles share their columns out, by fours, as these are stored.
    const int64_t at_once = Tuning::thread_blocks(decltype(panels)::value) * launch.multiprocessors();
    const int64_t wanted = std::max<int64_t>(1, 2 * at_once / product({tiles, batch, heads}));
    const int64_t least = (Tuning::kLeastKeys + block - 1) / block;
    const int64_t each = std::max(least, (columns + wanted - 1) / wanted);
    const int64_t columns_of_part = std::min((each + 3) / 4 * 4, (columns + 3) / 4 * 4);
    const int64_t parts = (columns + columns_of_part - 1) / columns_of_part;
    const int64_t thread_blocks = product({tiles, batch, heads, parts});
    check(thread_blocks <= INT32_MAX, "there are too many queries for one call.");
    const Products<T> products{
        Operand<T>(query),
        Operand<T>(key),
        keep ? static_cast<const bool*>(keep->const_data_ptr()) : nullptr,
        positions ? positions->const_data_ptr<int64_t>() : nullptr,
        ranges ? ranges->const_data_ptr<int32_t>() : nullptr,
        static_cast<float*>(out.mutable_data_ptr()),
        apart(keep),
        apart(positions),
        offset,
        static_cast<int>(batch),
        static_cast<int>(heads),
        static_cast<int>(heads / key.size(1)),
        static_cast<int>(rows),
        static_cast<int>(std::min(key.size(2), columns * block)),
        static_cast<int>(columns),
        static_cast<int>(depth),
        static_cast<int>(block),
        ranges ? static_cast<int>(ranges->size(0)) : 0,
        static_cast<int>(tiles),
        static_cast<int>(parts),
        static_cast<int>(columns_of_part),
        causal};
    launch.with_shared_memory(
        maxima_kernel<T, decltype(panels)::value>, thread_blocks, kThreadsOfMaxima, sizeof(M), products);
  };
  const auto with_depth = [&](auto zero) {
    if (depth <= 64) {
      run(zero, std::integral_constant<int, 1>{});
    } else if (depth <= 128) {
      run(zero, std::integral_constant<int, 2>{});
    } else {
      run(zero, std::integral_constant<int, 4>{});
    }
  };
  query.scalar_type() == ScalarType::Half ? with_depth(__half{}) : with_depth(__nv_bfloat16{});
  return out;
}

}  // namespace
}  // namespace ds_sparse::selection

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CUDA, m) {
  m.impl("block_maxima", TORCH_BOX(&ds_sparse::selection::block_maxima));
}
