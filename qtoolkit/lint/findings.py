"""Findings, and rules that make them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from qtoolkit.backends import Backend
from qtoolkit.lint.ops import Op, find_quantizers

# Where rules are documented that are not a runtime's own (`qtoolkit.runtimes.table.Runtime.rules`).
IMPORTER = "onnx-tensorrt, the importer of QuantizeLinear and DequantizeLinear"
MODEL_OPTIMIZER = "NVIDIA Model Optimizer, modelopt.onnx.quantization"
ONNX = "ONNX, the operators QuantizeLinear and DequantizeLinear"
TABLE = "qtoolkit/backends.py, with the sources of each target"


@dataclass(frozen=True)
class Finding:
    """An edge or op that the target would not compute as planned.

    Attributes:
        where: The name of the op: of a model's graph, as a QConfigMapping takes it, and of a quantizer, the name of its
            submodule; of a file, the name of the node, or of its output where the node has none.
        rule: The demand of the target, and what is found instead.
        remedy: The change to make.
        name: The name of the rule.
        source: Where the rule is documented or was measured.
    """

    where: str
    rule: str
    remedy: str
    name: str = ""
    source: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.rule} {self.remedy}"


Broken = tuple[str, str]  # what a target asks for and what is found at an op instead; and what to change
BrokenAt = tuple[Op, str, str]  # the same with the op
Check = Callable[[Op, Backend], Iterator[Broken]]


@dataclass(frozen=True)
class LintRule:
    """A rule of one or more targets."""

    name: str  # its name in reports
    check: Check  # finds what breaks the rule at an op
    source: str  # where the rule is documented or was measured
    applies: Callable[[Backend], bool] = lambda backend: True  # whether a target has the rule


@dataclass(frozen=True)
class GraphRule:
    """A rule about all ops of a graph together."""

    name: str  # its name in reports
    check: Callable[[Sequence[Op], Backend], Iterator[BrokenAt]]  # finds what breaks the rule
    source: str  # where the rule is documented or was measured
    applies: Callable[[Backend], bool] = lambda backend: True  # whether a target has the rule


def broken(rules: Iterable[LintRule | GraphRule], ops: Sequence[Op], backend: Backend) -> tuple[Finding, ...]:
    """Return the findings of these rules, as far as the target has them, in the order of the ops."""
    rules = [rule for rule in rules if rule.applies(backend)]
    find_quantizers(ops, backend)
    found: dict[Op, list[Finding]] = {op: [] for op in ops}
    for rule in rules:
        if isinstance(rule, GraphRule):
            for op, what, remedy in rule.check(ops, backend):
                found[op].append(Finding(op.name, what, remedy, rule.name, rule.source))
    for op in ops:
        for rule in rules:
            if isinstance(rule, LintRule):
                found[op] += [
                    Finding(op.name, what, remedy, rule.name, rule.source) for what, remedy in rule.check(op, backend)
                ]
    return tuple(finding for op in ops for finding in found[op])
