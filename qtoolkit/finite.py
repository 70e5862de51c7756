"""The check that the weights and statistics of a model are numbers, before they are quantized or exported."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from qtoolkit.errors import some
from qtoolkit.processes import own_part
from qtoolkit.quantizers.quantizer import Quantizer


def check_finite(model: nn.Module, what: str) -> None:
    """Raise ValueError, which begins with `what`, for invalid parameters and statistics, by their names.

    Parameters and the statistics of batch norms must be finite, and variances not negative. Other buffers may be infinite, as a
    mask is, but not NaN. Quantizers check their own scales; observations, and quantizers without a range, are left out.

    Example:
        >>> check_finite(nn.BatchNorm1d(2), "convert")
        >>> broken = nn.BatchNorm1d(2)
        >>> broken.running_var[1] = torch.nan
        >>> check_finite(broken, "convert")
        Traceback (most recent call last):
        ...
        ValueError: convert: 'running_var' has NaN (1 of 2 values). Load an earlier state of the model; ...
    """
    bad = list(_faults(model))
    if bad:
        raise ValueError(
            f"{what}: {some(bad)}. Load an earlier state of the model; if only statistics of batch norms are affected, call "
            f"reset_running_stats() on these batch norms and qtoolkit.tuning.reestimate_batch_norm(model, batches). A batch "
            f"with NaN changes the statistics in its forward, even if its step is skipped: check batches before the forward."
        )


def _faults(model: nn.Module) -> Iterator[str]:
    quantizers = [module for module in model.modules() if isinstance(module, Quantizer)]
    ignored = {id(buffer) for quantizer in quantizers for buffer in quantizer.buffers()}
    ignored |= {id(p) for quantizer in quantizers if not quantizer.ready for p in quantizer.parameters()}
    statistics = [module for module in model.modules() if isinstance(getattr(module, "running_var", None), Tensor)]
    buffers = [buffer for module in statistics for buffer in module.buffers(recurse=False)]
    finite = set(map(id, (*model.parameters(), *buffers)))
    variances = {id(module.running_var) for module in statistics}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in ignored and _has_values(tensor):
            fault = _fault(tensor.detach(), id(tensor) in finite, id(tensor) in variances)
            if fault is not None:
                yield f"{name!r} has {fault}"


def _has_values(tensor: Tensor) -> bool:
    return not tensor.is_meta and tensor.layout is torch.strided and tensor.is_floating_point() and tensor.itemsize > 1


def _fault(tensor: Tensor, finite: bool, variance: bool) -> str | None:
    """Return what is wrong with a tensor, of which each process looks at its own part."""
    local = own_part(tensor)
    low, high = map(float, local.aminmax()) if local.numel() else (0.0, 0.0)  # in one read; NaN passes through
    if not math.isnan(low) and not (finite and (math.isinf(low) or math.isinf(high))) and not (variance and low < 0):
        return None
    bad = {"NaN": local.isnan(), "infinities": local.isinf(), "negative values": local < 0}
    fault = next(name for name, where in bad.items() if where.any())
    return f"{fault} ({int(bad[fault].sum())} of {local.numel()} values)"
