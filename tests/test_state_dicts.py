"""The names in state dicts of prepared and replaced models are a promise."""

import copy
import re
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt

X = torch.linspace(-1, 1, 2 * 3 * 4 * 4).reshape(2, 3, 4, 4)
RANGE = ("observer.lo", "observer.hi")
BATCH_NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.weight = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Parameter(torch.ones(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.bn(self.conv(x)).mean((2, 3)), self.weight)


def quantizer(name: str, affine: bool, kind: str = "fixed") -> list[str]:
    learned = ["_relative_scale", "_rate"] if kind == "lsq" else []
    ends = () if kind == "lsq" and "activation" in name else RANGE  # a histogram's counts are not kept
    return [f"{name}.{tensor}" for tensor in ("_scale", *learned, *(["_zero_point"] if affine else []), *ends)]


@pytest.mark.parametrize("kind", ["fixed", "lsq"])
def test_prepared(kind: str) -> None:
    spec = qt.QuantSpec(signed=False, symmetric=False, quantizer=kind)
    config = qt.QConfig(spec, qt.QuantSpec(axis=0, quantizer=kind))
    mapping = qt.QConfigMapping().set_global(config)
    prepared = qt.prepare(Net(), X, backend="onnxruntime", qconfig_mapping=mapping)
    assert sorted(prepared.state_dict()) == sorted(
        ["weight", "conv.weight", "conv.bias", *(f"bn.{tensor}" for tensor in BATCH_NORM)]
        + [*quantizer("conv.weight_quantizer", False, kind), "conv.weight_quantizer._factor"]
        + quantizer("weight_quantizers.linear", False, kind)
        + [name for node in ("x", "bn", "mean") for name in quantizer(f"activation_quantizers.{node}", True, kind)]
    )


def test_replaced() -> None:
    replaced = qt.quant_modules.replace(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), backend="tensorrt10")
    assert sorted(replaced.state_dict()) == sorted(
        [
            *("0.weight", "0.bias", *(f"1.{tensor}" for tensor in BATCH_NORM)),
            *quantizer("0.weight_quantizer", affine=False),
            *quantizer("0.input_quantizer", affine=False),
        ]
    )


def test_converted() -> None:
    prepared = qt.prepare(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), backend="onnxruntime")
    qt.calibrate(prepared, [X], progress=False)
    grids = [
        "activation_quantizers.input_1.scale",
        "activation_quantizers.input_1.zero_point",
        "0.weight_quantizer.scale",
    ]
    assert sorted(qt.convert(prepared).state_dict()) == sorted(["0.weight", "0.bias", *grids])


def test_histogram() -> None:
    observer = qt.QuantSpec(observer="histogram")
    assert list(qt.TensorQuantizer(observer).state_dict()) == ["_scale"]


# ---- strict is strict


def prepared_net(backend: str = "tensorrt10", **spec: object) -> nn.Module:
    mapping = qt.QConfigMapping()
    if spec:
        mapping.set_global(qt.QConfig(qt.QuantSpec(**spec), qt.QuantSpec(axis=0, **spec)))
    torch.manual_seed(0)
    prepared = qt.prepare(Net(), X, backend=backend, qconfig_mapping=mapping)
    qt.calibrate(prepared, [X], progress=False)
    return prepared


@pytest.mark.parametrize(
    "quantizer", ["conv.weight_quantizer.", "activation_quantizers.x.", "weight_quantizers.linear."]
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_state_dict_with_ranges_must_have_all(quantizer: str, wrapped: bool) -> None:
    model = prepared_net(quantizer="lsq")
    model, prefix = (nn.ModuleDict({"net": model, "z": nn.Linear(2, 2)}), "net.") if wrapped else (model, "")
    state = {name: value for name, value in model.state_dict().items() if quantizer not in name}
    ends = () if "activation" in quantizer else RANGE
    of_batch_norm = ["_factor"] if quantizer.startswith("conv") else []
    tensors = ("_relative_scale", "_scale", "_rate", *of_batch_norm, *ends)
    missing = [f"{prefix}{quantizer}{tensor}" for tensor in tensors]
    with pytest.raises(RuntimeError, match=f"Missing key.*{re.escape(missing[0])}"):
        model.load_state_dict(state)
    result = model.load_state_dict(state, strict=False)
    assert (sorted(result.missing_keys), result.unexpected_keys) == (sorted(missing), [])
    assert model.load_state_dict(model.state_dict()).missing_keys == []


def test_layers_without_a_prepared_root_must_have_all_ranges_too() -> None:
    model = nn.Sequential(*(qt.nn.QuantLinear.from_float(nn.Linear(2, 2), qt.QuantSpec(axis=0)) for _ in range(2)))
    for lacking in ("0.weight_quantizer", "1.weight_quantizer"):
        state = {name: value for name, value in model.state_dict().items() if not name.startswith(lacking)}
        found = model.load_state_dict(state, strict=False).missing_keys
        assert found == [f"{lacking}.{tensor}" for tensor in ("_scale", *RANGE)]


@pytest.mark.parametrize("strict", [True, False])
def test_a_float_state_dict_misses_nothing(strict: bool) -> None:
    prepared, floats = prepared_net(quantizer="lsq"), Net().state_dict()
    prepared.load_state_dict({name: value for name, value in prepared.state_dict().items() if name in floats})
    result = prepared.load_state_dict(floats, strict=strict)
    assert result == ([], [])
    assert torch.equal(prepared.state_dict()["conv.weight"], floats["conv.weight"])
    del floats["conv.bias"]
    assert prepared.load_state_dict(floats, strict=False) == (["conv.bias"], [])


@pytest.mark.parametrize(
    ("saved", "model", "message"),
    [
        ({"bits": 8}, {"bits": 4}, "in the state dict has bits=8, in the model bits=4; prepare the model with"),
        ({"signed": False}, {}, "in the state dict has signed=False, in the model signed=True;"),
        ({"quantizer": "lsq"}, {"quantizer": "fixed"}, "quantizer='lsq', in the model quantizer='fixed';"),
        ({"narrow": True, "pow2_scale": True}, {}, "narrow=True, pow2_scale=True, in the model narrow=False, pow2"),
        ({"axis": 0}, {"axis": 1}, "axis=0, in the model axis=1;"),
        ({"axis": 1, "group_size": 2}, {"axis": 1, "group_size": 4}, "group_size=2, in the model group_size=4;"),
    ],
)
def test_a_state_dict_of_another_spec_is_an_error(tmp_path, saved: dict, model: dict, message: str) -> None:
    one, other = (qt.TensorQuantizer(qt.QuantSpec(**spec), name="a.b") for spec in (saved, model))
    for quantizer in (one, other):
        with qt.calibrating(quantizer):
            quantizer(torch.rand(4, 4))
    torch.save(one.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    for strict in (True, False):
        with pytest.raises(ValueError, match=f"quantizer 'a.b'.*{message}"):
            other.load_state_dict(state, strict=strict)
    with pytest.raises(ValueError, match=message):
        other.to_grid().load_state_dict(one.to_grid().state_dict())
    copy.deepcopy(one).load_state_dict(state)


def test_a_state_dict_of_another_backend_is_an_error() -> None:
    state = prepared_net("tensorrt10").state_dict()
    with pytest.raises(ValueError, match="quantizer '.*': its spec in the state dict has"):
        prepared_net("openvino").load_state_dict(state)
    floats = {name: value for name, value in state.items() if name in Net().state_dict()}  # the error's remedy
    prepared_net("openvino").load_state_dict(floats)


def test_training_options_may_change_and_earlier_state_dicts_have_no_spec() -> None:
    one = qt.TensorQuantizer(qt.QuantSpec(observer="moving_average", observer_args={"momentum": 0.5}))
    one.amax = 3.0
    other = qt.TensorQuantizer(qt.QuantSpec())
    other.load_state_dict(one.state_dict())
    assert other.amax == 3
    earlier = OrderedDict(one.state_dict())
    assert not hasattr(earlier, "_metadata")
    qt.TensorQuantizer(qt.QuantSpec()).load_state_dict(earlier)


# ---- modes, models on the meta device, values that are not finite


def saved(model: nn.Module, folder: Path) -> dict:
    torch.save(model.state_dict(), folder / "state.pt")
    return torch.load(folder / "state.pt", weights_only=True)


def modes(model: nn.Module) -> list[tuple]:
    quantizers = qt.quantizers_of(model).values()
    return [(q.observing, q.quantizing, q.following) for q in quantizers]


def test_other_bits_are_an_error_without_the_metadata_too() -> None:
    """Scripts that rename the keys, and files of safetensors, make plain dicts."""

    def replaced(bits: int, **options: bool) -> nn.Module:
        spec, weight = qt.QuantSpec(bits=bits, **options), qt.QuantSpec(bits=bits, axis=0)
        mapping = qt.QConfigMapping().set_global(qt.QConfig(spec, weight))
        model = qt.quant_modules.replace(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)), mapping, backend="tensorrt10")
        qt.calibrate(model, [torch.randn(8, 6)], progress=False)
        return model.train()

    for options in ({}, {"symmetric": False}, {"signed": False, "symmetric": False}):
        model = replaced(8, **options)
        model(torch.randn(8, 6)).square().sum().backward()  # the ranges follow
        state = dict(model.state_dict())
        assert replaced(8, **options).load_state_dict(state) == ([], [])
        with pytest.raises(
            ValueError, match="its spec in the state dict has bits=8, in the model bits=4; prepare the model"
        ):
            replaced(4, **options).load_state_dict(state)
    model[0].input_quantizer.amax = 0.3  # a scale that is not that of the range
    assert replaced(8, **options).load_state_dict(dict(model.state_dict())) == ([], [])


def test_modes_are_in_checkpoints(tmp_path) -> None:
    model = prepared_net()
    qt.freeze_ranges(model, "weights").apply()
    qt.freeze_batch_norm(model)
    model.get_submodule("activation_quantizers.x").observing = True
    model.get_submodule("activation_quantizers.mean").disable()
    other = prepared_net()
    assert modes(other) != modes(model)
    state = saved(model, tmp_path)
    assert other.load_state_dict(state) == ([], [])
    assert modes(other) == modes(model)
    other.train()
    assert not other.get_submodule("bn").training
    assert other.get_submodule("bn").frozen
    third = prepared_net()
    before = modes(third)
    third.load_state_dict(dict(state))  # a plain dict has no metadata: the modes stay
    assert modes(third) == before


def test_a_training_that_is_saved_and_resumed_is_the_uninterrupted_one(tmp_path) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        torch.manual_seed(seed)
        optimizer.zero_grad()
        model(torch.randn_like(X)).square().sum().backward()
        optimizer.step()

    model = prepared_net().train()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    step(model, optimizer, 0)
    state = saved(model, tmp_path), copy.deepcopy(optimizer.state_dict())
    resumed = prepared_net().train()
    optimizer_of_resumed = torch.optim.SGD(resumed.parameters(), 0.05, momentum=0.9)
    resumed.load_state_dict(state[0])
    optimizer_of_resumed.load_state_dict(state[1])
    evaluated = prepared_net().eval()
    evaluated.load_state_dict(state[0])  # saved after a step, which changed the weights, and before the ranges followed
    assert torch.equal(evaluated(X), copy.deepcopy(model).eval()(X))
    for seed in (1, 2):
        step(model, optimizer, seed)
        step(resumed, optimizer_of_resumed, seed)
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), resumed.state_dict().values(), strict=True)
    )
    assert torch.equal(model.eval()(X), resumed.eval()(X))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("metadata", [True, False])
def test_a_state_between_steps_is_evaluated_as_the_model_that_was_saved(training: bool, metadata: bool) -> None:
    """Its weights have taken a step since their ranges were taken; scripts that rename the keys drop the metadata."""
    prepared = prepared_net().train()
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        prepared(X).square().sum().backward()
        optimizer.step()
    state = copy.deepcopy(prepared.state_dict())
    other = prepared_net().train(training)
    other.load_state_dict(state if metadata else dict(state))
    with torch.no_grad():
        assert torch.equal(other.eval()(X), prepared.eval()(X))


@pytest.mark.parametrize("training", [True, False])
def test_an_average_of_state_dicts_has_the_ranges_of_its_own_weights(training: bool) -> None:
    """Scripts average the state dicts of several checkpoints; `convert` takes the ranges of the averaged weights too."""
    states = []
    for factor in (1.0, -0.8):
        prepared = prepared_net()
        with torch.no_grad():
            for parameter in prepared.parameters():
                parameter.mul_(factor)
        qt.calibrate(prepared, [X], progress=False)
        states.append(prepared.state_dict())
    pairs = zip(states[0].items(), states[1].values(), strict=True)
    average = {name: (a + b) / 2 if a.is_floating_point() else a for (name, a), b in pairs}
    prepared = prepared_net().train(training)
    prepared.load_state_dict(average)
    prepared.eval()
    with torch.no_grad():
        assert torch.equal(prepared(X), qt.convert(prepared)(X))


def test_a_float_checkpoint_loads_over_statistics_that_are_nan() -> None:
    prepared, floats = prepared_net(), Net().state_dict()
    wanted = copy.deepcopy(prepared)
    prepared.get_submodule("bn").running_var.fill_(torch.nan)
    for model in (prepared, wanted):
        assert model.load_state_dict(floats) == ([], [])
    conv, alike = (model.get_submodule("conv.weight_quantizer") for model in (prepared, wanted))
    assert torch.equal(conv.scale, alike.scale)


def test_the_range_of_a_loaded_weight_is_that_with_the_loaded_batch_norm() -> None:
    prepared, source = prepared_net(), Net()
    nn.init.constant_(source.bn.weight, 3.0)
    for strict in (True, False):
        nn.ModuleDict({"net": prepared}).load_state_dict(
            {f"net.{k}": v for k, v in source.state_dict().items()}, strict
        )
        fresh = qt.prepare(copy.deepcopy(source).train(strict), X, backend="tensorrt10")  # in eval mode, folded
        for name in ("conv.weight_quantizer", "weight_quantizers.linear"):
            assert torch.equal(prepared.get_submodule(name).scale, fresh.get_submodule(name).scale), name


@pytest.mark.parametrize("kind", ["fixed", "lsq"])
@pytest.mark.parametrize("how", ["to_empty", "assign"])
@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("route", ["graph", "modules"])
def test_a_model_made_on_the_meta_device_is_loaded(kind: str, how: str, quantized: bool, route: str) -> None:
    def quantize(model: nn.Module) -> nn.Module:
        mapping = qt.QConfigMapping().set_global(
            qt.QConfig(qt.QuantSpec(quantizer=kind), qt.QuantSpec(axis=0, quantizer=kind))
        )
        quantized = qt.prepare if route == "graph" else qt.quant_modules.replace
        return quantized(model.train(), qconfig_mapping=mapping, backend="onnxruntime")

    torch.manual_seed(0)
    float_model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
    wanted = quantize(copy.deepcopy(float_model))
    qt.calibrate(wanted, [X], progress=False)
    model = quantize(copy.deepcopy(float_model).to("meta"))
    model = model.to_empty(device="cpu") if how == "to_empty" else model
    state = wanted.state_dict() if quantized else float_model.state_dict()
    assert model.load_state_dict(state, assign=how == "assign") == ([], [])
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    if not quantized:
        with pytest.raises(RuntimeError, match="has no range yet"):
            model(X)
        qt.calibrate(model, [X], progress=False)
    assert torch.equal(model.cpu().eval()(X), wanted.eval()(X))
