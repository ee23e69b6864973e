// Registers the operators of attention on blocks and in windows.

#include "../../attention_operators.h"

#include <torch/csrc/stable/library.h>

#include "passes.h"

namespace ds_sparse::attention {
namespace {

struct Passes {
  static constexpr auto forward = attention_forward;
  static constexpr auto backward = attention_backward;
  static constexpr auto bias_backward = attention_bias_backward;
};
using Operators = AttentionOperators<Passes>;

}  // namespace
}  // namespace ds_sparse::attention

STABLE_TORCH_LIBRARY_IMPL(ds_sparse, CUDA, m) {
  using ds_sparse::attention::Operators;
  m.impl("block_attention_forward", TORCH_BOX(&Operators::block_forward));
  m.impl("block_attention_backward", TORCH_BOX(&Operators::block_backward));
  m.impl("block_attention_bias_backward", TORCH_BOX(&Operators::block_bias_backward));
  m.impl("window_attention_forward", TORCH_BOX(&Operators::window_forward));
  m.impl("window_attention_backward", TORCH_BOX(&Operators::window_backward));
}
