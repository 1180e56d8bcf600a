"""The plan of a batch of one sample. All entries are that sample's there, so nothing shows where a batch has samples.

Terms would be right all the same, but Kronecker factors need to know: a table of positions that all samples read has
none. It shows in a batch of the sample and its copy.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from curvature.gradients.batch import Batch
from curvature.gradients.learning import learn, single_sample_reference
from curvature.gradients.plans import PLANS, Plan, keep_plan, record, signature_of
from curvature.layers import Layout
from curvature.linalg import full_precision
from curvature.recording import Tape, Use, map_tensors

log = logging.getLogger("curvature")


@full_precision()
def plan_beside_copy(batch: Batch, tape: Tape) -> Plan | None:
    """The plan of a batch of one sample; None where none is found, as for a model that runs on one sample alone."""
    known, signature = PLANS.get(batch.model, {}), signature_of(tape)
    if (batch.key, signature) in known or batch.is_uneven or tape.start is None:
        return known.get((batch.key, signature))
    dim, key = batch.dims[0], (batch.key, "beside its copy")  # of samples that never meet, so for no other batch
    twice = lambda t: torch.cat([t, t], dim) if t.ndim > dim and t.shape[dim] == 1 else t
    two = replace(batch, x=map_tensors(twice, batch.x), count=2)
    try:
        with tape.start.again():
            beside, output, _ = record(two)
            probed = two.probe(output)
            learn(batch.model, key, beside, probed.losses(output), single_sample_reference(probed, False))
    except Exception as error:  # whatever a model raises that does not run on two samples
        log.info("not compared with the sample beside its copy: %s", str(error).split("\n")[0])
        return None
    found = PLANS.get(batch.model, {}).get((key, signature_of(beside)))
    if found is None or [use.function for use in tape.uses] != [use.function for use in beside.uses]:
        return None
    uses = zip(tape.uses, beside.uses, found.layouts, strict=True)
    if not all(_is_twice(layouts, own, other) for own, other, layouts in uses):
        return None
    of_one = Plan([[own._replace(samples=1) for own in layouts] for layouts in found.layouts], found.general)
    keep_plan(batch.model, batch.key, signature, of_one)
    return of_one


def _is_twice(layouts: Sequence[Layout], own: Use, other: Use) -> bool:
    """Whether the outputs of two uses differ by the number of samples at most."""
    expected = list(own.shape)
    for layout in layouts:
        expected[layout.dim] *= 2
    return expected == list(other.shape)
