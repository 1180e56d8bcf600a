"""Sixteen families of problems: ours, with one configuration and nothing to set, against rivals tuned on each.

    pip install -e ".[bench]"                                            (or `make generality`)
    python tests/benchmarks/generality.py --families vit lstm --seeds 1  # two families, one seed
    python tests/benchmarks/generality.py --tune                         # tune all rivals anew: half an hour
    python tests/benchmarks/generality.py --optimizers sgd adamw muon soap --json out/rivals.json    # rivals alone
    python tests/benchmarks/generality.py --optimizers kfac --rivals out/rivals.json --curves        # ours alone
    python tests/benchmarks/generality.py --report --json out/generality.json --table out/generality.md

Rivals keep one learning rate, have no weight decay, and are tuned with seed 0 for the lowest training loss at the end
of the family's budget of CPU seconds, over half decades of the learning rate that go on while the best lies at their
end. `generality_tuned.json` has the grids. One thread; only zero_grad, forward, backward and step are on the clock.
All contestants of a seed share the process and take turns. With `--rivals`, ours are raced against runs of another
time, and their seconds brought to the pace that the machine had then, by steps of SGD taken in between.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from _contest import save_tuned, settings
from _generality_families import FAMILIES
from _generality_family import Family
from _generality_report import Result, figure, line, table
from _generality_run import GRIDS, Run, race, rank, tune
from _race_rivals import ENTRIES, Entry
from _race_run import WARM_UP
from _report import load, machine, save, words

import optimizers

TUNED = Path(__file__).with_name("generality_tuned.json")
NATURAL = Entry("natural", "NaturalGradient", lambda model, problem: optimizers.NaturalGradient(model))
OURS = {name: ENTRIES[name] for name in ("kfac", "ekfac", "adaptive")} | {NATURAL.name: NATURAL}
CONTESTANTS = {name: ENTRIES[name] for name in GRIDS} | OURS


def arguments(args: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--optimizers", nargs="+", choices=CONTESTANTS, help="default: the rivals, kfac and ekfac")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--tune", action="store_true", help="tune the rivals, save what was found, and stop")
    parser.add_argument("--report", action="store_true", help="run nothing: table and figure of what --json holds")
    parser.add_argument("--rivals", type=Path, help="take the rivals' runs from this file of another call's --json")
    parser.add_argument("--tuned", type=Path, default=TUNED, help="file of the tuned learning rates")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the budgets")
    parser.add_argument("--curves", action="store_true", help="print steps, seconds, losses and metrics of ours")
    parser.add_argument("--json", type=Path, help="file of all runs; families that it has already are replaced")
    parser.add_argument("--table", type=Path, help="write the tables, in Markdown")
    parser.add_argument("--figure", type=Path, help="draw the ratios")
    options = parser.parse_args(args)
    if options.optimizers is None:
        options.optimizers = [*([] if options.rivals else GRIDS), "kfac", "ekfac"]
    return options


def tune_all(options: argparse.Namespace, family: Family) -> None:
    for entry in (ENTRIES[name] for name in GRIDS if name in options.optimizers):
        trials = []
        for trial in tune(family, entry, options.scale * family.budget):
            trials.append(trial)
            print(
                f"{family.name:10s} {entry.name:6s} {words(trial.setting):10s} {trial.end:10s} {trial.loss:<10.4g} "
                f"{trial.steps} steps {trial.seconds:.2f} s",
                flush=True,
            )
        best = min(trials, key=rank)
        save_tuned(options.tuned, family.name, entry, best, trials, "cpu")


def race_all(options: argparse.Namespace, family: Family) -> Result:
    """
    Raises:
        SystemExit: a rival was not tuned, or the file of the rivals has no runs of this family and seed.
    """
    chosen = [entry for name, entry in CONTESTANTS.items() if name in options.optimizers]
    budget = options.scale * family.budget
    how = f"generality.py --tune --families {family.name} --optimizers"
    contestants = settings(options.tuned, family.name, chosen, how)
    for entry, setting in contestants.items():  # so that no clock pays for first calls
        run = Run(family, entry, setting, seed=0)
        run.advance(1e-3 * WARM_UP)
    result = Result(family.title, family.objective, family.metric, budget, machine("cpu"), [])
    earlier = load(options.rivals) if options.rivals else {}
    for seed in range(options.seeds):
        rivals = Result.read(earlier[family.name]).of(seed, ours=False) if family.name in earlier else []
        if options.rivals and not rivals:
            raise SystemExit(f"{options.rivals} has no runs of rivals on {family.name} with seed {seed}")
        result.records.extend(rivals)
        result.records.extend(race(family, contestants, seed, budget, rivals))
        for record in result.of(seed, ours=True) if options.curves else []:
            print(f"{family.name} {record.name} seed {seed}: steps, seconds, {family.objective}, test {family.metric}")
            for p in record.points:
                print(f"  {p.step:6.0f} {p.seconds:7.2f} {p.loss:10.4g} {p.metric:10.4g}")
        for scores in result.scores().values():
            print(line(family.name, scores[-1]), flush=True)
    return result


def report(options: argparse.Namespace, results: dict[str, Result]) -> None:
    if not any(result.scores() for result in results.values()):
        return
    label = lambda name: CONTESTANTS[name].label
    text = table(results, label)
    print(f"\n{text}")
    if options.table:
        options.table.write_text(text)
    if options.figure:
        figure(results, options.figure, label)


def main(args: Sequence[str] | None = None) -> None:
    options = arguments(args)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    saved = load(options.json) if options.json else {}
    results = {name: Result.read(result) for name, result in saved.items()}
    for name in [] if options.report else options.families:
        family = FAMILIES[name]()
        if options.tune:
            tune_all(options, family)
            continue
        results[name] = race_all(options, family)
        if options.json:
            save(options.json, {family: result.plain() for family, result in results.items()})
    if not options.tune:
        report(options, {name: results[name] for name in FAMILIES if name in results})


if __name__ == "__main__":
    main()
