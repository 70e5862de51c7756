"""Messages of the libraries under the exporters that are not the user's business."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

# The beginning of each message, by the logger that gives it.
LOGGED = {
    "onnxscript.optimizer._constant_folding": "Evaluation failed",  # a constant is then not folded
    "onnxscript.version_converter": "The model version conversion is not supported",  # by onnxscript, but by onnx
    "onnx_ir._convenience": "Attribute type is ambiguous",  # torch's translations give empty lists
    "torch.onnx._internal.exporter._registration": "torchvision is not installed",  # its ops are then not in the model
}
# Messages of torch.onnx: two axes that must be equally long get one name.
WARNED = "# The axis name: .* will not be used"


@contextmanager
def without_noise() -> Iterator[None]:
    """Drop these messages for the duration of a `with` block, and no others."""
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.filterwarnings("ignore", WARNED, UserWarning)
        for name, beginning in LOGGED.items():
            stack.enter_context(_dropped(logging.getLogger(name), beginning))
        yield


@contextmanager
def _dropped(logger: logging.Logger, beginning: str) -> Iterator[None]:
    def keep(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(beginning)

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
