"""The arrows point down, files and functions stay small, the top level stays bare, public names are documented."""

from __future__ import annotations

import ast
import graphlib
import importlib
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("curvature", "optimizers")

# A module imports only modules of lower levels; the modules of one package named here may import each other.
# A new module is added here, at the lowest level that its imports allow.
LEVELS = {
    "curvature.arrangement": 0,
    "curvature.contractions": 1,
    "curvature.compiled": 0,
    "curvature.parts": 0,
    "curvature.lossfunctions": 0,
    "curvature.likelihoods": 0,
    "curvature.inverses": 2,
    "curvature.lowrank": 1,
    "curvature.sketch": 1,
    "curvature.formulas": 0,
    "curvature.jacobian": 0,
    "curvature.linalg": 0,
    "curvature.losses": 0,
    "curvature.terms": 0,
    "curvature.place": 0,
    "curvature.written_out": 1,
    "curvature.batch": 1,
    "curvature.moments": 2,
    "curvature.outliers": 2,
    "curvature.block": 3,
    "curvature.blocks": 4,
    "curvature.prepared": 5,
    "curvature.layers": 1,
    "curvature.tape": 2,
    "curvature.capture": 3,
    "curvature.general": 2,
    "curvature.injection": 2,
    "curvature.roots": 1,
    "curvature.squares": 2,
    "curvature.operators": 1,
    "curvature.kronecker": 2,
    "curvature.estimators": 2,
    "curvature.graph": 3,
    "curvature.kroneckersum": 3,
    "curvature.matrixfree": 3,
    "curvature.structure": 3,
    "curvature.turned": 3,
    "curvature.accumulators": 4,
    "curvature.eigenblocks": 5,
    "curvature.study": 4,
    "curvature.taylor": 4,
    "curvature.factors": 6,
    "curvature.gradients": 5,
    "curvature.laplacian": 5,
    "curvature.stream": 5,
    "curvature.collect": 6,
    "curvature.narrow": 6,
    "curvature.products": 6,
    "curvature.derivatives": 6,
    "curvature.matrices": 7,
    "curvature.leastsquares": 7,
    "curvature.residualblocks": 7,
    "curvature.wholeblocks": 8,
    "curvature.wholecurvature": 9,
    "curvature.plots": 10,
    "curvature": 11,
}
# What a level may import from outside, beside the standard library.
LIBRARIES = {
    **dict.fromkeys(range(4), {"torch"}),
    **dict.fromkeys(range(4, 10), {"torch", "numpy", "tqdm"}),
    10: {"torch", "numpy", "tqdm", "matplotlib"},
    11: set[str](),
}
OPTIMIZER_LIBRARIES = {"torch"}
FILE_LINES, FUNCTION_LINES = 400, 60
TOP_LEVEL = {
    ".ci",
    ".gitignore",
    "CHANGELOG.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "constraints.txt",
    "curvature",
    "docs",
    "examples",
    "optimizers",
    "pyproject.toml",
    "tests",
}


@dataclass(frozen=True)
class Import:
    """`module` as it stands in the import statement, made absolute, and the `name` taken from it, if any."""

    module: str
    name: str = ""

    def among(self, modules: Iterable[str]) -> str | None:
        """The longest of `modules` that this import loads, or None where it goes elsewhere."""
        parts = f"{self.module}.{self.name}".strip(".").split(".")
        prefixes = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        return next((prefix for prefix in prefixes if prefix in modules), None)


def modules_of(root: Path, packages: Iterable[str] = PACKAGES) -> dict[str, Path]:
    found = {}
    for path in (path for package in packages for path in sorted((root / package).rglob("*.py"))):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(module: str, path: Path) -> Iterator[Import]:
    """All of them: at the top, inside functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") + ([""] if path.name == "__init__.py" else [])
                base = ".".join([*package[: -node.level], *filter(None, [base])])
            yield from (Import(base, alias.name) for alias in node.names)


def attributes_of(library: str, path: Path) -> list[str]:
    """The names x in `library.x`, under whatever alias the library was imported."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = [alias for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    aliases = {alias.asname or library for alias in names if alias.name == library}
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    return [node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id in aliases]


def level_key(module: str) -> str | None:
    """The entry of LEVELS that covers `module`: itself, or a package inside curvature that it belongs to."""
    if module == "curvature":
        return module
    return next((key for key in LEVELS if key != "curvature" and f"{module}.".startswith(f"{key}.")), None)


def outside(item: Import) -> str | None:
    library = item.module.split(".")[0]
    return None if library in sys.stdlib_module_names else library


def curvature_faults(modules: Mapping[str, Path]) -> Iterator[str]:
    for module, path in modules.items():
        if not f"{module}.".startswith("curvature."):
            continue
        key = level_key(module)
        if key is None:
            yield f"{module} has no level: add it to LEVELS in tests/test_architecture.py"
            continue
        for item in imports_of(module, path):
            target = item.among(modules)
            if target is None:
                library = outside(item)
                if library and library not in LIBRARIES[LEVELS[key]]:
                    yield f"{module} imports {library}, which level {LEVELS[key]} may not"
            elif not target.startswith("curvature"):
                yield f"{module} imports {target}: curvature knows nothing of the optimizers"
            else:
                below = level_key(target)
                if below is not None and below != key and LEVELS[below] >= LEVELS[key]:
                    yield f"{module} (level {LEVELS[key]}) imports {target} (level {LEVELS[below]})"


def optimizer_faults(modules: Mapping[str, Path], public: Iterable[str]) -> Iterator[str]:
    for module, path in modules.items():
        if not f"{module}.".startswith("optimizers."):
            continue
        for item in imports_of(module, path):
            library = outside(item)
            if library == "curvature":
                if item.module != "curvature" or (item.name and item.name not in public):
                    yield f"{module} imports {item.module} {item.name}: not a public name of curvature"
            elif library not in {None, "optimizers", *OPTIMIZER_LIBRARIES}:
                yield f"{module} imports {library}, which the optimizers may not"
        for name in attributes_of("curvature", path):
            if name not in public:
                yield f"{module} uses curvature.{name}: not a public name of curvature"


def cycle_of(modules: Mapping[str, Path]) -> list[str]:
    """The modules of one import cycle, or nothing."""
    graph = {
        module: {target for item in imports_of(module, path) if (target := item.among(modules))} - {module}
        for module, path in modules.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def size_faults(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        text = path.read_text(encoding="utf-8")
        lines = len(text.splitlines())
        if lines > FILE_LINES:
            yield f"{path.name} has {lines} lines, more than {FILE_LINES}"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > FUNCTION_LINES:
                    yield f"{path.name}:{node.lineno} {node.name} has {length} lines, more than {FUNCTION_LINES}"


def top_level(root: Path) -> set[str]:
    """The first path component of everything that git tracks or would add."""
    listing = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    command = ["git", "-c", "safe.directory=*", "-C", str(root), *listing]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
    return {name.split("/")[0] for name in names if name}


def undocumented(package: ModuleType) -> list[str]:
    """Public names without a docstring of their own (what a dataclass writes for itself is none)."""

    def missing(name: str) -> bool:
        text = getattr(getattr(package, name), "__doc__", None) or ""
        return not text.strip() or text.startswith(f"{name}(")

    return [name for name in package.__all__ if missing(name)]


def assert_none(faults: Iterable[str]) -> None:
    found = list(faults)
    assert not found, "\n".join(found)


def test_curvature_arrows_point_down() -> None:
    assert_none(curvature_faults(modules_of(ROOT)))


def test_optimizers_use_public_names_only() -> None:
    public = importlib.import_module("curvature").__all__
    assert_none(optimizer_faults(modules_of(ROOT), public))


def test_no_cycles() -> None:
    assert_none(cycle_of(modules_of(ROOT)))


def test_files_and_functions_are_small() -> None:
    folders = ("curvature", "optimizers", "tests", "examples")
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert_none(size_faults(paths))


def test_top_level_is_bare() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    assert_none(sorted(top_level(ROOT) - TOP_LEVEL))


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_are_documented(package: str) -> None:
    assert_none(undocumented(importlib.import_module(package)))
