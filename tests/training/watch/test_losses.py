"""The loss watch: it names what is there, and says nothing about losses that are only noisy."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdebug.verdict import KINDS, Verdict, verdicts

Curve = Callable[[random.Random, int], list[float]]


def kinds(values: list[float], **options: object) -> list[str]:
    return [v.kind for v in verdicts(list(enumerate(values)), **options)]  # type: ignore[arg-type]


def falling(r: random.Random, n: int) -> list[float]:
    speed, height, floor = n * r.uniform(0.2, 1.5), r.uniform(0.5, 5), r.uniform(0.05, 1)
    return [height * math.exp(-i / speed) + floor for i in range(n)]


def noisy(draw: Callable[[random.Random], float]) -> Curve:
    def curve(r: random.Random, n: int) -> list[float]:
        base = falling(r, n)
        size = r.choice([0.003, 0.02, 0.05, 0.1]) * (base[0] - base[-1])
        return [v + size * draw(r) for v in base]

    return curve


def student(freedom: float) -> Callable[[random.Random], float]:
    return lambda r: r.gauss(0, 1) / math.sqrt(r.gammavariate(freedom / 2, 2) / freedom)


def warm_up(r: random.Random, n: int) -> list[float]:
    rise = n // 20 + 1
    return [(2.5 + 0.2 * i / rise if i < rise else 2.7 * math.exp((rise - i) / n)) + r.gauss(0, 0.03) for i in range(n)]


def restarts(r: random.Random, n: int) -> list[float]:
    period = max(10, n // 4)
    waves = [0.5 * (1 + math.cos(math.pi * (i % period) / period)) for i in range(n)]
    return [v + 0.3 * w * math.exp(-i / n) + r.gauss(0, 0.02) for i, (v, w) in enumerate(zip(falling(r, n), waves))]


def waves(r: random.Random, n: int) -> list[float]:
    """A reinforcement learner's loss: flat, slowly swaying noise."""
    values, now = [], 0.0
    for _ in range(n):
        now = 0.9 * now + r.gauss(0, 1)
        values.append(now)
    return values


HEALTHY: dict[str, Curve] = {
    "normal noise": noisy(lambda r: r.gauss(0, 1)),
    "heavy tails": noisy(student(3)),
    "heavier": noisy(student(5)),
    "in proportion": lambda r, n: [v * math.exp(r.gauss(0, 0.2)) for v in falling(r, n)],
    "no noise": falling,
    "warm-up": warm_up,
    "cosine with restarts": restarts,
    "waves": waves,
    "flat": lambda r, n: [r.gauss(1, 1) for _ in range(n)],
    "exponential": lambda r, n: [r.expovariate(1) for _ in range(n)],
    "power law": lambda r, n: [2 * (1 + i) ** -0.4 + r.gauss(0, 0.01) for i in range(n)],
    "late fall": lambda r, n: [2 / (1 + math.exp((i - 0.6 * n) / (0.03 * n))) + r.gauss(0, 0.02) for i in range(n)],
}


@pytest.mark.parametrize("kind", HEALTHY)
@pytest.mark.parametrize("steps", [40, 120, 400])
def test_silent_on_healthy_losses(kind: str, steps: int) -> None:
    """Of 40 curves of a kind none jumps, climbs or swings; one that has come to its end may stand still."""
    found = [v for seed in range(40) for v in kinds(HEALTHY[kind](random.Random(f"{kind} {steps} {seed}"), steps))]
    assert [v for v in found if v != "plateau"] == []
    assert len(found) <= 4


def one(values: list[float], **options: object) -> Verdict:
    (verdict,) = verdicts(list(enumerate(values)), **options)  # type: ignore[arg-type]
    assert verdict.kind in KINDS and verdict.said.endswith(".") and verdict.evidence
    return verdict


def base(n: int = 200, noise: float = 0.02) -> list[float]:
    r = random.Random(1)
    return [2.3 * math.exp(-i / 100) + 0.2 + r.gauss(0, noise) for i in range(n)]


@pytest.mark.parametrize("width", [1, 20])
def test_a_spike(width: int) -> None:
    values = base()
    for i in range(width):
        values[120 + i] += 4 * math.exp(-i / 6)
    verdict = one(values)
    assert verdict.kind == "spike" and verdict.step == 120 and verdict.evidence["recovers"]
    assert f"{values[120]:.4g}" in verdict.said and "step 120" in verdict.said


def test_a_restart_of_the_schedule_explains_a_jump() -> None:
    values = base()
    for i in range(30):
        values[120 + i] += 4 * math.exp(-i / 10)
    rates = [0.1 * (1 - i % 120 / 120) + 1e-4 for i in range(200)]
    assert kinds(values) == ["spike"] and kinds(values, rates=rates) == []
    assert kinds(values, rates=dict(enumerate(rates))) == []


def test_divergence_after_a_good_start_and_from_the_first_step() -> None:
    climbing = base(200)[:120] + [0.9 + 0.05 * i for i in range(80)]
    verdict = one(climbing)
    assert verdict.kind == "divergence" and 80 <= verdict.step <= 140
    assert one([2.3 * 1.02**i for i in range(150)]).kind == "divergence"


def test_nan_and_infinity() -> None:
    verdict = verdicts(list(enumerate([1.0, 0.9, math.nan, math.inf])))[0]
    assert verdict.kind == "nan" and verdict.step == 2 and "0.9" in verdict.said and "1 later" in verdict.said
    assert verdicts([(7, math.inf)])[0].said.startswith("The loss is infinite at step 7")


def test_exactly_zero() -> None:
    assert one([0.0] * 8).evidence["from the start"]
    assert kinds([1.0, 0.5, 0.2, 0.0, 0.0, 0.0]) == [] and kinds([1.0, 0.5] + [0.0] * 5) == ["zero"]
    assert kinds([1e-12] * 8) == []


def test_plateau_tells_whether_anything_was_learnt() -> None:
    r = random.Random(3)
    still = one([2.3 + r.gauss(0, 0.02) for _ in range(150)])
    assert still.kind == "plateau" and still.evidence["from the start"] and still.step == 0
    later = one([max(2.0 - 0.05 * i, 0.5) + r.gauss(0, 0.005) for i in range(150)])
    assert later.kind == "plateau" and not later.evidence["from the start"] and 20 <= later.step <= 50


def test_a_decayed_rate_explains_a_plateau() -> None:
    r = random.Random(4)
    values = [max(2.0 - 0.05 * i, 0.5) + r.gauss(0, 0.005) for i in range(150)]
    assert kinds(values, rates=[0.1 if i < 50 else 1e-4 for i in range(150)]) == []


def test_oscillation_between_two_values_and_in_a_period() -> None:
    r = random.Random(5)
    assert one([1 + 0.5 * (-1) ** i + r.gauss(0, 0.05) for i in range(100)]).evidence["period"] == 2
    saw = one([0.2 + (i % 16) / 16 + r.gauss(0, 0.03) for i in range(240)])
    assert saw.kind == "oscillation" and saw.evidence["period"] == 16
    falls = [3 - 0.02 * i + 0.1 * (-1) ** i for i in range(100)]
    assert kinds(falls) == []


def pairs(train: Callable[[int], float], val: Callable[[int], float], noise: float) -> list[tuple]:
    r = random.Random(6)
    return [(i, train(i) + r.gauss(0, noise), val(i) + r.gauss(0, noise) if i % 10 == 9 else None) for i in range(200)]


def test_the_gap_to_validation() -> None:
    rising = pairs(lambda i: 2 * math.exp(-i / 40), lambda i: 1 + abs(i - 60) / 100, 0.02)
    (verdict,) = [v for v in verdicts(rising) if v.kind == "gap"]
    assert verdict.evidence["rises"] and verdict.evidence["training falls"] and 39 <= verdict.step <= 79
    assert "validation was best at step" in verdict.said
    close = pairs(lambda i: 2 * math.exp(-i / 100), lambda i: 2 * math.exp(-i / 100) + 0.01, 0.05)
    assert [v for v in verdicts(close) if v.kind == "gap"] == []
    below = pairs(lambda i: 2 * math.exp(-i / 100) + 0.5, lambda i: 2 * math.exp(-i / 100), 0.02)
    assert [v for v in verdicts(below) if v.kind == "gap"] == []


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 10**6), st.one_of(st.none(), st.floats()), st.one_of(st.none(), st.floats())),
        max_size=80,
    )
)
def test_any_record_is_read(rows: list[tuple]) -> None:
    for verdict in verdicts(rows):
        assert verdict.kind in KINDS and verdict.step in {step for step, _, _ in rows} and verdict.said


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.floats(1e-3, 1e3), st.sampled_from(sorted(HEALTHY)))
def test_the_unit_of_the_loss_does_not_count(seed: int, unit: float, kind: str) -> None:
    values = HEALTHY[kind](random.Random(seed), 80)
    assert kinds([v * unit for v in values]) == kinds(values)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(40, 90), st.floats(3, 50))
def test_a_large_jump_is_found_wherever_it_is(seed: int, place: int, size: float) -> None:
    r = random.Random(seed)
    values = [2 * math.exp(-i / 60) + 0.1 + r.gauss(0, 0.01) for i in range(120)]
    values[place] += size
    assert [v.step for v in verdicts(list(enumerate(values))) if v.kind == "spike"] == [place]


@pytest.mark.parametrize("wrong", [[3.0], [(1,)], [(1, 2, 3, 4)], ["ab c"]])
def test_what_is_no_record_is_refused(wrong: list) -> None:
    with pytest.raises(ValueError, match="losses are"):
        verdicts(wrong)


def test_rates_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="rates are one for each loss"):
        verdicts([(0, 1.0), (1, 1.0)], rates=[0.1])
