"""Transformers with weights of 4 bits in groups and float activations (W4A16): module replacement, training, conversion."""

import re
from typing import Any

import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.export.verification.runtimes.onnxruntime_cpu import KEEP_FLOATS
from tests.integer.test_text_encoder import LENGTH, VOCABULARY, Bert

TOKENS = torch.randint(1, VOCABULARY, (8, LENGTH), generator=torch.Generator().manual_seed(2))
LABELS = TOKENS[:, 0] % 3
WEIGHTS = {
    "int4 in groups": {"bits": 4, "axis": 1, "group_size": 32},
    "int4 learned": {"bits": 4, "axis": 0, "quantizer": "lsq"},
    "apot": {"bits": 4, "axis": 0, "quantizer": "apot"},
    "mxfp4": {"format": "mxfp4"},
    "nvfp4": {"format": "nvfp4"},
}


def weight_only(model: nn.Module, name: str) -> nn.Module:
    qconfig = qt.QConfig(None, qt.QuantSpec(**WEIGHTS[name]))
    mapping = qt.QConfigMapping().set_global(qconfig).set_object_type(nn.Embedding, qconfig)
    return qt.quant_modules.replace(model, qconfig_mapping=mapping, backend="tensorrt10")


def train(model: nn.Module, loss: Any, steps: int, lr: float = 3e-3) -> list[float]:
    optimizer = torch.optim.AdamW(qt.parameter_groups(model.train(), lr=lr, scale_lr=1e-3))
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses


@pytest.mark.sweep(1)
@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_an_encoder_trains_with_weights_of_4_bits(name: str, half: bool) -> None:
    torch.manual_seed(0)
    model = weight_only(Bert(), name)
    quantizers = qt.quantizers_of(model)
    assert {q.of_weight for q in quantizers.values()} == {True}
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)]
    assert len(quantizers) == len(layers) == 16
    values = model.words.weight_quantizer(model.words.weight.detach())
    assert max(len(row.unique()) for row in values.reshape(-1, 16 if name == "nvfp4" else 32)) <= 16
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        losses = train(model, lambda net: F.cross_entropy(net(TOKENS).float(), LABELS), 15)
    assert losses[-1] < losses[0] / 2
    y = model.eval()(TOKENS)
    converted = qt.convert(model)
    assert torch.equal(converted(TOKENS), y)
    loaded = weight_only(Bert(), name)
    loaded.load_state_dict(model.state_dict())
    assert torch.equal(loaded.eval()(TOKENS), y)


@pytest.mark.slow
@pytest.mark.parametrize("opset", [None, 21])
def test_its_file_holds_packed_weights(tmp_path: Any, opset: int | None) -> None:
    onnx = pytest.importorskip("onnx")
    model = weight_only(Bert(), "int4 in groups").eval()
    result = qt.export_onnx(model, (TOKENS,), tmp_path / "m.onnx", opset=opset, integer_weights=True)
    assert result.verification.weight_codes.differing == 0
    kinds = [onnx.TensorProto.DataType.Name(t.data_type) for t in onnx.load(str(tmp_path / "m.onnx")).graph.initializer]
    assert kinds.count("INT4") >= 16


def test_a_model_of_hugging_face_trains(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        num_labels=3,
    )
    model = weight_only(transformers.BertForSequenceClassification(config), "int4 in groups")
    assert len(qt.quantizers_of(model)) >= 16

    def loss(net: nn.Module) -> Tensor:
        return net(input_ids=TOKENS, labels=LABELS).loss

    losses = train(model, loss, 15)
    assert losses[-1] < losses[0]
    logits = model.eval()(input_ids=TOKENS).logits
    assert torch.equal(qt.convert(model)(input_ids=TOKENS).logits, logits)


@pytest.mark.parametrize("bits", [8, 4])
def test_verify_says_that_onnxruntime_rounds_the_float_inputs(tmp_path: Any, bits: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 7, 64)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(None, qt.QuantSpec(bits=bits, axis=0)))
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)).eval()
    converted = qt.convert(qt.prepare(model, x, backend="onnxruntime", qconfig_mapping=mapping))
    path = qt.export_onnx(converted, x, tmp_path / "model.onnx").path
    found = qt.export.verify(converted, x, path).runtimes["onnxruntime"]
    assert found.output_difference > 1e-3
    assert re.search(r"rounds the float inputs of MatMulNBits to 8 bits, .* unless .*options.add_session", found.remark)
    options = ort.SessionOptions()
    options.add_session_config_entry(*KEEP_FLOATS)
    session = ort.InferenceSession(path, options)
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), converted(x), rtol=1e-5, atol=1e-5)
