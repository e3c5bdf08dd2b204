"""Plain pages of the notebooks for who has no Quarto: one HTML file each, readable offline, and an index.

    python tests/site_pages.py _docs
"""
import html
import os
import re
import shutil
import sys
import tempfile
import unicodedata
from pathlib import Path

import nbformat

from notebook_tools import ROOT, directive_values, read
from privfl.report import notebook_page
from site_gate import pandoc_slug, quarto_settings

STYLE = """
:root { color-scheme: light dark; }
body { max-width: 48rem; margin: 0 auto; padding: 1rem; font: 17px/1.6 system-ui, sans-serif; color: #1f2430; background: #fff; }
a { color: #2f4fd0; }
@media (prefers-color-scheme: dark) { body { color: #dfe3ec; background: #14171e; } a { color: #9db4ff; } }
"""


ACCENTS = {"'": "\u0301", "`": "\u0300", '"': "\u0308", "~": "\u0303", "^": "\u0302", "c": "\u0327", "u": "\u0306"}


def plain_text(value: str) -> str:
    """A BibTeX value without braces, its accents as letters."""
    return re.sub(r"\\(['`\"~^cu])\s*([A-Za-z])",
                  lambda found: unicodedata.normalize("NFC", found[2] + ACCENTS[found[1]]), re.sub(r"[{}]", "", value))


def bibliography(root: Path) -> dict:
    """(authors and year, title, address) of each entry of references.bib."""
    entries = {}
    text = (root / "references.bib").read_text(encoding="utf-8")
    for key, body in re.findall(r"^@\w+\{\s*([^,\s]+)\s*,(.*?)^\}", text, flags=re.M | re.S):
        field = {name.lower(): plain_text(value) for name, value in
                 re.findall(r"^\s*(\w+)\s*=\s*\{(.*)\}\s*,?\s*$", body, flags=re.M)}
        nameless = f"arXiv {field['eprint']}" if "eprint" in field else key
        names = [name.split(",")[0].strip() for name in field.get("author", nameless).split(" and ")]
        who = names[0] + (" et al." if len(names) > 2 else f" and {names[1]}" if len(names) == 2 else "")
        address = field.get("url") or ("https://doi.org/" + field["doi"] if "doi" in field else "")
        entries[key] = (f"{who} {field.get('year', '')}".strip(), field.get("title", ""), address)
    return entries


def citation(key: str, entries: dict) -> str:
    """A cited work as a link, or as its key where the bibliography does not hold it."""
    who, title, address = entries.get(key, (key, "", ""))
    text = html.escape(who)
    return f'<a href="{html.escape(address)}" title="{html.escape(title)}">{text}</a>' if address else text


def outside_code(text: str, change) -> str:
    """Apply a change to the parts of a markdown text that are neither code nor formulas."""
    pattern = r"(^```.*?^```[ \t]*$|`[^`\n]+`|\$\$.*?\$\$|(?<!\\)\$[^$\n]+\$)"
    pieces = re.split(pattern, text, flags=re.M | re.S)
    return "".join(piece if index % 2 else change(piece) for index, piece in enumerate(pieces))


def plain_markdown(text: str, titles: dict, entries: dict) -> str:
    """Citations and references to sections and tables become links, their labels anchors; notebooks become pages."""
    def change(piece: str) -> str:
        piece = re.sub(r"^(#+ .+?) *\{[^}\n]*#(sec-[\w-]+)[^}\n]*\}[ \t]*$", r'<a id="\2"></a>\n\n\1', piece, flags=re.M)
        piece = re.sub(r"\{[^}\n]*#((?:tbl|fig)-[\w-]+)[^}\n]*\}", r'<a id="\1"></a>', piece)
        piece = re.sub(r"\[?-?@((?:sec|tbl)-[\w-]*\w)\]?",
                       lambda found: f'<a href="#{found[1]}">{titles.get(found[1], "the table")}</a>', piece)
        piece = re.sub(r"\[(?=[^\]\n]*@(?!fig-|eq-))([^\]\n]+)\](?!\()", r"(\1)", piece)
        piece = re.sub(r"(?<![\w@./])-?@(?!fig-|eq-)([A-Za-z_][\w:-]*\w)", lambda found: citation(found[1], entries), piece)
        return re.sub(r"(\]\([^)#\s]*)\.(?:ipynb|qmd)(#[^)\s]*)?\)", r"\1.html\2)", piece)
    return outside_code(text, change)


def section_titles(notebook: nbformat.NotebookNode) -> dict:
    """The heading behind each section label."""
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    return dict((label, f"“{title}”") for title, label in
                re.findall(r"^#+ (.+?) *\{[^}\n]*#(sec-[\w-]+)[^}\n]*\}", text, flags=re.M))


def own_anchor(found: re.Match) -> str:
    """A heading with the anchor that Quarto would give it, so that links work on both kinds of page."""
    inner = re.sub(r'<a class="anchor-link".*?</a>', "", found[2], flags=re.S)
    slug = pandoc_slug(html.unescape(re.sub(r"<[^>]+>", "", inner)))
    return f'<{found[1]} id="{slug}">{inner}</{found[1]}>'


def page_html(path: Path, title: str, home: str, entries: dict) -> str:
    """One notebook as a page of the report's kind, with citations, sections and links resolved."""
    notebook = nbformat.read(path, as_version=4)
    titles = section_titles(notebook)
    notebook.cells = [cell for cell in notebook.cells if not re.fullmatch(r"\s*#\|\s*default_exp\b.*\s*", cell.source)]
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = plain_markdown(cell.source, titles, entries)
        elif cell.cell_type == "code":
            for output in cell.outputs:
                if "image/png" in output.get("data", {}):
                    output.metadata["alt"] = " ".join(directive_values(cell.source, "fig-cap"))
            cell.source = re.sub(r"^(#\|\s*(?:fig|tbl)-cap:)(.*)$",
                                 lambda found: found[1] + plain_markdown(found[2], titles, entries), cell.source, flags=re.M)
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / path.name
        nbformat.write(notebook, plain)
        page = notebook_page(plain, title, back=home)
    page = page.replace("&larr; report", "&larr; all notebooks")
    return re.sub(r'<(h[1-6]) id="[^"]*">(.*?)</\1>', own_anchor, page, flags=re.S)


def reading_order(root: Path) -> list:
    """(section, notebook path) pairs in the order of the sidebar."""
    order = []
    for item in quarto_settings(root)["website"]["sidebar"]["contents"]:
        order += [(item["section"], root / name) for name in item.get("contents", [])]
    return [(section, path) for section, path in order if path.suffix == ".ipynb" and path.exists()]


def build(root: Path, target: Path) -> list:
    """Write every page and the index, after clearing an earlier build; the written notebook pages are returned."""
    entries, order = bibliography(root), reading_order(root)
    shutil.rmtree(target / "nbs", ignore_errors=True)
    titles = [re.search(r"^# (.+)", read(path)["cells"][0]["source"], flags=re.M)[1] for _, path in order]
    pages = [target / path.relative_to(root).with_suffix(".html") for _, path in order]
    for index, (_, path) in enumerate(order):
        page = pages[index]
        page.parent.mkdir(parents=True, exist_ok=True)
        steps = [f'{word}: <a href="{relative(pages[other], page)}">{html.escape(titles[other])}</a>'
                 for word, other in (("Before", index - 1), ("Next", index + 1)) if 0 <= other < len(order)]
        text = page_html(path, titles[index], relative(target / "index.html", page), entries)
        page.write_text(text.replace("</main>", f"<p>{' · '.join(steps)}</p>\n</main>"), encoding="utf-8")
    target.mkdir(parents=True, exist_ok=True)
    (target / "index.html").write_text(index_html(order, pages, titles, target), encoding="utf-8")
    return pages


def relative(target: Path, page: Path) -> str:
    """The address of a page as seen from another page of the site."""
    return Path(os.path.relpath(target, page.parent)).as_posix()


def index_html(order: list, pages: list, titles: list, target: Path) -> str:
    """The list of all notebooks in reading order."""
    parts, section = [], None
    for (part, _), page, title in zip(order, pages, titles):
        if part != section:
            parts += ["</ol>" if section else "", f"<h2>{html.escape(part)}</h2>", "<ol>"]
            section = part
        parts.append(f'<li><a href="{page.relative_to(target).as_posix()}">{html.escape(title)}</a></li>')
    return (f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>privfl</title>\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{STYLE}</style></head>\n'
            "<body><h1>privfl</h1>\n<p>Privacy in federated and wireless learning, in notebooks. These are plain pages, "
            "built without Quarto; they need no network.</p>\n" + "\n".join(parts) + ("</ol>" if section else "") + "\n</body></html>\n")


if __name__ == "__main__":
    written = build(ROOT, Path(sys.argv[1] if len(sys.argv) > 1 else "_docs").resolve())
    print(f"{len(written)} plain pages written.")
