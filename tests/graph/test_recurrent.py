"""Recurrent layers of models that prepare traces: the QAT layers of module replacement, with quantizers of the graph."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import qtoolkit as qt
from qtoolkit.export import verify
from qtoolkit.nn.replacement import replace_layers
from qtoolkit.verdicts import Cause, Status

X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
LAYERS = {
    "LSTM": lambda: nn.LSTM(8, 8, batch_first=True),
    "GRU": lambda: nn.GRU(8, 8, batch_first=True),
    "two layers": lambda: nn.GRU(8, 8, 2, batch_first=True),
    "both directions": lambda: nn.LSTM(8, 4, batch_first=True, bidirectional=True),
    "projected": lambda: nn.LSTM(8, 16, proj_size=8, batch_first=True),
}


class Tagger(nn.Module):
    """A recurrent layer between linear ones."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.rnn, self.last = nn.Linear(8, 8), layer, nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rnn(torch.relu(self.first(x)))[0])


class Loop(nn.Module):
    """Cells that the model's own code calls at each step."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell, self.last = cell, nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.last(state[0] if isinstance(state, tuple) else state)


class Inside(nn.Module):
    """A module around a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.rnn(x)[0],)


def verdicts(prepared: nn.Module) -> dict[str, Any]:
    return {line.name: line.verdict for line in qt.quantization_report(prepared).layers}


def check_file(prepared: nn.Module, x: Tensor, path: Any) -> None:
    """Train a step, convert, export, and compare all codes."""
    qt.calibrate(prepared, [x], progress=False)
    optimizer = torch.optim.SGD(prepared.parameters(), 1e-2)
    prepared(x).square().mean().backward()
    assert all(parameter.grad is not None for parameter in prepared.parameters())
    optimizer.step()
    qt.export_onnx(qt.convert(prepared), x, path)
    verify(qt.convert(prepared, arithmetic="integer"), x, path).check()


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "options", [{}, {"untraced": ["rnn"]}, {"capture": "export"}], ids=["traced", "untraced", "export"]
)
@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_quantized_up_to_the_file(name: str, backend: str, options: dict[str, Any], tmp_path) -> None:
    model = Tagger(LAYERS[name]()).train()
    prepared = qt.prepare(model, X, backend=backend, **options)
    kind = {nn.LSTM: qt.nn.QuantLSTM, nn.GRU: qt.nn.QuantGRU}[type(model.rnn)]
    assert type(prepared.rnn) is kind
    assert verdicts(prepared)["rnn"].status is Status.QUANTIZED
    consumers = {edge.consumer: edge.quantizer for edge in prepared.plan.edges if edge.source == "relu"}
    assert consumers["rnn"].startswith("activation_quantizers.")
    assert prepared.load_state_dict(model.state_dict(), strict=False).unexpected_keys == []
    with qt.disable_quantization(prepared):
        assert torch.equal(prepared(X), model(X))
    check_file(prepared, X, tmp_path / "model.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell])
def test_a_cell_is_quantized_with_one_quantizer_of_all_steps(cell: type[nn.Module], tmp_path) -> None:
    prepared = qt.prepare(Loop(cell(8, 8)).train(), X, backend="onnxruntime")
    steps = {edge.quantizer for edge in prepared.plan.edges if edge.consumer.startswith("cell") and edge.source == "x"}
    assert steps == {"activation_quantizers.x"}
    check_file(prepared, X, tmp_path / "model.onnx")


def test_it_computes_what_module_replacement_does() -> None:
    torch.manual_seed(0)
    model, config = Tagger(nn.LSTM(8, 8, batch_first=True)).eval(), qt.backends["tensorrt"].qconfig
    prepared, replaced = qt.prepare(model, X, backend="tensorrt"), copy.deepcopy(model)
    replace_layers(replaced, [""], lambda *_: config, qt.nn.REPLACED_MODULES)
    for each in (prepared, replaced):
        qt.calibrate(each, [X], progress=False)
    assert torch.equal(prepared(X), replaced(X))
    assert torch.equal(pickle.loads(pickle.dumps(prepared))(X), prepared(X))


@pytest.mark.slow
def test_a_layer_inside_of_a_leaf_module_has_a_quantizer_of_its_input(tmp_path) -> None:
    prepared = qt.prepare(Tagger(Inside()).train(), X, backend="onnxruntime", untraced=["rnn"])
    assert verdicts(prepared)["rnn.rnn"].status is Status.QUANTIZED
    assert "rnn.rnn.input_quantizer" in qt.quantizers_of(prepared)
    check_file(prepared, X, tmp_path / "model.onnx")


@pytest.mark.parametrize("exclude", [nn.LSTM, "rnn"])
def test_an_excluded_layer_and_its_input_stay_float(exclude: Any) -> None:
    prepared = qt.prepare(Tagger(nn.LSTM(8, 8, batch_first=True)).eval(), X, backend="openvino", exclude=exclude)
    assert verdicts(prepared)["rnn"].cause is Cause.IGNORED
    assert "rnn" not in {edge.consumer for edge in prepared.plan.edges}


@pytest.mark.slow
def test_each_target_quantizes_them() -> None:
    for name in qt.backends:
        prepared = qt.prepare(Tagger(nn.GRU(8, 8, batch_first=True)).eval(), X, backend=name)
        assert verdicts(prepared)["rnn"].status is Status.QUANTIZED, name
        assert "rnn" in {edge.consumer for edge in prepared.plan.edges}, name


class Packer(nn.Module):
    def forward(self, x: Tensor, lengths: Tensor) -> PackedSequence:
        return pack_padded_sequence(x, lengths, True)


class Unpacker(nn.Module):
    def forward(self, x: PackedSequence) -> Tensor:
        return pad_packed_sequence(x, True)[0]


class Packed(Tagger):
    """Two layers that take the packed sequence of a leaf module."""

    def __init__(self) -> None:
        super().__init__(nn.LSTM(8, 8))
        self.second, self.packer, self.unpacker = nn.GRU(8, 8), Packer(), Unpacker()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.last(self.unpacker(self.second(self.rnn(self.packer(self.first(x), lengths))[0])[0]))


@pytest.mark.parametrize("backend", ["onnxruntime", "snpe"])
def test_layers_quantize_packed_sequences_themselves(backend: str) -> None:
    inputs = X, torch.tensor([5, 3, 2])
    prepared = qt.prepare(Packed().train(), inputs, backend=backend, leaf_modules=[Packer, Unpacker])
    for name in ("rnn", "second"):
        assert prepared.get_submodule(name).input_quantizer.training
        (why,) = [edge.why for edge in prepared.plan.edges if edge.quantizer == f"{name}.input_quantizer"]
        assert "a packed sequence" in why
    qt.calibrate(prepared, [inputs], progress=False)
    assert prepared(*inputs).isfinite().all()
    assert prepared.second.input_quantizer.ready
