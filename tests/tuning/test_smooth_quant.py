"""smooth_quant(): the paper's factors, the function unchanged, outliers gone, and norms that others use left alone."""

import copy

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt


class Block(nn.Module):
    """A transformer's block with the norm before its layers, with outliers in two channels; or behind, as in BERT."""

    def __init__(self, norm: type[nn.Module] = nn.LayerNorm, after: bool = False) -> None:
        super().__init__()
        self.ln1, self.ln2, self.after = norm(16), norm(16), after
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        with torch.no_grad():
            for each in (self.ln1, self.ln2):
                each.weight[3:5] = 40.0
                if getattr(each, "bias", None) is not None:
                    each.bias.normal_()

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln1(x)
        b, t, _ = h.shape  # sizes do not count as a use
        y = torch.softmax(self.q(h) @ self.k(input=h).transpose(1, 2) / 400, -1) @ self.v(h)
        x = (h if self.after else x) + self.out(y).reshape(b, t, -1)
        return x + self.down(torch.nn.functional.gelu(self.up(self.ln2(x))))


class MyRMSNorm(nn.Module):
    """As Hugging Face's models write theirs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


@pytest.mark.parametrize("alpha", [0.25, 0.5, 1.0])
def test_the_factors_are_those_of_the_paper(alpha: float) -> None:
    model, batches = Block().double().eval(), [torch.randn(2, 5, 16).double() for _ in range(3)]
    result = qt.tuning.smooth_quant(model, batches, alpha, progress=False)
    assert [(group.norm, group.layers) for group in result.groups] == [("ln1", ("q", "k", "v")), ("ln2", ("up",))]
    x = torch.cat(batches)
    activations = model.ln1(x).abs().amax((0, 1))
    weights = torch.stack([layer.weight.abs().amax(0) for layer in (model.q, model.k, model.v)]).amax(0)
    factor = activations**alpha / weights ** (1 - alpha)
    torch.testing.assert_close(result.model.ln1.weight, model.ln1.weight / factor, rtol=1e-5, atol=0)
    torch.testing.assert_close(result.model.ln1.bias, model.ln1.bias / factor, rtol=1e-5, atol=0)
    torch.testing.assert_close(result.model.k.weight, model.k.weight * factor, rtol=1e-5, atol=0)
    torch.testing.assert_close(result.model(x), model(x), rtol=1e-6, atol=1e-9)
    assert result.change < 1e-12
    assert all(group.after < group.before for group in result.groups)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, MyRMSNorm])
@pytest.mark.parametrize("route", ["prepare", "replace"])
def test_int8_activations_lose_less(norm: type[nn.Module], route: str) -> None:
    model, x = Block(norm).eval(), torch.randn(16, 8, 16)
    errors = []
    for each in (model, qt.tuning.smooth_quant(model, [x], progress=False).model):
        prepared = (
            qt.prepare(each, x, backend="tensorrt10")
            if route == "prepare"
            else qt.quant_modules.replace(each, backend="tensorrt10")
        )
        qt.calibrate(prepared, [x], progress=False)
        with torch.no_grad():
            errors.append(float((prepared(x) - model(x)).square().mean()))
    assert errors[1] < errors[0] / 2


def test_a_norm_in_a_residual_connection_stays() -> None:
    result = qt.tuning.smooth_quant(Block(after=True).eval(), [torch.randn(2, 5, 16)], progress=False)
    assert [group.norm for group in result.groups] == ["ln2"]
    assert result.skipped["ln1"] == "add also uses its output"
    assert "ln1: unchanged: add also uses its output" in str(result)


def test_other_norms_that_stay() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused, self.last, self.two, self.one, self.first = (nn.LayerNorm(4) for _ in range(5))
            self.shared, self.fc, self.tied, self.twin = (nn.Linear(4, 4) for _ in range(4))
            self.twin.weight = self.tied.weight

        def forward(self, x: Tensor) -> Tensor:
            x = self.shared(self.two(x)) + self.shared(x)
            x = self.fc(self.first(x))
            return self.last(self.tied(self.one(x)))

    result = qt.tuning.smooth_quant(Net().eval(), [torch.randn(3, 4)], skip=["first"], progress=False)
    assert result.groups == ()
    assert result.skipped == {
        "unused": "no batch reaches it",
        "last": "the caller of the model also uses its output",
        "two": "'shared' also takes other tensors",
        "one": "linear, with a weight of several layers or of no layer also uses its output",
        "first": "skip names it",
    }


def test_the_users_model_stays_unless_in_place_and_after_errors() -> None:
    class Strange(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.up.weight.sum()

    x = torch.randn(2, 5, 16)
    model = Block().train()
    before = copy.deepcopy(model.state_dict())
    result = qt.tuning.smooth_quant(model, [x], progress=False)
    assert model.training
    assert result.model.training
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert qt.tuning.smooth_quant(model, [x], inplace=True, progress=False).model is model
    strange = Strange().eval()
    before = copy.deepcopy(strange.state_dict())
    with pytest.raises(RuntimeError, match="smooth_quant: the model's output would change"):
        qt.tuning.smooth_quant(strange, [x], inplace=True, progress=False)
    torch.testing.assert_close(dict(strange.state_dict()), dict(before), rtol=0, atol=0)
    assert all(not module._forward_hooks for module in strange.modules())


def test_bad_arguments() -> None:
    model, x = Block().eval(), torch.randn(2, 5, 16)
    for arguments, error, words in (
        ({"alpha": 1.5}, ValueError, r"alpha must be in \[0, 1\], got 1.5"),
        ({"skip": ["ln3"]}, ValueError, "unknown norm in skip of smooth_quant 'ln3'; did you mean"),
        ({"batches": []}, ValueError, "smooth_quant: batches must hold at least one batch"),
        (
            {"batches": [torch.ones(2, 5, 3)]},
            ValueError,
            "smooth_quant: a batch does not fit the model: 'x' has the shape",
        ),
    ):
        with pytest.raises(error, match=words):
            qt.tuning.smooth_quant(model, **{"batches": [x], "progress": False, **arguments})
    with pytest.raises(TypeError, match="smooth it before it is prepared"):
        qt.tuning.smooth_quant(qt.prepare(model, x, backend="tensorrt10"), [x])


class Language(nn.Module):
    """The last layer has the weight of the embedding, as in most language models; two norms share a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.first, self.up = nn.Embedding(20, 16), nn.LayerNorm(16), nn.Linear(16, 16)
        self.second, self.third, self.down = nn.LayerNorm(16), nn.LayerNorm(16), nn.Linear(16, 16)
        self.third.weight = self.second.weight
        self.fourth, self.shifted = nn.LayerNorm(16), nn.Linear(16, 16)
        self.last, self.head = nn.LayerNorm(16), nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(self.first(self.embedding(x)))
        x = self.third(self.down(self.second(x)))
        y = self.fourth(x)
        y += 1
        return self.head(self.last(self.shifted(y)))


def test_parameters_of_several_owners_and_outputs_that_are_changed_in_place_stay() -> None:
    """The check of the outputs refused the whole model."""
    model, batches = Language().eval(), [torch.randint(20, (4, 5)) for _ in range(2)]
    result = qt.tuning.smooth_quant(model, batches, progress=False)
    assert [group.norm for group in result.groups] == ["first"]
    assert result.skipped == {
        "second": "'second' shares its weight with 'third'",
        "third": "layer_norm also uses its output",
        "fourth": "add_ also uses its output",
        "last": "'head' shares its weight with 'embedding'",
    }
    torch.testing.assert_close(result.model(batches[0]), model(batches[0]), rtol=1e-4, atol=1e-5)


def test_a_batch_that_is_not_finite_is_an_error() -> None:
    """The channels had no largest value then, and stayed as they were without a word."""
    x = torch.randn(4, 5, 16)
    x[0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"the output of the norm '.*' has NaN or infinities on a batch"):
        qt.tuning.smooth_quant(Block().eval(), [torch.randn(4, 5, 16), x], progress=False)
