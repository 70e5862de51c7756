"""The ops against the memory roof: every time as a multiple of copying the same tensor, measured side by side in one run.

python benchmarks/ops.py                 prints tables and writes benchmarks/results/ops.json and ops.md
python benchmarks/ops.py --quick         fewer repeats and sizes
python benchmarks/ops.py --compile       torch.compile's code of the same formulas beside ours (slow to compile)

The allocator is told to keep its memory (the script starts itself anew with that set): a fresh mapping's page faults would
otherwise cost several times what any kernel does. On a GPU machine, --device cuda measures there.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm

from qtoolkit import _native, ops

KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": "100000000000",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "1000000000",
}
RESULTS = Path(__file__).parent / "results" / "ops.json"
ROOF = "roof"

native = torch.ops.qtoolkit
Work = Mapping[str, Callable[[], object]]


@dataclass(frozen=True)
class Case:
    """Pieces of work on the same tensor; the first, named ROOF, is what the others are divided by."""

    group: str
    name: str
    work: Work
    goal: str = ""


@dataclass(frozen=True)
class Row:
    """Medians of one case: the roof in microseconds, the others as multiples of it."""

    group: str
    name: str
    threads: int
    roof_us: float
    ratios: Mapping[str, float]
    goal: str


def measure(case: Case, threads: int, repeats: int, sync: Callable[[], None]) -> Row:
    """Time all pieces of a case, in turn, and take medians."""
    torch.set_num_threads(threads)
    for work in case.work.values():
        work()
        work()
    times: dict[str, list[float]] = {name: [] for name in case.work}
    for _ in range(repeats):
        for name, work in case.work.items():
            sync()
            start = time.perf_counter()
            work()
            sync()
            times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratios = {name: median / medians[ROOF] for name, median in medians.items() if name != ROOF}
    return Row(case.group, case.name, threads, 1e6 * medians[ROOF], ratios, case.goal)


# ---- the work ---------------------------------------------------------------------------------------------------


def formula(x: Tensor, scale: Tensor) -> Tensor:
    return torch.clamp(torch.round(x / scale), -128, 127) * scale


def lsq_formula(x: Tensor, scale: Tensor) -> Tensor:
    quotient = torch.clamp(x / scale, -128, 127)
    return (quotient + (torch.round(quotient) - quotient).detach()) * scale


class Tensors:
    """A tensor with its scales, per tensor or per channel, and what the rivals need of them."""

    def __init__(self, x: Tensor, axis: int | None) -> None:
        self.x, self.axis = x, axis
        count = 1 if axis is None else x.size(axis)
        self.scale = torch.rand(count, device=x.device) * 0.03 + 0.015
        self.shaped = self.scale if axis is None else self.scale.view([-1 if d == axis else 1 for d in range(x.dim())])
        self.grad = torch.randn_like(x)
        self.zeros = torch.zeros(count, dtype=torch.int32, device=x.device)

    def torch_forward(self, x: Tensor) -> Tensor:
        """Fake-quantize by torch's op."""
        if self.axis is None:
            return torch.fake_quantize_per_tensor_affine(x, self.scale[0], self.zeros[0], -128, 127)
        return torch.fake_quantize_per_channel_affine(x, self.scale, self.zeros, self.axis, -128, 127)

    def torch_learned(self, x: Tensor, scale: Tensor) -> Tensor:
        """Fake-quantize by torch's op with a learned scale."""
        if self.axis is None:
            return torch._fake_quantize_learnable_per_tensor_affine(x, scale, self.zeros.float(), -128, 127, 1.0)
        return torch._fake_quantize_learnable_per_channel_affine(
            x, scale, self.zeros.float(), self.axis, -128, 127, 1.0
        )


def forward_cases(named: Mapping[str, Tensors], compiled: bool) -> Iterator[Case]:
    for name, t in named.items():
        work: dict[str, Callable[[], object]] = {
            ROOF: t.x.clone,
            "ours": lambda t=t: native.fake_quant(t.x, t.scale, None, -128, 127, t.axis, 1, 1.0, True),
            "ours, no mask": lambda t=t: ops.fake_quant(t.x, t.scale, axis=t.axis),
            "torch": lambda t=t: t.torch_forward(t.x),
        }
        if compiled:
            fast = torch.compile(formula)
            work["compiled (no mask)"] = lambda t=t, fast=fast: fast(t.x, t.shaped)
        yield Case("forward", name, work, "1.15 per tensor, 1.25 per channel; bfloat16 1.3")


def backward_cases(named: Mapping[str, Tensors], compiled: bool) -> Iterator[Case]:
    for name, t in named.items():
        _, mask = native.fake_quant(t.x, t.scale, None, -128, 127, t.axis, 1, 1.0, True)
        order = [] if t.x.is_contiguous() else [0, 2, 3, 1]
        work: dict[str, Callable[[], object]] = {
            ROOF: t.x.clone,
            "ours, backward": lambda t=t, mask=mask, order=order: native.fake_quant_backward(t.grad, mask, order),
            "ours, both": _trained(t, lambda x, t=t: ops.fake_quant(x, t.scale, axis=t.axis)),
            "torch, both": _trained(t, t.torch_forward),
        }
        yield Case("backward", name, work, "backward 1.15, both 2.5")


def learned_cases(named: Mapping[str, Tensors], compiled: bool) -> Iterator[Case]:
    for name, t in named.items():
        work: dict[str, Callable[[], object]] = {
            ROOF: t.x.clone,
            "ours": _trained(t, lambda x, s, t=t: ops.fake_quant(x, s, axis=t.axis), learned=True),
        }
        if t.x.dtype == torch.float32:
            work["torch"] = _trained(t, t.torch_learned, learned=True)
        if compiled:
            fast = torch.compile(lsq_formula)
            shaped = t.shaped.detach().requires_grad_()
            work["compiled"] = _trained(t, lambda x, s, fast=fast, shaped=shaped: fast(x, shaped), learned=True)
        yield Case("learned scale, forward + backward", name, work, "3.2, and not above compiled")


def _trained(t: Tensors, forward: Callable[..., Tensor], learned: bool = False) -> Callable[[], object]:
    x = t.x.detach().requires_grad_()
    scales = [t.scale.detach().requires_grad_()] if learned else []

    def step() -> object:
        y = forward(x, *scales)
        return torch.autograd.grad(y, [x, *scales], t.grad, allow_unused=True)

    return step


def observer_cases(named: Mapping[str, Tensors], compiled: bool) -> Iterator[Case]:
    for name, t in named.items():
        count = t.scale.numel()
        lo, hi = torch.full((count,), torch.inf), torch.full((count,), -torch.inf)
        work: dict[str, Callable[[], object]] = {
            ROOF: t.x.aminmax,
            "ours, minmax": lambda t=t: ops.minmax(t.x, t.axis),
            "ours, observe": lambda t=t, lo=lo, hi=hi: ops.observe_minmax_(t.x, lo, hi, axis=t.axis),
        }
        yield Case("observers (roof: torch.aminmax)", name, work, "1.1 per tensor, 1.4 per channel")


def histogram_cases(named: Mapping[str, Tensors], compiled: bool) -> Iterator[Case]:
    x = named["6.4M, per tensor"].x
    for name, values in (("6.4M, normal", x), ("6.4M, after ReLU", x.relu())):
        counts = torch.zeros(2048, dtype=torch.int64, device=x.device)
        lo, hi = torch.zeros((), device=x.device), torch.zeros((), device=x.device)
        ops.observe_histogram_(values, counts, lo, hi)

        def observe_and_search(v: Tensor = values, state: tuple[Tensor, ...] = (counts, lo, hi)) -> object:
            ops.observe_histogram_(v, *state)
            return ops.search_range(*state, qmin=-128, qmax=127, method="mse")

        work: dict[str, Callable[[], object]] = {
            ROOF: values.aminmax,
            "ours": lambda v=values, state=(counts, lo, hi): ops.observe_histogram_(v, *state),
            "ours, with MSE search": observe_and_search,
            "torch.histc": lambda v=values: torch.histc(v, 2048),
        }
        yield Case("histogram of 2048 bins (roof: torch.aminmax)", name, work, "2.5, with the MSE range 3")


def search_case() -> Case:
    counts = torch.zeros(2048, dtype=torch.int64)
    lo, hi = torch.zeros(()), torch.zeros(())
    ops.observe_histogram_(torch.randn(1 << 20), counts, lo, hi)

    def search(method: str) -> Callable[[], object]:
        return lambda: ops.search_range(counts, lo, hi, qmin=-128, qmax=127, method=method)

    work = {ROOF: search("percentile"), **{method: search(method) for method in ("mse", "l2", "entropy")}}
    return Case("range search on 2048 bins (roof: percentile)", "one tensor", work, "each below 2000 us")


def overhead_case(device: str) -> Case:
    x, scale, zero = torch.randn(1, device=device), torch.tensor([0.1]), torch.zeros(1, dtype=torch.int32)
    scale, zero = scale.to(device), zero.to(device)

    def many(f: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            for _ in range(1000):
                f()

        return run

    return Case(
        "eager overhead of 1000 calls on one element (roof: torch's op with tensor scale)",
        "one element",
        {
            ROOF: many(lambda: torch.fake_quantize_per_tensor_affine(x, scale, zero, -128, 127)),
            "torch, float scale": many(lambda: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127)),
            "ours": many(lambda: ops.fake_quant(x, scale)),
        },
        "1.3",
    )


def moving_range_cases(named: Mapping[str, Tensors]) -> Iterator[Case]:
    one = torch.ones(1, dtype=torch.int64)
    for name, t in named.items():
        if t.axis is not None or t.x.dtype != torch.float32:
            continue
        device = t.x.device
        lo, hi, scale = (torch.full((1,), v, device=device) for v in (torch.inf, -torch.inf, 1.0))
        on = one.to(device)
        theirs = [torch.full((), v, device=device) for v in (torch.inf, -torch.inf)]
        theirs += [torch.ones(1, device=device), torch.zeros(1, dtype=torch.int32, device=device)]

        def in_turn(x: Tensor = t.x, lo: Tensor = lo, hi: Tensor = hi) -> Tensor:
            ops.observe_minmax_(x, lo, hi, 0.1)
            return ops.fake_quant(x, ops.grid_of_range(lo, hi)[0])

        work: dict[str, Callable[[], object]] = {
            ROOF: t.x.clone,
            "ours": lambda x=t.x, state=(lo, hi, scale): ops.observe_fake_quant(x, *state, momentum=0.1),
            "ours, in turn": in_turn,
            "torch, fused": lambda x=t.x, on=on, state=theirs: torch.fused_moving_avg_obs_fake_quant(
                x, on, on, *state, 0.1, -128, 127, -1
            ),
        }
        yield Case("observer and fake-quant in one op", name, work, "1.3")


def in_place_cases(named: Mapping[str, Tensors]) -> Iterator[Case]:
    for name, t in named.items():
        mine = t.x.clone()
        work: dict[str, Callable[[], object]] = {
            ROOF: t.x.clone,
            "fake_quant": lambda t=t: ops.fake_quant(t.x, t.scale, axis=t.axis),
            "fake_quant_": lambda t=t, mine=mine: ops.fake_quant_(mine, t.scale, axis=t.axis),
        }
        yield Case("in place", name, work, "below fake_quant")


# ---- the run ----------------------------------------------------------------------------------------------------


def tensors(device: str, quick: bool) -> dict[str, Tensors]:
    image = torch.randn(64, 256, 28, 28, device=device)
    weight = torch.randn(512, 512, 3, 3, device=device)
    named = {
        "12.8M NCHW, per tensor": Tensors(image, None),
        "12.8M NCHW, axis 1": Tensors(image, 1),
        "12.8M channels_last, axis 1": Tensors(image.contiguous(memory_format=torch.channels_last), 1),
        "12.8M bfloat16, per tensor": Tensors(image.bfloat16(), None),
        "12.8M bfloat16, axis 1": Tensors(image.bfloat16(), 1),
        "weight 2.4M, axis 0": Tensors(weight, 0),
        "weight 2.4M, axis 1": Tensors(weight, 1),
        "64 Ki, per tensor": Tensors(torch.randn(65536, device=device), None),
        "1 Mi, per tensor": Tensors(torch.randn(1 << 20, device=device), None),
    }
    if not quick:
        named["64 Mi, per tensor"] = Tensors(torch.randn(1 << 26, device=device), None)
    return named


def observed(device: str) -> dict[str, Tensors]:
    x = torch.randn(32, 64, 56, 56, device=device)
    return {"6.4M, per tensor": Tensors(x, None), "6.4M, axis 0": Tensors(x, 0), "6.4M, axis 1": Tensors(x, 1)}


def table_of(rows: list[Row]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row.ratios))
    table = Table(title=f"{rows[0].group}; goal: {rows[0].goal}")
    for column in ("tensor", "threads", "roof us", *names):
        table.add_column(column, justify="left" if column == "tensor" else "right", no_wrap=True)
    for row in rows:
        cells = (f"{row.ratios[n]:.2f}" if n in row.ratios else "" for n in names)
        table.add_row(row.name, str(row.threads), f"{row.roof_us:.1f}", *cells)
    return table


def processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def markdown_of(rows: list[Row], head: str, command: str) -> str:
    lines = ["# The ops against the memory roof", "", f"{head}. Made by `{command}`.", ""]
    for group in dict.fromkeys(row.group for row in rows):
        of_group = [row for row in rows if row.group == group]
        names = list(dict.fromkeys(name for row in of_group for name in row.ratios))
        lines += [f"## {group}", "", f"Goal: {of_group[0].goal}.", ""]
        lines += ["| " + " | ".join(["tensor", "threads", "roof, us", *names]) + " |", "|---" * (3 + len(names)) + "|"]
        for row in of_group:
            ratios = (f"{row.ratios[n]:.2f}" if n in row.ratios else "" for n in names)
            lines.append("| " + " | ".join([row.name, str(row.threads), f"{row.roof_us:.1f}", *ratios]) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Measure all cases on one and two threads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=None)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.device == "cpu" and any(os.environ.get(k) != v for k, v in KEEP_MEMORY.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP_MEMORY})

    torch.manual_seed(0)
    named = tensors(args.device, args.quick)
    cases = [
        *forward_cases(named, args.compile),
        *backward_cases(named, args.compile),
        *learned_cases(named, args.compile),
        *moving_range_cases(named),
        *in_place_cases(named),
        *observer_cases(observed(args.device), args.compile),
        *histogram_cases(observed(args.device), args.compile),
        *([search_case()] if args.device == "cpu" else []),
        overhead_case(args.device),
    ]
    sync = torch.cuda.synchronize if args.device != "cpu" else lambda: None
    repeats = args.repeats or (7 if args.quick else 21)
    work = [(case, threads) for case in cases for threads in args.threads]
    rows = [measure(case, threads, repeats, sync) for case, threads in tqdm(work, desc="measuring", leave=False)]

    machine = torch.cuda.get_device_name() if args.device != "cpu" else processor()
    console = Console(width=170)
    head = f"{machine}, {_native.load().instruction_set()}, torch {torch.__version__}; multiples of the roof"
    command = " ".join(["python", "benchmarks/ops.py", *sys.argv[1:]])
    console.print(head)
    for group in dict.fromkeys(row.group for row in rows):
        console.print(table_of([row for row in rows if row.group == group]))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(
        json.dumps(
            {
                "machine": machine,
                "instruction_set": _native.load().instruction_set(),
                "torch": torch.__version__,
                "command": command,
                "rows": [asdict(row) for row in rows],
            },
            indent=1,
        )
    )
    args.out.with_suffix(".md").write_text(markdown_of(rows, head, command))


if __name__ == "__main__":
    main()
