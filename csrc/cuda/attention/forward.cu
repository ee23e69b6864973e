// Fused attention, forward. A thread block takes a unit: 64 queries of one head against the keys and values of its list,
// 64 at a time. Scores stay in registers; each row keeps its maximum and sum as keys pass (online softmax). Tiles that
// units cut leave their parts in fp32, which a second kernel combines in order.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "arguments.h"
#include "attention.h"
#include "forward.h"
#include "key_bias.h"

namespace ds_sparse::attention {
namespace {

// kN: keys of a step; kAhead: steps that may be there.
template <class T, int kD, int kN = kStep<T, kD>, int kAhead = kStages>
struct ForwardMemory {
  enum { kTokens = kN, kStages = kAhead };
  struct Stage {
    Tile<T, kD, kN> keys;
    Tile<T, kOutputs<kD>, kN> values;
    Octet octets[8];
  };
  Tile<T, kD, kTile> queries;
  Stage stages[kStages];
  int tokens[kTile];
};

template <class T, int kD, bool kPlain, class Memory>
__global__ void __launch_bounds__(kThreads) forward_kernel(const __grid_constant__ Forward<T> p) {
  extern __shared__ __align__(16) unsigned char shared[];
  constexpr int kN = Memory::kTokens, kOut = kOutputs<kD>, kPitchQ = kPitch<T, kD>, kPitchV = kPitch<T, kOut>;
  auto& memory = *reinterpret_cast<Memory*>(shared);
  const int lane = threadIdx.x % 32, strip = threadIdx.x / 32;
  const Work work(p.lists, blockIdx.x, p.heads, p.layout_heads, kD / kOut);
  const int kv_head = work.head / p.heads_of_group, first_column = work.share * kOut;
  const T* key = p.key.of(work.batch, kv_head);
  const T* value = p.value.of(work.batch, kv_head) + first_column;
  const Other<kN> other{p.lists.entries + work.first_entry, work.num_entries, p.lists.log_block, p.scoring.keys,
                        p.scoring.key_states_of(work.batch, work.head)};

  const auto load = [&](int step) {
    auto& stage = memory.stages[step % Memory::kStages];
    if (threadIdx.x < kN / 8) {
      stage.octets[threadIdx.x] = other.octet(step, threadIdx.x);
    }
    const auto token_of = [&](int line) { return other.token(step, line); };
    load_tile<kD, kN>(stage.keys, key, p.key.token_stride, p.width, token_of);
    load_tile<kOut, kN>(stage.values, value, p.value.token_stride, p.width - first_column, token_of);
    end_of_copies();
  };

  const int steps = other.steps();
  if (threadIdx.x < kTile) {
    memory.tokens[threadIdx.x] = p.lists.token(work.tile, work.sub_tile, threadIdx.x, p.scoring.queries);
  }
  __syncthreads();
  load_tile<kD, kTile>(
      memory.queries, p.query.of(work.batch, work.head), p.query.token_stride, p.width,
      [&](int line) { return memory.tokens[line]; });
  if (steps > 0) {
    load(0);
  } else {
    end_of_copies();
  }

  const T* queries = memory.queries + strip * 16 * kPitchQ;
  const int line0 = strip * 16 + lane / 4;
  const int token0 = memory.tokens[line0], token8 = memory.tokens[line0 + 8];
  using SeenBy = Seen<false, !kPlain>;
  const SeenBy seen0(p.scoring, work.head, token0), seen8(p.scoring, work.head, token8);
  const int of_strip = memory.tokens[strip * 16 + lane % 16];
  SeenBy seen_by_all(p.scoring, work.head, of_strip);
  seen_by_all.restrict_to_strip(of_strip >= 0);
  // From scores to exponents of 2; plain ones are products still.
  const float unit = kPlain ? p.scoring.scale * kLog2E : kLog2E;
  const float* key_bias = p.scoring.key_bias_of(work.batch, work.head);
  const float bias_factor = kPlain ? 1 / p.scoring.scale : 1.0f;
  float output[kOut / 8][4] = {};
  float max0 = -kInfinity, max8 = -kInfinity, sum0 = 0, sum8 = 0;

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
    const Live<kN> live(
        stage.octets, p.lists.log_block, [&](const Octet& octet) { return seen_by_all.has_all(octet.token); });
    if (live.none()) {
      continue;
    }
    float scores[kN / 16][2][4] = {};
#pragma unroll
    for (int j = 0; j < kN / 16; ++j) {
      if (live.group(j)) {
        products<kD>(scores[j], queries, stage.keys, 16 * j, lane);
      }
    }
    if constexpr (!kPlain) {
      int first[kN / 8];
#pragma unroll
      for (int n = 0; n < kN / 8; ++n) {
        first[n] = stage.octets[n].token + lane % 4 * 2;
      }
      p.scoring.template finish<T>(
          reinterpret_cast<float(&)[kN / 2]>(scores), work.batch, work.head, [&](int e) {
            return make_int2(max(e % 4 < 2 ? token0 : token8, 0), min(first[e / 4] + e % 2, p.scoring.keys - 1));
          });
    }
    if (!live.all()) {
#pragma unroll
      for (int n = 0; n < kN / 8; ++n) {
        auto& of_octet = scores[n / 2][n % 2];
        if (live.ragged >> n & 1) {
          const int first = stage.octets[n].token + lane % 4 * 2;
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int j = first + e % 2;
            const float bias = key_bias == nullptr ? 0.0f : key_bias[min(j, p.scoring.keys - 1)] * bias_factor;
            const SeenBy& seen = e < 2 ? seen0 : seen8;
            of_octet[e] = seen.has(j) && seen.is_in_order(j) ? of_octet[e] + bias : -kInfinity;
          }
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          of_octet[e] = live.bits >> (n + e / 2 * 8) & 1 ? of_octet[e] : -kInfinity;
        }
      }
    }

    float new0 = max0, new8 = max8;
#pragma unroll
    for (const auto& group : scores) {
#pragma unroll
      for (const auto& tile : group) {
        new0 = fmaxf(new0, fmaxf(tile[0], tile[1]));
        new8 = fmaxf(new8, fmaxf(tile[2], tile[3]));
      }
    }
    new0 = max_of_four(new0);
    new8 = max_of_four(new8);
    // A row of which nothing is left yet has a maximum of -inf: subtract 0 then, so that its exponentials are 0.
    const float base0 = new0 == -kInfinity ? 0.0f : new0, base8 = new8 == -kInfinity ? 0.0f : new8;
    const float origin0 = base0 * unit, origin8 = base8 * unit;
    const float decay0 = exp2_of((max0 - base0) * unit), decay8 = exp2_of((max8 - base8) * unit);
    max0 = new0;
    max8 = new8;
    sum0 *= decay0;
    sum8 *= decay8;
#pragma unroll
    for (auto& tile : output) {
      tile[0] *= decay0;
      tile[1] *= decay0;
      tile[2] *= decay8;
      tile[3] *= decay8;
    }
#pragma unroll
    for (int j = 0; j < kN / 16; ++j) {
      if (!live.group(j)) {
        continue;
      }
#pragma unroll
      for (auto& tile : scores[j]) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          tile[e] = kPlain ? exp2_of(tile[e] * unit - (e < 2 ? origin0 : origin8))
                           : exp2_of((tile[e] - (e < 2 ? base0 : base8)) * unit);
        }
        sum0 += tile[0] + tile[1];
        sum8 += tile[2] + tile[3];
      }
      if constexpr (!kPlain) {
        if (p.scoring.drops()) {
          const auto kept = kept_by<false>(p.scoring.dropout(), work.matrix, p.lists.log_block, token0, token8, stage.octets + 2 * j);
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            float& prob = scores[j][e / 4][e % 4];
            prob = kept[e] ? prob : 0.0f;
          }
        }
      }
      LeftOfSums<T>(scores[j][0], scores[j][1]).template multiply_add_to<kOut, kPitchV>(output, stage.values, 16 * j, lane);
    }
  }

  sum0 = sum_of_four(sum0);
  sum8 = sum_of_four(sum8);
  const float of_dropout = !kPlain && p.scoring.drops() ? p.scoring.dropout().factor() : 1.0f;
  const float factor0 = sum0 > 0 ? of_dropout / sum0 : 0.0f, factor8 = sum8 > 0 ? of_dropout / sum8 : 0.0f;
  const float to_origin = kPlain ? p.scoring.scale : 1.0f;
  const RowSum row0(max0 * to_origin, sum0), row8(max8 * to_origin, sum8);
  // Before the queries' memory serves another purpose, everybody is through with it: each warp has its own strip.
  wait_for_copies<0>();
  if (work.part >= 0) {
    const int64_t place = p.part_outputs.line(p.lists, work.copy, work.part, work.sub_tile) + strip * 16;
    store_sums<kOut>(output, factor0, factor8, p.width - first_column, [&](int line) -> float* {
      const bool any = (line < 8 ? sum0 : sum8) != 0;
      return any ? p.part_outputs.data + (place + line) * p.width + first_column : nullptr;
    });
    if (lane % 4 == 0 && work.share == 0) {
      p.part_rows[place + lane / 4] = row0;
      p.part_rows[place + lane / 4 + 8] = row8;
    }
    return;
  }
  T* to = p.output.of(work.batch, work.head) + first_column;
  store_strip<kOut, kPitchQ>(
      output, factor0, factor8, memory.queries + strip * 16 * kPitchQ, p.width - first_column, [&](int line) -> T* {
        const int token = memory.tokens[strip * 16 + line];
        return token < 0 ? nullptr : to + token * p.output.token_stride;
      });
  if (lane % 4 == 0 && work.share == 0) {
    const int64_t first = work.matrix * p.scoring.queries;
    if (token0 >= 0) {
      p.rows[first + token0] = row0;
      p.lse[first + token0] = row0.lse();
    }
    if (token8 >= 0) {
      p.rows[first + token8] = row8;
      p.lse[first + token8] = row8.lse();
    }
  }
}

// Combines the parts of lines, each thread those of four numbers of one.
template <class T>
__global__ void __launch_bounds__(2 * kThreads)
    combine_kernel(const __grid_constant__ Forward<T> p, const int32_t* cuts, int num_cuts) {
  const CutLines cut(p.lists, cuts, num_cuts, p.heads, p.layout_heads);
  const int fours = p.width / 4;
  for (int number = threadIdx.x; number < kCutLines * fours; number += blockDim.x) {
    const int line = number / fours, column = number % fours * 4, token = cut.token(p.lists, line, p.scoring.queries);
    if (token < 0) {
      continue;
    }
    const auto place = [&](int part) { return cut.place(p.lists, p.part_outputs, part, line); };
    float largest = -kInfinity;
#pragma unroll 4
    for (int part = 0; part < cut.num_parts; ++part) {
      largest = fmaxf(largest, p.part_rows[place(part)].origin);
    }
    const float origin = largest == -kInfinity ? 0.0f : largest;
    float sum = 0;
    float4 value{0, 0, 0, 0};
#pragma unroll 4
    for (int part = 0; part < cut.num_parts; ++part) {
      const RowSum row = p.part_rows[place(part)];
      const float weight = expf(row.origin - origin) * row.sum;
      const float* from = p.part_outputs.data + place(part) * p.width + column;
      const float4 of_part = row.sum == 0 ? float4{0, 0, 0, 0} : *reinterpret_cast<const float4*>(from);
      sum += weight;
      value.x += weight * of_part.x;
      value.y += weight * of_part.y;
      value.z += weight * of_part.z;
      value.w += weight * of_part.w;
    }
    const float factor = sum > 0 ? 1 / sum : 0.0f;
    store_run(
        p.output.of(cut.batch, cut.head) + token * p.output.token_stride + column,
        Run<T, 4>{T(value.x * factor), T(value.y * factor), T(value.z * factor), T(value.w * factor)});
    if (column == 0) {
      const RowSum row(origin, sum);
      p.rows[cut.matrix * p.scoring.queries + token] = row;
      p.lse[cut.matrix * p.scoring.queries + token] = row.lse();
    }
  }
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> attention_forward(const Attention& attention, const TileTensors& rows) {
  const Tensor &query = attention.query, &key = attention.key, &value = attention.value;
  const int64_t batch = query.size(0), heads = query.size(1), tokens = query.size(2), width = query.size(3);
  const int64_t layout_heads = attention.layout_heads, block = attention.block, tile = attention.tile;
  check_tiles(rows.lines, rows.entries, rows.units, rows.cuts, tokens, query, layout_heads, block, tile);
  Tensor output = empty_in_order_of(query, width, query.scalar_type());
  Tensor lse = torch::stable::new_empty(query, {batch, heads, tokens}, ScalarType::Float);
  Tensor row_sums = torch::stable::new_empty(query, {batch, heads, tokens, 2}, ScalarType::Float);
  if (output.numel() == 0) {
    return {output, lse, row_sums};
  }
  const Launcher launch(query);
  const Lists lists = lists_of(rows, layout_heads, block, tile);
  Scoring scoring = scoring_of(attention);
  const KeyBias of_keys = set_key_bias(launch, attention.key_bias, scoring);
  check_tile(launch, query, block, tile);
  const int64_t copies = layout_heads == 1 ? batch * heads : batch;
  const int64_t num_cuts = rows.cuts.size(0), parts = num_parts(rows, lists);
  const int64_t part_lines = copies * parts * lists.sub_tiles * tile;
  const Space part_outputs(query, part_lines * width), part_rows(query, part_lines * 2);
  with_width(query, [&](auto zero, auto padded) {
    using T = decltype(zero);
    constexpr int kD = decltype(padded)::value;
    const Forward<T> p{
        matrices_of<const T>(query), matrices_of<const T>(key), matrices_of<const T>(value), matrices_of<T>(output),
        lse.mutable_data_ptr<float>(), row_sums_in(row_sums), lists, scoring, static_cast<int>(heads),
        static_cast<int>(layout_heads), static_cast<int>(heads / key.size(1)), static_cast<int>(width),
        Parts{part_outputs.data, static_cast<int>(parts), static_cast<int>(width)},
        reinterpret_cast<RowSum*>(part_rows.data)};
    if (tile == kHopperTile) {
      if constexpr (sizeof(T) == 2 && kD <= 128) {
        forward_on_hopper(launch, p, query, key, value, output, copies);
      }
    } else {
      const int64_t blocks = copies * lists.num_units * lists.sub_tiles * (kD / kOutputs<kD>);
      with_plain<T, kD>(scoring, [&](auto plain) {
        launch.with_memory<ForwardMemory<T, kD>, ForwardMemory<T, kD, 16, 1>>([&](auto fitting) {
          using Memory = typename decltype(fitting)::type;
          launch.with_shared_memory(
              forward_kernel<T, kD, decltype(plain)::value, Memory>, blocks, kThreads, sizeof(Memory), p);
        });
      });
    }
    launch(
        combine_kernel<T>, copies * num_cuts * lists.sub_tiles * tile / kCutLines, 2 * kThreads, p,
        rows.cuts.const_data_ptr<int32_t>(), static_cast<int>(num_cuts));
  });
  return {output, lse, row_sums};
}

namespace {

std::tuple<Tensor, Tensor, Tensor> block_attention_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& rpe,
    const std::optional<Tensor>& key_bias, const std::optional<Tensor>& attn_mask,
    const std::optional<Tensor>& dropout_seed, const Tensor& row_lines, const Tensor& row_entries,
    const Tensor& row_units, const Tensor& row_cuts, int64_t layout_heads, int64_t block, int64_t tile, double scale,
    bool causal, double dropout_p) {
  check_attention(query, key, value, rpe, key_bias, attn_mask, dropout_seed, dropout_p, layout_heads, block, tile);
  return attention_forward(
      {query, key, value, layout_heads, block, tile, scale, causal, key_bias, rpe, attn_mask, dropout_seed, dropout_p},
      {row_lines, row_entries, row_units, row_cuts});
}

}  // namespace
}  // namespace ds_sparse::attention

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CUDA, m) {
  m.impl("block_attention_forward", TORCH_BOX(&ds_sparse::attention::block_attention_forward));
}
