"""`ds_sparse.initialize` with "sequence_parallel_size" against one rank: two groups of two ranks, on GPUs one."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import deepspeed
import torch
import transformers
from cases import BERT, BLOCK, DEVICE, case, case_on_cpu, refusal, run_all, slow_case
from deepspeed.runtime.sequence_parallel import parallel_state_sp as groups
from torch import distributed

import ds_sparse

SIZE = 2
STEPS, TOKENS = 3, 165
ARGS = argparse.Namespace(deepspeed_sparse_attention=True)


def make():
    torch.manual_seed(0)
    return transformers.BertForMaskedLM(transformers.BertConfig(**BERT)).to(DEVICE)


def batches():
    """A row for each group of ranks in each step; half of the last group's row is padding."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 50, (STEPS, distributed.get_world_size() // SIZE, 1, TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    mask[:, -1, :, 60:] = 0
    drawn = (torch.rand(ids.shape, generator=generator) < 0.2) & (mask == 1)
    return [x.to(DEVICE) for x in (ids, mask, torch.where(drawn, ids, -100))]


def step_loss(model, ids, mask, labels):
    return model(input_ids=ids, attention_mask=mask, labels=labels).loss


def on_one_rank():
    """The losses of each step and row, the norms of gradients, and the parameters after the last step."""
    model = make()
    ds_sparse.sparsify(model, BLOCK)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, norms = [], []
    for rows in zip(*batches(), strict=True):
        of_rows = [step_loss(model, *row) for row in zip(*rows, strict=True)]
        optimizer.zero_grad()
        torch.stack(of_rows).mean().backward()
        losses.append([loss.item() for loss in of_rows])
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
        optimizer.step()
    return losses, norms, [p.detach() for p in model.parameters()]


def engine_of(model, stage=0, **more):
    config = {
        "train_batch_size": distributed.get_world_size() // SIZE,
        "gradient_clipping": 1e9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "sparse_attention": BLOCK,
        "sequence_parallel_size": SIZE,
    }
    arguments = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    return ds_sparse.initialize(ARGS, model, config=config | more.pop("config", {}), **arguments | more)


def train(engine):
    group = distributed.get_rank() // SIZE
    for ids, mask, labels in zip(*batches(), strict=True):
        loss = step_loss(engine, ids[group], mask[group], labels[group])
        engine.backward(loss)
        engine.step()
        yield loss.item(), engine.get_global_grad_norm()


def assert_stages_train_as_one_rank(*stages):
    losses, norms, parameters = on_one_rank()
    for stage in stages:
        engine, *_ = engine_of(make(), stage)
        for of_rows, norm, (loss, own_norm) in zip(losses, norms, train(engine), strict=True):
            assert abs(loss - of_rows[distributed.get_rank() // SIZE]) < 1e-4, (stage, loss, of_rows)
            if own_norm is not None:
                torch.testing.assert_close(float(own_norm), float(norm), rtol=1e-3, atol=0)
        for own, of_one in zip(engine.module.parameters(), parameters, strict=True):
            with deepspeed.zero.GatheredParameters([own], enabled=stage == 3):
                torch.testing.assert_close(own.detach(), of_one, rtol=1e-4, atol=1e-5)


@case
def zero_3_trains_as_one_rank():
    assert_stages_train_as_one_rank(3)


@slow_case("trains in every stage; the quick tests do in stage 3, where parameters are dealt too")
def every_zero_stage_trains_as_one_rank():
    assert_stages_train_as_one_rank(0, 1, 2, 3)


@slow_case("trains in two stages")
def bf16_trains_nearly_as_one_rank_in_fp32():
    losses, norms, _ = on_one_rank()
    for stage in (1, 3):
        engine, *_ = engine_of(make(), stage, config={"bf16": {"enabled": True}})
        for of_rows, norm, (loss, own_norm) in zip(losses, norms, train(engine), strict=True):
            assert abs(loss - of_rows[distributed.get_rank() // SIZE]) < 0.05, (stage, loss, of_rows)
            torch.testing.assert_close(float(own_norm), float(norm), rtol=0.03, atol=0)


@case_on_cpu
def training_data_deals_the_same_rows_to_the_ranks_of_a_sequence():
    rows = [torch.full((TOKENS,), 3 + row) for row in range(4)]
    _, _, loader, _ = engine_of(make(), training_data=rows)
    firsts = torch.cat([batch[:, 0] for batch in loader])
    of_all = [torch.empty_like(firsts) for _ in range(distributed.get_world_size())]
    distributed.all_gather(of_all, firsts)
    assert len(firsts) == 2 and torch.equal(of_all[0], of_all[1]) and torch.equal(of_all[2], of_all[3])
    assert sorted(torch.cat([of_all[0], of_all[2]]).tolist()) == [3, 4, 5, 6]


@slow_case("trains and saves")
def the_weights_of_a_checkpoint_load_on_one_rank():
    folder = [tempfile.mkdtemp() if distributed.get_rank() == 0 else None]
    distributed.broadcast_object_list(folder, src=0)
    engine, *_ = engine_of(make(), stage=1)
    list(train(engine))
    engine.save_checkpoint(folder[0], tag="last")
    alone = make()
    state = torch.load(Path(folder[0]) / "last" / "mp_rank_00_model_states.pt", map_location=DEVICE, weights_only=False)
    alone.load_state_dict(state["module"])
    for own, saved in zip(engine.module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(own.detach(), saved.detach())


@case_on_cpu
def what_cannot_be_sequence_parallel_is_refused():
    dense = argparse.Namespace(deepspeed_sparse_attention=False)
    config = {"train_batch_size": 2, "sparse_attention": BLOCK, "sequence_parallel_size": SIZE}
    assert "Add --deepspeed_sparse_attention" in refusal(lambda: ds_sparse.initialize(dense, make(), config=config))
    assert "an mpu is given" in refusal(lambda: engine_of(make(), mpu=object()))
    assert 'got "two"; wanted the number of ranks' in refusal(
        lambda: engine_of(make(), config={"sequence_parallel_size": "two"})
    )
    assert "is 3 and there are 4 ranks" in refusal(lambda: engine_of(make(), config={"sequence_parallel_size": 3}))
    four = {"sequence_parallel_size": 4, "train_batch_size": 1}
    assert "groups of 2 ranks in this process" in refusal(lambda: engine_of(make(), config=four))
    assert "data_parallel_size is 4" in refusal(lambda: engine_of(make(), config={"data_parallel_size": 4}))
    buckets = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 10}}
    assert "gradients too small" in refusal(lambda: engine_of(make(), config=buckets))
    one = {"sequence_parallel_size": 1}
    assert "groups of 2 ranks hold a sequence" in refusal(lambda: engine_of(make(), mpu=groups, config=one))
    engine, *_ = engine_of(make())
    ids = torch.full((1, TOKENS), 3 + distributed.get_rank())
    assert "given different batches" in refusal(lambda: engine(input_ids=ids, labels=ids))


run_all(ds_sparse.init_distributed)
