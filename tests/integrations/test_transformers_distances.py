"""T5's relative positions in sparse encoders: a bias by distance, and never a matrix of tokens by tokens."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import transformers
from helpers import seeded
from integrations import families
from torch.utils._python_dispatch import TorchDispatchMode

import ds_sparse

ENCODERS = {name: getattr(transformers, f"{name}EncoderModel") for name in ("T5", "UMT5")}
DENSE, WINDOW = {"mode": "dense", "block": 16}, {"mode": "bslongformer", "block": 64, "global_block_indices": []}
TOKENS = 77


def tables(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [x for name, x in model.named_parameters() if "relative_attention_bias" in name]


def make(cls: type[transformers.PreTrainedModel]) -> transformers.PreTrainedModel:
    model = families.make(families.Family(cls, families.T5), num_layers=3)
    for table in tables(model):
        torch.nn.init.normal_(table)
    return model


def batch() -> dict[str, torch.Tensor]:
    return families.make_inputs(tokens=TOKENS)


def step(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """What is not padding of the output, and the gradient of every parameter."""
    model.zero_grad()
    output = model(**inputs).last_hidden_state * inputs["attention_mask"][..., None]
    (output * torch.randn(output.shape, generator=seeded(1))).sum().backward()
    return output.detach(), [x.grad for x in model.parameters()]


def assert_same_step(found, wanted) -> None:
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(found[1], wanted[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item())


@pytest.mark.parametrize("family", ENCODERS)
def test_undo_and_another_implementation_by_name_give_the_model_its_matrix_back(family: str):
    model, inputs = make(ENCODERS[family]).eval(), batch()
    expected = model(**inputs).last_hidden_state
    report = ds_sparse.sparsify(model, WINDOW)
    report.undo()
    assert not any("compute_bias" in vars(module) for module in model.modules())
    torch.testing.assert_close(model(**inputs).last_hidden_state, expected, rtol=0, atol=0)
    model.config.sparse_attention = model.encoder.config.sparse_attention = WINDOW
    model.set_attn_implementation("ds_sparse")
    sparse = model(**inputs).last_hidden_state
    model.set_attn_implementation("eager")
    torch.testing.assert_close(model(**inputs).last_hidden_state, expected)
    model.set_attn_implementation("ds_sparse")
    torch.testing.assert_close(model(**inputs).last_hidden_state, sparse)


def test_copies_and_pickles_make_distances_of_their_own_tables():
    model, inputs = make(transformers.T5EncoderModel).eval(), batch()
    ds_sparse.sparsify(model, WINDOW)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(**inputs).last_hidden_state, model(**inputs).last_hidden_state)
        step(other, inputs)
        assert all(table.grad.abs().sum() > 0 for table in tables(other))
        assert all(table.grad is None for table in tables(model))


@pytest.mark.slow("compiles for 6 seconds")
@pytest.mark.parametrize("family", ENCODERS)
def test_it_is_one_graph_of_torch_compile(family: str):
    torch._dynamo.reset()
    model, inputs = make(ENCODERS[family]), batch()
    ds_sparse.sparsify(model, WINDOW)
    eager = copy.deepcopy(model)
    assert_same_step(step(torch.compile(model, fullgraph=True, backend="aot_eager"), inputs), step(eager, inputs))


def test_a_layer_that_the_block_leaves_dense_has_the_same_positions():
    model, inputs = make(transformers.T5EncoderModel), batch()
    dense = copy.deepcopy(model)
    ds_sparse.sparsify(model, DENSE | {"layers": {"1": None}})
    assert_same_step(step(model, inputs), step(dense, inputs))


def test_a_mask_with_a_gradient_beside_positions_is_refused():
    model, inputs = make(transformers.T5EncoderModel), batch()
    ds_sparse.sparsify(model, WINDOW)
    mask = torch.zeros(2, 1, TOKENS, TOKENS, requires_grad=True)
    with pytest.raises(ValueError, match="mask that requires a gradient, beside relative positions by distance"):
        model(input_ids=inputs["input_ids"], attention_mask=mask)


class Largest(TorchDispatchMode):
    """Notes the numbers of the largest memory that an operator returns."""

    numbers = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        results = operator(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(results):
            if isinstance(x, torch.Tensor):
                self.numbers = max(self.numbers, x.untyped_storage().nbytes() // x.element_size())
        return results


@pytest.mark.parametrize("family", ENCODERS)
def test_at_16k_tokens_nothing_of_tokens_by_tokens_is_made(family: str):
    """Neither positions nor a mask; what the gradient of a table holds is in tests/ops/test_distance_attention.py."""
    tokens, model = 16384, make(ENCODERS[family])
    ds_sparse.sparsify(model, WINDOW)
    ids = torch.randint(3, 99, (1, tokens), generator=seeded())
    with Largest() as seen:
        model(ids, attention_mask=torch.ones_like(ids)).last_hidden_state.square().sum().backward()
    assert seen.numbers <= tokens * families.T5["d_ff"] < tokens**2 / 100
    assert all(table.grad.abs().sum() > 0 for table in tables(model))
