"""The ops of units, called by names: each takes an object with all that it is told (csrc/unit/unit.h)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import qtoolkit  # noqa: F401, loads the library

CLASSES = {"unit": torch.classes.qtoolkit.BatchNormUnit, "layer_fake_quant": torch.classes.qtoolkit.LayerUnit}
# The places of the gradients of backward ops (`Gradient` in csrc/unit/fields.h).
GRADIENTS = (
    *("x", "weight", "start", "ratio", "zero_point", "bias", "gamma", "beta", "residual"),
    *("y_start", "y_ratio", "y_zero_point", "raw_scale"),
)
# Arguments that are written in place.
WRITTEN = {"unit": ["start", "lo", "hi", "running_mean", "running_var", "batches"], "layer_fake_quant": []}
WRITTEN |= {"unit_backward": [], "layer_fake_quant_backward": []}
OP_OF = {name: getattr(torch.ops.qtoolkit, name).default for name in WRITTEN}


def made(op: str, fields: dict[str, Any], varying: tuple[str, ...] = ()) -> Any:
    """Return the unit of an op, or of its backward op."""
    return CLASSES[op.removesuffix("_backward")](fields, list(varying))


def call(op: str, **given: Any) -> list[Tensor]:
    """Call an op; return its results, without those that there are not."""
    if op.endswith("_backward"):
        grad, wanted = given.pop("grad"), given.pop("wanted")
        found: Any = OP_OF[op](made(op, {"x": grad, **given}), grad, wanted)
        return list(found)
    y, codes, kept = OP_OF[op](made(op, given), given["x"])
    return [y, codes, *(t for t in kept if t is not None)]


OPS: dict[str, Callable[..., list[Tensor]]] = {name: partial(call, name) for name in OP_OF}
