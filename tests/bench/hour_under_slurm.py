"""A long run of a local configuration under a real SLURM that takes its job away again and again.

    python -m tests.bench.hour_under_slurm [--minutes 60] [--requeue-every 15] [--steps-per-minute 20]
                                           [--config configs/local.toml] [--folder runs/hour] [--section.key value ...]

Starts the cluster of the tests on this machine (two trainer nodes, one rollout node), queues the job again at every
interval and waits for its end. At the end it prints what became of every prompt, in all attempts together, whether one
was lost or trained twice, and the pass rates. Exit code 1 if anything was.
"""

import argparse
import json
import sqlite3
import sys
import time
from pathlib import Path

from megatron_sao.cli.run_folder import make_run_folder
from megatron_sao.observe.metrics import read_metrics
from megatron_sao.observe.trajectories import read_trajectories
from tests.support.local_run import CLONE, num_trained
from tests.support.slurm import OVER, SlurmCluster, say

ATTEMPT_TIMEOUT_S = 600.0  # until a job that was queued again has trained a step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long the run shall take, about")
    parser.add_argument("--requeue-every", type=float, default=15.0, help="minutes between two requeues")
    parser.add_argument("--steps-per-minute", type=float, default=20.0, help="of this machine, with pauses")
    parser.add_argument("--config", default="configs/local.toml")
    parser.add_argument("--folder", type=Path, default=Path("runs/hour"), help="an earlier one is moved aside")
    options, overrides = parser.parse_known_args()
    folder = options.folder.absolute()
    make_run_folder(folder)
    steps = round(options.minutes * options.steps_per_minute)
    words = [options.config, "--run.folder", str(folder), "--run.name", "run", "--run.steps", str(steps), *overrides]
    with SlurmCluster(folder / "slurm") as cluster:
        job = run_job(cluster, folder, words, options.minutes * 60, options.requeue_every * 60)
    return report(folder / "run", job)


def run_job(cluster: SlurmCluster, folder: Path, words: list[str], seconds: float, every_s: float) -> dict[str, str]:
    """Submit, queue again at every interval, wait for the end. Returns: what SLURM says of the job then."""
    started_s, output = time.monotonic(), folder / "job.out"
    sizes = ["--gpus-per-node=1", "--mem=1000"]
    number = cluster.submit(
        f"--output={output}", "--nodes=2", *sizes, ":", "--nodes=1", *sizes, "launch/slurm.sbatch", *words,
        cwd=CLONE,
    )  # fmt: skip
    next_s = started_s + every_s
    while True:
        left_s = started_s + 2 * seconds + ATTEMPT_TIMEOUT_S - time.monotonic()

        def is_due(job: dict[str, str]) -> bool:
            return job["JobState"] in OVER or time.monotonic() > next_s

        if (job := cluster.wait_for(number, is_due, "the end of the run", left_s))["JobState"] in OVER:
            return job
        say(f"minute {(time.monotonic() - started_s) / 60:.1f}: the job is queued again")
        attempt = f"attempt {int(job['Restarts']) + 2}:"
        cluster.command("scontrol", "requeue", number)

        def has_begun(job: dict[str, str]) -> bool:
            return job["JobState"] in OVER or attempt in output.read_text()

        def has_gone_on(job: dict[str, str]) -> bool:
            return job["JobState"] in OVER or num_trained(folder / "run") > trained

        cluster.wait_for(number, has_begun, "the next attempt", ATTEMPT_TIMEOUT_S)
        trained = num_trained(folder / "run")
        cluster.wait_for(number, has_gone_on, "a step of the next attempt", ATTEMPT_TIMEOUT_S)
        next_s = max(next_s + every_s, time.monotonic())  # an attempt that started for long has at least that step


def report(folder: Path, job: dict[str, str]) -> int:
    """Print what became of the run. Returns: 1 if it failed, or lost a prompt, or trained one twice."""
    print(f"job {job['JobState']} with exit code {job['ExitCode']}, queued again {job['Restarts']} times")
    counts = json.loads((folder / "scheduler_summary.json").read_text())
    print(", ".join(f"{name} {counts[name]}" for name in ("issued", "trained", "dropped", "in_flight")))
    print(f"dropped because: {counts['dropped_by_reason'] or 'none was'}")
    with sqlite3.connect(folder / "ledger.sqlite") as book:
        state_of = dict(book.execute("SELECT prompt_id, state FROM prompts"))
    trained = [prompt_id for prompt_id, state in state_of.items() if state == "trained"]
    files = [path for path in (folder / "trajectories").glob("*.parquet") if not path.name.startswith("eval")]
    written = [trajectory.prompt.prompt_id for path in files for trajectory in read_trajectories(path)]
    numbers = {int(prompt_id.rsplit("/", 1)[1]) for prompt_id in state_of}  # of an endless source: 0, 1, 2 and so on
    unaccounted = counts["issued"] - counts["trained"] - counts["dropped"] - counts["in_flight"]
    faults = {
        "issued prompts that nobody knows about": unaccounted,
        "prompts that were passed over": len(set(range(max(numbers) + 1)) - numbers),
        "trained prompts without a trajectory in the files, or the reverse": len(set(trained) ^ set(written)),
        "prompts trained more than once": len(written) - len(set(written)),
        "requests lost by pushes": counts["requests_lost_by_pushes"],
    }
    for what, number in faults.items():
        print(f"{what}: {number}")
    records = read_metrics(folder / "metrics.jsonl")
    versions = [record["schedule/policy_version"] for record in records if record["phase"] == "train"]
    has_all = versions == list(range(len(versions)))
    print(f"steps {len(versions)}, policy versions {'without a gap' if has_all else versions}")
    for record in records:
        if record["phase"] == "eval":
            print(f"pass rate {record['eval/name']} (version {record['step']:.0f}): {record['eval/pass_rate']:.3f}")
    is_well = job["JobState"] == "COMPLETED" and not any(faults.values()) and has_all
    print("nothing was lost" if is_well else "FAILED")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
