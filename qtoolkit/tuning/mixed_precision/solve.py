"""Choose one option per layer with the smallest error within budgets: an integer linear program."""

from collections.abc import Mapping
from math import fsum

import numpy as np

from qtoolkit.extras import needed

ROUNDING = 1e-14  # of a sum of costs that are no whole numbers
Table = Mapping[str, Mapping[str, float]]  # layer -> choice -> a number


def solve(errors: Table, costs: Mapping[str, Table], budgets: Mapping[str, float]) -> dict[str, str] | None:
    """Return a choice for each layer; None if no choices meet the budgets (upper bounds of the sums of costs).

    The result is exact up to rounding errors: no combination within the budgets has a smaller sum of errors.

    Example:
        >>> errors = {"a": {"4": 1.0, "8": 0.0}, "b": {"4": 3.0, "8": 0.0}}
        >>> sizes = {"a": {"4": 4, "8": 8}, "b": {"4": 4, "8": 8}}
        >>> solve(errors, {"size": sizes}, {"size": 12})
        {'a': '4', 'b': '8'}
    """
    needed("scipy", "mixed precision", "tuning")
    from scipy import optimize

    places = [(layer, choice) for layer, choices in errors.items() for choice in choices]
    rows = [np.array([float(of == layer) for of, _ in places]) for layer in errors]  # one choice of each layer
    least, most = [1.0] * len(rows), [1.0] * len(rows)
    weights = {name: np.array([float(costs[name][layer][choice]) for layer, choice in places]) for name in budgets}
    for name, budget in budgets.items():
        unit = max(float(weights[name].max()), 1e-300)  # numbers near 1, as the solver's tolerances are absolute
        rows, least, most = [*rows, weights[name] / unit], [*least, -np.inf], [*most, budget / unit]
    objective = np.array([errors[layer][choice] for layer, choice in places], dtype=float)
    largest = float(np.abs(objective).max()) or 1.0
    while True:
        found = optimize.milp(
            objective / largest,
            integrality=np.ones(len(places)),
            bounds=optimize.Bounds(0, 1),
            constraints=optimize.LinearConstraint(np.array(rows), least, most),
            options={"mip_rel_gap": 0},
        )
        if found.x is None:
            return None
        chosen = np.round(found.x)
        if all(fsum(weights[name] * chosen) <= budget * (1 + ROUNDING) for name, budget in budgets.items()):
            return {layer: choice for (layer, choice), taken in zip(places, chosen, strict=True) if taken}
        # Within the solver's tolerance, but not within the budget: exclude this combination.
        rows, least, most = [*rows, chosen], [*least, -np.inf], [*most, chosen.sum() - 1]
