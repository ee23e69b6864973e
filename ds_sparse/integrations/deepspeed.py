"""DeepSpeed: the flag, the hand-over of the JSON, `initialize`."""

from __future__ import annotations

import argparse
import inspect
import os
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from torch import nn

from ..config import load_config, parse_sparse_attention
from ..ranks import is_launched, rank, world_size
from ..self_attention import SparseSelfAttention
from ..sparsity import FixedSparsityConfig, SparsityConfig

FLAG = "deepspeed_sparse_attention"
_PROJECTIONS = (
    {"query", "key", "value"}, {"q_proj", "k_proj", "v_proj"}, {"q_lin", "k_lin", "v_lin"}, {"to_q", "to_k", "to_v"},
    {"wq", "wk", "wv"}, {"query_key_value"}, {"c_attn"}, {"qkv"}, {"wqkv"}, {"to_qkv"}, {"qkv_proj"},
)  # fmt: skip


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """`deepspeed.add_config_arguments`, and `--deepspeed_sparse_attention`."""
    parser = deepspeed.add_config_arguments(parser)
    group = parser.add_argument_group("ds_sparse", "block-sparse attention")
    group.add_argument(
        f"--{FLAG}",
        action="store_true",
        help='make attention block-sparse as the "sparse_attention" block of the DeepSpeed JSON says',
    )
    return parser


def init_distributed(**arguments: Any) -> None:
    """`deepspeed.init_distributed`, which also works without a launcher, a compiler, ninja or mpi4py.

    A process that no launcher started becomes rank 0 of 1. On CPU, DeepSpeed would compile a shared-memory all-reduce when
    it first runs; it is left out, and gloo does that work.
    """
    if not is_launched():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if deepspeed.get_accelerator().device_name() == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(**arguments)


def get_sparse_attention_config(args: argparse.Namespace, num_heads: int) -> SparsityConfig | None:
    """The structure that the JSON asks for, or None without the flag. Source: bing_bert's function of this name.

    A structure with random blocks and no `seed` gets one: rank 0 draws it and prints it, all ranks use it.

    Args:
        args: has `deepspeed_sparse_attention` and `deepspeed_config`.
        num_heads: attention heads of the model.

    Raises:
        SparseAttentionConfigError: the block is wrong (a ValueError; all mistakes in one go).
        ValueError: the flag is on without a JSON, or together with `--deepspeed_transformer_kernel`.
        RuntimeError: several ranks would draw a seed before torch.distributed runs.
    """
    if not _flag_is_on(args):
        return None
    source = getattr(args, "deepspeed_config", None)
    if source is None:
        raise ValueError(f"--{FLAG} is on and no DeepSpeed JSON is given; add --deepspeed_config FILE.")
    _, block = load_config(source)
    if block is None:
        say("deepspeed sparse attention is not set; Fixed sparsity is used as default.")
        return FixedSparsityConfig(num_heads=num_heads)
    notices: list[str] = []
    config = parse_sparse_attention(block, num_heads, source=source, notices=notices)
    for notice in notices:
        say(notice)
    _set_common_seed(config)
    return config


def initialize(*positional: Any, **keywords: Any):
    """`deepspeed.initialize` for a JSON with a `"sparse_attention"` block: the same arguments, the same four results.

    DeepSpeed 0.19.7 and later refuse the block, so it is taken out first. With `args.deepspeed_sparse_attention` every
    attention layer of the model has to be sparse already, with the structure of the JSON (`get_sparse_attention_config`
    makes it); without it, a block in the JSON is off, and one line says so.

    Raises:
        SparseAttentionConfigError: the JSON cannot be read; with the flag, its block is wrong.
        ValueError: two configurations or none, no model; with the flag, an attention layer of the model that is dense, or
            has another structure than the JSON's.
    """
    arguments = inspect.signature(deepspeed.initialize).bind(*positional, **keywords).arguments
    args, model = arguments.pop("args", None), arguments.pop("model", None)
    given = [arguments.pop("config", None), arguments.pop("config_params", None)]
    given += [getattr(args, name, None) for name in ("deepspeed_config", "deepscale_config")]
    sources = [source for source in given if source is not None]
    if len(sources) != 1:
        raise ValueError(
            f"{len(sources)} DeepSpeed configurations are given; give exactly one, as config= or with --deepspeed_config FILE."
        )
    if model is None:
        raise ValueError("model is None; pass the torch.nn.Module to train as model=.")
    deepspeed_config, block = load_config(sources[0])
    sparse, dense = attention_layers(model)
    if _flag_is_on(args):
        if dense or not sparse:
            raise ValueError(_not_all_sparse(model, sparse, dense))
        _check_structures(model, sparse, block or {}, sources[0])
        say(f"sparse attention is on in {len(sparse)} of {len(sparse)} attention layers.")
    elif block is not None and sparse:
        say(f"the sparse_attention block is off (no --{FLAG}), and {len(sparse)} layers were built sparse without it.")
    elif block is not None:
        say(f"the JSON has a sparse_attention block and it is off: training is dense. Add --{FLAG} to switch it on.")
    rendezvous = {name: arguments[name] for name in ("distributed_port", "dist_init_required") if name in arguments}
    init_distributed(**rendezvous)
    with _without_config_argument(args):
        return deepspeed.initialize(args, model, config=deepspeed_config, **arguments)


def attention_layers(model: nn.Module) -> tuple[list[str], list[str]]:
    """Names of the sparse and of the dense self-attention layers of a model.

    Sparse is a `SparseSelfAttention`. Dense is another module that holds projections by the names that models give them
    (`query`, `key` and `value` of BERT, `q_proj`, `k_proj` and `v_proj`, `q_lin`, ..., `query_key_value`, `c_attn`, `qkv`),
    and no `SparseSelfAttention`; and `nn.MultiheadAttention`.
    """
    sparse, dense = [], []
    for name, module in model.named_modules():
        if isinstance(module, SparseSelfAttention):
            sparse.append(name)
        elif isinstance(module, nn.MultiheadAttention) or _has_projections(module):
            if not any(isinstance(child, SparseSelfAttention) for child in module.modules()):
                dense.append(name)
    return sparse, dense


def _has_projections(module: nn.Module) -> bool:
    children = {name.lower() for name, _ in module.named_children()}
    return any(names <= children for names in _PROJECTIONS)


def say(sentence: str) -> None:
    """Prints one line, on rank 0 only."""
    if rank() == 0:
        print(f"ds_sparse: {sentence}", flush=True)


def _flag_is_on(args: argparse.Namespace | None) -> bool:
    if not getattr(args, FLAG, False):
        return False
    if getattr(args, "deepspeed_transformer_kernel", False):
        raise ValueError(
            f"--{FLAG} and --deepspeed_transformer_kernel are both on; DeepSpeed's transformer kernel has its own dense "
            "attention. Leave one of them away."
        )
    return True


def _not_all_sparse(model: nn.Module, sparse: list[str], dense: list[str]) -> str:
    if not sparse and not dense:
        return (
            f"--{FLAG} is on and {type(model).__name__} has no self-attention layer that ds_sparse knows; use "
            "ds_sparse.SparseSelfAttention or ds_sparse.BertSparseSelfAttention in it, or leave the flag away."
        )
    return (
        f"--{FLAG} is on and {len(sparse)} of the model's {len(sparse) + len(dense)} attention layers are sparse (dense: "
        f"{', '.join(dense[:3])}{', ...' if len(dense) > 3 else ''}); put ds_sparse.BertSparseSelfAttention with "
        "ds_sparse.get_sparse_attention_config(args, num_heads) in their place, or leave the flag away."
    )


def _check_structures(model: nn.Module, sparse: list[str], block: dict[str, Any], source: Any) -> None:
    """Raises ValueError unless every sparse layer has the structure of the block; a seed that the block leaves open may differ."""
    for name in sparse:
        config = model.get_submodule(name).sparsity_config
        wanted = parse_sparse_attention(block, config.num_heads, source=source)
        open_fields = {"seed"} if wanted.seed is None else set()
        differing = sorted(
            field
            for field, value in vars(wanted).items()
            if field not in open_fields and getattr(config, field, None) != value
        )
        if type(config) is not type(wanted) or differing:
            what = f"{type(config).__name__} with " if type(config) is not type(wanted) else ""
            what += ", ".join(f"{field}={getattr(config, field, None)!r}" for field in differing)
            raise ValueError(
                f"--{FLAG} is on, and layer {name} has {what.removesuffix(' with ')} where the JSON says "
                f"{type(wanted).__name__} {', '.join(f'{field}={getattr(wanted, field)!r}' for field in differing)}; build the "
                "layer with ds_sparse.get_sparse_attention_config(args, num_heads), or leave the flag away."
            )


def _set_common_seed(config: SparsityConfig) -> None:
    """Gives a structure that draws blocks by its `seed`, and has none, the same one on all ranks."""
    if getattr(config, "num_random_blocks", 0) == 0 or config.seed is not None:
        return
    seed = [random.SystemRandom().randrange(2**31)]
    if torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(seed, src=0)
    elif world_size() > 1:
        raise RuntimeError(
            "The structure has random blocks and no seed, and torch.distributed is not running yet, so the ranks cannot agree "
            'on one; call ds_sparse.init_distributed() first, or set "seed" in the sparse_attention block.'
        )
    config.seed = seed[0]
    say(f'random blocks are drawn with seed {config.seed}; set "seed" in the sparse_attention block to repeat this layout.')


@contextmanager
def _without_config_argument(args: argparse.Namespace | None) -> Iterator[None]:
    """DeepSpeed asserts that only one configuration is given; ours is the `config` argument."""
    names = [name for name in ("deepspeed_config", "deepscale_config") if getattr(args, name, None) is not None]
    saved = {name: getattr(args, name) for name in names}
    for name in names:
        setattr(args, name, None)
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(args, name, value)
