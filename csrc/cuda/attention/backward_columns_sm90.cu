// Fused attention, backward by columns, on Hopper (scheduler_sm90.h): a work tile is 128 keys and values of one head
// against the queries, and gradients of outputs, of its list, 64 at a time. Products are transposed (keys are the
// rows), so that probabilities are the left operand of the next product as they are. Gradients of queries, where they
// are asked for, are added to memory as they come, in an order that is not fixed: five products where two sweeps do
// seven. They take what all 128 keys give: a third warpgroup makes them where registers reach for one, else the two do,
// which then go in step.

#include "arguments.h"
#include "backward.h"
#include "epilogue_sm90.h"
#include "scores_sm90.h"

namespace ds_sparse::attention {
namespace {

constexpr int kBlockN = ColumnsTuning<64>::kBlockN;  // queries in a step
static_assert(kBlockN == ColumnsTuning<128>::kBlockN);

// True where the third warpgroup makes the gradients of queries.
template <int kHeadDim, bool kWithQueries>
constexpr bool kGradQueryApart = kWithQueries && ColumnsTuning<kHeadDim>::kHasThirdWarpgroup;

template <class T, int kHeadDim, Scores kScores, class Tuned = ColumnsTuning<kHeadDim, pair_bias_of(kScores)>>
struct Memory : BiasTiles<T, pair_bias_of(kScores), kBlockN, kHopperBlockM, Tuned::kStages> {
  using Tuning = Tuned;
  static constexpr Limits kLimits = limits_of(kScores);
  static constexpr int kStages = Tuning::kStages, kWorkStages = Tuning::kWorkStages, kOwnStages = Tuning::kOwnStages;
  static constexpr int kGradScoreStages = Tuning::kGradScoreStages;
  static constexpr bool kTakesColumns = take_stat_columns(kScores);
  struct Stage {
    Panels<T, kHeadDim, kBlockN> queries, grads;
  };
  struct Own {
    Panels<T, kHeadDim, kHopperBlockM> keys, values;
  };
  Own own[kOwnStages];
  Stage stages[kStages];
  Panels<T, kHopperBlockM, kBlockN> grad_scores[kGradScoreStages];  // a row for each query; of one step or two
  // For each warp that multiplies, eight runs of 16 x 8 sums; or rounded results, 16 rows of 64 in one half or two.
  alignas(kPanelAlignment) float4 spaces[kHopperBlockM / 16 + (Tuning::kHasThirdWarpgroup ? 4 : 0)][8][32];
  // Columns of log-sum-exps and of deltas, or members of RowStats.
  alignas(16) std::conditional_t<kTakesColumns, StatColumns[2][kBlockN], float[4][kBlockN]> row_stats[kStages];
  StatColumns ones[kTakesColumns ? 16 : 1];  // ones in eight rows' columns, and zeros in their next eight
  Octet groups[kStages][kBlockN / 16];
  LiveGroups live[kStages][LiveGroupFinder::kWarpTiles];
  alignas(16) PairsOfStep<kBlockN, kLimits> pairs[kStages];
  WorkItemOf<kLimits> work_items[kWorkStages];
  Barrier work_full[kWorkStages], kv_full[kWorkStages],
      work_empty[kWorkStages];  // full but for keys and values; with them
  Barrier own_empty[kOwnStages];
  Barrier stage_full[kStages], stage_empty[kStages];
  Barrier ds_full[kGradScoreStages], ds_empty[kGradScoreStages];  // for the third warpgroup
};

struct Maps {
  CUtensorMap key, value, query, grad_output, grad_key, grad_value;
};
template <Scores kScores>
struct MapsOf : Maps, BiasMap<pair_bias_of(kScores)> {};

// The scheduler warp: writes work items and loads their keys and values, as soon as there is space for the next.
template <class T, int kHeadDim, Scores kScores>
__device__ __forceinline__ void run_scheduler(
    const Backward<T>& p, const Sweep<T>& sweep, const Maps& maps, Memory<T, kHeadDim, kScores>& memory,
    TileScheduler scheduler) {
  const int lane = threadIdx.x % 32;
  const TileLists& lists = sweep.lists;
  const Boxes<T, kHeadDim, kHopperBlockM> boxes(lists.log_block);
  PipelineState<Memory<T, kHeadDim, kScores>::kWorkStages> work_pipe;
  PipelineState<Memory<T, kHeadDim, kScores>::kOwnStages> own_pipe;
  const int work_tiles = lists.count_work_tiles();
  for (int number = blockIdx.x, ticket; number < work_tiles * scheduler.walks;
       number = TileScheduler::tile_of(ticket), work_pipe.next(), own_pipe.next()) {
    ticket = scheduler.draw();
    const WorkTile work(lists, number, work_tiles, 1);
    const int kv_head = work.head / p.heads_of_group;
    auto& item = memory.work_items[work_pipe.index];
    auto& own = memory.own[own_pipe.index];
    Barrier& full = memory.kv_full[work_pipe.index];
    memory.work_empty[work_pipe.index].wait(work_pipe.phase ^ 1);
    item.template set<are_packed(kScores)>(work, 0, lists, p.scoring.keys, p.scoring);
    // Keys that are all masked have nothing to do.
    const uint8_t* states = p.scoring.key_states_of(work.batch, work.head);
    bool any = states == nullptr;
    for (int tile_row = lane; tile_row < kHopperBlockM && !any; tile_row += 32) {
      any = item.tokens[tile_row] >= 0 && states[item.tokens[tile_row] / 8] != kAllMasked;
    }
    const int all = OtherSide<kBlockN>{nullptr, work.num_entries, lists.log_other}.steps();
    const int steps = __any_sync(0xffffffffu, any) ? all : 0;
    if (lane == 0) {
      item.steps = steps;
      memory.work_full[work_pipe.index].arrive();
    }
    memory.own_empty[own_pipe.index].wait(own_pipe.phase ^ 1);
    if (lane == 0) {
      full.arrive_and_expect_tx(steps > 0 ? sizeof(own) : 0);
    }
    if (steps > 0 && boxes.any) {
      // Where there are no keys, the copy engine brings zeros.
      const int from = item.tokens[boxes.tile_row] < 0 ? p.scoring.keys
                                                       : item.template in_memory<are_packed(kScores)>(boxes.tile_row);
      boxes.copy(own.keys, &maps.key, &full, from, kv_head, work.batch);
      boxes.copy(own.values, &maps.value, &full, from, kv_head, work.batch);
    }
  }
  memory.work_empty[work_pipe.index].wait(work_pipe.phase ^ 1);
  if (lane == 0) {
    memory.work_items[work_pipe.index].steps = -1;
    memory.work_full[work_pipe.index].arrive();
    memory.kv_full[work_pipe.index].arrive();
  }
}

// The producer warps: one loads queries, and tells of each step what it is about, and one loads gradients of outputs,
// and row statistics: with small blocks that is more than one warp starts in time.
template <class T, int kHeadDim, Scores kScores, bool kOfGrads>
__device__ __forceinline__ void run_producer(
    const Backward<T>& p, const Sweep<T>& sweep, const MapsOf<kScores>& maps, Memory<T, kHeadDim, kScores>& memory) {
  constexpr bool kPlain = are_plain(kScores), kPacked = are_packed(kScores);
  constexpr bool kTakesColumns = take_stat_columns(kScores);
  constexpr Limits kLimits = limits_of(kScores);
  const int lane = threadIdx.x % 32;
  const TileLists& lists = sweep.lists;
  const Boxes<T, kHeadDim, kBlockN> boxes(lists.log_other);
  const LiveGroupFinder finder(lists);
  PipelineState<Memory<T, kHeadDim, kScores>::kStages> pipe;
  for (PipelineState<Memory<T, kHeadDim, kScores>::kWorkStages> work_pipe;; work_pipe.next()) {
    memory.work_full[work_pipe.index].wait(work_pipe.phase);
    const auto& item = memory.work_items[work_pipe.index];
    const WorkTile& work = item.work;
    const int steps = item.steps;
    if (steps < 0) {
      return;
    }
    if (steps > 0) {
      const OtherSide<kBlockN, kPacked> other{
          lists.entries + work.first_entry,
          work.num_entries,
          lists.log_other,
          p.scoring.queries,
          nullptr,
          kPacked ? lists.entry_spans + work.first_entry : nullptr};
      const auto group_mask = GroupMask<kLimits>::template of_warp_tile<true>(p.scoring, lists, item);
      Listed<kBlockN, kPacked> next(other, 0);
      for (int step = 0; step < steps; ++step, pipe.next()) {
        auto& stage = memory.stages[pipe.index];
        Barrier& full = memory.stage_full[pipe.index];
        const Gathered<kBlockN, kPacked> here(other, boxes, next, step);
        next = Listed<kBlockN, kPacked>(other, step + 1);
        if constexpr (kOfGrads) {
          const bool by_lse = kTakesColumns || (kPlain && !have_pair_bias(kScores) && p.scoring.key_bias == nullptr);
          const int members = by_lse ? 2 : 4;
          const auto of_member = [&](int member) {
            if constexpr (kTakesColumns) {
              return p.row_stats.stat_columns_of(work.matrix, member);
            } else {
              return p.row_stats.plane(work.matrix, member);
            }
          };
          memory.stage_empty[pipe.index].wait(pipe.phase ^ 1);
          if (lane == 0) {
            full.arrive_and_expect_tx(sizeof(stage.grads) + members * sizeof(memory.row_stats[0][0]));
          }
          __syncwarp();
          if (boxes.any) {
            const int2 place = place_of_rows<kLimits>(p.grad_output.tokens, here.token_in_memory, work.head);
            boxes.copy(stage.grads, &maps.grad_output, &full, place.x, place.y, work.batch);
            for (int member = boxes.panel; member < members; member += kHeadDim / kPanel) {
              auto& to = memory.row_stats[pipe.index][member];
              bulk_load(
                  to + boxes.tile_row, of_member(member) + here.token, int{sizeof(to[0])} << boxes.log_tokens, &full);
            }
          }
        } else {
          const LiveGroups live = finder.template find<kBlockN / 16, false>(here.group, group_mask);
          memory.stage_empty[pipe.index].wait(pipe.phase ^ 1);
          int bytes = sizeof(stage.queries);
          if constexpr (have_pair_bias(kScores)) {
            bytes += BiasBoxes<kBlockN, kHopperBlockM>(lists.log_other, lists.log_block).bytes(memory.biases[0]);
          }
          announce_step<kBlockN, kLimits>(memory, pipe.index, full, here, live, bytes, lists, work, step);
          if (boxes.any) {
            const int2 place = place_of_rows<kLimits>(p.query.tokens, here.token_in_memory, work.head);
            boxes.copy(stage.queries, &maps.query, &full, place.x, place.y, work.batch);
          }
          if constexpr (have_pair_bias(kScores)) {
            const BiasBoxes<kBlockN, kHopperBlockM> of_bias(lists.log_other, lists.log_block);
            const int2 box = of_bias.box();
            const int query = __shfl_sync(0xffffffffu, here.group.token, box.x / 16 % (kBlockN / 16));
            const int key = item.tokens[box.y];
            of_bias.copy(
                memory.biases[pipe.index], maps, &full, p.scoring.rpe, query, key < 0 ? p.scoring.keys : key, work.head,
                work.batch);
          }
        }
      }
    }
    warp_arrive(memory.work_empty[work_pipe.index], lane);
  }
}

// Adds a warp's 16 x 64 sums, of gradients of queries, to memory, by way of its space; null: to nothing.
__device__ __forceinline__ void add_grad_queries(float4 (&space)[8][32], const float (&sums)[32], float* to) {
  if (to == nullptr) {
    return;
  }
  const int lane = threadIdx.x % 32;
  warp_tma_store_wait(lane);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    space[i][lane] = make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
  }
  fence_view_async_shared();
  __syncwarp();
  if (lane == 0) {
    bulk_reduce_add(to, &space[0][0].x, sizeof(space));
  }
}

// Writes a warp tile's gradients of scores (16 keys x 64 queries) to its columns of panels with a row for each query:
// the left operand of the next product, along the sum.
template <class T>
__device__ __forceinline__ void store_grad_scores(
    Panels<T, kHopperBlockM, kBlockN>& to, int warp_tile, const uint32_t (&rounded)[kBlockN / 16][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < kBlockN / 16; ++j) {
    store_matrices_transposed(
        run_of_line(to[warp_tile / kPanel], 16 * j + lane / 16 * 8 + lane % 8, warp_tile % kPanel / 8 + lane / 8 % 2),
        rounded[j]);
  }
}

// sums = what the tile's keys give to the gradients of a step's queries, 64 columns of them.
template <class T>
__device__ __forceinline__ void multiply_grad_scores(
    float (&sums)[32], const GmmaDescriptor& grad_scores, const GmmaDescriptor& keys) {
  warpgroup_arrive();
#pragma unroll
  for (int k = 0; k < kHopperBlockM / 16; ++k) {
    constexpr int line = kPanel * sizeof(T);
    Wgmma<T>::template from_shared<64, false>(
        sums, grad_scores.from(k / 4 * kBlockN * line + k % 4 * 32), keys.from(k * 16 * line), k > 0);
  }
  warpgroup_commit_batch();
}

// The consumer that the third warpgroup is: gradients of queries.
template <class T, int kHeadDim, Scores kScores>
__device__ __forceinline__ void run_grad_query_consumer(const Backward<T>& p, Memory<T, kHeadDim, kScores>& memory) {
  const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32 % 4);
  const GmmaDescriptor all_keys(memory.own[0].keys[0]), all_grad_scores(memory.grad_scores[0]);
  auto& space = memory.spaces[kHopperBlockM / 16 + warp];
  PipelineState<Memory<T, kHeadDim, kScores>::kStages> pipe;
  PipelineState<Memory<T, kHeadDim, kScores>::kWorkStages> work_pipe;
  PipelineState<Memory<T, kHeadDim, kScores>::kOwnStages> own_pipe;
  PipelineState<Memory<T, kHeadDim, kScores>::kGradScoreStages> ds_pipe;
  for (;; work_pipe.next(), own_pipe.next()) {
    memory.kv_full[work_pipe.index].wait(work_pipe.phase);
    const auto& item = memory.work_items[work_pipe.index];
    const int steps = uniform(item.steps);
    if (steps < 0) {
      break;
    }
    const GmmaDescriptor keys = all_keys + uniform(own_pipe.index * sizeof(memory.own[0]));
    const int64_t matrix = item.work.matrix;
    for (int step = 0; step < steps; ++step, pipe.next(), ds_pipe.next()) {
      memory.ds_full[ds_pipe.index].wait(ds_pipe.phase);
      const Octet group = memory.groups[pipe.index][warp];
      warp_arrive(memory.stage_empty[pipe.index], lane);
      float sums[32];
      multiply_grad_scores<T>(sums, all_grad_scores + uniform(ds_pipe.index * sizeof(memory.grad_scores[0])), keys);
      warpgroup_wait<0>();
      warpgroup_fence_operand(sums);
      warp_arrive(memory.ds_empty[ds_pipe.index], lane);
      add_grad_queries(space, sums, group.owners != 0 ? p.grad_query_sums.warp_tile(matrix, group.token) : nullptr);
    }
    warp_arrive(memory.own_empty[own_pipe.index], lane);
    warp_arrive(memory.work_empty[work_pipe.index], lane);
  }
  if (lane == 0) {
    tma_store_wait();
  }
}

// Adds the bias of a lane's two keys to its scores.
template <bool kPlain, int kCount>
__device__ __forceinline__ void add_bias_of_rows(float (&scores)[kCount], float bias0, float bias8) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    scores[i] = Scoring::with_key_bias<kPlain>(scores[i], i % 4 < 2 ? bias0 : bias8);
  }
}

// Scales the scores and adds the bias of a lane's two keys.
template <int kCount>
__device__ __forceinline__ void scale_and_add_bias_of_rows(
    float (&scores)[kCount], float scale, float bias0, float bias8) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    scores[i] = fmaf(scores[i], scale, i % 4 < 2 ? bias0 : bias8);
  }
}

// Takes row maxima off, which are 0 then.
template <int kBlockN>
__device__ __forceinline__ void subtract_row_maxima(float (&scores)[kBlockN / 2], float2 (&row_maxima)[kBlockN / 8]) {
#pragma unroll
  for (int i = 0; i < kBlockN / 2; ++i) {
    scores[i] -= i % 2 ? row_maxima[i / 4].y : row_maxima[i / 4].x;
  }
#pragma unroll
  for (float2& row_max : row_maxima) {
    row_max = {0, 0};
  }
}

// Scores (64 keys by kBlockN queries) become probabilities. inverse_sum_of(n): 1 over the sums of the n-th pair of
// queries.
template <bool kPlain, int kBlockN, class F>
__device__ __forceinline__ void exponentiate(
    float (&probs)[kBlockN / 2], const float2 (&row_maxima)[kBlockN / 8], float softmax_scale_log2,
    const F& inverse_sum_of) {
#pragma unroll
  for (int n = 0; n < kBlockN / 8; ++n) {
    const float2 row_max = row_maxima[n], inverse_sum = kPlain ? make_float2(1, 1) : inverse_sum_of(n);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& prob = probs[4 * n + e];
      const float of_row = e % 2 ? row_max.y : row_max.x;
      prob = kPlain ? exp2_approx(prob * softmax_scale_log2 - of_row)
                    : exp2_approx((prob - of_row) * softmax_scale_log2) * (e % 2 ? inverse_sum.y : inverse_sum.x);
    }
  }
}

// The same of capped scores, kPlain: over the cap. rounded: the probabilities; probs: them times the cap's derivative.
template <class T, bool kPlain, int kBlockN, class F>
__device__ __forceinline__ void exponentiate_capped(
    uint32_t (&rounded)[kBlockN / 16][4], float (&probs)[kBlockN / 2], const float2 (&row_maxima)[kBlockN / 8],
    const Scoring& scoring, float softmax_scale_log2, const F& inverse_sum_of) {
  float slopes[kBlockN / 2];
#pragma unroll
  for (int i = 0; i < kBlockN / 2; ++i) {
    slopes[i] = kPlain ? Scoring::slope_of_tanh(probs[i]) : scoring.cap_slope(probs[i]);
  }
  exponentiate<kPlain, kBlockN>(probs, row_maxima, softmax_scale_log2, inverse_sum_of);
  round_sums<T, kBlockN>(rounded, probs);
#pragma unroll
  for (int i = 0; i < kBlockN / 2; ++i) {
    probs[i] *= slopes[i];
  }
}

// Gradients of probabilities become those of scores. delta_of(n): those of the n-th pair of queries; factor_of(i): what
// dropout multiplies a probability by.
template <int kBlockN, class D, class F>
__device__ __forceinline__ void to_score_gradients(
    float (&grads)[kBlockN / 2], const float (&probs)[kBlockN / 2], const D& delta_of, const F& factor_of) {
#pragma unroll
  for (int n = 0; n < kBlockN / 8; ++n) {
    const float2 delta = delta_of(n);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& grad = grads[4 * n + e];
      const float factor = factor_of(4 * n + e);
      grad = probs[4 * n + e] * (grad * factor - (e % 2 ? delta.y : delta.x));
    }
  }
}

// The epilogue: a warp's gradients of keys and values. Its space has room for both results, or for one after the other.
template <class T, int kHeadDim, Scores kScores>
__device__ __forceinline__ void store_gradients(
    const Backward<T>& p, const Sweep<T>& sweep, const Maps& maps, const WorkItem& item, T* space, float of_dropout,
    int lane, const float (&grad_key)[kHeadDim / 2], const float (&grad_value)[kHeadDim / 2]) {
  constexpr int kPanelsOfSpace = 2, kElements = 16 * kPanel;
  warp_tma_store_wait(lane);
  store_work_tile<kHeadDim, kScores>(
      grad_key, p.scoring.scale, p, sweep, item, space, kElements, &maps.grad_key, sweep.grad_first, sweep.first_splits,
      sweep.first_shares);
  if constexpr (kHeadDim == kPanelsOfSpace * kPanel) {
    warp_tma_store_wait(lane);
  } else {
    space += kElements;
  }
  store_work_tile<kHeadDim, kScores>(
      grad_value, of_dropout, p, sweep, item, space, kElements, &maps.grad_value, sweep.grad_second,
      sweep.second_splits, sweep.second_shares);
}

template <class T, int kHeadDim, Scores kScores, bool kWithQueries>
__device__ __forceinline__ void run_consumer(
    const Backward<T>& p, const Sweep<T>& sweep, const Maps& maps, Memory<T, kHeadDim, kScores>& memory) {
  constexpr bool kPlain = are_plain(kScores), kMayBeBiased = may_be_biased(kScores),
                 kHasPairBias = have_pair_bias(kScores);
  // Products bring row statistics. Else, where nothing else is done to them, gradients of probabilities begin at minus
  // delta, which is read before this warpgroup's products, as shared memory answers late while they run.
  constexpr bool kTakesColumns = take_stat_columns(kScores);
  constexpr bool kFromDelta = kHeadDim == 128 && (kScores == Scores::kBiased || kHasPairBias);
  constexpr Limits kLimits = limits_of(kScores);
  constexpr bool kGradQueryApart = attention::kGradQueryApart<kHeadDim, kWithQueries>;
  const int thread = consumer_thread(), lane = thread % 32, warpgroup = uniform(thread / 128);
  const int warp_tile = warp_tile_row(thread), tile_row0 = lane_row(thread);
  const bool drops = attention::drops<kScores>(p.scoring), capped = has_softcap<kScores>(p.scoring);
  const float softmax_scale_log2 = kPlain ? (capped ? p.scoring.softcap : p.scoring.scale) * kLog2E : kLog2E;
  const Dropout dropout = drops ? p.scoring.dropout() : Dropout{};
  const float of_dropout = drops ? dropout.factor() : 1.0f;
  PipelineState<Memory<T, kHeadDim, kScores>::kStages> pipe;
  PipelineState<Memory<T, kHeadDim, kScores>::kWorkStages> work_pipe;
  PipelineState<Memory<T, kHeadDim, kScores>::kOwnStages> own_pipe;
  PipelineState<Memory<T, kHeadDim, kScores>::kGradScoreStages> ds_pipe;
  const auto& own = memory.own[0];
  const GmmaDescriptor own_keys(own.keys[0] + 64 * warpgroup * kPanel),
      own_values(own.values[0] + 64 * warpgroup * kPanel);
  const GmmaDescriptor own_columns(own.keys[kHeadDim == 128 ? warpgroup : 0]);  // 64 of the keys' columns
  const auto& first_stage = memory.stages[0];
  const GmmaDescriptor queries(first_stage.queries), output_grads(first_stage.grads);
  const GmmaDescriptor query_columns(first_stage.queries, sizeof(first_stage.queries[0]));
  const GmmaDescriptor output_grad_columns(first_stage.grads, sizeof(first_stage.grads[0]));
  const GmmaDescriptor stats = GmmaDescriptor::of_short_rows(memory.row_stats[0]);
  const GmmaDescriptor ones = GmmaDescriptor::of_one_core(memory.ones);
  // Adds a row's statistic, 0 or 1, to a step's sums: its columns times ones for all keys.
  const auto add_stats = [&](float (&sums)[kBlockN / 2], int stage, int member) {
    const int place = stage * sizeof(memory.row_stats[0]) + member * sizeof(memory.row_stats[0][0]);
    Wgmma<__nv_bfloat16>::from_shared<kBlockN, true>(sums, ones.from(0), stats.from(place), true);
  };

  // Gradients of scores, for those of queries. They are written once the last in their place have been multiplied:
  // where both warpgroups do that, the other says so at barrier 2 + its number, and both have written at barrier 1.
  const auto hand_over = [&](const uint32_t (&rounded)[4][4]) {
    if constexpr (kGradQueryApart) {
      memory.ds_empty[ds_pipe.index].wait(ds_pipe.phase ^ 1);
    } else if constexpr (kWithQueries) {
      named_barrier_sync<256>(3 - warpgroup);
    }
    if constexpr (kWithQueries) {
      store_grad_scores<T>(memory.grad_scores[ds_pipe.index], warp_tile, rounded);
      fence_view_async_shared();
    }
    if constexpr (kGradQueryApart) {
      warp_arrive(memory.ds_full[ds_pipe.index], lane);
      ds_pipe.next();
    }
  };
  if constexpr (kWithQueries && !kGradQueryApart) {
    named_barrier_arrive<256>(2 + warpgroup);
  }
  for (;; work_pipe.next(), own_pipe.next()) {
    memory.kv_full[work_pipe.index].wait(work_pipe.phase);
    const auto& item = memory.work_items[work_pipe.index];
    if (item.steps < 0) {
      break;
    }
    const uint32_t of_own = uniform(own_pipe.index * sizeof(memory.own[0]));
    const GmmaDescriptor keys = own_keys + of_own, values = own_values + of_own, columns = own_columns + of_own;
    const WorkTile work = item.work;
    const int steps = uniform(item.steps), token0 = item.tokens[tile_row0], token8 = item.tokens[tile_row0 + 8];
    // Keys that do not exist must not add to the gradients of queries.
    const float* key_bias = p.scoring.key_bias_of(work.batch, work.head);
    const auto bias_of = [&](int token) {
      return token < 0 ? -kInfinity : key_bias != nullptr ? key_bias[token] : 0.0f;
    };
    const float bias0 = bias_of(token0), bias8 = bias_of(token8);
    const bool biased = __any_sync(0xffffffffu, bias0 != 0 || bias8 != 0);
    // Else keys that do not exist are all that is masked, for which row_max is not known.
    const bool scaled = kHasPairBias || (kMayBeBiased && biased && key_bias != nullptr && !capped);

    float grad_key[kHeadDim / 2] = {}, grad_value[kHeadDim / 2] = {};
    float probs[kBlockN / 2], grads[kBlockN / 2];
    uint32_t left_probs[kBlockN / 16][4], left_grads[kBlockN / 16][4];
    KeptOfStep<true, drops_by_halves(kScores)> kept;
    int last = -1;  // the stage whose products are still under way

    const auto are_added = [&]() {
      warpgroup_fence_operand(grad_key);
      warpgroup_fence_operand(grad_value);
      if (last >= 0) {
        warp_arrive(memory.stage_empty[last], lane);
        last = -1;
      }
    };

    // Where both warpgroups make the gradients of queries, each makes 64 columns: this begins, and what follows ends
    // it, once the product is done.
    const auto multiply_grad_queries = [&](float (&sums)[32]) {
      named_barrier_sync<256>(1);
      multiply_grad_scores<T>(sums, GmmaDescriptor(memory.grad_scores[0]), columns);
    };
    const auto add_sums = [&](float (&sums)[32]) {
      warpgroup_fence_operand(sums);
      named_barrier_arrive<256>(2 + warpgroup);
      const Octet group = memory.groups[pipe.index][warp_tile / 16 % 4];
      float* to = p.grad_query_sums.warp_tile(work.matrix, group.token) + warpgroup * 1024;
      add_grad_queries(memory.spaces[warp_tile / 16], sums, group.owners != 0 ? to : nullptr);
    };

    for (int step = 0; step < steps; ++step, pipe.next()) {
      memory.stage_full[pipe.index].wait(pipe.phase);
      const LiveGroups live{uniform(memory.live[pipe.index][warp_tile / 16].bits)};
      if (live.warpgroup() != 0) {
        const Octet* groups = memory.groups[pipe.index];
        const auto of_rows = [&](int member, int n) {
          return *reinterpret_cast<const float2*>(memory.row_stats[pipe.index][member] + 8 * n + lane % 4 * 2);
        };
        float2 row_maxima[kBlockN / 8] = {};  // 0 where products bring lse
        const auto read_row_maxima = [&]() {
#pragma unroll
          for (int n = 0; n < kBlockN / 8; ++n) {
            row_maxima[n] = of_rows(kPlain && !scaled ? 0 : 2, n);
          }
        };
        if constexpr (kFromDelta) {
          read_row_maxima();
#pragma unroll
          for (int i = 0; i < kBlockN / 2; ++i) {
            const float2 delta = of_rows(1, i / 4);
            grads[i] = i % 2 ? -delta.y : -delta.x;
          }
          warpgroup_fence_operand(grads);
        }
        warpgroup_arrive();
        const uint32_t here = uniform(pipe.index * sizeof(first_stage));
        multiply_rows<T, kHeadDim, kBlockN, kBlockN>(probs, keys, queries + here);
        if constexpr (kTakesColumns) {
          add_stats(probs, uniform(pipe.index), 0);
        }
        warpgroup_commit_batch();
        multiply_rows<T, kHeadDim, kBlockN, kBlockN>(grads, values, output_grads + here, kFromDelta);
        if constexpr (kTakesColumns) {
          add_stats(grads, uniform(pipe.index), 1);
        }
        warpgroup_commit_batch();
        if constexpr (!kFromDelta && !kTakesColumns) {
          read_row_maxima();  // not before, where the last step's products may be under way
        }
        if (drops) {
          kept.find(dropout, work.matrix, item.tokens[warp_tile], groups);
        }
        warpgroup_wait<1>();
        are_added();
        warpgroup_fence_operand(probs);
        finish_scores<T, kBlockN, kPlain, true>(probs, p.scoring, item, groups);
        if constexpr (kHasPairBias) {
          const BiasBoxes<kBlockN, kHopperBlockM> boxes(sweep.lists.log_other, sweep.lists.log_block);
          scale_and_add_pair_bias<T, pair_bias_of(kScores), true>(
              probs, memory.biases[pipe.index], boxes, warp_tile, p.scoring.scale);
        } else if (kMayBeBiased && capped) {
          Scoring::to_tanh<T>(probs, p.scoring.scale * p.scoring.inverse_softcap());
        } else if (scaled) {
          scale_and_add_bias_of_rows(probs, p.scoring.scale, bias0, bias8);
        }
        if (biased && (kHasPairBias || !scaled)) {
          add_bias_of_rows<kPlain && !kHasPairBias>(probs, bias0, bias8);
        }
        if (scaled) {
          subtract_row_maxima<kBlockN>(probs, row_maxima);
        }
        if (!live.is_whole<kBlockN>()) {
          mask_scores<kBlockN, true, kLimits>(
              probs, live, groups, item, p.scoring, sweep.lists.pairs == nullptr ? nullptr : memory.pairs[pipe.index]);
        }
        const auto inverse_sum_of = [&](int n) { return of_rows(3, n); };
        if (capped) {
          exponentiate_capped<T, kPlain, kBlockN>(
              left_probs, probs, row_maxima, p.scoring, softmax_scale_log2, inverse_sum_of);
        } else {
          exponentiate<kPlain, kBlockN>(probs, row_maxima, scaled ? kLog2E : softmax_scale_log2, inverse_sum_of);
          if (scaled) {
#pragma unroll
            for (int i = 0; i < kBlockN / 2; ++i) {
              const float2 inverse_sum = inverse_sum_of(i / 4);
              probs[i] *= i % 2 ? inverse_sum.y : inverse_sum.x;
            }
          }
          round_sums<T, kBlockN>(left_probs, probs);
        }
        if (drops) {
          kept.mask(left_probs);
        }
        warpgroup_arrive();
        multiply_columns<T, kHeadDim, kBlockN>(grad_value, left_probs, output_grad_columns + here);
        warpgroup_commit_batch();
        warpgroup_wait<1>();
        warpgroup_fence_operand(grads);
        to_score_gradients<kBlockN>(
            grads, probs, [&](int n) { return kFromDelta || kTakesColumns ? make_float2(0, 0) : of_rows(1, n); },
            [&](int i) { return !drops    ? 1.0f
                                : kept[i] ? of_dropout
                                          : 0.0f; });
        round_sums<T, kBlockN>(left_grads, grads);
        hand_over(left_grads);
        float sums[32];
        if constexpr (kWithQueries && !kGradQueryApart) {
          multiply_grad_queries(sums);  // before the keys' gradients, which are multiplied while these are added
        }
        warpgroup_arrive();
        multiply_columns<T, kHeadDim, kBlockN>(grad_key, left_grads, query_columns + here);
        warpgroup_commit_batch();
        if constexpr (kWithQueries && !kGradQueryApart) {
          warpgroup_wait<1>();
          add_sums(sums);
        }
        if constexpr (kHeadDim == 128) {
          warpgroup_wait<0>();  // registers do not reach to the next step
          warpgroup_fence_operand(grad_key);
        }
      } else {
        warpgroup_wait<0>();
        are_added();
        const uint32_t zeros[4][4] = {};
        hand_over(zeros);
        if constexpr (kWithQueries && !kGradQueryApart) {
          float sums[32];
          multiply_grad_queries(sums);
          warpgroup_wait<0>();
          add_sums(sums);
        }
      }
      last = pipe.index;
    }
    warpgroup_wait<0>();
    are_added();
    warp_arrive(memory.own_empty[own_pipe.index], lane);
    store_gradients<T, kHeadDim, kScores>(
        p, sweep, maps, item, reinterpret_cast<T*>(memory.spaces[warp_tile / 16]), of_dropout, lane, grad_key,
        grad_value);
    warp_arrive(memory.work_empty[work_pipe.index], lane);
  }
  if (lane == 0) {
    tma_store_wait();  // shared memory has to outlast them
  }
}

template <int kHeadDim, bool kWithQueries>
constexpr int kColumnThreads = kHopperThreads<1> + (kGradQueryApart<kHeadDim, kWithQueries> ? 128 : 0);

template <class T, int kHeadDim, Scores kScores, bool kWithQueries>
__global__ void __launch_bounds__(kColumnThreads<kHeadDim, kWithQueries>, 1) columns_on_hopper_kernel(
    const __grid_constant__ Backward<T> p, const __grid_constant__ Sweep<T> sweep,
    const __grid_constant__ MapsOf<kScores> maps, TileScheduler scheduler) {
  extern __shared__ unsigned char shared[];
  using M = Memory<T, kHeadDim, kScores>;
  using Tuning = typename M::Tuning;
  auto& memory = *reinterpret_cast<M*>(align_panels(shared));
  constexpr bool kGradQueryApart = attention::kGradQueryApart<kHeadDim, kWithQueries>;
  constexpr int kMultiplying = 4 * (kConsumerWarpgroups + (kGradQueryApart ? 1 : 0));  // warps
  if constexpr (M::kTakesColumns) {
    if (threadIdx.x < 16) {
      memory.ones[threadIdx.x] = {};
      for (int i = 0; i < kPartsOfStat; ++i) {
        memory.ones[threadIdx.x].parts[i] = threadIdx.x < 8 ? 1 : 0;
      }
      fence_view_async_shared();
    }
  }
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < M::kWorkStages; ++stage) {
      memory.work_full[stage].init(1);
      memory.kv_full[stage].init(1);
      memory.work_empty[stage].init(kMultiplying + Tuning::kProducerWarps);
    }
    for (int stage = 0; stage < M::kOwnStages; ++stage) {
      memory.own_empty[stage].init(kMultiplying);
    }
    for (int stage = 0; stage < M::kStages; ++stage) {
      memory.stage_full[stage].init(Tuning::kProducerWarps);
      memory.stage_empty[stage].init(kMultiplying);
    }
    for (int stage = 0; stage < M::kGradScoreStages; ++stage) {
      memory.ds_full[stage].init(4 * kConsumerWarpgroups);
      memory.ds_empty[stage].init(4);
    }
    fence_barrier_init();
  }
  __syncthreads();
  if constexpr (kGradQueryApart) {
    if (threadIdx.x >= kHopperThreads<1>) {
      warpgroup_reg_dealloc<Tuning::kThirdRegisters>();
      run_grad_query_consumer<T, kHeadDim, kScores>(p, memory);
      return;
    }
  }
  constexpr int kConsumerRegisters =
      kGradQueryApart ? Tuning::kConsumerRegistersBesideThird : Tuning::kConsumerRegisters;
  run_roles<1, Tuning::kProducerRegisters, kConsumerRegisters>(
      [&](int) { run_consumer<T, kHeadDim, kScores, kWithQueries>(p, sweep, maps, memory); },
      [&](int) { run_scheduler<T, kHeadDim, kScores>(p, sweep, maps, memory, scheduler); },
      [&](int) { run_producer<T, kHeadDim, kScores, false>(p, sweep, maps, memory); },
      [&](int) { run_producer<T, kHeadDim, kScores, true>(p, sweep, maps, memory); });
}

// Rounds the sums of a warp tile of 16 queries and 64 columns, as a warp's lanes hold them, and writes the queries'
// gradients.
template <class T, bool kPacked>
__global__ void round_grad_query_kernel(
    GradQuerySums sums, Matrices<T> grad, BlockSpans spans, int heads, int queries, int head_dim, float scale,
    PassState* state) {
  let_next_begin();
  const int64_t warp_tiles = sums.padded / 16, number = blockIdx.x;
  const int64_t matrix = number / warp_tiles;
  const int warp_tile = number % warp_tiles;
  T* to = grad.of(matrix / heads, matrix % heads);
  const int first = 16 * warp_tile;
  // Tokens behind the last block have no span.
  const int2 span = kPacked ? first < queries ? spans.sixteen(first) : int2{0, 0} : int2{first, queries - first};
  for (int place = threadIdx.x; place < 2 * head_dim; place += blockDim.x) {
    const int tile_row = place % 16, run = place / 16;
    if (tile_row >= span.y) {
      continue;
    }
    // Four lanes hold two of the run's eight columns each.
    const float* from = sums.warp_tile(matrix, first) + run * 128 + tile_row % 8 * 16 + tile_row / 8 * 2;
    uint4 rounded;
    uint32_t* pair = &rounded.x;
    float probe = 0;  // NaN where 0 is multiplied by what is not finite
#pragma unroll
    for (int lane = 0; lane < 4; ++lane) {
      const float first = from[4 * lane] * scale, second = from[4 * lane + 1] * scale;
      probe = fmaf(first, 0.0f, fmaf(second, 0.0f, probe));
      pair[lane] = AccumulatorAsA<T>::pack(first, second);
    }
    *reinterpret_cast<uint4*>(to + grad.tokens.at(span.x + tile_row) + 8 * run) = rounded;
    if (probe != 0) {
      state->not_finite = 1;
    }
  }
}

}  // namespace

template <class T>
void columns_on_hopper(
    const Launcher& launch, const Backward<T>& p, const Sweep<T>& sweep, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& grad_output, const Tensor& grad_key, const Tensor& grad_value, int64_t copies) {
  with_hopper_kernel(p.scoring, sweep.lists, p.head_dim, [&](auto head_dim, auto scores) {
    constexpr int kHeadDim = decltype(head_dim)::value;
    const int own_box = std::min(1 << sweep.lists.log_block, kHopperBlockM),
              box = std::min(1 << sweep.lists.log_other, kBlockN);
    const Maps maps{tensor_map(key, own_box),       tensor_map(value, own_box),
                    tensor_map_of_rows(query, box), tensor_map_of_rows(grad_output, box),
                    tensor_map(grad_key, 16),       tensor_map(grad_value, 16)};
    const auto run = [&](auto kind, auto with_queries) {
      constexpr Scores kScores = decltype(kind)::value;
      using M = Memory<T, kHeadDim, kScores>;
      static_assert(sizeof(M) + kPanelAlignment <= kHopperMemory);
      MapsOf<kScores> all_maps{maps};
      std::optional<Tensor> of_distances;
      if constexpr (pair_bias_of(kScores) == PairBias::kTile) {
        all_maps.bias = map_of_bias(
            p.scoring.rpe, query.scalar_type(), query.size(0), p.heads, p.scoring.queries, p.scoring.keys, box,
            std::min(own_box, kPanel));
      } else if constexpr (pair_bias_of(kScores) == PairBias::kStrips) {
        of_distances = set_distance_values<T>(
            launch, query, p.scoring.rpe, p.heads, p.scoring.queries, p.scoring.keys, 1 << sweep.lists.log_other,
            1 << sweep.lists.log_block, all_maps.values);
      }
      with_scheduler(
          launch, &p.state->column_tickets, sweep.lists, copies, 1,
          [&](const TileScheduler& scheduler, int64_t blocks) {
            launch.with_shared_memory(
                columns_on_hopper_kernel<T, kHeadDim, kScores, decltype(with_queries)::value>, blocks,
                kColumnThreads<kHeadDim, decltype(with_queries)::value>, sizeof(M) + kPanelAlignment, p, sweep,
                all_maps, scheduler);
          });
    };
    if (p.grad_query_sums.data == nullptr) {
      run(std::integral_constant<Scores, with_any_option(decltype(scores)::value)>{}, std::false_type{});
    } else {
      run(scores, std::true_type{});
    }
  });
}

template <class T>
void round_grad_query(
    const Launcher& launch, const Backward<T>& p, const Matrices<T>& grad_query, const BlockSpans& spans,
    int64_t batch) {
  launch(
      spans.spans == nullptr ? round_grad_query_kernel<T, false> : round_grad_query_kernel<T, true>,
      batch * p.heads * p.grad_query_sums.padded / 16, p.head_dim <= 64 ? 128 : 256, p.grad_query_sums, grad_query,
      spans, p.heads, p.scoring.queries, p.head_dim, p.scoring.scale, p.state);
}

#define DS_SPARSE_COLUMNS(T)                                                                             \
  template void columns_on_hopper(                                                                       \
      const Launcher&, const Backward<T>&, const Sweep<T>&, const Tensor&, const Tensor&, const Tensor&, \
      const Tensor&, const Tensor&, const Tensor&, int64_t);                                             \
  template void round_grad_query(const Launcher&, const Backward<T>&, const Matrices<T>&, const BlockSpans&, int64_t);
#if DS_SPARSE_DTYPES & 1
DS_SPARSE_COLUMNS(__half)
#endif
#if DS_SPARSE_DTYPES & 2
DS_SPARSE_COLUMNS(__nv_bfloat16)
#endif
#undef DS_SPARSE_COLUMNS

}  // namespace ds_sparse::attention
