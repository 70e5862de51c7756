"""EagerRecord: the facts that `fuse_modules` and module replacement store on a model."""

import dataclasses
from collections.abc import Iterator, Mapping

from torch import nn

from qtoolkit.backends import Backend
from qtoolkit.errors import with_article
from qtoolkit.graph.graph_module import plan_in
from qtoolkit.graph.plan import Plan
from qtoolkit.nn import QuantWeighted
from qtoolkit.nn.batch_norm import is_batch_norm
from qtoolkit.nn.wrappers import warn_of_adapter
from qtoolkit.shared_modules import modules_by_name
from qtoolkit.verdicts import Verdict

ATTRIBUTE = "_qtoolkit_record"  # an attribute of the model: its copies and pickles, and models that contain it, keep it


@dataclasses.dataclass(frozen=True)
class EagerRecord:
    """The facts that were stored on a model; names are dotted names in that model."""

    plan: Plan | None = None  # what `quant_modules.replace` decided; None if it was not called
    chains: tuple[tuple[str, ...], ...] = ()  # of modules, as `fuse_modules` was given them
    # the functions that took weights of layers without a call of the layer, in the last calibration, by the weights' names
    functions: Mapping[str, str] = dataclasses.field(default_factory=dict)


def record_of(model: nn.Module) -> EagerRecord:
    """Return the record of a model itself, without its parts' records."""
    record: EagerRecord = vars(model).get(ATTRIBUTE, EagerRecord())
    return record


def set_record(model: nn.Module, record: EagerRecord) -> None:
    """Store a record on a model."""
    setattr(model, ATTRIBUTE, record)


def records_in(model: nn.Module) -> Iterator[tuple[str, EagerRecord]]:
    """Return the records of a model and of its parts, each with the part's dotted name."""
    return ((name, record_of(module)) for name, module in model.named_modules() if ATTRIBUTE in vars(module))


def plan_of(model: nn.Module) -> Plan | None:
    """Return the plan of a model, else the first plan of its parts; None if none was prepared or replaced."""
    plans = (record.plan for _, record in records_in(model) if record.plan is not None)
    return plan_in(model) or next(plans, None)


def backend_in(model: nn.Module) -> Backend | None:
    """Return the backend of a model, else of the first part that has one; None if none was prepared or replaced."""
    plans = (plan_in(part) or record_of(part).plan for part in model.modules())
    return next((plan.backend for plan in plans if plan is not None), None)


def chains_of(model: nn.Module) -> list[tuple[str, ...]]:
    """Return the chains of a model and of its parts, by dotted names in the model."""
    records = records_in(model)
    return [tuple(_joined(part, name) for name in chain) for part, record in records for chain in record.chains]


def verdicts_in(model: nn.Module) -> dict[str, Verdict]:
    """Return the verdicts of earlier replacements of a model and of its parts, by dotted names in the model."""
    return {_joined(part, layer): verdict for part, plan in plans_in(model) for layer, verdict in plan.inside.items()}


def kinds_in(model: nn.Module) -> dict[str, str]:
    """Return the kinds of the layers at the earlier replacements of a model and of its parts, by dotted names in the model."""
    return {_joined(part, layer): kind for part, plan in plans_in(model) for layer, kind in plan.kinds.items()}


def plans_in(model: nn.Module) -> list[tuple[str, Plan]]:
    """Return the plans of earlier replacements of a model and of its parts, each with the part's dotted name."""
    return [(part, record.plan) for part, record in records_in(model) if record.plan is not None]


def check_links(model: nn.Module) -> None:
    """Raise ValueError if a chain's layer is linked to another batch norm than the one in the model; names both."""
    modules = modules_by_name(model)
    for layer_name, name, *_ in chains_of(model):
        layer, found = modules.get(layer_name), modules.get(name)
        own = layer.batch_norm if isinstance(layer, QuantWeighted) else None
        if own is not None and found is not None and found is not own and is_batch_norm(found):
            raise ValueError(
                f"the batch norm {name!r} that is linked to layer {layer_name!r} is not in the model: it was replaced "
                f"by {with_article(type(found))}. Replace batch norms, as torch.nn.SyncBatchNorm.convert_sync_batchnorm does, "
                f"before you call qtoolkit.quant_modules.replace."
            )
        if layer is not None and found is not None:
            warn_of_adapter(layer_name, layer, name, found)


def _joined(part: str, name: str) -> str:
    return f"{part}.{name}".strip(".")
