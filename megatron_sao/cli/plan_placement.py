"""Prints on which nodes the ranks and engines of a run lie, and whether engines fit on their GPUs (`cli/plan.py`)."""

from megatron_sao.cli.tables import GIB, Report, gib
from megatron_sao.config import Config
from megatron_sao.config.nodes import nodes_of_one_group, places_on
from megatron_sao.rollout.engine_memory import WorkerMemory

MAX_ROWS = 8  # of nodes; then the first ones and the last one
CROSSING = {"tp": "every layer's matrices wait for the network", "ep": "tokens travel to experts over the network"}


def print_placement(report: Report, config: Config) -> None:
    """Which GPUs of which node hold which ranks and engines."""
    p, parallel, engine = config.placement, config.parallel, config.engine
    if not p.is_said:
        report.say("[placement] says nothing of nodes: everything on one machine, no axis is checked against them")
        return
    per_node = p.trainer_gpus_per_node
    num_nodes = -(-parallel.world_size // per_node)
    shown = list(range(num_nodes)) if num_nodes <= MAX_ROWS else [*range(MAX_ROWS - 2), num_nodes - 1]
    axes = ["pp", "dp", "cp", "tp", "ep"] + ["etp"] * (parallel.etp > 1) + ["expert copy"] * (parallel.expert_dp > 1)
    rows = []
    for node in shown:
        ranks = range(node * per_node, min((node + 1) * per_node, parallel.world_size))
        places = places_on(parallel, ranks)
        rows.append([f"{node}", _span(ranks), *(_span(places[axis]) for axis in axes)])
        if len(shown) < num_nodes and node == shown[-2]:
            rows.append(["..."] * (2 + len(axes)))
    report.table(f"Places of the {per_node} GPUs of each trainer node", ["node", "ranks", *axes], rows)
    if p.value_model == "own_ranks":
        report.say(f"the same again on nodes {num_nodes} to {2 * num_nodes - 1} for the value model")
    crossed = {axis: count for axis, count in nodes_of_one_group(parallel, per_node).items() if count > 1}
    within = [axis for axis in axes if axis not in crossed and getattr(parallel, axis, 1) > 1]
    over = [f"{axis} ({count})" for axis, count in crossed.items()]
    report.say(
        f"groups within a node: {', '.join(within) or 'none'}; over several (how many): {', '.join(over) or 'none'}"
    )
    for axis, cost in CROSSING.items():
        if axis in crossed:
            report.say(
                f"WARNING: {axis} = {getattr(parallel, axis)} crosses nodes of {per_node} GPUs: {cost}"
                + ("; lower parallel.tp" if axis == "tp" else "")
            )
    where = "the trainer's nodes" if p.mode == "colocated" else f"{p.rollout_nodes} more node(s)"
    engines_on_node = (per_node if p.mode == "colocated" else p.rollout_gpus_per_node) // engine.num_workers
    report.say(
        f"{engine.count} engine(s) of {engine.num_workers} GPU(s) on {where}, {engines_on_node} on each, in order"
    )


def say_engines(report: Report, config: Config, memory: WorkerMemory, reserve_gib: float) -> bool:
    """Whether a worker fits on its GPU, and its cache a sequence. -> it does."""
    engine, gpu_gib = config.engine, config.placement.rollout_gpu_gib
    form = engine.dtype if engine.quantization == "none" else f"{engine.quantization}, quantised as they arrive"
    report.say(
        f"a worker of an engine: {gib(memory.weights)} GiB of weights ({form}), {gib(memory.cache)} of key/value cache,"
        f" {gib(memory.buckets)} for two buckets of a push,"
        f" {gib(memory.module)} for the largest module that is put together"
    )
    longest = config.sampling.max_trajectory_tokens
    report.say(
        f"its cache holds {memory.cache_tokens:,} tokens of {memory.token_bytes / 1024:,.1f} KiB:"
        f" {memory.cache_tokens / longest:,.1f} trajectories of {longest:,} at a time; engine.max_num_seqs ="
        f" {engine.max_num_seqs} of {memory.cache_tokens // engine.max_num_seqs:,} tokens each"
    )
    if memory.cache_tokens < engine.max_model_len:
        report.say(
            f"ENGINES DO NOT START: vLLM asks for a cache of engine.max_model_len = {engine.max_model_len:,} tokens,"
            f" {gib(engine.max_model_len * memory.token_bytes)} GiB; raise engine.kv_cache_bytes"
        )
        return False
    fits = memory.total <= (gpu_gib - reserve_gib) * GIB
    report.say(
        f"ENGINES {'FIT' if fits else 'DO NOT FIT'}: a worker needs {memory.total / GIB:,.1f} GiB of"
        f" {gpu_gib - reserve_gib:g} ({gpu_gib:g} less a reserve of {reserve_gib:g})"
        + ("" if fits else "; more engine.tensor_parallel, less engine.kv_cache_bytes, or engine.quantization")
    )
    return fits


def say_colocated(
    report: Report, memory: WorkerMemory, trainer_bytes: int, policy_weights: int, host_bytes: int, there_gib: float
) -> bool:
    """Whether trainer and engines fit on the same GPUs in turns. -> they do.

    Args: of one GPU: what the trainer needs at work, its policy's weights, what it keeps in host memory when asleep.
    """
    phases = {
        "the trainer at work": trainer_bytes,
        "engines at work": memory.total,
        "a push (cache free)": policy_weights + memory.weights + 2 * memory.buckets + memory.module,
    }
    fits = max(phases.values()) <= there_gib * GIB
    report.say(
        f"COLOCATED {'FITS' if fits else 'DOES NOT FIT'}: "
        + ", ".join(f"{name} {size / GIB:,.1f}" for name, size in phases.items())
        + f" GiB of {there_gib:g}; whoever sleeps keeps {gib(host_bytes + memory.weights)} GiB a GPU in host memory"
        " (trainer and engine together)"
    )
    return fits


def _span(numbers: range | list[int]) -> str:
    """ "0-7", "3" or "0, 4": some places of an axis."""
    first, last = numbers[0], numbers[-1]
    if len(numbers) == 1:
        return f"{first}"
    return f"{first}-{last}" if last - first == len(numbers) - 1 else ", ".join(map(str, numbers))
