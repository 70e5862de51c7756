"""Atomic writes of files."""

import os
import tempfile
from pathlib import Path


def write_atomically(data: bytes, path: str | os.PathLike[str]) -> None:
    """Write a file, with its folders. If any step fails, a file that exists at `path` stays unchanged.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_atomically(b"abc", folder + "/new/file.bin")
        ...     Path(folder, "new", "file.bin").read_bytes()
        b'abc'
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
