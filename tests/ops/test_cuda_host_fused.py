"""CUDA's batch norm and max pooling executed on the CPU (see cuda_host), in three orders of their threads."""

import ctypes
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from qtoolkit import ops
from qtoolkit.quantizers.bias import bias_scale, on_grid
from tests import reference
from tests.cases import FLOATS, assert_same, floats, name_of
from tests.ops.cuda_host import (
    ORDERS,
    BatchNormArguments,
    FactorChange,
    FollowedScale,
    HeldVariance,
    PoolArguments,
    RatioGradient,
    TrackedStatistics,
    TrainedScale,
    UnitBias,
    UnitGradients,
    UnitScales,
    WeightRows,
    compiled,
    dtype_number,
    filled,
    guarded,
)
from tests.ops.test_batch_norm import ACTIVATIONS, tensors
from tests.ops.test_max_pool import SHAPES as IMAGES
from tests.ops.test_max_pool import WINDOWS, values
from tests.reference import Normalized, wide

pytestmark = pytest.mark.slow  # the kernels are compiled for the host

native = torch.ops.qtoolkit
SHAPES = {
    "planes": (4, 6, 5, 7),
    "whole_vectors": (4, 6, 8, 8),
    "slices": (200, 3, 25),
    "rows": (37, 100),
    "one_channel": (3, 1, 9, 50),
    "vectors_of_channels": (3, 24, 5, 7),
    "a_vector_of_channels": (70, 8, 3, 3),
    "tiles_of_channels": (19, 520),
    "threads_without_rows": (1, 512, 7, 7),
    "a_tile_of_few_channels": (5, 264, 1, 1),
}
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)


@pytest.fixture
def kernels() -> Iterator[ctypes.CDLL]:
    with guarded():
        yield compiled()


def in_arithmetic(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if t is None else t.to(torch.float64 if dtype == torch.float64 else torch.float32)


def norm_fields(given: dict, activation: str, last: bool) -> dict:
    """Fields of BatchNormArguments; the caller keeps them for as long as the kernels run."""
    x = given["x"]
    rows = last or x.size(1) == 1 or x.numel() == x.size(0) * x.size(1)
    inner = 1 if rows else x.numel() // (x.size(0) * x.size(1))
    names = ("weight", "bias", "divisor", "scale", "zero_point", "residual_scale", "residual_zero_point")
    low, high, slope = ACTIVATIONS[activation]
    by_codes = given.get("residual_codes") is not None
    return {
        "outer": x.numel() // (x.size(1) * inner),
        "channels": x.size(1),
        "inner": inner,
        "dtype": dtype_number(x),
        "x": x,
        "eps": 1e-3,
        "low": low,
        "high": high,
        "slope": slope,
        **{name: in_arithmetic(given.get(name), x.dtype) for name in names},
        "residual": None if by_codes else given.get("residual"),
        "residual_codes": given.get("residual_codes"),
        "residual_signed": True,
        "bounds": (-20.0, 30.0),
    }


def statistics(given: dict) -> list[Tensor]:
    x = wide(given["x"])
    variance, mean = torch.var_mean(x, [0, *range(2, x.dim())], correction=0)
    return [mean, variance]


def normalized(given: dict, activation: str, mean: Tensor, variance: Tensor) -> Normalized:
    low, high, slope = ACTIVATIONS[activation]
    t = {name: given.get(name) for name in ("x", "weight", "bias", "divisor", "residual", "scale", "zero_point")}
    return Normalized(**t, mean=mean, variance=variance, eps=1e-3, low=low, high=high, slope=slope, qmin=-20, qmax=30)


def cases() -> list:
    last = {4: torch.channels_last}
    return [(shape, bool(f)) for shape in SHAPES.values() for f in (0, last.get(len(shape))) if f is not None]


def over_cases(test: Callable) -> Callable:
    """Run a test over a sample of all layouts, dtypes and parts of the op."""
    marks = (
        pytest.mark.parametrize(("shape", "last"), cases(), ids=str),
        dtypes,
        pytest.mark.parametrize("quantized", [False, True]),
        pytest.mark.parametrize("residual", ["none", "values", "codes"]),
        pytest.mark.parametrize("activation", ["none", "relu6", "leaky"]),
        pytest.mark.sweep(2),
    )
    for mark in marks:
        test = mark(test)
    return test


@over_cases
def test_batch_norm(kernels, shape, last, dtype, quantized, residual, activation):
    """Statistics within rounding; from them on, the bits of the oracle."""
    given = tensors(shape, dtype, last=last, residual=residual, quantized=quantized)
    wanted_mean, wanted_variance = statistics({"x": given["x"].double()})
    fields, found = norm_fields(given, activation, last), {}
    for order in ORDERS:
        mean, variance = (torch.full((shape[1],), math.nan, dtype=wide(given["x"]).dtype) for _ in range(2))
        y, codes = torch.full_like(given["x"], 7), torch.full_like(given["x"], 7, dtype=torch.int8)
        results = {"mean": mean, "variance": variance, "y": y, "codes": codes if quantized else None}
        kernels.batch_norm_forward_on_host(ctypes.byref(filled(BatchNormArguments, **fields, **results)), ORDERS[order])
        found[order] = [mean, variance, y, codes]
        for got, first in zip(found[order], found["forwards"], strict=True):
            assert_same(got, first)
    rtol = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(mean.double(), wanted_mean, rtol=rtol, atol=rtol)
    torch.testing.assert_close(variance.double(), wanted_variance, rtol=rtol, atol=0.0)
    wanted = normalized(given, activation, mean, variance)
    assert_same(y, wanted.y())
    if quantized:
        grid = [in_arithmetic(given[name], dtype) for name in ("scale", "zero_point")]
        assert_same(codes, ops.quantize(wanted.value, *grid, -20, 30))


@pytest.mark.parametrize("last", [False, True])
def test_an_outlier_in_front_changes_no_statistics(kernels, last):
    x = floats(torch.float32)(16, 2, 40, 40) + 5
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    x[0, :, 0, 0] = 3000.0
    fields = norm_fields({"x": x}, "none", last)
    mean, variance, y = torch.zeros(2), torch.zeros(2), torch.empty_like(x)
    results = {"mean": mean, "variance": variance, "y": y}
    kernels.batch_norm_forward_on_host(ctypes.byref(filled(BatchNormArguments, **fields, **results)), 0)
    for found, wanted in zip((mean, variance), statistics({"x": x.double()}), strict=True):
        # Seven squares about the outlier, each as large as the variance's whole sum, have up to six roundings in float32.
        torch.testing.assert_close(found.double(), wanted, rtol=7 * 6 * 2.0**-24, atol=0.0)


@over_cases
def test_batch_norm_backward(kernels, shape, last, dtype, quantized, residual, activation):
    """The gradient of the residual bit for bit; sums are added in another order than on the CPU."""
    given = tensors(shape, dtype, last=last, residual=residual, quantized=quantized)
    mean, variance = statistics(given)
    grad = torch.empty_like(given["x"]).copy_(floats(dtype, 3)(*shape))
    low, high, slope = ACTIVATIONS[activation]
    head = [given.get(n) for n in ("weight", "bias", "divisor", "residual")]
    rebuilt = [given.get(n) for n in ("residual_codes", "residual_scale", "residual_zero_point")]
    tail = (1e-3, [low, high, slope], given.get("scale"), given.get("zero_point"), [-20, 30])
    wanted = native.batch_norm_fake_quant_backward(grad, given["x"], mean, variance, [True] * 7, *head, *rebuilt, *tail)
    fields, found = norm_fields(given, activation, last), {}
    for order in ORDERS:
        dx, dresidual = torch.full_like(grad, 7), torch.full_like(grad, 7)
        gradients = torch.full((3 * shape[1] + 2,), math.nan, dtype=torch.float64)
        results = {"y": dx, "residual_grad": dresidual, "gradients": gradients, "learned": quantized}
        args = filled(BatchNormArguments, **fields, **results, grad=grad, mean=mean, variance=variance)
        kernels.batch_norm_backward_on_host(ctypes.byref(args), ORDERS[order])
        found[order] = [dx, dresidual, gradients[: None if quantized else -2]]
        for got, first in zip(found[order], found["forwards"], strict=True):
            assert_same(got, first)
    assert_same(dresidual, wanted[4])
    near = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 1e-3 * float(wanted[0].abs().max())}
    torch.testing.assert_close(dx, wanted[0], **near)
    rows = [*gradients[:-2].view(3, -1), *(gradients[-2:, None] if quantized else ())]
    for got, want in zip(rows, [*wanted[1:4], *(wanted[5:] if quantized else ())], strict=True):
        unit = 1e-10 if dtype == torch.float64 else max(torch.finfo(want.dtype).eps, 1e-4)
        scale = float(want.double().abs().max())
        torch.testing.assert_close(got, want.double().reshape(got.shape), rtol=4 * unit, atol=unit * scale)


def shares(given: dict, counts: list[int], last: bool) -> list[dict]:
    """The tensors of each rank: x, grad and residual divided, the others shared."""
    kept = {"memory_format": torch.channels_last} if last else {}
    divided = [
        {n: t.contiguous(**kept) for n in ("x", "grad", "residual") for t in [given[n].split(counts)[i]]}
        for i in range(2)
    ]
    return [given | each for each in divided]


@dtypes
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(("shape", "last"), cases(), ids=str)
def test_batch_norm_of_two_ranks(kernels, shape, last, dtype, first):
    """Each rank computes two halves, around the sums of both; from the statistics on, the bits of the oracle."""
    given = tensors(shape, dtype, last=last, residual="values")
    given["grad"] = torch.empty_like(given["x"]).copy_(floats(dtype, 3)(*shape))
    ranks = shares(given, [first, shape[0] - first], last)
    wanted_mean, wanted_variance = statistics({"x": given["x"].double()})
    fields = [norm_fields(rank, "relu6", last) for rank in ranks]

    def launch(direction: str, rank: int, **results: object) -> None:
        call = getattr(kernels, f"batch_norm_{direction}_on_host")
        call(ctypes.byref(filled(BatchNormArguments, **fields[rank], **results)), 0)

    def totals_of(direction: str, **results: object) -> list[Tensor]:
        found = [torch.zeros(2 * shape[1] + 1, dtype=torch.float64) for _ in ranks]
        for rank, totals in enumerate(found):
            if ranks[rank]["x"].numel():
                own = {name: each[rank] for name, each in results.items()}
                launch(direction, rank, stage=1, totals=totals, **own)
        return found

    own = totals_of("forward")
    for found, rank in zip(own, ranks, strict=True):
        near = native.batch_norm_totals(rank["x"], rank["divisor"], None)[1]
        torch.testing.assert_close(found, near, rtol=1e-6, atol=1e-6 * float(near.abs().max()))
    for rank, of in enumerate(ranks):
        mean, variance = (torch.full((shape[1],), math.nan, dtype=wide(given["x"]).dtype) for _ in range(2))
        y, codes = torch.full_like(of["x"], 7), torch.full_like(of["x"], 7, dtype=torch.int8)
        launch("forward", rank, stage=2, totals=own[0] + own[1], mean=mean, variance=variance, y=y, codes=codes)
        rtol = 1e-12 if dtype == torch.float64 else 1e-5
        torch.testing.assert_close(mean.double(), wanted_mean, rtol=rtol, atol=rtol)
        torch.testing.assert_close(variance.double(), wanted_variance, rtol=rtol, atol=0.0)
        assert_same(y, normalized(of, "relu6", mean, variance).y())

    mean, variance = statistics(given)
    head = [given.get(n) for n in ("weight", "bias", "divisor", "residual")]
    tail = (None, None, None, 1e-3, [0.0, 6.0, 0.0], given["scale"], given["zero_point"], [-20, 30])
    of_rows = (given["grad"], given["x"], mean, variance, [True] * 7)
    wanted = native.batch_norm_fake_quant_backward(*of_rows, *head, *tail)
    gradients = [torch.zeros(3 * shape[1] + 2, dtype=torch.float64) for _ in ranks]
    both = {
        "mean": [mean] * 2,
        "variance": [variance] * 2,
        "learned": [True] * 2,
        "grad": [rank["grad"] for rank in ranks],
    }
    totals = totals_of("backward", gradients=gradients, **both)
    dx = [torch.full_like(rank["grad"], 7) for rank in ranks]
    dresidual = [torch.full_like(rank["grad"], 7) for rank in ranks]
    for rank in range(2):
        given_too = {name: each[rank] for name, each in both.items()} | {"gradients": gradients[rank], "own": own[rank]}
        results = {"y": dx[rank], "residual_grad": dresidual[rank]}
        launch("backward", rank, stage=2, totals=totals[0] + totals[1], **given_too, **results)
    assert_same(torch.cat(dresidual), wanted[4])
    near = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 1e-3 * float(wanted[0].abs().max())}
    torch.testing.assert_close(torch.cat(dx), wanted[0], **near)
    # What cancels out in the gradient of the divisor.
    large = float((wanted[1].double() * wide(given["weight"]).double() / wide(given["divisor"]).double()).abs().max())
    sums = gradients[0] + gradients[1]
    for name, got, want in zip(("weight", "bias", "divisor"), sums[:-2].view(3, -1), wanted[1:4], strict=True):
        unit = 1e-10 if dtype == torch.float64 else max(torch.finfo(want.dtype).eps, 1e-4)
        largest = max(float(want.double().abs().max()), large if name == "divisor" else 0.0)
        torch.testing.assert_close(got, want.double(), rtol=4 * unit, atol=unit * largest, msg=name)


def shifted(t: Tensor) -> Tensor:
    """The same tensor in the same layout, an element behind an address that vectors are loaded from."""
    flat = torch.empty(t.numel() + 1, dtype=t.dtype)[1:]
    return flat.as_strided(t.shape, t.stride()).copy_(t)


@pytest.mark.parametrize("change", ["misaligned", "symmetric", "special"])
@pytest.mark.parametrize(("shape", "last"), cases(), ids=str)
@dtypes
def test_batch_norm_of_any_memory_grid_and_values(kernels, shape, last, dtype, change):
    """Both directions: element by element the bits of the CPU, from the same statistics."""
    given = tensors(shape, dtype, last=last, residual="values")
    if change == "symmetric":
        del given["zero_point"]
    if change == "special":
        for place, value in enumerate((math.nan, math.inf, -math.inf, -0.0, 3e38 if dtype != torch.float16 else 6e4)):
            given["residual"][place % shape[0], place % shape[1]].fill_(value)
    mean, variance = statistics(given)
    grad = torch.empty_like(given["x"]).copy_(floats(dtype, 3)(*shape))
    head = [given.get(n) for n in ("weight", "bias", "divisor", "residual")]
    low, high, slope = ACTIVATIONS["relu6"]
    tail = (None, None, None, 1e-3, [low, high, slope], given["scale"], given.get("zero_point"), [-20, 30])
    wanted = native.batch_norm_fake_quant_backward(grad, given["x"], mean, variance, [True] * 7, *head, *tail)
    new = [torch.full_like(grad, 7) for _ in range(3)]
    if change == "misaligned":
        given |= {name: shifted(given[name]) for name in ("x", "residual", "weight", "bias")}
        grad, *new = map(shifted, (grad, *new))
    y, dx, dresidual = new
    fields = norm_fields(given, "relu6", last)
    gradients = torch.full((3 * shape[1] + 2,), math.nan, dtype=torch.float64)
    results = {"y": dx, "residual_grad": dresidual, "gradients": gradients, "learned": True}
    args = filled(BatchNormArguments, **fields, **results, grad=grad, mean=mean, variance=variance)
    kernels.batch_norm_backward_on_host(ctypes.byref(args), 0)
    assert_same(dresidual, wanted[4])
    unit = 1e-10 if dtype == torch.float64 else 1e-4
    for row, want in zip(gradients[:-2].view(3, -1), wanted[1:4], strict=True):
        bound = float(want.double().nan_to_num(0, 0, 0).abs().max())
        near = {"rtol": 4 * max(torch.finfo(want.dtype).eps, unit), "atol": unit * bound, "equal_nan": True}
        torch.testing.assert_close(row, want.double(), **near)
    torch.testing.assert_close(
        gradients[-2:-1],
        wanted[5].double().reshape(1),
        rtol=4 * max(torch.finfo(dtype).eps, unit),
        atol=0,
        equal_nan=True,
    )
    found = [torch.zeros_like(mean), torch.zeros_like(variance)]
    args = filled(BatchNormArguments, **fields, y=y, mean=found[0], variance=found[1])
    kernels.batch_norm_forward_on_host(ctypes.byref(args), 0)
    assert_same(y, normalized(given, "relu6", *found).y())


@dtypes
@pytest.mark.parametrize("f64", [False, True])
def test_tracking(kernels, dtype, f64):
    kept = torch.float64 if f64 else torch.float32
    running = [torch.randn(300).to(dtype), torch.rand(300).to(dtype)]
    batch = [torch.randn(300).to(kept), torch.rand(300).to(kept)]
    divisor, offset = torch.rand(300).to(kept) + 1, torch.randn(300).to(kept)
    got = [t.clone() for t in running]
    ops.batch_norm_track_(*running, *batch, 0.1, 9, divisor=divisor, offset=offset)
    names = ("running_mean", "running_variance", "mean", "variance", "divisor", "offset")
    fields = dict(zip(names, (*got, *batch, divisor, offset), strict=True))
    batches = torch.tensor(3)
    more = {
        "channels": 300,
        "dtype": dtype_number(got[0]),
        "f64": f64,
        "momentum": 0.1,
        "count": 9.0,
        "batches": batches,
    }
    kernels.batch_norm_track_on_host(ctypes.byref(filled(TrackedStatistics, **fields, **more)))
    for g, w in zip(got, running, strict=True):
        assert_same(g, w)
    totals = torch.full((2, 601), 7.0, dtype=torch.float64)
    ops.batch_norm_track_(*running, *batch, 0.1, 9, divisor=divisor, offset=offset, totals=totals)
    kernels.batch_norm_track_on_host(ctypes.byref(filled(TrackedStatistics, **fields, **more, counted=totals[0, -1:])))
    for g, w in zip(got, running, strict=True):
        assert_same(g, w)
    assert batches == 5


WEIGHTS = {
    "linear": (20, 37),
    "whole_vectors": (9, 16, 3, 3),
    "depthwise": (40, 1, 3, 3),
    "image": (7, 3, 7, 7),
    "long": (3, 5000),
}


@pytest.mark.parametrize("given_dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=name_of)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("shape", WEIGHTS.values(), ids=WEIGHTS)
def test_weight(kernels, shape, shared, folded, turned, given_dtype):
    """Values and the weight's gradient with the bits of the CPU; 16-bit values and gradients are beside a float32 weight."""
    if turned and len(shape) != 4:
        pytest.skip("only images have another memory format")
    dtype = torch.float64 if given_dtype == torch.float64 else torch.float32
    rows = shape[0]
    weight = floats(dtype)(*shape).clone()
    weight.view(-1)[:3] = torch.tensor([torch.nan, torch.inf, -0.0])
    scale = (torch.rand(1 if shared else rows) + 0.1).to(dtype)
    factor = torch.randn(rows).to(dtype) if folded else None
    over = torch.ones(rows, dtype=dtype) if factor is None else factor
    product = (weight * over.view(-1, *[1] * (len(shape) - 1))).requires_grad_()
    of_scale = scale.clone().requires_grad_()
    wanted = ops.fake_quant(product, of_scale, None, -7, 7, axis=None if shared else 0)
    grad = floats(dtype, 3)(*shape).to(given_dtype)
    passed, ds = torch.autograd.grad(wanted, (product, of_scale), grad.to(dtype))
    y, dweight = torch.full(shape, 7.0, dtype=given_dtype), torch.full_like(weight, 7)
    if turned:
        y, grad = (t.contiguous(memory_format=torch.channels_last) for t in (y, grad))
    sums = torch.full((2, rows), torch.nan, dtype=torch.float64)
    major = shape[1]
    fields = {"rows": rows, "major": major, "minor": weight[0].numel() // major, "f64": dtype == torch.float64}
    fields |= {
        "weight": weight,
        "factor": factor,
        "scale": scale,
        "scale_step": 0 if shared else 1,
        "bounds": (-7.0, 7.0),
    }
    fields |= {
        "other_format": turned,
        "y": y,
        "y_dtype": dtype_number(y),
        "grad": grad,
        "grad_dtype": dtype_number(grad),
    }
    args = filled(WeightRows, **fields, dweight=dweight, sum_scale=sums[0], sum_factor=sums[1])
    for order in ORDERS.values():
        kernels.weight_forward_on_host(ctypes.byref(args), None, order)
        assert_same(y, wanted.detach().to(given_dtype))
        kernels.weight_backward_on_host(ctypes.byref(args), order)
        assert_same(dweight, passed * over.view(-1, *[1] * (len(shape) - 1)))
        of_factor = (passed * weight).double().flatten(1).sum(1)
        near = {"rtol": 1e-4, "atol": 1e-4 * float(of_factor.nan_to_num(0, 0, 0).abs().max()), "equal_nan": True}
        torch.testing.assert_close(sums[1], of_factor, **near)
        found = sums[0].sum(0, keepdim=True) if shared else sums[0]
        torch.testing.assert_close(
            found, ds.double(), **{**near, "atol": 1e-4 * float(ds.nan_to_num(0, 0, 0).abs().max())}
        )


@pytest.mark.parametrize("given_dtype", [torch.float32, torch.float64, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("float16", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("shape", [*WEIGHTS.values(), (3000, 1)], ids=[*WEIGHTS, "rows of one element"])
def test_weight_with_the_small_tensors_of_its_unit(kernels, shape, shared, float16, folded, turned, given_dtype):
    """One launch writes what two write: the scales, the factor, the bias on the grid of the sums, and the weight."""
    if turned and len(shape) != 4:
        pytest.skip("only images have another memory format")
    f64, rows = given_dtype == torch.float64, shape[0]
    dtype = torch.float64 if f64 else torch.float32
    weight = floats(dtype)(*shape)
    given = {name: floats(dtype, seed)(rows).abs() + 0.1 for seed, name in enumerate(("variance", "gamma", "start"))}
    given["gamma"][:2] = torch.tensor([0.0, -1.0])
    start = given["start"][: 1 if shared else rows]
    ratio, bias, x_scale = torch.full_like(start, -1.5), floats(dtype, 5)(rows), torch.tensor([0.03], dtype=dtype)

    def launched(together: bool, order: int) -> dict[str, Tensor]:
        wanted = {"scale": start, "factor": bias, "y_scale": start[:1], "bias": bias, "y": weight.to(given_dtype)}
        out = {name: torch.full_like(like, 7) for name, like in wanted.items()}
        if turned:
            out["y"] = out["y"].contiguous(memory_format=torch.channels_last)
        norm = {"variance": given["variance"], "gamma": given["gamma"], "factor": out["factor"]} if folded else {}
        u = filled(UnitScales, f64=f64, channels=rows, eps=1e-5, **norm)
        u.weight = filled(
            TrainedScale, count=start.numel(), start=start, ratio=ratio, scale=out["scale"], float16=float16
        )
        u.output = filled(TrainedScale, count=1, start=start[:1], scale=out["y_scale"])
        u.bias = filled(UnitBias, bias=bias, x_scale=x_scale, result=out["bias"], dtype=dtype_number(bias))
        fields = {"rows": rows, "major": shape[1], "minor": weight[0].numel() // shape[1], "f64": f64, "weight": weight}
        fields |= {"factor": out["factor"] if folded else None, "scale": out["scale"], "scale_step": 0 if shared else 1}
        fields |= {"bounds": (-7.0, 7.0), "other_format": turned, "y": out["y"], "y_dtype": dtype_number(out["y"])}
        args = filled(WeightRows, **fields)
        if not together:
            kernels.unit_scales_on_host(ctypes.byref(u))
        kernels.weight_forward_on_host(ctypes.byref(args), ctypes.byref(u) if together else None, order)
        return out

    for order in ORDERS.values():
        apart, together = launched(False, order), launched(True, order)
        for name, found in together.items():
            assert_same(found, apart[name])
        assert not (together["y"] == 7).all()


def dimensions(x: Tensor, y: Tensor, window: tuple) -> dict:
    sides = [(s, s) if isinstance(s, int) else s for s in window]
    return {
        name: (x.size(d), y.size(d), *(s[i] for s in sides))
        for i, (name, d) in enumerate({"rows": -2, "columns": -1}.items())
    }


@pytest.mark.parametrize("kind", ["ties", "special", "lowest"])
@dtypes
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("window", ["3s2p1", "strided", "long", "dilated", "5"])
@pytest.mark.parametrize("shape", ["image", "one_channel", "vectors", "long"])
def test_max_pool(kernels, shape, window, last, dtype, kind):
    x = values(dtype, IMAGES.get(shape, (2, 16, 9, 11)), kind)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    sides = [[s] if isinstance(s, int) else list(s) for s in WINDOWS[window]]
    wanted, offsets = native.max_pool_offsets(x, *sides)
    grad = torch.empty_like(wanted).copy_(floats(dtype, 3)(*wanted.shape))
    wanted_dx = native.max_pool_offsets_backward(grad, offsets, list(x.shape), *sides)
    channels_last = not wanted.is_contiguous()
    fields = {"images": x.size(0), "channels": x.size(1), "channels_last": channels_last, "dtype": dtype_number(x)}
    fields |= dimensions(x, wanted, WINDOWS[window])
    y, places, dx = torch.full_like(wanted, 7), torch.full_like(offsets, 7), torch.full_like(wanted_dx, 7)
    forward, backward = (f"{'long_' * (shape == 'long')}max_pool_{way}_on_host" for way in ("forward", "backward"))
    kernels[forward](ctypes.byref(filled(PoolArguments, **fields, x=x, y=y, offsets=places)))
    assert_same(y, wanted)
    assert_same(places, offsets)
    kernels[backward](ctypes.byref(filled(PoolArguments, **fields, x=grad, y=dx, offsets=places)))
    assert_same(dx, wanted_dx)


def channel_values(f64: bool, *names: str) -> dict[str, Tensor]:
    """Values of 300 channels: one of zero, one negative, one not finite."""
    found = {name: torch.rand(300, dtype=torch.float64 if f64 else torch.float32) + 0.1 for name in names}
    for name in {"gamma", "ratio"} & set(names):
        found[name][:3] = torch.tensor([0.0, -0.5, torch.nan])
    return found


@pytest.mark.parametrize("f64", [False, True])
@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("float16", [False, True])
def test_scales_of_a_unit(kernels, f64, follows, has_norm, float16):
    given = channel_values(f64, "variance", "gamma", "start", "ratio", "factor", "scale", "lo", "hi")
    variance, gamma = given["variance"], given["gamma"]
    y_start, y_scale = torch.tensor([0.3]).to(variance), torch.zeros(1).to(variance)
    rows = torch.randn(300, 9).to(variance)
    rows[3] = torch.nan
    low, high = rows.amin(1).double(), rows.amax(1).double()
    factor = gamma * torch.rsqrt(variance + 1e-5)
    factor = factor.masked_fill(factor == 0, 1.0) if has_norm else torch.ones_like(factor)
    norm = {"variance": variance, "gamma": gamma, "factor": given["factor"]} if has_norm else {}
    u = filled(UnitScales, f64=f64, channels=300 if has_norm or follows else 0, eps=1e-5, **norm)
    ratio = None if follows else given["ratio"]
    of_weight = {"start": given["start"], "ratio": ratio, "scale": given["scale"]}
    u.weight = filled(TrainedScale, count=300, **of_weight, float16=float16)
    u.output = filled(TrainedScale, count=1, start=y_start, scale=y_scale, float16=float16)
    if follows:
        ends = {"low": low, "high": high, "start": given["start"], "lo": given["lo"], "hi": given["hi"]}
        u.followed = filled(FollowedScale, **ends, qmin=-127.0, qmax=127.0, symmetric=True)
        lo, hi = ops.minmax(rows * factor[:, None], axis=0)
        wanted = ops.grid_of_range(lo, hi, -127, 127)[0]
    else:
        wanted = ops.positive_scale(given["start"], given["ratio"])
    kernels.unit_scales_on_host(ctypes.byref(u))
    if has_norm:
        assert_same(given["factor"], factor)
    rounded = reference.float16_scale if float16 else torch.clone
    assert_same(given["scale"], rounded(wanted))
    assert_same(y_scale, rounded(y_start))
    if follows:
        assert_same(given["start"], wanted)
        assert_same(given["lo"], lo)
        assert_same(given["hi"], hi)


@pytest.mark.parametrize("f64", [False, True])
@pytest.mark.parametrize("rated", [False, True])
@pytest.mark.parametrize("scales", [1, 300])
@pytest.mark.parametrize("order", ORDERS)
def test_scales_that_take_a_factor(kernels, order, f64, rated, scales):
    given = channel_values(f64, "variance", "gamma", "start", "rate", "known")
    given["known"][::7] = 0.0
    if scales == 1:
        given["gamma"][2] = 1.0
        given |= {name: given[name][1:2].clone() for name in ("start", "rate", "known")}
    if not rated:
        given["rate"] = None
    wanted = {name: None if value is None else value.clone() for name, value in given.items()}
    change = filled(FactorChange, f64=f64, scales=scales, channels=300, eps=1e-5, present=given["variance"], **given)
    kernels.rescale_on_host(ctypes.byref(filled(HeldVariance)), ctypes.byref(change), ORDERS[order])
    ops.batch_norm_rescale_(
        wanted["start"], wanted["rate"], wanted["known"], wanted["variance"], wanted["gamma"], eps=1e-5
    )
    for name, value in given.items():
        if value is not None:
            assert_same(value, wanted[name])


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("channels", [0, 3, 1000])
def test_a_variance_that_is_held_for_a_step(kernels, channels, order, dtype):
    """In one block, whose threads all see whether the clock has moved before one of them notes it."""
    variance, held = floats(dtype)(channels), floats(dtype, 1)(channels)
    before = held.clone()
    for clock, taken in ((5, 5), (6, 5)):
        copy, of_clock, of_taken = torch.zeros_like(held), torch.tensor(clock), torch.tensor(taken)
        given = {"variance": variance, "held": held, "copy": copy, "taken": of_taken, "clock": of_clock}
        arguments = filled(HeldVariance, channels=channels, size=held.element_size(), **given)
        kernels.rescale_on_host(ctypes.byref(arguments), ctypes.byref(filled(FactorChange)), ORDERS[order])
        wanted = before if clock == taken else variance
        assert_same(held, wanted)
        assert_same(copy, wanted)
        assert of_taken == clock


@pytest.mark.parametrize("f64", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("scales", [None, 1, 300])
@pytest.mark.parametrize("float16", [False, True])
def test_bias_of_a_unit(kernels, f64, frozen, has_bias, scales, float16):
    """With a frozen batch norm folded into it, and on the grid of its sums; large ones and small scales do not fit int32."""
    if not has_bias and not frozen:
        pytest.skip("there is no bias")
    given = channel_values(f64, "variance", "gamma", "factor", "bias", "mean", "beta", "result")
    given["bias"][5], given["beta"][6], given["bias"][7] = 1e9, -1e9, torch.nan
    start = channel_values(f64, "start")["start"][: scales or 1] * 1e-3
    x_scale, scale = torch.tensor([0.03]).to(start), torch.zeros_like(start)
    variance, gamma, bias, beta = (given[name] for name in ("variance", "gamma", "bias", "beta"))
    factor = gamma * torch.rsqrt(variance + 1e-5)
    norm = {"variance": variance, "gamma": gamma, "factor": given["factor"], "frozen": True} if frozen else {}
    u = filled(UnitScales, f64=f64, channels=300, eps=1e-5, **norm)
    u.weight = filled(TrainedScale, count=start.numel(), start=start, scale=scale, float16=float16)
    of_norm = {"mean": given["mean"], "beta": beta} if frozen else {}
    given_bias = bias if has_bias else None
    u.bias = filled(UnitBias, bias=given_bias, **of_norm, x_scale=x_scale if scales else None, result=given["result"])
    kernels.unit_scales_on_host(ctypes.byref(u))
    wanted = bias
    if frozen:
        wanted = (bias - given["mean"] if has_bias else -given["mean"]) * factor + beta
        assert_same(given["factor"], factor)
    assert_same(given["result"], on_grid(wanted, bias_scale(x_scale, scale)) if scales else wanted)


@pytest.mark.parametrize("f64", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_gradients_of_a_frozen_batch_norm(kernels, f64, has_bias):
    given = channel_values(f64, "variance", "gamma", "bias", "mean", "of_factor", "of_bias", "result", "bias_result")
    if not has_bias:
        given["bias"] = given["bias_result"] = None
    u = filled(UnitGradients, f64=f64, frozen=True, channels=300, eps=1e-5, **given)
    kernels.unit_gradients_on_host(ctypes.byref(u))
    inverse = torch.rsqrt(given["variance"] + 1e-5)
    centred = given["bias"] - given["mean"] if has_bias else -given["mean"]
    assert_same(given["result"], (given["of_factor"] + given["of_bias"] * centred) * inverse)
    if has_bias:
        assert_same(given["bias_result"], given["of_bias"] * (given["gamma"] * inverse))


@pytest.mark.parametrize("f64", [False, True])
@pytest.mark.parametrize("rated", [False, True])
def test_gradients_of_scales_of_a_unit(kernels, f64, rated):
    given = channel_values(f64, "variance", "gamma", "of_gamma", "of_divisor", "of_factor", "result")
    scales = channel_values(f64, "grad", "start", "ratio", "result", "rate")
    rate = scales["rate"] if rated else None
    u = filled(UnitGradients, f64=f64, channels=300, eps=1e-5, **given)
    u.weight = filled(RatioGradient, count=300, **{**scales, "rate": rate})
    variance, gamma = given["variance"], given["gamma"].clone().requires_grad_()
    factor = gamma * torch.rsqrt(variance + 1e-5)
    factor = factor.masked_fill(factor == 0, 1.0)
    factor.backward(given["of_divisor"] + given["of_factor"])
    ratio = scales["ratio"].clone().requires_grad_()
    ops.positive_scale(scales["start"], ratio, rate).backward(scales["grad"])
    kernels.unit_gradients_on_host(ctypes.byref(u))
    assert_same(given["result"], given["of_gamma"] + gamma.grad)
    assert_same(scales["result"], ratio.grad)
