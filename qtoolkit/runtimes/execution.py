"""The results of one execution of a file in a runtime."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray
from torch import Tensor

from qtoolkit.quantizers.frozen import Grid

if TYPE_CHECKING:
    from qtoolkit.export.files.quantizer_nodes import QuantizerNode

Array = NDArray[Any]  # of a dtype that the file decides


@dataclass(frozen=True)
class ExecutedLayer:
    """A node of the graph that a runtime executes."""

    name: str  # the layer of the model whose quantized weight it takes; otherwise the node's name in the file
    kernel: str  # the runtime's name of the op
    integer: bool  # whether it computes in integers
    left: bool = False  # whether a delegate leaves it to kernels of the runtime itself


@dataclass(frozen=True)
class Executed:
    """One execution of a file."""

    runtime: str  # the runtime and its version
    outputs: Sequence[Array]  # the outputs of the file
    # the integers at each quantizer, by the name of their tensor in the file; without those that cannot be read
    codes: Mapping[str, Array]
    layers: tuple[ExecutedLayer, ...]  # the nodes that compute; not those that convert, move or reorder values
    conversions: int  # how many nodes convert between floats and integers
    # the largest difference in the outputs between the graph that users run and the one that also returns the integers
    changed_by_reading: float
    # the share of the quantized values that may differ, by one step each, where its kernels round in another order
    share: float
    remark: str = ""  # what users of this runtime have to know, beside the figures; "" for nothing
    # quantizers at which it does not round unless integers are read; the remark says so
    unrounded: tuple[str, ...] = ()
    steps: int = 1  # by how many steps a quantized value may differ
    saturating: tuple[str, ...] = ()  # layers whose sums of products saturate on this processor; the remark says why


# The file, its inputs, its quantizers, the model's grids by name, and whether to optimize.
ExecutionRequest = tuple[Path, Sequence[Tensor], Sequence["QuantizerNode"], Mapping[str, Grid], bool]
Execute = Callable[[*ExecutionRequest], Executed]  # a runtime: what it computes
