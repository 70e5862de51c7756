"""The entries that a TensorQuantizer takes from a state dict besides its tensors."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qtoolkit.processes import whole
from qtoolkit.quantizers.spec_ops import grid_of_range
from qtoolkit.quantizers.step_clock import NEVER

if TYPE_CHECKING:
    from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer


def metadata_of(quantizer: "TensorQuantizer", state_dict: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the facts about its spec in a state dict without metadata: the bits by which its scale covers its range."""
    found = [state_dict.get(prefix + name) for name in ("_scale", "observer.lo", "observer.hi")]
    values = [whole(each).cpu() for each in found if isinstance(each, Tensor) and not each.is_meta]
    if not quantizer.kind.follows(quantizer) or len(values) < 3 or len({each.shape for each in values}) > 1:
        return {}
    scale, lo, hi = (each.double() for each in values)
    seen = lo < hi
    for bits in (quantizer.spec.bits, *range(2, 17)):
        covering, _ = grid_of_range(lo, hi, replace(quantizer.spec, bits=bits))
        if torch.allclose(covering[seen], scale[seen], rtol=1e-6, atol=0):
            return {"spec": {"bits": bits}}
    return {}


def materialize(quantizer: "TensorQuantizer", device: torch.device) -> None:
    """Leave the meta device, without a range: for a model that was made there and got only its float tensors."""
    quantizer.observer.put_sums_on(device)
    if quantizer._scale.is_meta:
        quantizer.steps = NEVER
        quantizer.to_empty(device=device)
        empty = torch.full_like(quantizer._scale, torch.nan)
        quantizer.write_grid(empty, torch.zeros_like(empty))
        quantizer.forget_factor()
        quantizer.observer.reset()
    elif any(buffer.is_meta for buffer in quantizer.observer.buffers()):  # the state dict was of another observer
        quantizer.observer.to_empty(device=device)
        quantizer.observer.reset()
