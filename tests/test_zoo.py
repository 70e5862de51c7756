"""Models of the zoo through every step; benchmarks/pages/zoo.py runs them all."""

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import qtoolkit as qt
from tests import processes
from tests.sweep import slow_but

FOLDER = Path(__file__).parents[1] / "benchmarks"

# Models whose layers are all quantized, and equal the float model bit for bit with quantizers off.
WITHOUT_EXPORT = [
    pytest.param("torchvision/densenet121", marks=pytest.mark.sweep),
    "torchvision/fasterrcnn_mobilenet_v3_large_320_fpn",
    "torchvision/shufflenet_v2_x0_5",
    pytest.param("torchvision/lraspp_mobilenet_v3_large", marks=pytest.mark.sweep),
    "torchvision/raft_small",
    "torchvision/swin_t",
    pytest.param("timm/levit_128s", marks=pytest.mark.sweep),
    pytest.param("timm/test_byobnet", marks=pytest.mark.sweep),
    "timm/test_nfnet",
]
EXPORTED = [
    pytest.param("torchvision/squeezenet1_0", marks=pytest.mark.sweep),
    "timm/test_efficientnet",
    "timm/test_vit",
]


@pytest.fixture(autouse=True)
def _one_thread(threads) -> None:
    threads(1)


def outcome_of(name: str, export: bool) -> Any:
    package = name.partition("/")[0]
    for needed in ("torchvision", package):
        pytest.importorskip(needed, reason=f"the zoo takes models from {needed}")
    from benchmarks.pages.zoo_models import pipeline, recipes

    outcome = pipeline.run(recipes()[name], "onnxruntime", export)
    assert outcome.failed == "", f"{outcome.failed}: {outcome.error}"
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(WITHOUT_EXPORT, "timm/test_nfnet"))
def test_every_layer_is_quantized_and_nothing_else_changes(name: str) -> None:
    outcome = outcome_of(name, export=False)
    assert outcome.quantized > 0
    assert outcome.left_float == {}
    assert_same_when_off(outcome)
    assert outcome.folded_difference < 2e-4
    assert set(outcome.seconds) >= {"trace", "prepare", "calibrate", "train", "convert"}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTED)
def test_the_codes_in_onnxruntime_are_the_same(name: str) -> None:
    outcome = outcome_of(name, export=True)
    assert_same_when_off(outcome)
    assert outcome.weight_codes[0] == outcome.quantizer_codes[0] == 0
    assert outcome.weight_codes[1] > 0
    assert outcome.quantizer_codes[1] > 0
    assert outcome.layer_codes[0] <= 1e-3 * outcome.layer_codes[1]
    assert outcome.output_difference is not None


def assert_same_when_off(outcome: Any) -> None:
    """Bit for bit, but for the SiLUs that a target computes as two ops: torch rounds x * sigmoid(x) once more."""
    splits = outcome.name in ("timm/test_nfnet", "timm/test_efficientnet")
    assert outcome.off_difference <= (1e-5 if splits else 0)


def test_what_cannot_be_traced_is_replaced() -> None:
    pytest.importorskip("torchvision", reason="the zoo takes models from torchvision")
    from benchmarks.pages.zoo_models import pipeline, sums, table
    from benchmarks.pages.zoo_models.recipe import Recipe

    class Decides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x) if x.sum() > 0 else x

    recipe = Recipe("own/decides", "own", Decides, lambda: (torch.rand(2, 4),))
    outcome = pipeline.run(recipe, "onnxruntime", export=False)
    assert outcome.replaced
    assert outcome.quantized == 1
    assert "cannot trace Decides" in outcome.untraceable
    leaf = Recipe("own/leaf", "own", lambda: nn.Sequential(nn.Linear(4, 4), Decides()), lambda: (torch.rand(2, 4),))
    assert pipeline.run(leaf, "onnxruntime", export=False).skip == ("*",)
    assert "replaced, as it cannot be traced: prepare: cannot trace Decides" in table.notes(outcome.json())
    assert "| `qt.quant_modules.replace`, as the error of `prepare` advises | 1 |" in sums.ways([outcome.json()])
    row = "| own | `qt.quant_modules.replace` | Python uses the value of a tensor | decides |"
    assert row in sums.remedies([outcome.json()])


def test_what_torch_fx_cannot_trace_is_captured_by_torch_export() -> None:
    pytest.importorskip("torchvision", reason="the zoo takes models from torchvision")
    from benchmarks.pages.zoo_models import pipeline, sums, table
    from benchmarks.pages.zoo_models.recipe import Recipe

    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x) if random.random() < 2 else x

    recipe = Recipe("own/draws", "own", Draws, lambda: (torch.rand(2, 4),))
    outcome = pipeline.run(recipe, "onnxruntime", export=False)
    assert (outcome.captured, outcome.replaced, outcome.quantized, outcome.failed) == (True, False, 1, "")
    assert outcome.off_difference == 0
    assert 'capture="export", as it cannot be traced: prepare: cannot trace Draws' in table.notes(outcome.json())
    assert '| `capture="export"`, as the error of `prepare` advises | 1 |' in sums.ways([outcome.json()])
    assert '| own | `capture="export"` | draws random numbers | draws |' in sums.remedies([outcome.json()])


@pytest.mark.slow
def test_parts_get_inputs_by_place_and_by_keyword_and_quantizers_may_be_off() -> None:
    pytest.importorskip("torchvision", reason="the zoo takes models from torchvision")
    from benchmarks.pages.zoo_models import pipeline
    from benchmarks.pages.zoo_models.recipe import Recipe

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, *, factor: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x) * factor)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Scaled()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x, factor=x.sum().sigmoid())

    def codes(*off: str) -> int:
        recipe = Recipe("own/net", "own", Net, lambda: (torch.rand(2, 4),), parts=("body",), off=off)
        outcome = pipeline.run(recipe, "onnxruntime")
        assert outcome.failed == "", outcome.error
        assert outcome.quantized == 2
        return outcome.quantizer_codes[1]

    assert codes("body.activation_quantizers.x*") < codes("elsewhere.*") == codes()


def test_a_model_trains_three_steps_and_the_page_counts_them() -> None:
    pytest.importorskip("torchvision", reason="the zoo takes models from torchvision")
    from benchmarks.pages.zoo_models import page, pipeline
    from benchmarks.pages.zoo_models.recipe import Recipe

    taken = []
    steps = register_optimizer_step_post_hook(lambda *_: taken.append("step"))
    recipe = Recipe("own/linear", "own", lambda: nn.Linear(4, 4), lambda: (torch.rand(2, 4),))
    outcome = pipeline.run(recipe, "onnxruntime", export=False)
    steps.remove()
    assert (outcome.failed, outcome.steps, len(taken)) == ("", 3, 3)
    row = {**outcome.json(), "versions": page.versions(outcome.json())}
    fewer = {**row, "steps": 1, "versions": {**row["versions"], "onnxruntime": "1.0"}}
    one, both = (page.text({"backend": "onnxruntime", "models": rows}) for rows in ([row], [fewer, row]))
    assert "`calibrate`, 3 steps of SGD" in one
    assert f"the target is onnxruntime {onnxruntime.__version__}, PyTorch is" in one
    assert "`calibrate`, 1 to 3 steps of SGD" in both
    assert f"the target is onnxruntime {onnxruntime.__version__} (1 models), 1.0 (1 models), PyTorch is" in both


def test_what_cannot_be_quantized_is_in_the_table() -> None:
    pytest.importorskip("torchvision", reason="the zoo takes models from torchvision")
    from benchmarks.pages.zoo_models import pipeline, sums, table
    from benchmarks.pages.zoo_models.recipe import Recipe

    recipe = Recipe("own/wrong", "own", lambda: torch.nn.Linear(4, 4), lambda: (torch.rand(2, 5),))
    outcome = pipeline.run(recipe, "onnxruntime", export=False).json()
    killed = {"name": "own/slow", "family": "own", "failed": "time", "error": "longer than 600 s"}
    assert outcome["failed"] == "float"
    assert "float: RuntimeError" in table.notes(outcome)
    assert "| models that pass every step | 0 of 2 |" in sums.summary([outcome, killed])
    assert "| own |  | 2 | 0 | 0 | 2 | 0 | 0 | 0 | 0 of 0 |" in sums.families([outcome, killed])
    assert "| own/wrong | float | `RuntimeError" in sums.failures([outcome, killed])
    assert "| own/slow | time | `longer than 600 s` |" in sums.failures([outcome, killed])


@pytest.mark.slow
def test_the_command_writes_what_the_documentation_shows(tmp_path) -> None:
    pytest.importorskip("torchvision", reason="the zoo takes models from torchvision")
    found, page = tmp_path / "zoo.json", tmp_path / "zoo.md"
    options = ["--only", "=torchvision/squeezenet1_0", "--no-export", "--json", str(found), "--markdown", str(page)]
    run = processes.python("-m", "benchmarks.pages.zoo", *options)
    assert run.returncode == 0, run.stderr
    (outcome,) = json.loads(found.read_text())["models"]
    assert outcome["name"] == "torchvision/squeezenet1_0"
    assert f"| torchvision | classification | 1 | 1 | 0 | 0 | {outcome['quantized']} | 0 |" in page.read_text()


def test_the_table_of_tensorrt_is_that_of_the_results() -> None:
    from benchmarks.pages import tensorrt_zoo

    text = "\n".join(tensorrt_zoo.lines(json.loads(tensorrt_zoo.RESULTS.read_text())))
    assert text in tensorrt_zoo.PAGE.read_text()


def test_the_documented_page_is_that_of_the_results() -> None:
    from benchmarks.pages.zoo_models import page, sums

    results = json.loads((FOLDER / "results" / "zoo.json").read_text())
    assert (FOLDER.parent / "docs" / "zoo.md").read_text() == page.text(results)
    outcomes = results["models"]
    assert f"([{len(outcomes)} models](docs/zoo.md))" in (FOLDER.parent / "README.md").read_text()
    assert [o["name"] for o in outcomes if not o["failed"] and sums.differing(o)] == []


def test_names_of_submodules_are_short_and_without_what_they_contain() -> None:
    from benchmarks.pages.zoo_models import sums

    outcome = {"name": "own/net", "family": "own", "failed": "", "parts": (), "skip": ("b.0.c", "b.0", "b.1", "norm1")}
    assert "| own | `untraced`: `b.*`, `norm1` |  | net |" in sums.remedies([outcome])


def test_other_tools_take_recipes_drawn_from_all_that_take_one_tensor(monkeypatch) -> None:
    from benchmarks.pages import zoo_peers
    from benchmarks.pages.zoo_models.recipe import Recipe, floats

    one, two = floats((2, 4)), floats((2, 4), (2, 4))
    found = [
        Recipe("own/parts", "own", nn.Identity, one, parts=("body",)),
        Recipe("own/pair", "own", nn.Identity, two),
        Recipe("own/leaf", "own", nn.Identity, one, skip=("body",)),
        Recipe("own/integers", "own", nn.Identity, lambda: (torch.zeros(2, dtype=torch.int64),)),
        Recipe("own/plain", "own", nn.Identity, one),
    ]
    monkeypatch.setattr(zoo_peers, "recipes", lambda: {recipe.name: recipe for recipe in found})
    assert [recipe.name for recipe in zoo_peers.able()] == ["own/leaf", "own/parts", "own/plain"]
    drawn = [recipe.name for recipe in zoo_peers.drawn(2)]
    assert len(set(drawn)) == 2
    assert drawn == [recipe.name for recipe in zoo_peers.drawn(2)]


def test_the_error_of_torchao_is_its_own(monkeypatch) -> None:
    from benchmarks.pages import zoo_peers

    def fails(error: Exception) -> Any:
        def prepare(model: nn.Module, x: torch.Tensor) -> nn.Module:
            raise error

        return prepare

    own, second = ValueError("cannot capture"), TypeError("symbolic tracing")
    peer = SimpleNamespace(qat_model_as_exported=fails(own), qat_model=fails(second))
    monkeypatch.setitem(sys.modules, "benchmarks.peers.torchao_pt2e", peer)
    with pytest.raises(ValueError, match="cannot capture"):
        zoo_peers.prepared(nn.Identity(), torch.rand(1), "torchao pt2e")


def test_models_that_need_a_remedy_fail_without_it() -> None:
    from benchmarks.pages.zoo_models import peers_table

    plain = {"failed": "", "error": "", "parts": (), "skip": (), "note": "", "output_difference": 0.5}
    models = {
        "plain": plain,
        "leaf": {**plain, "skip": ("body",), "untraceable": "prepare: cannot trace"},
        "older": {**plain, "note": "exporter='torchscript': 'dynamo' fails"},
        "off": {**plain, "failed": "quantizers off", "error": "ValueError", "output_difference": None},
    }
    rows = peers_table.ours({"models": [{"name": name, **outcome} for name, outcome in models.items()]}, models)
    found = {(row["model"], row["tool"]): (row["failed"], row["difference"]) for row in rows}
    assert found == {
        ("plain", "qtoolkit"): ("", 0.5),
        ("plain", "qtoolkit, without remedies"): ("", 0.5),
        ("leaf", "qtoolkit"): ("", 0.5),
        ("leaf", "qtoolkit, without remedies"): ("prepare", None),
        ("older", "qtoolkit"): ("", 0.5),
        ("older", "qtoolkit, without remedies"): ("export", None),
        ("off", "qtoolkit"): ("prepare", None),
        ("off", "qtoolkit, without remedies"): ("prepare", None),
    }


def test_labels_come_from_verdicts() -> None:
    pytest.importorskip("torchvision", reason="the zoo takes models from torchvision")
    from benchmarks.pages.zoo_models.pipeline import label

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fc, self.bn = nn.LayerNorm(4), nn.Linear(4, 4), nn.BatchNorm1d(4)
            self.out = nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.relu(self.norm(self.bn(x))).cumsum(0)
            return torch.cat([self.out(self.fc(y)), torch.exp(self.scale).expand(2, 4)])

    prepared = qt.prepare(Net(), (torch.rand(2, 4),), exclude=["out"], backend="tensorrt")
    lines = {line.name: line for line in qt.quantization_report(prepared).layers}
    labels = {name: label(line) for name, line in lines.items() if line.status == "float"}
    assert labels == {
        "bn": "batch norm not folded",
        "norm": "layer_norm",
        "relu": "relu after a float op",
        "cumsum": "cumsum",
        "exp": "computed from parameters alone",
        "out": "no batch of the calibration reached it",
        "cat": "no quantized op takes its output",
    }
