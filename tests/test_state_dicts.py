"""The names in state dicts of prepared and replaced models are a promise: checkpoints of earlier versions load."""

import copy
import re
from collections import OrderedDict

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


def quantizer(name: str, affine: bool) -> list[str]:
    return [f"{name}.{tensor}" for tensor in ("_scale", *(["_zero_point"] if affine else []), *RANGE)]


@pytest.mark.parametrize("kind", ["fixed", "lsq"])
def test_prepared(kind: str) -> None:
    spec = qt.QuantSpec(signed=False, symmetric=False, quantizer=kind)
    config = qt.QConfig(spec, qt.QuantSpec(axis=0, quantizer=kind))
    mapping = qt.QConfigMapping().set_global(config)
    prepared = qt.prepare(Net(), X, backend="onnxruntime", qconfig_mapping=mapping)
    assert sorted(prepared.state_dict()) == sorted(
        ["weight", "conv.weight", "conv.bias", *(f"bn.{tensor}" for tensor in BATCH_NORM)]
        + quantizer("conv.weight_quantizer", affine=False)
        + quantizer("weight_quantizers.linear", affine=False)
        + [name for node in ("x", "bn", "mean") for name in quantizer(f"activation_quantizers.{node}", affine=True)]
    )


def test_replaced() -> None:
    replaced = qt.quant_modules.replace(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)))
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


def prepared_net(backend: str = "tensorrt", **spec: object) -> nn.Module:
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
    missing = [f"{prefix}{quantizer}{tensor}" for tensor in ("_scale", *RANGE)]
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
        quantizer.load_observed()
    torch.save(one.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    for strict in (True, False):
        with pytest.raises(ValueError, match=f"quantizer 'a.b'.*{message}"):
            other.load_state_dict(state, strict=strict)
    with pytest.raises(ValueError, match=message):
        other.to_grid().load_state_dict(one.to_grid().state_dict())
    copy.deepcopy(one).load_state_dict(state)


def test_a_state_dict_of_another_backend_is_an_error() -> None:
    state = prepared_net("tensorrt").state_dict()
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
