"""gptq() against a plain loop over columns, and below rounding to nearest; both routes, groups, order of columns."""

import copy

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.tuning.gptq import rounded
from qtoolkit.tuning.rounding.grids import CodeGrid
from tests.tuning.nets import W3, prepared_on


def plain(grid: CodeGrid, hessian: Tensor, damping: float, order: list[int]) -> Tensor:
    """Return codes column by column; after each, the best change of all later columns solves a linear system."""
    h = hessian.double().clone()
    h += damping * h.diagonal().mean() * torch.eye(len(h), dtype=torch.double)
    weight, codes = grid.weight.double().clone(), torch.empty_like(grid.weight)
    left = list(order)
    while left:
        column = left.pop(0)
        code = grid.clamp(torch.round(weight[:, column] / grid.steps[:, column]) + grid.zeros[:, column])
        codes[:, column] = code
        error = (code - grid.zeros[:, column]) * grid.steps[:, column] - weight[:, column]
        if left:  # minimize (error, change) H (error, change): H_rest change = -H_rest,column error
            rest = h[left][:, left]
            change = -torch.linalg.solve(rest, h[left][:, column])
            weight[:, left] += error[:, None] * change[None]
    return codes


SPECS = [
    qt.QuantSpec(bits=3, axis=0), qt.QuantSpec(bits=4, axis=1, group_size=5),
    qt.QuantSpec(bits=3, signed=False, symmetric=False, axis=0), qt.QuantSpec(bits=2),
]  # fmt: skip


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.describe())
def test_codes_are_those_of_a_plain_loop(spec: qt.QuantSpec, act_order: bool) -> None:
    x = torch.randn(1500, 150) @ torch.randn(150, 150)
    prepared = prepared_on(nn.Sequential(nn.Linear(150, 6)).eval(), [x], qt.QConfig(activation=None, weight=spec))
    grid = CodeGrid(prepared.get_submodule("0"), "0")
    hessian = x.T.double() @ x.double() / len(x)
    order = hessian.diagonal().argsort(descending=True).tolist() if act_order else list(range(150))
    expected = plain(grid, hessian, 0.01, order)
    assert torch.equal(rounded(grid, hessian, 0.01, act_order), expected)
    report = qt.tuning.gptq(prepared, list(x.split(500)), damping=0.01, act_order=act_order, progress=False)
    layer = prepared.get_submodule("0")
    values = layer.weight_quantizer(layer.weight).detach()
    assert (CodeGrid(layer, "0").nearest() != expected).float().mean() < 0.01  # sums of products in float32
    torch.testing.assert_close(values, grid.values(CodeGrid(layer, "0").nearest()), rtol=1e-5, atol=1e-6)
    assert report.layers[0].after < 0.9 * report.layers[0].before


def test_codes_of_few_inputs_are_no_worse_than_nearest_on_others() -> None:
    generator, width = torch.Generator().manual_seed(48), 96
    basis = torch.linalg.qr(torch.randn(width, width, generator=generator))[0]
    seen, others = (
        torch.randn(rows, width, generator=generator) * torch.logspace(0, -1, width) @ basis for rows in (48, 5000)
    )
    spec = qt.QuantSpec(bits=4, axis=0, observer="histogram")
    model = nn.Sequential(nn.Linear(width, 48)).eval()
    prepared = prepared_on(model, [seen], qt.QConfig(activation=None, weight=spec))

    def error(weight: Tensor) -> float:
        return float(((weight - model[0].weight.detach()) @ others.T).square().mean())

    layer = prepared.get_submodule("0")
    grid = CodeGrid(layer, "0")
    nearest = error(grid.values(grid.nearest()))
    assert error(grid.values(rounded(grid, seen.T.double() @ seen.double(), 0.01, False))) > 1.3 * nearest
    report = qt.tuning.gptq(prepared, [seen], progress=False)
    assert report.layers[0].damping == 1.0
    assert report.layers[0].after < 0.95 * report.layers[0].before
    assert error(layer.weight_quantizer(layer.weight).detach()) < 0.9 * nearest


def test_nearest_is_kept_where_other_inputs_lose() -> None:
    seen = torch.randn(
        16, 64, generator=torch.Generator().manual_seed(0)
    )  # uncorrelated: no column can make up for another
    prepared = prepared_on(nn.Sequential(nn.Linear(64, 8)).eval(), [seen])
    before = prepared.get_submodule("0").weight.detach().clone()
    report = qt.tuning.gptq(prepared, list(seen.split(1)), damping=0.01, progress=False)
    assert report.layers[0].kept
    assert report.layers[0].after == report.layers[0].before
    assert torch.equal(prepared.get_submodule("0").weight, before)
    assert str(report).endswith("kept")


class Encoder(nn.Module):
    """A transformer's block, whose layers take keyword arguments; one layer is called twice, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.k, self.v = nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.up, self.down, self.unused = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        a = torch.softmax(self.q(input=h) @ self.k(h).transpose(1, 2) / 6, -1) @ self.v(h)
        return self.down(torch.nn.functional.gelu(self.up(x + a)))


@pytest.mark.parametrize("route", ["prepare", "replace"])
@pytest.mark.parametrize("activation", [None, qt.QuantSpec()])
def test_a_transformer_on_both_routes(route: str, activation: qt.QuantSpec | None) -> None:
    model = Encoder().eval()
    mapping = qt.QConfigMapping().set_global(qt.QConfig(activation, qt.QuantSpec(bits=3, axis=1, group_size=16)))
    mapping.set_module_name("unused", None)
    mix = torch.randn(32, 32)
    batches = [torch.randn(8, 10, 32) @ mix for _ in range(3)]
    prepared = (
        qt.prepare(model, batches[0], qconfig_mapping=mapping, backend="tensorrt10")
        if route == "prepare"
        else qt.quant_modules.replace(model, mapping, backend="tensorrt10")
    )
    qt.calibrate(prepared, batches, progress=False)
    nearest = copy.deepcopy(prepared)
    report = qt.tuning.gptq(prepared, batches, progress=False)
    assert [layer.name for layer in report.layers] == ["q", "k", "v", "up", "down"]
    assert all(layer.after <= layer.before for layer in report.layers)
    assert "unused" in report.skipped
    x = torch.cat(batches)
    with torch.no_grad():
        target = model(x)
        assert (prepared(x) - target).square().mean() < 0.8 * (nearest(x) - target).square().mean()
        converted = qt.convert(prepared)
        torch.testing.assert_close(converted(x), prepared(x))


def test_dead_inputs_and_errors_change_nothing() -> None:
    x = torch.randn(50, 8)
    x[:, 3] = 0
    prepared = prepared_on(nn.Sequential(nn.Linear(8, 4), nn.Conv1d(1, 1, 1)).eval(), [x[:1]], W3)
    before = copy.deepcopy(prepared.state_dict())
    for arguments, error, words in (
        ({"damping": 0}, ValueError, "damping must be positive"),
        (
            {"layers": ["1"]},
            ValueError,
            "layer '1' is not supported: it is a QuantConv1d, and only linear layers are supported",
        ),
        ({"layers": ["2"]}, ValueError, "unknown layer of gptq '2'"),
        ({"batches": []}, ValueError, "gptq: batches must hold at least one batch"),
        ({"batches": [x[:, :3]]}, ValueError, "gptq: a batch does not fit the model: 'input' has the shape"),
    ):
        with pytest.raises(error, match=words):
            qt.tuning.gptq(prepared, **{"batches": [x], "progress": False, **arguments})
        torch.testing.assert_close(dict(prepared.state_dict()), dict(before), rtol=0, atol=0)
        assert all(not m._forward_hooks and not m._forward_pre_hooks for m in prepared.modules())
    only = prepared_on(nn.Sequential(nn.Linear(8, 4)).eval(), [x])
    report = qt.tuning.gptq(only, [x], progress=False)
    assert torch.isfinite(only.get_submodule("0").weight).all()
    assert "1 linear layers" in str(report)


def test_a_model_without_linear_layers() -> None:
    prepared = prepared_on(nn.Sequential(nn.Conv1d(2, 2, 1)).eval(), [torch.randn(2, 2, 4)])
    with pytest.raises(ValueError, match=r"gptq: the model has no layer .* use qtoolkit\.tuning\.reconstruct"):
        qt.tuning.gptq(prepared, [torch.randn(2, 2, 4)])


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.unbind(1)
        return self.layer(first) + self.layer(second)


@pytest.mark.parametrize("route", ["prepare", "replace"])
def test_the_inputs_of_all_calls_of_a_layer_count(route: str) -> None:
    """Codes that fit those of the first call alone, which are small and alike, would lose on the others."""
    generator = torch.Generator().manual_seed(0)
    basis, deviations = torch.randn(32, 32, generator=generator), torch.tensor([0.01] * 2 + [1e-4] * 30)
    first, second = torch.randn(2, 1024, 32, generator=generator).unbind(0)
    x = torch.stack([first * deviations @ basis, second @ basis], 1)
    model, mapping = Twice().eval(), qt.QConfigMapping().set_global(W3)
    prepared = (
        qt.prepare(model, x, qconfig_mapping=mapping, backend="tensorrt10")
        if route == "prepare"
        else qt.quant_modules.replace(model, mapping, backend="tensorrt10")
    )
    qt.calibrate(prepared, [x], progress=False)
    with torch.no_grad():
        before = (prepared(x) - model(x)).square().mean()
        report = qt.tuning.gptq(prepared, [x[:768]], progress=False)
        after = (prepared(x[768:]) - model(x[768:])).square().mean()
    assert after < 0.9 * before
    assert report.layers[0].after > 0.1 * float(after)
