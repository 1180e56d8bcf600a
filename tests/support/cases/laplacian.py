"""Models whose Laplacian is tested, and what compares it with the oracle."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.cases.case import Raw, randomise, seeded

D, N = 3, 4


def mlp(activation: Callable[[], nn.Module], out: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(D, 5), activation(), nn.Linear(5, 4), activation(), nn.Linear(4, out))


def block() -> nn.Module:
    return Raw(
        lambda m, x: m.out(m.first(x) + m.second(F.silu(m.first(x))) * m.scale + m.shift),
        first=nn.Linear(D, 5), second=nn.Linear(5, 5, bias=False), out=nn.Linear(5, 1),
        scale=nn.Parameter(torch.ones(5)), shift=nn.Parameter(torch.zeros(5)),
    )  # fmt: skip


def attention(m: nn.Module, x: Tensor) -> Tensor:
    """Three tokens a sample."""
    h = m.embed(x.unsqueeze(-1))
    q, k, v = m.inner(h).chunk(3, -1)
    weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
    return m.out((weights @ v).mean(1))


def tokens(function: Callable[[nn.Module, Tensor], Tensor]) -> nn.Module:
    return Raw(function, embed=nn.Linear(1, 4), inner=nn.Linear(4, 12), out=nn.Linear(4, 2))


def fused(m: nn.Module, x: Tensor) -> Tensor:
    q, k, v = m.inner(m.embed(x[..., None])).view(len(x), D, 3, 2, 2).permute(2, 0, 3, 1, 4)
    h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return m.out(h.transpose(1, 2).flatten(2)[:, -1])


def arithmetic(m: nn.Module, x: Tensor) -> Tensor:
    """All operators, with numbers, parameters and each other."""
    a, b = m.first(x).tanh(), torch.sin(m.first(x))
    c = 2 - a * b / (3 + b.square()) + 1 / (4 - a) - (-a) ** 3 + m.w * a / 2 + b / (2 + m.w.exp())
    return m.out(c - (x * x).sum(1, keepdim=True) * m.w + a**2 * b.pow(4) + 2.0**a + (m.w - b) + torch.rsub(a, 3.0))


def joined(m: nn.Module, x: Tensor) -> Tensor:
    h = torch.cat([m.first(x).tanh(), x[:, :2], x.new_ones(len(x), 1)], 1)
    h = torch.stack([h, h.cos()], 1).flip(2)[:, :, 1:].reshape(len(x), -1)
    left, right = h.split([4, h.shape[1] - 4], dim=1)
    return m.out(torch.where(left > 0.3, left.exp(), 0.5) + right[:, [0, 2, 1, 1]] * left.new_tensor([1, 2, 3, 4.0]))


def tied(m: nn.Module, x: Tensor) -> Tensor:
    return m.out((m.inner(m.inner(m.first(x).tanh()).sigmoid()) @ m.inner.weight).tanh())


def waves(m: nn.Module, x: Tensor) -> Tensor:
    """Random features and a boundary factor."""
    features = torch.cat([torch.sin(x @ m.w), torch.cos(x @ m.w)], -1)
    return m.out(features) * (x * (1 - x)).prod(1, keepdim=True)


def sums(m: nn.Module, x: Tensor) -> Tensor:
    h = m.first(x)
    r = h.norm(dim=1, keepdim=True) + F.normalize(h, dim=1) * h.std(1, keepdim=True) + h.logsumexp(1, keepdim=True)
    return m.out(F.log_softmax(r, 1) + torch.linalg.vector_norm(h, dim=1, keepdim=True) + F.glu(torch.cat([r, h], 1)))


def products(m: nn.Module, x: Tensor) -> Tensor:
    a, b = m.first(x).tanh().view(-1, 5, 1), m.first(x).sin().view(-1, 1, 5)
    c = torch.einsum("nij,nkj->nik", a @ b, a.mul(b)) + torch.bmm(a, b) + m.w @ (a + b)
    return m.out((c @ m.w).sum(1) + torch.einsum("nij,j->ni", c, m.w[0]))


def linears(**more: nn.Module | nn.Parameter) -> dict[str, nn.Module | nn.Parameter]:
    return {"first": nn.Linear(D, 5), "out": nn.Linear(5, 2), **more}


def vector(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def normed(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(D, 6), nn.Tanh(), *layers, nn.Linear(6, 2))


def channels(norm: nn.Module) -> nn.Module:
    """Two channels of three places."""
    return normed(nn.Unflatten(1, (2, 3)), norm, nn.Softplus(), nn.Flatten())


class Custom(torch.autograd.Function):
    """A sine that torch's functions do not see."""

    twice_differentiable = True

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].cos()


def in_place(m: nn.Module, x: Tensor) -> Tensor:
    h = m.first(x)
    h += h.detach().sin()
    h[:, 0] = h[:, 1] * 2
    return m.out(h.tanh_())


def without_gradients(m: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = m.first(x).exp()
    return m.out(m.first(x).tanh() * scale)


def differentiated(m: nn.Module, x: Tensor) -> Tensor:
    if not x.requires_grad:
        x = x.detach().requires_grad_()
    return torch.autograd.grad(m.out(m.first(x).tanh()).sum(), x, create_graph=True)[0]


def image(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, D)), *layers)


RULES: dict[str, Callable[[], nn.Module]] = {
    "tanh": lambda: mlp(nn.Tanh),
    "several outputs": lambda: mlp(nn.SiLU, 3),
    "residual block": block,
    "layer norm": lambda: normed(nn.LayerNorm(6), nn.Softplus()),
    "rms norm": lambda: normed(nn.RMSNorm(6), nn.Softplus()),
    "group norm": lambda: channels(nn.GroupNorm(2, 2)),
    "instance norm": lambda: channels(nn.InstanceNorm1d(2, affine=True)),
    "batch norm": lambda: normed(nn.BatchNorm1d(6), nn.Softplus()).eval(),
    "attention": lambda: tokens(attention),
    "fused attention": lambda: tokens(fused),
    "multi-head attention": lambda: Raw(
        lambda m, x: m.out(m.heads(*[m.embed(x[..., None])] * 3)[0].mean(1)),
        embed=nn.Linear(1, 4), heads=nn.MultiheadAttention(4, 2, batch_first=True), out=nn.Linear(4, 1),
    ),
    "transformer": lambda: Raw(
        lambda m, x: m.layer(m.embed(x[..., None]))[:, 0],
        embed=nn.Linear(1, 4), layer=nn.TransformerEncoderLayer(4, 2, 6, 0.0, "gelu", batch_first=True),
    ),
    "arithmetic": lambda: Raw(arithmetic, **linears(w=vector(5))),
    "joined": lambda: Raw(joined, first=nn.Linear(D, 3), out=nn.Linear(4, 2)),
    "tied": lambda: Raw(tied, **linears(inner=nn.Linear(5, 5))),
    "waves": lambda: Raw(waves, w=vector(D, 4), out=nn.Linear(8, 1)),
    "sums": lambda: Raw(sums, **linears()),
    "products": lambda: Raw(products, **linears(w=vector(5, 5))),
    "convolution": lambda: image(
        nn.Conv1d(1, 4, 2, padding=1), nn.Tanh(), nn.AvgPool1d(2), nn.Flatten(), nn.Linear(8, 1)
    ),
    "bilinear": lambda: Raw(
        lambda m, x: m.pair(m.first(x), x).tanh(), first=nn.Linear(D, 5), pair=nn.Bilinear(5, D, 2)
    ),
    "linear": lambda: nn.Linear(D, 2),
    "inputs as they are": lambda: Raw(lambda m, x: x, w=vector(1)),
    "constant": lambda: Raw(lambda m, x: m.w.expand(len(x), 1), w=vector(1)),
    "detached": lambda: Raw(lambda m, x: m.out(m.first(x)).detach() * m.w + x.new_ones(1), **linears(w=vector(2))),
    "weight norm": lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(D, 5)), nn.Tanh(), nn.Linear(5, 1)
    ),
}  # fmt: skip
GENERAL: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "determinant": (
        lambda: Raw(
            lambda m, x: (m.inner(m.first(x).tanh()).view(-1, 2, 2) + 2 * torch.eye(2).to(x)).slogdet()[1][:, None],
            first=nn.Linear(D, 5), inner=nn.Linear(5, 4),
        ),
        "slogdet",
    ),
    "maximum": (lambda: Raw(lambda m, x: m.out(m.first(x).tanh()).max(1, keepdim=True)[0], **linears()), "max"),
    "recurrent": (
        lambda: Raw(
            lambda m, x: m.out(m.rnn(x[..., None])[0][:, -1]),
            rnn=nn.GRU(1, 3, batch_first=True), out=nn.Linear(3, 1),
        ),
        "gru",
    ),
    "custom function": (lambda: Raw(lambda m, x: m.out(Custom.apply(m.first(x))), **linears()), "gradients off"),
    "in place": (lambda: Raw(in_place, **linears()), "add_"),
    "no_grad": (lambda: Raw(without_gradients, **linears()), "gradients off"),
    "its own gradient": (lambda: Raw(differentiated, **linears()), "grad"),
}  # fmt: skip
MODELS = RULES | {name: model for name, (model, _) in GENERAL.items()}
FORMS = {
    "laplacian": None,
    "diagonal": torch.tensor([1.0, 0.0, -0.5], dtype=torch.float64),
    "matrix": torch.tensor([[1.0, 0.5, -0.3], [0.5, 0.0, 2.0], [-0.3, 2.0, -1.0]], dtype=torch.float64),
}


def case(name: str) -> tuple[nn.Module, Tensor]:
    with seeded(0):
        model = MODELS[name]()
        randomise(model)
        return model.double(), torch.randn(N, D).double()
