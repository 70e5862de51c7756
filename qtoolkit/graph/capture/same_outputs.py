"""Compare the outputs of a traced graph with the model's: Python may have decided by values that no trace sees."""

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn

from qtoolkit.errors import first_line, some
from qtoolkit.graph.capture.assignments import Change, StateError, state_kept
from qtoolkit.graph.capture.untraceable import WITHOUT_TRACING, UntraceableError, untraceable
from qtoolkit.model_inputs import clone_tensors, split, tensors_of
from qtoolkit.model_state import RandomState, evaluating, random_state_kept

# The graph has the ops of forward in their order, so that only kernels without a fixed order of sums differ at all.
TOLERANCE = 1e-3  # of the norm of an output, or of the number of its elements


class Expected:
    """The results of a model for example inputs in its own mode and in eval mode, before its graph is made.

    These are its outputs, and its buffers after the forward. Its state does not change. With `of_own_mode` it is not
    run in eval mode, unless that is its own. Raises UntraceableError: the result of a forward depends on what an
    earlier forward has assigned, outside of the modules `called`, which a graph calls.
    """

    def __init__(
        self,
        model: nn.Module,
        example_inputs: object,
        concrete_args: Mapping[str, object],
        of_own_mode: bool,
        called: Collection[nn.Module],
    ) -> None:
        self.name, self.random = type(model).__name__, RandomState.now()
        self.args, self.kwargs = split(example_inputs)
        given, trains = {**concrete_args, **self.kwargs}, any(module.training for module in model.modules())
        self.computed: dict[bool, ComputedOutputs] = {}
        for evaluates in (True, False) if trains else (True,):
            # The run of the prepared model reports what forward raises in eval mode; training mode may refuse such inputs.
            with suppress(Exception):
                if not (evaluates and trains and of_own_mode):
                    self.computed[evaluates] = self._run(model, given, evaluates)
        parts = {part for module in called for part in module.modules()}
        for first in self.computed.values():
            assigned = [
                each for each in first.assigned if each.space.module is None or each.space.module[1] not in parts
            ]
            for evaluates in self.computed if assigned else ():
                self._check_state(model, given, evaluates, assigned)

    def _check_state(
        self, model: nn.Module, given: Mapping[str, object], evaluates: bool, assigned: Sequence[Change]
    ) -> None:
        """Raise UntraceableError if the model computes something else where an earlier forward has assigned this."""

        def is_read(changes: Sequence[Change]) -> bool:
            try:
                outputs = self._run(model, given, evaluates, changes).outputs
            except Exception:  # of the user's forward
                return True
            return bool(_difference(outputs, self.computed[evaluates].outputs))

        if is_read(assigned):
            while len(assigned) > 1:
                half = assigned[: len(assigned) // 2]
                assigned = half if is_read(half) else assigned[len(half) :]
            raise untraceable(StateError(*assigned[0][:2]), model)

    def check(self, traced: fx.GraphModule) -> None:
        """Raise UntraceableError if a graph computes anything else. A model that does not run is not compared."""
        for evaluates, expected in self.computed.items():
            difference = self._difference_of(traced, expected, evaluates)
            if difference:
                mode = "" if evaluates else ", in training mode"
                raise UntraceableError(
                    f"prepare: cannot trace {self.name}: for the example inputs its graph {difference}{mode}. Its forward "
                    f"decides in Python by something that a trace does not see. Remedies: let each branch depend on arguments "
                    f"and on sizes alone; make the submodule that decides a leaf module with untraced=[...]; {WITHOUT_TRACING}."
                )

    def _difference_of(self, traced: fx.GraphModule, expected: "ComputedOutputs", evaluates: bool) -> str:
        """Return in words how a graph computes; "" where it computes as expected."""
        try:
            found = self._run(traced, self.kwargs, evaluates)
        except Exception as error:
            return f"fails ({type(error).__name__}: {first_line(error)})"
        differs = _difference(found.outputs, expected.outputs)
        if differs or evaluates:
            return differs
        common = found.buffers.keys() & expected.buffers.keys()
        far = [name for name in sorted(common) if _difference([found.buffers[name]], [expected.buffers[name]])]
        return f"leaves other values than the model in {some(list(map(repr, far)))}" if far else ""

    def _run(
        self, model: nn.Module, kwargs: Mapping[str, object], evaluates: bool, assigned: Sequence[Change] = ()
    ) -> "ComputedOutputs":
        """Run a model, perhaps after a forward that has assigned something."""
        with (
            torch.no_grad(),
            random_state_kept(model),
            state_kept(model) as state,
            evaluating(model) if evaluates else nullcontext(),
            without_fast_path(),
            warnings.catch_warnings(action="ignore"),
        ):
            for change in assigned:
                change.make()
            args, kwargs = clone_tensors((self.args, dict(kwargs)))  # a forward may change its inputs in place
            self.random.restore()
            for device in {p.device.index for p in model.parameters() if p.is_cuda}:
                torch.cuda.default_generators[device].manual_seed(0)
            outputs = [tensor.clone() for tensor in tensors_of(model(*args, **kwargs))]
            statistics = {name: b.clone() for name, b in model.named_buffers() if b.is_floating_point()}
        return ComputedOutputs(outputs, statistics, state.assigned)


class ComputedOutputs(NamedTuple):
    """The results of a run of a model."""

    outputs: list[Tensor]
    # of floating-point numbers; a batch norm of torch may count batches that the model does not
    buffers: dict[str, Tensor]
    assigned: Sequence[Change]


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Run torch's transformers in a block as in training: their fused kernels return NaN for a query without keys."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _difference(found: list[Tensor], expected: list[Tensor]) -> str:
    """Return in words how outputs differ; "" where they do not."""
    if len(found) != len(expected):
        return f"returns {len(found)} tensors, and the model {len(expected)}"
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        if a.shape != b.shape:
            return f"returns the shape {tuple(a.shape)} in output {i}, and the model {tuple(b.shape)}"
        if not (a.is_meta or b.is_meta) and _is_far(a, b):
            return f"computes other values than the model in output {i}"
    return ""


def _is_far(a: Tensor, b: Tensor) -> bool:
    if b.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if not b.is_floating_point():
        return int((a != b).sum()) > TOLERANCE * b.numel()
    a, b = (torch.nan_to_num(x.double(), posinf=0, neginf=0) for x in (a, b))
    return bool((a - b).norm() > TOLERANCE * b.norm())
