// The numbers added to the scores of attention.
#pragma once

namespace ds_sparse {

// Finite biases count as no lower, and neither do their sums, so that they are arithmetic, however large: with a factor
// log2(e) they must not reach infinity. `LOWEST_BIAS` in ds_sparse/ops.
template <class C>
constexpr C kLowestBias = C(-1e30);

}  // namespace ds_sparse
