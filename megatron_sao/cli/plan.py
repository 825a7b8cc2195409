"""A run of hundreds of GPUs on a laptop, without a GPU and without network:

    python -m megatron_sao.cli.plan --config configs/glm5.2_744b_a40b.toml [--push]

Builds policy and value model of every distinct rank on the meta device, in a fake world of the real size, and prints
what each holds, keeps and sends, and whether it fits (exit code 0; `EXIT_DOES_NOT_FIT` if not). With --push: what a
weight push moves between all ranks and workers, and how long it takes. Of the model folder only config.json is read.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from megatron_sao.cli.options import DRY_RUN, Options, hush_libraries, parse_options, run_command
from megatron_sao.cli.plan_placement import print_placement, say_colocated, say_engines
from megatron_sao.cli.plan_push import print_push
from megatron_sao.cli.tables import GIB, MIB, Report, gib
from megatron_sao.config import (
    Config,
    check_is_built,
    check_model_fits,
    checkpoint_bytes,
    describe,
    load_config,
    num_kept_checkpoints,
)
from megatron_sao.convert.family import check_stage_starts, read_shape
from megatron_sao.errors import ConfigError
from megatron_sao.rollout.engine_memory import WorkerMemory, worker_memory
from megatron_sao.transport.forecast import Link

RESERVE_GIB = 6.0
EXIT_DOES_NOT_FIT = 10  # beyond the codes of errors.py
GPUS_PER_NODE = 8
LINK_GBPS, MESSAGE_US = 400.0, 20.0
LOAD_US = 160.0  # vLLM 0.32's loader with 256 experts, measured on one core (README.md)

_ABOUT = "The memory, traffic and balance of a run, without running it."
_VALUES = {
    "config": "the configuration file (it may also stand alone, without --config)",
    "gpu-gib": "memory of one trainer GPU in GiB (default placement.trainer_gpu_gib)",
    "reserve-gib": "of a GPU for the CUDA context, NCCL, fragments of the allocator and experts that get more than"
    f" their share of tokens (default {RESERVE_GIB:g})",
    "mean-tokens": "assumed length of a trajectory (default sampling.max_trajectory_tokens)",
    "link-gbps": f"of --push: network of each GPU in Gb/s, each way (default {LINK_GBPS:g})",
    "message-us": f"of --push: what a message costs besides its bytes, in microseconds (default {MESSAGE_US:g})",
    "load-us": f"of --push: what a worker needs to load a piece, in microseconds (default {LOAD_US:g})",
}
_SWITCHES = DRY_RUN | {"push": "predict a weight push from the trainer to the engines instead"}


def main(argv: Sequence[str]) -> int:
    options = parse_options(argv, about=_ABOUT, values=_VALUES, switches=_SWITCHES)
    config = _config(options)
    if "dry-run" in options.switches:
        print(describe(config))
        return 0
    gpu_gib = _number(options, "gpu-gib", config.placement.trainer_gpu_gib)
    reserve_gib = _number(options, "reserve-gib", RESERVE_GIB)
    if reserve_gib >= gpu_gib:
        raise ConfigError(f"--reserve-gib {reserve_gib:g} leaves nothing of --gpu-gib {gpu_gib:g}; lower the first")
    mean_tokens = round(_number(options, "mean-tokens", config.sampling.max_trajectory_tokens))
    if not 1 <= mean_tokens <= config.sampling.max_trajectory_tokens:
        raise ConfigError(
            f"--mean-tokens {mean_tokens} is not between 1 and sampling.max_trajectory_tokens ="
            f" {config.sampling.max_trajectory_tokens}"
        )
    hf_config = _hf_config(config)
    check_model_fits(config, hf_config)
    check_stage_starts(read_shape(hf_config), config.parallel)

    hush_libraries()
    from megatron_sao.observe.progress import Progress
    from megatron_sao.train.plan import make_plan
    from megatron_sao.train.push_plan import plan_push

    report = Report()
    if "push" in options.switches:
        gbps, message_us = _number(options, "link-gbps", LINK_GBPS), _number(options, "message-us", MESSAGE_US)
        piece_s = _number(options, "load-us", LOAD_US) / 1e6
        with Progress(report.console) as progress:
            push = plan_push(config, hf_config, lambda done, total: progress.update("ranks", done, total))
        print_push(report, config, push, Link(gbps * 1e9 / 8, message_us / 1e6), piece_s)
        return 0
    with Progress(report.console) as progress:
        plan = make_plan(config, hf_config, mean_tokens, lambda done, total: progress.update("stages", done, total))
    return _PlanReport(report, config, plan, worker_memory(config, hf_config), gpu_gib, reserve_gib).print()


def _config(options: Options) -> Config:
    path = options.values.get("config") or options.config_path
    if path is None:
        raise ConfigError("--config is missing: name the configuration file of the run")
    if options.config_path not in (None, path):
        raise ConfigError(f"--config {path} and {options.config_path}: only one configuration file can be given")
    return load_config(path, options.overrides)


def _number(options: Options, name: str, default: float) -> float:
    said = options.values.get(name, default)
    try:
        number = float(said)
    except ValueError:
        number = -1.0
    if not 0 < number < float("inf"):
        raise ConfigError(f"--{name} {said} is no positive number; leave it out for {default:g}")
    return number


def _hf_config(config: Config) -> dict:
    if not config.model.path:
        raise ConfigError("model.path is empty: the plan reads the config.json of a model folder; name one")
    path = Path(config.model.path) / "config.json"
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; set model.path to a folder with the model's config.json (relative"
            " paths count from the current folder)"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from None


_MEMORY_WORDS = """\
gradients: fp32. optimizer: exp_avg, exp_avg_sq and, for bfloat16 weights, an fp32 master; the largest part of a
data-parallel rank. kept: activations of the micro-batches in flight. working: the larger of one layer computed again
(recompute full) and the head with its logits. backward: gradients of activations held at the same time. awake: all."""

_FORMULA_WORDS = """\
b bytes of a number, S tokens of the rank, s = S / tp, H hidden, n, g heads and KV groups / tp, d their width,
r = s top-k etp routed tokens (balanced), f, F inner widths / etp, / tp, E experts, V vocabulary / tp.
recompute selective: without the insides of core attention; full: b s H a layer, and one whole layer at a time.
These are transformer-engine's modules with fused kernels, as read from their source. What differs on a CPU, where the
same list is checked against the real process, stands in models/plan_activations.py."""


class _PlanReport:
    """Prints a plan."""

    def __init__(
        self, report: Report, config: Config, plan, worker: WorkerMemory, gpu_gib: float, reserve_gib: float
    ):
        self._config, self._plan, self._worker = config, plan, worker
        self._gpu_gib, self._reserve_gib = gpu_gib, reserve_gib
        self._report, self._say, self._table = report, report.say, report.table
        # With ranks of its own for the value model, each model is alone as under offload, without host memory.
        self._has_own_ranks = config.placement.value_model == "own_ranks"
        self._is_alone = config.parallel.offload_sleeping_model or self._has_own_ranks

    def print(self) -> int:
        """-> exit code: 0 if the run fits."""
        self._say_layout()
        self._print_parameters()
        self._print_memory()
        self._print_formula()
        self._print_totals()
        self._say_checkpoint()
        self._say_balance()
        self._print_traffic()
        print_placement(self._report, self._config)
        fits = self._say_verdict()
        fits &= say_engines(self._report, self._config, self._worker, self._reserve_gib)
        if self._config.placement.mode == "colocated":
            fits &= self._say_colocated()
        try:
            check_is_built(self._config)
        except ConfigError as error:
            self._say(f"ONLY PLANNED: {error}")
        return 0 if fits else EXIT_DOES_NOT_FIT

    def _say_layout(self) -> None:
        p = self._config.parallel
        dense, expert = self._plan.copies
        self._say(
            f"{self._plan.shape.family}, {p.world_size} GPUs for the"
            f" {'policy and as many for the value model' if self._has_own_ranks else 'trainer'}: tp {p.tp} x pp"
            f" {p.pp} x cp {p.cp} x dp {p.dp}, vpp {p.vpp}; experts ep {p.ep} x etp {p.etp} x {expert}"
            f" copies; recompute {p.recompute}; micro-batch {p.micro_batch_tokens:,} tokens,"
            f" {-(-p.micro_batch_tokens // p.cp):,} a rank"
        )
        self._say(f"optimizer state cut over {dense} ranks (dense parameters) and {expert} ranks (experts)")

    def _print_parameters(self) -> None:
        plan = self._plan
        rows = [
            [
                f"{s.stage}",
                f"{s.rank}",
                _layers(s.chunks),
                *(
                    f"{count / 1e6:,.1f} M"
                    for state in (s.models["policy"].state, s.models["value"].state)
                    for count in (state.num_parameters, state.num_trained)
                ),
            ]
            for s in plan.stages
        ]
        columns = ["stage", "first rank", "layers", "policy", "of it trained", "value", "of it trained"]
        self._table("Parameters of one rank", columns, rows)
        policy, value, expected = plan.elements["policy"], plan.elements["value"], plan.expected_elements
        self._say(
            f"over the world, copies counted once: policy {policy:,}; config.json implies {expected:,}"
            f" ({(policy - expected) / expected:+.3%}); value {value:,}, of them frozen {plan.frozen_elements:,}"
            f" ({plan.frozen_elements / value:.1%})"
        )

    def _print_memory(self) -> None:
        for role in ("policy", "value"):
            rows = []
            for s in self._plan.stages:
                m = s.models[role]
                a = m.activations
                parts = [m.state.weights, m.state.gradients, m.state.optimizer]
                parts += [a.kept + a.choices, max(a.working, a.head), a.gradients, m.awake]
                rows.append([f"{s.stage}", *(gib(part) for part in parts), f"{a.in_flight:g}"])
            columns = ["stage", "weights", "gradients", "optimizer"]
            columns += ["kept", "working", "backward", "awake", "in flight"]
            self._table(f"{role.capitalize()} on one rank, GiB", columns, rows)
        self._say(_MEMORY_WORDS)
        saved = [
            f"stage {s.stage} {gib(s.models['policy'].awake - s.models['value'].awake)}" for s in self._plan.stages
        ]
        self._say(f"what freezing and the smaller head save the value model, GiB a rank: {', '.join(saved)}")

    def _print_formula(self) -> None:
        value = {(k.part, k.what): k.gpu for k in self._plan.kept["value"]}
        rows = [
            [k.part, k.what, k.formula, _mib(k.gpu), _mib(value.get((k.part, k.what), 0))]
            for k in self._plan.kept["policy"]
        ]
        totals = [sum(k.gpu for k in kept) / MIB for kept in self._plan.kept.values()]
        rows.append(["all", "", "", *(f"{total:,.1f}" for total in totals)])
        title = "What the last layer keeps of one micro-batch without recompute, MiB a rank"
        self._table(title, ["part", "tensor", "bytes", "policy", "value"], rows)
        self._say(_FORMULA_WORDS)

    def _print_totals(self) -> None:
        rows = []
        for s in self._plan.stages:
            policy, value = s.models["policy"].awake, s.models["value"].awake
            together = [s.device_bytes(offloads) for offloads in (False, True)]
            rows.append([f"{s.stage}", *(gib(n) for n in (policy, value, *together, s.host_bytes))])
        columns = ["stage", "policy alone", "value alone", "both resident", "one offloaded", "then in host memory"]
        if self._has_own_ranks:
            self._table("Each model on its own ranks, GiB", columns[:3], [row[:3] for row in rows])
            return
        self._table("Policy and value model on the same ranks, GiB", columns, rows)
        gpus = self._config.placement.trainer_gpus_per_node or GPUS_PER_NODE
        host = max(s.host_bytes for s in self._plan.stages) * gpus
        self._say(f"offload needs up to {gib(host)} GiB of host memory on a node of {gpus} GPUs")

    def _say_checkpoint(self) -> None:
        one = checkpoint_bytes(self._config, self._plan.elements["policy"])
        count = num_kept_checkpoints(self._config) + 1
        self._say(
            f"a checkpoint takes up to {gib(one)} GiB; run.folder needs room for {count} (keep_last, keep_every,"
            f" keep_best and the one that is being written): {gib(count * one)} GiB"
        )

    def _say_balance(self) -> None:
        from megatron_sao.models.plan_traffic import bubble_fraction

        step, p = self._plan.step, self._config.parallel
        self._say(
            f"a step: {self._config.schedule.batch_trajectories} trajectories of {step.mean_tokens:,} tokens (assumed, "
            f"--mean-tokens), {step.trajectories} a data-parallel rank, {step.num_micro_batches} micro-batches"
        )
        here = "1F1B" if p.vpp == 1 else f"interleaved, {p.vpp} chunks"
        other = (2, "interleaved, 2 chunks") if p.vpp == 1 else (1, "1F1B")
        would_be = bubble_fraction(p.pp, other[0], step.num_micro_batches)
        self._say(
            f"pipeline bubble ({here}): {self._plan.bubble:.1%} of a pass ({other[1]}: {would_be:.1%}); stages of"
            f" unequal length cost another {self._plan.imbalance:.1%}"
        )

    def _print_traffic(self) -> None:
        from megatron_sao.models.plan_traffic import COLLECTIVES

        rows = []
        for name, what in COLLECTIVES.items():
            cells = []
            for role in ("policy", "value"):
                most = max(s.models[role].traffic.get(name, 0.0) for s in self._plan.stages)
                cells.append(f"{most / GIB:,.2f}" if most else "-")
            rows.append([name, what, *cells])
        columns = ["collective", "what", "policy", "value"]
        self._table("Received by one rank in a step, GiB (the busiest stage)", columns, rows)
        value = self._plan.passes["value"]
        self._say(
            f"policy: one update; value: {value.forward} passes without and {value.update} updates with backward"
            + ("; recompute full repeats each update's forward pass" if value.recomputes else "")
        )

    def _say_verdict(self) -> bool:
        worst = self._plan.worst(self._is_alone)
        needed, there = worst.device_bytes(self._is_alone) / GIB, self._gpu_gib - self._reserve_gib
        fits = needed <= there
        how = "the sleeping model offloaded" if self._is_alone else "both models resident"
        self._say(
            f"{'FITS' if fits else 'DOES NOT FIT'}: with"
            f" {'each model on ranks of its own' if self._has_own_ranks else how} the worst rank is {worst.rank}"
            f" (stage {worst.stage}): {needed:,.1f} GiB of {there:g} GiB ({self._gpu_gib:g} less a reserve of"
            f" {self._reserve_gib:g})"
        )
        if not self._has_own_ranks:
            other = self._plan.worst(not self._is_alone)
            self._say(
                f"the other way (offload_sleeping_model = {str(not self._is_alone).lower()}): rank {other.rank} (stage"
                f" {other.stage}), {other.device_bytes(not self._is_alone) / GIB:,.1f} GiB"
            )
        if self._plan.unfused_scores:
            kernel = self._config.parallel.sparse_attention_kernel
            held = "name one in" if kernel == "none" else f'"{kernel}" as'
            self._say(
                f"CONDITION: fused sparse attention ({held} parallel.sparse_attention_kernel) that takes this layout;"
                f" without it the scores of one layer take {gib(self._plan.unfused_scores)} GiB"
            )
        return fits

    def _say_colocated(self) -> bool:
        worst = self._plan.worst(self._is_alone)
        return say_colocated(
            self._report,
            self._worker,
            trainer_bytes=worst.device_bytes(self._is_alone),
            policy_weights=max(s.models["policy"].state.weights for s in self._plan.stages),
            host_bytes=max(s.host_bytes for s in self._plan.stages),
            there_gib=self._gpu_gib - self._reserve_gib,
        )


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / MIB:,.1f}" if num_bytes else "-"


def _layers(chunks: list[range]) -> str:
    return ", ".join(f"{chunk[0]}-{chunk[-1]}" for chunk in chunks)


if __name__ == "__main__":
    run_command(main)
