// Rows that came out not finite, computed again, pair by pair. A tile multiplies all of its rows with all that one of
// them sees, and a probability of zero times NaN is NaN: here what a row does not see is not read. Kernels note in
// PassState that a sum is not finite; where none is, these end at once.

#pragma once

#include "../common/pass_state.h"
#include "backward.h"
#include "forward.h"

namespace ds_sparse::attention {

// The last kernel of a pass. recompute.cu
template <class T>
void recompute_outputs(const Launcher& launch, const Forward<T>& p, int64_t batch);
template <class T>
void recompute_gradients(
    const Launcher& launch, const Backward<T>& p, const TileLists& rows, const TileLists& columns,
    const Matrices<T>& grad_query, const Matrices<T>& grad_key, const Matrices<T>& grad_value, int64_t batch);

}  // namespace ds_sparse::attention
