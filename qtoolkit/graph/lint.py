"""lint(): which quantized edges of a prepared or converted model would break a fusion on its target."""

from collections.abc import Iterator

from qtoolkit.backends import Backend
from qtoolkit.errors import check_flags
from qtoolkit.graph.graph_module import QuantizedGraphModule, plan_in
from qtoolkit.graph.placement.view import ops_of
from qtoolkit.graph.plan import Plan
from qtoolkit.graph.verdict_now import verdict_now
from qtoolkit.lint.findings import Broken, Finding, LintRule, broken
from qtoolkit.lint.layers import ADVICE, LAYERS
from qtoolkit.lint.ops import Op
from qtoolkit.lint.placement import PLACEMENT
from qtoolkit.verdicts import Cause, Status


def lint(model: QuantizedGraphModule, advice: bool = False) -> tuple[Finding, ...]:
    """Check the quantizers of a model against the rules of its backend.

    The rules are in `qtoolkit.lint`; `qtoolkit.export.lint` checks them on files too.

    Args:
        model: The result of `qtoolkit.prepare` or `qtoolkit.convert`, also with a graph that was changed afterwards.
        advice: Also list the ops that the target's own quantizer leaves in float, because they are not faster in integers
            (`qtoolkit.lint.layers`). `prepare` quantizes them.

    Returns:
        One finding for each edge or op that breaks a rule, in the order of the graph. Without advice, an unchanged graph
        breaks none.

    Raises:
        TypeError: The model was not prepared.

    Example:
        >>> from qtoolkit.graph.lint import lint
        >>> lint(qt.prepare(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()), backend="tensorrt"))
        ()
    """
    check_flags("lint", advice=advice)
    if not isinstance(model, QuantizedGraphModule) or plan_in(model) is None:
        raise TypeError(
            f"lint: model must be what qtoolkit.prepare or qtoolkit.convert returned, got {type(model).__name__}."
        )
    backend = model.plan.backend
    rules = (*PLACEMENT, _put_in(model.plan), *LAYERS, *(ADVICE[name] for name in backend.advice if advice))
    return broken(rules, ops_of(model.graph), backend)


def _put_in(plan: Plan) -> LintRule:
    """Return the rule that no quantized op was replaced after the model was prepared."""

    def check(op: Op, backend: Backend) -> Iterator[Broken]:
        node = op.node
        if op.is_quantizer or node.op not in ("call_module", "call_function", "call_method"):
            return
        verdict = verdict_now(node, plan)
        if verdict.cause is Cause.PUT_IN and plan.status.get(node.name, verdict).status is Status.QUANTIZED:
            yield (
                f"the plan quantizes it, and it is {verdict.text}.",
                "Make that change in the float model, and call qtoolkit.prepare on it.",
            )

    return LintRule("put-in", check, "the plan of the model")
