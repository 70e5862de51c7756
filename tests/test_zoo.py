"""Models of the zoo through every step; benchmarks/pages/zoo.py runs them all."""

import json
import random
import re
from pathlib import Path
from typing import Any

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
    from benchmarks.pages.zoo_models import pipeline, table
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
    text = table.markdown([outcome.json()])
    assert "replaced, as it cannot be traced: prepare: cannot trace Decides" in text
    assert "in 1 `qt.quant_modules.replace` quantizes all layers" in table.summary([outcome.json()])


def test_what_torch_fx_cannot_trace_is_captured_by_torch_export() -> None:
    pytest.importorskip("torchvision", reason="the zoo takes models from torchvision")
    from benchmarks.pages.zoo_models import pipeline, table
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
    assert '1 with `capture="export"`, as the error advises' in table.summary([outcome.json()])


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
    from benchmarks.pages.zoo_models import pipeline, table
    from benchmarks.pages.zoo_models.recipe import Recipe

    taken = []
    steps = register_optimizer_step_post_hook(lambda *_: taken.append("step"))
    recipe = Recipe("own/linear", "own", lambda: nn.Linear(4, 4), lambda: (torch.rand(2, 4),))
    outcome = pipeline.run(recipe, "onnxruntime", export=False)
    steps.remove()
    assert (outcome.failed, outcome.steps, len(taken)) == ("", 3, 3)
    assert "training (steps of SGD: 3 in 1) and onnxruntime" in table.summary([outcome.json()])
    older = {**outcome.json(), "steps": 1}
    assert "training (steps of SGD: 3 in 1, 1 in 2) and" in table.summary([older, outcome.json(), older])


def test_what_cannot_be_quantized_is_in_the_table() -> None:
    pytest.importorskip("torchvision", reason="the zoo takes models from torchvision")
    from benchmarks.pages.zoo_models import pipeline, table
    from benchmarks.pages.zoo_models.recipe import Recipe

    recipe = Recipe("own/wrong", "own", lambda: torch.nn.Linear(4, 4), lambda: (torch.rand(2, 5),))
    outcome = pipeline.run(recipe, "onnxruntime", export=False).json()
    assert outcome["failed"] == "float"
    assert "**float: RuntimeError" in table.markdown([outcome])
    assert "0 went through all steps**, training and onnxruntime included; 1 did not: own/wrong" in table.summary(
        [outcome]
    )
    assert "| own/wrong | float | RuntimeError" in table.failures([outcome])


@pytest.mark.slow
def test_the_command_writes_what_the_documentation_shows(tmp_path) -> None:
    pytest.importorskip("torchvision", reason="the zoo takes models from torchvision")
    found, page = tmp_path / "zoo.json", tmp_path / "zoo.md"
    options = ["--only", "=torchvision/squeezenet1_0", "--no-export", "--json", str(found), "--markdown", str(page)]
    run = processes.python("-m", "benchmarks.pages.zoo", *options)
    assert run.returncode == 0, run.stderr
    (outcome,) = json.loads(found.read_text())["models"]
    assert outcome["name"] == "torchvision/squeezenet1_0"
    assert f"| squeezenet1_0 | {outcome['quantized']} | none |" in page.read_text()


def test_the_documented_table_is_that_of_the_results() -> None:
    pytest.importorskip("torchvision", reason="the zoo takes models from torchvision")
    from benchmarks.pages.zoo_models import table

    outcomes = json.loads((FOLDER / "results" / "zoo.json").read_text())["models"]
    text = (FOLDER.parent / "docs" / "zoo.md").read_text()
    for part in (table.summary(outcomes), table.failures(outcomes), table.markdown(outcomes)):
        assert part in text
    models, traced = re.findall(r"(\d+) models: (\d+)", table.summary(outcomes))[0]
    assert f"{traced} of {models} in the [zoo]" in (FOLDER.parent / "README.md").read_text()
    differing = [o["name"] for o in outcomes if o.get("weight_codes", [0])[0] or o.get("quantizer_codes", [0])[0]]
    assert differing == []


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
