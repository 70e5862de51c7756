"""Export with torch's own fake-quantize ops, by the class attribute that older releases had."""

import sys

import torch

from qtoolkit.compat.pytorch_quantization import nn as quant_nn
from qtoolkit.compat.pytorch_quantization import quant_modules


def calibrate(model, x):
    quantizers = [module for module in model.modules() if isinstance(module, quant_nn.TensorQuantizer)]
    for quantizer in quantizers:
        quantizer.disable_quant()
        quantizer.enable_calib()
    with torch.no_grad():
        model(x)
    for quantizer in quantizers:
        quantizer.load_calib_amax()
        quantizer.enable_quant()
        quantizer.disable_calib()


def main(folder):
    torch.manual_seed(0)
    quant_modules.initialize()
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, stride=2),
        torch.nn.ReLU(),
        torch.nn.ConvTranspose2d(4, 5, 2, stride=2),
    ).eval()
    x = torch.randn(2, 3, 9, 9)
    calibrate(model, x)
    torch.save({"state": model.state_dict(), "x": x}, f"{folder}/fb.pth")

    quant_nn.TensorQuantizer.use_fb_fake_quant = True
    torch.onnx.export(model, (x,), f"{folder}/dynamo.onnx", opset_version=17)
    torch.onnx.export(
        model,
        (x,),
        f"{folder}/script.onnx",
        opset_version=13,
        input_names=["images"],
        dynamic_axes={"images": {0: "batch"}},
        dynamo=False,
    )
    quant_nn.TensorQuantizer.use_fb_fake_quant = False


if __name__ == "__main__":
    main(sys.argv[1])
