"""Products of two activations in training: gradients bit for bit, what is kept for backward, exact sums."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import qtoolkit as qt
from qtoolkit.nn.fused_attention import HAS_FUSED
from tests.cases import leaf
from tests.copies import made_once
from tests.nn.test_on_codes import AFFINE, FIXED, FOUR_BITS, LSQ, assert_equal, bytes_kept, configs, routes
from tests.replaced import in_training

BATCH, HEADS, LENGTH, FEATURES = 3, 2, 5, 8
PLAIN = {"training_arithmetic": "float", "save": "float"}


class Attention(nn.Module):
    """Attention written out, its products as modules: `qtoolkit.prepare` sees the ops themselves."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(FEATURES * HEADS, 3 * FEATURES * HEADS), nn.Linear(FEATURES * HEADS, 4)
        self.scores, self.values, self.drop = (
            qt.nn.MatMul(),
            qt.nn.MatMul(),
            nn.Dropout(drop) if drop else nn.Identity(),
        )

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).reshape(BATCH, LENGTH, 3, HEADS, FEATURES).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        weights = self.drop(self.scores(q * FEATURES**-0.5, k.transpose(-2, -1)).softmax(-1))
        return self.proj(self.values(weights, v).transpose(1, 2).flatten(2))


class Fused(nn.Module):
    """Attention as one module, of which module replacement makes two products."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.attention = qt.nn.ScaledDotProductAttention(drop)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, FEATURES)).transpose(1, 2) for part in (x, 2 * x, x - 1))
        return self.attention(q, k, v)


class MultiHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(FEATURES * HEADS, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


def sequences(seed: int = 0) -> Tensor:
    return torch.randn(BATCH, LENGTH, FEATURES * HEADS, generator=torch.Generator().manual_seed(seed))


def quantized(route: str, config: qt.QConfig = LSQ, model: nn.Module | None = None, **options: str) -> nn.Module:
    return (
        quantized_net(route, config, **options)
        if model is None
        else in_training(route, config, model, sequences(), **options)
    )


@made_once
def quantized_net(route: str, config: qt.QConfig, **options: str) -> nn.Module:
    torch.manual_seed(0)
    return in_training(route, config, Attention(), sequences(), **options)


def step(model: nn.Module, run=None, seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    x = leaf(sequences(seed))
    model.zero_grad()
    y = (model if run is None else run)(x)
    y.square().sum().backward()
    return y.detach(), {"input": x.grad, **{name: p.grad.clone() for name, p in model.named_parameters()}}


@pytest.mark.sweep(2)
@configs
@routes
@pytest.mark.parametrize("model", [Attention, Fused, MultiHead])
def test_codes_for_backward_change_no_bit(model: type[nn.Module], route: str, config: qt.QConfig) -> None:
    net = model()
    target = {"backend": "openvino"} if route == "graph" else {}  # TensorRT takes attention that is one op in float
    plain = quantized(route, config, copy.deepcopy(net), **target, **PLAIN)
    codes = quantized(route, config, net, **target, training_arithmetic="float")
    assert_equal(step(codes), step(plain))


@routes
def test_operands_that_dropout_moved_off_their_grid_are_kept_in_float(route: str) -> None:
    net, found = Attention(0.5), []
    for options in ({"training_arithmetic": "float"}, PLAIN):
        model = quantized(route, LSQ, copy.deepcopy(net), **options)
        torch.manual_seed(3)
        found.append(step(model))
    assert_equal(*found)


def operands() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(4, 6, 40, generator=generator), torch.randn(4, 40, 6, generator=generator)


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.product = qt.nn.MatMul()

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.product(x, other)


def product_of(route: str, config: qt.QConfig, given: tuple[Tensor, Tensor], **options: str) -> nn.Module:
    mapping = qt.QConfigMapping().set_global(config)
    if route == "graph":
        prepared = qt.prepare(Product().train(), given, qconfig_mapping=mapping, **{"backend": "tensorrt", **options})
    else:
        prepared = qt.quant_modules.replace(Product().train(), mapping, **{"backend": "tensorrt", **options})
    qt.calibrate(prepared.eval(), [given], progress=False)
    return prepared.train()


@pytest.mark.parametrize(("bits", "per_element"), [(8, 1), (4, 0.5)])
@routes
def test_a_code_takes_a_byte_or_less(route: str, bits: int, per_element: float) -> None:
    x, other = leaf(torch.randn(8, 64, 128)), leaf(torch.randn(8, 128, 64))
    model = product_of(route, qt.QConfig(qt.QuantSpec(bits=bits), None), (x, other), training_arithmetic="float")
    bits_of_masks = (x.numel() + other.numel()) / 8
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t
    ):
        model(x, other)
    total = sum(t.untyped_storage().nbytes() for t in kept.values())
    assert total <= (x.numel() + other.numel()) * per_element + bits_of_masks + 256


@pytest.mark.parametrize(
    "shapes", [((4, 6), (6, 3)), ((2, 4, 6), (6, 3)), ((2, 1, 4, 6), (3, 6, 5)), ((0, 4, 6), (0, 6, 3))]
)
def test_other_products_are_those_of_torch(shapes: tuple[tuple[int, ...], ...]) -> None:
    given = tuple(torch.randn(shape) for shape in shapes)
    calibration = tuple(torch.randn([max(size, 1) for size in shape]) for shape in shapes)
    found = []
    for options in ({"training_arithmetic": "integer"}, PLAIN):
        model = product_of("graph", FIXED, calibration, **options)
        x, other = map(leaf, given)
        model(x, other).square().sum().backward()
        found.append((x.grad, other.grad))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("config", [FIXED, FOUR_BITS, AFFINE], ids=["fixed", "four bits", "affine"])
@routes
def test_the_integer_forward_has_the_sums_of_integers(route: str, config: qt.QConfig) -> None:
    x, other = map(leaf, operands())
    model = product_of(route, config, (x, other), training_arithmetic="integer")
    y = model(x, other)
    grids = list(model.activation_quantizers.children() if route == "graph" else model.product.sources)
    codes = [
        torch.round(grid(value).double() / grid.scale.double()) for grid, value in zip(grids, (x, other), strict=True)
    ]
    sums, steps = torch.matmul(*codes), grids[0].scale * grids[1].scale
    assert torch.equal(y, sums.float() * steps)
    plain = product_of(route, config, (x, other), **PLAIN)
    torch.testing.assert_close(y, plain(x, other), rtol=1e-5, atol=1e-5)
    gradients = [torch.autograd.grad(m(x, other).sum(), (x, other)) for m in (model, plain)]
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_the_integer_forward_is_the_deployed_kernel() -> None:
    x, other = operands()
    prepared = qt.prepare(Product(), (x, other), backend="onnxruntime", training_arithmetic="integer")
    qt.calibrate(prepared, [(x, other)], progress=False)
    deployed = qt.convert(prepared, arithmetic="integer")
    found = prepared.train()(leaf(x), leaf(other))
    assert "MatMul" in str(qt.quantization_report(deployed))
    assert torch.equal(found, deployed(x, other))


@routes
def test_nan_stays(route: str) -> None:
    x, other = operands()
    model = product_of(route, FIXED, (x, other), training_arithmetic="integer")
    x[0, 0, 0] = torch.nan
    y = model(leaf(x), leaf(other))
    assert y[0, 0].isnan().all()
    assert y[1:].isfinite().all()


@routes
@pytest.mark.parametrize("forward", ["float", "integer"])
def test_autocast_computes_in_its_type(route: str, forward: str) -> None:
    model, plain = quantized(route, training_arithmetic=forward), quantized(route, **PLAIN)
    found = []
    for each in (model, plain):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(step(each))
    assert found[0][0].dtype == torch.bfloat16
    if forward == "float":
        assert_equal(*found)
    assert all(gradient.isfinite().all() for gradient in found[0][1].values())


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize("forward", ["float", "integer"])
@pytest.mark.parametrize("config", [LSQ, FOUR_BITS], ids=["lsq", "four bits"])
def test_it_compiles_without_a_graph_break(config: qt.QConfig, forward: str) -> None:
    torch._dynamo.reset()
    model = quantized("graph", config, training_arithmetic=forward)
    copied = copy.deepcopy(model)
    compiled = torch.compile(copied, fullgraph=True, backend="aot_eager")
    for seed in (0, 1):
        found, wanted = step(copied, compiled, seed), step(model, seed=seed)
        torch.testing.assert_close(found[0], wanted[0])
        for name, gradient in wanted[1].items():
            torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=float(gradient.abs().max()) * 1e-5)


@pytest.mark.parametrize("forward", ["float", "integer"])
def test_checkpoints_copies_and_pickles(forward: str) -> None:
    model = quantized("graph", training_arithmetic=forward)
    wanted = step(model)
    assert_equal(step(model, lambda x: checkpoint(model, x, use_reentrant=False)), wanted)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.training_arithmetic == model.training_arithmetic
        assert_equal(step(other), wanted)
        assert bytes_kept(other, sequences()) == bytes_kept(model, sequences())


def test_an_op_that_is_put_before_a_product_later_moves_its_values_off_the_grid() -> None:
    class Halves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 0.4771

    found = []
    for options in ({"training_arithmetic": "integer"}, {"training_arithmetic": "float"}, PLAIN):
        model = quantized("graph", **options)
        model.set_submodule("drop", Halves())
        found.append(step(model.train()))
    assert_equal(found[1], found[2])
    torch.testing.assert_close(found[0][1]["input"], found[2][1]["input"], rtol=1e-3, atol=1e-5)


def test_the_report_says_how_each_product_computes_in_training() -> None:
    def lines(model: nn.Module) -> list[str]:
        return [line.training for line in qt.quantization_report(model).layers if line.kind in ("matmul", "attention")]

    for route in ("graph", "modules"):
        model = quantized(route, training_arithmetic="integer")
        assert lines(model) == ["int8 kernel, saves integers"] * 2
        qt.nn.set_training_arithmetic(model)
        assert lines(model) == ["float (no int8 kernel), saves integers"] * 2
        qt.nn.set_training_arithmetic(model, "float", "float")
        assert lines(model) == ["float (as asked), saves floats"] * 2
    one = "float (an operand is not quantized to at most 8 bits with one scale), saves integers of one operand"
    dropped = quantized("modules", LSQ, Fused(0.5), training_arithmetic="integer")
    assert lines(dropped) == [f"int8 kernel, saves integers; {one}"]
    wide = qt.QConfig(qt.QuantSpec(bits=16), qt.QuantSpec(axis=0))
    none = "float, saves floats: its operands are not quantized to at most 8 bits with one scale each"
    assert lines(quantized("graph", wide)) == [none] * 2


class TorchAttention(nn.Module):
    """Attention as torch's function, which a graph has as one op."""

    def __init__(self, is_causal: bool = False) -> None:
        super().__init__()
        self.qkv, self.is_causal = nn.Linear(FEATURES * HEADS, 3 * FEATURES * HEADS), is_causal

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).reshape(BATCH, LENGTH, 3, HEADS, FEATURES).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal, scale=0.3).transpose(1, 2).flatten(2)


@configs
@pytest.mark.parametrize("is_causal", [False, True])
def test_fused_attention_keeps_codes_and_changes_no_bit(config: qt.QConfig, is_causal: bool) -> None:
    net = TorchAttention(is_causal)
    plain = quantized("graph", config, copy.deepcopy(net), backend="openvino", **PLAIN)
    codes = quantized("graph", config, net, backend="openvino", training_arithmetic="float")
    assert_equal(step(codes), step(plain))
    for seed in (0, 1):
        assert_equal(
            step(codes, lambda x: checkpoint(codes, x, use_reentrant=False), seed=seed), step(plain, seed=seed)
        )
    if HAS_FUSED:
        values = 3 * BATCH * LENGTH * HEADS * FEATURES
        assert bytes_kept(plain, sequences()) - bytes_kept(codes, sequences()) >= 2 * values


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_fused_attention_in_other_dtypes(dtype: torch.dtype) -> None:
    net = TorchAttention()
    models = [
        quantized("graph", FIXED, copy.deepcopy(net), backend="openvino", **options).to(dtype)
        for options in ({}, PLAIN)
    ]
    found = []
    for model in models:
        x = leaf(sequences().to(dtype))
        model(x).float().square().sum().backward()
        found.append((model.qkv.weight.grad, x.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02 * float(other.abs().max()))


@pytest.mark.slow
def test_fused_attention_compiles_and_reports() -> None:
    torch._dynamo.reset()
    model = quantized("graph", LSQ, TorchAttention(), backend="openvino")
    found = step(model, torch.compile(model, fullgraph=True, backend="aot_eager"))
    torch.testing.assert_close(found[0], step(model)[0])
    (line,) = (line for line in qt.quantization_report(model).layers if line.kind == "dot_product_attention")
    assert line.training == ("float, saves integers on a CPU" if HAS_FUSED else "float, saves floats")
    with torch.autocast("cpu", torch.bfloat16):
        assert model(leaf(sequences())).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "spec", [qt.QuantSpec(bits=4, quantizer="apot"), qt.QuantSpec(dynamic=True)], ids=["apot", "dynamic"]
)
def test_the_report_knows_operands_without_codes(spec: qt.QuantSpec) -> None:
    """Shaped values and those with scales of their own have none, in training and after conversion."""
    mapping = qt.QConfigMapping().set_global(qt.QConfig(spec, qt.QuantSpec()))
    model = qt.quant_modules.replace(nn.Sequential(Square()).train(), mapping, backend="tensorrt")
    qt.calibrate(model, [torch.randn(2, 4, 4)], progress=False)
    for each in (model, qt.convert(model)):
        (line,) = (line for line in qt.quantization_report(each).layers if line.kind == "matmul")
        assert (
            line.training == "float, saves floats: its operands are not quantized to at most 8 bits with one scale each"
        )


class Square(nn.Module):
    """A product of a tensor with itself, by a module that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.product = qt.nn.MatMul()

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, x)
