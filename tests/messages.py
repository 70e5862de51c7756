"""The errors and warnings of the code, and the quotations of them in docs/troubleshooting.md."""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
GAP = "…"  # a value from the call
RAISING = re.compile(r"warn$|Error$|super\(\).__init__$")  # what makes a message of its first argument
CPP_CHECK = re.compile(r"TORCH_CHECK\w*\(")
CPP_TOKEN = re.compile(r'"((?:[^"\\]|\\.)*)"|[(\[{]|[)\]}]|,|[^\s"(){}\[\],]+')
Texts = Mapping[str, ast.FunctionDef | ast.expr]  # the functions and the constants of a file, by name


def messages() -> list[str]:
    """Return the text of every error and warning of the package, with gaps."""
    found = []
    for path in sorted([*ROOT.glob("qtoolkit/**/*.py"), *ROOT.glob("csrc/**/*.h"), *ROOT.glob("csrc/**/*.cpp")]):
        texts = of_python(path.read_text()) if path.suffix == ".py" else of_cpp(path.read_text())
        found += [re.sub(f"{GAP}({GAP})+", GAP, text) for text in texts]
    return [text for text in dict.fromkeys(found) if len(re.findall(r"\w+", text)) >= 3]


def of_python(source: str) -> Iterator[str]:
    """Yield the messages of a file, also where one of its functions or constants has the text."""
    tree = ast.parse(source)
    texts: dict[str, ast.FunctionDef | ast.expr] = {}
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name):
                texts[name] = node
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name.isupper():
                texts[name] = value
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and RAISING.search(ast.unparse(node.func)):
            yield from written(node.args[0], texts)


def written(node: ast.expr, texts: Texts) -> Iterator[str]:
    """Yield the text of an expression, or the texts that the function which it calls returns."""
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in texts:
            for part in ast.walk(texts[name]):
                if isinstance(part, ast.Return) and part.value is not None:
                    yield from written(part.value, {})
        case ast.Call(func=ast.Name(), args=[first, *_]):
            yield from written(first, texts)
        case _:
            yield text_of(node, texts)


def text_of(node: ast.expr, texts: Texts) -> str:
    """Return the text of an expression, with gaps."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=values):
            return "".join(text_of(value, texts) for value in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text_of(left, texts) + text_of(right, texts)
        case ast.FormattedValue(value=ast.Name(id=name)) | ast.Name(id=name) if isinstance(texts.get(name), ast.expr):
            return text_of(texts[name], texts)
        case ast.Call(func=ast.Name(id="unknown"), args=[what, *_]):
            return f"unknown {text_of(what, texts)} {GAP}; did you mean {GAP}? Known: {GAP}."
    return GAP


def of_cpp(source: str) -> Iterator[str]:
    """Yield the messages of a file's TORCH_CHECKs."""
    for check in CPP_CHECK.finditer(source):
        depth, commas, parts = 1, 0, []
        for token in CPP_TOKEN.finditer(source, check.end()):
            depth += (token[0] in "([{") - (token[0] in ")]}")
            if depth == 0:
                break
            commas += depth == 1 and token[0] == ","
            if commas and token[0] != ",":
                parts.append(token[1].replace('\\"', '"') if token[1] is not None else GAP)
        yield "".join(parts)


def quotations(page: str) -> list[str]:
    """Return the messages that the tables of a page explain: the first cell of each row."""
    return re.findall(r"^\| `([^`]*)` \|", page, flags=re.MULTILINE)


def quotes(quotation: str, message: str) -> bool:
    """Return whether a quotation is of this message. Its dots stand for any text."""
    return re.search(".*".join(map(re.escape, quotation.split("..."))), message, flags=re.DOTALL) is not None
