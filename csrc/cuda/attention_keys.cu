// What is added to the scores of keys, summed up by eights: where it is nothing kernels need not look, and what is masked
// altogether they leave out.

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "attention_keys.h"

namespace ds_sparse::attention {
namespace {

__global__ void key_states_kernel(
    const float* key_bias, int64_t stride, uint8_t* states, int64_t count, int octets, int keys) {
  for (int64_t number = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; number < count;
       number += int64_t{gridDim.x} * blockDim.x) {
    const int first = number % octets * 8;
    const float* biases = key_bias + number / octets * stride;
    bool nothing = true, masked = true;
    for (int key = first; key < min(first + 8, keys); ++key) {
      nothing = nothing && biases[key] == 0;
      masked = masked && biases[key] == -kInfinity;
    }
    states[number] = nothing ? kNoBias : masked ? kAllMasked : kSomeBias;
  }
}

__global__ void masks_kernel(const bool* keeps, int64_t stride, float* biases, int64_t count, int keys) {
  for (int64_t number = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; number < count;
       number += int64_t{gridDim.x} * blockDim.x) {
    biases[number] = keeps[number / keys * stride + number % keys] ? 0.0f : -kInfinity;
  }
}

}  // namespace

KeyBias add_key_bias(const Launcher& launch, const std::optional<Tensor>& key_bias, Scoring& scoring) {
  if (!key_bias) {
    return {};
  }
  const int64_t batch = key_bias->size(0), octets = (scoring.keys + 7) / 8, count = batch * octets;
  scoring.only_masks_keys = key_bias->scalar_type() == ScalarType::Bool;
  Tensor biases = *key_bias;
  if (scoring.only_masks_keys) {
    biases = torch::stable::new_empty(*key_bias, {batch, scoring.keys}, ScalarType::Float);
    launch(
        masks_kernel, std::min<int64_t>((biases.numel() + 127) / 128, 1 << 16), 128, key_bias->const_data_ptr<bool>(),
        key_bias->stride(0), biases.mutable_data_ptr<float>(), biases.numel(), scoring.keys);
  }
  Tensor states = torch::stable::new_empty(*key_bias, {batch, octets}, ScalarType::Byte);
  const int64_t stride = scoring.only_masks_keys ? scoring.keys : biases.stride(0);
  scoring.key_bias = biases.const_data_ptr<float>();
  scoring.key_states = states.mutable_data_ptr<uint8_t>();
  scoring.key_bias_stride = batch == 1 ? 0 : stride;
  scoring.key_states_stride = batch == 1 ? 0 : octets;
  launch(
      key_states_kernel, std::min<int64_t>((count + 127) / 128, 1 << 16), 128, scoring.key_bias, stride,
      states.mutable_data_ptr<uint8_t>(), count, static_cast<int>(octets), scoring.keys);
  return {biases, states};
}

}  // namespace ds_sparse::attention
