import pytest


@pytest.fixture
def picture():
    """A layout's first head as lines of '0' and '1', for comparison with one drawn by hand."""

    def draw(structure, blocks, head=0):
        layout = structure.make_layout(blocks * structure.block)
        return ["".join(str(cell) for cell in row) for row in layout[head].tolist()]

    return draw
