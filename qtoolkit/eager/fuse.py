"""The eager flow, without tracing: chains of layers fused by their names, and outputs quantized by forward hooks."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from qtoolkit.config import QuantSpec
from qtoolkit.eager.chains import CHAINS, ChainRules, chains_in, chains_of
from qtoolkit.eager.rules import FLOAT_FUNCTIONAL
from qtoolkit.errors import unknown
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.graph.passes.leaf_modules import become
from qtoolkit.graph.plan import Status
from qtoolkit.model_state import deepcopy_model, unchanged_on_error
from qtoolkit.nn import QAT_MODULES, LinkedBatchNorm, QuantModule, QuantWeighted
from qtoolkit.nn.batch_norm import identity_of, is_batch_norm, linked
from qtoolkit.nn.module import quantize_output, reset_after_loading
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer

__all__ = ["chains_of", "check_links", "fuse_modules", "link_chains", "quantize_output", "quantize_outputs"]


def fuse_modules(
    model: nn.Module, modules_to_fuse: Sequence[str] | Sequence[Sequence[str]], inplace: bool = False
) -> nn.Module:
    """Say which layers of a model follow each other, so that they are quantized as one; nothing is traced.

    Modules keep their names. In eval mode a batch norm is folded into the layer before it at once, and stands there as
    torch.nn.Identity; the layer has a new weight and bias then, so build optimizers afterwards. In training mode nothing
    changes yet: `qtoolkit.quant_modules.replace` lets the layer take over its batch norm, which trains on, and
    `qtoolkit.convert` folds it. Convert to SyncBatchNorm before the replacement. Where outputs are quantized
    (`replace(..., quantize="outputs")`), a chain has one quantizer, behind its last module. Only forward knows whether the
    modules really follow each other, and nothing else takes what is between them.

    Args:
        model: The float model, or a part of it. It is copied, unless `inplace`.
        modules_to_fuse: Chains of dotted names, or one chain: a convolution, transposed convolution or linear layer, then
            its batch norm, its activation, or both; or a batch norm with its activation.
        inplace: Change the model itself; if that fails, it is as it was.

    Returns:
        The model, or its copy.

    Raises:
        ValueError: A name is not known, or modules do not make a chain: by their types, order, channels, or modes, because
            one is in two chains, has two names, or is quantized already, or a batch norm has no running statistics.
        TypeError: `modules_to_fuse` is no list of names, nor one of such lists; or the model cannot be copied.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
        >>> replaced = qt.quant_modules.replace(fuse_modules(model, ["0", "1", "2"]))
        >>> type(replaced[0]).__name__, type(replaced[1]).__name__
        ('QuantConv2d', 'QuantBatchNorm2d')
        >>> [type(layer).__name__ for layer in fuse_modules(model.eval(), ["0", "1", "2"])]
        ['Conv2d', 'Identity', 'ReLU']
    """
    chains = chains_in(modules_to_fuse)
    if not isinstance(model, nn.Module):
        raise TypeError(f"fuse_modules: model must be a torch.nn.Module, got {type(model).__name__}.")
    ChainRules(model).check(chains)
    with unchanged_on_error(model) if inplace else nullcontext():
        own = model if inplace else deepcopy_model(model, what="fuse_modules")
        for chain in chains:
            first, second = (own.get_submodule(name) for name in chain[:2])
            if is_batch_norm(second) and not second.training:
                _fold(first, second)
        setattr(own, CHAINS, (*vars(own).get(CHAINS, ()), *chains))
    return own


def link_chains(
    model: nn.Module, strategy: str, apart: Mapping[str, str] | None = None
) -> dict[str, tuple[Status, str]]:
    """Let the quantized layers of a model's chains take over the batch norms behind them.

    Args:
        model: The model, whose layers are replaced.
        strategy: What a layer does in training, one of `qtoolkit.nn.batch_norm.STRATEGIES`.
        apart: Batch norms that stay as they are, with the reason.

    Returns:
        The status of each batch norm, with the reason.

    Raises:
        ValueError: The strategy is not known or does not fit, or a module of a chain is not there any more.
    """
    statuses: dict[str, tuple[Status, str]] = {}
    for chain in chains_of(model):
        layer, bn = _parts(model, chain)[:2]
        if is_batch_norm(layer) or not is_batch_norm(bn) or isinstance(bn, LinkedBatchNorm):
            continue
        if not isinstance(layer, QuantWeighted) or layer.weight_quantizer is None:
            statuses[chain[1]] = ("float", f"float: the weight of {chain[0]!r}, its layer, stays float")
        elif apart and chain[1] in apart:
            statuses[chain[1]] = ("float", apart[chain[1]])
        else:
            become(bn, linked(bn, strategy, chain[1]))
            layer.link_batch_norm(bn)  # type: ignore[arg-type]  # it has become one
            statuses[chain[1]] = ("fused", f"{chain[0]!r}, the layer before it, computes it")
    has_links = any(status == "fused" for status, _ in statuses.values())
    if has_links and reset_after_loading not in model._load_state_dict_post_hooks.values():
        model.register_load_state_dict_post_hook(reset_after_loading)  # type: ignore[no-untyped-call]
    return statuses


def check_links(model: nn.Module) -> None:
    """Check that the batch norms that layers have taken over are still in the model.

    Raises:
        ValueError: Another one is in the place of one of them; names it.
    """
    prepared = [part for part in model.modules() if isinstance(part, QuantizedGraphModule)]  # they relink themselves
    known = {part for graph in prepared for part in graph.modules()}
    norms = {f".{name}": module for name, module in model.named_modules() if is_batch_norm(module)}
    for name, layer in model.named_modules():
        bn = layer.batch_norm if isinstance(layer, QuantWeighted) and layer not in known else None
        others = [] if bn is None else [m for path, m in norms.items() if path.endswith(f".{bn.name}")]
        if bn is not None and others and bn not in others:
            raise ValueError(
                f"the batch norm {bn.name!r} that layer {name!r} has taken over is not in the model any more: a "
                f"{type(others[0]).__name__} is in its place. Call torch.nn.SyncBatchNorm.convert_sync_batchnorm, or "
                f"whatever put it there, before qtoolkit.quant_modules.replace."
            )


def quantize_outputs(model: nn.Module, specs: Mapping[str, QuantSpec]) -> dict[str, tuple[Status, str]]:
    """Quantize the outputs of modules, those of a chain behind its last module, unless they are quantized already.

    Args:
        model: The model.
        specs: How the output of each module is quantized, by its dotted name; of a chain by that of its first module.

    Returns:
        The status of each module that had none as a quantized layer, with the reason.
    """
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), None)
    ends = {chain[0]: chain for chain in chains_of(model)}
    statuses: dict[str, tuple[Status, str]] = {}
    for name, spec in specs.items():
        chain = ends.get(name, (name,))
        _quantize_output(model.get_submodule(chain[-1]), spec, chain[-1], device)
        if len(chain) > 1:
            statuses[chain[-1]] = ("quantized", f"its output is quantized, as that of the chain {', '.join(chain)}")
        elif not isinstance(model.get_submodule(name), QuantModule):
            statuses[name] = ("quantized", "its output is quantized")
    return statuses


def _quantize_output(module: nn.Module, spec: QuantSpec, name: str, device: torch.device | None) -> None:
    attribute = "activation_post_process" if type(module).__name__ == FLOAT_FUNCTIONAL else "output_quantizer"
    held = getattr(module, attribute, None)
    if isinstance(held, TensorQuantizer):
        return
    quantizer = TensorQuantizer(spec, name=f"{name}.{attribute}")
    if device is not None:
        quantizer.to(device)
    setattr(module, attribute, quantizer.train(module.training))
    if attribute == "output_quantizer":  # a FloatFunctional calls its own
        module.register_forward_hook(quantize_output, prepend=True)


# ---- folding


def _fold(layer: nn.Module, bn: nn.Module) -> None:
    """Fold a batch norm into the float layer before it; torch.nn.Identity, with the hooks of the batch norm, stays there."""
    quantized = QAT_MODULES[type(layer)].from_float(layer, None)
    if not isinstance(quantized, QuantWeighted):
        raise TypeError(f"a {type(layer).__name__} has no one weight to fold a batch norm into.")
    quantized.fold_batch_norm(bn)
    become(layer, quantized.to_float())
    if isinstance(layer, nn.Linear):
        layer.register_forward_pre_hook(_check_rows)
    become(bn, identity_of(bn))


def _check_rows(module: nn.Module, args: Any) -> None:
    """Check the input of a linear layer with a batch norm folded in: a forward pre-hook."""
    if args and args[0].dim() != 2:
        raise ValueError(
            f"fuse_modules: a batch norm that is folded into a linear layer needs inputs of 2 dimensions, got "
            f"{tuple(args[0].shape)}: BatchNorm1d then normalizes dimension 1, not the features. Leave the two out of "
            f"modules_to_fuse."
        )


def _parts(model: nn.Module, chain: Sequence[str]) -> list[nn.Module]:
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in chain:
        if name not in modules:
            raise ValueError(
                f"replace: the chain {', '.join(chain)} of fuse_modules: "
                + unknown("module", name, filter(None, modules))
            )
    return [modules[name] for name in chain]
