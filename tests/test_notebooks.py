"""Every teaching notebook runs from top to bottom, within its cap, and stores what running it shows."""
import os
import time

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from notebook_tools import ROOT, notebook_paths
from planting import code, plant

# A teaching notebook takes at most 20 s on an idle core. The limit only ends what hangs: a busy machine may be
# several times slower, and no test reads a clock.
CAP_S = 20
LIMIT_S = 9 * CAP_S


def execute(path, limit_s: float = LIMIT_S) -> nbformat.NotebookNode:
    """Run a notebook in its own folder; all its cells together have the limit."""
    notebook = nbformat.read(path, as_version=4)
    end = time.monotonic() + limit_s
    client = NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}},
                            timeout_func=lambda cell: max(1, int(end - time.monotonic())))
    return client.execute(env=os.environ | {"MPLBACKEND": "module://matplotlib_inline.backend_inline"})


def shown(cell: nbformat.NotebookNode) -> list:
    """The kinds of result that a cell shows, printed text left out."""
    return sorted(tuple(sorted(output.data)) for output in cell.outputs if "data" in output)


@pytest.mark.slow
@pytest.mark.parametrize("path", notebook_paths(ROOT, "teaching"), ids=lambda path: path.stem)
def test_notebook_runs_and_stores_what_it_shows(path):
    stored = nbformat.read(path, as_version=4)
    executed = execute(path)
    stale = [number for number, (before, after) in enumerate(zip(stored.cells, executed.cells))
             if before.cell_type == "code" and shown(before) != shown(after)]
    assert not stale, f"cells {stale} of {path.name} store another kind of output than they show: run it again"


def test_a_failing_cell_is_an_error(tmp_path):
    with pytest.raises(CellExecutionError, match="broken"):
        execute(plant(tmp_path, "nbs/01_bad.ipynb", code("raise ValueError('broken')")))


def test_a_cell_that_hangs_is_ended(tmp_path):
    with pytest.raises(CellTimeoutError):
        execute(plant(tmp_path, "nbs/01_bad.ipynb", code("while True:\n    pass")), limit_s=2)
