"""parameter_groups(): the parameters of a quantized model in groups for an optimizer, with the learned scales apart."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn

from qtoolkit.errors import check_known, check_sequence
from qtoolkit.foreign import ForeignQuantizer
from qtoolkit.model_state import check_module
from qtoolkit.quantizers.quantizer import Quantizer

GROUPS = ("weights", "no_decay", "scales")
NORMS = (nn.LayerNorm, nn.RMSNorm)  # the layers whose scale and shift may have several dimensions


def parameter_groups(
    model: nn.Module,
    lr: float | Tensor | None = None,
    weight_decay: float | None = None,
    *,
    scale_lr: float | Tensor | None = None,
    scale_weight_decay: float = 0.0,
    no_decay: Sequence[str] = (),
) -> list[dict[str, object]]:
    """Return the trainable parameters of a model in groups for any optimizer of torch, with the learned scales apart.

    The groups (empty ones are left out):

    - "weights": with weight decay.
    - "no_decay": biases, scales and shifts of norms (all parameters of at most one dimension), those that `no_decay` names,
      and those that the methods `no_weight_decay` and `no_weight_decay_keywords` of the model name, or of a module in it:
      models of timm and of Swin have them.
    - "scales": the parameters of quantizers. Weight decay would shrink the ranges that they learn.

    Each trainable parameter is in exactly one group, shared ones too. Frozen parameters are left out.

    Args:
        model: A prepared or replaced model, or one that contains it, also in DistributedDataParallel.
        lr: Learning rate of all groups; None leaves it to the optimizer.
        weight_decay: Weight decay of the group "weights"; None leaves it to the optimizer.
        scale_lr: Learning rate of the scales; None is `lr`, which is right for SGD and the quantizers "lsq" and
            "lsq_plus". A scale is trained as a ratio to its start (see `qtoolkit.ops.positive_scale`), so a step of Adam
            changes it by about this share: 1e-4 is a good first choice.
        scale_weight_decay: Weight decay of the scales.
        no_decay: Names of further parameters without weight decay, or of modules that hold them.

    Returns:
        A dict for each group: `name`, `params`, `param_names`, `weight_decay` and `lr` where they are given.

    Raises:
        TypeError: `model` is not a module, or `no_decay` is no sequence of names.
        ValueError: A name in `no_decay` is unknown, a value is negative, or no parameter of the model is trainable.

    Example:
        >>> learned = qt.QuantSpec(quantizer="lsq")
        >>> mapping = qt.QConfigMapping().set_global(qt.QConfig(learned, learned))
        >>> prepared = qt.prepare(torch.nn.Sequential(torch.nn.Linear(4, 2)), qconfig_mapping=mapping, backend="tensorrt")
        >>> groups = qt.parameter_groups(prepared, lr=0.1, weight_decay=1e-4, scale_lr=0.01)
        >>> for group in groups:
        ...     print(group["name"], group["lr"], group["weight_decay"], group["param_names"])
        weights 0.1 0.0001 ['0.weight']
        no_decay 0.1 0.0 ['0.bias']
        scales 0.01 0.0 ['0.weight_quantizer._relative_scale', 'activation_quantizers.input_1._relative_scale']
        >>> optimizer = torch.optim.SGD(groups, momentum=0.9)
    """
    check_module(model, "parameter_groups")
    check_sequence(no_decay, "parameter_groups", "no_decay")
    rates = {"lr": lr, "weight_decay": weight_decay, "scale_lr": scale_lr, "scale_weight_decay": scale_weight_decay}
    for argument, value in rates.items():
        if value is not None and not value >= 0:
            raise ValueError(f"parameter_groups: {argument} must not be negative, got {float(value)}.")
    decays = {"weights": weight_decay, "no_decay": 0.0, "scales": scale_weight_decay}
    found: dict[str, dict[str, nn.Parameter]] = {name: {} for name in GROUPS}
    scales = _parameters_of(model, (Quantizer, ForeignQuantizer))
    exempt = _parameters_of(model, NORMS) | _parameters_named(model, no_decay) | set(_parameters_exempted(model))
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in scales:
            group = "scales"
        elif parameter.dim() <= 1 or id(parameter) in exempt:
            group = "no_decay"
        else:
            group = "weights"
        found[group][name] = parameter
    if not any(found.values()):
        raise ValueError(
            "parameter_groups: no parameter of the model is trainable; set requires_grad of those to train."
        )
    return [
        {"name": group, "params": list(parameters.values()), "param_names": list(parameters)}
        | _given(lr=scale_lr if group == "scales" and scale_lr is not None else lr, weight_decay=decays[group])
        for group, parameters in found.items()
        if parameters
    ]


def _given(**options: object) -> dict[str, object]:
    return {name: value for name, value in options.items() if value is not None}


def _parameters_of(model: nn.Module, types: tuple[type[nn.Module], ...]) -> set[int]:
    modules = (module for module in model.modules() if isinstance(module, types))
    return {id(parameter) for module in modules for parameter in module.parameters()}


def _parameters_named(model: nn.Module, names: Sequence[str]) -> set[int]:
    """Return the parameters of these names or in modules of these names: each of several names of a shared one counts."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    parts = [name.split(".") for name in parameters]
    known = {".".join(part[:count]) for part in parts for count in range(1, len(part) + 1)}
    for name in names:
        check_known("parameter or module in no_decay", name, known)
    places = tuple(f"{name}." for name in names)
    return {id(parameter) for name, parameter in parameters.items() if f"{name}.".startswith(places)}


def _parameters_exempted(model: nn.Module) -> Iterator[int]:
    """Yield the parameters that modules exempt from weight decay themselves, as timm's optimizers and Swin's ask them.

    `no_weight_decay()` has names or patterns of names; some may be of options that the model does not have.
    """
    for module in model.modules():
        patterns, words = (_asked(module, method) for method in ("no_weight_decay", "no_weight_decay_keywords"))
        if patterns or words:
            for name, parameter in module.named_parameters(remove_duplicate=False):
                if any(fnmatchcase(name, each) for each in patterns) or any(word in name for word in words):
                    yield id(parameter)


def _asked(module: nn.Module, method: str) -> list[str]:
    ask = getattr(module, method, None)
    return list(ask()) if callable(ask) else []
