// The type that arithmetic, sums and statistics are done in, whatever tensors hold: fp32, or fp64 for fp64.
#pragma once

#include <type_traits>

namespace ds_sparse {

template <class T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;

}  // namespace ds_sparse
