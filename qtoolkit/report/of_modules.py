"""The report of a model without a graph: replaced by `qtoolkit.quant_modules`, or with quantizers of its user's."""

from collections.abc import Iterator, Mapping

from torch import nn

from qtoolkit.graph.kinds import kind_of_module
from qtoolkit.graph.plan import Plan, Status, plan_of
from qtoolkit.nn import REPLACED_MODULES, LinkedBatchNorm, QuantModule
from qtoolkit.nn.module import Quantizer
from qtoolkit.quantizer import is_legacy_quantizer
from qtoolkit.report.lines import (
    QUANTIZERS,
    LayerLine,
    QuantizationReport,
    TensorLine,
    quantizers_in,
    spec_of,
    weight_of,
)

# Quantizers of what a module gives: `quant_modules.replace(quantize="outputs")` puts them there.
OUTPUTS = ("output_quantizer", "activation_post_process")


def report_of_modules(model: nn.Module) -> QuantizationReport:
    """Return the report of a model without a graph.

    Raises:
        TypeError: It was not replaced, and has no quantizer.
    """
    plan = plan_of(model)
    if plan is None and not any(isinstance(module, QuantModule) or _owns(module) for module in model.modules()):
        raise TypeError(
            f"quantization_report: model must be what qtoolkit.prepare, qtoolkit.quant_modules.replace or qtoolkit.convert "
            f"returned, got a {type(model).__name__} without quantizers."
        )
    names = {module: name for name, module in model.named_modules()}
    found = dict(_layers_in(model))
    layers = [_line(name, module, plan, names) for name, module in found.items()]
    return QuantizationReport(tuple(layers), tuple(_tensor_lines(found, names)))


def _layers_in(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return what has a line, each by its first name: layers, and modules that call quantizers of their own."""
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, (QuantModule, *QUANTIZERS)):
            inside.update(part for part in module.modules() if part is not module)
        is_layer = isinstance(module, QuantModule) or not any(True for _ in module.children()) or _owns(module)
        if is_layer and module not in inside and not isinstance(module, QUANTIZERS):
            yield name, module


def _owns(module: nn.Module) -> bool:
    """Return whether a module, itself no list of others, holds quantizers."""
    has_forward = not isinstance(module, (nn.ModuleList, nn.ModuleDict, *QUANTIZERS))
    return has_forward and (bool(_quantizers_of(module)) or _is_legacy(module))


def _quantizers_of(module: nn.Module) -> dict[str, Quantizer]:
    """Return the quantizers that a module calls, by their names in it: a QAT layer's all, else those right in it."""
    if isinstance(module, QuantModule):
        return quantizers_in(module)
    found: dict[str, Quantizer] = {}
    for name, part in module.named_children():
        if isinstance(part, QUANTIZERS):
            found[name] = part
        elif isinstance(part, nn.ModuleList | nn.ModuleDict):
            found |= {f"{name}.{path}": quantizer for path, quantizer in _quantizers_of(part).items()}
    return found


def _is_legacy(module: nn.Module) -> bool:
    parts = module.modules() if isinstance(module, QuantModule) else module.children()
    return any(is_legacy_quantizer(part) for part in parts)


def _weights_in(module: nn.Module) -> Mapping[str, Quantizer]:
    return module.weight_quantizers() if isinstance(module, QuantModule) else {}


def _line(name: str, module: nn.Module, plan: Plan | None, names: Mapping[nn.Module, str]) -> LayerLine:
    recorded = None if plan is None else plan.inside.get(name)
    status, reason = recorded or _status(module, plan is not None)
    quantizers = {path: names[quantizer] for path, quantizer in _quantizers_of(module).items()}
    inputs = tuple(dict.fromkeys(full for path, full in quantizers.items() if path not in _weights_in(module)))
    decided = quantizers.values() if recorded or isinstance(module, QuantModule) else ()
    return LayerLine(name, kind_of_module(module), weight_of(module), inputs, status, reason, tuple(decided))


def _status(module: nn.Module, replaced: bool) -> tuple[Status, str]:
    """Return the status of a module of which there is no record."""
    kind = type(module).__name__
    if _is_legacy(module):
        return "quantized", "by the quantizers of qtoolkit.compat.pytorch_quantization"
    if isinstance(module, LinkedBatchNorm):
        return "quantized", "folded into the layer before it"
    if _quantizers_of(module):
        by = "module replacement" if isinstance(module, QuantModule) else f"quantizers that {kind} calls itself"
        return "quantized", f"by {by}"
    if type(module) in REPLACED_MODULES or isinstance(module, QuantModule):
        when = "added after the model was replaced" if replaced else "built while replacement was off, or ignored"
        return "float", f"float: {when}"
    bases = [base.__name__ for base in REPLACED_MODULES if isinstance(module, base)]
    if bases:
        return "float", f"float: {kind} is a subclass of {bases[0]}, whose forward may compute anything"
    return "float", f"float: no QAT module for {kind}"


def _tensor_lines(layers: Mapping[str, nn.Module], names: Mapping[nn.Module, str]) -> Iterator[TensorLine]:
    """Yield a line for each tensor that a layer quantizes; they have names of their own."""
    found = [
        (layer, path, quantizer)
        for layer, module in layers.items()
        for path, quantizer in _quantizers_of(module).items()
        if path not in _weights_in(module)
    ]
    for layer, path, quantizer in found:
        others = tuple(_source(*pair[:2]) for pair in found if pair[2] is quantizer and pair[:2] != (layer, path))
        takers = () if path in OUTPUTS else (layer,)
        yield TensorLine(names[quantizer], _source(layer, path), takers, spec_of(quantizer), others)


def _source(layer: str, path: str) -> str:
    """Return a name for a tensor that a layer quantizes: its own for what it gives."""
    return layer if path in OUTPUTS else f"{layer}.{path.removesuffix('_quantizer')}".lstrip(".")
