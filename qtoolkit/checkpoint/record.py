"""The record of a checkpoint: a JSON object with a version, in a file's metadata or in a separate file.

Python values are stored as JSON, and their tensors separately: nothing in a checkpoint is a pickle.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self, TypedDict

import torch
from torch import Tensor

VERSION = 1
KEY = "qtoolkit"  # of the record in the metadata of a file
INDEX = "checkpoint.json"  # the file of the record in a folder
OWN = "qtoolkit:"  # begins the names of tensors that are not entries of the model's state dict
PLAIN = (str, int, float, bool, type(None))  # what is the same in JSON
Json = str | int | float | bool | None | list["Json"] | dict[str, "Json"]
Metadata = Mapping[str, dict[str, object]]  # of a state dict, by the names of modules: versions, specs and modes


class OptimizerTree(TypedDict):
    """The state of an optimizer as JSON, by parameter name."""

    type: str
    groups: list[list[str]]
    options: list[Json]
    states: dict[str, dict[str, Json]]


@dataclass(frozen=True)
class Record:
    """The record of a checkpoint. For a state dict without a record, the defaults apply."""

    modules: Metadata = field(default_factory=dict)  # the metadata of the model's state dict
    # entries of the state dict that share the tensor of another one
    aliases: dict[str, str] = field(default_factory=dict)
    backend: str | None = None  # the backend that the model was prepared for; None if it was not
    mapping: str | None = None  # the user's QConfigMapping as JSON; None without one
    optimizer: OptimizerTree | None = None
    # the caller's state by name: each under its kind, "object" or "value"
    state: dict[str, dict[str, Json]] = field(default_factory=dict)
    ranks: int = 0  # the number of processes that saved it
    qtoolkit: str = ""  # the version of the package that wrote it
    torch: str = str(torch.__version__)  # the version of torch
    version: int | None = None  # the version of this record; None of a state dict

    def to_json(self, **more: object) -> str:
        """Return the record as JSON, with additional entries."""
        modules = encode(self.modules, "the metadata of the state dict")
        return json.dumps({**vars(self), "modules": modules, **more})

    @classmethod
    def from_values(cls, values: object) -> Self:
        """Return the record of a JSON object; ValueError if its version is newer, or it is not a record."""
        if not isinstance(values, Mapping):
            raise ValueError(f"its record is not a JSON object but {type(values).__name__}")
        version = values.get("version")
        if type(version) is int and version > VERSION:
            raise ValueError(
                f"it has version {version}, written by qtoolkit {values.get('qtoolkit')}; this qtoolkit reads versions up to "
                f"{VERSION}: install the newer one"
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


# ---- values as JSON


def encode(value: object, where: str, keep: Callable[[Tensor], str] | None = None) -> Json:
    """Return a value as JSON: numbers, strings, None and tensors, in lists, tuples, dicts and Counters.

    `where` describes the value for errors; `keep` stores a tensor and returns its key. Raises TypeError for an object of
    another type, and for a tensor without `keep`.

    Example:
        >>> encode({"betas": (0.9, 0.99)}, "options")
        {'dict': [['betas', {'tuple': [0.9, 0.99]}]]}
        >>> decode(_)
        {'betas': (0.9, 0.99)}
    """
    if isinstance(value, Tensor):
        if keep is None:
            raise TypeError(f"save_checkpoint: {where} holds a tensor; register it as a buffer.")
        return {"tensor": keep(value)}
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, list | tuple):
        items = [encode(item, where, keep) for item in value]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {kind: [[encode(k, where, keep), encode(v, where, keep)] for k, v in value.items()]}
    raise TypeError(
        f"save_checkpoint: {where} holds a {type(value).__name__}; a checkpoint holds numbers, strings, None and tensors, in "
        "lists, tuples and dicts. Remove it from the state, or convert it."
    )


def decode(tree: object, take: Callable[[str], Tensor] | None = None) -> Any:
    """Return the value of `encode`'s result, or raise ValueError; `take` returns the tensor of a key."""
    if isinstance(tree, PLAIN):
        return tree
    if isinstance(tree, list):
        return [decode(item, take) for item in tree]
    if isinstance(tree, dict) and len(tree) == 1:
        ((kind, content),) = tree.items()
        if kind == "tensor":
            if take is None:
                raise ValueError(f"its record refers to the tensor {str(content)!r} where no tensor is allowed")
            return take(content)
        if kind == "tuple":
            return tuple(decode(item, take) for item in content)
        if kind in ("dict", "counter"):
            items = {decode(key, take): decode(item, take) for key, item in content}
            return items if kind == "dict" else Counter(items)
    raise ValueError(f"its record has an invalid value: {str(tree)[:60]}")
