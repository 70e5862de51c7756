"""The convert pass: fold linked batch norms, and freeze every quantizer."""

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from qtoolkit.errors import some, warn
from qtoolkit.graph.capture.rewrites.both_modes import keep_eval
from qtoolkit.graph.graph_module import QuantizedGraphModule, plan_in
from qtoolkit.graph.passes import link_inputs
from qtoolkit.graph.passes.link_batch_norms import fold
from qtoolkit.model_state import check_numbers
from qtoolkit.nn import QuantWeighted
from qtoolkit.nn.batch_norm import identity_of
from qtoolkit.nn.computed_weights import bake
from qtoolkit.nn.layers.embedding import renormalize_table
from qtoolkit.nn.module import QuantModule
from qtoolkit.nn.replacement import replace_in_place
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.quantizers.quantizer import named_quantizers
from qtoolkit.quantizers.tensor_quantizer import quantizers_of, take_names

M = TypeVar("M", bound=nn.Module)


def run(model: M) -> M:
    """Fold linked batch norms, replace quantizers by their frozen grids, and switch to eval mode.

    Weights that masks or parametrizations compute become plain parameters, and tables with `max_norm` are renormalized.

    In a model without a graph every module stays the same object, and a folded batch norm becomes an Identity. Parts that were
    prepared are folded by their graphs. Raises RuntimeError: a quantizer saw no data; ValueError: a scale is not positive and
    finite.
    """
    model.eval()
    for module in list(model.modules()):
        bake(module)
        renormalize_table(module)
        for layer in module.layers_of_weights().values() if isinstance(module, QuantModule) else ():
            layer.update_channels(None)
    graphs = [part for part in model.modules() if isinstance(part, QuantizedGraphModule)]
    for gm in graphs:
        _run_on_graph(gm)
    if model not in graphs:
        _run_on_modules(model)
    _fit_biases(model)
    return model.eval()


def restore(model: M, state: Mapping[str, Tensor]) -> M:
    """Convert a model, with the weights and scales of a state dict of its converted form.

    Raises RuntimeError: the entries of the state dict are not the converted model's; ValueError: a scale is not positive
    and finite, or a quantizer's spec differs; TypeError: a scale or a zero point is no tensor of numbers.
    """
    quantizers = quantizers_of(model)
    take_names(quantizers)
    for name, quantizer in quantizers.items():
        if quantizer.dynamic:
            continue
        inner = name if quantizer.capability.direct or quantizer.of_weight else f"{name}.grid"
        scale, zero_point = state.get(f"{inner}.scale"), state.get(f"{inner}.zero_point")
        if scale is None:
            raise RuntimeError(
                f"convert: state_dict has no entry '{inner}.scale'; it must come from a model converted from the same float "
                f"model, backend and QConfigMapping (load a prepared model's by prepared.load_state_dict)."
            )
        for entry, value in ((f"{inner}.scale", scale), (f"{inner}.zero_point", zero_point)):
            if value is not None:
                check_numbers("convert: state_dict", entry, value)
        quantizer.load_grid(scale, zero_point)
    converted = run(model)
    converted.load_state_dict(state)
    _warn_of_rounded_scales(converted, state)
    return converted


def _warn_of_rounded_scales(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Warn of scales of a state dict that the model has as float16 numbers, with how many quantized weights they change."""
    names, moved, count = [], 0, 0
    for name, grid in named_quantizers(model, Grid).items():
        given = state[f"{name}.scale"].to(grid.scale)
        if torch.equal(given, grid.scale):
            continue
        names.append(repr(name))
        layer, attribute = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        if grid.of_weight and isinstance(layer, QuantModule):
            weight = layer.quantized_weights()[attribute][1]
            exact = Grid(given, grid.zero_point, grid.spec.with_(scale_dtype="float32"), grid.group, shape=grid.shape)
            moved, count = moved + int((exact.codes(weight) != grid.codes(weight)).sum()), count + weight.numel()
    if names:
        warn(
            f"convert: the state_dict has float32 scales, and the model's scale_dtype is 'float16': scales of {some(names)} "
            f"are rounded, which changes {moved:,} of {count:,} quantized weights. Evaluate the model before it is deployed.",
        )


def _fit_biases(model: nn.Module) -> None:
    """Enlarge the scales of weights where a quantized bias exceeds int32, and warn of them."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, QuantWeighted)]
    for gm in (part for part in model.modules() if isinstance(part, QuantizedGraphModule)):
        layers += link_inputs.layers_of_functions(gm)
    enlarged = {name: count for name, layer in layers if (count := layer.fit_bias())}
    if enlarged:
        warn(
            f"convert: the biases of {', '.join(f'{name!r} ({count} scales)' for name, count in enlarged.items())} do not fit "
            f"in int32 in steps of the input's scale times the weight's; these scales of the weights are larger than in "
            f"training. Their channels have weights close to zero.",
        )


def _run_on_graph(gm: QuantizedGraphModule) -> None:
    fold(gm, gm.linked_batch_norms())
    keep_eval(gm.graph)
    for name, quantizer in quantizers_of(gm).items():
        gm.set_submodule(name, quantizer.to_grid())
    if plan_in(gm) is not None:
        link_inputs.run(gm, gm.plan.backend)  # to the grids
    gm.graph.lint()
    gm.recompile()


def _run_on_modules(model: nn.Module) -> None:
    for layer in list(model.modules()):
        if isinstance(layer, QuantWeighted) and layer.batch_norm is not None:
            bn = layer.batch_norm
            layer.fold_batch_norm(bn)
            replace_in_place(bn, identity_of(bn))
    quantizers = quantizers_of(model)
    take_names(quantizers)
    for quantizer in quantizers.values():
        replace_in_place(quantizer, quantizer.to_grid())
