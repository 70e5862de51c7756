"""Run a converted model without a graph, with onnxruntime's codes put in place of its own: by hooks."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from qtoolkit.export.verify import CodeCount, as_stored, grid_of, twin_of, values_of
from qtoolkit.frozen import Grid
from qtoolkit.nn import QuantModule


class Hooked:
    """Runs a converted model, and puts onnxruntime's codes in place of its own after every quantizer.

    Args:
        converted: The model.
        codes: Of each quantizer, onnxruntime's codes at its nodes, in the order of the file.
        stored: The quantizers of what the file stores as codes.

    Attributes:
        counts: How the codes of each quantizer compare.
        constants: How those of stored tensors do, other than layers' weights.
        missing: Quantizers that were called and have no node.
        unreached: Quantizers that were not called: the inputs took another way through the model.
    """

    def __init__(self, converted: nn.Module, codes: Mapping[str, Sequence[Any]], stored: Collection[str]) -> None:
        self.converted = converted
        self.names: dict[nn.Module, str] = {module: name for name, module in converted.named_modules()}
        self.codes: dict[str, list[Any]] = defaultdict(
            list
        )  # by first names; the file may have another of a shared one
        for name, of in codes.items():
            self.codes[self._first_name(name)] += of
        self.stored = {self._first_name(name) for name in stored}
        self.paired: dict[str, Iterator[Any]] = {}
        self.calls: Counter[nn.Module] = Counter()
        self.counts: dict[str, CodeCount] = {}
        self.constants = CodeCount()
        self.missing: dict[str, None] = {}
        self.unreached: tuple[str, ...] = ()

    def run(self, *inputs: Any) -> None:
        """Run the model on inputs: once to count calls, and once with onnxruntime's codes."""
        layers = [module for module in self.names if isinstance(module, QuantModule)]
        weights = {quantizer for layer in layers for quantizer in layer.weight_quantizers().values()}
        grids = [module for module in self.names if isinstance(module, Grid) and module not in weights]
        with _hooked([*grids, *layers], self._count):
            self.converted(*inputs)
        self.unreached = tuple(name for m, name in self.names.items() if isinstance(m, Grid) and not self.calls[m])
        calls = {self.names[grid]: self.calls[grid] for grid in grids}
        self.paired = {name: iter(of) for name, of in self.codes.items() if len(of) == calls.get(name)}
        with _hooked(grids, self._put_theirs):
            self.converted(*inputs)

    def _first_name(self, name: str) -> str:
        return self.names[grid_of(self.converted, name)]

    def _count(self, module: nn.Module, args: Any, output: Any) -> None:
        self.calls.update([module])
        if isinstance(module, QuantModule):
            self.calls.update(module.weight_quantizers().values())

    def _put_theirs(self, grid: Any, args: tuple[Tensor], output: Tensor) -> Tensor:
        x = args[0]
        name = self.names[grid]
        ours = as_stored(grid, x) if name in self.stored else grid.codes(x).cpu()
        theirs = next(self.paired[name]) if name in self.paired else twin_of(self.converted, self.codes, grid, ours)
        if theirs is None:
            self.missing[name] = None
            return output
        count = CodeCount.of(ours, theirs)
        if name in self.stored:  # maybe in another shape
            self.constants += count
            return output
        self.counts[name] = self.counts.get(name, CodeCount()) + count
        return values_of(grid, theirs, x)


@contextmanager
def _hooked(modules: Iterable[nn.Module], hook: Callable[[nn.Module, Any, Any], Any]) -> Iterator[None]:
    """Call a hook after each call of some modules, in a `with` block."""
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
