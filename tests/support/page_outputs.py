"""What the python blocks of README and Start print, in the text blocks behind them.

python tests/support/page_outputs.py        # writes them anew
"""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs" / "index.md"]
BLOCK = re.compile(r"(?P<code>^```python\n(?P<lines>.*?)^```\n)(?P<shown>\n```text\n(?P<text>.*?)^```\n)?", re.M | re.S)
SECONDS = re.compile(r"(?<=seconds so far: ).*")
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def with_outputs(page: str) -> str:
    """The page with what its blocks print here, without times; one that prints nothing has no text block."""
    space: dict[str, Any] = {"__name__": "__main__"}

    def run(match: re.Match[str]) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(match["lines"], space)
        text = SECONDS.sub("...", printed.getvalue())
        return match["code"] + (f"\n```text\n{text}```\n" if text else "")

    return BLOCK.sub(run, page)


def outputs(page: str) -> str:
    return "".join(match["text"] or "" for match in BLOCK.finditer(page))


def agree(shown: str, printed: str) -> bool:
    """The same words, and numbers that another processor's rounding would explain: it leads training runs apart."""
    if NUMBER.sub("#", shown).split() != NUMBER.sub("#", printed).split():
        return False
    pairs = zip(map(float, NUMBER.findall(shown)), map(float, NUMBER.findall(printed)), strict=True)
    return all(max(a, b) <= 3 * min(a, b) for a, b in pairs)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(with_outputs(path.read_text("utf-8")), "utf-8")
