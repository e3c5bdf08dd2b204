"""Small trees with one planted fault, to show that a check finds it."""
import base64
import json
import stat
from pathlib import Path

KERNEL = {"display_name": "python3", "language": "python", "name": "python3"}
TITLE = "# A title\n\n> A claim in one sentence."
PIXEL = ("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGNgYGBgAAAABQABh6FO1AAAAABJRU5ErkJggg==")


def markdown(source: str) -> dict:
    """A markdown cell."""
    return {"cell_type": "markdown", "metadata": {}, "source": source}


def code(source: str, outputs: list = (), tags: list = ()) -> dict:
    """A code cell with stored outputs."""
    return {"cell_type": "code", "metadata": {"tags": list(tags)} if tags else {}, "source": source,
            "outputs": list(outputs), "execution_count": None}


def text_output(text: str) -> dict:
    """What a print stored."""
    return {"output_type": "stream", "name": "stdout", "text": text}


def picture(num_bytes: int = 0) -> dict:
    """A stored PNG; with num_bytes, one of about that size."""
    data = base64.b64encode(bytes(num_bytes)).decode() if num_bytes else PIXEL
    return {"output_type": "display_data", "metadata": {}, "data": {"image/png": data, "text/plain": "<Figure>"}}


def plant(root: Path, name: str, *cells: dict, title: str = TITLE, kernel: dict = KERNEL) -> Path:
    """Write a notebook under root; a title cell comes first unless title is empty."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    cells = ([markdown(title)] if title else []) + list(cells)
    cells = [cell | {"id": f"cell-{number}"} for number, cell in enumerate(cells)]
    metadata = {"kernelspec": kernel} if kernel else {}
    path.write_text(json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}))
    return path


def plant_file(root: Path, name: str, text: str) -> Path:
    """Write any text file under root."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def script(path: Path, body: str) -> Path:
    """An executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return path
