"""Classes of the model with a `train` of their own, which keep batch norms in eval mode: prepared models have torch's."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt


class Frozen(nn.BatchNorm2d):
    """A batch norm that stays in eval mode."""

    def train(self, mode: bool = True) -> nn.Module:
        return super().train(False)


class Backbone(nn.Module):
    """A stage whose batch norms stay in eval mode, as those of detectors do."""

    def __init__(self, norm: Any = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), norm(4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn(self.conv(x)))


class FrozenBackbone(Backbone):
    """It freezes parameters too."""

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.bn.eval()
        self.conv.bias.requires_grad_(not mode)
        return self


class Counts(Backbone):
    """It changes no mode."""

    def train(self, mode: bool = True) -> nn.Module:
        self.mode = mode
        return super().train(mode)


class Detector(nn.Module):
    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


X = torch.randn(2, 3, 8, 8)
WORDS = r"own classes keeps 'backbone.bn' in eval mode"


@pytest.mark.parametrize("make", [FrozenBackbone, lambda: Backbone(Frozen)], ids=["stage", "batch norm"])
def test_what_is_kept_in_eval_mode_is_named(make: Any) -> None:
    model = Detector(make()).train()
    with pytest.warns(UserWarning, match=WORDS):
        prepared = qt.prepare(model, (X,), backend="tensorrt")
    assert prepared.plan.status["backbone_bn"].text == "folded into the layer before it"
    qt.calibrate(prepared, [X], progress=False)
    qt.freeze_batch_norm(prepared.get_submodule("backbone.bn"))  # as the warning says
    before = prepared.backbone.bn.running_mean.clone()
    prepared.train()(X)
    assert torch.equal(prepared.backbone.bn.running_mean, before)


def test_the_model_keeps_its_modes_and_what_is_trained() -> None:
    model = Detector(FrozenBackbone()).train()
    model.backbone.bn.train()
    model.backbone.conv.bias.requires_grad_(True)
    with pytest.warns(UserWarning, match=WORDS):
        qt.prepare(model, (X,), inplace=True, backend="tensorrt")
    assert model.backbone.bn.training
    assert model.backbone.conv.bias.requires_grad


def test_a_leaf_module_has_its_own_train() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepared = qt.prepare(Detector(FrozenBackbone()).train(), (X,), untraced=["backbone"], backend="tensorrt")
    assert not prepared.train().backbone.bn.training


@pytest.mark.parametrize(
    "model", [Detector(Counts()).train(), Detector(FrozenBackbone()).eval()], ids=["modes", "eval"]
)
def test_there_is_no_warning_where_nothing_changes(model: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qt.prepare(model, (X,), backend="tensorrt")
