#include "gathered_rows.h"

#include <algorithm>

#include "../common/index_builder.h"

namespace ds_sparse::attention {
namespace {

constexpr uint32_t kWarp = 0xffffffffu;
constexpr int kGatherThreads = 256, kGatherWarps = kGatherThreads / 32, kScanThreads = 1024;
constexpr int kChunks = 64, kLeastChunk = 64;     // of a list; tokens that a warp lists
constexpr int kRunsOfThread = 4;                  // whose reads are under way together
constexpr int64_t kMostBytes = int64_t{1} << 30;  // of gathered queries

int64_t ceil_div(int64_t x, int64_t y) { return (x + y - 1) / y; }

// The bits of what is to be gathered, and how warps share them: 32 blocks of a chunk of tokens each.
struct BitsToGather {
  const uint32_t* bits;
  int queries, words, columns, log_block, chunk, chunks;
  bool causal;

  // Those of 32 blocks that a token has chosen, but for its own block, and, if causal, those ahead of it.
  __device__ uint32_t word(int64_t list, int token, int number) const {
    if (token >= queries) return 0;
    const int end = causal ? min(token >> log_block, columns) : columns;
    return bits[(list * queries + token) * words + number] & index::bits_between(number, 0, end);
  }
  // Tells if a token has chosen its own block, which is not in the words.
  __device__ bool has_own(int64_t list, int token) const {
    const int block = token >> log_block;
    return causal && token < queries && block < columns &&
           (bits[(list * queries + token) * words + block / 32] >> block % 32 & 1) != 0;
  }
};

struct PartOfList {
  int64_t list;
  int chunk, word, first, end;  // tokens

  __device__ PartOfList(const BitsToGather& all, int64_t number)
      : list(number / all.words / all.chunks),
        chunk(number / all.words % all.chunks),
        word(number % all.words),
        first(chunk * all.chunk),
        end(min(first + all.chunk, all.queries)) {}
};

// Counts the tokens of each part that have chosen each block: (P, chunks, 32 * words).
__global__ void __launch_bounds__(kGatherThreads)
    count_kernel(const __grid_constant__ BitsToGather all, int32_t* counts, int64_t parts) {
  const int lane = threadIdx.x % 32;
  const int64_t number = int64_t{blockIdx.x} * kGatherWarps + threadIdx.x / 32;
  if (number >= parts) return;
  const PartOfList part(all, number);
  int count = 0;
#pragma unroll 2
  for (int token = part.first; token < part.end; token += 32) {
    const uint32_t own = all.word(part.list, token + lane, part.word);
    for (uint32_t left = __reduce_or_sync(kWarp, own); left != 0; left &= left - 1) {
      const int block = __ffs(left) - 1;
      const int found = __popc(__ballot_sync(kWarp, own >> block & 1));
      count += lane == block ? found : 0;
    }
  }
  counts[((part.list * all.chunks + part.chunk) * all.words + part.word) * 32 + lane] = count;
}

// A thread block for each list: where the rows of each block begin, in units (P, columns + 1), of each part behind
// that, in rows; and the block of each unit behind those of own rows.
__global__ void __launch_bounds__(kScanThreads) scan_kernel(
    int32_t* counts, int32_t* begins, int32_t* of_units, int chunks, int columns, int units, int own_units,
    int log_unit) {
  __shared__ int of_warps[kScanThreads / 32];
  const int64_t list = blockIdx.x;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  counts += list * chunks * columns;
  begins += list * (columns + 1);
  of_units += list * units;
  int before = 0;
  for (int first = 0; first < columns; first += kScanThreads) {
    const int column = first + threadIdx.x;
    int rows = 0;
    if (column < columns) {
#pragma unroll 8
      for (int chunk = 0; chunk < chunks; ++chunk) {
        int32_t& at = counts[chunk * columns + column];
        const int count = at;
        at = rows;
        rows += count;
      }
    }
    const int own = (rows + (1 << log_unit) - 1) >> log_unit;
    int sum = own;
    for (int i = 1; i < 32; i *= 2) {
      const int other = __shfl_up_sync(kWarp, sum, i);
      sum += lane >= i ? other : 0;
    }
    __syncthreads();
    if (lane == 31) of_warps[warp] = sum;
    __syncthreads();
    int of_earlier = 0, all = 0;
    for (int i = 0; i < kScanThreads / 32; ++i) {
      of_earlier += i < warp ? of_warps[i] : 0;
      all += of_warps[i];
    }
    if (column < columns) begins[column] = before + of_earlier + sum - own;
    before += all;
  }
  if (threadIdx.x == 0) begins[columns] = before;
  __syncthreads();
  for (int unit = threadIdx.x; unit < own_units; unit += kScanThreads) {
    of_units[unit] = 0;
  }
  // The last tile has rows of no token, as any block has.
  const int units_of_tile = max(1, kHopperBlockM >> log_unit),
            filled = (before + units_of_tile - 1) / units_of_tile * units_of_tile;
  for (int number = threadIdx.x; number < units - own_units; number += kScanThreads) {
    const int unit = number < filled ? min(number, before - 1) : number;
    int least = 0, most = columns;  // the last that begins here or before
    while (least < most) {
      const int middle = (least + most + 1) / 2;
      if (begins[middle] <= unit) {
        least = middle;
      } else {
        most = middle - 1;
      }
    }
    of_units[own_units + number] = least < columns ? least : -1;
  }
}

// Writes a row for each block that a token of the part has chosen, in the order of tokens.
__global__ void __launch_bounds__(kGatherThreads) list_kernel(
    const __grid_constant__ BitsToGather all, const int32_t* counts, const int32_t* begins, int32_t* tokens,
    int32_t* places, int64_t parts, int rows, int own_rows, int most, int log_unit) {
  const int lane = threadIdx.x % 32, columns = 32 * all.words;
  const int64_t number = int64_t{blockIdx.x} * kGatherWarps + threadIdx.x / 32;
  if (number >= parts) return;
  const PartOfList part(all, number);
  const int column = 32 * part.word + lane;
  int next = own_rows + (begins[part.list * (columns + 1) + column] << log_unit) +
             counts[(part.list * all.chunks + part.chunk) * columns + column];
  for (int first = part.first; first < part.end; first += 32) {
    const int token = first + lane;
    int32_t* to = places + (part.list * all.queries + token) * most;
    int slot = all.has_own(part.list, token);
    if (slot > 0 && token >> all.log_block >> 5 == part.word) {
      to[0] = token;
      tokens[part.list * rows + token] = token;
    }
    const uint32_t own = all.word(part.list, token, part.word);
    uint32_t left = __reduce_or_sync(kWarp, own);
    if (left == 0) continue;
    for (int word = 0; word < part.word && own != 0; ++word) {
      slot += __popc(all.word(part.list, token, word));
    }
    for (; left != 0; left &= left - 1) {
      const int block = __ffs(left) - 1;
      const uint32_t chosen = __ballot_sync(kWarp, own >> block & 1);
      const int row = __shfl_sync(kWarp, next, block) + __popc(chosen & ((1u << lane) - 1));
      if (own >> block & 1) {
        tokens[part.list * rows + row] = token;
        if (slot < most) to[slot++] = row;
      }
      next += lane == block ? __popc(chosen) : 0;
    }
  }
}

// Bits of the layout that attention on rows has, (P, units, words), in units of keys: of own rows their own block, up
// to themselves; of others the block that they have chosen.
__global__ void layout_kernel(
    const int32_t* blocks, uint32_t* bits, int64_t count, int units, int own_units, int words, int units_of_block,
    int columns) {
  for (int64_t number = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; number < count;
       number += int64_t{gridDim.x} * blockDim.x) {
    const int unit = number / words % units;
    const int block = unit < own_units ? unit / units_of_block : blocks[number / words];
    const int begin = block * units_of_block, end = unit < own_units ? unit + 1 : begin + units_of_block;
    bits[number] = block < 0 ? 0 : index::bits_between(number % words, begin, min(end, columns));
  }
}

// The tiles of rows (index/tiles.py), whose lists are short and even: a thread each, `spaces` entries apart. Tiles that
// have no rows are no work. begins: of scan_kernel.
__global__ void __launch_bounds__(kGatherThreads) row_tiles_kernel(
    const int32_t* of_units, const int32_t* begins, int32_t* lines, uint32_t* entries, int4* work, int units,
    int own_units, int columns, int height, int spaces, int units_of_block, int key_units) {
  const int list = blockIdx.y, lists = gridDim.y, tiles = (units + height - 1) / height;
  const auto filled_of = [&](int of_list) {
    return own_units / height + (begins[int64_t{of_list} * (columns + 1) + columns] + height - 1) / height;
  };
  int before = 0, all = 0;
  for (int other = 0; other < lists; ++other) {
    const int filled = filled_of(other);
    before += other < list ? filled : 0;
    all += filled;
  }
  const int filled = filled_of(list), empty_before = list * tiles - before;
  for (int tile = blockIdx.x * kGatherThreads + threadIdx.x; tile < tiles; tile += gridDim.x * kGatherThreads) {
    const int64_t number = int64_t{list} * tiles + tile, first = number * spaces;
    int count = 0;
    const auto add = [&](int block, uint32_t owners) {
      entries[first + count++] = owners << kBlockBits | static_cast<uint32_t>(block);
    };
    int begin[2] = {}, end[2] = {};
    for (int line = 0; line < height; ++line) {
      const int unit = tile * height + line;
      const bool is_own = unit < own_units;
      const int block = unit >= units ? -1 : is_own ? unit / units_of_block : of_units[int64_t{list} * units + unit];
      begin[line] = max(block, 0) * units_of_block;
      end[line] = block < 0 ? 0 : min(is_own ? unit + 1 : begin[line] + units_of_block, key_units);
      lines[number * height + line] = unit < units ? unit : -1;
    }
    // Two lines of a tile have one block each.
    if (height == 2 && begin[0] == begin[1] && begin[0] < end[0] && begin[1] < end[1]) {
      add(begin[0], 3);
    } else {
      for (int line = 0; line < height; ++line) {
        for (int block = begin[line]; block < end[line]; ++block) {
          add(block, 1u << line);
        }
      }
    }
    const int4 own{static_cast<int>(number), static_cast<int>(first), count, -1};
    const bool has_rows = tile < filled;
    work[has_rows ? before + tile : all + empty_before + tile - filled] = has_rows ? own : int4{-1, all, 0, 0};
  }
  if (blockIdx.x == 0 && list == 0 && threadIdx.x == 0) {
    work[lists * tiles] = {-1, all, 0, 0};
  }
}

// What of a matrix (rows, D) of 16 bytes each a thread has: kRunsOfThread of them, as far apart as a thread block has
// threads.
struct Runs {
  int batch, head;  // of those that are gathered
  int64_t matrix, list;
  int first, count, runs_of_row;

  __device__ Runs(const GatheredLists& lists, int rows, int runs_of_row)
      : batch(blockIdx.y / lists.of.heads),
        head(blockIdx.y % lists.of.heads),
        matrix(blockIdx.y),
        list(lists.list_of(batch, head)),
        first(blockIdx.x * kGatherThreads * kRunsOfThread + threadIdx.x),
        count(rows * runs_of_row),
        runs_of_row(runs_of_row) {}
};

__global__ void __launch_bounds__(kGatherThreads) gather_kernel(
    const __grid_constant__ GatheredLists lists, const uint4* from, uint4* to, int64_t batch_stride,
    int64_t head_stride, int64_t token_stride, int runs_of_row) {
  const Runs runs(lists, lists.rows, runs_of_row);
  const int64_t first_row = runs.list * lists.rows;
  from += (runs.batch + lists.of.first_batch) * batch_stride + (runs.head + lists.of.first_head) * head_stride;
  to += runs.matrix * runs.count;
  int tokens[kRunsOfThread];
  uint4 found[kRunsOfThread];
#pragma unroll
  for (int i = 0; i < kRunsOfThread; ++i) {
    const int number = runs.first + i * kGatherThreads, row = number / runs_of_row;
    const bool exists = number < runs.count && lists.units[(first_row + row) >> lists.log_unit] >= 0;
    tokens[i] = exists ? lists.tokens[first_row + row] : -2;
  }
#pragma unroll
  for (int i = 0; i < kRunsOfThread; ++i) {
    const int number = runs.first + i * kGatherThreads;
    found[i] = tokens[i] < 0 ? uint4{} : from[tokens[i] * token_stride + number % runs_of_row];
  }
#pragma unroll
  for (int i = 0; i < kRunsOfThread; ++i) {
    if (tokens[i] > -2) to[runs.first + i * kGatherThreads] = found[i];
  }
}

__global__ void __launch_bounds__(kGatherThreads) gather_row_stats_kernel(
    const __grid_constant__ GatheredLists lists, RowStatsPlanes from, RowStatsPlanes to, int all_heads) {
  const Runs runs(lists, lists.rows, 1);
  const int64_t matrix = int64_t{runs.batch + lists.of.first_batch} * all_heads + runs.head + lists.of.first_head;
#pragma unroll
  for (int i = 0; i < kRunsOfThread; ++i) {
    const int row = runs.first + i * kGatherThreads;
    if (row >= lists.rows) return;
    const int token = lists.tokens[runs.list * lists.rows + row];
    to.set(runs.matrix, row, token < 0 ? no_row_stats() : from.at(matrix, token));
  }
}

template <class T>
__device__ __forceinline__ void add_run(float (&values)[kRun<T>], float weight, const T* from) {
  const auto x = load_aligned(from);
#pragma unroll
  for (int e = 0; e < kRun<T>; ++e) {
    values[e] += weight * static_cast<float>(x.element[e]);
  }
}

template <class T>
__device__ __forceinline__ void store_values(T* to, const float (&values)[kRun<T>], float factor) {
  Run<T, kRun<T>> result;
#pragma unroll
  for (int e = 0; e < kRun<T>; ++e) {
    result.element[e] = T(values[e] * factor);
  }
  store_run(to, result);
}

// Calls f, for a run of a token's numbers, with the token, the run's first column, and the rows of the token.
template <class T, class F>
__device__ __forceinline__ void for_each_run(const GatheredLists& lists, int head_dim, const Runs& runs, const F& f) {
  for (int i = 0; i < kRunsOfThread; ++i) {
    const int number = runs.first + i * kGatherThreads;
    if (number >= runs.count) return;
    const int token = number / runs.runs_of_row;
    f(token, number % runs.runs_of_row * kRun<T>, lists.places + (runs.list * lists.queries + token) * lists.most);
  }
}

template <class T>
__global__ void __launch_bounds__(kGatherThreads) combine_rows_kernel(
    const __grid_constant__ GatheredLists lists, const T* of_rows, const float2* sums_of_rows, Matrices<T> output,
    float* lse, float2* row_sums, int all_heads, int head_dim) {
  const Runs runs(lists, lists.queries, head_dim / kRun<T>);
  const int batch = runs.batch + lists.of.first_batch, head = runs.head + lists.of.first_head;
  const int64_t first_token = (int64_t{batch} * all_heads + head) * lists.queries;
  sums_of_rows += runs.matrix * lists.rows;
  of_rows += runs.matrix * lists.rows * head_dim;
  for_each_run<T>(lists, head_dim, runs, [&](int token, int column, const int32_t* places) {
    float row_max = -kInfinity, sum = 0, values[kRun<T>] = {};
    for (int i = 0; i < lists.most && places[i] >= 0; ++i) {
      const float2 sums = sums_of_rows[places[i]];
      if (sums.y == 0) continue;
      const float largest = fmaxf(row_max, sums.x), rescale = expf(row_max - largest);
      const float weight = expf(sums.x - largest) * sums.y;
      row_max = largest;
      sum = sum * rescale + weight;
#pragma unroll
      for (float& value : values) {
        value *= rescale;
      }
      add_run(values, weight, of_rows + int64_t{places[i]} * head_dim + column);
    }
    store_values(output.of(batch, head) + output.tokens.at(token) + column, values, sum == 0 ? 0.0f : 1 / sum);
    if (column == 0) {
      const RowMaxSum stats(row_max, sum);
      lse[first_token + token] = stats.lse();
      row_sums[first_token + token] = {stats.row_max, stats.row_sum};
    }
  });
}

template <class T>
__global__ void __launch_bounds__(kGatherThreads)
    add_rows_kernel(const __grid_constant__ GatheredLists lists, const T* of_rows, Matrices<T> grad, int head_dim) {
  const Runs runs(lists, lists.queries, head_dim / kRun<T>);
  of_rows += runs.matrix * lists.rows * head_dim;
  for_each_run<T>(lists, head_dim, runs, [&](int token, int column, const int32_t* places) {
    float values[kRun<T>] = {};
    for (int i = 0; i < lists.most && places[i] >= 0; ++i) {
      add_run(values, 1.0f, of_rows + int64_t{places[i]} * head_dim + column);
    }
    T* to = grad.of(runs.batch + lists.of.first_batch, runs.head + lists.of.first_head);
    store_values(to + grad.tokens.at(token) + column, values, 1.0f);
  });
}

// A grid for Runs.
dim3 grid_of(const GatheredLists& lists, int64_t rows, int64_t runs_of_row) {
  return {
      static_cast<unsigned>(ceil_div(rows * runs_of_row, kGatherThreads * kRunsOfThread)),
      static_cast<unsigned>(lists.of.batches * lists.of.heads)};
}

int64_t runs_of_row(const Tensor& x) { return x.size(3) * x.element_size() / sizeof(uint4); }

}  // namespace

int ChosenToGather::own_rows() const {
  return causal ? ceil_div(std::max(queries, keys), kHopperBlockM) * kHopperBlockM : 0;
}

int ChosenToGather::rows() const {
  const int64_t chosen = int64_t{queries} * most, filled = chosen + std::min<int64_t>(chosen, columns()) * (unit - 1);
  const int64_t all = own_rows() + ceil_div(filled, kHopperBlockM) * kHopperBlockM;
  check(
      all < int64_t{1} << 22, queries, " queries that have chosen up to ", most, " blocks each, of ", keys,
      " keys, may have ", all, " rows. Fewer than 4,194,304 are gathered, so tiles have to be given.");
  return static_cast<int>(all);
}

std::vector<GatheredHeads> heads_to_gather(const ChosenToGather& all, const Tensor& query, int64_t key_heads) {
  const int64_t batch = query.size(0), heads = query.size(1), group = heads / key_heads;
  // Sums of a row's gradient, in fp32, have at least 64 columns, and more than 128 are not summed so.
  const int64_t columns = std::max<int64_t>(query.size(3) <= 64 ? 64 : 128, query.size(3));
  const int64_t bytes = all.rows() * columns * query.element_size();
  const auto fits = [&](int64_t count) { return count * bytes <= kMostBytes && count <= 65535; };
  const auto is_whole = [&](int64_t count) {  // of keys, and of lists
    const int64_t of_list = all.chosen.heads_of_bits;
    return key_heads % count == 0 && (of_list % (count * group) == 0 || count * group % of_list == 0);
  };
  int64_t batches = batch, groups = key_heads;
  while (batches > 1 && !fits(batches * heads)) {
    batches = (batches + 1) / 2;
  }
  while (groups > 1 && !(is_whole(groups) && fits(batches * groups * group))) {
    --groups;
  }
  check(
      is_whole(groups), "bits are of ", all.chosen.heads_of_bits, " neighbouring heads, and ", group,
      " have the same keys; one has to be a multiple of the other where not all heads are gathered at once.");
  std::vector<GatheredHeads> made;
  for (int64_t first_batch = 0; first_batch < batch; first_batch += batches) {
    for (int64_t first = 0; first < key_heads; first += groups) {
      made.push_back(
          {static_cast<int>(first_batch), static_cast<int>(std::min(batches, batch - first_batch)),
           static_cast<int>(first * group), static_cast<int>(groups * group)});
    }
  }
  return made;
}

GatheredRows gather_chosen(
    const Launcher& launch, const ChosenToGather& all, const GatheredHeads& heads, const Tensor& on, int64_t tile,
    bool with_columns) {
  const ChosenBlocks& chosen = all.chosen;
  const bool by_sequence = chosen.batch_stride > 0;
  const int64_t of_sequence = ceil_div(heads.heads, chosen.heads_of_bits);
  const int64_t lists = by_sequence ? heads.batches * of_sequence : of_sequence;
  const int64_t first_list = heads.first_batch * chosen.batch_stride + heads.first_head / chosen.heads_of_bits;
  const int64_t rows = all.rows(), units = rows / all.unit, own_units = all.own_rows() / all.unit;
  const int chunk = std::max<int64_t>(kLeastChunk, ceil_div(ceil_div(all.queries, kChunks), 32) * 32);
  const BitsToGather bits{
      chosen.bits + first_list * all.queries * chosen.words,
      all.queries,
      static_cast<int>(chosen.words),
      all.columns(),
      chosen.log_block,
      chunk,
      static_cast<int>(ceil_div(all.queries, chunk)),
      all.causal};
  const int64_t columns = 32 * bits.words, parts = lists * bits.chunks * bits.words;
  const int log_unit = log2_of(all.unit);
  // Both begin as -1.
  Tensor tokens = empty_on(on, {lists * (rows + int64_t{all.queries} * all.most)}, ScalarType::Int);
  STD_CUDA_CHECK(cudaMemsetAsync(tokens.mutable_data_ptr(), 0xff, tokens.numel() * sizeof(int32_t), launch.stream()));
  Tensor space = empty_on(on, {lists * units + parts * 32 + lists * (columns + 1)}, ScalarType::Int);
  int32_t *of_rows = tokens.mutable_data_ptr<int32_t>(), *places = of_rows + lists * rows;
  int32_t *of_units = space.mutable_data_ptr<int32_t>(), *counts = of_units + lists * units,
          *begins = counts + parts * 32;
  const int64_t thread_blocks = ceil_div(parts, kGatherWarps);
  launch(count_kernel, thread_blocks, kGatherThreads, bits, counts, parts);
  launch(
      scan_kernel, lists, kScanThreads, counts, begins, of_units, bits.chunks, static_cast<int>(columns),
      static_cast<int>(units), static_cast<int>(own_units), log_unit);
  launch(
      list_kernel, thread_blocks, kGatherThreads, bits, static_cast<const int32_t*>(counts),
      static_cast<const int32_t*>(begins), of_rows, places, parts, static_cast<int>(rows), all.own_rows(), all.most,
      log_unit);
  GatheredRows made{
      {heads, of_rows, of_units, places, static_cast<int>(rows), all.own_rows(), all.most, all.queries, log_unit,
       std::min(heads.heads, chosen.heads_of_bits), by_sequence ? static_cast<int>(of_sequence) : 0},
      tokens,
      space,
      {},
      {}};
  const int64_t key_units = ceil_div(all.keys, all.unit), of_block = (1 << chosen.log_block) / all.unit,
                height = std::max<int64_t>(1, tile / all.unit), spaces = std::max(height, of_block),
                tiles = ceil_div(units, height), words = ceil_div(key_units, 32), count = lists * units * words;
  const auto numbers = [&](Sizes sizes) { return empty_on(on, sizes, ScalarType::Int); };
  made.row_tiles = {
      numbers({lists * tiles * height}), numbers({lists * tiles * spaces}), numbers({lists * tiles + 1, 4}),
      numbers({0, 3})};
  launch.on_grid(
      row_tiles_kernel, {static_cast<unsigned>(ceil_div(tiles, kGatherThreads)), static_cast<unsigned>(lists)},
      kGatherThreads, static_cast<const int32_t*>(of_units), static_cast<const int32_t*>(begins),
      made.row_tiles[0].mutable_data_ptr<int32_t>(),
      reinterpret_cast<uint32_t*>(made.row_tiles[1].mutable_data_ptr<int32_t>()),
      reinterpret_cast<int4*>(made.row_tiles[2].mutable_data_ptr<int32_t>()), static_cast<int>(units),
      static_cast<int>(own_units), static_cast<int>(columns), static_cast<int>(height), static_cast<int>(spaces),
      static_cast<int>(of_block), static_cast<int>(key_units));
  if (!with_columns) {
    return made;
  }
  Tensor layout = empty_on(on, {lists, units, 4 * words}, ScalarType::Byte);
  launch(
      layout_kernel, std::min<int64_t>(ceil_div(count, kGatherThreads), 1 << 16), kGatherThreads,
      static_cast<const int32_t*>(of_units), static_cast<uint32_t*>(layout.mutable_data_ptr()), count,
      static_cast<int>(units), static_cast<int>(own_units), static_cast<int>(words), static_cast<int>(of_block),
      static_cast<int>(key_units));
  const auto [memory, counts_of_tiles] =
      index::index_plan(layout, key_units, all.unit, {tile}, false, true, true, all.unit);
  made.column_tiles = index::index_fill(
      layout, memory, counts_of_tiles, key_units, all.unit, {tile}, false, true, true, lists,
      {lists * units * of_block}, {}, all.unit);
  return made;
}

Tensor gather_rows(const Launcher& launch, const GatheredLists& lists, const Tensor& x) {
  check_alignment(x, "what is gathered");
  Tensor made = empty_on(x, {lists.of.batches, lists.of.heads, lists.rows, x.size(3)});
  const auto stride = [&](int dim) -> int64_t {
    return x.size(dim) == 1 ? 0 : x.stride(dim) * x.element_size() / sizeof(uint4);
  };
  launch.on_grid(
      gather_kernel, grid_of(lists, lists.rows, runs_of_row(x)), kGatherThreads, lists,
      static_cast<const uint4*>(x.const_data_ptr()), static_cast<uint4*>(made.mutable_data_ptr()), stride(0), stride(1),
      stride(2), static_cast<int>(runs_of_row(x)));
  return made;
}

RowsOfBackward gather_row_stats(
    const Launcher& launch, const GatheredLists& lists, const RowsOfBackward& of_tokens, int64_t all_heads,
    int64_t head_dim, const RowsWanted& wanted) {
  const int64_t matrices = int64_t{lists.of.batches} * lists.of.heads;
  const RowsOfBackward made = empty_rows(of_tokens.data, matrices, lists.rows, lists.rows, head_dim, wanted);
  const GradQuerySums& sums = made.grad_query_sums;
  if (wanted.sums) {
    STD_CUDA_CHECK(
        cudaMemsetAsync(sums.data, 0, matrices * lists.rows * sums.columns * int64_t{sizeof(float)}, launch.stream()));
  }
  launch.on_grid(
      gather_row_stats_kernel, grid_of(lists, lists.rows, 1), kGatherThreads, lists, of_tokens.row_stats,
      made.row_stats, static_cast<int>(all_heads));
  return made;
}

void combine_rows(
    const Launcher& launch, const GatheredLists& lists, const Tensor& of_rows, const Tensor& sums_of_rows,
    Tensor& output, Tensor& lse, Tensor& row_sums) {
  with_element<false>(output, "attention", [&](auto zero) {
    using T = decltype(zero);
    launch.on_grid(
        combine_rows_kernel<T>, grid_of(lists, lists.queries, runs_of_row(output)), kGatherThreads, lists,
        static_cast<const T*>(of_rows.const_data_ptr()),
        reinterpret_cast<const float2*>(sums_of_rows.const_data_ptr<float>()), matrices_of<T>(output),
        lse.mutable_data_ptr<float>(), reinterpret_cast<float2*>(row_sums.mutable_data_ptr<float>()),
        static_cast<int>(output.size(1)), static_cast<int>(output.size(3)));
  });
}

void add_rows(const Launcher& launch, const GatheredLists& lists, const Tensor& of_rows, Tensor& grad_query) {
  with_element<false>(grad_query, "attention", [&](auto zero) {
    using T = decltype(zero);
    launch.on_grid(
        add_rows_kernel<T>, grid_of(lists, lists.queries, runs_of_row(grad_query)), kGatherThreads, lists,
        static_cast<const T*>(of_rows.const_data_ptr()), matrices_of<T>(grad_query),
        static_cast<int>(grad_query.size(3)));
  });
}

}  // namespace ds_sparse::attention
