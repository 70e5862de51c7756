"""`prepare` and `replace` say which layers a config takes out of the target's integer kernels, and the export repeats it."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qtoolkit as qt
from qtoolkit.report.lost_kernels import lost_kernels

X = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
WIDE = qt.QConfig(qt.QuantSpec(bits=16), qt.QuantSpec())
SIGNED = qt.QConfig(qt.QuantSpec(symmetric=True), qt.QuantSpec())
AFFINE_WEIGHT = qt.QConfig(qt.QuantSpec(), qt.QuantSpec(symmetric=False))


def net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))


def everywhere(config: qt.QConfig) -> qt.QConfigMapping:
    return qt.QConfigMapping().set_global(config)


ZERO_POINT = "its weight has a zero point"


@pytest.mark.parametrize(
    ("backend", "mapping", "lost"),
    [
        ("onnxruntime", everywhere(AFFINE_WEIGHT), ("2 of 2 conv", ZERO_POINT, "1 of 1 linear", ZERO_POINT)),
        ("onnxruntime", everywhere(SIGNED), ("2 of 2 conv", "clips at other values than the range of its output")),
        ("onnxruntime", everywhere(WIDE), ("2 of 2 conv", "its inputs are not quantized to integers of", "1 of 1")),
        (
            "onnxruntime",
            qt.QConfigMapping().set_module_name("2", qt.QConfig(qt.QuantSpec(signed=True), qt.QuantSpec())),
            ("1 of 2 conv", "its input and its output have different integer types"),
        ),
        (
            "tensorrt",
            qt.QConfigMapping().set_module_name("2", qt.QConfig(qt.QuantSpec(), qt.QuantSpec(bits=4))),
            (r"1 of 2 conv layers \('2'\)", "tensorrt computes with weights of 8 bits, not 4"),
        ),
        (
            "tensorrt",
            everywhere(qt.QConfig(qt.QuantSpec(symmetric=False), qt.QuantSpec())),
            ("only inputs with zero p",),
        ),
    ],
)
def test_prepare_warns_once_with_sums(backend: str, mapping: qt.QConfigMapping, lost: tuple[str, ...]) -> None:
    with pytest.warns(UserWarning, match="prepare: the qconfig_mapping takes layers out.*" + ".*".join(lost)) as found:
        qt.prepare(net(), X, backend=backend, qconfig_mapping=mapping)
    assert len([each for each in found if "integer kernels" in str(each.message)]) == 1
    assert found[0].filename == __file__


@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt", "openvino", "xnnpack", "litert", "qnn", "academic"])
@pytest.mark.parametrize("route", ["prepare", "replace"])
@pytest.mark.parametrize("spec", [{"quantizer": "lsq"}, {"observer": "histogram"}], ids=str)
def test_a_config_that_keeps_the_kernels_gives_no_warning(backend: str, route: str, spec: dict[str, Any]) -> None:
    mapping = everywhere(qt.QConfig(qt.QuantSpec(**spec), qt.QuantSpec(**spec)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if route == "prepare":
            qt.prepare(net(), X, backend=backend, qconfig_mapping=mapping)
            qt.prepare(net(), X, backend=backend)
        else:
            qt.quant_modules.replace(net(), mapping, backend=backend)


def test_what_a_config_leaves_in_float_is_no_surprise() -> None:
    weights_alone = everywhere(qt.QConfig(None, qt.QuantSpec(bits=4)))
    assert lost_kernels(qt.prepare(net(), X, backend="onnxruntime", qconfig_mapping=weights_alone)) == ()
    some_in_float = qt.QConfigMapping().exclude("2")
    assert lost_kernels(qt.prepare(net(), X, backend="onnxruntime", qconfig_mapping=some_in_float)) == ()


def test_small_floats_have_kernels_of_their_own_on_tensorrt() -> None:
    e4m3 = qt.QuantSpec(format="e4m3")
    assert (
        lost_kernels(qt.prepare(net(), X, backend="tensorrt", qconfig_mapping=everywhere(qt.QConfig(e4m3, e4m3)))) == ()
    )
    with pytest.warns(UserWarning, match="out of the integer kernels of onnxruntime"):
        qt.prepare(net(), X, backend="onnxruntime", qconfig_mapping=everywhere(qt.QConfig(e4m3, e4m3)))


def test_layers_on_the_meta_device_are_judged_too() -> None:
    with torch.device("meta"), pytest.warns(UserWarning, match="2 of 2 conv"):
        qt.prepare(net(), backend="onnxruntime", qconfig_mapping=everywhere(WIDE))


def test_replacement_and_leaf_modules_warn_alike() -> None:
    with pytest.warns(UserWarning, match=r"replace: .* 2 of 2 conv layers \('0', '2'\): its weight has a zero point"):
        qt.quant_modules.replace(net(), everywhere(AFFINE_WEIGHT), backend="onnxruntime")
    model = nn.Sequential(net(), nn.Linear(4, 4))
    with pytest.warns(UserWarning, match=r"2 of 2 linear layers \('1', '0\.5'\): its weight has a zero point"):
        qt.prepare(model, X, backend="onnxruntime", qconfig_mapping=everywhere(AFFINE_WEIGHT), untraced=["0"])


def test_the_kernels_are_those_of_the_converted_model(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="integer kernels"):
        prepared = qt.prepare(net().eval(), X, backend="onnxruntime", qconfig_mapping=everywhere(SIGNED))
    qt.calibrate(prepared, [X], progress=False)
    computed = qt.convert(prepared, arithmetic="integer").plan.computed
    assert [each.kernel is None for each in computed.values()] == [True, True, False]
    result = qt.export_onnx(prepared, X, tmp_path / "m.onnx", progress=False)
    assert result.in_float == lost_kernels(prepared) == lost_kernels(qt.convert(prepared))
    assert "computed in float: 2 of 2 conv layers ('0', '2')" in str(result)


@pytest.mark.slow
def test_weights_of_four_bits_keep_the_kernels_unless_they_are_packed(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepared = qt.prepare(
            net().eval(),
            X,
            backend="onnxruntime",
            qconfig_mapping=everywhere(qt.QConfig(qt.QuantSpec(), qt.QuantSpec(bits=4))),
        )
    qt.calibrate(prepared, [X], progress=False)
    converted = qt.convert(prepared, arithmetic="integer")
    stored, packed = (
        qt.export_onnx(prepared, X, tmp_path / f"{opset}.onnx", opset=opset, progress=False) for opset in (None, 21)
    )
    assert stored.in_float == ()
    assert packed.in_float[0].startswith("3 of 3 weights: they are packed, two or more values per byte")
    runs = [qt.export.verify(converted, X, each.path).runtimes["onnxruntime"] for each in (stored, packed)]
    assert [len(run.float_layers) for run in runs] == [0, 3]
