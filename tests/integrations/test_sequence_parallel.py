import json
import subprocess
import sys

import pytest
from sequence.ranks import PROGRAMS, assert_passed, cases_of, quick_and_slow_cases_of, reports


@pytest.mark.parametrize("program, case, part", quick_and_slow_cases_of("transformers_models.py"))
def test_sequence_parallel_models_of_transformers(program, case, part):
    assert_passed(program, 2, case, part=part)


@pytest.mark.parametrize("program, case, part", quick_and_slow_cases_of("deepspeed_engine.py"))
def test_sequence_parallel_with_deepspeed(program, case, part):
    assert_passed(program, 4, case, part=part)


@pytest.mark.slow("the Trainer of two ranks; the quick tests train their models and engines by hand")
@pytest.mark.parametrize("case", cases_of("trainer.py"))
def test_sequence_parallel_with_transformers_trainer_and_accelerate(case):
    assert_passed("trainer.py", 2, case)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "program, case",
    [
        (program, case)
        for program in ("transformers_models.py", "deepspeed_engine.py", "trainer.py")
        for case in cases_of(program, "cuda")
    ],
)
def test_sequence_parallel_on_two_gpus(program, case):
    assert_passed(program, 2, case, "cuda")


@pytest.mark.parametrize(
    "part, engines", [("quick", 1), pytest.param("slow", 2, marks=pytest.mark.slow("trains in every stage"))]
)
def test_sequence_parallel_says_what_it_does_and_what_it_changes(part, engines):
    printed = reports("deepspeed_engine.py", 4, "cpu", part)[""]
    assert "ds_sparse: each sequence is shared by 2 ranks." in printed
    assert printed.count("ds_sparse: ZeRO 3 has reduce_scatter off") == engines, "by rank 0, of each engine of stage 3"


@pytest.mark.slow("twelve processes train in turn")
def test_a_checkpoint_goes_on_with_other_ranks_and_ranks_of_a_sequence():
    """Saved by two ranks of one sequence: the losses that follow are the same as on those, and fall."""
    runs = [[1, [[2, 1], [4, 4]]], [3, [[1, 1]]]]
    done = subprocess.run(
        [sys.executable, PROGRAMS / "moved_checkpoints.py", json.dumps(runs)],
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for reference, *others in json.loads(done.stdout.splitlines()[-1]):
        assert reference[1] < reference[0] - 0.1
        assert all(losses == pytest.approx(reference, abs=1e-5) for losses in others)
