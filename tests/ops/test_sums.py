"""Sums of products of codes are exact in every kernel."""

import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import qtoolkit as qt
from qtoolkit.integer import int8_product, kernels
from qtoolkit.ops.layer import Geometry
from qtoolkit.ops.sums import Bounds, exact_sums, has_int8_product, may_round, may_transform
from tests import processes
from tests.integer.test_onnxruntime import Net, X, converted


def test_pickles_of_integer_models_name_the_bounds_as_before() -> None:
    bounds = Bounds(2.0, 1.0, 0, 2, 0)
    earlier = pickle.dumps(bounds, protocol=0).replace(b"qtoolkit.ops.sums", b"qtoolkit.integer.sums")
    assert b"qtoolkit.integer.sums" in earlier
    assert pickle.loads(earlier) == bounds


def product(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t()


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40_000), st.integers(-128, 0), st.integers(1, 255), st.integers(0, 2**31))
def test_sums_equal_those_of_integers(length: int, low: int, high: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(low, high + 1, (3, length), generator=generator).float()
    weight = torch.randint(-128, 128, (4, length), generator=generator).float()
    x[0], weight[0] = high, 127  # the largest sum
    bounds = Bounds.of(
        weight.clamp(min=0).sum(1, dtype=torch.float64), -weight.clamp(max=0).sum(1, dtype=torch.float64), low, high
    )
    expected = product(x.long(), weight.long())
    assert expected.abs().max() <= bounds.sums
    assert torch.equal(exact_sums(product, x, weight, bounds).long(), expected)


def test_sums_that_no_digits_can_hold_are_in_float64() -> None:
    x, weight = torch.full((1, 9000), 255.0), torch.full((1, 9000), 127.0)
    bounds = replace(Bounds.of(weight.sum(1), torch.zeros(1), 0, 255), digit_bits=-1)
    y = exact_sums(product, x, weight, bounds)
    assert y.dtype == torch.float64
    assert int(y) == 255 * 127 * 9000


# F(4x4, 3x3) of Lavin and Gray (arXiv 1509.09308), as GPU kernels compute convolutions.
OUTPUT = [[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]]
FILTER = [[6, 0, 0], [-4, -4, -4], [-4, 4, -4], [1, 2, 4], [1, -2, 4], [0, 0, 24]]
INPUT = [
    *([4, 0, -5, 0, 1, 0], [0, -4, -4, 1, 1, 0], [0, 4, -4, -1, 1, 0]),
    *([0, -2, -1, 2, 1, 0], [0, 2, -1, -2, 1, 0], [0, 4, 0, -5, 0, 1]),
]


def winograd(x: Tensor, weight: Tensor) -> Tensor:
    """A 3x3 convolution without padding, by tiles of 4x4 outputs in the type of x."""
    to_output, of_filter, of_input = (torch.tensor(m, dtype=x.dtype) for m in (OUTPUT, FILTER, INPUT))
    filters = of_filter @ weight @ of_filter.t() / 576
    tiles = of_input @ x.unfold(2, 6, 4).unfold(3, 6, 4) @ of_input.t()
    y = to_output @ torch.einsum("ncrsij,ocij->norsij", tiles, filters) @ to_output.t()
    n, o, rows, columns = y.shape[:4]
    return y.transpose(3, 4).reshape(n, o, 4 * rows, 4 * columns)


@pytest.mark.parametrize(("lowest", "digits"), [(-127, False), (1, False), (-127, True)])
def test_sums_of_kernels_that_transform_their_operands_are_exact(lowest: int, digits: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (1, 56, 18, 18), generator=generator).float()
    weight = torch.randint(lowest, 128, (8, 56, 3, 3), generator=generator).float()
    signs = (weight.clamp(min=0), -weight.clamp(max=0))
    bounds = Bounds.of(*(part.flatten(1).sum(1, dtype=torch.float64) for part in signs), 0, 255)
    bounds = replace(bounds, digit_bits=4 if digits else 0)
    expected = torch.conv2d(x.double(), weight.double())
    assert not torch.equal(winograd(x, weight).round().double(), expected)
    assert torch.equal(exact_sums(winograd, x, weight, bounds, transforms=True), expected)


def test_only_convolutions_on_a_gpu_transform_their_operands() -> None:
    class OnGpu:
        is_cuda = True

    assert [may_transform(OnGpu(), convolves) for convolves in (True, False)] == [True, False]
    assert not any(may_transform(X, convolves) for convolves in (True, False))


def test_operands_that_tf32_rounds_are_in_float64_on_a_gpu() -> None:
    class OnGpu:
        is_cuda = True

    byte, more = (-128, 127), (-(2**15), 2**15 - 1)
    assert not may_round(OnGpu(), Bounds.of_two(8, byte, byte))
    assert not may_round(OnGpu(), Bounds.of_two(900, more, byte))  # in digits
    assert may_round(OnGpu(), Bounds.of_two(2, more, byte))
    assert may_round(OnGpu(), Bounds.of_two(2, byte, more))
    assert may_round(OnGpu(), Bounds.of_two(900, more, more))
    weight = torch.ones(1)
    assert may_round(OnGpu(), Bounds.of(weight, weight, *byte, other=2**15))
    assert not may_round(X, Bounds.of_two(2, more, byte))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("signed", [False, True])
def test_without_int8_kernels_the_model_computes_the_same(monkeypatch, signed: bool, bits: int) -> None:
    model = converted(Net(), X, bits, signed)
    expected = model(X)
    monkeypatch.setattr(int8_product, "int8_sums", lambda *_: None)
    for module in model.modules():
        if isinstance(module, kernels.Kernel):
            module.refresh()
    assert torch.equal(model(X), expected)
    for module in model.modules():
        if isinstance(module, kernels.LayerKernel):
            module.bounds = replace(module.bounds, digit_bits=-1)
    assert torch.equal(model(X), expected)


def test_the_int8_kernels_are_used_where_a_trial_shows_them_exact() -> None:
    model = converted(Net(), X)
    model(X)
    used = model.get_submodule("stem.0").integer_kernel._int8
    assert list(used) == [X.shape]
    assert (used[X.shape] is not None) == int8_product.is_exact()


def test_an_empty_batch_and_one_of_another_size() -> None:
    model = converted(Net(), X)
    assert model(X[:0]).shape == (0, 7)
    assert torch.equal(model(X[:1]), model(X)[:1])


def test_a_large_layer_splits_its_codes_into_digits() -> None:
    model = converted(torch.nn.Sequential(torch.nn.Linear(5000, 3, bias=False)), torch.rand(4, 5000) + 1)
    kernel = model.get_submodule("0").integer_kernel
    kernel.layer.weight.data.fill_(1.0)
    kernel.refresh()
    assert kernel.bounds.digit_bits > 0
    x = model.get_submodule("activation_quantizers.input_1")(torch.rand(4, 5000) + 1)
    expected = (kernel.inputs[0].centred(x).long() @ kernel.codes.long().t()).double()
    assert torch.equal(kernel.sums(x).double(), expected)
    assert isinstance(qt.quantization_report(model).layers[0].reason, str)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("signed", [False, True])
def test_products_of_int8_matrices_give_the_same_model(monkeypatch, signed: bool, bits: int) -> None:
    """As on a GPU: the depthwise layer has none."""
    model = converted(Net(), X, bits, signed)
    expected = model(X)
    monkeypatch.setattr(int8_product, "computes_on", lambda device: True)
    assert torch.equal(model(X), expected)
    assert torch.equal(model(X[:1]), expected[:1])
    assert torch.equal(pickle.loads(pickle.dumps(model))(X), expected)
    used = {n: m._products for n, m in model.named_modules() if isinstance(m, kernels.LayerKernel)}
    without = [name for name, products in used.items() if [*products.values()] == [None]]
    assert without == ["depthwise.0.integer_kernel"]
    assert len(used) == 7


def test_only_layers_on_bytes_are_products_of_int8_matrices() -> None:
    byte, wide, unsigned = qt.QuantSpec(), qt.QuantSpec(bits=16), qt.QuantSpec(signed=False)
    weight, small = torch.ones(3, 8), Bounds.of_two(8, (-128, 127), (-128, 127))
    found = int8_product.code_sums(unsigned, byte, Geometry(), small, weight)
    assert found is not None
    assert torch.equal(found(torch.full((2, 8), 200).byte(), torch.tensor(100.0)), torch.full((2, 3), 800.0))
    large = replace(small, weights=2.0**31 / 128)
    for arguments in (
        (wide, byte, Geometry(), small),
        (byte, wide, Geometry(), small),
        (byte, unsigned, Geometry(), small),
        (byte, byte, None, small),
        (byte, byte, Geometry(), large),
        (byte, byte, Geometry((1,), (0,), (1,), groups=2), small),
        (byte, byte, Geometry((1,), (0,), (1,), (0,), transposed=True), small),
    ):
        assert int8_product.code_sums(*arguments, weight) is None


WITHOUT_THE_PRODUCT = """
import torch
from qtoolkit.ops.sums import has_int8_product


def refuse(*_):
    raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")


library = torch.library.Library("aten", "IMPL")
library.impl("_int_mm", refuse, "CPU")
print(has_int8_product(torch.device("cpu")), has_int8_product(torch.device("cpu")))
"""


def test_a_device_that_refuses_the_product_has_none() -> None:
    ran = processes.python("-c", WITHOUT_THE_PRODUCT)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.split() == ["False", "False"]
    assert [has_int8_product(torch.device(name)) for name in ("meta", "cpu")] == [False, True]
    assert not int8_product.computes_on(torch.device("cpu"))
