"""Subclasses of torch's layers: those that compute the same become torch's type, the others are traced."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.graph.capture.rewrites.subclasses import equivalent_type
from tests import nets


class Narrow(nn.Conv2d):
    """A convolution that adds a constructor and a static method, as in torchvision's video models."""

    def __init__(self, channels: int) -> None:
        super().__init__(3, channels, 3, bias=False)

    @staticmethod
    def step() -> int:
        return 1


class Norm(nn.BatchNorm2d):
    """A batch norm of another name."""


class Scaled(nn.Conv2d):
    """A convolution that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, 2 * self.weight, self.bias)


class Wraps(nn.Linear):
    """A linear layer that loads its weight in another way."""

    def _load_from_state_dict(self, *args: object) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (Narrow(4), nn.Conv2d),
        (Norm(4), nn.BatchNorm2d),
        (Scaled(3, 4, 3), None),
        (Wraps(2, 2), None),
        (nn.ReLU(), None),
    ],
)
def test_only_a_subclass_that_overrides_nothing_has_an_equivalent_type(
    module: nn.Module, kind: type[nn.Module] | None
) -> None:
    assert equivalent_type(module) is kind


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_such_a_layer_fuses_with_its_batch_norm(training: bool) -> None:
    model = nets.trained(nn.Sequential(Narrow(4), Norm(4), nn.ReLU(), Scaled(4, 2, 1)), 2, 3, 8, 8).train(training)
    x = torch.randn(2, 3, 8, 8)
    prepared = qt.prepare(model, (x,), "onnxruntime")
    assert isinstance(prepared.get_submodule("0"), qt.nn.QuantConv2d)
    assert not [line for line in qt.quantization_report(prepared).left_float if line.kind == "batch_norm"]
    assert type(model[0]) is Narrow
    with qt.disable_quantization(prepared), torch.no_grad():
        torch.testing.assert_close(prepared.eval()(x), model.eval()(x))


def test_a_type_in_leaf_modules_stays_as_it_is() -> None:
    prepared = qt.prepare(nn.Sequential(Narrow(4)), leaf_modules=[Narrow], backend="tensorrt")
    assert type(prepared.get_submodule("0")) is Narrow


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.rnn = nn.Linear(4, 4), nn.RNN(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(self.first(x))[0]


def test_a_layer_without_a_qat_module_says_so() -> None:
    (line,) = qt.quantization_report(qt.prepare(Recurrent(), backend="onnxruntime")).left_float
    assert (line.name, line.reason) == ("rnn", "float: no QAT module for RNN")


class OwnConvolution(nn.Conv2d):
    """It calls the function with its own weight, as timm's Conv2dSame."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias)


def _quantized(mapping: qt.QConfigMapping, *layers: nn.Module) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no warning that a type is not in the model
        prepared = qt.prepare(
            nn.Sequential(*layers).eval(), torch.zeros(1, 3, 8, 8), qconfig_mapping=mapping, backend="tensorrt"
        )
    return [name for name, layer in prepared.named_modules() if isinstance(layer, qt.nn.QuantConv2d)]


@pytest.mark.parametrize("layer", [Narrow(3), OwnConvolution(3, 3, 3)], ids=["equal", "own call"])
def test_a_rule_for_a_type_is_for_the_class_that_the_model_has(layer: nn.Module) -> None:
    kind, other = type(layer), nn.Conv2d(3, 3, 1)
    assert _quantized(qt.QConfigMapping().exclude(kind), layer, other) == ["1"]
    assert _quantized(qt.QConfigMapping().set_object_type(kind, None), layer, other) == ["1"]
    both = qt.QConfigMapping().set_object_type(kind, qt.QConfig(qt.QuantSpec(), qt.QuantSpec(axis=0)))
    assert _quantized(both.exclude(nn.Conv2d), layer, other) == ["0"]


def test_a_rule_for_torchs_type_is_for_the_subclasses_that_compute_the_same_unless_they_have_their_own() -> None:
    layers = (Narrow(3), OwnConvolution(3, 3, 3), nn.Conv2d(3, 3, 1))
    assert _quantized(qt.QConfigMapping().exclude(nn.Conv2d), *layers) == []
    four = qt.QConfig(qt.QuantSpec(), qt.QuantSpec(bits=4, axis=0))
    eight = qt.QConfig(qt.QuantSpec(), qt.QuantSpec(axis=0))
    mapping = qt.QConfigMapping().set_object_type(nn.Conv2d, eight).set_object_type(Narrow, four)
    prepared = qt.prepare(
        nn.Sequential(*layers).eval(), torch.zeros(1, 3, 8, 8), qconfig_mapping=mapping, backend="tensorrt"
    )
    bits = [prepared.get_submodule(name).weight_quantizer.spec.bits for name in ("0", "1", "2")]
    assert bits == [4, 8, 8]
