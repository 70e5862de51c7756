"""watch(): statistics of each quantizer during training, and an error at the first step with NaN or a lost scale."""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from qtoolkit.debug.activity import Activity, Hook, Recorder, SummaryWriter, check_writer, write
from qtoolkit.debug.diagnosis import Diagnosis
from qtoolkit.errors import check_whole
from qtoolkit.foreign import refuse_foreign_quantizers
from qtoolkit.model_state import check_module
from qtoolkit.quantizers.tensor_quantizer import quantizers_of
from qtoolkit.report.lines import table
from qtoolkit.running import running
from qtoolkit.wrapped import unwrapped

COLUMNS = ("quantizer", "spec", "calls", "values", "grid", "clipped", "levels", "gradient", "of scale", "not finite")


class Watch(AbstractContextManager["Watch"]):
    """The result of `watch`; prints as a table. `close`, or the end of a `with` block, removes its hooks from the model.

    Attributes:
        every: Every n-th step is sampled.
        steps: The number of steps that the optimizers of the model have taken.
        sampled: The number of sampled steps.
    """

    def __init__(self, model: nn.Module, every: int, writer: SummaryWriter | None = None) -> None:
        self.every, self.steps, self.sampled = every, 0, 0
        self._writer = writer
        inner, places = unwrapped(model), count()  # a second run must not talk to other processes
        self._recorders = [Recorder(name, quantizer, places) for name, quantizer in quantizers_of(inner).items()]
        self._parameters = {id(parameter) for parameter in model.parameters()}
        self._sampling, self._hooks = ExitStack(), ExitStack()
        self._diagnosis = Diagnosis(inner, self._sampling.close)
        self._keep(register_optimizer_step_pre_hook(_weakly(self._before_step)))
        self._keep(register_optimizer_step_post_hook(_weakly(self._after_step)))
        self._keep(model.register_forward_pre_hook(Hook(self._diagnosis.remember), with_kwargs=True))
        self._hooks.callback(self._sampling.close)
        weakref.finalize(self, self._hooks.close)  # a watch that nobody holds any more
        self._sample()

    # ---- reading

    def rows(self) -> tuple[Activity, ...]:
        """Return the statistics of each quantizer since the start or the last `reset`, in the order of their first calls.

        This synchronizes with the device.
        """
        return tuple(recorder.read() for recorder in sorted(self._recorders, key=lambda recorder: recorder.place))

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return the rows as plain values for JSON or a logger, by quantizer name."""
        return {row.name: asdict(row) for row in self.rows()}

    def __str__(self) -> str:
        rows = [COLUMNS, *(_cells(row) for row in self.rows())]
        return "\n".join([f"{self.sampled} steps sampled, up to step {self.steps}", "", *table(rows)])

    def reset(self) -> None:
        """Clear the statistics, for example after each epoch."""
        self.sampled = 0
        for recorder in self._recorders:
            recorder.reset()

    # ---- errors

    def check(self, loss: Tensor) -> None:
        """Raise an error if a loss is not finite; this synchronizes with the device.

        Args:
            loss: The loss, before a GradScaler multiplies it.

        Raises:
            RuntimeError: The loss is NaN or infinite. Forward runs again, without effect on the model, and the message names
                the first quantizer that gets NaN or infinity.
        """
        self._diagnosis.check_loss(loss, self.steps)

    def guard(self, optimizer: Optimizer) -> RemovableHandle:
        """Check the gradients and the learned scales before each step of an optimizer, with one synchronization of the device.

        In a step that a GradScaler skips, non-finite gradients are not an error.

        Returns:
            A handle; `remove()` ends the checks. `close` ends them too.

        Warns:
            UserWarning: From `optimizer.step()`: a learned scale has left [1/8, 8] times its start, once for each quantizer.

        Raises:
            RuntimeError: From `optimizer.step()`, before it changes anything: a gradient or a learned scale is not finite, or a
                learned scale is more than 2**24 times, or less than 2**-24 times, its start. The message names the quantizer or
                the parameter.
        """
        handle: RemovableHandle = optimizer.register_step_pre_hook(self._check_step)
        self._keep(handle)
        return handle

    def _check_step(self, optimizer: Optimizer, *_: object) -> None:
        if not running().compiled:
            self._diagnosis.check_step(optimizer, self.steps)

    # ---- life

    def close(self) -> None:
        """Remove all hooks from the model and the optimizers. The statistics can still be read."""
        self._hooks.close()
        self._diagnosis.forget()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keep(self, handle: RemovableHandle) -> None:
        self._hooks.callback(handle.remove)

    # ---- steps

    def _sample(self) -> None:
        """Start recording calls. Compiled code does not call hooks, so it runs in eager mode."""
        self._sampling.enter_context(_Uncompiled())
        for recorder in self._recorders:
            handle = recorder.quantizer.register_forward_hook(Hook(recorder.hear))
            self._sampling.callback(handle.remove)

    @property
    def _sampled_now(self) -> bool:
        return self.steps % self.every == 0

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        if self._sampled_now and self._is_of_model(optimizer):
            for recorder in self._recorders:
                recorder.take_scale_gradient(_loss_scale(optimizer))

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        if not self._is_of_model(optimizer):
            return
        self._diagnosis.forget()  # or a forward that no hook has seen would seem to have an earlier step's inputs
        self.sampled += self._sampled_now
        if self._sampled_now and self._writer is not None:
            for recorder in self._recorders:  # the next sampled step is written by itself
                write(self._writer, recorder.read(), recorder.quantizer, self.steps)
                recorder.reset()
        self.steps += 1
        self._sampling.close()
        if self._sampled_now:
            self._sample()

    def _is_of_model(self, optimizer: Optimizer) -> bool:
        return any(id(p) in self._parameters for group in optimizer.param_groups for p in group["params"])


def _loss_scale(optimizer: Optimizer) -> Tensor | None:
    """Return the GradScaler's factor by which a fused optimizer divides the gradients; NaN if it skips the step."""
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is None:
        return None
    factor = getattr(optimizer, "grad_scale", None)
    return torch.where(found_inf > 0, torch.nan, 1.0 if factor is None else factor)


class _Uncompiled(AbstractContextManager[None]):
    """Run compiled code in eager mode while at least one watch of this process samples."""

    count = 0
    stance: AbstractContextManager[object]

    def __enter__(self) -> None:
        if not _Uncompiled.count:
            _Uncompiled.stance = torch.compiler.set_stance("force_eager")
        _Uncompiled.count += 1

    def __exit__(self, *_: object) -> None:
        _Uncompiled.count -= 1
        if not _Uncompiled.count:
            _Uncompiled.stance.__exit__(None, None, None)


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that calls a method of a watch while the watch exists, except during compilation."""
    reference = weakref.WeakMethod(method)

    def call(*args: object) -> None:
        found = reference()
        if found is not None and not running().compiled:
            found(*args)

    return call


def watch(model: nn.Module, every: int = 20, writer: SummaryWriter | None = None) -> Watch:
    """Watch the quantizers of a model during training.

    In one of `every` steps, forward hooks record for each quantizer: the range of the values, the share of clipped values, the
    share of the grid's integers that occur, and the norms of the gradients. The statistics stay on the device; only reading
    synchronizes. A step is an optimizer step of the model, with all training-mode forwards before it. Recomputation by gradient
    checkpointing is not counted again. Between sampled steps the quantizers have no hooks.

    - torch.compile: sampled steps run in eager mode. Steps of a compiled optimizer are not counted. Watch the compiled model,
      not the original module, so that errors also name the quantizer in steps that are not sampled.
    - GradScaler: gradients of tensors in the table are multiplied by its scale. Gradients of learned scales are shown as the
      optimizer gets them.
    - DistributedDataParallel: each process sees only its own part of the data.
    - Embedding tables with sparse gradients are not recorded.

    Args:
        model: A prepared or replaced model, or a model that contains it, optionally compiled or in DistributedDataParallel.
        every: Every n-th step is sampled, starting with the first.
        writer: A `torch.utils.tensorboard.SummaryWriter`, or an object with its add_scalar and add_histogram. At the end of
            each sampled step it gets, for each quantizer, the range of the values, the range of the grid, the share of clipped
            values, and the scale after the step (several scales as a histogram). The table then covers the time since that
            step. Keep a reference to the returned Watch: writing stops when it is garbage collected.

    Returns:
        A Watch, which can be printed at any time, with `rows()`, `to_dict()`, `reset()` and `close()`; it is also a context
        manager. `check(loss)` and `guard(optimizer)` raise an error for NaN and lost scales before an optimizer spreads them.
        For these, the watch keeps the inputs of the model's latest forward until the step.

    Raises:
        TypeError: `model` is not a module, `every` is not a whole number, or `writer` lacks a method.
        ValueError: The model has no trainable quantizers, or `every` is not positive.

    Example:
        >>> prepared = qt.prepare(torch.nn.Sequential(torch.nn.Linear(4, 2)), backend="tensorrt").train()
        >>> _ = qt.calibrate(prepared, [torch.linspace(-1, 1, 8).reshape(2, 4)], progress=False)
        >>> optimizer = torch.optim.SGD(prepared.parameters(), lr=0.1)
        >>> with qt.debug.watch(prepared) as seen:
        ...     handle = seen.guard(optimizer)
        ...     loss = prepared(torch.linspace(-2, 2, 8).reshape(2, 4)).square().sum()
        ...     seen.check(loss)
        ...     loss.backward()
        ...     optimizer.step()
        >>> row = seen.rows()[0]
        >>> row.name, row.lowest, row.highest, row.clipped, row.nonfinite
        ('activation_quantizers.input_1', -2.0, 2.0, 0.5, 0)
    """
    check_module(model, "watch")
    refuse_foreign_quantizers(model, "watch")
    check_whole("watch", "every", every, 1)
    if not quantizers_of(model):
        raise ValueError(
            f"watch: this {type(model).__name__} has no trainable quantizer; pass the result of qtoolkit.prepare or "
            "qtoolkit.quant_modules.replace."
        )
    check_writer(writer)
    return Watch(model, every, writer)


def _cells(row: Activity) -> tuple[str, ...]:
    return (
        row.name,
        row.spec,
        str(row.calls),
        _range(row.lowest, row.highest),
        _range(row.grid_lowest, row.grid_highest),
        _cell(row.clipped, lambda share: f"{100 * share:.2f} %"),
        _cell(row.levels, lambda share: f"{100 * share:.1f} %"),
        _cell(row.gradient, lambda norm: f"{norm:.3g}"),
        _cell(row.scale_gradient, lambda norm: f"{norm:.3g}"),
        str(row.nonfinite or "-"),
    )


def _range(low: float | None, high: float | None) -> str:
    return "-" if low is None else f"[{low:.4g}, {high:.4g}]"


def _cell(value: float | None, text: Callable[[float], str]) -> str:
    return "-" if value is None else text(value)
