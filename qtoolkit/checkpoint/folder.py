"""Checkpoints as a folder that all processes write together, with torch.distributed.checkpoint in safetensors files.

    folder/checkpoint.json        the record, dtype and shape of each tensor, and the size of each file; written last
    folder/data-HOST.PID.RANDOM/  files of torch.distributed.checkpoint.HuggingFaceStorageWriter, one per process

The index names its data folder, so the folder always holds the latest complete checkpoint.
"""

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from qtoolkit.checkpoint.contents import random_name
from qtoolkit.checkpoint.record import INDEX, OWN, Record, parsed
from qtoolkit.files import is_abandoned, own_name, write_atomically
from qtoolkit.processes import from_all_ranks, is_sharded, raising_on_all_ranks, rank, ranks

DATA = "data-"


def write_folder(tensors: Mapping[str, Tensor], record: Record, folder: Path) -> None:
    """Write a folder; every process must call this. If writing fails, an existing checkpoint is kept.

    Tensors that are not sharded come from rank 0. Other ranks may have different buffers, such as running statistics, until
    DistributedDataParallel broadcasts rank 0's.
    """
    own = {
        name: t for name, t in tensors.items() if rank() == 0 or is_sharded(t) or name == f"{OWN}{random_name(rank())}"
    }
    data = folder / from_all_ranks(own_name(DATA))[0]
    with raising_on_all_ranks("save_checkpoint"):
        data.mkdir(parents=True, exist_ok=True)
    replaced = ""
    try:
        with _plain_errors("save_checkpoint"):
            writer = HuggingFaceStorageWriter(path=str(data), save_distributed=True)
            state_dict_saver.save(own, storage_writer=writer, no_dist=ranks() == 1)
        sizes = {name: size for known in from_all_ranks(_sizes(own)) for name, size in known.items()}
        with raising_on_all_ranks("save_checkpoint"):
            if rank() == 0:
                files = {file.name: file.stat().st_size for file in sorted(data.iterdir())}
                index = record.to_json(data=data.name, files=files, tensors=sizes)
                replaced = _data_of(folder)
                write_atomically(index.encode(), folder / INDEX)
    except BaseException:
        if _data_of(folder) != data.name:  # else the checkpoint is complete, and the error is another rank's
            shutil.rmtree(data, ignore_errors=True)
        raise
    if rank() == 0:
        _remove_others(folder, data, replaced)


def _data_of(folder: Path) -> str:
    """Return the name of the data folder of an index; "" without an index."""
    try:
        return str(json.loads((folder / INDEX).read_bytes())["data"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _remove_others(folder: Path, data: Path, replaced: str) -> None:
    """Remove the previous data, and data of ended processes, but not data that others are writing.

    If two processes save into one folder, the later index names its own data, which must be kept.
    """
    for other in folder.glob(f"{DATA}*"):
        if other != data and (other.name == replaced or is_abandoned(other, DATA)):
            shutil.rmtree(other, ignore_errors=True)


def _sizes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, list[int]]]:
    return {name: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors.items()}


def _dtype(name: object) -> torch.dtype:
    found = getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"its index names the unknown dtype {str(name)!r}")
    return found


class Folder:
    """A folder to read; ValueError if its index is invalid, or its data does not match the index."""

    def __init__(self, folder: Path) -> None:
        values = parsed((folder / INDEX).read_bytes())
        self.record = Record.from_values(values)
        sizes = _entry(values, "tensors")
        self.shapes = {name: tuple(shape) for name, (_, shape) in sizes.items()}
        self.dtypes = {name: _dtype(dtype) for name, (dtype, _) in sizes.items()}
        name = str(values.get("data"))
        if Path(name).name != name or not name.startswith(DATA):
            raise ValueError(f"its index names the data {name!r}, which is not a data folder of a checkpoint")
        self.data = folder / name
        self.files = _entry(values, "files")

    def read(self, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors with the shape, device and distribution of given ones, in the saved dtype."""
        with raising_on_all_ranks("load_checkpoint"):
            if rank() == 0:
                self._check_complete()
        wanted = {name: torch.empty_like(tensor, dtype=self.dtypes[name]) for name, tensor in like.items()}
        with _plain_errors("load_checkpoint"):
            state_dict_loader.load(
                wanted, storage_reader=HuggingFaceStorageReader(path=str(self.data)), no_dist=ranks() == 1
            )
        return wanted

    def _check_complete(self) -> None:
        for name, size in self.files.items():
            file = self.data / Path(name).name
            if not file.is_file() or file.stat().st_size != size:
                found = f"has {file.stat().st_size} bytes" if file.is_file() else "is missing"
                raise ValueError(f"its file {str(file)!r} {found}, but had {size} bytes when it was written")
        metadata = HuggingFaceStorageReader(path=str(self.data)).read_metadata()
        for name, shape in self.shapes.items():
            written = metadata.state_dict_metadata.get(name)
            held = sum(prod(c.sizes) for c in written.chunks) if isinstance(written, TensorStorageMetadata) else None
            if held != prod(shape):
                raise ValueError(f"its files do not hold the complete tensor {name!r}")


def _entry(values: Mapping[str, object], name: str) -> dict[str, Any]:
    entry = values.get(name)
    if not isinstance(entry, dict):
        raise ValueError(f"its index has no {name!r}")
    return entry


@contextmanager
def _plain_errors(what: str) -> Iterator[None]:
    """Raise errors of torch.distributed.checkpoint, which are not Exceptions, as RuntimeError with each rank's reason."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # no_dist says so
            yield
    except CheckpointException as error:
        reasons = "; ".join(f"rank {number}: {reason[0]}" for number, reason in sorted(error.failures.items()))
        raise RuntimeError(f"{what} failed on {reasons}") from None
