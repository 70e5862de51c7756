"""Activations in the forms that TensorRT fuses: which files have them, and what they compute in float16 and float32."""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.export.files.ops import ops_of
from qtoolkit.export.passes.fused_activations import write_tanh_silu

IMAGE = torch.randn(4, 8, 6, 6, generator=torch.Generator().manual_seed(0))
TANH_FORM = {"Tanh": 1, "Mul": 3, "Add": 1}
SIGMOID_FORM = {"Sigmoid": 1, "Mul": 1}


class Block(nn.Module):
    """A convolution with a SiLU between two others; the SiLU's result may be added to the first one's, or to a constant."""

    def __init__(self, shortcut: str = "") -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Conv2d(8, 8, 1) for _ in range(3))
        self.act, self.shortcut = nn.SiLU(), shortcut

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = self.act(self.second(y))
        if self.shortcut == "sum of a moved result":
            z = z.flatten(2).unflatten(2, (6, 6))
        return self.last(z + 1.0 if self.shortcut == "constant" else z + y if self.shortcut else z)


def converted(model: nn.Module, backend: str | qt.Backend = "tensorrt") -> nn.Module:
    spec = qt.QuantSpec(scale_dtype="float16")
    mapping = qt.QConfigMapping().set_global(qt.QConfig(spec, spec))
    prepared = qt.prepare(model.eval(), IMAGE, backend=backend, qconfig_mapping=mapping)
    qt.calibrate(prepared, [IMAGE], progress=False)
    return qt.convert(prepared)


def written(model: nn.Module, folder: Path, backend: str | qt.Backend = "tensorrt", **options: Any) -> qt.ExportResult:
    options = {"float_type": "float16", "progress": False, **options}
    return qt.export_onnx(converted(model, backend), IMAGE, folder / "model.onnx", **options)


def ops_in(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


def has(path: Path, form: dict[str, int]) -> bool:
    found = ops_in(path)
    return all(found[op] >= count for op, count in form.items()) and ("Tanh" in form) != ("Sigmoid" in found)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("opset", [None, 21, 23])
def test_files_in_float16_have_the_form_and_the_same_codes(opset: int | None, exporter: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    result = written(Block(), tmp_path, opset=opset, exporter=exporter)
    assert has(result.path, TANH_FORM)
    onnx.checker.check_model(onnx.load(result.path), full_check=True)
    assert result.verification is not None
    assert result.verification.weight_codes.differing == 0
    assert result.verification.quantizer_codes.differing == 0
    assert result.verification.layer_codes.are_ties()
    assert not qt.export.lint(result.path, "tensorrt")


def test_lint_sees_a_silu_in_either_form(tmp_path: Path) -> None:
    for backend in (qt.backends["tensorrt"], dataclasses.replace(qt.backends["tensorrt"], silu_form="sigmoid")):
        result = written(Block(), tmp_path, backend)
        kinds = [op.kind.name for op in ops_of(onnx_ir.load(result.path)) if op.layer is None and not op.is_quantizer]
        assert kinds.count("silu") == 1
        assert not {"tanh", "sigmoid", "mul", "add", "scale"} & set(kinds)


@pytest.mark.parametrize(
    ("shortcut", "form"),
    [
        ("", TANH_FORM),
        ("constant", {**TANH_FORM, "Add": 2}),
        ("sum", SIGMOID_FORM),
        ("sum of a moved result", SIGMOID_FORM),
    ],
)
def test_a_silu_that_a_residual_add_takes_keeps_its_form(shortcut: str, form: dict[str, int], tmp_path: Path) -> None:
    tensorrt = qt.backends["tensorrt"]
    float_sums = dataclasses.replace(tensorrt, roles={**tensorrt.roles, "add": "float"})
    assert has(written(Block(shortcut), tmp_path, float_sums).path, form)
    assert has(written(Block(shortcut), tmp_path).path, TANH_FORM)  # a pair stands between the SiLU and the add


def test_products_with_sums_are_gates_of_one_half_alone(tmp_path: Path) -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.shift = (
                nn.Conv2d(8, 8, 1),
                nn.Conv2d(8, 8, 1),
                nn.Parameter(torch.ones(8, 1, 1)),
            )

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            return self.last(y * (torch.tanh(y * 0.5) * self.shift + self.shift))

    result = written(Gated(), tmp_path)
    assert result.verification is not None
    assert not {op.kind.name for op in ops_of(onnx_ir.load(result.path))} & {"silu"}
    assert not qt.export.lint(result.path, "tensorrt")


@pytest.mark.slow
def test_other_files_keep_the_form_of_the_exporter(tmp_path: Path) -> None:
    assert has(written(Block(), tmp_path, float_type="float32").path, SIGMOID_FORM)
    assert has(written(Block(), tmp_path, "tensorrt8", float_type="float32").path, SIGMOID_FORM)
    assert has(written(Block(), tmp_path, "openvino").path, SIGMOID_FORM)
    changed = dataclasses.replace(qt.backends["tensorrt"], silu_form="sigmoid")
    assert has(written(Block(), tmp_path, changed).path, SIGMOID_FORM)
    with pytest.raises(ValueError, match="silu_form of Backend 'tensorrt': must be one of|unknown"):
        dataclasses.replace(qt.backends["tensorrt"], silu_form="relu")


@pytest.mark.slow
def test_hard_swish_and_gelu_are_the_ops_that_its_parser_knows(tmp_path: Path) -> None:
    for opset, gelu in ((19, {"Div": 1, "Erf": 1, "Add": 1, "Mul": 2}), (20, {"Gelu": 1})):
        model = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Hardswish(), nn.Conv2d(8, 8, 1), nn.GELU(), nn.Conv2d(8, 8, 1))
        found = ops_in(written(model, tmp_path, opset=opset).path)
        floats = {
            op: n for op, n in found.items() if op not in ("QuantizeLinear", "DequantizeLinear", "Cast", "Constant")
        }
        assert floats == {"Conv": 3, "HardSwish": 1, **gelu}


# ---- what the form computes


def both_forms(dtype: int) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """Return models of x * sigmoid(x): as the exporters write it, and in the form with a tanh."""
    nodes = [helper.make_node("Sigmoid", ["x"], ["gate"]), helper.make_node("Mul", ["x", "gate"], ["y"])]
    ends = [helper.make_tensor_value_info(name, dtype, [None]) for name in "xy"]
    graph = helper.make_graph(nodes, "silu", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=10)
    rewritten = onnx_ir.from_proto(model)
    write_tanh_silu(rewritten)
    proto = onnx_ir.to_proto(rewritten)
    assert Counter(node.op_type for node in proto.graph.node) == TANH_FORM
    return model, proto


def exact(x: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    with np.errstate(over="ignore"):
        return wide / (1 + np.exp(-wide))


def rounded_in_each_op(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    """Compute a model whose ops return the float16 number that is nearest to their exact result."""
    compute = {"Mul": np.multiply, "Add": np.add, "Tanh": np.tanh, "Sigmoid": lambda a: 1 / (1 + np.exp(-a))}
    values = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer} | {"x": x}
    with np.errstate(over="ignore"):
        for node in model.graph.node:
            inputs = (values[name].astype(np.float64) for name in node.input)
            values[node.output[0]] = compute[node.op_type](*inputs).astype(np.float16)
    return values["y"].astype(np.float64)


def computed(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0], np.float64)


def test_all_numbers_of_float16_are_as_near_as_in_the_other_form() -> None:
    x = np.arange(2**16, dtype=np.uint16).view(np.float16)
    x = x[np.isfinite(x)]
    sigmoid, tanh = both_forms(TensorProto.FLOAT16)
    wanted, of_x = exact(x), np.maximum(np.abs(x.astype(np.float64)), np.finfo(np.float16).smallest_normal)
    near = np.abs(x) <= 16
    errors = [
        np.abs(y - wanted) for y in (rounded_in_each_op(sigmoid, x), rounded_in_each_op(tanh, x), computed(tanh, x))
    ]
    for error in errors:  # at most a unit in the last place of x
        assert (error <= 2**-10 * of_x).all()
    of_sigmoid, of_tanh, in_onnxruntime = (float(error[near].max()) for error in errors)
    assert of_sigmoid == pytest.approx(0.00577, abs=1e-5)
    assert of_tanh == pytest.approx(0.00372, abs=1e-5)
    assert in_onnxruntime < of_sigmoid


def test_float32_is_exact_to_a_unit_of_its_input() -> None:
    x = np.concatenate(
        [np.linspace(-30, 30, 200_001), np.geomspace(1e-30, 1e30, 10_001), -np.geomspace(1e-30, 1e30, 10_001)]
    )
    x = x.astype(np.float32)
    _, tanh = both_forms(TensorProto.FLOAT)
    error = np.abs(computed(tanh, x) - exact(x))
    assert (error <= 2**-22 * np.abs(x.astype(np.float64))).all()
