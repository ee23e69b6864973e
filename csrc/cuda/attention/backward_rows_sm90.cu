// Fused attention, backward by rows, on Hopper (scheduler_sm90.h): the gradient of queries alone, in a fixed order. A
// warpgroup multiplies the next scores, and gradients of probabilities, while it still adds the last to its sums.

#include "arguments.h"
#include "backward.h"
#include "epilogue_sm90.h"
#include "scores_sm90.h"

namespace ds_sparse::attention {
namespace {

constexpr int kBlockN = RowsTuning<64>::kBlockN;  // keys in a step
static_assert(kBlockN == RowsTuning<128>::kBlockN);

template <class T, int kHeadDim, Limits kLimits>
struct Memory {
  using Tuning = RowsTuning<kHeadDim>;
  static constexpr int kStages = Tuning::kStages, kWorkStages = Tuning::kWorkStages;
  struct Stage {
    Panels<T, kHeadDim, kBlockN> keys, values;
  };
  struct Own {
    Panels<T, kHeadDim, kHopperBlockM> queries, grads;
  };
  Own own[kWorkStages];
  Stage stages[kStages];
  Octet groups[kStages][kBlockN / 16];
  LiveGroups live[kStages][LiveGroupFinder::kWarpTiles];
  alignas(16) PairsOfStep<kBlockN, kLimits> pairs[kStages];
  WorkItemOf<kLimits> work_items[kWorkStages];
  Barrier q_full[kWorkStages], work_empty[kWorkStages], stage_full[kStages], stage_empty[kStages];
};

struct Maps {
  CUtensorMap query, grad_output, key, value, grad_query;
};

template <class T, int kHeadDim, Limits kLimits, bool kPacked>
__device__ __forceinline__ void run_producer(
    const Backward<T>& p, const Sweep<T>& sweep, const Maps& maps, Memory<T, kHeadDim, kLimits>& memory,
    TileScheduler scheduler) {
  const int lane = threadIdx.x % 32;
  const TileLists& lists = sweep.lists;
  const Boxes<T, kHeadDim, kHopperBlockM> own_boxes(lists.log_block);
  const Boxes<T, kHeadDim, kBlockN> boxes(lists.log_other);
  const LiveGroupFinder finder(lists);
  PipelineState<Memory<T, kHeadDim, kLimits>::kStages> pipe;
  PipelineState<Memory<T, kHeadDim, kLimits>::kWorkStages> work_pipe;
  const int work_tiles = lists.count_work_tiles();
  for (int number = blockIdx.x, ticket; number < work_tiles * scheduler.walks;
       number = TileScheduler::tile_of(ticket), work_pipe.next()) {
    ticket = scheduler.draw();
    const WorkTile work(lists, number, work_tiles, 1);
    const int kv_head = work.head / p.heads_of_group;
    const OtherSide<kBlockN, kPacked> other{
        lists.entries + work.first_entry,
        work.num_entries,
        lists.log_other,
        p.scoring.keys,
        p.scoring.key_states_of(work.batch, work.head),
        kPacked ? lists.entry_spans + work.first_entry : nullptr};
    const int steps = other.steps();
    auto& item = memory.work_items[work_pipe.index];
    auto& own = memory.own[work_pipe.index];
    Barrier& q_full = memory.q_full[work_pipe.index];
    memory.work_empty[work_pipe.index].wait(work_pipe.phase ^ 1);
    item.template set<kPacked>(work, steps, lists, p.scoring.queries, p.scoring);
    const int token = own_boxes.any && steps > 0 ? item.tokens[own_boxes.tile_row] : -1;
    const int copies = __popc(__ballot_sync(0xffffffffu, token >= 0));
    if (lane == 0) {
      q_full.arrive_and_expect_tx(2 * copies * own_boxes.bytes());
    }
    if (token >= 0) {
      const int from = item.template in_memory<kPacked>(own_boxes.tile_row);
      const int2 place = place_of_rows<kLimits>(p.query.tokens, from, work.head);
      own_boxes.copy(own.queries, &maps.query, &q_full, place.x, place.y, work.batch);
      const int2 of_grads = place_of_rows<kLimits>(p.grad_output.tokens, from, work.head);
      own_boxes.copy(own.grads, &maps.grad_output, &q_full, of_grads.x, of_grads.y, work.batch);
    }
    if (steps == 0) {
      continue;
    }
    const auto group_mask = GroupMask<kLimits>::template of_warp_tile<false>(p.scoring, lists, item);
    Listed<kBlockN, kPacked> next(other, 0);
    for (int step = 0; step < steps; ++step, pipe.next()) {
      auto& stage = memory.stages[pipe.index];
      Barrier& full = memory.stage_full[pipe.index];
      const Gathered<kBlockN, kPacked> here(other, boxes, next, step);
      next = Listed<kBlockN, kPacked>(other, step + 1);
      const LiveGroups live = finder.template find<kBlockN / 16, false>(here.group, group_mask);
      memory.stage_empty[pipe.index].wait(pipe.phase ^ 1);
      announce_step<kBlockN, kLimits>(memory, pipe.index, full, here, live, sizeof(stage), lists, work, step);
      if (boxes.any) {
        boxes.copy(stage.keys, &maps.key, &full, here.token_in_memory, kv_head, work.batch);
        boxes.copy(stage.values, &maps.value, &full, here.token_in_memory, kv_head, work.batch);
      }
    }
  }
  memory.work_empty[work_pipe.index].wait(work_pipe.phase ^ 1);
  if (lane == 0) {
    memory.work_items[work_pipe.index].steps = -1;
    memory.q_full[work_pipe.index].arrive();
  }
}

template <class T, int kHeadDim, Scores kScores>
__device__ __forceinline__ void run_consumer(
    const Backward<T>& p, const Sweep<T>& sweep, const Maps& maps, Memory<T, kHeadDim, limits_of(kScores)>& memory) {
  constexpr bool kPlain = are_plain(kScores);
  constexpr Limits kLimits = limits_of(kScores);
  const int thread = consumer_thread(), lane = thread % 32, warpgroup = uniform(thread / 128);
  const int warp_tile = warp_tile_row(thread), tile_row0 = lane_row(thread);
  const float softmax_scale_log2 = kPlain ? p.scoring.scale * kLog2E : kLog2E;
  const bool drops = attention::drops<kScores>(p.scoring), capped = has_softcap<kScores>(p.scoring);
  const Dropout dropout = drops ? p.scoring.dropout() : Dropout{};
  const float of_dropout = drops ? dropout.factor() : 1.0f;
  PipelineState<Memory<T, kHeadDim, kLimits>::kStages> pipe;
  PipelineState<Memory<T, kHeadDim, kLimits>::kWorkStages> work_pipe;
  const GmmaDescriptor all_queries(memory.own[0].queries[0] + 64 * warpgroup * kPanel);
  const GmmaDescriptor all_output_grads(memory.own[0].grads[0] + 64 * warpgroup * kPanel);
  const auto& first_stage = memory.stages[0];
  const GmmaDescriptor keys(first_stage.keys), values(first_stage.values),
      key_columns(first_stage.keys, sizeof(first_stage.keys[0]));

  for (;; work_pipe.next()) {
    memory.q_full[work_pipe.index].wait(work_pipe.phase);
    const auto& item = memory.work_items[work_pipe.index];
    if (item.steps < 0) {
      break;
    }
    const uint32_t of_stage = uniform(work_pipe.index * sizeof(memory.own[0]));
    const GmmaDescriptor queries = all_queries + of_stage, output_grads = all_output_grads + of_stage;
    const WorkTile work = item.work;
    const int steps = uniform(item.steps), token0 = item.tokens[tile_row0], token8 = item.tokens[tile_row0 + 8];
    const RowStats stats0 = token0 < 0 ? no_row_stats() : p.row_stats.at(work.matrix, token0);
    const RowStats stats8 = token8 < 0 ? no_row_stats() : p.row_stats.at(work.matrix, token8);

    float sums[kHeadDim / 2] = {};
    float probs[kBlockN / 2], grads[kBlockN / 2];
    uint32_t left[kBlockN / 16][4];
    LiveGroups live{0};
    KeptOfStep<false, drops_by_halves(kScores)> kept;

    const auto look = [&]() {
      memory.stage_full[pipe.index].wait(pipe.phase);
      live = {uniform(memory.live[pipe.index][warp_tile / 16].bits)};
    };
    const auto multiply_scores = [&]() {
      const uint32_t stage = uniform(pipe.index * sizeof(memory.stages[0]));
      multiply_rows<T, kHeadDim, kBlockN, kBlockN>(probs, queries, keys + stage);
      warpgroup_commit_batch();
      multiply_rows<T, kHeadDim, kBlockN, kBlockN>(grads, output_grads, values + stage);
      warpgroup_commit_batch();
    };
    const auto add_grads = [&](int stage) {
      multiply_columns<T, kHeadDim, kBlockN>(sums, left, key_columns + uniform(stage * sizeof(memory.stages[0])));
      warpgroup_commit_batch();
    };
    // Scores become probabilities, and the gradients of those the gradients of scores.
    const auto exponentiate = [&]() {
      warpgroup_fence_operand(probs);
      const Octet* groups = memory.groups[pipe.index];
      finish_scores<T, kBlockN, kPlain>(probs, p.scoring, item, groups);
      if (!live.is_whole<kBlockN>()) {
        add_key_bias<kBlockN, kPlain>(probs, live, groups, p.scoring, work);
        mask_scores<kBlockN, false, kLimits, are_packed(kScores)>(
            probs, live, groups, item, p.scoring, sweep.lists.pairs == nullptr ? nullptr : memory.pairs[pipe.index]);
      }
      if (drops) {
        kept.find(dropout, work.matrix, item.tokens[warp_tile], groups);
      }
#pragma unroll
      for (int i = 0; i < kBlockN / 2; ++i) {
        const RowStats& row = i % 4 < 2 ? stats0 : stats8;
        const float slope = capped ? p.scoring.cap_slope(probs[i]) : 1.0f;  // all that follows are gradients of scores
        probs[i] = kPlain ? exp2_approx(probs[i] * softmax_scale_log2 - row.lse)
                          : exp2_approx((probs[i] - row.row_max) * softmax_scale_log2) * row.inverse_sum;
        probs[i] *= slope;
      }
    };
    const auto differentiate = [&]() {
      warpgroup_fence_operand(grads);
#pragma unroll
      for (int i = 0; i < kBlockN / 2; ++i) {
        const float factor = !drops ? 1.0f : kept[i] ? of_dropout : 0.0f;
        grads[i] = probs[i] * (grads[i] * factor - (i % 4 < 2 ? stats0 : stats8).delta);
      }
    };
    const auto added = [&](int stage) {
      warpgroup_wait<0>();
      warpgroup_fence_operand(sums);
      warp_arrive(memory.stage_empty[stage], lane);
    };

    // Runs of steps that the warpgroup has a part in, as in the forward pass.
    for (int step = 0; step < steps;) {
      look();
      if (live.warpgroup() == 0) {
        warp_arrive(memory.stage_empty[pipe.index], lane);
        pipe.next();
        ++step;
        continue;
      }
      warpgroup_arrive();
      multiply_scores();
      warpgroup_wait<0>();
      exponentiate();
      differentiate();
      round_sums<T, kBlockN>(left, grads);
      int last = pipe.index;
      pipe.next();
      for (++step; step < steps; ++step, pipe.next()) {
        look();
        if (live.warpgroup() == 0) {
          break;
        }
        warpgroup_arrive();
        multiply_scores();
        add_grads(last);
        warpgroup_wait<2>();
        exponentiate();
        warpgroup_wait<1>();
        differentiate();
        added(last);
        round_sums<T, kBlockN>(left, grads);
        last = pipe.index;
      }
      warpgroup_arrive();
      add_grads(last);
      added(last);
    }
    named_barrier_sync<128>(1 + warpgroup);  // until the warpgroup is done with its queries, whose space serves now
    store_work_tile<kHeadDim, kScores>(
        sums, p.scoring.scale, p, sweep, item, memory.own[work_pipe.index].queries[0] + warp_tile * kPanel,
        kHopperBlockM * kPanel, &maps.grad_query, sweep.grad_first, sweep.first_splits, sweep.first_shares);
    if (lane == 0) {
      tma_store_wait();
    }
    warp_arrive(memory.work_empty[work_pipe.index], lane);
  }
}

template <class T, int kHeadDim, Scores kScores>
__global__ void __launch_bounds__(kHopperThreads<1>, 1) rows_on_hopper_kernel(
    const __grid_constant__ Backward<T> p, const __grid_constant__ Sweep<T> sweep, const __grid_constant__ Maps maps,
    TileScheduler scheduler) {
  extern __shared__ unsigned char shared[];
  using M = Memory<T, kHeadDim, limits_of(kScores)>;
  auto& memory = *reinterpret_cast<M*>(align_panels(shared));
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < M::kWorkStages; ++stage) {
      memory.q_full[stage].init(1);
      memory.work_empty[stage].init(4 * kConsumerWarpgroups);
    }
    for (int stage = 0; stage < M::kStages; ++stage) {
      memory.stage_full[stage].init(1);
      memory.stage_empty[stage].init(4 * kConsumerWarpgroups);
    }
    fence_barrier_init();
  }
  __syncthreads();
  run_roles<1, M::Tuning::kProducerRegisters, M::Tuning::kConsumerRegisters>(
      [&](int) { run_consumer<T, kHeadDim, kScores>(p, sweep, maps, memory); },
      [&](int) {
        run_producer<T, kHeadDim, limits_of(kScores), are_packed(kScores)>(p, sweep, maps, memory, scheduler);
      });
}

}  // namespace

template <class T>
void rows_on_hopper(
    const Launcher& launch, const Backward<T>& p, const Sweep<T>& sweep, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& grad_output, const Tensor& grad_query, int64_t copies) {
  with_hopper_kernel(p.scoring, sweep.lists, p.head_dim, [&](auto head_dim, auto scores) {
    constexpr Scores kScores = with_any_option(decltype(scores)::value);
    constexpr int kHeadDim = decltype(head_dim)::value;
    const int own_box = std::min(1 << sweep.lists.log_block, kHopperBlockM),
              box = std::min(1 << sweep.lists.log_other, kBlockN);
    const Maps maps{
        tensor_map_of_rows(query, own_box), tensor_map_of_rows(grad_output, own_box), tensor_map(key, box),
        tensor_map(value, box), tensor_map_of_rows(grad_query, 16)};
    with_scheduler(
        launch, &p.state->row_tickets, sweep.lists, copies, 1, [&](const TileScheduler& scheduler, int64_t blocks) {
          launch.with_shared_memory(
              rows_on_hopper_kernel<T, kHeadDim, kScores>, blocks, kHopperThreads<1>,
              sizeof(Memory<T, kHeadDim, limits_of(kScores)>) + kPanelAlignment, p, sweep, maps, scheduler);
        });
  });
}

template void rows_on_hopper(
    const Launcher&, const Backward<__half>&, const Sweep<__half>&, const Tensor&, const Tensor&, const Tensor&,
    const Tensor&, const Tensor&, int64_t);
template void rows_on_hopper(
    const Launcher&, const Backward<__nv_bfloat16>&, const Sweep<__nv_bfloat16>&, const Tensor&, const Tensor&,
    const Tensor&, const Tensor&, const Tensor&, int64_t);

}  // namespace ds_sparse::attention
