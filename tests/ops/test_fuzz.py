"""Anything at all, given to every op: one sentence that names the op, or the right result; never a signal.

Arguments are drawn from the schemas of the library's table of contents, so a new op or argument fails here until it is
told how to be drawn and what is right.
"""

import contextlib
import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import qtoolkit  # noqa: F401, loads the library
from qtoolkit.ops.layer import Geometry
from tests import processes, reference
from tests.cases import CODES, FLOATS, Channels, assert_same
from tests.export import litert_kernels
from tests.ops.fields import Fields
from tests.ops.test_gradients import assert_sum
from tests.ops.test_int4 import packed, packed_in_memory
from tests.ops.test_layer import Shape
from tests.reference import tensor
from tests.reference_shaped import Shaped

ROOT = Path(__file__).parents[2]
EVERY = re.findall(
    r'"(\w+)\(Tensor', (ROOT / "csrc" / "library.cpp").read_text()
)  # those of units take an object first
# All but torch's own op with other gradients, whose checks and sentences are torch's.
OURS = [name for name in EVERY if name != "convolution"]
# Other tests compare these with their ops and call them with wrong arguments: tests/graph/program/test_unit.py and
# test_plain_units.py, tests/ops/test_attention.py and test_products.py.
OF_SEVERAL_OPS = (
    "unit",
    "layer_fake_quant",
    "function_fake_quant",
    "add_norm_fake_quant",
    "attention_fake_quant",
    "product",
    "fused_attention",
)
UNITS = [f"{name}{way}" for name in OF_SEVERAL_OPS for way in ("", "_backward")]
NAMES = [name for name in OURS if name not in UNITS]
OPS = {name: Fields(getattr(torch.ops.qtoolkit, name).default) for name in EVERY}
ON_CODES = (
    "requantize",
    "requantize_fixed_point",
    "add_codes",
    "fake_quant_by_factor",
    "fake_quant_away",
    "centred_codes",
)  # with one scale
WRITTEN = {
    name: [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    for name, op in OPS.items()
}
OTHERS = (torch.int64, torch.bool, torch.complex64, torch.uint32, torch.float8_e5m2)
ENDS = (-(2**40), -(2**31), -32768, -128, -8, 0, 7, 127, 255, 65535, 2**31 - 1, 2**31)
MAGNITUDES = (0.1, 0.1, 0.1, 1.0, 0.0, -3.0, float("nan"), float("inf"), 1e-42)


class Drawn:
    """Random arguments, in the order of a schema: mostly such that fit each other. A method for each name."""

    def __init__(self, op: str, r: random.Random):
        self.op, self.r = op, r
        self.given: dict = {}
        self.previous: list[Tensor] = []  # what the histograms hold
        for name in OPS[op].names:
            self.given[name] = getattr(self, name)()

    def mostly(self, right: object, *wrong: object) -> object:
        return right if not wrong or self.r.random() < 0.95 else self.r.choice(wrong)

    def tensor(self, dtypes: tuple, shape: list[int] | None = None) -> Tensor:
        r = self.r
        shape = (
            [r.choice([0, 1, 2, 3, 4, 6, 8]) for _ in range(r.choice([0, 1, 2, 2, 3, 4]))] if shape is None else shape
        )
        spread = torch.randn(shape) * r.choice([9.0, 9.0, 1e4])
        if "observe" in self.op and r.random() < 0.2:
            spread = torch.where(torch.rand(shape) < 0.2, r.choice([np.nan, np.inf, -np.inf]), spread)
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
        if self.op == "max_pool_offsets":
            return self.tensor(FLOATS, self.mostly(self.image, [2, 3], [4, 4]))
        if "norm" in self.op:
            return self.tensor(FLOATS, self.normalized)
        if self.op == "resize_linear_codes":
            return self.tensor(FLOATS, self.mostly([self.r.choice([0, 1, 3]), 2, 5, 4], [2, 3], [1, 1, 0, 4]))
        if self.op != "fake_quant_block":
            return self.tensor(FLOATS)
        return self.tensor(FLOATS, [*(self.r.choice([0, 1, 2, 5]) for _ in range(self.r.randrange(3))), 96])

    def grad(self) -> Tensor:
        if self.op == "max_pool_offsets_backward":
            rows, columns = (self.results(i) for i in (0, 1))
            return self.tensor(FLOATS, self.mostly([*self.image[:-2], rows, columns], [2, 3], [1, 1, 1, 1]))
        return self.tensor(FLOATS, self.normalized if "norm" in self.op else None)

    def codes(self) -> Tensor:
        return self.tensor(CODES)

    def size(self) -> list[int]:
        if self.op == "resize_linear_codes":
            return self.mostly([self.r.choice([1, 5, 9]), 7], [3], [0, 2], [2**40, 2**40])
        if self.op == "max_pool_offsets_backward":
            return self.mostly(self.image, [3, 3], [0] * len(self.image), [-1] * len(self.image))
        return self.mostly(self.unpacked, [3], [-1, 0], [2**40, 2**40], [])

    @cached_property
    def unpacked(self) -> list[int]:
        return [self.r.choice([0, 1, 3, 4, 6]) for _ in range(self.r.randrange(4))]

    def packed(self) -> Tensor:
        count = self.mostly((math.prod(self.unpacked) + 1) // 2, 0, 1, 3)
        return torch.randint(0, 256, (count,)).to(self.mostly(torch.uint8, torch.int8))

    # ---- grids: their tensors come before the axis in a schema, so channels are drawn when first asked for

    @property
    def input(self) -> Tensor:
        found = [self.given[name] for name in ("x", "codes") if name in self.given]
        return found[0] if found else torch.empty(self.unpacked)

    @cached_property
    def channels(self) -> Channels:
        shape, r = self.input.shape, self.r
        axis = self.mostly(r.choice([None, *range(-len(shape), len(shape))]), 0, 1, -1, 2, 7, -(2**40))
        splits = len(shape) > 0 and axis is not None and axis % len(shape) and shape[0] % 2 == 0
        group = self.mostly(r.choice([1, 2]) if splits else 1, 1, 2, 3, 0, -2, 2**40, 2**62)
        along = shape[axis] if axis is not None and -len(shape) <= axis < len(shape) else None
        blocks = [n for n in (1, 2, 3, 4) if along is not None and along % n == 0 and group == 1]
        return Channels(axis, group, self.mostly(r.choice([0, 0, *blocks]), 0, 1, 3, -1, 2**40))

    @property
    def channel_count(self) -> int:
        x, c = self.input, self.channels
        blocks = c.block_size if "block_size" in OPS[self.op].names else 0
        in_range = c.axis is None or (-x.dim() <= c.axis < x.dim() and 0 < c.group < 2**20)
        fits = in_range and blocks >= 0
        return Channels(c.axis, c.group, blocks).count(x) if fits else 1

    def axis(self) -> int | None:
        return self.channels.axis

    def group(self) -> int:
        return self.channels.group

    def block_size(self) -> int:
        if self.op == "fake_quant_block":
            return self.mostly(self.r.choice([16, 32, 48, 96]), 0, -16, 24, 64, 1024, 2**40)
        return self.channels.block_size

    def scale(self) -> Tensor | float:
        if self.op in ("softmax_codes", "hard_swish_codes"):
            return self.mostly(self.r.choice([0.01, 0.3, 2.0]), 0.0, -1.0, float("nan"), 1e9)
        if "lo" in self.given:
            return self.updated()
        if self.op == "float16_scale":
            return self.tensor(FLOATS[:2])
        if self.op in ON_CODES:
            return self.vector(1)
        if "norm" in self.op:
            return self.r.choice([None, self.vector(1)])
        if "prelu" in self.op:
            return self.vector(1)
        t = self.vector(self.r.choice([self.channel_count, self.channel_count, 1]))
        return t.reshape(-1, 1) if self.r.random() < 0.1 else t

    def zero_point(self) -> Tensor | int | None:
        if self.op == "add_codes":
            return self.zero_code()
        if "lo" in self.given:
            return self.r.choice([None, self.updated()])
        if "shaped" in self.op and self.shape_of_values != "clip":
            taken = self.vector(self.given["scale"].numel()) if self.shape_of_values == "interval" else None
            return self.mostly(taken, None, torch.ones(1))
        if self.given["scale"] is None:
            return self.mostly(None, torch.ones(1))
        return self.r.choice([None, self.vector(self.given["scale"].numel())])

    def updated(self) -> Tensor:
        """What a range's grid is written to."""
        lo = self.given["lo"]
        return self.mostly(torch.empty_like(lo), torch.empty(lo.numel() + 1), torch.empty_like(lo).half())

    # ---- the arithmetic of runtimes

    def zero_code(self) -> int:
        return self.mostly(self.r.choice([0, 3, 128, -128]), -(2**40), 2**31)

    x_zero_point = other_zero_point = zero_code

    def x_scale(self) -> Tensor | float:
        return self.mostly(0.05, float("nan"), 0.0, 1e9) if self.op == "hard_swish_codes" else self.vector(1)

    def dim(self) -> int:
        return self.mostly(0, 9, -9)

    def align_corners(self) -> bool:
        return self.r.random() < 0.5

    def other_scale(self) -> Tensor:
        return self.vector(1)

    def other(self) -> Tensor:
        shape = list(self.given["x"].shape)
        return self.tensor(FLOATS, self.mostly(shape, shape[:1], [1] * len(shape), [5, *shape], [7]))

    def factor(self) -> Tensor | None:
        return self.amax() if self.op == "requantize_fixed_point" else self.r.choice([None, self.amax()])

    def sums(self) -> Tensor:
        return self.tensor(FLOATS)

    def fused(self) -> bool:
        return self.r.random() < 0.3

    def fixed_point(self) -> bool:
        return self.r.random() < 0.3

    def rounded_once(self) -> bool:
        return self.r.random() < 0.5

    def rounded_twice(self) -> bool:
        return self.mostly(not self.given["fixed_point"] and self.r.random() < 0.3, True)

    def subtract(self) -> bool:
        return self.mostly(self.given["rounded_twice"] and self.r.random() < 0.5, True)

    def min_range(self) -> Tensor:
        return self.vector(1)

    def max_range(self) -> Tensor:
        low = self.given["min_range"]
        return (low.abs() * 2 + 1).to(low) if low.dtype in FLOATS else self.vector(1)

    def qmin(self) -> int:
        if "shaped" in self.op and self.shape_of_values != "clip":
            return self.mostly(self.r.choice([-7, 0]), *ENDS)
        small = self.op == "quantize_int4"
        return self.mostly(self.r.choice([-8, -3, 0] if small else [-2048, -128, -8, -1, 0]), *ENDS)

    def qmax(self) -> int:
        if "shaped" in self.op and self.shape_of_values != "clip":
            return self.mostly(-self.given["qmin"] or 7, *ENDS)
        small = self.op == "quantize_int4"
        return self.mostly(self.r.choice([7, 5, 1] if small else [1, 7, 127, 127, 2047]), *ENDS)

    def signed(self) -> bool:
        return self.r.random() < 0.5

    def pow2_scale(self) -> bool:
        return self.r.random() < 0.3

    def float16_scale(self) -> bool:
        return self.r.random() < 0.3

    def changes(self) -> bool:
        return self.r.random() < 0.5

    def grad_factor(self) -> float:
        return self.r.choice([1.0, 0.3, -2.0, 0.0])

    def start(self) -> Tensor:
        return self.vector(self.r.choice([0, 1, 2, 5]), dtypes=FLOATS[:2])

    def ratio(self) -> Tensor:
        start = self.given["start"]
        wrong = (torch.rand(start.numel() + 1), start.half())
        return self.mostly((torch.randn(start.shape) * 2).to(start), *wrong)

    def value(self) -> Tensor:
        return self.tensor(FLOATS)

    def through(self) -> Tensor:
        value = self.given["value"]
        wrong = (torch.rand(value.numel() + 1), value.int())
        return self.mostly(torch.randn(value.shape).to(value), *wrong)

    def rate(self) -> Tensor | None:
        start = self.given["start"]
        right = self.r.choice([None, torch.rand(start.shape).to(start)])
        return self.mostly(right, torch.rand(start.numel() + 1), start.half())

    def skipped(self) -> Tensor | None:
        count = torch.zeros(self.given["lo"].shape, dtype=torch.int64)
        return self.mostly(self.r.choice([None, count]), count.int(), torch.zeros(7, dtype=torch.int64))

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
        logarithmic = ["nnie"] if self.op == "fake_quant_float" else []
        return self.mostly(self.r.choice(["e4m3", "e5m2", "e2m1", *logarithmic]), "", "e8m0", "E4M3")

    def scale_format(self) -> str:
        return self.mostly(self.r.choice(["e8m0", "e4m3"]), "", "e5m2")

    def tensor_scale(self) -> Tensor | None:
        takes = self.given["scale_format"] == "e4m3"
        return self.mostly(self.r.choice([None, self.vector(1)]) if takes else None, torch.ones(1), torch.ones(2))

    # ---- shaped quantizers

    @cached_property
    def shape_of_values(self) -> str:
        return self.mostly(self.r.choice(["clip", "levels", "interval"]), "", "clips")

    def shape(self) -> str:
        return self.shape_of_values

    def steepness(self) -> Tensor | None:
        soft = self.vector(self.given["scale"].numel()) if self.shape_of_values == "clip" else None
        return self.mostly(self.r.choice([None, soft]), torch.ones(1))

    def levels(self) -> list[int]:
        most = self.given["qmax"]
        taken = sorted({0, *(n for n in (1, 3, 4, 60) if n < most), most}) if self.shape_of_values == "levels" else []
        return self.mostly(taken, [], [0], [1, most], [0, 3, 2, most], list(range(40)), [0, 2**40])

    # ---- pytorch-quantization

    def amax(self) -> Tensor:
        x = self.given["x"]
        if x.dim() == 0 or self.r.random() < 0.4:
            return self.vector(1)
        axis = self.r.randrange(x.dim())
        t = self.vector(x.size(axis))
        return self.mostly(t.reshape(-1, *[1] * (x.dim() - 1 - axis)), t, t.reshape(1, -1))

    def num_bits(self) -> int:
        return self.mostly(self.r.choice([1, 2, 3, 4, 8, 16, 17]), 0, 65, -1, 2**40)

    def unsigned(self) -> bool:
        return self.r.random() < 0.5

    def narrow_range(self) -> bool:
        return self.r.random() < 0.5

    # ---- observers

    def counts(self) -> Tensor:
        """Of one histogram or several, so few bins that a search tries every range; or of the codes of sums."""
        if self.op == "average_codes":
            return self.mostly(torch.full(self.given["sums"].shape, 9.0), self.vector(1), torch.zeros(5))
        if self.op == "search_range":
            several, number = self.r.choice([(False, 1), (True, 3)])
        else:
            several, number = self.channels.axis is not None, self.mostly(max(self.channel_count, 1), 1, 2)
        bins = self.mostly(self.r.choice([2, 4, 6]), 0, 3)
        self.previous = [torch.randn(9) * self.r.choice([0.0, 1.0, 1.0, 40.0, -(2.0**100)]) for _ in range(number)]
        if self.r.random() < 0.3:
            self.previous = [t.abs() for t in self.previous]
        found = [reference.histogram(t, bins) if bins in (2, 4, 6) else (np.zeros(bins), 0, 0) for t in self.previous]
        self.edges = [torch.tensor([float(f[i]) for f in found]) for i in (1, 2)]
        counts = torch.stack([torch.from_numpy(f[0]) for f in found]).to(self.mostly(torch.int64, torch.int32))
        return counts if several else self.mostly(counts[0], counts[None, None])

    def edge(self, end: int) -> Tensor:
        if "counts" in self.given:
            return self.mostly(self.edges[end], self.edges[end].double(), torch.zeros(9), torch.zeros(1, device="meta"))
        if self.op in ("grid_of_range", "take_range_"):
            return self.range_end(end)
        seen = torch.full((self.mostly(self.channel_count, 0, 1, self.channel_count + 1),), (-3.0, 3.0)[end])
        unseen = torch.full_like(seen, (np.inf, -np.inf)[end])
        t = torch.where(torch.rand(seen.shape) < 0.7, seen, unseen)
        return t.to(self.mostly(self.kept, torch.float16, torch.int64))

    @cached_property
    def kept(self) -> torch.dtype:
        return self.r.choice([torch.float32, torch.float64])

    @cached_property
    def ranges(self) -> int:
        return self.r.choice([0, 1, 5])

    def range_end(self, end: int) -> Tensor:
        special = torch.tensor([-3.0, 0.0, 1e-42, 7.0, np.inf, -np.inf, np.nan] + [-9.0, 9.0][end : end + 1] * 20)
        t = special[torch.randint(0, len(special), (self.mostly(self.ranges, 0, 1, 2),))]
        return t.to(self.mostly(self.kept, torch.float16, torch.int64))

    def lo(self) -> Tensor:
        return self.edge(0)

    def hi(self) -> Tensor:
        return self.edge(1)

    def momentum(self) -> float | None:
        if "norm" in self.op:
            return self.mostly(self.r.choice([0.0, 0.1, 1.0]), -0.1, 2.0, float("nan"))
        return self.mostly(self.r.choice([None, 0.1, 1.0]), 0.0, -1.0, 2.0, float("nan"))

    def method(self) -> str:
        return self.mostly(self.r.choice(["percentile", "mse", "l2", "entropy"]), "", "kl")

    def percentile(self) -> float:
        return self.mostly(self.r.choice([1.0, 50.0, 99.9, 100.0]), 0.0, 101.0, float("nan"))

    def symmetric(self) -> bool:
        return self.r.random() < 0.5

    def candidates(self) -> list[int]:
        bins, takes = self.given["counts"].size(-1), self.given["method"] == "entropy" and self.given["symmetric"]
        some = self.r.choices(range(1, bins + 1), k=3) if takes and bins else []
        return self.mostly(self.r.choice([[], some]), [0], [1], [1, bins + 1], [2**40], [-1])

    # ---- batch norm

    @cached_property
    def normalized(self) -> list[int]:
        shape = [self.r.choice([1, 2, 3, 4]) for _ in range(self.r.choice([2, 2, 3, 4, 5]))]
        shape[0] += 1
        shape[1] = self.r.choice([0, 1, 2, 3, 7, 70])
        return self.mostly(shape, [1, 3], [0, 3, 2], [4])

    def of_channels(self) -> Tensor:
        t = self.vector(self.given["x"].size(1) if self.given["x"].dim() > 1 else 1)
        return t * torch.randn(t.shape).sign() if t.dtype in FLOATS and not t.is_meta else t

    def weight(self) -> Tensor | None:
        if "prelu" in self.op:
            return self.r.choice([self.vector(1), self.of_channels()])
        return self.bias()

    def bias(self) -> Tensor | None:
        return self.r.choice([None, self.of_channels()])

    def divisor(self) -> Tensor | None:
        if "running_mean" in self.given:
            return self.offset()
        return self.bias()

    def residual(self) -> Tensor | None:
        self.rebuilt = self.r.random() < 0.5
        x = self.given["x"]
        if self.r.random() < 0.5 or (self.rebuilt and x.dtype not in FLOATS):
            self.rebuilt = False
            return None
        if self.rebuilt:
            self.residual_grid = [torch.tensor([0.5]), self.r.choice([None, torch.tensor([3.0])])]
            self.kept_codes = torch.randint(0, 100, x.shape, device=x.device).to(self.r.choice(CODES[:2]))
            if x.is_meta:
                return torch.empty_like(x)
            return reference.dequantize(self.kept_codes, *self.residual_grid, dtype=x.dtype)
        return self.mostly(torch.randn(x.shape).to(x), torch.ones(2), torch.ones(x.shape).int())

    def residual_codes(self) -> Tensor | None:
        return self.mostly(self.kept_codes, self.kept_codes.int()) if self.rebuilt else None

    def residual_scale(self) -> Tensor | None:
        return self.mostly(self.residual_grid[0].to(self.given["x"].device), None) if self.rebuilt else None

    def residual_zero_point(self) -> Tensor | None:
        z = self.residual_grid[1] if self.rebuilt else None
        return z if z is None else z.to(self.given["x"].device)

    def eps(self) -> float:
        return self.mostly(self.r.choice([0.0, 1e-5, 0.1]), -1.0, float("nan"))

    def low(self) -> float:
        return self.mostly(self.r.choice([-np.inf, 0.0, -1.0]), float("nan"))

    def high(self) -> float:
        return self.mostly(self.r.choice([np.inf, 6.0, 1.0]), float("nan"), -2.0)

    def slope(self) -> float:
        return self.r.choice([0.0, 0.0, 0.1, 1.0])

    def mean(self) -> Tensor:
        if "running_mean" in self.given:
            return self.mostly(torch.randn(self.given["running_mean"].shape), torch.ones(2))
        return torch.randn(self.given["x"].shape[1:2]).to(self.mostly(torch.float32, torch.float64, torch.int64))

    def variance(self) -> Tensor:
        return self.mean().abs()

    def wanted(self) -> list[bool]:
        return [self.r.random() < 0.7 for _ in range(7)]

    def running_mean(self) -> Tensor:
        t = torch.randn(self.mostly(self.r.choice([0, 1, 5]), 2)).to(self.r.choice(FLOATS))
        return self.mostly(t, t.long(), t[None], t.expand(2, -1)[:, 0] if t.numel() else t)

    def running_var(self) -> Tensor:
        t = self.given["running_mean"]
        return self.mostly(torch.rand(t.shape).to(t), torch.ones(3), torch.ones(t.shape).half())

    def totals(self) -> Tensor | None:
        """Of this process: those of x where forward takes them, else of anything."""
        given, like = self.given, self.given.get("x", self.given.get("running_mean"))
        channels = like.numel() if "running_mean" in given else like.size(1) if like.dim() > 1 else 1
        right = torch.full((2, 2 * channels + 1), 7.0, dtype=torch.float64, device=like.device)
        if self.op == "batch_norm_fake_quant":
            divisor = given["divisor"]
            if like.dtype not in FLOATS or like.dim() < 2 or like.is_meta or (divisor is not None and divisor.is_meta):
                return None
            plain = divisor is None or (
                divisor.dtype in FLOATS and bool((divisor.abs() > 1e-2).all() and divisor.isfinite().all())
            )
            if not plain:
                return None
            with contextlib.suppress(ValueError):
                right = OPS["batch_norm_totals"](like, divisor, None)
        return self.mostly(self.r.choice([None, right]), right.float(), right[0], right[:, 1:])

    def process_group(self) -> str | None:
        """None: the tests have one process here, and tests/distributed has several."""
        return None

    def packs_codes(self) -> bool:
        return self.r.random() < 0.5

    in_memory_order = packs_codes

    def offset(self) -> Tensor | None:
        if self.op == "requantize":
            return self.r.choice([None, self.vector(1)])
        if self.op == "batch_norm_totals":
            return self.bias()
        t = torch.randn(self.given["running_mean"].shape).to(self.r.choice(FLOATS))
        return self.mostly(self.r.choice([None, t]) if "mean" in self.given else t, torch.ones(2))

    def count(self) -> int:
        if self.op == "requantize_fixed_point":
            return self.mostly(self.r.choice([1, 1, 7, 49, 3000]), 0, -1, 2**20)
        return self.mostly(self.r.choice([2, 9, 2**40]), 1, 0, -3)

    # ---- max pooling: the image is drawn such that it holds a window

    @cached_property
    def image(self) -> list[int]:
        lead = [self.r.choice([0, 1, 2, 70]) for _ in range(self.r.choice([1, 2]))]
        return [*lead, self.r.choice([6, 9]), self.r.choice([5, 7, 70])]

    @cached_property
    def window(self) -> list[list[int]]:
        sides = [[self.r.choice(n) for _ in range(2)] for n in ([1, 2, 3], [1, 2, 3], [0, 1], [1, 2])]
        sides[2] = [min(p, k // 2) for p, k in zip(sides[2], sides[0], strict=True)]
        return sides

    def results(self, i: int) -> int:
        kernel, stride, padding, dilation = (sides[i] for sides in self.window)
        room = self.image[i - 2] + 2 * padding - dilation * (kernel - 1) - 1
        self.ceils = False
        return room // stride + 1

    def kernel_size(self) -> list[int]:
        return self.mostly(self.window[0], [0], [-1, 2], [2] * 3, [], [300, 300], [2**40])

    def stride(self) -> list[int]:
        return self.mostly(self.window[1], [0], [], [-3, 1])

    def padding(self) -> list[int]:
        return self.mostly(self.window[2], [-1], [7], [2**40])

    def dilation(self) -> list[int]:
        return self.mostly(self.window[3], [0], [2**30], [-1, 1])

    def ceil_mode(self) -> bool:
        return False if self.op == "max_pool_offsets_backward" else self.r.random() < 0.5

    def offsets(self) -> Tensor:
        t = torch.randint(0, 256, self.given["grad"].shape, device=self.given["grad"].device)
        return self.mostly(t.byte(), t.int(), t[..., :1].byte())


class DrawnLayer(Drawn):
    """Arguments of quant_layer, quant_weight and their backwards: a layer is drawn first, and whether it computes on codes."""

    @cached_property
    def shape(self) -> Shape:
        r = self.r
        if r.random() < 0.3:
            features, lead = r.choice([1, 3, 8]), [r.choice([0, 1, 2, 3]) for _ in range(r.choice([1, 1, 2]))]
            return Shape((*lead, features), (r.choice([1, 2, 6]), features))
        dims, groups, transposed = r.choice([1, 2, 2, 3]), r.choice([1, 1, 2, 3]), r.random() < 0.4
        inputs, outputs = groups * r.choice([1, 2]), groups * r.choice([1, 2])
        kernel, stride, padding, dilation, extra = (
            tuple(r.choice(choice) for _ in range(dims)) for choice in ([1, 2, 3], [1, 2], [0, 1], [1, 1, 2], [0, 1])
        )
        fit = [min(e, max(s, d) - 1) * transposed for e, s, d in zip(extra, stride, dilation, strict=True)]
        weight = (inputs, outputs // groups, *kernel) if transposed else (outputs, inputs // groups, *kernel)
        x = r.choice([0, 1, 2]), inputs, *(r.choice([5, 7]) for _ in range(dims))
        return Shape(x, weight, Geometry(stride, padding, dilation, tuple(fit), transposed, groups))

    @cached_property
    def on_integers(self) -> bool:
        return self.r.random() < 0.4

    def memory_format(self) -> torch.memory_format | None:
        is_2d = len(self.shape.geometry.stride) == 2
        fits = [None, torch.contiguous_format, *[torch.channels_last] * is_2d]
        return self.mostly(self.r.choice(fits), torch.channels_last, torch.channels_last_3d, torch.preserve_format)

    @cached_property
    def of_input(self) -> tuple[int, int, bool]:
        """The range of the input's codes, and whether they are packed."""
        low, high = self.r.choice([(-128, 127), (-127, 127), (0, 255), (0, 127), (-8, 7), (0, 15), (-2, 1)])
        return low, high, high - low < 16 and self.r.random() < 0.5

    def x(self) -> Tensor:
        return self.tensor(FLOATS, self.mostly(list(self.shape.x), [2, 3], [4, 2, 5, 5]))

    def grad(self) -> Tensor:
        if self.op == "quant_weight_backward":
            return self.tensor(FLOATS, self.mostly(list(self.shape.weight), [2, 3]))
        y = self.shape.compute(*(torch.empty(n, device="meta") for n in (self.shape.x, self.shape.weight)), None)
        return self.tensor(FLOATS, self.mostly(list(y.shape), [2, 3]))

    def size(self) -> list[int]:
        return self.mostly(list(self.shape.x), [3], [], [2**40, 2**40], [-1] * len(self.shape.x))

    def codes(self) -> Tensor:
        low, high, is_packed = self.of_input
        codes = torch.randint(low, high + 1, self.shape.x).to(torch.int8 if low < 0 else torch.uint8)
        if is_packed:
            codes = packed(codes)
        elif codes.dim() > 1 and self.r.random() < 0.3:
            codes = codes.transpose(0, -1).contiguous().transpose(0, -1)
        return self.mostly(codes, codes[:1], codes.int(), codes.to("meta"))

    def x_scale(self) -> Tensor:
        return self.vector(1)

    def x_zero_point(self) -> Tensor | None:
        inside = torch.tensor([float(self.r.randint(*self.of_input[:2]))])
        return self.mostly(self.r.choice([None, inside, self.vector(1)]), torch.ones(2))

    def x_qmin(self) -> int:
        return self.mostly(self.of_input[0], *ENDS)

    def x_qmax(self) -> int:
        return self.mostly(self.of_input[1], *ENDS)

    def weight(self) -> Tensor:
        return self.tensor(
            FLOATS, self.mostly(list(self.shape.weight), [3, 2], [2, 2, 3, 3], [0, *self.shape.weight[1:]])
        )

    def of_outputs(self) -> Tensor | None:
        return self.r.choice([None, self.vector(self.shape.channels)])

    bias = factor = of_outputs

    @property
    def input(self) -> Tensor:
        return self.given["weight"]  # whose grid it is

    @cached_property
    def channels(self) -> Channels:
        if self.on_integers and self.r.random() < 0.9:
            return self.r.choice([Channels(), Channels(**self.shape.per_output)])
        return Drawn.channels.func(self)

    def zero_point(self) -> Tensor | None:
        return self.mostly(None, super().zero_point()) if self.on_integers else super().zero_point()

    def qmin(self) -> int:
        return self.mostly(self.r.choice([-128, -127, -8, -1, 0]), *ENDS) if self.on_integers else super().qmin()

    def qmax(self) -> int:
        return self.mostly(self.r.choice([1, 7, 127]), *ENDS) if self.on_integers else super().qmax()

    def spatial(self, name: str) -> list[int]:
        right = list(getattr(self.shape.geometry, name))
        return self.mostly(right, [], [0], [-1] * len(right), [2**40] * len(right), [3] * len(right))

    def stride(self) -> list[int]:
        return self.spatial("stride")

    def padding(self) -> list[int]:
        return self.spatial("padding")

    def dilation(self) -> list[int]:
        return self.spatial("dilation")

    def output_padding(self) -> list[int]:
        return self.spatial("output_padding")

    def transposed(self) -> bool:
        return self.mostly(self.shape.geometry.transposed, True, False)

    def groups(self) -> int:
        return self.mostly(self.shape.geometry.groups, 0, -2, 2, 2**40)

    def integer(self) -> bool:
        return self.on_integers

    def dtype(self) -> torch.dtype | None:
        return self.mostly(self.r.choice([None, *FLOATS]), *OTHERS)

    def x_dtype(self) -> torch.dtype:
        return self.mostly(self.r.choice(FLOATS), *OTHERS)

    def wanted(self) -> list[bool]:
        return [self.r.random() < 0.7 for _ in range(4 if self.op == "quant_weight_backward" else 7)]

    def updated(self) -> Tensor | None:
        return self.mostly(None, torch.ones(1), torch.tensor([[0]]), torch.tensor([-1]), torch.tensor([2**40]))

    @cached_property
    def has_raw(self) -> bool:
        return self.r.random() < 0.4

    def raw(self) -> Tensor | None:
        if not self.has_raw:
            return self.mostly(None, torch.ones(self.shape.x))
        return self.mostly(self.x(), None, torch.ones(2, 3))

    def raw_scale(self) -> Tensor | None:
        return self.mostly(self.vector(1), None, torch.ones(2)) if self.has_raw else self.mostly(None, torch.ones(1))

    def raw_factor(self) -> float:
        return self.r.choice([1.0, 0.01, -2.0])


class DrawnRescale(Drawn):
    """Arguments of batch_norm_rescale_: a value of each for each scale."""

    def start(self) -> Tensor | None:
        return None if self.r.random() < 0.2 else super().start()

    def rate(self) -> Tensor | None:
        return self.mostly(None, torch.ones(2)) if self.given["start"] is None else super().rate()

    def of_start(self, values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        start = self.given["start"]
        if start is None:
            return values.to(dtype)
        right = values.to(start.dtype if dtype is None else dtype)
        return self.mostly(right, torch.rand(start.numel() + 1), right.long(), right[::2])

    def known(self) -> Tensor | None:
        if self.given["start"] is None:
            return self.mostly(None, torch.ones(2))
        count = self.given["start"].numel()
        return self.of_start(torch.rand(count) * (torch.rand(count) > 0.3))

    def variance(self) -> Tensor:
        start = self.given["start"]
        count = 4 if start is None else start.numel()
        shared = count == 1 and self.r.random() < 0.5
        return self.of_start(torch.randn(5 if shared else count).square(), self.r.choice(FLOATS))

    def gamma(self) -> Tensor | None:
        count = self.given["variance"].numel()
        values = torch.randn(count) * self.r.choice([1.0, 1e-20]) * (torch.rand(count) > 0.1)
        return self.r.choice([None, self.of_start(values, self.r.choice(FLOATS))])

    def held(self) -> Tensor | None:
        variance = self.given["variance"]
        right = (
            torch.rand_like(variance, memory_format=torch.contiguous_format) if variance.is_floating_point() else None
        )
        return self.mostly(right, torch.rand(3)) if self.r.random() < 0.5 else None

    def of_step(self, value: int) -> Tensor | None:
        if self.given["held"] is None:
            return self.mostly(None, torch.tensor(1))
        right = torch.tensor(value, device=self.given["variance"].device)
        return self.mostly(right, None, right.float(), torch.zeros(2, dtype=torch.int64))

    def taken(self) -> Tensor | None:
        return self.of_step(self.r.choice([-1, 3]))

    def clock(self) -> Tensor | None:
        return self.of_step(3)


class DrawnStep(Drawn):
    """Arguments of take_range_: of a clock that has moved or not, in the first steps or after them."""

    def count(self) -> Tensor:
        right = torch.tensor([self.r.choice([-1, 3]), self.r.choice([0, 4, 5, 9])])
        return self.mostly(right, right.float(), right[:1], right.repeat(2)[::2])

    def clock(self) -> Tensor:
        return self.mostly(torch.tensor(3), torch.tensor([3]), torch.tensor(3.0), torch.tensor([3, 3]))

    def steps(self) -> int:
        return self.r.choice([0, 5, 2**40])


DRAWN = {
    "quant_layer": DrawnLayer,
    "quant_weight": DrawnLayer,
    "batch_norm_rescale_": DrawnRescale,
    "take_range_": DrawnStep,
}


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


def check_fake_quant_(drawn: Drawn, found: Results, mask: bool, **grid) -> None:
    """The mask's bits are in the order in which fake_quant's result would lie."""
    assert_same(drawn.given["x"], reference.fake_quant(**grid))
    beside = OPS["fake_quant"](**grid)[0]
    assert torch.equal(
        found[-1], reference.packed(reference.inside(**grid), beside) if mask else found[-1].new_empty(0)
    )


def check_observe_fake_quant(
    drawn: Drawn,
    found: Results,
    x,
    lo,
    hi,
    scale,
    zero_point,
    qmin,
    qmax,
    momentum,
    pow2_scale,
    float16_scale,
    skipped,
    mask,
    **channels,
) -> None:
    """From the ranges that came out on."""
    new_lo, new_hi, new_scale, new_zero_point = (drawn.given[n] for n in ("lo", "hi", "scale", "zero_point"))
    check_observe_minmax_(drawn, (new_lo, new_hi, drawn.given["skipped"]), x, lo, hi, momentum, skipped, **channels)
    check_grid_of_range(drawn, (new_scale, new_zero_point), new_lo, new_hi, qmin, qmax, zero_point is None, pow2_scale)
    used = reference.float16_scale(new_scale) if float16_scale else new_scale
    grid = {"x": x, "scale": used, "zero_point": new_zero_point, "qmin": qmin, "qmax": qmax}
    check_fake_quant(drawn, found, 1.0, mask, **grid, **channels)


def check_grid_of_range(drawn: Drawn, found: Results, lo, hi, qmin, qmax, symmetric, pow2_scale) -> None:
    scale, zero_point = reference.grid_of_range(lo, hi, qmin, qmax, symmetric, pow2_scale)
    assert_same(found[0], scale)
    if not symmetric:
        assert_same(found[1], zero_point)
    else:
        assert found[1] is None or found[1].numel() == 0


def check_take_range_(
    drawn: Drawn, found: Results, lo, hi, scale, zero_point, count, clock, qmin, qmax, steps, pow2_scale
) -> None:
    moved = int(clock) != int(count[0])
    assert drawn.given["count"].tolist() == [int(clock), int(count[1]) + moved]
    takes = (lo <= hi) & (moved and int(count[1]) < steps)
    grid = reference.grid_of_range(lo, hi, qmin, qmax, zero_point is None, pow2_scale)
    assert_same(drawn.given["scale"], torch.where(takes, grid[0], scale))
    if zero_point is not None:
        assert_same(drawn.given["zero_point"], torch.where(takes, grid[1], zero_point))


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


def check_fake_affine_tensor_quant(drawn: Drawn, found: Results, x, min_range, max_range, num_bits, mask) -> None:
    kind = reference.arithmetic(x.dtype)
    v, low, high = (reference.array(t, kind) for t in (x, min_range.reshape(()), max_range.reshape(())))
    with np.errstate(all="ignore"):
        step = usable((high - low) / kind(2.0**num_bits - 1))
        lowest, highest = kind(-(2.0 ** (num_bits - 1))), kind(2.0 ** (num_bits - 1) - 1)
        zero = np.rint(low / step) - lowest
        wanted = (np.clip(np.rint(v / step) - zero, lowest, highest) + zero) * step
    assert_same(found[0] + 0, tensor(wanted, x.dtype) + 0)
    inside = tensor((low <= v) & (v <= high), torch.bool)
    assert torch.equal(found[1], reference.packed(inside, found[0]) if mask else found[1].new_empty(0))


def check_scaled_e4m3(drawn: Drawn, found: Results, x, amax, mask) -> None:
    """By fake_quant_float; torch's number / tensor rounds twice, as there."""
    wide = torch.promote_types(x.dtype, torch.float32)
    largest = amax.to(wide).abs().clamp(min=2.0**-126)
    largest = largest.reshape(() if amax.numel() == 1 else amax.shape[-x.dim() :])
    none, v = largest <= 2.0**-24, x.to(wide)
    multiplier = torch.where(none, 1.0, 448 / largest)
    wanted = reference.fake_quant_float(v * multiplier, torch.ones((), dtype=wide), "e4m3")[0] / multiplier
    assert_same(found[0] + 0, wanted.masked_fill(none | (v.abs() < 2.0**-24), 0).to(x.dtype) + 0)
    inside = v.abs() <= largest
    assert torch.equal(found[1], reference.packed(inside, found[0]) if mask else found[1].new_empty(0))


def usable(scale: np.ndarray) -> np.ndarray:
    """The magnitude of a scale, at least the smallest normal float32."""
    return np.maximum(np.abs(scale), scale.dtype.type(reference.TINY))


def float32(*tensors: Tensor) -> list[np.ndarray]:
    """Tensors as float32; those of one element become numbers by their shape."""
    return [reference.array(t.float(), np.float32) for t in tensors]


def bounds(qmin: int, qmax: int) -> tuple[np.float32, np.float32]:
    """The nearest inwards, where float32 has them."""
    low, high = np.float32(qmin), np.float32(qmax)
    return low, np.nextafter(high, np.float32(0)) if float(high) > qmax else high


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)


def check_requantize(drawn: Drawn, found: Results, x, factor, scale, qmin, qmax, offset, zero_code, fused) -> None:
    (v, step), zero = float32(x, scale.reshape(())), np.float32(zero_code)
    with np.errstate(all="ignore"):
        step, added = usable(step), zero if offset is None else float32(offset.reshape(()))[0]
        if factor is None:
            scaled = v / step + added
        else:
            f = float32(factor.reshape(() if factor.numel() == 1 else factor.shape[-x.dim() :]))[0]
            scaled = fma(v, f, added) if fused else v * f + added
        wanted = np.clip(np.rint(scaled) - zero, *bounds(qmin, qmax)) * step
    assert_same(found[0] + 0, tensor(wanted, torch.float32) + 0)


def check_requantize_fixed_point(
    drawn: Drawn, found: Results, x, factor, scale, qmin, qmax, count, rounded_once
) -> None:
    """The formula in integers is that of integers of less than 2^31, and of factors that keep them so."""
    assert (found[0].shape, found[0].dtype) == (x.shape, torch.float32)
    if count != 1 or factor.numel() != 1 or not 2**-20 < float(factor) < 1:
        return
    whole = (x == x.round()) & (x.abs() < 2**30)
    rounded = litert_kernels.scaled_once if rounded_once else litert_kernels.scaled
    codes = rounded(x[whole].double().numpy().astype(np.int64), np.float64(float(factor)))
    step = usable(float32(scale.reshape(()))[0])
    wanted = np.clip(codes, *(np.float64(end) for end in bounds(qmin, qmax))) * np.float64(step)
    assert_same(found[0][whole] + 0, tensor(wanted.astype(np.float32), torch.float32) + 0)


def check_average_codes(drawn: Drawn, found: Results, sums, counts) -> None:
    assert (found[0].shape, found[0].dtype) == (sums.shape, torch.float32)
    near = (found[0] - sums.double() / counts.double()).abs() <= 1 + sums.double().abs() / 2**22
    assert bool(near[(sums.double().abs() < 2**30) & (counts >= 1)].all())


def check_softmax_codes(drawn: Drawn, found: Results, x, scale, dim) -> None:
    wanted = torch.softmax(x.double().round() * scale, dim) * 256
    assert (found[0].shape, found[0].dtype) == (x.shape, torch.float32)
    near = (found[0] - wanted.clamp(max=255)).abs() <= 2
    assert bool(near[(x.double().abs() < 2**15).all(dim, keepdim=True).expand(x.shape)].all())


def check_hard_swish_codes(drawn: Drawn, found: Results, x, x_scale, scale, qmin, qmax) -> None:
    wanted = (torch.nn.functional.hardswish(x.double().round() * x_scale) / scale).clamp(qmin, qmax)
    near = (found[0] - wanted).abs() <= 2 + wanted.abs() / 2**12
    assert bool(near[x.double().abs() < 2**8].all())


def check_resize_linear_codes(drawn: Drawn, found: Results, x, size, align_corners) -> None:
    assert (found[0].shape, found[0].dtype) == ((*x.shape[:2], *size), torch.float32)
    if x.numel() and bool((x.double().abs() < 2**20).all()):
        low, high = (f(x.double().round(), (2, 3), keepdim=True) for f in (torch.amin, torch.amax))
        assert bool(((low <= found[0]) & (found[0] <= high)).all())


def check_add_codes(
    drawn: Drawn, found: Results, x, other, qmin, qmax, fixed_point, rounded_twice, subtract, **grids
) -> None:
    if rounded_twice:  # the formula in integers is for those of 32 bits: tests/ops/test_requantize.py
        return
    a, b, *steps = float32(x, other, *(grids[name].reshape(()) for name in ("x_scale", "other_scale", "scale")))
    za, zb, zy = (np.float32(grids[name]) for name in ("x_zero_point", "other_zero_point", "zero_point"))
    with np.errstate(all="ignore"):
        sa, sb, sy = (usable(s) for s in steps)
        a, b, ra, rb = np.rint(a / sa), np.rint(b / sb), sa / sy, sb / sy
        if fixed_point:
            if not (np.isfinite(ra) and np.isfinite(rb) and max(ra, rb) > 0):
                return
            unit = 2.0 ** (21 - math.frexp(max(ra, rb))[1])
            fa, fb = (np.rint(np.float64(r) * unit) for r in (ra, rb))
            codes = np.floor((a.astype(np.float64) * fa + b.astype(np.float64) * fb) / unit + 0.5).astype(np.float32)
        else:
            inner = fma(b + zb, rb, zy - fma(ra, za, rb * zb))
            codes = np.rint(fma(a + za, ra, inner)) - zy
        wanted = np.clip(codes, *bounds(qmin, qmax)) * sy
    assert_same(found[0] + 0, tensor(wanted, torch.float32) + 0)


def check_fake_quant_away(drawn: Drawn, found: Results, x, scale, zero_point, qmin, qmax) -> None:
    kind = reference.arithmetic(x.dtype)
    v, step = reference.array(x, kind), usable(reference.array(scale.reshape(()), kind))
    zero = kind(0) if zero_point is None else np.rint(reference.array(zero_point.reshape(()), kind))
    with np.errstate(all="ignore"):
        q = v / step
        whole = np.trunc(q)
        codes = whole + np.where(np.abs(q - whole) >= 0.5, np.sign(q), kind(0)).astype(kind)
        wanted = (np.clip(codes + zero, kind(qmin), kind(qmax)) - zero) * step
    assert_same(found[0] + 0, tensor(wanted, x.dtype) + 0)


def check_fake_quant_by_factor(drawn: Drawn, found: Results, x, scale, zero_point, qmin, qmax) -> None:
    kind = reference.arithmetic(x.dtype)
    v, step = reference.array(x, kind), reference.array(scale.reshape(()), kind)
    zero = kind(0) if zero_point is None else np.rint(reference.array(zero_point.reshape(()), kind))
    with np.errstate(all="ignore"):
        step, ends = usable(step), bounds(qmin, qmax) if kind is np.float32 else (kind(qmin), kind(qmax))
        low, high = ((end - zero) * step for end in ends)
        width = ends[1] - ends[0]
        factor = width / (high - low)
        codes = np.clip(np.rint(v * factor - low * factor), kind(0), width)
        wanted = (codes + ends[0] - zero) * step
    assert_same(found[0] + 0, tensor(wanted, x.dtype) + 0)


def check_centred_codes(drawn: Drawn, found: Results, x, scale) -> None:
    kind = reference.arithmetic(x.dtype)
    with np.errstate(all="ignore"):
        wanted = np.rint(reference.array(x, kind) / usable(reference.array(scale.reshape(()), kind)))
    assert_same(found[0] + 0, tensor(wanted, found[0].dtype) + 0)


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


def check_fake_quant_shaped(drawn: Drawn, found: Results, **given) -> None:
    """Signs of zeros aside: of levels, and of the transform at zero."""
    assert_same(found[0] + 0, tensor(Shaped(**given).values(), given["x"].dtype) + 0)


def check_fake_quant_shaped_backward(drawn: Drawn, found: Results, grad, **given) -> None:
    steepness = given["steepness"]
    tensors = tuple(given[name] for name in ("scale", "zero_point", "steepness"))
    finite = all(t is None or bool(t.isfinite().all()) for t in tensors) and bool((given["scale"].abs() > 1e-3).all())
    if finite and (steepness is None or bool(((steepness > 0.05) & (steepness < 30)).all())):
        Shaped(**given).check(found, grad, tensors)


def check_prelu_fake_quant(drawn: Drawn, found: Results, grad_factor: float, **given) -> None:
    assert_same(found[0], reference.Prelu(**given).values())


def check_prelu_fake_quant_backward(drawn: Drawn, found: Results, grad, grad_factor, **given) -> None:
    wanted = reference.Prelu(**given).gradients(grad, grad_factor)
    x, weight, scale = given["x"], given["weight"], given["scale"]
    assert_same(found[0], wanted.dx)
    assert (found[1].shape, found[2].shape) == (weight.shape, scale.shape)
    if all(t is None or t.isfinite().all() for t in (weight, scale, given["zero_point"])):
        assert_sum(found[1], weight, wanted.dw, wanted.dw_mass, x)
        assert_sum(found[2], scale, wanted.ds, wanted.ds_mass, x)


def normalized(x, residual, residual_codes, residual_scale, residual_zero_point, **given) -> reference.Normalized:
    if residual_codes is not None:
        residual = reference.dequantize(residual_codes, residual_scale, residual_zero_point, dtype=x.dtype)
    return reference.Normalized(x, residual=residual, **given)


def check_batch_norm_totals(drawn: Drawn, found: Results, x, divisor, offset, process_group) -> None:
    """Of one process, whose exchange the offset does not touch."""
    channels, wide = x.size(1), reference.wide(x).double().transpose(0, 1).flatten(1)
    assert found[0].shape == (2, 2 * channels + 1)
    assert torch.equal(found[0][0], found[0][1]) or not found[0].isfinite().all()
    assert found[0][0, -1] == (x.numel() // channels if channels and x.numel() else 0)
    f = torch.ones(channels) if divisor is None else divisor
    f = f.to(torch.float64 if x.dtype == torch.float64 else torch.float32).double()
    if bool((f.abs() > 1e-30).all()) and f.isfinite().all():
        terms = wide / f[:, None]
        unit = 1e-12 if x.dtype == torch.float64 else 1e-5
        for got, each in zip(found[0][0, :-1].view(2, -1), (terms, terms * terms), strict=True):
            assert bool(((got - each.sum(1)).abs() <= unit * each.abs().sum(1)).all())


def check_batch_norm_fake_quant(
    drawn: Drawn, found: Results, grad_factor: float, totals, process_group, packs_codes: bool, **given
) -> None:
    x, (y, codes, mean, variance) = given["x"], found
    if x.numel() == 0:
        return
    wide = reference.wide(x).double()
    wanted_variance, wanted_mean = torch.var_mean(wide, [0, *range(2, x.dim())], correction=0)
    rtol = 1e-12 if x.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(mean.double(), wanted_mean, rtol=rtol, atol=1e-5 * float(wide.abs().max()))
    torch.testing.assert_close(variance.double(), wanted_variance, rtol=rtol, atol=1e-12 * float(wide.abs().max()) ** 2)
    wanted = normalized(mean=mean, variance=variance, **given)
    assert_same(y, wanted.y())
    qmin, qmax = given["qmin"], given["qmax"]
    if given["scale"] is not None and ((-128 <= qmin < 0 and qmax <= 127) or (qmin >= 0 and qmax <= 255)):
        whole = reference.quantize(wanted.value, **wanted.grid, dtype=torch.int8 if qmin < 0 else torch.uint8)
        packs = packs_codes and qmin >= (-8 if qmin < 0 else 0) and qmax <= (7 if qmin < 0 else 15)
        if not packs or codes.numel():  # the order of memory may not be that of packed codes
            assert_same(
                codes, packed_in_memory(torch.empty_like(y, dtype=whole.dtype).copy_(whole)) if packs else whole
            )
    else:
        assert codes.numel() == 0


def check_batch_norm_fake_quant_backward(
    drawn: Drawn,
    found: Results,
    grad,
    grad_factor: float,
    wanted: list[bool],
    totals,
    process_group,
    **given,
) -> None:
    x, names = given["x"], ("weight", "bias", "divisor")
    if x.numel() == 0:
        return
    oracle = normalized(**given)
    dx, of_channels = oracle.gradients(grad, given["eps"])
    if wanted[4]:
        assert_same(found[4], oracle.grad_before(grad).to(x.dtype))
    else:
        assert found[4].numel() == 0
    scale = float(dx.abs().max())
    if np.isfinite(scale) and torch.isfinite(oracle.centred).all():
        factor = oracle.factor.double().abs()
        least = (
            float(factor[factor > 0].min()) if factor.any() else 1.0
        )  # float32 rounds it to few bits where it is tiny
        rounded = max(torch.finfo(x.dtype).eps, 1e-5, 2.0**-149 / max(least, 2.0**-149))
        largest = float((oracle.grad_before(grad).double() * oracle.factor.double()).abs().max()) + scale
        limit, smallest = torch.finfo(x.dtype).max, torch.finfo(x.dtype).tiny
        assert ((found[0].double() - dx).abs() <= rounded * largest + smallest)[dx.abs() < limit].all()
    for got, name, is_wanted in zip(found[1:4], names, wanted[1:4], strict=True):
        if given[name] is None or not is_wanted:
            assert got.numel() == 0
            continue
        want, mass = of_channels[name]
        unit = max(torch.finfo(got.dtype).eps, 1e-5)
        finite = (mass * 2).lt(torch.finfo(got.dtype).max)
        assert ((got.double() - want).abs() <= unit * mass + 1e-30)[finite].all()
    for got, like, is_wanted in zip(found[5:], (given["scale"], given["zero_point"]), wanted[5:], strict=True):
        assert got.shape == (like.shape if like is not None and is_wanted else (0,))


def check_batch_norm_track_(
    drawn: Drawn, found: Results, running_mean, running_var, mean, variance, divisor, offset, momentum, count, totals
) -> None:
    count = count if totals is None else float(totals[0, -1])
    kind = torch.float64 if mean.dtype == torch.float64 else torch.float32
    mean, variance, f, offset = (
        (torch.full(mean.shape, absent) if t is None else t).to(kind).double()
        for t, absent in ((mean, 0), (variance, 0), (divisor, 1), (offset, 0))
    )
    batch = mean / f + offset, variance / (f * f) * (count / (count - 1))
    for got, old, new in zip(found, (running_mean, running_var), batch, strict=True):
        assert_same(got, ((1 - momentum) * old.double() + momentum * new).to(got.dtype))


def check_batch_norm_rescale_(
    drawn: Drawn, found: Results, start, rate, known, variance, gamma, eps, held, taken, clock
) -> None:
    present = variance
    if held is not None and int(taken) == int(clock):
        variance = held
    assert_same(found[0], variance)
    for name, value in (("held", variance), ("taken", clock)):
        if held is not None:
            assert_same(drawn.given[name], value)
    if start is None:
        return
    kind = start.dtype
    shared = start.numel() != variance.numel()

    def magnitude(variance: Tensor) -> Tensor:
        factor = (variance.to(kind) + eps).rsqrt() * (1 if gamma is None else gamma.to(kind))
        found = factor.masked_fill(factor == 0, 1).abs().clamp(2.0**-30, 2.0**30)
        # of sums in other orders
        return found.double().square().mean().sqrt().to(kind).reshape(1) if shared else found

    now = magnitude(variance)
    before = torch.where(known > 0, known, magnitude(present))
    ratio = torch.where(now.isnan() | ~(before > 0), torch.ones_like(now), now / before)
    wanted = (start * ratio, None if rate is None else rate * (ratio * ratio), torch.where(now.isnan(), known, now))
    for name, want in zip(("start", "rate", "known"), wanted, strict=True):
        if want is not None and shared:
            torch.testing.assert_close(
                drawn.given[name].reshape(1), want, rtol=8 * torch.finfo(kind).eps, atol=0, equal_nan=True
            )
        elif want is not None:
            assert_same(drawn.given[name], want)


def check_max_pool_offsets(drawn: Drawn, found: Results, x, kernel_size, stride, padding, dilation, ceil_mode) -> None:
    if x.numel() == 0:
        return
    wanted = torch.nn.functional.max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode)
    assert_same(found[0], wanted)
    assert (found[1] < math.prod(kernel_size) ** (3 - len(kernel_size))).all()


def check_max_pool_offsets_backward(
    drawn: Drawn, found: Results, grad, offsets, size, kernel_size, stride, padding, dilation, ceil_mode
) -> None:
    """A sum over all windows of the gradients at each place, where it lies in x."""
    wanted = torch.zeros(size, dtype=torch.float64)
    sides = [s * 2 if len(s) == 1 else s for s in (kernel_size, stride, padding, dilation)]
    ends = [torch.arange(n) for n in grad.shape[-2:]]
    for place in range(math.prod(sides[0])):
        at = [place // sides[0][1], place % sides[0][1]]
        y, x = (ends[i] * sides[1][i] - sides[2][i] + at[i] * sides[3][i] for i in (0, 1))
        here = grad.double() * (offsets == place)
        rows, columns = ((p >= 0) & (p < n) for p, n in ((y, size[-2]), (x, size[-1])))
        here = here[..., rows, :][..., columns]
        flat = (y[rows][:, None] * size[-1] + x[columns]).reshape(-1)
        wanted.flatten(-2).index_add_(-1, flat, here.flatten(-2))
    assert found[0].dtype == grad.dtype
    mass = float(grad.double().abs().max()) * 9 if grad.numel() else 0
    torch.testing.assert_close(found[0].double(), wanted, rtol=0, atol=mass * 4 * torch.finfo(grad.dtype).eps)


def check_snapshot(drawn: Drawn, found: Results, x: Tensor, changes: bool) -> None:
    assert (found[0].dtype, found[0].shape) == (x.dtype, x.shape)
    assert found[0].contiguous().untyped_storage().tolist() == x.clone().contiguous().untyped_storage().tolist()


def check_straight_through(drawn: Drawn, found: Results, value: Tensor, through: Tensor) -> None:
    assert_same(found[0], value)


def check_positive_scale(drawn: Drawn, found: Results, start: Tensor, ratio: Tensor, rate: Tensor | None) -> None:
    assert_same(found[0], start * ratio.abs().clamp(min=2**-24).reshape(start.shape))


def check_float16_scale(drawn: Drawn, found: Results, scale: Tensor) -> None:
    assert_same(found[0], reference.float16_scale(scale))


def check_quantize(drawn: Drawn, found: Results, **given) -> None:
    assert_same(found[0], reference.quantize(**given))


def check_dequantize(drawn: Drawn, found: Results, **given) -> None:
    assert_same(found[0], reference.dequantize(**given))


def check_quantize_int4(drawn: Drawn, found: Results, in_memory_order: bool, **given) -> None:
    x, codes = given["x"], reference.quantize(**given)
    is_image = in_memory_order and x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    by_channels = (
        packed_in_memory(torch.empty_like(x, dtype=codes.dtype).copy_(codes)) if is_image else codes.new_empty(0)
    )
    assert_same(found[0], by_channels if by_channels.numel() else packed(codes))


def check_dequantize_int4(drawn: Drawn, found: Results, packed: Tensor, size: list[int], signed: bool, **given) -> None:
    halves = torch.stack([packed & 15, packed >> 4], 1).reshape(-1)[: math.prod(size)].to(torch.int8)
    codes = torch.where(halves > 7, halves - 16, halves) if signed else halves
    assert_same(found[0], reference.dequantize(codes.reshape(size), **given))


def check_minmax(drawn: Drawn, found: Results, **given) -> None:
    for got, wanted in zip(found, reference.minmax(**given), strict=True):
        assert_same(got, wanted)


def check_observe_minmax_(drawn: Drawn, found: Results, x, lo, hi, momentum, skipped, **channels) -> None:
    """`lo` and `hi` are those before; three roundings of what is at most as large as the largest of all."""
    counted = () if skipped is None else (skipped,)
    found = found[: 2 + len(counted)]
    for got, wanted in zip(found, reference.moved((lo, hi), x, momentum, *counted, **channels), strict=True):
        if got.dtype == torch.int64:
            assert torch.equal(got, wanted)
            continue
        exact = got.double().eq(wanted) | (got.isnan() & wanted.isnan())
        largest = x.double().abs().nan_to_num(0, 0).amax() + 3 if x.numel() else 3
        near = (got.double() - wanted).abs() <= 3 * largest * torch.finfo(got.dtype).eps
        assert (exact | (near if momentum else False)).all()


def check_observe_histogram_(drawn: Drawn, found: Results, x, counts, lo, hi, axis, group) -> None:
    numbers = torch.from_numpy(reference.channels(tuple(x.shape), axis, group)[0])
    for i, (row, low, high) in enumerate(zip(found[0].reshape(-1, counts.size(-1)), *found[1:], strict=True)):
        values = torch.cat([drawn.previous[i].double(), x[numbers == i].double()])
        wanted = reference.histogram(values, counts.size(-1))
        if np.isnan(wanted[1]):
            assert low.isnan()
            continue
        assert torch.equal(row, torch.from_numpy(wanted[0]))
        assert (low.item(), high.item()) == wanted[1:]


def check_search_range(drawn: Drawn, found: Results, counts, lo, hi, **how) -> None:
    for channel, (low, high) in enumerate(zip(*(t.reshape(-1) for t in found), strict=True)):
        one = counts.reshape(-1, counts.size(-1))[channel], lo.reshape(-1)[channel], hi.reshape(-1)[channel]
        check_clip(low.item(), high.item(), one, **how)


def check_clip(
    low: float, high: float, histogram: Results, qmin, qmax, method, percentile, symmetric, candidates
) -> None:
    h = reference.Bins(*histogram, qmin, qmax, symmetric, candidates)
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


WEIGHT_GRID = ("scale", "zero_point", "qmin", "qmax", "axis", "group", "block_size")


def layer_of(given: dict) -> tuple[Shape, dict]:
    """The layer, and how its weight is fake-quantized."""
    geometry = Geometry(*(tuple(given[n]) for n in ("stride", "padding", "dilation", "output_padding")))
    geometry = replace(geometry, **parts(given, "transposed", "groups"))
    size = given["x"].shape if "x" in given else given["size"]
    return Shape(tuple(size), tuple(given["weight"].shape), geometry), parts(given, *WEIGHT_GRID)


def leaves_of(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.detach().clone().requires_grad_() for t in tensors]


def weight_of(given: dict) -> Shape:
    return Shape((), tuple(given["weight"].shape), Geometry(**parts(given, "transposed", "groups")))


def check_quant_weight(drawn: Drawn, found: Results, **given) -> None:
    weight, factor = given["weight"], given["factor"]
    product = weight if factor is None else weight_of(given).scaled(weight, factor)
    assert_same(found[0], OPS["fake_quant"](product, **parts(given, *WEIGHT_GRID))[0].to(found[0].dtype))


def check_quant_weight_backward(drawn: Drawn, found: Results, grad: Tensor, **given) -> None:
    """The weight's gradient bit for bit; sums within the rounding of their terms."""
    weight, factor = leaves_of(given["weight"], given["factor"])
    product = weight if factor is None else weight_of(given).scaled(weight, factor)
    y = OPS["fake_quant"](product, **parts(given, *WEIGHT_GRID))[0]
    if given["wanted"][0]:
        assert_same(found[0], torch.autograd.grad(y, weight, grad.to(y.dtype))[0])
    else:
        assert found[0].numel() == 0
    check_sums_of_weight(found, weight_of(given), given, grad)


def check_sums_of_weight(found: Results, shape: Shape, given: dict, grad: Tensor, apart: Tensor | None = None) -> None:
    """Gradients of factor, scale and zero point, for one of the quantized weight that is at most `apart` off.

    n terms are summed in some order with an error of at most n roundings of the sum of their magnitudes, in the type of the
    product where torch sums them.
    """
    names = ("weight", "factor", "scale", "zero_point")
    for got, name, is_wanted in zip(found, names, given["wanted"], strict=False):
        asked = is_wanted and given[name] is not None
        assert (got.shape, got.dtype) == (given[name].shape, given[name].dtype) if asked else got.numel() == 0, name
    weight, factor, scale, zero_point = (given[name] for name in names)
    product = weight if factor is None else shape.scaled(weight, factor)
    apart = torch.zeros_like(product) if apart is None else apart.to(product.dtype)
    if not all(t is None or t.isfinite().all() for t in (product, scale, zero_point, grad.to(product.dtype), apart)):
        return
    grid = {"x": product, **parts(given, *WEIGHT_GRID, "grad_factor")}
    wanted, off = (reference.Gradients(g.to(product.dtype), **grid) for g in (grad, apart))
    if given["wanted"][2]:
        assert_sum(found[2], scale, wanted.ds, wanted.ds_mass, product, off.ds_mass)
    if given["wanted"][3] and zero_point is not None:
        assert_sum(found[3], zero_point, wanted.dz, wanted.dz_mass, product, off.dz_mass)
    of_weight, of_factor = zip(
        *(
            through_factor(shape, *each)
            for each in (
                (wanted.dx, weight, factor),
                (wanted.dx.abs(), weight.abs(), factor),
                (off.dx.abs(), weight.abs(), None if factor is None else factor.abs()),
            )
        ),
        strict=True,
    )
    if given["wanted"][0]:
        rounded = torch.finfo(product.dtype).eps * of_weight[1].abs()
        assert_within(found[0], of_weight[0], of_weight[1].abs(), of_weight[2] + rounded)
    if given["wanted"][1] and factor is not None:
        rounded = (weight.numel() // max(shape.channels, 1) + 2) * torch.finfo(product.dtype).eps * of_factor[1]
        assert_within(found[1], of_factor[0], of_factor[1], of_factor[2] + rounded)


def through_factor(shape: Shape, dx: Tensor, weight: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The gradients of weight and factor for one of their product, in float64."""
    weight, factor = leaves_of(weight.double(), None if factor is None else factor.double())
    if factor is None:
        return dx.double(), None
    return torch.autograd.grad(shape.scaled(weight, factor), (weight, factor), dx.double())


def assert_within(got: Tensor, wanted: Tensor, mass: Tensor, bound: Tensor) -> None:
    """But for the rounding to the type of the result, where the magnitudes of the terms do not overflow it."""
    info = torch.finfo(got.dtype)
    fits = mass + bound < info.max / 2
    apart = (got.double() - wanted).abs()
    assert (apart <= bound + info.eps * wanted.abs() + max(info.tiny * info.eps, 1e-38))[fits].all()


def is_strided_image(shape: Shape, weight: Tensor) -> bool:
    """Whether the gradient of the input is computed as a convolution of its own."""
    g = shape.geometry
    is_image = weight.dim() == 4 and not g.transposed and g.groups == 1 and weight.size(1) <= 4
    return is_image and max(g.stride) > 1 and max(g.dilation) == 1


def check_quant_layer(drawn: Drawn, found: Results, **given) -> None:
    x, weight, bias, factor = (given[n] for n in ("x", "weight", "bias", "factor"))
    shape, grid = layer_of(given)
    product = weight if factor is None else shape.scaled(weight, factor)
    dtype = given["dtype"] or x.dtype
    if given["memory_format"] is not None:
        assert found[0].is_contiguous(memory_format=given["memory_format"])
    if given["integer"]:
        return check_on_integers(found[0], product, shape, given, dtype)
    wanted = shape.compute(
        x.to(dtype), OPS["fake_quant"](product, **grid)[0].to(dtype), None if bias is None else bias.to(dtype)
    )
    assert_same(found[0], wanted)
    return None


def check_on_integers(found: Tensor, product: Tensor, shape: Shape, given: dict, dtype: torch.dtype) -> None:
    """The sums of integers times their steps, plus the bias, each rounded once."""
    x, codes, zero = (given[n] for n in ("x", "codes", "x_zero_point"))
    assert (found.shape[1:], found.dtype) == (shape.compute(x.float(), product.float(), None).shape[1:], dtype)
    arithmetic = torch.float64 if x.dtype == torch.float64 else torch.float32
    if codes.dim() == 1:
        of_input = {"scale": given["x_scale"], "zero_point": zero, "qmin": given["x_qmin"], "qmax": given["x_qmax"]}
        codes = OPS["quantize"](x, **of_input, dtype=torch.int8 if given["x_qmin"] < 0 else torch.uint8)
    grid = parts(given, "scale", "zero_point", "qmin", "qmax", "axis", "group")
    weight = OPS["quantize"](product, **grid, dtype=torch.int8).double()
    centred = codes.double() - (0 if zero is None else zero.double().round())
    scales = (given[n].to(arithmetic).abs().clamp(min=2.0**-126) for n in ("x_scale", "scale"))
    steps = math.prod(t.reshape(-1) for t in scales).expand(shape.channels)
    bias = torch.zeros(shape.channels) if given["bias"] is None else given["bias"].double()
    terms = shape.compute(centred, weight, None) * shape.over_outputs(steps.double()), shape.over_outputs(bias)
    if not x.isfinite().all():
        assert found.isnan().all()
        return
    if not product.isfinite().all():
        assert found.isnan().any() or found.numel() == 0
        return
    if not all(t.isfinite().all() for t in (*terms, centred)):
        return
    wanted, magnitude = terms[0] + terms[1], terms[0].abs() + terms[1].abs()
    fits = magnitude < torch.finfo(dtype).max / 2
    rounded = 3 * max(2.0**-24, torch.finfo(dtype).eps)
    assert ((found.double() - wanted).abs() <= rounded * magnitude + torch.finfo(dtype).tiny)[fits].all()


def check_quant_layer_backward(drawn: Drawn, found: Results, **given) -> None:
    """The gradients of the composition; on integers, and sums of them, within the rounding of their terms."""
    shape, grid = layer_of(given)
    grad, codes, size, wanted = (given[n] for n in ("grad", "codes", "size", "wanted"))
    of_input = {"scale": given["x_scale"], "zero_point": given["x_zero_point"], "dtype": given["x_dtype"]}
    x = (
        OPS["dequantize_int4"](codes, size, signed=given["x_qmin"] < 0, **of_input)
        if codes.dim() == 1
        else OPS["dequantize"](codes, **of_input)
    )
    x, weight = leaves_of(x, given["weight"])
    quantized = OPS["quant_weight"](
        weight, given["factor"], **grid, **parts(given, "grad_factor", "updated", "transposed", "groups")
    )
    y = shape.compute(x.to(grad.dtype), quantized.to(grad.dtype), None)
    dx, of_quantized, dweight = torch.autograd.grad(y, (x, quantized, weight), grad)
    apart = None
    if given["integer"] or is_strided_image(shape, weight):
        of_x, of_w = of_exact(shape, x, quantized.to(grad.dtype), grad)
        if wanted[0] and quantized.isfinite().all():  # a convolution of phases multiplies by zeros, NaN too
            assert_within(found[0], *of_x)
    elif wanted[0]:
        assert_same(found[0], dx)
    if given["integer"]:
        of_quantized, _, apart = of_w
        apart = apart + torch.finfo(grad.dtype).eps * of_quantized.abs()
    elif wanted[1]:
        assert_same(found[1], dweight)
    for got, like, is_wanted in zip(found[:2], (x, weight), wanted, strict=False):
        assert (got.shape, got.dtype) == (like.shape, like.dtype) if is_wanted else got.numel() == 0
    check_sums_of_weight(found[1:5], shape, {**given, "wanted": wanted[1:5]}, of_quantized, apart)
    of_scale = given["raw_scale"] if wanted[6] else None
    assert found[6].shape == (torch.Size([0]) if of_scale is None else of_scale.shape)
    if wanted[5]:
        of_channel = grad.double().movedim(1 if shape.geometry.stride else -1, 0).flatten(1)
        mass = of_channel.abs().sum(1)
        assert_within(found[5], of_channel.sum(1), mass, of_channel.size(1) * torch.finfo(grad.dtype).eps * mass)
    else:
        assert found[5].numel() == 0


def of_exact(shape: Shape, x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Results, ...]:
    """The gradients of input and weight in float64, the sums of their magnitudes, and how far sums may be off."""
    each = []
    for part in (torch.clone, torch.abs):
        leaves = leaves_of(*(part(t.detach()).double() for t in (x, weight)))
        each.append(torch.autograd.grad(shape.compute(*leaves, None), leaves, part(grad).double()))
    info, terms = torch.finfo(grad.dtype), max(weight.numel(), grad.numel())
    rounded = (terms * (info.eps * mass + info.tiny * info.eps) for _, mass in zip(*each, strict=True))
    return tuple(
        (want, mass, bound.where(mass < info.max / 2, math.inf))
        for want, mass, bound in zip(*each, rounded, strict=True)
    )


CHECKS: dict[str, Callable] = {name: globals()[f"check_{name}"] for name in NAMES if f"check_{name}" in globals()}


# ---- the trial ------------------------------------------------------------------------------------------------------


def trial(op: str, seed: str) -> bool:
    """Whether the arguments were taken; then the results must be right."""
    torch.manual_seed(random.Random(seed).getrandbits(32))
    drawn = DRAWN.get(op.removesuffix("_backward"), Drawn)(op, random.Random(seed))
    kept_whole = ("scale", "zero_point") if op == "observe_fake_quant" else ()
    changed = {*WRITTEN[op]} - {*kept_whole}
    kept = {n: t.clone() if isinstance(t, Tensor) and n in changed else t for n, t in drawn.given.items()}
    try:
        found = OPS[op](**drawn.given)
    except (ValueError, TypeError, NotImplementedError) as error:
        sentence = str(error).split("\n")[0]
        assert re.fullmatch(rf"{op}: .*\.", sentence), sentence
        return False
    if found is None:  # what it updates is its result
        found = tuple(drawn.given[n] for n in WRITTEN[op] if drawn.given[n] is not None)
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
        assert count / 5 < taken < count or op == "snapshot", f"{op}: {taken} of {count} taken"


def test_every_op_has_a_check() -> None:
    assert len(NAMES) >= 19
    assert sorted(CHECKS) == sorted(NAMES)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in (1, 2))])
@pytest.mark.slow
def test_anything_at_all(seed: int) -> None:
    """In a process of its own, so that a crash is a failure and not the end of the suite."""
    program = f"import faulthandler; faulthandler.enable(); from tests.ops.test_fuzz import fuzz; fuzz({seed}, 400)"
    ran = processes.python("-c", program)
    assert ran.returncode == 0, f"exit status {ran.returncode}\n{ran.stdout}\n{ran.stderr[-3000:]}"
