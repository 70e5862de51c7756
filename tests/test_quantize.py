"""One call from a float model to a verified file: the same as its steps, and nothing silent on the way."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import qtoolkit as qt
from qtoolkit.export import Verdict
from qtoolkit.export.verification.deployed import RuntimeCodes
from qtoolkit.extras import install_command
from qtoolkit.runtimes import table
from tests.test_prepare_safety import assert_unchanged, snapshot

FAST = {"exporter": "torchscript", "progress": False}
IMAGES = torch.rand(12, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Batch norm, dropout, and the view of many a first network."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.drop, self.fc = nn.Dropout(), nn.Linear(8 * 9, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn(self.conv(x))), 2)
        return self.fc(self.drop(x.view(x.size(0), -1)))


class Branching(nn.Module):
    """A branch on values, which no trace has."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3), nn.Linear(8 * 36, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).flatten(1)
        return self.fc(y if y.max() > 0 else -y)


class Inner(nn.Module):
    """The branch in a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 3, 3, padding=1), Branching()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x).relu())


class Keywords(nn.Module):
    """Inputs by position and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.fc(x * mask)


def net(kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return kind().eval()


# ---- the steps


def test_it_is_its_steps(tmp_path) -> None:
    """One call writes the bytes that the steps write, and has their reports."""
    result = qt.quantize(net(), IMAGES.split(4), "onnxruntime", tmp_path / "one.onnx", **FAST)
    prepared = qt.prepare(net(), IMAGES[:4], backend="onnxruntime")
    calibration = qt.calibrate(prepared, IMAGES.split(4), progress=False)
    converted = qt.convert(prepared)
    export = qt.export_onnx(converted, IMAGES[:4], tmp_path / "steps.onnx", dynamic_batch=True, **FAST)
    assert result.export.path.read_bytes() == export.path.read_bytes()
    assert str(result.calibration) == str(calibration)
    assert str(result.report) == str(qt.quantization_report(prepared))
    assert torch.equal(result.converted(IMAGES), converted(IMAGES))
    assert torch.equal(result.prepared(IMAGES), prepared(IMAGES))
    assert result.verdict is Verdict.EQUAL
    assert result.verification.runtimes["onnxruntime"].codes.compared > 0
    assert result.notes == ()


def test_the_default_exporter_and_another_size_of_batch(tmp_path) -> None:
    pytest.importorskip("onnxscript")
    result = qt.quantize(net(), [IMAGES[:1]], "onnxruntime", tmp_path / "model.onnx", progress=False)
    assert result.verdict is Verdict.EQUAL
    session = onnxruntime.InferenceSession(str(result.export.path))
    assert session.run(None, {"x": IMAGES.numpy()})[0].shape == (12, 4)


def test_a_constant_batch(tmp_path) -> None:
    result = qt.quantize(net(), [IMAGES[:4]], "onnxruntime", tmp_path / "model.onnx", dynamic_batch=False, **FAST)
    assert onnxruntime.InferenceSession(str(result.export.path)).get_inputs()[0].shape == [4, 3, 8, 8]


def test_a_mapping_a_method_and_a_number_of_batches_reach_their_steps(tmp_path) -> None:
    mapping = qt.QConfigMapping().set_module_name("fc", None)
    options = {"qconfig_mapping": mapping, "method": "mse", "max_batches": 2}
    result = qt.quantize(net(), IMAGES.split(4), "onnxruntime", tmp_path / "model.onnx", **options, **FAST)
    assert result.calibration.batches == 2
    assert "fc" in [line.name for line in result.report.left_float]
    quantizers = qt.quantizers_of(result.prepared)
    assert {q.spec.observer_args.get("method") for q in quantizers.values() if not q.of_weight} == {"mse"}


@pytest.mark.filterwarnings("ignore:quantize")
@pytest.mark.parametrize("kind", [Net, Branching], ids=["graph", "replaced"])
def test_what_is_excluded_stays_in_float(kind: type[nn.Module], tmp_path) -> None:
    result = qt.quantize(net(kind), [IMAGES], "onnxruntime", tmp_path / "model.onnx", exclude="fc", **FAST)
    assert [line.name for line in result.report.left_float if line.name == "fc"] == ["fc"]


def test_labels_of_a_batch_are_left_out_and_said_once(tmp_path) -> None:
    data = DataLoader(TensorDataset(IMAGES, torch.zeros(12)), 4)
    with pytest.warns(UserWarning, match="labels") as warned:
        result = qt.quantize(net(), data, "onnxruntime", tmp_path / "model.onnx", **FAST)
    assert [str(each.message)[:30] for each in warned if "labels" in str(each.message)] == [
        "quantize: Net.forward(x) does "
    ]
    assert (result.calibration.batches, result.verdict) == (3, Verdict.EQUAL)


def test_a_model_in_training_mode_gives_the_file_of_eval_mode_and_does_not_change(tmp_path) -> None:
    model = net().train()
    model.bn.eval()  # frozen
    before = snapshot(model)
    random = torch.get_rng_state()
    result = qt.quantize(model, IMAGES.split(4), "onnxruntime", tmp_path / "train.onnx", **FAST)
    assert_unchanged(before, model)
    assert torch.equal(random, torch.get_rng_state())
    other = qt.quantize(net(), IMAGES.split(4), "onnxruntime", tmp_path / "eval.onnx", **FAST)
    assert result.export.path.read_bytes() == other.export.path.read_bytes()
    assert not result.prepared.training


# ---- batches


def stream() -> Iterator[Tensor]:
    yield from IMAGES.split(4)


@pytest.mark.parametrize("batches", [stream, lambda: IMAGES.split(4), lambda: DataLoader(IMAGES, 4)])
def test_every_batch_counts_once(batches, tmp_path) -> None:
    """An iterator, whose first batch is gone once it was looked at, too."""
    result = qt.quantize(net(), batches(), "onnxruntime", tmp_path / "model.onnx", **FAST)
    assert result.calibration.batches == 3
    assert result.calibration.observed["activation_quantizers.x"] == (float(IMAGES.min()), float(IMAGES.max()))


def test_forward_says_what_the_model_takes_of_a_batch(tmp_path) -> None:
    data = DataLoader(TensorDataset(IMAGES, torch.zeros(12)), 4)
    options = {"forward": lambda model, batch: model(batch[0]), **FAST}
    result = qt.quantize(net(), data, "onnxruntime", tmp_path / "model.onnx", **options)
    assert (result.calibration.batches, result.verdict) == (3, Verdict.EQUAL)


@pytest.mark.parametrize("form", ["mapping", "both"])
def test_inputs_by_name(form: str, tmp_path) -> None:
    batch = {"x": torch.rand(4, 6), "mask": torch.ones(4, 6)}
    how = {} if form == "mapping" else {"forward": lambda model, batch: model(batch["x"], mask=batch["mask"])}
    result = qt.quantize(net(Keywords), [batch], "onnxruntime", tmp_path / "model.onnx", **how, **FAST)
    assert [each.name for each in onnxruntime.InferenceSession(str(result.export.path)).get_inputs()] == ["x", "mask"]


# ---- models that do not trace


def test_a_submodule_that_does_not_trace_is_a_leaf_module_and_that_is_said(tmp_path) -> None:
    with pytest.warns(UserWarning, match=r"quantize: 'head' cannot be traced.*head.*flatten|y\.max"):
        result = qt.quantize(net(Inner), [IMAGES], "onnxruntime", tmp_path / "model.onnx", **FAST)
    assert isinstance(result.prepared, torch.fx.GraphModule)
    assert any("'head' cannot be traced" in note for note in result.notes)
    assert "'head' cannot be traced" in str(result)
    assert {"stem", "head.conv", "head.fc"} <= {line.name for line in result.report.quantized}


def test_a_model_that_does_not_trace_is_quantized_by_module_replacement_and_that_is_said(tmp_path) -> None:
    with pytest.warns(UserWarning, match=r"quantize: Branching cannot be traced.*quant_modules\.replace") as warned:
        result = qt.quantize(net(Branching), [IMAGES], "onnxruntime", tmp_path / "model.onnx", **FAST)
    said = "\n".join(str(each.message) for each in warned)
    assert "symbolically traced variables" in said
    assert "y if y.max() > 0 else -y" in said
    assert not isinstance(result.prepared, torch.fx.GraphModule)
    assert type(result.prepared.conv) is qt.nn.QuantConv2d
    assert result.export.verification.quantizer_codes.differing == 0
    assert result.verdict is None
    assert 'arithmetic="integer" needs the graph of the model' in result.notes[-1]


def test_torch_export_s_refusal_says_what_to_type(tmp_path) -> None:
    """The default exporter does not take a branch on values either; nothing is written."""
    path = tmp_path / "model.onnx"
    with (
        pytest.warns(UserWarning, match="cannot be traced"),
        pytest.raises(RuntimeError, match="exporter='torchscript'"),
    ):
        qt.quantize(net(Branching), [IMAGES], "onnxruntime", path, progress=False)
    assert list(tmp_path.iterdir()) == []


# ---- the verdict


def test_a_target_without_a_runtime_here_has_no_verdict_and_says_so(tmp_path) -> None:
    result = qt.quantize(net(), [IMAGES], "tensorrt10", tmp_path / "model.onnx", **FAST)
    assert (result.verdict, result.verification) == (None, None)
    assert "tensorrt10" in result.notes[-1]
    assert "verdict: none" in str(result)
    assert result.export.verification.layer_codes.compared > 0


def test_a_file_in_float16_is_compared_in_onnxruntime_which_computes_it_in_float(tmp_path) -> None:
    result = qt.quantize(net(), [IMAGES], "tensorrt", tmp_path / "model.onnx", **FAST)
    (codes,) = result.verification.runtimes.values()
    assert codes.runtime.startswith("onnxruntime")
    assert result.verdict in (Verdict.EQUAL, Verdict.FLOAT16)
    assert codes.codes.compared
    assert not codes.integer_layers
    assert not result.notes
    assert "Its quantized values are compared layer by layer with the float16 model" in str(result)


def test_a_runtime_that_is_not_installed_is_named_with_the_command(tmp_path, monkeypatch) -> None:
    missing = dataclasses.replace(table.RUNTIMES["openvino"], package="no_such_package")
    monkeypatch.setitem(table.RUNTIMES, "openvino", missing)
    result = qt.quantize(net(), [IMAGES], "openvino", tmp_path / "model.onnx", **FAST)
    assert result.verdict is None
    assert install_command("openvino") in result.notes[-1]


def test_openvino_runs_its_own_file(tmp_path) -> None:
    pytest.importorskip("openvino")
    result = qt.quantize(net(), [IMAGES], "openvino", tmp_path / "model.onnx", **FAST)
    assert list(result.verification.runtimes) == ["openvino"]
    assert result.verdict in (Verdict.EQUAL, Verdict.ROUNDING)


def test_codes_that_differ_are_a_warning_with_the_cause_and_the_file_stays(tmp_path, monkeypatch) -> None:
    """As on a processor whose int8 sums saturate: layer by layer the file is the model's."""
    monkeypatch.setattr(RuntimeCodes, "verdict", Verdict.DIFFERENT)
    monkeypatch.setattr(RuntimeCodes, "_cause", lambda self: "verify: sums saturate.")
    with pytest.warns(UserWarning, match=r"quantize: .*model\.onnx.* verify: sums saturate\."):
        result = qt.quantize(net(), [IMAGES], "onnxruntime", tmp_path / "model.onnx", **FAST)
    assert result.verdict is Verdict.DIFFERENT
    assert result.export.path.exists()


def test_a_runtime_that_does_not_run_the_file_is_a_warning_and_a_note(tmp_path, monkeypatch) -> None:
    def refuses(*_: object) -> None:
        raise KeyError("an op it does not have")

    monkeypatch.setitem(table.EXECUTES, "onnxruntime", refuses)
    with pytest.warns(UserWarning, match="not end to end in onnxruntime: 'an op it does not have'"):
        result = qt.quantize(net(), [IMAGES], "onnxruntime", tmp_path / "model.onnx", **FAST)
    assert (result.verdict, len(result.notes)) == (None, 1)


def test_it_prints_the_file_the_layers_the_ranges_and_the_verdict(tmp_path) -> None:
    result = qt.quantize(net(), IMAGES.split(4), "onnxruntime", tmp_path / "model.onnx", **FAST)
    text = str(result)
    assert text.startswith(f"{tmp_path / 'model.onnx'}: ")
    for words in (
        r"2 layers and ops quantized, 0 left in float",
        r"ranges of \d+ quantizers from 3 batches",
        r"verdict: equal",
        r"0 of \d+ differ",
    ):
        assert re.search(words, text), text
    assert max(len(line) for line in text.splitlines()) < 200
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.notes = ()


# ---- bad input


class Fails(Net):
    """Fails on the second of two batches."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.zeros(4, dtype=torch.complex64)  # no file has complex numbers


BAD = {
    "no model": (lambda path: (nn.Linear, [IMAGES], "onnxruntime", path), TypeError, "model must be"),
    "no batch": (lambda path: (net(), [], "onnxruntime", path), ValueError, "at least one batch"),
    "one tensor": (lambda path: (net(), IMAGES, "onnxruntime", path), TypeError, "iterable of batches"),
    "swapped": (lambda path: (net(), str(path), "onnxruntime", path), TypeError, "iterable of batches, .* got str"),
    "a backend": (lambda path: (net(), [IMAGES], "onnxruntim", path), ValueError, "did you mean 'onnxruntime'"),
    "a shape": (lambda path: (net(), [IMAGES[:, :2]], "onnxruntime", path), RuntimeError, "channels"),
    "a later batch": (lambda path: (net(), [IMAGES, IMAGES[:, :2]], "onnxruntime", path), RuntimeError, ""),
    "NaN": (lambda path: (net(), [IMAGES, IMAGES * torch.nan], "onnxruntime", path), ValueError, "NaN"),
    "no layer": (lambda path: (nn.ReLU(), [IMAGES], "onnxruntime", path), (ValueError, TypeError), ""),
    "an export": (lambda path: (net(Fails), [IMAGES], "onnxruntime", path), Exception, ""),
    "a lazy layer": (lambda path: (nn.LazyLinear(4), [IMAGES], "onnxruntime", path), Exception, "quantize: parameter"),
    "a wrapper": (
        lambda path: (nn.DataParallel(net()), [IMAGES], "onnxruntime", path),
        qt.UntraceableError,
        "quantize: the model is wrapped in DataParallel; call quantize on model.module first",
    ),
    "prepared": (
        lambda path: (qt.prepare(net(), backend="tensorrt"), [IMAGES], "onnxruntime", path),
        ValueError,
        "has quantizers already",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
def test_bad_input_leaves_no_half_file(case: str, old: bool, tmp_path) -> None:
    path = tmp_path / "model.onnx"
    if old:
        path.write_bytes(b"the model before")
    arguments, error, words = BAD[case]
    with pytest.raises(error, match=words):
        qt.quantize(*arguments(path), **FAST)
    assert [each.name for each in tmp_path.iterdir()] == ["model.onnx"] * old
    assert not old or path.read_bytes() == b"the model before"


@pytest.mark.parametrize(
    ("path", "error", "words"),
    [("", ValueError, "path"), (".", ValueError, "is a folder"), (5, TypeError, "path must be"), (None, TypeError, "")],
)
def test_a_path_that_no_file_can_have_is_found_before_any_batch_runs(path, error, words: str) -> None:
    def batches() -> Iterator[Tensor]:
        raise AssertionError("it ran")
        yield

    with pytest.raises(error, match=rf"quantize: .*{words}"):
        qt.quantize(net(), batches(), "onnxruntime", path, **FAST)


def test_without_the_extra_it_says_what_to_install_before_any_batch_runs(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    with pytest.raises(ImportError, match=re.escape(install_command("onnx"))):
        qt.quantize(net(), iter([]), "onnxruntime", tmp_path / "model.onnx", **FAST)


def test_forward_that_does_not_call_the_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"quantize: forward must call model"):
        qt.quantize(net(), [IMAGES], "onnxruntime", tmp_path / "m.onnx", forward=lambda model, x: model.conv(x), **FAST)
