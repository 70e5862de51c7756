"""QuantSpec: how one tensor is quantized."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from qtoolkit.config.formats import BLOCKS, LARGEST, FloatType
from qtoolkit.errors import check_known, check_mapping, unknown
from qtoolkit.instead import FORMATS as MEANT
from qtoolkit.instead import OF_OBSERVERS, RENAMED, check_arguments

# The observers and quantizers that a spec may name: what they check and which OPTIONS they have. `qtoolkit.quantizers.table`
# fills them.
OBSERVERS: dict[str, Any] = {}
QUANTIZERS: dict[str, Any] = {}
FORMATS = ("int", *LARGEST, *BLOCKS, "nnie")
# The fields that a format other than "int" fixes.
FIXED: dict[str, dict[str, object]] = {
    format: {
        "bits": 4 if format in ("e2m1", "mxfp4", "nvfp4") else 8,
        "signed": True,
        "symmetric": True,
        "narrow": False,
    }
    for format in FORMATS[1:]
}
FIXED["nnie"] |= {"pow2_scale": False, "scale_dtype": "float32"}
for name, block in BLOCKS.items():
    FIXED[name] |= {"pow2_scale": False, "scale_dtype": "float32", "group_size": block.size, "observer": "minmax"}
# The fields that dynamic=True fixes, besides the formats that it takes.
FIXED_IF_DYNAMIC: dict[str, object] = {
    "axis": None,
    "observer": "minmax",
    "quantizer": "fixed",
    "scale_dtype": "float32",
}


@dataclass(frozen=True)
class QuantSpec:
    """How one kind of tensor is quantized. In a rule of a QConfigMapping, a spec holds only the fields that it changes.

    There, fields that are left out have the values of the backend's spec for that tensor: `QuantSpec(quantizer="lsq")`
    trains the scale of uint8 values with a zero point on "onnxruntime", and of int8 values without one on "tensorrt".
    Fields that are written, and fields that a format, a quantizer, an observer or `dynamic` needs, override the
    backend's. With symmetric=True written and `signed` left out, the tensor is signed. Everywhere else, as in a
    TensorQuantizer, fields that are left out have the defaults of the signature.

    Attributes:
        bits: Bits of a quantized value, 2 to 16.
        signed: Integers from -2^(bits-1) to 2^(bits-1)-1; otherwise from 0 to 2^bits-1.
        symmetric: No zero point: zero is the integer 0.
        narrow: Exclude the lowest integer, so that a signed range is symmetric.
        axis: Without a group_size, the channel axis, with one scale per channel. None is one scale for the tensor. In a
            QConfigMapping's global rule, axis 0 of a weight stands for the output channel of every kind of layer; in a rule by
            name, regular expression or type it is the weight's own axis: a transposed convolution has (in, out, ...). An
            axis that is left out is the backend's in every rule: the output channel, where it has a scale for each channel.
        group_size: Number of consecutive elements along `axis` that share a scale, for weights: ONNX's blocked quantization.
            It must divide the axis. Scales have the weight's shape with dimension `axis` divided by group_size. The axis is
            usually the input's: with axis=1 and group_size=32, the weight (out, in) of a linear layer has scales
            (out, in / 32), and the weight (out, in, h, w) of a convolution has scales (out, in / 32, h, w).
        pow2_scale: Round scales up to powers of two.
        format: "int"; or a format of `qtoolkit.ops.fake_quant_float`, signed, symmetric, and with a fixed scale: "e4m3" or
            "e5m2" (8 bits), "e2m1" (bits=4), or "nnie" (8 bits), a logarithmic grid whose scale is the largest magnitude, which
            cannot be exported. A scale is the value of the format's 1. Weights in OCP's MX formats have axis=1, group_size=32
            and pow2_scale=True; scales are rounded up, so that no element saturates. Or a format with a scale for each block of
            neighbours along `axis`, by default the last one: "mxfp8" and "mxfp4" (OCP MX v1.0: blocks of 32 e4m3 or e2m1 and a
            scale of a power of two, rounded down) or "nvfp4" (blocks of 16 e2m1, and scales in e4m3 relative to one of the
            tensor). These set bits, axis and group_size. A weight's scales follow it; an activation's are computed from
            each input, without calibration.
        observer: How the range is found: "minmax" (the range of all inputs), "moving_average", "clip_std" (mean +- `deviations`
            times the standard deviation), "lsq" (the start of LSQ's paper, 2 * mean|x| / sqrt(qmax)), "histogram" (the range
            that a `method` chooses from a histogram of all inputs), "moving_histogram" (the moving average of what a `method`
            chooses for each input); with pow2_scale also "pow2" (the power of two with the least squared error) and
            "pow2_mode" (the power of two that is best for the most inputs); or "constant" (a given range).
            docs/observers.md compares them.
        observer_args: Options of the observer, with their defaults: `momentum` (0.1) for "moving_average" and
            "moving_histogram"; `deviations` (2.6) for "clip_std"; `bins` (2048) for all with a histogram; `method` ("mse"; or
            "l2", "entropy", "percentile") and `percentile` (99.99) for "histogram" and "moving_histogram"; `low` (-1.0) and
            `high` (1.0) for "constant".
        quantizer: "fixed" (the scale follows the range), "lsq" (the scale is trained, arXiv 1902.08153), or another name of
            `qtoolkit.quantizers.table`, which says how to add one: "lsq_plus", "pact", "learned_range", "dsq", "tqt", "dorefa",
            "apot", "qil". Trained parameters start at the least squared error with the observer "minmax", and from the range
            of any other one. docs/quantizers.md compares them.
        quantizer_args: Options of the quantizer, with their defaults: `alpha` (0.2) for "dsq"; `gamma` (1.0) and `learn_gamma`
            (False) for "qil". The others have none.
        dynamic: Compute the scale of an activation from each input, one for each token (each row of the last dimension), not
            calibrated. For "int" and the formats of small floats without blocks.
        scale_dtype: The type whose numbers the scales are, in training and in the deployed model: "float32"; or "float16", for
            a target whose Q/DQ nodes have scales of that type. Scales then have 11 significant bits and are at least 2^-14
            (`qtoolkit.ops.float16_scale`), where they are read: stored and trained scales stay in float32.
        given: The names of the fields that are written; None takes the call's arguments. `dataclasses.replace` keeps
            them and adds the fields that differ from their defaults; `with_` adds all that it sets. Equality ignores
            them.

    Raises:
        ValueError: A value is out of its range, or a name is unknown.
        TypeError: An argument is unknown. For other tools' names, such as num_bits, the error says what to write.

    Example:
        >>> spec = QuantSpec(bits=4, narrow=True)
        >>> spec.qmin, spec.qmax
        (-7, 7)
        >>> mapping = qt.QConfigMapping().set_global(qt.QConfig(QuantSpec(quantizer="lsq"), QuantSpec(bits=4)))
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2))
        >>> prepared = qt.prepare(model, torch.zeros(1, 4), backend="onnxruntime", qconfig_mapping=mapping)
        >>> [quantizer.spec.describe() for quantizer in qt.quantizers_of(prepared).values()]
        ['int4 per-channel(0)', 'uint8 affine lsq']
        >>> QuantSpec.from_dict({"bit": 4})
        Traceback (most recent call last):
        ...
        ValueError: unknown key of QuantSpec 'bit'; did you mean 'bits'? Known: axis, bits, dynamic, format, ...
    """

    bits: int = 8
    signed: bool = True
    symmetric: bool = True
    narrow: bool = False
    axis: int | None = None
    group_size: int | None = None
    pow2_scale: bool = False
    format: Literal["int", "e4m3", "e5m2", "e2m1", "mxfp8", "mxfp4", "nvfp4", "nnie"] = "int"
    observer: str = "minmax"
    observer_args: Mapping[str, Any] = field(default_factory=dict)
    quantizer: str = "fixed"
    quantizer_args: Mapping[str, Any] = field(default_factory=dict)
    dynamic: bool = False
    scale_dtype: FloatType = "float32"
    given: frozenset[str] | None = field(default=None, kw_only=True, compare=False, repr=False)

    if not TYPE_CHECKING:

        def __new__(cls, *args: object, **kwargs: object) -> Self:
            """Check the names of the arguments, and note them for `__post_init__`."""
            known = cls.__match_args__  # all but `given`
            if any(name not in known and name != "given" for name in kwargs):  # which torch.compile can trace
                check_arguments("QuantSpec", {name: kwargs[name] for name in kwargs if name != "given"}, known)
            new = super().__new__(cls)
            if "given" not in kwargs:
                object.__setattr__(new, "_named", frozenset((*known[: len(args)], *kwargs)))
            return new

    def __setstate__(self, state: Mapping[str, object]) -> None:
        """Restore a copy or a pickle, without the notes of `__new__`."""
        vars(self).clear()
        vars(self).update(state)

    def __post_init__(self) -> None:
        self._note_given()
        if type(self.bits) is not int or not 2 <= self.bits <= 16:
            raise ValueError(f"QuantSpec: bits must be a whole number from 2 to 16, got {self.bits!r}.")
        if self.axis is not None and type(self.axis) is not int:
            raise ValueError(f"QuantSpec: axis must be a whole number or None, got {self.axis!r}.")
        for name in ("signed", "symmetric", "narrow", "pow2_scale", "dynamic"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"QuantSpec: {name} must be true or false, got {getattr(self, name)!r}.")
        if self.narrow and self.symmetric and not self.signed:
            raise ValueError(
                "QuantSpec: narrow=True leaves out the lowest integer, which stands for zero with signed=False and "
                "symmetric=True; set narrow=False, or symmetric=False."
            )
        self._complete_blocks()
        self._check_group_size()
        check_known("format", self.format, FORMATS, MEANT)
        check_known("scale_dtype", self.scale_dtype, get_args(FloatType))
        check_known("observer", self.observer, OBSERVERS, OF_OBSERVERS)
        check_known("quantizer", self.quantizer, QUANTIZERS)
        observer, quantizer = OBSERVERS[self.observer], QUANTIZERS[self.quantizer]
        _check_options(f"observer {self.observer!r}", self.observer_args, observer.OPTIONS)
        _check_options(f"quantizer {self.quantizer!r}", self.quantizer_args, quantizer.OPTIONS)
        for name in ("observer_args", "quantizer_args"):
            object.__setattr__(self, name, dict(getattr(self, name)))  # the caller may change its own later
        self._check_fixed(FIXED.get(self.format, {}), f"format={self.format!r} needs")
        self._check_dynamic()
        observer.check(self)
        quantizer.check(self)

    def _note_given(self) -> None:
        """Set `given` to the names of the call's arguments, or add the fields that differ from their default to it."""
        if self.given is None:
            object.__setattr__(self, "given", vars(self).pop("_named", ALL))
            return
        if not ALL.issuperset(self.given):
            raise ValueError(f"QuantSpec: given must hold names of its fields, got {sorted(self.given)}.")
        changed = [name for name, default in DEFAULTS.items() if getattr(self, name) != default]
        object.__setattr__(self, "given", self.given.union(changed))

    def _complete_blocks(self) -> None:
        """Set the fields that a block format fixes, where they have the default."""
        if self.format in BLOCKS:
            fixed = {"axis": -1, **FIXED[self.format]}
            for name in ("bits", "axis", "group_size"):
                if getattr(self, name) == DEFAULTS[name]:
                    object.__setattr__(self, name, fixed[name])

    def _check_dynamic(self) -> None:
        if not self.dynamic:
            return
        if self.format in (*BLOCKS, "nnie"):
            raise ValueError(
                f"QuantSpec: dynamic=True needs format='int', 'e4m3', 'e5m2' or 'e2m1', got {self.format!r}; the blocks of "
                f"activations have scales of their own in any case."
            )
        self._check_fixed(FIXED_IF_DYNAMIC, "dynamic=True computes a scale for each token, without data: it needs")

    def _check_group_size(self) -> None:
        size = self.group_size
        if size is not None and (type(size) is not int or size < 1):
            raise ValueError(f"QuantSpec: group_size must be a whole number above 0 or None, got {size!r}.")
        if size is not None and self.axis is None:
            raise ValueError(
                f"QuantSpec: group_size={size} needs the axis that groups run along, got axis=None; axis=1 is the input of a "
                f"linear layer's weight (out, in)."
            )

    def _check_fixed(self, fixed: Mapping[str, object], needs: str) -> None:
        for name, value in fixed.items():
            if getattr(self, name) != value:
                raise ValueError(f"QuantSpec: {needs} {name}={value!r}, got {getattr(self, name)!r}.")

    @property
    def qmin(self) -> int:
        """Lowest quantized value; for a format that is not "int", the lowest value in units of the scale."""
        if self.format != "int":
            return -self.qmax
        return (-(1 << self.bits - 1) if self.signed else 0) + int(self.narrow)

    @property
    def qmax(self) -> int:
        """Highest quantized value; for a format that is not "int", the highest value in units of the scale."""
        if self.format != "int":
            return LARGEST.get(self.element, 1)
        return (1 << self.bits - int(self.signed)) - 1

    @property
    def element(self) -> str:
        """The format of one element: of a block's elements, or `format` itself."""
        return BLOCKS[self.format].element if self.format in BLOCKS else self.format

    @property
    def block_size(self) -> int:
        """The group_size as an argument of ops: 0 means none."""
        return self.group_size or 0

    def scale_shape(self, sizes: Sequence[int], group: int = 1) -> tuple[int, ...]:
        """Return the shape of the scale of a tensor of these sizes.

        Args:
            sizes: Shape of the tensor.
            group: Groups of dimension 0 (see `qtoolkit.ops`).

        Raises:
            ValueError: The tensor does not have the axis, or group_size does not divide it.

        Example:
            >>> QuantSpec(axis=0).scale_shape((8, 64)), QuantSpec(axis=1, group_size=32).scale_shape((8, 64))
            ((8,), (8, 2))
        """
        if self.axis is None:
            return ()
        dims = len(sizes)
        if not -dims <= self.axis < dims:
            raise ValueError(
                f"the axis of a tensor of {dims} dimensions must lie in [{-dims}, {dims - 1}], got {self.axis}; set another "
                f"axis, or give the layer a config of its own in the QConfigMapping."
                if dims
                else f"the axis of a number must be None, got {self.axis}; take one scale for it in the QConfigMapping."
            )
        size = sizes[self.axis]
        if self.group_size is None:
            return (size * group,)
        if size % self.group_size != 0:
            raise ValueError(
                f"group_size must divide dimension {self.axis} of a tensor of shape {tuple(sizes)}, got "
                f"{self.group_size}; take a divisor of {size}, or give the layer a config of its own in the QConfigMapping."
            )
        shape = list(sizes)
        shape[self.axis] = size // self.group_size
        return tuple(shape)

    def rows_per_scale(self, dims: int) -> int:
        """Return how many entries of dimension 0 share scales, of a tensor with so many dimensions; 0 where all do.

        Example:
            >>> [QuantSpec(axis=axis).rows_per_scale(2) for axis in (None, 0, 1)]
            [0, 1, 0]
            >>> QuantSpec(axis=0, group_size=4).rows_per_scale(2)
            4
        """
        if self.axis is None:
            return 0
        return self.group_size or 1 if self.axis % dims == 0 else int(self.group_size is not None)

    def describe(self) -> str:
        """Return a short name for reports.

        Example:
            >>> QuantSpec(axis=0).describe(), QuantSpec(signed=False, symmetric=False, quantizer="lsq").describe()
            ('int8 per-channel(0)', 'uint8 affine lsq')
            >>> QuantSpec(bits=4, axis=1, group_size=32).describe()
            'int4 groups of 32(1)'
        """
        channels = "per-channel" if self.group_size is None else f"groups of {self.group_size}"
        words = [f"{'' if self.signed else 'u'}int{self.bits}" if self.format == "int" else self.format]
        words += ["narrow"] if self.narrow else []
        words += [] if self.symmetric else ["affine"]
        words += (
            [] if self.axis is None or (self.format in BLOCKS and self.axis == -1) else [f"{channels}({self.axis})"]
        )
        words += ["dynamic"] if self.dynamic else []
        words += ["pow2"] if self.pow2_scale else []
        words += ["float16 scale"] if self.scale_dtype == "float16" else []
        words.append(QUANTIZERS[self.quantizer].label)
        return " ".join(word for word in words if word)

    # ---- what it leaves to the backend

    def with_(self, **changes: Any) -> Self:
        """Return a spec with other values of fields, which are then written ones.

        Example:
            >>> sorted(QuantSpec(quantizer="lsq").with_(bits=8).given)
            ['bits', 'quantizer']
        """
        return replace(self, **changes, given=self._given.union(changes))

    def with_scale_dtype(self, scale_dtype: FloatType) -> Self:
        """Return the spec with scales of this type, or as it is where it needs scales of another one."""
        return self if "scale_dtype" in self._fixed() else self.with_(scale_dtype=scale_dtype)

    def completed(self, base: "QuantSpec") -> Self:
        """Return the spec with all fields written: fields that it leaves out have the values of another spec, the backend's.

        Fields that its format, its quantizer, its observer or `dynamic` needs are not taken from there.

        Raises:
            ValueError: A field that is written does not fit the other spec.

        Example:
            >>> base = QuantSpec(signed=False, symmetric=False)
            >>> [spec.completed(base).describe() for spec in (QuantSpec(bits=4), QuantSpec(symmetric=True))]
            ['uint4 affine', 'int8']
        """
        own = self._given | self._fixed()
        if "symmetric" in own and self.symmetric:
            own |= {"signed"}  # without a zero point, an unsigned grid would clip all negative values
        for name in ("observer", "quantizer"):
            own |= {f"{name}_args"} if name in own else set()
        values = {name: getattr(self if name in own else base, name) for name in DEFAULTS}
        if "narrow" not in own:
            values["narrow"] &= values["signed"] or not values["symmetric"]
        return type(self)(**values, given=ALL)

    @property
    def _given(self) -> frozenset[str]:
        return self.given or frozenset()

    def _fixed(self) -> frozenset[str]:
        """Return the names of the fields whose values its format, its quantizer, its observer or `dynamic` needs."""
        of_blocks = ("axis", "group_size") if self.format in BLOCKS else ()
        of_dynamic = (*FIXED_IF_DYNAMIC, "format") if self.dynamic else ()
        of_quantizer = (need.field for need in QUANTIZERS[self.quantizer].NEEDS)
        of_observer, of_format = OBSERVERS[self.observer].NEEDS, FIXED.get(self.format, ())
        return frozenset((*of_blocks, *of_dynamic, *of_quantizer, *of_observer, *of_format))

    def to_dict(self) -> dict[str, object]:
        """Return the fields that are written, as values that JSON can represent."""
        return {name: value for name, value in self.values().items() if name in self._given}

    def values(self) -> dict[str, object]:
        """Return all fields, written or not, as values that JSON can represent."""
        values = {name: getattr(self, name) for name in DEFAULTS}
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build a spec from `to_dict`'s result.

        Raises:
            ValueError: A key or a value is unknown.
        """
        check_mapping("QuantSpec", values)
        for key in values:
            check_known("key of QuantSpec", key, list(DEFAULTS), RENAMED)
        try:
            return cls(**values)
        except RecursionError:
            raise ValueError("QuantSpec: a value is nested too deeply.") from None


# The fields, with their defaults.
DEFAULTS: dict[str, object] = {
    f.name: {} if f.default is MISSING else f.default for f in fields(QuantSpec) if f.name != "given"
}
ALL = frozenset(DEFAULTS)


def _check_options(of: str, args: Mapping[str, object], known: Mapping[str, object]) -> None:
    check_mapping(f"the options of {of}", args)
    for key in args:
        if key not in known:
            raise ValueError(
                unknown(f"option of {of}", key, known) if known else f"{of} takes no options, got {key!r}."
            )
