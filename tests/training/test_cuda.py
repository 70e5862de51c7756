"""Training on a GPU: the steps, ranges, conversions and files of the CPU; steps that never wait for the device."""

import contextlib
import copy
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.quantizers.first_steps import GROWTH_AT, LOOKED_AT
from qtoolkit.quantizers.table import OBSERVERS, QUANTIZERS
from tests.nets import ConvNet, settled
from tests.training.layers import CASES, first_of, quantized_layer

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

SHAPE = (8, 3, 12, 12)
AFFINE = ("lsq_plus", "learned_range")
OF_ACTIVATIONS = (*AFFINE, "pact", "dsq")
FEW_BITS = ("apot", "dorefa")


@pytest.fixture(autouse=True)
def _float32() -> Iterator[None]:
    """Convolutions and products in float32: torch takes TF32 for convolutions, whose roundings move codes."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def images(seed: int = 0) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def prepared(device: str, quantizer: str = "lsq", observer: str = "histogram", route: str = "graph") -> nn.Module:
    """Return the network of all layer kinds, calibrated on the device."""
    torch.manual_seed(0)
    pow2, affine, bits = observer.startswith("pow2"), quantizer in AFFINE, 4 if quantizer in FEW_BITS else 8
    spec = qt.QuantSpec(
        bits, quantizer=quantizer, observer=observer, signed=False, symmetric=not affine, pow2_scale=pow2
    )
    weight = qt.QuantSpec(bits, quantizer="fixed" if quantizer in OF_ACTIVATIONS else quantizer, axis=0)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(spec, weight))
    model, x = ConvNet().to(device).train(), images().to(device)
    if route == "graph":
        model = qt.prepare(model, (x,), qconfig_mapping=mapping, backend="onnxruntime")
    else:
        model = qt.quant_modules.replace(model, mapping, backend="onnxruntime")
    qt.calibrate(model, [x, images(1).to(device)], progress=False)
    return model.train()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(qt.parameter_groups(model), 0.01, momentum=0.9)


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> list[float]:
    found = []
    for seed in range(steps):
        optimizer.zero_grad(set_to_none=True)
        loss = model(images(seed).to(next(model.parameters()).device)).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found).tolist()


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("route", ["graph", "modules"])
@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_steps_are_those_of_the_cpu(quantizer: str, route: str) -> None:
    """Sums in another order move a code here and there, of 4 bits a large one: the first loss is near, the others follow."""
    on_cpu = prepared("cpu", quantizer, route=route)
    on_gpu = copy.deepcopy(on_cpu).cuda()
    found, wanted = (losses(model, optimizer_of(model)) for model in (on_gpu, on_cpu))
    assert found[0] == pytest.approx(wanted[0], rel=0.005)
    assert found == pytest.approx(wanted, rel=0.1 if quantizer in FEW_BITS else 0.02)


@pytest.mark.parametrize("quantizer", ["fixed", "tqt"])
@pytest.mark.parametrize("observer", OBSERVERS)
def test_ranges_are_those_of_the_cpu(observer: str, quantizer: str) -> None:
    found, wanted = (prepared(device, quantizer, observer) for device in ("cuda", "cpu"))
    scales = {name: q.scale for name, q in qt.quantizers_of(wanted).items()}
    for name, q in qt.quantizers_of(found).items():
        assert q.scale.is_cuda
        torch.testing.assert_close(q.scale.cpu(), scales[name], rtol=2e-2, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", CASES, ids=[kind.__name__ for kind in CASES])
def test_a_layer_is_that_of_the_cpu(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    _, ours, x = quantized_layer(kind, "lsq")
    there = copy.deepcopy(ours).cuda()
    results = []
    for model, inputs in ((ours, x), (there, tuple(t.cuda() for t in x))):
        y = first_of(model(inputs))
        y.square().mean().backward()
        gradients = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
        results.append({"y": y.detach().cpu(), **gradients})
    assert results[0].keys() == results[1].keys()
    for name, wanted in results[0].items():
        assert (results[1][name] - wanted).norm() <= 0.05 * wanted.norm() + 1e-5, name


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("quantizer", ["fixed", "lsq", "tqt", "dsq"])
@pytest.mark.parametrize("route", ["graph", "modules"])
def test_no_step_waits_for_the_device(route: str, quantizer: str, last: bool, dtype: torch.dtype | None) -> None:
    """The first steps follow the ranges of their inputs; what they found is read after a few of them alone (LOOKED_AT)."""
    model = prepared("cuda", quantizer, route=route)
    x = images().cuda()
    if last:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    optimizer = optimizer_of(model)
    for number in range(1, 5):
        with contextlib.nullcontext() if number in (*LOOKED_AT, *GROWTH_AT) else no_waiting():
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype, enabled=dtype is not None):
                loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
    assert loss.isfinite()


def captured_step(model: nn.Module, x: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Capture forward, backward and optimizer, after the warm-up that torch's documentation asks for; return the loss too."""
    stream, optimizer = torch.cuda.Stream(), torch.optim.SGD(model.parameters(), 0.01)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            taken_step(model, x, optimizer)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = taken_step(model, x, optimizer)
    return graph, loss


def taken_step(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    optimizer.zero_grad(set_to_none=False)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.parametrize("quantizer", ["fixed", "lsq"])
def test_a_captured_step_trains_as_any_other(quantizer: str) -> None:
    model, x = settled(prepared("cuda", quantizer)), images().cuda()
    graph, loss = captured_step(model, x)
    twin = copy.deepcopy(model)
    found = []
    for _ in range(5):
        graph.replay()
        found.append(loss.item())
    optimizer = torch.optim.SGD(twin.parameters(), 0.01)
    wanted = [taken_step(twin, x, optimizer).item() for _ in range(5)]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=0.02, atol=1e-4)
    assert found[-1] < found[0]


@pytest.mark.parametrize("route", ["graph", "modules"])
@pytest.mark.parametrize("quantizer", ["fixed", "lsq"])
def test_evaluation_has_the_weights_of_captured_steps(quantizer: str, route: str) -> None:
    """A replay trains without Python, so that no version of a parameter says that it has changed."""
    model, x = settled(prepared("cuda", quantizer, route=route)), images().cuda()
    graph, _ = captured_step(model, x)
    before = model.eval()(x)
    for _ in range(3):
        model.train()
        graph.replay()
        after = model.eval()(x)
        assert not torch.equal(after, before)
        assert torch.equal(after, copy.deepcopy(model)(x))
        before = after


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("quantizer", ["fixed", "lsq"])
def test_graphed_callables_train_as_the_model_does(quantizer: str, dtype: torch.dtype | None) -> None:
    """make_graphed_callables takes no step between its warm-up and its capture: what changes once a step must be captured."""
    model = settled(prepared("cuda", quantizer))
    with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=False):
        graphed = torch.cuda.make_graphed_callables(model, (images().cuda(),))
        twin = settled(prepared("cuda", quantizer))
        twin.load_state_dict(model.state_dict())
        found, wanted = (losses(m, torch.optim.SGD(m.parameters(), 0.01), 6) for m in (graphed, settled(twin)))
    rtol = 0.02 if dtype is None else 0.05
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=rtol, atol=1e-4)
    for (name, one), other in zip(model.named_buffers(), twin.buffers(), strict=True):
        if not name.endswith("_taken"):  # the process's clock, which has moved on when the twin trains
            torch.testing.assert_close(one, other, rtol=rtol, atol=rtol, msg=lambda m, n=name: f"{n}: {m}")


def test_a_range_follows_the_data_in_a_captured_step() -> None:
    """The clock advances where the graph runs, and so do the steps: as in a training without the graph."""
    model, x = prepared("cuda", "fixed", "minmax"), images().cuda()
    twin = copy.deepcopy(model)
    graph, _ = captured_step(model, 2 * x)
    for _ in range(20):
        graph.replay()
    optimizer = torch.optim.SGD(twin.parameters(), 0.01)
    for _ in range(3 + 20):  # of the warm-up, too
        taken_step(twin, 2 * x, optimizer)
    activations = [q for q in qt.quantizers_of(model).values() if q.follows_data]
    wanted = [q for q in qt.quantizers_of(twin).values() if q.follows_data]
    assert activations
    for one, other in zip(activations, wanted, strict=True):
        assert one.steps == other.steps == 23
        torch.testing.assert_close(one.scale, other.scale, rtol=0.02, atol=0)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("quantizer", ["fixed", "lsq"])
def test_a_compiled_step_is_that_of_eager_mode(quantizer: str, mode: str) -> None:
    model = prepared("cuda", quantizer)
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, mode=mode)
    found, wanted = losses(compiled, optimizer_of(model)), losses(twin, optimizer_of(twin))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("arithmetic", ["float", "integer"])
@pytest.mark.parametrize("quantizer", ["fixed", "lsq"])
def test_converted_models_agree(quantizer: str, arithmetic: str) -> None:
    """Converted in float, a model gives what it gave in eval mode; in integers, the same on both devices."""
    model = prepared("cuda", quantizer).eval()
    x = images(5)
    converted = qt.convert(copy.deepcopy(model), arithmetic=arithmetic)
    if arithmetic == "float":
        assert torch.equal(converted(x.cuda()), model(x.cuda()))
    else:
        torch.testing.assert_close(converted(x.cuda()).cpu(), copy.deepcopy(converted).cpu()(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("route", ["graph", "modules"])
def test_a_model_on_the_gpu_is_exported(route: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = prepared("cuda", "lsq", route=route)
    losses(model, optimizer_of(model))
    qt.export_onnx(model, images().cuda(), tmp_path / "model.onnx")  # verifies the codes


@pytest.mark.parametrize("there", ["cpu", "cuda"])
def test_a_checkpoint_goes_from_one_device_to_the_other(there: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    here = "cuda" if there == "cpu" else "cpu"
    model = prepared(here)
    optimizer = optimizer_of(model)
    losses(model, optimizer, 2)
    qt.save_checkpoint(model, tmp_path / "step", optimizer)
    again = prepared(there)
    resumed = optimizer_of(again)
    qt.load_checkpoint(again, tmp_path / "step", resumed)
    for (name, found), wanted in zip(again.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(found.cpu(), wanted.cpu()), name
    torch.testing.assert_close(losses(again, resumed), losses(model, optimizer), rtol=0.02, atol=1e-3)


def test_a_pickled_model_comes_back_on_the_cpu() -> None:
    model = prepared("cuda").eval()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, map_location="cpu", weights_only=False)
    torch.testing.assert_close(again(images()), model(images().cuda()).cpu(), rtol=0.05, atol=1e-2)


def test_learned_rates_and_reports_on_a_gpu() -> None:
    model = prepared("cuda")
    report = qt.quantization_report(model)
    assert str(report)
    with qt.debug.watch(model, every=1) as watched:
        losses(model, optimizer_of(model), 2)
    assert all(row.calls for row in watched.rows())
