"""Transformers' Trainer over ranks that share each sequence, against a loop on one rank."""

from __future__ import annotations

import os
import tempfile

import accelerate
import deepspeed
import torch
import transformers
from accelerate.state import AcceleratorState
from cases import BERT, BLOCK, DEVICE, TEXT, case, refusal, run_all

import ds_sparse
from ds_sparse.integrations.flag import RUN_VARIABLE
from ds_sparse.launcher import hook

MODELS = {"BertForMaskedLM": BERT, "LlamaForCausalLM": TEXT | {"num_key_value_heads": 2}}
[getattr(transformers, name) for name in MODELS]  # imported before ranks are forks
STEPS, ACCUMULATED, CLIP, LEARNING_RATE = 3, 2, 0.5, 0.5


class WithMethod(transformers.Trainer):
    """As a program has it that `ds_sparse run` has not started; there is no harm in both."""

    def get_train_dataloader(self):
        return ds_sparse.sequence_batches(super().get_train_dataloader(), size=2)


class OfItsOwn(transformers.Trainer):
    def get_train_dataloader(self):
        return self.accelerator.prepare(torch.utils.data.DataLoader(self.train_dataset))


def make(name):
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    return cls(cls.config_class(**MODELS[name]))


def rows():
    """Of which a third of the tokens, more or less, are in the loss."""
    generator, made = torch.Generator().manual_seed(1), []
    for row in range(STEPS * ACCUMULATED):
        ids = torch.randint(3, 50, (165,), generator=generator)
        labelled = torch.rand(165, generator=generator) < (row + 1) / 9
        mask = (torch.arange(165) < 165 - 20 * row).long()
        made.append(
            {"input_ids": ids, "attention_mask": mask, "labels": torch.where(labelled & (mask == 1), ids, -100)}
        )
    return made


def config_of(stage):
    config = dict.fromkeys(
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"
    )
    config |= {"gradient_clipping": "auto", "zero_optimization": {"stage": stage}, "zero_force_ds_cpu_optimizer": False}
    config |= {"zero_allow_untested_optimizer": True, "sparse_attention": BLOCK, "sequence_parallel_size": 2}
    return config


def trainer_of(cls, model, stage, folder=None, **settings):
    settings = {"num_train_epochs": 1, "train_sampling_strategy": "sequential", "save_strategy": "no"} | settings
    arguments = transformers.TrainingArguments(
        folder or tempfile.mkdtemp(), deepspeed=config_of(stage), per_device_train_batch_size=1,
        per_device_eval_batch_size=1, gradient_accumulation_steps=ACCUMULATED, max_grad_norm=CLIP,
        learning_rate=LEARNING_RATE, optim="sgd", lr_scheduler_type="constant", logging_steps=1, report_to="none",
        use_cpu=DEVICE.type == "cpu", disable_tqdm=True, **settings,
    )  # fmt: skip
    return cls(model=model, args=arguments, train_dataset=rows(), eval_dataset=rows())


def on_one_rank(name):
    """The losses, norms and parameters of a loop, and its loss at the end on two rows at a time."""
    model, losses, norms = make(name).to(DEVICE), [], []
    ds_sparse.sparsify(model, BLOCK)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    batches = [{key: x[None].to(DEVICE) for key, x in row.items()} for row in rows()]

    def labelled(batch):
        labels = batch["labels"] if name.startswith("Bert") else batch["labels"][:, 1:]
        return (labels != -100).sum()

    def loss_of(those):
        return sum(model(**batch).loss * labelled(batch) for batch in those) / sum(map(labelled, those))

    steps = [batches[first : first + ACCUMULATED] for first in range(0, len(batches), ACCUMULATED)]
    for accumulated in steps:
        optimizer.zero_grad()
        loss = loss_of(accumulated)
        loss.backward()
        losses.append(loss.item())
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    model.eval()
    with torch.no_grad():
        at_end = sum(loss_of(those).item() for those in steps) / len(steps)
    return losses, norms, [p.detach() for p in model.parameters()], at_end


@case
def trainer_trains_and_evaluates_as_one_rank():
    for name, cls, stage in (("BertForMaskedLM", transformers.Trainer, 2), ("LlamaForCausalLM", WithMethod, 3)):
        losses, norms, parameters, at_end = on_one_rank(name)
        trainer = trainer_of(cls, make(name), stage)
        trainer.train()
        logged = [entry for entry in trainer.state.log_history if "loss" in entry]
        torch.testing.assert_close([entry["loss"] for entry in logged], losses, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close([float(entry["grad_norm"]) for entry in logged], norms, rtol=1e-3, atol=0)
        for own, of_one in zip(trainer.model.parameters(), parameters, strict=True):
            with deepspeed.zero.GatheredParameters([own], enabled=stage == 3):
                torch.testing.assert_close(own.detach(), of_one, rtol=1e-4, atol=1e-5)
        assert abs(trainer.evaluate()["eval_loss"] - at_end) < 1e-4
        if cls is transformers.Trainer:  # of a single row each rank is given a copy, which they do not share
            assert trainer.predict(rows()[:1]).predictions.shape == (1, 165, 50)


@case
def a_trainer_resumes_inside_an_epoch():
    folders, shuffled = [tempfile.mkdtemp()], {"train_sampling_strategy": "random", "num_train_epochs": 2}
    torch.distributed.broadcast_object_list(folders)
    saving = {"folder": folders[0], "save_strategy": "steps", "save_steps": 2}
    whole = trainer_of(transformers.Trainer, make("BertForMaskedLM"), 1, **saving, **shuffled)
    whole.train()
    resumed = trainer_of(transformers.Trainer, make("BertForMaskedLM"), 1, **shuffled)
    resumed.train(resume_from_checkpoint=os.path.join(folders[0], "checkpoint-2"))

    def losses(trainer):
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    assert len(losses(whole)) == 2 * STEPS and losses(resumed) == losses(whole)
    for own, wanted in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(own, wanted, rtol=0, atol=0)


@case
def a_trainer_that_deals_each_rank_other_rows_is_told_what_to_override():
    trainer = trainer_of(OfItsOwn, make("BertForMaskedLM"), 0)
    assert "of Transformers' Trainer override get_train_dataloader so" in refusal(trainer.train)


@case
def a_loop_of_accelerate_trains_where_its_ranks_have_the_same_batches():
    losses, *_ = on_one_rank("BertForMaskedLM")
    AcceleratorState._reset_state(reset_partial_state=True)
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": ACCUMULATED, "gradient_clipping": CLIP}
    plugin = accelerate.DeepSpeedPlugin(hf_ds_config=config_of(2) | sizes)
    accelerator, model = accelerate.Accelerator(deepspeed_plugin=plugin), make("BertForMaskedLM")
    engine, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))
    assert engine.train_batch_size() == ACCUMULATED
    batches = [{name: x[None].to(DEVICE) for name, x in row.items()} for row in rows()]
    for first, wanted in zip(range(0, len(batches), ACCUMULATED), losses, strict=True):
        accumulated = batches[first : first + ACCUMULATED]
        items = sum((batch["labels"] != -100).sum() for batch in accumulated) / ACCUMULATED
        found = [engine(**batch, num_items_in_batch=items).loss for batch in accumulated]
        for loss in found:
            engine.backward(loss)
            engine.step()
        assert abs(sum(loss.item() for loss in found) / ACCUMULATED - wanted) < 1e-4


hook.install(deepspeed)
os.environ[RUN_VARIABLE] = "sparse"
run_all(ds_sparse.init_distributed)
