from __future__ import annotations

from .mutant import broken

MUTANTS = [
    *broken(
        "curvature/layers/convolution.py",
        "curvature/layers curvature/gradients/test_per_sample.py",
        ("(total // 2, total - total // 2)", "(total - total // 2, total // 2)"),
        ("return x, b", "return x, b.abs()"),
        ("return b, x", "return b, x.abs()"),
    ),
    *broken(
        "curvature/layers/matrix_products.py",
        "curvature/layers curvature/gradients/test_per_sample.py",
        ("for t in (layout.front(x), b))", "for t in (layout.front(x), b.abs()))"),
        (
            'data = [(call.args["input1"], [*lead, "i"]), (call.args["input2"]',
            'data = [(call.args["input1"], [*lead, "i"]), (call.args["input2"].abs()',
        ),
        (
            "outer_product(first, [second], b, out, layout) if left",
            "outer_product(first, [second], b.abs(), out, layout) if left",
        ),
        ('layout.front(b * args.get("beta", 1))', "layout.front(b)"),
        ('call, b * args.get("alpha", 1), layout', "call, b, layout"),
        ("x = x.sum(data_only)", "x = x.mean(data_only)"),
        (
            "weight = pairs.pop(slot)\n        return outer_product(weight, list(pairs.values()), b",
            "weight = pairs.pop(slot)\n        return outer_product(weight, list(pairs.values()), b.abs()",
        ),
        ('signature = ("other", "input")', 'signature = ("input", "other")'),
    ),
    *broken(
        "curvature/layers/normalisation.py",
        "curvature/layers curvature/gradients/test_per_sample.py",
        (
            'F.layer_norm(args["input"], args["normalized_shape"], eps=args.get("eps", 1e-5))',
            'F.layer_norm(args["input"], args["normalized_shape"], eps=1e-3)',
        ),
        (
            'F.rms_norm(call.args["input"], call.args["normalized_shape"], eps=call.args.get("eps"))',
            'F.rms_norm(call.args["input"], call.args["normalized_shape"], eps=1e-2)',
        ),
        (
            'F.group_norm(x, groups, eps=call.args.get("eps", 1e-5))',
            'F.group_norm(x, 1, eps=call.args.get("eps", 1e-5))',
        ),
        ('args["input"].sub(mean).mul_(scale)', 'args["input"].mul(scale)'),
        ("sub(mean).mul_(scale).view(x.shape)", "sub(mean).view(x.shape)"),
        (
            'F.batch_norm(args["input"], args["running_mean"], args["running_var"], eps=eps)',
            'F.batch_norm(args["input"], 0 * args["running_mean"], args["running_var"], eps=eps)',
        ),
        ("return F.instance_norm(x, eps=eps)", "return F.instance_norm(x, eps=1e-3)"),
    ),
    *broken(
        "curvature/layers/elementwise.py",
        "curvature/layers curvature/gradients/test_per_sample.py",
        (
            "torch.autograd.grad(out, expanded, b.to(out.dtype))",
            "torch.autograd.grad(out, expanded, b.to(out.dtype).abs())",
        ),
        ("return b if function in SUMS else b * others[0]", "return b if function in SUMS else b.abs() * others[0]"),
        ("out = out.unflatten(k, (-1, size)).sum(k)", "out = out.unflatten(k, (-1, size)).mean(k)"),
        ('call.args["input"].clamp(max=0)', 'call.args["input"].clamp(min=0)'),
    ),
    *broken(
        "curvature/layers/embedding.py",
        "curvature/layers curvature/gradients/test_per_sample.py",
        ("return row if row >= 0 else row + args", "return row if row >= 0 else 0 * args"),
        ("values = values / counts[..., None]", "values = values / counts[..., None].sqrt()"),
        (".clamp(min=1)[bag]", ".clamp(min=2)[bag]"),
        (
            "b = b.masked_fill(is_empty[:, None], 0)",
            "b = b.masked_fill(~is_empty[:, None], 0)",
        ),
    ),
]
