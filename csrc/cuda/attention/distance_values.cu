// Converts a bias by distance for the kernels for Hopper, once a pass.

#include "distance_values.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "tuning.h"

namespace ds_sparse::attention {
namespace {

// `given`: the distance 0 of the first head. A head has `length` values; those that no pair of tokens has are 0.
template <class T>
__global__ void distance_values_kernel(
    const T* given, int64_t head_stride, int64_t step, float* values, int64_t count, int length, int middle,
    int queries, int keys) {
  for (int64_t number = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; number < count;
       number += int64_t{gridDim.x} * blockDim.x) {
    const int distance = static_cast<int>(number % length) - middle;
    float value = 0;
    if (distance > -queries && distance < keys) {
      value = biased(0.0f, static_cast<float>(given[number / length * head_stride + distance * step]));
    }
    values[number] = value;
  }
}

}  // namespace

template <class T>
Tensor set_distance_values(
    const Launcher& launch, const Tensor& on, const Bias& bias, int64_t heads, int queries, int keys, int query_block,
    int key_block, DistanceValues& values) {
  // Strips begin up to a tile before the last distance, and end up to a tile behind the first; blocks may be larger.
  const auto with_margin = [](int tokens, int block) { return (tokens + block - 1) / block * block + kHopperBlockM; };
  const int middle = with_margin(queries, query_block), length = middle + with_margin(keys, key_block);
  const int64_t count = (bias.head_stride == 0 ? 1 : heads) * length;
  Tensor made = empty_on(on, {count}, ScalarType::Float);
  values = {made.mutable_data_ptr<float>(), bias.head_stride == 0 ? 0 : length, middle};
  const auto convert = [&](auto kernel, const auto* from) {
    launch(
        kernel, std::min<int64_t>((count + 255) / 256, 1 << 16), 256, from, bias.head_stride, bias.column_stride,
        made.mutable_data_ptr<float>(), count, length, middle, queries, keys);
  };
  if (bias.kind == Bias::kSame) {
    convert(distance_values_kernel<T>, static_cast<const T*>(bias.data));
  } else {
    convert(distance_values_kernel<float>, static_cast<const float*>(bias.data));
  }
  return made;
}

template Tensor set_distance_values<__half>(
    const Launcher&, const Tensor&, const Bias&, int64_t, int, int, int, int, DistanceValues&);
template Tensor set_distance_values<__nv_bfloat16>(
    const Launcher&, const Tensor&, const Bias&, int64_t, int, int, int, int, DistanceValues&);

}  // namespace ds_sparse::attention
