// What is added to the scores of keys, as attention's kernels read it.

#pragma once

#include <optional>

#include "attention.h"
#include "launch.h"

namespace ds_sparse::attention {

// Writes key_bias into `scoring`, with a KeyState for every eight keys. Returns the tensor that holds these. attention_keys.cu
std::optional<Tensor> add_key_bias(const Launcher& launch, const std::optional<Tensor>& key_bias, Scoring& scoring);

}  // namespace ds_sparse::attention
