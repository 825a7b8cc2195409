"""Whole runs under a real SLURM of three nodes: trained, cancelled, resumed, queued again, finished. And what the batch
script does when its parts fail, its time is up or others need its nodes, with stand-ins for the parts.
"""

import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_sao.checkpoints import finished
from megatron_sao.cli.slurm import expand_hostlist
from megatron_sao.observe.metrics import read_metrics
from megatron_sao.observe.trajectories import read_trajectories
from tests.support.local_run import CLONE, SMALL_RUN, num_trained
from tests.support.slurm import SlurmCluster

SCRIPT = Path("launch", "slurm.sbatch")
START_TIMEOUT_S = 240.0  # of a run: its processes import for a minute on a busy machine
DOCTOR_TIMEOUT_S = 240.0  # imports, and the two minutes after which its hosts say that one did not come
NUM_STEPS = 6


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


class Job:
    """A submitted job of two trainer nodes and one rollout node, and what it has written."""

    def __init__(self, cluster: SlurmCluster, clone: Path, output: Path, *words: str, options: tuple[str, ...] = ()):
        sizes = ["--gpus-per-node=1", "--mem=1000"]
        components = [f"--output={output}", *options, "--nodes=2", *sizes, ":", "--nodes=1", *sizes]
        self.cluster, self._output = cluster, output
        self.number = cluster.submit(*components, str(SCRIPT), *words, cwd=clone)

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    def wait_until(self, is_so: Callable[[], bool], what: str, timeout_s: float = START_TIMEOUT_S) -> None:
        self.cluster.wait_for(self.number, lambda job: is_so() or self._must_go_on(job), what, timeout_s)

    def wait_for(self, text: str, timeout_s: float = START_TIMEOUT_S) -> None:
        self.wait_until(lambda: text in self.output, repr(text), timeout_s)

    def end(self, timeout_s: float = START_TIMEOUT_S) -> tuple[str, str, int]:
        """Waits for it. Returns: state, exit code, and how often it was queued again; no process of it is left."""
        job = self.cluster.wait_for_end(self.number, timeout_s)
        assert self.cluster.processes() == []
        return job["JobState"], job["ExitCode"].removesuffix(":0"), int(job["Restarts"])

    def _must_go_on(self, job: dict[str, str]) -> bool:
        assert job["JobState"] in ("PENDING", "RUNNING", "COMPLETING"), self.output
        return False


# ---- a whole run -----------------------------------------------------------------------------------------------


@dataclass
class FinishedRun:
    folder: Path
    saved_at: list[int]  # steps of the checkpoints after each attempt that was stopped
    ends: list[tuple[str, str, int]]  # of the two jobs
    outputs: list[str]

    def json(self, name: str) -> dict:
        return json.loads((self.folder / name).read_text())

    @property
    def train_records(self) -> list[dict]:
        return [record for record in read_metrics(self.folder / "metrics.jsonl") if record["phase"] == "train"]


@pytest.fixture(scope="module")
def run(cluster, tmp_path_factory) -> FinishedRun:
    """Cancelled after the first steps; submitted again with --resume; queued again after a further step; finished."""
    place = tmp_path_factory.mktemp("run")
    folder = place / "runs" / "small"
    arguments = [str(SMALL_RUN.relative_to(CLONE)), "--run.folder", str(place / "runs")]
    arguments += ["--run.steps", str(NUM_STEPS), "--warm_start.cache_folder", str(place / "models")]
    saved_at = []

    def last_saved() -> int:
        manifest = finished(folder / "checkpoints")[-1] / "checkpoint.json"
        return json.loads(manifest.read_text())["policy_version"]

    first = Job(cluster, CLONE, place / "first.out", *arguments)
    first.wait_until(lambda: num_trained(folder) >= 2, "the second step")
    cluster.command("scancel", first.number)
    ends = [first.end()]
    saved_at.append(last_saved())

    second = Job(cluster, CLONE, place / "second.out", *arguments, "--resume")
    second.wait_until(lambda: num_trained(folder) > saved_at[0], "a step after the resume")
    cluster.command("scontrol", "requeue", second.number)
    second.wait_for("attempt 2")
    saved_at.append(last_saved())
    ends.append(second.end())
    return FinishedRun(folder, saved_at, ends, [first.output, second.output])


def test_the_exit_code_of_a_job_says_how_the_run_ended(run):
    assert run.ends == [("CANCELLED", "75", 0), ("COMPLETED", "0", 1)]
    cancelled, resumed = run.outputs
    assert "stopped and saved: SIGTERM to" in cancelled
    assert "SLURM has queued the job again" in resumed
    assert f"finished; everything is in {run.folder}" in resumed
    for output in run.outputs:
        assert "Traceback" not in output and "is killed" not in output


def test_each_attempt_goes_on_where_the_one_before_was_saved(run):
    assert 2 <= run.saved_at[0] < run.saved_at[1] < NUM_STEPS
    assert [record["schedule/policy_version"] for record in run.train_records] == list(range(NUM_STEPS))
    for name in ("result.json", "scheduler_summary.json"):
        assert run.json(name)["policy_version"] == NUM_STEPS


def test_no_prompt_was_lost_or_trained_twice(run):
    counts = run.json("scheduler_summary.json")
    assert counts["issued"] == counts["trained"] + counts["dropped"] + counts["in_flight"]
    with sqlite3.connect(run.folder / "ledger.sqlite") as book:
        trained = [row[0] for row in book.execute("SELECT prompt_id FROM prompts WHERE state = 'trained'")]
    files = [*(run.folder / "trajectories").glob("train-*"), *(run.folder / "trajectories").glob("value_*")]
    written = [trajectory.prompt.prompt_id for file in files for trajectory in read_trajectories(file)]
    assert sorted(written) == sorted(trained)
    assert len(set(trained)) == len(trained) == counts["trained"]


def test_every_process_has_a_log_and_those_of_earlier_attempts_are_kept(run):
    expected = {"scheduler.log", "engine-0.log"}
    expected |= {f"trainer-{name}-{number}.log" for name in ("host", "rank") for number in (0, 1)}
    for folder in ("logs", "logs.1", "logs.2"):
        assert expected <= {path.name for path in (run.folder / folder).iterdir()}
    for output in run.outputs:
        assert "trainer on n1 n2, engines on n3" in output
        assert "on GPUs 0" in output  # of the engine: what SLURM gave to this node


# ---- the batch script with stand-ins ----------------------------------------------------------------------------

# In the place of launch/node.sh: the parts of a run as files and signals move them. `fail-ROLE-NODE` makes
# one fail; with `deaf`, the trainer notices nothing any more but signals; with `slow`, it gets to no checkpoint.
STAND_IN = r"""
role=$1 place=$PWD/run
shift
if [ "$role" = prepare ]; then
    mkdir -p run
    rm -f run/stop run/result.json run/over
    printf 'prepared with'
    printf ' <%s>' "$@"
    [[ " $* " == *" --dry-run "* ]] && { printf '\n# nothing is made\n'; exit; }
    touch run/run.json
    printf '\n%s\n' "$place"
    exit
fi
trap '[ -e run/stop ] || echo "SIGTERM to the $role" >run/stop' TERM
echo "$role: $*, GPUs $CUDA_VISIBLE_DEVICES"
until [ -e run/stop ] || [ -e run/over ] || [ -e "run/fail-$role-$SLURM_NODEID" ]; do sleep 0.2; done
if [ -e "run/fail-$role-$SLURM_NODEID" ]; then
    echo "error: this is why the $role fails"
    touch run/over
    exit 6
fi
while [ "$role" = trainer ] && [ -e run/deaf ] && [ ! -e run/stop ]; do sleep 0.2; done
[ "$role" != trainer ] || [ -e run/slow ] || mkdir -p "run/checkpoints/step-$((100000 + ${SLURM_RESTART_COUNT:-0}))"
[ "$role" != trainer ] || touch run/over
until [ -e run/over ]; do sleep 0.2; done
"""


@pytest.fixture
def stand_in(tmp_path) -> Path:
    """A clone whose parts are stand-ins."""
    (tmp_path / "launch").mkdir()
    shutil.copy(CLONE / SCRIPT, tmp_path / SCRIPT)
    (tmp_path / "launch" / "env.sh").touch()
    (tmp_path / "launch" / "node.sh").write_text(STAND_IN)
    return tmp_path


def stand_in_job(cluster, stand_in, *words: str, options: tuple[str, ...] = ()) -> Job:
    job = Job(cluster, stand_in, stand_in / "out", *words, options=options)
    job.wait_for("engines: ", 60)
    job.wait_for("trainer: ", 60)
    return job


def test_time_limit_and_preemption_queue_the_job_again_and_a_stop_by_hand_does_not(cluster, stand_in):
    job = stand_in_job(cluster, stand_in, "my config.toml", "--run.name", "x")
    assert "prepared with <my config.toml> <--run.name> <x>\n" in job.output
    assert f"engines: {stand_in}/run --nodes 1 --rendezvous 127.0.0.1:" in job.output
    cluster.command("scancel", "--batch", "--signal=USR1", job.number)  # as SLURM before the time limit
    job.wait_for("attempt 2")
    job.wait_for("prepared with <my config.toml> <--run.name> <x> <--requeued>\n")
    assert "stopped and saved: the time limit of the job is near" in job.output
    job.wait_until(lambda: job.output.count("trainer: ") == 4, "both trainer nodes")
    urgent = cluster.submit("--partition=urgent", "--nodes=3", "--exclusive", "--wrap=true", "--output=/dev/null",
                            cwd=stand_in)  # fmt: skip
    cluster.wait_for_end(urgent, 120)
    job.wait_for("attempt 3")
    assert "stopped and saved: SIGTERM to the " in job.output
    assert job.output.count("queueing the job again, to go on from the checkpoint") == 2
    job.wait_until(lambda: job.output.count("trainer: ") == 6, "both trainer nodes")
    (stand_in / "run" / "stop").touch()
    assert job.end() == ("FAILED", "75", 2)
    assert "stopped and saved: somebody made the file stop" in job.output


def test_a_job_that_gets_nowhere_within_its_time_is_not_queued_again_and_one_that_resumes_is_as_it_was(
    cluster, stand_in
):
    job = stand_in_job(cluster, stand_in, "config.toml", "--resume")
    cluster.command("scancel", "--batch", "--signal=USR1", job.number)
    job.wait_for("attempt 2")
    job.wait_until(lambda: job.output.count("trainer: ") == 4, "both trainer nodes")
    assert job.output.count("prepared with <config.toml> <--resume>\n") == 2
    (stand_in / "run" / "slow").touch()
    cluster.command("scancel", "--batch", "--signal=USR1", job.number)
    assert job.end() == ("FAILED", "75", 1)
    assert "stopped and with no checkpoint beyond those it found: the time limit of the job is near" in job.output
    assert "not queued again, for it would get as far as this time: give the job a longer --time" in job.output


def test_a_dry_run_starts_nothing(cluster, stand_in):
    job = Job(cluster, stand_in, stand_in / "out", "config.toml", "--dry-run")
    assert job.end(60) == ("COMPLETED", "0", 0)
    assert "# nothing is made\n" in job.output and "nothing is started" in job.output
    assert "trainer: " not in job.output and "engines: " not in job.output


def test_a_job_that_must_not_be_queued_again_ends_at_its_time_limit(cluster, stand_in):
    job = stand_in_job(cluster, stand_in, "config.toml", options=("--no-requeue",))
    cluster.command("scancel", "--batch", "--signal=USR1", job.number)
    assert job.end() == ("FAILED", "75", 0)
    assert "to go on: sbatch launch/slurm.sbatch CONFIG ... --resume" in job.output


@pytest.mark.parametrize(
    "fails, exit_codes, ended",
    [
        ("scheduler-0", ["6"], "the trainer has not ended, and is killed"),
        ("trainer-1", ["6", "137"], "the trainer ended with exit code"),  # that of this node, or of the killed one
    ],
)
def test_when_a_part_fails_the_job_ends_with_the_cause_and_kills_what_does_not_notice(
    cluster, stand_in, fails, exit_codes, ended
):
    script = (stand_in / SCRIPT).read_text()
    for wait in ("patience=60\n", "sleep 20;"):
        assert script.count(wait) == 1
    (stand_in / SCRIPT).write_text(script.replace("patience=60\n", "patience=2\n").replace("sleep 20;", "sleep 1;"))
    job = stand_in_job(cluster, stand_in, "config.toml")
    (stand_in / "run" / "deaf").touch()
    (stand_in / "run" / f"fail-{fails}").touch()
    state, exit_code, restarts = job.end()
    assert (state, restarts) == ("FAILED", 0) and exit_code in exit_codes
    assert f"error: this is why the {fails[:-2]} fails" in job.output
    assert ended in job.output and "failed; the cause is above" in job.output


def test_a_job_that_cannot_be_is_refused(cluster, stand_in):
    (stand_in / "elsewhere").mkdir()
    shutil.copy(stand_in / SCRIPT, stand_in / "elsewhere")
    jobs = [
        (["launch/slurm.sbatch"], stand_in, "say which configuration"),
        (["slurm.sbatch", "config.toml"], stand_in / "elsewhere", "submit it from the clone"),
    ]
    sizes = ["--gpus-per-node=1", "--mem=1000"]
    for words, folder, expected in jobs:
        number = cluster.submit(f"--output={folder}/out", *sizes, ":", *sizes, *words, cwd=folder)
        job = cluster.wait_for_end(number, 60)
        assert (job["JobState"], job["ExitCode"]) == ("FAILED", "2:0")
        assert expected in (folder / "out").read_text()


# ---- host lists -------------------------------------------------------------------------------------------------


def test_host_lists_are_read_as_slurm_reads_them(cluster):
    rng = random.Random(7)

    def numbers() -> str:
        first, width = rng.randint(0, 12), rng.choice([0, 2, 3])
        return f"{first:0{width}}" + (f"-{first + rng.randint(0, 3):0{width}}" if rng.random() < 0.6 else "")

    def item() -> str:
        words = [rng.choice(["n", "node", "ab-cd-", "r1c", "gpu7", "a0"])]
        for _ in range(rng.choice([0, 1, 1, 2, 3, 4])):
            words += [f"[{','.join(numbers() for _ in range(rng.randint(1, 2)))}]", rng.choice(["", "n", "-s"])]
        return "".join(words[:-1] if len(words) > 1 else words)

    for text in [",".join(item() for _ in range(rng.randint(1, 3))) for _ in range(60)]:
        assert expand_hostlist(text) == cluster.command("scontrol", "show", "hostnames", text).split(), text


def test_srun_starts_the_doctor_on_all_nodes_of_a_job(cluster):
    doctor = [sys.executable, "-m", "megatron_sao.cli.doctor", "configs/local.toml"]
    command = ["srun", "--nodes=3", "--ntasks-per-node=1", "--mpi=none", *doctor]
    cluster.wait_until_idle()
    try:
        done = subprocess.run(command, cwd=CLONE, env={**os.environ, **cluster.env}, capture_output=True, text=True,
                              timeout=DOCTOR_TIMEOUT_S)  # fmt: skip
    except subprocess.TimeoutExpired as error:
        state = cluster.command("squeue") + cluster.command("sinfo", "--long", "--Node")
        raise AssertionError(f"{error}:\n{error.stdout}\n{error.stderr}\n{state}") from None
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("missing for a GPU node:") == 1, "one node speaks for all"
    said = " ".join(done.stdout.split())
    assert "ok sum over ranks T+E 3 ranks " in said and " 3 host(s): " in said and " 0 fault; " in said, done.stdout
