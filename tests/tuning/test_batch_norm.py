"""reestimate_batch_norm(): statistics against torch's own, in every strategy, and what it leaves behind."""

import copy
import dataclasses
import warnings

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.nn.batch_norm import STRATEGIES
from qtoolkit.tuning.rounding.grids import CodeGrid
from tests import nets
from tests.tuning.nets import Residual


def test_statistics_are_those_of_the_data() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3))
    batches = [2 * torch.randn(8, 3, 6, 6) + i for i in range(3)]
    report = qt.tuning.reestimate_batch_norm(model, batches, progress=False)
    x = torch.cat(batches).transpose(0, 1).flatten(1).double()
    torch.testing.assert_close(model[0].running_mean.double(), x.mean(1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model[0].running_var.double(), x.var(1), rtol=1e-2, atol=1e-6)
    assert (report.batches, report.batch_norms, report.unchanged) == (3, ("0",), {})


def test_the_variance_of_a_constant_channel_is_not_negative() -> None:
    """As that of a pruned one, whose output is the bias: the mean of its squares rounds in many batches."""
    model = nn.Sequential(nn.BatchNorm1d(64))
    values = torch.linspace(-300, 300, 64)
    qt.tuning.reestimate_batch_norm(model, [values.expand(4, 64)] * 100, progress=False)
    assert float(model[0].running_var.min()) == 0


class Head(nn.Module):
    """Shared by the levels of a pyramid, as in detectors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x)).mean() + self.bn(self.conv(3 * x + 1)).mean()


@pytest.mark.parametrize("route", ["float", "prepare", "replace"])
def test_each_call_of_a_batch_norm_counts(route: str) -> None:
    model, batches = Head().train(), [torch.randn(8, 3, 8, 8) for _ in range(3)]
    routes = {
        "float": lambda m: m,
        "prepare": lambda m: qt.prepare(m, batches[0], backend="tensorrt10"),
        "replace": lambda m: qt.quant_modules.replace(m, backend="tensorrt10"),
    }
    with torch.no_grad():
        values = torch.cat([model.conv(x) for batch in batches for x in (batch, 3 * batch + 1)])
    estimated = routes[route](model)
    qt.disable_quantization(estimated)
    qt.tuning.reestimate_batch_norm(estimated, batches, progress=False)
    channels = values.transpose(0, 1).flatten(1)
    bn = estimated.get_submodule("bn")
    torch.testing.assert_close(bn.running_mean, channels.mean(1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(bn.running_var, channels.var(1), rtol=1e-2, atol=1e-5)
    assert not bn._forward_hooks
    assert not bn.num_batches_tracked


def test_one_batch_gives_what_torch_takes_from_it() -> None:
    model = nets.trained(Residual(), 8, 3, 8, 8).eval()
    other, x = copy.deepcopy(model), torch.randn(8, 3, 8, 8)
    for module in other.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum, module.training = 1.0, True
    with torch.no_grad():
        other(x)
    report = qt.tuning.reestimate_batch_norm(model, [x], progress=False)
    assert len(report.batch_norms) == 5
    for name, value in model.state_dict().items():
        if "running" in name:
            torch.testing.assert_close(value, other.state_dict()[name])
    assert all(
        module.momentum == 0.1 and not module.training
        for module in model.modules()
        if isinstance(module, nn.BatchNorm2d)
    )


@pytest.mark.parametrize("quantizer", ["fixed", "lsq"])
@pytest.mark.parametrize("route", ["prepare", "replace"])
def test_the_codes_of_weights_stay(quantizer: str, route: str) -> None:
    """They depend on the batch norm's factor: with other codes the statistics would be those of another model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)).train()
    weight = qt.QuantSpec(bits=2, axis=0, quantizer=quantizer)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(None, weight))
    x = torch.randn(64, 3, 8, 8)
    if route == "prepare":
        prepared = qt.prepare(model, (x,), qconfig_mapping=mapping, backend="tensorrt10")
    else:
        prepared = qt.quant_modules.replace(qt.fuse_modules(model, [["0", "1"]]), mapping, backend="tensorrt10")
    qt.calibrate(prepared.eval(), [x], progress=False)
    qt.freeze_ranges(prepared)
    (layer,) = (module for module in prepared.modules() if isinstance(module, qt.nn.QuantConv2d))
    layer.batch_norm.running_var.mul_(torch.linspace(0.3, 3, 8))
    prepared.eval()  # learned scales take the factor

    def codes() -> Tensor:
        grid = layer.weight_quantizer.to_grid()
        return grid.codes(layer.effective_weight().detach())

    before = codes()
    qt.tuning.reestimate_batch_norm(prepared, [x], progress=False)
    assert torch.equal(codes(), before)
    y = prepared(x).detach()
    torch.testing.assert_close(y.mean((0, 2, 3)), torch.zeros(8), atol=1e-4, rtol=0)
    torch.testing.assert_close(y.std((0, 2, 3)), torch.ones(8), atol=1e-3, rtol=0)


@pytest.mark.parametrize("options", [{"quantizer": "tqt"}, {"pow2_scale": True}], ids=["tqt", "fixed"])
def test_scales_that_are_powers_of_two_stay(options: dict) -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)).train(), torch.randn(16, 3, 8, 8)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(None, qt.QuantSpec(bits=4, axis=0, **options)))
    prepared = qt.prepare(model, (x,), qconfig_mapping=mapping, backend="tensorrt10")
    qt.calibrate(prepared.eval(), [x], progress=False)
    qt.freeze_ranges(prepared)
    layer = prepared.get_submodule("0")
    layer.batch_norm.running_var.mul_(torch.linspace(0.3, 3, 8))
    before = layer.weight_quantizer.scale.detach().clone()
    qt.tuning.reestimate_batch_norm(prepared, [x], progress=False)
    assert torch.equal(layer.weight_quantizer.scale, before)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("route", ["prepare", "replace"])
def test_every_strategy(strategy: str, route: str) -> None:
    model = nets.trained(Residual(), 8, 3, 8, 8)
    backend = dataclasses.replace(qt.backends["tensorrt10"], batch_norm=strategy)
    batches = [torch.randn(8, 3, 8, 8) for _ in range(2)]
    prepared = (
        qt.prepare(model, backend=backend)
        if route == "prepare"
        else qt.quant_modules.replace(model, backend="tensorrt10")
    )
    qt.calibrate(prepared, batches, progress=False)
    true = {name: value.clone() for name, value in prepared.state_dict().items() if name.endswith(("_mean", "_var"))}
    with torch.no_grad():  # statistics that lag behind
        for name, value in prepared.state_dict().items():
            if name in true:
                value.mul_(1.5).add_(0.1)
    if strategy == "frozen" and route == "prepare":
        with pytest.raises(ValueError, match=r'statistics that can change; stem\.1: its strategy is "frozen"'):
            qt.tuning.reestimate_batch_norm(prepared, batches)
        return
    mode = prepared.training
    report = qt.tuning.reestimate_batch_norm(prepared, batches, progress=False)
    assert prepared.training is mode
    assert report.batches == 2
    after = prepared.state_dict()
    stem = [name for name in true if name.startswith("stem.1")]
    with torch.no_grad():
        y = torch.stack([model.stem[0](x).transpose(0, 1).flatten(1).mean(1) for x in batches]).mean(0)
    torch.testing.assert_close(after[stem[0]], y, rtol=0.05, atol=0.05)
    assert all(torch.isfinite(after[name]).all() for name in true)


def test_an_error_leaves_all_as_it_was() -> None:
    model = nets.trained(Residual(), 8, 3, 8, 8)
    before = copy.deepcopy(model.state_dict())

    def failing(model: nn.Module, x: Tensor) -> Tensor:
        model(x)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        qt.tuning.reestimate_batch_norm(model, [torch.randn(8, 3, 8, 8)], forward=failing, progress=False)
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert model.training
    assert model.stem[1].training
    assert model.stem[1].momentum == 0.1


def test_models_without_statistics() -> None:
    folded = qt.prepare(nets.trained(Residual(), 8, 3, 8, 8).eval(), backend="tensorrt10")
    with pytest.raises(ValueError, match=r"statistics that can change\. In a model.*call it before qtoolkit\.prepare"):
        qt.tuning.reestimate_batch_norm(folded, [torch.randn(8, 3, 8, 8)])
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False))
    report = qt.tuning.reestimate_batch_norm(model, [torch.randn(8, 2)], progress=False)
    assert report.unchanged == {"1": "it has no running statistics"}
    assert "1: unchanged: it has no running statistics" in str(report)
    with pytest.raises(ValueError, match="at least one batch"):
        qt.tuning.reestimate_batch_norm(model, [], progress=False)


def test_a_batch_that_is_not_finite_is_an_error() -> None:
    """Its statistics would make all outputs NaN, long after the call."""
    prepared = qt.prepare(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train(), backend="tensorrt10")
    x = torch.randn(8, 3, 6, 6)
    qt.calibrate(prepared, [x], progress=False)
    before = copy.deepcopy(prepared.state_dict())
    x[0, 0, 0, 0] = torch.nan
    with pytest.raises(
        ValueError, match=r"batch norm '1' are not finite, so nothing was changed: a batch contains NaN"
    ):
        qt.tuning.reestimate_batch_norm(prepared, [torch.randn(8, 3, 6, 6), x], progress=False)
    torch.testing.assert_close(dict(prepared.state_dict()), dict(before), rtol=0, atol=0)


def test_ranges_of_the_old_statistics_are_said() -> None:
    """A model that is calibrated in eval mode has ranges of the old running statistics, which stay."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, eps=1e-9), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    with torch.no_grad():
        model[1].running_var.fill_(100.0)
    x = torch.randn(16, 3, 8, 8)
    replaced = qt.quant_modules.replace(model, backend="tensorrt10")
    qt.calibrate(replaced, [x], progress=False)
    with pytest.warns(
        UserWarning, match=r"ranges of '3\.input_quantizer' \(\d+\.\d% clipped\) do not fit their tensors"
    ):
        qt.tuning.reestimate_batch_norm(replaced, [x], progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qt.calibrate(replaced, [x], progress=False)
        qt.tuning.reestimate_batch_norm(replaced, [x], progress=False)
    with torch.no_grad():
        model[1].running_var.fill_(1e-7)
    wide = qt.quant_modules.replace(model, backend="tensorrt10")
    qt.calibrate(wide, [x], progress=False)
    with pytest.warns(UserWarning, match=r"ranges of '3\.input_quantizer' \(all rounded to zero\) do not fit"):
        qt.tuning.reestimate_batch_norm(wide, [x], progress=False)


@pytest.mark.parametrize("quantizer", ["fixed", "lsq"])
def test_a_channel_that_is_rounded_to_zero_keeps_its_variance(quantizer: str) -> None:
    """A variance of zero would enlarge its weights hundreds of times: with one scale for all channels they get codes then."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)).train()
    with torch.no_grad():
        model[1].weight[0] = 0.01
    x = torch.randn(64, 3, 8, 8)
    qt.tuning.reestimate_batch_norm(model, [x], progress=False)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(None, qt.QuantSpec(bits=3, axis=None, quantizer=quantizer)))
    prepared = qt.prepare(model, (x,), qconfig_mapping=mapping, backend="tensorrt10")
    qt.calibrate(prepared, [x], progress=False)
    before = prepared.get_submodule("1").running_var[0].clone()
    qt.tuning.reestimate_batch_norm(prepared, [x], progress=False)
    assert prepared.get_submodule("1").running_var[0] == before
    torch.testing.assert_close(prepared.eval()(x)[:, 0], model.eval()(x)[:, 0], rtol=0, atol=0.05)


class NormAndActivation(nn.BatchNorm2d):
    """A type of its own, as timm's BatchNormAct2d."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.relu(super().forward(input))


def test_subclasses_of_batch_norms_are_estimated_too() -> None:
    """Only torch's own types were, and others kept their statistics without a word."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), NormAndActivation(4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)).eval()
    model[0].bias.data += 10
    x = torch.randn(32, 3, 8, 8)
    replaced = qt.quant_modules.replace(model, backend="tensorrt10")
    qt.disable_quantization(replaced).apply()
    for estimated in (copy.deepcopy(model), replaced):
        assert qt.tuning.reestimate_batch_norm(estimated, [x], progress=False).batch_norms == ("1", "3")
        y = model[0](x).detach()
        torch.testing.assert_close(estimated.get_submodule("1").running_mean, y.mean((0, 2, 3)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{"axis": 0}, {"axis": 0, "pow2_scale": True}, {"axis": None}], ids=str)
def test_codes_that_were_chosen_stay_or_are_said_to_be_lost(options: dict) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).train()
    model[1].running_var.copy_(torch.linspace(0.1, 1, 8))
    x = torch.randn(32, 3, 8, 8)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(None, qt.QuantSpec(bits=3, **options)))
    prepared = qt.prepare(model, (x,), qconfig_mapping=mapping, backend="tensorrt10")
    qt.calibrate(prepared, [x], progress=False)
    layer = prepared.get_submodule("0")
    grid = CodeGrid(layer, "0")
    grid.store(grid.nearest())  # as reconstruct does
    before = layer.weight_quantizer.to_grid().codes(layer.effective_weight().detach())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        qt.tuning.reestimate_batch_norm(prepared, [x], progress=False)
    stayed = torch.equal(layer.weight_quantizer.to_grid().codes(layer.effective_weight().detach()), before)
    assert stayed == (options == {"axis": 0})
    assert any("the chosen roundings of" in str(each.message) for each in found) != stayed


def test_weights_that_the_new_statistics_clip_are_said() -> None:
    """A scale that is a power of two stays, and a smaller variance makes the weights larger than its range."""
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).train(), torch.randn(32, 3, 8, 8)
    model[1].running_var.fill_(100.0)
    spec = qt.QuantSpec(axis=0, pow2_scale=True)
    prepared = qt.prepare(
        model, (x,), qconfig_mapping=qt.QConfigMapping().set_global(qt.QConfig(None, spec)), backend="tensorrt10"
    )
    qt.calibrate(prepared, [x], progress=False)
    qt.freeze_ranges(prepared)
    with pytest.warns(
        UserWarning, match=r"ranges of '0\.weight_quantizer' \(\d+\.\d% clipped\) do not fit their tensors"
    ):
        qt.tuning.reestimate_batch_norm(prepared, [x], progress=False)
