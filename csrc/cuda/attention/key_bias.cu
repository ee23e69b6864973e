// Sums up, by eights, what is added to the scores of keys: where it is nothing kernels need not look, and what is
// masked altogether they leave out.

#include <algorithm>

#include "key_bias.h"

namespace ds_sparse::attention {
namespace {

// A thread for each eight keys of a batch and head. Numbers, and bools (keeps where true), become `biases`, so many for
// each; keys behind the last one have 0.
template <class B>
__global__ void key_states_kernel(
    const B* given, int64_t batch_stride, int64_t head_stride, int heads, float* biases, uint8_t* states, int64_t count,
    int octets, int keys) {
  for (int64_t number = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; number < count;
       number += int64_t{gridDim.x} * blockDim.x) {
    const int64_t matrix = number / octets;
    const int first = number % octets * 8;
    const B* from = given + matrix / heads * batch_stride + matrix % heads * head_stride;
    bool nothing = true, masked = true;
    for (int key = first; key < first + 8; ++key) {
      float bias = 0;
      if (key < keys) {
        if constexpr (std::is_same_v<B, bool>) {
          bias = from[key] ? 0.0f : -kInfinity;
        } else {
          bias = biased(0.0f, from[key]);
        }
        nothing = nothing && bias == 0;
        masked = masked && bias == -kInfinity;
      }
      biases[matrix * 8 * octets + key] = bias;
    }
    states[number] = nothing ? kNoBias : masked ? kAllMasked : kSomeBias;
  }
}

}  // namespace

std::optional<Tensor> set_key_bias(const Launcher& launch, const std::optional<Tensor>& key_bias, Scoring& scoring) {
  if (!key_bias) {
    return {};
  }
  const Tensor& given = *key_bias;
  const int64_t batch = given.size(0), heads = given.dim() == 4 ? given.size(1) : 1;
  const int64_t batch_stride = given.stride(0), head_stride = given.dim() == 4 ? given.stride(1) : 0;
  const int64_t octets = space_of_key_bias(scoring.keys) / 8, count = batch * heads * octets;
  scoring.only_masks_keys = given.scalar_type() == ScalarType::Bool;
  const int64_t bytes = count * 8 * sizeof(float);
  Tensor made = empty_on(given, {bytes + count}, ScalarType::Byte);
  float* biases = static_cast<float*>(made.mutable_data_ptr());
  uint8_t* states = made.mutable_data_ptr<uint8_t>() + bytes;
  const auto set = [&](auto kernel, const auto* from) {
    launch(
        kernel, std::min<int64_t>((count + 127) / 128, 1 << 16), 128, from, batch_stride, head_stride,
        static_cast<int>(heads), biases, states, count, static_cast<int>(octets), scoring.keys);
  };
  // One that all batches or heads share has a stride of 0.
  const auto strides = [&](int64_t (&to)[2], int64_t of_batch, int64_t of_head) {
    to[0] = batch == 1 ? 0 : of_batch;
    to[1] = heads == 1 ? 0 : of_head;
  };
  if (scoring.only_masks_keys) {
    set(key_states_kernel<bool>, given.const_data_ptr<bool>());
  } else {
    set(key_states_kernel<float>, given.const_data_ptr<float>());
  }
  scoring.key_bias = biases;
  strides(scoring.key_bias_strides, heads * octets * 8, octets * 8);
  scoring.key_states = states;
  strides(scoring.key_states_strides, heads * octets, octets);
  return made;
}

}  // namespace ds_sparse::attention
