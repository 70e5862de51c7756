"""The ops against the memory roof: every time as a multiple of copying the same tensor, measured side by side in one run.

python -m benchmarks.pages.ops                 prints tables and writes benchmarks/results/ops.json and ops.md
python -m benchmarks.pages.ops --quick         fewer repeats and sizes
python -m benchmarks.pages.ops --compile       torch.compile's code of the same formulas beside ours
python -m benchmarks.pages.ops --peers         other tools beside ours, those that are installed (benchmarks/peers/)

On a GPU machine, --device cuda measures there.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from rich.console import Console
from tqdm import tqdm

from benchmarks import peers
from benchmarks.measure import Case, Pace, keep_memory, measure
from benchmarks.op_cases.batch_norm import batch_norm_cases, max_pool_cases
from benchmarks.op_cases.fake_quant import axis_cases, backward_cases, forward_cases, kept, learned_cases, overhead_case
from benchmarks.op_cases.moving import in_place_cases, moving_range_cases
from benchmarks.op_cases.ranges import histogram_cases, minmax_cases, resnet_case, search_case
from benchmarks.op_cases.shaped import kept_by_quantizers, shaped_cases
from benchmarks.op_cases.storage import block_cases, dequantize_cases, float_cases, quantize_cases
from benchmarks.op_cases.subjects import Subject, observed, subjects
from benchmarks.report import Results, facts, present_command
from benchmarks.tools import COMPILED, EAGER, OURS, TORCH, Tool, check_agreement

RESULTS = Path(__file__).parents[1] / "results" / "ops.json"


def all_cases(args: argparse.Namespace, tools: list[Tool]) -> list[Case]:
    named, x = subjects(args.device, args.quick), observed(args.device)
    of_ranges = {
        f"6.4M, {name}": Subject(x, axis) for name, axis in (("per tensor", None), ("axis 0", 0), ("axis 1", 1))
    }
    return [
        *forward_cases(named, tools),
        *backward_cases(named, tools),
        *learned_cases(named, tools),
        *shaped_cases(args.device),
        *axis_cases(args.device),
        *quantize_cases(args.device, args.compile),
        *dequantize_cases(args.device, args.compile),
        *float_cases(args.device, args.compile),
        *block_cases(args.device),
        *moving_range_cases(named),
        *in_place_cases(named),
        *batch_norm_cases(args.device),
        *max_pool_cases(args.device),
        *minmax_cases(of_ranges),
        *histogram_cases({"6.4M, normal": x, "6.4M, after ReLU": x.relu()}),
        *([search_case(), resnet_case()] if args.device == "cpu" else []),  # the search runs on the CPU alone
        overhead_case(args.device),
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="7 repeats, no 64 Mi elements, a third of a second a row")
    parser.add_argument("--compile", action="store_true", help="compiled formulas beside ours")
    parser.add_argument("--peers", action="store_true", help="the peers that are installed beside ours")
    parser.add_argument("--only", default="", help="tables whose titles contain this, such as 'learned'")
    parser.add_argument("--tensor", default="", help="rows whose tensors contain this, such as 'weight 2.4M, axis 1'")
    parser.add_argument("--loop", type=float, help="for a profiler: only call our op of each row for so many seconds")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=None, help="21; slow rows get fewer, 3 at least")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path, default=RESULTS, help="the JSON; the markdown lies beside it")
    return parser.parse_args()


def loop(cases: list[Case], seconds: float) -> None:
    """Call our op of each case again and again."""
    for case in cases:
        ours = next(work for name, work in reversed(case.work.items()) if name.startswith("ours"))
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            ours()


def main() -> None:
    """Measure all cases on one and two threads."""
    args = arguments()
    keep_memory()
    torch.manual_seed(0)
    tools = [OURS, TORCH, EAGER, *([COMPILED] if args.compile else []), *(peers.installed() if args.peers else [])]
    for tool in tools:
        check_agreement(tool)
    sync = torch.cuda.synchronize if args.device != "cpu" else lambda: None
    pace = Pace(args.repeats or (7 if args.quick else 21), 0.3 if args.quick else 2.0, sync)
    cases = [case for case in all_cases(args, tools) if args.only in case.group and args.tensor in case.name]
    if args.loop:
        torch.set_num_threads(args.threads[0])
        loop(cases, args.loop)
        return
    work = [(case, threads) for case in cases for threads in args.threads]
    rows = [measure(case, threads, pace) for case, threads in tqdm(work, desc="measuring", leave=False)]
    run = {
        "threads": args.threads,
        "command": present_command(),
        "peers": peers.versions() if args.peers else {},
    }
    held = {**kept(tools, args.device), **kept_by_quantizers(args.device)}
    results = Results({**facts(args.device), **run}, rows, held)
    results.show(Console(width=200))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results.json(), indent=1))
    args.out.with_suffix(".md").write_text(results.markdown())


if __name__ == "__main__":
    main()
