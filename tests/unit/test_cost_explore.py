"""Trying configurations out: trajectories typed by hand, and what must hold on any machine."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pytest

from hvd_compress.cost import Configuration, Explorer

PREDICTED = {"adaptive": 0.10, "onebit": 0.12, "fp16": 0.14, "qsgd": 0.30, "none": 0.40}


def made(predicted: dict[str, float] = PREDICTED) -> list[Configuration]:
    return [Configuration(name, (name,), seconds) for name, seconds in predicted.items()]


def explorer(**settings: float) -> Explorer:
    settings = {"skip": 1, "steps": 3, "trials": 1, **settings}
    settings.setdefault("most_trials", settings["trials"])
    return Explorer(made(), "none", **settings)  # type: ignore[arg-type]


def follow(explorer: Explorer, truth: dict[str, float], steps: int) -> list[tuple[str, int]]:
    """Which configuration was used for how many steps."""
    used = []
    for _ in range(steps):
        used.append(explorer.current.name)
        explorer.observe(truth[explorer.current.name])
    return [(name, len(list(run))) for name, run in groupby(used)]


def test_right_predictions_are_soon_committed_to() -> None:
    it = explorer()
    # qsgd is beyond 1.5 times the best; one step of each is skipped, three count
    assert follow(it, PREDICTED, 40) == [("adaptive", 4), ("onebit", 4), ("fp16", 4), ("adaptive", 28)]
    assert it.committed
    assert it.measured == pytest.approx({"adaptive": 0.10, "onebit": 0.12, "fp16": 0.14})


def test_a_wrong_prediction_lets_dense_win() -> None:
    # everything is slower than predicted but dense: after adaptive the others are expected to take 8 times as long too
    truth = {"adaptive": 0.8, "onebit": 0.9, "fp16": 0.5, "qsgd": 2.0, "none": 0.4}
    it = explorer(within=10)
    assert follow(it, truth, 60)[:6] == [
        ("adaptive", 4), ("onebit", 4), ("fp16", 4), ("qsgd", 4), ("none", 44),
    ]  # fmt: skip
    assert it.committed


def test_most_trials_do_not_count_dense() -> None:
    truth = dict.fromkeys(PREDICTED, 1.0)
    it = explorer(most=2, within=100)
    assert follow(it, truth, 40) == [("adaptive", 4), ("onebit", 4), ("none", 32)]


def test_a_gain_below_the_margin_stays_dense() -> None:
    it = Explorer(made({"a": 0.98, "none": 1.0}), "none", skip=0, steps=1, trials=1, most_trials=1)
    # neither a prediction nor a measurement is enough, but it is tried
    assert follow(it, {"a": 0.985, "none": 1.0}, 5) == [("none", 1), ("a", 1), ("none", 3)]


def test_trials_of_short_steps_take_more_of_them() -> None:
    def trials(level: float) -> list[tuple[str, int]]:
        return follow(explorer(seconds=1.0), {name: level * s for name, s in PREDICTED.items()}, 200)[:3]

    assert trials(10.0) == [("adaptive", 4), ("onebit", 4), ("fp16", 4)]  # three steps, and one that is skipped
    assert trials(1.02) == [("adaptive", 11), ("onebit", 10), ("fp16", 9)]  # a second and the skipped one
    assert trials(0.1) == [("adaptive", 16), ("onebit", 16), ("fp16", 16)]  # not more than 5 times three


def test_a_pause_in_the_training_does_not_end_the_turns() -> None:
    def trials(pause: float) -> int:
        # steps differ by chance, so that it takes turns to tell the two apart
        rng = np.random.default_rng(0)
        it = Explorer(made({"a": 0.100, "b": 0.101, "none": 1.0}), "none", trials=3, most_trials=25, race=10.0)
        for step in range(1000):
            if it.committed:
                break
            it.observe(rng.normal({"a": 0.100, "b": 0.101}[it.current.name], 0.005) + (pause if step == 5 else 0.0))
        return step

    assert trials(pause=0.0) == trials(pause=60.0) > 60


def test_slow_steps_that_belong_to_a_way_count() -> None:
    it = Explorer(made({"a": 0.100, "b": 0.100, "none": 1.0}), "none", steps=10, trials=3, most_trials=25)
    step = 0
    while not it.committed:
        # as long as the other one in most steps, and half as long again on average
        it.observe(0.25 if it.current.name == "a" and step % 3 == 0 else 0.1)
        step += 1
    assert it.current.name == "b"


def test_those_in_doubt_are_tried_again_in_turns() -> None:
    truth = {"adaptive": 0.10, "onebit": 0.12, "fp16": 0.2, "qsgd": 0.3, "none": 0.4}
    it = explorer(trials=3)
    # fp16 takes twice as long as the fastest: once more, but not in every turn
    twice = [(name, 4) for name in ("adaptive", "onebit", "fp16")] * 2
    assert follow(it, truth, 50) == [*twice, ("adaptive", 4), ("onebit", 4), ("adaptive", 50 - 4 * 8)]


def test_what_was_disturbed_once_has_a_second_chance() -> None:
    it = explorer(trials=3)
    for step in range(60):
        # another program runs during the first trial of what is fastest, and makes it look far slower than the others
        true = PREDICTED[it.current.name] * (0.5 if it.current.name == "adaptive" else 1.0)
        it.observe(true * (6.0 if step < 4 else 1.0))
    assert it.committed
    assert it.current.name == "adaptive"


def test_a_trial_that_was_disturbed_is_outvoted() -> None:
    it = explorer(trials=3)
    for step in range(60):
        disturbed = 1.2 if step < 4 else 1.0  # another program runs during the first trial of what is fastest
        true = PREDICTED[it.current.name] * (0.9 if it.current.name == "adaptive" else 1.0)
        it.observe(true * disturbed)
    assert it.committed
    assert it.current.name == "adaptive"
    assert it.measured["adaptive"] == pytest.approx(0.09)


def test_disturbed_steps_do_not_matter() -> None:
    it = explorer(steps=5)
    rng = np.random.default_rng(0)
    for i in range(100):
        slow = 20.0 if i % 5 == 0 else 1.0
        it.observe(PREDICTED[it.current.name] * slow * rng.uniform(0.98, 1.02))
    assert it.current.name == "adaptive"
    assert it.committed


def test_a_link_that_becomes_fast_is_noticed() -> None:
    it = explorer()
    follow(it, PREDICTED, 16)
    assert it.committed
    # the processor is the limit now: what compresses least is fastest
    fast = {"adaptive": 0.05, "onebit": 0.045, "fp16": 0.03, "qsgd": 0.05, "none": 0.01}
    assert it.current.name == "adaptive"
    follow(it, fast, 60)
    assert it.committed
    assert it.current.name == "none"
    # without a reason, dense is not tried where it is predicted to be 4 times slower
    assert "none" not in {name for name, _ in follow(explorer(), PREDICTED, 60)}


def test_a_link_that_becomes_slow_is_noticed() -> None:
    it = Explorer(
        made({"none": 0.1, "onebit": 0.12, "adaptive": 0.13}), "none", skip=1, steps=3, trials=1, most_trials=1
    )
    follow(it, {"none": 0.1, "onebit": 0.12, "adaptive": 0.13}, 30)
    assert it.current.name == "none"
    follow(it, {"none": 1.0, "onebit": 0.2, "adaptive": 0.15}, 40)
    assert it.current.name == "adaptive"


def test_a_noisy_machine_is_not_searched_again_and_again_but_a_lasting_change_is() -> None:
    it = Explorer(made(), "none", skip=0, steps=1, trials=1, most_trials=1, share=0.0)
    searches, rng = 0, np.random.default_rng(1)
    for step in range(4000):
        was_committed = it.committed
        level = 3.0 if step // 10 % 2 else 1.0  # it is three times as busy for ten steps, then not
        it.observe(PREDICTED[it.current.name] * level * rng.uniform(0.9, 1.1))
        searches += was_committed and not it.committed
    assert searches <= 3
    follow(it, {**dict.fromkeys(PREDICTED, 3.0), "none": 0.2}, 200)
    assert it.committed
    assert it.current.name == "none"


def test_a_search_that_lost_much_is_not_soon_made_again() -> None:
    def steps_until_another(dense: float) -> int:
        truth = {"onebit": 1.0, "none": dense}
        it = Explorer(made({"onebit": 1.0, "none": 1.2}), "none", skip=0, steps=4, trials=1, most_trials=1)
        follow(it, truth, 8)
        assert it.committed
        assert it.current.name == "onebit"
        steps = 0
        while it.committed:
            it.observe(2.0)  # twice as long from now on
            steps += 1
        return steps

    assert steps_until_another(dense=2.0) == 16  # a window; four steps of dense were a second longer each
    assert steps_until_another(dense=51.0) == 208  # what is the first window to end 200 seconds after the change


def test_without_an_alternative_a_drift_is_the_new_normal() -> None:
    it = Explorer(made({"none": 0.1, "adaptive": 10.0}), "none", skip=0, steps=1, trials=1, most_trials=1)
    assert follow(it, {"none": 0.1}, 5) == [("none", 5)]
    assert follow(it, {"none": 0.2}, 20) == [("none", 20)]
    assert it.committed
    assert it.measured == {"none": 0.2}


def test_small_drifts_do_not_start_another_search() -> None:
    it = explorer(drift=0.3, share=0.0)
    follow(it, PREDICTED, 16)
    assert follow(it, {**PREDICTED, "adaptive": 0.125}, 200) == [("adaptive", 200)]


def test_a_wrong_choice_that_is_no_drift_is_mended() -> None:
    it = explorer(seconds=0.0)
    # onebit was disturbed while it was tried
    follow(it, {**PREDICTED, "onebit": 0.11, "adaptive": 0.10}, 16)
    assert it.committed
    truth = {**PREDICTED, "onebit": 0.085}
    used = follow(it, truth, 1200)
    assert used[0][0] == "adaptive"
    # a turn of the rival, then one of the chosen, of each of which one step does not count
    lengths = [length for name, length in used if name == "onebit"]
    turns = next(i for i, length in enumerate(lengths) if length > 4)
    assert set(lengths[:turns]) == {4}
    assert 2 <= turns < 8
    assert it.chosen.name == "onebit"
    assert it.committed
    assert it.expected == pytest.approx(0.085)
    assert it.measured["adaptive"] == pytest.approx(0.10)


def test_what_became_slower_by_less_than_a_drift_is_left() -> None:
    it = explorer()
    follow(it, PREDICTED, 16)
    assert it.chosen.name == "adaptive"
    # all but the chosen one take as long as before
    follow(it, {**PREDICTED, "adaptive": 0.125, "onebit": 0.105}, 3000)
    assert it.chosen.name == "onebit"
    assert it.expected == pytest.approx(0.105)
    assert it.measured["adaptive"] == pytest.approx(0.125, rel=0.1)


def test_a_pause_in_a_turn_keeps_no_rival_waiting_for_long() -> None:
    def turns(pause: float, at: int) -> int:
        it = explorer(share=0.02)
        follow(it, PREDICTED, 16)
        counted, steps_of_turns = 0, 0
        for _ in range(3000):
            counted += it.rival is not None and not steps_of_turns % 4
            steps_of_turns += it.rival is not None
            paused = it.rival is not None and steps_of_turns == at
            it.observe(PREDICTED[it.current.name] + (pause if paused else 0.0))
        assert it.chosen.name == "adaptive"
        return counted

    usual = turns(0.0, at=1)
    assert usual > 10
    assert turns(3600.0, at=1) >= usual - 5  # the step that does not count
    assert turns(3600.0, at=3) >= usual - 5


def test_what_was_never_tried_has_turns_too() -> None:
    it = explorer(share=0.02)
    follow(it, PREDICTED, 16)
    assert "none" not in it.measured
    # the link is five times as fast, which does not change the time of kernels
    used = follow(it, {**PREDICTED, "none": 0.08}, 6000)
    assert used[0][0] == "adaptive"
    assert it.chosen.name == "none"
    assert it.measured["none"] == pytest.approx(0.08)


def test_a_trial_says_how_many_steps_it_needs() -> None:
    it = explorer(skip=2, steps=9, seconds=0.2)
    assert it.missing == 11
    for _ in range(11):
        it.observe(0.003)
    assert it.missing == 36  # not more than 5 times nine
    for _ in range(36):
        it.observe(0.003)
    assert it.missing == 11
    for _ in range(11):
        it.observe(0.021)
    assert it.missing == 1
    it.observe(0.021)
    assert it.missing == 11
    while it.trying:
        it.observe(0.1)
    assert it.missing == 0


def test_a_turn_of_a_rival_is_no_choice() -> None:
    it = explorer()
    follow(it, PREDICTED, 16)
    turns = 0
    for _ in range(1000):
        assert it.committed
        assert it.chosen.name == "adaptive"
        turns += it.current.name != "adaptive"
        assert it.trying or it.current == it.chosen
        it.observe(PREDICTED[it.current.name])
    assert turns > 0


def test_turns_of_rivals_cost_no_more_than_their_share() -> None:
    def lost(share: float, truth: dict[str, float], steps: int = 20000) -> float:
        rng = np.random.default_rng(5)
        it = Explorer(made(), "none", skip=2, steps=9, within=20.0, share=share)
        while not it.committed:
            it.observe(truth[it.current.name] * rng.lognormal(0.0, 0.1))
        taken = 0.0
        for _ in range(steps):
            taken += truth[it.current.name]
            it.observe(truth[it.current.name] * rng.lognormal(0.0, 0.1))
        return taken / steps / min(truth.values()) - 1

    slow = {"adaptive": 0.1, "onebit": 0.13, "fp16": 0.2, "qsgd": 0.5, "none": 1.0}
    assert lost(0.0, slow) == pytest.approx(0.0)
    assert 0.002 < lost(0.005, slow) < 0.005
    assert 0.01 < lost(0.02, slow) < 0.02
    # what is chosen among near ones may differ, but not by more than can be told
    near = {"adaptive": 0.101, "onebit": 0.1, "fp16": 0.103, "qsgd": 0.5, "none": 1.0}
    assert lost(0.005, near) < 0.02


def test_dense_stays_where_a_rival_gains_less_than_the_margin() -> None:
    it = Explorer(made({"a": 1.01, "none": 1.0}), "none", skip=0, steps=1, trials=1, most_trials=1, share=0.1)
    follow(it, {"a": 1.0, "none": 1.0}, 3)
    assert it.chosen.name == "none"
    # turns that agree so well would prove 1.5 %
    follow(it, {"a": 0.985, "none": 1.0}, 2000)
    assert it.chosen.name == "none"
    follow(it, {"a": 0.95, "none": 1.0}, 2000)
    assert it.chosen.name == "a"
    follow(it, {"a": 0.975, "none": 1.0}, 2000)
    assert it.chosen.name == "a"
    follow(it, {"a": 0.995, "none": 1.0}, 2000)
    assert it.chosen.name == "none"


def test_equal_seconds_give_equal_choices() -> None:
    noise = np.random.default_rng(2).uniform(0.5, 2.5, 300)
    # a large share, so that rivals have turns, too
    first, second = explorer(share=0.2), explorer(share=0.2)
    turns = 0
    for factor in noise:
        seconds = float(PREDICTED[first.current.name] * factor)
        assert first.observe(seconds) == second.observe(seconds)
        assert first.current == second.current
        turns += first.committed and first.trying
    assert turns > 0


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_step_takes_time(seconds: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        explorer().observe(seconds)


@pytest.mark.parametrize("settings", [{"most": 0}, {"steps": 0}, {"skip": -1}, {"within": 0.5}, {"drift": 0.0}])
def test_settings_are_checked(settings: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        explorer(**settings)


@pytest.mark.parametrize("names", [["a"], ["none", "a", "a"]])
def test_names_are_checked(names: list[str]) -> None:
    with pytest.raises(ValueError, match="names"):
        Explorer([Configuration(n, (n,), 1.0) for n in names], "none")


def test_the_factor_of_one_does_not_keep_others_from_a_trial() -> None:
    it = Explorer(made({"onebit": 0.1, "none": 0.4}), "none", skip=0, steps=1, trials=1, most_trials=1)
    # four times slower than predicted, which need not be so of the other one
    assert follow(it, {"onebit": 0.4, "none": 0.3}, 6) == [("onebit", 1), ("none", 5)]
