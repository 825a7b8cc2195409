"""Every trajectory lands in exactly one micro-batch; all ranks get the same number of micro-batches."""

import random

import pytest

from megatron_sao.data.balance import Cost, micro_batches


def test_a_plan_by_hand():
    # longest first: 9 -> rank 0, 5 -> rank 1, 4 -> rank 1 (5 < 9), 3 -> rank 0 (a tie at 9 goes to the lower rank)
    assert micro_batches([3, 9, 4, 5], num_ranks=2, budget_tokens=9) == [[[1], [0]], [[3, 2], []]]


def test_ranks_are_balanced_by_cost_and_not_by_tokens():
    lengths = [8, 4, 4, 4, 4]
    assert micro_batches(lengths, 2, budget_tokens=99) == [[[0, 3]], [[1, 2, 4]]]  # 12 tokens each
    # 8^2 = 4 * 4^2: attention alone costs 64 on both ranks
    assert micro_batches(lengths, 2, budget_tokens=99, cost=Cost(per_token=0, per_pair=1)) == [[[0]], [[1, 2, 3, 4]]]
    # 3 * 8 + 8^2 = 88; 3 * 4 + 4^2 = 28: the fourth one goes where 84 stands, not 88
    assert micro_batches(lengths, 2, budget_tokens=99, cost=Cost(per_token=3, per_pair=1)) == [[[0]], [[1, 2, 3, 4]]]


def test_the_budget_counts_tokens_whatever_they_cost():
    cost = Cost(per_token=0, per_pair=1)
    assert micro_batches([8, 4, 4, 4, 4], 2, budget_tokens=8, cost=cost) == [[[0], []], [[1, 2], [3, 4]]]


def test_the_number_of_micro_batches_is_filled_up_to_a_multiple():
    assert micro_batches([7, 7, 7], 1, budget_tokens=8, multiple=2) == [[[0], [1], [2], []]]
    assert micro_batches([7, 7], 1, budget_tokens=8, multiple=2) == [[[0], [1]]]
    assert micro_batches([], 2, budget_tokens=8, multiple=2) == [[[], []]] * 2


def test_the_budget_is_kept_and_a_longer_trajectory_stands_alone():
    assert micro_batches([50, 6, 4, 5], num_ranks=1, budget_tokens=10) == [[[0], [1], [3, 2]]]
    assert micro_batches([2, 2, 50], num_ranks=1, budget_tokens=10) == [[[2], [0, 1]]]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_without_trajectories_every_rank_has_one_filler(num_ranks):
    assert micro_batches([], num_ranks, budget_tokens=8) == [[[]]] * num_ranks


def test_a_rank_without_a_trajectory_gets_fillers():
    assert micro_batches([7, 7, 7], num_ranks=4, budget_tokens=8) == [[[0]], [[1]], [[2]], [[]]]


@pytest.mark.parametrize("seed", range(20))
def test_invariants_of_random_plans(seed):
    draw = random.Random(seed)
    lengths = [draw.choice([1, 2, 7, 30, 100]) for _ in range(draw.randint(0, 40))]
    num_ranks, budget = draw.randint(1, 5), draw.choice([1, 8, 64, 1000])
    cost, multiple = Cost(per_token=draw.choice([0, 1, 50]), per_pair=draw.choice([0.5, 2])), draw.choice([1, 2, 4])
    plan = micro_batches(lengths, num_ranks, budget, cost=cost, multiple=multiple)
    again = micro_batches(list(lengths), num_ranks, budget, cost=cost, multiple=multiple)
    assert plan == again, "every rank must compute the same plan"
    assert len(plan) == num_ranks
    assert len({len(parts) for parts in plan}) == 1 and len(plan[0]) >= 1 and len(plan[0]) % multiple == 0
    assert sorted(n for parts in plan for part in parts for n in part) == list(range(len(lengths)))
    for parts in plan:
        for part in parts:
            assert sum(lengths[n] for n in part) <= budget or len(part) == 1
        filled = [bool(part) for part in parts]
        assert filled == sorted(filled, reverse=True), "fillers come last"
    loads = [sum(cost.of(lengths[n]) for part in parts for n in part) for parts in plan]
    assert max(loads) - min(loads) <= cost.of(max(lengths, default=0)), "no rank is ahead by more than one trajectory"
