"""A plot of benchmarks/pages/accuracy.py: the accuracy after training of each subject, with the bits of each column."""

from collections.abc import Mapping, Sequence
from pathlib import Path

LOWEST = 40.0  # percent; what is below is at the edge, with its figure
MARKS = {8: "o", 4: "^", 3: "s", 2: "v"}


def draw(path: Path, accuracies: Mapping[tuple[str, int], Sequence[float]], float_model: float | None) -> None:
    """Write the plot as SVG: a line for each subject, a mark for the mean and a bar from the worst to the best seed.

    Args:
        path: The file.
        accuracies: By subject and number of bits the accuracy with each seed, in percent.
        float_model: That of the float model after the same training; None where there is none.
    """
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "qtoolkit"  # the same file for the same results
    names = list(dict.fromkeys(name for name, _ in accuracies))
    figure, axis = plt.subplots(figsize=(9, 1.5 + 0.26 * len(names)), layout="constrained")
    for bits, mark in MARKS.items():
        found = [(place, accuracies[name, bits]) for place, name in enumerate(names) if (name, bits) in accuracies]
        if not found:
            continue
        places = [place for place, _ in found]
        means = [max(sum(of) / len(of), LOWEST) for _, of in found]
        axis.plot(means, places, mark, label=f"W{bits}A{bits}", alpha=0.8)
        color = axis.lines[-1].get_color()
        for place, of in found:
            axis.plot([max(min(of), LOWEST), max(*of, LOWEST)], [place, place], color=color, linewidth=1)
            if max(of) < LOWEST:
                text = f"W{bits}A{bits} {sum(of) / len(of):.0f}"
                axis.annotate(text, (LOWEST, place), (6, -3), textcoords="offset points", fontsize="x-small")
    if float_model is not None:
        axis.axvline(float_model, color="black", linewidth=0.8, label="float, same training")
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.grid(axis="x", alpha=0.3)
    axis.set_xlabel("accuracy on the test images of CIFAR-10, %")
    axis.legend(ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
