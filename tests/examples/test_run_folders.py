"""Numbered folders of runs."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from run_folders import run_folder


def test_runs_that_start_together_get_folders_of_their_own(tmp_path):
    (tmp_path / "0003").mkdir()
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: run_folder(tmp_path), range(16)))
    assert sorted(folder.name for folder in folders) == [f"{number:04d}" for number in range(4, 20)]
    assert run_folder(tmp_path, resume=True).name == run_folder(tmp_path, resume=True, or_start=True).name == "0019"


def test_the_next_folder_is_named_and_not_made(tmp_path):
    (tmp_path / "0003").mkdir()
    assert run_folder(tmp_path, makes=False) == tmp_path / "0004" and not (tmp_path / "0004").exists()
    deep = tmp_path / "a" / "b"
    assert run_folder(deep, resume=True, or_start=True, makes=False) == deep / "0001" and not (tmp_path / "a").exists()


@pytest.mark.parametrize("makes", [True, False])
def test_a_folder_that_cannot_be_made_and_no_run_to_resume_are_a_sentence(tmp_path, makes):
    with pytest.raises(ValueError, match="There is no run in .* to resume; start one without --resume"):
        run_folder(tmp_path, resume=True, makes=makes)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="--output-dir .* cannot be used: Not a directory; give another folder"):
        run_folder(tmp_path / "file" / "runs", makes=makes)
