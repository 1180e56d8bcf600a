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
        ("(products * rows).movedim(1, dims[1] + 1)", "products.movedim(1, dims[1] + 1)"),
        ("value = weight * run.batch.loss_of(run.output)", "value = run.batch.loss_of(run.output)"),
    ),
    *broken(
        "curvature/matrices/forward_mode.py",
        "curvature/matrices/test_forward_mode.py",
        ("return graph_functions(output) if is_right else None", "return graph_functions(output)"),
        ("if (key, graph_functions(found[1])) in self.proved:", "if True:"),
        ("directions = [] if case in self.proved else random_directions(batch, 2)", "directions = []"),
        ('case = plan_key(batch), functions, "columns"', 'case = plan_key(batch), "columns"'),
    ),
    *broken(
        "curvature/matrices/linearised.py",
        "curvature/matrices/test_linearised.py curvature/matrices/test_forward_mode.py",
        ("difference <= ROUNDINGS * rounding * size", "difference <= size"),
        (
            "return found if is_near(torch.zeros_like(expected) if change is None else change, expected) else None",
            "return found",
        ),
        ("through = _explained(tape)", "through = set()"),
        ("graph_functions(output), frozenset(through), len(tape.uses)", "frozenset(through), len(tape.uses)"),
        ("rounding <= torch.finfo(torch.float32).eps and ", ""),
        ("return {slot: name for slot, name in names.items() if name in through}", "return names"),
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
