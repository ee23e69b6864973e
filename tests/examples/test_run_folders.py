"""Numbered folders of runs."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from run_folders import has_runs, new_run_folder, newest_run_folder, next_run_folder


def test_runs_that_start_together_get_folders_of_their_own(tmp_path):
    (tmp_path / "0003").mkdir()
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: new_run_folder(tmp_path), range(16)))
    assert sorted(folder.name for folder in folders) == [f"{number:04d}" for number in range(4, 20)]
    assert newest_run_folder(tmp_path).name == "0019"


def test_the_next_folder_is_named_and_not_made(tmp_path):
    (tmp_path / "0003").mkdir()
    assert next_run_folder(tmp_path) == tmp_path / "0004" and not (tmp_path / "0004").exists()
    assert next_run_folder(tmp_path / "a" / "b") == tmp_path / "a" / "b" / "0001" and not (tmp_path / "a").exists()
    (tmp_path / "file").touch()
    for make in (next_run_folder, new_run_folder):
        with pytest.raises(NotADirectoryError):
            make(tmp_path / "file" / "runs")


def test_the_newest_run_of_an_empty_folder_is_an_error(tmp_path):
    assert not has_runs(tmp_path) and not has_runs(tmp_path / "nothing")
    with pytest.raises(ValueError, match="There is no run in .* to resume"):
        newest_run_folder(tmp_path)
    new_run_folder(tmp_path)
    assert has_runs(tmp_path)
