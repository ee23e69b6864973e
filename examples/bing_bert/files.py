"""Files that a kill cannot leave half written, and their checksums."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PIECE = 16 * 2**20


def write_atomically(path: Path, text: str) -> None:
    """Replaces a small file in one move, on the disk when this returns."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    flush(temporary)
    os.replace(temporary, path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> str:
    """The SHA-256 of the SHA-256s of a file's pieces of 16 MiB, which threads take at the same time."""

    def digest(start: int) -> bytes:
        with path.open("rb") as file:
            file.seek(start)
            return hashlib.sha256(file.read(PIECE)).digest()

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        digests = pool.map(digest, range(0, path.stat().st_size, PIECE))
    return hashlib.sha256(b"".join(digests)).hexdigest()


def reason(error: BaseException) -> str:
    """Why something failed, in one line."""
    words = str(getattr(error, "strerror", None) or error).strip()
    return words.splitlines()[0].rstrip(".") if words else type(error).__name__
