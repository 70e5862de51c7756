"""CUDA's functions with their quantizers executed on the CPU (see cuda_host), in three orders of their threads."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases import assert_same
from tests.ops.cuda_host import ORDERS, compiled, on_host

pytestmark = pytest.mark.slow  # the kernels are compiled for the host

op = torch.ops.qtoolkit.function_fake_quant
adding_op = torch.ops.qtoolkit.add_norm_fake_quant
# Rows in a warp with one to four vectors a thread, and in a block; a last block without all of its rows.
SHAPES = {(37, 8): 1, (2, 9, 264): 1, (3, 520): 1, (2, 3, 4, 192): 2, (5, 776): 1, (3, 1032): 1, (2, 4104): 1}
KINDS: dict[str, dict[str, Any]] = {
    "fixed": {},
    "learned": {"learned": True},
    "affine": {"learned": True, "zero_point": True, "bounds": (0, 255)},
    "4 bits": {"bounds": (-8, 7), "scale": 0.3},
    "no parameters": {"learned": True, "affine": False},
    "no codes": {"with_codes": False},
    "a negative scale": {"learned": True, "scale": -0.03},
    "a scale that divides nothing": {"learned": True, "scale": 1e-20},
}
OF_ELEMENTS = [*KINDS][:-1]  # on the finest grid, what cancels to 0 decides
OF_ELEMENTS.remove("no parameters")


def step(
    x: Tensor,
    function: str,
    dims: int = 0,
    dtype: torch.dtype | None = None,
    learned: bool = False,
    zero_point: bool = False,
    bounds: tuple[int, int] = (-128, 127),
    scale: float = 0.03,
    affine: bool = True,
    with_codes: bool = True,
    residual: Tensor | None = None,
    taken: str = "norm, sum",
    eps: float = 1e-5,
) -> list[Tensor]:
    """Return the results of the op, and the gradients of all of its tensors.

    With a residual these are of the op that adds it first; `taken` has which of its results the loss is computed from.
    """
    generator = torch.Generator().manual_seed(0)
    own = x.shape[x.dim() - dims :]
    x = x.detach().requires_grad_()
    count = 0 if not (dims and affine) else 1 if function == "rms_norm" else 2
    parameters = [(1 + torch.randn(own, generator=generator) / 4).requires_grad_() for _ in range(count)]
    grid = [torch.tensor([scale], requires_grad=learned)]
    grid += [torch.tensor([117.0], requires_grad=learned)] if zero_point else []
    weight, bias = [*parameters, None, None][:2]
    start, more = (grid[0], None, None, grid[1] if zero_point else None), (0.5, False, learned, with_codes)
    norm = (function, list(own), weight, bias, eps)
    inputs = [x, *parameters, *(grid if learned else [])]
    if residual is None:
        found = op(x, *norm, function != "heads" or learned, *start, *bounds, *more, dtype)
        ends = {"norm": found[0]}
    else:
        inputs.append(residual.detach().requires_grad_())
        found = adding_op(x, inputs[-1], *norm, *start, [*bounds], *more, dtype)
        ends = {"norm": found[0], "sum": found[-1]}
        ends = {name: y for name, y in ends.items() if name in taken}
    grads = [torch.randn(x.shape, generator=generator).to(y.dtype) for y in ends.values()]
    gradients = torch.autograd.grad([*ends.values()], inputs, grads, allow_unused=True)
    return [*(t.detach() for t in found), *(g for g in gradients if g is not None)]


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 2 + 0.5


def compare(x: Tensor, *arguments: Any, near: float = 1e-4, **kind: Any) -> None:
    """Compare a step in all orders, whose bits are the same, with torch's ops.

    Before the quantizer the last bits may differ: a few values may take the next code, which its mask, its gradient and
    the sums of gradients follow.
    """
    wanted = step(x, *arguments, **kind)
    first: list[Tensor] = []
    for order in ORDERS:
        with on_host(order):
            found = step(x, *arguments, **kind)
        first = first or found
        for got, before in zip(found, first, strict=True):
            assert_same(got, before)
    for got, want in zip(found, wanted, strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        # The gradient of heads is in the order of their view.
        assert got.stride() == want.stride() or "heads" in arguments
        largest = max([1.0, *want.double().abs().flatten().tolist()])
        far = (got.double() - want.double()).abs() > near * largest
        assert far.sum() <= want.numel() // 100, (got, want)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_norms_with_quantizers(norm: str, shape: tuple[int, ...], kind: str, dtype: torch.dtype | None) -> None:
    compare(values(*shape), norm, SHAPES[shape], dtype, **KINDS[kind])


@pytest.mark.sweep(2)
@pytest.mark.parametrize("types", ["float32", "float32, bfloat16", "bfloat16, float32", "float32, float16"])
@pytest.mark.parametrize("taken", ["norm, sum", "norm", "sum"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_norms_of_sums(norm: str, shape: tuple[int, ...], kind: str, taken: str, types: str) -> None:
    """Of tensors of one type and of two, in both orders, whose sum is used elsewhere or not, or is all that is used."""
    first, *second = (getattr(torch, name) for name in types.split(", "))
    x, residual = values(*shape), values(*shape).flip(0) / 3
    dtype = second[0] if second else None
    residual = residual.to(second[0] if second else first)
    compare(x.to(first), norm, SHAPES[shape], dtype, residual=residual, taken=taken, **KINDS[kind])


def test_sums_that_the_kernel_does_not_take() -> None:
    """Of two narrow types, of float64, and of rows that are not dense."""
    x = values(4, 8)
    for one, other in ((x.half(), x.bfloat16()), (x.double(), x), (x, x.double()), (x, values(4, 16)[:, ::2])):
        compare(
            one, "layer_norm", 1, residual=other, affine=one.dtype != torch.float64 and other.dtype != torch.float64
        )


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", OF_ELEMENTS)
@pytest.mark.parametrize("function", ["none", "gelu", "gelu_tanh", "silu"])
def test_functions_of_an_element_with_quantizers(function: str, kind: str, dtype: torch.dtype) -> None:
    near = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    for x in (values(3, 5, 7), values(2, 8, 6, 6).contiguous(memory_format=torch.channels_last), values(5003)):
        compare(x.to(dtype), function, near=near, **KINDS[kind])


HEADS: dict[str, Callable[[Tensor], Tensor]] = {  # of (batch, places, 3 * heads * features), and the places first
    "a part of a projection": lambda x: x[..., 48:96].unflatten(2, (3, 16)).transpose(1, 2),
    "a projection": lambda x: x.unflatten(2, (9, 16)).transpose(1, 2),
    "the places first": lambda x: x[..., 48:96].unflatten(2, (3, 16)).permute(1, 2, 0, 3),
    "in order": lambda x: x.unflatten(2, (9, 16)).transpose(1, 2).contiguous(),
    "other features": lambda x: x[..., 3:93].unflatten(2, (9, 10)).transpose(1, 2),
    "not aligned": lambda x: x[..., 3:99].unflatten(2, (6, 16)).transpose(1, 2),
    "features apart": lambda x: x.unflatten(2, (16, 9)).permute(0, 3, 1, 2),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", OF_ELEMENTS)
@pytest.mark.parametrize("factor", [1.0, 0.3])
@pytest.mark.parametrize("view", HEADS)
def test_heads_with_quantizers(view: str, factor: float, kind: str, dtype: torch.dtype) -> None:
    """The views that the kernel reads where they are, and others."""
    near = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    x = HEADS[view](values(2, 37, 144).to(dtype))
    compare(x, "heads", eps=factor, near=near, **KINDS[kind])


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_other_rows_are_normalized_by_torch(norm: str) -> None:
    """Of no whole vectors, of none, and in other types."""
    for x in (values(4, 6), values(0, 8), values(3, 8).double(), values(4, 12)[:, ::2]):
        with on_host("forwards"):
            found = torch.ops.qtoolkit.function_fake_quant(
                x,
                norm,
                [x.size(1)],
                None,
                None,
                1e-5,
                True,
                torch.ones(1),
                *[None] * 3,
                -8,
                7,
                1.0,
                False,
                True,
                True,
            )
        function = torch.nn.functional.layer_norm if norm == "layer_norm" else torch.nn.functional.rms_norm
        wanted = function(x, (x.size(1),), eps=1e-5).round()
        torch.testing.assert_close(found[0], wanted)


@pytest.mark.parametrize(
    ("function", "learned", "most"),
    [
        ("layer_norm", True, 3),
        ("layer_norm", False, 3),
        ("rms_norm", True, 3),
        ("gelu", True, 3),
        ("gelu", False, 2),
        ("none", True, 3),
        ("none", False, 2),
    ],
)
def test_launches(function: str, learned: bool, most: int) -> None:
    """The function with its scale; backward: the function, and its sums over blocks with the gradient of the scale."""
    x = values(9, 768)
    for residual in (None, x.bfloat16()) if "norm" in function else (None,):
        with on_host("forwards"):
            compiled().launches()
            step(x, function, int("norm" in function), learned=learned, residual=residual)
            assert compiled().launches() == most
