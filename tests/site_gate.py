"""The gate of the site: what Quarto would warn about, and what a reader would stumble over, found without Quarto.

    python tests/site_gate.py      prints every problem; the exit code is 1 where there is one
"""
import ast
import base64
import re
import sys
from pathlib import Path
from urllib.parse import unquote

import yaml

from notebook_tools import (ROOT, Problem, code_cells, directive_values, notebook_paths, output_texts, prose,
                            python_tree, read, show, strip_code)

MAX_NOTEBOOK_BYTES = 1_000_000
MAX_PNG_BYTES = 100_000
CROSS_REFERENCE = r"(?:fig|eq|tbl|sec)-[A-Za-z0-9][\w-]*"

# The keys of _quarto.yml that we use, as paths; a misspelt key is silently ignored by Quarto or stops it.
QUARTO_KEYS = {
    "project.type", "project.output-dir", "project.render", "project.resources", "execute.enabled", "execute.freeze",
    "website.title", "website.description", "website.site-url", "website.repo-url", "website.repo-branch",
    "website.repo-actions", "website.search", "website.page-navigation", "website.favicon",
    "website.navbar.title", "website.navbar.left", "website.navbar.right", "website.navbar.search",
    "website.navbar.background",
    "website.sidebar.style", "website.sidebar.contents", "website.sidebar.collapse-level", "website.sidebar.search",
    "website.page-footer.left", "website.page-footer.center", "website.page-footer.right",
    "website.page-footer.background", "website.page-footer.border",
    "format.html.theme.light", "format.html.theme.dark", "format.html.toc", "format.html.toc-depth",
    "format.html.code-fold", "format.html.code-tools", "format.html.code-copy", "format.html.code-overflow",
    "format.html.html-math-method.method", "format.html.html-math-method.url", "format.html.html-math-method",
    "format.html.anchor-sections", "format.html.smooth-scroll", "format.html.link-external-newwindow",
    "format.html.fig-cap-location", "format.html.tbl-cap-location", "format.html.lightbox", "format.html.grid",
    "bibliography", "link-citations", "crossref.fig-prefix", "crossref.eq-prefix", "lang",
}
SIDEBAR_ITEM_KEYS = {"text", "href", "section", "contents", "icon"}


# ---- cross-references and citations ------------------------------------------------------------------------------

def labels(path: Path) -> list:
    """Every label that a page defines: of code cells, equations, tables, sections and pictures."""
    if path.suffix == ".ipynb":
        notebook = read(path)
        found = [value for cell in code_cells(notebook) for value in directive_values(cell["source"], "label")]
        text = prose(notebook)
    else:
        found, text = [], strip_code(path.read_text(encoding="utf-8"))
    return found + re.findall(r"\{[^{}\n]*?#([A-Za-z][\w-]*)[^{}\n]*\}", text)


def page_text(path: Path) -> str:
    """The prose of a page, with the captions of its code cells, which may refer and cite as well."""
    if path.suffix != ".ipynb":
        return strip_code(path.read_text(encoding="utf-8"))
    notebook = read(path)
    captions = [value for cell in code_cells(notebook) for name in ("fig-cap", "tbl-cap")
                for value in directive_values(cell["source"], name)]
    return prose(notebook) + "\n\n" + "\n\n".join(captions)


def site_pages(root: Path) -> list:
    """The pages that Quarto renders."""
    return [path for path in [root / "index.qmd"] if path.exists()] + notebook_paths(root)


def check_references(root: Path) -> list:
    """Every @fig-, @eq-, @tbl- and @sec- has its label on the same page, and each label stands once."""
    problems = []
    for path in site_pages(root):
        name, there = str(path.relative_to(root)), labels(path)
        for label in sorted({label for label in there if there.count(label) > 1}):
            problems.append(Problem(name, "label", f"{label} is defined twice"))
        for label in sorted(set(re.findall(rf"(?<![\w@])@({CROSS_REFERENCE})", page_text(path)))):
            if label.rstrip("-") not in there:
                problems.append(Problem(name, "reference", f"@{label} has no label on this page"))
    return problems


def not_run_yet(root: Path, path: Path) -> bool:
    """An experiment without a result of record, whose notebook stores no output at all."""
    return (path.parent.name == "experiments" and not (root / "results" / "quick" / f"{path.stem}.json").is_file()
            and not any(cell["outputs"] for cell in code_cells(read(path))))


def check_figures(root: Path) -> list:
    """A stored picture has a label, a caption and a mention in the text; a labelled cell has its picture."""
    problems = []
    for path in notebook_paths(root):
        notebook, name = read(path), str(path.relative_to(root))
        mentioned = set(re.findall(rf"@({CROSS_REFERENCE})", page_text(path)))
        for number, cell in enumerate(code_cells(notebook), 1):
            pictures = sum("image/png" in output.get("data", {}) for output in cell["outputs"])
            label = next(iter(directive_values(cell["source"], "label")), "")
            where = f"code cell {number}"
            if label.startswith("fig-"):
                if not directive_values(cell["source"], "fig-cap"):
                    problems.append(Problem(name, "figure", f"{where}: {label} has no fig-cap"))
                if pictures != 1 and not directive_values(cell["source"], "fig-subcap") and not not_run_yet(root, path):
                    problems.append(Problem(name, "figure", f"{where}: {label} stores {pictures} pictures, needs one"))
                if label not in mentioned:
                    problems.append(Problem(name, "figure", f"{where}: the text never refers to @{label}"))
            elif pictures:
                problems.append(Problem(name, "figure", f"{where}: a picture without `#| label: fig-...`"))
    return problems


def bibliography_keys(root: Path) -> list:
    """The keys of references.bib, in order."""
    return re.findall(r"^@\w+\{\s*([^,\s]+)\s*,", (root / "references.bib").read_text(encoding="utf-8"), flags=re.M)


def citations(text: str) -> set:
    """The keys that a text cites."""
    keys = re.findall(r"(?<![\w@./])@\{?([A-Za-z_][\w:.#$%&+?<>~/-]*)", text)
    return {key.rstrip(".,:;?!-") for key in keys if not re.match(r"(?:fig|eq|tbl|sec|lst|thm|nte|tip)-", key)}


def check_citations(root: Path) -> list:
    """Each cited key stands in references.bib, once."""
    known = bibliography_keys(root)
    problems = [Problem("references.bib", "citation", f"{key} stands there twice")
                for key in sorted({key for key in known if known.count(key) > 1})]
    for path in site_pages(root):
        for key in sorted(citations(page_text(path)) - set(known)):
            problems.append(Problem(str(path.relative_to(root)), "citation", f"@{key} is not in references.bib"))
    return problems


def check_markup(root: Path) -> list:
    """Display mathematics and fenced blocks are closed; equation labels stand right behind the closing $$."""
    problems = []
    for path in notebook_paths(root):
        name = str(path.relative_to(root))
        for number, cell in enumerate(read(path)["cells"]):
            if cell["cell_type"] != "markdown":
                continue
            text = strip_code(cell["source"])
            if text.count("$$") % 2:
                problems.append(Problem(name, "markup", f"cell {number}: a $$ is not closed"))
            if len(re.findall(r"^:::", text, flags=re.M)) % 2:
                problems.append(Problem(name, "markup", f"cell {number}: a ::: block is not closed"))
            for label in re.findall(r"\{#(eq-[\w-]+)\}", text):
                if not re.search(r"\$\$[ \t]*\{#" + re.escape(label) + r"\}", text):
                    problems.append(Problem(name, "markup", f"cell {number}: {{#{label}}} must follow the closing $$"))
    return problems


# ---- links -------------------------------------------------------------------------------------------------------

def pandoc_slug(heading: str) -> str:
    """The anchor that Quarto gives to a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    text = re.sub(r"[^\w\s.-]", "", text.replace("`", "")).lower()
    return re.sub(r"^[^a-z]+", "", re.sub(r"\s+", "-", text.strip()))


def github_slug(heading: str) -> str:
    """The anchor that GitHub gives to a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", text.strip()).lower())


def anchors(path: Path) -> set:
    """Everything that a link with # may lead to on a page."""
    text = prose(read(path)) if path.suffix == ".ipynb" else strip_code(path.read_text(encoding="utf-8"))
    raw = text if path.suffix != ".ipynb" else "\n\n".join(
        cell["source"] for cell in read(path)["cells"] if cell["cell_type"] == "markdown")
    slug = github_slug if path.suffix == ".md" else pandoc_slug
    headings = re.findall(r"^#{1,6}[ \t]+(.+?)[ \t]*(?:\{[^}]*\})?[ \t]*$", raw, flags=re.M)
    return {slug(heading) for heading in headings} | set(labels(path)) | set(re.findall(r'\bid="([^"]+)"', text))


def links(text: str) -> list:
    """The targets of markdown and HTML links and pictures."""
    inline = re.findall(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)", text)
    return inline + re.findall(r"<(?:a|img)\b[^>]*\b(?:href|src)=\"([^\"]+)\"", text) \
        + re.findall(r"^\[[^\]^]+\]:\s+(\S+)", text, flags=re.M)


def check_links(root: Path) -> list:
    """Relative links lead to a file that the reader has, and anchors to a heading or a label there."""
    problems, pages = [], site_pages(root)
    documents = pages + [path for path in sorted(root.glob("*.md"))]
    for path in documents:
        name = str(path.relative_to(root))
        text = page_text(path)
        for target in links(text):
            if re.match(r"[a-z][a-z0-9+.-]*:", target) or target.startswith("attachment:"):
                continue
            file, _, anchor = unquote(target).partition("#")
            there = (path.parent / file).resolve() if file else path
            if not there.exists():
                problems.append(Problem(name, "link", f"{target} leads to nothing"))
            elif path in pages and there.suffix in (".md", ".py", ".json", ".ini", "") and there not in pages:
                problems.append(Problem(name, "link", f"{target} is not on the site: link to the repository's address"))
            elif anchor and there.suffix in (".ipynb", ".md", ".qmd") and anchor not in anchors(there):
                problems.append(Problem(name, "link", f"{target}: no such anchor in {there.name}"))
    return problems


# ---- stored outputs ----------------------------------------------------------------------------------------------

PROGRESS = r"\d+%\|.*\||\d+(?:\.\d+)?(?:it/s|s/it)\]|\r(?!\n)"
MACHINE_PATH = r"(?<![\w.:/~<-])/(?:work|root|home|tmp|opt|usr|var|mnt|private|Users|farm)/[\w.-]+|\b[A-Z]:\\\w"


def expects_output(source: str) -> bool:
    """Whether a cell plainly shows something: a print at its top level, or a last line that is a value."""
    tree = python_tree(source)
    if any(isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
           and isinstance(node.value.func, ast.Name) and node.value.func.id == "print" for node in tree.body):
        return True
    last = tree.body[-1] if tree.body else None
    shown = (ast.Name, ast.Attribute, ast.Tuple, ast.BinOp, ast.Compare, ast.JoinedStr, ast.Subscript, ast.Dict)
    return isinstance(last, ast.Expr) and isinstance(last.value, shown) and not source.rstrip().endswith(";")


def check_outputs(root: Path) -> list:
    """Outputs are stored, without errors, progress bars, widgets or paths of a machine."""
    problems = []
    for path in notebook_paths(root):
        name = str(path.relative_to(root))
        for number, cell in enumerate(code_cells(read(path)), 1):
            where = f"code cell {number}"
            try:
                expected = expects_output(cell["source"])
            except SyntaxError:
                expected = False
            if expected and not cell["outputs"] and not not_run_yet(root, path):
                problems.append(Problem(name, "outputs", f"{where} shows something and stores nothing: run it"))
            if any(output["output_type"] == "error" for output in cell["outputs"]):
                problems.append(Problem(name, "outputs", f"{where} stores an error"))
            if any("widget" in kind for output in cell["outputs"] for kind in output.get("data", {})):
                problems.append(Problem(name, "outputs", f"{where} stores a widget"))
            for text in output_texts(cell):
                for rule, pattern in (("progress bar", PROGRESS), ("machine path", MACHINE_PATH)):
                    match = re.search(pattern, text)
                    if match:
                        problems.append(Problem(name, "outputs", f"{where} stores a {rule}: {match.group(0)[:60]!r}"))
    return problems


def check_sizes(root: Path) -> list:
    """Notebooks and their pictures stay small."""
    problems = []
    for path in notebook_paths(root):
        name = str(path.relative_to(root))
        if path.stat().st_size > MAX_NOTEBOOK_BYTES:
            problems.append(Problem(name, "size", f"{path.stat().st_size:,} bytes, {MAX_NOTEBOOK_BYTES:,} at most"))
        for number, cell in enumerate(code_cells(read(path)), 1):
            for output in cell["outputs"]:
                picture = base64.b64decode("".join(output.get("data", {}).get("image/png", "")))
                if len(picture) > MAX_PNG_BYTES:
                    problems.append(Problem(name, "size", f"code cell {number}: a picture of {len(picture):,} bytes, "
                                                          f"{MAX_PNG_BYTES:,} at most: lower its dpi"))
    return problems


# ---- the frame of the site ---------------------------------------------------------------------------------------

def title_lines(path: Path) -> list:
    """The lines of a notebook's first cell that are not blank."""
    cells = read(path)["cells"]
    first = cells[0]["source"] if cells and cells[0]["cell_type"] == "markdown" else ""
    return [line for line in first.splitlines() if line.strip()]


def check_titles(root: Path) -> list:
    """Every notebook opens with one H1 and a `>` line that says what it claims; page names are unique in a folder."""
    problems, names = [], {}
    for path in notebook_paths(root):
        name, lines = str(path.relative_to(root)), title_lines(path)
        if not lines or not re.match(r"# \S", lines[0]):
            problems.append(Problem(name, "title", "does not start with `# Title`"))
        if len(lines) < 2 or not re.match(r"> \S", lines[1]):
            problems.append(Problem(name, "title", "has no `> one-sentence claim` under the title"))
        if len(re.findall(r"^# \S", prose(read(path)), flags=re.M)) > 1:
            problems.append(Problem(name, "title", "has more than one H1"))
        page = path.parent / re.sub(r"^\d+_", "", path.stem)
        if page in names:
            problems.append(Problem(name, "title", f"has the page name of {names[page]}"))
        names[page] = name
    return problems


def quarto_settings(root: Path) -> dict:
    """_quarto.yml."""
    return yaml.safe_load((root / "_quarto.yml").read_text(encoding="utf-8"))


def key_paths(settings: dict, prefix: str = "") -> list:
    """The dotted paths of all leaves of nested settings; lists count as leaves."""
    found = []
    for key, value in settings.items():
        path = f"{prefix}{key}"
        found += key_paths(value, path + ".") if isinstance(value, dict) else [path]
    return found


def sidebar_items(contents: list) -> list:
    """Every entry of the sidebar in reading order, sections flattened."""
    found = []
    for item in contents:
        item = {"href": item} if isinstance(item, str) else item
        found.append(item)
        found += sidebar_items(item.get("contents", []))
    return found


def check_quarto_settings(root: Path) -> list:
    """_quarto.yml has only keys that we know, executes nothing, and lists every notebook in reading order."""
    settings, problems = quarto_settings(root), []
    for path in key_paths(settings):
        if path not in QUARTO_KEYS:
            problems.append(Problem("_quarto.yml", "key", f"{path} is not a key that this project uses: misspelt?"))
    if settings.get("execute", {}).get("enabled") is not False:
        problems.append(Problem("_quarto.yml", "key", "execute.enabled must be false: stored outputs are the real ones"))
    items = sidebar_items(settings["website"]["sidebar"]["contents"])
    for item in items:
        for key in set(item) - SIDEBAR_ITEM_KEYS:
            problems.append(Problem("_quarto.yml", "key", f"sidebar: {key} is not a key that this project uses"))
    listed = [item["href"] for item in items if item.get("href", "").endswith(".ipynb")]
    there = [str(path.relative_to(root)) for path in notebook_paths(root)]
    problems += [Problem("_quarto.yml", "sidebar", f"{name} does not exist") for name in listed if name not in there]
    problems += [Problem("_quarto.yml", "sidebar", f"{name} is not listed") for name in there if name not in listed]
    for kind in ("teaching", "experiment", "benchmark"):
        ours = [str(path.relative_to(root)) for path in notebook_paths(root, kind)]
        order = [name for name in listed if name in ours]
        if order != sorted(order):
            problems.append(Problem("_quarto.yml", "sidebar", f"the {kind} notebooks are not in reading order"))
    files = [settings.get("bibliography")] + [
        name for value in settings["format"]["html"]["theme"].values()
        for name in ([value] if isinstance(value, str) else value) if name.endswith(".scss")]
    problems += [Problem("_quarto.yml", "file", f"{name} does not exist")
                 for name in files if not name or not (root / name).exists()]
    return problems


CHECKS = [check_references, check_figures, check_citations, check_markup, check_links, check_outputs, check_sizes,
          check_titles, check_quarto_settings]


def main() -> int:
    """Run every check on this tree."""
    problems = [problem for check in CHECKS for problem in check(ROOT)]
    if problems:
        print(f"The site is not ready: {len(problems)} problems.{show(problems)}", file=sys.stderr)
        return 1
    print(f"The gate is open: {len(notebook_paths(ROOT))} notebooks checked.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
