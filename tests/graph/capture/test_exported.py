"""Models that torch.export captures: layers, names, modes and state dicts are those of the model, and all passes as usual."""

import random
import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from tests import nets

X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Untraceable(nn.Module):
    """A network whose forward draws a random number, of which a trace would keep the first."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(8, 4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn(self.conv(x)))
        x = self.body(x) + x if random.random() < 2 else x
        x = F.adaptive_avg_pool2d(x, 1)[:, :, 0, 0]
        return self.head(self.drop(x))[:, [0, 1, 2, 3]] + self.table


def captured(model: nn.Module, x: Tensor = X, backend: str = "onnxruntime") -> nn.Module:
    found = qt.prepare(model, (x,), backend, capture="export")
    qt.calibrate(found, [x], progress=False)
    return found


@pytest.mark.parametrize("training", [False, True])
def test_it_has_the_layers_names_and_values_of_the_model(training: bool) -> None:
    torch.manual_seed(0)
    model = Untraceable().train(training)
    with pytest.raises(qt.UntraceableError, match='capture the model by torch.export, with capture="export"'):
        qt.prepare(model, (X,), backend="tensorrt")
    prepared = captured(model)
    quantized = {line.name for line in qt.quantization_report(prepared).layers if line.weight}
    assert quantized == {"conv", "body.0", "head"}
    assert prepared.training is training
    if training:  # in eval mode prepare folds batch norms
        assert set(model.state_dict()) <= set(prepared.state_dict())
    more = torch.cat([X, X])  # another batch than that of the example inputs
    with qt.disable_quantization(prepared.eval()):
        torch.testing.assert_close(prepared(more), model.eval()(more), atol=1e-5, rtol=1e-5)


def test_batch_norms_and_dropouts_follow_the_mode() -> None:
    torch.manual_seed(0)
    model = Untraceable().train()
    prepared = captured(model)
    before = prepared.bn.running_mean.clone()
    one, two = prepared(X), prepared(X)
    assert not torch.equal(one, two)  # dropout
    assert not torch.equal(prepared.bn.running_mean, before)
    prepared.eval()
    assert torch.equal(prepared(X), prepared(X))
    one.sum().backward()
    assert all(prepared.get_parameter(f"{name}.weight").grad is not None for name in ("conv", "body.0", "head", "bn"))


def test_it_is_converted_and_exported(tmp_path) -> None:
    torch.manual_seed(0)
    prepared = captured(Untraceable().train())
    optimizer = torch.optim.SGD(prepared.parameters(), 1e-3)
    prepared(X).square().sum().backward()
    optimizer.step()
    converted = qt.convert(prepared)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in converted.modules())  # they are folded
    found = qt.export_onnx(converted, X, tmp_path / "model.onnx").verification
    assert found.layer_codes.differing == 0


def test_a_state_dict_of_the_trace_loads() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(784, 5))
    traced = qt.prepare(model.eval(), (X,), "onnxruntime")
    qt.calibrate(traced, [X], progress=False)
    exported = qt.prepare(model, (X,), "onnxruntime", capture="export")
    exported.load_state_dict(traced.state_dict())
    assert torch.equal(exported(X), traced(X))


def test_shared_layers_stay_shared() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.act = nn.Linear(4, 4), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.layer(self.act(self.layer(x))))

    torch.manual_seed(0)
    model, x = Twice(), torch.randn(3, 4)
    prepared = captured(model, x)
    assert [node.target for node in prepared.graph.nodes if node.target == "layer"] == ["layer", "layer"]
    with qt.disable_quantization(prepared):
        assert torch.equal(prepared(x), model(x))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"untraced": ["body"]}, 'untraced is for capture="trace", got it with capture="export"'),
        ({"concrete_args": {"x": None}}, 'concrete_args is for capture="trace"'),
    ],
)
def test_options_of_the_trace_are_refused(options: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        qt.prepare(Untraceable(), (X,), capture="export", backend="tensorrt", **options)


def test_errors() -> None:
    with pytest.raises(ValueError, match=r'capture="export" runs the model on example_inputs; pass them'):
        qt.prepare(Untraceable(), capture="export", backend="tensorrt")
    with pytest.raises(ValueError, match="unknown capture of prepare: 'exprot'; did you mean 'export'"):
        qt.prepare(Untraceable(), (X,), capture="exprot", backend="tensorrt")
    with pytest.raises(
        qt.UntraceableError, match="torch.export cannot capture ControlFlow .*qtoolkit.quant_modules.replace"
    ):
        qt.prepare(nets.ControlFlow(), (torch.ones(2, 4),), capture="export", backend="tensorrt")


def test_ops_that_take_a_graph_are_refused() -> None:
    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, self.a, self.b, (x,))

    with pytest.raises(qt.UntraceableError, match=r"torch\.export writes 'cond' for Chooses, an op that takes a graph"):
        qt.prepare(Chooses(), (torch.randn(2, 4),), capture="export", backend="tensorrt")


def test_an_exported_module_is_no_float_model() -> None:
    """Its ops of aten would all stay in float without a word."""
    program = torch.export.export(Untraceable().eval(), (X,), strict=False).module()
    sentence = 'the model is a graph of torch.export; prepare the model itself, with capture="export"'
    with pytest.raises(qt.UntraceableError, match=re.escape(sentence)):
        qt.prepare(program, (X,), backend="tensorrt")


class Counts(nn.Module):
    """Buffers that each forward writes, of which it does not read all: calls, and an average of what a layer returns."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        x = self.fc(x)
        y = x - self.average
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return y


@pytest.mark.parametrize("capture", ["trace", "export"])
def test_buffers_are_written_in_each_forward(capture: str) -> None:
    """torch.export's graph has these ops without users of their results; prepare runs the model, and does not count."""
    torch.manual_seed(0)
    model, x = Counts().train(), torch.randn(3, 4)
    prepared = qt.prepare(model, x, capture=capture, backend="tensorrt")
    with qt.disable_quantization(prepared):
        for _ in range(3):
            torch.testing.assert_close(prepared(x), model(x))
    assert prepared.count == model.count == 3
    torch.testing.assert_close(prepared.average, model.average)


OPS = {
    "slices": lambda x: x[:, 1:, ::2, -3:],
    "all columns": lambda x: x[..., : x.shape[-1]] * 2,
    "index": lambda x: x[:, [2, 0]],
    "resize": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False),
    "nearest": lambda x: F.interpolate(x, size=(5, 7)),
    "pad": lambda x: F.pad(x, (1, 2), value=1.0),
    "activations": lambda x: F.silu(F.gelu(F.hardswish(F.leaky_relu(x)))),
    "norms": lambda x: F.layer_norm(F.group_norm(x, 3), (16,)),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "sizes": lambda x: x.view(x.size(0), -1).unflatten(1, (3, -1)) / x.shape[2],
    "casts": lambda x: x.double().to(torch.float32) + torch.zeros(x.shape[0], 1, 1, 1),
    "pools": lambda x: F.avg_pool2d(F.max_pool2d(x, 2), 2, ceil_mode=True),
    "dropout": lambda x: F.dropout(x, 0.5, training=False) * 2,
    "softmax of a product": lambda x: (x @ x.transpose(2, 3)).softmax(-1).chunk(2, 2)[1],
    "an op of another library": lambda x: torch.ops.qtoolkit.softmax_codes(x.round(), 0.1, 1) / 256,
    "in place": lambda x: x.clone().add_(1).relu_(),
}


class Between(nn.Module):
    """An op between two layers."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.first, self.last, self.op = nn.Conv2d(3, 3, 1), nn.LazyLinear(2), op
        self.eval()(X)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(OPS[self.op](self.first(x)).flatten(1))


@pytest.mark.parametrize("op", OPS)
def test_ops_are_those_of_a_trace(op: str) -> None:
    """The report has the kinds of ops that a trace has, and the model computes the same bits."""
    torch.manual_seed(0)
    model = Between(op).eval()
    kinds = []
    for capture in ("trace", "export"):
        prepared = qt.prepare(model, (X,), "onnxruntime", capture=capture)
        qt.calibrate(prepared, [X], progress=False)
        lines = [line.kind for line in qt.quantization_report(prepared).layers]
        kinds.append(
            sorted(kind for kind in lines if kind not in ("other", "identity", "slice", "view", "reshape", "flatten"))
        )
        with qt.disable_quantization(prepared):
            assert torch.equal(prepared(X), model(X))
    assert kinds[0] == kinds[1]
