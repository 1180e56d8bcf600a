"""Packages that import their public names when one is first used, so that importing them costs nothing (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

__all__ = ["VERSION", "on_first_use"]
VERSION = "1.0.0"  # of both packages


def on_first_use(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package whose public names are those of its module ``public``."""

    def get(name: str) -> Any:
        if name.startswith("__") and name != "__all__":  # asked by tools of every module
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if find_spec(f"{package}.{name}"):  # also while the public names are being imported
            return importlib.import_module(f"{package}.{name}")
        public = importlib.import_module(f"{package}.public")
        if name == "__all__" or name in public.__all__:
            for own in ("__all__", *public.__all__):
                setattr(sys.modules[package], own, getattr(public, own))
            return getattr(public, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *get("__all__")})

    return get, names
