// Fused attention, backward, on Hopper (attention_sm90.h): the two sweeps of attention_backward.cu. Where registers allow
// it, a warpgroup multiplies the next scores, and gradients of probabilities, while it still adds the last to its sums.

#include "attention_arguments.h"
#include "attention_backward.h"
#include "attention_sm90.h"

namespace ds_sparse::attention {
namespace {

constexpr int kN = 64;  // tokens of the other side in a step

// By columns, own are keys and values, the others queries and gradients of outputs; by rows the other way round.
template <class T, int kD>
struct Memory {
  static constexpr int kStages = 4, kSlots = kD == 64 ? 2 : 1;
  struct Stage {
    Panels<T, kD, kN> first, second;
  };
  struct Own {
    Panels<T, kD, kHopperTile> first, second;
  };
  Own own[kSlots];
  Stage stages[kStages];
  Row rows[kStages][kN];
  Octet groups[kStages][kN / 16];
  Task tasks[kSlots];
  Barrier task_there[kSlots], task_free[kSlots], there[kStages], free[kStages];
};

struct Maps {
  CUtensorMap own_first, own_second, first, second;
};

template <class T, int kD, bool kByColumns>
__device__ __forceinline__ void copy_all(
    const Backward<T>& p, const Sweep<T>& sweep, const Maps& maps, Memory<T, kD>& memory, int64_t num_work) {
  const int lane = threadIdx.x % 32;
  const Lists& lists = sweep.lists;
  const int own_length = kByColumns ? p.scoring.keys : p.scoring.queries;
  const int other_length = kByColumns ? p.scoring.queries : p.scoring.keys;
  const Boxes<T, kD, kHopperTile> own_boxes(lists.log_block);
  const Boxes<T, kD, kN> boxes(lists.log_block);
  Ring<Memory<T, kD>::kStages> ring;
  Ring<Memory<T, kD>::kSlots> slot;
  for (int64_t number = blockIdx.x; number < num_work; number += gridDim.x, slot.next()) {
    const Work work(lists, number, p.heads, p.layout_heads, 1);
    const int kv_head = work.head / p.heads_of_group;
    const int own_head = kByColumns ? kv_head : work.head, other_head = kByColumns ? work.head : kv_head;
    const Row* rows = p.rows.of(work.matrix);
    const Other<kN> other{lists.entries + work.first_entry, work.num_entries, lists.log_block, other_length};
    const int steps = other.steps();
    Task& task = memory.tasks[slot.stage];
    auto& own = memory.own[slot.stage];
    Barrier& task_there = memory.task_there[slot.stage];
    memory.task_free[slot.stage].wait(slot.parity ^ 1);
    task.set(work, steps, lists, own_length);
    const int token = own_boxes.any && steps > 0 ? task.tokens[own_boxes.line] : -1;
    const int copies = __popc(__ballot_sync(0xffffffffu, token >= 0));
    if (lane == 0) {
      task_there.arrive_and_expect(2 * copies * own_boxes.bytes());
    }
    if (token >= 0) {
      own_boxes.copy(own.first, &maps.own_first, &task_there, token, own_head, work.batch);
      own_boxes.copy(own.second, &maps.own_second, &task_there, token, own_head, work.batch);
    }
    if (steps == 0) {
      continue;
    }
    Gathered<kN> next(other, boxes, 0);
    for (int step = 0; step < steps; ++step, ring.next()) {
      auto& stage = memory.stages[ring.stage];
      Barrier& there = memory.there[ring.stage];
      const Gathered<kN> here = next;
      if (step + 1 < steps) {
        next = Gathered<kN>(other, boxes, step + 1);
      }
      memory.free[ring.stage].wait(ring.parity ^ 1);
      if (lane < kN / 16) {
        memory.groups[ring.stage][lane] = here.group;
      }
      __syncwarp();
      if (lane == 0) {
        there.arrive_and_expect(sizeof(stage) + (kByColumns ? sizeof(memory.rows[0]) : 0));
      }
      if (boxes.any) {
        boxes.copy(stage.first, &maps.first, &there, here.token, other_head, work.batch);
        boxes.copy(stage.second, &maps.second, &there, here.token, other_head, work.batch);
        if (kByColumns && boxes.panel == 0) {
          copy_bytes(
              memory.rows[ring.stage] + boxes.line, rows + here.token, int{sizeof(Row)} << boxes.log_tokens, &there);
        }
      }
    }
  }
}

template <class T, int kD, bool kByColumns, bool kPlain>
__device__ __forceinline__ void multiply_all(
    const Backward<T>& p, const Sweep<T>& sweep, Memory<T, kD>& memory, int64_t num_work) {
  const int lane = threadIdx.x % 32, warpgroup = threadIdx.x / 128 - 1;
  const int line0 = (threadIdx.x / 32 - 4) * 16 + lane / 4;
  const float unit = kPlain ? p.scoring.scale * kLog2E : kLog2E;
  const Lists& lists = sweep.lists;
  const int own_length = kByColumns ? p.scoring.keys : p.scoring.queries;
  const int other_length = kByColumns ? p.scoring.queries : p.scoring.keys;
  const float of_dropout = kPlain || p.scoring.dropout_seed == nullptr ? 1.0f : p.scoring.dropout().factor();
  const Lines lines(lists);
  // Two tiles of sums leave registers for one step at a time, and the warpgroups' steps overlap each other.
  constexpr bool kOverlaps = !(kByColumns && kD == 128);
  Ring<Memory<T, kD>::kStages> ring;
  Ring<Memory<T, kD>::kSlots> slot;

  for (int64_t number = blockIdx.x; number < num_work; number += gridDim.x, slot.next()) {
    memory.task_there[slot.stage].wait(slot.parity);
    const Task& task = memory.tasks[slot.stage];
    const auto& own = memory.own[slot.stage];
    const Work work = task.work;
    const int steps = task.steps, token0 = task.tokens[line0], token8 = task.tokens[line0 + 8];
    const int first_token = __shfl_sync(0xffffffffu, token0, 0);
    const Row* rows = p.rows.of(work.matrix);
    const Row row0 = kByColumns || token0 < 0 ? no_row() : rows[token0];
    const Row row8 = kByColumns || token8 < 0 ? no_row() : rows[token8];

    // Of the first operand of the own side; and of values.
    float sums_first[kD / 2] = {};
    float sums_second[kByColumns ? kD / 2 : 4] = {};
    float probs[kN / 2], grads[kN / 2];
    uint32_t left_probs[kByColumns ? kN / 16 : 1][4], left_grads[kN / 16][4];
    LiveGroups live;
    uint32_t kept = ~0u;  // by dropout: a bit for each probability

    const auto look = [&]() {
      memory.there[ring.stage].wait(ring.parity);
      live = LiveGroups(memory.groups[ring.stage], kN / 16, lines, [&](int token) {
        const bool in_order = kByColumns ? token >= first_token + 15
                                         : static_cast<uint32_t>(token + 15) <= static_cast<uint32_t>(first_token);
        return token + 16 <= other_length && (in_order || !p.scoring.causal);
      });
    };
    const auto multiply_scores = [&]() {
      multiply_lines<kD, kN>(probs, own.first, warpgroup, memory.stages[ring.stage].first);
      end_products();
      multiply_lines<kD, kN>(grads, own.second, warpgroup, memory.stages[ring.stage].second);
      end_products();
    };
    const auto add_probs = [&](int stage) {
      if constexpr (kByColumns) {
        multiply_columns<kD, kN>(sums_second, left_probs, memory.stages[stage].second);
        end_products();
      }
    };
    const auto add_grads = [&](int stage) {
      multiply_columns<kD, kN>(sums_first, left_grads, memory.stages[stage].first);
      end_products();
    };
    // A lane's two rows of every eight queries, by columns; by rows its own two.
    const auto rows_of = [&](int n, Row(&to)[2]) {
      if constexpr (kByColumns) {
        to[0] = memory.rows[ring.stage][8 * n + lane % 4 * 2];
        to[1] = memory.rows[ring.stage][8 * n + lane % 4 * 2 + 1];
      } else {
        to[0] = row0;
        to[1] = row8;
      }
    };
    // Scores become probabilities, and the gradients of those the gradients of scores.
    const auto exponentiate = [&]() {
      sums_are_there(probs);
      constexpr uint32_t all = (1u << kN / 16) - 1;
      const Octet* groups = memory.groups[ring.stage];
      if (!kPlain || live.strip != all || live.ragged != 0) {
#pragma unroll
        for (int g = 0; g < kN / 16; ++g) {
          const int first = groups[g].token + lane % 4 * 2;
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            float& score = probs[8 * g + e];
            const int mine = e % 4 < 2 ? token0 : token8, its = first + e / 4 * 8 + e % 2;
            const int i = kByColumns ? its : mine, j = kByColumns ? mine : its;
            bool counts = live.strip >> g & 1;
            if (live.ragged >> g & 1) {
              counts = counts && its < other_length && !(p.scoring.causal && j > i);
            }
            if constexpr (!kPlain) {
              counts = counts && mine >= 0;
              score = counts ? p.scoring.template score<T>(score, work.batch, work.head, i, j) : -kInfinity;
            } else if (!counts) {
              score = -kInfinity;
            }
          }
        }
      }
      if constexpr (!kPlain) {
        if (p.scoring.dropout_seed != nullptr) {
          kept = kept_by<kN, kByColumns>(p.scoring.dropout(), work.matrix, token0, groups);
        }
      }
#pragma unroll
      for (int n = 0; n < kN / 8; ++n) {
        Row row[2];
        rows_of(n, row);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const Row& of_row = row[kByColumns ? e % 2 : e / 2];
          const float exponent =
              kPlain ? probs[4 * n + e] * unit - of_row.lse : probs[4 * n + e] * unit - of_row.origin - of_row.log_sum;
          probs[4 * n + e] = exp2_of(exponent);
        }
      }
    };
    const auto differentiate = [&]() {
      sums_are_there(grads);
#pragma unroll
      for (int n = 0; n < kN / 8; ++n) {
        Row row[2];
        rows_of(n, row);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if constexpr (!kPlain) {
            grads[4 * n + e] = kept >> (4 * n + e) & 1 ? grads[4 * n + e] * of_dropout : 0.0f;
          }
          grads[4 * n + e] = probs[4 * n + e] * (grads[4 * n + e] - row[kByColumns ? e % 2 : e / 2].delta);
        }
      }
    };
    const auto round_probs = [&]() {
      if constexpr (kByColumns && kPlain) {
        round_sums<T, kN>(left_probs, probs);
      } else if constexpr (kByColumns) {
        float dropped[kN / 2];
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) {
          dropped[i] = kept >> i & 1 ? probs[i] * of_dropout : 0.0f;
        }
        round_sums<T, kN>(left_probs, dropped);
      }
    };
    const auto added = [&](int stage) {
      wait_for_products<0>();
      sums_are_there(sums_first);
      if constexpr (kByColumns) {
        sums_are_there(sums_second);
      }
      arrive_once(memory.free[stage]);
    };

    // Runs of steps that the warpgroup has a part in, as in the forward pass.
    for (int step = 0; step < steps;) {
      look();
      if (live.warpgroup == 0) {
        __syncwarp();
        arrive_once(memory.free[ring.stage]);
        ring.next();
        ++step;
        continue;
      }
      begin_products();
      multiply_scores();
      if constexpr (!kOverlaps) {
        wait_for_products<1>();
        exponentiate();
        round_probs();
        begin_products();
        add_probs(ring.stage);
        wait_for_products<1>();
        differentiate();
        round_sums<T, kN>(left_grads, grads);
        begin_products();
        add_grads(ring.stage);
        added(ring.stage);
        ring.next();
        ++step;
        continue;
      }
      wait_for_products<0>();
      exponentiate();
      differentiate();
      round_probs();
      round_sums<T, kN>(left_grads, grads);
      int last = ring.stage;
      ring.next();
      for (++step; step < steps; ++step, ring.next()) {
        look();
        if (live.warpgroup == 0) {
          break;
        }
        begin_products();
        multiply_scores();
        add_probs(last);
        add_grads(last);
        wait_for_products<kByColumns ? 3 : 2>();
        exponentiate();
        wait_for_products<kByColumns ? 2 : 1>();
        differentiate();
        added(last);
        round_probs();
        round_sums<T, kN>(left_grads, grads);
        last = ring.stage;
      }
      begin_products();
      add_probs(last);
      add_grads(last);
      added(last);
    }
    __syncwarp();
    arrive_once(memory.task_free[slot.stage]);

    const auto store = [&](const float(&sums)[kD / 2], float factor, const Matrices<T>& grad, const Parts& parts,
                           float* shares) {
      if (work.part >= 0) {
        const int64_t place = parts.line(lists, work.copy, work.part, work.sub_tile) + line0;
        store_lines<kD, float>(
            sums, factor, factor, p.width, [&](int half) { return parts.data + (place + 8 * half) * parts.width; });
      } else if (shares != nullptr) {
        store_lines<kD, float>(sums, factor, factor, p.width, [&](int half) -> float* {
          const int token = half ? token8 : token0;
          return token < 0 ? nullptr : shares + (work.matrix * own_length + token) * p.width;
        });
      } else {
        T* to = grad.of(work.batch, work.head);
        store_lines<kD, T>(sums, factor, factor, p.width, [&](int half) -> T* {
          const int token = half ? token8 : token0;
          return token < 0 ? nullptr : to + token * grad.token_stride;
        });
      }
    };
    store(sums_first, p.scoring.scale, sweep.grad_first, sweep.first_parts, sweep.first_shares);
    if constexpr (kByColumns) {
      store(sums_second, 1.0f, sweep.grad_second, sweep.second_parts, sweep.second_shares);
    }
  }
}

template <class T, int kD, bool kByColumns, bool kPlain>
__global__ void __launch_bounds__(kHopperThreads, 1) sweep_on_hopper_kernel(
    const __grid_constant__ Backward<T> p, const __grid_constant__ Sweep<T> sweep, const __grid_constant__ Maps maps,
    int64_t num_work) {
  extern __shared__ unsigned char shared[];
  using M = Memory<T, kD>;
  auto& memory = *reinterpret_cast<M*>(align_panels(shared));
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < M::kSlots; ++slot) {
      memory.task_there[slot].init(1);
      memory.task_free[slot].init(4 * kConsumers);
    }
    for (int stage = 0; stage < M::kStages; ++stage) {
      memory.there[stage].init(1);
      memory.free[stage].init(4 * kConsumers);
    }
    fence_barriers();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    give_registers<kFewRegisters>();
    if (threadIdx.x < 32) {
      copy_all<T, kD, kByColumns>(p, sweep, maps, memory, num_work);
    }
  } else {
    take_registers<kManyRegisters>();
    multiply_all<T, kD, kByColumns, kPlain>(p, sweep, memory, num_work);
  }
}

}  // namespace

template <class T, bool kByColumns>
void sweep_on_hopper(
    const Launcher& launch, const Backward<T>& p, const Sweep<T>& sweep, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& grad_output, int64_t copies) {
  const auto run = [&](auto width, auto plain) {
    constexpr int kD = decltype(width)::value;
    const int64_t num_work = copies * sweep.lists.num_units * sweep.lists.sub_tiles;
    const int block = 1 << sweep.lists.log_block, own_box = std::min(block, kHopperTile), box = std::min(block, kN);
    const Tensor &first = kByColumns ? key : query, &second = kByColumns ? value : grad_output;
    const Tensor &other_first = kByColumns ? query : key, &other_second = kByColumns ? grad_output : value;
    const Maps maps{
        tensor_map(first, own_box), tensor_map(second, own_box), tensor_map(other_first, box),
        tensor_map(other_second, box)};
    launch.with_shared_memory(
        sweep_on_hopper_kernel<T, kD, kByColumns, decltype(plain)::value>, std::min(num_work, launch.multiprocessors()), kHopperThreads,
        sizeof(Memory<T, kD>) + kPanelAlignment, p, sweep, maps, num_work);
  };
  const auto with_options = [&](auto width) {
    p.scoring.plain() ? run(width, std::true_type{}) : run(width, std::false_type{});
  };
  p.width <= 64 ? with_options(std::integral_constant<int, 64>{}) : with_options(std::integral_constant<int, 128>{});
}

#define DS_SPARSE_SWEEP(T, by_columns)                                                                              \
  template void sweep_on_hopper<T, by_columns>(                                                                     \
      const Launcher&, const Backward<T>&, const Sweep<T>&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, \
      int64_t);
DS_SPARSE_SWEEP(__half, false)
DS_SPARSE_SWEEP(__half, true)
DS_SPARSE_SWEEP(__nv_bfloat16, false)
DS_SPARSE_SWEEP(__nv_bfloat16, true)
#undef DS_SPARSE_SWEEP

}  // namespace ds_sparse::attention
