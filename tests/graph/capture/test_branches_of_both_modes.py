"""Models whose forward has ops of its own in each mode: one graph has both branches, and the mode chooses."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.graph import by_mode
from qtoolkit.op_kinds.table import KINDS
from tests import nets
from tests.sweep import common_first

# Backends that quantize convolutions.
CONVOLVING = sorted(name for name, backend in qt.backends.items() if backend.role(KINDS["conv"]) == "compute")


class Unit(nn.Sequential):
    """A convolution with its batch norm and ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


class Detector(nn.Module):
    """A head on two maps that returns the maps in training mode, and decoded boxes beside them in eval mode."""

    class Head(nn.Module):
        anchors: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.boxes = nn.ModuleList(nn.Sequential(Unit(8, 8), nn.Conv2d(8, 4, 1)) for _ in range(2))
            self.scores = nn.ModuleList(nn.Sequential(Unit(8, 8), nn.Conv2d(8, 3, 1)) for _ in range(2))
            self.register_buffer("anchors", torch.rand(2, 80))

        def forward(self, maps: list[Tensor]) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
            found = [
                torch.cat((boxes(x), scores(x)), 1)
                for boxes, scores, x in zip(self.boxes, self.scores, maps, strict=True)
            ]
            if self.training:
                return found
            boxes, scores = torch.cat([x.flatten(2) for x in found], 2).split((4, 3), 1)
            corners, sizes = boxes.sigmoid().chunk(2, 1)
            return torch.cat((corners + self.anchors, sizes * 2, scores.sigmoid()), 1), found

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = Unit(3, 8, 2), Unit(8, 8, 2), Detector.Head()

    def forward(self, x: Tensor) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        x = self.stem(x)
        return self.head([x, self.body(x)])


class Auxiliary(nn.Module):
    """Returns what a second classifier computes too in training mode, and probabilities in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.fc = Unit(3, 8, 2), Unit(8, 8), nn.Linear(8, 5)
        self.auxiliary = nn.Sequential(Unit(8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        x = self.stem(x)
        extra = self.auxiliary(x) if self.training else None
        x = self.fc(self.body(x).mean((2, 3)))
        return x.softmax(1) if extra is None else (x, extra)


class Chooses(nn.Module):
    """Calls another submodule in each mode, between layers of both."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = Unit(8, 8), nn.Sequential(nn.Conv2d(8, 8, 1), nn.Hardswish())

        def forward(self, x: Tensor) -> Tensor:
            return self.wide(x) + x if self.training else self.narrow(x)

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.last = Unit(3, 8, 2), Chooses.Block(), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(self.stem(x)))


class Nested(Detector):
    """Eval mode alone calls a submodule that branches too."""

    class Refine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(7, 7, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x).relu() if self.training else self.conv(x).sigmoid()

    def __init__(self) -> None:
        super().__init__()
        self.refine = Nested.Refine()

    def forward(self, x: Tensor) -> Any:
        found = super().forward(x)
        return found if self.training else (self.refine(found[0]), found[1])


NETS = [Detector, Auxiliary, Chooses, Nested]
BOTH = pytest.mark.parametrize("training", [True, False], ids=["prepared in train", "in eval"])
pytestmark = pytest.mark.filterwarnings("error:prepare", "error:train", "error:convert", "ignore:quantizer")


def images(count: int = 4) -> Tensor:
    return torch.rand(count, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def made(kind: type[nn.Module]) -> nn.Module:
    """A model with random weights and statistics."""
    torch.manual_seed(0)
    return nets.trained(kind(), 4, 3, 16, 16)


def prepared_of(kind: type[nn.Module], training: bool, backend: str = "onnxruntime") -> qt.graph.QuantizedGraphModule:
    prepared = qt.prepare(made(kind).train(training), (images(),), backend)
    assert prepared.plan is not None
    assert prepared.plan.tracing.branches == ()
    qt.calibrate(prepared, [images()], progress=False)
    return prepared


def tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [tensor for each in value for tensor in tensors(each)]


def structure(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, Tensor) else type(value)(map(structure, value))


@BOTH
@pytest.mark.parametrize("kind", NETS)
def test_each_mode_computes_what_the_float_model_does(kind: type[nn.Module], training: bool) -> None:
    model, prepared = made(kind), prepared_of(kind, training)
    for ours in (prepared, copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        theirs = copy.deepcopy(model)
        with qt.disable_quantization(ours), torch.no_grad():
            for mode in (False, True):
                found, expected = ours.train(mode)(images()), theirs.train(mode)(images())
                assert structure(found) == structure(expected)
                for one, two in zip(tensors(found), tensors(expected), strict=True):
                    if training or not mode:  # a model that was prepared in eval mode has its batch norms folded
                        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("kind", NETS)
def test_it_trains_and_is_deployed(kind: type[nn.Module], training: bool, tmp_path: Path) -> None:
    prepared = prepared_of(kind, training).train()
    optimizer = torch.optim.SGD(prepared.parameters(), 0.01)
    for _ in range(3):
        optimizer.zero_grad()
        sum(each.square().mean() for each in tensors(prepared(images()))).backward()
        optimizer.step()
    converted = qt.convert(prepared)
    assert not converted.graph.find_nodes(op="call_function", target=by_mode)
    found, expected = converted(images()), made(kind).eval()(images())
    assert structure(found) == structure(expected)
    assert all(map(torch.equal, tensors(found), tensors(prepared.eval()(images()))))
    result = qt.export_onnx(prepared.train(), (images(),), tmp_path / "model.onnx", progress=False)
    assert result.verification is not None
    assert result.verification.layer_codes.differing == 0
    assert prepared.training


def of_eval_mode(model: nn.Module) -> nn.Module:
    """The model with the branches of eval mode alone."""
    training = property(lambda self: False, lambda self, mode: None)
    for module in model.modules():
        if type(module).__module__ == __name__:
            module.__class__ = type(type(module).__name__, (type(module),), {"training": training})
    return model.eval()


def ops(model: torch.fx.GraphModule) -> list[tuple[str, str, str]]:
    return [(node.name, str(node.target), str((node.args, node.kwargs))) for node in model.graph.nodes]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("backend", common_first(CONVOLVING))
@pytest.mark.parametrize("kind", NETS)
def test_eval_mode_is_quantized_as_a_model_without_the_branches_of_training_mode(
    kind: type[nn.Module], backend: str
) -> None:
    found = []
    for model in (of_eval_mode(made(kind)), made(kind).eval()):
        prepared = qt.prepare(model, (images(),), backend)
        qt.calibrate(prepared, [images()], progress=False)
        found.append(qt.convert(prepared))
    assert ops(found[0]) == ops(found[1])
    assert all(map(torch.equal, *(tensors(model(images())) for model in found)))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("backend", common_first(CONVOLVING))
@pytest.mark.parametrize("kind", NETS)
def test_prepared_in_either_mode_it_has_the_same_quantizers(kind: type[nn.Module], backend: str) -> None:
    of_mode = []
    for training in (True, False):
        prepared = qt.prepare(made(kind).train(training), (images(),), backend).eval()
        qt.calibrate(prepared, [images()], progress=False)
        of_mode.append(prepared)
    one, two = (
        [q for q in qt.quantizers_of(each).values() if q.ready or not q.of_weight] for each in of_mode
    )  # not of weights
    assert sorted(str(q.spec) for q in one) == sorted(str(q.spec) for q in two)
    for a, b in zip(tensors(of_mode[0](images())), tensors(of_mode[1](images())), strict=True):
        assert (a - b).abs().max() <= 0.05 * b.abs().max()


@pytest.mark.parametrize("whole", [True, False], ids=["all of it", "its batch norm"])
def test_a_head_of_training_mode_that_is_set_to_it_alone_keeps_its_statistics(whole: bool) -> None:
    """The float model does not call it in eval mode."""
    prepared = prepared_of(Auxiliary, training=True).eval()
    wanted = tensors(prepared(images()))
    head = prepared.get_submodule("auxiliary" if whole else "auxiliary.0.1").train()
    before = {name: tensor.clone() for name, tensor in prepared.state_dict().items()}
    assert all(map(torch.equal, tensors(prepared(images())), wanted))
    assert all(torch.equal(tensor, before[name]) for name, tensor in prepared.state_dict().items())
    assert head.training
    prepared.train()(images())
    changed = {name for name, tensor in prepared.state_dict().items() if not torch.equal(tensor, before[name])}
    assert "auxiliary.0.1.running_mean" in changed


class DropsInTraining(nn.Module):
    """A head of training mode with dropouts by function, one of which reads the mode of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head, self.last = Unit(3, 8), nn.Conv2d(8, 2, 1), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.stem(x)
        if not self.training:
            return self.last(x)
        head = self.head(nn.functional.dropout2d(nn.functional.dropout(x), 0.2, True))
        return self.last(nn.functional.dropout(x, 0.1, self.training)), head


def test_dropouts_of_training_mode_alone_draw_no_random_numbers_in_eval_mode() -> None:
    prepared, x = prepared_of(DropsInTraining, training=True).eval(), images()
    before = torch.get_rng_state()
    prepared(x)
    assert torch.equal(torch.get_rng_state(), before)
    first, second = (prepared.train()(x) for _ in range(2))
    assert not torch.equal(torch.get_rng_state(), before)
    for one, two in zip(first, second, strict=True):
        assert not torch.equal(one, two)


def test_training_mode_does_not_run_what_eval_mode_alone_takes() -> None:
    prepared, calls = prepared_of(Chooses, training=True), []
    prepared.get_submodule("block.narrow.0").register_forward_hook(lambda *_: calls.append("narrow"))
    prepared.train()(images()).mean().backward()
    with torch.no_grad():
        prepared(images())
    assert not calls
    prepared.block.eval()  # the mode of the submodule that branches decides
    found = prepared(images())
    assert calls == ["narrow"]
    prepared.block.train()
    assert not torch.equal(found, prepared(images()))
    prepared.eval()(images())
    assert calls == ["narrow", "narrow"]


def test_layers_of_each_branch_and_of_both_are_quantized() -> None:
    report = qt.quantization_report(prepared_of(Chooses, training=True))
    layers = {line.name: line.status for line in report.layers if line.name.endswith(("0", "last"))}
    assert set(layers) == {"stem.0", "block.wide.0", "block.narrow.0", "last"}
    assert {str(status) for status in layers.values()} == {"quantized"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Detector, Chooses])  # eval mode alone has functions; and modules
def test_compiled_code_follows_the_mode(kind: type[nn.Module]) -> None:
    prepared = prepared_of(kind, training=True)
    compiled = torch.compile(prepared, backend="eager", fullgraph=True)
    for mode in (True, False, True):
        compiled.train(mode)
        with torch.no_grad(), qt.disable_quantization(prepared):
            state = copy.deepcopy(prepared.state_dict())
            found = compiled(images())
            prepared.load_state_dict(state)
            assert structure(found) == structure(prepared(images()))
            prepared.load_state_dict(state)


@BOTH
def test_torch_export_captures_branches_that_return_the_same_containers(training: bool) -> None:
    class Adds(Chooses.Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.training else super().forward(x) + torch.tensor([0.5, 1.0]).repeat(4)

    model = made(Chooses)
    model.block.__class__ = Adds
    prepared = qt.prepare(model.train(training), (images(),), "onnxruntime", capture="export")
    assert prepared.graph.find_nodes(op="call_function", target=by_mode)
    qt.calibrate(prepared, [images()], progress=False)
    with qt.disable_quantization(prepared), torch.no_grad():
        for mode in (False, True) if training else (False,):
            torch.testing.assert_close(
                prepared.train(mode)(images()), model.train(mode)(images()), atol=1e-5, rtol=1e-5
            )
    assert torch.equal(qt.convert(prepared)(images()), prepared.eval()(images()))


@pytest.mark.filterwarnings("ignore:prepare")
@pytest.mark.parametrize("items", [1, 2])
def test_training_mode_writes_no_items_of_a_tensor_that_eval_mode_reads(items: int) -> None:
    class Masks(Chooses):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            for channel in range(items if self.training else 0):
                x[:, channel] = 0
            return super().forward(x)

    model = made(Masks)
    with pytest.warns(UserWarning, match="branches on self.training in Masks"):
        prepared = qt.prepare(model.train(), (images(),), "onnxruntime")
    with qt.disable_quantization(prepared), torch.no_grad():
        torch.testing.assert_close(prepared(images()), model(images()), atol=1e-5, rtol=1e-5)


@BOTH
def test_eval_mode_may_write_items_of_a_tensor_of_its_own(training: bool) -> None:
    class Marks(Chooses):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            if self.training:
                return x
            x = x.sigmoid()
            x[:, 0], x[:, 1] = 0, 1
            return x * 2

    prepared = prepared_of(Marks, training)
    with qt.disable_quantization(prepared), torch.no_grad():
        torch.testing.assert_close(prepared.eval()(images()), made(Marks).eval()(images()), atol=1e-5, rtol=1e-5)


class Stage(nn.Module):
    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers["trains"](x) if self.training else self.layers["evaluates"](x) * x


def test_two_submodules_that_may_be_in_different_modes_are_not_merged_where_one_takes_the_branch_of_the_other() -> None:
    def stage() -> nn.Module:
        return Stage(trains=nn.Conv2d(3, 3, 1), evaluates=nn.Conv2d(3, 3, 3, padding=1))

    model, x = nn.Sequential(stage(), stage()).train(), torch.randn(2, 3, 8, 8)
    with pytest.warns(
        UserWarning, match=r"Python branches on self\.training in 0, 1; the graph computes the branch of"
    ):
        prepared = qt.prepare(model, (x,), "onnxruntime")
    with qt.disable_quantization(prepared):
        torch.testing.assert_close(prepared(x), model(x))
