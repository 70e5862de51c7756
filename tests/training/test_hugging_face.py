"""A model of Hugging Face from its config: both routes, calibration, training, conversion and a verified file."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from tests.copies import made_once

transformers = pytest.importorskip("transformers")

VOCABULARY, LENGTH = 97, 12
W8A8 = qt.QConfigMapping().set_global(qt.QConfig(qt.QuantSpec(), qt.QuantSpec(axis=0)))
W4A8 = qt.QConfigMapping().set_global(
    qt.QConfig(qt.QuantSpec(dynamic=True), qt.QuantSpec(bits=4, axis=1, group_size=16))
)


class Classifier(nn.Module):
    """A BERT from its config, with the logits as the only output, as an exported file has them."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=LENGTH,
            num_labels=3,
        )
        self.net = transformers.BertForSequenceClassification(config)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.net(input_ids=ids, attention_mask=mask).logits


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    length = torch.randint(3, LENGTH + 1, (8, 1), generator=generator)
    mask = (torch.arange(LENGTH) < length).long()
    return torch.randint(1, VOCABULARY, (8, LENGTH), generator=generator) * mask, mask


@made_once
def quantized(route: str) -> nn.Module:
    torch.manual_seed(0)
    model = Classifier().train()
    if route == "traced":
        return qt.prepare(model, batch(0), backend="tensorrt-nlp")
    return qt.quant_modules.replace(model, W8A8 if route == "replaced" else W4A8, backend="tensorrt10")


@pytest.mark.parametrize("route", ["replaced", "groups per token", "traced"])
def test_it_is_calibrated_trained_and_converted(route: str) -> None:
    model = quantized(route)
    report = qt.calibrate(model, [batch(seed) for seed in range(3)], progress=False)
    assert report.unreached == ()
    layers = [name for name, module in model.named_modules() if isinstance(module, qt.nn.QuantLinear)]
    assert len(layers) == 8  # six in the layer of BERT, the pooler and the head
    inputs, mask = batch(0)
    labels = inputs[:, 0] % 3
    optimizer = torch.optim.AdamW(qt.parameter_groups(model, lr=3e-3))
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs, mask), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    y = model.eval()(inputs, mask)
    assert torch.equal(qt.convert(model)(inputs, mask), y)
    again = quantized(route)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.eval()(inputs, mask), y)


@pytest.mark.slow
@pytest.mark.parametrize("route", ["replaced", "traced"])
def test_its_file_has_the_codes_of_the_model(tmp_path: Path, route: str) -> None:
    pytest.importorskip("onnxruntime")
    model = quantized(route).eval()
    qt.calibrate(model, [batch(seed) for seed in range(3)], progress=False)
    result: Any = qt.export_onnx(model, batch(0), tmp_path / "bert.onnx")
    assert result.verification.weight_codes.differing == 0
    assert result.verification.quantizer_codes.differing == 0
