"""The benchmark of the ops: its command, and that it times what it says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qtoolkit import ops

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def _import_from_the_folder(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def test_the_command_writes_json_and_markdown(tmp_path) -> None:
    out = tmp_path / "ops.json"
    options = ["--quick", "--repeats", "3", "--threads", "1", "--only", "eager overhead", "--out", str(out)]
    command = [sys.executable, str(FOLDER / "ops.py"), *options]
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    results = json.loads(out.read_text())
    (row,) = results["rows"]
    assert set(row["ratios"]) == {"torch, float scale", "ours"}
    assert row["threads"] == 1
    assert row["repeats"] == 3
    assert results["torch"] == torch.__version__
    assert {"machine", "cpu", "cores", "device", "instruction_set", "threads", "command"} <= set(results)
    assert results["kept_bytes"]["ours"]["float32, fixed"] == 1 / 8
    assert results["kept_bytes"]["torch"]["float32, fixed"] == 1
    markdown = out.with_suffix(".md").read_text()
    assert "| one element | 1 |" in markdown
    assert "| ours | 0.125 |" in markdown


def test_kept_bytes_counts_what_shares_memory_once() -> None:
    from measure import kept_bytes

    x = torch.ones(1000, requires_grad=True)
    assert kept_bytes(lambda x: x * x, x) == 4  # x, as both factors
    assert kept_bytes(torch.exp, x) == 4
    assert kept_bytes(lambda x: x + 1, x) == 0


def test_a_tool_that_does_other_work_is_refused() -> None:
    import tools

    tools.check_agreement(tools.EAGER)
    seven_bits = tools.Tool(
        "seven bits", lambda t: lambda x: ops.fake_quant(x, t.scale, None, -64, 63, t.axis), lambda t: None
    )
    with pytest.raises(RuntimeError, match="seven bits is .* steps away from qtoolkit on axis None"):
        tools.check_agreement(seven_bits)


def test_a_goal_in_seconds_is_the_roof() -> None:
    from measure import Case, Pace, measure

    threads = torch.get_num_threads()
    case = Case("group", "name", {"work": lambda: torch.ones(8)}, "1", limit_us=1e9)
    row = measure(case, threads, Pace(repeats=3, seconds=60, sync=lambda: None))
    assert row.roof_us == 1e9
    assert 0 < row.ratios["work"] < 1


def test_the_weights_of_resnet_50_are_all_there() -> None:
    from op_cases.ranges import resnet50_weights

    weights = list(resnet50_weights())
    assert len(weights) == 54
    assert sum(w.numel() for w in weights) == 25_502_912


def test_range_search_beside_the_old_tool(tmp_path) -> None:
    out = tmp_path / "ranges.json"
    command = [sys.executable, str(FOLDER / "ranges.py"), "--quantizers", "2", "--json", str(out)]
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    rows = {row["method"]: row for row in json.loads(out.read_text())["rows"]}
    assert set(rows) == {"percentile", "mse", "l2", "entropy"}
    assert all(row["per_tensor"] > 0 and row["per_channel"] > 0 for row in rows.values())
    assert {name for name, row in rows.items() if row["legacy"] is None} == {"l2"}
    assert "qtoolkit.compat's" in run.stdout


def test_files_are_timed_beside_each_other_and_measured(tmp_path) -> None:
    pytest.importorskip("onnxruntime")
    out = tmp_path / "export.json"
    options = ["--quick", "--only", "resnet20", "--runtimes", "onnxruntime", "--json", str(out)]
    command = [sys.executable, str(FOLDER / "export.py"), *options]
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    results = json.loads(out.read_text())
    rows = {row["file"]: row for row in results["rows"]}
    assert set(rows) == {"float", "qtoolkit", "quantize_static"}
    assert rows["float"]["ratio"] == 1
    assert rows["float"]["in_integers"] == 0
    assert rows["qtoolkit"]["in_integers"] == 34  # 19 convolutions, 9 adds, 4 slices, a pool, a linear layer
    assert {"torch", "cpu", "threads"} <= set(results)
