// What is added to the scores of attention.
#pragma once

namespace ds_sparse {

// Finite biases count as no lower, so that they are arithmetic, however large: three of them, and a factor log2(e),
// must not reach infinity. `LOWEST_BIAS` in ds_sparse/ops.
template <class C>
constexpr C kLowestBias = C(-1e30);

}  // namespace ds_sparse
