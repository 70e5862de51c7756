"""Train, quantize, calibrate in several ways, finetune and export a classifier: the flow of the classification example."""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import qtoolkit.compat.pytorch_quantization as pytorch_quantization
from qtoolkit.compat.pytorch_quantization import calib, quant_modules
from qtoolkit.compat.pytorch_quantization import nn as quant_nn
from qtoolkit.compat.pytorch_quantization.tensor_quant import QuantDescriptor


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.fc = nn.Linear(32, 2)

    def forward(self, x):
        return self.fc(self.pool(F.relu(self.conv(x))).flatten(1))


def make_data(count):
    """Pictures with a bright spot on the left, or on the right."""
    images = torch.rand(count, 1, 8, 8) / 2
    labels = torch.arange(count) % 2
    for image, label in zip(images, labels, strict=True):
        image[0, 2:6, 1 + 4 * label : 3 + 4 * label] += 1
    return DataLoader(TensorDataset(images, labels), batch_size=16)


def collect_stats(model, data_loader, num_batches):
    for _name, module in model.named_modules():
        if isinstance(module, quant_nn.TensorQuantizer):
            if module._calibrator is not None:
                module.disable_quant()
                module.enable_calib()
            else:
                module.disable()
    for i, (image, _) in enumerate(data_loader):
        model(image)
        if i >= num_batches:
            break
    for _name, module in model.named_modules():
        if isinstance(module, quant_nn.TensorQuantizer):
            if module._calibrator is not None:
                module.enable_quant()
                module.disable_calib()
            else:
                module.enable()


def compute_amax(model, **kwargs):
    for _name, module in model.named_modules():
        if isinstance(module, quant_nn.TensorQuantizer) and module._calibrator is not None:
            if isinstance(module._calibrator, calib.MaxCalibrator):
                module.load_calib_amax()
            else:
                module.load_calib_amax(**kwargs)


def train(model, data_loader, lr, epochs):
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for _ in range(epochs):
        for image, label in data_loader:
            optimizer.zero_grad()
            F.cross_entropy(model(image), label).backward()
            optimizer.step()
    model.eval()


@torch.no_grad()
def evaluate(model, data_loader):
    return sum(float((model(image).argmax(1) == label).sum()) for image, label in data_loader) / len(
        data_loader.dataset
    )


def main(folder):
    torch.manual_seed(0)
    train_loader, test_loader = make_data(160), make_data(64)
    model = Net()
    train(model, train_loader, 0.2, 10)
    results = {"float": evaluate(model, test_loader)}
    torch.save(model.state_dict(), f"{folder}/float.pth")

    quant_desc_input = QuantDescriptor(calib_method="histogram")
    quant_nn.QuantConv2d.set_default_quant_desc_input(quant_desc_input)
    quant_nn.QuantLinear.set_default_quant_desc_input(quant_desc_input)
    quant_nn.QuantAdaptiveAvgPool2d.set_default_quant_desc_input(quant_desc_input)
    quant_modules.initialize()
    model = Net()
    quant_modules.deactivate()
    model.load_state_dict(torch.load(f"{folder}/float.pth"))
    model.eval()

    with torch.no_grad():
        collect_stats(model, train_loader, num_batches=4)
    for percentile in [99.9, 99.99, 99.999, 99.9999]:
        compute_amax(model, method="percentile", percentile=percentile)
        results[f"percentile {percentile}"] = evaluate(model, test_loader)
    for method in ["entropy", "mse"]:
        compute_amax(model, method=method)
        results[method] = evaluate(model, test_loader)

    train(model, train_loader, 0.01, 1)
    results["finetuned"] = evaluate(model, test_loader)
    image = next(iter(test_loader))[0]
    with torch.no_grad():
        output = model(image)
    torch.save({"state": model.state_dict(), "x": image, "y": output, "results": results}, f"{folder}/quant.pth")

    with pytorch_quantization.enable_onnx_export():
        torch.onnx.export(
            model, (image,), f"{folder}/model.onnx", verbose=False, opset_version=13, do_constant_folding=True
        )


if __name__ == "__main__":
    main(sys.argv[1])
