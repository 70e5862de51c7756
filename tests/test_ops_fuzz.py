"""Anything at all, given to every op: one sentence that names the op, or the right result; never a signal.

Arguments are drawn from the schemas of the library's table of contents, so a new op or argument fails here until it is
told how to be drawn and what is right.
"""

import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import qtoolkit  # noqa: F401, loads the library
from tests import reference
from tests.cases import CODES, FLOATS, assert_same
from tests.test_ops_gradients import assert_sum

ROOT = Path(__file__).parents[1]
NAMES = re.findall(r'"(\w+)\(', (ROOT / "csrc" / "library.cpp").read_text())
OPS = {name: getattr(torch.ops.qtoolkit, name).default for name in NAMES}
OTHERS = (torch.int64, torch.bool, torch.complex64, torch.uint32, torch.float8_e5m2)
ENDS = (-(2**40), -(2**31), -32768, -128, -8, 0, 7, 127, 255, 65535, 2**31 - 1, 2**31)
MAGNITUDES = (0.1, 0.1, 0.1, 1.0, 0.0, -3.0, float("nan"), float("inf"), 1e-42)


class Drawn:
    """Random arguments, in the order of a schema: mostly such that fit each other. A method for each name."""

    def __init__(self, op: str, r: random.Random):
        self.op, self.r = op, r
        self.given: dict = {}
        self.previous: list[Tensor] = []  # what the histograms hold
        for argument in OPS[op]._schema.arguments:
            self.given[argument.name] = getattr(self, argument.name)()

    def mostly(self, right: object, *wrong: object) -> object:
        return right if not wrong or self.r.random() < 0.95 else self.r.choice(wrong)

    def tensor(self, dtypes: tuple, shape: list[int] | None = None) -> Tensor:
        r = self.r
        shape = (
            [r.choice([0, 1, 2, 3, 4, 6, 8]) for _ in range(r.choice([0, 1, 2, 2, 3, 4]))] if shape is None else shape
        )
        spread = torch.randn(shape) * r.choice([9.0, 9.0, 1e4])
        t = spread.to(self.mostly(r.choice(dtypes), *CODES, *OTHERS))
        if shape and r.random() < 0.3:
            t = t.transpose(0, -1).contiguous().transpose(0, -1)
        if shape and r.random() < 0.2:
            t = t[..., :1].expand(*t.shape)
        if shape and r.random() < 0.2:
            t = torch.cat([t, t], 0)[::2]
        return t.to("meta") if r.random() < 0.02 else t

    def vector(self, count: int, *, dtypes: tuple = FLOATS) -> Tensor:
        count = self.mostly(count, 0, 1, 2, 5, count + 1)
        values = torch.full((count,), self.r.choice(MAGNITUDES))
        if self.r.random() < 0.5:
            values = values * (1 + torch.rand(count))
        t = values.to(self.mostly(self.r.choice(dtypes), *FLOATS, *OTHERS))
        return t.to("meta") if self.r.random() < 0.01 else t

    # ---- inputs

    def x(self) -> Tensor:
        if "grad" in self.given:
            return self.tensor(FLOATS, self.mostly(list(self.given["grad"].shape), [2, 3]))
        if self.op != "fake_quant_block":
            return self.tensor(FLOATS)
        return self.tensor(FLOATS, [*(self.r.choice([0, 1, 2, 5]) for _ in range(self.r.randrange(3))), 96])

    def grad(self) -> Tensor:
        return self.tensor(FLOATS)

    def codes(self) -> Tensor:
        return self.tensor(CODES)

    # ---- grids

    @property
    def input(self) -> Tensor:
        return self.given["x"] if "x" in self.given else self.given["codes"]

    @property
    def channels(self) -> tuple[int | None, int]:
        """Axis and group, drawn once: the tensors of a grid come before them in a schema."""
        if "channels" not in self.__dict__:
            dims = self.input.dim()
            axis = self.mostly(self.r.choice([None, *range(-dims, dims)]), 0, 1, -1, 2, 7, -(2**40))
            splits = dims > 0 and axis is not None and axis % dims and self.input.size(0) % 2 == 0
            group = self.mostly(self.r.choice([1, 2]) if splits else 1, 1, 2, 3, 0, -2, 2**40, 2**62)
            self.__dict__["channels"] = axis, group
        return self.__dict__["channels"]

    @property
    def count(self) -> int:
        (axis, group), dims = self.channels, self.input.dim()
        fits = axis is not None and -dims <= axis < dims and 0 < group < 2**20
        return self.input.size(axis) * group if fits else 1

    def axis(self) -> int | None:
        return self.channels[0]

    def group(self) -> int:
        return self.channels[1]

    def scale(self) -> Tensor:
        t = self.vector(self.r.choice([self.count, self.count, 1]))
        return t.reshape(-1, 1) if self.r.random() < 0.2 else t

    def zero_point(self) -> Tensor | None:
        return self.r.choice([None, self.vector(self.given["scale"].numel())])

    def qmin(self) -> int:
        return self.mostly(self.r.choice([-2048, -128, -8, -1, 0]), *ENDS)

    def qmax(self) -> int:
        return self.mostly(self.r.choice([1, 7, 127, 127, 2047]), *ENDS)

    def grad_factor(self) -> float:
        return self.r.choice([1.0, 0.3, -2.0, 0.0])

    def dtype(self) -> torch.dtype:
        return self.mostly(self.r.choice(CODES if self.op == "quantize" else FLOATS), *FLOATS, *CODES, *OTHERS)

    # ---- the packed mask, wanted or given

    def mask(self) -> bool | Tensor:
        if "grad" not in self.given:
            return self.r.random() < 0.5
        count = self.mostly((self.given["grad"].numel() + 7) // 8, 0, 1, 3)
        return torch.randint(0, 256, (count,)).to(self.mostly(torch.uint8, torch.int8, torch.float32))

    def order(self) -> list[int]:
        dims = range(self.given["grad"].dim())
        return self.mostly(self.r.choice([[], self.r.sample(dims, len(dims))]), [0], [0, 0], [5, 1], [-1, 0], [2**40])

    # ---- float formats

    def format(self) -> str:
        return self.mostly(self.r.choice(["e4m3", "e5m2", "e2m1"]), "", "e8m0", "E4M3")

    def block_size(self) -> int:
        return self.mostly(self.r.choice([16, 32, 48, 96]), 0, -16, 24, 64, 1024, 2**40)

    def scale_format(self) -> str:
        return self.mostly(self.r.choice(["e8m0", "e4m3"]), "", "e5m2")

    def tensor_scale(self) -> Tensor | None:
        takes = self.given["scale_format"] == "e4m3"
        return self.mostly(self.r.choice([None, self.vector(1)]) if takes else None, torch.ones(1), torch.ones(2))

    # ---- pytorch-quantization

    def amax(self) -> Tensor:
        x = self.given["x"]
        if x.dim() == 0 or self.r.random() < 0.4:
            return self.vector(1)
        axis = self.r.randrange(x.dim())
        t = self.vector(x.size(axis))
        return self.mostly(t.reshape(-1, *[1] * (x.dim() - 1 - axis)), t, t.reshape(1, -1))

    def num_bits(self) -> int:
        return self.mostly(self.r.choice([2, 3, 4, 8, 16]), 1, 0, 17, -1, 2**40)

    def unsigned(self) -> bool:
        return self.r.random() < 0.5

    def narrow_range(self) -> bool:
        return self.r.random() < 0.5

    # ---- observers

    def counts(self) -> Tensor:
        """Of one to three histograms; so few bins that a search tries every range."""
        several = self.op == "search_range" and self.r.random() < 0.5
        bins = self.mostly(self.r.choice([2, 4, 6]), 0, 3)
        self.previous = [
            torch.randn(9) * self.r.choice([0.0, 1.0, 1.0, 40.0, -(2.0**100)]) for _ in range(3 if several else 1)
        ]
        if self.r.random() < 0.3:
            self.previous = [t.abs() for t in self.previous]
        found = [reference.histogram(t, bins) if bins in (2, 4, 6) else (np.zeros(bins), 0, 0) for t in self.previous]
        self.edges = [torch.tensor([float(f[i]) for f in found]) for i in (1, 2)]
        counts = torch.stack([torch.from_numpy(f[0]) for f in found]).to(self.mostly(torch.int64, torch.int32))
        return counts if several else self.mostly(counts[0], counts[None, None])

    def edge(self, end: int) -> Tensor:
        if "counts" in self.given:
            return self.mostly(self.edges[end], self.edges[end].double(), torch.zeros(4), torch.zeros(1, device="meta"))
        seen = torch.full((self.mostly(self.count, 0, 1, self.count + 1),), (-3.0, 3.0)[end])
        unseen = torch.full_like(seen, (np.inf, -np.inf)[end])
        t = torch.where(torch.rand(seen.shape) < 0.7, seen, unseen)
        return t.to(self.mostly((torch.float32, torch.float64)[self.kept], torch.float16, torch.int64))

    @property
    def kept(self) -> int:
        return self.__dict__.setdefault("width", self.r.randrange(2))

    def lo(self) -> Tensor:
        return self.edge(0)

    def hi(self) -> Tensor:
        return self.edge(1)

    def momentum(self) -> float | None:
        return self.mostly(self.r.choice([None, 0.1, 1.0]), 0.0, -1.0, 2.0, float("nan"))

    def method(self) -> str:
        return self.mostly(self.r.choice(["percentile", "mse", "l2", "entropy"]), "", "kl")

    def percentile(self) -> float:
        return self.mostly(self.r.choice([1.0, 50.0, 99.9, 100.0]), 0.0, 101.0, float("nan"))

    def symmetric(self) -> bool:
        return self.r.random() < 0.5


# ---- what is right --------------------------------------------------------------------------------------------------

Results = tuple[Tensor, ...]


def parts(given: dict, *names: str) -> dict:
    return {name: given[name] for name in names}


def check_values(found: Results, wanted: Tensor, inside: Tensor, asked: bool) -> None:
    y, mask = found[0], found[-1]
    assert_same(y, wanted)
    assert torch.equal(mask, reference.packed(inside, y) if asked else mask.new_empty(0))


def check_fake_quant(drawn: Drawn, found: Results, grad_factor: float, mask: bool, **grid) -> None:
    check_values(found, reference.fake_quant(**grid), reference.inside(**grid), mask)


def check_fake_quant_float(drawn: Drawn, found: Results, mask: bool, **given) -> None:
    check_values(found, *reference.fake_quant_float(**given), mask)


def check_fake_quant_block(
    drawn: Drawn, found: Results, x, format, block_size, scale_format, tensor_scale, mask
) -> None:
    wanted, scales, inside = reference.fake_quant_block(x, format, block_size, scale_format, tensor_scale)
    check_values(found, wanted, inside, mask)
    assert_same(found[1], scales)


def legacy(x: Tensor, amax: Tensor, *grid) -> Results:
    shape = () if amax.numel() == 1 else amax.shape[-x.dim() :]  # it may have more dimensions than x, of one element
    return reference.tensor_quant(x, amax.reshape(shape), *grid)


def check_tensor_quant(drawn: Drawn, found: Results, x, amax, num_bits, unsigned, narrow_range, mask) -> None:
    codes, scale, _, inside = legacy(x, amax, num_bits, unsigned, narrow_range)
    check_values(found, codes, inside, mask)
    assert_same(found[1], scale.reshape(amax.shape))


def check_fake_tensor_quant(drawn: Drawn, found: Results, x, amax, num_bits, unsigned, narrow_range, mask) -> None:
    check_values(found, *legacy(x, amax, num_bits, unsigned, narrow_range)[2:], mask)


def check_fake_quant_backward(drawn: Drawn, found: Results, grad, mask, order) -> None:
    order = order or list(range(grad.dim()))
    bits = torch.from_numpy(np.unpackbits(mask.numpy(), bitorder="little")[: grad.numel()]).bool()
    inside = bits.reshape([grad.size(d) for d in order]).permute([order.index(d) for d in range(grad.dim())])
    assert_same(found[0], torch.where(inside, grad, torch.zeros_like(grad)))


def check_fake_quant_learned_backward(drawn: Drawn, found: Results, grad, **given) -> None:
    x, scale, zero_point = given["x"], given["scale"], given["zero_point"]
    wanted = reference.Gradients(grad.to(x.dtype), **given)
    assert_same(found[0], wanted.dx)
    for got, like in zip(found[1:], (scale, zero_point), strict=True):
        assert got.shape == ((0,) if like is None else like.shape)
    if scale.isfinite().all() and (zero_point is None or zero_point.isfinite().all()):
        assert_sum(found[1], scale, wanted.ds, wanted.ds_mass, x)
        if zero_point is not None:
            assert_sum(found[2], zero_point, wanted.dz, wanted.dz_mass, x)


def check_snapshot(drawn: Drawn, found: Results, x: Tensor) -> None:
    assert (found[0].dtype, found[0].shape) == (x.dtype, x.shape)
    assert found[0].contiguous().untyped_storage().tolist() == x.clone().contiguous().untyped_storage().tolist()


def check_quantize(drawn: Drawn, found: Results, **given) -> None:
    assert_same(found[0], reference.quantize(**given))


def check_dequantize(drawn: Drawn, found: Results, **given) -> None:
    assert_same(found[0], reference.dequantize(**given))


def check_minmax(drawn: Drawn, found: Results, **given) -> None:
    for got, wanted in zip(found, reference.minmax(**given), strict=True):
        assert_same(got, wanted)


def check_observe_minmax_(drawn: Drawn, found: Results, x, lo, hi, momentum, axis, group) -> None:
    """`lo` and `hi` are those before; three roundings of what is at most as large as the largest of all."""
    for got, wanted in zip(found, reference.moved((lo, hi), x, momentum, axis, group), strict=True):
        exact = got.double().eq(wanted) | (got.isnan() & wanted.isnan())
        largest = x.double().abs().amax() + 3 if x.numel() else 3
        near = (got.double() - wanted).abs() <= 3 * largest * torch.finfo(got.dtype).eps
        assert (exact | (near if momentum else False)).all()


def check_observe_histogram_(drawn: Drawn, found: Results, x, counts, lo, hi) -> None:
    values = torch.cat([drawn.previous[0].double(), x.double().reshape(-1)])
    wanted = reference.histogram(values, len(counts))
    if np.isnan(wanted[1]):
        assert found[1].isnan()
        return
    assert torch.equal(found[0], torch.from_numpy(wanted[0]))
    assert (found[1].item(), found[2].item()) == wanted[1:]


def check_search_range(drawn: Drawn, found: Results, counts, lo, hi, **how) -> None:
    for channel, (low, high) in enumerate(zip(*(t.reshape(-1) for t in found), strict=True)):
        one = counts.reshape(-1, counts.size(-1))[channel], lo.reshape(-1)[channel], hi.reshape(-1)[channel]
        check_clip(low.item(), high.item(), one, **how)


def check_clip(low: float, high: float, histogram: Results, qmin, qmax, method, percentile, symmetric) -> None:
    h = reference.Bins(*histogram, qmin, qmax, symmetric)
    if not h.counts[h.edges[:-1] != 0].any() and h.width < 2.0**-120:
        assert (low, high) == (0, 0)  # nothing but zeros
    elif not h.candidates():
        assert low == high == 0
    elif method == "percentile":
        assert (low, high) == pytest.approx(h.percentile(percentile), rel=1e-5, abs=1e-9 * h.width)
    else:
        cost = getattr(h, method)
        ends = round(-low / h.width), round(high / h.width)
        chosen = cost(ends[1], ends[1]) if symmetric else cost(*ends)
        assert chosen <= min(cost(*c) for c in h.candidates()) + 1e-9 * h.counts.sum() * len(h.counts) ** 2


CHECKS: dict[str, Callable] = {name: globals()[f"check_{name}"] for name in NAMES if f"check_{name}" in globals()}


# ---- the trial ------------------------------------------------------------------------------------------------------


def trial(op: str, seed: str) -> bool:
    """Whether the arguments were taken; then the results must be right."""
    torch.manual_seed(random.Random(seed).getrandbits(32))
    drawn = Drawn(op, random.Random(seed))
    kept = {
        n: t.clone() if isinstance(t, Tensor) and n in ("lo", "hi", "counts") else t for n, t in drawn.given.items()
    }
    try:
        found = OPS[op](**drawn.given)
    except (ValueError, TypeError, NotImplementedError) as error:
        sentence = str(error).split("\n")[0]
        assert re.fullmatch(rf"{op}: .*\.", sentence), sentence
        return False
    if found is None:  # what it updates is its result
        found = tuple(drawn.given[n] for n in ("counts", "lo", "hi") if n in drawn.given)
    found = (found,) if isinstance(found, Tensor) else found
    if not any(t.is_meta for t in found):
        CHECKS[op](drawn, found, **kept)
    return True


def fuzz(seed: int, count: int) -> None:
    for op in NAMES:
        taken = 0
        for i in range(count):
            try:
                taken += trial(op, f"{seed}-{i}")
            except Exception as error:
                raise AssertionError(f"trial({op!r}, '{seed}-{i}'): {type(error).__name__}: {error}") from error
        assert count / 4 < taken < count or op == "snapshot", f"{op}: {taken} of {count} taken"


def test_every_op_has_a_check() -> None:
    assert len(NAMES) >= 14
    assert sorted(CHECKS) == sorted(NAMES)


@pytest.mark.parametrize("seed", range(3))
def test_anything_at_all(seed: int) -> None:
    """In a process of its own, so that a crash is a failure and not the end of the suite."""
    program = f"from tests.test_ops_fuzz import fuzz; fuzz({seed}, 400)"
    ran = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, f"exit status {ran.returncode}\n{ran.stdout}\n{ran.stderr[-3000:]}"
