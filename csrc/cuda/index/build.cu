// Builds what kernels walk of a layout from its bits (csrc/index.h), without the host: both sides, and all heights of
// tiles, in each kernel. All numbers are the same in each run.

#include <torch/csrc/stable/library.h>

#include "../common/index_builder.h"
#include "../common/launch.h"
#include "tuning.h"

namespace ds_sparse::index {
namespace {

constexpr unsigned kAll = 0xffffffffu;

struct Memory {
  Plan plan;
  const uint32_t* row_bits;
  int32_t* memory;
  int64_t* counts;

  __device__ const uint32_t* line(const Side& side, int64_t number) const {  // counted through all heads
    const uint32_t* bits = side.of_rows ? row_bits : reinterpret_cast<const uint32_t*>(memory + side.bits);
    return bits + number * side.words;
  }
  __device__ Header& header() const { return *reinterpret_cast<Header*>(counts); }
  __device__ uint64_t* hashes(const Side& side) const { return reinterpret_cast<uint64_t*>(memory + side.hashes); }
  __device__ int4* work(const TileSet& set, int64_t head) const {
    return reinterpret_cast<int4*>(memory + set.work) + head * set.most_work;
  }
  // The number of a tile's line k within its head, or -1.
  __device__ int line_of(const TileSet& set, int64_t head, int64_t tile, int k) const {
    const Side& side = plan.sides[set.side];
    const int64_t place = tile * set.height + k;
    if (set.height > 1 && side.ordered) {
      return memory[side.order + head * side.padded + place];
    }
    return place < side.lines ? static_cast<int>(place) : -1;
  }
};

__device__ __forceinline__ int sum_of_warp(int x) { return __reduce_add_sync(kAll, x); }

// The columns' bits: a warp for each 32 x 32 blocks.
__global__ void __launch_bounds__(kThreads) transpose_kernel(Memory m, int side_number, int64_t count) {
  const Side& side = m.plan.sides[side_number];
  const int lane = threadIdx.x % 32, words = words_of(m.plan.columns);
  uint32_t* to = reinterpret_cast<uint32_t*>(m.memory + side.bits);
  for (int64_t number = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32; number < count;
       number += int64_t{gridDim.x} * kWarps) {
    const int64_t head = number / (int64_t{side.words} * words), word = number % words,
                  of_rows = number / words % side.words, row = 32 * of_rows + lane;
    const uint32_t own = row < m.plan.rows ? m.row_bits[(head * m.plan.rows + row) * words + word] : 0;
    uint32_t mine = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const uint32_t column = __ballot_sync(kAll, own >> i & 1);
      mine = lane == i ? column : mine;
    }
    const int64_t column = 32 * word + lane;
    if (column < m.plan.columns) {
      to[(head * m.plan.columns + column) * side.words + of_rows] = mine;
    }
  }
}

// A warp for each line from number `first` on, rows before columns: its hash and live blocks; and what is asked of all
// rows.
__global__ void __launch_bounds__(kThreads) lines_kernel(Memory m, bool of_rows, int64_t first, int64_t count) {
  __shared__ int live_of_all, live_of_first;
  if (threadIdx.x == 0) {
    live_of_all = live_of_first = 0;
  }
  __syncthreads();
  const int lane = threadIdx.x % 32, words = words_of(m.plan.columns);
  const int64_t rows = int64_t{m.plan.heads} * m.plan.rows;
  for (int64_t number = first + (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32; number < count;
       number += int64_t{gridDim.x} * kWarps) {
    // Of rows, which are not a side where columns alone are asked for, the facts are asked.
    const bool is_row = number < rows;
    const Side& side = m.plan.sides[of_rows && !is_row ? 1 : 0];
    const int64_t line = is_row ? number : number - rows;
    const int length = is_row ? words : side.words;
    const uint32_t* bits = is_row ? m.row_bits + line * words : m.line(side, line);
    const int64_t row = line % m.plan.rows;
    uint64_t hash = 0;
    int live = 0;
    bool ahead = false, differs = false;
    for (int w = lane; w < length; w += 32) {
      const uint32_t word = bits[w];
      live += __popc(word);
      hash += hash_of(word, w);
      if (is_row) {
        ahead = ahead || (word & ~bits_between(w, 0, row + 1)) != 0;
        differs = differs || word != m.row_bits[row * words + w];
      }
    }
    live = sum_of_warp(live);
    for (int i = 16; i > 0; i /= 2) {
      hash += __shfl_xor_sync(kAll, hash, i);
    }
    ahead = __any_sync(kAll, ahead);
    differs = __any_sync(kAll, differs);
    if (lane > 0) {
      continue;
    }
    if (is_row) {
      atomicAdd(&live_of_all, live);
      atomicAdd(&live_of_first, line < m.plan.rows ? live : 0);
      if (ahead) {
        m.header().ahead = 1;
      }
      if (differs) {
        m.header().differs = 1;
      }
    }
    if (side.ordered && is_row == side.of_rows) {
      m.hashes(side)[line] = hash;
      m.memory[side.counts + line] = live;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0 && live_of_all > 0) {
    using Count = unsigned long long;
    atomicAdd(reinterpret_cast<Count*>(&m.header().live), static_cast<Count>(live_of_all));
    atomicAdd(reinterpret_cast<Count*>(&m.header().live_of_first), static_cast<Count>(live_of_first));
  }
}

__device__ int sum_of_warps(int x) {
  __shared__ int of_warps[kWarps][kItems];
  __syncthreads();
  of_warps[threadIdx.x / 32][threadIdx.x % 32] = x;
  __syncthreads();
  int sum = 0;
  for (int i = 0; i < kWarps; ++i) {
    sum += of_warps[i][threadIdx.x % 32];
  }
  return sum;
}

// For each line of a head the first with the same list, and the median of lengths.
__global__ void __launch_bounds__(kThreads) alike_kernel(Memory m) {
  const Side& side = m.plan.sides[blockIdx.z];
  __shared__ uint64_t hashes[kThreads];
  __shared__ int counts[kThreads], firsts[kItems];
  if (!side.ordered || int64_t{blockIdx.x} * kItems >= side.lines) {
    return;
  }
  const int lane = threadIdx.x % 32, slice = threadIdx.x - lane, line = blockIdx.x * kItems + lane;
  const bool exists = line < side.lines;
  for (int64_t head = blockIdx.y; head < m.plan.heads; head += gridDim.y) {
    const uint64_t* all_hashes = m.hashes(side) + head * side.lines;
    const int32_t* all_counts = m.memory + side.counts + head * side.lines;
    const uint64_t hash = exists ? all_hashes[line] : 0;
    const int count = exists ? all_counts[line] : 0;
    int before = 0, first = line;
    for (int begin = 0; begin < side.lines; begin += kThreads) {
      __syncthreads();
      if (begin + threadIdx.x < side.lines) {
        hashes[threadIdx.x] = all_hashes[begin + threadIdx.x];
        counts[threadIdx.x] = all_counts[begin + threadIdx.x];
      }
      __syncthreads();
      const int end = min(slice + 32, side.lines - begin);
      for (int i = slice; i < end; ++i) {
        before += counts[i] < count || (counts[i] == count && begin + i < line);
        first = hashes[i] == hash && begin + i < first ? begin + i : first;
      }
    }
    before = sum_of_warps(before);
    if (slice == 0) {
      firsts[lane] = line;
    }
    __syncthreads();
    atomicMin(firsts + lane, first);
    __syncthreads();
    if (slice == 0 && exists) {
      m.memory[side.first_alike + head * side.lines + line] = firsts[lane];
      if (before == (side.lines - 1) / 2) {
        m.memory[side.medians + head] = count;
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads) order_kernel(Memory m) {
  const Side& side = m.plan.sides[blockIdx.z];
  __shared__ int keys[kThreads];
  if (!side.ordered || int64_t{blockIdx.x} * kItems >= side.padded) {
    return;
  }
  const int lane = threadIdx.x % 32, slice = threadIdx.x - lane, line = blockIdx.x * kItems + lane;
  for (int64_t head = blockIdx.y; head < m.plan.heads; head += gridDim.y) {
    const int median = m.memory[side.medians + head];
    const auto key_of = [&](int of) {
      const int64_t at = head * side.lines + of;
      return static_cast<int>(
          order_key(m.memory[side.first_alike + at], m.memory[side.counts + at], median, side.lines));
    };
    const int key = line < side.lines ? key_of(line) : 0;
    int place = 0;
    for (int begin = 0; begin < side.lines; begin += kThreads) {
      __syncthreads();
      if (begin + threadIdx.x < side.lines) {
        keys[threadIdx.x] = key_of(begin + threadIdx.x);
      }
      __syncthreads();
      const int end = min(slice + 32, side.lines - begin);
      for (int i = slice; i < end; ++i) {
        place += keys[i] < key || (keys[i] == key && begin + i < line);
      }
    }
    place = sum_of_warps(place);
    int32_t* order = m.memory + side.order + head * side.padded;
    if (slice == 0 && line < side.lines) {
      order[place] = line;
    } else if (slice == 0 && line < side.padded) {
      order[line] = -1;
    }
  }
}

// The lines of a tile, of which a warp reads a word each lane.
struct Tile {
  const uint32_t* lines[kMaxLines];
  int height;

  __device__ Tile(const Memory& m, const TileSet& set, int64_t head, int64_t number) : height(set.height) {
    const Side& side = m.plan.sides[set.side];
#pragma unroll
    for (int k = 0; k < kMaxLines; ++k) {
      const int line = k < height ? m.line_of(set, head, number, k) : -1;
      lines[k] = line < 0 ? nullptr : m.line(side, head * side.lines + line);
    }
  }
  // The words of its lines, and what their halves are live at.
  __device__ Halves halves(int word, uint32_t (&words)[kMaxLines]) const {
    Halves halves{0, 0};
#pragma unroll
    for (int k = 0; k < kMaxLines; ++k) {
      words[k] = lines[k] == nullptr ? 0 : lines[k][word];
      (2 * k < height ? halves.first : halves.second) |= words[k];
    }
    return halves;
  }
};

// A warp for each tile of each set and head: the length of its list.
__global__ void __launch_bounds__(kThreads) lengths_kernel(Memory m, int64_t count) {
  const int lane = threadIdx.x % 32;
  for (int64_t number = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32; number < count;
       number += int64_t{gridDim.x} * kWarps) {
    int64_t of_set = number;
    int set_number = 0;
    while (of_set >= int64_t{m.plan.sets[set_number].tiles} * m.plan.heads) {
      of_set -= int64_t{m.plan.sets[set_number++].tiles} * m.plan.heads;
    }
    const TileSet& set = m.plan.sets[set_number];
    const Tile tile(m, set, of_set / set.tiles, of_set % set.tiles);
    int length = 0;
    for (int w = lane; w < m.plan.sides[set.side].words; w += 32) {
      uint32_t words[kMaxLines];
      length += __popc(tile.halves(w, words).any());
    }
    length = sum_of_warp(length);
    if (lane == 0) {
      m.memory[set.lengths + of_set] = length;
    }
  }
}

// Four numbers of a thread, or of several.
struct Numbers {
  int of[4];

  __device__ Numbers operator+(const Numbers& other) const {
    Numbers sum;
    for (int n = 0; n < 4; ++n) {
      sum.of[n] = of[n] + other.of[n];
    }
    return sum;
  }
};

// The sums over the threads of a thread block before the own one, and over all.
__device__ Numbers scan_of_block(const Numbers& x, Numbers& all) {
  __shared__ Numbers of_warps[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Numbers sum = x, before{};
  for (int i = 1; i < 32; i *= 2) {
    for (int n = 0; n < 4; ++n) {
      const int other = __shfl_up_sync(kAll, sum.of[n], i);
      sum.of[n] += lane >= i ? other : 0;
    }
  }
  __syncthreads();
  if (lane == 31) {
    of_warps[warp] = sum;
  }
  __syncthreads();
  all = {};
  for (int i = 0; i < kWarps; ++i) {
    before = i < warp ? before + of_warps[i] : before;
    all = all + of_warps[i];
  }
  for (int n = 0; n < 4; ++n) {
    before.of[n] += sum.of[n] - x.of[n];
  }
  return before;
}

// The sum of `sum`, and of `second`, and the largest of `most`, over a thread block.
struct Reduced {
  int sum, second, most;
};
__device__ Reduced over_block(Reduced x) {
  __shared__ Reduced of_warps[kWarps];
  x = {sum_of_warp(x.sum), sum_of_warp(x.second), __reduce_max_sync(kAll, x.most)};
  __syncthreads();
  if (threadIdx.x % 32 == 0) {
    of_warps[threadIdx.x / 32] = x;
  }
  __syncthreads();
  x = of_warps[0];
  for (int i = 1; i < kWarps; ++i) {
    x = {x.sum + of_warps[i].sum, x.second + of_warps[i].second, max(x.most, of_warps[i].most)};
  }
  return x;
}

// By a warp: totals of heads become sums of those of the heads before.
__device__ void add_up_heads(const Memory& m, int set_number) {
  const int lane = threadIdx.x % 32;
  Header& header = m.header();
  for (int n = 0; n < kNumTotals; ++n) {
    int64_t before = 0;
    for (int begin = 0; begin < m.plan.heads; begin += 32) {
      const int head = begin + lane;
      const int64_t own = head < m.plan.heads ? __ldcg(m.counts + m.plan.total(set_number, head) + n) : 0;
      int64_t sum = own;
      for (int i = 1; i < 32; i *= 2) {
        const int64_t other = __shfl_up_sync(kAll, sum, i);
        sum += lane >= i ? other : 0;
      }
      if (head < m.plan.heads) {
        m.counts[m.plan.before(set_number, head) + n] = before + sum - own;
      }
      if (head == 0) {
        header.of_first[set_number][n] = own;
      }
      before += __shfl_sync(kAll, sum, 31);
    }
    if (lane == 0) {
      header.totals[set_number][n] = before;
      if (n == kEntries) {
        atomicAdd(reinterpret_cast<unsigned long long*>(&header.all_entries), static_cast<unsigned long long>(before));
      }
    }
  }
}

// A thread block for each set and head: work tiles and cuts, as numbers within the head. The last adds the heads up.
__global__ void __launch_bounds__(kThreads) cut_kernel(Memory m) {
  const int set_number = blockIdx.x / m.plan.heads;
  const int64_t head = blockIdx.x % m.plan.heads;
  const TileSet& set = m.plan.sets[set_number];
  const int64_t block = m.plan.sides[set.side].block_of_others;
  const int32_t* lengths = m.memory + set.lengths + head * set.tiles;
  Reduced lists{};
  for (int t = threadIdx.x; t < set.tiles; t += kThreads) {
    lists = {lists.sum + lengths[t], 0, max(lists.most, lengths[t])};
  }
  lists = over_block(lists);
  int64_t longest = longest_of(lists.sum, set.tiles, block, set.longest);
  while (longest < lists.most) {
    Reduced cut{};
    for (int t = threadIdx.x; t < set.tiles; t += kThreads) {
      const int parts = parts_of(lengths[t], longest);
      cut = {cut.sum + parts, cut.second + (parts > 1), max(cut.most, ceil_div(lengths[t], parts))};
    }
    cut = over_block(cut);
    if (!pays_to_cut(lists.most, cut.most, block)) {
      longest = lists.most;
    } else if (cut.sum <= set.most_work && cut.second <= set.most_cuts) {
      break;
    } else {
      longest = longer_than(longest, block);
    }
  }
  Numbers before{};  // of the tiles before
  for (int begin = 0; begin < set.tiles; begin += kThreads) {
    const int t = begin + threadIdx.x, length = t < set.tiles ? lengths[t] : 0;
    const int parts = t < set.tiles ? parts_of(length, longest) : 0;
    Numbers own{}, all;
    own.of[kEntries] = length;
    own.of[kWork] = parts;
    own.of[kCuts] = parts > 1;
    own.of[kParts] = parts > 1 ? parts : 0;
    const Numbers at = before + scan_of_block(own, all);
    if (t < set.tiles) {
      const int first = at.of[kEntries], part = at.of[kParts];
      m.memory[set.firsts + head * set.tiles + t] = first;
      int4* to = m.work(set, head) + at.of[kWork];
      if (parts == 1) {
        *to = {t, first, length, -1};
      } else {
        for (int i = 0; i < parts; ++i) {
          const int from = begin_of_part(length, i, parts, block);
          to[i] = {t, first + from, begin_of_part(length, i + 1, parts, block) - from, part + i};
        }
        int32_t* cut = m.memory + set.cuts + (head * set.most_cuts + at.of[kCuts]) * 3;
        cut[0] = t;
        cut[1] = part;
        cut[2] = parts;
      }
    }
    before = before + all;
  }
  __shared__ bool is_last;
  if (threadIdx.x == 0) {
    for (int n = 0; n < kNumTotals; ++n) {
      m.counts[m.plan.total(set_number, head) + n] = before.of[n];
    }
    __threadfence();
    is_last = atomicAdd(reinterpret_cast<unsigned long long*>(&m.header().tickets), 1ull) + 1 == gridDim.x;
  }
  __syncthreads();
  if (is_last && threadIdx.x / 32 < m.plan.num_sets) {
    __threadfence();
    add_up_heads(m, threadIdx.x / 32);
  }
}

struct Filled {
  SetTensors sets[kMaxSets];
  const int32_t* lost;  // null: nothing is

  __device__ int64_t space(int set) const { return lost != nullptr && *lost != 0 ? kLost : sets[set].num_entries; }
};

// The work tiles, kItems of a thread block, at their places among those of their head, the longest first; the lines and
// cuts; and what is behind the last.
__global__ void __launch_bounds__(kThreads) fill_work_kernel(Memory m, Filled filled, int64_t heads) {
  __shared__ int lengths[kThreads];
  const int set_number = blockIdx.z;
  const TileSet& set = m.plan.sets[set_number];
  const SetTensors& to = filled.sets[set_number];
  const int lane = threadIdx.x % 32, slice = threadIdx.x - lane, number = blockIdx.x * kItems + lane;
  const int thread = blockIdx.x * kThreads + threadIdx.x, threads = gridDim.x * kThreads;
  int4* all_work = reinterpret_cast<int4*>(to.work);
  const int64_t space = filled.space(set_number);
  for (int64_t head = blockIdx.y; head < heads; head += gridDim.y) {
    const int64_t *total = m.counts + m.plan.total(set_number, head),
                  *before = m.counts + m.plan.before(set_number, head);
    const int work = static_cast<int>(total[kWork]), first_tile = static_cast<int>(head * set.tiles);
    const int4* of_head = m.work(set, head);
    const int4 own = number < work ? of_head[number] : int4{};
    int in_head = 0;
    for (int begin = 0; begin < work && blockIdx.x * kItems < work; begin += kThreads) {
      __syncthreads();
      if (begin + threadIdx.x < work) {
        lengths[threadIdx.x] = of_head[begin + threadIdx.x].z;
      }
      __syncthreads();
      const int end = min(slice + 32, work - begin);
      for (int i = slice; i < end; ++i) {
        in_head += lengths[i] > own.z || (lengths[i] == own.z && begin + i < number);
      }
    }
    const int64_t place = before[kWork] + sum_of_warps(in_head);
    if (slice == 0 && number < work && place < to.num_work) {
      const int64_t tile = head * set.tiles + own.x;
      const bool fits = before[kEntries] + m.memory[set.firsts + tile] + m.memory[set.lengths + tile] <= space;
      all_work[place] = {
          static_cast<int>(tile), fits ? static_cast<int>(before[kEntries]) + own.y : -1, fits ? own.z : 0,
          own.w < 0 ? -1 : static_cast<int>(before[kParts]) + own.w};
    }
    if (slice == 0 && number < total[kCuts] && before[kCuts] + number < to.num_cuts) {
      const int32_t* cut = m.memory + set.cuts + (head * set.most_cuts + number) * 3;
      int32_t* of_cut = to.cuts + (before[kCuts] + number) * 3;
      of_cut[0] = first_tile + cut[0];
      of_cut[1] = static_cast<int>(before[kParts]) + cut[1];
      of_cut[2] = cut[2];
    }
    const int lines = set.tiles * set.height;
    for (int i = thread; i < lines; i += threads) {
      to.lines[head * lines + i] = m.line_of(set, head, 0, i);
    }
  }
  if (m.plan.bounded && blockIdx.y == 0) {
    const Header& header = m.header();
    const int64_t* totals = (heads < m.plan.heads ? header.of_first : header.totals)[set_number];
    for (int64_t i = totals[kWork] + thread; i <= to.num_work; i += threads) {
      all_work[i] = {-1, static_cast<int>(totals[kWork]), 0, 0};
    }
    for (int64_t i = 3 * totals[kCuts] + thread; i < 3 * to.num_cuts; i += threads) {
      to.cuts[i] = 0;
    }
  }
}

// A warp for each tile: its entries, where they have space.
__global__ void __launch_bounds__(kThreads) fill_entries_kernel(Memory m, Filled filled, int64_t heads, int64_t count) {
  const int lane = threadIdx.x % 32;
  for (int64_t number = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32; number < count;
       number += int64_t{gridDim.x} * kWarps) {
    int64_t of_set = number;
    int set_number = 0;
    while (of_set >= m.plan.sets[set_number].tiles * heads) {
      of_set -= m.plan.sets[set_number++].tiles * heads;
    }
    const TileSet& set = m.plan.sets[set_number];
    const SetTensors& to = filled.sets[set_number];
    const Side& side = m.plan.sides[set.side];
    const int64_t head = of_set / set.tiles,
                  first = m.counts[m.plan.before(set_number, head) + kEntries] + m.memory[set.firsts + of_set];
    if (first + m.memory[set.lengths + of_set] > filled.space(set_number)) {
      continue;
    }
    const Tile tile(m, set, head, of_set % set.tiles);
    const int span = static_cast<int>(ceil_div<int64_t>(side.others, m.plan.stretches(set_number, m.header())));
    const int kinds = set.in_turns ? 3 : 1;
    uint32_t* next = reinterpret_cast<uint32_t*>(to.entries) + first;
    for (int begin = 0; begin < side.others; begin += span) {
      const int end = min(begin + span, side.others);
      for (int kind = 0; kind < kinds; ++kind) {
        for (int of_warp = begin / 32; 32 * of_warp < end; of_warp += 32) {
          const int w = of_warp + lane;
          uint32_t words[kMaxLines], word = 0;
          if (w < side.words) {
            const Halves halves = tile.halves(w, words);
            word = (kinds == 1 ? halves.any() : halves.kind(kind, side.of_rows)) & bits_between(w, begin, end);
          }
          int sum = __popc(word);
          for (int i = 1; i < 32; i *= 2) {
            const int other = __shfl_up_sync(kAll, sum, i);
            sum += lane >= i ? other : 0;
          }
          uint32_t* at = next + sum - __popc(word);
          for (; word != 0; word &= word - 1) {
            const int bit = __ffs(word) - 1;
            uint32_t entry = 32 * w + bit;
#pragma unroll
            for (int k = 0; k < kMaxLines; ++k) {
              entry |= (words[k] >> bit & 1) << (kBlockBits + k);
            }
            *at++ = entry;
          }
          next += __shfl_sync(kAll, sum, 31);
        }
      }
    }
  }
}

int64_t blocks_of_warps(int64_t count) { return ceil_div<int64_t>(count, kWarps); }

// Thread blocks for so many items of each head and of each set or side.
dim3 grid_of(int64_t items, int64_t heads, int number) {
  return {
      static_cast<unsigned>(std::max<int64_t>(1, ceil_div<int64_t>(items, kItems))),
      static_cast<unsigned>(std::min<int64_t>(heads, 65535)), static_cast<unsigned>(number)};
}

}  // namespace

std::tuple<Tensor, Tensor> index_plan(
    const Tensor& bits, int64_t columns, int64_t block, const std::vector<int64_t>& tiles, bool of_rows,
    bool of_columns, bool bounded, std::optional<int64_t> row_block) {
  const Plan plan = plan_of(bits, columns, block, tiles, of_rows, of_columns, bounded, row_block);
  const Launcher launch(bits);
  Tensor memory = empty_on(bits, {plan.size}, ScalarType::Int);
  Tensor counts = launch.zeros(bits, plan.num_counts(), ScalarType::Long);
  const Memory m{
      plan, static_cast<const uint32_t*>(bits.const_data_ptr()), memory.mutable_data_ptr<int32_t>(),
      counts.mutable_data_ptr<int64_t>()};
  // Of rows that stay in their order nothing is asked.
  const int64_t first = row_block ? int64_t{plan.heads} * plan.rows : 0;
  int64_t lines = int64_t{plan.heads} * plan.rows, most_lines = 0;
  for (int i = 0; i < plan.num_sides; ++i) {
    const Side& side = plan.sides[i];
    if (!side.of_rows) {
      const int64_t count = int64_t{plan.heads} * side.words * words_of(columns);
      launch(transpose_kernel, blocks_of_warps(count), kThreads, m, i, count);
    }
    if (side.ordered) {
      lines += side.of_rows ? 0 : int64_t{plan.heads} * side.lines;
      most_lines = std::max<int64_t>(most_lines, side.padded);
    }
  }
  launch(
      lines_kernel, std::min(blocks_of_warps(lines - first), 4 * launch.multiprocessors()), kThreads, m, of_rows, first,
      lines);
  if (most_lines > 0) {
    const dim3 grid = grid_of(most_lines, plan.heads, plan.num_sides);
    launch.on_grid(alike_kernel, grid, kThreads, m);
    launch.on_grid(order_kernel, grid, kThreads, m);
  }
  launch(lengths_kernel, blocks_of_warps(plan.all_tiles()), kThreads, m, plan.all_tiles());
  launch(cut_kernel, int64_t{plan.num_sets} * plan.heads, kThreads, m);
  return {memory, counts};
}

std::vector<Tensor> index_fill(
    const Tensor& bits, const Tensor& memory, const Tensor& counts, int64_t columns, int64_t block,
    const std::vector<int64_t>& tiles, bool of_rows, bool of_columns, bool bounded, int64_t layout_heads,
    const std::vector<int64_t>& sizes, const std::optional<Tensor>& lost, std::optional<int64_t> row_block) {
  const Plan plan = plan_of(bits, columns, block, tiles, of_rows, of_columns, bounded, row_block);
  check_plan(plan, memory, counts, lost);
  const Launcher launch(bits);
  Filled filled;
  filled.lost = lost ? lost->const_data_ptr<int32_t>() : nullptr;
  const std::vector<Tensor> made = set_tensors(plan, bits, layout_heads, sizes, filled.sets);
  const Memory m{
      plan, static_cast<const uint32_t*>(bits.const_data_ptr()), const_cast<int32_t*>(memory.const_data_ptr<int32_t>()),
      const_cast<int64_t*>(counts.const_data_ptr<int64_t>())};
  int64_t most_work = 0, tiles_of_all = 0;
  for (int i = 0; i < plan.num_sets; ++i) {
    most_work = std::max<int64_t>(most_work, plan.sets[i].most_work);
    tiles_of_all += plan.sets[i].tiles * layout_heads;
  }
  launch.on_grid(fill_work_kernel, grid_of(most_work, layout_heads, plan.num_sets), kThreads, m, filled, layout_heads);
  launch(fill_entries_kernel, blocks_of_warps(tiles_of_all), kThreads, m, filled, layout_heads, tiles_of_all);
  return made;
}

}  // namespace ds_sparse::index

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CUDA, m) {
  m.impl("index_plan", TORCH_BOX(&ds_sparse::index::index_plan));
  m.impl("index_fill", TORCH_BOX(&ds_sparse::index::index_fill));
}
