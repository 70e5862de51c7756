"""What holds for every op of the library, on one sample of each: compilers, export, autocast, determinism, vmap."""

import pytest
import torch
from torch import Tensor, nn

from tests.cases import Channels, assert_same, codes, floats, scales, zero_points
from tests.ops import units
from tests.ops.test_fuzz import EVERY, OPS, OURS, WRITTEN
from tests.sweep import slow_but

UPDATED = [op for op in EVERY if WRITTEN[op]]
EAGER = [*EVERY, *units.OPS]  # compiled code and exports, and transforms, have no units
ops = pytest.mark.parametrize("op", EAGER)


def histogram(bins: int = 64) -> dict[str, Tensor]:
    return {"counts": torch.arange(bins), "lo": torch.tensor([-4.0]), "hi": torch.tensor([4.0])}


def histograms(channels: int) -> dict[str, Tensor]:
    one = histogram()
    return {
        "counts": one["counts"].repeat(channels, 1),
        "lo": one["lo"].repeat(channels),
        "hi": one["hi"].repeat(channels),
    }


def on_codes_of(name: str, dtype: torch.dtype, *size: int) -> dict:
    """An operand of product or fused_attention on a grid with a step of 1/2, with its codes."""
    codes = (floats(dtype, len(size))(*size) / 10).round().clamp(-8, 7)
    found = {"": codes * 0.5, "_codes": codes.to(torch.int8), "_scale": torch.tensor(0.5), "_zero_point": None}
    found |= {"_size": list(size), "_signed": True, "_transposed": False, "_kept": False}
    return {f"{name}{part}": value for part, value in found.items()}


def in_range(given: dict) -> dict:
    """Arguments of a quantizer with qmin and qmax in one list."""
    bounds = {"y_range": [given["y_qmin"], given["y_qmax"]]}
    return bounds | {name: value for name, value in given.items() if name not in ("y_qmin", "y_qmax")}


def sample(op: str, x: Tensor) -> dict:
    """Arguments of an op on x (of three dimensions, six channels on axis 1, a multiple of 16 elements in a row)."""
    grid = {"scale": scales(6), "zero_point": zero_points(6), "qmin": -100, "qmax": 90, "axis": 1}
    symmetric, on_codes = {"scale": scales(6), "axis": 1}, {"scale": scales(1), "qmin": -100, "qmax": 90}
    soft = {**grid, "steepness": torch.linspace(1, 7, 6), "shape": "clip"}
    rectified = {"weight": torch.linspace(-0.5, 0.5, 6), "scale": scales(1)}
    rectified |= {"zero_point": zero_points(1), "qmin": -100, "qmax": 90}
    range_of, codes_of = {"lo": -torch.ones(6), "hi": torch.ones(6)}, {"qmin": -128, "qmax": 127}
    floating, counted = {"dtype": torch.float32}, {"skipped": torch.zeros(6, dtype=torch.int64)}
    mask = torch.randint(0, 256, (x.numel() // 8,), dtype=torch.uint8)
    of_weight = {
        "weight": floats(torch.float32, 3)(6, 6, 3),
        "factor": scales(6),
        "scale": scales(6),
        "zero_point": None,
        **codes_of,
        "axis": 0,
        "group": 1,
        "block_size": 0,
        "grad_factor": 0.5,
        "updated": torch.tensor([1, 4]),
    }
    layer = {
        "codes": codes(torch.int8)(*x.shape),
        "x_scale": scales(1),
        "x_zero_point": zero_points(1),
        "x_qmin": -128,
        "x_qmax": 127,
        **of_weight,
        "stride": [1],
        "padding": [1],
        "dilation": [1],
        "output_padding": [0],
        "transposed": False,
        "groups": 1,
        "integer": False,
    }
    norm = {
        "weight": torch.linspace(-1, 2, 6),
        "bias": torch.linspace(0, 1, 6),
        "divisor": torch.linspace(1, -2, 6),
        "residual": torch.ones_like(x),
        "residual_codes": torch.full_like(x, 2, dtype=torch.int8),
        "residual_scale": torch.tensor([0.5]),
        "residual_zero_point": None,
    }
    totals = {"totals": torch.ops.qtoolkit.batch_norm_totals(x, norm["divisor"], None), "process_group": None}
    after = {
        "eps": 1e-5,
        "low": 0.0,
        "high": 6.0,
        "slope": 0.0,
        "scale": scales(1),
        "zero_point": zero_points(1),
        **codes_of,
    }
    unit = {name: value for name, value in layer.items() if name not in ("factor", "scale")}
    unit |= {"start": scales(6), "ratio": torch.linspace(-2, 2, 6), "rate": scales(6), "bias": None}
    unit |= {
        "variance": torch.linspace(1, 9, 6),
        "gamma": torch.linspace(-1, 1.5, 6),
        "beta": torch.zeros(6),
        "eps": 1e-5,
    }
    unit |= {name: norm[name] for name in norm if name.startswith("residual")}
    unit |= {"residual": torch.ones_like(x), "low": 0.0, "high": 6.0, "slope": 0.0}
    unit |= {"y_start": scales(1), "y_ratio": torch.ones(1), "y_rate": None, "y_zero_point": None}
    unit |= {"y_qmin": -128, "y_qmax": 127, "y_grad_factor": 0.5, "y_float16": False, "learned": True}
    tracked = {
        "running_mean": torch.zeros(6),
        "running_var": torch.ones(6),
        "batches": torch.tensor(3),
        "momentum": 0.1,
        "tracks": True,
        "process_group": None,
    }
    unit |= {"raw": None, "raw_scale": None, "raw_factor": 1.0}
    forward = {
        "x": x,
        "lo": None,
        "hi": None,
        "pow2_scale": False,
        "float16": False,
        "dtype": None,
        "channels_last": False,
    }
    normalized = {**unit, **forward, **tracked, "rounds_bias": False, "frozen_mean": None}
    kept = {"y_scale": scales(1), "factor": scales(6), "scale": scales(6), "undivided": x * 3}
    kept |= {"mean": torch.zeros(6), "batch_variance": torch.ones(6), "totals": None}
    of_input = {"grad": x * 2, "size": list(x.shape), "x_dtype": x.dtype, "order": [0, 1, 2]}
    of_unit = ("x", "weight", "ratio", "gamma", "beta", "residual", "y_ratio")
    of_layer = ("x", "weight", "start", "ratio", "zero_point", "bias", "y_start", "y_ratio", "y_zero_point")
    all_of_unit, all_of_layer = ([name in names for name in units.GRADIENTS] for names in (of_unit, of_layer))
    quantized = {name: value for name, value in unit.items() if name.startswith("y_")}
    quantized |= {"learned": True, "with_codes": True}
    plain = {name: value for name, value in unit.items() if name in layer or name in ("start", "ratio", "rate")}
    plain |= {**forward, "bias": scales(6), "rounds_bias": True, **quantized}
    plain |= {"raw": None, "raw_scale": None, "raw_factor": 1.0}
    gelu = {"function": "gelu", "shape": [], "weight": None, "bias": None, "eps": 0.0}
    norm_of_rows = {**gelu, "function": "layer_norm", "shape": [x.size(-1)], "eps": 1e-5}
    of_output = {name: value for name, value in quantized.items() if name.startswith("y_") and name != "y_float16"}
    of_output |= {"y_scale": scales(1), "mask": torch.zeros(0)}
    attention: dict = {}
    for name, seed in (("q", 0), ("k", 3), ("v", 5)):
        on_grid = (floats(x.dtype, seed)(2, 5, 4) / 10).round().clamp(-8, 7)
        attention |= {name: on_grid * 0.5, f"{name}_codes": on_grid.to(torch.int8)}
        attention |= {f"{name}_scale": torch.tensor(0.5), f"{name}_zero_point": None}
    attention |= {"mask": torch.linspace(-1, 1, 5), "dtype": x.dtype, "keeps_softmax": False, "causal": False}
    attention |= {"dropout": 0.0, "learned": True}
    of_weights = {"start": torch.tensor(0.004), "ratio": torch.ones(()), "rate": None, "zero_point": None}
    of_weights |= {"qmin": 0, "qmax": 200, "grad_factor": 0.5, "float16": False}
    attention |= {f"weights_{name}": value for name, value in of_weights.items()}
    product = {**on_codes_of("x", x.dtype, 2, 5, 4), **on_codes_of("other", x.dtype, 2, 4, 3)}
    product |= {"other_codes": None, "other_scale": None, "other_kept": True}
    fused = {k: v for name in "qkv" for k, v in on_codes_of(name, x.dtype, 2, 3, 5, 4).items()}
    fused = {name: value for name, value in fused.items() if not isinstance(value, bool | list)}
    fused |= {"k_size": [2, 3, 5, 4], "is_signed": [True] * 3, "is_causal": True, "scale": 0.3}
    statistics = {"mean": torch.linspace(-1, 1, 6), "variance": torch.linspace(1, 90, 6)}
    window = {"kernel_size": [3], "stride": [2], "padding": [1], "dilation": [1]}
    return {
        "batch_norm_totals": {"x": x, "divisor": norm["divisor"], "offset": norm["bias"]},
        "batch_norm_fake_quant": {"x": x, **norm, **after, **totals},
        "batch_norm_fake_quant_backward": {
            "grad": x * 2,
            "x": x,
            **norm,
            **statistics,
            **after,
            "wanted": [True] * 7,
            **totals,
        },
        "batch_norm_track_": {
            "running_mean": torch.zeros(6),
            "running_var": torch.ones(6),
            **statistics,
            "divisor": None,
            "offset": None,
            "momentum": 0.1,
            "count": 9,
            "totals": totals["totals"],
        },
        "batch_norm_rescale_": {
            "start": torch.full((6,), 0.1),
            "rate": torch.full((6,), 0.5),
            "known": torch.tensor([0.0, 1.0, 2.0, 0.5, 3.0, 1.0]),
            "variance": statistics["variance"].float().abs(),
            "gamma": torch.tensor([1.0, -2.0, 0.0, 0.5, 1e-20, 3.0]),
            "eps": 1e-5,
            "held": torch.linspace(1, 2, 6),
            "taken": torch.tensor(3),
            "clock": torch.tensor(4),
        },
        "max_pool_offsets": {"x": x, **window},
        "max_pool_offsets_backward": {
            "grad": x,
            "offsets": codes(torch.uint8)(*x.shape) % 9,
            "size": [x.size(0), 12, 2 * x.size(2)],
            **window,
        },
        "fake_quant": {"x": x, **grid},
        "fake_quant_": {"x": x, **grid},
        "observe_fake_quant": {
            "x": x,
            **range_of,
            "scale": torch.ones(6),
            "zero_point": None,
            **codes_of,
            "axis": 1,
            **counted,
        },
        "fake_quant_float": {"x": x, "format": "e4m3", **symmetric},
        "fake_quant_block": {"x": x, "format": "e2m1", "block_size": 16, "scale_format": "e8m0"},
        "tensor_quant": {"x": x, "amax": torch.tensor(5.3)},
        "fake_tensor_quant": {"x": x, "amax": torch.tensor(5.3)},
        "fake_affine_tensor_quant": {"x": x, "min_range": -torch.ones(()), "max_range": torch.tensor(5.3)},
        "scaled_e4m3": {"x": x, "amax": torch.tensor(5.3)},
        "requantize": {"x": x, "factor": scales(6)[:, None], **on_codes, "offset": torch.tensor(0.3), "zero_code": 3},
        "requantize_fixed_point": {
            "x": x.round(),
            "factor": scales(6)[:, None].double(),
            **on_codes,
            "count": 3,
            "rounded_once": True,
        },
        "softmax_codes": {"x": x.round(), "scale": 0.1, "dim": 1},
        "hard_swish_codes": {"x": x.round(), "x_scale": 0.1, "scale": 0.1, "qmin": -128, "qmax": 127},
        "average_codes": {"sums": x.round(), "counts": torch.full_like(x, 4)},
        "resize_linear_codes": {"x": x.round()[None], "size": [3, 5], "align_corners": False},
        "add_codes": {
            "x": x,
            "x_scale": scales(1),
            "x_zero_point": 3,
            "other": torch.ones(6, 1),
            "other_scale": scales(1),
            "other_zero_point": -3,
            "zero_point": 5,
            **on_codes,
        },
        "fake_quant_away": {"x": x, "zero_point": zero_points(1), **on_codes},
        "fake_quant_by_factor": {"x": x, "zero_point": zero_points(1), **on_codes},
        "centred_codes": {"x": x, "scale": scales(1)},
        "fake_quant_backward": {"grad": x, "mask": mask, "order": []},
        "fake_quant_learned_backward": {"grad": x * 2, "x": x, **grid},
        "prelu_fake_quant": {"x": x, **rectified},
        "prelu_fake_quant_backward": {"grad": x * 2, "x": x, **rectified},
        "fake_quant_shaped": {"x": x, **soft},
        "fake_quant_shaped_backward": {"grad": x * 2, "x": x, **soft},
        "quant_weight": of_weight,
        "quant_weight_backward": {
            "grad": floats(x.dtype, 7)(6, 6, 3),
            **of_weight,
            "transposed": False,
            "groups": 1,
            "wanted": [True] * 4,
        },
        "quant_layer": {"x": x, "bias": scales(6), **layer},
        "quant_layer_backward": {
            "grad": x * 2,
            "size": list(x.shape),
            **layer,
            "x_dtype": x.dtype,
            "wanted": [True] * 7,
        },
        "unit": normalized,
        "unit_backward": {**normalized, **of_input, **kept, "wanted": all_of_unit},
        "layer_fake_quant": plain,
        "layer_fake_quant_backward": {
            **plain,
            **of_input,
            "y_scale": scales(1),
            "scale": scales(6),
            "kept": x * 3,
            "wanted": all_of_layer,
        },
        "function_fake_quant": {"x": x, **gelu, "keeps_x": True, **quantized},
        "function_fake_quant_backward": {
            "grad": x * 2,
            "order": [0, 1, 2],
            "x": x,
            **gelu,
            **of_output,
            "mean": torch.zeros(0),
            "rstd": torch.zeros(0),
            "wanted": [True] * 6,
        },
        "add_norm_fake_quant": {"x": x, "residual": x * 2, **norm_of_rows, **in_range(quantized)},
        "add_norm_fake_quant_backward": {
            "grad": x * 2,
            "grad_sum": x,
            "sum": x,
            "narrow": None,
            **norm_of_rows,
            **in_range(of_output),
            "mean": x.mean(-1, keepdim=True),
            "rstd": (x.var(-1, correction=0, keepdim=True) + norm_of_rows["eps"]).rsqrt(),
            "wanted": [True] * 6 + [False],
        },
        "attention_fake_quant": attention,
        "attention_fake_quant_backward": {
            "grad": floats(x.dtype, 7)(2, 5, 4),
            **attention,
            "weights_scale": torch.tensor(0.004),
            "wanted": [name in ("x", "k", "v", "y_start", "y_ratio") for name in units.GRADIENTS],
        },
        "product": {**product, "computed": None},
        "product_backward": {"grad": floats(x.dtype, 7)(2, 5, 3), **product, "wanted": [True, True]},
        "fused_attention": fused,
        "fused_attention_backward": {
            "grad": floats(x.dtype, 7)(2, 3, 5, 4),
            **fused,
            "y": floats(x.dtype, 8)(2, 3, 5, 4),
            "logsumexp": floats(torch.float32, 9)(2, 3, 5).to(
                torch.float64 if x.dtype == torch.float64 else torch.float32
            ),
            "wanted": [True] * 3,
        },
        "convolution": {
            "x": x,
            "weight": floats(x.dtype, 3)(6, 6, 3),
            "bias": floats(x.dtype, 5)(6),
            **{
                name: layer[name]
                for name in ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
            },
        },
        "snapshot": {"x": x},
        "straight_through": {"value": scales(6), "through": torch.linspace(-0.5, 2, 6)},
        "float16_scale": {"scale": scales(6)},
        "positive_scale": {"start": scales(6), "ratio": torch.linspace(-0.5, 2, 6), "rate": scales(6)},
        "quantize": {"x": x, **grid, "dtype": torch.int8},
        "dequantize": {"codes": codes(torch.uint8)(*x.shape), "zero_point": None, **symmetric, **floating},
        "quantize_int4": {"x": x, **symmetric, "zero_point": None},
        "dequantize_int4": {
            "packed": mask,
            "size": [mask.numel() * 2],
            "scale": scales(1),
            "zero_point": None,
            **floating,
        },
        "minmax": {"x": x, "axis": 1},
        "observe_minmax_": {"x": x, **range_of, "momentum": 0.1, "axis": 1, **counted},
        "grid_of_range": {**range_of, **codes_of},
        "take_range_": {
            **range_of,
            "scale": torch.ones(6),
            "zero_point": torch.zeros(6),
            "count": torch.tensor([3, 7]),
            "clock": torch.tensor(4),
            **codes_of,
            "steps": 200,
        },
        "observe_histogram_": {"x": x, **histograms(6), "axis": 1},
        "search_range": {**histogram(), **codes_of, "method": "entropy", "candidates": [9, 30]},
    }[op]


def run(op: str, given: dict) -> list[Tensor]:
    """The results, and what was updated in place (copies: the arguments stay)."""
    written = (WRITTEN | units.WRITTEN)[op]
    given = {name: t.clone() if name in written and t is not None else t for name, t in given.items()}
    found = (OPS | units.OPS)[op](**given)
    results = [] if found is None else [found] if isinstance(found, Tensor) else list(found)
    return results + [given[name] for name in written if given[name] is not None]


def image(dtype: torch.dtype = torch.float32, batch: int = 4) -> Tensor:
    return floats(dtype, batch)(batch, 6, 32)


def assert_all_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for got, want in zip(found, wanted, strict=True):
        assert_same(got, want)


class Everything(nn.Module):
    """All ops in one graph; what is no tensor is a constant of it, as are the tensors but x."""

    def __init__(self) -> None:
        super().__init__()
        self.given = {op: sample(op, image()) for op in EVERY}

    def forward(self, x: Tensor) -> list[Tensor]:
        return [t for op, given in self.given.items() for t in run(op, self.with_input(given, x))]

    def with_input(self, given: dict, x: Tensor) -> dict:
        return given | {name: x * 1 for name in ("x", "grad") if name in given and given[name].shape[1:] == x.shape[1:]}


@pytest.mark.slow
@pytest.mark.parametrize("backend", slow_but(["eager", "aot_eager", "inductor"], "eager"))
def test_every_op_compiles_without_a_graph_break(backend: str) -> None:
    torch._dynamo.reset()
    module = Everything()
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    for seed in (1, 2):
        x = floats(torch.float32, seed)(4, 6, 32)
        assert_all_same(compiled(x), module(x))


@pytest.mark.parametrize("strict", [False, True], ids=["nonstrict", "strict"])
@pytest.mark.slow
def test_every_op_exports(strict: bool) -> None:
    module, x = Everything(), image(batch=4)
    program = torch.export.export(module, (image(),), strict=strict)
    for exported in (program, program.run_decompositions()):
        assert_all_same(exported.module()(x), module(x))
        for op in OURS:  # the others become ops of torch
            assert f"qtoolkit.{op}" in str(exported.graph)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@ops
def test_autocast_changes_nothing(op: str, dtype: torch.dtype) -> None:
    """Not the input's dtype, and least of all the float32 scale's."""
    given = sample(op, image(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        found = run(op, given)
    assert_all_same(found, run(op, given))


@ops
def test_deterministic_mode(op: str) -> None:
    given = sample(op, floats(torch.float32)(70, 6, 4096))
    torch.use_deterministic_algorithms(True)
    try:
        assert_all_same(run(op, given), run(op, given))
    finally:
        torch.use_deterministic_algorithms(False)


# ---- vmap -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [op for op in EVERY if op not in UPDATED])
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's loop, which all but fake_quant take
def test_vmap(op: str) -> None:
    batch = [sample(op, image(batch=n)) for n in (4, 4, 4)]
    names = [name for name, t in batch[0].items() if isinstance(t, Tensor)]
    stacked = [torch.stack([given[name] for given in batch]) for name in names]

    def each(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(run(op, batch[0] | dict(zip(names, tensors, strict=True))))

    found = torch.vmap(each)(*stacked)
    for i, given in enumerate(batch):
        assert_all_same([t[i] for t in found], run(op, given))


@pytest.mark.parametrize("op", UPDATED)
def test_vmap_does_not_update_what_all_samples_share(op: str) -> None:
    given = sample(op, image())
    name = next(name for name in ("x", "mean", "variance", "lo") if name in given)
    with pytest.raises(RuntimeError, match=f"Batching rule not implemented for qtoolkit::{op}"):
        torch.vmap(lambda t: OPS[op](**given | {name: t}))(torch.stack([given[name], given[name]]))


CUTS = [Channels(), Channels(0), Channels(1), Channels(-1), Channels(1, 2), Channels(0, 1, 2), Channels(1, 1, 2)]


def batched(t: Tensor | None, dim: int | None) -> Tensor | None:
    """Three different samples along a dimension, or one for all."""
    return t if t is None or dim is None else torch.stack([t, t * 2, t * 0.5], dim)


def sample_of(t: Tensor | None, dim: int | None, i: int) -> Tensor | None:
    return t if t is None or dim is None else t.select(dim, i)


@pytest.mark.parametrize(
    "where", [(0, None, None), (-1, None, None), (0, 0, 0), (1, -1, None), (None, 0, None), (0, None, 0)]
)
@pytest.mark.parametrize("channels", CUTS, ids=str)
@pytest.mark.parametrize("shape", [(4, 6, 5), (6, 2), (0, 4)], ids=str)
@pytest.mark.filterwarnings("error")  # no loop
def test_vmap_of_fake_quant_is_one_call(shape: tuple, channels: Channels, where: tuple) -> None:
    """Values and gradients are those of one sample after the other, with shared grids and with grids of their own."""
    count = channels.count(torch.empty(shape))
    one = floats(torch.float64)(*shape), scales(count).double(), zero_points(count).double()
    inputs = [batched(t, dim).requires_grad_() for t, dim in zip(one, where, strict=True)]

    def call(*tensors: Tensor) -> Tensor:
        return OPS["fake_quant"](*tensors, -100, 90, **channels.named)[0]

    y = torch.vmap(call, in_dims=where)(*inputs)
    wanted = torch.stack([call(*(sample_of(t, d, i) for t, d in zip(inputs, where, strict=True))) for i in range(3)])
    assert_same(y, wanted)
    grad = floats(torch.float64, 7)(*y.shape).round()
    dx, *sums = torch.autograd.grad(y, inputs, grad)
    wanted_dx, *wanted_sums = torch.autograd.grad(wanted, inputs, grad)
    assert torch.equal(dx, wanted_dx)  # but for the sign of zeros, which torch's sum over samples drops
    for got, want in zip(sums, wanted_sums, strict=True):  # of terms up to 3000, in another order
        torch.testing.assert_close(got, want, rtol=1e-12, atol=3000 * y.numel() * 1e-15)


@pytest.mark.parametrize(
    ("scale", "given", "error", "sentence"),
    [
        ((3, 2), {}, ValueError, "scale must have 1 element if axis is None, got 2"),
        ((3, 2), {"axis": 1}, ValueError, "axis must lie in [-1, 0] for an input of 1 dimensions, got 1."),
        ((3, 1), {"axis": -2}, ValueError, "axis must lie in [-1, 0] for an input of 1 dimensions, got -2."),
        ((3, 5), {"axis": 0}, ValueError, "scale must have 1 or 4 elements (x.size(0)), got 5"),
        ((3, 1), {"mask": True}, NotImplementedError, "mask must be False under torch.vmap, got True"),
    ],
)
def test_vmap_says_what_is_wrong_with_a_sample(
    scale: tuple, given: dict, error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error) as raised:
        torch.vmap(lambda x, s: OPS["fake_quant"](x, s, None, -8, 7, **given))(torch.ones(3, 4), torch.ones(scale))
    assert str(raised.value).startswith("fake_quant: ")
    assert sentence in str(raised.value)


def test_vmap_compiles() -> None:
    torch._dynamo.reset()
    each = torch.vmap(lambda x, s: OPS["fake_quant"](x, s, None, -8, 7)[0])
    x, s = floats(torch.float32)(3, 40), scales(3)
    assert_same(torch.compile(each, backend="aot_eager", fullgraph=True)(x, s), each(x, s))
