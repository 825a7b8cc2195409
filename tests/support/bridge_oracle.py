"""Megatron-Bridge's word on a conversion: run as a script, with `bridge_folder` first on PYTHONPATH.

It wants transformer-engine, of which it uses classes to ask what a module is: empty ones do where it is absent.
"""

import importlib.machinery
import json
import sys
import types
from pathlib import Path

import torch


_MTP_LAYER = "model.layers.4"  # of tests/support/families.py


def bridge_folder() -> Path:
    """Where launch/env.sh installs Megatron-Bridge, apart from all else: its antlr4 is older than that of others."""
    return Path(sys.prefix) / "bridge"


class _EmptyType(type):
    def __getattr__(cls, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return _EmptyType(name, (), {})


class _EmptyModule(types.ModuleType):
    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return _EmptyType(name, (), {})


def _stand_in_for_transformer_engine() -> None:
    import megatron.core.extensions.transformer_engine  # noqa: F401  finds it absent, before it seems to be there

    for name in ("transformer_engine", "transformer_engine.pytorch"):
        module = sys.modules[name] = _EmptyModule(name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    sys.modules["transformer_engine"].pytorch = sys.modules["transformer_engine.pytorch"]
    sys.modules["transformer_engine"].__version__ = "0.0"


def _add_what_bridge_lacks() -> None:
    """megatron-bridge 0.6.2: GLM-4.5's experts have names for transformer-engine's grouped modules only."""
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
    from megatron.bridge.models.conversion.param_mapping import AutoMapping, GatedMLPMapping
    from megatron.bridge.models.glm.glm45_bridge import GLM45Bridge

    own = GLM45Bridge.mapping_registry

    def with_experts(self) -> MegatronMappingRegistry:
        mappings = list(own(self).mappings)
        for layer, hf_layer in (("decoder.layers.*", "model.layers.*"), ("mtp.layers.0.mtp_model_layer", _MTP_LAYER)):
            experts, hf_experts = f"{layer}.mlp.experts.local_experts.*.", f"{hf_layer}.mlp.experts.*."
            gate, up = f"{hf_experts}gate_proj.weight", f"{hf_experts}up_proj.weight"
            mappings.append(GatedMLPMapping(megatron_param=f"{experts}linear_fc1.weight", gate=gate, up=up))
            mappings.append(
                AutoMapping(megatron_param=f"{experts}linear_fc2.weight", hf_param=f"{hf_experts}down_proj.weight")
            )
        return MegatronMappingRegistry(*mappings)

    GLM45Bridge.mapping_registry = with_experts
    AutoMapping.register_module_type("ReplicatedLinear", "replicated")


def main(cases: list[tuple[str, str, str]]) -> None:
    """For each (HF folder, checkpoint, file): load the checkpoint into a model, let Bridge export it into the file.

    Prints a JSON list: for each, the tensors of a model that Bridge filled from the HF folder which differ from ours.
    """
    import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
    from megatron_sao.config import load_config
    from megatron_sao.convert.family import read_shape
    from megatron_sao.models.build import build_model
    from megatron_sao.models.checkpoint import load_saved_weights
    from megatron_sao.models.hf_folder import HFFolder
    from tests.support.alone import start_alone

    _stand_in_for_transformer_engine()
    from megatron.bridge import AutoBridge
    from safetensors.torch import save_file

    _add_what_bridge_lacks()
    config = load_config(None, [])
    start_alone(config)
    differ = []
    for folder, checkpoint, file in cases:
        hf = HFFolder(folder)
        shape = read_shape(hf.config)
        with_mtp = shape.num_mtp_layers > 0
        ours, theirs = (
            build_model("policy", hf.config, config.parallel, torch.float32, with_mtp=with_mtp) for _ in range(2)
        )
        load_saved_weights(ours, shape, checkpoint)
        bridge = AutoBridge.from_hf_pretrained(folder)
        bridge.hf_pretrained.config.indexer_rope_interleave = True  # GLM-5's, which transformers 5.19 leaves out
        bridge.load_hf_weights(theirs)
        found = theirs[0].state_dict()
        tensors = {name: t for name, t in ours[0].state_dict().items() if torch.is_tensor(t)}
        differ.append([name for name, t in tensors.items() if not torch.equal(t, found[name])])
        exported = bridge.export_hf_weights(ours, cpu=True, show_progress=False)
        save_file({name: tensor.contiguous().clone() for name, tensor in exported}, file)
    print(json.dumps(differ))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
