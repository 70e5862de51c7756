"""Check whether the entries of a checkpoint fit a model, before anything is loaded."""

from collections.abc import Collection, Mapping

from torch import Tensor, nn

from qtoolkit.checkpoint.record import Metadata
from qtoolkit.eager.record import plan_of
from qtoolkit.errors import nearest, some
from qtoolkit.processes import is_sharded
from qtoolkit.quantizers.observers import Observer
from qtoolkit.quantizers.quantizer import Quantizer, named_quantizers
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer

Modules = Mapping[str, nn.Module]  # of a model, by all of their names


def differences(
    modules: Modules, own: Collection[str], saved: Collection[str], metadata: Metadata
) -> tuple[list[str], list[str]]:
    """Return the entries that only the model has, and the entries that only the checkpoint has.

    Entries of observers are optional, and a checkpoint of the float model needs no entries of quantizers. Quantizer entries of
    older versions have other names: `load_state_dict` checks these.
    """
    optional = set(_inside(modules, Observer))
    quantizers = _inside(modules, Quantizer)
    if not any(_owner(name) in quantizers for name in saved):
        optional |= _inside(modules, TensorQuantizer)
    else:
        optional |= {
            name
            for name, module in modules.items()
            if isinstance(module, Quantizer)
            and metadata.get(name, {}).get("version", module._version) != module._version
        }
    missing = [name for name in own if name not in saved and _owner(name) not in optional]
    unexpected = [name for name in saved if name not in own and _owner(name) not in optional]
    return missing, unexpected


def _inside(modules: Modules, kind: type[nn.Module]) -> set[str]:
    """Return the names of the modules of a type, and of the modules in them."""
    found: set[str] = set()
    for name, module in modules.items():  # a module before those in it
        if isinstance(module, kind) or (name and _owner(name) in found):
            found.add(name)
    return found


def _owner(name: str) -> str:
    """Return the name of the module that has an entry of a state dict."""
    return name.rpartition(".")[0]


def check_config(model: nn.Module, metadata: Metadata, saved: Collection[str], backend: str | None) -> None:
    """Raise ValueError if quantizers have other specs in the checkpoint; the message lists them."""
    owners = {_owner(name) for name in saved}
    found = {
        name: differing
        for name, quantizer in named_quantizers(model).items()
        if name in owners and (differing := quantizer.differing(metadata.get(name, {}))) is not None
    }
    if found:
        plan = plan_of(model)
        own = None if plan is None else plan.backend.name
        backends = (
            f" It was prepared for backend {backend!r}, the model for {own!r}." if backend not in (None, own) else ""
        )
        listed = "; ".join(f"{name!r} has {differing}" for name, differing in list(found.items())[:5])
        more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
        raise ValueError(
            f"{len(found)} quantizers have another config in it: {listed}{more}.{backends} Prepare the model with the backend "
            "and the QConfigMapping of the checkpoint, or with these values in the QuantSpecs of the rules"
        )


def check_names(missing: list[str], unexpected: list[str], own: Collection[str]) -> None:
    """Raise ValueError with the names that only one side has, and the most similar names of the other side."""
    sentences = []
    if unexpected:
        named = [_with_nearest(name, list(own)) for name in unexpected[:5]] + unexpected[5:]
        sentences.append(f"the model has no {some(named)}")
    if missing:
        sentences.append(f"it has no {some([repr(name) for name in missing])}, which the model needs")
    if sentences:
        raise ValueError(f"{'; '.join(sentences)}. Pass strict=False to load the other entries")


def _with_nearest(name: str, known: list[str]) -> str:
    near = nearest(name, known)
    return repr(name) if near is None else f"{name!r} (did you mean {near!r}?)"


def check_ranges(modules: Modules, own: Mapping[str, Tensor], saved: Collection[str]) -> None:
    """Raise ValueError if scales would be set from float weights but their parameters are sharded."""
    quantizers = _inside(modules, TensorQuantizer)
    sharded = [name for name, tensor in own.items() if _owner(name) in quantizers and is_sharded(tensor)]
    if sharded and not any(_owner(name) in quantizers for name in saved):
        raise ValueError(
            f"it is a state dict of the float model, whose weights would set the scale {sharded[0]!r}, but fully_shard has "
            "sharded that scale; load it before fully_shard"
        )


def check_shapes(modules: Modules, own: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError if an entry has another shape; a quantizer adopts the number of channels of a state dict."""
    quantizers = _inside(modules, Quantizer)
    differing = [
        f"{name!r} has shape {shapes[name]}, in the model {tuple(tensor.shape)}"
        for name, tensor in own.items()
        if name in shapes and shapes[name] != tuple(tensor.shape) and _owner(name) not in quantizers
    ]
    if differing:
        raise ValueError(f"{some(differing, 3)}; build the same model as when it was saved")
