"""Where peers return a wrong number, or leave a parameter out, without an error or a warning; ours on the same cases.

Every call of a peer is tried on every case. The truth comes from loops over samples and plain autograd, all in float64.
The first table counts, the second has a line for each case in which calls of a peer are silently wrong.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from _report import markdown, options_of
from _silently_wrong_calls import CALLS, MOVED, Call, Named, NoCase
from _silently_wrong_cases import CASES
from torch import Tensor

TOLERANCE = 1e-6
OUTCOMES = "right", "raises", "warned", "wrong"
PEERS = {"backpack-for-pytorch": "BackPACK", "opacus": "Opacus", "curvlinops-for-pytorch": "curvlinops"}
PEERS |= {name: name for name in ("nngeometry", "laplace-torch", "singd", "torch")}
# Warnings that come with right results, too.
UNRELATED = "Full backward hook is firing", "There is a performance drop", "Using padding='same'", "`torch.jit"
OPACUS = "`GradSampleModule`", "ghost clipping (norms)"
GGN, HESSIAN, EF, KFAC = (f"`{kind}LinearOperator`" for kind in ("GGN", "Hessian", "EF", "KFAC"))
FULL, KRON, LAST = (f"`Laplace(..., {how})`" for how in ('"all", "full"', '"all", "kron"', 'hessian_structure="full"'))
FUNC, LAPLACIAN = "`torch.func.hessian`", "backward pass of the Laplacian (`torch.autograd`)"
# What the peers' documentation says, or one has to know; of which calls and cases.
SAID: list[tuple[str, Sequence[str], Sequence[str]]] = [
    ("documented: one factor for all groups of channels", [KFAC, KRON], ["grouped convolution"]),
    ("documented: the last layer has to be linear (of a function after it nothing is said)",
     [LAST], ["bounded regression", "temperature"]),
    ("documented in a private function: further axes count as samples",
     [EF], ["mean over tokens", "tokens folded into the batch", "logits folded into the batch"]),
    ("three times the formula in its documentation", [EF], ["several outputs"]),
    ("documented: trains what it supports; the warning about the rest that it promises does not come",
     [MOVED], ["position embedding", "learnt scale", "low rank adapter", "weight norm"]),
    ("documented: differences and gradients are not the same at this row", [FUNC], ["padding index"]),
    ("related: pytorch issue 196700", [FUNC], ["layer norm"]),
    ("pytorch issue 175754", [LAPLACIAN], ["physics informed network with layer norm"]),
    ("a sample's row depends on the others' labels",
     OPACUS, ["class weights", "unlabelled samples", "padded sentences"]),
    ("documented: the first axis of every layer's input is the batch", OPACUS, ["tokens folded into the batch"]),
    ("torch's forward mode; the matrix is not symmetric", [GGN, HESSIAN, EF, FULL], ["padding index"]),
    ("a second derivative of torch.func", [HESSIAN], ["layer norm", "instance norm"]),
]  # fmt: skip
NOTES = {(call, case): note for note, calls, cases in SAID for call in calls for case in cases}
short = lambda error: f"{type(error).__name__}: {' '.join(str(error).split())}"[:100]


named = lambda found: found if isinstance(found, dict) else {"": found}


def relative_error(found: Named | Tensor, truth: Named | Tensor) -> float:
    """Infinite where shapes differ."""
    found, truth = named(found), named(truth)
    difference = size = 0.0
    for name, wanted in truth.items():
        value = found.get(name, torch.zeros_like(wanted)).detach()
        if value.shape != wanted.shape:
            return float("inf")
        difference += float((value - wanted).square().sum())
        size += float(wanted.square().sum())
    return (difference / size) ** 0.5


@contextmanager
def heard() -> Iterator[list[str]]:
    """What is warned of or logged inside."""
    messages: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    listener = Listener(logging.WARNING)
    logging.getLogger().addHandler(listener)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield messages
        silent = DeprecationWarning | SyntaxWarning | FutureWarning | PendingDeprecationWarning
        texts = [str(w.message) for w in caught if not issubclass(w.category, silent)]
        messages += [text for text in texts if not text.startswith(UNRELATED)]
    finally:
        logging.getLogger().removeHandler(listener)


def finding(call: Call, found: Named, truth: Named, error: float) -> str:
    if call.name == MOVED:
        return "does not train " + ", ".join(f"`{name}`" for name in truth if not found[name])
    if error == float("inf"):
        name = next(name for name in truth if found[name].shape != truth[name].shape)
        size, wanted = len(found[name]), len(truth[name])
        return f"{size} rows for {wanted} samples" if name else f"a matrix of {size} parameters for {wanted}"
    return f"{100 * error:.2g} %" if error < 0.995 else f"{100 * error:.0f} %"


def attempt(call: Call, make: Any) -> dict[str, Any]:
    """The outcome of a call on a case: "right", "raises", "warned", "wrong" or "no case"."""
    try:
        truth = named(call.truth(make()))
    except NoCase as reason:
        return {"outcome": "no case", "why": str(reason)}
    case = make()
    with heard() as messages:
        try:
            found = named(call.theirs(case))
        except NoCase as reason:
            return {"outcome": "no case", "why": str(reason)}
        except Exception as error:
            result = {"outcome": "raises", "why": short(error)}
        else:
            result = {"outcome": "right"}
    if result["outcome"] == "right":
        error = relative_error(found, truth)
        if not error < TOLERANCE:
            result = {"outcome": "warned", "why": messages[0][:100]} if messages else wrong(call, make, found, truth)
    return {**result, **our_outcome(call, make)}


def wrong(call: Call, make: Any, found: Named, truth: Named) -> dict[str, Any]:
    error, name = relative_error(found, truth), make().name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        is_right = False
        with suppress(Exception):
            is_right = call.other is not None and relative_error(call.other(make()), truth) < TOLERANCE
    return {
        "outcome": "wrong",
        "error": None if error == float("inf") else error,
        "finding": finding(call, found, truth, error),
        "note": NOTES.get((call.name, name), ""),
        "right_with": call.other_name if is_right else "",
    }


def our_outcome(call: Call, make: Any) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = call.ours(make())
        except (ValueError, NotImplementedError, TypeError) as error:
            return {"ours": None, "ours_refused": short(error)}
    return {"ours": relative_error(found, (call.truth_of_ours or call.truth)(make()))}


@contextmanager
def settings() -> Iterator[None]:
    """Double precision and one thread inside; our log about fallbacks is off."""
    before, threads = torch.get_default_dtype(), torch.get_num_threads()
    ours = logging.getLogger("curvature"), logging.getLogger("optimizers")
    states = [log.disabled for log in ours]
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    try:
        for log in ours:
            log.disabled = True
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_num_threads(threads)
        for log, state in zip(ours, states, strict=True):
            log.disabled = state


def run(calls: list[Call]) -> list[dict[str, Any]]:
    rows = []
    with settings():
        for call in calls:
            for name, make in CASES.items():
                row = {"peer": call.peer, "call": call.name, "case": name, **attempt(call, make)}
                if row["outcome"] != "no case":
                    rows.append(row)
    return rows


def installed() -> dict[str, str]:
    found = {}
    for name in PEERS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            print(f"{name} is not installed", file=sys.stderr)
    return found


def cell(row: dict[str, Any]) -> str:
    """Ours."""
    if row["ours"] is None:
        return "refused: " + row["ours_refused"].partition(": ")[2].partition(";")[0].replace("|", "/")
    return f"right ({row['ours']:.0e})" if row["ours"] < TOLERANCE else f"WRONG ({row['ours']:.0e})"


def summary(rows: list[dict[str, Any]], versions: dict[str, str]) -> str:
    """One line for each peer, and one for ours on the same cases."""
    lines = []
    for peer, version in versions.items():
        own = [row for row in rows if row["peer"] == peer]
        counts = [sum(row["outcome"] == outcome for row in own) for outcome in OUTCOMES]
        lines.append(
            [f"{PEERS[peer]} {version}", str(len({row["call"] for row in own})), *map(str, [len(own), *counts])]
        )
    right = sum(row["ours"] is not None and row["ours"] < TOLERANCE for row in rows)
    refused = sum(row["ours"] is None for row in rows)
    lines.append(["ours", "the same", *map(str, [len(rows), right, refused, 0, len(rows) - right - refused])])
    head = ["", "calls", "calls on cases", "right", "raises", "wrong, with a warning", "silently wrong"]
    return markdown(head, lines)


def details(rows: list[dict[str, Any]], versions: dict[str, str]) -> str:
    """One line for each peer and case."""
    lines = []
    for peer, version in versions.items():
        title, own = f"{PEERS[peer]} {version}", [row for row in rows if row["peer"] == peer]
        found: dict[str, list[dict[str, Any]]] = {}
        for row in own:
            if row["outcome"] == "wrong":
                found.setdefault(CASES[row["case"]]().did, []).append(row)
        for did, calls in found.items():
            theirs = "; ".join(f"{row['call']} {row['finding']}" for row in calls)
            ours = max(calls, key=lambda row: row["ours"] or 0)
            lines.append([title, did, theirs, cell(ours), "; ".join(notes(calls))])
        if not found:
            lines.append([title, f"none found in the {len({row['case'] for row in own})} cases tried", "", "", ""])
    return markdown(["", "what the user did", "theirs, off by", "ours", "notes"], lines)


def notes(rows: list[dict[str, Any]]) -> list[str]:
    """Of one case; with the calls that each is about, unless it is about all."""
    about: dict[str, list[str]] = {}
    for row in rows:
        for note in (row["note"], row["right_with"] and f"right with {row['right_with']}"):
            if note:
                about.setdefault(note, []).append(row["call"])
    return [note if len(calls) == len(rows) else f"{', '.join(calls)}: {note}" for note, calls in about.items()]


def stored(rows: list[dict[str, Any]], versions: dict[str, str]) -> str:
    """As JSON, a result in each line."""
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    return f'{{"versions": {json.dumps(versions)},\n"results": [\n{lines}\n]}}\n'


def main() -> None:
    options = options_of(__doc__, only=list(PEERS), json=Path)
    versions = {peer: version for peer, version in installed().items() if peer in options.only}
    rows = run([call for call in CALLS if call.peer in versions])
    print(f"{summary(rows, versions)}\n\n{details(rows, versions)}")
    if options.json:
        options.json.write_text(stored(rows, versions), "utf-8")


if __name__ == "__main__":
    main()
