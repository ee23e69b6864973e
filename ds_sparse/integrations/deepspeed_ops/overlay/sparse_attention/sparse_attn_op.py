"""The native part, which this loads. DeepSpeed's had one function, which cut layouts into pieces for Triton."""

import ds_sparse.ops  # noqa: F401
from ds_sparse.integrations.deepspeed_ops.gone import Gone

sdd_segment = Gone(f"{__name__}.sdd_segment", "MatMul(layout, block, 'sdd'), which takes the layout whole")
