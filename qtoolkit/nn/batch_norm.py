"""Batch norms that are linked to the QAT layer before them, and the strategies of computing both in training.

In eval mode, or frozen, all strategies are the same: the layer computes with the folded weight and bias, as it does after
conversion, and the batch norm returns its input. In training mode (numbers: strategies of MQBench, arXiv 2111.03759):

- "unscale" (4, the default): one convolution with the weight times gamma / running std, quantized. Its output is divided by
  that factor and goes to the batch norm, which normalizes it by the statistics of the quantized convolution.
- "frozen" (1): fold with the running statistics at each step. They do not change; gamma and beta are trained.
- "two_convolutions" (2; arXiv 1712.05877, section 3.2): a float convolution gives the batch statistics. They are folded into
  the weight of the second convolution, which is quantized.
- "std_correction" (3; arXiv 1806.08342, section 3.2.2): as before, but the quantized weight is folded with the running std, so
  that it does not jitter from batch to batch, and the output is multiplied by running std / batch std. Call
  `freeze_batch_norm` after the statistics have converged.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, distributed, fx, nn

from qtoolkit import ops
from qtoolkit.errors import check_known, warn
from qtoolkit.model_state import check_module, removing, values_kept
from qtoolkit.nn.module import shallow_copy_as
from qtoolkit.processes import whole
from qtoolkit.quantizers.quantizer import named_quantizers
from qtoolkit.quantizers.step_clock import CLOCK, NEVER
from qtoolkit.running import Run, running

if TYPE_CHECKING:
    from qtoolkit.nn.folding import FoldsBatchNorm
    from qtoolkit.nn.weighted import QuantWeighted

STRATEGIES = ("unscale", "frozen", "two_convolutions", "std_correction")
NEEDS_BATCH_STATISTICS = ("two_convolutions", "std_correction")

# (factor of each output channel of the weight, bias, whether the weight is quantized) -> output
Compute = Callable[[Tensor | None, Tensor | None, bool], Tensor]


class LinkedBatchNorm(nn.Module):
    """A batch norm that is linked to the QAT layer before it. If the layer computes it, forward returns its input.

    Attributes:
        strategy: The computation in training, one of `STRATEGIES`.
        frozen: Whether it stays in eval mode when `train()` is called.
        float_type: The type that `to_float` returns.

    Example:
        >>> from torch import nn
        >>> prepared = qt.prepare(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).train(), backend="tensorrt")
        >>> batch_norm = prepared.get_submodule("1")
        >>> isinstance(batch_norm, LinkedBatchNorm), batch_norm.strategy, batch_norm.frozen
        (True, 'unscale', False)
    """

    KIND: ClassVar[str] = "batch_norm"

    weight: Any
    bias: Any
    running_mean: Any
    running_var: Any
    eps: float
    strategy: str
    frozen: bool
    float_type: type[nn.Module]
    # The running variance with which the present step of the training quantizes, and the clock when it was taken, which is
    # no buffer: DistributedDataParallel would replace it by rank 0's, whose process has another clock.
    _variance_of_step: Tensor | None
    _taken: Tensor

    @property
    def folded(self) -> bool:
        """Whether the layer computes with the folded running statistics."""
        return not self.training or self.strategy == "frozen"

    def forward(self, input: Tensor) -> Tensor:
        """Normalize the input, unless the layer before has done so."""
        if self.folded or self.strategy in NEEDS_BATCH_STATISTICS:
            return input
        if self.track_running_stats and running().recomputes:
            # Copies move: torch saves as many tensors as in the forward.
            mean, var = (None if t is None else t.clone() for t in (self.running_mean, self.running_var))
            return nn.functional.batch_norm(input, mean, var, self.weight, self.bias, training=True, eps=self.eps)
        y: Tensor = super().forward(input)
        return y

    def take_in(self, run: Run, x: Tensor) -> None:
        """Update the running statistics with x's."""
        if not run.recomputes:
            with torch.no_grad():
                super().forward(x.detach())

    def hold_variance(self) -> None:
        """Make the buffers of a step of the training, where the statistics now are."""
        variance = self.running_var
        CLOCK.begin(None if variance is None else variance.device)
        with torch.inference_mode(False):  # a training changes them, which it may not do to tensors of inference mode
            held = None if variance is None else variance.detach().clone()
            self._taken = torch.tensor(NEVER, device=None if variance is None else variance.device)
        self.register_buffer("_variance_of_step", held, persistent=False)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        CLOCK.begin(self._taken.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = fn(self._taken).device
        if device != self._taken.device:  # its clock shows another number
            self._taken = torch.tensor(NEVER, device=device)
        CLOCK.begin(device)
        return self

    def holds_like_running(self) -> bool:
        """Return whether the variance of the step has the type and the device of the running one, which a user may replace."""
        held, variance = self._variance_of_step, self.running_var
        if held is None or variance is None:
            return held is variance
        return (held.dtype, held.device, held.shape) == (variance.dtype, variance.device, variance.shape)

    def begin_step(self) -> None:
        """Let the next forward in training begin a step, even if no optimizer takes one before."""
        self._taken.fill_(NEVER)

    def train(self, mode: bool = True) -> Self:
        """Set the mode; a frozen batch norm stays in eval mode. A step of the training begins."""
        self.begin_step()
        return super().train(mode and not self.frozen)

    def freeze(self, frozen: bool) -> None:
        """Stay in eval mode from now on, or train again."""
        self.frozen = frozen
        self.train(not frozen)

    def to_float(self) -> nn.Module:
        """Return the batch norm of its float type, with the same parameters and buffers."""
        bn = shallow_copy_as(self.float_type, self)
        for name in ("strategy", "frozen", "float_type", "_taken"):
            bn.__dict__.pop(name, None)
        bn._buffers.pop("_variance_of_step", None)
        bn._non_persistent_buffers_set = bn._non_persistent_buffers_set - {"_variance_of_step"}
        return bn

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        getattr(destination, "_metadata", {}).setdefault(prefix[:-1], {})["frozen"] = self.frozen

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        if not self.holds_like_running():
            self.hold_variance()
        self.begin_step()
        if "frozen" in local_metadata and self.frozen != local_metadata["frozen"]:
            self.freeze(bool(local_metadata["frozen"]))


class QuantBatchNorm1d(LinkedBatchNorm, nn.BatchNorm1d):
    """torch.nn.BatchNorm1d after a QAT layer."""


class QuantBatchNorm2d(LinkedBatchNorm, nn.BatchNorm2d):
    """torch.nn.BatchNorm2d after a QAT layer."""


class QuantBatchNorm3d(LinkedBatchNorm, nn.BatchNorm3d):
    """torch.nn.BatchNorm3d after a QAT layer."""


class QuantSyncBatchNorm(LinkedBatchNorm, nn.SyncBatchNorm):
    """torch.nn.SyncBatchNorm after a QAT layer.

    In a process group of several ranks it uses the op that may also compute its neighbours, on the CPU too. So a rank
    that calls the modules one by one takes part in the same all-reduces as the others. Otherwise it is torch's.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalize the input by the statistics of all ranks, unless the layer before has normalized it."""
        process_group = None if self.folded else process_group_of(self)
        if process_group is None:
            return super().forward(input)
        self._check_input_dim(input)
        totals = ops.batch_norm_totals(input, process_group)
        y, _, mean, variance = ops.batch_norm_fake_quant(
            input, self.weight, self.bias, self.eps, totals=totals, process_group=process_group
        )
        track(running(), self, mean, variance, count=0, totals=totals)
        return y


class QuantFrozenBatchNorm(LinkedBatchNorm):
    """A FrozenBatchNorm2d (of torchvision or detectron2) linked to a QAT layer, which folds it in both modes."""

    @property
    def folded(self) -> bool:
        """True, because its statistics are constants."""
        return True

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # A checkpoint of a model with nn.BatchNorm2d has this key; torchvision's class ignores it too.
        state_dict.pop(prefix + "num_batches_tracked", None)
        super()._load_from_state_dict(state_dict, prefix, *args)


BATCH_NORMS: dict[type[nn.Module], type[LinkedBatchNorm]] = {
    nn.BatchNorm1d: QuantBatchNorm1d,
    nn.BatchNorm2d: QuantBatchNorm2d,
    nn.BatchNorm3d: QuantBatchNorm3d,
    nn.SyncBatchNorm: QuantSyncBatchNorm,
}
FROZEN_NAMES = ("FrozenBatchNorm2d", "FrozenBatchNorm3d", "FrozenBatchNorm")
FROZEN_BUFFERS = {"weight", "bias", "running_mean", "running_var"}


def is_frozen_batch_norm(module: nn.Module) -> bool:
    """Return whether a module is a FrozenBatchNorm of any package, by its type's name, its buffers and its eps."""
    named = type(module).__name__ in FROZEN_NAMES
    return named and {n for n, _ in module.named_buffers()} == FROZEN_BUFFERS and hasattr(module, "eps")


def is_batch_norm(module: nn.Module) -> bool:
    """Return whether a module is a batch norm that can be folded."""
    return isinstance(module, LinkedBatchNorm) or type(module) in BATCH_NORMS or is_frozen_batch_norm(module)


def is_folded(bn: nn.Module) -> bool:
    """Return whether the layer before a batch norm computes it, by its running statistics."""
    return isinstance(bn, LinkedBatchNorm) and bn.folded


def linked(bn: nn.Module, strategy: str, name: str) -> LinkedBatchNorm:
    """Return a batch norm for which `is_batch_norm` is true as LinkedBatchNorm, with the same parameters and buffers.

    Raises ValueError, with its dotted name, for a strategy that is not known, or does not support this type.
    """
    check_known("batch norm strategy", strategy, STRATEGIES)
    if isinstance(bn, LinkedBatchNorm):
        return bn
    if isinstance(bn, nn.SyncBatchNorm) and strategy in NEEDS_BATCH_STATISTICS:
        raise ValueError(
            f"batch norm {name!r}: strategy {strategy!r} needs the statistics of the whole batch, which a SyncBatchNorm does "
            f'not expose; set Backend.batch_norm to "unscale" or "frozen".'
        )
    new = shallow_copy_as(BATCH_NORMS.get(type(bn), QuantFrozenBatchNorm), bn)
    new.strategy, new.frozen, new.float_type = strategy, False, type(bn)
    new._non_persistent_buffers_set = {*new._non_persistent_buffers_set}  # the float module keeps its own
    new.hold_variance()
    return new


def identity_of(bn: nn.Module) -> nn.Identity:
    """Return an Identity with the hooks and submodules of a batch norm, but no tensors, to replace it after folding."""
    identity = nn.Identity()
    tensors = {"_parameters", "_buffers", "_non_persistent_buffers_set"}
    kept = vars(identity).keys() - tensors
    vars(identity).update({name: value for name, value in vars(bn).items() if name in kept})
    return identity


NONE_LINKED = (
    "no batch norm in the model is linked to a quantized layer, so none is frozen: it has none, prepare folded them in eval "
    "mode, or they run in float (qtoolkit.quantization_report gives the reasons)."
)


def freeze_batch_norm(model: nn.Module) -> None:
    """Freeze the running statistics of the batch norms in a prepared or replaced model.

    The batch norms stay in eval mode when `model.train()` is called, and are folded at each step; gamma and beta are still
    trained. This is the second phase of training with strategy "std_correction", and can follow any other strategy.

    Args:
        model: The result of `qtoolkit.prepare` or `qtoolkit.quant_modules.replace`, or a part of it. Batch norms that are not
            linked to a QAT layer are not changed.

    Warns:
        UserWarning: No batch norm in the model is linked to a QAT layer, and nothing is frozen.

    Raises:
        ValueError: The model is a float model.

    Example:
        >>> from torch import nn
        >>> prepared = qt.prepare(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), backend="tensorrt")
        >>> freeze_batch_norm(prepared)
        >>> prepared.train().get_submodule("1").training
        False
    """
    _set_frozen(model, True, "freeze_batch_norm")


def unfreeze_batch_norm(model: nn.Module) -> None:
    """Undo `freeze_batch_norm`: the batch norms follow `model.train()` again.

    Warns:
        UserWarning: No batch norm in the model is linked to a QAT layer.

    Raises:
        ValueError: The model is a float model.

    Example:
        >>> from torch import nn
        >>> prepared = qt.prepare(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).train(), backend="tensorrt")
        >>> freeze_batch_norm(prepared)
        >>> unfreeze_batch_norm(prepared)
        >>> prepared.train().get_submodule("1").training
        True
    """
    _set_frozen(model, False, "unfreeze_batch_norm")


def _set_frozen(model: nn.Module, frozen: bool, what: str) -> None:
    model = check_module(model, what)
    if not has_linked(model):
        if not isinstance(model, fx.GraphModule) and not named_quantizers(model):
            raise ValueError(
                f"{what}: this {type(model).__name__} is a float model; pass the result of qtoolkit.prepare or "
                f"qtoolkit.quant_modules.replace."
            )
        warn(f"{what}: {NONE_LINKED}")
    for module in model.modules():
        if isinstance(module, LinkedBatchNorm):
            module.freeze(frozen)


def has_linked(model: nn.Module) -> bool:
    """Return whether a batch norm in a model is linked to a QAT layer."""
    return any(isinstance(module, LinkedBatchNorm) for module in model.modules())


@contextmanager
def batch_statistics(model: nn.Module) -> Iterator[Callable[[bool], None]]:
    """Let the norms that are in training mode normalize by each batch's statistics, also in a model put in eval mode.

    They are batch norms, and instance norms with running statistics. Their running statistics are the same afterwards.
    Norms in eval mode, frozen ones too, keep the running ones. A SyncBatchNorm keeps them too: it would wait for ranks
    with fewer batches. The function that the block gets says whether the next forwards do so; False takes the running
    statistics.
    """
    batch_norms = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d  # without SyncBatchNorm
    kinds = batch_norms | nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d
    trained = [bn for bn in model.modules() if isinstance(bn, kinds) and bn.training]
    statistics = [buffer for bn in trained for buffer in bn.buffers(recurse=False)]

    def set_modes(by_batch: bool) -> None:
        for bn in trained:
            bn.training = by_batch

    with values_kept(statistics):
        try:
            yield set_modes
        finally:
            set_modes(True)
            for bn in trained:
                if isinstance(bn, LinkedBatchNorm):
                    bn.begin_step()  # the variance of the step is that before the block again


@contextmanager
def values_of_channels(model: nn.Module) -> Iterator[dict[str, int]]:
    """Count the values that each batch norm normalizes by their own statistics: the values of a channel, in the largest batch.

    The dict that the block gets has them by the names of the batch norms.
    """
    found: dict[str, int] = {}

    def count(name: str, bn: nn.Module, args: tuple[Tensor, ...]) -> None:
        if bn.training and not is_folded(bn) and args[0].dim() > 1:
            found[name] = max(found.get(name, 0), args[0].numel() // max(args[0].shape[1], 1))

    # As in `batch_statistics`; without running ones all modes agree.
    kinds = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
    batch_norms = [(n, bn) for n, bn in model.named_modules() if isinstance(bn, kinds) and bn.running_mean is not None]
    with removing([bn.register_forward_pre_hook(partial(count, name)) for name, bn in batch_norms]):
        yield found


# ---- statistics


def tracks(run: Run, bn: Any) -> bool:
    """Return whether a forward in training mode moves running statistics; one that recomputes another forward does not."""
    return bool(bn.track_running_stats) and bn.running_mean is not None and not run.recomputes


def process_group_of(bn: nn.Module | None) -> str | None:
    """Return the name of the group whose ranks share statistics with a batch norm in training; None if it has its own."""
    if not isinstance(bn, nn.SyncBatchNorm) or not distributed.is_available() or not distributed.is_initialized():
        return None
    group: Any = bn.process_group or distributed.group.WORLD
    name: str = group.group_name
    return name if distributed.get_world_size(group) > 1 else None


def track(
    run: Run,
    bn: Any,
    mean: Tensor,
    variance: Tensor,
    count: int,
    *,
    divisor: Tensor | None = None,
    offset: Tensor | None = None,
    totals: Tensor | None = None,
) -> None:
    """Update the running statistics as torch's batch norms do, by statistics from `qtoolkit.ops.batch_norm_fake_quant`.

    The variance is the biased one of `count` values of a channel, or of as many as the `totals` of all ranks have. The
    statistics are of the batch norm's input times `divisor`, without the `offset` that is added to the batch.
    """
    if not tracks(run, bn):
        return
    tracked = bn.num_batches_tracked
    if tracked is not None:
        tracked.add_(1)
    momentum = 1.0 / float(tracked) if bn.momentum is None else bn.momentum
    given = {"divisor": divisor, "offset": offset, "totals": totals}
    ops.batch_norm_track_(bn.running_mean, bn.running_var, mean, variance, momentum, count, **given)


# ---- arithmetic


def running_variance(bn: Any) -> Tensor:
    """Return the running variance; in a compiled forward a copy, which backward uses after forward has updated the buffer."""
    if bn.running_var is None or bn.running_mean is None:
        raise ValueError("a batch norm without running statistics cannot be folded; set track_running_stats=True.")
    run = running()
    copies = run.compiled and not run.for_onnx
    variance: Tensor = ops.snapshot(bn.running_var, changes=not is_folded(bn)) if copies else bn.running_var
    return variance


def step_variance(run: Run, layer: "QuantWeighted", bn: LinkedBatchNorm) -> Tensor:
    """Return the running variance before the first forward of the present training step.

    The weight is quantized with it, on scales that have taken its factor. Each forward moves the statistics, but gradient
    checkpointing runs a forward once more in backward, and must then see the values of the first one. A step begins with
    the first forward after an optimizer of this process has taken one (see `qtoolkit.quantizers.step_clock`), or `train()`
    was called.
    """
    if not run.compiled and not bn.holds_like_running():
        bn.hold_variance()
    held = bn._variance_of_step
    if held is None or run.transformed or run.exported:
        variance = running_variance(bn)
        takes = layer.takes_factor and not run.for_onnx
        return rescale_to_bn_factor(run, layer, bn, variance) if takes else variance
    if run.recomputes:
        return held.clone()  # a graph that is retained may outlive the step
    of_step = held, bn._taken, CLOCK.on(held.device)
    if layer.takes_factor:
        return rescale_to_bn_factor(run, layer, bn, bn.running_var, of_step=of_step)
    return ops.batch_norm_rescale_(None, None, None, bn.running_var, None, bn.eps, *of_step)


def rescale_to_bn_factor(
    run: Run, layer: "FoldsBatchNorm", bn: LinkedBatchNorm, variance: Tensor, **options: Any
) -> Tensor:
    """Let the scales of a layer's weight take the factor that a running variance gives; return a copy of the variance.

    The options are `TensorQuantizer.rescale_to_bn_factor`'s.
    """
    quantizer: Any = layer.weight_quantizer
    gamma = None if bn.weight is None else whole(bn.weight)
    copy: Tensor = quantizer.rescale_to_bn_factor(run, variance, gamma, bn.eps, **options)
    return copy


def factor_of(bn: nn.Module) -> Tensor:
    """Return gamma / sqrt(running_var + eps), by which a batch norm in eval mode scales each channel."""
    return _factor(bn, running_variance(bn))


def divisor_of(bn: nn.Module, variance: Tensor | None = None) -> Tensor:
    """Return the factor with zeros replaced by 1, as a divisor, and so that a channel with gamma 0 still has a range."""
    factor = _factor(bn, running_variance(bn) if variance is None else variance)
    return factor.masked_fill(factor == 0, 1.0)


def folded_bias(bn: Any, bias: Tensor | None, factor: Tensor, mean: Tensor | None = None) -> Tensor:
    """Return the bias of a layer with the batch norm folded in: (bias - mean) * factor + beta."""
    mean = bn.running_mean if mean is None else mean
    centred = -mean if bias is None else bias - mean
    return centred * factor if bn.bias is None else centred * factor + bn.bias


def forward_with(run: Run, layer: "QuantWeighted", bn: LinkedBatchNorm, compute: Compute) -> Tensor:
    """Compute a layer with its linked batch norm, by the mode and the strategy of the batch norm."""
    if bn.folded:
        return _folded(run, layer, bn, compute)
    if bn.strategy in NEEDS_BATCH_STATISTICS:
        return _with_batch_statistics(run, layer, bn, compute)
    if not layer.weight_quantizer_active:  # the factor multiplies the weight only to quantize it so
        return compute(None, layer.bias, False)
    return unscaled(layer, *bn_scaled_output(run, layer, bn, compute))


def _factor(bn: Any, variance: Tensor) -> Tensor:
    factor = torch.rsqrt(variance + bn.eps)
    return factor if bn.weight is None else whole(bn.weight) * factor


def _folded(run: Run, layer: "QuantWeighted", bn: LinkedBatchNorm, compute: Compute) -> Tensor:
    if layer.training and layer.takes_factor:
        step_variance(run, layer, bn)  # for the scales: gamma may be trained
    elif run.own_ops:  # as for a range that follows the weight
        layer.rescale_to_bn_factor()
    factor = layer.updated(factor_of(bn))
    return compute(factor, folded_bias(bn, layer.bias, factor), True)


def bn_scaled_output(run: Run, layer: "QuantWeighted", bn: LinkedBatchNorm, compute: Compute) -> tuple[Tensor, Tensor]:
    """Return a layer's output without its bias, times the factor of each channel; and that factor (strategy "unscale").

    The batch norm of the layer's output equals one of this output with eps times the factor's square.
    """
    # Of a channel whose weight has no gradient, the factor has none: it multiplies the weight and divides the output, and its
    # gradient in one alone of the two would be far from their sum.
    factor = layer.updated(divisor_of(bn, step_variance(run, layer, bn)))
    return compute(factor, None, True), factor


def unscaled(layer: "QuantWeighted", out: Tensor, factor: Tensor) -> Tensor:
    """Return a layer's output from the result of `bn_scaled_output`."""
    y, bias = out / layer.along_channels(factor), layer.bias
    if bias is not None and process_group_of(layer.batch_norm) is not None:
        bias = bias.detach() + 0 * bias  # the gradients of all ranks add up to zero, which a unit returns too
    return (y if bias is None else y + layer.along_channels(bias)).to(out.dtype)


def _with_batch_statistics(run: Run, layer: "QuantWeighted", bn: LinkedBatchNorm, compute: Compute) -> Tensor:
    y = compute(None, layer.bias, False)
    channel = y.dim() - layer.weight.dim() + 1
    wide = y if y.dtype == torch.float64 else y.float()
    variance, mean = torch.var_mean(wide, [d for d in range(y.dim()) if d != channel], correction=0)
    of_batch = _factor(bn, variance)
    of_step = step_variance(run, layer, bn)  # the scales are those for it
    running = of_step if bn.strategy == "std_correction" else variance
    bn.take_in(run, y)
    corrected = compute(_factor(bn, running), None, True)
    if bn.strategy == "std_correction":
        corrected = corrected * layer.along_channels(torch.sqrt((running + bn.eps) / (variance + bn.eps)))
    return (corrected + layer.along_channels(folded_bias(bn, layer.bias, of_batch, mean))).to(y.dtype)
