"""Replace float layers by QAT layers, by table and by the user's mapping; note what stays float, and why."""

from collections.abc import Mapping
from dataclasses import replace

from torch import fx, nn

from qtoolkit.backends import Backend
from qtoolkit.config import QConfig, QConfigMapping, QuantSpec
from qtoolkit.graph.ends import at_ends
from qtoolkit.graph.kinds import WEIGHTED_KINDS, kind_of, module_of, object_type_of
from qtoolkit.graph.module import QuantizedGraphModule
from qtoolkit.nn import QAT_MODULES, QuantWeighted

QatModules = Mapping[type[nn.Module], type[QuantWeighted]]


def name_of(node: fx.Node) -> str:
    """Return what a user calls a node: its module's dotted name, or the node's own name."""
    return str(node.target) if node.op == "call_module" else node.name


def config_of(node: fx.Node, backend: Backend, mapping: QConfigMapping | None) -> QConfig | None:
    """Return the config that holds for a node: the mapping's, else the backend's default."""
    match = mapping.match(name_of(node), object_type_of(node)) if mapping is not None else None
    if match is not None and match.source != "global":
        return match.qconfig
    qconfig = backend.qconfig if match is None else match.qconfig
    return qconfig if backend.end_bits is None else at_ends(node, qconfig, backend.end_bits)


def weight_spec(node: fx.Node, backend: Backend, mapping: QConfigMapping | None) -> QuantSpec | None:
    """Return the spec of a layer's weight.

    Axis 0 of a default, or of a global rule, stands for the output channel, and (with a group_size) axis 1 for the input
    channel, whatever axes those are in the layer's weight; a rule for a type or a name says the axis itself.
    """
    qconfig = config_of(node, backend, mapping)
    if qconfig is None or qconfig.weight is None or _is_float_to(node, backend, mapping):
        return None
    match = mapping.match(name_of(node), object_type_of(node)) if mapping is not None else None
    general = match is None or match.source == "global"
    if not general or kind_of(node) != "conv_transpose":
        return qconfig.weight
    return _for_conv_transpose(qconfig.weight, backend)


def _for_conv_transpose(spec: QuantSpec, backend: Backend) -> QuantSpec:
    # Its weight is (in, out / groups, k...).
    if spec.group_size is None:
        return replace(spec, axis=backend.conv_transpose_axis) if spec.axis == 0 else spec
    return replace(spec, axis=1 - spec.axis) if spec.axis in (0, 1) else spec


def run(
    gm: QuantizedGraphModule,
    backend: Backend,
    mapping: QConfigMapping | None = None,
    qat_modules: QatModules | None = None,
) -> QuantizedGraphModule:
    """Replace each float layer that the config quantizes and the table knows. A shared layer stays shared.

    Raises:
        ValueError: A spec does not fit a layer's weight.
    """
    table = {**QAT_MODULES, **(qat_modules or {})}
    for node in gm.graph.nodes:
        if node.op != "call_module" or kind_of(node) not in WEIGHTED_KINDS:
            continue
        module = module_of(node)
        spec = weight_spec(node, backend, mapping)
        if spec is None or isinstance(module, QuantWeighted) or type(module) not in table:
            continue
        gm.set_submodule(str(node.target), table[type(module)].from_float(module, spec, str(node.target)))
    return gm


def reason_float(node: fx.Node, backend: Backend, mapping: QConfigMapping | None) -> str | None:
    """Return why a layer has a float weight, or None where its weight is quantized."""
    if isinstance(module_of(node), QuantWeighted):
        return None
    if _is_float_to(node, backend, mapping):
        return f"a {kind_of(node)}, which {backend.name} computes in float"
    qconfig = config_of(node, backend, mapping)
    return "the qconfig_mapping says so" if qconfig is None or qconfig.weight is None else "no QAT module for its type"


def _is_float_to(node: fx.Node, backend: Backend, mapping: QConfigMapping | None) -> bool:
    # A rule of the user's own, by name, regex or type, holds against the backend's table.
    match = mapping.match(name_of(node), object_type_of(node)) if mapping is not None else None
    return (match is None or match.source == "global") and backend.roles.get(kind_of(node), "float") == "float"
