"""End-to-end comparison of all quantized values between a model and a runtime that runs its file."""

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
    """The verdict of a comparison with a runtime.

    Attributes:
        EQUAL: All compared quantized values are identical, end to end.
        ROUNDING: Quantized values differ end to end, but layer by layer, with the runtime's quantized values as inputs, only by
            rounding.
        FLOAT16: The file is in float16. Quantized values differ from the float16 model end to end, but layer by layer, with the
            runtime's quantized values as inputs, only by float16 rounding.
        SATURATES: The runtime's integer sums saturate on this processor, so its results are wrong for some inputs: the file has
            int8 weights, and the processor has no VNNI instructions.
        DIFFERENT: The runtime computes other values than the model.
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
    """Comparison of one runtime's quantized values with the model, end to end.

    Attributes:
        runtime: The runtime and its version.
        by_quantizer: The comparison at each activation quantizer, in the order of the file.
        output_difference: The maximum absolute difference of the outputs.
        layers: The compute nodes of the runtime's optimized graph, and which of them compute in integers.
        conversions: The number of nodes that quantize or dequantize.
        not_compared: Quantizers that cannot be compared: the runtime does not return their values, they are not executed for
            these inputs, or their values depend on random numbers that differ in each run.
        changed_by_reading: The largest difference of outputs between the graph that users run and the graph that also returns
            the quantized values.
        share: The share of quantized values that may differ by one step because the runtime rounds in another order.
        remark: An additional note for users of this runtime; "" if there is none.
        layer_by_layer: The comparison at each quantizer if the model's layers get the runtime's quantized values as inputs: the
            differences that begin there. None in `compare_runtimes`, which has no model.
        unrounded: Quantizers that the runtime skips in the graph that users run.
        weights: The comparison of quantized weights between file and model, by the names of their quantizers.
        on_codes: The layers that the PyTorch model computes in integers.
        steps: By how many steps a quantized value may differ because the runtime rounds in another order.
        nan: The quantizers of the model that get NaN, and cannot be compared.
        output_error: The largest relative difference of the outputs if the model computes them from the runtime's quantized
            values. It covers outputs of an ONNX file that are smooth functions of the last quantized values.
        saturating: The layers with sums of products that may saturate on this processor.
        float16: Whether the file, and the model that it is compared with, are in float16.
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
        """Return the comparison of one execution: its counts, and the difference of its outputs.

        `names` are the quantizers that should be compared. The values that only a model can give have defaults.
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
        """The sum of `layer_by_layer` over all quantizers; `codes` if it is None."""
        return self.codes if self.layer_by_layer is None else sum_of(self.layer_by_layer.values())

    @property
    def first_difference(self) -> str | None:
        """The first quantizer, in the order of the file, with a difference; None if there is none."""
        return next((name for name, count in self.by_quantizer.items() if count.differing), None)

    @property
    def integer_layers(self) -> tuple[ExecutedLayer, ...]:
        """The nodes that compute in integers."""
        return tuple(layer for layer in self.layers if layer.integer)

    @property
    def float_layers(self) -> tuple[ExecutedLayer, ...]:
        """The nodes that compute in float."""
        return tuple(layer for layer in self.layers if not layer.integer)

    @property
    def other_weights(self) -> tuple[str, ...]:
        """The weight quantizers with other values in the file than in the model."""
        return tuple(name for name, count in self.weights.items() if count.differing)

    @property
    def verdict(self) -> Verdict:
        """The verdict of the comparison.

        If the runtime computes all layers in integers, all quantized values must be identical end to end. Otherwise a few float
        sums round differently, and later layers spread each difference. `layer_codes` then counts the differences that begin at
        a quantizer. They must be one step: any number at rounding boundaries, and a small share elsewhere. Outputs must match
        up to rounding. In a float16 file, a value counts as at a boundary if it is within one float16 unit in the last place of
        the grid's largest value: with 255 steps, within a quarter of a step.
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
        """Raise an error if the runtime does not compute the values of the model.

        Returns:
            `Verdict.EQUAL`: all quantized values are identical end to end. `Verdict.ROUNDING`, or `Verdict.FLOAT16` for a file
            in float16: some differ end to end, and layer by layer rounding explains every difference. This is never returned if
            onnxruntime computes all layers in integers.

        Raises:
            RuntimeError: The verdict is `Verdict.SATURATES` or `Verdict.DIFFERENT`; the message gives the cause and the first
                quantizer.

        Warns:
            UserWarning: Quantizers could not be compared, or later layers amplified a few rounding differences, so the outputs
                differ from the model.
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
                f"verify: {self.runtime} does not return the quantized values of {_first(self.not_compared)}: it merged their "
                "nodes with others, these inputs do not reach them, or they depend on random numbers. Later quantizers and "
                "the outputs are compared.",
            )
        if verdict is Verdict.ROUNDING and self.codes.differing > self.codes.allowed(self.share):
            warn(
                f"verify: end to end {self.codes} in {self.runtime}, which computes {len(self.float_layers)} layers in float; "
                f"layer by layer, with its quantized values as inputs, {self.layer_codes}, which rounding explains; later "
                "layers amplify it.",
            )
        return verdict

    def _check_comparable(self) -> None:
        """Raise RuntimeError for a known cause: other weights, a quantizer that the runtime skips, or nothing to compare."""
        if self.other_weights:
            first = self.other_weights[0]
            raise RuntimeError(
                f"verify: the weights of the file differ from the model's at {_first(self.other_weights)} ({first!r}: "
                f"{self.weights[first]}): the file was exported from another model, or before this model changed; export this "
                "model."
            )
        if self.unrounded:
            raise RuntimeError(
                f"verify: {self.remark} Its outputs therefore differ from the model's. Disable these quantizers in the "
                "converted model before the export (qtoolkit.disable_quantization(model.get_submodule(name))), or accept the "
                "difference."
            )
        if not self.codes.compared:
            raise RuntimeError(
                f"verify: {self.runtime} does not return the quantized values of {', '.join(map(repr, self.not_compared))}: it "
                "merged their nodes with others, or these inputs do not reach them, so nothing was compared."
            )

    def _cause(self) -> str:
        """Return why comparable quantized values differ, as a sentence: the first cause that applies."""
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
                f"verify: {found} The runtime computes {len(left)} layers in float that the model computes in integers "
                f"({_first(left)}): export with integer_weights=True for a runtime with integer kernels, or verify "
                f"qtoolkit.convert(prepared), which also computes in float.{remark}"
            )
        return (
            f"verify: {found} Weights and arithmetic are the same on both sides: the runtime computes an op before the first "
            f"of these quantizers differently. Please report it with the model.{remark}"
        )

    def _found(self) -> str:
        first = str(self.first_difference)
        return (
            f"{self.codes} in {self.runtime}; the first at {first!r}: {self.by_quantizer[first]}; layer by layer, with the "
            f"runtime's quantized values as inputs: {self.layer_codes}."
        )

    def __str__(self) -> str:
        lines = [
            f"{self.runtime}, end to end: {self.codes}; outputs: max abs difference {self.output_difference:.3g}",
            f"  verdict: {self.verdict}",
            f"  in integers: {_counts(self.integer_layers)}",
            f"  in float:    {_with_names(self.float_layers)}; {self.conversions} conversions",
        ]
        first = self.first_difference
        lines += [] if first is None else [f"  first difference: {first}: {self.by_quantizer[first]}"]
        if first is not None and self.layer_by_layer is not None:
            begun = [name for name, count in self.layer_by_layer.items() if count.differing]
            lines.append(f"  layer by layer, from its own values: {self.layer_codes}; they begin at {_first(begun)}")
        lines += [f"  not compared: {', '.join(self.not_compared)}"] if self.not_compared else []
        lines += [f"  not compared (NaN): {_first(self.nan)}"] if self.nan else []
        if self.changed_by_reading:
            lines.append(f"  reading the quantized values changes the outputs by up to {self.changed_by_reading:.3g}")
        if self.output_error > OUTPUT_ERROR:
            lines.append(f"  an output differs by {self.output_error:.1%} of its largest value for identical inputs")
        lines += [f"  {each}" for each in (self.of_float16, self.remark) if each]
        return "\n".join(lines)

    @property
    def of_float16(self) -> str:
        """A summary of the comparison for a float16 file; "" for other files."""
        if not self.float16:
            return ""
        found, beyond = self.layer_codes, self.layer_codes.differing - self.layer_codes.ties
        differing = (
            "None differs."
            if not found.differing
            else f"{found.differing:,} of {found.compared:,} differ, by at most {found.steps} steps: {found.ties:,} at "
            f"rounding boundaries of float16, and {beyond:,} elsewhere."
        )
        return f"The file is in float16. Its quantized values are compared layer by layer with the float16 model. {differing}"


@dataclass(frozen=True)
class DeployedVerification:
    """The result of `verify`: the comparison with each runtime, by the runtime's name."""

    runtimes: Mapping[str, RuntimeCodes]

    def check(self) -> dict[str, Verdict]:
        """Check every runtime; see `RuntimeCodes.check`.

        Returns:
            The verdict of each runtime by its name.

        Raises:
            RuntimeError: A runtime does not compute the values of the model; the message gives the cause and the first
                quantizer.
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
    """Compare a model with one execution of its file, end to end and, if values differ, layer by layer.

    `names` are the activation quantizers that should be compared, `smooth_outputs` the positions of outputs that match up to
    rounding if the quantized values match, and `weights` the comparison of the quantized weights.
    """
    followed = follower.end_to_end(nodes)
    counts = followed.counts
    if follower.draws or any(count.differing for count in counts.values()):
        followed = follower.layer_by_layer(nodes)
    if follower.draws:  # what random numbers change is compared from the runtime's own codes
        counts = {**followed.counts, **counts}
    # If reading changes the outputs, they do not belong to the quantized values that were read.
    places = frozenset() if executed.changed_by_reading else smooth_outputs
    return replace(
        RuntimeCodes.of(executed, counts, tensors_of(follower.outputs), names),
        layer_by_layer=followed.counts,
        weights=weights,
        on_codes=follower.on_codes,
        nan=follower.nan,
        output_error=followed.output_error(executed.outputs, places),
    )
