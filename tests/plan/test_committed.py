from __future__ import annotations

import json

from ds_sparse.plan.committed import FILE, committed_rates, written


def test_what_is_written_is_read_again():
    assert written(committed_rates()) == FILE.read_text()


def test_the_file_names_what_it_was_taken_from():
    assert len(json.loads(FILE.read_text())["sources"]) == len(committed_rates().sources) == 10
