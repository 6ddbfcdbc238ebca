"""The command line, in this process and as `python -m hvd_compress`."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from hvd_compress import FP16, NoCompression, OneBit, ThreadRanks, Threshold, TopK, __version__
from hvd_compress.cli import advise, bench, check, main, ranks
from hvd_compress.cli.models import parse_shapes, read_shapes, shapes_of_model
from hvd_compress.cli.predict import Prediction, predict
from hvd_compress.cli.units import parse_bandwidth, parse_seconds, show_bandwidth, show_bytes, show_seconds
from hvd_compress.cli.verdict import TIME_ALONE, advice, report
from hvd_compress.cost import Line, LinkSpeed, Network, Speed
from hvd_compress.errors import MissingError
from hvd_compress.loopback import Loopback

ROOT = Path(__file__).parents[2]
PAPER = ["--bandwidth", "1gbit", "--latency", "50us", "--ranks", "4"]


@pytest.fixture(autouse=True)
def not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "HOROVOD_LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)


# -- quantities ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1gbit", 1e9), ("100mbit", 1e8), ("2.5Gbit/s", 2.5e9), ("10 Gbps", 1e10), ("64kbit", 64e3), ("5bit", 5.0),
     ("1Gbps", 1e9), ("1Gbit/s", 1e9), ("10 Gbit/s", 1e10), ("100Mbps", 1e8), ("100Mb/s", 1e8), ("40gbits/s", 4e10),
     ("125MB/s", 1e9), ("125 MB/s", 1e9), ("1GBps", 8e9), ("12.5MiB/s", 12.5 * 2**20 * 8), ("1Gib/s", 2.0**30),
     ("1megabit", None), ("2Mbyte/s", 1.6e7), ("3 kbytes/sec", 2.4e4), ("1Tbit", 1e12), ("1e9bit/s", 1e9),
     (".5gbit", 5e8), ("25Gbitps", 25e9), (" 1gbit ", 1e9),
     ("1gb", None), ("1GB", None), ("100MBPS", None), ("0gbit", None), ("0.0MB/s", None), ("", None), ("-1gbit", None),
     ("1.2.3gbit", None), ("1e9", None), ("nan", None), ("nangbit", None), ("inf", None), ("infgbit", None),
     ("1e400gbit", None), ("1e-400gbit", None), ("9" * 400 + "gbit", None), ("1e99gbit", None), ("1,5gbit", None),
     ("1_0gbit", None), ("\u0661gbit", None), ("gbit", None), ("1 g bit", None), ("1gbit/h", None), ("0x1gbit", None)],
)  # fmt: skip
def test_bandwidths(text: str, expected: float | None) -> None:
    if expected is None:
        with pytest.raises(ValueError, match="such as 100mbit"):
            parse_bandwidth(text)
    else:
        assert parse_bandwidth(text) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("50us", 5e-5), ("1.5ms", 1.5e-3), ("2s", 2.0), ("0us", 0.0), ("80 ns", 8e-8), ("7\u00b5s", 7e-6),
     ("7\u03bcs", 7e-6), ("0.1ms", 1e-4), ("5e-5s", 5e-5), ("50US", 5e-5), ("5", None), (".ms", None), ("1m", None),
     ("-1us", None), ("nan", None), ("infs", None), ("", None), ("1e9s", None), ("1e400s", None), ("1..5ms", None)],
)  # fmt: skip
def test_times(text: str, expected: float | None) -> None:
    if expected is None:
        with pytest.raises(ValueError, match="such as 50us"):
            parse_seconds(text)
    else:
        assert parse_seconds(text) == pytest.approx(expected)


def test_quantities_as_text() -> None:
    assert [show_bytes(n) for n in (0, 999, 1500, 2.5e6, 1e12)] == ["0.00 B", "999 B", "1.50 kB", "2.50 MB", "1.00 TB"]
    assert [show_bandwidth(b) for b in (0, 99.99e6, 1e9, math.inf)] == ["never", "100 Mbit/s", "1.00 Gbit/s", "always"]
    assert [show_seconds(s) for s in (1e-5, 0.0123, 2)] == ["0.01 ms", "12.3 ms", "2000 ms"]


# -- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        " , ",
        "4x",
        "x4",
        "0x4",
        "0x5",
        "4x4x",
        "abc",
        "axb",
        "4*x",
        "-4",
        "-1",
        "4*0",
        "4x0",
        "4*999999999",
        "9" * 5000,
        "999999999x999999999",
        "1e3",
        "4.0x4",
        "4\u00d74",
        "inf",
        "nan",
    ],
)
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="shape"):
        parse_shapes(text)


def test_shapes_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "shapes"
    file.write_text("784x10 10  # first layer\n# nothing here\n\n3x3x8*2\n")
    assert read_shapes(str(file)) == [(784, 10), (10,), (3, 3, 8), (3, 3, 8)]
    with pytest.raises(ValueError, match="missing"):
        read_shapes(str(tmp_path / "missing"))


def tensor(*shape: int, requires_grad: bool = True) -> SimpleNamespace:
    return SimpleNamespace(shape=shape, requires_grad=requires_grad)


class TorchLike:
    """What is asked of a torch module."""

    def named_parameters(self) -> list:
        return [("a", tensor(4, 3)), ("frozen", tensor(9, requires_grad=False)), ("b", tensor(4)), ("none", tensor(0))]


class KerasLike(TorchLike):
    """A Keras model is a torch module as well on that backend."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        self.trainable_variables = [tensor(*shape) for shape in shapes]


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("models_of_a_user")
    vars(module).update(
        torch=TorchLike,
        keras=lambda: KerasLike((3, 4), (4,)),
        unbuilt=KerasLike,
        made=KerasLike((5, 6)),
        number=lambda: 3,
        broken=lambda: 1 / 0,
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("models")
def test_shapes_of_models() -> None:
    assert shapes_of_model("models_of_a_user:torch") == [(4, 3), (4,)]
    assert shapes_of_model("models_of_a_user:keras") == [(3, 4), (4,)]
    # calling a model is its forward pass
    assert shapes_of_model("models_of_a_user:made") == [(5, 6)]


def test_a_model_may_lie_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "class T:\n    shape = (2, 3)\nclass Net:\n    trainable_variables = [T]\n"
    (tmp_path / "net_of_this_folder.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    assert shapes_of_model("net_of_this_folder:Net") == [(2, 3)]


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(
    ("place", "message"),
    [("models_of_a_user:gone", "gone"), ("no_such_module:f", "no_such_module"), ("models_of_a_user", "module:function"),
     (":f", "module:function"), ("models_of_a_user:number", "int"), ("models_of_a_user:unbuilt", "built")],
)  # fmt: skip
def test_what_is_no_model_is_refused(place: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--model", place, *PAPER]) == 2
    assert message in capsys.readouterr().err


# -- advise ----------------------------------------------------------------------------------------------------------

# seconds per element, such as a slow core would take
KERNELS = Speed(Line(1e-5, 2e-9), Line(1e-5, 1e-9), Line(1e-5, 1e-9), 0.06)


def test_slow_links_want_compression_and_fast_ones_do_not() -> None:
    speeds = {FP16(): KERNELS, OneBit(): KERNELS}
    shapes = [(4096, 4096), (4096,)]
    slow = predict(shapes, Network.on_paper(1e8, 5e-5, 4), speeds)
    fast = predict(shapes, Network.on_paper(1e12, 5e-5, 4), speeds)
    assert advice(slow).startswith("Use compression=OneBit()")
    assert advice(fast).startswith("Don't compress")


def test_break_even_is_where_both_take_the_same() -> None:
    def rows(bandwidth: float) -> list[Prediction]:
        return predict([(4096, 4096)], Network.on_paper(bandwidth, 5e-5, 4), {OneBit(): KERNELS}, step=0.05)

    for i in (1, 2):
        dense, row = (rows(rows(1e9)[i].break_even)[k] for k in (0, i))
        assert row.seconds == pytest.approx(dense.seconds, rel=0.01)


def test_rows_by_hand() -> None:
    link = LinkSpeed(Line(1, 1e-6), Line(1, 1e-6), Line(2, 1e-6), Line(3, 1e-6))
    speeds = {FP16(): Speed(Line(1), Line(2)), OneBit(): Speed(Line(0.5), Line(0.25), Line(0.125))}
    dense, half, two_phase, allgather = predict([(1024, 1024)], Network(2, link), speeds)
    assert dense == Prediction(NoCompression(), "dense", 2**22, 1 + 4.194304, pytest.approx(math.nan, nan_ok=True))
    assert half.seconds == pytest.approx(1 + (1 + 2.097152) + 2)
    kernels = 2 * 0.5 + (0.25 + 0.125 + 0.5) + 2 * 0.25
    assert two_phase.seconds == pytest.approx(2 + 3 + kernels + 1e-6 * two_phase.sent_bytes)
    assert allgather.seconds == pytest.approx(3 + 0.5 + 0.375 + 1e-6 * allgather.sent_bytes)
    # 1 bit per element and 8 bytes per row, to the other rank; a few more for headers
    assert allgather.sent_bytes == pytest.approx(2**20 / 8 + 8 * 1024, rel=1e-3)


def test_small_tensors_stay_dense() -> None:
    network = Network.on_paper(1e9, 5e-5, 4)
    dense, two_phase, allgather = predict([(64, 64)] * 10, network, {OneBit(): KERNELS})
    assert dense.sent_bytes == two_phase.sent_bytes == allgather.sent_bytes
    assert dense.seconds == two_phase.seconds


def test_a_payload_of_changing_size_counts_as_measured() -> None:
    network = Network.on_paper(1e9, 5e-5, 4)
    rows = predict([(1000, 1000)], network, {Threshold(tau=0.1): KERNELS})
    assert rows[2].sent_bytes == pytest.approx(3 * 0.06 * 1e6)


def test_a_step_hides_what_overlaps_with_backward() -> None:
    network = Network.on_paper(1e9, 5e-5, 4)
    alone = predict([(4096, 1024)] * 8, network, {OneBit(): KERNELS})
    step = predict([(4096, 1024)] * 8, network, {OneBit(): KERNELS}, step=1.0)
    for before, after in zip(alone, step, strict=True):
        # kernels and backward share a core: what is hidden is time on the network, most where nothing is compressed
        assert 1.0 < after.seconds <= 1.0 + before.seconds + 1e-9
    assert step[0].seconds < 1.0 + 0.8 * alone[0].seconds


def test_hierarchical_is_offered_where_the_links_inside_and_between_hosts_are_known() -> None:
    several = predict([(4096, 4096)], Network.on_paper(1e9, 5e-5, 8, 4), {OneBit(): KERNELS})
    assert [row.exchange for row in several] == ["dense", "two_phase", "allgather", "hierarchical"]
    assert several[3].seconds < several[0].seconds
    alone = predict([(4096, 4096)], Network.on_paper(1e9, 5e-5, 8), {OneBit(): KERNELS})
    assert [row.exchange for row in alone] == ["dense", "two_phase", "allgather"]


def test_a_link_whose_bytes_take_no_time() -> None:
    free = LinkSpeed(Line(1e-3), Line(1e-3), Line(1e-3), Line(1e-3))
    rows = predict([(1024, 1024)], Network(2, free), {OneBit(): KERNELS})
    assert {row.break_even for row in rows[1:]} == {0.0}


class _One:
    """A rank as `advise.tried` asks it."""

    position = 0

    def maximum(self, values: list[float]) -> list[float]:
        return values


def opened(framework: str) -> ranks.OpenRanks:
    return ranks.OpenRanks(framework, _One(), None)  # type: ignore[arg-type]


ROWS = [Prediction(NoCompression(), "dense", 8.0, 25.0), Prediction(FP16(), "dense", 4.0, 10.0, 3e9),
        Prediction(OneBit(), "allgather", 1.0, 0.4, 2e9)]  # fmt: skip


@pytest.mark.parametrize(("seconds_of_a_trial", "number"), [(1.0, 8), (90.0, 4), (301.0, 1)])
def test_steps_are_tried_in_turns_from_the_fastest_on_until_that_takes_long(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seconds_of_a_trial: float,
    number: int,
) -> None:
    rehearse = pytest.importorskip("hvd_compress.cli.rehearse", reason="this environment has no torch")
    now = 1000.0
    asked = []

    class Rehearsal:
        def __init__(self, ranks: _One, shapes: list[tuple[int, ...]], step: float) -> None:
            assert (shapes, step) == ([(8, 8)], 0.25)

        def seconds(self, compressor: object, exchange: str) -> float:
            nonlocal now
            now += seconds_of_a_trial
            asked.append((compressor, exchange))
            return len(asked) / 8

        def is_certain(self, compressor: object, exchange: str) -> bool:
            # one of them is after its fifth trial
            return exchange == "allgather" or asked.count((compressor, exchange)) >= 5

    monkeypatch.setattr(rehearse, "Rehearsal", Rehearsal)
    monkeypatch.setattr(advise.time, "perf_counter", lambda: now)
    rows = advise.tried(ROWS, opened("torch"), [(8, 8)], 0.25)
    assert asked == ([(OneBit(), "allgather"), (FP16(), "dense")] * 3 + [(FP16(), "dense")] * 2)[:number]
    # the last trial knows those before
    assert rows[0] == ROWS[0]
    assert rows[1] == (Prediction(FP16(), "dense", 4.0, number / 8, 3e9, tried=True) if number > 1 else ROWS[1])
    last = {8: 5, 4: 3, 1: 1}[number]
    assert rows[2] == Prediction(OneBit(), "allgather", 1.0, last / 8, 2e9, tried=True)
    assert capsys.readouterr().err == "trying 2 of 3 ways, for about 300 s at most\n"


@pytest.mark.parametrize(("framework", "shape"), [("tensorflow", (8, 8)), ("torch", (2**14, 2**14))])
def test_predictions_stand_without_torch_and_for_what_fills_the_memory(framework: str, shape: tuple[int, int]) -> None:
    assert advise.tried(ROWS, opened(framework), [shape], 0.25) == ROWS


def test_predictions_stand_where_trials_are_given_no_time() -> None:
    assert advise.tried(ROWS, opened("torch"), [(8, 8)], 0.25, limit=0.0) == ROWS


FREE = "with float32 1000 ms"
HALVED = "with fp16 600 ms and float32 1000 ms"
USE_FP16 = "Use compression=hvd.Compression.fp16, which Horovod has itself"
ALLGATHER = 'compression=OneBit(), exchange="allgather"'


@pytest.mark.parametrize(
    ("half", "seconds", "expected"),
    [(None, 2.0, f"Don't compress: a step would take 2000 ms with {ALLGATHER} at best, {FREE}."),
     (None, 0.98, f"Don't compress: it is a tie, a step takes 980 ms with {ALLGATHER}, {FREE}."),
     (None, 1.02, f"Don't compress: it is a tie, a step takes 1020 ms with {ALLGATHER}, {FREE}."),
     (None, 0.25, f"Use {ALLGATHER}: a step takes 250 ms, 4.0 times faster than float32; {FREE}. "
                  "It beats float32 below 2.00 Gbit/s."),
     (0.6, 0.8, f"{USE_FP16}: a step would take 800 ms with {ALLGATHER} at best, {HALVED}."),
     (0.6, 0.59, f"{USE_FP16}: it is a tie, a step takes 590 ms with {ALLGATHER}, {HALVED}."),
     (0.6, 0.2, f"Use {ALLGATHER}: a step takes 200 ms, 3.0 times faster than fp16; {HALVED}. "
                "It beats float32 below 2.00 Gbit/s."),
     # fp16 that gains nothing is not worth a word, and does not make another one look better
     (0.98, 2.0, f"Don't compress: a step would take 2000 ms with {ALLGATHER} at best, {FREE}."),
     (3.0, 0.9, f"Use {ALLGATHER}: a step takes 900 ms, 1.1 times faster than float32; {FREE}. "
                "It beats float32 below 2.00 Gbit/s.")],
)  # fmt: skip
def test_sentences(half: float | None, seconds: float, expected: str) -> None:
    rows = [Prediction(NoCompression(), "dense", 8.0, 1.0), Prediction(OneBit(), "allgather", 1.0, seconds, 2e9)]
    if half is not None:
        rows.insert(1, Prediction(FP16(), "dense", 4.0, half))
    assert advice(rows) == expected


def test_the_sentence_names_what_is_as_fast_as_the_best() -> None:
    rows = [Prediction(NoCompression(), "dense", 8.0, 1.0), Prediction(OneBit(), "allgather", 1.0, 0.26, 2e9),
            Prediction(OneBit(), "two_phase", 1.0, 0.25, 2e9), Prediction(TopK(), "two_phase", 1.0, 0.3)]  # fmt: skip
    text = advice(rows)
    assert text.startswith('Use compression=OneBit(), exchange="two_phase"')
    assert 'As fast, to 5 %: compression=OneBit(), exchange="allgather".' in text
    assert "TopK" not in text


def test_the_sentence_for_links_that_always_gain() -> None:
    rows = [Prediction(NoCompression(), "dense", 8.0, 1.0), Prediction(OneBit(), "allgather", 1.0, 0.5, math.inf)]
    assert advice(rows).endswith("It beats float32 at any bandwidth.")


@pytest.mark.parametrize(("half", "seconds", "is_told"), [(0.6, 0.3, True), (0.6, 0.7, False), (None, 2.0, False)])
def test_who_is_told_to_compress_is_told_of_accuracy(half: float | None, seconds: float, is_told: bool) -> None:
    rows = [Prediction(NoCompression(), "dense", 8.0, 1.0), Prediction(OneBit(), "allgather", 1.0, seconds, 2e9)]
    if half is not None:
        rows.insert(1, Prediction(FP16(), "dense", 4.0, half))
    text = report([(4096, 4096)], Network(4, LinkSpeed(*[Line(1, 1e-6)] * 4)), rows, "on paper", 0.0)
    assert text.endswith(f"{advice(rows)} {TIME_ALONE}" if is_told else advice(rows))


@pytest.mark.parametrize(
    ("shapes", "ranks", "first", "expected"),
    [("8", "1", "1 tensor, 8 elements, 1 rank", "Don't compress: one rank exchanges nothing."),
     ("4096x4096", "1", "1 tensor, 16,777,216 elements, 1 rank", "Don't compress: one rank exchanges nothing."),
     ("100x10", "4", "1 tensor, 1,000 elements, 4 ranks", "Don't compress: no tensor has 16,384 elements"),
     ("1", "2", "1 tensor, 1 element, 2 ranks", "Don't compress: no tensor has 16,384 elements"),
     ("128x127*9", "2", "9 tensors, 146,304 elements, 2 ranks", "no tensor has 16,384 elements")],
)  # fmt: skip
def test_where_nothing_can_be_compressed_one_sentence_says_so(
    shapes: str, ranks: str, first: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    paper = ["advise", "--shapes", shapes, "--bandwidth", "1gbit", "--ranks", ranks]
    assert main(paper) == 0
    begin, sentence = capsys.readouterr().out.splitlines()
    assert begin == first
    assert expected in sentence
    assert main([*paper, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert expected in found["advice"]
    assert [row["compressor"] for row in found["rows"]] == ([] if ranks == "1" else ["none", "FP16()"])


def test_small_tensors_that_take_long_may_still_want_fp16() -> None:
    rows = [Prediction(NoCompression(), "dense", 8.0, 1.0), Prediction(FP16(), "dense", 4.0, 0.6)]
    assert advice(rows).startswith(USE_FP16)


def test_advise_on_paper(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--shapes", "4096x4096,4096*2", *PAPER, "--step-seconds", "0.1"]) == 0
    first, link, head, *rows, sentence = capsys.readouterr().out.splitlines()
    assert first == "3 tensors, 16,785,408 elements, 4 ranks"
    assert "on paper, 1.00 Gbit/s" in link
    assert head.split() == ["compressor", "exchange", "sent/rank", "fewer", "step", "faster", "beats", "fp32", "below"]
    # 16,785,408 elements of 4 bytes; a ring sends 2 * 3 / 4 of them
    assert re.match(r"none \(float32\) +dense +101 MB +1\.0x", rows[0])
    assert len(rows) == 1 + 1 + 5 * 2
    assert sentence.startswith(("Use compression=", "Don't compress"))


def test_advise_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--shapes", "4096x4096,4096*2", *PAPER, "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert {k: found[k] for k in ("tensors", "elements", "ranks", "ranks_per_host", "link", "step_seconds")} == {
        "tensors": 3, "elements": 16_785_408, "ranks": 4, "ranks_per_host": 1, "link": "on paper", "step_seconds": 0.0
    }  # fmt: skip
    rows = found["rows"]
    assert len(rows) == 1 + 1 + 5 * 2
    fields = {"compressor", "exchange", "compresses", "sent_bytes", "seconds", "tried", "beats_float32",
              "beats_float32_below_bits_per_second"}  # fmt: skip
    assert all(row.keys() == fields for row in rows)
    assert (rows[0]["compressor"], rows[0]["beats_float32"], rows[0]["compresses"]) == ("none", None, False)
    for row in rows[1:]:
        assert (row["beats_float32"] == "below") == (row["beats_float32_below_bits_per_second"] is not None)
    assert found["advice"].startswith(("Use compression=", "Don't compress"))
    assert all(field in (advise.__doc__ or "") for field in [*found, *fields]), "a field that --help does not name"


def test_what_a_model_prints_is_not_among_the_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "talkative_net.py").write_text(
        "print('importing')\nclass T:\n    shape = (200, 300)\n"
        "class Net:\n    trainable_variables = [T]\n    def __init__(self): print('building')\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["advise", "--model", "talkative_net:Net", *PAPER, "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["elements"] == 60_000
    assert printed.err == "importing\nbuilding\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "--bandwidth and --ranks"), (["--ranks", "4"], "--bandwidth and --ranks"),
     (["--bandwidth", "1gbit"], "--bandwidth and --ranks"), ([*PAPER, "--measure"], "on paper"),
     (["--bandwidth", "fast", "--ranks", "4"], "100mbit"), ([*PAPER, "--ranks-per-host", "3"], "multiple"),
     ([*PAPER, "--latency", "5"], "50us"), ([*PAPER, "--step-seconds", "-1"], "step-seconds"),
     ([*PAPER, "--step-seconds", "inf"], "step-seconds"), ([*PAPER, "--trial-seconds", "-1"], "trial-seconds"),
     ([*PAPER, "--trial-seconds", "nan"], "trial-seconds")],
)  # fmt: skip
def test_arguments_that_do_not_fit(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--shapes", "8", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_an_estimate_on_paper_is_no_job_for_many(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert main(["advise", "--shapes", "8", *PAPER]) == 2
    assert "one process" in capsys.readouterr().err


def test_measuring_without_horovod_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for framework in ("torch", "tensorflow"):
        monkeypatch.setitem(sys.modules, f"horovod.{framework}", None)
    with pytest.raises(MissingError, match="check"):
        ranks.open_ranks()
    assert main(["advise", "--shapes", "8", "--measure"]) == 2
    assert "hvd-compress check" in capsys.readouterr().err


# -- check -----------------------------------------------------------------------------------------------------------


def findings(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    return {line.split("  ")[0]: line for line in capsys.readouterr().out.splitlines()}


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, bool] | str]:
    """What importing Horovod in a process of its own would say; its versions are those of a good environment."""
    built = {"mpi": True, "gloo": True, "nccl": False}
    answers: dict[str, dict[str, bool] | str] = {"torch": built, "tensorflow": built}
    versions = {
        "horovod": "0.28.1",
        "torch": "2.13.0+cpu",
        "tensorflow": "2.21.0",
        "keras": "3.15.1",
        "numba": "0.68.1",
    }
    monkeypatch.setattr(check, "_probe", answers.__getitem__)
    monkeypatch.setattr(check, "_version", versions.get)
    monkeypatch.setattr(check, "launchers", lambda built: [check.Finding("launchers", repr(built), check.OK)])
    answers["versions"] = versions  # type: ignore[assignment]
    return answers


def test_all_is_there(probed: dict, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 0
    lines = findings(capsys)
    assert not any("MISSING" in line for line in lines.values())
    assert "built with mpi, gloo" in lines["horovod.torch"]
    assert "Built(framework='torch', mpi=True, gloo=True" in lines["launchers"]
    assert "all compressors" in lines["kernels"]
    assert "All that is needed is here." in lines


def test_old_versions_are_noted(probed: dict, capsys: pytest.CaptureFixture[str]) -> None:
    probed["versions"].update(torch="1.13.1", keras="2.4")
    assert main(["check"]) == 0
    lines = findings(capsys)
    assert "2.1 and later are known to work" in lines["torch"]
    assert "2.15 and later are known to work" in lines["keras"]


def test_one_framework_is_enough(probed: dict, capsys: pytest.CaptureFixture[str]) -> None:
    del probed["versions"]["torch"]
    assert main(["check"]) == 0
    assert "not installed" in findings(capsys)["torch"]


def test_no_horovod(probed: dict, capsys: pytest.CaptureFixture[str]) -> None:
    del probed["versions"]["horovod"]
    assert main(["check"]) == 1
    assert "hvd-compress build-horovod" in findings(capsys)["horovod"]


def test_neither_horovod_nor_a_framework(probed: dict, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("horovod", "torch", "tensorflow"):
        del probed["versions"][name]
    assert main(["check"]) == 1
    lines = findings(capsys)
    # building alone would fail
    assert "pip install torch, or tensorflow, then build Horovod for it: hvd-compress build-horovod" in lines["horovod"]
    assert "not installed" in lines["torch"]


def test_a_horovod_without_any_framework(probed: dict, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("torch", "tensorflow"):
        del probed["versions"][name]
    assert main(["check"]) == 1
    assert "pip install torch" in findings(capsys)["framework"]


def test_a_horovod_of_another_framework(probed: dict, capsys: pytest.CaptureFixture[str]) -> None:
    probed["torch"] = probed["tensorflow"] = "ImportError: undefined symbol"
    assert main(["check"]) == 1
    lines = findings(capsys)
    assert "undefined symbol" in lines["horovod.torch"]
    assert "MISSING" in lines["framework"]


def test_a_horovod_that_starts_no_ranks(probed: dict, capsys: pytest.CaptureFixture[str]) -> None:
    probed["torch"] = {"mpi": False, "gloo": False, "nccl": False}
    assert main(["check"]) == 1
    line = findings(capsys)["horovod.torch"]
    assert "neither mpi nor gloo" in line
    assert "hvd-compress build-horovod" in line


def test_the_mpi_of_horovod_is_told_by_name(probed: dict, capsys: pytest.CaptureFixture[str]) -> None:
    library = "Open MPI v4.1.8, package: Open MPI user@localhost Distribution, ident: 4.1.8"
    probed["torch"] = {**probed["torch"], "library": library, "libraries": ["/a/libmpi.so.40"]}
    assert main(["check"]) == 0
    line = findings(capsys)["launchers"]
    assert "library='Open MPI v4.1.8', libraries=('/a/libmpi.so.40',)" in line


def test_a_framework_that_has_changed_since_horovod_was_built(probed: dict, capsys: pytest.CaptureFixture[str]) -> None:
    probed["torch"] = {**probed["torch"], "built_for": "2.12.0", "version": "2.13.0"}
    assert main(["check"]) == 0
    line = findings(capsys)["horovod.torch"]
    assert "built with mpi, gloo, for torch 2.12.0, but here is 2.13.0" in line
    assert "hvd-compress build-horovod" in line


def test_a_framework_that_cannot_be_loaded(probed: dict, capsys: pytest.CaptureFixture[str]) -> None:
    probed["tensorflow"] = {"broken": "ImportError: numpy.core is gone"}
    probed["versions"]["tensorflow-cpu"] = probed["versions"].pop("tensorflow")
    assert main(["check"]) == 0
    lines = findings(capsys)
    assert "2.21.0, cannot be loaded: ImportError: numpy.core is gone" in lines["tensorflow"]
    assert "pip install --force-reinstall tensorflow-cpu" in lines["tensorflow"]
    assert "horovod.tensorflow" not in lines


@pytest.mark.usefixtures("probed")
def test_kernels_that_do_not_compile(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("cannot cache function\nno locator available")

    monkeypatch.setattr(Loopback, "allreduce", fail)
    assert main(["check"]) == 1
    line = findings(capsys)["kernels"]
    assert "no locator available" in line
    assert "NUMBA_CACHE_DIR" in line


@pytest.mark.usefixtures("probed")
def test_kernels_that_are_not_kept(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check, "unkept", ["no folder"])
    assert main(["check"]) == 0
    line = findings(capsys)["kernels"]
    assert "not kept: no folder" in line
    assert "export NUMBA_CACHE_DIR" in line


@pytest.mark.usefixtures("probed")
def test_ranks_that_decode_differently(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = Loopback.allreduce

    def damage(self: Loopback, arrays: list) -> list:
        first, second = real(self, arrays)
        return [first, second + 1]

    monkeypatch.setattr(Loopback, "allreduce", damage)
    assert main(["check"]) == 1
    assert "different values" in findings(capsys)["wire"]


@pytest.mark.usefixtures("probed")
def test_more_ranks_than_cores_are_noted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HOROVOD_LOCAL_SIZE", "100000")
    assert main(["check"]) == 0
    assert "fewer ranks per host" in findings(capsys)["cores"]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, []),
     ({"OMPI_COMM_WORLD_SIZE": "4"},
      [("with put", check.NOTE,
        "where links are slow, try OMPI_MCA_btl_tcp_flags=send,inplace,need-ack,need-csum,hetero-rdma")]),
     ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_MCA_btl_tcp_flags": "put,send"},
      [("with put", check.NOTE, "where links are slow, try OMPI_MCA_btl_tcp_flags=send")]),
     ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_MCA_btl_tcp_flags": "774"},
      [("flags 774", check.NOTE,
        "where links are slow, try OMPI_MCA_btl_tcp_flags=send,inplace,need-ack,need-csum,hetero-rdma")]),
     ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_MCA_btl_tcp_flags": "send,inplace"}, [("without put", check.OK, "")])],
)  # fmt: skip
def test_open_mpi_may_use_one_direction_of_a_link_at_a_time(
    environment: dict[str, str], expected: list[tuple[str, str, str]]
) -> None:
    found = list(check._between_hosts(environment))
    assert [(f.found, f.verdict, f.remedy) for f in found] == expected


def test_a_horovod_that_crashes_or_hangs_ends_its_own_process_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_PROBE", "import os; os.abort()  # {0}")
    assert "-6" in check._probe("torch")
    monkeypatch.setattr(check, "_PROBE", "raise ImportError('built for another {0}')")
    assert check._probe("torch") == "ImportError: built for another torch"
    monkeypatch.setattr(check, "_PROBE", "import time; time.sleep(60)  # {0}")
    monkeypatch.setattr(check, "_PROBE_SECONDS", 0.5)
    assert "within 0.5 s" in check._probe("torch")
    monkeypatch.setattr(check, "_PROBE", "print('noise'); print('{{\"mpi\": true}}')  # {0}")
    monkeypatch.setattr(check, "_PROBE_SECONDS", 60)
    assert check._probe("torch") == {"mpi": True}


STEPS = """print('noise'); print('{{"broken": "", "version": "2.13.0"}}'); print('{{"built_for": "2.12.0"}}'); """


@pytest.mark.parametrize(
    ("program", "expected"),
    [("raise ImportError('undefined symbol')", "built for torch 2.12.0, but here is 2.13.0"),
     ("import os; sys.stdout.flush(); os.abort()", "built for torch 2.12.0, but here is 2.13.0"),
     ("print('{{\"built_for\": \"2.13.0\"}}'); raise ImportError('no symbol')", "ImportError: no symbol")],
)  # fmt: skip
def test_why_horovod_cannot_be_imported(program: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_PROBE", f"import sys; {STEPS}{program}  # {{0}}")
    assert check._probe("torch") == expected


def test_probing_the_mpi_may_crash_once_the_rest_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"mpi": True, "gloo": True, "nccl": False}
    text = json.dumps(told).replace("{", "{{").replace("}", "}}")
    monkeypatch.setattr(check, "_PROBE", f"import os; print('{text}', flush=True); os.abort()  # {{0}}")
    assert check._probe("torch") == told


@pytest.mark.parametrize(
    ("text", "broken"),
    [("raise ImportError('libcudart.so.13: cannot open\\nshared object file')", "ImportError: libcudart.so.13: cannot"),
     ("import os; os.abort()", "importing it ends the process")],
)  # fmt: skip
def test_the_probe_tells_a_broken_framework_from_a_broken_horovod(
    text: str, broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = check._probe("torch")
    assert isinstance(found, dict)
    assert found["broken"].startswith(broken)


def test_the_probe_of_a_real_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    framework = next((f for f in ("torch", "tensorflow") if importlib.util.find_spec(f)), "")
    if not framework or not importlib.util.find_spec("horovod"):
        pytest.skip("this environment has no Horovod")
    found = check._probe(framework)
    assert isinstance(found, dict), found
    assert found["version"] == found["built_for"]
    assert found["gloo"] is True
    assert not found["mpi"] or len(found["libraries"]) == 1


@pytest.mark.parametrize("variable", ["HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_ranks_that_do_not_find_each_other(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "4")
    (lines,) = ThreadRanks.run_all(1, lambda alone: list(check._with_ranks(ranks.OpenRanks("torch", alone, None))))
    (line,) = lines
    assert (line.found, line.verdict) == ("4 were started, but do not find each other", check.MISSING)
    assert "mpirun of the MPI that Horovod was built with" in line.remedy


# -- the command -----------------------------------------------------------------------------------------------------


NEWER = {"EFSignSGD", "Blockwise", "TernGrad", "Natural", "SignSGD"}


def test_bench_shows_every_compressor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    _, head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["compressor", "bytes/element"]
    shown = {row.partition("(")[0] for row in rows}
    assert shown == {"OneBit", "Threshold", "Adaptive", "TopK", "Percentile", "QSGD", "BF16", "FP16", *NEWER}


def test_bench_says_where_other_work_has_spoiled_a_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # a line whose slope noise has made 0
    monkeypatch.setattr(bench, "speed_of", lambda _: Speed())
    assert main(["bench"]) == 0
    assert capsys.readouterr().out.count("too noisy to tell") == 3 * len(bench._CASES)


def test_a_subcommand_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2
    assert "subcommand" in capsys.readouterr().err


def test_as_a_module() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD", "OMPI"))}
    command = [sys.executable, "-W", "error", "-m", "hvd_compress"]
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=120, env=environment)
    assert (done.returncode, done.stdout.strip()) == (0, __version__)
    wrong = [*command, "advise", "--shapes", "8", "--bandwidth", "1", "--ranks", "2"]
    done = subprocess.run(wrong, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 2
    assert "bandwidth" in done.stderr


def test_the_entry_point_is_the_command() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    (place,) = re.findall(r'^hvd-compress = "([\w.]+:\w+)"$', text, re.MULTILINE)
    module, _, function = place.partition(":")
    assert getattr(import_module(module), function) is main


def test_estimates_import_no_framework() -> None:
    program = (
        "import sys; from hvd_compress.cli import main; main(sys.argv[1:]); import json; "
        "print(json.dumps([n for n in ('torch', 'tensorflow', 'keras', 'horovod', 'mpi4py') if n in sys.modules]))"
    )
    command = [sys.executable, "-c", program, "advise", "--shapes", "8", *PAPER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_versions_are_those_of_the_environment() -> None:
    assert check._version("numpy") == metadata.version("numpy")
    assert check._version("no-such-distribution-1") is None
