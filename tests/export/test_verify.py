"""Verification of exported files: missing nodes, nodes that several quantizers share, and rounding ties."""

import itertools
from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, fx, nn

import qtoolkit as qt
from qtoolkit.export.verification.codes import TIE_SHARE, CodeCount, QuantizerCall, compare_codes, tie_band
from qtoolkit.export.verification.follower import Follower, NodeCodes, OnnxOrder, Pairing
from qtoolkit.export.verification.verify import verify_onnx
from qtoolkit.quantizers.frozen import Grid

X = torch.randn(4, 8)


def converted_pair() -> fx.GraphModule:
    """Two layers with equal weights, and one that reads the same tensor as the first."""
    first, equal, third = (nn.Linear(8, 8) for _ in range(3))
    equal.load_state_dict(first.state_dict())
    prepared = qt.prepare(nn.Sequential(first, nn.ReLU(), equal, nn.ReLU(), third).eval(), X, backend="tensorrt10")
    qt.calibrate(prepared, [X], progress=False)
    return qt.convert(prepared)


def test_equal_weights_may_have_one_node(tmp_path) -> None:
    converted = converted_pair()
    result = qt.export_onnx(converted, X, tmp_path / "model.onnx")
    names = {node.name for node in onnx.load(str(result.path)).graph.node}
    assert "0.weight_quantizer.dequantize" in names
    assert "2.weight_quantizer.dequantize" not in names
    assert result.verification.missing == ()
    assert result.verification.weight_codes == CodeCount(3 * 64)


def test_a_weight_without_a_node_is_missing(tmp_path) -> None:
    converted = converted_pair()
    proto = onnx.load(str(qt.export_onnx(converted, X, tmp_path / "model.onnx").path))
    for node in proto.graph.node:
        node.name = node.name.replace("4.weight_quantizer", "")
    found = verify_onnx(converted, X, proto)
    assert found.missing == ("4.weight_quantizer",)
    with pytest.raises(RuntimeError, match=r"no QuantizeLinear for: 4\.weight_quantizer"):
        found.check()


@pytest.mark.parametrize("what", ["bias", "weight"])
def test_an_output_without_a_quantizer_is_compared(what: str, tmp_path) -> None:
    prepared = qt.prepare(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).eval(), X, backend="onnxruntime")
    qt.calibrate(prepared, [X], progress=False)
    converted = qt.convert(prepared)
    result = qt.export_onnx(converted, X, tmp_path / "model.onnx")
    assert result.verification.output_error < 1e-5
    proto = onnx.load(str(result.path))
    found = next(value for value in proto.graph.initializer if value.name == f"2.{what}.codes")
    changed = numpy_helper.to_array(found).copy()
    changed.flat[1] = changed.flat[1] + 2000 if what == "bias" else -changed.flat[1]
    found.CopyFrom(numpy_helper.from_array(changed, found.name))
    compared = verify_onnx(converted, X, proto)
    with pytest.raises(
        RuntimeError, match="an output differs in onnxruntime by|quantized values must equal the model's"
    ):
        compared.check()


class Gates(nn.Module):
    """Two parameters of equal values, each quantized by a quantizer of its own through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ParameterList(nn.Parameter(torch.linspace(-1, 1, 8)) for _ in range(2))
        self.quantizers = nn.ModuleList(qt.TensorQuantizer(qt.QuantSpec()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for gate, quantizer in zip(self.gates, self.quantizers, strict=True):
            x = x * quantizer(gate.view(1, 8))
        return x


@pytest.mark.parametrize("integer_weights", [True, False])
def test_views_of_equal_parameters_are_compared_exactly_at_one_node(tmp_path, integer_weights: bool) -> None:
    model = Gates().eval()
    qt.calibrate(model, [X], progress=False)
    converted = qt.convert(model)
    path = tmp_path / "model.onnx"
    result = qt.export_onnx(converted, X, path, integer_weights=integer_weights, backend="tensorrt10")
    nodes = [node for node in onnx.load(str(result.path)).graph.node if node.op_type == "DequantizeLinear"]
    assert len(nodes) == 1
    assert result.verification.weight_codes == CodeCount(2 * 8)
    assert result.verification.by_quantizer == {}
    with torch.no_grad():
        converted.gates[0][3] += 0.02
    changed = verify_onnx(converted, X, result.path)
    assert changed.weight_codes.differing > 0
    with pytest.raises(RuntimeError, match="onnxruntime's quantized values must equal the model's"):
        changed.check()


class CallsOne(nn.Module):
    """Three quantizers, two of them with equal scales, of which forward calls one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (Grid(torch.tensor(s), None, qt.QuantSpec()) for s in (0.5, 0.5, 0.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(x)


def test_a_shared_node_answers_for_both_within_rounding_ties() -> None:
    codes = torch.arange(-50, 50, dtype=torch.int8)
    nodes = {"a": [NodeCodes(codes.numpy(), False)], "c": [NodeCodes(codes.numpy() + 1, False)]}
    flipped = codes.clone()
    flipped[3] += 1
    for ours, differing in ((codes, 0), (flipped, 1)):
        follower = Follower(CallsOne(), (ours * 0.5,), {})
        followed = follower.layer_by_layer(nodes, complete=True)
        assert followed.counts == {"b": CodeCount(100, differing, differing)}
        assert (followed.missing, follower.unreached) == ((), ("a", "c"))
    follower = Follower(CallsOne(), ((codes + 1) * 0.5,), {})  # the codes of "c", which has another scale
    followed = follower.layer_by_layer(nodes, complete=True)
    assert (followed.missing, followed.counts) == (("b",), {})


class Calls(nn.Module):
    """A layer that is called three times, twice on the same tensor: the exporter writes two nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) + self.fc(x) * self.fc(x + 1)


def test_fewer_nodes_than_calls_in_a_leaf_module(tmp_path) -> None:
    prepared = qt.prepare(
        nn.Sequential(Calls(), nn.ReLU(), nn.Linear(8, 2)).eval(), X, untraced=["0"], backend="tensorrt10"
    )
    qt.calibrate(prepared, [X], progress=False)
    result = qt.export_onnx(prepared, X, tmp_path / "model.onnx")
    names = [node.name for node in onnx.load(str(result.path)).graph.node if node.op_type == "QuantizeLinear"]
    assert names.count("0.fc.input_quantizer.quantize") < 3
    found = result.verification
    assert found.missing == ()
    assert found.by_quantizer["0.fc.input_quantizer"] == CodeCount(3 * X.numel())


def test_differences_at_rounding_boundaries_are_ties_however_many() -> None:
    grid = Grid(torch.tensor(0.5), None, qt.QuantSpec())
    x = torch.arange(-20, 20) * 0.5 + 0.25  # each between two codes
    ours = grid.codes(x)
    other = torch.floor(x / 0.5).to(torch.int8)
    count = compare_codes(grid, x, other.numpy())
    assert count == CodeCount(40, 20, 1, 20)
    assert count.are_ties()
    assert CodeCount.of(ours, other).ties == 0
    assert not CodeCount.of(ours, other).are_ties()
    aside = compare_codes(grid, x + 0.001, other.numpy())  # 2 thousandths of a step beyond
    assert aside == CodeCount(40, 40, 1, 0)
    assert not aside.are_ties()
    assert not compare_codes(grid, x, ours.numpy() + 2).are_ties()


class Decoder(nn.Module):
    """A linear resize beside a skip: quarters of steps, every eighth at a rounding boundary."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        small = nn.functional.avg_pool2d(self.b(x), 2)
        up = nn.functional.interpolate(small, scale_factor=2, mode="bilinear")
        return self.last(torch.cat([self.a(x), up], 1))


def test_a_linear_resize_into_a_concat_is_verified(tmp_path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 32, 32)
    prepared = qt.prepare(Decoder().eval(), x, "onnxruntime")
    qt.calibrate(prepared, [x], progress=False)
    found = qt.export_onnx(prepared, x, tmp_path / "model.onnx").verification
    assert found.layer_codes.steps <= 1
    assert found.layer_codes.differing - found.layer_codes.ties <= 4


# ---- how wide a rounding tie is


class Sums(nn.Module):
    """Sums of many products, whose rounding errors move values by a share of a step of 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(16, 64, 3), nn.Conv2d(64, 64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(torch.relu(self.conv1(x)))


def with_bits(bits: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(4, 16, 12, 12)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(qt.QuantSpec(bits=bits), qt.QuantSpec(axis=0)))
    prepared = qt.prepare(Sums().eval(), qconfig_mapping=mapping, backend="tensorrt10")
    qt.calibrate(prepared, [x], progress=False)
    return prepared, x


def test_activations_of_16_bits_are_verified(tmp_path) -> None:
    """More codes than TIE_SHARE allows lie where the order of a sum decides; all lie near a rounding boundary."""
    prepared, x = with_bits(16)
    codes = qt.export_onnx(prepared, x, tmp_path / "m.onnx").verification
    assert codes.weight_codes.differing == codes.quantizer_codes.differing == 0
    assert codes.layer_codes.differing > 2 * TIE_SHARE * codes.layer_codes.compared
    assert codes.layer_codes.steps == 1
    assert codes.layer_codes.ties == codes.layer_codes.differing


def test_a_layer_of_16_bits_that_is_wrong_by_two_steps_is_noticed(tmp_path) -> None:
    prepared, x = with_bits(16)
    converted = qt.convert(prepared)
    proto = onnx.load(str(qt.export_onnx(converted, x, tmp_path / "m.onnx").path))
    (bias,) = (t for t in proto.graph.initializer if t.name.endswith("conv1.bias"))
    step = float(converted.get_submodule("activation_quantizers.relu").scale)
    values = numpy_helper.to_array(bias) + np.float32(2 * step)
    bias.CopyFrom(numpy_helper.from_array(values, bias.name))
    with pytest.raises(
        RuntimeError,
        match=r"in onnxruntime by more than rounding ties: .* train that gamma and calibrate again, or disable",
    ):
        verify_onnx(converted, x, proto).check()


@pytest.mark.parametrize("remedy", ["gamma", "off"])
def test_the_remedies_for_a_range_of_rounding_errors(remedy: str, tmp_path) -> None:
    """They are those of the error: the second batch norm gets a constant as long as the gamma of the first is 0."""
    torch.manual_seed(0)
    first, x = nn.BatchNorm2d(64), torch.rand(2, 3, 8, 8)
    nn.init.zeros_(first.weight)
    nn.init.uniform_(first.bias)
    layers = nn.Conv2d(3, 64, 1), first, nn.Conv2d(64, 64, 1), nn.BatchNorm2d(64, momentum=1.0), nn.Conv2d(64, 4, 1)
    model = nn.Sequential(*layers)
    model(x)
    prepared = qt.prepare(model, (x,), "onnxruntime")
    qt.calibrate(prepared, [x], progress=False)
    quantizer = prepared.get_submodule("activation_quantizers._3")
    assert float(quantizer.scale) < 1e-6
    if remedy == "off":
        qt.disable_quantization(quantizer)
    else:
        nn.init.ones_(prepared.get_submodule("1").weight)
        qt.calibrate(prepared, [x], progress=False)
        assert float(quantizer.scale) > 1e-3
    found = qt.export_onnx(prepared, (x,), tmp_path / "m.onnx", exporter="torchscript").verification
    assert found is not None
    assert ("activation_quantizers._3" in found.by_quantizer) is (remedy == "gamma")


@pytest.mark.parametrize(
    ("bits", "dtype", "band"),
    [
        (4, torch.float32, 2**-10),
        (8, torch.float32, 2**-10),
        (16, torch.float32, 0.25),
        (8, torch.float16, 0.249),
        (16, torch.float16, 0.5),
    ],
)
def test_the_band_of_ties_grows_with_the_steps_of_the_grid(bits: int, dtype: torch.dtype, band: float) -> None:
    grid = Grid(torch.tensor(1.0), None, qt.QuantSpec(bits=bits))
    assert tie_band(grid, dtype) == pytest.approx(band, rel=1e-3)


class Unused(nn.Module):
    """A layer whose output nothing takes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused, self.last = nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        self.unused(y)
        return self.last(y)


@pytest.mark.parametrize("route", ["prepare", "replace"])
def test_quantizers_of_what_nothing_takes_are_named_and_no_error(route: str, tmp_path) -> None:
    x = torch.randn(5, 4)
    model = (
        qt.prepare(Unused(), (x,), backend="tensorrt10")
        if route == "prepare"
        else qt.quant_modules.replace(Unused(), backend="tensorrt10")
    )
    qt.calibrate(model, [x], progress=False)
    found = qt.export_onnx(qt.convert(model), x, tmp_path / "model.onnx").verification
    assert "unused.weight_quantizer" in found.unreached
    assert not any(name.startswith(("first", "last")) for name in found.unreached)
    assert found.missing == ()
    assert "not executed or not used for these inputs: unused" in str(found)


def test_a_missing_node_of_what_is_used_stays_an_error() -> None:
    model, x = (
        qt.prepare(
            nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), (torch.ones(1, 4),), backend="tensorrt10"
        ),
        torch.ones(2, 4),
    )
    qt.calibrate(model, [x], progress=False)
    follower = Follower(qt.convert(model), (x,), {})
    assert follower.unused([*follower.names.values()]) == ()


def test_a_quantizer_may_be_called_with_a_tensor_without_elements(tmp_path) -> None:
    """As the decoders of segmentation_models_pytorch are, for encoders without a stage."""

    class Joins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            none = torch.empty(x.shape[0], 0, x.shape[2], x.shape[3])
            return self.last(torch.cat([torch.relu(self.first(x)), none], 1))

    x = torch.randn(2, 3, 4, 4)
    model = qt.prepare(Joins().eval(), (x,), "onnxruntime")
    qt.calibrate(model, [x], progress=False)
    found = qt.export_onnx(qt.convert(model), x, tmp_path / "model.onnx").verification
    assert (found.missing, found.layer_codes.differing) == ((), 0)


class Samples(nn.Module):
    """Draws random numbers in eval mode too, as a variational autoencoder does; `scores` have them without a quantizer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = self.mean(x), self.spread(x).exp()
        y = self.out(mean + torch.randn_like(spread) * spread)
        return y, torch.rand_like(y) * 2


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("route", ["prepared", "replaced"])
def test_random_numbers_are_named_and_what_follows_them_is_compared(route: str, exporter: str, tmp_path) -> None:
    torch.manual_seed(0)
    float_model = Samples().eval()
    if route == "prepared":
        model = qt.prepare(float_model, X, backend="onnxruntime")
    else:
        model = qt.quant_modules.replace(float_model, backend="onnxruntime")
    qt.calibrate(model, [X], progress=False)
    converted = qt.convert(model)
    result = qt.export_onnx(converted, X, tmp_path / "model.onnx", exporter=exporter, progress=False)
    drawn = {"prepared": "activation_quantizers.randn_like", "replaced": "out.input_quantizer"}[route]
    found = result.verification
    assert found.drawn == (drawn,)
    assert f"not compared (random numbers): {drawn}" in str(found)
    assert drawn not in found.by_quantizer
    assert found.layer_codes.compared == 32 * (5 if route == "prepared" else 2)
    assert found.layer_codes.differing == 0
    assert found.output_error < 1e-5
    changed = qt.convert(model)
    with torch.no_grad():
        changed.out.bias += 1  # behind the random numbers
    with pytest.raises(RuntimeError, match="an output differs in onnxruntime|quantized values must equal the model's"):
        verify_onnx(changed, X, result.path).check()


def test_a_model_without_random_numbers_runs_once_more_for_nobody(tmp_path, monkeypatch) -> None:
    runs = []
    converted = converted_pair()
    monkeypatch.setattr(Follower, "_run", lambda self, *args, run=Follower._run: (runs.append(1), run(self, *args))[1])
    result = qt.export_onnx(converted, X, tmp_path / "model.onnx", progress=False)
    assert result.verification.drawn == ()
    assert len(runs) == 2  # by itself, and from the file's codes


class UnusedProduct(nn.Module):
    """A product that is not returned, of a tensor whose quantizer has the grid of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        torch.matmul(x, x.transpose(0, 1))
        return self.layer(torch.relu(x))


def test_a_quantizer_that_nothing_returned_depends_on_is_not_compared_with_another(tmp_path) -> None:
    x = torch.linspace(-1, 2, 32).view(4, 8)
    signed = qt.QConfigMapping().set_global(qt.QConfig(qt.QuantSpec(), qt.QuantSpec(axis=0)))
    prepared = qt.prepare(UnusedProduct().eval(), x, backend="onnxruntime", qconfig_mapping=signed)
    qt.calibrate(prepared, [x], progress=False)
    converted = qt.convert(prepared)
    path = tmp_path / "model.onnx"
    result = qt.export_onnx(converted, x, path)
    assert "activation_quantizers.x" in result.verification.unreached
    qt.export.verify(converted, x, path).check()


def test_nodes_in_another_order_than_the_calls() -> None:
    """Ops that do not depend on each other: as in RAFT, whose concatenations share a quantizer."""
    grid = Grid(torch.tensor([0.5]), None, qt.QuantSpec(), 1, name="q")
    codes = [np.zeros((1, 2), np.int8), np.ones((1, 3), np.int8), np.full((1, 2), 9, np.int8)]
    for order in itertools.permutations(range(3)):
        pairing = Pairing({grid: [NodeCodes(codes[place]) for place in order]}, {grid: 3}, up_to_ties=True)
        for number, of_call in enumerate(codes):
            node = pairing.node_of(QuantizerCall(grid, of_call), number)
            assert node is not None
            assert node.codes is of_call
    pairing = Pairing({grid: [NodeCodes(codes[0]), NodeCodes(codes[0])]}, {grid: 2}, up_to_ties=True)
    assert pairing.node_of(QuantizerCall(grid, codes[1]), 1) is None


class Best(nn.Module):
    """A layer on the places with the best scores, of which most are equal."""

    def __init__(self, best: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.score, self.last, self.best = nn.Linear(16, 4), nn.Linear(16, 8), best
        nn.init.constant_(self.score.bias, -2.0)

    def forward(self, x: Tensor) -> Tensor:
        places = self.best(self.score(x).relu().amax(-1))
        return self.last(x.gather(1, places.unsqueeze(-1).expand(-1, -1, 16)))


BEST = {
    "method": lambda scores: scores.topk(20, dim=1)[1],
    "function": lambda scores: torch.topk(scores, 20)[1],
    "smallest": lambda scores: torch.topk(-scores, k=20, dim=-1, largest=False).indices,
    "unsorted": lambda scores: scores.topk(20, 1, sorted=False).indices,
    "sort": lambda scores: scores.sort(dim=1, descending=True)[1][:, :20],
    "argsort": lambda scores: torch.argsort(-scores, 1)[:, :20],
}


@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt"])
@pytest.mark.parametrize("best", BEST)
def test_of_equal_scores_the_file_and_the_model_choose_the_same(best: str, backend: str, tmp_path) -> None:
    x = torch.randn(2, 400, 16, generator=torch.Generator().manual_seed(0))
    prepared = qt.prepare(Best(BEST[best]).eval(), x, backend=backend)
    qt.calibrate(prepared, [x], progress=False)
    model = qt.convert(prepared)
    result = qt.export_onnx(model, x, tmp_path / "m.onnx")
    found = qt.export.verify(model, x, result.path)
    assert found.runtimes["onnxruntime"].codes.differing == 0
    assert result.verification.quantizer_codes.compared > 2 * 400 * 16
    assert result.verification.layer_codes.differing == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_order_of_a_runtime_is_taken_where_it_orders_the_values(dtype: torch.dtype) -> None:
    x = torch.tensor([[3.0, 1.0, 1.0, 2.0, -torch.inf]], dtype=dtype)
    right, wrong, short = (np.array([places]) for places in ([0, 3, 2], [0, 2, 3], [0, 3]))
    for given, wanted in ((right, [0, 3, 2]), (wrong, [0, 3, 1]), (short, [0, 3, 1]), (None, [0, 3, 1])):
        with OnnxOrder([given]):
            values, places = x.topk(3)
        assert places.tolist() == [wanted]
        assert torch.equal(values, x.gather(1, places))
    with OnnxOrder([np.array([[4, 2, 1, 3, 0]]), right]):
        assert x.argsort().tolist() == [[4, 2, 1, 3, 0]]
        assert torch.topk(x, k=3, dim=1).indices.tolist() == right.tolist()
        assert torch.tensor(2.0).topk(1)[1].item() == 0
    with OnnxOrder([np.array([[2, 0, 1]]), np.array([[0, 1, 2]])]):
        mask = torch.tensor([[True, True, False]])
        assert mask.argsort().tolist() == [[2, 0, 1]]
        assert mask.argsort().tolist() == [[2, 0, 1]], "a runtime's order that is none of the values"
