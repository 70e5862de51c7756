"""Switch all quantizers of a model on, off, or to observing."""

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Literal, Self, get_args

from torch import nn

from qtoolkit.errors import check_known, check_module
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.quantizers.quantizer import Quantizer, named_quantizers
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer

Which = Literal["all", "weights", "activations"]


class _Switch(AbstractContextManager["_Switch"]):
    """Set the state of a model's quantizers, permanently with apply(), or for a `with` block.

    Args:
        model: A prepared, replaced or converted model, a submodule, or a quantizer.
        which: "all", "weights" or "activations".

    Raises:
        ValueError: `which` is unknown, or the model is converted and cannot observe.
    """

    observing: bool | None = None
    quantizing: bool | None = None

    def __init__(self, model: nn.Module, which: Which = "all") -> None:
        check_module(model, type(self).__name__)
        check_known(f"which of {type(self).__name__}:", which, get_args(Which))
        self.quantizers = _chosen(model, which)
        self.before: list[list[tuple[bool, bool]]] = []
        if self.observing and any(isinstance(quantizer, Grid) for quantizer in self.quantizers):
            raise ValueError(
                f"{type(self).__name__}: a converted model has fixed scales and observes no ranges; pass the prepared one."
            )

    def apply(self) -> None:
        """Set the state permanently."""
        for quantizer in self.quantizers:
            if self.observing is not None and isinstance(quantizer, TensorQuantizer):
                quantizer.observing = self.observing
            if self.quantizing is not None:
                quantizer.quantizing = self.quantizing

    def __enter__(self) -> Self:
        self.before.append([_state(quantizer) for quantizer in self.quantizers])
        self.apply()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for quantizer, (observing, quantizing) in zip(self.quantizers, self.before.pop(), strict=True):
            quantizer.quantizing = quantizing
            if isinstance(quantizer, TensorQuantizer):
                quantizer.observing = observing


def _state(quantizer: Quantizer) -> tuple[bool, bool]:
    return isinstance(quantizer, TensorQuantizer) and quantizer.observing, quantizer.quantizing


def _chosen(model: nn.Module, which: Which) -> list[Quantizer]:
    found = named_quantizers(model).values()
    return [quantizer for quantizer in found if which == "all" or quantizer.of_weight == (which == "weights")]


class disable_quantization(_Switch):  # noqa: N801 (used like torch.no_grad)
    """Turn quantizers off, for a `with` block or, with apply(), permanently.

    A converted model with all quantizers off computes what the float model with folded batch norms computes.

    Example:
        >>> quantizer = qt.TensorQuantizer(qt.QuantSpec())
        >>> with qt.disable_quantization(quantizer):
        ...     quantizer(torch.tensor(0.3))
        tensor(0.3000)
    """

    quantizing = False


class enable_quantization(_Switch):  # noqa: N801
    """Turn quantizers on, for a `with` block or, with apply(), permanently."""

    quantizing = True


class calibrating(_Switch):  # noqa: N801
    """Observe ranges without quantizing, for a `with` block or, with apply(), permanently."""

    observing = True
    quantizing = False
