"""The blocks of a prepared model can be read as before; what would have no effect on one is refused."""

import copy
import pickle
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.hooks import RemovableHandle

import qtoolkit as qt
from qtoolkit.graph import TracedBlock
from qtoolkit.graph.program import runs_its_graph
from tests.blocks import called_one_by_one
from tests.processes import group_of_one


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stride, self.downsample, self.hidden = (1, 1), None, object()
        self.conv, self.bn, self.relu = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(self.conv(x))) + x


class Stages(nn.Module):
    """Stages that are not called in the order of their containers."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"b": nn.Conv2d(4, 2, 1), "a": nn.Conv2d(4, 3, 1)})
        self.stem = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
        self.blocks = nn.ModuleList([Block(), Block(), nn.Identity()])
        self.unused = nn.Sequential(nn.Conv2d(4, 4, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.blocks[0](self.blocks[1](self.stem(x)))
        return self.heads["a"](x), self.heads["b"](x)


X = torch.randn(1, 4, 8, 8)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("measured", [True, False], ids=["sized", "plain"])
def test_containers_keep_their_kinds_and_orders(training: bool, measured: bool) -> None:
    model = Stages().train(training)
    prepared = qt.prepare(model, (X,) if measured else None, "onnxruntime")
    qt.calibrate(prepared, [X], progress=False)
    for ours in (prepared, copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared)), qt.convert(prepared)):
        for part, kind in ((ours.stem, nn.Sequential), (ours.blocks, nn.ModuleList), (ours.heads, nn.ModuleDict)):
            assert isinstance(part, kind)
        assert (len(ours.stem), len(ours.blocks), list(ours.heads)) == (3, 3, ["b", "a"])
        assert [type(part).__name__ for part in (ours.stem[0], ours.stem[2])] == ["QuantConv2d", "ReLU"]
        assert ours.blocks[1].conv is ours.get_submodule("blocks.1.conv")
        assert [block.conv for block in ours.blocks[:2]] == [ours.blocks[0].conv, ours.blocks[1].conv]
        assert (ours.blocks[0].stride, ours.blocks[0].downsample) == ((1, 1), None)
        assert not hasattr(ours.blocks[0], "hidden")
        assert ours.heads["a"].out_channels == 3
        assert "x Block(" in repr(ours.blocks)
    names = [name for name, _ in model.named_parameters()]
    kept = [name for name in names if training or (".bn." not in name and "stem.1" not in name)]
    assert [name for name, _ in prepared.named_parameters()] == kept


class Twice(nn.Module):
    """A block that is called twice, a list that is never called, and a layer whose weight alone is read."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.layers = Block(), nn.ModuleList([nn.Conv2d(4, 4, 1)])
        self.table = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](self.block(self.block(x))) @ self.table.weight


WHY = {
    "block": ("Block", "the model calls it 2 times"),
    "layers": ("ModuleList", "its forward is not called as one part"),
}


@pytest.mark.parametrize("name", WHY)
def test_a_block_without_a_part_of_its_own_cannot_be_called(name: str) -> None:
    kind, why = WHY[name]
    with pytest.raises(
        RuntimeError, match=rf"a {kind} of a .* cannot be called on its own: {why}.*prepare\(\.\.\., untraced="
    ):
        qt.prepare(Twice(), backend="tensorrt").get_submodule(name)(X)


@pytest.mark.parametrize(
    "register", ["forward_pre_hook", "forward_hook", "full_backward_hook", "full_backward_pre_hook"]
)
def test_such_a_block_takes_no_hooks(register: str) -> None:
    prepared = off(qt.prepare(Twice(), backend="tensorrt"))
    getattr(prepared.block.conv, f"register_{register}")(lambda *args: None)
    prepared(X)
    with removed(getattr(prepared.block, f"register_{register}")(lambda *args: None)), refuses("the model calls it 2"):
        prepared(X)
    prepared(X)


def test_such_a_block_cannot_be_wrapped_sharded_or_compiled() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def given_a_forward(model: nn.Module) -> None:
        model.block.forward = lambda x: x

    wrapped, compiled, replaced, sharded = (off(qt.prepare(Twice(), backend="tensorrt")) for _ in range(4))
    apply_activation_checkpointing(wrapped, check_fn=lambda module: isinstance(module, Block))
    compiled.block.compile(backend="eager")
    given_a_forward(replaced)
    with group_of_one():
        fully_shard(sharded.block, mesh=init_device_mesh("cpu", (1,)))
        for model in (wrapped, compiled, replaced, sharded):
            with refuses("the model calls it 2"):
                model(X)


def test_every_block_takes_hooks_of_all_modules() -> None:
    with called_one_by_one():
        off(qt.prepare(Twice(), backend="tensorrt"))(X)


@pytest.mark.parametrize("name", ["stem", "blocks"])
def test_a_block_is_replaced_by_a_wrapper_only(name: str) -> None:
    prepared = off(qt.prepare(Stages(), backend="tensorrt"))
    prepared.blocks[1] = checkpoint_wrapper(prepared.blocks[1])
    assert prepared.blocks[1].conv is prepared.get_submodule("blocks.1.conv")
    assert not runs_its_graph(prepared)
    prepared(X)
    prepared.add_module(name, nn.Sequential(nn.Identity()))
    why = {
        "stem": "the graph calls the layers in it, which the new value does not have",
        "blocks": "its forward is not",
    }
    with pytest.raises(RuntimeError, match=rf"of a prepared model cannot be .*replaced.*: {why[name]}"):
        prepared(X)


def test_layers_of_a_wrapped_block_can_be_replaced() -> None:
    prepared = off(qt.prepare(Stages(), backend="tensorrt"))
    prepared.blocks[1] = checkpoint_wrapper(prepared.blocks[1])
    for name in ("blocks.1.relu", "blocks.1._checkpoint_wrapped_module.relu"):
        new = nn.Tanh()
        prepared.set_submodule(name, new)
        assert prepared.blocks[1]._checkpoint_wrapped_module._modules["relu"] is new
    with pytest.raises(AttributeError, match="other"):
        prepared.set_submodule("other.relu", nn.Tanh())
    assert not prepared.delete_submodule("stem.9")
    assert not prepared.delete_submodule("other.relu")
    assert prepared.delete_submodule("blocks.1.relu")
    assert "relu" not in prepared.blocks[1]._checkpoint_wrapped_module._modules


# ---- classes


class Named(Block):
    """A class with what would break a module that holds layers alone."""

    kinds = ("named",)
    subclasses = modes = 0

    def __init_subclass__(cls) -> None:
        Named.subclasses += 1

    def __getattr__(self, name: str) -> object:
        return self.lost if name == "hidden" else super().__getattr__(name)

    def train(self, mode: bool = True) -> nn.Module:
        Named.modes += 1
        return super().train(mode)

    def extra_repr(self) -> str:
        return str(self.hidden)

    @property
    def channels(self) -> int:
        return self.conv.out_channels

    @property
    def lost(self) -> object:
        return self.hidden

    def twice(self) -> int:
        return 2 * self.channels

    def __deepcopy__(self, memo: dict[int, object]) -> "Named":
        result = Named.__new__(Named)
        result.__setstate__(copy.deepcopy(vars(self), memo))
        return result


class Weight(nn.Conv2d):
    """A layer with a forward of its own, which is traced."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x, self.weight * 2, self.bias)


@pytest.mark.parametrize(
    "copied", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), qt.convert],
    ids=["prepared", "copy", "pickle", "converted"],
)  # fmt: skip
def test_a_block_is_of_its_class(copied) -> None:
    model = nn.Sequential(Named(), Weight(4, 4, 1), nn.Flatten(2), nn.TransformerEncoderLayer(64, 2, 8))
    prepared = qt.prepare(model, (X,), preserve_attributes=["0.channels"], backend="tensorrt")
    qt.calibrate(prepared, [X], progress=False)
    Named.modes = 0
    named, weight, _, layer = copied(prepared)
    assert isinstance(named, Block)
    assert isinstance(named, TracedBlock)
    assert isinstance(layer, nn.TransformerEncoderLayer)
    assert type(named).__name__ == "Named"
    assert (named.kinds, named.channels, named.twice(), Named.subclasses) == (("named",), 4, 8, 0)
    assert not isinstance(weight, nn.Conv2d), "code that looks for layers must not find it"
    assert "Named(" in repr(named)
    assert (named.train(), Named.modes) == (named, 0), "the methods of nn.Module are torch's"


class Scaled(nn.Module):
    """A block whose class has a tensor, which forward replaces by one of the input's size, as YOLO's heads replace anchors."""

    table = torch.empty(0)

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.size = nn.Conv2d(4, 4, 1), torch.Size()

    def forward(self, x: Tensor) -> Tensor:
        if self.size != x.shape:
            self.table, self.size = torch.linspace(1, 2, x.shape[-1]), x.shape
        return self.conv(x) * self.table


@pytest.mark.parametrize("ran", [True, False], ids=["ran", "new"])
def test_a_tensor_of_the_class_gives_way_to_the_one_of_the_block(ran: bool) -> None:
    model = nn.Sequential(Scaled(), nn.ReLU()).eval()
    expected = copy.deepcopy(model)(X)
    if ran:
        model(X)
    prepared = qt.prepare(model, (X,), "onnxruntime")
    qt.disable_quantization(prepared).apply()
    for ours in (prepared, copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        assert torch.equal(ours(X), expected)
    assert "0.table" not in prepared.state_dict()


def test_pickles_load_without_the_class() -> None:
    class Local(Block):
        pass

    class Layers(nn.Sequential):
        pass

    prepared = qt.prepare(nn.Sequential(Local(), Layers(Block())).eval(), (X,), backend="tensorrt")
    qt.calibrate(prepared, [X], progress=False)
    once = pickle.loads(pickle.dumps(prepared))
    for loaded in (once, pickle.loads(pickle.dumps(once))):
        assert [block.block_type for block in loaded] == ["Local", "Layers"]
        assert not isinstance(loaded[0], Block)
        assert isinstance(loaded[1], nn.Sequential)
        assert torch.equal(loaded[1](loaded[0](X)), prepared(X))
    assert type(copy.deepcopy(prepared)[0]).__name__ == "Local"


def test_a_sequential_model_is_read_by_index() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Sequential(Block()), nn.ReLU())
    prepared = qt.prepare(model, (X,), backend="tensorrt")
    qt.calibrate(prepared, [X], progress=False)
    for ours in (prepared, copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared)), qt.convert(prepared)):
        assert isinstance(ours, nn.Sequential)
        assert len(ours) == 4
        assert [ours[-1], ours[2][0]] == [ours.get_submodule("3"), ours.get_submodule("2.0")]
        assert list(ours) == [*ours[:2], *ours[2:]]
    with pytest.raises(
        RuntimeError, match="a Sequential .* called on its own: the quantizers between its layers are not in"
    ):
        prepared[:2](X)
    with pytest.raises(TypeError, match="no len"):
        len(qt.prepare(Stages(), backend="tensorrt"))


def test_the_remedy_works() -> None:
    model = Stages().train()
    prepared = qt.prepare(model, (X,), "onnxruntime", untraced=["blocks.0", "blocks.1"])
    qt.calibrate(prepared, [X], progress=False)
    expected = prepared(X)
    apply_activation_checkpointing(prepared, check_fn=lambda module: isinstance(module, Block))
    for ours, theirs in zip(prepared(X), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    sum(y.sum() for y in prepared(X)).backward()
    assert prepared.get_parameter("blocks.0._checkpoint_wrapped_module.conv.weight").grad is not None


def test_layers_can_be_replaced() -> None:
    model = Stages().eval()
    prepared = qt.prepare(model, (X,), backend="tensorrt")
    model.blocks[0].relu = prepared.blocks[0].relu = nn.Tanh()
    nets_equal = [torch.allclose(a, b, atol=1e-5) for a, b in zip(off(prepared)(X), model(X), strict=True)]
    assert nets_equal == [True, True]


def test_no_layer_is_added_or_removed() -> None:
    prepared, sequential = (
        qt.prepare(Stages(), backend="tensorrt"),
        qt.prepare(nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()), backend="tensorrt"),
    )
    for container in (prepared.stem, prepared.blocks, sequential):
        with pytest.raises(RuntimeError, match="no layer can be added to a .* of a prepared model"):
            container.append(nn.ReLU())
        with pytest.raises(RuntimeError, match="or removed from it: its graph would not change"):
            del container[0]
    with pytest.raises(RuntimeError, match="a ModuleDict of a prepared model"):
        prepared.heads.pop("a")


def off(model: nn.Module) -> nn.Module:
    qt.disable_quantization(model).apply()
    return model


@contextmanager
def removed(handle: RemovableHandle) -> Iterator[None]:
    yield
    handle.remove()


def refuses(why: str) -> AbstractContextManager[object]:
    """Expect the error of a model whose block, called "block", runs no part of its graph and is watched."""
    said = rf"a Block of a prepared model cannot be hooked, .*: {why}.*untraced=\['block'\]"
    return pytest.raises(RuntimeError, match=said)


class Annealed(nn.Module):
    """Numbers that scripts change from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.fc, self.alpha = Tempered(), nn.Linear(4, 4), 1.0
        self.calls = 0  # a name of prepared models too

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.block(x)) * self.alpha


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.temperature = nn.Linear(4, 4), 2.0

    def set_temperature(self, value: float) -> None:
        self.temperature = value

    def forward(self, x: Tensor) -> Tensor:
        return (self.fc(x) / self.temperature).softmax(-1)


def test_a_number_that_the_graph_has_already_is_not_changed_without_a_word(recwarn) -> None:
    prepared = copy.deepcopy(qt.prepare(Annealed(), backend="tensorrt"))
    prepared.alpha, prepared.block.temperature, prepared.block.mine = 1.0, 2, "something new"
    qt.calibrate(prepared.train().eval(), [torch.randn(2, 4)], progress=False)
    qt.convert(pickle.loads(pickle.dumps(prepared)))
    assert not [str(warning.message) for warning in recwarn if "attribute" in str(warning.message)]
    with pytest.warns(UserWarning, match="'alpha' of the prepared model was 1.0 .* a new value has no effect"):
        prepared.alpha = 0.5
    recwarn.clear()
    prepared.alpha = 0.25  # told once
    assert not recwarn.list
    with pytest.warns(UserWarning, match="'temperature' of block 'block' of the prepared model was 2"):
        prepared.block.set_temperature(0.5)
