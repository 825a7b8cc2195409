"""Runs micro-batches through a model with Megatron's pipeline schedule; the one place that owns the loss scale.

Loss scale: a loss function returns its share of the step's loss, already divided by what the whole step counts (action
tokens over all micro-batches, data- and context-parallel ranks). So gradients are SUMMED everywhere, never averaged:
- micro-batches: a three-part return with `calculate_per_token_loss` keeps Megatron from dividing by their number;
- data and context parallel: the same flag makes DistributedDataParallel sum instead of average;
- `finalize_model_grads` would then divide by a token count: it is called without one;
- the loss of a multi-token-prediction layer is a share of the same kind, and is added here.
"""

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from megatron_sao.data.share import MicroBatch
from megatron_sao.parallel.context import context_size

LossFunction = Callable[[torch.Tensor, MicroBatch], tuple[torch.Tensor, dict[str, Any]]]


def run_schedule(
    chunks: list[torch.nn.Module],
    micro_batches: Iterable[MicroBatch],
    loss_function: LossFunction,
    *,
    backward: bool,
    mtp_loss_function: LossFunction | None = None,
) -> list[dict[str, Any]]:
    """Forward, and with `backward` also backward and gradient reduction, over all micro-batches.

    Args:
        chunks: model chunks; wrapped for data parallelism when `backward`.
        loss_function: (decoder output [P, V/tp] or [P, num_outputs] at this rank's positions, micro-batch) ->
            (share of the loss, scalar; report). Runs on the last pipeline stage only. Tensors in the report are
            the caller's: detach them.
        mtp_loss_function: the same of the logits of a `PolicyWithMTP`'s MTP layer: its share is added, its report
            joins the other one. None: that layer, if there is one, does not run.
    Returns: the reports in micro-batch order on the last pipeline stage, [] elsewhere.
    Collective: every rank calls it with the same number of micro-batches, with several chunks a multiple of pp.
    """
    micro_batches = list(micro_batches)
    config = get_model_config(chunks[0])
    config.finalize_model_grads_func = _sum_model_grads
    no_sync = [chunk.no_sync for chunk in chunks] if backward else None
    config.no_sync_func = no_sync[0] if no_sync and len(chunks) == 1 else no_sync  # Megatron's three schedules differ
    iterators = [iter(micro_batches) for _ in chunks]
    with contextlib.nullcontext() if backward else torch.no_grad():
        return get_forward_backward_func()(
            forward_step_func=partial(_forward_step, loss_function, mtp_loss_function),
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(micro_batches),
            seq_length=1,  # unused: config.variable_seq_lengths sends shapes along
            micro_batch_size=1,
            forward_only=not backward,
        )


def _forward_step(loss_function: LossFunction, mtp_loss_function: LossFunction | None, iterator, model):
    micro_batch = next(iterator)
    device = next(model.parameters()).device
    token_ids = micro_batch.token_ids.to(device)
    options = {"packed_seq_params": packed_sequence(micro_batch, device)}
    if mtp_loss_function is not None:
        next_ids = micro_batch.at_positions(micro_batch.batch.token_ids).to(device)
        options["output_processor_context"] = next_ids[None]
    output = model(token_ids[None], None, None, **options)
    outputs = output if isinstance(output, tuple) else (output,)  # with the logits of the MTP layer
    functions = (loss_function, mtp_loss_function)[: len(outputs)]
    return outputs[0], partial(_loss, functions, micro_batch, outputs[1:])


def _loss(functions: tuple[LossFunction, ...], micro_batch: MicroBatch, more_outputs: tuple, output: torch.Tensor):
    loss, report = 0.0, {}
    for function, each in zip(functions, (output, *more_outputs), strict=True):
        # Not each[0]: its backward would fill a second [1, P, V/tp] gradient and copy.
        part, about = function(each.squeeze(0), micro_batch)
        loss, report = loss + part, report | about
    return loss, torch.zeros((), dtype=torch.int, device=loss.device), report


def packed_sequence(micro_batch: MicroBatch, device) -> PackedSeqParams:
    """Megatron's description of the segments; a new one for each micro-batch (it may carry state between layers).

    Lengths are of whole segments, not of what a context rank holds, and include the fillers behind a trajectory: causal
    order keeps those from real tokens, and a segment that is all "real" needs none of transformer-engine's kernels for
    padding between sequences (FlashAttention has none). Under context parallelism transformer-engine insists on the
    padded lengths too, and would compare the two on the GPU in every layer unless told that nothing lies between.
    """
    cu_seqlens = micro_batch.segment_starts.to(device=device, dtype=torch.int32)
    longest = int(micro_batch.segment_starts.diff().max())
    padded = {}
    if context_size() > 1:
        padded = dict(cu_seqlens_q_padded=cu_seqlens, cu_seqlens_kv_padded=cu_seqlens, pad_between_seqs=False)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        **padded,
    )


def _sum_model_grads(model, num_tokens=None, **kwargs) -> None:
    finalize_model_grads(model, None, **kwargs)


def is_first_stage() -> bool:
    """Whether this rank's pipeline stage takes the token ids."""
    return parallel_state.is_pipeline_first_stage(ignore_virtual=True)


def is_last_stage() -> bool:
    """Whether this rank's pipeline stage gives the model's output."""
    return parallel_state.is_pipeline_last_stage(ignore_virtual=True)
