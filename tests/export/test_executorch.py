"""Files of ExecuTorch. Most tests need the package; those of the comparison run the programs in torch."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.export import executorch as front
from qtoolkit.export.verification.runtimes import executorch_xnnpack
from qtoolkit.model_inputs import tensors_of
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.runtimes import table
from tests.nets import Residual, trained

X = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """What XNNPACK computes on codes: convolutions, a sum, a transposed convolution, pools, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.up, self.head = nn.ConvTranspose2d(8, 8, 2, 2), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = F.max_pool2d(F.relu6(self.up(torch.relu(self.second(x) + x))), 2)
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


def converted(model: nn.Module, x: Tensor = X) -> nn.Module:
    torch.manual_seed(0)
    prepared = qt.prepare(model.eval(), x, "xnnpack")
    qt.calibrate(prepared, [x], progress=False)
    return qt.convert(prepared)


@pytest.fixture
def in_torch(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let torch run the programs in the runtime's place; a number in the list is added to all codes."""
    programs: list[torch.export.ExportedProgram] = []
    added: list[int] = []

    def lower(program: torch.export.ExportedProgram) -> executorch_xnnpack.Lowered:
        programs.append(program)
        return executorch_xnnpack.Lowered(bytes([len(programs) - 1]), (), 0, 1)

    def run(file: bytes, tensors: list[Tensor]) -> list[np.ndarray]:
        program = programs[file[0]]
        args, kwargs = torch.utils._pytree.tree_unflatten(tensors, program.call_spec.in_spec)
        with torch.no_grad():
            values = tensors_of(program.module()(*args, **kwargs))
        return [(x + sum(added) if x.dtype == torch.int8 else x).numpy() for x in values]

    monkeypatch.setattr(table, "find_spec", lambda name: name)
    monkeypatch.setattr(front, "lower", lower)
    monkeypatch.setattr(front.executorch_xnnpack, "load", lambda file: lambda tensors: run(file, tensors))
    monkeypatch.setattr(front.executorch_xnnpack, "description", lambda: "torch")
    return added


def test_all_codes_are_compared(in_torch: list[int], tmp_path) -> None:
    model = converted(trained(Residual(True), 2, 4, 16, 16))
    result = qt.export.export_executorch(model, X, tmp_path / "m.pte")
    assert result.bytes == 1
    assert result.verification is not None
    assert result.end_to_end is not None
    assert result.end_to_end.not_compared == ()
    assert result.verification.missing == ()
    assert result.verification.weight_codes.compared == sum(
        m.weight.numel() for m in model.modules() if isinstance(m, nn.Conv2d)
    )
    for codes in (result.verification.weight_codes, result.verification.layer_codes, result.end_to_end.codes):
        assert codes.compared > 0
        assert codes.differing == 0


def test_a_mean_that_drops_dimensions_is_compared(in_torch: list[int], tmp_path) -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(4, 8, 1), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu(self.conv(x)).mean((2, 3)))

    result = qt.export.export_executorch(converted(Mean()), X, tmp_path / "m.pte")
    assert result.end_to_end is not None
    assert result.end_to_end.not_compared == ()
    assert result.end_to_end.codes.differing == 0


@pytest.mark.parametrize("wrong", ["codes", "lowering"])
def test_a_file_that_fails_is_not_written(in_torch: list[int], tmp_path, monkeypatch, wrong: str) -> None:
    (tmp_path / "m.pte").write_bytes(b"old")
    in_torch.append(2)
    if wrong == "lowering":
        monkeypatch.setattr(front, "lower", lambda program: (_ for _ in ()).throw(RuntimeError("differ, cannot lower")))
    with pytest.raises(RuntimeError, match="differ"):
        qt.export.export_executorch(converted(nn.Sequential(nn.Linear(16, 4))), X, tmp_path / "m.pte")
    assert (tmp_path / "m.pte").read_bytes() == b"old"


def test_inputs_in_containers_are_read(in_torch: list[int], tmp_path) -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(16, 4)

        def forward(self, parts: dict[str, list[Tensor]], *, scale: Tensor) -> dict[str, Tensor]:
            return {"sum": self.fc(parts["a"][0]), "other": parts["a"][1] + scale}

    inputs = {"parts": {"a": [X, X]}, "scale": X[:1]}
    prepared = qt.prepare(Sum().eval(), inputs, "xnnpack")
    qt.calibrate(prepared, [inputs], progress=False)
    result = qt.export.export_executorch(prepared, inputs, tmp_path / "m.pte")
    assert result.end_to_end is not None
    assert result.end_to_end.not_compared == ()
    assert len(result.end_to_end.by_quantizer) == 5


def test_the_package_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(table, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="executorch, which is not installed; run: pip install "):
        qt.export.export_executorch(converted(nn.Sequential(nn.Linear(16, 4))), X, tmp_path / "m.pte")


def test_xnnpack_computes_the_whole_net_on_codes(tmp_path) -> None:
    pytest.importorskip("executorch")
    model = converted(Net())
    result = qt.export.export_executorch(model, X, tmp_path / "m.pte")
    assert (result.left, result.delegates) == ((), 1)
    kernels = [layer.kernel for layer in result.layers if layer.integer]
    assert sorted(kernels) == sorted(
        ["XNNPACK convolution"] * 3 + [f"XNNPACK {op}" for op in ("add", "max_pool2d", "mean", "linear")]
    )
    assert all(layer.integer for layer in result.layers)
    assert result.end_to_end is not None
    assert result.end_to_end.codes.share < 1e-3  # of the add, which is computed in fixed point
    assert result.end_to_end.codes.steps <= 1


def test_what_the_delegate_leaves_is_named_and_sizes_stay_dynamic(tmp_path) -> None:
    pytest.importorskip("executorch")
    model = converted(nn.Sequential(nn.Conv2d(4, 8, 3), nn.Hardswish(), nn.Conv2d(8, 4, 1), nn.Flatten()))
    shapes = ({0: torch.export.Dim("batch", min=1, max=8)},)
    result = qt.export.export_executorch(model, X, tmp_path / "m.pte", dynamic_shapes=shapes)
    assert [layer.kernel for layer in result.left] == ["portable view_copy"]
    assert [layer.name for layer in result.layers if layer.integer] == ["0", "2"]
    assert "XNNPACK hardswish" in str(result)
    x = torch.randn(5, 4, 16, 16)
    (output,) = executorch_xnnpack.load(result.path.read_bytes())([x])
    grids = [module for module in model.modules() if isinstance(module, Grid)]
    step = max(float(grid.scale) for grid in grids if not grid.of_weight)
    assert float((torch.from_numpy(output) - model(x)).detach().abs().max()) <= step
