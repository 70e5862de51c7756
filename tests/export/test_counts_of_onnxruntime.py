"""Q and DQ nodes of files beside those of onnxruntime's own quantizer, as its tests `test_op_*` count them in QDQ files.

The models have the constructs of these tests. Their quantizer has a pair for each tensor that an op of its list takes or
returns; where a file of this package has another count, the reason is in docs/backends.md.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from tests.graph.test_other_suites import Net, conv


@dataclass(frozen=True)
class Counts:
    """How many nodes of a model's file quantize and dequantize, in their tests, and what differs here."""

    model: Callable[[], nn.Module]
    x: Tensor
    quantize: int
    dequantize: int
    fewer: Mapping[str, int] = field(default_factory=dict)  # pairs that this package leaves out, by the reason


OUTPUTS = "output of a graph"
IMAGE = torch.randn(1, 3, 15, 15, generator=torch.Generator().manual_seed(0))

CASES: Mapping[str, Counts] = {
    "max pool": Counts(
        lambda: Net(lambda m, x: (lambda y: (y, F.max_pool2d(y, 3)))(m.c(x)), c=conv(3, 3, 3, bias=False)), IMAGE, 3, 4,
        fewer={OUTPUTS: 2},
    ),
    "concat": Counts(
        lambda: Net(lambda m, x: torch.cat([m.a(x), m.b(x), m.c(x)], 1), a=conv(3, 2, 3, bias=False),
                    b=conv(3, 5, 3, bias=False), c=conv(3, 6, 3, bias=False)),
        IMAGE, 5, 8, fewer={OUTPUTS: 1},
    ),
    "relu between linear layers": Counts(
        lambda: Net(lambda m, x: m.b(F.relu(m.a(x))), a=nn.Linear(10, 100), b=nn.Linear(100, 10)), torch.randn(5, 10), 3, 7,
        fewer={OUTPUTS: 1},
    ),
    "resize": Counts(
        lambda: Net(lambda m, x: (lambda y: (y, F.interpolate(y, scale_factor=2)))(m.c(x)), c=conv(3, 3, 3, bias=False)), IMAGE,
        3, 4, fewer={OUTPUTS: 2},
    ),
    "reshape": Counts(
        lambda: Net(lambda m, x: m.a(x).reshape(1, -1), a=nn.Linear(10, 4, bias=False)), torch.randn(5, 10), 3, 4,
        fewer={OUTPUTS: 2},
    ),
    "transpose": Counts(
        lambda: Net(lambda m, x: m.a(x).t(), a=nn.Linear(10, 4, bias=False)), torch.randn(5, 10), 3, 4, fewer={OUTPUTS: 2}
    ),
    "split": Counts(
        lambda: Net(lambda m, x: m.c(x).reshape(3, -1).split(1, 0), c=conv(3, 3, bias=False)), torch.randn(1, 3, 4, 4), 6, 7,
        fewer={OUTPUTS: 5},
    ),
}  # fmt: skip


def counts(model: nn.Module, x: Tensor, path: Path) -> Counter[str]:
    prepared = qt.prepare(model.eval(), x, backend="onnxruntime")
    qt.calibrate(prepared, [x], progress=False)
    qt.export_onnx(qt.convert(prepared), x, path, exporter="torchscript", verify=False)
    return Counter(node.op_type for node in onnx.load(path).graph.node)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", CASES)
def test_the_counts_of_pairs(name: str, tmp_path) -> None:
    case = CASES[name]
    found = counts(case.model(), case.x, tmp_path / "model.onnx")
    fewer = sum(case.fewer.values())
    assert (found["QuantizeLinear"], found["DequantizeLinear"]) == (case.quantize - fewer, case.dequantize - fewer)


def test_the_reason_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "backends.md").read_text()
    assert all(f"| {reason} |" in page for case in CASES.values() for reason in case.fewer)
