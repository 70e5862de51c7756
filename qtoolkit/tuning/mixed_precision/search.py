"""MixedPrecision: the layers of a model, the costs of choices, and the choices with the smallest error within budgets."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from qtoolkit.backends import REQUIRED, Backend, backend_of
from qtoolkit.batches import no_batch
from qtoolkit.config import QConfig, QConfigMapping
from qtoolkit.debug.sensitivity import sensitivity
from qtoolkit.errors import check_flags, check_known, check_whole, shown, some, warn
from qtoolkit.graph.capture.trace import check_not_wrapped
from qtoolkit.layer_rules import LayerRules
from qtoolkit.model_inputs import bind
from qtoolkit.model_state import check_module, evaluating
from qtoolkit.nn.computed_weights import has_weight
from qtoolkit.progress import batches_of
from qtoolkit.report.layer_costs import LAYERS, bit_product, count_macs, layers_of
from qtoolkit.tuning.mixed_precision.assignment import Assignment, Front
from qtoolkit.tuning.mixed_precision.costs import Layer, own_config, size_of
from qtoolkit.tuning.mixed_precision.errors import (
    Errors,
    SquaredGradients,
    check_quantized,
    check_same_activations,
    weight_change,
)
from qtoolkit.tuning.mixed_precision.hessian import Loss, Trace, hessian_traces
from qtoolkit.tuning.mixed_precision.solve import Table, solve

T = TypeVar("T")


class MixedPrecision:
    """Chooses a config for each layer of a float model: the sum of the layers' errors is minimal within budgets.

    Layers with choices are layers with one weight: convolutions, transposed convolutions, linear layers and embeddings. All
    other ops keep their config: see `Assignment.to_qconfig_mapping`.

    The costs of a choice are its "size": bytes of the quantized weights and a float32 for each scale and zero point; its
    "bit_operations": macs * bits of the weight * bits of the activation, with 32 for float; and its "latency", from a table
    that you provide.

    Args:
        model: The float model.
        example_inputs: Inputs of its forward, as for `qtoolkit.prepare`, with the batch size for which bit operations are
            counted.
        choices: A config by name of the choice; None keeps a layer in float. The backend completes missing fields of a spec,
            and axis 0 means the output channel, as in a global rule.
        backend: The target (required), as for `qtoolkit.prepare`.
        fixed: Layers with a fixed choice, such as the first and the last layer.
        latency: The latency of each choice of each layer, in any unit.

    Warns:
        UserWarning: The weights of layers are computed from other tensors (pruned or parametrized): these layers have no
            choice.

    Raises:
        TypeError: `backend` is missing, `model` is not a module, or a choice is not a config.
        ValueError: There is no layer or no choice, a name is unknown, or the table of latencies has no entry for a choice.

    Attributes:
        layers: The layers by name.
        configs: The config of each choice of each layer, with all fields, and the axis of the layer's weight.
        costs: The cost of each choice of each layer, by the name of the cost.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).eval()
        >>> bits = {name: qt.QConfig(qt.QuantSpec(), qt.QuantSpec(bits=n, axis=0)) for name, n in (("w4", 4), ("w8", 8))}
        >>> search = qt.tuning.mixed_precision.MixedPrecision(model, torch.zeros(1, 8), bits, backend="tensorrt")
        >>> search.layers["0"]
        Layer(name='0', kind='linear', weights=128, macs=128)
        >>> errors = {"0": {"w4": 0.1, "w8": 0.0}, "2": {"w4": 0.3, "w8": 0.0}}
        >>> best = search.solve(errors, size=220)
        >>> best.choices, best.costs["size"]
        ({'0': 'w4', '2': 'w8'}, 208.0)
        >>> [(point.costs["size"], round(point.error, 3)) for point in search.front(errors, "size").points]
        [(176.0, 0.4), (208.0, 0.1), (272.0, 0.0)]
        >>> prepared = qt.prepare(model, qconfig_mapping=best.to_qconfig_mapping(), backend="tensorrt")
        >>> prepared.get_submodule("0.weight_quantizer").spec.bits
        4
        >>> search.solve(errors, size=100)
        Traceback (most recent call last):
        ...
        ValueError: MixedPrecision: size=100 cannot be met: the smallest of these choices is 176 bytes...
    """

    def __init__(
        self,
        model: nn.Module,
        example_inputs: object,
        choices: Mapping[str, QConfig | None],
        backend: str | Backend = REQUIRED,
        fixed: Mapping[str, str] | None = None,
        latency: Table | None = None,
    ) -> None:
        check_module(model, "MixedPrecision")
        check_not_wrapped(model, "MixedPrecision")
        bind(model, example_inputs, "MixedPrecision: example_inputs do")
        self.model, self.choices, self.fixed = model, dict(choices), dict(fixed or {})
        self.modules = {name: module for name, module in layers_of(model).items() if "weight" in module._parameters}
        self._check()
        self._warn_of_computed_weights()
        macs = count_macs(model, self.modules, example_inputs)
        self.layers = {name: Layer.of(name, module, macs[name]) for name, module in self.modules.items()}
        rules = LayerRules(backend_of(backend))
        self.configs = self._table(lambda name, choice: own_config(rules, self.modules[name], self.choices[choice]))
        self.costs: dict[str, dict[str, dict[str, float]]] = {
            "size": self._table(lambda name, choice: size_of(self.modules[name], self.configs[name][choice], name)),
            "bit_operations": self._table(lambda name, choice: macs[name] * bit_product(self.configs[name][choice])),
        }
        if latency is not None:
            self.costs["latency"] = self._table(lambda name, choice: _latency(latency, name, choice))

    def allowed(self, layer: str) -> Sequence[str]:
        """Return the names of a layer's choices."""
        return (self.fixed[layer],) if layer in self.fixed else tuple(self.choices)

    # ---- errors of the choices

    def measured_errors(
        self,
        build: Callable[[QConfigMapping], nn.Module],
        evaluate: Callable[[nn.Module], float],
        higher_is_better: bool = True,
        progress: bool = True,
    ) -> dict[str, dict[str, float]]:
        """Measure each choice of each layer with all other layers in float, with `qtoolkit.debug.sensitivity`.

        Args:
            build: Returns the model with a given mapping, prepared or replaced, and calibrated; called once for each choice.
            evaluate: Returns the score of a model; called once for each choice of each layer, plus twice for each choice.
            higher_is_better: Whether a higher score is better; False for a loss.
            progress: Show a progress bar.

        Returns:
            How much each choice of each layer alone worsens the score.

        Raises:
            ValueError: A layer is not quantized in the model that `build` returns; or as in `qtoolkit.debug.sensitivity`.
        """
        check_flags("measured_errors", higher_is_better=higher_is_better, progress=progress)
        errors: Errors = {name: {} for name in self.modules}
        for choice, config in self.choices.items():
            names = [name for name in self.modules if choice in self.allowed(name)]
            if config is None:
                for name in names:
                    errors[name][choice] = 0.0
            elif names:
                mapping = QConfigMapping().set_global(None)
                for name in names:
                    mapping.set_module_name(name, self.configs[name][choice])
                model = build(mapping)
                check_quantized(model, names, choice)
                for row in sensitivity(model, evaluate, "layer", "one", names, higher_is_better, progress).rows:
                    errors[row.name][choice] = row.drop
        return errors

    def hessian_errors(
        self,
        loss: Loss,
        batches: Iterable[object],
        probes: int = 16,
        seed: int = 0,
        traces: Mapping[str, Trace] | None = None,
        progress: bool = True,
    ) -> dict[str, dict[str, float]]:
        """Estimate the increase of the loss by the curvature: trace / weights * |Q(w) - w|^2 / 2 (HAWQ-V2, arXiv 1911.03852).

        The estimate covers only weights. A trace counts as at least its standard error.

        Args:
            loss: loss(model, batch) returns a scalar, the mean over the batch.
            batches: Batches for the traces.
            probes: Probes of each batch (see `hessian_traces`).
            seed: Seed of the probes.
            traces: Known traces by layer; then loss and batches are not used.
            progress: Show a progress bar.

        Raises:
            ValueError: Choices of a layer differ in their activations; or as in `hessian_traces`.
        """
        check_flags("hessian_errors", progress=progress)
        check_same_activations(self.configs)
        weights = {name: module.get_parameter("weight") for name, module in self.modules.items()}
        if traces is None:
            traces = hessian_traces(self.model, loss, batches, weights, probes, seed, progress)
        curvatures: dict[str, float] = {
            name: traces[name].at_least / weight.numel() for name, weight in weights.items()
        }

        def increase(name: str, choice: str) -> float:
            change = weight_change(self.modules[name], self.configs[name][choice], name)
            return curvatures[name] * float(change.double().square().sum()) / 2

        return self._table(increase)

    def gradient_errors(
        self, loss: Loss, batches: Iterable[object], progress: bool = True
    ) -> dict[str, dict[str, float]]:
        """Estimate the increase of the loss by squared gradients: N / 2 * sum (g * (Q(x) - x))^2 over weights and inputs.

        The squared gradients of a batch of N samples approximate the Hessian's diagonal (the empirical Fisher information). The
        estimate covers weights and activations; the specs' observers compute the ranges from all batches.

        Args:
            loss: loss(model, batch) returns a scalar, the mean over the batch.
            batches: A list of batches, which is run twice.
            progress: Show a progress bar.

        Raises:
            ValueError: There is no batch, or the loss is not finite.
        """
        check_flags("gradient_errors", progress=progress)
        if iter(batches) is batches:
            raise ValueError("MixedPrecision: gradient_errors runs the batches twice; pass a list of batches.")
        squares = SquaredGradients(self.model, self.modules, self.configs, loss)
        with evaluating(self.model):
            squares.calibrate(batches_of("gradients: ranges", batches, progress))
            found = [squares.of(batch) for batch in batches_of("gradients", batches, progress)]
        if not found:
            raise no_batch("gradient_errors")
        return self._table(lambda name, choice: sum(of[name][choice] for of in found) / len(found))

    # ---- the search

    def solve(
        self,
        errors: Table,
        size: float | None = None,
        bit_operations: float | None = None,
        latency: float | None = None,
    ) -> Assignment:
        """Return the choices with the smallest sum of errors within all given budgets. The result is exact.

        Args:
            errors: The error of each choice of each layer.
            size: The maximum number of bytes.
            bit_operations: The maximum number of bit operations.
            latency: The maximum latency, in the unit of the table.

        Raises:
            ValueError: No choices meet the budgets (the message gives the smallest possible value), no budget is given, or an
                error is missing or not finite.
            ImportError: SciPy is not installed.
        """
        given = {"size": size, "bit_operations": bit_operations, "latency": latency}
        budgets = {name: float(value) for name, value in given.items() if value is not None}
        if not budgets:
            raise ValueError(
                f"MixedPrecision: give at least one budget: {', '.join(self.costs)}. Without one, the choice with the smallest "
                "error is the best for each layer."
            )
        self._check_costs(budgets)
        chosen = solve(self._checked(errors), self.costs, budgets)
        if chosen is None:
            raise ValueError(self._cannot_be_met(budgets))
        pairs = list(chosen.items())
        return Assignment(
            dict(chosen),
            {name: self.configs[name][choice] for name, choice in pairs},
            sum(float(errors[name][choice]) for name, choice in pairs),
            {cost: float(sum(table[name][choice] for name, choice in pairs)) for cost, table in self.costs.items()},
        )

    def front(self, errors: Table, cost: str = "size", points: int = 16) -> Front:
        """Return the best assignments for budgets of one cost, in equal steps from the smallest possible value.

        Args:
            errors: The error of each choice of each layer.
            cost: "size", "bit_operations" or "latency".
            points: The number of budgets; repeated assignments are dropped.
        """
        check_whole("MixedPrecision", "points", points, 2)
        self._check_costs([cost])
        table = self._checked(errors)
        least = self._least(cost, {})
        most = sum(max(self.costs[cost][name][choice] for choice in table[name]) for name in table)
        found = [self.solve(errors, **{cost: budget}) for budget in np.linspace(least or 0.0, most, points)]
        unique = {tuple(point.choices.items()): point for point in found}
        return Front(cost, tuple(sorted(unique.values(), key=lambda point: (point.costs[cost], -point.error))))

    def _cannot_be_met(self, budgets: Mapping[str, float]) -> str:
        for name, budget in budgets.items():
            least = self._least(name, {})
            if least is not None and least > budget:
                return (
                    f"MixedPrecision: {name}={budget:.12g} cannot be met: the smallest of these choices is "
                    f"{least:.12g}{' bytes' if name == 'size' else ''}. Raise the budget, or add a choice with fewer bits."
                )
        (first, budget), *_ = budgets.items()
        others = {name: value for name, value in budgets.items() if name != first}
        return (
            f"MixedPrecision: {', '.join(f'{name}={value:.12g}' for name, value in budgets.items())} cannot be met together: "
            f"within the other budgets, the smallest {first} is {self._least(first, others):.12g}. Raise a budget."
        )

    def _least(self, cost: str, within: Mapping[str, float]) -> float | None:
        """Return the smallest sum of a cost within other budgets; None if these cannot be met."""
        table = self.costs[cost]
        chosen = solve(table, self.costs, within)
        return None if chosen is None else sum(table[name][choice] for name, choice in chosen.items())

    def _table(self, value: Callable[[str, str], T]) -> dict[str, dict[str, T]]:
        return {name: {choice: value(name, choice) for choice in self.allowed(name)} for name in self.modules}

    # ---- checks

    def _check(self) -> None:
        if not self.modules:
            raise ValueError(
                "MixedPrecision: the model has no convolution, linear layer or embedding; pass the float model, not a "
                "prepared model."
            )
        if not self.choices:
            raise ValueError("MixedPrecision: choices must have at least one config.")
        for name, config in self.choices.items():
            if config is not None and not isinstance(config, QConfig):
                raise TypeError(f"MixedPrecision: the choice {name!r} must be a QConfig or None, got {shown(config)}.")
        for name, choice in self.fixed.items():
            check_known("layer in fixed", name, self.modules)
            check_known(f"choice of layer {name!r} in fixed", choice, self.choices)

    def _warn_of_computed_weights(self) -> None:
        layers = {n: m for n, m in self.model.named_modules() if type_before_parametrizations(m) in LAYERS}
        computed = [repr(name) for name, module in layers.items() if name not in self.modules and has_weight(module)]
        if computed:
            warn(
                f"MixedPrecision: the weights of {some(computed)} are computed from other tensors (pruned or parametrized), "
                "so these layers have no choices and do not count in the costs; make them plain parameters with "
                "torch.nn.utils first.",
            )

    def _check_costs(self, names: Iterable[str]) -> None:
        for name in names:
            if name == "latency" and "latency" not in self.costs:
                raise ValueError("MixedPrecision: a latency budget needs a table: MixedPrecision(..., latency=table).")
            check_known("cost", name, self.costs)

    def _checked(self, errors: Table) -> dict[str, dict[str, float]]:
        """Return the errors of the layers' choices."""
        for name in self.modules:
            if name not in errors:
                raise ValueError(f"MixedPrecision: errors has no entry for the layer {name!r}.")
            for choice in self.allowed(name):
                if choice not in errors[name]:
                    raise ValueError(
                        f"MixedPrecision: errors has no entry for the choice {choice!r} of layer {name!r}."
                    )
                if not np.isfinite(errors[name][choice]):
                    raise ValueError(
                        f"MixedPrecision: the error of the choice {choice!r} of layer {name!r} must be finite, got "
                        f"{errors[name][choice]}; exclude the choice with fixed, or give it a large error."
                    )
        return self._table(lambda name, choice: float(errors[name][choice]))


def _latency(table: Table, name: str, choice: str) -> float:
    if choice not in table.get(name, {}):
        raise ValueError(f"MixedPrecision: latency has no entry for the choice {choice!r} of layer {name!r}.")
    return float(table[name][choice])
