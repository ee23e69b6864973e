// A sweep of the backward pass, on any GPU, with its own tile of sums and in a fixed order. Scores are computed again
// from query and key, and probabilities with the two numbers that the forward pass kept of each row.
//
// By rows, for the gradient of queries: a thread block holds 64 queries and walks keys. By columns, for those of keys
// and values: it holds 64 keys and walks queries; its products are transposed, so that probabilities are already the
// left operand of the next product.

#include "arguments.h"
#include "backward.h"
#include "backward_memory.h"
#include "dropout_mask.h"
#include "epilogue.h"

namespace ds_sparse::attention {
namespace {

// By columns, `own` are keys and values, `other` queries and gradients of outputs; by rows the other way round.
// kBlockN: tokens of a step; kAhead: steps that may be there.
template <class T, int kHeadDim, int kBlockN = kStep<T, kHeadDim>, int kAhead = kStages>
struct BackwardMemory {
  enum { kTokens = kBlockN, kStages = kAhead };
  struct Stage {
    Tile<T, kHeadDim, kBlockN> first, second;
    Octet octets[8];
    RowStats rows[kBlockN];
  };
  Tile<T, kHeadDim, kBlockM> first, second;
  Stage stages[kStages];
  int tokens[kBlockM];
};

template <class T, int kHeadDim>
using SmallerMemory = std::conditional_t<
    kHeadDim * sizeof(T) <= 256, BackwardMemory<T, kHeadDim, 32>, BackwardMemory<T, kHeadDim, 16, 1>>;

template <class T, int kHeadDim, bool kByColumns, bool kPlain, class Memory>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const __grid_constant__ Backward<T> p, const __grid_constant__ Sweep<T> sweep) {
  if constexpr (!is_run_here<Memory, BackwardMemory<T, kHeadDim>>()) {
    __trap();
    return;
  }
  extern __shared__ __align__(16) unsigned char shared[];
  constexpr int kBlockN = Memory::kTokens, kColumns = kOutputColumns<kHeadDim>, pitch = kPitch<T, kHeadDim>;
  auto& memory = *reinterpret_cast<Memory*>(shared);
  const TileLists& lists = sweep.lists;
  let_next_begin();
  const int lane = threadIdx.x % 32, warp_tile = threadIdx.x / 32;
  const WorkTile work(lists, blockIdx.x, lists.num_work_tiles, kHeadDim / kColumns);
  if (work.tile < 0) {
    return;
  }
  const int kv_head = work.head / p.heads_of_group, first_column = work.column_tile * kColumns;
  const int own_length = kByColumns ? p.scoring.keys : p.scoring.queries;
  const int other_length = kByColumns ? p.scoring.queries : p.scoring.keys;
  const OtherSide<kBlockN> other{
      lists.entries + work.first_entry, work.num_entries, lists.log_other, other_length,
      kByColumns ? nullptr : p.scoring.key_states_of(work.batch, work.head)};
  const T* query = p.query.of(work.batch, work.head);
  const T* grad_output = p.grad_output.of(work.batch, work.head);
  const T* key = p.key.of(work.batch, kv_head);
  const T* value = p.value.of(work.batch, kv_head);

  const auto load = [&](int step) {
    auto& stage = memory.stages[step % Memory::kStages];
    if (threadIdx.x < kBlockN / 8) {
      stage.octets[threadIdx.x] = other.octet(step, threadIdx.x);
    }
    if (kByColumns && threadIdx.x < kBlockN) {
      const int token = other.token(step, threadIdx.x);
      stage.rows[threadIdx.x] = token < 0 ? no_row_stats() : p.row_stats.at(work.matrix, token);
    }
    const auto token_of = [&](int tile_row) { return other.token(step, tile_row); };
    load_tile<kHeadDim, kBlockN>(
        stage.first, kByColumns ? query : key, kByColumns ? p.query.tokens : p.key.tokens, p.head_dim, token_of);
    load_tile<kHeadDim, kBlockN>(
        stage.second, kByColumns ? grad_output : value, kByColumns ? p.grad_output.tokens : p.value.tokens, p.head_dim,
        token_of);
    end_of_copies();
  };

  const int steps = other.steps();
  if (threadIdx.x < kBlockM) {
    memory.tokens[threadIdx.x] = lists.token(work.tile, work.sub_tile, threadIdx.x, own_length);
  }
  __syncthreads();
  const auto own_token = [&](int tile_row) { return memory.tokens[tile_row]; };
  load_tile<kHeadDim, kBlockM>(
      memory.first, kByColumns ? key : query, kByColumns ? p.key.tokens : p.query.tokens, p.head_dim, own_token);
  load_tile<kHeadDim, kBlockM>(
      memory.second, kByColumns ? value : grad_output, kByColumns ? p.value.tokens : p.grad_output.tokens, p.head_dim,
      own_token);
  if (steps > 0) {
    load(0);
  } else {
    end_of_copies();
  }

  const T* first = memory.first + warp_tile * 16 * pitch;
  const T* second = memory.second + warp_tile * 16 * pitch;
  const int tile_row0 = warp_tile * 16 + lane / 4;
  const int token0 = memory.tokens[tile_row0], token8 = memory.tokens[tile_row0 + 8];
  using RowMask = TokenMask<kByColumns, kPlain ? Limits::kNone : Limits::kEither>;
  const RowMask token_mask0(p.scoring, work.batch, work.head, token0),
      token_mask8(p.scoring, work.batch, work.head, token8);
  const int of_warp_tile = memory.tokens[warp_tile * 16 + lane % 16];
  RowMask warp_tile_mask(p.scoring, work.batch, work.head, of_warp_tile);
  warp_tile_mask.restrict_to_warp_tile(of_warp_tile >= 0);
  const auto whole = [&](const Octet& octet) { return warp_tile_mask.has_all(octet.token); };
  const RowStats stats0 = kByColumns || token0 < 0 ? no_row_stats() : p.row_stats.at(work.matrix, token0);
  const RowStats stats8 = kByColumns || token8 < 0 ? no_row_stats() : p.row_stats.at(work.matrix, token8);
  const float softmax_scale_log2 = kPlain ? p.scoring.scale * kLog2E : kLog2E;
  const float* key_bias = p.scoring.key_bias_of(work.batch, work.head);
  const float of_dropout = !kPlain && p.scoring.drops() ? p.scoring.dropout().factor() : 1.0f;
  const auto own_bias = [&](int token) {
    return kByColumns && key_bias != nullptr && token >= 0 ? key_bias[token] : 0.0f;
  };
  const float bias0 = own_bias(token0), bias8 = own_bias(token8);
  float sums_first[kColumns / 8][4] = {};
  float sums_second[kByColumns ? kColumns / 8 : 1][4] = {};

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
    const LiveOctets<kBlockN> live(stage.octets, lists.log_block, whole);
    const auto stats_of = [&](int octet, int e) {
      return kByColumns ? stage.rows[8 * octet + lane % 4 * 2 + e % 2] : e < 2 ? stats0 : stats8;
    };
#pragma unroll
    for (int j = 0; j < kBlockN / 16; ++j) {
      if (!live.group(j)) {
        continue;
      }
      float probs[2][4], grads[2][4];
      products<kHeadDim>(probs, first, stage.first, 16 * j, lane);
      products<kHeadDim>(grads, second, stage.second, 16 * j, lane);
      int first_token_of[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        first_token_of[half] = stage.octets[2 * j + half].token + lane % 4 * 2;
      }
      if constexpr (!kPlain) {
        p.scoring.template finish<T>(reinterpret_cast<float (&)[8]>(probs), work.batch, work.head, [&](int e) {
          const int mine = max(e % 4 < 2 ? token0 : token8, 0);
          const int its = min(first_token_of[e / 4] + e % 2, other_length - 1);
          return kByColumns ? make_int2(its, mine) : make_int2(mine, its);
        });
      }
      if (kByColumns && key_bias != nullptr) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          float& score = probs[e / 4][e % 4];
          score = Scoring::with_key_bias<kPlain>(score, e % 4 < 2 ? bias0 : bias8);
        }
      }
      if ((live.bits >> 2 * j & 0x303u) != 0x303u || (live.ragged >> 2 * j & 3u) != 0) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int octet = 2 * j + half;
          if (live.ragged >> octet & 1) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const int its = first_token_of[half] + e % 2;
              const float bias = kByColumns || key_bias == nullptr ? 0.0f : key_bias[min(its, other_length - 1)];
              const RowMask& token_mask = e < 2 ? token_mask0 : token_mask8;
              probs[half][e] = token_mask.sees(its) ? Scoring::with_key_bias<kPlain>(probs[half][e], bias) : -kInfinity;
            }
          }
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            probs[half][e] = live.bits >> (octet + e / 2 * 8) & 1 ? probs[half][e] : -kInfinity;
          }
        }
      }
      float cap_slopes[2][4];
      const bool has_softcap = !kPlain && p.scoring.softcap > 0;
      if (has_softcap) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          cap_slopes[e / 4][e % 4] = p.scoring.cap_slope(probs[e / 4][e % 4]);
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const RowStats row = stats_of(2 * j + half, e);
          probs[half][e] = kPlain ? exp2_approx(probs[half][e] * softmax_scale_log2 - row.lse)
                                  : exp2_approx((probs[half][e] - row.row_max) * softmax_scale_log2) * row.inverse_sum;
        }
      }
      float dropped[2][4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        dropped[0][e] = probs[0][e];
        dropped[1][e] = probs[1][e];
      }
      if constexpr (!kPlain) {
        if (p.scoring.drops()) {
          const auto kept = kept_by<kByColumns>(
              p.scoring.dropout(), work.matrix, lists.log_block, token0, token8, stage.octets + 2 * j);
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            const float factor = kept[e] ? of_dropout : 0.0f;
            grads[e / 4][e % 4] *= factor;
            dropped[e / 4][e % 4] *= factor;
          }
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          grads[half][e] = probs[half][e] * (grads[half][e] - stats_of(2 * j + half, e).delta);
          grads[half][e] *= has_softcap ? cap_slopes[half][e] : 1.0f;
        }
      }
      if constexpr (kByColumns) {
        AccumulatorAsA<T>(dropped[0], dropped[1])
            .template multiply_add_to<kColumns, pitch>(sums_second, stage.second + first_column, 16 * j, lane);
      }
      AccumulatorAsA<T>(grads[0], grads[1])
          .template multiply_add_to<kColumns, pitch>(sums_first, stage.first + first_column, 16 * j, lane);
    }
  }

  // Rows of a warp tile are copied by all threads, and where there is no step, nobody has waited for the others.
  wait_for_copies<0>();
  if (steps == 0) {
    __syncthreads();
  }
  note_not_finite(reinterpret_cast<float (&)[kColumns / 2]>(sums_first), memory.tokens + tile_row0, p.state);
  if constexpr (kByColumns) {
    note_not_finite(reinterpret_cast<float (&)[kColumns / 2]>(sums_second), memory.tokens + tile_row0, p.state);
  }
  const int columns = p.head_dim - first_column;
  const auto store = [&](const auto& sums, float factor, const T* own, const Matrices<T>& grad,
                         const SplitResults& splits, float* shares) {
    T* space = const_cast<T*>(own);
    if (work.split >= 0) {
      const int64_t place = splits.first_row(lists, work.copy, work.split, work.sub_tile) + warp_tile * 16;
      store_sums<kColumns>(sums, factor, factor, columns, [&](int tile_row) {
        return splits.data + (place + tile_row) * splits.head_dim + first_column;
      });
    } else if (shares != nullptr) {
      store_sums<kColumns>(sums, factor, factor, columns, [&](int tile_row) -> float* {
        const int token = memory.tokens[warp_tile * 16 + tile_row];
        return token < 0 ? nullptr : shares + (work.matrix * own_length + token) * p.head_dim + first_column;
      });
    } else {
      T* to = grad.of(work.batch, work.head) + first_column;
      store_warp_tile<kColumns, pitch>(sums, factor, factor, space, columns, [&](int tile_row) -> T* {
        const int token = memory.tokens[warp_tile * 16 + tile_row];
        return token < 0 ? nullptr : to + grad.tokens.at(token);
      });
    }
  };
  store(sums_first, p.scoring.scale, first, sweep.grad_first, sweep.first_splits, sweep.first_shares);
  if constexpr (kByColumns) {
    store(sums_second, 1.0f, second, sweep.grad_second, sweep.second_splits, sweep.second_shares);
  }
}

template <class T, int kHeadDim>
void sweep_with_head_dim(
    const Launcher& launch, const Backward<T>& p, const Sweep<T>& sweep, bool by_columns, int64_t copies) {
  const int64_t blocks =
      copies * sweep.lists.num_work_tiles * sweep.lists.sub_tiles * (kHeadDim / kOutputColumns<kHeadDim>);
  with_plain<T, kHeadDim>(p.scoring, [&](auto plain) {
    with_backward_memory<BackwardMemory<T, kHeadDim>, SmallerMemory<T, kHeadDim>>(launch, [&](auto fitting) {
      using Memory = typename decltype(fitting)::type;
      constexpr bool kPlain = decltype(plain)::value;
      launch.with_shared_memory(
          by_columns ? backward_kernel<T, kHeadDim, true, kPlain, Memory>
                     : backward_kernel<T, kHeadDim, false, kPlain, Memory>,
          blocks, kThreads, sizeof(Memory), p, sweep);
    });
  });
}

}  // namespace

template <class T>
void sweep_on_any_gpu(
    const Launcher& launch, const Backward<T>& p, const Sweep<T>& sweep, bool by_columns, int64_t copies) {
  with_padded_head_dim(p.head_dim, [&](auto padded) {
    sweep_with_head_dim<T, decltype(padded)::value>(launch, p, sweep, by_columns, copies);
  });
}

#if DS_SPARSE_DTYPES & 1
template void sweep_on_any_gpu(const Launcher&, const Backward<__half>&, const Sweep<__half>&, bool, int64_t);
#endif
#if DS_SPARSE_DTYPES & 2
template void sweep_on_any_gpu(
    const Launcher&, const Backward<__nv_bfloat16>&, const Sweep<__nv_bfloat16>&, bool, int64_t);
#endif
#if DS_SPARSE_DTYPES & 4
template void sweep_on_any_gpu(const Launcher&, const Backward<float>&, const Sweep<float>&, bool, int64_t);
#endif

}  // namespace ds_sparse::attention
