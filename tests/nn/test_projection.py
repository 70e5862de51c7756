"""Projections of attentions, of one tensor or several: on codes in training as linear layers are, with the bits of floats."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import qtoolkit as qt
from qtoolkit.graph.program.units.attention import ProjectionUnit
from qtoolkit.graph.program.units.base import Decided
from tests.blocks import codes_taken
from tests.nets import settled

E, B, L, S = 16, 3, 7, 9
Step = tuple[dict[str, Tensor], int]

# The options of each attention, and what it gets of a normed x and two normed memories.
CASES: dict[str, tuple[dict[str, int], Callable[..., tuple[Tensor, Tensor, Tensor]]]] = {
    "self": ({}, lambda x, k, v: (x, x, x)),
    "keys": ({}, lambda x, k, v: (x, k, k)),
    "values": ({}, lambda x, k, v: (x, x, x + 1)),
    "value is query": ({}, lambda x, k, v: (x, x + 1, x)),
    "apart": ({}, lambda x, k, v: (x, k, v)),
    "own weights": ({"kdim": 12, "vdim": 10}, lambda x, k, v: (x, k[..., :12], v[..., :10])),
    "own weights of one": ({"kdim": 12, "vdim": 12}, lambda x, k, v: (x, *[k[..., :12]] * 2)),
}
PRODUCTS = {"self": 1, "keys": 2, "values": 2}
"""The products of the projections of query, key and value; three in other cases."""


class Attends(nn.Module):
    """Layer norms, an attention between their outputs, and a layer."""

    def __init__(self, case: str, batch_first: bool = True, **options: Any) -> None:
        super().__init__()
        own, self.inputs = CASES[case]
        self.norms = nn.ModuleList(nn.LayerNorm(E) for _ in range(3))
        self.attention = nn.MultiheadAttention(E, 2, batch_first=batch_first, **own, **options)
        if self.attention.in_proj_bias is not None:
            nn.init.normal_(self.attention.in_proj_bias)  # torch makes zeros
        self.last = nn.Linear(E, 3)

    def forward(self, x: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = self.inputs(*(norm(y) for norm, y in zip(self.norms, (x, key, value), strict=True)))
        return self.last(x + self.attention(query, key, value=value, need_weights=False)[0])


class Decoder(nn.Module):
    """Two of torch's decoder layers, which take the same memory."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(E)
        layers = (nn.TransformerDecoderLayer(E, 2, 32, dropout=0.0, batch_first=batch_first) for _ in range(2))
        self.first, self.second = layers

    def forward(self, x: Tensor, key: Tensor, value: Tensor) -> Tensor:
        memory = self.norm(key)
        return self.second(self.first(x, memory), memory)


def batch(batch_first: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = (L, L, L) if not batch_first else (L, S, S)
    found = [torch.randn(B, length, E, generator=generator) for length in lengths]
    return [x if batch_first else x.transpose(0, 1).contiguous() for x in found]


def trained(
    model: nn.Module,
    road: str = "graph",
    quantizer: str = "lsq",
    weight: qt.QuantSpec | None = None,
    **arithmetic: str,
) -> nn.Module:
    """The model, prepared for training and calibrated."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    spec = qt.QuantSpec(axis=0, quantizer=quantizer) if weight is None else weight
    mapping = qt.QConfigMapping().set_global(qt.QConfig(qt.QuantSpec(quantizer=quantizer), spec))
    args = tuple(batch(_is_batch_first(model)))
    if road == "graph":
        model = qt.prepare(model.train(), args, backend="onnxruntime", qconfig_mapping=mapping)
    else:
        model = qt.quant_modules.replace(model.train(), backend="onnxruntime", qconfig_mapping=mapping)
    qt.calibrate(model, [args], progress=False)
    qt.nn.set_training_arithmetic(model, **{"arithmetic": "float", **arithmetic})
    return settled(model).train()


def _is_batch_first(model: nn.Module) -> bool:
    return all(m.batch_first for m in model.modules() if isinstance(m, nn.MultiheadAttention))


def step(model: nn.Module, run: Callable[..., Tensor] | None = None) -> Step:
    """Return the output and the gradients of a step, and the bytes besides parameters that it keeps for backward."""
    model.zero_grad()
    args = [x.requires_grad_() for x in batch(_is_batch_first(model))]
    kept, held = dict[int, int](), {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in held:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = (model if run is None else run)(*args)
    y.float().square().sum().backward()
    inputs = {f"x{place}": x.grad for place, x in enumerate(args) if x.grad is not None}
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), **inputs, **gradients, **dict(model.named_buffers())}, sum(kept.values())


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name, value in wanted.items() if not torch.equal(found[name], value)] == []


def close(found: dict[str, Tensor], wanted: dict[str, Tensor], rtol: float = 1e-5, atol: float = 1e-6) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def calls_of_ops(run: Callable[[], Any]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    ops = [event.name for event in profile.events()]
    return sum(ops.count(f"qtoolkit::{op}_backward") for op in ("quant_layer", "layer_fake_quant"))


@pytest.mark.parametrize("road", ["graph", "replace"])
@pytest.mark.parametrize("quantizer", ["fixed", "lsq"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "length first"])
@pytest.mark.parametrize("case", CASES)
def test_projections_keep_codes(case: str, batch_first: bool, quantizer: str, road: str) -> None:
    """With the bits of torch's layers, forward and backward; backward keeps a byte for each element of their inputs."""
    model = trained(Attends(case, batch_first), road, quantizer)
    assert calls_of_ops(lambda: step(model)) == PRODUCTS.get(case, 3) + 2  # of the output and the last layer
    found, kept = step(model)
    wanted, of_floats = step(trained(Attends(case, batch_first), road, quantizer, save="float"))
    same(found, wanted) if case != "" else None
    print(case, road, quantizer, kept, of_floats)
