"""Models of the zoo through other tools: prepared, trained for one step, exported, and run in onnxruntime.

python -m benchmarks.pages.zoo_peers --draw 40    draw models of the zoo, run all tools on them, write the zoo's page
python -m benchmarks.pages.zoo_peers              run all tools on the models of the stored results
python -m benchmarks.pages.zoo_peers --tools NNCF  run some of the tools, and keep the results of the others
python -m benchmarks.pages.zoo_peers --draw 40 --resume  go on with a draw that was interrupted

The models are drawn by a seed from all recipes that take one floating-point tensor, which is what the tools' programs here
take: models that fail in qtoolkit are among them. Each runs in a process of its own with a limit of processor time. The
versions of the tools are in `peers/requirements.txt`.
"""

import argparse
import json
import multiprocessing
import random
import re
import resource
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.pages.zoo_models import Recipe, page, recipes
from benchmarks.pages.zoo_models.peers_table import OF_ALL, TOOLS, models_in, ours, sums
from benchmarks.peers import model_builder, model_exporter, versions

SEED = 40
FOLDER = re.compile(r"/\S*/(?=model\.onnx)")  # of a file, in an error
LONGEST = 400  # characters of an error
WAIT = 10  # seconds to wait at most for each second of processor time
HERE = Path(__file__).parents[1]
RESULTS = HERE / "results" / "zoo_peers.json"
PROCESSES = multiprocessing.get_context("forkserver")


def able() -> list[Recipe]:
    """Return the recipes that the tools can take, sorted by name."""
    named = recipes()
    return [named[name] for name in sorted(named) if _takes_one_tensor(named[name])]


def drawn(count: int) -> list[Recipe]:
    """Return recipes, drawn by the seed. No result of any tool has a part in it."""
    return random.Random(SEED).sample(able(), count)


def _takes_one_tensor(recipe: Recipe) -> bool:
    inputs = recipe.inputs()
    one = isinstance(inputs, tuple) and len(inputs) == 1 and isinstance(inputs[0], Tensor)
    return one and inputs[0].is_floating_point()


def run_here(name: str, tool: str, out: Path, limit: int) -> None:
    """Run one model with one tool in at most so many seconds of processor time, and write what came of it."""
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    outcome = {"model": name, "tool": tool, "failed": "build", "error": "", "difference": None}
    try:
        recipe = recipes()[name]
        model, (x,) = recipe.build().train(recipe.training), recipe.inputs()
        _steps(model, x, tool, outcome)
        outcome["failed"] = ""
    except Exception as error:  # another tool may raise any error
        outcome["error"] = FOLDER.sub("", f"{type(error).__name__}: {error}")[:LONGEST]
    out.write_text(json.dumps(outcome))


def _steps(model: nn.Module, x: Tensor, tool: str, outcome: dict[str, Any]) -> None:
    outcome["failed"] = "prepare"
    model = prepared(model, x, tool)
    outcome["failed"] = "train"
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    sum(y.square().mean() for y in _outputs(model(x))).backward()
    optimizer.step()
    outcome["failed"] = "export"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        written = model_exporter(tool)(model, x, file)
        outcome["failed"] = "run"
        session = onnxruntime.InferenceSession(file)
        theirs = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    outcome["failed"] = "compare"
    with torch.no_grad():
        ours = _outputs(written(x))
    size = max(float(y.abs().max()) for y in ours) or 1.0  # of a head that begins with zeros
    outcome["difference"] = max(
        float((a - torch.from_numpy(b)).abs().max()) / size for a, b in zip(ours, theirs, strict=True)
    )


def prepared(model: nn.Module, x: Tensor, tool: str) -> nn.Module:
    """Prepare by the tool. torchao gets a second attempt on a graph of torch.fx; if both fail, the first error is raised."""
    build = model_builder(tool)
    if tool != "torchao pt2e":
        return build(model, x)
    from benchmarks.peers.torchao_pt2e import qat_model_as_exported

    try:
        return qat_model_as_exported(model, x)
    except Exception as own:  # its quantizer refuses modules that are called twice, which the graph does not have
        try:
            return build(model, x)
        except Exception:
            raise own from None


def _outputs(values: Any) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(values)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def run_apart(name: str, tool: str, limit: int) -> dict[str, Any]:
    """Run one model with one tool in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "outcome.json"
        process = PROCESSES.Process(target=run_here, args=(name, tool, out, limit))
        process.start()
        process.join(WAIT * limit)
        late = process.is_alive() or process.exitcode == -signal.SIGXCPU
        process.kill()
        if out.exists():
            found: dict[str, Any] = json.loads(out.read_text())
            return found
    error = f"longer than {limit} s of processor time" if late else f"exit code {process.exitcode}"
    return {"model": name, "tool": tool, "failed": "time" if late else "process", "error": error, "difference": None}


def _versions(stored: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions of the tools; of those that are not installed, the versions that the stored results have."""
    return {name: stored.get(name, found) if found == "not installed" else found for name, found in versions().items()}


def _draw_of(results: Mapping[str, Any]) -> dict[str, Any]:
    return {name: results[name] for name in ("draw", "of", "seed") if name in results}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", default=list(TOOLS), choices=TOOLS)
    parser.add_argument("--draw", type=int, default=0, help="how many models to draw from all recipes")
    parser.add_argument(
        "--resume", action="store_true", help="keep the results of this draw in the file, and run the rest"
    )
    parser.add_argument("--limit", type=int, default=120, help="processor time for each model and tool in seconds")
    parser.add_argument("--zoo", type=Path, default=page.ZOO)
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    PROCESSES.set_forkserver_preload(
        ["torch._dynamo", "torch.onnx", "onnxscript", "onnxruntime", "torchvision.models", "timm"]
    )
    zoo = json.loads(args.zoo.read_text())
    stored = json.loads(args.json.read_text()) if args.resume or not args.draw else {}
    draw = {"draw": OF_ALL, "of": len(able()), "seed": SEED} if args.draw else _draw_of(stored)
    names = [recipe.name for recipe in drawn(args.draw)] if args.draw else models_in(stored)
    rows = {(o["model"], o["tool"]): o for o in (*stored.get("models", ()), *ours(zoo, names))}
    pairs = [(n, t) for n in names for t in args.tools if not (args.resume and (n, t) in rows)]
    for name, tool in tqdm(pairs, leave=False):
        rows[name, tool] = run_apart(name, tool, args.limit)
        results = {**draw, "limit": args.limit, **_versions(stored), "models": list(rows.values())}
        args.json.write_text(page.json_text(results))
    print("\n".join(sums(json.loads(args.json.read_text()))))
    page.PAGE.write_text(page.text(zoo))


if __name__ == "__main__":
    main()
