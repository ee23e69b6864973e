import pytest

from ds_sparse.cli import main


@pytest.fixture
def spoil(monkeypatch):
    """spoil(module, name): the module's operation of that name is a little off."""

    def replace(module, name):
        right = module.our_operations

        def spoiled(*arguments):
            operations = right(*arguments)
            operation = operations[name]
            return operations | {name: lambda *inputs: operation(*inputs) * 1.001}

        monkeypatch.setattr(module, "our_operations", spoiled)

    return replace


@pytest.fixture
def printed_again(capsys):
    """printed_again(path): what a run printed until now, which `show` prints again from its file."""

    def compare(path):
        printed = capsys.readouterr().out
        assert main(["bench", "show", str(path)]) == 0
        assert capsys.readouterr().out == printed
        return printed

    return compare
