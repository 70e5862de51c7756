"""Comparison of all codes of a model with those that a runtime computes from its file, end to end."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import Enum

from torch import Tensor

from qtoolkit.errors import warn
from qtoolkit.export.verification.codes import (
    OUTPUT_ERROR,
    CodeCount,
    check_numbers,
    check_outputs,
    largest_difference,
    sum_of,
)
from qtoolkit.export.verification.follower import Follower, Nodes
from qtoolkit.model_inputs import tensors_of
from qtoolkit.runtimes.execution import Array, Executed, ExecutedLayer

SHOWN = 5  # names of layers in a line


class Verdict(Enum):
    """What a comparison with a runtime found.

    Attributes:
        EQUAL: All codes that were compared are the same, end to end.
        ROUNDING: Codes differ end to end, but each quantizer's, computed from the runtime's own codes before it, differ by no
            more than the runtime's order of rounding explains.
        FLOAT16: The file is in float16. Codes differ from those of the model in float16 end to end, but each quantizer's,
            computed from the runtime's own codes before it, only as the rounding of float16 explains.
        SATURATES: The runtime's integer sums saturate on this processor, so that its codes are wrong for some inputs, or for
            these: the file has int8 weights, and the processor has no VNNI instructions.
        DIFFERENT: The runtime computes something else than the model.
    """

    EQUAL = "equal"
    ROUNDING = "rounding"
    FLOAT16 = "rounding of float16"
    SATURATES = "saturates on this processor"
    DIFFERENT = "different"

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True)
class RuntimeCodes:
    """How the codes of one runtime compare with the model's, end to end.

    Attributes:
        runtime: The runtime and its version.
        by_quantizer: The comparison at each activation quantizer, in the order of the file.
        output_difference: The largest absolute difference of the outputs.
        layers: The nodes that compute, as the runtime optimized them, and which of them compute on integer codes.
        conversions: How many nodes convert between floats and codes.
        not_compared: Quantizers whose codes cannot be read in the runtime, that are not executed for these inputs, or whose
            codes are random numbers, of which each run draws others.
        changed_by_reading: The largest difference in the outputs between the graph that users run and the one that also
            returns the codes.
        share: The share of the codes that may differ, by one step each, because the runtime rounds in another order.
        remark: What users of this runtime have to know, beside the figures; "" for nothing.
        layer_by_layer: The comparison at each quantizer when the model computes it from the runtime's codes at the quantizers
            before it: the differences that begin there. None where no model computes, in `compare_runtimes`.
        unrounded: Quantizers at which the runtime does not round in the graph that users run.
        weights: The comparison of the weights' codes in the file with the model's, by the names of their quantizers.
        on_codes: The layers that the model itself computes in integers.
        steps: By how many steps a code may differ where the runtime rounds in another order.
        nan: The quantizers of the model that get NaN, for which there is nothing to compare.
        output_error: The largest difference of the outputs when the model computes them from the runtime's codes, as a share of
            the largest value: of the outputs of an ONNX file behind ops whose results change little where their inputs do.
        saturating: The layers whose sums of products may saturate on this processor.
        float16: Whether the file is in float16, and with it the model that it is compared with.
    """

    runtime: str
    by_quantizer: Mapping[str, CodeCount]
    output_difference: float
    layers: tuple[ExecutedLayer, ...]
    conversions: int
    not_compared: tuple[str, ...]
    changed_by_reading: float
    share: float
    remark: str = ""
    layer_by_layer: Mapping[str, CodeCount] | None = None
    unrounded: tuple[str, ...] = ()
    weights: Mapping[str, CodeCount] = field(default_factory=dict)
    on_codes: tuple[str, ...] = ()
    steps: int = 1
    nan: tuple[str, ...] = ()
    output_error: float = 0.0
    saturating: tuple[str, ...] = ()
    float16: bool = False

    @classmethod
    def of(
        cls,
        executed: Executed,
        counts: Mapping[str, CodeCount],
        outputs: Sequence[Tensor | Array],
        names: Iterable[str],
    ) -> "RuntimeCodes":
        """Return the comparison of one execution: its counts, and its outputs with others.

        `names` are the quantizers that should be compared. What a model gives has the defaults.
        """
        return cls(
            by_quantizer=counts,
            output_difference=largest_difference(outputs, executed.outputs),
            not_compared=tuple(name for name in dict.fromkeys(names) if name not in counts),
            **{name: value for name, value in vars(executed).items() if name in cls.__dataclass_fields__},
        )

    @property
    def codes(self) -> CodeCount:
        """The sum over all quantizers."""
        return sum_of(self.by_quantizer.values())

    @property
    def layer_codes(self) -> CodeCount:
        """The sum of `layer_by_layer` over all quantizers; `codes` without it."""
        return self.codes if self.layer_by_layer is None else sum_of(self.layer_by_layer.values())

    @property
    def first_difference(self) -> str | None:
        """The first quantizer in the order of the file at which a code differs; None if none does."""
        return next((name for name, count in self.by_quantizer.items() if count.differing), None)

    @property
    def integer_layers(self) -> tuple[ExecutedLayer, ...]:
        """The nodes that compute on integer codes."""
        return tuple(layer for layer in self.layers if layer.integer)

    @property
    def float_layers(self) -> tuple[ExecutedLayer, ...]:
        """The nodes that compute in float."""
        return tuple(layer for layer in self.layers if not layer.integer)

    @property
    def other_weights(self) -> tuple[str, ...]:
        """The quantizers of weights whose codes in the file are not the model's."""
        return tuple(name for name, count in self.weights.items() if count.differing)

    @property
    def verdict(self) -> Verdict:
        """What the comparison found.

        End to end, all codes must be the same where all layers of the runtime run in integers. Elsewhere a few float sums round
        in another order, and the layers behind them spread each difference; `layer_codes` then count those that begin at a
        quantizer, by one step: any of values at a rounding boundary, and a share of the others. An output must be the model's
        up to rounding. In a file in float16 a value is at a boundary that lies within float16's last place of the largest
        value of the grid: of 255 steps, within a quarter of a step.
        """
        compared_nothing = self.not_compared and not self.codes.compared
        has_nan = bool(self.nan) or math.isnan(self.output_difference)
        if self.other_weights or self.unrounded or compared_nothing or has_nan:
            return Verdict.DIFFERENT
        if self.saturating:
            return Verdict.SATURATES
        return Verdict.DIFFERENT if self.output_error > OUTPUT_ERROR else self._verdict_of_codes

    @property
    def _verdict_of_codes(self) -> Verdict:
        if not self.codes.differing:
            return Verdict.EQUAL
        few = self.layer_codes.are_ties(self.share, self.steps)
        if not (self.share and few):
            return Verdict.DIFFERENT
        return Verdict.FLOAT16 if self.float16 else Verdict.ROUNDING

    def check(self) -> Verdict:
        """Raise an error where the runtime does not compute what the model computes.

        Returns:
            `Verdict.EQUAL`: all codes are the same end to end. `Verdict.ROUNDING`, or `Verdict.FLOAT16` for a file in float16:
            some differ end to end, and layer by layer rounding alone explains them; this is never returned where all layers
            of onnxruntime run in integers.

        Raises:
            RuntimeError: The verdict is `Verdict.SATURATES` or `Verdict.DIFFERENT`; the message says which of the causes it is,
                and the first place.

        Warns:
            UserWarning: Quantizers could not be compared, or rounding in a few places has changed more codes behind them than
                rounding explains in one layer: the outputs are not the model's.
        """
        check_numbers(self.output_difference, self.nan, "verify")
        verdict = self.verdict
        if verdict is Verdict.SATURATES:
            raise RuntimeError(f"verify: {self.codes} in {self.runtime}, at {_first(self.saturating)}. {self.remark}")
        if verdict is Verdict.DIFFERENT:
            self._check_comparable()
            if self._verdict_of_codes is not Verdict.DIFFERENT:
                check_outputs(self.output_error, self.runtime, "verify")
            raise RuntimeError(self._cause())
        if self.not_compared:
            warn(
                f"verify: {self.runtime} does not give the codes of {_first(self.not_compared)}: it merged their nodes with "
                f"others, these inputs do not reach them, or each run draws others at random. The codes behind them, and the "
                f"outputs, are compared.",
            )
        if verdict is Verdict.ROUNDING and self.codes.differing > self.codes.allowed(self.share):
            warn(
                f"verify: end to end {self.codes} in {self.runtime}, which computes {len(self.float_layers)} layers in float; "
                f"layer by layer, from its own codes, {self.layer_codes}, which rounding explains; later layers amplify it.",
            )
        return verdict

    def _check_comparable(self) -> None:
        """Raise RuntimeError where there is no cause to look for: other weights, a quantizer left out, or no codes."""
        if self.other_weights:
            first = self.other_weights[0]
            raise RuntimeError(
                f"verify: the weights of the file differ from the model's at {_first(self.other_weights)} ({first!r}: "
                f"{self.weights[first]}): it was exported from another model, or before this one changed; export this one."
            )
        if self.unrounded:
            raise RuntimeError(
                f"verify: {self.remark} Its outputs therefore differ from the model's. Turn these quantizers off in the "
                f"converted model before the export (qtoolkit.disable_quantization(model.get_submodule(name))), or "
                f"accept the difference."
            )
        if not self.codes.compared:
            raise RuntimeError(
                f"verify: {self.runtime} does not give the codes of {', '.join(map(repr, self.not_compared))}: it merged their "
                f"nodes with others, or these inputs do not reach them, so nothing was compared."
            )

    def _cause(self) -> str:
        """Return why codes that can be compared differ, a sentence: the first of the causes that holds."""
        found, remark = self._found(), f"{' ' * bool(self.remark)}{self.remark}"
        if self.integer_layers and not self.on_codes:
            return (
                f"verify: {found} The float reference does not round as integer kernels do: verify "
                f"qtoolkit.convert(prepared, arithmetic='integer').{remark}"
            )
        floats = {layer.name for layer in self.float_layers}
        left = [name for name in self.on_codes if name in floats]
        if left:
            return (
                f"verify: {found} The model computes {len(left)} layers in integers that the runtime computes in float "
                f"({_first(left)}): export with integer_weights=True for a runtime with integer kernels, or verify "
                f"qtoolkit.convert(prepared), which computes in float too.{remark}"
            )
        return (
            f"verify: {found} Weights and arithmetic are the same on both sides: the runtime computes an op before the first "
            f"of these quantizers differently. Report it with the model.{remark}"
        )

    def _found(self) -> str:
        first = str(self.first_difference)
        return (
            f"{self.codes} in {self.runtime}; the first at {first!r}: {self.by_quantizer[first]}; layer by layer, "
            f"from the runtime's own codes: {self.layer_codes}."
        )

    def __str__(self) -> str:
        lines = [
            f"{self.runtime}, end to end: {self.codes}; outputs: largest difference {self.output_difference:.3g}",
            f"  verdict: {self.verdict}",
            f"  in integers: {_counts(self.integer_layers)}",
            f"  in float:    {_with_names(self.float_layers)}; {self.conversions} conversions",
        ]
        first = self.first_difference
        lines += [] if first is None else [f"  first difference: {first}: {self.by_quantizer[first]}"]
        if first is not None and self.layer_by_layer is not None:
            begun = [name for name, count in self.layer_by_layer.items() if count.differing]
            lines.append(f"  layer by layer, from its own codes: {self.layer_codes}; they begin at {_first(begun)}")
        lines += [f"  not compared: {', '.join(self.not_compared)}"] if self.not_compared else []
        lines += [f"  NaN, for which nothing can be compared: {_first(self.nan)}"] if self.nan else []
        if self.changed_by_reading:
            lines.append(f"  reading the codes changes the outputs by up to {self.changed_by_reading:.3g}")
        if self.output_error > OUTPUT_ERROR:
            lines.append(f"  an output differs by {self.output_error:.1%} of its largest value behind the same codes")
        lines += [f"  {each}" for each in (self.of_float16, self.remark) if each]
        return "\n".join(lines)

    @property
    def of_float16(self) -> str:
        """What was compared of a file in float16, and what holds: sentences; "" of other files."""
        if not self.float16:
            return ""
        found, beyond = self.layer_codes, self.layer_codes.differing - self.layer_codes.ties
        differing = (
            "None differs."
            if not found.differing
            else f"{found.differing:,} of {found.compared:,} differ, by {found.steps} steps at most: {found.ties:,} of values "
            f"that float16 rounds across a boundary between two codes, and {beyond:,} of others."
        )
        return (
            f"The file is in float16, and its codes are compared with those of the model in float16, each computed from the "
            f"codes before it. {differing}"
        )


@dataclass(frozen=True)
class DeployedVerification:
    """What `verify` returns: the comparison with each runtime, by the runtime's name."""

    runtimes: Mapping[str, RuntimeCodes]

    def check(self) -> dict[str, Verdict]:
        """Check every runtime; see `RuntimeCodes.check`.

        Returns:
            The verdict of each runtime by its name.

        Raises:
            RuntimeError: A runtime does not compute what the model computes; the message says why, and the first place.
        """
        return {name: runtime.check() for name, runtime in self.runtimes.items()}

    def __str__(self) -> str:
        return "\n".join(map(str, self.runtimes.values()))


def _counts(layers: Iterable[ExecutedLayer]) -> str:
    counts = Counter(layer.kernel for layer in layers)
    return ", ".join(f"{count} {kernel}" for kernel, count in counts.most_common()) or "none"


def _with_names(layers: Iterable[ExecutedLayer]) -> str:
    names: dict[str, list[str]] = defaultdict(list)
    for layer in layers:
        names[layer.kernel].append(layer.name)
    return ", ".join(f"{len(of)} {kernel} ({_first(of)})" for kernel, of in names.items()) or "none"


def _first(names: Sequence[str]) -> str:
    more = [f"and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
    return ", ".join([*names[:SHOWN], *more])


def compare_execution(
    follower: Follower,
    executed: Executed,
    nodes: Nodes,
    names: Iterable[str],
    smooth_outputs: Set[int],
    weights: Mapping[str, CodeCount],
) -> RuntimeCodes:
    """Compare a model with one execution of its file, end to end and, where codes differ, layer by layer.

    `names` are the activation quantizers that should be compared, `smooth_outputs` the places of the outputs that are equal up
    to rounding where the codes are, and `weights` has the comparison of the weights' codes.
    """
    followed = follower.end_to_end(nodes)
    counts = followed.counts
    if follower.draws or any(count.differing for count in counts.values()):
        followed = follower.layer_by_layer(nodes)
    if follower.draws:  # what random numbers change is compared from the runtime's own codes
        counts = {**followed.counts, **counts}
    # Where reading changes the outputs, they belong to other codes than those that were read.
    places = frozenset() if executed.changed_by_reading else smooth_outputs
    return replace(
        RuntimeCodes.of(executed, counts, tensors_of(follower.outputs), names),
        layer_by_layer=followed.counts,
        weights=weights,
        on_codes=follower.on_codes,
        nan=follower.nan,
        output_error=followed.output_error(executed.outputs, places),
    )
