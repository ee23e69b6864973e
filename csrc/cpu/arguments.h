// Readies an operator's arguments before the work: checks what lists hold, reads pointers and dtypes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "../attention_call.h"
#include "../checks.h"
#include "../packing.h"
#include "kernels.h"

namespace ds_sparse::cpu {

template <class T>
const T* pointer(const Tensor& x) {
  return static_cast<const T*>(x.const_data_ptr());
}

// The position of a sequence's first query, by offsets that have been checked.
inline int64_t query_offset_of(const std::optional<Tensor>& offsets, int64_t offset, int64_t b) {
  if (!offsets) return offset;
  const int64_t at = offsets->size(0) == 1 ? 0 : b * offsets->stride(0);
  return offsets->scalar_type() == ScalarType::Long ? pointer<int64_t>(*offsets)[at] : pointer<int32_t>(*offsets)[at];
}

// Offsets that cut `entries` entries into block rows, one after the other.
inline void check_offsets(const Tensor& offsets, int64_t entries) {
  const int32_t *begin = pointer<int32_t>(offsets), *end = begin + offsets.size(0);
  check(
      *begin == 0 && end[-1] == entries && std::is_sorted(begin, end), "offsets have to ascend from 0 to the ", entries,
      " entries.");
}

// Offsets, and the entries that they cut: block numbers below `blocks`, ascending within a block row.
inline void check_entries(const Tensor& offsets, const Tensor& indices, int64_t blocks) {
  check_offsets(offsets, indices.size(0));
  const int32_t *offset = pointer<int32_t>(offsets), *index = pointer<int32_t>(indices);
  bool fits = true;
  for (int64_t block_row = 0; block_row < offsets.size(0) - 1; ++block_row) {
    int64_t above = -1;
    for (int64_t n = offset[block_row]; n < offset[block_row + 1]; ++n) {
      fits &= index[n] > above;
      above = index[n];
    }
    fits &= above < blocks;
  }
  check(
      fits, "the block rows or columns in the lists have to ascend within a line, from 0 or more to below ", blocks,
      ".");
}

// Places of the entries among the stored blocks.
inline void check_slots(const Tensor& slots) {
  const int32_t* slot = pointer<int32_t>(slots);
  const int64_t count = slots.size(0);
  bool fits = true;
  for (int64_t n = 0; n < count; ++n) fits &= slot[n] >= 0 && slot[n] < count;
  check(fits, "slots have to be 0 or more and below the ", count, " entries.");
}

// The lists of one side of attention's tiles by block rows: block row i of list l owns the blocks from
// offsets[l * block_rows + i] to offsets[l * block_rows + i + 1].
struct BlockLists {
  int64_t layout_heads, heads_of_layout, block_rows;
  bool by_sequence;
  std::vector<int64_t> offsets;
  std::vector<int32_t> blocks;
  std::vector<char> has_no_space;  // of a block row, where lists are bounded: the entries had none; or empty

  // All heads of all sequences have the same list.
  bool is_shared() const { return layout_heads == 1 && !by_sequence; }
  // Heads of a sequence that are walked one by one.
  int64_t heads() const { return is_shared() ? 1 : layout_heads * heads_of_layout; }
  int64_t place(int64_t batch, int64_t head, int64_t block_row) const {
    return ((by_sequence ? batch * layout_heads : 0) + head / heads_of_layout) * block_rows + block_row;
  }
  const int32_t* begin(int64_t batch, int64_t head, int64_t block_row) const {
    return blocks.data() + offsets[place(batch, head, block_row)];
  }
  int64_t count(int64_t batch, int64_t head, int64_t block_row) const {
    int64_t at = place(batch, head, block_row);
    return offsets[at + 1] - offsets[at];
  }

  // NaN in the tokens' rows of x, (B, H, tokens, ...) or of key heads, that had no space; `whole`: in all rows of a
  // head of which some had none.
  void poison(const Tensor& x, int64_t block, bool whole = false) const {
    if (has_no_space.empty()) return;
    int64_t bytes = x.element_size(), size = bytes, heads = layout_heads * heads_of_layout;
    for (int64_t dim = 3; dim < x.dim(); ++dim) bytes *= x.size(dim);
    char* data = static_cast<char*>(const_cast<void*>(x.const_data_ptr()));
    for (int64_t b = 0; b < x.size(0); ++b) {
      for (int64_t head = 0; head < heads; ++head) {
        const auto first = has_no_space.begin() + place(b, head, 0);
        const bool all = whole && std::find(first, first + block_rows, true) != first + block_rows;
        for (int64_t token = 0; token < x.size(2); ++token) {
          if (!all && (whole || !first[token / block])) continue;
          const int64_t at = b * x.stride(0) + head * x.size(1) / heads * x.stride(1) + token * x.stride(2);
          std::memset(data + at * size, 0xff, bytes);
        }
      }
    }
  }
};

// Checks what the lists of tiles hold, for `block_rows` block rows a head and `others` blocks on the other side, and
// sorts it by block rows: the CPU does a block row whole, whatever work tiles its tile is cut into.
inline BlockLists lists_by_block_row(
    const AttentionCall& call, const TileTensors& of_side, int64_t block_rows, int64_t others) {
  const Tensor &tile_lines = of_side.lines, &entries = of_side.entries, &units = of_side.units;
  int64_t layout_heads = call.all_layout_heads(), per_tile = std::max<int64_t>(1, call.tile / call.block),
          tiles = tile_lines.size(0) / per_tile, tiles_of_head = tiles / layout_heads, num_entries = entries.size(0);
  const int32_t *block_row = pointer<int32_t>(tile_lines), *work_tile = pointer<int32_t>(units);
  const uint32_t* entry = pointer<uint32_t>(entries);

  std::vector<int64_t> first(tiles, num_entries), end(tiles, 0), covered(tiles, 0);
  std::vector<char> has_no_space(tiles);
  bool all_have_space = true;
  for (int64_t n = 0; n < units.size(0); ++n, work_tile += 4) {
    if (call.bounded && work_tile[0] == -1) break;
    if (call.bounded && work_tile[1] == -1 && work_tile[0] >= 0 && work_tile[0] < tiles) {
      has_no_space[work_tile[0]] = true;
      all_have_space = false;
      continue;
    }
    check(
        work_tile[0] >= 0 && work_tile[0] < tiles && work_tile[1] >= 0 && work_tile[2] >= 0 &&
            work_tile[1] + int64_t{work_tile[2]} <= num_entries,
        "units have to be ranges of the ", num_entries, " entries, of tiles below ", tiles, ".");
    first[work_tile[0]] = std::min<int64_t>(first[work_tile[0]], work_tile[1]);
    end[work_tile[0]] = std::max<int64_t>(end[work_tile[0]], work_tile[1] + work_tile[2]);
    covered[work_tile[0]] += work_tile[2];
  }

  BlockLists lists{
      call.layout_heads,
      call.heads_of_layout(),
      block_rows,
      call.by_sequence,
      std::vector<int64_t>(layout_heads * block_rows + 1),
      {},
      std::vector<char>(all_have_space ? 0 : layout_heads * block_rows)};
  std::vector<char> seen(layout_heads * block_rows);
  std::vector<int64_t> tile_of(others, -1);
  int64_t* count = lists.offsets.data() + 1;
  for (int64_t t = 0; t < tiles; ++t, block_row += per_tile) {
    check(
        covered[t] == std::max<int64_t>(0, end[t] - first[t]), "the units of a tile have to cut one range of entries.");
    for (int64_t k = 0; k < per_tile; ++k) {
      if (block_row[k] == -1) continue;
      int64_t at = t / tiles_of_head * block_rows + block_row[k];
      check(
          block_row[k] >= 0 && block_row[k] < block_rows && !seen[at], "lines have to name each of the ", block_rows,
          " block rows or columns of a head once.");
      seen[at] = true;
      if (has_no_space[t]) lists.has_no_space[at] = true;
    }
    for (int64_t n = first[t]; n < end[t]; ++n) {
      uint32_t owners = owners_of(entry[n]);
      int64_t other = block_of(entry[n]);
      check(
          other < others && tile_of[other] != t && owners >> per_tile == 0, "entries have to be blocks below ", others,
          ", once in a tile, with the bits of its lines.");
      tile_of[other] = t;
      for (int64_t k = 0; k < per_tile; ++k) {
        if ((owners >> k & 1) == 0) continue;
        check(block_row[k] >= 0, "entries have to belong to lines that there are.");
        ++count[t / tiles_of_head * block_rows + block_row[k]];
      }
    }
  }
  check(
      std::find(seen.begin(), seen.end(), false) == seen.end(), "lines have to name each of the ", block_rows,
      " block rows or columns of a head once.");

  for (int64_t i = 0; i < layout_heads * block_rows; ++i) lists.offsets[i + 1] += lists.offsets[i];
  lists.blocks.resize(lists.offsets.back());
  std::vector<int64_t> next(lists.offsets.begin(), lists.offsets.end() - 1);
  block_row = pointer<int32_t>(tile_lines);
  for (int64_t t = 0; t < tiles; ++t, block_row += per_tile)
    for (int64_t n = first[t]; n < end[t]; ++n)
      for (int64_t k = 0; k < per_tile; ++k)
        if (owners_of(entry[n]) >> k & 1)
          lists.blocks[next[t / tiles_of_head * block_rows + block_row[k]]++] =
              static_cast<int32_t>(block_of(entry[n]));
  return lists;
}

// A bias as a 4-D view: data, and strides that are 0 where its size is 1.
struct BiasView {
  const char* data;
  int64_t batch_stride, head_stride, row_stride, column_stride;
  bool is_bool, is_wide;

  // dtype: of the other operands. by_distance: x is (H or 1, 2 * M - 1), and not a mask of keys, (B or 1, S).
  BiasView(const Tensor& x, ScalarType dtype, bool by_distance = false)
      : data(pointer<char>(x)),
        is_bool(x.scalar_type() == ScalarType::Bool),
        is_wide(!is_bool && x.scalar_type() != dtype) {
    auto stride = [&](int64_t dim) { return x.size(dim) == 1 ? 0 : x.stride(dim); };
    bool padding = x.dim() == 2;
    int64_t size = x.element_size();
    if (by_distance) {  // a step to the next key is one ahead, to the next query one back
      batch_stride = 0;
      head_stride = stride(0) * size;
      column_stride = x.stride(1);
      row_stride = -column_stride;
      data += x.size(1) / 2 * column_stride * size;
      return;
    }
    batch_stride = stride(0) * size;
    head_stride = padding ? 0 : stride(1) * size;
    row_stride = padding ? 0 : stride(2);
    column_stride = x.stride(x.dim() - 1);
  }

  Bias at(int64_t batch, int64_t head) const {
    return {data + batch * batch_stride + head * head_stride, row_stride, column_stride, is_bool, is_wide};
  }
};

// Calls f with a null pointer of the type that holds the dtype's numbers: use(float*), and so on.
template <class F>
void for_dtype(ScalarType dtype, const F& f) {
  switch (dtype) {
    case ScalarType::Float:
      return f(static_cast<float*>(nullptr));
    case ScalarType::Double:
      return f(static_cast<double*>(nullptr));
    case ScalarType::Half:
      return f(static_cast<Half*>(nullptr));
    case ScalarType::BFloat16:
      return f(static_cast<BFloat16*>(nullptr));
    default:
      throw std::runtime_error("ds_sparse: tensors on the CPU have to be fp32, fp64, fp16 or bf16.");
  }
}

}  // namespace ds_sparse::cpu
