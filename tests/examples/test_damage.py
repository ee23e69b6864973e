"""What is wrong with files of a checkpoint: each flipped bit is found."""

import json

import pytest
import torch

from damage import read_state, sealed, wrong_with
from files import checksum

STATE = {"terms": {"seed": 1}, "position": {"loss": 0.1, "step": 3}, "files": {"a.pt": {"bytes": 1, "checksum": "0"}}}


def flipped(data):
    """`data` with each of its bits flipped."""
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        yield bytes(changed)


def test_each_flipped_bit_of_a_state_is_found(tmp_path):
    file = tmp_path / "state.json"
    file.write_text(sealed(STATE))
    state, wrong = read_state(file)
    assert wrong is None and {key: state[key] for key in STATE} == STATE
    for data in flipped(file.read_bytes()):
        file.write_bytes(data)
        assert read_state(file)[1].startswith(f"{file} is damaged: "), data


def test_a_state_keeps_what_json_has_no_number_for(tmp_path):
    file = tmp_path / "state.json"
    file.write_text(sealed({**STATE, "position": {"held_out_loss": float("nan"), "text": "\ud800 é", 1: (2,)}}))
    state, wrong = read_state(file)
    assert wrong is None and state["position"]["1"] == [2] and state["position"]["held_out_loss"] != 0


def test_a_state_without_its_seal_is_damaged(tmp_path):
    file = tmp_path / "state.json"
    file.write_text(json.dumps(STATE))
    assert read_state(file) == ({}, f"{file} is damaged: what it holds does not fit its own checksum")


@pytest.mark.slow("reads a file of 12,000 bits as often")
def test_each_flipped_bit_of_a_tensor_is_found(tmp_path):
    file = tmp_path / "a.pt"
    torch.save(torch.arange(4), file)
    written = {"bytes": file.stat().st_size, "checksum": checksum(file)}
    assert wrong_with(file, written) is None
    for data in flipped(file.read_bytes()):
        file.write_bytes(data)
        assert wrong_with(file, written) == "is damaged: its checksum is not that of what was written"


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    written = {"bytes": 3, "checksum": "0"}
    assert wrong_with(tmp_path / "a.pt", written) == "is missing"
    (tmp_path / "loop.pt").symlink_to("loop.pt")
    assert wrong_with(tmp_path / "loop.pt", written) == "cannot be read: Too many levels of symbolic links"
