"""Tiny experiment notebooks for the tests of the runner, the report and the command."""
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

PARAMETERS = '''scale: str = "smoke"  # smoke, quick, full or paper
seeds: int = 2  # number of seeds, >= 1
masking_rate: float | None = None  # R in [0, 1); None = the sweep
rates: list = [0.2, 0.5]  # the sweep
loud: bool = False  # say more
output_dir: str = ""  # set by the runner; empty = a temporary folder'''

IMPORTS = '''import numpy as np
from matplotlib.figure import Figure

from privfl.claims import Claim
from privfl.runner import Record'''

SETUP = '''record = Record("{name}", dict(scale=scale, seeds=seeds, masking_rate=masking_rate, rates=rates, loud=loud), output_dir)
kept = Claim("accuracy kept", "tiny", "no accuracy is lost", "no loss", "points", 2.0, "no_loss", ("smoke", "quick"),
             "accuracy(R) - accuracy(0)")
stopped = Claim("SSIM below 0.1", "tiny", "the attack is stopped", 0.1, "SSIM", rule="threshold_below", replication="image",
                scales=("smoke", "quick"))
later = Claim("shown at full scale", "tiny", "needs more", "yes", scales=("full",))'''

MEASURE = '''#| label: fig-curve
#| fig-cap: "One curve."
def train(seed):
    with open({log!r}, "a") as stream:
        stream.write(f"{{seed}}\\n")
    return {{"accuracy": 60.0 + 0.1 * seed, "loss": float("nan")}}

finished = [record.cached(("train", seed), lambda: train(seed)) for seed in record.seeds]
figure = Figure(figsize=(4, 2))
figure.subplots().plot([1, 2, 3])
record.figure(figure, "curve", "One curve of the tiny study.")'''

JUDGE = '''record.metric("accuracy", [item["accuracy"] for item in finished], "%")
record.metric("loss", [item["loss"] for item in finished])
record.table("Attacks", [{"attacker": "cosine <naive>", "SSIM": 0.04}, {"attacker": "mask-aware", "SSIM": float("nan")}], "Two rows.")
record.data("images", "eight handwritten digits", "c0ffee")
record.tuning("learning rate", [0.01, 0.1], 0.1, tuned_on=[100, 101])
record.verdict(kept, [0.1, 0.2, 0.15])
record.verdict(stopped, np.full(20, 0.04), attacker="cosine", strongest=np.full(20, 0.4), strongest_attacker="mask-aware cosine")
record.verdict(later, [1.0, 2.0])
record.save()'''


def write_experiment(root: Path, name: str, *sources: str, parameters: str = PARAMETERS) -> Path:
    """An experiment notebook with a parameters cell and the given code cells; stable cell ids."""
    tagged = new_code_cell(parameters, metadata={"tags": ["parameters"]})
    words = new_markdown_cell(f"# Study {name}\n\n> A tiny study of $1 - R^N$, see @fig-curve.\n\n$$\nm = 1 - R^N\n$$ {{#eq-factor}}\n")
    cells = [words, tagged, *map(new_code_cell, sources)]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell{number}"
    kernel = {"kernelspec": {"name": "python3", "display_name": "python3", "language": "python"}}
    path = Path(root) / "nbs" / "experiments" / f"{name}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(new_notebook(cells=cells, metadata=kernel), path)
    return path


def write_study(root: Path, name: str, log: Path) -> Path:
    """A whole tiny experiment: cached cells (each computation adds a line to `log`), NaN, figure, table, verdicts."""
    return write_experiment(root, name, IMPORTS, SETUP.format(name=name), MEASURE.format(log=str(log)), JUDGE)
