"""Float layers become QAT layers: by the table, by the user's mapping, bit-equal, and back."""

import copy

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.quantizers.observers import RangeObserver
from tests import nets

BACKENDS = list(qt.backends)


class AllLayers(nn.Module):
    """A layer of every type of the table, without batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.conv1, self.up1 = nn.Conv1d(4, 4, 3, padding=1, groups=4), nn.ConvTranspose1d(4, 4, 2, stride=2, groups=2)
        self.conv2, self.up2 = nn.Conv2d(4, 8, 3, padding="same"), nn.ConvTranspose2d(8, 4, 3, dilation=2)
        self.conv3, self.up3 = nn.Conv3d(4, 4, 1), nn.ConvTranspose3d(4, 4, (1, 1, 1), groups=2)
        self.attention, self.fc = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.up1(self.conv1(self.table(x).transpose(1, 2))))
        y = self.up2(self.conv2(y.unsqueeze(2)))
        y = self.up3(self.conv3(y.unsqueeze(2))).flatten(2).transpose(1, 2)
        return self.fc(self.attention(y, y, y)[0])


INDICES = torch.tensor([[1, 0, 3, 5], [9, 1, 1, 2]])


@pytest.mark.sweep(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("training", [True, False])
def test_swap_is_bit_equal_with_quantizers_off(backend: str, training: bool) -> None:
    model = AllLayers().train(training)
    prepared = qt.prepare(model, INDICES, backend=backend)
    with qt.disable_quantization(prepared):
        ours, theirs = prepared(INDICES), model(INDICES)
    if qt.backends[backend].roles.get("attention", "float") != "float":
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)  # torch computes it in another order
        prepared.set_submodule("attention", prepared.get_submodule("attention").to_float())
        with qt.disable_quantization(prepared):
            ours = prepared(INDICES)
    assert torch.equal(ours, theirs)


def backend_computes(backend: str, kind: str, layer: nn.Module) -> bool:
    grouped = "transpose" in kind and layer.groups > 1
    return qt.backends[backend].roles.get(kind, "float") != "float" and (
        not grouped or qt.backends[backend].grouped_conv_transpose
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_type_of_the_table_is_swapped_or_reported(backend: str) -> None:
    prepared = qt.prepare(AllLayers(), INDICES, backend=backend)
    lines = {line.name: line for line in qt.quantization_report(prepared).layers}
    for name, module in AllLayers().named_children():
        ours, qat = prepared.get_submodule(name), qt.nn.QAT_MODULES[type(module)]
        if backend_computes(backend, qat.KIND, module):
            assert type(ours) is qat, name
            assert lines[name].status == "quantized"
        else:
            assert type(ours) is type(module)
            reason = lines[name].reason
            assert f"{qat.KIND}, which {backend} computes in float" in reason or "with groups, for which" in reason


def test_the_float_state_dict_loads_after_swap() -> None:
    model = AllLayers()
    prepared = qt.prepare(AllLayers(), backend="onnxruntime")
    prepared.load_state_dict(model.state_dict())  # strict
    assert set(model.state_dict()) <= set(prepared.state_dict())
    assert {n for n, _ in prepared.named_parameters()} == {n for n, _ in model.named_parameters()}
    assert all(torch.equal(prepared.state_dict()[name], value) for name, value in model.state_dict().items())


def test_what_was_left_float_is_listed_with_the_reason() -> None:
    mapping = qt.QConfigMapping().set_module_name("up2", None).set_object_type(nn.Embedding, None)
    prepared = qt.prepare(AllLayers(), backend="onnxruntime", qconfig_mapping=mapping)
    reasons = {line.name: line.reason for line in qt.quantization_report(prepared).left_float}
    assert reasons["table"] == reasons["up2"] == "float: the qconfig_mapping leaves it in float"
    assert type(prepared.get_submodule("up2")) is nn.ConvTranspose2d


@pytest.mark.slow
def test_a_swapped_model_trains_compiles_and_exports(tmp_path) -> None:
    prepared = qt.prepare(AllLayers(), INDICES, backend="onnxruntime")
    qt.calibrate(prepared, [INDICES], progress=False)
    prepared.train()(INDICES).square().sum().backward()
    assert all(parameter.grad is not None for parameter in prepared.parameters())
    converted = qt.convert(prepared)
    assert torch.equal(converted(INDICES), prepared.eval()(INDICES))
    verification = qt.export_onnx(converted, INDICES, tmp_path / "m.onnx").verification
    weights = [p for n, p in AllLayers().named_parameters() if n.endswith("weight")]
    assert verification.weight_codes.compared == sum(weight.numel() for weight in weights)
    assert verification.weight_codes.differing == verification.quantizer_codes.differing == 0


# ---- convert


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("net", [nets.ConvNet, nets.Residual], ids=["conv", "residual"])
def test_convert_equals_the_fake_quant_model_in_eval(net: type[nn.Module], training: bool) -> None:
    model = net() if net is nets.ConvNet else net(True)
    shape = (4, 3, 8, 8) if net is nets.ConvNet else (4, 4, 8, 8)
    prepared = qt.prepare(nets.trained(model, *shape).train(training), backend="tensorrt")
    x = torch.randn(shape)
    qt.calibrate(prepared, [x], progress=False)
    assert torch.equal(qt.convert(prepared)(x), prepared.eval()(x))


def test_convert_folds_batch_norms_and_leaves_no_observer_state() -> None:
    prepared = qt.prepare(nets.trained(nets.ConvNet(), 4, 3, 8, 8), backend="tensorrt")
    qt.calibrate(prepared, [torch.randn(4, 3, 8, 8)], progress=False)
    converted = qt.convert(prepared)
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm | qt.TensorQuantizer) for m in converted.modules())
    assert not any("observer" in name or "bn" in name for name in converted.state_dict())


def test_convert_puts_forward_fp32_beside_every_quantized_layer() -> None:
    prepared = qt.prepare(AllLayers().eval(), backend="onnxruntime")
    qt.calibrate(prepared, [INDICES], progress=False)
    converted, model = qt.convert(prepared), AllLayers()
    model.load_state_dict({k: v for k, v in converted.state_dict().items() if k in model.state_dict()})
    inputs = {
        "table": INDICES,
        "fc": torch.randn(2, 4),
        "conv2": torch.randn(1, 4, 5, 5),
        "up3": torch.randn(1, 4, 2, 2, 2),
    }
    for name, x in inputs.items():
        assert torch.equal(converted.get_submodule(name).forward_fp32(x), model.get_submodule(name)(x))


# ---- the user's own types


class Bilinear2(nn.Module):
    """A float layer of the user's own."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(features, features)), None

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.T) * x


class QuantBilinear2(qt.nn.QuantWeighted, Bilinear2):
    FLOAT = Bilinear2
    KIND = "linear"

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return (x @ weight.T) * x


class Standalone(nn.Module):
    """A QAT module that shares nothing with qtoolkit's."""

    def __init__(self, module: nn.Module, arguments: tuple) -> None:
        super().__init__()
        self.module, self.arguments = module, arguments

    @classmethod
    def from_float(cls, module: nn.Module, weight: object, name: str, activation: object) -> "Standalone":
        return cls(module, (weight, name, activation))

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


def test_a_type_of_the_users_own_is_swapped_by_the_mapping(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Bilinear2(4), nn.Linear(4, 2)).eval()
    x = torch.randn(6, 4)
    prepared = qt.prepare(model, x, backend="onnxruntime", qat_modules={Bilinear2: QuantBilinear2})
    layer = prepared.get_submodule("1")
    assert type(layer) is QuantBilinear2
    assert layer.weight_quantizer.spec.axis == 0
    assert type(layer.to_float()) is Bilinear2
    nets.assert_float_when_off(prepared, model, x)
    qt.calibrate(prepared, [x], progress=False)
    codes = qt.export_onnx(prepared, x, tmp_path / "m.onnx").verification.weight_codes
    assert (codes.compared, codes.differing) == (16 + 16 + 8, 0)


def test_a_mapping_replaces_the_tables_own_choice() -> None:
    class Mine(qt.nn.QuantLinear):
        pass

    prepared = qt.prepare(nn.Sequential(nn.Linear(4, 2)), qat_modules={nn.Linear: Mine}, backend="tensorrt")
    assert type(prepared.get_submodule("0")) is Mine


def test_a_class_of_any_origin_gets_the_specs_and_the_name() -> None:
    model = nn.Sequential(Bilinear2(4))
    rule = qt.QConfigMapping().set_object_type(Bilinear2, qt.backends["tensorrt"].qconfig)
    prepared = qt.prepare(
        model, torch.randn(2, 4), qconfig_mapping=rule, qat_modules={Bilinear2: Standalone}, backend="tensorrt"
    )
    qconfig = qt.backends["tensorrt"].qconfig
    assert prepared.get_submodule("0").arguments == (qconfig.weight, "0", qconfig.activation)


class Loses(Standalone):
    @classmethod
    def from_float(cls, *args: object) -> None:
        return None


RULE = qt.QConfigMapping().set_object_type(nn.Linear, qt.backends["tensorrt"].qconfig)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([nn.Linear], "qat_modules must map float module types to QAT types, got a list"),
        ({"fc1": qt.nn.QuantLinear}, "each key of qat_modules must be a torch.nn.Module type, got 'fc1'"),
        ({int: qt.nn.QuantLinear}, "each key of qat_modules must be a torch.nn.Module type, got <class 'int'>"),
        (
            {nn.Linear: qt.nn.QuantLinear(2, 2)},
            "each value of qat_modules must be a torch.nn.Module type, got a QuantLinear",
        ),
        (
            {nn.Linear: nn.Conv2d},
            "maps Linear to Conv2d, which has no class method from_float(module, weight, name, activ",
        ),
        ({nn.Linear: qt.nn.QuantConv2d}, "QuantConv2d.from_float takes a Conv2d, got Linear"),
        ({nn.Linear: Loses}, "Loses.from_float must return a torch.nn.Module for 'fc1', got NoneType"),
    ],
)
def test_bad_mappings_leave_the_model_untouched(given: object, words: str) -> None:
    model = nets.LinearNet()
    before, modules = copy.deepcopy(model.state_dict()), dict(model.named_modules())
    with pytest.raises(TypeError) as caught:
        qt.prepare(model, qat_modules=given, qconfig_mapping=RULE, backend="tensorrt")
    assert words in str(caught.value)
    assert dict(model.named_modules()) == modules
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_weights_are_read_for_their_ranges_alone(monkeypatch) -> None:
    computed, observed = [], []
    effective, observe = qt.nn.QuantWeighted.effective_weight, RangeObserver.forward

    def counted(layer: qt.nn.QuantWeighted) -> Tensor:
        computed.append(layer)
        return effective(layer)

    def counted_observation(observer: RangeObserver, x: Tensor) -> None:
        observed.append(observer)
        observe(observer, x)

    monkeypatch.setattr(qt.nn.QuantWeighted, "effective_weight", counted)
    monkeypatch.setattr(RangeObserver, "forward", counted_observation)
    prepared = qt.prepare(nets.ConvNet(), backend="onnxruntime")
    qt.quantization_report(prepared)
    layers = [m for m in prepared.modules() if isinstance(m, qt.nn.QuantWeighted)]
    with_norm = [layer for layer in layers if layer.batch_norm is not None]
    assert len(with_norm) == 3
    assert len(observed) == len(layers) + len(with_norm)  # once each, and again with the batch norm's factor
    assert computed == with_norm
