"""Pickled models name public packages only, so that they load after internal modules have moved, and compute the same."""

import io
import pickle
import pickletools
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.nn import REPLACED_MODULES
from qtoolkit.nn.batch_norm import BATCH_NORMS
from tests import processes
from tests.nets import linear_of

PACKAGES = {"qtoolkit", "qtoolkit.graph", "qtoolkit.nn", "qtoolkit.quantizers"}


@torch.jit.script
def scripted_double(x: Tensor) -> Tensor:
    return x * 2


class Everything(nn.Module):
    """Layers of all kinds, batch norms, functions, decisions on sizes, an assignment to an item, a mode, a method to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn1 = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.up, self.bn2 = nn.ConvTranspose2d(8, 8, 2), nn.BatchNorm2d(8)
        self.attention, self.fc = nn.MultiheadAttention(8, 2, batch_first=True), linear_of(8)
        self.table, self.lstm = nn.Embedding(4, 8), nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor, index: Tensor, scale: Tensor | None = None) -> Tensor:
        x = self.bn2(self.up(torch.relu(self.bn1(self.conv(x)))))
        x = torch.cat([x, scripted_double(x)], 1)[:, :8]
        x = x.flatten(2).transpose(1, 2)
        if len(x) > 1 and x.shape[1] % 8:
            x = x + 1
        x[:, 0] = 0
        x += x.sin()
        x = self.lstm(self.attention(x, x, x)[0])[0]
        x = F.dropout(F.scaled_dot_product_attention(x, x, x), 0.1, self.training)
        return self.fc(x + self.table(index)[:, None]) * (1 if scale is None else scale)

    def classes(self) -> list[str]:
        return ["cat", "dog"]


class Merges(nn.Module):
    """Modules that compute what functions do, pools and cells, for replacement without a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.add, self.cat, self.pool, self.cell = qt.nn.Add(), qt.nn.Cat(1), nn.AvgPool1d(2), nn.GRUCell(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(self.pool(self.cat([self.add(x, x), x])))


class Twice(nn.Module):
    """What a fuse pattern of the user's makes of two linear layers."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def with_a_hook(module: nn.Module, args: object, output: Tensor) -> Tensor:
    return output + 1


def calibrated(model: nn.Module, inputs: tuple[Tensor, ...]) -> nn.Module:
    qt.calibrate(model, [inputs], progress=False)
    return model


def images() -> tuple[Tensor, ...]:
    return torch.rand(2, 3, 8, 8), torch.tensor([1, 2])


def everything(training: bool, **options: object) -> nn.Module:
    model = Everything().train(training)
    return calibrated(
        qt.prepare(model, images(), preserve_attributes=["classes"], **{"backend": "tensorrt", **options}), images()
    )


def replaced(model: nn.Module, inputs: tuple[Tensor, ...], **options: object) -> nn.Module:
    return calibrated(qt.quant_modules.replace(model, **{"backend": "tensorrt", **options}), inputs)


def with_batch_norm() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def off(model: nn.Module) -> nn.Module:
    qt.disable_quantization(model).apply()
    return model


def chained() -> nn.Module:
    return qt.fuse_modules(with_batch_norm().train(), [["0", "1", "2"]])


def fused_by_a_pattern() -> nn.Module:
    patterns = {(nn.Linear, nn.Linear): Twice}
    prepared = qt.prepare(nn.Sequential(linear_of(8), linear_of(8)), rows(), fuse_patterns=patterns, backend="tensorrt")
    return calibrated(prepared, rows())


def hooked() -> nn.Module:
    prepared = calibrated(qt.prepare(with_batch_norm(), rows(), backend="tensorrt"), rows())
    prepared.get_submodule("3").register_forward_hook(with_a_hook)
    return prepared


def with_observer(observer: str, quantizer: str) -> nn.Module:
    spec = qt.QuantSpec(observer=observer, quantizer=quantizer)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(spec, spec))
    return calibrated(qt.prepare(with_batch_norm(), rows(), qconfig_mapping=mapping, backend="tensorrt"), rows())


def test_the_class_of_quantizers_has_a_name_of_its_own() -> None:
    """Ultralytics takes each class called TensorQuantizer for NVIDIA's, and imports modelopt to save a model that has one."""
    prepared = everything(True)
    assert not any(type(module).__name__ == "TensorQuantizer" for module in prepared.modules())
    quantizer = qt.TensorQuantizer(qt.QuantSpec())
    quantizer.amax = 3.0
    text = pickle.dumps(quantizer, protocol=0)
    assert b"qtoolkit\nObservingQuantizer" in text
    earlier = text.replace(b"qtoolkit\nObservingQuantizer", b"qtoolkit\nTensorQuantizer")
    for pickled in (text, earlier):
        loaded = pickle.loads(pickled)
        assert type(loaded) is qt.TensorQuantizer
        assert loaded.amax == 3


def rows(count: int = 8) -> tuple[Tensor, ...]:
    return (torch.rand(4, count),)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "trained": (lambda: everything(True, backend="onnxruntime"), images),
    "evaluated": (lambda: everything(False, backend="onnxruntime"), images),
    "not calibrated": (lambda: off(qt.prepare(Everything().train(), images(), backend="tensorrt")), images),
    "leaf modules": (lambda: everything(True, untraced=["attention", "lstm"]), images),
    "converted": (lambda: qt.convert(everything(True, backend="onnxruntime")), images),
    "converted leaf modules": (lambda: qt.convert(everything(False, untraced=["attention", "lstm"])), images),
    "replaced": (lambda: replaced(Everything().eval(), images()), images),
    "replaced and converted": (lambda: qt.convert(replaced(Everything().eval(), images())), images),
    "replaced merges": (lambda: replaced(Merges(), rows(4)), lambda: rows(4)),
    "replaced chain": (lambda: replaced(chained(), rows()), rows),
    "fused": (lambda: qt.fuse_modules(with_batch_norm().eval(), [["0", "1"]]), rows),
    "custom pattern": (fused_by_a_pattern, rows),
    "hook": (hooked, rows),
    "histogram": (lambda: with_observer("histogram", "fixed"), rows),
    "moving average": (lambda: with_observer("moving_average", "lsq"), rows),
}


@pytest.fixture(scope="module")
def models() -> dict[str, tuple[nn.Module, tuple[Tensor, ...]]]:
    torch.manual_seed(0)
    return {name: (make().eval(), inputs()) for name, (make, inputs) in MODELS.items()}


def modules_in(pickled: bytes) -> Iterator[str]:
    """Yield the modules of qtoolkit that a pickle names, as the home of a class or function or in generated code."""
    for _, value, _ in pickletools.genops(pickled):
        if isinstance(value, str):
            name = value.partition(" ")[0]  # "module name" in older protocols
            yield from re.findall(r"\A(?:qtoolkit)(?:\.\w+)*\Z", name)
            yield from re.findall(r"^(?:from|import) (qtoolkit[.\w]*)", value, re.MULTILINE)


def saved(model: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(model, file)
    with zipfile.ZipFile(file) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
        return archive.read(name)


@pytest.mark.slow
@pytest.mark.parametrize("dump", [pickle.dumps, saved], ids=["pickle", "torch.save"])
@pytest.mark.parametrize("name", MODELS)
def test_pickles_name_public_packages_only(name: str, dump: Callable[[nn.Module], bytes], models) -> None:
    named = set(modules_in(dump(models[name][0])))
    assert not named - PACKAGES, "publish these classes and functions in the __init__ of a public package"
    assert named


def test_all_qat_modules_are_published() -> None:
    for kind in (*REPLACED_MODULES.values(), *BATCH_NORMS.values(), qt.nn.QuantFrozenBatchNorm):
        assert kind.__module__ == "qtoolkit.nn"
        assert getattr(qt.nn, kind.__qualname__) is kind


LOAD = """
import pickle, sys, torch
torch.set_num_threads(int(sys.argv[2]))
for name, pickled, inputs, expected in torch.load(sys.argv[1]):
    with torch.no_grad():
        assert torch.equal(pickle.loads(pickled)(*inputs), expected), name
    print(name)
"""


def test_a_fresh_process_loads_them_and_computes_the_same(tmp_path: Path, models) -> None:
    with torch.no_grad():
        cases = [(name, pickle.dumps(m), inputs, m(*inputs)) for name, (m, inputs) in models.items()]
    torch.save(cases, tmp_path / "cases.pt")
    run = processes.python("-c", LOAD, tmp_path / "cases.pt", torch.get_num_threads())
    assert run.stdout.split("\n")[:-1] == list(MODELS), run.stderr
