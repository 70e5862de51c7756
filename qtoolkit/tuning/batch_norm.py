"""reestimate_batch_norm(): recompute the running statistics of batch norms from data."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from qtoolkit.errors import check_flags, some, warn
from qtoolkit.model_state import attribute_kept, check_module, removing
from qtoolkit.nn import LinkedBatchNorm, QuantModule, QuantWeighted
from qtoolkit.nn.rounded import is_rounded
from qtoolkit.progress import batches_of
from qtoolkit.quantizers.first_steps import MUCH_CLIPPED, look, much_clipped
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer, quantizers_of
from qtoolkit.shared_modules import first_names
from qtoolkit.tuning.rounding.grids import CodeGrid
from qtoolkit.tuning.runs.batches import Batches, Forward, tuning

ROUNDING = 1e-12  # of the square of a mean: a variance below it is zero


@dataclass(frozen=True)
class Reestimation:
    """The result of `reestimate_batch_norm`.

    Attributes:
        batches: The number of batches.
        batch_norms: The dotted names of the batch norms with new statistics.
        unchanged: The reason for each batch norm that keeps its statistics, by name.
    """

    batches: int
    batch_norms: tuple[str, ...]
    unchanged: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{len(self.batch_norms)} batch norms estimated from {self.batches} batches"]
        return "\n".join(lines + [f"{name}: unchanged: {why}" for name, why in self.unchanged.items()])


def reestimate_batch_norm(
    model: nn.Module, batches: Iterable[object], forward: Forward | None = None, progress: bool = True
) -> Reestimation:
    """Recompute the running statistics of all batch norms from some batches, with the current weights.

    Running averages of training belong to older weights, and with few bits the noise of the quantized weights changes the
    statistics. Every call has the same weight, also for a batch norm that the model calls several times: the new mean is the
    average of the means, and the new variance is the average of the variances plus the variance of the means. Meanwhile, batch
    norms normalize by the statistics of the batch; all other modules run in eval mode, with unchanged quantizers. The scales of
    weights follow the new statistics. With per-channel scales no quantized weight changes, so the statistics fit the weights. A
    per-tensor scale follows only the common part of the factors, and power-of-two scales do not change. If an error is raised,
    the model is unchanged.

    Args:
        model: A float, prepared or replaced model.
        batches: As for `qtoolkit.calibrate`, with the batch size of training.
        forward: forward(model, batch), for batches that cannot be passed to the model directly.
        progress: Show a progress bar.

    Returns:
        The batch norms with new statistics, and the reasons for the others.

    Warns:
        UserWarning: A range clips more than a few percent of the values, or rounds all of them to zero; or chosen roundings of
            weights with a per-tensor or power-of-two scale are lost.

    Raises:
        ValueError: The model has no batch norm with running statistics that can change (`qtoolkit.prepare` folds them in eval
            mode), there is no batch, or the statistics are not finite.
        TypeError: An argument is of a wrong type, or a batch does not match the model's forward.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.BatchNorm1d(1, affine=False))
        >>> report = qt.tuning.reestimate_batch_norm(model, [torch.tensor([[1.0], [3.0]])], progress=False)
        >>> model[0].running_mean, model[0].running_var
        (tensor([2.]), tensor([2.]))
    """
    check_flags("reestimate_batch_norm", progress=progress)
    model = check_module(model, "reestimate_batch_norm")
    found, unchanged = _batch_norms(model)
    if not found:
        raise ValueError(
            "reestimate_batch_norm: the model has no batch norm with running statistics that can change"
            + "".join(f"; {name}: {why}" for name, why in unchanged.items())
            + ". In a model prepared in eval mode they are folded: call it before qtoolkit.prepare."
        )
    data = Batches(batches, forward, "reestimate_batch_norm")
    with tuning(model):
        sums = {name: _Sums(name, bn) for name, bn in found.items()}
        ranges = [_Clipping(q) for q in quantizers_of(model).values() if _has_range(q) and not q.of_weight]
        count = _sum_up(model, data, sums.values(), ranges, progress)
        _store(model, sums, ranges, unchanged)
        _warn_of_ranges(ranges)
    return Reestimation(count, tuple(name for name in found if name not in unchanged), unchanged)


def _store(model: nn.Module, sums: Mapping[str, "_Sums"], ranges: list["_Clipping"], unchanged: dict[str, str]) -> None:
    """Set the new statistics, update scales and ranges of weights, and add ranges that now clip more to `ranges`."""
    layers = [module for module in model.modules() if isinstance(module, QuantWeighted)]
    for layer in layers:
        layer.rescale_to_bn_factor()
    chosen, before = _chosen_codes(layers), _ranges_of_weights(layers)
    with torch.no_grad():
        unchanged |= {name: "no batch reaches it" for name, each in sums.items() if not each.store()}
    for layer in layers:
        layer.rescale_to_bn_factor(frozen=True)
    for module in model.modules():
        if isinstance(module, QuantModule):
            module.follow_weights()
    _warn_of_codes(chosen)
    pairs = zip(before, _ranges_of_weights(layers), strict=True)
    ranges += [new for old, new in pairs if new.share > old.share + MUCH_CLIPPED / 5]


def _sum_up(
    model: nn.Module, data: Batches, sums: Collection["_Sums"], ranges: Sequence["_Clipping"], progress: bool
) -> int:
    """Record the statistics of all calls, and the clipped shares; return the number of batches."""
    count, norms = 0, [each.bn for each in sums]
    hooks = [each.bn.register_forward_hook(each.take) for each in sums]
    kept = removing(hooks + [each.quantizer.register_forward_pre_hook(each.take) for each in ranges])
    with kept, attribute_kept(norms, "momentum"), attribute_kept(norms, "training"), torch.no_grad():
        for bn in norms:  # its running statistics become the statistics of each call
            bn.momentum, bn.training = 1.0, True
        for batch in batches_of("batch norms", data, progress):
            data.run(model, batch)
            count += 1
    return count


def _batch_norms(model: nn.Module) -> tuple[dict[str, _BatchNorm], dict[str, str]]:
    found: dict[str, _BatchNorm] = {}
    unchanged: dict[str, str] = {}
    for module, name in first_names(model).items():
        if not isinstance(module, _BatchNorm | LinkedBatchNorm):  # also a type of the user's own, such as timm's
            continue
        # A linked FrozenBatchNorm of another package is not a _BatchNorm: its statistics are constants.
        if not isinstance(module, _BatchNorm) or (isinstance(module, LinkedBatchNorm) and module.frozen):
            unchanged[name] = "it is frozen"
        elif isinstance(module, LinkedBatchNorm) and module.strategy == "frozen":
            unchanged[name] = 'its strategy is "frozen"'
        elif module.running_mean is None:
            unchanged[name] = "it has no running statistics"
        elif module.num_batches_tracked is None:
            unchanged[name] = "it does not count its batches, so the calls that change its statistics are unknown"
        else:
            found[name] = module
    return found, unchanged


class _Sums:
    """The sums of the statistics of a batch norm's calls; with momentum 1 the running statistics equal the last call's."""

    def __init__(self, name: str, bn: _BatchNorm) -> None:
        self.name, self.bn = name, bn
        self.old = [tensor.clone() for tensor in self._tensors()]
        self.count_before = bn.get_buffer("num_batches_tracked").clone()
        self.count, self.mean, self.square = 0, torch.zeros(()), torch.zeros(())

    def _tensors(self) -> tuple[Tensor, Tensor]:
        return self.bn.get_buffer("running_mean"), self.bn.get_buffer("running_var")

    def take(self, *_: object) -> None:
        """Forward hook: add the statistics of a call, and restore the old ones."""
        count = self.bn.get_buffer("num_batches_tracked")
        if bool(count == self.count_before):
            return
        mean, variance = (tensor.double() for tensor in self._tensors())
        self.mean, self.square = self.mean.to(mean) + mean, self.square.to(mean) + variance + mean.square()
        self.count += 1
        for tensor, old in zip(self._tensors(), self.old, strict=True):
            tensor.copy_(old)
        count.copy_(self.count_before)

    def store(self) -> bool:
        """Set the new statistics; return whether there are any."""
        if self.count:
            mean = self.mean / self.count
            # The variance of a constant channel is zero up to rounding.
            variance = (self.square / self.count - mean.square()).clamp(min=0)
            if isinstance(self.bn, LinkedBatchNorm):
                # Its weights are rounded to zero. A variance of zero would scale them up hundreds of times, beyond the grid.
                constant = variance <= ROUNDING * mean.square()
                variance = torch.where(constant, self.old[1].to(variance), variance)
            if not bool(torch.isfinite(mean).all() and torch.isfinite(variance).all()):
                raise ValueError(
                    f"reestimate_batch_norm: the statistics of the batch norm {self.name!r} are not finite, so nothing was "
                    "changed: a batch contains NaN, infinities or only one value per channel; remove this batch."
                )
            for tensor, new in zip(self._tensors(), (mean, variance), strict=True):
                tensor.copy_(new)
        return self.count > 0


class _Clipping:
    """The share of clipped values of a tensor, and whether all values are rounded to zero."""

    def __init__(self, quantizer: TensorQuantizer) -> None:
        self.quantizer, self.count = quantizer, 0
        self.clipped = 0.0  # how many values
        self.vanishes = True

    def take(self, quantizer: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Forward pre-hook: record the input of a call."""
        if self.quantizer.ready and args[0].numel():
            clipped, vanished = look(self.quantizer, args[0]).tolist()
            self.clipped += clipped * args[0].numel()
            self.count += args[0].numel()
            self.vanishes = self.vanishes and bool(vanished)

    @property
    def share(self) -> float:
        """The share of clipped values."""
        return self.clipped / max(self.count, 1)

    def why(self) -> str:
        """Return the problem of the range; "" if there is none."""
        share = self.share
        if self.count and self.vanishes:
            return f"{self.quantizer.name!r} (all rounded to zero)"
        return f"{self.quantizer.name!r} ({share:.1%} clipped)" if much_clipped(self.quantizer, share) else ""


@torch.no_grad()
def _ranges_of_weights(layers: Iterable[QuantWeighted]) -> list[_Clipping]:
    """Return the current values of the weights that batch norms scale."""
    found = []
    for layer in layers:
        if layer.batch_norm is not None and _has_range(layer.weight_quantizer):
            found.append(_Clipping(layer.weight_quantizer))
            found[-1].take(layer.weight_quantizer, (layer.effective_weight(),))
    return found


def _has_range(quantizer: object) -> TypeGuard[TensorQuantizer]:
    return isinstance(quantizer, TensorQuantizer) and quantizer.quantizing and quantizer.capability.direct


@torch.no_grad()
def _chosen_codes(layers: Iterable[QuantWeighted]) -> dict[QuantWeighted, Tensor]:
    """Return the integers of the weights that batch norms scale and that are already rounded, as after `reconstruct`."""
    chosen = [layer for layer in layers if layer.batch_norm is not None and is_rounded(layer)]
    return {layer: CodeGrid(layer, "").nearest() for layer in chosen}


def _warn_of_codes(chosen: Mapping[QuantWeighted, Tensor]) -> None:
    """Warn about layers with changed integers."""
    grids = [(CodeGrid(layer, ""), codes) for layer, codes in chosen.items()]
    lost = [repr(grid.quantizer.name) for grid, codes in grids if not torch.equal(grid.nearest(), codes)]
    if lost:
        warn(
            f"reestimate_batch_norm: the chosen roundings of {some(lost)} are lost, because these scales cannot follow the "
            "new factor of each output channel. Call it before qtoolkit.tuning.reconstruct or gptq, or give the weights a "
            "QuantSpec with axis=0 and scales that are not powers of two.",
        )


def _warn_of_ranges(ranges: Iterable[_Clipping]) -> None:
    wrong = [why for each in ranges if (why := each.why())]
    if wrong:
        warn(
            f"reestimate_batch_norm: the ranges of {some(wrong)} do not fit their tensors with the new statistics (at most "
            f"{MUCH_CLIPPED:.0%} should be clipped); call qtoolkit.calibrate again.",
        )
