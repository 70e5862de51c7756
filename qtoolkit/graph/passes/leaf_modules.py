"""Module replacement: QAT layers, each with quantizers of its own, where no graph is: in submodules that are kept whole."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from qtoolkit.config import QConfig
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.graph.plan import BY_CONFIG, Cause, Plan, Status, Verdict
from qtoolkit.layer_rules import LayerDecision, LayerRules
from qtoolkit.nn import QuantModule
from qtoolkit.nn.attention import stop_fast_path
from qtoolkit.nn.batch_norm import is_batch_norm
from qtoolkit.nn.registry import QatModules, from_float
from qtoolkit.op_kinds.nodes import kind_of_type, module_of
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer, quantizers_of

# Of a layer's name, itself and its QAT type: how to quantize it, with the weight's own axis. None leaves it in float.
Chooser = Callable[[str, nn.Module, type[Any]], QConfig | None]

QUANTIZERS = (TensorQuantizer, Grid)
INSIDE = "by module replacement, inside a leaf module"


def become(module: nn.Module, new: nn.Module) -> None:
    """Turn a module into another one in place: whatever refers to it, a list or a closure, refers to that one from then on.

    Handles of hooks that were registered on the module go on working. Where the new module wraps the old one, the old one
    lives on inside it, with its hooks.

    Args:
        module: The module, which is changed.
        new: The module that it is to be, which must not be used afterwards.

    Raises:
        TypeError: Python cannot turn the one type into the other; says so.
    """
    if new is module:
        return
    held = vars(module)
    if any(part is module for part in new.modules()):
        held = _move_out(module, new)
    try:
        object.__setattr__(module, "__class__", type(new))
    except TypeError as error:
        raise TypeError(f"a {type(module).__name__} cannot become a {type(new).__name__} in place: {error}.") from error
    state = {name: _refilled(held.get(name), value) for name, value in vars(new).items()}
    vars(module).clear()
    vars(module).update(state)


def _move_out(module: nn.Module, wrapper: nn.Module) -> dict[str, Any]:
    """Put what a module is into a new object, in its places in the wrapper; nothing of it is left to take over."""
    inner = type(module).__new__(type(module))
    vars(inner).update(vars(module))
    for parent in list(wrapper.modules()):
        parent._modules.update({name: inner for name, child in parent._modules.items() if child is module})
    return {}


def _refilled(old: Any, value: Any) -> Any:
    """Return the old dict with the new one's items, since handles of hooks refer to the old one; else the new value."""
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
    """Turn the float layers in some submodules into QAT layers that quantize their own inputs, in place.

    A layer stays the same object, so it stays shared where it has several names.

    Args:
        root: The model, which is changed.
        prefixes: Dotted names of the submodules; "" is the model itself.
        choose: How to quantize a layer.
        table: Float type -> QAT type.
        quantize_inputs: Whether layers get quantizers of their inputs.
        what: Who replaces, for errors.

    Returns:
        The names of the layers that were replaced, each layer's first.
    """
    device = next((tensor.device for tensor in (*root.parameters(), *root.buffers())), None)
    names, replaced = [], set()
    for name, module in modules_in(root, prefixes):
        qat_type = table.get(type(module))
        qconfig = None if qat_type is None or module in replaced else choose(name, module, qat_type)
        if qat_type is not None and qconfig is not None:
            become(module, quantized_layer(module, qat_type, qconfig, name, device, quantize_inputs, what))
            replaced.add(module)
            names.append(name)
    keep_off_fast_paths(root, replaced)
    return names


def keep_off_fast_paths(root: nn.Module, replaced: Collection[nn.Module]) -> None:
    """Keep torch's transformer modules with replaced layers off the kernels and layouts that know no quantizers."""
    fused = [m for m in root.modules() if isinstance(m, nn.TransformerEncoder | nn.TransformerEncoderLayer)]
    for module in fused:
        if not set(module.modules()).isdisjoint(replaced):
            _keep_off_fast_path(module)


def _keep_off_fast_path(module: nn.TransformerEncoder | nn.TransformerEncoderLayer) -> None:
    if isinstance(module, nn.TransformerEncoder):
        module.enable_nested_tensor = module.use_nested_tensor = False
    elif stop_fast_path not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(stop_fast_path)


def modules_in(root: nn.Module, prefixes: Iterable[str]) -> list[tuple[str, nn.Module]]:
    """Return the submodules in (and at) some prefixes with their dotted names in `root`, without what is in QAT layers."""
    pairs = [(p, root.get_submodule(p)) for p in prefixes]
    found = []
    for name, module in pairs:
        found.append((name, module))
        if not isinstance(module, (QuantModule, *QUANTIZERS)):
            pairs += [(f"{name}.{child}" if name else child, m) for child, m in module.named_children()]
    return found


def run(gm: QuantizedGraphModule, rules: LayerRules) -> QuantizedGraphModule:
    """Quantize the layers inside leaf modules. The plan says which, and why others stay float."""
    nodes = leaf_nodes(gm, rules.table)
    names = sorted({str(node.target) for node in nodes})
    replaced: dict[str, LayerDecision] = {}

    def choose(name: str, module: nn.Module, qat_type: type[Any]) -> QConfig | None:
        replaced[name] = decide_inside(name, module, rules)
        return replaced[name].qconfig

    replace_layers(gm, names, choose, rules.table)
    layers = {name: module for name, module in modules_in(gm, names) if _is_layer(module)}
    verdicts = {n: (replaced.get(n) or decide_inside(n, module, rules)).verdict for n, module in layers.items()}
    plan = gm.plan or Plan(rules.backend)
    status = {**plan.status, **{node.name: _summary(str(node.target), verdicts) for node in nodes}}
    gm.plan = dataclasses.replace(plan, status=status, inside={**plan.inside, **verdicts})
    return gm


def decide_inside(name: str, module: nn.Module, rules: LayerRules) -> LayerDecision:
    """Return how a layer inside a leaf module is quantized."""
    if isinstance(module, QuantModule):
        return LayerDecision(None, Verdict.quantized(Cause.REPLACED, INSIDE))
    if type(module) not in rules.table:
        why = "inside a leaf module, where only layers with weights are quantized"
        return LayerDecision(None, Verdict.left_float(Cause.NO_QAT_TYPE, why))
    decision = rules.decide(rules.of_module(name, module), type(module))
    if decision.qconfig is None or decision.qconfig.weight is None:
        return LayerDecision(None, decision.verdict if decision.qconfig is None else BY_CONFIG)
    return LayerDecision(decision.qconfig, Verdict.quantized(Cause.REPLACED, INSIDE))


def leaf_nodes(gm: fx.GraphModule, table: Mapping[type[nn.Module], object]) -> list[fx.Node]:
    """Return the nodes that call leaf modules with submodules of their own: those that tracing did not go into."""
    nodes = [node for node in gm.graph.nodes if node.op == "call_module"]
    return [node for node in nodes if _is_leaf(module_of(node), table)]


def _is_leaf(module: nn.Module, table: Mapping[type[nn.Module], object]) -> bool:
    is_layer = isinstance(module, (QuantModule, *QUANTIZERS)) or type(module) in table or is_batch_norm(module)
    return not is_layer and any(True for _ in module.children())


def _is_layer(module: nn.Module) -> bool:
    has_parts = any(True for _ in module.children())
    return isinstance(module, QuantModule) or not (has_parts or isinstance(module, QUANTIZERS))


def quantized_layer(
    module: nn.Module,
    qat_type: type[Any],
    qconfig: QConfig,
    name: str,
    device: torch.device | None = None,
    quantize_inputs: bool = True,
    what: str = "prepare",
) -> nn.Module:
    """Return the QAT layer of a float one, with a quantizer of its input.

    Args:
        module: The float layer.
        qat_type: Its QAT type.
        qconfig: How it is quantized; the axis of the weight's spec is the weight's own.
        name: What errors call it.
        device: Where its quantizers are if it has no parameters.
        quantize_inputs: Whether inputs are quantized.
        what: Who replaces it, for errors.

    Raises:
        ValueError: A spec does not fit the weight.
        TypeError: The type's `from_float` returns no module.
    """
    layer: Any = from_float(module, qat_type, qconfig.weight, qconfig.activation, name, what)
    takes_indices = kind_of_type(qat_type).takes_indices
    if quantize_inputs and qconfig.activation is not None and hasattr(layer, "input_quantizer") and not takes_indices:
        layer.input_quantizer = TensorQuantizer(qconfig.activation, name=f"{name}.input_quantizer")
    if not quantize_inputs and hasattr(layer, "other_quantizer"):
        layer.other_quantizer = None  # of an op of two tensors, which makes this one itself
    own = next((p.device for p in module.parameters()), device)
    for quantizer in quantizers_of(layer).values() if own is not None else ():
        quantizer.to(own)
    layer.train(module.training)  # its quantizers too
    return layer  # type: ignore[no-any-return]  # from_float has checked it


def _summary(name: str, verdicts: Mapping[str, Verdict]) -> Verdict:
    """Return the verdict on a leaf module by those on the layers in it."""
    layers = [verdict.status for layer, verdict in verdicts.items() if layer.startswith(f"{name}.")]
    count = layers.count(Status.QUANTIZED)
    if not count:
        return Verdict.left_float(Cause.NO_QAT_TYPE, "a leaf module in which no layer is quantized")
    text = f"a leaf module: {count} of {len(layers)} layers in it are quantized, by module replacement"
    return Verdict.quantized(Cause.CONTAINS, text)
