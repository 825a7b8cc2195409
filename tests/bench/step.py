"""What a policy and a value update of the trainer cost over the bare Megatron-Core schedule, on the same batch.

    python -m tests.bench.step [--hidden 256] [--vocab 8192] [--repeats 9]

Bare is: zero the gradients, Megatron's forward-backward function over the same packed micro-batches with its own
vocabulary-parallel cross-entropy (or a plain squared error), its gradient reduction and its optimizer step; no metrics.
Both run in one process on one model, in turn, so that other work on the machine hits both; a ratio is the median over
the repeats of (trainer / bare). `_cpu_ratio` is the same of CPU seconds, which other work disturbs less.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.utils import get_model_config
from megatron_sao.config import load_config
from megatron_sao.data.batch import pack
from megatron_sao.data.share import MicroBatch, Share, share_of
from megatron_sao.models.build import build_model
from megatron_sao.models.groups import freeze
from megatron_sao.models.optimizer import TrainedModel, make_trained_model
from megatron_sao.parallel.init import stop_world
from megatron_sao.parallel.schedule import packed_sequence
from megatron_sao.train.policy_step import policy_update
from megatron_sao.train.value_step import value_update
from megatron_sao.train.values import ValueReadout
from tests.support.alone import start_alone
from tests.support.trajectories import random_trajectories

MICRO_BATCH_TOKENS = 1024
NUM_TRAJECTORIES = 16
LONGEST = 256  # tokens of a trajectory


def hf_config(hidden: int, vocab: int) -> dict:
    """A Qwen3-MoE of 4 layers whose widths stand to each other about as those of the 30B model."""
    return dict(
        model_type="qwen3_moe",
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=4,
        num_attention_heads=hidden // 32,
        num_key_value_heads=max(1, hidden // 128),
        head_dim=32,
        intermediate_size=3 * hidden,
        moe_intermediate_size=hidden // 2,
        num_experts=8,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        hidden_act="silu",
        attention_bias=False,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=False,
    )


def bare_update(model: TrainedModel, share: Share, loss_of: Callable[[torch.Tensor, MicroBatch], torch.Tensor]) -> None:
    """Forward, backward and optimizer step as a Megatron-Core example would do it."""
    config = get_model_config(model.wrapped[0])
    config.finalize_model_grads_func = lambda chunks, num_tokens=None, **options: finalize_model_grads(
        chunks, None, **options
    )
    config.no_sync_func = model.wrapped[0].no_sync

    def loss(micro_batch: MicroBatch, output: torch.Tensor):
        return loss_of(output, micro_batch), torch.zeros((), dtype=torch.int), {}

    def forward_step(iterator, chunk):
        micro_batch = next(iterator)
        token_ids = micro_batch.token_ids[None]
        output = chunk(token_ids, None, None, packed_seq_params=packed_sequence(micro_batch, token_ids.device))
        return output, partial(loss, micro_batch)

    model.wrapped[0].zero_grad_buffer()
    model.optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(share.micro_batches),
        model=model.wrapped[0],
        num_microbatches=len(share.micro_batches),
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )
    model.optimizer.step()


def cross_entropy(count: int, logits: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
    batch = micro_batch.batch
    next_ids, mask = (micro_batch.at_positions(x) for x in (batch.token_ids, batch.action_mask))
    return (vocab_parallel_cross_entropy(logits, next_ids[None])[0] * mask).sum() / count


def squared_error(count: int, target: torch.Tensor, value: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
    about_token = target[micro_batch.token_index], micro_batch.batch.action_mask
    wanted, mask = (micro_batch.at_positions(x) for x in about_token)
    return ((value[0, :, 0] - wanted).square() * mask).sum() / count


def compare(name: str, trainer: Callable[[], object], bare: Callable[[], object], repeats: int) -> str:
    """Run both in turn, print their median times, -> "name_ratio=... name_cpu_ratio=...".

    The order changes with every repeat.
    """
    trainer(), bare()  # first touch of memory and of optimizer states
    times: dict[Callable, list[tuple[float, float]]] = {trainer: [], bare: []}
    for number in range(repeats):
        for function in (trainer, bare) if number % 2 else (bare, trainer):
            started = time.perf_counter(), time.process_time()
            function()
            times[function].append((time.perf_counter() - started[0], time.process_time() - started[1]))
    found = []
    for column, (clock, key) in enumerate((("wall", "ratio"), ("CPU", "cpu_ratio"))):
        pairs = [(a[column], b[column]) for a, b in zip(times[trainer], times[bare], strict=True)]
        ours, theirs = (1e3 * statistics.median(side) for side in zip(*pairs, strict=True))
        print(f"{name:6} update {ours:8.1f} ms   bare {theirs:8.1f} ms   ({clock})")
        found.append(f"{name}_{key}={statistics.median(a / b for a, b in pairs):.3f}")
    return " ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config = load_config(None, [f"parallel.micro_batch_tokens={MICRO_BATCH_TOKENS}"])
    start_alone(config)

    shape = hf_config(options.hidden, options.vocab)
    policy = make_trained_model(build_model("policy", shape, config.parallel, torch.float32), config.policy)
    chunks = build_model("value", shape, config.parallel, torch.float32)
    value = make_trained_model(chunks, config.value, freeze(chunks, config.value.groups))
    made = random_trajectories(NUM_TRAJECTORIES, vocab=options.vocab, longest=LONGEST)
    share = share_of(pack(made, 0, lambda domain: (0.8, 3.0)), 0, 1, MICRO_BATCH_TOKENS, multiple=1)
    count, num_tokens = share.num_step_action_tokens, share.batch.num_tokens
    target, value_before, advantage = torch.rand(num_tokens), torch.zeros(num_tokens), torch.randn(num_tokens)
    readout = ValueReadout(config.value)

    policy_found = compare(
        "policy",
        lambda: policy_update(policy, share, advantage, config, options.vocab),
        lambda: bare_update(policy, share, partial(cross_entropy, count)),
        options.repeats,
    )
    value_found = compare(
        "value",
        lambda: value_update(value, share, target, value_before, readout),
        lambda: bare_update(value, share, partial(squared_error, count, target)),
        options.repeats,
    )
    print(
        f"BENCH step {policy_found} {value_found} tokens={num_tokens} "
        f"micro_batches={len(share.micro_batches)} hidden={options.hidden} vocab={options.vocab} "
        f"repeats={options.repeats} threads={options.threads}"
    )
    stop_world()


if __name__ == "__main__":
    main()
