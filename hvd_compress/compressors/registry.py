"""Find the compressor of a name or a codec number: those of this package, and those that others register."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, TypeVar, cast

from hvd_compress.compressors.adaptive import Adaptive
from hvd_compress.compressors.base import Compressor
from hvd_compress.compressors.blockwise import Blockwise
from hvd_compress.compressors.chunked import ChunkedTopK
from hvd_compress.compressors.dense import BF16, FP16, NoCompression
from hvd_compress.compressors.efsignsgd import EFSignSGD
from hvd_compress.compressors.natural import Natural
from hvd_compress.compressors.onebit import OneBit
from hvd_compress.compressors.percentile import Percentile
from hvd_compress.compressors.powersgd import PowerSGD
from hvd_compress.compressors.qsgd import QSGD
from hvd_compress.compressors.randomk import RandomK
from hvd_compress.compressors.signsgd import SignSGD
from hvd_compress.compressors.terngrad import TernGrad
from hvd_compress.compressors.threshold import Threshold
from hvd_compress.compressors.topk import TopK

__all__ = ["COMPRESSORS", "check_registered", "class_of", "class_of_codec", "known_ids", "register"]

COMPRESSORS: dict[str, type[Compressor]] = {
    c.id: c
    for c in (
        *(OneBit, Threshold, Adaptive, TopK, ChunkedTopK, Percentile, QSGD, RandomK, NoCompression, BF16, FP16),
        *(EFSignSGD, Blockwise, TernGrad, Natural, SignSGD),
    )
}
"""The compressors of this package that make payloads, by id."""

_FACTORED: dict[str, type[Compressor]] = {PowerSGD.id: PowerSGD}
"""Those whose exchange sums factors: they have no payloads, and no numbers on the wire."""

ENTRY_POINTS = "hvd_compress.compressors"
FIRST_CODEC, LAST_CODEC = 192, 255
# what configurations of other things are called
_OTHER_IDS = ("assigned", "auto", "policy")

_registered: dict[str, type[Compressor]] = {}
_Kind = TypeVar("_Kind", bound=type[Compressor])


def register(kind: _Kind) -> _Kind:
    """Register a compressor class of your own, so that it works wherever one of this package does; also a decorator.

    All ranks have to register it. Registering the same class again, as a notebook cell that runs twice does, replaces
    the earlier one.

    Args:
        kind: a frozen dataclass that derives from `Compressor`. Its `id` is made of lower-case letters and digits; its
            `codec`, and its `coded_codec` if there is one, are numbers from 192 to 255 that no other class has.

    Returns:
        The class.

    Raises:
        TypeError: not such a class.
        ValueError: an id or a number that is taken, or out of its range.

    Example:
        One-bit under another name; `Compressor` shows a complete compressor of your own.

        >>> from dataclasses import dataclass
        >>> import hvd_compress
        >>> @hvd_compress.register
        ... @dataclass(frozen=True)
        ... class Renamed(hvd_compress.OneBit):
        ...     id = "renamedonebit"
        ...     codec = 251
        >>> hvd_compress.from_config({"id": "renamedonebit"})
        Renamed(group='row', sample=None, error_feedback=True)
    """
    _check_class(kind)
    _check_id(kind)
    _check_codecs(kind)
    _check_decoder(kind)
    _registered[kind.id] = kind
    return kind


def class_of(id: str) -> type[Compressor] | None:
    """Return the class with an id, loaded from its entry point if nobody has registered it; None if there is none.

    Raises:
        ValueError: its entry point cannot be loaded.
    """
    found = COMPRESSORS.get(id) or _FACTORED.get(id) or _registered.get(id)
    if found is None and id in (points := _entry_points()):
        _load(points[id])
        found = _registered.get(id)
        if found is None:
            raise ValueError(f"{_said(points[id])} has no compressor of the id {id!r}; its name must be that id")
    return found


def class_of_codec(codec: int) -> type[Compressor] | None:
    """Return the class with a codec number, coded or not; entry points are loaded where nobody else has it.

    Raises:
        ValueError: none has it, and an entry point that might cannot be loaded.
    """
    found = _with_codec(codec)
    if found is None and FIRST_CODEC <= codec <= LAST_CODEC:
        failed: list[ValueError] = []
        for name in _entry_points():
            try:
                class_of(name)
            except ValueError as error:
                failed.append(error)
        found = _with_codec(codec)
        if found is None and failed:
            raise failed[0]
    return found


def known_ids() -> list[str]:
    """Return all ids that can be asked for; entry points are not loaded."""
    return [*COMPRESSORS, *_FACTORED, *_registered, *(name for name in _entry_points() if name not in _registered)]


def check_registered(compressor: Compressor) -> None:
    """Raise TypeError unless a compressor's class is of this package, registered, or derived from such a one.

    Otherwise nobody could decode its payloads, and its codec number may belong to another class.
    """
    kind = type(compressor)
    if kind in _FACTORED.values():
        return
    owner = _with_codec(getattr(kind, "codec", -1))
    if owner is None or not any(_same_name(base, owner) for base in kind.__mro__):
        raise TypeError(
            f"{compressor!r}: its class is not registered; write @hvd_compress.register above that of {kind.__name__}, "
            "on all ranks"
        )


def _with_codec(codec: int) -> type[Compressor] | None:
    kinds = (*COMPRESSORS.values(), *_registered.values())
    return next((kind for kind in kinds if codec in (kind.codec, kind.coded_codec)), None)


def _same_name(one: type, other: type) -> bool:
    return (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)


def _check_class(kind: Any) -> None:
    if not isinstance(kind, type) or not issubclass(kind, Compressor):
        hint = "give its class, not one of its instances" if isinstance(kind, Compressor) else "derive it from "
        hint += "" if isinstance(kind, Compressor) else "hvd_compress.Compressor"
        raise TypeError(f"register({kind!r}): this is no class of compressors; {hint}")
    if lacking := ", ".join(sorted(getattr(kind, "__abstractmethods__", ()))):
        raise TypeError(f"register({kind.__name__}): it does not define {lacking}; see hvd_compress.Compressor")
    given = vars(kind).get("__dataclass_params__")
    if given is None or not given.frozen or not given.eq:
        raise TypeError(
            f"register({kind.__name__}): it must be a frozen dataclass; write @dataclass(frozen=True) between "
            "@register and the class"
        )
    if kind.reducible:
        raise TypeError(
            f"register({kind.__name__}): reducible is for what Horovod's own allreduce sums. Leave it out; "
            "what that is to sum needs nothing of this package, only compress(tensor) and decompress(tensor, ctx)"
        )
    if "id" not in vars(kind) or "codec" not in vars(kind):
        raise TypeError(
            f"register({kind.__name__}): it needs an id and a codec of its own, as in `id: ClassVar[str] = "
            f'"{kind.__name__.lower()}"` and `codec: ClassVar[int] = {FIRST_CODEC}`'
        )
    settings = {field.name for field in dataclasses.fields(cast(Any, kind))}
    for name in ("id", "codec", "coded_codec"):
        if name in settings:
            raise TypeError(f"register({kind.__name__}): {name} is not a setting; annotate it as ClassVar")


def _check_id(kind: type[Compressor]) -> None:
    given: Any = kind.id
    if not isinstance(given, str) or not re.fullmatch("[a-z][a-z0-9]*", given):
        raise ValueError(
            f"register({kind.__name__}): id={kind.id!r} must be made of lower-case letters and digits, and begin with "
            'a letter, so that it can be written as in compression="id:setting"'
        )
    taken = COMPRESSORS.get(kind.id) or _FACTORED.get(kind.id) or _registered.get(kind.id)
    if kind.id in _OTHER_IDS or (taken is not None and not _replaces(kind, taken)):
        by = "this package" if taken is None else f"{taken.__module__}.{taken.__qualname__}"
        raise ValueError(f"register({kind.__name__}): id={kind.id!r} is taken by {by}; give it another")


def _check_codecs(kind: type[Compressor]) -> None:
    numbers = {"codec": kind.codec} | ({} if kind.coded_codec is None else {"coded_codec": kind.coded_codec})
    others = [other for other in _registered.values() if not _replaces(kind, other)]
    taken = {number: other for other in others for number in (other.codec, other.coded_codec) if number is not None}
    for name, number in numbers.items():
        allowed = (
            f"an integer from {FIRST_CODEC} to {LAST_CODEC}, which are for compressors of others than this package"
        )
        if type(number) is not int or not FIRST_CODEC <= number <= LAST_CODEC:
            raise ValueError(f"register({kind.__name__}): {name}={number!r} must be {allowed}")
        if number in taken:
            by = f"{taken[number].__module__}.{taken[number].__qualname__}"
            raise ValueError(
                f"register({kind.__name__}): {name}={number} is taken by {by}; give it another number, {allowed}"
            )
    if kind.codec == kind.coded_codec:
        raise ValueError(f"register({kind.__name__}): codec and coded_codec are both {kind.codec}; they must differ")


def _replaces(kind: type[Compressor], other: type[Compressor]) -> bool:
    return _same_name(kind, other) and (kind.id, kind.codec) == (other.id, other.codec)


def _check_decoder(kind: type[Compressor]) -> None:
    try:
        kind.decoder()
    except Exception as error:
        raise TypeError(
            f"register({kind.__name__}): no compressor for decoding could be made of it ({error}); give all settings "
            "defaults, or define the class method decoder()"
        ) from error


def _entry_points() -> dict[str, Any]:
    # imported here: it takes as long as half of the package, and most programs never ask
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def _said(point: Any) -> str:
    return f"the entry point {point.name!r} = {point.value!r} of {ENTRY_POINTS}"


def _load(point: Any) -> None:
    try:
        kind = point.load()
        if _registered.get(getattr(kind, "id", "")) is not kind:
            register(kind)
    except Exception as error:
        raise ValueError(
            f"{_said(point)} cannot be loaded: {type(error).__name__}: {error}. Mend or uninstall the package that "
            "has it"
        ) from error
