"""torch's modes in a captured forward: no_grad becomes detached tensors; inference_mode, autocast and Function are refused.

Autocast that is switched off changes nothing unless the caller has switched it on: that is skipped, with a warning.
"""

import operator
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from qtoolkit.errors import warn
from qtoolkit.graph.capture.functions import Patch
from qtoolkit.graph.capture.rewrites.in_place import changed_by
from qtoolkit.graph.capture.shapes import UNKNOWN, is_plain
from qtoolkit.graph.capture.untraceable import describe_line, user_line
from qtoolkit.op_kinds.facts import facts_of, set_facts

LOST = "which a graph does not record"
FUNCTION = f"a torch.autograd.Function is called here, {LOST}."


class TorchModes:
    """The modes of torch while a forward is traced.

    With example inputs torch.no_grad can be recorded: values tell which nodes are tensors. `no_grad` is whether such a block is
    entered. A torch.autograd.Function turns gradients off without a call of Python's, and returns values with gradients.
    """

    def __init__(self, has_example_inputs: bool) -> None:
        self.has_example_inputs, self.no_grad = has_example_inputs, False
        self.without_autocast: list[str] = []  # where the forward switches autocast off

    def patches(self) -> list[Patch]:
        """Return the functions of torch that enter modes, each with one that watches it."""
        # Private: all of torch's contexts and decorators of grad modes call it, and no public function is on all their ways.
        set_grad_enabled = torch._C._set_grad_enabled

        def enter_autocast(autocast: torch.autocast) -> None:
            raise RuntimeError(f"torch.autocast is entered here, {LOST}.")

        def note_grad_mode(enabled: bool) -> None:
            """Set torch's grad mode, and note whether a torch.no_grad block is entered; refuse modes that no graph records."""
            if not torch.is_grad_enabled() and not self.no_grad and enabled:
                raise RuntimeError(FUNCTION)
            entered = not enabled and (torch.is_grad_enabled() or self.no_grad)
            set_grad_enabled(enabled)  # a mode of torch functions calls this function once more
            self.no_grad = entered

        switched_off = skipped_autocast(self.without_autocast, enter_autocast)
        return [*switched_off, (torch._C, "_set_grad_enabled", note_grad_mode)]

    def check(self) -> None:
        """Raise RuntimeError if the caller runs in a mode that a graph does not record."""
        if torch.is_inference_mode_enabled():
            raise RuntimeError(f"torch.inference_mode is entered here, {LOST}.")
        if not torch.is_grad_enabled() and not self.no_grad:
            raise RuntimeError(FUNCTION)
        if not torch.is_grad_enabled() and not self.has_example_inputs:
            raise RuntimeError(f"torch.no_grad is entered here, {LOST} without example_inputs.")


def skipped_autocast(places: list[str], enter: Callable[[torch.autocast], object]) -> list[Patch]:
    """Return the methods of torch.autocast, each with one that enters nothing where autocast is switched off.

    The place of each is added to `places`. `enter` enters an autocast that is switched on.
    """
    leave = torch.autocast.__exit__
    # Private, and no public attribute tells. A torch without it refuses both.
    is_on = operator.attrgetter("_enabled") if hasattr(torch.autocast("cpu", enabled=False), "_enabled") else bool

    def enter_if_on(autocast: torch.autocast) -> object:
        if is_on(autocast):
            return enter(autocast)
        places.append(describe_line(user_line(traceback.extract_stack())))
        return autocast

    def leave_if_on(autocast: torch.autocast, *error: Any) -> object:
        return leave(autocast, *error) if is_on(autocast) else None

    return [(torch.autocast, "__enter__", enter_if_on), (torch.autocast, "__exit__", leave_if_on)]


def warn_of_autocast(places: Collection[str]) -> None:
    """Warn that a graph does not switch autocast off where the model does."""
    if places:
        warn(
            f"prepare: the forward switches autocast off, at {next(iter(places))}; a graph does not record that. It computes "
            f"the same without autocast; under autocast these ops run in its dtype. To keep them in float32, name the "
            f"submodule in `untraced`, or call the prepared model without autocast.",
        )


def run(graph: fx.Graph, model: nn.Module, values: Mapping[fx.Node, object], without_grad: Collection[fx.Node]) -> None:
    """Detach the tensors that the nodes `without_grad`, made under torch.no_grad, compute, where other ops take them.

    `values` has the value of each node for the example inputs. Raises ValueError: an op changes a tensor in place that other
    ops compute, or the forward returns a value that is not known to be a tensor or a number.
    """
    inside = set(without_grad)
    for node in graph.nodes:
        if node.target is operator.getitem and node.args[0] in inside:
            inside.add(node)  # the items of a tuple are detached one by one
    for node in graph.nodes:
        if node in inside:
            _check_in_place(node, model, inside)
            outside = [user for user in node.users if user not in inside]
            if outside and not is_plain(values.get(node, UNKNOWN)):
                _detach(node, outside, values.get(node))


def _check_in_place(node: fx.Node, model: nn.Module, inside: Collection[fx.Node]) -> None:
    changed = changed_by(node, model)
    if changed is None or changed in inside or (changed.op == "get_attr" and changed.target in _buffers(model)):
        return
    raise ValueError(
        f"prepare: {node.name!r} changes {changed.name!r} in place under torch.no_grad, {LOST}. Use the out-of-place op, or "
        f"make that submodule a leaf module with untraced."
    )


def _buffers(model: nn.Module) -> Collection[str]:
    return {name for name, _ in model.named_buffers(remove_duplicate=False)}


def _detach(node: fx.Node, users: Collection[fx.Node], value: object) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(
            f"prepare: {node.name!r} is computed under torch.no_grad and used outside, and the example inputs do not tell that "
            f"it is a tensor. Make that submodule a leaf module with untraced."
        )
    with node.graph.inserting_after(node):
        detached = node.graph.call_method("detach", (node,))
    set_facts(detached, call=facts_of(node).call)
    for user in users:
        user.replace_input_with(node, detached)
