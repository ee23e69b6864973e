"""Models of Transformers over ranks that hold parts of a sequence: each takes the whole batch and computes its part."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import distributed, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from ...modules.structured_attention import StructuredAttention
from ...sequence import SequenceParallelAttention
from ...sequence.attention import computes_own_tokens
from ...sequence.deal import check_ranks
from ...sequence.exchange import RanksOfSequence
from ...sequence.halo_plan import part_lengths
from ...sparsity import adds_parameters
from ..transformers_family import NAME, is_switched, layers_by_model, pretrained_model_around
from .binding import Call, Refused, attached_to, structure_of, which
from .masks import hides_nothing
from .packing import CUMULATIVE, FOR_FLASH_ATTENTION, PART_KEYWORD, DocumentsRead, by_name, documents_of, positions_of

MODEL_TYPES = (
    "albert", "bert", "camembert", "distilbert", "electra", "eurobert", "gpt_neox", "llama", "mistral", "modernbert",
    "qwen3", "roberta", "xlm-roberta",
)  # fmt: skip
"""Outside of their attention layers these compute each token alone, and take its place in the sequence as
`position_ids`: as is tested."""

_HEADS = ("ForMaskedLM", "ForCausalLM", "ForTokenClassification")
"""Ends of the names of models whose loss is the mean cross entropy of labelled tokens."""

_IGNORED = -100
"""The label of a token that is not in the loss."""

_SPLIT = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "labels")
"""Inputs with a number for each token, (B, T) or (1, T)."""

_PASSED_ON = ("return_dict", "output_hidden_states", "use_cache")
"""Inputs that a forward may be given besides. There is no cache all the same."""

_ITEMS = "num_items_in_batch"
"""Transformers' Trainer: the labelled tokens that the loss is to be divided by."""

_POSITIONS_OF_IDS = "create_position_ids_from_input_ids"
"""The method of a module that makes positions of tokens."""

EVALUATES_ALONE = "_ds_sparse_evaluates_alone"
"""On a model whose ranks evaluate batches of their own, whether or not these happen to be the same."""

_ATTENTION_DROPOUT = ("attention_probs_dropout_prob", "attention_dropout")
"""Names in configs of the dropout of attention probabilities."""

_IN_PARTS = "_ds_sparse_in_parts"
"""On the attention layers of a sequence-parallel model."""


class Alone(NamedTuple):
    """Stands for a `Part` where each rank computes a batch of its own, whole."""

    items: torch.Tensor | float | None

    def loss(self, mean: torch.Tensor, labelled: torch.Tensor) -> torch.Tensor:
        """The mean over the labelled tokens, or their sum by `items`."""
        return mean if self.items is None else (_sum_of_losses(mean, labelled) / self.items).to(mean.dtype)


class Part(DocumentsRead):
    """The tokens of one forward that this rank has.

    Attributes:
        lengths: tokens of each rank.
        mask: the key padding mask of the whole sequence, bool (B, T), or None.
        cu_seqlens: where the packed documents of all rows begin, on the CPU, or None.
        items: what the loss is divided by, the labelled tokens of the batch if it is None.
        attentions: what computes in layers, by what does on one rank.
        told: the attention layers that have computed with it.
    """

    def __init__(
        self,
        ranks: RanksOfSequence,
        lengths: tuple[int, ...],
        mask: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        items: torch.Tensor | float | None,
        attentions: dict[Any, Any],
    ):
        self.ranks, self.lengths, self.mask, self.cu_seqlens = ranks, lengths, mask, cu_seqlens
        self.items, self._attentions = items, attentions
        self.told: set[nn.Module] = set()

    def of(self, given: torch.Tensor) -> torch.Tensor:
        """The rank's part of (B, T), contiguous, as losses of Transformers want labels."""
        return given.split(self.lengths, 1)[self.ranks.rank].contiguous()

    @torch.compiler.disable(
        reason=f"{NAME} computes sequences over several ranks outside of graphs: compile without fullgraph=True."
    )
    def attend(self, call: Call) -> torch.Tensor:
        """Attention of a layer over the whole sequence, (B, T_r, H, D), contiguous."""
        attention: Any = attached_to(call.layer).attention
        if attention not in self._attentions:
            self._attentions[attention] = SequenceParallelAttention.around(attention, self.ranks)
        output = self._attentions[attention](
            call.query, call.key, call.value, lengths=self.lengths, cu_seqlens=self.cu_seqlens, scale=call.scale,
            causal=call.causal, key_padding_mask=self.mask, sinks=call.sinks, dropout_p=call.dropout_p,
        )  # fmt: skip
        self.told.add(call.layer)
        return output.transpose(1, 2).contiguous()

    def loss(self, mean: torch.Tensor, labelled: torch.Tensor) -> torch.Tensor:
        """The mean over the labelled tokens of all ranks, or their sum by `items`, with the gradient of the share that
        this rank has: their sum is that of the whole."""
        own = _sum_of_losses(mean, labelled)
        labelled_by_all, of_all = self.ranks.sum_of(torch.stack([labelled.double(), own]))
        total = labelled_by_all if self.items is None else self.items
        return ((own + (of_all - own.detach())) / total).to(mean.dtype)


def is_in_parts(layer: nn.Module, part: Part | Alone | None) -> bool:
    """Tells whether a layer is of a sequence-parallel model, and computes over ranks with what it was handed."""
    return isinstance(part, Part) or (part is None and _IN_PARTS in vars(layer))


def attend_part(call: Call, part: Part | Alone | None) -> torch.Tensor:
    """Computes what `attention` returns where the model is over several ranks.

    Raises:
        Refused: a mask of pairs of tokens, cached keys, or a bias, which go by places in the sequence; no part, as
            where a model inside the one that cuts its batch is called.
    """
    if not isinstance(part, Part):
        raise Refused(
            f"{which(call.layer)} of a sequence-parallel model ran without the part of the sequence that is this "
            "rank's; call the whole model, which ds_sparse.sequence_parallel was given, or undo() what it returned."
        )
    asked = ["position_bias"] if call.position_bias is not None else []
    asked += ["a mask of pairs of tokens"] if call.mask is not None and call.mask.dim() != 2 else []
    asked += ["cached keys"] if call.query.shape[2] != call.key.shape[2] else []
    if asked:
        raise Refused(
            f"{which(call.layer)} of a sequence-parallel model asks the attention for {', '.join(asked)}, which goes "
            "by places in the whole sequence; leave it out, or train without sequence_parallel_size."
        )
    return part.attend(call)


def sequence_parallel(model: nn.Module, group: distributed.ProcessGroup | None = None) -> SequenceParallel:
    """Has a sparse model of Transformers compute each sequence on all ranks of a group.

    Each rank is given the same whole batch, and computes its part of the tokens: `forward` cuts `input_ids`,
    `attention_mask`, `token_type_ids`, `position_ids` and `labels`, and makes positions. Rows of packed documents are
    told as on one rank, and borders of ranks may lie anywhere in them. The loss is that of the whole batch on every
    rank; its gradient on a rank is that of the rank's tokens, so that the sum over the group is the gradient of the
    whole, which DeepSpeed takes (`ds_sparse.initialize` with `"sequence_parallel_size"` calls this) and which in a loop
    of your own is an all-reduce without a mean. Logits and hidden states are those of the rank's tokens.

    Args:
        model: a Transformers model that `ds_sparse.sparsify` has made sparse, or a module around one: a
            `...ForMaskedLM`, `...ForCausalLM` or `...ForTokenClassification`, or a base model without a pooler.
        group: the ranks, of torch.distributed, in the order of their parts; all if it is not given.

    Returns:
        What was done; its `undo()` ends it.

    Raises:
        RuntimeError: torch.distributed does not run.
        ValueError: a model that is not sparse or cannot be computed in parts; fewer heads than ranks, with dense layers
            or attention dropout. Nothing has been changed then. Later, in a forward: ranks that are given other
            batches, fewer tokens than ranks, with fewer heads than ranks fewer blocks, a cache, training without
            `labels`.

    Examples:
        >>> import torch
        >>> import transformers
        >>> import ds_sparse
        >>> ds_sparse.init_distributed()  # here of one rank
        >>> sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        >>> model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=50, **sizes))
        >>> report = ds_sparse.sparsify(model, {"mode": "bslongformer", "block": 16})
        >>> parallel = ds_sparse.sequence_parallel(model)
        >>> tokens = torch.full((2, 64), 7)
        >>> model(input_ids=tokens, labels=tokens).loss.backward()
        >>> parallel.undo()
    """
    ranks = RanksOfSequence(group)
    outer = _check(model, ranks)
    return SequenceParallel(outer, ranks)


class SequenceParallel:
    """A model whose forward computes the rank's part of the batch.

    Attributes:
        ranks: those that hold parts of a sequence.
    """

    def __init__(self, model: PreTrainedModel, ranks: RanksOfSequence):
        self.ranks, self._model, self._heads = ranks, model, model.config.num_attention_heads
        self._attentions: dict[Any, SequenceParallelAttention] = {}
        self._makes_positions = next((x for x in model.modules() if hasattr(x, _POSITIONS_OF_IDS)), None)
        self._layers = [layer for layers in layers_by_model(model).values() for layer in layers.values()]
        for layer in self._layers:
            vars(layer)[_IN_PARTS] = True
        self._hooks = [
            # Before the hook that reads where documents begin: a part does not say it.
            model.register_forward_pre_hook(self._cut, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._whole, with_kwargs=True),
        ]

    def undo(self) -> None:
        """The model computes whole batches on each rank again."""
        for hook in self._hooks:
            hook.remove()
        for layer in self._layers:
            vars(layer).pop(_IN_PARTS, None)
        for module in self._model.modules():
            vars(module).pop(EVALUATES_ALONE, None)

    @torch.compiler.disable(reason="a sequence is cut for several ranks outside of graphs")
    def _cut(self, model: nn.Module, arguments: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Forward pre-hook: the rank's part of the batch."""
        given = {name: x for name, x in by_name(model, arguments, named).items() if x is not None}
        items = given.pop(_ITEMS, None)
        _refuse_what_has_no_parts(model, given)
        evaluates_alone = EVALUATES_ALONE in vars(model) and not model.training
        if evaluates_alone or not self._is_same_on_all(given, model.training):
            return (), {**given, PART_KEYWORD: Alone(items)}
        ids = given["input_ids"]
        tokens = ids.shape[1]
        if tokens < self.ranks.size:
            raise ValueError(
                f"{type(model).__name__} is given sequences of {tokens} tokens for {self.ranks.size} ranks; each wants "
                "one or more: give longer sequences, or set sequence_parallel_size to less."
            )
        if model.training and torch.is_grad_enabled() and "labels" not in given:
            raise ValueError(
                f"{type(model).__name__} is trained without labels over {self.ranks.size} ranks that hold parts of a "
                "sequence, where a loss of your own would be that of this rank's tokens; pass labels and take the loss "
                "of the output."
            )
        mask, cu_seqlens = given.get("attention_mask"), documents_of(model, given)
        few_heads = self._heads < self.ranks.size
        block = self._block() if cu_seqlens is None else 1  # ranks exchange heads of packed documents
        lengths = part_lengths(tokens, self.ranks.size, block, whole_blocks=few_heads)
        mask_of_all = None if mask is None else mask != 0
        part = Part(self.ranks, lengths, mask_of_all, cu_seqlens, items, self._attentions)
        positions = self._positions(ids) if cu_seqlens is None else positions_of(model, given, cu_seqlens)
        whole = {"position_ids": positions} | {name: x for name, x in given.items() if name not in FOR_FLASH_ATTENTION}
        if "labels" in given and _is_shifted(model):
            whole["shift_labels"] = pad(given["labels"], (0, 1), value=_IGNORED)[:, 1:]  # to say after each token
        cut = {name: part.of(x) if name in (*_SPLIT, "shift_labels") else x for name, x in whole.items()}
        if mask is None:
            cut["attention_mask"] = hides_nothing(len(ids), lengths[self.ranks.rank], torch.bool, ids.device)
        if "use_cache" in inspect.signature(model.forward).parameters:
            cut["use_cache"] = False
        return (), {**cut, PART_KEYWORD: part}

    def _block(self) -> int:
        """Tokens of which parts are to be multiples, so that ranks have whole blocks of every layer's structure."""
        attentions = (attached_to(layer).attention for layer in self._layers)
        return math.lcm(*(x.sparsity_config.block for x in attentions if isinstance(x, StructuredAttention)))

    def _positions(self, ids: torch.Tensor) -> torch.Tensor:
        """The positions that the model would make of the whole sequence, (B or 1, T)."""
        maker: Any = self._makes_positions
        if maker is not None:  # RoBERTa's count from behind the number of padding, and padding does not count
            return getattr(maker, _POSITIONS_OF_IDS)(ids, maker.padding_idx)
        return torch.arange(ids.shape[1], device=ids.device)[None]

    def _is_same_on_all(self, given: Mapping[str, Any], training: bool) -> bool:
        """Tells whether the ranks of a group are given one batch. Waits for the device.

        Raises:
            ValueError: they are given different ones in training; in evaluation each may compute its own.
        """
        ids, names = given["input_ids"], (*_SPLIT, *CUMULATIVE)
        told = [torch.tensor([*ids.shape, *(name in given for name in names)], device=ids.device)]
        told += [_weighted_sum(torch.as_tensor(given.get(name, 0)), ids.device) for name in names]
        rows = self.ranks.rows_of_all(torch.cat(told))
        same = not bool((rows != rows[0]).any())
        if training and not same:
            raise ValueError(
                f"The {self.ranks.size} ranks that hold parts of a sequence are given different batches (of "
                f"{', '.join(f'{row[0]} x {row[1]}' for row in rows.tolist())} tokens); give them the same one: pass "
                "training_data to ds_sparse.initialize, give ds_sparse.sequence_batches(loader) in the place of a "
                "loader that deals batches to all ranks (of Transformers' Trainer override get_train_dataloader so), "
                f"or a DistributedSampler with num_replicas=world_size // {self.ranks.size} and rank=rank // "
                f"{self.ranks.size}."
            )
        return same

    @torch.compiler.disable(reason="losses of several ranks are put together outside of graphs")
    def _whole(self, model: nn.Module, arguments: tuple, named: dict[str, Any], output: Any) -> Any:
        """Forward hook: the loss of the whole batch, and a look at whether all layers have computed a part."""
        part: Part | Alone = named[PART_KEYWORD]
        untold = [layer for layer in self._layers if isinstance(part, Part) and layer not in part.told]
        if untold:
            raise ValueError(
                f"{which(untold[0])} and {len(untold) - 1} more attention layers did not hear of the parts that ranks "
                "hold, as their model does not hand on what it is given, and saw their own tokens alone; train without "
                "sequence_parallel_size."
            )
        labels = named.get("labels")
        if labels is None:
            return output
        if _is_shifted(model):
            labels = named.get("shift_labels", labels[:, 1:])
        labelled = (labels != _IGNORED).sum()
        loss = part.loss(output[0], labelled)
        if isinstance(output, tuple):
            return (loss, *output[1:])
        output.loss = loss
        return output


def _check(model: nn.Module, ranks: RanksOfSequence) -> PreTrainedModel:
    """The outermost model of Transformers, after a look at whether it can be computed in parts."""
    owners = pretrained_model_around(model)
    models = dict.fromkeys(owners.values())
    outermost = [x for x in models if not any(x is not y and x in set(y.modules()) for y in models)]
    name = type(model).__name__
    if len(outermost) != 1:
        raise ValueError(
            f"{name} holds {len(outermost)} models of Transformers, and ranks share sequences in exactly one; write "
            "attention with ds_sparse.SequenceParallelAttention in a model of your own."
        )
    outer = outermost[0]
    reason = _why_not(outer, ranks)
    if reason is not None:
        raise ValueError(f"{type(outer).__name__} cannot be sequence parallel: {reason}")
    return outer


def _why_not(model: PreTrainedModel, ranks: RanksOfSequence) -> str | None:
    config, by_model = model.config, layers_by_model(model)
    layers = [layer for those in by_model.values() for layer in those.values()]
    if any(_IN_PARTS in vars(layer) for layer in layers):
        return "it is already; call undo() of what ds_sparse.sequence_parallel returned first."
    if not by_model or not all(map(is_switched, by_model)):
        return "it is not sparse; call ds_sparse.sparsify(model, ...) first."
    if any(adds_parameters(structure_of(layer)) for layer in layers):
        return "its structure adds parameters to layers, which are for all tokens and heads; train it without."
    if config.model_type not in MODEL_TYPES:
        return (
            f"whether a {config.model_type} model computes each token alone outside of attention has not been tested; "
            f"tested are {', '.join(MODEL_TYPES)}."
        )
    is_base = model.base_model is model and getattr(model, "pooler", None) is None
    if not is_base and not type(model).__name__.endswith(_HEADS):
        return (
            "its output is not one of each token, of which ranks hold parts; use a base model with "
            f"add_pooling_layer=False, or one of {', '.join('...' + end for end in _HEADS)}."
        )
    has_dropout = any(getattr(config, name, 0) for name in _ATTENTION_DROPOUT)
    if has_dropout or not all(computes_own_tokens(attached_to(layer).attention) for layer in layers):
        check_ranks(config.num_attention_heads, ranks.size)
    return None


def _refuse_what_has_no_parts(model: nn.Module, given: Mapping[str, Any]) -> None:
    name = type(model).__name__
    if "input_ids" not in given:
        raise ValueError(f"{name} is sequence parallel and given no input_ids, of which ranks take parts; give them.")
    known = (*_SPLIT, *FOR_FLASH_ATTENTION, *_PASSED_ON)
    other = [key for key, value in given.items() if key not in known and value is not False]
    if other:
        raise ValueError(
            f"{name} is sequence parallel and given {', '.join(other)}, of which it is not known how ranks share it; "
            f"give {', '.join(_SPLIT)} alone."
        )
    shape = given["input_ids"].shape
    for key in _SPLIT:
        if key in given and (given[key].dim() != 2 or given[key].shape[1] != shape[1]):
            raise ValueError(
                f"{key} has shape {tuple(given[key].shape)}; where ranks hold parts of a sequence it has to be "
                f"{tuple(shape)}, a number for each token."
            )


def _weighted_sum(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A number that others, or the same at other places, hardly have: int64 (1,)."""
    flat = numbers.to(device).long().flatten()
    return (flat * torch.arange(1, len(flat) + 1, device=device)).sum(0, keepdim=True)


def _sum_of_losses(mean: torch.Tensor, labelled: torch.Tensor) -> torch.Tensor:
    """The sum of losses of so many tokens, whose mean is given, fp64; of none the mean is NaN and the sum 0."""
    return torch.where(labelled > 0, mean, torch.zeros_like(mean)).double() * labelled


def _is_shifted(model: nn.Module) -> bool:
    """Tells whether a model's labels are those of the tokens before them."""
    return type(model).__name__.endswith("ForCausalLM")
