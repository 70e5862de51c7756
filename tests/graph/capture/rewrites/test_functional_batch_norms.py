"""Batch norms of a subclass that calls F.batch_norm: they become modules, and keep their submodules."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt


class NormAct(nn.BatchNorm2d):
    """A batch norm with an activation, which checks its input and counts batches in Python, as timm's does."""

    def __init__(self, channels: int, act: nn.Module) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), act

    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.ndim == 4, "expected 4D input")
        if self.training:
            self.num_batches_tracked.add_(1)
        y = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, bool(self.training), self.momentum, self.eps
        )
        return self.act(self.drop(y))


class HandsOn(NormAct):
    """The same, with the mode passed on unchanged."""

    def forward(self, x: Tensor) -> Tensor:
        statistics = self.running_mean, self.running_var
        return self.act(
            F.batch_norm(x, *statistics, self.weight, self.bias, self.training, momentum=self.momentum, eps=self.eps)
        )


class Net(nn.Module):
    def __init__(self, norm: Callable[..., nn.Module] = NormAct) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), norm(4, nn.PReLU(4))
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.conv(x)))


def settled(norm: Callable[..., nn.Module]) -> tuple[nn.Module, Tensor]:
    model, x = Net(norm), torch.randn(4, 3, 8, 8)
    with torch.no_grad():
        for tensor in (model.norm.weight, model.norm.bias, model.norm.running_mean, model.norm.running_var):
            tensor.uniform_(0.5, 1.5)
    return model, x


@pytest.mark.parametrize("norm", [NormAct, HandsOn])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_the_layer_before_it_fuses_with_it_and_its_activation_stays(norm: type[nn.Module], training: bool) -> None:
    model, x = settled(norm)
    prepared = qt.prepare(model.train(training), (x,), "onnxruntime")
    report = qt.quantization_report(prepared)
    assert not [line for line in report.left_float if line.kind == "batch_norm"]
    assert "norm.act.weight" in prepared.state_dict()
    if training:
        assert set(model.state_dict()) <= set(prepared.state_dict())
    with qt.disable_quantization(prepared), torch.no_grad():
        torch.testing.assert_close(prepared.eval()(x), model.eval()(x))
    converted = qt.convert(calibrated(prepared, x))
    assert not any(isinstance(m, nn.BatchNorm2d) for m in converted.modules())
    assert torch.equal(copy.deepcopy(converted)(x), converted(x))


def calibrated(prepared: nn.Module, x: Tensor) -> nn.Module:
    qt.calibrate(prepared, [x], progress=False)
    return prepared


def test_it_trains_as_before() -> None:
    model, x = settled(NormAct)
    model.train()
    apart = qt.QConfigMapping().set_module_name_regex(".*", None)
    prepared = qt.prepare(model, (x,), qconfig_mapping=apart, backend="tensorrt")
    assert torch.equal(prepared(x), model(x))
    for (name, ours), theirs in zip(prepared.named_buffers(), model.buffers(), strict=True):
        assert torch.equal(ours, theirs), name
    prepared.eval()
    assert torch.equal(prepared(x), model.eval()(x))


class Odd(NormAct):
    """A batch norm that computes with another epsilon than its attribute."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1, 1e-2)


class Frozen(NormAct):
    """A batch norm that normalizes by its running statistics in training too."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.1, self.eps)


@pytest.mark.parametrize("norm", [Odd, Frozen])
def test_a_batch_norm_that_computes_something_else_stays_a_function(norm: type[nn.Module]) -> None:
    model, x = settled(norm)
    prepared = qt.prepare(model.train(), (x,), "onnxruntime")
    (line,) = [line for line in qt.quantization_report(prepared).left_float if line.kind == "batch_norm"]
    assert "it is called as a function" in line.reason
    with qt.disable_quantization(prepared), torch.no_grad():
        assert torch.equal(prepared.eval()(x), model.eval()(x))


def test_a_branch_on_the_mode_around_its_momentum_is_one_batch_norm() -> None:
    class Averages(NormAct):
        """As torch's own batch norms: momentum counts in training mode alone."""

        def forward(self, x: Tensor) -> Tensor:
            average = 0.0
            if self.training:
                self.num_batches_tracked.add_(1)
                average = self.momentum
            statistics = self.running_mean, self.running_var
            y = F.batch_norm(x, *statistics, self.weight, self.bias, bool(self.training), average, self.eps)
            return self.act(y)

    model, x = settled(Averages)
    prepared = qt.prepare(model.train(), (x,), backend="onnxruntime")
    assert not prepared.graph.find_nodes(op="call_function", target=qt.graph.by_mode)
    with qt.disable_quantization(prepared):
        for mode in (True, False):
            torch.testing.assert_close(prepared.train(mode)(x), model.train(mode)(x))
    for name, theirs in model.named_buffers():
        torch.testing.assert_close(prepared.get_buffer(name), theirs)


def test_a_batch_norm_of_training_mode_alone_leaves_the_branch_its_node_of_the_mode() -> None:
    class Scales(NormAct):
        """Eval mode has another epsilon: its batch norm stays a function beside the module of training mode."""

        def forward(self, x: Tensor) -> Tensor:
            eps = self.eps if self.training else 2 * self.eps
            statistics = self.running_mean, self.running_var
            y = F.batch_norm(x, *statistics, self.weight, self.bias, bool(self.training), self.momentum, eps)
            return self.act(y)

    model, x = settled(Scales)
    prepared = qt.prepare(model.train(), (x,), backend="onnxruntime")
    with qt.disable_quantization(prepared):
        for mode in (False, True):
            torch.testing.assert_close(prepared.train(mode)(x), model.train(mode)(x))
