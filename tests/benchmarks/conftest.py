import pytest

from benchmarks.program import main


@pytest.fixture
def printed_again(capsys):
    """printed_again(path): what a run printed until now, which `show` prints again from its file."""

    def compare(path):
        printed = capsys.readouterr().out
        assert main(["show", str(path)]) == 0
        assert capsys.readouterr().out == printed
        return printed

    return compare
