"""The weight-transfer backend "sao" of a vLLM server: an engine worker joins the weight group and takes pushes.

Owns: `register` (entry point of the group `vllm.general_plugins`), `WorkerExtension`, `SaoWeightTransferEngine`,
`BACKEND`. Beside the program of the server (rollout/vllm_server.py) the only module that imports vLLM (checked with
0.32); it runs inside the worker processes of the server.
Invariants:
- one start_weight_update, one update_weights, one finish_weight_update make a push; the update carries all buckets;
- a push is accepted only if it delivers exactly the tensors of the model folder the engine was started from, and every
  module with parameters received some; only then does finish_weight_update succeed and vLLM publish the version;
- the published policy_version never falls;
- a worker gets only the rows that its kind loads; the others are NaN, and a push after which a module holds NaN is
  refused, so that a wrong row in `engine_layout` cannot become wrong weights;
- after a failed update the engine must not serve: part of its modules wait for weights. The next start cleans up, and
  a whole push makes it right again.
"""

import base64
import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.distributed.utils import get_pp_indices
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.v1.executor.multiproc_executor import WorkerProc
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from megatron_sao.errors import CheckpointError, ProtocolError
from megatron_sao.transport.disk import make_receiver
from megatron_sao.transport.engine_layout import EngineLayout
from megatron_sao.transport.group import WeightGroup, weight_group
from megatron_sao.transport.hf_shapes import read_shapes
from megatron_sao.transport.plan import PushPlan, decode_plan, first_lines, name_faults
from megatron_sao.transport.receiver import NamedTensors, WeightReceiver
from megatron_sao.transport.sender import holds_nan

BACKEND = "sao"


# Calls in which all workers of an engine fail or none: each compares the same things, or the weight group tells them.
WEIGHT_CALLS = (
    "init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update",
    "shutdown_weight_transfer_engine",
)  # fmt: skip


def _let_the_last_worker_report() -> None:
    """In a worker process: answer a failed weight call as if nothing was wrong, except on the last worker.

    Symptom without it: the executor of several workers (vLLM 0.32, multiproc_executor.py) reads the answers in the
    order of the workers and stops at the first failure. The other answers stay in their queues and are taken for those
    of the next calls, so that a worker that fails then is believed to have succeeded, and the next good call fails. Can
    go when the executor reads all answers.
    """
    execute, handle = WorkerProc._execute_worker_rpc, WorkerProc.handle_output

    def execute_worker_rpc(self: WorkerProc, request: tuple) -> None:
        self._is_weight_call = request[0] in WEIGHT_CALLS
        execute(self, request)

    def handle_output(self: WorkerProc, output: Any) -> None:
        is_last = self.rank == self.worker.vllm_config.parallel_config.world_size - 1
        handle(self, None if isinstance(output, Exception) and self._is_weight_call and not is_last else output)

    WorkerProc._execute_worker_rpc, WorkerProc.handle_output = execute_worker_rpc, handle_output


def _let_an_update_start_again() -> None:
    """In a worker process: an update that was started and never ended does not stand in the way of the next one.

    Symptom without it: where one engine of several fails to start, or the trainer dies before the end of a push, the
    others refuse every later start until they are restarted (vLLM 0.32, gpu_worker.py). `start_weight_update` below
    brings the modules of the abandoned update back. Can go when vLLM lets an update be abandoned.
    """
    start = Worker._start_weight_update

    def start_again(self: Worker, *arguments: Any, **options: Any) -> None:
        self._weight_update_active = False
        start(self, *arguments, **options)

    Worker._start_weight_update = start_again


def _let_a_cpu_compute_with_experts_of_its_own() -> None:
    """In a worker process on a CPU: expert parallelism, with the numbers that experts have on this worker.

    Symptom without it: a segmentation fault in the first step, which the engine reports as "cancelled" (vLLM 0.32,
    experts/cpu_moe.py: `apply` leaves `expert_map` out, and the kernel takes the model's numbers for the worker's). Can
    go when it uses the map.
    """
    apply = CPUUnquantizedExperts.apply
    signature = inspect.signature(apply)

    def apply_own(*given: Any, **named: Any) -> None:
        bound = signature.bind(*given, **named).arguments
        expert_map = bound["expert_map"]
        if expert_map is not None:
            own = expert_map[bound["topk_ids"].long()]
            bound["topk_weights"] = bound["topk_weights"].masked_fill(own < 0, 0)
            bound["topk_ids"] = own.clamp(min=0).to(bound["topk_ids"].dtype)
        apply(**bound)

    CPUUnquantizedExperts.apply = apply_own


def _let_later_stages_run_without_a_warm_up() -> None:
    """In a worker process: pipeline parallelism on a CPU.

    Symptom without it: an AssertionError in the first step. The buffers that take what the stage before sends are made
    in the warm-up, which a CPU that compiles nothing leaves out (vLLM 0.32, cpu_worker.py, gpu_model_runner.py). Can
    go when they are made elsewhere.
    """
    gather = GPUModelRunner.sync_and_gather_intermediate_tensors

    def made_and_gathered(self: GPUModelRunner, *given: Any, **named: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return gather(self, *given, **named)

    GPUModelRunner.sync_and_gather_intermediate_tensors = made_and_gathered


def _let_a_cpu_rotate_parts_of_a_tensor() -> None:
    """In a worker process on a CPU: rotary positions of latent attention (MLA), whose queries are part of a tensor.

    Symptom without it: log-probs of deepseek_v3 are off by some hundredths, and others with other tensor parallelism.
    The kernel takes its tensors for contiguous (vLLM 0.32, rotary_embedding/base.py). Can go when it does not.
    """
    rotate = RotaryEmbedding.forward_cpu

    def rotate_any(self: RotaryEmbedding, positions: torch.Tensor, query: torch.Tensor, key: Any = None) -> Any:
        is_whole = query.is_contiguous() and (key is None or key.is_contiguous())
        return rotate(self, positions, query, key) if is_whole else self.forward_native(positions, query, key)

    RotaryEmbedding.forward_cpu = rotate_any


def register() -> None:
    """Make the backend known to vLLM. Runs in every process of the server, more than once in some."""
    if BACKEND not in WeightTransferEngineFactory._registry:  # register_engine refuses a second time
        WeightTransferEngineFactory.register_engine(BACKEND, SaoWeightTransferEngine)


class WorkerExtension:
    """For `--worker-extension-cls`: vLLM imports this module in each worker and thereby registers the backend.

    So a clone on PYTHONPATH is enough; where the package is installed, the entry point does the same.
    """


@dataclass
class SaoInitInfo(WeightTransferInitInfo):
    """Body of /init_weight_transfer_engine (`init_info`)."""

    master_address: str
    master_port: int
    rank_offset: int  # rank of this engine's first worker in the weight group; >= number of trainer ranks
    world_size: int  # trainer ranks and all workers of all engines
    plan: str  # encode_plan(plan) in base64
    plan_hash: str
    backend: str = "gloo"
    timeout_s: float = 120.0


@dataclass
class SaoUpdateInfo(WeightTransferUpdateInfo):
    """Body of /update_weights (`update_info`)."""

    policy_version: int
    plan_hash: str


@dataclass
class _Update:
    """One push in progress."""

    moe_kernels: list[tuple[Any, Any]] = field(default_factory=list)  # (quant method, kernel it had)
    tied_modules: list[torch.nn.Module] = field(default_factory=list)  # served by the parameters of another module
    watched: list[QuantizeMethodBase] = field(default_factory=list)  # tell of poison in what they process
    poisoned: list[str] = field(default_factory=list)  # modules that hold NaN
    is_finalized: bool = False  # the modules have left the loading state
    received_version: int | None = None


class SaoWeightTransferEngine(WeightTransferEngine[SaoInitInfo, SaoUpdateInfo]):
    """One worker's end of the weight group. vLLM makes it, and calls it between two model steps."""

    init_info_cls = SaoInitInfo
    update_info_cls = SaoUpdateInfo
    supports_draft_weight_update = False

    _group: WeightGroup | None = None
    _receiver: WeightReceiver | None = None
    _plan: PushPlan | None = None
    _plan_hash: str = ""
    _update: _Update | None = None  # None = the model is whole
    _published_version: int = -1

    def init_transfer_engine(self, init_info: SaoInitInfo) -> None:
        """Check the plan against the model folder and join the group. A later call replaces the earlier group."""
        self.shutdown()
        plan = decode_plan(base64.b64decode(init_info.plan))
        if plan.hash != init_info.plan_hash:
            raise ProtocolError(f"the push plan hashes to {plan.hash}, the trainer says {init_info.plan_hash}")
        self._check_names(plan)
        self._check_layout(plan.engine)
        config = self.parallel_config
        worker = config.data_parallel_index * config.world_size + config.rank
        self._group = weight_group(
            init_info.master_address, init_info.master_port, init_info.rank_offset + worker, init_info.world_size,
            backend=init_info.backend, timeout_s=init_info.timeout_s,
            device="cpu" if init_info.backend == "gloo" else self.device,
        )
        self._receiver = make_receiver(self._group, plan)
        self._plan = plan
        self._plan_hash = plan.hash

    def start_weight_update(self) -> None:
        """Put the modules into loading state; the worker has stopped between two steps (the scheduler paused it)."""
        if self._receiver is None:
            raise ProtocolError("start_weight_update came before init_weight_transfer_engine")
        if self._update is not None:
            # The last push failed: modules hold half of its tensors. Starting over them would mix two pushes without
            # an error, so bring them back to a loadable state first (vLLM 0.32, reload/layerwise.py).
            self._finalize()
        self._update = _Update(self._drop_cpu_moe_kernels())
        if self._plan.engine.num_workers > 1:
            self._watch_for_poison()
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class goes on to synchronise an accelerator and raises where there is none; the weight group waits
        # for its own device already.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: SaoUpdateInfo) -> None:
        """Take part in one whole push."""
        if self._receiver is None or self._update is None:
            raise ProtocolError("update_weights came before start_weight_update")
        self._receiver.receive(
            update_info.policy_version, load=self._load, verify=self._verify, fault=self._fault(update_info)
        )
        self._update.received_version = update_info.policy_version

    def finish_weight_update(self) -> None:
        """Make the received weights the ones that serve. vLLM publishes the version after this succeeded."""
        if self._update is None or self._update.received_version is None:
            raise ProtocolError("finish_weight_update came, but no whole push has arrived; no version is published")
        self._published_version = self._update.received_version
        self._update = None

    def shutdown(self) -> None:
        """Leave the weight group; the engine keeps serving."""
        if self._group is not None:
            self._group.close()
        self._group = self._receiver = None

    def _fault(self, update_info: SaoUpdateInfo) -> str | None:
        """Why this worker cannot take that push, or None."""
        if update_info.plan_hash != self._plan_hash:
            return f"the scheduler announced plan {update_info.plan_hash}, this engine joined with {self._plan_hash}"
        # Equal is allowed: a push that failed after this engine had published is repeated with the same weights.
        if update_info.policy_version < self._published_version:
            return (f"policy_version must not fall: this engine already serves {self._published_version}, "
                    f"{update_info.policy_version} was announced")
        if self._update.received_version is not None:
            return "this push has already arrived; finish_weight_update must come before the next one"
        return None

    def _load(self, tensors: NamedTensors) -> None:
        self.model.load_weights((name, tensor.to(self.device)) for name, tensor in tensors)

    def _verify(self) -> None:
        """All tensors were loaded: make them the ones that serve, and see that they are whole.

        Before the end of the push, so that the other ranks hear of what is wrong; a version is published only after it.
        """
        self._check_every_module()
        self._finalize()
        poisoned = self._update.poisoned + self._poisoned_without_method()
        if poisoned:
            raise ProtocolError(
                f"{len(poisoned)} modules of worker {self._receiver.kind} hold NaN: vLLM loaded rows that the table in "
                "transport/engine_layout.py does not send to this worker:\n"
                f"{first_lines(poisoned)}"
            )

    def _watch_for_poison(self) -> None:
        """Look at the parameters of each module when all are loaded and before they are packed or quantised.

        A hook must not raise: a module left half-way through its processing would serve garbage after the next push.
        """
        names = {module: name for name, module in self.model.named_modules()}

        def watch(method: QuantizeMethodBase) -> None:
            process = method.process_weights_after_loading

            def look_and_process(layer: torch.nn.Module) -> None:
                if any(p is not None and not p.is_meta and holds_nan(p.data) for p in layer._parameters.values()):
                    self._update.poisoned.append(names.get(layer, type(layer).__name__))
                process(layer)

            method.process_weights_after_loading = look_and_process
            self._update.watched.append(method)

        for module in names:
            method = getattr(module, "quant_method", None)
            if isinstance(method, QuantizeMethodBase) and not any(method is m for m in self._update.watched):
                watch(method)

    def _poisoned_without_method(self) -> list[str]:
        """Names of the modules whose parameters serve as they were loaded, and hold NaN."""
        if self._plan.engine.num_workers == 1:
            return []
        return [
            name for name, module in self.model.named_modules()
            if not isinstance(getattr(module, "quant_method", None), QuantizeMethodBase)
            and any(p is not None and not p.is_meta and holds_nan(p.data) for p in module._parameters.values())
        ]

    def _finalize(self) -> None:
        """Process what was loaded and leave the loading state; modules that got nothing keep their old weights."""
        if self._update.is_finalized:
            return
        finalize_layerwise_reload(self.model, self.model_config)
        for quant_method, kernel in self._update.moe_kernels:
            if quant_method.moe_kernel is None:
                quant_method.moe_kernel = kernel
        if self.device.type == "cpu":
            # A CPU computes a tied head from a packed copy of the embedding (vLLM 0.32), which a reload does not renew:
            # fluent garbage without this.
            for module in self._update.tied_modules:
                module.quant_method.process_weights_after_loading(module)
        for method in self._update.watched:
            del method.process_weights_after_loading  # the class's own serves again
        self._update.is_finalized = True

    def _drop_cpu_moe_kernels(self) -> list[tuple[Any, Any]]:
        """On a CPU, forget the MoE kernels so that the reload packs the new expert weights.

        Symptom without it: experts compute with unpacked weights, fluent garbage and no error. vLLM 0.32 (unquantized
        CPU MoE) packs only while `moe_kernel` is None, which is the first load. Can go when a reload packs by itself.
        """
        if self.device.type != "cpu":
            return []
        dropped = []
        for module in self.model.modules():
            quant_method = getattr(module, "quant_method", None)
            if getattr(quant_method, "unquantized_backend", None) is not None:
                dropped.append((quant_method, quant_method.moe_kernel))
                quant_method.moe_kernel = None
        return dropped

    def _check_layout(self, layout: EngineLayout) -> None:
        """The plan must be made for engines as this one is: a worker of another kind would get the wrong rows."""
        config, stages = self.parallel_config, get_pp_group()
        faults = [
            f"{name} is {here} here, {planned} in the plan (engine.{name})"
            for name, here, planned in (
                ("tensor_parallel", config.tensor_parallel_size, layout.tensor_parallel),
                ("pipeline_parallel", config.pipeline_parallel_size, layout.pipeline_parallel),
                ("data_parallel", config.data_parallel_size, layout.data_parallel),
                ("expert_parallel", bool(config.enable_expert_parallel), layout.expert_parallel),
            )
            if here != planned
        ]
        rank = stages.rank_in_group * config.tensor_parallel_size + get_tensor_model_parallel_rank()
        if config.rank != rank or config.world_size != config.tensor_parallel_size * config.pipeline_parallel_size:
            faults.append(f"worker {config.rank} of {config.world_size} has the place {rank} of stages and tensor "
                          "parallel ranks: there is an axis that no plan knows")
        if config.enable_expert_parallel and (config.enable_eplb or config.expert_placement_strategy != "linear"):
            faults.append("experts do not stand in their order here (expert_placement_strategy, enable_eplb)")
        if layout.pipeline_parallel > 1 and not faults:
            here = get_pp_indices(layout.num_layers, stages.rank_in_group, stages.world_size)
            planned = tuple(layout.stage_starts[stages.rank_in_group :][:2])
            if here != planned:
                faults.append(f"stage {stages.rank_in_group} has the layers {here} here, {planned} in the plan")
        if faults:
            raise ProtocolError("the push plan does not fit the layout of this engine: " + "; ".join(faults))

    def _check_names(self, plan: PushPlan) -> None:
        """The plan must deliver what the engine was loaded from: then no module can be left with old weights."""
        try:
            held = read_shapes(self.model_config.model)
        except CheckpointError as error:
            raise ProtocolError(f"cannot compare the push plan with the engine's model folder: {error}") from error
        faults = name_faults(plan.expected, held, plan.excluded)
        if faults:
            raise ProtocolError(f"the push plan does not fit the model folder {self.model_config.model}:\n"
                                f"{first_lines(faults)}")

    def _check_every_module(self) -> None:
        """Raise if a module with parameters received none of them, or only some.

        Attention layers hold only scales. A module that shares its parameters with one that was loaded (tied head) is
        served by it. Padding receives nothing either, so a half-filled module is a fault only where the plan leaves
        tensors of the model folder out: then it may be one of those that is missing.
        """
        empty: list[tuple[str, torch.nn.Module, set[int]]] = []
        faults: list[str] = []
        partial: list[str] = []
        loaded: set[int] = set()  # addresses of the parameters that serve
        for name, module in self.model.named_modules():
            info = get_layerwise_info(module)
            waits = info.can_load()  # not processed yet; its parameters now stand on the meta device
            if waits and not any(p is not None and p.numel() for p in module._parameters.values()):
                continue
            if is_deferred_attention_layer(module):
                continue
            serving = info.kernel_tensors[0] if waits else module._parameters  # may be empty: a CPU packs them away
            addresses = {p.data_ptr() for p in serving.values() if p is not None and p.numel()}
            if waits and not info.load_numel:
                empty.append((name, module, addresses))
                continue
            loaded |= addresses
            is_padded = isinstance(module, VocabParallelEmbedding)
            if waits and info.load_numel < info.load_numel_total and not is_padded:
                partial.append(f"{name} received {info.load_numel} of {info.load_numel_total} elements")
        for name, module, addresses in empty:
            if addresses and addresses <= loaded:
                self._update.tied_modules.append(module)
            else:
                faults.append(f"{name} received none")
        if self._plan.excluded:
            faults += partial
        if faults:
            raise ProtocolError(f"{len(faults)} modules did not receive their weights:\n{first_lines(faults)}")


_let_the_last_worker_report()
_let_an_update_start_again()
_let_a_cpu_compute_with_experts_of_its_own()
_let_later_stages_run_without_a_warm_up()
_let_a_cpu_rotate_parts_of_a_tensor()
register()
