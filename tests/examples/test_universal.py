"""A run that goes on with another number of ranks than it was begun with."""

import os

import pytest

import universal

# Steps so large that a state which is not moved as it was shows in the next losses.
OPTIMIZER = {"type": "AdamW", "params": {"lr": 3e-2, "weight_decay": 0.5, "torch_adam": True}}
MOVES = ([2, "2"], [1, "4", "--resume"], [4, "6", "--resume"])


def options(workplace, name, steps, *more, **changes):
    config = workplace.config(f"{name}{len(changes)}", train_batch_size=8, optimizer=OPTIMIZER, **changes)
    more = ("--max_seq_length", "128", "--max-steps", steps, "--warmup-steps", "1", "--save_steps", "100", *more)
    return workplace.options(name, "--deepspeed_sparse_attention", *more, config=config, model="dropout")


@pytest.fixture(scope="module")
def moved(workplace):
    """Losses of a run on one rank, and of one of each ZeRO stage that goes from 2 ranks to 1 and to 4."""
    ranks, runs = [1], [options(workplace, "alone", "6")]
    for stage in range(4):
        for number, *arguments in MOVES:
            ranks.append(number)
            runs.append(options(workplace, f"zero{stage}", *arguments, zero_optimization={"stage": stage}))
    ended = workplace.run(runs, ranks)
    assert all(code == 0 for *codes, _ in ended for code in codes), ended
    names = ("alone", *(f"zero{stage}" for stage in range(4)))
    return {name: [loss for _, loss, _ in workplace.training_losses(name)] for name in names}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.slow("trains 13 runs on up to four ranks")
def test_a_run_goes_on_with_any_number_of_ranks_as_on_one(moved, stage):
    """The same sequences in the same order, the same draws of dropout, the optimizer's states where they were."""
    assert len(moved["alone"]) == 6
    assert moved[f"zero{stage}"] == pytest.approx(moved["alone"], abs=1e-5)


@pytest.mark.slow("trains 13 runs on up to four ranks")
def test_no_universal_checkpoint_is_left(workplace, moved):
    folder = workplace.folder / "zero1" / "0001" / "sparse" / "checkpoints"
    assert {path.name for path in folder.iterdir() if path.suffix != ".py"} == {"latest", "step4", "step6"}
    before = set(folder.iterdir())
    (folder / ".step4.universal" / "zero").mkdir(parents=True)  # as a kill leaves it
    universal.remove_left_over(folder)
    assert set(folder.iterdir()) == before


@pytest.mark.slow("trains 13 runs on up to four ranks")
def test_ranks_agree_on_what_one_of_them_finds(workplace, moved):
    """A file that the last rank verifies; the checkpoint before it is of another number of ranks."""
    file = workplace.folder / "zero2" / "0001" / "sparse" / "checkpoints" / "step6"
    os.truncate(file / "zero_pp_rank_3_mp_rank_00_optim_states.pt", 100)
    again = options(workplace, "zero2", "6", "--resume", zero_optimization={"stage": 2})
    ((*ended, printed),) = workplace.run([again], [4])
    assert ended == [0] * 4, printed
    assert printed.count("zero_pp_rank_3_mp_rank_00_optim_states.pt is damaged: it has 100 bytes of the") == 1
    assert printed.count("step4 is whole and is taken instead; the 2 steps after it are trained again.") == 1
    losses = [loss for _, loss, _ in workplace.training_losses("zero2")]
    assert losses == pytest.approx(moved["alone"], abs=1e-5)


@pytest.mark.slow("trains 13 runs on up to four ranks")
def test_other_terms_end_in_a_sentence_before_anything_is_built(workplace, moved):
    config = workplace.config("other", train_batch_size=16, optimizer=OPTIMIZER, zero_optimization={"stage": 1})
    ((ended, printed),) = workplace.run(
        [[*options(workplace, "zero1", "8", "--resume"), "--deepspeed_config", str(config)]]
    )
    assert "train_batch_size was 8 and is 16" in ended and "density" not in printed


@pytest.mark.parametrize(
    "kind, params, kept", [("Lion", {}, "Lion"), ("AdamW", {"amsgrad": True}, "AdamW with amsgrad")]
)
def test_states_that_deepspeed_does_not_move_are_refused(kind, params, kept):
    config = {"optimizer": {"type": kind, "params": params}, "zero_optimization": {"stage": 2}}
    universal.require_movable(config, 2, 2, "ds.json")
    universal.require_movable(config | {"zero_optimization": {"stage": 0}}, 2, 4, "ds.json")
    universal.require_movable(config | {"optimizer": OPTIMIZER}, 2, 4, "ds.json")
    with pytest.raises(ValueError, match=f"of 2 ranks, and there are 4.* not those of {kept}; continue on 2 ranks"):
        universal.require_movable(config, 2, 4, "ds.json")
