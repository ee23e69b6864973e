// A bias by distance as kernels for Hopper read it: in fp32, and so that what two blocks need of it lies where the copy
// engine can begin.

#pragma once

#include "../common/launch.h"
#include "scoring.h"

namespace ds_sparse::attention {

// By distance, a key less its query; one for each head, or for all, where head_stride is 0.
struct DistanceValues {
  const float* of_first_head;
  int64_t head_stride;
  int middle;  // the place of the distance 0
};

// Makes those of `bias`, whose kSame is T, for so many queries and keys, in blocks of so many. Returns what holds the
// numbers that `values` then points at. distance_values.cu
template <class T>
Tensor set_distance_values(
    const Launcher& launch, const Tensor& on, const Bias& bias, int64_t heads, int queries, int keys, int query_block,
    int key_block, DistanceValues& values);

// Tells if a bias goes by distance. Strides of other tensors are not negative.
inline bool goes_by_distance(const Bias& bias) { return bias.row_stride < 0 && bias.row_stride == -bias.column_stride; }

}  // namespace ds_sparse::attention
