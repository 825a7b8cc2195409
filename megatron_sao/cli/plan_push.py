"""Prints what one weight push of a run would move, and how long it would take (`cli/plan.py --push`)."""

from collections.abc import Sequence

from megatron_sao.cli.tables import GIB, MIB, Report
from megatron_sao.config import Config
from megatron_sao.config.engine import Engine
from megatron_sao.transport.forecast import Link, PushForecast, forecast
from megatron_sao.transport.plan import PushPlan, encode_plan

_WORDS = """\
A rank sends each bucket once, to one worker, which passes it on to the others that load it, in its own engine and in
the other ones, while the next one arrives; engines take turns in it. A worker loads one bucket while the next one
arrives. The path follows the buckets of the plan in their order. Not counted: the pause before, the agreement of all at
both ends, filling a buffer while another one is sent, copies within a GPU, switches that are shared."""


def print_push(report: Report, config: Config, plan: PushPlan, link: Link, piece_s: float) -> None:
    """Print the forecast of one push. Args: piece_s: as in `forecast`."""
    p, e = config.parallel, config.engine
    found = forecast(plan, num_engines=e.count, link=link, piece_s=piece_s)
    network = forecast(plan, num_engines=e.count, link=link)
    say = report.say
    say(
        f"one push: {p.world_size} trainer ranks (tp {p.tp} x pp {p.pp} x cp {p.cp} x dp {p.dp}, ep {p.ep} x etp"
        f" {p.etp}) to {e.count} engines of {_workers(e)}; {link.bytes_per_s * 8 / 1e9:g} Gb/s each way"
        f" for each of them, {link.message_s * 1e6:g} us a message, {piece_s * 1e6:g} us to load a piece"
    )
    num_items = sum(len(bucket.items) for bucket in plan.buckets)
    say(
        f"plan {plan.hash}: {len(plan.expected):,} tensors in {num_items:,} pieces and {len(plan.buckets):,} buckets,"
        f" the largest {plan.max_bucket_bytes / MIB:,.1f} MiB (each rank and worker holds two);"
        f" {sum(found.sent_bytes) / GIB:,.1f} GiB sent; an engine gets the plan itself,"
        f" {len(encode_plan(plan)) / 1e6:,.1f} MB, when it joins"
    )
    _print_table(report, found)
    say(f"senders: most loaded / mean = {found.balance:.3f}")
    say(
        f"critical path: {_s(found.total_s)} seconds, the last byte arrives after"
        f" {_s(found.filling_s + found.transfer_s)}; if loading were free: {_s(network.total_s)}"
    )
    say(
        f"never waiting, the busiest rank would need {_s(found.sending_s)} seconds to send, the busiest worker"
        f" {_s(found.receiving_s)} to receive and {_s(found.loading_s)} to load {max(found.num_loaded):,} pieces"
    )
    say(_WORDS)


def _workers(engine: Engine) -> str:
    sizes = {"tp": engine.tensor_parallel, "pp": engine.pipeline_parallel, "dp": engine.data_parallel}
    how = [f"{axis} {size}" for axis, size in sizes.items() if size > 1 or axis == "tp"]
    experts = ", whole experts on each" if engine.expert_parallel else ""
    return f"{engine.num_workers} workers ({' x '.join(how)}{experts})"


def _print_table(report: Report, found: PushForecast) -> None:
    columns = ["", "least", "mean", "most", "messages, most", "seconds at the link, most"]
    sent = [*_spread(found.sent_bytes), f"{max(found.num_sent):,}", _s(found.sending_s)]
    taken = [*_spread(found.received_bytes), f"{max(found.num_received):,}", _s(found.receiving_s)]
    rows = [["sent by a trainer rank", *sent], ["taken by a worker", *taken]]
    report.table("Bytes of one push, GiB", columns, rows)


def _spread(sizes: Sequence[int]) -> list[str]:
    return [f"{size / GIB:,.3f}" for size in (min(sizes), sum(sizes) / len(sizes), max(sizes))]


def _s(seconds: float) -> str:
    return f"{seconds:.3f}"
