"""The list of mutants follows the code: each changes one formula that is there."""

from __future__ import annotations

import ast

import pytest

from support.architecture import ROOT
from support.mutants import MUTANTS


@pytest.mark.parametrize("file", sorted({mutant.file for mutant in MUTANTS}))
def test_mutants_can_be_applied(file: str) -> None:
    text = (ROOT / file).read_text("utf-8")
    for mutant in MUTANTS:
        if mutant.file == file:
            assert text.count(mutant.old) == 1, f"{text.count(mutant.old)} times in {file}: {mutant.old}"
            changed = ast.parse(text.replace(mutant.old, mutant.new))
            assert ast.dump(changed) != ast.dump(ast.parse(text)), mutant
            assert all((ROOT / "tests" / test).exists() for test in mutant.tests), mutant


def test_there_are_many() -> None:
    assert len(set(MUTANTS)) == len(MUTANTS) >= 60
