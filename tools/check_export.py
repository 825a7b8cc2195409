"""Does an exported policy do what the trained one did? A fresh engine on RUN/export against RUN/greedy.json.

    source launch/env.sh; python tools/check_export.py runs/local [--dry-run]

Starts one vLLM server on the exported folder, continues greedily the prompts that the engines of the run continued
after the last push, and prints

    CHECK export prompts=32 equal=32 max_logp_diff=0.0e+00

Exit code 0 only if every output is equal and no log-prob differs by more than 1e-4.
"""

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec

from megatron_sao.cli.kept_engine import engine_settings
from megatron_sao.cli.options import run_command
from megatron_sao.cli.files import EXPORT_FOLDER
from megatron_sao.config import load_config
from megatron_sao.errors import ConfigError
from megatron_sao.rollout.engine_client import EngineClient
from megatron_sao.rollout.engine_process import EngineProcess
from megatron_sao.rollout.greedy import GREEDY_FILE, Continuation, GreedyRecord, compare, continue_greedily
from megatron_sao.transport.hf_shapes import check_model_folder

MAX_LOGP_DIFF = 1e-4


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_folder", metavar="RUN_FOLDER", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="check that all is there, start nothing, and exit")
    options = parser.parse_args(argv)
    run_folder = options.run_folder
    record = _read_record(run_folder / GREEDY_FILE)
    config = load_config(run_folder / "config.toml")
    if options.dry_run:
        num_tensors = len(check_model_folder(run_folder / EXPORT_FOLDER))
        print(
            f"dry run, nothing started. One engine on {run_folder / EXPORT_FOLDER} ({num_tensors} tensors) would"
            f" continue {len(record.continuations)} prompts of version {record.policy_version}"
        )
        return 0
    with EngineProcess(
        engine_settings(config, 0, run_folder / EXPORT_FOLDER, run_folder / "logs" / "check_export.log", port=0)
    ).start() as engine:
        engine.wait_ready()
        fresh = asyncio.run(_continue(engine.url, record))
    num_equal, max_logp_diff = compare(record.continuations, fresh)
    print(f"CHECK export prompts={len(fresh)} equal={num_equal} max_logp_diff={max_logp_diff:.1e}")
    return int(num_equal < len(fresh) or max_logp_diff > MAX_LOGP_DIFF)


def _read_record(path: Path) -> GreedyRecord:
    try:
        return msgspec.json.decode(path.read_bytes(), type=GreedyRecord)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); a run writes it at its end") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not what a run writes: {error}") from error


async def _continue(url: str, record: GreedyRecord) -> list[Continuation]:
    async with EngineClient(url) as client:
        prompts = [continuation.prompt_ids for continuation in record.continuations]
        return await continue_greedily(
            client, prompts, max_tokens=record.max_tokens, stop_token_ids=record.stop_token_ids
        )


if __name__ == "__main__":
    run_command(main)
