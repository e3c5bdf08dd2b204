"""The privfl command: what it accepts, what it refuses, and its exit codes."""
import json
import os
import subprocess
import sys

import pytest
from privfl import cli, runner
from privfl.cli import build_parser, main
from privfl.runner import Outcome, Run
from tiny_experiments import write_experiment, write_study


@pytest.fixture
def project(tmp_path):
    write_experiment(tmp_path, "selection", "1")
    for name in ("README.md", "index.qmd"):
        (tmp_path / name).write_text("<!-- ledger:start -->\n<!-- ledger:end -->\n")
    return tmp_path


def call(project, *arguments):
    return main([arguments[0], "--root", str(project), *arguments[1:]])


@pytest.fixture
def fake_run(monkeypatch, tmp_path):
    """Replace the runner's `run`; collects calls, returns outcomes of the given states."""
    calls = []

    def fake(*arguments):
        calls.append(arguments)
        return [Outcome(Run(f"one{number}", tmp_path, {"scale": "quick"}, tmp_path / "quick", ""), state, "a reason" if state == "failed" else "")
                for number, state in enumerate(fake.states)]

    fake.states, fake.calls = ["finished"], calls
    monkeypatch.setattr(runner, "run", fake)
    return fake


def test_the_installed_command_knows_its_version(capsys):
    assert main(["--version"]) == 0 and capsys.readouterr().out.startswith("privfl 0.")


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["list", "--help"], ["record", "--help"], ["ledger", "--help"], ["report", "--help"]])
def test_help_is_there(arguments, capsys):
    assert main(arguments) == 0 and "usage: privfl" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["runn"], ["run", "--jobs", "0"], ["run", "--seeds", "-1"], ["run", "--seeds", "two"], ["run", "-p", "masking_rate"],
                                       ["run", "-p", "=1"], ["run", "-p", "a b=1"], ["run", "--time-limit", "nan"], ["ledger", "--write", "--check"], ["record"]])
def test_wrong_commands_are_refused_with_exit_code_2(arguments, capsys):
    assert main(arguments) == 2 and "usage: privfl" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "message"), [
    (["run", "selektion"], "did you mean 'selection'"), (["run", "--scale", "quik"], "did you mean 'quick'"), (["run", "semcom"], "not there yet"),
    (["run", "-p", "masking_rat=0.5"], "did you mean 'masking_rate'"), (["run", "-p", "seeds=many"], "declares int"),
    (["run", "--output", ""], "output is empty"), (["report", "--output", " "], "output is empty"), (["record", "selection", "--output", ""], "output is empty"),
    (["run", "-p", "seeds=1", "-p", "seeds=2"], "write -p seeds=1,2"), (["record", "selektion"], "did you mean 'selection'"),
    (["record", "selection"], "no finished run of selection"), (["record", "selection", "--scale", "big"], "scale is 'big'")])
def test_wrong_names_and_values_are_one_line_and_exit_code_2(project, arguments, message, capsys):
    assert call(project, *arguments) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.startswith("privfl: ") and said.err.count("\n") == 1 and not said.out
    assert not (project / "_reports").exists()


def test_outside_a_project_there_is_a_hint(tmp_path, capsys):
    assert call(tmp_path, "list") == 2 and "nbs/experiments" in capsys.readouterr().err


def test_list_shows_budgets_and_what_is_not_yet_there(project, capsys):
    assert call(project, "list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["radiomap", "semcom", "selection", "charting"]
    assert "not yet" in lines[1] and "700 CPU-s" in lines[3] and "not yet" not in lines[3] and "700 CPU-seconds, 6 minutes" in lines[-1]


def test_run_passes_everything_on(project, fake_run):
    assert call(project, "run", "selection", "--scale", "smoke", "--jobs", "2", "--seeds", "3", "-p", "masking_rate=0.2,0.5", "-p", "loud=yes", "--resume",
                "--cell-limit", "60", "--time-limit", "600", "--no-report") == 0
    assert fake_run.calls == [(["selection"], "smoke", 2, 3, {"masking_rate": "0.2,0.5", "loud": "yes"}, True, "_reports", str(project), 60.0, 600.0)]


def test_run_exits_1_when_one_fails_and_still_builds_the_report(project, fake_run, capsys):
    fake_run.states = ["finished", "failed", "kept"]
    assert call(project, "run") == 1
    assert (project / "_reports" / "index.html").is_file() and "privfl: one1 quick failed: a reason" in capsys.readouterr().err


def test_run_without_notebooks_says_so(tmp_path, capsys):
    (tmp_path / "nbs" / "experiments").mkdir(parents=True)
    assert call(tmp_path, "run") == 0 and "no experiment notebook exists yet" in capsys.readouterr().out


def test_interrupted_and_full_disk_have_exit_codes(project, monkeypatch, capsys):
    def raises(error):
        def fake(*_):
            raise error
        return fake

    monkeypatch.setattr(runner, "run", raises(KeyboardInterrupt()))
    assert call(project, "run") == 130 and "finished work is kept" in capsys.readouterr().err
    monkeypatch.setattr(runner, "run", raises(OSError(28, "No space left on device", "/somewhere/x.json")))
    assert call(project, "run") == 1 and capsys.readouterr().err == "privfl: No space left on device: x.json\n"


def test_a_record_that_cannot_be_kept_is_a_failure_not_a_crash(project, fake_run, capsys):
    assert call(project, "run", "--record") == 1
    said = capsys.readouterr()
    assert "no finished run of one0" in said.err and (project / "_reports" / "index.html").is_file()


def test_ledger_prints_writes_and_checks(project, capsys):
    assert call(project, "ledger") == 0 and "| claim |" in capsys.readouterr().out
    assert call(project, "ledger", "--check") == 1 and "ledger --write" in capsys.readouterr().err
    assert call(project, "ledger", "--write") == 0 and call(project, "ledger", "--check") == 0
    (project / "README.md").write_text("nothing")
    assert call(project, "ledger", "--check") == 2


def test_report_builds_anywhere(project, tmp_path, capsys):
    assert call(project, "report", "--output", str(tmp_path / "elsewhere")) == 0
    assert (tmp_path / "elsewhere" / "index.html").is_file() and "elsewhere" in capsys.readouterr().out


def test_from_a_shell_to_a_result_of_record(tmp_path):
    """The whole way once, as a shell goes it: run, record, report, ledger."""
    write_study(tmp_path, "study", tmp_path / "log.txt")
    for name in ("README.md", "index.qmd"):
        (tmp_path / name).write_text("<!-- ledger:start -->\n<!-- ledger:end -->\n")
    command = [sys.executable, "-c", "from privfl.cli import main; raise SystemExit(main())"]
    done = subprocess.run([*command, "run", "study", "--root", str(tmp_path), "--record"], capture_output=True, text=True, cwd=tmp_path,
                          env={**os.environ, "PRIVFL_ROOT": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert "study quick: finished" in done.stderr and "report: _reports/index.html" in done.stdout and "results/quick/study.json" in done.stdout
    assert (tmp_path / "log.txt").read_text() == "0\n1\n"  # every cell of work once
    stored = json.loads((tmp_path / "nbs" / "experiments" / "study.ipynb").read_text())
    assert any(cell.get("outputs") for cell in stored["cells"]) and "accuracy kept" in (tmp_path / "_reports" / "index.html").read_text()
    assert main(["ledger", "--root", str(tmp_path), "--write"]) == 0 and "accuracy kept" in (tmp_path / "README.md").read_text()


def test_the_parser_is_the_one_that_main_uses():
    assert build_parser().prog == "privfl" and cli.main is main
