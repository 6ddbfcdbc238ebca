"""AdaGrad inside the exchange of a wrapped Keras optimizer, on one rank and on several."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvd_compress import AdaGrad, Auto, NoCompression, OneBit, ParameterServer
from hvd_compress.errors import UnsupportedError
from hvd_compress.exchange.raw import CheckedRaw
from tests.parallel.cases import Cases
from tests.parallel.workers.keras_fit import FRAMEWORK, check_equal_on_all_ranks, hvd, keras, trained, wrapped
from tests.parallel.workers.neutral import numbers, raises

__all__ = ["FRAMEWORK", "cases"]

cases = Cases()
EPSILON = 1e-6
LEARNING_RATE = 0.125
SHAPES = {"weight": (37, 50), "bias": (37,)}
# exact, and exchanged all the same
ALL_SENT = CheckedRaw()


def tensor(array: np.ndarray) -> Any:
    if hasattr(keras, "ops"):
        return keras.ops.convert_to_tensor(array)
    return keras.backend.constant(array)


class Run:
    """Steps of an optimizer with gradients that are known on every rank."""

    def __init__(self, **settings: Any) -> None:
        if hasattr(keras, "Variable"):
            self.of = [keras.Variable(np.zeros(shape, np.float32), name=n) for n, shape in SHAPES.items()]
        else:
            self.of = [keras.backend.variable(np.zeros(shape, np.float32), name=n) for n, shape in SHAPES.items()]
        sgd = keras.optimizers.SGD(LEARNING_RATE)
        self.optimizer = wrapped(sgd, **{"compression": ALL_SENT, "adagrad": AdaGrad(EPSILON), **settings})

    def step(self, number: int) -> list[np.ndarray]:
        gradients = [tensor(numbers(name, hvd.rank(), number, shape)) for name, shape in SHAPES.items()]
        self.optimizer.apply_gradients(list(zip(gradients, self.of, strict=True)))
        return [v.detach().cpu().numpy() if hasattr(v, "detach") else np.asarray(v) for v in map(self._value, self.of)]

    @staticmethod
    def _value(variable: Any) -> Any:
        return variable.value if hasattr(keras, "Variable") else variable.numpy()


class Oracle:
    """Adagrad in NumPy on averages."""

    def __init__(self) -> None:
        self.values = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        self.squares = {name: np.zeros(shape) for name, shape in SHAPES.items()}

    def step(self, number: int) -> list[np.ndarray]:
        for name, shape in SHAPES.items():
            each = [numbers(name, rank, number, shape) for rank in range(hvd.size())]
            average = np.mean(each, axis=0, dtype=np.float64)
            self.squares[name] += average**2
            self.values[name] -= LEARNING_RATE * average / (np.sqrt(self.squares[name]) + EPSILON)
        return list(self.values.values())


SETTINGS = {
    "compressed": {},
    "alone": {"bucket_bytes": 0},
    "horovods": {"compression": NoCompression()},
    "parameter-server": {"exchange": ParameterServer()},
    "dense-answer": {"exchange": ParameterServer(answer="dense"), "compression": NoCompression()},
}


@cases.each(SETTINGS)
def updates_are_adagrads(settings: dict[str, Any]) -> None:
    run, oracle = Run(**settings), Oracle()
    for number in range(5):
        for found, expected in zip(run.step(number), oracle.step(number), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


@cases.add
def a_state_goes_on_where_it_ended() -> None:
    run, later, oracle = Run(), Run(), Oracle()
    for number in range(3):
        run.step(number)
        oracle.step(number)
    for variable, known in zip(later.of, run.of, strict=True):
        variable.assign(known)
    later.optimizer.load_compression_state_dict(run.optimizer.compression_state_dict())
    for number in range(3, 5):
        for found, expected in zip(later.step(number), oracle.step(number), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


@cases.add
def a_factor_on_gradients_changes_nothing() -> None:
    # but for what epsilon is worth beside them
    one, many = Run(adagrad=AdaGrad(1e-10)), Run(adagrad=AdaGrad(1e-10), op=hvd.Sum)
    for number in range(3):
        for found, expected in zip(many.step(number), one.step(number), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


@cases.add
def fit_learns() -> None:
    sgd = keras.optimizers.SGD(0.05)
    model = trained(wrapped(sgd, OneBit(), adagrad=AdaGrad()), epochs=4)
    check_equal_on_all_ranks(model)
    assert model.seen["loss"][-1] < model.seen["loss"][0]


@cases.add
def what_it_does_not_go_with_is_refused() -> None:
    raises(UnsupportedError, lambda: Run(exchange="allgather"), "two_phase")
    raises(UnsupportedError, lambda: Run(compression=Auto()), "accumulators")
    raises(TypeError, lambda: Run(adagrad=0.1), "adagrad=0.1")
    run = Run()
    run.step(0)
    raises(UnsupportedError, lambda: run.optimizer.set_compression(OneBit()), "redistribute")
