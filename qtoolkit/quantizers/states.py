"""The states of a TensorQuantizer: the behavior of its range in a forward. docs/design/quantizer.md has the diagram.

A state has no data: the spec, two switches and the count of steps say which one it is (see `TensorQuantizer.state`).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qtoolkit import ops
from qtoolkit.quantizers.checks import check_not_recomputing, check_not_transformed, check_type
from qtoolkit.quantizers.first_steps import FOLLOWED_STEPS
from qtoolkit.quantizers.step_clock import CLOCK
from qtoolkit.running import Run

if TYPE_CHECKING:
    from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer

RangeOf = Callable[[], Tensor] | None


class Frozen:
    """The range stays."""

    def forward(self, run: Run, quantizer: "TensorQuantizer", x: Tensor, range_of: RangeOf) -> Tensor:
        """Return x, quantized if `quantizing`. The other arguments are `TensorQuantizer.forward`'s."""
        return quantizer.quantize(x) if quantizer.quantizing else x


class Learned(Frozen):
    """The optimizer trains the range: its parameters get gradients by the op that quantizes."""


class Calibrating(Frozen):
    """Each forward observes its input. With `quantizing`, the range is set from all observations, and quantizes."""

    def forward(self, run: Run, quantizer: "TensorQuantizer", x: Tensor, range_of: RangeOf) -> Tensor:
        check_not_recomputing(run, quantizer.name)
        check_not_transformed(run, quantizer.name)
        check_type(quantizer, x)
        quantizer.fit_channels(x)
        if quantizer.quantizing:
            return quantizer.kind.observe_and_quantize(quantizer, x)
        quantizer.observer(x)
        return x


class FollowsWeight(Frozen):
    """Each forward that quantizes takes the range of the weight, as it then is."""

    def forward(self, run: Run, quantizer: "TensorQuantizer", x: Tensor, range_of: RangeOf) -> Tensor:
        if not (quantizer.quantizing and quantizer.takes_range(run)):
            return super().forward(run, quantizer, x, range_of)
        check_not_transformed(run, quantizer.name)
        followed = x if range_of is None else range_of()
        if followed is x:
            return quantizer.kind.follow_and_quantize(quantizer, x)
        quantizer.follow(followed)
        return quantizer.quantize(x)


class FollowsData(Frozen):
    """In the first steps of a training, each forward takes its input into the range.

    The scale changes at the first forward of a step, so that all forwards of a step, and the ones that gradient
    checkpointing runs again in backward, have one scale. If an optimizer steps between a forward and its recomputation,
    the recomputation has the scale of the forward, too, since it begins no step.
    """

    def forward(self, run: Run, quantizer: "TensorQuantizer", x: Tensor, range_of: RangeOf) -> Tensor:
        # Not only with gradients: reentrant checkpointing computes the first forward without them.
        if quantizer.training and not run.recomputes:
            if quantizer.quantizing:
                check_not_transformed(run, quantizer.name)
            if not run.transformed:  # a transform stores nothing
                self.begin_step(quantizer)
            quantizer.kind.average(quantizer, x)
        return super().forward(run, quantizer, x, range_of)

    @torch.no_grad()
    def begin_step(self, quantizer: "TensorQuantizer") -> None:
        """Count a step if the clock has moved since the last forward, and take the range that the steps before have found."""
        count = quantizer.count_of_steps
        if count is None:
            return
        (lo, hi), spec = quantizer.observer.range(), quantizer.spec
        grid, clock = (quantizer._scale, quantizer._zero_point), CLOCK.on(count.device)
        ops.take_range_(lo, hi, *grid, count, clock, spec.qmin, spec.qmax, FOLLOWED_STEPS, spec.pow2_scale)


FROZEN, LEARNED, CALIBRATING = Frozen(), Learned(), Calibrating()
FOLLOWS_WEIGHT, FOLLOWS_DATA = FollowsWeight(), FollowsData()
State = Frozen
