"""The modules that pickled models name: public packages, so that pickles load after internal modules have moved."""

from types import FunctionType


def publish(package: str, *exports: object) -> None:
    """Set the module of classes and functions to the public package whose `__init__` exports them.

    Pickles, and what torch.fx generates, name each class and function by its module and its name. `inspect.getsource`
    then finds the source of methods and functions, but not of a class.
    """
    for export in exports:
        home = export.__module__
        members = vars(export).values() if isinstance(export, type) else ()
        for member in (export, *(getattr(m, "__func__", m) for m in members)):  # of class methods, the function
            if isinstance(member, type | FunctionType) and member.__module__ == home:
                member.__module__ = package
