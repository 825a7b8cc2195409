"""The engines of a run as whoever supervises them sees them: their settings, and a server that is kept alive."""

import time
from collections.abc import Callable
from pathlib import Path

from megatron_sao.config import Config
from megatron_sao.errors import EngineError
from megatron_sao.rollout.engine_process import EngineProcess, EngineSettings


def engine_settings(
    config: Config, number: int, model_folder: Path, log_path: Path, port: int | None = None
) -> EngineSettings:
    """Settings of engine `number` of a run; `port` instead of the run's own, 0 = a free one."""
    engine = config.engine
    return EngineSettings(
        model_folder=model_folder,
        log_path=log_path,
        host=engine.host,
        port=port if port is not None else engine.port + number if engine.port else 0,
        dtype=engine.dtype,
        quantization=engine.quantization,
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        kv_cache_bytes=engine.kv_cache_bytes,
        tensor_parallel=engine.tensor_parallel,
        pipeline_parallel=engine.pipeline_parallel,
        data_parallel=engine.data_parallel,
        expert_parallel=engine.expert_parallel,
        num_threads=config.run.threads_per_process,
        seed=config.run.seed,
        start_timeout_s=engine.start_timeout_s,
    )


class KeptEngine:
    """A server that is started again when it dies, once it was ready the first time.

    Args:
        process: just started.
        restarts: how many times.
        say: tells the user.
    """

    def __init__(self, process: EngineProcess, restarts: int, say: Callable[[str], None]):
        self.process = process
        self.is_ready = False
        self._say = say
        self._log_path = Path(process.settings.log_path)
        self._restarts = restarts
        self._num_restarts = 0
        self._was_ready = False
        self._started_s = time.monotonic()

    def check(self) -> None:
        """Effect: sees whether it has become ready; starts it again if it has died.

        Raises: EngineError when it was never ready in time, or has died too often.
        """
        try:
            if self.is_ready:
                self.process.check_alive()
            elif self.process.is_ready():
                self._say_that_it_is_ready()
        except EngineError as error:
            if not self._was_ready or self._num_restarts == self._restarts:
                raise
            self._start_again(str(error))

    def _say_that_it_is_ready(self) -> None:
        if self._was_ready:
            self._say(f"engine {self.process.url} is back; the next push takes it in")
        else:
            self._say(f"engine {self.process.url} ready after {time.monotonic() - self._started_s:.0f} s")
        self.is_ready = self._was_ready = True

    def _start_again(self, reason: str) -> None:
        self._num_restarts += 1
        self.is_ready = False
        self._say(f"{reason.splitlines()[0].rstrip(':')}; starting it again ({self._num_restarts} of {self._restarts})")
        self.process.start_again(self._log_path.with_suffix(f".{self._num_restarts}.log"))
