"""lint(): which nodes of a file with Q/DQ pairs, of any tool, break a rule of a target."""

import os

from qtoolkit.backends import Backend, backend_of
from qtoolkit.errors import check_flags
from qtoolkit.export.files.reading import UnreadableFileError, open_graph
from qtoolkit.lint.codes import CODES
from qtoolkit.lint.findings import Finding, LintRule, broken
from qtoolkit.lint.fusions import FILE_ADVICE, FUSIONS
from qtoolkit.lint.layers import ADVICE, LAYERS
from qtoolkit.lint.placement import PLACEMENT

FILE_RULES = (*PLACEMENT, *LAYERS, *CODES, *FUSIONS)


def lint(path: str | os.PathLike[str], backend: str | Backend, advice: bool = False) -> tuple[Finding, ...]:
    """Check the Q/DQ nodes of an ONNX file against the rules of a target.

    The file may come from any tool. The bodies of If, Loop and Scan are checked as graphs of their own, which take floats from
    outside. `rules_of` lists the rules.

    Args:
        path: The file.
        backend: The target: a name in `qt.backends`, or a Backend.
        advice: Also list what the target computes, and no faster than in float.

    Returns:
        One finding for each node that breaks a rule, in the order of the file, with the rule's name, its source and a remedy.

    Raises:
        ValueError: The backend is not known; or, as `UnreadableFileError`, the file is not ONNX, is truncated or invalid, has
            ops that ONNX does not know, lacks the file of its weights, or has no Q/DQ nodes.
        ImportError: onnx or onnxscript is not installed.

    Example:
        >>> import tempfile
        >>> model, images = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()), [torch.rand(8, 3, 8, 8)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result = qt.quantize(model, images, "tensorrt", folder + "/model.onnx")
        ...     found = qt.export.lint(result.export.path, "tensorrt")
        >>> found
        ()
    """
    check_flags("lint", advice=advice)
    backend = backend_of(backend)
    model = open_graph(path)
    from qtoolkit.export.files.ops import ops_of

    kinds = {node.op_type for node in model.graph.all_nodes()}
    if not kinds.intersection(("QuantizeLinear", "DequantizeLinear")):
        raise UnreadableFileError(
            f"{str(path)!r} has no QuantizeLinear and no DequantizeLinear node: it is a float model, or its integer ops are "
            f"written in another form. Quantize it, and write it in the QDQ format."
        )
    return broken(rules_of(backend, advice), ops_of(model), backend)


def rules_of(backend: Backend, advice: bool = False) -> tuple[LintRule, ...]:
    """Return the rules that `lint` checks for a target.

    Example:
        >>> "residual-add" in [rule.name for rule in rules_of(qt.backends["tensorrt"])]
        True
    """
    rules = (*FILE_RULES, *((*(ADVICE[name] for name in backend.advice), *FILE_ADVICE) if advice else ()))
    return tuple(rule for rule in rules if rule.applies(backend))
