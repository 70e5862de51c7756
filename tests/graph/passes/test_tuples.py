"""Ops that return tuples: targets that quantize outputs quantize the tensors in them, and what is no data stays float."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt

INTEGER_TARGETS = ["snpe", "qnn", "ppl", "ppl-w8a16", "stpu"]
X = torch.rand(2, 5, 16)
TRANSFORMERS = {
    "encoder": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (X,)),
    "decoder": (lambda: nn.TransformerDecoderLayer(16, 2, 32, batch_first=True), (X, X + 1)),
    "transformer": (lambda: nn.Transformer(16, 2, 1, 1, 32, batch_first=True), (X, X + 1)),
}


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x + 1


class TakesItems(nn.Module):
    """A layer that returns a tuple, both items of which are returned, one through a linear layer."""

    def __init__(self, layer: nn.Module, **kwargs: Any) -> None:
        super().__init__()
        self.layer, self.fc, self.kwargs = layer, nn.Linear(16, 16), kwargs

    def forward(self, x: Tensor) -> Any:
        y, rest = self.layer(x, x, x, **self.kwargs) if isinstance(self.layer, nn.MultiheadAttention) else self.layer(x)
        return self.fc(torch.relu(y)), rest


def calibrated(model: nn.Module, inputs: tuple[Tensor, ...], backend: str, **options: Any) -> Any:
    prepared = qt.prepare(model.eval(), inputs, backend=backend, **options)
    report = qt.calibrate(prepared, [inputs], progress=False)
    assert report.unreached == ()
    return prepared


def sources_of(prepared: Any) -> set[tuple[str, str]]:
    return {(edge.source, edge.consumer) for edge in prepared.plan.edges if edge.quantizer.startswith("activation")}


@pytest.mark.parametrize("backend", INTEGER_TARGETS)
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_on_targets_that_quantize_outputs(backend: str, name: str) -> None:
    make, inputs = TRANSFORMERS[name]
    model = make()
    prepared = calibrated(model, inputs, backend)
    attentions = [node for node in prepared.graph.nodes if str(node.target).endswith("attn")]
    outputs = {user.name for node in attentions for user in node.users}
    assert attentions
    assert outputs <= {source for source, _ in sources_of(prepared)}, "the output of each attention is quantized"
    with torch.no_grad():
        error = (prepared(*inputs) - model(*inputs)).abs().max()
    assert 0 < error < 0.2


@pytest.mark.slow
def test_the_file_of_an_encoder_has_a_pair_for_the_output_of_attention(tmp_path) -> None:
    make, inputs = TRANSFORMERS["encoder"]
    result = qt.export_onnx(calibrated(make(), inputs, "snpe"), inputs, tmp_path / "model.onnx")
    assert "activation_quantizers.getitem" in result.verification.by_quantizer


@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_weights_stay_float(need_weights: bool) -> None:
    attention = nn.MultiheadAttention(16, 2, batch_first=True)
    prepared = calibrated(TakesItems(attention, need_weights=need_weights), (X,), "snpe")
    assert sources_of(prepared) == {("x", "layer"), ("getitem", "relu"), ("relu", "fc"), ("fc", "output")}
    assert (prepared(X)[1] is not None) == need_weights


def test_the_last_states_of_recurrent_layers_stay_float() -> None:
    for layer in (nn.LSTM(16, 16, batch_first=True), nn.GRU(16, 16, batch_first=True)):
        prepared = calibrated(TakesItems(layer), (X,), "snpe")
        assert sources_of(prepared) == {("x", "layer"), ("getitem", "relu"), ("relu", "fc"), ("fc", "output")}


def test_the_tuple_of_an_unknown_module_is_not_quantized_as_a_tensor() -> None:
    mapping = qt.QConfigMapping().set_module_name("layer", qt.backends["snpe"].qconfig)
    prepared = calibrated(TakesItems(Pair()), (X,), "snpe", qconfig_mapping=mapping, leaf_modules=(Pair,))
    assert ("x", "layer") in sources_of(prepared)
    assert not any(source == "layer" for source, _ in sources_of(prepared))


def test_a_tuple_that_is_returned_whole_stays_float() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x: Tensor) -> Any:
            return self.attention(x, x, x)

    assert sources_of(calibrated(Whole(), (X,), "snpe")) == {("x", "attention")}
