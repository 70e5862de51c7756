"""compare_runtimes: the codes of a file in runtimes, without its model; and describe."""

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto

import qtoolkit as qt
from qtoolkit.export import UnreadableFileError, compare_runtimes, describe
from tests.export.qdq_files import File, clean
from tests.export.test_deployed import Block, X, exact_net


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_exact_nets_have_the_same_codes(runtime: str, tmp_path) -> None:
    pytest.importorskip(runtime)
    model = exact_net(Block(), signed=False)
    path = qt.export_onnx(model, X, tmp_path / "m.onnx", input_names=["x"]).path
    found = compare_runtimes(path, {"x": X.numpy()}, (runtime,), program=model)
    codes = found.runtimes[runtime]
    assert codes.not_compared == ()
    assert len(codes.by_quantizer) == 6 + 2  # the pair is repeated behind the max pool and the reshape
    assert found.share <= (0 if runtime == "onnxruntime" else 1e-3)
    assert found.program[runtime] < 0.1
    assert "from the program" in str(found)


def test_random_inputs_have_the_types_and_sizes_of_the_file(tmp_path) -> None:
    file = File()
    ids = onnx.helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", 3])
    file.inputs.append(ids)
    rows = file.node("Gather", file.weight(4, 8, axis=None), "ids")
    file.output(file.pair(rows, name="q_rows"))
    seen = {}

    def program(x: torch.Tensor) -> torch.Tensor:
        return seen.setdefault("x", x)[..., None] + torch.zeros(8)

    found = compare_runtimes(file.save(tmp_path), seed=1, program=program)
    assert (seen["x"].dtype, tuple(seen["x"].shape)) == (torch.int64, (1, 3))
    assert set(seen["x"].flatten().tolist()) <= {0, 1}
    assert found.runtimes["onnxruntime"].by_quantizer["q_rows"].compared == 24


def test_what_cannot_be_compared_is_refused(tmp_path) -> None:
    path = clean().save(tmp_path)
    with pytest.raises(ValueError, match="unknown runtime of compare_runtimes: 'tvm'"):
        compare_runtimes(path, runtimes=("tvm",))
    with pytest.raises(ValueError, match="the program returns tensors of shapes"):
        compare_runtimes(path, program=lambda x: x[:, :1])
    with pytest.raises(RuntimeError, match="onnxruntime cannot run"):
        compare_runtimes(path, {"x": np.zeros((1, 3, 8, 8), np.float32)})
    file = File()
    file.output(file.conv(file.input("x", 1, 16, 8, 8)))
    with pytest.raises(UnreadableFileError, match="there is nothing to compare"):
        compare_runtimes(file.save(tmp_path))


def test_describe_counts_codes_and_gives_reasons(tmp_path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(clean().model(), path, save_as_external_data=True, location="weights", size_threshold=0)
    found = describe(path)
    assert found.bytes == path.stat().st_size + (tmp_path / "weights").stat().st_size
    assert [layer.quantized for layer in found.layers] == [True, True]
    file = File()
    weight = file.constant(np.ones((16, 16, 1, 1), np.float32))
    file.output(file.node("Conv", file.input("x", 1, 16, 8, 8), weight, name="conv"))
    (layer,) = describe(file.save(tmp_path, "float.onnx")).layers
    assert layer.reason == "'x' is not quantized; its weight is not quantized"


def test_quantizers_in_bodies_are_named(tmp_path) -> None:
    file = clean().in_a_branch()
    file.output(file.pair("x", zero=128, dtype=TensorProto.UINT8, name="outside"))
    path = file.save(tmp_path)
    codes = compare_runtimes(path).runtimes["onnxruntime"]
    assert list(codes.by_quantizer) == ["outside"]
    assert set(codes.not_compared) == {"q_x", "q_relu"}
    found = describe(path)
    assert (found.quantize_nodes, [layer.name for layer in found.layers]) == (3, ["conv", "next"])
