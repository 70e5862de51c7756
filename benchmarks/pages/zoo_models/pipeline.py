"""One model through prepare, calibrate, training, convert, export and onnxruntime, with the results as plain data."""

import copy
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase as fnmatch
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torchvision.ops import FrozenBatchNorm2d

import qtoolkit as qt
from benchmarks.pages.zoo_models.recipe import Inputs, Recipe
from qtoolkit.backends import backend_of
from qtoolkit.graph.capture import trace
from qtoolkit.graph.passes.record import FROM_PARAMETERS
from qtoolkit.lint.masked_attention import MASKED
from qtoolkit.lint.slower import takes_types_as_they_are
from qtoolkit.op_kinds.table import ACTIVATIONS, OTHER
from qtoolkit.report import LayerLine
from qtoolkit.verdicts import Cause

SEED = 0
STEPS = 3  # of training
OLDER = "use exporter='torchscript'"  # as the error of an export advises
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, FrozenBatchNorm2d)
NORMS_KEPT = qt.QConfigMapping()
for kind in NORMS:
    NORMS_KEPT = NORMS_KEPT.set_object_type(kind, None)

LABELS = {
    Cause.NOT_FOLDED: "batch norm not folded",
    Cause.IGNORED: "no batch of the calibration reached it",  # the pipeline excludes nothing else
}


@dataclass
class Outcome:
    """The results for one model.

    Attributes:
        failed: The step that failed, or "".
        error: The message of its error.
        steps: Number of training steps.
        quantized: Number of quantized layers with weights.
        ops_quantized: Number of other quantized ops.
        left_float: Names of the layers with weights that remain in float, by label.
        ops_float: Names of the other ops that remain in float, by label.
        off_difference: Largest relative difference from the float model in eval mode, with quantizers disabled and batch
            norms kept.
        folded_difference: The same with batch norms folded, as the prepared model computes in eval mode.
        weight_codes, quantizer_codes, layer_codes: Number of values that differ in onnxruntime, and number compared.
        output_difference: Largest relative difference of the outputs from onnxruntime's, end to end.
        seconds: Processor time of each step.
        untraceable: The error of a model that cannot be traced as it is, or "".
        captured: Whether torch.export captured it, as that error advises where no leaf module helps.
        replaced: Whether its layers were replaced, as it advises where that fails too.
        older_exporter: The error of torch's exporter that advises the older one, which wrote the file then, or "".
        macs: Multiply-adds of the file in "int8", "float16" and "float32", for a target that computes in the types of a file.
        slower: Names of the findings that say why its engine is no faster, with the number of ops of each.
    """

    name: str
    family: str
    backend: str
    parameters: int = 0
    parts: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    note: str = ""
    failed: str = ""
    error: str = ""
    steps: int = 0
    quantized: int = 0
    ops_quantized: int = 0
    left_float: dict[str, list[str]] = field(default_factory=dict)
    ops_float: dict[str, list[str]] = field(default_factory=dict)
    off_difference: float | None = None
    folded_difference: float | None = None
    weight_codes: tuple[int, int] = (0, 0)
    quantizer_codes: tuple[int, int] = (0, 0)
    layer_codes: tuple[int, int] = (0, 0)
    output_difference: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    untraceable: str = ""
    captured: bool = False
    replaced: bool = False
    older_exporter: str = ""
    macs: dict[str, int] = field(default_factory=dict)
    slower: dict[str, int] = field(default_factory=dict)

    def json(self) -> dict[str, Any]:
        """Return all fields as plain values."""
        return asdict(self)


@dataclass
class Part:
    """A module that is prepared separately, with its inputs."""

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def run(recipe: Recipe, backend: str, export: bool = True) -> Outcome:
    """Run all steps for one model. A step that fails is recorded in the outcome and ends the run."""
    torch.manual_seed(SEED)
    outcome = Outcome(recipe.name, recipe.family, backend, parts=recipe.parts, skip=recipe.skip, note=recipe.note)
    steps = _Steps(recipe, backend, outcome, export)
    try:
        steps.all()
    except Exception as error:  # a model of another package may raise any error
        outcome.failed, outcome.error = steps.now, f"{type(error).__name__}: {error}".strip()
    return outcome


class _Steps:
    """The steps in order; `now` is the current one."""

    def __init__(self, recipe: Recipe, backend: str, outcome: Outcome, export: bool) -> None:
        self.recipe, self.backend, self.outcome, self.export = recipe, backend, outcome, export
        self.leaves = recipe.skip
        self.now = "build"

    def all(self) -> None:
        recipe = self.recipe
        with self.step("build"):
            model, inputs = recipe.build(), recipe.inputs()
            self.outcome.parameters = sum(p.numel() for p in model.parameters())
        with self.step("float"):
            _settle(model, inputs)
            parts = _parts(model, inputs, recipe.parts)
        with self.step("trace", timed=False):  # initialization that happens once in a process
            traced = all(map(self.traces, parts))
            traced = traced or all(map(self.exports, parts))
        if traced:
            self.by_graph(parts)
        else:
            self.by_replacement(parts)

    def traces(self, part: Part) -> bool:
        """Return whether a part can be traced, with the leaf modules that the errors advise."""
        while True:
            try:
                self.trace(part)
                return True
            except qt.UntraceableError as error:
                self.outcome.untraceable = self.outcome.untraceable or str(error)
                leaf = f"{part.path}.{error.untraced}".removeprefix(".")
                if not error.untraced or leaf in self.leaves:
                    return False
                self.leaves += (leaf,)
                self.outcome.skip = tuple(dict.fromkeys(re.sub(r"\b\d+\b", "*", leaf) for leaf in self.leaves))

    def exports(self, part: Part) -> bool:
        """Return whether torch.export captures a part, and its graph can be traced and trained; in eval mode, if in no other.

        No graph follows a part that draws random numbers in training mode to choose its ops or its sizes.
        """
        self.leaves, self.outcome.skip = (), ()
        for training in dict.fromkeys((self.recipe.training, False)):
            with suppress(qt.UntraceableError):
                model = copy.deepcopy(part.module).train(training)
                prepared = qt.prepare(model, _example(part), capture="export", backend=self.backend)
                if not _trains(prepared, part):
                    continue
                self.recipe, self.outcome.captured = replace(self.recipe, training=training), True
                return True
        return False

    def by_graph(self, parts: list[Part]) -> None:
        with self.step("trace"):
            for part in () if self.outcome.captured else parts:
                self.trace(part)
        with self.step("prepare"):
            prepared = [self.prepare(part) for part in parts]
        with self.step("quantizers off, folded"):
            self.outcome.folded_difference = max(map(_difference_off, parts, prepared))
        with self.step("quantizers off"):
            pairs = zip(parts, prepared, strict=True)
            kept = (self.norms_kept(part) if _has_norms(part.module) else own for part, own in pairs)
            self.outcome.off_difference = max(map(_difference_off, parts, kept))
        for part, own in zip(parts, prepared, strict=True):
            calibrated = self.calibrated(own, part, self.prepare)
            self.report(part, calibrated)
            self.finish(calibrated, part)

    def by_replacement(self, parts: list[Part]) -> None:
        """Replace the layers of a model that cannot be traced."""
        self.outcome.captured, self.outcome.replaced, self.outcome.skip = False, True, self.recipe.skip
        for part in parts:
            with self.step("prepare"):
                own = self.replace(part)
            with self.step("quantizers off"):
                off = _difference_off(part, own)
                self.outcome.off_difference = max(self.outcome.off_difference or 0.0, off)
            own = self.calibrated(own, part, self.replace)
            self.report(part, own)
            self.finish(own, part)

    def calibrated(self, own: Any, part: Part, quantize: Callable[..., Any]) -> Any:
        """Calibrate a model. What no batch reaches, and what the recipe says, is left in float, as messages advise."""
        with self.step("calibrate"):
            unreached = qt.calibrate(own, [part], forward=_call, progress=False).unreached
            if unreached:
                own = quantize(part, exclude=[quantizer.rpartition(".")[0] for quantizer in unreached])
                qt.calibrate(own, [part], forward=_call, progress=False)
            for name, quantizer in qt.quantizers_of(own).items():
                if any(fnmatch(f"{part.path}.{name}", pattern) for pattern in self.recipe.off):
                    qt.disable_quantization(quantizer)
        return own

    def replace(self, part: Part, exclude: Sequence[str] = ()) -> Any:
        model = part.module.train(self.recipe.training)
        return qt.quant_modules.replace(model, backend=self.backend, exclude=exclude)

    def finish(self, own: Any, part: Part) -> None:
        with self.step("train"):
            _train(own.train(), part, self.recipe.clip)
        self.outcome.steps = STEPS
        with self.step("convert"):
            converted = qt.convert(own)
        if self.export:
            self.export_part(converted, part)

    @contextmanager
    def step(self, name: str, timed: bool = True) -> Iterator[None]:
        """Record the step and its processor time, which excludes other processes."""
        self.now, start = name, time.process_time()
        yield
        seconds = self.outcome.seconds
        if timed:
            seconds[name] = seconds.get(name, 0.0) + time.process_time() - start

    def trace(self, part: Part) -> None:
        model = copy.deepcopy(part.module).train(self.recipe.training)
        trace.run(model, (), self.skip(part), None, None, _example(part))

    def skip(self, part: Part) -> tuple[str, ...]:
        """Return the names of the leaf modules of a part."""
        prefix = f"{part.path}." if part.path else ""
        names = [name for name, _ in part.module.named_modules() if name]
        return tuple(name for name in names if any(fnmatch(prefix + name, pattern) for pattern in self.leaves))

    def prepare(self, part: Part, mapping: qt.QConfigMapping | None = None, exclude: Sequence[str] = ()) -> Any:
        options = {"capture": "export"} if self.outcome.captured else {"untraced": self.skip(part)}
        model = part.module.train(self.recipe.training)
        return qt.prepare(model, _example(part), self.backend, mapping, exclude=exclude, **options)

    def norms_kept(self, part: Part) -> Any:
        return self.prepare(part, NORMS_KEPT)

    def report(self, part: Part, prepared: Any) -> None:
        outcome = self.outcome
        prefix = f"{part.path}." if part.path else ""
        layers = {name for name, module in prepared.named_modules() if _has_weight(module)}
        floats: dict[bool, dict[str, list[str]]] = {True: defaultdict(list), False: defaultdict(list)}
        for line in qt.quantization_report(prepared).layers:
            is_layer = line.name in layers
            if line.status == "quantized":
                outcome.quantized += is_layer
                outcome.ops_quantized += not is_layer
            elif line.status == "float":
                floats[is_layer][label(line)].append(prefix + line.name)
        for into, lines in ((outcome.left_float, floats[True]), (outcome.ops_float, floats[False])):
            for words, names in lines.items():
                into.setdefault(words, []).extend(names)

    def export_part(self, converted: Any, part: Part) -> None:
        with self.step("export"):
            result = self.exported(converted, part)
        found, outcome = result.verification, self.outcome
        with torch.no_grad():
            size = max((float(y.abs().max()) for y in _tensors(_call(converted, part)) if y.numel()), default=1.0)
        outcome.output_difference = max(outcome.output_difference or 0.0, found.output_difference / (size or 1.0))
        for name in ("weight_codes", "quantizer_codes", "layer_codes"):
            count, before = getattr(found, name), getattr(outcome, name)
            setattr(outcome, name, (before[0] + count.differing, before[1] + count.compared))

    def exported(self, converted: Any, part: Part) -> Any:
        """Write a file, by the older exporter where the recipe or the error of the newer one says so."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.onnx"
            try:
                result = qt.export_onnx(converted, _example(part), file, exporter=self.recipe.exporter)
            except RuntimeError as error:
                if OLDER not in str(error):
                    raise
                self.outcome.older_exporter = str(error)
                result = qt.export_onnx(converted, _example(part), file, exporter="torchscript")
            if takes_types_as_they_are(backend_of(self.backend)):
                self.engine(qt.export.estimate_engine(file, self.backend))
            return result

    def engine(self, estimate: qt.export.EngineEstimate) -> None:
        """Add what an engine of a part computes in each type, and why it is no faster."""
        for name, cost in estimate.types.items():
            self.outcome.macs[name] = self.outcome.macs.get(name, 0) + cost.macs
        for finding in estimate.findings:
            self.outcome.slower[finding.name] = self.outcome.slower.get(finding.name, 0) + 1


def _settle(model: nn.Module, inputs: Inputs) -> None:
    """Set the statistics of batch norms from the inputs, so that the outputs of a deep model stay finite."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [m.momentum for m in norms]
    for norm in norms:
        norm.momentum = 1.0
        norm.train()
    with torch.no_grad():
        model.eval()
        for norm in norms:
            norm.train()
        _call(model, Part("", model, *_arguments(inputs)))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    model.eval()


def _parts(model: nn.Module, inputs: Inputs, paths: tuple[str, ...]) -> list[Part]:
    """Run the model, and return the parts with the inputs of their first call."""
    if not paths:
        return [Part("", model, *_arguments(inputs))]
    found: dict[str, Part] = {}

    def note(path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if kwargs:  # example inputs are all positional, or all by keyword
                args, kwargs = (), dict(signature(module.forward).bind(*args, **kwargs).arguments)
            found.setdefault(path, Part(path, module, _detached(args), _detached(kwargs)))

        return hook

    handles = [model.get_submodule(p).register_forward_pre_hook(note(p), with_kwargs=True) for p in paths]
    with torch.no_grad():
        args, kwargs = _arguments(inputs)
        model.eval()(*args, **kwargs)
    for handle in handles:
        handle.remove()
    return [found[path] for path in paths]


def _arguments(inputs: Inputs) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    return ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})


def _detached(values: Any) -> Any:
    return tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, values)


def _example(part: Part) -> Any:
    return part.kwargs if part.kwargs else part.args


def _call(model: nn.Module, part: Part) -> Any:
    return model(*_detached(part.args), **_detached(part.kwargs))


def _tensors(values: Any) -> list[Tensor]:
    return [v for v in tree_leaves(values) if isinstance(v, Tensor) and v.is_floating_point()]


def label(line: LayerLine) -> str:
    """Return what the table calls an op in float: the kind that the target computes in float, or the reason in words."""
    verdict = line.verdict
    if verdict.cause in LABELS:
        return LABELS[verdict.cause]
    if verdict.cause is not Cause.TARGET or verdict in (FROM_PARAMETERS, MASKED):
        return re.sub(r" '[^']*'", "", verdict.text.removeprefix("float: "))  # without the names of submodules
    if line.kind == OTHER.name:  # unknown: the op's own name, without its number
        return re.sub(r"_*\d+$", "", line.name.rpartition(".")[2]) or line.name
    return f"{line.kind} after a float op" if line.kind in ACTIVATIONS else line.kind


def _has_norms(module: nn.Module) -> bool:
    return any(isinstance(part, NORMS) for part in module.modules())


def _has_weight(module: nn.Module) -> bool:
    return any(p.dim() > 1 for p in module.parameters(recurse=False))


def _difference_off(part: Part, prepared: Any) -> float:
    """Return the largest difference from the float model with quantizers disabled, relative to the largest output."""
    with torch.no_grad(), qt.disable_quantization(prepared):
        training = prepared.training
        torch.manual_seed(SEED)  # some models draw random numbers in eval mode
        ours = _tensors(_call(prepared.eval(), part))
        prepared.train(training)
        torch.manual_seed(SEED)
        theirs = _tensors(_call(part.module.eval(), part))
    # In training mode some models have additional heads, whose outputs follow those of eval mode.
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=False) if a.shape == b.shape]
    if not pairs or not all(bool(torch.isfinite(b).all()) for _, b in pairs):
        raise ValueError("the float model's outputs are not finite, or their shapes differ from the prepared model's.")
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs if a.numel())


def _trains(prepared: nn.Module, part: Part) -> bool:
    try:
        with torch.no_grad(), qt.disable_quantization(prepared):  # it is not calibrated yet
            _call(prepared.train(), part)
    except RuntimeError:  # of sizes that the mode changes
        return False
    return True


def _train(prepared: nn.Module, part: Part, clip: float | None) -> None:
    """Take steps of SGD, and check that all gradients are finite."""
    optimizer = torch.optim.SGD([p for p in prepared.parameters() if p.requires_grad], lr=1e-4)
    for _ in range(STEPS):
        _train_step(prepared, part, clip, optimizer)


def _train_step(prepared: nn.Module, part: Part, clip: float | None, optimizer: torch.optim.Optimizer) -> None:
    loss = torch.stack([y.float().square().mean() for y in _tensors(_call(prepared, part)) if y.numel()]).sum()
    loss.backward()
    grads = {name: p.grad for name, p in prepared.named_parameters() if p.grad is not None}
    bad = [name for name, grad in grads.items() if not bool(torch.isfinite(grad).all())]
    if bad or not grads:
        raise ValueError(f"gradients are missing or not finite: {bad[:3] or 'all are missing'}.")
    if clip is not None:
        nn.utils.clip_grad_norm_(prepared.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
