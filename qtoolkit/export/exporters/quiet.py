"""Messages of libraries used by the exporters and the linter that are irrelevant to users."""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

# The beginnings of messages, by the logger that gives them.
LOGGED: Mapping[str, tuple[str, ...]] = {
    "onnxscript.optimizer._constant_folding": ("Evaluation failed", "Skipping constant folding"),  # it stays computed
    "onnxscript.version_converter": ("The model version conversion is not supported",),  # by onnxscript, but by onnx
    "onnx_ir.passes.common.shape_inference": ("Shape inference failed",),  # unknown shapes stay unknown
    "onnx_ir._convenience": ("Attribute type is ambiguous",),  # torch's translations give empty lists
    "torch.onnx._internal.exporter._registration": ("torchvision is not installed",),  # nor are its ops in the model
}
# Messages of torch: two axes that must be equally long get one name; its recurrent layers list their weights again.
WARNED = r"# The axis name: .* will not be used|The tensor attributes self\..*\b_flat_weights"
INFINITE = "overflow encountered in cast"  # of numpy, where a constant such as -1e9 is an infinity in float16


@contextmanager
def without_noise() -> Iterator[None]:
    """Drop these messages for the duration of a `with` block, and no others."""
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.filterwarnings("ignore", WARNED, UserWarning)
        warnings.filterwarnings("ignore", INFINITE, RuntimeWarning)
        for name, beginnings in LOGGED.items():
            stack.enter_context(_dropped(logging.getLogger(name), beginnings))
        yield


@contextmanager
def _dropped(logger: logging.Logger, beginnings: tuple[str, ...]) -> Iterator[None]:
    def keep(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(beginnings)

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
