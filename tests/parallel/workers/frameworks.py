"""Loops that others have written around the optimizer: Lightning's trainer, and what accelerate prepares."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import horovod.torch as horovod
import numpy as np
import pytest
import torch

import hvd_compress.torch as hvd
from hvd_compress import Adaptive, OneBit, TopK
from tests.parallel.cases import Cases
from tests.parallel.workers.common import check_equal_on_all_ranks, to_numpy

cases = Cases()
WAYS: dict[str, Any] = {"onebit": OneBit(), "adaptive": Adaptive(pi=16)}
BATCHES = 6
LR = 0.5
CLIP = 1e-3


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(24, 24), torch.nn.Tanh(), torch.nn.Linear(24, 24))


def batches() -> torch.utils.data.DataLoader[Any]:
    generator = torch.Generator().manual_seed(100 + horovod.rank())
    x = torch.randn(BATCHES * 8, 24, generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=8)


def wrap(module: torch.nn.Module, compression: Any, lr: float = LR, **settings: Any) -> Any:
    sgd = torch.optim.SGD(module.parameters(), lr=lr)
    return hvd.DistributedOptimizer(sgd, module.named_parameters(), compression, min_numel=100, **settings)


class Moves:
    """How far the parameters go in each step."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._last = self._flat()
        self.lengths: list[float] = []

    def take(self) -> None:
        now = self._flat()
        self.lengths.append(float(np.linalg.norm(now - self._last)))
        self._last = now

    def _flat(self) -> np.ndarray:
        return np.concatenate([to_numpy(p).ravel().astype(np.float64) for p in self._module.parameters()])


def check_clipped(lengths: list[float], rates: list[float]) -> None:
    assert len(lengths) == len(rates), (lengths, rates)
    for length, rate in zip(lengths, rates, strict=True):
        # float32 rounds what is added to parameters that are much larger
        assert 0 < length <= rate * CLIP * 1.01, (lengths, rates)


# -- Lightning -------------------------------------------------------------------------------------------------------


@contextmanager
def lightning() -> Iterator[Any]:
    """The package; it warns of itself on import and of a trainer that is made small."""
    with warnings.catch_warnings():
        for message in (
            r"`isinstance\(treespec, LeafSpec\)` is deprecated",
            r"The 'train_dataloader' does not have many workers",
            r"The `srun` command is available on your system",
            r"You defined a `validation_step` but",
        ):
            warnings.filterwarnings("ignore", message=message)
        import pytorch_lightning

        logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
        yield pytorch_lightning


def fit(pl: Any, module: Any, epochs: int, **settings: Any) -> Any:
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=epochs, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, **settings,
    )  # fmt: skip
    assert trainer.world_size == 1, "a strategy of Lightning's own would average gradients a second time"
    trainer.fit(module, batches())
    return trainer


def lightning_module(pl: Any, wrapped: Callable[[Any], Any], schedules: bool = False) -> Any:
    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.body = network()
            self.moves = Moves(self.body)

        def loss(self, batch: Any) -> torch.Tensor:
            (x,) = batch
            return (self.body(x) - x).pow(2).mean() * 50

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.loss(batch)

        def on_train_batch_end(self, *args: Any) -> None:
            self.moves.take()

        def configure_optimizers(self) -> Any:
            self.wrapped = wrapped(self)
            if not schedules:
                return self.wrapped
            return [self.wrapped], [torch.optim.lr_scheduler.StepLR(self.wrapped, 1, 0.5)]

    return Module()


@cases.each(WAYS)
def lightning_clips_and_schedules(compression: Any) -> None:
    with lightning() as pl:
        module = lightning_module(pl, lambda m: wrap(m, compression), schedules=True)
        fit(pl, module, 2, gradient_clip_val=CLIP)
        check_clipped(module.moves.lengths, [LR] * BATCHES + [LR / 2] * BATCHES)
        assert module.wrapped.param_groups[0]["lr"] == LR / 4
        assert module.wrapped.compression_stats()["total"]["steps"] == 2 * BATCHES
        check_equal_on_all_ranks(module)


@cases.each(WAYS)
def lightning_accumulates(compression: Any) -> None:
    with lightning() as pl:
        module = lightning_module(pl, lambda m: wrap(m, compression, backward_passes_per_step=4))
        # the last step of an epoch takes what is left, of which backward() cannot know
        module.on_before_optimizer_step = lambda optimizer: optimizer.synchronize()
        fit(pl, module, 2, accumulate_grad_batches=4, gradient_clip_val=CLIP)
        lengths = module.moves.lengths
        check_clipped([x for x in lengths if x], [LR] * 4)
        assert module.wrapped.compression_stats()["total"]["steps"] == 4
        check_equal_on_all_ranks(module)


@cases.add
def lightning_that_clips_what_is_not_exchanged_yet_is_told_the_remedy() -> None:
    with lightning() as pl:
        module = lightning_module(pl, lambda m: wrap(m, OneBit(), backward_passes_per_step=4))
        with pytest.warns(UserWarning, match=r"'body.2.bias' .* synchronize\(\)") as told:
            fit(pl, module, 2, accumulate_grad_batches=4, gradient_clip_val=CLIP)
        assert len([w for w in told if "synchronize" in str(w.message)]) == 1
        check_equal_on_all_ranks(module)


@cases.each(WAYS)
def lightning_trains_in_bfloat16(compression: Any) -> None:
    with lightning() as pl:
        module = lightning_module(pl, lambda m: wrap(m, compression))
        fit(pl, module, 1, precision="bf16-mixed", gradient_clip_val=CLIP)
        check_clipped(module.moves.lengths, [LR] * BATCHES)
        check_equal_on_all_ranks(module)


@cases.each(WAYS)
def lightning_leaves_steps_to_the_user(compression: Any) -> None:
    with lightning() as pl:
        module = lightning_module(pl, lambda m: wrap(m, compression))
        module.automatic_optimization = False

        def training_step(batch: Any, batch_idx: int) -> None:
            # an object whose class is derived from the optimizer's
            optimizer = module.optimizers()
            optimizer.zero_grad()
            module.manual_backward(module.loss(batch))
            optimizer.synchronize()
            module.clip_gradients(optimizer, gradient_clip_val=CLIP, gradient_clip_algorithm="norm")
            if batch_idx % 2:
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
            optimizer.set_loss_scale(1.0)
            assert optimizer.compression_stats()["total"]["steps"] == batch_idx + 1
            optimizer.load_compression_state_dict(optimizer.compression_state_dict())

        module.training_step = training_step
        fit(pl, module, 1)
        check_clipped(module.moves.lengths, [LR] * BATCHES)
        check_equal_on_all_ranks(module)


@cases.add
def lightning_fabric_sets_up_what_is_wrapped() -> None:
    with lightning():
        import lightning_fabric

        model = network()
        wrapped = wrap(model, OneBit())
        fabric = lightning_fabric.Fabric(accelerator="cpu", devices=1)
        module, optimizer = fabric.setup(model, wrapped)
        moves = Moves(model)
        for (x,) in batches():
            optimizer.zero_grad()
            fabric.backward((module(x) - x).pow(2).mean() * 50)
            fabric.clip_gradients(module, optimizer, max_norm=CLIP)
            optimizer.step()
            moves.take()
        check_clipped(moves.lengths, [LR] * BATCHES)
        assert optimizer.compression_stats()["total"]["steps"] == BATCHES
        check_equal_on_all_ranks(model)


def daso(module: Any) -> Any:
    sgd = torch.optim.SGD(module.parameters(), lr=0.01)
    return hvd.DASO(sgd, module.named_parameters(), ranks_per_node=1)


def diloco(module: Any) -> Any:
    sgd = torch.optim.SGD(module.parameters(), lr=0.01)
    return hvd.DiLoCo(sgd, module.named_parameters(), sync_every=2, delay=1)


ENDS_OF_EPOCHS = {
    "daso": (daso, lambda optimizer: optimizer.epoch_end(1.0)),
    "diloco": (diloco, lambda optimizer: optimizer.average_parameters()),
}


@cases.each(ENDS_OF_EPOCHS)
def lightning_ends_epochs(ways: Any) -> None:
    wrap_optimizer, end = ways
    with lightning() as pl:
        module = lightning_module(pl, wrap_optimizer)
        module.on_train_epoch_end = lambda: end(module.optimizers())
        fit(pl, module, 2)
        assert any(module.moves.lengths)
        check_equal_on_all_ranks(module)


# -- accelerate ------------------------------------------------------------------------------------------------------


@cases.each(WAYS)
def accelerate_prepares(compression: Any) -> None:
    from accelerate import Accelerator

    model = network()
    wrapped = wrap(model, compression)
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 1, "accelerate would average gradients a second time"
    schedule = torch.optim.lr_scheduler.StepLR(wrapped, 1, 0.5)
    prepared, optimizer, data, scheduler = accelerator.prepare(model, wrapped, batches(), schedule)
    moves = Moves(model)
    for _ in range(2):
        for (x,) in data:
            optimizer.zero_grad()
            accelerator.backward((prepared(x) - x).pow(2).mean() * 50)
            accelerator.clip_grad_norm_(prepared.parameters(), CLIP)
            optimizer.step()
            moves.take()
        scheduler.step()
    check_clipped(moves.lengths, [LR] * BATCHES + [LR / 2] * BATCHES)
    assert wrapped.param_groups[0]["lr"] == LR / 4
    assert wrapped.compression_stats()["total"]["steps"] == 2 * BATCHES
    check_equal_on_all_ranks(model)


@cases.each(WAYS)
def accelerate_accumulates(compression: Any) -> None:
    from accelerate import Accelerator

    model = network()
    wrapped = wrap(model, compression, backward_passes_per_step=2)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    prepared, optimizer, data = accelerator.prepare(model, wrapped, batches())
    moves = Moves(model)
    for (x,) in data:
        with accelerator.accumulate(prepared):
            accelerator.backward((prepared(x) - x).pow(2).mean() * 50)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            moves.take()
    check_clipped([x for x in moves.lengths if x], [LR] * (BATCHES // 2))
    assert wrapped.compression_stats()["total"]["steps"] == BATCHES // 2
    check_equal_on_all_ranks(model)


# -- hooks of the optimizer's step, which such loops set -------------------------------------------------------------


@cases.add
def hooks_of_a_step_run_once() -> None:
    model = network()
    optimizer = wrap(model, TopK(ratio=1.0))
    ran: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: ran.append("before"))
    optimizer.register_step_post_hook(lambda *_: ran.append("after"))
    for (x,) in batches():
        (model(x) - x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert ran == ["before", "after"] * BATCHES
    check_equal_on_all_ranks(model)
