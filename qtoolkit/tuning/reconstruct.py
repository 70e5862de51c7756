"""reconstruct(): learn the rounding of weights, layer by layer or block by block, from a few batches without labels."""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import fx

from qtoolkit.batches import not_finite
from qtoolkit.errors import check_flags, check_known, check_whole, shown
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.model_inputs import clone_tensors
from qtoolkit.model_state import deepcopy_model
from qtoolkit.progress import note, progress_bar
from qtoolkit.quantizers.switches import disable_quantization
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer
from qtoolkit.report.lines import table
from qtoolkit.tuning.rounding.earlier import warn_before_rounding
from qtoolkit.tuning.rounding.grids import CodeGrid
from qtoolkit.tuning.rounding.learning import Options, Sample, distances, learn
from qtoolkit.tuning.rounding.saved import FinishedUnit, SavedUnits, UnitState
from qtoolkit.tuning.rounding.unit_samples import Loss, UnitSamples
from qtoolkit.tuning.rounding.units import RoundingUnit, find_units
from qtoolkit.tuning.runs.batches import Batches, Forward, part_between, tuning
from qtoolkit.tuning.runs.cache import BatchCache
from qtoolkit.wrapped import unwrapped


@dataclass(frozen=True)
class ReconstructionMethod:
    """A method of `reconstruct`."""

    granularity: str  # what it reconstructs unless the caller says otherwise: "layer" or "block"
    learn_scales: bool = False  # whether it also trains the scales of the activations that only the unit takes
    # the share of values that stay in float at each step: of the unit's inputs, and of its quantizers' outputs
    drop: float = 0.0


METHODS: Mapping[str, ReconstructionMethod] = {
    "adaround": ReconstructionMethod("layer"),
    "brecq": ReconstructionMethod("block", learn_scales=True),
    "qdrop": ReconstructionMethod("block", learn_scales=True, drop=0.5),
}


@dataclass(frozen=True)
class UnitResult:
    """The result for one layer or block.

    Attributes:
        name: Its name.
        layers: The layers in it.
        before: The mean squared difference between its output and the float model's, with weights rounded to nearest; with a
            loss, elements are weighted by its squared gradients.
        after: The same difference at the end.
        moved: The share of its weights that are not rounded to nearest.
        kept: Whether rounding to nearest was best and was kept.
    """

    name: str
    layers: tuple[str, ...]
    before: float
    after: float
    moved: float
    kept: bool

    def row(self) -> tuple[str, ...]:
        """Return the cells of its line in a table."""
        errors = f"{self.before:.3e}", f"{self.after:.3e}"
        return self.name, str(len(self.layers)), *errors, f"{self.moved:.1%}", "kept" if self.kept else ""


@dataclass(frozen=True)
class Reconstruction:
    """The result of `reconstruct`. It prints as a table.

    Attributes:
        method: The method.
        units: The layers or blocks, in the order of the model.
        skipped: The reason for each layer without learned rounding, by name.
    """

    method: str
    units: tuple[UnitResult, ...]
    skipped: Mapping[str, str]

    def __str__(self) -> str:
        layers = sum(len(unit.layers) for unit in self.units)
        head = ("unit", "layers", "error before", "after", "weights moved", "")
        rows = table([head, *(unit.row() for unit in self.units)])
        lines = [f"{self.method}: {len(self.units)} units with {layers} layers", *rows]
        return "\n".join(lines + [f"{name}: skipped: {why}" for name, why in self.skipped.items()])


def reconstruct(
    prepared: QuantizedGraphModule,
    batches: Iterable[object],
    method: Literal["adaround", "brecq", "qdrop"] = "adaround",
    granularity: Literal["layer", "block"] | None = None,
    steps: int = 2000,
    layers: Sequence[str] | None = None,
    forward: Forward | None = None,
    learning_rate: float = 1e-2,
    scale_learning_rate: float = 1e-3,
    rounding_weight: float = 10.0,
    seed: int = 0,
    path: str | os.PathLike[str] | None = None,
    cache_gib: float = 2.0,
    progress: bool = True,
    loss: Loss | None = None,
) -> Reconstruction:
    """Learn whether each weight is rounded down or up, so that the outputs of layers or blocks match the float model.

    Units (layers or blocks) are processed in the order of the model. The inputs of each unit come from the model with all
    earlier units quantized, its targets from the float model. A unit keeps rounding to nearest if nothing better is found. The
    result is stored in the weights: each is set to its learned quantized value, so state dicts, `qtoolkit.convert` and the
    export contain it. The ranges of these weights, and learned scales of activations, are frozen. Intermediate values are
    cached from unit to unit: besides the steps, all units together take the time of a few runs of the whole model.

    Methods: "adaround" (arXiv 2004.10568) learns rounding, by default layer by layer. "brecq" (arXiv 2102.05426) uses blocks,
    and also trains the scales of their activations; `loss` enables the paper's weighting of errors. "qdrop" (arXiv 2203.05740)
    also keeps a random half of the activations in float. Blocks are found from the graph and the module hierarchy
    (`qtoolkit.tuning.rounding.units`).

    Args:
        prepared: A calibrated model from `qtoolkit.prepare`, in training or eval mode.
        batches: As for `qtoolkit.calibrate`; a few hundred samples. Each step uses one batch, so batches of 32 are better than
            one batch of 1,024. They are read once, and with `forward` once for each unit; an iterator is stored as a list.
        method: "adaround", "brecq" or "qdrop".
        granularity: "layer" or "block"; None means the method's default.
        steps: Steps of Adam for each unit. The papers use 10,000 to 20,000.
        layers: Dotted names of layers; None uses all supported layers.
        forward: forward(model, batch), for batches that cannot be passed to the model directly. It must call the model once.
        learning_rate: Learning rate of the rounding.
        scale_learning_rate: Learning rate of the activation scales, relative to their size.
        rounding_weight: Weight of the regularizer, the mean of 1 - |2 h - 1|^beta, which is annealed and drives each weight to
            one of its two neighbouring values. The error is divided by the error of rounding to nearest, so the same weight
            fits layers of any scale.
        seed: Seed of the order of batches and of the dropped values. Equal seeds give equal results on the same machine.
        path: A folder where each finished unit is saved. Another call with the same model, options and batches resumes there,
            with the same result as an uninterrupted call.
        cache_gib: GiB of memory for cached values: one half for the inputs and outputs of the current unit, the other half for
            the values from which the models continue after it. The excess of each half goes to temporary files.
        progress: Show a progress bar.
        loss: Weights the squared error of each element of a unit's output by the squared gradient of this loss in the float
            model (the Fisher diagonal of BRECQ). Either loss(output, batch), the loss of the task, where `output` is the return
            value of the model or of `forward`; or "kl", which needs no labels: the KL divergence from the distribution of the
            float model's logits (N, classes, ...). It costs a backward pass for each batch; its result takes as many bytes as
            the outputs of all units, within `cache_gib` or in temporary files. None gives all elements the same weight.

    Returns:
        The errors of each unit before and after, and the reasons for skipped layers.

    Raises:
        TypeError: The model was not prepared, or a batch does not match its forward.
        ValueError: An option is unknown or out of range, a layer in `layers` is not supported, there is no batch, a batch
            contains NaN, or `path` was written with other options. The model is then unchanged, as after KeyboardInterrupt.
        RuntimeError: A quantizer is not calibrated.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).eval()
        >>> w3 = qt.QConfig(activation=None, weight=qt.QuantSpec(bits=3, axis=0))
        >>> prepared = qt.prepare(model, qconfig_mapping=qt.QConfigMapping().set_global(w3), backend="tensorrt")
        >>> batches = list(torch.rand(256, 16).split(32))
        >>> _ = qt.calibrate(prepared, batches, progress=False)
        >>> report = qt.tuning.reconstruct(prepared, batches, steps=300, progress=False)
        >>> [unit.name for unit in report.units], all(unit.after < unit.before for unit in report.units)
        (['0', '2'], True)
    """
    check_flags("reconstruct", progress=progress)
    prepared = unwrapped(prepared)
    chosen = _check(prepared, method, granularity, steps, cache_gib, loss)
    options = Options(
        steps, learning_rate, scale_learning_rate, rounding_weight, chosen.learn_scales, chosen.drop, seed
    )
    data = Batches(batches, forward, "reconstruct")
    blocks = (granularity or chosen.granularity) == "block"
    units, skipped = find_units(prepared, blocks, layers, "reconstruct")
    results: list[UnitResult] = []
    with ExitStack() as stack:
        stack.enter_context(tuning(prepared))
        warn_before_rounding(prepared, [name for unit in units for name in unit.layers], "reconstruct")
        reference = deepcopy_model(prepared, what="reconstruct")
        disable_quantization(reference).apply()
        of_loss = getattr(loss, "__qualname__", loss)
        saved = SavedUnits(path, prepared, f"{method} {options} {[unit.layers for unit in units]} {of_loss}")
        samples = UnitSamples(prepared, reference, units, data, options, loss, cache_gib * 2**30)
        stack.enter_context(samples)
        bar = stack.enter_context(progress_bar("reconstruct", "steps", progress, total=steps * len(units)))
        for place, unit in enumerate(units):
            note(bar, f"{unit.name}{_gain(results)}")
            task = _Task(prepared, unit, options)
            content = saved.load(place)
            if content is None:
                content = task.run(place, samples, bar.update)
                saved.save(place, content)
            else:
                task.load(content)
                bar.update(steps)
            results.append(UnitResult(**content["result"]))
    return Reconstruction(method, tuple(results), skipped)


def _gain(results: Sequence[UnitResult]) -> str:
    """Return the share of the rounding-to-nearest error that is left, averaged over the finished units; "" at the start."""
    left = [unit.after / unit.before for unit in results if unit.before]
    return f", {sum(left) / len(left):.0%} of the error left" if left else ""


def _check(
    prepared: object, method: str, granularity: str | None, steps: int, cache_gib: float, loss: object
) -> ReconstructionMethod:
    if not isinstance(prepared, QuantizedGraphModule):
        raise TypeError(
            "reconstruct: prepared must be the result of qtoolkit.prepare, because layers and blocks are found in its graph, "
            f"got {type(prepared).__name__}; for a model without a graph, use qtoolkit.tuning.gptq for its linear layers."
        )
    check_known("method of reconstruct", method, METHODS)
    if granularity is not None:
        check_known("granularity of reconstruct", granularity, ("layer", "block"))
    check_whole("reconstruct", "steps", steps, 1)
    if not cache_gib >= 0:
        raise ValueError(f"reconstruct: cache_gib must not be negative, got {cache_gib}.")
    if loss is not None and loss != "kl" and not callable(loss):
        raise TypeError(
            f"reconstruct: loss must be a function of the output and the batch, 'kl' or None, got {shown(loss)}."
        )
    return METHODS[method]


class _Task:
    """The reconstruction of one unit."""

    def __init__(self, gm: QuantizedGraphModule, unit: RoundingUnit, options: Options) -> None:
        self.gm, self.unit, self.options = gm, unit, options
        names = {module: name for name, module in gm.named_modules()}
        self.grids = {name: CodeGrid(gm.get_submodule(name), name) for name in unit.layers}
        found = unit.activation_quantizers() if options.learn_scales or options.drop else []
        self.activations = {names[quantizer]: quantizer for quantizer in found}

    def run(self, place: int, samples: UnitSamples, stepped: Callable[[], object]) -> FinishedUnit:
        """Learn, store the better rounding, and return the result and the state for `load`."""
        module = part_between(self.gm, self.unit.inputs, self.unit.nodes, [self.unit.output])
        with samples.cache() as cache:
            samples.fill(cache, place)
            before = _error(module, cache)
            if not math.isfinite(before):
                raise not_finite("reconstruct", f"the output of {self.unit.name!r}, or its target,")
            original = self._state()
            nearest = {name: grid.nearest() for name, grid in self.grids.items()}
            codes = learn(module, self.grids, self.activations, cache, self.options, place, before, stepped)
            for name, grid in self.grids.items():
                grid.store(codes[name])
            after = _error(module, cache)
            kept = not after < before
            if kept:
                self.load(original)
                codes, after = nearest, before
        total = sum(code.numel() for code in codes.values())
        moved = sum(int((codes[name] != nearest[name]).sum()) for name in codes) / total
        result = UnitResult(self.unit.name, self.unit.layers, before, after, moved, kept)
        return {"result": asdict(result), **self._state()}

    def _state(self) -> UnitState:
        weights = {name: grid.layer.weight.detach().clone() for name, grid in self.grids.items()}
        follows = {name: quantizer.following for name, quantizer in self._quantizers().items()}
        grids = {name: (q.scale.clone(), q.zero_point) for name, q in self.activations.items()}
        return {"weights": weights, "follows": follows, "grids": grids}

    def load(self, state: UnitState) -> None:
        """Load weights and grids from `run`, of this process or another."""
        with torch.no_grad():
            for name, grid in self.grids.items():
                grid.layer.weight.copy_(state["weights"][name])
        for name, quantizer in self.activations.items():
            quantizer.write_grid(*state["grids"][name])
        for name, quantizer in self._quantizers().items():
            quantizer.following = state["follows"][name]

    def _quantizers(self) -> dict[str, TensorQuantizer]:
        """Return the quantizers of activations, and of weights by layer name."""
        return {name: grid.quantizer for name, grid in self.grids.items()} | self.activations


def _error(module: fx.GraphModule, cache: BatchCache[Sample]) -> float:
    """Return the mean squared difference between a unit's output and the float output, weighted by importance."""
    total, count = 0.0, 0
    with torch.no_grad():
        for place in range(len(cache)):
            inputs, _, expected, importance = cache[place]
            for each in distances(module(*clone_tensors(inputs)), expected, importance, torch.float64):
                total += float(each.sum())
                count += each.numel()
    error = total / max(count, 1)
    return error if math.isfinite(error) else math.inf
