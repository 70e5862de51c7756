"""Writes of files: links, modes, FIFOs and devices, and what a killed process leaves."""

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from qtoolkit.files import DAY, write_atomically
from tests import processes


@pytest.fixture(params=[0o022, 0o077, 0o002])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_file_has_the_mode_of_the_umask(tmp_path: Path, umask: int) -> None:
    write_atomically(b"new", tmp_path / "new.onnx")
    assert mode_of(tmp_path / "new.onnx") == 0o666 & ~umask


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o777, 0o444])
def test_an_existing_file_keeps_its_mode(tmp_path: Path, umask: int, mode: int) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"old")
    path.chmod(mode)
    write_atomically(b"new", path)
    assert path.read_bytes() == b"new"
    assert mode_of(path) == mode


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_a_link(tmp_path: Path, exists: bool) -> None:
    target, link = tmp_path / "of" / "target.onnx", tmp_path / "link.onnx"
    if exists:
        target.parent.mkdir()
        target.write_bytes(b"old")
    link.symlink_to(Path("of", "target.onnx"))
    write_atomically(b"new", link)
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert not target.is_symlink()
    assert os.listdir(target.parent) == ["target.onnx"]


def test_a_fifo_stays_a_fifo(tmp_path: Path) -> None:
    fifo, read = tmp_path / "fifo", []
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: read.append(fifo.read_bytes()), daemon=True)
    reader.start()
    write_atomically(b"new", fifo)
    reader.join(10)
    assert read == [b"new"]
    assert fifo.is_fifo()


@pytest.mark.slow
def test_devices_and_pipes_are_written() -> None:
    write_atomically(b"new", os.devnull)
    code = "from qtoolkit.files import write_atomically; write_atomically(b'new', '/dev/stdout')"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout == b"new"


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        write_atomically(b"new", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_long_name(tmp_path: Path) -> None:
    write_atomically(b"new", tmp_path / ("é" * 125 + ".onnx"))
    assert len(list(tmp_path.iterdir())) == 1


def test_an_error_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"old")
    with pytest.raises(TypeError):
        write_atomically("text", path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["model.onnx"]


def stopped_while_writing(path: Path, pipe: Connection) -> None:
    """Stop in the middle of a write."""

    def replace(self: Path, target: Path) -> None:
        pipe.send("ready")
        signal.pause()

    Path.replace = replace
    write_atomically(b"half", path)


def killed_while_writing(path: Path) -> None:
    """Start a process that stops in the middle of a write, and kill it."""
    context = processes.context()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=stopped_while_writing, args=(path, theirs))
    process.start()
    theirs.close()
    assert ours.recv() == "ready"
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def test_what_a_killed_process_left_is_removed_at_the_next_write(tmp_path: Path) -> None:
    path, other = tmp_path / "model.onnx", tmp_path / "other.onnx"
    path.write_bytes(b"old")
    killed_while_writing(path)
    (left,) = tmp_path.glob(".*")
    assert left.name.startswith(".model.onnx.")
    assert left.name.endswith(".tmp")
    assert path.read_bytes() == b"old"
    write_atomically(b"new", other)
    assert left.exists()
    write_atomically(b"new", path)
    assert sorted(os.listdir(tmp_path)) == ["model.onnx", "other.onnx"]


def test_files_of_running_processes_and_of_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    killed_while_writing(path)
    (left,) = tmp_path.glob(".*")
    dead = left.name.split(".")[-3]
    names = {
        "running": left.name.replace(f".{dead}.", f".{os.getpid()}."),
        "of another user": left.name.replace(f".{dead}.", ".1."),
        "of the user": ".model.onnx.mine.tmp",
        "old": left.name.replace(f".{dead}.", f".{os.getpid()}.old"),
    }
    for name in names.values():
        (tmp_path / name).touch()
    before = time.time() - DAY - 60
    os.utime(tmp_path / names["old"], (before, before))
    write_atomically(b"new", path)
    assert set(os.listdir(tmp_path)) == {"model.onnx", *names.values()} - {names["old"]}
