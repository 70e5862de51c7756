"""Distillation against plain formulas, its hooks, and a training that it helps."""

import copy
import dataclasses
import pickle

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import qtoolkit as qt
from tests.training.nets import ROUTES, SHAPE, Net, quantized

Distillation = qt.tuning.Distillation
each_route = pytest.mark.parametrize("route", ROUTES)


def pair(route: str = "graph") -> tuple[nn.Module, nn.Module]:
    """The float network with dropout, in training mode, and its quantized copy."""
    torch.manual_seed(0)
    floats = Net(dropout=0.3).train()
    model = quantized(route, "lsq", copy.deepcopy(floats))
    qt.calibrate(model, [torch.randn(SHAPE)], progress=False)
    qt.freeze_batch_norm(model)
    return floats, model.train()


def relative(student: Tensor, teacher: Tensor) -> Tensor:
    return (student - teacher).square().sum() / teacher.square().sum()


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@each_route
def test_the_loss_is_the_formula(route: str, temperature: float) -> None:
    floats, model = pair(route)
    x = torch.randn(SHAPE)
    with Distillation(model, floats, temperature, ["stem", "conv"], 0.5, 2.0) as distillation:
        torch.manual_seed(1)
        logits = model(x)
        loss = distillation(x, logits)
        loss.backward()
    features: dict[str, Tensor] = {}
    teacher = copy.deepcopy(floats).eval()
    for each, key in ((model, "student"), (teacher, "teacher")):
        for name in ("stem", "bn"):  # the layer "conv" computes its frozen batch norm in the student alone
            each.get_submodule(name).register_forward_hook(
                lambda module, args, y, place=(key, name): features.__setitem__(place, y)
            )
    target = teacher(x).detach()
    torch.manual_seed(1)
    again = model(x)
    p, q = (torch.softmax(each / temperature, 1) for each in (target, again))
    wanted = 0.5 * temperature**2 * (p * (p.log() - q.log())).sum(1).mean()
    parts = [relative(features["student", name], features["teacher", name].detach()) for name in ("stem", "bn")]
    torch.testing.assert_close(loss, wanted + 2.0 * (parts[0] + parts[1]) / 2)
    assert all(p.grad is not None for name, p in model.named_parameters() if "weight" in name and "stem" in name)
    assert all(p.grad is None for p in floats.parameters())
    assert all(module.training for module in floats.modules()), "the mode is the teacher's own again"


def test_equal_models_have_no_loss() -> None:
    floats, _ = pair()
    floats.eval()
    student, x = copy.deepcopy(floats), torch.randn(SHAPE)
    with Distillation(student, floats, 4.0, ["stem"]) as distillation:
        assert distillation(x, student(x)).item() == pytest.approx(0, abs=1e-6)


def test_inputs_and_outputs_of_other_forms() -> None:
    class Named(Net):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": super().forward(x)}

    torch.manual_seed(0)
    teacher, student, x = Named(), Named(), torch.randn(SHAPE)
    distillation = Distillation(student, teacher, logits_of=lambda out: out["logits"])
    losses = [distillation(inputs, student(x)) for inputs in (x, (x,), [x], {"x": x})]
    assert len({loss.item() for loss in losses}) == 1
    with pytest.raises(TypeError, match="the logits of the student must be a tensor, got dict; pass logits_of"):
        Distillation(student, teacher)(x, student(x))


def test_features_alone_need_no_logits() -> None:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.one_to_many, self.one_to_one = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
            y = self.body(x)
            return {"many": [self.one_to_many(y)], "one": [self.one_to_one(y.detach())]}

    floats, x = Detector(), torch.randn(8, 4)
    model = qt.prepare(floats.train(), (x,), backend="tensorrt", exclude=["one_to_many"])
    qt.calibrate(model, [(x,)], progress=False)
    with Distillation(model, floats, features=["one_to_many"], logits_weight=0.0, feature_weight=2.0) as distillation:
        y = model(x)["many"][0]
        loss = distillation(x, None)
    torch.testing.assert_close(loss, 2 * relative(y, floats(x)["many"][0]))
    assert loss > 0
    with pytest.raises(ValueError, match=r"logits_weight must be above 0 without features, got 0.0\."):
        Distillation(model, floats, logits_weight=0.0)


def test_copies_of_the_student_are_free_of_it() -> None:
    floats, model = pair()
    x = torch.randn(SHAPE)
    distillation = Distillation(model, floats, features=["stem"])
    ema = AveragedModel(model)
    loaded = pickle.loads(pickle.dumps(model.get_submodule("stem")))
    logits = model(x)
    before = distillation(x, logits).item()
    logits = model(x)
    ema.eval()(2 * x)  # between the forward and the loss
    loaded(x)
    assert distillation(x, logits).item() == pytest.approx(before, rel=0.5)
    ema(x)
    with pytest.raises(RuntimeError, match=r"the module 'stem' of the student did not run in a forward since the last"):
        distillation(x, logits)
    distillation.close()
    assert not model.get_submodule("stem")._forward_hooks
    assert not floats.stem._forward_hooks


def test_autocast_computes_the_loss_in_float32() -> None:
    floats, model = pair()
    x = torch.randn(SHAPE)
    with Distillation(model, floats, 2.0, ["conv"]) as distillation, torch.autocast("cpu", torch.bfloat16):
        loss = distillation(x, model(x))
    assert loss.dtype == torch.float32
    loss.backward()


def test_what_cannot_be() -> None:
    floats, model = pair()
    x = torch.randn(SHAPE)
    with pytest.raises(ValueError, match="student and teacher must be two models"):
        Distillation(floats, floats)
    with pytest.raises(ValueError, match="unknown module of the student in features 'stm'; did you mean 'stem'"):
        Distillation(model, floats, features=["stm"])
    with pytest.raises(ValueError, match="unknown module of the teacher in features 'stem.weight_quantizer'"):
        Distillation(model, floats, features=["stem.weight_quantizer"])
    with pytest.raises(TypeError, match="features must be a sequence of names"):
        Distillation(model, floats, features="stem")
    with pytest.raises(ValueError, match="temperature must be above 0, got 0"):
        Distillation(model, floats, temperature=0)
    with pytest.raises(ValueError, match="feature_weight must be at least 0, got -1"):
        Distillation(model, floats, feature_weight=-1)
    with pytest.raises(TypeError, match=r"teacher must be a torch.nn.Module, got NoneType"):
        Distillation(model, None)
    with pytest.raises(
        ValueError, match=r"the logits differ in shape: \(4, 3\) for the student, \(2, 3\) for the teacher"
    ):
        Distillation(model, floats)(x[:2], model(x))


def test_it_trains_without_labels() -> None:
    """Two bits follow the float model on digits nearer than before, by its outputs alone."""
    torch.manual_seed(0)
    digits = load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float32)
    y = torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    spec = qt.QuantSpec(bits=2, signed=False, symmetric=False, quantizer="lsq")
    mapping = qt.QConfigMapping().set_global(qt.QConfig(spec, qt.QuantSpec(bits=2, axis=0, quantizer="lsq")))
    prepared = qt.prepare(model.train(), qconfig_mapping=mapping, training_arithmetic="float", backend="tensorrt10")
    qt.calibrate(prepared, [x], progress=False)
    with torch.no_grad():
        before = float((prepared(x).argmax(1) == model(x).argmax(1)).float().mean())
    optimizer = torch.optim.Adam(prepared.parameters(), 0.005)
    with Distillation(prepared, model, 2.0, ["0"]) as distillation:
        for _ in range(60):
            optimizer.zero_grad()
            distillation(x, prepared(x)).backward()
            optimizer.step()
    with torch.no_grad():
        after = float((prepared(x).argmax(1) == model(x).argmax(1)).float().mean())
    assert after > max(before, 0.9)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("strategy", ["unscale", "two_convolutions", "frozen"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("train", [False, True])
@each_route
def test_a_layer_that_computes_its_batch_norm_is_compared_behind_it(
    route: str, train: bool, frozen: bool, strategy: str
) -> None:
    """Its output is that of the batch norm, which was compared with the teacher's layer alone."""
    torch.manual_seed(0)
    floats, x = Net().train(), torch.randn(SHAPE)
    nn.init.uniform_(floats.bn.weight, 2, 3)
    qt.tuning.reestimate_batch_norm(floats, [x], progress=False)
    backend = dataclasses.replace(qt.backends["onnxruntime"], batch_norm=strategy)
    model = copy.deepcopy(floats)
    if route == "graph":
        model = qt.prepare(model, backend=backend)
    else:
        model = qt.quant_modules.replace(qt.fuse_modules(model, [["conv", "bn"]]), backend=backend)
    qt.calibrate(model, [x], progress=False)
    if frozen:
        qt.freeze_batch_norm(model)
    with Distillation(model.train(train), floats, features=["conv"], logits_weight=0.0) as distillation:
        assert float(distillation(x, model(x)).detach()) < 0.01


def test_a_batch_norm_that_is_folded_in_one_model_alone_is_an_error() -> None:
    floats, x = Net().eval(), torch.randn(SHAPE)
    student = qt.prepare(floats, x, backend="tensorrt10")
    with pytest.raises(
        ValueError, match="the batch norm after 'conv' is folded into this layer in only one of the models"
    ):
        Distillation(student, floats, features=["conv"])
    Distillation(student, qt.prepare(floats, x, backend="tensorrt10"), features=["conv"]).close()
    fused = qt.quant_modules.replace(qt.fuse_modules(floats, [["conv", "bn"]]), backend="tensorrt10")
    qt.calibrate(fused, [x], progress=False)
    with Distillation(fused, floats, features=["conv"], logits_weight=0.0) as distillation:
        assert float(distillation(x, fused(x)).detach()) < 0.01


def test_an_op_in_place_does_not_change_a_feature() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn, self.act = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            y = self.bn(self.conv(x))
            y += x
            return self.act(y)

    teacher, x = Residual(), torch.randn(4, 3, 6, 6)
    student = qt.prepare(teacher.train(), x, backend="onnxruntime")
    qt.calibrate(student, [x], progress=False)
    qt.disable_quantization(student)
    qt.freeze_batch_norm(student)
    with Distillation(student, teacher, features=["bn"], logits_weight=0) as distillation:
        student(x)
        assert distillation(x, None).item() == pytest.approx(0, abs=1e-9)
