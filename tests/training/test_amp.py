"""Mixed precision: quantizers return their input's dtype, compute in float32, and keep their scales in it."""

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from tests.training.layers import CASES, first_of, quantized_layer
from tests.training.nets import ROUTES, SHAPE, learned, loss_of

HALVES = (torch.bfloat16, torch.float16)
MODES = {
    "float32": torch.float32,
    "autocast bfloat16": torch.bfloat16,
    "autocast float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def autocast(mode: str) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", MODES[mode]) if mode.startswith("autocast") else contextlib.nullcontext()


def cast(mode: str, x: Any) -> Any:
    """Return a model, or a tensor unless it holds indices, in the dtype of a mode without autocast."""
    is_kept = mode.startswith("autocast") or (isinstance(x, Tensor) and not x.is_floating_point())
    return x if is_kept else x.to(MODES[mode])


# ---- what a quantizer returns


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
@pytest.mark.parametrize("under", [None, *HALVES])
@pytest.mark.parametrize("kind", ["lsq", "fixed", "observing", "e4m3", "converted"])
def test_a_quantizer_returns_its_inputs_dtype(kind: str, under: torch.dtype | None, dtype: torch.dtype) -> None:
    """The result is that of float32, rounded to the dtype, under autocast too."""
    spec = qt.QuantSpec(quantizer="lsq") if kind == "lsq" else qt.QuantSpec(format="e4m3" if kind == "e4m3" else "int")
    quantizer = qt.TensorQuantizer(spec)
    quantizer.amax = 1.7
    quantizer.observing = kind == "observing"
    x = (torch.randn(64) * 0.8).to(dtype)
    wide = x if dtype == torch.float64 else x.float()
    wanted = copy.deepcopy(quantizer)(wide).to(dtype)
    quantizer = quantizer.to_grid() if kind == "converted" else quantizer
    with contextlib.nullcontext() if under is None else torch.autocast("cpu", under):
        y = quantizer(x)
    assert y.dtype == dtype
    assert torch.equal(y, wanted)
    assert quantizer.scale.dtype == torch.float32


@pytest.mark.parametrize(("dtype", "steps"), [(torch.bfloat16, 128), (torch.float16, 1024)])
def test_the_codes_of_a_rounded_output_are_the_same(dtype: torch.dtype, steps: int) -> None:
    """Up to so many steps from zero: rounding changes a value by less than half a step."""
    codes = torch.arange(-steps, steps + 1)
    for scale in torch.logspace(
        -4, 1, 501
    ):  # the smaller values are subnormal in float16, the larger ones do not overflow
        grid = (scale, None, -steps, steps)
        values = qt.ops.fake_quant(codes * scale, *grid).to(dtype)
        assert torch.equal(qt.ops.quantize(values, *grid, dtype=torch.int16), codes.to(torch.int16)), scale
        assert torch.equal(qt.ops.fake_quant(values, *grid), values)


def test_bfloat16_rounds_values_of_many_steps_to_the_next_code() -> None:
    """Of uint8 without a zero point, the upper half of the codes: they come back within one."""
    scale, codes = torch.tensor(0.013), torch.arange(256)
    values = qt.ops.fake_quant(codes * scale, scale, None, 0, 255).bfloat16()
    again = qt.ops.quantize(values, scale, None, 0, 255, dtype=torch.uint8).int()
    assert torch.equal(again[:129], codes[:129].int())
    assert 0 < (again != codes).sum() < 128
    assert (again - codes).abs().max() == 1


@pytest.mark.parametrize("dtype", HALVES)
def test_the_gradient_of_a_scale_is_summed_in_float32(dtype: torch.dtype) -> None:
    x, gradient = (torch.randn(5000).to(dtype) for _ in range(2))
    one, other = (qt.TensorQuantizer(qt.QuantSpec(quantizer="lsq")) for _ in range(2))
    one.amax = other.amax = 1.0
    with torch.autocast("cpu", dtype):
        one(x).backward(gradient)
    other(x.float()).backward(gradient.float())
    found, wanted = (quantizer.get_parameter("_relative_scale").grad for quantizer in (one, other))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)


# ---- every layer


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "float32"])
@pytest.mark.parametrize("kind", CASES, ids=[kind.__name__ for kind in CASES])
def test_every_layer_computes_in_the_float_layers_dtype(kind: type[nn.Module], mode: str) -> None:
    layer, ours, x = quantized_layer(kind, "lsq")
    if kind is nn.AvgPool3d and mode in ("bfloat16", "float16"):
        pytest.skip("torch's layer does not compute in half precision on the CPU")
    layer, ours = (cast(mode, module) for module in (layer, ours))
    x = tuple(cast(mode, each) for each in x)
    leaves = tuple(each.clone().requires_grad_() if each.is_floating_point() else each for each in x)
    with autocast(mode):
        y = first_of(ours(leaves))
    y.float().square().mean().backward()
    for tensor in (*leaves, *ours.parameters()):
        if tensor.requires_grad:
            assert tensor.grad is not None
            assert tensor.grad.isfinite().all()
            assert tensor.grad.dtype == tensor.dtype
    wanted = {torch.float64} if mode == "float64" else {torch.float32}
    assert {each.scale.dtype for each in qt.quantizers_of(ours).values()} == wanted
    if kind is nn.LSTM and mode.startswith(
        "autocast"
    ):  # torch's own autocasts on some devices only, and fails on others
        assert y.dtype == torch.float32
        return
    with autocast(mode):
        z = first_of(layer(*x))
    assert y.dtype == z.dtype
    torch.testing.assert_close(y.float(), z.float(), rtol=0.1, atol=0.05)


def test_there_is_a_case_for_every_layer() -> None:
    assert CASES.keys() == qt.nn.REPLACED_MODULES.keys()


# ---- training


def gradients(model: nn.Module, x: Tensor, mode: str) -> dict[str, Tensor]:
    with autocast(mode):
        loss = loss_of(model, cast(mode, x))
    loss.backward()
    return {name: parameter.grad.double() for name, parameter in model.named_parameters()}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("quantizer", ["lsq", "fixed"])
@pytest.mark.parametrize("route", ROUTES)
def test_gradients_are_those_of_float32(route: str, quantizer: str, mode: str) -> None:
    """Within the roundings, after which some values take the next code. The terms of a scale's gradient cancel."""
    model, x = learned(route, quantizer), torch.randn(64, *SHAPE[1:])
    wanted = gradients(copy.deepcopy(model), x, "float32")
    found = gradients(cast(mode, model), x, mode)
    bound = {"float32": 0.0, "float64": 0.001, "float16": 0.01, "bfloat16": 0.02}[mode.removeprefix("autocast ")]
    names = [name for name in wanted if not name.endswith("_relative_scale")]
    one, other = (torch.cat([each[name].flatten() for name in names]) for each in (wanted, found))
    assert (other - one).norm() <= bound * one.norm()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("quantizer", ["lsq", "fixed"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("route", ROUTES)
def test_the_loss_falls_and_the_model_is_converted_in_float32(route: str, mode: str, quantizer: str) -> None:
    model, x = cast(mode, learned(route, quantizer)), cast(mode, torch.randn(16, *SHAPE[1:]))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=mode == "autocast float16")
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        with autocast(mode):
            loss = loss_of(model, x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 2
    model = model.float()
    x = torch.randn(SHAPE)
    assert torch.equal(qt.convert(model)(x), model.eval()(x))


@pytest.mark.parametrize("route", ROUTES)
def test_a_model_trained_under_autocast_is_exported(route: str, tmp_path) -> None:
    pytest.importorskip("onnxruntime")
    model, x = learned(route), torch.randn(SHAPE)
    optimizer = torch.optim.AdamW(qt.parameter_groups(model), 1e-3, fused=True)
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
    qt.export_onnx(model, x, tmp_path / "model.onnx")  # verifies the codes


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("mode", ["autocast bfloat16", "autocast float16"])
@pytest.mark.parametrize("route", ROUTES)
def test_the_loss_falls_on_a_gpu(route: str, mode: str) -> None:
    model, x = learned(route).cuda(), torch.randn(16, *SHAPE[1:], device="cuda")
    optimizer = torch.optim.AdamW(qt.parameter_groups(model), 0.01, fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=mode == "autocast float16")
    losses = []
    with qt.debug.watch(model, every=2) as watched:
        watched.guard(optimizer)
        for _ in range(12):
            optimizer.zero_grad()
            with torch.autocast("cuda", MODES[mode]):
                loss = loss_of(model, x)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 2
    assert {each.scale.dtype for each in qt.quantizers_of(model).values()} == {torch.float32}
    assert all(row.calls and row.levels and row.gradient for row in watched.rows())
