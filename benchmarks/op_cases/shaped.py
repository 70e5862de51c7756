"""The learned quantizers other than LSQ beside LSQ: forward and backward, and what is kept for backward."""

from collections.abc import Callable, Iterator, Mapping

import torch

import qtoolkit as qt
from benchmarks.measure import ROOF, Case, kept_bytes
from benchmarks.op_cases.subjects import Subject, image, weight

LSQ = "ours, lsq"
# A quantizer of each kernel, and whether its grid has a zero point.
QUANTIZERS = {"pact": False, "learned_range": True, "dsq": False, "apot": False, "qil": False}


def _quantizer(name: str, t: Subject, *, affine: bool) -> qt.TensorQuantizer:
    spec = qt.QuantSpec(bits=4, quantizer=name, symmetric=not affine, axis=t.axis)
    shape = spec.scale_shape(t.x.shape)
    quantizer = qt.TensorQuantizer(spec, shape).to(t.x.device)
    quantizer.set_range(torch.full(shape, -2.5, device=t.x.device), torch.full(shape, 2.5, device=t.x.device))
    return quantizer


def _step(quantizer: qt.TensorQuantizer, t: Subject) -> Callable[[], object]:
    x = t.x.detach().requires_grad_()
    inputs = [x, *quantizer.parameters()]
    return lambda: torch.autograd.grad(quantizer(x), inputs, t.grad)


def _subjects(device: str) -> Mapping[str, Subject]:
    x = image(device)
    return {
        "12.8M NCHW, per tensor": Subject(x),
        "12.8M bfloat16, per tensor": Subject(x.bfloat16()),
        "weight 2.4M, axis 0": Subject(weight(device), 0),
    }


def shaped_cases(device: str) -> Iterator[Case]:
    for subject, t in _subjects(device).items():
        lsq = _quantizer("lsq", t, affine=False)
        work = {ROOF: t.x.clone, LSQ: _step(lsq, t)}
        named = {name: _quantizer(name, t, affine=affine) for name, affine in QUANTIZERS.items()}
        work |= {f"ours, {name}": _step(quantizer, t) for name, quantizer in named.items()}
        yield Case("forward + backward, quantizers other than LSQ", subject, work, "none set")


def kept_by_quantizers(device: str) -> dict[str, dict[str, float]]:
    """Bytes an element that each quantizer keeps for backward."""
    t = Subject(torch.randn(16, 64, 32, 32, device=device))
    x = t.x.detach().requires_grad_()
    named = {name: _quantizer(name, t, affine=affine) for name, affine in QUANTIZERS.items()}
    return {f"ours, {name}": {"float32, learned": kept_bytes(one, x)} for name, one in named.items()}
