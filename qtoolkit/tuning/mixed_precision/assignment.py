"""Results of a mixed-precision search: a choice for each layer, and the Pareto front."""

import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from qtoolkit.config import QConfig, QConfigMapping
from qtoolkit.errors import check_flags
from qtoolkit.extras import needed
from qtoolkit.files import write_atomically
from qtoolkit.progress import note, progress_bar
from qtoolkit.report.lines import table

UNITS = {"size": "bytes", "bit_operations": "bit operations", "latency": "of the latency table"}


@dataclass(frozen=True)
class Assignment:
    """A choice for each layer; prints as a table.

    Attributes:
        choices: The name of the choice for each layer.
        configs: The config of each layer, with the axis of its weight; None keeps it in float.
        error: The sum of the layers' errors.
        costs: The sum of the layers' costs, by name: "size" in bytes, "bit_operations", and "latency" if a table was given.
    """

    choices: Mapping[str, str]
    configs: Mapping[str, QConfig | None] = field(repr=False)
    error: float
    costs: Mapping[str, float]

    def to_qconfig_mapping(self, base: QConfigMapping | None = None) -> QConfigMapping:
        """Return the mapping for `qtoolkit.prepare` and `qtoolkit.quant_modules.replace`: a rule by name for each layer.

        Args:
            base: Rules for everything else, such as adds; it is not changed. Default: the backend's config.
        """
        mapping = QConfigMapping() if base is None else base.copy()
        for name, config in self.configs.items():
            mapping.set_module_name(name, config)
        return mapping

    def __str__(self) -> str:
        costs = ", ".join(f"{name} {cost:,.6g} {UNITS[name]}" for name, cost in self.costs.items())
        rows: list[tuple[str, ...]] = [("layer", "choice", "config")]
        for name, choice in self.choices.items():
            config = self.configs[name]
            rows.append((name, choice, "float" if config is None else config.describe()))
        return "\n".join([f"error {self.error:.6g}; {costs}", "", *table(rows)])


@dataclass(frozen=True)
class Front:
    """The assignments with the smallest error for increasing costs; prints as a table.

    Attributes:
        cost: "size", "bit_operations" or "latency".
        points: The assignments.
        scores: The score of each assignment from `measured`, such as an accuracy; empty before.
    """

    cost: str
    points: tuple[Assignment, ...]
    scores: tuple[float, ...] = ()

    def measured(
        self,
        evaluate: Callable[[QConfigMapping], float],
        base: QConfigMapping | None = None,
        progress: bool = True,
    ) -> "Front":
        """Return the front with the score of each point; evaluate(mapping) prepares, calibrates or trains, and scores.

        Args:
            evaluate: Returns the score of a mapping.
            base: Rules for everything else, as in `Assignment.to_qconfig_mapping`.
            progress: Show a progress bar.
        """
        check_flags("measured", progress=progress)
        scores: list[float] = []
        with progress_bar("front", "points", progress, self.points) as bar:
            for point in bar:
                scores.append(float(evaluate(point.to_qconfig_mapping(base))))
                note(bar, f"{point.costs[self.cost]:,.6g} {UNITS[self.cost]}: {scores[-1]:.6g}")
        return Front(self.cost, self.points, tuple(scores))

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [(self.cost, "error", *(["score"] if self.scores else []))]
        for i, point in enumerate(self.points):
            score = [f"{self.scores[i]:.6g}"] if self.scores else []
            rows.append((f"{point.costs[self.cost]:,.6g}", f"{point.error:.6g}", *score))
        return "\n".join(table(rows))

    def plot(self, path: str | os.PathLike[str], score: str = "score") -> None:
        """Write a plot as SVG, PNG or PDF, chosen by the suffix of the path: the scores if measured, else the errors.

        Args:
            path: The file; its folder is created.
            score: The name of the scores, for the axis.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: The suffix is none of the three.
        """
        endings = (".svg", ".png", ".pdf")
        ending = os.path.splitext(os.fspath(path))[1]
        if ending not in endings:
            raise ValueError(f"plot: the path must end in one of {', '.join(endings)}, got {os.fspath(path)!r}.")
        figure = needed("matplotlib.figure", "plot", "tuning").Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        values: Sequence[float] = self.scores or [point.error for point in self.points]
        axes.plot([point.costs[self.cost] for point in self.points], values, marker="o")
        axes.set_xlabel(f"{self.cost} [{UNITS[self.cost]}]" if self.cost == "size" else self.cost)
        axes.set_ylabel(score if self.scores else "predicted error")
        axes.grid(alpha=0.3)
        picture = io.BytesIO()
        figure.savefig(picture, format=ending[1:])
        write_atomically(picture.getvalue(), path)
