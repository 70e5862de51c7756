"""Loading: everything is checked before the first tensor is written, and later errors restore the old state."""

import copy
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qtoolkit.checkpoint.contents import Stateful, is_object, random_name, restore_random
from qtoolkit.checkpoint.file import InMemory, read_file, read_pickle
from qtoolkit.checkpoint.fitting import check_config, check_names, check_ranges, check_shapes, differences
from qtoolkit.checkpoint.optimizers import check_optimizer, optimizer_state, shaped_like
from qtoolkit.checkpoint.record import INDEX, OWN, Json, Metadata, OptimizerTree, Record, decode
from qtoolkit.errors import check_known
from qtoolkit.finite import check_finite
from qtoolkit.model_state import unchanged_on_error, values_unchanged_on_error
from qtoolkit.processes import rank, ranks

if TYPE_CHECKING:
    from qtoolkit.checkpoint.folder import Folder

SUFFIX = ".safetensors"


def opened(path: Path, own: Collection[str]) -> "InMemory | Folder":
    """Open a checkpoint or a state dict of any kind, for a model with these `own` names in its state dict.

    Raises ValueError: it is damaged, or a pickle of more than tensors.
    """
    if not path.exists():
        raise FileNotFoundError(f"load_checkpoint: there is no file or folder {str(path)!r}.")
    if not path.is_dir():
        return (read_file(path) if path.suffix == SUFFIX else read_pickle(path)).for_names(own)
    if (path / INDEX).exists():
        from qtoolkit.checkpoint.folder import Folder  # imports what takes a second

        return Folder(path)
    remedy = (
        ". Its .metadata is a pickle, which can execute arbitrary code and is not loaded: if you trust it, convert it with "
        "torch.distributed.checkpoint.format_utils.dcp_to_torch_save, and pass the result"
        if (path / ".metadata").exists()
        else ""
    )
    raise ValueError(f"the folder has no {INDEX}, so it is not a complete checkpoint of save_checkpoint{remedy}")


@dataclass
class Loading:
    """One call of `load_checkpoint`, in its steps: `check`, `read`, `load`."""

    source: "InMemory | Folder"
    model: nn.Module
    optimizer: Optimizer | None
    state: Mapping[str, object]
    strict: bool
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    of_optimizer: dict[str, object] = field(default_factory=dict)

    @property
    def record(self) -> Record:
        """The record of the checkpoint."""
        return self.source.record

    @cached_property
    def own(self) -> dict[str, Tensor]:
        """The tensors of the model's state dict."""
        return {name: value for name, value in self.model.state_dict().items() if isinstance(value, Tensor)}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each entry of the saved state dict."""
        saved = {name: shape for name, shape in self.source.shapes.items() if not name.startswith(OWN)}
        return saved | {name: saved[first] for name, first in self.record.aliases.items()}

    @cached_property
    def metadata(self) -> Metadata:
        """The metadata of the saved state dict."""
        for name, entry in self.record.modules.items():
            if not isinstance(entry, dict) or not isinstance(entry.get("version", 1), int | None):
                raise ValueError(f"its record has no metadata of the module {name!r}")
        return dict(self.record.modules)

    @property
    def random_key(self) -> str | None:
        """The name of this process's random number generator states, if they are restored."""
        key = f"{OWN}{random_name(rank())}"
        fits = self.record.ranks == ranks() and key in self.source.shapes
        return key if fits and self.optimizer is not None else None

    def check(self) -> None:
        """Raise ValueError unless the checkpoint fits the model, the optimizer and the state."""
        if any(tensor.is_meta for tensor in self.own.values()):
            raise ValueError("the model is on the meta device; call model.to_empty(device='cpu') first")
        check_config(self.model, self.metadata, self.shapes, self.record.backend)
        modules = dict(self.model.named_modules(remove_duplicate=False))
        self.missing, self.unexpected = differences(modules, self.own, self.shapes, self.metadata)
        if self.strict:
            check_names(self.missing, self.unexpected, self.own)
        check_shapes(modules, self.own, self.shapes)
        check_ranges(modules, self.own, self.shapes)
        if self.optimizer is not None:
            check_optimizer(self.model, self.optimizer, self._optimizer_tree())
        for name in (name for name, value in self.state.items() if is_object(value)):
            check_known("name in state", name, self.record.state)
            if "object" not in self.record.state[name]:
                raise ValueError(
                    f"state[{name!r}] was saved as a plain value, but state has an object with a state dict"
                )

    def _optimizer_tree(self) -> OptimizerTree:
        if self.record.optimizer is None:
            raise ValueError("it holds no optimizer; pass optimizer=None")
        return self.record.optimizer

    def read(self) -> None:
        """Read the tensors. In a process group, each process must call this."""
        aliases, trees = self.record.aliases, self.record.state
        like = {aliases.get(name, name): self._like(name) for name in self.shapes if name not in self.unexpected}
        if self.optimizer is not None:
            parameters = shaped_like(self.model, self._optimizer_tree())
            like |= {key: _fitting(self.source.shapes[key], p) for key, p in parameters.items()}
            for options in self._optimizer_tree()["options"]:
                decode(options, lambda key: like.setdefault(key, self._plain(key)))
        for tree in trees.values():
            decode(_content(tree), lambda key: like.setdefault(key, self._plain(key)))
        if self.random_key is not None:
            like[self.random_key] = self._plain(self.random_key)
        self.tensors = self.source.read(like)
        self.values = {name: decode(_content(tree), self.tensors.__getitem__) for name, tree in trees.items()}
        if self.optimizer is not None:
            self.of_optimizer = optimizer_state(self._optimizer_tree(), self.tensors.__getitem__)

    def _like(self, name: str) -> Tensor:
        own = self.own.get(name)
        return self._plain(name) if own is None else _fitting(self.shapes[name], own)

    def _plain(self, name: str) -> Tensor:
        return torch.empty(self.source.shapes[self.record.aliases.get(name, name)])

    def load(self) -> dict[str, object]:
        """Load the tensors; return the values that are not objects. If an error is raised, nothing is changed."""
        loaded = OrderedDict(
            (name, self.tensors[self.record.aliases.get(name, name)])
            for name in self.shapes
            if name not in self.unexpected
        )
        loaded._metadata = self.metadata  # type: ignore[attr-defined]
        objects = {name: value for name, value in self.state.items() if is_object(value)}
        with (
            loaded_aside(self.model, loaded),
            unchanged_on_error(self.model),
            _restored_on_error(objects.values(), self.optimizer),
        ):
            self.model.load_state_dict(loaded, strict=self.strict)
            check_finite(self.model, "the model")
            if self.optimizer is not None:
                self.optimizer.load_state_dict(self.of_optimizer)
            for name, value in objects.items():
                value.load_state_dict(self.values[name])
            if self.random_key is not None:
                restore_random(self.tensors[self.random_key])
        return {name: value for name, value in self.values.items() if "value" in self.record.state[name]}

    def unused(self) -> list[str]:
        """Return the unused contents of the checkpoint besides the model."""
        of_optimizer = ["optimizer"] if self.record.optimizer and self.optimizer is None else []
        return of_optimizer + [n for n, tree in self.record.state.items() if "object" in tree and n not in self.state]


def _content(tree: Mapping[str, Json]) -> Json:
    ((_, content),) = tree.items()
    return content


def _fitting(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return a tensor of this shape to read into: `like` itself if the shapes match, else an empty one."""
    return like if tuple(like.shape) == shape else torch.empty(shape)


@contextmanager
def _restored_on_error(objects: Collection[Stateful], optimizer: Optimizer | None) -> Iterator[None]:
    before = [(each, copy.deepcopy(each.state_dict())) for each in objects]
    if optimizer is not None:
        before.append((optimizer, optimizer.state_dict()))  # without a copy: loading replaces its tensors
    try:
        yield
    except BaseException:
        for each, state in before:
            each.load_state_dict(state)
        raise


# ---- parameters are loaded without a backup copy: their memory is written last, when no step can fail


def copy_each(to: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values into tensors, one after another."""
    for tensor, value in zip(to, values, strict=True):
        tensor.copy_(value)


# This undocumented function of torch copies in one call, which Ctrl-C does not interrupt.
COPY = getattr(torch, "_foreach_copy_", copy_each)


@contextmanager
def loaded_aside(model: nn.Module, loaded: dict[str, Tensor]) -> Iterator[None]:
    """Let parameters use the memory of their loaded values in a `with` block, and copy the values at its end.

    In the block, `load_state_dict(loaded)` has nothing to copy, and hooks of modules see the loaded values. If the block
    raises, the parameters get their own, unchanged memory back. Parameters with another type, device or shape than their values
    are backed up before the block, and restored.
    """
    aside: dict[int, tuple[nn.Parameter, Tensor]] = {}  # by the identity of the value: one value is aside once
    others = []
    for name, parameter in model.named_parameters():
        value = loaded.get(name)
        if value is not None and id(value) not in aside and _can_take(parameter, value):
            aside[id(value)] = parameter, value
        else:
            others.append(parameter)
    own = [(parameter, parameter.detach()) for parameter, _ in aside.values()]
    with values_unchanged_on_error(others):
        try:
            for parameter, value in aside.values():
                parameter.data = value
            loaded.update({name: aside[id(v)][0] for name, v in loaded.items() if id(v) in aside})
            yield
        except BaseException:
            for parameter, memory in own:
                parameter.data = memory
            raise
    kept = [(parameter, memory) for parameter, memory in own if _can_take(parameter, memory)]
    if not kept:
        return
    with torch.no_grad():
        COPY([memory for _, memory in kept], [parameter.detach() for parameter, _ in kept])
    for parameter, memory in kept:
        parameter.data = memory


def _can_take(parameter: Tensor, value: Tensor) -> bool:
    plain = type(parameter) is nn.Parameter and type(value) is Tensor
    return plain and (parameter.shape, parameter.dtype, parameter.device) == (value.shape, value.dtype, value.device)
