import pytest


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
