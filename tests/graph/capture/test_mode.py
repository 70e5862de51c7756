"""self.training in a forward follows the mode of the prepared model; a submodule that only branches on it is a leaf module."""

import copy
import pickle
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.graph import by_mode, check_size
from qtoolkit.graph.capture import trace
from qtoolkit.graph.nodes import kind_of
from tests import nets
from tests.nets import linear_of
from tests.sweep import common_first


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
    prepared = qt.prepare(model, (x,) if measured else None, backend="tensorrt")
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
    prepared = qt.prepare(model, (x,), backend="tensorrt")
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
    prepared = qt.prepare(model, (x,), backend="tensorrt")
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
    traced = trace.run(Branches().train(), example_inputs=torch.rand(2, 4)).gm
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


class Heads(NamedTuple):
    """What a model with two heads returns in training mode."""

    head: Tensor
    auxiliary: Tensor


class HeadsInPlace(TwoHeads):
    """Has a head for training only whose ReLUs work in place, and names what it returns then, as GoogLeNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.auxiliary = nn.Sequential(
            nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.LayerNorm(4), nn.ReLU(inplace=True), linear_of()
        )

    def forward(self, x: Tensor) -> Tensor | Heads:
        x = F.relu(self.body(x), inplace=True)
        return Heads(self.head(x), F.relu(self.auxiliary(x), inplace=True)) if self.training else self.head(x)


class HeadsInAList(TwoHeads):
    """Keeps what its head for training returns in a list that is an attribute, as MONAI's DynUNet."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [torch.zeros(1)]

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.body(x)
        self.kept[0] = self.auxiliary(x)
        return (self.head(x), self.kept[0]) if self.training else self.head(x)


class Probability(nn.Module):
    """Dropout whose probability Python chooses by the mode, as transformers writes it, in one block of two that have a mode."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.out = linear_of(), linear_of()

        def forward(self, x: Tensor) -> Tensor:
            dropout = 0.0 if not self.training else 0.5
            heads = self.fc(x).view(1, 2, -1, 4)
            y = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=dropout)
            return self.out(F.dropout(y.view(-1, 4), p=dropout, training=True))

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Probability.Attention(), Probability.Attention()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class DropsInABranch(nn.Module):
    """Calls a dropout in training mode alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear_of(), linear_of()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        if self.training:
            x = F.dropout(x, 0.5)
        return self.second(x)


class TableInABranch(DropsInABranch):
    """Adds what it computes from a tensor that is no buffer, such as VideoMAE's table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.rand(1, 4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.table.expand(2, -1).detach().clone().sum(0))


class Jitters(DropsInABranch):
    """Scales by random numbers in training mode, which it draws in place, as DINOv3 does."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.training:
            drawn = torch.empty(1, 4, dtype=x.dtype, device=x.device).uniform_(0.5, 2.0)
            drawn.mul_(x.new_zeros(4).add_(2.0)[:1])
            x = x * drawn
        return self.second(x)


class LossInABranch(TwoHeads):
    """Returns a loss beside its result, which it computes in training mode alone, where it checks sizes; zero in eval mode."""

    zero: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("zero", torch.tensor(0.0), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, loss = self.body(x), self.zero
        if self.training:
            assert len(x) > 4
            loss = (self.auxiliary(x).T @ x - torch.eye(4)).square().mean() if x.shape[0] == 16 else x.mean()
        return self.head(x), loss


@pytest.mark.filterwarnings("error:prepare", "error:train")
@pytest.mark.parametrize("measured", [True, False], ids=["example", "no example"])
@pytest.mark.parametrize(
    ("kind", "training"),
    [
        (Probability, True),
        (Probability, False),
        (DropsInABranch, True),
        (TwoHeads, True),
        (HeadsInPlace, True),
        (HeadsInAList, True),
        (TableInABranch, True),
        (Jitters, True),
    ],
)
def test_branches_of_the_same_ops_follow_the_mode(kind: type[nn.Module], training: bool, measured: bool) -> None:
    model, x = kind().train(training), torch.rand(16, 4)
    prepared = qt.prepare(model, (x,) if measured else None, "onnxruntime")
    for ours in (prepared, copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        with qt.disable_quantization(ours), torch.no_grad():
            for mode in (True, False, True):
                torch.manual_seed(1)
                y = ours.train(mode)(x)
                torch.manual_seed(1)
                torch.testing.assert_close(y, model.train(mode)(x), rtol=0, atol=0)


def test_the_mode_of_a_branch_is_that_of_its_submodule() -> None:
    model, x = Probability().train(), torch.rand(16, 4)
    prepared = qt.prepare(model, (x,), "onnxruntime")
    for ours in (model, prepared):
        ours.first.eval()
    with qt.disable_quantization(prepared), torch.no_grad():
        torch.manual_seed(1)
        y = prepared(x)
        torch.manual_seed(1)
        assert torch.equal(y, model(x))


@pytest.mark.parametrize("kind", [Probability, DropsInABranch, TwoHeads, HeadsInPlace, HeadsInAList])
def test_what_training_mode_alone_computes_is_not_converted(kind: type[nn.Module], tmp_path: Path) -> None:
    x = torch.rand(16, 4)
    prepared = qt.prepare(kind().train(), (x,), "onnxruntime")
    qt.calibrate(prepared, [x], progress=False)
    converted = qt.convert(prepared)
    assert not any(node.target is by_mode or "auxiliary" in str(node.target) for node in converted.graph.nodes)
    assert torch.equal(converted(x), prepared.eval()(x))
    assert torch.equal(converted(x), converted(x))
    integer = qt.convert(prepared, arithmetic="integer")
    assert isinstance(integer(x), Tensor)
    result = qt.export_onnx(prepared.train(), (x,), tmp_path / "model.onnx", progress=False)
    assert result.verification is not None
    assert result.verification.weight_codes.differing == 0


@pytest.mark.parametrize("backend", sorted(qt.backends))
def test_a_head_for_training_does_not_change_how_the_other_ops_are_quantized(backend: str) -> None:
    def edges(training: bool) -> set[tuple[str, str]]:
        plan = qt.prepare(TwoHeads().train(training), (torch.rand(16, 4),), backend).plan
        assert plan is not None
        return {(edge.source, "output" if edge.consumer == "by_mode" else edge.consumer) for edge in plan.edges}

    in_training, in_eval = edges(True), edges(False)
    extra = in_training - in_eval
    assert in_eval <= in_training
    assert all("auxiliary" in source + consumer for source, consumer in extra)


@pytest.mark.filterwarnings("error:prepare", "error:train")
def test_sizes_that_training_mode_alone_checks_are_free_in_eval_mode(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = LossInABranch().train(), torch.rand(16, 4)
    prepared = qt.prepare(model, (x,), "onnxruntime")
    with qt.disable_quantization(prepared):
        for mode, rows in ((True, 16), (False, 16), (False, 3), (True, 16)):
            for ours, theirs in zip(prepared.train(mode)(x[:rows]), model.train(mode)(x[:rows]), strict=True):
                assert torch.equal(ours, theirs)
        with pytest.raises(ValueError, match="prepared for inputs of other sizes"):
            prepared.train()(x[:8])
    qt.calibrate(prepared, [x], progress=False)
    converted = qt.convert(prepared)
    assert not any(node.target is check_size or "auxiliary" in str(node.target) for node in converted.graph.nodes)
    assert torch.equal(converted(x[:3])[0], prepared.eval()(x[:3])[0])
    for ours in (copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        assert torch.equal(ours.eval()(x[:3])[0], converted(x[:3])[0])
    result = qt.export_onnx(prepared.train(), (x,), tmp_path / "model.onnx", progress=False)
    assert result.verification is not None
    assert result.verification.weight_codes.differing == 0


def test_a_branch_that_changes_a_tensor_of_both_modes_is_warned_of() -> None:
    class Clamps(DropsInABranch):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x) * 2
            if self.training:
                x.clamp_(0, 1)
            return self.second(x)

    with pytest.warns(UserWarning, match="prepare: Python branches on self.training"):
        qt.prepare(Clamps().train(), (torch.rand(16, 4),), "onnxruntime")


class DecidesInOneMode(nn.Module):
    """Decides by values in one of the modes, which no trace can follow."""

    def __init__(self, decides_in_training: bool) -> None:
        super().__init__()
        self.fc, self.decides_in_training = linear_of(), decides_in_training

    def forward(self, x: Tensor) -> Tensor:
        if self.decides_in_training if self.training else not self.decides_in_training:
            return self.fc(x).relu() if x.sum() > 0 else self.fc(x)
        return self.fc(x).tanh()


def test_a_branch_that_no_trace_follows_is_warned_of_and_not_converted(tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning,
        match="prepare: Python branches on self.training in 0; the graph computes the branch of training mode in eval mode too",
    ):
        prepared = qt.prepare(nn.Sequential(DecidesInOneMode(False)), (torch.rand(2, 4),), backend="onnxruntime")
    qt.calibrate(prepared, [torch.rand(2, 4)], progress=False)
    for ours in (prepared, copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        with pytest.raises(
            ValueError, match="convert: Python branches on self.training in 0, and the graph has the branch"
        ):
            qt.convert(ours)
        with pytest.raises(ValueError, match="Python branches on self.training in 0"):
            qt.export_onnx(ours, (torch.rand(2, 4),), tmp_path / "model.onnx", progress=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("error:prepare", "error:train")
def test_a_model_that_is_prepared_in_eval_mode_is_warned_of_where_it_is_trained() -> None:
    model, x = nn.Sequential(DecidesInOneMode(True)).eval(), torch.rand(2, 4)
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


class ChoosesItsLoss(nn.Module):
    """Notes at its first call what the next ones compute, as transformers notes in a config which loss fits the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.loss = linear_of(), linear_of(), ""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = F.dropout(self.first(x), 0.5 if self.training else 0.0)
        if not self.loss and labels.dtype == torch.long:
            self.loss = "classes"
        return F.cross_entropy(self.second(x), labels)


@pytest.mark.filterwarnings("error:prepare", "error:train")
def test_a_mode_is_followed_where_the_first_call_sets_what_the_next_reads() -> None:
    inputs = torch.rand(16, 4), torch.randint(4, (16,))
    prepared = qt.prepare(ChoosesItsLoss().train(), inputs, "onnxruntime")
    with qt.disable_quantization(prepared):
        assert torch.equal(prepared.eval()(*inputs), prepared(*inputs))
        assert not torch.equal(prepared.train()(*inputs), prepared(*inputs))


class StochasticDepth(nn.Module):
    """A residual block whose branch is dropped for some samples in training mode, by ops of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropped(self.bn(self.conv(x))) + x

    def dropped(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = 0.5 + torch.rand([x.shape[0], 1, 1, 1], dtype=x.dtype, device=x.device)
        return x / 0.5 * kept.floor()


@pytest.mark.sweep(1)
@pytest.mark.parametrize("measured", [True, False], ids=["example", "no example"])
@pytest.mark.parametrize("backend", common_first(sorted(qt.backends)))
def test_ops_of_training_mode_do_not_change_how_the_others_are_quantized(backend: str, measured: bool) -> None:
    x = torch.randn(6, 3, 8, 8)

    def specs(training: bool) -> list[qt.QuantSpec]:
        model = nn.Sequential(nn.Conv2d(3, 8, 1), StochasticDepth(), StochasticDepth(), nn.Conv2d(8, 2, 1))
        prepared = qt.prepare(model.train(training), (x,) if measured else None, backend)
        assert prepared.graph.find_nodes(op="call_function", target=by_mode)
        return [quantizer.spec for quantizer in qt.quantizers_of(prepared).values()]

    assert specs(True) == specs(False)


class Scaled(nn.Module):
    """Computes in training mode, and has state, so that it is no leaf module."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x / self.kept if self.training else x


def test_the_mode_of_each_submodule_decides_what_another_block_takes() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.drop = linear_of(), Scaled()

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(self.fc(x)) + x

    model, x = nn.Sequential(Sum(), Sum(), linear_of()).train(), torch.rand(64, 4)
    prepared = qt.prepare(model, (x,), "onnxruntime")
    assert prepared.plan.tracing.branches == ()
    with qt.disable_quantization(prepared), torch.no_grad():
        for modes in ((True, True), (False, True), (True, False), (False, False)):
            for block, mode in zip((model[0], model[1], prepared[0], prepared[1]), modes * 2, strict=True):
                block.drop.train(mode)
            assert torch.equal(prepared(x), model(x))


def test_what_training_mode_drops_is_quantized_once_before() -> None:
    x = torch.randn(6, 3, 8, 8)
    prepared = qt.prepare(nn.Sequential(nn.Conv2d(3, 8, 1), StochasticDepth()).train(), (x,), "onnxruntime")
    (choice,) = prepared.graph.find_nodes(op="call_function", target=by_mode)
    quantizer, (add,) = choice.args[2], choice.users
    assert (str(quantizer.target), kind_of(add).name) == ("activation_quantizers._1_bn", "add")
    assert {user.name for user in quantizer.users} >= {"truediv", choice.name}
    line = next(line for line in qt.quantization_report(prepared).layers if line.name == "truediv")
    assert line.reason == "float: only training mode takes it, and no target computes it"


class Noise(nn.Module):
    """Has no state, and returns its input in eval mode, as the stochastic depth that many models bring along."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x) if self.training else x


class Halves(nn.Module):
    """Has no state, and computes in both modes."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x) if self.training else x / 2


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt", "litert"])
def test_a_leaf_module_that_returns_its_input_in_eval_mode_is_quantized_as_a_dropout_is(
    backend: str, training: bool
) -> None:
    class Block(nn.Module):
        def __init__(self, between: nn.Module) -> None:
            super().__init__()
            self.conv, self.between = nn.Conv2d(3, 3, 1), between

        def forward(self, x: Tensor) -> Tensor:
            return self.between(self.conv(x)) + x

    def specs(between: nn.Module) -> list[qt.QuantSpec]:
        prepared = qt.prepare(Block(between).train(training), torch.randn(2, 3, 4, 4), backend)
        assert (kind_of(prepared.graph.find_nodes(op="call_module", target="between")[0]).name == "identity") is (
            not isinstance(between, Halves)
        )
        again = pickle.loads(pickle.dumps(prepared))
        assert [str(kind_of(node)) for node in again.graph.nodes] == [
            str(kind_of(node)) for node in prepared.graph.nodes
        ]
        return [quantizer.spec for quantizer in qt.quantizers_of(prepared).values()]

    assert specs(Noise()) == specs(nn.Dropout(0.5))
    specs(Halves())


def test_ops_of_training_mode_between_layers(tmp_path) -> None:
    """As the drop_connect of EfficientNets: eval mode takes the values before it, and so does the exported file."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), StochasticDepth(), StochasticDepth(), nn.Conv2d(8, 2, 1)).train()
    x = torch.randn(6, 3, 8, 8)
    prepared = qt.prepare(model, (x,), "onnxruntime")
    assert prepared.plan.tracing.branches == ()
    qt.calibrate(prepared, [x], progress=False)
    with qt.disable_quantization(prepared):
        for training in (True, False):
            torch.manual_seed(1)
            ours = prepared.train(training)(x)
            torch.manual_seed(1)
            torch.testing.assert_close(ours, model.train(training)(x), atol=1e-5, rtol=1e-5)
    assert not torch.equal(prepared.train()(x), prepared(x))
    converted = qt.convert(prepared)
    assert torch.equal(converted(x), prepared.eval()(x))
    assert not converted.graph.find_nodes(op="call_function", target=torch.rand)
    found = qt.export_onnx(converted, x, tmp_path / "model.onnx").verification
    assert found.layer_codes.differing == 0
