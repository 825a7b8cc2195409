"""Three lists of names agree for every family: of Megatron, of config.json, and of what transformers writes."""

import pytest

from megatron_sao.convert.expected import check_tensors, expected_tensors
from megatron_sao.convert.family import FAMILIES, read_shape
from megatron_sao.convert.names import lookup
from megatron_sao.errors import CheckpointError
from megatron_sao.transport.hf_shapes import read_shapes
from tests.support import families
from tests.support.families import make_family_folder, read_config, reference

IRREGULAR = ["full", "shared", "full", "shared"]
CASES = {
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {}),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe air": ("glm4_moe", {"attention_bias": False, "use_qk_norm": False, "n_shared_experts": 2}),
    "deepseek_v3": ("deepseek_v3", {"first_k_dense_replace": 2}),
    "glm_moe_dsa": ("glm_moe_dsa", {}),
    "glm_moe_dsa schedule": ("glm_moe_dsa", {"index_topk_freq": 2, "index_skip_topk_offset": 2}),
    "glm_moe_dsa irregular": ("glm_moe_dsa", {"indexer_types": IRREGULAR}),
}
SETS = [(case, False) for case in CASES] + [(c, True) for c in CASES if CASES[c][0] in families.FAMILIES_WITH_MTP]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = {}

    def get(case, mtp):
        if (case, mtp) not in made:
            family, fields = CASES[case]
            path = tmp_path_factory.mktemp(case.replace(" ", "_"))
            made[case, mtp] = make_family_folder(family, path, mtp=mtp, seed=1, **fields)
        return made[case, mtp]

    return get


def megatron_names(shape, *, fused, with_mtp):
    """Every tensor of a model as Megatron names it; `fused`: transformer-engine's modules, else the local ones."""
    names = ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight"]
    names += [] if shape.is_tied else ["output_layer.weight"]
    for layer in range(shape.num_layers):
        names += [f"decoder.layers.{layer}.{name}" for name in in_layer(shape, layer, fused)]
    for number in range(shape.num_mtp_layers if with_mtp else 0):
        inner = "transformer_layer" if fused else "mtp_model_layer"
        here = [f"{inner}.{name}" for name in in_layer(shape, shape.num_layers + number, fused)]
        here += [f"{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "final_layernorm")]
        names += [f"mtp.layers.{number}.{name}" for name in here]
    return names


def in_layer(shape, layer, fused):
    names = ["linear_proj.weight"]
    if shape.mla:
        names += [f"linear_{part}_{way}_proj.weight" for part in ("q", "kv") for way in ("down", "up")]
        names += [f"linear_{p}_up_proj.layer_norm_weight" if fused else f"{p}_layernorm.weight" for p in ("q", "kv")]
    else:
        names += ["linear_qkv.weight"] + (["linear_qkv.bias"] if shape.has_qkv_bias else [])
        names += ["q_layernorm.weight", "k_layernorm.weight"] if shape.has_qk_norm else []
    if shape.has_indexer(layer):
        parts = ["linear_wq_b.weight", "linear_wk.weight", "k_norm.weight", "k_norm.bias", "linear_weights_proj.weight"]
        names += [f"core_attention.indexer.{part}" for part in parts]
    names = [f"self_attention.{name}" for name in names]
    fused_input = fused and not shape.mla
    names.append("self_attention.linear_qkv.layer_norm_weight" if fused_input else "input_layernorm.weight")
    if shape.is_dense(layer):
        names += ["mlp.linear_fc1.weight", "mlp.linear_fc2.weight"]
        return [*names, "mlp.linear_fc1.layer_norm_weight" if fused else "pre_mlp_layernorm.weight"]
    names += ["pre_mlp_layernorm.weight", "mlp.router.weight"]
    names += ["mlp.router.expert_bias"] if shape.has_router_bias else []
    for fc in ("linear_fc1", "linear_fc2"):
        names += [f"mlp.shared_experts.{fc}.weight"] if shape.num_shared else []
        for expert in range(shape.num_experts):
            grouped, alone = f"{fc}.weight{expert}", f"local_experts.{expert}.{fc}.weight"
            names.append(f"mlp.experts.{grouped if fused else alone}")
    return names


def test_every_family_is_here():
    assert {family for family, _ in CASES.values()} == set(FAMILIES) == set(families.FAMILIES)


@pytest.mark.parametrize("case, mtp", SETS)
def test_expects_what_transformers_writes(folder, case, mtp):
    config, written = read_config(folder(case, mtp)), read_shapes(folder(case, mtp))
    assert read_shape(config).num_mtp_layers == int(mtp)
    assert expected_tensors(config, with_mtp=mtp) == written
    trunk = {name: size for name, size in written.items() if not name.startswith("model.layers.4.")}
    assert expected_tensors(config) == trunk and (trunk != written) == mtp


@pytest.mark.parametrize("fused", [False, True], ids=["local", "transformer-engine"])
@pytest.mark.parametrize("case, mtp", SETS)
def test_megatron_names_reach_every_hf_name_once(folder, case, mtp, fused):
    config = read_config(folder(case, mtp))
    shape = read_shape(config)
    reached = [hf for name in megatron_names(shape, fused=fused, with_mtp=mtp) for hf in lookup(name, shape).hf]
    assert len(reached) == len(set(reached))
    assert set(reached) == expected_tensors(config, with_mtp=mtp).keys()


@pytest.mark.parametrize("case", ["glm4_moe", "deepseek_v3"])
def test_transformers_own_mtp_model_finds_its_layer_under_our_names(folder, case):
    from transformers.modeling_layers import MtpModel

    model = reference(folder(case, True))
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.4\."]  # by this it finds MTP layers in a folder
    (layer,) = MtpModel.from_pretrained(model).layers  # raises when a tensor of the layer is not found
    held = families.load_file(folder(case, True) / "model.safetensors")
    found = {"enorm": layer.enorm, "hnorm": layer.hnorm, "eh_proj": layer.eh_proj, "shared_head.norm": layer.post_norm}
    for name, module in found.items():
        assert (module.weight == held[f"model.layers.4.{name}.weight"]).all(), name


def test_indexers_where_transformers_builds_them(folder):
    """The schedule and the list, read from the folder, against the modules of transformers' own class."""
    for case, full in (("glm_moe_dsa schedule", [0, 1, 3]), ("glm_moe_dsa irregular", [0, 2])):
        layers = reference(folder(case, True)).model.layers
        assert [n for n, layer in enumerate(layers) if layer.self_attn.indexer is not None] == full
        shape = read_shape(read_config(folder(case, True)))
        assert [n for n in range(5) if shape.has_indexer(n)] == [*full, 4], "the MTP layer has its own"


def test_more_experts_in_the_config_than_in_the_folder(folder):  # CKP-04
    config = read_config(folder("glm_moe_dsa", False)) | {"n_routed_experts": 12}
    held = read_shapes(folder("glm_moe_dsa", False))
    with pytest.raises(CheckpointError, match=r"gate.weight with shape \[8, 64\], but config.json says \[12, 64\]"):
        check_tensors(held, config, "here")
    held |= {f"model.layers.{n}.mlp.gate.weight": (12, 64) for n in range(1, 4)}
    held |= {f"model.layers.{n}.mlp.gate.e_score_correction_bias": (12,) for n in range(1, 4)}
    with pytest.raises(CheckpointError, match=r"lacks the tensor model.layers.1.mlp.experts.8.gate_proj.weight"):
        check_tensors(held, config, "here")


def test_an_mtp_layer_must_be_there_where_it_is_trained(folder):
    config, held = read_config(folder("glm4_moe", True)), read_shapes(folder("glm4_moe", True))
    check_tensors(held, config, "here", with_mtp=True)
    del held["model.layers.4.eh_proj.weight"]
    check_tensors(held, config, "here")
    with pytest.raises(CheckpointError, match=r"lacks the tensor model.layers.4.eh_proj.weight of shape \[64, 128\]$"):
        check_tensors(held, config, "here", with_mtp=True)
