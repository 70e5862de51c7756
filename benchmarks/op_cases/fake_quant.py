"""Fake quantization: forward, backward, learned scales, channels on one axis or another, and what is kept for backward."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch

from benchmarks.measure import ROOF, Case, bytes_kept, kept_bytes
from benchmarks.op_cases.subjects import QMAX, QMIN, Subject, deconv_weight, image, weight
from benchmarks.tools import OURS, Forward, Tool
from qtoolkit import ops

native = torch.ops.qtoolkit
Subjects = Mapping[str, Subject]


def _able(tools: Sequence[Tool], t: Subject) -> Iterator[Tool]:
    return (tool for tool in tools if tool.grouped or t.group == 1)


def _forward(tool: Tool, t: Subject) -> Callable[[], object] | None:
    forward = tool.fixed(t)
    return (lambda: _without_gradients(forward, t)) if forward else None


def _without_gradients(forward: Forward, t: Subject) -> object:
    with torch.no_grad():
        return forward(t.x)


def _both(tool: Tool, t: Subject) -> Callable[[], object] | None:
    forward = tool.fixed(t)
    x = t.x.detach().requires_grad_()
    return (lambda: torch.autograd.grad(forward(x), x, t.grad)) if forward else None


def _learned(tool: Tool, t: Subject) -> Callable[[], object] | None:
    built = tool.learned(t)
    if built is None:
        return None
    (forward, parameters), x = built, t.x.detach().requires_grad_()
    return lambda: torch.autograd.grad(forward(x), [x, *parameters], t.grad)


def _work(
    build: Callable[[Tool, Subject], Callable[[], object] | None], tools: Sequence[Tool], t: Subject
) -> dict[str, Callable[[], object]]:
    named = {tool.name: build(tool, t) for tool in _able(tools, t)}
    return {name: work for name, work in named.items() if work is not None}


def forward_cases(subjects: Subjects, tools: Sequence[Tool]) -> Iterator[Case]:
    for name, t in subjects.items():
        work = _work(_forward, tools, t)
        masked = partial(native.fake_quant, t.x, t.scale, None, QMIN, QMAX, t.axis, t.group, 0, 1.0, True)
        plain = work.pop(OURS.name)
        goal = "1.15 per tensor, 1.25 per channel; bfloat16 1.3; an eighth of torch's op, at 64 Ki of compiled code too"
        yield Case("forward", name, {ROOF: t.x.clone, "ours": masked, "ours, no mask": plain, **work}, goal)


def _kept(tools: Sequence[Tool], t: Subject, learned: bool) -> dict[str, Callable[[], int]]:
    """Return what measures the bytes that each tool keeps for backward."""
    found, x = {}, t.x.detach().requires_grad_()
    for tool in _able(tools, t):
        built = tool.learned(t) if learned else tool.fixed(t)
        if built is not None:
            found[tool.name] = partial(bytes_kept, built[0] if learned else built, x)
    return found


def backward_cases(subjects: Subjects, tools: Sequence[Tool]) -> Iterator[Case]:
    for name, t in subjects.items():
        _, mask = native.fake_quant(t.x, t.scale, None, QMIN, QMAX, t.axis, t.group, 0, 1.0, True)
        order = [] if t.x.is_contiguous() else [0, 2, 3, 1]
        alone = partial(native.fake_quant_backward, t.grad, mask, order)
        work = {ROOF: t.x.clone, "ours, backward alone": alone, **_work(_both, tools, t)}
        kept = _kept(tools, t, learned=False)
        yield Case("forward + backward, fixed scale", name, work, "2.5; backward alone 1.15", kept=kept)


def learned_cases(subjects: Subjects, tools: Sequence[Tool]) -> Iterator[Case]:
    for name, t in subjects.items():
        work = {ROOF: t.x.clone, **_work(_learned, tools, t)}
        kept = _kept(tools, t, learned=True)
        yield Case("forward + backward, learned scale", name, work, "3.2, and not above compiled", kept=kept)


def axis_cases(device: str) -> Iterator[Case]:
    tensors = {
        "12.8M NCHW": (image(device), 1),
        "weight 2.4M": (weight(device), 1),
        "deconv weight 1.0M": (deconv_weight(device), 4),
    }
    kinds = {"forward": _forward, "forward + backward": _both, "learned": _learned}
    for name, (x, groups) in tensors.items():
        for kind, build in kinds.items():
            work = {ROOF: build(OURS, Subject(x, 0)), "axis 1": build(OURS, Subject(x, 1))}
            if groups > 1:
                work[f"axis 1, {groups} groups"] = build(OURS, Subject(x, 1, groups))
            yield Case("ours on axis 1 (roof: axis 0)", f"{name}, {kind}", work, "1.2")


def overhead_case(device: str) -> Case:
    x, scale = torch.randn(1, device=device), torch.tensor([0.1], device=device)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    work = {
        ROOF: lambda: torch.fake_quantize_per_tensor_affine(x, scale, zero, QMIN, QMAX),
        "torch, float scale": lambda: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, QMIN, QMAX),
        "ours": lambda: ops.fake_quant(x, scale),
    }
    return Case("eager overhead of a call (roof: torch's op with tensor scale)", "one element", work, "1.3")


def kept(tools: Sequence[Tool], device: str) -> dict[str, dict[str, float]]:
    """Bytes an element that each tool keeps for backward, of x's dtype and with a fixed and a learned scale."""
    x = torch.randn(16, 64, 32, 32, device=device)
    table: dict[str, dict[str, float]] = {}
    for tool in tools:
        of_tool = table.setdefault(tool.name, {})
        for dtype in (torch.float32, torch.bfloat16):
            t = Subject(x.to(dtype), 1)
            learned = tool.learned(t)
            for kind, forward in (("fixed", tool.fixed(t)), ("learned", learned[0] if learned else None)):
                if forward is not None:
                    of_tool[f"{str(dtype).removeprefix('torch.')}, {kind}"] = kept_bytes(
                        forward, t.x.detach().requires_grad_()
                    )
    return table
