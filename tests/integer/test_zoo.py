"""Published networks with random weights: every code end to end in onnxruntime at its default optimizations."""

from itertools import cycle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.export import verify
from tests import nets

timm = pytest.importorskip("timm")

NAMES = (
    *("resnet18", "resnet10t", "mobilenetv2_050", "mnasnet_small", "lcnet_050", "tinynet_e", "vgg11_bn", "regnetx_002"),
    *("regnety_002", "repvgg_a0", "ghostnet_050", "selecsls42", "ese_vovnet19b_slim", "hrnet_w18_small", "dla34"),
    *("res2net50_14w_8s", "skresnet18", "semnasnet_075", "mobilenetv3_small_050", "efficientnet_lite0"),
    "test_efficientnet",
)
# The default run takes one of each kind: residuals, groups, maps of several sizes, ReLU6.
OF_EACH_KIND = ("resnet10t", "regnetx_002", "hrnet_w18_small", "efficientnet_lite0")
# And these in each opset: residuals, Hardswish and gates, concats, SiLU.
IN_EACH_OPSET = ("resnet10t", "lcnet_050", "selecsls42", "test_efficientnet")
SMALL = ("resnet10t", "test_efficientnet")  # the others take seconds
OPSETS = (13, 17, 21, 26)  # onnxruntime 1.30 runs files up to 26, and 1.32 up to 28


def marks(name: str, default: tuple[str, ...]) -> tuple[pytest.MarkDecorator, ...]:
    """The marks of a network of which the default run takes those given."""
    return (pytest.mark.slow,) * (name not in SMALL) + (pytest.mark.sweep,) * (name not in default)


def integer_model(name: str) -> tuple[nn.Module, Tensor]:
    """Return a converted network and an input."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 64, 64)
    model = nets.trained(timm.create_model(name, pretrained=False), *x.shape, steps=2).eval()
    prepared = qt.prepare(model, (x,), backend="onnxruntime")
    qt.calibrate(prepared, [torch.randn(2, 3, 64, 64), x], progress=False)
    return qt.convert(prepared, arithmetic="integer"), x


def assert_the_runtimes(path: Path, integer: nn.Module, x: Tensor) -> None:
    result = verify(integer, (x,), path)
    result.check()
    codes = result.runtimes["onnxruntime"]
    if not codes.share:
        assert codes.codes.differing == 0
        assert codes.output_difference == 0


# The exporter "torchscript" cannot write the pool of vgg11_bn.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "exporter"),
    [
        pytest.param(name, exporter, marks=marks(name, OF_EACH_KIND))
        for name, exporter in zip(NAMES, cycle(("dynamo", "torchscript")), strict=False)
    ],
)
def test_every_code_is_the_runtimes(tmp_path, name: str, exporter: str) -> None:
    integer, x = integer_model(name)
    result = qt.export_onnx(integer, (x,), tmp_path / "m.onnx", exporter=exporter, verify=False)
    assert_the_runtimes(result.path, integer, x)


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name, IN_EACH_OPSET)) for name in NAMES])
def test_every_code_in_each_opset(tmp_path, name: str, opset: int) -> None:
    integer, x = integer_model(name)
    result = qt.export_onnx(integer, (x,), tmp_path / "m.onnx", opset=opset, verify=False)
    assert result.opset == opset
    assert_the_runtimes(result.path, integer, x)
