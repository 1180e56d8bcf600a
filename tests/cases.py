"""The catalogue: every case by its id. What a case is says case.py."""

from __future__ import annotations

import cases_layers
import cases_losses
import cases_models
import cases_raw
import cases_refused
import cases_sequences
import cases_shared
from case import Case

PARTS = {
    "layers": cases_layers,
    "sequences": cases_sequences,
    "raw": cases_raw,
    "shared": cases_shared,
    "models": cases_models,
    "losses": cases_losses,
}
CATALOGUE: dict[str, list[Case]] = {name: list(part.cases()) for name, part in PARTS.items()}
CASES: list[Case] = [case for part in CATALOGUE.values() for case in part]

# Models of which a sample's gradient depends on the others, each with the name of the module that couples them.
REFUSED: list[tuple[Case, str]] = list(cases_refused.batch_statistics())

# Here either the right rows or an exception will do; wrong rows never.
EXACT_OR_REFUSED: list[Case] = list(cases_refused.exact_or_refused())
