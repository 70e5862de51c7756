"""Facts about nodes: what tracing finds out, which copies and pickles keep."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, fx, nn

from qtoolkit.graph.block_calls import ROOT
from qtoolkit.graph.capture import trace
from qtoolkit.op_kinds.facts import NodeFacts, facts_of, set_facts
from tests.nets import linear_of


class Counts(nn.Module):
    """Computes a number by a function whose name does not tell, and assigns in place."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = linear_of()

    def forward(self, x: Tensor, scale: float) -> Tensor:
        y = self.fc(x)
        y += scale
        return y * torch.jit.annotate(float, scale)


def facts_in(graph: fx.Graph) -> dict[str, NodeFacts]:
    return {node.name: facts_of(node) for node in graph.nodes if facts_of(node) != NodeFacts()}


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_keep_the_facts(again) -> None:
    traced = trace.run(Counts(), example_inputs=(torch.rand(2, 4), 2.0)).gm
    facts = facts_in(traced.graph)
    assert facts["scale"] == NodeFacts(is_number=True, call=ROOT)
    assert facts["add"] == NodeFacts(is_number=False, assigns_in_place=True, input_dims=2, call=ROOT)
    assert facts_in(again(traced).graph) == facts


def test_facts_are_set_one_by_one() -> None:
    node = fx.Graph().placeholder("x")
    assert facts_of(node) == NodeFacts()
    set_facts(node, is_number=True)
    set_facts(node, assigns_in_place=True)
    assert facts_of(node) == NodeFacts(is_number=True, assigns_in_place=True)
