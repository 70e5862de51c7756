"""TensorQuantizer: the one quantizer module of every road."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qtoolkit.config import QuantSpec
from qtoolkit.quantizers.frozen import Grid, check_scale, fake_quant
from qtoolkit.quantizers.observers import RangeObserver, grid_of_range, make_observer
from qtoolkit.quantizers.quantizer import Quantizer
from qtoolkit.quantizers.state import LoadsFloatCheckpoints

# The submodules of a prepared model for the quantizers of its graph's tensors, and of the weights that functions are given.
HOLDER, WEIGHT_HOLDER = "activation_quantizers", "weight_quantizers"


class TensorQuantizer(Quantizer, LoadsFloatCheckpoints):
    """Observe a tensor's range, quantize it, or both, with a scale that is fixed or trained.

    A new quantizer has no range: it quantizes only after it has observed (`qtoolkit.calibrate` sees to that), after
    `amax` was set, or after a state dict was loaded. The scale is kept in float32 whatever the model is cast to (a model
    cast to float64 takes it along).

    Args:
        spec: How to quantize.
        channels: Number of scales along `spec.axis` (times `group`), or the shape of the scale (`spec.scale_shape`); None
            takes it from the first input.
        group: Groups of dimension 0 (see `qtoolkit.ops`).
        name: The quantizer's name in error messages.
        of_weight: Whether it quantizes a weight.
        inserted: Whether a graph pass inserted it as a node of its own.

    Attributes:
        spec: How it quantizes.
        observing: Whether forward takes in ranges.
        quantizing: Whether forward quantizes.

    Example:
        >>> quantizer = TensorQuantizer(QuantSpec(bits=4))
        >>> quantizer.amax = 7.0
        >>> quantizer(torch.tensor([0.6, 100.0]))
        tensor([1., 7.])
    """

    _scale: Tensor
    _zero_point: Tensor | None

    def __init__(
        self,
        spec: QuantSpec,
        channels: int | tuple[int, ...] | None = None,
        group: int = 1,
        name: str = "quantizer",
        *,
        of_weight: bool = False,
        inserted: bool = False,
    ) -> None:
        super().__init__(spec, group, name, of_weight=of_weight, inserted=inserted)
        if group > 1 and spec.axis is None:
            raise ValueError(f"TensorQuantizer: group={group} needs a spec with an axis, got axis=None.")
        self.observing = False
        self.grad_factor: float | None = None
        self._sized = spec.axis is None or channels is not None
        given = (channels,) if isinstance(channels, int) else channels
        shape = () if spec.axis is None else given or (1,)
        unset = torch.full(shape, torch.nan)
        if spec.quantizer == "lsq":
            self._scale = nn.Parameter(unset)
        else:
            self.register_buffer("_scale", unset)
        self.register_buffer("_zero_point", None if spec.symmetric else torch.zeros(shape))
        self.observer = make_observer(spec, shape, group)
        self.ready = False

    # ---- the grid

    @property
    def scale(self) -> Tensor:
        """Steps between codes, positive: 0-d, or one per channel or group. Detached; NaN where there is no range yet."""
        return self._scale.detach().abs()

    @property
    def zero_point(self) -> Tensor | None:
        """Codes of zero, as floats; None where symmetric."""
        return None if self._zero_point is None else self._zero_point.detach().round()

    @property
    def amax(self) -> Tensor:
        """Largest magnitude on a symmetric grid, scale * qmax: 0-d, or one per channel."""
        return self.scale * self.spec.qmax

    @amax.setter
    def amax(self, value: Tensor | float) -> None:
        amax = torch.as_tensor(value, dtype=self._scale.dtype, device=self._scale.device)
        if bool((amax < 0).any()):
            raise ValueError(f"quantizer {self.name!r}: amax must not be negative, got {float(amax.min())}.")
        lo = -amax if self.spec.signed else torch.zeros_like(amax)
        self.set_range(lo, amax)

    def set_range(self, lo: Tensor, hi: Tensor) -> None:
        """Set the grid to cover the range [lo, hi], of one element or one per channel.

        Raises:
            ValueError: The range is not finite, or has a wrong number of elements.
        """
        scale, zero_point = grid_of_range(lo.float(), hi.float(), self.spec)
        check_scale(self.name, scale)
        if scale.numel() not in (1, self._scale.numel()):
            raise ValueError(
                f"quantizer {self.name!r}: a range must have 1 or {self._scale.numel()} elements, got {scale.numel()}."
            )
        shape = scale.shape if scale.numel() == 1 else self._scale.shape
        self._write(scale.reshape(shape), None if zero_point is None else zero_point.reshape(shape))
        self.ready = True

    def _write(self, scale: Tensor, zero_point: Tensor | None) -> None:
        with torch.no_grad():
            self._scale.copy_(scale)
            if self._zero_point is not None and zero_point is not None:
                self._zero_point.copy_(zero_point)

    def check_observed(self) -> None:
        """Check what was observed, without setting the grid from it.

        Raises:
            RuntimeError: Nothing was observed.
            ValueError: What was observed is not finite.
        """
        if not self.observer.seen():
            raise RuntimeError(f"quantizer {self.name!r} has observed nothing; run data through the model first.")
        if not self.observer.finite():
            raise ValueError(
                f"quantizer {self.name!r} has observed NaN or infinities; look for the layer before it that makes them."
            )

    def load_observed(self) -> tuple[Tensor, Tensor]:
        """Set the grid from the range observed so far, and return that range; errors as of `check_observed`."""
        self.check_observed()
        lo, hi = self.observer.range()
        self.set_range(lo, hi)
        return lo, hi

    def merge_observed(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Take what the observers of several processes saw (each one's `observer.state()`) for what this one saw."""
        shape = max((state["lo"].shape for state in states), key=lambda shape: shape.numel())
        if not self._sized and shape != self._scale.shape:
            self._resize(tuple(shape))
        self.observer.merge([state for state in states if state["lo"].shape == shape])  # the others saw nothing

    # ---- use

    def forward(self, x: Tensor) -> Tensor:
        """Return x, or its nearest values on the grid, by the state of the quantizer.

        Raises:
            RuntimeError: It is to quantize but has no range.
        """
        if self.observing:
            self._fit_channels(x)
            if self.quantizing and self.spec.quantizer == "fixed":
                return self._observe_and_quantize(x)
            self.observer(x)
        if not self.quantizing:
            return x
        self.check_ready()
        return self._quantize(x, 1.0 if self.spec.quantizer == "fixed" else self._lsq_factor(x))

    def rows(self, x: Tensor, index: Tensor, table: Tensor) -> Tensor:
        """Return rows of a table as `forward(table)[index]` holds them, without the rest of the table.

        Args:
            x: The rows `table[index]`, (n, features), which gradients go to.
            index: Which row each one is, (n,).
            table: The table, (rows, features), which a range is taken from.
        """
        if self.observing:
            with torch.no_grad():
                self.forward(table)
        if not self.quantizing:
            return x
        self.check_ready()
        spec = self.spec
        factor = 1.0 if spec.quantizer == "fixed" else self._lsq_factor(table)
        grid = self._of_rows(self._scale, index), self._of_rows(self._zero_point, index)
        return fake_quant(spec, x, *grid, 1, self._block_size_of_rows(), factor)

    def _of_rows(self, values: Tensor | None, index: Tensor) -> Any:
        spec = self.spec
        if values is None or spec.axis is None or (spec.axis % 2 == 1 and spec.group_size is None):
            return values
        return values[index // spec.group_size if spec.group_size and spec.axis % 2 == 0 else index]

    def _block_size_of_rows(self) -> int:
        along_rows = self.spec.axis is not None and self.spec.axis % 2 == 0
        return 1 if self.spec.group_size and along_rows else self.spec.block_size

    def check_ready(self) -> None:
        """Raise RuntimeError if there is no range to quantize with."""
        if not self.ready:
            raise RuntimeError(
                f"quantizer {self.name!r} has no range yet: call qtoolkit.calibrate(model, batches) first, or switch it "
                f"off with qtoolkit.disable_quantization(model)."
            )

    def _quantize(self, x: Tensor, factor: float) -> Tensor:
        return fake_quant(self.spec, x, self._scale, self._zero_point, self.group, self.spec.block_size, factor)

    def _fit_channels(self, x: Tensor) -> None:
        if not self._sized:
            self._resize(self.spec.scale_shape(x.shape, self.group))

    def _observe_and_quantize(self, x: Tensor) -> Tensor:
        spec = self.spec
        self.ready = True
        if isinstance(self.observer, RangeObserver) and spec.format == "int":
            return self.observer.observe_and_quantize(x, self._scale, self._zero_point, spec)
        self.observer(x)
        self._write(*grid_of_range(*self.observer.range(), spec))
        return self._quantize(x, 1.0)

    def _lsq_factor(self, x: Tensor) -> float:
        # LSQ section 2.2: 1 / sqrt(N * qmax), N the number of weights that share a scale, or of features (without the
        # batch) of an activation.
        if self.grad_factor is None:
            apart = self._scale.numel() if self.spec.axis is not None else (x.size(0) if x.dim() > 1 else 1)
            sharing = x.numel() // max(apart, 1)
            self.grad_factor = float(max(sharing, 1) * self.spec.qmax) ** -0.5
        return self.grad_factor

    def to_grid(self) -> Grid:
        """Return the frozen form, with the scale as it is now.

        Raises:
            RuntimeError: It has no range.
            ValueError: A scale is not positive and finite.
        """
        if not self.ready:
            raise RuntimeError(
                f"quantizer {self.name!r} saw no data, so it has no scale: call qtoolkit.calibrate(model, batches) on data "
                f"that reaches it, or leave its layer in float by the QConfigMapping."
            )
        check_scale(self.name, self.scale)
        zero_point = self.zero_point
        if zero_point is not None:
            zero_point = zero_point.clamp(self.spec.qmin, self.spec.qmax)
        return Grid(
            self.scale.clone(),
            zero_point,
            self.spec,
            self.group,
            name=self.name,
            of_weight=self.of_weight,
            inserted=self.inserted,
        )

    # ---- switches

    def enable(self) -> None:
        """Quantize from now on."""
        self.quantizing = True

    def disable(self) -> None:
        """Pass inputs through from now on."""
        self.quantizing = False

    # ---- state

    def _resize(self, shape: tuple[int, ...]) -> None:
        self.observer.resize(shape)
        for tensor in (self._scale, self._zero_point):
            if tensor is not None:
                tensor.data = tensor.data.new_full(shape, float(tensor.detach().flatten()[0]))
        self._sized = True

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        scale = state_dict.get(prefix + "_scale")
        if scale is not None and not self._sized:
            self._resize(tuple(scale.shape))
        super()._load_from_state_dict(state_dict, prefix, *args)
        if scale is not None:
            self.ready = bool(torch.isfinite(self._scale).all())

    def extra_repr(self) -> str:
        """Return the spec and the state."""
        words = [self.spec.describe()]
        words += ["observing"] if self.observing else []
        words += [] if self.quantizing else ["off"]
        words += [] if self.ready else ["no range yet"]
        return ", ".join(words)


def quantizers_of(model: nn.Module) -> dict[str, TensorQuantizer]:
    """Return a model's quantizers by their dotted names."""
    return {name: module for name, module in model.named_modules() if isinstance(module, TensorQuantizer)}


def is_legacy_quantizer(module: nn.Module) -> bool:
    """Return whether a module is a quantizer of `qtoolkit.compat.pytorch_quantization`, which need not be imported."""
    return any(
        cls.__name__ == "TensorQuantizer" and cls.__module__.startswith("qtoolkit.compat.")
        for cls in type(module).__mro__
    )


def refuse_legacy_quantizers(model: nn.Module, what: str) -> None:
    """Raise TypeError if a model holds quantizers of `qtoolkit.compat.pytorch_quantization`; `what` is who cannot take them."""
    found = [name for name, module in model.named_modules() if is_legacy_quantizer(module)]
    if found:
        raise TypeError(
            f"{what}: {found[0]!r} is a quantizer of qtoolkit.compat.pytorch_quantization, which keeps the ways of that "
            f"package: calibrate and export it as there, or replace the float model by qtoolkit.quant_modules "
            f"(docs/migration.md)."
        )
