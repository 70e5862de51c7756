"""Layers that quantize only their input: pooling, instance normalization, and a user-defined layer."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.nn.replacement import replace_layers
from tests import reference

# Float layer, its arguments, and the shape of an input.
SHAPES = {1: (2, 4, 12), 2: (2, 4, 9, 8), 3: (2, 4, 6, 5, 7)}
LAYERS = {
    f"{name}{d}d": (getattr(nn, f"{name}{d}d"), arguments, SHAPES[d])
    for d in (1, 2, 3)
    for name, arguments in (
        ("MaxPool", {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True}),
        ("AvgPool", {"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False}),
        ("AdaptiveAvgPool", {"output_size": 3}),
        ("InstanceNorm", {"num_features": 4, "affine": True, "track_running_stats": True}),
    )
}
ACTIVATION = qt.QuantSpec(bits=4)


def pair(name: str) -> tuple[nn.Module, qt.nn.QuantModule, Tensor]:
    """A float layer, its QAT module with a calibrated quantizer, and an input."""
    kind, arguments, shape = LAYERS[name]
    layer, x = kind(**arguments), torch.randn(shape)
    model = nn.Sequential(copy.deepcopy(layer))
    replace_layers(model, [""], lambda *_: qt.QConfig(ACTIVATION, None), qt.nn.REPLACED_MODULES)
    qt.calibrate(model, [x], progress=False)
    return layer, model[0], x


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_has_its_quantized_form(name: str) -> None:
    layer, ours, _ = pair(name)
    assert type(ours) is getattr(qt.nn, f"Quant{name}")
    assert list(qt.quantizers_of(ours)) == ["input_quantizer"]
    assert type(layer) not in qt.nn.QAT_MODULES  # in a graph, its edges have the quantizers


@pytest.mark.parametrize("name", LAYERS)
def test_it_is_the_float_layer_of_an_input_on_the_grid(name: str) -> None:
    layer, ours, x = pair(name)
    grid = reference.fake_quant(x, ours.input_quantizer.scale, None, -8, 7)
    for training in (False, True):
        layer.train(training), ours.train(training)
        assert torch.equal(ours(x), layer(grid))
        assert not torch.equal(ours(x), layer(x))


@pytest.mark.parametrize("name", LAYERS)
def test_with_its_quantizer_off_it_is_the_float_layer(name: str) -> None:
    layer, ours, x = pair(name)
    with qt.disable_quantization(ours):
        assert torch.equal(ours(x), layer(x))
        assert torch.equal(ours(input=x), layer(x))
    assert torch.equal(ours.forward_fp32(x), layer(x))


@pytest.mark.parametrize("name", LAYERS)
def test_from_float_and_back(name: str) -> None:
    layer, ours, x = pair(name)
    ours.load_state_dict(layer.state_dict())  # strict: a float checkpoint loads
    back = ours.to_float()
    assert type(back) is type(layer)
    assert vars(back).keys() == vars(layer).keys()
    assert torch.equal(back(x), layer(x))


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
@pytest.mark.parametrize("name", ["MaxPool2d", "InstanceNorm1d"])
def test_copies_compute_the_same(name: str, copy_of) -> None:
    _, ours, x = pair(name)
    twin = copy_of(ours)
    assert torch.equal(twin(x), ours(x))
    assert twin.input_quantizer is not ours.input_quantizer


@pytest.mark.parametrize("d", [1, 2, 3])
def test_indices_are_those_of_the_quantized_input(d: int) -> None:
    ours = getattr(qt.nn, f"QuantMaxPool{d}d")(2, return_indices=True, input_spec=ACTIVATION)
    ours.input_quantizer.amax = 2.0
    x = torch.randn(SHAPES[d])
    values, indices = ours(x)
    grid = reference.fake_quant(x, ours.input_quantizer.scale, None, -8, 7)
    wanted, places = getattr(nn, f"MaxPool{d}d")(2, return_indices=True)(grid)
    assert torch.equal(values, wanted)
    assert torch.equal(indices, places)


def test_gradients_are_straight_through() -> None:
    layer, ours, x = pair("AvgPool2d")
    ours.input_quantizer.amax = 1.0  # so that some values are clamped
    g = torch.randn(layer(x).shape)
    ours(x.requires_grad_()).backward(g)
    float_x = x.detach().clone().requires_grad_()
    layer(float_x).backward(g)
    inside = reference.inside(x, ours.input_quantizer.scale, None, -8, 7)
    assert torch.equal(x.grad, float_x.grad * inside)
    assert not inside.all()


@pytest.mark.parametrize("spec", [None, qt.QuantSpec(axis=1)], ids=["none", "per_channel"])
def test_built_with_a_spec_of_its_input(spec: qt.QuantSpec | None) -> None:
    ours = qt.nn.QuantAvgPool2d(2, input_spec=spec)
    x = torch.randn(SHAPES[2])
    if spec is None:
        assert ours.input_quantizer is None
        assert torch.equal(ours(x), nn.AvgPool2d(2)(x))
        return
    with pytest.raises(RuntimeError, match="'QuantAvgPool2d.input_quantizer' has no range yet"):
        ours(x)
    qt.calibrate(ours, [x], progress=False)
    assert ours.input_quantizer.scale.shape == (4,)


def test_its_quantizer_is_made_on_the_device_of_its_parameters() -> None:
    ours = qt.nn.QuantInstanceNorm2d(4, affine=True, device="meta", input_spec=ACTIVATION)
    assert ours.input_quantizer.scale.device.type == "meta"


class Shift(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor, times: int = 1) -> Tensor:
        return x + self.by * times


class QuantShift(qt.nn.QuantInput, Shift):
    FLOAT, KIND = Shift, "shift"


def test_a_users_own_layer_takes_two_lines() -> None:
    model = nn.Sequential(Shift(1.0), nn.ReLU())
    assert replace_layers(model, [""], lambda *_: qt.QConfig(ACTIVATION, None), {Shift: QuantShift}) == ["0"]
    model[0].input_quantizer.amax = 7.0
    assert torch.equal(model[0](torch.tensor([0.6, 9.0]), times=2), torch.tensor([3.0, 9.0]))
    assert torch.equal(model(torch.tensor([0.6, 9.0])), torch.tensor([2.0, 8.0]))


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"KIND": "shifts"}, "unknown KIND of class QuantMine: 'shifts'; did you mean 'shift'? Known: abs, add, "),
        ({}, "class QuantMine has no KIND; set it to the kind of its op, or to 'other'."),
    ],
)
def test_a_layer_of_an_unknown_kind_is_an_error(attributes: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match="KIND") as error:
        type("QuantMine", (qt.nn.QuantInput, nn.GLU), {"FLOAT": nn.GLU, **attributes})
    assert words in str(error.value)
    assert type("QuantMine", (qt.nn.QuantInput, nn.GLU), {"FLOAT": nn.GLU, "KIND": "other"})().KIND == "other"
