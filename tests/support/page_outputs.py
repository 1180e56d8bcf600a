"""What the python blocks of README, Start and some guides print, in the text blocks behind them.

python tests/support/page_outputs.py                        # writes them anew
python tests/support/page_outputs.py docs/guides/scale.md   # of these pages alone
"""

import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GUIDES = (
    *("adapters", "attribution", "choosing", "compression", "derivatives", "laplace", "merging", "operators"),
    *("optimizers", "privacy", "projections", "reports", "step_rules"),
)
PAGES = [ROOT / "README.md", ROOT / "docs/index.md", *(ROOT / f"docs/guides/{name}.md" for name in GUIDES)]
BLOCK = re.compile(r"(?P<code>^```python\n(?P<lines>.*?)^```\n)(?P<shown>\n```text\n(?P<text>.*?)^```\n)?", re.M | re.S)
SECONDS = re.compile(r"(?<=seconds so far: ).*")  # whose numbers are not shown
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]\d+)?")


def with_outputs(page: str, name: str = "page") -> str:
    """The page with what its blocks print here, without times; one that prints nothing has no text block."""
    space: dict[str, Any] = {"__name__": "__main__"}

    def run(match: re.Match[str]) -> str:
        above = page.count("\n", 0, match.start("lines"))  # so that a traceback has the line number of the page
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile("\n" * above + match["lines"], name, "exec"), space)
        text = SECONDS.sub(lambda seconds: NUMBER.sub("...", seconds[0]), printed.getvalue())
        return match["code"] + (f"\n```text\n{text}```\n" if text else "")

    return BLOCK.sub(run, page)


def lines_agree(shown: str, printed: str) -> bool:
    """Whether what is shown is some of the printed lines, in their order: frameworks print lines of their own."""
    lines = iter(printed.splitlines())
    return all(any(agree(line, other) for other in lines) for line in shown.splitlines())


def outputs(page: str) -> str:
    return "".join(match["text"] or "" for match in BLOCK.finditer(page))


def agree(shown: str, printed: str) -> bool:
    """The same words, and numbers that another processor's rounding would explain: it leads training runs apart.

    What is shown as a power of ten is small because something converged, and may be further off.
    """
    if NUMBER.sub("#", shown).split() != NUMBER.sub("#", printed).split():
        return False
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
    factor = lambda pair: 300 if "e" in "".join(pair) else 3
    return all(max(map(float, pair)) <= factor(pair) * min(map(float, pair)) for pair in pairs)


if __name__ == "__main__":
    for path in [Path(name).resolve() for name in sys.argv[1:]]:
        with tempfile.TemporaryDirectory() as folder:  # for the files that a block writes
            os.chdir(folder)
            path.write_text(with_outputs(path.read_text("utf-8"), str(path)), "utf-8")
            os.chdir(ROOT)
    if len(sys.argv) == 1:
        for path in PAGES:  # each in a process of its own: some change torch's settings
            subprocess.run([sys.executable, __file__, path], check=True)
