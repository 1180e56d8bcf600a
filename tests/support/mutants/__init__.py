"""Wrong versions of formulas: a file for each package of `curvature`, one for `optimizers`; see run_mutants.py."""

from __future__ import annotations

import importlib
import pkgutil

from .mutant import Mutant

__all__ = ["MUTANTS", "Mutant"]

_FILES = sorted({module.name for module in pkgutil.iter_modules(__path__)} - {"mutant"})
MUTANTS: list[Mutant] = [mutant for file in _FILES for mutant in importlib.import_module(f"{__name__}.{file}").MUTANTS]
