"""quantization_report(): what is quantized and how, what stays in float and why."""

from dataclasses import replace

from torch import nn

from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.instead import say_when_called
from qtoolkit.model_state import check_module
from qtoolkit.quantizers.float16_scales import warn_of_raised
from qtoolkit.quantizers.tensor_quantizer import quantizers_of
from qtoolkit.report.lines import LayerLine, QuantizationReport, TensorLine
from qtoolkit.report.of_graph import report_of_graph
from qtoolkit.report.of_modules import report_of_modules

__all__ = ["LayerLine", "QuantizationReport", "TensorLine", "quantization_report"]


def quantization_report(model: nn.Module) -> QuantizationReport:
    """Report how each op of a prepared, replaced or converted model is quantized, or why it is not.

    A model without a graph has a line for each layer, replaced or not, and for each module whose own forward calls
    quantizers.

    Args:
        model: The result of `qtoolkit.prepare`, `qtoolkit.quant_modules.replace` or `qtoolkit.convert`, or any other model
            with quantizers.

    Returns:
        A report with a line for each op and each quantized tensor; print it, or read its fields.

    Raises:
        TypeError: The model was neither prepared nor replaced, and has no quantizer.

    Example:
        >>> prepared = qt.prepare(torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Softmax(1)), backend="tensorrt")
        >>> report = qt.quantization_report(prepared)
        >>> [(line.name, str(line.status), line.reason) for line in report.layers]
        [('0', 'quantized', ''), ('1', 'float', 'float: a softmax, which tensorrt computes in float')]
    """
    model = check_module(model, "quantization_report")
    report = report_of_graph(model) if isinstance(model, QuantizedGraphModule) else report_of_modules(model)
    quantizers = quantizers_of(model)
    warn_of_raised(quantizers, "quantization_report")
    of_weights = {name: quantizer for name, quantizer in quantizers.items() if quantizer.of_weight}
    return replace(report, following={name: quantizer.follows for name, quantizer in of_weights.items()})


say_when_called(
    __name__, "qtoolkit.debug.report(model, inputs, path) for a page, or print(qtoolkit.quantization_report(model))"
)
