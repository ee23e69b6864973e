// Fused attention, forward, on Hopper (scheduler_sm90.h). A work tile is 128 queries of one head against the keys and
// values of its list, 128 at a time, or 64.

#include <cstddef>

#include "arguments.h"
#include "forward_consumer_sm90.h"

namespace ds_sparse::attention {
namespace {

// The scheduler warp: writes work items and loads their queries, as soon as there is space for the next, and stores
// results.
template <class T, int kHeadDim, Scores kScores, class M>
__device__ __forceinline__ void run_scheduler(
    const Forward<T>& p, M& memory, const CUtensorMap* query_map, const OutputMaps<are_packed(kScores)>& output_maps,
    TileScheduler scheduler, int consumer_group) {
  constexpr int kBlockN = M::kBlockN, kWorkStages = M::kWorkStages;
  const int lane = threadIdx.x % 32;
  // Where a consumer group has half of a tile, two of them share tiles, and each has tickets of its own.
  const int half = M::kByHalves ? consumer_group % 2 : 0, first_row = half * M::kRows;
  if constexpr (M::kByHalves) {
    static_assert(offsetof(PassState, column_tickets) == offsetof(PassState, row_tickets) + sizeof(int));
    scheduler.taken += half;
    consumer_group /= 2;
  }
  const Boxes<T, kHeadDim, M::kRows> boxes(p.lists.log_block);
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
    if constexpr (M::kPacked) {
      store_packed_tile(output_maps, boxes, memory.queries[work_pipe.index], item, p.output, p.head_dim);
    } else if (boxes.any && item.tokens[first_row + boxes.tile_row] >= 0) {
      const int2 place = place_of_rows<M::kLimits>(p.output.tokens, item.tokens[first_row + boxes.tile_row], work.head);
      boxes.store(&output_maps.box, memory.queries[work_pipe.index], place.x, place.y, work.batch);
      tma_store_arrive();
    }
    if constexpr (!M::kByHalves) {
      const int64_t first = work.matrix * p.scoring.queries;
      for (int tile_row = lane; tile_row < kHopperBlockM; tile_row += 32) {
        if (item.tokens[tile_row] >= 0) {
          const RowMaxSum row = memory.row_max_sums[work_pipe.index][tile_row];
          p.row_max_sums[first + item.tokens[tile_row]] = row;
          p.lse[first + item.tokens[tile_row]] = row.lse();
        }
      }
    }
    tma_store_wait();
    __syncwarp();
  };
  int number = blockIdx.x + consumer_group * gridDim.x, ticket = scheduler.draw();
  const int work_tiles = p.lists.count_work_tiles();
  for (;; work_pipe.next(), ++count) {
    auto& item = memory.work_items[work_pipe.index];
    Barrier& full = memory.q_full[work_pipe.index];
    const auto wait_for_stage = [&]() {
      memory.work_empty[work_pipe.index].wait(work_pipe.phase ^ 1);
      if (count >= kWorkStages) {
        store_results();
      }
    };
    if (kWorkStages > 1 || number >= work_tiles * scheduler.walks) {
      wait_for_stage();
    }
    if (number >= work_tiles * scheduler.walks) {
      if (lane == 0) {
        item.steps = -1;
        memory.work_full[work_pipe.index].arrive();
        full.arrive();
      }
      break;
    }
    const WorkTile work(p.lists, number, work_tiles, 1);
    int steps = OtherSide<kBlockN>{nullptr, work.num_entries, p.lists.log_other}.steps();
    if constexpr (M::kByHalves) {
      const EntriesOfHalf own(
          p.lists.entries + work.first_entry, work.num_entries, LiveGroupFinder(p.lists).of_half(half));
      steps = OtherSide<kBlockN>{nullptr, own.count(), p.lists.log_other}.steps();
    }
    if (kWorkStages == 1) {  // with one stage the work tile before is under way until here
      wait_for_stage();
    }
    item.template set<M::kPacked>(work, steps, p.lists, p.scoring.queries, p.scoring);
    // Rows that do not exist are not copied, and nobody looks at what is in their place.
    const int token = boxes.any && steps > 0 ? item.tokens[first_row + boxes.tile_row] : -1;
    const int copies = __popc(__ballot_sync(0xffffffffu, token >= 0));
    if (lane == 0) {
      memory.work_full[work_pipe.index].arrive();
      full.arrive_and_expect_tx(copies * boxes.bytes());
    }
    if (token >= 0) {
      const int from = item.template in_memory<M::kPacked>(first_row + boxes.tile_row);
      const int2 place = place_of_rows<M::kLimits>(p.query.tokens, from, work.head);
      boxes.copy(memory.queries[work_pipe.index], query_map, &full, place.x, place.y, work.batch);
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
template <Loads kLoads, class T, int kHeadDim, Scores kScores, class M>
__device__ __forceinline__ void run_producer(
    const Forward<T>& p, M& memory, const CUtensorMap* key_map, const CUtensorMap* value_map,
    const BiasMap<pair_bias_of(kScores)>& bias_map, int half) {
  constexpr int kBlockN = M::kBlockN;
  constexpr Limits kLimits = M::kLimits;
  const int lane = threadIdx.x % 32;
  const Boxes<T, kHeadDim, kBlockN> boxes(p.lists.log_other);
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
    const OtherSide<kBlockN, M::kPacked> other{
        p.lists.entries + item.work.first_entry,
        item.work.num_entries,
        p.lists.log_other,
        p.scoring.keys,
        p.scoring.key_states_of(batch, item.work.head),
        M::kPacked ? p.lists.entry_spans + item.work.first_entry : nullptr};
    const auto group_mask = GroupMask<kLimits>::template of_warp_tile<false>(p.scoring, p.lists, item);

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
      EntriesOfHalf own(other.entries, M::kByHalves ? other.num_entries : 0, finder.of_half(half));
      const auto listed = [&](int step) {
        if constexpr (M::kByHalves) {
          return Listed<kBlockN, M::kPacked>(own.template next_of_step<kBlockN>(p.lists.log_other));
        } else {
          return Listed<kBlockN, M::kPacked>(other, step);
        }
      };
      auto next = listed(0);
      for (int step = 0; step < steps; ++step, pipe.next()) {
        const Gathered<kBlockN, M::kPacked> here(other, boxes, next, step);
        next = listed(step + 1);
        if constexpr (kLoads != Loads::kValues) {
          const LiveGroups live = finder.template find<kBlockN / 16, may_be_biased(kScores)>(here.group, group_mask);
          Barrier& full = memory.k_full[pipe.index];
          memory.k_empty[pipe.index].wait(pipe.phase ^ 1);
          int bytes = sizeof(memory.stages[0].keys);
          if constexpr (M::kHasPairBias) {
            bytes += BiasBoxes<kHopperBlockM, kBlockN>(p.lists.log_block, p.lists.log_other).bytes(memory.biases[0]);
          }
          if constexpr (M::kTakesKeyBias) {
            bytes += p.scoring.key_bias != nullptr ? sizeof(memory.key_biases[0]) : 0;
          }
          announce_step<kBlockN, kLimits>(memory, pipe.index, full, here, live, bytes, p.lists, item.work, step);
          if (boxes.any) {
            boxes.copy(memory.stages[pipe.index].keys, key_map, &full, here.token_in_memory, head, batch);
          }
          if constexpr (M::kTakesKeyBias) {
            if (p.scoring.key_bias != nullptr && boxes.any && boxes.panel == 0) {
              // Within the space that there is, whatever a list may say.
              const int count = 1 << boxes.log_tokens, space = space_of_key_bias(p.scoring.keys);
              bulk_load(
                  memory.key_biases[pipe.index] + boxes.tile_row,
                  p.scoring.key_bias_of(batch, item.work.head) + min(here.token, space - count),
                  int{sizeof(float)} * count, &full);
            }
          }
          if constexpr (M::kHasPairBias) {
            const BiasBoxes<kHopperBlockM, kBlockN> of_bias(p.lists.log_block, p.lists.log_other);
            const int2 box = of_bias.box();
            const int key = __shfl_sync(0xffffffffu, here.group.token, box.y / 16);
            const int query = box.x < kHopperBlockM ? item.tokens[box.x] : -1;
            of_bias.copy(
                memory.biases[pipe.index], bias_map, &full, p.scoring.rpe, query < 0 ? p.scoring.queries : query, key,
                item.work.head, batch);
          }
        }
        if constexpr (kLoads == Loads::kBoth) {
          if (step > 0) {
            copy_values();
          }
        }
        last = pipe;
        last_token = here.token_in_memory;
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

template <Scores kScores>
struct OtherMaps : OutputMaps<are_packed(kScores)>, BiasMap<pair_bias_of(kScores)> {};

template <class T, int kHeadDim, Scores kScores, class M>
__global__ void __launch_bounds__(M::kThreads, 1) forward_on_hopper_kernel(
    const __grid_constant__ Forward<T> p, const __grid_constant__ CUtensorMap query_map,
    const __grid_constant__ CUtensorMap key_map, const __grid_constant__ CUtensorMap value_map,
    const __grid_constant__ OtherMaps<kScores> other_maps, TileScheduler scheduler) {
  extern __shared__ unsigned char shared[];
  using Tuning = typename M::Tuning;
  constexpr int kConsumerGroups = Tuning::kConsumerGroups;
  M* memories = reinterpret_cast<M*>(align_panels(shared));
  if (threadIdx.x < kConsumerGroups) {
    M& memory = memories[threadIdx.x];
    for (int stage = 0; stage < M::kWorkStages; ++stage) {
      memory.work_full[stage].init(1);
      memory.q_full[stage].init(1);
      memory.work_empty[stage].init(4 * Tuning::kWarpgroups + Tuning::kProducerWarps);
    }
    for (int stage = 0; stage < M::kStages; ++stage) {
      memory.k_full[stage].init(1);
      memory.v_full[stage].init(1);
      memory.k_empty[stage].init(4 * Tuning::kWarpgroups);
      memory.v_empty[stage].init(4 * Tuning::kWarpgroups);
    }
    fence_barrier_init();
  }
  __syncthreads();
  let_next_begin();
  const auto consume = [&](int consumer_group) {
    run_consumer<T, kHeadDim, kScores, M>(p, memories[consumer_group], consumer_group);
  };
  const auto schedule = [&](int consumer_group) {
    run_scheduler<T, kHeadDim, kScores, M>(
        p, memories[consumer_group], &query_map, other_maps, scheduler, consumer_group);
  };
  if constexpr (Tuning::kProducerWarps == 2) {
    run_roles<kConsumerGroups, Tuning::kProducerRegisters, Tuning::kConsumerRegisters, M::kGroupThreads>(
        consume, schedule,
        [&](int consumer_group) {
          run_producer<Loads::kKeys, T, kHeadDim, kScores, M>(
              p, memories[consumer_group], &key_map, &value_map, other_maps, 0);
        },
        [&](int consumer_group) {
          run_producer<Loads::kValues, T, kHeadDim, kScores, M>(
              p, memories[consumer_group], &key_map, &value_map, other_maps, 0);
        });
  } else {
    run_roles<kConsumerGroups, Tuning::kProducerRegisters, Tuning::kConsumerRegisters, M::kGroupThreads>(
        consume, schedule, [&](int consumer_group) {
          run_producer<Loads::kBoth, T, kHeadDim, kScores, M>(
              p, memories[consumer_group], &key_map, &value_map, other_maps, consumer_group % 2);
        });
  }
}

template <class T, int kHeadDim, Scores kScores, class M>
void launch_forward(
    const Launcher& launch, const Forward<T>& p, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& output, int64_t copies) {
  constexpr int kConsumerGroups = M::Tuning::kConsumerGroups, kBlockN = M::kBlockN;
  static_assert(kConsumerGroups * sizeof(M) + kPanelAlignment <= kHopperMemory);
  const int box = std::min(1 << p.lists.log_other, kBlockN), own_box = std::min(1 << p.lists.log_block, M::kRows);
  const CUtensorMap query_map = tensor_map_of_rows(query, own_box);
  OtherMaps<kScores> other_maps{{tensor_map_of_rows(output, own_box)}};
  if constexpr (M::kPacked) {
    other_maps.warp_tile = tensor_map(output, 16);
  }
  const CUtensorMap key_map = tensor_map(key, box), value_map = tensor_map(value, box);
  std::optional<Tensor> of_distances;
  if constexpr (M::kPairBias == PairBias::kTile) {
    other_maps.bias = map_of_bias(
        p.scoring.rpe, query.scalar_type(), query.size(0), p.heads, p.scoring.queries, p.scoring.keys, own_box, box);
  } else if constexpr (M::kPairBias == PairBias::kStrips) {
    of_distances = set_distance_values<T>(
        launch, query, p.scoring.rpe, p.heads, p.scoring.queries, p.scoring.keys, 1 << p.lists.log_block,
        1 << p.lists.log_other, other_maps.values);
  }
  with_scheduler(
      launch, &p.state->row_tickets, p.lists, copies, M::kByHalves ? kConsumerGroups / 2 : kConsumerGroups,
      [&](const TileScheduler& scheduler, int64_t blocks) {
        launch.with_shared_memory(
            forward_on_hopper_kernel<T, kHeadDim, kScores, M>, blocks, M::kThreads,
            kConsumerGroups * sizeof(M) + kPanelAlignment, p, query_map, key_map, value_map, other_maps, scheduler);
      });
}

}  // namespace

template <class T>
void forward_on_hopper(
    const Launcher& launch, const Forward<T>& p, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& output, int64_t copies, bool rows_differ) {
  with_hopper_kernel(p.scoring, p.lists, p.head_dim, [&](auto head_dim, auto scores) {
    constexpr Scores kScores = decltype(scores)::value;
    constexpr int kHeadDim = decltype(head_dim)::value;
    if constexpr (kScores == Scores::kPlain && kHeadDim == 128) {
      if (rows_differ && p.lists.log_block <= 6) {
        return launch_forward<T, kHeadDim, kScores, ForwardMemory<T, kHeadDim, kScores, HalvesTuning>>(
            launch, p, query, key, value, output, copies);
      }
    }
    launch_forward<T, kHeadDim, kScores, ForwardMemory<T, kHeadDim, kScores>>(
        launch, p, query, key, value, output, copies);
  });
}

#if DS_SPARSE_DTYPES & 1
template void forward_on_hopper(
    const Launcher&, const Forward<__half>&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t, bool);
#endif
#if DS_SPARSE_DTYPES & 2
template void forward_on_hopper(
    const Launcher&, const Forward<__nv_bfloat16>&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t,
    bool);
#endif

}  // namespace ds_sparse::attention
