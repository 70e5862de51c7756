"""prepare_by_platform(): prepare a model with MQBench's options."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from torch import nn

from qtoolkit.compat.mqbench.platforms import BackendType, backend_of, checked, platform_of, qconfig_of
from qtoolkit.compat.mqbench.scheme import Options
from qtoolkit.config import Kind, QConfig, QConfigMapping
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.model_state import deepcopy_model
from qtoolkit.nn import freeze_batch_norm
from qtoolkit.nn.batch_norm import has_linked
from qtoolkit.prepare import prepare

_QUANTIZER_KEYS = (
    *("additional_function_type", "additional_module_type", "additional_node_name"),
    *("exclude_module_name", "exclude_function_type", "exclude_node_name", "academic_mode"),
)
_FUSE_KEYS = ("additional_fuser_method_mapping", "additional_fusion_pattern", "additional_qat_module_mapping")

_KEYS = (
    *("extra_qconfig_dict", "extra_quantizer_dict", "extra_fuse_dict"),
    *("preserve_attr", "concrete_args", "leaf_module"),
)


def prepare_by_platform(
    model: nn.Module,
    deploy_backend: BackendType | str,
    prepare_custom_config_dict: Options | None = None,
    custom_tracer: object = None,
    is_qat: bool = True,
    freeze_bn: bool = True,
) -> QuantizedGraphModule:
    """Prepare a float model with MQBench's options; the result is the same as of `qtoolkit.prepare`. The model is not changed.

    The arguments are MQBench's, with a `prepare_custom_config_dict` of `extra_qconfig_dict`, `extra_quantizer_dict`,
    `extra_fuse_dict`, `preserve_attr`, `concrete_args` and `leaf_module`; `custom_tracer` must be None. For QAT the model is in
    training mode; `is_qat=False` folds batch norms immediately, as in eval mode.

    Raises:
        ValueError: A key, a name or an option is unknown, does not fit the backend, or has no equivalent.
        UntraceableError: The model cannot be traced.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
        >>> prepared = prepare_by_platform(model, BackendType.Tensorrt)
        >>> prepared.get_submodule("0.weight_quantizer").spec.describe()
        'int8 narrow per-channel(0) lsq'
    """
    if custom_tracer is not None:
        raise ValueError(
            f"prepare_by_platform: custom_tracer must be None, got {custom_tracer!r}; qtoolkit has only one tracer: list "
            "modules that it should not enter in leaf_module, and fix arguments in concrete_args."
        )
    config = checked("prepare_custom_config_dict", prepare_custom_config_dict or {}, _KEYS)
    quantizer = checked("extra_quantizer_dict", config.get("extra_quantizer_dict", {}), _QUANTIZER_KEYS)
    fuse = checked("extra_fuse_dict", config.get("extra_fuse_dict", {}), _FUSE_KEYS)
    platform = platform_of(deploy_backend)
    backend = backend_of(platform, bool(quantizer.get("academic_mode")))
    qconfig = qconfig_of(platform, backend, config.get("extra_qconfig_dict", {}))
    preserved: Mapping[str, Iterable[str]] = config.get("preserve_attr") or {}
    training = model.training and is_qat
    own = deepcopy_model(model).train(training) if training != model.training else model
    prepared = prepare(
        own,
        backend=backend,
        qconfig_mapping=_mapping(qconfig, quantizer, own),
        leaf_modules=tuple(config.get("leaf_module") or ()),
        concrete_args=config.get("concrete_args"),
        preserve_attributes=[
            f"{child}.{name}".removeprefix(".") for child, names in preserved.items() for name in names
        ],
        qat_modules=fuse.get("additional_qat_module_mapping"),
        fuse_patterns=_patterns(fuse, training),
    )
    if freeze_bn and has_linked(prepared):
        freeze_batch_norm(prepared)
    return prepared


def prepare_qat_fx_by_platform(
    model: nn.Module, deploy_backend: BackendType | str, prepare_custom_config_dict: Options | None = None
) -> QuantizedGraphModule:
    """Alias of `prepare_by_platform` for MQBench's first releases; batch norms are trained."""
    return prepare_by_platform(model, deploy_backend, prepare_custom_config_dict, freeze_bn=False)


def _mapping(qconfig: QConfig, options: Options, model: nn.Module) -> QConfigMapping:
    """Return the rules: the config for everything and for added ops; None for excluded ops."""
    mapping, modules = QConfigMapping().set_global(qconfig), _modules_by_node(model)
    for prefix, config in (("additional", qconfig), ("exclude", None)):
        for kind in (*options.get(f"{prefix}_function_type", ()), *options.get(f"{prefix}_module_type", ())):
            mapping.set_object_type(kind, config)
        nodes = [modules.get(name, name) for name in options.get(f"{prefix}_node_name", ())]
        for name in (*nodes, *options.get(f"{prefix}_module_name", ())):
            mapping.set_module_name(name, config)
    return mapping


def _modules_by_node(model: nn.Module) -> dict[str, str]:
    """Return the dotted name of each module by the torch.fx name of the node of its first call."""
    dotted = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    nodes = [f"{'_' if name[0].isdigit() else ''}{name.replace('.', '_')}" for name in dotted]
    count = Counter(nodes)
    return {node: name for node, name in zip(nodes, dotted, strict=True) if count[node] == 1}


def _patterns(fuse: Options, training: bool) -> dict[tuple[Kind, ...], Callable[..., nn.Module]]:
    """Return the fusers by their types in the order of forward; torch's fusers take the mode as their first argument."""
    fusers = fuse.get("additional_fuser_method_mapping") or {}
    for pattern in fuse.get("additional_fusion_pattern") or {}:
        if _in_order(pattern) not in fusers:
            raise ValueError(
                f"additional_fusion_pattern: {pattern!r} has no fuser; add the types, in the order of forward, to "
                f"additional_fuser_method_mapping."
            )
    return {tuple(types): partial(fuser, training) for types, fuser in fusers.items()}


def _in_order(pattern: object) -> tuple[object, ...]:
    """Return the types of a pattern of torch.ao, (last, (..., first)) or (last, ..., first), in the order of forward."""
    if not isinstance(pattern, tuple):
        return (pattern,)
    return tuple(kind for part in reversed(pattern) for kind in _in_order(part))


__all__ = ["BackendType", "prepare_by_platform", "prepare_qat_fx_by_platform"]
