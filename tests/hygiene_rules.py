"""The house rules as functions: each takes the root of a tree and returns the problems that it finds there."""
import ast
import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

from notebook_tools import (Problem, code_cells, directive_values, directives, is_exported, notebook_paths,
                            python_tree, read)

MAX_CELL_LINES = 40
MAX_FILE_BYTES = 1_000_000
LESSON_SHARE = 0.8
LARGE_FILES = {"privfl/assets/csi_munich_1200.npz"}  # ray-traced channels of 1,200 users: fewer blur the charts

DIRECTIVES = {
    "default_exp", "export", "exporti", "exports", "hide", "hide_input", "hide_output", "notest", "slow",
    "eval:", "echo:", "output:", "warning:", "include:", "label:", "fig-cap:", "fig-alt:", "fig-subcap:",
    "tbl-cap:", "code-fold:", "code-summary:", "column:", "layout-ncol:", "layout:", "fig-align:", "classes:",
}
SKIPPING = {"notest", "slow", "eval:"}

# Low to high. An import leads to an earlier entry only; the modules of one paper may import each other.
LAYERS = ["checks", "update", "randomness", "mechanisms", "metrics", "data", "accounting", "audit", "federation", "closed_forms", "inversion",
          "flower", "PAPERS", "claims", "runner", "report", "cli"]
PAPERS = {"radiomap", "charting", "semcom", "selection"}
NO_LAYER = {"", "_modidx"}

PACKAGE_NAMES = {"sklearn": "scikit-learn", "skimage": "scikit-image", "dp_accounting": "dp-accounting",
                 "absl": "dp-accounting", "PIL": "torchvision", "traitlets": "nbformat", "jupyter_client": "nbclient",
                 "yaml": "papermill", "IPython": "ipykernel", "psutil": "ipykernel",
                 "jinja2": "nbconvert", "pygments": "nbconvert"}
OPTIONAL = {"flwr", "ray", "sionna", "h5py"}  # extras: imported inside the function that needs them
UNSAFE_MODULES = {"dill", "cloudpickle", "marshal", "shelve", "joblib"}
PICKLE_ERRORS = {"UnpicklingError", "PicklingError", "PickleError"}

DRAWING = {"rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson", "rand_like",
           "randn_like", "randint_like"}
DRAWING_METHODS = {"normal_", "uniform_", "bernoulli_", "exponential_", "random_", "cauchy_", "log_normal_",
                   "geometric_"}
OWN_GENERATORS = {"default_rng", "Generator", "SeedSequence", "PCG64", "PCG64DXSM", "Philox", "SFC64", "MT19937",
                  "BitGenerator", "RandomState"}


def package_sources(root: Path) -> list:
    """(relative path, syntax tree) of each module of the package."""
    paths = sorted((root / "privfl").rglob("*.py"))
    return [(str(path.relative_to(root)), ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


def notebook_sources(root: Path, kind: str = "all") -> list:
    """(relative path, syntax tree) of each code cell of each notebook that parses."""
    found = []
    for path in notebook_paths(root, kind):
        for cell in code_cells(read(path)):
            try:
                found.append((str(path.relative_to(root)), python_tree(cell["source"])))
            except SyntaxError:
                pass  # check_cells reports it
    return found


# ---- notebooks -------------------------------------------------------------------------------------------------

def check_directives(root: Path) -> list:
    """A misspelt directive is silently not exported (trap 3), so only known ones are allowed."""
    problems = []
    for path in notebook_paths(root):
        for cell in code_cells(read(path)):
            for name, _ in directives(cell["source"]):
                if name not in DIRECTIVES:
                    problems.append(Problem(str(path.relative_to(root)), "directive",
                                            f"{name!r} is not a directive that this project uses: misspelt?"))
    return problems


def check_default_exp(root: Path) -> list:
    """Two notebooks with one default_exp lose the first one's symbols (trap 2)."""
    problems, owners = [], {}
    for path in notebook_paths(root):
        name = str(path.relative_to(root))
        sources = [cell["source"] for cell in code_cells(read(path))]
        targets = [value for source in sources for value in directive_values(source, "default_exp")]
        if len(targets) > 1:
            problems.append(Problem(name, "default_exp", f"has {len(targets)} of them: {', '.join(targets)}"))
        if not targets and any(is_exported(source) for source in sources):
            problems.append(Problem(name, "default_exp", "exports cells but names no module to export to"))
        for target in targets:
            if target in owners:
                problems.append(Problem(name, "default_exp",
                                        f"{target!r} is taken by {owners[target]}: its symbols would be lost"))
            owners[target] = name
    return problems


def exported_names(path: Path) -> tuple:
    """(module, names) that a notebook exports: functions, classes and plain assignments at the top of its cells."""
    module, names = None, []
    for cell in code_cells(read(path)):
        module = next(iter(directive_values(cell["source"], "default_exp")), module)
        if is_exported(cell["source"]):
            names += defined_names(python_tree(cell["source"]))
    return module, [name for name in names if not name.startswith("__")]


def defined_names(tree: ast.Module) -> list:
    """Names that the top level of a tree binds by def, class or assignment."""
    names = []
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.append(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        names += [target.id for target in targets if isinstance(target, ast.Name)]
    return names


def module_file(root: Path, module: str) -> Path:
    """The file that a default_exp target is exported to."""
    return root / "privfl" / (module.replace(".", "/") + ".py")


def check_exports_exist(root: Path) -> list:
    """Every exported definition stands in the module it was exported to (traps 2 and 3)."""
    problems = []
    for path in notebook_paths(root):
        module, names = exported_names(path)
        if module is None:
            continue
        target = module_file(root, module)
        there = set(defined_names(ast.parse(target.read_text(encoding="utf-8")))) if target.exists() else set()
        for name in names:
            if name not in there:
                problems.append(Problem(str(path.relative_to(root)), "export",
                                        f"{name} is missing in {target.relative_to(root)}: run `make export`"))
    return problems


def check_experiments(root: Path) -> list:
    """papermill silently runs the defaults where the tag or the kernel is missing (trap 1)."""
    problems = []
    for path in notebook_paths(root):
        notebook, name = read(path), str(path.relative_to(root))
        if not notebook["metadata"].get("kernelspec", {}).get("name"):
            problems.append(Problem(name, "kernelspec", "has none: papermill and JupyterLab would ask for one"))
        tagged = sum("parameters" in cell["metadata"].get("tags", []) for cell in notebook["cells"])
        wanted = 1 if path.is_relative_to(root / "nbs" / "experiments") else 0
        if tagged != wanted:
            problems.append(Problem(name, "parameters", f"has {tagged} cells tagged parameters, needs {wanted}"))
    return problems


def check_cells(root: Path) -> list:
    """Code cells parse, are short enough to read at a glance, and keep imports apart from work."""
    problems = []
    for path in notebook_paths(root):
        name = str(path.relative_to(root))
        for number, cell in enumerate(code_cells(read(path)), 1):
            length = len(cell["source"].splitlines())
            if length > MAX_CELL_LINES:
                problems.append(Problem(name, "cell length", f"code cell {number} has {length} lines, "
                                                             f"{MAX_CELL_LINES} at most: split it"))
            try:
                tree = python_tree(cell["source"])
            except SyntaxError as error:
                problems.append(Problem(name, "syntax", f"code cell {number} does not parse: {error.msg}"))
                continue
            others = [node for node in tree.body if not isinstance(node, (ast.Import, ast.ImportFrom))]
            if len(others) < len(tree.body) and not (len(others) <= 3 and all(map(is_setting, others))):
                problems.append(Problem(name, "imports", f"code cell {number} mixes imports with other code, "
                                                         "which building the site would then execute"))
    return problems


def is_setting(node: ast.stmt) -> bool:
    """Whether a statement beside imports is a one-line setting, such as torch.set_num_threads(1)."""
    return isinstance(node, (ast.Assign, ast.AnnAssign, ast.Expr)) and len(ast.unparse(node)) < 100


def lesson_counts(path: Path) -> tuple:
    """(exported cells that define something, those with an assertion within the next three code cells)."""
    cells, defining, taught = code_cells(read(path)), 0, 0
    for index, cell in enumerate(cells):
        if is_exported(cell["source"]) and re.search(r"^(def|class|@)", cell["source"], flags=re.M):
            defining += 1
            following = [later["source"] for later in cells[index + 1:index + 4]]
            taught += any(re.search(r"\bassert\b|\braises\(", source) for source in following)
    return defining, taught


def check_lessons(root: Path) -> list:
    """Most exported definitions are followed by a cell that shows them at work and asserts."""
    counts = {path: lesson_counts(path) for path in notebook_paths(root)}
    defining, taught = (sum(column) for column in zip(*counts.values())) if counts else (0, 0)
    if taught >= LESSON_SHARE * defining:
        return []
    return [Problem(str(path.relative_to(root)), "lessons", f"{t} of {d} exported definitions have a lesson cell; "
                    f"{taught} of {defining} in all, {LESSON_SHARE:.0%} wanted")
            for path, (d, t) in counts.items() if t < LESSON_SHARE * d]


def skipped_cells(root: Path) -> list:
    """Cells that nbdev_test would skip (trap 18): they are counted and shown, never silent."""
    problems = []
    for path in notebook_paths(root):
        for number, cell in enumerate(code_cells(read(path)), 1):
            for name, value in directives(cell["source"]):
                if name in SKIPPING and value.lower() != "true":
                    problems.append(Problem(str(path.relative_to(root)), "skipped", f"code cell {number}: {name} {value}"))
    return problems


# ---- source code -----------------------------------------------------------------------------------------------

def check_star_imports(root: Path) -> list:
    """Explicit names only."""
    return [Problem(name, "star import", f"from {node.module} import *")
            for name, tree in package_sources(root) + notebook_sources(root) for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)]


def imported_modules(name: str, tree: ast.Module) -> list:
    """Dotted names that a module of the package imports, relative imports resolved."""
    package = Path(name).with_suffix("").parts[:-1]
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[:len(package) - node.level + 1]) if node.level else []
            base = ".".join(base + ([node.module] if node.module else []))
            found += [f"{base}.{alias.name}" for alias in node.names] if base == "privfl" else [base]
    return found


def check_faces(root: Path) -> list:
    """A folder of modules is a package with a face, else an installation leaves it out."""
    folders = {path.parent for path in (root / "privfl").rglob("*.py")}
    return [Problem(str(folder.relative_to(root)), "face", "has no __init__.py: a notebook must export its face")
            for folder in sorted(folders) if not (folder / "__init__.py").exists()]


def layer_of(module: str) -> str:
    """The entry of LAYERS that a dotted name inside privfl belongs to."""
    top = (module.split(".") + [""])[1]
    return "PAPERS" if top in PAPERS else top


def check_layers(root: Path) -> list:
    """An import only ever points down, and the papers do not import each other."""
    problems = []
    for name, tree in package_sources(root):
        here = ".".join(Path(name).with_suffix("").parts).removesuffix(".__init__")
        if layer_of(here) in NO_LAYER:
            continue
        if layer_of(here) not in LAYERS:
            problems.append(Problem(name, "layers", f"{here} has no layer: give it one in tests/hygiene_rules.py"))
            continue
        for target in imported_modules(name, tree):
            if target.split(".")[0] != "privfl" or layer_of(target) in NO_LAYER | {"__version__"}:
                continue
            same_paper = layer_of(here) == "PAPERS" and here.split(".")[1] == target.split(".")[1]
            itself = layer_of(here) == layer_of(target) != "PAPERS"
            if same_paper or itself:
                continue
            if layer_of(target) not in LAYERS or LAYERS.index(layer_of(target)) >= LAYERS.index(layer_of(here)):
                problems.append(Problem(name, "layers", f"{here} imports {target}, which is not below it"))
    return problems


def requirement_names(root: Path) -> set:
    """The distributions that settings.ini requires at run time."""
    settings = ConfigParser(delimiters=["="])
    settings.read(root / "settings.ini", encoding="utf-8")
    return {re.split(r"[<>=!~\[;]", item)[0] for item in settings["DEFAULT"]["requirements"].split()}


def check_dependencies(root: Path) -> list:
    """Exported code imports what settings.ini requires and nothing else: no nbdev, no fastcore, no test tools."""
    required, problems = requirement_names(root), []
    for name, tree in package_sources(root):
        top_level = {id(node) for node in tree.body}
        for node in ast.walk(tree):
            modules = ([alias.name for alias in node.names] if isinstance(node, ast.Import)
                       else [node.module] if isinstance(node, ast.ImportFrom) and not node.level else [])
            for module in {module.split(".")[0] for module in modules}:
                if module in sys.stdlib_module_names | {"privfl"} or PACKAGE_NAMES.get(module, module) in required:
                    continue
                if module in OPTIONAL and id(node) not in top_level:
                    continue
                problems.append(Problem(name, "dependency", f"imports {module}, which settings.ini does not require"))
    return problems


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an attribute chain, "" for anything else."""
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return node.id if isinstance(node, ast.Name) else ""


def keyword(call: ast.Call, name: str) -> str:
    """The source of a keyword argument, "" where it is not given."""
    return next((ast.unparse(item.value) for item in call.keywords if item.arg == name), "")


def check_unsafe_loading(root: Path) -> list:
    """Nothing of ours loads pickles: they run code that they carry."""
    problems = []
    for name, tree in package_sources(root) + notebook_sources(root):
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                problems += [Problem(name, "pickle", f"imports {module}") for module in modules
                             if module.split(".")[0] in UNSAFE_MODULES]
                if modules == ["pickle"] and isinstance(node, ast.ImportFrom):
                    problems += [Problem(name, "pickle", f"imports pickle.{alias.name}") for alias in node.names
                                 if alias.name not in PICKLE_ERRORS]
            if isinstance(node, ast.Attribute) and dotted(node.value) == "pickle" and node.attr not in PICKLE_ERRORS:
                problems.append(Problem(name, "pickle", f"uses pickle.{node.attr}"))
            if not isinstance(node, ast.Call):
                continue
            called = dotted(node.func)
            if called == "torch.load" and keyword(node, "weights_only") != "True":
                problems.append(Problem(name, "pickle", "torch.load without weights_only=True"))
            if keyword(node, "allow_pickle") not in ("", "False"):
                problems.append(Problem(name, "pickle", f"{called} with allow_pickle"))
            if called.endswith("read_pickle"):
                problems.append(Problem(name, "pickle", f"{called} loads a pickle"))
    return problems


def global_draw(call: ast.Call) -> str:
    """What is wrong with a call that reads or writes a global generator, "" where nothing is."""
    called = dotted(call.func)
    parts = called.split(".")
    if called in ("torch.manual_seed", "torch.seed", "torch.random.manual_seed", "torch.set_rng_state") \
            or called.startswith("torch.cuda.manual_seed"):
        return f"{called} changes the global generator"
    if len(parts) == 3 and parts[0] in ("np", "numpy") and parts[1] == "random" and parts[2] not in OWN_GENERATORS:
        return f"{called} uses numpy's global generator"
    if len(parts) == 2 and parts[0] == "random" and parts[1] not in ("Random", "SystemRandom"):
        return f"{called} uses Python's global generator"
    if len(parts) == 2 and parts[0] == "torch" and parts[1] in DRAWING and not keyword(call, "generator"):
        return f"{called} without generator="
    if isinstance(call.func, ast.Attribute) and call.func.attr in DRAWING_METHODS and not keyword(call, "generator"):
        return f".{call.func.attr} without generator="
    return ""


def forked_lines(tree: ast.Module) -> set:
    """Calls inside `with torch.random.fork_rng()`, which puts the global generator back."""
    inside = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.With) and any("fork_rng" in ast.unparse(item.context_expr) for item in node.items):
            inside |= {id(child) for child in ast.walk(node)}
    return inside


def check_global_random(root: Path) -> list:
    """No global generator, ever, in the package and in experiments; a lesson may show what goes wrong with one."""
    problems = []
    for name, tree in package_sources(root) + notebook_sources(root, "experiment"):
        inside = forked_lines(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and id(node) not in inside and global_draw(node):
                problems.append(Problem(name, "global random state", global_draw(node)))
    return problems


def check_docstrings(root: Path) -> list:
    """Public functions and classes say in one line what they do, and type their parameters."""
    problems = []
    for name, tree in package_sources(root):
        for node in tree.body:
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith("_"):
                continue
            if not ast.get_docstring(node):
                problems.append(Problem(name, "docstring", f"{node.name} has none"))
            if isinstance(node, ast.FunctionDef):
                bare = [argument.arg for argument in node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                        if argument.annotation is None]
                if bare:
                    problems.append(Problem(name, "type hints", f"{node.name}: {', '.join(bare)}"))
    return problems


# ---- files -----------------------------------------------------------------------------------------------------

def committed_files(root: Path) -> list:
    """Files that git holds or would add; without git, all that do not lie in a built or hidden folder."""
    listed = subprocess.run(["git", "-C", str(root), "ls-files", "-co", "--exclude-standard", "-z"],
                            capture_output=True, text=True)
    if listed.returncode == 0:
        paths = [root / name for name in listed.stdout.split("\0") if name]
    else:
        paths = [path for path in root.rglob("*")
                 if not any(part.startswith((".", "_")) or part == "__pycache__" for part in path.relative_to(root).parts[:-1])]
    return sorted(path for path in paths if path.is_file())


def check_file_sizes(root: Path) -> list:
    """No large file in git, but for the listed ones."""
    return [Problem(str(path.relative_to(root)), "file size", f"{path.stat().st_size:,} bytes, {MAX_FILE_BYTES:,} at most")
            for path in committed_files(root)
            if path.stat().st_size > MAX_FILE_BYTES and str(path.relative_to(root)) not in LARGE_FILES]


# Put together from pieces, so that this file does not hold what it forbids.
FORBIDDEN = {
    "machine path": r"(?<![\w.~$}/-])/(?:" + "|".join(["work", "root", "farm", r"tmp", r"home/\w+", r"Users/\w+"]) + r")/\w",
    "registry host": "|".join(["py" + r"pi\.org", "python" + r"hosted\.org", "registry" + r"\.npmjs", "deb" + r"\.debian\.org"]),
}


def check_forbidden_words(root: Path) -> list:
    """No path of somebody's machine, no registry host."""
    problems = []
    for path in committed_files(root):
        if path.suffix in (".png", ".npz", ".gz", ".pdf"):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        if path.suffix == ".ipynb":
            text = re.sub(r'"image/[^"]+": "[^"]*"', "", text)
        for rule, pattern in FORBIDDEN.items():
            match = re.search(pattern, text)
            if match:
                problems.append(Problem(str(path.relative_to(root)), rule, f"holds {match.group(0)!r}"))
    return problems


CHECKS = [check_directives, check_default_exp, check_exports_exist, check_experiments, check_cells, check_lessons,
          check_star_imports, check_faces, check_layers, check_dependencies, check_unsafe_loading, check_global_random,
          check_docstrings, check_file_sizes, check_forbidden_words]
