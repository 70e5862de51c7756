"""Verdicts: the status of an op or a layer, with its cause, as data and as a sentence."""

from dataclasses import dataclass
from enum import StrEnum

from qtoolkit.errors import with_article


class Status(StrEnum):
    """The status of an op or a layer."""

    QUANTIZED = "quantized"
    FUSED = "fused"  # computed as one op with the op before it
    TRANSPARENT = "transparent"  # moves values, on the grid of its input
    FLOAT = "float"


class Cause(StrEnum):
    """Why an op or a layer has its status, or does not compute in integers."""

    COMPUTED = "computed on quantized tensors"
    REPLACED = "replaced by a QAT layer, without a graph"
    CONTAINS = "a leaf module with quantized layers in it"
    FOLDED = "a batch norm that the layer before it folds"
    OWN_QUANTIZER = "calls a quantizer of its own"
    OUTPUT = "its output is quantized"
    JOINED = "fused into the previous op"
    MOVES = "moves values"
    CONFIG = "the user's config"
    IGNORED = "the exclude argument"
    TARGET = "a rule of the target"
    NO_QAT_TYPE = "no QAT type"
    NO_ELEMENTS = "its weight has no elements"
    COMPLEX = "complex numbers"
    NOT_FOLDED = "a batch norm that no layer folds"
    NOT_QUANTIZED_AROUND = "its inputs or its output are not quantized"
    NOT_CALLED = "not called by forward"
    NOT_AN_OP = "an input, an output or a constant"
    PUT_IN = "added after the model was quantized"
    # why it does not compute in integers
    AS_ASKED = "as asked"
    NO_KERNEL = "no kernel for it"
    INPUT_CODES = "how its inputs are quantized"
    WEIGHT_CODES = "how its weight is quantized"
    OUTPUT_CODES = "how its output is quantized"
    CALL = "how it is called"


@dataclass(frozen=True)
class Refusal:
    """Why a layer or an op does not compute in integers, or is not fused: the cause, and the words for it."""

    cause: Cause
    text: str


@dataclass(frozen=True)
class Verdict:
    """The status of an op or a layer, with its cause, and a sentence for people where there is more to say.

    Example:
        >>> prepared = qt.prepare(torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Softmax(1)), backend="tensorrt")
        >>> prepared.plan.status["_1"].text
        'float: a softmax, which tensorrt computes in float'
    """

    status: Status
    cause: Cause
    text: str = ""

    @classmethod
    def quantized(cls, cause: Cause = Cause.COMPUTED, text: str = "") -> "Verdict":
        """Return the verdict on a quantized op."""
        return cls(Status.QUANTIZED, cause, text)

    @classmethod
    def left_float(cls, cause: Cause, why: str) -> "Verdict":
        """Return the verdict on an op in float; `why` completes "float: ..."."""
        return cls(Status.FLOAT, cause, f"float: {why}")

    @classmethod
    def put_in(cls, kind: str) -> "Verdict":
        """Return the verdict on an op or a layer of this type that replaces the plan's and has no quantizer."""
        return cls.left_float(Cause.PUT_IN, f"{with_article(kind)} that was added after the model was quantized")


@dataclass(frozen=True)
class Obstacle:
    """Why a function returns nothing: a part of a sentence."""

    why: str


BY_CONFIG = Verdict.left_float(Cause.CONFIG, "the qconfig_mapping leaves it in float")
UNREACHED = Verdict.left_float(Cause.NOT_CALLED, "no data reached it before qtoolkit.convert")
FOLDED = Verdict.quantized(Cause.FOLDED, "folded into the layer before it")
