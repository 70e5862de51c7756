"""The benchmark of the ops: its command, and that it times what it says."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import qtoolkit as qt
from qtoolkit import ops
from tests import processes
from tests.data import needs_data

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def _import_from_the_folder(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER.with_name("examples")))


@pytest.mark.sweep
def test_the_command_writes_json_and_markdown(tmp_path) -> None:
    out = tmp_path / "ops.json"
    options = ["--quick", "--repeats", "3", "--threads", "1", "--only", "eager overhead", "--out", str(out)]
    command = [sys.executable, "-m", "benchmarks.pages.ops", *options]
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
    from benchmarks.measure import kept_bytes

    x = torch.ones(1000, requires_grad=True)
    assert kept_bytes(lambda x: x * x, x) == 4  # x, as both factors
    assert kept_bytes(torch.exp, x) == 4
    assert kept_bytes(lambda x: x + 1, x) == 0


def test_a_tool_that_does_other_work_is_refused() -> None:
    from benchmarks import tools

    tools.check_agreement(tools.EAGER)
    seven_bits = tools.Tool(
        "seven bits", lambda t: lambda x: ops.fake_quant(x, t.scale, None, -64, 63, t.axis), lambda t: None
    )
    with pytest.raises(RuntimeError, match="seven bits is .* steps away from qtoolkit on axis None"):
        tools.check_agreement(seven_bits)


def test_a_goal_in_seconds_is_the_roof() -> None:
    from benchmarks.measure import Case, Pace, measure

    threads = torch.get_num_threads()
    case = Case("group", "name", {"work": lambda: torch.ones(8)}, "1", limit_us=1e9)
    row = measure(case, threads, Pace(repeats=3, seconds=60, sync=lambda: None))
    assert row.roof_us == 1e9
    assert 0 < row.ratios["work"] < 1


def test_the_weights_of_resnet_50_are_all_there() -> None:
    from benchmarks.op_cases.ranges import resnet50_weights

    weights = list(resnet50_weights())
    assert len(weights) == 54
    assert sum(w.numel() for w in weights) == 25_502_912


@pytest.mark.slow
def test_range_search_beside_the_old_tool(tmp_path) -> None:
    out = tmp_path / "ranges.json"
    command = ["-m", "benchmarks.pages.ranges", "--quantizers", "2", "--json", str(out)]
    run = processes.python(*command)
    assert run.returncode == 0, run.stderr
    rows = {row["method"]: row for row in json.loads(out.read_text())["rows"]}
    assert set(rows) == {"percentile", "mse", "l2", "entropy"}
    assert all(row["per_tensor"] > 0 and row["per_channel"] > 0 for row in rows.values())
    assert {name for name, row in rows.items() if row["legacy"] is None} == {"l2"}
    assert "qtoolkit.compat's" in run.stdout


@pytest.mark.sweep
def test_files_are_timed_beside_each_other_and_measured(tmp_path) -> None:
    pytest.importorskip("onnxruntime")
    out = tmp_path / "export.json"
    options = ["--quick", "--only", "resnet20", "--runtimes", "onnxruntime", "--json", str(out)]
    run = processes.python("-m", "benchmarks.pages.export", *options)
    assert run.returncode == 0, run.stderr
    results = json.loads(out.read_text())
    rows = {row["file"]: row for row in results["rows"]}
    ours = {"qtoolkit", "qtoolkit, int8 weights", "qtoolkit, 7-bit weights"}
    assert set(rows) == {"float", "quantize_static", *ours}
    assert rows["float"]["ratio"] == 1
    assert rows["float"]["in_integers"] == 0
    assert rows["qtoolkit"]["in_integers"] == 34  # 19 convolutions, 9 adds, 4 slices, a pool, a linear layer
    assert {"torch", "cpu", "threads"} <= set(results)


def run_training(script: str, *options: str) -> tuple[dict[str, Any], str]:
    """Run a benchmark of training on a small network; return its results and what it prints."""
    out = Path(options[options.index("--out") + 1])
    run = processes.python("-m", f"benchmarks.pages.{script}", "--quick", *options)
    assert run.returncode == 0, run.stderr
    return json.loads(out.read_text()), run.stdout


@pytest.mark.sweep
def test_what_a_gpu_is_measured_with_runs_without_one() -> None:
    printed = processes.python("-m", "benchmarks.pages.gpu", "all", "--device", "cpu", "--quick").stdout
    for subject in ("ours, learned scales", "ours, fixed scales"):
        rows = [line for line in printed.splitlines() if subject in line]
        assert len(rows) == 6
        assert all("of float's" in row for row in rows)
    assert len([line for line in printed.splitlines() if "% of a copy" in line]) == 16
    options = ["--device", "cpu", "--networks", "YOLO", "--subjects", "torch.ao FX in float32", "--seconds", "0"]
    printed = processes.python("-m", "benchmarks.pages.gpu", "steps", *options).stdout
    assert (
        "Left out, since 0 seconds were over: YOLO, 16, float in float32; YOLO, 16, torch.ao FX in float32; YOLO, 64"
        in printed
    )
    if not torch.cuda.is_available():
        refused = processes.python("-m", "benchmarks.pages.gpu", "ops")
        assert "There is no GPU here, so nothing was measured." in refused.stderr


def test_rows_of_a_gpu_take_the_place_of_earlier_ones_of_the_same_card(tmp_path) -> None:
    from benchmarks.pages import gpu

    out, run = tmp_path / "gpu.json", {"card": "a", "torch": "2.11", "commit": "1"}
    step = {"network": "YOLO", "batch": 16, "subject": "float"}
    figures = {"milliseconds": 2.0, "captured": None, "mebibytes": 3, "launches": 4}
    figures |= {"milliseconds_ratio": 1.0, "captured_ratio": None, "mebibytes_ratio": 1.0}
    gpu.add(
        [{"op": "fake_quant", "microseconds": 1.0, "share": 0.5, **run}, {**step, "failed": "no memory", **run}], out
    )
    assert "- Not trained: float: YOLO, 16 images, no memory." in list(gpu.tables(json.loads(out.read_text())["rows"]))
    rows = gpu.add([{**step, **figures, **run, "commit": "2"}, {**step, **figures, **run, "card": "b"}], out)
    assert [(row["card"], row["commit"]) for row in rows] == [("a", "2"), ("a", "1"), ("b", "1")]
    lines = list(gpu.tables(rows))
    assert lines.count("| YOLO | 16 | float | 2.00 | 1.00 | - | - | 8000 | 3 | 1.00 | 4 |") == 2
    assert any(line.startswith("Measured on one a, torch 2.11, at 1, 2: ") for line in lines)
    assert "| fake_quant | 1.0 | 50% |" in gpu.tables_of_ops(rows)
    assert not any("Not trained" in line for line in lines)


def test_a_row_that_takes_too_long_has_failed() -> None:
    from benchmarks.pages import gpu

    with pytest.raises(TimeoutError, match="not done in 0 seconds"), gpu.within(0.05):
        time.sleep(60)


@pytest.mark.slow
def test_small_layers_are_timed_by_arithmetic(tmp_path) -> None:
    out, page = tmp_path / "small.json", tmp_path / "page.md"
    run = processes.python("-m", "benchmarks.pages.small_layers", "--few", "--seconds", "0", "--json", str(out))
    assert run.returncode == 0, run.stderr
    results = json.loads(out.read_text())
    assert [(row["positions"], row["least"]) for row in results["rows"]] == [(2, 1167), (8, 1167)]
    assert "64 to 64, 3x3" in run.stdout
    page.write_text("<!-- begin: benchmarks/pages/small_layers.py -->\n<!-- end -->\n")
    run = processes.python("-m", "benchmarks.pages.small_layers", "--page", str(page))
    assert run.returncode == 0, run.stderr
    assert "| 512 to 512, 3x3 | 3,136 | 271 |" in page.read_text()


@pytest.mark.slow
def test_training_steps_are_timed_beside_each_other_and_profiled(tmp_path) -> None:
    pytest.importorskip("timm")
    options = ["--networks", "fsrcnn", "--only", "ours, codes", "ours, integer", "--threads", "1", "--rounds", "3"]
    results, printed = run_training(
        "train_step", *options, "--profile", "--calls", "--out", str(tmp_path / "step.json")
    )
    rows = {row["subject"]: row for row in results["networks"]["fsrcnn"]["rows"]}
    assert list(rows) == ["float", "ours, codes", "ours, integer"]
    assert rows["float"]["ratio"] == rows["float"]["least"] == 1
    assert rows["float"]["difference"] == 0
    assert all(row["rounds"] == 3 and row["ratio"] > 0 and row["failure"] == "" for row in rows.values())
    assert 0 < rows["ours, codes"]["difference"] < 0.2
    assert set(results["networks"]["fsrcnn"]["profile"]) == set(rows)
    assert results["networks"]["fsrcnn"]["profile"]["float"]["aten::convolution_backward"] > 0
    calls = results["networks"]["fsrcnn"]["calls"]
    assert set(calls) == set(rows)
    assert all(0 < own < inner for own, inner in calls.values())
    assert "Ops that a step calls" in printed
    assert {"torch", "cpu", "backend", "batch", "peers"} <= set(results)
    assert "FSRCNN x2: time of a training step, batch 4" in printed


@pytest.mark.parametrize("together", [None, 0, 1, 2, 3, 9])
@pytest.mark.parametrize("others", [0, 1, 4])
def test_every_group_has_the_float_model_first_and_each_other_subject_once(others: int, together: int | None) -> None:
    pytest.importorskip("timm")
    from benchmarks.pages.train_step import groups_of
    from benchmarks.training.trainer import Settings

    subjects = [Settings("fsrcnn", name, "tensorrt", 1, None, size=24) for name in ("float", *"abcd"[:others])]
    groups = groups_of(subjects, together)
    assert all(group[0] is subjects[0] for group in groups)
    assert [s for group in groups for s in group[1:]] == subjects[1:]
    if together and together > 1:
        assert all(len(group) <= together for group in groups)


@pytest.mark.sweep
def test_memory_of_a_training_step(tmp_path) -> None:
    pytest.importorskip("timm")
    options = ["--networks", "fsrcnn", "--only", "plain", "codes"]
    results, printed = run_training("memory", *options, "--out", str(tmp_path / "memory.json"))
    rows = {row["subject"]: row for row in results["networks"]["fsrcnn"]["rows"]}
    assert list(rows) == ["float", "ours, plain", "ours, codes"]
    assert rows["float"]["kept"] == 1
    widths = (56, 56, 12, 12, 12, 12, 12, 12, 12, 56, 56)  # what convolutions and activations take, without the images
    output = 3 * 48 * 48  # kept by the clamp, and by the loss as a difference
    assert rows["float"]["kept_bytes"] == 4 * 4 * (24 * 24 * sum(widths) + 2 * output)
    assert rows["float"]["held_bytes"] == pytest.approx(rows["float"]["kept_bytes"], rel=0.3)
    assert rows["ours, codes"]["kept"] < rows["ours, plain"]["kept"]
    assert "FSRCNN x2: memory of a training step, batch 4" in printed


def test_a_subject_that_fails_is_listed_with_the_reason() -> None:
    pytest.importorskip("timm")
    from benchmarks.training.trainer import Settings
    from benchmarks.training.worker import SubjectError, Worker

    settings = Settings("fsrcnn", "float", "tensorrt", 1, "no such device", size=24)
    with pytest.raises(SubjectError, match="RuntimeError: .*no such device"):
        Worker(settings)


def test_the_worst_subject_counts_for_a_demand_and_a_figure_below_is_not_equal() -> None:
    pytest.importorskip("timm")
    from benchmarks.training.demands import Demand

    of = {"resnet18": {"float": 1.0, "ours, codes": 0.9, "ours, integer": 1.0, "NNCF": 1.8, "AIMET": 1.7}}
    demand = Demand("peak", "peak", ("ours, codes", "ours, integer"), {"resnet18": 1.0})
    (line,) = demand.lines(of)
    assert line[1:] == ["ResNet-18", "1.00", "1.00", "met", "1.70 (AIMET)"]
    (line,) = replace(demand, below=True).lines(of)
    assert line[1:5] == ["ResNet-18", "< 1.00", "1.00", "missed"]
    (line,) = replace(demand, subjects=("ours, compiled",)).lines(of)
    assert line[3:5] == ["", "not measured"]


@pytest.mark.slow
def test_the_page_takes_what_was_measured_and_keeps_the_rest(tmp_path) -> None:
    pytest.importorskip("timm")
    pytest.importorskip("matplotlib")
    from benchmarks.pages import training_page

    page, out = tmp_path / "performance.md", tmp_path / "train_step.json"
    page.write_text(f"before\n{training_page.BEGIN}\nold\n{training_page.END}\nafter\n")
    run_training("train_step", "--networks", "fsrcnn", "--only", "none", "--threads", "1", "--out", str(out))
    processes.python("-m", "benchmarks.pages.training_page", "--results", tmp_path, "--page", page).check_returncode()
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| float | 1.00 |" in text
    assert (tmp_path / "training.svg").exists()


@needs_data
@pytest.mark.data
@pytest.mark.slow
def test_accuracy_of_quantizers_and_its_page(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    out, page = tmp_path / "accuracy.json", tmp_path / "accuracy.md"
    options = ["--bits", "4", "--seeds", "0", "--checkpoints", str(tmp_path), "--out", str(out)]
    every = ["--only", "float", "lsq", "dsq", "torch.ao", "torch.ao, learnable", "Brevitas", *options]
    results, _ = run_training("accuracy", *every)
    rows = {row["training"]["subject"]: row for row in results["rows"]}
    assert set(rows) == {"float", "lsq", "dsq", "torch.ao", "torch.ao, learnable", "Brevitas"}
    assert results["float_weights"] == {"resnet20": 89}
    for subject, row in rows.items():
        missing = subject == "Brevitas" and find_spec("brevitas") is None
        assert (row["failure"] != "") if missing else (row["trained"] > 60)
    assert rows["float"]["training"]["bits"] == 32
    assert "benchmarks.pages.accuracy" in results["commands"][0]
    longer = ["--rate", "0.03", "--decay", "5e-5", "--clip", "5", *options]
    results, _ = run_training("accuracy", "--only", "lsq", "--forward", "float", "integer", "--teacher", *longer)
    assert results["rows"][: len(rows)] == list(rows.values())  # nothing is trained twice
    assert [row["training"]["forward"] for row in results["rows"][len(rows) :]] == ["float", "integer"]
    page.write_text("before\n<!-- begin: benchmarks/pages/accuracy.py -->\nold\n<!-- end -->\nafter\n")
    processes.python("-m", "benchmarks.pages.accuracy", "--out", out, "--page", page).check_returncode()
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "Epochs: 1; rate: 0.01." in text
    assert "| lsq | 1 | 0.00 | " in text
    assert "| 1 | yes | 0.03, decay 5e-05, clip 5 | 4 | lsq, integer forward | 1 |" in text
    assert "learnable" in (tmp_path / "qat_resnet20.svg").read_text()


@needs_data
@pytest.mark.data
@pytest.mark.slow
def test_accuracy_of_two_networks_in_one_file_and_on_one_page(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "accuracy.json"
    options = ["--seeds", "0", "--bits", "4", "--checkpoints", str(tmp_path), "--out", str(out)]
    of_8 = ["--network", "resnet8", "--optimizer", "adam", "--only", "float", "lsq", *options]
    results, printed = run_training("accuracy", *of_8)
    trainings = [row["training"] for row in results["rows"]]
    assert {(t["network"], t["optimizer"], t["rate"]) for t in trainings} == {("resnet8", "adam", 1e-3)}
    assert results["float_weights"]["resnet8"] > 15  # after 30 steps
    assert "ResNet-8 on raw pixels, CIFAR-10: accuracy on 100 images" in printed
    ending = "0_1_False_auto_0.001_None_adam_resnet8_True_None"
    trained = ("resnet8_float_weights", *(f"{name}_{ending}" for name in ("float_32", "lsq_4")))
    assert {path.name for path in (tmp_path / "200").iterdir()} == {f"{name}.pt" for name in trained}
    gone = {**trainings[0], "subject": "lsq, histogram"}
    rows = [*results["rows"], {**results["rows"][0], "training": gone}]
    out.write_text(json.dumps({**results, "rows": rows}))
    both, printed = run_training("accuracy", "--only", "float", *options)
    assert 'Rows of subjects that no longer exist are left out: "lsq, histogram" (1).' in printed
    assert both["rows"][:-1] == results["rows"]
    assert both["rows"][-1]["training"]["network"] == "resnet20"
    assert both["float_weights"] == {**results["float_weights"], "resnet20": 89}
    text = written_page("accuracy", out, tmp_path / "accuracy.md")
    assert text.index("ResNet-20, CIFAR-10: ") < text.index("| float |") < text.index("ResNet-8 on raw pixels, ")
    assert "Epochs: 1; rate: 0.001, adam." in text
    assert {path.name for path in tmp_path.glob("*.svg")} == {"qat_resnet20.svg", "qat_resnet8.svg"}


def test_rows_from_before_there_were_two_networks_can_be_read() -> None:
    from benchmarks.pages.accuracy import Row

    training = {"subject": "lsq", "bits": 4, "seed": 0, "epochs": 1, "teacher": False, "forward": "auto"}
    row = Row.of({"training": {**training, "rate": 0.01, "clip": None}, "calibrated": 77.3, "trained": 86.3})
    assert (row.training.network, row.training.optimizer) == ("resnet20", "sgd")


@pytest.mark.parametrize("name", ["accuracy", "float16_scales"])
def test_no_training_stands_twice_in_the_results(name: str) -> None:
    from benchmarks.pages.accuracy import RESULTS, Row

    trainings = [Row.of(row).training for row in json.loads(RESULTS.with_stem(name).read_text())["rows"]]
    assert len(set(trainings)) == len(trainings)


def test_resnet_8_is_that_of_mlperf_tiny_and_takes_unsigned_pixels() -> None:
    from mlperf_tiny import ResNet8

    from benchmarks.training.algorithms import build

    model = ResNet8()
    values = {name: value for name, value in model.state_dict().items() if "num_batches" not in name}
    assert sum(value.numel() for value in values.values()) == 78_666  # of the published Keras model
    assert {module.eps for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)} == {1e-3}
    x, outputs = torch.zeros(1, 16, 32, 32), []
    x[..., 1, 1] = 1  # in the first window alone, as TensorFlow pads at the end; in four with torch's padding of 1
    conv = model.stacks[1].conv1
    hook = conv.register_forward_hook(lambda _, args, y: outputs.append(y - conv.bias[:, None, None]))
    assert model.stacks[1](x).shape == (1, 32, 16, 16)
    assert outputs[0].abs().amax((0, 1)).nonzero().tolist() == [[0, 0]]
    hook.remove()
    prepared = build("lsq", model.train(), [255 * torch.rand(8, 3, 32, 32)], 4)
    specs = [q.spec for q in qt.quantizers_of(prepared).values() if not q.of_weight]
    assert [spec.bits for spec in specs] == [8, *[4] * 6, 8]
    assert not any(spec.signed for spec in specs)


def test_both_networks_see_the_same_crops() -> None:
    from benchmarks.export_models import MEAN, STD
    from benchmarks.training.cifar import augmented, crops

    mean, std = MEAN[:, None, None], STD[:, None, None]
    pixels = torch.randint(256, (16, 3, 32, 32)).float()
    drawn = crops(16, torch.Generator().manual_seed(0))
    normalised = augmented((pixels / 255 - mean) / std, torch.zeros(3), drawn)
    raw = augmented(pixels, 255 * MEAN, drawn)
    torch.testing.assert_close((raw / 255 - mean) / std, normalised)
    assert raw.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_training_that_was_ended_goes_on_bit_for_bit(optimizer: str, tmp_path, monkeypatch) -> None:
    from mlperf_tiny import ResNet8

    from benchmarks.training.algorithms import build
    from benchmarks.training.cifar import Data, Run, Schedule

    generator = torch.Generator().manual_seed(0)
    images = 255 * torch.rand(60, 3, 32, 32, generator=generator), torch.randint(10, (60,), generator=generator)
    data, schedule = Data(images, images, torch.zeros(3)), Schedule(60, 3, 20, 0.01, optimizer=optimizer)

    def run(checkpoint: str) -> Run:
        torch.manual_seed(0)
        model = build("lsq", ResNet8().train(), [images[0]], 4)
        return Run(model, data, schedule, 0, tmp_path / checkpoint)

    whole, ended = run("whole.pt"), run("ended.pt")
    whole.train("whole")
    monkeypatch.setattr(ended, "_train_on", ending_at(5, ended._train_on))
    with pytest.raises(KeyboardInterrupt):
        ended.train("ended")  # in the second epoch
    (tmp_path / "ended.new").write_bytes(b"half a checkpoint")  # a later one was ended while it was written
    resumed = run("ended.pt")
    assert resumed.step == 3
    resumed.train("ended")
    assert resumed.step == whole.step == 9
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def ending_at(count: int, step: Callable[..., None]) -> Callable[..., None]:
    """Return a step that ends the training at a call."""
    calls = iter(range(1, count))

    def ending(*args: Any) -> None:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        step(*args)

    return ending


def test_rows_of_other_settings_are_refused(tmp_path) -> None:
    from benchmarks.pages.stored import rows_before, write_rows

    out = tmp_path / "results" / "ptq.json"
    assert rows_before(out, {"images": 64}) == []
    write_rows(out, {"images": 64, "cpu": "any"}, [{"method": "minmax"}])
    assert rows_before(out, {"images": 64}) == [{"method": "minmax"}]
    with pytest.raises(SystemExit, match=r"ptq.json has results with images = 64, and this run has 512; pass another"):
        rows_before(out, {"images": 512})


def test_a_page_without_the_marks_stays_as_it_is(tmp_path) -> None:
    from benchmarks.pages.stored import write_part

    page = tmp_path / "page.md"
    page.write_text("before\n<begin>\nold\n<end>\nbetween\n<end>\nafter\n")
    write_part(page, "<begin>", "<end>", ["new", "lines"])
    text = "before\n<begin>\nnew\nlines\n<end>\nbetween\n<end>\nafter\n"
    assert page.read_text() == text
    with pytest.raises(SystemExit, match="must have the line '<start>' once, and the line '<end>' after it"):
        write_part(page, "<start>", "<end>", [])
    assert page.read_text() == text


def test_hits_are_kept_and_compared_image_by_image() -> None:
    from benchmarks.pages.post_training.hits import accuracy, difference, packed, unpacked

    of, to = torch.rand(1001) < 0.9, torch.rand(1001) < 0.9
    assert torch.equal(unpacked(packed(of), 1001), of)
    assert accuracy(torch.tensor([True, False, True, True])) == 75
    only_of, only_to = int((of & ~to).sum()), int((to & ~of).sum())
    found = difference(of, to)
    assert found.points == pytest.approx(100 * (only_of - only_to) / 1001)
    variance = (only_of + only_to) / 1001 - ((only_of - only_to) / 1001) ** 2  # of each image's difference
    assert found.error == pytest.approx(100 * (variance / 1000) ** 0.5)
    assert not difference(of, of).decided
    with pytest.raises(ValueError, match="hits are of 1001 and of 5 images; compare models on the same images"):
        difference(of, to[:5])


@needs_data
@pytest.mark.data
@pytest.mark.slow
def test_accuracy_of_post_training_methods_beside_others_and_its_page(tmp_path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("matplotlib")
    out, page = tmp_path / "ptq.json", tmp_path / "accuracy.md"
    options = ["--only", "minmax", "qdrop", "smooth_quant", "quantize_static, minmax", "--out", str(out)]
    results, printed = run_training("ptq", *options)
    rows = {(row["method"], row["bits"]): row for row in results["rows"]}
    assert {name for name, _ in rows} == {"minmax", "qdrop", "smooth_quant", "quantize_static, minmax"}
    assert {bits for _, bits in rows} == {"W8A8", "W4A8", "W4A4"}
    assert all(bool(row["hits"]) != bool(row["failure"]) for row in rows.values())
    assert "there is none here" in rows["smooth_quant", "W8A8"]["failure"]
    assert "qtoolkit less the other tool" in printed
    assert results["test_images"] == 100
    again, _ = run_training("ptq", *options)
    measured = [row for row in results["rows"] if row["hits"]]
    assert [row for row in again["rows"] if row["hits"]] == measured  # nothing is measured twice
    page.write_text("before\n<!-- begin: benchmarks/pages/ptq.py -->\nold\n<!-- end -->\nafter\n")
    processes.python("-m", "benchmarks.pages.ptq", "--out", out, "--page", page).check_returncode()
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("<!-- end -->\nafter\n")
    assert "old" not in text
    assert "| minmax | 89.00 (+0.00 ± 0.00 ~) |" in text
    assert "- smooth_quant: it takes norms" in text
    assert "W4A4" in (tmp_path / "ptq.svg").read_text()
    (other,) = (line for line in text.splitlines() if line.startswith("| minmax | quantize_static, minmax |"))
    assert other.count("±") == 3


@needs_data
@pytest.mark.data
@pytest.mark.slow
def test_both_tools_quantize_the_same_tensors(tmp_path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    from benchmarks.export_models import resnet20_of
    from benchmarks.pages.post_training.methods import PLAIN, W4A4, Network, prepared
    from benchmarks.pages.post_training.others import quantized_file

    network = Network(resnet20_of(None), torch.randn(64, 3, 32, 32), 1)
    graph = onnx.load(quantized_file(network, W4A4, "MinMax", True, tmp_path)).graph
    types = {each.name: each.data_type for each in graph.initializer}
    zeros = {node.input[0]: types[node.input[2]] for node in graph.node if node.op_type == "QuantizeLinear"}
    four, eight = onnx.TensorProto.UINT4, onnx.TensorProto.UINT8
    assert sorted(zeros.values()) == sorted([four] * 18 + [eight] * 2)
    ours = qt.quantizers_of(prepared(network, W4A4, PLAIN, PLAIN))
    bits = [q.spec.bits for q in ours.values() if not q.of_weight]
    assert sorted(bits) == [4] * 18 + [8] * 2


@needs_data
@pytest.mark.data
@pytest.mark.slow
def test_super_resolution_and_its_page(tmp_path) -> None:
    out, page = tmp_path / "super_resolution.json", tmp_path / "accuracy.md"
    options = [
        "--only",
        "float",
        "mse",
        "mse, equalized",
        "lsq_plus",
        "--bits",
        "W8A8",
        "--seeds",
        "0",
        "--out",
        str(out),
    ]
    results, printed = run_training("super_resolution", *options)
    rows = {row["method"]: row for row in results["rows"]}
    assert set(rows) == {"float", "mse", "mse, equalized", "lsq_plus"}
    assert results["float_model"]["y"] == pytest.approx(36.890, abs=0.001)  # shared/data has this figure of "baby"
    assert rows["float"]["calibrated"] == results["float_model"]["y"]
    assert results["float_model"]["y"] - 1.5 < rows["mse"]["y"] < results["float_model"]["y"]
    assert rows["mse"]["calibrated"] == rows["mse"]["y"]
    assert rows["lsq_plus"]["calibrated"] != rows["lsq_plus"]["y"]
    assert "FSRCNN x2, Set5, trained" in printed
    again, _ = run_training("super_resolution", *options)
    assert again["rows"] == results["rows"]  # nothing is measured twice
    assert "| mse | -" in written_page("super_resolution", out, page)


@needs_data
@pytest.mark.data
@pytest.mark.slow
def test_text_encoder_and_its_page(tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors.torch")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    encoder = transformers.BertModel(transformers.BertConfig(**sizes), add_pooling_layer=False)
    encoder.config.to_json_file(tmp_path / "config.json")
    safetensors.save_file(dict(encoder.state_dict()), tmp_path / "model.safetensors")
    out, page = tmp_path / "text_encoder.json", tmp_path / "accuracy.md"
    methods = ["minmax", "traced, minmax", "groups of 32, per token, gptq", "per channel, lsq, distilled"]
    options = ["--weights", str(tmp_path), "--only", *methods, "--out", str(out)]
    results, printed = run_training("text_encoder", *options)
    assert [row["method"] for row in results["rows"]] == methods
    of_float = results["float_model"]["spearman"]
    assert all(0 < abs(row["spearman"] - of_float) < 10 for row in results["rows"])  # of an encoder with random weights
    assert "all-MiniLM-L6-v2, STS-B dev, 60 pairs" in printed
    again, _ = run_training("text_encoder", *options)
    assert again["rows"] == results["rows"]
    assert "| W8A8 | minmax |" in written_page("text_encoder", out, page)


@pytest.mark.slow
def test_detection_and_its_page(tmp_path) -> None:
    pytest.importorskip("pycocotools")
    out = tmp_path / "detection.json"
    methods = ["float", "tensorrt, calibrated, last layers float", "tensorrt, trained, last layers float, taught"]
    options = ["--only", *methods, "--seeds", "0", "--bins", "8", "--checkpoints", str(tmp_path), "--out", str(out)]
    results, printed = run_training("detection", *options)
    rows = {row["method"]: row for row in results["rows"]}
    assert list(rows) == methods
    assert rows[methods[1]]["before"] == rows[methods[1]]["ap"]
    assert "boxes by DFL of 8 bins" in printed
    again, _ = run_training("detection", *options)
    assert again["rows"] == results["rows"]  # nothing is measured twice
    assert "| tensorrt | trained | float | float | 1 |" in written_page("detection", out, tmp_path / "detection.md")


def test_boxes_of_a_detector_that_finds_all_have_an_ap_of_100() -> None:
    pytest.importorskip("pycocotools")
    from benchmarks.training.detection import Data, average_precision, loss_of_head, places

    data = Data.drawn(6, 0)
    centers, strides = places()
    sides = torch.full((6, 4, len(centers)), 0.5)
    logits = torch.full((6, 3, len(centers)), -9.0)
    for image, (boxes, labels) in enumerate(zip(data.boxes, data.labels, strict=True)):
        for box, label in zip(boxes[labels >= 0], labels[labels >= 0], strict=True):
            place = int((centers - (box[:2] + box[2:]) / 2).square().sum(1).argmin())
            ends = torch.cat([centers[place] - box[:2], box[2:] - centers[place]]) / strides[place]
            sides[image, :, place], logits[image, label, place] = ends, 9.0
    fine = strides[:, 0] == strides.min()
    maps = [(each[..., fine].unflatten(2, (8, 8)), each[..., ~fine].unflatten(2, (4, 4))) for each in (sides, logits)]

    class Perfect(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> object:
            return None, maps

    assert average_precision(Perfect(), data).mean == pytest.approx(100)
    right = loss_of_head(maps, data.boxes, data.labels, 1)
    wrong = loss_of_head((maps[0], [-each for each in maps[1]]), data.boxes, data.labels, 1)
    assert right < 0.2 < wrong


def written_page(script: str, out: Path, page: Path) -> str:
    """Return the page that a benchmark writes its results into, which must keep what is around its part."""
    page.write_text(f"before\n<!-- begin: benchmarks/pages/{script}.py -->\nold\n<!-- end -->\nafter\n")
    processes.python("-m", f"benchmarks.pages.{script}", "--out", out, "--page", page).check_returncode()
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    return text


@needs_data
@pytest.mark.data
@pytest.mark.slow
def test_oscillating_weights_are_trained_in_four_ways_and_their_page(tmp_path) -> None:
    out = tmp_path / "oscillation.json"
    options = ["--bits", "3", "--seeds", "0", "--epochs", "1", "--checkpoints", str(tmp_path), "--out", str(out)]
    some, _ = run_training("oscillation", "--only", "float", "plain", *options)
    results, printed = run_training("oscillation", *options)
    assert results["rows"][:2] == some["rows"]  # nothing is trained twice
    rows = {row["training"]["method"]: row for row in results["rows"]}
    assert list(rows) == ["float", "plain", "dampening", "freezing", "freezing, short"]
    assert [row["training"]["bits"] for row in rows.values()] == [32, 3, 3, 3, 3]
    assert results["float_weights"] == rows["float"]["calibrated"] > 15  # after 40 steps
    assert len({row["calibrated"] for name, row in rows.items() if name != "float"}) == 1
    assert rows["plain"]["trained"] == rows["freezing"]["trained"] == rows["freezing, short"]["trained"]  # in two steps
    assert "MobileNetV2 for 32 x 32 pixels, CIFAR-10: accuracy on 100 images" in printed
    text = written_page("oscillation", out, tmp_path / "tuning.md")
    assert "| 1 | 0.01 | 3 | dampening | 1 |" in text
    assert "--only float plain" in text


@pytest.mark.slow
def test_what_keeps_weights_from_oscillating_is_resumed_with_the_model(tmp_path) -> None:
    from benchmarks.pages.oscillation import Tracked, quantized
    from benchmarks.training.cifar import Data, Run, Schedule
    from benchmarks.training.mobilenet import MobileNet

    generator = torch.Generator().manual_seed(0)
    images = torch.randn(40, 3, 32, 32, generator=generator), torch.randint(10, (40,), generator=generator)
    data, schedule = Data(images, images, torch.zeros(3)), Schedule(40, 2, 20)

    def run(method: str, checkpoint: str) -> Run:
        torch.manual_seed(0)
        model = Tracked(quantized(MobileNet().train(), 3, [images[0]]), method, schedule.steps)
        run = Run(model, data, schedule, 0, tmp_path / checkpoint)
        model.join(run.optimizer)
        return run

    weights = {}
    for method in ("plain", "dampening"):
        whole, ended = run(method, f"{method}.pt"), run(method, "ended.pt")
        whole.train(method)
        for batch in ended._epoch():
            ended._train_on(*batch)
        ended._save()
        resumed = run(method, "ended.pt")
        assert resumed.model.freezing.steps == resumed.model.dampening.steps == 2
        assert resumed.model.freezing.report() == ended.model.freezing.report()
        resumed.train(method)
        state = resumed.model.state_dict()
        for name, value in whole.model.state_dict().items():
            assert name == "_extra_state" or torch.equal(value, state[name]), name
        assert resumed.model.freezing.report() == whole.model.freezing.report()
        assert [row.weights for row in whole.model.freezing.report().layers][:3] == [144, 256, 768]
        weights[method] = state["model.blocks.3.0.weight"]
        (tmp_path / "ended.pt").unlink()
    assert not torch.equal(weights["plain"], weights["dampening"])


@needs_data
@pytest.mark.data
@pytest.mark.slow
def test_trainings_from_scratch_and_their_page(tmp_path) -> None:
    from benchmarks.pages.from_scratch import TRAINED

    out = tmp_path / "from_scratch.json"
    results, printed = run_training("from_scratch", "--seeds", "0", "--out", str(out))
    found = [(row["network"], row["trained"]) for row in results["rows"]]
    assert found == [(network, kind) for network in ("mnist", "resnet20") for kind in TRAINED]
    assert "From random weights, three epochs" in printed
    assert "| mnist | W8A8 | 1 |" in written_page("from_scratch", out, tmp_path / "accuracy.md")


@needs_data
@pytest.mark.data
@pytest.mark.slow
def test_digits_from_scratch_are_learned_as_in_float() -> None:
    """Nothing was, with ranges by the initial statistics; little, with learned scales that stayed as the statistics settled."""
    from benchmarks.pages.from_scratch import digits, trained

    data = digits(12_000, 1000)
    kinds = "float", "W8A8", "W8A8, lsq"
    of_float, fixed, learned = (trained("mnist", kind, 0, data)["accuracy"] for kind in kinds)
    assert of_float > 50
    assert min(fixed, learned) > of_float - 5


def test_files_of_litert_beside_those_of_litert_quantizer(tmp_path) -> None:
    for package in ("timm", "ai_edge_litert", "litert_quantizer"):
        pytest.importorskip(package, reason=f"files of LiteRT are not quantized by two tools; pip install {package}")
    from benchmarks.pages import litert

    name, model, calibration, _ = next(litert.random_networks(quick=True))
    paths = litert.files_of(model, calibration, tmp_path)
    assert [*paths] == [litert.FLOAT, litert.OURS, litert.THEIRS]
    x, logits = calibration[:8], model(calibration[:8]).detach()
    for path in paths.values():  # the networks are the same
        given = litert.accuracy_of_file(path, x, logits.argmax(1))
        assert given >= (100 if path == paths[litert.FLOAT] else 75)
    rows = [*litert.peers_of(name, model, calibration, (x, logits.argmax(1)))]
    assert [(row.network, row.file) for row in rows] == [("ResNet-8", file) for file in paths]
    assert all(row.bytes < rows[0].bytes / 3 for row in rows[1:])
