"""Switch all quantizers of a model on, off, or to observing."""

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Literal, Self, get_args

from torch import nn

from qtoolkit.errors import check_known
from qtoolkit.model_state import check_module
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
    following: bool | None = None
    stopping: bool | None = None

    def __init__(self, model: nn.Module, which: Which = "all") -> None:
        check_module(model, type(self).__name__)
        check_known(f"which of {type(self).__name__}:", which, get_args(Which))
        self.quantizers = _chosen(model, which)
        self.before: list[list[_State]] = []
        if self.observing and any(isinstance(quantizer, Grid) for quantizer in self.quantizers):
            raise ValueError(
                f"{type(self).__name__}: a converted model has fixed scales and observes no ranges; pass the prepared one."
            )

    def apply(self) -> None:
        """Set the state permanently."""
        wanted = (self.observing, self.quantizing, self.following, self.stopping)
        for quantizer in self.quantizers:
            state = zip(wanted, _state(quantizer), strict=True)
            _set_state(quantizer, *(now if new is None else new for new, now in state))

    def __enter__(self) -> Self:
        self.before.append([_state(quantizer) for quantizer in self.quantizers])
        self.apply()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for quantizer, state in zip(self.quantizers, self.before.pop(), strict=True):
            _set_state(quantizer, *state)


_State = tuple[bool, bool, bool, bool]  # observing, quantizing, following, stopping


def _state(quantizer: Quantizer) -> _State:
    if isinstance(quantizer, TensorQuantizer):
        return quantizer.observing, quantizer.quantizing, quantizer.following, quantizer.stopping
    return False, quantizer.quantizing, False, False


def _set_state(quantizer: Quantizer, observing: bool, quantizing: bool, following: bool, stopping: bool) -> None:
    quantizer.quantizing = quantizing
    if isinstance(quantizer, TensorQuantizer):
        quantizer.observing, quantizer.following, quantizer.stopping = observing, following, stopping


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


class freeze_ranges(_Switch):  # noqa: N801
    """Keep ranges as they are, for a `with` block or, with apply(), permanently; learned scales still train.

    By default the range of a weight with a fixed scale follows the weight in training, and the range of an activation follows
    the data in the first 200 steps. After `freeze_ranges(model).apply()` no range moves, as in the last epochs of a schedule
    that fixes the grid. A quantizer follows again once its attribute `following` is True.

    Example:
        >>> prepared = qt.prepare(torch.nn.Sequential(torch.nn.Linear(4, 2)), backend="onnxruntime").train()
        >>> quantizer = prepared.get_submodule("0.weight_quantizer")
        >>> with torch.no_grad(), qt.freeze_ranges(prepared, "weights"):
        ...     quantizer(torch.full((2, 4), 127.0)).max() == quantizer.amax.max()
        tensor(True)
        >>> with torch.no_grad():
        ...     quantizer(torch.full((2, 4), 127.0)).max()
        tensor(127.)
    """

    observing = False
    following = False


class stop_on_nonfinite(_Switch):  # noqa: N801
    """Raise ValueError where a quantizer gets NaN or infinities, for a `with` block or, with apply(), permanently.

    By default a forward goes on: a range that moves leaves out what is not finite, and counts it in `observer.skipped`. With
    this switch the first quantizer on the way names itself. Each quantizer then reads its input once more and waits for the
    device.

    Example:
        >>> prepared = qt.prepare(torch.nn.Sequential(torch.nn.Linear(4, 2)))
        >>> _ = qt.calibrate(prepared, [torch.rand(8, 4)], progress=False)
        >>> with qt.stop_on_nonfinite(prepared):
        ...     prepared(torch.full((1, 4), torch.nan))
        Traceback (most recent call last):
        ...
        ValueError: quantizer 'activation_quantizers.input_1' got NaN or infinities: the layer before it returns them, ...
    """

    stopping = True
