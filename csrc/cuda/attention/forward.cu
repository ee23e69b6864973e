// Fused attention, forward. A thread block takes a work tile: 64 queries of one head against the keys and values of its
// list, 64 at a time. Scores stay in registers; each row keeps its maximum and sum as keys pass (online softmax). The
// splits of long lists leave theirs in fp32, which a second kernel combines in order.

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "arguments.h"
#include "dropout_mask.h"
#include "epilogue.h"
#include "forward.h"
#include "key_bias.h"
#include "poison.h"
#include "recompute.h"

namespace ds_sparse::attention {
namespace {

// kBlockN: keys of a step; kAhead: steps that may be there.
template <class T, int kHeadDim, int kBlockN = kStep<T, kHeadDim>, int kAhead = kStages>
struct ForwardMemory {
  enum { kTokens = kBlockN, kStages = kAhead };
  struct Stage {
    Tile<T, kHeadDim, kBlockN> keys;
    Tile<T, kOutputColumns<kHeadDim>, kBlockN> values;
    Octet octets[8];
  };
  Tile<T, kHeadDim, kBlockM> queries;
  Stage stages[kStages];
  int tokens[kBlockM];
};

template <class T, int kHeadDim, bool kPlain, class Memory>
__global__ void __launch_bounds__(kThreads) forward_kernel(const __grid_constant__ Forward<T> p) {
  if constexpr (!is_run_here<Memory, ForwardMemory<T, kHeadDim>>()) {
    __trap();
    return;
  }
  extern __shared__ __align__(16) unsigned char shared[];
  constexpr int kBlockN = Memory::kTokens, kColumns = kOutputColumns<kHeadDim>, kPitchQ = kPitch<T, kHeadDim>,
                kPitchV = kPitch<T, kColumns>;
  auto& memory = *reinterpret_cast<Memory*>(shared);
  let_next_begin();
  const int lane = threadIdx.x % 32, warp_tile = threadIdx.x / 32;
  const WorkTile work(p.lists, blockIdx.x, p.lists.num_work_tiles, kHeadDim / kColumns);
  if (work.tile < 0) {
    return;
  }
  const int kv_head = work.head / p.heads_of_group, first_column = work.column_tile * kColumns;
  const T* key = p.key.of(work.batch, kv_head);
  const T* value = p.value.of(work.batch, kv_head) + first_column;
  const OtherSide<kBlockN> other{
      p.lists.entries + work.first_entry, work.num_entries, p.lists.log_other, p.scoring.keys,
      p.scoring.key_states_of(work.batch, work.head)};

  const auto load = [&](int step) {
    auto& stage = memory.stages[step % Memory::kStages];
    if (threadIdx.x < kBlockN / 8) {
      stage.octets[threadIdx.x] = other.octet(step, threadIdx.x);
    }
    const auto token_of = [&](int tile_row) { return other.token(step, tile_row); };
    load_tile<kHeadDim, kBlockN>(stage.keys, key, p.key.tokens, p.head_dim, token_of);
    load_tile<kColumns, kBlockN>(stage.values, value, p.value.tokens, p.head_dim - first_column, token_of);
    end_of_copies();
  };

  const int steps = other.steps();
  if (threadIdx.x < kBlockM) {
    memory.tokens[threadIdx.x] = p.lists.token(work.tile, work.sub_tile, threadIdx.x, p.scoring.queries);
  }
  __syncthreads();
  load_tile<kHeadDim, kBlockM>(
      memory.queries, p.query.of(work.batch, work.head), p.query.tokens, p.head_dim,
      [&](int tile_row) { return memory.tokens[tile_row]; });
  if (steps > 0) {
    load(0);
  } else {
    end_of_copies();
  }

  const T* queries = memory.queries + warp_tile * 16 * kPitchQ;
  const int tile_row0 = warp_tile * 16 + lane / 4;
  const int token0 = memory.tokens[tile_row0], token8 = memory.tokens[tile_row0 + 8];
  using RowMask = TokenMask<false, kPlain ? Limits::kNone : Limits::kEither>;
  const RowMask token_mask0(p.scoring, work.batch, work.head, token0),
      token_mask8(p.scoring, work.batch, work.head, token8);
  const int of_warp_tile = memory.tokens[warp_tile * 16 + lane % 16];
  RowMask warp_tile_mask(p.scoring, work.batch, work.head, of_warp_tile);
  warp_tile_mask.restrict_to_warp_tile(of_warp_tile >= 0);
  // From scores to exponents of 2; plain ones are products still.
  const float softmax_scale_log2 = kPlain ? p.scoring.scale * kLog2E : kLog2E;
  const float* key_bias = p.scoring.key_bias_of(work.batch, work.head);
  float output[kColumns / 8][4] = {};
  float row_max0 = -kInfinity, row_max8 = -kInfinity, row_sum0 = 0, row_sum8 = 0;

  for (int step = 0; step < steps; ++step) {
    if (Memory::kStages == 1 && step > 0) {
      __syncthreads();
      load(step);
    }
    wait_for_copies<0>();
    __syncthreads();
    if (Memory::kStages > 1 && step + 1 < steps) {
      load(step + 1);
    }
    const auto& stage = memory.stages[step % Memory::kStages];
    const LiveOctets<kBlockN> live(
        stage.octets, p.lists.log_block, [&](const Octet& octet) { return warp_tile_mask.has_all(octet.token); });
    if (live.none()) {
      continue;
    }
    float scores[kBlockN / 16][2][4] = {};
#pragma unroll
    for (int j = 0; j < kBlockN / 16; ++j) {
      if (live.group(j)) {
        products<kHeadDim>(scores[j], queries, stage.keys, 16 * j, lane);
      }
    }
    if constexpr (!kPlain) {
      int first[kBlockN / 8];
#pragma unroll
      for (int n = 0; n < kBlockN / 8; ++n) {
        first[n] = stage.octets[n].token + lane % 4 * 2;
      }
      p.scoring.template finish<T>(reinterpret_cast<float (&)[kBlockN / 2]>(scores), work.batch, work.head, [&](int e) {
        return make_int2(max(e % 4 < 2 ? token0 : token8, 0), min(first[e / 4] + e % 2, p.scoring.keys - 1));
      });
    }
    if (!live.all()) {
#pragma unroll
      for (int n = 0; n < kBlockN / 8; ++n) {
        auto& of_octet = scores[n / 2][n % 2];
        if (live.ragged >> n & 1) {
          const int first = stage.octets[n].token + lane % 4 * 2;
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int j = first + e % 2;
            const float bias = key_bias == nullptr ? 0.0f : key_bias[min(j, p.scoring.keys - 1)];
            const RowMask& token_mask = e < 2 ? token_mask0 : token_mask8;
            of_octet[e] = token_mask.sees(j) ? Scoring::with_key_bias<kPlain>(of_octet[e], bias) : -kInfinity;
          }
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          of_octet[e] = live.bits >> (n + e / 2 * 8) & 1 ? of_octet[e] : -kInfinity;
        }
      }
    }

    float new0 = row_max0, new8 = row_max8;
#pragma unroll
    for (const auto& group : scores) {
#pragma unroll
      for (const auto& tile : group) {
        new0 = fmaxf(new0, fmaxf(tile[0], tile[1]));
        new8 = fmaxf(new8, fmaxf(tile[2], tile[3]));
      }
    }
    new0 = row_reduce_max(new0);
    new8 = row_reduce_max(new8);
    // A row of which nothing is left yet has a maximum of -inf: subtract 0 then, so that its exponentials are 0.
    const float base0 = new0 == -kInfinity ? 0.0f : new0, base8 = new8 == -kInfinity ? 0.0f : new8;
    const float scaled_max0 = base0 * softmax_scale_log2, scaled_max8 = base8 * softmax_scale_log2;
    const float rescale0 = exp2_approx((row_max0 - base0) * softmax_scale_log2),
                rescale8 = exp2_approx((row_max8 - base8) * softmax_scale_log2);
    row_max0 = new0;
    row_max8 = new8;
    row_sum0 *= rescale0;
    row_sum8 *= rescale8;
#pragma unroll
    for (auto& tile : output) {
      tile[0] *= rescale0;
      tile[1] *= rescale0;
      tile[2] *= rescale8;
      tile[3] *= rescale8;
    }
#pragma unroll
    for (int j = 0; j < kBlockN / 16; ++j) {
      if (!live.group(j)) {
        continue;
      }
#pragma unroll
      for (auto& tile : scores[j]) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          tile[e] = kPlain ? exp2_approx(tile[e] * softmax_scale_log2 - (e < 2 ? scaled_max0 : scaled_max8))
                           : exp2_approx((tile[e] - (e < 2 ? base0 : base8)) * softmax_scale_log2);
        }
        row_sum0 += tile[0] + tile[1];
        row_sum8 += tile[2] + tile[3];
      }
      if constexpr (!kPlain) {
        if (p.scoring.drops()) {
          const auto kept =
              kept_by<false>(p.scoring.dropout(), work.matrix, p.lists.log_block, token0, token8, stage.octets + 2 * j);
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            float& prob = scores[j][e / 4][e % 4];
            prob = kept[e] ? prob : 0.0f;
          }
        }
      }
      AccumulatorAsA<T>(scores[j][0], scores[j][1])
          .template multiply_add_to<kColumns, kPitchV>(output, stage.values, 16 * j, lane);
    }
  }

  note_not_finite(
      reinterpret_cast<float (&)[kColumns / 2]>(output), memory.tokens + tile_row0, p.state, row_sum0, row_sum8);
  row_sum0 = row_reduce_sum(row_sum0);
  row_sum8 = row_reduce_sum(row_sum8);
  const float of_dropout = !kPlain && p.scoring.drops() ? p.scoring.dropout().factor() : 1.0f;
  // NaN where a sum is.
  const float factor0 = row_sum0 == 0 ? 0.0f : of_dropout / row_sum0,
              factor8 = row_sum8 == 0 ? 0.0f : of_dropout / row_sum8;
  const float to_row_max = kPlain ? p.scoring.scale : 1.0f;
  const RowMaxSum stats0(row_max0 * to_row_max, row_sum0), stats8(row_max8 * to_row_max, row_sum8);
  // Before the queries' memory serves another purpose, everybody is through with it: each warp has its own warp tile.
  // But its rows are copied by all threads, and where there is no step, nobody has waited for the others.
  wait_for_copies<0>();
  if (steps == 0) {
    __syncthreads();
  }
  if (work.split >= 0) {
    const int64_t place = p.split_outputs.first_row(p.lists, work.copy, work.split, work.sub_tile) + warp_tile * 16;
    store_sums<kColumns>(output, factor0, factor8, p.head_dim - first_column, [&](int tile_row) -> float* {
      const bool any = (tile_row < 8 ? row_sum0 : row_sum8) != 0;
      return any ? p.split_outputs.data + (place + tile_row) * p.head_dim + first_column : nullptr;
    });
    if (lane % 4 == 0 && work.column_tile == 0) {
      p.split_row_max_sums[place + lane / 4] = stats0;
      p.split_row_max_sums[place + lane / 4 + 8] = stats8;
    }
    return;
  }
  T* to = p.output.of(work.batch, work.head) + first_column;
  store_warp_tile<kColumns, kPitchQ>(
      output, factor0, factor8, memory.queries + warp_tile * 16 * kPitchQ, p.head_dim - first_column,
      [&](int tile_row) -> T* {
        const int token = memory.tokens[warp_tile * 16 + tile_row];
        return token < 0 ? nullptr : to + p.output.tokens.at(token);
      });
  if (lane % 4 == 0 && work.column_tile == 0) {
    const int64_t first = work.matrix * p.scoring.queries;
    if (token0 >= 0) {
      p.row_max_sums[first + token0] = stats0;
      p.lse[first + token0] = stats0.lse();
    }
    if (token8 >= 0) {
      p.row_max_sums[first + token8] = stats8;
      p.lse[first + token8] = stats8.lse();
    }
  }
}

// Combines the splits of rows, each thread those of four numbers of one.
template <class T>
__global__ void __launch_bounds__(2 * kThreads, kCombineBlocks)
    combine_kernel(const __grid_constant__ Forward<T> p, const int32_t* cuts, int num_cuts) {
  const CombineRows cut(p.lists, cuts, num_cuts);
  if (cut.num_splits == 0) {
    return;
  }
  const int fours = p.head_dim / 4;
  for (int number = threadIdx.x; number < kCombineRows * fours; number += blockDim.x) {
    const int tile_row = number / fours, column = number % fours * 4,
              token = cut.token(p.lists, tile_row, p.scoring.queries);
    if (token < 0) {
      continue;
    }
    const auto place = [&](int split) { return cut.place(p.lists, p.split_outputs, split, tile_row); };
    float largest = -kInfinity;
#pragma unroll 4
    for (int split = 0; split < cut.num_splits; ++split) {
      largest = fmaxf(largest, p.split_row_max_sums[place(split)].row_max);
    }
    const float row_max = largest == -kInfinity ? 0.0f : largest;
    float sum = 0;
    float4 value{0, 0, 0, 0};
    for (int first = 0; first < cut.num_splits; first += kSplitsAtOnce) {
      float row_maxima[kSplitsAtOnce], row_sums[kSplitsAtOnce];
      uint4 loaded[kSplitsAtOnce];
#pragma unroll
      for (int i = 0; i < kSplitsAtOnce; ++i) {
        const int64_t from = place(min(first + i, cut.num_splits - 1));
        row_maxima[i] = p.split_row_max_sums[from].row_max;
        row_sums[i] = p.split_row_max_sums[from].row_sum;
        loaded[i] = *reinterpret_cast<const uint4*>(p.split_outputs.data + from * p.head_dim + column);
      }
#pragma unroll
      for (int i = 0; i < kSplitsAtOnce; ++i) {
        const float row_sum = first + i < cut.num_splits ? row_sums[i] : 0.0f;
        const float weight = expf(row_maxima[i] - row_max) * row_sum;
        // By bits: what is chosen would be loaded when it is known that it is, one split after the other.
        const uint32_t written = row_sum == 0 ? 0u : 0xffffffffu;
        sum += weight;
        value.x += weight * __uint_as_float(loaded[i].x & written);
        value.y += weight * __uint_as_float(loaded[i].y & written);
        value.z += weight * __uint_as_float(loaded[i].z & written);
        value.w += weight * __uint_as_float(loaded[i].w & written);
      }
    }
    const float factor = sum > 0 ? 1 / sum : 0.0f;
    store_run(
        p.output.of(cut.batch, cut.head) + p.output.tokens.at(p.lists.spans.token(token)) + column,
        Run<T, 4>{T(value.x * factor), T(value.y * factor), T(value.z * factor), T(value.w * factor)});
    if (column == 0) {
      const RowMaxSum row(row_max, sum);
      p.row_max_sums[cut.matrix * p.scoring.queries + token] = row;
      p.lse[cut.matrix * p.scoring.queries + token] = row.lse();
    }
  }
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> attention_forward(const AttentionCall& call, const TileTensors& rows) {
  const Tensor &query = call.query, &key = call.key, &value = call.value;
  const int64_t batch = query.size(0), heads = query.size(1), tokens = call.queries(), head_dim = call.head_dim();
  Tensor output = empty_in_order_of(query);
  Tensor lse = empty_on(query, {batch, heads, tokens}, ScalarType::Float);
  Tensor row_sums = empty_on(query, {batch, heads, tokens, 2}, ScalarType::Float);
  if (output.numel() == 0) {
    return {output, lse, row_sums};
  }
  const Launcher launch(query);
  const TileLists lists = lists_of(call, rows, true);
  Scoring scoring = scoring_of(call);
  const std::optional<Tensor> of_keys = set_key_bias(launch, call.key_bias, scoring);
  const bool on_hopper = runs_on_hopper(launch, call);
  const int64_t copies = call.copies();
  const int64_t num_cuts = rows.cuts.size(0), splits = num_splits(rows, lists);
  const int64_t split_row_count = copies * splits * lists.sub_tiles * lists.tile;
  const Space split_outputs(query, split_row_count * head_dim), split_row_max_sums(query, split_row_count * 2);
  StateOfPass state(launch, query);
  with_head_dim(query, [&](auto zero, auto padded) {
    using T = decltype(zero);
    constexpr int kHeadDim = decltype(padded)::value;
    const Forward<T> p{
        matrices_of<const T>(query),
        matrices_of<const T>(key),
        matrices_of<const T>(value),
        matrices_of<T>(output),
        lse.mutable_data_ptr<float>(),
        row_max_sums_in(row_sums),
        lists,
        scoring,
        static_cast<int>(heads),
        static_cast<int>(heads / key.size(1)),
        static_cast<int>(head_dim),
        SplitResults{split_outputs.data, static_cast<int>(splits), static_cast<int>(head_dim)},
        reinterpret_cast<RowMaxSum*>(split_row_max_sums.data),
        state.get()};
    if (on_hopper) {
      if constexpr (sizeof(T) == 2 && kHeadDim <= 128) {
        forward_on_hopper(launch, p, query, key, value, output, copies, call.rows_differ);
      }
    } else {
      const int64_t blocks = copies * lists.num_work_tiles * lists.sub_tiles * (kHeadDim / kOutputColumns<kHeadDim>);
      with_plain<T, kHeadDim>(scoring, [&](auto plain) {
        launch.with_memory<ForwardMemory<T, kHeadDim>, ForwardMemory<T, kHeadDim, 16, 1>>([&](auto fitting) {
          using Memory = typename decltype(fitting)::type;
          launch.with_shared_memory(
              forward_kernel<T, kHeadDim, decltype(plain)::value, Memory>, blocks, kThreads, sizeof(Memory), p);
        });
      });
    }
    launch(
        combine_kernel<T>, copies * num_cuts * lists.sub_tiles * lists.tile / kCombineRows, 2 * kThreads, p,
        rows.cuts.const_data_ptr<int32_t>(), static_cast<int>(num_cuts));
    recompute_outputs(launch, p, batch);
    state.done();
  });
  poison_rows(launch, call, lists, tokens, {&output}, {&lse, &row_sums});
  return {output, lse, row_sums};
}

}  // namespace ds_sparse::attention
