// Fused attention of one row strip. Scores exist for a few blocks at a time: forward keeps each row's largest score
// and sum of exponentials as blocks pass, the gradients compute probabilities again from those.
#pragma once

#include "../bias.h"
#include "gemm.h"
#include "rows.h"

namespace ds_sparse::cpu::DS_SPARSE_ISA {

DS_SPARSE_INLINE int64_t blocks_at_a_time(const AttentionRowStrip& strip) {
  int64_t count = attention_tile / (strip.rows * strip.block);
  return count > 0 ? count : 1;
}

// Rows whose softmax is made side by side: alone, each would wait for its own chain of maxima and exponentials.
constexpr int softmax_rows = 4;
static_assert(attention_rows(8) % softmax_rows == 0 && attention_rows(128) % softmax_rows == 0);

DS_SPARSE_INLINE int64_t at_most(int64_t x, int64_t limit) { return x < limit ? x : limit; }

// softcap * tanh(x / softcap); of small numbers a series, as 1 - e would keep few of their digits.
template <class C, int W>
DS_SPARSE_INLINE Vec<C, W> capped(Vec<C, W> x, C softcap) {
  using V = Vec<C, W>;
  V y = x / softcap;
  if constexpr (sizeof(C) == 8) {
    for (int i = 0; i < W; ++i) y[i] = __builtin_tanh(y[i]);
  } else {
    V size = y < 0 ? -y : y, square = y * y, e = exp_nonpositive<C, W>(size * -2), large = (1 - e) / (1 + e);
    V series = y + y * square * (square * (square * C(-17.0 / 315) + C(2.0 / 15)) - C(1.0 / 3));
    large = y < 0 ? -large : large;
    y = size < C(0.2) ? series : large;
  }
  return y * softcap;
}

// The derivative of `capped` where it gave these numbers; 0 where they have been masked since.
template <class C, int W>
DS_SPARSE_INLINE Vec<C, W> cap_slope(Vec<C, W> capped, C softcap) {
  Vec<C, W> y = capped / softcap;
  return capped == -infinity<C> ? Vec<C, W>{} : Vec<C, W>(1 - y * y);
}

// One block of a bias, rows x columns of it as there are tokens; from is where they begin in it. The last bias is added
// to the scores, (rows, b), with the sum of those before it, which is kept in `total` until then.
template <class T, class C, int W>
static void add_bias_block(
    const T* from, const Bias& bias, bool first, bool last, int64_t rows, int64_t columns, int64_t block, C* scores,
    C* total, C* scratch) {
  pack_rows<T, C>(from, bias.row_stride, bias.column_stride, rows, columns, scratch, block);
  for (int64_t i = 0; i < rows * block; i += W) {
    auto x = raised<C, W>(load<C, W>(scratch + i));
    if (!first) x = add_bias<C, W>(load<C, W>(total + i), x);
    if (!first && last) x = raised<C, W>(x);
    store<C, W>(last ? scores + i : total + i, last ? add_bias<C, W>(load<C, W>(scores + i), x) : x);
  }
}

// scratch: of two blocks of scores.
template <class T, int W>
static void add_biases(
    const AttentionRowStrip& strip, int64_t column, int64_t rows, int64_t columns, Compute<T>* scores,
    Compute<T>* scratch) {
  using C = Compute<T>;
  C* total = scratch + strip.rows * strip.block;
  for (int i = 0; i < strip.num_biases; ++i) {
    const Bias& bias = strip.biases[i];
    int64_t offset = strip.first * bias.row_stride + column * bias.column_stride;
    auto add = [&](auto* data) {
      add_bias_block<std::remove_const_t<std::remove_pointer_t<decltype(data)>>, C, W>(
          data + offset, bias, i == 0, i + 1 == strip.num_biases, rows, columns, strip.block, scores, total, scratch);
    };
    if (bias.is_bool)
      add(static_cast<const Keep*>(bias.data));
    else if (bias.is_wide)
      add(static_cast<const C*>(bias.data));
    else
      add(static_cast<const T*>(bias.data));
  }
}

// Tokens of the other side: begin to end - 1.
struct TokenRange {
  int64_t begin, end;
};

// The tokens that all rows of the row strip see by their limits.
static inline TokenRange seen_by_all(const AttentionRowStrip& strip) {
  TokenRange seen{0, strip.column_end};
  if (!strip.limits) return seen;
  for (int64_t token = strip.first; token < at_most(strip.first + strip.rows, strip.row_end); ++token) {
    int64_t low = strip.limits[2 * token], high = strip.limits[2 * token + 1];
    if (token < strip.num_global) continue;
    seen.begin = low > seen.begin ? low : seen.begin;
    seen.end = at_most(high, seen.end);
  }
  return seen;
}

// Tells if all of the row strip's pairs with one block are of a block that the query has chosen, in causal order.
static inline bool are_chosen(const AttentionRowStrip& strip, int64_t column, int64_t rows, int64_t columns) {
  const ChosenBlocks& chosen = *strip.chosen;
  int64_t first = strip.transposed ? column : strip.first, end = first + (strip.transposed ? columns : rows),
          key = strip.transposed ? strip.first : column, last_key = key + (strip.transposed ? rows : columns) - 1;
  if (strip.causal && chosen.position(first) < last_key) return false;
  for (int64_t row = first; row < end; row = (row / chosen.rows_of_token + 1) * chosen.rows_of_token)
    if (!chosen.has(row, key)) return false;
  return true;
}

// Tells if all of the row strip's scores with one block are of tokens that there are, and none is masked.
static inline bool is_unmasked(
    const AttentionRowStrip& strip, const TokenRange& seen, int64_t column, int64_t rows, int64_t columns) {
  if (rows < strip.rows || columns < strip.block || (strip.causal && strip.places)) return false;
  if (strip.chosen) return are_chosen(strip, column, rows, columns);
  int64_t last_row = strip.first + rows - 1, last_column = column + columns - 1;
  if (strip.causal && (strip.transposed ? column < last_row : last_column > strip.first)) return false;
  return last_column < strip.num_global || (seen.begin <= column && last_column < seen.end);
}

// -inf to those of the row strip's scores with one block, (rows, b), that are masked or of tokens that there are not.
template <class C, int W>
static void mask_block(const AttentionRowStrip& strip, int64_t column, int64_t rows, int64_t columns, C* scores) {
  using Int = typename Bits<C>::Int;
  using Index = Vec<Int, W>;
  int64_t block = strip.block;
  auto within = [&](int64_t token) { return Int(token < column ? 0 : at_most(token - column, block)); };
  Int global = within(strip.num_global);
  // Of queries that are columns: whether they have chosen the block in which all of the strip's keys are.
  const bool by_column = strip.chosen && strip.transposed;
  Int has_chosen[chosen_rows];
  for (int64_t c = 0; by_column && c < chosen_rows; ++c)
    has_chosen[c] = c < columns && strip.chosen->has(column + c, strip.first) ? -1 : 0;
  for (int64_t r = 0; r < strip.rows; ++r, scores += block) {
    int64_t token = strip.first + r;
    Int begin = 0, end = Int(r < rows ? columns : 0), low = 0, high = Int(block);
    if (strip.chosen && r < rows) {
      const ChosenBlocks& chosen = *strip.chosen;
      if (strip.transposed)
        begin = strip.causal ? within((token - chosen.offset) * chosen.rows_of_token) : 0;
      else if (!chosen.has(token, column))
        end = 0;
      else if (strip.causal)
        end = Int(at_most(end, within(chosen.position(token) + 1)));
    } else if (strip.causal && !strip.places) {
      if (strip.transposed)
        begin = within(token);
      else
        end = Int(at_most(end, within(token + 1)));
    }
    if (strip.limits && r < rows && token >= strip.num_global) {
      low = within(strip.limits[2 * token]);
      high = within(strip.limits[2 * token + 1]);
    }
    for (int64_t c = 0; c < block; c += W) {
      Index at = lanes_from<Int, W>(Int(c));
      Index seen = (at >= begin) & (at < end) & ((at < global) | ((at >= low) & (at < high)));
      if (by_column) seen &= load_raw<Index>(has_chosen + c);
      store<C, W>(scores + c, seen ? load<C, W>(scores + c) : broadcast<C, W>(-infinity<C>));
    }
    if (r < rows && strip.causal && strip.places) {
      const int32_t* places = strip.places + column;
      int32_t place = strip.places[token];
      for (int64_t c = 0; c < columns; ++c)
        scores[c] = (strip.transposed ? place > places[c] : place < places[c]) ? -infinity<C> : scores[c];
    }
  }
}

// The scores of the row strip's rows and `count` blocks, each (rows, b), -inf where masked and where there are no
// tokens.
template <class T, class O, int W>
static void attention_scores(
    const AttentionRowStrip& strip, const O* left, int64_t left_stride, const O* panels, const int32_t* slots,
    const int32_t* blocks, int64_t count, Compute<T>* scores, Compute<T>* scratch) {
  using C = Compute<T>;
  int64_t block = strip.block, size = strip.rows * block;
  sdd(left, left_stride, strip.rows, panels, slots, count, block, strip.depth, scores);
  C scale = C(strip.scale), softcap = C(strip.softcap);
  int64_t rows = at_most(strip.rows, strip.row_end - strip.first);
  TokenRange seen = seen_by_all(strip);
  for (int64_t n = 0; n < count; ++n, scores += size) {
    for (int64_t i = 0; i < size; i += W) {
      Vec<C, W> x = load<C, W>(scores + i) * scale;
      x = x < lowest<C> ? broadcast<C, W>(lowest<C>) : x;
      store<C, W>(scores + i, softcap > 0 ? capped<C, W>(x, softcap) : x);
    }
    int64_t column = blocks[n] * block, columns = at_most(block, strip.column_end - column);
    add_biases<T, W>(strip, column, rows, columns, scores, scratch);
    if (!is_unmasked(strip, seen, column, rows, columns)) mask_block<C, W>(strip, column, rows, columns, scores);
  }
}

// Dropout's factors of the probabilities of `count` blocks, each (rows, b).
template <class C>
static void dropout_blocks(const AttentionRowStrip& strip, const int32_t* blocks, int64_t count, C* factors) {
  int64_t block = strip.block;
  for (int64_t n = 0; n < count; ++n, factors += strip.rows * block) {
    if (strip.transposed)
      dropout_factors<C>(
          *strip.dropout, strip.matrix, blocks[n] * block, strip.first, block, strip.rows, factors, 1, block);
    else
      dropout_factors<C>(
          *strip.dropout, strip.matrix, strip.first, blocks[n] * block, strip.rows, block, factors, block, 1);
  }
}

// Calls plain(n, count) for each run of those of `count` blocks that are not spoilt, and careful(n) for each other.
template <class Spoilt, class Plain, class Careful>
DS_SPARSE_INLINE void in_runs(int64_t count, const Spoilt& spoilt, const Plain& plain, const Careful& careful) {
  for (int64_t n = 0, end; n < count; n = end) {
    end = n + 1;
    if (spoilt(n)) {
      careful(n);
      continue;
    }
    while (end < count && !spoilt(end)) ++end;
    plain(n, end - n);
  }
}

// sum += the product of one block and dense rows, where some numbers are not finite: masked pairs are left out, where
// dsd_columns would add zero times those. Scores lie as the weights, a number where those have a multiplicand; one is
// -inf where it is masked.
template <class O>
static void add_live_pairs(
    const O* weights, const Compute<O>* scores, int64_t m_stride, int64_t k_stride, int64_t m, int64_t k,
    const O* dense, int64_t width, Compute<O>* sum) {
  using C = Compute<O>;
  constexpr int N = native_width<C>;
  for (int64_t i = 0; i < m; ++i) {
    C* to = sum + i * width;
    for (int64_t j = 0; j < k; ++j) {
      if (scores[i * m_stride + j * k_stride] == -infinity<C>) continue;
      int64_t multiplicand = j / per_multiplicand<O>, part = j % per_multiplicand<O>;
      Multiplicands<O, N> weight = broadcast_multiplicand<O, N>(weights[i * m_stride + multiplicand * k_stride]);
      for (int64_t c = 0; c < width; c += N) {
        auto right = load_raw<Multiplicands<O, N>>(dense + multiplicand * width + c);
        store<C, N>(to + c, Vec<C, N>(load<C, N>(to + c) + numbers<O, N>(weight, part) * numbers<O, N>(right, part)));
      }
    }
  }
}

template <class O>
DS_SPARSE_INLINE const O* weights_in(const Compute<O>* scores) {
  return reinterpret_cast<const O*>(scores);
}

template <int W>
struct Width {
  static constexpr int value = W;
};

// Calls f with the width of the vectors that a row of a block is made of.
template <class O, class F>
DS_SPARSE_INLINE void for_width(int64_t block, const F& f) {
  constexpr int W = native_width<Compute<O>>;
  if (per_multiplicand<O> > 1 || block >= W)
    f(Width<W>{});
  else if constexpr (per_multiplicand<O> == 1)
    f(Width<8>{});
}

template <class T, class O, int W>
static void attention_forward_of(
    const AttentionRowStrip& strip, const O* query, const O* key_panels, const O* value, const bool* spoilt,
    int64_t width, const int32_t* blocks, int64_t count, Compute<T>* sum, Compute<T>* top, Compute<T>* total,
    Compute<T>* scratch) {
  using C = Compute<T>;
  using V = Vec<C, W>;
  constexpr int N = native_width<C>, R = softmax_rows;
  int64_t block = strip.block, depth = block / per_multiplicand<O>, rows = strip.rows, size = rows * block,
          step = blocks_at_a_time(strip);
  const bool dropout = strip.dropout;
  C *scores = scratch, *extra = scratch + step * size;
  for (int64_t r = 0; r < rows; ++r) {
    top[r] = -infinity<C>;
    total[r] = 0;
  }
  for (int64_t i = 0; count == 0 && i < rows * width; ++i) sum[i] = 0;
  for (int64_t done = 0; done < count; done += step) {
    int64_t here = at_most(step, count - done);
    attention_scores<T, O, W>(strip, query, strip.depth, key_panels, blocks + done, blocks + done, here, scores, extra);
    if (dropout) dropout_blocks<C>(strip, blocks + done, here, extra);
    for (int64_t r = 0; r < rows; r += R) {
      V largest[R], shift[R], sums[R] = {};
      C now[R];
      for (int i = 0; i < R; ++i) largest[i] = broadcast<C, W>(top[r + i]);
      for (int64_t n = 0; n < here; ++n) {
        for (int64_t c = 0; c < block; c += W) {
          for (int i = 0; i < R; ++i) {
            V x = load<C, W>(scores + n * size + (r + i) * block + c);
            largest[i] = x > largest[i] ? x : largest[i];
          }
        }
      }
      for (int i = 0; i < R; ++i) {
        now[i] = max_lanes<C, W>(largest[i]);
        // With nothing left (and no NaN) every exponential, and the sum, is 0.
        shift[i] = broadcast<C, W>(now[i] == -infinity<C> ? C(0) : now[i]);
      }
      for (int64_t n = 0; n < here; ++n) {
        for (int64_t c = 0; c < block; c += W) {
          for (int i = 0; i < R; ++i) {
            int64_t at = n * size + (r + i) * block;
            V e = exp_nonpositive<C, W>(load<C, W>(scores + at + c) - shift[i]);
            store_weights<O, W>(scores + at, c, dropout ? V(e * load<C, W>(extra + at + c)) : e);
            sums[i] += e;
          }
        }
      }
      for (int i = 0; i < R; ++i) {
        if (done > 0 && now[i] > top[r + i]) {
          C rest = exp_nonpositive<C, W>(broadcast<C, W>(top[r + i]) - shift[i])[0];
          C* row = sum + (r + i) * width;
          total[r + i] *= rest;
          for (int64_t c = 0; c < width; c += N) store<C, N>(row + c, Vec<C, N>(load<C, N>(row + c) * rest));
        }
        total[r + i] += sum_lanes<C, W>(sums[i]);
        top[r + i] = now[i];
      }
    }
    const int32_t* live = blocks + done;
    const O* weights = weights_in<O>(scores);
    in_runs(
        here, [&](int64_t n) { return spoilt[live[n]]; },
        [&](int64_t n, int64_t run) {
          dsd_columns<O, tile_vectors>(
              {weights + n * size, nullptr, size, block, 1}, value, width, live + n, run, depth, rows, 0, width,
              done + n > 0, sum, width);
        },
        [&](int64_t n) {
          for (int64_t i = 0; done + n == 0 && i < rows * width; ++i) sum[i] = 0;
          attention_scores<T, O, W>(strip, query, strip.depth, key_panels, live + n, live + n, 1, extra, extra + size);
          add_live_pairs<O>(
              weights + n * size, extra, block, 1, rows, block, value + live[n] * depth * width, width, sum);
        });
  }
  for (int64_t r = 0; r < rows; ++r) {
    C inverse = total[r] == 0 ? C(0) : 1 / total[r];
    for (int64_t c = 0; c < width; c += N)
      store<C, N>(sum + r * width + c, Vec<C, N>(load<C, N>(sum + r * width + c) * inverse));
  }
}

template <class T, class O>
static void attention_forward(
    const AttentionRowStrip& strip, const O* query, const O* key_panels, const O* value, const bool* spoilt,
    int64_t width, const int32_t* blocks, int64_t count, Compute<T>* sum, Compute<T>* top, Compute<T>* total,
    Compute<T>* scratch) {
  for_width<O>(strip.block, [&](auto width_of) {
    attention_forward_of<T, O, width_of.value>(
        strip, query, key_panels, value, spoilt, width, blocks, count, sum, top, total, scratch);
  });
}

template <class T, class O, int W>
static void attention_backward_of(
    const AttentionRowStrip& strip, const AttentionColumn<O>& column, Compute<T>* scratch) {
  using C = Compute<T>;
  using V = Vec<C, W>;
  constexpr int P = per_multiplicand<O>;
  int64_t block = strip.block, rows = strip.rows, size = rows * block, step = blocks_at_a_time(strip),
          width = column.width, left_stride = width / P;
  C scale = C(strip.scale), softcap = C(strip.softcap);
  C *probs = scratch, *grads = scratch + step * size, *factors = grads + step * size, *extra = factors + step * size;
  // The gradients by the strip's rows, as multiplicands of them.
  O* grad_columns = P == 1 ? reinterpret_cast<O*>(grads) : reinterpret_cast<O*>(extra + 2 * step * size);
  const int32_t own = 0;
  for (int64_t done = 0; done < column.count; done += step) {
    int64_t here = at_most(step, column.count - done);
    const int32_t *blocks = column.blocks + done, *slots = column.slots + done;
    attention_scores<T, O, W>(strip, column.key, left_stride, column.query_panels, slots, blocks, here, probs, extra);
    sdd(column.value, left_stride, rows, column.grad_output_panels, slots, here, block, strip.depth, grads);
    if (strip.dropout) dropout_blocks<C>(strip, blocks, here, factors);
    for (int64_t n = 0; n < here; ++n) {
      for (int64_t c = 0; c < block; c += W) {
        int64_t query = slots[n] * block + c;
        V row_max = load<C, W>(column.row_stats.row_max + query),
          inverse_sum = load<C, W>(column.row_stats.inverse_sum + query),
          delta = load<C, W>(column.row_stats.delta + query);
        auto nothing_left = (inverse_sum == V{}) & (delta == V{});
        for (int64_t r = 0; r < rows; r += P) {
          V multiplicand[P];
          for (int p = 0; p < P; ++p) {
            int64_t at = n * size + (r + p) * block;
            V score = load<C, W>(probs + at + c), grad = load<C, W>(grads + at + c);
            V prob = exp_nonpositive<C, W>(score - row_max) * inverse_sum;
            prob = nothing_left ? V{} : prob;
            V kept = prob;
            if (strip.dropout) {
              V factor = load<C, W>(factors + at + c);
              kept = prob * factor;
              grad = grad * factor;
            }
            // The gradient of its probability may be NaN.
            grad = prob * (grad - delta) * scale;
            if (softcap > 0) grad *= cap_slope<C, W>(score, softcap);
            multiplicand[p] = nothing_left ? V{} : grad;
            store_weights<O, W>(probs + at, c, kept);
            store_weights<O, W>(grads + at, c, multiplicand[p]);
          }
          if constexpr (P > 1) {
            auto pairs = pair_halves(narrow(multiplicand[0], multiplicand[1]));
            memcpy(grad_columns + (n * rows + r) / P * block + c, &pairs, sizeof(pairs));
          }
        }
      }
    }
    const O *prob_weights = weights_in<O>(probs), *grad_weights = weights_in<O>(grads);
    auto add_products = [&](int64_t n, int64_t run) {
      dsd_columns<O, tile_vectors>(
          {prob_weights + n * size, nullptr, size, block, 1}, column.grad_output, width, slots + n, run, block / P,
          rows, 0, width, true, column.grad_value, width);
      dsd_columns<O, tile_vectors>(
          {grad_weights + n * size, nullptr, size, block, 1}, column.query, width, slots + n, run, block / P, rows, 0,
          width, true, column.grad_key, width);
      for (int64_t i = n; i < n + run; ++i)
        dsd_columns<O, tile_vectors>(
            {grad_columns + i * size / P, nullptr, 0, 1, block}, column.dense_key, width, &own, 1, rows / P, block, 0,
            width, true, column.grad_query + slots[i] * block * width, width);
    };
    auto add_live = [&](int64_t n) {
      C* again = factors;
      int64_t at = slots[n] * block * width;
      attention_scores<T, O, W>(
          strip, column.key, left_stride, column.query_panels, slots + n, blocks + n, 1, again, extra);
      add_live_pairs<O>(
          prob_weights + n * size, again, block, 1, rows, block, column.grad_output + at / P, width, column.grad_value);
      add_live_pairs<O>(
          grad_weights + n * size, again, block, 1, rows, block, column.query + at / P, width, column.grad_key);
      add_live_pairs<O>(
          grad_columns + n * size / P, again, 1, block, block, rows, column.dense_key, width, column.grad_query + at);
    };
    in_runs(
        here, [&](int64_t n) { return column.spoilt_own || column.spoilt_slots[slots[n]]; }, add_products, add_live);
  }
}

template <class T, class O>
static void attention_backward(const AttentionRowStrip& strip, const AttentionColumn<O>& column, Compute<T>* scratch) {
  for_width<O>(strip.block, [&](auto width) { attention_backward_of<T, O, width.value>(strip, column, scratch); });
}

template <class T, class O, int W>
static void attention_bias_backward_of(
    const AttentionRowStrip& strip, const O* query, const O* grad_output, const O* key_panels, const O* value_panels,
    const RowStats<Compute<T>>& row_stats, const int32_t* blocks, int64_t count, Compute<T>* out, int64_t out_stride,
    Compute<T>* scratch) {
  using C = Compute<T>;
  using V = Vec<C, W>;
  int64_t block = strip.block, rows = strip.rows, size = rows * block, step = blocks_at_a_time(strip);
  C *probs = scratch, *grads = scratch + step * size, *factors = grads + step * size, *extra = factors + step * size;
  for (int64_t done = 0; done < count; done += step) {
    int64_t here = at_most(step, count - done);
    attention_scores<T, O, W>(strip, query, strip.depth, key_panels, blocks + done, blocks + done, here, probs, extra);
    sdd(grad_output, strip.depth, rows, value_panels, blocks + done, here, block, strip.depth, grads);
    if (strip.dropout) {
      dropout_blocks<C>(strip, blocks + done, here, factors);
      for (int64_t i = 0; i < here * size; i += W)
        store<C, W>(grads + i, V(load<C, W>(grads + i) * load<C, W>(factors + i)));
    }
    for (int64_t n = 0; n < here; ++n) {
      int64_t column = blocks[done + n] * block, columns = at_most(block, strip.column_end - column);
      for (int64_t r = 0; r < at_most(rows, strip.row_end - strip.first); ++r) {
        C* to = out + r * out_stride + column;
        for (int64_t c = 0; c < block; c += W) {
          int64_t at = n * size + r * block + c;
          V score = load<C, W>(probs + at);
          V prob = exp_nonpositive<C, W>(score - row_stats.row_max[r]) * row_stats.inverse_sum[r];
          V grad = prob * (load<C, W>(grads + at) - row_stats.delta[r]);
          grad = score == -infinity<C> ? V{} : grad;
          if (c + W <= columns)
            store<C, W>(to + c, V(load<C, W>(to + c) + grad));
          else
            for (int i = 0; i < columns - c; ++i) to[c + i] += grad[i];
        }
      }
    }
  }
}

template <class T, class O>
static void attention_bias_backward(
    const AttentionRowStrip& strip, const O* query, const O* grad_output, const O* key_panels, const O* value_panels,
    const RowStats<Compute<T>>& row_stats, const int32_t* blocks, int64_t count, Compute<T>* out, int64_t out_stride,
    Compute<T>* scratch) {
  for_width<O>(strip.block, [&](auto width) {
    attention_bias_backward_of<T, O, width.value>(
        strip, query, grad_output, key_panels, value_panels, row_stats, blocks, count, out, out_stride, scratch);
  });
}

}  // namespace ds_sparse::cpu::DS_SPARSE_ISA
