// The consumer warpgroups of the forward pass on Hopper: products, softmax, and results. Where a thread block has two
// warpgroups, one multiplies its last probabilities and values while it does a softmax; where it has four, there are
// warps enough that do one while others do the other.

#pragma once

#include "forward.h"
#include "forward_memory_sm90.h"
#include "softmax_sm90.h"

namespace ds_sparse::attention {

// A warp of the consumer warpgroups: where it is in its pipelines, and what it knows of its rows. Sums stay in arrays
// of their own.
template <class T, int kHeadDim, Scores kScores, class M>
struct ForwardConsumer {
  static constexpr bool kPlain = are_plain(kScores), kMayBeBiased = may_be_biased(kScores);
  static constexpr Limits kLimits = M::kLimits;
  static constexpr int kBlockN = M::kBlockN;
  // A warpgroup multiplies the last probabilities and values while it does a softmax; and the first scores of a work
  // tile while it ends the last, if that may still have its stage.
  static constexpr bool kOverlaps = M::kOverlaps, kOverlapsWork = kOverlaps && M::kWorkStages > 1;
  using Output = float[kHeadDim / 2];
  using ScoresOfStep = float[kBlockN / 2];
  using Probs = uint32_t[kBlockN / 16][4];
  using FirstKeys = int[kBlockN / 16];

  const Forward<T>& p;
  M& memory;
  const int consumer_group, thread = consumer_thread(), lane = thread % 32, warpgroup = uniform(thread / 128);
  const int warp_tile = warp_tile_row(thread);
  // Of row maxima, and of scores unless these are not scaled yet, where maxima are.
  const float softmax_scale_log2 = kPlain && !kMayBeBiased ? p.scoring.scale * kLog2E : kLog2E;
  // A new maximum becomes row_max only where it is this far above the last: by a factor of 256 for probabilities.
  const float rescale_threshold = 8 / softmax_scale_log2;
  const bool drops = attention::drops<kScores>(p.scoring);
  const Dropout dropout = drops ? p.scoring.dropout() : Dropout{};
  const Turns<kOverlaps && !M::kByHalves> turns{warpgroup};
  PipelineState<M::kStages> pipe;
  PipelineState<M::kWorkStages> work_pipe;

  // The sums of the work tile in stage `summed_stage`; where `owes`, the product of probabilities with the values
  // of stage `last` is still to be added. It is added together with the next step's scores, be they the next work
  // tile's.
  OnlineSoftmax<kBlockN, kPlain> rows;
  bool owes = false;
  PipelineState<M::kStages> last;
  int summed_stage = -1;
  const GmmaDescriptor all_queries{memory.queries[0][0] + (M::kByHalves ? 0 : 64 * warpgroup * kPanel)};
  const GmmaDescriptor keys{memory.stages[0].keys}, values{memory.stages[0].values, sizeof(memory.stages[0].values[0])};

  __device__ __forceinline__ ForwardConsumer(const Forward<T>& p, M& memory, int consumer_group)
      : p(p), memory(memory), consumer_group(consumer_group) {}

  __device__ __forceinline__ const WorkItemOf<kLimits>& item() const { return memory.work_items[work_pipe.index]; }

  // The mainloop's products.

  __device__ __forceinline__ void multiply_scores(ScoresOfStep& scores, const GmmaDescriptor& queries) const {
    warpgroup_arrive();
    multiply_rows<T, kHeadDim, kBlockN, kBlockN, M::kRows>(
        scores, queries, keys + uniform(pipe.index * sizeof(memory.stages[0])));
    warpgroup_commit_batch();
  }
  __device__ __forceinline__ void multiply_values(Output& output, const Probs& probs) const {
    memory.v_full[last.index].wait(last.phase);
    warpgroup_arrive();
    multiply_columns<T, kHeadDim, kBlockN>(output, probs, values + uniform(last.index * sizeof(memory.stages[0])));
    warpgroup_commit_batch();
  }
  __device__ __forceinline__ void values_are_added(Output& output) {
    warpgroup_fence_operand(output);
    warp_arrive(memory.v_empty[last.index], lane);
    owes = false;
  }
  __device__ __forceinline__ void settle(Output& output, const Probs& probs) {
    if (owes) {
      multiply_values(output, probs);
      warpgroup_wait<0>();
      values_are_added(output);
    }
  }

  // The epilogue: hands the results of a work tile over, with its stage.
  __device__ __forceinline__ void store_results(const Output& output) {
    const WorkTile& work = memory.work_items[summed_stage].work;
    // Asked for anew: what follows from it would be made once and, for want of registers, kept in memory.
    const int own_thread = consumer_thread(), tile_row0 = lane_row(own_thread);
    rows.row_sum0 = row_reduce_sum(rows.row_sum0);
    rows.row_sum8 = row_reduce_sum(rows.row_sum8);
    const float of_dropout = drops ? dropout.factor() : 1.0f;
    // NaN where a sum is.
    const float factor0 = rows.row_sum0 == 0 ? 0.0f : of_dropout / rows.row_sum0,
                factor8 = rows.row_sum8 == 0 ? 0.0f : of_dropout / rows.row_sum8;
    const float to_row_max = kPlain && !kMayBeBiased ? p.scoring.scale : 1.0f;
    const RowMaxSum stats0(rows.row_max0 * to_row_max, rows.row_sum0),
        stats8(rows.row_max8 * to_row_max, rows.row_sum8);
    note_not_finite(output, memory.work_items[summed_stage].tokens + tile_row0, p.state, rows.row_sum0, rows.row_sum8);
    if (work.split >= 0) {
      const int64_t place = p.split_outputs.first_row(p.lists, work.copy, work.split, work.sub_tile) + tile_row0;
      store_sums<kHeadDim>(output, factor0, factor8, p.head_dim, [&](int half) -> float* {
        const bool any = (half ? rows.row_sum8 : rows.row_sum0) != 0;
        return any ? p.split_outputs.data + (place + 8 * half) * p.head_dim : nullptr;
      });
      if (lane % 4 == 0) {
        p.split_row_max_sums[place] = stats0;
        p.split_row_max_sums[place + 8] = stats8;
      }
    } else {
      // Until the warpgroup is done with its queries, whose space serves now.
      named_barrier_sync<128>(3 + kConsumerWarpgroups * consumer_group + warpgroup);
      auto& panels = memory.queries[summed_stage];
      store_warp_tile_to_panels<kHeadDim>(
          panels[0] + warp_tile_row(own_thread) % M::kRows * kPanel, M::kRows * kPanel, output, factor0, factor8);
      if constexpr (M::kByHalves) {
        if (lane % 4 == 0) {
          store_row_max_sum(work, tile_row0, stats0);
          store_row_max_sum(work, tile_row0 + 8, stats8);
        }
      } else if (lane % 4 == 0) {
        memory.row_max_sums[summed_stage][tile_row0] = stats0;
        memory.row_max_sums[summed_stage][tile_row0 + 8] = stats8;
      }
    }
    warp_arrive(memory.work_empty[summed_stage], lane);
  }

  __device__ __forceinline__ void store_row_max_sum(const WorkTile& work, int tile_row, const RowMaxSum& row) const {
    const int token = memory.work_items[summed_stage].tokens[tile_row];
    if (token >= 0) {
      p.row_max_sums[work.matrix * p.scoring.queries + token] = row;
      p.lse[work.matrix * p.scoring.queries + token] = row.lse();
    }
  }

  // Sums are the present work tile's from here on.
  __device__ __forceinline__ void begin(Output& output) {
    if (summed_stage >= 0) {
      store_results(output);
    }
    summed_stage = work_pipe.index;
    rows.reset();
#pragma unroll
    for (float& sum : output) {
      sum = 0;
    }
  }

  // From products to scores. kMayBeBiased: returns what these are still to be multiplied by, which exponents do.
  __device__ __forceinline__ float mask(ScoresOfStep& scores, const LiveGroups& live) const {
    const bool capped = has_softcap<kScores>(p.scoring);
    float unit = !M::kTakesKeyBias ? 1.0f : capped ? p.scoring.softcap : p.scoring.scale;
    const Octet* groups = memory.groups[pipe.index];
    if constexpr (M::kHasPairBias) {
      const BiasBoxes<kHopperBlockM, kBlockN> boxes(p.lists.log_block, p.lists.log_other);
      scale_and_add_pair_bias<T, M::kPairBias, false>(
          scores, memory.biases[pipe.index], boxes, warp_tile, p.scoring.scale);
      fence_view_async_shared();  // as for pairs below
    }
    finish_scores<T, kBlockN, kPlain>(scores, p.scoring, item(), groups);
    if (M::kTakesKeyBias && capped) {
      Scoring::to_tanh<T>(scores, p.scoring.scale * p.scoring.inverse_softcap());
    }
    if (!live.is_whole<kBlockN>()) {
      if constexpr (M::kTakesKeyBias) {
        if (p.scoring.key_bias != nullptr && live.ragged() != 0) {
          scale_and_add_key_bias<kBlockN>(scores, memory.key_biases[pipe.index], unit);
          unit = 1;
        }
      } else {
        add_key_bias<kBlockN, kPlain && !M::kHasPairBias>(scores, live, groups, p.scoring, item().work);
      }
      mask_scores<kBlockN, false, kLimits, M::kPacked, kMayBeBiased>(
          scores, live, groups, item(), p.scoring, p.lists.pairs == nullptr ? nullptr : memory.pairs[pipe.index]);

      if (by_window(kLimits) && p.lists.pairs != nullptr) {
        // Pairs are overwritten when keys are freed, which may be the next thing that happens.
        fence_view_async_shared();
      }
    }
    return unit;
  }

  __device__ __forceinline__ bool update_row_max(
      const ScoresOfStep& scores, float unit, float& rescale0, float& rescale8) {
    return rows.update_row_max(scores, softmax_scale_log2, rescale_threshold, rescale0, rescale8, unit);
  }
  __device__ __forceinline__ float2 exponentiate(ScoresOfStep& scores, float unit) const {
    if constexpr (kMayBeBiased) {
      if (rows.have_large_max()) {
        rows.scale_and_subtract_row_max(scores, unit);
        return rows.exponentiate(scores, kLog2E, 0);
      }
      return rows.exponentiate(scores, unit * kLog2E, kLog2E);
    }
    return rows.exponentiate(scores, softmax_scale_log2);
  }

  // The softmax without a look at maxima: scores lie too far above row_max. Computes them again, and moves it.
  __device__ __forceinline__ bool softmax_again(
      Output& output, ScoresOfStep& scores, const LiveGroups& live, float& rescale0, float& rescale8, float2& sums) {
    // Registers are short for it: what need not be there meanwhile is put aside, for which other steps do not pay then.
    volatile float aside[kHeadDim / 2];
    if constexpr (!kOverlaps) {
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) {
        aside[i] = output[i];
      }
    }
    multiply_warp_tile<T, kHeadDim, kBlockN, M::kRows>(
        scores, memory.queries[work_pipe.index], warp_tile % M::kRows, memory.stages[pipe.index].keys);
    const float unit = mask(scores, live);
    const bool moves = update_row_max(scores, unit, rescale0, rescale8);
    sums = exponentiate(scores, unit);
    if constexpr (!kOverlaps) {
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) {
        output[i] = aside[i];
      }
    }
    return moves;
  }

  // Scores become probabilities; returns as update_row_max does. Once all rows have a maximum new ones are not looked
  // at, unless checks_max, but sums tell if they would have been needed: then the warp computes its scores again.
  __device__ __forceinline__ bool softmax(
      Output& output, ScoresOfStep& scores, FirstKeys& first_keys, const LiveGroups& live, bool checks_max,
      float& rescale0, float& rescale8) {
    const float unit = mask(scores, live);
    // Before keys are free, and with them what is known of their groups.
    if (drops) {
#pragma unroll
      for (int g = 0; g < kBlockN / 16; ++g) {
        first_keys[g] = memory.groups[pipe.index][g].token;
      }
    }
    const bool skips_max = rows.have_row_max && !checks_max;
    bool moves = false;
    if (!skips_max) {
      if constexpr (M::kTakesKeyBias) {
        fence_view_async_shared();  // biases may not have been used yet
      }
      warp_arrive(memory.k_empty[pipe.index], lane);
      moves = update_row_max(scores, unit, rescale0, rescale8);
    }
    float2 sums = exponentiate(scores, unit);
    if (skips_max) {
      if (__any_sync(0xffffffffu, fmaxf(sums.x, sums.y) > kLargestRowSum<T>)) {
        moves = softmax_again(output, scores, live, rescale0, rescale8, sums);
      }
      warp_arrive(memory.k_empty[pipe.index], lane);
    }
    rows.row_sum0 += sums.x;
    rows.row_sum8 += sums.y;
    return moves;
  }

  // Leaves zeros where rounded probabilities are dropped.
  __device__ __forceinline__ void drop(Probs& probs, const FirstKeys& first_keys) const {
#pragma unroll
    for (int g = 0; g < kBlockN / 16; ++g) {
      const auto kept = Kept<false>::of_square<drops_by_halves(kScores)>(
          dropout, item().work.matrix, item().tokens[warp_tile], first_keys[g]);
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        probs[g][pair] &= kept.pairs[pair];
      }
    }
  }

  // Values that wait for their product would keep the pipeline from going on. Nobody frees values that are not there
  // yet: the phase they would be counted to may be the one before.
  __device__ __forceinline__ void skip_step(Output& output, const Probs& probs) {
    turns.pass_on();
    settle(output, probs);
    memory.v_full[pipe.index].wait(pipe.phase);
    warp_arrive(memory.k_empty[pipe.index], lane);
    warp_arrive(memory.v_empty[pipe.index], lane);
  }

  // A step's scores, and the last probabilities and values, multiplied; the scores become exponentials. `begins`:
  // what is owed is the work tile's before, whose results are handed over then.
  __device__ __forceinline__ void run_step(
      Output& output, ScoresOfStep& scores, const Probs& probs, FirstKeys& first_keys, const GmmaDescriptor& queries,
      const LiveGroups& live, bool checks_max, bool& begins) {
    float rescale0 = 1, rescale8 = 1;
    if constexpr (!kOverlaps) {
      if (owes) {
        multiply_values(output, probs);
      }
      multiply_scores(scores, queries);
      warpgroup_wait<0>();
      warpgroup_fence_operand(scores);
      if (owes) {
        values_are_added(output);
      }
      if (softmax(output, scores, first_keys, live, checks_max, rescale0, rescale8)) {
        rescale(output, rescale0, rescale8);
      }
    } else if (owes && !begins) {
      multiply_scores(scores, queries);
      multiply_values(output, probs);
      turns.pass_on();
      warpgroup_wait<1>();
      warpgroup_fence_operand(scores);
      const bool moves = softmax(output, scores, first_keys, live, checks_max, rescale0, rescale8);
      not_before(rows.row_sum0 + rows.row_sum8);
      warpgroup_wait<0>();
      values_are_added(output);
      if (moves) {
        rescale(output, rescale0, rescale8);
      }
    } else {
      if (owes) {
        multiply_scores(scores, queries);
        multiply_values(output, probs);
        turns.pass_on();
        warpgroup_wait<0>();
        warpgroup_fence_operand(scores);
        values_are_added(output);
      } else {
        multiply_scores(scores, queries);
        turns.pass_on();
        warpgroup_wait<0>();
        warpgroup_fence_operand(scores);
      }
      if (begins) {
        begin(output);
        begins = false;
      }
      if (softmax(output, scores, first_keys, live, checks_max, rescale0, rescale8)) {
        rescale(output, rescale0, rescale8);
      }
    }
  }

  __device__ __forceinline__ void run_work_tile(Output& output, ScoresOfStep& scores, Probs& probs) {
    const GmmaDescriptor queries = all_queries + uniform(work_pipe.index * sizeof(memory.queries[0]));
    const int steps = uniform(item().steps);
    bool begins = kOverlapsWork;
    if constexpr (!kOverlapsWork) {
      begin(output);
    }
    LiveGroups live{0};
    FirstKeys first_keys;
    // True to look at maxima in each step. Else keys have to stay until it is known that they are not needed again;
    // where there are two stages, and one short work tile comes after the other, copies are too late then.
    const bool checks_max = !kPlain || (kOverlaps && steps < 8);
    for (int step = 0; step < steps; ++step, pipe.next()) {
      memory.k_full[pipe.index].wait(pipe.phase);
      live = {uniform(memory.live[pipe.index][warp_tile / 16].bits)};
      turns.wait();
      if (live.warpgroup() == 0) {
        skip_step(output, probs);
        continue;
      }
      run_step(output, scores, probs, first_keys, queries, live, checks_max, begins);
      round_sums<T, kBlockN>(probs, scores);
      if (drops) {
        drop(probs, first_keys);
      }
      last = pipe;
      owes = true;
    }
    if constexpr (!kOverlapsWork) {
      settle(output, probs);
      store_results(output);
      summed_stage = -1;
    } else if (begins) {
      settle(output, probs);
      begin(output);
    }
  }
};

// The consumer warpgroups: products, softmax, results.
template <class T, int kHeadDim, Scores kScores, class M>
__device__ __forceinline__ void run_consumer(const Forward<T>& p, M& memory, int consumer_group) {
  using C = ForwardConsumer<T, kHeadDim, kScores, M>;
  C consumer(p, memory, consumer_group);
  typename C::Output output;
  typename C::ScoresOfStep scores;
  typename C::Probs probs;
  for (;; consumer.work_pipe.next()) {
    memory.q_full[consumer.work_pipe.index].wait(consumer.work_pipe.phase);
    if (consumer.item().steps < 0) {
      break;
    }
    consumer.run_work_tile(output, scores, probs);
  }
  consumer.settle(output, probs);
  if (consumer.summed_stage >= 0) {
    consumer.store_results(output);
  }
}

}  // namespace ds_sparse::attention
