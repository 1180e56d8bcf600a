from __future__ import annotations

from .mutant import broken

MUTANTS = [
    *broken(
        "curvature/recording/selection.py",
        "curvature/matrices/test_some_parameters.py",
        ('name.startswith(key + ".")', "name.startswith(key)"),
        ("if p.requires_grad != (name in names)]", "if p.requires_grad and False]"),
        ("{id(p) for p in own if p.requires_grad}", "{id(p) for p in own}"),
    ),
    *broken(
        "curvature/recording/backprop_stream.py",
        "curvature/recording/test_backprop_stream.py",
        ("if self.bytes >= self.most_bytes:", "if False:"),
        ("if not group.missing]", "]"),
        ("missed = [use for use, _ in edges if use not in stream.seen]", "missed = []"),
        ("joined.update(dict.fromkeys(names, names))", "pass"),
    ),
    *broken(
        "curvature/recording/model_call.py",
        "curvature/gradients/test_clipping.py",
        ("state.seed(seed)", "pass"),
    ),
    *broken(
        "curvature/recording/model_call.py",
        "curvature/matrices/test_linearised.py",
        (
            "with TURNS, torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():",
            "if True:",
        ),
    ),
    *broken(
        "curvature/recording/eager.py",
        "curvature/recording",
        ("later.prev = stance.prev", "later.prev = later.prev"),
    ),
]
