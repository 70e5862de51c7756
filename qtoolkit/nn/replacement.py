"""Module replacement: float layers become QAT layers with quantizers of their own, and stay the same objects."""

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from qtoolkit.config import QConfig
from qtoolkit.errors import with_article
from qtoolkit.model_state import device_of
from qtoolkit.nn import QuantModule
from qtoolkit.nn.attention import stop_fast_path
from qtoolkit.nn.registry import QatModules, from_float
from qtoolkit.op_kinds.table import kind_of_type
from qtoolkit.quantizers.quantizer import Quantizer
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer, quantizers_of

# (name, layer, QAT type) -> the layer's config, with the weight's own axis; None leaves the layer in float.
Chooser = Callable[[str, nn.Module, type[Any]], QConfig | None]

TRANSFORMERS = (nn.TransformerEncoder, nn.TransformerEncoderLayer)


def replace_in_place(module: nn.Module, new: nn.Module) -> None:
    """Give a module the type and the state of another one; the object stays, with all references to it.

    The dicts of hooks stay the same objects too, with the new module's hooks in them, so that handles of hooks remain valid.
    If the new module contains the old one, as a wrapper does, the old one moves into a new object there, with its hooks. The
    new one must not be used afterwards. Raises TypeError for types of different memory layouts, as `__slots__` makes them.
    """
    if new is module:
        return
    old_type, is_wrapped = type(module), any(part is module for part in new.modules())
    try:
        object.__setattr__(module, "__class__", type(new))
    except TypeError as error:
        raise TypeError(
            f"{with_article(old_type)} cannot be replaced in place by {with_article(type(new))}: {error}. Derive both classes "
            f"from torch.nn.Module, and add no __slots__ or base with a memory layout of its own."
        ) from error
    held = _move_into(new, module, old_type) if is_wrapped else vars(module)
    state = {name: _refilled(held.get(name), value) for name, value in vars(new).items()}
    vars(module).clear()
    vars(module).update(state)


def _move_into(wrapper: nn.Module, module: nn.Module, old_type: type[nn.Module]) -> dict[str, Any]:
    """Move a module's state into a new object in its wrapper, and return an empty state."""
    inner = old_type.__new__(old_type)
    vars(inner).update(vars(module))
    for parent in list(wrapper.modules()):
        parent._modules.update({name: inner for name, child in parent._modules.items() if child is module})
    hooks: dict[int, Any] = inner._load_state_dict_pre_hooks
    for hook in hooks.values():  # torch binds these to their module by a weak reference
        if getattr(hook, "with_module", False):
            hook.module = weakref.ref(inner)
    return {}


def _refilled(old: Any, value: Any) -> Any:
    """Return the old dict with the new one's items, because handles of hooks refer to it; of other types the new value."""
    if type(old) is not type(value) or not isinstance(value, dict) or old is value:
        return value
    items = list(value.items())
    old.clear()
    old.update(items)
    return old


def replace_layers(
    root: nn.Module,
    prefixes: Sequence[str],
    choose: Chooser,
    table: QatModules,
    quantize_inputs: bool = True,
    what: str = "prepare",
) -> list[str]:
    """Replace the float layers in some submodules by QAT layers, in place; return the first name of each that was replaced.

    The submodules are given by their dotted names; "" is the model itself. A layer with several names is replaced once and
    stays shared. With `quantize_inputs` layers get quantizers of their inputs. `what` is the public function, for errors.
    """
    device = device_of(root)
    names, replaced = [], set()
    for name, module in modules_in(root, prefixes):
        qat_type = table.get(type(module))
        qconfig = None if qat_type is None or module in replaced else choose(name, module, qat_type)
        if qat_type is not None and qconfig is not None:
            replace_in_place(module, quantized_layer(module, qat_type, qconfig, name, device, quantize_inputs, what))
            replaced.add(module)
            names.append(name)
    keep_off_fast_paths(root, replaced)
    return names


def keep_off_fast_paths(root: nn.Module, replaced: Collection[nn.Module]) -> None:
    """Disable the fast paths of torch's transformer modules that contain replaced layers: they bypass quantizers."""
    for module in root.modules():
        if not isinstance(module, TRANSFORMERS) or set(module.modules()).isdisjoint(replaced):
            continue
        if isinstance(module, nn.TransformerEncoder):
            module.enable_nested_tensor = module.use_nested_tensor = False
        elif stop_fast_path not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(stop_fast_path)


def modules_in(root: nn.Module, prefixes: Iterable[str]) -> list[tuple[str, nn.Module]]:
    """Return the submodules at and below some prefixes with their dotted names; the parts of QAT layers are left out."""
    pairs = [(p, root.get_submodule(p)) for p in prefixes]
    found = []
    for name, module in pairs:
        found.append((name, module))
        if not isinstance(module, QuantModule | Quantizer):
            pairs += [(f"{name}.{child}" if name else child, m) for child, m in module.named_children()]
    return found


def quantized_layer(
    module: nn.Module,
    qat_type: type[Any],
    qconfig: QConfig,
    name: str,
    device: torch.device | None = None,
    quantize_inputs: bool = True,
    what: str = "prepare",
) -> nn.Module:
    """Return the QAT layer of a float layer, as `replace_layers` puts it into a model.

    The axis of the weight's spec is the weight's own; `device` is for its quantizers if the layer has no parameters. Raises
    ValueError for a spec that does not fit the weight, TypeError where the type's `from_float` returns no module.
    """
    layer: Any = from_float(module, qat_type, qconfig.weight, qconfig.activation, name, what)
    takes_indices = kind_of_type(qat_type).takes_indices
    if quantize_inputs and qconfig.activation is not None and hasattr(layer, "input_quantizer") and not takes_indices:
        layer.input_quantizer = TensorQuantizer(qconfig.activation, name=f"{name}.input_quantizer")
    if not quantize_inputs and hasattr(layer, "other_quantizer"):
        layer.other_quantizer = None  # `from_float` of an op of two tensors has created it
    own = device_of(module) or device
    for quantizer in quantizers_of(layer).values() if own is not None else ():
        quantizer.to(own)
    layer.train(module.training)  # sets the mode of its quantizers too
    return layer  # type: ignore[no-any-return]  # from_float has checked it
