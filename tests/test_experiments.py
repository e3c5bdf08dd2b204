"""Every experiment notebook runs at smoke scale and yields what the report needs."""
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
    page = report.build_report(output=output).read_text(encoding="utf-8")
    for item in results["claims"]:
        assert item["claim"]["name"].split(",")[0] in page
    assert all(figure["caption"][:24] in page for figure in results["figures"])
