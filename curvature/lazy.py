"""Packages that import their public names when one is first used, so that importing them costs nothing (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["VERSION", "import_beside", "on_first_use"]
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
            for public_name in ("__all__", *public.__all__):
                setattr(sys.modules[package], public_name, getattr(public, public_name))
            return getattr(public, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *get("__all__")})

    return get, names


def import_beside(name: str) -> ModuleType:
    """The package of that name in the folder that has `curvature`, even where a module of that name hides it.

    Where it is hidden, all of it is imported now and leaves `sys.modules` again, which the other module keeps: then
    ``import name`` is the other one, before and after.
    """
    source = Path(__file__).resolve().parents[1] / name / "__init__.py"
    visible = sys.modules[name].__spec__ if name in sys.modules else find_spec(name)
    if visible and visible.origin and Path(visible.origin).resolve() == source:
        return importlib.import_module(name)
    spec = spec_from_file_location(name, source, submodule_search_locations=[str(source.parent)])
    assert spec and spec.loader
    others = _take_out(name)
    package = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(package)
        package.__all__  # noqa: B018  (sets all public names)
    finally:
        _take_out(name)
        sys.modules.update(others)
    return package


def _take_out(name: str) -> dict[str, ModuleType]:
    """Of a package with its modules, from `sys.modules`."""
    return {module: sys.modules.pop(module) for module in [*sys.modules] if module.partition(".")[0] == name}
