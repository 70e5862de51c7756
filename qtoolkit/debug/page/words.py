"""Human-readable numbers."""


def interval(low: float, high: float) -> str:
    """Return a range as text.

    Example:
        >>> interval(-1, 0.992156)
        '[-1, 0.992]'
    """
    return f"[{low:.3g}, {high:.3g}]"


def percent(share: float | None) -> str:
    """Return a share as a percentage; "" for None.

    Example:
        >>> percent(0.01234), percent(None)
        ('1.23 %', '')
    """
    return "" if share is None else f"{100 * share:.3g} %"


def count(number: float) -> str:
    """Return a large number as short text.

    Example:
        >>> count(3628146688), count(12)
        ('3.63 G', '12')
    """
    for unit in ("", " k", " M", " G", " T"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g} P"


def size(number: float) -> str:
    """Return a number of bytes as short text.

    Example:
        >>> size(1536), size(3 * 2**20)
        ('1.5 KiB', '3.0 MiB')
    """
    for unit in ("bytes", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "bytes" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"
