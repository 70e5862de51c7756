"""The forward of a prepared model: units where it trains, and the nodes of its graph, by block, everywhere else."""

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakSet, ref

from torch import fx, nn

from qtoolkit._snapshot import Snapshot
from qtoolkit.graph.block_calls import ROOT, BlockCall
from qtoolkit.graph.blocks import NO_CALL, TracedBlock, find_module
from qtoolkit.graph.placement.sources import linked_in, warn_of_adapters
from qtoolkit.graph.program.chains import Chain, FunctionPair
from qtoolkit.graph.program.division import Division
from qtoolkit.graph.program.in_units import Products, UnitWriter
from qtoolkit.graph.program.memory_format import in_channels_last
from qtoolkit.graph.program.units.base import names_around
from qtoolkit.graph.program.writer import Writer, compiled
from qtoolkit.nn.hooks import all_watched, is_watched
from qtoolkit.running import Run, running

Forward = Callable[..., Any]


def compile_forward(
    gm: fx.GraphModule, calls: tuple[BlockCall, ...], products: Products | None, plain: Forward
) -> Forward:
    """Compile the program of a model and of each block that can run its own part of the graph.

    The other blocks get the reason why they cannot. `calls` are of the model and its blocks: none while it is made, which
    compiles nothing. Without `products` the forward calls only ops of the graph. `plain` is torch.fx's forward.

    The forward of the model runs, in training, the units of the whole graph in one piece; in eval mode, in exports and while a
    block is watched (it has a hook, for example), it calls the blocks.
    """
    if not calls:
        return plain
    division, blocks = Division(gm, calls), _Blocks(gm)
    if division.of_eval_mode or division.of_training_mode:  # torch.fx's code runs all nodes in both modes
        plain = compiled(Writer(division.whole(), ROOT).write(), "")
    whole = _with_units(gm, division.whole(), ROOT, products, plain)
    for block, *_ in blocks.places:
        block.set_code(None, gm, division.reasons.get(block, NO_CALL))
    for index, part in division.parts.items():
        part.block.set_code(_entered(_code_of(part.block, division, index, products)), gm)
    divided = _code_of(gm, division, ROOT, products) if division.parts else whole
    return _by_block(gm, in_channels_last(gm, whole), in_channels_last(gm, divided), blocks)


def _entered(code: Forward) -> Forward:
    """Return the forward of a block, which asks for the present run."""

    @functools.wraps(code)
    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        return code(running(), self, *args, **kwargs)

    return forward


def _code_of(owner: nn.Module, division: Division, index: int, products: Products | None) -> Forward:
    """Compile the program of a part, which belongs to the model or a block, as `_with_units` returns it."""
    code = compiled(Writer(division, index).write(), division.calls[index].block)
    return _with_units(owner, division, index, products, code)


def _with_units(owner: nn.Module, division: Division, index: int, products: Products | None, plain: Forward) -> Forward:
    """Return a forward of a part that runs units where its owner trains, and no tracer or hook needs the nodes of the graph.

    Its first argument is the run.
    """
    writer = None if products is None else UnitWriter(division, index, products)
    units = plain if writer is None or not writer.changed else compiled(writer.write(), division.calls[index].block)
    owner_ref = ref(owner)

    @functools.wraps(plain)
    def forward(run: Run, self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        trains = self.training and _is_its_own(run, self, owner_ref)
        as_units = trains and run.own_ops and not all_watched()
        return (units if as_units else plain)(self, *args, **kwargs)

    return forward


def _by_block(gm: nn.Module, whole: Forward, divided: Forward, blocks: "_Blocks") -> Forward:
    """Return a forward that calls the blocks in eval mode, where nothing is gained without them, and where it must."""
    owner_ref, links = ref(gm), _Links(gm)

    @functools.wraps(whole)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run, watched = running(), blocks.are_watched()
        if watched:
            blocks.check()
        links.renew(run)
        # Exported programs name the blocks.
        wants_blocks = not self.training or run.exported or watched
        return (divided if wants_blocks and _is_its_own(run, self, owner_ref) else whole)(run, self, *args, **kwargs)

    return forward


def _is_its_own(run: Run, model: nn.Module, owner: ref[nn.Module]) -> bool:
    """Return whether a model is the one that its forward was made for, whose blocks and modules of units replicas share."""
    return run.compiled or owner() is model


def calls_now(gm: fx.GraphModule, calls: tuple[BlockCall, ...]) -> list[Chain | FunctionPair]:
    """Return the ops that are one call in a training forward now: of the parts while a block is watched."""
    division = Division(gm, calls)
    if not _Blocks(gm).are_watched():
        division = division.whole()
    writers = [UnitWriter(division, index, {}) for index in (ROOT, *division.parts)]
    found: list[Chain | FunctionPair] = []
    for writer in writers:
        found += [*writer.chains, *writer.pairs()]
    return found


def runs_its_graph(gm: fx.GraphModule) -> bool:
    """Return whether a call of a model runs the nodes of its graph and nothing else, as the model now is.

    Hooks and wrappers of the model and of its blocks, and other forwards of them, run besides.
    """
    return not (is_watched(gm) or _Blocks(gm).are_watched())


class _Links:
    """The layers of a model that know the quantizers of their inputs, until other modules take their places."""

    def __init__(self, gm: Any) -> None:
        self.gm = ref(gm)
        self._note(gm)

    def _note(self, gm: Any) -> None:
        self.layers = WeakSet(linked_in(gm))
        targets = (str(node.target) for node in gm.graph.nodes if node.op == "call_module")
        holders = (find_module(gm, name) for name in {name for target in targets for name in names_around(target)})
        self.snapshot = Snapshot(tuple(holder._modules for holder in holders if holder is not None), frozenset())

    def renew(self, run: Run) -> None:
        """Link the layers again if a module has been replaced since; a compiled forward does so when the mode is set."""
        gm = None if run.compiled or self.snapshot.holds() else self.gm()
        if gm is None:
            return
        present = set(gm.modules())
        for layer in [layer for layer in self.layers if layer not in present]:
            layer.unlink()
        gm.link_sources()
        self._note(gm)
        warn_of_adapters(gm.graph)


class _Blocks:
    """The blocks of a model, each with the module that holds it and its name there."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.places: list[tuple[TracedBlock, nn.Module, str]] = []
        for block in gm.modules():
            if isinstance(block, TracedBlock) and find_module(gm, block._block_name) is block:
                parent, _, name = block._block_name.rpartition(".")
                self.places.append((block, find_module(gm, parent) or gm, name))

    def are_watched(self) -> bool:
        """Return whether a block has hooks, a wrapper or another forward, so that it must be called."""
        return all_watched() or any(
            holder._modules.get(name) is not block or is_watched(block) for block, holder, name in self.places
        )

    def check(self) -> None:
        """Raise RuntimeError if hooks or a wrapper of a block would have no effect."""
        for block, holder, name in self.places:
            if (held := holder._modules.get(name)) is not block or is_watched(block):
                block.check_watched(held)
