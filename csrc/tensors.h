// New tensors, which hold whatever lay in memory. PyTorch's C++ functions for them look an operator up by its name and
// box its arguments, each time, which takes longer than all else.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/stableivalue_conversions.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/shim_utils.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>

#include "checks.h"

namespace ds_sparse {

using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

inline Tensor empty_strided_on(const Tensor& on, Sizes sizes, const int64_t* strides, ScalarType type) {
  int32_t device_type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(on.get(), &device_type));
  const auto dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()), sizes.data(), strides, dtype, device_type, on.get_device_index(), &made));
  return Tensor(made);
}

// A contiguous one, of up to 5 dimensions, on the device of `on`, and of its dtype or another.
inline Tensor empty_on(const Tensor& on, Sizes sizes, std::optional<ScalarType> type = {}) {
  std::array<int64_t, 5> strides;
  check(sizes.size() <= strides.size(), "a result has ", sizes.size(), " dimensions; there are up to 5.");
  int64_t step = 1;
  for (size_t dim = sizes.size(); dim-- > 0; step *= std::max<int64_t>(1, sizes[dim])) strides[dim] = step;
  return empty_strided_on(on, sizes, strides.data(), type ? *type : on.scalar_type());
}

// One of the sizes of x, (B, H, tokens, D), in its order of memory: heads within tokens, or tokens within heads. Or of
// (B, H, tokens, rows of a token, D), rows being heads.
inline Tensor empty_in_order_of(const Tensor& x) {
  const Sizes sizes = x.sizes();
  const size_t last = sizes.size() - 1;
  std::array<size_t, 3> order{1, 2, 3};  // from the outermost
  if (last == 4 && x.stride(3) > x.stride(2)) std::swap(order[1], order[2]);
  if (x.stride(1) < x.stride(2)) order = {2, 1, 3};
  std::array<int64_t, 5> strides;
  int64_t step = std::max<int64_t>(1, sizes[last]);
  strides[last] = 1;
  for (size_t i = last - 1; i-- > 0; step *= std::max<int64_t>(1, sizes[order[i]])) strides[order[i]] = step;
  strides[0] = step;
  return empty_strided_on(x, sizes, strides.data(), x.scalar_type());
}

// The same memory with other sizes and strides.
inline Tensor view_of(const Tensor& x, Sizes sizes, const int64_t* strides) {
  AtenTensorHandle made = nullptr;
  constexpr int64_t behind = 0;  // where x begins
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(
      x.get(), static_cast<int64_t>(sizes.size()), sizes.data(), strides, behind, &made));
  return Tensor(made);
}

// Without a dimension, of one number.
inline Tensor squeezed(const Tensor& x, int64_t at) {
  std::array<int64_t, 5> sizes, strides;
  for (int64_t dim = 0, to = 0; dim < x.dim(); ++dim) {
    if (dim == at) continue;
    sizes[to] = x.size(dim);
    strides[to++] = x.stride(dim);
  }
  return view_of(x, {sizes.data(), static_cast<size_t>(x.dim() - 1)}, strides.data());
}

// With one more dimension, of one number.
inline Tensor unsqueezed(const Tensor& x, int64_t at) {
  std::array<int64_t, 6> sizes, strides;
  for (int64_t dim = 0; dim <= x.dim(); ++dim) {
    sizes[dim] = dim == at ? 1 : x.size(dim - (dim > at));
    strides[dim] = dim == at ? 1 : x.stride(dim - (dim > at));
  }
  return view_of(x, {sizes.data(), static_cast<size_t>(x.dim() + 1)}, strides.data());
}

// Of x, (B, H, tokens, rows of a token, D): whether all rows of a head are as far apart.
inline bool has_even_rows(const Tensor& x) {
  return x.size(3) == 1 || x.size(2) <= 1 || x.stride(2) == x.size(3) * x.stride(3);
}

}  // namespace ds_sparse
