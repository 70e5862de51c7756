"""sensitivity(): measure the effect of each layer's quantization on the score, and keep the most sensitive layers in float."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import nn

from qtoolkit.config import QConfigMapping
from qtoolkit.config.kinds import Kind, path_of
from qtoolkit.eager.record import plan_of
from qtoolkit.errors import check_flags, check_known, shown, some, warn
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.graph.nodes import float_type, name_of, object_type_of
from qtoolkit.model_state import check_module, evaluating
from qtoolkit.nn.rounded import corrected_in, rounded_in
from qtoolkit.progress import note, progress_bar
from qtoolkit.quantizers.quantizer import named_quantizers
from qtoolkit.quantizers.switches import disable_quantization, freeze_ranges
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer
from qtoolkit.report import LayerLine, quantization_report
from qtoolkit.report.lines import table

By = Literal["layer", "type"]
Mode = Literal["one", "all_but_one"]


@dataclass(frozen=True)
class Row:
    """Sensitivity to the quantization of one layer, or of all layers of one type.

    Attributes:
        name: The layer's name for QConfigMapping.set_module_name, or the type's name in a mapping's JSON.
        kind: The kind of op.
        score: The model's score if only this is quantized (mode "one"), or if everything else is quantized ("all_but_one").
        drop: How much quantization of this layer or type worsens the score; negative if it improves.
    """

    name: str
    kind: str
    score: float
    drop: float


@dataclass(frozen=True)
class Sensitivity:
    """Result of `sensitivity`; prints as a table, and creates configs that keep the worst rows in float.

    Attributes:
        float_score: The score with all quantizers disabled.
        quantized_score: The score with all quantizers enabled.
        rows: One row for each layer or type, the worst first.
        by: "layer" or "type".
        types: With by="type", the type, function or tensor method of each row, by name.
        mapping: The config that the model was prepared with; None if it was the backend's default.
    """

    float_score: float
    quantized_score: float
    rows: tuple[Row, ...]
    by: By
    types: Mapping[str, Kind]
    mapping: QConfigMapping | None = None

    def __str__(self) -> str:
        head = f"score {self.float_score:.6g} in float, {self.quantized_score:.6g} quantized; {self.by}s, worst first"
        rows: list[tuple[str, ...]] = [(self.by, "kind", "score", "drop")]
        rows += [(row.name, row.kind, f"{row.score:.6g}", f"{row.drop:.6g}") for row in self.rows]
        return "\n".join([head, "", *table(rows)])

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values for JSON."""
        scores = {"float_score": self.float_score, "quantized_score": self.quantized_score, "by": self.by}
        return {**scores, "rows": [asdict(row) for row in self.rows]}

    def to_qconfig_mapping(
        self, keep_float: int | None = None, budget: float | None = None, base: QConfigMapping | None = None
    ) -> QConfigMapping:
        """Return a config that keeps the worst rows in float, for `qtoolkit.prepare` or `qtoolkit.quant_modules.replace`.

        Pass exactly one of `keep_float` and `budget`.

        Args:
            keep_float: Number of rows to keep in float.
            budget: Keep as few rows in float as possible such that the drops of the other rows sum to at most this. The sum
                estimates their combined effect; measure the resulting model.
            base: Mapping to extend; it is not changed. The default is the mapping that the model was prepared with, so that the
                other layers keep their specs and observers. Its rules by name or regex take precedence over new rules by type.

        Raises:
            ValueError: Both or neither of `keep_float` and `budget` are given, or the value is out of range.
        """
        if (keep_float is None) == (budget is None):
            raise ValueError(
                f"to_qconfig_mapping: pass exactly one of keep_float and budget, got keep_float={keep_float} and "
                f"budget={budget}."
            )
        count = self._count_within(budget) if keep_float is None else keep_float
        if not 0 <= count <= len(self.rows):
            raise ValueError(f"to_qconfig_mapping: keep_float must lie in [0, {len(self.rows)}], got {keep_float}.")
        base = self.mapping if base is None else base
        mapping = QConfigMapping() if base is None else base.copy()
        for row in self.rows[:count]:
            if self.by == "type":
                mapping.set_object_type(self.types[row.name], None)
            else:
                mapping.set_module_name(row.name, None)
        return mapping

    def _count_within(self, budget: float | None) -> int:
        """Return the smallest number of worst rows to remove so that the remaining drops sum to at most the budget."""
        if budget is None or not (math.isfinite(budget) and budget >= 0):
            raise ValueError(f"to_qconfig_mapping: budget must be finite and at least 0, got {budget}.")
        drops = [row.drop for row in self.rows]
        return next(count for count in range(len(drops) + 1) if math.fsum(drops[count:]) <= budget)


@dataclass(frozen=True)
class _SwitchedTogether:
    """Quantizers that are switched together: of one layer, or of all layers of one type."""

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
    """Measure how the quantization of each layer, op or type affects a score, by enabling and disabling quantizers.

    `evaluate` gets the model in eval mode; ranges do not change, and the mode is restored afterwards. A layer's quantizers
    include the quantizers of its weights, of its inputs, and between its internal ops. Quantizers that a custom module calls in
    its own forward, and quantizers of a separately prepared submodule, have no row, because no config of this model controls
    them.

    Args:
        model: The result of `qtoolkit.prepare` or `qtoolkit.quant_modules.replace`, calibrated; or of `qtoolkit.convert`.
        evaluate: A function that returns the score of a model, such as its accuracy on some batches. It is called len(rows) + 2
            times; use torch.no_grad() in it.
        by: "layer" switches each layer, "type" all layers of a type together.
        mode: "one": one layer is quantized, all others are float. "all_but_one": one layer is float; a quantizer that it shares
            with another layer stays enabled, as in a config that keeps this layer in float.
        names: Names of the rows to measure; None measures all.
        higher_is_better: Whether a higher score is better; False for a loss.
        progress: Show a progress bar.

    Returns:
        The scores, the worst layer first (ties by name).

    Warns:
        UserWarning: A method of `qtoolkit.tuning` has rounded the weights or corrected the biases, so without quantizers the
            model differs from the float model.

    Raises:
        RuntimeError: A quantizer is not calibrated.
        ValueError: The model has no quantizers to switch, a name or an option is unknown, or a score is not finite.
        TypeError: `model` is not a module, or a score is not a number.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
        >>> prepared, x = qt.prepare(model, backend="tensorrt"), torch.rand(64, 8)
        >>> report = qt.calibrate(prepared, [x], progress=False)
        >>> def loss(m):
        ...     with torch.no_grad():
        ...         return float(torch.nn.functional.mse_loss(m(x), model(x)))
        >>> result = qt.debug.sensitivity(prepared, loss, higher_is_better=False, progress=False)
        >>> result.float_score, sorted(row.name for row in result.rows)
        (0.0, ['0', '2'])
        >>> mapping = result.to_qconfig_mapping(keep_float=1)
        >>> again = qt.prepare(model, qconfig_mapping=mapping, backend="tensorrt")
        >>> [line.name for line in qt.quantization_report(again).quantized]
        ['0']
    """
    check_flags("sensitivity", higher_is_better=higher_is_better, progress=progress)
    check_known("by", by, ("layer", "type"))
    check_known("mode", mode, ("one", "all_but_one"))
    model = _check(model)
    if not callable(evaluate) or isinstance(evaluate, type):
        raise TypeError(f"sensitivity: evaluate must be a function of a model, got {shown(evaluate)}.")
    every = _units(model, by)
    for name in names or ():
        check_known(by, name, [unit.name for unit in every])
    _warn_of_other_weights(model)
    units = [unit for unit in every if names is None or unit.name in names]
    with progress_bar("sensitivity", "scores", progress, total=len(units) + 2) as bar:

        def score(on: Collection[str], what: str) -> float:
            """Score the model with some quantizers enabled and all others disabled, with observers disabled."""
            with disable_quantization(model), freeze_ranges(model), evaluating(model):
                for name, quantizer in named_quantizers(model).items():
                    quantizer.quantizing = name in on
                found = evaluate(model)
            bar.update()
            return _number(found, what)

        quantized = score(named_quantizers(model), "all layers quantized")
        in_float = score((), "no layer quantized")
        rows = []
        for unit in units:
            if mode == "one":
                value = score(unit.quantizers, f"{unit.name!r} alone quantized")
                loss = in_float - value
            else:
                others = (other.quantizers for other in every if other is not unit)
                all_but = set(named_quantizers(model)) - unit.quantizers.difference(*others)
                value = score(all_but, f"all but {unit.name!r} quantized")
                loss = value - quantized
            rows.append(Row(unit.name, unit.kind, value, loss if higher_is_better else 0.0 - loss))
            worst = max(rows, key=lambda row: row.drop)
            note(bar, f"worst {worst.name}: {worst.drop:.4g}")
    rows.sort(key=lambda row: (-row.drop, row.name))
    types, plan = {unit.name: unit.type for unit in units} if by == "type" else {}, plan_of(model)
    return Sensitivity(in_float, quantized, tuple(rows), by, types, None if plan is None else plan.mapping)


def _units(model: nn.Module, by: By) -> list[_SwitchedTogether]:
    """Return the quantized layers and ops, or their types, each with its quantizers; raise ValueError if there are none."""
    ops: dict[str, Kind] = {}
    if isinstance(model, QuantizedGraphModule):
        ops = {name_of(n): object_type_of(n) for n in model.graph.nodes if n.op.startswith("call")}
    types = {name: float_type(module) for name, module in model.named_modules()} | ops
    lines: dict[str, list[LayerLine]] = defaultdict(list)
    for line in quantization_report(model).quantized:
        if line.quantizers:
            lines[path_of(types[line.name]) if by == "type" else line.name].append(line)
    if not lines:
        raise ValueError(
            "sensitivity: no layer is quantized by a config, only by quantizers that modules call themselves: compare scores "
            "with and without qtoolkit.disable_quantization."
        )
    return [
        _SwitchedTogether(
            name, of[0].kind, types[of[0].name], frozenset(quantizer for line in of for quantizer in line.quantizers)
        )
        for name, of in lines.items()
    ]


def _check(model: nn.Module) -> nn.Module:
    """Return the unwrapped model."""
    model = check_module(model, "sensitivity")
    quantizers = named_quantizers(model)
    if not quantizers:
        raise ValueError(
            "sensitivity: the model has no quantizers to switch; pass the result of qtoolkit.prepare, "
            "qtoolkit.quant_modules.replace or qtoolkit.convert."
        )
    for quantizer in quantizers.values():
        if isinstance(quantizer, TensorQuantizer):
            quantizer.check_ready()
    return model


def _warn_of_other_weights(model: nn.Module) -> None:
    """Warn about layers that differ from the float model when their quantizers are disabled."""
    layers = dict(model.named_modules())
    for names, have, by in (
        (rounded_in(layers), "rounded weights", "reconstruct or gptq"),
        (corrected_in(layers), "corrected biases", "bias_correction"),
    ):
        if names:
            warn(
                f"sensitivity: the layers {some(names)} have {have} (qtoolkit.tuning.{by}): with disabled quantizers they "
                "differ from the float model, so the float score and the drops are wrong. Measure a model without such a "
                "method.",
            )


def _number(score: float, what: str) -> float:
    try:
        value = float(score)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"sensitivity: evaluate must return a number, got {type(score).__name__}.") from None
    if not math.isfinite(value):
        raise ValueError(f"sensitivity: evaluate must return a finite score, got {value} with {what}.")
    return value
