"""The blocks of a traced model: containers of its layers that keep their names and kinds, but whose forward never runs."""

from typing import Any, NoReturn

from torch import nn

from qtoolkit.graph.capture.shapes import is_plain


class TracedBlock(nn.Module):
    """A block of the model that was traced: it holds the block's layers, which the graph of the whole model calls.

    It can be read like the block: by attributes (layers, numbers, strings and None) and, where the block is a Sequential, a
    ModuleList or a ModuleDict, by index, `len` and iteration. Its own forward is never called. Calling it, wrapping it and
    registering hooks on it therefore raise RuntimeError; `qtoolkit.prepare(..., skip=["its name"])` keeps a block that is a
    module of its own.

    Attributes:
        block_type: The name of the block's type.
    """

    block_type: str

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise RuntimeError."""
        self._refuse("called on its own")

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise RuntimeError."""
        self._refuse("given hooks, as sharding and checkpointing do")

    register_forward_hook = register_full_backward_hook = register_full_backward_pre_hook = register_forward_pre_hook

    def __setattr__(self, name: str, value: Any) -> None:
        check_replaced(self, name, value)
        super().__setattr__(name, value)

    def _get_name(self) -> str:
        return self.block_type

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"a {self.block_type} of a prepared model cannot be {what}: its forward is part of the graph of the whole model, "
            f"which calls the layers in it. Do so with the whole model or with single layers, or call "
            f"qtoolkit.prepare(..., skip=[its name]), which keeps it as a module."
        )


class TracedSequential(TracedBlock, nn.Sequential):
    """A Sequential of the model that was traced."""


class TracedModuleList(TracedBlock, nn.ModuleList):
    """A ModuleList of the model that was traced."""


class TracedModuleDict(TracedBlock, nn.ModuleDict):
    """A ModuleDict of the model that was traced."""


CONTAINERS = {nn.Sequential: TracedSequential, nn.ModuleList: TracedModuleList, nn.ModuleDict: TracedModuleDict}


def make_traced(holder: nn.Module, block: nn.Module) -> None:
    """Make a bare module, which holds the layers of a block, a TracedBlock of the block's kind."""
    if type(holder) is not nn.Module or type(block) is nn.Module:
        return
    holder.__class__ = next((ours for kind, ours in CONTAINERS.items() if isinstance(block, kind)), TracedBlock)
    held = ((name, value) for name, value in vars(block).items() if is_plain(value) and not name.startswith("_"))
    vars(holder).update({name: value for name, value in held if name != "training"})
    vars(holder)["block_type"] = block.block_type if isinstance(block, TracedBlock) else type(block).__name__


def check_replaced(parent: nn.Module, name: str, value: object) -> None:
    """Raise RuntimeError if an attribute that is set replaces a TracedBlock, or wraps it."""
    block = parent.__dict__.get("_modules", {}).get(name)
    if isinstance(block, TracedBlock) and value is not block:
        block._refuse(f"replaced or wrapped, here {name!r} by a {type(value).__name__}")
