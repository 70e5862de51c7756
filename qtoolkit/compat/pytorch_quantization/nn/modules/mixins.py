"""Mixins that give a layer its quantizers; scripts know this module as `nn.modules._utils`."""

import inspect
from copy import deepcopy
from typing import Any, ClassVar

from torch import nn

from qtoolkit.compat.pytorch_quantization.nn.modules.tensor_quantizer import TensorQuantizer
from qtoolkit.compat.pytorch_quantization.tensor_quant import QUANT_DESC_8BIT_PER_TENSOR, QuantDescriptor


class QuantInputMixin:
    """A quantizer for the input, `_input_quantizer`.

    Example:
        >>> class QuantReLU(nn.ReLU, QuantInputMixin):
        ...     def __init__(self, **kwargs):
        ...         super().__init__()
        ...         self.init_quantizer(pop_quant_desc_in_kwargs(type(self), input_only=True, **kwargs))
        ...
        ...     def forward(self, x):
        ...         return super().forward(self._input_quantizer(x))
        >>> QuantReLU(quant_desc_input=QuantDescriptor(amax=127.0))(torch.tensor([-1.0, 1.2])).tolist()
        [0.0, 1.0]
    """

    default_quant_desc_input: ClassVar[QuantDescriptor] = QUANT_DESC_8BIT_PER_TENSOR
    _input_quantizer: TensorQuantizer

    @classmethod
    def set_default_quant_desc_input(cls, value: QuantDescriptor) -> None:
        """Set what this class, and those derived from it, quantize inputs by; ValueError for other than a descriptor."""
        cls.default_quant_desc_input = _checked(value)

    def init_quantizer(self, quant_desc_input: QuantDescriptor) -> None:
        """Put the quantizer in; to be called in `__init__` (TypeError elsewhere).

        Raises:
            ValueError: The descriptor is not one of fake quantization.
        """
        _check_caller()
        self._input_quantizer = _quantizer(quant_desc_input)

    @property
    def input_quantizer(self) -> TensorQuantizer:
        """The quantizer of the input."""
        return self._input_quantizer


class QuantMixin:
    """Quantizers for the input and the weight: `_input_quantizer`, `_weight_quantizer`; or lists of them, in plural."""

    default_quant_desc_input: ClassVar[QuantDescriptor] = QUANT_DESC_8BIT_PER_TENSOR
    default_quant_desc_weight: ClassVar[QuantDescriptor] = QUANT_DESC_8BIT_PER_TENSOR
    _input_quantizer: TensorQuantizer
    _weight_quantizer: TensorQuantizer
    _input_quantizers: nn.ModuleList
    _weight_quantizers: nn.ModuleList

    @classmethod
    def set_default_quant_desc_input(cls, value: QuantDescriptor) -> None:
        """Set what this class, and those derived from it, quantize inputs by; ValueError for other than a descriptor."""
        cls.default_quant_desc_input = _checked(value)

    @classmethod
    def set_default_quant_desc_weight(cls, value: QuantDescriptor) -> None:
        """Set what this class, and those derived from it, quantize weights by; ValueError for other than a descriptor."""
        cls.default_quant_desc_weight = _checked(value)

    def init_quantizer(
        self, quant_desc_input: QuantDescriptor, quant_desc_weight: QuantDescriptor, num_layers: int | None = None
    ) -> None:
        """Put the quantizers in; to be called in `__init__` (TypeError elsewhere).

        Args:
            quant_desc_input: How to quantize inputs.
            quant_desc_weight: How to quantize weights.
            num_layers: None for one quantizer each, or the length of the lists `_input_quantizers`, `_weight_quantizers`.

        Raises:
            ValueError: A descriptor is not one of fake quantization.
        """
        _check_caller()
        if num_layers is None:
            self._input_quantizer, self._weight_quantizer = _quantizer(quant_desc_input), _quantizer(quant_desc_weight)
            return
        self._input_quantizers = nn.ModuleList(_quantizer(quant_desc_input) for _ in range(num_layers))
        self._weight_quantizers = nn.ModuleList(_quantizer(quant_desc_weight) for _ in range(num_layers))

    @property
    def input_quantizer(self) -> TensorQuantizer:
        """The quantizer of the input."""
        return self._input_quantizer

    @property
    def weight_quantizer(self) -> TensorQuantizer:
        """The quantizer of the weight."""
        return self._weight_quantizer


def pop_quant_desc_in_kwargs(quant_cls: Any, input_only: bool = False, **kwargs: Any) -> Any:
    """Return a class's descriptor of inputs, or those of inputs and weights: from the arguments, else its defaults.

    Raises:
        TypeError: There are other arguments.
    """
    names = ["quant_desc_input"] if input_only else ["quant_desc_input", "quant_desc_weight"]
    unused = kwargs.keys() - names
    if unused:
        raise TypeError(f"Unused keys: {', '.join(sorted(unused))}. {quant_cls.__name__} takes {' and '.join(names)}.")
    found = [kwargs[name] if name in kwargs else getattr(quant_cls, f"default_{name}") for name in names]
    return found[0] if input_only else tuple(found)


def take_quant_desc(quant_cls: Any, kwargs: dict[str, Any], input_only: bool = False) -> Any:
    """Take the descriptors out of a layer's arguments, and return them as `pop_quant_desc_in_kwargs` does."""
    given = {name: kwargs.pop(name) for name in tuple(kwargs) if name.startswith("quant_desc_")}
    return pop_quant_desc_in_kwargs(quant_cls, input_only, **given)


def _checked(value: object) -> QuantDescriptor:
    if not isinstance(value, QuantDescriptor):
        raise ValueError(f"A default must be a QuantDescriptor, got a {type(value).__name__}.")
    return deepcopy(value)


def _quantizer(desc: QuantDescriptor) -> TensorQuantizer:
    if not desc.fake_quant:
        raise ValueError("Only fake quantization is supported! Take a QuantDescriptor with fake_quant=True.")
    return TensorQuantizer(desc)


def _check_caller() -> None:
    """Raise TypeError unless the function that called this one's caller is an `__init__`."""
    frame = inspect.currentframe()
    for _ in range(2):
        frame = None if frame is None else frame.f_back
    if frame is not None and frame.f_code.co_name != "__init__":
        raise TypeError(f"init_quantizer must be called in __init__, not in {frame.f_code.co_name}.")
