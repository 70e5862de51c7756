"""Graph passes: each takes a graph module and returns it, changed. One pass a file."""

from qtoolkit.graph.passes import (
    fold_ahead,
    freeze,
    fuse_patterns,
    insert,
    integers,
    leaf_modules,
    link_batch_norms,
    link_inputs,
    recognize,
    record,
    scale_channels,
    split_silu,
    swap,
)

__all__ = [
    "fold_ahead", "freeze", "fuse_patterns", "insert", "integers", "leaf_modules", "link_batch_norms", "link_inputs",
    "recognize", "record", "scale_channels", "split_silu", "swap",
]  # fmt: skip
