"""Weights with other values in the file than in the model: shaped by their quantizer, or already quantized."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from qtoolkit.model_state import attribute_kept, removing
from qtoolkit.quantizers.frozen import DynamicActivation, Grid, ShapedActivation


class ConstantWeight(nn.Module):
    """The `shape` of a quantizer that returns a precomputed weight."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.register_buffer("value", value)

    def forward(self, x: Tensor) -> Tensor:
        return self.get_buffer("value")


@contextmanager
def shaped_weights(converted: nn.Module, run: Callable[[], object], what: str) -> Iterator[None]:
    """Let the quantizers of weights use precomputed shaped weights within a `with` block.

    `run` runs the model once to find the weights. Raises ValueError, which begins with `what`: a quantizer has several weights.
    """
    weights = weights_given(converted, lambda grid: grid.shape is not None, run, what)
    with attribute_kept(weights, "shape"):
        for grid, weight in weights.items():
            with torch.no_grad():
                grid.shape = ConstantWeight(grid.shape(weight))  # type: ignore[misc]  # which a grid with a weight to shape has
        yield


def weights_given(
    converted: nn.Module, chosen: Callable[[Grid], bool], run: Callable[[], object], what: str
) -> dict[Grid, Tensor]:
    """Return the weight of each chosen quantizer, found by a run of the model.

    Raises ValueError, which begins with `what`: a quantizer has several weights.
    """
    grids = {module: name for name, module in converted.named_modules() if isinstance(module, Grid) and chosen(module)}
    weights: dict[Grid, Tensor] = {}

    def note(grid: Grid, args: tuple[Tensor, ...]) -> None:
        """Forward pre-hook: keep the weight that a grid quantizes."""
        weight = args[0].detach()
        if grid in weights and not torch.equal(weights[grid], weight):
            raise ValueError(
                f"{what}: {grids[grid]!r} quantizes several weights with quantizer={grid.spec.quantizer!r}; give each weight "
                "its own quantizer."
            )
        weights[grid] = weight

    if grids:
        with removing([grid.register_forward_pre_hook(note) for grid in grids]):
            run()
    return weights


def check_shapes(converted: nn.Module, what: str) -> None:
    """Raise ValueError, which begins with `what`, for an activation quantizer that cannot be written to a file."""
    for name, module in converted.named_modules():
        if isinstance(module, ShapedActivation | DynamicActivation) and module.why_no_export is not None:
            raise ValueError(f"{what}: {name!r} cannot be written: {module.why_no_export}.")
