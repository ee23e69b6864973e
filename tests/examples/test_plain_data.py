"""Files of a checkpoint are tensors, plain values and what DeepSpeed keeps; all else is refused, and not run."""

import os
import pickle

import numpy
import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from plain_data import plain_data_only, refusal


class Code:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_what_deepspeed_keeps_is_read(tmp_path):
    kept = {
        "zero_stage": ZeroStageEnum(2), "loss_scaler": DynamicLossScaler(8, 2, 2, 1, 1),
        "nested": [(1, 2.5, None, "text", {"a": torch.ones(2)})],
    }  # fmt: skip
    torch.save(kept, tmp_path / "file.pt")
    assert refusal(tmp_path / "file.pt") is None
    with plain_data_only():
        read = torch.load(tmp_path / "file.pt", weights_only=False)
    assert read["zero_stage"] == 2 and read["loss_scaler"].cur_scale == 8


@pytest.mark.parametrize("as_zip", [True, False])
def test_all_else_is_refused_and_not_run_even_where_the_caller_asks_for_any_pickle(tmp_path, monkeypatch, as_zip):
    monkeypatch.chdir(tmp_path)
    torch.save(Code(), "file.pt", _use_new_zipfile_serialization=as_zip)
    assert refusal(tmp_path / "file.pt") == "it asks for posix.mkdir, which is no plain data"
    with plain_data_only(), pytest.raises(pickle.UnpicklingError):
        torch.load("file.pt", weights_only=False)
    assert not (tmp_path / "ran").exists()


def test_a_variable_that_asks_for_any_pickle_does_not_count_and_is_left_as_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save(Code(), "file.pt")
    assert "posix.mkdir" in refusal(tmp_path / "file.pt")
    assert os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] == "1" and "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


def test_a_damaged_pickle_ends_in_one_line(tmp_path):
    torch.save(numpy.float64, tmp_path / "file.pt", _use_new_zipfile_serialization=False)
    data = (tmp_path / "file.pt").read_bytes()
    for length in range(len(data)):
        (tmp_path / "file.pt").write_bytes(data[:length])
        sentence = refusal(tmp_path / "file.pt")
        assert sentence and "\n" not in sentence and "PyTorch 2.6" not in sentence
