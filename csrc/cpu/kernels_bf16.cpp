// The kernels that multiply bf16, for the instruction set this file is compiled for; see kernels.h.

#include "attention.h"
#include "gemm.h"
#include "token.h"
#include "window.h"

namespace ds_sparse::cpu::DS_SPARSE_ISA {

extern const Products<BFloat16, BFloat16Pair> table_pairs = {
    copy_rows,
    pair_rows,
    pack_pair_panels,
    are_finite_bf16,
    begin_products<BFloat16Pair>,
    end_products<BFloat16Pair>,
    attention_forward<BFloat16, BFloat16Pair>,
    attention_backward<BFloat16, BFloat16Pair>,
    attention_bias_backward<BFloat16, BFloat16Pair>,
    matmul_sdd<BFloat16, BFloat16Pair>,
    matmul_dsd<BFloat16, BFloat16Pair>,
    token_dots<BFloat16Pair>,
    token_sum<BFloat16Pair>,
    token_attention_forward<BFloat16Pair>,
    token_attention_backward<BFloat16Pair>,
    window_matmul<BFloat16, BFloat16Pair>,
    unwindow_matmul<BFloat16Pair>,
};

}  // namespace ds_sparse::cpu::DS_SPARSE_ISA
