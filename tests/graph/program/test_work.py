"""What blocks of networks do on a GPU beside float's, by count: docs/gpu.md has the table.

A block is the difference between networks of three and of four blocks, and an element's bytes are the difference between
twice as many images: what a network does once, and what its weights move, are in neither.
"""

import platform
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.module_tracker import ModuleTracker

import qtoolkit as qt
from benchmarks.pages.gpu_networks import Block, Bottleneck, InvertedResidual
from qtoolkit.graph.program.units.base import CachedFusedOp
from qtoolkit.nn import QuantMultiheadAttention, quantized_attention
from tests.graph.program.test_unit import SPECS
from tests.nets import settled
from tests.ops.cuda_host import guarded, on_host
from tests.ops.cuda_host.work import Done, Work

PAGE = Path(__file__).parents[3] / "docs" / "gpu.md"
FEW, MANY, IMAGES = 3, 4, 2  # blocks, and images of the smaller batch
BETWEEN = "between the units"


@dataclass(frozen=True)
class Net:
    """Equal blocks after a layer that makes their input, and before one that takes their output."""

    of: str
    block: Callable[[], nn.Module]
    first: Callable[[], nn.Module]
    last: Callable[[], nn.Module]
    image: tuple[int, ...]
    elements: int  # of an image between blocks

    def built(self, blocks: int) -> nn.Module:
        torch.manual_seed(0)
        parts = {"first": self.first(), "blocks": nn.Sequential(*(self.block() for _ in range(blocks)))}
        return nn.Sequential(OrderedDict(parts, last=self.last())).train()


NETS = (
    Net(
        "ViT, as timm writes it",
        lambda: Block(64, 2),
        nn.Identity,  # the places of a ViT are float32, and with them all that is between its blocks
        lambda: nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 8)),
        (64, 64),
        64 * 64,
    ),
    Net(
        "ViT, by nn.TransformerEncoderLayer",
        lambda: nn.TransformerEncoderLayer(64, 2, 256, 0.0, "gelu", batch_first=True, norm_first=True),
        nn.Identity,
        lambda: nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 8)),
        (64, 64),
        64 * 64,
    ),
    Net(
        "ResNet-50",
        lambda: Bottleneck(64, 16, 1),
        lambda: nn.Sequential(nn.Conv2d(3, 64, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()),
        lambda: nn.Conv2d(64, 8, 1),
        (3, 16, 16),
        64 * 16 * 16,
    ),
    Net(
        "MobileNetV2",
        lambda: InvertedResidual(16, 16, 1, 6),
        lambda: nn.Sequential(nn.Conv2d(3, 16, 1, bias=False), nn.BatchNorm2d(16)),
        lambda: nn.Conv2d(16, 8, 1),
        (3, 16, 16),
        16 * 16 * 16,
    ),
)


class Labelled(Work):
    """Notes for each call of an op the unit that calls it, or in float the module."""

    def __init__(self, labels: Callable[[], str]) -> None:
        super().__init__()
        self.labels, self.of_call = labels, list[str]()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(op, types, args, kwargs)
        self.of_call += [self.labels()] * (len(self.done) - len(self.of_call))
        return result


def image_of(net: Net, images: int) -> Tensor:
    x = torch.randn(images, *net.image, generator=torch.Generator().manual_seed(0))
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def quantized(model: nn.Module, x: Tensor) -> nn.Module:
    weight, activation = SPECS["lsq"]
    mapping = qt.QConfigMapping().set_global(qt.QConfig(activation, weight))
    # As on CUDA: on a processor with int8 instructions the default may be integer arithmetic.
    model = qt.prepare(model, (x,), backend="tensorrt", qconfig_mapping=mapping, training_arithmetic="float")
    qt.calibrate(model, [x], progress=False)
    return settled(model).train()


def of_block(name: str) -> str:
    """Return the name of a module without that of its network and block; "" for what is outside of the blocks."""
    found = re.search(r"blocks\.\d+(?:\.(.+))?$", name)
    return "" if found is None else found[1] or BETWEEN


def unit_name(names: tuple[str | None, ...]) -> str:
    """Return the modules of a unit, by their names in the block."""
    modules = [of_block(name) for name in names if name is not None and "quantizers" not in name]
    return ", ".join(modules) or "quantizer without a layer"


@contextmanager
def units_noted(calls: list[str]) -> Iterator[None]:
    """Note the unit that computes by its op, or the attention that computes, while it does."""

    def noting(function: Callable[..., Any], name_of: Callable[[Any], str]) -> Callable[..., Any]:
        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(name_of(self))
            try:
                return function(self, *args, **kwargs)
            finally:
                calls.pop()

        return noted

    def name_of_unit(unit: Any) -> str:
        return calls[-1] if isinstance(unit.root(), QuantMultiheadAttention) else unit_name(unit.names)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CachedFusedOp, "results_of", noting(CachedFusedOp.results_of, name_of_unit))
        patch.setattr(
            QuantMultiheadAttention, "forward", noting(QuantMultiheadAttention.forward, lambda _: "self_attn")
        )
        yield


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Compute as on CUDA, by its kernels: there an attention keeps no softmax."""
    unit = quantized_attention._unit
    with on_host("forwards"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized_attention, "_unit", lambda **numbers: unit(**{**numbers, "keeps_softmax": False}))
        yield


def cast() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)


def trained(net: Net, blocks: int, images: int, quantizes: bool) -> tuple[nn.Module, Tensor]:
    """Return a network and its input in guarded memory, where bytes are counted."""
    with guarded():
        x = image_of(net, images)
        model = quantized(net.built(blocks), x) if quantizes else net.built(blocks)
        return model, image_of(net, images).requires_grad_()


def first_steps(model: nn.Module, x: Tensor) -> None:
    for _ in range(2):
        model(x).sum().backward()
    model.zero_grad(set_to_none=True)
    x.grad = None


def step(net: Net, blocks: int, images: int, quantizes: bool) -> tuple[list[tuple[str, Done]], list[tuple[str, Done]]]:
    """Return what forward and backward of a training step do, each call of an op with its unit or its module."""
    model, x = trained(net, blocks, images, quantizes)
    # In float the modules: its hooks would run in a prepared model too, whose units would be called module by module.
    tracker, calls = ModuleTracker(), list[str]()
    tracked = nullcontext() if quantizes else tracker
    identities = {f"Sequential.{name}" for name, m in model.named_modules() if isinstance(m, nn.Identity)}  # no ops

    def label() -> str:
        if quantizes:
            return calls[-1] if calls else BETWEEN
        return of_block(max(tracker.parents - identities, key=len))

    with as_on_cuda(), cast(), units_noted(calls):
        first_steps(model, x)
        with tracked:
            with Labelled(label) as forward:
                y = model(x)
            grad = torch.ones_like(y)
            with Labelled(label) as backward:
                y.backward(grad)
    return [*zip(forward.of_call, forward.done, strict=True)], [*zip(backward.of_call, backward.done, strict=True)]


def named(net: Net, blocks: int, images: int, quantizes: bool) -> list[dict[str, Done]]:
    """Return what each unit, or in float each module, does in forward and in backward."""
    forward, backward = step(net, blocks, images, quantizes)
    # the units that have called an op in forward: backward calls them the other way round
    of_op: dict[str, list[str]] = {}
    for label, done in forward:
        of_op.setdefault(f"{done.op}_backward", []).append(label)
    found: list[dict[str, Done]] = []
    for direction in (forward, backward):
        sums: dict[str, Done] = {}
        for label, done in direction:
            is_backward = quantizes and direction is backward and done.op in of_op
            name = of_op[done.op].pop() if is_backward else label
            total = sums.setdefault(name, Done(name))
            total.launches += done.launches
            total.bytes += done.bytes
        found.append(sums)
    return found


def of_one_block(net: Net, quantizes: bool) -> list[dict[str, tuple[int, float]]]:
    """Return the launches and the bytes for an element of the block's input, of each unit or module of a block."""
    sizes = [(blocks, images) for blocks in (FEW, MANY) for images in (IMAGES, 2 * IMAGES)]
    done = {size: named(net, *size, quantizes) for size in sizes}
    found = []
    for direction in range(2):
        one: dict[str, tuple[int, float]] = {}
        for name in done[MANY, IMAGES][direction]:

            def of(blocks: int, images: int, name: str = name, direction: int = direction) -> Done:
                return done[blocks, images][direction].get(name, Done(name))

            launches = of(MANY, IMAGES).launches - of(FEW, IMAGES).launches
            small, large = (of(MANY, n).bytes - of(FEW, n).bytes for n in (IMAGES, 2 * IMAGES))
            if launches:
                one[name] = launches, (large - small) / (IMAGES * net.elements)
        found.append(one)
    return found


def kept(net: Net, blocks: int, images: int, quantizes: bool) -> int:
    """Return the bytes of the tensors that a forward keeps for backward."""
    model, x = trained(net, blocks, images, quantizes)
    held = dict[int, Tensor]()

    def pack(t: Tensor) -> Tensor:
        held[t.untyped_storage().data_ptr()] = t
        return t

    with as_on_cuda(), cast():
        first_steps(model, x)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(x)
    return sum(t.untyped_storage().nbytes() for t in held.values())


def kept_of_block(net: Net) -> str:
    """Return the row of docs/gpu.md with what a block keeps for each element of its input, in float and quantized."""
    found = []
    for quantizes in (False, True):
        few, many = (
            kept(net, MANY, images, quantizes) - kept(net, FEW, images, quantizes) for images in (IMAGES, 2 * IMAGES)
        )
        found.append((many - few) / (IMAGES * net.elements))
    return f"| {net.of} | {found[0]:.1f} | {found[1]:.1f} | {found[1] / found[0]:.2f} |"


@cache
def table(net: Net) -> list[str]:
    """Return the rows of docs/gpu.md for a block, with its sum."""
    ours, theirs = of_one_block(net, quantizes=True), of_one_block(net, quantizes=False)
    units = list(dict.fromkeys([*ours[0], *ours[1], BETWEEN]))
    unit_of = {module: unit for unit in units for module in unit.split(", ")}
    columns: list[dict[str, tuple[int, float]]] = []
    for direction in range(2):
        modules: dict[str, tuple[int, float]] = {}
        for module, (launches, moved) in theirs[direction].items():
            unit = unit_of.get(module, BETWEEN)
            before = modules.get(unit, (0, 0.0))
            modules[unit] = before[0] + launches, before[1] + moved
        columns += [modules, ours[direction]]
    rows = [[unit, *(column.get(unit, (0, 0.0)) for column in columns)] for unit in units]
    rows.append(["**sum**", *((sum(a for a, _ in c.values()), sum(b for _, b in c.values())) for c in columns)])
    return [f"| {name} | {' | '.join(f'{a} | {b:.1f}' for a, b in cells)} |" for name, *cells in rows]


@pytest.mark.slow  # compiles the kernels for the host
@pytest.mark.skipif(not torch.__version__.startswith("2.14"), reason="the counts on the page are of torch 2.14")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="bytes are counted on x86-64 alone")
@pytest.mark.parametrize("net", NETS, ids=lambda net: net.of)
def test_the_page_has_the_counts(net: Net) -> None:
    page = PAGE.read_text()
    assert [row for row in [*table(net), kept_of_block(net)] if row not in page] == []


if __name__ == "__main__":
    for each in NETS:
        print(each.of, *table(each), kept_of_block(each), sep="\n")
