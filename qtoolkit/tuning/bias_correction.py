"""bias_correction(): remove the shift of layers' outputs that quantization causes (arXiv 1906.04721, section 4.2)."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from qtoolkit.batches import not_finite
from qtoolkit.errors import check_flags, check_known, with_article
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.graph.module_calls import ModuleCalls
from qtoolkit.graph.nodes import bounds_of, is_quantizer, kind_of
from qtoolkit.model_state import check_module, removing
from qtoolkit.nn import LinkedBatchNorm, QuantModule, QuantWeighted
from qtoolkit.op_kinds.rules import called_module
from qtoolkit.progress import batches_of, note, progress_bar
from qtoolkit.quantizers.switches import disable_quantization
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer
from qtoolkit.report.lines import table
from qtoolkit.shared_modules import first_names, owners_of_parameters
from qtoolkit.tuning.rounding.earlier import warn_before_correction
from qtoolkit.tuning.rounding.units import obstacles_of_functions
from qtoolkit.tuning.runs.batches import Batches, Forward, tuning
from qtoolkit.tuning.runs.stepwise import LayerRuns
from qtoolkit.verdicts import Obstacle

SEVERAL_CALLS = "the model calls it several times"


@dataclass(frozen=True)
class BiasCorrection:
    """The result of `bias_correction`. It prints as a table.

    Attributes:
        method: "empirical" or "analytic".
        shifts: The largest shift of a channel's mean that was removed, by layer.
        skipped: The reason for each layer with an unchanged bias, by layer.
    """

    method: str
    shifts: Mapping[str, float]
    skipped: Mapping[str, str]

    def __str__(self) -> str:
        rows = table([("layer", "largest shift"), *((name, f"{shift:.3e}") for name, shift in self.shifts.items())])
        lines = [f"{len(self.shifts)} biases corrected ({self.method})", *rows]
        return "\n".join(lines + [f"{name}: unchanged: {why}" for name, why in self.skipped.items()])


def bias_correction(
    prepared: nn.Module,
    batches: Iterable[object] | None = None,
    method: Literal["empirical", "analytic"] = "empirical",
    forward: Forward | None = None,
    progress: bool = True,
) -> BiasCorrection:
    """Change the biases so that each output channel has the same mean as in the float model.

    "empirical" measures the means on batches, layer by layer in the order of the model: each layer's inputs come from the
    quantized model with all earlier corrections. It corrects the shifts of weights and activations, in graph mode and with
    module replacement. "analytic" needs no data, and corrects only the shifts of weights: it computes the mean of a layer's
    input as the mean of a normal distribution with the shift and the scale of the batch norm before it, clipped by the
    activation between them. It needs the graph, and a model prepared in training mode, so that batch norms are not folded.

    If a batch norm is linked to a layer, the correction is added to its shift. Call this after `qtoolkit.calibrate`.

    "empirical" runs a prepared model from layer to layer, so its time grows linearly with the number of layers. It caches
    intermediate values of each batch, up to 2 GiB in memory and the rest in temporary files. A replaced model, or a prepared
    model with hooks on its blocks, runs from its inputs for each layer, so its time grows with the square of the number of
    layers.

    Args:
        prepared: A calibrated model from `qtoolkit.prepare` or `qtoolkit.quant_modules.replace`.
        batches: As for `qtoolkit.calibrate`, for "empirical". They are read twice; for a replaced model, or with `forward`,
            once for each layer.
        method: "empirical" or "analytic".
        forward: forward(model, batch), for batches that cannot be passed to the model directly.
        progress: Show a progress bar.

    Returns:
        The shifts, and the reasons for unchanged layers.

    Raises:
        ValueError: The method is unknown, no layer can be corrected, batches are missing, or given for "analytic", or a batch
            contains NaN. The model is then unchanged.
        TypeError: An argument is of a wrong type.
        RuntimeError: A quantizer is not calibrated.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4)).eval()
        >>> w2 = qt.QConfig(activation=None, weight=qt.QuantSpec(bits=2))
        >>> prepared = qt.prepare(model, qconfig_mapping=qt.QConfigMapping().set_global(w2), backend="tensorrt")
        >>> x = torch.rand(64, 8)
        >>> _ = qt.calibrate(prepared, [x], progress=False)
        >>> report = qt.tuning.bias_correction(prepared, [x], progress=False)
        >>> torch.allclose(prepared(x).mean(0), model(x).mean(0), atol=1e-6)
        True
    """
    check_flags("bias_correction", progress=progress)
    prepared = check_module(prepared, "bias_correction", "prepared")
    check_known("method of bias_correction", method, ("empirical", "analytic"))
    if (method == "analytic") != (batches is None):
        raise ValueError(
            f"bias_correction: method={method!r} {'needs batches' if batches is None else 'takes no batches'}; pass "
            f"batches for 'empirical', and none for 'analytic'."
        )
    layers, skipped = _layers(prepared)
    with tuning(prepared):
        warn_before_correction(layers)
        if method == "empirical":
            data = Batches(batches or (), forward, "bias_correction")
            shifts = _empirical(prepared, layers, skipped, data, progress)
        else:
            shifts = _analytic(prepared, layers, skipped)
        if not shifts:
            listed = "; ".join(f"{name}: {why}" for name, why in list(skipped.items())[:3]) or "there is no layer"
            raise ValueError(f"bias_correction: no layer can be corrected by method={method!r} ({listed}).")
    return BiasCorrection(method, {name: float(shift.abs().max()) for name, shift in shifts.items()}, skipped)


def _layers(model: nn.Module) -> tuple[dict[str, QuantWeighted], dict[str, str]]:
    """Return the layers with correctable biases, and the reasons for the others."""
    found: dict[str, QuantWeighted] = {}
    skipped: dict[str, str] = {}
    names, owners = first_names(model), owners_of_parameters(model)
    for module, name in names.items():
        if not isinstance(module, QuantWeighted) or not module.OP_KIND.layer:
            if isinstance(module, QuantModule) and module.weight_quantizers() and not module.OP_KIND.takes_indices:
                skipped[name] = f"biases of kind {module.OP_KIND.name!r} are not corrected"
            continue
        quantizer = module.weight_quantizer
        if not isinstance(quantizer, TensorQuantizer) or not quantizer.quantizing:
            skipped[name] = "its weight is not quantized"
        elif _shifting(module).bias is None:
            skipped[name] = "it has no bias; give the float layer bias=True"
        elif others := [of for of in owners.get(id(_shifting(module).bias), ()) if of != names.get(_shifting(module))]:
            skipped[name] = f"it shares its bias with {others[0]!r}, which has another shift"
        else:
            quantizer.check_ready()
            found[name] = module
    return found, skipped | obstacles_of_functions(model)


def _shifting(layer: QuantWeighted) -> QuantWeighted | LinkedBatchNorm:
    """Return the module whose bias shifts a layer's output: the linked batch norm, if there is one."""
    return layer if layer.batch_norm is None else layer.batch_norm


# ---- from data


class _Mean:
    """The mean of each output channel of a layer over its calls."""

    def __init__(self, layer: QuantWeighted) -> None:
        self.layer, self.total, self.count = layer, torch.zeros(()), 0

    def add(self, layer: nn.Module, args: object, output: Tensor) -> None:
        """Forward hook: record the output of a call."""
        channel = output.dim() - (self.layer.weight.dim() - 1 if self.layer.OP_KIND.convolves else 1)
        values = (
            output.detach().double().transpose(0, channel).flatten(1) if output.dim() > 1 else output[:, None].double()
        )
        self.total = self.total.to(values) + values.sum(1)
        self.count += values.size(1)

    def value(self) -> Tensor:
        """Return the mean, (channels,)."""
        return self.total / self.count


def _empirical(
    model: nn.Module, layers: Mapping[str, QuantWeighted], skipped: dict[str, str], data: Batches, progress: bool
) -> dict[str, Tensor]:
    expected = {name: _Mean(layer) for name, layer in layers.items()}
    calls = Counter[str]()  # of each layer, in the order of the first ones

    def take(name: str, layer: nn.Module, args: object, output: Tensor) -> None:
        calls[name] += 1
        expected[name].add(layer, args, output)

    handles = [layer.register_forward_hook(partial(take, name)) for name, layer in layers.items()]
    count = 0
    with removing(handles), torch.no_grad(), disable_quantization(model):
        for batch in batches_of("bias: float", data, progress):
            data.run(model, batch)
            count += 1
    skipped.update({name: "no batch reaches it" for name in layers if name not in calls})
    skipped.update({name: SEVERAL_CALLS for name, number in calls.items() if number > count})
    shifts: dict[str, Tensor] = {}
    wanted = [name for name in calls if name not in skipped]
    with LayerRuns(model, wanted, data) as runs, progress_bar("bias", "layers", progress, wanted) as bar:
        for name in bar:
            layer, mean = layers[name], _Mean(layers[name])
            with removing([layer.register_forward_hook(mean.add)]):
                runs.reach(name)
            shifts[name] = mean.value() - expected[name].value()
            if not bool(torch.isfinite(shifts[name]).all()):
                raise not_finite("bias_correction", f"the output of layer {name!r}")
            if layer.batch_norm is None:  # round the bias, as the mean has it: its rounding is a part of the shift
                with torch.no_grad():
                    layer.bias.copy_(layer.bias_in_sums(layer.bias))
            _shift_back(layer, shifts[name])
            note(bar, f"{name}: by {float(shifts[name].abs().max()):.3g}")
    return shifts


def _shift_back(layer: QuantWeighted, shift: Tensor) -> None:
    with torch.no_grad():
        bias = _shifting(layer).bias
        bias.copy_(bias.double() - shift)
        layer.bias_is_corrected = True


# ---- from batch norms


def _analytic(model: nn.Module, layers: Mapping[str, QuantWeighted], skipped: dict[str, str]) -> dict[str, Tensor]:
    if not isinstance(model, QuantizedGraphModule):
        raise TypeError(
            f"bias_correction: method='analytic' needs the graph of qtoolkit.prepare, to find the batch norm before each "
            f"layer, got {with_article(type(model))}; use method='empirical' with batches."
        )
    calls, shifts = ModuleCalls(model.graph), dict[str, Tensor]()
    for node in model.graph.nodes:
        name = str(node.target)
        if node.op != "call_module" or name not in layers:
            continue
        mean = _mean_of_input(node) if calls.is_only_one(node) else Obstacle(SEVERAL_CALLS)
        if isinstance(mean, Obstacle):
            skipped[name] = mean.why
            continue
        layer = layers[name]
        weight = layer.effective_weight().detach()
        error = layer.quantize_weight(weight).detach() - weight
        inputs = _for_weight(layer, mean, error)
        # A transposed convolution with a stride adds only a part of the kernel to each output.
        share = math.prod(getattr(layer, "stride", ())) if layer.OP_KIND.transposed else 1
        shifts[name] = layer.sum_per_output(error * inputs) / share
        _shift_back(layer, shifts[name])
    for name in layers.keys() - shifts.keys() - skipped.keys():
        skipped[name] = "the graph does not call it"
    return shifts


def _for_weight(layer: QuantWeighted, mean: Tensor, like: Tensor) -> Tensor:
    """Return the mean of the input that multiplies each element of a weight."""
    groups, kernel = getattr(layer, "groups", 1), [1] * (like.dim() - 2)
    if layer.OUTPUT_AXIS == 1:
        return mean.reshape(-1, 1, *kernel).expand_as(like)
    grouped = mean.reshape(groups, 1, -1).expand(groups, like.size(0) // groups, -1)
    return grouped.reshape(like.size(0), -1, *kernel).expand_as(like)


def _mean_of_input(node: fx.Node) -> Tensor | Obstacle:
    """Return the mean of each input channel of a layer, from the batch norm before it, or the reason why it is unknown."""
    low, high, source = -math.inf, math.inf, node.all_input_nodes[0]
    while True:
        kind = kind_of(source)
        module: Any = called_module(source)
        if isinstance(module, LinkedBatchNorm) or (kind.normalizes_batches and module is not None):
            if module.weight is None:
                return Obstacle("the batch norm before it has no scale")
            return clipped_mean(module.bias.detach().double(), module.weight.detach().double().abs(), low, high)
        bounds = bounds_of(source) if kind.clips and (low, high) == (-math.inf, math.inf) else None
        if bounds is not None and bounds.known:
            low, high = bounds.low, bounds.high
        elif not (is_quantizer(source) or kind.returns_input):
            why = f"its input comes from {source.name!r} ({kind}), so no batch norm gives its mean; use 'empirical'"
            return Obstacle(why)
        source = source.all_input_nodes[0]


def clipped_mean(mean: Tensor, deviation: Tensor, low: float, high: float) -> Tensor:
    """Return the mean of a normal distribution clipped to [low, high].

    Example:
        >>> clipped_mean(torch.zeros(1), torch.ones(1), 0.0, torch.inf)  # 1 / sqrt(2 pi)
        tensor([0.3989])
    """
    deviation = deviation.clamp(min=1e-12)
    result = mean.clone()
    for bound, sign in ((low, 1.0), (high, -1.0)):
        if math.isfinite(bound):  # what the clipping at this bound adds: E[max(bound - x, 0)], or the mirror image
            z = sign * (bound - mean) / deviation
            cumulative = 0.5 * (1 + torch.erf(z / math.sqrt(2)))
            density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
            result = result + sign * deviation * (z * cumulative + density)
    return result
