"""sensitivity(): what each layer's quantization costs, measured one at a time, and the config that spares the worst."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import nn
from tqdm import tqdm

from qtoolkit.config import QConfigMapping
from qtoolkit.config.mapping import Kind, path_of
from qtoolkit.errors import check_known
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.modes import evaluating
from qtoolkit.op_kinds.nodes import float_type, name_of, object_type_of
from qtoolkit.quantizers.switches import disable_quantization
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer
from qtoolkit.report import LayerLine, quantization_report
from qtoolkit.report.lines import quantizers_in
from qtoolkit.tables import table

By = Literal["layer", "type"]
Mode = Literal["one", "all_but_one"]


@dataclass(frozen=True)
class Row:
    """What the quantization of one layer, or of all layers of one type, costs.

    Attributes:
        name: The layer, as QConfigMapping.set_module_name takes it; or the type, as a mapping's JSON has it.
        kind: The kind of op.
        score: The model's score with this alone quantized (mode "one"), or with all but this.
        drop: How much worse the score is for this being quantized; below 0 where it is better.
    """

    name: str
    kind: str
    score: float
    drop: float


@dataclass(frozen=True)
class Sensitivity:
    """What `sensitivity` returns: data, a table when printed, and a config that spares the worst.

    Attributes:
        float_score: The score with all quantizers off.
        quantized_score: The score with all on.
        rows: One for each layer or type, the worst first.
        by: "layer" or "type".
        types: Of each row by type, the type, function or tensor method.
    """

    float_score: float
    quantized_score: float
    rows: tuple[Row, ...]
    by: By
    types: Mapping[str, Kind]

    def __str__(self) -> str:
        head = f"score {self.float_score:.6g} in float, {self.quantized_score:.6g} quantized; {self.by}s, worst first"
        rows: list[tuple[str, ...]] = [(self.by, "kind", "score", "drop")]
        rows += [(row.name, row.kind, f"{row.score:.6g}", f"{row.drop:.6g}") for row in self.rows]
        return "\n".join([head, "", *table(rows)])

    def to_dict(self) -> dict[str, Any]:
        """Return all figures, as JSON can hold them."""
        scores = {"float_score": self.float_score, "quantized_score": self.quantized_score, "by": self.by}
        return {**scores, "rows": [asdict(row) for row in self.rows]}

    def to_qconfig_mapping(
        self, keep_float: int | None = None, budget: float | None = None, base: QConfigMapping | None = None
    ) -> QConfigMapping:
        """Return a config that leaves the worst in float, for `qtoolkit.prepare` or `qtoolkit.quant_modules.replace`.

        Args:
            keep_float: How many to leave in float.
            budget: Instead: leave as few in float as make the drops of all others sum to no more than this. The sum is an
                estimate of what they cost together; measure the model that comes out.
            base: Rules to add to; it is not changed. Its rules by name or regex come before a new one by type.

        Raises:
            ValueError: Not exactly one of `keep_float` and `budget` is given, or it is out of range.
        """
        if (keep_float is None) == (budget is None):
            raise ValueError(
                f"to_qconfig_mapping: give either keep_float or budget, got keep_float={keep_float} and budget={budget}."
            )
        count = self._count_within(budget) if keep_float is None else keep_float
        if not 0 <= count <= len(self.rows):
            raise ValueError(f"to_qconfig_mapping: keep_float must lie in [0, {len(self.rows)}], got {keep_float}.")
        mapping = QConfigMapping() if base is None else base.copy()
        for row in self.rows[:count]:
            if self.by == "type":
                mapping.set_object_type(self.types[row.name], None)
            else:
                mapping.set_module_name(row.name, None)
        return mapping

    def _count_within(self, budget: float | None) -> int:
        """Return how many of the worst to leave out so that the others' drops sum to no more than the budget."""
        if budget is None or not (math.isfinite(budget) and budget >= 0):
            raise ValueError(f"to_qconfig_mapping: budget must be a finite drop of at least 0, got {budget}.")
        drops = [row.drop for row in self.rows]
        return next(count for count in range(len(drops) + 1) if math.fsum(drops[count:]) <= budget)


@dataclass(frozen=True)
class _Unit:
    """What is switched at a time."""

    name: str
    kind: str
    type: Kind
    quantizers: frozenset[str]


def sensitivity(
    model: nn.Module,
    evaluate: Callable[[nn.Module], float],
    by: By = "layer",
    mode: Mode = "one",
    names: Sequence[str] | None = None,
    higher_is_better: bool = True,
    progress: bool = True,
) -> Sensitivity:
    """Measure what the quantization of each layer (or op, or type of them) costs, by switching quantizers.

    The model is in eval mode when `evaluate` gets it, and its ranges stay as they are; afterwards it is as it was. A layer's
    quantizers are those of its weights, of its inputs, and between its own ops. Quantizers that a module of yours calls in
    its own forward, and those of a part that was prepared by itself, have no row: no config for this model reaches them.

    Args:
        model: What `qtoolkit.prepare` or `qtoolkit.quant_modules.replace` returned, calibrated; or `qtoolkit.convert`.
        evaluate: Gives a model's score, such as its accuracy on some batches. It is called len(rows) + 2 times; wrap what it
            does in torch.no_grad().
        by: "layer", or "type": all layers of a type together.
        mode: "one": each alone is quantized, all else is float. "all_but_one": each alone is float; a quantizer that another
            layer has, too, stays on, as it would if a config left the one layer in float.
        names: The layers (by="type": the types, by the names of rows) to measure; None takes all.
        higher_is_better: Whether a higher score is better; False for a loss.
        progress: Show a progress bar.

    Returns:
        The scores, the worst layer first (ties by name).

    Raises:
        RuntimeError: A quantizer has no range yet.
        ValueError: Nothing in the model can be switched, a name or an option is not known, or a score is no finite number.
        TypeError: `model` is no module, or a score is no number.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
        >>> prepared, x = qt.prepare(model), torch.rand(64, 8)
        >>> report = qt.calibrate(prepared, [x], progress=False)
        >>> def loss(m):
        ...     with torch.no_grad():
        ...         return float(torch.nn.functional.mse_loss(m(x), model(x)))
        >>> result = qt.debug.sensitivity(prepared, loss, higher_is_better=False, progress=False)
        >>> result.float_score, sorted(row.name for row in result.rows)
        (0.0, ['0', '2'])
        >>> mapping = result.to_qconfig_mapping(keep_float=1)
        >>> [line.name for line in qt.quantization_report(qt.prepare(model, qconfig_mapping=mapping)).quantized]
        ['0']
    """
    check_known("by", by, ("layer", "type"))
    check_known("mode", mode, ("one", "all_but_one"))
    _check(model)
    every = _units(model, by)
    if not every:
        raise ValueError(
            "sensitivity: no layer in it is quantized by a config, only by quantizers that modules call themselves: compare "
            "scores with and without qtoolkit.disable_quantization."
        )
    for name in names or ():
        check_known(by, name, [unit.name for unit in every])
    units = [unit for unit in every if names is None or unit.name in names]
    with tqdm(total=len(units) + 2, desc="sensitivity", disable=not progress, leave=False) as bar:
        score = _Score(model, evaluate, bar)
        quantized = score(quantizers_in(model), "all layers quantized")
        in_float = score((), "no layer quantized")
        rows = []
        for unit in units:
            if mode == "one":
                value = score(unit.quantizers, f"{unit.name!r} alone quantized")
                loss = in_float - value
            else:
                value = score(_all_but(model, unit, every), f"all but {unit.name!r} quantized")
                loss = value - quantized
            rows.append(Row(unit.name, unit.kind, value, loss if higher_is_better else 0.0 - loss))
    rows.sort(key=lambda row: (-row.drop, row.name))
    types = {unit.name: unit.type for unit in units} if by == "type" else {}
    return Sensitivity(in_float, quantized, tuple(rows), by, types)


@dataclass(frozen=True)
class _Score:
    """Scores the model with some quantizers on and all others off, observing nothing."""

    model: nn.Module
    evaluate: Callable[[nn.Module], float]
    bar: Any

    def __call__(self, on: Collection[str], what: str) -> float:
        with disable_quantization(self.model), evaluating(self.model):  # which put back all states, of observing too
            for name, quantizer in quantizers_in(self.model).items():
                quantizer.quantizing = name in on
                if isinstance(quantizer, TensorQuantizer):
                    quantizer.observing = False
            score = self.evaluate(self.model)
        self.bar.update()
        return _number(score, what)


def _units(model: nn.Module, by: By) -> list[_Unit]:
    """Return the quantized layers and ops, or their types, with the quantizers of each."""
    types = _types_of(model)
    lines: dict[str, list[LayerLine]] = defaultdict(list)
    for line in quantization_report(model).quantized:
        if line.quantizers:
            lines[path_of(types[line.name]) if by == "type" else line.name].append(line)
    return [
        _Unit(name, of[0].kind, types[of[0].name], frozenset(quantizer for line in of for quantizer in line.quantizers))
        for name, of in lines.items()
    ]


def _types_of(model: nn.Module) -> dict[str, Kind]:
    """Return of each op that a config can name its type, as QConfigMapping.set_object_type takes it."""
    ops: dict[str, Kind] = {}
    if isinstance(model, QuantizedGraphModule):
        ops = {name_of(n): object_type_of(n) for n in model.graph.nodes if n.op in ("call_function", "call_method")}
    return {**{name: float_type(module) for name, module in model.named_modules()}, **ops}


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"sensitivity: model must be a torch.nn.Module, got {type(model).__name__}.")
    quantizers = quantizers_in(model)
    if not quantizers:
        raise ValueError(
            "sensitivity: the model has no quantizers to switch; pass what qtoolkit.prepare, qtoolkit.quant_modules.replace or "
            "qtoolkit.convert returned."
        )
    for quantizer in quantizers.values():
        if isinstance(quantizer, TensorQuantizer):
            quantizer.check_ready()


def _all_but(model: nn.Module, unit: _Unit, units: Sequence[_Unit]) -> set[str]:
    others = [other.quantizers for other in units if other is not unit]
    return set(quantizers_in(model)) - unit.quantizers.difference(*others)


def _number(score: Any, what: str) -> float:
    try:
        value = float(score)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"sensitivity: evaluate must return a number, got {type(score).__name__}.") from None
    if not math.isfinite(value):
        raise ValueError(f"sensitivity: evaluate must return a finite score, got {value} with {what}.")
    return value
