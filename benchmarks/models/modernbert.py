"""A training step of ModernBERT on packed documents: sparse, dense by its peers, and with no attention at all.

Masked-language modelling with Transformers' own model, forward, backward and AdamW, parameters in the dtype that is
measured. All attentions get the same documents, each in a form of its own: one flat row with the documents' edges, as
`DataCollatorWithFlattening` makes it; rows with masks; or documents one below the other, padded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.models.attentions import FLOOR
from benchmarks.models.bert import LEAST_ERROR_ALLOWED, LOSS_SCALE, PROJECTIONS, built, with_mask
from benchmarks.models.modernbert_results import OURS, OURS_PADDED, Case, Row
from benchmarks.models.step_times import Measured, measure_steps
from ds_sparse.bench.cases import IN_BERT
from ds_sparse.bench.documents import cu_seqlens_of, places_of
from ds_sparse.bench.flex import of_scores
from ds_sparse.bench.reasons import Unsupported
from ds_sparse.layout import to_token_mask
from ds_sparse.models.sparsify import sparsify
from ds_sparse.modules.structured_attention import whole_blocks
from ds_sparse.tools.extras import optional_imports
from ds_sparse.verify.accuracy import require_as_accurate

with optional_imports():
    import transformers
    from transformers import ModernBertConfig, ModernBertForMaskedLM
    from transformers.utils import import_utils

MODEL: dict[str, dict[str, int]] = {
    "cpu": {
        "num_hidden_layers": 4,
        "hidden_size": 128,
        "num_attention_heads": 2,
        "intermediate_size": 192,
        "vocab_size": 1000,
        **{f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "cls", "sep")},
    },
    "cuda": {},
}
"""Differences from ModernBERT-base, the default of `ModernBertConfig`: on a CPU a small model."""

STRUCTURE = "bigbird-64"
"""Structure of global layers, of `IN_BERT`; local ones keep the model's own window."""

LABELLED = 0.3
"""Part of the tokens that have a label, as ModernBERT was trained."""

VERIFIED_TOKENS, VERIFIED_LAYERS = 1024, 4
"""A row's tokens and a model's layers in which attention is verified: the first and last layer are global."""

FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers, as the model's config names them."""

FLAT, ROWS, PADDED = "flat", "rows", "padded"

FORMS = {
    FLOOR: ROWS,
    OURS: FLAT,
    OURS_PADDED: PADDED,
    "sdpa": ROWS,
    "sdpa-padded": PADDED,
    "flex_attention": ROWS,
    "flash_attention_4": FLAT,
    "flash_attention_2": FLAT,
}
"""The form in which each attention gets the documents."""


class Piece(NamedTuple):
    """Inputs of one forward: the model's arguments, labels (B, T), and the flat places of those with a label."""

    inputs: dict[str, Any]
    labels: Tensor
    labelled: Tensor


def run_case(
    case: Case, names: Sequence[str], wrong: Mapping[str, str], device: torch.device, repeats: int, seconds: float
) -> list[Row]:
    """Times the steps in turns, as `measure_steps` does. The floor too, as the others are compared with that. Those
    that are `wrong`, with the reason, are not timed."""
    make = {name: partial(make_step, name, case, device) for name in (FLOOR, *names)}
    measured = measure_steps(make, wrong, device, repeats, seconds, f"{case.seq_len} tokens")
    floor = measured[FLOOR].milliseconds
    return [row_of(name, case, found, floor) for name, found in measured.items()]


def row_of(name: str, case: Case, found: Measured, floor: float | None) -> Row:
    if found.reason:
        return Row(name, reason=found.reason)
    return Row(
        name,
        found.milliseconds,
        None if floor is None else floor / found.milliseconds,
        case.tokens / found.milliseconds * 1e3,
        found.peak_gib,
        rounds=found.rounds,
    )


def make_step(name: str, case: Case, device: torch.device) -> Callable[[], None]:
    model = make_model(case, device)
    switch(model, name)
    pieces = pieces_of(name, case, case.lengths, model.config, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")
    return partial(train_step, model, pieces, optimizer, case.predicts_all)


def make_model(case: Case, device: torch.device, **sizes: int) -> ModernBertForMaskedLM:
    """In training mode, the same numbers at every call."""
    config = ModernBertConfig(**(MODEL[case.device] | sizes), max_position_embeddings=case.seq_len)
    return built(ModernBertForMaskedLM, config, case, device)


def switch(model: ModernBertForMaskedLM, name: str) -> None:
    """Gives a model its attention.

    Raises:
        Unsupported: a package that Transformers does not find.
    """
    if name in (OURS, OURS_PADDED):
        sparsify(model, IN_BERT[STRUCTURE](model.config.num_attention_heads))
        return
    if name.startswith("flash_attention"):
        require_flash_attention(int(name[-1]))
    model.set_attn_implementation(PROJECTIONS if name == FLOOR else name.removesuffix("-padded"))


def require_flash_attention(version: int) -> None:
    """Raises Unsupported where Transformers would look for the kernels elsewhere than in the package."""
    available = getattr(import_utils, f"is_flash_attn_{version}_available", None)
    if available is None:
        raise Unsupported(f"Transformers {transformers.__version__} does not know FlashAttention-{version}")
    if not available():
        package = "flash-attn" if version == 2 else f"flash-attn-{version}"
        raise Unsupported(f"Transformers finds no {package} here, or no GPU for it")


def pieces_of(
    name: str, case: Case, lengths: Sequence[Sequence[int]], config: ModernBertConfig, device: torch.device
) -> list[Piece]:
    """The same random tokens and labels for all, in the form of each."""
    generator = torch.Generator().manual_seed(0)
    shape = len(lengths), case.seq_len
    tokens = torch.randint(1, config.vocab_size, shape, generator=generator)
    labels = tokens.masked_fill(torch.rand(shape, generator=generator) >= LABELLED, -100)
    tokens, labels = tokens.to(device), labels.to(device)
    place = torch.stack([places_of(row, device)[1] for row in lengths]).long()
    form, flat = FORMS[name], list(chain.from_iterable(lengths))
    if form == FLAT:
        edges = cu_seqlens_of(flat, device)
        inputs: dict[str, Any] = {"input_ids": tokens.view(1, -1), "position_ids": place.view(1, -1)}
        inputs |= {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges}
        inputs |= {"max_length_q": max(flat), "max_length_k": max(flat)}
        return [piece(inputs, labels.view(1, -1))]
    if form == PADDED:
        split_tokens, split_labels = tokens.flatten().split(flat), labels.flatten().split(flat)
        pieces, first = [], 0
        for batch in case.padded_batches:
            mine = slice(first, first := first + len(batch))
            pieces.append(padded(split_tokens[mine], split_labels[mine], config.pad_token_id))
        return pieces
    inputs = {"input_ids": tokens, "position_ids": place}
    if name == "sdpa":
        inputs["attention_mask"] = {kind: masks(kind, lengths, config, device) for kind in (FULL, SLIDING)}
    if name == "flex_attention":
        inputs["attention_mask"] = {
            kind: of_scores(sees(kind, lengths, config, device), len(lengths), case.seq_len, device)
            for kind in (FULL, SLIDING)
        }
    return [piece(inputs, labels)]


def piece(inputs: dict[str, Any], labels: Tensor) -> Piece:
    return Piece(inputs, labels, (labels.flatten() >= 0).nonzero()[:, 0])


def padded(tokens: Sequence[Tensor], labels: Sequence[Tensor], pad_token: int) -> Piece:
    """Documents one below the other."""
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    exists = pad([torch.ones_like(x) for x in tokens])
    inputs = {"input_ids": pad(list(tokens), padding_value=pad_token), "attention_mask": exists}
    return piece(inputs, pad(list(labels), padding_value=-100))


def sees(
    kind: str, lengths: Sequence[Sequence[int]], config: ModernBertConfig, device: torch.device
) -> Callable[[Any, Any, Tensor, Tensor], Tensor]:
    """From (row, head, query, key) to whether the query sees the key: in its document; in local layers near it too."""
    document = torch.stack([places_of(row, device)[0] for row in lengths])
    reach = config.sliding_window

    def in_document(b: Any, h: Any, q: Tensor, k: Tensor) -> Tensor:
        return document[b, q] == document[b, k]

    def near(b: Any, h: Any, q: Tensor, k: Tensor) -> Tensor:
        return (document[b, q] == document[b, k]) & ((q - k).abs() <= reach)

    return near if kind == SLIDING else in_document


def masks(kind: str, lengths: Sequence[Sequence[int]], config: ModernBertConfig, device: torch.device) -> Tensor:
    """bool (rows, 1, T, T)."""
    live = sees(kind, lengths, config, device)
    token = torch.arange(sum(lengths[0]), device=device)
    return torch.stack([live(row, None, token[:, None], token) for row in range(len(lengths))])[:, None]


def train_step(
    model: ModernBertForMaskedLM, pieces: Sequence[Piece], optimizer: torch.optim.Optimizer, predicts_all: bool
) -> None:
    """A step on all pieces together, as on a batch that was not seen before: ours makes its indices anew."""
    for part in pieces:
        edges = {name: x.clone() for name, x in part.inputs.items() if name.startswith("cu_seq_lens")}
        share_of_loss(model, part._replace(inputs=part.inputs | edges), pieces, predicts_all).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def share_of_loss(model: ModernBertForMaskedLM, part: Piece, pieces: Sequence[Piece], predicts_all: bool) -> Tensor:
    """A piece's share of the mean loss over all labels."""
    return loss_of(model, part, predicts_all) * (len(part.labelled) / sum(len(x.labelled) for x in pieces))


def loss_of(model: ModernBertForMaskedLM, part: Piece, predicts_all: bool) -> Tensor:
    if predicts_all:
        return model(**part.inputs, labels=part.labels).loss
    hidden = model.model(**part.inputs).last_hidden_state.flatten(0, 1)
    logits = model.decoder(model.head(hidden[part.labelled]))
    return cross_entropy(logits.float(), part.labels.flatten()[part.labelled])


def verify(name: str, dtype: str, device: torch.device) -> None:
    """Holds what reaches the first layer's queries, the gradient of their weight, to a dense model with what each token
    sees as its mask; that gradient goes through attention alone, of global and of local layers. The floor is none.

    Raises:
        ArithmeticError: an error larger than `require_as_accurate` allows.
    """
    if name == FLOOR:
        return
    case = Case(VERIFIED_TOKENS, dtype, device.type)
    plain, exact = references(case, name in (OURS, OURS_PADDED), device)
    model = make_model(case, device, num_hidden_layers=VERIFIED_LAYERS)
    switch(model, name)
    found = query_gradient(model, pieces_of(name, case, case.lengths, model.config, device))
    what = f"{name}: the gradient of the first layer's query weight"
    require_as_accurate(what, found, plain, exact, least=LEAST_ERROR_ALLOWED)


@lru_cache(maxsize=2)
def references(case: Case, sparse: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Query gradients of the dense model at the dtype and in float64."""
    model = make_model(case, device, num_hidden_layers=VERIFIED_LAYERS)
    seen = reference_masks(sparse, case.lengths, model.config, device)
    with_mask(model, lambda module: seen[FULL if module.sliding_window is None else SLIDING])
    pieces = pieces_of(FLOOR, case, case.lengths, model.config, device)
    plain = query_gradient(model, pieces)
    return plain, query_gradient(model.double(), pieces)


def query_gradient(model: ModernBertForMaskedLM, pieces: Sequence[Piece]) -> Tensor:
    """(hidden size, hidden size): the first third of the weight that makes queries, keys and values."""
    weight = model.model.layers[0].attn.Wqkv.weight
    grads = [
        torch.autograd.grad(LOSS_SCALE * share_of_loss(model, part, pieces, predicts_all=True), [weight])[0]
        for part in pieces
    ]
    return torch.stack(grads).double().sum(0).to(weight.dtype)[: weight.shape[1]]


def reference_masks(
    sparse: bool, lengths: Sequence[Sequence[int]], config: ModernBertConfig, device: torch.device
) -> dict[str, Tensor]:
    """Masks by the kind of the layer: bool (rows, 1 or H, T, T)."""
    found = {kind: masks(kind, lengths, config, device) for kind in (FULL, SLIDING)}
    if sparse:
        structure = IN_BERT[STRUCTURE](config.num_attention_heads)
        layout = structure.make_bool_layout(whole_blocks(config.max_position_embeddings, structure.block))
        live = to_token_mask(layout, structure.block).to(device)
        places = [places_of(row, device)[1] for row in lengths]
        found[FULL] = found[FULL] & torch.stack([live[:, place[:, None], place] for place in places])
    return found
