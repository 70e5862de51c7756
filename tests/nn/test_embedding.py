"""Embeddings with quantized rows: dense and sparse gradients, max_norm, preparation and export."""

import copy

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from tests import reference

SPEC = qt.QuantSpec(bits=5, axis=0)


def embedding_pair(**options: object) -> tuple[nn.Embedding, qt.nn.QuantEmbedding, Tensor]:
    layer = nn.Embedding(10, 4, **options)
    ours = qt.nn.QuantEmbedding.from_float(copy.deepcopy(layer), SPEC)
    return layer, ours, torch.tensor([[1, 0, 3], [9, 1, 1]])


@pytest.mark.parametrize(
    ("sparse", "options"),
    [
        (False, {}),
        (False, {"padding_idx": 0}),
        (False, {"scale_grad_by_freq": True}),
        (True, {}),
        (True, {"padding_idx": 0}),
    ],
    ids=str,
)  # torch has no sparse gradients by frequency
@pytest.mark.parametrize("axis", [0, None])
@pytest.mark.parametrize("quantizer", ["fixed", "lsq"])
def test_embedding_gradients(options: dict[str, object], sparse: bool, axis: int | None, quantizer: str) -> None:
    layer = nn.Embedding(10, 4, sparse=sparse, **options)
    spec = qt.QuantSpec(bits=5, axis=axis, quantizer=quantizer)
    ours = qt.nn.QuantEmbedding.from_float(copy.deepcopy(layer), spec)
    ours.weight_quantizer.amax = ours.weight_quantizer.amax * 0.6  # so that some values are clamped
    x = torch.tensor([[1, 0, 3], [9, 1, 1]])
    g = torch.randn(2, 3, 4)
    ours(x).backward(g)
    inside = reference.inside(layer.weight, ours.weight_quantizer.scale, None, -16, 15, axis)
    layer(x).backward(g * inside[x])
    assert ours.weight.grad.is_sparse == sparse
    torch.testing.assert_close(ours.weight.grad.to_dense(), layer.weight.grad.to_dense())
    if quantizer == "lsq" and sparse:  # the dense route has the same gradient of the scale
        dense = qt.nn.QuantEmbedding.from_float(nn.Embedding(10, 4, _weight=layer.weight.detach()), spec)
        dense.weight_quantizer.amax = ours.weight_quantizer.amax
        dense(x).backward(g)
        scales = (q.get_parameter("_relative_scale").grad for q in (ours.weight_quantizer, dense.weight_quantizer))
        torch.testing.assert_close(*scales)


@pytest.mark.parametrize(
    "spec",
    [SPEC, qt.QuantSpec(axis=1), qt.QuantSpec(), qt.QuantSpec(axis=1, group_size=2), qt.QuantSpec(axis=0, group_size=5),
     qt.QuantSpec(axis=-2, signed=False, symmetric=False)],
    ids=qt.QuantSpec.describe,
)  # fmt: skip
def test_sparse_embeddings_give_the_same_rows_and_ranges(spec: qt.QuantSpec) -> None:
    layer = nn.Embedding(10, 4)
    dense = qt.nn.QuantEmbedding.from_float(layer, spec)
    sparse = qt.nn.QuantEmbedding.from_float(nn.Embedding(10, 4, sparse=True, _weight=layer.weight), spec)
    x = torch.tensor([[1, 0, 3], [9, 1, 1]])
    assert torch.equal(sparse(x), dense(x))
    assert torch.equal(sparse(torch.tensor(4)), dense(torch.tensor(4)))
    with torch.no_grad():
        layer.weight.mul_(3)
    for quantizer in (sparse.weight_quantizer, dense.weight_quantizer):
        quantizer.observing = True
    assert torch.equal(sparse(x), dense(x))
    assert torch.equal(sparse.weight_quantizer.scale, dense.weight_quantizer.scale)


def test_an_unready_sparse_embedding_says_so() -> None:
    layer = qt.nn.QuantEmbedding(10, 4, sparse=True, weight_spec=SPEC)
    layer.weight_quantizer.ready = False
    qt.freeze_ranges(layer).apply()
    with pytest.raises(RuntimeError, match="has no range yet"):
        layer(torch.tensor([1]))


@pytest.mark.parametrize("sparse", [False, True])
def test_a_table_with_nan_stops_the_training_where_one_asks_for_it(sparse: bool) -> None:
    layer = qt.nn.QuantEmbedding(10, 4, sparse=sparse, weight_spec=SPEC)
    with torch.no_grad():
        layer.weight[3, 1] = torch.nan
    with pytest.raises(ValueError, match="got NaN or infinities"), qt.stop_on_nonfinite(layer):
        layer(torch.tensor([1]))


def test_max_norm_renormalizes_the_rows_that_are_looked_up() -> None:
    layer, ours, x = embedding_pair(max_norm=0.5)
    with qt.disable_quantization(ours):
        assert torch.equal(ours(x), layer(x))
    assert torch.equal(ours.weight, layer.weight)
    assert torch.equal(ours.forward_fp32(x), layer(x))
    assert (ours.weight[[0, 1, 3, 9]].norm(dim=1) <= 0.5 + 1e-5).all()


def test_an_embedding_exports_as_integers(tmp_path) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(10, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.table(x))

    x = torch.tensor([[1, 0, 3], [9, 1, 1]])
    prepared = qt.prepare(Words().eval(), x, backend="onnxruntime")
    assert type(prepared.get_submodule("table")) is qt.nn.QuantEmbedding
    sources = {line.source for line in qt.quantization_report(prepared).tensors}
    assert sources == {"table"}  # indices are not quantized
    qt.calibrate(prepared, [x], progress=False)
    result = qt.export_onnx(prepared, x, tmp_path / "m.onnx")
    assert result.verification.weight_codes.compared == 40 + 8
    assert result.verification.weight_codes.differing == 0
    assert result.verification.missing == ()


@pytest.mark.sweep(1)
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt"])  # tensorrt's embeddings are float
@pytest.mark.parametrize("make", [qt.prepare, qt.quant_modules.replace])
def test_a_table_with_max_norm_is_renormalized_once_and_exports(tmp_path, make, backend: str, exporter: str) -> None:
    model = nn.Sequential(nn.Embedding(10, 4, max_norm=0.5), nn.Linear(4, 2)).eval()
    calibrated, x = torch.tensor([[1, 0, 3], [9, 1, 1]]), torch.arange(10)[None]
    prepared = make(copy.deepcopy(model), backend=backend)
    qt.calibrate(prepared, [calibrated], progress=False)
    converted = qt.convert(prepared)
    assert torch.equal(converted(x), prepared(x))
    table = next(m for m in converted.modules() if isinstance(m, nn.Embedding))
    model(x)
    assert torch.equal(table.weight, model[0].weight)
    found = qt.export_onnx(converted, x, tmp_path / "m.onnx", exporter=exporter, progress=False).verification
    assert (found.weight_codes.differing, found.missing) == (0, ())
    assert found.output_error < 1e-5


def test_an_embedding_stays_float_where_the_backend_has_none() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2))
    report = qt.quantization_report(qt.prepare(model, backend="tensorrt"))
    (line,) = report.left_float
    assert line.name == "0"
    assert "embedding, which tensorrt computes in float" in line.reason
    rule = qt.QConfigMapping().set_object_type(nn.Embedding, qt.backends["tensorrt"].qconfig)
    prepared = qt.prepare(model, backend="tensorrt", qconfig_mapping=rule)
    assert type(prepared.get_submodule("0")) is qt.nn.QuantEmbedding


# ---- bags


def bag_pair(**options: object) -> tuple[nn.EmbeddingBag, qt.nn.QuantEmbeddingBag]:
    layer = nn.EmbeddingBag(10, 4, **options)
    return layer, qt.nn.QuantEmbeddingBag.from_float(copy.deepcopy(layer), SPEC)


INDICES, OFFSETS = torch.tensor([1, 2, 4, 9, 1, 3]), torch.tensor([0, 2, 5])


@pytest.mark.parametrize(
    "options",
    [{"mode": "sum"}, {"mode": "mean"}, {"mode": "max"}, {"padding_idx": 1}, {"include_last_offset": True},
     {"mode": "sum", "sparse": True}, {"max_norm": 1.0}],
    ids=str,
)  # fmt: skip
def test_a_bag_is_torchs_own_on_quantized_rows(options: dict[str, object]) -> None:
    layer, ours = bag_pair(**options)
    qt.freeze_ranges(ours).apply()  # max_norm changes the rows that the range would follow
    with qt.disable_quantization(ours):
        assert torch.equal(ours(INDICES, OFFSETS), layer(INDICES, OFFSETS))  # max_norm: both renormalize their rows
    rows = reference.fake_quant(layer.weight, ours.weight_quantizer.scale, None, SPEC.qmin, SPEC.qmax, 0)
    layer.weight.data = torch.as_tensor(rows)
    layer.max_norm = None  # the rows are within it, but for rounding up
    assert torch.equal(ours(INDICES, OFFSETS), layer(INDICES, OFFSETS))
    assert torch.equal(
        ours(INDICES.reshape(2, 3)) if not options.get("include_last_offset") else ours(INDICES, OFFSETS),
        layer(INDICES.reshape(2, 3)) if not options.get("include_last_offset") else layer(INDICES, OFFSETS),
    )
    ours(INDICES, OFFSETS).sum().backward()
    assert ours.weight.grad.layout == torch.strided


def test_a_bag_with_weights_of_samples_and_its_float_form() -> None:
    layer, ours = bag_pair(mode="sum")
    shares = torch.rand(6)
    rows = reference.fake_quant(layer.weight, ours.weight_quantizer.scale, None, SPEC.qmin, SPEC.qmax, 0)
    wanted = nn.functional.embedding_bag(INDICES, torch.as_tensor(rows), OFFSETS, mode="sum", per_sample_weights=shares)
    assert torch.equal(ours(INDICES, OFFSETS, shares), wanted)
    assert torch.equal(ours.forward_fp32(INDICES, OFFSETS, shares), layer(INDICES, OFFSETS, shares))
    assert torch.equal(ours.to_float()(INDICES, OFFSETS), layer(INDICES, OFFSETS))


def test_a_bag_in_a_model_is_quantized_where_the_target_has_it() -> None:
    model = nn.Sequential(nn.EmbeddingBag(10, 4), nn.Linear(4, 2))
    status = {name: qt.prepare(model, backend=name).plan.status["_0"].status for name in ("onnxruntime", "tensorrt")}
    assert status == {"onnxruntime": "quantized", "tensorrt": "float"}
