// selected_attention_forward and selected_attention_backward: their arguments and checks, once for all devices.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>

#include "checks.h"
#include "index.h"
#include "tensors.h"

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

  void check_all(int64_t tile) const {
    check_dim(query, 5, "query");
    check_attention(
        torch::stable::select(query, 3, 0), key, value, {}, key_bias, {}, {}, 0, bits_heads, block,
        std::min(tile, 8 * block));
    check_rows_of_tokens(query, "query");
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
    check_query_offsets(offsets, offset, query);
  }

  void check_results(
      const Tensor& grad_output, const std::optional<Tensor>& grad_lse, const Tensor& output,
      const Tensor& rows) const {
    for (auto [x, name] : {std::pair{&grad_output, "grad_output"}, {&output, "output"}}) {
      check_dim(*x, 5, name);
      check_like(*x, query, name);
      for (int64_t dim = 0; dim < 5; ++dim) check_size(*x, dim, query.size(dim), name);
      check_rows_of_tokens(*x, name);
    }
    const auto check_statistics = [&](const Tensor& x, int64_t dims, const char* name) {
      check_dim(x, dims, name);
      for (int64_t dim = 0; dim < 4; ++dim) check_size(x, dim, query.size(dim), name);
      check(x.scalar_type() == lse_type(query), name, " has to be fp32, or fp64 for fp64.");
      check(x.device() == query.device(), name, " has to be on the device of the other arguments.");
      check_contiguous(x, name);
    };
    check_statistics(rows, 5, "rows");
    check_size(rows, 4, 2, "rows");
    if (grad_lse) check_statistics(*grad_lse, 4, "grad_lse");
  }

 private:
  // The rows of a token are heads, as far apart as those are; or lie one behind the other, as those of tokens do.
  static void check_rows_of_tokens(const Tensor& x, const char* name) {
    check(
        has_even_rows(x) || x.size(1) <= 1 || x.stride(1) == x.size(3) * x.stride(3), name,
        " has to have rows that are heads, as far apart as those are, or that are one behind the other.");
    check(
        x.size(4) == 1 || x.stride(4) == 1 || x.numel() == 0, name,
        " has to have the numbers of a token adjacent in memory.");
  }
};

}  // namespace ds_sparse
