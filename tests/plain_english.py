"""Phrases that a reader has to read twice, in what users read: pages, docstrings, errors and report lines.

python -m tests.plain_english README.md docs qtoolkit csrc    # each phrase with its place, then the counts
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PATTERNS = {
    "a pronoun for a noun": r"\b(?:that|those|the ones?) of\b",
    "'behind' for 'after'": r"\bbehind\b",
    "'codes' for quantized values": r"\bcodes\b",
    "a noun clause as the subject": (
        r"(?:^|[.;:] )What(?:ever)? (?!to )[^.?|,]{3,60}? (?:is|are|has|have|was|were|gets?|takes?) (?![^.]*[?])"
    ),
    "an inversion": r"\b(?:which|that) the \w+ has not\b|\bso does\b|\bso do\b|\bneither does\b",
    "history in a guide": r"\b(?:since then|formerly|used to be|no longer|until now|so far)\b",
    "a rare word": (
        r"\b(?:roads?|takes? no offence|of one's own|hence|thereby|whereby|wherein|thereof|save for|but for"
        r"|is a matter of)\b"
    ),
    "'whose' of a thing, twice": r"\bwhose\b[^.]*\bwhose\b",
}
WORDS = {
    name: re.compile(pattern, re.IGNORECASE if name != "a noun clause as the subject" else 0)
    for name, pattern in PATTERNS.items()
}


def _prose_of_markdown(text: str) -> Iterator[tuple[int, str]]:
    """Lines of prose: no blocks of code, no code within a line, no targets of links, no comments."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith(("```", "~~~")):
            fenced = not fenced
        elif not fenced and not line.lstrip().startswith("<!--"):
            yield number, re.sub(r"`[^`]*`|\]\([^)]*\)|<[^>]*>", " ` ", line)


def _prose_of_python(text: str) -> Iterator[tuple[int, str]]:
    """Docstrings and strings with at least one space; the examples in docstrings are left out."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            for offset, line in enumerate(node.value.splitlines()):
                if not line.lstrip().startswith((">>>", "...")):
                    yield node.lineno + offset, re.sub(r"`[^`]*`", " ` ", line)


def _prose_of_c(text: str) -> Iterator[tuple[int, str]]:
    """Strings with at least one space."""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.lstrip().startswith(("//", "#include")):
            for string in re.findall(r'"((?:[^"\\]|\\.)*)"', line):
                if " " in string.strip():
                    yield number, string


READERS = {
    ".md": _prose_of_markdown,
    ".py": _prose_of_python,
    ".cpp": _prose_of_c,
    ".h": _prose_of_c,
    ".cu": _prose_of_c,
    ".cuh": _prose_of_c,
}


def phrases(paths: list[Path]) -> Iterator[tuple[Path, int, str, str]]:
    """Each phrase in the files at `paths` (folders: with all files below): file, line, kind of the phrase, the line."""
    for path in paths:
        files = sorted(file for file in path.rglob("*") if file.suffix in READERS) if path.is_dir() else [path]
        for file in files:
            for number, line in READERS[file.suffix](file.read_text()):
                for kind, words in WORDS.items():
                    for _ in words.finditer(line):
                        yield file, number, kind, line.strip()


def main() -> None:
    found = list(phrases([Path(argument) for argument in sys.argv[1:]]))
    for file, number, kind, line in found:
        print(f"{file}:{number}: {kind}: {line[:160]}")
    for kind, count in Counter(kind for _, _, kind, _ in found).most_common():
        print(f"{count:6} {kind}")


if __name__ == "__main__":
    main()
