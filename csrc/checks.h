// Argument checks shared by the devices. Python gives users their sentences; these keep a direct caller of
// torch.ops.ds_sparse from reading out of bounds, as far as shapes, dtypes and devices tell. What the lists hold is
// checked on the CPU (cpu/arguments.h); on CUDA, where reading it would wait for the device, it is trusted to be a
// BlockIndex's or a TokenIndex's, and with it that biases are as wide as the layout.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace ds_sparse {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The parts of the sentence, texts and numbers, become one where the condition does not hold alone: a call has some
// hundred checks.
template <class... Parts>
void check(bool condition, const Parts&... parts) {
  if (condition) return;
  std::ostringstream sentence;
  (sentence << "ds_sparse: " << ... << parts);
  throw std::runtime_error(sentence.str());
}

// The product of numbers of 0 or more. A size that no tensor can have is refused, so that no caller has to ask whether
// arithmetic on its arguments overflows.
inline int64_t product(std::initializer_list<int64_t> factors) {
  constexpr int64_t kLargest = int64_t{1} << 60;
  int64_t result = 1;
  bool fits = true;
  for (int64_t factor : factors)
    fits = fits && factor >= 0 && !__builtin_mul_overflow(result, factor, &result) && result <= kLargest;
  check(fits, "the arguments give a size below 0, or beyond 2**60 numbers.");
  return result;
}

inline void check_block(int64_t block) {
  check(
      block >= 8 && block <= int64_t{1} << 20 && (block & (block - 1)) == 0,
      "block has to be a power of two, at least 8 and at most 2**20, got ", block, ".");
}

// Empty tensors, and those that repeat numbers, may have sizes whose product overflows: they are refused, too.
inline void check_dim(const Tensor& x, int64_t dim, const char* name) {
  check(x.dim() == dim, name, " has ", x.dim(), " dimensions; it has to have ", dim, ".");
  int64_t numbers = 1;
  for (int64_t i = 0; i < dim; ++i) numbers = product({numbers, std::max<int64_t>(1, x.size(i))});
}

inline void check_size(const Tensor& x, int64_t dim, int64_t size, const char* name) {
  check(x.size(dim) == size, name, " has size ", x.size(dim), " in dimension ", dim, "; it has to be ", size, ".");
}

inline void check_like(const Tensor& x, const Tensor& other, const char* name) {
  check(x.device() == other.device(), name, " has to be on the device of the other arguments.");
  check(x.scalar_type() == other.scalar_type(), name, " has to have the dtype of the other operand.");
}

// The dtype of statistics: fp32, or fp64 for fp64.
inline ScalarType lse_type(const Tensor& x) {
  return x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline void check_contiguous(const Tensor& x, const char* name) {
  check(x.is_contiguous(), name, " has to be contiguous.");
}

// The positions of sequences' first queries: of each, or of all; none: `offset`.
inline void check_query_offsets(const std::optional<Tensor>& offsets, int64_t offset, const Tensor& query) {
  check(offset >= 0 && offset <= INT32_MAX, "offset has to be 0 or more and below 2**31, got ", offset, ".");
  if (!offsets) return;
  check_dim(*offsets, 1, "offsets");
  check(
      offsets->size(0) == 1 || offsets->size(0) == query.size(0), "offsets has to have one number, or one a sequence.");
  check(
      offsets->scalar_type() == ScalarType::Int || offsets->scalar_type() == ScalarType::Long,
      "offsets has to be int32 or int64.");
  check(offsets->device() == query.device(), "offsets has to be on the device of the other arguments.");
}

inline void check_list(const Tensor& x, const Tensor& other, const char* name) {
  check_dim(x, 1, name);
  check(x.scalar_type() == ScalarType::Int, name, " has to be int32.");
  check(x.device() == other.device(), name, " has to be on the device of the other arguments.");
  check_contiguous(x, name);
}

// Lists of `lines` block rows (or columns) a layout head and their N entries, for `heads` heads.
inline void check_lists(const Tensor& offsets, int64_t layout_heads, int64_t heads, const Tensor& other) {
  check_list(offsets, other, "offsets");
  check(
      layout_heads >= 1 && (layout_heads == 1 || layout_heads == heads), "layout_heads is ", layout_heads, " for ",
      heads, " heads; it has to be 1 or as many.");
  check(
      offsets.size(0) >= 1 && (offsets.size(0) - 1) % layout_heads == 0,
      "offsets has to have one entry a line of each layout head, and one.");
}

// Sparse values (B, V, b, b), contiguous.
inline void check_values(const Tensor& values, int64_t block, const char* name) {
  check_dim(values, 4, name);
  check_size(values, 2, block, name);
  check_size(values, 3, block, name);
  check_contiguous(values, name);
}

inline void check_values_like(const Tensor& values, const Tensor& other, int64_t block, const char* name) {
  check_values(values, block, name);
  check_like(values, other, name);
  check_size(values, 0, other.size(0), name);
  check_size(values, 1, other.size(1), name);
}

// Something added to the scores, or a mask of them: (B or 1, H or 1, T or 1, S), or without the middle two.
inline void check_bias(const Tensor& x, const Tensor& scores, int64_t heads, int64_t rows, const char* name) {
  check(x.device() == scores.device(), name, " has to be on the device of the scores.");
  check(
      x.scalar_type() == ScalarType::Bool || x.scalar_type() == scores.scalar_type(), name,
      " has to be bool, or of the scores' dtype.");
  int64_t full[] = {scores.size(0), heads, rows};
  for (int64_t dim = 0; dim < x.dim() - 1; ++dim)
    check(x.size(dim) == 1 || x.size(dim) == full[dim], name, " does not broadcast in dimension ", dim, ".");
}

// A product of a (B, H, R*b, K) and b (B, H, K, C*b) on live blocks.
inline void check_sdd(
    const Tensor& a, const Tensor& b, const Tensor& row_offsets, const Tensor& columns, int64_t layout_heads,
    int64_t block) {
  check_block(block);
  check_dim(a, 4, "a");
  check_dim(b, 4, "b");
  check_like(b, a, "b");
  check_size(b, 0, a.size(0), "b");
  check_size(b, 1, a.size(1), "b");
  check_size(b, 2, a.size(3), "b");
  check(b.size(3) % block == 0, "the columns of b have to be a multiple of the block.");
  check_lists(row_offsets, layout_heads, a.size(1), a);
  check_list(columns, a, "columns");
  check_size(a, 2, (row_offsets.size(0) - 1) / layout_heads * block, "a");
}

// A product of sparse values, or their transpose, and dense (B, H, tokens, K).
inline void check_dsd(
    const Tensor& values, const Tensor& dense, const Tensor& offsets, const Tensor& indices,
    const std::optional<Tensor>& slots, int64_t layout_heads, int64_t block) {
  check_block(block);
  check_values(values, block, "values");
  check_dim(dense, 4, "dense");
  check_like(dense, values, "dense");
  check_size(dense, 0, values.size(0), "dense");
  check(dense.size(2) % block == 0, "the rows of dense have to be a multiple of the block.");
  check_lists(offsets, layout_heads, dense.size(1), values);
  check_list(indices, values, "indices");
  check_size(values, 1, product({indices.size(0), dense.size(1)}) / layout_heads, "values");
  if (slots) {
    check_list(*slots, values, "slots");
    check_size(*slots, 0, indices.size(0), "slots");
  }
}

// Values, their lists, and the shape of a bias's gradient: (B or 1, H or 1, T or 1, S).
inline void check_bias_backward(
    const Tensor& values, const Tensor& row_offsets, const Tensor& columns, int64_t layout_heads, int64_t heads,
    int64_t block, const std::vector<int64_t>& shape) {
  check_block(block);
  check_values(values, block, "values");
  check_lists(row_offsets, layout_heads, heads, values);
  check_list(columns, values, "columns");
  check_size(values, 1, product({columns.size(0), heads}) / layout_heads, "values");
  check(shape.size() == 4, "shape has to have four numbers.");
  int64_t full[] = {values.size(0), heads, (row_offsets.size(0) - 1) / layout_heads * block};
  for (int i = 0; i < 3; ++i)
    check(shape[i] == 1 || shape[i] == full[i], "shape has to be 1 or the full size in dimension ", i, ".");
  check(shape[3] % block == 0, "the columns of shape have to be a multiple of the block.");
}

// Something added to attention's scores, or a mask of them: `full` sizes, or 1 in the dimensions `may_repeat` names.
inline void check_attention_bias(
    const std::optional<Tensor>& x, const Tensor& query, std::initializer_list<int64_t> full,
    std::initializer_list<int64_t> may_repeat, bool may_be_bool, const char* name) {
  if (!x) return;
  check_dim(*x, static_cast<int64_t>(full.size()), name);
  for (int64_t dim = 0; dim < x->dim(); ++dim)
    check(
        x->size(dim) == full.begin()[dim] ||
            (x->size(dim) == 1 && std::find(may_repeat.begin(), may_repeat.end(), dim) != may_repeat.end()),
        name, " has size ", x->size(dim), " in dimension ", dim, ", where the scores have ", full.begin()[dim], ".");
  check(x->device() == query.device(), name, " has to be on the device of the other arguments.");
  check(
      x->scalar_type() == lse_type(query) || (full.size() == 4 && x->scalar_type() == query.scalar_type()) ||
          (may_be_bool && x->scalar_type() == ScalarType::Bool),
      name, " has a dtype that cannot be added to these scores.");
}

// rpe by distance, (H or 1, 2 * M - 1): the number M - 1 + j - i is added to the score of query i and key j.
inline void check_distance_bias(const Tensor& x, const Tensor& query, const Tensor& key) {
  const int64_t least = 2 * std::max(query.size(2), key.size(2)) - 1;
  check(
      x.size(0) == 1 || x.size(0) == query.size(1), "rpe by distance has ", x.size(0), " heads, where the scores have ",
      query.size(1), ".");
  check(
      x.size(1) % 2 == 1 && x.size(1) >= least, "rpe by distance has ", x.size(1),
      " numbers a head; it has to be odd and at least ", least, ".");
  check(x.device() == query.device(), "rpe has to be on the device of the other arguments.");
  check(
      x.scalar_type() == lse_type(query) || x.scalar_type() == query.scalar_type(),
      "rpe has a dtype that cannot be added to these scores.");
}

// Checks that the operators of fused attention share, but for their lists.
inline void check_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& rpe,
    const std::optional<Tensor>& key_bias, const std::optional<Tensor>& attn_mask,
    const std::optional<Tensor>& dropout_seed, double dropout_p, int64_t layout_heads, int64_t block, int64_t tile) {
  check_block(block);
  check(
      tile >= 8 && (tile & (tile - 1)) == 0 && tile <= 8 * block,
      "tile has to be a power of two, at least 8 and at most 8 blocks, got ", tile, ".");
  for (auto [x, name] : {std::pair{&query, "query"}, {&key, "key"}, {&value, "value"}}) {
    check_dim(*x, 4, name);
    check_like(*x, query, name);
    check_size(*x, 0, query.size(0), name);
    check_size(*x, 3, query.size(3), name);
    check(
        x->stride(3) == 1 || x->size(3) == 1 || x->numel() == 0, name,
        " has to have the numbers of a token adjacent in memory.");
  }
  check_size(value, 1, key.size(1), "value");
  check_size(value, 2, key.size(2), "value");
  const int64_t batch = query.size(0), heads = query.size(1), tokens = query.size(2), keys = key.size(2);
  check(query.size(3) % 8 == 0, "the numbers of a token have to be a multiple of 8, got ", query.size(3), ".");
  check(
      key.size(1) > 0 ? heads % key.size(1) == 0 : heads == 0, "query has ", heads,
      " heads; they have to be a multiple of key's ", key.size(1), ".");
  check(
      layout_heads > 0 && heads % layout_heads == 0, "layout_heads is ", layout_heads, " for ", heads,
      " heads; it has to be a divisor of them.");
  if (rpe && rpe->dim() == 2)
    check_distance_bias(*rpe, query, key);
  else
    check_attention_bias(rpe, query, {batch, heads, tokens, keys}, {0, 1}, false, "rpe");
  check_attention_bias(attn_mask, query, {batch, heads, tokens, keys}, {0, 1, 2}, true, "attn_mask");
  check_attention_bias(key_bias, query, {batch, keys}, {0}, query.is_cuda(), "key_bias");
  check(!key_bias || key_bias->stride(1) == 1 || keys <= 1, "key_bias has to have its keys adjacent in memory.");
  check(dropout_p >= 0 && dropout_p < 1, "dropout_p has to be 0 or more and below 1.");
  check(dropout_p == 0 || dropout_seed, "dropout_p is more than 0 and needs a dropout_seed.");
  if (dropout_seed) {
    check_dim(*dropout_seed, 1, "dropout_seed");
    check_size(*dropout_seed, 0, 2, "dropout_seed");
    check_contiguous(*dropout_seed, "dropout_seed");
    check(dropout_seed->scalar_type() == ScalarType::Long, "dropout_seed has to be int64.");
    check(dropout_seed->device() == query.device(), "dropout_seed has to be on the device of the other arguments.");
  }
}

// Checks results of the forward pass, and their gradients. row_count: rows of statistics, where not one a query.
inline void check_attention_backward(
    const Tensor& grad_output, const std::optional<Tensor>& grad_lse, const Tensor& query, const Tensor& output,
    const Tensor& rows, std::optional<int64_t> row_count = {}) {
  for (auto [x, name] : {std::pair{&grad_output, "grad_output"}, {&output, "output"}}) {
    check_dim(*x, 4, name);
    check_like(*x, query, name);
    for (int64_t dim = 0; dim < 4; ++dim) check_size(*x, dim, query.size(dim), name);
  }
  auto check_statistics = [&](const Tensor& x, int64_t dims, const char* name) {
    check_dim(x, dims, name);
    for (int64_t dim = 0; dim < 2; ++dim) check_size(x, dim, query.size(dim), name);
    check_size(x, 2, row_count.value_or(query.size(2)), name);
    check(x.scalar_type() == lse_type(query), name, " has to be fp32, or fp64 for fp64.");
    check(x.device() == query.device(), name, " has to be on the device of the other arguments.");
  };
  check_statistics(rows, 4, "rows");
  check_size(rows, 3, 2, "rows");
  check_contiguous(rows, "rows");
  if (grad_lse) check_statistics(*grad_lse, 3, "grad_lse");
}

// Rows of `width` numbers.
inline void check_rows(const Tensor& x, int64_t width, const Tensor& other, const char* name) {
  check_dim(x, 2, name);
  check_size(x, 1, width, name);
  check(x.scalar_type() == ScalarType::Int, name, " has to be int32.");
  check(x.device() == other.device(), name, " has to be on the device of the other arguments.");
  check_contiguous(x, name);
}

// Tiles of the block lines of `tokens` tokens: block rows of the queries, or block columns of the keys.
inline void check_tiles(
    const Tensor& lines, const Tensor& entries, const Tensor& units, const Tensor& cuts, int64_t tokens,
    const Tensor& query, int64_t layout_heads, int64_t block, int64_t tile, bool bounded) {
  check_list(lines, query, "lines");
  check_list(entries, query, "entries");
  check_rows(units, 4, query, "units");
  check_rows(cuts, 3, query, "cuts");
  const int64_t per_tile = std::max<int64_t>(1, tile / block), blocks = (tokens + block - 1) / block;
  check_size(lines, 0, product({layout_heads, (blocks + per_tile - 1) / per_tile, per_tile}), "lines");
  check(
      !bounded || units.size(0) > lines.size(0) / per_tile,
      "bounded is true, and units has to have the last one, which tells their number.");
}

// Tokens of the tiles that products walk. sdd takes half of it for small blocks: thread blocks of fewer warps, more of
// them, were faster than columns shared by more lines.
constexpr int kProductTile = 128;
constexpr int64_t sdd_tile(int64_t block) { return block < 64 ? 64 : kProductTile; }

// Tiles that a product may be given beside its lists, all of it or none.
struct ProductTiles {
  int64_t tile;
  const std::optional<Tensor>&lines, &entries, &units, &slots;
  const std::optional<Tensor>* cuts = nullptr;  // null: the product has no use for them

  bool given() const { return lines.has_value(); }
};

// Tiles of the lines that `offsets` has.
inline void check_product_tiles(
    const ProductTiles& tiles, const Tensor& offsets, const Tensor& other, int64_t layout_heads, int64_t block) {
  for (const std::optional<Tensor>* x : {&tiles.entries, &tiles.units, &tiles.slots, tiles.cuts})
    check(x == nullptr || x->has_value() == tiles.given(), "tile_... have to be given together, or not at all.");
  if (!tiles.given()) return;
  check(block >= 16 && block <= 128, "tiles are for blocks of 16 to 128, got ", block, ".");
  const int64_t per_tile = tiles.tile / block, lines = (offsets.size(0) - 1) / layout_heads;
  check_list(*tiles.lines, other, "tile_lines");
  check_size(*tiles.lines, 0, layout_heads * ((lines + per_tile - 1) / per_tile) * per_tile, "tile_lines");
  check_list(*tiles.entries, other, "tile_entries");
  check_rows(*tiles.units, 4, other, "tile_units");
  check_rows(*tiles.slots, per_tile, other, "tile_slots");
  check_size(*tiles.slots, 0, tiles.entries->size(0), "tile_slots");
  check(
      reinterpret_cast<uintptr_t>(tiles.slots->const_data_ptr()) % 16 == 0,
      "tile_slots has to begin at a multiple of 16 bytes.");
  if (tiles.cuts != nullptr) check_rows(**tiles.cuts, 3, other, "tile_cuts");
}

// The shape of the gradient of what was added to the scores: (B or 1, H or 1, T, S).
inline void check_attention_bias_shape(const std::vector<int64_t>& shape, const Tensor& query, const Tensor& key) {
  check(
      shape.size() == 4 && (shape[0] == 1 || shape[0] == query.size(0)) &&
          (shape[1] == 1 || shape[1] == query.size(1)) && shape[2] == query.size(2) && shape[3] == key.size(2),
      "shape has to be (batch or 1, heads or 1, queries, keys).");
}

// Tensors of 4 dimensions, the first `equal` of them the same, and of one dtype and device.
inline void check_operands(std::initializer_list<std::pair<const Tensor*, const char*>> tensors, int64_t equal) {
  const Tensor& first = *tensors.begin()->first;
  for (auto [x, name] : tensors) {
    check_dim(*x, 4, name);
    check_like(*x, first, name);
    for (int64_t dim = 0; dim < equal; ++dim) check_size(*x, dim, first.size(dim), name);
  }
}

inline void check_window(int64_t window) {
  // 2w + 1 numbers for each token have to be countable.
  check(window >= 0 && window < int64_t{1} << 31, "window has to be 0 or more and below 2**31, got ", window, ".");
}

// A band, (B, H, T, 2w + 1).
inline void check_band(const Tensor& band, const char* name) {
  check_dim(band, 4, name);
  check(
      band.size(3) % 2 == 1, name, " has to have 2 * window + 1 numbers in the last dimension, got ", band.size(3),
      ".");
}

inline void check_window_softmax(
    const Tensor& band, const std::optional<Tensor>& key_bias, const std::vector<int64_t>& windows) {
  check_band(band, "band");
  check_contiguous(band, "band");
  check_attention_bias(key_bias, band, {band.size(0), band.size(2)}, {0}, false, "key_bias");
  check(
      !key_bias || key_bias->stride(1) == 1 || band.size(2) <= 1, "key_bias has to have its keys adjacent in memory.");
  check(
      windows.size() == 1 || static_cast<int64_t>(windows.size()) == band.size(1),
      "windows has to have one number, or one a head.");
  for (int64_t window : windows)
    check(
        window >= 0 && window <= band.size(3) / 2, "windows have to be 0 or more and at most the band's ",
        band.size(3) / 2, ".");
}

// Checks windowed attention's arguments that check_attention does not see.
inline void check_window_attention(
    const Tensor& query, const Tensor& key, const std::optional<Tensor>& key_bias, const Tensor& limits,
    const std::optional<Tensor>& places, int64_t num_global) {
  const int64_t tokens = query.size(2);
  check_size(key, 2, tokens, "key");
  check_attention_bias(key_bias, query, {query.size(0), query.size(1), 1, tokens}, {0, 1}, query.is_cuda(), "key_bias");
  check(
      !key_bias || key_bias->scalar_type() == lse_type(query) || key_bias->scalar_type() == ScalarType::Bool,
      "key_bias has to be fp32, fp64 for fp64, or on CUDA bool.");
  check(!key_bias || key_bias->stride(3) == 1 || tokens <= 1, "key_bias has to have its keys adjacent in memory.");
  auto check_numbers = [&](const Tensor& x, int64_t dim, const char* name) {
    check_dim(x, dim, name);
    check(x.size(0) == 1 || x.size(0) == query.size(1), name, " has to be of one head, or of all.");
    check_size(x, 1, tokens, name);
    check(x.scalar_type() == ScalarType::Int, name, " has to be int32.");
    check(x.device() == query.device(), name, " has to be on the device of the other arguments.");
    check_contiguous(x, name);
  };
  check_numbers(limits, 3, "limits");
  check_size(limits, 2, 2, "limits");
  if (places) check_numbers(*places, 2, "places");
  check(num_global >= 0 && num_global <= tokens, "num_global has to be between 0 and the tokens that there are.");
}

// Lists of `lines` tokens' pairs, and their entries.
inline void check_token_lists(
    const Tensor& offsets, const Tensor& entries, int64_t list_batch, int64_t list_heads, int64_t lines,
    const Tensor& x) {
  check_list(offsets, x, "offsets");
  check_list(entries, x, "entries");
  for (auto [given, size, name] :
       {std::tuple{list_batch, x.size(0), "list_batch"}, {list_heads, x.size(1), "list_heads"}})
    check(
        given == 1 || (given > 1 && given == size), name, " is ", given, " for ", size, "; it has to be 1 or as many.");
  check_size(offsets, 0, product({list_batch, list_heads, lines}) + 1, "offsets");
}

// The lines of each list, by its offsets.
inline int64_t lines_of(const Tensor& offsets, int64_t list_batch, int64_t list_heads, const Tensor& x) {
  check_list(offsets, x, "offsets");
  check(list_batch > 0 && list_heads > 0, "list_batch and list_heads have to be 1 or more.");
  const int64_t lists = product({list_batch, list_heads});
  check(
      offsets.size(0) > 0 && (offsets.size(0) - 1) % lists == 0,
      "offsets has to have one entry a line of each list, and one.");
  return (offsets.size(0) - 1) / lists;
}

// Tensors (B, H, tokens, D) of the same batch and heads.
inline void check_token_operands(std::initializer_list<std::pair<const Tensor*, const char*>> tensors) {
  check_operands(tensors, 2);
  for (auto [x, name] : tensors) check(x->size(3) > 0, name, " has to have numbers.");
}

// The heads whose values fill V > 0 blocks, where a layout of layout_heads heads has `live`.
inline int64_t heads_of(int64_t num_values, int64_t live, int64_t layout_heads) {
  check(
      layout_heads > 0 && live > 0 && product({num_values, layout_heads}) % live == 0,
      "values do not hold the live blocks of a whole number of heads.");
  return num_values * layout_heads / live;
}

}  // namespace ds_sparse
