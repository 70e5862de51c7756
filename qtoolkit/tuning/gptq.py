"""gptq(): rounding of linear layers by second-order information (arXiv 2210.17323)."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from qtoolkit import ops
from qtoolkit.batches import not_finite
from qtoolkit.errors import check_flags, with_article
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.graph.nodes import kind_of_module
from qtoolkit.model_state import check_module, removing
from qtoolkit.nn import QuantWeighted
from qtoolkit.nn.module import quantized
from qtoolkit.progress import note, progress_bar
from qtoolkit.report.lines import table
from qtoolkit.tuning.rounding.earlier import warn_before_rounding
from qtoolkit.tuning.rounding.grids import CodeGrid
from qtoolkit.tuning.rounding.units import chosen, obstacles, obstacles_of_functions
from qtoolkit.tuning.runs.batches import Batches, Forward, tuning
from qtoolkit.tuning.runs.stepwise import LayerRuns

COLUMNS = 128  # whose errors are spread to the later columns at once
DAMPINGS = (0.01, 0.1, 1.0)  # the paper's, and two for few inputs
# The share of the best gain that a larger damping must keep. Larger damping overfits the batches less.
GAIN = 0.8


@dataclass(frozen=True)
class LayerError:
    """The error of a layer.

    Attributes:
        name: Its dotted name.
        before: The mean squared error of its output with weights rounded to nearest, on one half of its inputs in the quantized
            model.
        after: The same error with the rounding chosen on the other half; equals `before` if rounding to nearest was kept.
        damping: The damping used for its rounding; None if rounding to nearest was better and was kept.
    """

    name: str
    before: float
    after: float
    damping: float | None

    @property
    def kept(self) -> bool:
        """Whether rounding to nearest was kept."""
        return self.damping is None

    def row(self) -> tuple[str, ...]:
        """Return the cells of its line in a table."""
        return self.name, f"{self.before:.3e}", f"{self.after:.3e}", "kept" if self.kept else f"{self.damping:g}"


@dataclass(frozen=True)
class GPTQ:
    """The result of `gptq`. It prints as a table.

    Attributes:
        layers: The errors of the layers, in the order in which they run.
        skipped: The reason for each layer that is rounded to nearest, by name.
    """

    layers: tuple[LayerError, ...]
    skipped: Mapping[str, str]

    def __str__(self) -> str:
        rows = [("layer", "error before", "after", "damping"), *(layer.row() for layer in self.layers)]
        lines = [f"{len(self.layers)} linear layers", *table(rows)]
        return "\n".join(lines + [f"{name}: skipped: {why}" for name, why in self.skipped.items()])


def gptq(
    prepared: nn.Module,
    batches: Iterable[object],
    layers: Sequence[str] | None = None,
    forward: Forward | None = None,
    damping: float | None = None,
    act_order: bool = False,
    progress: bool = True,
) -> GPTQ:
    """Choose the rounding of linear layers column by column; each column compensates the errors of the previous columns.

    Layers are processed in the order in which they run; the inputs of each layer come from the model with all earlier layers
    quantized. For any number of batches, only sums of input products are stored, (in, in) in float64 for each half of the
    inputs. The scales of the quantizers do not change: one per row or per group of columns (`QuantSpec(axis=1,
    group_size=128)`), also with `act_order`. The result is stored in the weights, as in `qtoolkit.tuning.reconstruct`.

    The rounding can overfit: with few inputs per column, it can be far better on these inputs and worse on others. Therefore
    each layer is cross-validated: one half of its inputs chooses the rounding, and the other half measures the error. If the
    error is not below the error of rounding to nearest, the weights stay rounded to nearest.

    A prepared model runs from layer to layer, and a replaced model from its inputs each time, as in
    `qtoolkit.tuning.bias_correction`. For a layer with several calls, the whole model runs, and the inputs of all calls count.

    Args:
        prepared: A calibrated model from `qtoolkit.prepare` or `qtoolkit.quant_modules.replace`.
        batches: As for `qtoolkit.calibrate`. They are read twice; for a replaced model, or with `forward`, once for each layer.
            They should have at least ten times as many rows (tokens) as a layer has input features.
        layers: Dotted names of linear layers; None uses all supported layers.
        forward: forward(model, batch), for batches that cannot be passed to the model directly.
        damping: The value that is added to the diagonal of the sums, relative to its mean; larger values overfit less. None
            uses for each layer the largest of 0.01, 0.1 and 1 that keeps 80 % of the best gain on the other half.
        act_order: Process the columns with the largest inputs first.
        progress: Show a progress bar.

    Returns:
        The errors before and after, and the reasons for skipped layers.

    Raises:
        ValueError: A layer in `layers` is unknown or not supported, no layer is supported, damping is not positive, there is no
            batch, or a batch contains NaN. The model is then unchanged.
        TypeError: An argument is of a wrong type.
        RuntimeError: A quantizer is not calibrated.

    Example:
        >>> w3 = qt.QConfigMapping().set_global(qt.QConfig(activation=None, weight=qt.QuantSpec(bits=3, axis=0)))
        >>> prepared = qt.quant_modules.replace(torch.nn.Sequential(torch.nn.Linear(32, 8)).eval(), w3, backend="tensorrt")
        >>> x = torch.randn(256, 32) @ torch.randn(32, 32)
        >>> _ = qt.calibrate(prepared, [x], progress=False)
        >>> (layer,) = qt.tuning.gptq(prepared, [x], progress=False).layers
        >>> layer.after < 0.8 * layer.before
        True
    """
    check_flags("gptq", act_order=act_order, progress=progress)
    prepared = check_module(prepared, "gptq", "prepared")
    if damping is not None and not damping > 0:
        raise ValueError(f"gptq: damping must be positive, or None, got {damping}.")
    dampings = DAMPINGS if damping is None else (damping,)
    reasons = _obstacles(prepared)
    wanted = chosen(reasons, layers, "gptq")
    skipped = {name: why for name, why in reasons.items() if why}
    data, errors = Batches(batches, forward, "gptq"), []
    with ExitStack() as stack:
        stack.enter_context(tuning(prepared))
        warn_before_rounding(prepared, wanted, "gptq")
        order = _order(prepared, wanted, data)
        skipped |= {name: "no batch reaches it" for name in wanted if name not in order}
        runs = stack.enter_context(LayerRuns(prepared, list(order), data))
        bar = stack.enter_context(progress_bar("gptq", "layers", progress, order))
        for name in bar:
            grid = CodeGrid(prepared.get_submodule(name), name)
            products = _products(grid.layer, runs.whole if order[name] else partial(runs.reach, name))
            if not bool(torch.isfinite(products.all).all()):
                raise not_finite("gptq", f"the input of layer {name!r}")
            error = _tried(grid, name, products, dampings, act_order)
            if error.damping is not None:
                grid.store(rounded(grid, products.all, error.damping, act_order))
            errors.append(error)
            note(bar, f"{name}: error {error.before:.2e} -> {error.after:.2e}")
    return GPTQ(tuple(errors), skipped)


def _obstacles(model: nn.Module) -> dict[str, str]:
    """Return the reason why the rounding of each layer cannot be chosen; "" if it can."""
    reasons = obstacles(model)
    for name in reasons:
        layer = model.get_submodule(name)
        if not isinstance(layer, nn.Linear):
            takes = kind_of_module(layer).layer and isinstance(model, QuantizedGraphModule)
            other = "; use qtoolkit.tuning.reconstruct" if takes else ""
            reasons[name] = f"it is {with_article(type(layer))}, and only linear layers are supported{other}"
    return reasons | obstacles_of_functions(model)


def _order(model: nn.Module, names: Sequence[str], data: Batches) -> dict[str, bool]:
    """Return the layers in the order of their first calls, and whether each has several calls."""
    calls, count = Counter[str](), 0
    handles = [
        model.get_submodule(name).register_forward_hook(lambda *args, name=name: calls.update([name])) for name in names
    ]
    with removing(handles), torch.no_grad():
        for count, batch in enumerate(data, 1):  # noqa: B007
            data.run(model, batch)
            if len(calls) == len(names):
                break
    return {name: number > count for name, number in calls.items()}


@dataclass(frozen=True)
class _Products:
    """The means of the products of a layer's inputs, (in, in)."""

    first: Tensor  # of one half of the rows of each call
    second: Tensor  # of the other half
    all: Tensor  # of all rows


def _products(layer: QuantWeighted, run: Callable[[], None]) -> _Products:
    """Return the means of the products of a layer's inputs in the current model; `run` runs it on all batches."""
    size = layer.weight.size(1)
    sums = torch.zeros(2, size, size, dtype=torch.float64, device=layer.weight.device)
    counts, calls = [0, 0], 0

    def add(module: QuantWeighted, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        """Forward pre-hook: add the products of the rows of an input, half of them to each sum."""
        nonlocal calls
        x = quantized(module.input_quantizer, args[0] if args else kwargs["input"])
        rows = x.detach().reshape(-1, size).float()
        middle = (len(rows) + calls % 2) // 2  # calls with one row serve the halves in turn
        calls += 1
        for half, part in enumerate((rows[:middle], rows[middle:])):
            sums[half] += part.T @ part
            counts[half] += len(part)

    with removing([layer.register_forward_pre_hook(add, with_kwargs=True)]):
        run()
    both = sums.sum(0) / max(sum(counts), 1)
    if not all(counts):
        return _Products(both, both, both)
    return _Products(sums[0] / counts[0], sums[1] / counts[1], both)


def _tried(grid: CodeGrid, name: str, products: _Products, dampings: Sequence[float], act_order: bool) -> LayerError:
    """Return the error on the second half of the inputs for rounding chosen on the first half, and the best damping."""
    before = _error(grid, grid.nearest(), products.second)
    after = {each: _error(grid, rounded(grid, products.first, each, act_order), products.second) for each in dampings}
    gain = before - min(after.values())
    if not gain > 0:
        return LayerError(name, before, before, None)
    damping = max(each for each in dampings if before - after[each] >= GAIN * gain)
    return LayerError(name, before, after[damping], damping)


def rounded(grid: CodeGrid, hessian: Tensor, damping: float, act_order: bool) -> Tensor:
    """Return the quantized integers of a weight (out, in), chosen column by column (section 3 of the paper).

    The hessian is the mean of products of inputs, (in, in); `damping` is added to its diagonal, relative to its mean. With
    `act_order` the columns with the largest diagonal come first.
    """
    hessian = hessian.double().clone()
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    diagonal[dead] = 1
    order = torch.argsort(diagonal, descending=True, stable=True) if act_order else torch.arange(len(diagonal))
    order = order.to(hessian.device)
    diagonal += damping * diagonal.mean()
    factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian[order][:, order])), upper=True)
    weight, steps, zeros = (part[:, order].double() for part in (grid.weight, grid.steps, grid.zeros))
    codes, spec = torch.empty_like(weight), grid.quantizer.spec
    for first in range(0, weight.size(1), COLUMNS):
        last = min(first + COLUMNS, weight.size(1))
        errors = torch.empty_like(weight[:, first:last])
        for column in range(first, last):
            rows = (steps[:, column], zeros[:, column])
            code = ops.quantize(weight[:, column], *rows, spec.qmin, spec.qmax, 0, dtype=torch.int32)
            codes[:, column] = code
            value = ops.dequantize(code, *rows, 0, dtype=weight.dtype)
            error = (weight[:, column] - value) / factor[column, column]
            weight[:, column:last] -= error[:, None] * factor[None, column, column:last]
            errors[:, column - first] = error
        weight[:, last:] -= errors @ factor[first:last, last:]
    result = torch.empty_like(grid.weight)
    result[:, order] = codes.to(result)
    return result


def _error(grid: CodeGrid, codes: Tensor, hessian: Tensor) -> float:
    """Return the mean squared error of the outputs, from the products of the inputs."""
    difference = (grid.values(codes) - grid.weight).double()
    return float(((difference @ hessian) * difference).sum(1).mean())
