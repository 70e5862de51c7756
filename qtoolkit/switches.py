"""Switches over all quantizers of a model: on, off, observing."""

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from torch import nn

from qtoolkit.quantizer import quantizers_of


class _Switch(AbstractContextManager["_Switch"]):
    """Set the state of all quantizers of a model or submodule: for good with apply(), or for a `with` block."""

    observing: bool | None = None
    quantizing: bool | None = None

    def __init__(self, model: nn.Module) -> None:
        self.quantizers = list(quantizers_of(model).values())
        self.before: list[list[tuple[bool, bool]]] = []

    def apply(self) -> None:
        """Set the state for good."""
        for quantizer in self.quantizers:
            if self.observing is not None:
                quantizer.observing = self.observing
            if self.quantizing is not None:
                quantizer.quantizing = self.quantizing

    def __enter__(self) -> Self:
        self.before.append([(q.observing, q.quantizing) for q in self.quantizers])
        self.apply()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for quantizer, state in zip(self.quantizers, self.before.pop(), strict=True):
            quantizer.observing, quantizer.quantizing = state


class disable_quantization(_Switch):  # noqa: N801 (used like torch.no_grad)
    """Pass tensors through all quantizers, in a `with` block or, with apply(), from now on.

    Example:
        >>> quantizer = qt.TensorQuantizer(qt.QuantSpec())
        >>> with qt.disable_quantization(quantizer):
        ...     quantizer(torch.tensor(0.3))
        tensor(0.3000)
    """

    quantizing = False


class enable_quantization(_Switch):  # noqa: N801
    """Quantize with all quantizers, in a `with` block or, with apply(), from now on."""

    quantizing = True


class calibrating(_Switch):  # noqa: N801
    """Observe ranges and do not quantize, in a `with` block or, with apply(), from now on."""

    observing = True
    quantizing = False
