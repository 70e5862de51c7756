"""The switches of a model's quantizers. Enabling quantization sets the grids from the observed ranges."""

from torch import nn

from qtoolkit.calibrate import load_ranges, merged_over_ranks
from qtoolkit.quantizers.quantizer import Quantizer, named_quantizers
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer, quantizers_of

_WEIGHT, _ACTIVATION = "weight_fake_quant", "_post_act_fake_quantizer"  # the ends of MQBench's names


def enable_calibration(model: nn.Module) -> None:
    """Observe ranges without quantization; run data through the model next.

    Example:
        >>> prepared = qt.prepare(torch.nn.Sequential(torch.nn.Linear(4, 2)), backend="tensorrt10")
        >>> enable_calibration(prepared)
        >>> _ = prepared(torch.ones(8, 4))
        >>> enable_quantization(prepared)
        >>> float(prepared.get_submodule("activation_quantizers.input_1").amax)
        1.0
    """
    enable_calibration_woquantization(model)


def enable_calibration_woquantization(model: nn.Module, quantizer_type: str = "fake_quant") -> None:
    """Observe with the quantizers of a type, quantize with none.

    The type is a substring of MQBench's names: "weight_fake_quant", "act_fake_quant", or "fake_quant" for all. Raises
    ValueError: no quantizer has such a name.
    """
    _take_ranges(model)
    for quantizer, chosen in _chosen(model, quantizer_type).items():
        _set(quantizer, observing=chosen, quantizing=False)


def enable_calibration_quantization(model: nn.Module, quantizer_type: str = "fake_quant") -> None:
    """Observe and quantize with the quantizers of a type (see `enable_calibration_woquantization`); the others do neither.

    A learned quantizer without a range observes only, until the next switch.
    """
    _take_ranges(model)
    for quantizer, chosen in _chosen(model, quantizer_type).items():
        has_range = quantizer.ready or not quantizer.kind.LEARNED
        _set(quantizer, observing=chosen, quantizing=chosen and has_range)


enable_all = enable_calibration_quantization  # with all quantizers


def enable_quantization(model: nn.Module, weight_cali_on: bool = False, act_cali_on: bool = False) -> None:
    """Quantize with the observed ranges, in a process group with the ranges of all ranks.

    `weight_cali_on` continues to observe weights, `act_cali_on` activations. Raises ValueError: a quantizer has observed NaN or
    infinities.
    """
    _take_ranges(model)
    for quantizer in named_quantizers(model).values():
        _set(quantizer, observing=weight_cali_on if quantizer.of_weight else act_cali_on, quantizing=True)


def disable_all(model: nn.Module) -> None:
    """Neither observe nor quantize: the model computes in float."""
    _take_ranges(model)
    for quantizer in named_quantizers(model).values():
        _set(quantizer, observing=False, quantizing=False)


def _take_ranges(model: nn.Module) -> None:
    """Set the grids of the observing quantizers."""
    quantizers = quantizers_of(model)
    if any(quantizer.observing for quantizer in quantizers.values()):
        merged_over_ranks(quantizers, 0)
        load_ranges(model, {name: quantizer for name, quantizer in quantizers.items() if quantizer.observing})


def _chosen(model: nn.Module, quantizer_type: str) -> dict[TensorQuantizer, bool]:
    """Return each quantizer, and whether its name in MQBench contains this substring."""
    chosen = {
        quantizer: quantizer_type in f"{name}.{_WEIGHT if quantizer.of_weight else _ACTIVATION}"
        for name, quantizer in quantizers_of(model).items()
    }
    if not any(chosen.values()):
        raise ValueError(
            "quantizer_type must be a substring of a quantizer's name, such as 'fake_quant' for all, 'weight_fake_quant' or "
            f"'act_fake_quant', got {quantizer_type!r}, which matches none of the model's {len(chosen)} quantizers."
        )
    return chosen


def _set(quantizer: Quantizer, observing: bool, quantizing: bool) -> None:
    quantizer.quantizing = quantizing
    if isinstance(quantizer, TensorQuantizer):
        quantizer.observing = observing
