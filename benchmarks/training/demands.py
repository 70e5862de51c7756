"""What is demanded of training with quantizers, and whether a run meets it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.training.networks import NETWORKS
from benchmarks.training.subjects import CODES, COMPILED, COMPILED_FLOAT, FLOAT, INTEGER, kind_of

# Network -> what is trained -> multiple of the float model's figure; what could not be measured is absent.
Ratios = Mapping[str, Mapping[str, float]]

COLUMNS = ("demand", "network", "goal", "measured", "verdict", "best peer")


@dataclass(frozen=True)
class Demand:
    """A bound on a figure, as a multiple of the float model's.

    Attributes:
        title: What is bounded.
        figure: "step", "kept" or "peak".
        subjects: What must meet it; the worst of them counts.
        goals: The bound by network.
        below: Whether the figure must be below the bound, not only at most the bound.
        baseline: The float model that it is a multiple of.
    """

    title: str
    figure: str
    subjects: tuple[str, ...]
    goals: Mapping[str, float]
    below: bool = False
    baseline: str = FLOAT

    def lines(self, ratios: Ratios) -> list[list[str]]:
        """Return a line of a table for each network that was measured."""
        return [self._line(network, of) for network, of in ratios.items() if network in self.goals]

    def _line(self, network: str, of: Mapping[str, float]) -> list[str]:
        goal, mark = self.goals[network], "< " if self.below else ""
        head = [f"{self.title} ({', '.join(self.subjects)})", NETWORKS[network].title, f"{mark}{goal:.2f}"]
        peers = sorted((ratio, name) for name, ratio in of.items() if kind_of(name) == "peer")
        best = f"{peers[0][0]:.2f} ({peers[0][1]})" if peers else ""
        if not all(name in of for name in (*self.subjects, self.baseline)):
            return [*head, "", "not measured", best]
        value = max(of[name] for name in self.subjects) / of[self.baseline]
        met = value < goal if self.below else value <= goal
        return [*head, f"{value:.2f}", "met" if met else "missed", best]


NAMES = ("resnet18", "resnet50", "mobilenet_v2", "fsrcnn", "vit")


def _goals(*of_networks: float | None) -> dict[str, float]:
    """Return the goals by network, in the order of NAMES; None for no goal."""
    return {name: goal for name, goal in zip(NAMES, of_networks, strict=True) if goal is not None}


DEMANDS = (
    Demand("step, float forward", "step", (CODES,), dict.fromkeys(NAMES, 1.0)),
    Demand("step, integer forward", "step", (INTEGER,), _goals(0.72, 0.74, 0.70, None, 0.85)),
    Demand(
        "step, compiled, against compiled float",
        "step",
        (COMPILED,),
        dict.fromkeys(NAMES, 0.85),
        baseline=COMPILED_FLOAT,
    ),
    Demand("bytes kept for backward", "kept", (CODES, INTEGER), _goals(0.5, 0.55, 0.42, 0.6, 0.75)),
    Demand("peak memory of a step", "peak", (CODES, INTEGER), {**dict.fromkeys(NAMES, 1.0), "vit": 0.8}, below=True),
)


def demand_lines(figure: str, ratios: Ratios) -> list[list[str]]:
    """Return the lines of the demands on a figure."""
    return [line for demand in DEMANDS if demand.figure == figure for line in demand.lines(ratios)]


def ratios_of(rows: Sequence[Mapping[str, object]], figure: str) -> Ratios:
    """Return the ratios in rows of a result."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if isinstance(ratio := row[figure], float):
            found.setdefault(str(row["network"]), {})[str(row["subject"])] = ratio
    return found
