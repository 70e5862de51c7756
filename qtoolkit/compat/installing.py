"""Install adapters under the package names of other tools, so that scripts keep their imports."""

import sys


def install_as(package: str, name: str) -> None:
    """Make imports of a name and its submodules return an imported package; RuntimeError if another package has the name."""
    ours = {key: module for key, module in sys.modules.items() if key == package or key.startswith(f"{package}.")}
    imported = sys.modules.get(name)
    if imported is not None and imported is not ours[package]:
        raise RuntimeError(
            f"install: {name} is already imported, from {getattr(imported, '__file__', None)}; call install() before its "
            "import."
        )
    sys.modules.update({name + key.removeprefix(package): module for key, module in ours.items()})
