"""Models of other packages: how the core knows them without importing the packages."""

import sys
from importlib import import_module
from typing import Any

from torch import nn

# What keeps such a model what it is, by the class of the models: where the class is, its name, and the module for it.
OF_PACKAGES = {("transformers.modeling_utils", "PreTrainedModel"): "qtoolkit.integrations.transformers"}


def integration_of(model_class: type[nn.Module]) -> Any:
    """Return the module of `qtoolkit.integrations` for models of a class; None for a class of no such package.

    Raises:
        ImportError: The package lacks what the module imports of it.
    """
    for (package, name), module in OF_PACKAGES.items():
        kind = getattr(sys.modules.get(package), name, None)
        if kind is not None and issubclass(model_class, kind):
            try:
                return import_module(module)
            except ImportError as error:
                of = package.partition(".")[0]
                raise ImportError(
                    f"the installed {of} lacks what qtoolkit needs for its models ({error}); install a later {of}."
                ) from error
    return None
