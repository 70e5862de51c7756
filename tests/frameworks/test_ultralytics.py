"""Ultralytics' models with quantizers, in Ultralytics' own trainer, with its checkpoints and its validator."""

import contextlib
import copy
import io
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from tests import processes
from tests.frameworks.shapes import SIZE, draw

pytest.importorskip(
    "ultralytics", reason="needs ultralytics, which is not installed: pip install -r requirements-frameworks.txt"
)

from ultralytics import RTDETR, YOLO
from ultralytics.cfg import get_cfg
from ultralytics.nn import tasks
from ultralytics.utils import LOGGER
from ultralytics.utils.torch_utils import ModelEMA

from qtoolkit.integrations import ultralytics as integration
from tests.frameworks import ranks

TASKS = {"detect": "", "segment": "-seg", "pose": "-pose", "obb": "-obb", "classify": "-cls"}
MODELS = {
    "": tasks.DetectionModel,
    "-seg": tasks.SegmentationModel,
    "-pose": tasks.PoseModel,
    "-obb": tasks.OBBModel,
    "-cls": tasks.ClassificationModel,
}
SETTINGS = {
    "imgsz": SIZE,
    "batch": 8,
    "epochs": 2,
    "device": "cpu",
    "plots": False,
    "verbose": False,
    "optimizer": "AdamW",
    "warmup_epochs": 1,
    "mosaic": 0.0,
    "close_mosaic": 0,
    "scale": 0.0,
    "translate": 0.0,
}

ARGUMENTS = get_cfg(overrides={"epochs": 2})  # hyperparameters of the losses


def images(count: int = 2, size: int = SIZE) -> Tensor:
    return torch.rand(count, 3, size, size)


def float_model(name: str) -> nn.Module:
    """A model with random weights, and statistics of batch norms from images."""
    torch.manual_seed(0)
    family, dash, task = name.partition("-")
    kind = tasks.RTDETRDetectionModel if family == "rtdetr" else MODELS[dash + task]
    model = kind(f"{name}.yaml", nc=2, verbose=False).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.5
    with torch.no_grad():
        for _ in range(3):
            model(images(4))
    return model


def quantized(name: str, **options: Any) -> nn.Module:
    """A calibrated model."""
    model = integration.quantize(float_model(name), backend="onnxruntime", **options)
    qt.calibrate(model, [images(4)], progress=False)
    return model


def labels(model: nn.Module, count: int = 2) -> dict[str, Any]:
    """A batch with an object in each image, as Ultralytics' data loaders give it."""
    task = tasks.guess_model_task(model)
    if task == "classify":
        return {"img": images(count), "cls": torch.arange(count) % 2}
    batch = {
        "img": images(count),
        "batch_idx": torch.arange(count).float(),
        "cls": (torch.arange(count) % 2).float().view(-1, 1),
        "bboxes": torch.tensor([[0.5, 0.5, 0.4, 0.4]]).repeat(count, 1),
        "masks": torch.ones(count, SIZE // 4, SIZE // 4),
        "sem_masks": torch.zeros(count, SIZE // 4, SIZE // 4, dtype=torch.long),
        "keypoints": torch.full((count, 17, 3), 0.5),
    }
    if task == "obb":
        batch["bboxes"] = torch.tensor([[0.5, 0.5, 0.4, 0.4, 0.1]]).repeat(count, 1)
    return batch


def tensors(value: Any) -> list[Tensor]:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else None
    if values is None:
        return [value] if isinstance(value, Tensor) else []
    return [tensor for each in values for tensor in tensors(each)]


@contextlib.contextmanager
def log() -> Iterator[list[str]]:
    """What Ultralytics logs in a block."""
    lines: list[str] = []

    def keep(record: Any) -> bool:
        lines.append(record.getMessage())
        return False

    LOGGER.addFilter(keep)
    try:
        yield lines
    finally:
        LOGGER.removeFilter(keep)


# ---- the model


@pytest.mark.parametrize(
    "name",
    [
        "yolov8n",
        "yolov8n-cls",
        "yolo26n-seg",
        "yolo26n-pose",
        *(
            pytest.param(name, marks=pytest.mark.sweep)
            for name in ("yolov8n-seg", "yolov8n-pose", "yolov8n-obb", "yolo26n-obb", "yolo11n", "yolo12n", "yolo26n")
        ),
    ],
)
def test_without_quantization_it_computes_what_the_float_model_does(name: str) -> None:
    """In both modes, for images of other sizes too, and of two branches the one that `end2end` names. In float64."""
    model = float_model(name).double()
    result = integration.quantize(model, backend="onnxruntime")
    batches = [torch.rand(2, 3, *size).double() for size in ((SIZE, SIZE), (SIZE, 2 * SIZE))]
    qt.calibrate(result, batches, progress=False)
    with qt.disable_quantization(result), torch.no_grad():
        for training, end2end, batch in itertools.product((False, True), (False, True), batches):
            for each in (model, result):
                each.train(training).end2end = end2end
            expected, found = tensors(model(batch)), tensors(result(batch))
            assert len(expected) == len(found)
            for one, other in zip(expected, found, strict=True):
                torch.testing.assert_close(one, other)


def test_layers_keep_their_names_and_what_decodes_boxes_stays_in_float() -> None:
    model = float_model("yolov8n")
    result = integration.quantize(model, backend="onnxruntime", exclude=["model.22.cv2.0.2", nn.Upsample])
    layers = {name: module for name, module in result.named_modules() if isinstance(module, nn.Conv2d)}
    left = {name for name, module in layers.items() if not isinstance(module, qt.nn.QuantConv2d)}
    assert left == {"model.graph.model.22.cv2.0.2", "model.graph.model.22.decode.head.dfl.conv"}
    names = {name.removeprefix("model.graph.") for name in layers}
    expected = {name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    assert names == expected - {"model.22.dfl.conv"} | {"model.22.decode.head.dfl.conv"}


@pytest.mark.parametrize("name", ["yolov8n", "yolo26n-seg"])
def test_copies_and_pickles_compute_the_same(name: str) -> None:
    model = quantized(name)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    others, x = (copy.deepcopy(model), torch.load(file, weights_only=False)), images()
    for training in (False, True):
        expected = tensors(model.train(training)(x))
        for other in others:
            assert all(map(torch.equal, expected, tensors(other.train(training)(x))))


def test_an_average_has_the_ranges_of_its_own_weights() -> None:
    model = quantized("yolov8n").train()
    average = ModelEMA(model, decay=0.5, tau=1e-9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    average.update(model)
    layer = average.ema.eval().get_submodule("model.graph.model.22.cv2.0.2")
    largest = layer.weight.flatten(1).abs().amax(1)
    torch.testing.assert_close(layer.weight_quantizer.scale * 127, largest, rtol=0.01, atol=0)
    own = model.eval().get_submodule("model.graph.model.22.cv2.0.2")
    torch.testing.assert_close(own.weight, layer.weight * 3 / 2)


def test_fusing_keeps_the_quantizers() -> None:
    model, x = quantized("yolov8n").eval(), images()
    before = model(x)[0]
    assert torch.equal(model.fuse(verbose=False)(x)[0], before)


def test_other_models_are_refused() -> None:
    with pytest.raises(
        TypeError, match=r"heads Classify, Detect, .*, RTDETRDecoder; got WorldModel with WorldDetect\. For other"
    ):
        integration.quantize(tasks.WorldModel("yolov8s-worldv2.yaml", verbose=False))
    with pytest.raises(TypeError, match=r"RTDETRDecoder; got Linear\."):
        integration.quantize(nn.Linear(2, 2))
    quantized = integration.quantize(tasks.DetectionModel("yolov8n.yaml", verbose=False), backend="tensorrt10")
    with pytest.raises(TypeError, match="are already quantized"):
        integration.quantize(quantized, backend="tensorrt10")
    with pytest.raises(TypeError, match=r"deployed: model must be .*; got DetectionModel\."):
        integration.deployed(tasks.DetectionModel("yolov8n.yaml", verbose=False))


@pytest.mark.parametrize("training", [True, False], ids=["prepared in train", "in eval"])
def test_graph_mode_has_the_branches_of_both_modes(training: bool) -> None:
    """`prepare` of the model itself: its head returns raw results in training mode, and boxes beside them in eval mode."""
    model, x = float_model("yolo11n").train(training), images()
    prepared = qt.prepare(model, x, "onnxruntime")
    assert prepared.plan is not None
    assert prepared.plan.tracing.branches == ()
    qt.calibrate(prepared, [x], progress=False)
    with qt.disable_quantization(prepared), torch.no_grad():
        for mode in (False, True) if training else (False,):
            pairs = zip(tensors(prepared.train(mode)(x)), tensors(model.train(mode)(x)), strict=True)
            assert all(
                torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max())) for ours, theirs in pairs
            )
    loss = sum(each.square().mean() for each in tensors(prepared.train()(x)))
    assert isinstance(loss, Tensor)
    loss.backward()
    converted = qt.convert(prepared)
    assert all(map(torch.equal, tensors(converted(x)), tensors(prepared.eval()(x))))


# ---- training


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[str, Path]:
    """A data set, and a float detector that was trained on it."""
    folder = tmp_path_factory.mktemp("ultralytics")
    data = draw(folder / "data", "detect")
    torch.manual_seed(0)
    yolo = YOLO("yolov8n.yaml")
    yolo.train(data=data, project=str(folder), val=False, **{**SETTINGS, "epochs": 20, "lr0": 3e-3})
    return data, yolo.trainer.best


def accuracy(model: Any, data: str) -> float:
    found = model.val(data=data, imgsz=SIZE, device="cpu", plots=False, verbose=False)
    return float(found.results_dict["metrics/mAP50(B)"])


def test_a_detector_is_trained_saved_validated_and_exported(trained, tmp_path: Path) -> None:
    """Its accuracy is that of the float model, before and after, and that of the file in Ultralytics' own validator."""
    data, weights = trained
    yolo = YOLO(weights)
    before = accuracy(yolo, data)
    assert before > 0.5
    kind = integration.trainer(yolo, backend="onnxruntime")
    yolo.train(trainer=kind, data=data, project=str(tmp_path), lr0=1e-4, **SETTINGS)
    saved = YOLO(yolo.trainer.best)
    assert isinstance(saved.model, tasks.DetectionModel)
    assert all(quantizer.ready for quantizer in qt.quantizers_of(saved.model).values())
    assert sum(isinstance(module, qt.nn.QuantConv2d) for module in saved.model.model.graph.modules()) == 63
    after = accuracy(saved, data)
    assert after == pytest.approx(float(yolo.trainer.metrics["metrics/mAP50(B)"]), abs=1e-4)
    assert after > before - 0.05
    with qt.disable_quantization(saved.model):
        assert accuracy(saved, data) != after, "validation computes with quantizers"

    file = tmp_path / "model.onnx"
    shapes = ({0: "batch", 2: "height", 3: "width"},)
    found = integration.export_onnx(saved.model, file, (SIZE, 2 * SIZE), dynamic_shapes=shapes, progress=False)
    assert found.verification.quantizer_codes.differing == 0 < found.verification.quantizer_codes.compared
    integer = qt.convert(integration.deployed(saved.model), arithmetic="integer")
    codes = qt.export.verify(integer, images(3, 3 * SIZE), file).runtimes["onnxruntime"]
    assert codes.verdict is qt.export.Verdict.EQUAL
    assert codes.codes.differing == 0 < codes.codes.compared
    deployed = YOLO(file, task="detect")
    assert accuracy(deployed, data) == pytest.approx(after, abs=0.02)
    assert deployed.names == {0: "circle", 1: "square"}


@pytest.mark.parametrize(
    "task", [pytest.param(task, marks=() if task == "classify" else pytest.mark.sweep) for task in [*TASKS][1:]]
)
def test_the_other_tasks_train(task: str, tmp_path: Path) -> None:
    yolo, data = YOLO(f"yolov8n{TASKS[task]}.yaml"), draw(tmp_path / "data", task)
    kind = integration.trainer(yolo, batches=2, backend="onnxruntime")
    yolo.train(trainer=kind, data=data, project=str(tmp_path), **SETTINGS)
    assert all(map(torch.isfinite, yolo.trainer.tloss.values()))
    assert all(quantizer.ready for quantizer in qt.quantizers_of(YOLO(yolo.trainer.best).model).values())
    assert len(YOLO(yolo.trainer.best).predict(images(1), device="cpu", verbose=False)) == 1


def test_learned_scales_train_without_weight_decay(trained, tmp_path: Path) -> None:
    data, weights = trained
    spec = qt.QuantSpec(quantizer="lsq")
    mapping = qt.QConfigMapping().set_global(qt.QConfig(spec, qt.QuantSpec(axis=0, quantizer="lsq")))
    yolo, starts = YOLO(weights), []

    def scales(trainer: Any) -> dict[str, Tensor]:
        found = qt.quantizers_of(trainer.model)
        return {f"{name}.{key}": p.detach().clone() for name, q in found.items() for key, p in q.named_parameters()}

    yolo.add_callback("on_train_start", lambda trainer: starts.append(scales(trainer)))
    kind = integration.trainer(yolo, backend="onnxruntime", qconfig_mapping=mapping)
    settings = {**SETTINGS, "epochs": 1, "lr0": 1e-3, "weight_decay": 0.1, "warmup_epochs": 0}
    yolo.train(trainer=kind, data=data, project=str(tmp_path), **settings)
    (start,), now = starts, scales(yolo.trainer)
    assert start
    assert sum(not torch.equal(start[name], now[name]) for name in start) > 0.9 * len(start)
    groups = {id(p): group for group in yolo.trainer.optimizer.param_groups for p in group["params"]}
    found = qt.quantizers_of(yolo.trainer.model).values()
    assert {groups[id(p)]["weight_decay"] for q in found for p in q.parameters()} == {0.0}
    assert accuracy(YOLO(yolo.trainer.best), data) > 0.4


@pytest.mark.sweep
def test_an_rtdetr_trains(tmp_path: Path) -> None:
    """Its decoder gets the labels too, for denoising."""
    yolo, data = RTDETR("rtdetr-l.yaml"), draw(tmp_path / "data", "detect", count=16)
    kind = integration.trainer(yolo, batches=2, backend="onnxruntime")
    yolo.train(trainer=kind, data=data, project=str(tmp_path), **{**SETTINGS, "epochs": 1})
    assert all(map(torch.isfinite, yolo.trainer.tloss.values()))
    assert all(quantizer.ready for quantizer in qt.quantizers_of(RTDETR(yolo.trainer.best).model).values())


def test_a_model_trains_under_autocast() -> None:
    """As Ultralytics' trainer does on a GPU; it refuses autocast on the CPU."""
    model, x, losses = quantized("yolov8n").train(), images(8), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def loss() -> Tensor:  # Ultralytics' own assigns other boxes from step to step
        results = model(x)
        return sum(results[name].float().square().mean() for name in ("boxes", "scores"))

    with torch.no_grad():
        in_float32 = loss().item()
    for _ in range(4):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss()
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert losses[0] == pytest.approx(in_float32, rel=0.05)
    assert losses == sorted(losses, reverse=True)


def test_a_training_is_resumed_with_its_ranges(trained, tmp_path: Path) -> None:
    data, weights = trained

    def stop(trainer: Any) -> None:
        raise KeyboardInterrupt

    yolo = YOLO(weights)
    yolo.add_callback("on_model_save", stop)
    kind = integration.trainer(yolo, backend="onnxruntime")
    with pytest.raises(KeyboardInterrupt):
        yolo.train(trainer=kind, data=data, project=str(tmp_path), lr0=1e-4, **SETTINGS)
    last = yolo.trainer.last
    saved = {name: quantizer.scale for name, quantizer in qt.quantizers_of(YOLO(last).model).items()}

    resumed, starts = YOLO(last), []
    resumed.add_callback("on_train_start", lambda trainer: starts.append((trainer, trainer.start_epoch)))
    resumed.add_callback(
        "on_train_start",
        lambda trainer: starts.append({n: q.scale.clone() for n, q in qt.quantizers_of(trainer.model).items()}),
    )
    resumed.train(trainer=integration.trainer(resumed), resume=True)
    (trainer, epoch), scales = starts
    assert epoch == 1
    activations = [name for name in saved if "weight_quantizer" not in name]
    assert activations
    assert all(torch.equal(saved[name], scales[name]) for name in activations)
    assert len(trainer.optimizer.state) > 100
    assert accuracy(YOLO(trainer.best), data) > 0.5


def test_frozen_layers_stay(trained, tmp_path: Path) -> None:
    data, weights = trained
    yolo = YOLO(weights)
    before = {name: value.clone() for name, value in yolo.model.state_dict().items()}
    kind = integration.trainer(yolo, batches=1, backend="onnxruntime")
    settings = {**SETTINGS, "epochs": 1, "lr0": 1e-3, "freeze": 3}
    yolo.train(trainer=kind, data=data, project=str(tmp_path), **settings)
    now = {name.removeprefix("model.graph."): v for name, v in yolo.trainer.model.state_dict().items()}
    kept = {
        name.split(".")[1] for name in before if name in now and torch.equal(before[name].float(), now[name].float())
    }
    assert kept >= {"0", "1", "2"}
    assert not torch.equal(before["model.3.conv.weight"].float(), now["model.3.conv.weight"])


def test_quantized_weights_need_the_trainer_and_the_classes_of_the_data() -> None:
    model = quantized("yolov8n")
    with log() as lines:
        tasks.DetectionModel("yolov8n.yaml", nc=2, verbose=False).load(model)
    assert any("fused for inference" in line for line in lines)
    own = object.__new__(integration.trainer(YOLO("yolov8n.yaml")))
    own.data = {"nc": 3}
    with pytest.raises(ValueError, match=r"have 2 classes, but the data set has 3"):
        own.get_model(weights=model)


def test_only_the_general_functions_warn_of_the_trainer(recwarn) -> None:
    model = tasks.ClassificationModel("yolov8n-cls.yaml", verbose=False)
    integration.quantize(model, backend="tensorrt10")
    assert [warning for warning in recwarn if "trainer" in str(warning.message)] == []
    with pytest.warns(UserWarning, match="replace: the trainer of ultralytics builds a float model of its own"):
        qt.quant_modules.replace(model, backend="tensorrt10")


def test_the_class_of_a_trainer_goes_into_the_processes_of_several_gpus() -> None:
    cloudpickle = pytest.importorskip("cloudpickle", reason="needs cloudpickle, which is not installed")
    kind = integration.trainer(YOLO("yolov8n.yaml"), batches=3, backend="openvino")
    loaded = cloudpickle.loads(cloudpickle.dumps(kind))
    assert (loaded.batches, loaded.options) == (3, {"backend": "openvino"})
    assert issubclass(loaded, YOLO("yolov8n.yaml").task_map["detect"]["trainer"])


def test_two_processes_calibrate_and_train_the_same_model(tmp_path: Path) -> None:
    """As Ultralytics' trainer wraps it: the ranges are those of all images, and a step gives all ranks the same weights."""
    processes.spawn(ranks.work, (str(tmp_path),), ranks.SIZE)
    one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks.SIZE))
    assert all(torch.equal(one["scales"][name], other["scales"][name]) for name in one["scales"])
    assert all(torch.equal(one["trained"][name], other["trained"][name]) for name in one["trained"])
    assert any(not torch.equal(one["trained"][name], one["start"][name]) for name in one["trained"])


# ---- the zoo


@pytest.mark.parametrize(
    "name",
    [
        "yolov8n-cls",
        *(
            pytest.param(name, marks=pytest.mark.sweep)
            for name in (
                *("yolov8n", "yolo11n", "yolo12n", "yolo26n", "yolov8n-seg", "yolov8n-pose", "yolov8n-obb"),
                *("yolo26n-seg", "yolo26n-pose", "yolo26n-obb", "yolo26n-cls", "rtdetr-l"),
            )
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:verify")  # of quantizers that onnxruntime merges with others, and of rounding
def test_a_model_is_trained_for_a_step_exported_and_verified(name: str, tmp_path: Path) -> None:
    model = quantized(name).train()
    model.args, model.nc = ARGUMENTS, 2  # as a trainer sets them
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loss, _ = model.loss(labels(model))
    loss.sum().backward()
    optimizer.step()
    moved = [name for name, p in model.named_parameters() if not torch.equal(before[name], p.detach())]
    assert len(moved) > 0.8 * len(before)

    found = integration.export_onnx(model, tmp_path / "model.onnx", imgsz=SIZE, progress=False)
    assert found.verification.quantizer_codes.differing == 0 < found.verification.quantizer_codes.compared
    integer = qt.convert(integration.deployed(model), arithmetic="integer")
    codes = qt.export.verify(integer, images(3), tmp_path / "model.onnx").runtimes["onnxruntime"]
    transformer = name == "rtdetr-l"  # its decoder has float sums between quantizers
    path = tmp_path / "model.onnx"
    file = RTDETR(path) if transformer else YOLO(path, task=tasks.guess_model_task(model))
    assert len(file.predict(images(3), device="cpu", rect=False, imgsz=SIZE, verbose=False)) == 3
    # A softmax of an attention is in float: whether the order of its sums moves a code is the processor's.
    attends = transformer or any("attn" in part for part, _ in model.named_modules())
    assert codes.check() in (qt.export.Verdict.EQUAL, *([qt.export.Verdict.ROUNDING] if attends else []))
