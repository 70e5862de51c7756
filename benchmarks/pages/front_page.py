"""Writes the figures of README.md, and the plot of three of them, docs/figures.svg.

python -m benchmarks.pages.front_page

It takes these files of benchmarks/results: accuracy, ptq, super_resolution, text_encoder, deployment, codes, zoo, train_step,
memory and gpu. deployment.json has the latencies of docs/runtimes.md and docs/litert.md, and the sizes of the files. Needs
matplotlib.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.pages.post_training.hits import accuracy, unpacked
from benchmarks.pages.stored import write_part
from benchmarks.pages.zoo_models.sums import compared, differing
from benchmarks.report import markdown_lines

ROOT = Path(__file__).parents[2]
BEGIN_OPENING = "<!-- begin: benchmarks/pages/front_page.py, opening -->"
BEGIN = "<!-- begin: benchmarks/pages/front_page.py -->"
END = "<!-- end -->"
BITS = ("W8A8", "W4A4")
NETWORK, OURS, ON_GPU = "resnet18", "ours, integer", "ours, learned scales"
OTHERS = {"torch.ao": "torch.ao, learnable", "Brevitas": "Brevitas"}  # as the page names them, and accuracy.json
PLOT = "figures.svg"
OUR_COLOR, OTHER_COLOR = "#3949ab", "#9e9e9e"


@dataclass(frozen=True)
class Accuracy:
    """The accuracy of a network in float and quantized.

    Attributes:
        network: Its name, its data set and the unit.
        method: How it was quantized.
        float_model: The float model's accuracy.
        quantized: The accuracy by bits, in the order of BITS; None where it was not measured.
    """

    network: str
    method: str
    float_model: float
    quantized: Sequence[float | None]


@dataclass(frozen=True)
class Figures:
    """What the page shows.

    Attributes:
        accuracies: Of networks, post-training and trained; the second one is ResNet-20's after one epoch.
        others: ResNet-20's accuracy after that epoch in W4A4 with other tools.
        files: Latency and size of files: the rows of deployment.json.
        processor: Where the latencies were measured.
        time: Time of a training step by tool, as a multiple of the float model's.
        memory: Bytes kept for the backward pass by tool, as a multiple of the float model's.
        simulated: Share of the quantized values that differ in onnxruntime from those of a float simulation, by network.
        differing: How many differ from those of integer arithmetic, in all networks.
        compared: How many were compared.
        spread: The largest share that differs in OpenVINO from integer arithmetic, end to end.
        zoo: The results of the models of the zoo.
        versions: The versions of the other tools.
        card: The GPU that was measured.
        on_gpu: By network, the time of a step as a CUDA graph there, and its peak of memory, as multiples of the float model's.
        launched: The time of the steps without a CUDA graph, by the size of batches.
        failed_on_gpu: Other tools that raised an error on a GPU, and the networks.
    """

    accuracies: Sequence[Accuracy]
    others: Mapping[str, float]
    files: Sequence[Mapping[str, Any]]
    processor: str
    time: Mapping[str, float]
    memory: Mapping[str, float]
    simulated: Mapping[str, float]
    differing: int
    compared: int
    spread: float
    zoo: Sequence[Mapping[str, Any]]
    versions: Mapping[str, str]
    card: str
    on_gpu: Mapping[str, tuple[float, float]]
    launched: Mapping[int, Sequence[float]]
    failed_on_gpu: Mapping[str, Sequence[str]]


def figures_of(results: Path) -> Figures:
    """Read the figures from the files of a folder."""
    steps, memory, codes, files, trained, zoo = (
        json.loads((results / f"{name}.json").read_text())
        for name in ("train_step", "memory", "codes", "deployment", "accuracy", "zoo")
    )
    rows = [row for row in codes if row["runtime"].startswith("onnxruntime")]
    gpu = json.loads((results / "gpu.json").read_text())["rows"]
    card = gpu[-1]["card"]
    learned = [row for row in gpu if row["card"] == card and row.get("subject") == ON_GPU and row.get("captured")]
    batches = sorted({row["batch"] for row in learned}, reverse=True)
    failed: dict[str, list[str]] = {}
    for row in gpu:
        if "failed" in row:
            failed.setdefault(row["subject"], []).append(row["network"])
    return Figures(
        [*_accuracies(results, trained)],
        {name: statistics.mean(_after_an_epoch(trained, subject, 4)) for name, subject in OTHERS.items()},
        files["rows"],
        files["cpu"],
        _by_tool(steps, "ratio"),
        _by_tool(memory, "kept"),
        {row["network"].split(",")[0]: row["float_differing"] / row["codes"] for row in rows},
        sum(row["integer_differing"] for row in rows),
        sum(row["codes"] for row in rows),
        max(row["integer_differing"] / row["codes"] for row in codes if row not in rows),
        [outcome for outcome in zoo["models"] if not outcome["failed"]],
        {name: version for name, version in steps["peers"].items() if name != "torch"},
        card,
        {
            row["network"]: (row["captured_ratio"], row["mebibytes_ratio"])
            for row in learned
            if row["batch"] == batches[0]
        },
        {batch: [row["milliseconds_ratio"] for row in learned if row["batch"] == batch] for batch in batches},
        failed,
    )


def _accuracies(results: Path, trained: Mapping[str, Any]) -> Iterator[Accuracy]:
    """Yield the accuracies, from the files of a folder; `trained` is accuracy.json."""
    ptq, images, text = (
        json.loads((results / f"{name}.json").read_text()) for name in ("ptq", "super_resolution", "text_encoder")
    )
    hits = {row["bits"]: row["hits"] for row in ptq["rows"] if row["method"] == "adaround"}
    of_float, *rounded = (
        accuracy(unpacked(of, ptq["test_images"])) for of in (ptq["float_hits"], *(hits[bits] for bits in BITS))
    )
    yield Accuracy("ResNet-20, CIFAR-10, %", "post-training, AdaRound", of_float, rounded)
    after = [_after_an_epoch(trained, *of) for of in (("float", 32), ("fixed", 8), ("lsq", 4))]
    means = [statistics.mean(of) for of in after]
    seeds = f"{len(after[0])} seeds (W8A8: {len(after[1])})"
    yield Accuracy("ResNet-20, CIFAR-10, %", f"QAT, one epoch, {seeds}", means[0], means[1:])
    psnr = {
        bits: statistics.mean(row["y"] for row in images["rows"] if (row["method"], row["bits"]) == (method, bits))
        for method, bits in (("float", ""), *(("lsq_plus, balanced", bits) for bits in BITS))
    }
    yield Accuracy("FSRCNN x2, Set5, dB", "QAT, 2,000 steps", psnr[""], [psnr[bits] for bits in BITS])
    found = {row["bits"]: row["spearman"] for row in text["rows"] if row["method"] == "minmax"}
    float_model = text["float_model"]["spearman"]
    yield Accuracy(
        "MiniLM-L6, STS-B, correlation", "post-training, calibration", float_model, [found.get(bits) for bits in BITS]
    )


def _after_an_epoch(results: Mapping[str, Any], subject: str, bits: int) -> list[float]:
    """Return ResNet-20's accuracy after one epoch of the labels alone, with each seed."""
    wanted = {"subject": subject, "bits": bits, "epochs": 1, "network": "resnet20", "teacher": False, "rate": 0.01}
    found = [row for row in results["rows"] if all(row["training"][name] == of for name, of in wanted.items())]
    return [row["trained"] for row in found]


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


def opening_of(figures: Figures) -> list[str]:
    """Return the figures of the first lines of the page."""
    time, memory = (
        [value for name, value in of.items() if name != "qtoolkit"] for of in (figures.time, figures.memory)
    )
    trained, file = figures.accuracies[1], figures.files[0]
    of_8, of_4 = (f"{value:.2f} %" for value in trained.quantized if value is not None)
    size, default, signed = file["int8_kib"] / file["float_kib"], file["default"], file["int8"]
    our_time, our_memory = figures.time["qtoolkit"], figures.memory["qtoolkit"]
    return [
        f"- **Accuracy**: after one epoch of QAT, ResNet-20 has {of_8} on CIFAR-10 in 8 bits and {of_4} in 4 bits "
        f"(float: {trained.float_model:.2f} %).",
        f"- **Deployment**: in {file['runtime']}, {file['network']} is {_percent(1 - size)} smaller than in float "
        f"and runs in {_percent(1 - default)} less time (int8 weights: {_percent(1 - signed)}).",
        f"- **Training**: on two CPU cores with int8 instructions, a QAT step of ResNet-18 takes {_percent(1 - our_time)} less "
        f"time than a float step and {_percent(1 - our_memory)} less memory for backward; {len(time)} other tools take "
        f"at least {_percent(min(time) - 1)} more time and {_percent(min(memory) - 1)} more memory.",
    ]


def lines_of(figures: Figures) -> list[str]:
    """Return the figures as lines of Markdown."""
    worst = max(figures.simulated.values())
    others = " and ".join(f"{value:.2f} % with {name}" for name, value in figures.others.items())
    failed = [f"{name} raises an error in bfloat16 for {', '.join(of)}" for name, of in figures.failed_on_gpu.items()]
    launched = " and ".join(
        f"{min(of):.2f} to {max(of):.2f} times the float step with batches of {batch}"
        for batch, of in figures.launched.items()
    )
    return [
        "**Accuracy.** W8A8 has 8-bit weights and activations, W4A4 has 4-bit ones (first and last layer: 8 bits). The "
        "difference from the float model is in brackets; a dash means not measured. The float model beside one epoch of QAT is "
        "trained for one epoch more, too. Differences below 0.4 points are smaller than those between seeds. ImageNet was not "
        "measured.",
        "",
        *markdown_lines(
            ("network, data", "method", "float", *BITS),
            [
                [
                    of.network,
                    of.method,
                    f"{of.float_model:.2f}",
                    *(_beside(value, of.float_model) for value in of.quantized),
                ]
                for of in figures.accuracies
            ],
        ),
        "",
        f"With the same epoch in W4A4, ResNet-20 reaches {others}.",
        "",
        f"**Deployment.** Latency on one thread ({figures.processor}), and file size. Int8 weights are the fastest; uint8 "
        "weights, the default for onnxruntime, are exact on every x86 processor. onnxruntime computes 4-bit values with its "
        "int8 kernels: a W4A4 file is as large and as fast as the int8 file.",
        "",
        *markdown_lines(
            ("network", "runtime", "float, ms", "int8 / float", "uint8 / float", "float file, KiB", "int8 file, KiB"),
            [
                [
                    *(row["network"], row["runtime"], f"{row['milliseconds']:.2f}", f"{row['int8']:.2f}"),
                    _cell(row["default"], ".2f"),
                    *(_cell(row[size], ",") for size in ("float_kib", "int8_kib")),
                ]
                for row in figures.files
            ],
        ),
        "",
        f"**Verification.** {figures.differing:,} of {figures.compared:,} quantized values differ between PyTorch and "
        f"onnxruntime, in {len(figures.simulated)} convolutional networks, from the input to the output. With the usual "
        f"simulation in float, up to {_percent(worst, 1)} differ. In the files of {len(figures.zoo)} models with random "
        f"weights, {sum(map(differing, figures.zoo)):,} of {sum(map(compared, figures.zoo)) / 1e9:.1f} billion weights and "
        "quantized values differ, layer by layer. A runtime that computes some ops in float rounds some values differently, "
        f"and later layers carry this on: in OpenVINO, up to {_percent(figures.spread, 1)} of the values differ.",
        "",
        f"**Training on a GPU** ({figures.card}, bfloat16, batches of {max(figures.launched)}, learned scales, the step as a "
        "CUDA graph):",
        "",
        *markdown_lines(
            ("network", "step time / float", "peak memory / float"),
            [[name, f"{time:.2f}", f"{peak:.2f}"] for name, (time, peak) in figures.on_gpu.items()],
        ),
        "",
        f"Without CUDA graphs, a step takes {launched}. Other tools have no figures here: {'; '.join(failed)}; the others were "
        "not measured on a GPU.",
    ]


def _percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _beside(value: float | None, float_model: float) -> str:
    return "-" if value is None else f"{value:.2f} ({value - float_model:+.2f})"


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
    write_part(args.page, BEGIN_OPENING, END, opening_of(figures))
    write_part(args.page, BEGIN, END, lines_of(figures))
    draw(figures, args.plot)


if __name__ == "__main__":
    main()
