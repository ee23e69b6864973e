from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ds_sparse.plan.training import MODEL, settings_of, walk_of_run, with_training


def test_the_layouts_of_the_runs_have_the_densities_that_they_were_trained_with(results, request):
    path = request.config.rootpath / "benchmarks" / "results" / "training-h200.json"
    densities = {run["name"]: run["density"] for run in json.loads(path.read_text())["runs"]}
    assert {run.name for run in results.training} == set(densities)
    for run in results.training:
        walk = walk_of_run(run.name, run.seq_len)
        assert (1.0 if walk is None else walk.density) == pytest.approx(densities[run.name])


def test_their_settings_are_those_of_the_json(results, request):
    from ds_sparse import load_config
    from ds_sparse.plan.settings import read_settings

    path = str(request.config.rootpath / "configs" / "bert_base_8192.json")
    said = read_settings(load_config(path).deepspeed, path)
    assert {replace(said, bucket_bytes=settings_of(run).bucket_bytes) for run in results.training} == {said}
    assert MODEL.family == "bing_bert"


def test_without_training_runs_nothing_is_said_of_the_loop(rates, results):
    assert with_training(rates, replace(results, training=[])).training is None


def test_the_rest_of_a_step_is_the_mean_of_what_is_left(rates, results):
    found = with_training(rates, results)
    off = [error * run.milliseconds for error, run in zip(found.errors["training steps"], results.training)]
    assert sum(off) == pytest.approx(0, abs=1e-6)
    assert found.training > 0
