"""Peak memory of log-probs and entropy, forward and backward: in chunks against log_softmax on the whole logits.

    python -m tests.bench.logprob [--tokens 8192] [--vocab 151936] [--measured-tokens 512]

Counted: every storage that forward and backward create, at the moment when most of them are alive; not the logits,
which the model's output layer made, and not their gradient, which has their size and dtype and which either way must
return. The full size is counted on fake tensors (sizes without memory), with the chunks of a GPU. A smaller size is
also run for real, each way in a process of its own, and measured as growth of the resident peak: it shows that the
counting is right (less by up to a chunk: pages of the gradient become resident as they are filled).
The naive way is what one writes first: log_softmax of the logits in float32, gather, and the entropy from the same
log-probabilities.
"""

import argparse
import os
import pickle
import re
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch._subclasses import FakeTensorMode

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.parallel import logprob
from tests.support.memory import PeakMemory

TEMPERATURE = 0.7
MIB = 2**20
Way = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def chunked(logits: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return logprob.vocab_parallel_logprob(
        logits, token_ids, temperature=TEMPERATURE, true_vocab=logits.shape[-1], group=None
    )


def naive(logits: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = (logits.float() / TEMPERATURE).log_softmax(-1)
    detached = log_p.detach()
    return log_p.gather(-1, token_ids[:, None]).squeeze(-1), -(detached.exp() * detached).sum(-1)


def forward_and_backward(way: Way, logits: torch.Tensor, token_ids: torch.Tensor) -> None:
    logp, entropy = way(logits, token_ids)
    logp.sum().backward()
    assert logits.grad.dtype == logits.dtype and entropy.shape == logp.shape


def counted_bytes(way: Way, num_tokens: int, vocab: int, dtype: torch.dtype) -> int:
    """Peak of what forward and backward create, less the gradient."""
    with FakeTensorMode():
        logits = torch.empty(num_tokens, vocab, dtype=dtype, requires_grad=True)
        token_ids = torch.zeros(num_tokens, dtype=torch.int64)
        with PeakMemory() as memory:
            forward_and_backward(way, logits, token_ids)
        return memory.peak_bytes - logits.nbytes


def measured(way: Way, num_tokens: int, vocab: int, dtype: torch.dtype) -> tuple[int, float]:
    """(growth of the resident peak less the gradient in bytes, seconds), of a forked process."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            logits = torch.randn(num_tokens, vocab).to(dtype).requires_grad_()
            token_ids = torch.randint(vocab, (num_tokens,))
            Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
            before, started = resident_bytes("VmRSS"), time.perf_counter()
            forward_and_backward(way, logits, token_ids)
            seconds = time.perf_counter() - started
            os.write(writer, pickle.dumps((resident_bytes("VmHWM") - before - logits.nbytes, seconds)))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    return pickle.loads(answer)


def resident_bytes(field: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process."""
    return 1024 * int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--measured-tokens", type=int, default=512)
    options = parser.parse_args()
    torch.set_num_threads(1)
    # On a CPU the chunks would be small and their memory lost in the noise of the process.
    chunk = logprob.CHUNK_BYTES["cpu"] = logprob.CHUNK_BYTES["cuda"]
    cases = [
        (name, dtype, way)
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))
        for way in (chunked, naive)
    ]

    # Before the counting: backward in this process would start threads that a forked one lacks.
    size = options.measured_tokens, options.vocab
    run = [measured(way, *size, dtype) for _, dtype, way in cases]
    print(f"run and measured: {size[0]} tokens, vocabulary {options.vocab}, chunks of {chunk // MIB} MiB")
    for (name, dtype, way), (resident, seconds) in zip(cases, run, strict=True):
        print(
            f"  {name} {way.__name__:8} resident {resident / MIB:6.0f} MiB"
            f"   counted {counted_bytes(way, *size, dtype) / MIB:6.0f} MiB   {seconds:.2f} s"
        )

    print(f"counted: {options.tokens} tokens")
    found = []
    for name, dtype, way in cases:
        extra = counted_bytes(way, options.tokens, options.vocab, dtype)
        logits = options.tokens * options.vocab * dtype.itemsize
        print(
            f"  {name} {way.__name__:8} {extra / MIB:6.0f} MiB = {extra / chunk:5.1f} chunks"
            f"   besides logits of {logits / MIB:.0f} MiB and their gradient"
        )
        found.append(f"{name}_{way.__name__}_mib={extra / MIB:.0f}")
    print(f"BENCH logprob {' '.join(found)} chunk_mib={chunk // MIB} tokens={options.tokens} vocab={options.vocab}")


if __name__ == "__main__":
    main()
