"""Backward writes within its memory: gradients that torch's own kernels compute, under an allocator that ends at a fence."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import qtoolkit as qt
from qtoolkit.ops.layer import Geometry, convolution
from tests.cases import assert_same, leaf

FOLDER = Path(__file__).parent
ROUTES = (("auto", "codes"), ("float", "codes"), ("float", "float"))
LAYOUTS = ("channels_last", "rows")
KERNELS = (1, 2, 3)
CHANNELS = ((1, 8), (3, 16), (8, 64), (15, 1), (16, 3), (64, 8))
compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="the allocator is compiled with cc")


def case(transposed, kernel, stride, channels, side, groups, layout, route) -> dict:
    geometry = {"transposed": transposed, "kernel": kernel, "stride": stride, "channels": channels, "side": side}
    return {**geometry, "groups": groups, "layout": layout, "forward": route[0], "save": route[1]}


def all_cases() -> list[dict]:
    dense = itertools.product((False, True), KERNELS, (1, 2, 3), CHANNELS, (33, 96), (1,), LAYOUTS, ROUTES)
    grouped = itertools.product((False, True), (1, 3), (2, 3), ((8, 8), (64, 64)), (96,), (8,), LAYOUTS, ROUTES)
    return [case(*arguments) for arguments in (*dense, *grouped)]


@pytest.fixture(scope="module")
def fence(tmp_path_factory) -> Path:
    """The allocator."""
    library = tmp_path_factory.mktemp("fence") / "fenced_malloc.so"
    flags = ["-O2", "-fno-builtin", "-shared", "-fPIC", "-pthread"]
    subprocess.run(["cc", *flags, "-o", library, FOLDER / "fenced_malloc.c"], check=True)
    return library


def failing(fence: Path, **cases: list[dict]) -> dict[str, list[dict]]:
    """The cases of each run in which a process with the allocator fails."""
    environment = {**os.environ, "LD_PRELOAD": str(fence), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.nn.fenced"]
    told = subprocess.run(
        command,
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        env=environment,
        cwd=FOLDER.parents[1],
        check=False,
    )
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout.splitlines()[-1])


@pytest.mark.sweep
@compiler
def test_backward_of_strided_pointwise_layers_stays_in_its_memory(fence: Path) -> None:
    """These are the geometries in which torch's own gradient does not, where vectors have 8 or 16 elements.

    A write behind a block is found.
    """
    writes = [{"bytes_behind": 0}, {"bytes_behind": 1}]
    convolutions = ((7, 16), 2, ROUTES[0]), ((15, 8), 2, ROUTES[1]), ((7, 8), 3, ROUTES[2])
    cases = [
        case(False, 1, stride, channels, 96, 1, "channels_last", route) for channels, stride, route in convolutions
    ]
    cases += [case(True, 1, 2, (16, 3), 96, 1, "channels_last", route) for route in ROUTES[1:]]
    assert failing(fence, write_behind_a_block=writes, backward=cases) == {
        "write_behind_a_block": writes[1:],
        "backward": [],
    }


@compiler
@pytest.mark.sweep
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("transposed", [False, True])
def test_backward_of_any_layer_stays_in_its_memory(fence: Path, transposed: bool, kernel: int) -> None:
    """A process for each case: all of them take a quarter of an hour."""
    cases = [each for each in all_cases() if (each["transposed"], each["kernel"]) == (transposed, kernel)]
    assert failing(fence, backward=cases) == {"backward": []}


GEOMETRIES = {
    "conv": ((2, 3, 12, 9), (5, 3, 1, 1), Geometry((2, 3), (0, 0), (1, 1), (0, 0))),
    "conv1d": ((2, 3, 12), (5, 3, 1), Geometry((2,), (0,), (1,), (0,))),
    "one row": ((2, 3, 4, 8), (5, 3, 1, 1), Geometry((1, 2), (0, 0), (1, 1), (0, 0))),
    "one image": ((3, 12, 8), (5, 3, 1, 1), Geometry((2, 2), (0, 0), (1, 1), (0, 0))),
    "transposed": ((2, 5, 6, 3), (5, 3, 1, 1), Geometry((2, 3), (0, 0), (1, 1), (1, 2), True)),
    "transposed1d": ((2, 5, 6), (5, 3, 1), Geometry((2,), (0,), (1,), (1,), True)),
}


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("x", "weight", "geometry"), GEOMETRIES.values(), ids=GEOMETRIES)
def test_the_values_and_gradients_are_those_of_the_convolution(x, weight, geometry, with_bias) -> None:
    """In float64, whose kernels are not those with the fault, on inputs whose channels are next to each other."""
    given = torch.randn(x, dtype=torch.float64)
    channels = given.dim() - len(weight) + 1
    given = given.movedim(channels, -1).contiguous().movedim(-1, channels)
    outputs = weight[1 if geometry.transposed else 0]
    tensors = [given, torch.randn(weight, dtype=torch.float64), torch.randn(outputs, dtype=torch.float64)]
    ours, torchs = ([leaf(t) for t in tensors] for _ in range(2))
    g, batched = geometry, given.dim() == len(weight)
    y = convolution(ours[0], ours[1], ours[2] if with_bias else None, geometry)
    wanted = torch.ops.aten.convolution(
        *(torchs[0] if batched else torchs[0].unsqueeze(0), torchs[1], torchs[2] if with_bias else None),
        *(g.stride, g.padding, g.dilation, g.transposed, g.output_padding, g.groups),
    )
    wanted = wanted if batched else wanted.squeeze(0)
    torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)
    gradient = torch.randn_like(y)
    y.backward(gradient)
    wanted.backward(gradient)
    for mine, its in zip(ours[: 2 + with_bias], torchs, strict=False):
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "layer", [qt.nn.QuantConv2d(3, 8, 1, 2), qt.nn.QuantConvTranspose2d(8, 3, 1, 2, output_padding=1)]
)
def test_a_compiled_layer_has_one_graph(layer) -> None:
    x = torch.randn(2, layer.in_channels, 8, 8).contiguous(memory_format=torch.channels_last)
    plain, compiled = leaf(x), leaf(x)
    layer(plain).sum().backward()
    torch.compile(layer, fullgraph=True, backend="aot_eager")(compiled).sum().backward()
    assert_same(compiled.grad, plain.grad)
