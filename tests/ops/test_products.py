"""product and fused_attention: torch's values and gradients, what they keep for backward, their errors."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from qtoolkit import ops
from qtoolkit.nn.fused_attention import HAS_FUSED
from qtoolkit.nn.product import kept_operand
from qtoolkit.ops.layer import Codes
from tests.cases import FLOATS, assert_same, floats, leaf, name_of

native = torch.ops.qtoolkit
SCALE = torch.tensor(0.25)


def on_grid(dtype: torch.dtype, seed: int, *size: int) -> Tensor:
    return leaf((floats(dtype, seed)(*size).float() / 3).round().clamp(-8, 7).mul(0.25).to(dtype))


def codes_of(x: Tensor, kind: str) -> Codes | None:
    if kind == "none":
        return None
    grid = (x.detach().float(), SCALE, None, -8, 7)
    return Codes(ops.quantize_int4(*grid) if kind == "packed" else ops.quantize(*grid), SCALE, None, -8, 7)


def told(x: Tensor, kind: str, needed: bool = True) -> tuple:
    """A tensor that is transposed in memory has the codes of the transposed matrices."""
    transposed = not x.is_contiguous()
    return kept_operand(x, codes_of(x.transpose(-2, -1) if transposed else x, kind), needed, transposed)


def gradients(y: Tensor, *inputs: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(y, inputs, (floats(y.dtype, 9)(*y.shape) / 10).to(y)))


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kinds", [("bytes", "packed"), ("packed", "none"), ("none", "bytes")], ids=str)
def test_a_product_is_torchs(kinds, transposed, dtype):
    x, other = on_grid(dtype, 1, 3, 5, 7), on_grid(dtype, 2, 3, *((4, 7) if transposed else (7, 4)))
    factor = other.transpose(1, 2) if transposed else other
    found = native.product(*told(x, kinds[0]), *told(factor, kinds[1]))
    wanted = torch.bmm(x, factor)
    assert_same(found, wanted)
    for one, of_torch in zip(gradients(found, x, other), gradients(wanted, x, other), strict=True):
        assert_same(one, of_torch)


def test_a_product_that_is_computed_already_is_copied():
    x, other = on_grid(torch.float32, 1, 2, 3, 4), on_grid(torch.float32, 2, 2, 4, 5)
    computed = torch.ones(2, 3, 5)
    y = native.product(*told(x, "bytes"), *told(other, "bytes"), computed)
    assert y.data_ptr() != computed.data_ptr()
    assert bool((y == 1).all())
    for one, of_torch in zip(gradients(y, x, other), gradients(torch.bmm(x, other), x, other), strict=True):
        assert_same(one, of_torch)


@pytest.mark.parametrize(("kind", "per_element"), [("none", 4), ("bytes", 1), ("packed", 0.5)])
def test_backward_keeps_what_the_other_gradient_takes(kind, per_element):
    x, other = on_grid(torch.float32, 1, 8, 64, 32), on_grid(torch.float32, 2, 8, 32, 16).detach()

    def kept() -> int:
        sizes = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: sizes.setdefault(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()), lambda t: t
        ):
            native.product(*told(x, kind, needed=other.requires_grad), *told(other, kind))
        return sum(size for size in sizes.values() if isinstance(size, int))

    assert kept() <= other.numel() * per_element + 64  # x alone has a gradient, which takes the other's values
    other.requires_grad_()
    assert x.numel() * per_element < kept() <= (x.numel() + other.numel()) * per_element + 64


@pytest.mark.skipif(not HAS_FUSED, reason="this torch has no fused attention for the CPU")
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", ["none", "bytes", "packed"])
def test_fused_attention_is_torchs(kind, is_causal, dtype):
    q, k, v = (on_grid(dtype, seed, 2, 3, 9, 8) for seed in (1, 2, 3))
    operands = [part for each in (q, k, v) for part in told(each, kind)[:4]]
    found, _ = native.fused_attention(*operands, k.shape, [True] * 3, is_causal, 0.3)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        wanted = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=0.3)
    assert_same(found, wanted)
    for one, of_torch in zip(gradients(found, q, k, v), gradients(wanted, q, k, v), strict=True):
        assert_same(one, of_torch)


WRONG = {
    "dimensions": ({"x": torch.zeros(5, 4)}, "product: x must have 3 dimensions, got shape"),
    "size": ({"x_size": [5, 4]}, "product: x_size must have 3 dimensions, got"),
    "type": ({"other": torch.zeros(3, 4, 2, dtype=torch.float64)}, "other must have the dtype of x, Float, got Double"),
    "integers": ({"x": torch.zeros(3, 5, 4, dtype=torch.int32)}, "x must be float32, float64, bfloat16 or float16"),
    "features": ({"other": torch.zeros(3, 5, 2)}, "other must have shape .batch, features, columns. for x of shape"),
    "codes": (
        {"x_codes": torch.zeros(3, 5, 3, dtype=torch.int8)},
        "x_codes must have the shape x_size, .* or be packed",
    ),
    "type of codes": ({"x_codes": torch.zeros(3, 5, 4)}, "x_codes must have an integer dtype, got Float"),
    "scale": ({"x_scale": None}, "x_codes require x_scale, got None"),
    "computed": ({"computed": torch.zeros(3, 5)}, "computed must have the shape .3, 5, 2., got"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_errors(wrong):
    x, other = torch.zeros(3, 5, 4), torch.zeros(3, 4, 2)
    names = [argument.name for argument in native.product.default._schema.arguments]
    given = dict(zip(names, (*told(x, "bytes"), *told(other, "bytes"), None), strict=True))
    native.product(**given)
    arguments, sentence = WRONG[wrong]
    with pytest.raises((ValueError, TypeError), match=sentence):
        native.product(**{**given, **arguments})


@pytest.mark.parametrize("op", ["product", "fused_attention"])
def test_double_backward_is_refused(op):
    if op == "product":
        x = on_grid(torch.float32, 1, 2, 3, 4)
        y = native.product(*told(x, "bytes"), *told(x.transpose(1, 2), "bytes"))
    else:
        x = on_grid(torch.float32, 1, 2, 3, 9, 8)
        y = native.fused_attention(*told(x, "bytes")[:4] * 3, x.shape, [True] * 3, False, None)[0]
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=f"^{op}: double backward is not supported; compute the first"):
        first.sum().backward()
