"""What the values of a configuration may be, alone, together, with a model and with a world (CFG-02, CFG-04, CFG-06,
DIS-09).
"""

import pytest

from megatron_sao.config import (
    check_device,
    check_is_built,
    check_model_fits,
    check_nodes,
    check_one_machine,
    check_world_size,
    load_config,
)
from megatron_sao.errors import ConfigError


def fault(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    return str(caught.value)


# ---- the model (CFG-02) ----------------------------------------------------------------------------------------

MOE = {
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_hidden_layers": 48,
    "num_experts": 128,
    "moe_intermediate_size": 768,
}


def layout(**sizes: int):
    """A configuration for a model from a folder; the trainer has as many copies as the experts need."""
    overrides = [f"parallel.{axis}={size}" for axis, size in sizes.items()]
    dp = sizes.get("ep", 1) * sizes.get("etp", 1)
    return load_config(None, ["model.path=m", "warm_start.enabled=false", f"parallel.dp={dp}", *overrides])


@pytest.mark.parametrize(
    "sizes, model, expected",
    [
        (
            {"ep": 3},
            MOE,
            "parallel.ep = 3 does not divide the model's num_experts = 128; use 1, 2, 4, 8, 16, 32, 64 or 128",
        ),
        ({"ep": 8}, MOE | {"num_experts": 60}, "parallel.ep = 8 does not divide the model's num_experts = 60"),
        (
            {"ep": 8},
            {"n_routed_experts": 60, "num_experts": 256},
            "parallel.ep = 8 does not divide the model's n_routed_experts = 60",
        ),
        ({"ep": 8}, {"num_local_experts": 60}, "num_local_experts = 60"),
        ({"ep": 2}, {"num_attention_heads": 32}, "parallel.ep = 2, but the model has no experts; use 1"),
        (
            {"tp": 3},
            MOE | {"num_key_value_heads": 3},
            "parallel.tp = 3 does not divide the model's num_attention_heads = 32; use 1, 2, 4, 8, 16 or 32",
        ),
        (
            {"tp": 4},
            MOE | {"num_key_value_heads": 2},
            "parallel.tp = 4 does not divide the model's num_key_value_heads = 2; use 1 or 2",
        ),
        (
            {"pp": 4},
            MOE | {"num_hidden_layers": 46},
            "parallel.pp = 4 does not divide the model's num_hidden_layers = 46; use 1, 2, 23 or 46",
        ),
        ({"etp": 5}, MOE, "parallel.etp = 5 does not divide the model's moe_intermediate_size = 768"),
        (
            {"tp": 4},
            {"num_attention_heads": 4, "intermediate_size": 6},
            "parallel.tp = 4 does not divide the model's intermediate_size = 6",
        ),
        (
            {},
            MOE | {"max_position_embeddings": 128},
            "engine.max_model_len = 256 is more than the model's max_position_embeddings = 128",
        ),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused_with_both_numbers(sizes, model, expected):
    with pytest.raises(ConfigError) as caught:
        check_model_fits(layout(**sizes), model)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "sizes, model",
    [
        ({"tp": 4, "pp": 4, "ep": 8}, MOE),
        ({"tp": 4}, MOE | {"intermediate_size": 6}),  # no dense layer: its width is never split
        (
            {"tp": 8},
            {"num_attention_heads": 64, "num_key_value_heads": 1, "kv_lora_rank": 512},
        ),  # MLA has none to split
    ],
)
def test_a_layout_that_fits_is_accepted(sizes, model):
    check_model_fits(layout(**sizes), model)


def test_all_misfits_of_a_model_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        check_model_fits(layout(tp=3, pp=5, ep=7), MOE)
    assert str(caught.value).startswith("4 reasons")  # heads, key/value heads, layers, experts


def test_the_engines_must_fit_the_model_too():
    cfg = load_config(None, ["model.path=m", "warm_start.enabled=false", "engine.tensor_parallel=8"])
    with pytest.raises(
        ConfigError, match="engine.tensor_parallel = 8 does not divide the model's num_key_value_heads = 4"
    ):
        check_model_fits(cfg, MOE)


@pytest.mark.parametrize(
    "overrides, expected",
    [
        (["engine.expert_parallel=true"], ""),
        (["engine.expert_parallel=true", "engine.tensor_parallel=2", "engine.data_parallel=4"], ""),
        (["engine.pipeline_parallel=49"], "engine.pipeline_parallel = 49 is more than the model's num_hidden_layers ="),
        (
            ["engine.expert_parallel=true", "engine.tensor_parallel=4", "engine.data_parallel=64"],
            "engine.tensor_parallel * data_parallel = 256 with engine.expert_parallel is more than the model's num_exp",
        ),
    ],
)
def test_the_workers_of_an_engine_must_fit_the_model(overrides, expected):
    cfg = load_config(None, ["model.path=m", "warm_start.enabled=false", *overrides])
    if not expected:
        check_model_fits(cfg, MOE)
        return
    with pytest.raises(ConfigError) as caught:
        check_model_fits(cfg, MOE)
    assert expected in str(caught.value)


def test_experts_of_engines_need_a_model_that_has_some():
    cfg = load_config(None, ["model.path=m", "warm_start.enabled=false", "engine.expert_parallel=true"])
    with pytest.raises(ConfigError, match="engine.expert_parallel = true, but the model has no experts; use false"):
        check_model_fits(cfg, {key: value for key, value in MOE.items() if "experts" not in key})


@pytest.mark.parametrize(
    "overrides, expected",
    [
        (["parallel.tp=3"], "parallel.tp = 3 does not divide warm_start.heads = 4; use 1, 2 or 4"),
        (["parallel.tp=4"], "parallel.tp = 4 does not divide warm_start.kv_heads = 2; use 1 or 2"),
        (["parallel.pp=3"], "parallel.pp = 3 does not divide warm_start.layers = 4; use 1, 2 or 4"),
        (
            ["parallel.ep=3", "parallel.dp=3"],
            "parallel.ep = 3 does not divide warm_start.experts = 8; use 1, 2, 4 or 8",
        ),
        (["warm_start.kv_heads=3"], "warm_start.kv_heads = 3 does not divide warm_start.heads = 4"),
        (["warm_start.top_k=9"], "warm_start.top_k = 9 is more than warm_start.experts = 8"),
        (["warm_start.enabled=false"], "model.path is empty and warm_start.enabled = false"),
        (["model.path=m"], "model.path = 'm' and warm_start.enabled = true"),
    ],
)
def test_the_demonstration_model_is_checked_before_it_is_made(overrides, expected):
    assert expected in fault(*overrides)


# ---- the world -------------------------------------------------------------------------------------------------


def test_experts_must_fit_the_ranks_of_a_stage():
    assert "parallel.ep * etp = 4 * 1 = 4 does not divide parallel.tp * cp * dp = 2 * 1 * 1 = 2" in fault(
        "parallel.tp=2", "parallel.ep=4"
    )
    assert load_config(None, ["parallel.tp=2", "parallel.ep=2", "parallel.pp=2"]).parallel.world_size == 4
    assert load_config(None, ["parallel.tp=2", "parallel.dp=4", "parallel.ep=2"]).parallel.expert_dp == 4


def test_the_world_must_have_as_many_ranks_as_the_layout():
    cfg = load_config(None, ["parallel.tp=2", "parallel.pp=2"])
    check_world_size(cfg, 4)
    for world_size in (1, 2, 3, 8):
        with pytest.raises(
            ConfigError, match=rf"2 \* 2 \* 1 \* 1 = 4, but the trainer was started with {world_size} ranks"
        ):
            check_world_size(cfg, world_size)


# ---- sampling (CFG-04, DIS-09) ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "temperature, is_allowed",
    [("1.0", True), ("0.7", True), ("0", False), ("-1", False), ("nan", False), ("inf", False)],
)
def test_temperature_is_positive_and_finite(temperature, is_allowed):
    override = f"sampling.temperature={temperature}"
    if is_allowed:
        assert load_config(None, [override]).sampling.temperature == float(temperature)
    else:
        assert "sampling.temperature" in fault(override)


@pytest.mark.parametrize("override", ["top_p=0.8", "top_p=0.0", "top_p=1.1", "top_k=1", "top_k=50", "top_k=-1"])
def test_a_cut_support_is_refused(override):
    # p = [0.5, 0.3, 0.15, 0.05] at top_p 0.8 keeps tokens 0 and 1: the sampler says log(0.3 / 0.8) of token 1, the
    # learner log(0.3), so equal weights would give the ratio 0.8.
    assert "a cut support makes importance ratios wrong even for equal weights" in fault(f"sampling.{override}")


# ---- SAO's own settings (CFG-06) -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides, is_allowed",
    [
        (["sampling.rollouts_per_prompt=2"], False),
        (["algo.bounds.reasoning.eps_low=0.3"], False),
        (["algo.bounds.reasoning.eps_high=5.0"], False),
        (["algo.bounds.reasoning.eps_low=0.3", "algo.bounds.reasoning.eps_high=5.0"], True),
        (["algo.bounds.reasoning.eps_low=1.0", "algo.bounds.reasoning.eps_high=5.0"], False),
        (["algo.bounds.reasoning.eps_low=-0.1", "algo.bounds.reasoning.eps_high=5.0"], False),
        (["algo.bounds.reasoning.eps_low=0.3", "algo.bounds.reasoning.eps_high=-1.0"], False),
        (["algo.bounds.reasoning.eps_low=0.3", "algo.bounds.reasoning.eps_high=inf"], False),
        (["value.updates_per_step=0"], False),
        (["value.updates_per_step=true"], False),
        (["value.updates_per_step=1.0"], False),
        (["value.updates_per_step=1"], True),
        (["sampling.top_p=0.9"], False),
    ],
)
def test_settings_of_sao(overrides, is_allowed):
    if is_allowed:
        load_config(None, overrides)
    else:
        assert overrides[-1].split("=")[0].rpartition(".")[0] in fault(*overrides)


def test_half_a_pair_of_bounds_in_a_file_is_refused(tmp_path):
    (tmp_path / "run.toml").write_text("[algo.bounds.coding]\neps_low = 0.3\n")
    with pytest.raises(
        ConfigError,
        match="algo.bounds.coding.eps_high is missing: it must be given together with algo.bounds.coding.eps_low",
    ):
        load_config(tmp_path / "run.toml")


def test_each_domain_has_its_own_bounds():
    bounds = load_config(None, ["algo.bounds.coding={eps_low=0.1, eps_high=0.2}"]).algo.bounds
    assert (bounds.reasoning.eps_low, bounds.reasoning.eps_high) == (0.3, 5.0)
    assert (bounds.coding.eps_low, bounds.coding.eps_high) == (0.1, 0.2)
    assert (bounds.agentic.eps_low, bounds.agentic.eps_high) == (0.8, 3.0)


# ---- sections together -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides, expected",
    [
        (
            ["sampling.max_trajectory_tokens=257"],
            "sampling.max_trajectory_tokens = 257 is more than engine.max_model_len = 256",
        ),
        (
            ["parallel.micro_batch_tokens=127"],
            "sampling.max_trajectory_tokens = 128 is more than parallel.micro_batch_tokens = 127",
        ),
        (["sampling.max_tokens_per_turn=128"], "leaves no room for a prompt"),
        (
            ["algo.arm=grpo", "schedule.batch_trajectories=12"],
            "rollouts_per_prompt = 8 does not divide schedule.batch_trajectories = 12",
        ),
        (
            ["parallel.dp=4", "schedule.batch_trajectories=2"],
            "schedule.batch_trajectories = 2 is less than parallel.dp = 4",
        ),
        (["schedule.max_in_flight=641"], "is more than (max_staleness + 1) * batch_trajectories = (4 + 1) * 128 = 640"),
        (
            ["algo.arm=grpo", "schedule.max_in_flight=7"],
            "schedule.max_in_flight = 7 is less than sampling.rollouts_per_prompt = 8",
        ),
        (["engine.port=65535", "engine.count=2"], "ends at port 65536"),
        (["engine.port=65536"], "engine.port = 65536 must be less than or equal to 65535"),
        (
            ["engine.port=8000", "engine.count=3", "schedule.port=8002"],
            "schedule.port = 8002 is one of the engines' ports 8000 to 8002",
        ),
        (["value.groups.head.trained=false"], "the head starts at zero"),
        (
            ["value.groups.norms.lr_multiplier=2"],
            "value.groups.norms.lr_multiplier = 2.0 has no effect: the group is frozen",
        ),
        (
            ["checkpoint.keep_every=50"],
            "checkpoint.keep_every = 50 does not fit checkpoint.every_steps = 20: of what is saved then, it would keep"
            " only multiples of 100; use 40 or 60, or change every_steps",
        ),
        (["checkpoint.keep_every=15"], "only multiples of 60; use 20, or"),
        (["checkpoint.keep_best=2"], "but run.eval_every = 0 evaluates none while training"),
        (["value.hl_gauss_min=1.5"], "value.hl_gauss_min = 1.5 is not below value.hl_gauss_max = 1.5"),
        (["value.loss=hl_gauss", "value.value_clip=0.2"], "value.value_clip = 0.2 has no effect"),
        (["value.warmup_steps=0", "value.warmup_until_explained_variance=0.5"], "needs value.warmup_steps > 0"),
        (
            ["value.pretrain_trajectories=64"],
            "less 6 held out leaves 58, fewer than value.pretrain_batch_trajectories = 64",
        ),
    ],
)
def test_sections_that_do_not_fit_each_other_are_refused(overrides, expected):
    assert expected in fault(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["engine.port=65534", "engine.count=2"],
        ["engine.port=8000", "engine.count=3", "schedule.port=8003"],
        ["schedule.max_in_flight=640"],
        ["sampling.max_trajectory_tokens=256"],
        ["schedule.max_staleness=0", "run.steps=0", "value.warmup_steps=0"],
        ["checkpoint.keep_every=60"],
        ["checkpoint.keep_every=1"],  # all that are saved
        ["checkpoint.keep_every=50", "checkpoint.every_steps=0"],
    ],
)
def test_the_last_value_that_fits_is_accepted(overrides):
    load_config(None, overrides)


def test_one_faulty_section_does_not_hide_faults_between_the_others():
    assert {line.split()[0] for line in fault("run.seed=-1", "parallel.ep=3").splitlines()[1:]} >= {
        "run.seed",
        "parallel.ep",
    }


def test_an_arm_that_needs_whole_groups_is_refused_before_it_trains_on_half_of_one():
    with pytest.raises(ConfigError, match="algo.arm = 'grpo'.*whole groups"):
        check_is_built(load_config(None, ["algo.arm=grpo", "sampling.rollouts_per_prompt=4"]))
    check_is_built(load_config(None, ["algo.arm=sao"]))


def test_fused_sparse_attention_needs_cuda():
    config = load_config(None, ["parallel.sparse_attention_kernel=tilelang"])
    check_device(config, has_cuda=True)
    with pytest.raises(ConfigError, match='sparse_attention_kernel = "tilelang" needs CUDA'):
        check_device(config, has_cuda=False)


def test_nccl_needs_cuda():
    config = load_config(None, ["push.backend=nccl"])
    with pytest.raises(ConfigError, match="push.backend"):
        check_device(config, has_cuda=False)
    check_device(config, has_cuda=True)


def test_fp8_on_arrival_needs_cuda():
    config = load_config(None, ["engine.quantization=fp8_per_block"])
    with pytest.raises(ConfigError, match='engine.quantization = "fp8_per_block" needs CUDA in the engines'):
        check_device(config, has_cuda=False)
    check_device(config, has_cuda=True)


def test_learner_and_sampler_use_the_same_number_format():
    with pytest.raises(ConfigError, match="engine.dtype.*model.dtype"):
        load_config(None, ["engine.dtype=bfloat16"])
    assert load_config(None, ["engine.dtype=bfloat16", "model.dtype=bfloat16"]).model.dtype == "bfloat16"


# ---- placement -------------------------------------------------------------------------------------------------


def placed(trainer: tuple[int, int], rollout: tuple[int, int], *more: str, engines: int = 4) -> list[str]:
    """Overrides for 16 trainer ranks and engines of 2 workers on so many nodes of so many GPUs; 0 = left out."""
    names = ("trainer_nodes", "trainer_gpus_per_node", "rollout_nodes", "rollout_gpus_per_node")
    sizes = zip(names, (*trainer, *rollout), strict=True)
    layout = ["parallel.dp=16", f"engine.count={engines}", "engine.tensor_parallel=2"]
    return [*layout, *(f"placement.{name}={size}" for name, size in sizes if size), *more]


COLOCATED, OWN_RANKS = "placement.mode=colocated", "placement.value_model=own_ranks"
NOT_SAID = (0, 0)


@pytest.mark.parametrize(
    "overrides",
    [
        placed(NOT_SAID, NOT_SAID),
        placed((2, 8), (1, 8)),
        placed((16, 1), (4, 2)),
        placed((4, 8), (1, 8), OWN_RANKS),
        placed((2, 8), NOT_SAID, COLOCATED, engines=8),
        placed(NOT_SAID, NOT_SAID, COLOCATED, engines=8),
    ],
)
def test_a_placement_that_fits_is_accepted(overrides):
    load_config(None, overrides)


@pytest.mark.parametrize(
    "overrides, expected",
    [
        (
            placed((2, 8), (1, 0)),
            "placement.trainer_nodes = 2 is given, but placement.rollout_gpus_per_node is not; give all of them or",
        ),
        (placed((0, 8), NOT_SAID, COLOCATED, engines=8), "placement.trainer_nodes is not"),
        (
            placed((3, 8), (1, 8)),
            "trainer_nodes * trainer_gpus_per_node = 3 * 8 = 24, but the trainer has parallel.tp * pp * cp * dp = 16",
        ),
        (
            placed((2, 8), (1, 8), OWN_RANKS),
            "= 2 * 8 = 16, but the trainer has 2 * parallel.tp * pp * cp * dp = 16 (policy, then value model on as many)",
        ),
        (
            placed((2, 8), (2, 8)),
            "engine.count * tensor_parallel = 4 * 2 = 8, but placement.rollout_nodes * rollout_gpus_per_node = 2 * 8 =",
        ),
        (
            placed(NOT_SAID, NOT_SAID, COLOCATED),
            "= 4 * 2 = 8, but there are as many GPUs as the trainer has ranks, parallel.tp * pp * cp * dp = 16",
        ),
        (
            placed((2, 8), (8, 1)),
            "engine.tensor_parallel = 2 does not divide placement.rollout_gpus_per_node = 1: an engine must not lie on",
        ),
        (
            placed((16, 1), NOT_SAID, COLOCATED, engines=8),
            "engine.tensor_parallel = 2 does not divide placement.trainer_gpus_per_node = 1",
        ),
        (
            placed((2, 8), (1, 8), "engine.pipeline_parallel=2"),
            "engine.count * tensor_parallel * pipeline_parallel = 4 * 2 * 2 = 16, but placement",
        ),
        (["engine.data_parallel=2"], "engine.data_parallel = 2 needs engine.expert_parallel = true"),
        (placed((2, 8), (1, 8), COLOCATED, engines=8), "placement.rollout_nodes = 1 has no effect with"),
        (placed((2, 8), NOT_SAID, COLOCATED, OWN_RANKS, engines=8), "choose one of them"),
        (
            placed((2, 8), NOT_SAID, COLOCATED, "placement.rollout_gpu_gib=141.0", engines=8),
            "placement.rollout_gpu_gib = 141 is not placement.trainer_gpu_gib = 80",
        ),
        (
            placed((4, 8), (1, 8), OWN_RANKS, "parallel.offload_sleeping_model=true"),
            "parallel.offload_sleeping_model = true has no effect with placement.value_model",
        ),
        (["placement.mode=shared"], "placement.mode = 'shared' must be 'separate' or 'colocated'"),
        (["placement.rollout_gpu_gib=0"], "placement.rollout_gpu_gib = 0 must be greater than 0"),
    ],
)
def test_a_placement_that_does_not_fit_is_refused_with_its_numbers(overrides, expected):
    assert expected in fault(*overrides)


def test_a_trainer_node_must_have_the_ranks_that_its_placement_says():
    config = load_config(None, placed((2, 8), (1, 8)))
    check_nodes(config, 8)
    with pytest.raises(ConfigError, match="trainer_gpus_per_node = 8, but this node was started with 4 trainer ranks"):
        check_nodes(config, 4)
    check_nodes(load_config(None), 3)  # not said


def test_what_starts_everything_here_refuses_a_placement_on_several_nodes():
    with pytest.raises(ConfigError, match="placement.trainer_nodes = 2 and placement.rollout_nodes = 1"):
        check_one_machine(load_config(None, placed((2, 8), (1, 8))))
    check_one_machine(load_config(None, placed(NOT_SAID, NOT_SAID)))
    check_one_machine(load_config(None, placed((1, 16), NOT_SAID, COLOCATED, engines=8)))


@pytest.mark.parametrize(
    "more, engines, expected",
    [((COLOCATED,), 8, "nothing puts the engines to sleep"), ((OWN_RANKS,), 4, "holds both models on the same ranks")],
)
def test_a_placement_that_is_only_planned_is_refused_at_the_start(more, engines, expected):
    with pytest.raises(ConfigError, match=f"can be planned .* but not run yet: .*{expected}"):
        check_is_built(load_config(None, placed(NOT_SAID, NOT_SAID, *more, engines=engines)))


def test_engines_on_the_trainers_gpus_need_cuda():
    config = load_config(None, placed(NOT_SAID, NOT_SAID, COLOCATED, engines=8))
    with pytest.raises(ConfigError, match='placement.mode = "colocated" needs CUDA'):
        check_device(config, has_cuda=False)
    check_device(config, has_cuda=True)
