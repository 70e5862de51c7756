"""What a watch writes to TensorBoard, or to anything with the same two methods."""

from typing import Any, Protocol, runtime_checkable

from qtoolkit.debug.activity import Activity
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer

SCALARS = ("lowest", "highest", "grid_lowest", "grid_highest", "clipped")


@runtime_checkable
class SummaryWriter(Protocol):
    """The part of `torch.utils.tensorboard.SummaryWriter` that a watch needs."""

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int) -> Any:
        """Write a number of a step."""

    def add_histogram(self, tag: str, values: Any, global_step: int) -> Any:
        """Write the distribution of some numbers of a step."""


def check_writer(writer: object) -> None:
    """Raise TypeError unless something can be written to."""
    if writer is not None and (isinstance(writer, type) or not isinstance(writer, SummaryWriter)):
        raise TypeError(
            f"watch: writer must have the methods add_scalar and add_histogram, as torch.utils.tensorboard.SummaryWriter() "
            f"has, or be None, got {writer!r}."
        )


def write(writer: SummaryWriter, row: Activity, quantizer: TensorQuantizer, step: int) -> None:
    """Write what a quantizer got in a step, and its scale: of several the distribution."""
    if not row.calls:
        return
    for what in SCALARS:
        value = getattr(row, what)
        if value is not None:
            writer.add_scalar(f"{what}/{row.name}", value, step)
    if not quantizer.ready or quantizer.dynamic:
        return
    scale = quantizer.scale.detach()
    if scale.numel() == 1:
        writer.add_scalar(f"scale/{row.name}", float(scale), step)
    else:
        writer.add_histogram(f"scale/{row.name}", scale.float().cpu(), step)
