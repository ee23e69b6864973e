// Builds indices on the CPU: a layout as bits, and what kernels walk of it (index.h).

#include "../index.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <unordered_map>
#include <vector>

namespace ds_sparse::cpu {
namespace {

using namespace index;

// Lines of a side as bits, one layout head after the other.
using Words = const uint32_t*;

Tensor zero_bits(const Tensor& on, int64_t heads, int64_t rows, int64_t columns) {
  Tensor bits = empty_on(on, {heads, rows, 4 * int64_t{words_of(columns)}}, ScalarType::Byte);
  std::memset(bits.mutable_data_ptr(), 0, bits.numel());
  return bits;
}

template <class F>
void for_lines(int64_t lines, const F& f) {
  torch::stable::parallel_for(0, lines, 16, [&](int64_t begin, int64_t end) {
    for (int64_t line = begin; line < end; ++line) f(line);
  });
}

void cut_above_diagonal(uint32_t* words, int64_t row, int64_t count) {
  for (int64_t w = row / 32; w < count; ++w) words[w] &= bits_between(w, 0, row + 1);
}

Tensor index_bits(const Tensor& layout) {
  check_layout(layout);
  const int64_t heads = layout.size(0), rows = layout.size(1), columns = layout.size(2), words = words_of(columns);
  Tensor bits = zero_bits(layout, heads, rows, columns);
  uint32_t* to = static_cast<uint32_t*>(bits.mutable_data_ptr());
  const char* from = static_cast<const char*>(layout.const_data_ptr());
  const int64_t step = layout.stride(2);
  for_lines(heads * rows, [&](int64_t line) {
    const char* given = from + line / rows * layout.stride(0) + line % rows * layout.stride(1);
    uint32_t* of_line = to + line * words;
    for (int64_t c = 0; c < columns; ++c) of_line[c / 32] |= uint32_t{given[c * step] != 0} << c % 32;
  });
  return bits;
}

Tensor index_bits_of_blocks(const Tensor& block_indices, int64_t columns) {
  check_block_indices(block_indices, columns);
  const int64_t heads = block_indices.size(0), rows = block_indices.size(1), count = block_indices.size(2);
  Tensor bits = zero_bits(block_indices, heads, rows, columns);
  uint32_t* to = static_cast<uint32_t*>(bits.mutable_data_ptr());
  const bool wide = block_indices.scalar_type() == ScalarType::Long;
  const void* from = block_indices.const_data_ptr();
  for_lines(heads * rows, [&](int64_t line) {
    for (int64_t n = line * count; n < (line + 1) * count; ++n) {
      const int64_t block = wide ? static_cast<const int64_t*>(from)[n] : static_cast<const int32_t*>(from)[n];
      if (block >= 0 && block < columns) to[line * words_of(columns) + block / 32] |= 1u << block % 32;
    }
  });
  return bits;
}

Tensor index_causal_bits(const Tensor& bits) {
  check_bits(bits);
  Tensor cut = empty_on(bits, bits.sizes());
  std::memcpy(cut.mutable_data_ptr(), bits.const_data_ptr(), bits.numel());
  const int64_t rows = bits.size(1), words = bits.size(2) / 4;
  uint32_t* to = static_cast<uint32_t*>(cut.mutable_data_ptr());
  for_lines(bits.size(0) * rows, [&](int64_t line) { cut_above_diagonal(to + line * words, line % rows, words); });
  return cut;
}

Words words_in(const Tensor& bits) { return static_cast<Words>(bits.const_data_ptr()); }

std::tuple<Tensor, Tensor> index_documents(
    const Tensor& cu_seqlens, int64_t tokens, int64_t blocks, int64_t block, bool own, int64_t most) {
  const Documents documents = check_documents(cu_seqlens, tokens, blocks, block, own, most);
  int64_t of_documents = 0, longest = 0;
  bool has_all = true;
  for (int64_t d = 0; has_all && d < documents.count; ++d) {
    has_all = documents.has(d);
    of_documents += documents.blocks_of(d);
    longest = std::max(longest, documents.blocks_of(d));
  }
  check(has_all, "cu_seqlens has to ascend from 0 to the ", tokens, " tokens of the row.");
  if (own) {
    check(
        longest <= most, "a document of cu_seqlens has ", longest, " blocks, and the layout ", most,
        "; it has to have as many or more.");
    check(of_documents <= blocks, "blocks has to be ", of_documents, " or more, got ", blocks, ".");
  }
  Tensor made = empty_on(cu_seqlens, {2, blocks, 2}, ScalarType::Int);
  int32_t *spans = made.mutable_data_ptr<int32_t>(), *ranges = spans + 2 * blocks;
  int64_t document = 0, first = 0;
  for (int64_t number = 0; number < blocks; ++number) {
    while (own && document + 1 < documents.count && number >= first + documents.blocks_of(document))
      first += documents.blocks_of(document++);
    const BlockOfDocuments x = own ? documents.own(document, first, number) : documents.of_row(number, most);
    spans[2 * number] = x.token;
    spans[2 * number + 1] = x.tokens;
    ranges[2 * number] = x.first;
    ranges[2 * number + 1] = x.end;
  }
  Tensor lost = empty_on(cu_seqlens, {1}, ScalarType::Int);
  *lost.mutable_data_ptr<int32_t>() = 0;
  return {made, lost};
}

Tensor index_bits_of_documents(const std::optional<Tensor>& bits, const Tensor& ranges, bool own, bool causal) {
  const int64_t heads = check_bits_of_documents(bits, ranges), blocks = ranges.size(0), to_words = words_of(blocks);
  const int64_t rows = bits ? bits->size(1) : 0, words = bits ? bits->size(2) / 4 : 0;
  Tensor made = zero_bits(ranges, heads, blocks, blocks);
  uint32_t* to = static_cast<uint32_t*>(made.mutable_data_ptr());
  const int32_t* all_ranges = ranges.const_data_ptr<int32_t>();
  for_lines(heads * blocks, [&](int64_t line) {
    const int64_t row = line % blocks;
    const int32_t* range = all_ranges + 2 * row;
    const Words layout = bits ? words_in(*bits) + line / blocks * rows * words : nullptr;
    const int64_t end = std::min<int64_t>(to_words, ceil_div<int64_t>(range[1], 32));
    for (int64_t w = std::max(range[0], 0) / 32; w < end; ++w)
      to[line * to_words + w] = word_of_documents(layout, rows, words, range, row, w, own, causal);
  });
  return made;
}

Tensor index_limits(const Tensor& cu_seqlens, const Tensor& windows, int64_t tokens) {
  check_limits(cu_seqlens, windows, tokens);
  const int64_t heads = windows.size(0), documents = cu_seqlens.size(0) - 1;
  Tensor limits = empty_on(cu_seqlens, {heads, tokens, 2}, ScalarType::Int);
  int32_t* to = limits.mutable_data_ptr<int32_t>();
  const int32_t *edges = cu_seqlens.const_data_ptr<int32_t>(), *window = windows.const_data_ptr<int32_t>();
  for_lines(heads * tokens, [&](int64_t n) {
    limits_of(edges, documents, n % tokens, window[n / tokens], to[2 * n], to[2 * n + 1]);
  });
  return limits;
}

Tensor index_tile_spans(const Tensor& spans, const Tensor& lines, const Tensor& entries) {
  check_tile_spans(spans, lines, entries);
  const int64_t of_lines = lines.numel(), count = of_lines + entries.numel();
  Tensor made = empty_on(spans, {count, 2}, ScalarType::Int);
  int32_t* to = made.mutable_data_ptr<int32_t>();
  const int32_t *from = spans.const_data_ptr<int32_t>(), *line = lines.const_data_ptr<int32_t>(),
                *entry = entries.const_data_ptr<int32_t>();
  for (int64_t n = 0; n < count; ++n) {
    const int32_t block = n < of_lines ? line[n] : block_of(static_cast<uint32_t>(entry[n - of_lines]));
    const bool exists = block >= 0 && block < spans.size(0);
    to[2 * n] = exists ? from[2 * block] : 0;
    to[2 * n + 1] = exists ? from[2 * block + 1] : 0;
  }
  return made;
}

std::vector<uint32_t> transposed(Words bits, const Plan& plan) {
  const int64_t from_words = words_of(plan.columns), to_words = words_of(plan.rows);
  std::vector<uint32_t> columns(product({plan.heads, plan.columns, to_words}));
  for (int64_t line = 0; line < int64_t{plan.heads} * plan.rows; ++line) {
    const int64_t head = line / plan.rows, row = line % plan.rows;
    for (int64_t w = 0; w < from_words; ++w) {
      for (uint32_t word = bits[line * from_words + w]; word != 0; word &= word - 1) {
        const int64_t column = 32 * w + std::countr_zero(word);
        columns[(head * plan.columns + column) * to_words + row / 32] |= 1u << row % 32;
      }
    }
  }
  return columns;
}

// The lines of a head, in the order of tiles.
void order_lines(Words bits, const Side& side, int32_t* order) {
  std::vector<int64_t> count(side.lines), first_alike(side.lines), key(side.lines);
  std::unordered_map<uint64_t, int64_t> first_of;
  first_of.reserve(side.lines);
  for (int64_t line = 0; line < side.lines; ++line) {
    uint64_t hash = 0;
    for (int64_t w = 0; w < side.words; ++w) {
      const uint32_t word = bits[line * side.words + w];
      hash += hash_of(word, w);
      count[line] += std::popcount(word);
    }
    first_alike[line] = first_of.try_emplace(hash, line).first->second;
  }
  std::vector<int64_t> sorted = count;
  const auto middle = sorted.begin() + (side.lines - 1) / 2;
  std::nth_element(sorted.begin(), middle, sorted.end());
  for (int64_t line = 0; line < side.lines; ++line)
    key[line] = order_key(first_alike[line], count[line], *middle, side.lines);
  std::fill(order, order + side.padded, -1);
  std::iota(order, order + side.lines, 0);
  std::stable_sort(order, order + side.lines, [&](int32_t a, int32_t b) { return key[a] < key[b]; });
}

// The lines of a tile and what they are live at.
struct Tile {
  const TileSet& set;
  Words lines[kMaxLines];

  Tile(const TileSet& set, const Side& side, Words bits, const int32_t* order, int64_t number) : set(set) {
    for (int k = 0; k < set.height; ++k) {
      const int64_t place = number * set.height + k, line = order ? order[place] : place;
      lines[k] = line < 0 || line >= side.lines ? nullptr : bits + line * side.words;
    }
  }

  Halves halves(int64_t word) const {
    Halves halves{0, 0};
    for (int k = 0; k < set.height; ++k)
      if (lines[k]) (2 * k < set.height ? halves.first : halves.second) |= lines[k][word];
    return halves;
  }
  uint32_t entry(int64_t block) const {
    uint32_t entry = static_cast<uint32_t>(block);
    for (int k = 0; k < set.height; ++k)
      if (lines[k]) entry |= (lines[k][block / 32] >> block % 32 & 1) << (kBlockBits + k);
    return entry;
  }
};

// Calls f with each set and head.
template <class F>
void for_sets(const Plan& plan, int64_t heads, const F& f) {
  torch::stable::parallel_for(0, plan.num_sets * heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) f(n / heads, n % heads);
  });
}

struct Memory {
  const Plan& plan;
  Words row_bits;
  int32_t* memory;
  int64_t* counts;

  const int32_t* order(int side_number, int64_t head) const {
    const Side& side = plan.sides[side_number];
    return side.ordered ? memory + side.order + head * side.padded : nullptr;
  }
  Words bits(int side_number, int64_t head) const {
    const Side& side = plan.sides[side_number];
    const Words bits = side.of_rows ? row_bits : reinterpret_cast<Words>(memory + side.bits);
    return bits + head * side.lines * side.words;
  }
  Tile tile(int set_number, int64_t head, int64_t number) const {
    const TileSet& set = plan.sets[set_number];
    return {set, plan.sides[set.side], bits(set.side, head), set.height > 1 ? order(set.side, head) : nullptr, number};
  }
};

// The lengths of a head's lists, and its work tiles and cuts, as numbers within the head.
void cut_lists(const Memory& m, int set_number, int64_t head) {
  const Plan& plan = m.plan;
  const TileSet& set = plan.sets[set_number];
  int32_t *length = m.memory + set.lengths + head * set.tiles, *first = m.memory + set.firsts + head * set.tiles;
  const int64_t block = plan.sides[set.side].block_of_others;
  int64_t entries = 0, longest_list = 0;
  for (int64_t t = 0; t < set.tiles; ++t) {
    const Tile tile = m.tile(set_number, head, t);
    length[t] = 0;
    for (int64_t w = 0; w < plan.sides[set.side].words; ++w) length[t] += std::popcount(tile.halves(w).any());
    first[t] = static_cast<int32_t>(entries);
    entries += length[t];
    longest_list = std::max<int64_t>(longest_list, length[t]);
  }
  for (int64_t longest = longest_of(entries, set.tiles, block, set.longest);; longest = longer_than(longest, block)) {
    int64_t longest_part = 0, work = 0, cuts = 0;
    for (int64_t t = 0; t < set.tiles; ++t) {
      const int parts = parts_of(length[t], longest);
      longest_part = std::max<int64_t>(longest_part, ceil_div(length[t], parts));
      work += parts;
      cuts += parts > 1;
    }
    if (!pays_to_cut(longest_list, longest_part, block))
      longest = longest_list;
    else if (work > set.most_work || cuts > set.most_cuts)
      continue;
    int32_t *to = m.memory + set.work + head * set.most_work * 4, *cut = m.memory + set.cuts + head * set.most_cuts * 3;
    int64_t* total = m.counts + plan.total(set_number, head);
    for (int32_t t = 0; t < set.tiles; ++t) {
      const int parts = parts_of(length[t], longest);
      for (int i = 0; i < parts; ++i) {
        const int32_t begin = begin_of_part(length[t], i, parts, block);
        *to++ = t;
        *to++ = first[t] + begin;
        *to++ = begin_of_part(length[t], i + 1, parts, block) - begin;
        *to++ = parts > 1 ? static_cast<int32_t>(total[kParts] + i) : -1;
      }
      total[kWork] += parts;
      if (parts == 1) continue;
      *cut++ = t;
      *cut++ = static_cast<int32_t>(total[kParts]);
      *cut++ = parts;
      ++total[kCuts];
      total[kParts] += parts;
    }
    total[kEntries] = entries;
    return;
  }
}

std::tuple<Tensor, Tensor> index_plan(
    const Tensor& bits, int64_t columns, int64_t block, const std::vector<int64_t>& tiles, bool of_rows,
    bool of_columns, bool bounded, std::optional<int64_t> row_block) {
  const Plan plan = plan_of(bits, columns, block, tiles, of_rows, of_columns, bounded, row_block);
  Tensor memory = empty_on(bits, {plan.size}, ScalarType::Int);
  Tensor counts = empty_on(bits, {plan.num_counts()}, ScalarType::Long);
  std::memset(counts.mutable_data_ptr(), 0, counts.numel() * sizeof(int64_t));
  const Memory m{plan, words_in(bits), memory.mutable_data_ptr<int32_t>(), counts.mutable_data_ptr<int64_t>()};
  Header& header = *reinterpret_cast<Header*>(m.counts);
  const int64_t words = words_of(columns);
  for (int64_t head = 0; head < plan.heads; ++head) {
    for (int64_t row = 0; row < plan.rows; ++row) {
      for (int64_t w = 0; w < words; ++w) {
        const uint32_t word = m.row_bits[(head * plan.rows + row) * words + w];
        check((word & ~bits_between(w, 0, columns)) == 0, "bits has to be 0 beyond the columns.");
        if (row_block) continue;  // nothing is asked of rows that stay in their order
        header.live += std::popcount(word);
        header.ahead |= (word & ~bits_between(w, 0, row + 1)) != 0;
        header.differs |= word != m.row_bits[row * words + w];
      }
    }
    if (head == 0) header.live_of_first = header.live;
  }
  for (int i = 0; i < plan.num_sides; ++i) {
    const Side& side = plan.sides[i];
    if (!side.of_rows) {
      const std::vector<uint32_t> of_columns = transposed(m.row_bits, plan);
      std::memcpy(m.memory + side.bits, of_columns.data(), of_columns.size() * sizeof(uint32_t));
    }
    if (!side.ordered) continue;
    torch::stable::parallel_for(0, plan.heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t head = begin; head < end; ++head)
        order_lines(m.bits(i, head), side, m.memory + side.order + head * side.padded);
    });
  }
  for_sets(plan, plan.heads, [&](int64_t set, int64_t head) { cut_lists(m, static_cast<int>(set), head); });
  for (int set = 0; set < plan.num_sets; ++set) {
    for (int64_t head = 0; head < plan.heads; ++head) {
      for (int n = 0; n < kNumTotals; ++n) {
        m.counts[plan.before(set, head) + n] = header.totals[set][n];
        header.totals[set][n] += m.counts[plan.total(set, head) + n];
        if (head == 0) header.of_first[set][n] = header.totals[set][n];
      }
    }
    header.all_entries += header.totals[set][kEntries];
  }
  return {memory, counts};
}

// Refuses a plan with numbers that lead outside of it, or of what is filled by it.
void check_numbers(const Memory& m) {
  const Header& header = *reinterpret_cast<const Header*>(m.counts);
  bool fits = true;
  for (int i = 0; i < m.plan.num_sets && fits; ++i) {
    const TileSet& set = m.plan.sets[i];
    const int64_t most_entries = product({set.tiles, m.plan.sides[set.side].others});
    const int64_t most[] = {most_entries, set.most_work, set.most_cuts, set.most_work};
    int64_t sums[kNumTotals] = {};
    for (int64_t head = 0; head < m.plan.heads && fits; ++head) {
      const int64_t *total = m.counts + m.plan.total(i, head), *before = m.counts + m.plan.before(i, head);
      for (int n = 0; n < kNumTotals; ++n) {
        fits &= total[n] >= 0 && total[n] <= most[n] && before[n] == sums[n];
        sums[n] += fits ? total[n] : 0;
        fits &= head > 0 || header.of_first[i][n] == sums[n];
      }
      const int32_t* work = m.memory + set.work + head * set.most_work * 4;
      for (int64_t n = 0; n < total[kWork] && fits; ++n) fits = work[4 * n] >= 0 && work[4 * n] < set.tiles;
      int64_t entries = 0;
      for (int64_t t = head * set.tiles; t < (head + 1) * set.tiles; ++t) {
        fits &= m.memory[set.firsts + t] == entries && m.memory[set.lengths + t] >= 0;
        entries += m.memory[set.lengths + t];
      }
      fits &= entries == total[kEntries];
    }
    fits &= std::equal(sums, sums + kNumTotals, header.totals[i]);
  }
  check(fits, "plan and counts have to be those of index_plan, for the same arguments.");
}

// The work tiles and cuts of a head, the longest first, as numbers of all heads. Work tiles whose entries have no space
// are without any, from entry -1 on.
void fill_work(const Memory& m, int set_number, int64_t head, const SetTensors& to) {
  const TileSet& set = m.plan.sets[set_number];
  const int64_t *total = m.counts + m.plan.total(set_number, head),
                *before = m.counts + m.plan.before(set_number, head);
  const int32_t* work = m.memory + set.work + head * set.most_work * 4;
  const int32_t* length = m.memory + set.lengths + head * set.tiles;
  const int32_t* first = m.memory + set.firsts + head * set.tiles;
  std::vector<int32_t> order(total[kWork]);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return work[4 * a + 2] > work[4 * b + 2]; });
  int32_t* next = to.work + 4 * before[kWork];
  for (int32_t n : order) {
    const int32_t* from = work + 4 * n;
    const bool fits = before[kEntries] + first[from[0]] + length[from[0]] <= to.num_entries;
    *next++ = from[0] + static_cast<int32_t>(head * set.tiles);
    *next++ = fits ? from[1] + static_cast<int32_t>(before[kEntries]) : -1;
    *next++ = fits ? from[2] : 0;
    *next++ = from[3] < 0 ? -1 : from[3] + static_cast<int32_t>(before[kParts]);
  }
  const int32_t* cut = m.memory + set.cuts + head * set.most_cuts * 3;
  int32_t* next_cut = to.cuts + 3 * before[kCuts];
  for (int64_t n = 0; n < total[kCuts]; ++n, cut += 3) {
    *next_cut++ = cut[0] + static_cast<int32_t>(head * set.tiles);
    *next_cut++ = cut[1] + static_cast<int32_t>(before[kParts]);
    *next_cut++ = cut[2];
  }
}

void fill_entries(const Memory& m, int set_number, int64_t head, const SetTensors& to) {
  const TileSet& set = m.plan.sets[set_number];
  const Side& side = m.plan.sides[set.side];
  const int64_t before = m.counts[m.plan.before(set_number, head) + kEntries];
  const int64_t stretches = m.plan.stretches(set_number, *reinterpret_cast<const Header*>(m.counts));
  const int64_t span = ceil_div<int64_t>(side.others, stretches);
  const int kinds = set.in_turns ? 3 : 1;
  for (int64_t t = 0; t < set.tiles; ++t) {
    const Tile tile = m.tile(set_number, head, t);
    const int64_t first = before + m.memory[set.firsts + head * set.tiles + t];
    const int64_t past = first + m.memory[set.lengths + head * set.tiles + t];
    if (past > to.num_entries) continue;
    uint32_t *next = reinterpret_cast<uint32_t*>(to.entries) + first, *last = next + (past - first);
    for (int64_t begin = 0; begin < side.others; begin += span) {
      const int64_t end = std::min<int64_t>(begin + span, side.others);
      for (int kind = 0; kind < kinds; ++kind) {
        for (int64_t w = begin / 32; 32 * w < end; ++w) {
          const Halves halves = tile.halves(w);
          uint32_t word = (kinds == 1 ? halves.any() : halves.kind(kind, side.of_rows)) & bits_between(w, begin, end);
          for (; word != 0 && next < last; word &= word - 1) *next++ = tile.entry(32 * w + std::countr_zero(word));
        }
      }
    }
  }
}

std::vector<Tensor> index_fill(
    const Tensor& bits, const Tensor& memory, const Tensor& counts, int64_t columns, int64_t block,
    const std::vector<int64_t>& tiles, bool of_rows, bool of_columns, bool bounded, int64_t layout_heads,
    const std::vector<int64_t>& sizes, const std::optional<Tensor>& lost, std::optional<int64_t> row_block) {
  const Plan plan = plan_of(bits, columns, block, tiles, of_rows, of_columns, bounded, row_block);
  check_plan(plan, memory, counts, lost);
  SetTensors to[kMaxSets];
  const std::vector<Tensor> made = set_tensors(plan, bits, layout_heads, sizes, to);
  const Memory m{
      plan, words_in(bits), const_cast<int32_t*>(memory.const_data_ptr<int32_t>()),
      const_cast<int64_t*>(counts.const_data_ptr<int64_t>())};
  check_numbers(m);
  if (lost && *lost->const_data_ptr<int32_t>() != 0)
    for (SetTensors& set : to) set.num_entries = kLost;
  const Header& header = *reinterpret_cast<const Header*>(m.counts);
  for (int i = 0; i < plan.num_sets; ++i) {
    const int64_t* total = layout_heads == plan.heads ? header.totals[i] : header.of_first[i];
    check(
        total[kWork] <= to[i].num_work && total[kCuts] <= to[i].num_cuts &&
            (bounded || total[kEntries] <= to[i].num_entries),
        "sizes has to be the counts of the plan, or more.");
    std::fill(to[i].cuts + 3 * total[kCuts], to[i].cuts + 3 * to[i].num_cuts, 0);
    for (int64_t n = total[kWork]; n < to[i].num_work + bounded; ++n) {
      int32_t* work = to[i].work + 4 * n;
      work[0] = -1;
      work[1] = static_cast<int32_t>(total[kWork]);
      work[2] = work[3] = 0;
    }
  }
  for_sets(plan, layout_heads, [&](int64_t number, int64_t head) {
    const int set_number = static_cast<int>(number);
    const TileSet& set = plan.sets[set_number];
    int32_t* lines = to[number].lines + head * set.tiles * set.height;
    const int32_t* order = m.order(set.side, head);
    const int32_t count = plan.sides[set.side].lines;
    for (int32_t i = 0; i < set.tiles * set.height; ++i)
      lines[i] = order && set.height > 1 ? order[i] : i < count ? i : -1;
    fill_work(m, set_number, head, to[number]);
    fill_entries(m, set_number, head, to[number]);
  });
  return made;
}

}  // namespace
}  // namespace ds_sparse::cpu

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CPU, m) {
  m.impl("index_bits", TORCH_BOX(&ds_sparse::cpu::index_bits));
  m.impl("index_bits_of_blocks", TORCH_BOX(&ds_sparse::cpu::index_bits_of_blocks));
  m.impl("index_causal_bits", TORCH_BOX(&ds_sparse::cpu::index_causal_bits));
  m.impl("index_documents", TORCH_BOX(&ds_sparse::cpu::index_documents));
  m.impl("index_bits_of_documents", TORCH_BOX(&ds_sparse::cpu::index_bits_of_documents));
  m.impl("index_limits", TORCH_BOX(&ds_sparse::cpu::index_limits));
  m.impl("index_tile_spans", TORCH_BOX(&ds_sparse::cpu::index_tile_spans));
  m.impl("index_plan", TORCH_BOX(&ds_sparse::cpu::index_plan));
  m.impl("index_fill", TORCH_BOX(&ds_sparse::cpu::index_fill));
}
