import pytest


@pytest.fixture
def write(tmp_path):
    """Writes a file of this text, or these bytes, and gives its path."""

    def write_file(content):
        path = tmp_path / "ds.json"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write_file
