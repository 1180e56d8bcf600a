"""Training loops of others, unchanged: Hugging Face Trainer, Accelerate, Lightning; and their habits."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from optimizers import EKFAC, KFAC, NaturalGradient
from support import page_outputs
from support.architecture import ROOT
from support.cases.case import seeded
from support.documents import text_of
from support.training import assert_same, copied, order_seed

OPTIMIZERS = [KFAC, EKFAC, NaturalGradient]
by_name: Any = {"ids": lambda o: getattr(o, "__name__", repr(o))}


def network() -> nn.Module:
    with seeded(0):
        return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


@functools.cache
def samples(count: int = 32) -> TensorDataset:
    with seeded(1):
        return TensorDataset(torch.randn(count, 5), torch.randint(3, (count,)))


def plain_loop(
    model: nn.Module, opt: torch.optim.Optimizer, epochs: int = 2, clip: float = 0.0, pieces: int = 1
) -> None:
    """What the frameworks do, written out; `pieces` batches of 8 before a step."""
    for _ in range(epochs):
        for k, (x, y) in enumerate(DataLoader(samples(), 8)):
            (F.cross_entropy(model(x), y) / pieces).backward()
            if (k + 1) % pieces == 0:
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                opt.step()
                opt.zero_grad()


# -- Hugging Face Trainer


def language_model() -> nn.Module:
    size = {"vocab_size": 7, "n_positions": 6, "n_embd": 8, "n_layer": 1, "n_head": 2}
    dropped = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    with seeded(0):
        return GPT2LMHeadModel(GPT2Config(**size, **dropped, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"))


@functools.cache
def sentences() -> list[dict[str, Tensor]]:
    """Each word is the last one plus one or two."""
    with seeded(2):
        rows = (torch.randint(7, (32, 1)) + (1 + torch.randint(2, (32, 6))).cumsum(1)) % 7
    return [{"input_ids": row, "labels": row} for row in rows]


def hugging(
    folder: Path, opt: torch.optim.Optimizer, model: nn.Module, steps: int, resume: bool = False, schedule: Any = None,
    **options: Any,
) -> Trainer:  # fmt: skip
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=8, max_steps=steps, save_strategy="steps", save_steps=3,
        logging_steps=1, report_to=[], disable_tqdm=True, use_cpu=True, seed=order_seed(3), **options,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=sentences(), optimizers=(opt, schedule))
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3") if resume else None)
    return trainer


def losses_of(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


HABITS: list[dict[str, Any]] = [
    {},
    {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5},
    {"bf16": True},
    {"gradient_checkpointing": True},
]


@pytest.mark.training_run
@pytest.mark.parametrize(
    "optimizer, options", [*((KFAC, habit) for habit in HABITS), (EKFAC, {}), (NaturalGradient, {})]
)
def test_hugging_face_trainer(tmp_path: Path, optimizer: Any, options: dict[str, Any]):
    model = language_model()
    opt = optimizer(model)
    values = losses_of(hugging(tmp_path, opt, model, 12, **options))
    assert opt.steps == 12 and opt.skipped == 0
    assert values[-1] < 0.97 * values[0], values


@pytest.mark.parametrize("optimizer", OPTIMIZERS, **by_name)
def test_hugging_face_trainer_resumes(tmp_path: Path, optimizer: Any):
    """The run that was interrupted ends where the other one does, schedule included."""
    ends = []
    for resume in (False, True):
        model = language_model()
        opt = optimizer(model)
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))
        hugging(tmp_path, opt, model, 6, resume, schedule)
        ends.append(copied(model))
        assert opt.param_groups[0]["lr"] == pytest.approx(1 / 7)
    assert_same(*ends)
    torch.load(tmp_path / "checkpoint-3" / "optimizer.pt", weights_only=True)


# -- Accelerate


@pytest.fixture
def accelerate() -> Iterator[Any]:
    yield Accelerator
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, **by_name)
def test_accelerate(accelerate: Any, optimizer: Any, pieces: int):
    expected, model = network(), network()
    plain_loop(expected, optimizer(expected), clip=0.1, pieces=pieces)
    accelerator = accelerate(cpu=True, gradient_accumulation_steps=pieces)
    prepared = accelerator.prepare(model, optimizer(model), DataLoader(samples(), 8))
    train, opt, loader = prepared
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(train):
                accelerator.backward(F.cross_entropy(train(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(train.parameters(), 0.1)
                opt.step()
                opt.zero_grad()
    assert_same(copied(model), copied(expected))


def test_accelerate_saves_and_loads(accelerate: Any, tmp_path: Path):
    accelerator = accelerate(cpu=True)
    model = network()
    train, opt = accelerator.prepare(model, KFAC(model))
    plain_loop(train, opt, 1)
    accelerator.save_state(str(tmp_path))
    plain_loop(train, opt, 1)
    expected = copied(model)
    accelerator.load_state(str(tmp_path))
    plain_loop(train, opt, 1)
    assert_same(copied(model), expected)


# -- Lightning


class Classifier(lightning.LightningModule):
    """`given` and `called` are the module, or the network in it."""

    def __init__(self, optimizer: Any, given: str = "model", called: str = "model") -> None:
        super().__init__()
        self.model, self.optimizer, self.given, self.called = network(), optimizer, given, called

    def part(self, name: str) -> nn.Module:
        return self if name == "self" else self.model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: Any, index: int) -> Tensor:
        return F.cross_entropy(self.part(self.called)(batch[0]), batch[1])

    def validation_step(self, batch: Any, index: int) -> None:
        self.part(self.called)(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.part(self.given))


def fitted(module: lightning.LightningModule, epochs: int = 2, resume: Any = None, **options: Any) -> nn.Module:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"enable_checkpointing": False} | options
    trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", **silent, **options)
    trainer.fit(module, DataLoader(samples(), 8), DataLoader(samples(), 8), ckpt_path=resume)
    return module.model


BOTH = [(given, called) for given in ("model", "self") for called in ("model", "self")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("given, called", BOTH)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, **by_name)
def test_lightning(optimizer: Any, given: str, called: str):
    """Lightning hands its own closure to `step`, and calls no forward of the module unless `training_step` does."""
    expected = network()
    plain_loop(expected, optimizer(expected))
    assert_same(copied(fitted(Classifier(optimizer, given, called))), copied(expected))


@pytest.mark.filterwarnings("ignore")
def test_lightning_accumulates_and_clips():
    expected = network()
    plain_loop(expected, KFAC(expected), clip=0.1, pieces=2)
    found = fitted(Classifier(KFAC), accumulate_grad_batches=2, gradient_clip_val=0.1)
    assert_same(copied(found), copied(expected))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("optimizer", OPTIMIZERS, **by_name)
def test_lightning_resumes(optimizer: Any, tmp_path: Path):
    expected = network()
    plain_loop(expected, optimizer(expected))
    keep = ModelCheckpoint(dirpath=tmp_path, filename="first")
    fitted(Classifier(optimizer), 1, enable_checkpointing=True, callbacks=[keep])
    found = fitted(Classifier(optimizer), 2, resume=tmp_path / "first.ckpt")
    assert_same(copied(found), copied(expected))


class Chained(Classifier):
    def training_step(self, batch: Any, index: int) -> Tensor:
        return F.cross_entropy(self.model[2](self.model[1](self.model[0](batch[0]))), batch[1])


@pytest.mark.filterwarnings("ignore")
def test_parts_called_one_after_the_other_are_refused():
    """Their last output is not known beforehand; the network is not what was called."""
    with pytest.raises(RuntimeError, match=r"model\.\d: called with the result of model\.0.*forward"):
        fitted(Chained(KFAC, "self"))


class Policy(nn.Module):
    """As in reinforcement learning, where the loop calls another method than ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.actions, self.value = nn.Linear(5, 8), nn.Linear(8, 3), nn.Linear(8, 1)

    def evaluate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.features(x).tanh()
        return self.actions(h), self.value(h)


class Evaluation(nn.Module):
    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy, self.method = policy, policy.evaluate

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.method(x)


def test_a_method_is_trained_through_a_module_that_calls_it():
    def trained(optimized: nn.Module, called: Any) -> tuple[Any, Any]:
        opt = KFAC(optimized)
        for _ in range(2):
            logits, value = called(samples()[:4][0])
            opt.zero_grad()
            (logits.logsumexp(1) + value[:, 0].square()).mean().backward()
            opt.step()
        return opt, [p.detach().clone() for p in optimized.parameters()]

    torch.manual_seed(0)
    policy = Policy()
    with pytest.raises(
        RuntimeError, match="actions: called with the result of features.*whose forward calls the method"
    ):
        trained(policy, policy.evaluate)
    evaluation = Evaluation(policy)
    policy.__dict__["evaluate"] = evaluation  # so that the loop stays as it is
    opt, _ = trained(evaluation, policy.evaluate)
    assert {block.structure for block in opt.store.blocks} == {"kronecker"} and len(opt.store.blocks) == 3


@pytest.mark.filterwarnings("ignore")
def test_the_closure_of_lightning_is_refused_with_the_way_out():
    with pytest.raises(TypeError, match="without a graph.*manual optimization"):
        fitted(Classifier(functools.partial(KFAC, adaptive=True)))


def test_hooks_on_parts_go_when_the_model_is_called():
    model = network()
    opt = KFAC(model)
    assert all(m._forward_pre_hooks for m in (model[0], model[2]))
    again = copy.deepcopy(model)
    again(samples()[:4][0])  # its hooks are inert
    assert not opt.store.blocks
    model(samples()[:4][0])
    assert opt.store.blocks and not model[0]._forward_pre_hooks and not model[0]._forward_hooks
    other = network()
    opt = KFAC(other)
    del opt
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in other.modules())


# -- the guide


@pytest.mark.filterwarnings("ignore")
def test_the_guide(accelerate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    page = text_of("guides/frameworks.md")
    shown = page_outputs.outputs(page)
    with seeded(0):
        printed = page_outputs.outputs(page_outputs.with_outputs(page, str(ROOT / "docs/guides/frameworks.md")))
    assert shown and page_outputs.lines_agree(shown, printed), printed


# -- habits


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    with seeded(4):
        return [(torch.randn(12, 5).double(), torch.randint(3, (12,))) for _ in range(count)]


def assert_near(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-7, atol=1e-9)


@torch.no_grad()
def made(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, **by_name)
def test_two_models_of_which_one_is_trained_through_the_other(optimizer: Any):
    """A generator and its judge, which is frozen meanwhile; as with a copy of the judge, which nothing records."""
    with seeded(5):
        judge = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    ends = []
    for through in (lambda m: m.requires_grad_(False), copy.deepcopy):
        one, two = network().double(), copy.deepcopy(judge)
        opt, other = optimizer(one), optimizer(two)
        for x, y in batches(6):
            other.zero_grad()
            F.cross_entropy(two(made(one, x)), y).backward()
            other.step()
            opt.zero_grad()
            F.cross_entropy(through(two)(one(x)), 2 - y).backward()
            opt.step()
            two.requires_grad_()
        ends.append(copied(one) | {f"judge.{name}": p for name, p in copied(two).items()})
    assert_near(*ends)
