// The passes of attention on the CPU; schemas and letters in ../library.cpp.
//
// Work is by row strips, and takes from the tiles only their lists. Scores of a row strip are made a few blocks at a
// time and never stored. Backward goes once over the block columns, so that it makes them once: a task has neighbouring
// ones of a head, whose gradients of key and value it completes, and adds up gradients of query for the queries that
// see them, which are summed over tasks in the end. Tasks, and with them the orders of all sums, depend on sizes and
// lists alone.
//
// A masked pair has probability 0, and 0 times NaN is NaN. So packing says which blocks have a number that is not
// finite, and products leave out the masked pairs of those (`add_live_pairs` in attention.h).

#include <torch/csrc/stable/library.h>

#include <cmath>
#include <limits>
#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

#include "attention_passes.h"
#include "memory.h"
#include "operands.h"
#include "schedule.h"

namespace ds_sparse::cpu {

template <class C>
void dropout_factors(
    const Dropout& dropout, uint32_t matrix, int64_t query, int64_t key, int64_t queries, int64_t keys, C* out,
    int64_t query_stride, int64_t key_stride) {
  const C factor = C(32768) / C(32768 - dropout.threshold);
  // A square of 16 at a time, of which a block of 8 has a quarter; a result has eight of it, in the order of
  // Dropout::element.
  for (int64_t i0 = query / 16 * 16; i0 < query + queries; i0 += 16) {
    for (int64_t j0 = key / 16 * 16; j0 < key + keys; j0 += 16) {
      C square[16][16];
      for (int i = 0; i < 8; ++i) {
        for (int j = 0; j < 8; j += 2) {
          const Philox numbers = dropout.numbers(matrix, i0 + i, j0 + j);
          for (int e = 0; e < 8; ++e) {
            square[i + e / 2 % 2 * 8][j + e % 2 + e / 4 * 8] = numbers.number(e) >= dropout.threshold ? factor : C(0);
          }
        }
      }
      for (int64_t i = std::max(i0, query); i < std::min(i0 + 16, query + queries); ++i)
        for (int64_t j = std::max(j0, key); j < std::min(j0 + 16, key + keys); ++j)
          out[(i - query) * query_stride + (j - key) * key_stride] = square[i - i0][j - j0];
    }
  }
}

template void dropout_factors(const Dropout&, uint32_t, int64_t, int64_t, int64_t, int64_t, float*, int64_t, int64_t);
template void dropout_factors(const Dropout&, uint32_t, int64_t, int64_t, int64_t, int64_t, double*, int64_t, int64_t);

namespace {

// Forward packs keys and values of some heads at a time, so that they are read while they are in a cache, and their
// memory is not mapped anew at every call (memory.h): a window of 64 among 65,536 tokens of 4 heads takes 4 % less time
// in fp32 than with all of them packed at once, and 9 % less in bf16.
constexpr int64_t packed_bytes = int64_t{8} << 20;

// A task of attention's backward costs a part of all, so that there are enough of them for any number of threads ...
constexpr int64_t backward_tasks = 64;
// ... but no less than this, as each has its own packed queries and sums.
constexpr int64_t backward_cost = 128 * task_cost;

// The block rows as pieces of strip_rows tokens, where a score costs `cost`.
Pieces cut_row_strips(const Attention& attention, const BlockLists& lists, int64_t batch, int64_t cost) {
  Pieces pieces;
  for (int64_t head = 0; head < lists.heads(); ++head)
    for (int64_t row = 0; row < lists.block_rows; ++row)
      for (int64_t begin = 0; begin < attention.block; begin += attention.strip_rows)
        pieces.add(
            {head, row, begin, begin + attention.strip_rows},
            (lists.count(batch, head, row) * attention.block + 8) * attention.strip_rows * cost);
  return pieces;
}

// Key heads whose keys, and whose values, are packed at a time, `bytes` of either for each; of whole batches where
// heads have lists of their own, one at a time where sequences have.
int64_t heads_at_a_time(const Attention& attention, const BlockLists& lists, int64_t bytes) {
  if (lists.by_sequence) return attention.key_heads;
  int64_t together = lists.is_shared() ? 1 : attention.key_heads,
          count = std::max<int64_t>(1, packed_bytes / std::max<int64_t>(1, bytes * together));
  return std::min(count * together, attention.batch * attention.key_heads);
}

template <class T, class O>
void forward(
    const Attention& attention, const BlockLists& lists, const Tensor& output, const Tensor& lse,
    const Tensor& row_max_sums) {
  using C = Compute<T>;
  int64_t block = attention.block, rows = attention.strip_rows, width = padded<T>(attention.depth),
          depth = multiplicands_of<T, O>(attention.depth);
  Pieces pieces;
  const View query_view(attention.query), output_view(output);
  C *lse_data = static_cast<C*>(lse.mutable_data_ptr()), *max_sums = static_cast<C*>(row_max_sums.mutable_data_ptr());
  bool query_in_place = has_rows<T, O>(attention.query, depth), output_in_place = has_rows<T, C>(output, width);
  int64_t matrices = attention.batch * attention.key_heads,
          key_size = packed_size<T, O>(attention.key, block, width, Form::panels),
          value_size = packed_size<T, O>(attention.value, block, width, Form::dense),
          step = heads_at_a_time(attention, lists, std::max(key_size, value_size) * sizeof(O));
  Buffer<O> panels(step * key_size), values(step * value_size);
  Buffer<bool> spoilt(step * attention.columns);
  for (int64_t packed = 0; packed < matrices; packed += step) {
    int64_t packed_end = std::min(packed + step, matrices);
    if (packed == 0 || lists.by_sequence)
      pieces = cut_row_strips(attention, lists, packed / attention.key_heads, 2 * width);
    pack_matrices<T, O>(attention.key, packed, packed_end, block, width, Form::panels, panels.data(), nullptr);
    pack_matrices<T, O>(attention.value, packed, packed_end, block, width, Form::dense, values.data(), spoilt.data());
    run_pieces(pieces, packed * attention.group(), packed_end * attention.group(), attention.heads, lists.heads(), [&] {
      return [&, in_attention = InAttention<T, O>(), query = Buffer<O>(rows * depth), sum = Buffer<C>(rows * width),
              row_max = Buffer<C>(rows), row_sum = Buffer<C>(rows),
              scratch = Buffer<C>(attention_scratch(block))](int64_t b, int64_t head, const Piece& piece) {
        int64_t first = piece.row * block + piece.begin, count = lists.count(b, head, piece.row),
                matrix = b * attention.key_heads + head / attention.group() - packed;
        bool whole = first + rows <= attention.tokens, sum_in_place = whole && output_in_place;
        const O* left = query.data();
        if (whole && query_in_place)
          left = reinterpret_cast<const O*>(tokens_of<T>(query_view, b, head, first));
        else
          pack_tokens<T>(query_view, b, head, first, rows, depth, query.data());
        C* to_sum = sum_in_place ? reinterpret_cast<C*>(mutable_tokens_of<T>(output_view, b, head, first)) : sum.data();
        products<T, O>().attention_forward(
            attention.strip(b, head, first, depth, false), left, panels.data() + matrix * key_size,
            values.data() + matrix * value_size, spoilt.data() + matrix * attention.columns, width,
            lists.begin(b, head, piece.row), count, to_sum, row_max.data(), row_sum.data(), scratch.data());
        if (!sum_in_place) store_tokens<T>(sum.data(), width, b, head, first, rows, output_view);
        int64_t at = (b * attention.heads + head) * attention.tokens + first;
        C *lse_to = lse_data + at, *to = max_sums + 2 * at;
        // With nothing left the largest score is -inf and the sum 0.
        for (int64_t r = 0; r < std::min(rows, attention.tokens - first); ++r) {
          to[2 * r] = row_max.data()[r];
          to[2 * r + 1] = row_sum.data()[r];
          lse_to[r] = row_max.data()[r] + std::log(row_sum.data()[r]);
        }
      };
    });
  }
}

// RowStats of all queries, (B, H, rows * b). Where nothing is left, or no query is, inverse_sum and delta are 0.
template <class C>
struct AllRowStats {
  Buffer<C> row_max, inverse_sum, delta;

  explicit AllRowStats(int64_t size) : row_max(size), inverse_sum(size), delta(size) {}
  RowStats<C> from(int64_t at) const { return {row_max.data() + at, inverse_sum.data() + at, delta.data() + at}; }
};

template <class T>
AllRowStats<Compute<T>> row_stats_of(const Attention& attention, const AttentionResults& results) {
  using C = Compute<T>;
  constexpr C infinity = std::numeric_limits<C>::infinity();
  int64_t block = attention.block, depth = attention.depth, heads = attention.heads, tokens = attention.tokens,
          padded = attention.rows * block;
  AllRowStats<C> row_stats(attention.batch * heads * padded);
  int64_t grain = std::max<int64_t>(1, task_cost / 8 / (block * std::max<int64_t>(1, depth)));
  torch::stable::parallel_for(0, attention.batch * heads * attention.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      int64_t matrix = i / attention.rows, b = matrix / heads, head = matrix % heads,
              first = i % attention.rows * block, there = std::min(block, tokens - first), at = matrix * padded + first;
      auto from = [&](const Tensor& x) { return tokens_of<T>(x, b, head, first); };
      const Tensor &output = results.output, &grad = results.grad_output;
      C *row_max = row_stats.row_max.data() + at, *inverse_sum = row_stats.inverse_sum.data() + at,
        *delta = row_stats.delta.data() + at;
      std::fill(row_max, row_max + block, infinity);
      std::fill(inverse_sum, inverse_sum + block, C(0));
      std::fill(delta, delta + block, C(0));
      kernels<T>().row_dots(
          from(output), output.stride(2), output.stride(3), from(grad), grad.stride(2), grad.stride(3), there, depth,
          delta);
      const C* rows = pointer<C>(results.rows) + 2 * (matrix * tokens + first);
      for (int64_t r = 0; r < there; ++r) {
        if (rows[2 * r + 1] != 0) {  // NaN, where entries had no space, stays NaN
          row_max[r] = rows[2 * r];
          inverse_sum[r] = 1 / rows[2 * r + 1];
        }
        if (results.grad_lse) {
          const Tensor& x = *results.grad_lse;
          delta[r] -= pointer<C>(x)[b * x.stride(0) + head * x.stride(1) + (first + r) * x.stride(2)];
        }
        if (rows[2 * r + 1] == 0) delta[r] = 0;
      }
    }
  });
  return row_stats;
}

// Neighbouring block columns of a key head, for one task, and the block rows of its query heads that are live there;
// all block rows if it has the whole head.
struct ColumnGroup {
  int64_t key_head;    // 0 for a shared layout
  int64_t begin, end;  // block columns
  bool whole;
  std::vector<int32_t> blocks;
  std::vector<int32_t> slots;  // block row -> its place in blocks, or -1
};

std::vector<ColumnGroup> group_columns(
    const Attention& attention, const BlockLists& lists, int64_t batch, int64_t batches) {
  int64_t group = attention.group(), key_heads = lists.is_shared() ? 1 : attention.key_heads,
          repeats = batches * attention.key_heads / key_heads;
  auto cost_of = [&](int64_t key_head, int64_t column) {
    int64_t count = 1;
    for (int64_t h = 0; h < group; ++h) count += lists.count(batch, key_head * group + h, column);
    return 5 * count * attention.block * attention.block * std::max<int64_t>(8, attention.depth);
  };
  int64_t total = 0;
  for (int64_t key_head = 0; key_head < key_heads; ++key_head)
    for (int64_t column = 0; column < lists.block_rows; ++column) total += cost_of(key_head, column);
  int64_t limit = std::max(total * repeats / backward_tasks, backward_cost);

  std::vector<ColumnGroup> groups;
  for (int64_t key_head = 0; key_head < key_heads; ++key_head) {
    int64_t cost = limit;
    for (int64_t column = 0; column < lists.block_rows; ++column) {
      if (cost + cost_of(key_head, column) > limit) {
        groups.push_back({key_head, column, column, false, {}, std::vector<int32_t>(attention.rows, -1)});
        cost = 0;
      }
      cost += cost_of(key_head, column);
      ColumnGroup& last = groups.back();
      last.end = column + 1;
      for (int64_t h = key_head * group; h < (key_head + 1) * group; ++h) {
        const int32_t* block = lists.begin(batch, h, column);
        for (int64_t n = 0; n < lists.count(batch, h, column); ++n) last.slots[block[n]] = 0;
      }
    }
  }
  for (ColumnGroup& columns : groups) {
    columns.whole = columns.end - columns.begin == lists.block_rows;
    for (int64_t row = 0; row < attention.rows; ++row) {
      if (columns.slots[row] < 0 && !columns.whole) continue;
      columns.slots[row] = static_cast<int32_t>(columns.blocks.size());
      columns.blocks.push_back(static_cast<int32_t>(row));
    }
  }
  return groups;
}

// Of so many sequences from one on, which have the same lists.
template <class T, class O>
void backward(
    const Attention& attention, const AttentionResults& results, const BlockLists& lists, const Tensor& grad_query,
    const Tensor& grad_key, const Tensor& grad_value, int64_t first_batch, int64_t batches) {
  using C = Compute<T>;
  constexpr int64_t P = per_multiplicand<O>;
  int64_t block = attention.block, rows = attention.strip_rows, width = padded<T>(attention.depth),
          depth = multiplicands_of<T, O>(attention.depth), heads = attention.heads, key_heads = attention.key_heads,
          group = attention.group(), padded = attention.rows * block;
  const View query_view(attention.query), key_view(attention.key), value_view(attention.value),
      grad_output_view(results.grad_output), grad_query_view(grad_query), grad_key_view(grad_key),
      grad_value_view(grad_value);
  auto row_stats = row_stats_of<T>(attention, results);
  auto groups = group_columns(attention, lists, first_batch, batches);
  int64_t num_groups = groups.size(), repeats = lists.is_shared() ? key_heads : 1;

  // Gradients of query that are not of whole heads: for each batch, repeat and group (query head, slot, token, width).
  std::vector<int64_t> place(num_groups + 1, 0);
  int64_t most_slots = 0, most_whole = 0;
  for (int64_t g = 0; g < num_groups; ++g) {
    int64_t slots = groups[g].blocks.size();
    place[g + 1] = place[g] + (groups[g].whole ? 0 : group * slots * block * width);
    most_slots = std::max(most_slots, slots);
    if (groups[g].whole) most_whole = slots;
  }
  Buffer<C> sums(batches * repeats * place[num_groups]);

  run_tasks(batches * repeats * num_groups, [&] {
    int64_t tokens = most_slots * group * block;
    return [&, in_attention = InAttention<T, O>(), query = Buffer<O>(tokens * width / P),
            grad_output = Buffer<O>(tokens * width / P), query_panels = Buffer<O>(tokens * depth),
            grad_output_panels = Buffer<O>(tokens * depth), left = Buffer<O>(P == 1 ? 0 : block * width / P),
            row_max = Buffer<C>(tokens), inverse_sum = Buffer<C>(tokens), delta = Buffer<C>(tokens),
            key = Buffer<O>(rows * width / P), value = Buffer<O>(rows * width / P),
            dense_key = Buffer<O>(P == 1 ? 0 : rows * width / P), key_sum = Buffer<C>(rows * width),
            value_sum = Buffer<C>(rows * width), whole_query_sum = Buffer<C>(most_whole * group * block * width),
            scratch = Buffer<C>(attention_scratch(block)), spoilt = Buffer<bool>(most_slots * group),
            slots = std::vector<int32_t>(attention.rows)](int64_t task) mutable {
      const ColumnGroup& columns = groups[task % num_groups];
      int64_t repeat = task / num_groups, b = first_batch + repeat / repeats,
              key_head = columns.key_head + repeat % repeats, num_slots = columns.blocks.size();
      C* query_sum =
          columns.whole ? whole_query_sum.data() : sums.data() + repeat * place[num_groups] + place[task % num_groups];
      std::fill(query_sum, query_sum + group * num_slots * block * width, C(0));
      for (int64_t i = 0; i < group * num_slots; ++i) {
        int64_t head = key_head * group + i / num_slots, first = columns.blocks[i % num_slots] * block, at = i * block;
        auto pack = [&](const View& x, O* dense, O* panels) {
          pack_dense_tokens<T>(x, b, head, first, block, width, dense);
          const O* rows = dense;
          if constexpr (P > 1) {
            pack_tokens<T>(x, b, head, first, block, width / P, left.data());
            rows = left.data();
          }
          pack_block_panels(rows, width / P, block, depth, panels);
        };
        pack(query_view, query.data() + at / P * width, query_panels.data() + at * depth);
        pack(grad_output_view, grad_output.data() + at / P * width, grad_output_panels.data() + at * depth);
        auto from = row_stats.from((b * heads + head) * padded + first);
        std::copy(from.row_max, from.row_max + block, row_max.data() + at);
        std::copy(from.inverse_sum, from.inverse_sum + block, inverse_sum.data() + at);
        std::copy(from.delta, from.delta + block, delta.data() + at);
      }
      auto finite = [&](int64_t at, int64_t count) {
        return are_finite<T>(query.data() + at / P * width, count / P * width) &&
               are_finite<T>(grad_output.data() + at / P * width, count / P * width) &&
               are_finite<C>(delta.data() + at, count);
      };
      // All at once first, as that is how it is.
      bool all_finite = finite(0, group * num_slots * block);
      for (int64_t i = 0; i < group * num_slots; ++i) spoilt.data()[i] = !all_finite && !finite(i * block, block);
      for (int64_t first = columns.begin * block; first < columns.end * block; first += rows) {
        int64_t column = first / block;
        pack_tokens<T>(key_view, b, key_head, first, rows, width / P, key.data());
        pack_tokens<T>(value_view, b, key_head, first, rows, width / P, value.data());
        if constexpr (P > 1) pack_dense_tokens<T>(key_view, b, key_head, first, rows, width, dense_key.data());
        bool spoilt_own =
            !are_finite<T>(key.data(), rows * width / P) || !are_finite<T>(value.data(), rows * width / P);
        std::fill(key_sum.data(), key_sum.data() + rows * width, C(0));
        std::fill(value_sum.data(), value_sum.data() + rows * width, C(0));
        for (int64_t h = 0; h < group; ++h) {
          int64_t head = key_head * group + h, count = lists.count(b, head, column), at = h * num_slots * block;
          const int32_t* blocks = lists.begin(b, head, column);
          for (int64_t n = 0; n < count; ++n) slots[n] = columns.slots[blocks[n]];
          AttentionColumn<O> work{
              key.data(),
              value.data(),
              P == 1 ? key.data() : dense_key.data(),
              query.data() + at / P * width,
              grad_output.data() + at / P * width,
              query_panels.data() + at * depth,
              grad_output_panels.data() + at * depth,
              {row_max.data() + at, inverse_sum.data() + at, delta.data() + at},
              width,
              blocks,
              slots.data(),
              count,
              spoilt_own,
              spoilt.data() + h * num_slots,
              key_sum.data(),
              value_sum.data(),
              query_sum + at * width};
          products<T, O>().attention_backward(attention.strip(b, head, first, depth, true), work, scratch.data());
        }
        store_tokens<T>(key_sum.data(), width, b, key_head, first, rows, grad_key_view);
        store_tokens<T>(value_sum.data(), width, b, key_head, first, rows, grad_value_view);
      }
      for (int64_t h = 0; columns.whole && h < group; ++h)
        store_tokens<T>(query_sum + h * padded * width, width, b, key_head * group + h, 0, padded, grad_query_view);
    };
  });

  int64_t grain = std::max<int64_t>(1, task_cost / 8 / (block * std::max<int64_t>(1, width)));
  torch::stable::parallel_for(0, batches * heads * attention.rows, grain, [&](int64_t begin, int64_t end) {
    Buffer<C> sum(block * width);
    for (int64_t i = begin; i < end; ++i) {
      int64_t row = i % attention.rows, head = i / attention.rows % heads, sequence = i / attention.rows / heads,
              key_head = head / group;
      bool whole = false;
      std::fill(sum.data(), sum.data() + block * width, C(0));
      for (int64_t g = 0; g < num_groups; ++g) {
        if (repeats == 1 && groups[g].key_head != key_head) continue;
        int64_t slot = groups[g].slots[row];
        whole |= groups[g].whole;
        if (slot < 0 || whole) continue;
        const C* from = sums.data() + (sequence * repeats + (repeats == 1 ? 0 : key_head)) * place[num_groups] +
                        place[g] + (head % group * groups[g].blocks.size() + slot) * block * width;
        for (int64_t n = 0; n < block * width; ++n) sum.data()[n] += from[n];
      }
      if (!whole) store_tokens<T>(sum.data(), width, first_batch + sequence, head, row * block, block, grad_query_view);
    }
  });
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> attention_forward(const Attention& attention, const BlockLists& lists) {
  const Tensor& query = attention.query;
  Tensor output = fresh(empty_in_order_of(query));
  Tensor lse = empty_on(query, {query.size(0), query.size(1), query.size(2)}, lse_type(query));
  Tensor rows = empty_on(query, {query.size(0), query.size(1), query.size(2), 2}, lse_type(query));
  if (lse.numel() == 0) return {output, lse, rows};
  for_dtype(query.scalar_type(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for_multiplicands<T>(attention.block, [&](auto* multiplicand) {
      forward<T, std::remove_pointer_t<decltype(multiplicand)>>(attention, lists, output, lse, rows);
    });
  });
  return {output, lse, rows};
}

std::tuple<Tensor, Tensor, Tensor> attention_backward(
    const Attention& attention, const AttentionResults& results, const BlockLists& lists) {
  Tensor grad_query = fresh(empty_in_order_of(attention.query)), grad_key = fresh(empty_in_order_of(attention.key)),
         grad_value = fresh(empty_in_order_of(attention.value));
  if (attention.batch * attention.heads > 0) {
    for_dtype(attention.query.scalar_type(), [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      for_multiplicands<T>(attention.block, [&](auto* multiplicand) {
        const int64_t together = lists.by_sequence ? 1 : attention.batch;
        for (int64_t first = 0; first < attention.batch; first += together)
          backward<T, std::remove_pointer_t<decltype(multiplicand)>>(
              attention, results, lists, grad_query, grad_key, grad_value, first, together);
      });
    });
  } else {
    for (Tensor* grad : {&grad_key, &grad_value}) torch::stable::zero_(*grad);
  }
  return {grad_query, grad_key, grad_value};
}

namespace {

// A task owns the rows of one row strip in one output matrix, and adds in the order batch, head.
template <class T, class O>
void bias_backward(
    const Attention& attention, const AttentionResults& results, const BlockLists& lists, const Tensor& out) {
  using C = Compute<T>;
  int64_t block = attention.block, rows = attention.strip_rows, width = padded<T>(attention.depth),
          depth = multiplicands_of<T, O>(attention.depth), keys = attention.columns * block, heads = attention.heads,
          padded = attention.rows * block, strips = padded / rows, out_batch = out.size(0), out_heads = out.size(1);
  auto row_stats = row_stats_of<T>(attention, results);
  auto key_panels = pack_all<T, O>(attention.key, block, width, Form::panels);
  auto value_panels = pack_all<T, O>(attention.value, block, width, Form::panels);
  run_tasks(out_batch * out_heads * strips, [&] {
    return [&, in_attention = InAttention<T, O>(), query = Buffer<O>(rows * depth),
            grad_output = Buffer<O>(rows * depth), scratch = Buffer<C>(attention_scratch(block))](int64_t task) {
      int64_t first = task % strips * rows, row = first / block, out_head = task / strips % out_heads,
              out_b = task / strips / out_heads, there = std::min(rows, attention.tokens - first);
      if (there <= 0) return;
      C* to = static_cast<C*>(out.mutable_data_ptr()) + (task / strips * attention.tokens + first) * attention.keys;
      std::fill(to, to + there * attention.keys, C(0));
      for (int64_t b = out_batch == 1 ? 0 : out_b; b < (out_batch == 1 ? attention.batch : out_b + 1); ++b) {
        for (int64_t head = out_heads == 1 ? 0 : out_head; head < (out_heads == 1 ? heads : out_head + 1); ++head) {
          int64_t matrix = (b * attention.key_heads + head / attention.group()) * keys * depth;
          pack_tokens<T>(attention.query, b, head, first, rows, depth, query.data());
          pack_tokens<T>(results.grad_output, b, head, first, rows, depth, grad_output.data());
          products<T, O>().attention_bias_backward(
              attention.strip(b, head, first, depth, false), query.data(), grad_output.data(),
              key_panels.data() + matrix, value_panels.data() + matrix,
              row_stats.from((b * heads + head) * padded + first), lists.begin(b, head, row), lists.count(b, head, row),
              to, attention.keys, scratch.data());
        }
      }
    };
  });
}

}  // namespace

Tensor attention_bias_backward(
    const Attention& attention, const AttentionResults& results, const BlockLists& lists,
    const std::vector<int64_t>& shape) {
  Tensor out = fresh(empty_on(attention.query, shape, lse_type(attention.query)));
  if (out.numel() == 0) return out;
  if (attention.batch * attention.heads == 0) return torch::stable::zero_(out);
  for_dtype(attention.query.scalar_type(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for_multiplicands<T>(attention.block, [&](auto* multiplicand) {
      bias_backward<T, std::remove_pointer_t<decltype(multiplicand)>>(attention, results, lists, out);
    });
  });
  return out;
}

}  // namespace ds_sparse::cpu
