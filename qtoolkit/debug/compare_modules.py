"""The comparison of a float and a quantized model without a graph: the calls of their layers, side by side."""

from typing import Any

import torch
from torch import nn

from qtoolkit.debug.similarity import Calls, Comparison, LayerComparison, compare_calls, note_worst, watching
from qtoolkit.eager.record import chains_of
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.model_inputs import call_arguments, naming_misfits
from qtoolkit.model_state import evaluating
from qtoolkit.nn.batch_norm import is_batch_norm
from qtoolkit.progress import progress_bar
from qtoolkit.quantizers.switches import freeze_ranges
from qtoolkit.report import quantization_report
from qtoolkit.shared_modules import modules_by_name


def compare_modules(float_model: nn.Module, quantized: nn.Module, inputs: Any, progress: bool) -> Comparison:
    """Compare the quantized layers of a model without a graph with those of the float model (see `compare`)."""
    args, kwargs = call_arguments(quantized, inputs, "compare: inputs do")
    names = _layers(float_model, quantized)
    followers = _batch_norms(float_model, quantized)
    with torch.no_grad(), evaluating(float_model), evaluating(quantized), freeze_ranges(quantized):
        with (
            naming_misfits(float_model, inputs, "compare: inputs do"),
            watching(float_model, [*names, *followers.values()]) as float_calls,
        ):
            expected = float_model(*args, **kwargs)
        with watching(quantized, names) as calls:
            result = quantized(*args, **kwargs)
        with progress_bar("compare", "layers", progress, names) as bar:
            layers: list[LayerComparison] = []
            for name in bar:
                layers += _compared(quantized, name, followers.get(name, name), float_calls, calls)
                note_worst(bar, layers)
    return Comparison.of(layers, [expected], [result])


def _layers(float_model: nn.Module, quantized: nn.Module) -> list[str]:
    """Return the names of the quantized layers that both models have."""
    for name, part in quantized.named_modules():
        if isinstance(part, QuantizedGraphModule):
            raise ValueError(
                f"compare: submodule {name!r} was prepared separately, with a graph of its own; compare it with the float "
                f"model's {name!r}, on its own inputs."
            )
    known = modules_by_name(float_model)
    names = [line.name for line in quantization_report(quantized).quantized]
    missing = [name for name in names if name not in known]
    if missing:
        raise ValueError(
            f"compare: the float model has no {', '.join(missing)}; pass the model that "
            f"qtoolkit.quant_modules.replace was given."
        )
    return names


def _batch_norms(float_model: nn.Module, quantized: nn.Module) -> dict[str, str]:
    """Return the batch norm of the float model that each layer of a chain applies itself, by the layer's name."""
    known = modules_by_name(float_model)
    pairs = ((head, name) for head, *rest in chains_of(quantized) for name in rest)
    return {head: name for head, name in pairs if name in known and is_batch_norm(known[name])}


def _compared(quantized: nn.Module, name: str, last: str, float_calls: Calls, calls: Calls) -> list[LayerComparison]:
    """Return the comparison of a layer, whose float counterpart ends with the module `last`; nothing if it is not called."""
    counts = len(float_calls[name]), len(float_calls[last]), len(calls[name])
    if len(set(counts)) > 1:
        raise ValueError(
            f"compare: layer {name!r} is called {counts[0]} times in the float model and {counts[2]} times in the quantized "
            f"one, so forward branches on values; pass inputs for which both take the same branch."
        )
    return [compare_calls(quantized, name, last, float_calls, calls)] if calls[name] else []
