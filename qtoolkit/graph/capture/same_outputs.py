"""Compare what a traced graph computes with what the model's forward does: Python may have decided by what no trace sees."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from qtoolkit.errors import first_line
from qtoolkit.graph.capture.untraceable import WITHOUT_TRACING, UntraceableError
from qtoolkit.model_inputs import split, tensors_of
from qtoolkit.model_state import RandomState, evaluating, values_kept

# The graph has the ops of forward in their order, so that only kernels without a fixed order of sums differ at all.
TOLERANCE = 1e-3  # of the norm of an output, or of the number of its elements


class Expected:
    """What a model returns for example inputs in eval mode, before its graph is made; its state does not change."""

    def __init__(self, model: nn.Module, example_inputs: Any, concrete_args: Mapping[str, Any]) -> None:
        self.name, self.random = type(model).__name__, RandomState.now()
        self.args, self.kwargs = split(example_inputs)
        self.outputs: list[Tensor] | None = None
        with suppress(Exception):  # the run of the prepared model reports what forward raises
            self.outputs = self._run(model, {**concrete_args, **self.kwargs})

    def check(self, traced: fx.GraphModule) -> None:
        """Raise UntraceableError if a graph returns anything else. A model that does not run is not compared."""
        difference = "" if self.outputs is None else self._difference_of(traced, self.outputs)
        if difference:
            raise UntraceableError(
                f"prepare: cannot trace {self.name}: for the example inputs its graph {difference}. Its forward decides in "
                f"Python by something that a trace does not see. Remedies: let each branch depend on arguments and on sizes "
                f"alone; make the submodule that decides a leaf module with untraced=[...]; {WITHOUT_TRACING}."
            )

    def _difference_of(self, traced: fx.GraphModule, expected: list[Tensor]) -> str:
        """Return in words how the outputs of a graph differ; "" where they do not."""
        try:
            return _difference(self._run(traced, self.kwargs), expected)
        except Exception as error:
            return f"fails ({type(error).__name__}: {first_line(error)})"

    def _run(self, model: nn.Module, kwargs: Mapping[str, Any]) -> list[Tensor]:
        args, kwargs = tree_map(_cloned, (self.args, dict(kwargs)))  # a forward may change its inputs in place
        self.random.restore()
        try:
            with torch.no_grad(), evaluating(model), values_kept([*model.buffers()]), _without_fast_path():
                return [tensor.clone() for tensor in tensors_of(model(*args, **kwargs))]
        finally:
            self.random.restore()


@contextmanager
def _without_fast_path() -> Iterator[None]:
    """Run torch's transformers in a block as in training: their fused kernels return NaN for a query without keys."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _cloned(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


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
