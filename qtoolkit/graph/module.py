"""QuantizedGraphModule: a GraphModule that takes its plan, and attributes the user asked for, into copies and pickles."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, Self

from torch import fx

from qtoolkit.graph.plan import Plan
from qtoolkit.nn import QuantWeighted


class QuantizedGraphModule(fx.GraphModule):
    """What `qtoolkit.prepare` and `qtoolkit.convert` return.

    torch's GraphModule drops, when it is copied, all attributes that its graph does not use; this one keeps those named in
    `kept`.

    Attributes:
        plan: What prepare decided; None until it has.
        kept: Attributes to keep, by dotted name.
    """

    plan: Plan | None
    kept: dict[str, Any]

    @classmethod
    def of(cls, gm: fx.GraphModule, plan: Plan | None = None, kept: Mapping[str, Any] | None = None) -> Self:
        """Build one from a GraphModule, with its submodules, parameters and graph."""
        name = gm.__class__.__name__
        result = cls(gm, gm.graph, name)
        result.plan, result.kept = plan, {}
        for attribute, value in (kept or {}).items():
            result.keep(attribute, value)
        return result

    def keep(self, name: str, value: Any) -> None:
        """Set an attribute, by dotted name, that copies and pickles keep."""
        owner, _, attribute = name.rpartition(".")
        setattr(self.get_submodule(owner), attribute, value)
        self.kept[name] = value

    def train(self, mode: bool = True) -> Self:
        """Set the mode; and link layers to the batch norms that stand in their places now.

        torch.nn.SyncBatchNorm.convert_sync_batchnorm puts new ones there.
        """
        for layer in self.modules():
            bn = layer.batch_norm if isinstance(layer, QuantWeighted) else None
            if isinstance(layer, QuantWeighted) and bn is not None and self.get_submodule(bn.name) is not bn:
                self.set_submodule(bn.name, layer.replace_batch_norm(self.get_submodule(bn.name)))
        return super().train(mode)

    def __deepcopy__(self, memo: dict[int, Any]) -> "QuantizedGraphModule":
        result = super().__deepcopy__(memo)
        if not isinstance(result, QuantizedGraphModule):
            raise TypeError(f"copying gave a {type(result).__name__}.")
        result.plan, result.kept = self.plan, {}
        for name, value in self.kept.items():
            result.keep(name, copy.deepcopy(value, memo))
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, arguments = super().__reduce__()
        return _restore, (rebuild, arguments, self.plan, self.kept)


def _restore(
    rebuild: Callable[..., fx.GraphModule], arguments: tuple[Any, ...], plan: Plan | None, kept: Mapping[str, Any]
) -> QuantizedGraphModule:
    return QuantizedGraphModule.of(rebuild(*arguments), plan, kept)
