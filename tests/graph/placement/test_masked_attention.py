"""Sums of attention's scores with masks and biases: float where the softmax is, as no grid holds a mask and the scores."""

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.lint.masked_attention import MASKED

LENGTH, SIZE = 6, 8


class Attention(nn.Module):
    """Scores plus a learned bias plus a mask, and the softmax in float32, as language models write it."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(SIZE, SIZE) for _ in range(4))
        self.bias = nn.Embedding(LENGTH, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-2, -1) / SIZE**0.5
        scores = scores + self.bias(torch.arange(LENGTH)).view(1, 1, LENGTH)
        scores += mask
        weights = torch.softmax(scores.float(), -1).type_as(scores)
        return self.out(weights @ self.value(x) + x)


def inputs() -> tuple[Tensor, Tensor]:
    mask = torch.zeros(2, LENGTH, LENGTH)
    mask[:, :, 4:] = float("-inf")
    return torch.randn(2, LENGTH, SIZE), mask


def status(prepared: nn.Module, name: str) -> tuple[str, str]:
    (line,) = (line for line in qt.quantization_report(prepared).layers if line.name == name)
    return line.status, line.reason


@pytest.mark.parametrize("backend", ["tensorrt", "onnxruntime", "openvino", "snpe", "vitis", "tvm"])
def test_masked_scores_stay_in_float_and_say_so(backend: str) -> None:
    prepared = qt.prepare(Attention().eval(), inputs(), backend)
    assert status(prepared, "add") == status(prepared, "add_1") == (MASKED.status, MASKED.text)
    qt.calibrate(prepared, [inputs()], progress=False)  # -inf is observed by none
    with torch.no_grad():
        assert bool(torch.isfinite(prepared(*inputs())).all())
    assert not [line for line in qt.quantization_report(prepared).tensors if line.source == "mask"]


def test_other_sums_and_both_products_are_quantized() -> None:
    prepared = qt.prepare(Attention().eval(), inputs(), "onnxruntime")
    assert status(prepared, "add_2")[0] == "quantized"  # the residual add
    assert [status(prepared, name)[0] for name in ("matmul", "matmul_1")] == ["quantized"] * 2


def test_a_rule_of_the_users_own_quantizes_them() -> None:
    qconfig = qt.backends["onnxruntime"].qconfig
    mapping = qt.QConfigMapping().set_module_name("add", qconfig)
    prepared = qt.prepare(Attention().eval(), inputs(), "onnxruntime", mapping)
    assert status(prepared, "add")[0] == "quantized"
    assert status(prepared, "add_1") == (MASKED.status, MASKED.text)


def test_a_target_with_an_integer_softmax_has_its_input_on_a_grid() -> None:
    prepared = qt.prepare(Attention().eval(), inputs(), "qnn")
    assert status(prepared, "add")[0] == status(prepared, "softmax")[0] == "quantized"


@pytest.mark.parametrize("taken", ["twice", "not by a softmax", "of a layer"])
def test_sums_that_are_no_scores_are_quantized(taken: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            a, b = self.a(x), self.b(x)
            product = a @ b.transpose(-2, -1) @ b if taken != "of a layer" else a
            total = product + y
            if taken == "not by a softmax":
                return self.last(total)
            return self.last(torch.softmax(total, -1) * total if taken == "twice" else torch.softmax(total, -1))

    example = torch.randn(2, LENGTH, SIZE), torch.randn(2, LENGTH, SIZE)
    assert status(qt.prepare(Net().eval(), example, "openvino"), "add")[0] == "quantized"
