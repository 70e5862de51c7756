"""MQBench's logger; here it has no handler."""

import logging

logger = logging.getLogger("MQBENCH")

__all__ = ["logger"]
