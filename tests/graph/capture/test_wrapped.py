"""Functions wrapped by torch.fx.wrap: they are inlined if they take weights. Assignments to items of tensors."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import qtoolkit as qt
from tests.nets import linear_of


def attention_of(x: Tensor, weight: Tensor, out: Tensor, window: int, drop: float, training: bool) -> Tensor:
    """Attend within windows, with a mask that is written piece by piece, as torchvision's Swin does."""
    rows = x.size(0)
    if rows > 2:
        x = x[:2]
    mask = x.new_zeros((window, window))
    for i in range(window):
        mask[i : i + 1, i:] = float(i)
    q = F.linear(x, weight).reshape(2, x.size(0), window, -1)
    scores = q[0] @ q[1].transpose(-2, -1) * (q.size(-1)) ** -0.5 + mask
    y = scores.softmax(-1) @ q[1]
    return F.dropout(F.linear(y, out), drop, training)


def data_decides(x: Tensor, weight: Tensor) -> Tensor:
    x[0] = 0.0
    return F.linear(x, weight) if x.sum() > 0 else x


def without_weights(x: Tensor) -> Tensor:
    return x * 2 if x.size(0) > 1 else x


for wrapped in ("attention_of", "data_decides", "without_weights"):
    fx.wrap(wrapped)


class Windows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.qkv, self.out = linear_of(), nn.Parameter(torch.randn(8, 4)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return attention_of(self.first(x), self.qkv, self.out, 2, 0.5, self.training)


class Other(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.function, self.first, self.weight = function, linear_of(), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        if self.function == "data":
            return data_decides(self.first(x), self.weight)
        return without_weights(self.first(x))


def test_its_layers_are_quantized_and_its_results_kept() -> None:
    model, x = Windows().train(), torch.randn(4, 2, 4)
    prepared = qt.prepare(model, (x,), "onnxruntime")
    report = qt.quantization_report(prepared)
    assert [line.name for line in report.quantized if line.weight] == ["first", "linear", "linear_1"]
    for ours in (prepared, copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        with qt.disable_quantization(ours), torch.no_grad():
            for training in (False, True):
                torch.manual_seed(1)
                y = ours.train(training)(x)
                torch.manual_seed(1)
                assert torch.equal(y, model.train(training)(x))


@pytest.mark.slow
def test_the_codes_are_the_exported_ones(tmp_path) -> None:
    x = torch.randn(4, 2, 4)
    prepared = qt.prepare(Windows().eval(), (x,), "onnxruntime")
    qt.calibrate(prepared, [x], progress=False)
    codes = qt.export_onnx(prepared, x, tmp_path / "model.onnx").verification
    assert codes.quantizer_codes.differing == 0
    assert codes.quantizer_codes.compared > 0


@pytest.mark.parametrize(("which", "op"), [("data", "data_decides"), ("plain", "without_weights")])
def test_others_stay_one_op(which: str, op: str) -> None:
    model, x = Other(which).eval(), torch.rand(3, 4)
    prepared = qt.prepare(model, (x,), "onnxruntime")
    assert [n.name for n in prepared.graph.nodes if n.op == "call_function"] == [op]
    with qt.disable_quantization(prepared), torch.no_grad():
        assert torch.equal(prepared(x), model(x))


def test_without_example_inputs_it_stays_one_op() -> None:
    prepared = qt.prepare(Windows().eval(), backend="onnxruntime")
    assert [n.name for n in prepared.graph.nodes if n.op == "call_function"] == ["attention_of"]
    (line,) = [line for line in qt.quantization_report(prepared).left_float if line.name == "attention_of"]
    assert line.reason == (
        "float: a function that takes weights and is not traced: pass example_inputs, or make it a module"
    )


class Writes(nn.Module):
    """Writes into a tensor that a layer reads before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = linear_of(), linear_of(), linear_of()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        before = self.second(y)
        y[:, 1:3] = x[:, :2] * 3
        y[0] = 0
        return self.third(y) + before


@pytest.mark.parametrize("measured", [True, False], ids=["example", "no example"])
def test_later_readers_of_the_tensor_see_an_assignment(measured: bool) -> None:
    model, x = Writes().eval(), torch.rand(3, 4)
    prepared = qt.prepare(model, (x,) if measured else None, "onnxruntime")
    with qt.disable_quantization(prepared), torch.no_grad():
        assert torch.equal(prepared(x), model(x))
    edges = {(e.source, e.consumer) for e in prepared.plan.edges if e.quantizer.startswith("activation")}
    assert {("x", "first"), ("first", "second"), ("set_item_1", "third")} <= edges
    qt.calibrate(prepared, [x], progress=False)
    restored = pickle.loads(pickle.dumps(prepared))
    assert torch.equal(restored(x), prepared(x))


def sides_of(x: Tensor, least: int) -> list[int]:
    """Return sizes that a function computes."""
    return [max(int(side), least) for side in x.shape]


def even(sides: list[int]) -> list[int]:
    """Change a list, and return it."""
    sides[0] += sides[0] % 2
    return sides


for wrapped in ("sides_of", "even"):
    fx.wrap(wrapped)


class Sides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear_of(), linear_of()

    def forward(self, x: Tensor, factor: float) -> Tensor:
        rows, columns = sides_of(x, 2)
        y = self.first(x).reshape(rows * columns // 4, -1) + rows * columns
        return self.second(y * factor)


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = linear_of()

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).reshape(even([1, x.size(0), 2]))


def test_a_function_may_write_into_its_lists(tmp_path) -> None:
    x = torch.rand(3, 4)
    prepared = qt.prepare(Lists().eval(), (x,), "onnxruntime")
    qt.calibrate(prepared, [x], progress=False)
    assert qt.export_onnx(prepared, x, tmp_path / "model.onnx").verification.quantizer_codes.compared == x.numel()


def test_numbers_that_a_function_returns_are_not_tensors() -> None:
    model, inputs = Sides().eval(), (torch.rand(3, 4), 0.5)
    prepared = qt.prepare(model, inputs, "onnxruntime")
    qt.calibrate(prepared, [inputs], progress=False)
    restored = pickle.loads(pickle.dumps(prepared))
    for ours in (prepared, copy.deepcopy(prepared), restored):
        report = qt.quantization_report(ours)
        assert [(line.name, line.kind) for line in report.layers if line.kind in ("mul", "add", "scale", "shift")] == [
            ("add", "shift"),
            ("mul_2", "scale"),
        ]
        with qt.disable_quantization(ours):
            assert torch.equal(ours(*inputs), model(*inputs))


class Attends(nn.Module):
    """torch's attention as a function, which takes the weights of layers, or one weight of all projections."""

    def __init__(self, is_packed: bool, need_weights: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.packed = nn.Parameter(torch.randn(24, 8)) if is_packed else None
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, out = self.layers
        separate = (
            {}
            if self.packed is not None
            else {"q_proj_weight": q.weight, "k_proj_weight": k.weight, "v_proj_weight": v.weight}
        )
        y, _ = F.multi_head_attention_forward(
            x, x, x, 8, 2, self.packed, torch.cat([q.bias, k.bias, v.bias]), None, None, False, 0.0, out.weight, out.bias,
            self.training, need_weights=self.need_weights, use_separate_proj_weight=bool(separate), **separate,
        )  # fmt: skip
        return y


@pytest.mark.slow
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("is_packed", [True, False])
def test_the_projections_of_an_attention_that_is_called_as_a_function(
    is_packed: bool, need_weights: bool, tmp_path
) -> None:
    model, x = Attends(is_packed, need_weights).train(), torch.randn(5, 3, 8)
    prepared = qt.prepare(model, (x[:, :1],), "onnxruntime")
    lines = qt.quantization_report(prepared).quantized
    assert [line.kind for line in lines].count("linear") == (2 if is_packed else 4)
    with qt.disable_quantization(prepared):
        torch.testing.assert_close(prepared(x), model(x))
    qt.calibrate(prepared, [x], progress=False)
    prepared(x).square().mean().backward()
    assert prepared.layers[3].weight.grad is not None
    path = qt.export_onnx(prepared, x, tmp_path / "model.onnx").path
    qt.export.verify(qt.convert(prepared, arithmetic="integer"), x, path).check()


def test_an_attention_that_cannot_be_traced_says_so() -> None:
    model = Attends(is_packed=True, need_weights=False).eval()
    prepared = qt.prepare(model, backend="onnxruntime")
    (line,) = [line for line in qt.quantization_report(prepared).left_float if line.kind == "other"]
    assert "pass example_inputs" in line.reason
