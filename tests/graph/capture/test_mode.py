"""self.training in a forward follows the mode of the prepared model; a submodule that only branches on it is a leaf module."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.graph.capture import trace
from tests import nets
from tests.nets import linear_of


class Drops(nn.Module):
    """Dropout as a function, in the model and in a submodule."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = linear_of()

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.fc(x), 0.5, self.training)

    def __init__(self) -> None:
        super().__init__()
        self.block, self.fc = Drops.Block(), linear_of()

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.fc(self.block(x)), p=0.5, training=self.training)


class DropPath(nn.Module):
    """Stochastic depth in Python, as timm writes it: it has no parameters and branches on the mode."""

    def forward(self, x: Tensor) -> Tensor:
        doubled = x * 2
        if not self.training:
            return x
        return doubled * torch.empty_like(x).bernoulli_(0.5)


class Branches(nn.Module):
    """DropPath in a sequence after a layer, and called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.drop = nn.Sequential(linear_of(), DropPath()), DropPath()

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.drop(self.body(x)))


@pytest.mark.parametrize("kind", [Drops, Branches])
@pytest.mark.parametrize("training", [True, False], ids=["prepared in train", "in eval"])
@pytest.mark.parametrize("measured", [True, False], ids=["example", "no example"])
def test_the_mode_is_the_prepared_models(kind: type[nn.Module], training: bool, measured: bool) -> None:
    model, x = kind().train(training), torch.rand(16, 4)
    prepared = qt.prepare(model, (x,) if measured else None)
    for ours in (prepared, copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        assert all(m.training is training for name, m in ours.named_modules() if name.endswith("training_mode"))
        assert set(model.state_dict()) <= set(ours.state_dict())
        with qt.disable_quantization(ours), torch.no_grad():
            for mode in (True, False, True):
                torch.manual_seed(1)
                y = ours.train(mode)(x)
                torch.manual_seed(1)
                assert torch.equal(y, model.train(mode)(x))
                assert torch.equal(ours(x), y) is not mode  # other random numbers, where any are drawn
    model.train(training)


def test_a_submodule_has_its_own_mode() -> None:
    model, x = Drops().train(), torch.rand(16, 4)
    prepared = qt.prepare(model, (x,))
    prepared.block.eval()
    model.block.eval()
    with qt.disable_quantization(prepared), torch.no_grad():
        torch.manual_seed(1)
        y = prepared(x)
        torch.manual_seed(1)
        assert torch.equal(y, model(x))


class Named(nn.Module):
    """Has a submodule with the name that prepare gives to the module that reads the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.training_mode = linear_of()

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.training_mode(x), 0.5, self.training)


def test_a_submodule_of_the_users_named_training_mode_stays() -> None:
    model, x = Named().train(), torch.rand(16, 4)
    prepared = qt.prepare(model, (x,))
    assert set(model.state_dict()) <= set(prepared.state_dict())
    with qt.disable_quantization(prepared), torch.no_grad():
        assert torch.equal(prepared.eval()(x), model.eval()(x))
        assert not torch.equal(prepared.train()(x), prepared(x))


def test_converted_and_reported_without_the_mode() -> None:
    x = torch.rand(16, 4)
    prepared = qt.prepare(Drops().train(), (x,), "onnxruntime")
    qt.calibrate(prepared, [x], progress=False)
    converted = qt.convert(prepared)
    assert torch.equal(converted(x), converted(x))
    assert [line.name for line in qt.quantization_report(prepared).layers] == ["block.fc", "dropout", "fc", "dropout_1"]


def test_a_submodule_without_state_that_branches_is_a_leaf_module() -> None:
    traced = trace.run(Branches().train(), example_inputs=torch.rand(2, 4))
    assert [str(n.target) for n in traced.graph.nodes] == ["x", "body.0", "body.1", "drop", "drop", "output"]


def test_tracing_leaves_the_mode_a_bool() -> None:
    model = Drops().train()
    trace.run(model, example_inputs=torch.rand(2, 4))
    assert all(type(m.training) is bool for m in model.modules())
    broken = nets.ControlFlow()
    with pytest.raises(trace.UntraceableError):
        trace.run(broken)
    assert all(type(m.training) is bool for m in broken.modules())


class TwoHeads(nn.Module):
    """Has a head for training only, as GoogLeNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.auxiliary = linear_of(), linear_of(), linear_of()

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.body(x)
        return (self.head(x), self.auxiliary(x)) if self.training else self.head(x)


def test_a_branch_that_the_graph_fixes_is_warned_of() -> None:
    with pytest.warns(
        UserWarning,
        match="prepare: Python branches on self.training in 0; the graph computes the branch of training mode in eval mode too",
    ):
        prepared = qt.prepare(nn.Sequential(TwoHeads()), (torch.rand(2, 4),), backend="onnxruntime")
    with qt.disable_quantization(prepared):
        assert isinstance(prepared.eval()(torch.rand(2, 4)), tuple)


@pytest.mark.filterwarnings("error:prepare", "error:train")
def test_a_model_that_is_prepared_in_eval_mode_is_warned_of_where_it_is_trained() -> None:
    model, x = nn.Sequential(TwoHeads()).eval(), torch.rand(2, 4)
    prepared = qt.prepare(model, (x,), backend="onnxruntime")
    nets.assert_float_when_off(prepared, model, x)
    for ours in (copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        ours.eval()
        with pytest.warns(
            UserWarning, match="train: Python branches on self.training in 0; the model was prepared in eval"
        ):
            ours.train()


def test_a_mode_that_the_graph_follows_is_not_warned_of(recwarn) -> None:
    qt.prepare(Branches().train(), (torch.rand(2, 4),), backend="onnxruntime")
    assert not [w for w in recwarn if "self.training" in str(w.message)]
