// How work is cut and shared out: pieces of bounded cost, so that one dense block row does not set the time, gathered
// into tasks of similar cost, which threads take as they become free. A piece computes its outputs alone and in a fixed
// order, so results depend neither on the number of threads nor on who took what.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace ds_sparse::cpu {

// Cost is counted in multiply-adds or what takes as long; a task of this cost takes tens of microseconds.
constexpr int64_t task_cost = 1 << 19;

struct Piece {
  int64_t head;        // layout head
  int64_t row;         // block row (or column, where the lists are by columns)
  int64_t begin, end;  // what of it: live blocks, or token rows
};

class Pieces {
 public:
  void add(const Piece& piece, int64_t cost) {
    if (starts_.empty() || cost_ + cost > task_cost) {
      starts_.push_back(pieces_.size());
      cost_ = 0;
    }
    pieces_.push_back(piece);
    cost_ += cost;
  }

  int64_t tasks() const { return starts_.size(); }
  const Piece* begin(int64_t task) const { return pieces_.data() + starts_[task]; }
  const Piece* end(int64_t task) const {
    return pieces_.data() + (task + 1 < tasks() ? starts_[task + 1] : pieces_.size());
  }

 private:
  std::vector<Piece> pieces_;
  std::vector<int64_t> starts_;
  int64_t cost_ = 0;
};

// Calls make_worker() on each thread and the worker it returns with tasks 0 to tasks - 1, each once. A thread begins
// with a range of its own, as operands that were packed just before, in equal parts in the order of tasks, lie in its
// cache; then it helps the others.
template <class MakeWorker>
void run_tasks(int64_t tasks, const MakeWorker& make_worker) {
  struct alignas(64) Range {
    std::atomic<int64_t> next;
    int64_t end;
  };
  int64_t threads = std::min<int64_t>(tasks, torch::stable::get_num_threads());
  std::vector<Range> ranges(threads);
  for (int64_t i = 0; i < threads; ++i) {
    ranges[i].next = tasks * i / threads;
    ranges[i].end = tasks * (i + 1) / threads;
  }
  torch::stable::parallel_for(0, threads, 1, [&](int64_t own, int64_t) {
    auto worker = make_worker();
    for (int64_t i = 0; i < threads; ++i) {
      Range& range = ranges[(own + i) % threads];
      for (int64_t task = range.next++; task < range.end; task = range.next++) worker(task);
    }
  });
}

// Calls the workers with (batch, head, piece), for matrices `first` to last - 1 of those of all batches and heads: for
// each batch all pieces, or for each batch and head if layout_heads is 1. Without it they are of whole batches.
template <class MakeWorker>
void run_pieces(
    const Pieces& pieces, int64_t first, int64_t last, int64_t heads, int64_t layout_heads,
    const MakeWorker& make_worker) {
  bool shared = layout_heads == 1;
  int64_t of_repeat = shared ? 1 : heads;
  if (pieces.tasks() == 0) return;
  run_tasks((last - first) / of_repeat * pieces.tasks(), [&] {
    return [&, worker = make_worker()](int64_t task) mutable {
      int64_t repeat = first / of_repeat + task / pieces.tasks(), part = task % pieces.tasks();
      for (const Piece* piece = pieces.begin(part); piece != pieces.end(part); ++piece)
        worker(shared ? repeat / heads : repeat, shared ? repeat % heads : piece->head, *piece);
    };
  });
}

// The token rows of each block row, cut into pieces of at most task_cost where a token row costs row_cost(live blocks);
// of 16 rows at least, the widest vector, where the block has them.
template <class RowCost>
Pieces cut_token_rows(
    const int32_t* offsets, int64_t layout_heads, int64_t rows, int64_t block, const RowCost& row_cost) {
  Pieces pieces;
  for (int64_t head = 0; head < layout_heads; ++head) {
    for (int64_t row = 0; row < rows; ++row) {
      const int32_t* offset = offsets + head * rows + row;
      int64_t cost = row_cost(offset[1] - offset[0]);
      int64_t step = std::min(std::max<int64_t>(task_cost / cost / 16 * 16, 16), block);
      for (int64_t begin = 0; begin < block; begin += step) {
        int64_t end = std::min(begin + step, block);
        pieces.add({head, row, begin, end}, (end - begin) * cost);
      }
    }
  }
  return pieces;
}

}  // namespace ds_sparse::cpu
