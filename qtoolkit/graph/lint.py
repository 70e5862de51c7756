"""lint(): which quantized edges of a prepared or converted model would break a fusion on its target."""

from collections.abc import Callable, Iterator

from torch import fx

from qtoolkit.backends import Backend
from qtoolkit.config import QuantSpec
from qtoolkit.graph.advice import ADVICE, Finding
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.graph.passes.record import verdict_now
from qtoolkit.graph.placement.traversal import origin, quantizer_behind, source_of
from qtoolkit.graph.plan import Cause, Status
from qtoolkit.nn import QuantModule
from qtoolkit.op_kinds.nodes import (
    has_float_weight,
    is_quantizer,
    is_weight_quantizer,
    kind_of,
    module_of,
    name_of,
    tensor_inputs,
)
from qtoolkit.op_kinds.rules import argument
from qtoolkit.quantizers.quantizer import Quantizer


def lint(model: QuantizedGraphModule, advice: bool = False) -> tuple[Finding, ...]:
    """Check the quantizers of a model against the rules of its backend.

    The rules come from TensorRT's documentation on the placement of Q/DQ ("Working with Quantized Types"), from NVIDIA Model
    Optimizer's ONNX quantizer, and from the backend's table. The backend's fields say which of them apply.

    Args:
        model: What `qtoolkit.prepare` or `qtoolkit.convert` returned, also with a graph that was changed afterwards.
        advice: Also list the ops that the target's own quantizer leaves in float, because they are not faster in integers
            (`qtoolkit.graph.advice`). `prepare` quantizes them.

    Returns:
        One finding for each edge or op that breaks a rule, in the order of the graph. Without advice, an unchanged graph
        breaks none.

    Raises:
        TypeError: The model was not prepared.

    Example:
        >>> from qtoolkit.graph.lint import lint
        >>> lint(qt.prepare(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())))
        ()
    """
    if not isinstance(model, QuantizedGraphModule) or model.plan is None:
        raise TypeError(
            f"lint: model must be what qtoolkit.prepare or qtoolkit.convert returned, got {type(model).__name__}."
        )
    backend = model.plan.backend
    rules = (*RULES, *(ADVICE[name] for name in backend.advice)) if advice else RULES
    return tuple(finding for node in model.graph.nodes for rule in rules for finding in rule(node, backend))


def _residual_add(node: fx.Node, backend: Backend) -> Iterator[Finding]:
    if kind_of(node).name != "add" or backend.residual_add != "identity":
        return
    inputs = tensor_inputs(node)
    layers = [layer for source in inputs if (layer := _fusing_layer(source)) is not None]
    on_grid = [quantizer_behind(source, backend) is not None for source in inputs]
    if layers and all(on_grid):
        yield Finding(
            name_of(node),
            "both inputs of a residual add are quantized, so that no convolution fuses with it.",
            f"Leave the branch of {name_of(layers[0])!r} without a quantizer.",
        )
    if layers and not any(on_grid) and not has_float_weight(layers[0]):
        yield Finding(
            name_of(node),
            "no input of a residual add is quantized, so that the convolution before it returns floats.",
            "Quantize the identity branch.",
        )


def _inside_a_unit(node: fx.Node, backend: Backend) -> Iterator[Finding]:
    if not is_quantizer(node) or len(node.users) != 1:
        return
    source, user = node.all_input_nodes[0], next(iter(node.users))
    layer = origin(source) or source
    joined = kind_of(user).activation and backend.joins(kind_of(layer), kind_of(user))
    joins = joined or kind_of(user).name == "batch_norm"
    if joins and len(source.users) == 1 and (kind_of(source).layer or kind_of(source).name == "batch_norm"):
        yield Finding(
            name_of(node),
            f"a quantizer stands between {name_of(source)!r} and {name_of(user)!r}, which the target computes as one.",
            f"Move it behind {name_of(user)!r}.",
        )


def _some_inputs(node: fx.Node, backend: Backend) -> Iterator[Finding]:
    kind = kind_of(node)
    if not kind.multiplies or backend.role(kind) == "float":
        return
    inputs = {source: quantizer_behind(source, backend) is not None for source in tensor_inputs(node)}
    if not backend.quantize_graph_inputs:
        inputs = {source: on_grid for source, on_grid in inputs.items() if source.op != "placeholder"}
    quantized = list(inputs.values())
    if node.op == "call_module" and kind.layer:
        quantized.append(not has_float_weight(node))
    if any(quantized) and not all(quantized):
        missing = next(
            (name_of(source) for source, on_grid in inputs.items() if not on_grid), f"{name_of(node)}.weight"
        )
        yield Finding(
            name_of(node),
            f"a {kind} is computed in integers only if all its inputs are quantized, and {missing!r} is not.",
            "Quantize all of them or none.",
        )


def _concat(node: fx.Node, backend: Backend) -> Iterator[Finding]:
    if backend.role(kind_of(node)) != "concat":
        return
    behind = [quantizer_behind(source, backend) for source in tensor_inputs(node)]
    if any(behind) and len({q and q.target for q in behind}) > 1 and _is_taken_by_codes(node, backend):
        yield Finding(
            name_of(node),
            "the inputs of a concat have different scales, so that the target requantizes them.",
            "Let one quantizer serve all of them.",
        )


def _in_and_out(node: fx.Node, backend: Backend) -> Iterator[Finding]:
    kind = kind_of(node)
    if not backend.integers_in_and_out or backend.role(kind) not in ("compute", "merge"):
        return
    if kind.multiplies or any(_fusing_layer(source) is not None for source in tensor_inputs(node)):
        return
    takes = any(quantizer_behind(source, backend) is not None for source in tensor_inputs(node))
    if takes and not _output_is_quantized(node, backend):
        yield Finding(
            name_of(node),
            f"a {kind} takes quantized inputs and its output is not quantized; the target needs both or neither.",
            "Quantize its output, or leave it in float by the QConfigMapping.",
        )


def _pad_before_quantizer(node: fx.Node, backend: Backend) -> Iterator[Finding]:
    if is_quantizer(node) and kind_of(node.all_input_nodes[0]).name == "zero_pad":
        pad = name_of(node.all_input_nodes[0])
        yield Finding(
            name_of(node),
            f"the quantizer comes after {pad!r}, which then cannot become part of the layer behind it.",
            f"Move it before {pad!r}.",
        )


def _put_in(node: fx.Node, backend: Backend) -> Iterator[Finding]:
    gm = node.graph.owning_module
    plan = gm.plan if isinstance(gm, QuantizedGraphModule) else None
    if plan is not None and node.op in ("call_module", "call_function", "call_method") and not is_quantizer(node):
        verdict = verdict_now(node, plan)
        if verdict.cause is Cause.PUT_IN and plan.status.get(node.name, verdict).status is Status.QUANTIZED:
            yield Finding(
                name_of(node),
                f"the plan quantizes it, and it is {verdict.text}.",
                "Make that change in the float model, and call qtoolkit.prepare on it.",
            )


def _two_quantizers(node: fx.Node, backend: Backend) -> Iterator[Finding]:
    quantizers = [user for user in node.users if is_quantizer(user) and not is_weight_quantizer(user)]
    if len(quantizers) > 1:
        yield Finding(
            name_of(node),
            f"its output has {len(quantizers)} quantizers ({', '.join(map(name_of, quantizers))}).",
            "Keep one for all that take it.",
        )


def _grouped_conv_transpose(node: fx.Node, backend: Backend) -> Iterator[Finding]:
    if kind_of(node).name != "conv_transpose" or backend.grouped_conv_transpose or has_float_weight(node):
        return
    groups = argument(node, 6, "groups", 1)
    if groups > 1:
        yield Finding(
            name_of(node),
            f"{backend.name} has no integer kernel for a transposed convolution with groups, here {groups}.",
            "Leave it in float by the QConfigMapping.",
        )


def _conv_transpose_axis(node: fx.Node, backend: Backend) -> Iterator[Finding]:
    spec = _weight_spec(node) if kind_of(node).name == "conv_transpose" else None
    if spec is not None and backend.is_other_conv_transpose_axis(spec):
        yield Finding(
            name_of(node),
            f"its weight has a scale along axis {spec.axis}; {backend.name} takes them along axis "
            f"{backend.conv_transpose_axis}.",
            f"Set QuantSpec(axis={backend.conv_transpose_axis}) in the rule that names it.",
        )


def _weight_bits(node: fx.Node, backend: Backend) -> Iterator[Finding]:
    spec = _weight_spec(node)
    if spec is not None and backend.weight_bits is not None and spec.bits not in backend.weight_bits:
        widths = " or ".join(str(bits) for bits in backend.weight_bits)
        yield Finding(
            name_of(node),
            f"{backend.name} computes with weights of {widths} bits, not {spec.bits}.",
            "Change its config.",
        )


def _weight_spec(node: fx.Node) -> QuantSpec | None:
    if node.op != "call_module":
        return None
    module = module_of(node)
    if isinstance(module, QuantModule):
        return next((quantizer.spec for quantizer in module.weight_quantizers().values()), None)
    return module.spec if is_weight_quantizer(node) and isinstance(module, Quantizer) else None


def _fusing_layer(node: fx.Node) -> fx.Node | None:
    """Return the layer that computes a tensor and can compute an add with it, where it has no other user."""
    layer = origin(node, sole_user=True)
    return layer if layer is not None and kind_of(layer).fuses_add else None


def _output_is_quantized(node: fx.Node, backend: Backend) -> bool:
    """Return whether a quantizer takes an op's output, after its activation and ops that move values."""
    waiting = list(node.users)
    while waiting:
        user = waiting.pop()
        if is_quantizer(user):
            return True
        joins = kind_of(user).activation and source_of(user) is node and len(node.users) == 1
        if joins or backend.role(kind_of(user)) in ("transparent", "concat"):
            waiting += user.users
    return False


def _is_taken_by_codes(node: fx.Node, backend: Backend) -> bool:
    """Return whether a quantized op takes an op's output, moved or not."""
    waiting = list(node.users)
    while waiting:
        user = waiting.pop()
        role = backend.role(kind_of(user))
        if is_quantizer(user) or (role in ("compute", "merge") and not has_float_weight(user)):
            return True
        if role in ("transparent", "concat"):
            waiting += user.users
    return False


RULES: tuple[Callable[[fx.Node, Backend], Iterator[Finding]], ...] = (
    _residual_add,
    _inside_a_unit,
    _some_inputs,
    _concat,
    _in_and_out,
    _pad_before_quantizer,
    _put_in,
    _two_quantizers,
    _grouped_conv_transpose,
    _conv_transpose_axis,
    _weight_bits,
)
