"""prepare_parts: detectors of torchvision, and what it promises of names, modes, rules and errors."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.graph import QuantizedGraphModule

DETECTORS = {
    "ssdlite320_mobilenet_v3_large": ["backbone", "head"],
    "fasterrcnn_mobilenet_v3_large_320_fpn": [
        *("backbone", "rpn.head", "roi_heads.box_head", "roi_heads.box_predictor"),
    ],
    "retinanet_resnet50_fpn": ["backbone", "head"],
    "fcos_resnet50_fpn": ["backbone", "head"],
    "maskrcnn_resnet50_fpn": [
        *("backbone", "rpn.head", "roi_heads.box_head", "roi_heads.box_predictor"),
        *("roi_heads.mask_head", "roi_heads.mask_predictor"),
    ],
    "keypointrcnn_resnet50_fpn": [
        *("backbone", "rpn.head", "roi_heads.box_head", "roi_heads.box_predictor", "roi_heads.keypoint_head"),
    ],
}
IMAGES = [torch.rand(3, 160, 160, generator=torch.Generator().manual_seed(0))]


def detector(name: str) -> nn.Module:
    detection = pytest.importorskip("torchvision.models.detection", reason="needs torchvision, which is not installed")
    classes = 2 if "keypoint" in name else 5
    return getattr(detection, name)(weights=None, weights_backbone=None, num_classes=classes)


def target_for(name: str) -> dict[str, Tensor]:
    target = {"boxes": torch.tensor([[10.0, 10.0, 60.0, 60.0]]), "labels": torch.tensor([1])}
    if "mask" in name:
        target["masks"] = torch.ones(1, 160, 160, dtype=torch.uint8)
    if "keypoint" in name:
        target["keypoints"] = torch.ones(1, 17, 3) * 20
    return target


def parts_of(model: nn.Module) -> list[str]:
    return [name for name, part in model.named_modules() if isinstance(part, QuantizedGraphModule)]


@pytest.mark.sweep
@pytest.mark.parametrize("name", DETECTORS)
def test_detectors_are_prepared_trained_converted_and_their_backbones_exported(name, tmp_path) -> None:
    model = detector(name)
    prepared = qt.prepare_parts(model.train(), (IMAGES,), backend="onnxruntime")
    assert parts_of(prepared) == DETECTORS[name]
    assert type(prepared) is type(model)
    assert prepared.training
    assert not parts_of(model)
    with torch.no_grad(), qt.disable_quantization(prepared):
        image = torch.rand(1, 3, 160, 160)  # boxes of random networks have nearly equal scores, and change places
        found, wanted = prepared.eval().backbone(image), model.eval().backbone(image)
        assert found.keys() == wanted.keys()
        for key in wanted:
            torch.testing.assert_close(found[key], wanted[key], rtol=1e-3, atol=1e-3)
    qt.calibrate(prepared.train(), [(IMAGES,)], progress=False)
    losses = prepared(IMAGES * 2, [target_for(name)] * 2)
    sum(losses.values()).backward()
    lacking = [n for n, p in prepared.named_parameters() if p.requires_grad and p.grad is None]
    assert len(lacking) < 8, lacking  # heads whose boxes no proposal matched
    converted = qt.convert(prepared.eval())
    assert converted(IMAGES)[0].keys() == model(IMAGES)[0].keys()
    result = qt.export_onnx(converted.backbone, (torch.rand(1, 3, 160, 160),), tmp_path / "backbone.onnx")
    result.verification.check()


class Net(nn.Module):
    """A body that traces, a head that is called for each row, and Python between them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(4, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        )
        self.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the head's output for each row with a positive sum."""
        x = self.body(x)
        return [self.head(row) for row in x if row.sum() != 0]


def test_what_is_called_several_times_is_replaced() -> None:
    prepared = qt.prepare_parts(Net(), torch.ones(3, 4), backend="tensorrt")
    assert parts_of(prepared) == ["body"]
    assert type(prepared.head[0]).__name__ == "QuantLinear"
    assert parts_of(qt.prepare_parts(Net(), torch.ones(1, 4), backend="tensorrt")) == ["body", "head"]


def test_example_inputs_write_no_buffers() -> None:
    class Counts(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Any:
            self.count.add_(1)
            return super().forward(x)

    prepared = qt.prepare_parts(Counts(), torch.ones(3, 4), backend="tensorrt")
    assert prepared.count == 0


def test_parts_are_named() -> None:
    prepared = qt.prepare_parts(Net(), torch.ones(3, 4), parts=["body.2"], backend="tensorrt")
    assert parts_of(prepared) == ["body.2"]
    assert type(prepared.body[0]).__name__ == "QuantLinear"


def test_rules_and_exclusions_name_layers_of_the_whole_model() -> None:
    w4 = qt.QConfig(qt.QuantSpec(bits=4), qt.QuantSpec(bits=4, axis=0))
    mapping = qt.QConfigMapping().set_module_name_regex(r"body\.2\..*", w4).set_module_name("head.2", w4)
    prepared = qt.prepare_parts(Net(), torch.ones(3, 4), qconfig_mapping=mapping, exclude="body.0", backend="tensorrt")
    assert type(prepared.body.get_submodule("0")) is nn.Linear
    assert prepared.body.get_submodule("2.0").weight_quantizer.spec.bits == 4
    assert prepared.head[2].weight_quantizer.spec.bits == 4
    assert prepared.head[0].weight_quantizer.spec.bits == 8


def test_inplace_and_an_error_that_changes_nothing() -> None:
    model = Net()
    assert qt.prepare_parts(model, torch.ones(3, 4), inplace=True, backend="tensorrt") is model
    assert parts_of(model) == ["body"]
    model = Net().train()
    model.body.eval()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="parts names 'nobody', but the model has no submodule of this name"):
        qt.prepare_parts(model, torch.ones(3, 4), parts=["body", "nobody"], inplace=True, backend="tensorrt")
    assert not parts_of(model)
    assert (model.training, model.body.training, model.head.training) == (True, False, True)
    assert not any(module._forward_pre_hooks for module in model.modules())
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"parts": ["head"]}, "does not call it exactly once"),
        ({"parts": ["body", "body.2"]}, "it lies in the part 'body'"),
        ({"backend": "nowhere"}, "nowhere"),
    ],
)
def test_errors(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        qt.prepare_parts(Net(), torch.ones(3, 4), **{"backend": "tensorrt", **options})


def test_one_string_for_the_parts() -> None:
    with pytest.raises(TypeError, match=r"got a backend; write backend='onnxruntime'"):
        qt.prepare_parts(Net(), torch.ones(3, 4), "onnxruntime", backend="tensorrt")
    with pytest.raises(TypeError, match=r"got the string 'body'; write parts=\['body'\]"):
        qt.prepare_parts(Net(), torch.ones(3, 4), "body", backend="tensorrt")


def test_a_part_that_does_not_trace() -> None:
    class Branching(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            """Branch on a value."""
            return super().forward(x) if x.sum() > 0 else x

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Branching(nn.Linear(4, 4), nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            """Call the part."""
            return self.part(x)

    with pytest.raises(qt.UntraceableError):
        qt.prepare_parts(Outer(), torch.ones(1, 4), parts=["part"], backend="tensorrt")
    with pytest.raises(ValueError, match="no submodule with two layers or more traces"):
        qt.prepare_parts(Outer(), torch.ones(1, 4), backend="tensorrt")


def test_inputs_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="prepare_parts: example_inputs do not fit the model"):
        qt.prepare_parts(Net(), torch.ones(3, 5), backend="tensorrt")
