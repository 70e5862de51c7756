"""Distillation: a loss between a quantized model and the float model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from qtoolkit.eager.record import chains_of
from qtoolkit.errors import check_known, check_sequence, with_article
from qtoolkit.model_inputs import split
from qtoolkit.model_state import check_module, evaluating, removing
from qtoolkit.nn import QuantWeighted
from qtoolkit.nn.batch_norm import is_batch_norm
from qtoolkit.shared_modules import first_names, modules_by_name
from qtoolkit.wrapped import unwrapped


class Distillation(AbstractContextManager["Distillation"]):
    """The loss of a student's logits and features against a teacher's, such as the float model.

    loss = logits_weight * T^2 * KL(softmax(teacher / T) || softmax(student / T))
         + feature_weight * mean over features of |student - teacher|^2 / |teacher|^2

    (G. Hinton et al., arXiv 1503.02531, for the logits.) The teacher runs in eval mode without gradients; then the mode of each
    of its modules is restored. The features are the outputs of modules, recorded by hooks in the student's forward: call
    `close()`, or use a `with` block, to remove the hooks. Copies of the student, such as averages, have no hooks. A quantized
    layer with a linked batch norm includes the batch norm in eval mode, with frozen batch norms, and with some strategies: the
    feature of such a layer is the output of its batch norm, in both models.

    Args:
        student: The model in training, optionally in DistributedDataParallel or torch.compile.
        teacher: The model to follow.
        temperature: T, above 0.
        features: Names of modules in both models.
        logits_weight: Weight of the logits' part; 0 uses only features, and allows any model output.
        feature_weight: Weight of the features' part.
        logits_of: Returns the logits of a model's output; by default the output is the logits.

    Raises:
        TypeError: A model is not a module, or `features` is not a sequence of names.
        ValueError: Both models are the same object, a named module does not exist, a value is out of range, or the batch norm
            after a feature is folded into its layer in only one of the models.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        >>> prepared, x = qt.prepare(model.train(), backend="tensorrt"), torch.randn(16, 8)
        >>> _ = qt.calibrate(prepared, [x], progress=False)
        >>> with qt.tuning.Distillation(prepared, model, temperature=2.0, features=["0"]) as distillation:
        ...     logits = prepared(x)
        ...     loss = distillation(x, logits)
        >>> 0 < loss.item() < 0.1
        True
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        temperature: float = 1.0,
        features: Sequence[str] = (),
        logits_weight: float = 1.0,
        feature_weight: float = 1.0,
        logits_of: Callable[[Any], Tensor] | None = None,
    ) -> None:
        check_sequence(features, "Distillation", "features")
        student, inner = (
            check_module(model, "Distillation", role) for role, model in (("student", student), ("teacher", teacher))
        )
        for role, model in (("student", student), ("teacher", inner)):
            known = [name for name, _ in model.named_modules() if name]
            for name in features:
                check_known(f"module of the {role} in features", name, known)
        if student is inner:
            raise ValueError(
                "Distillation: student and teacher must be two models; qtoolkit.prepare returns a copy, so pass the float "
                "model as the teacher."
            )
        _check("temperature", temperature, temperature > 0, "above 0")
        _check("logits_weight", logits_weight, logits_weight >= 0, "at least 0")
        _check("feature_weight", feature_weight, feature_weight >= 0, "at least 0")
        _check("logits_weight", logits_weight, logits_weight > 0 or bool(features), "above 0 without features")
        self.teacher, self.temperature, self.features = teacher, temperature, tuple(features)
        self.logits_weight, self.feature_weight, self.logits_of = logits_weight, feature_weight, logits_of
        # The names of the feature modules.
        self._outputs = tuple(_output_of(name, student, inner) for name in self.features)
        self._of_student, self._handles = _hooked(student, self._outputs)

    def __call__(self, inputs: object, output: object) -> Tensor:
        """Return the loss for the student's latest forward.

        Args:
            inputs: The inputs of the student's forward: passed as teacher(*inputs) if a tuple or list, teacher(**inputs) if a
                mapping, else teacher(inputs).
            output: The student's output.

        Raises:
            RuntimeError: A module of `features` did not run in the student's or the teacher's forward since the last call.
            ValueError: The logits or the features of both models differ in shape.
        """
        of_teacher, handles = _hooked(unwrapped(self.teacher), self._outputs)
        with removing(handles), torch.no_grad(), evaluating(self.teacher):
            args, kwargs = split(tuple(inputs) if isinstance(inputs, list) else inputs)
            target = self.teacher(*args, **kwargs)
        terms = [self.logits_weight * self._of_logits(output, target)] if self.logits_weight else []
        parts = [
            _relative_error(name, _taken(self._of_student, name, "student"), _taken(of_teacher, name, "teacher"))
            for name in self._outputs
        ]
        self._of_student.clear()
        terms += [self.feature_weight * torch.stack(parts).mean()] if parts else []
        return torch.stack(terms).sum()

    def _of_logits(self, output: object, target: object) -> Tensor:
        logits, wanted = self._logits_in(output, "student"), self._logits_in(target, "teacher")
        if logits.shape != wanted.shape:
            raise ValueError(
                f"Distillation: the logits differ in shape: {tuple(logits.shape)} for the student, {tuple(wanted.shape)} for "
                "the teacher; call the loss with the inputs of the student's forward."
            )
        return kl_of_logits(logits, wanted, self.temperature)

    def _logits_in(self, output: object, role: str) -> Tensor:
        logits = output if self.logits_of is None else self.logits_of(output)
        if not isinstance(logits, Tensor):
            raise TypeError(
                f"Distillation: the logits of the {role} must be a tensor, got {type(logits).__name__}; pass logits_of, a "
                "function that returns the logits of a model's output."
            )
        return logits

    def close(self) -> None:
        """Remove the hooks from the student."""
        for handle in self._handles:
            handle.remove()
        self._of_student.clear()

    def __exit__(self, *_: object) -> None:
        self.close()


def kl_of_logits(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """Return T^2 * KL(softmax(teacher / T) || softmax(student / T)), the mean over all but the last dimension, in float32.

    Example:
        >>> kl_of_logits(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 0.0]]), temperature=4.0)
        tensor(0.)
    """
    log_p, log_q = (F.log_softmax(logits.float() / temperature, -1) for logits in (teacher, student))
    divergence = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    return temperature**2 * divergence.mean()


def _output_of(name: str, *models: nn.Module) -> str:
    """Return the module whose output is the same quantity in all models and modes: the batch norm after a layer, if any."""
    layers = [model.get_submodule(name) for model in models]
    norms = {norm for model in models for norm in _norms_behind(model, name, models)}
    if norms:
        return norms.pop()
    if len({isinstance(layer, QuantWeighted) and layer._holds_batch_norm for layer in layers}) > 1:
        raise ValueError(
            f"Distillation: the batch norm after {name!r} is folded into this layer in only one of the models, so the outputs "
            f"of {name!r} differ; name the module after the batch norm, such as its activation."
        )
    return name


def _norms_behind(model: nn.Module, name: str, models: Sequence[nn.Module]) -> Iterator[str]:
    """Yield the name, common to all models, of the batch norm that a layer includes."""
    layer, names = model.get_submodule(name), first_names(model)
    linked = layer.batch_norm if isinstance(layer, QuantWeighted) else None
    behind = [names[linked]] if linked in names else []
    behind += [each for head, *rest in chains_of(model) if head == name for each in rest]
    known = [modules_by_name(each) for each in models]
    for each in behind:
        if all(each in of for of in known) and any(is_batch_norm(of[each]) for of in known):
            yield each


class _Kept:
    """Forward hook that keeps the output of a module in a dict. In a copy of the module it does nothing."""

    def __init__(self, outputs: dict[str, object] | None, name: str) -> None:
        self.outputs, self.name = outputs, name

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        if self.outputs is not None:
            # an op in place may overwrite the output
            self.outputs[self.name] = output.clone() if isinstance(output, Tensor) else output

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (None, self.name)


def _hooked(model: nn.Module, names: Sequence[str]) -> tuple[dict[str, object], list[RemovableHandle]]:
    outputs: dict[str, object] = {}
    return outputs, [model.get_submodule(name).register_forward_hook(_Kept(outputs, name)) for name in names]


def _taken(outputs: Mapping[str, object], name: str, role: str) -> Tensor:
    output = outputs.get(name)
    if not isinstance(output, Tensor):
        state = (
            "did not run in a forward" if output is None else f"returned {with_article(type(output))}, not a tensor,"
        )
        raise RuntimeError(
            f"Distillation: the module {name!r} of the {role} {state} since the last call; run the model first, and use "
            "modules that return one tensor."
        )
    return output


def _relative_error(name: str, student: Tensor, teacher: Tensor) -> Tensor:
    if student.shape != teacher.shape:
        raise ValueError(
            f"Distillation: the outputs of the module {name!r} differ in shape: {tuple(student.shape)} for the student, "
            f"{tuple(teacher.shape)} for the teacher."
        )
    wanted = teacher.float()
    power = wanted.square().sum().clamp(min=torch.finfo(torch.float32).tiny)
    return (student.float() - wanted).square().sum() / power


def _check(name: str, value: float, holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(f"Distillation: {name} must be {rule}, got {value}.")
