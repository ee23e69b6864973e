// The blocks that rows of scores choose: those that are forced, by number, then the best of those that count. It is one
// kernel for what `Chooser` (ds_sparse/ops/block_selection.py) does on a CPU step by step. Schema: csrc/library.cpp.
//
// A warp has a row. A score is a rank, 32 bits in the order of scores: 0 where a block cannot be chosen, all ones where
// it is forced. Lane l has columns l, l + 32 and so on, in registers; of very many columns ranks are made anew in each
// pass. Few are chosen one by one, the largest rank of all lanes each time, and of equal ones the lowest column. For
// more of them the rank of the last one is found, bit by bit; those that are not below it are sorted.

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "../../checks.h"
#include "../common/launch.h"
#include "tuning.h"

namespace ds_sparse::selection {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr uint32_t kForced = 0xffffffffu;
constexpr int64_t kMostChosen = 4096;  // by a warp, whose list is then half of the lists' memory
constexpr int64_t kListBytes = 2 * kMostChosen * sizeof(uint64_t);
static_assert(kListBytes <= kPortableMemory);
constexpr int kLastPosition = INT32_MAX - 1;  // beyond all keys

struct Choice {
  const float* scores;
  const float* sizes;
  const bool* counts;
  const int64_t *first_key, *positions;
  const int32_t* ranges;
  int32_t* chosen;
  int64_t sizes_apart, counts_apart, first_key_apart, positions_apart;  // from sequence to sequence; 0: one for all
  int64_t first_position, last_position;
  int lines, groups, rows, columns, blocks_in_ranges, query_block, block, k, first, local;
  bool causal;
};

__device__ __forceinline__ int floor_div(int x, int y) { return x / y - (x % y < 0); }

__device__ __forceinline__ int as_position(int64_t x) {
  return static_cast<int>(max(int64_t{INT32_MIN / 2}, min(int64_t{kLastPosition}, x)));
}

// What a row's columns have in common, the same in all lanes.
struct Row {
  const float* scores;
  const float* sizes;
  const bool* counts;
  const int64_t* first_key;
  int begin, end;              // columns that there may be
  int forced_end;              // those before it are forced, and
  int local_begin, local_end;  // these
  int whole_end;               // from here on none counts
  int last_key;
  float queries;

  __device__ __forceinline__ Row(const Choice& p, int line) {
    const int of_groups = line / p.rows, row = line % p.rows, sequence = of_groups / p.groups;
    int first, last;
    if (p.positions != nullptr) {
      first = last = as_position(p.positions[sequence * p.positions_apart + row]);
    } else {
      const int64_t position = p.first_position + int64_t{row} * p.query_block;
      first = as_position(position);
      last = as_position(min(position + p.query_block - 1, p.last_position));
    }
    const int own = floor_div(first, p.block), last_block = last == first ? own : floor_div(last, p.block);
    scores = p.scores + int64_t{line} * p.columns;
    sizes = p.sizes == nullptr ? nullptr : p.sizes + sequence * p.sizes_apart;
    counts = p.counts == nullptr ? nullptr : p.counts + sequence * p.counts_apart + int64_t{row} * p.columns;
    first_key = p.first_key == nullptr ? nullptr : p.first_key + sequence * p.first_key_apart;
    begin = 0;
    end = p.columns;
    if (p.ranges != nullptr) {
      const bool exists = own >= 0 && own < p.blocks_in_ranges;
      begin = exists ? max(0, p.ranges[2 * own]) : 0;
      end = exists ? min(end, p.ranges[2 * own + 1]) : 0;
    }
    if (p.causal) {
      end = min(end, last_block + 1);
    }
    forced_end = begin + p.first;
    local_begin = own - p.local + 1;
    local_end = p.local == 0 ? local_begin : last_block + (p.causal ? 1 : p.local);
    // Its own block is whole where the first query is at its last key.
    whole_end = sizes != nullptr && p.causal ? own + (first - own * p.block == p.block - 1) : p.columns;
    last_key = p.causal ? last : kLastPosition;
    queries = static_cast<float>(last - first + 1);
  }

  // 0 of a column whose score does not matter.
  __device__ __forceinline__ float score(int column) const {
    return column >= begin && column < min(end, whole_end) ? scores[column] : 0.0f;
  }
  __device__ __forceinline__ float of_mean(const Choice& p, int column, float score) const {
    const float size = column < end ? sizes[column] : 1.0f;
    return (p.query_block > 1 ? score / queries : score) / size;
  }
  __device__ __forceinline__ uint32_t rank(const Choice& p, int column, float score) const {
    if (column < begin || column >= end || (first_key != nullptr && first_key[column] > last_key)) {
      return 0;
    }
    if (column < forced_end || (column >= local_begin && column < local_end)) {
      return kForced;
    }
    if (column >= whole_end || (counts != nullptr && !counts[column])) {
      return 0;
    }
    score = score != score ? INFINITY : score + 0.0f;  // -0 becomes 0
    const uint32_t bits = __float_as_uint(score);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
  }
};

// The ranks of a lane, in the order of columns.
template <int kOfLane>
struct Ranks {
  static constexpr int kBits = kBitsInRegisters;
  uint32_t of[kOfLane];

  __device__ __forceinline__ Ranks(const Choice& p, const Row& row, int lane) {
    // Loop by loop, so that all loads are under way together.
    float scores[kOfLane];
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      scores[i] = row.score(lane + 32 * i);
    }
    if (row.sizes != nullptr) {
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        scores[i] = row.of_mean(p, lane + 32 * i, scores[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      of[i] = row.rank(p, lane + 32 * i, scores[i]);
    }
  }
  template <class F>
  __device__ __forceinline__ void each(const F& f) const {
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      f(of[i], 32 * i);
    }
  }
};
template <>
struct Ranks<0> {
  static constexpr int kBits = kBitsAnew;
  const Choice& p;
  const Row& row;
  int lane;

  __device__ __forceinline__ Ranks(const Choice& p, const Row& row, int lane) : p(p), row(row), lane(lane) {}
  // All lanes take part in each turn.
  template <class F>
  __device__ __forceinline__ void each(const F& f) const {
    for (int first = 0; first < row.end; first += 32) {
      const int column = first + lane;
      const float score = row.score(column);
      f(row.rank(p, column, row.sizes == nullptr ? score : row.of_mean(p, column, score)), first);
    }
  }
};

// One after the other.
template <int kOfLane>
__device__ __forceinline__ void choose_in_rounds(const Choice& p, const Row& row, int32_t* chosen, int lane) {
  Ranks<kOfLane> ranks(p, row, lane);
  uint32_t largest = 0;
  ranks.each([&](uint32_t rank, int) { largest = max(largest, rank); });
  int32_t mine = -1;  // lane n has the n-th
  for (int n = 0; n < p.k; ++n) {
    const uint32_t best = __reduce_max_sync(kAllLanes, largest);
    if (best == 0) {
      break;
    }
    uint32_t place = UINT32_MAX;
    if (largest == best) {
#pragma unroll
      for (int i = kOfLane - 1; i >= 0; --i) {
        place = ranks.of[i] == best ? 32 * i + lane : place;
      }
    }
    const uint32_t column = __reduce_min_sync(kAllLanes, place);
    mine = lane == n ? static_cast<int32_t>(column) - row.begin : mine;
    if (place == column) {
      largest = 0;
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        ranks.of[i] = 32 * i + lane == column ? 0 : ranks.of[i];
        largest = max(largest, ranks.of[i]);
      }
    }
  }
  if (lane < p.k) {
    chosen[lane] = mine;
  }
}

// The largest first; `count` is a power of two.
__device__ __forceinline__ void sort(uint64_t* list, int count, int lane) {
  for (int size = 2; size <= count; size *= 2) {
    for (int apart = size / 2; apart > 0; apart /= 2) {
      __syncwarp();
      for (int pair = lane; pair < count / 2; pair += 32) {
        const int at = 2 * pair - (pair & (apart - 1));
        const uint64_t x = list[at], y = list[at + apart];
        if ((x < y) == ((at & size) == 0)) {
          list[at] = y;
          list[at + apart] = x;
        }
      }
    }
  }
  __syncwarp();
}

// All at once, by way of `list`, of `count` numbers: each a rank, and as its low half how low the column is.
template <int kOfLane>
__device__ __forceinline__ void choose_by_rank(
    const Choice& p, const Row& row, int32_t* chosen, uint64_t* list, int count, int lane) {
  const Ranks<kOfLane> ranks(p, row, lane);
  constexpr int kBits = Ranks<kOfLane>::kBits, kSteps = (1 << kBits) - 1;
  // The rank of the last one; 0, where fewer than k can be chosen.
  uint32_t last = 0;
  for (int shift = 32 - kBits; shift >= 0; shift -= kBits) {
    int above[kSteps] = {};
    ranks.each([&](uint32_t rank, int) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        above[step] += rank >= last + ((step + 1u) << shift);
      }
    });
    const uint32_t known = last;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (__reduce_add_sync(kAllLanes, above[step]) >= p.k) {
        last = known + ((step + 1u) << shift);
      }
    }
  }
  int above = 0;
  ranks.each([&](uint32_t rank, int) { above += rank > last; });
  int equals = last == 0 ? 0 : p.k - __reduce_add_sync(kAllLanes, above);  // of that rank so many are chosen
  int filled = 0;
  const unsigned before = (1u << lane) - 1;
  ranks.each([&](uint32_t rank, int first) {
    const unsigned same = __ballot_sync(kAllLanes, rank == last);
    const bool is_chosen = rank > last || (rank == last && __popc(same & before) < equals);
    equals = max(0, equals - __popc(same));
    const unsigned all = __ballot_sync(kAllLanes, is_chosen);
    if (is_chosen) {
      list[filled + __popc(all & before)] = uint64_t{rank} << 32 | (UINT32_MAX - static_cast<uint32_t>(first + lane));
    }
    filled += __popc(all);
  });
  for (int i = filled + lane; i < count; i += 32) {
    list[i] = 0;
  }
  sort(list, count, lane);
  for (int i = lane; i < p.k; i += 32) {
    chosen[i] = list[i] == 0 ? -1 : static_cast<int32_t>(UINT32_MAX - static_cast<uint32_t>(list[i])) - row.begin;
  }
}

template <int kOfLane, bool kInRounds>
__global__ void __launch_bounds__(kWarps * 32) choose_kernel(const __grid_constant__ Choice p, int listed) {
  extern __shared__ uint64_t lists[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t line = int64_t{blockIdx.x} * (blockDim.x / 32) + warp;
  if (line >= p.lines) {
    return;
  }
  const Row row(p, static_cast<int>(line));
  int32_t* chosen = p.chosen + line * p.k;
  if constexpr (kInRounds) {
    choose_in_rounds<kOfLane>(p, row, chosen, lane);
  } else {
    choose_by_rank<kOfLane>(p, row, chosen, lists + warp * listed, listed, lane);
  }
}

// A thread for each row, where there are few columns and many rows: what it has found, the largest first.
template <int kMost>
__global__ void __launch_bounds__(kWarps * 32) choose_few_kernel(const __grid_constant__ Choice p) {
  const int64_t line = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (line >= p.lines) {
    return;
  }
  const Row row(p, static_cast<int>(line));
  uint32_t ranks[kMost] = {};
  int columns[kMost];
  for (int column = row.begin; column < row.end; ++column) {
    const float score = row.score(column);
    uint32_t rank = row.rank(p, column, row.sizes == nullptr ? score : row.of_mean(p, column, score));
    int found = column;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (rank > ranks[i]) {  // of equal ones the first stays before
        const uint32_t other = ranks[i];
        const int its = columns[i];
        ranks[i] = rank;
        columns[i] = found;
        rank = other;
        found = its;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    if (i < p.k) {
      p.chosen[line * p.k + i] = ranks[i] == 0 ? -1 : columns[i] - row.begin;
    }
  }
}

void check_numbers(
    const std::optional<Tensor>& x, int64_t dims, ScalarType type, const Tensor& scores, const char* name) {
  if (!x) {
    return;
  }
  check_dim(*x, dims, name);
  check(x->scalar_type() == type, name, " has another dtype than it has to have.");
  check(x->device() == scores.device(), name, " has to be on the device of the scores.");
  check(x->size(0) == 1 || x->size(0) == scores.size(0), name, " has to be of one sequence, or of all.");
  check(x->stride(dims - 1) == 1 || x->size(dims - 1) <= 1, name, " has to have the numbers of a sequence adjacent.");
}

// Of x, whose sequences may be one for all.
int64_t apart(const std::optional<Tensor>& x) { return !x || x->size(0) == 1 ? 0 : x->stride(0); }

template <class T>
const T* data(const std::optional<Tensor>& x) {
  return x ? static_cast<const T*>(x->const_data_ptr()) : nullptr;
}

// Calls f with how many columns a lane has.
template <class F>
void with_columns(int64_t columns, const F& f) {
  if (columns <= 32) {
    f(std::integral_constant<int, 1>{});
  } else if (columns <= 64) {
    f(std::integral_constant<int, 2>{});
  } else if (columns <= 128) {
    f(std::integral_constant<int, 4>{});
  } else if (columns <= 256) {
    f(std::integral_constant<int, 8>{});
  } else if (columns <= 512) {
    f(std::integral_constant<int, 16>{});
  } else if (columns <= 1024) {
    f(std::integral_constant<int, 32>{});
  } else if (columns <= 2048) {
    f(std::integral_constant<int, 64>{});
  } else if (columns <= 4096) {
    f(std::integral_constant<int, 128>{});
  } else {
    f(std::integral_constant<int, 0>{});
  }
}

Tensor choose_blocks(
    const Tensor& scores, const std::optional<Tensor>& sizes, const std::optional<Tensor>& counts,
    const std::optional<Tensor>& first_key, const std::optional<Tensor>& positions, const std::optional<Tensor>& ranges,
    int64_t first_position, int64_t last_position, int64_t query_block, int64_t block, int64_t k, int64_t first,
    int64_t local, bool causal) {
  check_dim(scores, 4, "scores");
  check(scores.scalar_type() == ScalarType::Float, "scores has to be fp32.");
  check_contiguous(scores, "scores");
  const int64_t rows = scores.size(2), columns = scores.size(3);
  const int64_t lines = product({scores.size(0), scores.size(1), rows});
  check(lines <= INT32_MAX, "scores has ", lines, " rows; there may be up to 2^31 - 1.");
  check(
      columns >= 1 && block >= 1 && product({columns, block}) < INT32_MAX,
      "scores are of 2^31 keys or more, or of none.");
  check(k >= 1 && k <= kMostChosen, "k has to be from 1 to ", kMostChosen, ", got ", k, ".");
  check(
      query_block >= 1 && query_block <= INT32_MAX && first >= 0 && first <= k && local >= 0 && local <= k,
      "query_block has to be 1 or more; first and local from 0 to k.");
  check_numbers(sizes, 2, ScalarType::Float, scores, "sizes");
  check_numbers(counts, 3, ScalarType::Bool, scores, "counts");
  check_numbers(first_key, 2, ScalarType::Long, scores, "first_key");
  check_numbers(positions, 2, ScalarType::Long, scores, "positions");
  check(!sizes || sizes->size(1) >= columns, "sizes has fewer columns than scores.");
  check(!first_key || first_key->size(1) >= columns, "first_key has fewer columns than scores.");
  check(!positions || (query_block == 1 && positions->size(1) == rows), "positions has to have one number a row.");
  if (counts) {
    check_contiguous(*counts, "counts");
    check_size(*counts, 1, rows, "counts");
    check_size(*counts, 2, columns, "counts");
  }
  if (ranges) {
    check_rows(*ranges, 2, scores, "ranges");
  }
  Tensor chosen = empty_on(scores, {scores.size(0), scores.size(1), rows, k}, ScalarType::Int);
  if (lines == 0) {
    return chosen;
  }
  const Choice choice{
      static_cast<const float*>(scores.const_data_ptr()),
      data<float>(sizes),
      data<bool>(counts),
      data<int64_t>(first_key),
      data<int64_t>(positions),
      data<int32_t>(ranges),
      static_cast<int32_t*>(chosen.mutable_data_ptr()),
      apart(sizes),
      apart(counts),
      apart(first_key),
      apart(positions),
      first_position,
      last_position,
      static_cast<int>(lines),
      static_cast<int>(scores.size(1)),
      static_cast<int>(rows),
      static_cast<int>(columns),
      ranges ? static_cast<int>(ranges->size(0)) : 0,
      static_cast<int>(query_block),
      static_cast<int>(block),
      static_cast<int>(k),
      static_cast<int>(first),
      static_cast<int>(local),
      causal};
  const Launcher launch(scores);
  if (columns <= kFewColumns && k <= kFew && lines >= kManyRows) {
    const int64_t thread_blocks = (lines + kWarps * 32 - 1) / (kWarps * 32);
    launch(k <= kFew / 2 ? choose_few_kernel<kFew / 2> : choose_few_kernel<kFew>, thread_blocks, kWarps * 32, choice);
    return chosen;
  }
  with_columns(columns, [&](auto of_lane) {
    constexpr int kOfLane = decltype(of_lane)::value;
    if constexpr (kOfLane > 0) {
      if (k <= kMostRounds) {
        launch(choose_kernel<kOfLane, true>, (lines + kWarps - 1) / kWarps, kWarps * 32, choice, 0);
        return;
      }
    }
    int listed = 1;  // numbers of a warp's list
    while (listed < k) {
      listed *= 2;
    }
    const int64_t bytes = listed * static_cast<int64_t>(sizeof(uint64_t));
    const int64_t warps = std::min<int64_t>(kWarps, kListBytes / bytes);
    launch.with_shared_memory(
        choose_kernel<kOfLane, false>, (lines + warps - 1) / warps, warps * 32, warps * bytes, choice, listed);
  });
  return chosen;
}

}  // namespace
}  // namespace ds_sparse::selection

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CUDA, m) {
  m.impl("choose_blocks", TORCH_BOX(&ds_sparse::selection::choose_blocks));
}
