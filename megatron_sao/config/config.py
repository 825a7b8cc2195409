"""The whole configuration: one field per section."""

from megatron_sao.config.algo import Algo
from megatron_sao.config.checkpoint import Checkpoint
from megatron_sao.config.engine import Engine
from megatron_sao.config.model import Model
from megatron_sao.config.parallel import Parallel
from megatron_sao.config.placement import Placement
from megatron_sao.config.policy import Policy
from megatron_sao.config.push import Push
from megatron_sao.config.run import Run
from megatron_sao.config.sampling import Sampling
from megatron_sao.config.schedule import Schedule
from megatron_sao.config.section import Section
from megatron_sao.config.task import Task
from megatron_sao.config.value import Value
from megatron_sao.config.warm_start import WarmStart


class Config(Section):
    """Everything a run depends on. Built by `load_config`, which alone checks how sections fit together."""

    run: Run = Run()
    model: Model = Model()
    warm_start: WarmStart = WarmStart()
    task: Task = Task()
    sampling: Sampling = Sampling()
    engine: Engine = Engine()
    parallel: Parallel = Parallel()
    placement: Placement = Placement()
    algo: Algo = Algo()
    policy: Policy = Policy()
    value: Value = Value()
    schedule: Schedule = Schedule()
    push: Push = Push()
    checkpoint: Checkpoint = Checkpoint()
