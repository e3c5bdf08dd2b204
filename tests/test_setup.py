"""Set-up, continuous integration and the package's own description: quick the second time, clear when something lacks."""
import os
import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path

import privfl
import pytest
import yaml
from notebook_tools import ROOT
from planting import script
from test_readme import clean_environment, make


def set_up(tmp_path: Path, first_on_path: Path = None, **more: str) -> subprocess.CompletedProcess:
    """Run the set-up script for a virtual environment in tmp_path."""
    environment = clean_environment(VENV=str(tmp_path / "venv"), **more)
    if first_on_path:
        environment["PATH"] = f"{first_on_path}{os.pathsep}{environment['PATH']}"
    return subprocess.run(["bash", str(ROOT / ".ci/set_up.sh")], env=environment, capture_output=True, text=True,
                          stdin=subprocess.DEVNULL)


def test_a_python_that_does_not_run_is_named_and_not_used(tmp_path):
    shim = script(tmp_path / "bin" / "python3.13", "echo 'no such version' >&2; exit 127")
    done = set_up(tmp_path, PYTHON=str(shim))
    assert done.returncode == 1 and "is there but does not run" in done.stderr and "3.11, 3.12 or 3.13" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_a_python_of_another_version_is_named(tmp_path):
    old = script(tmp_path / "bin" / "oldpython", 'case "$*" in *venv,*) exit 1;; *) echo version 3.9.1;; esac')
    done = set_up(tmp_path, PYTHON=str(old))
    assert done.returncode == 1 and "version 3.9.1" in done.stderr and "make PYTHON=" in done.stderr


def test_a_full_disk_is_told_before_anything_is_made(tmp_path):
    script(tmp_path / "bin" / "df", "echo 'Filesystem 1024-blocks Used Available'; echo 'disk 9 9 3500000 9% /'")
    done = set_up(tmp_path, tmp_path / "bin")
    assert done.returncode == 1 and "about 8 GB" in done.stderr and "3 GB are free" in done.stderr
    assert "TORCH=cpu" in done.stderr and not (tmp_path / "venv").exists()


@pytest.mark.slow
def test_a_small_disk_is_enough_without_cuda_and_the_environment_is_kept(tmp_path):
    script(tmp_path / "bin" / "df", "echo 'Filesystem 1024-blocks Used Available'; echo 'disk 9 9 3500000 9% /'")
    for _ in range(2):
        done = set_up(tmp_path, tmp_path / "bin", TORCH="cpu")
        assert done.returncode == 0, done.stderr
        (tmp_path / "venv" / "kept").touch()
    assert (tmp_path / "venv" / "kept").exists() and "Making" not in done.stdout


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path):
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "diary.txt").touch()
    done = set_up(tmp_path)
    assert done.returncode == 1 and "left as it is" in done.stderr and (tmp_path / "venv" / "diary.txt").exists()


def test_an_installation_that_fails_says_what_to_check(tmp_path):
    """What a dead network or a full disk looks like: pip ends with an error."""
    script(tmp_path / "venv/bin/python", '[ "$3" != install ] || { echo "pip: no route to host" >&2; exit 1; }')
    (tmp_path / "venv/pyvenv.cfg").touch()
    done = make("install", f"VENV={tmp_path / 'venv'}")
    assert done.returncode != 0 and "network or a full disk" in done.stdout and "no route to host" in done.stderr
    assert not (tmp_path / "venv/.installed").exists()


def test_set_up_runs_once_and_again_when_the_requirements_change(tmp_path):
    stamp = tmp_path / ".installed"
    stamp.touch()
    assert make("-q", "install", f"VENV={tmp_path}").returncode == 0
    os.utime(stamp, (0, 0))
    assert make("-q", "install", f"VENV={tmp_path}").returncode == 1


def test_torch_without_cuda_comes_from_its_standard_index(tmp_path):
    plain, cpu = (make("-n", "install", f"VENV={tmp_path}", f"TORCH={torch}").stdout for torch in ("default", "cpu"))
    assert "whl/cpu" in cpu and "whl/cpu" not in plain
    assert [text.count("pip install") for text in (plain, cpu)] == [1, 2] == [text.count("-c constraints.txt") for text in (plain, cpu)]
    assert "run the same command without TORCH=cpu" in cpu  # where that index cannot be reached


def test_help_is_the_default_and_names_every_target():
    done = make()
    for target in ("reproduce", "test", "test-full", "lab", "site", "clean", "SCALE", "TORCH"):
        assert target in done.stdout


def test_clean_keeps_the_environment_and_the_data(tmp_path):
    done = make("-n", "clean")
    assert ".venv" not in done.stdout and ".data" not in done.stdout and "_reports" in done.stdout


@pytest.mark.parametrize("with_data", [True, False])
def test_continuous_integration_uses_the_shared_data_where_it_lies(tmp_path, with_data):
    shutil.copytree(ROOT / ".ci", tmp_path / "project/.ci")
    script(tmp_path / "bin/make", 'echo "make $* in $PWD with ${PRIVFL_DATA:-nothing}"')
    if with_data:
        (tmp_path / "shared/data").mkdir(parents=True)
    environment = clean_environment(PATH=f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    environment.pop("PRIVFL_DATA", None)
    done = subprocess.run(["bash", str(tmp_path / "project/.ci/run")], cwd="/", env=environment, capture_output=True,
                          text=True, stdin=subprocess.DEVNULL)
    data = (tmp_path / "shared/data").resolve() if with_data else "nothing"
    assert done.stdout.strip() == f"make test in {(tmp_path / 'project').resolve()} with {data}"


# ---- what the package says about itself -------------------------------------------------------------------------

def settings() -> dict:
    """settings.ini."""
    parser = ConfigParser(delimiters=["="])
    parser.read(ROOT / "settings.ini", encoding="utf-8")
    return parser["DEFAULT"]


def test_version_author_and_licence_agree_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert privfl.__version__ == settings()["version"] == citation["version"]
    assert settings()["author"] == citation["authors"][0]["name"] == "privfl contributors"
    assert citation["license"] == "Apache-2.0" and "Apache License" in (ROOT / "LICENSE").read_text()


def test_every_requirement_has_a_tested_version():
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    required = settings()["requirements"].split() + settings()["dev_requirements"].split()
    names = {"".join(letter for letter in item.replace("<", " ").replace(">", " ").replace("=", " ").split()[0])
             for item in required}
    assert names <= pinned, names - pinned


def test_the_tree_has_what_the_design_names():
    for name in ("README.md", "LICENSE", "NOTICE", "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff", "Makefile",
                 "settings.ini", "setup.py", "constraints.txt", "_quarto.yml", "index.qmd", "references.bib",
                 "custom.scss", "results", "privfl/py.typed", "privfl/assets", "nbs/00_core", "nbs/experiments",
                 ".github/workflows/test.yml", ".github/workflows/docs.yml", ".ci/run"):
        assert (ROOT / name).exists(), name
    assert os.access(ROOT / ".ci/run", os.X_OK)
