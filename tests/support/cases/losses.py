"""Every torch loss with a reduction, its weights and options, and callables, on an MLP and on a convolution net."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.cases.case import Case, Loss, classes, floats, token_loss

SIZE = 4  # of the outputs' dim 1; the MLP's N too
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 3.5])


@dataclass(frozen=True)
class LossCase:
    id: str
    loss: Loss
    target: Callable[[Tensor], Tensor]
    combine: str = ""
    link: Callable[[], nn.Module] = nn.Identity
    places: bool = True  # whether outputs may be (N, C, T), not only (N, C)


def cases() -> Iterator[Case]:
    """Pairwise: each loss with each reduction, each reduction on each network, but not each loss with both on all."""
    for number, (mean, summed) in enumerate(zip(losses("mean"), losses("sum"), strict=True)):
        dense, convolved = (mean, summed) if number % 2 == 0 else (summed, mean)
        yield from on_networks(dense, "mlp")
        yield from on_networks(convolved, "conv", "equal_sizes")
    for case in (*batch_means(), *callables()):
        yield from on_networks(case, "mlp", "conv", "equal_sizes")
    yield from shaped_cases()


def on_networks(case: LossCase, *networks: str) -> Iterator[Case]:
    options = {"loss": case.loss, "target": case.target, "combine": case.combine}
    convolved = functools.partial(conv_net, case.link, case.places)
    for network, build, inputs, n in (
        ("mlp", functools.partial(mlp, case.link), floats(5), SIZE),
        ("conv", convolved, floats(2, 7), 3),
        ("equal_sizes", convolved, floats(2, SIZE + 2), SIZE),
    ):
        if network in networks and (case.places or network != "equal_sizes"):
            yield Case(f"loss_{case.id}_{network}", build, inputs, n=n, **options)


def mlp(link: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, SIZE), link())


def conv_net(link: Callable[[], nn.Module], places: bool) -> nn.Module:
    """(N, 2, T + 2) to (N, C, T), or to (N, C)"""
    pool = nn.Identity() if places else nn.Sequential(nn.AdaptiveAvgPool1d(1), nn.Flatten())
    return nn.Sequential(nn.Conv1d(2, 3, 3), nn.ReLU(inplace=True), nn.Conv1d(3, SIZE, 1), pool, link())


def losses(reduction: str) -> Iterator[LossCase]:
    yield from cross_entropies(reduction)
    yield from binary_losses(reduction)
    yield from regressions(reduction)
    yield from margins(reduction)


def batch_means() -> Iterator[LossCase]:
    batchmean = functools.partial(nn.KLDivLoss, reduction="batchmean")
    yield LossCase("kl_batchmean", batchmean(), soft, "mean", log_softmax)
    yield LossCase("kl_batchmean_log", batchmean(log_target=True), lambda o: soft(o).log(), "mean", log_softmax)


def cross_entropies(reduction: str) -> Iterator[LossCase]:
    loss = functools.partial(nn.CrossEntropyLoss, reduction=reduction)
    uneven = "neither" if reduction == "mean" else ""
    for name, options, target in (
        ("plain", {}, classes),
        ("smoothed", {"label_smoothing": 0.2}, classes),
        ("soft", {}, soft),
        ("soft_weight", {"weight": WEIGHT}, soft),
        ("soft_smoothed_weight", {"weight": WEIGHT, "label_smoothing": 0.2}, soft),
    ):
        yield LossCase(f"cross_entropy_{name}_{reduction}", loss(**options), target)
    for name, options, target in (
        ("weight", {"weight": WEIGHT}, classes),
        ("weight_smoothed", {"weight": WEIGHT, "label_smoothing": 0.2}, classes),
        ("ignored", {}, ignoring),
        ("ignored_class", {"ignore_index": 2}, classes),
        ("ignored_smoothed", {"label_smoothing": 0.2}, ignoring),
        ("ignored_weight", {"weight": WEIGHT}, ignoring),
        ("ignored_all_options", {"weight": WEIGHT, "label_smoothing": 0.2}, ignoring),
    ):
        yield LossCase(f"cross_entropy_{name}_{reduction}", loss(**options), target, uneven)
    loss = functools.partial(nn.NLLLoss, reduction=reduction)
    yield LossCase(f"nll_{reduction}", loss(), classes, "", log_softmax)
    yield LossCase(f"nll_weight_{reduction}", loss(weight=WEIGHT), classes, uneven, log_softmax)
    yield LossCase(f"nll_ignored_{reduction}", loss(), ignoring, uneven, log_softmax)
    yield LossCase(f"nll_ignored_weight_{reduction}", loss(weight=WEIGHT), ignoring, uneven, log_softmax)


def binary_losses(reduction: str) -> Iterator[LossCase]:
    loss = functools.partial(nn.BCEWithLogitsLoss, reduction=reduction)
    yield LossCase(f"bce_logits_{reduction}", loss(), binary)
    yield LossCase(f"bce_logits_soft_{reduction}", loss(), torch.rand_like)
    yield LossCase(f"bce_logits_scalar_{reduction}", loss(pos_weight=torch.tensor(2.5)), binary)
    yield LossCase(f"bce_logits_weight_{reduction}", loss(weight=WEIGHT), binary, places=False)
    yield LossCase(f"bce_logits_pos_weight_{reduction}", loss(pos_weight=WEIGHT), binary, places=False)
    both = loss(weight=WEIGHT.flip(0), pos_weight=WEIGHT)
    yield LossCase(f"bce_logits_weights_{reduction}", both, binary, places=False)
    loss = functools.partial(nn.BCELoss, reduction=reduction)
    yield LossCase(f"bce_{reduction}", loss(), binary, "", nn.Sigmoid)
    yield LossCase(f"bce_weight_{reduction}", loss(weight=WEIGHT), binary, "", nn.Sigmoid, places=False)
    yield LossCase(f"soft_margin_{reduction}", nn.SoftMarginLoss(reduction=reduction), signs)


def regressions(reduction: str) -> Iterator[LossCase]:
    for name, loss in {
        "mse": nn.MSELoss,
        "l1": nn.L1Loss,
        "smooth_l1": functools.partial(nn.SmoothL1Loss, beta=0.5),
        "huber": functools.partial(nn.HuberLoss, delta=0.7),
    }.items():
        yield LossCase(f"{name}_{reduction}", loss(reduction=reduction), torch.randn_like)
    poisson = functools.partial(nn.PoissonNLLLoss, reduction=reduction)
    yield LossCase(f"poisson_{reduction}", poisson(), counts)
    yield LossCase(f"poisson_full_{reduction}", poisson(full=True), counts)
    yield LossCase(f"poisson_rate_{reduction}", poisson(log_input=False, full=True), counts, "", nn.Softplus)
    kl = functools.partial(nn.KLDivLoss, reduction=reduction)
    yield LossCase(f"kl_{reduction}", kl(), soft, "", log_softmax)
    yield LossCase(f"kl_log_{reduction}", kl(log_target=True), lambda o: soft(o).log(), "", log_softmax)


def margins(reduction: str) -> Iterator[LossCase]:
    """Those that take (N, C) only."""
    for name, loss, target in (
        ("multi_margin", nn.MultiMarginLoss, classes),
        ("multi_margin_options", functools.partial(nn.MultiMarginLoss, p=2, margin=1.5, weight=WEIGHT), classes),
        ("multilabel_margin", nn.MultiLabelMarginLoss, label_sets),
        ("multilabel_soft_margin", nn.MultiLabelSoftMarginLoss, binary),
        ("multilabel_soft_margin_weight", functools.partial(nn.MultiLabelSoftMarginLoss, weight=WEIGHT), binary),
        ("hinge_embedding", nn.HingeEmbeddingLoss, signs),
    ):
        yield LossCase(f"{name}_{reduction}", loss(reduction=reduction), target, places=False)


def callables() -> Iterator[LossCase]:
    """Functions of (output, target): nothing tells how they reduce."""
    entropy = F.cross_entropy
    yield LossCase("functional", F.mse_loss, torch.randn_like)
    yield LossCase("functional_sum", lambda o, t: F.mse_loss(o, t, reduction="sum"), torch.randn_like, "sum")
    yield LossCase("functional_entropy_sum", lambda o, t: entropy(o, t, reduction="sum"), classes, "sum")
    yield LossCase("tokens", lambda o, t: token_loss(o.movedim(1, -1), t), classes)
    yield LossCase("tokens_ignored", lambda o, t: token_loss(o.movedim(1, -1), t), ignoring, "neither")
    yield LossCase("tokens_sum", lambda o, t: token_loss(o.movedim(1, -1), t) * t.numel(), classes, "sum")
    yield LossCase("summed_then_mean", lambda o, t: (o - t).square().flatten(1).sum(1).mean(), torch.randn_like)
    yield LossCase("half_sum", lambda o, t: 0.5 * (o - t).square().sum(), torch.randn_like, "sum")
    yield LossCase("distance", lambda o, t: (o - t).flatten(1).norm(dim=1).mean(), torch.randn_like)
    yield LossCase("gaussian", gaussian, lambda o: torch.randn_like(o[:, :2]))
    yield LossCase("cosine", cosine, sign, places=False)
    yield LossCase("triplet", triplet, torch.randn_like, places=False)
    yield LossCase("ranking", lambda o, t: F.margin_ranking_loss(o[:, 0], o[:, 1], t, 0.1), sign, places=False)
    yield LossCase("mixed", lambda o, t: entropy(o, t) + 0.1 * o.square().mean(), classes)
    yield LossCase("focal", focal, classes)
    yield LossCase("masked", masked, binary, "neither")


def shaped_cases() -> Iterator[Case]:
    """One number per sample, (N,) or (N, 1); weights along dim 1 of (N, C, T); log-probabilities over time."""
    net = lambda *last: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1), *last)
    for name, loss, target in (("bce", nn.BCEWithLogitsLoss(), binary), ("mse", nn.MSELoss(), torch.randn_like)):
        yield Case(f"loss_{name}_numbers", lambda: net(nn.Flatten(0)), floats(5), loss, target)
        yield Case(f"loss_{name}_column", net, floats(5), loss, target)
    for reduction in ("mean", "sum"):
        columns = {"weight": WEIGHT[:, None], "pos_weight": WEIGHT[:, None].flip(0)}
        loss = nn.BCEWithLogitsLoss(reduction=reduction, **columns)
        yield Case(f"loss_bce_columns_{reduction}", lambda: conv_net(nn.Identity, True), floats(2, 7), loss, binary)
    yield Case("loss_ctc", lambda: conv_net(log_softmax, True), floats(2, 9), ctc, labels, n=3)


def log_softmax() -> nn.Module:
    return nn.LogSoftmax(dim=1)


def soft(output: Tensor) -> Tensor:
    return torch.randn_like(output).softmax(1)


def ignoring(output: Tensor) -> Tensor:
    """Indices of classes of which no sample ignores as many places as another, from none to all."""
    target = classes(output)
    if target.dim() == 1:
        target[1::3] = -100
        return target
    count, places = len(target), target[0].numel()
    for n, row in enumerate(target.view(count, places)):
        row[torch.randperm(places)[: places * n // max(count - 1, 1)]] = -100
    return target


def binary(output: Tensor) -> Tensor:
    return torch.randint(2, output.shape).to(output)


def signs(output: Tensor) -> Tensor:
    return 2 * binary(output) - 1


def sign(output: Tensor) -> Tensor:
    return signs(output[:, 0])


def counts(output: Tensor) -> Tensor:
    return torch.poisson(torch.full_like(output, 2.0))


def label_sets(output: Tensor) -> Tensor:
    """Rows of classes, ended by -1."""
    target = torch.stack([torch.randperm(output.shape[1]) for _ in output])
    target[::2, 1] = -1
    target[1::2, 2] = -1
    return target


def labels(output: Tensor) -> Tensor:
    return torch.randint(1, SIZE, (len(output), 3))


def ctc(output: Tensor, target: Tensor) -> Tensor:
    """(N, C, T) log-probabilities against (N, 3) labels; class 0 is the blank."""
    count, _, places = output.shape
    sizes = [torch.full((count,), size, dtype=torch.long) for size in (places, target.shape[1])]
    return F.ctc_loss(output.permute(2, 0, 1), target, *sizes)


def gaussian(output: Tensor, target: Tensor) -> Tensor:
    mean, log_variance = output.chunk(2, dim=1)
    return F.gaussian_nll_loss(mean, target, log_variance.exp())


def cosine(output: Tensor, target: Tensor) -> Tensor:
    one, two = output.chunk(2, dim=1)
    return F.cosine_embedding_loss(one, two, target, margin=0.1)


def triplet(output: Tensor, target: Tensor) -> Tensor:
    return F.triplet_margin_loss(output, target, -target, margin=5.0)


def focal(output: Tensor, target: Tensor) -> Tensor:
    each = F.cross_entropy(output, target, reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).mean()


def masked(output: Tensor, target: Tensor) -> Tensor:
    """Only where the target is one, and at least over one place."""
    return ((output - 1).square() * target).sum() / target.sum().clamp(min=1)
