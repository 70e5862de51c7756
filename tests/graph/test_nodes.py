"""The table of ops: every spelling of every kind gets the edges of its role: modules, functions, methods, in place..."""

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.op_kinds.rules import written_out
from qtoolkit.op_kinds.table import ACTIVATIONS, KINDS, MOVES, OF_FUNCTION
from qtoolkit.verdicts import Cause, Status, Verdict

CONCATS = ("cat", "stack")
ROLES = dict.fromkeys(KINDS, "compute")
ROLES |= (
    dict.fromkeys(MOVES, "transparent") | dict.fromkeys(ACTIVATIONS, "activation") | dict.fromkeys(CONCATS, "concat")
)
TARGET = replace(qt.backends["onnxruntime"], name="all", roles=ROLES)

Op = Callable[[nn.Module, Any, Any], Any]


class Probe(nn.Module):
    """One op, whose output goes to a linear layer."""

    def __init__(self, op: Op, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.op, self.probe = op, nn.Linear(4, 4)
        self.first = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4, 4, 3, 3))
        self.matrix, self.row = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
        self.line, self.cube = nn.Parameter(torch.randn(4, 4, 3)), nn.Parameter(torch.randn(4, 4, 3, 3, 3))
        if layer is not None:
            self.layer = layer

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.probe(self.op(self, x, y))


def edges(model: nn.Module, backend: qt.Backend = TARGET, **kwargs: Any) -> set[tuple[str, str]]:
    plan = qt.prepare(model, backend=backend, **kwargs).plan
    return {(e.source, e.consumer) for e in plan.edges if e.quantizer.startswith("activation_quantizers.")}


# kind -> spellings of it on x (and y, where it takes two tensors)
ONE: dict[str, list[Op]] = {
    "conv": [
        lambda m, x, y: F.conv2d(x, m.weight), lambda m, x, y: F.conv2d(input=x, weight=m.weight),
        lambda m, x, y: F.conv1d(x, m.line), lambda m, x, y: F.conv3d(x, m.cube),
        lambda m, x, y: torch.conv2d(x, m.weight),
    ],
    "conv_transpose": [
        lambda m, x, y: F.conv_transpose2d(x, m.weight), lambda m, x, y: F.conv_transpose1d(x, weight=m.line),
        lambda m, x, y: F.conv_transpose3d(x, m.cube),
    ],
    "linear": [lambda m, x, y: F.linear(x, m.matrix), lambda m, x, y: F.linear(input=x, weight=m.matrix)],
    "matmul": [lambda m, x, y: x @ m.matrix, lambda m, x, y: torch.einsum("bi,io->bo", x, m.matrix)],
    "scale": [
        lambda m, x, y: x * 2, lambda m, x, y: 2 * x, lambda m, x, y: x / 2.0, lambda m, x, y: x.mul_(0.5),
        lambda m, x, y: torch.div(x, 3), lambda m, x, y: x * m.row, lambda m, x, y: operator.imul(x, 3),
    ],
    "shift": [lambda m, x, y: x + 1, lambda m, x, y: 1 - x, lambda m, x, y: torch.add(x, m.row), lambda m, x, y: x.sub_(2)],
    "abs": [lambda m, x, y: abs(x), lambda m, x, y: torch.abs(x), lambda m, x, y: x.abs(), lambda m, x, y: x.abs_()],
    "avg_pool": [
        lambda m, x, y: F.avg_pool2d(x, 2), lambda m, x, y: F.adaptive_avg_pool2d(x, 1),
        lambda m, x, y: x.mean((2, 3)), lambda m, x, y: torch.mean(x, dim=[-1, -2]), lambda m, x, y: F.avg_pool1d(x, 2),
        lambda m, x, y: F.avg_pool3d(input=x, kernel_size=2), lambda m, x, y: F.interpolate(x, 2, mode="area"),
    ],
    "mean": [lambda m, x, y: x.mean(1), lambda m, x, y: torch.mean(x)],
    "upsample_linear": [
        lambda m, x, y: F.interpolate(x, scale_factor=2, mode="bilinear"),
        lambda m, x, y: F.interpolate(input=x, size=4, mode="trilinear"),
    ],
    "upsample_cubic": [lambda m, x, y: F.interpolate(x, scale_factor=2, mode="bicubic")],
    "layer_norm": [lambda m, x, y: F.layer_norm(x, (4,))],
    "group_norm": [lambda m, x, y: F.group_norm(x, 2)],
    "batch_norm": [lambda m, x, y: F.batch_norm(x, m.row, m.row)],
    "softmax": [lambda m, x, y: F.softmax(x, 1), lambda m, x, y: x.softmax(1), lambda m, x, y: torch.softmax(x, dim=1)],
    "log_softmax": [lambda m, x, y: F.log_softmax(x, 1)],
    "pad": [lambda m, x, y: F.pad(x, (1, 1), value=1.0)],
}  # fmt: skip

TWO: dict[str, list[Op]] = {
    "add": [
        lambda m, x, y: x + y, lambda m, x, y: torch.add(x, y), lambda m, x, y: torch.add(input=x, other=y),
        lambda m, x, y: x.add(y), lambda m, x, y: x.add_(other=y), lambda m, x, y: operator.iadd(x, y),
    ],
    "sub": [lambda m, x, y: x - y, lambda m, x, y: torch.sub(x, other=y), lambda m, x, y: x.sub(y)],
    "mul": [
        lambda m, x, y: x * y, lambda m, x, y: torch.mul(x, y), lambda m, x, y: x.mul_(y),
        lambda m, x, y: torch.multiply(input=x, other=y), lambda m, x, y: operator.imul(x, y),
    ],
    "div": [lambda m, x, y: x / y, lambda m, x, y: torch.div(x, y), lambda m, x, y: x.div_(y)],
    "matmul": [
        lambda m, x, y: x @ y, lambda m, x, y: torch.matmul(x, y), lambda m, x, y: torch.bmm(x, mat2=y),
        lambda m, x, y: x.matmul(y), lambda m, x, y: x.bmm(y), lambda m, x, y: torch.mm(x, y),
        lambda m, x, y: torch.baddbmm(m.matrix, x, y), lambda m, x, y: torch.einsum("bij,bjk->bik", x, y),
        lambda m, x, y: torch.einsum("bij, jk", x, y), lambda m, x, y: torch.einsum("...ij,jk", x, y),
        lambda m, x, y: torch.addmm(m.row, mat1=x, mat2=y),
    ],
    "dot_product_attention": [
        lambda m, x, y: F.scaled_dot_product_attention(x, y, y),
        lambda m, x, y: F.scaled_dot_product_attention(query=x, key=y, value=y, attn_mask=m.matrix),
    ],
    "conv": [lambda m, x, y: F.conv2d(x, y)],
}  # fmt: skip

CAT: dict[str, list[Op]] = {
    "cat": [
        lambda m, x, y: torch.cat([x, y], 1), lambda m, x, y: torch.cat((x, y)), lambda m, x, y: torch.concat([x, y]),
        lambda m, x, y: torch.cat(tensors=[x, y], dim=1), lambda m, x, y: torch.hstack([x, y]),
    ],
    "stack": [lambda m, x, y: torch.stack([x, y]), lambda m, x, y: torch.stack(tensors=(x, y))],
}  # fmt: skip

MOVED: dict[str, list[Op]] = {
    "flatten": [lambda m, x, y: torch.flatten(x, 1), lambda m, x, y: x.flatten(1), lambda m, x, y: torch.flatten(input=x)],
    "reshape": [
        lambda m, x, y: x.view(1, -1), lambda m, x, y: x.reshape(2, 2), lambda m, x, y: torch.squeeze(x),
        lambda m, x, y: x.unsqueeze(1), lambda m, x, y: x.expand(2, 4), lambda m, x, y: x.repeat(2, 1),
        lambda m, x, y: torch.reshape(x, (2, 2)),
    ],
    "transpose": [
        lambda m, x, y: x.permute(0, 2, 1), lambda m, x, y: torch.permute(x, (1, 0)), lambda m, x, y: x.transpose(1, 2),
        lambda m, x, y: x.T, lambda m, x, y: x.mT, lambda m, x, y: torch.roll(x, 1), lambda m, x, y: torch.t(x),
    ],
    "slice": [
        lambda m, x, y: x[:, 1:], lambda m, x, y: x[..., 0], lambda m, x, y: x.narrow(0, 0, 1),
        lambda m, x, y: x[:, None], lambda m, x, y: x[:, : y.size(1)],
        lambda m, x, y: x.chunk(2, 1)[0], lambda m, x, y: torch.split(x, 2, dim=1)[1], lambda m, x, y: x.unbind(0)[0],
        lambda m, x, y: torch.chunk(input=x, chunks=2)[0], lambda m, x, y: torch.split(tensor=x, split_size_or_sections=2)[0],
        lambda m, x, y: x.max(2)[0], lambda m, x, y: torch.max(x, dim=2, keepdim=True).values,
        lambda m, x, y: torch.min(x, 1)[0], lambda m, x, y: x.min(dim=-1).values, lambda m, x, y: x.max(x.dim() - 1)[0],
    ],
    "zero_pad": [
        lambda m, x, y: F.pad(x, (1, 1)), lambda m, x, y: F.pad(x, (1, 1), "constant", 0),
        lambda m, x, y: F.pad(input=x, pad=(1, 1), value=0.0),
    ],
    "edge_pad": [lambda m, x, y: F.pad(x, (1, 1), mode="reflect"), lambda m, x, y: F.pad(x, (1, 1), "replicate")],
    "pixel_shuffle": [
        lambda m, x, y: F.pixel_shuffle(x, 2), lambda m, x, y: F.pixel_unshuffle(x, 2),
        lambda m, x, y: F.channel_shuffle(x, 2),
    ],
    "max_pool": [
        lambda m, x, y: F.max_pool2d(x, 2), lambda m, x, y: F.max_pool1d(x, 2), lambda m, x, y: F.max_pool3d(x, 2),
        lambda m, x, y: F.adaptive_max_pool2d(x, 1), lambda m, x, y: torch.max_pool2d(x, 2),
    ],
    "max": [
        lambda m, x, y: torch.max(x), lambda m, x, y: x.amax(1), lambda m, x, y: torch.amax(x, dim=(1, 2), keepdim=True),
    ],
    "min": [lambda m, x, y: x.min(), lambda m, x, y: torch.amin(x, -1)],
    "upsample_nearest": [
        lambda m, x, y: F.interpolate(x, scale_factor=2), lambda m, x, y: F.interpolate(x, 4, mode="nearest-exact"),
    ],
    "identity": [lambda m, x, y: F.dropout(x, 0.5), lambda m, x, y: x.contiguous(), lambda m, x, y: x.clone()],
}  # fmt: skip

JOINED: dict[str, list[Op]] = {
    "relu": [
        lambda m, x, y: F.relu(x), lambda m, x, y: F.relu(x, inplace=True), lambda m, x, y: torch.relu_(x),
        lambda m, x, y: x.relu(), lambda m, x, y: x.relu_(), lambda m, x, y: F.relu(input=x),
    ],
    "relu6": [
        lambda m, x, y: F.relu6(x), lambda m, x, y: x.clamp(0, 6), lambda m, x, y: torch.clamp(x, min=0),
        lambda m, x, y: F.hardtanh(x, 0.0, 1.0),
    ],
    "clamp": [lambda m, x, y: x.clamp(max=1), lambda m, x, y: F.hardtanh(x)],
    "leaky_relu": [lambda m, x, y: F.leaky_relu(x, 0.1), lambda m, x, y: F.leaky_relu_(x)],
    "elu": [lambda m, x, y: F.elu(x), lambda m, x, y: F.selu(x)],
    "prelu": [lambda m, x, y: F.prelu(x, m.row)],
    "silu": [lambda m, x, y: F.silu(x, inplace=True)],
    "mish": [lambda m, x, y: F.mish(x)],
    "gelu": [lambda m, x, y: F.gelu(x, approximate="tanh")],
    "hardswish": [lambda m, x, y: F.hardswish(x)],
    "hardsigmoid": [lambda m, x, y: F.hardsigmoid(x)],
    "sigmoid": [lambda m, x, y: torch.sigmoid(x), lambda m, x, y: x.sigmoid(), lambda m, x, y: x.sigmoid_()],
    "tanh": [lambda m, x, y: torch.tanh(x), lambda m, x, y: x.tanh()],
    "softplus": [lambda m, x, y: F.softplus(x)],
}  # fmt: skip

UNKNOWN: list[Op] = [
    lambda m, x, y: x[0],  # of a tuple, perhaps
    lambda m, x, y: x[y],
    lambda m, x, y: torch.add(x, y, alpha=2),
    lambda m, x, y: torch.div(x, y, rounding_mode="floor"),
    lambda m, x, y: torch.max(x, y),
    lambda m, x, y: x.min(other=y),
    lambda m, x, y: 1 / x,
    lambda m, x, y: torch.exp(x),
]


def cases(table: dict[str, list[Op]]) -> list[Any]:
    return [pytest.param(kind, op, id=f"{kind}-{i}") for kind, ops in table.items() for i, op in enumerate(ops)]


def the_op(kind: str, op: Op) -> str:
    """Return the name of the node under test, which the table must know by its kind."""
    prepared = qt.prepare(Probe(op), backend=TARGET)
    called = [line for line in qt.quantization_report(prepared).layers if line.verdict.cause is not Cause.NOT_CALLED]
    names = [line.name for line in called if line.kind == kind and line.name != "probe"]
    assert len(names) == 1
    return names[0]


@pytest.mark.parametrize(("kind", "op"), cases(ONE))
def test_one_tensor_comes_in_quantized(kind: str, op: Op) -> None:
    name = the_op(kind, op)
    assert edges(Probe(op)) == {("x", name), (name, "probe")}


@pytest.mark.parametrize(("kind", "op"), cases(TWO))
def test_both_tensors_come_in_quantized(kind: str, op: Op) -> None:
    name = the_op(kind, op)
    assert edges(Probe(op)) == {("x", name), ("y", name), (name, "probe")}


@pytest.mark.parametrize(("kind", "op"), cases(CAT))
def test_a_concat_has_one_scale(kind: str, op: Op) -> None:
    name = the_op(kind, op)
    prepared = qt.prepare(Probe(op), backend=TARGET)
    assert edges(Probe(op)) == {("x", name), ("y", name), (name, "probe")}
    assert list(qt.quantizers_of(prepared)) == ["probe.weight_quantizer", f"activation_quantizers.{name}"]


@pytest.mark.parametrize(("kind", "op"), cases(MOVED))
def test_the_quantizer_moves_across(kind: str, op: Op) -> None:
    assert the_op(kind, op)
    assert edges(Probe(op)) == {("x", "probe")}


@pytest.mark.parametrize(("kind", "op"), cases(JOINED))
def test_nothing_comes_between_a_layer_and_its_activation(kind: str, op: Op) -> None:
    def after_a_layer(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return op(m, m.first(x), y)

    name = the_op(kind, after_a_layer)
    assert edges(Probe(after_a_layer)) == {("x", "first"), (name, "probe")}
    status = qt.prepare(Probe(after_a_layer), backend=TARGET).plan.status
    assert status[name] == Verdict(Status.FUSED, Cause.JOINED, "fused with first")


@pytest.mark.parametrize("op", UNKNOWN)
def test_what_the_table_does_not_know_is_left_alone(op: Op) -> None:
    assert {consumer for _, consumer in edges(Probe(op))} == {"probe"}
    assert ("x", "probe") not in edges(Probe(op))


def test_every_kind_has_a_case() -> None:
    tested = {*ONE, *TWO, *CAT, *MOVED, *JOINED}
    of_modules = {"attention", "embedding", "instance_norm", "rms_norm", "einsum", "split", "recurrent"}
    assert set(KINDS) - tested == of_modules


# ---- modules, by the same table

MODULES = [(kind.name, module) for kind in KINDS.values() for form in kind.forms for module in form.modules]
ARGUMENTS: dict[type[nn.Module], tuple[Any, ...]] = {
    nn.Unflatten: (1, (2, 2)),
    nn.Upsample: (None, 2),
    nn.UpsamplingNearest2d: (None, 2),
    nn.UpsamplingBilinear2d: (None, 2),
    nn.MultiheadAttention: (4, 2),
    nn.GroupNorm: (2, 4),
    nn.Linear: (4, 4),
    nn.Embedding: (4, 4),
    nn.EmbeddingBag: (4, 4),
    nn.ConstantPad1d: (1, 0.0),
    nn.ConstantPad2d: (1, 0),
    nn.ConstantPad3d: (1, 0),
}
SMALL = {"conv": (4, 4, 1), "conv_transpose": (4, 4, 1), "batch_norm": (4,), "max_pool": (2,), "avg_pool": (2,),
         "layer_norm": (4,), "rms_norm": (4,), "instance_norm": (4,), "zero_pad": (1,), "edge_pad": (1,),
         "pixel_shuffle": (2,), "recurrent": (4, 4)}  # fmt: skip


def build(kind: str, module: type[nn.Module]) -> nn.Module:
    return module(*ARGUMENTS.get(module, SMALL.get(kind, ())))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("keyword", [False, True], ids=["positional", "keyword"])
@pytest.mark.parametrize(
    ("kind", "module"),
    [
        pytest.param(*m, id=m[1].__name__)
        for m in MODULES
        if m[0] not in ("conv", "conv_transpose", "attention", "embedding", "recurrent")
    ],
)
def test_modules(kind: str, module: type[nn.Module], keyword: bool) -> None:
    if kind in ACTIVATIONS:
        model = Probe(
            lambda m, x, y: m.layer(input=m.first(x)) if keyword else m.layer(m.first(x)), build(kind, module)
        )
        expected = {("x", "first"), ("layer", "probe")}
    else:
        model = Probe(lambda m, x, y: m.layer(input=x) if keyword else m.layer(x), build(kind, module))
        expected = {("x", "probe")} if kind in MOVES and module is not nn.UpsamplingBilinear2d else None
    assert edges(model) == (expected or {("x", "layer"), ("layer", "probe")})


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.LSTMCell])
def test_recurrent_layers_return_tuples(layer: type[nn.Module]) -> None:
    model = Probe(lambda m, x, y: m.layer(x)[0], layer(4, 4))
    assert edges(model) == {("x", "layer"), ("getitem", "probe")}


def test_a_recurrent_cell_with_one_state_returns_a_tensor() -> None:
    assert edges(Probe(lambda m, x, y: m.layer(x), nn.GRUCell(4, 4))) == {("x", "layer"), ("layer", "probe")}


@pytest.mark.parametrize("kind", ["conv", "conv_transpose", "linear"])
def test_layers_with_weights(kind: str) -> None:
    module = {"conv": nn.Conv2d, "conv_transpose": nn.ConvTranspose2d, "linear": nn.Linear}[kind]
    model = Probe(lambda m, x, y: m.layer(x), build(kind, module))
    assert edges(model) == {("x", "layer"), ("layer", "probe")}


def test_output_size_is_no_data() -> None:
    model = Probe(lambda m, x, y: m.layer(x, y.shape), nn.ConvTranspose2d(4, 4, 2))
    assert edges(model) == {("x", "layer"), ("layer", "probe")}


def test_indices_of_a_pool_are_no_tensor_to_quantize() -> None:
    model = Probe(lambda m, x, y: F.max_pool2d(x, 2, return_indices=True)[0])
    assert edges(model) == {("x", "probe")}
    pool = Probe(lambda m, x, y: m.layer(x)[0], nn.MaxPool2d(2, return_indices=True))
    assert edges(pool) == {("x", "probe")}


@pytest.mark.parametrize("equation", ["zc,cA", "bchw,cd", "...cb,ca", "ab,cd", "i,i", "ab,bc->ac"])
def test_an_einsum_without_a_result_has_torchs(equation: str) -> None:
    operands = [torch.rand([2] * len(term.replace("...", "x"))) for term in equation.split("->")[0].split(",")]
    expected = torch.einsum(equation, *operands)
    assert torch.equal(torch.einsum(written_out(equation), *operands), expected)


def test_an_einsum_that_sums_nothing_is_no_matmul() -> None:
    assert the_op("einsum", lambda m, x, y: torch.einsum("ab,cd", x, y)) == "einsum"


def test_no_function_has_two_kinds() -> None:
    pairs = {(function, kind.name) for kind in KINDS.values() for form in kind.forms for function in form.functions}
    assert len(pairs) == len(OF_FUNCTION)


def on_sizes(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    rows, (_, columns) = x.size(0), (0, x.shape[1])
    more = (rows + columns) * rows - columns * columns
    return x.reshape(rows * columns // columns, more - (rows + columns) * rows + columns * columns + columns)


def test_what_is_computed_from_sizes_is_no_tensor() -> None:
    model = Probe(on_sizes)
    assert edges(model) == {("x", "probe")}
    inputs = torch.rand(2, 4), torch.rand(2, 4)
    prepared = qt.prepare(model, inputs, backend=TARGET)
    qt.calibrate(prepared, [inputs], progress=False)
    assert {line.kind for line in qt.quantization_report(prepared).layers} == {"reshape", "linear"}
