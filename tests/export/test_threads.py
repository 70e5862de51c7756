"""Exports in several threads do not meet: torch's exporters and the verification have state that all threads share."""

import threading
import warnings

import onnx
import pytest
import torch
from torch import nn

import qtoolkit as qt
from tests import nets

SHAPE = (4, 3, 8, 8)
KINDS = [("torchscript", 13), ("torchscript", 21), ("dynamo", 18), ("dynamo", 21)]


def calibrated(backend: str) -> nn.Module:
    prepared = qt.prepare(nets.trained(nets.ConvNet(), *SHAPE), backend=backend)
    qt.calibrate(prepared, [torch.randn(SHAPE)], progress=False)
    return qt.convert(prepared)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_exports_in_threads(tmp_path, shared: bool) -> None:
    models = (
        [calibrated("onnxruntime")] * 4 if shared else [calibrated(b) for b in ("onnxruntime", "vitis", "snpe", "tvm")]
    )
    x, results, errors = torch.randn(SHAPE), {}, []
    alone = [
        qt.export_onnx(model, x, tmp_path / f"{number}_alone.onnx", opset=opset, exporter=exporter)
        for number, (model, (exporter, opset)) in enumerate(zip(models, KINDS, strict=True))
    ]
    filters = list(warnings.filters)

    def export(number: int) -> None:
        exporter, opset = KINDS[number]
        try:
            results[number] = qt.export_onnx(
                models[number], x, tmp_path / f"{number}.onnx", opset=opset, exporter=exporter
            )
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=export, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert warnings.filters == filters
    for number, expected in enumerate(alone):
        assert results[number].verification == expected.verification
        graphs = [onnx.load(result.path).graph for result in (results[number], expected)]
        assert [n.op_type for n in graphs[0].node] == [n.op_type for n in graphs[1].node]
