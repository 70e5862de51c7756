"""Projections of attentions, of one tensor or several: on codes in training as linear layers are, with the bits of floats."""

import copy
import itertools
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import qtoolkit as qt
from qtoolkit.graph.program.units.attention import ProjectionUnit
from qtoolkit.graph.program.units.base import CachedFusedOp
from qtoolkit.nn import on_codes
from qtoolkit.running import Run
from tests.blocks import codes_taken
from tests.copies import made_once
from tests.nets import settled

E, B, L, S = 16, 3, 7, 9
Step = tuple[dict[str, Tensor], int]

# The options of each attention, and what it gets of a normed x and two normed memories.
CASES: dict[str, tuple[dict[str, int], Callable[..., tuple[Tensor, Tensor, Tensor]]]] = {
    "self": ({}, lambda x, k, v: (x, x, x)),
    "keys": ({}, lambda x, k, v: (x, k, k)),
    "values": ({}, lambda x, k, v: (x, x, x + 1)),
    "value is query": ({}, lambda x, k, v: (x, x + 1, x)),
    "apart": ({}, lambda x, k, v: (x, k, v)),
    "own weights": ({"kdim": 12, "vdim": 10}, lambda x, k, v: (x, k[..., :12], v[..., :10])),
    "own weights of one": ({"kdim": 12, "vdim": 12}, lambda x, k, v: (x, *[k[..., :12]] * 2)),
}
PRODUCTS = {"self": 1, "keys": 2, "values": 2}
"""The products of the projections of query, key and value; three in other cases."""


class Attends(nn.Module):
    """Layer norms, an attention between their outputs, and a layer."""

    def __init__(self, case: str, batch_first: bool = True, **options: Any) -> None:
        super().__init__()
        own, self.inputs = CASES[case]
        self.norms = nn.ModuleList(nn.LayerNorm(E) for _ in range(3))
        self.attention = nn.MultiheadAttention(E, 2, batch_first=batch_first, **own, **options)
        if self.attention.in_proj_bias is not None:
            nn.init.normal_(self.attention.in_proj_bias)  # torch makes zeros
        self.last = nn.Linear(E, 8)

    def forward(self, x: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = self.inputs(*(norm(y) for norm, y in zip(self.norms, (x, key, value), strict=True)))
        return self.last(x + self.attention(query, key, value=value, need_weights=False)[0])


class Decoder(nn.Module):
    """Two of torch's decoder layers, which take the same memory."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(E)
        layers = (nn.TransformerDecoderLayer(E, 2, 32, dropout=0.0, batch_first=batch_first) for _ in range(2))
        self.first, self.second = layers

    def forward(self, x: Tensor, key: Tensor, value: Tensor) -> Tensor:
        memory = self.norm(key)
        return self.second(self.first(x, memory), memory)


class Both(nn.Module):
    """An attention of one tensor, and then of two."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(E) for _ in range(2))
        self.attention = nn.MultiheadAttention(E, 2, batch_first=batch_first)

    def forward(self, x: Tensor, key: Tensor, value: Tensor) -> Tensor:
        y, k = self.norms[0](x), self.norms[1](key)
        y = self.attention(y, y, y)[0]
        return self.attention(query=y, key=k, value=k)[0]


def batch(batch_first: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = (L, L, L) if not batch_first else (L, S, S)
    found = [torch.randn(B, length, E, generator=generator) for length in lengths]
    return [x if batch_first else x.transpose(0, 1).contiguous() for x in found]


def trained(name: str, route: str = "graph", quantizer: str = "lsq", **options: Any) -> nn.Module:
    """An attention, prepared for training and calibrated, with its training arithmetic and other options of `calibrated`."""
    arithmetic = {key: options.pop(key) for key in ("arithmetic", "save") if key in options}
    model = calibrated(name, route, quantizer, **options)
    qt.nn.set_training_arithmetic(model, **{"arithmetic": "float", **arithmetic})
    return settled(model).train()


@made_once
def calibrated(
    name: str, route: str, quantizer: str, weight: qt.QuantSpec | None = None, batch_first: bool = True
) -> nn.Module:
    model = Attends(name, batch_first) if name in CASES else (Decoder if name == "decoder" else Both)(batch_first)
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    spec = qt.QuantSpec(axis=0, quantizer=quantizer) if weight is None else weight
    mapping = qt.QConfigMapping().set_global(qt.QConfig(qt.QuantSpec(quantizer=quantizer), spec))
    args = tuple(batch(batch_first))
    if route == "graph":
        model = qt.prepare(model.train(), args, backend="onnxruntime", qconfig_mapping=mapping)
    else:
        model = qt.quant_modules.replace(model.train(), backend="onnxruntime", qconfig_mapping=mapping)
    qt.calibrate(model, [args], progress=False)
    return model


def _is_batch_first(model: nn.Module) -> bool:
    return all(m.batch_first for m in model.modules() if isinstance(m, nn.MultiheadAttention))


def step(model: nn.Module, run: Callable[..., Tensor] | None = None) -> Step:
    """Return the output and the gradients of a step, and the bytes besides parameters that it keeps for backward."""
    model.zero_grad()
    args = [x.requires_grad_() for x in batch(_is_batch_first(model))]
    kept, held = dict[int, int](), {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in held:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = (model if run is None else run)(*args)
    y.float().square().sum().backward()
    inputs = {f"x{place}": x.grad for place, x in enumerate(args) if x.grad is not None}
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), **inputs, **gradients, **dict(model.named_buffers())}, sum(kept.values())


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name, value in wanted.items() if not torch.equal(found[name], value)] == []


def close(found: dict[str, Tensor], wanted: dict[str, Tensor], rtol: float = 1e-5, atol: float = 1e-6) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def calls_of_ops(run: Callable[[], Any]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    ops = [event.name for event in profile.events()]
    return sum(ops.count(f"qtoolkit::{op}_backward") for op in ("quant_layer", "layer_fake_quant"))


ROUTES = pytest.mark.parametrize("route", ["graph", "replace"])


@pytest.mark.sweep(2)
@ROUTES
@pytest.mark.parametrize("quantizer", ["fixed", "lsq"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "length first"])
@pytest.mark.parametrize("case", CASES)
def test_projections_keep_codes(
    case: str, batch_first: bool, quantizer: str, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bits of torch's layers; a byte is kept for an element of their inputs, and none for the quantized weights.

    The codes come from the op before.
    """
    model = trained(case, route, quantizer, batch_first=batch_first)
    taken = codes_taken(monkeypatch)
    step(model)
    of_slices = (
        2 if "own" in case and route == "graph" else 0
    )  # behind the quantizers: their codes are made of the values
    assert len([y for _, y, _ in taken if y.dim() == 3]) == PRODUCTS.get(case, 3) + 2 - of_slices
    assert calls_of_ops(lambda: step(model)) == PRODUCTS.get(case, 3) + 2  # of the output and the last layer
    found, kept = step(model)
    wanted, of_floats = step(trained(case, route, quantizer, batch_first=batch_first, save="float"))
    same(found, wanted)
    inputs = {id(x): x.numel() for x in CASES[case][1](*batch(batch_first))}
    weights = sum(p.numel() for name, p in model.named_parameters() if "proj_weight" in name and p.dim() == 2)
    assert of_floats - kept >= 3 * sum(inputs.values()) + 4 * weights


@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "length first"])
@ROUTES
def test_decoder_layers_keep_codes(route: str, batch_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's decoder layers; in a graph the memory has one copy of its codes for both, from the op before."""
    taken = codes_taken(monkeypatch)
    found, kept = step(trained("decoder", route, batch_first=batch_first))
    codes = {id(of_y.codes) for _, y, of_y in taken if y.shape == ((B, S, E) if batch_first else (L, B, E))}
    memories = [of_y for _, y, of_y in taken if batch_first and y.shape == (B, S, E)]
    assert not batch_first or len(memories) == 2
    assert route == "replace" or not batch_first or len(codes) == 1
    wanted, of_floats = step(trained("decoder", route, batch_first=batch_first, save="float"))
    same(found, wanted)
    assert kept < 0.75 * of_floats


@pytest.mark.sweep(1)
@ROUTES
@pytest.mark.parametrize("case", CASES)
def test_projections_compute_on_codes(case: str, route: str) -> None:
    found, _ = step(trained(case, route, arithmetic="integer"))
    wanted, _ = step(trained(case, route))
    close(found, wanted, 1e-3, 2e-2)
    assert not torch.equal(found["y"], wanted["y"])


SPECS = {
    "one scale": qt.QuantSpec(quantizer="lsq"),
    "one scale that follows": qt.QuantSpec(),
    "inputs": qt.QuantSpec(axis=1),
    "blocks of inputs": qt.QuantSpec(axis=1, group_size=8),
    "blocks of rows": qt.QuantSpec(axis=0, group_size=8),
    "affine": qt.QuantSpec(axis=0, symmetric=False),
    "learned offset": qt.QuantSpec(axis=0, symmetric=False, quantizer="lsq_plus"),
    "four bits": qt.QuantSpec(bits=4, axis=0, quantizer="lsq"),
    "powers of two": qt.QuantSpec(axis=-2, pow2_scale=True),
    "own gradients": qt.QuantSpec(bits=4, axis=0, quantizer="dorefa", narrow=True),
}


@pytest.mark.sweep(2)
@ROUTES
@pytest.mark.parametrize("case", ["keys", "apart"])
@pytest.mark.parametrize("name", SPECS)
def test_weights_of_every_spec(name: str, case: str, route: str) -> None:
    """Parts of a weight lie on the grid of the whole; one scale sums the gradients of the parts."""
    found, kept = step(trained(case, route, weight=SPECS[name]))
    wanted, of_floats = step(trained(case, route, weight=SPECS[name], save="float"))
    if SPECS[name].axis is None:
        close(found, wanted)
    else:
        same(found, wanted)
    assert kept <= of_floats - 3 * 2 * B * L * E or name == "own gradients"


@pytest.mark.sweep(2)
@pytest.mark.parametrize("forward", ["float", "integer"])
@pytest.mark.parametrize("quantizer", ["fixed", "lsq"])
@pytest.mark.parametrize("case", CASES)
def test_units_have_the_bits_of_their_ops(
    case: str, quantizer: str, forward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a graph the projections are decided once: a further step asks for no plan."""
    model = trained(case, "graph", quantizer, arithmetic=forward)
    other, planned = copy.deepcopy(model), list[str]()
    plan = ProjectionUnit._planned

    def counted(self: ProjectionUnit, run: Run, modules: tuple[Any, ...], *inputs: Any) -> Any:
        planned.append(modules[0].name)
        return plan(self, run, modules, *inputs)

    monkeypatch.setattr(ProjectionUnit, "_planned", counted)
    first = step(model)[0]
    assert len(planned) == PRODUCTS.get(case, 3) + 1
    second = step(model)[0]
    assert len(planned) == PRODUCTS.get(case, 3) + 1
    monkeypatch.setattr(CachedFusedOp, "by_op", lambda self, run, *inputs: None)
    same(first, step(other)[0])
    same(second, step(other)[0])


def test_threads_share_an_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread runs the model between two lines of a projection: each has the weights of its own call."""
    model, args = trained("apart"), batch()
    wanted, found = model(*args), []
    varying = ProjectionUnit._varying

    def interrupted(self: ProjectionUnit, *inputs: Any) -> Any:
        if not found:
            found.append(None)
            thread = threading.Thread(target=lambda: found.append(model(*args)))
            thread.start()
            thread.join()
        return varying(self, *inputs)

    monkeypatch.setattr(ProjectionUnit, "_varying", interrupted)
    assert torch.equal(model(*args), wanted)
    assert torch.equal(found[1], wanted)


def test_one_attention_of_one_and_of_several_tensors() -> None:
    """A module that is called in both ways has the units of both."""
    model = trained("both")
    assert calls_of_ops(lambda: step(model)) == 2 + 3
    same(step(model)[0], step(trained("both", save="float"))[0])


@pytest.mark.sweep(2)
@pytest.mark.parametrize("quantizer", ["fixed", "lsq"])
@pytest.mark.parametrize("case", ["keys", "values", "apart", "own weights"])
@ROUTES
def test_copies_and_checkpoints(route: str, case: str, quantizer: str) -> None:
    model = trained(case, route, quantizer)
    copies = [copy.deepcopy(model) for _ in range(2)]
    wanted, _ = step(model)
    same(step(copies[0])[0], wanted)
    same(step(copies[1], lambda *args: checkpoint(copies[1], *args, use_reentrant=False))[0], wanted)


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize("quantizer", ["fixed", "lsq"])
@pytest.mark.parametrize(
    "case", ["keys", "own weights", *(pytest.param(case, marks=pytest.mark.sweep) for case in ("values", "apart"))]
)
@ROUTES
def test_compiled_code(route: str, case: str, quantizer: str) -> None:
    torch.compiler.reset()
    model = trained(case, route, quantizer)
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    close(step(twin, compiled)[0], step(model)[0], 1e-4, 1e-4)


def test_pickles() -> None:
    layer = qt.nn.QuantMultiheadAttention.from_float(
        nn.MultiheadAttention(E, 2), qt.QuantSpec(axis=0), "a", qt.QuantSpec()
    )
    x, key = (torch.randn(length, B, E).requires_grad_() for length in (L, S))
    layer.input_quantizer = qt.TensorQuantizer(qt.QuantSpec())
    qt.calibrate(layer.eval(), [(x.detach(), key.detach(), key.detach())], progress=False)
    layer.train()(x, key, key)[0].sum().backward()
    twin = pickle.loads(pickle.dumps(layer))
    assert torch.equal(twin(x, key, key)[0], layer(x, key, key)[0])


@pytest.mark.parametrize("case", ["keys", "apart", "own weights"])
def test_autocast(case: str) -> None:
    """The projections have the bits of torch's layers in bfloat16; the products of an attention round otherwise there."""
    layer = trained(case, "replace").get_submodule("attention")
    results = []
    for save in ("codes", "float"):
        qt.nn.set_training_arithmetic(layer, "float", save)
        layer.zero_grad()
        inputs = CASES[case][1](*(x.requires_grad_() for x in batch()))
        on_grid = {id(x): layer.input_quantizer(x) for x in inputs}
        with torch.autocast("cpu", torch.bfloat16):
            projections = layer.in_projections([on_grid[id(x)] for x in inputs])
            places = [0, *itertools.accumulate(len(each.name) for each in projections)]
            ys = [each(Run.EAGER, on_grid[id(inputs[at])], None) for each, at in zip(projections, places, strict=False)]
        assert {y.dtype for y in ys} == {torch.bfloat16}
        sum(y.float().square().sum() for y in ys).backward()
        gradients = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
        results.append({str(place): y.detach() for place, y in enumerate(ys)} | gradients)
    same(*results)
    model = trained(case)
    with torch.autocast("cpu", torch.bfloat16):
        found, kept = step(model)
        assert kept < step(trained(case, save="float"))[1]
    assert all(value.isfinite().all() for value in found.values())


@ROUTES
@pytest.mark.parametrize("quantizer", ["fixed", "lsq"])
def test_two_forwards_before_their_backwards(route: str, quantizer: str) -> None:
    """As gradients are accumulated; the ranges of weights that follow them are taken again in between."""
    results = []
    for save in ("codes", "float"):
        model, args = trained("keys", route, quantizer, save=save), batch()
        outputs = [model(*(x * factor for x in args)) for factor in (1, 2)]
        for y in outputs:
            y.square().sum().backward()
        results.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    same(*results)


@pytest.mark.parametrize("quantizer", ["fixed", "lsq"])
@pytest.mark.parametrize("float_input", [0, 1], ids=["query", "key"])
def test_one_input_in_float(float_input: int, quantizer: str) -> None:
    """Its projection keeps floats, that of the other input codes, with rows of the same weight."""
    results = []
    for save in ("codes", "float"):
        model = trained("keys", "graph", quantizer, save=save)
        model.get_submodule("attention").source_of(float_input).disable()
        results.append(step(model)[0])
        if save == "codes":
            assert calls_of_ops(lambda m=model: step(m)) == 1 + 2
    same(*results)


@ROUTES
def test_the_range_of_a_split_weight_is_taken_once_a_step(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, found = trained("apart", route, "fixed"), list[torch.Size]()
    quantizer = model.get_submodule("attention.in_proj_weight_quantizer")
    with torch.no_grad():
        model.get_parameter("attention.in_proj_weight").mul_(2)
    before, follow = quantizer.scale.clone(), qt.TensorQuantizer.follow

    def counted(self: qt.TensorQuantizer, weight: Tensor) -> None:
        found.append(weight.shape)
        follow(self, weight)

    monkeypatch.setattr(qt.TensorQuantizer, "follow", counted)
    step(model)
    torch.testing.assert_close(quantizer.scale, before * 2)
    torch.testing.assert_close(quantizer.observer.hi, model.get_parameter("attention.in_proj_weight").amax(1))
    assert found.count((3 * E, E)) == (route == "replace")  # the ops of units take the ranges of their rows


def test_without_a_batch_and_without_a_bias() -> None:
    torch.manual_seed(0)
    float_layer = nn.MultiheadAttention(E, 2, bias=False, add_bias_kv=True, add_zero_attn=True)
    layer = qt.nn.QuantMultiheadAttention.from_float(float_layer, qt.QuantSpec(axis=0), "a", qt.QuantSpec())
    layer.input_quantizer = qt.TensorQuantizer(qt.QuantSpec())
    x, key, value = (torch.randn(length, E) for length in (L, S, S))
    qt.calibrate(settled(layer), [(x, key, value)], progress=False)
    results = []
    for save in ("codes", "float"):
        qt.nn.set_training_arithmetic(settled(layer), "float", save)
        layer.zero_grad()
        y = layer.train()(x, key, value, need_weights=False)[0]
        y.square().sum().backward()
        results.append({"y": y.detach()} | {name: p.grad for name, p in layer.named_parameters()})
    same(*results)


@pytest.mark.parametrize("case", CASES)
def test_codes_in_onnxruntime(case: str, tmp_path) -> None:
    model = trained(case).eval()
    codes = qt.export_onnx(model, tuple(batch()), tmp_path / "m.onnx").verification
    assert codes.missing == ()
    assert codes.weight_codes.differing == codes.quantizer_codes.differing == 0


def test_the_report_names_the_projections_of_each_tensor(monkeypatch) -> None:
    """The number of rows from which a projection computes on codes depends on its part of the weight."""
    monkeypatch.setattr(on_codes, "HAS_INT8", True)  # as on a processor with int8 instructions
    model = trained("keys", arithmetic="auto")
    (line,) = [line for line in qt.quantization_report(model).layers if line.name == "attention"]
    names = [projection.name for projection in model.get_submodule("attention").projections]
    assert names == ["q", "kv", "out"]
    assert line.training.startswith("projections int8 kernel (float for fewer than ")
    qt.nn.set_training_arithmetic(model, "float")
    (line,) = [line for line in qt.quantization_report(model).layers if line.name == "attention"]
    assert line.training.startswith("projections float (as asked), saves integers; ")
    unknown = trained("apart", "replace")
    assert [projection.name for projection in unknown.get_submodule("attention").projections] == ["qkv", "out"]


def test_each_input_has_a_source_of_its_own() -> None:
    model = trained("apart")
    attention = model.get_submodule("attention")
    found = [attention.source_of(place) for place in range(3)]
    assert None not in found
    assert len(set(found)) == 3
    assert set(found) <= set(attention.computes_by())
