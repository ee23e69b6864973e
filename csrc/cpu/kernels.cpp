// The kernels for the instruction set this file is compiled for; see kernels.h.

#include "attention.h"
#include "decode.h"
#include "gemm.h"
#include "rows.h"
#include "token.h"
#include "window.h"

namespace ds_sparse::cpu::DS_SPARSE_ISA {

template <class T>
constexpr Kernels<T> table = {
    {
        pack_rows<T>,
        pack_rows<T>,
        pack_panels<T>,
        are_finite<Compute<T>>,
        begin_products<Compute<T>>,
        end_products<Compute<T>>,
        attention_forward<T, Compute<T>>,
        attention_backward<T, Compute<T>>,
        attention_bias_backward<T, Compute<T>>,
        matmul_sdd<T, Compute<T>>,
        matmul_dsd<T, Compute<T>>,
        token_dots<Compute<T>>,
        token_sum<Compute<T>>,
        token_attention_forward<Compute<T>>,
        token_attention_backward<Compute<T>>,
        window_matmul<T, Compute<T>>,
        unwindow_matmul<Compute<T>>,
    },
    panel_width<T>,
    native_width<Compute<T>>,
    pack_rows<T>,
    store_rows<T>,
    softmax_forward<T>,
    softmax_backward<T>,
    add_block<T>,
    row_dots<T>,
    window_softmax_forward<T>,
    window_softmax_backward<T>,
    decode_attention<T>,
    are_below<T>,
};

extern const Kernels<float> table_float = table<float>;
extern const Kernels<double> table_double = table<double>;
extern const Kernels<Half> table_half = table<Half>;
extern const Kernels<BFloat16> table_bfloat16 = table<BFloat16>;

}  // namespace ds_sparse::cpu::DS_SPARSE_ISA
