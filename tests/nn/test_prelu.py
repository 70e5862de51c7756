"""PReLUs in one op with their quantizers: the values and gradients of the modules called one by one, and when they are."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from tests.blocks import called_one_by_one, codes_taken, recorded_calls
from tests.copies import made_once

X = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(0))


class Upscaler(nn.Module):
    """FSRCNN's ops: PReLUs behind convolutions and a batch norm, one called twice, and a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.first = nn.Conv2d(3, 5, 3, padding=1), nn.PReLU(5)
        self.mid, self.norm, self.second = nn.Conv2d(5, 5, 1), nn.BatchNorm2d(5), nn.PReLU()
        self.up, self.third = nn.ConvTranspose2d(5, 4, 3, stride=2), nn.PReLU(4, init=-0.3)
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.norm(self.mid(self.first(self.head(x)))))
        return self.last(self.third(self.up(self.second(self.mid(x)))))


@made_once
def prepared_of(quantizer: str = "lsq", bits: int = 8, dtype: torch.dtype = torch.float32, **options) -> nn.Module:
    torch.manual_seed(0)
    symmetric = options.pop("symmetric", True)
    spec = qt.QuantSpec(bits=bits, quantizer=quantizer, symmetric=symmetric, signed=symmetric)
    mapping = qt.QConfigMapping().set_global(
        qt.QConfig(spec, qt.QuantSpec(axis=0, quantizer=quantizer.removesuffix("_plus")))
    )
    prepared = qt.prepare(Upscaler().to(dtype), (X.to(dtype),), backend="academic", qconfig_mapping=mapping, **options)
    qt.calibrate(prepared.to(dtype), [X.to(dtype)], progress=False)
    qt.freeze_ranges(prepared, "activations").apply()
    return prepared.train()


def step(model: nn.Module, x: Tensor = X) -> dict[str, Tensor]:
    """Return the output and all gradients of a training step."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    return {"output": y.detach(), "input": x.grad} | {name: p.grad for name, p in model.named_parameters()}


@pytest.fixture
def calls(monkeypatch) -> list[dict]:
    """The arguments of each call of the op."""
    return recorded_calls(monkeypatch, "prelu_fake_quant")


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("quantizer", ["fixed", "lsq"])
def test_a_step_is_that_of_the_modules_one_by_one(
    quantizer: str, symmetric: bool, bits: int, calls: list[dict]
) -> None:
    prepared = prepared_of(quantizer, bits, torch.float64, symmetric=symmetric)
    plain = copy.deepcopy(prepared)
    for x in (X.double(), X.double().flip(0) * 0.5):
        ours = step(prepared, x)
        with called_one_by_one():
            theirs = step(plain, x)
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(
                ours[name], value, rtol=1e-9, atol=1e-11, msg=lambda t, name=name: f"{name}: {t}"
            )
    assert [call["weight"].numel() for call in calls] == [5, 1, 1, 4] * 2


def test_float32_output_is_that_of_the_modules_bit_for_bit(calls: list[dict]) -> None:
    prepared = prepared_of(training_arithmetic="float")
    prepared.norm.eval()  # whose op rounds elsewhere in training
    ours = prepared(X)
    with called_one_by_one():
        assert torch.equal(ours, prepared(X))
    assert len(calls) == 4


def test_the_next_layer_knows_the_codes(monkeypatch) -> None:
    prepared, taken = prepared_of(), codes_taken(monkeypatch)
    quantizer = prepared.get_submodule("activation_quantizers.first")
    prepared(X)
    y, codes = next((y, codes) for source, y, codes in taken if source is quantizer)
    assert torch.equal(qt.ops.dequantize(codes.codes, codes.scale), y)
    assert torch.equal(codes.scale, quantizer.scale.detach().abs())


def test_what_is_kept_for_backward() -> None:
    """The input of a PReLU once, and codes: not what it returns."""
    model = qt.prepare(nn.Sequential(nn.Conv2d(3, 64, 1), nn.PReLU(64), nn.Conv2d(64, 2, 1)), (X,), backend="tensorrt")
    qt.calibrate(model, [X], progress=False)
    values = 64 * X[:, 0].numel()
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model.train()(X).sum().backward()
    assert sorted(size for size in kept.values() if size >= values) == [values, 4 * values]


def with_hook(name: str) -> Callable[[nn.Module], None]:
    return lambda model: model.get_submodule(name).register_forward_hook(lambda m, args, y: None)


class Doubled(nn.PReLU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x)


NOT_FUSED = {
    "eval": (lambda model: model.eval(), None),
    "hook of the activation": (with_hook("third"), "computed by torch: it has hooks"),
    "hook of its quantizer": (with_hook("activation_quantizers.third"), "computed by torch: its quantizer has hooks"),
    "forward of its own": (
        lambda model: setattr(model.third, "forward", model.third.forward),
        "computed by torch: it has hooks",
    ),
    "another module": (lambda model: setattr(model, "third", Doubled(4)), None),
    "quantizer off": (
        lambda model: model.get_submodule("activation_quantizers.third").disable(),
        "computed by torch: its quantizer is disabled or not calibrated",
    ),
}


@pytest.mark.parametrize("name", NOT_FUSED)
def test_they_are_called_one_by_one(name: str, calls: list[dict]) -> None:
    prepared = prepared_of()
    change, reason = NOT_FUSED[name]
    plain = copy.deepcopy(prepared)
    for model in (prepared, plain):
        torch.manual_seed(1)
        change(model)
    ours = prepared(X)
    assert all(call["weight"].numel() != 4 for call in calls)
    with called_one_by_one():
        torch.testing.assert_close(ours, plain(X), rtol=1e-4, atol=1e-5)
    if reason is not None:
        assert trained(prepared)["third"] == reason


def trained(model: nn.Module) -> dict[str, str]:
    """How the report says that each PReLU trains."""
    lines = {line.name: line.training for line in qt.quantization_report(model).layers}
    return {name: lines[name] for name in ("first", "second", "third")}


def test_the_report_tells_it() -> None:
    assert set(trained(prepared_of()).values()) == {
        "fused with its quantizer",
    }
    assert set(trained(prepared_of(training_arithmetic="float", save="float")).values()) == {
        "computed by torch: as asked"
    }
    assert (
        trained(prepared_of("lsq_plus", symmetric=False))["first"]
        == "computed by torch: its quantizer trains a zero point"
    )
    with called_one_by_one():
        assert set(trained(prepared_of()).values()) == {"computed by torch: hooks of all modules are registered"}


@pytest.mark.parametrize(
    "options",
    [{"quantizer": "lsq_plus", "symmetric": False}, {"training_arithmetic": "float", "save": "float"}],
    ids=str,
)
def test_trained_zero_points_and_floats_for_backward_stay_with_torch(options: dict, calls: list[dict]) -> None:
    step(prepared_of(**options))
    assert not calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_and_models_of_16_bits(dtype: torch.dtype, calls: list[dict]) -> None:
    prepared = prepared_of()
    with torch.autocast("cpu", dtype):
        y = prepared(X)
    y.float().sum().backward()
    assert len(calls) == 4
    assert {call["x"].dtype for call in calls} == {dtype}
    assert {call["weight"].dtype for call in calls} == {torch.float32}
    with called_one_by_one(), torch.autocast("cpu", dtype):
        plain = copy.deepcopy(prepared)(X)
    assert y.dtype == plain.dtype
    torch.testing.assert_close(y.float(), plain.float(), rtol=0.05, atol=0.05)
    whole = prepared.to(dtype)
    assert whole(X.to(dtype)).dtype == dtype
    assert len(calls) == 8


@pytest.mark.slow
def test_compiled_without_breaks(calls: list[dict]) -> None:
    prepared = prepared_of()
    wanted = step(prepared)
    compiled = torch.compile(prepared, fullgraph=True, backend="aot_eager")
    found = compiled(X)
    torch.testing.assert_close(found, wanted["output"], rtol=1e-4, atol=1e-5)
    found.sum().backward()
    assert prepared.first.weight.grad.isfinite().all()


def test_what_torch_refuses_is_torchs_error() -> None:
    model = qt.prepare(nn.Sequential(nn.PReLU(3), nn.Conv2d(3, 2, 1)), (X,), backend="tensorrt")
    qt.calibrate(model, [X], progress=False)
    with pytest.raises(RuntimeError, match="Mismatch of parameter numbers and input channel size"):
        model.train()(X[:, :2])


def test_eval_and_convert_are_those_of_the_trained_model() -> None:
    prepared = prepared_of()
    step(prepared)
    assert torch.equal(prepared.eval()(X), qt.convert(prepared)(X))
