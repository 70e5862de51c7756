"""Constructors of float layers that build QAT layers: patches of `__init__` that can be removed."""

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from qtoolkit.eager.rules import BY_REPLACEMENT, decide_layer, record_plan
from qtoolkit.graph.passes.link_inputs import link_own_inputs
from qtoolkit.layer_rules import LayerRules
from qtoolkit.nn import QuantModule
from qtoolkit.nn.replacement import TRANSFORMERS, keep_off_fast_paths, quantized_layer, replace_in_place

Init = Callable[..., None]


@dataclass(frozen=True)
class Settings:
    """How layers are quantized when they are built. Layers for which `ignore("", layer)` is true stay float."""

    rules: LayerRules
    ignore: Callable[[str, nn.Module], bool] | None = None

    def finish(self, module: nn.Module, cls: type[nn.Module]) -> None:
        """Quantize a module after the constructor of `cls` ran, unless the module is an instance of a subclass."""
        if type(module) is cls and cls in self.rules.table and not (self.ignore and self.ignore("", module)):
            qconfig = decide_layer(module, self.rules).qconfig
            if qconfig is not None:
                qat_type = self.rules.table[cls]
                replace_in_place(module, quantized_layer(module, qat_type, qconfig, cls.__name__, what="initialize"))
                link_own_inputs(module, self.rules.backend)
                record_plan(module, self.rules, {"": BY_REPLACEMENT})
        if isinstance(module, TRANSFORMERS):
            keep_off_fast_paths(module, [part for part in module.modules() if isinstance(part, QuantModule)])


class Construction:
    """The patches of constructors, for all threads, with the current settings; None if constructors are not patched."""

    def __init__(self) -> None:
        self.settings: Settings | None = None
        self._lock = threading.RLock()
        self._thread = threading.local()
        self._patches: dict[type[nn.Module], tuple[Init, Init | None]] = {}  # (patch, the class's own __init__)

    def switch(self, settings: Settings | None) -> None:
        """Apply these settings from now on."""
        with self._lock:
            self.settings = settings
            for cls in list(self._patches):
                self._restore(cls)
            for cls in () if settings is None else (*settings.rules.table, *TRANSFORMERS):
                if cls not in self._patches:
                    self._patch(cls)

    def _patch(self, cls: type[nn.Module]) -> None:
        inherited: Init = cls.__init__

        @functools.wraps(inherited)
        def init(module: nn.Module, *args: object, **kwargs: object) -> None:
            """Run the constructor that the class had, then make the module a QAT module by the present settings."""
            inherited(module, *args, **kwargs)
            settings = self.settings  # None after `deactivate`, if something has kept a reference to this function
            if settings is not None and not getattr(self._thread, "finishes", False):
                self._thread.finishes = True  # layers that `from_float` builds stay as it builds them
                try:
                    settings.finish(module, cls)
                finally:
                    self._thread.finishes = False

        self._patches[cls] = init, vars(cls).get("__init__")
        cls.__init__ = init  # type: ignore[assignment, method-assign]

    def _restore(self, cls: type[nn.Module]) -> None:
        patch, own = self._patches.pop(cls)
        if vars(cls).get("__init__") is not patch:
            return  # other code has patched it since and may call this patch, which then does nothing
        if own is None:
            del cls.__init__
        else:
            cls.__init__ = own  # type: ignore[method-assign]


CONSTRUCTION = Construction()
