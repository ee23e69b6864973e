"""Block-sparse attention for training: the structures, the operations, and their binding into DeepSpeed."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .tools import on_import

__version__ = "0.1.0"

_PUBLIC = {
    "BlockIndex": "index",
    "MatMul": "ops",
    "Softmax": "ops",
    "block_sparse_attention": "ops",
    "selected_attention": "ops",
    "select_blocks": "ops",
    "select_blocks_by_compression": "ops",
    "topk_attention": "ops",
    "PackedIndex": "index",
    "WindowIndex": "index",
    "window_matmul": "ops",
    "unwindow_matmul": "ops",
    "window_softmax": "ops",
    "window_attention": "ops",
    "explain": "ops",
    "draw": "drawing",
    "force_implementation": "dispatch",
    "TokenIndex": "index",
    "sparse_attn": "ops",
    "sparse_matmul": "ops",
    "sparse_matmul_vo": "ops",
    "masked_attention": "ops",
    "gather_attention": "ops",
    "jagged_attention": "ops",
    "torch_sparse_attention": "ops",
    "SparseSelfAttention": "modules.self_attention",
    "BertSparseSelfAttention": "modules.bert",
    "SparseMultiheadAttention": "modules.multihead_attention",
    "NativeSparseAttention": "modules.native_sparse_attention",
    "IndexerAttention": "modules.indexer_attention",
    "indexer_loss": "modules.indexer_attention",
    "record_choices": "modules.choices",
    "SequenceParallelAttention": "sequence",
    "sequence_batches": "sequence",
    "sequence_parallel": "integrations.transformers.sequence",
    "SparseAttentionUtils": "models.sparse_attention_utils",
    "SparsifyReport": "models.report",
    "sparsify": "models.sparsify",
    "adapt": "integrations.transformers.checkpoint",
    "convert": "integrations.transformers.checkpoint",
    "SparsityConfig": "sparsity",
    "DenseSparsityConfig": "sparsity",
    "FixedSparsityConfig": "sparsity",
    "VariableSparsityConfig": "sparsity",
    "BigBirdSparsityConfig": "sparsity",
    "BSLongformerSparsityConfig": "sparsity",
    "LocalSlidingWindowSparsityConfig": "sparsity",
    "MobaSparsityConfig": "sparsity",
    "NativeSparsityConfig": "sparsity",
    "IndexerSparsityConfig": "sparsity",
    "TransformersBigBirdSparsityConfig": "sparsity",
    "SparsityWarning": "sparsity",
    "declared": "sparsity",
    "register_sparsity": "sparsity",
    "SparseAttentionConfigError": "config",
    "load_config": "config",
    "parse_sparse_attention": "config",
    "parse_sparse_attention_layers": "config",
    "add_config_arguments": "integrations.deepspeed",
    "get_sparse_attention_config": "integrations.deepspeed",
    "get_sparse_attention_layers": "integrations.deepspeed",
    "init_distributed": "integrations.deepspeed",
    "initialize": "integrations.deepspeed",
}

__all__ = sorted(_PUBLIC)

if TYPE_CHECKING:  # "as" their own names: what type checkers and editors offer to others
    from .config import SparseAttentionConfigError as SparseAttentionConfigError
    from .config import load_config as load_config
    from .config import parse_sparse_attention as parse_sparse_attention
    from .config import parse_sparse_attention_layers as parse_sparse_attention_layers
    from .dispatch import force_implementation as force_implementation
    from .drawing import draw as draw
    from .index import BlockIndex as BlockIndex
    from .index import PackedIndex as PackedIndex
    from .index import TokenIndex as TokenIndex
    from .index import WindowIndex as WindowIndex
    from .integrations.deepspeed import add_config_arguments as add_config_arguments
    from .integrations.deepspeed import get_sparse_attention_config as get_sparse_attention_config
    from .integrations.deepspeed import get_sparse_attention_layers as get_sparse_attention_layers
    from .integrations.deepspeed import init_distributed as init_distributed
    from .integrations.deepspeed import initialize as initialize
    from .integrations.transformers.checkpoint import adapt as adapt
    from .integrations.transformers.checkpoint import convert as convert
    from .integrations.transformers.sequence import sequence_parallel as sequence_parallel
    from .models.report import SparsifyReport as SparsifyReport
    from .models.sparse_attention_utils import SparseAttentionUtils as SparseAttentionUtils
    from .models.sparsify import sparsify as sparsify
    from .modules.bert import BertSparseSelfAttention as BertSparseSelfAttention
    from .modules.choices import record_choices as record_choices
    from .modules.indexer_attention import IndexerAttention as IndexerAttention
    from .modules.indexer_attention import indexer_loss as indexer_loss
    from .modules.multihead_attention import SparseMultiheadAttention as SparseMultiheadAttention
    from .modules.native_sparse_attention import NativeSparseAttention as NativeSparseAttention
    from .modules.self_attention import SparseSelfAttention as SparseSelfAttention
    from .ops import MatMul as MatMul
    from .ops import Softmax as Softmax
    from .ops import block_sparse_attention as block_sparse_attention
    from .ops import explain as explain
    from .ops import gather_attention as gather_attention
    from .ops import jagged_attention as jagged_attention
    from .ops import masked_attention as masked_attention
    from .ops import selected_attention as selected_attention
    from .ops import sparse_attn as sparse_attn
    from .ops import sparse_matmul as sparse_matmul
    from .ops import sparse_matmul_vo as sparse_matmul_vo
    from .ops import topk_attention as topk_attention
    from .ops import torch_sparse_attention as torch_sparse_attention
    from .ops import unwindow_matmul as unwindow_matmul
    from .ops import window_matmul as window_matmul
    from .ops import window_softmax as window_softmax
    from .ops.block_selection import select_blocks as select_blocks
    from .ops.block_selection import select_blocks_by_compression as select_blocks_by_compression
    from .ops.window_attention import window_attention as window_attention
    from .sequence import SequenceParallelAttention as SequenceParallelAttention
    from .sequence import sequence_batches as sequence_batches
    from .sparsity import BigBirdSparsityConfig as BigBirdSparsityConfig
    from .sparsity import BSLongformerSparsityConfig as BSLongformerSparsityConfig
    from .sparsity import DenseSparsityConfig as DenseSparsityConfig
    from .sparsity import FixedSparsityConfig as FixedSparsityConfig
    from .sparsity import IndexerSparsityConfig as IndexerSparsityConfig
    from .sparsity import LocalSlidingWindowSparsityConfig as LocalSlidingWindowSparsityConfig
    from .sparsity import MobaSparsityConfig as MobaSparsityConfig
    from .sparsity import NativeSparsityConfig as NativeSparsityConfig
    from .sparsity import SparsityConfig as SparsityConfig
    from .sparsity import SparsityWarning as SparsityWarning
    from .sparsity import TransformersBigBirdSparsityConfig as TransformersBigBirdSparsityConfig
    from .sparsity import VariableSparsityConfig as VariableSparsityConfig
    from .sparsity import declared as declared
    from .sparsity import register_sparsity as register_sparsity


def _load_launcher_of_checkout() -> None:
    """In a checkout that is on the path and not installed, `ds_sparse.launcher` is the folder beside this one."""
    place = Path(__file__).resolve().parent.parent / "launcher" / "__init__.py"
    if place.exists() and find_spec("ds_sparse.launcher") is None:
        spec = spec_from_file_location("ds_sparse.launcher", place, submodule_search_locations=[str(place.parent)])
        assert spec is not None and spec.loader is not None
        sys.modules[spec.name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[spec.name])


_load_launcher_of_checkout()


def _refuse_second_copy() -> None:
    """Where another copy is imported already, this one's modules would be the other's: Hugging Face's kernels imports
    the package from where it lies."""
    here, first = Path(__file__).parent, Path(on_import.__file__).parent.parent
    if here != first:
        raise ImportError(
            f"ds_sparse is imported from {first}, and a process has one; use that one, or load the one in {here} "
            "before anything imports ds_sparse."
        )


_refuse_second_copy()


if not TYPE_CHECKING:  # where any name would be one

    def __getattr__(name: str) -> Any:
        """Imports a public name when it is first used: configurations need no native library, operations no
        DeepSpeed."""
        if name == "flash_attn_varlen_func":
            raise ImportError(
                "Transformers asks the kernel of a repository that attn_implementation names for FlashAttention's "
                "functions, which ds_sparse has not; load it with kernels.get_kernel(...) and give "
                'attn_implementation="ds_sparse".'
            )
        if name not in _PUBLIC:
            raise AttributeError(f"module 'ds_sparse' has no attribute {name!r}")
        value = getattr(import_module(f".{_PUBLIC[name]}", __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*_PUBLIC, *(name for name in globals() if name.startswith("__"))})


on_import.register_with_transformers()
