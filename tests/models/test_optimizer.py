"""Learning rates, skipped steps, and the CPU's Adam against torch's."""

import pytest
import torch

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.config import load_config
from megatron_sao.convert.family import read_shape
from megatron_sao.models.build import build_model
from megatron_sao.models.groups import freeze, grouped_parameters
from megatron_sao.models.hf_folder import HFFolder
from megatron_sao.models.optimizer import make_trained_model
from megatron_sao.models.weights import load_weights
from megatron_sao.parallel.cpu_adam import GroupStepAdam
from megatron_sao.parallel.init import start_world
from tests.support.folders import make_folder
from tests.support.ranks import run_ranks

PEAK = 5e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("moe") / "model")


def value_learner(folder, overrides):
    config = load_config(None, overrides)
    world = start_world(config)
    hf = HFFolder(folder)
    chunks = build_model("value", hf.config, config.parallel, torch.float32)
    load_weights(chunks, hf, read_shape(hf.config), world)
    return make_trained_model(chunks, config.value, freeze(chunks, config.value.groups)), world


def set_gradients(learner, fill):
    """Give every trained parameter a gradient, made by `fill(name, parameter)`."""
    learner.zero_grad()
    for chunk in learner.chunks:
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad:
                parameter.main_grad.copy_(fill(name, parameter))


# ---- learning rates --------------------------------------------------------------------------------------------


def rates(folder, overrides, steps):
    """Per number of schedule steps: role -> learning rate at which its parameters are updated."""
    learner, _ = value_learner(folder, overrides)
    role_of = {id(p.parameter): p.group for chunk in learner.chunks for p in grouped_parameters(chunk)}
    found = {}
    for step in range(max(steps) + 1):
        if step in steps:
            by_role = {}
            for optimizer in learner.optimizer.chained_optimizers:
                for group, shards in zip(
                    optimizer.optimizer.param_groups, optimizer.model_fp32_groups, strict=True
                ):
                    for parameter in shards:
                        by_role.setdefault(role_of[id(parameter)], set()).add(group["lr"])
            found[step] = by_role, learner.learning_rate
        set_gradients(learner, lambda name, p: torch.ones_like(p))
        was_done, _ = learner.update()
        assert was_done
    return found


def test_every_group_follows_one_schedule(folder):  # VAL-06
    (found,) = run_ranks(1, rates, folder, ["value.lr_warmup_steps=10"], (0, 1, 5, 10, 11))
    for step, rate in {0: 0.0, 1: 5e-7, 5: 2.5e-6, 10: PEAK, 11: PEAK}.items():
        by_role, reported = found[step]
        assert set(by_role) == {"router", "experts", "head"}
        for role, seen in by_role.items():
            assert list(seen) == [pytest.approx(rate)], (step, role)
        assert reported == pytest.approx(rate)


def test_without_a_warm_up_the_first_update_runs_at_the_peak(folder):
    (found,) = run_ranks(1, rates, folder, [], (0, 1))
    for by_role, reported in found.values():
        assert all(list(seen) == [PEAK] for seen in by_role.values()) and reported == PEAK


def test_multipliers_scale_the_whole_schedule_of_their_group(folder):
    overrides = [
        "value.lr_warmup_steps=10",
        "value.groups.head.lr_multiplier=10.0",
        "value.groups.router.lr_multiplier=0.5",
        "value.groups.norms.trained=true",
        "value.groups.norms.lr_multiplier=0.5",
    ]
    (found,) = run_ranks(1, rates, folder, overrides, (1, 5, 10, 11))
    for step, rate in {1: 5e-7, 5: 2.5e-6, 10: PEAK, 11: PEAK}.items():
        by_role, _ = found[step]
        expected = {"head": 10 * rate, "router": 0.5 * rate, "norms": 0.5 * rate, "experts": rate}
        assert {role: list(seen) for role, seen in by_role.items()} == {
            role: [pytest.approx(r)] for role, r in expected.items()
        }


def decayed(folder):
    """Share of each trained weight that is left after an update without gradient at rate 0.1, decay 0.5."""
    overrides = ["value.lr=0.1", "value.weight_decay=0.5", "value.clip_grad=0.0", "value.groups.norms.trained=true"]
    learner, _ = value_learner(folder, overrides)
    (chunk,) = learner.chunks
    before = {n: p.detach().clone() for n, p in chunk.named_parameters() if p.requires_grad}
    set_gradients(learner, lambda name, p: torch.zeros_like(p))
    assert learner.update()[0]
    return {n: float((p.detach().norm() / before[n].norm())) for n, p in chunk.named_parameters() if n in before}


def test_norms_are_exempt_from_weight_decay(folder):
    (left,) = run_ranks(1, decayed, folder)
    del left["output_layer.weight"]  # it starts at zero
    for name, share in left.items():
        assert share == pytest.approx(1.0 if "norm" in name else 0.95, abs=1e-6), name
    assert any("norm" in name for name in left) and any("experts" in name for name in left)


# ---- clipping --------------------------------------------------------------------------------------------------


def clipped(folder, clip):
    overrides = [f"value.clip_grad={clip}", "value.lr=1.0", "value.adam_eps=1e6", "value.beta1=0.0"]
    learner, _ = value_learner(folder, overrides)
    (chunk,) = learner.chunks
    before = chunk.output_layer.weight.detach().clone()
    count = sum(p.numel() for p in chunk.parameters() if p.requires_grad)
    set_gradients(learner, lambda name, p: torch.ones_like(p))
    _, norm = learner.update()
    return norm, count**0.5, float((before - chunk.output_layer.weight.detach()).mean())


@pytest.mark.parametrize("clip", [1.0, 0.0], ids=["clipped", "not clipped"])
def test_the_reported_norm_is_that_before_clipping(folder, clip):
    """With a huge epsilon Adam moves a weight by its (clipped) gradient / epsilon: head and experts share one norm."""
    ((norm, expected, moved),) = run_ranks(1, clipped, folder, clip)
    assert norm == pytest.approx(expected, rel=1e-5)
    assert moved * 1e6 == pytest.approx(1 / expected if clip else 1.0, rel=1e-3)


# ---- a step that is not finite ---------------------------------------------------------------------------------


def snapshot(learner):
    weights = [p.detach().clone() for chunk in learner.chunks for p in chunk.parameters()]
    moments, counts = [], []
    for optimizer in learner.optimizer.chained_optimizers:
        for group in optimizer.optimizer.param_groups:
            counts.append(group.get("step", 0))
            for parameter in group["params"]:
                state = optimizer.optimizer.state[parameter]
                moments += [parameter.detach().clone(), state["exp_avg"].clone(), state["exp_avg_sq"].clone()]
    return weights, moments, counts, learner.schedule.num_steps, learner.learning_rate


def bad_step(folder, overrides, bad_rank, bad_value, where):
    """A good update, then one whose gradient is bad in one element on one rank, then a good one."""
    learner, world = value_learner(folder, ["value.lr=0.01", "value.lr_warmup_steps=5", *overrides])

    def good(name, parameter):
        return torch.full_like(parameter, 0.5)

    def bad(name, parameter):
        gradient = good(name, parameter)
        if world.rank == bad_rank and where in name:
            gradient.view(-1)[-1] = bad_value
        return gradient

    set_gradients(learner, good)
    assert learner.update()[0]
    before = snapshot(learner)
    set_gradients(learner, bad)
    answer = learner.update()
    after = snapshot(learner)
    set_gradients(learner, good)
    next_done, next_norm = learner.update()
    weights = [p.detach() for chunk in learner.chunks for p in chunk.parameters()]
    return dict(
        answer=answer,
        is_untouched=all(torch.equal(a, b) for i in (0, 1) for a, b in zip(before[i], after[i], strict=True))
        and before[2:] == after[2:],
        num_moments=len(before[1]),
        num_steps=learner.schedule.num_steps,
        next_done=next_done,
        is_finite=next_norm < float("inf") and all(bool(w.isfinite().all()) for w in weights),
    )


NAN, INF = float("nan"), float("inf")
LAYOUTS = {"1": [], "dp2": ["parallel.dp=2"], "tp2-ep2": ["parallel.tp=2", "parallel.ep=2"], "pp2": ["parallel.pp=2"]}


@pytest.mark.parametrize(
    "layout, bad_rank, bad_value, where",
    [
        ("1", 0, NAN, "router"),
        ("1", 0, -INF, "output_layer"),
        ("1", 0, INF, "experts"),
        ("dp2", 1, NAN, "experts"),
        ("dp2", 0, NAN, "output_layer"),
        ("tp2-ep2", 1, INF, "experts"),
        ("pp2", 0, NAN, "router"),
        ("pp2", 1, NAN, "output_layer"),
    ],
)
def test_a_gradient_that_is_not_finite_skips_the_update_on_every_rank(folder, layout, bad_rank, bad_value, where):
    world_size = 1 if layout == "1" else 2
    for found in run_ranks(world_size, bad_step, folder, LAYOUTS[layout], bad_rank, bad_value, where):
        was_done, norm = found["answer"]
        assert not was_done and norm != norm
        assert found["is_untouched"] and found["num_moments"] > 0
        assert found["num_steps"] == 2, "the schedule counts the two updates that were done"
        assert found["next_done"] and found["is_finite"]


def restarted(folder, layout):
    """Three updates, a restart, two updates; against two updates of a model that starts from those weights."""
    overrides = ["value.lr=0.01", "value.lr_warmup_steps=5", *layout]

    def fill(name, parameter):
        return torch.linspace(-1, 1, parameter.numel()).view_as(parameter)

    old, _ = value_learner(folder, overrides)
    for _ in range(3):
        set_gradients(old, fill)
        old.update()
    kept = [p.detach().clone() for chunk in old.chunks for p in chunk.parameters()]
    old.restart()
    new, _ = value_learner(folder, overrides)
    unmoved = all(torch.equal(a, b) for a, b in zip(kept, old.chunks[0].parameters(), strict=True))
    with torch.no_grad():
        for parameter, weight in zip(new.chunks[0].parameters(), kept, strict=True):
            parameter.copy_(weight)
    new.optimizer.reload_model_params()
    for learner in (old, new):
        assert learner.learning_rate == 0.0, "the warm-up begins again"
        for _ in range(2):
            set_gradients(learner, fill)
            learner.update()
    first, second = snapshot(old), snapshot(new)
    moved = [torch.equal(a, b) for a, b in zip(kept, first[0], strict=True)]
    equal = all(torch.equal(a, b) for i in (0, 1) for a, b in zip(first[i], second[i], strict=True))
    return unmoved, equal and first[2:] == second[2:], all(moved)


@pytest.mark.parametrize("layout", ["1", "dp2"])
def test_a_restart_keeps_the_weights_and_forgets_the_rest(folder, layout):
    for unmoved, equal, stands_still in run_ranks(1 if layout == "1" else 2, restarted, folder, LAYOUTS[layout]):
        assert unmoved and equal and not stands_still


# ---- Adam ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.98), (0.0, 0.999)], ids=str)
def test_the_cpu_adam_equals_torch(weight_decay, betas):
    torch.manual_seed(0)
    start = [torch.randn(5, 3), torch.randn(7)]
    mine, theirs = ([torch.nn.Parameter(t.clone()) for t in start] for _ in range(2))
    options = dict(lr=0.01, betas=betas, eps=1e-8, weight_decay=weight_decay)
    adam = GroupStepAdam([{"params": mine[:1]}, {"params": mine[1:], "lr": 0.1}], **options)
    reference = torch.optim.AdamW([{"params": theirs[:1]}, {"params": theirs[1:], "lr": 0.1}], **options)
    for step in range(6):
        for a, b in zip(mine, theirs, strict=True):
            a.grad = torch.randn_like(a) * 10.0 ** (step - 3)
            b.grad = a.grad.clone()
        adam.step()
        reference.step()
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
    assert [group["step"] for group in adam.param_groups] == [6, 6]


def test_the_cpu_adam_can_do_classic_weight_decay_and_leaves_parameters_without_gradient_alone():
    weight, idle = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    twin = torch.nn.Parameter(torch.ones(3))
    adam = GroupStepAdam([weight, idle], lr=0.1, weight_decay=0.5, adam_w_mode=False)
    reference = torch.optim.Adam([twin], lr=0.1, weight_decay=0.5)
    for _ in range(3):
        weight.grad, twin.grad = torch.full((3,), 0.2), torch.full((3,), 0.2)
        adam.step()
        reference.step()
    torch.testing.assert_close(weight, twin)
    assert torch.equal(idle, torch.ones(3)) and idle not in adam.state
