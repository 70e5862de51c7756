"""Models in wrappers of torch: every public function takes the model inside, or says so."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import pytest
import torch
from torch import fx, nn
from torch.nn.parallel import DistributedDataParallel

import qtoolkit as qt
from qtoolkit.compat import load_amax, mqbench
from qtoolkit.tuning import mixed_precision
from qtoolkit.wrapped import unwrapped, wrapper_of
from tests.processes import group_of_one

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
PACKAGES = (qt, qt.debug, qt.export, qt.nn, qt.quant_modules, qt.tuning, mixed_precision, qt.compat, mqbench)
WRAPS: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "DataParallel": nn.DataParallel,
    "DistributedDataParallel": DistributedDataParallel,
    "OptimizedModule": lambda model: torch.compile(model, backend="eager"),
    "both": lambda model: torch.compile(DistributedDataParallel(model), backend="eager"),
}


@pytest.fixture
def group() -> Iterator[None]:
    with group_of_one():
        yield


def net() -> nn.Module:
    torch.manual_seed(0)
    conv = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    return nn.Sequential(conv, nn.Linear(144, 4))


def prepared() -> nn.Module:
    spec = qt.QuantSpec(quantizer="lsq")
    mapping = qt.QConfigMapping().set_global(qt.QConfig(spec, dataclasses.replace(spec, axis=0, narrow=True)))
    model = qt.prepare(net(), IMAGES[:1], backend="onnxruntime", qconfig_mapping=mapping)
    qt.calibrate(model, [IMAGES], progress=False)
    return model


def prepared_for(backend: str) -> nn.Module:
    model = qt.prepare(net().eval(), IMAGES[:1], backend=backend)
    qt.calibrate(model, [IMAGES], progress=False)
    return model


def exported(model: nn.Module, folder: Path) -> Path:
    return qt.export_onnx(unwrapped(model), IMAGES, folder / "net.onnx", verify=False, progress=False).path


def saved(model: nn.Module, folder: Path) -> Path:
    qt.save_checkpoint(unwrapped(model), folder / "net.safetensors")
    return folder / "net.safetensors"


def score(model: nn.Module) -> float:
    with torch.no_grad():
        return float(model(IMAGES).sum())


def observed(model: nn.Module) -> list[str]:
    with qt.calibrating(model) as block:
        model(IMAGES)
    return list(block.quantizers)


def watched(model: nn.Module) -> str:
    with qt.debug.watch(model, every=1) as watch:
        model(IMAGES).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    return str(watch)


def page(model: nn.Module, folder: Path) -> int:
    qt.debug.report(model, IMAGES, folder / "page.html", float_model=model_in_float(model), progress=False)
    return len((folder / "page.html").read_text().splitlines())


def model_in_float(like: nn.Module) -> nn.Module:
    return net() if wrapper_of(like) is None else nn.DataParallel(net())


def drawn(model: nn.Module, folder: Path) -> str:
    qt.debug.draw(model, folder / "net.svg")
    return (folder / "net.svg").read_text()


def distilled(model: nn.Module) -> float:
    with qt.tuning.Distillation(model, model_in_float(model), features=["1"]) as loss:
        return float(loss(IMAGES, model(IMAGES)))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


# What each function that takes a model with quantizers returns of it: the same with a wrapper around the model.
TAKEN: Mapping[str, Callable[[nn.Module, Path], object]] = {
    "calibrate": lambda m, _: qt.calibrate(m, [IMAGES], progress=False),
    "calibrating": lambda m, _: observed(m),
    "convert": lambda m, _: [name for name, _ in qt.convert(m).named_modules()],
    "convert_deploy": lambda m, folder: mqbench.convert_deploy.convert_deploy(
        m, mqbench.prepare_by_platform.BackendType.ONNX_QNN, {"x": [1, 3, 8, 8]}, output_path=folder, model_name="net"
    ),
    "compare": lambda m, _: qt.debug.compare(model_in_float(m), m, IMAGES, progress=False),
    "disable_quantization": lambda m, _: list(qt.disable_quantization(m).quantizers),
    "enable_quantization": lambda m, _: list(qt.enable_quantization(m).quantizers),
    "freeze_ranges": lambda m, _: list(qt.freeze_ranges(m).quantizers),
    "stop_on_nonfinite": lambda m, _: list(qt.stop_on_nonfinite(m).quantizers),
    "draw": drawn,
    "encodings": lambda m, folder: qt.export.encodings(m, "snpe", IMAGES, folder / "net", progress=False),
    "export_executorch": lambda m, folder: qt.export.export_executorch(m, IMAGES, folder / "net.pte"),
    "export_litert": lambda m, folder: qt.export_litert(m, IMAGES, folder / "net.tflite"),
    "export_onnx": lambda m, folder: qt.export_onnx(m, IMAGES, folder / "net.onnx", progress=False),
    "export_program": lambda m, _: list(qt.export.export_program(m, IMAGES).state_dict),
    "verify": lambda m, folder: qt.export.verify(qt.convert(m, arithmetic="integer"), IMAGES, exported(m, folder)),
    "verify_onnx": lambda m, folder: qt.export.verify_onnx(wrapped_as(m, qt.convert(m)), IMAGES, exported(m, folder)),
    "freeze_batch_norm": lambda m, _: qt.freeze_batch_norm(m),
    "unfreeze_batch_norm": lambda m, _: qt.unfreeze_batch_norm(m),
    "load_amax": lambda m, _: load_amax(m, {"1._input_quantizer._amax": torch.tensor(2.0)}, strict=False),
    "load_checkpoint": lambda m, folder: qt.load_checkpoint(m, saved(m, folder)).missing,
    "save_checkpoint": lambda m, folder: qt.save_checkpoint(m, folder / "net.safetensors"),
    "parameter_groups": lambda m, _: [len(group["params"]) for group in qt.parameter_groups(m)],
    "quantization_report": lambda m, _: qt.quantization_report(m),
    "quantizers_of": lambda m, _: list(qt.quantizers_of(m)),
    "report": page,
    "sensitivity": lambda m, _: qt.debug.sensitivity(m, score, progress=False),
    "set_training_arithmetic": lambda m, _: qt.nn.set_training_arithmetic(m, "float"),
    "synchronize_ranges": lambda m, _: qt.synchronize_ranges(m),
    "Watch": lambda m, _: watched(m),
    "watch": lambda m, _: watched(m),
    "Distillation": lambda m, _: distilled(m),
    "OscillationDampening": lambda m, _: qt.tuning.OscillationDampening(m, 10).skipped,
    "OscillationFreezing": lambda m, _: qt.tuning.OscillationFreezing(m, 10, max_bits=8).skipped,
    "PartialUpdates": lambda m, _: repr(qt.tuning.PartialUpdates(m, torch.optim.SGD(m.parameters(), 0.1))),
    "QuantizationSchedule": lambda m, _: qt.tuning.QuantizationSchedule(m, freeze_ranges=1, freeze_batch_norm=1).step(),
    "bias_correction": lambda m, _: qt.tuning.bias_correction(m, [IMAGES], progress=False),
    "gptq": lambda m, _: qt.tuning.gptq(m, [IMAGES], progress=False),
    "reconstruct": lambda m, _: qt.tuning.reconstruct(m.eval(), [IMAGES], steps=2, progress=False),
    "reestimate_batch_norm": lambda m, _: qt.tuning.reestimate_batch_norm(m, [IMAGES], progress=False),
    "hessian_traces": lambda m, _: mixed_precision.hessian_traces(
        m, loss_of, [IMAGES], {"1": unwrapped(m).get_parameter("1.weight")}, progress=False
    ),
}
# Those that take a float model, which is wrapped when it has been prepared.
REFUSED: Mapping[str, Callable[[nn.Module], object]] = {
    "prepare": lambda m: qt.prepare(m, backend="onnxruntime"),
    "prepare_parts": lambda m: qt.prepare_parts(m, IMAGES, backend="onnxruntime"),
    "prepare_by_platform": lambda m: mqbench.prepare_by_platform.prepare_by_platform(
        m, mqbench.prepare_by_platform.BackendType.ONNX_QNN
    ),
    "replace": lambda m: qt.quant_modules.replace(m, backend="onnxruntime"),
    "quantize": lambda m: qt.quantize(m, [IMAGES], backend="onnxruntime"),
    "fuse_modules": lambda m: qt.fuse_modules(m, ["0.0", "0.1"]),
    "equalize": lambda m: qt.tuning.equalize(m, IMAGES),
    "smooth_quant": lambda m: qt.tuning.smooth_quant(m, [IMAGES]),
    "MixedPrecision": lambda m: mixed_precision.MixedPrecision(m, IMAGES, {}, backend="onnxruntime"),
}
# The models of functions that do not take `prepared`.
MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "convert_deploy": lambda: prepared_for("qnn"),
    "encodings": lambda: prepared_for("snpe"),
    "export_executorch": lambda: prepared_for("xnnpack"),
    "export_litert": lambda: prepared_for("litert"),
    "hessian_traces": net,
}


def wrapped_as(like: nn.Module, model: nn.Module) -> nn.Module:
    return model if wrapper_of(like) is None else nn.DataParallel(model)


def takes_a_model(value: object) -> bool:
    """Whether a public name is a function, or a class that somebody builds, with an argument that is a model."""
    kinds = (nn.Module, Exception)
    if not callable(value) or dataclasses.is_dataclass(value) or (isinstance(value, type) and issubclass(value, kinds)):
        return False
    taken = (parameter.annotation for parameter in inspect.signature(value).parameters.values())
    bounds = (kind.__bound__ if isinstance(kind, TypeVar) else kind for kind in taken)
    return any(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in bounds)


def test_every_public_function_that_takes_a_model_is_tried_in_a_wrapper() -> None:
    public = {
        name: getattr(package, name) for package in PACKAGES for name in getattr(package, "__all__", ("replace",))
    }
    inner = [value for value in public.values() if isinstance(value, ModuleType)]
    assert inner
    taking = {name for name, value in public.items() if not isinstance(value, ModuleType) and takes_a_model(value)}
    assert taking - {*TAKEN, *REFUSED} == set()
    assert taking > {"convert", "export_onnx", "verify", "sensitivity", "replace"}


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("wrap", WRAPS)
def test_the_model_inside_is_taken(name: str, wrap: str, tmp_path: Path) -> None:
    if name == "export_executorch":
        pytest.importorskip("executorch")
    model, seen = MODELS.get(name, prepared)(), []
    for around in (lambda m: m, WRAPS[wrap]):
        torch.manual_seed(0)
        found = TAKEN[name](around(deepcopy(model)), tmp_path)
        seen.append(found if isinstance(found, list) else str(found))
    assert seen[0] == seen[1]
    assert not re.search(r"\bmodule\.\d|_orig_mod", str(seen[1]))


@pytest.mark.usefixtures("group")
@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("wrap", ["DataParallel", "DistributedDataParallel", "OptimizedModule"])
def test_float_models_are_wrapped_later(name: str, wrap: str) -> None:
    with pytest.raises(qt.UntraceableError, match=rf"model is wrapped in {wrap}; (call \w+ on|prepare) model\.\w+"):
        REFUSED[name](WRAPS[wrap](net()))


@pytest.mark.usefixtures("group")
def test_a_converted_model_has_no_wrapper() -> None:
    """A copy of DistributedDataParallel waits for the other ranks in its first forward."""
    model = prepared()
    converted = qt.convert(DistributedDataParallel(model))
    assert isinstance(converted, fx.GraphModule)
    torch.testing.assert_close(converted(IMAGES), qt.convert(model)(IMAGES), rtol=0, atol=0)


@pytest.mark.usefixtures("group")
def test_a_wrapped_part_is_named() -> None:
    whole = nn.ModuleDict({"generator": DistributedDataParallel(prepared())})
    with pytest.raises(
        ValueError, match="convert: submodule 'generator' is wrapped in DistributedDataParallel, .* put gen"
    ):
        qt.convert(whole)
