// Attention of queries that have chosen blocks of keys for themselves, on the CPU; schemas and letters in
// ../library.cpp.
//
// A row strip is 16 rows, those of one token or of several, against the union of the blocks that these have chosen;
// what one of them has not chosen is masked (ChosenBlocks). So the kernels of attention do the arithmetic
// (attention.h). Backward goes through the queries in chunks, whose gradients are complete in a chunk, and adds up
// gradients of keys and values by chunk, which are summed in their order in the end. Chunks depend on sizes alone, and
// with them all sums.

#include "../selected.h"

#include <torch/csrc/stable/library.h>

#include <bit>
#include <cmath>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "../implementation.h"
#include "arguments.h"
#include "memory.h"
#include "operands.h"
#include "schedule.h"

namespace ds_sparse::cpu {

namespace {

constexpr int64_t strip_rows = chosen_rows;

// Parts of the backward pass: as many as keep any number of threads busy, while their gradients of keys and values, in
// fp32, stay below this, or below as many of queries.
constexpr int64_t backward_chunks = 64, backward_bytes = int64_t{256} << 20;

// Row strips of queries that are packed at a time.
constexpr int64_t packed_strips = 256;

// Rows of queries, (B, H, T, g, D), numbered t * g + i.
template <class T>
struct Rows {
  const T* data;
  int64_t strides[5], sizes[5];

  explicit Rows(const Tensor& x) : data(pointer<T>(x)) {
    for (int dim = 0; dim < 5; ++dim) {
      strides[dim] = x.stride(dim);
      sizes[dim] = x.size(dim);
    }
  }
  const T* row(int64_t b, int64_t head, int64_t number) const {
    return data + b * strides[0] + head * strides[1] + number / sizes[3] * strides[2] + number % sizes[3] * strides[3];
  }
  int64_t count() const { return sizes[2] * sizes[3]; }
  // Calls f(first, rows, stride) for the runs of up to `rows` rows from one on that there are, of one stride each.
  template <class F>
  void in_runs(int64_t first, int64_t rows, const F& f) const {
    const int64_t end = std::min(first + rows, count());
    for (int64_t at = first; at < end;) {
      const int64_t run = sizes[3] == 1 ? end - at : std::min(sizes[3] - at % sizes[3], end - at);
      f(at, run, sizes[3] == 1 ? strides[2] : strides[3]);
      at += run;
    }
  }
};

struct Shape {
  int64_t batch, heads, key_heads, rows, rows_of_token, keys, depth, block, strips, columns;

  explicit Shape(const SelectedCall& call)
      : batch(call.batch()),
        heads(call.heads()),
        key_heads(call.key.size(1)),
        rows(call.tokens() * call.rows_of_token()),
        rows_of_token(call.rows_of_token()),
        keys(call.keys()),
        depth(call.head_dim()),
        block(call.block),
        strips(blocks_of(rows, strip_rows)),
        columns(blocks_of(keys, block)) {}
  int64_t heads_of_key() const { return heads / key_heads; }
};

void check_positions(const SelectedCall& call) {
  for (int64_t b = 0; b < call.batch(); ++b) {
    const int64_t position = query_offset_of(call.offsets, call.offset, b);
    check(position >= 0 && position <= INT32_MAX, "offsets has ", position, "; it has to be 0 or more, below 2**31.");
  }
}

ChosenBlocks chosen_of(const SelectedCall& call, int64_t b, int64_t head) {
  const int64_t words = call.bits.size(2) / 4,
                of = (call.by_sequence() ? b * call.bits_heads : 0) + head / (call.heads() / call.bits_heads);
  return {
      pointer<uint32_t>(call.bits) + of * call.tokens() * words, words, call.rows_of_token(), call.block,
      query_offset_of(call.offsets, call.offset, b)};
}

// The blocks that some of a strip's queries have chosen, and see a token of.
void list_blocks(
    const SelectedCall& call, const Shape& shape, const ChosenBlocks& chosen, int64_t strip,
    std::vector<int32_t>& blocks) {
  const int64_t first = strip * strip_rows / shape.rows_of_token,
                last = (std::min((strip + 1) * strip_rows, shape.rows) - 1) / shape.rows_of_token;
  int64_t end = shape.columns;
  if (call.causal) end = std::min(end, std::max<int64_t>(0, chosen.offset + last) / shape.block + 1);
  blocks.clear();
  for (int64_t w = 0; 32 * w < end; ++w) {
    uint32_t word = 0;
    for (int64_t token = first; token <= last; ++token) word |= chosen.words[token * chosen.words_of_token + w];
    for (word &= index::bits_between(w, 0, end); word != 0; word &= word - 1)
      blocks.push_back(static_cast<int32_t>(32 * w + std::countr_zero(word)));
  }
}

AttentionRowStrip strip_of(
    const SelectedCall& call, const Shape& shape, const std::optional<BiasView>& bias, const ChosenBlocks& chosen,
    int64_t b, int64_t first, int64_t rows, int64_t multiplicands, bool transposed) {
  AttentionRowStrip strip{};
  strip.transposed = transposed;
  strip.block = transposed ? strip_rows : shape.block;
  strip.depth = multiplicands;
  strip.first = first;
  strip.rows = rows;
  strip.row_end = transposed ? shape.keys : shape.rows;
  strip.column_end = transposed ? shape.rows : shape.keys;
  strip.scale = call.scale;
  strip.causal = call.causal;
  strip.chosen = &chosen;
  if (bias) {
    strip.biases[0] = bias->at(b, 0);
    if (transposed) std::swap(strip.biases[0].row_stride, strip.biases[0].column_stride);
    strip.num_biases = 1;
  }
  return strip;
}

std::optional<BiasView> bias_of(const SelectedCall& call) {
  if (!call.key_bias) return std::nullopt;
  return BiasView(*call.key_bias, call.query.scalar_type());
}

template <class T, class O>
void pack_rows_of(const Rows<T>& x, int64_t b, int64_t head, int64_t first, int64_t width, O* out) {
  constexpr int64_t P = per_multiplicand<O>;
  std::fill(out, out + strip_rows * width, O{});
  x.in_runs(first, strip_rows, [&](int64_t at, int64_t rows, int64_t stride) {
    products<T, O>().pack_rows(
        x.row(b, head, at), stride, x.strides[4], rows, x.sizes[4],
        reinterpret_cast<Number<O>*>(out + (at - first) * width), width * P);
  });
}

template <class T>
void store_rows_of(const Compute<T>* sums, int64_t width, const Rows<T>& x, int64_t b, int64_t head, int64_t first) {
  x.in_runs(first, strip_rows, [&](int64_t at, int64_t rows, int64_t stride) {
    kernels<T>().store_rows(
        sums + (at - first) * width, width, rows, x.sizes[4], false, const_cast<T*>(x.row(b, head, at)), stride);
  });
}

template <class T, class O>
void forward(const SelectedCall& call, const Tensor& output, const Tensor& lse, const Tensor& row_max_sums) {
  using C = Compute<T>;
  const Shape shape(call);
  const Rows<T> query(call.query), out(output);
  const std::optional<BiasView> bias = bias_of(call);
  const int64_t width = padded<T>(shape.depth), depth = multiplicands_of<T, O>(shape.depth);
  C *lse_data = static_cast<C*>(lse.mutable_data_ptr()), *max_sums = static_cast<C*>(row_max_sums.mutable_data_ptr());
  Buffer<O> panels(packed_size<T, O>(call.key, shape.block, width, Form::panels)),
      values(packed_size<T, O>(call.value, shape.block, width, Form::dense));
  Buffer<bool> spoilt(shape.columns);
  for (int64_t matrix = 0; matrix < shape.batch * shape.key_heads; ++matrix) {
    pack_matrices<T, O>(call.key, matrix, matrix + 1, shape.block, width, Form::panels, panels.data(), nullptr);
    pack_matrices<T, O>(call.value, matrix, matrix + 1, shape.block, width, Form::dense, values.data(), spoilt.data());
    const int64_t b = matrix / shape.key_heads, first_head = matrix % shape.key_heads * shape.heads_of_key();
    run_tasks(shape.heads_of_key() * shape.strips, [&] {
      return
          [&, in_attention = InAttention<T, O>(), blocks = std::vector<int32_t>(), left = Buffer<O>(strip_rows * depth),
           sum = Buffer<C>(strip_rows * width), row_max = Buffer<C>(strip_rows), row_sum = Buffer<C>(strip_rows),
           scratch = Buffer<C>(attention_scratch(shape.block))](int64_t task) mutable {
            const int64_t head = first_head + task / shape.strips, first = task % shape.strips * strip_rows;
            const ChosenBlocks chosen = chosen_of(call, b, head);
            list_blocks(call, shape, chosen, task % shape.strips, blocks);
            pack_rows_of<T, O>(query, b, head, first, depth, left.data());
            products<T, O>().attention_forward(
                strip_of(call, shape, bias, chosen, b, first, strip_rows, depth, false), left.data(), panels.data(),
                values.data(), spoilt.data(), width, blocks.data(), blocks.size(), sum.data(), row_max.data(),
                row_sum.data(), scratch.data());
            store_rows_of<T>(sum.data(), width, out, b, head, first);
            const int64_t at = (b * shape.heads + head) * shape.rows + first;
            for (int64_t r = 0; r < std::min(strip_rows, shape.rows - first); ++r) {
              max_sums[2 * (at + r)] = row_max.data()[r];
              max_sums[2 * (at + r) + 1] = row_sum.data()[r];
              lse_data[at + r] = row_max.data()[r] + std::log(row_sum.data()[r]);
            }
          };
    });
  }
}

struct Results {
  const Tensor& grad_output;
  const std::optional<Tensor>& grad_lse;
  const Tensor &output, &rows;
};

// Statistics of a strip's rows, as RowStats has them. Where nothing is left, or no row is, inverse_sum and delta are 0.
template <class T>
void row_stats_of(
    const Shape& shape, const Results& results, const Rows<T>& output, const Rows<T>& grad_output, int64_t b,
    int64_t head, int64_t first, Compute<T>* row_max, Compute<T>* inverse_sum, Compute<T>* delta) {
  using C = Compute<T>;
  std::fill(row_max, row_max + strip_rows, std::numeric_limits<C>::infinity());
  std::fill(inverse_sum, inverse_sum + strip_rows, C(0));
  std::fill(delta, delta + strip_rows, C(0));
  const int64_t at = (b * shape.heads + head) * shape.rows;
  const C *max_sums = pointer<C>(results.rows) + 2 * at,
          *grad_lse = results.grad_lse ? pointer<C>(*results.grad_lse) + at : nullptr;
  grad_output.in_runs(first, strip_rows, [&](int64_t from, int64_t rows, int64_t stride) {
    kernels<T>().row_dots(
        output.row(b, head, from), output.sizes[3] == 1 ? output.strides[2] : output.strides[3], output.strides[4],
        grad_output.row(b, head, from), stride, grad_output.strides[4], rows, shape.depth, delta + (from - first));
  });
  for (int64_t r = 0; r < std::min(strip_rows, shape.rows - first); ++r) {
    const C sum = max_sums[2 * (first + r) + 1];
    if (sum == 0) {
      delta[r] = 0;
      continue;
    }
    row_max[r] = max_sums[2 * (first + r)];
    inverse_sum[r] = 1 / sum;
    if (grad_lse) delta[r] -= grad_lse[first + r];
  }
}

template <class T, class O>
void backward(
    const SelectedCall& call, const Results& results, const Tensor& grad_query, const Tensor& grad_key,
    const Tensor& grad_value) {
  using C = Compute<T>;
  constexpr int64_t P = per_multiplicand<O>;
  const Shape shape(call);
  const Rows<T> query(call.query), output(results.output), grad_output(results.grad_output), to_query(grad_query);
  const View to_key(grad_key), to_value(grad_value);
  const std::optional<BiasView> bias = bias_of(call);
  const int64_t width = padded<T>(shape.depth), depth = multiplicands_of<T, O>(shape.depth), block = shape.block;
  const int64_t matrices = shape.batch * shape.key_heads, padded_keys = shape.columns * block,
                own_rows = std::min<int64_t>(block, 128), size = padded_keys * width;
  const int64_t all_strips = shape.heads_of_key() * shape.strips;
  const int64_t of_chunk = std::max<int64_t>(1, matrices * 2 * size * int64_t{sizeof(C)}),
                of_queries = shape.batch * shape.heads * shape.rows * width * int64_t{sizeof(C)};
  const int64_t chunks = std::clamp<int64_t>(
      std::min(backward_chunks / matrices, std::max(backward_bytes, of_queries) / of_chunk), 1, all_strips);
  // Keys and values as rows, and keys as dense rows too, of all matrices.
  const int64_t packed = size / P;
  Buffer<O> keys(matrices * packed), values(matrices * packed), dense_keys(P == 1 ? 0 : matrices * packed);
  Buffer<bool> spoilt_keys(matrices * shape.columns), spoilt_values(matrices * shape.columns);
  pack_matrices<T, O>(call.key, 0, matrices, block, width, Form::rows, keys.data(), spoilt_keys.data());
  pack_matrices<T, O>(call.value, 0, matrices, block, width, Form::rows, values.data(), spoilt_values.data());
  if constexpr (P > 1)
    pack_matrices<T, O>(call.key, 0, matrices, block, width, Form::dense, dense_keys.data(), nullptr);
  Buffer<C> sums(matrices * chunks * 2 * size);

  run_tasks(matrices * chunks, [&] {
    const int64_t most = std::min(packed_strips, index::ceil_div(all_strips, chunks)), rows = most * strip_rows;
    return [&, most, in_attention = InAttention<T, O>(), queries = Buffer<O>(rows * width / P),
            grads = Buffer<O>(rows * width / P), query_panels = Buffer<O>(rows * depth),
            grad_panels = Buffer<O>(rows * depth), left = Buffer<O>(strip_rows * width / P), row_max = Buffer<C>(rows),
            inverse_sum = Buffer<C>(rows), delta = Buffer<C>(rows), query_sum = Buffer<C>(rows * width),
            scratch = Buffer<C>(attention_scratch(std::max<int64_t>(block, 128))), spoilt = Buffer<bool>(most),
            blocks = std::vector<int32_t>(), numbers = std::vector<int32_t>(), slots = std::vector<int32_t>(),
            of_column = std::vector<std::vector<int32_t>>(shape.columns)](int64_t task) mutable {
      const int64_t matrix = task / chunks, chunk = task % chunks, b = matrix / shape.key_heads,
                    first_head = matrix % shape.key_heads * shape.heads_of_key();
      C *key_sum = sums.data() + task * 2 * size, *value_sum = key_sum + size;
      std::fill(key_sum, key_sum + 2 * size, C(0));
      const int64_t end = all_strips * (chunk + 1) / chunks;
      // Strips of one head at a time.
      for (int64_t begin = all_strips * chunk / chunks; begin < end;) {
        const int64_t head = first_head + begin / shape.strips, first = begin % shape.strips,
                      count = std::min({most, end - begin, shape.strips - first});
        const ChosenBlocks chosen = chosen_of(call, b, head);
        for (auto& list : of_column) list.clear();
        std::fill(query_sum.data(), query_sum.data() + count * strip_rows * width, C(0));
        for (int64_t i = 0; i < count; ++i) {
          const int64_t at = i * strip_rows, row = (first + i) * strip_rows;
          list_blocks(call, shape, chosen, first + i, blocks);
          for (int32_t column : blocks) of_column[column].push_back(static_cast<int32_t>(i));
          const auto pack = [&](const Rows<T>& x, O* dense, O* panels) {
            pack_rows_of<T, O>(x, b, head, row, width / P, left.data());
            pack_block_panels(left.data(), width / P, strip_rows, depth, panels);
            if constexpr (P == 1) {
              std::copy(left.data(), left.data() + strip_rows * width, dense);
            } else {
              std::fill(dense, dense + strip_rows / P * width, O{});
              x.in_runs(row, strip_rows, [&](int64_t from, int64_t rows, int64_t stride) {
                products<T, O>().pack_dense(
                    x.row(b, head, from), stride, x.strides[4], rows, x.sizes[4], dense + (from - row) / P * width,
                    width);
              });
            }
          };
          pack(query, queries.data() + at / P * width, query_panels.data() + at * depth);
          pack(grad_output, grads.data() + at / P * width, grad_panels.data() + at * depth);
          row_stats_of<T>(
              shape, results, output, grad_output, b, head, row, row_max.data() + at, inverse_sum.data() + at,
              delta.data() + at);
          spoilt.data()[i] = !are_finite<T>(queries.data() + at / P * width, strip_rows / P * width) ||
                             !are_finite<T>(grads.data() + at / P * width, strip_rows / P * width) ||
                             !are_finite<C>(delta.data() + at, strip_rows);
        }
        for (int64_t column = 0; column < shape.columns; ++column) {
          slots = of_column[column];
          if (slots.empty()) continue;
          numbers.resize(slots.size());
          for (size_t n = 0; n < slots.size(); ++n) numbers[n] = static_cast<int32_t>(first + slots[n]);
          const bool spoilt_own = spoilt_keys.data()[matrix * shape.columns + column] ||
                                  spoilt_values.data()[matrix * shape.columns + column];
          for (int64_t key = column * block; key < std::min((column + 1) * block, shape.keys); key += own_rows) {
            const int64_t from = matrix * packed + key * width / P;
            const AttentionColumn<O> work{
                keys.data() + from,
                values.data() + from,
                P == 1 ? keys.data() + from : dense_keys.data() + from,
                queries.data(),
                grads.data(),
                query_panels.data(),
                grad_panels.data(),
                {row_max.data(), inverse_sum.data(), delta.data()},
                width,
                numbers.data(),
                slots.data(),
                static_cast<int64_t>(slots.size()),
                spoilt_own,
                spoilt.data(),
                key_sum + key * width,
                value_sum + key * width,
                query_sum.data()};
            products<T, O>().attention_backward(
                strip_of(call, shape, bias, chosen, b, key, own_rows, depth, true), work, scratch.data());
          }
        }
        for (int64_t i = 0; i < count; ++i)
          store_rows_of<T>(
              query_sum.data() + i * strip_rows * width, width, to_query, b, head, (first + i) * strip_rows);
        begin += count;
      }
    };
  });

  torch::stable::parallel_for(0, matrices * shape.columns, 1, [&](int64_t begin, int64_t end) {
    Buffer<C> sum(block * width);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t matrix = i / shape.columns, first = i % shape.columns * block;
      for (int64_t of = 0; of < 2; ++of) {
        std::fill(sum.data(), sum.data() + block * width, C(0));
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
          const C* from = sums.data() + (matrix * chunks + chunk) * 2 * size + of * size + first * width;
          for (int64_t n = 0; n < block * width; ++n) sum.data()[n] += from[n];
        }
        store_tokens<T>(
            sum.data(), width, matrix / shape.key_heads, matrix % shape.key_heads, first, block,
            of == 0 ? to_key : to_value);
      }
    }
  });
}

std::tuple<Tensor, Tensor, Tensor> selected_forward(
    Tensor query, Tensor key, Tensor value, std::optional<Tensor> key_bias, Tensor bits, std::optional<Tensor> offsets,
    int64_t offset, std::optional<Tensor>, std::optional<Tensor>, std::optional<Tensor>, std::optional<Tensor>,
    int64_t bits_heads, int64_t /*most*/, int64_t block, int64_t tile, double scale, bool causal,
    std::string implementation) {
  const SelectedCall call{query, key, value, key_bias, bits, offsets, offset, bits_heads, block, scale, causal};
  check_implementation(implementation, "cpu");
  call.check_all(tile);
  check_positions(call);
  Tensor output = fresh(empty_in_order_of(query));
  const int64_t sizes[] = {call.batch(), call.heads(), call.tokens(), call.rows_of_token(), 2};
  Tensor lse = empty_on(query, {sizes, 4}, lse_type(query)), rows = empty_on(query, {sizes, 5}, lse_type(query));
  if (lse.numel() == 0) return {output, lse, rows};
  for_dtype(query.scalar_type(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for_multiplicands<T>(std::min(block, strip_rows), [&](auto* multiplicand) {
      forward<T, std::remove_pointer_t<decltype(multiplicand)>>(call, output, lse, rows);
    });
  });
  return {output, lse, rows};
}

std::tuple<Tensor, Tensor, Tensor> selected_backward(
    Tensor grad_output, std::optional<Tensor> grad_lse, Tensor query, Tensor key, Tensor value, Tensor output,
    Tensor rows, std::optional<Tensor> key_bias, Tensor bits, std::optional<Tensor> offsets, int64_t offset,
    std::optional<Tensor>, std::optional<Tensor>, std::optional<Tensor>, std::optional<Tensor>, std::optional<Tensor>,
    std::optional<Tensor>, std::optional<Tensor>, std::optional<Tensor>, int64_t bits_heads, int64_t /*most*/,
    int64_t block, int64_t tile, double scale, bool causal, bool, std::string implementation) {
  const SelectedCall call{query, key, value, key_bias, bits, offsets, offset, bits_heads, block, scale, causal};
  check_implementation(implementation, "cpu");
  call.check_all(tile);
  check_positions(call);
  call.check_results(grad_output, grad_lse, output, rows);
  Tensor grad_query = fresh(empty_in_order_of(query)), grad_key = fresh(empty_in_order_of(key)),
         grad_value = fresh(empty_in_order_of(value));
  if (query.numel() == 0 || key.numel() == 0) {
    for (Tensor* grad : {&grad_query, &grad_key, &grad_value}) torch::stable::zero_(*grad);
    return {grad_query, grad_key, grad_value};
  }
  for_dtype(query.scalar_type(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for_multiplicands<T>(std::min(block, strip_rows), [&](auto* multiplicand) {
      backward<T, std::remove_pointer_t<decltype(multiplicand)>>(
          call, {grad_output, grad_lse, output, rows}, grad_query, grad_key, grad_value);
    });
  });
  return {grad_query, grad_key, grad_value};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CPU, m) {
  m.impl("selected_attention_forward", TORCH_BOX(&selected_forward));
  m.impl("selected_attention_backward", TORCH_BOX(&selected_backward));
}

}  // namespace ds_sparse::cpu
