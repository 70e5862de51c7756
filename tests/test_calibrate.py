import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from tests import nets

SHAPE = (4, 3, 8, 8)


def prepared_net() -> nn.Module:
    return qt.prepare(nets.trained(nets.ConvNet(), *SHAPE), backend="tensorrt10")


def scales(model: nn.Module) -> dict[str, Tensor]:
    return {name: quantizer.scale for name, quantizer in qt.quantizers_of(model).items()}


def test_ranges_do_not_depend_on_the_split_into_batches() -> None:
    x = torch.randn(12, *SHAPE[1:])
    model = prepared_net().eval()  # a batch norm in training mode takes the statistics of each batch
    models = [copy.deepcopy(model) for _ in range(3)]
    for model, size in zip(models, (12, 4, 1), strict=True):
        qt.calibrate(model, x.split(size), progress=False)
    first, *others = (scales(model) for model in models)
    for other in others:
        for name in first:
            torch.testing.assert_close(other[name], first[name], rtol=1e-6, atol=0)
    assert torch.equal(others[0]["activation_quantizers.x"], first["activation_quantizers.x"])


def test_ranges_are_those_of_the_float_activations() -> None:
    model = nets.trained(nets.ConvNet(), *SHAPE).eval()
    x = torch.randn(SHAPE)
    prepared = qt.prepare(model, backend="tensorrt10")
    report = qt.calibrate(prepared, [x], progress=False)
    with torch.no_grad():
        seen = torch.relu(model.bn1(model.conv1(x)))
    assert report.ranges["activation_quantizers.relu"] == pytest.approx(
        (seen.min().item(), seen.max().item()), rel=1e-5
    )
    assert report.ranges["activation_quantizers.x"] == (x.min().item(), x.max().item())


@pytest.mark.parametrize(
    ("batches", "forward"),
    [
        ([torch.ones(SHAPE)], None),
        ([(torch.ones(SHAPE),)], None),
        ([{"x": torch.ones(SHAPE)}], None),
        ([(torch.ones(SHAPE), "label")], lambda model, batch: model(batch[0])),
    ],
    ids=["tensor", "tuple", "dict", "forward"],
)
def test_a_batch_is_passed_by_its_type(batches: list[object], forward: object) -> None:
    assert qt.calibrate(prepared_net(), batches, forward=forward, progress=False).batches == 1


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((torch.ones(SHAPE), torch.zeros(4), torch.zeros(4)), r"too many positional arguments; .* model\(batch\[0\]\)"),
        ([torch.ones(SHAPE), torch.zeros(4), torch.zeros(4)], r"too many positional arguments; .* model\(batch\[0\]\)"),
        ({"image": torch.ones(SHAPE)}, r"missing a required argument: 'x'; .* model\(batch\['image'\]\)"),
    ],
)
@pytest.mark.parametrize("route", [qt.prepare, qt.quant_modules.replace])
def test_a_batch_with_more_than_labels_says_what_to_pass(route, batch: object, words: str) -> None:
    model = route(nets.trained(nets.ConvNet(), *SHAPE), backend="tensorrt10")
    match = rf"calibrate: a batch does not match ConvNet\.forward\(.*x.*\).*: {words}"
    with pytest.raises(TypeError, match=match):
        qt.calibrate(model, [batch], progress=False)


class Masked(nn.Module):
    """Takes what is not padding, as integers or booleans."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.last(self.first(x) * mask.unsqueeze(-1))


class Optional(Masked):
    """Takes a mask or none."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.last(self.first(x)) if mask is None else super().forward(x, mask)


def test_a_mask_that_was_fixed_at_none_is_no_label_and_no_misfit() -> None:
    x, mask = torch.rand(3, 5, 4), torch.ones(3, 5, dtype=torch.bool)
    prepared = qt.prepare(Optional(), None, "onnxruntime")
    with pytest.raises(
        ValueError, match=r"^mask has been .* value None .*: to pass a value, give one in the example_inputs"
    ):
        qt.calibrate(prepared, [{"x": x, "mask": mask}], progress=False)
    with pytest.warns(
        UserWarning, match=r"left out as its labels; .* If it is no label but the argument 'mask', pass it in"
    ):
        qt.calibrate(prepared, [(x, mask)], progress=False)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_a_mask_of_unknown_type_names_its_quantizer_and_the_remedy(dtype: torch.dtype) -> None:
    batch = torch.rand(3, 5, 4), torch.randint(0, 2, (3, 5)).to(dtype)
    with pytest.raises(
        TypeError,
        match=rf"quantizer 'activation_quantizers.mask' gets a tensor of {dtype}, .* or give a mask in the example_inputs",
    ):
        qt.calibrate(qt.prepare(Masked(), None, "onnxruntime"), [batch], progress=False)
    prepared = qt.prepare(Masked(), batch, "onnxruntime")
    qt.calibrate(prepared, [batch], progress=False)
    assert "activation_quantizers.mask" not in qt.quantizers_of(prepared)


def test_integers_for_a_replaced_layer_name_its_quantizer() -> None:
    model = qt.quant_modules.replace(nn.Sequential(nn.Linear(4, 2)), backend="tensorrt10")
    with pytest.raises(
        TypeError,
        match=r"quantizer '0.input_quantizer' gets a tensor of torch.uint8, .*; pass it with \.to\(torch.float32\)",
    ):
        qt.calibrate(model, [torch.ones(3, 4, dtype=torch.uint8)], progress=False)


def test_a_type_error_of_the_model_stays() -> None:
    class Wrong(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + len(5)

    model = qt.quant_modules.replace(nn.Sequential(nn.Linear(4, 4), Wrong(4, 4)), ignore="1", backend="tensorrt10")
    with pytest.raises(TypeError, match="object of type 'int' has no len"):
        qt.calibrate(model, [torch.ones(2, 4)], progress=False)


def test_mode_and_switches_come_back() -> None:
    model = prepared_net()
    model.get_submodule("bn1").eval()
    statistics = model.get_submodule("bn2").running_mean.clone()
    qt.calibrate(model, [torch.randn(SHAPE)], progress=False)
    assert model.training
    assert not model.get_submodule("bn1").training
    assert torch.equal(model.get_submodule("bn2").running_mean, statistics)
    assert all(q.quantizing and not q.observing for q in qt.quantizers_of(model).values())


def test_an_instance_norm_with_statistics_is_calibrated_as_it_trains() -> None:
    norm = nn.InstanceNorm1d(4, track_running_stats=True)
    prepared, x = (
        qt.prepare(nn.Sequential(norm, nn.Conv1d(4, 4, 1)).train(), backend="tensorrt10"),
        100 * torch.randn(8, 4, 16),
    )
    report = qt.calibrate(prepared, [x], progress=False)
    assert report.ranges["activation_quantizers._0"][1] == pytest.approx(norm(x).max().item(), rel=1e-5)
    assert prepared.get_submodule("0").num_batches_tracked == 0


def test_max_batches_stops_early() -> None:
    assert qt.calibrate(prepared_net(), iter([torch.ones(SHAPE)] * 9), max_batches=2, progress=False).batches == 2


def test_quantizers_without_data_are_named() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.a(x) * self.b(y)

    prepared = qt.prepare(Branches(), backend="tensorrt10")

    def only_a(model: nn.Module, x: Tensor) -> Tensor:
        return model.get_submodule("a")(model.get_submodule("activation_quantizers.x")(x))

    report = qt.calibrate(prepared, [torch.ones(2, 4)], forward=only_a, progress=False)
    assert report.unreached == ("b.weight_quantizer", "activation_quantizers.y")
    assert "activation_quantizers.y: no data reached it" in str(report)
    with pytest.raises(RuntimeError, match=r"'activation_quantizers\.y' saw no data"):
        qt.convert(prepared)


@pytest.mark.parametrize(
    ("model", "batches", "kwargs", "error", "words"),
    [
        (prepared_net, [], {}, ValueError, "batches must hold at least one batch, got none"),
        (nets.LinearNet, [torch.ones(1, 6)], {}, ValueError, "has no quantizers"),
        (prepared_net, torch.ones(SHAPE), {}, TypeError, "must be an iterable of batches"),
        (prepared_net, None, {}, TypeError, "got NoneType"),
        (prepared_net, [torch.ones(SHAPE)], {"max_batches": 0}, ValueError, "at least 1"),
        (prepared_net, [torch.full(SHAPE, torch.nan)], {}, ValueError, "'activation_quantizers.x' has observed NaN"),
    ],
)
def test_bad_data(model, batches: object, kwargs: dict[str, object], error: type[Exception], words: str) -> None:
    made = model()
    before = scales(made)
    with pytest.raises(error) as caught:
        qt.calibrate(made, batches, progress=False, **kwargs)
    assert words in str(caught.value)
    assert made.training
    for name, scale in scales(made).items():
        assert torch.equal(scale.nan_to_num(), before[name].nan_to_num())


LEARNED = qt.QConfig(qt.QuantSpec(quantizer="lsq", axis=1), qt.QuantSpec(quantizer="lsq", axis=0))
HISTOGRAM = qt.QConfig(qt.QuantSpec(observer="histogram"), qt.QuantSpec(observer="moving_average", axis=None))


def state_of(model: nn.Module) -> dict[str, object]:
    quantizers = qt.quantizers_of(model)
    switches = {name: (q.ready, q.observing, q.quantizing, q.name, q._shape_is_known) for name, q in quantizers.items()}
    return {**switches, **{name: tensor.detach().clone() for name, tensor in model.state_dict().items()}}


@pytest.mark.parametrize("qconfig", [qt.backends["tensorrt10"].qconfig, LEARNED, HISTOGRAM])
@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("bad", [torch.ones(1, 2, 8, 8), torch.full(SHAPE, torch.nan), (torch.ones(SHAPE), 5, 5)])
def test_an_error_leaves_all_ranges_and_switches(qconfig: qt.QConfig, calibrated: bool, bad: object) -> None:
    mapping = qt.QConfigMapping().set_global(qconfig).set_module_name("up", None)
    model = qt.prepare(nets.trained(nets.ConvNet(), *SHAPE), qconfig_mapping=mapping, backend="tensorrt10")
    if calibrated:
        qt.calibrate(model, [torch.randn(SHAPE)], progress=False)
    before = state_of(model)
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        qt.calibrate(model, [3 * torch.randn(SHAPE), bad], progress=False)
    after = state_of(model)
    assert list(after) == list(before)
    for name, value in before.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(after[name], value, rtol=0, atol=0, equal_nan=True)
        else:
            assert after[name] == value
    qt.calibrate(model, [torch.randn(SHAPE)], progress=False)


@pytest.mark.parametrize("route", ["prepare", "replace"])
@pytest.mark.parametrize("qconfig", [qt.backends["tensorrt10"].qconfig, LEARNED, HISTOGRAM])
def test_a_loop_of_ones_own_gives_the_ranges_of_calibrate(route: str, qconfig: qt.QConfig) -> None:
    model, mapping = nets.trained(nets.ConvNet(), *SHAPE).eval(), qt.QConfigMapping().set_global(qconfig)
    mapping.set_module_name("up", None)
    made = (
        qt.prepare(model, qconfig_mapping=mapping, backend="tensorrt10")
        if route == "prepare"
        else qt.quant_modules.replace(model, mapping, backend="tensorrt10")
    )
    batches, other = [torch.randn(SHAPE), 2 * torch.randn(SHAPE)], copy.deepcopy(made)
    qt.calibrate(made, batches, progress=False)
    for _ in range(2):  # what was observed before a block does not count in it
        with torch.no_grad(), qt.calibrating(other):
            for batch in batches:
                other(batch)
    for name, scale in scales(made).items():
        torch.testing.assert_close(scales(other)[name], scale, rtol=1e-6, atol=0)
    assert torch.equal(qt.convert(other)(batches[0]), other(batches[0]))


def test_a_loop_in_training_mode_starts_the_steps_that_follow_the_data() -> None:
    model = prepared_net()
    with qt.calibrating(model):
        model(torch.randn(SHAPE))
    assert all(q.follows_data for q in qt.quantizers_of(model).values() if not q.of_weight)


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize(
    ("batches", "error", "words"),
    [
        ([], RuntimeError, r"calibrating: no data reached the quantizers '.*' and \d+ more in the block; run batches"),
        ([torch.full(SHAPE, torch.nan)], ValueError, "'activation_quantizers.x' has observed NaN"),
        ([torch.randn(SHAPE), torch.ones(1, 2, 8, 8)], RuntimeError, "channels"),
    ],
)
def test_a_block_that_fails_changes_no_range(calibrated: bool, batches: list[Tensor], error: type, words: str) -> None:
    model = prepared_net().eval()
    if calibrated:
        qt.calibrate(model, [torch.randn(SHAPE)], progress=False)
    before = state_of(model)
    with pytest.raises(error, match=words), qt.calibrating(model):
        [model(x) for x in batches]
    after = state_of(model)
    for name, value in before.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(after[name], value, rtol=0, atol=0, equal_nan=True)
        else:
            assert after[name] == value


def test_a_block_names_what_saw_no_data() -> None:
    model = prepared_net().eval()
    with pytest.warns(UserWarning, match=r"calibrating: .* 'activation_quantizers\.relu'"), qt.calibrating(model):
        model.get_submodule("activation_quantizers.x")(torch.ones(SHAPE))
    assert model.get_submodule("activation_quantizers.x").ready
    with pytest.raises(ValueError, match="calibrating: the model has no quantizers; call qtoolkit.prepare"):
        qt.calibrating(nets.LinearNet())


def test_a_replaced_model_without_quantizers_is_not_sent_to_replace_again() -> None:
    replaced = qt.quant_modules.replace(nn.Sequential(nn.ReLU()), backend="tensorrt10")
    with pytest.raises(
        ValueError, match=r"no quantizers: everything in it stays in float, and qtoolkit\.quantization_"
    ):
        qt.calibrate(replaced, [torch.ones(2)])


@pytest.mark.parametrize("quantizer", ["fixed", "lsq", "pact"])
def test_the_method_that_is_asked_for_holds_for_each_quantizer(quantizer: str) -> None:
    """What is learned starts at the least squared error by default; it did so where one asked for the largest value."""
    x = torch.randn(1024, 8)
    x[0, 0] = 30
    config = qt.QConfig(qt.QuantSpec(bits=4, quantizer=quantizer), qt.QuantSpec(bits=4, axis=None))
    prepared = qt.prepare(
        nn.Sequential(nn.Linear(8, 4)), x, qconfig_mapping=qt.QConfigMapping().set_global(config), backend="tensorrt10"
    )
    least_error = qt.calibrate(prepared, [x], progress=False, method="mse").ranges["activation_quantizers.input_1"]
    whole = qt.calibrate(prepared, [x], progress=False, method="minmax").ranges["activation_quantizers.input_1"]
    assert least_error[1] < 5
    assert whole == (float(x.min()), 30)


class WithFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.weight = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.norm(self.conv(x)).mean((2, 3)), self.weight)


def set_weights(model: nn.Module, values: nn.Module) -> None:
    with torch.no_grad():
        for name, value in (*values.named_parameters(), *values.named_buffers()):
            model.state_dict()[name].copy_(value)


def late(model: nn.Module, prepare) -> nn.Module:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(10)
    return prepare(other)


def on_meta(model: nn.Module, prepare) -> nn.Module:
    """On the meta device, whose quantizers have nothing that holds afterwards."""
    return prepare(copy.deepcopy(model).to("meta")).to_empty(device="cpu")


@pytest.mark.parametrize("quantizer", ["lsq", "pact"])
@pytest.mark.parametrize("route", ["prepare", "replace"])
@pytest.mark.parametrize("made", [late, on_meta])
def test_weights_that_are_set_after_prepare_train_as_those_that_were_there(made, route: str, quantizer: str) -> None:
    """Such as those of a loader that copies each parameter: rates of scales were those of the weights before."""
    model, x = WithFunction().train(), torch.randn(4, 3, 8, 8)
    spec = qt.QuantSpec(bits=4, quantizer=quantizer)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(spec, spec))
    routes = {
        "prepare": lambda m: qt.prepare(m, qconfig_mapping=mapping, backend="tensorrt10"),
        "replace": lambda m: qt.quant_modules.replace(m, mapping, backend="tensorrt10"),
    }
    expected, ours = routes[route](model), made(model, routes[route])
    set_weights(ours, model)
    for each in (expected, ours):
        qt.calibrate(each, [x], progress=False)
        for q in qt.quantizers_of(each).values():
            q.steps = -1
    for (name, wanted), (_, q) in zip(qt.quantizers_of(expected).items(), qt.quantizers_of(ours).items(), strict=True):
        if q.of_weight:
            torch.testing.assert_close(q.scale, wanted.scale, msg=name)
            torch.testing.assert_close(q._rate, wanted._rate, msg=name)
            (gradient,), (own,) = (
                torch.autograd.grad(each(x).square().sum(), list(each.get_submodule(name).parameters()))
                for each in (expected, ours)
            )
            torch.testing.assert_close(own, gradient, rtol=1e-3, atol=1e-5, msg=name)


class Pooled(nn.Module):
    """Has a batch norm with one value of a channel for each image, and one with more."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.Flatten())

    def forward(self, x: Tensor) -> Tensor:
        return self.pooled(self.wide(x))


@pytest.mark.parametrize("kind", ["prepare", "replace"])
def test_batches_that_are_too_small_for_a_batch_norm_are_a_warning(kind: str) -> None:
    """In training mode it normalizes two values of a channel to +1 and -1, and what follows has other ranges in eval mode."""
    quantize = qt.prepare if kind == "prepare" else qt.quant_modules.replace
    batches = list(torch.randn(24, 3, 8, 8).split(2))
    few = r"^calibrate: in training mode the batch norms 'pooled\.2' \(2\) normalize fewer than 16 values of a channel"
    with pytest.warns(UserWarning, match=few) as said:
        qt.calibrate(quantize(Pooled().train(), backend="onnxruntime"), batches, progress=False)
    assert [each.filename for each in said] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qt.calibrate(quantize(Pooled().eval(), backend="onnxruntime"), batches, progress=False)
        qt.calibrate(quantize(Pooled().train(), backend="onnxruntime").eval(), batches, progress=False)
        larger = [torch.randn(16, 3, 8, 8), torch.randn(2, 3, 8, 8)]  # a last batch may be smaller
        qt.calibrate(quantize(Pooled().train(), backend="onnxruntime"), larger, progress=False)
