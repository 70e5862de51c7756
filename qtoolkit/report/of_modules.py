"""The report of a model without a graph: replaced by `qtoolkit.quant_modules`, or with quantizers of custom modules."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from qtoolkit.eager.functions import verdict_on
from qtoolkit.eager.record import chains_of, kinds_in, plan_of, records_in, verdicts_in
from qtoolkit.errors import with_article
from qtoolkit.foreign import ForeignQuantizer
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.graph.nodes import kind_of_module
from qtoolkit.nn import LinkedBatchNorm, QuantModule, replaced_modules
from qtoolkit.quantizers.quantizer import Quantizer, named_quantizers
from qtoolkit.report.lines import LayerLine, QuantizationReport, TensorLine, spec_of, training_of, weight_of
from qtoolkit.report.of_graph import report_of_graph
from qtoolkit.shared_modules import first_names
from qtoolkit.verdicts import FOLDED, Cause, Status, Verdict

# Quantizers of the output of a module, which `quant_modules.replace(quantize="outputs")` adds.
OUTPUTS = ("output_quantizer", "activation_post_process")


def report_of_modules(model: nn.Module) -> QuantizationReport:
    """Return the report of a model without a graph. A submodule that was prepared separately is reported from its graph.

    Raises TypeError: the model was not replaced and has no quantizers.
    """
    if plan_of(model) is None and not any(
        isinstance(module, QuantModule) or _owns(module) for module in model.modules()
    ):
        raise TypeError(
            f"quantization_report: model must be what qtoolkit.prepare, qtoolkit.quant_modules.replace or qtoolkit.convert "
            f"returned, got {with_article(type(model))} without quantizers."
        )
    recorded, kinds = verdicts_in(model), kinds_in(model)
    names = first_names(model)
    found = dict(_layers_in(model, recorded))
    layers = []
    for name, module in found.items():
        known = None if _foreign_in(module) else recorded.get(name)
        verdict = _verdict(module) if known is None or _is_changed(known, module, kinds.get(name)) else known
        layers.append(_line(name, module, verdict, name in recorded, names))
    layers = _joined(layers, chains_of(model))
    taken = {
        f"{part}.{name}".strip("."): by for part, record in records_in(model) for name, by in record.functions.items()
    }
    layers += [LayerLine(name, function, "", (), verdict_on(function)) for name, function in taken.items()]
    tensors = list(_tensor_lines(found, names))
    for part, name in names.items():
        if isinstance(part, QuantizedGraphModule):
            inside = report_of_graph(part)
            layers += [line.within(name) for line in inside.layers]
            tensors += [line.within(name) for line in inside.tensors]
    return QuantizationReport(tuple(layers), tuple(tensors))


def _is_changed(verdict: Verdict, module: nn.Module, kind: str | None) -> bool:
    """Return whether a module differs from the module of a recorded verdict: of another kind, or with or without quantizers."""
    if kind not in (None, str(kind_of_module(module))) and not isinstance(module, nn.Identity):  # a folded batch norm
        return True
    if verdict.status is Status.FLOAT:
        return isinstance(module, QuantModule) and bool(_called_quantizers(module))
    has_own = verdict.status is Status.QUANTIZED and verdict.cause in (Cause.COMPUTED, Cause.REPLACED)
    return has_own and not _called_quantizers(module)


def _joined(layers: Sequence[LayerLine], chains: Sequence[tuple[str, ...]]) -> list[LayerLine]:
    """Move the quantizers of each chain to its first layer, whose config also controls the output of the last one."""
    heads = {name: chain[0] for chain in chains for name in chain[1:]}
    given: dict[str, tuple[str, ...]] = defaultdict(tuple)
    for line in layers:
        given[heads.get(line.name, line.name)] += line.quantizers
    return [replace(line, quantizers=() if line.name in heads else given[line.name]) for line in layers]


def _layers_in(model: nn.Module, recorded: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers, and the modules that call quantizers themselves, each with its first name."""
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, (QuantModule, QuantizedGraphModule, Quantizer)):
            inside.update(part for part in module.modules() if part is not module)
        apart = module in inside or isinstance(module, (QuantizedGraphModule, Quantizer))
        if not apart and (name in recorded or _is_layer(module)):
            yield name, module


def _is_layer(module: nn.Module) -> bool:
    is_leaf = not any(True for _ in module.children())
    return is_leaf or isinstance(module, QuantModule) or type(module) in replaced_modules() or _owns(module)


def _owns(module: nn.Module) -> bool:
    """Return whether a module that is not a container of modules holds quantizers."""
    has_forward = not isinstance(module, (nn.ModuleList, nn.ModuleDict, Quantizer))
    return has_forward and bool(_called_quantizers(module) or _foreign_in(module))


def _called_quantizers(module: nn.Module) -> dict[str, Quantizer]:
    """Return the quantizers that a module calls, by relative name: all of a QAT layer, direct children of other modules."""
    if isinstance(module, QuantModule):
        return named_quantizers(module)
    found: dict[str, Quantizer] = {}
    for name, part in module.named_children():
        if isinstance(part, Quantizer):
            found[name] = part
        elif isinstance(part, nn.ModuleList | nn.ModuleDict):
            found |= {f"{name}.{path}": quantizer for path, quantizer in _called_quantizers(part).items()}
    return found


def _foreign_in(module: nn.Module) -> list[ForeignQuantizer]:
    parts = module.modules() if isinstance(module, QuantModule) else module.children()
    return [part for part in parts if isinstance(part, ForeignQuantizer)]


def _weights_in(module: nn.Module) -> Mapping[str, Quantizer]:
    return module.weight_quantizers() if isinstance(module, QuantModule) else {}


def _line(name: str, module: nn.Module, verdict: Verdict, recorded: bool, names: Mapping[nn.Module, str]) -> LayerLine:
    quantizers = {path: names[quantizer] for path, quantizer in _called_quantizers(module).items()}
    inputs = tuple(dict.fromkeys(full for path, full in quantizers.items() if path not in _weights_in(module)))
    decided = quantizers.values() if recorded or isinstance(module, QuantModule) else ()
    kind, weight = str(kind_of_module(module)), weight_of(module)
    return LayerLine(name, kind, weight, inputs, verdict, tuple(decided), *training_of(module))


def _verdict(module: nn.Module) -> Verdict:
    """Return the verdict on a module without a recorded one."""
    kind = type(module).__name__
    foreign = _foreign_in(module)
    if foreign:
        return Verdict.quantized(Cause.REPLACED, f"by the quantizers of {foreign[0].PACKAGE}")
    if isinstance(module, LinkedBatchNorm):
        return FOLDED
    if _called_quantizers(module):
        if isinstance(module, QuantModule):
            return Verdict.quantized(Cause.REPLACED, "by module replacement")
        return Verdict.quantized(Cause.OWN_QUANTIZER, f"by quantizers that {kind} calls itself")
    if type(module) in replaced_modules() or isinstance(module, QuantModule):
        return Verdict.left_float(Cause.IGNORED, "built while replacement was off, excluded, or added later")
    bases = [base.__name__ for base in replaced_modules() if isinstance(module, base)]
    if bases:
        why = f"{kind} is a subclass of {bases[0]}, whose forward may compute anything"
        return Verdict.left_float(Cause.NO_QAT_TYPE, why)
    return Verdict.left_float(Cause.NO_QAT_TYPE, f"no QAT module for {kind}")


def _tensor_lines(layers: Mapping[str, nn.Module], names: Mapping[nn.Module, str]) -> Iterator[TensorLine]:
    """Yield a line for each tensor that a layer quantizes."""
    found = [
        (layer, path, quantizer)
        for layer, module in layers.items()
        for path, quantizer in _called_quantizers(module).items()
        if path not in _weights_in(module)
    ]
    for layer, path, quantizer in found:
        others = tuple(_source(*pair[:2]) for pair in found if pair[2] is quantizer and pair[:2] != (layer, path))
        takers = () if path in OUTPUTS else (layer,)
        yield TensorLine(names[quantizer], _source(layer, path), takers, spec_of(quantizer), others)


def _source(layer: str, path: str) -> str:
    """Return a name for a tensor that a layer quantizes; its output has the name of the layer."""
    return layer if path in OUTPUTS else f"{layer}.{path.removesuffix('_quantizer')}".lstrip(".")
