"""LSTM, GRU and their cells: equal to torch with quantizers off, and to the formulas on quantized tensors with them on."""

import copy
import pickle
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

import qtoolkit as qt
from qtoolkit.nn.replacement import replace_layers
from tests import reference, reference_layers

F, H, P, T, B = 4, 5, 3, 6, 3
WEIGHT, ACTIVATION = qt.QuantSpec(axis=0), qt.QuantSpec()

LAYERS = {"lstm": nn.LSTM, "gru": nn.GRU}
OPTIONS = {
    "plain": {},
    "two layers": {"num_layers": 2},
    "bidirectional": {"bidirectional": True, "num_layers": 2},
    "batch first": {"batch_first": True, "bidirectional": True},
    "no bias": {"bias": False, "num_layers": 3},
}
CASES = [(kind, options, {}) for kind in LAYERS for options in OPTIONS]
CASES += [("lstm", options, {"proj_size": P}) for options in ("plain", "bidirectional", "no bias")]
IDS = [f"{kind} {options}{' projected' if more else ''}" for kind, options, more in CASES]
FORMS = ["batch", "one", "packed", "packed unsorted"]


def quantized(layer: nn.Module, weight: qt.QuantSpec | None = WEIGHT, activation: qt.QuantSpec | None = ACTIVATION):
    """A QAT layer as module replacement makes it."""
    model = nn.Sequential(copy.deepcopy(layer))
    replace_layers(model, [""], lambda *_: qt.QConfig(activation, weight), qt.nn.REPLACED_MODULES)
    return model[0]


def layer_of(kind: str, options: str, more: dict[str, object]) -> nn.Module:
    return LAYERS[kind](F, H, **OPTIONS[options], **more)


def input_of(layer: nn.Module, form: str) -> object:
    if form.startswith("packed"):
        lengths = (6, 4, 4, 1) if form == "packed" else (1, 6, 4, 4)
        return pack_sequence([torch.randn(n, F) for n in lengths], enforce_sorted=form == "packed")
    if form == "one":
        return torch.randn(T, F)
    return torch.randn(B, T, F) if layer.batch_first else torch.randn(T, B, F)


def state_of(layer: nn.Module, form: str) -> object:
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    batch = {"one": (), "batch": (B,)}.get(form, (4,))
    h = torch.randn(count, *batch, layer.proj_size or H)
    return (h, torch.randn(count, *batch, H)) if isinstance(layer, nn.LSTM) else h


def tensors_of(result: object) -> list[Tensor]:
    """All tensors of an RNN's result."""
    if isinstance(result, Tensor):
        return [result]
    return [tensor for part in result if part is not None for tensor in tensors_of(part)]


def assert_same(found: object, wanted: object, **tolerance: float) -> None:
    for a, b in zip(tensors_of(found), tensors_of(wanted), strict=True):
        if tolerance and a.is_floating_point():
            torch.testing.assert_close(a, b, **tolerance)
        else:
            assert torch.equal(a, b)


# ---- without quantizers


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("kind", "options", "more"), CASES, ids=IDS)
def test_with_quantizers_off_it_is_torchs(kind: str, options: str, more: dict, form: str) -> None:
    """Equal bit for bit in the fused kernel; equal up to the order of sums step by step, while quantizers only observe."""
    layer = layer_of(kind, options, more)
    ours = quantized(layer)
    x, hx = input_of(layer, form), state_of(layer, form)
    for args in ((x,), (x, hx)):
        wanted = layer(*args)
        with qt.disable_quantization(ours):
            assert_same(ours(*args), wanted)
        assert_same(ours.forward_fp32(*args), wanted)
        with qt.calibrating(ours):
            assert_same(ours(*args), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "options", "more"), CASES, ids=IDS)
def test_the_float_checkpoint_loads_and_it_goes_back(kind: str, options: str, more: dict) -> None:
    layer = layer_of(kind, options, more)
    ours = quantized(layer_of(kind, options, more))
    ours.load_state_dict(layer.state_dict())  # strict
    parameters = dict(ours.named_parameters())
    back = ours.to_float()
    assert type(back) is type(layer)
    assert vars(back).keys() == vars(layer).keys()
    assert all(back.get_parameter(name) is parameters[name] for name, _ in layer.named_parameters())
    x = input_of(layer, "batch")
    assert_same(back(x), layer(x))
    back.weight_ih_l0 = nn.Parameter(torch.zeros_like(back.weight_ih_l0))  # is its own
    with qt.disable_quantization(ours):
        assert_same(ours(x), layer(x))


def test_parameters_and_hooks_stay() -> None:
    layer = nn.LSTM(F, H)
    weight, calls = layer.weight_hh_l0, []
    layer.register_forward_hook(lambda *_: calls.append(1))
    ours = qt.nn.QuantLSTM.from_float(layer, WEIGHT)
    assert ours.weight_hh_l0 is weight
    ours(torch.randn(T, B, F))  # by the fused kernel, whose float form must not call the hook again
    assert len(calls) == 1


# ---- on the grids


def calibrated(ours: qt.nn.QuantModule, *args: object) -> qt.nn.QuantModule:
    training = ours.training
    report = qt.calibrate(ours.eval(), [args], progress=False)
    assert report.unreached == ()
    return ours.train(training)


def to_numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


def rounding(quantizer: qt.TensorQuantizer | None):
    """Return a NumPy function that quantizes with the oracle, or the identity if there is no quantizer."""
    if quantizer is None:
        return lambda values: values
    scale, spec = quantizer.scale, quantizer.spec
    grid = (scale, quantizer.zero_point, spec.qmin, spec.qmax, spec.axis)
    return lambda values: to_numpy(reference.fake_quant(torch.from_numpy(values).float(), *grid))


def oracle(ours: qt.nn.QuantModule, sequence: Tensor, state: tuple[np.ndarray, ...]) -> tuple[np.ndarray, list]:
    """The outputs of one sequence (steps, features), and the last state of each layer and direction."""

    def rounded(kind: str, key: str) -> np.ndarray:
        return rounding(getattr(ours, f"weight_{kind}_{key}_quantizer"))(
            to_numpy(getattr(ours, f"weight_{kind}_{key}"))
        )

    x, ends = to_numpy(sequence), []
    x = rounding(ours.input_quantizer)(x)
    for layer in range(ours.num_layers):
        x = rounding(getattr(ours, f"input_quantizer_l{layer}"))(x) if layer else x
        outputs = []
        for suffix in ("", "_reverse") if ours.bidirectional else ("",):
            key = f"l{layer}{suffix}"
            biases = [to_numpy(getattr(ours, f"bias_{of}_{key}")) if ours.bias else np.zeros(1) for of in ("ih", "hh")]
            weights = (rounded("ih", key), rounded("hh", key), *biases)
            round_h = rounding(getattr(ours, f"hidden_quantizer_{key}"))

            def step(row, now, weights=weights, round_h=round_h, key=key):
                if isinstance(ours, nn.GRU):
                    return reference_layers.gru_step(row, now, *weights, round_h)
                if not ours.proj_size:
                    return reference_layers.lstm_step(row, now, *weights, round_h)
                round_p, w_hr = rounding(getattr(ours, f"projection_quantizer_{key}")), rounded("hr", key)
                return reference_layers.lstm_step(row, now, *weights, round_h, lambda h: round_p(h) @ w_hr.T)

            first = tuple(part[len(ends)] for part in state)
            y, end = reference_layers.recurrent(step, x, first, reverse=bool(suffix))
            outputs.append(y)
            ends.append(end)
        x = np.concatenate(outputs, -1)
    return x, ends


@pytest.mark.parametrize("given", [True, False], ids=["state", "no state"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("kind", "options", "more"), CASES, ids=IDS)
def test_it_computes_the_formulas_on_the_grids(kind: str, options: str, more: dict, form: str, given: bool) -> None:
    layer = layer_of(kind, options, more)
    ours = quantized(layer, qt.QuantSpec(bits=5, axis=0), qt.QuantSpec(bits=6))
    x, hx = input_of(layer, form), state_of(layer, form)
    args = (x, hx) if given else (x,)
    calibrated(ours, *args)
    y, end = ours(*args)
    state = [to_numpy(part) * given for part in (hx if isinstance(layer, nn.LSTM) else (hx,))]
    end = end if isinstance(layer, nn.LSTM) else (end,)
    if form == "one":
        x, y, state, end = (
            x.unsqueeze(1), y.unsqueeze(1), [s[:, None] for s in state], tuple(e.unsqueeze(1) for e in end)
        )  # fmt: skip
        lengths = [T]
    elif form == "batch":
        x, y = (t.transpose(0, 1) if layer.batch_first else t for t in (x, y))
        lengths = [T] * B
    else:
        (x, lengths), (y, _) = pad_packed_sequence(x), pad_packed_sequence(y)
        lengths = lengths.tolist()
    for i, length in enumerate(lengths):
        wanted, ends = oracle(ours, x[:length, i], [part[:, i] for part in state])
        np.testing.assert_allclose(to_numpy(y[:length, i]), wanted, rtol=0, atol=2e-6)
        for j, part in enumerate(end):
            np.testing.assert_allclose(to_numpy(part[:, i]), np.stack([e[j] for e in ends]), rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_float_state_takes_the_fused_kernel(kind: str) -> None:
    layer = LAYERS[kind](F, H, num_layers=2, bidirectional=True)
    ours = quantized(layer, activation=None)
    assert not [name for name in qt.quantizers_of(ours) if "weight" not in name]
    twin = copy.deepcopy(layer)
    for name, parameter in layer.named_parameters():
        if name.startswith("weight"):
            scale = getattr(ours, f"{name}_quantizer").scale
            twin.get_parameter(name).data = reference.fake_quant(parameter, scale, None, -128, 127, 0)
    x, hx = input_of(layer, "batch"), state_of(layer, "batch")
    assert_same(ours(x, hx), twin(x, hx))
    ours(x)[0].square().sum().backward()
    twin(x)[0].square().sum().backward()
    for name, parameter in twin.named_parameters():
        assert torch.equal(ours.get_parameter(name).grad, parameter.grad), name  # nothing is clamped


class FusedLSTM(qt.nn.QuantLSTM):
    QUANTIZE_HIDDEN = False


def test_a_subclass_can_keep_the_state_in_float() -> None:
    model = nn.Sequential(nn.LSTM(F, H, num_layers=2))
    replace_layers(model, [""], lambda *_: qt.QConfig(ACTIVATION, WEIGHT), {nn.LSTM: FusedLSTM})
    weights = {f"weight_{of}_l{layer}_quantizer" for of in ("ih", "hh") for layer in (0, 1)}
    assert set(qt.quantizers_of(model[0])) == weights | {"input_quantizer"}


@pytest.mark.parametrize(("kind", "options", "more"), CASES, ids=IDS)
def test_every_quantizer_is_used(kind: str, options: str, more: dict) -> None:
    layer = layer_of(kind, options, more)
    ours = quantized(layer, WEIGHT, ACTIVATION)
    args = input_of(layer, "batch"), state_of(layer, "batch")
    quantizers = qt.quantizers_of(calibrated(ours, *args))
    directions = layer.num_layers * (2 if layer.bidirectional else 1)
    weights = [name for name, _ in layer.named_parameters() if name.startswith("weight")]
    assert len(quantizers) == len(weights) + layer.num_layers + directions * (2 if layer.proj_size else 1)
    y = ours(*args)[0]
    for name, quantizer in quantizers.items():
        before = quantizer.amax
        quantizer.amax = before * 0.3  # which clamps much
        assert not torch.equal(ours(*args)[0], y), name
        quantizer.amax = before


@pytest.mark.parametrize("kind", LAYERS)
def test_padding_is_not_observed(kind: str) -> None:
    ours = quantized(LAYERS[kind](F, H, bidirectional=True))
    calibrated(ours, pack_sequence([torch.full((n, F), 2.0) for n in (5, 2)]))
    assert (ours.input_quantizer.observer.lo, ours.input_quantizer.observer.hi) == (2, 2)


@pytest.mark.parametrize(("kind", "more"), [("lstm", {}), ("lstm", {"proj_size": P}), ("gru", {})], ids=str)
def test_gradients_are_those_of_a_plain_composition(kind: str, more: dict) -> None:
    """The composition uses torch's ops and explicit straight-through rounding."""
    layer = layer_of(kind, "plain", more)
    ours = calibrated(quantized(layer), x := input_of(layer, "batch"))
    for quantizer in qt.quantizers_of(ours).values():
        quantizer.amax = quantizer.amax * 0.7  # so that some values are clamped
    plain = copy.deepcopy(layer)

    def rounded(quantizer: qt.TensorQuantizer, tensor: Tensor) -> Tensor:
        grid = (quantizer.scale, None, -128, 127, quantizer.spec.axis)
        passed = tensor * reference.inside(tensor.detach(), *grid)
        return passed + (reference.fake_quant(tensor.detach(), *grid) - passed).detach()

    weights = {
        name.removesuffix("_l0"): rounded(getattr(ours, f"{name}_quantizer"), p) if "weight" in name else p
        for name, p in plain.named_parameters()
    }
    h, c, outputs = torch.zeros(B, layer.proj_size or H), torch.zeros(B, H), []
    for row in rounded(ours.input_quantizer, x):
        h = rounded(ours.hidden_quantizer_l0, h)
        gates_x = row @ weights["weight_ih"].T + weights["bias_ih"]
        gates_h = h @ weights["weight_hh"].T + weights["bias_hh"]
        if kind == "gru":
            (rx, zx, nx), (rh, zh, nh) = gates_x.chunk(3, -1), gates_h.chunk(3, -1)
            z = (zx + zh).sigmoid()
            h = (1 - z) * (nx + (rx + rh).sigmoid() * nh).tanh() + z * h
        else:
            i, f, g, o = (gates_x + gates_h).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            if layer.proj_size:
                h = rounded(ours.projection_quantizer_l0, h) @ weights["weight_hr"].T
        outputs.append(h)
    g = torch.randn(T, B, layer.proj_size or H)
    (ours(x)[0] * g).sum().backward()
    (torch.stack(outputs) * g).sum().backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", LAYERS)
def test_sixteen_bits_are_near_float(kind: str) -> None:
    layer = LAYERS[kind](F, H, num_layers=2, bidirectional=True, dropout=0.5)
    ours = quantized(layer, qt.QuantSpec(bits=16, axis=0), qt.QuantSpec(bits=16))
    x = input_of(layer, "batch")
    calibrated(ours, x)
    for name, quantizer in qt.quantizers_of(ours).items():
        if name.startswith(("hidden", "input_quantizer_l1")):
            quantizer.amax = 2.0  # what is kept is doubled
    torch.manual_seed(1)
    wanted = layer(x)  # in training mode, so with dropout
    torch.manual_seed(1)
    assert_same(ours(x), wanted, rtol=0, atol=1e-3)
    assert not torch.equal(ours(x)[0], ours(x)[0])
    ours.eval()
    assert torch.equal(ours(x)[0], ours(x)[0])


# ---- copies, casts, errors


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
@pytest.mark.parametrize("activation", [ACTIVATION, None], ids=["stepwise", "fused"])
@pytest.mark.parametrize("kind", LAYERS)
def test_copies_compute_the_same(kind: str, activation: qt.QuantSpec | None, copy_of) -> None:
    ours = quantized(LAYERS[kind](F, H, num_layers=2), activation=activation)
    x = input_of(ours, "batch")
    calibrated(ours, x)
    twin = copy_of(ours)
    assert_same(twin(x), ours(x))
    with torch.no_grad():
        twin.weight_ih_l0.zero_()
    assert not torch.equal(twin(x)[0], ours(x)[0])
    ours.flatten_parameters()
    y, half = ours(x)[0], ours.half()(x.half())[0]
    assert half.dtype is torch.float16
    torch.testing.assert_close(half.float(), y, rtol=0, atol=0.03)


@pytest.mark.parametrize("activation", [ACTIVATION, None], ids=["stepwise", "fused"])
@pytest.mark.parametrize("kind", LAYERS)
def test_with_fixed_grids_it_computes_the_same(kind: str, activation: qt.QuantSpec | None) -> None:
    """With the quantizers off it is the float layer."""
    layer = LAYERS[kind](F, H, num_layers=2)
    ours = quantized(layer, activation=activation)
    x = input_of(layer, "batch")
    wanted = calibrated(ours, x)(x)
    for name, quantizer in qt.quantizers_of(ours).items():
        setattr(ours, name, quantizer.to_grid())
    assert not qt.quantizers_of(ours)
    assert_same(ours(x), wanted)
    with qt.disable_quantization(ours):
        assert_same(ours(x), layer(x))


@pytest.mark.parametrize(
    ("x", "hx", "error", "words"),
    [
        (torch.randn(0, B, F), None, RuntimeError, "Expected sequence length to be larger than 0"),
        (torch.randn(2, T, B, F), None, ValueError, "Expected input to be 2D or 3D, got 4D"),
        (torch.randn(T, B, F + 1), None, RuntimeError, "must be equal to input_size. Expected 4, got 5"),
        (torch.randn(T, B, F), torch.randn(1, B + 1, H), RuntimeError, "Expected hidden size"),
        (torch.randn(T, F), torch.randn(1, B, H), RuntimeError, "Expected hidden size"),
    ],
)
@pytest.mark.parametrize("kind", LAYERS)
def test_shapes_that_torch_refuses(kind: str, x: Tensor, hx: Tensor | None, error: type, words: str) -> None:
    ours = quantized(LAYERS[kind](F, H))
    state = (hx, torch.randn(hx.shape)) if hx is not None and kind == "lstm" else hx
    with pytest.raises(error) as caught, qt.calibrating(ours):
        ours(x, state)
    wanted = words.replace("hidden size", "hidden[0] size") if kind == "lstm" else words
    assert wanted in str(caught.value)


@pytest.mark.parametrize("name", ["LSTM", "GRU", "LSTMCell", "GRUCell"])
def test_built_with_specs_device_and_dtype(name: str) -> None:
    kind, specs = getattr(qt.nn, f"Quant{name}"), {"weight_spec": WEIGHT, "input_spec": ACTIVATION}
    ours = kind(F, H, **specs, activation_spec=ACTIVATION, device="meta")
    assert {tensor.device.type for tensor in ours.state_dict().values()} == {"meta"}
    ours = kind(F, H, **specs, activation_spec=ACTIVATION, dtype=torch.float64)
    x = torch.randn(*((B,) if name.endswith("Cell") else (T, B)), F, dtype=torch.float64)
    h = torch.randn(*(() if name.endswith("Cell") else (1,)), B, H, dtype=torch.float64)
    args = x, (h, h) if name.startswith("LSTM") else h
    calibrated(ours, *args)
    assert {tensor.dtype for tensor in tensors_of(ours(*args))} == {torch.float64}
    assert len(qt.quantizers_of(ours)) == 4
    assert not qt.quantizers_of(kind(F, H))
    assert_same(kind.from_float(ours.to_float(), None)(*args), ours.to_float()(*args))


def test_without_a_range_it_says_so() -> None:
    ours = quantized(nn.LSTM(F, H))
    with pytest.raises(RuntimeError, match="'0.input_quantizer' has no range yet"):
        ours(torch.randn(T, B, F))


def test_learned_scales_get_gradients() -> None:
    ours = quantized(nn.GRU(F, H), qt.QuantSpec(axis=0, quantizer="lsq"), qt.QuantSpec(quantizer="lsq"))
    x = input_of(ours, "batch")
    calibrated(ours, x)
    ours(x)[0].square().sum().backward()
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


# ---- cells

CELLS = {"lstm": nn.LSTMCell, "gru": nn.GRUCell}


def cell_inputs(kind: str, batch: tuple[int, ...]) -> tuple[Tensor, object]:
    h, c = torch.randn(*batch, H), torch.randn(*batch, H)
    return torch.randn(*batch, F), (h, c) if kind == "lstm" else h


@pytest.mark.parametrize("batch", [(B,), ()], ids=["batch", "one"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", CELLS)
def test_cells_compute_the_formulas_on_the_grids(kind: str, bias: bool, batch: tuple[int, ...]) -> None:
    cell = CELLS[kind](F, H, bias=bias)
    ours = quantized(cell, qt.QuantSpec(bits=5, axis=0), qt.QuantSpec(bits=6))
    x, hx = cell_inputs(kind, batch)
    calibrated(ours, x, hx)
    assert set(qt.quantizers_of(ours)) == {
        "input_quantizer", "hidden_quantizer", "weight_ih_quantizer", "weight_hh_quantizer"
    }  # fmt: skip
    weights = [
        rounding(getattr(ours, f"{n}_quantizer"))(to_numpy(getattr(ours, n))) for n in ("weight_ih", "weight_hh")
    ]
    biases = [to_numpy(getattr(ours, n)) if bias else np.zeros(1) for n in ("bias_ih", "bias_hh")]
    step = reference_layers.lstm_step if kind == "lstm" else reference_layers.gru_step
    values = rounding(ours.input_quantizer)(to_numpy(x))
    for given in (hx, None):
        state = tuple(to_numpy(s) if given is not None else np.zeros((*batch, H)) for s in tensors_of(hx))
        wanted = step(values, state, *weights, *biases, rounding(ours.hidden_quantizer))
        for a, b in zip(tensors_of(ours(x, given)), wanted, strict=True):
            np.testing.assert_allclose(to_numpy(a), b, rtol=0, atol=1e-6)
        with qt.disable_quantization(ours):
            assert_same(ours(x, given), cell(x, given))
        assert_same(ours.forward_fp32(x, given), cell(x, given))


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
@pytest.mark.parametrize("kind", CELLS)
def test_cells_go_back_and_are_copied(kind: str, copy_of) -> None:
    cell = CELLS[kind](F, H)
    ours = quantized(cell)
    ours.load_state_dict(cell.state_dict())
    args = cell_inputs(kind, (B,))
    calibrated(ours, *args)
    assert_same(copy_of(ours)(*args), ours(*args))
    back = ours.to_float()
    assert vars(back).keys() == vars(cell).keys()
    assert_same(back(*args), cell(*args))
    ours(*args)[0].square().sum().backward()
    assert all(parameter.grad is not None for parameter in ours.parameters())


@pytest.mark.parametrize("kind", CELLS)
def test_cells_compile_whole(kind: str) -> None:
    """Layers do not compile: torch.compile does not support RNN, LSTM and GRU."""
    ours, args = quantized(CELLS[kind](F, H)), cell_inputs(kind, (B,))
    calibrated(ours, *args)
    compiled = torch.compile(copy.deepcopy(ours), fullgraph=True, backend="aot_eager")
    assert_same(compiled(*args), ours(*args))


# ---- in a graph


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(F, H, batch_first=True), nn.Linear(H, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


class Kept(nn.Module):
    """A leaf module with a recurrent layer inside."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.stem, self.tagger = nn.Linear(F, F), Tagger()
        self.tagger.rnn = kind(F, H, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.tagger(self.stem(x))


class FusedGRU(qt.nn.QuantGRU):
    QUANTIZE_HIDDEN = False


@pytest.mark.parametrize(
    ("qat_type", "exporter", "op"),
    [
        (qt.nn.QuantLSTM, "dynamo", None),
        (qt.nn.QuantGRU, "torchscript", None),
        (FusedLSTM, "torchscript", "LSTM"),
        (FusedGRU, "dynamo", "GRU"),
    ],
)
def test_codes_in_onnxruntime(tmp_path: Path, qat_type: type, exporter: str, op: str | None) -> None:
    """A float state exports ONNX's LSTM or GRU op; a quantized state exports a Q/DQ pair per step."""
    x = torch.randn(B, T, F)
    mapping = qt.QConfigMapping().set_object_type(qat_type.FLOAT, qt.QConfig(ACTIVATION, WEIGHT))
    how = {"untraced": ["tagger"], "qat_modules": {qat_type.FLOAT: qat_type}, "qconfig_mapping": mapping}
    prepared = qt.prepare(Kept(qat_type.FLOAT).eval(), x, backend="onnxruntime", **how)
    assert type(prepared.tagger.rnn) is qat_type
    qt.calibrate(prepared, [x], progress=False)
    result = qt.export_onnx(prepared, x, tmp_path / "m.onnx", exporter=exporter)
    codes = result.verification
    assert codes.missing == ()
    assert codes.weight_codes.compared == sum(p.numel() for n, p in prepared.named_parameters() if "weight" in n)
    assert codes.weight_codes.differing == codes.quantizer_codes.differing == 0
    states = B * (T - 1) * H if op is None else 0  # the first one is a constant: zeros
    assert codes.quantizer_codes.compared == B * T * (F + F + H) + states
    ops = [node.op_type for node in onnx.load(str(result.path)).graph.node]
    assert ops.count("LSTM") + ops.count("GRU") == (0 if op is None else 1)
    assert op is None or op in ops
