"""The layers that a config takes out of the target's integer kernels."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain

from torch import nn

from qtoolkit.backends import Backend
from qtoolkit.eager.record import plans_in
from qtoolkit.errors import some, warn
from qtoolkit.graph.graph_module import QuantizedGraphModule, plan_in
from qtoolkit.graph.nodes import name_of, tensor_inputs
from qtoolkit.graph.passes.integers import expected_grid, output_of, reached_quantizer
from qtoolkit.graph.placement.traversal import quantizer_behind
from qtoolkit.graph.plan import Plan
from qtoolkit.lint.layers import refused_bits
from qtoolkit.nn import QuantWeighted
from qtoolkit.nn.refusals import FLOAT_OUTPUT, NOT_DIRECT, OTHER_AXIS, refusal_of
from qtoolkit.op_kinds.rules import called_module, module_of
from qtoolkit.quantizers.capability import NO_CODES
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.quantizers.quantizer import Quantizer
from qtoolkit.runtimes.table import RUNTIMES, TENSORRT
from qtoolkit.verdicts import Cause, Refusal

NOT_SATURATED = Refusal(
    Cause.OUTPUT_CODES,
    "the activation after it clips at other values than the range of its output (symmetric=True, signed)",
)
# The causes that a config decides on.
OF_CONFIG = (Cause.INPUT_CODES, Cause.WEIGHT_CODES, Cause.OUTPUT_CODES)

Found = Iterator[tuple[str, QuantWeighted, Refusal | None]]


def lost_kernels(model: nn.Module) -> tuple[str, ...]:
    """Return how many layers a target computes in float because of the configs of the user, for each kind and each reason.

    Args:
        model: The result of `qtoolkit.prepare`, `qtoolkit.quant_modules.replace` or `qtoolkit.convert`. Layers whose weight or
            whose input a config leaves in float are not counted.

    Example:
        >>> import warnings
        >>> mapping = qt.QConfigMapping().set_global(qt.QConfig(qt.QuantSpec(bits=16), qt.QuantSpec()))
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> with warnings.catch_warnings(action="ignore"):
        ...     prepared = qt.prepare(model, torch.zeros(1, 4), backend="onnxruntime", qconfig_mapping=mapping)
        >>> lost_kernels(prepared)[0]
        "2 of 2 linear layers ('0', '1'): its inputs are not quantized to integers of at most 8 bits with one scale"
    """
    of_kind, lost = Counter[str](), defaultdict[tuple[str, str], list[str]](list)
    found = {layer: (name, refusal) for name, layer, refusal in _refusals(model)}  # once each, though plans overlap
    for layer, (name, refusal) in found.items():
        of_kind[str(layer.OP_KIND)] += 1
        if refusal is not None:
            lost[str(layer.OP_KIND), refusal.text].append(name)
    return tuple(
        f"{len(names)} of {of_kind[kind]} {kind} layers ({some(list(map(repr, names)))}): {why}"
        for (kind, why), names in lost.items()
    )


def warn_of_lost_kernels(what: str, model: nn.Module, backend: Backend, known: Sequence[str] = ()) -> None:
    """Warn once of all layers that the configs of the user take out of the integer kernels.

    `what` is the public function, and `known` the result of `lost_kernels` for the model before it.
    """
    lost = lost_kernels(model)
    if lost and set(lost) != set(known):
        warn(
            f"{what}: the qconfig_mapping takes layers out of the integer kernels of {backend.name}, which computes them in "
            f"float: {'; '.join(lost)}. Fields that a QuantSpec leaves out get the values that the kernels take.",
        )


def _refusals(model: nn.Module) -> Found:
    """Yield the quantized layers with why the target computes them in float, by name; None where it does not by a config."""
    for prefix, part in model.named_modules():
        if isinstance(part, QuantizedGraphModule) and plan_in(part) is not None and part.plan.mapping is not None:
            yield from _below(prefix, chain(_in_graph(part, part.plan), _replaced(part, part.plan.backend)))
    for prefix, plan in plans_in(model):
        if plan.mapping is not None:
            yield from _below(prefix, _replaced(model.get_submodule(prefix), plan.backend))


def _below(prefix: str, found: Found) -> Found:
    return ((f"{prefix}.{name}".strip("."), layer, refusal) for name, layer, refusal in found)


def _in_graph(gm: QuantizedGraphModule, plan: Plan) -> Found:
    seen, runtime = set(), RUNTIMES.get(plan.backend.runtime or "")
    for node in gm.graph.nodes:
        layer, sources = called_module(node), tensor_inputs(node)
        if not isinstance(layer, QuantWeighted) or layer.input_quantizer is not None or layer in seen or not sources:
            continue
        seen.add(layer)
        behind = quantizer_behind(sources[0], plan.backend)
        source = None if behind is None else module_of(behind)
        if _is_quantized(layer) and isinstance(source, Quantizer):
            output = None if runtime is None else output_of(node, runtime)[1]
            clips = runtime is not None and output is None and reached_quantizer(node, runtime) is not None
            refusal = _refusal(layer, source, output, plan.backend)
            yield name_of(node), layer, NOT_SATURATED if refusal is FLOAT_OUTPUT and clips else _of_config(refusal)


def _replaced(model: nn.Module, backend: Backend) -> Found:
    for name, layer in model.named_modules():
        if isinstance(layer, QuantWeighted) and layer.input_quantizer is not None and _is_quantized(layer):
            yield name, layer, _of_config(_refusal(layer, layer.input_quantizer, None, backend))


def _is_quantized(layer: QuantWeighted) -> bool:
    return layer.weight_quantizer is not None and layer.OP_KIND.layer and not layer.OP_KIND.takes_indices


def _refusal(layer: QuantWeighted, source: Quantizer, output: Grid | None, backend: Backend) -> Refusal | None:
    """Return why a target computes a layer with these quantizers in float, calibrated or not; None where it does not."""
    weight, runtime = layer.weight_quantizer, RUNTIMES.get(backend.runtime or "")
    bits = None if weight is None else refused_bits(weight.spec.bits, backend)
    if weight is None or runtime is None or bits is not None:
        return None if bits is None else Refusal(Cause.WEIGHT_CODES, bits)
    if TENSORRT.runs(backend) and source.spec.format != "int":  # it has kernels of small floats
        return None
    if source.capability is NO_CODES:
        return NOT_DIRECT
    refusal = refusal_of(layer, weight.capability, source.capability)
    if refusal is OTHER_AXIS and layer.OP_KIND.transposed and weight.spec.axis == backend.conv_transpose_axis:
        return None  # the axis that the target takes
    kernel = refusal or runtime.layer_kernel(layer, expected_grid(source), output)
    return kernel if isinstance(kernel, Refusal) else None


def _of_config(refusal: Refusal | None) -> Refusal | None:
    by_config = refusal is not None and refusal is not FLOAT_OUTPUT and refusal.cause in OF_CONFIG
    return refusal if by_config else None
