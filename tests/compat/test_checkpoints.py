"""Checkpoints of pytorch-quantization and Model Optimizer in models of qtoolkit's own, and in those of compat."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.compat.checkpoints import load_amax
from qtoolkit.compat.pytorch_quantization import nn as quant_nn
from qtoolkit.compat.pytorch_quantization import quant_modules
from tests import reference


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.up = nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2)
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.up(self.bn(self.conv(x)).relu()).mean((2, 3)))


LAYERS = ("conv", "up", "head")


def floats() -> Net:
    model = Net().eval()
    with torch.no_grad():
        model.bn.running_var.uniform_(0.5, 2)
        model.bn.weight.copy_(torch.tensor([1.0, -2.0, 0.5, 1.5]))
    return model


def checkpoint(model: Net) -> dict:
    """What pytorch-quantization saves of the model, with ranges of the inputs that are easy to tell apart."""
    ranges = {f"{layer}._input_quantizer._amax": torch.tensor(1.0 + i) for i, layer in enumerate(LAYERS)}
    for layer in LAYERS:
        weight = model.get_submodule(layer).weight.detach()
        axis = 1 if layer == "up" else 0
        dims = [d for d in range(weight.dim()) if d != axis]
        ranges[f"{layer}._weight_quantizer._amax"] = weight.abs().amax(dims, keepdim=True)
    return {**model.state_dict(), **ranges}


def replaced(model: nn.Module) -> nn.Module:
    return qt.quant_modules.replace(model, backend="tensorrt10")


def amax_of(model: nn.Module, name: str) -> torch.Tensor:
    return model.get_submodule(name).amax


def close(a, b) -> None:
    torch.testing.assert_close(a, b, rtol=2e-7, atol=0)  # amax is kept as a scale


def as_model_optimizer(saved: dict) -> dict:
    return {key.replace("._input_q", ".input_q").replace("._weight_q", ".weight_q"): v for key, v in saved.items()}


def under_ddp(saved: dict) -> dict:
    return {f"module.{key}": value for key, value in saved.items()}


@pytest.mark.parametrize("form", [dict, as_model_optimizer, under_ddp])
def test_a_replaced_model_takes_all_ranges(form):
    saved = checkpoint(floats())
    model = replaced(floats())
    names = load_amax(model, form(saved))
    assert sorted(names) == sorted(f"{layer}.{kind}_quantizer" for layer in LAYERS for kind in ("input", "weight"))
    for i, layer in enumerate(LAYERS):
        close(amax_of(model, f"{layer}.input_quantizer"), torch.tensor(1.0 + i))
    for layer in ("conv", "head"):
        close(amax_of(model, f"{layer}.weight_quantizer"), saved[f"{layer}._weight_quantizer._amax"].flatten())
    close(amax_of(model, "up.weight_quantizer"), saved["up._weight_quantizer._amax"].flatten().repeat(2))
    model(torch.randn(1, 3, 6, 6))


@pytest.mark.parametrize("form", [dict, as_model_optimizer])
def test_a_prepared_model_takes_inputs_by_their_layers(form):
    saved = checkpoint(floats())
    model = qt.prepare(floats().train(), backend="tensorrt10")
    names = load_amax(model, form(saved))
    behind = {line.name: line.inputs for line in qt.quantization_report(model).layers if line.name in LAYERS}
    assert set(names) == {f"{layer}.weight_quantizer" for layer in LAYERS} | {name for (name,) in behind.values()}
    for i, layer in enumerate(LAYERS):
        close(amax_of(model, behind[layer][0]), torch.tensor(1.0 + i))


def test_a_folded_batch_norm_leaves_the_codes_of_the_weight_as_they_were():
    net = floats()
    saved = checkpoint(net)
    model = qt.prepare(net.train(), backend="tensorrt10")
    load_amax(model, saved)
    layer = model.get_submodule("conv")
    factor = (net.bn.weight / (net.bn.running_var + net.bn.eps).sqrt()).detach()
    close(layer.weight_quantizer.amax, saved["conv._weight_quantizer._amax"].flatten() * factor.abs())
    codes = reference.quantize(net.conv.weight, saved["conv._weight_quantizer._amax"].flatten() / 127, axis=0)
    folded = net.conv.weight.detach() * factor.reshape(-1, 1, 1, 1)
    ours = reference.quantize(folded, layer.weight_quantizer.scale, axis=0)
    assert torch.equal(ours, codes * factor.sign().reshape(-1, 1, 1, 1).long())


def test_the_whole_model_computes_what_the_checkpoint_says():
    net = floats()
    net.bn = nn.Identity()
    saved = checkpoint(net)
    model = qt.prepare(net, backend="tensorrt10")
    load_amax(model, saved)
    model.get_submodule(
        "activation_quantizers.up"
    ).disable()  # of the mean's input, which the checkpoint has no range for

    def operands(layer, x):
        amax = saved[f"{layer}._weight_quantizer._amax"]
        axis = {"up": 1}.get(layer, 0)
        weight = reference.fake_quant(net.get_submodule(layer).weight, amax.flatten() / 127, axis=axis)
        scale = saved[f"{layer}._input_quantizer._amax"] / 127
        return reference.fake_quant(x, scale), weight, net.get_submodule(layer).bias

    x = torch.randn(2, 3, 6, 6)
    up = F.conv_transpose2d(*operands("up", F.conv2d(*operands("conv", x)).relu()), stride=2, groups=2)
    wanted = F.linear(*operands("head", up.mean((2, 3))))
    torch.testing.assert_close(model(x), wanted, rtol=0, atol=1e-5)


def test_a_shared_quantizer_takes_the_largest_range():
    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.a(x) + self.b(x)

    model = qt.prepare(Fork(), backend="tensorrt10")
    saved = {"a._input_quantizer._amax": torch.tensor(3.0), "b._input_quantizer._amax": torch.tensor(2.0)}
    with pytest.warns(UserWarning, match=r"is shared by a\._input_quantizer\._amax, b\._input_quantizer\._amax"):
        (name,) = load_amax(model, saved)
    close(amax_of(model, name), torch.tensor(3.0))


def test_quantizers_of_a_users_own_are_found_by_name():
    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self._input_quantizer = qt.TensorQuantizer(qt.QuantSpec())
            self.output_quantizer = qt.TensorQuantizer(qt.QuantSpec())

    saved = {"_input_quantizer._amax": torch.tensor(3.0), "output_quantizer._amax": torch.tensor(2.0)}
    model = Mine()
    assert load_amax(model, saved) == ("_input_quantizer", "output_quantizer")
    close(model.output_quantizer.amax, torch.tensor(2.0))


def test_a_range_per_tensor_serves_all_channels():
    model = replaced(floats())
    load_amax(model, {"head._weight_quantizer._amax": torch.tensor(0.5)})
    close(amax_of(model, "head.weight_quantizer"), torch.tensor([0.5, 0.5]))


@pytest.mark.parametrize(
    "key",
    [
        "conv._input_quantizer._pre_quant_scale",
        "conv.output_quantizer._amax",
        "conv.weight_quantizer.0._amax",
        "lstm._input_quantizers.0._amax",
        "gone._input_quantizer._amax",
    ],
)
def test_what_has_no_place_is_named(key):
    saved = {**checkpoint(floats()), key: torch.tensor(1.0)}
    with pytest.raises(KeyError, match=f"that the model does not have: {key};"):
        load_amax(replaced(floats()), saved)
    assert len(load_amax(replaced(floats()), saved, strict=False)) == 6


def test_a_checkpoint_without_ranges_is_named():
    with pytest.raises(KeyError, match="has no key '..._quantizer._amax'"):
        load_amax(replaced(floats()), floats().state_dict())
    assert load_amax(replaced(floats()), floats().state_dict(), strict=False) == ()


@pytest.mark.parametrize(
    ("key", "shape", "words"),
    [
        ("conv._weight_quantizer._amax", (3, 1, 1, 1), r"has the shape \[3, 1, 1, 1\].*one element, or 4 along axis 0"),
        (
            "up._weight_quantizer._amax",
            (4, 1, 1, 1),
            r"has the shape \[4, 1, 1, 1\].*one element, or 6 along axis 1; a QConfig with QuantSpec\(axis=0\)",
        ),
        ("head._weight_quantizer._amax", (2, 6), r"has the shape \[2, 6\].*one element, or 2 along axis 0"),
        ("head._weight_quantizer._amax", (1, 2), r"has the shape \[1, 2\].*one element, or 2 along axis 0"),
        ("head._input_quantizer._amax", (1, 2), r"'head.input_quantizer' takes one element\."),
    ],
)
def test_a_range_of_another_shape_is_named(key, shape, words):
    with pytest.raises(ValueError, match=f"load_amax: '{key}' {words}" if "has" in words else words):
        load_amax(replaced(floats()), {key: torch.ones(shape)})


def test_a_folded_batch_norm_needs_ranges_per_channel():
    mapping = qt.QConfigMapping().set_module_name("conv", qt.QConfig(qt.QuantSpec(), qt.QuantSpec(axis=None)))
    model = qt.prepare(floats().train(), qconfig_mapping=mapping, backend="tensorrt10")
    with pytest.raises(ValueError, match="needs a range for each of 4 output channels, got 1"):
        load_amax(model, {"conv._weight_quantizer._amax": torch.tensor(1.0)})


def test_a_batch_norm_that_is_folded_already_is_an_error():
    with pytest.raises(ValueError, match="'conv.weight_quantizer' has its batch norm folded in.*in training mode"):
        load_amax(qt.prepare(floats(), backend="tensorrt10"), checkpoint(floats()))


@pytest.mark.parametrize("quantizer", ["fixed", "lsq"])
def test_a_bad_range_leaves_all_ranges(quantizer):
    spec = qt.QuantSpec(quantizer=quantizer)
    model = qt.quant_modules.replace(
        floats(), qt.QConfigMapping().set_global(qt.QConfig(spec, spec)), backend="tensorrt10"
    )
    good, bad = (f"{layer}._input_quantizer._amax" for layer in ("conv", "head"))
    with pytest.raises(ValueError, match="amax must not be negative"):
        load_amax(model, {good: torch.tensor(5.0), bad: torch.tensor(-1.0)})
    assert not any(quantizer.ready for quantizer in qt.quantizers_of(model).values() if not quantizer.of_weight)
    assert model.get_submodule("conv.input_quantizer").scale.isnan()


def test_a_model_without_quantizers_is_refused():
    with pytest.raises(ValueError, match="Net has no quantizers; call qtoolkit.prepare"):
        load_amax(floats(), checkpoint(floats()))


def test_compat_models_take_the_whole_checkpoint_themselves():
    saved = checkpoint(floats())
    quant_modules.initialize()
    try:
        model = Net().eval()
    finally:
        quant_modules.deactivate()
    model.load_state_dict(saved)
    assert isinstance(model.up, quant_nn.QuantConvTranspose2d)
    for key in saved:
        assert torch.equal(model.state_dict()[key], saved[key])
    x = torch.randn(2, 3, 6, 6)
    first = reference.tensor_quant(x, torch.tensor(1.0), 8, False, False)[2]
    amax = saved["conv._weight_quantizer._amax"]
    weight = reference.tensor_quant(saved["conv.weight"], amax, 8, False, False)[2]
    assert torch.equal(model.conv(x), F.conv2d(first, weight, saved["conv.bias"]))


@pytest.mark.parametrize("route", ["replace", "prepare"])
def test_model_optimizers_axis_of_transposed_convolutions_by_the_config(route):
    """Its INT8_DEFAULT_CFG has axis 0 for weights of all layers."""
    model = nn.Sequential(nn.ConvTranspose2d(4, 6, 2), nn.Flatten(), nn.Linear(54, 2)).eval()
    amaxs = {
        "0.weight_quantizer._amax": torch.rand(4, 1, 1, 1) + 0.1,
        "2.weight_quantizer._amax": torch.rand(2, 1) + 0.1,
    }
    mapping = qt.QConfigMapping().set_object_type(nn.ConvTranspose2d, qt.QConfig(qt.QuantSpec(), qt.QuantSpec(axis=0)))
    quantized = (
        qt.quant_modules.replace(model, mapping, backend="tensorrt10")
        if route == "replace"
        else qt.prepare(model, qconfig_mapping=mapping, backend="tensorrt10")
    )
    assert load_amax(quantized, amaxs) == ("0.weight_quantizer", "2.weight_quantizer")
    quantizer = quantized.get_submodule("0.weight_quantizer")
    wanted = reference.fake_quant(
        model[0].weight, amaxs["0.weight_quantizer._amax"].flatten() / 127, None, -128, 127, 0
    )
    assert torch.equal(quantizer(model[0].weight), torch.as_tensor(wanted))


@pytest.mark.parametrize("amax", [1.27, "1.27", None, [1.27]], ids=str)
def test_a_range_that_is_no_tensor_is_named(amax: object) -> None:
    model = qt.prepare(nn.Sequential(nn.Linear(2, 2)), backend="tensorrt10")
    entries = {"0._weight_quantizer._amax": torch.ones(2, 1), "0._input_quantizer._amax": amax}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(TypeError, match=r"^load_amax: '0._input_quantizer._amax' must be a tensor, got \w+\."):
        load_amax(model, entries)
    assert all(torch.equal(value, before[name]) or value.isnan().all() for name, value in model.state_dict().items())
