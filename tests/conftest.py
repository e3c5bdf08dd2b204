"""Settings that every test shares: no network, no window, one thread, reproducible examples."""
import logging
import os

for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
os.environ.setdefault("PRIVFL_OFFLINE", "1")
os.environ["MPLBACKEND"] = "Agg"
os.environ["TQDM_DISABLE"] = "1"

import matplotlib
import pytest
import torch
from hypothesis import settings

from hygiene_rules import skipped_cells
from notebook_tools import ROOT

matplotlib.use("Agg")
torch.set_num_threads(1)
settings.register_profile("privfl", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("privfl")
logging.getLogger("absl").setLevel(logging.ERROR)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--full` adds the heavy tests."""
    parser.addoption("--full", action="store_true", help="run the tests marked `full` too (make test-full)")


def pytest_configure(config: pytest.Config) -> None:
    """Declare our markers."""
    config.addinivalue_line("markers", "full: heavy, outside continuous integration; runs with --full")
    config.addinivalue_line("markers", "slow: takes more than ten seconds; runs by default")


def pytest_collection_modifyitems(config: pytest.Config, items: list) -> None:
    """Leave the heavy tests out unless they were asked for."""
    if config.getoption("--full"):
        return
    heavy = [item for item in items if item.get_closest_marker("full")]
    if heavy:
        config.hook.pytest_deselected(items=heavy)
        items[:] = [item for item in items if item not in heavy]


def pytest_report_header(config: pytest.Config) -> str:
    """Cells that a notebook run would skip are shown, never silent (trap 18)."""
    skipped = skipped_cells(ROOT)
    return "\n".join([f"notebook cells marked to be skipped: {len(skipped)}"] + [f"  {item}" for item in skipped])
