"""Quantized Ultralytics models, for Ultralytics' own trainer and validator (docs/ultralytics.md).

It imports ultralytics, which is licensed under the AGPL-3.0; no other module of qtoolkit imports this module.

An Ultralytics model keeps its class, with its losses, its names and its checkpoints. Its layers become one graph of
`qtoolkit.prepare`, which is the same in training and eval mode. The computation in the head after its layers, such as boxes, is
one leaf module that depends on the mode.
"""

import copy
from collections.abc import Iterator, Mapping
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from ultralytics.nn.modules import OBB, Classify, Detect, Pose, RTDETRDecoder, Segment, v10Detect
from ultralytics.nn.modules.head import OBB26, Pose26, Segment26
from ultralytics.nn.tasks import guess_model_task
from ultralytics.utils.torch_utils import unwrap_model

from qtoolkit.backends import REQUIRED, Backend, backend_of
from qtoolkit.calibrate import calibrate
from qtoolkit.config.mapping import Exclude
from qtoolkit.export.onnx import ExportResult
from qtoolkit.export.onnx import export_onnx as export_graph
from qtoolkit.files import write_atomically
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.prepare import prepare
from qtoolkit.quantizers.tensor_quantizer import quantizers_of

__all__ = ["deployed", "export_onnx", "quantize", "trainer"]

Head = Any  # a head of Ultralytics, whose attributes its classes do not declare
# Heads whose layers become part of the graph. An RTDETRDecoder becomes a leaf module.
TRACED = (Classify, Detect, OBB, OBB26, Pose, Pose26, Segment, Segment26, v10Detect)
# Parts of heads outside the graph: they decode boxes, or belong to the loss.
BEHIND_GRAPH = ("dfl", "flow_model")


class Decode(nn.Module):
    """The part of a head after its layers: nothing in training; in eval mode it adds boxes or probabilities to the results."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.head: Head = copy.copy(head)
        parts = head.named_children()
        self.head._modules = {name: part if name in BEHIND_GRAPH else nn.Identity() for name, part in parts}

    def forward(self, results: Any) -> object:
        """Return the output of the head from the results of its layers."""
        if self.training:
            return results
        if isinstance(self.head, Classify):
            y = results.softmax(1)
        else:
            results = in_eval_mode(results)
            own = of_head(results, self.head)
            y = self.head._inference(own)
            if self.head.end2end:
                y = self.head.postprocess(y.permute(0, 2, 1))
            y = (y, own["proto"]) if "proto" in own else y
        return y if self.head.export else (y, results)


def in_eval_mode(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results of a head's layers without the results that exist only in training mode."""
    if "one2one" in results:  # a head with two branches
        return {branch: in_eval_mode(parts) for branch, parts in results.items()}
    kept = {name: part for name, part in results.items() if name != "kpts_sigma"}
    if isinstance(kept.get("proto"), tuple | list):
        kept["proto"] = kept["proto"][0]  # masks of classes are behind it
    return kept


def of_head(results: Mapping[str, Any], head: Head) -> Any:
    """Return the results from which a head computes boxes: one of two branches."""
    return results["one2one" if head.end2end else "one2many"] if "one2one" in results else results


class Layers(nn.Module):
    """The graph as a list with one layer, under the name of the head. Ultralytics models run their layers one by one."""

    f: int | list[int] = -1  # its input is the model's
    i = 0

    def __init__(self, graph: QuantizedGraphModule, head_name: str) -> None:
        super().__init__()
        self.graph, self.head_name = graph, head_name

    @property
    def head(self) -> Head:
        """The head; Ultralytics reads its attributes."""
        return self.graph.get_submodule(self.head_name)

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[nn.Module]:
        return iter((self,))

    def __getitem__(self, index: int | slice) -> Head:
        return self.head

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        """Return the modules without quantizers: Ultralytics would take them for classes of Model Optimizer by their name."""
        return (module for module in super().modules(remove_duplicate) if type(module).__name__ != "TensorQuantizer")

    def forward(self, x: Any) -> object:
        """Run the graph."""
        return self.graph(x)


class RTDETRLayers(Layers):
    """The same for an RT-DETR; its head also takes the labels in training."""

    f = [0]

    def __getitem__(self, index: int | slice) -> object:
        """Return an identity layer for the layers before the head, and the graph for the head."""
        return [First()] if isinstance(index, slice) else self

    def forward(self, x: list[Tensor], batch: Mapping[str, object] | None = None) -> object:
        """Run the graph."""
        return self.graph(*x, batch)


class First(nn.Identity):
    """A layer that returns the image."""

    f, i = -1, 0


class Run(nn.Module):
    """The forward of an Ultralytics model, for tracing."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model.model
        self.save: list[int] = model.save

    def forward(self, x: object) -> object:
        """Run the layers one by one."""
        return self.run(x)

    def run(self, x: object, *batch: object) -> object:
        """Run the layers one by one. `batch` is an argument of the last one."""
        results: list[object] = []
        *layers, head = self.model
        for layer in layers:
            x = layer(_input_of(layer, x, results))
            results.append(x if layer.i in self.save else None)
        return head(_input_of(head, x, results), *batch)


class RunWithLabels(Run):
    """The forward of an RT-DETR."""

    def forward(self, x: object, batch: object) -> object:  # type: ignore[override]  # a graph has all arguments of its forward
        """Run the layers one by one. `batch` has the labels, or is None."""
        return self.run(x, batch)


def _input_of(layer: Any, x: object, results: list[object]) -> object:
    if isinstance(layer.f, int):
        return x if layer.f == -1 else results[layer.f]
    return [x if index == -1 else results[index] for index in layer.f]


def quantize(
    model: nn.Module, *, backend: str | Backend = REQUIRED, exclude: Exclude = (), **options: Any
) -> nn.Module:
    """Return a copy of an Ultralytics model with its layers as a graph of `qtoolkit.prepare`.

    It keeps its class and losses, and works in Ultralytics' validator and predictor. Train it with `trainer`, or in your own
    loop. The layers of an RTDETRDecoder are quantized by module replacement, the layers of all other heads in the graph. The
    decoding of boxes stays in float.

    Args:
        model: A DetectionModel, SegmentationModel, PoseModel, OBBModel, ClassificationModel or RTDETRDetectionModel of
            Ultralytics: `YOLO(...).model`. In training mode batch norms are trained; in eval mode they are folded immediately.
        backend: The target (required), as for `qtoolkit.prepare`.
        exclude: The modules to keep in float, as for `qtoolkit.prepare`. Layers have their names in the model.
        options: Other arguments of `qtoolkit.prepare`, such as `qconfig_mapping`.

    Returns:
        The copy. Its `model.graph` is the graph. Calibrate it next: `qtoolkit.calibrate(quantized, batches_of_images)`.

    Raises:
        TypeError: `backend` is missing, or the model has another type, or is already quantized.

    Example:
        >>> from ultralytics.nn.tasks import DetectionModel
        >>> quantized = quantize(DetectionModel("yolov8n.yaml", verbose=False), backend="onnxruntime")
        >>> report = qt.calibrate(quantized, [torch.rand(2, 3, 64, 64)], progress=False)
        >>> list(quantized(torch.rand(2, 3, 64, 64)))
        ['boxes', 'scores', 'feats']
    """
    head, target = _head_of(model), backend_of(backend)
    own: Any = copy.deepcopy(model)
    name = f"model.{len(own.model) - 1}"
    image = next(model.parameters()).new_zeros(1, _channels_of(model), 64, 64)
    own.is_fused = already_fused
    excluded = [exclude] if isinstance(exclude, str) or callable(exclude) else [*exclude]
    if isinstance(head, RTDETRDecoder):
        of_loss = [f"{name}.dec_score_head.{i}" for i in range(head.num_decoder_layers) if i != head.decoder.eval_idx]
        excluded += [*of_loss, f"{name}.denoising_class_embed"]
        graph = prepare(
            RunWithLabels(own), (image, {}), target, untraced=[name], exclude=excluded, inplace=True, **options
        )
        own.model, own.save = RTDETRLayers(graph, name), [0]
    else:
        _split(own.model[-1])
        excluded.append(Decode)
        graph = prepare(Run(own), image, target, leaf_modules=[Decode], exclude=excluded, inplace=True, **options)
        own.model, own.save = Layers(graph, f"{name}.decode.head"), []
    return cast("nn.Module", own)


def already_fused() -> bool:
    """Return True: Ultralytics must not fold the batch norms of a quantized model, because that would remove its quantizers."""
    return True


def _head_of(model: nn.Module) -> Head:
    """Return the head of a float model; TypeError if it cannot be quantized."""
    layers = getattr(model, "model", None)
    if isinstance(layers, Layers):
        raise TypeError("quantize: the layers of this model are already quantized.")
    head = layers[-1] if isinstance(layers, nn.Sequential) else None
    if type(head) not in (*TRACED, RTDETRDecoder):
        known = ", ".join(kind.__name__ for kind in (*TRACED, RTDETRDecoder))
        raise TypeError(
            f"quantize: model must be an Ultralytics model, such as YOLO(...).model, with one of the heads {known}; got "
            f"{type(model).__name__}{'' if head is None else f' with {type(head).__name__}'}. For other models, use "
            "qtoolkit.quant_modules.replace and your own training loop."
        )
    return head


def _split(head: Head) -> None:
    """Let a head return the output of `Decode` for the results of its layers, which run as in training."""
    decode = Decode(head)
    for name in BEHIND_GRAPH:
        head._modules.pop(name, None)
    parts = [part for part in head.modules() if type(part).__module__.startswith("ultralytics.")]
    head.decode = decode.train(head.training)
    for part in parts:
        part.__class__ = _as_in_training(type(part))


def _as_in_training(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass that always takes the Python branch of training mode. Its torch layers have their own mode."""

    def forward(self: Any, *args: object, **kwargs: object) -> object:
        results = kind.forward(self, *args, **kwargs)
        return self.decode(results) if "decode" in self._modules else results

    training = property(lambda self: True, lambda self, mode: None)
    return type(kind.__name__, (kind,), {"training": training, "forward": forward})


def deployed(model: nn.Module) -> QuantizedGraphModule:
    """Return the graph of a quantized model for deployment: it maps an image tensor to the outputs of Ultralytics' export.

    Pass it to `qtoolkit.convert` and `qtoolkit.export_onnx`, or to any other function for prepared models. A head with two
    branches computes the branch selected by `model.end2end`.

    Args:
        model: The result of `quantize`, or a checkpoint of `trainer` in YOLO(...).model. It is not changed.

    Returns:
        A copy of the graph, in eval mode, without parts that only the loss needs.

    Raises:
        TypeError: The model is not a result of `quantize`.

    Example:
        >>> from ultralytics.nn.tasks import DetectionModel
        >>> quantized = quantize(DetectionModel("yolov8n.yaml", nc=2, verbose=False).eval(), backend="onnxruntime")
        >>> report = qt.calibrate(quantized, [torch.rand(2, 3, 64, 64)], progress=False)
        >>> deployed(quantized)(torch.rand(1, 3, 64, 64)).shape
        torch.Size([1, 6, 84])
    """
    layers = _layers_of(model, "deployed")
    gm = copy.deepcopy(layers.graph).eval()
    head: Head = gm.get_submodule(layers.head_name)
    head.export = True
    # Otherwise they would keep the anchors of earlier images for another batch.
    head.dynamic = not isinstance(head, RTDETRDecoder)
    leaf = layers.head_name.removesuffix(".head")
    (call,) = (node for node in gm.graph.nodes if node.op == "call_module" and node.target == leaf)
    used = [node for node in gm.graph.nodes if node.users]
    results = call.args[0]
    if isinstance(head, RTDETRDecoder):
        call.args = (results, None)  # labels
    elif not isinstance(head, Classify):
        call.args = (of_head(in_eval_mode(results), head),)
    for node in reversed(used):
        if not node.users:
            gm.graph.erase_node(node)
    gm.recompile()
    return gm


def _layers_of(model: nn.Module, what: str) -> Layers:
    layers = getattr(model, "model", None)
    if not isinstance(layers, Layers):
        raise TypeError(
            f"{what}: model must be the result of qtoolkit.integrations.ultralytics.quantize, or YOLO(...).model of a "
            f"checkpoint of its trainer; got {type(model).__name__}."
        )
    return layers


def export_onnx(
    model: nn.Module, path: str | PathLike[str], imgsz: int | tuple[int, int] = 640, **options: Any
) -> ExportResult:
    """Write a calibrated model as an ONNX file with Q/DQ pairs, which `YOLO(path)` reads too. Its batch is dynamic.

    Use it instead of `YOLO.export`, which does not support qtoolkit's quantizers. The outputs match `YOLO.export` without
    `nms`. The image size is fixed; in Ultralytics, such a file needs `rect=False`. With `dynamic_shapes=({0: "batch", 2:
    "height", 3: "width"},)` the file accepts images of any size in multiples of the stride.

    Args:
        model: As for `deployed`.
        path: The file to write.
        imgsz: The size of images: a number, or height and width.
        options: Other arguments of `qtoolkit.export_onnx`, such as `verify`.

    Returns:
        The result of `qtoolkit.export_onnx`.

    Raises:
        TypeError: The model is not a result of `quantize`.
        RuntimeError: As in `qtoolkit.export_onnx`.

    Example:
        >>> import tempfile
        >>> from ultralytics.nn.tasks import ClassificationModel
        >>> quantized = quantize(ClassificationModel("yolov8n-cls.yaml", nc=2, verbose=False).eval(), backend="onnxruntime")
        >>> report = qt.calibrate(quantized, [torch.rand(2, 3, 64, 64)], progress=False)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result = export_onnx(quantized, folder + "/model.onnx", imgsz=64)
        >>> result.verification.quantizer_codes.differing
        0
    """
    graph = deployed(model)
    size = (imgsz, imgsz) if isinstance(imgsz, int) else imgsz
    images = torch.rand(2, _channels_of(model), *size, generator=torch.Generator().manual_seed(0))
    names = ["output0", "output1"] if isinstance(_layers_of(model, "export_onnx").head, Segment) else ["output0"]
    is_dynamic = "dynamic_shapes" in options
    options = {"input_names": ["images"], "output_names": names, "dynamic_batch": not is_dynamic, **options}
    result = export_graph(graph, images.to(next(graph.parameters()).device), path, **options)
    _describe(model, result.path, size, is_dynamic)
    return result


def _describe(model: Any, path: Path, size: tuple[int, int], is_dynamic: bool) -> None:
    """Write the metadata that Ultralytics reads: the task, the names of classes, the image size."""
    import onnx

    head = _layers_of(model, "export_onnx").head
    facts = {
        "task": guess_model_task(model) or "detect",  # it does not guess the task of an RT-DETR
        "names": model.names,
        "imgsz": list(size),
        "stride": int(max(model.stride)),
        "channels": _channels_of(model),
        "batch": 1,
        "end2end": getattr(model, "end2end", False),
        "args": {"dynamic": is_dynamic},
        **({"kpt_shape": head.kpt_shape} if isinstance(head, Pose) else {}),
    }
    file = onnx.load(path, load_external_data=False)
    onnx.helper.set_model_props(file, {name: str(fact) for name, fact in facts.items()})
    write_atomically(file.SerializeToString(), path)


def _channels_of(model: Any) -> int:
    return int(model.yaml.get("channels", 3))


class QuantizedTrainer:
    """Mixin of `trainer` for an Ultralytics trainer: its model is quantized, and calibrated on its own batches.

    `options` are arguments of `quantize`; `batches` is the number of training batches for calibration.
    """

    options: ClassVar[Mapping[str, Any]]
    batches: ClassVar[int]
    data: Mapping[str, Any]
    model: nn.Module
    train_loader: Any
    preprocess_batch: Any

    def get_model(self, cfg: object = None, weights: Any = None, verbose: bool = True) -> nn.Module:
        """Return the trainer's model with quantizers, or a copy of `weights` if these are quantized."""
        if not isinstance(getattr(weights, "model", None), Layers):
            model = super().get_model(cfg, weights, verbose)  # type: ignore[misc]  # the trainer's
            return quantize(model, **self.options)
        classes = self.data["nc"]
        if len(weights.names) != classes:
            raise ValueError(
                f"trainer: the quantized weights have {len(weights.names)} classes, but the data set has {classes}; start from "
                "the float model."
            )
        return cast("nn.Module", copy.deepcopy(weights).float().train().requires_grad_())

    def _build_train_pipeline(self) -> None:
        super()._build_train_pipeline()  # type: ignore[misc]
        model: nn.Module = unwrap_model(self.model)
        if not all(quantizer.ready for quantizer in quantizers_of(model).values()):
            batches = islice(self.train_loader, self.batches)
            images = (self.preprocess_batch(batch)["img"] for batch in batches)
            calibrate(model, images, progress=False)
            self.train_loader.reset()

    def build_optimizer(self, model: nn.Module, *args: object, **kwargs: object) -> torch.optim.Optimizer:
        """Return the trainer's optimizer, without weight decay for learned scales."""
        optimizer: torch.optim.Optimizer = super().build_optimizer(model, *args, **kwargs)  # type: ignore[misc]
        scales = {id(p) for quantizer in quantizers_of(unwrap_model(model)).values() for p in quantizer.parameters()}
        *_, group_of_norms = (group for group in optimizer.param_groups if group["param_group"] == "bn")
        for group in optimizer.param_groups:
            if group is not group_of_norms:
                group_of_norms["params"] += [p for p in group["params"] if id(p) in scales]
                group["params"] = [p for p in group["params"] if id(p) not in scales]
        return optimizer


def trainer(base: Any, batches: int = 8, **options: Any) -> Any:
    """Return an Ultralytics trainer class for quantized training: `yolo.train(trainer=trainer(yolo), data=...)`.

    Args:
        base: A YOLO object (its task selects the trainer), or a trainer class.
        batches: The number of training batches for calibration before the first step.
        options: Arguments of `quantize`: `backend` (required), and others such as `exclude`. A model that is already quantized
            keeps its quantizers, and needs none.

    Returns:
        A subclass of the trainer's class.

    Example:
        >>> from ultralytics.models.yolo.detect import DetectionTrainer
        >>> trainer(DetectionTrainer, backend="onnxruntime").__name__
        'QuantizedDetectionTrainer'
    """
    kind = base if isinstance(base, type) else base.task_map[base.task]["trainer"]
    return type(f"Quantized{kind.__name__}", (QuantizedTrainer, kind), {"batches": batches, "options": options})
