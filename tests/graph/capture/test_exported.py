"""Models that torch.export captures: layers, names, modes and state dicts are those of the model, and all passes as usual."""

import copy
import pickle
import random
import re
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.graph import by_mode
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

    with pytest.raises(qt.UntraceableError, match=r"torch\.export writes 'cond' for Chooses, an op that has a graph"):
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


# ---- modes


class OwnNorm(nn.BatchNorm2d):
    """A subclass that computes as torch's batch norm."""


class ScaledNorm(nn.BatchNorm2d):
    """A subclass with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class FunctionalNorm(nn.Module):
    """A batch norm by torch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.var, training=self.training)


class NormWithActivation(nn.BatchNorm2d):
    """A batch norm as timm writes it: its function, a count of batches, and an activation."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_batches_tracked.add_(1)
        y = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1, self.eps)
        return self.act(y)


class Drops(nn.Module):
    """A dropout by torch's function."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training)


class DropsPaths(nn.Module):
    """Stochastic depth, as timm writes it."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * x.new_empty(x.shape[0], *[1] * (x.dim() - 1)).bernoulli_(0.5) / 0.5


class Around(nn.Module):
    """A layer behind a convolution and before a linear one, in a forward that draws random numbers: only an export takes it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Conv2d(3, 4, 3), layer, nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) if random.random() < 2 else x
        return self.last(self.of_layer(x))

    def of_layer(self, x: Tensor) -> Tensor:
        return self.layer(x)


class AroundSequence(Around):
    """A layer of sequences of 5 features, with its arguments and results."""

    def of_layer(self, x: Tensor) -> Tensor:
        x = x.flatten(1, 2)
        x = self.layer(x, x, x) if isinstance(self.layer, nn.MultiheadAttention) else self.layer(x)
        return x[0] if isinstance(x, tuple) else x


def around_in_forward(function: str) -> type[nn.Module]:
    """Return a network whose own forward calls a function that depends on its mode."""
    calls = {
        "dropout": lambda self, x: F.dropout(x, 0.5, self.training),
        "dropout in place": lambda self, x: F.dropout(x + 1, 0.5, self.training, inplace=True),
        "dropout2d": lambda self, x: F.dropout2d(x, 0.5, self.training),
        "dropout3d": lambda self, x: F.dropout3d(x[None], 0.5, self.training)[0],
        "feature alpha dropout": lambda self, x: F.feature_alpha_dropout(x, 0.5, self.training),
        "instance norm": lambda self, x: F.instance_norm(x, self.mean, self.var, use_input_stats=self.training),
        "alpha dropout": lambda self, x: F.alpha_dropout(x, 0.5, self.training),
        "rrelu": lambda self, x: F.rrelu(x, 0.1, 0.3, self.training),
        "batch norm": lambda self, x: F.batch_norm(x, self.mean, self.var, training=self.training),
        "attention": lambda self, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5 * self.training),
        "rate": lambda self, x: x * (0.5 if self.training else 1.0),
        "paths": lambda self, x: x * torch.rand(x.shape[0], 1, 1, 1) if self.training else x,
    }

    class InForward(Around):
        def __init__(self) -> None:
            super().__init__(nn.Identity())
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("var", torch.ones(4))

        def of_layer(self, x: Tensor) -> Tensor:
            return calls[function](self, x)

    return InForward


IMAGE = torch.randn(4, 3, 7, 7, generator=torch.Generator().manual_seed(1)) * 2 + 1
LAYERS = {
    "batch norm": lambda: Around(nn.BatchNorm2d(4)),
    "equivalent subclass": lambda: Around(OwnNorm(4)),
    "subclass": lambda: Around(ScaledNorm(4)),
    "functional batch norm": lambda: Around(FunctionalNorm()),
    "batch norm with an activation": lambda: Around(NormWithActivation(4)),
    "instance norm": lambda: Around(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
    "functional dropout": lambda: Around(Drops()),
    "stochastic depth": lambda: Around(DropsPaths()),
    "dropout2d": lambda: Around(nn.Dropout2d()),
    "alpha dropout": lambda: Around(nn.AlphaDropout()),
    "feature alpha dropout": lambda: Around(nn.FeatureAlphaDropout()),
    "rrelu": lambda: Around(nn.RReLU()),
    "attention": lambda: AroundSequence(nn.MultiheadAttention(5, 1, dropout=0.5, batch_first=True)),
    "lstm": lambda: AroundSequence(nn.LSTM(5, 5, 2, dropout=0.5, batch_first=True)),
    "gru": lambda: AroundSequence(nn.GRU(5, 5, 2, dropout=0.5, batch_first=True)),
    "encoder layer": lambda: AroundSequence(nn.TransformerEncoderLayer(5, 1, 8, 0.0, batch_first=True)),
    "encoder": lambda: AroundSequence(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(5, 1, 8, 0.0, batch_first=True), 2)
    ),
    **{
        f"{name} in forward": around_in_forward(name)
        for name in (
            "dropout",
            "dropout in place",
            "dropout2d",
            "dropout3d",
            "alpha dropout",
            "feature alpha dropout",
            "rrelu",
            "batch norm",
            "instance norm",
            "attention",
            "rate",
            "paths",
        )
    },
}


def check_modes(model: nn.Module, prepared: nn.Module, x: Tensor, atol: float = 1e-5) -> None:
    """With quantizers off, outputs and statistics are the model's in both modes, with the same random numbers."""
    with qt.disable_quantization(prepared), torch.no_grad():
        for training in (True, False, True):
            torch.manual_seed(2)
            expected = model.train(training)(x)
            torch.manual_seed(2)
            torch.testing.assert_close(prepared.train(training)(x), expected, atol=atol, rtol=1e-4)
            found = dict(prepared.named_buffers())
            for name, buffer in model.named_buffers():
                torch.testing.assert_close(found[name], buffer, atol=1e-5, rtol=1e-4)


# In eval mode by default those whose graph, or its way into the other mode, is of another kind.
IN_EVAL = ("batch norm", "instance norm", "functional dropout", "stochastic depth", "lstm", "rate in forward")


@pytest.mark.parametrize(
    ("name", "training"),
    [(name, True) for name in LAYERS]
    + [pytest.param(name, False, marks=[] if name in IN_EVAL else pytest.mark.sweep) for name in LAYERS],
)
def test_the_graph_follows_the_mode(name: str, training: bool) -> None:
    """It stayed in eval mode, and statistics stood still; in eval mode batch norms are folded, and the others follow too."""
    torch.manual_seed(0)
    model = LAYERS[name]().train(training)
    prepared = qt.prepare(model, IMAGE, backend="onnxruntime", capture="export")
    if training or not any(map(is_norm, model.modules())):
        check_modes(model, prepared, IMAGE)
    else:
        with qt.disable_quantization(prepared):
            torch.testing.assert_close(prepared(IMAGE), model(IMAGE), atol=1e-5, rtol=1e-4)


def is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.BatchNorm2d)


@pytest.mark.slow
def test_what_follows_the_mode_is_converted_and_exported(tmp_path) -> None:
    torch.manual_seed(0)
    for name in ("batch norm with an activation", "dropout in forward", "paths in forward", "attention in forward"):
        prepared = qt.prepare(LAYERS[name]().train(), IMAGE, backend="onnxruntime", capture="export")
        qt.calibrate(prepared, [IMAGE], progress=False)
        prepared.train()(IMAGE).sum().backward()
        converted = qt.convert(prepared)
        assert torch.equal(converted(IMAGE), prepared.eval()(IMAGE))
        assert not any(is_norm(module) for module in converted.modules())
        found = qt.export_onnx(converted, IMAGE, tmp_path / "model.onnx").verification
        assert found.layer_codes.differing == 0


def test_batch_norms_with_an_activation_are_folded() -> None:
    model = LAYERS["batch norm with an activation"]().train()
    prepared = qt.prepare(model, IMAGE, backend="onnxruntime", capture="export")
    lines = {line.name: line for line in qt.quantization_report(prepared).layers}
    assert lines["layer"].status == qt.quantization_report(qt.prepare(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)),
        IMAGE, backend="onnxruntime")).layers[1].status  # fmt: skip


@pytest.mark.parametrize("name", ["dropout", "dropout2d", "dropout3d", "alpha dropout", "feature alpha dropout"])
def test_dropouts_by_functions_take_the_mode(name: str) -> None:
    """As in a trace they are one op, behind which values lie on the grid before it."""
    prepared = qt.prepare(LAYERS[f"{name} in forward"]().train(), IMAGE, backend="onnxruntime", capture="export")
    assert not prepared.graph.find_nodes(op="call_function", target=by_mode)
    lines = {line.kind: line for line in qt.quantization_report(prepared).layers}
    assert lines["identity"].status == "transparent"


@pytest.mark.slow
def test_copies_follow_the_mode() -> None:
    torch.manual_seed(0)
    for name in ("dropout in forward", "paths in forward", "functional batch norm", "lstm"):
        model = LAYERS[name]().train()
        prepared = qt.prepare(model, IMAGE, backend="onnxruntime", capture="export")
        copied = copy.deepcopy(prepared)
        for each in (prepared, copied, pickle.loads(pickle.dumps(prepared))):
            check_modes(copy.deepcopy(model), each, IMAGE)


@pytest.mark.parametrize("name", ["lstm", "gru", "attention", "encoder"])
def test_layers_are_those_of_a_trace(name: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(1, 2), LAYERS[name]().layer, Last()).eval()
    if name == "attention":
        model[2] = AttendsToItself(model[2])
    reports = [
        {line.name: (line.kind, line.status, line.weight) for line in qt.quantization_report(prepared).layers}
        for capture in ("trace", "export")
        for prepared in [qt.prepare(model, IMAGE, backend="onnxruntime", capture=capture)]
    ]
    of_layers = [{name: line for name, line in report.items() if name.startswith("2")} for report in reports]
    assert of_layers[0] == of_layers[1] != {}


class Last(nn.Module):
    """A linear layer of the first result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 2)

    def forward(self, x: Tensor | tuple[Tensor, ...]) -> Tensor:
        return self.linear(x[0] if isinstance(x, tuple) else x)


class AttendsToItself(nn.Module):
    """A self-attention."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.attention(x, x, x)


class Leaf(nn.Module):
    """A module with arguments and results of several kinds, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor, factor: float, *, pair: list[Tensor], more: dict[str, Tensor]) -> dict[str, object]:
        y = self.linear(x) * factor + pair[0] - pair[1]
        return {"pair": (y, y * more["by"]), "none": None, "size": y.shape[1], "again": [y]}


def test_a_leaf_module_takes_and_returns_containers() -> None:
    class Calls(Around):
        def of_layer(self, x: Tensor) -> Tensor:
            found = self.layer(x, 2.0, pair=[x, x + 1], more={"by": x})
            assert found["none"] is None
            return found["pair"][1] * found["size"] + found["again"][0]

    torch.manual_seed(0)
    model = Calls(Leaf()).eval()
    prepared = qt.prepare(model, IMAGE, backend="onnxruntime", capture="export", leaf_modules=[Leaf])
    assert [str(node.target) for node in prepared.graph.find_nodes(op="call_module", target="layer")] == ["layer"]
    assert "layer.linear" in {line.name for line in qt.quantization_report(prepared).layers if line.weight}
    with qt.disable_quantization(prepared):
        torch.testing.assert_close(prepared(IMAGE), model(IMAGE))


def test_a_capture_leaves_the_model_as_it_was() -> None:
    """Also one that fails in the middle of a layer."""

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * float(x.sum())

    for layer in (nn.BatchNorm2d(4), Fails()):
        model = nn.Sequential(nn.Dropout(), DropsPaths(), Around(layer)).train()
        model[2].first.eval()
        before = [(dict(vars(module)), module.training) for module in model.modules()]
        with pytest.raises(qt.UntraceableError) if isinstance(layer, Fails) else nullcontext():
            qt.prepare(model, IMAGE, backend="onnxruntime", capture="export", leaf_modules=[Fails])
        assert [(dict(vars(module)), module.training) for module in model.modules()] == before
        assert "training" not in vars(nn.Module)


class TwoNames(Around):
    """A batch norm under two names."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm2d(4))
        self.block = nn.Sequential(self.layer, nn.ReLU())

    def of_layer(self, x: Tensor) -> Tensor:
        return self.block(x)


class CalledByBoth(TwoNames):
    """The same, called by both names."""

    def of_layer(self, x: Tensor) -> Tensor:
        return self.block(x) + self.layer(x)


class TiedWeight(Around):
    """A batch norm whose weight is also that of another one."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm2d(4))
        self.second, self.third = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.third.weight = self.layer.weight

    def of_layer(self, x: Tensor) -> Tensor:
        return self.third(self.second(F.relu(self.layer(x))))


class BlockTwice(Around):
    """A block with a batch norm and a dropout, called twice."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.PReLU()))

    def of_layer(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x))


class InstanceNormTwice(CalledByBoth):
    """An instance norm with statistics, called by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = self.block[0] = nn.InstanceNorm2d(4, track_running_stats=True)


@pytest.mark.parametrize("net", [TwoNames, CalledByBoth, TiedWeight, BlockTwice, InstanceNormTwice])
def test_shared_layers_follow_the_mode(net: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = net().train()
    check_modes(model, qt.prepare(model, IMAGE, backend="onnxruntime", capture="export"), IMAGE)


def test_arguments_of_layers_are_kept() -> None:
    """A transposed convolution takes an output size, and an attention masks: each is a call of the quantized layer."""

    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.attention = nn.ConvTranspose2d(3, 4, 3, 2, 1), nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = self.up(x, output_size=[2 * x.shape[2], 2 * x.shape[3]])
            z, weights = self.attention(y[:, 0], y[:, 1], y[:, 1], key_padding_mask=mask, average_attn_weights=False)
            return y, z, weights

    torch.manual_seed(0)
    model, inputs = Given().eval(), (torch.randn(2, 3, 4, 4), torch.tensor([[False] * 7 + [True]] * 2))
    prepared = qt.prepare(model, inputs, backend="onnxruntime", capture="export")
    quantized = {line.name for line in qt.quantization_report(prepared).layers if line.weight}
    assert quantized == {"up", "attention"}
    with qt.disable_quantization(prepared):
        for found, expected in zip(prepared(*inputs), model(*inputs), strict=True):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        more = tuple(torch.cat([x, x, x]) for x in inputs)
        torch.testing.assert_close(prepared(*more)[1], model(*more)[1], atol=1e-5, rtol=1e-5)


class Auxiliary(Around):
    """A network that returns more in training."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(4, 4, 1))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        y = self.first(x)
        return (self.last(y), self.layer(y)) if self.training else self.last(y)


class DrawsInTraining(Around):
    """A network that drops a layer by Python's random numbers."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(4, 4, 1))

    def of_layer(self, x: Tensor) -> Tensor:
        return x if self.training and random.random() < 0.5 else self.layer(x)


class OfValues(Around):
    """A network that decides by values in training."""

    def of_layer(self, x: Tensor) -> Tensor:
        return x * 2 if self.training and x.sum() > 0 else x


@pytest.mark.parametrize(
    "net", [Auxiliary, DrawsInTraining, lambda: OfValues(nn.Identity())], ids=["outputs", "draws", "values"]
)
def test_what_depends_on_the_mode_and_cannot_follow_it_is_an_error(net) -> None:
    """In eval mode the graph has the branch of eval mode."""
    torch.manual_seed(0)
    block = net()
    model = nn.Sequential(nn.Identity(), block).train()
    for route, name in ((model, "1"), (block, type(block).__name__)):
        sentence = (
            f"prepare: the forward of {name} reads self.training, and torch.export captures other ops in training mode"
        )
        with pytest.raises(qt.UntraceableError, match=re.escape(sentence)) as error:
            qt.prepare(route, IMAGE, backend="onnxruntime", capture="export")
        assert error.value.untraced == name
    prepared = qt.prepare(model.eval(), IMAGE, backend="onnxruntime", capture="export")
    with qt.disable_quantization(prepared):
        torch.testing.assert_close(prepared(IMAGE), model(IMAGE), atol=1e-5, rtol=1e-5)
