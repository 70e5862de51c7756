"""Tables in plain text, as reports print them."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return one line per row, with columns as wide as their widest cell.

    Example:
        >>> table([("layer", "bits"), ("conv1", "8")])
        ['layer  bits', 'conv1  8']
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
