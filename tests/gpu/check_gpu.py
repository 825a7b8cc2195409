"""What can only be checked on a GPU, in a few minutes on one: the CPU's numbers against CUDA's, memory, speed.

    python -m tests.gpu.check_gpu [--peak-tflops 989] [--rehearse]

1. One SAO step of a tiny Qwen3-MoE, each time in a process of its own: on the CPU in float32 (the reference), on CUDA
   in float32 with our own modules and with transformer-engine's, on CUDA in bfloat16. Compared: log-probs of the policy
   before the step, losses and gradient norms.
2. Log-probs of a vocabulary of 152k on CUDA against float64 on the CPU, and their peak memory at 8,192 tokens.
3. Time and model FLOP utilisation (MFU) of a policy update of a 1.5B-parameter MoE stack in bfloat16:
     FLOPs = 6 * sum over trajectories of (a * T + b * T^2)
   a: weights of all matrices that a token passes (of the routed experts the chosen ones); b * T^2: multiply-adds of
   causal attention (models/cost.py). 2 FLOPs are a multiply-add, and a backward pass counts as two forward passes.
     MFU = FLOPs / seconds / peak FLOPs of the device in bfloat16, dense

Without a CUDA device it says so and ends well. Without transformer-engine it says so and takes our own modules.
--rehearse runs every part on the CPU at small sizes: it shows that the script works, nothing else.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CHILD_TIMEOUT_S = 300
PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "H800": 989.0, "B200": 2250.0, "A100": 312.0, "A800": 312.0}
MEAN_LOGP_LIMIT = {"float32": 1e-5, "bfloat16": 2e-2}
RELATIVE_LIMIT = {"float32": 1e-3, "bfloat16": 5e-2}
COMPARED = ("policy/loss", "policy/grad_norm", "policy/entropy", "value/loss", "value/grad_norm")


def stack_config(is_small: bool) -> dict[str, Any]:
    """A Qwen3-MoE stack of 1.5B parameters (or a tiny one) as a HF configuration."""
    size = 64 if is_small else 2048
    return dict(
        model_type="qwen3_moe",
        vocab_size=256 if is_small else 32768,
        hidden_size=size,
        num_hidden_layers=2 if is_small else 8,
        num_attention_heads=size // 64,
        num_key_value_heads=max(1, size // 512),
        head_dim=64,
        intermediate_size=3 * size,
        moe_intermediate_size=3 * size // 8,
        num_experts=4 if is_small else 32,
        num_experts_per_tok=2 if is_small else 8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        hidden_act="silu",
        attention_bias=False,
        max_position_embeddings=8192,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=False,
    )


def training_flops(hf_config: dict[str, Any], lengths: list[int]) -> float:
    """FLOPs of forward and backward over trajectories of these lengths; nothing that is computed again counts."""
    from megatron_sao.models.cost import trajectory_cost

    cost = trajectory_cost(hf_config)
    return 6.0 * sum(cost.per_token * length + cost.per_pair * length**2 for length in lengths)


# ---- children: each in a process of its own --------------------------------------------------------------------


def use_modules(kind: str) -> None:
    """Build models of transformer-engine's modules ("te") or of ours ("local"), whatever the device would get."""
    import megatron_sao.parallel  # noqa: F401  first
    from megatron_sao.models import build, specs
    from megatron_sao.parallel import cpu_adam

    specs.uses_transformer_engine = build.uses_transformer_engine = lambda dtype: kind == "te"
    if not has_transformer_engine():
        cpu_adam.install()  # the fused Adam comes with transformer-engine


def has_transformer_engine() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


def step_child(folder: str, dtype: str, modules: str) -> dict[str, Any]:
    """One SAO step. -> log-probs of the action tokens before it, and its metrics."""
    use_modules(modules)
    from megatron_sao.config import load_config
    from megatron_sao.models.hf_folder import HFFolder
    from megatron_sao.parallel.schedule import run_schedule
    from megatron_sao.train.logprobs import learner_logprob
    from megatron_sao.train.sao_step import sao_step
    from megatron_sao.train.setup import build_trainer
    from megatron_sao.train.shares import scatter_to_share
    from tests.support.alone import start_alone
    from tests.support.trajectories import random_trajectories

    config = load_config(None, [f"model.dtype={dtype}", f"engine.dtype={dtype}"])
    trainer = build_trainer(config, HFFolder(folder), start_alone(config))
    models, share = trainer.models, trainer.share_of_batch(random_trajectories(9, seed=4), 0)

    def collect(logits, micro_batch):
        logp, _ = learner_logprob(logits, micro_batch, config.sampling.temperature, models.true_vocab)
        return logits.new_zeros(()), {"logp": logp}

    reports = run_schedule(models.policy.wrapped, share.micro_batches, collect, backward=False)
    logp = scatter_to_share(reports, "logp", share)[share.batch.action_mask]
    metrics = sao_step(models, share, config).metrics
    return {"logp": logp.tolist(), "metrics": {name: metrics[name] for name in COMPARED}}


def logprob_child(is_small: bool) -> dict[str, Any]:
    """Largest differences to float64, and the peak memory beside logits and gradient, in chunks."""
    import torch

    import megatron_sao.parallel  # noqa: F401  first
    from megatron_sao.parallel.logprob import CHUNK_BYTES, vocab_parallel_logprob

    device = "cuda" if torch.cuda.is_available() else "cpu"
    vocab, num_tokens = (1000, 64) if is_small else (151936, 8192)

    def run(logits, token_ids):
        return vocab_parallel_logprob(logits, token_ids, temperature=0.7, true_vocab=vocab, group=None)

    few = 3 * torch.randn(32, vocab)
    ids = torch.randint(vocab, (num_tokens,))
    exact = few.double().requires_grad_()
    exact_logp = (exact / 0.7).log_softmax(-1).gather(-1, ids[:32, None]).squeeze(-1)
    exact_logp.sum().backward()
    here = few.to(device).requires_grad_()
    logp, _ = run(here, ids[:32].to(device))
    logp.sum().backward()
    found = {
        "logprob_diff": float((logp.detach().cpu() - exact_logp.detach()).abs().max()),
        "gradient_diff": float((here.grad.cpu() - exact.grad).abs().max()),
        "extra_chunks": float("nan"),
    }
    if device == "cuda":
        logits = torch.randn(num_tokens, vocab, device=device, dtype=torch.bfloat16).requires_grad_()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(logits, ids.to(device))[0].sum().backward()
        extra = torch.cuda.max_memory_allocated() - before - logits.nbytes
        found["extra_chunks"] = extra / CHUNK_BYTES["cuda"]
    return found


def speed_child(modules: str, is_small: bool, repeats: int) -> dict[str, Any]:
    """Median seconds of a policy update of the stack, its FLOPs, parameters and peak memory."""
    use_modules(modules)
    import statistics

    import torch

    from megatron_sao.config import load_config
    from megatron_sao.data.batch import pack
    from megatron_sao.data.share import share_of
    from megatron_sao.models.build import build_model
    from megatron_sao.models.optimizer import make_trained_model
    from megatron_sao.train.policy_step import policy_update
    from tests.support.alone import start_alone
    from tests.support.trajectories import random_trajectories

    micro_batch_tokens, longest, count = (256, 128, 4) if is_small else (8192, 4096, 16)
    config, hf_config = load_config(None, []), stack_config(is_small)
    start_alone(config)
    model = make_trained_model(build_model("policy", hf_config, config.parallel, torch.bfloat16), config.policy)
    made = random_trajectories(count, vocab=hf_config["vocab_size"], longest=longest)
    share = share_of(pack(made, 0, lambda domain: (0.8, 3.0)), 0, 1, micro_batch_tokens, multiple=1)
    advantage = torch.randn(share.batch.num_tokens)
    times = []
    for _ in range(2 + repeats):  # the first two touch memory and choose kernels
        started = time.perf_counter()
        policy_update(model, share, advantage, config, hf_config["vocab_size"])
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return {
        "seconds": statistics.median(times[2:]),
        "flops": training_flops(hf_config, [t.num_tokens for t in made]),
        "tokens": share.batch.num_tokens,
        "parameters": sum(p.numel() for p in model.chunks[0].parameters()),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else float("nan"),
    }


def run_child(name: str, on_cpu: bool = False, **arguments: Any) -> tuple[dict[str, Any] | None, str]:
    """-> (what the child function returned or None, the end of its output)."""
    environment = os.environ | {"NVIDIA_TF32_OVERRIDE": "0", "OMP_NUM_THREADS": "4"}  # float32 means float32
    if on_cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "tests.gpu.check_gpu", "--child", name, json.dumps(arguments), str(answer)]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None, f"no answer within {CHILD_TIMEOUT_S} s"
        if done.returncode or not answer.exists():
            return None, (done.stdout + done.stderr)[-3000:]
        return json.loads(answer.read_text()), ""


# ---- the check -------------------------------------------------------------------------------------------------


def compare(name: str, dtype: str, reference: dict, found: dict, faults: list[str]) -> tuple[float, float]:
    """Print and judge one run against the reference; -> (mean |log-prob difference|, largest relative difference)."""
    differences = [abs(a - b) for a, b in zip(reference["logp"], found["logp"], strict=True)]
    mean = sum(differences) / len(differences)
    relative = {
        key: abs(found["metrics"][key] - value) / max(abs(value), 1e-3) for key, value in reference["metrics"].items()
    }
    worst = max(relative, key=relative.get)
    print(f"{name:22} log-probs: mean |difference| {mean:.2e}, largest {max(differences):.2e}; {worst} differs by"
          f" {relative[worst]:.1e} of itself")  # fmt: skip
    if not mean <= MEAN_LOGP_LIMIT[dtype] or not relative[worst] <= RELATIVE_LIMIT[dtype]:
        faults.append(
            f"{name}: mean log-prob difference {mean:.2e} (limit {MEAN_LOGP_LIMIT[dtype]}), {worst} differs by"
            f" {relative[worst]:.1e} (limit {RELATIVE_LIMIT[dtype]})"
        )
    return mean, relative[worst]


def check(is_rehearsal: bool, peak_tflops: float, repeats: int) -> int:
    """Run all parts; -> exit status."""
    import torch

    from tests.support.families import make_family_folder

    faults: list[str] = []
    device = "cpu" if is_rehearsal else torch.cuda.get_device_name()
    best = "te" if has_transformer_engine() and not is_rehearsal else "local"
    if best == "local":
        print("transformer-engine is not installed: CUDA runs our own modules, whose speed says little")
    numbers: dict[str, Any] = {"device": device.replace(" ", "_"), "modules": best}

    with tempfile.TemporaryDirectory() as scratch:
        folder = str(make_family_folder("qwen3_moe", Path(scratch) / "tiny", mtp=False, seed=3))
        reference, trouble = run_child("step", on_cpu=True, folder=folder, dtype="float32", modules="local")
        if reference is None:
            print(trouble)
            print("GPU failed: the reference step on the CPU did not run")
            return 1
        runs = [("float32", "local"), ("float32", "te"), ("bfloat16", best)]
        for dtype, modules in runs:
            if modules == "te" and best != "te":
                continue
            name = f"{dtype} {modules}"
            found, trouble = run_child("step", folder=folder, dtype=dtype, modules=modules)
            key = f"{dtype}_{modules}"
            if found is not None:
                mean, worst = compare(name, dtype, reference, found, faults)
                numbers |= {f"{key}_logp_diff": f"{mean:.1e}", f"{key}_metric_diff": f"{worst:.1e}"}
            elif (dtype, modules) == ("float32", "te"):  # packed attention in float32 is not in every version of it
                print(f"{name}: transformer-engine did not run it; last lines:\n{trouble[-500:]}")
                numbers[f"{key}_logp_diff"] = "refused"
            else:
                print(trouble)
                faults.append(f"{name}: the step did not run")

    found, trouble = run_child("logprob", is_small=is_rehearsal)
    if found is None:
        print(trouble)
        faults.append("log-probs of a large vocabulary did not run")
    else:
        print(f"log-probs of a large vocabulary: {found}")
        if not (found["logprob_diff"] <= 1e-4 and found["gradient_diff"] <= 1e-5):
            faults.append(f"log-probs differ from float64 by {found['logprob_diff']:.1e}")
        if found["extra_chunks"] > 4:
            faults.append(f"log-probs take {found['extra_chunks']:.1f} chunks of memory beside logits and gradient")
        numbers |= {name: f"{value:.2g}" for name, value in found.items()}

    found, trouble = run_child("speed", modules=best, is_small=is_rehearsal, repeats=repeats)
    if found is None:
        print(trouble)
        faults.append("the layer stack did not run")
    else:
        peak = peak_tflops or next((tflops for name, tflops in PEAK_TFLOPS.items() if name in device), 0.0)
        tflops = found["flops"] / found["seconds"] / 1e12
        print(
            f"policy update of {found['parameters'] / 1e9:.2f}B parameters, {found['tokens']} tokens:"
            f" {found['seconds']:.3f} s, {tflops:.1f} TFLOP/s, peak memory {found['peak_gib']:.1f} GiB"
        )
        if not peak:
            print(f"the peak of {device} is not known here, so there is no MFU: pass --peak-tflops")
        numbers |= {
            "parameters_b": f"{found['parameters'] / 1e9:.2f}",
            "step_s": f"{found['seconds']:.3f}",
            "tokens_per_s": f"{found['tokens'] / found['seconds']:.0f}",
            "tflops": f"{tflops:.1f}",
            "mfu": f"{tflops / peak:.3f}" if peak else "unknown",
            "peak_gib": f"{found['peak_gib']:.1f}",
        }

    for fault in faults:
        print(f"FAULT {fault}")
    print(f"GPU {'rehearsal=1 ' if is_rehearsal else ''}{' '.join(f'{k}={v}' for k, v in numbers.items())} "
          f"faults={len(faults)}")  # fmt: skip
    return 1 if faults else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peak-tflops", type=float, default=0.0, help="dense bfloat16 peak of the device; 0 = look up")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rehearse", action="store_true", help="run every part on the CPU at small sizes")
    parser.add_argument("--child", nargs=3, metavar=("NAME", "ARGUMENTS", "ANSWER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, arguments, answer = options.child
        child = {"step": step_child, "logprob": logprob_child, "speed": speed_child}[name]
        Path(answer).write_text(json.dumps(child(**json.loads(arguments))))
        return 0

    import torch

    if not torch.cuda.is_available() and not options.rehearse:
        print("GPU skipped: torch finds no CUDA device on this machine")
        return 0
    return check(options.rehearse, options.peak_tflops, options.repeats)


if __name__ == "__main__":
    sys.exit(main())
