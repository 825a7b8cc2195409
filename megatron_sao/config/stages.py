"""Which layers each pipeline stage holds: the one place that knows how a model is cut along the pipeline.

Without further settings all stages hold equally many layers; `first_stage_layers` and `last_stage_layers` give the
ends their own number and the stages between share the rest evenly. With vpp > 1 a stage holds vpp chunks of equal
size: the model runs through chunk 0 of all stages, then through chunk 1 of all stages, and so on.
"""

from collections.abc import Sequence

from megatron_sao.config.parallel import Parallel

_LARGEST_ADVICE = 1024  # larger splits are not suggested


def layers_per_stage(num_layers: int, parallel: Parallel) -> list[int]:
    """How many layers each stage holds. Asks for a split without `stage_faults`."""
    p = parallel
    if p.pp == 1:
        return [num_layers]
    first, last = p.first_stage_layers, p.last_stage_layers
    between = p.pp - (first > 0) - (last > 0)
    even = (num_layers - first - last) // between if between else 0
    return [first or even] + [even] * (p.pp - 2) + [last or even]


def stage_chunks(num_layers: int, parallel: Parallel) -> list[list[range]]:
    """chunks[stage][chunk] = the layers (from 0) of that chunk. Asks for a split without `stage_faults`."""
    sizes = [layers // parallel.vpp for layers in layers_per_stage(num_layers, parallel)]
    chunks: list[list[range]] = [[] for _ in sizes]
    start = 0
    for _ in range(parallel.vpp):
        for stage, size in enumerate(sizes):
            chunks[stage].append(range(start, start + size))
            start += size
    return chunks


def stage_faults(num_layers: int, parallel: Parallel, called: str) -> list[str]:
    """Why the layers cannot be cut so; [] if they can. `called` names the number of layers in messages."""
    p = parallel
    first, last = p.first_stage_layers, p.last_stage_layers
    ends = " + ".join(f"parallel.{name}_stage_layers = {n}" for name, n in (("first", first), ("last", last)) if n)
    if p.pp == 1:
        faults = [f"{ends} with parallel.pp = 1: one stage holds all layers; leave it out or raise pp"] if ends else []
        if p.vpp > 1:
            faults.append(f"parallel.vpp = {p.vpp} with parallel.pp = 1: there is nothing to interleave; use vpp = 1")
        return faults
    between, rest = p.pp - (first > 0) - (last > 0), num_layers - first - last
    if not ends and num_layers % p.pp:
        return [
            does_not_divide("parallel.pp", p.pp, called, num_layers)
            + ", or give the ends their own number by parallel.first_stage_layers and last_stage_layers"
        ]
    if between == 0 and rest:
        return [f"{ends} make {first + last} layers on 2 stages, but {called} = {num_layers}; make them add up"]
    if between and (rest < between or rest % between):
        return [
            f"{ends} leave {rest} of {called} = {num_layers} for the other {between} of parallel.pp = {p.pp} stages,"
            f" which must share them evenly; {_split_advice(num_layers, p)}"
        ]
    uneven = [layers for layers in layers_per_stage(num_layers, p) if layers % p.vpp]
    if uneven:
        return [f"parallel.vpp = {p.vpp} does not divide the {uneven[0]} layers of a stage; use a divisor of it"]
    return []


def stage_start_faults(num_layers: int, parallel: Parallel, may_start: Sequence[bool], why: str) -> list[str]:
    """Chunks that begin on a layer where none may begin.

    Args:
        may_start: per layer, whether a chunk may begin there. why: the rule, for messages.
    """
    chunks = stage_chunks(num_layers, parallel)
    starts = {layers[0]: (stage, n) for stage, held in enumerate(chunks) for n, layers in enumerate(held)}
    allowed = ", ".join(str(layer) for layer in range(num_layers) if may_start[layer])
    return [
        f"pipeline stage {stage}{f', chunk {chunk},' if parallel.vpp > 1 else ''} starts on layer {layer}, but {why};"
        f" layers (from 0) where a stage may start: {allowed}; change parallel.pp, vpp, first_stage_layers or"
        " last_stage_layers"
        for layer, (stage, chunk) in sorted(starts.items())
        if layer and not may_start[layer]
    ]


def does_not_divide(axis: str, size: int, field: str, number: int) -> str:
    """The fault of an uneven split, with the splits that would be even."""
    divisors = [str(n) for n in range(1, min(number, _LARGEST_ADVICE) + 1) if number % n == 0]
    advice = " or ".join(filter(None, (", ".join(divisors[:-1]), divisors[-1])))
    return f"{axis} = {size} does not divide {field} = {number}; use {advice}"


def _split_advice(num_layers: int, parallel: Parallel) -> str:
    """The last-stage sizes that would fit the first-stage size as it stands."""
    if parallel.pp == 2:
        return f"let the ends hold {num_layers} in all"
    first = parallel.first_stage_layers
    middle = parallel.pp - 1 - (first > 0)
    fitting = [n for n in range(1, num_layers - first) if not (num_layers - first - n) % middle]
    return f"with this first stage, parallel.last_stage_layers may be {', '.join(map(str, fitting)) or 'nothing'}"
