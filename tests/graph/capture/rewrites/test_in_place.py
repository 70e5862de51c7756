"""In-place ops whose results the forward does not use: later readers of the tensor read the changed one."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt


class Net(nn.Module):
    """Two layers, with a function of the first one's output and the input between them."""

    def __init__(self, between: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head, self.relu = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 2, 1), nn.ReLU(inplace=True)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(self, self.stem(x), x))


def then(change: Callable[[nn.Module, Tensor, Tensor], object]) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
    """Change y in place, and return y itself."""

    def between(m: nn.Module, y: Tensor, x: Tensor) -> Tensor:
        change(m, y, x)
        return y

    return between


def plus_equals(m: nn.Module, y: Tensor, x: Tensor) -> Tensor:
    z = y
    z += x
    return y


def around(m: nn.Module, y: Tensor, x: Tensor) -> Tensor:
    """Read y before and after the change."""
    before = m.head.weight.sum() + y * 2
    m.relu(y)
    return torch.cat([y, before], 0) + torch.cat([y, y], 0)


def around_written_out(m: nn.Module, y: Tensor, x: Tensor) -> Tensor:
    before = m.head.weight.sum() + y * 2
    z = F.relu(y)
    return torch.cat([z, before], 0) + torch.cat([z, z], 0)


# In place, and the same written out.
CASES = {
    "add_": (then(lambda m, y, x: y.add_(x)), lambda m, y, x: y.add(x)),
    "+=": (plus_equals, lambda m, y, x: y + x),
    "mul_": (then(lambda m, y, x: y.mul_(x)), lambda m, y, x: y.mul(x)),
    "relu_": (then(lambda m, y, x: F.relu_(y)), lambda m, y, x: F.relu(y)),
    "inplace=True": (then(lambda m, y, x: F.leaky_relu(y, 0.2, inplace=True)), lambda m, y, x: F.leaky_relu(y, 0.2)),
    "by position": (then(lambda m, y, x: F.hardtanh(y, -0.5, 0.5, True)), lambda m, y, x: F.hardtanh(y, -0.5, 0.5)),
    "a module": (then(lambda m, y, x: m.relu(y)), lambda m, y, x: F.relu(y)),
    "twice": (then(lambda m, y, x: (y.add_(x), y.clamp_(-1, 1))), lambda m, y, x: (y + x).clamp(-1, 1)),
    "around": (around, around_written_out),
}
SHAPE = (2, 4, 6, 6)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("backend", ["tensorrt", "onnxruntime", "snpe", "tvm"])
@pytest.mark.parametrize("name", CASES)
def test_later_readers_read_the_changed_tensor(name: str, backend: str) -> None:
    x, outputs = torch.randn(SHAPE), []
    for between in CASES[name]:
        model = Net(between).eval()
        prepared = qt.prepare(model, backend=backend)
        with qt.disable_quantization(prepared):
            assert torch.equal(prepared(x), model(x))
        qt.calibrate(prepared, [x], progress=False)
        converted = qt.convert(prepared)
        assert torch.equal(converted(x), prepared(x))
        outputs.append(
            (prepared(x), sorted(qt.quantizers_of(prepared)[n].scale.sum().item() for n in qt.quantizers_of(prepared)))
        )
    (found, scales), (wanted, wanted_scales) = outputs
    assert torch.equal(found, wanted)
    assert scales == wanted_scales


def test_numbers_are_not_changed_in_place() -> None:
    def between(m: nn.Module, y: Tensor, x: Tensor) -> Tensor:
        channels = y.size(1)
        more = channels
        more += 2
        return F.pad(y, (0, 0, 0, 0, 0, more - channels))[:, :channels]

    x = torch.randn(SHAPE)
    model = Net(between).eval()
    prepared = qt.prepare(model, backend="tensorrt")
    with qt.disable_quantization(prepared):
        assert torch.equal(prepared(x), model(x))


@pytest.mark.parametrize("change", ["+=", "-=", "*="])
def test_a_part_may_be_changed_by_an_operator_that_writes_it_back(change: str) -> None:
    def between(m: nn.Module, y: Tensor, x: Tensor) -> Tensor:
        if change == "+=":
            y[:, 1:, ::2] += x[:, 1:, ::2]
        elif change == "-=":
            y[:, 1:, ::2] -= x[:, 1:, ::2]
        else:
            y[:, 1:, ::2] *= x[:, 1:, ::2]
        return F.relu(y)

    x = torch.randn(SHAPE)
    model = Net(between).eval()
    prepared = qt.prepare(model, backend="tensorrt")
    with qt.disable_quantization(prepared):
        assert torch.equal(prepared(x), model(x))
    qt.calibrate(prepared, [x], progress=False)
    assert torch.equal(qt.convert(prepared)(x), prepared(x))


def test_a_view_that_is_read_after_the_change_is_an_error_that_names_the_node() -> None:
    def through_a_view(m: nn.Module, y: Tensor, x: Tensor) -> Tensor:
        y.transpose(2, 3).add_(x)
        return y

    def before_the_change(m: nn.Module, y: Tensor, x: Tensor) -> Tensor:
        view = y.transpose(2, 3)
        y.add_(x)
        return view

    for between in (through_a_view, before_the_change):
        with pytest.raises(ValueError, match=r"prepare: 'add_' changes .* in place, and 'head' then reads '"):
            qt.prepare(Net(between), backend="tensorrt")


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "swapaxes": lambda y: y.swapaxes(2, 3),
    "movedim": lambda y: torch.movedim(y, 2, 3),
    "unflatten": lambda y: y.unflatten(1, (2, 2)),
    "a split of a view": lambda y: y.transpose(2, 3).tensor_split(2, 1)[0],
    "reshape": lambda y: y.reshape(y.shape[0], -1),
    "a module": nn.Flatten(),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_change_through_any_view_is_an_error_without_example_inputs_too(view: str) -> None:
    def changes_the_view(m: nn.Module, y: Tensor, x: Tensor) -> Tensor:
        viewed = VIEWS[view](y)
        viewed += 1
        return y

    def changes_an_attribute(m: nn.Module, y: Tensor, x: Tensor) -> Tensor:
        viewed = y.mT
        viewed += 1
        return y

    def changes_the_base(m: nn.Module, y: Tensor, x: Tensor) -> Tensor:
        viewed = VIEWS[view](y)
        y += x
        return viewed

    for between in (changes_the_view, changes_an_attribute, changes_the_base):
        with pytest.raises(ValueError, match=r" in place, and 'head' then reads '.*', which shares its memory"):
            qt.prepare(Net(between), backend="tensorrt")


def test_the_shape_of_a_view_may_be_read_after_the_change() -> None:
    def between(m: nn.Module, y: Tensor, x: Tensor) -> Tensor:
        viewed = y.flatten(2)
        y += x
        return y * viewed.size(1) + viewed.shape[0]

    model, x = Net(between).eval(), torch.randn(SHAPE)
    prepared = qt.prepare(model, backend="tensorrt")
    with qt.disable_quantization(prepared):
        assert torch.equal(prepared(x), model(x))


def test_a_copy_of_a_tensor_may_be_changed() -> None:
    def between(m: nn.Module, y: Tensor, x: Tensor) -> Tensor:
        copy = y.transpose(2, 3).reshape(y.shape[0], -1)
        copy += 1
        return y

    model, x = Net(between).eval(), torch.randn(SHAPE)
    prepared = qt.prepare(model, backend="tensorrt")
    with qt.disable_quantization(prepared):
        assert torch.equal(prepared(x), model(x))


def test_a_view_that_nobody_reads_later_is_fine() -> None:
    model = Net(lambda m, y, x: y.transpose(2, 3).add_(x)).eval()
    x = torch.randn(SHAPE)
    prepared = qt.prepare(model, backend="tensorrt")
    with qt.disable_quantization(prepared):
        assert torch.equal(prepared(x), model(x))


@torch.no_grad()  # autograd has no `out`
def test_a_tensor_that_an_op_writes_its_result_to_is_quantized_after_it() -> None:
    def between(m: nn.Module, y: Tensor, x: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        torch.add(y, x, out=result)
        return result

    x, outputs = torch.randn(SHAPE), []
    for function in (between, lambda m, y, x: y + x):
        prepared = qt.prepare(Net(function).eval(), x, backend="tensorrt")
        qt.calibrate(prepared, [x], progress=False)
        outputs.append(prepared(x))
    assert torch.equal(*outputs)
    assert outputs[0].abs().sum() > 0
