"""The two searches: right for every test of their kind, within the bound, and asking nothing twice."""

from __future__ import annotations

import math
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdebug.bisection import ddmin, first_bad


@given(st.integers(-50, 50), st.integers(0, 300), st.data())
def test_first_bad_is_right_within_its_bound(lo, length, data):
    border = data.draw(st.integers(lo, lo + length))  # the border at hi means: none is bad
    asked = []
    assert first_bad(lo, lo + length, lambda i: asked.append(i) or i >= border) == border
    assert len(asked) <= math.ceil(math.log2(length + 1))
    assert len(asked) == len(set(asked)) and all(lo <= i < lo + length for i in asked)


@given(st.lists(st.booleans(), max_size=60))
def test_first_bad_gives_a_border_even_when_the_test_is_not_monotone(answers):
    i = first_bad(0, len(answers), answers.__getitem__)
    assert i == len(answers) or answers[i]
    assert i == 0 or not answers[i - 1]


def test_first_bad_of_nothing_asks_nothing():
    assert first_bad(4, 4, lambda i: pytest.fail("asked")) == 4


@pytest.mark.parametrize(
    ("arguments", "error", "quoted"),
    [
        ((5, 3, bool), ValueError, "lo=5, hi=3"),
        ((0, 2.5, bool), TypeError, "hi=2.5"),
        ((None, 2, bool), TypeError, "lo=None"),
        ((True, 2, bool), TypeError, "lo=True"),
        ((0, 2, "test"), TypeError, "'test'"),
    ],
)
def test_first_bad_refuses_nonsense_and_quotes_it(arguments, error, quoted):
    with pytest.raises(error, match=quoted):
        first_bad(*arguments)


def is_minimal(part, test):
    return test(part) and not any(test([x for x in part if x is not left_out]) for left_out in part)


@given(st.integers(1, 40), st.data())
def test_ddmin_finds_a_set_that_fails_only_together(n, data):
    culprits = data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=5))
    assert ddmin(range(n), culprits.issubset) == sorted(culprits)


@given(st.integers(2, 30), st.data())
def test_ddmin_is_minimal_when_several_sets_would_do(n, data):
    ways = data.draw(st.lists(st.sets(st.integers(0, n - 1), min_size=1, max_size=4), min_size=1, max_size=4))

    def test(part):
        return any(way <= set(part) for way in ways)

    found = ddmin(range(n), test)
    assert is_minimal(found, test) and found == sorted(found)


@given(st.lists(st.integers(-9, 9), min_size=1, max_size=14), st.integers(1, 7))
def test_ddmin_is_minimal_for_a_test_that_is_not_monotone(numbers, modulus):
    """The sum of a part being no multiple of something: adding an item may cure it, as when two faults cancel."""
    items = [(i, x) for i, x in enumerate(numbers)]  # equal numbers are different items

    def test(part):
        return sum(x for _, x in part) % modulus != 0

    if test(items):
        assert is_minimal(ddmin(items, test), test)
    else:
        with pytest.raises(ValueError, match=f"all {len(items)} items"):
            ddmin(items, test)


@given(st.integers(1, 25), st.data())
def test_ddmin_tests_no_part_twice(n, data):
    culprits = data.draw(st.sets(st.integers(0, n - 1), min_size=1))
    asked = []
    ddmin(range(n), lambda part: asked.append(tuple(part)) or culprits <= set(part))
    assert len(asked) == len(set(asked))


def test_ddmin_finds_one_of_a_thousand_in_few_tests():
    test = Mock(side_effect=lambda part: 617 in part)
    assert ddmin(range(1024), test) == [617]
    assert test.call_count <= 2 * 10 + 2


def test_ddmin_takes_items_that_cannot_be_hashed_or_compared():
    class Odd:
        __hash__ = None

        def __eq__(self, other):
            raise AssertionError("compared")

    items = [Odd() for _ in range(6)]
    found = ddmin(items, lambda part: any(x is items[4] for x in part))
    assert len(found) == 1 and found[0] is items[4]


def test_ddmin_says_that_the_items_are_not_to_blame():
    test = Mock(return_value=True)
    assert ddmin("abc", test) == [] and test.call_count == 2


def test_ddmin_refuses_what_does_not_fail():
    with pytest.raises(ValueError, match="all 2 items"):
        ddmin([1, 2], lambda part: False)
    with pytest.raises(ValueError, match="all 0 items"):
        ddmin([], lambda part: len(part) > 0)
    with pytest.raises(TypeError, match="None"):
        ddmin([1], None)


def test_an_error_in_the_test_passes_through():
    def test(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first_bad(0, 9, test)
    with pytest.raises(KeyboardInterrupt):
        ddmin([1, 2], test)
