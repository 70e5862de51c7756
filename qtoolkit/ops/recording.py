"""The records of exporters for a quantizing op."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from qtoolkit.running import Run, constant_result, running

_takes_ops = ContextVar("takes_ops", default=False)  # whether the exporter has translations of the ops themselves


def check_has_form(what: str) -> None:
    """Raise ValueError in torch.onnx.export: `what` has no nodes there."""
    if running().for_onnx:
        raise ValueError(
            f"torch.onnx.export: {what} has no form in ONNX; write the file by qtoolkit.export_onnx, which stores weights as "
            f"their quantizers shape them and names the quantizers that no file can have."
        )


@contextmanager
def ops_taken() -> Iterator[None]:
    """Let torch.onnx.export record the ops themselves, which the caller translates, for the duration of a `with` block."""
    token = _takes_ops.set(True)
    try:
        yield
    finally:
        _takes_ops.reset(token)


@constant_result  # Dynamo of torch 2.13 reads no ContextVar
def are_ops_taken() -> bool:
    """Return whether the caller of torch.onnx.export translates the ops itself."""
    return _takes_ops.get()


def is_written_to_file() -> bool:
    """Return whether ops become nodes of an ONNX file, also where the caller of the exporter notes the ops."""
    return are_ops_taken() or running().for_onnx


def recorded(
    run: Run,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    format: str,
    code_range: tuple[int, int],
    axis: int | None,
    group: int,
    block_size: int,
) -> Tensor | None:
    """Return the record of torch.onnx.export for a quantizing op; None where that is the op.

    The TorchScript exporter records the op, and asks the symbolic functions for its form. The other one has a table of
    translations for each call of torch.onnx.export, so the nodes are written here.
    """
    # The package of exporters imports the ops.
    if not run.exported:
        from qtoolkit.export.exporters.symbolics import register_symbolics

        register_symbolics()
        return None
    if are_ops_taken() or not run.for_onnx:
        return None
    from qtoolkit.export.exporters.plain import written_by_dynamo

    return written_by_dynamo(x, scale, zero_point, format, code_range, axis, group, block_size)
