"""Prepare, calibrate, convert, export and verify, by the number of layers: `pytest benchmarks/test_deploy.py`.

Each step runs once for each number of layers, after it ran for a model of 20 layers: what it imports then is there. The first
row is what torch, torch.ao or onnxruntime does at that point with 20 layers.
"""

import copy
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from pathlib import Path

import torch
from torch import nn

import qtoolkit as qt
from benchmarks.export_models import bytes_of_file
from benchmarks.measure import Case
from benchmarks.rows import Group, Settings

LAYERS = (20, 80, 320)
FOLDER = tempfile.TemporaryDirectory()


class Workflow:
    """A model of convolutions with batch norms and ReLUs on its way from float to a verified file."""

    def __init__(self, layers: int) -> None:
        torch.manual_seed(0)
        inputs = [3, *[8] * (layers - 1)]
        blocks = ((nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for channels in inputs)
        self.model = nn.Sequential(*(module for block in blocks for module in block)).eval()
        self.x = torch.randn(1, 3, 16, 16)
        self.path = Path(FOLDER.name) / f"{layers}.onnx"
        self.float_path = Path(FOLDER.name) / f"float_{layers}.onnx"

    @cached_property
    def prepared(self) -> nn.Module:
        """The model prepared and calibrated."""
        prepared = self.prepare()
        qt.calibrate(prepared, [self.x], progress=False)
        return prepared

    @cached_property
    def converted(self) -> nn.Module:
        """The model converted."""
        return self.convert()

    def prepare(self) -> nn.Module:
        return qt.prepare(self.model, (self.x,), backend="onnxruntime")

    def calibrate(self) -> None:
        qt.calibrate(self.prepared, [self.x], progress=False)

    def convert(self) -> nn.Module:
        return qt.convert(self.prepared)

    def export(self) -> None:
        with warnings.catch_warnings(action="ignore"):  # of torch's exporter
            qt.export_onnx(self.converted, self.x, self.path, verify=False)

    def verify(self) -> None:
        qt.export.verify(self.converted, self.x, self.path)

    @cached_property
    def prepared_by_torch(self) -> nn.Module:
        """The model prepared by torch.ao's FX mode."""
        return self.prepare_by_torch()

    def prepare_by_torch(self) -> nn.Module:
        from benchmarks.peers.torch_ao import qat_model

        with warnings.catch_warnings(action="ignore"):  # it is deprecated
            return qat_model(copy.deepcopy(self.model).train(), self.x)

    def forward(self) -> None:
        with torch.no_grad():
            self.model(self.x)

    def convert_by_torch(self) -> nn.Module:
        from torch.ao.quantization.quantize_fx import convert_fx

        with warnings.catch_warnings(action="ignore"):
            return convert_fx(self.prepared_by_torch.eval())

    def export_float(self) -> None:
        with warnings.catch_warnings(action="ignore"):
            torch.onnx.export(self.model, (self.x,), self.float_path, dynamo=True, verbose=False)

    def run_float_file(self) -> None:
        import onnxruntime

        session = onnxruntime.InferenceSession(str(self.float_path), providers=["CPUExecutionProvider"])
        session.run(None, {session.get_inputs()[0].name: self.x.numpy()})


workflow = cache(Workflow)

STEPS: dict[str, tuple[str, Callable[[Workflow], object], Callable[[Workflow], object]]] = {
    "prepare": ("torch.ao FX", Workflow.prepare_by_torch, Workflow.prepare),
    "calibrate": ("float model's forward", Workflow.forward, Workflow.calibrate),
    "convert": ("torch.ao FX", Workflow.convert_by_torch, Workflow.convert),
    "export": ("torch.onnx.export, float", Workflow.export_float, Workflow.export),
    "verify": ("onnxruntime, float file", Workflow.run_float_file, Workflow.verify),
}


def ready_for(step: str, flow: Workflow) -> None:
    """Take a model up to a step."""
    if step == "calibrate":
        _ = flow.prepared
    elif step != "prepare":
        _ = flow.converted
    if step == "verify" and not flow.path.exists():
        flow.export()


def case_of(step: str, _: Settings, chosen: Sequence[str]) -> Case:
    theirs, torchs, ours = STEPS[step]
    first = workflow(LAYERS[0])
    flows = {layers: workflow(layers) for layers in LAYERS if str(layers) in chosen}
    if step == "verify":
        first.export_float()
    for flow in (first, *flows.values()):
        ready_for(step, flow)

    def warm_up() -> None:
        torchs(first)
        ours(first)

    work = {theirs: partial(torchs, first), **{str(layers): partial(ours, flow) for layers, flow in flows.items()}}
    files = {theirs: first.float_path, **{str(layers): flow.path for layers, flow in flows.items()}}
    sizes = {name: partial(bytes_of_file, path) for name, path in files.items()} if step in ("export", "verify") else {}
    return Case(step, "a model of convolutions", work, warm_up=warm_up, bytes=sizes)


GROUPS = {
    f"deploy: {step}": Group(
        partial(case_of, step),
        {f"{theirs}, {LAYERS[0]} layers": theirs, **{f"ours, {layers} layers": str(layers) for layers in LAYERS}},
        on_cpu_alone="a step of Python, or of onnxruntime.",
        slow=[f"ours, {layers} layers" for layers in LAYERS[1:]],
    )
    for step, (theirs, _, _) in STEPS.items()
}


def test_step(group: str, row: str, side_by_side: Callable[[str, str], None]) -> None:
    side_by_side(group, row)
