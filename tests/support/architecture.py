"""The rules of the architecture: which package may import what, how long files are, what must be documented."""

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("curvature", "optimizers")
# A package imports only packages of lower floors, and only what their __init__ exports.
FLOORS = {
    "arguments": 0,
    "attempts": 0,
    "lazy": 0,
    "linalg": 1,
    "terms": 1,
    "functional": 1,
    "layers": 2,
    "losses": 2,
    "kronecker": 2,
    "recording": 3,
    "operators": 3,
    "gradients": 4,
    "estimators": 4,
    "structures": 4,
    "forward_laplacian": 4,
    "plots": 4,
    "matrices": 5,
    "preconditioners": 5,
    "uses": 6,
    "optimizers": 9,  # curvature.optimizers, another name of the package `optimizers`, which is on floor 8
}
# What may be imported from outside, beside the standard library and torch.
LIBRARIES = {
    "gradients": {"numpy"},  # its arrays: in messages, and as the indices of a sampler
    "operators": {"scipy"},
    "matrices": {"tqdm"},
    "uses": {"numpy", "tqdm"},
    "plots": {"matplotlib", "numpy"},
}
FILE_LINES, FUNCTION_LINES = 600, 60
VAGUE = {"found", "own"}  # names of variables that do not say what they hold
# Functions of torch that make tensors on the default device, which the user may have set to any.
FACTORIES = {"arange", "as_tensor", "empty", "eye", "full", "linspace", "logspace", "ones"}
FACTORIES |= {"rand", "randint", "randn", "randperm", "tensor", "zeros"}
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


def package_of(module: str) -> str:
    """The room that a module is in: "curvature.layers" for "curvature.layers.base", "optimizers" for all of these."""
    parts = module.removesuffix(".public").split(".")
    return ".".join(parts[: 2 if parts[0] == "curvature" else 1])


def outside(item: Import) -> str | None:
    library = item.module.split(".")[0]
    return None if library in sys.stdlib_module_names else library


def arrow_faults(modules: Mapping[str, Path], exported: Callable[[str], Iterable[str]]) -> Iterator[str]:
    """Imports that go up, sideways, past the __init__ of another package, or to libraries that it may not use."""
    for module, path in modules.items():
        here = package_of(module)
        room = here.partition(".")[2]
        if room and room not in FLOORS:
            yield f"{module} has no floor: add it to FLOORS in tests/support/architecture.py"
            continue
        for item in imports_of(module, path):
            target = item.among(modules)
            library = outside(item)
            if target is None:
                if library and library not in {"torch", *LIBRARIES.get(room, ())}:
                    yield f"{module} imports {library}, which {here} may not"
            elif package_of(target) != here:
                yield from _crossing_faults(module, item, package_of(target), exported)


def _crossing_faults(module: str, item: Import, there: str, exported: Callable[[str], Iterable[str]]) -> Iterator[str]:
    here = package_of(module)
    floor = lambda package: {"curvature": 7, "optimizers": 8}.get(package) or FLOORS.get(package.partition(".")[2], 0)
    if floor(there) >= floor(here):
        yield f"{module} (floor {floor(here)}) imports {there} (floor {floor(there)})"
    elif f"{item.module}.{item.name}" != there and (item.module != there or item.name not in exported(there)):
        yield f"{module} imports {item.module} {item.name}, which {there} does not export"


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


def hidden_imports(modules: Mapping[str, Path]) -> Iterator[str]:
    """Imports at run time, which `imports_of` cannot see: `curvature.lazy` alone makes them, for the public faces."""
    for module, path in modules.items():
        if module == "curvature.lazy":
            continue
        imports = {item.module.split(".")[0] for item in imports_of(module, path)}
        names = {
            node.id for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Name)
        }
        for name in sorted({"importlib", "pkgutil", "runpy"} & imports | {"__import__"} & names):
            yield f"{module} uses {name}, which hides what it imports: import it by a statement"


def hidden_changes(paths: Iterable[Path]) -> Iterator[str]:
    """Attributes that are set by a dict, overrides that types refuse, errors that vanish without a log."""
    for path in paths:
        text = path.read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines(), 1):
            if re.search(r"vars\(.*\)\.update|__dict__\.update", line):
                yield f"{path.name}:{number} sets attributes that nobody can find: set them by name"
            if "type: ignore[override]" in line:
                yield f"{path.name}:{number} overrides what its base has with something else"
        for node in ast.walk(ast.parse(text)):
            catches_all = isinstance(node, ast.ExceptHandler) and (
                not node.type or ast.unparse(node.type) == "Exception"
            )
            if catches_all and all(isinstance(inner, ast.Pass | ast.Continue) for inner in node.body):
                yield f"{path.name}:{node.lineno} swallows every error without a log"


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


def name_faults(paths: Iterable[Path]) -> Iterator[str]:
    """Variables and arguments whose names do not say what they hold."""
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_bound = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            name = node.id if is_bound else node.arg if isinstance(node, ast.arg) else ""
            if name in VAGUE:
                yield f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name}:{node.lineno} {name}"


def device_faults(paths: Iterable[Path]) -> Iterator[str]:
    """Tensors that are made without a word where; keywords in a dict count as one."""
    names = {f"torch.{name}" for name in FACTORIES}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or {None, "device"} & {keyword.arg for keyword in node.keywords}:
                continue
            if (name := ast.unparse(node.func)) in names:
                yield f"{path.name}:{node.lineno} {name} without a device is wherever the user's default is"


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
