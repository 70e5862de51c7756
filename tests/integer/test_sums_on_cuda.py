"""Integer sums on a GPU: those of int64 bit for bit, by products of int8 matrices where a layer is one, without waiting.

Layers with groups and transposed ones have sums in float64. tests/ops/test_code_sums.py runs the same body on the CPU.
"""

import copy
import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit import ops
from qtoolkit.integer import int8_product, kernels
from qtoolkit.ops.sums import exact_matmul, has_int8_product
from tests.integer.test_onnxruntime import Net, X, converted
from tests.ops.test_code_sums import CHECKS, LINEAR, RANGES, assert_exact, check_convolutions, drawn
from tests.ops.test_layer import GRIDS, SHAPES, WIDE, Given, Shape, exact, given
from tests.training.test_cuda import losses, no_waiting, optimizer_of, prepared

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

IN_FLOAT64 = ("conv1d", "conv2d_depthwise", "conv2d_dilation", "conv3d")  # with groups


@pytest.fixture(autouse=True)
def _float32() -> Iterator[None]:
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def ops_of(f) -> set[str]:
    """The names of torch's ops that a function calls."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        f()
    return {event.name for event in profile.events()}


def there(g: Given) -> Given:
    """The same arguments on the GPU."""

    def move(value: object) -> object:
        if isinstance(value, Tensor):
            return value.detach().cuda().requires_grad_(value.requires_grad)
        fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
        found = {field.name: move(getattr(value, field.name)) for field in fields}
        return dataclasses.replace(value, **found) if found else value

    return move(g)


def assert_is_exact_there(g: Given, shape: Shape) -> None:
    """Up to a rounding of the sum, of its product with the step, and of the sum with the bias."""
    y, (wanted, magnitude) = there(g).run(integer=True), exact(g, shape)
    assert y.is_cuda
    assert ((y.cpu().double() - wanted).abs() <= 3 * 2.0**-24 * magnitude).all()


def test_the_gpu_has_the_product() -> None:
    assert has_int8_product(torch.device("cuda"))
    assert int8_product.computes_on(torch.device("cuda", 0))
    assert not int8_product.computes_on(torch.device("cpu"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_sums(check) -> None:
    check("cuda")


@pytest.mark.parametrize("seed", range(0, 400, 40))
def test_sums_of_convolutions(seed: int) -> None:
    check_convolutions("cuda", range(seed, seed + 40))


def test_sums_of_any_depth_and_number_of_outputs() -> None:
    """cuBLASLt chooses its kernel by the sizes: many of them, small and large."""
    torch.manual_seed(0)
    sizes = [(33, depth, outputs) for depth in range(8, 136, 8) for outputs in range(8, 136, 8)]
    sizes += itertools.product((17, 100, 1000, 4097), (8, 40, 768, 4096), (8, 24, 768, 3072))
    for rows, depth, outputs in sizes:
        weight = drawn((outputs, depth), torch.int8, -128, 127, "cuda")
        codes = drawn((rows, depth), *RANGES["signed"], "cuda")
        wanted = codes.double() @ weight.double().t()
        layer = torch.classes.qtoolkit.CodeSums(weight, [], [], [])
        assert torch.equal(layer.sums(codes, None, torch.float64), wanted), (rows, depth, outputs)


def test_views_that_begin_at_any_byte() -> None:
    torch.manual_seed(0)
    weight = drawn((16, 24), torch.int8, -128, 127, "cuda")
    storage = drawn((40 * 24 + 64,), *RANGES["signed"], "cuda")
    for start in (*range(9), 16, 48):
        assert_exact(storage[start : start + 40 * 24].view(40, 24), 3, weight, LINEAR)


# ---- layers in training


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("codes", "zero_point"), GRIDS)
def test_layers(shape: Shape, codes: tuple[int, int], zero_point: float | None) -> None:
    for bias, per_output in ((True, True), (False, False)):
        g = given(shape, codes=codes, x_zero_point=zero_point, bias=bias, per_output=per_output)
        assert_is_exact_there(g, shape)


@pytest.mark.parametrize("name", WIDE)
def test_layers_with_sums_of_any_size(name: str) -> None:
    for shape in WIDE[name]:
        for codes, zero_point in (((0, 255), 0.0), ((-128, 127), 127.0)):
            g = given(shape, codes=codes, x_zero_point=zero_point, bias=False, factor=False, per_output=False)
            end = 25.5 if codes[0] == 0 else -25.5
            g.x = torch.full_like(g.x, end)
            values = torch.full_like(g.codes.codes, 255 if codes[0] == 0 else -128)
            g.codes = dataclasses.replace(g.codes, codes=values)
            g.weight = torch.full_like(g.weight, 100.0)
            assert_is_exact_there(g, shape)


@pytest.mark.parametrize("name", SHAPES)
def test_which_layers_are_products(name: str) -> None:
    g = there(given(SHAPES[name], codes=(0, 255), x_zero_point=114.0))
    g.run(integer=True)
    found = "aten::_int_mm" in ops_of(lambda: g.run(integer=True))
    assert found == (name not in IN_FLOAT64 and not SHAPES[name].geometry.transposed)


@pytest.mark.parametrize("name", ["conv2d", "conv2d_pointwise", "conv2d_depthwise", "transposed2d", "linear3d"])
def test_no_layer_waits_for_the_device(name: str) -> None:
    g = there(given(SHAPES[name], codes=(0, 255), x_zero_point=114.0))
    y = g.run(integer=True)
    grad = torch.ones_like(y)
    torch.autograd.grad(g.run(integer=True), g.leaves(), grad)
    with no_waiting():
        torch.autograd.grad(g.run(integer=True), g.leaves(), grad)


def test_a_zero_point_outside_the_codes() -> None:
    shape = SHAPES["conv2d"]
    g = given(shape)
    g = dataclasses.replace(g, bias=None, codes=dataclasses.replace(g.codes, zero_point=torch.tensor(-1e4)))
    weight = ops.quantize(shape.scaled(g.weight, g.factor), g.grid.scale, None, -127, 127, 0, dtype=torch.int8)
    sums = shape.compute(g.codes.codes.double() + 1e4, weight.double(), None)
    wanted = sums.float() * shape.over_outputs(g.grid.scale * g.codes.scale)
    assert torch.equal(there(g).run(integer=True).cpu(), wanted)
    g.codes = dataclasses.replace(g.codes, zero_point=torch.tensor(float("nan")))
    assert there(g).run(integer=True).isnan().all()


def test_a_layer_in_a_cuda_graph() -> None:
    g = there(given(SHAPES["conv2d"], codes=(0, 255), x_zero_point=114.0))
    with torch.no_grad():
        wanted = g.run(integer=True)
        g.run(integer=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = g.run(integer=True)
    found.zero_()
    graph.replay()
    assert torch.equal(found, wanted)


def test_training_steps_on_codes_are_those_of_the_cpu() -> None:
    on_gpu = prepared("cuda", "lsq")
    on_cpu = copy.deepcopy(on_gpu).cpu()
    for model in (on_gpu, on_cpu):
        qt.nn.set_training_arithmetic(model, "integer")
    assert "aten::_int_mm" in ops_of(lambda: copy.deepcopy(on_gpu)(torch.randn(8, 3, 12, 12).cuda()))
    found, wanted = (losses(model, optimizer_of(model)) for model in (on_gpu, on_cpu))
    assert found[0] == pytest.approx(wanted[0], rel=0.005)
    assert found == pytest.approx(wanted, rel=0.02)


# ---- converted models


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("signed", [False, True])
def test_converted_models_have_the_sums_of_float64(monkeypatch, signed: bool, bits: int) -> None:
    model = converted(Net(), X, bits, signed).cuda()
    inputs: dict[str, Tensor] = {}

    def keep(name: str):
        return lambda _, args: inputs.__setitem__(name, args[0])

    layers = {n: m for n, m in model.named_modules() if isinstance(getattr(m, "integer_kernel", None), kernels.Kernel)}
    hooks = [layer.register_forward_pre_hook(keep(name)) for name, layer in layers.items()]
    y = model(X.cuda())
    for hook in hooks:
        hook.remove()
    assert len(inputs) == 7
    found = {name: layers[name].integer_kernel.sums(x) for name, x in inputs.items()}
    products = {
        n for n, x in inputs.items() if "aten::_int_mm" in ops_of(lambda n=n, x=x: layers[n].integer_kernel.sums(x))
    }
    assert products == inputs.keys() - {"depthwise.0"}
    monkeypatch.setattr(int8_product, "computes_on", lambda device: False)
    assert "aten::_int_mm" not in ops_of(lambda: model(X.cuda()))
    for name, x in inputs.items():
        wanted = layers[name].integer_kernel.sums(x)
        assert torch.equal(found[name].double(), wanted.double()), name
    assert torch.equal(model(X.cuda()), y)


def test_a_model_that_goes_from_one_device_to_the_other() -> None:
    """Each device has its own rows of weights. Average pools are means in float32, in the order of the device."""
    model = converted(Net(), X)
    wanted = {"cpu": model(X), "cuda": copy.deepcopy(model).cuda()(X.cuda())}
    for device in ("cuda", "cpu", "cuda"):
        assert torch.equal(model.to(device)(X.to(device)), wanted[device])


def test_a_large_layer_has_exact_sums() -> None:
    model = converted(nn.Sequential(nn.Linear(5000, 3, bias=False)), torch.rand(4, 5000) + 1).cuda()
    kernel = model.get_submodule("0").integer_kernel
    kernel.layer.weight.data.fill_(1.0)
    kernel.refresh()
    x = model.get_submodule("activation_quantizers.input_1")(torch.rand(4, 5000).cuda() + 1)
    expected = kernel.inputs[0].centred(x).cpu().long() @ kernel.codes.cpu().long().t()
    assert kernel.sums(x).dtype == torch.float64
    assert torch.equal(kernel.sums(x).cpu(), expected.double())


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_products_of_activations_are_exact_where_float32_is_tf32(precision: str) -> None:
    torch.manual_seed(0)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        for terms, bits, others in ((64, 8, 8), (3000, 8, 8), (2, 16, 8), (2, 8, 16), (64, 16, 16)):
            ends, of_other = ((-(2 ** (n - 1)), 2 ** (n - 1) - 1) for n in (bits, others))
            x, other = (torch.randint(low, high + 1, (33, terms)) for low, high in (ends, of_other))
            y = exact_matmul(x.float().cuda(), other.t().float().cuda(), ends, of_other)
            assert torch.equal(y.cpu().long(), x @ other.t()), (terms, bits, others)
    finally:
        torch.set_float32_matmul_precision(before)
