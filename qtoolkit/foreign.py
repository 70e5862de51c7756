"""Models and quantizers of other packages: how the core knows them without importing the packages."""

import sys
from importlib import import_module
from types import ModuleType
from typing import ClassVar

from torch import nn

from qtoolkit.errors import warn

# What keeps such a model what it is, by the class of the models: where the class is, its name, and the module for it.
OF_PACKAGES = {("transformers.modeling_utils", "PreTrainedModel"): "qtoolkit.integrations.transformers"}

# What timm's optimizers and transforms ask a model for, and repos that follow timm: the parameters that do not decay, the
# parameters of each layer, the size and normalization of images. Without it they take defaults, without a word.
ASKED_FOR = ("no_weight_decay", "no_weight_decay_keywords", "group_matcher", "pretrained_cfg")


def integration_of(model_class: type[nn.Module]) -> ModuleType | None:
    """Return the module of `qtoolkit.integrations` for models of a class; None for a class of no such package.

    Raises ImportError if the package lacks a name that the module imports.
    """
    for (package, name), module in OF_PACKAGES.items():
        kind = getattr(sys.modules.get(package), name, None)
        if kind is not None and issubclass(model_class, kind):
            try:
                return import_module(module)
            except ImportError as error:
                of = package.partition(".")[0]
                raise ImportError(
                    f"the installed {of} lacks a name that qtoolkit needs for its models ({error}); install a later {of}."
                ) from error
    return None


def warn_of_own_trainer(model: object, what: str) -> None:
    """Warn, for the public function `what`, of a model whose package has a trainer that would not train the quantized model."""
    if type(model).__module__.startswith("ultralytics."):
        warn(
            f"{what}: the trainer of ultralytics builds a float model of its own, and trains that even if `yolo.model` is the "
            f"quantized one: pass trainer=qtoolkit.integrations.ultralytics.trainer(yolo) to yolo.train(). In a training loop "
            f"of your own this does not matter.",
        )


class ForeignQuantizer(nn.Module):
    """The base class of quantizers with a calibration, a conversion and an export of their own: qtoolkit's do not apply.

    Attributes:
        PACKAGE: The package that has these, for errors and reports.
    """

    PACKAGE: ClassVar[str]


def refuse_foreign_quantizers(model: nn.Module, what: str) -> None:
    """Raise TypeError if a model holds such quantizers; `what` names the function that does not support them."""
    for name, module in model.named_modules():
        if isinstance(module, ForeignQuantizer):
            raise TypeError(
                f"{what}: {name!r} is a quantizer of {module.PACKAGE}, which has its own calibration and export; use those, "
                f"or replace the float model by qtoolkit.quant_modules (docs/migration.md)."
            )
