"""The errors and warnings of the code: those that docs/troubleshooting.md quotes, and the pages that list them all."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
GAP = "…"  # what a sentence has from the call
PARTS_OF_SENTENCES = {"NoPartError", "PlacedError", "CodesGoneError"}
CPP_CHECK = re.compile(r"TORCH_CHECK\w*\(")
CPP_TOKEN = re.compile(r'"((?:[^"\\]|\\.)*)"|[(\[{]|[)\]}]|,|[^\s"(){}\[\],]+')


@dataclass(frozen=True)
class Topic:
    """A page of errors.

    Attributes:
        title: What the errors are about.
        about: What raises them.
        places: How the paths of these files begin; the first topic that fits has the error.
    """

    title: str
    about: str
    places: tuple[str, ...]

    @property
    def page(self) -> str:
        """Return the name of its file."""
        return "_".join(re.findall(r"[a-z]+", self.title.lower())) + ".md"


TOPICS = (
    Topic(
        "Configs and backends",
        "specs, configs, mappings and backends",
        ("qtoolkit/config", "qtoolkit/backends", "qtoolkit/layer_rules"),
    ),
    Topic("Quantizers", "quantizers and observers", ("qtoolkit/quantizers",)),
    Topic("Layers", "QAT layers", ("qtoolkit/nn",)),
    Topic("Checkpoints", "`save_checkpoint` and `load_checkpoint`", ("qtoolkit/checkpoint",)),
    Topic(
        "Export and verification", "exports, verification, and checks of files", ("qtoolkit/export", "qtoolkit/lint")
    ),
    Topic(
        "Training and post-training methods",
        "`qt.tuning`, calibration and parameter groups",
        (
            "qtoolkit/tuning",
            "qtoolkit/calibrate",
            "qtoolkit/parameter_groups",
            "qtoolkit/finite",
        ),
    ),
    Topic(
        "Debugging and command line",
        "`qt.debug`, reports and the command line",
        ("qtoolkit/debug", "qtoolkit/report", "qtoolkit/cli"),
    ),
    Topic(
        "Migration",
        "the adapters for pytorch-quantization and MQBench",
        ("qtoolkit/compat", "qtoolkit/foreign"),
    ),
    Topic(
        "Native ops of layers",
        "native ops of layers and batch norms",
        (
            "csrc/layer",
            "csrc/norm",
            "csrc/batch_norm",
            "csrc/unit",
            "csrc/quant_",
            "csrc/max_pool",
            "csrc/prelu",
            "csrc/onednn",
        ),
    ),
    Topic("Native ops", "native ops of quantizers and observers", ("csrc", "qtoolkit/ops")),
    Topic(
        "Prepare, replace and convert",
        "`prepare`, `quant_modules`, `fuse_modules` and `convert`; installation and imports",
        ("qtoolkit",),
    ),
)


@dataclass(frozen=True)
class Sentence:
    """A sentence of the code, with "…" for what a call puts into it, and where it stands."""

    text: str
    file: str

    @property
    def group(self) -> str:
        """Return the function that the sentence begins with, or the package that it comes from."""
        if self.file.startswith(("csrc", "qtoolkit/compat")):
            return "native ops" if self.file.startswith("csrc") else "qtoolkit.compat"
        begin = re.match(r"(\w+):|(quantizer|layer|batch norm|Backend|argument) ", self.text)
        return (begin[1] or f"{begin[2]} ...") if begin else "qtoolkit." + Path(self.file).parts[1].removesuffix(".py")

    @property
    def topic(self) -> Topic:
        """Return the page that it is on."""
        return next(topic for topic in TOPICS if self.file.startswith(topic.places))


def sentences() -> list[Sentence]:
    """Return every sentence that the package raises or warns with, once."""
    found = {}
    for path in sorted([*ROOT.glob("qtoolkit/**/*.py"), *ROOT.glob("csrc/**/*.h"), *ROOT.glob("csrc/**/*.cpp")]):
        texts = of_python(path.read_text()) if path.suffix == ".py" else of_cpp(path.read_text())
        for text in texts:
            if len(re.findall(r"\w+", text)) >= 3:
                found.setdefault(text, Sentence(text, str(path.relative_to(ROOT))))
    return list(found.values())


def of_python(source: str) -> Iterator[str]:
    """Yield what a file warns with and makes errors of; a sentence that a function of the file returns is taken from there."""
    tree = ast.parse(source)
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            name = ast.unparse(node.func)
            if name == "warn" or (name.endswith("Error") and name not in PARTS_OF_SENTENCES):
                yield from written(node.args[0], functions)


def written(node: ast.expr, functions: dict[str, ast.FunctionDef]) -> Iterator[str]:
    """Yield the text of an expression, or those of the function that it calls."""
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in functions:
            for part in ast.walk(functions[name]):
                if isinstance(part, ast.Return) and part.value is not None:
                    yield from written(part.value, {})
        case ast.Call(func=ast.Name(), args=[first, *_]):
            yield from written(first, functions)
        case _:
            yield re.sub(f"{GAP}({GAP})+", GAP, text_of(node))


def text_of(node: ast.expr) -> str:
    """Return the text of an expression, with gaps."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=values):
            return "".join(text_of(value) for value in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text_of(left) + text_of(right)
        case ast.Call(func=ast.Name(id="unknown"), args=[what, *_]):
            return f"unknown {text_of(what)} {GAP}; did you mean {GAP}? Known: {GAP}."
    return GAP


def of_cpp(source: str) -> Iterator[str]:
    """Yield the sentences of a file's TORCH_CHECKs."""
    for check in CPP_CHECK.finditer(source):
        depth, commas, parts = 1, 0, []
        for token in CPP_TOKEN.finditer(source, check.end()):
            depth += (token[0] in "([{") - (token[0] in ")]}")
            if depth == 0:
                break
            commas += depth == 1 and token[0] == ","
            if commas and token[0] != ",":
                parts.append(token[1].replace('\\"', '"') if token[1] is not None else GAP)
        yield re.sub(f"{GAP}({GAP})+", GAP, "".join(parts))


def quoted(page: str) -> list[str]:
    """Return the sentences that the tables of docs/troubleshooting.md explain: the first cell of each row."""
    return re.findall(r"^\| `([^`]*)` \|", page, flags=re.MULTILINE)


def pattern_of(quotation: str) -> re.Pattern[str]:
    """Return what a quotation stands for: its dots are anything."""
    return re.compile(".*".join(re.escape(part) for part in quotation.split("...")), re.DOTALL)


def explains(quotation: str, sentence: Sentence) -> bool:
    """Return whether a quotation is of this sentence."""
    return pattern_of(quotation).search(sentence.text) is not None


def pages(troubleshooting: str) -> dict[str, str]:
    """Return a page for each topic with its sentences, by file name, and the page that lists them."""
    every, quotations = sentences(), quoted(troubleshooting)
    explained = {sentence for sentence in every if any(explains(quotation, sentence) for quotation in quotations)}
    of_topic: dict[Topic, list[Sentence]] = {topic: [] for topic in TOPICS}
    for sentence in every:
        of_topic[sentence.topic].append(sentence)
    rows = [f"| [{topic.title}]({topic.page}) | {len(found)} | {topic.about} |" for topic, found in of_topic.items()]
    index = [
        "# All errors and warnings",
        f"qtoolkit can emit {len(every)} errors and warnings. Each says what is wrong, which value was given and what to do. "
        f"To find one, paste part of it into the search field. {len(explained)} of them, in bold, are explained in "
        f"[Troubleshooting](../troubleshooting.md). {GAP} stands for a value from your call. These pages come from the code.",
        "\n".join(["| topic | messages | raised by |", "|---|---|---|", *rows]),
    ]
    return {"index.md": "\n\n".join(index) + "\n"} | {
        topic.page: page_of(topic, found, explained) for topic, found in of_topic.items()
    }


def page_of(topic: Topic, found: list[Sentence], explained: set[Sentence]) -> str:
    """Return the page of a topic: its sentences, by the function that raises them."""
    groups = defaultdict(list)
    for sentence in found:
        groups[sentence.group].append(f"- {marked(sentence, sentence in explained)}")
    lines = [f"# Errors: {topic.title}", f"Raised by {topic.about}. [All topics](index.md)."]
    for group in sorted(groups, key=str.lower):
        lines += [f"## `{group}`", "\n".join(groups[group])]
    return "\n\n".join(lines) + "\n"


def marked(sentence: Sentence, bold: bool) -> str:
    """Return a sentence as Markdown, which shows it as it is."""
    text = re.sub(r"([\\`*_\[\]<>|])", r"\\\1", " ".join(sentence.text.split()))
    return f"**{text}**" if bold else text
