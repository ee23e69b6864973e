// From an operator's tensors to what the kernels of fused attention take.

#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "attention.h"

namespace ds_sparse::attention {

// An empty tensor (B, H, tokens, width) in the order of memory of `x`, (B, H, tokens, ...): heads within tokens or tokens
// within heads.
inline Tensor empty_in_order_of(const Tensor& x, int64_t width, ScalarType type) {
  const int64_t batch = x.size(0), heads = x.size(1), tokens = x.size(2);
  if (x.stride(1) < x.stride(2)) {
    return torch::stable::transpose(torch::stable::new_empty(x, {batch, tokens, heads, width}, type), 1, 2);
  }
  return torch::stable::new_empty(x, {batch, heads, tokens, width}, type);
}

template <class T>
Matrices<T> matrices_of(const Tensor& x) {
  const auto stride = [&](int dim) { return x.size(dim) == 1 ? 0 : x.stride(dim); };
  return {static_cast<T*>(const_cast<void*>(x.const_data_ptr())), stride(0), stride(1), stride(2)};
}

inline RowSum* row_sums_in(Tensor& x) { return reinterpret_cast<RowSum*>(x.mutable_data_ptr<float>()); }

inline Lists lists_of(
    const Tensor& lines, const Tensor& entries, const Tensor& units, int64_t layout_heads, int64_t block, int64_t tile) {
  const int64_t lines_per_tile = std::max<int64_t>(1, tile / block);
  return {
      lines.const_data_ptr<int32_t>(), reinterpret_cast<const uint32_t*>(entries.const_data_ptr<int32_t>()),
      reinterpret_cast<const int4*>(units.const_data_ptr<int32_t>()), static_cast<int>(units.size(0)),
      static_cast<int>(lines_per_tile), static_cast<int>(lines.size(0) / lines_per_tile / layout_heads),
      log2_of(block), static_cast<int>(tile), static_cast<int>(std::max<int64_t>(1, block / tile))};
}

// Of all units, those that are parts: each tile that is not cut has one unit.
inline int64_t num_parts(const Tensor& lines, const Tensor& units, const Tensor& cuts, const Lists& lists) {
  return units.size(0) - lines.size(0) / lists.lines_per_tile + cuts.size(0);
}

inline Bias bias_of(const std::optional<Tensor>& x, const Tensor& query) {
  if (!x) {
    return {};
  }
  const auto kind = x->scalar_type() == ScalarType::Bool             ? Bias::kBool
                    : x->scalar_type() == query.scalar_type() ? Bias::kSame
                                                              : Bias::kFloat;
  const auto stride = [&](int dim) { return x->size(dim) == 1 ? 0 : x->stride(dim); };
  return {x->const_data_ptr(), kind, stride(0), stride(1), stride(2), stride(3)};
}

// Kernels read 16 bytes at a time.
inline void check_alignment(const Tensor& x, const char* name) {
  const int64_t run = 16 / x.element_size();
  bool aligned = reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
  for (int dim = 0; dim < 3; ++dim) {
    aligned = aligned && (x.size(dim) == 1 || x.stride(dim) % run == 0);
  }
  check(
      aligned,
      std::string(name) + " has to begin at a multiple of 16 bytes, and its strides have to be such; make it contiguous.");
}

inline Scoring scoring_of(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& rpe,
    const std::optional<Tensor>& attn_mask, const std::optional<Tensor>& dropout_seed, double scale, bool causal,
    double dropout_p) {
  check_alignment(query, "query");
  check_alignment(key, "key");
  check_alignment(value, "value");
  Scoring scoring{
      static_cast<float>(scale), static_cast<int>(query.size(2)), static_cast<int>(key.size(2)), causal,
      bias_of(rpe, query), bias_of(attn_mask, query), nullptr, nullptr, 0, 0, false, nullptr, Dropout::threshold_of(dropout_p)};
  if (dropout_seed && scoring.dropout_threshold > 0) {
    scoring.dropout_seed = dropout_seed->const_data_ptr<int64_t>();
  }
  return scoring;
}

// Calls f with a zero of the element type.
template <class F>
void with_element(const Tensor& x, const F& f) {
  switch (x.scalar_type()) {
    case ScalarType::Half:
      return f(__half{});
    case ScalarType::BFloat16:
      return f(__nv_bfloat16{});
    case ScalarType::Float:
      return f(float{});
    default:
      check(false, "attention takes float16, bfloat16 and float32 on CUDA.");
  }
}

// Calls f with a zero of the element type and the head size, padded to 64, 128 or 256.
template <class F>
void with_width(const Tensor& query, const F& f) {
  with_element(query, [&](auto zero) {
    if (query.size(3) <= 64) {
      f(zero, std::integral_constant<int, 64>{});
    } else if (query.size(3) <= 128) {
      f(zero, std::integral_constant<int, 128>{});
    } else {
      f(zero, std::integral_constant<int, 256>{});
    }
  });
}

// Calls f with whether scores are plain, where that has a kernel of its own.
template <class T, int kD, class F>
void with_plain(const Scoring& scoring, const F& f) {
  if constexpr (sizeof(T) == 2 && kD <= 128) {
    if (scoring.plain()) {
      return f(std::true_type{});
    }
  }
  f(std::false_type{});
}

// The tiles that the kernels of a call take.
inline void check_tile(const Launcher& launch, const Tensor& query, int64_t block, int64_t tile) {
  const bool serves_hopper = query.element_size() == 2 && query.size(3) <= 128 && block >= 16;
  check(
      tile == kTile || (tile == kHopperTile && serves_hopper && launch.is_hopper()),
      "tile has to be 64; or 128 on a Hopper GPU, in fp16 or bf16, with up to 128 numbers a token and blocks of 16 or "
      "more; got " + std::to_string(tile) + ".");
}

}  // namespace ds_sparse::attention
