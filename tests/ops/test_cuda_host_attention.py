"""CUDA's weights of an attention executed on the CPU (see cuda_host), in three orders of their threads."""

import ctypes

import pytest
import torch
from torch import Tensor

from qtoolkit import ops
from tests.cases import assert_same, floats, name_of
from tests.ops.cuda_host import ORDERS, AttentionWeights, ScoreRows, compiled, dtype_number, filled

pytestmark = pytest.mark.slow  # the kernels are compiled for the host

LENGTHS = (1, 7, 32, 197, 256, 257, 1024, 1025, 3000)
ROWS, QMIN, QMAX = 11, 0, 250
TYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
]
GRIDS = {"fixed": 0.004, "learned": -0.004, "affine": 0.004, "tiny": 1e-20}


@pytest.fixture(scope="module")
def kernels() -> ctypes.CDLL:
    return compiled()


def run(kernels, scores: Tensor, length: int, dtype: torch.dtype, grad: Tensor | None = None, **grid) -> list[Tensor]:
    """Weights, gradients of the scores and sums of the kernel: the same in all orders. A row has a gap behind it."""
    found = {}
    for order in ORDERS:
        x, sums = scores.clone(), torch.full((2,), torch.nan, dtype=torch.float64)
        weights = x if x.dtype == dtype else torch.full(x.shape, 7.0, dtype=dtype)
        args = filled(
            AttentionWeights,
            rows=ROWS,
            length=length,
            scores=(x.data_ptr(), x.stride(0), dtype_number(x)),
            weights=(weights.data_ptr(), x.stride(0), dtype_number(weights)),
            bounds=(float(QMIN), float(QMAX)),
            sums=sums if grad is not None and grid else None,
            **grid,
        )
        if grad is not None:
            of_weights = grad.clone()
            args.grad = ScoreRows(of_weights.data_ptr(), grad.stride(0), dtype_number(grad))
        kernels.launches()
        kernels.attention_weights_on_host(ctypes.byref(args), ORDERS[order])
        assert kernels.launches() == (2 if args.sums else 1)
        found[order] = [weights, sums if grad is None else of_weights, sums]
        for got, first in zip(found[order], found["forwards"], strict=True):
            assert_same(got, first)
    for each in (weights, *([] if grad is None else [of_weights])):
        assert not each[:, length:].any()  # zeros, for products of matrices
    return [each[:, :length] if each.dim() == 2 else each for each in found["forwards"]]


def softmax(kernels, scores: Tensor, length: int) -> Tensor:
    """The kernel's own, in float32, which is the softmax up to rounding."""
    x = scores.float()
    z, *_ = run(kernels, x, length, torch.float32)
    torch.testing.assert_close(z.double(), x[:, :length].double().softmax(1), rtol=1e-5, atol=1e-12)
    return z


@pytest.mark.sweep(2)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("types", TYPES, ids=lambda types: "-".join(map(name_of, types)))
@pytest.mark.parametrize("kind", ["none", *GRIDS])
def test_weights_and_gradients(kernels, length, types, kind):
    """From the softmax on, weights have the bits of fake_quant."""
    of_scores, dtype = types
    stride = (length + 7) // 8 * 8
    scores = (floats(torch.float32)(ROWS, stride) / 10).to(of_scores)
    grad = (floats(torch.float32, 3)(ROWS, stride) / 10).to(dtype)
    z = softmax(kernels, scores, length)
    grid = {} if kind == "none" else {"scale": torch.tensor(GRIDS[kind])}
    if kind == "affine":
        grid["zero_point"] = torch.tensor(2.6)
    arguments = (grid.get("scale"), grid.get("zero_point"), QMIN, QMAX)
    wanted = z if kind == "none" else ops.fake_quant(z, *arguments)

    assert_same(run(kernels, scores, length, dtype, **grid)[0], wanted.to(dtype))
    weights, found, sums = run(kernels, scores, length, dtype, grad, **grid)
    assert_same(weights, wanted.to(dtype))
    g = grad[:, :length].float()
    dz, *terms = (g, None, None)
    if kind != "none":
        dz, *terms = torch.ops.qtoolkit.fake_quant_learned_backward(g, z, *arguments, None, 1, 0, 1.0)
    dz, z = dz.double(), z.double()
    of_rows = z * (dz - (dz * z).sum(1, keepdim=True))
    torch.testing.assert_close(found.double(), of_rows, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    if kind == "none":
        return
    rounding = 1e-6 * QMAX * float(g.abs().sum())
    sign = -1 if GRIDS[kind] < 0 else 1
    assert abs(sign * float(sums[0]) - float(terms[0])) <= rounding
    assert abs(float(sums[1]) - float(terms[1].sum())) <= rounding or kind != "affine"


def test_rows_that_are_masked_or_not_numbers(kernels):
    """As torch: a row of minus infinities, or with a NaN, gives NaN; minus infinity among numbers gives 0."""
    scores = torch.zeros(ROWS, 8)
    scores[0], scores[1, 3], scores[2, 3], scores[3, 3] = -torch.inf, torch.nan, -torch.inf, torch.inf
    grid = {"scale": torch.tensor(1 / 250)}
    z = scores.softmax(1)
    assert_same(run(kernels, scores, 8, torch.float32, **grid)[0], ops.fake_quant(z, grid["scale"], None, QMIN, QMAX))
