"""Writes the figures of README.md, and the plot of three of them, docs/figures.svg.

python -m benchmarks.pages.front_page    takes train_step.json, memory.json, codes.json and gpu.json of benchmarks/results

Needs matplotlib. Run it after train_step, memory, codes or gpu.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.pages.stored import write_part

ROOT = Path(__file__).parents[2]
BEGIN = "<!-- begin: benchmarks/pages/front_page.py -->"
END = "<!-- end -->"
NETWORK, OURS, ON_GPU = "resnet18", "ours, integer", "ours, learned scales"
PLOT = "figures.svg"
OUR_COLOR, OTHER_COLOR = "#3949ab", "#9e9e9e"


@dataclass(frozen=True)
class Figures:
    """What the page shows.

    Attributes:
        time: Time of a training step by tool, as a multiple of the float model's.
        memory: Bytes kept for the backward pass by tool, as a multiple of the float model's.
        simulated: Share of the quantized values that differ in onnxruntime from those of a float simulation, by network.
        differing: How many differ from those of integer arithmetic, in all networks.
        compared: How many were compared.
        versions: The versions of the other tools.
        card: The GPU that was measured.
        batch: The size of its batches.
        on_gpu: By network, the time of a step as a CUDA graph there, and its peak of memory, as multiples of the float model's.
    """

    time: Mapping[str, float]
    memory: Mapping[str, float]
    simulated: Mapping[str, float]
    differing: int
    compared: int
    versions: Mapping[str, str]
    card: str
    batch: int
    on_gpu: Mapping[str, tuple[float, float]]


def figures_of(results: Path) -> Figures:
    """Read the figures from the files of a folder."""
    steps, memory, codes = (
        json.loads((results / f"{name}.json").read_text()) for name in ("train_step", "memory", "codes")
    )
    rows = [row for row in codes if row["runtime"].startswith("onnxruntime")]
    gpu = json.loads((results / "gpu.json").read_text())["rows"]
    card = gpu[-1]["card"]
    learned = [row for row in gpu if row["card"] == card and row.get("subject") == ON_GPU and row.get("captured")]
    batch = max(row["batch"] for row in learned)
    return Figures(
        _by_tool(steps, "ratio"),
        _by_tool(memory, "kept"),
        {row["network"].split(",")[0]: row["float_differing"] / row["codes"] for row in rows},
        sum(row["integer_differing"] for row in rows),
        sum(row["codes"] for row in rows),
        {name: version for name, version in steps["peers"].items() if name != "torch"},
        card,
        batch,
        {row["network"]: (row["captured_ratio"], row["mebibytes_ratio"]) for row in learned if row["batch"] == batch},
    )


def _by_tool(results: Mapping[str, Any], figure: str) -> dict[str, float]:
    """Return a figure of ours and of the other tools, on the most threads that were measured, the lowest first."""
    rows = results["networks"][NETWORK]["rows"]
    most = max(row.get("threads", 1) for row in rows)
    found = {
        "qtoolkit" if row["subject"] == OURS else row["subject"]: row[figure]
        for row in rows
        if row.get("threads", 1) == most and (row["kind"] == "peer" or row["subject"] == OURS)
    }
    return dict(sorted(found.items(), key=lambda item: item[1]))


def lines_of(figures: Figures) -> list[str]:
    """Return the figures as lines of Markdown."""
    time, memory = (
        [value for name, value in of.items() if name != "qtoolkit"] for of in (figures.time, figures.memory)
    )
    worst = max(figures.simulated.values())
    on_gpu = [f"{name} {time:.2f} and {peak:.2f} times" for name, (time, peak) in figures.on_gpu.items()]
    return [
        f"- **{figures.time['qtoolkit']:.2f} times the time** of a float training step; {len(time)} other tools take "
        f"{min(time):.2f} to {max(time):.2f} times.",
        f"- **{figures.memory['qtoolkit']:.2f} times the memory** kept for the backward pass; the other tools keep "
        f"{min(memory):.2f} to {max(memory):.2f} times.",
        f"- **{figures.differing:,} of {figures.compared:,} quantized values differ** between PyTorch and onnxruntime, in "
        f"{len(figures.simulated)} networks. With the usual simulation in float, up to {worst:.1%} differ.",
        f"- On a GPU ({figures.card}, bfloat16, batches of {figures.batch}, learned scales) a step recorded as a CUDA "
        f"graph takes, of the float step's time and peak of memory: {', '.join(on_gpu)}.",
    ]


def draw(figures: Figures, path: Path) -> None:
    """Write the plot: a panel for each figure."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.rcParams.update(
        {"svg.hashsalt": "qtoolkit", "svg.fonttype": "none", "font.size": 9, "font.family": "sans-serif"}
    )
    figure, (time, memory, differing) = plt.subplots(1, 3, figsize=(11, 2.8), layout="constrained")
    for axis, of, title in (
        (time, figures.time, "time of a training step"),
        (memory, figures.memory, "memory for backward"),
    ):
        _bars(axis, of, [OUR_COLOR if name == "qtoolkit" else OTHER_COLOR for name in of], "{:.2f}")
        axis.axvline(1, color="black", linewidth=0.8, linestyle=":", zorder=0)
        axis.set_title(f"{title}\n(ResNet-18; float model = 1)", fontsize=9)
    shares = {name: 100 * share for name, share in figures.simulated.items()}
    _bars(differing, shares, [OTHER_COLOR] * len(shares), "{:.2f} %")
    differing.set_title(
        f"values that differ in onnxruntime\n(simulated in float; qtoolkit: {figures.differing})", fontsize=9
    )
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _bars(axis: Any, values: Mapping[str, float], colors: list[str], form: str) -> None:
    bars = axis.barh(list(values), list(values.values()), color=colors)
    axis.bar_label(bars, [form.format(value) for value in values.values()], padding=2)
    axis.invert_yaxis()
    axis.margins(x=0.2)
    axis.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Write the figures and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--page", type=Path, default=ROOT / "README.md")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / PLOT)
    args = parser.parse_args()
    figures = figures_of(args.results)
    write_part(args.page, BEGIN, END, lines_of(figures))
    draw(figures, args.plot)


if __name__ == "__main__":
    main()
