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
