"""Quantizer: the base class of the quantizer in training (TensorQuantizer) and of its frozen form (Grid)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn, TypeVar, overload

import torch
from torch import Tensor, nn

from qtoolkit import ops
from qtoolkit.config import QuantSpec
from qtoolkit.config.formats import WeightCodes
from qtoolkit.quantizers.capability import NO_CODES, Capability
from qtoolkit.quantizers.state import KeepsFloat32

# By how much unsigned 8-bit integers are higher than signed ones in a file, as their zero point is.
UINT8_OFFSET = 128
# The largest magnitude of int8 values whose products with uint8 fit in 16 bits two by two: 255 * 64 * 2 < 2**15.
LARGEST_SAFE_CODE = 64


class OptionOfSpec:
    """An option of the spec, or its name in another tool: it cannot be set on the quantizer, where it would do nothing."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, quantizer: "Quantizer", owner: type | None = None) -> NoReturn:
        raise AttributeError(f"a quantizer has no attribute {self.name!r}; its options are in its spec.")

    def __set__(self, quantizer: "Quantizer", value: object) -> NoReturn:
        raise AttributeError(
            f"quantizer {quantizer.name!r}: {self.name} cannot be set on a quantizer, got {value!r}; pass a QuantSpec with it "
            f"to qtoolkit.prepare or qtoolkit.quant_modules.replace, in a QConfigMapping."
        )


class Quantizer(KeepsFloat32):
    """A module that quantizes one tensor. The arguments are `TensorQuantizer`'s."""

    # the attributes that a state dict keeps in its metadata, and loading restores
    MODES: ClassVar[tuple[str, ...]] = ("quantizing",)
    bits, num_bits, bitwidth, signed, symmetric, narrow, axis = (OptionOfSpec() for _ in range(7))

    spec: QuantSpec
    group: int
    name: str
    # whether forward quantizes; otherwise it returns its input (see `qtoolkit.disable_quantization`)
    quantizing: bool = True
    ready: bool = True  # whether there is a range to quantize with
    observing: bool = False  # whether forward observes its input, which changes the range
    of_weight: bool = False
    inserted: bool = False
    # the type in which ONNX files store the codes of a weight, where `shifts` says that both will do; the codes themselves do
    # not depend on it. Those who know the target set it (`store_weights_as`): exporters of torch do not
    weight_codes: WeightCodes = "int8"
    capability: Capability  # what its integers are, while it quantizes with a range

    def __init__(self, spec: QuantSpec, group: int, name: str, *, of_weight: bool, inserted: bool) -> None:
        super().__init__()
        self.spec, self.group, self.name = spec, group, name
        self.of_weight, self.inserted = of_weight, inserted
        self.capability = self._find_capability()

    def _find_capability(self) -> Capability:
        return Capability.of(self.spec)

    @property
    def capability_now(self) -> Capability:
        """The capability of its integers; None while it is off, or has no range."""
        return self.capability if self.quantizing and self.ready else NO_CODES

    scale: Any  # a Tensor: a buffer of one class, a property of the other
    zero_point: Any

    @property
    def active(self) -> bool:
        """Whether forward does anything with its input."""
        return self.quantizing

    @property
    def shifts(self) -> bool:
        """Whether a file can store the integers in uint8 instead of int8: a weight with one byte each.

        Integers of seven bits and fewer stay signed: their sums of products fit in 16 bits. Weights in blocks, which no
        integer kernel takes, stay signed too, and the first operand of a matrix product with a scale for each row:
        onnxruntime computes such a product in float, and fails at a zero point for each row.
        """
        spec = self.spec
        one_byte = spec.format == "int" and -UINT8_OFFSET <= spec.qmin < -LARGEST_SAFE_CODE
        of_rows = self.inserted and spec.axis == -2  # see spec_of_weight in graph/placement/decide.py
        return self.of_weight and one_byte and not spec.block_size and not of_rows

    @property
    def stored_in_uint8(self) -> bool:
        """Whether a file has the integers in uint8."""
        return self.weight_codes == "uint8" and self.shifts

    def in_uint8(self, x: Tensor, spec: QuantSpec) -> Tensor:
        """Return the values of x on the grid of a spec, computed from the integers that the file has."""
        signed = torch.zeros_like(self.scale) if self.zero_point is None else self.zero_point
        code_range = spec.qmin + UINT8_OFFSET, spec.qmax + UINT8_OFFSET
        return ops.fake_quant(x, self.scale, signed + UINT8_OFFSET, *code_range, spec.axis, self.group)

    def scale_shape(self, x: Tensor) -> tuple[int, ...]:
        """Return the shape of the scale of x.

        Raises ValueError: the spec's axis or the size of its blocks does not fit x.
        """
        try:
            return self.spec.scale_shape(x.shape, self.group)
        except ValueError as error:
            raise ValueError(f"quantizer {self.name!r}: {error}") from None

    def extra_repr(self) -> str:
        return self.spec.describe() + ("" if self.active else ", off")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "capability"}  # the spec gives it

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.capability = self._find_capability()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # The entries are tensors alone: the rest is beside them, in the metadata.
        metadata = getattr(destination, "_metadata", {}).setdefault(prefix[:-1], {})
        metadata["spec"] = spec_fields(self.spec)
        metadata["modes"] = {name: getattr(self, name) for name in self.MODES}

    def differing(self, metadata: Mapping[str, Any]) -> str | None:
        """Return, in words, how the spec in the metadata of a state dict differs from this quantizer's; None if it does not.

        The type of scales may differ: they are stored as they are trained, and rounded where they are read.
        """
        saved, own = metadata.get("spec", {}), spec_fields(self.spec)
        names = [name for name in saved if saved[name] != own.get(name) and name != "scale_dtype"]
        return f"{_listed(saved, names)}, in the model {_listed(own, names)}" if names else None

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        found = any(key.startswith(prefix) for key in state_dict)
        differing = self.differing(local_metadata) if found else None
        if differing is not None:
            raise ValueError(
                f"quantizer {self.name!r}: its spec in the state dict has {differing}; prepare the model with the backend and "
                f"the QConfigMapping of the saved model, with the fields from the state dict in the QuantSpec of its rule, or "
                f"load only the entries of the float model."
            )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        for name, value in local_metadata.get("modes", {}).items() if found else ():
            if name in self.MODES:
                setattr(self, name, type(getattr(self, name))(value))


def spec_fields(spec: QuantSpec) -> dict[str, Any]:
    """Return the part of a spec that a state dict has: without the options of observers and of training."""
    unneeded = ("observer", "observer_args", "quantizer_args")
    return {name: value for name, value in spec.values().items() if name not in unneeded}


def _listed(fields: Mapping[str, Any], names: Sequence[str]) -> str:
    return ", ".join(f"{name}={fields.get(name)!r}" for name in names)


Q = TypeVar("Q", bound=Quantizer)


@overload
def named_quantizers(module: nn.Module) -> dict[str, Quantizer]: ...
@overload
def named_quantizers(module: nn.Module, types: type[Q]) -> dict[str, Q]: ...
def named_quantizers(module: nn.Module, types: type[Quantizer] = Quantizer) -> dict[str, Any]:
    """Return the quantizers of a type in a module by their dotted names; a quantizer itself has the name ""."""
    return {name: part for name, part in module.named_modules() if isinstance(part, types)}


def store_weights_as(weight_codes: WeightCodes, module: nn.Module) -> None:
    """Tell the quantizers in a module in which type ONNX files store quantized weights."""
    for quantizer in named_quantizers(module).values():
        quantizer.weight_codes = weight_codes
