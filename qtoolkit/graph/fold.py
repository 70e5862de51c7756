"""The convert pass: fold the batch norms that training kept, and freeze every quantizer."""

from qtoolkit.graph import fuse
from qtoolkit.graph.module import QuantizedGraphModule
from qtoolkit.quantizer import quantizers_of


def run(gm: QuantizedGraphModule) -> QuantizedGraphModule:
    """Fold linked batch norms, replace quantizers by their frozen grids, and switch to eval mode.

    Raises:
        RuntimeError: A quantizer saw no data.
        ValueError: A scale is not positive and finite.
    """
    gm.eval()
    for node, follower in fuse.linked_pairs(gm):
        fuse.fold(gm, node, follower)
    for name, quantizer in quantizers_of(gm).items():
        gm.set_submodule(name, quantizer.to_grid())
    gm.graph.lint()
    gm.recompile()
    return gm.eval()
