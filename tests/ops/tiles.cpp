// Products in emulated tiles beside plain sums, on whole numbers, whose sums are exact in any order; prints each case.

#include <cstdio>
#include <cstring>
#include <vector>

#include "cpu/gemm.h"

using namespace ds_sparse::cpu;
using namespace ds_sparse::cpu::DS_SPARSE_ISA;
using O = BFloat16Pair;

static uint32_t state = 1;

static int whole_number() {
  state = state * 1664525u + 1013904223u;
  return static_cast<int>(state >> 24) % 17 - 8;
}

static BFloat16 rounded(int x) {
  float wide = static_cast<float>(x);
  uint32_t bits;
  memcpy(&bits, &wide, sizeof(bits));
  return {static_cast<uint16_t>(bits >> 16)};
}

// (rows, columns) of whole numbers.
struct Matrix {
  int64_t rows, columns;
  std::vector<int> numbers;

  Matrix(int64_t rows, int64_t columns) : rows(rows), columns(columns), numbers(rows * columns) {
    for (int& x : numbers) x = whole_number();
  }
  int at(int64_t r, int64_t c) const { return numbers[r * columns + c]; }
  std::vector<BFloat16> narrow() const {
    std::vector<BFloat16> out;
    for (int x : numbers) out.push_back(rounded(x));
    return out;
  }
};

static const O* units(const std::vector<BFloat16>& x) { return reinterpret_cast<const O*>(x.data()); }

static int wrong = 0;

static void expect(
    const char* name, int64_t block, int64_t depth, const std::vector<float>& found, const std::vector<int>& wanted) {
  int64_t differ = 0;
  for (size_t i = 0; i < wanted.size(); ++i) differ += found[i] != static_cast<float>(wanted[i]);
  wrong += differ > 0;
  printf("%s block %d depth %d: %d differ\n", name, int(block), int(depth), int(differ));
}

// Rows times some of the blocks of columns, which are given as rows.
static void scores(int64_t block, int64_t depth) {
  Matrix a(block, depth), b(4 * block, depth);
  std::vector<BFloat16> left = a.narrow(), right = b.narrow();
  std::vector<O> panels(b.rows * depth / 2);
  for (int64_t n = 0; n < 4; ++n)
    pack_panels<float>(
        reinterpret_cast<const float*>(units(right) + n * block * depth / 2), 1, depth / 2, depth / 2, block, 16,
        reinterpret_cast<float*>(panels.data() + n * block * depth / 2));
  const int32_t live[] = {3, 0, 2};
  std::vector<float> found(3 * block * block);
  sdd(units(left), depth / 2, block, panels.data(), live, 3, block, depth / 2, found.data());
  std::vector<int> wanted;
  for (int32_t n : live)
    for (int64_t i = 0; i < block; ++i)
      for (int64_t j = 0; j < block; ++j) {
        int sum = 0;
        for (int64_t k = 0; k < depth; ++k) sum += a.at(i, k) * b.at(n * block + j, k);
        wanted.push_back(sum);
      }
  expect("scores", block, depth, found, wanted);
}

// Blocks of weights, or transposed ones, times dense rows, added to what is there.
static void weighted(int64_t block, int64_t width, bool transposed) {
  Matrix weights(3 * block, block), dense(4 * block, width);
  std::vector<BFloat16> rows = dense.narrow(), left = weights.narrow();
  std::vector<O> right(dense.rows * width / 2), pairs(weights.rows * block / 2);
  pair_rows(rows.data(), width, 1, dense.rows, width, right.data(), width);
  pair_rows(left.data(), block, 1, weights.rows, block, pairs.data(), block);
  const int32_t live[] = {3, 0, 2};
  std::vector<float> found(block * width, 1.0f);
  expect_depth<O>(block / 2);
  Blocks<O> of_rows{units(left), nullptr, block * block / 2, block / 2, 1},
      of_columns{pairs.data(), nullptr, block * block / 2, 1, block};
  dsd_columns<O, tile_vectors>(
      transposed ? of_columns : of_rows, right.data(), width, live, 3, block / 2, block, 0, width, true, found.data(),
      width);
  std::vector<int> wanted;
  for (int64_t i = 0; i < block; ++i)
    for (int64_t c = 0; c < width; ++c) {
      int sum = 1;
      for (int64_t n = 0; n < 3; ++n)
        for (int64_t k = 0; k < block; ++k)
          sum += weights.at(n * block + (transposed ? k : i), transposed ? i : k) * dense.at(live[n] * block + k, c);
      wanted.push_back(sum);
    }
  expect(transposed ? "weighted columns" : "weighted rows", block, width, found, wanted);
}

int main() {
  for (int64_t block : {16, 32, 64, 128}) {
    for (int64_t depth : {16, 32, 48, 64, 80, 128, 256}) {
      scores(block, depth);
      weighted(block, depth, false);
      weighted(block, depth, true);
    }
  }
  end_products<O>();
  return wrong != 0;
}
