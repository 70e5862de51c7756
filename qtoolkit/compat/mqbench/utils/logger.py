"""MQBench's logger, which has no handler of its own here."""

import logging

logger = logging.getLogger("MQBENCH")

__all__ = ["logger"]
