"""Switch all quantizers of a model on, off, or to observing."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import ClassVar, Literal, Self, get_args

from torch import nn

from qtoolkit.errors import check_known
from qtoolkit.model_state import check_module
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.quantizers.quantizer import Quantizer, named_quantizers
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer

Which = Literal["all", "weights", "activations"]
_State = Mapping[str, bool]  # attributes of a quantizer


class Switch(AbstractContextManager["Switch"]):
    """Set the state of a model's quantizers, when it is called. As a context manager it restores the state after the block.

    A subclass says what it sets: `SETS` are attributes of quantizers, with their values. The rest of the state is not changed,
    neither at once nor after the block.

    Args:
        model: A prepared, replaced or converted model, a submodule, or a quantizer.
        which: "all", "weights" or "activations".

    Raises:
        ValueError: `which` is unknown, or the model is converted and cannot observe.
    """

    SETS: ClassVar[_State] = {}

    def __init__(self, model: nn.Module, which: Which = "all") -> None:
        model = check_module(model, type(self).__name__)
        check_known(f"which of {type(self).__name__}:", which, get_args(Which))
        found = named_quantizers(model)
        self.quantizers = {n: q for n, q in found.items() if which == "all" or q.of_weight == (which == "weights")}
        if self.SETS.get("observing") and any(isinstance(quantizer, Grid) for quantizer in self.quantizers.values()):
            raise ValueError(
                f"{type(self).__name__}: a converted model has fixed scales and observes no ranges; pass the prepared one."
            )
        self._before = [self._state()]  # of the blocks that the object is in or, before its first, of the call
        self._entered = 0
        self._set()

    def apply(self) -> None:
        """Set the state permanently: a later block of this object restores this state."""
        self._set()
        if not self._entered:
            self._before.clear()

    def __enter__(self) -> Self:
        if len(self._before) == self._entered:
            self._before.append(self._state())
        self._entered += 1
        self._set()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered -= 1
        for quantizer, state in zip(self.quantizers.values(), self._before.pop(), strict=True):
            _update(quantizer, state)

    def _set(self) -> None:
        for quantizer in self.quantizers.values():
            _update(quantizer, self.SETS)

    def _state(self) -> list[_State]:
        return [{name: getattr(quantizer, name, False) for name in self.SETS} for quantizer in self.quantizers.values()]


def _update(quantizer: Quantizer, state: _State) -> None:
    for name, value in state.items():
        if name == "quantizing" or isinstance(quantizer, TensorQuantizer):  # the others have no range that moves
            setattr(quantizer, name, value)


class disable_quantization(Switch):  # noqa: N801 (used like torch.no_grad)
    """Disable quantizers: from the call on, as `torch.set_grad_enabled` does, or only inside a `with` block.

    A converted model with all quantizers off computes what the float model with folded batch norms computes.

    Example:
        >>> quantizer = qt.TensorQuantizer(qt.QuantSpec())
        >>> with qt.disable_quantization(quantizer):
        ...     quantizer(torch.tensor(0.3))
        tensor(0.3000)
        >>> _ = qt.disable_quantization(quantizer)
        >>> quantizer.quantizing
        False
    """

    SETS = {"quantizing": False}


class enable_quantization(Switch):  # noqa: N801
    """Enable quantizers: from the call on, or only inside a `with` block.

    Example:
        >>> prepared = qt.prepare(torch.nn.Sequential(torch.nn.Linear(4, 2)), backend="tensorrt")
        >>> _ = qt.disable_quantization(prepared)
        >>> with qt.enable_quantization(prepared):
        ...     print(prepared.get_submodule("0.weight_quantizer").quantizing)
        True
        >>> prepared.get_submodule("0.weight_quantizer").quantizing
        False
    """

    SETS = {"quantizing": True}


class observe_ranges(Switch):  # noqa: N801
    """Observe ranges without quantizing, and load none of them (`qtoolkit.calibrating` does)."""

    SETS = {"observing": True, "quantizing": False}


class freeze_ranges(Switch):  # noqa: N801
    """Freeze ranges: from the call on, or only inside a `with` block. Learned scales still train.

    By default the range of a weight with a fixed scale follows the weight, and in training the range of an activation follows
    the data in the first 200 steps. After `freeze_ranges(model)` no range moves, as in the last epochs of a schedule that
    fixes the grid. A quantizer follows again once its attribute `following` is True.

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

    SETS = {"observing": False, "following": False}


class stop_on_nonfinite(Switch):  # noqa: N801
    """Raise ValueError where a quantizer gets NaN or infinities: from the call on, or only inside a `with` block.

    By default the forward continues: ranges ignore values that are not finite, and count them in `observer.skipped`. With
    this switch, the first quantizer that gets one raises an error with its name. Each quantizer then reads its input
    once more and waits for the device.

    Example:
        >>> prepared = qt.prepare(torch.nn.Sequential(torch.nn.Linear(4, 2)), backend="tensorrt")
        >>> _ = qt.calibrate(prepared, [torch.rand(8, 4)], progress=False)
        >>> with qt.stop_on_nonfinite(prepared):
        ...     prepared(torch.full((1, 4), torch.nan))
        Traceback (most recent call last):
        ...
        ValueError: quantizer 'activation_quantizers.input_1' got NaN or infinities: the layer before it returns them, ...
    """

    SETS = {"stopping": True}
