"""A plot of the results: the accuracy of each method with the bits of each column."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.pages.post_training.hits import accuracy, unpacked
from benchmarks.pages.post_training.methods import ALL_BITS, Method

LOWEST = 60.0  # percent; what is below is at the edge, with its figure
MARKS = ("o", "s", "^")


def draw(results: Mapping[str, Any], methods: Mapping[str, Method], path: Path) -> None:
    """Write the plot as SVG: a line for each method, a mark for each number of bits."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "qtoolkit"  # the same file for the same results
    count = results["test_images"]
    found = {
        (row["method"], row["bits"]): accuracy(unpacked(row["hits"], count)) for row in results["rows"] if row["hits"]
    }
    names = [name for name in methods if any((name, str(bits)) in found for bits in ALL_BITS)]
    figure, axis = plt.subplots(figsize=(9, 1.5 + 0.26 * len(names)), layout="constrained")
    for bits, mark in zip(ALL_BITS, MARKS, strict=True):
        places = [place for place, name in enumerate(names) if (name, str(bits)) in found]
        values = [found[names[place], str(bits)] for place in places]
        axis.plot([max(value, LOWEST) for value in values], places, mark, label=str(bits), alpha=0.8)
        for place, value in zip(places, values, strict=True):
            if value < LOWEST:
                axis.annotate(
                    f"{bits} {value:.0f}", (LOWEST, place), (6, -3), textcoords="offset points", fontsize="x-small"
                )
    axis.axvline(accuracy(unpacked(results["float_hits"], count)), color="black", linewidth=0.8, label="float")
    for place in range(1, len(names)):
        if methods[names[place]].group != methods[names[place - 1]].group:
            axis.axhline(place - 0.5, color="gray", linewidth=0.5)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.grid(axis="x", alpha=0.3)
    axis.set_xlabel(f"accuracy on {count:,} test images of CIFAR-10, %")
    axis.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
