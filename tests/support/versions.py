"""Build sdist and wheel, install the wheel into empty environments of several versions, run a smoke test there.

    python tests/support/versions.py                          # the wheel, and a smoke test with this Python, as users
                                                              # install it: without constraints.txt, the newest torch
    python tests/support/versions.py 3.10:2.11.0 3.13:2.15.0  # Python:torch, and the tests marked `fast` as well

`python3.10` and so on have to be on the PATH; pip gets torch from where it is configured to. Environments are made anew
in build/versions.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "build" / "versions"
TEST_NEEDS = ("pytest", "pytest-xdist", "scikit-learn", "types-tqdm")


def run(*command: object, **options: object) -> None:
    print("+", *command, flush=True)
    subprocess.run([str(part) for part in command], check=True, **options)  # type: ignore[call-overload]


def environment(name: str, python: str) -> Path:
    """A new virtual environment's Python."""
    place = PLACE / name
    shutil.rmtree(place, ignore_errors=True)
    run(python, "-m", "venv", place)
    return place / "bin" / "python"


def build(place: Path, *options: str) -> Path:
    """The wheel, built from the sdist; both are new in this place."""
    shutil.rmtree(place, ignore_errors=True)
    run(sys.executable, "-m", "build", *options, "--outdir", place, ROOT)
    (wheel,) = place.glob("*.whl")
    return wheel


def try_out(wheel: Path, python: Path, torch: list[str], fast: bool) -> None:
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, *torch, wheel)
    # isolated and elsewhere: the checkout cannot be imported
    run(python, "-I", ROOT / "tests" / "support" / "smoke.py", cwd=PLACE, env={"MPLBACKEND": "Agg"})
    if fast:
        run(*pip, *TEST_NEEDS)
        files = [path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.fast" in path.read_text("utf-8")]
        env = {"MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
        run(python, "-m", "pytest", "-q", "-n", "2", "-m", "fast", *files, cwd=ROOT, env=env)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="PYTHON:TORCH", help="an empty TORCH is the newest")
    chosen = parser.parse_args().versions
    wheel = build(PLACE / "dist")
    if not chosen:
        try_out(wheel, environment("here", sys.executable), [], fast=False)
    for version in chosen:
        python, _, torch = version.partition(":")
        found = shutil.which(f"python{python}")
        if found is None:
            raise SystemExit(f"python{python} is not on the PATH")
        try_out(
            wheel, environment(version.replace(":", "-"), found), [f"torch=={torch}" if torch else "torch"], fast=True
        )


if __name__ == "__main__":
    main()
