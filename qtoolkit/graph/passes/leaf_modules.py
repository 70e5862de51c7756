"""Module replacement in leaf modules: the layers inside the submodules that tracing does not go into."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx, nn

from qtoolkit.backends import Backend
from qtoolkit.config import Match, QConfig, QConfigMapping
from qtoolkit.eager.replacement import modules_in, replace_layers
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.graph.passes.swap import QatModules, weight_spec_by_rule
from qtoolkit.graph.plan import Plan, Status
from qtoolkit.nn import QAT_MODULES, QuantModule
from qtoolkit.nn.batch_norm import is_batch_norm
from qtoolkit.nn.module import Quantizer
from qtoolkit.op_kinds.nodes import OTHER, module_of


def run(
    gm: QuantizedGraphModule,
    backend: Backend,
    mapping: QConfigMapping | None = None,
    qat_modules: QatModules | None = None,
) -> QuantizedGraphModule:
    """Quantize the layers inside leaf modules; the plan has the status of each layer and its reason."""
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
    is_layer = isinstance(module, QuantModule | Quantizer) or type(module) in table or is_batch_norm(module)
    return not is_layer and any(True for _ in module.children())


def _is_layer(module: nn.Module) -> bool:
    has_parts = any(True for _ in module.children())
    return isinstance(module, QuantModule) or not (has_parts or isinstance(module, Quantizer))


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
