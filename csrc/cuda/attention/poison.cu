// NaN where bounded lists had no space for a tile's entries.

#include "poison.h"

namespace ds_sparse::attention {
namespace {

enum Which { kOfTiles, kOfTilesAligned, kAll };

// A tensor's rows of tokens, in 16 or 32 bits a number, all of which are NaN if their bits are 1.
struct Rows {
  char* data;
  int64_t strides[3];  // of batches, heads and tokens, in bytes
  int batches, heads, tokens, bytes;
  Which which;

  __device__ void poison(int batch, int head, int64_t token) const {
    char* to = data + batch * strides[0] + head * strides[1] + token * strides[2];
    for (int i = 0; i < bytes; i += 2) {
      *reinterpret_cast<uint16_t*>(to + i) = 0xffff;
    }
  }
};

struct Poisoned {
  Rows rows[3];
  int count;
};

__global__ void __launch_bounds__(kThreads)
    poison_kernel(const __grid_constant__ TileLists lists, Poisoned poisoned, int copies, int batch_size, int length) {
  const int work_tiles = lists.count_work_tiles();
  for (int number = blockIdx.x; number < work_tiles; number += gridDim.x) {
    const int4 work = lists.work_tiles[number];
    if (work.y >= 0) {
      continue;
    }
    for (int of = 0; of < copies * poisoned.count; ++of) {
      const int2 matrix = lists.batch_and_head(of / poisoned.count, work.x);
      const Rows& rows = poisoned.rows[of % poisoned.count];
      const int batch = matrix.x * rows.batches / batch_size, head = matrix.y * rows.heads / lists.heads;
      const int count = rows.which == kAll ? rows.tokens : lists.sub_tiles * lists.tile;
      for (int row = threadIdx.x; row < count; row += blockDim.x) {
        if (rows.which == kAll) {
          rows.poison(batch, head, row);
          continue;
        }
        const int token = lists.token<true>(work.x, row / lists.tile, row % lists.tile, length);
        if (token >= 0) {
          rows.poison(batch, head, rows.which == kOfTiles ? lists.spans.token(token) : token);
        }
      }
    }
  }
}

}  // namespace

void poison_rows(
    const Launcher& launch, const AttentionCall& call, const TileLists& lists, int64_t length,
    std::initializer_list<const Tensor*> results, std::initializer_list<const Tensor*> aligned,
    std::initializer_list<const Tensor*> whole) {
  if (!call.bounded || call.fits) {
    return;
  }
  Poisoned poisoned{};
  const auto add = [&](const Tensor& x, Which which) {
    const int64_t size = x.element_size();
    int64_t numbers = 1;
    for (int64_t dim = 3; dim < x.dim(); ++dim) {
      numbers *= x.size(dim);
    }
    poisoned.rows[poisoned.count++] = {
        static_cast<char*>(const_cast<void*>(x.const_data_ptr())),
        {x.stride(0) * size, x.stride(1) * size, x.stride(2) * size},
        static_cast<int>(x.size(0)),
        static_cast<int>(x.size(1)),
        static_cast<int>(x.size(2)),
        static_cast<int>(numbers * size),
        which};
  };
  for (const Tensor* x : results) {
    add(*x, kOfTiles);
  }
  for (const Tensor* x : aligned) {
    add(*x, kOfTilesAligned);
  }
  for (const Tensor* x : whole) {
    add(*x, kAll);
  }
  launch(
      poison_kernel, std::min<int64_t>(lists.num_work_tiles, launch.multiprocessors()), kThreads, lists, poisoned,
      static_cast<int>(call.copies()), static_cast<int>(call.query.size(0)), static_cast<int>(length));
}

}  // namespace ds_sparse::attention
