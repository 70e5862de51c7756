"""The training script of examples/distributed.py under torchrun: a rank is killed, and the same command goes on."""

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import processes

safetensors = pytest.importorskip("safetensors.torch")
pytest.importorskip("sklearn")

SCRIPT = Path(__file__).parents[2] / "examples" / "distributed.py"


OPTIONS = ("--epochs", "2", "--every", "16", "--out")


def torchrun(out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*command, *OPTIONS, str(out)], env=environment, **pipes)


def ranks(out: Path) -> str:
    """What two processes print that have what torchrun tells its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}

    def run(rank: int) -> str:
        environment = os.environ | told | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        done = processes.python(SCRIPT, *OPTIONS, out, env=environment, timeout=240)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    with ThreadPoolExecutor(2) as pool:
        return "".join(pool.map(run, range(2)))


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def rank_of(pid: int) -> str:
    environment = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return next((line.removeprefix("RANK=") for line in environment if line.startswith("RANK=")), "")


@pytest.mark.sweep
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes in /proc")
def test_a_killed_rank_ends_the_others_with_a_sentence_and_the_training_resumes_bit_for_bit(tmp_path: Path) -> None:
    run = torchrun(tmp_path / "killed")
    assert run.stdout is not None
    first = next(line for line in run.stdout if "saved" in line)
    assert first.startswith("step 16: ")
    (victim,) = (pid for pid in children(run.pid) if rank_of(pid) == "1")
    os.kill(victim, signal.SIGKILL)
    _, errors = run.communicate(timeout=120)
    assert run.returncode != 0
    assert "rank 0: the training ended after step" in errors
    assert "start the same command again: it resumes from the latest checkpoint" in errors
    assert not (tmp_path / "killed" / "trained.safetensors").exists()

    run, outputs = torchrun(tmp_path / "killed"), {}
    outputs["killed"], errors = run.communicate(timeout=240)
    assert run.returncode == 0, errors[-3000:]
    outputs["uninterrupted"] = ranks(tmp_path / "uninterrupted")
    for rank in range(2):  # no step before a checkpoint is lost
        assert f"rank {rank}: resumes from the checkpoint of step " in outputs["killed"]
    assert "goes on" not in outputs["uninterrupted"]
    found, wanted = (safetensors.load_file(tmp_path / name / "trained.safetensors") for name in outputs)
    assert found.keys() == wanted.keys()
    assert all(found[name].equal(wanted[name]) for name in wanted)
