"""What the checks of the house share: reading notebooks, their directives and their prose, and naming a problem."""
import ast
import json
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Problem:
    """One broken rule: where, which, and what to do about it."""

    file: str
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}: [{self.rule}] {self.message}"


def show(problems: list) -> str:
    """All problems as one readable text, for an assertion's message."""
    return "\n" + "\n".join(str(problem) for problem in problems)


def notebook_paths(root: Path = ROOT, kind: str = "all") -> list:
    """The notebooks under nbs/ in reading order; kind is "all", "teaching", "experiment" or "benchmark"."""
    special = {"experiments": "experiment", "benchmarks": "benchmark"}
    found = []
    for path in sorted((root / "nbs").rglob("*.ipynb")):
        parts = path.relative_to(root / "nbs").parts
        if any(part.startswith((".", "_")) for part in parts):
            continue
        if kind in ("all", special.get(parts[0], "teaching")):
            found.append(path)
    return found


def read(path: Path) -> dict:
    """A notebook as plain JSON, every cell's source joined into one string."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        cell["source"] = "".join(cell["source"])
    return notebook


def code_cells(notebook: dict) -> list:
    """The code cells, in order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def directives(source: str) -> list:
    """(name, value) of each `#|` line; a name that takes a value after a colon keeps the colon."""
    lines = re.findall(r"^\s*#\s*\|\s*([\w.-]+:?)[ \t]*(.*)$", source, flags=re.M)
    return [(name, value.strip()) for name, value in lines]


def directive_values(source: str, name: str) -> list:
    """The values of one directive in a cell."""
    return [value for found, value in directives(source) if found.rstrip(":") == name]


def is_exported(source: str) -> bool:
    """Whether nbdev exports this cell."""
    return any(name in ("export", "exporti", "exports") for name, _ in directives(source))


def python_tree(source: str) -> ast.Module:
    """The syntax tree of a cell; IPython magics and shell lines are left out."""
    lines = ["" if re.match(r"\s*[%!]", line) else line for line in source.splitlines()]
    return ast.parse("\n".join(lines))


def prose(notebook: dict) -> str:
    """All markdown of a notebook without code spans, fenced code and HTML comments."""
    texts = [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "markdown"]
    return strip_code("\n\n".join(texts))


def strip_code(text: str) -> str:
    """Markdown without fenced code, inline code and HTML comments."""
    text = re.sub(r"^(```+|~~~+).*?^\1[ \t]*$", "", text, flags=re.M | re.S)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    return re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "", text, flags=re.S)


def output_texts(cell: dict) -> list:
    """Every text that a code cell stored, as a reader sees it."""
    texts = []
    for output in cell.get("outputs", []):
        if "text" in output:
            texts.append("".join(output["text"]))
        for kind, value in output.get("data", {}).items():
            if kind.startswith("text/"):
                texts.append("".join(value))
        texts += output.get("traceback", [])
    return texts
