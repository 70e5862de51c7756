"""QAT layers against torch's own functions on separately fake-quantized weights, in every option of the layer."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from tests import reference

SPEC = qt.QuantSpec(bits=5, axis=0)

# Float layer, its arguments, and the shape of an input.
LAYERS = {
    "conv1d": (nn.Conv1d, (4, 6, 3), (2, 4, 9)),
    "conv2d": (nn.Conv2d, (4, 6, 3), (2, 4, 9, 8)),
    "conv3d": (nn.Conv3d, (4, 6, 3), (2, 4, 5, 6, 4)),
    "depthwise": (nn.Conv2d, (4, 4, 3, 1, 1, 1, 4), (2, 4, 9, 8)),
    "conv_transpose1d": (nn.ConvTranspose1d, (4, 6, 3, 2, 1, 1, 2), (2, 4, 5)),
    "conv_transpose2d": (nn.ConvTranspose2d, (4, 6, 3, 2, 1, 1, 2), (2, 4, 5, 6)),
    "conv_transpose3d": (nn.ConvTranspose3d, (4, 6, 3, 2, 1, 1, 2), (2, 4, 3, 4, 2)),
    "linear": (nn.Linear, (4, 6), (2, 7, 4)),
    "embedding": (nn.Embedding, (10, 4, 3), (2, 7)),
}


def float_layer(name: str) -> tuple[nn.Module, Tensor]:
    kind, arguments, shape = LAYERS[name]
    x = torch.randint(10, shape) if kind is nn.Embedding else torch.randn(shape)
    return kind(*arguments), x


@pytest.mark.parametrize("name", LAYERS)
def test_with_its_quantizer_off_a_layer_is_the_float_layer(name: str) -> None:
    layer, x = float_layer(name)
    ours = qt.nn.QAT_MODULES[type(layer)].from_float(layer, SPEC)
    assert torch.equal(ours.forward_fp32(x), layer(x))
    with qt.disable_quantization(ours):
        assert torch.equal(ours(x), layer(x))
        assert torch.equal(ours(input=x), layer(input=x))
    assert not torch.equal(ours(x), layer(x))


@pytest.mark.parametrize("axis", [0, None])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_with_its_weight_on_the_grid(name: str, axis: int | None) -> None:
    layer, x = float_layer(name)
    ours = qt.nn.QAT_MODULES[type(layer)].from_float(layer, qt.QuantSpec(bits=5, axis=axis))
    other = copy.deepcopy(layer)
    other.weight.data = reference.fake_quant(layer.weight, ours.weight_quantizer.scale, None, -16, 15, axis)
    assert torch.equal(ours(x), other(x))


@pytest.mark.parametrize("name", LAYERS)
def test_from_float_and_back(name: str) -> None:
    layer, x = float_layer(name)
    hooked = []
    layer.register_forward_hook(lambda module, args, y: hooked.append(type(module).__name__))
    ours = qt.nn.QAT_MODULES[type(layer)].from_float(layer, SPEC)
    assert ours.weight is layer.weight
    assert set(layer.state_dict()) < set(ours.state_dict())
    ours.load_state_dict(layer.state_dict())  # strict: a float checkpoint loads
    back = ours.to_float()
    assert type(back) is type(layer)
    assert vars(back).keys() == vars(layer).keys()
    assert list(back.state_dict()) == list(layer.state_dict())
    assert back.weight is layer.weight
    assert torch.equal(back(x), layer(x))
    ours(x)
    assert hooked == [type(layer).__name__] * 2 + [type(ours).__name__]
    assert set(layer.state_dict()) == {n for n, _ in layer.named_parameters()}  # untouched by all this


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_copied_and_pickled(name: str, copy_of) -> None:
    layer, x = float_layer(name)
    ours = qt.nn.QAT_MODULES[type(layer)].from_float(layer, SPEC)
    assert torch.equal(copy_of(ours)(x), ours(x))


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_made_with_device_and_dtype(name: str) -> None:
    kind, arguments, _ = LAYERS[name]
    layer = qt.nn.QAT_MODULES[kind](*arguments, weight_spec=SPEC, device="cpu", dtype=torch.float64)
    assert layer.weight.dtype == torch.float64
    assert torch.isfinite(layer.weight_quantizer.scale).all()
    on_meta = qt.nn.QAT_MODULES[kind](*arguments, weight_spec=SPEC, device="meta")
    assert on_meta.weight.device == on_meta.weight_quantizer.scale.device == torch.device("meta")


@pytest.mark.sweep(2)
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", [0, 1, 2, "same", "valid"])
@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"dilation": 2, "bias": False}], ids=str)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions_pad_as_torch_does(dims: int, mode: str, padding: object, options: dict[str, object]) -> None:
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    kernel = (3, 2, 3)[:dims]
    layer = kind(4, 6, kernel, padding=padding, padding_mode=mode, **options)
    ours = qt.nn.QAT_MODULES[kind].from_float(layer, SPEC)
    x = torch.randn(2, 4, *(9, 8, 7)[:dims])
    assert torch.equal(ours.forward_fp32(x), layer(x))
    other = copy.deepcopy(layer)
    other.weight.data = reference.fake_quant(layer.weight, ours.weight_quantizer.scale, None, -16, 15, 0)
    assert torch.equal(ours(x), other(x))


def test_the_wrong_type_and_axis_are_refused() -> None:
    with pytest.raises(TypeError, match="QuantConv2d.from_float takes a Conv2d, got Linear"):
        qt.nn.QuantConv2d.from_float(nn.Linear(2, 2), SPEC)
    with pytest.raises(ValueError, match=r"axis of a tensor of 2 dimensions must lie in \[-2, 1\], got 2"):
        qt.nn.QuantLinear(2, 2, weight_spec=qt.QuantSpec(axis=2))


# ---- groups along the input


def grouped(axis: int, size: int, **options: object) -> qt.QuantSpec:
    return qt.QuantSpec(bits=4, axis=axis, group_size=size, **options)


@pytest.mark.parametrize(
    ("float_layer", "spec", "scales"),
    [
        (nn.Linear(64, 6), grouped(1, 32), (6, 2)),
        (nn.Conv2d(16, 6, 3), grouped(1, 8), (6, 2, 3, 3)),
        (nn.Conv2d(16, 6, 3, groups=2), grouped(-3, 4), (6, 2, 3, 3)),
        (nn.ConvTranspose2d(16, 6, 3), grouped(0, 8), (2, 6, 3, 3)),
        (nn.ConvTranspose2d(16, 6, 3, groups=2), grouped(1, 3), (16, 1, 3, 3)),
    ],
    ids=["linear", "conv", "grouped_conv", "conv_transpose", "grouped_conv_transpose"],
)
def test_weights_in_groups(float_layer: nn.Module, spec: qt.QuantSpec, scales: tuple[int, ...]) -> None:
    layer = qt.nn.QAT_MODULES[type(float_layer)].from_float(float_layer, spec)
    assert layer.weight_quantizer.scale.shape == scales
    axis = spec.axis % layer.weight.dim()
    wide = layer.weight_quantizer.scale.repeat_interleave(spec.group_size, axis)
    x = torch.randn(2, 64) if isinstance(float_layer, nn.Linear) else torch.randn(2, 16, 5, 5)
    with torch.no_grad():
        float_layer.weight.data = (layer.weight / wide).round().clamp(-8, 7) * wide
        assert torch.equal(layer.compute(x, layer.weight_quantizer(layer.weight), layer.bias), float_layer(x))


def test_groups_along_the_input_and_a_batch_norm_along_the_output() -> None:
    """The batch norm scales each output channel before the groups of its inputs are quantized."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 6, 3, bias=False), nn.BatchNorm2d(6)).double()
    model[1].running_var.copy_(torch.logspace(-2, 2, 6))
    model[1].running_mean.copy_(torch.randn(6))
    weight = qt.QConfig(None, grouped(1, 8))
    prepared = qt.prepare(
        model.train(),
        qconfig_mapping=qt.QConfigMapping().set_global(qt.QConfig(qt.QuantSpec(), weight.weight)),
        backend="tensorrt10",
    )
    x = torch.randn(2, 16, 7, 7, dtype=torch.float64)
    qt.calibrate(prepared, [x], progress=False)
    layer = prepared.get_submodule("0")
    factor = (model[1].weight / torch.sqrt(model[1].running_var + model[1].eps)).view(-1, 1, 1, 1)
    folded = (model[0].weight * factor).detach()
    amax = folded.unflatten(1, (2, 8)).abs().amax(2)
    torch.testing.assert_close(layer.weight_quantizer.scale, amax.float() / 7, rtol=1e-6, atol=0)
    converted = qt.convert(prepared)
    torch.testing.assert_close(converted(x), prepared.eval()(x), rtol=1e-9, atol=1e-9)
    scale = layer.weight_quantizer.scale.repeat_interleave(8, 1)
    torch.testing.assert_close(
        converted.get_submodule("0").weight_quantizer(converted.get_submodule("0").weight),
        (folded / scale).round().clamp(-8, 7) * scale,
    )


def test_groups_that_do_not_fit_name_the_layer() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    mapping = qt.QConfigMapping().set_global(qt.QConfig(qt.QuantSpec(), grouped(1, 32)))
    with pytest.raises(
        ValueError, match=r"layer '0': group_size must divide dimension 1 .* \(8, 3, 3, 3\), got 32; take"
    ):
        qt.prepare(model, qconfig_mapping=mapping, backend="tensorrt10")


@pytest.mark.parametrize(("axis", "taken"), [(1, 0), (0, 1), (-1, -1)])
def test_a_global_rule_means_the_input_channel_of_every_kind(axis: int, taken: int) -> None:
    model = nn.Sequential(nn.ConvTranspose2d(8, 8, 4))
    qconfig = qt.QConfig(qt.QuantSpec(), grouped(axis, 4))
    for mapping, wanted in (
        (qt.QConfigMapping().set_global(qconfig), taken),
        (qt.QConfigMapping().set_module_name("0", qconfig), axis),
    ):
        prepared = qt.prepare(model, qconfig_mapping=mapping, backend="tensorrt10")
        assert prepared.get_submodule("0").weight_quantizer.spec.axis == wanted


def test_the_report_tells_the_groups() -> None:
    mapping = qt.QConfigMapping().set_global(qt.QConfig(qt.QuantSpec(), grouped(1, 32)))
    prepared = qt.prepare(nn.Sequential(nn.Linear(64, 6)), qconfig_mapping=mapping, backend="tensorrt10")
    assert qt.quantization_report(prepared).layers[0].weight == "int4 groups of 32(1)"


def test_training_in_groups_learns() -> None:
    torch.manual_seed(0)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(qt.QuantSpec(), grouped(1, 8, quantizer="lsq")))
    prepared = qt.prepare(nn.Sequential(nn.Linear(32, 4)).train(), qconfig_mapping=mapping, backend="tensorrt10")
    x, y = torch.randn(128, 32), torch.randn(128, 4)
    qt.calibrate(prepared, [x], progress=False)
    before = prepared.get_submodule("0").weight_quantizer.scale.clone()
    optimizer, losses = torch.optim.SGD(prepared.parameters(), lr=0.1), []
    for _ in range(50):
        optimizer.zero_grad()
        losses.append((prepared(x) - y).square().mean())
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]
    assert (prepared.get_submodule("0").weight_quantizer.scale != before).all()


class Told(qt.TensorQuantizer):
    """A quantizer that somebody derived, with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append("forward")
        return super().forward(x)


def become_told(quantizer: qt.TensorQuantizer, calls: list[str]) -> None:
    quantizer.__class__, quantizer.calls = Told, calls


def set_forward(quantizer: qt.TensorQuantizer, calls: list[str]) -> None:
    quantizer.forward = lambda x: (calls.append("forward"), qt.TensorQuantizer.forward(quantizer, x))[1]


def hook_backward(quantizer: qt.TensorQuantizer, calls: list[str]) -> None:
    quantizer.register_full_backward_hook(lambda *args: calls.append("backward"))


def hook_before_backward(quantizer: qt.TensorQuantizer, calls: list[str]) -> None:
    quantizer.register_full_backward_pre_hook(lambda *args: calls.append("backward"))


@pytest.mark.parametrize("norm", [False, True], ids=["alone", "batch norm"])
@pytest.mark.parametrize("route", ["prepare", "replace"])
@pytest.mark.parametrize("watch", [become_told, set_forward, hook_backward, hook_before_backward])
def test_what_somebody_makes_of_the_quantizer_of_a_weight_is_called(watch, route: str, norm: bool) -> None:
    """Ops quantize the weight in its place, and would leave it out without a word."""
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Conv2d(3, 4, 3), *([nn.BatchNorm2d(4)] if norm else [])).train(),
        torch.randn(4, 3, 8, 8),
    )
    ours = (
        qt.prepare(model, x, backend="tensorrt10")
        if route == "prepare"
        else qt.quant_modules.replace(model, backend="tensorrt10")
    )
    qt.calibrate(ours, [x], progress=False)
    layer, calls = ours.get_submodule("0"), []

    def step() -> tuple[Tensor, Tensor]:
        y = ours(x)
        return y.detach(), torch.autograd.grad(y.square().sum(), layer.weight)[0]

    before = step()
    watch(layer.weight_quantizer, calls)
    torch.testing.assert_close(step(), before, rtol=1e-4, atol=1e-4)
    assert len(calls) == 1


@pytest.mark.parametrize("options", [{}, {"quantizer": "lsq"}, {"quantizer": "lsq", "axis": 0}], ids=str)
def test_parameters_that_are_initialized_anew_have_a_range_of_their_own(options: dict) -> None:
    """Learned scales would stay those of the old weights, whose codes then have two values, or clip all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Linear(4, 4)).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(None, qt.QuantSpec(bits=4, **options)))
    prepared = qt.prepare(model, torch.randn(2, 3, 6, 6), qconfig_mapping=mapping, backend="tensorrt10")
    qt.calibrate(prepared, [torch.randn(2, 3, 6, 6)], progress=False)
    for layer in prepared.modules():
        if isinstance(layer, qt.nn.QuantWeighted):
            layer.reset_parameters()
            expected = layer.weight_quantizer.scale.clone()
            layer.reset_weight_range()
            torch.testing.assert_close(layer.weight_quantizer.scale, expected)
            weight = layer.effective_weight()
            assert (layer.weight_quantizer(weight) - weight).norm() < 0.2 * weight.norm()
