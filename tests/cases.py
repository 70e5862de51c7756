"""What the op tests share: layouts, channels, data, and exact comparison."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
CODES = (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32)
BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
SPECIAL = (
    float("nan"),
    float("inf"),
    -float("inf"),
    0.0,
    -0.0,
    1e-45,
    -1e-45,
    1e-40,
    -1e-40,
    1.2e-38,
    1e30,
    -1e30,
    3.4e38,
)

Make = Callable[..., Tensor]  # sizes -> a contiguous tensor

LAYOUTS: dict[str, Callable[[Make], Tensor]] = {
    "contiguous": lambda make: make(4, 6, 5, 7),
    "channels_last": lambda make: make(4, 6, 5, 7).contiguous(memory_format=torch.channels_last),
    "channels_last_3d": lambda make: make(4, 6, 3, 2, 5).contiguous(memory_format=torch.channels_last_3d),
    "sliced": lambda make: make(8, 13, 5, 9)[::2, 1::2, :, 2:8:3],
    "sliced_channels_last": lambda make: make(4, 6, 10, 7).contiguous(memory_format=torch.channels_last)[:, :, ::2, 1:],
    "channel_sliced_channels_last": lambda make: make(4, 9, 5, 7).contiguous(memory_format=torch.channels_last)[:, 1:7],
    "offset": lambda make: make(4 * 6 * 35 + 1)[1:].view(4, 6, 5, 7),
    "transposed": lambda make: make(7, 5, 6, 4).transpose(0, 3),
    "permuted": lambda make: make(5, 4, 7, 6).permute(1, 3, 2, 0),
    "expanded": lambda make: make(4, 6, 1, 5).expand(4, 6, 7, 5),
    "expanded_batch": lambda make: make(6, 50).expand(4, 6, 50),
    "expanded_scalar": lambda make: make(1)[0].expand(4, 6, 9),
    "overlapping": lambda make: make(100).as_strided((4, 6, 9), (3, 2, 5)),
    "ten_dims": lambda make: make(*[3] * 10)[(slice(None, None, 2),) * 10],
    "ten_dims_permuted": lambda make: make(*[3] * 10)[(slice(None, None, 2),) * 10].permute(*range(9, -1, -1)),
    "0-d": lambda make: make(3)[1],
    "one_element": lambda make: make(1, 1, 1),
    "one_channel": lambda make: make(4, 1, 9),
    "odd_strides_of_one": lambda make: make(700).as_strided((4, 1, 9), (9, 333, 1)),
    "vector": lambda make: make(130),
    "stepped_vector": lambda make: make(400)[::3],
    "matrix": lambda make: make(4, 70),
    "matrix_transposed": lambda make: make(70, 4).t(),
    "empty": lambda make: make(4, 0, 3),
    "empty_batch": lambda make: make(0, 6, 3),
    "large": lambda make: make(4, 50, 600),
    "large_channels_last": lambda make: make(2, 70, 21, 21).contiguous(memory_format=torch.channels_last),
    "large_sliced": lambda make: make(4, 50, 900)[:, :, ::3].transpose(0, 1),
}


@dataclass(frozen=True)
class Channels:
    axis: int | None = None
    group: int = 1
    block_size: int = 0

    def count(self, x: Tensor) -> int:
        if self.block_size:
            return x.numel() // self.block_size
        return 1 if self.axis is None else x.size(self.axis) * self.group

    def fit(self, x: Tensor) -> bool:
        if self.axis is None:
            return True
        if not -x.dim() <= self.axis < x.dim():
            return False
        whole_groups = self.group == 1 or x.size(0) % self.group == 0
        return whole_groups and (self.block_size == 0 or x.size(self.axis) % self.block_size == 0)

    @property
    def named(self) -> dict:
        return {"axis": self.axis, "group": self.group, "block_size": self.block_size}


CHANNELS = {
    "per_tensor": Channels(),
    "axis0": Channels(0),
    "axis1": Channels(1),
    "axis-1": Channels(-1),
    "grouped": Channels(1, 2),
    "blocks0": Channels(0, 1, 2),
    "blocks1": Channels(1, 1, 3),
    "blocks1_of_1": Channels(1, 1, 1),
    "blocks-1": Channels(-1, 1, 7),
    "blocks-2": Channels(-2, 1, 5),
}


def layout_cases(empty: bool = True) -> list:
    """Every layout with every way to see channels in it, as pytest parameters."""
    shapes = {name: layout(torch.empty) for name, layout in LAYOUTS.items()}
    return [
        pytest.param(LAYOUTS[name], channels, id=f"{name}-{how}")
        for name, x in shapes.items()
        for how, channels in CHANNELS.items()
        if channels.fit(x) and (empty or x.numel() > 0)
    ]


# Batch, channels and elements a channel: around the kernels' chunk (64), block (1024), and longest row (8192).
RUNS = [
    *((2, 3, 1), (5, 17, 1), (1, 64, 1), (3, 65, 1), (2, 1025, 1), (1, 9000, 1)),
    *((1, 3, 9), (4, 70, 9), (2, 17, 49), (2, 167, 49), (2, 170, 49), (2, 130, 63), (2, 131, 63)),
    *((3, 5, 63), (3, 5, 64), (3, 5, 65), (3, 5, 127), (2, 7, 1023), (2, 7, 1024), (2, 7, 1025), (2, 12, 3136)),
    *((300, 96, 1), (60, 100, 9), (3, 8200, 1)),  # many rows of channels, and one too long to keep sums of
]
# Sizes, axis and block size: blocks in a row of memory, and blocks of 1, some, 63 to 65 and many neighbours each.
BLOCKS = [
    *(
        ((5, 96), 1, 32),
        ((3, 640), 1, 64),
        ((3, 4096), -1, 128),
        ((2, 130), 1, 65),
        ((2, 9000), 1, 3),
        ((7, 300), 1, 300),
    ),
    *(((64, 6), 0, 32), ((8, 64, 3, 3), 1, 32), ((40, 96, 3, 3), 1, 16), ((3, 4, 8, 8), 1, 2), ((2, 6, 63), 1, 3)),
    *(((2, 6, 65), 1, 2), ((4, 8, 300), 1, 4), ((3, 2, 1500), 1, 1), ((6, 7, 5), 0, 3), ((1, 12, 1, 9), 1, 12)),
]
SIZES = [1, 7, 8, 9, 63, 64, 65, 127, 1023, 1024, 1025, 1087, 16384, 16385, 32767, 32768, 32769, 65537, 1100003]


def name_of(value: object) -> str | None:
    """Readable test ids for dtypes and sizes."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return "x".join(map(str, value)) if isinstance(value, tuple) else None


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def floats(dtype: torch.dtype, seed: int = 0) -> Make:
    """Half of the values on ties of 0.1 or one step beside, half anywhere; some beyond every grid used here."""

    def make(*sizes: int) -> Tensor:
        g = generator(seed)
        ties = (torch.randint(-160, 160, sizes, generator=g) + 0.5).double() * 0.1
        anywhere = torch.randn(sizes, generator=g, dtype=torch.float64) * 8
        return torch.where(torch.rand(sizes, generator=g) < 0.5, ties, anywhere).to(dtype)

    return make


def input_in_blocks(block: tuple, memory: str, dtype: torch.dtype) -> tuple[Tensor, Channels]:
    """An input of one of BLOCKS, row-major or with its first and last dimensions swapped in memory, and its channels."""
    sizes, axis, size = block
    x = floats(dtype)(*sizes)
    return x if memory == "row_major" else x.transpose(0, -1).contiguous().transpose(0, -1), Channels(axis, 1, size)


def leaf(t: Tensor) -> Tensor:
    """The same memory and strides, requiring grad."""
    return t.detach().requires_grad_()


def codes(dtype: torch.dtype, seed: int = 0) -> Make:
    def make(*sizes: int) -> Tensor:
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max + 1, sizes, generator=generator(seed)).to(dtype)

    return make


def scales(count: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """0.1 for the first channel, others around it."""
    s = 0.05 + 0.1 * torch.rand(count, generator=generator(seed))
    s[:1] = 0.1
    return s.to(dtype)


def zero_points(count: int, seed: int = 2, low: int = -20, high: int = 20) -> Tensor:
    return torch.randint(low, high, (count,), generator=generator(seed)).float()


def bounds(dtype: torch.dtype) -> tuple[int, int]:
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Equal dtype, shape, NaN where NaN, and the same bits elsewhere: -0.0 is not 0.0."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    a, e = actual.detach().cpu().contiguous(), expected.detach().cpu().contiguous()
    if torch.equal(*(t.view(BITS.get(t.dtype, t.dtype)) for t in (a, e))):
        return
    if a.dtype.is_floating_point:
        assert torch.equal(a.isnan(), e.isnan())
        a, e = (t.nan_to_num(0.0, torch.inf, -torch.inf).view(BITS[t.dtype]) for t in (a, e))
    wrong = (a.long() != e.long()).nonzero()
    assert len(wrong) == 0, (
        f"{len(wrong)} differ, first at {wrong[0].tolist()}: {actual[tuple(wrong[0])]}, not {expected[tuple(wrong[0])]}"
    )


def assert_laid_out_as(y: Tensor, x: Tensor, group: int = 1) -> None:
    """y is dense, in x's memory order (row-major where grouped channels ask for dimension 0 slowest), and not x's memory."""
    like = torch.empty_like(x)
    if group > 1 and x.dim() > 0 and like.stride(0) * x.size(0) != x.numel():
        like = torch.empty(x.shape)
    if x.numel() == 0:
        return
    wide = [d for d in range(x.dim()) if x.size(d) != 1]  # a stride that is never taken may be any number
    assert [y.stride(d) for d in wide] == [like.stride(d) for d in wide]
    assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


# ---- for hypothesis


@st.composite
def any_tensor(draw) -> Tensor:
    """Permuted, stepped, expanded and shifted tensors of up to five dimensions."""
    sizes = draw(st.lists(st.integers(0, 9), max_size=5))
    steps = [draw(st.integers(1, 3)) for _ in sizes]
    x = floats(draw(st.sampled_from(FLOATS)), draw(st.integers(0, 99)))(
        *(n * s + 1 for n, s in zip(sizes, steps, strict=True))
    )
    x = x[tuple(slice(1, None, s) for s in steps)] if sizes else x
    x = x.permute(draw(st.permutations(range(len(sizes)))))
    wide = draw(st.lists(st.sampled_from(range(max(len(sizes), 1))), max_size=2)) if sizes else []
    for d in wide:
        x = x.narrow(d, 0, min(1, x.size(d))).expand([5 if i == d and x.size(d) else n for i, n in enumerate(x.shape)])
    return x


@st.composite
def any_grid(draw, x: Tensor) -> tuple[Tensor, Tensor | None, Channels]:
    fits = [Channels(), *(Channels(a) for a in range(-x.dim(), x.dim()))]
    fits += [Channels(a, g) for a in range(1, x.dim()) for g in (2, 3) if x.size(0) % g == 0]
    fits += [c for a in range(-x.dim(), x.dim()) for b in (1, 2, 3, 4, 8) if (c := Channels(a, 1, b)).fit(x)]
    channels = draw(st.sampled_from(fits))
    count = channels.count(x)
    scale = scales(count, draw(st.integers(0, 99))) * draw(st.sampled_from([1e-3, 0.3, 1.0, 7.0]))
    zero_point = zero_points(count, 0, -99, 99) * draw(st.sampled_from([1, 0.37])) if draw(st.booleans()) else None
    return scale, zero_point, channels
