"""transformers' Conv1D, whose weight is (in, out): it computes and is tuned as the linear layer with the transposed weight."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import qtoolkit as qt
from qtoolkit.debug.page.facts import gather
from qtoolkit.export import verify_onnx

pytest.importorskip("transformers")
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from qtoolkit.nn.of_transformers import QuantTransformersConv1D

X = torch.randn(16, 5, 8, generator=torch.Generator().manual_seed(0))
W4 = qt.QConfigMapping().set_global(qt.QConfig(qt.QuantSpec(8), qt.QuantSpec(4, axis=0)))


def pair(mapping: qt.QConfigMapping | None = None) -> tuple[nn.Module, nn.Module]:
    """Return a calibrated net of Conv1D layers, and the same one of linear layers."""
    torch.manual_seed(0)
    ours = nn.Sequential(Conv1D(6, 8), nn.ReLU(), Conv1D(4, 6))
    linear = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
    with torch.no_grad():
        for mine, its in zip(ours[::2], linear[::2], strict=True):
            its.weight.copy_(mine.weight.normal_().t())
            its.bias.copy_(mine.bias.normal_())
    replaced = [qt.quant_modules.replace(net, mapping, backend="tensorrt") for net in (ours, linear)]
    for net in replaced:
        qt.calibrate(net, [X], progress=False)
    return replaced[0], replaced[1]


def check_alike(ours: nn.Module, linear: nn.Module) -> None:
    for mine, its in zip(ours[::2], linear[::2], strict=True):
        torch.testing.assert_close(mine.weight.t(), its.weight)
        torch.testing.assert_close(mine.bias, its.bias)
    torch.testing.assert_close(ours(X), linear(X))


@pytest.mark.parametrize("mapping", [None, W4], ids=["default", "W4"])
def test_values_and_gradients_are_those_of_the_linear_layer(mapping: qt.QConfigMapping | None) -> None:
    ours, linear = pair(mapping)
    assert type(ours[0]) is QuantTransformersConv1D
    assert [layer.weight_quantizer.spec.axis for layer in (ours[0], linear[0])] == [1, 0]
    assert torch.equal(ours[0].weight_quantizer.scale, linear[0].weight_quantizer.scale)
    check_alike(ours, linear)
    for net in (ours, linear):
        net(X).square().sum().backward()
    for mine, its in zip(ours[::2], linear[::2], strict=True):
        torch.testing.assert_close(mine.weight.grad.t(), its.weight.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "spec",
    [qt.QuantSpec(8, axis=None), qt.QuantSpec(8, axis=0, group_size=2), qt.QuantSpec(4, axis=0, quantizer="lsq")],
    ids=str,
)
def test_other_specs(spec: qt.QuantSpec) -> None:
    swapped = {None: None, 0: 1}[spec.axis]
    mapping = qt.QConfigMapping().set_global(qt.QConfig(qt.QuantSpec(8), spec))
    ours, linear = pair(mapping)
    assert ours[0].weight_quantizer.spec.axis == swapped
    check_alike(ours, linear)


def test_a_rule_by_type_says_the_axis_of_the_weight_itself() -> None:
    mapping = qt.QConfigMapping().set_object_type(Conv1D, qt.QConfig(qt.QuantSpec(8), qt.QuantSpec(8, axis=0)))
    assert qt.quant_modules.replace(Conv1D(6, 8), mapping, backend="tensorrt").weight_quantizer.spec.axis == 0


@pytest.mark.parametrize("forward", ["auto", "integer"])
def test_the_report_says_that_it_trains_in_float(forward: str) -> None:
    replaced = qt.quant_modules.replace(nn.Sequential(Conv1D(6, 8)), training_arithmetic=forward, backend="tensorrt")
    (line,) = qt.quantization_report(replaced).layers
    assert line.kind == "linear"
    assert line.training == "float, saves floats: there is no integer kernel for a Conv1D"


def test_state_dicts_copies_and_pickles(tmp_path: Path) -> None:
    ours, _ = pair()
    model = nn.Sequential(Conv1D(6, 8), nn.ReLU(), Conv1D(4, 6))
    model.load_state_dict({name: value for name, value in ours.state_dict().items() if "quantizer" not in name})
    fresh = qt.quant_modules.replace(model, backend="tensorrt")
    fresh.load_state_dict(ours.state_dict())
    qt.save_checkpoint(ours, tmp_path / "m.safetensors")
    loaded = qt.quant_modules.replace(nn.Sequential(Conv1D(6, 8), nn.ReLU(), Conv1D(4, 6)), backend="tensorrt")
    qt.load_checkpoint(loaded, tmp_path / "m.safetensors")
    for other in (fresh, loaded, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(other(X), ours(X))


def test_biases_are_corrected_as_those_of_the_linear_layer() -> None:
    ours, linear = pair(W4)
    before = ours(X).detach()
    for net in (ours, linear):
        qt.tuning.bias_correction(net, [X], progress=False)
    assert not torch.equal(ours(X), before)
    check_alike(ours, linear)


def test_gptq_says_that_it_leaves_them_out() -> None:
    ours, _ = pair(W4)
    with pytest.raises(ValueError, match="QuantTransformersConv1D, and only linear"):
        qt.tuning.gptq(ours, [X], progress=False)


def test_converted_and_exported_the_codes_are_equal(tmp_path: Path) -> None:
    ours, _ = pair()
    converted = qt.convert(ours.eval())
    torch.testing.assert_close(converted(X), ours(X))
    for exporter in ("dynamo", "torchscript"):
        result = qt.export_onnx(converted, X, tmp_path / f"{exporter}.onnx", exporter=exporter)
        assert (result.quantize_nodes, result.dequantize_nodes) == (4, 4)
        verify_onnx(converted, X, result.path).check()


def test_a_language_model_with_tied_embeddings(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_embd=32, n_head=4, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).eval()
    ids = torch.randint(0, 64, (2, 8))
    replaced = qt.quant_modules.replace(model, backend="tensorrt")
    qt.calibrate(replaced, [{"input_ids": ids}], progress=False)
    layers = [module for module in replaced.modules() if isinstance(module, QuantTransformersConv1D)]
    assert len(layers) == 4
    assert not any(type(module) is Conv1D for module in replaced.modules())
    assert replaced.lm_head.weight is replaced.transformer.wte.weight
    with torch.no_grad():
        error = (replaced(ids).logits - model(ids).logits).abs().max()
        assert 0 < error < 0.05 * model(ids).logits.abs().max()
    replaced.train()(ids, labels=ids).loss.backward()
    assert all(layer.weight.grad.abs().sum() > 0 for layer in layers)


def test_initialize_builds_it() -> None:
    with qt.quant_modules.initialize(backend="tensorrt"):
        assert type(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2)).transformer.h[0].mlp.c_fc) is (
            QuantTransformersConv1D
        )
    assert type(Conv1D(2, 4)) is Conv1D


def test_a_report_counts_its_multiplications(tmp_path: Path) -> None:
    costs = [{cost.name: (cost.macs, cost.bytes) for cost in gather(net, X, None, None).costs} for net in pair()]
    assert costs[0] == costs[1]
    assert costs[0]["0"][0] == 16 * 5 * 8 * 6
    qt.debug.report(pair()[0], X, tmp_path / "report.html", progress=False)
