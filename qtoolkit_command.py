"""The command `qtoolkit`. It is outside of the package: help does not import torch, and Ctrl-C works during the import."""

import argparse
import ast
import json
import os
import runpy
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any, NoReturn

# Copies of tables in the package, which imports torch; tests compare them.
BACKENDS = (
    "academic", "academic-nlp", "litert", "litert-16x8", "nnie", "onnxruntime", "openvino", "ppl", "ppl-w8a16", "qnn",
    "snpe", "stpu", "tengine", "tensorrt", "tensorrt-nlp", "tensorrt10", "tensorrt8", "tvm", "vitis", "xnnpack",
)  # fmt: skip
RUNTIMES = ("onnxruntime", "openvino")
GPUS = ("H100", "A100", "L4", "T4", "Orin", "RTX4090")
EXPORTERS = ("dynamo", "torchscript")
SHELLS = ("bash", "fish", "tcsh", "zsh")
EXIT_CODES = (
    "Exit status: 0: no findings; 1: findings, or quantized values that differ; 2: invalid arguments or an invalid file, with "
    "an error message."
)


OTHER_PROJECT = (
    "The distribution 'qtoolkit' on the package index is another project, with a package of the same name. Run: pip uninstall "
    "qtoolkit torch-qtoolkit, and install torch-qtoolkit again. To use both, install each in its own environment."
)


def main() -> int:
    """Run the command line of `qtoolkit.cli`; return its exit status."""
    end_on_interrupt()
    arguments = parser().parse_args()
    if arguments.command == "examples":
        return copy_examples(Path(arguments.folder), arguments.json)
    warnings.formatwarning = lambda message, category, *_, **__: f"{category.__name__}: {message}\n"
    import qtoolkit

    if not hasattr(qtoolkit, "prepare"):
        place = next(iter(qtoolkit.__path__))
        sys.stderr.write(f"qtoolkit: the package in {place} is not torch-qtoolkit's. {OTHER_PROJECT}\n")
        return 2
    from qtoolkit.cli import run

    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run(arguments)


def copy_examples(folder: Path, as_json: bool = False) -> int:
    """Copy the examples into a new folder, and print what each script shows; return the exit code."""
    if folder.exists():
        sys.stderr.write(f"qtoolkit: {str(folder)!r} exists; name a new folder: qtoolkit examples FOLDER.\n")
        return 2
    shutil.copytree(_folder_of_examples(), folder, ignore=shutil.ignore_patterns("__pycache__"))
    scripts = sorted(folder.rglob("*.py"))
    shown = {str(script): (ast.get_docstring(ast.parse(script.read_text())) or "").split("\n")[0] for script in scripts}
    print(json.dumps(shown) if as_json else "\n".join(f"{script}: {text}" for script, text in shown.items()))
    return 0


def _folder_of_examples() -> Path:
    """Return the folder of the installed examples; in a checkout the one beside this file."""
    try:
        installed = files("torch-qtoolkit") or []
    except PackageNotFoundError:
        installed = []
    places = [Path(str(file.locate())) for file in installed if file.parts[-2:] == ("examples", "digits.py")]
    return places[0].parent if places else Path(__file__).with_name("examples")


def end_on_interrupt() -> None:
    """Let Ctrl-C end the process without a traceback, until `main` runs the command."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a job in the background ignores it
        signal.signal(signal.SIGINT, _end)


def _end(*_: Any) -> None:
    """End the process at once: an exception could be caught by a `try` around an import."""
    sys.stderr.write("qtoolkit: interrupted.\n")
    os._exit(130)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments.

    Example:
        >>> parser().parse_args(["lint", "a.onnx", "b.onnx", "--backend", "tensorrt"]).files
        ['a.onnx', 'b.onnx']
    """
    parser = argparse.ArgumentParser(
        "qtoolkit",
        description="Quantize models to ONNX files, and check quantized ONNX files from any tool.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Prints, text=_version, nargs=0, help="print the version")
    parser.add_argument(
        "--print-completion", action=_Prints, text=_completion, choices=SHELLS, help="print completions for a shell"
    )
    parser.set_defaults(command="info", files=[], json=False)  # without a command
    commands = parser.add_subparsers(metavar="command")
    for add in (_add_quantize, _add_lint, _add_verify, _add_info, _add_examples):
        command = add(commands)
        command.add_argument("--json", action="store_true", help="print JSON (see docs/command_line.md)")
    return parser


Commands = Any  # argparse has no public name for what add_subparsers returns


def _add(commands: Commands, name: str, text: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text, epilog=EXIT_CODES)
    command.set_defaults(command=name)
    return command


def _add_quantize(commands: Commands) -> argparse.ArgumentParser:
    command = _add(
        commands, "quantize", "quantize a model from a Python file, without training, and write an ONNX file"
    )
    command.add_argument(
        "model", metavar="MODULE:NAME", help="a model, or a function that returns one; also path/file.py:name"
    )
    command.add_argument(
        "--data", required=True, metavar="MODULE:NAME", help="batches, or a function that returns them, to calibrate on"
    )
    _add_backend(command)
    command.add_argument("--out", default="model.onnx", metavar="FILE", help="the file to write (default: model.onnx)")
    command.add_argument(
        "--exclude",
        action="append",
        metavar="NAME",
        help="layer to keep in float, a name or a pattern; may be repeated",
    )
    command.add_argument("--max-batches", type=int, metavar="N", help="the number of batches to run (default: all)")
    command.add_argument("--method", help="how ranges are chosen: minmax, mse, entropy, percentile, ... (docs/ptq.md)")
    command.add_argument("--exporter", default="dynamo", choices=EXPORTERS, help="torch's exporter (default: dynamo)")
    command.add_argument("--constant-batch", action="store_true", help="make the batch size static in the file")
    return command


def _add_lint(commands: Commands) -> argparse.ArgumentParser:
    command = _add(commands, "lint", "check the Q/DQ nodes of files against the rules of a target")
    _add_files(command, "+", "ONNX files with QuantizeLinear and DequantizeLinear nodes")
    _add_backend(command)
    command.add_argument("--advice", action="store_true", help="also list quantized nodes without a speedup")
    command.add_argument(
        "--gpu", default="A100", choices=GPUS, help="the GPU of the estimate for tensorrt (default: A100)"
    )
    return command


def _add_verify(commands: Commands) -> argparse.ArgumentParser:
    command = _add(commands, "verify", "compare the quantized values of runtimes for files")
    _add_files(command, "+", "ONNX files with QuantizeLinear and DequantizeLinear nodes")
    command.add_argument(
        "--runtime", action="append", choices=RUNTIMES, help="a runtime; may be repeated (default: all installed)"
    )
    command.add_argument("--inputs", metavar="NPZ", help="arrays by input name (default: random arrays)")
    command.add_argument("--seed", type=int, default=0, help="seed of the random inputs (default: 0)")
    command.add_argument("--model", metavar="PT2", help="a torch.export program; its outputs are compared too")
    command.add_argument(
        "--allow",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="the share of quantized values that may differ (default: 0)",
    )
    return command


def _add_info(commands: Commands) -> argparse.ArgumentParser:
    command = _add(commands, "info", "describe files, or the installation if no file is given")
    _add_files(command, "*", "ONNX files")
    return command


def _add_examples(commands: Commands) -> argparse.ArgumentParser:
    command = _add(commands, "examples", "copy the example scripts into a new folder")
    command.add_argument("folder", nargs="?", default="examples", metavar="FOLDER", help="its name (default: examples)")
    return command


def _add_files(command: argparse.ArgumentParser, count: str, text: str) -> None:
    command.add_argument("files", nargs=count, metavar="FILE", help=text)


def _add_backend(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--backend", "--target", required=True, choices=BACKENDS, metavar="NAME", help=", ".join(BACKENDS)
    )


class _Prints(argparse.Action):
    """An option that prints a text and ends the command."""

    def __init__(self, *args: Any, text: Callable[[argparse.ArgumentParser, Any], str], **options: Any) -> None:
        super().__init__(*args, **options)
        self.text = text

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> NoReturn:
        """Print the text, and end the process."""
        print(self.text(parser, values))
        parser.exit()


def _version(parser: argparse.ArgumentParser, _: object) -> str:
    file = Path(__file__).with_name("qtoolkit") / "version.py"
    return f"{parser.prog} {runpy.run_path(str(file))['__version__']}"


def _completion(parser: argparse.ArgumentParser, shell: str) -> str:
    try:
        import shtab
    except ImportError:
        from qtoolkit.extras import missing

        parser.exit(2, f"qtoolkit: {missing('--print-completion', 'shtab', 'cli')}\n")
    commands = next(action for action in parser._actions if isinstance(action.choices, dict))
    for command in commands.choices.values():  # type: ignore[union-attr]
        for action in command._actions:
            if action.metavar in ("FILE", "NPZ", "PT2", "MODULE:NAME"):
                action.complete = shtab.FILE
    return str(shtab.complete(parser, shell))
