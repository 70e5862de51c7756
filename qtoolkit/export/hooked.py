"""Run a converted model without a graph, with onnxruntime's codes put in place of its own: by hooks."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from qtoolkit.export.codes import CodeCount, as_stored, compare_layer, twin_of, values_of
from qtoolkit.nn import QuantModule
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.shared_modules import first_names


class Hooked:
    """Runs a converted model, and puts onnxruntime's codes in place of its own after every quantizer.

    Args:
        converted: The model.
        codes: Of each quantizer, onnxruntime's codes at its nodes, in the order of the file.
        stored: Of each quantizer, whether the file stores these codes: they are a constant's.

    Attributes:
        counts: How the codes of each quantizer compare.
        constants: How those of parameters and buffers do, other than layers' weights.
        missing: Quantizers that were called and have no node.
        unreached: Quantizers that were not called: the inputs took another way through the model.
    """

    def __init__(
        self, converted: nn.Module, codes: Mapping[str, Sequence[Any]], stored: Mapping[str, Sequence[bool]]
    ) -> None:
        self.converted = converted
        self.names = first_names(converted)
        self.codes, self.stored = codes, stored
        self.held = {*converted.parameters(), *converted.buffers()}
        self.paired: dict[str, Iterator[tuple[Any, bool]]] = {}
        self.calls: Counter[nn.Module] = Counter()
        self.counts: dict[str, CodeCount] = {}
        self.constants = CodeCount()
        self.missing: dict[str, None] = {}
        self.unreached: tuple[str, ...] = ()

    def follow(self, *inputs: Any) -> None:
        """Run the model on inputs: once to count calls, and once with onnxruntime's codes."""
        layers = [module for module in self.names if isinstance(module, QuantModule)]
        weights = {quantizer for layer in layers for quantizer in layer.weight_quantizers().values()}
        grids = [module for module in self.names if isinstance(module, Grid) and module not in weights]
        with hooked([*grids, *layers], self._count):
            self.converted(*inputs)
        self.unreached = tuple(name for m, name in self.names.items() if isinstance(m, Grid) and not self.calls[m])
        for name, calls in ((self.names[grid], self.calls[grid]) for grid in grids):
            if name in self.codes and len(self.codes[name]) == calls:
                self.paired[name] = zip(self.codes[name], self.stored[name], strict=True)
        with hooked(grids, self._put_theirs):
            self.converted(*inputs)

    def _count(self, module: nn.Module, args: Any, output: Any) -> None:
        self.calls.update([module])
        if isinstance(module, QuantModule):
            self.calls.update(module.weight_quantizers().values())

    def _put_theirs(self, grid: Any, args: tuple[Tensor], output: Tensor) -> Tensor:
        x, name = args[0], self.names[grid]
        ours = grid.codes(x).cpu()
        if name in self.paired:
            theirs, stored = next(self.paired[name])
        else:
            theirs, stored = twin_of(self.converted, self.codes, grid, x, ours), False
        if theirs is None:
            self.missing[name] = None
            return output
        count = CodeCount.of(as_stored(grid, x), theirs) if stored else compare_layer(grid, x, ours, theirs)
        if stored and x in self.held:
            self.constants += count
        else:  # in a computed constant runtimes may differ by rounding ties
            self.counts[name] = self.counts.get(name, CodeCount()) + count
        return output if stored else values_of(grid, theirs, x)  # stored codes may have another shape


@contextmanager
def hooked(modules: Iterable[nn.Module], hook: Callable[[nn.Module, Any, Any], Any]) -> Iterator[None]:
    """Call a hook after each call of some modules, in a `with` block."""
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
