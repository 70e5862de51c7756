"""The result of an export says how the file stores weights, and which arguments store fewer bytes."""

import onnx
import pytest
import torch
from torch import nn

import qtoolkit as qt
from qtoolkit.export import StoredWeights

X = torch.linspace(-1, 1, 2 * 8).reshape(2, 8)


def result_of(tmp_path, backend: str, bits: int = 8, **options: object) -> qt.ExportResult:
    torch.manual_seed(0)
    weight = qt.QuantSpec(bits=bits, axis=0)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(qt.backends[backend].qconfig.activation, weight))
    prepared = qt.prepare(
        nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 5)).eval(), X, backend, qconfig_mapping=mapping
    )
    qt.calibrate(prepared, [X], progress=False)
    path = tmp_path / "m.onnx"
    return qt.export_onnx(
        qt.convert(prepared), X, path, verify=False, exporter="torchscript", progress=False, **options
    )


ELEMENTS = 6 * 8 + 5 * 6


@pytest.mark.parametrize(
    ("backend", "bits", "options", "expected"),
    [
        ("onnxruntime", 8, {}, StoredWeights(2, 8, "UINT8", ELEMENTS, "", ELEMENTS, 'weight_codes="int8"')),
        ("onnxruntime", 8, {"weight_codes": "int8"}, StoredWeights(2, 8, "INT8", ELEMENTS, "", ELEMENTS)),
        ("onnxruntime", 4, {}, StoredWeights(2, 4, "INT8", ELEMENTS, "opset=21", ELEMENTS // 2)),
        ("onnxruntime", 4, {"opset": 21}, StoredWeights(2, 4, "INT4", ELEMENTS // 2, "", ELEMENTS // 2)),
        ("tensorrt10", 8, {}, StoredWeights(2, 8, "FLOAT", 4 * ELEMENTS, "integer_weights=True", ELEMENTS)),
        (
            "tensorrt10",
            3,
            {},
            StoredWeights(2, 3, "FLOAT", 4 * ELEMENTS, "integer_weights=True, opset=21", ELEMENTS // 2),
        ),
    ],
)
def test_each_way_of_storing_weights_is_described(tmp_path, backend, bits, options, expected) -> None:
    result = result_of(tmp_path, backend, bits, **options)
    assert result.weights == (expected,)
    stored = [t for t in onnx.load(str(result.path)).graph.initializer if list(t.dims) in ([6, 8], [5, 6])]
    assert {onnx.TensorProto.DataType.Name(tensor.data_type) for tensor in stored} == {expected.dtype}
    assert str(expected) in str(result)


class Masked(nn.Module):
    """Two linear layers with a mask between them, which the file stores."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("mask", torch.arange(8) % 2 == 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(torch.where(self.mask, x, -x))


def test_a_stored_mask_is_not_a_weight(tmp_path) -> None:
    prepared = qt.prepare(Masked().eval(), X, "onnxruntime")
    qt.calibrate(prepared, [X], progress=False)
    result = qt.export_onnx(qt.convert(prepared), X, tmp_path / "m.onnx", verify=False, progress=False)
    (mask,) = (t for t in onnx.load(str(result.path)).graph.initializer if t.data_type == onnx.TensorProto.BOOL)
    assert list(mask.dims) == [8]
    assert [(weights.count, weights.dtype) for weights in result.weights] == [(2, "UINT8")]


def test_the_arguments_that_are_named_do_what_they_say(tmp_path) -> None:
    before = result_of(tmp_path, "tensorrt10", 4).weights[0]
    assert before.smaller_by == "integer_weights=True, opset=21"
    (after,) = result_of(tmp_path, "tensorrt10", 4, integer_weights=True, opset=21).weights
    assert (after.bytes, after.dtype, after.smaller_by) == (before.smaller_bytes, "INT4", "")
    assert str(before) == (
        "2 weights of 4 bits are stored as floats that the file quantizes, in FLOAT: 0.3 KiB; integer_weights=True, opset=21: "
        "0.0 KiB"
    )
