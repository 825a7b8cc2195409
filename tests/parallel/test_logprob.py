"""Log-probs, entropy and gradients of a cut vocabulary equal those of torch's log_softmax on the whole one."""

import pytest
import torch
import torch.distributed as dist

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron_sao.parallel import logprob
from megatron_sao.parallel.logprob import vocab_parallel_logprob
from tests.support.memory import PeakMemory
from tests.support.ranks import run_ranks

TRUE_VOCAB, NUM_TOKENS = 10, 7
PADDING = 100.0  # what padded columns hold: with any probability at all they would win


def inputs(padded_vocab, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    logits = torch.full((NUM_TOKENS, padded_vocab), PADDING)
    logits[:, :TRUE_VOCAB] = 3 * torch.randn(NUM_TOKENS, TRUE_VOCAB, generator=generator)
    token_ids = torch.randint(0, TRUE_VOCAB, (NUM_TOKENS,), generator=generator)
    token_ids[0], token_ids[1] = 0, TRUE_VOCAB - 1
    weight = torch.randn(NUM_TOKENS, generator=generator)
    return logits.to(dtype), token_ids, weight


def expected(logits, token_ids, weight, temperature):
    """(logp, entropy, gradient of sum(weight * logp) to the logits) over the true columns, in float64."""
    whole = logits.double().requires_grad_()
    log_p = (whole[:, :TRUE_VOCAB] / temperature).log_softmax(-1)
    logp = log_p.gather(-1, token_ids[:, None]).squeeze(-1)
    (logp * weight.double()).sum().backward()
    entropy = -(log_p.exp() * log_p).sum(-1)
    return logp.detach(), entropy.detach(), whole.grad


def found(logits, token_ids, weight, temperature, group):
    logits = logits.clone().requires_grad_()
    logp, entropy = vocab_parallel_logprob(
        logits, token_ids, temperature=temperature, true_vocab=TRUE_VOCAB, group=group
    )
    (logp * weight).sum().backward()
    return logp.detach(), entropy, logits.grad


def on_this_rank(padded_vocab, temperature, chunk_tokens):
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    logits, token_ids, weight = inputs(padded_vocab)
    width = padded_vocab // dist.get_world_size()
    logprob.CHUNK_BYTES = {"cpu": 4 * width * chunk_tokens}
    mine = logits[:, dist.get_rank() * width : (dist.get_rank() + 1) * width]
    return found(mine, token_ids, weight, temperature, dist.group.WORLD)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
@pytest.mark.parametrize("padded_vocab", [10, 16])
def test_one_process_equals_torch(padded_vocab, temperature):
    given = inputs(padded_vocab)
    for a, b in zip(found(*given, temperature, None), expected(*given, temperature), strict=True):
        torch.testing.assert_close(a, b.float(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 8])
def test_chunk_borders_change_no_bit(monkeypatch, chunk_tokens):
    given = inputs(16)
    whole = found(*given, 0.7, None)
    monkeypatch.setattr(logprob, "CHUNK_BYTES", {"cpu": 4 * 16 * chunk_tokens})
    for a, b in zip(found(*given, 0.7, None), whole, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "world_size, padded_vocab, chunk_tokens",
    [(2, 10, 2048), (2, 16, 3), (2, 20, 2048), (3, 18, 2)],
    ids=["even", "padded", "rank of padding only", "three ranks"],
)
def test_a_cut_vocabulary_equals_one_process(world_size, padded_vocab, chunk_tokens):
    logp, entropy, gradient = expected(*inputs(padded_vocab), 0.7)
    results = run_ranks(world_size, on_this_rank, padded_vocab, 0.7, chunk_tokens)
    for got_logp, got_entropy, _ in results:
        torch.testing.assert_close(got_logp, logp.float(), atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(got_entropy, entropy.float(), atol=1e-6, rtol=1e-6)
        assert torch.equal(got_logp, results[0][0]), "equal on all ranks of the axis"
    whole = torch.cat([got for _, _, got in results], dim=1)
    torch.testing.assert_close(whole, gradient.float(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("value", [PADDING, -PADDING, 1e30, float("inf"), float("nan")])
def test_padded_columns_get_no_probability_and_no_gradient(value):
    logits, token_ids, weight = inputs(16)
    clean = found(logits[:, :TRUE_VOCAB], token_ids, weight, 1.0, None)
    logits[:, TRUE_VOCAB:] = value
    logp, entropy, gradient = found(logits, token_ids, weight, 1.0, None)
    assert torch.equal(logp, clean[0]) and torch.equal(entropy, clean[1])
    assert torch.equal(gradient[:, :TRUE_VOCAB], clean[2]) and not gradient[:, TRUE_VOCAB:].any()


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[1e4, 0.0, -1e4], [-1e30, 0.0, 0.0], [80.0, 80.0, 80.0]], requires_grad=True)
    token_ids = torch.tensor([0, 1, 2])
    logp, entropy = vocab_parallel_logprob(logits, token_ids, temperature=1.0, true_vocab=3, group=None)
    torch.testing.assert_close(logp, torch.tensor([1.0, 0.5, 1 / 3]).log())
    torch.testing.assert_close(entropy, torch.tensor([1.0, 2.0, 3.0]).log())
    logp.sum().backward()
    assert bool(logits.grad.isfinite().all())


def test_bfloat16_logits_are_summed_in_float32():
    logits, token_ids, weight = inputs(16, torch.bfloat16)
    logp, entropy, gradient = found(logits, token_ids, weight, 0.7, None)
    want_logp, want_entropy, want_gradient = expected(logits, token_ids, weight, 0.7)
    assert logp.dtype == entropy.dtype == torch.float32 and gradient.dtype == torch.bfloat16
    torch.testing.assert_close(logp, want_logp.float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, want_entropy.float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient.float(), want_gradient.float(), atol=2e-2, rtol=2e-2)


def test_the_gradient_of_a_likely_token_survives_bfloat16():
    """p = 0.9995: 1 - p in bfloat16 is 0, but the gradients of a row must add up to 0."""
    logits = torch.tensor([[7.5, 0.0]], dtype=torch.bfloat16, requires_grad=True)
    logp, _ = vocab_parallel_logprob(logits, torch.tensor([0]), temperature=1.0, true_vocab=2, group=None)
    logp.sum().backward()
    miss = 1 / (1 + 2.718281828459045**7.5)
    assert logits.grad[0].tolist() == pytest.approx([miss, -miss], rel=0.01)


def test_no_tokens_at_all():
    logits = torch.zeros(0, 16, requires_grad=True)
    logp, entropy = vocab_parallel_logprob(
        logits, torch.zeros(0, dtype=torch.int64), temperature=1.0, true_vocab=10, group=None
    )
    assert logp.shape == entropy.shape == (0,)
    logp.sum().backward()
    assert logits.grad.shape == (0, 16)


def test_the_gradient_reaches_the_logits_of_tokens_that_are_asked_for_and_no_others():
    logits, token_ids, _ = inputs(10)
    logits.requires_grad_()
    logp, _ = vocab_parallel_logprob(logits, token_ids, temperature=1.0, true_vocab=10, group=None)
    logp[2].backward()
    assert sorted(set(logits.grad.nonzero()[:, 0].tolist())) == [2]


def extra_bytes(function, num_tokens, vocab, dtype):
    """Peak of what forward and backward create besides the logits' gradient."""
    logits = torch.randn(num_tokens, vocab).to(dtype).requires_grad_()
    token_ids = torch.randint(vocab, (num_tokens,))
    with PeakMemory() as memory:
        function(logits, token_ids).sum().backward()
    assert memory.peak_bytes >= logits.nbytes and logits.grad is not None
    return memory.peak_bytes - logits.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_memory_besides_the_gradient_is_that_of_a_few_chunks(monkeypatch, dtype):
    chunk, per_token = 1 << 17, 100  # bytes
    monkeypatch.setattr(logprob, "CHUNK_BYTES", {"cpu": chunk})

    def chunked(logits, token_ids):
        vocab = logits.shape[-1]
        return vocab_parallel_logprob(logits, token_ids, temperature=0.7, true_vocab=vocab, group=None)[0]

    def naive(logits, token_ids):
        return (logits.float() / 0.7).log_softmax(-1).gather(-1, token_ids[:, None])

    for num_tokens, vocab in ((128, 4096), (512, 4096), (128, 16384)):
        limit = 3.5 * chunk + per_token * num_tokens
        assert extra_bytes(chunked, num_tokens, vocab, dtype) <= limit
        assert extra_bytes(naive, num_tokens, vocab, dtype) >= 4 * num_tokens * vocab > 1.5 * limit


def test_the_gradient_may_take_the_place_of_the_logits():
    given, token_ids, weight = inputs(16)
    logp, _, expected_gradient = found(given, token_ids, weight, 0.7, None)
    leaf = given.clone().requires_grad_()
    logits = leaf * 1.0
    options = dict(temperature=0.7, true_vocab=TRUE_VOCAB, group=None, overwrites_logits=True)
    again, _ = vocab_parallel_logprob(logits, token_ids, **options)
    assert torch.equal(logits, given), "until backward they are what they were"
    (gradient,) = torch.autograd.grad((again * weight).sum(), logits, retain_graph=True)
    assert gradient.data_ptr() == logits.data_ptr()
    assert torch.equal(again.detach(), logp) and torch.equal(gradient, expected_gradient)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad((again * weight).sum(), logits)
