"""reestimate_batch_norm(): running statistics of batch norms anew from data."""

import warnings
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from qtoolkit.errors import check_flags, some
from qtoolkit.model_state import attribute_kept, check_module, removing
from qtoolkit.nn import LinkedBatchNorm, QuantModule, QuantWeighted
from qtoolkit.nn.batch_norm import BATCH_NORMS
from qtoolkit.progress import batches_of
from qtoolkit.quantizers.first_steps import MUCH_CLIPPED, look, much_clipped
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer, quantizers_of
from qtoolkit.shared_modules import first_names
from qtoolkit.tuning.runs.batches import Batches, Forward, tuning

ROUNDING = 1e-12  # of the square of a mean: a variance below it is zero


@dataclass(frozen=True)
class Reestimation:
    """The result of `reestimate_batch_norm`.

    Attributes:
        batches: Batches that were run.
        batch_norms: The dotted names of the batch norms with new statistics.
        unchanged: Why others have the old ones, by their names.
    """

    batches: int
    batch_norms: tuple[str, ...]
    unchanged: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{len(self.batch_norms)} batch norms estimated from {self.batches} batches"]
        return "\n".join(lines + [f"{name}: as it was: {why}" for name, why in self.unchanged.items()])


def reestimate_batch_norm(
    model: nn.Module, batches: Iterable[Any], forward: Forward | None = None, progress: bool = True
) -> Reestimation:
    """Set the running statistics of all batch norms to those of some batches, with the weights as they now are.

    The running averages of training lag behind the weights, and with few bits the weights' noise moves the statistics. Each
    call counts the same, also of a batch norm that the model calls several times: the new mean is the average of the means, and
    the new variance that of the variances plus the variance of the means. Batch norms normalize by the statistics of the batch
    meanwhile; all else runs in eval mode, with the quantizers as they are. Scales of weights change as the new statistics scale
    the weights. With one for each output channel no code of a weight changes, and the statistics are those of the codes; one
    for all takes what the factors have in common, and powers of two stay. If anything raises, all is as before.

    Args:
        model: A float, prepared or replaced model.
        batches: As for `qtoolkit.calibrate`, in batches as large as in training.
        forward: forward(model, batch), for batches that the model does not take.
        progress: Show a progress bar.

    Returns:
        The batch norms that were estimated, and why others were not.

    Warns:
        UserWarning: The range of an activation clips more than a few per cent of the values, or rounds all of them to zero.

    Raises:
        ValueError: The model has no batch norm with running statistics that may change (`qtoolkit.prepare` folds them in eval
            mode), there is no batch, or the statistics are not finite.
        TypeError: An argument is of a wrong type, or a batch does not match the model's forward.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.BatchNorm1d(1, affine=False))
        >>> report = qt.tuning.reestimate_batch_norm(model, [torch.tensor([[1.0], [3.0]])], progress=False)
        >>> model[0].running_mean, model[0].running_var
        (tensor([2.]), tensor([2.]))
    """
    check_flags("reestimate_batch_norm", progress=progress)
    check_module(model, "reestimate_batch_norm")
    found, unchanged = _batch_norms(model)
    if not found:
        raise ValueError(
            "reestimate_batch_norm: the model has no batch norm with running statistics that may change"
            + "".join(f"; {name}: {why}" for name, why in unchanged.items())
            + ". A model that was prepared in eval mode has them folded: estimate before qtoolkit.prepare."
        )
    data = Batches(batches, forward, "reestimate_batch_norm")
    with tuning(model):
        sums = {name: _Sums(name, bn) for name, bn in found.items()}
        ranges = _ranges(model)
        count = _sum_up(model, data, sums.values(), ranges, progress)
        layers = [module for module in model.modules() if isinstance(module, QuantWeighted)]
        for layer in layers:
            layer.take_factor()
        with torch.no_grad():
            for name, each in sums.items():
                if not each.store():
                    unchanged[name] = "no batch reached it"
        for layer in layers:
            layer.take_factor(frozen=True)
        for module in model.modules():
            if isinstance(module, QuantModule):
                module.refresh_weight_range()
    _warn_of_ranges(ranges)
    return Reestimation(count, tuple(name for name in found if name not in unchanged), unchanged)


def _sum_up(
    model: nn.Module, data: Batches, sums: Collection["_Sums"], ranges: Sequence["_Clipping"], progress: bool
) -> int:
    """Take in the statistics of all calls, and what ranges clip; return how many batches there were."""
    count, norms = 0, [each.bn for each in sums]
    hooks = [each.bn.register_forward_hook(each.take) for each in sums]
    kept = removing(hooks + [each.quantizer.register_forward_pre_hook(each.take) for each in ranges])
    with kept, attribute_kept(norms, "momentum"), attribute_kept(norms, "training"), torch.no_grad():
        for bn in norms:  # its running statistics become those of each call
            bn.momentum, bn.training = 1.0, True
        for batch in batches_of("batch norms", data, progress):
            data.run(model, batch)
            count += 1
    return count


def _batch_norms(model: nn.Module) -> tuple[dict[str, Any], dict[str, str]]:
    found: dict[str, Any] = {}
    unchanged: dict[str, str] = {}
    for module, name in first_names(model).items():
        if not isinstance(module, _BatchNorm | LinkedBatchNorm):  # also a type of the user's own, such as timm's
            continue
        if isinstance(module, LinkedBatchNorm) and (module.frozen or module.float_type not in BATCH_NORMS):
            unchanged[name] = "it is frozen"
        elif isinstance(module, LinkedBatchNorm) and module.strategy == "frozen":
            unchanged[name] = 'its strategy is "frozen"'
        elif module.running_mean is None:
            unchanged[name] = "it has no running statistics"
        elif module.num_batches_tracked is None:
            unchanged[name] = "it does not count its batches, so that nothing shows which calls change its statistics"
        else:
            found[name] = module
    return found, unchanged


class _Sums:
    """The sums of the statistics of a batch norm's calls: with momentum 1, its running ones are those of the last call."""

    def __init__(self, name: str, bn: Any) -> None:
        self.name, self.bn = name, bn
        self.old = [tensor.clone() for tensor in self._tensors()]
        self.seen = bn.num_batches_tracked.clone()
        self.count, self.mean, self.square = 0, torch.zeros(()), torch.zeros(())

    def _tensors(self) -> tuple[Tensor, Tensor]:
        return self.bn.running_mean, self.bn.running_var

    def take(self, *_: object) -> None:
        """Add the statistics of a call, and put back the old ones: a forward hook."""
        if bool(self.bn.num_batches_tracked == self.seen):
            return
        mean, variance = (tensor.double() for tensor in self._tensors())
        self.mean, self.square = self.mean.to(mean) + mean, self.square.to(mean) + variance + mean.square()
        self.count += 1
        for tensor, old in zip(self._tensors(), self.old, strict=True):
            tensor.copy_(old)
        self.bn.num_batches_tracked.copy_(self.seen)

    def store(self) -> bool:
        """Set the new statistics; return whether there are any."""
        if self.count:
            mean = self.mean / self.count
            variance = (self.square / self.count - mean.square()).clamp(
                min=0
            )  # a constant channel's is zero up to rounding
            if isinstance(self.bn, LinkedBatchNorm):
                # Its weights are rounded to zero. A variance of zero would make them hundreds of times as large, off the grid.
                constant = variance <= ROUNDING * mean.square()
                variance = torch.where(constant, self.old[1].to(variance), variance)
            self._check_finite(mean, variance)
            self.bn.running_mean.copy_(mean)
            self.bn.running_var.copy_(variance)
        return self.count > 0

    def _check_finite(self, mean: Tensor, variance: Tensor) -> None:
        if not bool(torch.isfinite(mean).all() and torch.isfinite(variance).all()):
            raise ValueError(
                f"reestimate_batch_norm: statistics of the batch norm {self.name!r} are not finite, so nothing was changed: "
                f"a batch has NaN, infinities or one value for each channel; leave this batch out."
            )


class _Clipping:
    """The share of an activation's values that its range clips, and whether all of them are rounded to zero."""

    def __init__(self, quantizer: TensorQuantizer) -> None:
        self.quantizer, self.count = quantizer, 0
        self.clipped = 0.0  # how many values
        self.vanishes = True

    def take(self, quantizer: nn.Module, args: tuple[Any, ...]) -> None:
        """Take in the input of a call: a forward pre-hook."""
        if self.quantizer.ready and args[0].numel():
            clipped, vanished = look(self.quantizer, args[0]).tolist()
            self.clipped += clipped * args[0].numel()
            self.count += args[0].numel()
            self.vanishes = self.vanishes and bool(vanished)

    def why(self) -> str:
        """Return what is wrong with the range; "" for nothing."""
        share = self.clipped / max(self.count, 1)
        if self.count and self.vanishes:
            return f"{self.quantizer.name!r} (all rounded to zero)"
        return f"{self.quantizer.name!r} ({share:.1%} clipped)" if much_clipped(self.quantizer, share) else ""


def _ranges(model: nn.Module) -> list[_Clipping]:
    """Return the looks at all activations that have a range of their own."""
    found = quantizers_of(model).values()
    return [_Clipping(q) for q in found if q.quantizing and not q.of_weight and q.capability.direct]


def _warn_of_ranges(ranges: Iterable[_Clipping]) -> None:
    wrong = [why for each in ranges if (why := each.why())]
    if wrong:
        warnings.warn(
            f"reestimate_batch_norm: the ranges of {some(wrong)} do not fit the activations with the new statistics (at most "
            f"{MUCH_CLIPPED:.0%} should be clipped); call qtoolkit.calibrate again.",
            stacklevel=3,
        )
