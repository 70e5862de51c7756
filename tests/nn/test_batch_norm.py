"""Strategies for batch norms against the float model and plain torch; frozen, compiled and converted models."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.nn.batch_norm import STRATEGIES
from tests import nets, reference
from tests.blocks import called_one_by_one
from tests.copies import made_once

# Layer, its batch norm, and the shape of an input.
CASES = {
    "conv1d": (lambda: nn.Conv1d(3, 6, 3), nn.BatchNorm1d, (8, 3, 7)),
    "conv2d": (lambda: nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d, (8, 3, 5, 6)),
    "conv3d": (lambda: nn.Conv3d(3, 6, 2), nn.BatchNorm3d, (4, 3, 3, 4, 3)),
    "depthwise": (lambda: nn.Conv2d(6, 6, 3, groups=6), nn.BatchNorm2d, (8, 6, 5, 6)),
    "conv_transpose": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2, stride=2), nn.BatchNorm2d, (4, 4, 3, 4)),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(4, 6, 3, groups=2, stride=2), nn.BatchNorm1d, (8, 4, 5)),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(4, 6, 2, bias=False), nn.BatchNorm3d, (4, 4, 3, 2, 3)),
    "linear": (lambda: nn.Linear(5, 6), nn.BatchNorm1d, (16, 5)),
    "sync": (lambda: nn.Conv2d(3, 6, 3), nn.SyncBatchNorm, (8, 3, 5, 6)),
}
COMBINATIONS = [
    (strategy, case)
    for strategy in STRATEGIES
    for case in CASES
    if not (case == "sync" and strategy in ("two_convolutions", "std_correction"))
]
each_combination = pytest.mark.parametrize(("strategy", "case"), COMBINATIONS)
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def backend_with(strategy: str) -> qt.Backend:
    return replace(qt.backends["tensorrt10"], batch_norm=strategy)


def float_model(case: str, **options: object) -> tuple[nn.Sequential, Tensor]:
    layer, norm, shape = CASES[case]
    return nets.trained(nn.Sequential(layer(), norm(6, **options)), *shape).double(), torch.randn(shape).double()


@made_once
def prepared_model(case: str, strategy: str, **options: object) -> tuple[nn.Sequential, nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = float_model(case, **options)
    prepared = qt.prepare(model, backend=backend_with(strategy)).double()
    qt.calibrate(prepared, [x], progress=False)
    return model, prepared.train(), x


def assert_same_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name).grad, parameter.grad, rtol=1e-7, atol=1e-9, msg=name)


def assert_same_gradients_and_buffers(ours: nn.Module, theirs: nn.Module) -> None:
    assert_same_gradients(ours, theirs)
    for name, buffer in theirs.named_buffers():
        torch.testing.assert_close(ours.get_buffer(name), buffer, rtol=1e-9, atol=1e-9)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("momentum", [0.1, None])
@each_combination
def test_with_quantizers_off_training_is_the_float_model(strategy: str, case: str, momentum: float | None) -> None:
    model, prepared, x = prepared_model(case, strategy, momentum=momentum)
    g = torch.randn_like(model(x))
    prepared.load_state_dict(model.state_dict())
    if strategy == "frozen":
        model[1].eval()
    for _ in range(3):
        with qt.disable_quantization(prepared):
            ours, theirs = prepared(x), model(x)
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
        ours.backward(g)
        theirs.backward(g)
    assert_same_gradients_and_buffers(prepared, model)


# ---- each strategy, written out in plain torch


def straight_through(weight: Tensor, quantizer: qt.TensorQuantizer) -> Tensor:
    """Quantize with the oracle's values, and pass gradients inside the range."""
    spec = quantizer.spec
    grid = (quantizer.scale, None, spec.qmin, spec.qmax, spec.axis, quantizer.group)
    passed = weight * reference.inside(weight, *grid)
    return passed + (reference.fake_quant(weight, *grid) - passed).detach()


def along(values: Tensor, y: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (y.dim() - 2))


def scaled(layer: nn.Module, factor: Tensor) -> Tensor:
    if not isinstance(layer, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        return layer.weight * factor.view(-1, *[1] * (layer.weight.dim() - 1))
    halves = zip(layer.weight.chunk(layer.groups), factor.chunk(layer.groups), strict=True)
    return torch.cat([weight * along(f, weight) for weight, f in halves])


def written_out(strategy: str, model: nn.Sequential, quantizer: qt.TensorQuantizer, x: Tensor) -> Tensor:
    layer, bn = model
    bias = 0 if layer.bias is None else layer.bias
    running_mean, running_std = bn.running_mean.clone(), torch.sqrt(bn.running_var + bn.eps)

    def convolve(weight: Tensor, bias: Tensor | None = None) -> Tensor:
        zeros = torch.zeros(6).double() if bias is None else bias
        own = {"weight": weight} if layer.bias is None else {"weight": weight, "bias": zeros}
        return torch.func.functional_call(layer, own, (x,))

    factor = bn.weight / running_std
    if strategy == "unscale":
        y = convolve(straight_through(scaled(layer, factor), quantizer))
        return bn(y / along(factor, y) + (0 if layer.bias is None else along(bias, y)))
    if strategy == "frozen":
        y = convolve(straight_through(scaled(layer, factor), quantizer))
        return y + along((bias - running_mean) * factor + bn.bias, y)
    plain = convolve(layer.weight, layer.bias)
    bn(plain)  # updates the running statistics
    others = [d for d in range(plain.dim()) if d != 1]
    mean, std = plain.mean(others), torch.sqrt(plain.var(others, correction=0) + bn.eps)
    shift = (bias - mean) * bn.weight / std + bn.bias
    if strategy == "two_convolutions":
        y = convolve(straight_through(scaled(layer, bn.weight / std), quantizer))
        return y + along(shift, y)
    y = convolve(straight_through(scaled(layer, factor), quantizer))
    return y * along(running_std / std, y) + along(shift, y)


@each_combination
def test_quantized_training_is_the_strategy_written_out_in_plain_torch(strategy: str, case: str) -> None:
    model, prepared, x = prepared_model(case, strategy)
    quantizer = prepared.get_submodule("0").weight_quantizer
    quantizer.amax = quantizer.amax * 0.7  # so that some weights are clamped
    own = {name: tensor for name, tensor in prepared.state_dict().items() if name in model.state_dict()}
    model.load_state_dict(own)
    for q in prepared.activation_quantizers.children():
        q.disable()
    g = torch.randn_like(model.eval()(x))
    ours, theirs = prepared(x), written_out(strategy, model.train(), quantizer, x)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    ours.backward(g)
    theirs.backward(g)
    assert_same_gradients_and_buffers(prepared, model)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@each_combination
def test_eval_is_bit_for_bit_the_converted_model(strategy: str, case: str, dtype: torch.dtype) -> None:
    _, prepared, x = prepared_model(case, strategy)
    prepared, x = prepared.to(dtype), x.to(dtype)
    for _ in range(3):
        prepared(x)
    converted = qt.convert(prepared)
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in converted.modules())
    assert torch.equal(prepared.eval()(x), converted(x))


# ---- freezing


@each_combination
def test_frozen_batch_norms_keep_their_statistics_and_train_gamma(strategy: str, case: str) -> None:
    _, prepared, x = prepared_model(case, strategy)
    bn = prepared.get_submodule("1")
    prepared(x)
    before = bn.running_mean.clone(), bn.running_var.clone()
    qt.freeze_batch_norm(prepared)
    prepared.train()
    assert not bn.training
    assert prepared.get_submodule("0").training
    y = prepared(x)
    y.square().sum().backward()
    assert torch.equal(bn.running_mean, before[0])
    assert torch.equal(bn.running_var, before[1])
    assert bn.weight.grad.abs().min() > 0
    assert torch.equal(y, qt.convert(prepared)(x))
    qt.unfreeze_batch_norm(prepared)
    assert bn.training
    prepared(x)
    assert torch.equal(bn.running_mean, before[0]) == (strategy == "frozen")


def test_freezing_a_model_without_linked_batch_norms_says_so() -> None:
    """Scripts for all models go on; a float model is an error."""
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3))
    folded = qt.prepare(model.eval(), backend="tensorrt10")
    for freeze in (qt.freeze_batch_norm, qt.unfreeze_batch_norm):
        for prepared in (folded, qt.prepare(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), backend="tensorrt10")):
            with pytest.warns(UserWarning, match=f"^{freeze.__name__}: no batch norm in the model is linked"):
                freeze(prepared)
        with pytest.raises(
            ValueError, match=f"{freeze.__name__}: this Sequential is a float model; pass the result of"
        ):
            freeze(model)


@pytest.mark.parametrize(
    "copy_of", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
@each_strategy
def test_copies_keep_strategy_link_and_freeze(strategy: str, copy_of: Callable[[nn.Module], nn.Module]) -> None:
    _, prepared, x = prepared_model("conv2d", strategy)
    qt.freeze_batch_norm(prepared)
    twin = copy_of(prepared).train()
    assert twin.get_submodule("0").batch_norm is twin.get_submodule("1")
    assert not twin.get_submodule("1").training
    qt.unfreeze_batch_norm(prepared)
    qt.unfreeze_batch_norm(twin)
    assert torch.equal(twin(x), prepared(x))


@pytest.mark.slow
@each_strategy
def test_training_compiles_without_graph_breaks(strategy: str) -> None:
    torch._dynamo.reset()  # other tests have compiled the same code for other layers
    _, prepared, x = prepared_model("conv2d", strategy)
    twin = copy.deepcopy(prepared)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    for _ in range(2):  # the second step has other running statistics
        optimizer.step()
        prepared(x).square().sum().backward()
        compiled(x).square().sum().backward()
    assert_same_gradients(twin, prepared)
    for name, buffer in prepared.named_buffers():
        torch.testing.assert_close(twin.get_buffer(name), buffer, rtol=1e-9, atol=1e-9, equal_nan=True)


@each_strategy
def test_under_autocast(strategy: str) -> None:
    _, prepared, x = prepared_model("conv2d", strategy)
    prepared.float()
    with torch.autocast("cpu", torch.bfloat16):
        prepared(x.float()).float().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in prepared.parameters() if p.grad is not None)


@each_strategy
def test_a_zero_gamma(strategy: str) -> None:
    model, x = float_model("conv2d")
    nn.init.zeros_(model[1].weight)
    prepared = qt.prepare(model, backend=backend_with(strategy)).double()
    qt.calibrate(prepared, [x], progress=False)
    y = prepared.train()(x)
    y.sum().backward()
    torch.testing.assert_close(y, model[1].bias.view(1, -1, 1, 1).expand_as(y))
    assert all(torch.isfinite(p.grad).all() for p in prepared.parameters() if p.grad is not None)
    assert torch.equal(prepared.eval()(x), qt.convert(prepared)(x))


# ---- kinds of batch norm


@pytest.mark.parametrize("training", [True, False])
def test_without_affine_parameters(training: bool) -> None:
    model, x = float_model("conv3d")
    model[1] = nn.BatchNorm3d(6, affine=False).double()
    model(x)
    prepared = qt.prepare(model.train(training), backend="tensorrt10").double()
    with qt.disable_quantization(prepared):
        torch.testing.assert_close(prepared(x), model(x), rtol=1e-9, atol=1e-9)
    qt.calibrate(prepared, [x], progress=False)
    assert torch.equal(prepared.eval()(x), qt.convert(prepared)(x))


def test_a_batch_norm_without_running_statistics_is_not_linked_and_is_reported() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, track_running_stats=False))
    for training in (True, False):
        prepared = qt.prepare(model.train(training), backend="tensorrt10")
        (line,) = qt.quantization_report(prepared).left_float
        assert line.name == "1"
        assert "it has no running statistics: track_running_stats=False" in line.reason
        assert type(prepared.get_submodule("1")) is nn.BatchNorm2d
        with qt.disable_quantization(prepared):
            assert torch.equal(prepared(torch.ones(2, 3, 5, 5)), model(torch.ones(2, 3, 5, 5)))


def test_a_batch_norm_of_other_channels_is_not_linked() -> None:
    """BatchNorm1d after a linear layer on (batch, length, features) normalizes the length."""
    model = nets.trained(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(7)), 4, 7, 5)
    x = torch.randn(4, 7, 5)
    for training in (True, False):
        prepared = qt.prepare(model.train(training), x, backend="tensorrt10")
        (line,) = qt.quantization_report(prepared).left_float
        assert "it has 7 channels and its layer 6" in line.reason
        nets.assert_float_when_off(prepared, model, x)


@pytest.mark.parametrize("training", [True, False])
def test_without_example_inputs_as_many_channels_as_the_length_are_an_error_with_a_remedy(training: bool) -> None:
    model = nets.trained(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6)), 4, 6, 5).train(training)
    x = torch.randn(4, 6, 5)
    with pytest.raises(ValueError, match=r"needs inputs of 2 dimensions, got \(4, 6, 5\).*Leave it unfolded"):
        qt.calibrate(qt.prepare(model, backend="tensorrt10"), [x], progress=False)
    prepared = qt.prepare(model, qconfig_mapping=qt.QConfigMapping().set_module_name("1", None), backend="tensorrt10")
    nets.assert_float_when_off(prepared, model, x)
    (line,) = qt.quantization_report(prepared).left_float
    assert "the qconfig_mapping leaves it in float" in line.reason


def test_an_unknown_strategy_names_the_nearest() -> None:
    model, _ = float_model("conv2d")
    with pytest.raises(ValueError, match="unknown batch norm strategy 'unscaled'; did you mean 'unscale'"):
        qt.prepare(model, backend=backend_with("unscaled"))


@pytest.mark.parametrize("strategy", ["two_convolutions", "std_correction"])
def test_a_sync_batch_norm_refuses_strategies_that_need_the_whole_batch(strategy: str) -> None:
    model, _ = float_model("sync")
    with pytest.raises(
        ValueError, match=rf"batch norm '1': strategy '{strategy}' needs the statistics of the whole batch"
    ):
        qt.prepare(model, backend=backend_with(strategy))


@pytest.mark.parametrize("strategy", ["unscale", "frozen"])
def test_converting_to_sync_batch_norm_after_prepare(strategy: str) -> None:
    _, prepared, x = prepared_model("conv2d", strategy)
    twin = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(prepared)).train()
    bn = twin.get_submodule("1")
    assert isinstance(bn, nn.SyncBatchNorm)
    assert twin.get_submodule("0").batch_norm is bn
    with called_one_by_one():  # as a SyncBatchNorm is in one process
        assert torch.equal(twin(x), prepared(x))
    assert torch.equal(twin.eval()(x), prepared.eval()(x))
    assert torch.equal(qt.convert(twin)(x), qt.convert(prepared)(x))


class TwoNames(nn.Module):
    """A batch norm with two names, of which forward calls the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.conv, self.part = nn.BatchNorm2d(6), nn.Conv2d(3, 6, 1), nn.Module()
        self.part.bn = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.part.bn(self.conv(x))


@pytest.mark.parametrize("copied", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_layers_are_relinked_in_parts_of_a_larger_model_and_under_all_names(copied) -> None:
    x = torch.randn(2, 3, 4, 4)
    prepared = qt.prepare(nets.trained(TwoNames(), 2, 3, 4, 4), backend="tensorrt10")
    qt.calibrate(prepared, [x], progress=False)
    expected = prepared.eval()(x)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(copied(nn.ModuleDict({"body": prepared}))).train()
    part = model["body"]
    linked = part.get_submodule("conv").batch_norm
    assert isinstance(linked, nn.SyncBatchNorm)
    assert linked is part.get_submodule("first") is part.get_submodule("part.bn")
    assert torch.equal(model.eval()["body"](x), expected)


def test_back_to_float() -> None:
    for case in ("conv2d", "sync"):
        model, prepared, x = prepared_model(case, "unscale")
        back = nn.Sequential(prepared.get_submodule("0").to_float(), prepared.get_submodule("1").to_float())
        assert [type(m) for m in back] == [type(m) for m in model]
        assert list(back.state_dict()) == list(model.state_dict())
        assert vars(back[1]).keys() == vars(model[1]).keys()
        assert torch.equal(back(x), model(x))


# ---- frozen ones of other packages


class FrozenBatchNorm2d(nn.Module):
    """The same buffers as torchvision.ops.FrozenBatchNorm2d and detectron2's."""

    def __init__(self, features: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((features,), value) + 0.3 * torch.rand(features))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        return x * scale.view(1, -1, 1, 1) + (self.bias - self.running_mean * scale).view(1, -1, 1, 1)


def torchvisions(features: int) -> nn.Module:
    ops = pytest.importorskip("torchvision.ops")
    bn = ops.FrozenBatchNorm2d(features)
    bn.load_state_dict(FrozenBatchNorm2d(features).state_dict())
    return bn


@pytest.mark.sweep(2)
@pytest.mark.parametrize("make", [FrozenBatchNorm2d, torchvisions])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.Conv2d(4, 6, 3, bias=False),
        lambda: nn.ConvTranspose2d(4, 6, 3, bias=False),
        lambda: nn.ConvTranspose2d(4, 6, 3, groups=2, stride=2),
    ],
    ids=["conv", "conv_transpose", "grouped_conv_transpose"],
)
@each_strategy
def test_a_frozen_batch_norm_is_folded_in_both_modes(make, training: bool, layer, strategy: str) -> None:
    model = nn.Sequential(layer(), make(6), nn.ReLU()).double().train(training)
    x = torch.randn(2, 4, 5, 5).double()
    prepared = qt.prepare(model, x, backend=backend_with(strategy)).double()
    assert (set(model.state_dict()) <= set(prepared.state_dict())) == training
    with qt.disable_quantization(prepared):
        torch.testing.assert_close(prepared(x), model(x), rtol=1e-9, atol=1e-9)
    qt.calibrate(prepared, [x], progress=False)
    y = prepared(x)
    assert torch.equal(y, qt.convert(prepared)(x))
    y.sum().backward()
    assert prepared.get_submodule("0").weight.grad.abs().sum() > 0
    assert not qt.quantization_report(prepared).left_float
    if training:
        checkpoint = {**model.state_dict(), "1.num_batches_tracked": torch.tensor(3)}  # of a model with real ones
        prepared.load_state_dict(checkpoint)
        assert type(prepared.get_submodule("1").to_float()) is type(model[1])


def test_a_frozen_batch_norm_without_a_layer_before_it_is_reported() -> None:
    prepared = qt.prepare(nn.Sequential(nn.ReLU(), FrozenBatchNorm2d(3)), torch.randn(1, 3, 2, 2), backend="tensorrt10")
    lines = {line.name: line.reason for line in qt.quantization_report(prepared).left_float}
    assert "no layer right before it" in lines["1"]


@pytest.mark.sweep(2)
@each_strategy
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_batch_norms_in_float32_inside_a_model_in_half_precision(
    strategy: str, training: bool, dtype: torch.dtype
) -> None:
    """The usual recipe: `model.bfloat16()`, then `.float()` of each batch norm."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 2, 2), nn.BatchNorm2d(2)
    )
    model, x = model.to(dtype), torch.rand(2, 3, 8, 8, dtype=dtype)
    for bn in (model[1], model[4]):
        bn.float()
        nn.init.uniform_(bn.running_var, 0.5, 2)
    backend = replace(qt.backends["onnxruntime"], batch_norm=strategy, sub_pixel=False)
    prepared = qt.prepare(model, backend=backend)
    qt.calibrate(prepared, [x], progress=False)
    for module in (prepared, model):
        module.train(training)
    with qt.disable_quantization(prepared):
        y, wanted = prepared(x), model(x)
        assert y.dtype == wanted.dtype == dtype
        close = {"rtol": 0.1, "atol": 0.1}
        torch.testing.assert_close(y, model.eval()(x) if strategy == "frozen" else wanted, **close)
    prepared(x).float().square().mean().backward()
    assert all(p.grad.isfinite().all() for p in prepared.parameters() if p.grad is not None)
    converted = qt.convert(prepared)
    assert converted.get_parameter("0.weight").dtype == converted(x).dtype == dtype


@pytest.mark.parametrize("training", [True, False])
def test_the_range_before_calibration_is_that_of_the_weight_as_folded(training: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train(training)
    nn.init.constant_(model[1].weight, 3.0)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(None, qt.QuantSpec(axis=0)))
    quantizer = qt.prepare(model, qconfig_mapping=mapping, backend="tensorrt10").get_submodule("0.weight_quantizer")
    wanted = 3 * model[0].weight.detach().flatten(1).abs().amax(1) / (1 + model[1].eps) ** 0.5
    torch.testing.assert_close(quantizer.amax, wanted)
