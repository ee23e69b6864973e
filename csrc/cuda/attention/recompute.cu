#include "recompute.h"

#include <algorithm>

#include "mask.h"
#include "softmax.h"

namespace ds_sparse::attention {
namespace {

constexpr int kWarps = 4, kMostColumns = 256, kColumnsOfLane = kMostColumns / 32;
constexpr uint32_t kWarp = 0xffffffffu;

using OwnRow = float[kMostColumns];
using SumsOfLane = float[kColumnsOfLane];  // of columns lane, lane + 32, ...

__device__ __forceinline__ int lane_of_warp() { return threadIdx.x % 32; }

template <class T>
__device__ void fetch_row(OwnRow& to, const T* from, int head_dim) {
  for (int column = lane_of_warp(); column < head_dim; column += 32) {
    to[column] = static_cast<float>(from[column]);
  }
  __syncwarp();
}

template <class T>
__device__ float dot(const OwnRow& own, const T* other, int head_dim) {
  float sum = 0;
  for (int column = 0; column < head_dim; column += kRun<T>) {
    const auto run = load_aligned(other + column);
#pragma unroll
    for (int e = 0; e < kRun<T>; ++e) {
      sum = fmaf(own[column + e], static_cast<float>(run.element[e]), sum);
    }
  }
  return sum;
}

// sums += the weights that lanes have of rows, which lie at `in_memory`; of those lanes that have a bit in `lanes`.
template <class T>
__device__ void add_rows(
    SumsOfLane& sums, uint32_t lanes, float weight, int64_t in_memory, const T* rows, const TokenStrides& tokens,
    int head_dim) {
  for (; lanes != 0; lanes &= lanes - 1) {
    const int from = __ffs(lanes) - 1;
    const float of_row = __shfl_sync(kWarp, weight, from);
    const T* row = rows + tokens.at(__shfl_sync(kWarp, in_memory, from));
#pragma unroll
    for (int i = 0; i < kColumnsOfLane; ++i) {
      const int column = lane_of_warp() + 32 * i;
      if (column < head_dim) {
        sums[i] = fmaf(of_row, static_cast<float>(row[column]), sums[i]);
      }
    }
  }
}

template <class T>
__device__ void store_row(T* to, const SumsOfLane& sums, float factor, int head_dim) {
#pragma unroll
  for (int i = 0; i < kColumnsOfLane; ++i) {
    const int column = lane_of_warp() + 32 * i;
    if (column < head_dim) {
      to[column] = T(sums[i] * factor);
    }
  }
}

template <class T>
__device__ bool is_finite(const T* row, int head_dim) {
  bool finite = true;
  for (int column = lane_of_warp(); column < head_dim; column += 32) {
    finite = finite && isfinite(static_cast<float>(row[column]));
  }
  return __all_sync(kWarp, finite);
}

// Calls f, by a whole warp, with the tokens of the other side that a token sees, 32 at a time, one for each lane, or
// -1. kTransposed: the token is a key. length: of the other side.
template <bool kTransposed, class F>
__device__ void for_each_seen(
    const TileLists& lists, const Scoring& scoring, int batch, int head, int token, int length, const F& f) {
  const int lane = lane_of_warp(), block_row = token >> lists.log_block, block = 1 << lists.log_block,
            other_block = 1 << lists.log_other;
  const int places = lists.tiles_per_head * lists.block_rows_per_tile;
  const int first_place = lists.layout_of(batch, head) * places;
  const TokenMask<kTransposed, Limits::kEither> token_mask(scoring, batch, head, token);
  int place = -1;
  for (int first = 0; first < places && place < 0; first += 32) {
    const int mine = first + lane;
    const uint32_t found = __ballot_sync(kWarp, mine < places && lists.block_rows[first_place + mine] == block_row);
    place = found == 0 ? -1 : first_place + first + __ffs(found) - 1;
  }
  if (place < 0) {
    return;
  }
  const int tile = place / lists.block_rows_per_tile, of_tile = place % lists.block_rows_per_tile;
  const int tile_row = (of_tile << lists.log_block) + (token & (block - 1));  // where pairs are given a tile is no less
  for (int first = 0; first < lists.num_work_tiles; first += 32) {
    const int4 mine = first + lane < lists.num_work_tiles ? lists.work_tiles[first + lane] : int4{-1, 0, 0, 0};
    for (uint32_t found = __ballot_sync(kWarp, mine.x == tile); found != 0; found &= found - 1) {
      const int from = __ffs(found) - 1, first_entry = __shfl_sync(kWarp, mine.y, from);
      const int end = first_entry + __shfl_sync(kWarp, mine.z, from);
      for (int entry = first_entry; entry < end; ++entry) {
        const uint32_t word = lists.entries[entry];
        if ((owners_of(word) >> of_tile & 1) == 0) {
          continue;
        }
        uint2 pairs{~0u, ~0u};
        if (lists.pairs != nullptr) {
          pairs = lists.pairs[head * lists.pairs_stride + int64_t{entry} * lists.tile + tile_row];
        }
        const int tokens = lists.entry_spans == nullptr ? other_block : lists.entry_spans[entry].y;
        for (int in_block = lane; in_block - lane < other_block; in_block += 32) {
          const int other = static_cast<int>(block_of(word) << lists.log_other) + in_block;
          bool sees = in_block < min(other_block, tokens) && other < length;
          if (lists.pairs != nullptr) {
            sees = sees && ((in_block < 32 ? pairs.x : pairs.y) >> in_block % 32 & 1) != 0;
          } else {
            sees = sees && token_mask.sees(other);
          }
          f(sees ? other : -1);
        }
      }
    }
  }
}

// The score of a product; -inf where the pair is masked.
template <class T>
__device__ float score_of(const Scoring& scoring, float product, int batch, int head, int query, int key) {
  float score[] = {product};
  scoring.template finish<T>(score, batch, head, [&](int) { return make_int2(query, key); });
  const float* key_bias = scoring.key_bias_of(batch, head);
  return key_bias == nullptr ? score[0] : Scoring::with_key_bias<false>(score[0], key_bias[key]);
}

// Calls f with the numbers that are a warp's, of so many, where a result is not finite. Leaves the state as a pass
// begins with it.
template <class F>
__device__ void for_each_of_warp(PassState* state, int64_t count, const F& f) {
  wait_for_previous();
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    state->row_tickets = state->column_tickets = 0;
  }
  if (*static_cast<volatile int*>(&state->not_finite) == 0) {
    return;
  }
  for (int64_t number = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; number < count; number += gridDim.x * kWarps) {
    f(number);
  }
  __syncthreads();
  if (threadIdx.x == 0 && atomicAdd(&state->done, 1) == gridDim.x - 1) {
    state->done = state->not_finite = 0;  // all thread blocks have read it
  }
}

template <class T>
__global__ void __launch_bounds__(32 * kWarps)
    recompute_outputs_kernel(const __grid_constant__ Forward<T> p, int batch) {
  __shared__ OwnRow rows[kWarps];
  OwnRow& query = rows[threadIdx.x / 32];
  const int lane = lane_of_warp(), queries = p.scoring.queries, head_dim = p.head_dim;
  for_each_of_warp(p.state, int64_t{batch} * p.heads * queries, [&](int64_t number) {
    const int64_t matrix = number / queries;
    const int token = number % queries, batch = matrix / p.heads, head = matrix % p.heads;
    const BlockSpans& spans = p.lists.spans;
    if (!spans.has(token)) {
      return;
    }
    const int64_t in_memory = spans.token(token);
    T* output = p.output.of(batch, head) + p.output.tokens.at(in_memory);
    if (is_finite(output, head_dim)) {
      return;
    }
    fetch_row(query, p.query.of(batch, head) + p.query.tokens.at(in_memory), head_dim);
    const T *keys = p.key.of(batch, head / p.heads_of_group), *values = p.value.of(batch, head / p.heads_of_group);
    const Dropout dropout = p.scoring.drops() ? p.scoring.dropout() : Dropout{};
    float row_max = -kInfinity, row_sum = 0;
    SumsOfLane sums = {};
    for_each_seen<false>(p.lists, p.scoring, batch, head, token, p.scoring.keys, [&](int key) {
      const int64_t at = key < 0 ? 0 : spans.token(key);
      const float score =
          key < 0 ? -kInfinity
                  : score_of<T>(p.scoring, dot(query, keys + p.key.tokens.at(at), head_dim), batch, head, token, key);
      const bool counts = score != -kInfinity;
      float new_max = score;
      for (int bit = 16; bit > 0; bit /= 2) {
        new_max = fmaxf(new_max, __shfl_xor_sync(kWarp, new_max, bit));
      }
      new_max = fmaxf(new_max, row_max);  // but for NaN
      const float base = new_max == -kInfinity ? 0.0f : new_max, rescale = expf(row_max - base);
      float prob = counts ? expf(score - base) : 0.0f;
      row_max = new_max;
      row_sum = row_sum * rescale + sum_of_lanes(prob, 32);
      if (counts && p.scoring.drops() && !dropout.keeps(matrix, token, key)) {
        prob = 0;
      }
#pragma unroll
      for (float& sum : sums) {
        sum *= rescale;
      }
      add_rows(sums, __ballot_sync(kWarp, counts), prob, at, values, p.value.tokens, head_dim);
    });
    const float of_dropout = p.scoring.drops() ? dropout.factor() : 1.0f;
    store_row(output, sums, row_sum == 0 ? 0.0f : of_dropout / row_sum, head_dim);
    if (lane == 0) {
      const RowMaxSum stats(row_max, row_sum);
      p.row_max_sums[number] = stats;
      p.lse[number] = stats.lse();
    }
    __syncwarp();
  });
}

// Makes a token's row of each of a sweep's gradients, not scaled: with kTransposed those of a key and a value.
template <class T, bool kTransposed>
__device__ void add_gradients(
    const Backward<T>& p, const TileLists& lists, int64_t matrix, int token, OwnRow (&own)[2], SumsOfLane& sums_first,
    SumsOfLane& sums_second) {
  const int batch = matrix / p.heads, head = matrix % p.heads, kv_head = head / p.heads_of_group;
  const T *queries = p.query.of(batch, head), *grads = p.grad_output.of(batch, head);
  const T *keys = p.key.of(batch, kv_head), *values = p.value.of(batch, kv_head);
  const int64_t in_memory = lists.spans.token(token);
  const auto fetch = [&](int number, const T* rows, const TokenStrides& tokens) {
    fetch_row(own[number], rows + tokens.at(in_memory), p.head_dim);
  };
  fetch(0, kTransposed ? keys : queries, kTransposed ? p.key.tokens : p.query.tokens);
  fetch(1, kTransposed ? values : grads, kTransposed ? p.value.tokens : p.grad_output.tokens);
  const T *first = kTransposed ? queries : keys, *second = kTransposed ? grads : values;
  const TokenStrides& of_first = kTransposed ? p.query.tokens : p.key.tokens;
  const TokenStrides& of_second = kTransposed ? p.grad_output.tokens : p.value.tokens;
  const Dropout dropout = p.scoring.drops() ? p.scoring.dropout() : Dropout{};
  const int length = kTransposed ? p.scoring.queries : p.scoring.keys;
  for_each_seen<kTransposed>(lists, p.scoring, batch, head, token, length, [&](int other) {
    const int64_t at = other < 0 ? 0 : lists.spans.token(other);
    const int query = kTransposed ? other : token, key = kTransposed ? token : other;
    float score = -kInfinity, grad = 0, prob = 0;
    if (other >= 0) {
      score = score_of<T>(p.scoring, dot(own[0], first + of_first.at(at), p.head_dim), batch, head, query, key);
    }
    const RowStats row = other < 0 ? no_row_stats() : p.row_stats.at(matrix, query);
    const bool counts = score != -kInfinity && row.inverse_sum != 0;
    if (counts) {
      const float factor = !p.scoring.drops() ? 1.0f : dropout.keeps(matrix, query, key) ? dropout.factor() : 0.0f;
      prob = exp2_approx((score - row.row_max) * attention::kLog2E) * row.inverse_sum;
      grad = prob * (dot(own[1], second + of_second.at(at), p.head_dim) * factor - row.delta);
      grad *= p.scoring.softcap > 0 ? p.scoring.cap_slope(score) : 1.0f;
      prob *= factor;
    }
    const uint32_t lanes = __ballot_sync(kWarp, counts);
    add_rows(sums_first, lanes, grad, at, first, of_first, p.head_dim);
    if constexpr (kTransposed) {
      add_rows(sums_second, lanes, prob, at, second, of_second, p.head_dim);
    }
  });
  __syncwarp();
}

template <class T>
__global__ void __launch_bounds__(32 * kWarps) recompute_gradients_kernel(
    const __grid_constant__ Backward<T> p, const __grid_constant__ TileLists rows,
    const __grid_constant__ TileLists columns, Matrices<T> grad_query, Matrices<T> grad_key, Matrices<T> grad_value,
    int batch) {
  __shared__ OwnRow own_rows[kWarps][2];
  auto& own = own_rows[threadIdx.x / 32];
  const int queries = p.scoring.queries, keys = p.scoring.keys, key_heads = p.heads / p.heads_of_group;
  const int64_t all_queries = int64_t{batch} * p.heads * queries, all_keys = int64_t{batch} * key_heads * keys;
  for_each_of_warp(p.state, all_queries + all_keys, [&](int64_t number) {
    SumsOfLane first = {}, second = {};
    if (number < all_queries) {
      const int64_t matrix = number / queries;
      const int token = number % queries;
      T* grad = grad_query.of(matrix / p.heads, matrix % p.heads) + grad_query.tokens.at(rows.spans.token(token));
      if (rows.spans.has(token) && !is_finite(grad, p.head_dim)) {
        add_gradients<T, false>(p, rows, matrix, token, own, first, second);
        store_row(grad, first, p.scoring.scale, p.head_dim);
      }
      return;
    }
    number -= all_queries;
    const int64_t matrix = number / keys;  // of keys
    const int token = number % keys, batch = matrix / key_heads, kv_head = matrix % key_heads;
    const int64_t in_memory = columns.spans.token(token);
    T* of_key = grad_key.of(batch, kv_head) + grad_key.tokens.at(in_memory);
    T* of_value = grad_value.of(batch, kv_head) + grad_value.tokens.at(in_memory);
    if (columns.spans.has(token) && !(is_finite(of_key, p.head_dim) && is_finite(of_value, p.head_dim))) {
      for (int head = kv_head * p.heads_of_group; head < (kv_head + 1) * p.heads_of_group; ++head) {
        add_gradients<T, true>(p, columns, int64_t{batch} * p.heads + head, token, own, first, second);
      }
      store_row(of_key, first, p.scoring.scale, p.head_dim);
      store_row(of_value, second, 1.0f, p.head_dim);
    }
  });
}

// On a Hopper GPU thread blocks are in place when the last kernel is done.
template <class... P, class... A>
void launch_last(const Launcher& launch, void (*kernel)(P...), int64_t rows, const A&... arguments) {
  const int64_t blocks = std::min<int64_t>((rows + kWarps - 1) / kWarps, 2 * launch.multiprocessors());
  if (launch.is_hopper()) {
    launch.beside_previous(kernel, blocks, 32 * kWarps, arguments...);
  } else {
    launch(kernel, blocks, 32 * kWarps, arguments...);
  }
}

}  // namespace

template <class T>
void recompute_outputs(const Launcher& launch, const Forward<T>& p, int64_t batch) {
  launch_last(launch, recompute_outputs_kernel<T>, batch * p.heads * p.scoring.queries, p, static_cast<int>(batch));
}

template <class T>
void recompute_gradients(
    const Launcher& launch, const Backward<T>& p, const TileLists& rows, const TileLists& columns,
    const Matrices<T>& grad_query, const Matrices<T>& grad_key, const Matrices<T>& grad_value, int64_t batch) {
  launch_last(
      launch, recompute_gradients_kernel<T>, batch * p.heads * (int64_t{p.scoring.queries} + p.scoring.keys), p, rows,
      columns, grad_query, grad_key, grad_value, static_cast<int>(batch));
}

#define DS_SPARSE_RECOMPUTE(T)                                                                                         \
  template void recompute_outputs(const Launcher&, const Forward<T>&, int64_t);                                        \
  template void recompute_gradients(                                                                                   \
      const Launcher&, const Backward<T>&, const TileLists&, const TileLists&, const Matrices<T>&, const Matrices<T>&, \
      const Matrices<T>&, int64_t);
DS_SPARSE_RECOMPUTE(float)
DS_SPARSE_RECOMPUTE(__half)
DS_SPARSE_RECOMPUTE(__nv_bfloat16)
#undef DS_SPARSE_RECOMPUTE

}  // namespace ds_sparse::attention
