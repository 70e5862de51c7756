"""Files of LiteRT with recurrent layers: the steps of an LSTM or a GRU, with all codes of the model."""

import re
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.export import export_litert, verify

litert = pytest.importorskip(
    "ai_edge_litert.interpreter",
    reason="files of LiteRT are not written and run; pip install -r requirements-litert.txt",
)
BOTH = ("litert", "litert-xnnpack")
X = torch.randn(5, 6, 8, generator=torch.Generator().manual_seed(0))
LAYERS = [
    ({"batch_first": True}, "the first batch dimension"),
    ({"num_layers": 2, "bidirectional": True}, "two layers in both directions"),
    ({"bias": False}, "no biases"),
]


class Tagger(nn.Module):
    """A recurrent layer, and a linear one at each step."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(layer.hidden_size * (2 if layer.bidirectional else 1), 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0])


class Stateful(nn.Module):
    """A layer that begins with a state which the inputs give, and returns the last one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.first = layer, nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x[0])[None]
        y, last = self.layer(x, (h, h) if isinstance(self.layer, nn.LSTM) else h)
        return torch.cat([y[-1], (last[1] if isinstance(last, tuple) else last)[0]])


class Loop(nn.Module):
    """A cell that the model's own code calls."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind():
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


def quantized(model: nn.Module, route: str) -> nn.Module:
    model = model.eval()
    found = (
        qt.prepare(model, (X,), backend="litert")
        if route == "prepare"
        else qt.quant_modules.replace(model, backend="litert")
    )
    generator = torch.Generator().manual_seed(1)
    qt.calibrate(found, [torch.randn(5, 6, 8, generator=generator) for _ in range(8)], progress=False)
    return found


def check_codes(model: nn.Module, path) -> qt.export.LitertResult:
    """Export a model, and check all codes on other inputs, with the reference kernels and with XNNPACK."""
    result = export_litert(model, X, path)
    others = torch.randn(5, 6, 8, generator=torch.Generator().manual_seed(2))
    found = verify(qt.convert(model), others, path, BOTH, progress=False)
    for codes in found.runtimes.values():
        assert codes.not_compared == ()
        assert codes.codes.compared > 0
    assert found.check()
    return result


@pytest.mark.sweep(1)
@pytest.mark.parametrize("route", ["prepare", "replace"])
@pytest.mark.parametrize("options", [options for options, _ in LAYERS], ids=[name for _, name in LAYERS])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_layers(kind: type[nn.Module], options: dict, route: str, tmp_path) -> None:
    torch.manual_seed(0)
    result = check_codes(quantized(Tagger(kind(8, 16, **options)), route), tmp_path / "model.tflite")
    assert {(layer.name, layer.kernel) for layer in result.float_layers if layer.name == "layer"} == {
        ("layer", f"{kind.__name__} by steps")
    }
    assert "cell states of LiteRT's integer kernel" in result.reasons["layer"] or kind is nn.GRU
    assert str(result).count("by steps") <= 3  # the reason once, however many steps there are


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_states_that_the_model_gives_and_takes(kind: type[nn.Module], tmp_path) -> None:
    torch.manual_seed(0)
    check_codes(quantized(Stateful(kind(8, 16)), "prepare"), tmp_path / "model.tflite")


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_cells(kind: type[nn.Module], tmp_path) -> None:
    torch.manual_seed(0)
    check_codes(quantized(Loop(kind(8, 16)), "replace"), tmp_path / "model.tflite")


def test_a_call_begins_without_the_state_of_the_call_before(tmp_path) -> None:
    torch.manual_seed(0)
    path = export_litert(quantized(Tagger(nn.LSTM(8, 16)), "prepare"), X, tmp_path / "model.tflite").path
    interpreter = litert.Interpreter(str(path))
    interpreter.allocate_tensors()
    (given,), (returned,) = interpreter.get_input_details(), interpreter.get_output_details()
    outputs = []
    for _ in range(2):
        interpreter.set_tensor(given["index"], X.numpy())
        interpreter.invoke()
        outputs.append(interpreter.get_tensor(returned["index"]).copy())
    assert np.array_equal(*outputs)


def test_codes_are_stacked(tmp_path) -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            return self.last(torch.stack([y[:, 0], y[:, -1]], 1))

    result = check_codes(quantized(Pairs(), "prepare"), tmp_path / "model.tflite")
    assert result.float_layers == ()


@pytest.mark.parametrize(
    ("layer", "sentence"),
    [
        (
            partial(nn.LSTM, 8, 16, proj_size=4),
            "has proj_size; set proj_size=0, and add a Linear after the layer",
        ),
        (partial(nn.RNN, 8, 16), "LiteRT has no op for aten.rnn_tanh"),
    ],
)
def test_what_is_not_exported_is_a_sentence(layer, sentence: str, tmp_path) -> None:
    made = layer()
    model = Tagger(made)
    model.head = nn.Linear(getattr(made, "proj_size", 0) or 16, 4)
    model = qt.prepare(
        model, (X,), backend="litert", exclude=[nn.LSTM, nn.RNN]
    )  # a quantized one is written step by step
    qt.calibrate(model, [X], progress=False)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        export_litert(model, X, tmp_path / "model.tflite")
    assert not (tmp_path / "model.tflite").exists()
