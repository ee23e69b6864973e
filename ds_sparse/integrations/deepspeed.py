"""DeepSpeed: the flag, the hand-over of the JSON, `initialize`."""

from __future__ import annotations

import argparse
import copy
import functools
import inspect
import os
import socket
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..config import (
    ANY_NUM_HEADS,
    BLOCK_KEY,
    LAYERS_KEY,
    LayerStructures,
    Source,
    SparseAttentionConfigError,
    load_config,
    read_block,
)
from ..config.block import layer_entries
from ..config.file import name_of
from ..models.families import families
from ..models.layers import AttentionLayers, attention_layers, structure_of
from ..models.sparsify import activate
from ..models.structures import set_common_seeds
from ..modules.chosen_attention import LearnedAttention
from ..sparsity import SparsityConfig, adds_parameters
from ..sparsity.declarations import DEFAULTS, declared_value
from ..tools.extras import optional_imports
from ..tools.notices import say_notices
from ..tools.ranks import is_launched, say
from ..tools.wording import counted
from .cpu_communication import leave_out_compiled_all_reduce, let_gloo_finish_at_exit
from .deepspeed_sequence import autosp, parallelize, refuse, sequence_parallel_size
from .flag import FLAG, is_on
from .transformers_family import innermost_pretrained_models, pretrained_model_around

with optional_imports():
    import deepspeed

_SEEDS_KEY = "ds_sparse_seeds"
NO_BLOCK = "deepspeed sparse attention is not set; Fixed sparsity is used as default."


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """`deepspeed.add_config_arguments`, and `--deepspeed_sparse_attention`.

    Args:
        parser: the script's. The flag's default is what was given to `ds_sparse run`.

    Returns:
        The parser.

    Raises:
        argparse.ArgumentError: the parser has one of the options already.

    Examples:
        >>> import argparse
        >>> import ds_sparse
        >>> parser = ds_sparse.add_config_arguments(argparse.ArgumentParser())
        >>> args = parser.parse_args(["--deepspeed_config", "ds.json", "--deepspeed_sparse_attention"])
        >>> args.deepspeed_config, args.deepspeed_sparse_attention
        ('ds.json', True)
    """
    parser = deepspeed.add_config_arguments(parser)
    group = parser.add_argument_group("ds_sparse", "block-sparse attention")
    group.add_argument(
        f"--{FLAG}",
        action="store_true",
        default=is_on(),
        help='make attention block-sparse as the "sparse_attention" block of the DeepSpeed JSON says',
    )
    return parser


def init_distributed(**arguments: Any) -> None:
    """`deepspeed.init_distributed`, which also works without a launcher, a compiler, ninja or mpi4py.

    A process that no launcher started becomes rank 0 of 1. On the CPU gloo communicates, and nothing is compiled.

    Args:
        arguments: those of `deepspeed.init_distributed`, by name.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> ds_sparse.init_distributed()
        >>> torch.distributed.get_rank(), torch.distributed.get_world_size()
        (0, 1)
    """
    if not is_launched():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    leave_out_compiled_all_reduce(deepspeed)
    let_gloo_finish_at_exit()
    deepspeed.init_distributed(**arguments)


def get_sparse_attention_config(args: argparse.Namespace, num_heads: int) -> SparsityConfig | None:
    """The structure that the JSON asks for, or None without the flag. Source: bing_bert's function of this name.

    A structure with random blocks and no `seed` gets one: rank 0 draws it and prints it, all ranks use it.

    Args:
        args: has `deepspeed_config`, and `deepspeed_sparse_attention`; without that the flag of `ds_sparse run` counts.
        num_heads: attention heads of the model.

    Returns:
        The structure; that of a JSON without a block is `FixedSparsityConfig`, and a line says so.

    Raises:
        SparseAttentionConfigError: the JSON or its block is wrong (a ValueError; all mistakes in one go).
        ValueError: the flag is on without a JSON, or together with `--deepspeed_transformer_kernel`; the block has
            `layers`, for which there is `get_sparse_attention_layers`.
        RuntimeError: several ranks would draw a seed before torch.distributed runs.

    Examples:
        >>> import argparse
        >>> import ds_sparse
        >>> json = {"train_batch_size": 8, "sparse_attention": {"mode": "fixed", "num_local_blocks": 8}}
        >>> args = argparse.Namespace(deepspeed_sparse_attention=True, deepspeed_config=json)
        >>> ds_sparse.get_sparse_attention_config(args, num_heads=4).num_local_blocks
        8
    """
    structures = _asked_for(args, num_heads)
    if structures is not None and structures.entries:
        raise ValueError(
            f"{args.deepspeed_config}: the {BLOCK_KEY} block has {LAYERS_KEY}, and this program asks for one structure "
            f"for all layers; build each with ds_sparse.get_sparse_attention_layers(args, num_heads, num_layers), or "
            f"leave {LAYERS_KEY} out."
        )
    return None if structures is None else structures.others


def get_sparse_attention_layers(
    args: argparse.Namespace, num_heads: int, num_layers: int
) -> list[SparsityConfig | None] | None:
    """The structure of each layer that the JSON asks for, or None without the flag.

    This is `get_sparse_attention_config` for models whose layers may have structures of their own.

    Args:
        args, num_heads: as in `get_sparse_attention_config`.
        num_layers: attention layers of the model.

    Returns:
        A structure a layer, the same object where they are of one entry; None for a layer that stays dense.

    Raises:
        SparseAttentionConfigError, ValueError, RuntimeError: as `get_sparse_attention_config`; an entry of `layers`
            names a layer that there is not.

    Examples:
        >>> import argparse
        >>> import ds_sparse
        >>> json = {"sparse_attention": {"mode": "fixed", "layers": {"1": None}}}
        >>> args = argparse.Namespace(deepspeed_sparse_attention=True, deepspeed_config=json)
        >>> [structure is None for structure in ds_sparse.get_sparse_attention_layers(args, num_heads=4, num_layers=3)]
        [False, True, False]
    """
    structures = _asked_for(args, num_heads, num_layers)
    return None if structures is None else structures.of_all(num_layers)


def _asked_for(args: argparse.Namespace, num_heads: int, num_layers: int | None = None) -> LayerStructures | None:
    if not is_on(args):
        return None
    source = getattr(args, "deepspeed_config", None)
    if source is None:
        raise ValueError(f"--{FLAG} is on and no DeepSpeed JSON is given; add --deepspeed_config FILE.")
    structures = _read(load_config(source).block, source, num_heads, num_layers)
    set_common_seeds(structures)
    return structures


def _read(
    block: Mapping[str, Any] | None, source: Source, num_heads: int = ANY_NUM_HEADS, num_layers: int | None = None
) -> LayerStructures:
    """The structures of a JSON's block, whose notices are said; without a block those of an empty one."""
    if block is None:
        say(NO_BLOCK)
    notices: list[str] = []
    structures = read_block(block or {}, num_heads, source=source, notices=notices, num_layers=num_layers)
    say_notices(notices)
    return structures


def initialize(*positional: Any, **keywords: Any) -> Any:
    """`deepspeed.initialize` for a JSON with a `"sparse_attention"` block: the same arguments, the same four results.

    DeepSpeed 0.19.7 and later refuse the block, so it is taken out first. With `args.deepspeed_sparse_attention` (where
    `args` has no such attribute, with the flag of `ds_sparse run`) a dense model is made sparse as the block says, by
    `ds_sparse.sparsify`, and a model whose attention layers are all sparse has to have the structure of the block.
    Without the flag a block in the JSON is off. One line says what is the case. The engine's checkpoints keep the seed
    that random blocks of a Transformers model were drawn with, and restore it where the JSON has none.

    Args:
        positional, keywords: those of `deepspeed.initialize`, such as `args`, `model` and `config`.

    Returns:
        The engine, the optimizer, the loader of the training data and the scheduler, as `deepspeed.initialize` gives
        them.

    Raises:
        SparseAttentionConfigError: the JSON cannot be read; with the flag, its block is wrong, or the model has no
            attention that is known, is sparse in part, or in another way than the JSON says.
        ValueError: two configurations or none, no model; with the flag, a model that cannot be made sparse.

    Examples:
        >>> import argparse
        >>> import torch
        >>> import transformers
        >>> import ds_sparse
        >>> sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        >>> model = transformers.BertModel(transformers.BertConfig(vocab_size=50, max_position_embeddings=64, **sizes))
        >>> config = {
        ...     "train_batch_size": 2,
        ...     "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        ...     "sparse_attention": {"mode": "bslongformer", "block": 16},
        ... }
        >>> args = argparse.Namespace(deepspeed_sparse_attention=True)
        >>> engine, *_ = ds_sparse.initialize(args, model, config=config)
        ds_sparse: 1 attention layer made sparse: BSLongformerSparsityConfig, block 16, density 87.5% at 64 tokens.
        ds_sparse: sparse attention is on in 1 of 1 attention layers.
        >>> hidden = engine(torch.full((2, 64), 7, device=engine.device)).last_hidden_state
        >>> loss = engine.backward(hidden.square().mean())
        >>> engine.step()
    """
    return initialize_program(positional, keywords, launcher_decides=False)


def initialize_program(positional: tuple[Any, ...], keywords: dict[str, Any], *, launcher_decides: bool) -> Any:
    """`initialize`; for a program that `ds_sparse run` started the launcher's flag counts also where the program's own
    parser knows the flag and did not get it."""
    arguments = inspect.signature(deepspeed.initialize).bind(*positional, **keywords).arguments
    args, model = arguments.pop("args", None), arguments.pop("model", None)
    given = [arguments.pop("config", None), arguments.pop("config_params", None)]
    own = {name: getattr(args, name, None) for name in ("deepspeed_config", "deepscale_config")}
    sources = [source for source in (*given, *own.values()) if source is not None]
    if len(sources) != 1:
        raise ValueError(
            f"{len(sources)} DeepSpeed configurations are given; give exactly one, as config= or with "
            "--deepspeed_config FILE."
        )
    if model is None:
        raise ValueError("model is None; pass the torch.nn.Module to train as model=.")
    deepspeed_config, block = load_config(sources[0])
    size = sequence_parallel_size(deepspeed_config, name_of(sources[0]))
    found = attention_layers(model)
    on = is_on(args, launcher_decides=launcher_decides)
    refuse(size, arguments, on)
    wrong = autosp(deepspeed_config) if on or found.sparse else None
    if wrong is not None:
        raise SparseAttentionConfigError([f"{name_of(sources[0])}: {wrong}"])
    structures = _read(block, sources[0]) if on else None
    if structures is not None:
        _check_layers(model, found, structures)
    is_new = structures is not None and not found.sparse
    if structures is not None and is_new:
        _refuse_optimizer_without(structures, arguments.get("optimizer"))
    rendezvous = {name: arguments[name] for name in ("distributed_port", "dist_init_required") if name in arguments}
    init_distributed(**rendezvous)
    if structures is not None and is_new:
        for heading in activate(model, found, structures).headings:  # ranks that draw blocks have to be able to talk
            say(f"{heading}.")
        found = attention_layers(model)
    if arguments.get("model_parameters") is not None:
        arguments["model_parameters"] = _with_learned(model, arguments["model_parameters"], is_new)
    elif isinstance(arguments.get("optimizer"), torch.optim.Optimizer):
        _with_learned(model, arguments["optimizer"].param_groups, is_new)
    sparse, dense, _ = found
    if on:
        say(f"sparse attention is on in {len(sparse)} of {len(sparse) + len(dense)} attention layers.")
    elif block is not None and sparse:
        say(
            f"the sparse_attention block is off (no --{FLAG}); what your script built sparse stays sparse, "
            f"{counted(len(sparse), 'layer')}."
        )
    elif block is not None:
        say(f"the JSON has a sparse_attention block and it is off: training is dense. Add --{FLAG} to switch it on.")
    if on and size > 1:
        arguments |= parallelize(model, size, deepspeed_config)
        say(f"each sequence is shared by {size} ranks.")
    # The attribute leads beneath ourselves, where `ds_sparse run` has put us in the place of DeepSpeed's function.
    below = getattr(deepspeed.initialize, "below", deepspeed.initialize)
    own = {name: source for name, source in own.items() if source is not None}
    for name in own:
        setattr(args, name, None)  # DeepSpeed asserts that only one configuration is given
    try:
        engine, *rest = below(args, model, config=deepspeed_config, **arguments)
    finally:
        for name, source in own.items():
            setattr(args, name, source)
    if structures is not None:
        _keep_seeds(engine, model, structures)
    return engine, *rest


def _check_layers(model: nn.Module, found: AttentionLayers, structures: LayerStructures) -> None:
    """Raises SparseAttentionConfigError for a model that the flag can neither make sparse nor leave as it is."""
    sparse, dense, numbers = found
    if not sparse and not dense:
        raise SparseAttentionConfigError(
            [
                f"--{FLAG} is on and {type(model).__name__} has no self-attention layer that ds_sparse knows; use "
                "ds_sparse.SparseSelfAttention or ds_sparse.BertSparseSelfAttention in it, or omit the flag."
            ]
        )
    if not sparse:
        return
    others = {
        name: layer for name, layer in dense.items() if name not in numbers or structures.of(numbers[name]) is not None
    }
    beside = set[str]().union(*(family.left_dense(model, others) for family in families()))
    names = [name for name in others if name not in beside]
    if names:
        raise SparseAttentionConfigError(
            [
                f"--{FLAG} is on and {len(sparse)} of the model's {len(sparse) + len(dense)} attention layers are "
                f"sparse (dense: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}); build all of them sparse, "
                "with ds_sparse.get_sparse_attention_config(args, num_heads), or none, and the flag makes them so. "
                "Without the flag the model trains as it is."
            ]
        )
    for_heads = functools.cache(structures.for_heads)
    for name, layer in sparse.items():
        number, own = numbers.get(name, 0), structure_of(layer)
        if own is None:
            from . import transformers

            number, own = transformers.number_of(layer), transformers.structure_of(layer)
        if own is not None:  # else a local layer, whose window is the model's
            _check_structure(name, own, for_heads(own.num_heads).of(number))


def _refuse_optimizer_without(structures: LayerStructures, optimizer: Any) -> None:
    """Raises ValueError for an optimizer that was made before parameters which structures will add to the model."""
    adding = {type(structure).__name__ for structure in structures.all() if adds_parameters(structure)}
    if adding and optimizer is not None and not callable(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} was made before {' and '.join(sorted(adding))} adds parameters to the model, "
            "and would not train them. Call ds_sparse.sparsify(model, block) before the optimizer is made, or give "
            "model_parameters and the optimizer in the JSON, or a function that makes it of parameters."
        )


def _with_learned(model: nn.Module, given: Any, is_new: bool) -> Any:
    """The parameters for the optimizer, or groups of them: with those that structures have just added to the model, in
    the first group. Of a model that was sparse before a line says how many are missing."""
    learned = [x for module in model.modules() if isinstance(module, LearnedAttention) for x in module.parameters()]
    if not learned:
        return given
    given = list(given)
    in_groups = bool(given) and isinstance(given[0], Mapping)
    groups = [dict(group) for group in given] if in_groups else [{"params": given}]
    for group in groups:
        group["params"] = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
    known = {id(parameter) for group in groups for parameter in group["params"]}
    missing = [x for x in learned if id(x) not in known and x.requires_grad]
    if is_new:
        groups[0]["params"] += missing
    elif missing:
        say(
            f"not given to the optimizer, and so not trained: {counted(len(missing), 'parameter')} of sparse attention."
        )
    return groups if in_groups else groups[0]["params"]


def _check_structure(name: str, own: SparsityConfig, wanted: Any) -> None:
    """Raises SparseAttentionConfigError unless a layer has the structure of the block; a seed may differ that is not in
    it."""
    fields = [] if wanted is None else [field for field in vars(wanted) if field[0] != "_"]
    differing = sorted(
        field
        for field in fields
        if (field != "seed" or wanted.seed is not None)
        # A field that all structures have counts as its class declares it.
        and (declared_value(own, field) if field in DEFAULTS else getattr(own, field, None)) != getattr(wanted, field)
    )
    if type(own) is not type(wanted) or differing:
        raise SparseAttentionConfigError(
            [
                f"--{FLAG} is on, and layer {name} has {_show(own, differing)} where the JSON says "
                f"{'null, dense attention' if wanted is None else _show(wanted, differing)}; build it with "
                "ds_sparse.get_sparse_attention_config(args, num_heads), or omit the flag."
            ]
        )


def _show(config: SparsityConfig, fields: list[str]) -> str:
    given = ", ".join(f"{field}={getattr(config, field)!r}" for field in fields if hasattr(config, field))
    return f"{type(config).__name__}({given})"


def _keep_seeds(engine: Any, model: nn.Module, structures: LayerStructures) -> None:
    """Has the engine's checkpoints keep the seeds of Transformers models that are not in the JSON's block: their state
    dicts have no layout."""
    configs = [owner.config for owner in innermost_pretrained_models(pretrained_model_around(model))]
    configs = [config for config in configs if _drawn_seed(structures, config) is not None]
    if not configs:
        return
    save, load = engine.save_checkpoint, engine.load_checkpoint

    @functools.wraps(save)
    def save_checkpoint(*positional: Any, **keywords: Any) -> Any:
        call = inspect.signature(save).bind(*positional, **keywords)
        seeds = [_drawn_seed(structures, config) for config in configs]
        call.arguments["client_state"] = {**(call.arguments.get("client_state") or {}), _SEEDS_KEY: seeds}
        return save(*call.args, **call.kwargs)

    @functools.wraps(load)
    def load_checkpoint(*positional: Any, **keywords: Any) -> Any:
        path, client_state = load(*positional, **keywords)
        for config, seed in zip(configs, (client_state or {}).pop(_SEEDS_KEY, []), strict=False):
            drawn, written = _drawn_seed(structures, config), copy.deepcopy(getattr(config, BLOCK_KEY))
            for part in (written, *filter(None, layer_entries(written).values())):
                if part.get("seed") == drawn:
                    part["seed"] = seed
            setattr(config, BLOCK_KEY, written)
        return path, client_state

    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint


def _drawn_seed(structures: LayerStructures, config: Any) -> int | None:
    """The seed that was drawn where the JSON has none, from the block that was written to a config."""
    written = getattr(config, BLOCK_KEY, None) or {}
    entries = layer_entries(written)
    without = [key for key, choice in structures.choices.items() if choice.values.get("seed", 0) is None]
    parts = [written if key is None else entries.get(key) or {} for key in without]
    return next((part["seed"] for part in parts if part.get("seed") is not None), None)
