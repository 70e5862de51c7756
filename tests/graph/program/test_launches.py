"""What a unit launches on CUDA, counted without a GPU (tests/ops/cuda_host/work.py), and what these launches compute."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit._native import library
from tests.cases import floats
from tests.graph.program.test_unit import SPECS
from tests.nets import settled
from tests.ops import units
from tests.ops.cuda_host import ORDERS, on_host
from tests.ops.cuda_host.work import Work
from tests.ops.test_every import sample

MOST = {
    "unit": 16,
    "layer_fake_quant": 10,
    "function_fake_quant": 3,
    "add_norm_fake_quant": 3,
    "prelu_fake_quant": 5,
}
# Where a weight is quantized op by op: a transposed one, whose channels are no rows in memory, or one with a zero point.
MOST_OP_BY_OP = 23
MOST_FROZEN, MOST_FROZEN_OP_BY_OP = 23, 29


class Residual(nn.Module):
    """A layer whose batch norm a residual is added to."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)) + x)


class Branch(nn.Module):
    """A layer norm of float32 between layers, also under autocast: a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        return x + self.last(self.norm(x))


class Attends(nn.Module):
    """An attention, whose quantizers take heads that are views of its projection's output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = nn.Linear(8, 32), nn.MultiheadAttention(32, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(2).transpose(1, 2))
        return self.attention(x, x, x, need_weights=False)[0]


def function(*layers: nn.Module) -> nn.Sequential:
    """Functions between two layers: a unit of their own."""
    return nn.Sequential(nn.Linear(8, 8), *layers, nn.Linear(8, 8))


UNITS = {  # its op, and a model with it
    "convolution": ("unit", nn.Sequential(nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())),
    "a bias": ("unit", nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU6())),
    "residual": ("unit", Residual()),
    "depthwise": ("unit", nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8), nn.LeakyReLU())),
    # Without groups the CPU computes it by other ops than CUDA.
    "transposed": ("unit", nn.Sequential(nn.ConvTranspose2d(8, 8, 2, 2, groups=2), nn.BatchNorm2d(8), nn.ReLU())),
    "frozen": ("unit", nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())),
    "frozen residual": ("unit", Residual()),
    "no batch norm": ("layer_fake_quant", nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU())),
    "linear": ("layer_fake_quant", nn.Sequential(nn.Linear(8, 8), nn.ReLU())),
    "GELU": ("function_fake_quant", function(nn.GELU())),
    "SiLU": ("function_fake_quant", function(nn.SiLU())),
    "layer norm": ("function_fake_quant", function(nn.LayerNorm(8))),
    "RMS norm": ("function_fake_quant", function(nn.RMSNorm(8))),
    "layer norm of a residual stream": ("add_norm_fake_quant", Branch()),
    "attention": ("function_fake_quant", Attends()),
    "PReLU": ("prelu_fake_quant", function(nn.PReLU(1))),
}


def image() -> Tensor:
    return torch.randn(2, 8, 8, 8, generator=torch.Generator().manual_seed(0))


def prepared(layers: nn.Module, specs: str, frozen: bool) -> nn.Module:
    """A model once all modes have settled."""
    weight, activation = SPECS[specs]
    mapping = qt.QConfigMapping().set_global(qt.QConfig(activation, weight))
    backend = "tensorrt10" if isinstance(layers, Attends) else "academic"  # which computes attentions in float
    model = qt.prepare(layers.train(), (image(),), backend=backend, qconfig_mapping=mapping)
    qt.calibrate(model, [image()], progress=False)
    model = settled(model).train()
    if frozen:
        qt.freeze_batch_norm(model)
    return model


def launches_of_step(layers: nn.Module, specs: str, frozen: bool, autocast: bool = False) -> Counter[str]:
    """The launches of each op in a training step, once all modes have settled; of one call where there are several."""
    cast = torch.autocast("cpu", torch.bfloat16, autocast, cache_enabled=False)
    x, model = image(), prepared(layers, specs, frozen)
    with on_host("forwards"):
        for _ in range(2):
            with cast:
                y = model(x)
            y.sum().backward()
        with Work() as counted:
            with cast:
                y = model(x)
            y.backward(torch.ones_like(y))
    return Counter({done.op: done.launches for done in counted.done})


@pytest.mark.slow  # compiles the kernels for the host
@pytest.mark.sweep(1)
@pytest.mark.parametrize("specs", ["fixed", "affine", "affine weights", "lsq", "affine, float16", "lsq, float16"])
@pytest.mark.parametrize("kind", UNITS)
def test_a_unit_launches_at_most_so_many_kernels(kind: str, specs: str) -> None:
    op, model = UNITS[kind]
    frozen = kind.startswith("frozen")
    found = launches_of_step(model, specs, frozen)
    assert found[op] > 0
    assert found[f"{op}_backward"] > 0
    op_by_op = kind == "transposed" or specs == "affine weights"
    most = (MOST_FROZEN, MOST_FROZEN_OP_BY_OP) if frozen else (MOST[op], MOST_OP_BY_OP)
    assert found[op] + found[f"{op}_backward"] <= most[op_by_op], found


def test_the_quantizer_of_a_query_multiplies_by_its_factor() -> None:
    assert "mul" not in launches_of_step(Attends(), "fixed", frozen=False)


def gradients_of_step(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The output of a step, and the gradients of the input and of all that is trained."""
    model, x = copy.deepcopy(model), x.clone().requires_grad_()
    y = model(x)
    y.backward(floats(torch.float32, 3)(*y.shape))
    trained = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, **trained}


@pytest.mark.parametrize("specs", ["fixed", "affine", "lsq", "lsq, float16"])
@pytest.mark.parametrize("kind", UNITS)
def test_the_launches_of_a_unit_compute_what_the_cpu_does(kind: str, specs: str) -> None:
    """In each order of threads; the weights of a layer have a scale and a launch that makes it, or one for each channel."""
    model = prepared(copy.deepcopy(UNITS[kind][1]), specs, kind.startswith("frozen"))
    wanted = gradients_of_step(model, image())
    for order in ORDERS:
        with on_host(order):
            found = gradients_of_step(model, image())
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            # Gradients of scales are sums of terms that cancel.
            near = {"rtol": 1e-3, "atol": 1e-5 * float(value.abs().max())}
            torch.testing.assert_close(found[name], value, **near, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.slow
@pytest.mark.parametrize("specs", ["fixed", "lsq"])
@pytest.mark.parametrize("kind", ["linear", "GELU", "SiLU", "layer norm of a residual stream"])
def test_launches_under_autocast(kind: str, specs: str) -> None:
    op, model = UNITS[kind]
    found = launches_of_step(model, specs, frozen=False, autocast=True)
    assert found[op] > 0
    assert 0 < found[op] + found[f"{op}_backward"] <= MOST[op], found


def of_attention(arguments: dict[str, Any], keys: int) -> dict[str, Any]:
    """The arguments of an attention with this number of queries, keys and values, whose mask has one for each key."""
    rows = {name: t for name, t in arguments.items() if isinstance(t, Tensor) and t.dim() == 3}
    taken = {name: t.repeat(1, keys, 1)[:, :keys].contiguous() for name, t in rows.items()}
    return {**arguments, **taken, "mask": torch.linspace(-1, 1, keys)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "keys", "most"),
    [
        ("attention_fake_quant", 8, 21),
        ("attention_fake_quant", 5, 31),
        ("product", None, 4),
        ("max_pool_offsets", None, 2),
    ],
)
def test_launches_of_other_ops_with_a_backward(op: str, keys: int | None, most: int) -> None:
    """Attentions of float32, with two products in forward and four in backward; products that a model writes out; pools.

    The rows of scores of an attention are vectors: other numbers of keys than multiples of 8 are filled up with zeros. Those
    of 16 bits are in tests/ops/test_cuda_host_flash.py.
    """
    with on_host("forwards"):
        given = {name: sample(name, floats(torch.float32)(4, 6, 16)) for name in (op, f"{op}_backward")}
        with Work() as counted:
            for name, arguments in given.items():
                op = units.OPS.get(name) or getattr(library, name)
                op(**(arguments if keys is None else of_attention(arguments, keys)))
    found = {done.op: done.launches for done in counted.done if done.op in given}
    assert found.keys() == given.keys()
    assert sum(found.values()) <= most, found
