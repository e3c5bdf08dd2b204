"""Who follows the README alone gets there: its example runs, its commands exist, its links and lists are complete."""
import os
import re
import shlex
import subprocess
import sys

import pytest
from notebook_tools import ROOT, notebook_paths

README = (ROOT / "README.md").read_text(encoding="utf-8")
STAMP = f"{sys.prefix}/.installed"


def blocks(text: str, language: str) -> list:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.M | re.S)


def shell_lines(name: str) -> list:
    """Every line of a document's shell blocks."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return [line for block in blocks(text, "sh") for line in block.splitlines() if line.strip()]


DOCUMENTS = ("README.md", "CONTRIBUTING.md", "index.qmd")
MAKE_LINES = sorted({line for name in DOCUMENTS for line in shell_lines(name) if line.startswith("make")})
PRIVFL_LINES = sorted({line for name in DOCUMENTS for line in shell_lines(name) if ".venv/bin/privfl" in line})


def clean_environment(**more: str) -> dict:
    """The environment without what an outer make left in it."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "MFLAGS"} | more


def make(*arguments: str, **more: str) -> subprocess.CompletedProcess:
    """Run make in the project, without a terminal."""
    return subprocess.run(["make", *arguments], cwd=ROOT, env=clean_environment(**more), capture_output=True, text=True,
                          stdin=subprocess.DEVNULL)


@pytest.mark.slow
def test_the_example_prints_the_numbers_that_the_readme_shows(tmp_path):
    (example,), (promised,) = blocks(README, "python"), blocks(README, "text")
    script = tmp_path / "example.py"
    script.write_text(example)
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, env=clean_environment(), capture_output=True,
                          text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    number = r"\d+\.\d+"
    assert re.sub(number, "#", done.stdout).strip() == re.sub(number, "#", promised).strip()
    naive, aware = (float(value) for value in re.findall(number, done.stdout))
    assert aware > naive + 0.3
    for ours, shown in zip((naive, aware), re.findall(number, promised)):
        assert abs(ours - float(shown)) < 0.15, "the README shows other numbers than its example prints"


@pytest.mark.parametrize("line", MAKE_LINES)
def test_every_make_command_exists(line):
    done = make("-n", *shlex.split(line)[1:])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("line", PRIVFL_LINES)
def test_every_privfl_command_is_understood(line):
    from privfl.cli import build_parser
    build_parser().parse_args(shlex.split(line)[1:])


@pytest.mark.parametrize("command", ["make reproduce", "make test"])
def test_the_two_commands_are_in_the_readme(command):
    assert command in shell_lines("README.md")


def test_other_shell_lines_are_known():
    known = ("make", "git ", "cd privfl", ".venv/bin/privfl ")
    assert not [line for name in DOCUMENTS for line in shell_lines(name) if not line.startswith(known)]


def test_every_notebook_is_listed_in_reading_order():
    listed = re.search(r"<!-- notebooks:start -->(.*)<!-- notebooks:end -->", README, flags=re.S)[1]
    links = re.findall(r"\]\((nbs/[^)]+\.ipynb)\)", listed)
    paths = [path for kind in ("teaching", "experiment", "benchmark") for path in notebook_paths(ROOT, kind)]
    assert links == [str(path.relative_to(ROOT)) for path in paths]


@pytest.mark.parametrize("name", ["README.md", "index.qmd"])
@pytest.mark.parametrize("paper", ["radiomap", "charting", "semcom", "selection"])
def test_papers_still_to_come_are_marked_and_no_others(name, paper):
    row = re.search(rf"^\|.*`privfl\.{paper}`.*$", (ROOT / name).read_text(encoding="utf-8"), flags=re.M)[0]
    assert ("still to come" in row) != (ROOT / "nbs/experiments" / f"{paper}.ipynb").exists()


@pytest.mark.parametrize("name", ["README.md", "index.qmd"])
def test_the_ledger_has_its_place(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert text.count("<!-- ledger:start -->") == text.count("<!-- ledger:end -->") == 1
    assert text.index("<!-- ledger:start -->") < text.index("<!-- ledger:end -->")


@pytest.mark.slow
def test_reproduce_at_smoke_scale_builds_the_report(tmp_path):
    report = tmp_path / "_reports"
    done = make("-o", STAMP, f"VENV={sys.prefix}", "SCALE=smoke", "JOBS=1", f"REPORT={report}", "reproduce")
    assert done.returncode == 0, done.stdout + done.stderr
    page = (report / "index.html").read_text(encoding="utf-8")
    assert "<html" in page and "selection" in page
