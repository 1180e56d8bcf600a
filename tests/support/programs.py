"""Runs functions as programs of their own, forked from a process that has imported torch."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.distributed.processes import forkserver


def run(function: Callable[..., Any], *arguments: Any, folder: Path) -> SimpleNamespace:
    """The exit status and what was written, by ``function(*arguments)`` in `folder`."""
    process = forkserver().Process(target=_program, args=(folder, function, arguments))
    process.start()
    process.join()
    out, err = ((folder / stream).read_text("utf-8") for stream in ("stdout", "stderr"))
    return SimpleNamespace(returncode=process.exitcode, stdout=out, stderr=err)


def _program(folder: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.chdir(folder)
    os.environ["MPLBACKEND"] = "Agg"
    for number, stream in ((1, "stdout"), (2, "stderr")):
        with open(stream, "wb") as file:
            os.dup2(file.fileno(), number)
    function(*arguments)


def run_cells(cells: list[tuple[str, str]]) -> None:
    """The cells (name, source) of a notebook in turn; its figures are drawn."""
    import matplotlib.pyplot as plt

    variables = {"__name__": "__main__"}
    for name, source in cells:
        exec(compile(source, name, "exec"), variables)
        for number in plt.get_fignums():
            plt.figure(number).canvas.draw()
        plt.close("all")
