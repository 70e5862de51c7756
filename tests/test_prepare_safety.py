"""prepare does not change the user's model nor the random state, on a copy, in place, and after an error."""

import random

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import qtoolkit as qt
from tests import nets
from tests.nets import linear_of


def snapshot(model: nn.Module) -> dict[str, object]:
    return {
        name: (
            module,
            type(module),
            module.training,
            list(vars(module)),
            dict(module._modules),
            {
                k: (v, v.detach().clone())
                for k, v in (*module._parameters.items(), *module._buffers.items())
                if v is not None
            },
            dict(module._forward_hooks),
        )
        for name, module in model.named_modules()
    }


def assert_unchanged(before: dict[str, object], model: nn.Module) -> None:
    after = snapshot(model)
    assert list(after) == list(before)
    for name, (module, kind, training, attributes, modules, tensors, hooks) in before.items():
        assert after[name][0] is module
        assert after[name][1:5] == (kind, training, attributes, modules)
        assert after[name][6] == hooks
        assert tensors.keys() == after[name][5].keys()
        for key, (tensor, value) in tensors.items():
            assert after[name][5][key][0] is tensor
            assert torch.equal(tensor, value)


class Mixed(nn.Module):
    """Everything that prepare could change: a constant, a hook, frozen batch norms, a leaf module."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4).eval()
        self.block = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(16, 4))
        self.head = linear_of()
        self.register_buffer("steps", torch.zeros(()))
        self.head.register_forward_hook(print)

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(F.dropout(self.bn(self.conv(x)), 0.5)) + torch.tensor([1.0, 2.0, 3.0, 4.0])
        self.steps.add_(1)
        return self.head(y).reshape(-1, 4)


class FailsLate(Mixed):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.ones(3)  # found by the run on example inputs


BAD_AXIS = qt.QConfigMapping().set_module_name("head", qt.QConfig(qt.QuantSpec(), qt.QuantSpec(axis=3)))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    ("model", "kwargs", "words"),
    [
        (Mixed, {"qconfig_mapping": BAD_AXIS}, "layer 'head': the axis of a tensor of 2 dimensions"),
        (FailsLate, {"example_inputs": torch.randn(2, 3, 2, 2)}, "size"),
        (nets.TwoBad, {}, "loops.block"),
    ],
    ids=["swap", "run", "trace"],
)
def test_a_failing_pass_leaves_the_users_model_untouched(
    inplace: bool, model: type[nn.Module], kwargs: dict[str, object], words: str
) -> None:
    made = model().train()
    before, torch_state, python_state = snapshot(made), torch.get_rng_state(), random.getstate()
    untraced = ["block"] if isinstance(made, Mixed) else []
    with pytest.raises((ValueError, RuntimeError), match=words):
        qt.prepare(made, untraced=untraced, inplace=inplace, backend="tensorrt", **kwargs)
    assert_unchanged(before, made)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state


def test_success_leaves_the_users_model_and_random_numbers_untouched() -> None:
    model = Mixed().train()
    before, state = snapshot(model), torch.get_rng_state()
    x = torch.zeros(2, 3, 2, 2)
    prepared = qt.prepare(model, x, untraced=["block"], preserve_attributes=["steps"], backend="tensorrt")
    assert_unchanged(before, model)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(p is q for p in prepared.parameters() for q in model.parameters())


def test_in_place_the_parameters_are_the_models_own() -> None:
    model = Mixed().train()
    parameters = dict(model.named_parameters())
    prepared = qt.prepare(model, untraced=["block"], inplace=True, backend="tensorrt")
    assert all(p is parameters[n] for n, p in prepared.named_parameters() if n in parameters)
    assert parameters.keys() <= dict(prepared.named_parameters()).keys()


def test_a_model_that_cannot_be_copied_says_so() -> None:
    model = linear_of()
    model.source = (i for i in range(3))
    with pytest.raises(TypeError, match="the model cannot be copied .*pass inplace=True and no example_inputs"):
        qt.prepare(model, backend="tensorrt")
    assert isinstance(qt.prepare(model, inplace=True, backend="tensorrt"), fx.GraphModule)


def test_types_that_are_not_in_the_model_are_warned_of() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    mapping = qt.QConfigMapping().set_object_type(nn.Conv2d, None).set_object_type(torch.add, None)
    mapping.set_object_type(nn.Linear, None)
    with pytest.warns(UserWarning, match="is not in the model and has no effect") as caught:
        qt.prepare(
            model,
            qconfig_mapping=mapping,
            leaf_modules=[nn.LSTM],
            qat_modules={nn.GRU: qt.nn.QuantLinear},
            backend="tensorrt",
        )
    assert [str(warning.message) for warning in caught] == [
        f"prepare: {what}, which is not in the model and has no effect."
        for what in (
            "qconfig_mapping has a rule for Conv2d",
            "qconfig_mapping has a rule for add",
            "leaf_modules names LSTM",
            "qat_modules names GRU",
        )
    ]
    assert {warning.filename for warning in caught} == {__file__}


@pytest.mark.parametrize("quantized", [qt.prepare, qt.quant_modules.replace], ids=["prepare", "replace"])
def test_parameters_of_the_copy_keep_their_attributes(quantized) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model[2].weight = model[0].weight = nn.Parameter(torch.randn(4, 4))
    model[0].weight._no_weight_decay, model[2].bias.options = True, {"lr": 0.1, "of": model[2].bias}
    ours = quantized(model, backend="tensorrt").get_submodule
    assert ours("2").weight is ours("0").weight
    assert ours("0").weight._no_weight_decay is True
    assert ours("2").bias.options == {"lr": 0.1, "of": ours("2").bias}
    assert model[2].bias.options["of"] is model[2].bias  # nothing is shared with the float model
    assert not vars(ours("0").bias)


def test_a_copy_has_no_attributes_of_compiled_code() -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    torch._dynamo.mark_static_address(model[0].weight)
    assert vars(model[0].weight)
    assert not vars(qt.prepare(model, backend="tensorrt").get_submodule("0").weight)
