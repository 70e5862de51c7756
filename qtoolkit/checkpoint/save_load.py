"""save_checkpoint() and load_checkpoint()."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from qtoolkit.checkpoint.contents import contents_of
from qtoolkit.checkpoint.file import write_file
from qtoolkit.checkpoint.loading import SUFFIX, Loading, opened
from qtoolkit.errors import check_flags, shown, some
from qtoolkit.extras import missing
from qtoolkit.files import check_format, is_path
from qtoolkit.finite import check_finite
from qtoolkit.instead import in_order
from qtoolkit.model_state import check_module
from qtoolkit.processes import raising_on_all_ranks
from qtoolkit.version import __version__


@dataclass(frozen=True)
class Checkpoint:
    """The result of `load_checkpoint`; prints as text.

    Attributes:
        path: The file or the folder.
        state: The values that were saved by `state=`, by name, except for objects.
        missing: Entries of the model that are not in the checkpoint; they are unchanged.
        unexpected: Entries of the checkpoint that are not in the model.
        unused: Other contents of the checkpoint that were not loaded: "optimizer", or names of the state.
        random: Whether the random number generators were restored.
        backend: The name of the backend that the saved model was prepared for, if any.
        mapping: The QConfigMapping of the saved model as JSON, if it had one.
        version: The version of the checkpoint; None for a state dict.
    """

    path: Path
    state: Mapping[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    random: bool = False
    backend: str | None = None
    mapping: str | None = None
    version: int | None = None

    def __str__(self) -> str:
        what = "a state dict" if self.version is None else f"a checkpoint of version {self.version}"
        names = {"not in it": self.missing, "not in the model": self.unexpected, "not loaded": self.unused}
        lines = [f"{title}: {some(each)}" for title, each in names.items() if each]
        return "\n".join([f"loaded {str(self.path)!r}, {what}", *lines])


def save_checkpoint(
    model: nn.Module,
    path: str | os.PathLike[str],
    optimizer: Optimizer | None = None,
    state: Mapping[str, object] | None = None,
) -> None:
    """Save a model, and optionally the state of its training, without pickles.

    A path that ends in ".safetensors" is a single file, written by rank 0. Any other path is a folder, into which every process
    of the group writes its own part with torch.distributed.checkpoint: it supports models sharded by `fully_shard`, and any
    number of processes can load it. In a process group every rank must call this. An existing checkpoint is replaced only after
    everything is written, so it survives if a process is killed or the disk is full.

    Args:
        model: A prepared, replaced, converted or float model, optionally in DistributedDataParallel, fully_shard or
            torch.compile.
        path: A file that ends in ".safetensors", or a folder.
        optimizer: Also save its state, and the states of the random number generators of each process.
        state: Additional state for resuming, by name: objects with `state_dict` and `load_state_dict`, such as learning rate
            schedules, `qtoolkit.tuning.QuantizationSchedule` and GradScaler; and values of numbers, strings, None and tensors,
            in lists, tuples and dicts. The state of rank 0 is saved, and all shards of tensors sharded by fully_shard.

    Raises:
        TypeError: The model is not a module, the path is not a path, or the state holds an unsupported object.
        ValueError: The optimizer belongs to another model, a sharded model would be saved as one file, or a parameter or a
            statistic of a batch norm is not finite. An existing checkpoint is kept.
        OSError: The file or the folder cannot be written.
        RuntimeError: It failed on another rank, named in the message.

    Example:
        >>> import tempfile
        >>> model = qt.prepare(torch.nn.Sequential(torch.nn.Linear(4, 2)).train(), backend="tensorrt")
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     qt.save_checkpoint(model, folder + "/last.safetensors", optimizer, state={"epoch": 3})
        ...     loaded = qt.load_checkpoint(model, folder + "/last.safetensors", optimizer)
        >>> loaded.state["epoch"]
        3
    """
    model = check_module(model, "save_checkpoint")
    place = _place_to_save(path)
    with raising_on_all_ranks("save_checkpoint"):
        _check_extra()
        check_finite(model, "save_checkpoint")
        tensors, record = contents_of(model, optimizer, _checked(state, "save_checkpoint"), __version__)
    if place.suffix == SUFFIX:
        write_file(tensors, record, place)
        return
    from qtoolkit.checkpoint.folder import write_folder  # imports what takes a second

    write_folder(tensors, record, place)


@in_order(model="model", path="path")
def load_checkpoint(
    model: nn.Module,
    path: str | os.PathLike[str],
    optimizer: Optimizer | None = None,
    state: Mapping[str, object] | None = None,
    strict: bool = True,
) -> Checkpoint:
    """Load a checkpoint of `save_checkpoint`, or a state dict, into a model.

    Names, shapes and configs are checked before anything is loaded. If an error is raised, the model, the optimizer and the
    objects are unchanged. On the same number of processes, a resumed training gives bit-identical results.

    Args:
        model: The model, as for `save_checkpoint`. A prepared model also accepts the state dict of its float model, from which
            it computes the weights' ranges; calibrate afterwards.
        path: A file or a folder of `save_checkpoint`, also from another number of processes. Or a state dict of this model or
            of its float model, in a safetensors or torch.save file (also inside a dict as "state_dict", "model_state_dict" or
            "model"). torch.save files are read with weights_only=True, so pickled objects are not executed.
        optimizer: Load its state too, and the random number generators of each process.
        state: The objects of `save_checkpoint` to load, by name.
        strict: Raise an error for entries that only the model or only the checkpoint has; False loads the other entries.

    Returns:
        The saved values, and the names of everything that was not loaded.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, is a pickle of more than tensors, belongs to another model, config, optimizer or state,
            or has a newer version; or a parameter or a statistic of a batch norm in it is not finite.
        RuntimeError: It failed on another rank, named in the message.

    Example:
        >>> import tempfile
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2))
        >>> prepared = qt.prepare(model, backend="tensorrt")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save(model.state_dict(), folder + "/float.pt")
        ...     found = qt.load_checkpoint(prepared, folder + "/float.pt")
        >>> torch.equal(prepared.get_parameter("0.weight"), model[0].weight)
        True
    """
    check_flags("load_checkpoint", strict=strict)
    inner = check_module(model, "load_checkpoint")
    place, given = _place_to_load(path), _checked(state, "load_checkpoint")
    with raising_on_all_ranks("load_checkpoint"), _about(place), _damaged():
        _check_extra()
        loading = Loading(opened(place, inner.state_dict()), inner, optimizer, given, strict)
        loading.check()
    with _about(place), _damaged():
        loading.read()
    with raising_on_all_ranks("load_checkpoint"), _about(place):
        values = loading.load()
    record, random = loading.record, loading.random_key is not None
    lacking, more, unused = (tuple(each) for each in (loading.missing, loading.unexpected, loading.unused()))
    of_record = record.backend, record.mapping, record.version
    return Checkpoint(place, values, lacking, more, unused, random, *of_record)


def _place_to_save(path: object) -> Path:
    if not is_path(path):
        raise TypeError(
            f"save_checkpoint: path must be a file that ends in {SUFFIX!r} or a folder, got {shown(path)}; write "
            f'path="last{SUFFIX}".'
        )
    check_format(path, "save_checkpoint", f"last{SUFFIX}")
    place = Path(path)
    if place.suffix != SUFFIX and place.is_file():
        raise NotADirectoryError(
            f"save_checkpoint: a path that does not end in {SUFFIX!r} is a folder, but {str(place)!r} is a file; remove it, or "
            f"write path={str(place) + SUFFIX!r}."
        )
    return place


def _place_to_load(path: object) -> Path:
    if not is_path(path):
        loads = "; load a state dict with model.load_state_dict" if isinstance(path, Mapping) else ""
        raise TypeError(
            f"load_checkpoint: path must be a file or a folder of save_checkpoint, or a file of a state dict, got "
            f'{shown(path)}; write path="last{SUFFIX}"{loads}.'
        )
    return Path(path)


def _checked(state: Mapping[str, object] | None, what: str) -> Mapping[str, object]:
    if state is not None and not isinstance(state, Mapping):
        raise TypeError(f"{what}: state must be a mapping of names to objects or values, got {type(state).__name__}.")
    return state or {}


def _check_extra() -> None:
    try:
        import safetensors  # noqa: F401
    except ImportError:
        raise missing("a checkpoint", "safetensors", "checkpoint") from None


@contextmanager
def _about(path: Path) -> Iterator[None]:
    """Prefix errors about the content of a checkpoint with its name."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"load_checkpoint: {str(path)!r}: {str(error).removesuffix('.')}.") from None


@contextmanager
def _damaged() -> Iterator[None]:
    """Raise ValueError for errors caused by a record with wrong types."""
    try:
        yield
    except (KeyError, AttributeError, IndexError, TypeError, RecursionError) as error:
        raise ValueError(f"its record is damaged ({type(error).__name__}: {error})") from error
