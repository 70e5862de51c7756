"""MQBench's utilities: the switches of a model's quantizers."""

from qtoolkit.compat.mqbench.utils import logger, state

__all__ = ["logger", "state"]
