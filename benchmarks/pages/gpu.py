"""The first hour on a GPU: ops beside a copy of the same bytes, training steps beside float, launches, memory, a profile.

python -m benchmarks.pages.gpu ops               each op's share of the bandwidth of a copy
python -m benchmarks.pages.gpu steps             training steps in bfloat16 and channels_last
python -m benchmarks.pages.gpu profile           the kernels that take most of a step of the first network
python -m benchmarks.pages.gpu all --write       writes results/gpu.json and the tables of docs/gpu.md (ops: docs/design) too
python -m benchmarks.pages.gpu page some.json    adds the rows of files to results/gpu.json, and writes the tables
python -m benchmarks.pages.gpu all --device cpu --quick     whether the program runs, on small tensors

--networks, --batches and --subjects choose rows, --seconds ends a run in time, and --out gets each row when it is measured.
It needs torch and this package alone. torch.ao's FX mode comes with torch; other tools are measured where they are installed.
The times are the least of several runs between two events of the stream.
"""

import argparse
import contextlib
import copy
import gc
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from benchmarks.pages.gpu_networks import CLASSES, FUSED, NETWORKS
from benchmarks.pages.stored import write_part, write_rows
from benchmarks.peers import MODEL_PEERS, PEERS, PT2E, model_builder
from qtoolkit import ops

Row = dict[str, Any]
OUT = Path(__file__).parents[1] / "results" / "gpu.json"
PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
PAGE_OF_OPS = PAGE.parent / "design" / "performance.md"
BEGIN, END = (
    "<!-- Written by benchmarks/pages/gpu.py: change nothing up to the next mark. -->",
    "<!-- End of its tables. -->",
)
ROW_SECONDS = 180  # a row that takes longer has failed: mostly a compilation
COMPILED = "ResNet-50", FUSED


@dataclass(frozen=True)
class Op:
    """A call of an op, and the bytes that it must read and write."""

    name: str
    call: Callable[[], Any]
    bytes_moved: int


def seconds(call: Callable[[], Any], device: str, repeats: int) -> float:
    """Return the least time of a call."""
    for _ in range(3):
        call()
    found = []
    for _ in range(repeats):
        if device == "cpu":
            start = time.perf_counter()
            call()
            found.append(time.perf_counter() - start)
            continue
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        call()
        after.record()
        after.synchronize()
        found.append(before.elapsed_time(after) / 1e3)
    return min(found)


def cases(device: str, quick: bool) -> Iterator[Op]:
    """Return the ops that a training step of a network with batch norms calls, in both memory formats."""
    shape = (2, 64, 8, 8) if quick else (64, 256, 56, 56)
    scale, zero_point = torch.tensor(0.05, device=device), None
    for dtype in (torch.bfloat16, torch.float32):
        for last in (True, False):
            layout = torch.channels_last if last else torch.contiguous_format
            x, grad = (torch.randn(shape, device=device).to(dtype).contiguous(memory_format=layout) for _ in range(2))
            name, size = f"{str(dtype)[6:]}, {'channels_last' if last else 'contiguous'}", x.numel() * x.element_size()
            yield from norm_cases(name, x, grad, scale, size)
            if last:
                y, places = torch.ops.qtoolkit.max_pool_offsets(x, [3], [2], [1], [1], False)
                dy = torch.randn_like(y)
                window = (list(x.shape), [3], [2], [1], [1], False)
                pool = torch.ops.qtoolkit.max_pool_offsets_backward
                moved = size + y.numel() * (y.element_size() + 1)
                yield Op(
                    f"max pool 3x3/2 backward, {name}", lambda p=pool, d=dy, o=places, w=window: p(d, o, *w), moved
                )
                continue
            mask = x.numel() // 8
            yield Op(f"fake_quant, {name}", lambda x=x: ops.fake_quant(x, scale, zero_point, -128, 127), 2 * size)
            learned = torch.ops.qtoolkit.fake_quant_learned_backward
            args = (grad, x, scale, zero_point, -128, 127, None, 1, 0, 1.0)
            yield Op(f"backward of a learned scale, {name}", lambda f=learned, a=args: f(*a), 3 * size)
            leaf = x.clone().requires_grad_()
            call = lambda x=leaf: ops.fake_quant(x, scale, zero_point, -128, 127)  # noqa: E731
            yield Op(f"fake_quant with its mask, {name}", call, 2 * size + mask)


def norm_cases(name: str, x: Tensor, grad: Tensor, scale: Tensor, size: int) -> Iterator[Op]:
    """Return batch norm with a quantizer behind it, and its backward."""
    channels = x.size(1)
    weight, bias = torch.ones(channels, device=x.device), torch.zeros(channels, device=x.device)
    native = torch.ops.qtoolkit
    tail = (1e-5, [0.0, float("inf"), 0.0], scale, None, [-128, 127], 1.0)
    forward = (x, weight, bias, None, None, None, None, None)
    yield Op(f"batch norm, {name}", lambda: native.batch_norm_fake_quant(*forward, *tail), 3 * size + x.numel())
    mean, variance = native.batch_norm_fake_quant(*forward, *tail)[2:]
    wanted = [True] * 4 + [False, True, False]  # all but those of a residual and of a zero point
    backward = (grad, x, mean, variance, wanted, *forward[1:], *tail)
    yield Op(f"batch norm backward, {name}", lambda: native.batch_norm_fake_quant_backward(*backward), 5 * size)


def measure_ops(device: str, quick: bool) -> Iterator[Row]:
    """Yield the share of a copy's bandwidth for each op."""
    for op in cases(device, quick):
        source = torch.empty(op.bytes_moved // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        repeats = 3 if quick else 30
        ours = seconds(op.call, device, repeats)
        copied = seconds(lambda t=target, s=source: t.copy_(s), device, repeats)
        print(f"{op.name:60} {ours * 1e6:10.1f} us   {copied / ours:6.1%} of a copy", flush=True)
        yield {"op": op.name, "microseconds": round(ours * 1e6, 1), "share": round(copied / ours, 3)}


@dataclass(frozen=True)
class Subject:
    """What is trained.

    Attributes:
        build: Makes it of a float network and a batch.
        beside: The subject that its figures are divided by.
        dtype: bfloat16 is autocast's.
        compiled: By torch.compile(mode="reduce-overhead"), which records CUDA graphs itself.
        share: Of the output channels, which `qtoolkit.tuning.PartialUpdates` updates.
        everywhere: Whether it is measured where no subjects are chosen: else with the smallest batches alone, and
            compiled networks for two networks.
    """

    build: Callable[[nn.Module, Tensor], nn.Module]
    beside: str = "float"
    dtype: torch.dtype = torch.bfloat16
    compiled: bool = False
    share: float = 1.0
    everywhere: bool = False


def learned(model: nn.Module, x: Tensor) -> nn.Module:
    """Return the network prepared for TensorRT, with learned scales."""
    return prepared(model, x, "lsq")


def as_it_is(model: nn.Module, x: Tensor) -> nn.Module:
    """Return the network."""
    return model


SUBJECTS = {
    "float": Subject(as_it_is, everywhere=True),
    "ours, learned scales": Subject(learned, everywhere=True),
    "ours, learned scales, a quarter of the channels": Subject(learned, share=0.25),
    "ours, fixed scales": Subject(lambda m, x: prepared(m, x, None), everywhere=True),
    "float, compiled": Subject(as_it_is, compiled=True),
    "ours, learned scales, compiled": Subject(learned, compiled=True),
    "float in float32": Subject(as_it_is, "float in float32", torch.float32),
    "torch.ao FX in float32": Subject(model_builder("torch.ao FX"), "float in float32", torch.float32),
}
for _peer in ("Model Optimizer", "torchao pt2e"):
    if find_spec(PEERS.get(MODEL_PEERS[_peer], PT2E)[0]):
        SUBJECTS[_peer] = Subject(model_builder(_peer))


def prepared(model: nn.Module, x: Tensor, quantizer: str | None) -> nn.Module:
    """Return the model prepared for TensorRT and calibrated."""
    backend = qt.backends["tensorrt10"]
    if quantizer is not None:
        specs = (replace(s, quantizer=quantizer) for s in (backend.qconfig.activation, backend.qconfig.weight) if s)
        backend = replace(backend, qconfig=qt.QConfig(*specs))
    model = qt.prepare(model, (x,), backend=backend)
    qt.calibrate(model, [x], progress=False)
    for each in qt.quantizers_of(model).values():
        each.steps = -1  # behind the first steps, in which ranges follow the data
    return model


def trained(
    model: nn.Module, x: Tensor, target: Tensor, dtype: torch.dtype = torch.bfloat16, share: float = 1.0
) -> Callable[[], None]:
    """Return a step of SGD, which a CUDA graph can capture; under autocast, unless the dtype is float32."""
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=1e-4, momentum=0.9)
    if share < 1:
        qt.tuning.PartialUpdates(model, optimizer, share)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(x.device.type, torch.bfloat16, dtype == torch.bfloat16, cache_enabled=False):
            y = model(x)
            scales = isinstance(y, tuple)  # a detector's
            loss = sum(each.float().square().mean() for each in y) if scales else F.cross_entropy(y.float(), target)
        loss.backward()
        optimizer.step()

    return step


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """Return a step as a CUDA graph, after the warm-up on a side stream that torch's documentation asks for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def waits(step: Callable[[], None]) -> bool:
    """Return whether a step waits for the device, so that no CUDA graph can capture it."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def launches_of(step: Callable[[], None]) -> int:
    """Return the kernels that a step launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA)


def batch_of(network: str, count: int, device: str, quick: bool) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a network on the processor, and a batch on the device."""
    torch.manual_seed(0)
    of = NETWORKS[network]
    size, most = (64, 1) if quick else (of.size, 99)
    model = of.build(size, most).train().to(memory_format=torch.channels_last)
    x = torch.randn(count, 3, size, size, device=device).contiguous(memory_format=torch.channels_last)
    return model, x, torch.randint(CLASSES, (count,), device=device)


@contextlib.contextmanager
def within(limit: float) -> Iterator[None]:
    """Raise TimeoutError in what takes longer than some seconds."""

    def end(*_: object) -> None:
        raise TimeoutError(f"not done in {limit:.0f} seconds")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, limit, 10)  # again: what is interrupted may catch errors
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def measured(subject: Subject, model: nn.Module, x: Tensor, target: Tensor, quick: bool) -> Row:
    """Return the figures of a subject's step.

    Returns:
        milliseconds: As a script calls it: where kernels are short, that is the time of the processor.
        captured: Milliseconds as a CUDA graph, where the GPU waits for nobody; None where none is recorded.
        mebibytes: The peak of memory.
        launches: Of kernels.
    """
    device = x.device.type
    built = subject.build(copy.deepcopy(model).to(x.device), x)
    if subject.compiled:
        built = torch.compile(built, mode="reduce-overhead")
    step = trained(built, x, target, subject.dtype, subject.share)
    repeats = 2 if quick else 15
    row = {"milliseconds": 1e3 * seconds(step, device, repeats), "captured": None, "mebibytes": None, "launches": 0}
    if device == "cpu":
        return row
    torch.cuda.reset_peak_memory_stats()
    waiting = subject.compiled or waits(step)
    if waiting:
        step()
    torch.cuda.synchronize()
    row |= {"mebibytes": round(torch.cuda.max_memory_allocated() / 2**20), "launches": launches_of(step)}
    return row if waiting else row | {"captured": 1e3 * seconds(captured(step), device, repeats)}


def measure_steps(args: argparse.Namespace, left: Callable[[], float]) -> Iterator[Row]:
    """Yield the figures of each network's subjects beside float's, or why there are none; a row a subject."""
    missed = []
    for network, count in chosen_batches(args):
        names = chosen_subjects(args, network, count)
        if left() <= 0:
            missed += [f"{network}, {count}, {name}" for name in names]
            continue
        model, x, target = batch_of(network, count, args.device, args.quick)
        bases: dict[str, Row] = {}
        for name in names:
            subject, key = SUBJECTS[name], {"network": network, "batch": count, "subject": name}
            try:
                with within(max(min(left(), ROW_SECONDS), 1e-3)):
                    row = measured(subject, model, x, target, args.quick)
            except Exception as error:  # a peer's failure is a result
                why = str(error).strip().split("\n")[0] or type(error).__name__
                if left() <= 0:
                    missed.append(f"{network}, {count}, {name}")
                    continue
                print(f"{name}: {network}, {count}: {why}", flush=True)
                yield {**key, "failed": why}
            else:
                base = bases.setdefault(name, row) if name == subject.beside else bases.get(subject.beside)
                row = key | row | {of + "_ratio": beside(row[of], base and base[of]) for of in FIGURES}
                show(row)
                yield row
            finally:
                if subject.compiled:
                    torch.compiler.reset()
                gc.collect()
                torch.cuda.empty_cache()
    if missed:
        print(f"Left out, since {args.seconds:.0f} seconds were over: {'; '.join(missed)}.", flush=True)


FIGURES = "milliseconds", "captured", "mebibytes"


def beside(of: float | None, base: float | None) -> float | None:
    """Return a figure as a multiple of another; None where there is one missing."""
    return None if of is None or base is None else of / base


def show(row: Row) -> None:
    """Print the figures of a step."""
    text = [f"{row['network']:17} {row['batch']:4} {row['subject']:31}"]
    for figure, unit in zip(FIGURES, ("ms", "ms as a graph", "MiB"), strict=True):
        text.append(f"{cell(row[figure], '.2f')} {unit}, {cell(row[figure + '_ratio'], '.2f')} of float's;")
    print(*text, f"{row['launches']} kernels", flush=True)


def chosen_batches(args: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """Yield the networks and their sizes of batches that a run measures."""
    for network in args.networks or NETWORKS:
        for count in args.batches or ((2,) if args.quick else NETWORKS[network].batches):
            yield network, count


def chosen_subjects(args: argparse.Namespace, network: str, count: int) -> list[str]:
    """Return the subjects that a run measures of a network, each behind the one that it is compared with."""
    if args.subjects:
        named = {*args.subjects, *(SUBJECTS[name].beside for name in args.subjects)}
        return [name for name in SUBJECTS if name in named]
    smallest = count <= NETWORKS[network].batches[0] and not args.quick
    return [
        name
        for name, of in SUBJECTS.items()
        if of.everywhere or (smallest and (network in COMPILED or not of.compiled))
    ]


def show_profile(args: argparse.Namespace) -> None:
    """Print the kernels that take most of a step."""
    network, count = next(chosen_batches(args))
    model, x, target = batch_of(network, count, args.device, args.quick)
    step = trained(learned(model.to(x.device), x), x, target)
    step()
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU] if args.device == "cpu" else [kinds.CPU, kinds.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
    order = "self_cpu_time_total" if args.device == "cpu" else "self_cuda_time_total"
    print(profile.key_averages().table(sort_by=order, row_limit=25))


def add(rows: Sequence[Row], out: Path) -> list[Row]:
    """Merge rows into a file, where they replace earlier rows of the same measurement on the same card; return all rows."""
    before = json.loads(out.read_text())["rows"] if out.exists() else []
    fresh = {_key(row): row for row in rows}
    cards = list(dict.fromkeys(row["card"] for row in [*before, *rows]))
    every = {**{_key(row): row for row in before}, **fresh}.values()
    every = sorted(every, key=lambda row: (cards.index(row["card"]), _place(row)))
    write_rows(out, {}, every)
    return every


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("card", "network", "batch", "subject", "op"))


def _place(row: Row) -> tuple[int, ...]:
    """Return where a step is in the tables; ops are behind, as they were measured."""
    if "op" in row:
        return (len(NETWORKS), 0, 0)
    names = [*SUBJECTS, row["subject"]]
    return [*NETWORKS].index(row["network"]), row["batch"], names.index(row["subject"])


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the page: the steps on each card, the latest card first."""
    yield ""
    for card, of in _by_card(rows):
        torches, commits = (", ".join(sorted({row[name] for row in of})) for name in ("torch", "commit"))
        yield from (f"### {card}", "")
        yield (f"Measured on one {card}, torch {torches}, at {commits}: channels_last, and bfloat16 autocast unless a row says "
               "float32. A dash means that no CUDA graph was recorded, because the step waits for the device or torch.compile "
               "records it, or that the figure was not taken.")  # fmt: skip
        yield from ("", "| network | batch | what is trained | eager, ms | eager / float | CUDA graph, ms | CUDA graph / float "
                    "| images a second | peak memory, MiB | peak / float | kernels |", "|---" * 11 + "|")  # fmt: skip
        for row in of:
            if "milliseconds" in row:
                yield _line(row)
        yield ""
        failed = [
            f"- Not trained: {row['subject']}: {row['network']}, {row['batch']} images, {row['failed']}."
            for row in of
            if "failed" in row
        ]
        yield from (*failed, *[""] * bool(failed))


def tables_of_ops(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the page on ops: their times on each card, the latest card first."""
    yield ""
    for card, of in _by_card(rows):
        yield from (f"| op, {card} | microseconds | share of a copy's bandwidth |", "|---|---|---|")
        yield from (f"| {row['op']} | {row['microseconds']} | {row['share']:.0%} |" for row in of if "op" in row)
        yield ""


def _by_card(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    for card in reversed(list(dict.fromkeys(row["card"] for row in rows))):
        yield card, [row for row in rows if row["card"] == card]


def write_pages(rows: Sequence[Row]) -> None:
    """Write the tables into both pages."""
    write_part(PAGE, BEGIN, END, [*tables(rows)])
    write_part(PAGE_OF_OPS, BEGIN, END, [*tables_of_ops(rows)])


def _line(row: Row) -> str:
    figures = [cell(row[figure + kind], ".2f" if kind or figure != "mebibytes" else ".0f")
               for figure in FIGURES for kind in ("", "_ratio")]  # fmt: skip
    fastest = min(row["milliseconds"], row["captured"] or row["milliseconds"])
    figures.insert(4, f"{1e3 * row['batch'] / fastest:.0f}")
    trained = row["subject"].replace("ours", "qtoolkit")
    return f"| {row['network']} | {row['batch']} | {trained} | {' | '.join(figures)} | {row['launches']} |"


def cell(figure: float | None, how: str) -> str:
    """Return a figure as text, and a dash where there is none."""
    return "-" if figure is None else format(figure, how)


def where(args: argparse.Namespace) -> Row:
    """Return what each row says of the run: the card, torch and the commit."""
    git = ["git", "-C", str(OUT.parent), "describe", "--always", "--dirty", "--exclude=*"]
    commit = (
        args.commit or subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "no commit"
    )
    card = "the processor" if args.device == "cpu" else torch.cuda.get_device_name()
    return {"card": card, "torch": torch.__version__, "commit": commit}


def main() -> None:
    """Measure and write what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("ops", "steps", "profile", "all", "page"))
    parser.add_argument("files", nargs="*", type=Path, help="of rows that `page` adds")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="small tensors, short networks")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS)
    parser.add_argument("--batches", nargs="+", type=int)
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, help="with what each is compared with")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="rows are left out that take longer in all")
    parser.add_argument("--out", type=Path, help="a file that each row is added to as it is measured")
    parser.add_argument("--commit", help="for rows, where the folder is not git's")
    parser.add_argument("--write", action="store_true", help="results/gpu.json and the tables")
    args, start = parser.parse_args(), time.monotonic()
    if args.what == "page":
        rows = add([row for file in args.files for row in json.loads(file.read_text())["rows"]], OUT)
        write_pages(rows)
        return
    if args.device != "cpu" and not torch.cuda.is_available():
        raise SystemExit(
            "There is no GPU here, so nothing was measured. --device cpu --quick shows that the program runs."
        )
    of, outs = where(args), [out for out in (args.out, args.write and OUT) if out]
    if args.what in ("steps", "all"):
        for row in measure_steps(args, lambda: args.seconds - (time.monotonic() - start)):
            for out in outs:
                add([row | of], out)
    if args.what in ("ops", "all"):
        rows = [row | of for row in measure_ops(args.device, args.quick)]
        for out in outs:
            add(rows, out)
    if args.what in ("profile", "all"):
        show_profile(args)
    if args.write:
        write_pages(add([], OUT))


if __name__ == "__main__":
    main()
