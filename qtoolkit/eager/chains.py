"""Chains of modules that the user names: which modules make a chain."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from qtoolkit.eager.record import chains_of
from qtoolkit.errors import unknown, with_article
from qtoolkit.graph.nodes import kind_of_module
from qtoolkit.nn import QAT_MODULES, LinkedBatchNorm, QuantModule
from qtoolkit.nn.batch_norm import is_batch_norm
from qtoolkit.nn.computed_weights import has_weight
from qtoolkit.op_kinds.table import kind_of_type
from qtoolkit.shared_modules import modules_by_name, names_by_module

ORDERS = (("layer", "batch norm"), ("layer", "batch norm", "activation"), ("layer", "activation"))
ORDERS_WITHOUT_LAYER = (("batch norm", "activation"),)
# Numbers of dimensions of the weights of the layers that a batch norm can follow; other types of batch norms follow all.
FOLLOWS: Mapping[type[nn.Module], tuple[int, ...]] = {
    nn.BatchNorm1d: (2, 3),
    nn.BatchNorm2d: (4,),
    nn.BatchNorm3d: (5,),
}


def chains_in(modules_to_fuse: Any) -> list[tuple[str, ...]]:
    """Return the chains in an argument: a list of names, or a list of such lists; TypeError for anything else."""
    given = list(modules_to_fuse) if isinstance(modules_to_fuse, list | tuple) else None
    chains = [given] if given and all(isinstance(part, str) for part in given) else given
    if chains is None or not all(isinstance(c, list | tuple) and all(isinstance(n, str) for n in c) for c in chains):
        raise TypeError(
            f"fuse_modules: modules_to_fuse must be a list of names, or a list of such lists, got {modules_to_fuse!r}."
        )
    return [tuple(chain) for chain in chains]


class ChainRules:
    """The rules that the modules of a chain must satisfy."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = modules_by_name(model)
        self.names = names_by_module(model)
        self.taken = {name: chain for chain in chains_of(model) for name in chain}

    def check(self, chains: Sequence[tuple[str, ...]]) -> None:
        """Raise ValueError if modules do not make a chain."""
        for chain in chains:
            for name in chain:
                self._module(name, chain)
                self.taken[name] = chain
            self._modes(chain)
            self._order(chain)
            self._batch_norm(chain)

    def _module(self, name: str, chain: tuple[str, ...]) -> None:
        if name not in self.modules:
            raise ValueError("fuse_modules: " + unknown("module", name, filter(None, self.modules)))
        module = self.modules[name]
        if isinstance(module, QuantModule | LinkedBatchNorm):
            raise ValueError(
                f"fuse_modules: {name!r} is already quantized; call fuse_modules on the float model, then replace."
            )
        if len(self.names[module]) > 1:
            raise ValueError(
                f"fuse_modules: {', '.join(map(repr, self.names[module]))} are names of one module, which follows several "
                f"others; create a separate module for each chain."
            )
        if name in self.taken:
            raise ValueError(
                f"fuse_modules: {name!r} is in two chains, {_listed(self.taken[name])} and {_listed(chain)}; put it in one."
            )

    def _modes(self, chain: tuple[str, ...]) -> None:
        modes = {name: "training" if self.modules[name].training else "eval" for name in chain}
        if len(set(modes.values())) > 1:
            words = ", ".join(f"{name} ({mode})" for name, mode in modes.items())
            raise ValueError(
                f"fuse_modules: the modules of a chain must be in the same mode, got {words}; call train() or eval()."
            )

    def _order(self, chain: tuple[str, ...]) -> None:
        if tuple(_role_of(self.modules[name]) for name in chain) in (*ORDERS, *ORDERS_WITHOUT_LAYER):
            return
        words = ", ".join(f"{name} ({type(self.modules[name]).__name__})" for name in chain)
        raise ValueError(
            f"fuse_modules: a chain must be a convolution, transposed convolution or linear layer of torch.nn, then its batch "
            f"norm, its activation, or both; or a batch norm with its activation; got {words}."
        )

    def _batch_norm(self, chain: tuple[str, ...]) -> None:
        layer: Any = self.modules[chain[0]]
        bn: Any = self.modules[chain[1]]
        if not (is_batch_norm(bn) and type(layer) in QAT_MODULES):
            return
        if bn.running_mean is None or bn.running_var is None:
            raise ValueError(
                f"fuse_modules: {chain[1]!r} has no running statistics to fold; set track_running_stats=True."
            )
        quantized: Any = QAT_MODULES[type(layer)].from_float(layer, None)
        channels = quantized.channels()
        if (
            layer.weight.dim() not in FOLLOWS.get(type(bn), (layer.weight.dim(),))
            or bn.running_mean.numel() != channels
        ):
            raise ValueError(
                f"fuse_modules: {chain[1]!r} must be a batch norm for the {channels} channels of {chain[0]!r}, a "
                f"{type(layer).__name__}; got {with_article(type(bn))} of {bn.running_mean.numel()}."
            )


def _role_of(module: nn.Module) -> str:
    qat_type = QAT_MODULES.get(parametrize.type_before_parametrizations(module))
    if "forward" in vars(module):
        return "patched"
    if qat_type is not None and kind_of_type(qat_type).layer and has_weight(module):
        return "layer"
    if is_batch_norm(module):
        return "batch norm"
    return "activation" if kind_of_module(module).activation else "other"


def _listed(chain: Sequence[str]) -> str:
    return f"[{', '.join(chain)}]"
