"""Replacement in place: hooks, handles, references, copies and pickles survive it."""

import copy
import io
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.model_state import unchanged_on_error
from qtoolkit.nn.replacement import replace_in_place, replace_layers
from tests import nets


class Wrapper(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.layer(x)


def quantized(layer: nn.Module, qat_type: type[nn.Module] = qt.nn.QuantLinear) -> nn.Module:
    return qat_type.from_float(layer, qt.QuantSpec(axis=0))


# ---- the object stays


def test_references_to_a_layer_refer_to_the_quantized_layer() -> None:
    model = nets.LinearNet()
    layer, calls = model.fc1, []
    held, names = [layer], {"fc1": layer}
    handle = layer.register_forward_hook(lambda m, args, y: calls.append(m))
    replace_in_place(layer, qt.nn.QuantLinear.from_float(layer, qt.QuantSpec(axis=0)))
    assert type(held[0]) is qt.nn.QuantLinear
    assert held[0] is names["fc1"] is model.fc1
    model(torch.randn(3, 6))
    assert calls == [layer]
    handle.remove()
    model(torch.randn(3, 6))
    assert calls == [layer]


def test_a_module_is_replaced_by_a_wrapper_of_it() -> None:
    model, x = nn.Sequential(nn.Linear(4, 2)), torch.randn(3, 4)
    layer, y, calls = model[0], model(x), []
    handle = layer.register_forward_hook(lambda m, args, out: calls.append(type(m)))
    replace_in_place(layer, Wrapper(layer))
    assert model[0] is layer
    assert torch.equal(model(x), 2 * y)
    assert calls == [nn.Linear]
    assert [name for name, _ in model.named_parameters()] == ["0.layer.weight", "0.layer.bias"]
    handle.remove()
    model(x)
    assert calls == [nn.Linear]


def test_a_module_replaced_by_itself_is_unchanged() -> None:
    layer = nn.Linear(4, 2)
    before = dict(vars(layer))
    replace_in_place(layer, layer)
    assert vars(layer) == before


class Slotted(nn.Linear):
    __slots__ = ("extra",)


class QuantSlotted(qt.nn.QuantLinear):
    """A QAT type without the slot of its float type."""

    FLOAT = Slotted


class QuantSlottedToo(qt.nn.QuantLinear, Slotted):
    """A QAT type that is derived from its float type, and so has its slot."""

    FLOAT = Slotted


def slotted() -> Slotted:
    layer = Slotted(4, 2)
    layer.extra = 3
    return layer


@pytest.mark.parametrize(
    ("make", "replacement"),
    [
        (lambda: nn.Linear(4, 2), lambda layer: slotted()),
        (slotted, lambda layer: nn.Linear(4, 2)),
        (slotted, lambda layer: quantized(layer, QuantSlotted)),
        (slotted, Wrapper),
    ],
    ids=["to_slots", "from_slots", "qat_type", "wrapper"],
)
def test_incompatible_layouts_raise_and_leave_the_module_unchanged(make, replacement) -> None:
    layer, x = make(), torch.randn(3, 4)
    y, fired = layer(x), []
    handle = layer.register_forward_hook(lambda *_: fired.append(1))
    kind, state = type(layer), dict(vars(layer))
    contents = {name: dict(value) for name, value in state.items() if isinstance(value, dict)}
    words = f"a {kind.__name__} cannot be replaced in place by a .*: .*layout.* add no __slots__"
    with pytest.raises(TypeError, match=words):
        replace_in_place(layer, replacement(layer))
    assert (type(layer), vars(layer)) == (kind, state)
    assert {name: vars(layer)[name] for name in contents} == contents
    assert getattr(layer, "extra", 3) == 3
    assert torch.equal(layer(x), y)
    handle.remove()
    layer(x)
    assert fired == [1]


def test_slots_survive_where_the_layouts_are_the_same() -> None:
    layer = slotted()
    replace_in_place(layer, quantized(layer, QuantSlottedToo))
    assert (type(layer), layer.extra) == (QuantSlottedToo, 3)


# ---- hooks


HOOKS: dict[str, Callable[[nn.Module, Callable[..., None]], object]] = {
    "forward_pre": lambda m, hook: m.register_forward_pre_hook(hook),
    "forward_pre_kwargs": lambda m, hook: m.register_forward_pre_hook(hook, with_kwargs=True),
    "forward": lambda m, hook: m.register_forward_hook(hook),
    "forward_always": lambda m, hook: m.register_forward_hook(hook, with_kwargs=True, always_call=True),
    "full_backward_pre": lambda m, hook: m.register_full_backward_pre_hook(hook),
    "full_backward": lambda m, hook: m.register_full_backward_hook(hook),
    "state_dict_pre": lambda m, hook: m.register_state_dict_pre_hook(hook),
    "state_dict_post": lambda m, hook: m.register_state_dict_post_hook(hook),
    "load_state_dict_pre": lambda m, hook: m.register_load_state_dict_pre_hook(hook),
    "load_state_dict_post": lambda m, hook: m.register_load_state_dict_post_hook(hook),
}


def used(layer: nn.Module) -> None:
    """Run all that calls hooks."""
    layer(torch.randn(3, 4).requires_grad_()).sum().backward()
    layer.load_state_dict(layer.state_dict())


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("make", [quantized, Wrapper], ids=["layer", "wrapper"])
def test_hooks_and_their_handles_survive(kind: str, make: Callable[[nn.Module], nn.Module]) -> None:
    layer, fired = nn.Linear(4, 2), []
    handle = HOOKS[kind](layer, lambda module, *_: fired.append(module))
    replace_in_place(layer, make(layer))
    used(layer)
    assert len(fired) == 1
    assert fired[0] is (layer if make is quantized else layer.layer)
    handle.remove()
    used(layer)
    assert len(fired) == 1


def test_handles_taken_after_a_replacement_work_after_the_next_one() -> None:
    layer, fired = nn.Linear(4, 2), []
    replace_in_place(layer, quantized(layer))
    handle = layer.register_forward_hook(lambda *_: fired.append(type(layer)))
    replace_in_place(layer, layer.to_float())
    layer(torch.randn(3, 4))
    assert fired == [nn.Linear]
    handle.remove()
    assert not layer._forward_hooks


# ---- references, copies and pickles


def test_weak_references_identity_and_sets_survive() -> None:
    layer = nn.Linear(4, 2)
    reference, known = weakref.ref(layer), {layer: "known"}
    replace_in_place(layer, quantized(layer))
    assert reference() is layer
    assert known[layer] == "known"
    assert layer in weakref.WeakSet([reference()])


def test_parameters_in_an_optimizer_are_trained() -> None:
    layer, x = nn.Linear(4, 2), torch.randn(3, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    weight, before = layer.weight, layer.weight.detach().clone()
    replace_in_place(layer, quantized(layer))
    assert layer.weight is weight is optimizer.param_groups[0]["params"][0]
    layer(x).sum().backward()
    optimizer.step()
    assert torch.equal(layer.weight, before - 0.1 * weight.grad)
    assert not torch.equal(layer.weight, before)


def stored(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), stored], ids=["deepcopy", "pickle", "save"]
)
def test_copies_of_a_replaced_model_compute_the_same_and_share_nothing(copied) -> None:
    model, x = nets.LinearNet().eval(), torch.randn(3, 6)
    replace_layers(model, [""], lambda *_: qt.backends["tensorrt10"].qconfig, qt.nn.QAT_MODULES)
    qt.calibrate(model, [x], progress=False)
    other = copied(model)
    assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
    assert type(other.fc1) is qt.nn.QuantLinear
    assert torch.equal(other(x), model(x))
    assert not {id(p) for p in other.parameters()} & {id(p) for p in model.parameters()}
    back = other.fc1
    replace_in_place(back, back.to_float())
    assert type(other.fc1) is nn.Linear
    assert type(model.fc1) is qt.nn.QuantLinear


# ---- replace_layers


def test_a_model_that_is_a_layer_is_replaced() -> None:
    model = nn.Linear(4, 2)
    weight = model.weight
    assert replace_layers(model, [""], lambda *_: qt.backends["tensorrt10"].qconfig, qt.nn.QAT_MODULES) == [""]
    assert type(model) is qt.nn.QuantLinear
    assert model.weight is weight
    replace_in_place(model, model.to_float())
    assert type(model) is nn.Linear
    assert set(model.state_dict()) == {"weight", "bias"}


def test_a_failed_change_in_place_is_undone_with_types_and_handles() -> None:
    model = nets.LinearNet()
    fired = []
    handle = model.fc1.register_forward_hook(lambda *_: fired.append(1))
    modules, state = list(model.modules()), {n: id(p) for n, p in model.named_parameters()}

    def choose(name: str, module: nn.Module, kind: type[nn.Module]) -> qt.QConfig:
        if name == "fc2":
            raise RuntimeError("no config")
        return qt.backends["tensorrt10"].qconfig

    with pytest.raises(RuntimeError, match="no config"), unchanged_on_error(model):
        replace_layers(model, [""], choose, qt.nn.QAT_MODULES)
    assert [type(m) for m in modules] == [nets.LinearNet, nn.Linear, nn.BatchNorm1d, nn.Linear]
    assert {n: id(p) for n, p in model.named_parameters()} == state
    model(torch.randn(3, 6))
    handle.remove()
    model(torch.randn(3, 6))
    assert fired == [1]


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_padded_batches_go_through_a_replaced_encoder() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2).eval()
    x, padding = torch.randn(2, 3, 8), torch.tensor([[False, False, True], [False, False, False]])
    y = encoder(x, src_key_padding_mask=padding)
    replace_layers(encoder, [""], lambda *_: qt.backends["tensorrt10"].qconfig, qt.nn.QAT_MODULES)
    with qt.disable_quantization(encoder):
        ours = encoder(x, src_key_padding_mask=padding)
    torch.testing.assert_close(ours[~padding], y[~padding], rtol=1e-5, atol=1e-6)
    report = qt.calibrate(encoder, [{"src": x, "src_key_padding_mask": padding}], progress=False)
    assert report.unreached == ()
    assert len(encoder.layers[0]._forward_pre_hooks) == 1


def test_quantizers_of_layers_without_parameters_are_where_the_model_is() -> None:
    class Pool(qt.nn.QuantModule, nn.AvgPool2d):
        FLOAT, KIND = nn.AvgPool2d, "avg_pool"

        def add_quantizers(self, *args: object) -> None:
            self.input_quantizer = None

        def own_attributes(self) -> tuple[str, ...]:
            return ("input_quantizer",)

    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.AvgPool2d(2)).to("meta")
    replace_layers(model, [""], lambda *_: qt.backends["tensorrt10"].qconfig, {nn.AvgPool2d: Pool})
    assert model[1].input_quantizer.scale.device.type == "meta"
