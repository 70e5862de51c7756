"""equalize(): the function stays, the ranges become equal, and the sharpest case of papers: per-tensor depthwise nets."""

import copy
import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.tuning.equalize import ranges_of_channels
from tests import nets
from tests.tuning.nets import Residual

CHAINS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), (16, 6)),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(3, 8, 3), nn.LeakyReLU(0.2), nn.Conv1d(8, 3, 3)), (4, 3, 9)),
    "bn": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 3, 1)),
        (4, 3, 8, 8),
    ),
    "prelu": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.PReLU(8), nn.MaxPool2d(2), nn.Conv2d(8, 3, 1)), (4, 3, 8, 8)),
    "depthwise": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)
        ),
        (4, 3, 8, 8),
    ),
    "groups": (lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 6, 3, groups=2)), (4, 3, 8, 8)),
    "conv_transpose": (
        lambda: nn.Sequential(
            nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), nn.BatchNorm2d(6), nn.PReLU(),
            nn.ConvTranspose2d(6, 8, 2, stride=2, groups=2), nn.Dropout2d(), nn.Conv2d(8, 2, 3),
        ),
        (2, 4, 5, 5),
    ),
    "conv3d": (lambda: nn.Sequential(nn.Conv3d(2, 4, 3), nn.ReLU(), nn.ConvTranspose3d(4, 3, 2)), (2, 2, 5, 5, 5)),
}  # fmt: skip


def uneven(model: nn.Module) -> nn.Module:
    """Give the output channels of every layer ranges of very different sizes."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(module.weight, -1.5, 1.5)
            nn.init.normal_(module.bias)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            nn.init.normal_(module.running_mean)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
                module.weight.mul_(
                    torch.logspace(-2, 1, len(module.weight)).reshape(-1, *[1] * (module.weight.dim() - 1))
                )
    return model


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", CHAINS)
def test_the_function_stays_and_ranges_become_equal(name: str, train: bool) -> None:
    make, shape = CHAINS[name]
    model = uneven(make()).double().train(train)
    for module in model.modules():
        if isinstance(module, nn.Dropout2d):
            module.eval()
    x = torch.randn(shape, dtype=torch.double)
    result = qt.tuning.equalize(model, x)
    layers = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) or "Conv" in type(m).__name__]
    assert [(pair.first, pair.second) for pair in result.pairs] == list(itertools.pairwise(layers))
    torch.testing.assert_close(result.model(x), copy.deepcopy(model)(x), rtol=1e-6, atol=1e-9)
    assert result.model.training is train
    assert all(pair.after < pair.before for pair in result.pairs)
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), result.model.parameters(), strict=True))


def test_the_factors_are_those_of_the_paper() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    r1, r2 = model[0].weight.abs().amax(1), model[2].weight.abs().amax(0)
    s = torch.sqrt(r1 * r2) / r2
    result = qt.tuning.equalize(model, torch.randn(2, 3, dtype=torch.double)).model
    torch.testing.assert_close(result[0].weight, model[0].weight / s[:, None])
    torch.testing.assert_close(result[0].bias, model[0].bias / s)
    torch.testing.assert_close(result[2].weight, model[2].weight * s)


def test_a_depthwise_net_per_tensor_needs_it() -> None:
    torch.manual_seed(0)
    model, x = uneven(CHAINS["depthwise"][0]()).eval(), torch.randn(8, 3, 8, 8)
    per_tensor = qt.QConfigMapping().set_global(qt.QConfig(activation=None, weight=qt.QuantSpec(bits=8, axis=None)))
    errors = []
    for each in (model, qt.tuning.equalize(model, x).model):
        prepared = qt.prepare(each, x, qconfig_mapping=per_tensor, backend="tensorrt10")
        qt.calibrate(prepared, [x], progress=False)
        errors.append(float((prepared(x) - model(x)).detach().square().mean() / model(x).detach().square().mean()))
    assert errors[1] < errors[0] / 10


class Awkward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Conv2d(4, 4, 1) for _ in range(4))
        self.twice = nn.Conv2d(4, 4, 1)
        self.fc = nn.Linear(4 * 16, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.a(x))
        y = self.b(x)
        x = self.c(y) + y
        x = torch.relu(self.d(x))
        x = self.twice(torch.relu(self.twice(x)))
        return self.fc(torch.flatten(torch.relu(x), 1))


def test_layers_that_stay_are_named_with_the_reason() -> None:
    model, x = Awkward(), torch.randn(2, 4, 4, 4)
    result = qt.tuning.equalize(model, x)
    assert result.pairs == ()
    assert "relu6) follows it" in result.skipped["a"]
    assert result.skipped["b"] == "2 ops use the output of 'b'"
    assert "(add) follows it" in result.skipped["c"]
    assert result.skipped["d"] == "'twice' or its weight is used more than once"
    assert "fc: unchanged" in str(result)


class Positions(nn.Module):
    """A convolution, an op on the positions of its channels or on the channels themselves, and another one."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.between = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), between

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(torch.relu(self.a(x))))


@pytest.mark.parametrize(
    ("between", "passes"),
    [
        (lambda x: F.pad(x, (1, 1, 2, 0)), True),
        (lambda x: F.pad(x, pad=(1, 1)), True),
        (lambda x: F.pad(x, (0, 0, 0, 0, 0, 1))[:, :4], False),
        (lambda x: x.mean((2, 3), keepdim=True), True),
        (lambda x: torch.mean(x, dim=[-2, -1], keepdim=True), True),
        (lambda x: x.mean(-1, True), True),
        (lambda x: x.mean(1, keepdim=True).expand(-1, 4, -1, -1), False),
    ],
)
def test_factors_pass_through_ops_on_positions(between: Callable[[Tensor], Tensor], passes: bool) -> None:
    model, x = uneven(Positions(between)).double(), torch.randn(2, 3, 8, 8, dtype=torch.double)
    result = qt.tuning.equalize(model, x, progress=False)
    assert [(pair.first, pair.second) for pair in result.pairs] == [("a", "b")] * passes
    torch.testing.assert_close(result.model(x), model(x), rtol=1e-6, atol=1e-9)


class Rows(nn.Module):
    """A linear layer, a mean over dimensions of its output, whose last one has its channels, and another layer."""

    def __init__(self, dims: int | tuple[int, ...]) -> None:
        super().__init__()
        self.a, self.b, self.dims = nn.Linear(3, 4), nn.Linear(4, 4), dims

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)).mean(self.dims))


@pytest.mark.parametrize(("shape", "dims"), [((2, 4, 3), 2), ((2, 4, 5, 3), (2, 3)), ((2, 4, 5, 3), (-2, -1))])
def test_no_factor_passes_through_a_mean_over_the_channels(shape: tuple[int, ...], dims: int | tuple[int, ...]) -> None:
    model, x = uneven(Rows(dims)).double(), torch.randn(shape, dtype=torch.double)
    result = qt.tuning.equalize(model, x, progress=False)
    assert result.pairs == ()
    torch.testing.assert_close(result.model(x), model(x), rtol=1e-6, atol=1e-9)


def test_the_users_model_stays_unless_in_place() -> None:
    model, x = nets.trained(Residual(), 4, 3, 8, 8).eval(), torch.randn(4, 3, 8, 8)
    before = copy.deepcopy(model.state_dict())
    result = qt.tuning.equalize(model, x)
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert [pair.first for pair in result.pairs] == ["stage.0.conv1", "stage.1.conv1", "neck.0", "neck.2"]
    assert qt.tuning.equalize(model, x, inplace=True).model is model
    torch.testing.assert_close(dict(model.state_dict()), dict(result.model.state_dict()), rtol=0, atol=0)
    assert "neck.0" in qt.tuning.equalize(model, x, skip=["neck.0"]).skipped


def test_a_hidden_use_of_a_tensor_is_found_and_nothing_is_changed() -> None:
    class Peeks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.register_buffer("peeked", self.a.weight.detach(), persistent=False)  # the same memory

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.relu(self.a(x))) + self.peeked.sum()

    model, x = uneven(Peeks()), torch.randn(2, 4)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        RuntimeError, match=r"equalize: the model's output would change by .* Exclude the affected layers .* skip"
    ):
        qt.tuning.equalize(model, x, inplace=True)
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)


def test_bad_arguments() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    with pytest.raises(TypeError, match="equalize it before it is prepared"):
        qt.tuning.equalize(qt.prepare(model, backend="tensorrt10"), x)
    with pytest.raises(ValueError, match="unknown layer in skip of equalize '1'"):
        qt.tuning.equalize(model, x, skip=["1"])
    with pytest.raises(TypeError, match="model must be a torch.nn.Module"):
        qt.tuning.equalize(len, x)


@pytest.mark.parametrize("name", CHAINS)
def test_channels_of_activations_become_equally_wide(name: str) -> None:
    torch.manual_seed(0)
    build, shape = CHAINS[name]
    model, x = uneven(build()).eval(), torch.randn(shape)
    y = model(x)
    result = qt.tuning.equalize(model, x, activations=1.0)
    torch.testing.assert_close(result.model(x), y, rtol=1e-4, atol=1e-5)
    assert result.pairs
    assert all(pair.after < max(1.01, pair.before) for pair in result.pairs)
    half = qt.tuning.equalize(model, x, activations=0.5)
    assert all(one.after <= two.after + 1e-3 for one, two in zip(result.pairs, half.pairs, strict=True))


def test_one_scale_for_all_channels_of_activations_needs_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.PReLU(32), nn.Linear(32, 8)).eval()
    x = torch.randn(512, 16)
    with torch.no_grad():
        sizes = torch.logspace(-1.5, 0, 32)
        model[0].weight.mul_(sizes[:, None])
        model[0].bias.mul_(sizes)
        model[2].weight.div_(sizes)  # all channels count the same at the end
    y = model(x).detach()

    def error(network: nn.Module) -> float:
        a4 = qt.QConfig(qt.QuantSpec(bits=4, signed=False, symmetric=False), qt.QuantSpec(bits=16, axis=0))
        prepared = qt.quant_modules.replace(
            network, qt.QConfigMapping().set_module_name("2", a4), ignore="0", backend="tensorrt10"
        )
        qt.calibrate(prepared, [x], progress=False)
        with torch.no_grad():
            return float((prepared(x) - y).square().mean())

    assert error(qt.tuning.equalize(model, x, activations=1.0).model) < error(model) / 10


def of_uneven_channels(activation: nn.Module) -> nn.Module:
    """Return a net with narrow channels, and with others that are so only behind PReLU, where they have a small slope."""
    model = nn.Sequential(nn.Conv1d(16, 32, 1), activation, nn.Conv1d(32, 8, 1)).eval()
    even = torch.arange(32) % 2 == 0
    sizes = torch.where(torch.arange(32) % 4 == 1, 0.2, 1.0)
    with torch.no_grad():
        model[0].bias.sub_(torch.where(even, 3.0, 0.0))  # mostly below 0
        model[0].weight.mul_(sizes[:, None, None])
        model[0].bias.mul_(sizes)
        model[2].weight.div_(sizes[:, None])
        if isinstance(activation, nn.PReLU):
            activation.weight.copy_(torch.where(even, 0.01, 1.0))
    return model


@pytest.mark.parametrize("backend", ["academic", "onnxruntime", "tensorrt10"])
@pytest.mark.parametrize("power", [0.5, 1.0])
def test_every_backend_gains_whether_it_quantizes_before_prelu_or_not(backend: str, power: float) -> None:
    torch.manual_seed(0)
    model, x = of_uneven_channels(nn.PReLU(32)), torch.randn(64, 16, 8)
    y = model(x).detach()
    a5 = qt.QConfig(qt.QuantSpec(bits=5, signed=False, symmetric=False), qt.QuantSpec(bits=16, axis=0))
    target = dataclasses.replace(qt.backends[backend], end_bits=None, quantize_graph_outputs=False)

    def error(network: nn.Module) -> float:
        mapping = qt.QConfigMapping().set_global(a5)
        prepared = qt.prepare(network, x, backend=target, qconfig_mapping=mapping)
        qt.calibrate(prepared, [x], progress=False)
        with torch.no_grad():
            return float((prepared(x) - y).square().mean())

    assert error(qt.tuning.equalize(model, x, activations=power).model) < error(model) / 2
    assert error(qt.tuning.equalize(model, x, activations=power, backend=target).model) < error(model) / 2


def test_only_tensors_that_the_backend_quantizes_count() -> None:
    torch.manual_seed(0)
    model, x = of_uneven_channels(nn.PReLU(32)), torch.randn(64, 16, 8)

    def ranges(backend: str | None) -> list[torch.Tensor]:
        equalized = qt.tuning.equalize(model, x, activations=1.0, backend=backend).model
        return [ranges_of_channels(equalized[:end](x), x, 1) for end in (1, 2)]

    for backend in ("academic", "tensorrt10"):  # the output of the PReLU alone
        before, behind = ranges(backend)
        assert behind.min() > 0.9 * behind.max()  # channels below a hundredth of the widest count as that
        assert before.min() < before.max() / 2
    for end in (0, 1):
        assert torch.equal(ranges("onnxruntime")[end], ranges(None)[end])
    with pytest.raises(ValueError, match="did you mean 'onnxruntime'"):
        qt.tuning.equalize(model, x, activations=1.0, backend="onnxruntim")


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_no_channel_gets_wider_than_the_widest_one(power: float) -> None:
    torch.manual_seed(0)
    model, x = of_uneven_channels(nn.PReLU(32)), torch.randn(64, 16, 8)
    equalized = qt.tuning.equalize(model, x, activations=power).model
    for end in (1, 2):
        before, after = (ranges_of_channels(net[:end](x), x, 1) for net in (model, equalized))
        assert after.max() <= before.max() * 1.001
        assert after[1::4].min() > 2 * before[1::4].min()


def test_what_relu_removes_does_not_count() -> None:
    torch.manual_seed(0)
    model, x = of_uneven_channels(nn.ReLU(inplace=True)), torch.randn(64, 16, 8)
    widths = torch.relu(model[0](x)).amax((0, 2)).detach()
    equalized = qt.tuning.equalize(model, x, activations=1.0).model
    found = equalized[:2](x).amax((0, 2))
    used = found > 0
    assert widths.max() > 4 * widths[used].min()
    assert found.max() < 1.001 * found[used].min()


def test_a_power_of_activations_is_a_share() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    for wrong in (0.0, -0.5, 1.5):
        with pytest.raises(ValueError, match="equalize: activations must be None, or above 0 and at most 1, got"):
            qt.tuning.equalize(model, torch.randn(4, 4), activations=wrong)


class Tied(nn.Module):
    """Layers that share a bias, a batch norm, or the scale of one, and a weight that forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.b.bias = self.a.bias
        self.d, self.e, self.f = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.bn, self.same = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.same.weight = self.bn.weight
        self.last = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.c(torch.relu(self.b(torch.relu(self.a(x))))))
        x = torch.relu(self.bn(self.e(torch.relu(self.bn(self.d(x))))))
        return self.last(torch.relu(self.same(self.f(x)))) + self.last.weight.mean()


def test_what_is_used_more_than_once_stays_with_the_reason() -> None:
    """Scaling it for one of its uses was an error about a tensor that the graph does not show."""
    model, x = uneven(Tied()), torch.randn(2, 3, 5, 5)
    result = qt.tuning.equalize(model, x, progress=False)
    assert [(pair.first, pair.second) for pair in result.pairs] == [("c", "d")]
    again = " is used more than once"
    assert result.skipped == {
        "a": "'a' or its bias" + again,
        "b": "'b' or its bias" + again,
        "d": "'bn' or its weight" + again,
        "e": "'bn' or its weight" + again,
        "f": "'same' or its weight" + again,
        "last": "'last' or its weight" + again,
    }
    torch.testing.assert_close(result.model.eval()(x), model.eval()(x), rtol=1e-4, atol=1e-5)


def test_a_weight_whose_memory_is_not_contiguous_is_scaled() -> None:
    """A view of its groups would be a copy, and what multiplies the copy is lost."""
    model, x = (
        uneven(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 4, 3, groups=2))),
        torch.randn(2, 3, 7, 7),
    )
    for layer in (model[0], model[2]):
        layer.weight.data = layer.weight.data.transpose(2, 3)
    result = qt.tuning.equalize(model, x, progress=False)
    assert len(result.pairs) == 1
    assert result.pairs[0].after < result.pairs[0].before


def test_activations_of_one_vector_without_a_batch() -> None:
    model = uneven(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    assert len(qt.tuning.equalize(model, torch.randn(8), activations=0.5, progress=False).pairs) == 1


def test_outputs_that_are_nan_are_an_error_and_infinite_ones_of_masks_are_not() -> None:
    model = uneven(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    with pytest.raises(ValueError, match=r"equalize: the model's output contains NaN before any change"):
        qt.tuning.equalize(model, torch.full((2, 8), torch.nan), progress=False)

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x).masked_fill(torch.eye(4, dtype=torch.bool), -torch.inf)

    assert len(qt.tuning.equalize(Masked(), torch.randn(4, 8), progress=False).pairs) == 1


def test_layers_whose_parameters_are_computed_are_named() -> None:
    model = uneven(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)))
    torch.nn.utils.parametrizations.weight_norm(model[2])
    result = qt.tuning.equalize(model, torch.randn(2, 8), progress=False)
    assert not result.pairs
    assert result.skipped["2"] == "the parameters of '2' are computed from others"
    assert set(result.skipped) == {"0", "2", "4"}
