"""Every experiment notebook runs at smoke scale and yields what the report needs."""
import html
import json

import pytest

from privfl import report, runner

EXPERIMENTS = [item.name for item in runner.list_experiments() if item.exists]


@pytest.fixture(scope="module", params=EXPERIMENTS)
def smoke(request, tmp_path_factory):
    """One smoke run of an experiment, and its results."""
    output = tmp_path_factory.mktemp(request.param)
    outcome, = runner.run([request.param], scale="smoke", output=output)
    assert outcome.ok, outcome
    return output, json.loads((output / request.param / "smoke" / "results.json").read_text(encoding="utf-8"))


def test_results_hold_what_the_report_needs(smoke):
    output, results = smoke
    assert results["schema"] == runner.SCHEMA and results["scale"] == results["parameters"]["scale"] == "smoke"
    assert results["claims"] and results["figures"] and results["metrics"] and results["data"]
    assert all(item["verdict"]["outcome"] == "not judged at this scale" for item in results["claims"])
    for figure in results["figures"]:
        content = (output / results["experiment"] / "smoke" / figure["file"]).read_bytes()
        assert content.startswith(b"\x89PNG") and len(content) <= runner.FIGURE_BYTES and figure["caption"]


def test_the_report_shows_the_run(smoke):
    output, results = smoke
    page = html.unescape(report.build_report(output=output).read_text(encoding="utf-8"))
    for item in results["claims"]:
        assert item["claim"]["name"].split(",")[0] in page
    assert all(figure["caption"][:24] in page for figure in results["figures"])


def test_the_charting_run_compares_in_every_matching(smoke):
    """What does not depend on the scale: five matchings, a promise that one arm breaks, finite levels of the sound mechanisms."""
    _, results = smoke
    if results["experiment"] != "charting":
        return
    gaps = {row["matching"].split(" (")[0]: row for row in results["tables"]["gaps"]["rows"]}
    assert list(gaps) == ["equal nominal epsilon", "equal noise energy", "equal determinant", "equal smallest variance", "equal error of the strongest attacker"]
    assert gaps["equal nominal epsilon"]["TW gap"] > 0.1 > 0 > gaps["equal nominal epsilon"]["attacker_m gap"]  # more structure, and less privacy
    for row in results["tables"]["audit"]["rows"]:
        assert row["planar Laplace: excess, nats"] <= 0 < row["MNPL, equal nominal epsilon: excess, nats"]
    rows = results["tables"]["equal attacker error"]["rows"]
    assert len(rows) == 7 and [row["mechanism"] for row in rows if row["level between users"] == "infinite"] == ["MNPL"]
    for row in rows:  # two kinds of level, never both
        assert bool(row["level between landmarks"]) == ("balanced" in row["mechanism"]) != bool(row["level between users"])
    names = [item["claim"]["name"] for item in results["claims"]]
    assert sum("at epsilon 2, equal" in name for name in names) == sum("at each of 1 budgets" in name for name in names) == 20
    assert len(results["tables"]["verdict at each budget"]["rows"]) == 20  # matchings x metrics x budgets


def test_the_selection_run_shows_the_paper_s_attacker_beside_the_one_who_reads_the_mask(smoke):
    """What does not depend on the scale: two attackers for every arm with a mask, a frontier, an account of the arms with noise."""
    _, results = smoke
    if results["experiment"] != "selection":
        return
    attackers = {}
    for row in results["tables"]["reconstruction"]["rows"]:
        attackers.setdefault((row["victim"], row["attacked"], row["defence"]), []).append(row["attacker"])
    for (_, _, defence), who in attackers.items():
        assert who == (["naive", "mask-aware"] if "R = " in defence else ["naive"])
    assert {kind for _, kind, _ in attackers} == {"one image", "one image, best of 4 starts", "batch of 4", "4 rounds", "FedAvg, 4 steps"}
    frontier = results["tables"]["frontier"]["rows"]
    assert {row["arm"] for row in frontier} >= {"plain", "R = 0.5", "rows R = 0.5", "noise 0.01", "fixed position"}
    assert {row["algorithm"] for row in frontier} == {"FedSGD", "FedAvg"} and {row["network"] for row in frontier} == {"LeNet-GELU", "ViT"}
    assert all((row["epsilon"] == "none") == ("noise" not in row["arm"]) for row in frontier if row["network"] != "ViT")
    assert not set(results["tables"]) & {"not measured yet"}


def test_a_selection_run_whose_time_is_up_says_so_and_goes_on_later(tmp_path, monkeypatch):
    """No cell of work is started after PRIVFL_MINUTES; the run still ends with a result, which lists what is missing."""
    monkeypatch.setenv("PRIVFL_MINUTES", "0")
    outcome, = runner.run(["selection"], scale="smoke", output=tmp_path)
    assert outcome.ok, outcome
    results = json.loads((tmp_path / "selection" / "smoke" / "results.json").read_text(encoding="utf-8"))
    assert "are missing in all" in results["tables"]["not measured yet"]["caption"] and results["tables"]["accuracy"]["rows"] == []
    assert not list((tmp_path / "selection" / "smoke" / "cells").glob("*")) and results["reused"]["cells"] == 0


def test_the_radiomap_run_finds_the_leak_outside_the_transmitter_slices(smoke):
    """What does not depend on the scale: undefended uploads leak, directed noise leaves that leak, and the slices alone tell nothing."""
    _, results = smoke
    if results["experiment"] != "radiomap":
        return
    rows = {row["arm"]: row for row in results["tables"]["privacy and utility"]["rows"]}
    assert list(rows) == ["uniform", "directed", "adaptive"]
    for row in rows.values():
        assert row["same bank, no noise (m)"] < 0.8 * row["chance (m)"] and row["slices only (m)"] > 0.8 * row["chance (m)"]
    assert rows["directed"]["best regressor (m)"] < 0.8 * rows["uniform"]["best regressor (m)"]  # 36 against 53 m
    promises = {row["arm"]: row["promise"] for row in results["tables"]["promises"]["rows"]}
    assert promises == {"uniform": "formal", "directed": "none", "adaptive": "heuristic"}
    attackers = {(row["attacker"], row["city"]) for row in results["tables"]["every attacker"]["rows"]}
    assert len(attackers) == 16  # eight attackers, city new or known
    assert all(row["RMSE (m)"] > 0 for row in results["tables"]["every attacker"]["rows"])
