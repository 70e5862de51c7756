"""Find the origin of NaN, infinities or lost scales: checks before an optimizer step, and a second run of forward."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from qtoolkit.debug.activity import values_of
from qtoolkit.model_state import random_state_kept, unchanged_on_error
from qtoolkit.processes import is_sharded
from qtoolkit.quantizers.first_steps import FAR, warn_of_growth
from qtoolkit.quantizers.switches import stop_on_nonfinite
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer, quantizers_of
from qtoolkit.running import running

LOST = 24.0  # log2 of the factor to its start at which a scale represents nothing but zero, or clips everything
REMEDY = "Lower the learning rate, or clip the gradients (torch.nn.utils.clip_grad_norm_)"


class _NothingFound(Exception):  # noqa: N818 (not an error: it undoes a run)
    pass


class Diagnosis:
    """Checks of a model in training, with the inputs of its latest forward.

    `model` is the model itself, without wrappers of torch.compile or DistributedDataParallel.
    """

    def __init__(self, model: nn.Module, before_second_run: Callable[[], None]) -> None:
        self.model, self.before_second_run = model, before_second_run
        self.learned = {name: q for name, q in quantizers_of(model).items() if list(q.parameters())}
        scales = {id(p) for quantizer in self.learned.values() for p in quantizer.parameters()}
        named = sorted(model.named_parameters(), key=lambda pair: id(pair[1]) not in scales)  # layers' parameters last
        self.names = {id(parameter): name for name, parameter in named}
        self.forget()

    def forget(self) -> None:
        """Release the inputs."""
        self._call: tuple[tuple[object, ...], dict[str, object], list[torch.autocast]] | None = None

    def remember(self, model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Forward pre-hook: keep the inputs."""
        if model.training and not running().recomputes:
            self._call = args, kwargs, list(_autocasts(self.model))

    # ---- checks

    def check_loss(self, loss: Tensor, step: int) -> None:
        """Raise RuntimeError if a loss is not finite."""
        value = float(loss.detach().sum())
        if not math.isfinite(value):
            raise RuntimeError(
                f"watch: the loss is {value} after {step} steps. {self._origin_in_forward()} {REMEDY}, and resume from the "
                "state before this step."
            )

    def check_step(self, optimizer: Optimizer, step: int) -> None:
        """Raise RuntimeError for non-finite gradients and lost scales; warn once for each scale far from its start."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if getattr(optimizer, "found_inf", None) is not None:
            parameters = []  # under a GradScaler, which lets a fused optimizer skip the step itself
        gradients = [values_of(p.grad) for p in parameters]
        scales = [values_of(p.detach()) for quantizer in self.learned.values() for p in quantizer.parameters()]
        growths = [growth for growth in map(_growth, self.learned.values()) if growth is not None and growth.numel()]
        good = torch.isfinite(get_total_norm([*gradients, *scales]))
        near = torch.ones_like(good)
        if growths:
            farthest = torch.cat([g.to(good.device) for g in growths]).log2().abs().amax()
            good, near = good & (farthest < LOST), farthest <= math.log2(FAR)
        found = int(good.long() + (good & near))  # one wait for both
        if found == 1:
            warn_of_growth(list(self.learned.values()))
        if found:
            return
        for name, quantizer in self.learned.items():
            self._check_scale(name, quantizer, step)
        broken = {id(p) for p in parameters if not torch.isfinite(values_of(p.grad)).all()}
        if not broken:  # the norm overflows, and no gradient does
            return
        bad = [name for key, name in self.names.items() if key in broken] or ["a parameter of another model"]
        raise RuntimeError(
            f"watch: the gradient of {bad[-1]!r} is not finite after {step} steps, like the gradients of {len(bad) - 1} other "
            f"parameters (of {len(parameters)}). {self._origin_in_forward(bad)} The optimizer has changed nothing in this "
            f"step. {REMEDY}; in float16, use torch.amp.GradScaler."
        )

    def _check_scale(self, name: str, quantizer: TensorQuantizer, step: int) -> None:
        growth = _growth(quantizer)
        if growth is None:
            lost = ~torch.cat([torch.isfinite(values_of(p.detach())).flatten() for p in quantizer.parameters()])
        else:
            lost = ~(growth.log2().abs() < LOST)
        if bool(lost.any()):
            found = "a value that is not finite" if growth is None else f"{float(growth[lost][0]):.3g} times its start"
            raise RuntimeError(
                f"watch: the learned scale of quantizer {name!r} has become {found} ({int(lost.sum())} of {lost.numel()} "
                f"values), after {step} steps. The optimizer has changed nothing in this step. Resume from an earlier state "
                "with a lower learning rate for the scales (scale_lr of qtoolkit.parameter_groups)."
            )

    # ---- where it starts

    def _origin_in_forward(self, parameters: list[str] | None = None) -> str:
        """Return a sentence on where NaN or infinities start, from a second run of forward without side effects."""
        if self._call is None or any(map(is_sharded, self.model.parameters())):
            return "Run the model under qtoolkit.stop_on_nonfinite to find the first quantizer that gets NaN or infinities."
        found = self._run_again()
        if found is not None:
            return f"In forward, {found[:1].lower() + found[1:]}"
        if parameters:
            return (
                "In forward all quantizers get finite values, so the error starts in backward, between the loss and "
                f"{parameters[-1]!r}, the last of these parameters."
            )
        return "In forward all quantizers get finite values: the error starts after the last one, or in the loss."

    def _run_again(self) -> str | None:
        """Return the error of the first quantizer that gets NaN or infinity in a second run, or None."""
        args, kwargs, autocasts = self._call or ((), {}, [])
        self.before_second_run()
        eager, random = torch.compiler.set_stance("force_eager"), random_state_kept(self.model)
        with ExitStack() as stack:
            for context in (eager, random, torch.no_grad(), *autocasts):
                stack.enter_context(context)
            try:
                with unchanged_on_error(self.model), stop_on_nonfinite(self.model):
                    self.model(*args, **kwargs)
                    raise _NothingFound
            except _NothingFound:
                return None
            except Exception as error:
                return str(error)


def _growth(quantizer: TensorQuantizer) -> Tensor | None:
    growth = quantizer.kind.growth(quantizer)
    return None if growth is None else values_of(growth).flatten()


def _autocasts(model: nn.Module) -> Iterator[torch.autocast]:
    """Yield an autocast context for each device type of the model on which autocast is enabled."""
    for kind in {parameter.device.type for parameter in model.parameters()} - {"meta"}:
        if torch.is_autocast_enabled(kind):
            yield torch.autocast(kind, torch.get_autocast_dtype(kind))
