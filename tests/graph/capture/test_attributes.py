"""Tensors in attributes, lists, caches and modules of Python: what a forward reads of them, and what it stores there."""

import copy
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import qtoolkit as qt
from qtoolkit.model_state import values_kept
from tests.nets import linear_of

CAPTURES = ("trace", "export")


def check(model: nn.Module, x: Tensor, capture: str = "trace") -> nn.Module:
    """Prepare a model, which is as before then, and compare both in float, before and after a conversion."""
    before = copy.deepcopy(model)
    prepared = qt.prepare(model, x, "onnxruntime", capture=capture)
    with torch.no_grad():
        expected = before(x)
        assert torch.equal(model(x), expected)
    with qt.disable_quantization(prepared):
        torch.testing.assert_close(prepared(x), expected)
    qt.calibrate(prepared, [x], progress=False)
    assert qt.convert(prepared)(x).shape == expected.shape
    return prepared


# ---- expanded views


class Expanded(nn.Module):
    """A grid that is an expanded view, as detectors keep the places of their anchors."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.conv = kind, nn.Conv2d(3, 4, 1)
        grid = torch.arange(8.0).view(1, 1, 1, 8).expand(1, 1, 8, 8)
        if "buffer" in kind:
            self.register_buffer("grid", grid)
        else:
            self.grid = [grid] if kind == "list" else grid

    def forward(self, x: Tensor) -> Tensor:
        grid = 0 if "unused" in self.kind else self.grid[0] if self.kind == "list" else self.grid
        return self.conv(x) + grid


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("kind", ["buffer", "unused buffer", "attribute", "list"])
def test_a_tensor_that_is_an_expanded_view_is_kept(kind: str, capture: str) -> None:
    check(Expanded(kind).eval(), torch.rand(2, 3, 8, 8), capture)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(3.0).expand(2, 3),
        torch.zeros(1, 1).expand(4, 0),
        torch.zeros(()),
        torch.zeros(4).as_strided((3, 2), (1, 1)),
        torch.eye(3).to_sparse(),
    ],
    ids=["expanded", "empty", "scalar", "overlapping", "sparse"],
)
def test_values_of_any_tensor_are_put_back(tensor: Tensor) -> None:
    before = tensor.clone()
    with values_kept([tensor]):
        if tensor.layout is torch.strided and tensor.dim() and len(tensor):
            tensor[:1, :1].fill_(7)
    assert torch.equal(tensor.to_dense(), before.to_dense())


# ---- tensors that are no buffers


class Plain(nn.Module):
    """Reads a mask that is no buffer, as CLIP's blocks do, and makes constants."""

    def __init__(self, how: str, mask: Tensor | None) -> None:
        super().__init__()
        self.how, self.fc, self.mask = how, linear_of(), mask

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x) * torch.tensor([0.5, 1.0, 2.0, 4.0])
        if self.how == "read":
            return y * self.mask
        if self.how == "cast":
            return y * self.mask.to(dtype=x.dtype, device=x.device)
        self.mask = self.mask.to(dtype=x.dtype, device=x.device) if self.mask is not None else None
        return y if self.mask is None else y * self.mask


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("how", ["read", "cast", "stored cast", "none"])
@pytest.mark.parametrize("shared", [True, False])
def test_blocks_read_and_cast_a_tensor_that_is_no_buffer(how: str, shared: bool, capture: str) -> None:
    mask = torch.rand(4)
    masks = [None, None] if how == "none" else [mask, mask if shared else torch.rand(4)]
    model = nn.Sequential(*(nn.Sequential(Plain(how, mask)) for mask in masks)).eval()
    prepared = check(model, torch.randn(3, 4), capture)
    assert set(prepared.state_dict()) >= set(model.state_dict())


# ---- what a forward stores


class Holder:
    """An object of a user's class."""

    def __init__(self, value: Tensor | None = None) -> None:
        self.value, self.values, self.itself = value, [], self


class Stores(nn.Module):
    """Stores what no forward reads, or reads what it has stored."""

    shown: dict[str, Tensor] = {}
    map_of_class: Tensor | None = None
    calls = 0

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.fc, self.out = how, linear_of(), linear_of()
        self.map: Tensor | None = None
        self.maps: list[Tensor] = []
        self._kept: dict[str, list[Tensor]] = {}
        self.queue, self.seen, self.held = deque[Tensor](maxlen=2), set[Tensor](), Holder()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.fc(x))
        match self.how:
            case "attribute":
                self.map = y * 2
            case "written, then read":
                self.map = y.mean(1, keepdim=True).detach()
                return self.out(y - self.map) + self.map
            case "tuple":
                self.pair = (y, y + 1)
            case "list":
                self.maps.append(y)
            case "new list":
                self.maps = [y, y + 1]
            case "item":
                self.maps[:1] = [y]
            case "entry":
                self._kept["y"] = [y]
            case "dict of a class":
                Stores.shown["y"] = y
            case "dict of a module":
                GRIDS["y"] = y
            case "queue":
                self.queue.append(y)
            case "set":
                self.seen.add(y)
            case "object":
                self.held.value, self.held.values = y, [y]
            case "new object":
                self.held = Holder(y)
            case "attribute of a class":
                Stores.map_of_class = y
            case "variable of a module":
                globals()["LAST"] = y
            case "counter":
                self.calls += 1
            case "remade for another size":
                if self.map is None or self.map.shape != x.shape:
                    self.map = x.new_ones(x.shape)
                return self.out(y * self.map)
        return self.out(y)


GRIDS: dict[str, Tensor] = {}
LAST: Tensor | None = None
STORES = (
    "attribute", "written, then read", "tuple", "list", "new list", "item", "entry", "dict of a class", "dict of a module",
    "queue", "set", "object", "new object", "attribute of a class", "variable of a module", "counter",
    "remade for another size",
)  # fmt: skip


def state_of(model: Stores) -> list[object]:
    held = [*model.queue, *model.seen, model.held.value, model.held.values, Stores.map_of_class, LAST, model.calls]
    return [getattr(model, "pair", None), model.map, model.maps, model._kept, Stores.shown, GRIDS, *held]


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("how", STORES)
def test_what_no_later_forward_reads_is_stored_by_the_model_alone(how: str, ran: bool, capture: str) -> None:
    Stores.shown.clear()
    GRIDS.clear()
    globals()["LAST"] = Stores.map_of_class = None
    model, x = nn.Sequential(Stores(how)).eval(), torch.randn(3, 4)
    if ran:
        model(x[:2])
        globals()["LAST"] = Stores.map_of_class = None
    before = tree_leaves(state_of(model[0]))
    for _ in range(2):
        prepared = qt.prepare(model, x, "onnxruntime", capture=capture)
        assert all(a is b for a, b in zip(tree_leaves(state_of(model[0])), before, strict=True))
        held = [*state_of(model[0]), *(value for module in prepared.modules() for value in vars(module).values())]
        assert {type(leaf) for leaf in tree_leaves(held) if isinstance(leaf, Tensor)} <= {Tensor, nn.Parameter}
        assert not any(isinstance(leaf, torch.fx.Proxy | torch.SymInt) for leaf in tree_leaves(held))
    with qt.disable_quantization(prepared):
        torch.testing.assert_close(prepared(x), model(x))


class Remembers(nn.Module):
    """Reads what the forward before has stored: from the start, or once one has stored something."""

    of_class: Tensor | None = None

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.fc, self.hidden, self.states = how, linear_of(), torch.zeros(4), [torch.zeros(4)]
        self.memory, self.last, self.holder, self.queue = {"h": torch.zeros(4)}, None, Holder(), deque[Tensor](maxlen=2)
        self.space, self.calls = SimpleNamespace(y=None), 0
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        match self.how:
            case "attribute":
                y = y + self.hidden
                self.hidden = y.mean(0)
            case "a function of it":
                y = y + self.hidden * 0.9
                self.hidden = y.mean(0)
            case "item":
                y = y + self.states[0]
                self.states[0] = y.mean(0)
            case "end of a list":
                y = y + self.states[-1]
                self.states.append(y.mean(0))
            case "entry":
                y = y + self.memory["h"].neg()
                self.memory["h"] = y.mean(0)
            case "buffer":
                self.mean = y.mean(0)
            case "first none":
                y = y if self.last is None else y + self.last
                self.last, self.how = y, "first none"
            case "first no entry":
                y = y + self.memory.get("last", 0)
                self.memory["last"] = y
            case "object":
                y = y if self.holder.value is None else y + self.holder.value
                self.holder.value = y
            case "namespace":
                y = y if self.space.y is None else y + self.space.y
                self.space.y = y
            case "queue":
                self.queue.append(y)
                y = sum(self.queue)
            case "class":
                y = y if self.of_class is None else y + self.of_class
                Remembers.of_class = y
            case "variable":
                y = y if LAST is None else y + LAST
                globals()["LAST"] = y
            case "number":
                self.calls += 1
                y = y / self.calls
            case "stored in training":
                if self.training:
                    self.last = y.mean(0)
                elif self.last is not None:
                    y = y - self.last
        return y


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("attribute", "attribute '0.hidden'"),
        ("a function of it", "attribute '0.hidden'"),
        ("item", "item '0.states.0'"),
        ("end of a list", "item '0.states.1'"),
        ("entry", "entry '0.memory.h'"),
        ("buffer", "buffer '0.mean'"),
    ],
)
def test_what_the_next_forward_reads_is_refused(how: str, name: str) -> None:
    model = nn.Sequential(Remembers(how)).eval()
    before = dict(vars(model[0]))
    sentence = f"the forward reads and assigns to {name}, which a graph does not record; .*write into .* with copy_"
    with pytest.raises(qt.UntraceableError, match=sentence) as error:
        qt.prepare(model, torch.randn(3, 4), "onnxruntime", inplace=True)
    assert error.value.untraced == "0"
    assert all(vars(model[0])[key] is value for key, value in before.items())


LATER = {
    "attribute": "attribute '0.hidden'", "item": "item '0.states.0'", "entry": "entry '0.memory.h'",
    "first none": "attribute '0.last'", "first no entry": "entry '0.memory.last'", "object": "attribute '0.holder.value'",
    "namespace": "attribute '0.space.y'", "queue": "item '0.queue.0'", "class": "attribute 'Remembers.of_class'",
    "variable": "variable 'tests.graph.capture.test_attributes.LAST'", "number": "attribute '0.calls'",
    "stored in training": "attribute '0.last'",
}  # fmt: skip


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("how", LATER)
def test_what_a_later_forward_would_read_is_refused(how: str, capture: str) -> None:
    globals()["LAST"] = Remembers.of_class = None
    model = nn.Sequential(Remembers(how)).train(how == "stored in training")
    before = {key: value for key, value in vars(model[0]).items() if key != "training"}
    with pytest.raises(
        qt.UntraceableError, match=f"reads and assigns to {LATER[how]}, .*register a buffer for it"
    ) as error:
        qt.prepare(model, torch.randn(3, 4), "onnxruntime", inplace=True, capture=capture)
    assert "capture=" not in str(error.value)
    assert "rewrite that line" not in str(error.value)
    assert LAST is None
    assert Remembers.of_class is None
    if capture == "trace":  # the number of its calls is no traced value
        assert all(vars(model[0])[key] is value for key, value in before.items() if key != "calls")


def test_a_leaf_module_keeps_its_state() -> None:
    model, x = nn.Sequential(Remembers("first none"), linear_of()).eval(), torch.randn(3, 4)
    prepared = qt.prepare(model, x, "onnxruntime", untraced=["0"])
    with qt.disable_quantization(prepared), torch.no_grad():
        for batch in (x[:1], x[:1] + 1, x[:1]):
            torch.testing.assert_close(prepared(batch), model(batch))


class WritesInto(nn.Module):
    """Writes into a tensor that is no buffer, which a graph records."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.total, self.shown = linear_of(), torch.zeros(4), None

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        self.total.add_(y.mean(0))
        self.shown = y
        return y + self.total


@pytest.mark.parametrize("capture", CAPTURES)
def test_a_forward_may_write_into_a_tensor_that_is_no_buffer(capture: str) -> None:
    model, x = nn.Sequential(WritesInto()).eval(), torch.randn(3, 4)
    prepared = qt.prepare(model, x, "onnxruntime", capture=capture)
    assert not model[0].total.any()
    with qt.disable_quantization(prepared), torch.no_grad():
        for batch in (x, x[:2], x):
            torch.testing.assert_close(prepared(batch), model(batch))


def test_a_container_that_contains_itself_is_no_obstacle() -> None:
    model, x = nn.Sequential(Stores("entry")).eval(), torch.randn(3, 4)
    model(x)
    GRIDS["itself"] = GRIDS
    try:
        prepared = qt.prepare(model, x, "onnxruntime")
    finally:
        GRIDS.clear()
    with qt.disable_quantization(prepared):
        torch.testing.assert_close(prepared(x), model(x))


class ByName(nn.Module):
    """Looks up what it has by dotted names, and keeps a list that contains itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.sizes = nn.Sequential(linear_of()), [1]
        self.sizes.append(self.sizes)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.get_parameter("body.0.weight")
        return self.get_submodule("body.0")(x) * weight.mean(0) * self.sizes[0] + self.get_buffer("shift")


@pytest.mark.parametrize("capture", CAPTURES)
def test_a_forward_finds_parameters_buffers_and_submodules_by_name(capture: str) -> None:
    model = ByName().eval()
    if capture == "export":  # torch.export recurses into such a list without end
        model.sizes = [1]
    check(model, torch.randn(3, 4), capture)


def test_a_parameter_is_found_by_name_without_example_inputs_too() -> None:
    model, x = ByName().eval(), torch.randn(3, 4)
    prepared = qt.prepare(model, None, "onnxruntime")
    with qt.disable_quantization(prepared):
        torch.testing.assert_close(prepared(x), model(x))
