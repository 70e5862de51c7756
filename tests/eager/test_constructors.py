"""initialize(): constructors of torch's layers build quantized ones, until they are torch's own again."""

import copy
import inspect
import pickle
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Conv2d as ImportedEarlier

import qtoolkit as qt
from qtoolkit.eager.constructors import TRANSFORMERS
from qtoolkit.quant_modules import deactivate, initialize
from tests import reference

QAT = qt.nn.REPLACED_MODULES
ORIGINALS = {cls: vars(cls).get("__init__") for cls in (*QAT, *TRANSFORMERS)}
W4 = qt.QConfig(qt.QuantSpec(bits=4), qt.QuantSpec(bits=4, axis=0))
# Arguments of the constructor of each type of the table.
ARGUMENTS: dict[str, tuple[object, ...]] = {
    **{f"{kind}{d}d": (4, 6, 3) for kind in ("Conv", "ConvTranspose") for d in (1, 2, 3)},
    **{f"{kind}{d}d": (2,) for kind in ("MaxPool", "AvgPool", "AdaptiveAvgPool", "InstanceNorm") for d in (1, 2, 3)},
    **dict.fromkeys(("Linear", "Embedding", "EmbeddingBag", "LSTM", "GRU", "LSTMCell", "GRUCell"), (4, 6)),
    "MultiheadAttention": (4, 2),
    **dict.fromkeys(("Add", "Mul", "MatMul", "Cat", "ScaledDotProductAttention"), ()),
}


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    deactivate()
    assert {cls: vars(cls).get("__init__") for cls in ORIGINALS} == ORIGINALS


def kind() -> type[nn.Module]:
    """The type of a layer that is built now."""
    return type(nn.Linear(4, 2))


def bits() -> int | None:
    layer = nn.Linear(4, 2)
    return layer.weight_quantizer.spec.bits if isinstance(layer, qt.nn.QuantLinear) else None


def w(count: int) -> qt.QConfigMapping:
    spec = qt.QuantSpec(bits=count)
    return qt.QConfigMapping().set_global(qt.QConfig(spec, spec))


# ---- what is built


@pytest.mark.parametrize("float_type", QAT, ids=lambda cls: cls.__name__)
def test_each_type_of_the_table_is_built_quantized(float_type: type[nn.Module]) -> None:
    arguments = ARGUMENTS[float_type.__name__]
    torch.manual_seed(3)
    plain, signature = float_type(*arguments), inspect.signature(float_type)
    mapping = qt.QConfigMapping().set_object_type(float_type, W4)
    with initialize(mapping, backend="tensorrt10"):
        torch.manual_seed(3)
        layer = float_type(*arguments)
        assert inspect.signature(float_type) == signature
        with pytest.raises(TypeError) as ours:
            float_type(*arguments, nonsense=1)
    assert type(layer) is QAT[float_type]
    assert isinstance(layer, float_type)
    assert {q.spec.bits for q in qt.quantizers_of(layer).values()} == {4}
    for name, value in plain.state_dict().items():
        assert torch.equal(layer.state_dict()[name], value)
    with pytest.raises(TypeError) as theirs:
        float_type(*arguments, nonsense=1)
    assert str(ours.value) == str(theirs.value)
    assert type(float_type(*arguments)) is float_type


def test_types_that_the_backend_leaves_in_float_are_built_in_float() -> None:
    with initialize(backend="tensorrt10"):
        assert type(nn.MaxPool2d(2)) is nn.MaxPool2d
        assert type(nn.Embedding(4, 2)) is nn.Embedding
        assert type(nn.AvgPool2d(2)) is qt.nn.QuantAvgPool2d
    with initialize(backend="onnxruntime"):
        assert type(nn.Embedding(4, 2)) is qt.nn.QuantEmbedding


def test_a_model_that_is_built_computes_by_the_formula() -> None:
    with initialize(backend="tensorrt10"):
        model = nn.Sequential(nn.Linear(4, 3))
    x = torch.randn(5, 4)
    qt.calibrate(model, [x], progress=False)
    weight = model[0].weight.detach()
    expected = nn.functional.linear(
        reference.fake_quant(x, x.abs().max() / 127, None, -128, 127),
        reference.fake_quant(weight, weight.abs().amax(1) / 127, None, -128, 127, 0),
        model[0].bias,
    )
    qt.nn.set_training_arithmetic(model, arithmetic="float")
    assert torch.equal(model(x), expected)


def test_names_imported_earlier_and_types_tested_for() -> None:
    layer = nn.Conv2d(3, 4, 1)
    with initialize(backend="tensorrt10"):
        assert type(ImportedEarlier(3, 4, 1)) is qt.nn.QuantConv2d
        assert isinstance(layer, nn.Conv2d)
        assert type(layer) is nn.Conv2d
        assert nn.Conv2d is ImportedEarlier


class Mine(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)


class QuantMine(qt.nn.QuantLinear):
    FLOAT = Mine


def test_subclasses_and_lazy_layers_stay_float() -> None:
    with initialize(backend="tensorrt10"):
        assert type(Mine()) is Mine
        assert type(nn.MultiheadAttention(4, 2).out_proj) is nn.modules.linear.NonDynamicallyQuantizableLinear
        lazy = nn.LazyLinear(4)
        lazy(torch.ones(2, 3))
        assert type(lazy) is nn.Linear


def test_custom_types_are_built_quantized() -> None:
    with initialize(custom={Mine: QuantMine}, backend="tensorrt10"):
        assert type(Mine()) is QuantMine
        assert type(nn.Linear(4, 2)) is qt.nn.QuantLinear
    assert type(Mine()) is Mine


class Rebuilt(nn.Module):
    """Holds a layer that its from_float builds anew."""

    @classmethod
    def from_float(cls, module: nn.Module, *args: object) -> "Rebuilt":
        new = cls()
        new.layer = nn.Linear(module.in_features, module.out_features)
        return new


def test_layers_that_from_float_builds_are_not_quantized_again() -> None:
    with initialize(custom={nn.Linear: Rebuilt}, backend="tensorrt10"):
        for _ in range(2):
            layer = nn.Linear(4, 2)
            assert (type(layer), type(layer.layer)) == (Rebuilt, nn.Linear)


def test_constructors_of_qat_layers_do_not_change() -> None:
    with initialize(backend="tensorrt10"):
        layer = qt.nn.QuantLinear(4, 2)
    assert (layer.weight_quantizer, layer.input_quantizer) == (None, None)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_keep_their_types(copied: Callable[[nn.Module], nn.Module]) -> None:
    plain = nn.Linear(4, 2)
    with initialize(backend="tensorrt10"):
        layer = nn.Linear(4, 2)
        assert type(copied(plain)) is nn.Linear
        assert type(copied(layer)) is qt.nn.QuantLinear
        assert type(layer.to_float()) is nn.Linear


def test_layers_without_storage() -> None:
    with initialize(w(4), backend="tensorrt10"), torch.device("meta"):
        layer, pool = nn.Linear(4, 2), nn.AvgPool2d(2)
    assert {t.device.type for t in (layer.weight, layer.weight_quantizer.scale, pool.input_quantizer.scale)} == {"meta"}
    layer.to_empty(device="cpu").load_state_dict({"weight": 7 * torch.eye(2, 4), "bias": torch.zeros(2)})
    assert torch.equal(layer.weight_quantizer.scale, torch.ones(2))
    with initialize(backend="tensorrt10"):
        skipped = nn.utils.skip_init(nn.Linear, 4, 2)
        sized = nn.Linear(4, 2, device="meta", dtype=torch.float64)
    assert (type(skipped), skipped.weight.device.type) == (qt.nn.QuantLinear, "cpu")
    assert (sized.weight.dtype, sized.weight_quantizer.scale.device.type) == (torch.float64, "meta")


@pytest.mark.filterwarnings("ignore:.*nested")
@pytest.mark.parametrize("ignore", [None, "MultiheadAttention"])
def test_fast_paths_of_transformers_are_disabled(ignore: str | None) -> None:
    with initialize(ignore=ignore, backend="tensorrt10"):
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2)
    encoder.eval()
    assert type(encoder.layers[1].linear1) is qt.nn.QuantLinear
    assert isinstance(encoder.layers[0].self_attn, qt.nn.QuantModule) == (ignore is None)
    x, padding = torch.randn(2, 3, 8), torch.tensor([[False, False, True], [False, False, False]])
    batch = {"src": x, "src_key_padding_mask": padding}
    assert qt.calibrate(encoder, [batch], progress=False).unreached == ()
    seen: list[Tensor] = []
    encoder.layers[1].linear2.input_quantizer.register_forward_hook(lambda m, args, y: seen.append(y))
    encoder(**batch)
    assert len(seen) == 1


# ---- when


def test_initialize_takes_effect_until_deactivate() -> None:
    initialize(backend="tensorrt10")
    assert kind() is qt.nn.QuantLinear
    deactivate()
    deactivate()
    assert kind() is nn.Linear


def test_a_second_call_with_equal_arguments_has_no_effect() -> None:
    initialize(w(4), ["Conv2d"], backend="tensorrt10")
    inits = {cls: cls.__init__ for cls in QAT}
    initialize(w(4), ["Conv2d"], backend="tensorrt10")
    assert bits() == 4
    assert len(qt.quantizers_of(nn.Linear(4, 2))) == 2
    deactivate()
    assert kind() is nn.Linear
    assert all(cls.__init__ is not inits[cls] for cls in inits)


def test_a_second_call_with_other_arguments_replaces_the_settings() -> None:
    initialize(w(4), "Conv2d", backend="tensorrt10")
    initialize(w(6), backend="tensorrt10")
    assert bits() == 6
    assert type(nn.Conv2d(3, 3, 1)) is qt.nn.QuantConv2d


def test_blocks_nest_and_restore_the_settings_from_before() -> None:
    with initialize(w(4), backend="tensorrt10"):
        assert bits() == 4
        with initialize(w(6), backend="tensorrt10"):
            assert bits() == 6
        assert bits() == 4
    assert bits() is None
    initialize(w(3), backend="tensorrt10")
    with initialize(w(4), backend="tensorrt10"):
        assert bits() == 4
    assert bits() == 3


def test_one_context_manager_can_be_entered_again_and_nested() -> None:
    active = initialize(w(4), backend="tensorrt10")
    with active:
        with active:
            assert bits() == 4
        assert bits() == 4
    assert bits() is None
    with active:
        assert bits() == 4
    assert bits() is None
    initialize(w(6), backend="tensorrt10")
    with active:
        assert bits() == 4
    assert bits() == 6


def test_changes_inside_a_block_end_with_it() -> None:
    with initialize(w(4), backend="tensorrt10"):
        deactivate()
        assert bits() is None
    assert bits() is None
    initialize(w(6), backend="tensorrt10")
    with initialize(w(4), backend="tensorrt10"):
        deactivate()
    assert bits() == 6
    with pytest.raises(ZeroDivisionError), initialize(w(4), backend="tensorrt10"):
        bits() / 0
    assert bits() == 6


def test_a_constructor_that_raises_changes_nothing() -> None:
    wrong = qt.QConfigMapping().set_object_type(nn.Linear, qt.QConfig(None, qt.QuantSpec(axis=5)))
    with (
        pytest.raises(ValueError, match="layer 'Linear': the axis of a tensor of 2 dimensions"),
        initialize(wrong, backend="tensorrt10"),
    ):
        nn.Linear(4, 2)
    assert kind() is nn.Linear
    with initialize(backend="tensorrt10"):
        with pytest.raises(ValueError, match="in_channels must be divisible by groups"):
            nn.Conv2d(3, 4, 1, groups=2)
        assert kind() is qt.nn.QuantLinear


def test_all_threads_build_quantized_layers() -> None:
    found: list[type] = []
    with initialize(backend="tensorrt10"):
        thread = threading.Thread(target=lambda: found.append(kind()))
        thread.start()
        thread.join()
    assert found == [qt.nn.QuantLinear]


def test_constructors_patched_by_other_code_stay_patched(monkeypatch) -> None:
    calls: list[type] = []
    initialize(backend="tensorrt10")
    ours = nn.Linear.__init__

    def theirs(self: nn.Module, *args: object, **kwargs: object) -> None:
        ours(self, *args, **kwargs)
        calls.append(type(self))

    nn.Linear.__init__ = theirs
    try:
        deactivate()
        assert nn.Linear.__init__ is theirs
        assert kind() is nn.Linear
        with initialize(backend="tensorrt10"):
            assert kind() is qt.nn.QuantLinear
        assert nn.Linear.__init__ is theirs
        assert calls == [nn.Linear, qt.nn.QuantLinear]
    finally:
        nn.Linear.__init__ = ORIGINALS[nn.Linear]


def test_later_changes_of_the_mapping_have_no_effect() -> None:
    mapping = w(4)
    initialize(mapping, backend="tensorrt10")
    mapping.set_global(None)
    assert bits() == 4


# ---- what is left in float


@pytest.mark.parametrize(
    ("ignore", "left"),
    [
        ("Linear", {"Linear"}),
        (["Linear", "Conv?d"], {"Linear", "Conv2d"}),
        ("*", {"Linear", "Conv2d", "ConvTranspose2d"}),
        (lambda name, module: name == "" and isinstance(module, nn.ConvTranspose2d), {"ConvTranspose2d"}),
    ],
)
def test_ignored_types_are_built_in_float(ignore: object, left: set[str]) -> None:
    with initialize(ignore=ignore, backend="tensorrt10"):
        layers = nn.Linear(4, 2), nn.Conv2d(3, 3, 1), nn.ConvTranspose2d(3, 3, 1)
    assert {type(layer).__name__ for layer in layers if not isinstance(layer, qt.nn.QuantModule)} == left


def test_a_rule_for_a_type_comes_before_the_global_one() -> None:
    mapping = w(6).set_object_type(nn.Linear, W4).set_object_type(nn.Conv2d, None)
    with initialize(mapping, backend="tensorrt10"):
        assert bits() == 4
        assert type(nn.Conv2d(3, 3, 1)) is nn.Conv2d
        assert nn.Conv1d(3, 3, 1).weight_quantizer.spec.bits == 6


def test_bad_arguments_change_nothing() -> None:
    for mapping in (
        qt.QConfigMapping().set_module_name("fc", None),
        qt.QConfigMapping().set_module_name_regex("fc", None),
    ):
        with pytest.raises(ValueError, match=r"a rule for the name 'fc', but layers have no names when .*replace"):
            initialize(mapping, backend="tensorrt10")
    with pytest.raises(ValueError, match="initialize: ignore: unknown layer type 'Linar'; did you mean 'Linear'"):
        initialize(ignore="Linar", backend="tensorrt10")
    for ignore in (nn.Linear, [nn.Linear], 3):
        with pytest.raises(TypeError, match="initialize: ignore must be a name, a list of names, or a callable"):
            initialize(ignore=ignore, backend="tensorrt10")
    with pytest.raises(ValueError, match="unknown backend 'tensort'; did you mean 'tensorrt'"):
        initialize(backend="tensort")
    with pytest.raises(
        TypeError, match="initialize: qconfig_mapping must be a QConfigMapping of qtoolkit or None, got list"
    ):
        initialize([], backend="tensorrt10")
    with pytest.raises(TypeError, match="initialize: each key of custom must be a torch.nn.Module type, got 'Linear'"):
        initialize(custom={"Linear": qt.nn.QuantLinear}, backend="tensorrt10")
    assert kind() is nn.Linear
