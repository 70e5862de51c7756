"""Scales that are float16 numbers: rounded where they are read, in training and in the deployed model."""

import copy
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit import ops
from qtoolkit.graph.program.units import base
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.quantizers.quantizer import named_quantizers
from qtoolkit.quantizers.table import QUANTIZERS
from tests import reference
from tests.cases import assert_same
from tests.nets import settled
from tests.quantizers.test_kinds import SPECS

FLOAT16 = "float16"
KINDS = [name for name in SPECS if name in QUANTIZERS]  # those of the package
X = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(1)) - 0.2


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.GELU(), nn.Flatten(1)
    )


def quantized(route: str = "prepare", backend: str = "tensorrt10", calibrated: bool = True, **fields: Any) -> nn.Module:
    activation = qt.QuantSpec(**fields)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(activation, activation))
    if route == "prepare":
        model = qt.prepare(net().train(), X, backend=backend, qconfig_mapping=mapping)
    else:
        model = qt.quant_modules.replace(net().train(), mapping, backend=backend)
    if calibrated:
        qt.calibrate(model, [X], progress=False)
    return model.train()


def trained(model: nn.Module, steps: int = 3) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
    return model


def is_float16(scale: Tensor) -> bool:
    return torch.equal(scale, scale.half().to(scale.dtype)) and bool((scale >= 2**-14).all())


@contextmanager
def said(*sentences: str) -> Iterator[None]:
    """Expect exactly these warnings of scales."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield
    texts = [text for each in found if "scale" in (text := str(each.message))]
    assert len(texts) == len(sentences), texts
    for text, sentence in zip(texts, sentences, strict=True):
        assert re.search(sentence, text), text


# ---- the rule


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scales_are_the_nearest_numbers_of_float16(dtype: torch.dtype) -> None:
    halves = torch.arange(0x0400, 0x7C00, dtype=torch.int16).view(torch.float16).to(dtype)  # all normal ones
    assert_same(ops.float16_scale(halves), halves)
    between = (halves[:-1] + halves[1:]) / 2  # ties
    beside = torch.cat([between, between * (1 + 2**-20), between * (1 - 2**-20)])
    assert_same(ops.float16_scale(beside), torch.from_numpy(beside.numpy().astype(np.float16)).to(dtype))
    scale = torch.exp2(torch.rand(1000, dtype=dtype) * 60 - 30)
    assert_same(ops.float16_scale(scale), reference.float16_scale(scale))


def test_small_scales_are_raised_and_what_is_no_scale_stays() -> None:
    given = torch.tensor([0.0, 2**-30, 2**-14, 65519.0, 65520.0, 1e9, torch.inf, torch.nan, -0.3])
    wanted = [2**-14, 2**-14, 2**-14, 65504.0, 65536.0, 999817216.0, torch.inf, torch.nan, -0.300048828125]
    assert_same(ops.float16_scale(given), torch.tensor(wanted))


def test_the_gradient_passes_straight_through() -> None:
    scale = torch.tensor([[0.3, 1e-9]], requires_grad=True)
    (ops.float16_scale(scale) * torch.tensor([[2.0, 3.0]])).sum().backward()
    assert scale.grad is not None
    assert scale.grad.tolist() == [[2.0, 3.0]]
    with pytest.raises(TypeError, match=r"^float16_scale: scale must be float32 or float64, got Half\.$"):
        ops.float16_scale(torch.ones(1).half())


# ---- the spec


def test_specs_that_cannot_have_it() -> None:
    for fields, words in (
        ({"dynamic": True}, "dynamic=True computes a scale for each token"),
        ({"format": "mxfp8"}, "format='mxfp8' needs scale_dtype='float32'"),
        ({"format": "nnie"}, "format='nnie' needs scale_dtype='float32'"),
    ):
        with pytest.raises(ValueError, match=words):
            qt.QuantSpec(scale_dtype=FLOAT16, **fields)
    with pytest.raises(ValueError, match="unknown scale_dtype 'half'"):
        qt.QuantSpec(scale_dtype="half")
    base_spec = qt.QuantSpec(scale_dtype=FLOAT16)
    assert qt.QuantSpec(bits=4).completed(base_spec).scale_dtype == FLOAT16
    assert qt.QuantSpec(dynamic=True).completed(base_spec).scale_dtype == "float32"
    assert qt.QuantSpec.from_dict(base_spec.to_dict()) == base_spec


# ---- training


@pytest.mark.parametrize("route", ["prepare", "replace"])
@pytest.mark.parametrize("name", KINDS)
def test_what_is_trained_is_deployed(name: str, route: str) -> None:
    """Of each kind of quantizer: the converted model computes what training does, and what is stored is not rounded."""
    activation, weight = (qt.QuantSpec(**fields, quantizer=name, scale_dtype=FLOAT16) for fields in SPECS[name])
    mapping = qt.QConfigMapping().set_global(qt.QConfig(activation, weight.with_(axis=0)))
    if route == "prepare":
        model = qt.prepare(net().train(), X, backend="onnxruntime", qconfig_mapping=mapping)
    else:
        model = qt.quant_modules.replace(net().train(), mapping, backend="tensorrt10")
    qt.calibrate(model, [X], progress=False)
    trained(model.train())
    quantizers = qt.quantizers_of(model)
    assert all(is_float16(q.scale) for q in quantizers.values())
    stored = [q.kind.grid(q)[0] for q in quantizers.values()]
    assert name in ("tqt",) or not all(map(is_float16, stored))
    y = model.eval()(X)
    converted = qt.convert(model)
    assert torch.equal(converted(X), y)
    assert all(is_float16(grid.scale) for grid in named_quantizers(converted, Grid).values())


def test_small_steps_add_up() -> None:
    """Steps below the distance of two numbers of float16 reach the next one, since what is trained is not rounded."""
    quantizer = qt.TensorQuantizer(qt.QuantSpec(quantizer="lsq", scale_dtype=FLOAT16))
    quantizer.amax = 127 * 0.3
    seen = set()
    for _ in range(40):
        seen.add(float(quantizer.scale))
        with torch.no_grad():
            quantizer._relative_scale += 2**-14
    assert len(seen) == 4  # of numbers that are 2**-12 apart


def test_an_op_that_observes_and_quantizes_has_the_rounded_scale() -> None:
    """So does a quantizer that is called while it observes, or whose range follows the weight."""
    quantizer = qt.TensorQuantizer(qt.QuantSpec(scale_dtype=FLOAT16), of_weight=True).train()
    y = quantizer(X)
    assert not is_float16(quantizer._scale)
    assert_same(y, ops.fake_quant(X, ops.float16_scale(quantizer._scale)))


@pytest.mark.parametrize("quantizer", ["fixed", "lsq"])
def test_units_round_by_themselves(quantizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scales of a unit are not made at each call, and its op is told to round them."""
    model, found, made = settled(quantized(quantizer=quantizer, scale_dtype=FLOAT16)).train(), [], base.made

    def recorded(kind: Any, fields: dict[str, Any], varying: list[str]) -> Any:
        found.append((fields, varying))
        return made(kind, fields, varying)

    monkeypatch.setattr(base, "made", recorded)
    trained(model, 1)
    assert len(found) == 2
    assert [fields["float16"] for fields, _ in found] == [True, True]
    assert found[0][0]["y_float16"]
    assert all("start" not in varying for _, varying in found)


def test_a_batch_norm_that_moves_a_kept_range_does_not_round_it_again_and_again() -> None:
    model = quantized(scale_dtype=FLOAT16)
    qt.freeze_ranges(model)
    exact = quantized()
    qt.freeze_ranges(exact)
    for each in (model, exact):
        with torch.no_grad():
            for _ in range(20):
                each(X)
    pairs = zip(qt.quantizers_of(model).values(), qt.quantizers_of(exact).values(), strict=True)
    weights = [(ours, theirs) for ours, theirs in pairs if ours.follows_factor]
    assert weights
    for ours, theirs in weights:
        torch.testing.assert_close(ours._scale, theirs._scale, rtol=1e-3, atol=0)
        assert_same(ours.scale, reference.float16_scale(ours._scale))


# ---- checkpoints


@pytest.mark.parametrize("quantizer", ["fixed", "lsq"])
def test_a_training_with_float32_scales_resumes(quantizer: str) -> None:
    before = trained(quantized(quantizer=quantizer))
    model = quantized(quantizer=quantizer, scale_dtype=FLOAT16)
    with pytest.warns(
        UserWarning, match="scale_dtype='float32', and the model has scale_dtype='float16': its scales are r"
    ):
        model.load_state_dict(before.state_dict())
    for ours, theirs in zip(qt.quantizers_of(model).values(), qt.quantizers_of(before).values(), strict=True):
        assert_same(ours.scale, reference.float16_scale(theirs.scale))
        assert_same(ours._scale, theirs._scale)
    trained(model)
    y = model.eval()(X)
    assert torch.equal(qt.convert(model)(X), y)
    own = copy.deepcopy(model)
    with said():
        own.load_state_dict(model.state_dict())


def test_a_converted_model_with_float32_scales_is_rounded_and_says_how_many_codes_move() -> None:
    state = qt.convert(trained(quantized())).state_dict()
    new = quantized(calibrated=False, scale_dtype=FLOAT16)
    with pytest.warns(UserWarning, match="which changes [0-9]+ of 504 quantized weights") as found:
        restored = qt.convert(new, state_dict=state)
    (sentence,) = (text for each in found if "which changes" in (text := str(each.message)))
    moved = 0
    for name, grid in named_quantizers(restored, Grid).items():
        exact = state[f"{name}.scale"]
        assert_same(grid.scale, reference.float16_scale(exact))
        if grid.of_weight:
            weight = restored.get_submodule(name.rpartition(".")[0]).weight
            moved += int((ops.quantize(weight, exact, axis=0) != grid.codes(weight)).sum())
    assert f"changes {moved} of" in sentence
    with said():
        assert torch.equal(qt.convert(new, state_dict=restored.state_dict())(X), restored(X))


def test_a_model_without_the_option_is_not_rounded() -> None:
    model = trained(quantized())
    with said():
        converted = qt.convert(model)
    assert not all(is_float16(grid.scale) for grid in named_quantizers(converted, Grid).values())


# ---- what no float16 number is


def test_a_scale_that_is_too_large_is_an_error_that_names_the_quantizer() -> None:
    model = quantized(calibrated=False, scale_dtype=FLOAT16)
    with pytest.raises(
        ValueError, match=r"'activation_quantizers.input_1': scale must be at most 65,504, .* got 6[0-9]+; "
    ):
        qt.calibrate(model, [X * 1e8], progress=False)
    quantizer = qt.TensorQuantizer(qt.QuantSpec(quantizer="lsq", scale_dtype=FLOAT16), name="here")
    quantizer.amax = 127 * 60000.0
    with torch.no_grad():
        quantizer._relative_scale.fill_(2)
    with pytest.raises(ValueError, match="'here': scale must be at most 65,504"):
        quantizer.to_grid()
    with pytest.raises(ValueError, match="'Grid': scale must be at most 65,504"):
        Grid(torch.tensor(65520.0), None, qt.QuantSpec(scale_dtype=FLOAT16))


def test_scales_that_are_raised_are_named() -> None:
    model, names = quantized(calibrated=False, scale_dtype=FLOAT16), r"'activation_quantizers.input_1' \(1 of 1\)"
    with said(f"^calibrate: scales below 2.*{names}"):
        qt.calibrate(model, [X * 1e-4], progress=False)
    with said(f"^convert: scales below 2.*{names}"):
        grid = qt.convert(model).activation_quantizers.input_1
    assert float(grid.scale) == 2**-14
    with said(f"^quantization_report: scales below 2.*{names}"):
        qt.quantization_report(model)


# ---- files


def test_a_file_of_a_model_in_float16_has_no_casts(tmp_path: Path) -> None:
    """The pairs of the file have scales of float16, which are those of training."""
    model = trained(quantized(quantizer="lsq", scale_dtype=FLOAT16)).eval()
    converted = qt.convert(model)
    result = qt.export_onnx(converted.half(), X.half(), tmp_path / "model.onnx", opset=19, progress=False)
    file = onnx.load(result.path)
    assert "Cast" not in [node.op_type for node in file.graph.node]
    scales = {node.input[1] for node in file.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")}
    types = {each.name: each.data_type for each in file.graph.initializer}
    assert {types[name] for name in scales} == {onnx.TensorProto.FLOAT16}
