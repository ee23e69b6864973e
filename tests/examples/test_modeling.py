"""The example's BERT: sparse and dense, padded inside, checkpointed."""

import argparse
import json

import pytest
import torch
from torch.nn import functional as F

import ds_sparse
from ds_sparse.ops import BLOCK_OPERATORS, missing_kernels

from data import NOT_PREDICTED, Batch
from modeling import BertConfig, BertForPreTrainingPreLN, BertSelfAttention, parameter_groups

CONFIG = BertConfig(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=96,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=64, position_convolution=5,
)  # fmt: skip


def arguments(tokens, block=None, **more):
    config = {"train_batch_size": 2} | ({} if block is None else {"sparse_attention": block})
    return argparse.Namespace(
        max_seq_length=tokens, deepspeed_sparse_attention=block is not None, deepspeed_config=config,
        **({"checkpoint_activations": False} | more),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    """As the pretraining script."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def make_batch(tokens, padding=0):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 96, (2, tokens), generator=generator)
    mask = torch.ones(2, tokens, dtype=torch.long)
    mask[1, tokens - padding :] = 0
    labels = torch.full((2, tokens), NOT_PREDICTED)
    labels[:, 3:9] = ids[:, 3:9]
    segments = (torch.arange(tokens) > tokens // 2).long().repeat(2, 1)
    return Batch.of(ids, mask, segments, torch.tensor([0, 1]), labels)


def make_model(args, **changes):
    torch.manual_seed(1)
    return BertForPreTrainingPreLN(CONFIG.model_copy(update=changes), args)


def need_kernels(device):
    missing = missing_kernels(device, BLOCK_OPERATORS)
    if missing:
        pytest.skip(f"no {device} kernel for {', '.join(missing)}")


@pytest.mark.parametrize("convolution", [0, 5])
@pytest.mark.parametrize("tokens, padding", [(64, 0), (64, 10), (50, 0), (50, 7)])
def test_a_dense_layout_equals_dense_attention_padded_or_not(device, tokens, padding, convolution):
    need_kernels(device)
    batch, changes = make_batch(tokens, padding).to(torch.device(device)), {"position_convolution": convolution}
    dense = make_model(arguments(tokens), **changes).to(device)
    sparse = make_model(arguments(tokens, {"mode": "dense"}), **changes).to(device)
    sparse.load_state_dict(dense.state_dict())
    for name, loss in dense(batch).items():
        torch.testing.assert_close(sparse(batch)[name], loss)
    dense(batch)["loss"].backward()
    sparse(batch)["loss"].backward()
    for (name, mine), theirs in zip(dense.named_parameters(), sparse.parameters()):
        torch.testing.assert_close(mine.grad, theirs.grad, msg=name)


@pytest.mark.parametrize("block", [None, {"mode": "fixed"}], ids=["dense", "fixed"])
def test_what_stands_in_padding_changes_no_token(block):
    model, batch = make_model(arguments(64, block)), make_batch(64, 10)
    other = batch._replace(input_ids=torch.where(batch.input_mask == 1, batch.input_ids, 7))
    states, _ = model.bert(batch.input_ids, batch.segment_ids, batch.input_mask, batch.lengths)
    others, _ = model.bert(other.input_ids, batch.segment_ids, batch.input_mask, batch.lengths)
    assert torch.equal(others[1, :54], states[1, :54])


def test_the_convolution_shows_each_token_its_neighbours_before_the_first_layer():
    embeddings, batch = make_model(arguments(64)).bert.embeddings, make_batch(64)
    before = embeddings(batch.input_ids, batch.segment_ids, batch.input_mask)
    batch.input_ids[0, 20] = 4
    changed = (embeddings(batch.input_ids, batch.segment_ids, batch.input_mask) != before).any(-1)
    assert changed[0].nonzero().flatten().tolist() == [18, 19, 20, 21, 22] and not changed[1].any()


@pytest.mark.parametrize(
    "changes, said", [({"position_convolution": 4}, "has to be odd"), ({"hiden_size": 3}, "hiden_size")]
)
def test_a_wrong_model_json_is_refused(tmp_path, changes, said):
    (tmp_path / "model.json").write_text(json.dumps({"bert_model_config": CONFIG.model_dump() | changes}))
    with pytest.raises(ValueError, match=rf"(?s)model\.json: .*{next(iter(changes))}\n.*({said}|not permitted)"):
        BertConfig.read(str(tmp_path / "model.json"))
    for text, said in (
        ("{", "Expecting property name"),
        ("[]", "'bert_model_config' is missing"),
        ("{}", "is missing"),
    ):
        (tmp_path / "model.json").write_text(text)
        with pytest.raises(ValueError, match=f"model.json: .*{said}"):
            BertConfig.read(str(tmp_path / "model.json"))


def test_in_evaluation_the_likeliest_token_of_each_predicted_position_is_there():
    model, batch = make_model(arguments(64)).eval(), make_batch(64)
    model.decoder_bias.data[17] = 100.0
    assert model(batch)["guesses"].tolist() == [17] * len(batch.mlm_positions)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [None, {"mode": "fixed"}], ids=["dense", "fixed"])
def test_the_same_seed_repeats_losses_and_gradients_bit_for_bit(device, block, dtype):
    """With dropout, padding and predictions; where an operation could not, PyTorch would refuse it here."""
    need_kernels(device)
    batch, found = make_batch(64, 10).to(torch.device(device)), []
    for _ in range(2):
        dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
        model = make_model(arguments(64, block), **dropout).to(device, dtype)
        torch.manual_seed(2)
        loss = model(batch)["loss"]
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(first, second) for first, second in zip(*found))


def test_dense_attention_takes_no_mask(monkeypatch):
    """FlashAttention, which makes it fast on GPUs, has none."""
    calls, original = [], F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: calls.append((a, k)) or original(*a, **k))
    make_model(arguments(64))(make_batch(64, 10))
    assert {call[0][1].shape[2] for call in calls} == {64, 54}
    assert all(len(given) == 3 and "attn_mask" not in named for given, named in calls)


@pytest.mark.parametrize("tokens, padding, is_masked", [(64, 0, False), (64, 1, True), (50, 0, True), (50, 7, True)])
def test_sparse_attention_takes_a_mask_where_something_is_padded_only(tokens, padding, is_masked, monkeypatch):
    masks, original = [], ds_sparse.BertSparseSelfAttention.forward
    monkeypatch.setattr(
        ds_sparse.BertSparseSelfAttention,
        "forward",
        lambda layer, states, mask: masks.append(mask) or original(layer, states, mask),
    )
    batch = make_batch(tokens, padding)
    make_model(arguments(tokens, {"mode": "fixed"}))(batch)
    assert len(masks) == CONFIG.num_hidden_layers
    if not is_masked:
        assert masks == [None] * len(masks)
        return
    keeps = F.pad(batch.input_mask, (0, -tokens % 16))
    assert all(torch.equal(mask[:, 0, 0] == 0, keeps == 1) for mask in masks)


@pytest.mark.parametrize("padding", [0, 10])
def test_a_sparse_encoder_reads_nothing_back_from_the_device(padding):
    model, batch = make_model(arguments(64, {"mode": "fixed"})), make_batch(64, padding).to(torch.device("meta"))
    # Where there are no numbers, none can be waited for.
    states, _ = model.bert.to("meta")(batch.input_ids, batch.segment_ids, batch.input_mask, batch.lengths)
    assert states.shape == (2, 64, CONFIG.hidden_size)


def test_every_layer_is_sparse_with_one_layout_and_the_weights_of_a_dense_model_from_the_same_seed():
    dense, sparse = (make_model(arguments(64, block)) for block in (None, {"mode": "bigbird", "num_random_blocks": 1}))
    layers = [module for module in sparse.modules() if isinstance(module, ds_sparse.BertSparseSelfAttention)]
    assert len(layers) == CONFIG.num_hidden_layers
    assert not any(isinstance(module, BertSelfAttention) for module in sparse.modules())
    assert torch.equal(*(layer.sparse_self_attention.master_layout for layer in layers))
    mine, theirs = dict(dense.named_parameters()), dict(sparse.named_parameters())
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_activation_checkpointing_changes_no_gradient():
    batch, block = make_batch(64), {"mode": "fixed"}
    plain, saving = make_model(arguments(64, block)), make_model(arguments(64, block, checkpoint_activations=True))
    for model in (plain, saving):
        model(batch)["loss"].backward()
    for mine, theirs in zip(plain.parameters(), saving.parameters()):
        assert torch.equal(mine.grad, theirs.grad)


def test_biases_and_norms_have_no_weight_decay():
    model = make_model(arguments(64))
    decayed, plain = parameter_groups(model, 0.01)
    assert decayed["weight_decay"] == 0.01 and plain["weight_decay"] == 0.0
    assert all(p.dim() > 1 for p in decayed["params"]) and all(p.dim() == 1 for p in plain["params"])
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))


def test_layers_may_have_structures_of_their_own_or_stay_dense():
    batch = make_batch(50, padding=17)
    dense = make_model(arguments(50), num_hidden_layers=4)
    layers = {"1": None, "2-3": {"block": 32}}
    model = make_model(arguments(50, {"mode": "dense", "layers": layers}), num_hidden_layers=4)
    kinds = [type(layer.attention.self).__name__ for layer in model.bert.encoder.layer]
    assert kinds == ["BertSparseSelfAttention", "BertSelfAttention", *["BertSparseSelfAttention"] * 2]
    first, _, third, last = (getattr(x.attention.self, "sparse_self_attention", None) for x in model.bert.encoder.layer)
    assert (first.sparsity_config.block, third.sparsity_config.block) == (16, 32)
    assert third.attention._master is last.attention._master
    model.load_state_dict(dense.state_dict(), strict=False)
    torch.testing.assert_close(model(batch)["loss"], dense(batch)["loss"])
