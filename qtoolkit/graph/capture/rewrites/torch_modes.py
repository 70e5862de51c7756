"""torch's modes in a traced forward: no_grad becomes detached tensors; inference_mode, autocast and Function are refused."""

import operator
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, fx, nn

from qtoolkit.graph.capture.functions import Patch
from qtoolkit.graph.capture.rewrites.in_place import changed_by
from qtoolkit.graph.capture.shapes import UNKNOWN, is_plain
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

    def patches(self) -> list[Patch]:
        """Return the functions of torch that enter modes, each with one that watches it."""
        # Private: all of torch's contexts and decorators of grad modes call it, and no public function is on all their ways.
        set_grad_enabled = torch._C._set_grad_enabled

        def enter_autocast(autocast: object) -> object:
            raise RuntimeError(f"torch.autocast is entered here, {LOST}, with enabled=False too.")

        def note_grad_mode(enabled: bool) -> None:
            """Set torch's grad mode, and note whether a torch.no_grad block is entered; refuse what no graph records."""
            if not torch.is_grad_enabled() and not self.no_grad and enabled:
                raise RuntimeError(FUNCTION)
            self.no_grad = not enabled and (torch.is_grad_enabled() or self.no_grad)
            set_grad_enabled(enabled)

        return [(torch.autocast, "__enter__", enter_autocast), (torch._C, "_set_grad_enabled", note_grad_mode)]

    def check(self) -> None:
        """Raise RuntimeError if the caller runs in a mode that a graph does not record."""
        if torch.is_inference_mode_enabled():
            raise RuntimeError(f"torch.inference_mode is entered here, {LOST}.")
        if not torch.is_grad_enabled() and not self.no_grad:
            raise RuntimeError(FUNCTION)
        if not torch.is_grad_enabled() and not self.has_example_inputs:
            raise RuntimeError(f"torch.no_grad is entered here, {LOST} without example_inputs.")


def run(graph: fx.Graph, model: nn.Module, values: Mapping[fx.Node, object], without_grad: Collection[fx.Node]) -> None:
    """Detach the tensors that the nodes `without_grad`, made under torch.no_grad, compute, where other code takes them.

    `values` has the value of each node for the example inputs. Raises ValueError: the code changes a tensor in place that other
    code computes, or returns a value that is not known to be a tensor or a number.
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
