"""reestimate_batch_norm(): running statistics of batch norms anew from data."""

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
    model: nn.Module, batches: Iterable[object], forward: Forward | None = None, progress: bool = True
) -> Reestimation:
    """Estimate the running statistics of all batch norms anew from some batches, with the weights as they now are.

    The running averages of training lag behind the weights, and with few bits the weights' noise moves the statistics. Each
    call counts the same, also of a batch norm that the model calls several times: the new mean is the average of the means, and
    the new variance the average of the variances plus the variance of the means. Batch norms normalize by the statistics of
    the batch meanwhile; all else runs in eval mode, with the quantizers as they are. Scales of weights change as the new
    statistics scale the weights. With one for each output channel no code of a weight changes, and the statistics fit the
    codes; one for all takes what the factors have in common, and powers of two stay. If anything raises, all is as before.

    Args:
        model: A float, prepared or replaced model.
        batches: As for `qtoolkit.calibrate`, in batches as large as in training.
        forward: forward(model, batch), for batches that the model does not take.
        progress: Show a progress bar.

    Returns:
        The batch norms that were estimated, and why others were not.

    Warns:
        UserWarning: A range clips more than a few per cent of the values, or rounds all of them to zero; or codes are lost that
            were chosen for weights with one scale for all channels, or powers of two.

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
    model = check_module(model, "reestimate_batch_norm")
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
        ranges = [_Clipping(q) for q in quantizers_of(model).values() if _has_range(q) and not q.of_weight]
        count = _sum_up(model, data, sums.values(), ranges, progress)
        _store(model, sums, ranges, unchanged)
        _warn_of_ranges(ranges)
    return Reestimation(count, tuple(name for name in found if name not in unchanged), unchanged)


def _store(model: nn.Module, sums: Mapping[str, "_Sums"], ranges: list["_Clipping"], unchanged: dict[str, str]) -> None:
    """Set the new statistics, let scales and ranges of weights follow, and add those ranges that clip more than before."""
    layers = [module for module in model.modules() if isinstance(module, QuantWeighted)]
    for layer in layers:
        layer.rescale_to_bn_factor()
    chosen, before = _chosen_codes(layers), _ranges_of_weights(layers)
    with torch.no_grad():
        unchanged |= {name: "no batch reached it" for name, each in sums.items() if not each.store()}
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
    """Take in the statistics of all calls, and what ranges clip; return how many batches there were."""
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
        # A linked FrozenBatchNorm of another package is no _BatchNorm: its statistics are constants.
        if not isinstance(module, _BatchNorm) or (isinstance(module, LinkedBatchNorm) and module.frozen):
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
    """The sums of the statistics of a batch norm's calls: with momentum 1, the last call gives its running ones."""

    def __init__(self, name: str, bn: _BatchNorm) -> None:
        self.name, self.bn = name, bn
        self.old = [tensor.clone() for tensor in self._tensors()]
        self.count_before = bn.get_buffer("num_batches_tracked").clone()
        self.count, self.mean, self.square = 0, torch.zeros(()), torch.zeros(())

    def _tensors(self) -> tuple[Tensor, Tensor]:
        return self.bn.get_buffer("running_mean"), self.bn.get_buffer("running_var")

    def take(self, *_: object) -> None:
        """Add the statistics of a call, and put back the old ones: a forward hook."""
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
            # That of a constant channel is zero up to rounding.
            variance = (self.square / self.count - mean.square()).clamp(min=0)
            if isinstance(self.bn, LinkedBatchNorm):
                # Its weights are rounded to zero. A variance of zero would make them hundreds of times as large, off the grid.
                constant = variance <= ROUNDING * mean.square()
                variance = torch.where(constant, self.old[1].to(variance), variance)
            if not bool(torch.isfinite(mean).all() and torch.isfinite(variance).all()):
                raise ValueError(
                    f"reestimate_batch_norm: statistics of the batch norm {self.name!r} are not finite, so nothing was "
                    f"changed: a batch has NaN, infinities or one value for each channel; leave this batch out."
                )
            for tensor, new in zip(self._tensors(), (mean, variance), strict=True):
                tensor.copy_(new)
        return self.count > 0


class _Clipping:
    """The share of a tensor's values that its range clips, and whether all of them are rounded to zero."""

    def __init__(self, quantizer: TensorQuantizer) -> None:
        self.quantizer, self.count = quantizer, 0
        self.clipped = 0.0  # how many values
        self.vanishes = True

    def take(self, quantizer: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Take in the input of a call: a forward pre-hook."""
        if self.quantizer.ready and args[0].numel():
            clipped, vanished = look(self.quantizer, args[0]).tolist()
            self.clipped += clipped * args[0].numel()
            self.count += args[0].numel()
            self.vanishes = self.vanishes and bool(vanished)

    @property
    def share(self) -> float:
        """The share that is clipped."""
        return self.clipped / max(self.count, 1)

    def why(self) -> str:
        """Return what is wrong with the range; "" for nothing."""
        share = self.share
        if self.count and self.vanishes:
            return f"{self.quantizer.name!r} (all rounded to zero)"
        return f"{self.quantizer.name!r} ({share:.1%} clipped)" if much_clipped(self.quantizer, share) else ""


@torch.no_grad()
def _ranges_of_weights(layers: Iterable[QuantWeighted]) -> list[_Clipping]:
    """Return the looks at the weights that batch norms scale, as they now are."""
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
    """Return the codes of the weights that batch norms scale and that lie on their codes, as after `reconstruct`."""
    chosen = [layer for layer in layers if layer.batch_norm is not None and is_rounded(layer)]
    return {layer: CodeGrid(layer, "").nearest() for layer in chosen}


def _warn_of_codes(chosen: Mapping[QuantWeighted, Tensor]) -> None:
    """Warn of layers whose codes have changed since."""
    grids = [(CodeGrid(layer, ""), codes) for layer, codes in chosen.items()]
    lost = [repr(grid.quantizer.name) for grid, codes in grids if not torch.equal(grid.nearest(), codes)]
    if lost:
        warn(
            f"reestimate_batch_norm: the codes that were chosen on the grids of {some(lost)} are lost, because these scales "
            f"cannot take the new factor of each output channel. Estimate before qtoolkit.tuning.reconstruct or gptq, or give "
            f"the weights a QuantSpec with axis=0 and scales of any value.",
        )


def _warn_of_ranges(ranges: Iterable[_Clipping]) -> None:
    wrong = [why for each in ranges if (why := each.why())]
    if wrong:
        warn(
            f"reestimate_batch_norm: the ranges of {some(wrong)} do not fit their tensors with the new statistics (at most "
            f"{MUCH_CLIPPED:.0%} should be clipped); call qtoolkit.calibrate again.",
        )
