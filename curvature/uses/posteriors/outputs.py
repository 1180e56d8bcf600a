"""The covariance of a linearised model's outputs, ``J Sigma J^T`` for every sample.

Indices: n sample, c and d outputs, g group, i input, o output of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from curvature.linalg import full_precision, matmul
from curvature.matrices import RecordedBatch, rows_of
from curvature.operators import BlockDiagonal, EigenKronecker, Operator
from curvature.terms import OuterProduct, TermsByVector

ROWS_ELEMENTS = 1 << 24  # entries of the rows of a layer's Jacobian at a time

TermsOfOutputs = Mapping[str, TermsByVector]  # by parameter, of each entry of the output


@full_precision()
def output_covariance(run: RecordedBatch, covariance: BlockDiagonal) -> Tensor:
    """(N, D, D) for the D entries of each sample's output, given the covariance of the parameters."""
    count, output = run.batch.count, run.output
    size = output.numel() // count
    eye = torch.eye(size, dtype=output.dtype, device=output.device)
    terms = run.terms(eye[:, None].expand(-1, count, -1).reshape(size, *output.shape))
    total = torch.zeros(count, size, size, dtype=covariance.space.dtype, device=output.device)
    for block in covariance.blocks.values():
        factored = _by_factors(block, terms)
        total += (_by_rows(block, terms, size, count) if factored is None else factored).to(total.device)
    return total


def _by_factors(block: Operator, terms: TermsOfOutputs) -> Tensor | None:
    """For a layer read at one place, ``sum_o b_co b_do sum_i a_i^2 variance_oi`` in the eigenbasis; None for others."""
    if not isinstance(block, EigenKronecker):
        return None
    of_weight = terms.get(block.space.names[0], ())
    alone = (parts[0] for parts in of_weight if len(parts) == 1)
    products = [term for term in alone if isinstance(term, OuterProduct) and term.places == 1]
    if not products or len(products) < len(of_weight):
        return None
    a, b = products[0].a[:, 0], torch.stack([term.b[:, 0] for term in products])
    if len(block.space.names) > 1:
        a = torch.cat([a, torch.ones_like(a[..., :1])], -1)
    if (a.shape[1], b.shape[3], a.shape[2]) != block.sides:
        return None
    a, b = a.to(block.space.dtype), b.to(block.space.dtype)
    if block.column_vectors is not None:
        a = matmul(a[:, :, None], block.column_vectors)[:, :, 0]
    if block.row_vectors is not None:
        b = matmul(b[..., None, :], block.row_vectors)[..., 0, :]
    spread = torch.einsum("ngi,goi->ngo", a.square(), block.values)
    return torch.einsum("cngo,dngo->ncd", b * spread, b)


def _by_rows(block: Operator, terms: TermsOfOutputs, outputs: int, count: int) -> Tensor:
    """The same from the rows of this layer's Jacobian, of some samples at a time."""
    step = max(1, ROWS_ELEMENTS // max(1, outputs * block.space.size))
    own = {name: terms[name] for name in block.space.names if name in terms}
    covariances = []
    for start in range(0, count, step):
        part = slice(start, min(start + step, count))
        some = ({name: [t.samples(part) for t in of[k]] for name, of in own.items()} for k in range(outputs))
        rows = torch.stack([rows_of(block.space, row, part.stop - part.start) for row in some], 1)  # (n, c, p)
        spread = (block @ rows.flatten(0, 1).T).T.reshape(rows.shape)
        covariances.append(matmul(rows, spread.mT))
    return torch.cat(covariances)
