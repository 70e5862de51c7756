"""QuantModule: the base class of QAT modules, as the passes, the reports and the export use them."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from qtoolkit.config import QuantSpec
from qtoolkit.errors import check_known, with_article
from qtoolkit.model_state import device_of
from qtoolkit.nn.computed_weights import computing_still, refresh
from qtoolkit.nn.layer_op import LayerOp
from qtoolkit.op_kinds.kind import OpKind
from qtoolkit.op_kinds.table import KINDS, OTHER, kind_of_type
from qtoolkit.processes import whole
from qtoolkit.quantizers.loading import materialize
from qtoolkit.quantizers.quantizer import Quantizer, named_quantizers
from qtoolkit.quantizers.state import latest_load
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer
from qtoolkit.quantizers.weights import set_weight_range, weight_quantizer

M = TypeVar("M", bound=nn.Module)


def shallow_copy_as(cls: type[M], module: nn.Module) -> M:
    """Return a new module of a class that shares another module's parameters, buffers and submodules; hooks and mode too."""
    new = cls.__new__(cls)
    new.__dict__.update({k: v.copy() if isinstance(v, dict) else v for k, v in module.__dict__.items()})
    return new


class QuantModule(nn.Module):
    """A float module with quantizers, to be mixed into the float module's class.

    Attributes:
        FLOAT: The float type that it replaces.
        KIND: Its kind of op: one of `qtoolkit.op_kinds.table.KINDS`, or "other" for an op of no kind in the table.
        OP_KIND: The row of that kind in the table.
        UPDATED: The names of its buffers of the output channels that give gradients to weights.

    Raises:
        ValueError: A subclass with a `FLOAT` has no `KIND`, or an unknown one.

    Example:
        >>> layer = qt.nn.QuantConv2d(3, 8, 3, weight_spec=qt.QuantSpec(axis=0))
        >>> isinstance(layer, QuantModule), layer.FLOAT.__name__, layer.KIND
        (True, 'Conv2d', 'conv')
    """

    FLOAT: ClassVar[type[nn.Module]]
    KIND: ClassVar[str]
    OP_KIND: ClassVar[OpKind]
    UPDATED: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if hasattr(cls, "FLOAT"):
            if not hasattr(cls, "KIND"):
                raise ValueError(
                    f"class {cls.__name__} has no KIND; set it to the kind of its op, or to {OTHER.name!r}."
                )
            check_known(f"KIND of class {cls.__name__}:", cls.KIND, (*KINDS, OTHER.name))
            cls.OP_KIND = kind_of_type(cls)

    @classmethod
    def from_float(
        cls, module: nn.Module, weight: QuantSpec | None, name: str = "", activation: QuantSpec | None = None
    ) -> Self:
        """Build the QAT module of a float module. It shares the parameters, hooks and mode.

        Args:
            module: The float module, of exactly the type `FLOAT`.
            weight: Spec of the weights; its axis is the weight's own axis. None leaves them float.
            name: The module's name in error messages.
            activation: Spec of the tensors between several ops inside the module. Modules of one op ignore it.

        Raises:
            TypeError: The module is of another type.
            ValueError: The spec's axis or group_size does not fit the weight.
        """
        if type(module) is not cls.FLOAT:
            raise TypeError(f"{cls.__name__}.from_float takes {with_article(cls.FLOAT)}, got {type(module).__name__}.")
        refresh(module)
        new = shallow_copy_as(cls, module)
        new.add_quantizers(weight, name, activation)
        for quantizer in named_quantizers(new).values():
            quantizer.train(new.training)
        return new

    def to_float(self) -> nn.Module:
        """Return the float module with the same parameters."""
        layer = shallow_copy_as(self.FLOAT, self)
        for name in (*self.own_attributes(), "_qtoolkit_record"):
            layer.__dict__.pop(name, None)
            layer._modules.pop(name, None)
            if layer._buffers.pop(name, self) is not self:
                layer._non_persistent_buffers_set.discard(name)
        drop_output_quantizer(layer)
        return layer

    def forward_fp32(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module in float, without quantizers, as its float type does."""
        return super().forward(*args, **kwargs)

    # ---- for subclasses to implement

    def add_quantizers(self, weight: QuantSpec | None, name: str, activation: QuantSpec | None = None) -> None:
        """Add the quantizers; the weights' take the weights' ranges."""
        raise NotImplementedError

    def own_attributes(self) -> tuple[str, ...]:
        """Return the names of the attributes that the float module does not have.

        `to_float` copies all others: an attribute that is missing here would stay on the float module and in its pickles, and
        a module in its state dict.
        """
        raise NotImplementedError

    def weights_to_quantize(self) -> Mapping[str, Tensor]:
        """Return each weight by the name of its quantizer attribute, which is `weight_name` of that and "_quantizer"."""
        return {}

    # ---- weights

    @staticmethod
    def weight_name(attribute: str) -> str:
        """Return the name of a weight in the module, from its quantizer attribute's name."""
        return attribute.removesuffix("_quantizer")

    def add_weight_quantizers(self, spec: QuantSpec | None, name: str) -> None:
        """Set the quantizer attribute of each weight, to None if there is no spec."""
        for attribute, weight in self.weights_to_quantize().items():
            path = f"{name}.{attribute}"
            setattr(self, attribute, None if spec is None else weight_quantizer(weight, spec, name, name=path))

    def quantized_weights(self) -> Mapping[str, tuple[Quantizer, Tensor]]:
        """Return each weight quantizer by its attribute name, with the tensor that it quantizes."""
        pairs = ((name, getattr(self, name), weight) for name, weight in self.weights_to_quantize().items())
        return {name: (quantizer, weight) for name, quantizer, weight in pairs if quantizer is not None}

    def trained_weights(self) -> Mapping[str, Tensor]:
        """Return the parameters, by the same names, of tensors that are a parameter times constants: by default none."""
        return {}

    def add_updated_channels(self) -> None:
        """Register the buffers of the channels that are updated; None for all."""
        for name in self.UPDATED:
            self.register_buffer(name, None, persistent=False)

    def __getstate__(self) -> dict[str, Any]:
        # A copy is not the module whose weights an optimizer updates in part.
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {**state, "_buffers": {**self._buffers, **dict.fromkeys(self.UPDATED)}}

    def layers_of_weights(self) -> Mapping[str, LayerOp]:
        """Return the layer of each weight that can be trained in part, by the name of the weight."""
        return {}

    def weight_quantizers(self) -> Mapping[str, Quantizer]:
        """Return each weight quantizer by its attribute name, without computing the weights."""
        return {name: quantizer for name, (quantizer, _) in self.quantized_weights().items()}

    def reset_weight_range(self) -> None:
        """Set the ranges of the weight quantizers to the weights' present ranges."""
        trained, quantized = self._weights_at_rest()
        for name, (quantizer, weight) in quantized.items():
            if isinstance(quantizer, TensorQuantizer):
                set_weight_range(quantizer, weight, trained.get(name))

    def set_weight_rates(self, chosen: Collection[Quantizer]) -> None:
        """Train the chosen quantizers' scales of weights at the rates of the weights as they are."""
        names = [name for name, quantizer in self.weight_quantizers().items() if quantizer in chosen]
        if not names:
            return
        trained, quantized = self._weights_at_rest()
        for name in names:
            quantizer, weight = quantized[name]
            if isinstance(quantizer, TensorQuantizer):
                quantizer.set_weight_rate(whole(weight), whole(trained.get(name, weight)))

    def _weights_at_rest(self) -> tuple[Mapping[str, Tensor], Mapping[str, tuple[Quantizer, Tensor]]]:
        """Return the results of `trained_weights` and `quantized_weights`, without changing the state that computes them."""
        refresh(self)
        with computing_still(self):
            return self.trained_weights(), self.quantized_weights()

    def train(self, mode: bool = True) -> Self:
        """Set the mode; in eval mode with the ranges of the weights as they are, for readers without a forward."""
        super().train(mode)
        if not mode:
            self.follow_weights()
        return self

    def follow_weights(self) -> None:
        """Set each range that follows a weight to the weight's present range, as a forward in eval mode does."""
        if any(isinstance(q, TensorQuantizer) and q.follows for q in self.weight_quantizers().values()):
            refresh(self)
            for quantizer, weight in self.quantized_weights().values():
                # Values on the meta device are elsewhere: offloaded weights come back for each forward.
                if isinstance(quantizer, TensorQuantizer) and quantizer.follows and not weight.is_meta:
                    quantizer.follow(weight)

    def depends_on(self) -> Sequence[nn.Module]:
        """Return the modules beside it whose tensors scale the weights that it quantizes."""
        return ()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        *args: Any,
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *args)
        own = tuple(f"{prefix}{name}." for name in self.weight_quantizers())
        if own and state_dict and not any(key.startswith(own) for key in state_dict):
            latest_load(missing_keys).float_layers.add(id(self))
        if reset_after_loading not in self._load_state_dict_post_hooks.values():
            self.register_load_state_dict_post_hook(reset_after_loading)  # type: ignore[no-untyped-call]


def names_of_weights(model: nn.Module) -> Mapping[str, str]:
    """Return the dotted name of each weight that a QAT module quantizes, by its quantizer's name."""
    found: dict[str, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        for attribute in module.weight_quantizers() if isinstance(module, QuantModule) else ():
            found[prefix + attribute] = prefix + QuantModule.weight_name(attribute)
    return found


def reset_after_loading(module: nn.Module, keys: Any) -> None:
    """Set the weight ranges of each layer in a module that a state dict without them, or out of date, was loaded into: a hook.

    A layer's hook runs before the model's. A layer with a linked batch norm, which is loaded later, waits.
    """
    float_layers = latest_load(keys.missing_keys).float_layers
    device = next((parameter.device for parameter in module.parameters() if not parameter.is_meta), None)
    for quantizer in named_quantizers(module, TensorQuantizer).values():
        if device is not None:
            materialize(quantizer, device)
    for layer in module.modules():
        if not isinstance(layer, QuantModule) or (layer is module and layer.depends_on()):
            continue
        if id(layer) in float_layers:
            float_layers.remove(id(layer))
            layer.reset_weight_range()
        elif not layer.training:
            layer.follow_weights()


def drop_output_quantizer(layer: nn.Module) -> None:
    """Remove the quantizer of a module's output, if it has one, and the hooks of a QAT layer."""
    layer._modules.pop("output_quantizer", None)
    layer.__dict__.pop("output_quantizer", None)
    for hooks in (layer._forward_hooks, layer._load_state_dict_post_hooks):
        for key in [key for key, hook in hooks.items() if hook in (quantize_output, reset_after_loading)]:
            del hooks[key]


def quantize_output(module: nn.Module, args: Any, output: Any) -> Any:
    """Return a module's output, or the first of several, quantized by its `output_quantizer`: a forward hook."""
    quantizer: Any = module.output_quantizer
    if isinstance(output, PackedSequence):
        return output._replace(data=quantizer(output.data))
    if isinstance(output, tuple):
        return (quantize_output(module, args, output[0]), *output[1:])
    return quantizer(output)


def activation_quantizer(spec: QuantSpec | None, name: str, module: nn.Module) -> TensorQuantizer | None:
    """Return a new quantizer of an activation in a module, on its device; None if there is no spec."""
    if spec is None:
        return None
    return TensorQuantizer(spec, name=name).to(device_of(module))


def quantized(quantizer: Quantizer | None, x: Any) -> Any:
    """Return x quantized, or x itself if there is no quantizer."""
    return x if quantizer is None else quantizer(x)


def is_active(quantizer: Quantizer | None) -> bool:
    """Return whether a quantizer, if there is one, observes or quantizes."""
    return quantizer is not None and quantizer.active
