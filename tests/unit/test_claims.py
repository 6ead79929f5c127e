"""The claim cursor: bounds are an optimisation and lose nothing."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from kombu_pgnotify import claims
from kombu_pgnotify.claims import LOOK_FROM_START_EVERY, ClaimCursor, Outlook, Ranges

ranks = st.integers(0, 255)
ids = st.integers(1, 10_000)
rows = st.lists(st.tuples(ranks, ids), max_size=6)


def places(ranges: Ranges, rank: int, task_id: int) -> list[int]:
    """In which of the ranges a row lies."""
    return [
        number
        for number, (after_rank, after_id, last_rank) in enumerate(zip(*ranges, strict=True))
        if (rank, task_id) > (after_rank, after_id) and rank <= last_rank
    ]


def cursor_with(bounds: dict[int, int]) -> ClaimCursor:
    """A cursor that has looked from the start and got these bounds since."""
    cursor = ClaimCursor()
    cursor.next_ranges(0)
    cursor.claimed([(rank, bound + claims.SLACK) for rank, bound in bounds.items()], 1, 0, 0)
    return cursor


@settings(deadline=None)
@given(bounds=st.dictionaries(ranks, ids), rank=ranks, task_id=ids)
def test_the_ranges_cover_every_row_above_the_bounds_exactly_once(
    bounds: dict[int, int], rank: int, task_id: int
) -> None:
    ranges = cursor_with(bounds).next_ranges(0.5)
    expected = 1 if task_id > bounds.get(rank, 0) else 0
    assert len(places(ranges, rank, task_id)) == expected


@settings(deadline=None)
@given(bounds=st.dictionaries(ranks, ids), found=st.lists(st.tuples(ranks, ids), max_size=20))
def test_the_ranges_are_walked_in_delivery_order(
    bounds: dict[int, int], found: list[tuple[int, int]]
) -> None:
    ranges = cursor_with(bounds).next_ranges(0.5)
    above = sorted(row for row in found if row[1] > bounds.get(row[0], 0))
    numbers = [places(ranges, *row)[0] for row in above]
    assert numbers == sorted(numbers)


@settings(deadline=None)
@given(bounds=st.dictionaries(ranks, ids, min_size=1), rank=ranks)
def test_a_rank_that_was_never_seen_is_covered_whole(bounds: dict[int, int], rank: int) -> None:
    bounds.pop(rank, None)
    ranges = cursor_with(bounds).next_ranges(0.5)
    assert len(places(ranges, rank, 1)) == 1


def test_a_new_cursor_looks_from_the_start() -> None:
    assert ClaimCursor().next_ranges(0) == ([-1], [0], [32767])


@settings(deadline=None)
@given(
    claimed=st.lists(st.tuples(rows, st.integers(1, 6), st.floats(0, 0.2)), max_size=30),
    told=st.sets(st.integers(0, 30)),
)
def test_empty_is_only_said_after_a_whole_look(
    claimed: list[tuple[list[tuple[int, int]], int, float]], told: set[int]
) -> None:
    cursor, now = ClaimCursor(), 0.0
    for number, (found, asked, took) in enumerate(claimed):
        if number in told:
            cursor.look_from_start()
        ranges = cursor.next_ranges(now)
        whole = ranges == ClaimCursor().next_ranges(0)
        outlook = cursor.claimed(found, asked, now, now + took)
        if len(found) >= asked:
            assert outlook is Outlook.MORE
        else:
            assert outlook is (Outlook.EMPTY if whole else Outlook.UNSURE)
        now += took + 0.01


@settings(deadline=None)
@given(found=rows.filter(bool), took=st.floats(0, 2), waited=st.floats(0, 300))
def test_being_told_leads_to_a_whole_look_as_soon_as_the_last_one_is_paid_for(
    found: list[tuple[int, int]], took: float, waited: float
) -> None:
    cursor = ClaimCursor()
    cursor.next_ranges(0)
    cursor.claimed(found, len(found), 0, took)
    cursor.look_from_start()
    due = cursor.due_from_start()
    assert due == took + claims.COST_SHARE * took
    ranges = cursor.next_ranges(took + waited)
    if took + waited >= due:
        assert ranges == ClaimCursor().next_ranges(0)


def test_being_told_twice_is_one_look() -> None:
    cursor = cursor_with({255: 1000})
    cursor.look_from_start()
    cursor.look_from_start()
    assert cursor.next_ranges(1) == ClaimCursor().next_ranges(0)
    cursor.claimed([(255, 5000)], 1, 1, 1)
    assert cursor.next_ranges(1.5) != ClaimCursor().next_ranges(0)


def test_being_told_during_a_whole_look_leads_to_another() -> None:
    cursor = ClaimCursor()
    cursor.next_ranges(0)
    # Rows come back below what this look has passed, before its answer is here.
    cursor.look_from_start()
    cursor.claimed([(255, 5000)], 1, 0, 0)
    assert cursor.next_ranges(0.5) == ClaimCursor().next_ranges(0)


@settings(deadline=None)
@given(
    found=st.lists(st.lists(st.tuples(ranks, ids), min_size=5, max_size=5), min_size=1),
    took=st.floats(0, 0.05),
    pause=st.floats(0.001, 0.5),
)
def test_under_constant_load_a_whole_look_comes_every_second(
    found: list[list[tuple[int, int]]], took: float, pause: float
) -> None:
    cursor, now, last_whole = ClaimCursor(), 0.0, 0.0
    longest = max(LOOK_FROM_START_EVERY, claims.COST_SHARE * took) + took + pause
    for number in range(200):
        ranges = cursor.next_ranges(now)
        if ranges == ClaimCursor().next_ranges(0):
            last_whole = now + took
        assert now - last_whole <= longest + 1e-6
        assert cursor.claimed(found[number % len(found)], 5, now, now + took) is Outlook.MORE
        now += took + pause


@settings(deadline=None)
@given(took=st.floats(0.001, 1))
def test_whole_looks_take_a_small_share_of_the_time(took: float) -> None:
    cursor, now, spent = ClaimCursor(), 0.0, 0.0
    for number in range(500):
        cursor.look_from_start()
        whole = cursor.next_ranges(now) == ClaimCursor().next_ranges(0)
        cost = took if whole else 0.001
        spent += cost if whole else 0
        cursor.claimed([(255, 1000 + number * 10)] * 3, 3, now, now + cost)
        now += cost
    assert spent <= took + now / claims.COST_SHARE


def test_a_bound_stays_below_what_may_still_commit() -> None:
    cursor = ClaimCursor()
    cursor.next_ranges(0)
    cursor.claimed([(255, 1000)], 1, 0, 0)
    assert len(places(cursor.next_ranges(0.1), 255, 1000 - claims.SLACK + 1)) == 1
    assert places(cursor.next_ranges(0.1), 255, 1000 - claims.SLACK) == []


def test_a_bound_never_goes_back_while_rows_come() -> None:
    cursor = cursor_with({255: 5000})
    cursor.claimed([(255, 300)], 1, 0.1, 0.1)
    assert places(cursor.next_ranges(0.2), 255, 4999) == []


def test_a_cheap_queue_needs_no_bounds_once_it_is_empty() -> None:
    cursor = ClaimCursor()
    cursor.next_ranges(0)
    cursor.claimed([(255, 5000)], 10, 0, claims.CHEAP / 2)
    assert cursor.next_ranges(0.1) == ClaimCursor().next_ranges(0)


def test_a_costly_queue_keeps_its_bounds_when_it_is_empty() -> None:
    cursor = ClaimCursor()
    cursor.next_ranges(0)
    cursor.claimed([(255, 5000)] * 3, 3, 0, 0.1)
    cursor.look_from_start()
    assert cursor.next_ranges(10) == ClaimCursor().next_ranges(0)
    assert cursor.claimed([(0, 700)], 3, 10, 10.1) is Outlook.EMPTY
    ranges = cursor.next_ranges(10.2)
    assert places(ranges, 255, 5000 - claims.SLACK) == []
    assert places(ranges, 0, 700 - claims.SLACK) == []
