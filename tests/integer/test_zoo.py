"""Published networks with random weights: every code end to end in onnxruntime at its default optimizations."""

import pytest
import torch

import qtoolkit as qt
from qtoolkit.export import verify
from tests import nets

timm = pytest.importorskip("timm")

NAMES = (
    *("resnet18", "resnet10t", "mobilenetv2_050", "mnasnet_small", "lcnet_050", "vgg11_bn", "tinynet_e", "regnetx_002"),
    *("regnety_002", "repvgg_a0", "ghostnet_050", "selecsls42", "ese_vovnet19b_slim", "hrnet_w18_small", "dla34"),
    *("res2net50_14w_8s", "skresnet18", "semnasnet_075", "mobilenetv3_small_050", "efficientnet_lite0"),
)


@pytest.mark.parametrize("name", NAMES)
def test_every_code_is_the_runtimes(tmp_path, name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 64, 64)
    model = nets.trained(timm.create_model(name, pretrained=False), *x.shape, steps=2).eval()
    prepared = qt.prepare(model, (x,), backend="onnxruntime")
    qt.calibrate(prepared, [torch.randn(2, 3, 64, 64), x], progress=False)
    integer = qt.convert(prepared, arithmetic="integer")
    result = verify(qt.export_onnx(integer, (x,), tmp_path / "m.onnx", verify=False).path, integer, (x,))
    result.check()
    codes = result.runtimes["onnxruntime"]
    if not codes.share:
        assert codes.codes.differing == 0
        assert codes.output_difference == 0
