"""Why an engine is no faster than one in float16: a file for each finding and one without it, costs, times, and bad input."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from torch import nn

import qtoolkit as qt
import qtoolkit_command
from qtoolkit.cli import main
from qtoolkit.export import UnreadableFileError, estimate_engine, lint
from qtoolkit.lint.engine import BYTES, GPUS
from qtoolkit.lint.slower import SLOWER
from tests.export.qdq_files import File, clean
from tests.export.test_float16 import converted
from tests.export.test_lint_files import quantized_statically

FLOAT, FLOAT16 = TensorProto.FLOAT, TensorProto.FLOAT16
CASES: dict[
    str, tuple[Callable[[], File], str]
] = {}  # a file, and the node at which it breaks a rule; "" where it does not


def case(rule: str, where: str = "") -> Callable[[Callable[[], File]], Callable[[], File]]:
    def register(build: Callable[[], File]) -> Callable[[], File]:
        CASES[f"{rule}:{build.__name__}"] = (build, where)
        return build

    return register


def half(channels: int = 32, size: int = 8) -> tuple[File, str]:
    """A file in float16 and its quantized input."""
    file = File(floats=np.float16)
    return file, file.pair(file.input("x", 1, channels, size, size), name="q_x")


def conv(file: File, x: str, name: str, inputs: int = 32, outputs: int = 32, **options: int) -> str:
    weight = file.weight(outputs, inputs // options.get("group", 1), 3, 3)
    return file.node("Conv", x, weight, name=name, pads=[1] * 4, **options)


@case("float32-floats", "conv")
def all_in_float32() -> File:
    return clean()


@case("float32-floats")
@case("float32-island")
def all_in_float16() -> File:
    file, x = half()
    y = conv(file, x, "conv")
    file.output(conv(file, file.pair(file.node("Relu", y)), "next"))
    return file


@case("float32-island", "exp")
def an_island() -> File:
    file, x = half()
    wide = file.node("Cast", conv(file, x, "conv"), to=FLOAT)
    y = file.node("Cast", file.node("Tanh", file.node("Erf", wide, name="exp"), name="tanh"), to=FLOAT16)
    file.output(conv(file, file.pair(y), "next"))
    return file


@case("float32-island")
@case("float-cast")
def a_softmax_in_float32() -> File:
    file, x = half()
    wide = file.node("Cast", conv(file, x, "conv"), to=FLOAT)
    y = file.node("Cast", file.node("Softmax", wide), to=FLOAT16)
    file.output(conv(file, file.pair(y), "next"))
    return file


@case("float32-island")
@case("float-cast")
def a_norm_in_float32() -> File:
    return norm_in_float32("Div")


@case("float32-island", "div")
def a_norm_and_more_in_float32() -> File:
    return norm_in_float32("Div", "Erf")


def norm_in_float32(*behind: str) -> File:
    file, x = half()
    wide = y = file.node("Cast", conv(file, x, "conv"), to=FLOAT)
    norm = file.node("ReduceL2", wide, name="norm")
    for op in behind:
        y = file.node(op, y, *([norm] if op == "Div" else []), name=op.lower())
    file.output(conv(file, file.pair(file.node("Cast", y, to=FLOAT16)), "next"))
    return file


@case("float-cast", "narrow")
def casts_for_nothing() -> File:
    file, x = half()
    y = file.node("Cast", file.node("Cast", conv(file, x, "conv"), to=FLOAT, name="wide"), to=FLOAT16, name="narrow")
    file.output(conv(file, file.pair(y), "next"))
    return file


@case("float-cast")
def casts_at_the_ends() -> File:
    file = File(floats=np.float16)
    file.inputs.append(onnx.helper.make_tensor_value_info("x", FLOAT, (1, 32, 8, 8)))
    y = conv(file, file.pair(file.node("Cast", "x", to=FLOAT16)), "conv")
    file.output(file.node("Cast", y, to=FLOAT), FLOAT)
    return file


@case("first-layer", "conv")
def an_image() -> File:
    file, x = half(3)
    file.output(conv(file, file.pair(file.node("Relu", conv(file, x, "conv", 3))), "next"))
    return file


@case("first-layer")
@case("grouped-conv")
@case("lone-layer")
def a_first_layer_of_many_channels() -> File:
    return all_in_float16()


@case("grouped-conv", "depthwise")
def a_depthwise_convolution() -> File:
    file, x = half()
    y = conv(file, file.pair(file.node("Relu", conv(file, x, "conv"))), "depthwise", group=32)
    file.output(conv(file, file.pair(file.node("Relu", y)), "next"))
    return file


@case("lone-layer", "lone")
def a_layer_between_floats() -> File:
    file, _ = half()
    weight = file.constant(np.ones((32, 32, 3, 3), np.float16))
    y = file.node("Conv", "x", weight, name="before", pads=[1] * 4)
    z = file.node("Relu", conv(file, file.pair(file.node("Relu", y)), "lone"))
    file.output(file.node("Conv", z, weight, name="behind", pads=[1] * 4))
    return file


def attention(of_codes: tuple[bool, bool], scaled_before: bool, floats: type = np.float16) -> File:
    file = File(floats=floats)
    q, k, v = (file.input(name, 1, 4, 64, 32) for name in "qkv")
    scale = file.constant(np.asarray(0.2, floats))
    q = file.node("Mul", q, scale, name="before") if scaled_before else q
    k = file.node("Transpose", k, perm=[0, 1, 3, 2])
    q, k = (file.pair(q), file.pair(k)) if of_codes[0] else (q, k)
    scores = file.node("MatMul", q, k, name="scores")
    scores = scores if scaled_before else file.node("Mul", scores, scale, name="behind")
    p = file.node("Softmax", scores, name="softmax")
    p, v = (file.pair(p, 1 / 127), file.pair(v)) if of_codes[1] else (p, v)
    file.output(file.node("MatMul", p, v, name="sums"))
    if not any(of_codes):  # a file has pairs
        file.output(file.pair("q"))
    return file


@case("unfused-attention", "softmax")
def one_product_on_codes() -> File:
    return attention((True, False), scaled_before=True)


@case("unfused-attention", "softmax")
def scores_scaled_behind() -> File:
    return attention((True, True), scaled_before=False)


@case("unfused-attention", "softmax")
def products_in_float32() -> File:
    return attention((False, False), scaled_before=True, floats=np.float32)


@case("unfused-attention")
def all_on_codes() -> File:
    return attention((True, True), scaled_before=True)


@case("unfused-attention")
def all_in_half() -> File:
    return attention((False, False), scaled_before=True)


@case("sigmoid-gate", "silu")
def a_silu() -> File:
    file, x = half()
    y = conv(file, x, "conv")
    file.output(conv(file, file.pair(file.node("Mul", y, file.node("Sigmoid", y), name="silu")), "next"))
    return file


@case("sigmoid-gate")
def a_silu_that_is_added() -> File:
    """The form with a tanh is wrong there (NVIDIA/TensorRT #4854), and export_onnx does not write it."""
    file, x = half()
    y = conv(file, x, "conv")
    silu = file.node("Flatten", file.node("Mul", y, file.node("Sigmoid", y), name="silu"))
    file.output(file.node("Add", silu, file.node("Flatten", y)))
    return file


@case("sigmoid-gate")
def a_silu_by_its_tanh() -> File:
    file, x = half()
    y, a_half = conv(file, x, "conv"), file.constant(np.float16(0.5))
    gate = file.node("Add", file.node("Mul", file.node("Tanh", file.node("Mul", y, a_half)), a_half), a_half)
    file.output(conv(file, file.pair(file.node("Mul", y, gate, name="silu")), "next"))
    return file


@pytest.mark.parametrize("name", CASES)
def test_each_finding_and_a_file_without_it(name: str, tmp_path: Path) -> None:
    (build, where), rule = CASES[name], name.partition(":")[0]
    path = build().save(tmp_path)
    found = [each for each in estimate_engine(path).findings if each.name == rule]
    assert [each.where for each in found] == ([where] if where else [])
    assert all(each.source and each.remedy.endswith(".") and each.rule.endswith(".") for each in found)
    assert [each for each in lint(path, "tensorrt", advice=True) if each.name == rule] == found
    assert rule not in {each.name for each in (*lint(path, "tensorrt"), *lint(path, "tensorrt10", advice=True))}


def test_each_rule_has_a_file_with_and_without_its_finding() -> None:
    rules = {rule.name for rule in SLOWER}
    for broken in (True, False):
        assert {name.partition(":")[0] for name, (_, where) in CASES.items() if bool(where) is broken} == rules


# ---- costs


def test_products_and_bytes_of_each_type(tmp_path: Path) -> None:
    """A convolution of an image that is quantized, a ReLU in its kernel, and a linear layer in float16."""
    file = File(floats=np.float16)
    y = file.node("Relu", conv(file, file.pair(file.input("x", 1, 3, 8, 8)), "conv", 3, 16))
    z = file.node("Flatten", y)
    weight = file.constant(np.ones((10, 16 * 64), np.float16))
    file.output(file.node("Gemm", z, weight, transB=1))
    types = estimate_engine(file.save(tmp_path)).types
    weights = 16 * 3 * 9
    image, maps = 3 * 64, 16 * 64
    assert types["int8"].macs == weights * 64
    assert types["float16"].macs == 10 * maps
    assert types["int8"].bytes == image + image + weights  # written by the quantizer, read by the convolution
    assert types["float16"].bytes == 2 * (image + maps + maps + 10 * maps + 10)
    assert types["float32"].macs == types["float32"].bytes == 0


def test_products_of_ops_without_a_constant_weight(tmp_path: Path) -> None:
    types = estimate_engine(all_on_codes().save(tmp_path)).types
    assert types["int8"].macs == 2 * 4 * 64 * 64 * 32
    file = attention((False, False), scaled_before=True)
    fused = estimate_engine(file.save(tmp_path)).types["float16"]
    assert fused.macs == 2 * 4 * 64 * 64 * 32
    moved = 4 * 64 * 32
    assert fused.bytes == 2 * (2 + 2 + 3 + 1 + 1) * moved  # scaled, transposed, taken, written, and the other pair
    apart = estimate_engine(one_product_on_codes().save(tmp_path)).types
    assert apart["float16"].bytes + apart["int8"].bytes > fused.bytes + 4 * 64 * 64  # and the scores


def test_a_transposed_convolution_and_sizes_that_vary(tmp_path: Path) -> None:
    file = File(floats=np.float16)
    x = file.pair(file.input("x", "batch", 32, 8, 8))
    file.output(file.node("ConvTranspose", x, file.weight(32, 16, 4, 4, axis=1), strides=[2, 2]))
    found = estimate_engine(file.save(tmp_path))
    assert found.types["int8"].macs == 32 * 64 * 16 * 16
    assert not found.unknown


def test_the_time_is_the_longer_of_products_and_bytes(tmp_path: Path) -> None:
    file = File(floats=np.float16)
    x = file.pair(file.input("x", 1, 512))
    file.output(file.node("Gemm", x, file.weight(512, 512), transB=1))
    path = file.save(tmp_path)
    for name, gpu in GPUS.items():
        found = estimate_engine(path, gpu=name)
        moved = 512 * (2 + 1) + 512 + 512 * 512 + 512 * 2
        assert found.seconds == pytest.approx(moved / gpu.bandwidth, rel=1e-6)
        assert found.float16_seconds == pytest.approx((512 * 512 + 1024) * 2 / gpu.bandwidth, rel=1e-6)
        assert found.headline.startswith(f"Estimated on {name}: ")
        assert found.headline.endswith("% faster.")


def test_a_float32_file_is_slower_than_its_float16_form(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(32, 32, 3), nn.GELU(), nn.LayerNorm([32, 14, 14]), nn.Conv2d(32, 32, 1), nn.SiLU())
    x, seconds = torch.randn(1, 32, 16, 16), {}
    for float_type in ("float16", "float32"):
        path = tmp_path / f"{float_type}.onnx"
        qt.export_onnx(converted(net, x), x, path, float_type=float_type, progress=False, verify=False)
        found = estimate_engine(path, "tensorrt", "L4")
        seconds[float_type] = found.seconds
        assert ("float32-floats" in {each.name for each in found.findings}) is (float_type == "float32")
        assert not [each for each in found.findings if each.name == "float32-island"]
    assert seconds["float32"] > 1.2 * seconds["float16"]


# ---- nets


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(channels, channels, 3, padding=1), nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.two(torch.relu(self.one(x))) + x)


def resnet() -> tuple[nn.Module, torch.Tensor]:
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.MaxPool2d(2), Block(32), Block(32), *head)
    return net, torch.randn(1, 3, 16, 16)


def vit() -> tuple[nn.Module, torch.Tensor]:
    class Vit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, 32, 4, 4)
            self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu", norm_first=True)
            self.head = nn.Linear(32, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.layer(self.patches(x).flatten(2).transpose(1, 2)).mean(1))

    return Vit(), torch.randn(1, 3, 16, 16)


@pytest.mark.parametrize("float_type", ["float16", "float32"])
@pytest.mark.parametrize("make", [resnet, vit])
def test_files_of_nets_have_float32_findings_in_float32_alone(
    make: Callable[[], tuple[nn.Module, torch.Tensor]], float_type: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    net, x = make()
    prepared = qt.prepare(net.eval(), x, backend="tensorrt")
    qt.calibrate(prepared, [x], progress=False)
    path = tmp_path / "m.onnx"
    qt.export_onnx(prepared, x, path, float_type=float_type, progress=False, verify=False)
    found = estimate_engine(path, gpu="L4")
    names = {each.name for each in found.findings}
    assert ("float32-floats" in names) is (float_type == "float32")
    assert not names & {"float32-island", "float-cast", "unfused-attention"}
    assert not found.unknown
    assert found.types["int8"].macs > sum(found.types[name].macs for name in ("float16", "float32"))
    text = str(found)
    assert all(name in text for name in BYTES)


# ---- the command line, other tools, bad input


def test_lint_prints_it_and_its_exit_code_leaves_it_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = clean().save(tmp_path)
    assert main(["lint", path, "--target", "tensorrt", "--gpu", "T4"]) == 0
    out = capsys.readouterr().out
    assert "reasons why it is no faster than float16: 1 finding (not counted in the exit status)." in out
    assert "\tfloat32-floats\t" in out
    assert "Estimated on T4" in out
    assert f"{path}: int8: " in out
    assert main(["lint", path, "--backend", "tensorrt", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["beside_float16"]
    assert list(found) == ["gpu", "headline", "seconds", "float16_seconds", "types", "unknown", "findings"]
    assert found["gpu"] == "A100"
    assert list(found["types"]["int8"]) == ["macs", "bytes"]
    assert [each["rule"] for each in found["findings"]] == ["float32-floats"]
    assert main(["lint", path, "--backend", "tensorrt", "--advice"]) == 1
    capsys.readouterr()
    assert main(["lint", path, "--backend", "tensorrt10", "--json"]) == 0
    assert "beside_float16" not in json.loads(capsys.readouterr().out)
    assert set(qtoolkit_command.GPUS) == set(GPUS)


def test_a_file_of_another_tool_has_the_headline(tmp_path: Path) -> None:
    found = estimate_engine(quantized_statically(tmp_path))
    assert "float32-floats" in {each.name for each in found.findings}
    assert found.types["int8"].macs == 2 * 16 * 16 * 9 * 64


def test_a_file_after_autocast(tmp_path: Path) -> None:
    """NVIDIA Model Optimizer's AutoCast gives a file the form of its float16, with softmaxes in float16 too."""
    file = attention((True, True), scaled_before=True)
    names = {each.name for each in estimate_engine(file.save(tmp_path)).findings}
    assert not names & {"float32-floats", "float32-island", "float-cast"}


def test_bodies_unknown_sizes_and_ops_of_other_domains(tmp_path: Path) -> None:
    for file in (clean().in_a_branch(), File(domains=("mine",))):
        if file.domains:
            y = file.node("Plugin", file.pair(file.input("x", 1, 16, 8, 8)), domain="mine")
            file.output(file.node("Relu", y))
        found = estimate_engine(file.save(tmp_path))
        assert ("sizes of the file's tensors are unknown" in found.headline) is bool(file.domains)


def test_codes_of_a_type_of_floats(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As a broken writer gives the zero point, so that no op is left that computes."""
    file = File()
    file.output(file.pair(file.input("x", 1, 8), dtype=FLOAT))
    assert "float32-floats" not in {each.name for each in estimate_engine(file.save(tmp_path)).findings}
    assert not [each for each in caplog.records if "Shape inference failed" in each.getMessage()]


def test_what_is_refused(tmp_path: Path) -> None:
    path = clean().save(tmp_path)
    with pytest.raises(ValueError, match="unknown gpu of estimate_engine: 'V100'"):
        estimate_engine(path, gpu="V100")
    with pytest.raises(
        ValueError, match="backend must be a target that computes in the types of a file, .* 'tensorrt10'"
    ):
        estimate_engine(path, "tensorrt10")
    with pytest.raises(UnreadableFileError, match="does not exist"):
        estimate_engine(tmp_path / "none.onnx")
    file = File()
    file.output(file.node("Relu", file.input("x", 1)))
    with pytest.raises(UnreadableFileError, match="it is a float model"):
        estimate_engine(file.save(tmp_path))
