"""The model zoo: models of torchvision, timm and others through prepare, calibrate, three training steps, convert and export.

python -m benchmarks.pages.zoo                run all models; print the table, write benchmarks/results/zoo.json and docs/zoo.md
python -m benchmarks.pages.zoo --list         print the names of the models
python -m benchmarks.pages.zoo --only resnet vit_b  models whose names contain one of these; =torchvision/vgg11 is one
python -m benchmarks.pages.zoo --family timm  run one family
python -m benchmarks.pages.zoo --write        run nothing, and write docs/zoo.md from benchmarks/results/zoo.json

Weights are random, inputs are small, and each model runs on one thread. Each model runs in a separate process with a time
limit, so that a failure affects only its own row. Results are written as they come. Models that do not run this time keep
their results.
"""

import argparse
import json
import multiprocessing
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.pages.zoo_models import MODULES, Recipe, page, recipes, sums, table
from benchmarks.pages.zoo_models.pipeline import run

# The process of each model starts with these imported, where they are installed, which takes some seconds.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["qtoolkit", "torch._dynamo", "torch.onnx", "onnxscript", "onnxruntime", *MODULES])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", help="models of one family, such as 'detection' or 'timm'")
    parser.add_argument(
        "--only", nargs="+", default=[], help="models whose names contain one of these; =NAME selects one model"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the models and exit")
    parser.add_argument("--write", action="store_true", help="write the page from the JSON file, and run nothing")
    parser.add_argument("--backend", default="onnxruntime")
    parser.add_argument("--no-export", action="store_true", help="stop after convert")
    parser.add_argument("--jobs", type=int, default=1, help="number of models to run in parallel")
    parser.add_argument("--limit", type=float, default=600, help="time limit for each model in seconds")
    parser.add_argument("--json", type=Path, default=page.ZOO)
    parser.add_argument("--markdown", type=Path, default=page.PAGE)
    return parser.parse_args()


def chosen(args: argparse.Namespace) -> list[Recipe]:
    """Return the models that the arguments select."""
    of_family = [r for r in recipes().values() if args.family in (None, r.family)]
    return [r for r in of_family if not args.only or any(_fits(word, r.name) for word in args.only)]


def _fits(word: str, name: str) -> bool:
    return name == word[1:] if word.startswith("=") else word in name


def run_here(name: str, backend: str, export: bool, out: Path) -> None:
    """Run one model in this process, on one thread, and write its outcome to a file."""
    torch.set_num_threads(1)
    out.write_text(json.dumps(run(recipes()[name], backend, export).json()))


def run_apart(recipe: Recipe, args: argparse.Namespace) -> dict[str, Any]:
    """Run one model in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "outcome.json"
        process = PROCESSES.Process(target=run_here, args=(recipe.name, args.backend, not args.no_export, out))
        process.start()
        process.join(args.limit)
        if out.exists():
            found: dict[str, Any] = json.loads(out.read_text())
            return found
        late = process.is_alive()
        process.kill()
        error = f"longer than {args.limit:.0f} s" if late else f"exit code {process.exitcode}"
        return {"name": recipe.name, "family": recipe.family, "failed": "time" if late else "process", "error": error}


def main() -> None:
    """Run the command."""
    args = arguments()
    if args.write:
        args.markdown.write_text(page.text(json.loads(args.json.read_text())))
        return
    named = chosen(args)
    if args.list:
        print("\n".join(f"{recipe.name}  ({recipe.family})" for recipe in named))
    else:
        run_all(named, args)


def run_all(named: list[Recipe], args: argparse.Namespace) -> None:
    """Run models, write the results of each beside the earlier ones, and print their table and the sums of all results."""
    found = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for outcome in tqdm(
            pool.map(lambda r: run_apart(r, args), named), total=len(named), desc="models", leave=False
        ):
            found.append(outcome)
            write(outcome, args)
    table.show(found)
    print(sums.summary(json.loads(args.json.read_text())["models"]))


def write(outcome: dict[str, Any], args: argparse.Namespace) -> None:
    """Write the results and the page with one more outcome."""
    before = json.loads(args.json.read_text()) if args.json.exists() else {"models": []}
    outcomes = {o["name"]: o for o in (*before["models"], {**outcome, "versions": page.versions(outcome)})}
    order = [*recipes(), *outcomes]  # models of packages that are not installed here come last
    models = [outcomes[name] for name in dict.fromkeys(order) if name in outcomes]
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(page.json_text({"backend": args.backend, "models": models}))
    args.markdown.write_text(page.text(json.loads(args.json.read_text())))


if __name__ == "__main__":
    main()
