"""The search: the smallest set, shown to be so by its own tries, in few of them, whatever has to be kept."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdebug.tools.precision.search import MinimalSetSearch, SearchStopped, Tree, search, smallest

NAMES = [f"m{i}" for i in range(64)]
NESTED = [name for i in range(8) for name in (f"b{i}", *(f"b{i}.l{j}" for j in range(8)))]


def asked(names: list[str], alone: set[str], pairs: list[set[str]] = [], plain: bool = True):  # noqa: B006
    tree = Tree(["", *names], ["", *names], [""] if plain else [])

    def works(kept):
        whole = tree.spread(frozenset(kept))
        return alone <= whole and all(pair & whole for pair in pairs)

    return tree, MinimalSetSearch(works, tree.spread), works


@settings(max_examples=150, deadline=None)
@given(data=st.data(), names=st.sampled_from([NAMES, NESTED]))
def test_what_is_found_works_and_nothing_can_be_taken_out(data, names) -> None:
    sick = data.draw(st.lists(st.sampled_from(names), unique=True, max_size=8))
    pairs = data.draw(st.integers(0, len(sick) // 2))
    together = [set(sick[2 * i : 2 * i + 2]) for i in range(pairs)]
    suspects = data.draw(st.lists(st.sampled_from(sick or names), unique=True, max_size=4))
    suspects = [s for s in suspects if not any(s.startswith(other + ".") for other in suspects)]
    tree, tries, works = asked(names, set(sick[2 * pairs :]), together, plain=names is NAMES)
    kept = search(tree, tries, suspects)
    assert works(kept)
    assert all(not works(kept - {unit}) for unit in kept)
    assert tries.best == kept and tries.minimal()
    assert len({t.kept for t in tries.tries}) == len(tries.tries), "no set is tried twice"


@pytest.mark.parametrize("sick, most", [(1, 8), (2, 14), (4, 24), (8, 44)])
def test_with_the_right_suspects_it_stays_far_below_the_information_bound(sick: int, most: int) -> None:
    tree, tries, _ = asked(NAMES, set(NAMES[5 : 5 + sick * 7 : 7]))
    assert len(search(tree, tries, NAMES[5 : 5 + sick * 7 : 7])) == sick
    assert len(tries.tries) <= sick + 4 <= most


def test_without_suspects_it_takes_about_as_many_tries_as_there_is_to_learn() -> None:
    import random

    for sick, most in ((1, 8.5), (2, 14.5), (4, 24.5), (8, 40)):  # the information is 6, 11, 19.3 and 32 bits
        counts = []
        for seed in range(30):
            tree, tries, _ = asked(NAMES, set(random.Random(seed).sample(NAMES, sick)))
            search(tree, tries, ())
            counts.append(len(tries.tries))
        assert statistics.mean(counts) <= most


def test_nothing_is_kept_where_all_is_well_and_all_where_nothing_else_helps() -> None:
    tree, tries, _ = asked(NAMES, set())
    assert search(tree, tries, ["m3"]) == frozenset() and len(tries.tries) == 1
    tree, tries, _ = asked(NESTED, {""}, plain=False)
    assert search(tree, tries, ()) == {""}


def test_own_code_of_a_module_with_children_is_met_from_the_top() -> None:
    tree, tries, _ = asked(NESTED, {"b3", "b5.l2"}, plain=False)
    assert search(tree, tries, ()) == {"b3", "b5.l2"} and tries.minimal()


def test_when_it_is_stopped_the_best_set_so_far_is_at_hand() -> None:
    tree, tries, works = asked(NAMES, {"m1", "m40"})
    ask = tries.works

    def until(kept):
        if len(tries.tries) == 4:
            raise SearchStopped
        return ask(kept)

    tries.works = until
    with pytest.raises(SearchStopped):
        search(tree, tries, ["m1", "m40", "m41"])
    assert tries.best is not None and works(tries.best)
    assert smallest(MinimalSetSearch(works), NAMES) == {"m1", "m40"}
