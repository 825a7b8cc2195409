"""GAE: hand-worked numbers, the scan against the loop, and what must never have an effect."""

import math

import pytest
import torch

from megatron_sao.algo import gae
from megatron_sao.algo.gae import (
    length_adaptive_lambda,
    length_adaptive_lambda_n,
    packed_plain_gae,
    packed_skip_observation_gae,
    plain_gae,
    skip_observation_gae,
    skip_observation_gae_loop,
)

NAN, INF = float("nan"), float("inf")
GARBAGE = [0.0, 123.0, -1e10, NAN, INF, -INF]


def tensor(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


def mask(*flags: int) -> torch.Tensor:
    return torch.tensor(flags, dtype=torch.bool)


def assert_close(actual: torch.Tensor, expected: list, atol: float = 1e-6) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=actual.dtype), atol=atol, rtol=0)


def random_trajectories(seed: int, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Dense rewards, values around 0, and turns of random length; every other turn is an observation."""
    generator = torch.Generator().manual_seed(seed)
    reward = torch.randn(shape, generator=generator) * 0.1
    value = torch.randn(shape, generator=generator)
    flips = (torch.rand(shape, generator=generator) < 0.05).cumsum(-1)
    return reward, value, flips % 2 == 1


# ---- worked by hand ---------------------------------------------------------------------------------------------


def test_observation_tokens_cost_no_decay() -> None:
    """GAE-01."""
    advantage, returns = skip_observation_gae(
        tensor(0, 0, 0, 0, 0, 1),
        tensor(0.5, 0.4, 9.9, -7.7, 0.2, 0.6),
        mask(1, 1, 0, 0, 1, 1),
        lam=0.9,
    )
    assert_close(advantage, [0.3356, 0.484, 0.0, 0.0, 0.76, 0.4])
    assert_close(returns, [0.8356, 0.884, 0.0, 0.0, 0.96, 1.0])


@pytest.mark.parametrize("garbage", GARBAGE)
def test_value_behind_the_end_is_not_bootstrapped(garbage: float) -> None:
    """GAE-03."""
    advantage, returns = skip_observation_gae(tensor(0, 1, 0), tensor(0.1, 0.3, garbage), mask(1, 1, 0), lam=0.95)
    assert_close(advantage, [0.865, 0.7, 0.0])
    assert_close(returns, [0.965, 1.0, 0.0])


def test_policy_and_value_lambda_differ() -> None:
    """GAE-05: targets with lambda 1 are the outcome, undiminished across the observation."""
    reward, value = tensor(0, 0, 0, 0, 0, 1), tensor(0.6, 0.2, 5.0, 5.0, 0.4, 0.7)
    action = mask(1, 1, 0, 0, 1, 1)
    advantage, _ = skip_observation_gae(reward, value, action, lam=0.95)
    _, target = skip_observation_gae(reward, value, action, lam=1.0)
    assert_close(advantage, [0.3179625, 0.75575, 0.0, 0.0, 0.585, 0.3])
    assert_close(target, [1.0, 1.0, 0.0, 0.0, 1.0, 1.0])


def test_row_without_actions_drops_its_reward_and_leaves_its_neighbour_alone() -> None:
    """GAE-07."""
    value = torch.tensor([[1.0, 2.0, 3.0], [0.5, 0.5, NAN]])
    reward = torch.tensor([[0.0, 0.0, 5.0], [0.0, 1.0, 0.0]])
    action = torch.tensor([[0, 0, 0], [1, 1, 0]], dtype=torch.bool)
    advantage, returns = skip_observation_gae(reward, value, action, lam=0.9)
    assert_close(advantage, [[0, 0, 0], [0.45, 0.5, 0]])
    assert_close(returns, [[0, 0, 0], [0.95, 1.0, 0]])
    alone, _ = skip_observation_gae(reward[:1], value[:1], action[:1], lam=0.9)
    assert_close(alone, [[0, 0, 0]])


def test_reward_of_a_turn_and_gamma() -> None:
    # V = 1, 2, 3; r = 0.5 on the first turn; gamma 0.5, lambda 0.5:
    # A_2 = 2 - 3 = -1;  A_1 = 0 + 1.5 - 2 + 0.25 * -1 = -0.75;  A_0 = 0.5 + 1 - 1 + 0.25 * -0.75 = 0.3125
    advantage, returns = skip_observation_gae(
        tensor(0.5, NAN, 0, 2), tensor(1, NAN, 2, 3), mask(1, 0, 1, 1), gamma=0.5, lam=0.5
    )
    assert_close(advantage, [0.3125, 0, -0.75, -1])
    assert_close(returns, [1.3125, 0, 1.25, 2])


def test_bootstrap_value_stands_behind_the_last_action_even_if_observations_follow() -> None:
    # A_1 = 0 + 0.5 * 4 - 1 = 1;  A_0 = 0 + 0.5 * 1 - 2 + 0.5 * 0.5 * 1 = -1.25
    for tail in (0, 1, 70):
        pad = [NAN] * tail
        advantage, returns = skip_observation_gae(
            tensor(0, 0, *pad), tensor(2, 1, *pad), mask(1, 1, *[0] * tail), gamma=0.5, lam=0.5, bootstrap_value=4.0
        )
        assert_close(advantage, [-1.25, 1] + [0] * tail)
        assert_close(returns, [0.75, 2] + [0] * tail)


def test_lambda_zero_is_the_one_step_error_and_lambda_one_the_return() -> None:
    reward, value, action = tensor(0.25, 9, 0, 1), tensor(0.5, 9, 0.75, 0.125), mask(1, 0, 1, 1)
    one_step, _ = skip_observation_gae(reward, value, action, lam=0.0)
    assert_close(one_step, [0.25 + 0.75 - 0.5, 0, 0.125 - 0.75, 1 - 0.125], atol=0)
    _, monte_carlo = skip_observation_gae(reward, value, action, lam=1.0)
    assert_close(monte_carlo, [1.25, 0, 1, 1], atol=0)


# ---- the scan against the definition ----------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 2, 31, 32, 33, 64, 1023, 1024, 1025, 3000])
@pytest.mark.parametrize("lam", [0.0, 1e-6, 0.5, 0.99, 1.0])
def test_scan_equals_loop_at_every_block_boundary(num_tokens: int, lam: float) -> None:
    reward, value, action = random_trajectories(num_tokens, (3, num_tokens))
    expected = skip_observation_gae_loop(reward.double(), value.double(), action, lam=lam, bootstrap_value=0.5)
    actual = skip_observation_gae(reward, value, action, lam=lam, bootstrap_value=0.5)
    for got, want in zip(actual, expected):
        torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("lam", [0.0, 0.3, 0.95, length_adaptive_lambda(32768), 1.0])
def test_scan_equals_loop_over_32k_tokens(lam: float) -> None:
    reward, value, action = random_trajectories(7, (2, 32768))
    reward = torch.zeros_like(reward)
    reward[:, -1], action[:, -1] = 1.0, True
    expected = skip_observation_gae_loop(reward.double(), value.double(), action, lam=lam)
    actual = skip_observation_gae(reward, value, action, lam=lam)
    for got, want in zip(actual, expected):
        torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=0)


def test_chunks_of_any_length_hand_on_what_lies_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    reward, value, action = random_trajectories(3, (4, 300))
    whole = skip_observation_gae(reward, value, action, lam=0.97, bootstrap_value=tensor(1, 2, 3, 4))
    for chunk_tokens in (1, 64, 300, 352, 1000):
        monkeypatch.setattr(gae, "CPU_CHUNK_TOKENS", chunk_tokens)
        parts = skip_observation_gae(reward, value, action, lam=0.97, bootstrap_value=tensor(1, 2, 3, 4))
        for got, want in zip(parts, whole):
            torch.testing.assert_close(got, want, atol=1e-6, rtol=0)


def test_packed_trajectories_keep_their_own_lambda_and_bootstrap() -> None:
    lengths = [5, 0, 1, 200, 64, 0, 1000, 3]
    start = torch.tensor([0, *lengths]).cumsum(0)
    reward, value, action = random_trajectories(11, (int(start[-1]),))
    action[-3:] = False  # a trajectory that never acts
    lam = torch.tensor([0.5, 0.9, 0.0, 0.99, 1.0, 0.1, 0.999, 0.7], dtype=torch.float64)
    bootstrap = torch.arange(8.0)
    advantage, returns = packed_skip_observation_gae(
        reward, value, action, start, gamma=0.9, lam=lam, bootstrap_value=bootstrap
    )
    for n, num_tokens in enumerate(lengths):
        if num_tokens == 0:
            continue
        tokens = slice(int(start[n]), int(start[n + 1]))
        expected = skip_observation_gae_loop(
            reward[tokens].double(),
            value[tokens].double(),
            action[tokens],
            gamma=0.9,
            lam=float(lam[n]),
            bootstrap_value=float(bootstrap[n]),
        )
        torch.testing.assert_close(advantage[tokens].double(), expected[0], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(returns[tokens].double(), expected[1], atol=1e-6, rtol=1e-6)


def test_left_and_right_padding_and_packing_agree() -> None:
    reward, value, action = random_trajectories(5, (100,))
    alone = skip_observation_gae(reward, value, action, lam=0.9)
    pad = torch.full((37,), NAN)
    no_action = torch.zeros(37, dtype=torch.bool)
    left = skip_observation_gae(
        torch.cat([pad, reward]), torch.cat([pad, value]), torch.cat([no_action, action]), lam=0.9
    )
    right = skip_observation_gae(
        torch.cat([reward, pad]), torch.cat([value, pad]), torch.cat([action, no_action]), lam=0.9
    )
    for k in (0, 1):
        torch.testing.assert_close(left[k][37:], alone[k], atol=1e-6, rtol=0)
        torch.testing.assert_close(right[k][:100], alone[k], atol=1e-6, rtol=0)
        assert not left[k][:37].any() and not right[k][100:].any()


# ---- what must have no effect -----------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [skip_observation_gae, skip_observation_gae_loop])
@pytest.mark.parametrize("lam", [0.0, 0.9, 1.0])
def test_masked_garbage_changes_no_bit(function, lam: float) -> None:
    reward, value, action = random_trajectories(2, (3, 500))
    clean = function(reward.where(action, 0.0), value.where(action, 0.0), action, lam=lam)
    for garbage in GARBAGE:
        dirty = function(reward.where(action, garbage), value.where(action, garbage), action, lam=lam)
        for got, want in zip(dirty, clean):
            assert torch.equal(got, want)
            assert (got[~action] == 0).all()


def test_inputs_stay_as_they_are_and_outputs_carry_no_gradient() -> None:
    reward, value, action = random_trajectories(4, (2, 130))
    value.requires_grad_()
    before = value.detach().clone()
    advantage, returns = skip_observation_gae(reward, value, action, lam=0.9)
    assert not advantage.requires_grad and not returns.requires_grad
    assert torch.equal(value, before)


@pytest.mark.parametrize(
    ("given", "returned"),
    [(torch.float32, torch.float32), (torch.float64, torch.float64), (torch.bfloat16, torch.float32)],
)
def test_result_is_float32_at_least(given: torch.dtype, returned: torch.dtype) -> None:
    value = torch.tensor([0.5, 0.25], dtype=given)
    advantage, returns = skip_observation_gae(torch.tensor([0, 1], dtype=given), value, mask(1, 1), lam=1.0)
    assert advantage.dtype == returns.dtype == returned
    assert advantage.tolist() == [0.5, 0.75]


def test_mask_may_be_numbers_and_inputs_strided() -> None:
    reward, value, action = random_trajectories(8, (90, 4))
    strided = skip_observation_gae(reward.T, value.T, action.T.long(), lam=0.9)
    plain = skip_observation_gae(reward.T.contiguous(), value.T.contiguous(), action.T.contiguous(), lam=0.9)
    assert torch.equal(strided[0], plain[0])


def test_empty_input() -> None:
    advantage, returns = skip_observation_gae(torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.bool))
    assert advantage.shape == returns.shape == (0,)
    none, _ = skip_observation_gae(torch.zeros(0, 5), torch.zeros(0, 5), torch.zeros(0, 5, dtype=torch.bool))
    assert none.shape == (0, 5)


# ---- refused ----------------------------------------------------------------------------------------------------


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"reward_t \[3\], value_t \[2\]"):
        skip_observation_gae(torch.zeros(3), torch.zeros(2), mask(1, 1))
    with pytest.raises(ValueError, match="one number, or"):
        skip_observation_gae(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3), lam=torch.ones(3))


@pytest.mark.parametrize("number", [-0.1, 1.1, NAN])
def test_gamma_and_lambda_outside_their_range_are_refused(number: float) -> None:
    with pytest.raises(ValueError, match="lam"):
        skip_observation_gae(torch.zeros(2), torch.zeros(2), mask(1, 1), lam=number)
    with pytest.raises(ValueError, match="gamma"):
        skip_observation_gae(torch.zeros(2), torch.zeros(2), mask(1, 1), gamma=number)


@pytest.mark.parametrize("starts", [[0, 3], [1, 4], [0, 3, 2, 4], []])
def test_starts_that_do_not_tile_the_pack_are_refused(starts: list[int]) -> None:
    with pytest.raises(ValueError, match="trajectory_start"):
        packed_skip_observation_gae(torch.zeros(4), torch.zeros(4), torch.ones(4), torch.tensor(starts))


def test_a_broken_value_stays_in_its_trajectory() -> None:
    """A NaN on an action token is a fault, but the trajectories before it in the pack must not pay for it."""
    reward, value, action = random_trajectories(6, (3, 100))
    action[:, 50] = True
    clean = skip_observation_gae(reward, value, action, lam=0.9)
    value[1, 50] = NAN
    broken = skip_observation_gae(reward, value, action, lam=0.9)
    for got, want in zip(broken, clean):
        assert torch.equal(got[[0, 2]], want[[0, 2]])
        assert torch.equal(got[1, 51:], want[1, 51:])
        assert got[1, 50].isnan()


# ---- plain GAE and lambda ---------------------------------------------------------------------------------------


def test_plain_gae_pays_a_decay_for_each_observation_token() -> None:
    """GAE-01's numbers with the mask ignored; then 0 off the mask."""
    reward, value = tensor(0, 0, 0, 0, 0, 1), tensor(0.5, 0.4, 9.9, -7.7, 0.2, 0.6)
    advantage, returns = plain_gae(reward, value, mask(1, 1, 0, 0, 1, 1), lam=0.9)
    assert_close(advantage, [0.451736, 0.61304, 0, 0, 0.76, 0.4])
    assert_close(returns, [0.951736, 1.01304, 0, 0, 0.96, 1.0])


def test_plain_gae_ends_at_the_last_action_of_each_trajectory() -> None:
    reward = tensor(0, 1, NAN, 0, 0, 1, NAN)
    value = tensor(0.1, 0.3, NAN, NAN, 0.1, 0.3, NAN)
    action = mask(1, 1, 0, 0, 1, 1, 0)
    advantage, _ = packed_plain_gae(reward, value, action, torch.tensor([0, 3, 7]), lam=0.95)
    assert_close(advantage, [0.865, 0.7, 0, 0, 0.865, 0.7, 0])


def test_length_adaptive_lambda() -> None:
    assert length_adaptive_lambda(1) == pytest.approx(1 / 3)
    assert length_adaptive_lambda(100) == pytest.approx(1 - 1 / 150)
    assert length_adaptive_lambda(10, alpha=0.5) == pytest.approx(0.8)
    assert length_adaptive_lambda(1, alpha=0.5) == 0.0  # 1 - 2 would be negative
    assert length_adaptive_lambda(0) == 0.0
    assert math.isclose(length_adaptive_lambda(131072), 1 - 1 / 196608, abs_tol=1e-15)
    lams = length_adaptive_lambda_n(torch.tensor([0, 1, 100]))
    assert lams.dtype == torch.float64
    assert lams.tolist() == [0.0, length_adaptive_lambda(1), length_adaptive_lambda(100)]
    counted = length_adaptive_lambda(mask(1, 0, 1).sum())
    assert type(counted) is float and counted == pytest.approx(2 / 3)
    for count in (-1, NAN):
        with pytest.raises(ValueError, match="count"):
            length_adaptive_lambda(count)
    with pytest.raises(ValueError, match="alpha"):
        length_adaptive_lambda(1, alpha=0.0)
