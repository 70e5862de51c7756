"""lint on files: each rule's violation in a file made for it, nothing in files that keep the rules, and bad input."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from torch import nn

import qtoolkit as qt
from qtoolkit.export import UnreadableFileError, lint
from qtoolkit.export.lint import FILE_RULES
from qtoolkit.lint.fusions import FILE_ADVICE
from qtoolkit.lint.layers import ADVICE
from tests import nets
from tests.export.qdq_files import File, clean
from tests.graph.test_lint import Block, Inception, UNet

UINT8, INT8, INT16, INT4 = TensorProto.UINT8, TensorProto.INT8, TensorProto.INT16, TensorProto.INT4
BROKEN: dict[str, tuple[Callable[[], File], str, str]] = {}


def breaks(rule: str, where: str, backend: str = "tensorrt10") -> Callable[[Callable[[], File]], Callable[[], File]]:
    """Register a file that breaks a rule of a backend at a node."""

    def register(build: Callable[[], File]) -> Callable[[], File]:
        BROKEN[f"{rule}-{backend}-{build.__name__}"] = (build, where, backend)
        return build

    return register


def image(file: File, name: str = "x", channels: int = 16) -> str:
    return file.input(name, 1, channels, 8, 8)


def uint8(file: File, x: str, name: str = "", **options: object) -> str:
    return file.pair(x, dtype=UINT8, name=name, **{"zero": 128, **options})


def residual(quantize_branch: bool, quantize_identity: bool) -> File:
    file = File()
    x = file.pair(image(file), name="q_x")
    branch = file.conv(x)
    y = file.node("Add", file.pair(branch) if quantize_branch else branch, x if quantize_identity else "x", name="add")
    file.output(file.conv(file.pair(file.node("Relu", y)), name="next"))
    return file


@breaks("residual-add", "add")
def both_branches() -> File:
    return residual(True, True)


@breaks("residual-add", "add")
def no_branch() -> File:
    return residual(False, False)


@breaks("residual-branch", "add")
def the_longer_branch() -> File:
    file = File()
    x = file.pair(image(file))
    long = file.conv(file.pair(file.node("Relu", file.conv(x, name="first"))), name="second")
    file.output(
        file.conv(file.pair(file.node("Add", file.pair(long), file.conv(x, name="short"), name="add")), name="next")
    )
    return file


@breaks("inside-a-unit", "q_inside")
def before_a_relu() -> File:
    file = File()
    y = file.pair(file.conv(file.pair(image(file))), name="q_inside")
    file.output(file.conv(file.pair(file.node("Relu", y)), name="next"))
    return file


@breaks("inside-a-unit", "q_inside")
def before_a_batch_norm() -> File:
    file = File()
    y = file.pair(file.conv(file.pair(image(file))), name="q_inside")
    statistics = [file.constant(np.ones(16, np.float32)) for _ in range(4)]
    file.output(file.conv(file.pair(file.node("BatchNormalization", y, *statistics)), name="next"))
    return file


@breaks("inside-a-unit", "q_inside")
def before_a_silu() -> File:
    file = File()
    y = file.pair(file.conv(file.pair(image(file))), name="q_inside")
    file.output(file.conv(file.pair(file.node("Mul", y, file.node("Sigmoid", y))), name="next"))
    return file


@breaks("silu", "mul")
def between_sigmoid_and_product() -> File:
    file = File()
    y = file.conv(file.pair(image(file)))
    silu = file.node("Mul", y, file.pair(file.node("Sigmoid", y)), name="mul")
    file.output(file.conv(file.pair(silu), name="next"))
    return file


@breaks("all-inputs", "conv")
def a_float_weight() -> File:
    file = File()
    weight = file.constant(np.ones((16, 16, 3, 3), np.float32))
    file.output(file.node("Conv", file.pair(image(file)), weight, name="conv"))
    return file


@breaks("all-inputs", "conv")
def a_float_input() -> File:
    file = File()
    file.output(file.conv(image(file)))
    return file


@breaks("all-inputs", "matmul")
def one_factor() -> File:
    file = File()
    file.output(file.node("MatMul", file.pair(image(file)), image(file, "y"), name="matmul"))
    return file


@breaks("all-inputs", "values")
def probabilities_in_float() -> File:
    file = File()
    scores = file.node("MatMul", file.pair(image(file, "q")), file.pair(image(file, "k")))
    file.output(file.node("MatMul", file.node("Softmax", scores, axis=-1), file.pair(image(file, "v")), name="values"))
    return file


@breaks("shared-concat", "cat")
def two_scales() -> File:
    file = File()
    parts = [file.pair(image(file, "x"), 0.1), file.pair(image(file, "y"), 0.2)]
    file.output(file.conv(file.node("Concat", *parts, axis=1, name="cat"), inputs=32))
    return file


@breaks("requantized", "q_again")
@breaks("requantized", "q_again", "onnxruntime")
@breaks("requantized", "q_again", "openvino")
def another_scale_behind_a_pool() -> File:
    file = File()
    x = file.pair(image(file), 0.1, 0)
    file.output(file.conv(file.pair(file.node("MaxPool", x, kernel_shape=[2, 2]), 0.2, 0, name="q_again")))
    return file


@breaks("in-and-out", "pool")
def a_float_pool() -> File:
    file = File()
    file.output(file.node("Exp", file.node("AveragePool", file.pair(image(file)), kernel_shape=[2, 2], name="pool")))
    return file


@breaks("pad", "q_pad")
def behind_a_pad() -> File:
    file = File()
    padded = file.node("Pad", image(file), file.constant(np.array([0, 0, 1, 1, 0, 0, 1, 1])))
    file.output(file.conv(file.pair(padded, name="q_pad")))
    return file


@breaks("one-quantizer", "relu")
def two_quantizers() -> File:
    file = File()
    y = file.node("Relu", file.conv(file.pair(image(file))), name="relu")
    file.output(file.conv(file.pair(y, 0.1), name="a"))
    file.output(file.conv(file.pair(y, 0.2), name="b"))
    return file


def deconvolution(groups: int = 1, axis: int = 1, **options: object) -> File:
    file = File()
    weight = file.weight(16, 16 // groups, 2, 2, axis=axis)
    file.output(
        file.node("ConvTranspose", file.pair(image(file), **options), weight, group=groups, strides=[2, 2], name="up")
    )
    return file


@breaks("grouped-conv-transpose", "up", "tensorrt8")
def groups_of_a_deconvolution() -> File:
    return deconvolution(groups=2, axis=0)


@breaks("conv-transpose-axis", "up")
def input_channels_of_a_deconvolution() -> File:
    return deconvolution(axis=0)


@breaks("conv-transpose-axis", "up", "tensorrt8")
def output_channels_of_a_deconvolution() -> File:
    return deconvolution(axis=1)


@breaks("deconvolution-zero-point", "up", "openvino")
def a_deconvolution_of_asymmetric_codes() -> File:
    return deconvolution(zero=128, dtype=UINT8)


@breaks("weight-zero-point", "conv", "openvino")
def a_zero_point_of_a_convolution() -> File:
    file = File()
    file.output(file.conv(file.pair(image(file)), zero=128, dtype=UINT8))
    return file


@breaks("weight-bits", "conv")
def four_bits() -> File:
    file = File()
    file.output(file.conv(file.pair(image(file)), dtype=INT4))
    return file


@breaks("symmetric", "q_x")
def a_zero_point() -> File:
    file = File()
    file.output(file.conv(file.pair(image(file), zero=3, name="q_x")))
    return file


@breaks("symmetric", "conv")
def a_zero_point_of_a_weight() -> File:
    file = File()
    file.output(file.conv(file.pair(image(file)), zero=3))
    return file


@breaks("code-type", "q_x")
def unsigned_codes() -> File:
    file = File()
    file.output(file.conv(uint8(file, image(file), "q_x", zero=0)))
    return file


@breaks("code-type", "q_x", "onnxruntime")
@breaks("code-type", "q_x", "openvino")
def codes_of_16_bits() -> File:
    file = File()
    y = file.conv(file.pair(image(file), 0.001, 0, INT16, name="q_x"))
    file.output(file.conv(uint8(file, y), name="next"))
    return file


@breaks("constant-scale", "q_x")
@breaks("constant-scale", "q_x", "onnxruntime")
def a_computed_scale() -> File:
    file = File()
    x = image(file)
    scale = file.node("ReduceMax", x, keepdims=0)
    zero = file.constant(np.int8(0))
    codes = file.node("QuantizeLinear", x, scale, zero, name="q_x")
    file.output(file.conv(file.node("DequantizeLinear", codes, scale, zero)))
    return file


@breaks("constant-scale", "q_x")
def a_negative_scale() -> File:
    file = File()
    file.output(file.conv(file.pair(image(file), -0.1, name="q_x")))
    return file


@breaks("activation-axis", "q_x")
@breaks("activation-axis", "q_x", "openvino")
def a_scale_for_each_input_channel() -> File:
    file = File()
    file.output(file.conv(file.pair(image(file), [0.1] * 16, axis=1, name="q_x")))
    return file


@breaks("weight-axis", "conv")
def input_channels_of_a_convolution() -> File:
    file = File()
    file.output(file.conv(file.pair(image(file)), axis=1))
    return file


@breaks("weight-axis", "linear")
@breaks("weight-axis", "linear", "onnxruntime")
def rows_of_a_product() -> File:
    file = File()
    file.output(file.node("MatMul", uint8(file, image(file), zero=0), file.weight(8, 24, axis=0), name="linear"))
    return file


@breaks("float-bias", "conv")
def an_integer_bias() -> File:
    file = File()
    bias = file.bias(16, np.full(16, 0.05 * 0.01))
    file.output(file.conv(file.pair(image(file)), 16, 16, "conv", bias))
    return file


@breaks("bias-scale", "conv", "onnxruntime")
def another_scale_of_a_bias() -> File:
    file = File()
    bias = file.bias(16, np.full(16, 0.05 * 0.01 * 1.02))
    y = file.conv(uint8(file, image(file)), 16, 16, "conv", bias)
    file.output(file.conv(uint8(file, y), name="next"))
    return file


@breaks("opset", "conv")
@breaks("opset", "conv", "openvino")
def four_bits_in_opset_17() -> File:
    file = File(opset=17)
    file.output(file.conv(file.pair(image(file)), dtype=INT4))
    return file


@breaks("int4-blocks", "linear")
def blocks_of_8() -> File:
    file = File()
    weight = file.weight(64, 32, axis=0, block=8, dtype=INT4)
    file.output(file.node("MatMul", file.input("x", 2, 64), weight, name="linear"))
    return file


@breaks("cast", "cast")
def a_cast_behind_a_quantizer() -> File:
    file = File()
    halves = file.node("Cast", file.pair(image(file)), to=TensorProto.FLOAT16, name="cast")
    weight = file.node("Cast", file.weight(16, 16, 3, 3), to=TensorProto.FLOAT16)
    file.output(file.node("Conv", halves, weight), TensorProto.FLOAT16)
    return file


@breaks("quantized-output", "conv", "onnxruntime")
def a_second_user_in_float() -> File:
    file = File()
    y = file.conv(uint8(file, image(file)))
    file.output(file.conv(uint8(file, y), name="next"))
    file.output(file.node("Exp", y))
    return file


def pooled(file: File) -> tuple[str, str]:
    """Return a quantized image and its max pool, without a pair of its own: onnxruntime moves the image's past it."""
    x = uint8(file, image(file))
    return x, file.node("MaxPool", x, kernel_shape=[5, 5], pads=[2] * 4)


@breaks("repeated-pair", "concat", "onnxruntime")
def a_concat_of_max_pools() -> File:
    file = File()
    x, pool = pooled(file)
    file.output(uint8(file, file.conv(file.node("Concat", x, pool, axis=1, name="concat"), inputs=32)))
    return file


@breaks("repeated-pair", "pad", "onnxruntime")
def padding_between_a_max_pool_and_an_add() -> File:
    file = File()
    x, pool = pooled(file)
    y = file.node("Add", x, file.node("Pad", pool, file.constant(np.zeros(8, np.int64)), name="pad"))
    file.output(uint8(file, file.node("MatMul", uint8(file, y), file.weight(8, 8, axis=None))))
    return file


@breaks("repeated-pair", "resize", "onnxruntime")
def a_resize_and_a_slice() -> File:
    file = File()
    scales = file.constant(np.float32([1, 1, 2, 2]))
    y = file.node("Resize", pooled(file)[1], "", scales, mode="nearest", name="resize")
    file.output(uint8(file, file.conv(file.node("Slice", y, *(file.constant(np.array([i])) for i in (1, 9, 2))))))
    return file


def average_pool(pad: bool, **options: int) -> File:
    file = File()
    x = uint8(file, image(file))
    x = file.node("Pad", x, file.constant(np.int64([0, 0, 1, 1] * 2))) if pad else x
    pads = {} if pad else {"pads": [1] * 4}
    y = file.node("AveragePool", x, kernel_shape=[3, 3], strides=[2, 2], name="pool", **pads, **options)
    file.output(uint8(file, file.conv(uint8(file, y))))
    return file


@breaks("edge-windows", "pool", "onnxruntime")
def a_pool_that_counts_its_padding() -> File:
    return average_pool(False, ceil_mode=1, count_include_pad=1)


@breaks("edge-windows", "pool", "onnxruntime")
def padding_in_front_of_a_pool() -> File:
    return average_pool(True, ceil_mode=1)


@breaks("one-type", "conv", "onnxruntime")
def signed_in_and_unsigned_out() -> File:
    file = File()
    scale, zero = file.constant(np.float32(0.05)), file.constant(np.int8(0))
    codes = file.node("QuantizeLinear", image(file), scale, zero)
    first, second = (file.node("DequantizeLinear", codes, scale, zero) for _ in range(2))
    file.output(file.conv(uint8(file, file.conv(first)), name="next"))
    file.output(file.node("Exp", second))
    return file


def before_codes(activation: str, *bounds: float, **options: object) -> File:
    file = File()
    y = file.conv(uint8(file, image(file)))
    ends = [file.constant(np.float32(bound)) for bound in bounds]
    file.output(file.conv(uint8(file, file.node(activation, y, *ends), "q_y", **options), name="next"))
    return file


@breaks("saturation", "q_y", "onnxruntime")
def a_relu_before_signed_codes() -> File:
    return before_codes("Relu", zero=3)


@breaks("saturation", "q_y", "onnxruntime")
def no_zero_point_behind_a_relu() -> File:
    return before_codes("Relu", zero=None)


@breaks("saturation", "q_y", "onnxruntime")
def codes_that_end_beyond_a_clip() -> File:
    return before_codes("Clip", 0.0, 6.0, scale=6.005 / 255, zero=0)


@breaks("masked-scores", "add")
@breaks("masked-scores", "add", "openvino")
def a_mask_and_scores() -> File:
    file = File()
    scores = file.node("MatMul", *(file.pair(file.input(name, 1, 8, 8)) for name in ("q", "k")))
    masked = file.node("Add", file.pair(scores), file.pair(file.input("mask", 1, 8, 8)), name="add")
    file.output(file.node("Softmax", masked))
    return file


@breaks("plugin", "plugin")
def a_plugin() -> File:
    file = File(domains=("mine",))
    file.output(file.node("Mystery", file.pair(image(file)), domain="mine", name="plugin"))
    return file


@breaks("few-channels", "conv")
def four_channels() -> File:
    file = File()
    x = file.node("Exp", image(file, channels=4))
    file.output(file.conv(file.pair(x), 4, 4))
    return file


@breaks("deconvolution", "q_up")
def behind_a_deconvolution() -> File:
    file = File()
    y = file.node("ConvTranspose", file.pair(image(file)), file.weight(16, 16, 2, 2, axis=1), strides=[2, 2], name="up")
    file.output(file.conv(file.pair(y, name="q_up")))
    return file


@breaks("floats-only", "q_y")
def codes_for_a_float_op() -> File:
    file = File()
    file.output(file.node("Exp", file.pair(file.conv(file.pair(image(file))), name="q_y")))
    return file


ADVISED = {rule.name for rule in (*ADVICE.values(), *FILE_ADVICE)}


@pytest.mark.parametrize("case", BROKEN)
def test_a_file_that_breaks_a_rule(case: str, tmp_path) -> None:
    build, where, backend = BROKEN[case]
    rule = case.partition(f"-{backend}-")[0]
    found = lint(build().save(tmp_path), backend, advice=rule in ADVISED)
    (finding,) = [each for each in found if each.name == rule]
    assert finding.where == where
    assert finding.source
    assert finding.rule.endswith(".")
    assert finding.remedy.endswith(".")


@pytest.mark.parametrize("options", [{"count_include_pad": 1}, {"ceil_mode": 1}])
def test_pools_without_windows_beyond_the_edge_or_counted_padding(options: dict[str, int], tmp_path) -> None:
    assert lint(average_pool(False, **options).save(tmp_path), "onnxruntime") == ()


@pytest.mark.parametrize("case", BROKEN)
def test_a_branch_that_breaks_a_rule(case: str, tmp_path) -> None:
    build, _, backend = BROKEN[case]
    found, in_a_branch = (
        {(each.name, each.where) for each in lint(file.save(tmp_path), backend, advice=True)}
        for file in (build(), build().in_a_branch())
    )
    assert found == in_a_branch


def test_a_branch_that_breaks_none(tmp_path) -> None:
    assert lint(clean().in_a_branch().save(tmp_path), "tensorrt10") == ()


def test_every_rule_has_a_file() -> None:
    rules = {rule.name for rule in FILE_RULES} | ADVISED
    assert {case.partition(f"-{backend}-")[0] for case, (_, _, backend) in BROKEN.items()} == rules


@pytest.mark.parametrize("backend", ["tensorrt10", "openvino"])
def test_a_file_that_keeps_them(backend: str, tmp_path) -> None:
    assert lint(clean().save(tmp_path), backend, advice=True) == ()


WRONG = [case for case in BROKEN if case.startswith("edge-windows-")]
IN_FLOAT = [case for case in BROKEN if "-onnxruntime-" in case and case not in WRONG]


def stays_in_float(path: str, folder: Path, kinds: Sequence[str] = ("Add", "Conv", "MatMul")) -> bool:
    """Return whether onnxruntime has fewer integer kernels for a file than the file has layers, or does not run it."""
    onnxruntime = pytest.importorskip("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        session.run(None, {each.name: np.ones(each.shape, np.float32) for each in session.get_inputs()})
    except Exception:  # onnxruntime's errors have no base class of their own
        return True
    ops = [node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node]
    fused = [op for op in ops if op.startswith("QLinear") or op in ("QGemm", "MatMulIntegerToFloat")]
    layers = [op for op in (node.op_type for node in onnx.load(path).graph.node) if op in kinds]
    return len(fused) < len(layers)


@pytest.mark.parametrize("case", IN_FLOAT)
def test_onnxruntime_does_not_compute_it_in_integers(case: str, tmp_path) -> None:
    build, where, _ = BROKEN[case]
    assert stays_in_float(build().save(tmp_path), tmp_path), where


@pytest.mark.parametrize("case", WRONG)
def test_onnxruntime_computes_it_in_integers_with_other_values(case: str, tmp_path) -> None:
    """Or in float, as onnxruntime 1.32 does for a Pad in front of a pool, of which earlier ones make one integer kernel."""
    onnxruntime = pytest.importorskip("onnxruntime")
    path, plain = BROKEN[case][0]().save(tmp_path), onnxruntime.SessionOptions()
    plain.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    sessions = [onnxruntime.InferenceSession(path, *options) for options in ((), (plain,))]
    one, other = (
        session.run(None, {each.name: 6 * np.ones(each.shape, np.float32) for each in session.get_inputs()})[0]
        for session in sessions
    )
    differs = np.abs(one - other).max() > 0.06  # more than a step
    assert differs or ("padding_in_front" in case and stays_in_float(path, tmp_path, ("AveragePool", "Conv")))


OWN = {
    "UNet": (UNet, (2, 3, 16, 16)),
    "Inception": (Inception, (2, 4, 8, 8)),
    "Block": (Block, (2, 3, 8, 8)),
    "LinearNet": (nets.LinearNet, (4, 6)),
    "Residual": (lambda: nets.Residual(True), (2, 4, 8, 8)),
    "Identity": (lambda: nets.Residual(False), (2, 4, 8, 8)),
}


def own_file(model: nn.Module, x: torch.Tensor, backend: str, exporter: str, folder) -> str:
    prepared = qt.prepare(model.eval(), x, backend=backend)
    qt.calibrate(prepared, [x], progress=False)
    return str(qt.export_onnx(prepared, x, folder / "model.onnx", exporter=exporter, verify=False).path)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize(
    "backend", ["tensorrt10", "tensorrt8", "onnxruntime", "openvino", "snpe", "qnn", "vitis", "tvm", "academic"]
)
@pytest.mark.parametrize("name", OWN)
def test_our_own_files_break_no_rule_of_their_target(name: str, backend: str, exporter: str, tmp_path) -> None:
    build, shape = OWN[name]
    assert lint(own_file(build(), torch.rand(*shape), backend, exporter, tmp_path), backend) == ()


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("backend", ["tensorrt10", "onnxruntime", "openvino"])
@pytest.mark.parametrize(
    "name",
    [
        *("resnet18", "squeezenet1_0", "test_efficientnet", "test_vit"),
        *(pytest.param(name, marks=pytest.mark.sweep) for name in ("mobilenet_v3_small", "test_byobnet")),
    ],
)
def test_nor_do_files_of_the_zoo(name: str, backend: str, exporter: str, tmp_path) -> None:
    package = pytest.importorskip("timm" if name.startswith("test_") else "torchvision.models")
    torch.manual_seed(0)
    model = package.create_model(name) if name.startswith("test_") else package.get_model(name, weights=None)
    size = model.pretrained_cfg["input_size"][-1] if name.startswith("test_") else 64
    assert lint(own_file(model, torch.randn(1, 3, size, size), backend, exporter, tmp_path), backend) == ()


# ---- files of other tools


def test_a_file_of_quantize_static_is_read(tmp_path) -> None:
    path = quantized_statically(tmp_path)
    for name, backend in qt.backends.items():
        found = {each.name for each in lint(path, backend)}
        assert ("symmetric" in found) == (backend.runtime == "tensorrt")
        assert name not in ("onnxruntime", "openvino") or not found


def quantized_statically(folder) -> str:
    quantization = pytest.importorskip("onnxruntime.quantization")
    file = File(opset=17)
    weight = np.random.default_rng(0).standard_normal((16, 16, 3, 3)).astype(np.float32)
    y = file.node(
        "Conv", image(file), file.constant(weight), file.constant(np.zeros(16, np.float32)), name="first", pads=[1] * 4
    )
    z = file.node("Conv", file.node("Relu", y), file.constant(weight), name="second", pads=[1] * 4)
    file.output(file.node("Add", z, y))

    class Data(quantization.CalibrationDataReader):
        def __init__(self) -> None:
            self.left = [{"x": np.random.default_rng(1).standard_normal((1, 16, 8, 8)).astype(np.float32)}]

        def get_next(self) -> dict[str, np.ndarray] | None:
            return self.left.pop() if self.left else None

    path = str(folder / "static.onnx")
    quantization.quantize_static(
        file.save(folder), path, Data(), quant_format=quantization.QuantFormat.QDQ, per_channel=True
    )
    return path


def test_pairs_as_model_optimizer_writes_them_from_torch(tmp_path) -> None:
    """Zero points are constants behind a Cast, each input of a layer has a pair of its own, and batch norms stay."""
    file = File(opset=17)
    x = image(file)

    def pair(tensor: str, scale: float) -> str:
        zero = file.node("Cast", file.node("Constant", value=onnx.numpy_helper.from_array(np.float32(0))), to=INT8)
        given = (file.node("Constant", value=onnx.numpy_helper.from_array(np.float32(scale))), zero)
        return file.node("DequantizeLinear", file.node("QuantizeLinear", tensor, *given), *given)

    weight = pair(file.constant(np.ones((16, 16, 1, 1), np.float32)), 0.01)
    y = file.node("Conv", pair(x, 0.1), weight)
    file.output(file.node("Conv", pair(file.node("Relu", y), 0.1), weight))
    file.output(file.node("Conv", pair(x, 0.1), weight))
    assert lint(file.save(tmp_path), "tensorrt10") == ()


def test_scales_for_each_channel_of_a_depthwise_convolution_as_nncf_writes_them(tmp_path) -> None:
    file = File(opset=17)
    x = file.pair(image(file), np.linspace(0.1, 0.2, 16), axis=1, name="q_x")
    file.output(file.node("Conv", x, file.weight(16, 1, 3, 3), group=16, name="depthwise"))
    path = file.save(tmp_path)
    assert lint(path, "openvino") == ()
    assert {each.name for each in lint(path, "tensorrt10")} == {"activation-axis"}


@pytest.mark.parametrize(
    ("gate", "backend"), [("HardSwish", "tensorrt10"), ("HardSwish", "onnxruntime"), ("Gelu", "onnxruntime")]
)
def test_quantizers_before_activations_that_a_target_does_not_fuse(gate: str, backend: str, tmp_path) -> None:
    file = File()
    y = file.node("Gemm", uint8(file, file.input("x", 2, 16), zero=0), file.weight(32, 16), transB=1, name="linear")
    file.output(file.node(gate, uint8(file, y, "q_y", zero=0), name="gate"))
    assert "inside-a-unit" not in {each.name for each in lint(file.save(tmp_path), backend)}


def test_pairs_as_nncf_writes_them(tmp_path) -> None:
    """Signed codes before the first layer and unsigned ones behind ReLUs; onnxruntime shifts the signed ones."""
    file = File(opset=17)
    y = file.node("Relu", file.conv(file.pair(image(file), name="QuantizeLinear_x_1")))
    file.output(file.conv(uint8(file, y, "QuantizeLinear_y_1", zero=0), name="next"))
    path = file.save(tmp_path)
    assert lint(path, "openvino") == ()
    assert lint(path, "onnxruntime") == ()
    assert {each.name for each in lint(path, "tensorrt10")} == {"code-type"}


def test_weights_behind_a_transpose_keep_their_axis(tmp_path) -> None:
    file = File()
    weight = file.node("Transpose", file.weight(24, 8, axis=0), perm=[1, 0])
    file.output(file.node("MatMul", file.pair(image(file)), weight, name="linear"))
    assert lint(file.save(tmp_path), "tensorrt10") == ()


@pytest.mark.parametrize("backend", ["openvino", "snpe"])
def test_probabilities_in_float_where_attention_is_one_op(tmp_path, backend: str) -> None:
    rules = [each.name for each in lint(probabilities_in_float().save(tmp_path), backend)]
    assert "all-inputs" not in rules


def test_long_chains_of_concats_take_no_long_time(tmp_path) -> None:
    file = File()
    x = file.pair(image(file, channels=1))
    for _ in range(1500):
        x = file.node("Concat", x, file.node("Relu", x), axis=1)
        x = file.node("Slice", x, *(file.constant(np.array([v])) for v in (0, 1, 1)))
    file.output(file.conv(x, inputs=1))
    assert {each.name for each in lint(file.save(tmp_path), "tensorrt10")} == {"all-inputs", "shared-concat"}
    file = File()
    x = file.pair(image(file))
    for _ in range(60):
        x = file.node("Concat", x, file.node("Transpose", x, perm=[0, 1, 2, 3]), axis=2)
    file.output(file.node("Exp", x))
    assert lint(file.save(tmp_path), "tensorrt10") == ()


# ---- bad input


@pytest.mark.parametrize(
    ("damage", "words"), [("input", "has input size 1 not in range"), ("attribute", "Mismatched attribute type")]
)
def test_nodes_that_lack_something(damage: str, words: str, tmp_path) -> None:
    model = clean().model()
    model.graph.output[0].type.tensor_type.ClearField("shape")  # as some tools write it, unchecked
    if damage == "input":
        del next(node for node in model.graph.node if node.op_type == "QuantizeLinear").input[1:]
    else:
        attribute = next(
            node for node in model.graph.node if node.attribute and node.op_type == "DequantizeLinear"
        ).attribute[0]
        attribute.CopyFrom(onnx.helper.make_attribute("axis", "one"))
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    with pytest.raises(UnreadableFileError, match=f"is not a valid ONNX model: .*{words}"):
        lint(path, "tensorrt10")


def test_files_that_are_refused(tmp_path) -> None:
    def refused(path: str, *words: str) -> None:
        with pytest.raises(UnreadableFileError) as error:
            lint(path, "tensorrt10")
        assert all(word in str(error.value) for word in (path, *words)), error.value

    refused(str(tmp_path / "none.onnx"), "does not exist")
    refused(str(tmp_path), "is a folder")
    whole = clean().model().SerializeToString()
    for name, data in (("empty", b""), ("text", b"# a text\n"), ("truncated", whole[: len(whole) // 2])):
        path = tmp_path / f"{name}.onnx"
        path.write_bytes(data)
        refused(str(path), "is not an ONNX file, or is truncated")
    file = clean()
    file.output(file.node("Frobnicate", "x", name="odd"))
    refused(file.save(tmp_path), "'Frobnicate' of domain 'ai.onnx' (node 'odd')")
    file = clean()
    file.output(file.node("Mystery", "x", domain="unknown"))
    refused(file.save(tmp_path), "'Mystery' of domain 'unknown'", "Declare the opset")
    file = File()
    file.output(file.node("Relu", image(file)))
    refused(file.save(tmp_path), "has no QuantizeLinear")


def test_weights_in_files_that_are_missing(tmp_path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(clean().model(), path, save_as_external_data=True, location="model.data", size_threshold=0)
    assert lint(path, "tensorrt10") == ()
    data = tmp_path / "model.data"
    data.write_bytes(data.read_bytes()[:10])
    with pytest.raises(UnreadableFileError, match="is truncated: 'model.data' has 10 bytes"):
        lint(path, "tensorrt10")
    data.unlink()
    with pytest.raises(UnreadableFileError, match=r"is in 'model\.data', which is missing; copy that file"):
        lint(path, "tensorrt10")


def test_weights_outside_the_folder_are_not_read(tmp_path) -> None:
    model = clean().model()
    tensor = model.graph.initializer[-1]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../secret")
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(UnreadableFileError, match="outside the folder of the model"):
        lint(path, "tensorrt10")


def test_an_unknown_backend_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="unknown backend 'tensort'; did you mean 'tensorrt'"):
        lint(clean().save(tmp_path), "tensort")
