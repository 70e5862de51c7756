"""What module replacement has noted on a model."""

from torch import nn

from qtoolkit.eager.rules import PLAN
from qtoolkit.graph.plan import Plan


def plan_of(model: nn.Module) -> Plan | None:
    """Return what module replacement decided on a model, or first on a part of it; None where it was not asked to."""
    plans = (vars(module).get(PLAN) for module in model.modules())
    return next((plan for plan in plans if isinstance(plan, Plan)), None)
