"""Layers and batch norms that a model calls several times: each call is one unit, in training and in files."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import qtoolkit as qt
from qtoolkit.export import verify
from tests import nets
from tests.graph.program.test_unit import counted, one_by_one, same

LSQ = qt.QuantSpec(bits=8, quantizer="lsq")
SPECS = {"fixed": None, "lsq": qt.QConfig(LSQ, LSQ.with_(axis=0))}
KERNELS_OF_LAYERS = {"Conv", "FusedConv", "ConvTranspose", "Gemm", "MatMul", "BatchNormalization"}


def conv_bn(inputs: int, outputs: int, kernel: int = 3) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2), nn.BatchNorm2d(outputs)]


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv_bn(channels, channels)
        self.conv2, self.bn2 = conv_bn(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))) + x)


class Siamese(nn.Module):
    """A backbone of residual blocks that is called on two images."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(*conv_bn(3, 8), nn.ReLU(), Block(8), nn.MaxPool2d(2), *conv_bn(8, 8), nn.ReLU())
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head(torch.cat([self.backbone(a), self.backbone(b)], 1)).sigmoid()


class Pyramid(nn.Module):
    """A head that all levels of a pyramid share."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Sequential(*conv_bn(3, 8), nn.ReLU()), nn.Sequential(*conv_bn(8, 8), nn.ReLU())
        self.head = nn.Sequential(*conv_bn(8, 8), nn.ReLU(), *conv_bn(8, 8), nn.ReLU(), nn.Conv2d(8, 4, 1))

    def forward(self, a: Tensor, b: Tensor) -> list[Tensor]:
        x = self.stem(a + b)
        levels = [x, (y := self.down(nn.functional.max_pool2d(x, 2))), nn.functional.max_pool2d(y, 2)]
        return [self.head(level).sigmoid() for level in levels]


class Differing(nn.Module):
    """Calls that differ in what follows the batch norm: another activation, a residual add; and a batch norm of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = conv_bn(3, 8)
        self.mid, self.norm = conv_bn(8, 8)
        self.other = nn.Conv2d(8, 8, 1)
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        x, y = torch.relu(self.bn(self.conv(a))), nn.functional.leaky_relu(self.bn(self.conv(b)), 0.1)
        x = torch.relu(self.norm(self.mid(x)) + y)
        return self.last(nn.functional.relu6(self.norm(self.mid(x))) + torch.relu(self.norm(self.other(y)))).sigmoid()


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "siamese": (Siamese, 8),
    "pyramid": (Pyramid, 8),
    "differing": (Differing, 5),
}
over_models = pytest.mark.parametrize("name", MODELS)
over_specs = pytest.mark.parametrize("spec", SPECS)


def images(seed: int = 0, size: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(4, 3, size, size, generator=generator), 2 * torch.rand(4, 3, size, size, generator=generator)


def trained(name: str) -> nn.Module:
    """Return a model with batch norms as a trained one has them."""
    torch.manual_seed(0)
    model = MODELS[name][0]().train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
    with torch.no_grad():
        for seed in range(3):
            model(*images(seed))
    return model


def prepared(name: str, spec: str = "fixed", training: bool = True, forward: str = "auto") -> nn.Module:
    mapping = None if SPECS[spec] is None else qt.QConfigMapping().set_global(SPECS[spec])
    model = trained(name).train(training)
    options: dict[str, Any] = {"qconfig_mapping": mapping, "training_arithmetic": forward}
    model = qt.prepare(model, images(), backend="onnxruntime", **options)
    qt.calibrate(model, [images()], forward=lambda m, batch: m(*batch), progress=False)
    return model


def total(y: Any) -> Tensor:
    return sum((each.square().sum() for each in (y if isinstance(y, list) else [y])), torch.zeros(()))


def train(model: nn.Module, steps: int = 3) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), 1e-3), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = total(model(*images(step)))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def check_file(model: nn.Module, path: Any) -> None:
    """Each layer of the file computes in integers, and no code differs."""
    x = images()
    converted = qt.convert(model)
    torch.testing.assert_close(converted(*x), model.eval()(*x), rtol=0, atol=0)
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in converted.modules())
    integer = qt.convert(model, arithmetic="integer")
    found = verify(integer, x, qt.export_onnx(converted, x, path).path).runtimes["onnxruntime"]
    found.check()
    assert found.codes.differing == 0
    assert KERNELS_OF_LAYERS.isdisjoint(each.kernel for each in found.float_layers), found


@pytest.mark.slow
@pytest.mark.sweep(1)
@over_models
@over_specs
@pytest.mark.parametrize("training", [True, False])
def test_every_call_is_quantized_from_training_to_the_file(tmp_path, name: str, spec: str, training: bool) -> None:
    model = prepared(name, spec, training)
    assert {line.kind for line in qt.quantization_report(model).left_float} <= {"sigmoid"}
    assert all(map(torch.isfinite, map(torch.tensor, train(model))))
    check_file(model, tmp_path / "m.onnx")


@over_models
@pytest.mark.parametrize("training", [True, False])
def test_with_quantizers_off_outputs_and_statistics_are_torchs(name: str, training: bool) -> None:
    model, x = trained(name).train(training), images(5)
    ours = qt.prepare(model, x, backend="onnxruntime")
    with qt.disable_quantization(ours):
        torch.testing.assert_close(ours(*x), model(*x), rtol=1e-5, atol=1e-5)
    if training:
        for buffer, value in model.named_buffers():
            torch.testing.assert_close(ours.get_buffer(buffer), value, rtol=1e-5, atol=1e-6)


def step(model: nn.Module, call: Callable[..., Any] | None = None) -> dict[str, Tensor]:
    """Return the gradients of two forwards in one step, and all buffers afterwards."""
    model.zero_grad()
    for seed in (2, 3):
        total((call if call is not None else model)(*images(seed))).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**gradients, **dict(model.named_buffers())}


def close(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.sweep(1)
@over_models
@over_specs
@pytest.mark.parametrize("forward", ["float", "integer"])
def test_each_call_is_a_unit(name: str, spec: str, forward: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nets.settled(prepared(name, spec, forward=forward)).train()
    other = copy.deepcopy(model)
    with counted(monkeypatch) as found:
        results = step(model)
    assert found == {"by_op": 2 * MODELS[name][1], "_one_by_one": 0}
    with one_by_one(monkeypatch):
        close(results, step(other), 1e-5)  # the gradients of the calls add up in another order


def test_each_call_computes_on_the_grid_of_its_own_input() -> None:
    model = nets.settled(prepared("siamese", forward="integer")).train()
    plain = copy.deepcopy(model)
    qt.nn.set_training_arithmetic(plain, "float", "float")
    a, b = images(1)
    torch.testing.assert_close(model(a, 100 * b), plain(a, 100 * b), rtol=1e-4, atol=1e-4)
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)


@over_specs
def test_gradients_are_those_without_checkpointing(spec: str) -> None:
    model = nets.settled(prepared("siamese", spec)).train()
    other = copy.deepcopy(model)
    close(step(model, lambda *x: checkpoint(model, *x, use_reentrant=False)), step(other), 1e-4)


def test_all_calls_of_a_step_fold_with_one_variance() -> None:
    model = nets.settled(prepared("siamese", "lsq")).train()
    layer, bn = model.get_submodule("backbone.0"), model.get_submodule("backbone.1")
    before, count, scale = bn.running_var.clone(), bn.num_batches_tracked.clone(), layer.weight_quantizer.scale.clone()
    model(*images(7))
    assert torch.equal(bn._variance_of_step, before)
    assert bn.num_batches_tracked == count + 2
    assert torch.equal(layer.weight_quantizer.scale, scale)
    assert not torch.equal(bn.running_var, before)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["frozen", "two_convolutions", "std_correction"])
def test_strategies(tmp_path, strategy: str) -> None:
    backend = replace(qt.backends["onnxruntime"], batch_norm=strategy)
    model = qt.prepare(trained("siamese"), images(), backend=backend)
    qt.calibrate(model, [images()], forward=lambda m, batch: m(*batch), progress=False)
    train(model)
    check_file(model, tmp_path / "m.onnx")


def test_copies_and_pickles() -> None:
    model = nets.settled(prepared("siamese")).train()
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    wanted = step(model)
    for other in others:
        same(step(other), wanted)


@pytest.mark.slow
def test_compiled_code() -> None:
    model = nets.settled(prepared("siamese")).train()
    compiled = copy.deepcopy(model)
    wanted = step(model)
    close(step(compiled, torch.compile(compiled, backend="aot_eager", fullgraph=True)), wanted, 1e-3)


def test_a_batch_norm_that_one_call_does_not_need_stays(tmp_path) -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn = conv_bn(3, 3)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.bn(self.conv(a)) + self.bn(b)

    x = images()
    for training in (True, False):
        model = Partly().train(training)
        ours = qt.prepare(model, x, backend="onnxruntime")
        reasons = {line.reason for line in qt.quantization_report(ours).left_float if line.name == "bn"}
        assert any("it is called more than once, and at 'bn_1' not folded" in each for each in reasons), reasons
        assert any("no layer right before it" in each for each in reasons)
        with qt.disable_quantization(ours):
            assert torch.equal(ours(*x), model(*x))


CHAINS = [
    ["backbone.0", "backbone.1", "backbone.2"],
    ["backbone.3.conv1", "backbone.3.bn1"],
    ["backbone.3.conv2", "backbone.3.bn2"],
    ["backbone.5", "backbone.6", "backbone.7"],
]


@pytest.mark.parametrize("training", [True, False])
def test_module_replacement_calls_a_chain_any_number_of_times(training: bool) -> None:
    model, x = trained("siamese").train(training), images(5)
    replaced = qt.quant_modules.replace(qt.fuse_modules(model, CHAINS), backend="onnxruntime")
    with qt.disable_quantization(replaced):
        torch.testing.assert_close(replaced(*x), model(*x), rtol=1e-5, atol=1e-5)
    for buffer, value in model.named_buffers() if training else ():
        torch.testing.assert_close(replaced.get_buffer(buffer), value, rtol=1e-5, atol=1e-6)
    qt.calibrate(replaced, [x], forward=lambda m, batch: m(*batch), progress=False)
    train(replaced.train())
    other = copy.deepcopy(replaced)
    close(step(replaced, lambda *x: checkpoint(replaced, *x, use_reentrant=False)), step(other), 1e-4)
    converted = qt.convert(replaced)
    torch.testing.assert_close(converted(*x), replaced.eval()(*x), rtol=0, atol=0)
    folded = converted.get_submodule("backbone")
    assert isinstance(folded[1], nn.Identity)
    assert isinstance(folded[3].bn2, nn.Identity)
