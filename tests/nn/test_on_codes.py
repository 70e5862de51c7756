"""Layers in training on the codes of their inputs: gradients bit for bit, what is kept for backward, integer sums."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import qtoolkit as qt
from qtoolkit.nn import on_codes
from qtoolkit.nn.layer_call import LayerCall, Source
from qtoolkit.nn.on_codes import HAS_INT8
from qtoolkit.verdicts import Cause
from tests.cases import leaf
from tests.copies import made_once
from tests.replaced import in_training

LSQ = qt.QConfig(qt.QuantSpec(quantizer="lsq"), qt.QuantSpec(quantizer="lsq", axis=0, narrow=True))
FIXED = qt.QConfig(qt.QuantSpec(), qt.QuantSpec(axis=0, narrow=True))
FOUR_BITS = qt.QConfig(qt.QuantSpec(bits=4, quantizer="lsq"), qt.QuantSpec(bits=4, quantizer="lsq", axis=0))
AFFINE = qt.QConfig(qt.QuantSpec(signed=False, symmetric=False), qt.QuantSpec(axis=None))
CONFIGS = {"lsq": LSQ, "fixed": FIXED, "four bits": FOUR_BITS, "affine": AFFINE}
ROUTES = ("graph", "modules")
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
routes = pytest.mark.parametrize("route", ROUTES)


class Net(nn.Module):
    """Convolutions with and without batch norm, groups and bias, a residual, a pool, a deconvolution, a shared layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.depthwise = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU6()
        )
        self.branch = nn.Conv2d(8, 8, 1)
        self.pool = nn.MaxPool2d(2)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2, groups=2)
        self.shared = nn.Conv2d(8, 8, 3, padding="same")
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.relu(self.depthwise(x) + self.branch(x))
        x = self.up(self.pool(x))
        x = self.shared(torch.relu(self.shared(x)))
        return self.head(x.mean((2, 3)))


def images(seed: int = 0) -> Tensor:
    return torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(seed))


def quantized(route: str, config: qt.QConfig = LSQ, model: nn.Module | None = None, **options: str) -> nn.Module:
    return (
        quantized_net(route, config, **options)
        if model is None
        else in_training(route, config, model, images(), **options)
    )


@made_once
def quantized_net(route: str, config: qt.QConfig, **options: str) -> nn.Module:
    torch.manual_seed(0)
    return in_training(route, config, Net(), images(), **options)


def step(model: nn.Module, x: Tensor | None = None, run: Callable | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    x = leaf(images()) if x is None else x
    y = (run or model)(x)
    y.square().sum().backward()
    return y.detach(), {"input": x.grad, **{name: p.grad.clone() for name, p in model.named_parameters()}}


def assert_equal(found: tuple, wanted: tuple) -> None:
    assert torch.equal(found[0], wanted[0])
    for name, gradient in wanted[1].items():
        assert torch.equal(found[1][name], gradient), name


def bytes_kept(model: nn.Module, x: Tensor) -> int:
    kept = {}
    ours = {p.untyped_storage().data_ptr() for p in (*model.parameters(), x)}

    def keep(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in ours:
            kept[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        model(x)
    return sum(kept.values())


@configs
@routes
def test_codes_for_backward_change_no_bit(route: str, config: qt.QConfig) -> None:
    plain, codes = (quantized(route, config, training_arithmetic="float", save="codes") for _ in range(2))
    for layer in plain.modules():  # the batch norms between them are the same ops in both
        if isinstance(layer, qt.nn.QuantWeighted):
            qt.nn.set_training_arithmetic(layer, arithmetic="float", save="float")
    for _ in range(2):
        assert_equal(step(codes), step(plain))


@configs
def test_a_replaced_layer_gets_values_and_codes_of_its_input_in_one_op(config: qt.QConfig) -> None:
    model = quantized("modules", config, training_arithmetic="float")
    for quantizer in qt.quantizers_of(model).values():
        quantizer.steps = -1  # behind the first steps, in which ranges follow the data
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(model)
    calls = [event.name for event in profile.events()]
    assert calls.count("qtoolkit::function_fake_quant_backward") == 7  # one for each call of a layer
    assert not {"qtoolkit::quantize", "qtoolkit::quantize_int4"} & {*calls}


def test_a_unit_gives_packed_codes_with_the_values_as_it_does_those_of_a_byte() -> None:
    passes = []
    for config in (LSQ, FOUR_BITS):
        model = quantized("graph", config, training_arithmetic="float")
        for quantizer in qt.quantizers_of(model).values():
            quantizer.steps = -1
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step(model)
        calls = [event.name for event in profile.events()]
        passes.append(calls.count("qtoolkit::quantize") + calls.count("qtoolkit::quantize_int4"))
    assert passes == [1, 1]  # of what a max pool returns


@configs
@routes
def test_the_integer_forward_is_the_simulation_but_for_rounding(route: str, config: qt.QConfig) -> None:
    """In float64, where no rounding flips: the float simulation of each layer on the input that the integer one has."""
    integer = quantized(route, config, training_arithmetic="integer")
    seen = {}
    for name, layer in integer.named_modules():
        if isinstance(layer, qt.nn.QuantWeighted) and layer.batch_norm is None and name != "shared":
            layer.register_forward_hook(lambda m, args, y, name=name: seen.update({name: (m, args[0], y)}))
    step(integer)
    assert len(seen) >= 3
    for layer, x, y in seen.values():
        with torch.no_grad():  # the plain computation
            expected = layer(x)
        scale = expected.abs().max()
        torch.testing.assert_close(y, expected, rtol=0, atol=float(scale) * 1e-5)


@routes
def test_gradients_of_the_integer_forward_are_the_straight_through_ones(route: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.Flatten(1), nn.Linear(800, 5))
    integer, plain = (
        quantized(route, model=model, **o)
        for o in ({"training_arithmetic": "integer"}, {"training_arithmetic": "float", "save": "float"})
    )
    found, wanted = step(integer), step(plain)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-5)
    for name, gradient in wanted[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-3, atol=float(gradient.abs().max()) * 1e-4)


@routes
def test_sums_are_those_of_the_deployed_kernels(route: str) -> None:
    """The codes of the sums: integers, the same as of int64 arithmetic."""
    layer = nn.Conv2d(16, 4, 3, bias=False)
    integer = quantized(
        route, FIXED, nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), layer), training_arithmetic="integer"
    )
    seen = {}
    conv = integer.get_submodule("2")
    conv.register_forward_hook(lambda m, args, y: seen.update(x=args[0], y=y))
    integer(images())
    source, weight = conv.source, conv.weight_quantizer
    x = seen["x"] if conv.input_quantizer is None else conv.input_quantizer(seen["x"])
    codes = torch.round(x.double() / source.scale.double())
    weights = torch.round(weight(conv.weight).double() / weight.scale.double().view(-1, 1, 1, 1))
    sums = torch.conv2d(codes, weights)
    steps = source.scale * weight.scale.view(-1, 1, 1)
    assert torch.equal(torch.round(seen["y"].double() / steps.double()), sums)
    torch.testing.assert_close(seen["y"], (sums * steps.double()).float(), rtol=2e-7, atol=0)


@routes
def test_a_code_takes_a_byte_or_less_and_is_kept_once(route: str) -> None:
    size = 8 * 20 * 20 * 4
    two = nn.ModuleDict({"a": nn.Conv2d(8, 8, 1, bias=False), "b": nn.Conv2d(8, 8, 1, bias=False)})

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = two

        def forward(self, x: Tensor) -> Tensor:
            return self.parts["a"](x) + self.parts["b"](x)

    x = torch.randn(4, 8, 20, 20)
    for bits, per_element in ((8, 1), (4, 0.5)):
        config = qt.QConfig(qt.QuantSpec(bits=bits), qt.QuantSpec(bits=bits, axis=0))
        mapping = qt.QConfigMapping().set_global(config)
        if route == "graph":
            model = qt.prepare(
                Twice().train(), (x,), qconfig_mapping=mapping, training_arithmetic="float", backend="tensorrt"
            )
        else:
            model = qt.quant_modules.replace(Twice().train(), mapping, training_arithmetic="float", backend="tensorrt")
        qt.calibrate(model.eval(), [x], progress=False)
        consumers = 1 if route == "graph" else 2  # by modules each layer quantizes its own input
        assert bytes_kept(model.train(), x) <= consumers * size * per_element + 4096


def test_checkpointing_and_state_dicts() -> None:
    convolutions = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    model = quantized("graph", model=convolutions)
    wanted = step(copy.deepcopy(model))
    assert_equal(step(model, run=lambda x: checkpoint(model, x, use_reentrant=False)), wanted)
    other = quantized("graph", model=convolutions)
    other.load_state_dict(model.state_dict())
    assert_equal(step(other), wanted)


@routes
def test_what_backward_saw_may_change_before_it(route: str) -> None:
    """An observer moves the scales between two forwards and their backward."""
    model = quantized(route, FIXED, training_arithmetic="float")
    for quantizer in model.modules():
        if isinstance(quantizer, qt.TensorQuantizer) and not quantizer.of_weight:
            quantizer.observing = True
    (model(images()).sum() + model(images(1) * 3).sum()).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_a_tensor_changed_in_place_is_quantized_anew() -> None:
    """The codes that came with a tensor do not outlive a change of it."""

    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x)

    models = [
        quantized("graph", FIXED, Doubles(), training_arithmetic="float", save=save) for save in ("codes", "float")
    ]
    for model in models:
        quantizer = model.get_submodule("conv").source
        quantizer.register_forward_hook(lambda m, args, y: y.mul_(0))
    assert_equal(*(step(model) for model in models))


class Halves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0.4771


@pytest.mark.parametrize("by", ["node", "module"])
def test_an_op_that_is_put_before_a_layer_later_takes_its_codes(by: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Identity(), nn.Conv2d(8, 4, 1))
    found = []
    for options in (
        {"training_arithmetic": "float", "save": "codes"},
        {"training_arithmetic": "float", "save": "float"},
    ):
        prepared = quantized("graph", LSQ, copy.deepcopy(model), **options)
        if by == "module":
            prepared.set_submodule("2", Halves())
        else:
            (call,) = (node for node in prepared.graph.nodes if node.target == "3")
            with prepared.graph.inserting_before(call):
                call.replace_input_with(call.args[0], prepared.graph.call_function(torch.mul, (call.args[0], 0.4771)))
            prepared.recompile()
        found.append(step(prepared.train()))
    assert_equal(*found)


def in_sequence(model: nn.Module) -> nn.Module:
    model.set_submodule("3", nn.Sequential(Halves(), model.get_submodule("3")))
    return model


def moved_behind(model: nn.Module) -> nn.Module:
    layer = model.get_submodule("3")
    model.set_submodule("3", nn.Identity())
    return nn.Sequential(model, Halves(), layer)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("change", [in_sequence, moved_behind])
@pytest.mark.parametrize("after", ["", "train", "deepcopy", "a step"])
@configs
def test_a_layer_that_another_module_calls_takes_any_values(config: qt.QConfig, after: str, change: Callable) -> None:
    """An adapter, or a norm before a head, gives the layer values that are on no quantizer's grid."""
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Identity(), nn.Conv2d(8, 4, 1))
    found = []
    for options in ({"training_arithmetic": "integer"}, {"training_arithmetic": "float", "save": "float"}):
        prepared = quantized("graph", config, copy.deepcopy(model), **options)
        if after == "a step":
            step(prepared)
            prepared.zero_grad()
        changed = change(prepared)
        if after == "train":
            changed.train()
        if after == "deepcopy" and change is in_sequence:
            changed = copy.deepcopy(changed)
        found.append(step(changed))
        changed.eval()
        if change is in_sequence:
            assert torch.equal(changed(images()), qt.convert(changed)(images()))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("options", [{"training_arithmetic": "int"}, {"save": "nothing"}])
@routes
def test_unknown_options_are_named(route: str, options: dict) -> None:
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name}.*{value}"):
        quantized(route, **options)


def test_dropout_moves_values_off_the_grid() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(8, 4, 1))
    found = []
    for save in ("codes", "float"):
        prepared = quantized("graph", LSQ, copy.deepcopy(model), training_arithmetic="float", save=save)
        torch.manual_seed(3)
        found.append(step(prepared))
    assert_equal(*found)


@pytest.mark.parametrize("forward", ["float", "integer"])
def test_a_dropout_that_drops_nothing_leaves_values_on_their_grid_until_it_does(forward: str) -> None:
    """The flattened tensor comes with no codes, so that the layer has to know the quantizer."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Dropout(0.0), nn.Flatten(), nn.Linear(800, 5))
    found, kept = [], []
    for options in ({"training_arithmetic": forward}, {"training_arithmetic": "float", "save": "float"}):
        prepared = quantized("graph", LSQ, copy.deepcopy(model), **options)
        if options == {"training_arithmetic": forward}:
            keeps = {line.name: line.training for line in qt.quantization_report(prepared).layers}["4"]
            assert keeps == ("int8 kernel" if forward == "integer" else "float (as asked)") + ", saves integers"
        kept.append(bytes_kept(prepared, images()))
        prepared.get_submodule("2").p = 0.5  # a schedule
        torch.manual_seed(3)
        found.append(step(prepared))
    assert kept[1] - kept[0] >= 2 * 4 * 800
    assert prepared.get_submodule("4").source is None
    if forward == "float":  # in channels_last a dropout takes other random numbers
        assert_equal(*found)


def test_layers_compute_in_channels_last_without_a_copy_of_the_batch() -> None:
    """The learned quantizer keeps its input for backward: the batch itself, in either memory format."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2))
    prepared = quantized("graph", LSQ, model, training_arithmetic="integer")
    in_channels_last = []
    for name in ("0", "2"):
        prepared.get_submodule(name).register_forward_hook(
            lambda _, inputs, y: in_channels_last.append(y.is_contiguous(memory_format=torch.channels_last))
        )
    rows, last = images(), images().contiguous(memory_format=torch.channels_last)
    assert prepared(rows).is_contiguous()
    assert in_channels_last == [True, True]
    assert bytes_kept(prepared, rows) == bytes_kept(prepared, last)
    (y, found), (wanted_y, wanted) = step(copy.deepcopy(prepared), leaf(rows)), step(prepared, leaf(last))
    scale = "activation_quantizers.input_1._relative_scale"  # whose gradient is a sum in the order of memory
    torch.testing.assert_close(found.pop(scale), wanted.pop(scale), rtol=1e-5, atol=0)
    assert_equal((y, found), (wanted_y, wanted))


@pytest.mark.sweep(2)
@routes
@pytest.mark.parametrize("forward", ["float", "integer"])
@pytest.mark.parametrize("watched", ["nothing", "gradient"])
def test_the_scale_of_a_batch_is_trained_without_the_gradient_of_the_batch(
    route: str, forward: str, watched: str
) -> None:
    """Unless somebody may see that gradient; both ways give the same sum, in another order."""
    ours, other = (quantized(route, training_arithmetic=forward) for _ in range(2))
    end = "input_quantizer" if route == "modules" else "activation_quantizers.x"
    name = next(n for n, _ in ours.named_modules() if n.endswith(end))
    gradients = []
    other.get_submodule(name).register_forward_hook(lambda _, inputs, y: None)
    if watched == "gradient":
        ours.get_submodule(name).register_forward_hook(
            lambda _, inputs, y: gradients.append(y.register_hook(lambda grad: None))
        )
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        found, wanted = step(ours, images()), step(other, images())
    assert len(gradients) == (watched == "gradient")
    backwards = [e for e in profile.events() if e.name == "qtoolkit::fake_quant_learned_backward"]
    of_image = [e for e in backwards if list(images().shape) in e.input_shapes]
    assert len(of_image) == 1 + (watched != "nothing"), "one is that of the other model"
    for parameter, gradient in wanted[1].items():
        if parameter.startswith(name):
            torch.testing.assert_close(found[1][parameter], gradient, rtol=1e-4, atol=1e-5)
        elif gradient is not None:
            assert torch.equal(found[1][parameter], gradient), parameter


def test_a_batch_that_changes_behind_its_quantizer_is_an_error() -> None:
    """Not a wrong gradient: the scale's needs the values that were quantized."""
    layer = quantized("modules", model=nn.Sequential(nn.Conv2d(3, 8, 3))).get_submodule("0")
    quantizer, layer.input_quantizer = layer.input_quantizer, None
    x = images()
    y = quantizer(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        layer(y).sum().backward()


@pytest.mark.parametrize(
    "x", [images()[:, :, ::2], images()[:, :1], images().permute(0, 1, 3, 2)], ids=["sliced", "one channel", "turned"]
)
def test_an_output_has_the_memory_format_of_a_batch_with_other_strides(x: Tensor) -> None:
    model = nn.Sequential(nn.Conv2d(x.size(1), 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))
    prepared = qt.prepare(
        model,
        (x,),
        qconfig_mapping=qt.QConfigMapping().set_global(LSQ),
        training_arithmetic="integer",
        backend="tensorrt",
    )
    qt.calibrate(prepared, [x], progress=False)
    assert prepared(x).is_contiguous()


@pytest.mark.skipif(not HAS_INT8, reason="torch has no exact int8 kernels on this processor")
def test_auto_computes_on_codes_where_torch_has_kernels() -> None:
    auto, integer = quantized("graph"), quantized("graph", training_arithmetic="integer")
    conv = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    auto, integer = (
        quantized("graph", model=copy.deepcopy(conv), **o) for o in ({}, {"training_arithmetic": "integer"})
    )
    large = torch.randn(8, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    assert_equal(step(auto, leaf(large)), step(integer, leaf(large)))


@pytest.mark.skipif(not HAS_INT8, reason="torch has no exact int8 kernels on this processor")
def test_auto_computes_small_inputs_in_float() -> None:
    auto, plain, integer = (
        quantized("graph", **o) for o in ({}, {"training_arithmetic": "float"}, {"training_arithmetic": "integer"})
    )
    assert_equal(step(auto), step(plain))
    assert not torch.equal(step(auto)[0], step(integer)[0])


@pytest.mark.parametrize(
    ("layer", "sizes", "positions"),
    [
        (nn.Conv2d(64, 64, 3, padding=1), (2, 64, 24, 24), 1152),
        (nn.Conv2d(64, 64, 3, padding=1, stride=2), (2, 64, 48, 48), 1152),
        (nn.Conv1d(64, 64, 9), (2, 64, 576), 1152),
        (nn.ConvTranspose2d(64, 64, 3, stride=2), (2, 64, 24, 24), 1152),
        (nn.Linear(256, 256), (2, 384, 256), 768),
        (nn.Conv2d(8, 8, 3, groups=8), (1, 8, 64, 32), 2048),
    ],
    ids=["conv", "stride", "1d", "transposed", "linear", "depthwise"],
)
def test_from_how_many_positions_on_auto_computes_on_codes(layer, sizes: tuple, positions: int, monkeypatch) -> None:
    """Positions are output pixels, input pixels of a transposed convolution, and rows."""
    monkeypatch.setattr(on_codes, "HAS_INT8", True)
    layer = qt.quant_modules.replace(nn.Sequential(layer), qt.QConfigMapping().set_global(FIXED), backend="tensorrt")[
        0
    ].train()
    least = on_codes.least_positions(layer)
    assert least == min(256 + -(-(2**25) // layer.weight.numel()), 2048)
    x = torch.zeros(sizes)
    assert on_codes._positions(x, layer.geometry(x)) == positions
    enough = x.repeat(-(-least // positions), *[1] * (x.dim() - 1))
    assert on_codes.computes_on_codes(layer, enough, layer.geometry(enough))
    fewer = x[:0]
    assert not on_codes.computes_on_codes(layer, fewer, layer.geometry(fewer))
    qt.nn.set_training_arithmetic(layer, arithmetic="integer")
    assert on_codes.computes_on_codes(layer, fewer, layer.geometry(fewer))


def test_a_small_image_is_converted_rather_than_a_large_weight() -> None:
    """Values and gradients are those of the same image in rows, but for the order in which the input's scale sums."""
    x = torch.randn(1, 8, 6, 6, generator=torch.Generator().manual_seed(0))
    mapping = qt.QConfigMapping().set_global(LSQ)
    prepared = qt.prepare(
        nn.Sequential(nn.Conv2d(8, 64, 5)),
        (x,),
        qconfig_mapping=mapping,
        training_arithmetic="float",
        backend="tensorrt",
    )
    qt.calibrate(prepared.eval(), [x], progress=False)
    models = copy.deepcopy(prepared).train(), prepared.train()
    in_channels_last = x.contiguous(memory_format=torch.channels_last)
    found, wanted = step(models[0], leaf(x)), step(models[1], leaf(in_channels_last))
    (scale,) = (name for name in wanted[1] if name.startswith("activation_quantizers"))
    torch.testing.assert_close(found[1].pop(scale), wanted[1].pop(scale), rtol=1e-6, atol=0)
    assert_equal(found, wanted)
    assert prepared(in_channels_last).is_contiguous()


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize("forward", ["float", "integer"])
@pytest.mark.parametrize("config", [LSQ, FIXED, FOUR_BITS], ids=["lsq", "fixed", "four bits"])
def test_it_compiles_without_a_graph_break(config: qt.QConfig, forward: str) -> None:
    torch._dynamo.reset()
    layers = nn.Conv2d(3, 6, 3, groups=3), nn.ReLU(), nn.ConvTranspose2d(6, 4, 2), nn.Linear(11, 5)
    model = quantized("graph", config, nn.Sequential(*layers), training_arithmetic=forward)
    copied = copy.deepcopy(model)
    compiled = torch.compile(copied, fullgraph=True, backend="aot_eager")
    for seed in (0, 1):
        found, wanted = step(copied, leaf(images(seed)), compiled), step(model, leaf(images(seed)))
        assert torch.equal(found[0], wanted[0])
        for name, gradient in wanted[1].items():
            torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=float(gradient.abs().max()) * 1e-6)


def test_the_report_says_how_each_layer_computes_in_training() -> None:
    report = qt.quantization_report(quantized("graph", training_arithmetic="integer"))
    lines = {line.name: line.training for line in report.layers if line.training}
    assert lines["stem.0"] == lines["up"] == lines["head"] == "int8 kernel, saves integers"
    assert "in training" in str(report)
    assert "int8 kernel, saves integers" in str(report)
    report = qt.quantization_report(quantized("modules", save="float", training_arithmetic="float"))
    assert {line.training for line in report.layers if line.training} == {"float (as asked), saves floats"}
    wide = qt.QConfig(qt.QuantSpec(bits=16), qt.QuantSpec(axis=0))
    report = qt.quantization_report(quantized("graph", wide))
    assert "float, saves floats: its inputs are not quantized to integers of at most 8 bits with one scale" in str(
        report
    )
    scales = qt.QConfig(qt.QuantSpec(), qt.QuantSpec(axis=1))
    report = qt.quantization_report(
        quantized("modules", scales, nn.Sequential(nn.Linear(12, 4)), training_arithmetic="integer")
    )
    assert report.layers[0].training == (
        "float (its weight has scales along another axis than the output channels), saves integers"
    )


def test_the_report_says_that_a_weight_with_gradients_of_its_own_keeps_floats() -> None:
    pact = qt.QConfig(qt.QuantSpec(), qt.QuantSpec(quantizer="pact", axis=None))
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 4, 3))
    kept = {}
    for name, config in {"pact": pact, "fixed": FIXED}.items():
        prepared = quantized("graph", config, copy.deepcopy(model), training_arithmetic="float")
        kept[name] = bytes_kept(prepared, leaf(images()))
        lines = [line.training for line in qt.quantization_report(prepared).layers]
        own = "float, saves floats: quantizer 'pact' has its own gradients of the weight"
        assert lines == [own if name == "pact" else "float (as asked), saves integers"] * 2
    assert kept["pact"] > 2 * kept["fixed"]


@pytest.mark.parametrize("place", [{"device": "meta"}, {"dtype": torch.float64}], ids=["device", "dtype"])
def test_the_report_asks_the_device_and_the_type_of_the_layer(monkeypatch, place: dict) -> None:
    """On a machine with int8 kernels too: they are for float32 on the CPU."""
    monkeypatch.setattr(on_codes, "HAS_INT8", True)
    layer = qt.nn.QuantConv2d(3, 8, 3, weight_spec=FIXED.weight).train()
    source = Source(nn.Sequential(qt.TensorQuantizer(FIXED.activation)), "0")
    layer.layer_calls = (LayerCall(source=source),)
    assert on_codes.described(layer) == ("int8 kernel (float for fewer than 2,048 positions), saves integers", None)
    assert on_codes.described(layer.to(**place)) == ("float (no int8 kernel), saves integers", Cause.NO_KERNEL)
    qt.nn.set_training_arithmetic(layer, arithmetic="integer")
    assert on_codes.described(layer) == ("int8 kernel, saves integers", None)
    qt.nn.set_training_arithmetic(layer, arithmetic="float")
    assert on_codes.described(layer) == ("float (as asked), saves integers", Cause.AS_ASKED)


def test_the_report_says_what_computes_codes_on_a_gpu(monkeypatch) -> None:
    """Without a GPU: the weights are fake ones, which have a device alone."""
    monkeypatch.setattr(on_codes, "HAS_INT8", True)
    made = {
        "product": qt.nn.QuantConv2d(4, 8, 3, weight_spec=FIXED.weight),
        "linear": qt.nn.QuantLinear(4, 8, weight_spec=FIXED.weight),
        "groups": qt.nn.QuantConv2d(4, 8, 3, groups=2, weight_spec=FIXED.weight),
        "transposed": qt.nn.QuantConvTranspose2d(4, 8, 3, weight_spec=qt.QuantSpec(axis=1)),
    }
    source = Source(nn.Sequential(qt.TensorQuantizer(FIXED.activation)), "0")
    for name, layer in made.items():
        layer.layer_calls = (LayerCall(source=source),)
        with FakeTensorMode(allow_non_fake_inputs=True):
            layer._parameters["weight"] = torch.empty(layer.weight.shape, device="cuda:0")
        is_product = name in ("product", "linear")
        for has in (True, False):
            monkeypatch.setattr(on_codes, "has_int8_product", lambda device, has=has: has)
            qt.nn.set_training_arithmetic(layer, "auto")
            assert on_codes.described(layer) == ("float (the default on CUDA), saves integers", Cause.NO_KERNEL)
            qt.nn.set_training_arithmetic(layer, "integer")
            kernel = "int8 matrix product" if is_product and has else "integers in float"
            assert on_codes.described(layer) == (f"{kernel}, saves integers", None)


@pytest.mark.parametrize("forward", ["float", "integer"])
def test_an_empty_batch_and_a_single_image(forward: str) -> None:
    layers = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 2, 2), nn.Flatten(), nn.Linear(2 * 11 * 11, 3)
    model = quantized("graph", model=nn.Sequential(*layers), training_arithmetic=forward)
    y = model(leaf(torch.empty(0, 3, 12, 12)))
    y.sum().backward()
    assert y.shape == (0, 3)
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    assert model(images()[:1]).shape == (1, 3)


def test_sums_that_int32_may_not_hold_are_computed_in_float() -> None:
    model = nn.Sequential(nn.Linear(80_000, 2))
    prepared = qt.quant_modules.replace(model, training_arithmetic="integer", backend="tensorrt")
    qt.calibrate(prepared, [torch.ones(1, 80_000)], progress=False)
    (line,) = qt.quantization_report(prepared).layers
    assert line.training == "float (its sums may exceed int32), saves integers"
    with torch.no_grad():
        prepared[0].weight.fill_(1.0)
    prepared[0].reset_weight_range()
    torch.testing.assert_close(prepared.train()(torch.ones(1, 80_000)), torch.full((1, 2), 8e4), rtol=0.02, atol=1)


@pytest.mark.parametrize("forward", ["float", "integer"])
def test_autocast_computes_in_its_type(forward: str) -> None:
    model = quantized(
        "graph", model=nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)), training_arithmetic=forward
    )
    plain = quantized(
        "graph",
        model=nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)),
        save="float",
        training_arithmetic="float",
    )
    plain.load_state_dict(model.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = model(images()), plain(images())
    assert y.dtype == expected.dtype == torch.bfloat16
    if forward == "float":
        assert torch.equal(y, expected)
    y.float().square().sum().backward()
    assert all(p.grad.dtype == p.dtype and torch.isfinite(p.grad).all() for p in model.parameters())


class Hooked(nn.Module):
    """A quantizer, a pool and a flatten before a layer, in blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.0), nn.Linear(32, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x))


def hook_in_place(module: nn.Module, args: object, y: Tensor) -> None:
    y.detach().mul_(1.37)


HOOKS = {
    **{name: (name, "forward_hook") for name in ("stem", "stem.2", "head.0", "head.1", "activation_quantizers.stem_1")},
    **{f"{name}, before": (name, "forward_pre_hook") for name in ("head", "head.2", "stem.2")},
    "stem.2, in place": ("stem.2", "in place"),
}


@pytest.mark.parametrize("arithmetic", ["auto", "integer"])
@pytest.mark.parametrize("case", HOOKS)
def test_a_hook_may_change_what_a_layer_takes(case: str, arithmetic: str) -> None:
    torch.manual_seed(0)
    x, found = torch.randn(16, 3, 6, 6), []
    prepared = qt.prepare(Hooked().train(), x, backend="onnxruntime", training_arithmetic=arithmetic)
    qt.calibrate(prepared, [x], progress=False)
    qt.freeze_ranges(prepared)
    name, how = HOOKS[case]
    for plain in (False, True):
        model = copy.deepcopy(prepared)
        if plain:
            qt.nn.set_training_arithmetic(model, "float", "float")
        model(x)  # the first call decides how the next ones compute
        part = model.get_submodule(name)
        if how == "forward_pre_hook":
            part.register_forward_pre_hook(lambda module, args: (args[0] * 1.37,))
        else:
            part.register_forward_hook(hook_in_place if how == "in place" else lambda module, args, y: y * 1.37)
        y = model(x)
        y.square().sum().backward()
        found.append((y.detach(), *(p.grad for p in model.parameters())))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))
