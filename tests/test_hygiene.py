"""The tree obeys the house rules, and each rule is shown to find its planted fault."""
import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import hygiene_rules as rules
import pytest
from hygiene_rules import CHECKS
from notebook_tools import ROOT, notebook_paths, show
from planting import code, markdown, plant, plant_file

EXPORT = "#| default_exp thing\n"
THING = "#| export\ndef thing(size: int) -> int:\n    \"\"\"Give size back.\"\"\"\n    return size"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_this_tree(check):
    problems = check(ROOT)
    assert not problems, show(problems)


@pytest.mark.parametrize("path", sorted((ROOT / "privfl").rglob("*.py")), ids=lambda path: path.stem)
def test_trap_02_every_exported_definition_is_importable(path):
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    loaded = importlib.import_module(module)
    missing = [name for name in getattr(loaded, "__all__", []) if not hasattr(loaded, name)]
    assert not missing


@pytest.mark.slow
def test_export_and_cleaning_are_in_step_with_the_notebooks(tmp_path):
    """What `make export` would write is what is there, byte for byte; run on a copy of the tree."""
    for name in ("nbs", "privfl"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    for name in ("settings.ini", "setup.py", "README.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    environment = {"PYTHONPATH": str(tmp_path)}
    for code_line in ("from nbdev.doclinks import nbdev_export; nbdev_export(path='nbs')",
                      "from nbdev.clean import nbdev_clean; nbdev_clean(fname='nbs')"):
        run_python(code_line, tmp_path, environment)
    changed = []
    for folder, pattern in (("privfl", "*.py"), ("nbs", "*.ipynb")):
        there = {path.relative_to(ROOT) for path in (ROOT / folder).rglob(pattern) if ".ipynb_checkpoints" not in path.parts}
        written = {path.relative_to(tmp_path) for path in (tmp_path / folder).rglob(pattern)}
        changed += [name for name in sorted(there | written)
                    if name not in there or (ROOT / name).read_bytes() != (tmp_path / name).read_bytes()]
    assert not changed, f"run `make export`, these differ: {', '.join(map(str, changed))}"


def run_python(line: str, folder: Path, environment: dict) -> None:
    """Run one line of Python in a folder, in a process of its own."""
    import os
    done = subprocess.run([sys.executable, "-c", line], cwd=folder, env=os.environ | environment,
                          capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr


def test_every_notebook_is_where_it_can_be_found():
    assert notebook_paths(ROOT, "teaching") and set(notebook_paths(ROOT)) == {
        path for kind in ("teaching", "experiment", "benchmark") for path in notebook_paths(ROOT, kind)}


# ---- each rule finds its fault, and is silent without it --------------------------------------------------------

@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small tree in which every rule holds."""
    plant(tmp_path, "nbs/00_core/01_thing.ipynb", code(EXPORT), code(THING), code("assert thing(2) == 2"))
    plant(tmp_path, "nbs/experiments/thing.ipynb", code("seed: int = 0  # help", tags=["parameters"]))
    plant_file(tmp_path, "privfl/update.py", THING.removeprefix("#| export\n"))
    plant_file(tmp_path, "privfl/thing.py", THING.removeprefix("#| export\n"))
    plant_file(tmp_path, "privfl/__init__.py", "__version__ = '0'\n")
    shutil.copy(ROOT / "settings.ini", tmp_path)
    return tmp_path


@pytest.mark.parametrize("check", [check for check in CHECKS if check is not rules.check_layers],
                         ids=lambda check: check.__name__)
def test_a_good_tree_has_no_problem(tree, check):
    assert not check(tree), show(check(tree))


def assert_found(problems: list, *words: str) -> None:
    """Some problem holds all the words."""
    assert any(all(word in str(problem) for word in words) for problem in problems), show(problems)


def test_trap_01_a_cleaned_parameters_tag_is_found(tree):
    plant(tree, "nbs/experiments/thing.ipynb", code("seed: int = 0  # help"))
    assert_found(rules.check_experiments(tree), "experiments/thing", "0 cells tagged")
    two = [code("seed = 0", tags=["parameters"]), code("more = 0", tags=["parameters"])]
    plant(tree, "nbs/experiments/thing.ipynb", *two)
    assert_found(rules.check_experiments(tree), "2 cells tagged")
    plant(tree, "nbs/00_core/01_thing.ipynb", two[0])
    assert_found(rules.check_experiments(tree), "00_core/01_thing", "needs 0")


def test_trap_01_a_missing_kernel_is_found(tree):
    plant(tree, "nbs/experiments/thing.ipynb", code("seed = 0", tags=["parameters"]), kernel=None)
    assert_found(rules.check_experiments(tree), "kernelspec")


def test_trap_02_two_notebooks_with_one_target_are_found(tree):
    plant(tree, "nbs/00_core/02_other.ipynb", code(EXPORT), code(THING.replace("thing(", "other(")))
    assert_found(rules.check_default_exp(tree), "02_other", "taken by nbs/00_core/01_thing.ipynb")
    assert_found(rules.check_exports_exist(tree), "02_other", "other is missing in privfl/thing.py")


def test_trap_02_exporting_without_a_target_is_found(tree):
    plant(tree, "nbs/00_core/02_other.ipynb", code(THING))
    assert_found(rules.check_default_exp(tree), "names no module")


@pytest.mark.parametrize("line", ["#| exprot", "#|exprot", "# | exprot", "#| eval : false"])
def test_trap_03_a_misspelt_directive_is_found(tree, line):
    plant(tree, "nbs/00_core/02_other.ipynb", code(f"{line}\nx_value = 1"))
    assert_found(rules.check_directives(tree), "02_other", "misspelt")


def test_trap_18_skipped_cells_are_counted(tree):
    assert not rules.skipped_cells(tree)
    plant(tree, "nbs/00_core/02_other.ipynb", code("#| eval: false\n1 / 0"), code("#| slow\n1"), code("#| eval: true\n1"))
    assert [problem.message for problem in rules.skipped_cells(tree)] == ["code cell 1: eval: false", "code cell 2: slow "]


def test_trap_18_no_teaching_notebook_skips_a_cell():
    """Nothing is skipped today; a cell that has to be gets an entry here, with its reason."""
    assert not rules.skipped_cells(ROOT), show(rules.skipped_cells(ROOT))


def test_long_cells_are_found(tree):
    plant(tree, "nbs/00_core/02_other.ipynb", code("\n".join(["1"] * 40)), code("\n".join(["1"] * 41)))
    problems = rules.check_cells(tree)
    assert_found(problems, "code cell 2 has 41 lines")
    assert len(problems) == 1


def test_cells_that_do_not_parse_or_work_beside_imports_are_found(tree):
    plant(tree, "nbs/00_core/02_other.ipynb", code("def :"), code("%matplotlib inline\nimport os\nos.umask"),
          code("import os\nfor name in os.listdir():\n    print(name)"))
    problems = rules.check_cells(tree)
    assert_found(problems, "code cell 1 does not parse")
    assert_found(problems, "code cell 3 mixes imports")
    assert len(problems) == 2


def test_missing_lessons_are_found(tree):
    plant(tree, "nbs/00_core/02_other.ipynb", code(THING), code("thing(1)"), code("thing(2)"), code("thing(3)"),
          code("assert thing(3)"))
    assert_found(rules.check_lessons(tree), "02_other", "0 of 1")


def test_star_imports_are_found(tree):
    plant(tree, "nbs/00_core/02_other.ipynb", code("from math import *"))
    plant_file(tree, "privfl/data.py", "from os import *\n")
    problems = rules.check_star_imports(tree)
    assert_found(problems, "02_other", "math")
    assert_found(problems, "privfl/data.py", "os")


def test_a_package_without_a_face_is_found(tree):
    plant_file(tree, "privfl/charting/metrics.py", "")
    assert_found(rules.check_faces(tree), "privfl/charting", "__init__.py")


@pytest.mark.parametrize("name, line", [
    ("update", "from privfl.metrics import ssim"),
    ("mechanisms", "import privfl.accounting"),
    ("metrics", "from privfl import federation"),
    ("randomness", "from .federation import run"),
    ("selection/masks", "from privfl.charting.metrics import trustworthiness"),
    ("selection/masks", "from ..charting import trustworthiness"),
    ("inversion", "from privfl.selection.models import LeNet"),
    ("claims", "def judge():\n    from privfl.runner import run"),
    ("helpers", "import os"),
])
def test_imports_that_point_up_are_found(tree, name, line):
    plant_file(tree, f"privfl/{name}.py", line + "\n")
    assert_found(rules.check_layers(tree), f"privfl/{name}.py")


@pytest.mark.parametrize("name, line", [
    ("cli", "from privfl.runner import run\nfrom privfl import __version__"),
    ("selection/masks", "from privfl.selection.models import LeNet\nfrom .models import LeNet"),
    ("selection/__init__", "from .masks import random_mask\nfrom privfl.selection.masks import random_mask"),
    ("inversion", "from privfl.federation import run\nfrom . import update"),
])
def test_imports_that_point_down_are_fine(tree, name, line):
    (tree / "privfl/thing.py").unlink()
    plant_file(tree, f"privfl/{name}.py", line + "\n")
    assert not rules.check_layers(tree), show(rules.check_layers(tree))


@pytest.mark.parametrize("line", ["from fastcore.basics import patch", "import nbdev", "import pytest",
                                  "def f():\n    import opacus", "import flwr"])
def test_undeclared_dependencies_are_found(tree, line):
    plant_file(tree, "privfl/data.py", line + "\n")
    assert_found(rules.check_dependencies(tree), "privfl/data.py", "does not require")


def test_declared_and_lazy_optional_dependencies_are_fine(tree):
    plant_file(tree, "privfl/data.py", "import json\nimport skimage.data\nfrom sklearn import datasets\n"
                                       "def f():\n    import flwr\n")
    assert not rules.check_dependencies(tree)


@pytest.mark.parametrize("line", [
    "torch.load(path)", "torch.load(path, weights_only=False)", "np.load(path, allow_pickle=True)",
    "pd.read_pickle(path)", "import pickle\npickle.load(file)", "from pickle import loads", "import joblib"])
def test_unsafe_loading_is_found(tree, line):
    plant_file(tree, "privfl/data.py", line + "\n")
    assert_found(rules.check_unsafe_loading(tree), "privfl/data.py")
    plant(tree, "nbs/00_core/02_other.ipynb", code(line))
    assert_found(rules.check_unsafe_loading(tree), "02_other")


def test_safe_loading_is_fine(tree):
    plant_file(tree, "privfl/data.py", "import pickle\ntry:\n    torch.load(path, weights_only=True)\n"
                                       "except pickle.UnpicklingError:\n    pass\nnp.load(path, allow_pickle=False)\n")
    assert not rules.check_unsafe_loading(tree)


@pytest.mark.parametrize("line", [
    "torch.manual_seed(0)", "torch.cuda.manual_seed_all(0)", "np.random.seed(0)", "np.random.rand(3)",
    "numpy.random.shuffle(x)", "random.random()", "random.seed(1)", "torch.randn(3)", "torch.rand(3, device=device)",
    "torch.randperm(4)", "x.normal_()", "torch.empty(3).uniform_(0, 1)", "torch.bernoulli(p)"])
def test_global_random_state_is_found(tree, line):
    plant_file(tree, "privfl/data.py", line + "\n")
    assert_found(rules.check_global_random(tree), "privfl/data.py")


def test_own_generators_are_fine(tree):
    plant_file(tree, "privfl/data.py", "torch.randn(3, generator=g)\nnp.random.default_rng(0).random()\n"
               "x.normal_(generator=g)\ng.random()\nwith torch.random.fork_rng():\n    torch.manual_seed(0)\n")
    assert not rules.check_global_random(tree), show(rules.check_global_random(tree))


def test_missing_docstrings_and_type_hints_are_found(tree):
    plant_file(tree, "privfl/data.py", "def load(name):\n    return name\n\ndef _private(x):\n    return x\n")
    problems = rules.check_docstrings(tree)
    assert_found(problems, "load has none")
    assert_found(problems, "type hints", "load: name")
    assert len(problems) == 2


def test_large_files_are_found(tree):
    (tree / "privfl" / "assets").mkdir()
    (tree / "privfl" / "assets" / "big.npz").write_bytes(bytes(1_000_001))
    assert_found(rules.check_file_sizes(tree), "big.npz", "1,000,001")


@pytest.mark.parametrize("pieces", [("/wo", "rk/data"), ("/ro", "ot/x"), ("/tm", "p/xyz"), ("/home/", "me/x"),
                                    ("https://py", "pi.org/simple")])
def test_forbidden_words_are_found(tree, pieces):
    plant_file(tree, "privfl/data.py", f"# {''.join(pieces)}\n")
    assert_found(rules.check_forbidden_words(tree), "privfl/data.py")
    plant_file(tree, "privfl/data.py", "# ../shared/data, a/root/x, https://example.org/work/x\n")
    assert not rules.check_forbidden_words(tree), show(rules.check_forbidden_words(tree))


def test_comments_and_code_in_prose_are_not_read_as_text():
    from notebook_tools import strip_code
    assert strip_code("a `@fig-x` b\n```\n@fig-y\n```\n<!-- @fig-z -->c") .replace("\n", "") == "a  b" + "c"
    assert markdown("x")["source"] == "x"
