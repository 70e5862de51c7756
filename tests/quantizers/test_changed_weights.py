"""After any change of a weight, in both modes, the prepared model computes what its converted form does, bit for bit."""

import copy
import io
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import qtoolkit as qt
from tests.copies import made_once

IMAGE = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(1))
ROWS = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(2))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.attention(x, x, x, need_weights=False)
        return self.head(y)


class Shared(nn.Module):
    """One layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.fc(F.relu(self.fc(x))))


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x)))


class Functions(nn.Module):
    """Layers written as functions, one of which takes a weight that the graph computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(4, 8))
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.relu(F.linear(x, self.first)), self.second * 2, self.bias)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


def zeroed(*layers: nn.Module) -> nn.Module:
    """Return the layers in a row; the first channel of the first batch norm has a scale of zero, as pruned ones have."""
    bn = next(layer for layer in layers if isinstance(layer, nn.BatchNorm2d))
    nn.init.normal_(bn.bias)
    with torch.no_grad():
        bn.weight[0] = 0.0
    return nn.Sequential(*layers)


NETS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), ROWS),
    "conv": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, groups=2)), IMAGE),
    "conv_bn": (
        lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4)),
        IMAGE,
    ),
    "zero_gamma": (lambda: zeroed(nn.Conv2d(4, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)), IMAGE),
    "transposed": (
        lambda: nn.Sequential(nn.ConvTranspose2d(4, 8, 3, 2, groups=2), nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 4, 2)),
        IMAGE,
    ),
    "shared": (Shared, ROWS),
    "tied": (Tied, ROWS),
    "attention": (Attention, ROWS),
    "functions": (Functions, ROWS),
    "recurrent": (Recurrent, ROWS),
    "table": (lambda: nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 4)), torch.arange(6).reshape(2, 3)),
    "renormalized_table": (
        lambda: nn.Sequential(nn.Embedding(8, 8, max_norm=0.5), nn.Linear(8, 4)),
        torch.arange(6).reshape(2, 3),
    ),
}
WEIGHTS = {
    "channels": qt.QuantSpec(axis=0),
    "tensor": qt.QuantSpec(),
    "four bits": qt.QuantSpec(bits=4, axis=0),
    "affine": qt.QuantSpec(signed=False, symmetric=False),
    "powers of two": qt.QuantSpec(pow2_scale=True),
    "learned": qt.QuantSpec(axis=0, quantizer="lsq"),
    "histogram": qt.QuantSpec(observer="histogram"),
}
CASES = [(net, route) for net in NETS for route in ("prepare", "replace") if (net, route) != ("functions", "replace")]
OF_EACH_CHANGE = [case for case in CASES if case[0] in ("linear", "conv_bn", "functions")]


@made_once
def quantized(net: str, route: str, weight: str) -> nn.Module:
    torch.manual_seed(3)
    build, x = NETS[net]
    model = build().train()
    mapping = qt.QConfigMapping().set_global(qt.QConfig(qt.QuantSpec(), WEIGHTS[weight]))
    if "table" in net:
        mapping = mapping.set_object_type(nn.Embedding, qt.QConfig(None, WEIGHTS[weight]))
    if route == "prepare":
        leaves = [nn.LSTM] if net == "recurrent" else []
        model = qt.prepare(model, x, backend="openvino", qconfig_mapping=mapping, leaf_modules=leaves)
    else:
        if isinstance(model, nn.Sequential) and isinstance(model[1], nn.BatchNorm2d):
            model = qt.fuse_modules(model, [["0", "1"]])
        model = qt.quant_modules.replace(model, backend="openvino", qconfig_mapping=mapping)
    qt.calibrate(model, [x], progress=False)
    return model


# ---- changes; each takes a model with its input, and returns the model that is used from then on


def step(model: nn.Module, x: Tensor) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model


def multiply(model: nn.Module, x: Tensor) -> nn.Module:
    with torch.no_grad():
        for place, parameter in enumerate(model.parameters()):
            parameter.mul_(1.5 + place % 3)
    return model


def multiply_data(model: nn.Module, x: Tensor) -> nn.Module:
    """Leaves no trace: no version of a tensor counts it."""
    for parameter in model.parameters():
        parameter.data.mul_(3)
    return model


def exchange_data(model: nn.Module, x: Tensor) -> nn.Module:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.4
    return model


def exchange_parameters(model: nn.Module, x: Tensor) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d) and not module._forward_pre_hooks:
            module.weight = nn.Parameter(2 * module.weight.detach())
    return model


def copied(model: nn.Module) -> nn.Module:
    """Return a copy, also of a model with pruned weights, which torch computes in each forward and cannot copy with a graph."""
    for module in model.modules():
        if isinstance(vars(module).get("weight"), Tensor):
            vars(module)["weight"] = vars(module)["weight"].detach()
    return copy.deepcopy(model)


def other(model: nn.Module, x: Tensor) -> nn.Module:
    """Return a copy with other weights, whose state dict has the scales of the weights before them."""
    return multiply_data(copied(model), x)


def load(model: nn.Module, x: Tensor) -> nn.Module:
    model.load_state_dict(other(model, x).state_dict(), strict=True)
    return model


def load_plain_dict(model: nn.Module, x: Tensor) -> nn.Module:
    model.load_state_dict(dict(other(model, x).state_dict()), strict=True)
    return model


def load_weights_alone(model: nn.Module, x: Tensor) -> nn.Module:
    of_float = {name: value for name, value in other(model, x).state_dict().items() if "quantizer" not in name}
    model.load_state_dict(of_float, strict=False)
    return model


def average(model: nn.Module, x: Tensor) -> nn.Module:
    averaged = AveragedModel(copied(model), multi_avg_fn=get_ema_multi_avg_fn(0.5))
    averaged.update_parameters(model)
    averaged.update_parameters(other(model, x))
    return averaged.module.train(model.training)


def from_vector(model: nn.Module, x: Tensor) -> nn.Module:
    vector_to_parameters(-2 * parameters_to_vector(model.parameters()), model.parameters())
    return model


def prune_weights(model: nn.Module, x: Tensor) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d) and type(module).__name__.startswith("Quant"):
            prune.ln_structured(module, "weight", 0.5, n=1, dim=0)
    return model


def reset(model: nn.Module, x: Tensor) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d | nn.ConvTranspose2d) and not prune.is_pruned(module):
            module.reset_parameters()
    return model


def move_statistics(model: nn.Module, x: Tensor) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_var.mul_(2)
            module.weight.data.mul_(-1.5)
    return model


def deepcopied(model: nn.Module, x: Tensor) -> nn.Module:
    return copied(model)


def pickled(model: nn.Module, x: Tensor) -> nn.Module:
    file = io.BytesIO()
    torch.save(copied(model), file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def train(model: nn.Module, x: Tensor) -> nn.Module:
    return model.train()


def evaluate(model: nn.Module, x: Tensor) -> nn.Module:
    return model.eval()


CHANGES = [
    step, multiply, multiply_data, exchange_data, exchange_parameters, load, load_plain_dict, load_weights_alone, average,
    from_vector, prune_weights, reset, move_statistics, deepcopied, pickled, train, evaluate,
]  # fmt: skip


def converted(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of ranges that clip what has grown, as histograms do
        return qt.convert(model)


def assert_equals_converted(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        expected = converted(model)(x)
    if model.training:
        model = copied(model).eval()
    assert torch.equal(model(x).detach(), expected)
    with torch.no_grad():
        assert torch.equal(model(x), expected)


@pytest.mark.slow
@settings(max_examples=40)
@given(
    case=st.sampled_from(CASES),
    weight=st.sampled_from([*WEIGHTS]),
    changes=st.lists(st.sampled_from(CHANGES), min_size=1, max_size=5),
    training=st.booleans(),
)
def test_prepared_equals_converted_after_any_changes(case, weight, changes, training):
    (net, route), (_, x) = case, NETS[case[0]]
    model = quantized(net, route, weight).train(training)
    for change in changes:
        model = change(model, x)
        assert_equals_converted(model, x)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("net", "route"), OF_EACH_CHANGE)
def test_prepared_equals_converted_after_each_change(net, route, training, change):
    model, x = quantized(net, route, "channels").train(training), NETS[net][1]
    model(x)
    assert_equals_converted(change(model, x), x)


# ---- who reads a scale without a forward


def test_the_scale_outside_of_a_forward_is_the_one_that_was_taken_last():
    model, x = quantized("linear", "prepare", "channels").eval(), ROWS
    quantizer = model.get_submodule("0.weight_quantizer")
    before = quantizer.scale.clone()
    multiply_data(model, x)
    assert torch.equal(quantizer.scale, before)
    model(x)
    torch.testing.assert_close(quantizer.scale, 3 * before)
    multiply_data(model, x)
    state = model.eval().state_dict()
    torch.testing.assert_close(state["0.weight_quantizer._scale"], 9 * before)


@pytest.mark.parametrize("net", ["linear", "conv_bn", "functions"])
def test_an_exported_program_has_the_scales_as_constants(net):
    model, x = quantized(net, "prepare", "channels").eval(), NETS[net][1]
    multiply_data(model, x)
    expected = model(x)
    program = torch.export.export(model, (x,))
    assert not program.graph_signature.buffers_to_mutate
    assert torch.equal(program.module()(x), expected)


def test_a_compiled_model_in_eval_mode_takes_the_ranges():
    model, x = quantized("conv_bn", "prepare", "channels").eval(), IMAGE
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for _ in range(2):
            multiply_data(model, x)
            assert torch.equal(compiled(x), converted(model)(x))


class Derived(qt.TensorQuantizer):
    """A quantizer with a forward of somebody's own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize("net", ["linear", "conv_bn"])
def test_a_derived_quantizer_takes_the_ranges(net):
    model, x = quantized(net, "prepare", "channels").eval(), NETS[net][1]
    model.get_submodule("0.weight_quantizer").__class__ = Derived
    assert_equals_converted(multiply_data(model, x), x)
