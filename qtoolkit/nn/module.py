"""QuantModule: what every QAT module of the table offers to the passes, the reports and the export."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self, TypeVar

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from qtoolkit.config import QuantSpec
from qtoolkit.errors import check_known
from qtoolkit.op_kinds.rules import OTHER
from qtoolkit.op_kinds.table import KINDS
from qtoolkit.quantizers.quantizer import Quantizer as Quantizer
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer
from qtoolkit.quantizers.weights import set_weight_range

M = TypeVar("M", bound=nn.Module)


def adopt(cls: type[M], module: nn.Module) -> M:
    """Return a new module of a class with all that another one holds: the same parameters, buffers, hooks and mode."""
    new = cls.__new__(cls)
    new.__dict__.update({k: v.copy() if isinstance(v, dict) else v for k, v in module.__dict__.items()})
    return new


class QuantModule(nn.Module):
    """A float module with quantizers, to be mixed into the float module's class.

    Attributes:
        FLOAT: The float type that it replaces.
        KIND: Its kind of op: one of `qtoolkit.op_kinds.table.KINDS`, or "other" for an op of no kind in the table.

    Raises:
        ValueError: A subclass with a `FLOAT` has no `KIND`, or an unknown one.
    """

    FLOAT: ClassVar[type[nn.Module]]
    KIND: ClassVar[str]

    _loaded_float = False  # whether the state dict that was loaded last had the weight and nothing of its quantizers

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if hasattr(cls, "FLOAT"):
            if not hasattr(cls, "KIND"):
                raise ValueError(f"class {cls.__name__} has no KIND; set it to the kind of its op, or to {OTHER!r}.")
            check_known(f"KIND of class {cls.__name__}:", cls.KIND, (*KINDS, OTHER))

    @classmethod
    def from_float(
        cls, module: nn.Module, weight: QuantSpec | None, name: str = "", activation: QuantSpec | None = None
    ) -> Self:
        """Build the QAT module of a float one; it takes over the parameters themselves, hooks and mode.

        Args:
            module: The float module, of exactly the type `FLOAT`.
            weight: Spec of the weights; its axis is the weight's own axis. None leaves them float.
            name: What errors call the module.
            activation: Spec of the tensors between several ops inside the module; a module of one op has none.

        Raises:
            TypeError: The module is of another type.
            ValueError: The spec's axis or group_size does not fit the weight.
        """
        if type(module) is not cls.FLOAT:
            raise TypeError(f"{cls.__name__}.from_float takes a {cls.FLOAT.__name__}, got {type(module).__name__}.")
        new = adopt(cls, module)
        new.add_quantizers(weight, name, activation)
        return new

    def to_float(self) -> nn.Module:
        """Return the float module with the same parameters."""
        layer = adopt(self.FLOAT, self)
        for name in (*self.own_attributes(), "output_quantizer", "_loaded_float"):
            layer.__dict__.pop(name, None)
            layer._modules.pop(name, None)
        for hooks in (layer._forward_hooks, layer._load_state_dict_post_hooks):
            for key in [key for key, hook in hooks.items() if hook in (quantize_output, reset_after_loading)]:
                del hooks[key]
        return layer

    # ---- what a kind of module has to say

    def add_quantizers(self, weight: QuantSpec | None, name: str, activation: QuantSpec | None = None) -> None:
        """Put the quantizers in, with ranges for the weights."""
        raise NotImplementedError

    def own_attributes(self) -> tuple[str, ...]:
        """Return the names of what it holds beyond the float module."""
        raise NotImplementedError

    def quantized_weights(self) -> Mapping[str, tuple[Quantizer, Tensor]]:
        """Return each weight quantizer by its name in this module, with the tensor that it quantizes."""
        raise NotImplementedError

    def weight_quantizers(self) -> Mapping[str, Quantizer]:
        """Return each weight quantizer by its name in this module; the weights need not be computed for that."""
        return {name: quantizer for name, (quantizer, _) in self.quantized_weights().items()}

    def reset_weight_range(self) -> None:
        """Set the weight quantizers' ranges to those of the weights as they are now."""
        for quantizer, weight in self.quantized_weights().values():
            if isinstance(quantizer, TensorQuantizer):
                set_weight_range(quantizer, weight)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        own = tuple(f"{prefix}{name}." for name in self.weight_quantizers())
        self._loaded_float = bool(own) and bool(state_dict) and not any(key.startswith(own) for key in state_dict)
        if reset_after_loading not in self._load_state_dict_post_hooks.values():
            self.register_load_state_dict_post_hook(reset_after_loading)  # type: ignore[no-untyped-call]


def reset_after_loading(module: nn.Module, keys: Any) -> None:
    """Set the ranges of the weights' quantizers anew in a module, once weights without such ranges were loaded: a hook."""
    for layer in module.modules():
        if isinstance(layer, QuantModule) and layer._loaded_float:
            layer.reset_weight_range()


def quantize_output(module: nn.Module, args: Any, output: Any) -> Any:
    """Return a module's output through its `output_quantizer`, of several tensors the first one: a forward hook."""
    quantizer: Any = module.output_quantizer
    if isinstance(output, PackedSequence):
        return output._replace(data=quantizer(output.data))
    if isinstance(output, tuple):
        return (quantize_output(module, args, output[0]), *output[1:])
    return quantizer(output)


def quantized(quantizer: Quantizer | None, x: Any) -> Any:
    """Return x through a quantizer, or x itself where there is none."""
    return x if quantizer is None else quantizer(x)
