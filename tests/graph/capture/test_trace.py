"""The trace pass: it keeps outputs and names, follows branches on sizes, and keeps arguments and attributes."""

import copy
import pickle
import sys

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.graph.capture import trace
from tests import nets
from tests.nets import linear_of
from tests.traceable import CASES, Boxes, Keywords, OnSizes


def run_on(model: nn.Module, inputs: object) -> object:
    torch.manual_seed(0)
    with torch.no_grad():
        return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def leaves(value: object) -> list[object]:
    if isinstance(value, dict):
        return [type(value), *(x for k, v in value.items() for x in (k, *leaves(v)))]
    if isinstance(value, list | tuple):
        return [type(value), *(x for v in value for x in leaves(v))]
    return [type(value), *leaves(vars(value))] if isinstance(value, Boxes) else [value]


def assert_same(ours: object, theirs: object) -> None:
    for a, b in zip(leaves(ours), leaves(theirs), strict=True):
        assert torch.equal(a, b) if isinstance(b, Tensor) else a == b


@pytest.mark.sweep(1)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", CASES)
def test_trace_keeps_outputs_and_parameter_names(case: str, training: bool) -> None:
    model, inputs = CASES[case][0]().train(training), CASES[case][1]()
    traced = trace.run(copy.deepcopy(model), example_inputs=inputs).gm
    for module in (traced, copy.deepcopy(traced), pickle.loads(pickle.dumps(traced))):
        twin = copy.deepcopy(model)
        assert_same(run_on(copy.deepcopy(module), inputs), run_on(twin, inputs))
        assert set(module.state_dict()) == set(model.state_dict())
        assert {n for n, _ in module.named_parameters()} == {n for n, _ in model.named_parameters()}
        module.load_state_dict(model.state_dict())  # strict
        assert module.training == training


def test_float_functionals_of_torch_are_traced() -> None:
    quantized = pytest.importorskip("torch.ao.nn.quantized")

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.ops = linear_of(), quantized.FloatFunctional()

        def forward(self, x: Tensor) -> Tensor:
            return self.ops.add(self.fc(x), x)

    prepared = qt.prepare(Residual(), (torch.randn(2, 4),), backend="openvino")
    (line,) = [line for line in qt.quantization_report(prepared).layers if line.kind == "add"]
    assert len(line.inputs) == 2


def test_a_shared_module_is_one_module_under_both_names() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = linear_of()
            self.b = self.a

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    prepared = qt.prepare(Tied(), (torch.randn(2, 4),), backend="tensorrt")
    assert prepared.get_submodule("a") is prepared.get_submodule("b")
    assert isinstance(prepared.get_submodule("b"), qt.nn.QuantLinear)
    for twin in (copy.deepcopy(prepared), pickle.loads(pickle.dumps(copy.deepcopy(prepared)))):
        assert twin.get_submodule("a") is twin.get_submodule("b")
        assert set(twin.state_dict()) == set(prepared.state_dict())
    assert {"a.weight", "b.weight"} <= set(prepared.state_dict())


# ---- decisions on sizes


def test_example_inputs_select_branches_on_sizes_and_the_graph_checks_them() -> None:
    traced = trace.run(OnSizes(), example_inputs=(torch.randn(2, 6),)).gm
    model = OnSizes()
    model.load_state_dict(traced.state_dict())
    for batch in (1, 5):  # no branch depends on the batch size
        x = torch.randn(batch, 6)
        assert torch.equal(traced(x), model(x))
    with pytest.raises(
        ValueError,
        match=r"prepared for inputs of other sizes: .* is False now and was True .*, at .*`if x\.shape\[-1\] % 8 != 0:`",
    ):
        traced(torch.randn(2, 8))


def test_without_example_inputs_the_error_asks_for_them() -> None:
    with pytest.raises(
        qt.UntraceableError, match="pass example_inputs, which determine the sizes that Python branches on"
    ):
        trace.run(OnSizes())


def test_example_values_are_never_used() -> None:
    with pytest.raises(qt.UntraceableError, match="if x.sum\\(\\) > 0"):
        qt.prepare(nets.ControlFlow(), (torch.ones(2, 4),), backend="tensorrt")


def test_devices_and_dtypes_are_known() -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = linear_of()

        def forward(self, x: Tensor) -> Tensor:
            if x.dtype != torch.float32 or x.device.type == "meta" or x.is_cuda or x.type() != "torch.FloatTensor":
                x = x.float() * 2
            return self.fc(x)

    traced = trace.run(Casts(), example_inputs=torch.randn(2, 4)).gm
    assert not [node for node in traced.graph.nodes if node.target == "float"]


@torch.jit.script
def scripted_double(x: Tensor) -> Tensor:
    return x * 2


class WithLimits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = linear_of(), linear_of()

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(0, 1)
        least = torch.full((), torch.finfo(scores.dtype).min, dtype=scores.dtype)
        scores = torch.where(torch.eye(2, dtype=torch.bool), scores, least)
        return scores.softmax(-1) * torch.iinfo(torch.arange(2).to(torch.int16).dtype).bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_limits_of_a_dtype_are_those_of_each_run(dtype: torch.dtype) -> None:
    model, x = WithLimits().eval(), torch.randn(2, 4)
    limits = torch.finfo, torch.iinfo
    prepared = qt.prepare(model, (x,), "onnxruntime")
    assert (torch.finfo, torch.iinfo) == limits
    for ours in (prepared, copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        nets.assert_float_when_off(ours.to(dtype), copy.deepcopy(model).to(dtype), x.to(dtype))
    assert not [line.name for line in qt.quantization_report(prepared).layers if "info" in line.name]


class MakesTensors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = linear_of()

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.zeros(x.shape[0], 4, dtype=x.dtype) + torch.ones(x.size(0), x.size(1), dtype=x.dtype)
        return (
            self.fc(x)
            + rows
            + torch.empty(x.shape[0], 1, dtype=x.dtype).fill_(2)
            + torch.zeros(x.shape[0], dtype=x.dtype).sum()
        )


@pytest.mark.parametrize("example", [True, False])
def test_tensors_made_of_traced_sizes(example: bool) -> None:
    model, x = MakesTensors().eval(), torch.randn(2, 4)
    traced = trace.run(copy.deepcopy(model), example_inputs=x if example else None).gm
    for rows in (2, 5):
        x = torch.randn(rows, 4)
        assert torch.equal(traced(x), model(x))
        assert torch.equal(pickle.loads(pickle.dumps(traced))(x), model(x))


def test_scripted_functions_are_kept_as_calls() -> None:
    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = linear_of()

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(scripted_double(x))

    model, x = Doubles(), torch.randn(2, 4)
    for example in (None, x):
        traced = trace.run(copy.deepcopy(model), example_inputs=example).gm
        assert torch.equal(traced(x), model(x))
        assert torch.equal(pickle.loads(pickle.dumps(traced))(x), model(x))


def test_torchvision_ops_are_kept_as_calls() -> None:
    torchvision = pytest.importorskip("torchvision")

    class Pools(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.pool = nn.Conv2d(3, 3, 1), torchvision.ops.RoIAlign(2, 1.0, -1)

        def forward(self, x: Tensor, boxes: Tensor) -> Tensor:
            return self.pool(self.conv(x), boxes)

    model = Pools()
    inputs = torch.randn(1, 3, 8, 8), torch.tensor([[0.0, 1.0, 1.0, 5.0, 5.0]])
    traced = trace.run(copy.deepcopy(model), example_inputs=inputs).gm
    assert torch.equal(traced(*inputs), model(*inputs))


def test_stochastic_depth_draws_anew_at_each_run() -> None:
    torchvision = pytest.importorskip("torchvision")
    model = nn.Sequential(linear_of(), torchvision.ops.StochasticDepth(0.5, "row"))
    traced = trace.run(model.train()).gm
    x = torch.randn(64, 4)
    assert not torch.equal(traced(x), traced(x))


# ---- arguments


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = linear_of()

    def forward(self, x: Tensor, mask: Tensor | None = None, double: bool = False, scale: float = 1.0) -> Tensor:
        y = self.fc(x) * scale
        if mask is not None:
            y = y * mask
        return y * 2 if double else y


def test_arguments_left_out_are_fixed_at_their_defaults() -> None:
    model, x = Optional(), torch.randn(2, 4)
    prepared = trace.run(copy.deepcopy(model), example_inputs=(x,)).gm
    assert torch.equal(prepared(x), model(x))
    assert torch.equal(prepared(x=x, mask=None, double=False), model(x))
    with pytest.raises(
        ValueError,
        match="mask has been specialized to have value None .* to pass a value, give one in the example_inputs",
    ):
        prepared(x, mask=torch.ones(4))
    with pytest.raises(AssertionError, match="double has .* value False but .*prepare has fixed this argument"):
        prepared(x, double=True)


def test_arguments_that_the_example_gives_stay_arguments() -> None:
    model, x = Optional(), torch.randn(2, 4)
    prepared = trace.run(
        copy.deepcopy(model), example_inputs={"x": x, "mask": torch.ones(4), "scale": 2.0, "double": True}
    ).gm
    mask = torch.randn(4)
    assert torch.equal(prepared(x, mask, True, 3.0), model(x, mask, True, 3.0))


def test_concrete_args_win_over_defaults() -> None:
    model, x = Optional(), torch.randn(2, 4)
    prepared = trace.run(copy.deepcopy(model), concrete_args={"double": True}, example_inputs=(x,)).gm
    assert torch.equal(prepared(x, double=True), model(x, double=True))
    assert torch.equal(prepared(x), model(x, double=True))
    with pytest.raises(AssertionError, match="double has been specialized to have value True"):
        prepared(x, double=False)


def test_prepare_runs_with_concrete_args_that_are_no_defaults() -> None:
    model, x = Optional().eval(), torch.randn(2, 4)
    prepared = qt.prepare(model, (x,), concrete_args={"double": True}, backend="tensorrt")
    with qt.disable_quantization(prepared):
        assert torch.equal(prepared(x), model(x, double=True))


def test_a_fixed_argument_before_one_without_a_default_has_no_default() -> None:
    class Flag(nn.Module):
        def forward(self, x: Tensor, double: bool, y: Tensor) -> Tensor:
            return x * 2 + y if double else x

    prepared = trace.run(Flag(), concrete_args={"double": True}).gm
    assert torch.equal(prepared(torch.ones(2), True, torch.ones(2)), torch.full((2,), 3.0))


def test_prepare_runs_on_keyword_inputs() -> None:
    inputs = {"x": torch.randn(2, 4), "scale": torch.randn(4)}
    model = Keywords().eval()
    prepared = qt.prepare(model, inputs, backend="tensorrt")
    with qt.disable_quantization(prepared):
        assert torch.equal(prepared(**inputs), model(**inputs))
    qt.calibrate(prepared, [inputs], progress=False)
    assert qt.convert(prepared)(**inputs).shape == (2, 4)


# ---- attributes


class Owner(nn.Module):
    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.stride = linear_of(), 8

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)

        def describe(self) -> str:
            return f"stride {self.stride}, {type(self.fc).__name__}"

    def __init__(self) -> None:
        super().__init__()
        self.stage, self.names, self.anchors = Owner.Stage(), ["cat", "dog"], torch.ones(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.stage(x)

    def predict(self, x: Tensor) -> list[str]:
        return [self.names[int(i) % 2] for i in self(x).argmax(1)]


KEPT = [
    "names",
    "anchors",
    "predict",
    "stage.stride",
    "stage.describe",
    "stage.fc",
    "stage.fc.weight",
    "stage.fc.in_features",
]


def test_attributes_and_methods_survive_every_step() -> None:
    x = torch.randn(3, 4)
    prepared = qt.prepare(Owner(), (x,), preserve_attributes=KEPT, backend="tensorrt")
    qt.calibrate(prepared, [x], progress=False)
    pickled = pickle.loads(pickle.dumps(copy.deepcopy(prepared)))
    for model in (prepared, copy.deepcopy(prepared), pickled, qt.convert(prepared), qt.convert(pickled)):
        assert model.names == ["cat", "dog"]
        assert torch.equal(model.anchors, torch.ones(3))
        assert model.predict(x) == [model.names[int(i) % 2] for i in model(x).argmax(1)]
        assert model.predict.owner is model
        assert model.stage.stride == 8
        assert model.stage.describe() == "stride 8, QuantLinear"
        assert isinstance(model.stage.fc, qt.nn.QuantLinear)
        assert model.stage.fc.in_features == 4
        assert "names" not in model.state_dict()


def test_attributes_belong_to_the_copy() -> None:
    model = Owner()
    prepared = qt.prepare(model, preserve_attributes=["names"], backend="tensorrt")
    prepared.names.append("bird")
    assert model.names == ["cat", "dog"]


class Decays(nn.Module):
    """A model that tells timm's optimizers and transforms what they ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.position, self.fc = nn.Parameter(torch.zeros(1, 4)), nn.Linear(4, 2)
        self.pretrained_cfg = {"mean": (0.5, 0.5, 0.5)}

    def no_weight_decay(self) -> set[str]:
        return {name for name, _ in self.named_parameters() if name == "position"}

    def group_matcher(self, coarse: bool = False) -> dict[str, str]:
        return {"stem": "^position", "blocks": "^fc" if coarse else r"^fc\.(\d+)"}

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x + self.position)


def test_what_optimizers_and_transforms_ask_a_model_for_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = qt.prepare(Decays(), backend="tensorrt")
    data = pickle.dumps(prepared)
    for ours in (prepared, copy.deepcopy(prepared), pickle.loads(data), pickle.loads(pickle.dumps(pickle.loads(data)))):
        assert ours.no_weight_decay() == {"position"}
        assert ours.group_matcher(coarse=True)["blocks"] == "^fc"
        assert ours.pretrained_cfg == {"mean": (0.5, 0.5, 0.5)}
    monkeypatch.delattr(sys.modules[__name__], "Decays")
    loaded = pickle.loads(data)  # where the model's code is not there
    assert not hasattr(loaded, "no_weight_decay")
    assert not hasattr(pickle.loads(pickle.dumps(loaded)), "no_weight_decay")


def test_a_class_inside_a_function_can_be_pickled_with_what_optimizers_ask_for() -> None:
    class Local(Decays):
        def no_weight_decay(self) -> set[str]:
            return {"fc.weight"}

    prepared = qt.prepare(Local(), backend="tensorrt")
    assert prepared.no_weight_decay() == copy.deepcopy(prepared).no_weight_decay() == {"fc.weight"}
    assert not hasattr(pickle.loads(pickle.dumps(prepared)), "no_weight_decay")


# ---- leaf modules that need data


class Normalizes(nn.Module):
    """Looks at the values of a constant, and of a buffer that it counts in, which no shapes tell."""

    def __init__(self, ran: list[str], name: str) -> None:
        super().__init__()
        self.ran, self.name, self.fc, self.norm = ran, name, linear_of(), nn.BatchNorm1d(4)
        self.register_buffer("count", torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        if not x.is_meta:
            self.ran.append(self.name)
        if (torch.as_tensor([0.5, 0.25], dtype=x.dtype, device=x.device) == 0).any() or self.count.item() == 0:
            raise ValueError("zero")
        self.count += 1
        return self.norm(self.fc(x)), int(x.sum() > 0)


class ByRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = linear_of()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.flatten(0, 1)).unflatten(0, x.shape[:2]) if x.ndim == 3 else self.fc(x)


class BehindLeaves(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.ran: list[str] = []
        self.leaves = nn.ModuleList(Normalizes(self.ran, str(i)) for i in range(count))
        self.heads = nn.ModuleList(ByRank() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        x.relu_()
        for leaf, head in zip(self.leaves, self.heads, strict=True):
            x = head(leaf(x)[0]) + (x if x.shape[-1] == 4 else 0)
        return x


@pytest.mark.parametrize("training", [True, False])
def test_sizes_are_known_behind_a_leaf_module_that_needs_data(training: bool) -> None:
    model, x = BehindLeaves(3).train(training), torch.randn(5, 4)
    state, random, given = copy.deepcopy(model.state_dict()), torch.get_rng_state(), x.clone()
    traced = trace.run(model, leaf_modules=[Normalizes], example_inputs=x)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(x, given)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert not [node for node in traced.gm.graph.nodes if node.target in ("heads.0", "heads.1", "heads.2")]
    twin = copy.deepcopy(model)
    twin.load_state_dict(state)
    torch.testing.assert_close(traced.gm(x), twin(x))


def test_each_leaf_module_runs_once_for_its_sizes() -> None:
    model = BehindLeaves(4).eval()
    shapes = trace.ShapePropagation(model, {"x": torch.randn(5, 4)})
    tracer = trace.ModelTracer([Normalizes], (), shapes)
    tracer.trace(model)
    assert shapes.real_model.ran == ["0", "1", "2", "3"]


def test_a_number_that_a_leaf_module_computes_of_data_decides_no_branch() -> None:
    class Decides(BehindLeaves):
        def forward(self, x: Tensor) -> Tensor:
            y, positive = self.leaves[0](x)
            return y if positive else -y

    with pytest.raises(qt.UntraceableError, match="if positive"):
        trace.run(Decides(1).eval(), leaf_modules=[Normalizes], example_inputs=torch.randn(5, 4))
