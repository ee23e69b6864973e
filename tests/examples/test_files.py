"""Small files that are replaced whole, and sentences for what stops that."""

import errno
import hashlib
import os

import pytest

import files


class Killed(BaseException):
    pass


def kill(*_):
    raise Killed


def test_write_atomically_leaves_the_old_text_or_the_new(tmp_path, monkeypatch):
    path = tmp_path / "file"
    files.write_atomically(path, "old")
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", kill)
        with pytest.raises(Killed):
            files.write_atomically(path, "new")
    assert path.read_text() == "old"
    files.write_atomically(path, "new")
    assert path.read_text() == "new" and [file.name for file in tmp_path.iterdir()] == ["file"]


def test_the_text_is_on_the_disk_before_its_name_and_the_name_before_the_call_ends(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(files.os, "fsync", lambda descriptor: done.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    monkeypatch.setattr(files.os, "replace", lambda old, new: done.append(f"moved to {new.name}"))
    files.write_atomically(tmp_path / "file", "text")
    assert done == [str(tmp_path / ".file.tmp"), "moved to file", str(tmp_path)]


def test_a_checksum_is_that_of_the_checksums_of_the_pieces_in_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PIECE", 4)
    file, data = tmp_path / "file", bytes(range(250))
    file.write_bytes(data)
    pieces = [hashlib.sha256(data[start : start + 4]).digest() for start in range(0, 250, 4)]
    assert files.checksum(file) == hashlib.sha256(b"".join(pieces)).hexdigest()
    file.write_bytes(data[4:8] + data[:4] + data[8:])
    assert files.checksum(file) != hashlib.sha256(b"".join(pieces)).hexdigest()


@pytest.mark.parametrize(
    "error, sentence",
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (RuntimeError("first line.\nsecond line"), "first line"),
        (EOFError(), "EOFError"),
    ],
)
def test_a_reason_is_one_line(error, sentence):
    assert files.reason(error) == sentence
