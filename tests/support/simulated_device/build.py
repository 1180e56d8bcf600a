"""The compiled kernels of the simulated device: one call of the C++ compiler, kept beside torch's other extensions."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch
from torch.utils import cpp_extension

SOURCE = Path(__file__).with_name("simdev.cpp")
NAME = "simdev_kernels"


class Unavailable(ImportError):
    """The kernels cannot be compiled here."""


def built() -> Path:
    """The compiled kernels; the first process that asks compiles them, the others wait."""
    source = SOURCE.read_bytes()
    version = f"{torch.__version__}-py{sys.version_info[0]}{sys.version_info[1]}"
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    folder = root / f"{NAME}-{version}-{hashlib.sha256(source).hexdigest()[:12]}"
    found = folder / f"{NAME}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            unfinished = found.with_suffix(".part")
            _compile(unfinished)
            unfinished.replace(found)
    return found


def _compile(target: Path) -> None:
    """One call of the compiler, some 50 s."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise Unavailable(f"the simulated device needs a C++ compiler, and there is no {compiler} here")
    python = sysconfig.get_path("include")
    if not Path(python, "Python.h").exists():
        raise Unavailable(f"the simulated device needs Python's headers, and there is no Python.h in {python}")
    headers = [*cpp_extension.include_paths(), python]
    libraries = cpp_extension.library_paths()
    command = [
        compiler, "-std=c++20", "-O1", "-w", "-fPIC", "-shared", str(SOURCE), "-o", str(target),
        f"-DTORCH_EXTENSION_NAME={NAME}", "-DTORCH_API_INCLUDE_EXTENSION_H",
        *(part for path in headers for part in ("-isystem", path)),
        *(f"-L{path}" for path in libraries), "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{compiler} does not compile {SOURCE.name}: {done.stderr[-2000:]}")


if __name__ == "__main__":
    with contextlib.suppress(Unavailable):  # the tests that need it say why they are skipped
        built()
