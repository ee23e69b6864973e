// Fused attention, forward, on Hopper (scheduler_sm90.h). A work tile is 128 queries of one head against the keys and
// values of its list, 128 at a time, or 64. Where a thread block has one consumer group, a warpgroup multiplies the
// last probabilities and values while it does a softmax; where it has two, there are warps enough that do one while
// others do the other.

#include "arguments.h"
#include "epilogue_sm90.h"
#include "forward.h"
#include "scores_sm90.h"

namespace ds_sparse::attention {
namespace {

template <class T, int kHeadDim, Scores kScores>
struct alignas(kPanelAlignment) Memory {
  using Tuning = ForwardTuning<kHeadDim, are_plain(kScores)>;
  static constexpr int kBlockN = Tuning::kBlockN, kStages = Tuning::kStages, kWorkStages = Tuning::kWorkStages;
  static constexpr bool kLimited = are_limited(kScores);
  struct Stage {
    Panels<T, kHeadDim, kBlockN> keys, values;
  };
  Panels<T, kHeadDim, kHopperBlockM> queries[kWorkStages];  // then the work tile's results
  Stage stages[kStages];
  Octet groups[kStages][kBlockN / 16];
  LiveGroups live[kStages][LiveGroupFinder::kWarpTiles];
  RowMaxSum row_max_sums[kWorkStages][kHopperBlockM];  // of results
  alignas(16) PairsOfStep<kBlockN, kLimited> pairs[kStages];
  WorkItemOf<kLimited> work_items[kWorkStages];
  Barrier work_full[kWorkStages], q_full[kWorkStages],
      work_empty[kWorkStages];  // full but for the queries; with them; done with
  Barrier k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
};

// The scheduler warp: writes work items and loads their queries, as soon as there is space for the next, and stores
// results.
template <class T, int kHeadDim, Scores kScores>
__device__ __forceinline__ void run_scheduler(
    const Forward<T>& p, Memory<T, kHeadDim, kScores>& memory, const CUtensorMap* query_map,
    const CUtensorMap* output_map, TileScheduler scheduler, int consumer_group) {
  using M = Memory<T, kHeadDim, kScores>;
  constexpr int kBlockN = M::kBlockN, kWorkStages = M::kWorkStages;
  const int lane = threadIdx.x % 32;
  const Boxes<T, kHeadDim, kHopperBlockM> boxes(p.lists.log_block);
  PipelineState<kWorkStages> work_pipe;
  int count = 0;
  // Once a work item's stage is empty: what its work tile left there, but for splits, which are not rounded yet.
  const auto store_results = [&]() {
    const auto& item = memory.work_items[work_pipe.index];
    const WorkTile& work = item.work;
    const int split = work.split;
    __syncwarp();  // all lanes have read it before one of them writes the next work tile there
    if (split >= 0) {
      return;
    }
    if (boxes.any && item.tokens[boxes.tile_row] >= 0) {
      boxes.store(output_map, memory.queries[work_pipe.index], item.tokens[boxes.tile_row], work.head, work.batch);
      tma_store_arrive();
    }
    const int64_t first = work.matrix * p.scoring.queries;
    for (int tile_row = lane; tile_row < kHopperBlockM; tile_row += 32) {
      if (item.tokens[tile_row] >= 0) {
        const RowMaxSum row = memory.row_max_sums[work_pipe.index][tile_row];
        p.row_max_sums[first + item.tokens[tile_row]] = row;
        p.lse[first + item.tokens[tile_row]] = row.lse();
      }
    }
    tma_store_wait();
    __syncwarp();
  };
  int number = blockIdx.x + consumer_group * gridDim.x, ticket = scheduler.draw();
  for (;; work_pipe.next(), ++count) {
    memory.work_empty[work_pipe.index].wait(work_pipe.phase ^ 1);
    if (count >= kWorkStages) {
      store_results();
    }
    auto& item = memory.work_items[work_pipe.index];
    Barrier& full = memory.q_full[work_pipe.index];
    if (number >= scheduler.count) {
      if (lane == 0) {
        item.steps = -1;
        memory.work_full[work_pipe.index].arrive();
        full.arrive();
      }
      break;
    }
    const WorkTile work(p.lists, number, p.heads, p.layout_heads, 1);
    const int steps = OtherSide<kBlockN>{nullptr, work.num_entries, p.lists.log_block}.steps();
    item.set(work, steps, p.lists, p.scoring.queries, p.scoring);
    // What does not exist is not copied, and nobody looks at what is in its place.
    const int token = boxes.any && steps > 0 ? item.tokens[boxes.tile_row] : -1;
    const int copies = __popc(__ballot_sync(0xffffffffu, token >= 0));
    if (lane == 0) {
      memory.work_full[work_pipe.index].arrive();
      full.arrive_and_expect_tx(copies * boxes.bytes());
    }
    if (token >= 0) {
      boxes.copy(memory.queries[work_pipe.index], query_map, &full, token, work.head, work.batch);
    }
    number = TileScheduler::tile_of(ticket);
    ticket = scheduler.draw();
  }
  for (int left = min(count, kWorkStages - 1); left > 0; --left) {
    work_pipe.next();
    memory.work_empty[work_pipe.index].wait(work_pipe.phase ^ 1);
    store_results();
  }
}

enum class Loads { kBoth, kKeys, kValues };

// The producer warps: one loads keys, and tells of each step what it is about, and one loads values; or one loads both,
// where there are not as many.
template <Loads kLoads, class T, int kHeadDim, Scores kScores>
__device__ __forceinline__ void run_producer(
    const Forward<T>& p, Memory<T, kHeadDim, kScores>& memory, const CUtensorMap* key_map,
    const CUtensorMap* value_map) {
  using M = Memory<T, kHeadDim, kScores>;
  constexpr int kBlockN = M::kBlockN;
  constexpr bool kLimited = M::kLimited;
  const int lane = threadIdx.x % 32;
  const Boxes<T, kHeadDim, kBlockN> boxes(p.lists.log_block);
  const LiveGroupFinder finder(p.lists);
  PipelineState<M::kStages> pipe;

  for (PipelineState<M::kWorkStages> work_pipe;; work_pipe.next()) {
    memory.work_full[work_pipe.index].wait(work_pipe.phase);
    const auto& item = memory.work_items[work_pipe.index];
    const int steps = item.steps;
    if (steps < 0) {
      return;
    }
    const int head = item.work.head / p.heads_of_group, batch = item.work.batch;
    const OtherSide<kBlockN> other{
        p.lists.entries + item.work.first_entry, item.work.num_entries, p.lists.log_block, p.scoring.keys,
        p.scoring.key_states_of(batch, item.work.head)};
    const auto group_mask = GroupMask<kLimited>::template of_warp_tile<false>(p.scoring, p.lists, item);

    // By one warp, values come after the next step's keys: these are needed sooner, and their space is free sooner.
    auto last = pipe;
    int last_token = 0;
    const auto copy_values = [&]() {
      Barrier& full = memory.v_full[last.index];
      memory.v_empty[last.index].wait(last.phase ^ 1);
      if (lane == 0) {
        full.arrive_and_expect_tx(sizeof(memory.stages[0].values));
      }
      if (boxes.any) {
        boxes.copy(memory.stages[last.index].values, value_map, &full, last_token, head, batch);
      }
    };

    if (steps > 0) {
      Gathered<kBlockN> next(other, boxes, 0);
      for (int step = 0; step < steps; ++step, pipe.next()) {
        const Gathered<kBlockN> here = next;
        if (step + 1 < steps) {
          next = Gathered<kBlockN>(other, boxes, step + 1);
        }
        if constexpr (kLoads != Loads::kValues) {
          const LiveGroups live = finder.template find<kBlockN / 16>(here.group, group_mask);
          Barrier& full = memory.k_full[pipe.index];
          memory.k_empty[pipe.index].wait(pipe.phase ^ 1);
          announce_step<kBlockN, kLimited>(
              memory, pipe.index, full, here, live, sizeof(memory.stages[0].keys), p.lists, item.work, step);
          if (boxes.any) {
            boxes.copy(memory.stages[pipe.index].keys, key_map, &full, here.token, head, batch);
          }
        }
        if constexpr (kLoads == Loads::kBoth) {
          if (step > 0) {
            copy_values();
          }
        }
        last = pipe;
        last_token = here.token;
        if constexpr (kLoads == Loads::kValues) {
          copy_values();
        }
      }
      if constexpr (kLoads == Loads::kBoth) {
        copy_values();
      }
    }
    warp_arrive(memory.work_empty[work_pipe.index], lane);
  }
}

template <class T, int kHeadDim, Scores kScores>
__device__ __forceinline__ void run_consumer(
    const Forward<T>& p, Memory<T, kHeadDim, kScores>& memory, int consumer_group) {
  using M = Memory<T, kHeadDim, kScores>;
  constexpr bool kPlain = are_plain(kScores), kLimited = M::kLimited;
  constexpr int kBlockN = M::kBlockN;
  const int thread = consumer_thread(), lane = thread % 32, warpgroup = uniform(thread / 128);
  const int warp_tile = warp_tile_row(thread);
  const float softmax_scale_log2 = kPlain ? p.scoring.scale * kLog2E : kLog2E;
  // A new maximum becomes row_max only where it is this far above the last: by a factor of 256 for probabilities. Where
  // no maximum is looked at, a lane's row_sum of a step tells when probabilities come near the end of what fp16 holds,
  // or, in bf16, leave too little of fp32's range to sums of their products with values.
  const float rescale_threshold = 8 / softmax_scale_log2;
  constexpr float kLargestRowSum = std::is_same_v<T, __half> ? 0x1p15f : 0x1p30f;
  const bool drops = attention::drops<kScores>(p.scoring);
  const Dropout dropout = drops ? p.scoring.dropout() : Dropout{};
  const float bias_factor = kPlain ? 1 / p.scoring.scale : 1.0f;
  constexpr bool kOverlaps = M::Tuning::kConsumerGroups == 1;
  const Turns<kOverlaps> turns(warpgroup);
  using StageState = PipelineState<M::kStages>;
  StageState pipe;
  PipelineState<M::kWorkStages> work_pipe;

  // What the work tile in stage `summed_stage` has summed; where `owes`, the product of `probs` with the values of
  // stage `last` is still to be added. It is added together with the next step's scores, be they the next work tile's.
  float output[kHeadDim / 2];
  float scores[kBlockN / 2];
  uint32_t probs[kBlockN / 16][4];
  // What exponents are taken relative to in a lane's two rows, and the sums of exponentials; whether all rows of the
  // warp have a maximum.
  float row_max0 = -kInfinity, row_max8 = -kInfinity, row_sum0 = 0, row_sum8 = 0;
  bool have_row_max = false, owes = false;
  StageState last;
  int summed_stage = -1;
  const auto& stages = memory.stages;
  const GmmaDescriptor all_queries(memory.queries[0][0] + 64 * warpgroup * kPanel);
  const GmmaDescriptor keys(stages[0].keys), values(stages[0].values, sizeof(stages[0].values[0]));

  const auto multiply_values = [&]() {
    memory.v_full[last.index].wait(last.phase);
    warpgroup_arrive();
    multiply_columns<T, kHeadDim, kBlockN>(output, probs, values + uniform(last.index * sizeof(stages[0])));
    warpgroup_commit_batch();
  };
  const auto are_added = [&]() {
    warpgroup_fence_operand(output);
    warp_arrive(memory.v_empty[last.index], lane);
    owes = false;
  };
  // The epilogue: hands the results of a work tile over, with its stage.
  const auto epilogue = [&]() {
    const WorkTile& work = memory.work_items[summed_stage].work;
    // Asked for anew: what follows from it would be made once and, for want of registers, kept in memory.
    const int own_thread = consumer_thread(), tile_row0 = lane_row(own_thread);
    row_sum0 = row_reduce_sum(row_sum0);
    row_sum8 = row_reduce_sum(row_sum8);
    const float of_dropout = drops ? dropout.factor() : 1.0f;
    const float factor0 = row_sum0 > 0 ? of_dropout / row_sum0 : 0.0f,
                factor8 = row_sum8 > 0 ? of_dropout / row_sum8 : 0.0f;
    const float to_row_max = kPlain ? p.scoring.scale : 1.0f;
    const RowMaxSum stats0(row_max0 * to_row_max, row_sum0), stats8(row_max8 * to_row_max, row_sum8);
    if (work.split >= 0) {
      const int64_t place = p.split_outputs.first_row(p.lists, work.copy, work.split, work.sub_tile) + tile_row0;
      store_sums<kHeadDim>(output, factor0, factor8, p.head_dim, [&](int half) -> float* {
        const bool any = (half ? row_sum8 : row_sum0) != 0;
        return any ? p.split_outputs.data + (place + 8 * half) * p.head_dim : nullptr;
      });
      if (lane % 4 == 0) {
        p.split_row_max_sums[place] = stats0;
        p.split_row_max_sums[place + 8] = stats8;
      }
    } else {
      named_barrier_sync<128>(
          3 + kConsumerWarpgroups * consumer_group +
          warpgroup);  // until the warpgroup is done with its queries, whose space serves now
      auto& panels = memory.queries[summed_stage];
      store_warp_tile_to_panels<kHeadDim>(
          panels[0] + warp_tile_row(own_thread) * kPanel, kHopperBlockM * kPanel, output, factor0, factor8);
      if (lane % 4 == 0) {
        memory.row_max_sums[summed_stage][tile_row0] = stats0;
        memory.row_max_sums[summed_stage][tile_row0 + 8] = stats8;
      }
    }
    warp_arrive(memory.work_empty[summed_stage], lane);
  };
  const auto begin = [&](int of_stage) {
    if (summed_stage >= 0) {
      epilogue();
    }
    summed_stage = of_stage;
    row_max0 = row_max8 = -kInfinity;
    row_sum0 = row_sum8 = 0;
    have_row_max = false;
#pragma unroll
    for (float& sum : output) {
      sum = 0;
    }
  };
  const auto rescale_output = [&](float rescale0, float rescale8) {
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; i += 4) {
      output[i] *= rescale0;
      output[i + 1] *= rescale0;
      output[i + 2] *= rescale8;
      output[i + 3] *= rescale8;
    }
  };
  // Moves row_max to the scores' maxima where these are far above. Returns whether, and by what, to rescale the output.
  const auto update_row_max = [&](float& rescale0, float& rescale8) -> bool {
    // Four chains for each row: one would be bound by its latency.
    float largest[16];
#pragma unroll
    for (int i = 0; i < kBlockN / 2; ++i) {
      largest[i % 16] = i < 16 ? scores[i] : fmaxf(largest[i % 16], scores[i]);
    }
#pragma unroll
    for (int i = 4; i < 16; ++i) {
      largest[i % 4] = fmaxf(largest[i % 4], largest[i]);
    }
    const float new0 = fmaxf(row_max0, row_reduce_max(fmaxf(largest[0], largest[1])));
    const float new8 = fmaxf(row_max8, row_reduce_max(fmaxf(largest[2], largest[3])));
    const bool moves =
        __any_sync(0xffffffffu, new0 > row_max0 + rescale_threshold || new8 > row_max8 + rescale_threshold);
    if (moves) {
      rescale0 = exp2_approx((row_max0 - (new0 == -kInfinity ? 0.0f : new0)) * softmax_scale_log2);
      rescale8 = exp2_approx((row_max8 - (new8 == -kInfinity ? 0.0f : new8)) * softmax_scale_log2);
      row_max0 = new0;
      row_max8 = new8;
      row_sum0 *= rescale0;
      row_sum8 *= rescale8;
    }
    have_row_max = __all_sync(0xffffffffu, row_max0 > -kInfinity && row_max8 > -kInfinity);
    return moves;
  };
  const auto settle = [&]() {
    if (owes) {
      multiply_values();
      warpgroup_wait<0>();
      are_added();
    }
  };

  for (;; work_pipe.next()) {
    memory.q_full[work_pipe.index].wait(work_pipe.phase);
    const auto& item = memory.work_items[work_pipe.index];
    if (item.steps < 0) {
      break;
    }
    const GmmaDescriptor queries = all_queries + uniform(work_pipe.index * sizeof(memory.queries[0]));
    const WorkTile& work = item.work;
    const int steps = uniform(item.steps);
    bool begins = kOverlaps;
    if constexpr (!kOverlaps) {
      begin(work_pipe.index);
    }
    LiveGroups live{0};
    int first_keys[kBlockN / 16];

    const auto mask = [&]() {
      const Octet* groups = memory.groups[pipe.index];
      finish_scores<T, kBlockN, kPlain>(scores, p.scoring, item, groups);
      if (!live.is_whole<kBlockN>()) {
        add_key_bias<kBlockN>(scores, live, groups, p.scoring, work, bias_factor);
        mask_scores<kBlockN, false, kLimited>(
            scores, live, groups, item, p.scoring, p.lists.pairs == nullptr ? nullptr : memory.pairs[pipe.index]);
        if (kLimited && p.lists.pairs != nullptr) {
          // Pairs are overwritten when keys are freed, which may be the next thing that happens.
          fence_view_async_shared();
        }
      }
    };
    // Scores become exponentials, whose sums are the lane's.
    const auto exponentiate = [&]() -> float2 {
      const float base0 = row_max0 == -kInfinity ? 0.0f : row_max0, base8 = row_max8 == -kInfinity ? 0.0f : row_max8;
      const float scaled_max0 = base0 * softmax_scale_log2, scaled_max8 = base8 * softmax_scale_log2;
      float2 sums{0, 0};
#pragma unroll
      for (int i = 0; i < kBlockN / 2; i += 4) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          scores[i + e] = kPlain ? exp2_approx(scores[i + e] * softmax_scale_log2 - (e < 2 ? scaled_max0 : scaled_max8))
                                 : exp2_approx((scores[i + e] - (e < 2 ? base0 : base8)) * softmax_scale_log2);
        }
        sums.x += scores[i] + scores[i + 1];
        sums.y += scores[i + 2] + scores[i + 3];
      }
      return sums;
    };
    // Whether to look at maxima in each step. Else keys have to stay until it is known that they are not needed again;
    // where there are two stages, and one short work tile comes after the other, copies are too late then.
    const bool checks_max = !kPlain || (kOverlaps && steps < 8);
    // Scores become probabilities; returns as update_row_max does. Once all rows have a maximum new ones are not looked
    // at, but sums tell if they would have been needed: then the warp computes its scores again.
    const auto softmax = [&](float& rescale0, float& rescale8) -> bool {
      mask();
      // Before keys are free, and with them what is known of their groups.
      if (drops) {
#pragma unroll
        for (int g = 0; g < kBlockN / 16; ++g) {
          first_keys[g] = memory.groups[pipe.index][g].token;
        }
      }
      const bool skips_max = have_row_max && !checks_max;
      bool moves = false;
      if (!skips_max) {
        warp_arrive(memory.k_empty[pipe.index], lane);
        moves = update_row_max(rescale0, rescale8);
      }
      float2 sums = exponentiate();
      if (skips_max) {
        if (__any_sync(0xffffffffu, fmaxf(sums.x, sums.y) > kLargestRowSum)) {
          // Registers are short for it: what need not be there meanwhile is put aside, for which other steps do not pay
          // then.
          volatile float aside[kHeadDim / 2];
          if constexpr (!kOverlaps) {
#pragma unroll
            for (int i = 0; i < kHeadDim / 2; ++i) {
              aside[i] = output[i];
            }
          }
          multiply_warp_tile<T, kHeadDim, kBlockN>(
              scores, memory.queries[work_pipe.index], warp_tile, stages[pipe.index].keys);
          mask();
          moves = update_row_max(rescale0, rescale8);
          sums = exponentiate();
          if constexpr (!kOverlaps) {
#pragma unroll
            for (int i = 0; i < kHeadDim / 2; ++i) {
              output[i] = aside[i];
            }
          }
        }
        warp_arrive(memory.k_empty[pipe.index], lane);
      }
      row_sum0 += sums.x;
      row_sum8 += sums.y;
      return moves;
    };

    const auto multiply_scores = [&]() {
      warpgroup_arrive();
      multiply_rows<T, kHeadDim, kBlockN, kBlockN>(scores, queries, keys + uniform(pipe.index * sizeof(stages[0])));
      warpgroup_commit_batch();
    };

    for (int step = 0; step < steps; ++step, pipe.next()) {
      memory.k_full[pipe.index].wait(pipe.phase);
      live = {uniform(memory.live[pipe.index][warp_tile / 16].bits)};
      turns.wait();
      if (live.warpgroup() == 0) {
        // Values that wait for their product would keep the pipeline from going on. Nobody frees values that are not
        // there yet: the phase they would be counted to may be the one before.
        turns.pass_on();
        settle();
        memory.v_full[pipe.index].wait(pipe.phase);
        warp_arrive(memory.k_empty[pipe.index], lane);
        warp_arrive(memory.v_empty[pipe.index], lane);
        continue;
      }
      float rescale0 = 1, rescale8 = 1;
      if constexpr (!kOverlaps) {
        if (owes) {
          multiply_values();
        }
        multiply_scores();
        warpgroup_wait<0>();
        warpgroup_fence_operand(scores);
        if (owes) {
          are_added();
        }
        if (softmax(rescale0, rescale8)) {
          rescale_output(rescale0, rescale8);
        }
      } else if (owes && !begins) {
        multiply_scores();
        multiply_values();
        turns.pass_on();
        warpgroup_wait<1>();
        warpgroup_fence_operand(scores);
        const bool moves = softmax(rescale0, rescale8);
        not_before(row_sum0 + row_sum8);
        warpgroup_wait<0>();
        are_added();
        if (moves) {
          rescale_output(rescale0, rescale8);
        }
      } else {
        if (owes) {
          multiply_scores();
          multiply_values();
          turns.pass_on();
          warpgroup_wait<0>();
          warpgroup_fence_operand(scores);
          are_added();
        } else {
          multiply_scores();
          turns.pass_on();
          warpgroup_wait<0>();
          warpgroup_fence_operand(scores);
        }
        if (begins) {
          begin(work_pipe.index);
          begins = false;
        }
        if (softmax(rescale0, rescale8)) {
          rescale_output(rescale0, rescale8);
        }
      }
      round_sums<T, kBlockN>(probs, scores);
      if (drops) {
#pragma unroll
        for (int g = 0; g < kBlockN / 16; ++g) {
          const auto kept = Kept<false>::of_square(dropout, work.matrix, item.tokens[warp_tile], first_keys[g]);
#pragma unroll
          for (int pair = 0; pair < 4; ++pair) {
            probs[g][pair] &= kept.pairs[pair];
          }
        }
      }
      last = pipe;
      owes = true;
    }
    if constexpr (!kOverlaps) {
      settle();
      epilogue();
      summed_stage = -1;
    } else if (begins) {
      settle();
      begin(work_pipe.index);
    }
  }
  settle();
  if (summed_stage >= 0) {
    epilogue();
  }
}

template <class T, int kHeadDim, Scores kScores>
__global__ void __launch_bounds__(kHopperThreads<ForwardTuning<kHeadDim, are_plain(kScores)>::kConsumerGroups>, 1)
    forward_on_hopper_kernel(
        const __grid_constant__ Forward<T> p, const __grid_constant__ CUtensorMap query_map,
        const __grid_constant__ CUtensorMap key_map, const __grid_constant__ CUtensorMap value_map,
        const __grid_constant__ CUtensorMap output_map, TileScheduler scheduler) {
  extern __shared__ unsigned char shared[];
  using M = Memory<T, kHeadDim, kScores>;
  using Tuning = typename M::Tuning;
  constexpr int kConsumerGroups = Tuning::kConsumerGroups;
  M* memories = reinterpret_cast<M*>(align_panels(shared));
  if (threadIdx.x < kConsumerGroups) {
    M& memory = memories[threadIdx.x];
    for (int stage = 0; stage < M::kWorkStages; ++stage) {
      memory.work_full[stage].init(1);
      memory.q_full[stage].init(1);
      memory.work_empty[stage].init(4 * kConsumerWarpgroups + Tuning::kProducerWarps);
    }
    for (int stage = 0; stage < M::kStages; ++stage) {
      memory.k_full[stage].init(1);
      memory.v_full[stage].init(1);
      memory.k_empty[stage].init(4 * kConsumerWarpgroups);
      memory.v_empty[stage].init(4 * kConsumerWarpgroups);
    }
    fence_barrier_init();
  }
  __syncthreads();
  const auto consume = [&](int consumer_group) {
    run_consumer<T, kHeadDim, kScores>(p, memories[consumer_group], consumer_group);
  };
  const auto schedule = [&](int consumer_group) {
    run_scheduler(p, memories[consumer_group], &query_map, &output_map, scheduler, consumer_group);
  };
  if constexpr (Tuning::kProducerWarps == 2) {
    run_roles<kConsumerGroups, Tuning::kProducerRegisters, Tuning::kConsumerRegisters>(
        consume, schedule,
        [&](int consumer_group) { run_producer<Loads::kKeys>(p, memories[consumer_group], &key_map, &value_map); },
        [&](int consumer_group) { run_producer<Loads::kValues>(p, memories[consumer_group], &key_map, &value_map); });
  } else {
    run_roles<kConsumerGroups, Tuning::kProducerRegisters, Tuning::kConsumerRegisters>(
        consume, schedule,
        [&](int consumer_group) { run_producer<Loads::kBoth>(p, memories[consumer_group], &key_map, &value_map); });
  }
}

}  // namespace

template <class T>
void forward_on_hopper(
    const Launcher& launch, const Forward<T>& p, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& output, int64_t copies) {
  with_hopper_kernel(p.scoring, p.lists, p.head_dim, [&](auto head_dim, auto scores) {
    constexpr Scores kScores = decltype(scores)::value;
    constexpr int kHeadDim = decltype(head_dim)::value;
    using M = Memory<T, kHeadDim, kScores>;
    constexpr int kConsumerGroups = M::Tuning::kConsumerGroups, kBlockN = M::kBlockN;
    const int64_t count = copies * p.lists.num_work_tiles * p.lists.sub_tiles;
    const int block = 1 << p.lists.log_block;
    const int own_box = std::min(block, kHopperBlockM);
    const CUtensorMap query_map = tensor_map(query, own_box), output_map = tensor_map(output, own_box);
    const CUtensorMap key_map = tensor_map(key, std::min(block, kBlockN)),
                      value_map = tensor_map(value, std::min(block, kBlockN));
    with_scheduler(launch, query, count, kConsumerGroups, [&](const TileScheduler& scheduler, int64_t blocks) {
      launch.with_shared_memory(
          forward_on_hopper_kernel<T, kHeadDim, kScores>, blocks, kHopperThreads<kConsumerGroups>,
          kConsumerGroups * sizeof(M) + kPanelAlignment, p, query_map, key_map, value_map, output_map, scheduler);
    });
  });
}

template void forward_on_hopper(
    const Launcher&, const Forward<__half>&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t);
template void forward_on_hopper(
    const Launcher&, const Forward<__nv_bfloat16>&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
    int64_t);

}  // namespace ds_sparse::attention
