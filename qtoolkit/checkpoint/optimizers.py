"""The state of an optimizer, by parameter name."""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.optim import Optimizer

from qtoolkit.checkpoint.record import OptimizerTree, decode, encode
from qtoolkit.errors import some

Keep = Callable[[str, Tensor], str]  # stores a tensor by a name like this one, and returns its key


def optimizer_tree(model: nn.Module, optimizer: Optimizer, keep: Keep) -> OptimizerTree:
    """Return the state of an optimizer as JSON."""
    groups, saved = _names_in_groups(model, optimizer, "save_checkpoint"), optimizer.state_dict()
    name_of = {
        number: name
        for names, group in zip(groups, saved["param_groups"], strict=True)
        for name, number in zip(names, group["params"], strict=True)
    }
    states = {
        name_of[number]: {
            name: encode(value, f"the optimizer's {name!r}", partial(keep, f"optimizer/{name_of[number]}/{name}"))
            for name, value in state.items()
        }
        for number, state in saved["state"].items()
    }
    options = [{name: value for name, value in group.items() if name != "params"} for group in saved["param_groups"]]
    encoded = [encode(each, "a group of the optimizer", partial(keep, "optimizer")) for each in options]
    return {"type": type(optimizer).__name__, "groups": groups, "options": encoded, "states": states}


def check_optimizer(model: nn.Module, optimizer: Optimizer, tree: OptimizerTree) -> None:
    """Raise ValueError unless an optimizer has the type and the parameter groups of the saved one."""
    own = _names_in_groups(model, optimizer, "load_checkpoint")
    if tree["type"] != type(optimizer).__name__:
        raise ValueError(
            f"its optimizer is {tree['type']}, got {type(optimizer).__name__}; build the saved type, or pass optimizer=None"
        )
    if own != tree["groups"]:
        mine, theirs = ({name for names in groups for name in names} for groups in (own, tree["groups"]))
        differing = sorted(mine ^ theirs)
        why = f"only one of the two trains {some(differing)}" if differing else "their groups or their order differ"
        raise ValueError(
            f"the optimizer's parameters differ from the saved ones: {why}; build the same parameter groups"
        )


def shaped_like(model: nn.Module, tree: OptimizerTree) -> dict[str, Tensor]:
    """Return for each tensor of the state, by key, the parameter with its shape and distribution."""
    parameters = dict(model.named_parameters())
    found: dict[str, Tensor] = {}
    for name, state in tree["states"].items():

        def note(key: str, like: Tensor = parameters[name]) -> Tensor:
            return found.setdefault(key, like)

        decode(list(state.values()), note)
    return found


def optimizer_state(tree: OptimizerTree, take: Callable[[str], Tensor]) -> dict[str, object]:
    """Return the state dict of an optimizer with the parameter groups of the saved one."""
    names = [name for group in tree["groups"] for name in group]
    number_of = {name: number for number, name in enumerate(names)}
    states = {
        number_of[name]: {key: decode(value, take) for key, value in state.items()}
        for name, state in tree["states"].items()
    }
    groups = [
        {**decode(options, take), "params": [number_of[name] for name in group]}
        for group, options in zip(tree["groups"], tree["options"], strict=True)
    ]
    return {"state": states, "param_groups": groups}


def _names_in_groups(model: nn.Module, optimizer: Optimizer, what: str) -> list[list[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    lost = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
    if lost:
        raise ValueError(
            f"{what}: the optimizer has {len(lost)} parameters that are not in the model, the first of shape "
            f"{tuple(lost[0].shape)}; pass the optimizer of this model."
        )
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
