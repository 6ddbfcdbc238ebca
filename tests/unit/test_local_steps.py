"""What a torch optimizer has of DiLoCo, on ranks that are threads: torch's own optimizers inside and outside."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from hvd_compress import OneBit
from hvd_compress.averaging import Nodes
from hvd_compress.diloco import DiLoCoSettings
from tests.threads import World

torch = pytest.importorskip("torch")

from hvd_compress._torch.local_steps import LocalSteps  # noqa: E402
from hvd_compress._torch.outer import nesterov  # noqa: E402
from hvd_compress._torch.parameters import Buffers  # noqa: E402

TWO = Nodes.of_equal(2, 1)


def test_horovod_is_not_needed():
    blocked = "import sys; sys.modules['horovod'] = None; import hvd_compress._torch.local_steps"
    subprocess.run([sys.executable, "-c", blocked], check=True, timeout=120)


def network(dtype=torch.float32):
    # of NumPy: torch's generator is shared by the threads
    draw = np.random.default_rng(7)
    model = torch.nn.Sequential(torch.nn.Linear(12, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3)).to(dtype)
    for p in model.parameters():
        p.data.copy_(torch.from_numpy(draw.normal(size=tuple(p.shape)) * 0.3))
    return model


def train(steps, optimizer, model, begin, end, rank):
    dtype = next(model.parameters()).dtype
    for step in range(begin, end):
        optimizer.zero_grad()
        x = torch.from_numpy(np.random.default_rng([step, rank]).normal(size=(8, 12))).to(dtype)
        model(x).square().mean().backward()
        steps.before_update()
        optimizer.step()
        steps.after_update(optimizer.state)


def begun(groups, model, outer=nesterov, **settings):
    named = dict(model.named_parameters())
    return LocalSteps(named, Buffers(None), DiLoCoSettings(**settings), groups, outer, ())


def numbers(model):
    return np.concatenate([p.detach().double().reshape(-1).numpy() for p in model.parameters()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("inner", ["sgd", "adam"])
def test_ranks_are_what_one_process_computes_for_all(inner, dtype):
    """In bfloat16 parameters are rounded, and what the ranks agree on is not."""
    make = {"sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), "adam": lambda ps: torch.optim.Adam(ps)}[inner]
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def program(groups):
        model = network(dtype)
        optimizer = make(model.parameters())
        steps = begun(groups, model, sync_every=3)
        train(steps, optimizer, model, 0, 9, groups.rank)
        return numbers(model)

    found = World().run(TWO, program)
    models = [network(dtype) for _ in range(2)]
    optimizers = [make(m.parameters()) for m in models]
    agreed = [torch.nn.Parameter(p.detach().to(wide).clone()) for p in models[0].parameters()]
    outer = nesterov(agreed)
    for step in range(9):
        for rank, (m, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            x = torch.from_numpy(np.random.default_rng([step, rank]).normal(size=(8, 12))).to(dtype)
            m(x).square().mean().backward()
            optimizer.step()
        if step % 3 == 2:
            for i, a in enumerate(agreed):
                a.grad = sum(a.detach() - [*m.parameters()][i].detach().to(wide) for m in models) / 2
            outer.step()
            for m in models:
                for p, a in zip(m.parameters(), agreed, strict=True):
                    p.data.copy_(a.detach())
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 0.0}[dtype]
    for x in found:
        np.testing.assert_allclose(x, numbers(models[0]), rtol=0, atol=tolerance)


def test_the_inner_optimizer_forgets_what_is_not_finite():
    def program(groups):
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        steps = begun(groups, model, sync_every=2)
        train(steps, optimizer, model, 0, 3, groups.rank)
        first, *others = model.parameters()
        kept = optimizer.state[others[0]]["exp_avg"].clone()
        if groups.rank == 0:
            with torch.no_grad():
                first[0, 0] = torch.nan
            optimizer.state[first]["exp_avg"][0, 0] = torch.nan
        turn = steps.member.step()
        with torch.no_grad():
            outcome = steps.member.act(turn, steps.parameters.arrays_of)
            # the warning itself is the process's, and threads cannot catch it
            steps._take_over(outcome._replace(problem=None), optimizer.state)
        assert outcome.problem
        assert (first in optimizer.state) == (groups.rank == 1)
        # of the others nothing was spoiled
        assert torch.equal(optimizer.state[others[0]]["exp_avg"], kept)
        train(steps, optimizer, model, 4, 8, groups.rank)
        return numbers(model)

    a, b = World().run(TWO, program)
    assert np.isfinite(a).all()
    np.testing.assert_array_equal(a, b)


def test_an_outer_optimizer_may_give_parameters_other_memory():
    class Moving(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                for p in group["params"]:
                    p.data = p.data.clone()

    def program(groups):
        results = []
        for kind in (torch.optim.SGD, Moving):
            model = network()
            steps = begun(groups, model, lambda ps, kind=kind: kind(ps, lr=0.7, momentum=0.9), sync_every=2)
            train(steps, torch.optim.SGD(model.parameters(), lr=0.1), model, 0, 8, groups.rank)
            results.append(numbers(model))
        return results

    for plain, moving in World().run(TWO, program):
        np.testing.assert_array_equal(plain, moving)


@pytest.mark.parametrize("outer", [nesterov, lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.01), betas=(0.8, 0.9))])
def test_states_are_exact_with_any_outer_optimizer(outer):
    def program(groups):
        model, other = network(), network()
        optimizer, again = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
        steps = begun(groups, model, outer, sync_every=4, fragments=2, delay=1, compression=OneBit())
        train(steps, optimizer, model, 0, 7, groups.rank)
        state = steps.member.state_dict()
        resumed = begun(groups, other, outer, sync_every=4, fragments=2, delay=1, compression=OneBit())
        other.load_state_dict(model.state_dict())
        resumed.member.load_state_dict(state)
        train(steps, optimizer, model, 7, 16, groups.rank)
        train(resumed, again, other, 7, 16, groups.rank)
        return numbers(model), numbers(other)

    for x, y in World().run(TWO, program):
        np.testing.assert_array_equal(x, y)


def test_the_function_of_the_user_makes_one_optimizer_for_each_fragment():
    """Whoever keeps what it returned has the optimizer that steps, also after a state was loaded or refused."""
    made = []

    def outer(params):
        made.append(torch.optim.SGD(params, lr=0.7, momentum=0.9))
        return made[-1]

    def program(groups):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps = begun(groups, model, outer, sync_every=2)
        train(steps, optimizer, model, 0, 4, groups.rank)
        steps.member.load_state_dict(steps.member.state_dict())
        return steps.member.stats()["fragments"]

    found = World().run(TWO, program)
    assert len(made) == sum(found)
