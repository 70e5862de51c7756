"""OpenVINO's Core: one for the process, which stays."""

from functools import cache
from typing import Any


@cache
def core() -> Any:
    """Return it.

    The CPU plugin of a Core handles signals on a stack of its own. Of two Cores, the one that goes last leaves the stack of the
    other, which is gone: then Ctrl-C, or the end of a data loader's process, is a segmentation fault (OpenVINO 2026.4).
    """
    import openvino

    return openvino.Core()
