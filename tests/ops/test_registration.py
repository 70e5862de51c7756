"""How the ops meet the rest of torch: opcheck, compile, export, meta tensors, autocast, deterministic mode."""

import contextlib
import re

import pytest
import torch
import torch._dynamo.compiled_autograd
from torch import Tensor, nn

from qtoolkit import _native, ops
from qtoolkit.ops.layer import Codes, Geometry, WeightGrid, quant_layer, quant_weight
from tests.cases import (
    CHANNELS,
    CODES,
    FLOATS,
    LAYOUTS,
    Channels,
    assert_same,
    codes,
    floats,
    leaf,
    name_of,
    scales,
    zero_points,
)

native = torch.ops.qtoolkit
GRID = {"qmin": -100, "qmax": 90}
OPS = (
    *("fake_quant", "fake_quant_backward", "fake_quant_learned_backward"),
    *("quantize", "dequantize", "quantize_int4", "dequantize_int4", "minmax", "observe_minmax_"),
    *("observe_histogram_", "search_range"),
    *("fake_quant_", "observe_fake_quant", "grid_of_range", "take_range_", "positive_scale", "float16_scale"),
    *("quant_layer", "quant_layer_backward", "quant_weight", "quant_weight_backward"),
    *("batch_norm_fake_quant", "batch_norm_fake_quant_backward", "batch_norm_track_", "batch_norm_rescale_"),
    *("max_pool_offsets", "max_pool_offsets_backward"),
    *("fake_quant_shaped", "fake_quant_shaped_backward"),
    *("prelu_fake_quant", "prelu_fake_quant_backward"),
)


# ---- opcheck ----------------------------------------------------------------------------------------------------------


def image(layout: str = "contiguous", dtype: torch.dtype = torch.float32) -> Tensor:
    return LAYOUTS[layout](floats(dtype))


def fake_quant_arguments() -> dict[str, tuple]:
    x, s, z = image(), scales(6), zero_points(6)
    return {
        "per_tensor": (x, scales(1), None, -128, 127),
        "masked": (x, scales(1), None, -128, 127, None, 1, 0, 1.0, True),
        "fixed": (leaf(x), scales(1), zero_points(1), -128, 127),
        "learned": (leaf(x), leaf(s), leaf(z), -100, 90, 1, 1, 0, 0.5),
        "learned_symmetric": (leaf(x), leaf(s), None, -100, 90, 1),
        "learned_scale_alone": (x, leaf(s), z, -100, 90, 1),
        "channels_last": (leaf(image("channels_last")), s, z, -100, 90, 1),
        "channels_last_learned": (leaf(image("channels_last", torch.bfloat16)), leaf(s), z, -100, 90, 1),
        "sliced": (leaf(image("sliced")), scales(1), None, -8, 7),
        "expanded": (leaf(image("expanded")), scales(5), None, -8, 7, -1),
        "grouped": (leaf(x), leaf(scales(12)), None, -8, 7, 1, 2),
        "grouped_transposed": (leaf(image("transposed")), leaf(scales(10)), None, -8, 7, 1, 2),
        "blocks": (leaf(x), leaf(scales(4 * 2 * 35).view(4, 2, 5, 7)), None, -8, 7, 1, 1, 3),
        "blocks_channels_last": (
            leaf(image("channels_last")),
            leaf(scales(280)),
            zero_points(280),
            -8,
            7,
            1,
            1,
            3,
            0.5,
        ),
        "blocks_fixed": (leaf(image("permuted")), scales(168), zero_points(168), -8, 7, -1, 1, 5),
        "empty": (leaf(image("empty")), leaf(scales(1)), None, -8, 7),
        "0-d": (leaf(image("0-d")), leaf(scales(1)[0]), None, -8, 7),
        "float64": (leaf(image(dtype=torch.float64)), leaf(s.half()), z.double(), -8, 7, 1),
    }


def learned_backward_arguments() -> dict[str, tuple]:
    x, grad = image(), floats(torch.float32, 7)(4, 6, 5, 7)
    return {
        "symmetric": (grad, x, scales(6), None, -100, 90, 1),
        "zero_point": (grad, x, scales(6), zero_points(6), -100, 90, 1),
        "channels_last": (grad, image("channels_last"), scales(1), zero_points(1).half(), -100, 90),
        "blocks": (grad, image("channels_last"), scales(280).view(4, 2, 5, 7), zero_points(280), -100, 90, 1, 1, 3),
        "grouped": (grad.bfloat16(), x.bfloat16(), scales(12).view(2, 6), None, -100, 90, 1, 2, 0, 0.1),
    }


def prelu_arguments() -> dict[str, tuple]:
    x, w = image(), torch.linspace(-0.5, 0.5, 6)
    last = image("channels_last", torch.bfloat16)
    return {
        "channels": (leaf(x), leaf(w), leaf(scales(1)), None, -100, 90, 0.5),
        "one": (leaf(image("sliced")), leaf(w[:1]), leaf(scales(1)[0]), zero_points(1), -100, 90),
        "fixed_scale": (leaf(last), leaf(w.bfloat16()), scales(1), None, 0, 90),
        "fixed_weight": (leaf(x), w, scales(1), zero_points(1), -100, 90),
        "empty": (leaf(image("empty")), leaf(w[:1]), leaf(scales(1)), None, -8, 7),
        "inference": (x, w, scales(1), None, -8, 7),
    }


def prelu_backward_arguments() -> dict[str, tuple]:
    sets = prelu_arguments().items()
    return {
        name: (torch.ones_like(x), x.detach(), w.detach(), scale.detach(), *codes)
        for name, (x, w, scale, *codes) in sets
    }


def shaped_arguments() -> dict[str, tuple]:
    x, s, z, k = image(), scales(6), zero_points(6), torch.linspace(1, 7, 6)
    last = image("channels_last", torch.bfloat16)
    blocks = scales(280).view(4, 2, 5, 7)
    return {
        "clip": (leaf(x), leaf(s), None, None, -100, 90, "clip", [], 1),
        "clip_affine": (leaf(last), leaf(s), leaf(z), None, -100, 90, "clip", [], 1),
        "soft": (leaf(x), leaf(s), None, leaf(k), -8, 7, "clip", [], 1),
        "soft_affine": (leaf(x), leaf(s), leaf(z), leaf(k), -8, 7, "clip", [], 1),
        "soft_fixed": (leaf(x), s, z, k, -8, 7, "clip", [], 1),
        "levels": (leaf(x), leaf(scales(1)), None, None, -4, 4, "levels", [0, 1, 2, 4]),
        "levels_in_blocks": (leaf(x), leaf(blocks), None, None, 0, 4, "levels", [0, 1, 2, 4], 1, 1, 3),
        "interval": (leaf(x), leaf(s), leaf(s * 2), None, -1, 1, "interval", [], 1),
        "interval_unsigned": (leaf(image("sliced")), leaf(scales(1)), scales(1), None, 0, 1, "interval"),
        "inference": (x, s, z, None, -8, 7, "clip", [], 1),
    }


def shaped_backward_arguments() -> dict[str, tuple]:
    grad = floats(torch.float32, 7)(4, 6, 5, 7)
    whole = {name: args for name, args in shaped_arguments().items() if args[0].shape == grad.shape}
    return {name: (grad, *(a.detach() if isinstance(a, Tensor) else a for a in args)) for name, args in whole.items()}


def backward_arguments() -> dict[str, tuple]:
    grad, mask = floats(torch.float32)(4, 6, 5, 7), torch.randint(0, 256, (105,), dtype=torch.uint8)
    return {
        "row_major": (grad, mask, []),
        "channels_last": (grad, mask, [0, 2, 3, 1]),
        "differentiable": (leaf(grad), mask, [0, 2, 3, 1]),
        "expanded": (torch.ones(()).expand(4, 6, 5, 7), mask, [3, 2, 1, 0]),
    }


def other_arguments() -> list:
    x, lo, hi = image("channels_last"), torch.zeros(6), torch.zeros(6)
    sets = {
        "quantize": [((x, scales(6), zero_points(6), 0, 127, 1), {"dtype": d}) for d in CODES],
        "dequantize": [
            ((LAYOUTS["sliced"](codes(c)), scales(1), None), {"dtype": d}) for c, d in zip(CODES, FLOATS, strict=False)
        ],
        "quantize_int4": [
            ((x, scales(6), zero_points(6), 0, 15, 1), {}),
            ((x, scales(280).view(4, 2, 5, 7), None, -8, 7, 1, 1, 3), {}),
        ],
        "dequantize_int4": [
            ((codes(torch.uint8)(420), [4, 6, 5, 7], scales(280), None, True, 1, 1, 3), {"dtype": torch.bfloat16}),
            ((codes(torch.uint8)(3), [5], scales(1), zero_points(1), False), {"dtype": torch.float64}),
        ],
        "minmax": [
            *(((x,), {}), ((x, 1), {}), ((x, 1, 2), {}), ((image("sliced", torch.float16), -1), {})),
            ((x, 1, 1, 2), {}),
        ],
        "observe_minmax_": [
            ((x, lo, hi, None, 1), {}),
            ((x, lo, hi, 0.1, 1), {}),
            ((x, torch.zeros(4, 2, 5, 7), torch.zeros(4, 2, 5, 7), 0.1, 1, 1, 3), {}),
            ((x, lo[:1].double(), hi[:1].double()), {}),
        ],
    }
    return [pytest.param(op, *given, id=f"{op}-{i}") for op, each in sets.items() for i, given in enumerate(each)]


def positional(op: str, sets: dict[str, tuple]) -> list:
    return [pytest.param(op, args, {}, id=f"{op}-{name}") for name, args in sets.items()]


@pytest.mark.parametrize(
    ("op", "args", "kwargs"),
    [
        *positional("fake_quant", fake_quant_arguments()),
        *positional("fake_quant_backward", backward_arguments()),
        *positional("fake_quant_learned_backward", learned_backward_arguments()),
        *positional("prelu_fake_quant", prelu_arguments()),
        *positional("prelu_fake_quant_backward", prelu_backward_arguments()),
        *positional("fake_quant_shaped", shaped_arguments()),
        *positional("fake_quant_shaped_backward", shaped_backward_arguments()),
        *other_arguments(),
    ],
)
def test_opcheck(op, args, kwargs):
    torch.library.opcheck(getattr(native, op).default, args, kwargs)


WITHOUT_GRADIENT = {
    "minmax": (lambda x: ops.minmax(x)[1], "use torch.amin and torch.amax, or pass x.detach()."),
    "dequantize": (lambda x: ops.dequantize(codes(torch.int8)(3), x, axis=0).sum(), "use fake_quant, which has"),
    "dequantize_int4": (
        lambda x: ops.dequantize_int4(codes(torch.uint8)(2), [3], x, axis=0).sum(),
        "use fake_quant, which has",
    ),
    "grid_of_range": (lambda x: ops.grid_of_range(-x.abs(), x.abs(), -8, 7)[0].sum(), "pass lo.detach() and hi.detach"),
    "search_range": (
        lambda x: ops.search_range(torch.ones(3, 8, dtype=torch.long), -x.abs(), x.abs(), -8, 7, "mse")[0].sum(),
        "pass lo.detach() and hi.detach()",
    ),
}


@pytest.mark.parametrize("op", WITHOUT_GRADIENT)
def test_no_gradient_is_lost_in_silence(op):
    """They have none; to go backward through them is an error (torch's default is a warning, and None)."""
    call, remedy = WITHOUT_GRADIENT[op]
    y = call(leaf(floats(torch.float32)(3)))
    with pytest.raises(NotImplementedError, match=f"^{op}: has no gradient; {re.escape(remedy)}"):
        y.backward()
    assert not call(floats(torch.float32)(3)).requires_grad


# ---- other modes of differentiation -----------------------------------------------------------------------------------

DIFFERENTIABLE = {
    "fake_quant": lambda x: ops.fake_quant(x, torch.tensor(0.5)),
    "fake_quant_": lambda x: ops.fake_quant_(x * 1, torch.tensor(0.5)),
    "fake_quant_float": lambda x: ops.fake_quant_float(x, torch.tensor(0.5), "e4m3"),
    "fake_quant_block": lambda x: ops.fake_quant_block(x, "e4m3", 16),
    "observe_fake_quant": lambda x: native.observe_fake_quant(
        x, torch.zeros(1), torch.zeros(1), torch.ones(1), None, -8, 7
    )[0],
    "fake_quant_shaped": lambda x: ops.fake_quant_clipped(x, torch.tensor(0.5)),
    "prelu_fake_quant": lambda x: ops.prelu_fake_quant(x, torch.tensor([0.1]), torch.tensor(0.5)),
    "tensor_quant": lambda x: ops.tensor_quant(x, torch.tensor(1.0))[0],
    "fake_tensor_quant": lambda x: ops.fake_tensor_quant(x, torch.tensor(1.0)),
    "minmax": lambda x: ops.minmax(x)[0],
    "quant_layer": lambda x: linear(x.reshape(4, -1)),
    "quant_weight": lambda x: quant_weight(x, WeightGrid(torch.tensor(0.5), None, -8, 7)),
    "batch_norm_fake_quant": lambda x: ops.batch_norm_fake_quant(x.reshape(-1, 2), None, None, scale=torch.ones(1))[0],
    "max_pool_offsets": lambda x: ops.max_pool(x.reshape(1, 4, -1), 2),
}


def linear(x: Tensor) -> Tensor:
    codes = Codes(ops.quantize(x.detach(), torch.tensor(0.1)), torch.tensor(0.1), None, -128, 127)
    return quant_layer(x, codes, torch.ones(2, x.size(1)), WeightGrid(torch.tensor(0.1), None, -8, 7), Geometry())


def dual(f, x: Tensor) -> None:
    with torch.autograd.forward_ad.dual_level():
        f(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))


FORWARD = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "dual": dual,
    "dual_that_requires_grad": lambda f, x: dual(f, leaf(x)),
}


@pytest.mark.parametrize("mode", FORWARD)
@pytest.mark.parametrize("op", DIFFERENTIABLE)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_forward_mode_is_never_silently_zero(op, mode):
    with pytest.raises(NotImplementedError, match=f"^{op}: forward-mode AD .* is not supported; use reverse mode"):
        FORWARD[mode](DIFFERENTIABLE[op], floats(torch.float32)(32))


@pytest.mark.parametrize("tangent", ["scale", "zero_point"])
def test_forward_mode_in_a_grid_is_never_silently_zero(tangent):
    given = {"scale": scales(1), "zero_point": zero_points(1)}
    with pytest.raises(NotImplementedError, match="^fake_quant: forward-mode AD"):
        dual(lambda t: ops.fake_quant(torch.ones(4), **given | {tangent: t}), given[tangent])


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones_like(x)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "vmap_of_grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(torch.stack([x, x])),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).sum())(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("op", DIFFERENTIABLE)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradient_transforms_say_what_to_use(op, transform):
    with pytest.raises(NotImplementedError, match=f"^{op}: the gradient transforms of torch.func .*functional_call"):
        TRANSFORMS[transform](DIFFERENTIABLE[op], floats(torch.float32)(32))


def test_functional_call_with_backward():
    """The remedy that the errors name."""
    block, x = Block(learned=True), floats(torch.float32)(2, 6, 9, 9)
    parameters = {name: leaf(p) for name, p in block.named_parameters()}
    got = torch.autograd.grad(torch.func.functional_call(block, parameters, (x,)).sum(), [*parameters.values()])
    for g, w in zip(got, torch.autograd.grad(block(x).sum(), [*block.parameters()]), strict=True):
        assert_same(g, w)


NATIVE_CALLS = {
    "fixed": lambda x: native.fake_quant(x, scales(1), None, -8, 7),
    "learned": lambda x: native.fake_quant(x, leaf(scales(1)), zero_points(1), -8, 7, mask=True),
    "shaped": lambda x: (ops.fake_quant_clipped(x, leaf(scales(1)), leaf(zero_points(1)), -8, 7),),
    "block": lambda x: native.fake_quant_block(x, "e4m3", 16, "e8m0"),
    "in_place": lambda x: (ops.fake_quant_(x * 1, scales(1)),),
    "legacy": lambda x: native.tensor_quant(x, torch.tensor(1.0)),
    "layer": lambda x: (linear(x),),
    "batch_norm": lambda x: ops.batch_norm_fake_quant(x, leaf(torch.ones(32)), None, scale=leaf(scales(1))),
}


@pytest.mark.parametrize("call", NATIVE_CALLS)
def test_backward_fills_no_gradient_with_zeros(call):
    """The mask needs none: it is as large as an eighth of the input."""
    y = NATIVE_CALLS[call](leaf(floats(torch.float32)(4, 32)))[0]
    grad = torch.ones_like(y)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y.backward(grad)
    names = {event.name for event in profile.events()}
    assert any(re.fullmatch(r"qtoolkit::\w*quant\w*_backward", name) for name in names)
    assert not names & {"aten::zeros", "aten::zero_", "aten::fill_"}


class Undefined(torch.autograd.Function):
    """The identity, whose gradient is undefined."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> None:
        return None


@pytest.mark.parametrize("call", NATIVE_CALLS)
def test_an_undefined_gradient_stays_undefined(call):
    x = leaf(floats(torch.float32)(4, 32))
    y = NATIVE_CALLS[call](x)[0]
    assert torch.autograd.grad(Undefined.apply(y).sum(), x, allow_unused=True) == (None,)


@pytest.mark.parametrize("call", NATIVE_CALLS)
def test_compiled_autograd_over_eager_forwards(call):
    def gradient(mode) -> Tensor:
        x = leaf(floats(torch.float32)(4, 32))
        loss = (NATIVE_CALLS[call](x)[0] ** 2).sum()
        with mode:
            loss.backward()
        return x.grad

    torch._dynamo.reset()
    compiled = torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
    assert_same(gradient(compiled), gradient(contextlib.nullcontext()))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "sliced", "expanded", "0-d", "empty"])
def test_snapshot_is_a_copy(layout):
    x = image(layout)
    before, copy = x.clone(), ops.snapshot(x)
    assert_same(copy, x)
    assert copy.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() or x.numel() == 0
    torch.library.opcheck(native.snapshot.default, (x,))
    assert_same(x, before)


def test_snapshot_is_detached():
    assert not ops.snapshot(leaf(image())).requires_grad


def test_snapshot_of_what_changes_is_refused_in_backward():
    x, copies = leaf(image()), []
    x.register_hook(lambda grad: copies.append(ops.snapshot(x)))
    x.sum().backward()
    assert_same(copies[0], x)
    x.register_hook(lambda grad: ops.snapshot(x, changes=True))
    with pytest.raises(RuntimeError, match="batch norms that train runs in backward"):
        x.sum().backward()
    assert_same(ops.snapshot(x, changes=True), x)


@pytest.mark.parametrize("op", OPS)
def test_schema_and_kernels(op):
    for key in ("CPU", "Meta"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"qtoolkit::{op}", key)
    updated = {
        "observe_minmax_": ["lo", "hi", "skipped"],
        "observe_histogram_": ["counts", "lo", "hi"],
        "fake_quant_": ["x"],
        "observe_fake_quant": ["lo", "hi", "scale", "zero_point", "skipped"],
        "take_range_": ["scale", "zero_point", "count"],
        "batch_norm_track_": ["running_mean", "running_var"],
        "batch_norm_rescale_": ["start", "rate", "known", "held", "taken"],
    }
    mutated = [a.name for a in getattr(native, op).default._schema.arguments if a.alias_info and a.alias_info.is_write]
    assert mutated == updated.get(op, [])


NOT_BUILT = r": this build of qtoolkit has no CUDA kernels; .* rebuild it .*QTOOLKIT_CUDA=1 pip install .*x\.cpu\(\)"


@pytest.mark.parametrize("op", OPS)
def test_a_build_without_cuda_says_how_to_rebuild(op):
    """The kernel that the dispatcher calls for CUDA tensors, called here without a GPU; it reads no argument."""
    if "libcudart" in _native.FILE.read_bytes().decode("latin-1"):
        pytest.skip("CUDA kernels are built in")
    overload = getattr(native, op).default
    placeholders = {"Tensor": torch.ones(1), "Optional[Tensor]": None, "int": 1, "SymInt": 1, "float": 1.0, "str": ""}
    placeholders |= {"bool": True, "Optional[int]": None, "List[bool]": [True] * 7}
    args = [
        placeholders.get(str(a.type), [1])
        for a in overload._schema.arguments
        if not a.has_default_value() and not a.kwarg_only
    ]
    kwargs = {a.name: torch.float32 for a in overload._schema.arguments if a.kwarg_only}
    with pytest.raises(NotImplementedError, match=f"^qtoolkit::{op}{NOT_BUILT}"):
        overload._op_dk(torch._C.DispatchKey.CUDA, *args, **kwargs)


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("mask", [False, True])
def test_mask_is_empty_where_nobody_needs_it(needs_grad, mask):
    """Autograd does where x requires grad."""
    x = floats(torch.float32)(50).requires_grad_(needs_grad)
    packed = native.fake_quant(x, scales(1), None, -8, 7, mask=mask)[1]
    assert not packed.requires_grad
    assert packed.shape == ((7,) if mask or needs_grad else (0,))


# ---- compile ----------------------------------------------------------------------------------------------------------


def fixed(x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    return ops.fake_quant(torch.relu(x * 2), scale, zero_point, axis=1, **GRID) + 1


def learned(x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    return ops.fake_quant(x.sin() * 9, scale.abs(), zero_point * 1, axis=1, **GRID, grad_factor=0.3).exp()


def in_blocks(x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    grid = [t.view(1, 6, 1, 1).expand(x.size(0), 6, *x.shape[2:])[:, ::2] * 1 for t in (scale, zero_point)]
    y = ops.fake_quant(x * 2, *grid, axis=1, block_size=2, **GRID)
    packed = ops.quantize_int4(x, *grid, axis=1, block_size=2)
    back = ops.dequantize_int4(packed, x.shape, *grid, axis=1, block_size=2)
    return y + back.detach() + ops.minmax(x.detach(), 1, 1, 2)[0].repeat_interleave(2, 1)


def deployed(x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    q = ops.quantize(x, scale, zero_point, axis=1)
    return ops.dequantize(q, scale, zero_point, axis=1) + ops.minmax(x, axis=1)[0].view(-1, 1, 1)


def results(f, x: Tensor, *, grads: tuple[str, ...]) -> list[Tensor]:
    """The value and the gradients of what `grads` names."""
    tensors = {"x": x, "scale": scales(6), "zero_point": zero_points(6)}
    inputs = {name: leaf(t) if name in grads else t for name, t in tensors.items()}
    y = f(*inputs.values())
    if not grads:
        return [y]
    return [y, *torch.autograd.grad(y, [inputs[g] for g in grads], floats(torch.float32, 7)(*y.shape))]


JOBS = {
    "fixed": (fixed, ("x",)),
    "fixed_inference": (fixed, ()),
    "learned": (learned, ("x", "scale", "zero_point")),
    "deployed": (deployed, ()),
    "blocks": (in_blocks, ("x",)),
    "blocks_learned": (in_blocks, ("x", "scale", "zero_point")),
}


def check_compiled(job: str, backend: str, layouts: tuple[str, ...], dynamic: bool) -> None:
    """Exact but for Inductor's own arithmetic around the op, which may differ in the last bits."""
    f, grads = JOBS[job]
    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend=backend, dynamic=dynamic)
    for layout in layouts:
        x = LAYOUTS[layout](floats(torch.float32))
        for got, wanted in zip(results(compiled, x, grads=grads), results(f, x, grads=grads), strict=True):
            if backend == "inductor" and job == "learned":
                torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-3)
            else:
                assert_same(got, wanted)
                assert got.stride() == wanted.stride()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("job", JOBS)
def test_compile(job, backend, dynamic):
    check_compiled(job, backend, ("contiguous", "channels_last", "sliced"), dynamic)


@pytest.mark.parametrize(("job", "dynamic"), [("fixed", False), ("learned", True), ("deployed", True)])
def test_compile_with_inductor(job, dynamic):
    check_compiled(job, "inductor", ("contiguous", "channels_last"), dynamic)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_compiled_convolution_keeps_mask_and_gradient_in_one_order(backend, layout):
    """The mask is packed in memory order, which a compiler may choose for the output of a convolution."""
    torch._dynamo.reset()
    conv = nn.Conv2d(6, 8, 3, padding=1)
    x = LAYOUTS[layout](floats(torch.float32))

    def step(x: Tensor) -> Tensor:
        return (ops.fake_quant(conv(x), torch.tensor(0.125), qmin=-20, qmax=20) ** 2).sum()

    def gradients(f) -> list[Tensor]:
        return list(torch.autograd.grad(f(x), list(conv.parameters())))

    for got, wanted in zip(
        gradients(torch.compile(step, fullgraph=True, backend=backend)), gradients(step), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-2 * wanted.abs().max())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("momentum", [None, 0.1])
def test_compiled_observer_updates_its_buffers(backend, momentum):
    torch._dynamo.reset()

    def observe(x: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
        ops.observe_minmax_(x * 2, lo, hi, momentum, axis=1)
        return hi - lo

    compiled = torch.compile(observe, fullgraph=True, backend=backend, dynamic=True)
    mine, theirs = ((torch.full((6,), torch.inf), torch.full((6,), -torch.inf)) for _ in range(2))
    for seed in range(3):
        x = floats(torch.float32, seed)(4 + seed, 6, 50)
        assert_same(compiled(x, *mine), observe(x, *theirs))
    for got, wanted in zip(mine, theirs, strict=True):
        assert_same(got, wanted)


def test_no_recompilation_when_a_scale_changes():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    f = torch.compile(ops.fake_quant, backend=counter, fullgraph=True)
    x = floats(torch.float32)(100)
    for s in (0.1, 0.2, 0.3):
        assert_same(f(x, torch.tensor(s)), ops.fake_quant(x, torch.tensor(s)))
    assert counter.frame_count == 1


# ---- export -----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A convolution with its weight and input on grids, as QAT modules have them."""

    def __init__(self, learned: bool = False):
        super().__init__()
        self.conv = nn.Conv2d(6, 8, 3)
        self.scale = nn.Parameter(scales(8), requires_grad=learned)
        self.register_buffer("zero_point", zero_points(1))

    def forward(self, x: Tensor) -> Tensor:
        x = ops.fake_quant(x, self.scale[:1], self.zero_point)
        return nn.functional.conv2d(x, ops.fake_quant(self.conv.weight, self.scale, axis=0), self.conv.bias)


def count_of(program: torch.export.ExportedProgram, target: object) -> int:
    return sum(node.target is target for node in program.graph.nodes)


@pytest.mark.parametrize("strict", [False, True], ids=["nonstrict", "strict"])
@pytest.mark.parametrize("learned", [False, True], ids=["fixed", "learned"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_export_keeps_the_op(strict, learned, training):
    block, x = Block(learned).train(training), floats(torch.float32)(2, 6, 9, 9)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(block, (x,), dynamic_shapes=({0: batch},), strict=strict)
    other = floats(torch.float32, 3)(5, 6, 9, 9)
    for exported in (program, program.run_decompositions()):
        assert count_of(exported, native.fake_quant.default) == 2
        assert_same(exported.module()(other), block(other))


def test_export_of_the_deployed_pair():
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return deployed(x, scales(6), zero_points(6))

    x = floats(torch.float32)(2, 6, 9, 9)
    program = torch.export.export(Pair(), (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)).run_decompositions()
    for op in (native.quantize.default, native.dequantize.default, native.minmax.default):
        assert count_of(program, op) == 1
    other = floats(torch.float32, 3)(5, 6, 9, 9)
    assert_same(program.module()(other), Pair()(other))


# ---- without data, in other modes --------------------------------------------------------------------------------------


def described(t: Tensor) -> tuple:
    return t.shape, t.dtype, t.stride()


def meta_cases() -> list:
    names = ("contiguous", "channels_last", "sliced", "transposed", "expanded", "empty", "0-d", "ten_dims")
    shapes = {name: LAYOUTS[name](torch.empty) for name in names}
    return [pytest.param(n, c, id=f"{n}-{how}") for n, x in shapes.items() for how, c in CHANNELS.items() if c.fit(x)]


@pytest.mark.parametrize(("layout", "channels"), meta_cases())
def test_meta_tensors_agree_with_real_ones(layout, channels):
    """Shapes, dtypes and strides of every op."""

    def run(device: str) -> list[tuple]:
        x = LAYOUTS[layout](floats(torch.float32)).to(device) if device == "cpu" else None
        x = LAYOUTS[layout](lambda *n: torch.empty(*n, device=device)) if x is None else x
        s, z = (torch.ones(channels.count(x), device=device) for _ in range(2))
        y, mask = native.fake_quant(x, s, z, -8, 7, **channels.named, mask=True)
        q = ops.quantize(x, s, z, **channels.named)
        learned = native.fake_quant_learned_backward(torch.ones_like(y), x, s, z, -8, 7, *channels.named.values())
        fixed = native.fake_quant_backward(torch.ones_like(y), mask, [])
        found = [y, mask, q, ops.dequantize(q, s, z, **channels.named, dtype=torch.float16), fixed, *learned]
        found += ops.minmax(x, **channels.named) if x.numel() else []
        packed = ops.quantize_int4(x, s, z, **channels.named)
        found += [packed, ops.dequantize_int4(packed, x.shape, s, z, **channels.named, dtype=torch.bfloat16)]
        assert ops.observe_minmax_(x, s, z, 0.1, **channels.named) is None
        return [described(t) for t in found]

    assert run("meta") == run("cpu")


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_autocast_leaves_the_dtype(dtype):
    x, s = leaf(floats(dtype)(4, 6, 50)), leaf(scales(6))
    plain = ops.fake_quant(x, s, axis=1)
    with torch.autocast("cpu", torch.bfloat16):
        y = ops.fake_quant(x, s, axis=1)
        assert_same(ops.quantize(x, s, axis=1), ops.quantize(x.detach(), s.detach(), axis=1))
    assert_same(y, plain)
    y.sum().backward()
    assert (x.grad.dtype, s.grad.dtype) == (x.dtype, s.dtype)


def test_autocast_around_a_linear_layer():
    """bfloat16 from the layer before goes in and comes out; the float32 scale gets a float32 gradient."""
    layer, s, x = nn.Linear(6, 6), leaf(scales(6)), floats(torch.float32)(4, 6)
    with torch.autocast("cpu", torch.bfloat16):
        h = layer(x)
        y = ops.fake_quant(h, s, axis=1)
    assert y.dtype == h.dtype == torch.bfloat16
    y.sum().backward()
    assert s.grad.dtype == layer.weight.grad.dtype == torch.float32
    assert s.grad.abs().sum() > 0


def test_deterministic_mode():
    torch.use_deterministic_algorithms(True)
    try:
        for job in JOBS:
            f, grads = JOBS[job]
            for a, b in zip(*(results(f, image(), grads=grads) for _ in range(2)), strict=True):
                assert_same(a, b)
        lo, hi = torch.full((6,), torch.inf), torch.full((6,), -torch.inf)
        ops.observe_minmax_(image(), lo, hi, axis=1)
        assert (lo < hi).all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_many_python_threads_at_once():
    """The kernels keep no state between calls."""
    from concurrent.futures import ThreadPoolExecutor

    inputs = [floats(torch.float32, seed)(70, 777) for seed in range(16)]
    wanted = [ops.fake_quant(x, scales(70), axis=0) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for got, want in zip(
            pool.map(lambda x: ops.fake_quant(x, scales(70), axis=0), inputs * 4), wanted * 4, strict=True
        ):
            assert_same(got, want)


@pytest.mark.parametrize("channels", [Channels(), Channels(1)], ids=["per_tensor", "axis1"])
def test_parameters_and_buffers_are_taken_as_they_are(channels):
    x, s = nn.Parameter(floats(torch.float32)(4, 6, 5)), nn.Parameter(scales(channels.count(torch.empty(4, 6, 5))))
    y = ops.fake_quant(x, s, **channels.named)
    assert type(y) is Tensor
    assert_same(y, ops.fake_quant(x.detach(), s.detach(), **channels.named))
