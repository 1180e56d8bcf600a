"""The python blocks of a markdown page, as one program."""

import re
from typing import Any

from support.architecture import ROOT

FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>\S*)")
HEADING = re.compile(r"^## (?P<title>.*)")


def script_of(markdown: str) -> str:
    """The python blocks with every other line blank, so that a traceback shows the line number of the document."""
    script, opened = [], None
    for line in markdown.splitlines():
        fence = FENCE.match(line)
        code = ""
        if opened is None:
            opened = fence
        elif fence and fence["ticks"] == opened["ticks"] and not fence["language"]:
            opened = None
        elif opened["language"] == "python":
            code = line.removeprefix(opened["indent"])
        script.append(code)
    return "\n".join(script) + "\n"


def sections(markdown: str) -> dict[str, str]:
    """By the title of each second heading that has python blocks, the page with all other sections left blank.

    What stands above the first of these headings belongs to all.
    """
    lines = markdown.splitlines()
    starts = [k for k, line in enumerate(lines) if HEADING.match(line)]
    found = {}
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        if script_of("\n".join(lines[start:end])).strip():
            kept = [line if k < starts[0] or start <= k < end else "" for k, line in enumerate(lines)]
            found[HEADING.match(lines[start])["title"]] = "\n".join(kept)
    return found


def run_here(page: str, markdown: str) -> None:
    """Run the blocks in this process, which may have imported what they need; `page` is a path below docs/."""
    variables: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(script_of(markdown), str(ROOT / "docs" / page), "exec"), variables)


def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text("utf-8")
