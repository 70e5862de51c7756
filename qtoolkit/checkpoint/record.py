"""What a checkpoint says beside its tensors: a JSON object with a version, in a file's metadata or a file of its own."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

import torch

from qtoolkit.checkpoint.tree import decode, encode

VERSION = 1
KEY = "qtoolkit"  # of the record in the metadata of a file
INDEX = "checkpoint.json"  # the file of the record in a folder
OWN = "qtoolkit:"  # begins the names of tensors that are not entries of the model's state dict


@dataclass(frozen=True)
class Record:
    """The record of a checkpoint; by its defaults, that of a state dict, which has none."""

    # the metadata of the model's state dict, by the names of its modules: versions, specs and modes
    modules: Any = field(default_factory=dict)
    # entries of the state dict that are the same tensor as another one
    aliases: dict[str, str] = field(default_factory=dict)
    backend: str | None = None  # the backend that the model was prepared for; None if it was not
    mapping: str | None = None  # the user's QConfigMapping as JSON; None without one
    # what the state dict of the optimizer has beside tensors; None without an optimizer
    optimizer: dict[str, Any] | None = None
    state: dict[str, Any] = field(default_factory=dict)  # what the caller gave, by name
    ranks: int = 0  # the number of processes that saved it
    qtoolkit: str = ""  # the version of the package that wrote it
    torch: str = str(torch.__version__)  # the version of torch
    version: int | None = None  # the version of this record; None of a state dict

    def to_json(self, **more: Any) -> str:
        """Return the record as JSON, with more entries for the caller."""
        modules = encode(self.modules, "the metadata of the state dict")
        return json.dumps({**vars(self), "modules": modules, **more})

    @classmethod
    def from_values(cls, values: Any) -> Self:
        """Return the record of a JSON object; ValueError if it is of a later version, or not a record."""
        if not isinstance(values, Mapping):
            raise ValueError(f"its record is not a JSON object but {type(values).__name__}")
        version = values.get("version")
        if type(version) is int and version > VERSION:
            raise ValueError(
                f"it has version {version}, written by qtoolkit {values.get('qtoolkit')}; this qtoolkit reads versions up to "
                f"{VERSION}: install the later one"
            )
        kinds = {"aliases": dict, "state": dict, "version": int, "ranks": int}
        wrong = [name for name, kind in kinds.items() if not isinstance(values.get(name), kind)]
        lacking = [f.name for f in fields(cls) if f.name not in values]
        if lacking or wrong:
            raise ValueError(f"its record has no {(lacking + wrong)[0]!r} of the right type")
        modules = decode(values["modules"])
        return cls(**{f.name: values[f.name] for f in fields(cls)} | {"modules": modules})


def parsed(text: str | bytes) -> Any:
    """Return the values of JSON, or raise ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its record is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"its record is not JSON ({error})") from None
