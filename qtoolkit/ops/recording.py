"""Whether exporters, CUDA graphs or transforms take the ops, and what exporters record of a quantizing op."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

# Private: torch has no documented way to ask. Without it, nothing counts as transformed.
_transforms_run = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
_takes_ops = ContextVar("takes_ops", default=False)  # whether the exporter has translations of the ops themselves

# Private: torch.compiler.assume_constant_result sets this alone, in torch 2.11 to 2.14, and imports torch.compile's tracer for
# it, which takes twice as long as all of qtoolkit.
_SETS_THE_MARK = torch.__version__ < "2.15"
_MARK = "_dynamo_marked_constant"


def constant_result(function: Callable[[], bool]) -> Callable[[], bool]:
    """Let torch.compile call a function while it compiles, and take what it returns for a constant."""
    if not _SETS_THE_MARK:
        return torch.compiler.assume_constant_result(function)  # type: ignore[no-any-return,no-untyped-call]
    setattr(function, _MARK, True)
    return function


def is_recorded() -> bool:
    """Return whether an exporter or torch.jit records the ops, which then are the float simulation's."""
    return torch.compiler.is_exporting() or bool(torch.jit.is_tracing())  # type: ignore[attr-defined,no-untyped-call]


def is_captured(x: Tensor) -> bool:
    """Return whether a CUDA graph captures what is computed with a tensor: it runs again without Python."""
    return x.is_cuda and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing()


def is_transformed() -> bool:
    """Return whether transforms of torch.func or forward-mode AD run."""
    # Private: forward-mode AD has no documented way to ask for its level, -1 outside of all.
    return not torch.compiler.is_compiling() and (bool(_transforms_run()) or forward_ad._current_level >= 0)


def is_recorded_for_onnx() -> bool:
    """Return whether torch.onnx.export records the ops."""
    return is_recorded() and _is_in_onnx_export()


@constant_result
def _is_in_onnx_export() -> bool:
    # torch.compile, by which torch.onnx.export records where nothing else can, takes torch's own function for False.
    return torch.onnx.is_in_onnx_export()


def check_has_form(what: str) -> None:
    """Raise ValueError in torch.onnx.export: `what` has no nodes there."""
    if is_recorded_for_onnx():
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
    """Return whether what is computed becomes nodes of an ONNX file, also where the caller of the exporter notes the ops."""
    return are_ops_taken() or is_recorded_for_onnx()


def recorded(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    format: str,
    code_range: tuple[int, int],
    axis: int | None,
    group: int,
    block_size: int,
) -> Tensor | None:
    """Return what torch.onnx.export records of a quantizing op; None where that is the op.

    The TorchScript exporter records the op, and asks the symbolic functions for its form. The other one has a table of
    translations for each call of torch.onnx.export, so the nodes are written here.
    """
    # The package of exporters imports the ops.
    if torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
        from qtoolkit.export.exporters.symbolics import register_symbolics

        register_symbolics()
        return None
    if are_ops_taken() or not _is_in_onnx_export():
        return None
    from qtoolkit.export.exporters.plain import written_by_dynamo

    return written_by_dynamo(x, scale, zero_point, format, code_range, axis, group, block_size)
