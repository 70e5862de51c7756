"""lint: nothing to say of what prepare decides, and a finding for each way to break a fusion."""

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.graph.lint import lint
from tests import nets
from tests.graph.passes.test_insert import BOTH, Dense
from tests.graph.test_nodes import Probe
from tests.sweep import common_first


class UNet(nn.Module):
    """Down, up, and a concat over the skip."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.bn1 = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8)
        self.middle, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.up, self.skip = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Conv2d(3, 8, 1)
        self.out, self.head = nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.down(x)))
        y = F.relu(self.bn2(self.middle(y)))
        y = torch.cat([F.relu(self.up(y)), F.relu(self.skip(x))], 1)
        return self.head(F.relu(self.out(F.pad(y, (1, 1, 1, 1)))))


class Inception(nn.Module):
    """Branches of convolutions and pools, joined."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.next = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        branches = [
            self.a(x).relu(),
            self.b(x).relu(),
            self.c(F.avg_pool2d(x, 3, 1, 1)).relu(),
            F.max_pool2d(x, 3, 1, 1),
        ]
        return self.next(torch.cat(branches, 1)).mean((2, 3))


class Block(nn.Module):
    """A transformer's block on patches of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 8, 4, stride=4), nn.Parameter(torch.randn(1, 1, 8))
        self.position = nn.Parameter(torch.randn(1, 5, 8))
        self.ln1, self.ln2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.qkv, self.project = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.size(0), -1, -1), x], 1) + self.position
        q, k, v = self.qkv(self.ln1(x)).chunk(3, -1)
        y = ((q @ k.transpose(-2, -1)) * 8**-0.5).softmax(-1) @ v
        x = x + self.drop(self.project(y))
        return (x + self.drop(self.down(F.gelu(self.up(self.ln2(x))))))[:, 0]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("backend", list(qt.backends))
@pytest.mark.parametrize(
    "net", [UNet, Inception, Block, Dense, lambda: nets.Residual(True), lambda: nets.Residual(False)]
)
@pytest.mark.parametrize("training", [True, False])
def test_what_prepare_decides_breaks_no_fusion(backend: str, net: type[nn.Module], training: bool) -> None:
    prepared = qt.prepare(net().train(training), backend=backend)
    convolutions_too = not backend.endswith("-nlp")
    assert len(prepared.plan.edges) > 3 or not convolutions_too
    assert lint(prepared) == ()


@pytest.mark.sweep(1)
@pytest.mark.parametrize("backend", common_first(qt.backends))  # the nets above are prepared for all
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2"])
def test_nor_does_it_in_torchvisions_models(backend: str, name: str) -> None:
    pytest.importorskip("torchvision")
    assert lint(qt.prepare(torchvisions(name), backend=backend)) == ()


@functools.cache
def torchvisions(name: str) -> nn.Module:
    """Made once, as random weights take longer than `prepare`, which changes no model."""
    from torchvision import models

    return models.get_model(name, weights=None)


def test_a_converted_model_is_checked_too() -> None:
    prepared = qt.prepare(UNet().eval(), backend="tensorrt")
    qt.calibrate(prepared, [torch.randn(2, 3, 8, 8)], progress=False)
    assert lint(qt.convert(prepared)) == ()


def insert(prepared: nn.Module, after: str, target: str = "extra") -> None:
    """Put one more quantizer after a node, for all its users."""
    node = next(n for n in prepared.graph.nodes if n.name == after)
    prepared.add_submodule(f"activation_quantizers.{target}", qt.TensorQuantizer(qt.QuantSpec(), inserted=True))
    users = list(node.users)
    with prepared.graph.inserting_after(node):
        quantizer = prepared.graph.call_module(f"activation_quantizers.{target}", (node,))
    for user in users:
        user.replace_input_with(node, quantizer)


def remove(prepared: nn.Module, source: str) -> None:
    """Take away the quantizer after a node."""
    node = next(n for n in prepared.graph.nodes if n.name == source)
    quantizer = next(user for user in node.users if str(user.target).startswith("activation_quantizers."))
    quantizer.replace_all_uses_with(node)
    prepared.graph.erase_node(quantizer)


def rules(prepared: nn.Module) -> dict[str, str]:
    return {finding.where: finding.rule for finding in lint(prepared)}


def test_both_branches_of_a_residual_add() -> None:
    prepared = qt.prepare(nets.Residual(False), backend="tensorrt")
    insert(prepared, "bn2")
    assert "both inputs of a residual add are quantized" in rules(prepared)["add"]
    assert "Leave the branch of 'conv2'" in str(next(f for f in lint(prepared) if f.where == "add"))


def test_no_branch_of_a_residual_add() -> None:
    prepared = qt.prepare(nets.Residual(True), backend="tensorrt")
    remove(prepared, "shortcut")
    assert "no input of a residual add is quantized" in rules(prepared)["add"]


@pytest.mark.parametrize(("after", "user"), [("down", "bn1"), ("bn1", "relu"), ("up", "relu_2")])
def test_a_quantizer_inside_a_unit(after: str, user: str) -> None:
    prepared = qt.prepare(UNet(), backend="tensorrt")
    insert(prepared, after)
    assert f"stands between '{after}' and '{user}'" in rules(prepared)["activation_quantizers.extra"]


def test_some_inputs_only() -> None:
    prepared = qt.prepare(Probe(lambda m, x, y: x @ y), backend="tensorrt")
    remove(prepared, "y")
    assert "'y' is not" in rules(prepared)["matmul"]
    layer = qt.prepare(UNet(), backend="tensorrt")
    remove(layer, "x")
    assert "'x' is not" in rules(layer)["down"]
    weights = qt.QConfigMapping().set_module_name("head", qt.QConfig(None, qt.QuantSpec(axis=0)))
    assert "'relu_4' is not" in rules(qt.prepare(UNet(), qconfig_mapping=weights, backend="tensorrt"))["head"]


def test_a_concat_with_two_scales() -> None:
    prepared = qt.prepare(UNet(), backend="tensorrt")
    remove(prepared, "relu_2")
    insert(prepared, "relu_2")
    assert "have different scales" in rules(prepared)["cat"]


def test_a_pool_whose_output_is_float() -> None:
    model = Probe(lambda m, x, y: torch.exp(F.avg_pool2d(m.first(x), 2)))
    asked = qt.QConfigMapping().set_module_name("avg_pool2d", BOTH)
    prepared = qt.prepare(model, qconfig_mapping=asked, backend="tensorrt")
    assert "takes quantized inputs and its output is not quantized" in rules(prepared)["avg_pool2d"]
    assert rules(qt.prepare(model, backend="onnxruntime")) == {}


def test_a_quantizer_after_a_pad() -> None:
    prepared = qt.prepare(UNet(), backend="tensorrt")
    insert(prepared, "pad")
    assert "cannot become part of the layer" in rules(prepared)["activation_quantizers.extra"]


def test_two_quantizers_on_one_tensor() -> None:
    prepared = qt.prepare(UNet(), backend="tensorrt")
    source = next(n for n in prepared.graph.nodes if n.name == "x")
    prepared.add_submodule("activation_quantizers.extra", qt.TensorQuantizer(qt.QuantSpec(), inserted=True))
    with prepared.graph.inserting_after(source):
        extra = prepared.graph.call_module("activation_quantizers.extra", (source,))
    skip = next(n for n in prepared.graph.nodes if n.name == "skip")
    skip.replace_input_with(skip.args[0], extra)
    assert "its output has 2 quantizers" in rules(prepared)["x"]


def test_transposed_convolutions_with_groups() -> None:
    prepared = qt.prepare(nets.ConvNet(), backend="tensorrt8")
    line = next(line for line in qt.quantization_report(prepared).layers if line.name == "up")
    assert line.reason == "float: a conv_transpose with groups, for which tensorrt8 has no integer kernel"
    assert rules(prepared) == {}
    explicit = qt.QConfigMapping().set_module_name("up", qt.backends["tensorrt8"].qconfig)
    asked = qt.prepare(nets.ConvNet(), backend="tensorrt8", qconfig_mapping=explicit)
    assert "no integer kernel" in rules(asked)["up"]
    assert rules(qt.prepare(nets.ConvNet(), backend="tensorrt")) == {}


def test_widths_that_the_target_does_not_compute() -> None:
    four = qt.QConfig(qt.QuantSpec(), qt.QuantSpec(bits=4, axis=0))
    prepared = qt.prepare(
        nets.LinearNet(), qconfig_mapping=qt.QConfigMapping().set_module_name("fc1", four), backend="tensorrt"
    )
    assert rules(prepared) == {"fc1": "tensorrt computes with weights of 8 bits, not 4."}
    free = replace(qt.backends["tensorrt"], weight_bits=None)
    mapping = qt.QConfigMapping().set_module_name("fc1", four)
    assert rules(qt.prepare(nets.LinearNet(), backend=free, qconfig_mapping=mapping)) == {}


def test_a_float_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"lint: model must be what qtoolkit\.prepare or .* returned, got UNet"):
        lint(UNet())


# ---- advice


class Small(nn.Module):
    """Layers that TensorRT's integer kernels are too wide for, beside some that they are not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.eights = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.narrow, self.wide = nn.Conv2d(8, 12, 1), nn.Conv2d(12, 16, 1)
        self.depthwise, self.pointwise = nn.Conv2d(16, 16, 3, groups=16), nn.Conv2d(16, 32, 1)
        self.fc, self.gemv = nn.Linear(32, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.wide(self.narrow(self.eights(self.first(x).relu()).relu()).relu()).relu()
        return self.gemv(self.fc(self.pointwise(self.depthwise(x)).mean((2, 3))))


def advice(net: nn.Module, **options: object) -> dict[str, str]:
    prepared = qt.prepare(net, backend="tensorrt", **options)
    assert lint(prepared) == ()
    return {finding.where: finding.rule for finding in lint(prepared, advice=True)}


def test_advice_on_layers_with_few_channels() -> None:
    found = advice(Small())
    assert set(found) == {"narrow", "wide", "gemv"}
    assert found["gemv"] == "tensorrt gains nothing from integers in a linear of 16 to 1 channels: it needs 16 of both."
    assert "gemv" not in advice(Small(), qconfig_mapping=qt.QConfigMapping().set_module_name("gemv", None))
    assert lint(qt.prepare(Small(), backend="onnxruntime"), advice=True) == ()


def test_advice_on_transposed_convolutions() -> None:
    net = nn.Sequential(nn.ConvTranspose3d(16, 16, 2), nn.BatchNorm3d(16), nn.ReLU(), nn.Conv3d(16, 16, 1)).eval()
    assert advice(net) == {
        "0": "tensorrt computes a transposed convolution in 3d in float16.",
        "activation_quantizers._2": "tensorrt quantizes the output of the transposed convolution '0' in its own step.",
    }
    grouped = nn.Sequential(nn.ConvTranspose2d(16, 16, 2, groups=8))
    assert "groups of fewer than 4 channels, here 16 to 16 in 8" in advice(grouped)["0"]
    assert advice(nn.Sequential(nn.ConvTranspose2d(16, 16, 2, groups=4))) == {}


def test_findings_have_the_names_that_a_config_takes() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dw_1 = nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.dw_1(x)

    net = nn.Sequential(nn.Conv2d(32, 4, 3), nn.Sequential(Inner(), nn.ReLU(), nn.Conv2d(4, 4, 1))).eval()
    found = advice(net)
    assert set(found) == {"1.0.dw_1", "1.2"}
    mapping = qt.QConfigMapping()
    for name in found:
        mapping.set_module_name(name, None)
    assert advice(net, qconfig_mapping=mapping) == {}
