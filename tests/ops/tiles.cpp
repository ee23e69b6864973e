// Products in emulated tiles beside plain sums, on whole numbers, whose sums are exact in any order; prints each case.

#include <cstdio>
#include <cstring>
#include <vector>

#include "cpu/gemm.h"
#include "cpu/window.h"

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

static const O* multiplicands(const std::vector<BFloat16>& x) { return reinterpret_cast<const O*>(x.data()); }

static int wrong = 0;

static float wide(float x) { return x; }
static float wide(BFloat16 x) { return load_one<float>(&x); }

template <class T>
static void expect(
    const char* name, int64_t block, int64_t depth, const std::vector<T>& found, const std::vector<int>& wanted) {
  int64_t differ = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    T rounded;
    store_one<float>(&rounded, static_cast<float>(wanted[i]));
    differ += wide(found[i]) != wide(rounded);
  }
  wrong += differ > 0;
  printf("%s block %d depth %d: %d differ\n", name, int(block), int(depth), int(differ));
}

// Rows times some of the blocks of columns, which are given as rows or as they are; scores are of T.
template <class T>
static void scores(int64_t block, int64_t depth, bool by_rows) {
  Matrix a(block, depth), b(4 * block, depth);
  std::vector<BFloat16> left = a.narrow(), right = b.narrow();
  std::vector<O> panels(b.rows * depth / 2);
  if (!by_rows) {
    std::vector<BFloat16> columns(right.size());
    for (int64_t n = 0; n < b.rows; ++n)
      for (int64_t k = 0; k < depth; ++k) columns[k * b.rows + n] = right[n * depth + k];
    right = columns;
  }
  pack_pair_panels(right.data(), by_rows ? 1 : b.rows, by_rows ? depth : 1, depth, b.rows, 16, panels.data());
  const int32_t live[] = {3, 0, 2};
  std::vector<T> found(3 * block * block);
  begin_products<O>();
  sdd(multiplicands(left), depth / 2, block, panels.data(), live, 3, block, depth / 2, found.data());
  end_products<O>();
  std::vector<int> wanted;
  for (int32_t n : live)
    for (int64_t i = 0; i < block; ++i)
      for (int64_t j = 0; j < block; ++j) {
        int sum = 0;
        for (int64_t k = 0; k < depth; ++k) sum += a.at(i, k) * b.at(n * block + j, k);
        wanted.push_back(sum);
      }
  expect(by_rows ? "scores of rows" : "scores of columns", block, depth, found, wanted);
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
  begin_products<O>();
  Blocks<O> of_rows{multiplicands(left), nullptr, block * block / 2, block / 2, 1},
      of_columns{pairs.data(), nullptr, block * block / 2, 1, block};
  dsd_columns<O, tile_vectors>(
      transposed ? of_columns : of_rows, right.data(), width, live, 3, block / 2, block, 0, width, true, found.data(),
      width);
  end_products<O>();
  // The same as a whole product, which starts from 0.
  std::vector<float> product(block * width);
  std::vector<O> scratch(dsd_scratch(block, block));
  const int32_t slots[] = {0, 1, 2};
  matmul_dsd(
      left.data(), transposed ? slots : nullptr, right.data(), width, live, 3, block, 0, block, width, product.data(),
      width, scratch.data());
  std::vector<int> wanted, wanted_product;
  for (int64_t i = 0; i < block; ++i)
    for (int64_t c = 0; c < width; ++c) {
      int sum = 1;
      for (int64_t n = 0; n < 3; ++n)
        for (int64_t k = 0; k < block; ++k)
          sum += weights.at(n * block + (transposed ? k : i), transposed ? i : k) * dense.at(live[n] * block + k, c);
      wanted.push_back(sum);
      wanted_product.push_back(sum - 1);
    }
  expect(transposed ? "weighted columns" : "weighted rows", block, width, found, wanted);
  expect(transposed ? "product of columns" : "product of rows", block, width, product, wanted_product);
}

// Some rows' band of a window, and the sums that a band weights.
static void windows(int64_t tokens, int64_t window, int64_t depth) {
  int64_t width = 2 * window + 1, columns = (tokens + 15) / 16 * 16, first = tokens > 64 ? 48 : 0;
  WindowRows rows{tokens, window, first, tokens - first < 64 ? tokens - first : 64};
  Matrix a(columns, depth), b(columns, depth), weights(tokens, width);
  std::vector<BFloat16> left = a.narrow(), right = b.narrow(), band = weights.narrow();
  std::vector<O> panels(columns * depth / 2), dense(columns * depth / 2);
  pack_pair_panels(right.data(), 1, depth, depth, columns, 16, panels.data());
  pair_rows(right.data(), depth, 1, columns, depth, dense.data(), depth);
  std::vector<BFloat16> found(rows.rows * width);
  window_matmul(rows, multiplicands(left) + first * depth / 2, panels.data(), depth / 2, found.data());
  std::vector<float> sums(64 * depth);
  unwindow_matmul<O>(rows, {band.data(), window + first * 2 * window, 2 * window, 2}, dense.data(), depth, sums.data());
  sums.resize(rows.rows * depth);
  std::vector<int> wanted, wanted_sums(sums.size());
  for (int64_t r = 0; r < rows.rows; ++r)
    for (int64_t j = 0; j < width; ++j) {
      int64_t t = first + r + j - window;
      int sum = 0;
      for (int64_t k = 0; k < depth && t >= 0 && t < tokens; ++k) {
        sum += a.at(first + r, k) * b.at(t, k);
        wanted_sums[r * depth + k] += weights.at(first + r, j) * b.at(t, k);
      }
      wanted.push_back(sum);
    }
  expect("window", window, depth, found, wanted);
  expect("sums of a window", window, depth, sums, wanted_sums);
}

int main() {
  for (int64_t block : {16, 32, 64, 128}) {
    for (int64_t depth : {16, 32, 48, 64, 80, 128, 256}) {
      scores<float>(block, depth, true);
      scores<BFloat16>(block, depth, false);
      weighted(block, depth, false);
      weighted(block, depth, true);
    }
  }
  for (int64_t window : {0, 5, 20, 64, 200})
    for (int64_t tokens : {1, 37, 150, 400})
      for (int64_t depth : {16, 64, 112}) windows(tokens, window, depth);
  return wrong != 0;
}
