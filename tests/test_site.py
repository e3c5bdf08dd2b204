"""The gate of the site holds on this tree, and each check is shown to find its planted fault."""
import os
import re
import shutil
from pathlib import Path

import pytest
import site_gate as gate
import yaml
from notebook_tools import ROOT, Problem, show
from planting import code, markdown, picture, plant, plant_file, script, text_output
from site_gate import CHECKS
from site_pages import build
from test_readme import make

SETTINGS = """
project: {type: website, output-dir: _docs}
execute: {enabled: false}
bibliography: references.bib
website:
  title: small
  sidebar:
    contents:
      - section: Core
        contents: [nbs/00_core/01_thing.ipynb, nbs/00_core/02_other.ipynb]
format: {html: {theme: {light: [cosmo, custom.scss], dark: darkly}}}
"""
FIGURE = "#| label: fig-curve\n#| fig-cap: A curve, after @known2020.\nplt.plot([1, 2])"
PROSE = "See @fig-curve and @eq-mean, [@known2020, p. 3], me@example.org and `@fig-code`.\n\n$$m = x$$ {#eq-mean}"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small site in which every check holds."""
    plant(tmp_path, "nbs/00_core/01_thing.ipynb", markdown(PROSE), code(FIGURE, [picture()]),
          markdown("## What was exported\n\nNext: [other](02_other.ipynb#the-second-part)."))
    plant(tmp_path, "nbs/00_core/02_other.ipynb", markdown("## The *second* part!\n\n[back](01_thing.ipynb#eq-mean)"),
          code("print(1)", [text_output("1\n")]))
    plant_file(tmp_path, "references.bib", "@misc{known2020,\n title={Known}\n}\n")
    plant_file(tmp_path, "_quarto.yml", SETTINGS)
    plant_file(tmp_path, "custom.scss", "")
    plant_file(tmp_path, "index.qmd", "---\ntitle: small\n---\n\nStart with [thing](nbs/00_core/01_thing.ipynb).\n")
    plant_file(tmp_path, "README.md", "# Small\n\n## 2. Use it now\n\n[here](#2-use-it-now) [licence](custom.scss)\n")
    return tmp_path


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_this_tree(check):
    problems = check(ROOT)
    assert not problems, show(problems)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_good_site_has_no_problem(tree, check):
    assert not check(tree), show(check(tree))


def add(tree: Path, *cells: dict) -> None:
    """Replace the second notebook by these cells, keeping the heading that the first one links to."""
    plant(tree, "nbs/00_core/02_other.ipynb", markdown("## The second part"), *cells)


def assert_found(problems: list, *words: str) -> None:
    """Some problem holds all the words."""
    assert any(all(word in str(problem) for word in words) for problem in problems), show(problems)


@pytest.mark.parametrize("label", ["fig-none", "eq-none", "tbl-none", "sec-none"])
def test_a_reference_without_label_is_found(tree, label):
    add(tree, markdown(f"As [-@{label}] and @{label}. show."))
    assert_found(gate.check_references(tree), "02_other", f"@{label} has no label")


def test_a_reference_in_a_caption_is_read(tree):
    add(tree, markdown("@fig-curve"), code(FIGURE.replace("@known2020", "@eq-gone"), [picture()]))
    assert_found(gate.check_references(tree), "@eq-gone")


def test_a_label_of_another_page_does_not_count(tree):
    add(tree, markdown("As @eq-mean says."))
    assert_found(gate.check_references(tree), "02_other", "@eq-mean")


def test_a_double_label_is_found(tree):
    add(tree, markdown("$$a$$ {#eq-a}\n\n$$b$$ {#eq-a}"))
    assert_found(gate.check_references(tree), "eq-a is defined twice")


@pytest.mark.parametrize("cells, words", [
    ([code("plt.plot([1])", [picture()])], ["a picture without"]),
    ([markdown("@fig-a"), code("#| label: fig-a\nplt.plot([1])", [picture()])], ["no fig-cap"]),
    ([markdown("@fig-a"), code("#| label: fig-a\n#| fig-cap: A.\nplt.plot([1])")], ["stores 0 pictures"]),
    ([markdown("@fig-a"), code("#| label: fig-a\n#| fig-cap: A.\nf()", [picture(), picture()])], ["stores 2 pictures"]),
    ([code("#| label: fig-a\n#| fig-cap: A.\nplt.plot([1])", [picture()])], ["never refers to @fig-a"]),
])
def test_faulty_figures_are_found(tree, cells, words):
    add(tree, *cells)
    assert_found(gate.check_figures(tree), "02_other", *words)


@pytest.mark.parametrize("text", ["@unknown2021 says", "[see @unknown2021, p. 2; @known2020]", "[-@unknown2021].",
                                  "[@known2020; @unknown2021]"])
def test_an_unknown_citation_is_found(tree, text):
    add(tree, markdown(text))
    problems = gate.check_citations(tree)
    assert_found(problems, "02_other", "@unknown2021")
    assert len(problems) == 1


def test_a_double_entry_of_the_bibliography_is_found(tree):
    plant_file(tree, "references.bib", "@misc{known2020,\n}\n@book{known2020,\n}\n")
    assert_found(gate.check_citations(tree), "known2020 stands there twice")


@pytest.mark.parametrize("text, word", [("$$a", "a $$ is not closed"), ("::: {.note}\nhi", "a ::: block"),
                                        ("$a$ {#eq-a}", "must follow")])
def test_faulty_markup_is_found(tree, text, word):
    add(tree, markdown(text))
    assert_found(gate.check_markup(tree), "02_other", word)


@pytest.mark.parametrize("target, word", [
    ("03_none.ipynb", "leads to nothing"), ("01_thing.html", "leads to nothing"),
    ("01_thing.ipynb#no-such-heading", "no such anchor"), ("#nowhere", "no such anchor"),
    ("../../README.md", "not on the site")])
def test_dead_links_are_found(tree, target, word):
    add(tree, markdown(f"[text]({target})"))
    assert_found(gate.check_links(tree), "02_other", word)


def test_dead_links_of_the_readme_are_found(tree):
    plant_file(tree, "README.md", "# Small\n\n## 2. Use it now\n\n[a](#use-it-now) [b](gone.md)\n<a href=\"gone.html\">c</a>\n")
    problems = gate.check_links(tree)
    assert len(problems) == 3
    assert_found(problems, "#use-it-now")


@pytest.mark.parametrize("text", ["[text](https://example.org/x#y)", "[text](mailto:a@example.org)",
                                  "[text](01_thing.ipynb#what-was-exported)", "`[text](gone.ipynb)`",
                                  "[home](../../index.qmd)", "[text](#the-second-part)"])
def test_good_links_are_fine(tree, text):
    add(tree, markdown(text))
    assert not gate.check_links(tree), show(gate.check_links(tree))


ERROR = {"output_type": "error", "ename": "ValueError", "evalue": "no", "traceback": ["ValueError: no"]}
WIDGET = {"output_type": "display_data", "metadata": {}, "data": {"application/vnd.jupyter.widget-view+json": {}}}


@pytest.mark.parametrize("cell, word", [
    (code("print(1)"), "stores nothing"),
    (code("value = 1\nvalue"), "stores nothing"),
    (code("f'{value}'"), "stores nothing"),
    (code("raise ValueError('no')", [ERROR]), "stores an error"),
    (code("run()", [WIDGET]), "stores a widget"),
    (code("run()", [text_output(" 40%|####      | 4/10 [00:01<00:02, 3.10it/s]")]), "progress bar"),
    (code("run()", [text_output("step 1\rstep 2")]), "progress bar"),
    (code("run()", [text_output("read /ho" + "me/me/data.npz")]), "machine path"),
    (code("run()", [text_output("/us" + "r/lib/python3/x.py:3: UserWarning: old")]), "machine path"),
])
def test_faulty_outputs_are_found(tree, cell, word):
    add(tree, cell)
    assert_found(gate.check_outputs(tree), "02_other", word)


@pytest.mark.parametrize("cell", [code("value = 1"), code("plot()"), code("value;"), code("def f():\n    print(1)"),
                                  code("print(1)", [text_output("a/root/x 3/4, https://x.org/tmp/a\r\n")])])
def test_good_outputs_are_fine(tree, cell):
    add(tree, cell)
    assert not gate.check_outputs(tree), show(gate.check_outputs(tree))


def test_large_pictures_and_notebooks_are_found(tree):
    add(tree, code("plot()", [picture(100_001)]))
    assert_found(gate.check_sizes(tree), "a picture of 100,001 bytes")
    add(tree, code("print('x')", [text_output("x" * 1_000_001)]))
    assert_found(gate.check_sizes(tree), "02_other", "1,000,000 at most")


@pytest.mark.parametrize("title, word", [
    ("", "does not start with"), ("## Small\n\n> Claim.", "does not start with"), ("# Title\n\nText.", "claim"),
    ("# Title\n\n> Claim.\n\n# Again", "more than one H1")])
def test_faulty_titles_are_found(tree, title, word):
    plant(tree, "nbs/00_core/02_other.ipynb", title=title)
    assert_found(gate.check_titles(tree), "02_other", word)


def test_a_hash_in_code_is_no_second_title(tree):
    plant(tree, "nbs/00_core/02_other.ipynb", markdown("```sh\n# a comment\n```"))
    assert not gate.check_titles(tree)


def test_two_pages_of_one_name_are_found(tree):
    plant(tree, "nbs/00_core/03_other.ipynb")
    assert_found(gate.check_titles(tree), "03_other", "page name of nbs/00_core/02_other.ipynb")


@pytest.mark.parametrize("old, new, word", [
    ("bibliography:", "bibliografy:", "bibliografy is not a key"),
    ("title: small", "titel: small", "website.titel"),
    ("enabled: false", "enabled: true", "execute.enabled must be false"),
    (", nbs/00_core/02_other.ipynb", "", "02_other.ipynb is not listed"),
    ("02_other", "07_gone", "07_gone.ipynb does not exist"),
    ("01_thing.ipynb, nbs/00_core/02_other", "02_other.ipynb, nbs/00_core/01_thing", "not in reading order"),
    ("custom.scss", "missing.scss", "missing.scss does not exist"),
    ("section: Core", "sektion: Core", "sektion is not a key"),
])
def test_faulty_settings_are_found(tree, old, new, word):
    plant_file(tree, "_quarto.yml", SETTINGS.replace(old, new))
    assert_found(gate.check_quarto_settings(tree), word)


def test_the_settings_have_what_the_site_promises():
    settings = gate.quarto_settings(ROOT)
    html = settings["format"]["html"]
    assert set(html["theme"]) == {"light", "dark"} and html["code-fold"] == "show"
    assert settings["website"]["search"] is True and settings["project"]["output-dir"] == "_docs"
    assert settings["project"]["render"] == ["index.qmd", "nbs/**/*.ipynb"] and "code-links" not in html


def test_the_published_build_pins_quarto_and_fails_on_warnings():
    workflow = yaml.safe_load((ROOT / ".github/workflows/docs.yml").read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    setup = next(step for step in steps if "quarto-actions/setup" in step.get("uses", ""))
    assert re.fullmatch(r"1\.10\.\d+", str(setup["with"]["version"]))
    assert any("make site" in step.get("run", "") for step in steps)


@pytest.mark.parametrize("printed, passes", [
    ("Output created: _docs/index.html", True),
    ("WARNING (crossref.lua): Unable to resolve crossref @fig-x", False),
    ("[WARNING] Citeproc: citation smith2020 not found", False),
    ("WARN: Unable to resolve link target: nbs/gone.ipynb", False)])
def test_make_site_fails_on_what_quarto_only_warns_of(tmp_path, printed, passes):
    script(tmp_path / "quarto", f"echo '{printed}'")
    script(tmp_path / "venv/bin/python", "exit 0")  # the gate, which has tests of its own
    done = make("-o", f"{tmp_path}/venv/.installed", f"VENV={tmp_path}/venv", f"SITE_LOG={tmp_path}/site.log", "site",
                PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert (done.returncode == 0) == passes, done.stdout + done.stderr
    assert ("unresolved references or missing citations" in done.stdout) != passes


def test_the_tests_run_on_every_python_we_promise():
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert job["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]


def test_the_plain_pages_replace_references_citations_and_links(tree):
    pages = build(tree, tree / "_docs")
    assert [page.name for page in pages] == ["01_thing.html", "02_other.html"]
    first = pages[0].read_text(encoding="utf-8")
    assert 'href="#fig-curve">Figure 1</a>' in first and 'id="fig-curve"' in first and "A curve, after" in first
    assert 'href="#eq-mean">Equation 1</a>' in first and 'id="eq-mean"' in first
    assert 'href="02_other.html#the-second-part"' in first and "data:image/png;base64," in first
    assert "@known2020" not in first and "@fig-code" in first and "#| label" not in first
    assert 'id="the-second-part"' in pages[1].read_text(encoding="utf-8")
    index = (tree / "_docs" / "index.html").read_text(encoding="utf-8")
    assert index.index("01_thing.html") < index.index("02_other.html") and "Core" in index


@pytest.mark.full
def test_the_plain_pages_of_this_tree_hold_no_dead_link(tmp_path):
    pages = build(ROOT, tmp_path) + [tmp_path / "index.html"]
    assert len(pages) == len(gate.notebook_paths(ROOT)) + 1
    dead = []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        ids = set(re.findall(r'\bid="([^"]+)"', text))
        for target in re.findall(r'<(?:a|img)\b[^>]*\b(?:href|src)="([^"]+)"', text):
            file, _, anchor = target.partition("#")
            if re.match(r"[a-z]+:", target) or not file and anchor in ids:
                continue
            there = (page.parent / file).resolve()
            if not file or not there.exists() or anchor and f'id="{anchor}"' not in there.read_text(encoding="utf-8"):
                dead.append(Problem(page.name, "link", target))
    assert not dead, show(dead)


def test_building_replaces_an_earlier_build(tree):
    build(tree, tree / "_docs")
    plant_file(tree, "_docs/nbs/00_core/07_gone.html", "old")
    build(tree, tree / "_docs")
    assert not (tree / "_docs/nbs/00_core/07_gone.html").exists()
    shutil.rmtree(tree / "_docs")
