"""Replace the layers of a model that exists, but for some names, and let the inputs of a sum share a quantizer."""
# ruff: noqa: E402, N807

import qtoolkit.compat.pytorch_quantization as pytorch_quantization

pytorch_quantization.install()

import re
import sys

import torch
from pytorch_quantization import calib, quant_modules
from pytorch_quantization import nn as quant_nn
from pytorch_quantization.nn.modules import _utils as quant_nn_utils
from pytorch_quantization.tensor_quant import QuantDescriptor


class Add(torch.nn.Module):
    def forward(self, x, y):
        return self._input0_quantizer(x) + self._input1_quantizer(y)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(4, 4, 3, padding=1)
        self.conv2 = torch.nn.Conv2d(4, 4, 1)
        self.add = Add()

    def forward(self, x):
        return self.add(self.conv2(self.conv1(x).relu()), x)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 4, 3)
        self.block = Block()
        self.pool = torch.nn.AvgPool2d(2)
        self.head = torch.nn.Linear(36, 2)

    def forward(self, x):
        return self.head(self.pool(self.block(self.stem(x))).flatten(1))


def transfer_torch_to_quantization(nn_instance, quant_module):
    quant_instance = quant_module.__new__(quant_module)
    for k, val in vars(nn_instance).items():
        setattr(quant_instance, k, val)

    def __init__(self):
        if isinstance(self, quant_nn_utils.QuantInputMixin):
            quant_desc_input = quant_nn_utils.pop_quant_desc_in_kwargs(self.__class__, input_only=True)
            self.init_quantizer(quant_desc_input)
            if isinstance(self._input_quantizer._calibrator, calib.HistogramCalibrator):
                self._input_quantizer._calibrator._torch_hist = True
        else:
            quant_desc_input, quant_desc_weight = quant_nn_utils.pop_quant_desc_in_kwargs(self.__class__)
            self.init_quantizer(quant_desc_input, quant_desc_weight)
            if isinstance(self._input_quantizer._calibrator, calib.HistogramCalibrator):
                self._input_quantizer._calibrator._torch_hist = True
                self._weight_quantizer._calibrator._torch_hist = True

    __init__(quant_instance)
    return quant_instance


def ignored(policy, path):
    return any(path == item or re.match(item, path) for item in policy)


def replace_to_quantization_module(model, ignore_policy):
    module_dict = {}
    for entry in quant_modules._DEFAULT_QUANT_MAP:
        module = getattr(entry.orig_mod, entry.mod_name)
        module_dict[id(module)] = entry.replace_mod

    def recursive_and_replace_module(module, prefix=""):
        for name in module._modules:
            submodule = module._modules[name]
            path = name if prefix == "" else prefix + "." + name
            recursive_and_replace_module(submodule, path)
            submodule_id = id(type(submodule))
            if submodule_id in module_dict and not ignored(ignore_policy, path):
                module._modules[name] = transfer_torch_to_quantization(submodule, module_dict[submodule_id])

    recursive_and_replace_module(model)


def main(folder):
    torch.manual_seed(0)
    model = Model().eval()
    x = torch.randn(8, 3, 8, 8)
    quant_desc_input = QuantDescriptor(calib_method="histogram")
    for layer in (quant_nn.QuantConv2d, quant_nn.QuantAvgPool2d, quant_nn.QuantLinear):
        layer.set_default_quant_desc_input(quant_desc_input)
    replace_to_quantization_module(model, ignore_policy=["stem", r"block\.conv2.*"])

    major = model.block.conv1._input_quantizer
    model.block.add._input0_quantizer = quant_nn.TensorQuantizer(QuantDescriptor(num_bits=8, calib_method="histogram"))
    model.block.add._input1_quantizer = major

    for module in model.modules():
        if isinstance(module, quant_nn.TensorQuantizer):
            module.disable_quant()
            module.enable_calib()
    with torch.no_grad():
        model(x)
    for module in model.modules():
        if isinstance(module, quant_nn.TensorQuantizer):
            if isinstance(module._calibrator, calib.MaxCalibrator):
                module.load_calib_amax(strict=False)
            else:
                module.load_calib_amax(strict=False, method="mse")
            module.enable_quant()
            module.disable_calib()
    with torch.no_grad():
        y = model(x)
    types = {name: type(module).__name__ for name, module in model.named_modules()}
    torch.save({"state": model.state_dict(), "x": x, "y": y, "types": types}, f"{folder}/manual.pth")


if __name__ == "__main__":
    main(sys.argv[1])
