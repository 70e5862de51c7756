"""Fusion without tracing: chains of modules that the user names, and outputs quantized by forward hooks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from qtoolkit.config import QuantSpec
from qtoolkit.eager.record import chains_of, record_of, set_record
from qtoolkit.eager.rules import FLOAT_FUNCTIONAL
from qtoolkit.errors import check_flags, unknown, with_article
from qtoolkit.graph.capture.trace import check_not_wrapped
from qtoolkit.graph.nodes import kind_of_module
from qtoolkit.model_state import changing, check_module, device_of
from qtoolkit.nn import QAT_MODULES, LinkedBatchNorm, QuantModule, QuantWeighted
from qtoolkit.nn.batch_norm import identity_of, is_batch_norm, linked
from qtoolkit.nn.computed_weights import bake, has_weight, mask
from qtoolkit.nn.module import quantize_output, reset_after_loading
from qtoolkit.nn.replacement import replace_in_place
from qtoolkit.op_kinds.table import kind_of_type
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer
from qtoolkit.shared_modules import modules_by_name, names_by_module
from qtoolkit.verdicts import Cause, Status, Verdict


def fuse_modules(
    model: nn.Module, modules_to_fuse: Sequence[str] | Sequence[Sequence[str]], inplace: bool = False
) -> nn.Module:
    """Mark consecutive modules of a model to be quantized as one op, without tracing the model.

    Modules keep their names. In eval mode each batch norm is folded into the layer before it at once, and is replaced by
    torch.nn.Identity. The layer then has a new weight and bias, so build optimizers afterwards. In training mode the modules
    do not change: `qtoolkit.quant_modules.replace` links the batch norm to the layer, it keeps training, and
    `qtoolkit.convert` folds it. Convert to SyncBatchNorm before the replacement. With `replace(..., quantize="outputs")`, a
    chain has one quantizer, for the output of its last module. The caller must ensure that forward calls the modules one
    after the other, and that no other module uses the tensors between them.

    Args:
        model: The float model, or a part of it. It is copied, unless `inplace`.
        modules_to_fuse: Chains of dotted names, or one chain: a convolution, transposed convolution or linear layer, then
            its batch norm, its activation, or both; or a batch norm and its activation.
        inplace: Change the model itself. If the call fails, the model is unchanged.

    Returns:
        The model, or its copy.

    Raises:
        ValueError: A name is not known, or modules do not make a chain because of their types, order, channels or modes. Or a
            module is in two chains, has two names or is already quantized, or a batch norm has no running statistics.
        TypeError: `modules_to_fuse` is neither a list of names nor a list of such lists, or the model cannot be copied.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
        >>> replaced = qt.quant_modules.replace(fuse_modules(model, ["0", "1", "2"]), backend="tensorrt")
        >>> type(replaced[0]).__name__, type(replaced[1]).__name__
        ('QuantConv2d', 'QuantBatchNorm2d')
        >>> [type(layer).__name__ for layer in fuse_modules(model.eval(), ["0", "1", "2"])]
        ['Conv2d', 'Identity', 'ReLU']
    """
    check_flags("fuse_modules", inplace=inplace)
    chains = chains_in(modules_to_fuse)
    check_module(model, "fuse_modules")
    check_not_wrapped(model, "fuse_modules")
    ChainRules(model).check(chains)
    with changing(model, inplace, "fuse_modules") as own:
        for chain in chains:
            first, second = (own.get_submodule(name) for name in chain[:2])
            if is_batch_norm(second) and not second.training:
                _fold(first, second)
        record = record_of(own)
        set_record(own, replace(record, chains=(*record.chains, *chains)))
    return own


def link_chains(model: nn.Module, strategy: str, not_linked: Mapping[str, Verdict]) -> dict[str, Verdict]:
    """Link the batch norms of a model's chains to the QAT layers before them; return the verdict on each batch norm, by name.

    `strategy` is one of `qtoolkit.nn.batch_norm.STRATEGIES`, `not_linked` has the verdicts on batch norms that are not
    linked. Raises ValueError for a strategy that does not fit, and for a module of a chain that was removed from the
    model.
    """
    verdicts: dict[str, Verdict] = {}
    for chain in chains_of(model):
        layer, bn = _parts(model, chain)[:2]
        if is_batch_norm(layer) or not is_batch_norm(bn) or isinstance(bn, LinkedBatchNorm):
            continue
        if not isinstance(layer, QuantWeighted) or layer.weight_quantizer is None:
            why = f"the weight of {chain[0]!r}, its layer, stays float"
            verdicts[chain[1]] = Verdict.left_float(Cause.NOT_FOLDED, why)
        elif (unfit := layer.why_batch_norm_stays()) is not None:
            verdicts[chain[1]] = Verdict.left_float(Cause.NOT_FOLDED, f"a batch norm that cannot be folded ({unfit})")
        elif chain[1] in not_linked:
            verdicts[chain[1]] = not_linked[chain[1]]
        else:
            replace_in_place(bn, linked(bn, strategy, chain[1]))
            layer.link_batch_norm(bn)  # type: ignore[arg-type]  # now a LinkedBatchNorm
            text = f"{chain[0]!r}, the layer before it, computes it"
            verdicts[chain[1]] = Verdict(Status.FUSED, Cause.FOLDED, text)
    # A second call must not register the hook again: torch offers no public way to ask.
    has_links = any(verdict.status is Status.FUSED for verdict in verdicts.values())
    if has_links and reset_after_loading not in model._load_state_dict_post_hooks.values():
        model.register_load_state_dict_post_hook(reset_after_loading)  # type: ignore[no-untyped-call]
    return verdicts


def quantize_outputs(model: nn.Module, specs: Mapping[str, QuantSpec]) -> dict[str, Verdict]:
    """Quantize the outputs of modules and of chains (by the first module), unless they are already quantized.

    Returns the verdict on each module that is not a QAT layer, and on each last module of a chain, by name.
    """
    device = device_of(model)
    chains = {chain[0]: chain for chain in chains_of(model)}
    verdicts: dict[str, Verdict] = {}
    for name, spec in specs.items():
        chain = chains.get(name, (name,))
        _quantize_output(model.get_submodule(chain[-1]), spec, chain[-1], device)
        if len(chain) > 1:
            text = f"its output is quantized, as the output of the chain {', '.join(chain)}"
            verdicts[chain[-1]] = Verdict.quantized(Cause.OUTPUT, text)
        elif not isinstance(model.get_submodule(name), QuantModule):
            verdicts[name] = Verdict.quantized(Cause.OUTPUT, "its output is quantized")
    return verdicts


def _quantize_output(module: nn.Module, spec: QuantSpec, name: str, device: torch.device | None) -> None:
    attribute = "activation_post_process" if type(module).__name__ == FLOAT_FUNCTIONAL else "output_quantizer"
    held = getattr(module, attribute, None)
    if isinstance(held, TensorQuantizer):
        return
    quantizer = TensorQuantizer(spec, name=f"{name}.{attribute}")
    if device is not None:
        quantizer.to(device)
    setattr(module, attribute, quantizer.train(module.training))
    if attribute == "output_quantizer":  # a FloatFunctional calls its activation_post_process itself
        module.register_forward_hook(quantize_output, prepend=True)


# ---- folding


def _fold(layer: nn.Module, bn: nn.Module) -> None:
    """Fold a batch norm into the float layer before it, and replace it by torch.nn.Identity with its hooks."""
    masks = bake(layer)
    quantized = _weighted(layer)
    quantized.fold_batch_norm(bn)
    replace_in_place(layer, quantized.to_float())
    mask(layer, masks)
    if isinstance(layer, nn.Linear):
        layer.register_forward_pre_hook(_check_rows)
    replace_in_place(bn, identity_of(bn))


def _weighted(layer: nn.Module) -> QuantWeighted:
    """Return the QAT layer of a float layer, without quantizers."""
    weighted = QAT_MODULES[type(layer)].from_float(layer, None)
    if not isinstance(weighted, QuantWeighted):
        raise TypeError(
            f"a batch norm cannot be folded into {with_article(type(layer))}: it must have a single weight."
        )
    return weighted


def _check_rows(module: nn.Module, args: Sequence[Tensor]) -> None:
    """Check the input of a linear layer with a folded batch norm; a forward pre-hook."""
    if args and args[0].dim() != 2:
        raise ValueError(
            f"fuse_modules: a linear layer with a folded batch norm needs inputs of 2 dimensions, got shape "
            f"{tuple(args[0].shape)}: BatchNorm1d normalizes dimension 1 of it, which is not the features. Remove the two from "
            f"modules_to_fuse."
        )


def _parts(model: nn.Module, chain: Sequence[str]) -> list[nn.Module]:
    modules = modules_by_name(model)
    for name in chain:
        if name not in modules:
            raise ValueError(
                f"replace: the chain {', '.join(chain)} of fuse_modules: "
                + unknown("module", name, filter(None, modules))
            )
    return [modules[name] for name in chain]


# ---- which modules make a chain


ORDERS = (("layer", "batch norm"), ("layer", "batch norm", "activation"), ("layer", "activation"))
ORDERS_WITHOUT_LAYER = (("batch norm", "activation"),)
# Numbers of dimensions of the weights of the layers that a batch norm can follow; other types of batch norms follow all.
FOLLOWS: Mapping[type[nn.Module], tuple[int, ...]] = {
    nn.BatchNorm1d: (2, 3),
    nn.BatchNorm2d: (4,),
    nn.BatchNorm3d: (5,),
}


def chains_in(modules_to_fuse: object) -> list[tuple[str, ...]]:
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
        layer, bn = (self.modules[name] for name in chain[:2])
        if not (is_batch_norm(bn) and type(layer) in QAT_MODULES):
            return
        mean = bn.running_mean
        if not isinstance(mean, Tensor) or bn.running_var is None:
            raise ValueError(
                f"fuse_modules: {chain[1]!r} has no running statistics to fold; set track_running_stats=True."
            )
        weighted = _weighted(layer)
        channels, dims = weighted.channels(), weighted.weight.dim()
        if dims not in FOLLOWS.get(type(bn), (dims,)) or mean.numel() != channels:
            raise ValueError(
                f"fuse_modules: {chain[1]!r} must be a batch norm for the {channels} channels of {chain[0]!r}, a "
                f"{type(layer).__name__}; got {with_article(type(bn))} of {mean.numel()}."
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
