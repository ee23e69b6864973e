// From an operator's tensors to what the kernels of fused attention take.

#pragma once

#include <algorithm>
#include <optional>

#include "../common/elements.h"
#include "../common/implementation.h"
#include "mainloop.h"
#include "passes.h"
#include "softmax.h"

namespace ds_sparse::attention {

template <class T>
Matrices<T> matrices_of(const Tensor& x) {
  const auto stride = [&](int dim) { return x.size(dim) == 1 ? 0 : x.stride(dim); };
  T* data = static_cast<T*>(const_cast<void*>(x.const_data_ptr()));
  if (x.dim() == 5 && has_even_rows(x)) {
    return {data, stride(0), stride(1), {x.size(3) == 1 ? stride(2) : stride(3), 0, 0}};
  }
  if (x.dim() == 5) {
    return {data, stride(0), stride(1), {stride(2), stride(3), log2_of(x.size(3))}};
  }
  return {data, stride(0), stride(1), {stride(2), 0, 0}};
}

inline RowMaxSum* row_max_sums_in(Tensor& x) { return reinterpret_cast<RowMaxSum*>(x.mutable_data_ptr<float>()); }

inline BlockSpans spans_of(const AttentionCall& call) {
  const int2* spans = call.spans ? reinterpret_cast<const int2*>(call.spans->const_data_ptr<int32_t>()) : nullptr;
  return {spans, log2_of(call.row_block())};
}

// of_rows: tiles of queries; else of keys.
inline TileLists lists_of(const AttentionCall& call, const TileTensors& tiles, bool of_rows) {
  const int64_t block = of_rows ? call.row_block() : call.block, other = of_rows ? call.block : call.row_block();
  const int64_t tile = call.tile, block_rows_per_tile = std::max<int64_t>(1, tile / block);
  const int2* own_spans =
      tiles.spans == nullptr ? nullptr : reinterpret_cast<const int2*>(tiles.spans->const_data_ptr<int32_t>());
  return {
      tiles.lines.const_data_ptr<int32_t>(),
      reinterpret_cast<const uint32_t*>(tiles.entries.const_data_ptr<int32_t>()),
      reinterpret_cast<const int4*>(tiles.units.const_data_ptr<int32_t>()),
      static_cast<int>(tiles.units.size(0) - call.bounded),
      static_cast<int>(block_rows_per_tile),
      static_cast<int>(tiles.lines.size(0) / block_rows_per_tile / call.all_layout_heads()),
      static_cast<int>(call.query.size(1)),
      static_cast<int>(call.layout_heads),
      static_cast<int>(call.heads_of_layout()),
      static_cast<int>(call.layout_heads == 1 ? 1 : call.heads_of_layout()),
      call.bounded,
      call.by_sequence,
      log2_of(block),
      log2_of(other),
      static_cast<int>(tile),
      static_cast<int>(std::max<int64_t>(1, block / tile)),
      tiles.pairs == nullptr ? nullptr : reinterpret_cast<const uint2*>(tiles.pairs->const_data_ptr<int32_t>()),
      tiles.pairs == nullptr || tiles.pairs->size(0) == 1 ? 0 : tiles.entries.size(0) * tile,
      spans_of(call),
      own_spans,
      own_spans == nullptr ? nullptr : own_spans + tiles.lines.size(0)};
}

// Space for so many numbers, perhaps none, while it lives.
struct Space {
  std::optional<Tensor> tensor;
  float* data = nullptr;

  Space(const Tensor& on, int64_t count) {
    if (count > 0) {
      tensor = empty_on(on, {count}, ScalarType::Float);
      data = tensor->mutable_data_ptr<float>();
    }
  }
};

// Counts the work tiles that are splits, or may be: each tile whose list is not split has one work tile. Without cuts
// there are none; work tiles that an index of unknown sizes has beyond one a tile then stay unused.
inline int64_t num_splits(const TileTensors& tiles, const TileLists& lists) {
  if (tiles.cuts.size(0) == 0) return 0;
  return lists.num_work_tiles - tiles.lines.size(0) / lists.block_rows_per_tile + tiles.cuts.size(0);
}

inline Bias bias_of(const std::optional<Tensor>& x, const Tensor& query) {
  if (!x) {
    return {};
  }
  const auto kind = x->scalar_type() == ScalarType::Bool      ? Bias::kBool
                    : x->scalar_type() == query.scalar_type() ? Bias::kSame
                                                              : Bias::kFloat;
  const auto stride = [&](int dim) { return x->size(dim) == 1 ? 0 : x->stride(dim); };
  if (x->dim() == 2) {  // by distance: a step to the next key is one ahead, to the next query one back
    const int64_t step = x->stride(1);
    const char* middle = static_cast<const char*>(x->const_data_ptr()) + x->size(1) / 2 * step * x->element_size();
    return {middle, kind, 0, stride(0), -step, step};
  }
  return {x->const_data_ptr(), kind, stride(0), stride(1), stride(2), stride(3)};
}

// Kernels read 16 bytes at a time.
inline void check_alignment(const Tensor& x, const char* name) {
  const int64_t run = 16 / x.element_size();
  bool aligned = reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
  for (int64_t dim = 0; dim + 1 < x.dim(); ++dim) {
    aligned = aligned && (x.size(dim) == 1 || x.stride(dim) % run == 0);
  }
  check(aligned, name, " has to begin at a multiple of 16 bytes, and its strides have to be such; make it contiguous.");
}

inline WindowLimits window_limits_of(const WindowTensors& window) {
  const Tensor& limits = window.limits;
  const std::optional<Tensor>& places = window.places;
  const auto stride = [](const Tensor& x) { return x.size(0) == 1 ? 0 : x.stride(0); };
  return {
      reinterpret_cast<const Range*>(limits.const_data_ptr<int32_t>()),
      places ? places->const_data_ptr<int32_t>() : nullptr, stride(limits) / 2, places ? stride(*places) : 0,
      static_cast<int>(window.num_global)};
}

inline ChosenBlocks chosen_blocks_of(const AttentionCall& call) {
  const ChosenTensors& chosen = *call.chosen;
  const std::optional<Tensor>& offsets = chosen.offsets;
  return {
      static_cast<const uint32_t*>(chosen.bits.const_data_ptr()),
      call.by_sequence ? call.layout_heads : 0,
      chosen.bits.size(1),
      chosen.bits.size(2) / 4,
      static_cast<int>(call.heads_of_layout()),
      log2_of(call.block),
      log2_of(chosen.rows_of_token),
      offsets ? offsets->const_data_ptr() : nullptr,
      chosen.offset,
      !offsets || offsets->size(0) == 1 ? 0 : offsets->stride(0),
      offsets && offsets->scalar_type() == ScalarType::Long};
}

// All but the bias of keys.
inline Scoring scoring_of(const AttentionCall& call) {
  const Tensor &query = call.query, &key = call.key;
  check_alignment(query, "query");
  check_alignment(key, "key");
  check_alignment(call.value, "value");
  Scoring scoring{};
  scoring.scale = static_cast<float>(call.scale);
  scoring.queries = static_cast<int>(call.queries());
  scoring.keys = static_cast<int>(call.keys());
  scoring.causal = call.causal;
  scoring.rpe = bias_of(call.rpe, query);
  scoring.attn_mask = bias_of(call.attn_mask, query);
  scoring.dropout_threshold = Dropout::threshold_of(call.dropout_p);
  if (call.dropout_seed && scoring.dropout_threshold > 0) {
    scoring.dropout_seed = call.dropout_seed->const_data_ptr<int64_t>();
  }
  scoring.softcap = static_cast<float>(call.softcap);
  if (call.window) {
    scoring.window = window_limits_of(*call.window);
  }
  if (call.chosen) {
    scoring.chosen = chosen_blocks_of(call);
  }
  return scoring;
}

// Calls f with the head size, padded to 64, 128 or 256.
template <class F>
void with_padded_head_dim(int64_t head_dim, const F& f) {
  if (head_dim <= 64) {
    f(std::integral_constant<int, 64>{});
  } else if (head_dim <= 128) {
    f(std::integral_constant<int, 128>{});
  } else {
    f(std::integral_constant<int, 256>{});
  }
}

// Calls f with a zero of the element type and the padded head size.
template <class F>
void with_head_dim(const Tensor& query, const F& f) {
  with_element<false>(query, "attention", [&](auto zero) {
    with_padded_head_dim(query.size(query.dim() - 1), [&](auto padded) { f(zero, padded); });
  });
}

// Calls f with whether scores are plain and not in a window, and nothing is dropped, where that has a kernel of its
// own.
template <class T, int kHeadDim, class F>
void with_plain(const Scoring& scoring, const F& f) {
  if constexpr (sizeof(T) == 2 && kHeadDim <= 128) {
    if (scoring.plain() && !scoring.drops() && scoring.window.limits == nullptr && scoring.chosen.bits == nullptr) {
      return f(std::true_type{});
    }
  }
  f(std::false_type{});
}

// Tells if a call is for Hopper's kernels; refuses a call that those cannot run.
inline bool runs_on_hopper(const Launcher& launch, const AttentionCall& call) {
  const bool on_hopper = is_for_hopper(launch, call.implementation);
  const Tensor& query = call.query;
  check(
      !on_hopper || (query.element_size() == 2 && call.head_dim() <= 128 && call.block >= 16),
      "implementation is \"hopper\", which is for fp16 and bf16, up to 128 numbers a token and blocks of 16 or more.");
  const int64_t wanted = on_hopper ? kHopperBlockM : kBlockM;
  check(
      call.tile == wanted, "tile has to be ", wanted, " for implementation \"", call.implementation, "\", got ",
      call.tile, ".");
  return on_hopper;
}

}  // namespace ds_sparse::attention
