"""DeepSpeed kept the sources of its first kernels here, in Triton's language of 2020."""

from ds_sparse.integrations.deepspeed_ops.gone import Gone

matmul = Gone(f"{__name__}.matmul", "MatMul(layout, block, mode)")
softmax_fwd = Gone(f"{__name__}.softmax_fwd", "Softmax(layout, block)")
softmax_bwd = Gone(f"{__name__}.softmax_bwd", "Softmax(layout, block), which is differentiable")
