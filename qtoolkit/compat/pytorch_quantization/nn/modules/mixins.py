"""Mixins that add quantizers to a layer; scripts import this module as `nn.modules._utils`."""

import inspect
from collections.abc import Collection
from copy import deepcopy
from typing import Any, ClassVar

from torch import nn

from qtoolkit.compat.pytorch_quantization.descriptor import QUANT_DESC_8BIT_PER_TENSOR, QuantDescriptor
from qtoolkit.compat.pytorch_quantization.nn.modules.tensor_quantizer import TensorQuantizer
from qtoolkit.errors import with_article


class _QuantizesInput:
    """Common base of both mixins; scripts distinguish them by isinstance, so neither derives from the other."""

    default_quant_desc_input: ClassVar[QuantDescriptor] = QUANT_DESC_8BIT_PER_TENSOR
    _input_quantizer: TensorQuantizer

    @classmethod
    def set_default_quant_desc_input(cls, value: QuantDescriptor) -> None:
        """Set the default for inputs of this class and its subclasses; ValueError unless it is a descriptor."""
        cls.default_quant_desc_input = _copy_of_default(value)

    @property
    def input_quantizer(self) -> TensorQuantizer:
        """The quantizer of the input."""
        return self._input_quantizer


class QuantInputMixin(_QuantizesInput):
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

    def init_quantizer(self, quant_desc_input: QuantDescriptor) -> None:
        """Create the quantizer; TypeError unless called in `__init__`, ValueError without fake quantization."""
        _check_caller()
        self._input_quantizer = _quantizer(quant_desc_input)


class QuantMixin(_QuantizesInput):
    """Quantizers for the input and the weight: `_input_quantizer` and `_weight_quantizer`, or lists with plural names."""

    default_quant_desc_weight: ClassVar[QuantDescriptor] = QUANT_DESC_8BIT_PER_TENSOR
    _weight_quantizer: TensorQuantizer
    _input_quantizers: nn.ModuleList
    _weight_quantizers: nn.ModuleList

    @classmethod
    def set_default_quant_desc_weight(cls, value: QuantDescriptor) -> None:
        """Set the default for weights of this class and its subclasses; ValueError unless it is a descriptor."""
        cls.default_quant_desc_weight = _copy_of_default(value)

    @property
    def weight_quantizer(self) -> TensorQuantizer:
        """The quantizer of the weight."""
        return self._weight_quantizer

    def init_quantizer(
        self, quant_desc_input: QuantDescriptor, quant_desc_weight: QuantDescriptor, num_layers: int | None = None
    ) -> None:
        """Create the quantizers: one each, or lists of `num_layers`, `_input_quantizers` and `_weight_quantizers`.

        Raises TypeError: the caller is not an `__init__`; ValueError: a descriptor has fake_quant=False.
        """
        _check_caller()
        if num_layers is None:
            self._input_quantizer, self._weight_quantizer = _quantizer(quant_desc_input), _quantizer(quant_desc_weight)
            return
        self._input_quantizers = nn.ModuleList(_quantizer(quant_desc_input) for _ in range(num_layers))
        self._weight_quantizers = nn.ModuleList(_quantizer(quant_desc_weight) for _ in range(num_layers))


def pop_quant_desc_in_kwargs(quant_cls: type, input_only: bool = False, **kwargs: object) -> Any:
    """Return the descriptor of inputs, or of inputs and weights: the arguments, or a class's; TypeError for others."""
    names = ["quant_desc_input"] if input_only else ["quant_desc_input", "quant_desc_weight"]
    unused = kwargs.keys() - names
    if unused:
        raise TypeError(
            f"Unused keys: {', '.join(sorted(unused))}. Besides the arguments of torch's layer, {quant_cls.__name__} takes "
            f"{' and '.join(names)}."
        )
    found = [kwargs[name] if name in kwargs else getattr(quant_cls, f"default_{name}") for name in names]
    return found[0] if input_only else tuple(found)


def take_quant_desc(quant_cls: type, kwargs: dict[str, object], input_only: bool = False) -> Any:
    """Remove the descriptors from a layer's arguments, and return them as `pop_quant_desc_in_kwargs` does."""
    known = _arguments_of_torch(quant_cls)
    given = {name: kwargs.pop(name) for name in tuple(kwargs) if name not in known}
    return pop_quant_desc_in_kwargs(quant_cls, input_only, **given)


def _arguments_of_torch(quant_cls: type) -> Collection[str]:
    """Return the names of the arguments of the layer of torch.nn that a class derives from."""
    for cls in quant_cls.__mro__:
        if cls.__module__.startswith("torch.nn."):
            parameters = inspect.signature(cls).parameters
            if all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
                return parameters
    return ()


def _copy_of_default(value: object) -> QuantDescriptor:
    if not isinstance(value, QuantDescriptor):
        raise ValueError(f"The default is not an instance of QuantDescriptor, got {with_article(type(value))}.")
    return deepcopy(value)


def _quantizer(desc: QuantDescriptor) -> TensorQuantizer:
    if not desc.fake_quant:
        raise ValueError("Only fake quantization is supported! Use a QuantDescriptor with fake_quant=True.")
    return TensorQuantizer(desc)


def _check_caller() -> None:
    """Raise TypeError unless the function that called this one's caller is an `__init__`."""
    frame = inspect.currentframe()
    for _ in range(2):
        frame = None if frame is None else frame.f_back
    if frame is not None and frame.f_code.co_name != "__init__":
        raise TypeError(
            f"init_quantizer should be only called by __init__ of quantized module, not in {frame.f_code.co_name}."
        )
