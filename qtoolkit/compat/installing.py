"""Other tools' package names, for imports that stay as they are."""

import sys


def install_as(package: str, name: str) -> None:
    """Make imports of a name, and of its submodules, return a package that is imported; RuntimeError if they return another."""
    ours = {key: module for key, module in sys.modules.items() if key == package or key.startswith(f"{package}.")}
    imported = sys.modules.get(name)
    if imported is not None and imported is not ours[package]:
        raise RuntimeError(
            f"install: {name} is imported already, from {getattr(imported, '__file__', None)}; call install() before its "
            f"import."
        )
    sys.modules.update({name + key.removeprefix(package): module for key, module in ours.items()})
