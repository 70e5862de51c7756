"""The ops against the memory roof: every time as a multiple of copying the same tensor, measured side by side in one run.

python benchmarks/ops.py                 prints tables and writes benchmarks/results/ops.json and ops.md
python benchmarks/ops.py --quick         fewer repeats and sizes
python benchmarks/ops.py --compile       torch.compile's code of the same formulas beside ours
python benchmarks/ops.py --peers         other tools beside ours, those that are installed (benchmarks/peers/)

The allocator is told to keep its memory (the script starts itself anew with that set): a fresh mapping's page faults would
otherwise cost several times what any kernel does. On a GPU machine, --device cuda measures there.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import peers
import torch
from measure import KEEP_MEMORY, Case, Pace, measure
from op_cases.batch_norm import batch_norm_cases, max_pool_cases
from op_cases.fake_quant import axis_cases, backward_cases, forward_cases, kept, learned_cases, overhead_case
from op_cases.moving import in_place_cases, moving_range_cases
from op_cases.ranges import histogram_cases, minmax_cases, resnet_case, search_case
from op_cases.shaped import kept_by_quantizers, shaped_cases
from op_cases.storage import block_cases, dequantize_cases, float_cases, quantize_cases
from op_cases.subjects import subjects
from report import Results, facts
from rich.console import Console
from tools import COMPILED, EAGER, OURS, TORCH, Tool, check_agreement
from tqdm import tqdm

RESULTS = Path(__file__).parent / "results" / "ops.json"


def all_cases(args: argparse.Namespace, tools: list[Tool]) -> list[Case]:
    named = subjects(args.device, args.quick)
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
        *minmax_cases(args.device),
        *histogram_cases(args.device),
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
    if args.device == "cpu" and any(os.environ.get(k) != v for k, v in KEEP_MEMORY.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP_MEMORY})

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
        "command": " ".join(["python", "benchmarks/ops.py", *sys.argv[1:]]),
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
