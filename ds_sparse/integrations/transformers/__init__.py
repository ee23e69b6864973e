"""Transformers: `attn_implementation="ds_sparse"`, through its attention interface and its mask interface.

Importing this package registers both. The structure of a model is its `config.sparse_attention`, a dict with the keys
of the JSON block, which is saved and loaded with the config. No module and no key of the state dict differs from the
dense model's, but where the structure adds parameters: each layer then has a module `sparse_attention` with them.
"""

import sys

from ...tools.extras import optional_imports

with optional_imports():
    import transformers

if int(transformers.__version__.split(".")[0]) < 5:
    raise ImportError(
        f"transformers {transformers.__version__} is installed, and its encoders take no attention from outside before "
        "5.0; install transformers>=5."
    )

from ..transformers_family import NAME
from . import activation, binding
from .activation import OwnConfigs, Switch, give_own_configs
from .binding import MAX_SEQ_LENGTH_KEY, number_of, structure_of
from .compatibility import roles, why_not
from .functions import attention
from .masks import key_padding_mask
from .sequence import sequence_parallel

# Pickles of models that 0.1.0 made sparse name these modules.
for _name, _module in (("switch", activation), ("trial", binding), ("distances", binding)):
    sys.modules[f"{__name__}.{_name}"] = _module

__all__ = [
    "MAX_SEQ_LENGTH_KEY",
    "NAME",
    "OwnConfigs",
    "Switch",
    "attention",
    "give_own_configs",
    "key_padding_mask",
    "number_of",
    "roles",
    "sequence_parallel",
    "structure_of",
    "why_not",
]
