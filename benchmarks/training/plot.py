"""A plot of the results: bars for each network, as multiples of the float model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.training.demands import Ratios, ratios_of
from benchmarks.training.options import rows_of
from benchmarks.training.tables import most_threads

GROUP = 0.85  # the width of a network's bars; networks are 1 apart


def draw(results: Mapping[str, Mapping[str, Any]], titles: Mapping[str, str], path: Path) -> None:
    """Write a panel for the time of a step and one for the bytes kept, as far as there are results."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "qtoolkit"  # the same file for the same results
    panels: dict[str, Ratios] = {}
    if "train_step" in results:
        panels["time of a step"] = ratios_of(most_threads(rows_of(results["train_step"])), "ratio")
    if "memory" in results:
        panels["bytes kept for backward"] = ratios_of(rows_of(results["memory"]), "kept")
    if not panels:
        return
    figure, axes = plt.subplots(len(panels), 1, figsize=(11, 3.6 * len(panels)), squeeze=False, layout="constrained")
    for (title, ratios), axis in zip(panels.items(), axes[:, 0], strict=True):
        _panel(axis, ratios, titles)
        axis.set_ylabel(f"{title}, x float")
    axes[0, 0].legend(ncols=5, fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _panel(axis: Any, ratios: Ratios, titles: Mapping[str, str]) -> None:
    subjects = list(dict.fromkeys(name for of in ratios.values() for name in of if name != "float"))
    width = GROUP / max(len(subjects), 1)
    for place, subject in enumerate(subjects):
        left = [(index - GROUP / 2 + place * width) for index, of in enumerate(ratios.values()) if subject in of]
        heights = [of[subject] for of in ratios.values() if subject in of]
        axis.bar(left, heights, width, label=subject, align="edge")
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xticks(range(len(ratios)), [titles[name] for name in ratios])
