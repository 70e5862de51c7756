"""Ops that torch's exporters refuse or change without a word: pools with divisors of their own, for example."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.export import Verdict, verify
from tests.sessions import default_session

IMAGE = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
VOLUME = torch.rand(2, 3, 6, 6, 6, generator=torch.Generator().manual_seed(1))


class Pools(nn.Module):
    """A pool between two convolutions, and behind them."""

    def __init__(self, dims: int, pool: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        conv = nn.Conv2d if dims == 2 else nn.Conv3d
        self.first, self.last, self.pool = conv(3, 4, 1), conv(4, 2, 1), pool

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.last(self.pool(self.first(x))))


class Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


POOLS = {
    "module": (IMAGE, nn.AvgPool2d(2, divisor_override=3)),
    "function": (IMAGE, lambda x: F.avg_pool2d(x, (2, 1), divisor_override=1)),
    "padding that does not count": (IMAGE, nn.AvgPool2d(3, 2, 1, count_include_pad=False, divisor_override=4)),
    "volume": (VOLUME, nn.AvgPool3d(2, divisor_override=5)),
    "keyword": (VOLUME, lambda x: F.avg_pool3d(input=x, kernel_size=(2, 2, 2), divisor_override=-2)),
}


def prepared(name: str, backend: str = "onnxruntime") -> tuple[nn.Module, Tensor]:
    x, pool = POOLS[name]
    torch.manual_seed(0)
    model = qt.prepare(Pools(x.dim() - 2, pool).eval(), x, backend)
    qt.calibrate(model, [x], progress=False)
    return model, x


@pytest.mark.sweep(1)
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("name", POOLS)
def test_the_file_divides_by_the_models_divisor(name: str, exporter: str, tmp_path) -> None:
    model, x = prepared(name)
    converted = qt.convert(model)
    result = qt.export_onnx(converted, x, tmp_path / "model.onnx", exporter=exporter)
    assert result.verification.output_error < 1e-5
    assert verify(converted, x, result.path, optimized=False).check()


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "pool",
    [
        nn.AvgPool2d(2, 2, 1, ceil_mode=True),
        nn.AvgPool2d(3, 3, 1, ceil_mode=True, count_include_pad=False),
        nn.MaxPool2d(2, 2, 1, ceil_mode=True),
        lambda x: F.max_pool2d(x, 2, 2, 1, 1, True),
        nn.AvgPool2d(64, ceil_mode=True),
        lambda x: F.max_pool2d(x, (64, 3), stride=(), ceil_mode=True),
    ],
    ids=[
        "average",
        "average of what is there",
        "maximum",
        "function",
        "larger than the image",
        "larger in one dimension",
    ],
)
@pytest.mark.parametrize(
    "options", [{}, {"exporter": "torchscript"}, {"exporter": "torchscript", "dynamic_batch": True}], ids=str
)
def test_a_window_that_begins_in_the_padding_is_not_in_the_file(pool, options: dict, tmp_path) -> None:
    x = torch.rand(2, 3, 9, 9) if getattr(pool, "stride", 2) == 2 else IMAGE
    model = qt.prepare(nn.Sequential(nn.Conv2d(3, 4, 1), Apply(pool)).eval(), x, "onnxruntime")
    qt.calibrate(model, [x], progress=False)
    converted = qt.convert(model)
    result = qt.export_onnx(converted, x, tmp_path / "model.onnx", **options)
    session = default_session(result.path)
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), converted(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["module", "volume"])
def test_integer_arithmetic_computes_it_in_float_as_the_runtime_does(name: str, tmp_path) -> None:
    model, x = prepared(name)
    path = qt.export_onnx(model, x, tmp_path / "model.onnx").path
    found = verify(qt.convert(model, arithmetic="integer"), x, path).runtimes["onnxruntime"]
    assert "QLinearAveragePool" not in [layer.kernel for layer in found.integer_layers]
    assert found.check() is not Verdict.DIFFERENT


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_a_divisor_with_windows_beyond_the_edge_is_refused(exporter: str, tmp_path) -> None:
    model = qt.prepare(
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.AvgPool2d(3, 2, ceil_mode=True, divisor_override=2)).eval(),
        backend="tensorrt10",
    )
    qt.calibrate(model, [IMAGE], progress=False)
    with pytest.raises(
        ValueError, match=r"export_onnx: an average pool with divisor_override=2 and ceil_mode=True cannot be"
    ):
        qt.export_onnx(model, IMAGE, tmp_path / "model.onnx", exporter=exporter)
    assert not (tmp_path / "model.onnx").exists()


FOLLOWING = {
    "average": (nn.AdaptiveAvgPool2d(2), "an adaptive pool to 2 has windows"),
    "one dimension": (nn.AdaptiveAvgPool2d((None, 1)), "an adaptive pool to .None, 1. has windows"),
    "maximum": (nn.AdaptiveMaxPool2d((4, 2)), "an adaptive pool to .4, 2. has windows"),
    "area": (nn.Upsample(scale_factor=0.5, mode="area"), "a resize in the mode 'area' has windows"),
}


@pytest.mark.parametrize("name", FOLLOWING)
def test_windows_that_follow_a_dynamic_size_are_refused(name: str, tmp_path) -> None:
    pool, words = FOLLOWING[name]
    model = qt.prepare(nn.Sequential(nn.Conv2d(3, 4, 1), pool).eval(), IMAGE, "onnxruntime")
    qt.calibrate(model, [IMAGE], progress=False)
    with pytest.raises(ValueError, match=rf"export_onnx: {words} that depend on a dynamic input size"):
        qt.export_onnx(model, IMAGE, tmp_path / "model.onnx", dynamic_shapes=({0: "batch", 2: "h", 3: "w"},))
    assert not (tmp_path / "model.onnx").exists()
    qt.export_onnx(model, IMAGE, tmp_path / "model.onnx", dynamic_batch=True)


@pytest.mark.parametrize("size", [1, (None, 4)], ids=str)
def test_windows_that_follow_no_dynamic_size_are_exported(size: object, tmp_path) -> None:
    model = qt.prepare(nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(size)).eval(), IMAGE, "onnxruntime")
    qt.calibrate(model, [IMAGE], progress=False)
    converted = qt.convert(model)
    path = qt.export_onnx(converted, IMAGE, tmp_path / "model.onnx", dynamic_shapes=({2: "h"},)).path
    taller = torch.rand(2, 3, 13, 8)
    (y,) = default_session(path).run(None, {"input": taller.numpy()})
    torch.testing.assert_close(torch.as_tensor(y), converted(taller), rtol=1e-4, atol=1e-4)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize(
    "options",
    [{"size": (16, 12)}, {"size": (80, 16)}, {"scale_factor": 2 / 7}, {"scale_factor": (2.0, 2 / 7)}],
    ids=str,
)
def test_a_resize_takes_the_pixels_that_torch_takes(options: dict, exporter: str, tmp_path) -> None:
    x = torch.rand(2, 3, 56, 56)
    layers = [nn.Conv2d(3, 4, 1), nn.Upsample(**options), nn.Conv2d(4, 2, 1), nn.ReLU(), nn.Conv2d(2, 2, 1)]
    model = qt.prepare(nn.Sequential(*layers).eval(), x, "onnxruntime")
    qt.calibrate(model, [x], progress=False)
    converted = qt.convert(model, arithmetic="integer")
    path = qt.export_onnx(converted, x, tmp_path / "model.onnx", exporter=exporter).path
    assert verify(converted, x, path).check() == {"onnxruntime": Verdict.EQUAL}
    (y,) = default_session(path).run(None, {"input": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), converted(x), rtol=1e-5, atol=1e-5)


class Projected(nn.Module):
    """An LSTM that projects its states."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.linear = nn.LSTM(8, 16, proj_size=4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.lstm(x)[0])


@pytest.mark.sweep(1)
@pytest.mark.parametrize("arithmetic", ["float", "integer"])
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_an_lstm_that_projects_is_refused(exporter: str, arithmetic: str, tmp_path) -> None:
    x, path = torch.rand(2, 5, 8), tmp_path / "model.onnx"
    model = qt.prepare(Projected().eval(), x, "onnxruntime", exclude=nn.LSTM)
    qt.calibrate(model, [x], progress=False)
    with pytest.raises(
        ValueError, match="export_onnx: an LSTM with proj_size=4 cannot be expressed in ONNX; quantize the layer"
    ):
        qt.export_onnx(qt.convert(model, arithmetic), x, path, exporter=exporter, verify=False)
    assert not path.exists()


@pytest.mark.parametrize("route", [qt.prepare, qt.quant_modules.replace])
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_a_quantized_lstm_that_projects_is_exported(exporter: str, route, tmp_path) -> None:
    x = torch.rand(2, 5, 8)
    model = route(Projected().eval(), backend="tensorrt10")
    qt.calibrate(model, [x], progress=False)
    assert qt.export_onnx(model, x, tmp_path / "model.onnx", exporter=exporter).verification.layer_codes.are_ties()


class PaddedEncoder(nn.Module):
    """A layer of torch's encoder with a mask of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.out(self.layer(x, src_key_padding_mask=padding))


class PaddedFunction(nn.Module):
    """An attention by torch's function with a mask of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 4)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, self.mask_of(padding)[:, None, None])
        return self.out(y.transpose(1, 2).flatten(2))

    def mask_of(self, padding: Tensor) -> Tensor:
        return ~padding


class PaddedFloatFunction(PaddedFunction):
    """The same with a mask of floats."""

    def mask_of(self, padding: Tensor) -> Tensor:
        return torch.zeros_like(padding, dtype=torch.float32).masked_fill(padding, -torch.inf)


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("net", [PaddedEncoder, PaddedFunction, PaddedFloatFunction])
def test_a_sample_of_padding_alone_is_finite_in_the_file(net: type[nn.Module], exporter: str, tmp_path) -> None:
    """prepare compares the graph with the model off torch's fused kernel, which returns NaN for such a sample."""
    torch.manual_seed(0)
    x, padding = torch.randn(3, 5, 8), torch.zeros(3, 5, dtype=torch.bool)
    padding[1] = True
    padding[0, 3:] = True
    model = net().eval()
    expected = model(x, padding).detach()
    prepared = qt.prepare(model, (x, padding), backend="onnxruntime")
    qt.calibrate(prepared, [(x, padding)], progress=False)
    result = qt.export_onnx(prepared, (x, padding), tmp_path / "model.onnx", exporter=exporter)
    assert result.verification.layer_codes.differing == 0
    assert result.verification.output_error < 1e-5
    torch.testing.assert_close(qt.convert(prepared, arithmetic="integer")(x, padding), expected, atol=0.1, rtol=0)


class Attends(nn.Module):
    """A self-attention without heads, and a softplus with a threshold of its own."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.qkv, self.out, self.plus = nn.Linear(6, 18), nn.Linear(6, 6), nn.Softplus(2.0, threshold)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        one = F.scaled_dot_product_attention(q, k, v, mask)
        return self.out(self.plus(one + F.scaled_dot_product_attention(q, k, v, is_causal=True)) - self.plus(x))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("route", [qt.prepare, qt.quant_modules.replace])
def test_attention_without_heads_and_a_threshold_of_softplus(route: Callable, exporter: str, tmp_path) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(2, 5, 6), torch.randn(2, 5, 5)
    model = route(Attends(0.5).eval(), backend="onnxruntime")
    qt.calibrate(model, [inputs], progress=False)
    result = qt.export_onnx(model, inputs, tmp_path / "model.onnx", exporter=exporter)
    assert result.verification.output_error < 1e-5
