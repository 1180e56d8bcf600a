from __future__ import annotations

from .mutant import broken

MUTANTS = [
    *broken(
        "curvature/matrices/stored_sums.py",
        "curvature/matrices/test_stored_sums.py",
        ("number == 0 or number >= done", "number == 0 or number > done"),
        ('progress.generator.set_state(known["draws"])', "pass"),
        ("            is_whole = False", "            is_whole = True"),
        ('whole["total"] += part["total"]', "pass"),
    ),
    *broken(
        "curvature/matrices/per_sample_diagonals.py",
        "curvature/matrices/test_per_sample_diagonals.py",
        ("(u if right is left else gradients(right))", "u"),
        ("torch.where(numbers == number, products", "torch.where(numbers >= number, products"),
    ),
    *broken(
        "curvature/matrices/jacobians.py",
        "curvature/matrices/test_per_sample_diagonals.py",
        ("sdpa_kernel(SDPBackend.MATH), ExactNorms(), torch", "sdpa_kernel(SDPBackend.MATH), torch"),
    ),
    *broken(
        "curvature/matrices/sample_rows.py",
        "curvature/matrices/test_sample_rows.py",
        ("roots = weights.sqrt()", "roots = weights"),
        ("if found > limit", "if found > 2 * limit"),
    ),
    *broken(
        "curvature/matrices/products.py",
        "curvature/matrices",
        ("total.div_(sum(weights))", "total.div_(sum(weights) + 1)"),
        ("self.is_single or not self.ordered", "True"),
        ("(products * rows).movedim(1, dims[1] + 1)", "products.movedim(1, dims[1] + 1)"),
        ("value = (weights * losses)[weights != 0].sum()", "value = losses[weights != 0].sum()"),
    ),
    *broken(
        "curvature/matrices/forward_mode.py",
        "curvature/matrices/test_forward_mode.py",
        ("if not _agrees(batch):", "if False:"),
        ("case = key, graph_functions(found[1])", "case = key"),
        ("directions = [] if case in self.proved else random_directions(batch, 2)", "directions = []"),
        ('case = plan_key(batch), functions, "columns"', 'case = plan_key(batch), "columns"'),
    ),
    *broken(
        "curvature/matrices/linearised.py",
        "curvature/matrices/test_linearised.py curvature/matrices/test_forward_mode.py",
        ("difference <= ROUNDINGS * rounding * size", "difference <= size"),
        ("_is_right(batch, tape, output, through) else", "True else"),
        ("through = _explained(tape)", "through = set()"),
    ),
    *broken(
        "curvature/matrices/kept.py",
        "curvature/matrices/test_linearised.py",
        ("return known, sums, casts, list", "return known, casts, list"),
        ("sums, casts, list(map(_settings, self._modules))", "sums, casts"),
        ("return known, sums, casts, list", "return known, sums, list"),
        ("(m._parameters, m._buffers, vars(m))", "(m._parameters, m._buffers)"),
        ("is_known = loss is None or isinstance(loss, nn.Module) or loss in vars(F).values()", "is_known = True"),
        ("quick_sums(map(_ordered, tensors))", "quick_sums(tensors)"),
        ("if form != self.form or self._values() != self.values:", "if form != self.form:"),
        ("self.is_open = self.room >= 0", "self.is_open = True"),
        ("[*loss.parameters(), *loss.buffers()] if isinstance(loss, nn.Module) else []", "[]"),
    ),
    *broken(
        "curvature/matrices/accumulators.py",
        "curvature/matrices",
        ("self.sum.addmm_((u * chunk.weights", "self.sum.addmm_((u * chunk.weights.sqrt()"),
        ("rows, columns, scale * self.sum)", "rows, columns, self.sum)"),
        ("for name in arrived if name not in self.alone]", "for name in arrived]"),
        ("sum_of_products(*found, weights, chunk", "sum_of_products(*found, weights.square(), chunk"),
        ("return None if bool((self.weights == 1).all())", "return None if bool((self.weights == 1).any())"),
    ),
]
