"""Sums, products, concatenation and attention as modules: what is quantized, and equality to torch with quantizers off."""

import copy
import itertools
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.nn.replacement import replace_layers
from tests import reference

ACTIVATION = qt.QuantSpec(bits=4)
OPS = {
    "add": (qt.nn.Add, qt.nn.QuantAdd, torch.add, (2, 3, 4)),
    "mul": (qt.nn.Mul, qt.nn.QuantMul, torch.mul, (2, 3, 4)),
    "matmul": (qt.nn.MatMul, qt.nn.QuantMatMul, torch.matmul, (2, 4, 3)),
}


def replaced(module: nn.Module) -> nn.Module:
    model = nn.Sequential(module)
    replace_layers(model, [""], lambda *_: qt.QConfig(ACTIVATION, None), qt.nn.REPLACED_MODULES)
    return model[0]


def on_grid(quantizer: qt.TensorQuantizer | None, x: Tensor) -> Tensor:
    return x if quantizer is None else reference.fake_quant(x, quantizer.scale, None, -8, 7)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("operands", ["both", "first", "second"])
def test_the_operands_that_are_named_are_quantized(name: str, operands: str) -> None:
    kind, quant_kind, function, shape = OPS[name]
    ours = replaced(kind(quantized=operands))
    assert type(ours) is quant_kind
    x, y = torch.randn(2, 3, 4), torch.randn(shape) * 3
    qt.calibrate(ours, [(x, y)], progress=False)
    wanted = {"both": ["input", "other"], "first": ["input"], "second": ["other"]}[operands]
    assert sorted(qt.quantizers_of(ours)) == [f"{operand}_quantizer" for operand in wanted]
    first, second = getattr(ours, "input_quantizer", None), ours.other_quantizer
    assert torch.equal(ours(x, y), function(on_grid(first, x), on_grid(second, y)))
    assert torch.equal(ours(input=x, other=y), ours(x, y))
    with qt.disable_quantization(ours):
        assert torch.equal(ours(x, y), function(x, y))
    assert torch.equal(ours.forward_fp32(x, y), function(x, y))
    assert torch.equal(kind()(x, y), function(x, y))


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("operands", ["both", "first", "second"])
def test_merges_go_back_are_copied_and_built(name: str, operands: str) -> None:
    kind, quant_kind, _, shape = OPS[name]
    ours = quant_kind(operands, input_spec=ACTIVATION)
    args = torch.randn(2, 3, 4), torch.randn(shape)
    qt.calibrate(ours, [args], progress=False)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(twin(*args), ours(*args))
    back = ours.to_float()
    assert type(back) is kind
    assert vars(back).keys() == vars(kind()).keys()
    assert back.quantized == operands


def test_words_that_name_no_operand_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown value of `quantized` 'fist'; did you mean 'first'"):
        qt.nn.Add("fist")


def test_numbers_are_refused() -> None:
    ours = qt.nn.QuantAdd()
    with pytest.raises(TypeError, match="QuantAdd: other must be a tensor, which has a range to quantize, got an int"):
        ours(torch.ones(2), 1)


def test_cat_has_one_grid_for_all() -> None:
    ours = replaced(qt.nn.Cat(dim=1))
    tensors = [torch.randn(2, 3), torch.randn(2, 1) * 5, torch.randn(2, 2)]
    qt.calibrate(ours, [(tensors,)], progress=False)
    assert list(qt.quantizers_of(ours)) == ["input_quantizer"]
    quantizer = ours.input_quantizer
    assert quantizer.amax == pytest.approx(max(float(x.abs().max()) for x in tensors))
    assert torch.equal(ours(tensors), on_grid(quantizer, torch.cat(tensors, 1)))
    assert torch.equal(ours(tuple(tensors)), ours(tensors))
    with qt.disable_quantization(ours):
        assert torch.equal(ours(tensors), torch.cat(tensors, 1))
    assert type(ours.to_float()) is qt.nn.Cat
    assert ours.to_float().dim == 1


class Net(nn.Module):
    """All modules of this file in one."""

    def __init__(self) -> None:
        super().__init__()
        self.add, self.mul, self.matmul, self.cat = qt.nn.Add(), qt.nn.Mul(), qt.nn.MatMul(), qt.nn.Cat(-1)
        self.attend, self.linear = qt.nn.ScaledDotProductAttention(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mul(self.add(self.linear(x), x), x)
        y = self.matmul(y, y.transpose(-2, -1)) @ x
        return self.cat([self.attend(y, x, x), x])


def test_a_graph_sees_the_ops_themselves() -> None:
    """prepare traces the float modules into their ops, which the backend's rules quantize; no such module remains."""
    x = torch.randn(2, 3, 5, 8)
    model = Net().eval()
    prepared = qt.prepare(model, x, backend="onnxruntime")
    kinds = {line.kind: line.status for line in qt.quantization_report(prepared).layers}
    assert {"add", "mul", "matmul", "cat", "dot_product_attention"} <= kinds.keys()
    assert {kinds[kind] for kind in ("add", "mul", "matmul")} == {"quantized"}
    with qt.disable_quantization(prepared):
        torch.testing.assert_close(prepared(x), model(x))


class Block(nn.Module):
    """The modules and a pooling layer, each on a different tensor, in a leaf module."""

    def __init__(self) -> None:
        super().__init__()
        self.add, self.mul, self.matmul, self.cat = qt.nn.Add("second"), qt.nn.Mul(), qt.nn.MatMul(), qt.nn.Cat(-1)
        self.attend, self.pool = qt.nn.ScaledDotProductAttention(), nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mul(self.add(x, x.tanh()), x.sigmoid())
        y = self.matmul(y, y.abs().transpose(-2, -1)) @ x
        return self.pool(self.cat([self.attend(y, x.relu(), x - 1), x.exp()]))


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.linear = Block(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.linear(x))


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_codes_in_onnxruntime(tmp_path: Path, exporter: str) -> None:
    x, mapping = torch.randn(2, 3, 6, 8), qt.QConfigMapping()
    table = {kind: quant for kind, quant in qt.nn.REPLACED_MODULES.items() if kind not in qt.nn.QAT_MODULES}
    used = {kind: table[kind] for kind in map(type, Block().children())}
    for kind in used:
        mapping.set_object_type(kind, qt.QConfig(qt.QuantSpec(), qt.QuantSpec()))
    prepared = qt.prepare(
        Outer().eval(), x, untraced=["block"], qat_modules=used, qconfig_mapping=mapping, backend="tensorrt"
    )
    qt.calibrate(prepared, [x], progress=False)
    assert len(qt.quantizers_of(prepared)) == 2 + (1 + 2 + 2 + 1 + 4 + 1)
    codes = qt.export_onnx(prepared, x, tmp_path / "m.onnx", exporter=exporter).verification
    assert codes.missing == ()
    assert codes.weight_codes.differing == codes.quantizer_codes.differing == 0
    assert len(codes.by_quantizer) == 12


# ---- attention

B, H, L, S, E, V = 2, 4, 5, 7, 8, 6
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "grouped": {"enable_gqa": True},
    "grouped causal": {"enable_gqa": True, "is_causal": True, "scale": 2.0},
}


def attention_inputs(options: dict[str, object]) -> tuple[Tensor, Tensor, Tensor]:
    heads = 2 if options.get("enable_gqa") else H
    return torch.randn(B, H, L, E), torch.randn(B, heads, S, E), torch.randn(B, heads, S, V)


def mask_of(kind: str) -> Tensor | None:
    boolean = torch.rand(B, 1, L, S) > 0.4
    boolean[0, 0, 1] = False  # a row that may look at nothing
    return {"none": None, "bool": boolean, "float": torch.randn(L, S), "per head": torch.randn(B, H, L, S)}[kind]


CASES = [(o, m) for o, m in itertools.product(OPTIONS, ("none", "bool", "float", "per head"))
         if m == "none" or not OPTIONS[o].get("is_causal")]  # fmt: skip


@pytest.mark.parametrize(("options", "mask"), CASES)
def test_attention_is_torchs(options: str, mask: str) -> None:
    """Equal bit for bit with its quantizers off; equal up to rounding while they only observe."""
    args, attn_mask = attention_inputs(OPTIONS[options]), mask_of(mask)
    expected = F.scaled_dot_product_attention(*args, attn_mask, **OPTIONS[options])
    layer = qt.nn.ScaledDotProductAttention(**OPTIONS[options])
    assert torch.equal(layer(*args, attn_mask), expected)
    ours = replaced(layer)
    assert type(ours) is qt.nn.QuantScaledDotProductAttention
    with qt.disable_quantization(ours):
        assert torch.equal(ours(*args, attn_mask), expected)
    with qt.calibrating(ours):
        torch.testing.assert_close(ours(*args, attn_mask), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("options", "mask"), [("plain", "bool"), ("grouped", "float"), ("causal", "none")])
def test_attention_gradients_are_torchs(options: str, mask: str) -> None:
    ours = replaced(qt.nn.ScaledDotProductAttention(**OPTIONS[options]))
    args = [x.requires_grad_() for x in attention_inputs(OPTIONS[options])]
    attn_mask = mask_of(mask)
    expected = F.scaled_dot_product_attention(*args, attn_mask, **OPTIONS[options])
    g = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, args, g)
    with qt.calibrating(ours):
        found = torch.autograd.grad(ours(*args, attn_mask), args, g)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_attention_multiplies_values_on_the_grids() -> None:
    ours = replaced(qt.nn.ScaledDotProductAttention())
    (q, k, v), mask = attention_inputs({}), torch.randn(L, S)
    qt.calibrate(ours, [(q, k, v, mask)], progress=False)
    assert list(qt.quantizers_of(ours)) == [f"{n}_quantizer" for n in ("query", "key", "value", "softmax")]
    scores = on_grid(ours.query_quantizer, q * E**-0.5) @ on_grid(ours.key_quantizer, k).transpose(-2, -1) + mask
    wanted = on_grid(ours.softmax_quantizer, scores.softmax(-1)) @ on_grid(ours.value_quantizer, v)
    assert torch.equal(ours(q, k, v, mask), wanted)
    for quantizer in qt.quantizers_of(ours).values():
        before = ours(q, k, v, mask)
        quantizer.disable()
        assert not torch.equal(ours(q, k, v, mask), before)


def test_attention_drops_out_in_training_alone() -> None:
    layer = qt.nn.ScaledDotProductAttention(dropout_p=0.25)
    q, k = torch.zeros(8, 4, 32, E), torch.zeros(8, 4, 32, E)
    v = torch.ones(8, 4, 32, 1)
    for module in (layer, qt.nn.QuantScaledDotProductAttention(0.25, activation_spec=qt.QuantSpec())):
        with qt.disable_quantization(module):
            assert torch.allclose(module.eval()(q, k, v), torch.ones(8, 4, 32, 1))
            torch.manual_seed(0)
            y = module.train()(q, k, v)
        dropped = 1 - y * 0.75  # each of the 1024 sums is of 32 weights of 1/32 / 0.75 or 0
        assert torch.allclose(dropped * 32, (dropped * 32).round(), atol=1e-3)
        assert float(dropped.mean()) == pytest.approx(0.25, abs=0.02)


def test_attention_refuses_two_masks() -> None:
    ours = replaced(qt.nn.ScaledDotProductAttention(is_causal=True))
    with pytest.raises(ValueError, match="attn_mask must be None with is_causal=True"):
        ours(*attention_inputs({}), torch.randn(L, S))


def test_attention_goes_back_and_is_copied() -> None:
    ours = replaced(qt.nn.ScaledDotProductAttention(0.1, scale=0.5))
    args = attention_inputs({})
    qt.calibrate(ours.eval(), [args], progress=False)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(twin(*args), ours(*args))
    back = ours.to_float()
    assert vars(back).keys() == vars(qt.nn.ScaledDotProductAttention()).keys()
    assert (back.dropout_p, back.scale) == (0.1, 0.5)


@pytest.mark.parametrize("name", ["add", "cat", "attention"])
def test_they_compile_whole(name: str) -> None:
    ours, args = {
        "add": (replaced(qt.nn.Add()), (torch.randn(2, 3), torch.randn(2, 3))),
        "cat": (replaced(qt.nn.Cat()), ([torch.randn(2, 3), torch.randn(1, 3)],)),
        "attention": (replaced(qt.nn.ScaledDotProductAttention(is_causal=True)), attention_inputs({})),
    }[name]
    qt.calibrate(ours, [args], progress=False)
    compiled = torch.compile(copy.deepcopy(ours), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*args), ours(*args))
