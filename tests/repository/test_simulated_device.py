"""The simulated device itself: the CPU's numbers, CUDA's rules, and what the host waits for."""

import importlib
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from support.combinations import in_pairs
from support.training import task, train


@pytest.fixture(autouse=True)
def sim(device, monkeypatch):
    """The module of the device; everything here is about it, and in full precision."""
    if device != "sim":
        pytest.skip("the simulated device: make test-device")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    return importlib.import_module("support.simulated_device.simdev")


def trained(name, device, optimizer):
    model, loss, x, y = task(name, device)
    if name == "lstm":  # torch's fused cells round otherwise than the CPU's
        model, x = model.double(), x.double()
    with sdpa_kernel(SDPBackend.MATH):
        losses = train(model, optimizer(model.parameters()), loss, x, y, 4)
    assert all(p.device.type == device and p.grad.device.type == device for p in model.parameters())
    return losses, [p.detach().cpu() for p in model.parameters()]


@in_pairs(name=["mlp", "cnn", "gpt", "vit", "lstm"], opt=["SGD", "AdamW"], foreach=[True, False])
def test_trains_as_on_the_cpu(name, opt, foreach):
    make = lambda p: getattr(torch.optim, opt)(p, lr=0.05, foreach=foreach)
    (losses, here), (found, there) = trained(name, "cpu", make), trained(name, "sim", make)
    tolerance = {"rtol": 1e-9, "atol": 1e-10} if name == "lstm" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(found, losses, **tolerance)
    torch.testing.assert_close(there, here, **tolerance)


MIXED = [
    lambda s, c: s + c,
    lambda s, c: c + s,
    lambda s, c: s @ c,
    lambda s, c: c @ s,
    lambda s, c: torch.cat([s, c]),
    lambda s, c: s.add_(c),
    lambda s, c: c[0, 0].add_(s[0, 0]),
    lambda s, c: torch.where(s > 0, s, c),
    lambda s, c: F.linear(s, c),
    lambda s, c: F.conv1d(s[None], c[None]),
    lambda s, c: torch.einsum("ij,jk->ik", s, c),
    lambda s, c: s.index_select(0, torch.tensor([0])),
    lambda s, c: s.gather(0, torch.zeros(1, 1, dtype=torch.long)),
    lambda s, c: s.index_add_(0, torch.tensor([0]), s[:1]),
    lambda s, c: F.embedding(torch.tensor([0]), s),
    lambda s, c: F.mse_loss(s, c),
    lambda s, c: F.cross_entropy(s, torch.tensor([0, 1, 2])),
    lambda s, c: torch.linalg.solve(s, c),
    lambda s, c: torch.addmm(s, c, s),
    lambda s, c: torch.dot(s[0], c[0]),
    lambda s, c: torch._foreach_add([s], [c]),
    lambda s, c: c[torch.zeros(1, dtype=torch.long, device="sim")],
    lambda s, c: s + s.to("sim:1"),
    lambda s, c: F.layer_norm(s, (3,), c[0], c[0]),
    lambda s, c: torch.outer(s[0], c[0]),
    lambda s, c: torch.cholesky_solve(s, c),
    lambda s, c: torch.equal(s, c),
    lambda s, c: s.clamp(min=c[0, 0]),
    lambda s, c: s.masked_fill(c > 0, 0.0),
    lambda s, c: torch.mm(s, s, out=c),
    lambda s, c: torch.randn(3, device="sim", generator=torch.Generator()),
    lambda s, c: torch.randn(3, generator=torch.Generator("sim")),
]


@pytest.mark.parametrize("mix", MIXED)
def test_refuses_two_devices(mix):
    with pytest.raises(RuntimeError, match="same device|device type for generator|indices should be"):
        mix(torch.eye(3, device="sim"), torch.eye(3))


def test_allows_what_cuda_allows():
    s, number = torch.arange(6.0, device="sim").reshape(2, 3), torch.tensor(2.0)
    for found in (s * number, number * s, torch.where(s > 1, s, number), s.masked_fill(s > 1, number)):
        assert found.device.type == "sim"
    assert s[torch.tensor([1])].device == s.device
    s[torch.tensor([1])] = number
    s[0] = torch.ones(3)
    assert s.cpu().tolist() == [[1, 1, 1], [2, 2, 2]] and torch._foreach_mul([s], number)[0].device == s.device
    with pytest.raises(TypeError, match="numpy"):
        s.numpy()


def test_views_share_memory():
    x = torch.zeros(3, 4, device="sim")
    for view in (x.t(), x[1], x.view(12), x.diagonal(), x.unfold(0, 2, 1), x.unbind()[2], x.split(2, 1)[1], x.detach()):
        assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() and view.device == x.device
    x[1:].t()[2] = 5
    assert x.sum().item() == 10
    x.resize_(20)
    out = torch.empty(0, device="sim")
    assert torch.add(x, 1, out=out) is out and out.shape == (20,) and x.shape == (20,)
    y = torch.empty(0, device="sim").set_(x)
    y.fill_(3)
    assert x[19].item() == 3
    x.data = torch.ones(2, device="sim")
    z = torch.ones(2, 3, device="sim")
    assert z.t_().shape == (3, 2) and z.unsqueeze_(0).shape == (1, 3, 2)
    c = torch.view_as_complex(torch.ones(3, 2, device="sim"))
    assert (c.conj() * c).real.sum().item() == 6 and c.conj().imag.sum().item() == -3


def test_random_numbers():
    g, h = torch.Generator("sim").manual_seed(3), torch.Generator().manual_seed(3)
    assert torch.equal(torch.randn(5, device="sim", generator=g).cpu(), torch.randn(5, generator=h))
    torch.manual_seed(7)
    a, host = torch.rand(4, device="sim"), torch.get_rng_state()
    torch.manual_seed(7)
    F.dropout(a, 0.5)
    assert torch.equal(torch.get_rng_state(), host)
    state = torch.sim.get_rng_state()
    b = a.bernoulli()
    torch.sim.set_rng_state(state)
    assert torch.equal(b, a.bernoulli())
    with torch.random.fork_rng(devices=[0, 1], device_type="sim"):
        torch.rand(3, device="sim")
    torch.sim.set_rng_state(g.get_state())


def test_counts_waits(sim):
    x, mask = torch.eye(4, device="sim"), torch.zeros(4, dtype=torch.bool, device="sim")
    eye = torch.eye(3, device="sim")
    never = [
        lambda: x @ x,
        lambda: x.to("sim"),
        lambda: torch.linalg.cholesky_ex(x),
        lambda: torch.linalg.inv_ex(x),
        lambda: torch.where(mask, x, 0),
        lambda: x.masked_fill_(mask, 0),
        lambda: x[:, 1],
        lambda: torch.full((2,), 3.0, device="sim"),
        lambda: x.sum().mul(2.0),
        lambda: x.index_fill_(0, mask.long(), 1.0),
        lambda: torch.randn(3, device="sim"),
        lambda: x[mask.long()],
        lambda: x.mul_(torch.tensor(1.0)),
        lambda: torch.nonzero_static(mask, size=1),
    ]
    once = [
        lambda: x[0, 0].item(),
        lambda: bool(x[0, 0]),
        lambda: float(x[0, 0]),
        lambda: x.cpu(),
        lambda: x.tolist(),
        lambda: mask.nonzero(),
        lambda: x[mask],
        lambda: x.masked_select(x > 0),
        lambda: torch.equal(x, x),
        lambda: torch.linalg.eigh(eye),
        lambda: torch.linalg.eigvalsh(eye),
        lambda: torch.linalg.cholesky(eye),
        lambda: torch.linalg.inv(eye),
        lambda: torch.linalg.solve(eye, x[:3, :3]),
        lambda: torch.linalg.cholesky_ex(eye, check_errors=True),
        lambda: torch.unique(x),
        lambda: torch.sim.synchronize(),
        lambda: torch.linalg.svd(eye),
        lambda: torch.allclose(x, x),
        lambda: torch.repeat_interleave(x, mask.long(), dim=0),
    ]
    for work in never:
        with sim.syncs() as found:
            work()
        assert found.count == found.uploads == 0, found.places()
    for work in once:
        with sim.syncs() as found:
            work()
        assert found.count == 1 and "test_simulated_device.py" in found.all[0].place("test_simulated_device"), (
            found.places()
        )
    for work in (lambda: torch.tensor(1.0, device="sim"), lambda: torch.ones(2).to("sim"), lambda: x[[0, 1]]):
        with sim.syncs() as found:
            work()
        assert (found.count, found.uploads) == (0, 1), found.places()


def test_counts_waits_of_backward_passes(sim):
    """In a thread of autograd, whose stack has no frame of Python."""
    x, mask = torch.ones(4, device="sim", requires_grad=True), torch.ones(4, dtype=torch.bool, device="sim")
    y = x.clone()
    y[mask] = 2 * x[mask]
    with sim.syncs() as found:
        y.sum().backward()
    assert found.count == 3 and "autograd" in found.all[0].place(), found.places()


def test_late_copies_arrive_with_an_event(sim):
    flag, host = torch.ones(3, device="sim"), torch.empty(3, pin_memory=True)
    host.copy_(flag, non_blocking=True)
    assert host.isnan().all()
    event = torch.Event("sim")
    event.record()
    with sim.syncs() as found:
        event.synchronize()
    assert host.tolist() == [1, 1, 1] and (found.count, found.events) == (0, 1)
    host.copy_(flag.to("sim:1"), non_blocking=True)
    event.record()  # on the current device's stream, as torch.cuda.Event does: not that of the copy
    event.synchronize()
    assert host.isnan().all()
    torch.sim.synchronize("sim:1")
    assert host.tolist() == [1, 1, 1]


def test_modules_move_with_their_parameters():
    model, x = nn.Linear(3, 2), torch.ones(1, 3)
    before = list(model.parameters())
    model(x).sum().backward()
    for device in ("sim", "cpu", "sim:1"):
        model.to(device)
        assert all(p is q and p.device == p.grad.device for p, q in zip(before, model.parameters(), strict=True))
        model(x.to(device)).sum().backward()
        assert before[0].grad.device == before[0].device and before[0].device.type == device[:3]
    assert before[0].grad.sum().item() == 24


def test_files_devices_autocast_transforms():
    model = nn.Linear(3, 2).to("sim:1")
    assert model.weight.device == torch.device("sim:1")
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    for where in ("cpu", "sim:0"):
        file.seek(0)
        assert torch.load(file, map_location=where)["weight"].device == torch.device(where)
    file.seek(0)
    assert torch.load(file)["weight"].device == torch.device("sim:1")
    with torch.autocast("sim", dtype=torch.bfloat16):
        assert model(torch.ones(1, 3, device="sim:1")).dtype == torch.bfloat16
    x = torch.randn(5, 3, device="sim:1")
    f = lambda v: model(v).square().sum()
    assert torch.func.vmap(torch.func.grad(f))(x).device == x.device
    assert torch.func.hessian(f)(x[0]).device == x.device
    _, tangent = torch.func.jvp(f, (x[0],), (x[1],))
    assert tangent.device == x.device
    scaler = torch.amp.GradScaler("sim")
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(f(x)).backward()
    scaler.step(opt), scaler.update()
