// The builder of an index (index/build.cu), as operators of CUDA call it: library.cpp.
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "../../index.h"

namespace ds_sparse::index {

std::tuple<Tensor, Tensor> index_plan(
    const Tensor& bits, int64_t columns, int64_t block, const std::vector<int64_t>& tiles, bool of_rows,
    bool of_columns, bool bounded, std::optional<int64_t> row_block);

std::vector<Tensor> index_fill(
    const Tensor& bits, const Tensor& memory, const Tensor& counts, int64_t columns, int64_t block,
    const std::vector<int64_t>& tiles, bool of_rows, bool of_columns, bool bounded, int64_t layout_heads,
    const std::vector<int64_t>& sizes, const std::optional<Tensor>& lost, std::optional<int64_t> row_block);

}  // namespace ds_sparse::index
