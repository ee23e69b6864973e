// decode_attention_forward on the CPU; schema and letters in ../library.cpp.
//
// A thread does a query of neighbouring heads that see the same keys: it lists these from the layout's bits, and reads
// each once for all of the heads, where it lies.

#include "../decode.h"

#include <torch/csrc/stable/library.h>

#include <bit>
#include <cmath>
#include <tuple>
#include <type_traits>

#include "arguments.h"
#include "memory.h"
#include "operands.h"
#include "schedule.h"

namespace ds_sparse::cpu {

namespace {

// The positions of each sequence's first query.
std::vector<int64_t> positions_of(const DecodeCall& call) {
  std::vector<int64_t> positions(call.batch(), call.offset);
  if (!call.offsets) return positions;
  for (int64_t b = 0; b < call.batch(); ++b) {
    positions[b] = query_offset_of(call.offsets, call.offset, b);
    check(
        positions[b] >= 0 && positions[b] <= call.rows() * call.block - call.tokens(), "offsets has ", positions[b],
        ", and bits has rows for ", call.rows() * call.block, " tokens.");
  }
  return positions;
}

// The keys that a query of one sequence and head sees.
void list_keys(const DecodeCall& call, int64_t b, int64_t head, int64_t position, std::vector<int32_t>& list) {
  const SeenBlocks seen(position, call.keys(), call.block, call.causal);
  const uint32_t* row = call.row_bits(head, seen.row);
  list.clear();
  for (int64_t number = 0; number < seen.words(); ++number) {
    for (uint32_t left = seen.word(row, number); left != 0; left &= left - 1) {
      const int64_t block = 32 * number + std::countr_zero(left), first = block * call.block,
                    end = first + call.block - (block == seen.blocks - 1 ? seen.short_of : 0);
      for (int64_t key = first; key < end; ++key) list.push_back(static_cast<int32_t>(key));
    }
  }
  if (!call.keep) return;
  const bool* keep = pointer<bool>(*call.keep) + (call.keep->size(0) == 1 ? 0 : b * call.keep->stride(0));
  const int64_t stride = call.keep->stride(1);
  std::erase_if(list, [&](int32_t key) { return !keep[key * stride]; });
}

template <class T>
void run(const DecodeCall& call, Tensor& output, Tensor& lse) {
  using C = Compute<T>;
  const View query(call.query), key(call.key), value(call.value), out(output);
  const int64_t heads = call.heads(), tokens = call.tokens(), together = call.heads_alike(), groups = heads / together,
                head_dim = call.head_dim(), width = padded<T>(head_dim), heads_of_key = call.heads_of_key();
  const std::vector<int64_t> positions = positions_of(call);
  const C* sinks = call.sinks ? pointer<C>(*call.sinks) : nullptr;
  C* lse_to = static_cast<C*>(lse.mutable_data_ptr());
  run_tasks(call.batch() * tokens * groups, [&] {
    return [&, list = std::vector<int32_t>(), sums = Buffer<C>(together * width),
            row_max_sums = Buffer<C>(2 * together)](int64_t task) mutable {
      const int64_t first = task % groups * together, token = task / groups % tokens, b = task / groups / tokens;
      list_keys(call, b, first, positions[b] + token, list);
      const int64_t count = list.size();
      Buffer<C> scratch(decode_scratch(together, width, padded<T>(count)));
      kernels<T>().decode_attention(
          {tokens_of<T>(query, b, first, token), tokens_of<T>(key, b, first / heads_of_key, 0),
           tokens_of<T>(value, b, first / heads_of_key, 0), together, query.stride(1), key.stride(2), value.stride(2),
           head_dim, list.data(), count, C(call.scale), sums.data(), row_max_sums.data(), scratch.data()});
      for (int64_t h = 0; h < together; ++h) {
        const C row_max = row_max_sums.data()[2 * h], row_sum = row_max_sums.data()[2 * h + 1];
        C factor = count == 0 ? C(0) : 1 / row_sum, of_row = row_max + std::log(row_sum);
        if (sinks) {
          const C sink = sinks[first + h], largest = std::max(row_max, sink),
                  total = row_sum * std::exp(row_max - largest) + std::exp(sink - largest);
          factor = count == 0 ? C(0) : std::exp(row_max - largest) / total;
          of_row = count == 0 ? sink : largest + std::log(total);
        }
        C* row = sums.data() + h * width;
        for (int64_t c = 0; c < head_dim; ++c) row[c] *= factor;
        kernels<T>().store_rows(row, 0, 1, head_dim, false, mutable_tokens_of<T>(out, b, first + h, token), 0);
        lse_to[(b * heads + first + h) * tokens + token] = of_row;
      }
    };
  });
}

std::tuple<Tensor, Tensor> decode_attention_forward(
    Tensor query, Tensor key, Tensor value, std::optional<Tensor> bits, int64_t block, std::optional<Tensor> offsets,
    int64_t offset, bool causal, std::optional<Tensor> keep, std::optional<Tensor> sinks, double scale) {
  const DecodeCall call{query, key, value, bits, block, offsets, offset, causal, keep, sinks, scale};
  call.check_all();
  Tensor output = fresh(empty_on(query, {call.batch(), call.heads(), call.tokens(), call.head_dim()})),
         lse = empty_on(query, {call.batch(), call.heads(), call.tokens()}, lse_type(query));
  if (lse.numel() == 0) return {output, lse};
  for_dtype(query.scalar_type(), [&](auto* type) { run<std::remove_pointer_t<decltype(type)>>(call, output, lse); });
  return {output, lse};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CPU, m) {
  m.impl("decode_attention_forward", TORCH_BOX(&decode_attention_forward));
}

}  // namespace ds_sparse::cpu
