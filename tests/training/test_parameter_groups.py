"""parameter_groups(): each trainable parameter in exactly one group, for every optimizer and scheduler."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import qtoolkit as qt
from tests import nets
from tests.processes import group_of_one
from tests.training.nets import SHAPE, learned, step

OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, 0.01, momentum=0.9),
    "sgd foreach": lambda groups: torch.optim.SGD(groups, 0.01, momentum=0.9, foreach=True),
    "sgd fused": lambda groups: torch.optim.SGD(groups, 0.01, momentum=0.9, fused=True),
    "adamw foreach": lambda groups: torch.optim.AdamW(groups, 1e-3, foreach=True),
    "adamw fused": lambda groups: torch.optim.AdamW(groups, 1e-3, fused=True),
}


def names_of(groups: list[dict]) -> dict[str, list[str]]:
    return {group["name"]: group["param_names"] for group in groups}


@pytest.mark.parametrize("route", ["graph", "modules"])
def test_each_trainable_parameter_is_in_one_group(route: str) -> None:
    model = learned(route)
    groups = qt.parameter_groups(model)
    parameters = dict(model.named_parameters())
    listed = [name for group in groups for name in group["param_names"]]
    assert sorted(listed) == sorted(parameters)
    for group in groups:
        assert all(parameters[n] is p for n, p in zip(group["param_names"], group["params"], strict=True))
    names = names_of(groups)
    assert names["scales"] == [name for name in parameters if name.endswith("._relative_scale")]
    assert sorted(names["weights"]) == ["conv.weight", "fc.weight", "stem.weight"]
    assert "bn.weight" in names["no_decay"]
    assert "fc.bias" in names["no_decay"]


class Positions(nn.Module):
    """One with parameters that it exempts from weight decay, as models of timm and of Swin do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nets.linear_of()
        self.place, self.bias_table = (nn.Parameter(torch.ones(1, self.fc.in_features)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x + self.place + self.bias_table)

    def no_weight_decay(self) -> set[str]:
        return {"place", "an_option_that_it_does_not_have"}

    def no_weight_decay_keywords(self) -> set[str]:
        return {"_table"}


@pytest.mark.parametrize("route", [qt.prepare, qt.quant_modules.replace])
def test_a_model_exempts_parameters_from_weight_decay(route: Callable) -> None:
    model = route(Positions(), backend="tensorrt10")
    assert names_of(qt.parameter_groups(model)) == {
        "weights": ["fc.weight"],
        "no_decay": ["place", "bias_table", "fc.bias"],
    }
    inside = names_of(qt.parameter_groups(nn.Sequential(model)))
    assert inside["weights"] == ["0.fc.weight"]


def test_rates_and_decays() -> None:
    model = learned()
    by_name = {group["name"]: group for group in qt.parameter_groups(model, 0.1, 1e-4, scale_lr=0.01)}
    assert [(g["lr"], g["weight_decay"]) for g in by_name.values()] == [(0.1, 1e-4), (0.1, 0.0), (0.01, 0.0)]
    of_scales = qt.parameter_groups(model, 0.1, scale_weight_decay=1e-3)[2]
    assert (of_scales["lr"], of_scales["weight_decay"]) == (0.1, 1e-3)
    optimizer = torch.optim.AdamW(qt.parameter_groups(model), 0.3, weight_decay=0.2)  # the optimizer's own values
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(0.3, 0.2), (0.3, 0.0), (0.3, 0.0)]


def test_frozen_and_shared_parameters() -> None:
    model = qt.prepare(nn.Sequential(fc := nets.linear_of(), nn.ReLU(), fc, nets.linear_of()), backend="tensorrt10")
    model.get_submodule("3").requires_grad_(False)
    assert names_of(qt.parameter_groups(model)) == {"weights": ["0.weight"], "no_decay": ["0.bias"]}


def test_norms_and_named_parameters_do_not_decay() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position, self.norm = nn.Parameter(torch.zeros(1, 4, 4)), nn.LayerNorm((4, 4))
            self.head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            self.tied = self.head[0]

    found = names_of(qt.parameter_groups(Net(), no_decay=["position", "tied"]))
    assert found["weights"] == ["head.1.weight"]
    assert {"position", "norm.weight", "norm.bias", "head.0.weight"} <= set(found["no_decay"])


def test_legacy_quantizers_have_scales_too() -> None:
    from qtoolkit.compat.pytorch_quantization.nn import TensorQuantizer
    from qtoolkit.compat.pytorch_quantization.tensor_quant import QuantDescriptor

    model = nn.Sequential(nn.Linear(2, 2), TensorQuantizer(QuantDescriptor(learn_amax=True, amax=1.0)))
    assert names_of(qt.parameter_groups(model))["scales"] == ["1.clip.clip_value_min", "1.clip.clip_value_max"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_and_schedulers_take_the_groups(name: str) -> None:
    """The step is that of one group for each parameter, and the state is saved and loaded."""
    model = learned()
    twin = copy.deepcopy(model)
    optimizer = OPTIMIZERS[name](qt.parameter_groups(model, weight_decay=0.1, scale_lr=1e-4))
    scales = {id(p) for q in qt.quantizers_of(twin).values() for p in q.parameters()}
    single = OPTIMIZERS[name](
        [
            {"params": [p], "weight_decay": 0.1 if p.dim() > 1 else 0.0} | ({"lr": 1e-4} if id(p) in scales else {})
            for p in twin.parameters()
        ]
    )
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(each, 4) for each in (optimizer, single)]
    for _ in range(2):
        x = torch.randn(SHAPE)
        step(model, optimizer, x)
        step(twin, single, x)
        for scheduler in schedulers:
            scheduler.step()
    for (path, wanted), found in zip(twin.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7, msg=path)
    fresh = OPTIMIZERS[name](qt.parameter_groups(model))
    fresh.load_state_dict(optimizer.state_dict())
    assert [g["lr"] for g in fresh.param_groups] == [g["lr"] for g in optimizer.param_groups]
    assert fresh.param_groups[2]["lr"] < fresh.param_groups[0]["lr"]


@pytest.mark.parametrize("change", [nn.Module.half, nn.Module.double, lambda model: model.to("cpu")])
def test_groups_hold_the_parameters_after_casts(change: Callable[[nn.Module], nn.Module]) -> None:
    model = learned()
    groups = qt.parameter_groups(model)
    change(model)
    assert {id(p) for group in groups for p in group["params"]} == {id(p) for p in model.parameters()}


def test_wrapped_models() -> None:
    with group_of_one():
        model = learned()
        names = names_of(qt.parameter_groups(DistributedDataParallel(model)))
        wanted = names_of(qt.parameter_groups(model))
        assert names == {group: [f"module.{name}" for name in listed] for group, listed in wanted.items()}


def test_bad_arguments() -> None:
    model = learned()
    for arguments, kind, words in (
        ({"no_decay": "fc"}, TypeError, r"parameter_groups: no_decay must be a sequence of names"),
        ({"no_decay": ["fcc"]}, ValueError, r"unknown parameter or module in no_decay 'fcc'; did you mean 'fc'"),
        ({"lr": -1.0}, ValueError, r"parameter_groups: lr must not be negative, got -1\.0\."),
        ({"scale_lr": float("nan")}, ValueError, r"parameter_groups: scale_lr must not be negative, got nan\."),
    ):
        with pytest.raises(kind, match=words):
            qt.parameter_groups(model, **arguments)
    with pytest.raises(ValueError, match=r"no parameter of the model is trainable; set requires_grad"):
        qt.parameter_groups(model.requires_grad_(False))
    with pytest.raises(TypeError, match=r"parameter_groups: model must be a torch.nn.Module, got list"):
        qt.parameter_groups([])
