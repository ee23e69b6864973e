"""What a trial leaves behind: nothing, wherever the code of a model keeps what it makes."""

import functools
import gc
from types import ModuleType

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import scaled_dot_product_attention

import ds_sparse
from ds_sparse.models.trial import in_trial

DENSE = {"mode": "dense", "block": 16}
TABLES: dict = {}
CACHES: dict = {}
TABLE = None


def make_table(tokens):
    return torch.linspace(0, 1, tokens)[:, None]


def of_global_dict(tokens):
    if tokens not in TABLES:
        TABLES[tokens] = make_table(tokens)
    return TABLES[tokens]


def of_global(tokens):
    global TABLE  # noqa: PLW0603  as models do
    if TABLE is None or len(TABLE) < tokens:
        TABLE = make_table(tokens)
    return TABLE[:tokens]


@functools.lru_cache(maxsize=4)
def of_cached_function(tokens):
    return make_table(tokens)


class Holder:
    table = None

    def __call__(self, tokens):
        if Holder.table is None or len(Holder.table) < tokens:
            Holder.table = make_table(tokens)
        return Holder.table[:tokens]


class Kept:
    def __init__(self):
        self.tables = None

    def __call__(self, tokens):
        if self.tables is None or len(self.tables) < tokens:
            self.tables = make_table(tokens)
        return self.tables[:tokens]


KEPT = Kept()


def of_function(tokens):
    if not hasattr(of_function, "table"):
        of_function.table = make_table(tokens)
    return of_function.table


class Positions(nn.Module):
    """Keeps its table, and is called past its parent."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(0, 1), persistent=False)

    def forward(self, tokens):
        if len(self.table) < tokens:
            self.table = make_table(tokens)
        return self.table[:tokens]

    @functools.lru_cache(maxsize=2)  # noqa: B019
    def cached(self, tokens):
        return make_table(tokens)


class Attention(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.qkv, self.positions = nn.Linear(32, 96), Positions()
        positions = self.positions
        self.table = {
            "lru_cache": CACHES["bounded"],
            "lru_cache of a file": of_cached_function,
            "cache of containers": lambda tokens: CACHES["unbounded"](tokens)["tables"][0],
            "global dict": of_global_dict, "global": of_global, "class": Holder(),
            "object": lambda tokens: KEPT(tokens), "function": of_function,
            "closure over a module": lambda tokens: positions(tokens), "module": None, "method": None,
        }[way]  # fmt: skip
        if way == "method":
            self.table = cached_method()

    def forward(self, x):
        table = self.positions(x.shape[1]) if self.table is None else self.table(x.shape[1])
        query, key, value = (self.qkv(x) * table).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


def cached_method():
    class Cached(nn.Module):
        @functools.lru_cache(maxsize=2)  # noqa: B019
        def forward(self, tokens):
            return make_table(tokens)

    return Cached()


class Refused(Attention):
    def forward(self, x):
        super().forward(x)
        raise NotImplementedError("a trial ends here")


WAYS = (
    "lru_cache", "cache of containers", "global dict", "global", "class", "object", "function",
    "closure over a module", "module", "method",
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def old_objects_are_not_looked_at():
    """A look at all that a process of many tests holds takes a second, and a trial looks several times. What is made
    from here on is looked at."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()  # other tests look for what holds a method of an old object


@pytest.fixture
def old_objects_are_looked_at():
    """As in a process that never freezes them: what files made when they were imported is among them."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fresh():
    global TABLE  # noqa: PLW0603
    TABLE = Holder.table = KEPT.tables = None
    vars(of_function).clear()
    of_cached_function.cache_clear()
    TABLES.clear()
    CACHES["bounded"] = functools.lru_cache(maxsize=4)(make_table)
    CACHES["unbounded"] = functools.cache(lambda tokens: {"tables": [make_table(tokens)]})


def fakes():
    gc.collect()
    return [x for x in gc.get_objects() if issubclass(type(x), FakeTensor)]


@pytest.mark.parametrize("way", WAYS)
def test_a_model_computes_numbers_after_a_trial_of_it_or_of_another(way, capsys):
    check_models_after_trials(way, capsys)


@pytest.mark.usefixtures("old_objects_are_looked_at")
def test_a_cache_that_is_as_old_as_the_file_of_a_model_is_found(capsys):
    assert any(x is of_cached_function for x in gc.get_objects())
    check_models_after_trials("lru_cache of a file", capsys)


def check_models_after_trials(way, capsys):
    refused, model, untouched, x = Refused(way), Attention(way), Attention(way), torch.randn(2, 8, 32)
    before = fakes()  # of torch.compile in other tests, where old objects are looked at
    with pytest.raises(ValueError, match="did not: it raised NotImplementedError: a trial ends here"):
        ds_sparse.sparsify(refused, DENSE, max_seq_length=16)
    assert len(fakes()) == len(before)
    ds_sparse.sparsify(model, DENSE, max_seq_length=16)
    assert len(fakes()) == len(before) and not capsys.readouterr().out
    for each in (model, untouched):
        each(x).sum().item()
    model.load_state_dict(untouched.state_dict())
    torch.testing.assert_close(model(x), untouched(x))


def test_a_package_that_imports_when_it_is_looked_at_is_not_made_to(monkeypatch):
    lazy = ModuleType("lazy")
    lazy.__getattr__ = lambda name: globals().setdefault(f"LOADED_FOR{name}")
    monkeypatch.setitem(globals(), "LAZY", lazy)
    ds_sparse.sparsify(Attention("module"), DENSE, max_seq_length=16)
    assert not [name for name in globals() if name.startswith("LOADED_FOR")]


def test_what_was_kept_before_a_trial_stays():
    of_global(8), Holder()(8)
    kept = of_global_dict(8), TABLE, Holder.table
    layer = Attention("global dict")
    in_trial(layer, lambda: TABLES.update({9: torch.zeros(3)}))
    assert list(TABLES) == [8] and TABLES[8] is kept[0] and TABLE is kept[1] and Holder.table is kept[2]


def test_what_holds_no_fake_tensor_stays_as_the_trial_left_it():
    """What a forward imports, registers or counts, beside a table that it keeps."""
    names, layer = [], Attention("global dict")

    def run():
        of_global_dict(9)
        Holder.imported, Holder.names = functools, names
        names.append("registered")

    Holder.names = names
    in_trial(layer, run)
    assert Holder.imported is functools and names == ["registered"] and not TABLES
    del Holder.imported, Holder.names


def test_tensors_that_are_not_found_are_told_of(capsys):
    hidden = _generator()  # into which nothing looks
    next(hidden)
    in_trial(nn.Linear(2, 2), lambda: hidden.send(torch.zeros(3)))
    assert "a trial of it without data has left tensors where ds_sparse does not find them" in capsys.readouterr().out
    hidden.close()


def _generator():
    kept = yield
    yield
    del kept
