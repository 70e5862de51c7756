"""Functions that take weights of replaced layers: a warning, a line of the report, and a sentence of the error."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt

X, TOKENS = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([[0, 3, 11], [2, 2, 7]])


class Takes(nn.Module):
    """Layers that are called, and a function that takes the weight of one."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.second(self.first(x)))


def attention(m: Takes, x: Tensor) -> Tensor:
    weight, bias = m.second.weight, m.second.bias
    return F.multi_head_attention_forward(
        x, x, x, 8, 2, None, torch.cat([bias] * 3), None, None, False, 0.0, weight, bias, m.training, need_weights=False,
        use_separate_proj_weight=True, q_proj_weight=weight, k_proj_weight=weight, v_proj_weight=weight,
    )[0]  # fmt: skip


TAKING = {
    "linear": lambda m, x: F.linear(x, m.second.weight, m.second.bias),
    "matmul": lambda m, x: torch.matmul(x, m.second.weight.t()),
    "baddbmm": lambda m, x: torch.baddbmm(x, x, m.second.weight.expand(5, 8, 8)),
    "einsum": lambda m, x: torch.einsum("abi,oi->abo", x, m.second.weight),
    "multi_head_attention_forward": attention,
}


def replaced(model: nn.Module) -> nn.Module:
    return qt.quant_modules.replace(model.eval(), backend="onnxruntime")


@pytest.mark.parametrize("name", TAKING)
def test_it_is_a_warning_and_a_line_of_the_report(name: str) -> None:
    model = replaced(Takes(TAKING[name]))
    with pytest.warns(UserWarning, match=rf"calibrate: functions take .* in float: 'second.weight' \({name}\)"):
        qt.calibrate(model, [X, X], progress=False)
    for found in (model, copy.deepcopy(model), qt.convert(model)):
        (line,) = [line for line in qt.quantization_report(found).left_float if line.name == "second.weight"]
        assert (line.kind, name in line.reason) == (name, True)


def test_a_loop_of_the_user_is_told_too() -> None:
    model = replaced(Takes(TAKING["linear"]))
    words = r"calibrating: functions take .* in float: 'second.weight' \(linear\)"
    with pytest.warns(UserWarning, match=words), torch.no_grad(), qt.calibrating(model):
        model(X)
    assert [line.name for line in qt.quantization_report(model).left_float] == ["second.weight"]


def test_leaf_modules_of_a_graph_are_told_too() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Takes(TAKING["linear"]))
    prepared = qt.prepare(model.eval(), X, "onnxruntime", untraced=["1"])
    with pytest.warns(UserWarning, match=r"calibrate: functions take .* in float: '1.second.weight' \(linear\)"):
        qt.calibrate(prepared, [X], progress=False)


def test_a_tied_embedding_that_a_function_takes() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.layer = nn.Embedding(12, 8), nn.Linear(8, 8)

        def forward(self, tokens: Tensor) -> Tensor:
            return F.linear(self.layer(self.embedding(tokens)), self.embedding.weight)

    model = replaced(Tied())
    with pytest.warns(UserWarning, match=r"'embedding.weight' \(linear\)"):
        qt.calibrate(model, [TOKENS], progress=False)


def test_where_no_layer_is_called_the_error_says_so() -> None:
    class ByAttribute(Takes):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.first.weight)

    model = ByAttribute(attention)
    with pytest.raises(
        RuntimeError, match=r"no data reached .*; functions take .* 'first.weight' \(linear\).*prepare trace"
    ):
        qt.calibrate(replaced(model), [X], progress=False)
    with (
        pytest.raises(RuntimeError, match=r"no data reached .*; functions take .*"),
        qt.calibrating(found := replaced(model)),
    ):
        found(X)


def test_layers_that_run_take_their_weights_themselves() -> None:
    class All(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head, self.attention = (
                nn.Embedding(12, 8),
                nn.Linear(8, 12),
                nn.MultiheadAttention(8, 2),
            )
            self.rnn, self.conv, self.again = nn.LSTM(8, 8, proj_size=4), nn.Conv1d(4, 8, 1), nn.Linear(8, 8)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens)
            x = self.conv(self.rnn(self.attention(x, x, x)[0])[0].mT).mT
            return self.head(self.again.forward(x)) + self.again.weight.square().mean()

    model = replaced(All())
    with warnings.catch_warnings(action="error"):
        qt.calibrate(model, [TOKENS], progress=False)
    assert qt.quantization_report(model).left_float == ()


def test_what_was_found_is_what_the_last_calibration_found() -> None:
    model = Takes(TAKING["linear"])
    found = replaced(model)
    with pytest.warns(UserWarning, match="second.weight"):
        qt.calibrate(found, [X], progress=False)
    found.function = lambda m, x: m.second(x)
    with warnings.catch_warnings(action="error"):
        qt.calibrate(found, [X], progress=False)
    assert not [line for line in qt.quantization_report(found).left_float if "weight" in line.name]
