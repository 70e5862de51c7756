"""pytorch_quantization.utils.quant_logging."""

import logging


def reset_logger_handler() -> None:
    """Remove all handlers of the root logger."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
