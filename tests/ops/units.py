"""The ops of units, called by names: each takes an object with all that it is told (csrc/unit/unit.h)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import qtoolkit  # noqa: F401, loads the library

CLASSES = {"unit": torch.classes.qtoolkit.BatchNormUnit, "layer_fake_quant": torch.classes.qtoolkit.LayerUnit}
CLASSES |= {"attention_fake_quant": torch.classes.qtoolkit.AttentionUnit}
# The places of the gradients of backward ops (`Gradient` in csrc/unit/fields.h).
GRADIENTS = (
    *("x", "weight", "start", "ratio", "zero_point", "bias", "gamma", "beta", "residual"),
    *("y_start", "y_ratio", "y_zero_point", "raw_scale", "k", "v"),
)
# Arguments that are written in place.
WRITTEN = {"unit": ["start", "lo", "hi", "running_mean", "running_var", "batches"], "layer_fake_quant": []}
WRITTEN |= {"attention_fake_quant": []} | {f"{op}_backward": [] for op in CLASSES}
OP_OF = {name: getattr(torch.ops.qtoolkit, name).default for name in WRITTEN}


def made(op: str, fields: dict[str, Any]) -> Any:
    """Return the unit of an op, or of its backward op."""
    name = op.removesuffix("_backward")
    return CLASSES[name](fields, [])


def call(op: str, **given: Any) -> list[Tensor]:
    """Call an op; return its results, without those that there are not."""
    if op.endswith("_backward"):
        grad, wanted = given.pop("grad"), given.pop("wanted")
        found: Any = OP_OF[op](made(op, given), grad, wanted)
        return list(found)
    *results, kept = OP_OF[op](made(op, given), given.get("x", given.get("q")))
    return [*results, *(t for t in kept if t is not None)]


OPS: dict[str, Callable[..., list[Tensor]]] = {name: partial(call, name) for name in OP_OF}
