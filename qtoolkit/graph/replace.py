"""Module replacement: QAT layers, each with quantizers of its own, where no graph is: in submodules that are kept whole."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import fx, nn

from qtoolkit.backends import Backend
from qtoolkit.config import Match, QConfig, QConfigMapping
from qtoolkit.frozen import Grid
from qtoolkit.graph.kinds import OTHER, module_of
from qtoolkit.graph.module import QuantizedGraphModule
from qtoolkit.graph.plan import Plan, Status
from qtoolkit.graph.swap import QatModules, from_float, weight_spec_by_rule
from qtoolkit.nn import QAT_MODULES, QuantModule
from qtoolkit.nn.attention import stop_fast_path
from qtoolkit.nn.batch_norm import is_batch_norm
from qtoolkit.quantizer import TensorQuantizer

# Of a layer's name, itself and its QAT type: how to quantize it, with the weight's own axis. None leaves it in float.
Chooser = Callable[[str, nn.Module, type[Any]], QConfig | None]

QUANTIZERS = (TensorQuantizer, Grid)


def replace_layers(root: nn.Module, prefixes: Sequence[str], choose: Chooser, table: QatModules) -> list[str]:
    """Replace the float layers in some submodules by QAT layers that quantize their own inputs.

    A layer that has several names is replaced once, under all the names that it has in `root`, so that it stays shared.

    Args:
        root: The model, which is changed.
        prefixes: Dotted names of the submodules; "" is the model itself.
        choose: How to quantize a layer.
        table: Float type -> QAT type.

    Returns:
        The names of the layers that were replaced, each layer's first.
    """
    new: dict[nn.Module, nn.Module] = {}
    names = []
    for name, module in modules_in(root, prefixes):
        qat_type = table.get(type(module))
        qconfig = None if qat_type is None or module in new else choose(name, module, qat_type)
        if qconfig is not None:
            new[module] = _quantized(module, table[type(module)], qconfig, name)
            names.append(name)
    for name, module in list(root.named_modules(remove_duplicate=False)):
        if module in new:
            root.set_submodule(name, new[module])  # under each name: a plain module sets one at a time
        if isinstance(module, nn.TransformerEncoderLayer) and not new.keys().isdisjoint(module.modules()):
            module.register_forward_pre_hook(stop_fast_path)
    return names


def modules_in(root: nn.Module, prefixes: Iterable[str]) -> list[tuple[str, nn.Module]]:
    """Return the submodules in (and at) some prefixes with their dotted names in `root`, without the inside of QAT layers."""
    pairs = [(p, root.get_submodule(p)) for p in prefixes]
    found = []
    for name, module in pairs:
        found.append((name, module))
        if not isinstance(module, QuantModule):
            pairs += [(f"{name}.{child}" if name else child, m) for child, m in module.named_children()]
    return found


def run(
    gm: QuantizedGraphModule,
    backend: Backend,
    mapping: QConfigMapping | None = None,
    qat_modules: QatModules | None = None,
) -> QuantizedGraphModule:
    """Quantize the layers inside the submodules that tracing kept whole; the plan says what was, and why others were not."""
    table = {**QAT_MODULES, **(qat_modules or {})}
    nodes = kept_whole(gm, table)
    names = sorted({str(node.target) for node in nodes})
    rules = _Rules(gm, names, backend, mapping)
    replace_layers(gm, names, rules.config, table)
    inside = {n: rules.status(n, m, table.get(type(m))) for n, m in modules_in(gm, names) if _is_layer(m)}
    plan = gm.plan or Plan(backend)
    status = {**plan.status, **{node.name: _summary(str(node.target), inside) for node in nodes}}
    gm.plan = dataclasses.replace(plan, status=status, inside={**plan.inside, **inside})
    return gm


def kept_whole(gm: fx.GraphModule, table: Mapping[type[nn.Module], object]) -> list[fx.Node]:
    """Return the nodes that call submodules with submodules of their own: those that tracing did not go into."""
    nodes = [node for node in gm.graph.nodes if node.op == "call_module"]
    return [node for node in nodes if _is_whole(module_of(node), table)]


def names_inside(gm: fx.GraphModule) -> list[str]:
    """Return the dotted names of what is inside the submodules that tracing kept whole."""
    whole = {str(node.target) for node in kept_whole(gm, {})}
    return [name for name, _ in modules_in(gm, sorted(whole)) if name not in whole]


def _is_whole(module: nn.Module, table: Mapping[type[nn.Module], object]) -> bool:
    is_layer = isinstance(module, (QuantModule, *QUANTIZERS)) or type(module) in table or is_batch_norm(module)
    return not is_layer and any(True for _ in module.children())


def _is_layer(module: nn.Module) -> bool:
    has_parts = any(True for _ in module.children())
    return isinstance(module, QuantModule) or not (has_parts or isinstance(module, QUANTIZERS))


def _quantized(module: nn.Module, qat_type: type[Any], qconfig: QConfig, name: str) -> nn.Module:
    layer = from_float(module, qat_type, qconfig.weight, qconfig.activation, name)
    if qconfig.activation is not None and hasattr(layer, "input_quantizer") and qat_type.KIND != "embedding":
        quantizer = TensorQuantizer(qconfig.activation, name=f"{name}.input_quantizer")
        device = next((p.device for p in module.parameters()), None)
        layer.input_quantizer = quantizer.to(device)
    return layer.train(module.training)  # its quantizers too


@dataclasses.dataclass(frozen=True)
class _Rules:
    """How layers inside the submodules `whole` are quantized.

    A rule for such a submodule holds for all layers in it, unless the layer itself has one that is at least as exact.
    """

    gm: QuantizedGraphModule
    whole: Sequence[str]
    backend: Backend
    mapping: QConfigMapping | None

    def config(self, name: str, module: nn.Module, qat_type: type[Any]) -> QConfig | None:
        """Return the config of a layer with its weight's own axis; None leaves it in float."""
        match, own = self._match(name, module)
        qconfig = self.backend.qconfig if match is None else match.qconfig
        weight = weight_spec_by_rule(qconfig, own, getattr(qat_type, "KIND", OTHER), self.backend)
        return None if qconfig is None or weight is None else QConfig(qconfig.activation, weight)

    def status(self, name: str, module: nn.Module, qat_type: type[Any] | None) -> tuple[Status, str]:
        """Return a layer's status once the layers are replaced, with the reason."""
        outer = self._outer(name)
        if isinstance(module, QuantModule):
            return "quantized", f"by module replacement, inside {outer!r}, which is kept whole"
        if qat_type is None:
            return (
                "float",
                f"float: inside {outer!r}, which is kept whole: only layers with weights are quantized there",
            )
        match, _ = self._match(name, module)
        qconfig = self.backend.qconfig if match is None else match.qconfig
        if qconfig is None or qconfig.weight is None:
            return "float", "float: the qconfig_mapping says so"
        return "float", f"float: a {getattr(qat_type, 'KIND', OTHER)}, which {self.backend.name} computes in float"

    def _match(self, name: str, module: nn.Module) -> tuple[Match | None, bool]:
        """Return the rule that holds for a layer, and whether it is one for this very layer."""
        if self.mapping is None:
            return None, False
        outer = self._outer(name)
        own = self.mapping.match(name, type(module))
        general = self.mapping.match(outer, type(self.gm.get_submodule(outer)))
        if own is None or general is None:
            found = own or general
        else:
            rank = self.mapping.SOURCES.index
            found = own if rank(own.source) <= rank(general.source) else general
        return found, found is own and found is not None and found.source != "global"

    def _outer(self, name: str) -> str:
        return next(outer for outer in self.whole if name == outer or name.startswith(f"{outer}."))


def _summary(name: str, inside: Mapping[str, tuple[Status, str]]) -> tuple[Status, str]:
    """Return the status of a submodule that is kept whole."""
    layers = [status for layer, (status, _) in inside.items() if layer.startswith(f"{name}.")]
    count = layers.count("quantized")
    if not count:
        return "float", "float: kept whole, and no layer in it is quantized"
    return "quantized", f"kept whole: {count} of {len(layers)} layers in it quantized, by module replacement"
