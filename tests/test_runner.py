"""The runner: parameters, digests, records, and real runs that fail, are killed, and are resumed."""
import base64
import errno
import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from nbdev.clean import clean_nb
from PIL import Image
from privfl import runner
from privfl.claims import Claim, ClaimError
from privfl.runner import (Parameter, Record, RunnerError, Run, canonical_code, code_digest, convert, execute_run, experiment_digest, find_root,
                           from_plain, grid, imported_modules, is_finished, keep_outputs, list_experiments, plan, png_of, read_json,
                           read_parameters, record_result, record_state, run, run_key, scales_of, split_values, to_plain, write_json)
from tiny_experiments import PARAMETERS, write_experiment, write_study

ROOT = Path(__file__).parent.parent


def states(outcomes):
    return {outcome.run.experiment: outcome.state for outcome in outcomes}


def wait_for(condition, seconds=90):
    """Wait for another process, up to a limit that only ends a hanging test."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the other process never came that far"
        time.sleep(0.1)


# --- JSON ----------------------------------------------------------------------------------------------------------

plain = some.recursive(some.none() | some.booleans() | some.integers(-9, 9) | some.floats() | some.sampled_from(["", "a", "nan"]),
                       lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.sampled_from("abc"), inner, max_size=3), max_leaves=8)


@given(plain)
def test_json_keeps_every_number(value):
    text = json.dumps(to_plain(value), allow_nan=False)
    assert repr(from_plain(json.loads(text))) == repr(value)


def test_json_of_arrays_and_tensors():
    found = to_plain({"a": np.float32(0.5), "b": torch.tensor([1, 2]), "c": np.array([[math.inf]]), "d": (1, {2}), "e": Path("a") / "b"})
    assert found == {"a": 0.5, "b": [1, 2], "c": [["Infinity"]], "d": [1, [2]], "e": "b"}
    with pytest.raises(RunnerError, match="object cannot be stored"):
        to_plain(object())


def test_a_truncated_file_is_named(tmp_path):
    write_json(tmp_path / "results.json", {"a": 1})
    (tmp_path / "results.json").write_text('{"a": ')
    with pytest.raises(RunnerError, match="results.json is not complete"):
        read_json(tmp_path / "results.json")


def test_a_full_disk_keeps_the_old_file(tmp_path, monkeypatch):
    write_json(tmp_path / "results.json", {"a": 1})

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(runner.os, "fsync", full)
    with pytest.raises(RunnerError, match="no space left on the disk while writing results.json"):
        write_json(tmp_path / "results.json", {"a": 2})
    assert read_json(tmp_path / "results.json") == {"a": 1} and [path.name for path in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_folder_that_may_not_be_written_to_says_what_to_do(tmp_path, monkeypatch, number):
    def refuse(*arguments, **settings):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(runner.os, "replace", refuse)
    with pytest.raises(RunnerError, match="results.json cannot be written .*--output"):
        write_json(tmp_path / "results.json", {})


# --- where and which -----------------------------------------------------------------------------------------------

def test_the_project_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.delenv("PRIVFL_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    assert find_root() == ROOT
    with pytest.raises(RunnerError, match="no folder nbs/experiments in the folder given"):
        find_root(tmp_path)
    write_experiment(tmp_path, "one")
    monkeypatch.setenv("PRIVFL_ROOT", str(tmp_path))
    assert find_root() == tmp_path.resolve()


def test_the_table_is_listed_longest_first_and_more_notebooks_follow(tmp_path):
    for name in ("semcom", "extra", "_hidden", "another"):
        write_experiment(tmp_path, name)
    listed = list_experiments(tmp_path)
    assert [item.name for item in listed] == ["radiomap", "semcom", "selection", "charting", "another", "extra"]
    assert [item.quick_cpu_seconds for item in listed] == [1_100, 800, 700, 400, None, None]
    assert [item.exists for item in listed] == [False, True, False, False, True, True] and listed[-1].title == "Study extra"


# --- parameters ----------------------------------------------------------------------------------------------------

def test_parameters_are_read_with_type_default_and_help(tmp_path):
    found = read_parameters(write_experiment(tmp_path, "one"))
    assert found["masking_rate"] == Parameter("masking_rate", "float", True, None, "R in [0, 1); None = the sweep")
    assert found["rates"] == Parameter("rates", "list", False, [0.2, 0.5], "the sweep") and found["loud"].type == "bool"
    assert list(found) == ["scale", "seeds", "masking_rate", "rates", "loud", "output_dir"]


def test_trap_01_a_notebook_that_cannot_be_parameterised_is_refused(tmp_path):
    path = write_experiment(tmp_path, "one", "1")
    whole = json.loads(path.read_text())
    for change, message in ((lambda nb: nb["cells"][1]["metadata"].clear(), "has 0 cells tagged"),
                            (lambda nb: nb["cells"][2].update(metadata={"tags": ["parameters"]}), "has 2 cells tagged"),
                            (lambda nb: nb["metadata"].clear(), "no kernelspec"),
                            (lambda nb: nb["cells"][1].update(source='scale = "quick"'), "lacks output_dir")):
        broken = json.loads(json.dumps(whole))
        change(broken)
        path.write_text(json.dumps(broken))
        with pytest.raises(RunnerError, match=message):
            plan(["one"], root=tmp_path)


def test_trap_01_unknown_names_are_refused_with_a_suggestion(tmp_path):
    write_experiment(tmp_path, "selection")
    for call, message in ((lambda: plan(["selektion"], root=tmp_path), "did you mean 'selection'"),
                          (lambda: plan(["selection"], scale="quik", root=tmp_path), "did you mean 'quick'"),
                          (lambda: plan(["selection"], parameters={"masking_rat": 1}, root=tmp_path), "did you mean 'masking_rate'"),
                          (lambda: plan(["selection"], parameters={"output_dir": "x"}, root=tmp_path), "no parameter 'output_dir'"),
                          (lambda: plan(["selection"], parameters={"scale": "x"}, root=tmp_path), "--scale"),
                          (lambda: plan(["charting"], root=tmp_path), "not there yet"),
                          (lambda: plan(["selection"], parameters={"masking_rate": "0.1,0.1"}, root=tmp_path), "holds a value twice"),
                          (lambda: plan(["selection"], seeds=2, parameters={"seeds": 3}, root=tmp_path), "given twice"),
                          (lambda: run(["selection"], jobs=0, root=tmp_path), "at least 1")):
        with pytest.raises(RunnerError, match=message):
            call()
    assert not (tmp_path / "_reports").exists()  # nothing had started


def test_a_value_outside_the_listed_ones_is_refused_before_anything_starts(tmp_path):
    path = write_experiment(tmp_path, "one", parameters=PARAMETERS.replace("# smoke, quick, full or paper", "# one of smoke, quick or full; size"))
    assert read_parameters(path)["scale"].choices == ("smoke", "quick", "full") == scales_of(list_experiments(tmp_path)[-1])
    for call, message in ((lambda: plan(["one"], scale="paper", root=tmp_path), "'one' has no scale 'paper'; it offers smoke, quick, full"),
                          (lambda: plan(scale="paper", root=tmp_path), "no experiment offers the scale 'paper' yet"),
                          (lambda: convert("quik", Parameter("word", "str", False, "quick", "", ("smoke", "quick"))), "did you mean 'quick'")):
        with pytest.raises(RunnerError, match=message):
            call()
    assert [run.parameters["scale"] for run in plan(scale="full", root=tmp_path)] == ["full"] and not (tmp_path / "_reports").exists()


@pytest.mark.parametrize(("kind", "optional", "given_value", "wanted"), [
    ("float", False, "0.5", 0.5), ("float", False, 1, 1.0), ("float", True, "None", None), ("int", False, "3", 3), ("bool", False, "yes", True),
    ("bool", False, False, False), ("str", False, "3", "3"), ("str", False, "none", "none"), ("list", False, "[1, 2]", [1, 2]),
    ("list", False, "0.5", [0.5]), ("list", False, (1, 2), [1, 2]), ("dict", False, "{'a': 1}", {"a": 1}), ("any", False, "0.5", 0.5),
])
def test_values_get_the_declared_type(kind, optional, given_value, wanted):
    found = convert(given_value, Parameter("name", kind, optional, None))
    assert found == wanted and type(found) is type(wanted)


@pytest.mark.parametrize(("kind", "given_value"), [("float", "many"), ("float", True), ("int", "0.5"), ("int", True), ("bool", "2"),
                                                   ("float", None), ("int", "none"), ("dict", "[1]")])
def test_values_of_another_type_are_refused(kind, given_value):
    with pytest.raises(RunnerError, match="name is .*declares"):
        convert(given_value, Parameter("name", kind, False, None))


@given(some.lists(some.sampled_from(["1", "0.5", "[1,2]", "'a,b'", "{'a': (1,2)}", "word"]), min_size=1, max_size=5))
def test_commas_split_outside_brackets_and_quotes(parts):
    assert split_values(",".join(parts)) == parts


def test_grids(tmp_path):
    path = write_experiment(tmp_path, "one")
    assert grid({"masking_rate": "0.2,0.5", "seeds": "1,2"}, path) == [
        {"masking_rate": rate, "seeds": seeds} for rate in (0.2, 0.5) for seeds in (1, 2)]
    assert grid({"masking_rate": [0.2, 0.5]}, path) == grid({"masking_rate": "0.2,0.5"}, path)
    assert grid({"rates": [0.2, 0.5]}, path) == grid({"rates": "[0.2,0.5]"}, path) == [{"rates": [0.2, 0.5]}]
    assert grid({"rates": [[0.2], [0.5]]}, path) == grid({"rates": "0.2,0.5"}, path) == [{"rates": [0.2]}, {"rates": [0.5]}]
    assert grid({}, path) == [{}]
    with pytest.raises(RunnerError, match="empty value"):
        grid({"seeds": "1,,2"}, path)


def test_run_keys_are_file_names_and_differ():
    keys = [run_key("quick", given_values) for given_values in ({}, {"seeds": 3}, {"rates": [0.2]}, {"rates": [0.5]}, {"a": "x/y"}, {"a": "x_y"}, {"a": "x" * 200})]
    assert len(set(keys)) == len(keys) and all("/" not in key and len(key) < 100 for key in keys)


# --- digests -------------------------------------------------------------------------------------------------------

def test_comments_docstrings_and_layout_do_not_count():
    assert canonical_code('def f(a):\n    """Says."""\n    return a+1') == canonical_code("def f(\n    a,  # number\n):\n    return (a + 1)  # sum")
    assert canonical_code("%matplotlib inline\n!ls\nx = 1") == canonical_code("x = 1")
    assert canonical_code("x = 1") != canonical_code("x = 1.0") != canonical_code("x = '1.0'")
    assert canonical_code("seeds = 3\noutput_dir: str = 'a'\ny = seeds", without={"seeds", "output_dir"}) == canonical_code("y = seeds")


@pytest.fixture
def package(tmp_path):
    """A package of four modules: low <- middle <- high, and one apart."""
    folder = tmp_path / "privfl"
    (folder / "paper").mkdir(parents=True)
    for name, text in {"__init__": "__version__ = '1'", "low": "A = 1", "middle": "def f():\n    from .low import A\n    return A", "apart": "B = 1",
                       "runner": "C = 1", "paper/__init__": "from .high import g", "paper/high": "from ..middle import f\ng = f"}.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def test_the_digest_follows_imports(package):
    sources = ["from privfl.paper import g\nfrom privfl.runner import C"]
    before = code_digest(sources, package)
    for name, text, counts in (("low", "A = 2", True), ("low", "A = 1  # one", False), ("apart", "B = 2", False), ("runner", "C = 2", False),
                               ("paper/__init__", "from .high import g\nx = 1", True), ("__init__", "__version__ = '2'", False)):
        path = package / f"{name}.py"
        old = path.read_text()
        path.write_text(text)
        assert (code_digest(sources, package) != before) == counts, name
        path.write_text(old)
    assert imported_modules("import privfl.paper.high", package) == {"privfl.paper", "privfl.paper.high"}


def test_the_digest_of_a_notebook_ignores_words_outputs_and_injected_cells(tmp_path):
    path = write_experiment(tmp_path, "one", "x = 1  # one")
    before = experiment_digest("one", tmp_path)
    notebook = nbformat.read(path, 4)
    notebook.cells[0].source += " more words"
    notebook.cells[2].outputs = [nbformat.v4.new_output("stream", text="1")]
    notebook.cells.insert(2, nbformat.v4.new_code_cell("seeds = 9", metadata={"tags": ["injected-parameters"]}))
    nbformat.write(notebook, path)
    assert experiment_digest("one", tmp_path) == before
    write_experiment(tmp_path, "one", "x = 2")
    assert experiment_digest("one", tmp_path) != before


# --- the record ----------------------------------------------------------------------------------------------------

def test_a_record_leaves_nothing_in_the_tree(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record = Record("one", {"scale": "quick"})
    record.metric("accuracy", 0.5)
    record.save()
    assert not list(tmp_path.iterdir()) and read_json(record.folder / "results.json")["metrics"]["accuracy"]["values"] == [0.5]


def test_a_record_holds_what_it_must(tmp_path):
    record = Record("selection", {"scale": "smoke", "seeds": 2, "output_dir": "secret", "rate": float("nan")}, tmp_path / "run")
    record.metric("SSIM", torch.tensor([0.1, 0.2]), "SSIM")
    record.metric("loss", {7: math.nan})
    record.save()
    saved = read_json(tmp_path / "run" / "results.json")
    assert {"schema", "experiment", "scale", "parameters", "metrics", "claims", "figures", "versions", "commit", "hardware", "data", "wall_s",
            "cpu_s", "digest", "tuning", "finished"} <= set(saved)
    assert "output_dir" not in saved["parameters"] and saved["metrics"]["loss"]["seeds"] == [7] and math.isnan(saved["metrics"]["loss"]["values"][0])
    text = (tmp_path / "run" / "results.json").read_text()
    assert str(tmp_path) not in text and runner.platform.node() not in text


def test_a_record_needs_its_scale():
    with pytest.raises(RunnerError, match="scale"):
        Record("one", {"seeds": 3})


@pytest.mark.parametrize("value", [1, [1, [2.5, math.inf]], {"a": {"b": torch.arange(3)}}, {"m": np.array([[True], [False]])}, torch.ones(2, 2), "text", None])
def test_cached_values_come_back_the_same_the_first_and_every_time(tmp_path, value):
    record, calls = Record("one", {"scale": "smoke"}, tmp_path), []
    first = record.cached("key", lambda: calls.append(1) or value)
    later = Record("one", {"scale": "smoke"}, tmp_path).cached("key", lambda: calls.append(1) or value)
    assert calls == [1] and repr(first) == repr(later) == repr(value)


def test_cached_depends_on_key_parameters_and_code(tmp_path, monkeypatch):
    record = Record("one", {"scale": "smoke", "rate": 0.5}, tmp_path)
    assert record.cached(("a", 0), lambda: 1) == 1 and record.has(("a", 0)) and not record.has(("a", 1))
    assert record.cached(("a", 1), lambda: 2) == 2
    assert Record("one", {"scale": "smoke", "rate": 0.2}, tmp_path).cached(("a", 0), lambda: 3) == 3
    monkeypatch.setattr(runner, "experiment_digest", lambda *_: "other code")
    assert Record("one", {"scale": "smoke", "rate": 0.5}, tmp_path).cached(("a", 0), lambda: 4) == 4


def test_a_damaged_cell_is_computed_again(tmp_path):
    for value in (1.0, torch.ones(2)):
        record = Record("one", {"scale": "smoke"}, tmp_path)
        record.cached("key", lambda: value)
        path = next((tmp_path / "cells").iterdir())
        path.write_bytes(path.read_bytes()[:20])
        assert torch.equal(torch.as_tensor(record.cached("key", lambda: value)), torch.as_tensor(value))
        next((tmp_path / "cells").iterdir()).unlink()


def test_a_failing_cell_stores_nothing(tmp_path):
    record = Record("one", {"scale": "smoke"}, tmp_path)
    with pytest.raises(ZeroDivisionError):
        record.cached("key", lambda: 1 / 0)
    assert not record.has("key")


def test_keys_of_cells_never_collide(tmp_path):
    record = Record("one", {"scale": "smoke"}, tmp_path)
    keys = ['["a", 1]', ("a", 1), "1", 1, "null", None, math.nan, "NaN"]
    assert [record.cached(key, lambda number=number: number) for number, key in enumerate(keys)] == list(range(len(keys)))
    for key in ({1: 2}, Path("x/a"), ("a", {1}), object()):
        with pytest.raises(RunnerError, match="cannot be in the key"):
            record.cached(key, lambda: 1)


@pytest.mark.parametrize("content", ["[]", "null", "3", "{}", '{"key": 1}', '{"key": 1, "value": 2, "wall_s": "x"}'])
def test_a_cell_that_is_json_but_no_cell_is_computed_again(tmp_path, content):
    record = Record("one", {"scale": "smoke"}, tmp_path)
    record.cached("key", lambda: 1)
    next((tmp_path / "cells").iterdir()).write_text(content)
    assert not record.has("key") and record.cached("key", lambda: 5) == 5 == record.cached("key", lambda: 6)


def test_a_value_that_cannot_be_stored_is_returned_with_a_warning(tmp_path, caplog):
    record = Record("one", {"scale": "smoke"}, tmp_path)
    for value in (object(), 1j, np.array([object()]), {"a": [print]}):
        assert record.cached("key", lambda value=value: value) is value and "is not stored" in caplog.text and not record.has("key")
    assert record.cached("text", lambda: ["NaN", math.inf]) == ["NaN", math.inf] == record.cached("text", lambda: 1)


def test_two_figures_never_share_a_file(tmp_path):
    from matplotlib.figure import Figure
    record = Record("one", {"scale": "smoke"}, tmp_path)
    for _ in range(2):
        record.figure(Figure(figsize=(1, 1)), "a b")  # the same figure again replaces itself
    with pytest.raises(RunnerError, match="would overwrite"):
        record.figure(Figure(figsize=(1, 1)), "a-b")


def test_figures_fit_into_their_limit():
    from matplotlib.figure import Figure
    figure = Figure(figsize=(2, 2))
    figure.subplots().imshow(np.random.default_rng(0).random((300, 300, 3)))
    assert len(png_of(figure)) <= 100_000 and len(png_of(figure, limit=20_000)) <= 20_000
    with pytest.raises(RunnerError, match="even at 30 dpi"):
        png_of(figure, limit=1_000)


def test_trap_17_a_record_refuses_tuning_on_its_own_seeds(tmp_path):
    record = Record("one", {"scale": "quick", "seeds": 3}, tmp_path)
    with pytest.raises(ClaimError, match="tuned on 2"):
        record.tuning("learning rate", [0.1, 1.0], 0.1, tuned_on=[2, 100])
    record.tuning("learning rate", [0.1, 1.0], 0.1, tuned_on=[100])
    record.save()
    assert read_json(tmp_path / "results.json")["tuning"][0]["tuned_on"] == [100]


def test_a_verdict_is_stored_once_with_the_strongest_attacker_beside_it(tmp_path):
    record = Record("one", {"scale": "quick"}, tmp_path)
    claim = Claim("stopped", "one", "the attack is stopped", 0.1, "SSIM", rule="threshold_below", replication="image")
    record.verdict(claim, None)
    verdict = record.verdict(claim, [0.01] * 9, attacker="cosine", strongest=[0.4] * 9, strongest_attacker="mask-aware")
    stored = record.document()["claims"]
    assert verdict.outcome == "reproduced" and len(stored) == 1 and stored[0]["strongest"]["verdict"]["outcome"] == "not reproduced"


# --- real runs -----------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    """One batch of six experiments, two at a time: a good one and five that go wrong in different ways."""
    root = tmp_path_factory.mktemp("batch")
    write_study(root, "study", root / "log.txt")
    write_experiment(root, "broken", "epsilon = 0", "1 / epsilon")
    write_experiment(root, "killed", "import os, signal", "os.kill(os.getpid(), signal.SIGKILL)")
    write_experiment(root, "unsaved", "seeds")
    write_experiment(root, "fulldisk", "open('/dev/full', 'w').write('x' * 100_000)")
    write_experiment(root, "overwritten", "import json, pathlib", "seeds = 9\n"
                     "pathlib.Path(output_dir, 'results.json').write_text(json.dumps({'parameters': {'scale': scale, 'seeds': seeds}}))")
    stream = io.StringIO()
    outcomes = run(scale="smoke", seeds=3, jobs=2, root=root, stream=stream)
    return root, {outcome.run.experiment: outcome for outcome in outcomes}, stream.getvalue()


def test_a_run_leaves_everything_in_its_folder(batch):
    root, outcomes, _ = batch
    folder = outcomes["study"].run.folder
    assert outcomes["study"].state == "finished" and folder == root / "_reports" / "study" / "smoke-seeds=3"
    assert {"executed.ipynb", "results.json", "log.txt", "status.json"} <= {path.name for path in folder.iterdir()}
    assert (folder / "figures" / "curve.png").stat().st_size <= 100_000
    results = read_json(folder / "results.json")
    assert results["parameters"] == {"scale": "smoke", "seeds": 3, "masking_rate": None, "rates": [0.2, 0.5], "loud": False}
    assert results["digest"] == experiment_digest("study", root) and math.isnan(results["metrics"]["loss"]["values"][0])
    assert [item["verdict"]["outcome"] for item in results["claims"]] == ["reproduced", "reproduced", "not judged at this scale"]
    assert nbformat.read(folder / "executed.ipynb", 4).cells[2].metadata.tags == ["injected-parameters"]


def test_trap_22_a_killed_kernel_is_a_failure_and_the_others_go_on(batch):
    _, outcomes, _ = batch
    assert outcomes["killed"].state == "failed" and "kernel was killed" in outcomes["killed"].reason and "cell 4 of 4" in outcomes["killed"].reason
    assert outcomes["study"].ok


def test_an_error_in_a_cell_is_named_and_its_notebook_kept(batch):
    _, outcomes, _ = batch
    assert outcomes["broken"].state == "failed" and outcomes["broken"].reason == "ZeroDivisionError: division by zero (cell 4 of 4)"
    assert (outcomes["broken"].run.folder / "executed.ipynb").is_file()


def test_a_full_disk_in_a_notebook_says_what_to_do(batch):
    _, outcomes, _ = batch
    assert "no space left on the disk: free some" in outcomes["fulldisk"].reason


def test_trap_01_the_echo_is_compared_with_what_was_asked(batch):
    _, outcomes, _ = batch
    assert outcomes["overwritten"].state == "failed" and "saw seeds = 9, but 3 was asked" in outcomes["overwritten"].reason
    assert "wrote no results.json" in outcomes["unsaved"].reason


def test_progress_is_plain_lines_where_there_is_no_terminal(batch):
    _, _, said = batch
    assert "\r" not in said and "study smoke-seeds=3: started" in said and "[6/6]" in said and said.count("failed: ") == 5


def test_no_kernel_is_left_behind(batch):
    root, _, _ = batch
    wait_for(lambda: not [child for child in psutil.Process().children(recursive=True) if "ipykernel" in " ".join(child.cmdline())], 30)


def test_resume_keeps_what_is_finished_and_a_change_of_code_does_not(batch):
    root, outcomes, _ = batch
    before = (root / "log.txt").read_text()
    again = run(["study"], scale="smoke", seeds=3, resume=True, root=root, stream=io.StringIO())
    assert states(again) == {"study": "kept"} and (root / "log.txt").read_text() == before
    other = Run("study", outcomes["study"].run.notebook, {"scale": "smoke", "seeds": 4}, outcomes["study"].run.folder, outcomes["study"].run.digest)
    assert is_finished(outcomes["study"].run) and not is_finished(other)
    assert not is_finished(runner.dataclasses.replace(outcomes["study"].run, digest="other"))
    path = outcomes["study"].run.folder / "results.json"
    whole = read_json(path)
    runner.write_json(path, {**whole, "tables": {**whole["tables"], "not measured yet": {"caption": "", "rows": [{"cell of work": "one"}]}}})
    assert not is_finished(outcomes["study"].run)  # it stopped for lack of time: --resume goes on
    runner.write_json(path, whole)


def test_the_tables_hold_one_row_a_run_and_one_a_number(batch):
    root, _, _ = batch
    import pandas as pd
    runs, metrics = pd.read_csv(root / "_reports" / "runs.csv"), pd.read_csv(root / "_reports" / "metrics.csv")
    assert list(runs.experiment) == ["study"] and runs.seeds[0] == 3 and runs["reproduced"][0] == 2
    assert len(metrics) == 6 and set(metrics.metric) == {"accuracy", "loss"}


def test_a_total_limit_ends_a_run(tmp_path):
    write_experiment(tmp_path, "slow", "import time; time.sleep(600)")
    outcome, = run(["slow"], scale="smoke", time_limit_s=1.5, root=tmp_path, stream=io.StringIO())
    assert outcome.state == "timed out" and "longer than 1.5 s" in outcome.reason and "--time-limit" in outcome.reason
    assert read_json(outcome.run.folder / "status.json")["state"] == "timed out"


def test_trap_22_a_cell_limit_ends_a_cell(tmp_path):
    write_experiment(tmp_path, "slow", "import time; time.sleep(600)")
    outcome, = run(["slow"], scale="smoke", cell_limit_s=1.0, root=tmp_path, stream=io.StringIO())
    assert outcome.state == "failed" and "longer than 1 s: raise --cell-limit" in outcome.reason


def test_a_grid_has_a_folder_for_each_run_and_two_runs_never_share_one(tmp_path):
    write_experiment(tmp_path, "sweep", "from privfl.runner import Record", "Record('sweep', dict(scale=scale, masking_rate=masking_rate), output_dir).save()")
    outcomes = run(["sweep"], scale="smoke", parameters={"masking_rate": "0.2,0.5"}, jobs=2, root=tmp_path, stream=io.StringIO())
    assert [outcome.run.folder.name for outcome in outcomes] == ["smoke-masking_rate=0.2", "smoke-masking_rate=0.5"]
    assert [read_json(outcome.run.folder / "results.json")["parameters"]["masking_rate"] for outcome in outcomes] == [0.2, 0.5]
    assert len((tmp_path / "_reports" / "runs.csv").read_text().splitlines()) == 3


def test_a_folder_in_use_is_left_alone(tmp_path):
    folder = tmp_path / "run"
    (folder / "cells").mkdir(parents=True)
    write_json(folder / "job.json", {"folder": str(folder), "resume": False, "parameters": {}})
    with runner._locked(folder) as free, pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "_locked", lambda path, locked=runner._locked: locked(path, 0.0))
        assert free and execute_run(folder / "job.json", os.getppid()) == 2
    assert (folder / "cells").is_dir()


def test_a_second_run_touches_nothing_of_the_first(tmp_path):
    write_experiment(tmp_path, "one", "1")
    folder = plan(["one"], scale="smoke", root=tmp_path)[0].folder
    folder.mkdir(parents=True)
    with runner._locked(folder) as free, pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "_locked", lambda path, locked=runner._locked: locked(path, 0.0))
        outcome, = run(["one"], scale="smoke", root=tmp_path, stream=io.StringIO())
        assert free and outcome.state == "failed" and "another `privfl run`" in outcome.reason
    assert [path.name for path in folder.iterdir()] == [".lock"]


def test_damaged_files_of_a_run_and_of_a_record_are_named(tmp_path):
    write_experiment(tmp_path, "one", "1")
    folder = plan(["one"], scale="smoke", root=tmp_path)[0].folder
    write_json(folder / "results.json", {})
    for content in ({}, [], {"state": "running"}):
        write_json(folder / "status.json", content)
        with pytest.raises(RunnerError, match="no finished run of one"):
            record_result("one", "smoke", root=tmp_path)
    write_json(tmp_path / "results" / "smoke" / "one.json", {"claims": None})
    assert record_state("one", "smoke", tmp_path) == "damaged"


BLOCKING = '''import os, pathlib, time
from privfl.runner import Record
here = pathlib.Path({folder!r})
record = Record("blocking", dict(scale=scale), output_dir)
(here / "kernel.pid").write_text(str(os.getpid()))
def work(number):
    if number == 1 and not (here / "go").exists():
        (here / "waiting").touch()
        time.sleep(600)
    with open(here / "log.txt", "a") as stream:
        stream.write(f"{{number}}\\n")
    return number'''
FINISH = '''record.metric("numbers", [record.cached(("number", number), lambda: work(number)) for number in range(3)])
record.save()'''


def start_command(root, *arguments):
    """`privfl run` in a process of its own."""
    code = ("import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background shell would have it ignored
            "from privfl.cli import main; raise SystemExit(main())")
    command = [sys.executable, "-c", code, "run", *arguments, "--root", str(root), "--scale", "smoke", "--no-report"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_kill_9_of_the_runner_ends_its_kernel_and_resume_repeats_nothing(tmp_path):
    imports, body = BLOCKING.format(folder=str(tmp_path)).split("\nhere", 1)
    write_experiment(tmp_path, "blocking", imports, "here" + body, FINISH)
    process = start_command(tmp_path, "blocking")
    wait_for((tmp_path / "waiting").exists)
    process.kill()  # kill -9
    process.wait()
    kernel = int((tmp_path / "kernel.pid").read_text())
    wait_for(lambda: not psutil.pid_exists(kernel) or psutil.Process(kernel).status() == psutil.STATUS_ZOMBIE, 30)
    assert (tmp_path / "log.txt").read_text() == "0\n"
    assert read_json(tmp_path / "_reports" / "blocking" / "smoke" / "status.json")["state"] == "running"
    (tmp_path / "go").touch()
    outcome, = run(["blocking"], scale="smoke", resume=True, root=tmp_path, stream=io.StringIO())
    assert outcome.ok and (tmp_path / "log.txt").read_text() == "0\n1\n2\n"
    assert read_json(outcome.run.folder / "results.json")["reused"]["cells"] == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_children_and_keeps_finished_work(tmp_path, number):
    write_experiment(tmp_path, "blocking", "import os, pathlib, time", f"here = pathlib.Path({str(tmp_path)!r})\n"
                     "(here / 'kernel.pid').write_text(str(os.getpid()))\n(here / 'waiting').touch()\ntime.sleep(600)")
    done = tmp_path / "_reports" / "finished" / "smoke"
    write_json(done / "status.json", {"state": "finished"})
    process = start_command(tmp_path, "blocking")
    wait_for((tmp_path / "waiting").exists)
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "finished work is kept" in said and "Traceback" not in said
    kernel = int((tmp_path / "kernel.pid").read_text())
    wait_for(lambda: not psutil.pid_exists(kernel) or psutil.Process(kernel).status() == psutil.STATUS_ZOMBIE, 30)
    assert read_json(tmp_path / "_reports" / "blocking" / "smoke" / "status.json")["state"] == "interrupted" and (done / "status.json").is_file()


def test_a_full_disk_for_one_run_does_not_end_the_others(tmp_path, monkeypatch):
    for name in ("one", "two"):
        write_experiment(tmp_path, name, "1")
    start = runner._start

    def start_or_fail(run_of, *more):
        if run_of.experiment == "one":
            raise OSError(errno.ENOSPC, "No space left on device")
        return start(run_of, *more)

    monkeypatch.setattr(runner, "_start", start_or_fail)
    outcomes = run(["one", "two"], scale="smoke", time_limit_s=0.5, root=tmp_path, stream=io.StringIO())
    assert states(outcomes) == {"one": "failed", "two": "timed out"} and "no space left" in outcomes[0].reason


# --- results of record ---------------------------------------------------------------------------------------------

@pytest.fixture
def finished(batch, tmp_path):
    """The batch's good run, as if it had run at quick scale in a project of its own."""
    root, outcomes, _ = batch
    project = tmp_path / "project"
    notebook = project / "nbs" / "experiments" / "study.ipynb"
    notebook.parent.mkdir(parents=True)
    notebook.write_bytes((root / "nbs" / "experiments" / "study.ipynb").read_bytes())
    folder = project / "_reports" / "study" / "quick"
    runner.shutil.copytree(outcomes["study"].run.folder, folder)
    write_json(folder / "results.json", {**read_json(folder / "results.json"), "scale": "quick"})
    return project, notebook, folder


def test_trap_18_stored_outputs_are_those_of_the_run(finished):
    project, notebook, _ = finished
    before = json.loads(notebook.read_text())
    record_result("study", "quick", root=project)
    after = json.loads(notebook.read_text())
    assert [cell["source"] for cell in after["cells"]] == ["".join(cell["source"]) for cell in before["cells"]] or \
        ["".join(cell["source"]) for cell in after["cells"]] == ["".join(cell["source"]) for cell in before["cells"]]
    assert any("image/png" in output.get("data", {}) for cell in after["cells"] for output in cell.get("outputs", []))
    assert after["cells"][1]["metadata"] == {"tags": ["parameters"]} and record_state("study", "quick", project) == "fresh"
    assert read_json(project / "results" / "quick" / "study.json")["metrics"]["accuracy"]["unit"] == "%"


def test_a_recorded_notebook_is_clean_in_nbdevs_eyes(finished):
    project, notebook, folder = finished
    record_result("study", "quick", root=project)
    ours = json.loads(notebook.read_text())
    theirs = json.loads(notebook.read_text())
    clean_nb(theirs, allowed_cell_metadata_keys=["tags"], clean_ids=False)
    assert theirs == ours


def test_a_stale_record_is_marked_with_its_commit(finished):
    project, notebook, folder = finished
    write_json(folder / "results.json", {**read_json(folder / "results.json"), "commit": "abc1234567"})
    record_result("study", "quick", root=project)
    notebook.write_text(notebook.read_text().replace("60.0 +", "61.0 +"))
    assert record_state("study", "quick", project) == "measured at abc1234567" and record_state("study", "full", project) == "none"


def test_only_finished_runs_of_the_present_code_become_a_record(finished):
    project, notebook, folder = finished
    with pytest.raises(RunnerError, match="no finished run of study at full scale"):
        record_result("study", "full", root=project)
    status = read_json(folder / "status.json")
    write_json(folder / "status.json", {**status, "state": "failed"})
    with pytest.raises(RunnerError, match="no finished run"):
        record_result("study", "quick", root=project)
    write_json(folder / "status.json", status)
    notebook.write_text(notebook.read_text().replace("60.0 +", "61.0 +"))
    with pytest.raises(RunnerError, match="has changed since this run"):
        record_result("study", "quick", root=project)
    assert not (project / "results").exists()


def test_finished_cells_of_a_full_run_are_committed_and_taken_up_by_resume(finished, monkeypatch):
    project, _, folder = finished
    full = folder.parent / "full"
    runner.shutil.copytree(folder, full)
    runner.shutil.rmtree(full / "cells")
    monkeypatch.setenv("PRIVFL_ROOT", str(project))
    work = Record("study", {"scale": "full"}, full)
    work.cached(("arm", 0), lambda: {"loss": math.nan})
    write_json(full / "results.json", {**read_json(full / "results.json"), "scale": "full"})
    record_result("study", "full", root=project)
    assert len(read_json(project / "results" / "full" / "study.json")["cells"]) == 1
    for resume, wanted in (("1", [0]), ("0", [0, 1])):
        monkeypatch.setenv("PRIVFL_RESUME", resume)
        calls = [0]
        elsewhere = Record("study", {"scale": "full"}, project / f"other{resume}")
        value = elsewhere.cached(("arm", 0), lambda: calls.append(1) or {"loss": math.nan})
        assert calls == wanted and math.isnan(value["loss"])


def test_a_notebook_that_is_too_large_keeps_its_figures_with_fewer_colours(finished, monkeypatch):
    project, notebook, folder = finished
    noise = np.random.default_rng(0).integers(0, 256, (60, 60, 3), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(noise).save(content, "PNG")
    executed = json.loads((folder / "executed.ipynb").read_text())
    executed["cells"][-1]["outputs"] = [{"output_type": "display_data", "metadata": {}, "data": {"image/png": base64.b64encode(content.getvalue()).decode()}}]
    (folder / "executed.ipynb").write_text(json.dumps(executed))
    sizes = []
    for limit in (1_000_000, None):
        monkeypatch.setattr(runner, "NOTEBOOK_BYTES", limit or sizes[0] - 1)
        keep_outputs(notebook, folder / "executed.ipynb")
        sizes.append(len(notebook.read_bytes()))
    stored = base64.b64decode(json.loads(notebook.read_text())["cells"][-1]["outputs"][0]["data"]["image/png"])
    assert sizes[1] < sizes[0] and Image.open(io.BytesIO(stored)).mode == "P"


def test_notebooks_and_figures_that_are_too_large_are_refused(finished):
    project, notebook, folder = finished
    executed = json.loads((folder / "executed.ipynb").read_text())
    for output, message in (({"output_type": "stream", "name": "stdout", "text": "x" * 1_000_001}, "bytes; 1000000 are allowed"),
                            ({"output_type": "display_data", "metadata": {}, "data": {"image/png": "A" * 150_000}}, "record.figure")):
        executed["cells"][-1]["outputs"] = [output]
        (folder / "executed.ipynb").write_text(json.dumps(executed))
        before = notebook.read_text()
        with pytest.raises(RunnerError, match=message):
            keep_outputs(notebook, folder / "executed.ipynb")
        assert notebook.read_text() == before
