"""Lag, acceptance and capacity, worked by hand."""

import pytest

from megatron_sao.errors import ProtocolError
from megatron_sao.schedule.freshness import capacity, is_fresh, lag, num_to_issue


def test_capacity_counts_what_was_accepted_before_a_restart():  # ASY-01
    # (3 + 25 + 1) * 8 = 232 slots since version 0, of which 25 * 8 = 200 are used: 32 are left, not 232.
    given = dict(batch_trajectories=8, max_staleness=3)
    assert capacity(policy_version=25, num_accepted=200, num_running=0, **given) == 32
    assert capacity(policy_version=25, num_accepted=200, num_running=5, **given) == 27
    assert capacity(policy_version=0, num_accepted=0, num_running=0, **given) == 32


def test_capacity_is_not_positive_when_everything_is_in_use():
    given = dict(policy_version=0, batch_trajectories=8, max_staleness=0)
    assert capacity(num_accepted=3, num_running=5, **given) == 0
    assert capacity(num_accepted=8, num_running=5, **given) == -5


def test_what_capacity_admits_is_consumed_in_time():
    """Issue as much as is allowed at every version, consume one batch per version in order: nothing is ever stale."""
    batch, max_staleness, issued_at = 8, 3, []
    for version in range(12):
        accepted_or_running = len(issued_at)
        room = capacity(
            policy_version=version, batch_trajectories=batch, max_staleness=max_staleness,
            num_accepted=accepted_or_running, num_running=0,
        )
        issued_at += [version] * room
        consumed = issued_at[version * batch : (version + 1) * batch]
        assert len(consumed) == batch
        assert all(is_fresh(version, written, max_staleness) for written in consumed)


def test_acceptance_at_the_limit():  # ASY-02
    trained_by, limit = 4, 2
    assert [lag(trained_by, written) for written in (4, 3, 2, 1)] == [0, 1, 2, 3]
    assert [is_fresh(trained_by, written, limit) for written in (4, 3, 2, 1)] == [True, True, True, False]


def test_waiting_in_the_queue_makes_older():  # ASY-02
    assert is_fresh(4, 3, 2)
    assert not is_fresh(4 + 2, 3, 2)


@pytest.mark.parametrize("limit", [0, 2, 10_000])
def test_negative_lag_is_an_error_whatever_the_limit(limit):  # WSY-10
    assert lag(58, 57) == 1
    with pytest.raises(ProtocolError, match="57.*version 1: lag -56"):
        is_fresh(1, 57, limit)


def test_a_version_below_zero_is_an_error():
    with pytest.raises(ProtocolError, match="-1"):
        lag(3, -1)


@pytest.mark.parametrize(
    ("capacity_left", "running", "buffered", "needed", "expected"),
    [
        (100, 0, 0, 6, 8),  # nothing on the way: as many as may run
        (100, 3, 2, 6, 3),  # finished ones that wait are on the way too
        (100, 0, 8, 6, 0),  # the next step has all it needs; more would only grow old
        (100, 0, 8, 20, 8),  # the next step needs 20: go on, at most 8 at a time
        (100, 6, 10, 20, 2),
        (100, 6, 14, 20, 0),  # what the step lacks is on its way
        (1, 0, 0, 20, 1),  # freshness allows only one more
        (-5, 0, 0, 20, 0),
        (100, 9, 0, 20, 0),
    ],
)
def test_how_many_to_issue(capacity_left, running, buffered, needed, expected):
    given = dict(capacity=capacity_left, num_running=running, max_in_flight=8)
    assert num_to_issue(**given, num_buffered=buffered, num_needed=needed) == expected
