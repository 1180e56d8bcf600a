"""The pictures of docs/guides/plots.md: each shows the figure that the code above it has drawn last.

python tests/support/guide_pictures.py        # writes them anew; then look at them
"""

import re
from pathlib import Path
from typing import Any

import matplotlib

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "plots.md"
PART = re.compile(r"^```python\n(?P<code>.*?)^```$|^!\[[^\]]+\]\((?P<picture>\S+)\)$", re.MULTILINE | re.DOTALL)


def names() -> list[str]:
    return [part["picture"] for part in PART.finditer(GUIDE.read_text("utf-8")) if part["picture"]]


def draw() -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    space: dict[str, Any] = {}
    for part in PART.finditer(GUIDE.read_text("utf-8")):
        if part["code"]:
            plt.close("all")
            exec(part["code"], space)
        else:
            path = GUIDE.parent / part["picture"]
            path.parent.mkdir(exist_ok=True)
            plt.gcf().savefig(path, dpi=85, metadata={"Software": None}, pil_kwargs={"optimize": True})


if __name__ == "__main__":
    draw()
