"""smooth_quant(): move outliers of activations into the weights after a norm (arXiv 2211.10438)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from qtoolkit.batches import not_finite
from qtoolkit.errors import check_flags, check_known, check_sequence
from qtoolkit.model_inputs import clone_tensors, tensors_of
from qtoolkit.model_state import deepcopy_model, evaluating, random_state_kept, removing, values_unchanged_on_error
from qtoolkit.progress import batches_of
from qtoolkit.quantizers.codes import version_of
from qtoolkit.running import running
from qtoolkit.shared_modules import first_names, owners_of_parameters
from qtoolkit.tuning.runs.batches import Batches, Forward
from qtoolkit.tuning.unchanged import check_float, largest_change

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Smoothed:
    """A norm with smoothed outputs.

    Attributes:
        norm: Its dotted name.
        layers: The linear layers that use its output.
        before: The largest magnitude of its outputs relative to the median channel, before smoothing.
        after: The same ratio after smoothing.
    """

    norm: str
    layers: tuple[str, ...]
    before: float
    after: float


@dataclass(frozen=True)
class SmoothQuant(Generic[M]):
    """The result of `smooth_quant`. It prints as a list.

    Attributes:
        model: The model, of the same type.
        groups: The norms, with their layers.
        skipped: The reason for each unchanged norm, by name.
        change: The largest change of an output, relative to the largest output.
    """

    model: M
    groups: tuple[Smoothed, ...]
    skipped: Mapping[str, str]
    change: float

    def __str__(self) -> str:
        lines = [f"{len(self.groups)} norms smoothed; outputs changed by {self.change:.1e}"]
        lines += [
            f"{g.norm} -> {', '.join(g.layers)}: largest channel {g.before:.3g} -> {g.after:.3g} of the median"
            for g in self.groups
        ]
        return "\n".join(lines + [f"{name}: unchanged: {why}" for name, why in self.skipped.items()])


def smooth_quant(
    model: M,
    batches: Iterable[object],
    alpha: float = 0.5,
    skip: Sequence[str] = (),
    forward: Forward | None = None,
    inplace: bool = False,
    progress: bool = True,
) -> SmoothQuant[M]:
    """Divide the channels between a norm and the linear layers after it, so that activations and weights share the outliers.

    Each channel of the norm's output is divided by s = max|X|^alpha / max|W|^(1 - alpha), in the norm's scale and shift, and
    the corresponding column of each linear layer is multiplied by s. The function of the model stays the same; this is checked.
    The model is not traced: the layers after each norm are found by running the model. A norm is skipped if any other op uses
    its output, such as a residual connection after the norm.

    Args:
        model: A float model, before `qtoolkit.prepare` or `qtoolkit.quant_modules.replace`. Norms are LayerNorm, RMSNorm and
            modules of other packages with these class names and a `weight` that scales each channel.
        batches: As for `qtoolkit.calibrate`.
        alpha: From 0 (activations keep their outliers) to 1 (weights get all of them).
        skip: Dotted names of norms to leave unchanged.
        forward: forward(model, batch), for batches that cannot be passed to the model directly. Its result is compared too.
        inplace: Change the model itself instead of a copy.
        progress: Show a progress bar.

    Returns:
        The model, the norms with their layers, and the reasons for unchanged norms.

    Raises:
        TypeError: An argument is of a wrong type, or the model has quantizers.
        ValueError: alpha is not in [0, 1], a name in `skip` is unknown, there is no batch, or the output of a norm contains
            NaN.
        RuntimeError: The outputs would change; the model is then unchanged.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 4)).eval()
        >>> _ = torch.nn.init.constant_(model[0].weight[3:4], 50.0)  # an outlier
        >>> result = qt.tuning.smooth_quant(model, [torch.randn(16, 8)], progress=False)
        >>> [(group.norm, group.layers) for group in result.groups], result.groups[0].after < result.groups[0].before / 4
        ([('0', ('1',))], True)
    """
    check_flags("smooth_quant", inplace=inplace, progress=progress)
    check_float(model, "smooth_quant", "smooth")
    if not 0 <= alpha <= 1:
        raise ValueError(f"smooth_quant: alpha must be in [0, 1], got {alpha}.")
    check_sequence(skip, "smooth_quant", "skip")
    data = Batches(batches, forward, "smooth_quant")
    own = model if inplace else deepcopy_model(model, what="smooth_quant")
    names = first_names(own)
    norms = {name: module for module, name in names.items() if _is_norm(module)}
    for name in skip:
        check_known("norm in skip of smooth_quant", name, norms)
    with torch.no_grad(), random_state_kept(own), evaluating(own):
        uses = _UsesOfNorms(own, norms)
        batch, before = _watch(own, data, uses, progress)
        groups, skipped = _groups(uses, names, skip, _shared(own))
        for name in groups:
            if not bool(torch.isfinite(uses.amax[name]).all()):
                raise not_finite("smooth_quant", f"the output of the norm {name!r}")
        with values_unchanged_on_error(list(own.parameters())):
            smoothed = tuple(
                _smooth(name, norms[name], layers, uses.amax[name], alpha, names) for name, layers in groups.items()
            )
            change = largest_change(before, tensors_of(data.run(own, batch)), "smooth_quant")
    return SmoothQuant(own, smoothed, skipped, change)


def _is_norm(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    named = type(module).__name__.endswith(("LayerNorm", "RMSNorm"))
    return named and weight is not None and weight.dim() == 1


class _UsesOfNorms(TorchFunctionMode):
    """The users of norms' outputs in a run of the model, and the largest magnitude of each channel."""

    def __init__(self, model: nn.Module, norms: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.norms = norms
        linear = [module for module in model.modules() if type(module) is nn.Linear]
        self.owners: dict[int, list[nn.Linear]] = {}
        for layer in linear:
            self.owners.setdefault(id(layer.weight), []).append(layer)
        self.layers: dict[str, dict[nn.Linear, None]] = {name: {} for name in norms}  # those that take its output
        self.others: dict[str, dict[str, None]] = {name: {} for name in norms}  # the other functions that take it
        # the norms with outputs that each layer uses; None for other tensors
        self.sources: dict[nn.Linear, set[str | None]] = {layer: set() for layer in linear}
        self.amax: dict[str, Tensor] = {}
        self.outputs: dict[int, tuple[str, Tensor]] = {}  # of this run; the tensors stay alive, so that ids stay theirs

    def hear(self, name: str, norm: nn.Module, args: object, output: Tensor) -> None:
        """Forward hook: record an output of a norm."""
        amax = output.detach().abs().reshape(-1, output.size(-1)).amax(0).float()
        self.amax[name] = torch.maximum(self.amax[name], amax) if name in self.amax else amax
        self.outputs[id(output)] = name, output  # last: what was called here is no use of it

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs, run = kwargs or {}, running()
        taken = [(tensor, version_of(run, tensor)) for tensor in tensors_of((*args, *kwargs.values()))]
        result = func(*args, **kwargs)
        if func is F.linear:
            self._linear(*args, **kwargs)
        elif isinstance(result, Tensor | tuple | list) and tensors_of(result):
            for tensor, version in taken:  # a result that is the tensor itself, unchanged, is no use of it
                if id(tensor) in self.outputs and (result is not tensor or version_of(run, tensor) != version):
                    self.others[self.outputs[id(tensor)][0]].setdefault(getattr(func, "__name__", str(func)))
        return result

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        name = self.outputs[id(input)][0] if id(input) in self.outputs else None
        owners = self.owners.get(id(weight), [])
        for layer in owners:
            self.sources[layer].add(name)
        if name is not None and len(owners) == 1:
            self.layers[name].setdefault(owners[0])
        elif name is not None:
            self.others[name].setdefault("linear, with a weight of several layers or of no layer")


def _watch(model: nn.Module, data: Batches, uses: _UsesOfNorms, progress: bool) -> tuple[object, list[Tensor]]:
    """Run all batches; return the first one with the tensors of its result."""
    first: list[tuple[object, list[Tensor]]] = []
    handles = [norm.register_forward_hook(partial(uses.hear, name)) for name, norm in uses.norms.items()]
    with removing(handles):
        for batch in batches_of("smooth", data, progress):
            with uses:
                result = data.run(model, batch)
            returned = {id(tensor) for tensor in tensors_of(result)}
            for key, (name, _) in uses.outputs.items():
                if key in returned:
                    uses.others[name].setdefault("the caller of the model")
            uses.outputs.clear()
            if not first:
                first.append((batch, tensors_of(clone_tensors(result))))
    return first[0]  # `Batches` has raised an error where there is none


def _shared(model: nn.Module) -> dict[nn.Module, str]:
    """Return the weight or bias that a module shares with another one, as for an embedding and the last layer."""
    owners = owners_of_parameters(model)
    found: dict[nn.Module, str] = {}
    for module, name in first_names(model).items():
        # The bias of a linear layer stays.
        for attribute in ("weight",) if type(module) is nn.Linear else ("weight", "bias"):
            others = [owner for owner in owners.get(id(module._parameters.get(attribute)), ()) if owner != name]
            if others:
                found.setdefault(module, f"{name!r} shares its {attribute} with {others[0]!r}")
    return found


def _groups(
    uses: _UsesOfNorms, names: Mapping[nn.Module, str], skip: Sequence[str], tied: Mapping[nn.Module, str]
) -> tuple[dict[str, list[nn.Linear]], dict[str, str]]:
    groups: dict[str, list[nn.Linear]] = {}
    skipped: dict[str, str] = {}
    for name, layers in uses.layers.items():
        shared = [names[layer] for layer in layers if uses.sources[layer] != {name}]
        if name in skip:
            skipped[name] = "skip names it"
        elif name not in uses.amax:
            skipped[name] = "no batch reaches it"
        elif uses.others[name]:
            skipped[name] = f"{', '.join(uses.others[name])} also uses its output"
        elif not layers:
            skipped[name] = "no linear layer uses its output"
        elif shared:
            skipped[name] = f"{shared[0]!r} also takes other tensors"
        elif why := next((tied[module] for module in (uses.norms[name], *layers) if module in tied), ""):
            skipped[name] = why
        else:
            groups[name] = list(layers)
    return groups, skipped


def _smooth(
    name: str, norm: nn.Module, layers: Sequence[nn.Linear], amax: Tensor, alpha: float, names: Mapping[nn.Module, str]
) -> Smoothed:
    of_weights = torch.stack([layer.weight.abs().amax(0).float() for layer in layers]).amax(0)
    factor = amax**alpha / of_weights ** (1 - alpha)
    usable = (amax > 0) & (of_weights > 0) & torch.isfinite(factor) & (factor > 0)
    factor = torch.where(usable, factor, 1)
    for tensor in (norm.weight, getattr(norm, "bias", None)):
        if isinstance(tensor, Tensor):
            tensor.div_(factor)
    for layer in layers:
        layer.weight.mul_(factor)
    return Smoothed(name, tuple(names[layer] for layer in layers), _spread(amax), _spread(amax / factor))


def _spread(amax: Tensor) -> float:
    return float(amax.max() / amax.median().clamp(min=1e-30))
