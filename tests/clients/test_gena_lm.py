"""A DNA encoder in the manner of GENA-LM: the structure's class by import path in the Transformers config, BigBird with
other random blocks for each head."""

from __future__ import annotations

import importlib
import random
from unittest import mock

import pytest
import torch
from clients.dense import DenseSelfAttention, assert_equal_to_dense
from torch import nn

HEADS, BATCH, TOKENS = 3, 2, 128


def get_cls_by_name(name):
    module, cls = name.split(":")
    return getattr(importlib.import_module(module), cls)


class SparseSelf(nn.Module):
    """Called as Transformers calls it: ((B, T, hidden),)."""

    def __init__(self, config, sparsity_config):
        super().__init__()
        from deepspeed.ops.sparse_attention import SparseSelfAttention

        self.heads = config.num_attention_heads
        self.query, self.key, self.value = (nn.Linear(config.hidden_size, config.hidden_size) for _ in range(3))
        self.sparse_self_attention = SparseSelfAttention(sparsity_config, max_seq_length=config.max_position_embeddings)

    def forward(self, hidden_states, attention_mask=None, head_mask=None, output_attentions=False):
        query, key, value = (
            projection(hidden_states).unflatten(-1, (self.heads, -1)).permute(0, 2, 1, 3)
            for projection in (self.query, self.key, self.value)
        )
        context = self.sparse_self_attention(query, key, value, key_padding_mask=attention_mask)
        return (context.permute(0, 2, 1, 3).contiguous().flatten(2),)


class Encoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        sparsity_config = get_cls_by_name(config.sparse_config_cls)(**config.sparse_attention)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.layer = nn.ModuleList(SparseSelf(config, sparsity_config) for _ in range(config.num_hidden_layers))
        self.pad_token_id = config.pad_token_id

    def forward(self, input_ids):
        hidden_states = self.embeddings(input_ids)
        mask = (input_ids == self.pad_token_id)[:, None, None, :].to(hidden_states.dtype)
        for layer in self.layer:
            hidden_states = hidden_states + layer(hidden_states, mask * torch.finfo(mask.dtype).min)[0]
        return hidden_states


def make_dense(program):
    for layer in program.layer:
        layer.sparse_self_attention = DenseSelfAttention(layer.sparse_self_attention.master_layout, 16)


@pytest.fixture
def config(tmp_path):
    transformers = pytest.importorskip("transformers")
    structure = {
        "num_heads": HEADS, "block": 16, "different_layout_per_head": True, "num_sliding_window_blocks": 1,
        "num_global_blocks": 1, "num_random_blocks": 1,
    }  # fmt: skip
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=HEADS * 8,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        intermediate_size=32,
        max_position_embeddings=TOKENS,
        sparse_config_cls="deepspeed.ops.sparse_attention:BigBirdSparsityConfig",
        sparse_attention=structure,
    )
    config.save_pretrained(tmp_path)
    return transformers.BertConfig.from_pretrained(tmp_path)


@pytest.fixture
def input_ids(device):
    input_ids = torch.randint(1, 40, (BATCH, TOKENS), device=device)
    input_ids[1, 50:] = 0
    return input_ids


def test_random_blocks_for_each_head_and_padding(config, input_ids, device):
    random.seed(0)
    torch.manual_seed(0)
    program = Encoder(config).to(device)
    layouts = program.layer[0].sparse_self_attention.master_layout
    assert len({str(layout) for layout in layouts.tolist()}) == HEADS
    assert_equal_to_dense(program, make_dense, input_ids)
    changed = torch.where(input_ids == 0, 7, input_ids)
    changed[0] = input_ids[0]
    padded = program.layer[0](program.embeddings(changed), (input_ids == 0)[:, None, None].float() * -1e9)[0]
    untouched = program.layer[0](program.embeddings(input_ids), (input_ids == 0)[:, None, None].float() * -1e9)[0]
    assert torch.equal(padded[1, :50], untouched[1, :50])


def test_a_published_checkpoint_brings_its_layouts(config, input_ids, device, tmp_path):
    """As DeepSpeed saved it: `master_layout` of each layer, int64, (H, R, C)."""
    random.seed(0)
    torch.manual_seed(0)
    published = Encoder(config)
    path = tmp_path / "pytorch_model.bin"
    checkpoint = dict(published.state_dict())
    for number in range(2):
        layout = torch.stack([torch.eye(8, dtype=torch.int64).roll(head, 0) for head in range(HEADS)])
        layout[:, 0] = layout[:, :, number] = 1
        checkpoint[f"layer.{number}.sparse_self_attention.master_layout"] = layout
    torch.save(checkpoint, path)

    program = Encoder(config)
    program.load_state_dict(torch.load(path), strict=True)
    for number, layer in enumerate(program.layer):
        loaded = checkpoint[f"layer.{number}.sparse_self_attention.master_layout"]
        assert torch.equal(layer.sparse_self_attention.master_layout, loaded)
    assert_equal_to_dense(program.to(device), make_dense, input_ids)


@pytest.fixture
def model_class():
    transformers = pytest.importorskip("transformers")

    class Model(transformers.PreTrainedModel):
        config_class = transformers.BertConfig

        def __init__(self, config):
            super().__init__(config)
            self.encoder = Encoder(config)
            self.post_init()

        def forward(self, input_ids):
            return self.encoder(input_ids)

    return Model


@pytest.mark.parametrize(
    "how", [{}, {"device_map": "cpu"}, {"device_map": "auto"}, {"low_cpu_mem_usage": True}], ids=str
)
def test_from_pretrained_takes_the_layouts_of_the_checkpoint(config, model_class, input_ids, tmp_path, how):
    published = model_class(config)
    published.save_pretrained(tmp_path)
    loaded, info = model_class.from_pretrained(tmp_path, output_loading_info=True, **how)
    assert not any(info.values())
    # An automatic device map chooses the GPUs that are there.
    device = loaded.device
    found, wanted = (model(input_ids.to(device)) for model in (loaded, published.to(device)))
    assert torch.equal(found.cpu(), wanted.cpu())


def empty_like_full_of_ones(like, *, empty_like=torch.empty_like, **options):
    memory = empty_like(like, **options)
    return memory.fill_(1) if type(memory) is torch.Tensor else memory


@pytest.mark.parametrize("how", [{}, {"device_map": "cpu"}, {"dtype": torch.bfloat16}], ids=str)
def test_from_pretrained_without_layouts_keeps_those_of_the_structure(config, model_class, tmp_path, how):
    """Transformers fills what a checkpoint lacks with memory as it finds it, which may well look like a layout."""
    safetensors = pytest.importorskip("safetensors.torch")
    config.sparse_attention["seed"] = 3
    published = model_class(config)
    dense = {name: value for name, value in published.state_dict().items() if not name.endswith("master_layout")}
    config.save_pretrained(tmp_path)
    safetensors.save_file(dense, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with mock.patch("torch.empty_like", empty_like_full_of_ones):
        loaded = model_class.from_pretrained(tmp_path, **how)
    for ours, theirs in zip(loaded.encoder.layer, published.encoder.layer, strict=True):
        assert torch.equal(ours.sparse_self_attention.master_layout, theirs.sparse_self_attention.master_layout)
