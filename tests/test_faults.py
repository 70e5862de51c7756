"""Faults around the package: Ctrl-C, hostile state dicts, many threads on one op, processes that fork."""

import copy
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader

import qtoolkit as qt
from qtoolkit.compat.checkpoints import load_amax
from qtoolkit.tuning.rounding.saved import SavedUnits
from tests import processes
from tests.fuzzing import changed, changes, examples

PACKAGE = str(Path(qt.__file__).parent)
X = torch.randn(4, 2, 5, 5, generator=torch.Generator().manual_seed(0))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))


def calibrated() -> nn.Module:
    prepared = qt.prepare(net().train(), X, backend="onnxruntime")
    qt.calibrate(prepared, [X], progress=False)
    return prepared


# ---- Ctrl-C


class Interrupting(nn.Module):
    """Gives what it gets, and once, in some call, gets a Ctrl-C as the process does."""

    def __init__(self) -> None:
        super().__init__()
        self.calls_left = -1

    def forward(self, x: Tensor) -> Tensor:
        self.calls_left -= 1
        if self.calls_left == 0:
            signal.raise_signal(signal.SIGINT)
        return x


@contextmanager
def interrupted_by_hook(model: nn.Module, call: int) -> Iterator[None]:
    """A Ctrl-C in the given call of the model."""
    inner = Interrupting()
    inner.calls_left = call

    def pass_through(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        inner(args[0])

    handle = model.register_forward_pre_hook(pass_through)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        handle.remove()
        signal.signal(signal.SIGINT, handler)


def state(model: nn.Module) -> dict[str, Any]:
    modes = {name: module.training for name, module in model.named_modules()}
    switches = {name: (q.observing, q.quantizing) for name, q in qt.quantizers_of(model).items()}
    return {"values": copy.deepcopy(model.state_dict()), "modes": modes, "switches": switches}


def assert_unchanged(model: nn.Module, before: dict[str, Any]) -> None:
    after = state(model)
    assert (after["modes"], after["switches"]) == (before["modes"], before["switches"])
    for name, value in before["values"].items():
        same = value is after["values"][name] or not isinstance(value, Tensor)
        assert same or torch.equal(value, after["values"][name]), name
    assert torch.is_grad_enabled()
    assert not torch.onnx.is_in_onnx_export()


@pytest.mark.parametrize("method", [None, "mse"])
@pytest.mark.parametrize("call", [1, 2])
def test_ctrl_c_in_calibrate(call: int, method: str | None) -> None:
    model = calibrated()
    before = state(model)
    with interrupted_by_hook(model, call):
        qt.calibrate(model, [3 * X] * 2, progress=False, **({} if method is None else {"method": method}))
    assert_unchanged(model, before)
    assert qt.calibrate(model, [3 * X], progress=False) is not None
    assert not torch.equal(model.state_dict()["activation_quantizers.input_1.observer.hi"], X.max())


def test_ctrl_c_in_reconstruct() -> None:
    model = calibrated().eval()
    before = state(model)
    with interrupted_by_hook(model.get_submodule("4"), 3):
        qt.tuning.reconstruct(model, [X], steps=4, progress=False)
    assert_unchanged(model, before)
    model(X)


AFTER_OPENVINO = """
import signal, sys, torch, qtoolkit as qt
model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.ReLU()).eval()
for name in ("one.onnx", "other.onnx"):
    result = qt.quantize(model, [torch.rand(1, 1, 8, 8)], "openvino", sys.argv[1] + "/" + name, progress=False)
    assert list(result.verification.runtimes) == ["openvino"]
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.slow
def test_ctrl_c_after_openvino(tmp_path) -> None:
    pytest.importorskip("openvino")
    ran = processes.python("-c", AFTER_OPENVINO, tmp_path)
    assert (ran.returncode, ran.stdout.splitlines()[-1:]) == (0, ["interrupted"]), ran.stderr


@contextmanager
def interrupted_at(call: int | None) -> Iterator[list[str]]:
    """A Ctrl-C as a function of the package begins: in the given call of any. Gives the functions that were called."""
    called: list[str] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            called.append(frame.f_code.co_qualname)
            if len(called) == call:
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        yield called
    except KeyboardInterrupt:
        assert len(called) == call
    finally:
        sys.setprofile(None)


@pytest.mark.slow
@pytest.mark.parametrize(("exporter", "moments"), [("torchscript", 25), ("dynamo", 6)])
def test_ctrl_c_at_any_moment_of_export(tmp_path, exporter: str, moments: int) -> None:
    pytest.importorskip("onnxscript")
    model, path = calibrated().eval(), tmp_path / "net.onnx"
    export = partial(qt.export_onnx, model, X, path, exporter=exporter, verify=False, progress=False)
    export()
    with interrupted_at(None) as called:
        export()
    before, whole = state(model), path.read_bytes()
    for moment in range(moments):
        with interrupted_at(1 + moment * len(called) // moments) as reached:
            export()
        assert len(reached) < len(called), f"not interrupted in {reached[-1]}"
        assert_unchanged(model, before)
        assert path.read_bytes() == whole
        assert os.listdir(tmp_path) == ["net.onnx"], reached[-1]
    export()
    assert path.read_bytes() == whole


# ---- state dicts

VALUES = (
    *(None, 3, "x", [], {}, b"\x80", torch.zeros(()), torch.zeros(0), torch.full((4,), float("nan"))),
    *(torch.ones(4, 1, 1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.complex64), torch.ones(1, device="meta")),
    *(
        torch.zeros(2, 3).to_sparse(),
        torch.ones(4, dtype=torch.bool),
        torch.full((), float("inf")),
        torch.tensor([-1.0]),
    ),
    torch.ones(1, dtype=torch.float8_e4m3fn),
)
PREPARED = calibrated()
CONVERTED = qt.convert(PREPARED)
SAVED = {"prepared": PREPARED.state_dict(), "converted": CONVERTED.state_dict()}
CHANGES = (*range(len(VALUES)), "removed", "renamed")
LOADERS: dict[str, Callable[[nn.Module, dict], object]] = {
    "strict": lambda model, saved: model.load_state_dict(saved),
    "not strict": lambda model, saved: model.load_state_dict(saved, strict=False),
    "convert": lambda model, saved: qt.convert(model, state_dict=saved),
    "load_amax": lambda model, saved: load_amax(
        model, {name.replace("scale", "_amax"): value for name, value in saved.items()}, strict=False
    ),
}


@pytest.mark.slow
@examples(120)
@given(
    st.sampled_from(sorted(SAVED)),
    st.lists(
        st.tuples(st.integers(0, 999), st.sampled_from((*range(len(VALUES)), "removed", "renamed"))),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from(sorted(LOADERS)),
)
def test_hostile_state_dicts(kind: str, drawn: list[tuple[int, int | str]], loader: str) -> None:
    saved: dict[str, Any] = dict(SAVED[kind])
    for place, what in drawn:
        name = sorted(saved)[place % len(saved)]
        if isinstance(what, int):
            saved[name] = VALUES[what]
        else:
            value = saved.pop(name)
            saved |= {f"{name}.x": value} if what == "renamed" else {}
    model = copy.deepcopy(PREPARED)
    told = ""
    try:
        LOADERS[loader](model, saved)
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        told = str(error)
    assert "not implemented" not in told
    assert "meta tensors" not in told
    str(model)
    with qt.disable_quantization(model):
        model(X)


@pytest.mark.parametrize(
    "value", [torch.ones((), dtype=torch.int64), torch.ones((), device="meta"), torch.ones(()).to_sparse()]
)
def test_entries_without_numbers_are_named(value: Tensor) -> None:
    name = "activation_quantizers.input_1"
    with pytest.raises(
        TypeError, match=rf"convert: state_dict: '{name}.scale' must be a dense tensor of floating-point"
    ):
        qt.convert(PREPARED, state_dict={**CONVERTED.state_dict(), f"{name}.scale": value})
    with pytest.raises(TypeError, match=rf"load_amax: '{name}._amax' must be a dense tensor of floating-point"):
        load_amax(PREPARED, {f"{name}._amax": value})


@examples(60)
@given(changes(), st.none() | st.integers(0, 1 << 20))
def test_damaged_units_of_an_interrupted_reconstruction(folder, drawn, end: int | None) -> None:
    units = SavedUnits(folder, nn.Linear(1, 1), "options")
    units.save(0, {"weights": torch.ones(3)})
    (file,) = folder.iterdir()
    file.write_bytes(changed(file.read_bytes(), drawn, end))
    try:
        units.load(0)
    except ValueError as error:
        told = str(error)
    else:
        return
    assert re.fullmatch(r"reconstruct: '.*unit-0000.pt' is (damaged|from another model).*\.", told), told


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("units")


# ---- threads and processes


GRID = {"scale": torch.tensor(0.02), "zero_point": None, "qmin": -128, "qmax": 127}


def computed(x: Tensor) -> list[Tensor]:
    ops = torch.ops.qtoolkit
    counts, low, high = torch.zeros(64, dtype=torch.int64), torch.zeros(1), torch.zeros(1)
    ops.observe_histogram_(x, counts, low, high)
    return [qt.ops.fake_quant(x, **GRID), *ops.minmax(x), counts, low, high]


def gradient(x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    qt.ops.fake_quant(x, **GRID).square().sum().backward()
    return x.grad


def test_eight_threads_on_one_op() -> None:
    x = torch.randn(64, 1000)
    expected, found = [*computed(x), gradient(x)], [[] for _ in range(8)]

    def run(results: list[Tensor]) -> None:
        for _ in range(20):
            results[:] = [*computed(x), gradient(x)]

    threads = [threading.Thread(target=run, args=(results,)) for results in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(one, other) for results in found for one, other in zip(results, expected, strict=True))


class Samples(torch.utils.data.Dataset):
    """Quantizes in the process of its loader."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, place: int) -> list[Tensor]:
        return computed(torch.full((2, 3), 0.1 * place))


def test_ops_in_the_forked_processes_of_a_loader() -> None:
    computed(torch.randn(1 << 18))  # the parent's threads have run
    loader = DataLoader(Samples(), batch_size=None, num_workers=2, multiprocessing_context="fork")
    for place, sample in enumerate(loader):
        assert all(torch.equal(one, other) for one, other in zip(sample, Samples()[place], strict=True))
