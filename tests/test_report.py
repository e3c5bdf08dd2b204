"""The report and the ledger: what they show, what they never hide, and that no network is needed."""
import json
import math
import re
import shutil
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from privfl import report, runner
from privfl.claims import Claim
from privfl.report import build_report, gather, interval_svg, ledger_markdown, ledger_rows, notebook_page, records_of, write_ledger
from privfl.runner import Record, RunnerError, read_json, write_json
from tiny_experiments import write_experiment

ROOT = Path(__file__).parent.parent
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGNgYGBgAAAABQABh6FO1AAAAABJRU5ErkJggg=="
OUTSIDE = re.compile(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//|@import|url\(\s*["']?https?:""")


def result(project, name, key, commit="abc1234567", accuracy=(0.1, 0.2, 0.15), tuned=True):
    """A finished run as the runner leaves it, made in this process."""
    scale, folder = key.split("-")[0], project / "_reports" / name / key
    record = Record(name, {"scale": scale, "seeds": len(accuracy)}, folder)
    kept = Claim("accuracy kept", name, "no accuracy is lost <here>", "no loss", "points", 2.0, "no_loss", contrast="a - b", scales=("quick", "full"))
    record.metric("accuracy", list(accuracy), "%")
    record.metric("loss", [math.nan] * 2)
    record.table("Attacks", [{"attacker": "cosine <naive>", "SSIM": 0.04123}, {"attacker": "mask-aware", "SSIM": math.nan}], "Two rows.")
    record.data("images", "eight handwritten digits", "c0ffee")
    if tuned:
        record.tuning("learning rate", [0.01, 0.1], {"plain": 0.1}, tuned_on=[100, 101])
    record.verdict(kept, accuracy)
    record.verdict(Claim("SSIM | 0.1", name, "stopped", 0.1, "SSIM", rule="threshold_below", replication="image", scales=("quick",)), [0.04] * 20,
                   attacker="cosine", strongest=[0.4] * 20, strongest_attacker="mask-aware cosine")
    record.verdict(Claim("later", name, "needs more", "yes", scales=("paper",)), [1.0, 2.0])
    figure = __import__("matplotlib.figure").figure.Figure(figsize=(3, 2))
    figure.subplots().plot([1, 2])
    record.figure(figure, "curve", "One curve of the tiny study.")
    record.save()
    write_json(folder / "results.json", {**read_json(folder / "results.json"), "commit": commit})
    write_json(folder / "status.json", {"state": "finished", "reason": "", "asked": {"scale": scale}, "digest": record._digest, "wall_s": 1.0})
    execute(project, name, folder)
    return folder


def execute(project, name, folder):
    """An executed notebook beside a result: injected cell, figure, an error, and one cell that was skipped."""
    notebook = nbformat.read(project / "nbs" / "experiments" / f"{name}.ipynb", 4)
    notebook.cells.insert(2, nbformat.v4.new_code_cell("output_dir = 'injected'", metadata={"tags": ["injected-parameters"]}))
    for cell in notebook.cells[:-1]:
        if cell.cell_type == "code":
            cell.execution_count = 1
    notebook.cells[-2].outputs = [nbformat.v4.new_output("display_data", {"image/png": PIXEL}),
                                  nbformat.v4.new_output("stream", text="<b>not bold</b>")]
    nbformat.write(notebook, folder / "executed.ipynb")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """selection has a quick run and a sweep, charting only a record, semcom failed, radiomap does not exist."""
    monkeypatch.setenv("PRIVFL_ROOT", str(tmp_path))
    for name in ("selection", "charting", "semcom"):
        write_experiment(tmp_path, name, '#| label: fig-curve\n#| fig-cap: "A curve, of $x$."\nx = 1', "skipped = True")
    result(tmp_path, "selection", "quick")
    result(tmp_path, "selection", "quick-masking_rate=0.2", accuracy=(-9.0, -9.1, -9.2))
    keep(tmp_path, result(tmp_path, "charting", "quick"))
    write_json(tmp_path / "_reports" / "semcom" / "quick" / "status.json",
               {"state": "failed", "reason": "the kernel was killed <now>", "asked": {}, "digest": "", "wall_s": 1.0})
    return tmp_path


def keep(project, folder):
    """Turn a run into the result of record."""
    name, scale = folder.parent.name, folder.name
    (project / "results" / scale).mkdir(parents=True, exist_ok=True)
    shutil.move(folder / "results.json", project / "results" / scale / f"{name}.json")
    runner.keep_outputs(project / "nbs" / "experiments" / f"{name}.ipynb", folder / "executed.ipynb")
    shutil.rmtree(folder.parent)


def test_the_report_contains_what_it_must(project):
    page = build_report(project).read_text()
    for wanted in ("accuracy kept", "no accuracy is lost &lt;here&gt;", "0.15 [0.0258, 0.274] points", "reproduced", "not judged at this scale", "quick, 3 seeds",
                   "cosine &lt;naive&gt;", "0.04123", "eight handwritten digits (checksum c0ffee)", "abc1234567", "One curve of the tiny study.",
                   "the kernel was killed &lt;now&gt;", "does not exist in this version", "mask-aware cosine", "not finite", "runs? did not finish"):
        assert re.search(re.escape(wanted) if "?" not in wanted else wanted, page), wanted
    assert page.count("data:image/png;base64,") == 2  # one of the run, one stored in the notebook of the record
    for name in ("numpy", "hardware", "cpu", "digest", "parameters"):
        assert name in page


def test_nothing_comes_from_a_network_and_no_link_is_broken(project):
    index = build_report(project)
    for page in [index, *(project / "_reports" / "pages").iterdir()]:
        text = page.read_text()
        assert not OUTSIDE.search(text), page.name
        for link in re.findall(r'href="([^"]+)"', text):
            target, _, anchor = link.partition("#")
            assert (page.parent / target).resolve().is_file() if target else f'id="{anchor}"' in text, link


def test_the_strongest_attacker_stands_beside_the_papers(project):
    page = build_report(project).read_text()
    section = page[page.index("The paper's attacker and the strongest one"):]
    assert section.index("cosine") < section.index("0.04 SSIM") < section.index("mask-aware cosine") < section.index("0.4 SSIM") < section.index("not reproduced")


def test_trap_17_the_report_says_what_was_tuned_on_what(project):
    page = build_report(project).read_text()
    assert "<td>learning rate</td><td>0.01, 0.1</td><td>plain = 0.1</td><td>100, 101</td>" in page and "are not reported" in page
    result(project, "selection", "quick", tuned=False)
    assert "Nothing was tuned in this experiment" in build_report(project).read_text()


def test_trap_18_skipped_cells_are_counted_and_shown(project):
    assert "3 executed, 1 skipped" in build_report(project).read_text()


def test_stale_results_are_marked(project):
    assert "measured at abc1234567" not in build_report(project).read_text()
    write_experiment(project, "selection", "x = 2")
    write_experiment(project, "charting", "x = 2")
    page = build_report(project).read_text()
    assert page.count("measured at abc1234567") >= 4 and "measured at abc1234567" in ledger_markdown(project)


def test_a_fresh_run_stands_before_the_record_of_its_scale_only(project):
    result(project, "charting", "smoke")
    kinds = {section.experiment.name: [(entry.key, entry.fresh) for entry in section.entries] for section in gather(project)}
    assert kinds["charting"] == [("smoke", True), ("quick", False)] and kinds["semcom"] == [] and kinds["radiomap"] == []
    rows = [row for row in ledger_rows(gather(project)[0].entries + gather(project)[1].entries) if row.entry.experiment == "charting"]
    assert [(row.claim["name"], row.entry.scale) for row in rows][:2] == [("accuracy kept", "quick"), ("SSIM | 0.1", "quick")]  # smoke judged nothing
    result(project, "charting", "quick")
    assert [entry.key for section in gather(project) for entry in section.entries if section.experiment.name == "charting"] == ["quick", "smoke"]


def test_the_larger_scale_judges(project):
    result(project, "selection", "full", accuracy=(-5.0, -5.1, -4.9))
    rows = {row.claim["name"]: row for row in ledger_rows(gather(project)[0].entries)}
    assert rows["accuracy kept"].entry.scale == "full" and rows["accuracy kept"].verdict["outcome"] == "not reproduced"
    assert rows["SSIM | 0.1"].entry.scale == "quick"  # full does not judge it


def test_a_sweep_is_listed_and_stays_out_of_the_ledger(project):
    entries = next(section.entries for section in gather(project) if section.experiment.name == "selection")
    assert [entry.in_ledger for entry in entries] == [True, False]
    assert all(row.verdict["outcome"] != "not reproduced" for row in ledger_rows(entries))
    assert "quick-masking_rate=0.2" in build_report(project).read_text()


def test_damaged_results_are_shown_as_damaged(project):
    (project / "_reports" / "selection" / "quick" / "results.json").write_text('{"schema": ')
    page = build_report(project).read_text()
    assert "results.json is not complete JSON" in page and "damaged" in page
    (project / "_reports" / "selection" / "quick-masking_rate=0.2" / "executed.ipynb").write_text("{")
    assert "cannot be shown" in (build_report(project).parent / "pages" / "selection-quick-masking_rate=0.2.html").read_text()


def test_results_edited_by_hand_cost_their_own_run_only(project):
    path, record = (project / "_reports" / "selection" / "quick-masking_rate=0.2" / "results.json"), project / "results" / "quick" / "charting.json"
    good = read_json(path)

    def verdict(**change):
        return {"claims": [{**good["claims"][0], "verdict": {**good["claims"][0]["verdict"], **change}}]}

    for change in ({"claims": None}, {"scale": "tiny"}, {"experiment": "charting"}, {"schema": "other"}, {"wall_s": "x"}, verdict(estimate="x"), verdict(outcome="true"),
                   {"metrics": {"a": {"unit": "", "seeds": [0], "values": ["x"]}}}, {"figures": [{"name": "a", "caption": "", "file": "../../a.png"}]}):
        write_json(path, {**good, **change})
        states = {folder.name: status["state"] for folder, status, _ in runner.finished_runs(project / "_reports")}
        assert states[path.parent.name] == "damaged" and states["quick"] != "damaged", change
    write_json(path, {name: value for name, value in good.items() if name != "claims"})
    write_json(record, {**read_json(record), **verdict(estimate="x")})
    runner.write_tables(project / "_reports")
    page = build_report(project).read_text()
    assert "&#39;claims&#39; is missing" in page and "estimate of &#39;accuracy kept&#39;" in page and "0.15 [0.0258, 0.274] points" in page
    with pytest.raises(RunnerError, match="results/quick/charting.json"):
        ledger_markdown(project)


def test_tables_that_cannot_be_written_do_not_hide_a_finished_run(project, monkeypatch, capsys):
    def fail(*_):
        raise ValueError("no table")

    monkeypatch.setattr(runner, "write_tables", fail)
    monkeypatch.setattr(runner, "is_finished", lambda _: True)
    assert [item.state for item in runner.run(["selection"], resume=True, root=project)] == ["kept"]
    assert "not written: no table" in capsys.readouterr().err


def test_a_run_that_was_killed_with_its_runner_is_not_finished(project):
    write_json(project / "_reports" / "semcom" / "quick" / "status.json", {"state": "running", "reason": ""})
    assert "not finished" in build_report(project).read_text()


def test_an_empty_project_has_a_report(tmp_path):
    (tmp_path / "nbs" / "experiments").mkdir(parents=True)
    page = build_report(tmp_path).read_text()
    assert page.count("not exist in this version") == 8 and "No result yet" in page
    assert ledger_markdown(tmp_path).startswith("No claim has a result of record yet.")


# --- the ledger ----------------------------------------------------------------------------------------------------

def test_the_ledger_table_is_valid_markdown_from_the_record_alone(project):
    lines = ledger_markdown(project).splitlines()
    assert lines[0] == "3 claims: 2 reproduced, 1 not judged at this scale."
    rows = [line for line in lines if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 6 for row in rows)
    assert "| [charting](nbs/experiments/charting.ipynb): SSIM \\| 0.1 | below 0.1 SSIM | 0.04 SSIM (cosine); 0.4 SSIM (mask-aware cosine) | quick, 20 images |" in rows[3]
    assert any("no result of record yet" in row for row in rows) and any(row == "| radiomap | | | | not yet |" for row in rows)


def test_the_ledger_is_written_between_the_markers_and_checked(project):
    for name in report.LEDGER_FILES:
        (project / name).write_text(f"before\n\n{report.LEDGER_START}\n{report.LEDGER_END}\nafter\n")
    assert write_ledger(project, check=True) == list(report.LEDGER_FILES) and "claims" not in (project / "README.md").read_text()
    assert write_ledger(project) == list(report.LEDGER_FILES) and write_ledger(project, check=True) == write_ledger(project) == []
    text = (project / "README.md").read_text()
    assert text.startswith("before\n\n<!--") and text.endswith("-->\nafter\n") and ledger_markdown(project) in text
    (project / "README.md").write_text("no markers")
    with pytest.raises(RunnerError, match="README.md needs one pair of lines"):
        write_ledger(project)


def test_a_record_under_another_name_is_refused(project):
    shutil.copy(project / "results" / "quick" / "charting.json", project / "results" / "quick" / "semcom.json")
    with pytest.raises(RunnerError, match="file names and contents must agree"):
        records_of(project)


def test_the_committed_ledger_marks_what_is_stale():
    """The only thing that a change of code asks for at once: `privfl ledger --write` puts the marks."""
    for entry in records_of(ROOT):
        if entry.mark:
            for name in report.LEDGER_FILES:
                assert entry.mark in (ROOT / name).read_text(encoding="utf-8"), f"{name} lacks {entry.mark!r}: run `privfl ledger --write`"


# --- drawings and pages --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("low", [-math.inf, -3.0, 0.5])
@pytest.mark.parametrize("rule", ["difference", "no_loss", "value", "threshold_above", "threshold_below", "exact"])
def test_drawings_stay_inside_their_box(rule, low):
    claim = {"rule": rule, "margin": 1.0, "target": 0.0, "side": "equal"}
    drawing = interval_svg(claim, {"outcome": "inconclusive", "low": low, "estimate": 1.0, "high": math.inf if low == -math.inf else 2.0})
    numbers = [float(value) for value in re.findall(r' (?:x|x1|x2|cx)="([^"]+)"', drawing)]
    assert len(numbers) == 4 and all(0 <= value <= 150 for value in numbers) and "nan" not in drawing
    assert float(re.search(r'rect[^>]* x="([\d.]+)"[^>]* width="([\d.]+)"', drawing)[2]) > 0


def test_pages_resolve_labels_and_hide_what_is_injected(project):
    page = notebook_page(project / "_reports" / "selection" / "quick" / "executed.ipynb", "a & b")
    assert "<title>a &amp; b</title>" in page and "injected" not in page and "#|" not in page and "fig-cap" not in page
    assert '<a href="#fig-curve">Figure 1</a>' in page and 'id="fig-curve"' in page and "<strong>Figure 1.</strong> A curve, of" in page
    assert 'id="eq-factor"' in page and "(1)</span>" in page and "xMATHx" not in page and "$$" not in page
    assert 'alt="A curve, of $x$."' in page and "&lt;b&gt;not bold" in page


def test_equations_stay_readable_without_the_converter(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "latex2mathml.converter", None)
    assert report._math_html(r"a < \mu", False) == '<span class="tex"><code>a &lt; \\mu</code></span>'


@pytest.mark.parametrize(("text", "equations"), [("costs $5 and $6", 0), ("`$x$` and $x$", 1), ("$x_1$, $y$-axis", 2), ("```\n$x$\n```", 0),
                                                 ("$$\na\n$$ {#eq-a}", 1), ("\\$x$", 0)])
def test_equations_are_told_from_prices_and_code(text, equations):
    found = report._PageText()
    found.hide_math(text)
    assert len(found.pieces) == equations


def test_links_to_other_notebooks_do_not_break(tmp_path):
    cells = [nbformat.v4.new_markdown_cell("See [inversion](../00_core/09_inversion.ipynb#pitfalls), [here](#x) and [@key2026; @other].")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "one.ipynb")
    page = notebook_page(tmp_path / "one.ipynb", "one")
    assert '<span class="elsewhere" title="../00_core/09_inversion.ipynb">inversion</span>' in page and 'href="#x"' in page
    assert "(key2026; other)" in page


def test_style_follows_the_system_without_a_script():
    page = report.render("report_page.html", title="t", back="b", body="")
    assert "prefers-color-scheme: dark" in page and ":root:not([data-theme])" in page and 'name="viewport"' in page
    assert json.loads(json.dumps(page)) == page


def test_a_smoke_run_is_marked_as_meaning_nothing(project):
    assert "show the mechanics only" not in build_report(project).read_text()
    result(project, "selection", "smoke")
    assert "Smoke runs (selection) show the mechanics only" in build_report(project).read_text()


def test_tables_are_numbered_and_referred_to_like_figures(tmp_path):
    cells = [new_markdown_cell("See @tbl-a and @fig-b."), new_code_cell('#| label: tbl-a\n#| tbl-cap: "Numbers."\n1', outputs=[new_output("stream", text="1")]),
             new_code_cell('#| label: fig-b\n#| fig-cap: "A line."\n2', outputs=[new_output("stream", text="2")])]
    nbformat.write(new_notebook(cells=cells), tmp_path / "a.ipynb")
    page = notebook_page(tmp_path / "a.ipynb", "a")
    assert '<a href="#tbl-a">Table 1</a>' in page and '<a href="#fig-b">Figure 1</a>' in page and page.count('id="tbl-a"') == 1
    assert "Numbers." in page and "@tbl" not in page
