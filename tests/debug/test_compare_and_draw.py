"""compare() against figures computed by hand; draw() by what stands in the file."""

import math
import pickle
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.debug.similarity import Comparison, LayerComparison, Similarity, similarity_of
from tests.nets import Residual

W2 = qt.QConfig(qt.QuantSpec(), qt.QuantSpec(bits=2, axis=0))


def by_hand(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    a, b = a.detach().double(), b.detach().double()
    cosine = float((a * b).sum() / a.norm() / b.norm())
    return cosine, float(20 * torch.log10(a.norm() / (a - b).norm()))


def calibrated(model: nn.Module, x: torch.Tensor, mapping: qt.QConfigMapping | None = None, **options: object):
    prepared = qt.prepare(model, qconfig_mapping=mapping, backend="tensorrt10", **options)
    qt.calibrate(prepared, [x], progress=False)
    return prepared


def test_figures_are_those_computed_by_hand() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(inplace=True), nn.Linear(32, 8)).eval()
    x = torch.randn(64, 16)
    prepared = calibrated(model, x, qt.QConfigMapping().set_global(W2))
    result = qt.debug.compare(model, prepared, x)
    layers = {layer.name: layer for layer in result.layers}
    assert set(layers) == {"0", "2"}

    inputs = [prepared.get_submodule(f"activation_quantizers.{name}") for name in ("input_1", "_1")]
    hidden = F.relu(model[0](x))
    expected = model[2](hidden)
    first = F.linear(inputs[0](x), prepared.get_submodule("0").weight_quantizer(model[0].weight), model[0].bias)
    weight = prepared.get_submodule("2").weight_quantizer(model[2].weight)
    alone = F.linear(inputs[1](hidden), weight, model[2].bias)
    after = F.linear(inputs[1](F.relu(first)), weight, model[2].bias)
    line = layers["2"]
    for found, wanted in (
        (line.own, by_hand(expected, alone)),
        (line.accumulated, by_hand(expected, after)),
        (line.weight, by_hand(model[2].weight, weight)),
        (result.output, by_hand(expected, after)),
    ):
        assert (found.cosine, found.sqnr) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("converted", [False, True])
def test_a_batch_norm_counts_to_its_layer(mode: str, converted: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    x = torch.randn(8, 3, 9, 9)
    model(x)
    prepared = calibrated(model.train(mode == "train"), x)
    quantized = qt.convert(prepared) if converted else prepared
    (line,) = qt.debug.compare(model, quantized, x).layers
    assert line.name == "0"
    assert 0.999 < line.own.cosine < 1
    assert 30 < line.own.sqnr < 60


def test_the_worst_layer_comes_first_and_adds_have_lines() -> None:
    model, x = Residual(True).eval(), torch.randn(4, 4, 8, 8)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    result = qt.debug.compare(model, calibrated(model, x, qt.QConfigMapping().set_module_name(names[0], W2)), x)
    assert result.layers[0].name == names[0]
    assert "add" in {layer.kind for layer in result.layers}
    assert [layer.own.sqnr for layer in result.layers] == sorted(layer.own.sqnr for layer in result.layers)
    assert names[0] in str(result).splitlines()[3]
    assert result.to_dict()["layers"][0]["name"] == names[0]


def test_with_quantizers_off_nothing_differs() -> None:
    model, x = Residual(True).eval(), torch.randn(4, 4, 8, 8)
    prepared = calibrated(model, x)
    with qt.disable_quantization(prepared):
        result = qt.debug.compare(model, prepared, x)
    figures = {layer.name: layer.own.sqnr for layer in result.layers}
    assert figures.pop("conv2") > 120  # its batch norm is folded, which rounds
    assert set(figures.values()) == {math.inf}


def test_compare_leaves_both_models_as_they_were() -> None:
    model, x = Residual(True), torch.randn(4, 4, 8, 8)
    prepared = calibrated(model, x)
    before = [{k: v.clone() for k, v in m.state_dict().items()} for m in (model, prepared)]
    qt.debug.compare(model, prepared, x)
    assert model.training
    assert prepared.training
    for m, state in zip((model, prepared), before, strict=True):
        assert all(torch.equal(v, state[k]) or v.isnan().all() for k, v in m.state_dict().items())


class Whole(nn.Module):
    """A loop over a tensor of unknown length: a submodule that tracing keeps whole; its layer is called for each part."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.conv(part[None])[0] for part in x])


class Around(nn.Module):
    """Two layers with a submodule between them that cannot be traced; an argument chooses the way."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Conv2d(3, 4, 1), Whole(), nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor, twice: bool = False) -> torch.Tensor:
        y = self.block(self.stem(x))
        return self.head(y * 2 if twice else y)


@pytest.mark.parametrize(
    "options",
    [
        {"untraced": ["block"], "concrete_args": {"twice": True}},
        {"leaf_modules": [Whole], "example_inputs": torch.randn(2, 3, 6, 6)},
        {"untraced": ["block"], "example_inputs": torch.randn(2, 3, 6, 6)},
    ],
    ids=["concrete_args", "leaf", "skip"],
)
@pytest.mark.parametrize("converted", [False, True])
def test_the_float_model_is_traced_as_prepare_did(options: dict, converted: bool) -> None:
    model, x = Around().eval(), torch.randn(2, 3, 6, 6)
    inputs = (x, True) if "concrete_args" in options else (x,)
    prepared = qt.prepare(model, backend="tensorrt10", **options)
    qt.calibrate(prepared, [inputs], progress=False)
    quantized = pickle.loads(pickle.dumps(qt.convert(prepared) if converted else prepared))
    result = qt.debug.compare(model, quantized, inputs)
    layers = {layer.name: layer for layer in result.layers}
    assert set(layers) >= {"stem", "block.conv", "head"}

    conv = prepared.get_submodule("block.conv")
    parts = model.stem(x).detach()
    weight = conv.weight_quantizer(model.block.conv.weight)
    alone = F.conv2d(conv.input_quantizer(parts), weight, model.block.conv.bias, padding=1)
    line = layers["block.conv"]
    wanted = by_hand(model.block.conv(parts), alone)
    assert (line.own.cosine, line.own.sqnr) == pytest.approx(wanted, rel=1e-4)
    assert (line.weight.cosine, line.weight.sqnr) == pytest.approx(by_hand(model.block.conv.weight, weight), rel=1e-6)
    assert line.accumulated.sqnr < line.own.sqnr
    assert not any(module._forward_hooks for m in (model, quantized) for module in m.modules())


def test_bad_arguments_are_named() -> None:
    model, x = nn.Sequential(nn.Linear(4, 2)).eval(), torch.randn(2, 4)
    prepared = calibrated(model, x)
    with pytest.raises(TypeError, match="quantized must be the result of qtoolkit.prepare"):
        qt.debug.compare(model, model, x)
    with pytest.raises(TypeError, match="float_model must be the float"):
        qt.debug.compare(prepared, prepared, x)
    with pytest.raises(ValueError, match="graph has no _0; pass the float model"):
        qt.debug.compare(nn.Sequential(nn.Sequential(nn.Linear(4, 2))), prepared, x)
    with pytest.raises(TypeError, match=r"must be a torch\.fx\.GraphModule, got Sequential"):
        qt.debug.draw(model, "never.svg")


def texts_of(path: Path) -> list[str]:
    root = ElementTree.fromstring(path.read_text())
    return [text for text in root.itertext() if text.strip()]


def test_a_drawing_shows_ops_quantizers_and_ranges(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Softmax(1), nn.Linear(4, 2)).eval()
    prepared = qt.prepare(model, backend="tensorrt10")
    qt.debug.draw(prepared, tmp_path / "before.svg")
    assert texts_of(tmp_path / "before.svg").count("no range yet") == 2
    for name in ("input_1", "_2"):
        prepared.get_submodule(f"activation_quantizers.{name}").amax = 12.7
    qt.debug.draw(qt.convert(prepared), tmp_path / "new" / "after.svg")
    texts = texts_of(tmp_path / "new" / "after.svg")
    assert texts.count("[-12.8, 12.7]") == 2
    assert {"linear", "relu", "0", "3", "weight int8 per-channel(0)"} <= set(texts)
    titles = {t.text for t in ElementTree.parse(tmp_path / "before.svg").iter("{http://www.w3.org/2000/svg}title")}
    assert {node.name for node in prepared.graph.nodes} <= titles


def test_a_float_graph_is_drawn_too(tmp_path: Path) -> None:
    qt.debug.draw(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 2))), tmp_path / "float.svg")
    assert "linear" in texts_of(tmp_path / "float.svg")


def test_without_the_extra_a_sentence_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pygraphviz", None)
    with pytest.raises(ImportError, match="draw needs pygraphviz, which is not installed; run: pip install "):
        qt.debug.draw(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 2))), tmp_path / "float.svg")
    assert not list(tmp_path.iterdir())


def test_a_large_graph_is_drawn_with_straight_lines(tmp_path, monkeypatch) -> None:
    prepared = qt.prepare(Residual(True).eval(), backend="tensorrt10")
    qt.debug.draw(prepared, tmp_path / "small.svg")
    monkeypatch.setattr(sys.modules["qtoolkit.debug.draw"], "LARGE", 5)
    qt.debug.draw(prepared, tmp_path / "large.svg")
    small, large = (ElementTree.parse(tmp_path / f"{name}.svg").getroot() for name in ("small", "large"))
    count = [len(root.findall(".//{*}title")) for root in (small, large)]
    assert count[0] == count[1]
    assert (tmp_path / "small.svg").read_text() != (tmp_path / "large.svg").read_text()


class Drawing(nn.Module):
    """Adds random numbers between two layers, as models with a latent variable do; returns logits, classes or rows."""

    def __init__(self, returns: str = "logits") -> None:
        super().__init__()
        self.first, self.last, self.returns = nn.Linear(16, 16), nn.Linear(16, 4), returns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        logits = self.last(h + torch.randn_like(h))
        return logits.argmax(1) if self.returns == "classes" else logits


def on_route(route: str, model: nn.Module, x: torch.Tensor) -> nn.Module:
    quantized = (
        qt.prepare(model, x, backend="tensorrt10")
        if route == "prepare"
        else qt.quant_modules.replace(model, backend="tensorrt10")
    )
    qt.calibrate(quantized, [x], progress=False)
    return quantized


@pytest.mark.parametrize("route", ["prepare", "replace"])
def test_both_models_draw_the_same_random_numbers(route: str) -> None:
    model, x = Drawing().eval(), torch.randn(64, 16)
    quantized, before = on_route(route, model, x), torch.get_rng_state()
    result = qt.debug.compare(model, quantized, x, progress=False)
    assert torch.equal(torch.get_rng_state(), before)
    assert result.output.sqnr > 25
    assert all(layer.accumulated.sqnr > 25 for layer in result.layers)


@pytest.mark.parametrize("route", ["prepare", "replace"])
def test_models_that_return_classes_are_compared_by_these(route: str) -> None:
    model, x = Drawing("classes").eval(), torch.randn(64, 16)
    quantized = on_route(route, model, x)
    state = torch.get_rng_state()
    classes = model(x)
    torch.set_rng_state(state)
    found = quantized(x)
    torch.set_rng_state(state)
    result = qt.debug.compare(model, quantized, x, progress=False)
    assert len(result.layers) >= 2
    wanted = (1.0, math.inf) if torch.equal(classes, found) else by_hand(classes, found)
    assert (result.output.cosine, result.output.sqnr) == pytest.approx(wanted)


def test_outputs_of_different_shape_have_no_similarity() -> None:
    for pair in ((torch.ones(2), torch.ones(3)), ([torch.ones(2)], []), (1, 1)):
        found = similarity_of(*pair)
        assert math.isnan(found.cosine)
        assert math.isnan(found.sqnr)


def test_layers_with_nothing_to_compare_are_the_last() -> None:
    """NaN compares with nothing: between the others it left them in no order."""
    values = (20.0, math.nan, 5.0, math.nan, 10.0, math.inf, -math.inf)
    layers = [LayerComparison(str(value), "conv", *[Similarity(1.0, value)] * 2, None) for value in values]
    names = [layer.name for layer in Comparison.of(layers, torch.ones(2), torch.ones(2)).layers]
    assert names == ["-inf", "5.0", "10.0", "20.0", "inf", "nan", "nan"]


def test_an_infinite_difference_has_an_sqnr() -> None:
    assert Similarity.of(torch.tensor([3.0, 4.0]), torch.tensor([3.0, math.inf])).sqnr == -math.inf
