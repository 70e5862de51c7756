"""Blocks that become one layer after a training, as RepVGG's: before prepare, or in a float model with the trained weights."""

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class TwoBranches(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dense = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))
        self.point = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "deployed"):
            return torch.relu(self.deployed(x))
        return torch.relu(self.dense(x) + self.point(x))

    @torch.no_grad()
    def switch_to_deploy(self) -> None:
        conv, bn = self.dense
        factor = bn.weight / (bn.running_var + bn.eps).sqrt()
        deployed = nn.Conv2d(conv.in_channels, conv.out_channels, 3, padding=1)
        deployed.weight.copy_(conv.weight * factor[:, None, None, None] + nn.functional.pad(self.point.weight, [1] * 4))
        deployed.bias.copy_(bn.bias - bn.running_mean * factor + self.point.bias)
        self.deployed = deployed
        self.__delattr__("dense")
        del self.point


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.unused = nn.Conv2d(3, 4, 3), nn.Linear(2, 2)
        self.blocks = nn.Sequential(TwoBranches(4), TwoBranches(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.stem(x))


def deployed(model: nn.Module) -> nn.Module:
    for block in list(model.modules()):
        if hasattr(block, "switch_to_deploy"):
            block.switch_to_deploy()
    return model


def trained() -> nn.Module:
    torch.manual_seed(0)
    prepared = qt.prepare(Net().train(), IMAGES[:1], backend="onnxruntime")
    qt.calibrate(prepared, [IMAGES], progress=False)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        prepared(IMAGES).square().mean().backward()
        optimizer.step()
    return prepared


def test_a_prepared_model_says_what_to_reparameterize_and_stays_as_it_is() -> None:
    prepared = trained().eval()
    before = prepared(IMAGES)
    with pytest.raises(
        RuntimeError, match=r"^a TwoBranches of a prepared model cannot lose 'blocks\.0\.dense', .*strict="
    ):
        deployed(prepared)
    with pytest.raises(
        RuntimeError, match="of a prepared model cannot lose 'stem', which the graph calls. To reparameterize"
    ):
        del prepared.stem
    assert torch.equal(prepared(IMAGES), before)
    del prepared.unused


def test_the_weights_of_a_training_are_reparameterized_in_a_float_model() -> None:
    """The way that the error and docs/training.md name."""
    prepared = trained()
    model = Net()
    lacking = model.load_state_dict(prepared.state_dict(), strict=False).missing_keys
    assert lacking == []
    wanted = model.eval()(IMAGES)
    torch.testing.assert_close(deployed(model)(IMAGES), wanted)
    again = qt.prepare(model, IMAGES[:1], backend="onnxruntime")
    qt.calibrate(again, [IMAGES], progress=False)
    assert {line.name for line in qt.quantization_report(again).quantized} >= {"blocks.0.deployed", "blocks.1.deployed"}
    with torch.no_grad():
        error = (again(IMAGES) - wanted).norm() / wanted.norm()
    assert error < 0.05
