"""The first hour on a GPU: ops beside a copy of the same bytes, training steps beside float, launches, memory, a profile.

python -m benchmarks.pages.gpu ops               each op's share of the bandwidth of a copy
python -m benchmarks.pages.gpu steps             training steps in bfloat16 and channels_last
python -m benchmarks.pages.gpu profile           the kernels that take most of a step of ResNet-50
python -m benchmarks.pages.gpu all --write       writes results/gpu.json and the tables of docs/gpu.md too
python -m benchmarks.pages.gpu all --device cpu --quick     whether the program runs, on small tensors

It needs torch and this package alone. torch.ao's FX mode comes with torch; Model Optimizer is measured where it is installed.
The times are the least of several runs between two events of the stream.
"""

import argparse
import copy
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from benchmarks.pages.gpu_networks import CLASSES, NETWORKS
from benchmarks.pages.stored import write_part
from qtoolkit import ops

OUT = Path(__file__).parents[1] / "results" / "gpu.json"
PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
BEGIN, END = (
    "<!-- Written by benchmarks/pages/gpu.py: change nothing up to the next mark. -->",
    "<!-- End of its tables. -->",
)
BATCHES = (64, 256)


@dataclass(frozen=True)
class Op:
    """A call of an op, and the bytes that it must read and write."""

    name: str
    call: Callable[[], Any]
    bytes_moved: int


@dataclass(frozen=True)
class Step:
    """A training step: its times and its peak of memory beside float's, and the kernels that it launches.

    Attributes:
        milliseconds: Of the step as a script calls it: where kernels are short, that is the time of the processor.
        ratio: These beside float's.
        captured: Milliseconds of the step as a CUDA graph, where the GPU waits for nobody.
        captured_ratio: These beside float's as a CUDA graph.
        peak: Of memory, beside float's.
    """

    network: str
    batch: int
    subject: str
    milliseconds: float
    ratio: float
    captured: float
    captured_ratio: float
    peak: float
    launches: int


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
    tail = (1e-5, 0.0, float("inf"), 0.0, scale, None, -128, 127, 1.0)
    forward = (x, weight, bias, None, None, None, None, None)
    yield Op(f"batch norm, {name}", lambda: native.batch_norm_fake_quant(*forward, *tail), 3 * size + x.numel())
    mean, variance = native.batch_norm_fake_quant(*forward, *tail)[2:]
    backward = (grad, *forward, mean, variance, *tail, False, True)
    yield Op(f"batch norm backward, {name}", lambda: native.batch_norm_fake_quant_backward(*backward), 5 * size)


def measure_ops(device: str, quick: bool) -> list[dict[str, Any]]:
    """Return the share of a copy's bandwidth for each op."""
    rows = []
    for op in cases(device, quick):
        source = torch.empty(op.bytes_moved // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        repeats = 3 if quick else 30
        ours = seconds(op.call, device, repeats)
        copied = seconds(lambda t=target, s=source: t.copy_(s), device, repeats)
        rows.append({"op": op.name, "microseconds": round(ours * 1e6, 1), "share": round(copied / ours, 3)})
        print(f"{op.name:60} {ours * 1e6:10.1f} us   {copied / ours:6.1%} of a copy", flush=True)
    return rows


def subjects() -> dict[str, Callable[[nn.Module, Tensor], nn.Module]]:
    """Return what is trained beside float."""
    found = {
        "ours, learned scales": lambda m, x: prepared(m, x, "lsq"),
        "ours, fixed scales": lambda m, x: prepared(m, x, None),
        "torch.ao FX": torch_ao,
    }
    return found | ({"Model Optimizer": model_optimizer} if find_spec("modelopt") else {})


def prepared(model: nn.Module, x: Tensor, quantizer: str | None) -> nn.Module:
    """Return the model prepared for TensorRT and calibrated."""
    backend = qt.backends["tensorrt"]
    if quantizer is not None:
        specs = (replace(s, quantizer=quantizer) for s in (backend.qconfig.activation, backend.qconfig.weight) if s)
        backend = replace(backend, qconfig=qt.QConfig(*specs))
    model = qt.prepare(model, (x,), backend=backend)
    qt.calibrate(model, [x], progress=False)
    for each in qt.quantizers_of(model).values():
        each.steps = -1  # behind the first steps, in which ranges follow the data
    return model


def torch_ao(model: nn.Module, x: Tensor) -> nn.Module:
    """Return torch.ao's model for QAT."""
    from torch.ao.quantization import get_default_qat_qconfig_mapping
    from torch.ao.quantization.quantize_fx import prepare_qat_fx

    return prepare_qat_fx(model, get_default_qat_qconfig_mapping("x86"), (x,))


def model_optimizer(model: nn.Module, x: Tensor) -> nn.Module:
    """Return Model Optimizer's model with scales from a batch."""
    import modelopt.torch.quantization as mtq

    return mtq.quantize(model, copy.deepcopy(mtq.INT8_DEFAULT_CFG), lambda m: m(x))


def trained(model: nn.Module, x: Tensor, target: Tensor) -> Callable[[], None]:
    """Return a step of SGD under bfloat16 autocast, which a CUDA graph can capture."""
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=1e-4, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):
            loss = F.cross_entropy(model(x).float(), target)
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


def launches_of(step: Callable[[], None], device: str) -> int:
    """Return the kernels that a step launches; 0 without a GPU."""
    if device == "cpu":
        return 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA)


def batch_of(network: str, count: int, device: str, quick: bool) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    size = 64 if quick else 224
    model = NETWORKS[network](size).to(device).train().to(memory_format=torch.channels_last)
    x = torch.randn(count, 3, size, size, device=device).contiguous(memory_format=torch.channels_last)
    return model, x, torch.randint(CLASSES, (count,), device=device)


def measure_steps(device: str, quick: bool) -> tuple[list[Step], list[str]]:
    """Return the steps of each network, float first, and what failed; no step waits for the device."""
    found, failed = [], []
    for network, count in product(NETWORKS, (2,) if quick else BATCHES):
        model, x, target = batch_of(network, count, device, quick)
        base: Measured | None = None
        for name, build in {"float": lambda m, x: m, **subjects()}.items():
            try:
                result = measured(trained(build(copy.deepcopy(model), x), x, target), device, quick)
            except Exception as error:  # a peer's failure is a result
                failed.append(f"{name}: {network}, {error}")
                print(failed[-1], flush=True)
                continue
            base = base or result
            row = Step(network, count, name, round(1e3 * result.seconds, 2), result.seconds / base.seconds,
                       round(1e3 * result.captured, 2), result.captured / base.captured, result.peak / base.peak,
                       result.launches)  # fmt: skip
            found.append(row)
            print(f"{network:12} {count:4} {name:21} {row.milliseconds:8.2f} ms {row.ratio:5.2f} of float's"
                  f"  as a graph {row.captured:8.2f} ms {row.captured_ratio:5.2f}  peak {row.peak:5.2f}"
                  f"  {row.launches} kernels", flush=True)  # fmt: skip
    return found, list(dict.fromkeys(failed))


@dataclass(frozen=True)
class Measured:
    """The seconds of a step, and of it as a CUDA graph; its peak of bytes, and the kernels that it launches."""

    seconds: float
    captured: float
    peak: float
    launches: int


def measured(step: Callable[[], None], device: str, quick: bool) -> Measured:
    """Measure a step."""
    repeats = 2 if quick else 15
    took = seconds(step, device, repeats)
    if device == "cpu":
        return Measured(took, took, 1.0, 0)
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    step()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    peak, launches = float(torch.cuda.max_memory_allocated()), launches_of(step, device)
    return Measured(took, seconds(captured(step), device, repeats), peak, launches)


def show_profile(device: str, quick: bool) -> None:
    """Print the kernels that take most of a step."""
    model, x, target = batch_of("ResNet-50", 2 if quick else BATCHES[0], device, quick)
    step = trained(prepared(model, x, "lsq"), x, target)
    step()
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU] if device == "cpu" else [kinds.CPU, kinds.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
    order = "self_cpu_time_total" if device == "cpu" else "self_cuda_time_total"
    print(profile.key_averages().table(sort_by=order, row_limit=25))


def tables(rows: list[dict[str, Any]], steps: list[Step], failed: list[str], card: str) -> list[str]:
    """Return the lines of the page."""
    lines = ["", f"Measured on one {card}, torch {torch.__version__}, bfloat16 autocast, channels_last.", ""]
    lines += ["| network | batch | | ms | of float's | as a CUDA graph, ms | of float's | peak of memory | kernels |"]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    lines += [
        f"| {s.network} | {s.batch} | {s.subject} | {s.milliseconds} | {s.ratio:.2f} | {s.captured} "
        f"| {s.captured_ratio:.2f} | {s.peak:.2f} | {s.launches} |"
        for s in steps
    ]
    lines += ["", *(f"- Not trained: {each}." for each in failed)]
    lines += ["", "| op | microseconds | share of a copy's bandwidth |", "|---|---|---|"]
    lines += [f"| {row['op']} | {row['microseconds']} | {row['share']:.0%} |" for row in rows]
    return [*lines, ""]


def main() -> None:
    """Measure and write what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("ops", "steps", "profile", "all"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="small tensors")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    if args.device != "cpu" and not torch.cuda.is_available():
        raise SystemExit(
            "There is no GPU here, so nothing was measured. --device cpu --quick shows that the program runs."
        )
    every = args.what == "all"
    rows = measure_ops(args.device, args.quick) if every or args.what == "ops" else []
    steps, failed = measure_steps(args.device, args.quick) if every or args.what == "steps" else ([], [])
    if every or args.what == "profile":
        show_profile(args.device, args.quick)
    if args.write and every and args.device != "cpu":
        card = torch.cuda.get_device_name()
        found = {"card": card, "ops": rows, "steps": [asdict(s) for s in steps], "failed": failed}
        OUT.write_text(json.dumps(found, indent=1) + "\n")
        write_part(PAGE, BEGIN, END, tables(rows, steps, failed, card))


if __name__ == "__main__":
    main()
