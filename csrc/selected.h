// selected_attention_forward and selected_attention_backward: their arguments and checks, once for all devices.
#pragma once

#include <optional>

#include "checks.h"
#include "index.h"

namespace ds_sparse {

// Queries (B, H, T, g, D) that have chosen blocks of keys for themselves: the g rows of a token are neighbouring heads
// that see the same keys. bits: (P, T, 4 * words), P heads of bits of all sequences or of each.
struct SelectedCall {
  const Tensor &query, &key, &value;
  const std::optional<Tensor>& key_bias;
  const Tensor& bits;
  const std::optional<Tensor>& offsets;  // the position of each sequence's first query; none: `offset`
  int64_t offset, bits_heads, block;
  double scale;
  bool causal;

  int64_t batch() const { return query.size(0); }
  int64_t heads() const { return query.size(1); }
  int64_t tokens() const { return query.size(2); }
  int64_t rows_of_token() const { return query.size(3); }
  int64_t head_dim() const { return query.size(4); }
  int64_t keys() const { return key.size(2); }
  bool by_sequence() const { return bits.size(0) != bits_heads; }

  // But for what key, value and key_bias have to be beside the rows of queries: check_attention.
  void check_all() const {
    check_dim(query, 5, "query");
    check(
        query.size(4) == 1 || query.stride(4) == 1 || query.numel() == 0,
        "query has to have the numbers of a token adjacent in memory.");
    const int64_t group = rows_of_token();
    check(
        group > 0 && group <= 16 && (group & (group - 1)) == 0, "query has to have 1, 2, 4, 8 or 16 rows a token, got ",
        group, ".");
    index::check_bits(bits);
    check(bits.device() == query.device(), "bits has to be on the device of the other arguments.");
    check(
        bits_heads > 0 && heads() % bits_heads == 0 &&
            (bits.size(0) == bits_heads || bits.size(0) == batch() * bits_heads),
        "bits_heads is ", bits_heads, " for ", heads(), " heads and ", bits.size(0),
        " of bits; it has to be a divisor of the first, and the second or what each sequence has of it.");
    check_size(bits, 1, tokens(), "bits");
    check(keys() <= bits.size(2) * 8 * block, "bits has to have a block for each of the ", keys(), " keys.");
    check(offset >= 0 && offset <= INT32_MAX, "offset has to be 0 or more and below 2**31, got ", offset, ".");
    if (offsets) {
      check_dim(*offsets, 1, "offsets");
      check(offsets->size(0) == 1 || offsets->size(0) == batch(), "offsets has to have one number, or one a sequence.");
      check(
          offsets->scalar_type() == ScalarType::Int || offsets->scalar_type() == ScalarType::Long,
          "offsets has to be int32 or int64.");
      check(offsets->device() == query.device(), "offsets has to be on the device of the other arguments.");
    }
  }
};

}  // namespace ds_sparse
