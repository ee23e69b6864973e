// Fused attention, backward: two sweeps, by rows for the gradient of queries, by columns for those of keys and values;
// then splits of long lists are combined, and the shares of heads that have the same keys are added.

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "arguments.h"
#include "backward.h"
#include "epilogue.h"
#include "key_bias.h"
#include "poison.h"
#include "recompute.h"
#include "row_stats.h"
#include "scores_sm90.h"

namespace ds_sparse::attention {
namespace {

// Combines the splits of rows, each thread those of four numbers of one, for each of a sweep's gradients.
template <class T, bool kBoth>
__global__ void __launch_bounds__(2 * kThreads)
    combine_splits_kernel(const __grid_constant__ Sweep<T> sweep, const int32_t* cuts, int num_cuts, int length) {
  const CombineRows cut(sweep.lists, cuts, num_cuts);
  if (cut.num_splits == 0) {
    return;
  }
  const int head_dim = sweep.first_splits.head_dim, fours = head_dim / 4;
  for (int number = threadIdx.x; number < kCombineRows * fours; number += blockDim.x) {
    const int tile_row = number / fours, column = number % fours * 4, token = cut.token(sweep.lists, tile_row, length);
    if (token < 0) {
      continue;
    }
    const auto add = [&](const SplitResults& splits, const Matrices<T>& grad, float* shares) {
      float4 sum{0, 0, 0, 0};
#pragma unroll 4
      for (int split = 0; split < cut.num_splits; ++split) {
        const float* from = splits.data + cut.place(sweep.lists, splits, split, tile_row) * head_dim + column;
        const float4 of_split = *reinterpret_cast<const float4*>(from);
        sum.x += of_split.x;
        sum.y += of_split.y;
        sum.z += of_split.z;
        sum.w += of_split.w;
      }
      if (shares != nullptr) {
        *reinterpret_cast<float4*>(shares + (cut.matrix * length + token) * head_dim + column) = sum;
      } else {
        store_run(
            grad.of(cut.batch, cut.head) + grad.tokens.at(sweep.lists.spans.token(token)) + column,
            Run<T, 4>{T(sum.x), T(sum.y), T(sum.z), T(sum.w)});
      }
    };
    add(sweep.first_splits, sweep.grad_first, sweep.first_shares);
    if constexpr (kBoth) {
      add(sweep.second_splits, sweep.grad_second, sweep.second_shares);
    }
  }
}

// Adds the shares of the query heads of a group, (B, H, S, D), in the order of heads, four numbers a thread.
template <class T>
__global__ void add_shares_kernel(
    const float* shares, Matrices<T> grad, BlockSpans spans, int64_t fours, int key_heads, int heads_of_group,
    int length, int head_dim) {
  const int fours_of_row = head_dim / 4;
  for (int64_t number = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; number < fours;
       number += int64_t{gridDim.x} * blockDim.x) {
    const int column = number % fours_of_row * 4;
    const int64_t row = number / fours_of_row, matrix = row / length;  // batch * key_heads + key head
    const int token = row % length;
    if (!spans.has(token)) {
      continue;
    }
    const float* from = shares + (matrix * heads_of_group * length + token) * head_dim + column;
    float4 sum{0, 0, 0, 0};
#pragma unroll 4
    for (int head = 0; head < heads_of_group; ++head) {
      const float4 share = *reinterpret_cast<const float4*>(from + int64_t{head} * length * head_dim);
      sum.x += share.x;
      sum.y += share.y;
      sum.z += share.z;
      sum.w += share.w;
    }
    store_run(
        grad.of(matrix / key_heads, matrix % key_heads) + grad.tokens.at(spans.token(token)) + column,
        Run<T, 4>{T(sum.x), T(sum.y), T(sum.z), T(sum.w)});
  }
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> attention_gradients(
    const AttentionCall& call, const Tensor& grad_output,
    const std::function<RowsOfBackward(const RowsWanted&)>& make_rows, const TileTensors& rows,
    const TileTensors& columns, bool deterministic) {
  const Tensor &query = call.query, &key = call.key, &value = call.value;
  const int64_t batch = query.size(0), heads = query.size(1), key_heads = key.size(1), head_dim = call.head_dim();
  Tensor grad_query = empty_in_order_of(query);
  Tensor grad_key = empty_in_order_of(key);
  Tensor grad_value = empty_in_order_of(value);
  if (query.numel() == 0) {
    return {grad_query, grad_key, grad_value};
  }
  const int64_t copies = call.copies();
  const Launcher launch(query);
  Scoring scoring = scoring_of(call);
  const std::optional<Tensor> of_keys = set_key_bias(launch, call.key_bias, scoring);
  const bool on_hopper = runs_on_hopper(launch, call);
  const bool in_one_sweep =
      on_hopper && !deterministic && !(call.chosen && chosen_take_two_sweeps(head_dim, call.block));
  const TileLists row_lists = lists_of(call, rows, true), column_lists = lists_of(call, columns, false);
  RowsWanted wanted{in_one_sweep};
  if (on_hopper && take_stat_columns(scores_of(scoring, column_lists))) {
    wanted.stats_scale_log2 = scoring.scale * kLog2E;
  }
  const auto [data_of_rows, row_stats, grad_query_sums] = make_rows(wanted);
  StateOfPass state(launch, query);
  with_element<false>(query, "attention", [&](auto zero) {
    using T = decltype(zero);
    const Backward<T> p{
        matrices_of<const T>(query),
        matrices_of<const T>(key),
        matrices_of<const T>(value),
        matrices_of<const T>(grad_output),
        row_stats,
        scoring,
        static_cast<int>(heads),
        static_cast<int>(heads / key_heads),
        static_cast<int>(head_dim),
        grad_query_sums,
        state.get()};
    const auto sweep = [&](auto by_columns, const TileTensors& tiles, const Tensor& grad_first,
                           const Tensor& grad_second, bool grouped) {
      constexpr bool kByColumns = decltype(by_columns)::value;
      const TileLists& lists = kByColumns ? column_lists : row_lists;
      const int64_t length = kByColumns ? call.keys() : call.queries(), num_cuts = tiles.cuts.size(0),
                    splits = num_splits(tiles, lists);
      const int64_t split_size = copies * splits * lists.sub_tiles * lists.tile * head_dim;
      const int64_t share_size = grouped ? batch * heads * length * head_dim : 0;
      const Space first_splits(query, split_size), second_splits(query, kByColumns ? split_size : 0);
      const Space first_shares(query, share_size), second_shares(query, share_size);
      const auto splits_in = [&](const Space& space) {
        return SplitResults{space.data, static_cast<int>(splits), static_cast<int>(head_dim)};
      };
      const Sweep<T> s{
          lists,
          matrices_of<T>(grad_first),
          matrices_of<T>(grad_second),
          splits_in(first_splits),
          splits_in(second_splits),
          first_shares.data,
          second_shares.data};
      if (!on_hopper) {
        sweep_on_any_gpu(launch, p, s, kByColumns, copies);
      } else if constexpr (sizeof(T) == 2) {
        if constexpr (kByColumns) {
          columns_on_hopper(launch, p, s, query, key, value, grad_output, grad_first, grad_second, copies);
        } else {
          rows_on_hopper(launch, p, s, query, key, value, grad_output, grad_first, copies);
        }
      }
      launch(
          combine_splits_kernel<T, kByColumns>, copies * num_cuts * lists.sub_tiles * lists.tile / kCombineRows,
          2 * kThreads, s, tiles.cuts.const_data_ptr<int32_t>(), static_cast<int>(num_cuts), static_cast<int>(length));
      const auto add_shares = [&](const Matrices<T>& grad, const float* shares) {
        const int64_t fours = batch * key_heads * length * head_dim / 4;
        launch(
            add_shares_kernel<T>, std::min<int64_t>((fours + 255) / 256, 1 << 16), 256, shares, grad, lists.spans,
            fours, static_cast<int>(key_heads), p.heads_of_group, static_cast<int>(length), p.head_dim);
      };
      if (grouped) {
        add_shares(s.grad_first, s.first_shares);
        add_shares(s.grad_second, s.second_shares);
      }
    };
    if (!in_one_sweep) {
      sweep(std::false_type{}, rows, grad_query, grad_query, false);
    }
    sweep(std::true_type{}, columns, grad_key, grad_value, heads != key_heads);
    if (in_one_sweep) {
      if constexpr (sizeof(T) == 2) {
        round_grad_query(launch, p, matrices_of<T>(grad_query), spans_of(call), batch);
      }
    }
    recompute_gradients(
        launch, p, row_lists, column_lists, matrices_of<T>(grad_query), matrices_of<T>(grad_key),
        matrices_of<T>(grad_value), batch);
    state.done();
  });
  poison_rows(launch, call, row_lists, call.queries(), {&grad_query});
  // In one sweep, gradients of queries are summed over the lists of keys.
  poison_rows(launch, call, column_lists, call.keys(), {&grad_key, &grad_value}, {}, {&grad_query});
  return {grad_query, grad_key, grad_value};
}

std::tuple<Tensor, Tensor, Tensor> attention_backward(
    const AttentionCall& call, const AttentionResults& results, const TileTensors& rows, const TileTensors& columns,
    bool deterministic) {
  const Tensor& grad_output = results.grad_output;
  check_alignment(grad_output, "grad_output");
  check_alignment(results.output, "output");
  const auto make_rows = [&](const RowsWanted& wanted) {
    return make_row_stats(
        Launcher(call.query), grad_output, results.grad_lse, results.output, results.rows, spans_of(call), wanted);
  };
  return attention_gradients(call, grad_output, make_rows, rows, columns, deterministic);
}

}  // namespace ds_sparse::attention
