"""The catalogue: every case by its id. What a case is says case.py."""

from __future__ import annotations

from support.cases import layers, losses, models, raw, refused, sequences, shared
from support.cases.case import Case

PARTS = {
    "layers": layers,
    "sequences": sequences,
    "raw": raw,
    "shared": shared,
    "models": models,
    "losses": losses,
}
CATALOGUE: dict[str, list[Case]] = {name: list(part.cases()) for name, part in PARTS.items()}
CASES: list[Case] = [case for part in CATALOGUE.values() for case in part]

# Models of which a sample's gradient depends on the others, each with the name of the module that couples them.
REFUSED: list[tuple[Case, str]] = list(refused.batch_statistics())

# Here either the right rows or an exception will do; wrong rows never.
EXACT_OR_REFUSED: list[Case] = list(refused.exact_or_refused())
