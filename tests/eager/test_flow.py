"""Models without a graph, replaced layer by layer: calibrate, convert, export, verify."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.compat.pytorch_quantization import nn as quant_nn
from qtoolkit.export import verify_onnx
from tests import nets, reference
from tests.replaced import Branches, Loops, calibrated, of_loops, ways

EXPORTERS = ["dynamo", "torchscript"]


def codes_of(path: Any, quantizer: str, *inputs: Tensor) -> np.ndarray:
    """Return what the QuantizeLinear node of a quantizer gives in onnxruntime."""
    proto = onnx.load(str(path))
    (node,) = (node for node in proto.graph.node if node.name == f"{quantizer}.quantize")
    proto.graph.output.append(onnx.ValueInfoProto(name=node.output[0]))
    return run(proto, *inputs)[-1]


def run(proto: Any, *inputs: Tensor) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {i.name: x.numpy() for i, x in zip(session.get_inputs(), inputs, strict=True)})


# ---- convert


@pytest.mark.parametrize("backend", ["tensorrt10", "onnxruntime"])
def test_the_converted_model_equals_the_replaced_model_in_every_branch(backend: str) -> None:
    model = nets.trained(Branches(), 4, 3, 6, 6).eval()
    replaced = calibrated(model, list(ways()), backend=backend)
    state = copy.deepcopy(replaced.state_dict())
    converted = qt.convert(replaced)
    assert type(converted) is Branches
    assert not converted.training
    assert not qt.quantizers_of(converted)
    assert not any("observer" in key for key in converted.state_dict())
    for x in ways(8):
        assert torch.equal(converted(x), replaced(x))
        assert not torch.equal(converted(x), model(x))
    assert qt.quantizers_of(replaced)
    assert all(torch.equal(value, state[key]) for key, value in replaced.state_dict().items())


def test_the_values_are_those_of_the_formula() -> None:
    """A linear layer in a loop over parts: int8 by the largest magnitude, weights for each output."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.fc(part) for part in x.split(2)])

    model, x = Parts(), torch.randn(8, 5)
    converted = qt.convert(calibrated(model, [x]))
    weight = model.fc.weight.detach()
    w = reference.fake_quant(weight, weight.abs().amax(1) / 127, None, -128, 127, 0)
    y = 2 * torch.randn(6, 5)  # beyond the range
    expected = F.linear(reference.fake_quant(y, x.abs().amax() / 127), w, model.fc.bias)
    torch.testing.assert_close(converted(y), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(converted.fc.weight_quantizer(weight), w)
    torch.testing.assert_close(converted.fc.forward_fp32(y), model.fc(y))


def test_shared_modules_stay_shared() -> None:
    converted = qt.convert(calibrated(Loops(), [of_loops()]))
    assert converted.first is converted.again
    assert isinstance(converted.ours, qt.Grid)
    assert qt.convert(converted) is not converted  # nothing is left to do
    assert torch.equal(qt.convert(converted)(*of_loops())["logits"], converted(*of_loops())["logits"])


def test_copies_and_pickles_of_converted_models_compute_the_same(tmp_path) -> None:
    converted = qt.convert(calibrated(Branches().eval(), list(ways())))
    torch.save(converted, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for x in ways():
        assert torch.equal(copy.deepcopy(converted)(x), converted(x))
        assert torch.equal(loaded(x), converted(x))
    assert str(qt.quantization_report(loaded)) == str(qt.quantization_report(converted))


def test_a_quantizer_without_data_is_named() -> None:
    far, _ = ways()
    replaced = qt.quant_modules.replace(Branches().eval(), backend="tensorrt10")
    report = qt.calibrate(replaced, [far], progress=False)
    assert set(report.unreached) == {"near.input_quantizer", "near.weight_quantizer"}
    with pytest.warns(
        UserWarning, match="convert: no data reached the layers 'near', which stay in float; calibrate with"
    ):
        assert type(qt.convert(replaced).near) is nn.Conv2d
    new = qt.quant_modules.replace(Branches().eval(), backend="tensorrt10")
    with pytest.raises(RuntimeError, match="'model.input_quantizer' saw no data"):  # nothing was calibrated
        qt.convert(new)


class WithUnused(nn.Module):
    """Has layers that its forward never calls, as heads for another data set."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.rnn = nn.Linear(4, 4), nn.Linear(4, 4), nn.LSTM(4, 4)
        self.head = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@pytest.mark.parametrize("quantize", ["inputs", "outputs"])
def test_layers_that_forward_never_calls_stay_in_float(quantize: str, tmp_path: Path) -> None:
    """As in a traced model, where no quantizer is made for them."""

    def replaced() -> nn.Module:
        model = qt.fuse_modules(WithUnused().train(), ["head.0", "head.1", "head.2"])
        return qt.quant_modules.replace(model, backend="onnxruntime", quantize=quantize)

    x, model = torch.randn(8, 4), replaced()
    qt.calibrate(model, [x], progress=False)
    chain = "head.0" if quantize == "inputs" else "head.2"  # where its quantizer is
    with pytest.warns(UserWarning, match=f"no data reached the layers 'unused', 'rnn', '{chain}'"):
        converted = qt.convert(model)
    assert [type(converted.get_submodule(name)) for name in ("unused", "rnn")] == [nn.Linear, nn.LSTM]
    assert [type(part).__name__ for part in converted.head[1:]] == ["Identity", "ReLU"]
    reasons = {line.name: line.reason for line in qt.quantization_report(converted).layers if line.name != "used"}
    assert reasons["unused"] == reasons["rnn"] == "float: no data reached it before qtoolkit.convert"
    restored = qt.convert(replaced(), state_dict=converted.state_dict())
    assert torch.equal(restored(x), converted(x))
    qt.export_onnx(converted, x, tmp_path / "model.onnx", progress=False, exporter="torchscript")


def test_quantizers_without_a_name_are_named_by_their_dotted_path() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(qt.TensorQuantizer(qt.QuantSpec()))

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x)

    model = Own()
    with pytest.raises(RuntimeError, match="quantizer 'block.0' saw no data"):
        qt.convert(model)
    qt.calibrate(model, [torch.ones(2)], progress=False)
    assert isinstance(qt.convert(model).block[0], qt.Grid)


def test_a_prepared_part_of_a_model_is_converted_by_its_graph(tmp_path) -> None:
    class Detector(nn.Module):
        def __init__(self, backbone: nn.Module) -> None:
            super().__init__()
            self.backbone, self.head = backbone, nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.backbone(x)
            return self.head(y) if y.sum() > -1e9 else y

    x = torch.randn(4, 3, 8, 8)
    # In training mode: batch norms are linked.
    model = Detector(qt.prepare(nets.trained(nets.ConvNet(), *x.shape), x, backend="tensorrt10"))
    replaced = qt.quant_modules.replace(model.train(), inplace=True, backend="tensorrt10")
    qt.calibrate(replaced, [x], progress=False)
    converted = qt.convert(replaced)
    torch.testing.assert_close(converted(x), replaced.eval()(x), rtol=1e-5, atol=1e-5)
    assert not any(isinstance(m, nn.BatchNorm2d | qt.TensorQuantizer) for m in converted.modules())
    codes = qt.export_onnx(converted, x, tmp_path / "m.onnx", exporter="torchscript").verification
    assert (codes.weight_codes.differing, codes.quantizer_codes.differing, codes.missing) == (0, 0, ())
    assert codes.quantizer_codes.compared > 4000


# ---- refusals


def test_quantizers_of_pytorch_quantization_are_refused(tmp_path) -> None:
    legacy = nn.Sequential(quant_nn.QuantLinear(2, 2))
    words = r"'0._input_quantizer' is a quantizer of qtoolkit.compat.pytorch_quantization.*docs/migration.md"
    for call in (qt.convert, lambda m: qt.export_onnx(m, torch.ones(1, 2), tmp_path / "m.onnx")):
        with pytest.raises(TypeError, match=words):
            call(legacy)
    with pytest.raises(TypeError, match=words):
        qt.calibrate(legacy, [torch.ones(1, 2)], progress=False)


def test_models_without_quantizers_are_refused(tmp_path) -> None:
    words = "the model must be what qtoolkit.prepare, qtoolkit.quant_modules.replace or qtoolkit.convert returned"
    for call in (qt.convert, lambda m: qt.export_onnx(m, torch.ones(1, 2), tmp_path / "m.onnx")):
        for model in (nn.Linear(2, 2), "model"):
            with pytest.raises(TypeError, match=words):
                call(model)
    with pytest.raises(ValueError, match="call qtoolkit.prepare or qtoolkit.quant_modules.replace first"):
        qt.calibrate(nn.Linear(2, 2), [torch.ones(1, 2)], progress=False)


def test_prepare_does_not_quantize_a_replaced_model_again() -> None:
    with pytest.raises(ValueError, match="prepare: the model was quantized by module replacement already"):
        qt.prepare(qt.quant_modules.replace(nn.Sequential(nn.Linear(2, 2)), backend="tensorrt10"), backend="tensorrt10")
    with pytest.raises(ValueError, match="prepare: submodule '1' was quantized by module replacement already"):
        qt.prepare(
            nn.Sequential(nn.ReLU(), qt.quant_modules.replace(nn.Sequential(nn.Linear(2, 2)), backend="tensorrt10")),
            backend="tensorrt10",
        )
    layer = qt.nn.QuantLinear(2, 2, weight_spec=qt.QuantSpec(axis=0))
    # Without a quantizer of its input.
    assert isinstance(qt.prepare(nn.Sequential(layer), backend="tensorrt10"), nn.Module)
    layer.input_quantizer = qt.TensorQuantizer(qt.QuantSpec())
    with pytest.raises(ValueError, match="submodule '0' was quantized by module replacement already"):
        qt.prepare(nn.Sequential(layer), backend="tensorrt10")


# ---- export


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("backend", ["tensorrt10", "onnxruntime"])
def test_codes_are_those_of_onnxruntime(tmp_path, exporter: str, backend: str) -> None:
    inputs = of_loops()
    replaced = calibrated(Loops(), [inputs], backend=backend)
    result = qt.export_onnx(replaced, (3 * inputs[0], inputs[1]), tmp_path / "m.onnx", exporter=exporter)
    codes = result.verification
    assert codes.weight_codes.compared == 36 + 18 + 6  # the layers' weights and the parameter that forward quantizes
    assert codes.quantizer_codes.compared >= 24 + 24 + 24 + 24
    for count in (codes.weight_codes, codes.quantizer_codes, codes.layer_codes):
        assert count.differing == 0
    assert (codes.missing, codes.unreached) == ((), ())
    assert codes.output_difference < 1e-5
    proto = onnx.load(str(result.path))
    expected = qt.convert(replaced)(*inputs)
    for found, wanted in zip(run(proto, *inputs), (expected["logits"], expected["features"]), strict=True):
        np.testing.assert_allclose(found, wanted.detach().numpy(), rtol=1e-5, atol=1e-6)
    names = {node.name for node in proto.graph.node}
    assert {"first.weight_quantizer.dequantize", "head.input_quantizer.quantize", "ours.quantize"} <= names
    stored = sum(node.op_type == "QuantizeLinear" and "weight" in node.name for node in proto.graph.node)
    assert (stored == 0) == (backend == "onnxruntime")
    assert [i.name for i in proto.graph.input] == ["x", "bias"]


@pytest.mark.parametrize("backend", ["tensorrt10", "onnxruntime"])
def test_the_files_codes_are_those_of_the_formula(tmp_path, backend: str) -> None:
    far, near = ways()
    replaced = calibrated(Branches().eval(), [far, near], backend=backend)
    path = qt.export_onnx(replaced, far, tmp_path / "m.onnx", exporter="torchscript").path
    both = torch.cat([far, near])
    if backend == "tensorrt10":
        expected = reference.quantize(far, both.abs().amax() / 127)
    else:
        scale = (both.amax() - both.amin()) / 255
        zero_point = torch.round(-both.amin() / scale)
        expected = reference.quantize(far, scale, zero_point, 0, 255, torch.uint8)
    assert np.array_equal(codes_of(path, "model.input_quantizer", far), expected.numpy())


def test_a_file_for_each_branch(tmp_path) -> None:
    far, near = ways()
    replaced = calibrated(nets.trained(Branches(), 4, 3, 6, 6).eval(), [far, near])
    converted = qt.convert(replaced)
    for way, other, x in (("far", "near", far), ("near", "far", near)):
        result = qt.export_onnx(converted, x, tmp_path / f"{way}.onnx", exporter="torchscript")
        codes = result.verification
        assert (codes.weight_codes.differing, codes.quantizer_codes.differing, codes.missing) == (0, 0, ())
        assert set(codes.unreached) == {f"{other}.weight_quantizer", f"{other}.input_quantizer"}
        assert f"not executed or not used for these inputs: {other}.weight_quantizer" in str(codes)
        proto = onnx.load(str(result.path))
        assert not any(node.name.startswith(f"{other}.") for node in proto.graph.node)
        np.testing.assert_allclose(run(proto, x)[0], converted(x).detach().numpy(), rtol=1e-5, atol=1e-6)
    found = verify_onnx(converted, near, tmp_path / "far.onnx")  # inputs that take the other way
    with pytest.raises(RuntimeError, match=r"no QuantizeLinear for: near.input_quantizer, near.weight_quantizer"):
        found.check()


@pytest.mark.filterwarnings("ignore")
def test_dynamo_refuses_a_branch_with_a_remedy_and_writes_no_file(tmp_path) -> None:
    far, near = ways()
    replaced = calibrated(Branches().eval(), [far, near])
    words = (
        r"torch.export cannot export Branches \(.+\)\. If its forward branches on values, use exporter='torchscript'"
    )
    with pytest.raises(RuntimeError, match=words):
        qt.export_onnx(replaced, far, tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_names_of_inputs(tmp_path, exporter: str) -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, first: Tensor, *rest: Tensor, flag: bool = False) -> Tensor:
            return self.fc(first) + sum(rest)

    x = torch.rand(3, 2, 3)
    replaced = calibrated(Takes(), [tuple(x)])
    for names in (None, ["a", "b", "c"]):
        result = qt.export_onnx(
            replaced, tuple(x), tmp_path / "m.onnx", exporter=exporter, input_names=names, output_names=["y"]
        )
        graph = onnx.load(str(result.path)).graph
        assert [i.name for i in graph.input] == (names or ["first", "rest_0", "rest_1"])
        assert [o.name for o in graph.output] == ["y"]
        assert result.verification.quantizer_codes.differing == 0


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_a_dynamic_batch(tmp_path, exporter: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    x = torch.rand(4, 3, 8, 8)
    replaced = calibrated(model, [x])
    result = qt.export_onnx(
        replaced, x, tmp_path / "m.onnx", exporter=exporter, input_names=["x"], dynamic_shapes=({0: "batch"},)
    )
    assert verify_onnx(qt.convert(replaced), torch.rand(7, 3, 8, 8), result.path).quantizer_codes.differing == 0


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_a_submodule_called_model_keeps_its_name(tmp_path, exporter: str) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x)

    x = torch.rand(8, 4)
    prepared = qt.prepare(Wrapped().eval(), backend="tensorrt10")
    qt.calibrate(prepared, [x], progress=False)
    for model in (prepared, calibrated(Wrapped(), [x])):
        path = qt.export_onnx(model, x, tmp_path / "m.onnx", exporter=exporter).path
        assert "model.0.weight_quantizer.dequantize" in {node.name for node in onnx.load(str(path)).graph.node}


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("backend", ["tensorrt10", "onnxruntime"])
def test_layers_of_constants_are_compared(tmp_path, exporter: str, backend: str) -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.of_position = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) + self.of_position(torch.arange(24.0).reshape(6, 4) / 10)

    x = torch.rand(6, 4)
    codes = qt.export_onnx(
        calibrated(Positions(), [x], backend=backend), x, tmp_path / "m.onnx", exporter=exporter
    ).verification
    assert codes.weight_codes.compared == 32
    assert {name: count.compared for name, count in codes.by_quantizer.items()} == {
        "fc.input_quantizer": 24,
        "of_position.input_quantizer": 24,
    }
    assert (codes.weight_codes.differing, codes.layer_codes.differing, codes.missing) == (0, 0, ())


# ---- what verification notices


def exported(path: Any, **options: Any) -> tuple[nn.Module, Any, tuple[Tensor, Tensor]]:
    inputs = of_loops()
    converted = qt.convert(calibrated(Loops(), [inputs], **options))
    return converted, onnx.load(str(qt.export_onnx(converted, inputs, path / "m.onnx").path)), inputs


@pytest.mark.parametrize("name", ["first.input_quantizer", "ours", "head.input_quantizer"])
def test_a_changed_scale_is_noticed(tmp_path, name: str) -> None:
    converted, proto, inputs = exported(tmp_path)
    converted.get_submodule(name).scale.mul_(1.5)
    found = verify_onnx(converted, inputs, proto)
    assert found.quantizer_codes.differing > 0
    with pytest.raises(RuntimeError, match="onnxruntime's quantized values must equal the model's"):
        found.check()


@pytest.mark.parametrize("backend", ["tensorrt10", "onnxruntime"])
@pytest.mark.parametrize("name", ["first.weight", "scale"])
def test_a_changed_weight_is_noticed(tmp_path, backend: str, name: str) -> None:
    converted, proto, inputs = exported(tmp_path, backend=backend)
    with torch.no_grad():
        converted.get_parameter(name).add_(0.3)
    with pytest.raises(RuntimeError, match="quantized values must equal"):
        verify_onnx(converted, inputs, proto).check()


def test_a_changed_layer_is_noticed(tmp_path) -> None:
    converted, proto, inputs = exported(tmp_path)
    with torch.no_grad():
        converted.first.bias.add_(0.5)
    found = verify_onnx(converted, inputs, proto)
    assert found.weight_codes.differing == found.quantizer_codes.differing == 0
    assert found.by_quantizer["ours"].differing > 0
    with pytest.raises(RuntimeError, match="quantized values of layers differ in onnxruntime .*; worst at 'ours'"):
        found.check()


@pytest.mark.parametrize("name", ["first.weight_quantizer", "head.input_quantizer"])
def test_a_quantizer_without_a_node_is_missing(tmp_path, name: str) -> None:
    converted, proto, inputs = exported(tmp_path)
    for node in proto.graph.node:
        node.name = node.name.replace(name, "")
    with pytest.raises(RuntimeError, match=f"no QuantizeLinear for: {name}"):
        verify_onnx(converted, inputs, proto).check()


def test_hooks_are_gone_afterwards(tmp_path) -> None:
    converted, proto, inputs = exported(tmp_path)
    verify_onnx(converted, inputs, proto)
    assert not any(module._forward_hooks for module in converted.modules())


# ---- fused chains


class Chain(nn.Module):
    """Convolutions with batch norms, linear layers, and an activation as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU()
        self.up, self.norm = nn.ConvTranspose2d(6, 4, 2, stride=2, groups=2), nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.up(self.relu(self.bn(self.conv(x)))))
        return self.fc(y.mean((2, 3)))


CHAINS = [["conv", "bn", "relu"], ["up", "norm"]]
IMAGES = (8, 3, 6, 6)


def trained_chain(**options: Any) -> tuple[nn.Module, Tensor]:
    """Return a fused, replaced and calibrated model in training mode, after some steps of training."""
    model = nets.trained(Chain(), *IMAGES)
    replaced = qt.quant_modules.replace(qt.fuse_modules(model.train(), CHAINS), backend="tensorrt10", **options)
    x = torch.randn(*IMAGES)
    qt.calibrate(replaced, [x], progress=False)
    optimizer = torch.optim.SGD(replaced.parameters(), 0.01)
    for _ in range(3):
        optimizer.zero_grad()
        replaced(x).square().sum().backward()
        optimizer.step()
    qt.calibrate(replaced, [x], progress=False)
    return replaced, x


@pytest.mark.parametrize("quantize", ["inputs", "outputs"])
def test_batch_norms_of_chains_are_folded(tmp_path, quantize: str) -> None:
    replaced, x = trained_chain(quantize=quantize)
    norms = [(replaced.get_submodule(conv), replaced.get_submodule(bn)) for conv, bn, *_ in CHAINS]
    folded = []
    for conv, bn in norms:  # by the formula
        factor = (bn.weight / torch.sqrt(bn.running_var + bn.eps)).detach()
        bias = 0 if conv.bias is None else conv.bias.detach()
        folded.append((factor, (bias - bn.running_mean) * factor + bn.bias.detach()))
    before = [conv.weight.detach().clone() for conv, _ in norms]
    converted = qt.convert(replaced)
    assert torch.equal(converted(x), replaced.eval()(x))
    assert (type(converted.bn), type(converted.norm)) == (nn.Identity, nn.Identity)
    assert not any(key.startswith(("bn.", "norm.")) for key in converted.state_dict() if "quantizer" not in key)
    weight = before[0] * folded[0][0].reshape(-1, 1, 1, 1)
    torch.testing.assert_close(converted.conv.weight, weight, rtol=1e-6, atol=1e-7)
    up = before[1].reshape(2, 3, 2, 2, 2) * folded[1][0].reshape(2, 1, 2, 1, 1)
    torch.testing.assert_close(converted.up.weight, up.reshape(6, 2, 2, 2), rtol=1e-6, atol=1e-7)
    for layer, (_, bias) in zip((converted.conv, converted.up), folded, strict=True):
        torch.testing.assert_close(layer.bias, bias, rtol=1e-5, atol=1e-6)
    for exporter in EXPORTERS:
        codes = qt.export_onnx(replaced, x, tmp_path / "m.onnx", exporter=exporter).verification
        assert codes.weight_codes.compared == 6 * 27 + 6 * 2 * 4 + 12
        assert (codes.weight_codes.differing, codes.quantizer_codes.differing) == (0, 0)
        assert (codes.missing, codes.unreached) == ((), ())
        assert "BatchNormalization" not in {node.op_type for node in onnx.load(str(tmp_path / "m.onnx")).graph.node}


def test_outputs_stay_quantized_once_converted() -> None:
    """The quantizer of a chain's output hangs on its last module, here a batch norm that is folded."""
    replaced, x = trained_chain(quantize="outputs")
    converted = qt.convert(replaced)
    seen = []
    converted.norm.register_forward_hook(lambda module, args, output: seen.append(output))
    converted(x)
    grid = converted.norm.output_quantizer
    assert isinstance(grid, qt.Grid)
    assert torch.equal(seen[0], grid(seen[0]))
    assert len(seen[0].unique()) <= 256


def test_a_batch_norm_replaced_after_linking_raises() -> None:
    replaced, x = trained_chain()
    replaced.bn = nn.BatchNorm2d(6)
    for call in (qt.convert, lambda model: qt.calibrate(model, [x], progress=False)):
        with pytest.raises(ValueError, match="the batch norm 'bn' that is linked to layer 'conv' is not in the"):
            call(replaced)


def test_sensitivity_takes_a_chain_as_one() -> None:
    replaced, _ = trained_chain(quantize="outputs")
    result = qt.debug.sensitivity(replaced, lambda m: 1.0, progress=False)
    assert [row.name for row in result.rows] == ["conv", "fc", "up"]
    lines = {line.name: line for line in qt.quantization_report(replaced).layers}
    assert lines["conv"].quantizers == ("conv.weight_quantizer", "relu.output_quantizer")
    assert lines["relu"].quantizers == lines["bn"].quantizers == ()
    model = qt.fuse_modules(Chain(), CHAINS)
    again = qt.quant_modules.replace(
        model, result.to_qconfig_mapping(keep_float=1), quantize="outputs", backend="tensorrt10"
    )
    assert not [name for name in qt.quantizers_of(again) if name.startswith(("conv", "bn", "relu"))]


def test_a_chain_in_eval_mode_is_folded_before(tmp_path) -> None:
    model = nets.trained(Chain(), *IMAGES).eval()
    x = torch.randn(*IMAGES)
    replaced = calibrated(qt.fuse_modules(model, CHAINS), [x])
    with qt.disable_quantization(replaced):
        torch.testing.assert_close(replaced(x), model(x), rtol=1e-5, atol=1e-5)
    codes = qt.export_onnx(replaced, x, tmp_path / "m.onnx").verification
    assert (codes.weight_codes.differing, codes.quantizer_codes.differing, codes.missing) == (0, 0, ())


# ---- every kind of layer


class Recurrent(nn.Module):
    """A recurrent layer and its cell in a loop, in both directions and two layers."""

    def __init__(self, kind: type[nn.Module], cell: type[nn.Module]) -> None:
        super().__init__()
        self.layer, self.cell = kind(4, 5, 2, bidirectional=True, batch_first=True), cell(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in self.layer(x)[0].unbind(1):
            state = self.cell(step, state)
        return state[0] if isinstance(state, tuple) else state


class Encodes(nn.Module):
    """An embedding and torch's own transformer layers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.table, self.encoder = nn.Embedding(10, 8), nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(self.table(x))


class Merges(nn.Module):
    """Pools, and ops as modules; a layer of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.average = nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(2)
        self.conv, self.token = nn.Conv2d(3, 4, 1), nn.Parameter(torch.randn(1, 4, 2, 2))
        self.of_token = nn.Conv2d(4, 8, 1)
        self.add, self.cat, self.matmul = qt.nn.Add(), qt.nn.Cat(1), qt.nn.MatMul()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(self.pool(x))
        y = self.add(y, y.flip(0))
        return self.matmul(self.average(self.cat([y, y * 2])), self.of_token(self.token))


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize(
    ("model", "x"),
    [
        (lambda: Recurrent(nn.LSTM, nn.LSTMCell), torch.rand(2, 3, 4)),
        (lambda: Recurrent(nn.GRU, nn.GRUCell), torch.rand(2, 3, 4)),
        (Encodes, torch.arange(10).reshape(2, 5)),
        (Merges, torch.rand(2, 3, 8, 8)),
    ],
    ids=["lstm", "gru", "transformer", "merges"],
)
def test_every_kind_of_layer_converts_and_exports(tmp_path, exporter: str, model: Any, x: Tensor) -> None:
    replaced = calibrated(model().eval(), [x])
    converted = qt.convert(replaced)
    assert torch.equal(converted(x), replaced(x))
    codes = qt.export_onnx(converted, x, tmp_path / "m.onnx", exporter=exporter).verification
    assert codes.weight_codes.compared > 0
    assert codes.quantizer_codes.compared > 0
    assert (codes.weight_codes.differing, codes.quantizer_codes.differing) == (0, 0)
    assert (codes.missing, codes.unreached) == ((), ())
    grids = {name for name, module in converted.named_modules() if isinstance(module, qt.Grid)}
    stored = {name for name in grids if "weight" in name or name == "of_token.input_quantizer"}  # of a parameter
    assert set(codes.by_quantizer) == grids - stored
