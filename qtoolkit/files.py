"""Atomic writes of files."""

import glob
import io
import os
import platform
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeGuard

from qtoolkit.errors import shown

DAY = 24 * 60 * 60
# What writes the files of each ending.
WRITERS = {
    **dict.fromkeys((".pt", ".pth", ".ckpt", ".bin"), "torch.save"),
    ".pt2": "torch.export.save",
    ".safetensors": "qtoolkit.save_checkpoint",
    ".html": "qtoolkit.debug.report",
    ".svg": "qtoolkit.debug.draw",
    ".xml": "qtoolkit.export.encodings",
    ".onnx": "qtoolkit.export_onnx",
    ".tflite": "qtoolkit.export_litert",
    ".pte": "qtoolkit.export.export_executorch",
}


def is_path(path: object) -> TypeGuard[str | os.PathLike[str]]:
    """Return whether an argument names a file or a folder. The empty text, for `pathlib` the present folder, does not."""
    return isinstance(path, str | os.PathLike) and bool(os.fspath(path))


def checked_path(path: object, what: str, example: str) -> str | os.PathLike[str]:
    """Return a path to write. Errors begin with `what`.

    TypeError unless it is a path, IsADirectoryError for a folder, ValueError for the ending of another format.
    """
    if not is_path(path):
        raise TypeError(f'{what}: path must be the file to write, got {shown(path)}; write path="{example}".')
    if os.path.isdir(path):
        inside = os.path.join(os.fspath(path), example)
        raise IsADirectoryError(
            f"{what}: path must be the file to write, got the folder {path!r}; write path={inside!r}."
        )
    check_format(path, what, example)
    return path


def check_format(path: str | os.PathLike[str], what: str, example: str) -> None:
    """Raise ValueError for a path with the ending of a format that another function writes."""
    ending = Path(path).suffix.lower()
    if ending in WRITERS and ending != Path(example).suffix:
        raise ValueError(
            f"{what}: path must not end in {ending!r}, a format that {what} does not write, got {os.fspath(path)!r}; write "
            f"path={example!r}, or call {WRITERS[ending]}, which writes such files."
        )


def write_atomically(data: bytes | Path, path: str | os.PathLike[str]) -> None:
    """Write a file, with its folders: these bytes, or the contents of another file.

    If any step fails, a file that exists at `path` stays unchanged. A symbolic link stays one: the file that it points to is
    written. An existing file keeps its mode, and a new one has the umask's. A FIFO or a device is written directly.
    Temporary files are named .NAME.HOST.PID.RANDOM.tmp; the ones that a killed process left are removed at the next write of
    the same file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_atomically(b"abc", folder + "/new/file.bin")
        ...     Path(folder, "new", "file.bin").read_bytes()
        b'abc'
    """
    with replacing(path) as place, open(place, "wb") as file:
        _write(data, file)


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give the block the name of an empty file to write, which becomes `path` after it as `write_atomically` says."""
    mode = _mode(path)
    if mode is not None and not stat.S_ISREG(mode):
        yield Path(path)
        return
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name[:50]}."  # names have at most 255 bytes
    _remove_stale(target.parent, prefix)
    temporary = target.parent / f"{own_name(prefix)}.tmp"
    try:
        new = 0o666 if mode is None else stat.S_IMODE(mode) | stat.S_IWUSR  # less the umask
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, new))
        yield temporary
        if mode is not None:
            temporary.chmod(stat.S_IMODE(mode))
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _write(data: bytes | Path, file: BinaryIO) -> None:
    with open(data, "rb") if isinstance(data, Path) else io.BytesIO(data) as source:
        shutil.copyfileobj(source, file, 1 << 22)


def _mode(path: str | os.PathLike[str]) -> int | None:
    """Return the type and the mode of the file that a path leads to; None where there is none yet."""
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        return None


def own_name(prefix: str) -> str:
    """Return a new name of a file or folder that this process writes: PREFIX, HOST.PID.RANDOM."""
    return f"{prefix}{_host()}{os.getpid()}.{secrets.token_hex(4)}"


def _host() -> str:
    return f"{platform.node()[:50]}."


def _remove_stale(folder: Path, prefix: str) -> None:
    """Remove the temporary files of this machine's processes that have ended, and all that are older than a day."""
    for entry in folder.glob(glob.escape(prefix + _host()) + "*.*.tmp"):
        if _writer_of(entry, prefix) is not None and is_abandoned(entry, prefix):
            with suppress(OSError):  # another process has removed it, or this one may not
                entry.unlink()


def is_abandoned(entry: Path, prefix: str) -> bool:
    """Return whether a file with a name of `own_name` has no writer: its process does not run, or it is a day old.

    For a process of another machine, only the age tells.
    """
    pid = _writer_of(entry, prefix)
    with suppress(OSError):  # another process has removed it
        return (pid is not None and not _runs(pid)) or time.time() - entry.stat().st_mtime > DAY
    return False


def _writer_of(entry: Path, prefix: str) -> int | None:
    """Return the process of this machine that a name of `own_name` names, or None."""
    own = prefix + _host()
    pid = entry.name.removeprefix(own).partition(".")[0] if entry.name.startswith(own) else ""
    return int(pid) if pid.isdecimal() else None


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True  # another user's
    return True
