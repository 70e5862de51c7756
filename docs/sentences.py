"""The sentences of errors and warnings in the code: those that docs/troubleshooting.md quotes, and the page of them all."""

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
            if name == "warnings.warn" or (name.endswith("Error") and name not in PARTS_OF_SENTENCES):
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


def page_of_all(troubleshooting: str) -> str:
    """Return the page with every sentence."""
    every, quotations = sentences(), quoted(troubleshooting)
    groups = defaultdict(list)
    for sentence in every:
        groups[sentence.group].append(sentence)
    explained = {sentence for sentence in every if any(explains(quotation, sentence) for quotation in quotations)}
    lines = [
        "# Every error and warning",
        f"The package has {len(every)} sentences. Each says what is wrong, which value was given and what to do; "
        f"{GAP} stands for what a call puts into it. {len(explained)} of them (in bold) are explained in "
        "[Troubleshooting](troubleshooting.md). This page is made from the code.",
    ]
    for group in sorted(groups, key=str.lower):
        lines.append(f"## `{group}`")
        rows = [f"| {cell(s, s in explained)} | `{s.file}` |" for s in groups[group]]
        lines.append("\n".join(["| sentence | raised in |", "|---|---|", *rows]))
    return "\n\n".join(lines) + "\n"


def cell(sentence: Sentence, bold: bool) -> str:
    """Return a sentence as a cell of a Markdown table."""
    text = re.sub(r"([\\`*_\[\]<>|])", r"\\\1", " ".join(sentence.text.split()))
    return f"**{text}**" if bold else text
