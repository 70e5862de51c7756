"""MQBench's API on top of qtoolkit: prepare_by_platform, the switches of `utils.state`, convert_deploy.

Change the package in the imports of your script: `from qtoolkit.compat.mqbench.prepare_by_platform import prepare_by_platform`.
Or call `install()` once, before `import mqbench`. docs/migration.md lists the differences.
"""

from qtoolkit.compat.installing import install_as
from qtoolkit.compat.mqbench import convert_deploy, prepare_by_platform, scheme, utils
from qtoolkit.compat.mqbench.absent import add_absent

__version__ = "0.0.6"  # the release whose names these are
add_absent(__name__)


def install() -> None:
    """Make `import mqbench`, and imports of its submodules, return this package. A second call has no effect.

    Raises:
        RuntimeError: Another mqbench is already imported.

    Example:
        >>> install()
        >>> from mqbench.utils.state import enable_calibration
        >>> enable_calibration.__module__
        'qtoolkit.compat.mqbench.utils.state'
    """
    install_as(__name__, "mqbench")


__all__ = ["__version__", "convert_deploy", "install", "prepare_by_platform", "scheme", "utils"]
