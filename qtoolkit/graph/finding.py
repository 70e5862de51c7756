"""Finding: what lint says of one node."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """An edge or op that the target would not compute as planned.

    Attributes:
        where: The graph node.
        rule: What the target asks for, and what is found instead.
        remedy: What to change.
    """

    where: str
    rule: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.where}: {self.rule} {self.remedy}"
