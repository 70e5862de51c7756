"""Rules of the house that no single module can show: what a module may import, at run time and for its types."""

import ast
import inspect
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import FunctionType

import pytest
import torch

import qtoolkit
from qtoolkit import running
from tests.plain_english import WORDS, phrases

HOME = Path(qtoolkit.__file__).parent
FILES = {
    ".".join(("qtoolkit", *path.relative_to(HOME).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(HOME.rglob("*.py"))
}


def imports_of(module: str) -> Iterator[str]:
    """Yield the modules of qtoolkit that a module imports: in functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            names = [f"{node.module}.{name}" for name in names]
        for name in names:
            if name.startswith("qtoolkit._snapshot."):  # compiled, and without imports
                continue
            if name == "qtoolkit" or name.startswith("qtoolkit."):
                yield name if name in FILES else name.rpartition(".")[0]


IMPORTED = {(module, name) for module in FILES for name in imports_of(module)}


def package_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def test_the_core_imports_nothing_of_compat() -> None:
    assert [pair for pair in IMPORTED if "compat" in map(package_of, pair) and package_of(pair[0]) != "compat"] == []


# What the core is not: formats and tools for which it does not need to be changed.
BEYOND_THE_CORE = (
    "qtoolkit.compat", "qtoolkit.integrations", "qtoolkit.cli", "qtoolkit.tuning", "qtoolkit.debug", "qtoolkit.checkpoint",
    "qtoolkit.export.tflite", "qtoolkit.export.litert", "qtoolkit.export.backend_files", "qtoolkit.export.executorch",
    "qtoolkit.export.pt2e",
)  # fmt: skip


def test_the_core_imports_nothing_of_what_is_built_on_it() -> None:
    """But for what shows all names, and for what reads a format: programs of torch.export, and two runtimes."""

    def is_beyond(module: str) -> bool:
        return any(module == name or module.startswith(f"{name}.") for name in BEYOND_THE_CORE)

    importers = {module for module, name in IMPORTED if is_beyond(name) and not is_beyond(module)}
    runtimes = "qtoolkit.export.verification.runtimes"
    readers = {"qtoolkit.export.program", f"{runtimes}.executorch_xnnpack", f"{runtimes}.litert_interpreter"}
    assert importers == {"qtoolkit", "qtoolkit.export", *readers}


def test_nothing_imports_an_integration() -> None:
    """Integrations import packages that qtoolkit does not need, such as ultralytics, whose license is the AGPL."""
    assert [
        pair for pair in IMPORTED if "integrations" in map(package_of, pair) and package_of(pair[0]) != "integrations"
    ] == []
    assert [
        module for module in FILES if re.search(r"^\s*(import|from) ultralytics", FILES[module].read_text(), re.M)
    ] == ["qtoolkit.integrations.ultralytics"]


# From the lowest floor up: a module imports from its own floor and from those below it alone.
FLOORS = (
    "_native", "errors", "instead", "extras", "files", "public", "shared_modules", "unregistered", "version",
    "wrapped", "model_inputs", "model_state", "running", "processes", "progress", "verdicts", "foreign",
    "ops", "config", "quantizers", "finite", "op_kinds", "batches", "backends", "nn", "integer", "runtimes", "lint",
    "layer_rules",
    "graph", "eager", "report", "calibrate", "parameter_groups", "prepare", "convert", "quant_modules",
    "parts", "export", "quantize", "debug", "tuning", "checkpoint", "__init__", "integrations", "cli", "__main__", "compat",
)  # fmt: skip
UPWARD = {
    # What torch.onnx.export records of an op is written with onnx, which qtoolkit imports in such an export alone.
    ("qtoolkit.ops.recording", "qtoolkit.export.exporters.plain"),
    ("qtoolkit.ops.recording", "qtoolkit.export.exporters.symbolics"),
    # A runtime's record says how it executes a file; what reads files is imported when that is asked.
    ("qtoolkit.runtimes.execution", "qtoolkit.export.files.quantizer_nodes"),
    ("qtoolkit.runtimes.table", "qtoolkit.export.verification.runtimes.onnxruntime_cpu"),
    ("qtoolkit.runtimes.table", "qtoolkit.export.verification.runtimes.openvino_cpu"),
}


def test_modules_import_from_the_floors_below() -> None:
    assert {package_of(module) for module in FILES} == set(FLOORS), "each package and module has a floor"
    upward = {pair for pair in IMPORTED if FLOORS.index(package_of(pair[1])) > FLOORS.index(package_of(pair[0]))}
    assert upward == UPWARD


def test_what_is_shown_is_what_is_public() -> None:
    assert {name for name in dir(qtoolkit) if not name.startswith("_")} == set(qtoolkit.__all__)
    packages = [path for path in FILES.values() if path.name == "__init__.py"]
    imports = [path for path in packages if any(line.startswith(("from", "import")) for line in path.open())]
    assert [path for path in imports if "__all__ = [" not in path.read_text()] == []


def test_each_public_method_is_documented_by_itself_or_by_the_one_that_it_overrides() -> None:
    for name in FILES:
        with suppress(ImportError):  # of packages that are not installed
            import_module(name)
    modules = [sys.modules[name] for name in FILES if name in sys.modules]
    values = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    methods = {
        f"{kind.__name__}.{name}": getattr(kind, name)
        for kind in values
        if kind.__module__.startswith("qtoolkit") and kind.__name__[0] != "_"
        for name, member in vars(kind).items()
        if name[0] != "_"
        and name not in inspect.get_annotations(kind)  # a field whose default is a function
        and isinstance(member, FunctionType | classmethod | staticmethod | property)
    }
    assert len(methods) > 500
    assert [name for name, method in methods.items() if not inspect.getdoc(method)] == []


AN_IMPORT = """
import sys
from torch.optim.optimizer import _global_optimizer_post_hooks as after, _global_optimizer_pre_hooks as before
known = {*sys.modules}
import qtoolkit
new = {*sys.modules} - known
print(len(after), len(before), sorted(new & {"onnx", "sympy", "torch._dynamo", "triton"}))
"""


A_COMPILATION = """
import torch
import qtoolkit as qt
model = qt.prepare(torch.nn.Sequential(torch.nn.Linear(4, 2)).train(), torch.randn(8, 4), backend="tensorrt")
qt.calibrate(model, [torch.randn(8, 4)], progress=False)
torch.compile(model, backend="eager", fullgraph=True)(torch.randn(8, 4))
print("compiled")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "prints"),
    [(AN_IMPORT, "0 0 []\n"), pytest.param(A_COMPILATION, "compiled\n", marks=pytest.mark.slow)],
    ids=["import", "compilation"],
)
def test_an_import_leaves_optimizers_alone_and_imports_no_compiler(program: str, prints: str) -> None:
    """torch.compile's own modules would take twice as long as the package. Imported during a trace, they learn wrong tables."""
    run = subprocess.run([sys.executable, "-c", program], cwd=HOME.parent, capture_output=True, text=True, check=False)
    assert run.stdout == prints, run.stderr


def test_functions_have_the_mark_that_torch_sets() -> None:
    ours, of_torch = running.constant_result(lambda: True), torch.compiler.assume_constant_result(lambda: True)
    assert vars(ours) == vars(of_torch) != {}


def test_warnings_have_one_owner_which_finds_the_line_of_the_user() -> None:
    found = {module for module, path in FILES.items() if re.search(r"warnings\.warn|stacklevel", path.read_text())}
    assert found == {"qtoolkit.errors"}


# ---- what runs


# Names by which torch says who takes the ops: public functions, and private names where there are none.
QUESTIONS = {
    "is_compiling", "is_exporting", "is_tracing", "is_in_onnx_export", "is_current_stream_capturing",
    "_are_functorch_transforms_active", "_current_graph_task_id", "_current_level",
}  # fmt: skip
MOST_ASKS = 43  # entries of modules, ops and hooks that ask what runs; a change lowers it, or says why not


def test_what_runs_is_asked_of_torch_in_one_file_and_passed_down() -> None:
    ask_torch, asks = set(), 0
    for module, path in FILES.items():
        text = path.read_text()
        ask_torch |= {module for name in QUESTIONS if re.search(rf"\W{name}\b", text)}
        asks += len(re.findall(r"(?<!def )\brunning(?=\(\)|, name=)", text)) if module != "qtoolkit.running" else 0
    print(f"{asks} times running()")
    assert ask_torch == {"qtoolkit.running"}
    assert asks <= MOST_ASKS


# ---- how large it is


MOST_LINES, MOST_ANYS = 32_368, 540  # what it has come to; a change lowers them, or says why not


def code_lines(path: Path) -> int:
    """The lines of a module without docstrings, comments, blank lines and imports."""
    text = path.read_text()
    no_code = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in no_code]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        left_out = [node] if isinstance(node, ast.Import | ast.ImportFrom) else []
        documented = (
            isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None
        )
        for part in [*left_out, *(node.body[:1] if documented else [])]:
            lines -= set(range(part.lineno, part.end_lineno + 1))
    return len(lines)


def test_no_op_has_more_than_20_arguments() -> None:
    names = re.findall(r'm\.def\(\s*"(\w+)\(', (HOME.parent / "csrc" / "library.cpp").read_text())
    found = {name: len(getattr(torch.ops.qtoolkit, name).default._schema.arguments) for name in names}
    assert len(found) > 50
    assert not {name: count for name, count in found.items() if count > 20}


@pytest.mark.slow
def test_the_package_does_not_grow_unseen() -> None:
    lines = sum(map(code_lines, FILES.values()))
    anys = sum(
        isinstance(node, ast.Name) and node.id == "Any"
        for path in FILES.values()
        for node in ast.walk(ast.parse(path.read_text()))
    )
    print(f"{lines} lines of code, {anys} times Any")
    assert lines <= MOST_LINES
    assert anys <= MOST_ANYS


# ---- what it says


MOST_PHRASES = {  # phrases to read twice (tests/plain_english.py): in README.md and docs, and in qtoolkit and csrc
    "a pronoun for a noun": (0, 0),
    "'behind' for 'after'": (0, 0),
    "'codes' for quantized values": (21, 14),  # names of benchmarks, exit codes, bit patterns
    "a noun clause as the subject": (0, 0),
    "an inversion": (0, 0),
    "history in a guide": (0, 0),
    "a rare word": (0, 1),
    "'whose' of a thing, twice": (0, 0),
}


def test_pages_and_messages_are_in_plain_english() -> None:
    root = HOME.parent
    assert MOST_PHRASES.keys() == WORDS.keys()
    for i, parts in enumerate((("README.md", "docs"), ("qtoolkit", "csrc"))):
        found = list(phrases([root / part for part in parts]))
        counts = Counter(kind for _, _, kind, _ in found)
        more = {kind for kind, most in MOST_PHRASES.items() if counts[kind] > most[i]}
        places = "\n".join(f"{path}:{line}: {kind}: {text}" for path, line, kind, text in found if kind in more)
        assert not more, f"{ {kind: counts[kind] for kind in more} } in {parts}:\n{places}"
