"""`pytest benchmarks`: rows beside each other, the options of pytest-benchmark and its own, and what it does not import."""

import json
import os
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks import peers
from benchmarks.measure import Times
from benchmarks.rows import Replay
from tests import processes

pytest.importorskip("pytest_benchmark")
ROOT = Path(__file__).parents[1]
QUICK = ("--threads", "1", "--benchmark-max-time", "0.01", "--benchmark-min-rounds", "3")
SEARCH = ("-k", "range and search")


def run(*options: object) -> subprocess.CompletedProcess[str]:
    # pytest-benchmark measures nothing in a process of xdist.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return processes.python("-m", "pytest", "-p", "no:cacheprovider", "benchmarks", *options, env=environment)


@pytest.mark.slow
def test_rows_of_a_group_are_compared_with_its_first_one_in_one_run(tmp_path: Path) -> None:
    found = run(*SEARCH, *QUICK, "--benchmark-json", tmp_path / "run.json")
    assert found.returncode == 0, found.stdout
    rows = json.loads((tmp_path / "run.json").read_text())["benchmarks"]
    assert [row["params"]["row"] for row in rows] == [
        "torch.ao, l2",
        *(f"ours, {m}" for m in ("l2", "mse", "entropy", "percentile")),
    ]
    assert {row["group"] for row in rows} == {"op: range search"}
    first = rows[0]["stats"]["median"]
    for row in rows:
        more = row["extra_info"]
        assert more["ratio"] == pytest.approx(row["stats"]["median"] / first)
        assert more["baseline"] == "torch.ao, l2"
        assert (more["threads"], more["device"], more["size"]) == (1, "CPU", "small")
        assert more["versions"]["torch"] == torch.__version__
        assert isinstance(more["features"], list)
    assert len({row["stats"]["rounds"] for row in rows}) == 1  # they took turns
    shown = re.findall(r"^(\d) (.*?)  x ([\d.]+) ", found.stdout, flags=re.MULTILINE)
    assert [(int(number), row) for number, row, _ in shown] == [
        (i, row["params"]["row"]) for i, row in enumerate(rows, 1)
    ]
    assert [float(ratio) for *_, ratio in shown] == [round(row["extra_info"]["ratio"], 2) for row in rows]


@pytest.mark.slow
def test_a_row_alone_is_timed_beside_the_first_one_and_says_its_bytes(tmp_path: Path) -> None:
    chosen = "fake and quant and backward and ours and not channel"
    found = run("-k", chosen, *QUICK, "--benchmark-json", tmp_path / "run.json")
    assert found.returncode == 0, found.stdout
    (row,) = json.loads((tmp_path / "run.json").read_text())["benchmarks"]
    assert row["params"] == {"group": "op: fake-quant, forward and backward", "row": "ours"}
    assert row["extra_info"]["ratio"] > 0
    count = 32 * 256 * 28 * 28
    assert (row["extra_info"]["bytes"], row["extra_info"]["kept_bytes"]) == (4 * count, count / 8)


@pytest.mark.slow
def test_a_run_is_shown_beside_a_saved_one(tmp_path: Path) -> None:
    storage = ("--benchmark-storage", tmp_path)
    assert run(*SEARCH, *QUICK, *storage, "--benchmark-save", "before").returncode == 0
    found = run(*SEARCH, *QUICK, *storage, "--benchmark-compare")
    assert found.returncode == 0, found.stdout
    for row in ("1 torch.ao, l2  x 1.00", "3 ours, mse  x 0.0"):
        assert re.search(rf"^{re.escape(row)}.*\(0001_before\)", found.stdout, flags=re.MULTILINE)
        assert re.search(rf"^{re.escape(row)}.*\(NOW\)", found.stdout, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--device", "tpu"), "--device must be cpu or cuda, and is 'tpu'."),
        (("--size", "huge"), "--size must be small or full, and is 'huge'."),
        (("--threads", "0"), "--threads must be a whole number from 1 on, and is '0'."),
        (("--threads", "two"), "--threads must be a whole number from 1 on, and is 'two'."),
        (("--device", "cuda"), "--device is cuda, but torch finds no GPU here; leave it out to measure on the CPU."),
    ],
)
def test_options_that_make_no_sense_are_refused(options: tuple[str, str], sentence: str) -> None:
    if options[1] == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    found = run(*options)
    assert found.returncode == pytest.ExitCode.USAGE_ERROR
    assert found.stderr.strip() == f"ERROR: {sentence}"


@pytest.mark.slow
def test_collecting_needs_what_pip_installs_with_the_package_alone() -> None:
    absent = ["torchvision", "timm", "onnx", "onnxruntime", "onnxscript", "ai_edge_litert", "executorch", "openvino"]
    absent += ["matplotlib", *(module for module, _ in (*peers.PEERS.values(), peers.PT2E) if module != "torch.ao")]
    program = f"""
import sys
sys.modules.update(dict.fromkeys({absent}))
import pytest
sys.exit(pytest.main(["benchmarks", "--collect-only", "-q", "--peers"]))
"""
    found = processes.python("-c", program)
    assert found.returncode == 0, found.stdout
    rows = [line for line in found.stdout.splitlines() if "::" in line]
    assert all(re.match(r"benchmarks/test_\w+\.py::", row) for row in rows)
    assert "benchmarks/test_steps.py::test_step[step: FSRCNN x2: Brevitas]" in rows


@pytest.mark.slow
def test_a_tool_that_is_not_installed_is_skipped_with_the_command_that_installs_it() -> None:
    names = {"Brevitas": "brevitas", "AIMET": "aimet_torch", "NNCF": "nncf"}
    name = next((name for name, module in names.items() if find_spec(module) is None), None)
    if name is None:
        pytest.skip("all tools are installed")
    found = run("-k", f"FSRCNN and {name}", "--peers", "--benchmark-disable", "-rs")
    assert found.returncode == 0, found.stdout
    assert f"No module named '{names[name]}" in found.stdout
    assert "run: pip install -r benchmarks/peers/requirements.txt" in found.stdout


@pytest.mark.slow
def test_rows_that_need_what_is_not_installed_are_skipped_with_the_command_that_installs_it() -> None:
    program = """
import sys
sys.modules["torchvision"] = None
import pytest
sys.exit(pytest.main(["benchmarks", "-k", "file and ResNet and static", "--benchmark-disable", "-rs"]))
"""
    found = processes.python("-c", program)
    assert found.returncode == 0, found.stdout
    assert "import of torchvision halted; None in sys.modules; run: pip install" in found.stdout


def test_the_clock_shows_what_was_measured_and_then_the_work_is_done() -> None:
    calls: list[None] = []
    replay = Replay(lambda: calls.append(None), Times(2, [0.5, 0.25]))
    started = Replay.now()
    for _ in range(4):
        replay()
    assert Replay.now() - started == pytest.approx(2 * 0.5 + 2 * 0.25)
    assert calls == []
    replay()
    assert len(calls) == 1
