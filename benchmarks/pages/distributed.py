"""Time of a training step in DistributedDataParallel against the float model's, and of checkpoints against safetensors.

python -m benchmarks.pages.distributed          writes benchmarks/results/distributed.json and the tables of docs/distributed.md
python -m benchmarks.pages.distributed --quick  few rounds of a small network, writes nothing

Subjects take turns, one step at a time, in the same two processes of one thread each (gloo); figures are medians, and
ratios are of one run. Needs torchvision and safetensors.
"""

import argparse
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torchvision
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import qtoolkit as qt
from benchmarks.measure import Pace, sample, take_turns
from benchmarks.pages.stored import commands_of, made_by, write_part, write_rows
from benchmarks.report import facts

OUT = Path(__file__).parents[1] / "results" / "distributed.json"
PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"
BEGIN, END = "<!-- Written by benchmarks/pages/distributed.py: change nothing up to the next mark. -->", "<!-- End. -->"
RANKS, BATCH = 2, 4
GOALS = {"step": 1.05, "write": 1.2, "read": 1.2}


def seconds_of(work: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median time of each piece of work; they take turns, and the first round does not count."""
    times = take_turns({name: partial(sample, each) for name, each in work.items()}, Pace(rounds + 1, math.inf))
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def step_of(model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], None]:
    wrapped = DistributedDataParallel(model.train())
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(images), labels).backward()
        optimizer.step()

    return step


def work(rank: int, folder: str, network: str, size: int, rounds: int) -> None:
    """Time the steps of one network on one rank."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = getattr(torchvision.models, network)().train()
    images, labels = torch.randn(BATCH, 3, size, size), torch.randint(1000, (BATCH,))
    steps = {"float": step_of(model, images, labels)}
    for forward in ("auto", "float"):
        prepared = qt.prepare(model, images, backend="tensorrt10", training_arithmetic=forward)
        qt.calibrate(prepared, [images], progress=False)
        steps[f"training_arithmetic={forward!r}"] = step_of(prepared, images, labels)
    seconds = seconds_of(steps, rounds)
    for quantizer in qt.quantizers_of(prepared).values():
        quantizer.observing = not quantizer.of_weight
    seconds |= seconds_of({"synchronize_ranges": lambda: qt.synchronize_ranges(prepared)}, rounds)
    activations = sum(quantizer.observing for quantizer in qt.quantizers_of(prepared).values())
    gradients = sum(p.numel() * p.element_size() for p in prepared.parameters())
    buffers = {
        name: sum(b.numel() * b.element_size() for b in m.buffers())
        for name, m in (("float", model), ("quantized", prepared))
    }
    if rank == 0:
        torch.save([seconds, activations, gradients, buffers], Path(folder) / "steps.pt")
    distributed.destroy_process_group()


def rows_of_steps(network: str, size: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (folder, network, size, rounds), nprocs=RANKS)
        seconds, activations, gradients, buffers = torch.load(Path(folder) / "steps.pt", weights_only=True)
    ratios = {name: value / seconds["float"] for name, value in seconds.items() if name.startswith("forward")}
    return {
        "kind": "step",
        "network": network,
        "image": size,
        "seconds": seconds,
        "ratios": ratios,
        "activation_ranges": activations,
        "gradient_bytes": gradients,
        "buffer_bytes": buffers,
    }


def row_of_checkpoints(network: str, rounds: int) -> dict[str, Any]:
    """Time the same bytes: the state dict of the prepared model."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images = torch.randn(1, 3, 64, 64)
    model = qt.prepare(getattr(torchvision.models, network)().train(), images, backend="tensorrt10")
    qt.calibrate(model, [images], progress=False)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        theirs, ours, parts = folder / "theirs.safetensors", folder / "ours.safetensors", folder / "ours"
        work = {
            "write, safetensors save_file": lambda: safetensors.torch.save_file(model.state_dict(), theirs),
            "write, file": lambda: qt.save_checkpoint(model, ours),
            "write, folder": lambda: qt.save_checkpoint(model, parts),
            "read, safetensors load_file": lambda: safetensors.torch.load_file(theirs),
            "read, safetensors load_file and load_state_dict": lambda: model.load_state_dict(
                safetensors.torch.load_file(theirs)
            ),
            "read, safetensors load_model": lambda: safetensors.torch.load_model(model, theirs),
            "read, file": lambda: qt.load_checkpoint(model, ours),
            "read, folder": lambda: qt.load_checkpoint(model, parts),
        }
        seconds = seconds_of(work, rounds)
        sizes = {"theirs": theirs.stat().st_size, "file": ours.stat().st_size}
        sizes["folder"] = sum(file.stat().st_size for file in parts.rglob("*") if file.is_file())
    ratios = {
        "write, file": seconds["write, file"] / seconds["write, safetensors save_file"],
        "write, folder": seconds["write, folder"] / seconds["write, safetensors save_file"],
        "read, file": seconds["read, file"] / seconds["read, safetensors load_model"],
        "read, file, against load_file and load_state_dict": seconds["read, file"]
        / seconds["read, safetensors load_file and load_state_dict"],
        "read, folder": seconds["read, folder"] / seconds["read, safetensors load_model"],
    }
    return {"kind": "checkpoint", "network": network, "seconds": seconds, "ratios": ratios, "bytes": sizes}


def lines_of(rows: list[dict[str, Any]], about: Mapping[str, Any]) -> list[str]:
    """Return the tables in markdown."""
    lines = [
        f"Made by {made_by(about)}; torch {about['torch']}; {about['cpu']}; {RANKS} ranks of one thread, {BATCH} images each.",
        "",
    ]
    lines += ["| network | forward | step / float DDP step | goal | verdict |", "|---|---|---|---|---|"]
    for row in (row for row in rows if row["kind"] == "step"):
        for name, ratio in row["ratios"].items():
            verdict = "met" if ratio <= GOALS["step"] else "missed"
            lines.append(f"| {row['network']}, {row['image']} | `{name}` | {ratio:.2f} | {GOALS['step']} | {verdict} |")
    lines += ["", "| checkpoint | time / safetensors' own | goal | verdict |", "|---|---|---|---|"]
    for row in (row for row in rows if row["kind"] == "checkpoint"):
        for name, ratio in row["ratios"].items():
            goal = GOALS[name.split(",")[0]]
            lines.append(
                f"| {row['network']}: {name} | {ratio:.2f} | {goal} | {'met' if ratio <= goal else 'missed'} |"
            )
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds of a small network; writes nothing")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    networks = [("squeezenet1_1", 64)] if options.quick else [("resnet18", 224), ("mobilenet_v2", 224)]
    rows = [rows_of_steps(network, size, rounds) for network, size in networks]
    rows.append(row_of_checkpoints("squeezenet1_1" if options.quick else "resnet50", 2 * rounds + 1))
    about = {**facts("cpu"), "commands": commands_of(OUT)}
    lines = lines_of(rows, about)
    print("\n".join(lines))
    if not options.quick:
        write_rows(OUT, about, rows)
        write_part(PAGE, BEGIN, END, lines)


if __name__ == "__main__":
    main()
