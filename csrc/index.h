// The index of a layout, what kernels walk: decisions that the builders of all devices share, and what a plan holds.
//
// A layout is bits here: uint32 words (L, lines, words), bit k of word w is block 32 * w + k of the other side. From it
// follow, for each side, an order of lines in which neighbours have similar lists; for each height of tiles the union
// of each tile's lists, cut into even work tiles; and the entries, in the order in which kernels take them fastest.
// Formats: ds_sparse/index/tiles.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "checks.h"
#include "packing.h"
#include "tensors.h"

namespace ds_sparse::index {

// Tokens of tiles whose halves have warps of their own, on Hopper: their entries are ordered in turns.
constexpr int kTallTile = 128;

// Target run length, in tokens, of blocks that only one half of a tile needs before the order switches halves: lists of
// mean length have runs of it, or of up to twice as many.
constexpr int kTurn = 256;

// Tokens of the other side: a list is cut at multiples of them, so that the steps of kernels that take so many at once,
// or fewer, are full but for the last.
constexpr int kStep = 64;

// Tokens of a list below which it is not cut, and by which the longest work tile of a head has to become shorter: less
// would not pay for putting the parts' results together, which takes a kernel of its own. `NEVER_CUT` in build.py is
// twice as many.
constexpr int kLeastCut = 512;

// Where nobody waits for counts, parts of a head's lists are bounded by its number of tiles: they take memory.
constexpr int kTilesOfPart = 4, kTilesOfCut = 8;

// The longest work tile of a head to the mean of its tiles' lists, in quarters. Where queries choose blocks, a block of
// keys has many rows and there are few such tiles, some of them chosen by nearly all: parts are half as long, and the
// heads share so many more than the bounds above.
constexpr int kLongest = 6, kLongestOfChosen = 3, kMorePartsOfChosen = 256;

constexpr int kMaxSets = 4, kMaxLines = 32 - kBlockBits;

template <class N>
constexpr N ceil_div(N x, N y) {
  return (x + y - 1) / y;
}

constexpr int words_of(int64_t others) { return static_cast<int>((others + 31) / 32); }

constexpr int64_t entries_of_step(int64_t block) { return block < kStep ? kStep / block : 1; }

// The most entries of a work tile, for a head whose tiles have so many: `quarters` of their mean, in whole steps.
constexpr int64_t longest_of(int64_t entries, int64_t tiles, int64_t block, int quarters) {
  const int64_t step = entries_of_step(block);
  const int64_t of_mean = ceil_div(quarters * entries, 4 * tiles * step), least = kLeastCut / (step * block);
  return step * (of_mean > least ? of_mean : least > 1 ? least : 1);
}

// The next to try where these are too many parts.
constexpr int64_t longer_than(int64_t longest, int64_t block) {
  const int64_t step = entries_of_step(block);
  return step * ceil_div(5 * longest, 4 * step);
}

constexpr int parts_of(int64_t entries, int64_t longest) {
  return entries <= longest ? 1 : static_cast<int>(ceil_div(entries, longest));
}

constexpr bool pays_to_cut(int64_t longest_list, int64_t longest_part, int64_t block) {
  return (longest_list - longest_part) * block > kLeastCut;
}

// Where part `number` of so many begins in a list: parts are even, in whole steps.
constexpr int begin_of_part(int64_t entries, int64_t number, int64_t parts, int64_t block) {
  const int64_t step = entries_of_step(block), begin = ceil_div(entries, step) * number / parts * step;
  return static_cast<int>(begin < entries ? begin : entries);
}

// Stretches of the other side that are ordered one by one, for tiles of so many entries in all: a power of two, so that
// a half has a turn or two in one if each has half of the entries.
constexpr int64_t stretches_of(int64_t entries, int64_t tiles, int64_t block) {
  const int64_t tokens = block * entries / tiles;
  int64_t stretches = 1;
  while (2 * stretches <= tokens / (2 * kTurn)) stretches *= 2;
  return stretches;
}

// Contents of a line's list as a number: of words, a sum of these.
constexpr uint64_t hash_of(uint32_t word, int64_t number) {
  uint64_t x = (uint64_t{word} << 32 | word) * (0x9e3779b97f4a7c15ull + 2 * static_cast<uint64_t>(number));
  x = (x ^ x >> 29) * 0xbf58476d1ce4e5b9ull;
  return word == 0 ? 0 : x ^ x >> 32;
}

// The order of lines is ascending by this: long lists (above twice the median) come first, as a global line in a tile
// of others makes the tile walk all blocks for the sake of one line. Then lines stay where they are, which keeps
// windows together; but those with the very list of an earlier line follow that one, as with strides.
constexpr int64_t order_key(int64_t first_alike, int64_t count, int64_t median, int64_t lines) {
  return first_alike + (count <= 2 * median ? lines : 0);
}

// The blocks that a tile's lines are live at, by its halves, 32 at a time.
struct Halves {
  uint32_t first, second;

  // Those of the kind that comes at place 0, 1 or 2: in tiles of rows, blocks of both halves, of the first alone, of
  // the second alone, as the kernels that hold a side take them fastest; in tiles of columns those of the first come
  // before.
  constexpr uint32_t kind(int place, bool of_rows) const {
    if (place == 2) return second & ~first;
    return (place == 0) == of_rows ? first & second : first & ~second;
  }
  constexpr uint32_t any() const { return first | second; }
};

// Bits of word `number` that are blocks from `begin` to `end` - 1.
constexpr uint32_t bits_between(int64_t number, int64_t begin, int64_t end) {
  const int64_t low = begin - 32 * number, high = end - 32 * number;
  const uint32_t below_low = low <= 0 ? 0 : low >= 32 ? ~0u : (1u << low) - 1;
  const uint32_t below_high = high <= 0 ? 0 : high >= 32 ? ~0u : (1u << high) - 1;
  return below_high & ~below_low;
}

// Word `number` of a block row of packed documents, which has live blocks from range[0] to range[1] - 1 alone: those of
// the layout of one document, whose first block is range[0] (`own`), or of the row's layout; all, where it is null.
// `rows` and `words` are the layout's, of one head.
constexpr uint32_t word_of_documents(
    const uint32_t* layout, int64_t rows, int64_t words, const int32_t* range, int64_t row, int64_t number, bool own,
    bool causal) {
  const int64_t shift = own ? range[0] : 0, line = row - shift;
  const int64_t end = causal && row < range[1] ? row + 1 : range[1];
  const uint32_t within = bits_between(number, range[0], end);
  if (layout == nullptr) return within;
  if (within == 0 || line < 0 || line >= rows) return 0;
  const int64_t first = 32 * number - shift, word = first >> 5, bit = first & 31;
  const uint32_t low = word >= 0 && word < words ? layout[line * words + word] : 0;
  const uint32_t high = bit > 0 && word >= -1 && word + 1 < words ? layout[line * words + word + 1] : 0;
  return (low >> bit | (bit > 0 ? high << (32 - bit) : 0)) & within;
}

// The document of a token, which has to exist, by where documents begin.
constexpr int64_t document_of(const int32_t* edges, int64_t documents, int64_t token) {
  int64_t least = 0, most = documents - 1;
  while (least < most) {
    const int64_t middle = (least + most + 1) / 2;
    if (edges[middle] <= token)
      least = middle;
    else
      most = middle - 1;
  }
  return least;
}

// A block of documents: its first token, and how many; the first block, and the one after the last, of which its tokens
// may see some.
struct BlockOfDocuments {
  int32_t token, tokens, first, end;
};

// Documents that are packed in one row: where each begins, and the row's end.
struct Documents {
  const int32_t* edges;
  int64_t count, tokens, block;

  constexpr int64_t blocks_of(int64_t document) const {
    return ceil_div(int64_t{edges[document + 1]} - edges[document], block);
  }
  // Tells if the row has a document as it says. If it has all, they ascend from 0 to the row's tokens.
  constexpr bool has(int64_t document) const {
    const int32_t begin = edges[document], end = edges[document + 1];
    return begin <= end && (document > 0 || begin == 0) && (document + 1 < count || end == tokens);
  }
  // Block `number` of all documents, of a document whose first has the number `first`.
  constexpr BlockOfDocuments own(int64_t document, int64_t first, int64_t number) const {
    const int64_t token = edges[document] + (number - first) * block, left = edges[document + 1] - token;
    if (left <= 0) return {};
    return {
        static_cast<int32_t>(token), static_cast<int32_t>(left < block ? left : block), static_cast<int32_t>(first),
        static_cast<int32_t>(first + blocks_of(document))};
  }
  // Block `number` of the row, whose tokens see others of their documents that are at most `window` away.
  constexpr BlockOfDocuments of_row(int64_t number, int64_t window) const {
    const int64_t token = number * block, end = token + block < tokens ? token + block : tokens;
    const int64_t begins = edges[document_of(edges, count, token)],
                  ends = edges[document_of(edges, count, end - 1) + 1];
    return {
        static_cast<int32_t>(token), static_cast<int32_t>(end - token),
        static_cast<int32_t>((begins > token - window ? begins : token - window) / block),
        static_cast<int32_t>(ceil_div(ends < end + window ? ends : end + window, block))};
  }
};

// The first token, and the one after the last, that are in a token's document and at most `window` away.
constexpr void limits_of(
    const int32_t* edges, int64_t documents, int64_t token, int64_t window, int32_t& first, int32_t& end) {
  const int64_t document = document_of(edges, documents, token);
  const int64_t earliest = token - window, after = token + window + 1;
  first = earliest > edges[document] ? static_cast<int32_t>(earliest) : edges[document];
  end = after < edges[document + 1] ? static_cast<int32_t>(after) : edges[document + 1];
}

// One side of a layout, and where a plan has what belongs to it, in int32s.
struct Side {
  bool of_rows;
  bool ordered;  // lines have an order of their own; else they stay where they are
  int lines, others, words;
  int height, padded;              // lines of the highest tiles; lines as these fill them
  int64_t block, block_of_others;  // tokens of a line, and of one of the others
  int64_t bits, hashes, counts, first_alike, medians, order;
};

// Tiles of one height from one side, likewise. lengths, firsts: of each tile, within its head. work: int4, the work
// tiles within their head, `most_work` of each: tile, first entry, number of entries, part. cuts: tile, first part,
// number of parts, `most_cuts` of each.
struct TileSet {
  int side, height, tiles;
  bool in_turns;
  int longest, most_work, most_cuts;  // longest: of a work tile, as kLongest
  int64_t lengths, firsts, work, cuts;
};

// Numbers of a set, of all heads or of one.
enum Total { kEntries, kWork, kCuts, kParts, kNumTotals };

// The beginning of a plan's counts, int64, before the totals of each set and head, and the sums of those of the heads
// before.
struct Header {
  int64_t ahead, differs, tickets, all_entries, live, live_of_first;
  int64_t totals[kMaxSets][kNumTotals], of_first[kMaxSets][kNumTotals];
};
constexpr int64_t kHeader = sizeof(Header) / sizeof(int64_t);

struct Plan {
  int heads, rows, columns, num_sides, num_sets;
  int64_t size;  // of memory, in int32s
  bool bounded;  // parts are bounded, as nobody waits for counts
  Side sides[2];
  TileSet sets[kMaxSets];

  constexpr int64_t total(int set, int64_t head) const {
    return kHeader + (static_cast<int64_t>(set) * heads + head) * kNumTotals;
  }
  constexpr int64_t before(int set, int64_t head) const { return total(num_sets + set, head); }
  int64_t num_counts() const { return before(num_sets, 0); }
  constexpr int64_t all_tiles() const {
    int64_t sum = 0;
    for (int i = 0; i < num_sets; ++i) sum += static_cast<int64_t>(sets[i].tiles) * heads;
    return sum;
  }
  // Stretches of a set whose tiles are ordered in turns, by the lists of all tiles, or, where sides have other blocks,
  // by its own.
  constexpr int64_t stretches(int set, const Header& header) const {
    if (!sets[set].in_turns) return 1;
    const Side& side = sides[sets[set].side];
    return side.block == side.block_of_others
               ? stretches_of(header.all_entries, all_tiles(), side.block)
               : stretches_of(header.totals[set][kEntries], int64_t{sets[set].tiles} * heads, side.block_of_others);
  }
};

inline void check_columns(int64_t columns) {
  check(columns > 0, "columns has to be 1 or more, got ", columns, ".");
  check(columns <= int64_t{1} << kBlockBits, "the layout has more blocks on a side than an index holds.");
}

inline void check_layout(const Tensor& layout) {
  check_dim(layout, 3, "layout");
  check_columns(layout.size(2));
  check(
      layout.scalar_type() == ScalarType::Bool || layout.scalar_type() == ScalarType::Byte,
      "layout has to be bool or uint8.");
}

inline void check_block_indices(const Tensor& block_indices, int64_t columns) {
  check_dim(block_indices, 3, "block_indices");
  check(
      block_indices.scalar_type() == ScalarType::Int || block_indices.scalar_type() == ScalarType::Long,
      "block_indices has to be int32 or int64.");
  check_contiguous(block_indices, "block_indices");
  check_columns(columns);
}

inline void check_bits(const Tensor& bits) {
  check_dim(bits, 3, "bits");
  check(bits.scalar_type() == ScalarType::Byte, "bits has to be uint8.");
  check_contiguous(bits, "bits");
  check(bits.size(2) % 4 == 0, "bits has to have whole words of 32 bits.");
}

// bits: of the layout, perhaps none. Returns their heads.
inline int64_t check_bits_of_documents(const std::optional<Tensor>& bits, const Tensor& ranges) {
  check_rows(ranges, 2, ranges, "ranges");
  if (!bits) return 1;
  check_bits(*bits);
  check(bits->device() == ranges.device(), "bits has to be on the device of ranges.");
  return bits->size(0);
}

// most: of blocks that a document may have, if they are the documents' own; or of tokens to others that a token sees.
inline Documents check_documents(
    const Tensor& cu_seqlens, int64_t tokens, int64_t blocks, int64_t block, bool own, int64_t most) {
  check_block(block);
  check_list(cu_seqlens, cu_seqlens, "cu_seqlens");
  check(cu_seqlens.size(0) > 1, "cu_seqlens has to have one document at least.");
  check(tokens > 0 && tokens <= INT32_MAX, "tokens has to be 1 or more, and less than 2**31.");
  check(most >= 0 && most <= INT32_MAX, "most has to be 0 or more, and less than 2**31.");
  const int64_t of_row = ceil_div(tokens, block);
  check(
      own ? blocks >= of_row && blocks <= INT32_MAX : blocks == of_row, "blocks has to be ", of_row,
      own ? " or more" : "", ", got ", blocks, ".");
  return {cu_seqlens.const_data_ptr<int32_t>(), cu_seqlens.size(0) - 1, tokens, block};
}

inline void check_limits(const Tensor& cu_seqlens, const Tensor& windows, int64_t tokens) {
  check_list(cu_seqlens, cu_seqlens, "cu_seqlens");
  check_list(windows, cu_seqlens, "windows");
  check(cu_seqlens.size(0) > 1, "cu_seqlens has to have one document at least.");
  check(tokens > 0 && tokens <= INT32_MAX, "tokens has to be 1 or more, and less than 2**31.");
}

inline void check_tile_spans(const Tensor& spans, const Tensor& lines, const Tensor& entries) {
  check_rows(spans, 2, spans, "spans");
  check_list(lines, spans, "lines");
  check_list(entries, spans, "entries");
}

// bits: uint8 (L, R, 4 * words of columns). tiles: one or two heights in tokens, ascending. row_block: tokens of a
// block row where they are not those of a block column; then rows, which may be many and are what a model chose, stay
// in their order.
inline Plan plan_of(
    const Tensor& bits, int64_t columns, int64_t block, const std::vector<int64_t>& tiles, bool of_rows,
    bool of_columns, bool bounded, const std::optional<int64_t>& row_block) {
  check_bits(bits);
  check_block(block);
  if (row_block) check_block(*row_block);
  check(columns > 0, "columns has to be 1 or more, got ", columns, ".");
  check_size(bits, 2, 4 * words_of(columns), "bits");
  check(bits.size(0) > 0 && bits.size(1) > 0, "bits has to have one head and one row at least.");
  check(of_rows || of_columns, "of_rows or of_columns has to be true.");
  check(tiles.size() == 1 || tiles.size() == 2, "tiles has to have one or two heights.");
  constexpr int64_t most = int64_t{1} << kBlockBits;
  check(
      bits.size(0) * bits.size(1) < INT32_MAX && bits.size(0) * columns < INT32_MAX && bits.size(1) <= most &&
          columns <= most,
      "the layout has more blocks on a side than an index holds.");
  Plan plan{};
  plan.heads = static_cast<int>(bits.size(0));
  plan.rows = static_cast<int>(bits.size(1));
  plan.columns = static_cast<int>(columns);
  plan.bounded = bounded;
  const auto take = [&](int64_t count) {
    const int64_t at = plan.size;
    plan.size += ceil_div<int64_t>(product({plan.heads, count}), 4) * 4;
    return at;
  };
  for (const bool rows : {true, false}) {
    if (!(rows ? of_rows : of_columns)) continue;
    Side& side = plan.sides[plan.num_sides];
    side.of_rows = rows;
    side.lines = rows ? plan.rows : plan.columns;
    side.others = rows ? plan.columns : plan.rows;
    side.words = words_of(side.others);
    side.block = rows ? row_block.value_or(block) : block;
    side.block_of_others = rows ? block : row_block.value_or(block);
    side.bits = rows ? 0 : take(int64_t{side.lines} * side.words);
    for (int64_t tile : tiles) {
      check(
          tile > 0 && (tile & (tile - 1)) == 0 && tile <= kMaxLines * side.block,
          "tile has to be a power of two and at most 8 blocks, got ", tile, ".");
      TileSet& set = plan.sets[plan.num_sets++];
      set.side = plan.num_sides;
      set.height = static_cast<int>(std::max<int64_t>(1, tile / side.block));
      check(set.height >= side.height, "tiles has to ascend.");
      side.height = set.height;
      set.tiles = ceil_div(side.lines, set.height);
      // Not in tiles of columns of two lines, where ascending lists were up to 3 % faster; but where rows are a model's
      // choice, few are both's.
      set.in_turns = tile == kTallTile && set.height > (rows || row_block ? 1 : 2);
      const bool of_chosen = !rows && side.block_of_others < side.block;
      set.longest = of_chosen ? kLongestOfChosen : kLongest;
      const int longer = ceil_div(4 * set.tiles, set.longest) + 1;  // lists at most, and parts that they have more
      const int more = of_chosen ? kMorePartsOfChosen / plan.heads : 0;
      set.most_cuts = bounded ? std::min(set.tiles, set.tiles / kTilesOfCut + 1 + more) : longer;
      set.most_work = set.tiles + (bounded ? std::min(longer, set.tiles / kTilesOfPart + 1 + more) : longer);
      set.lengths = take(set.tiles);
      set.firsts = take(set.tiles);
      set.work = take(4 * int64_t{set.most_work});
      set.cuts = take(3 * int64_t{set.most_cuts});
    }
    side.padded = ceil_div(side.lines, side.height) * side.height;
    side.ordered = side.height > 1 && !(rows && row_block);
    if (side.ordered) {
      side.hashes = take(2 * int64_t{side.lines});
      side.counts = take(side.lines);
      side.first_alike = take(side.lines);
      side.medians = take(1);
      side.order = take(side.padded);
    }
    ++plan.num_sides;
  }
  return plan;
}

inline void check_plan(
    const Plan& plan, const Tensor& memory, const Tensor& counts, const std::optional<Tensor>& lost) {
  if (lost) {
    check_list(*lost, memory, "lost");
    check_size(*lost, 0, 1, "lost");
    check(plan.bounded, "lost is for tiles that nobody counts; bounded has to be true.");
  }
  check(
      memory.dim() == 1 && memory.size(0) == plan.size && memory.scalar_type() == ScalarType::Int &&
          counts.dim() == 1 && counts.size(0) == plan.num_counts() && counts.scalar_type() == ScalarType::Long,
      "plan and counts have to be those of index_plan, for the same arguments.");
}

// Entries that there is space for where what a layout is made of was not as it has to be: not even for none.
constexpr int64_t kLost = -1;

// The tensors of a set: lines, entries, work tiles and cuts. Where nobody waited for counts there are more than needed,
// and a last work tile (-1, number of the others, 0, 0).
struct SetTensors {
  int32_t *lines, *entries, *work, *cuts;
  int64_t num_entries, num_work, num_cuts;  // numbers there is space for
};

// The tensors that are filled, 4 for each set. sizes: entries, work tiles and cuts of each; if bounded, the entries of
// each that there is space for.
inline std::vector<Tensor> set_tensors(
    const Plan& plan, const Tensor& on, int64_t heads, const std::vector<int64_t>& sizes, SetTensors* to) {
  const int64_t wanted = plan.bounded ? 1 : 3 * plan.num_sets;
  check(
      static_cast<int64_t>(sizes.size()) == wanted, "sizes has to have ", wanted, " numbers, got ", sizes.size(), ".");
  check(heads == plan.heads || heads == 1, "layout_heads has to be 1 or the heads of bits.");
  std::vector<Tensor> made;
  for (int i = 0; i < plan.num_sets; ++i) {
    const TileSet& set = plan.sets[i];
    const auto of = [&](std::initializer_list<int64_t> shape) -> int32_t* {
      made.push_back(empty_on(on, std::vector<int64_t>(shape), ScalarType::Int));
      return made.back().mutable_data_ptr<int32_t>();
    };
    if (plan.bounded) {
      to[i].num_entries = std::min(sizes[0], product({heads, set.tiles, plan.sides[set.side].others}));
      to[i].num_work = heads * set.most_work;
      to[i].num_cuts = heads * set.most_cuts;
    } else {
      to[i].num_entries = sizes[3 * i];
      to[i].num_work = sizes[3 * i + 1];
      to[i].num_cuts = sizes[3 * i + 2];
    }
    to[i].lines = of({product({heads, set.tiles, set.height})});
    to[i].entries = of({product({to[i].num_entries, 1})});
    to[i].work = of({product({to[i].num_work, 1}) + plan.bounded, 4});
    to[i].cuts = of({product({to[i].num_cuts, 1}), 3});
  }
  return made;
}

}  // namespace ds_sparse::index
