// decode_attention_forward: its arguments, their checks, and what a query sees, once for all devices.
//
// A query at a position sees the keys of its block row's live blocks, with causality those up to its own position: the
// first `tokens` of these blocks' tokens, as causality and the end of the keys cut the last of them alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>

#include "checks.h"
#include "index.h"

namespace ds_sparse {

// The blocks that a query may see are those below `blocks`; of the last of them, `short_of` tokens are beyond.
struct SeenBlocks {
  int64_t row, blocks, short_of;

  constexpr SeenBlocks(int64_t position, int64_t keys, int64_t block, bool causal) : row(position / block) {
    const int64_t end = causal && position + 1 < keys ? position + 1 : keys;
    blocks = index::ceil_div(end, block);
    short_of = blocks * block - end;
  }

  // Word `number` of the row, all ones where it is null, without the blocks beyond.
  constexpr uint32_t word(const uint32_t* row_bits, int64_t number) const {
    return (row_bits == nullptr ? ~0u : row_bits[number]) & index::bits_between(number, 0, blocks);
  }
  constexpr int64_t words() const { return index::words_of(blocks); }
  // Tokens of so many live blocks.
  constexpr int64_t tokens(const uint32_t* row_bits, int64_t live, int64_t block) const {
    const int64_t last = blocks - 1;
    return live * block - (last >= 0 && word(row_bits, last / 32) >> last % 32 & 1 ? short_of : 0);
  }
};

struct DecodeCall {
  const Tensor &query, &key, &value;
  const std::optional<Tensor>& bits;  // none: all is live
  int64_t block;
  const std::optional<Tensor>& offsets;  // the position of each sequence's first query; none: `offset`
  int64_t offset;
  bool causal;
  const std::optional<Tensor>&keep, &sinks;
  double scale;

  int64_t batch() const { return query.size(0); }
  int64_t heads() const { return query.size(1); }
  int64_t tokens() const { return query.size(2); }
  int64_t head_dim() const { return query.size(3); }
  int64_t keys() const { return key.size(2); }
  int64_t rows() const { return bits ? bits->size(1) : INT64_MAX / block; }
  int64_t row_words() const { return bits ? bits->size(2) / 4 : 0; }
  int64_t heads_of_key() const { return heads() / key.size(1); }
  int64_t heads_of_layout() const { return bits ? heads() / bits->size(0) : heads(); }
  // The bits of a head's block row, or null.
  const uint32_t* row_bits(int64_t head, int64_t row) const {
    if (!bits) return nullptr;
    return static_cast<const uint32_t*>(bits->const_data_ptr()) +
           (head / heads_of_layout() * rows() + row) * row_words();
  }
  // Neighbouring heads that see the same keys.
  int64_t heads_alike() const { return std::gcd(heads_of_key(), heads_of_layout()); }

  void check_all() const {
    check_block(block);
    for (auto [x, name] : {std::pair{&query, "query"}, {&key, "key"}, {&value, "value"}}) {
      check_dim(*x, 4, name);
      check_like(*x, query, name);
      check_size(*x, 0, batch(), name);
      check_size(*x, 3, head_dim(), name);
      check(
          x->stride(3) == 1 || x->size(3) == 1 || x->numel() == 0, name,
          " has to have the numbers of a token adjacent in memory.");
    }
    check(head_dim() > 0, "query has to have numbers.");
    const auto check_heads = [&](int64_t given, const char* name) {
      check(
          given > 0 && heads() % given == 0, name, " has ", given, " heads, and query ", heads(),
          "; they have to be a multiple.");
    };
    check_heads(key.size(1), "key");
    check_size(value, 1, key.size(1), "value");
    check_size(value, 2, keys(), "value");
    check(keys() < INT32_MAX, "key has to have fewer than 2**31 tokens.");
    if (bits) {
      index::check_bits(*bits);
      check(bits->device() == query.device(), "bits has to be on the device of the other arguments.");
      check_heads(bits->size(0), "bits");
      check(
          rows() > 0 && keys() <= row_words() * 32 * block,
          "bits has to have one row at least, and a block for each of the ", keys(), " keys.");
    }
    check_query_offsets(offsets, offset, query);
    if (!offsets) {
      check(
          offset + tokens() <= rows() * block, "the last query is at ", offset + tokens() - 1,
          ", and bits has rows for ", rows() * block, " tokens.");
    }
    if (keep) {
      check_dim(*keep, 2, "keep");
      check(keep->size(0) == 1 || keep->size(0) == batch(), "keep has to have one row, or one a sequence.");
      check_size(*keep, 1, keys(), "keep");
      check(keep->scalar_type() == ScalarType::Bool, "keep has to be bool.");
      check(keep->device() == query.device(), "keep has to be on the device of the other arguments.");
    }
    if (sinks) {
      check_dim(*sinks, 1, "sinks");
      check_size(*sinks, 0, heads(), "sinks");
      check_contiguous(*sinks, "sinks");
      check(sinks->scalar_type() == lse_type(query), "sinks has to be fp32, or fp64 for fp64.");
      check(sinks->device() == query.device(), "sinks has to be on the device of the other arguments.");
    }
  }
};

}  // namespace ds_sparse
