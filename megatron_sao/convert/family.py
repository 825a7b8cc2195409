"""What weight tables and model builders need to know of a HF model: small records read from `config.json`.

Every field that changes what a model computes is either read or refused: a field that is skipped would train another
model than the engine serves. There is no default for a size, and two places that disagree are an error.
"""

from dataclasses import dataclass
from typing import Any

from megatron_sao.config.parallel import Parallel
from megatron_sao.config.stages import stage_faults, stage_start_faults
from megatron_sao.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class MLAShape:
    """Sizes of multi-head latent attention."""

    q_rank: int
    kv_rank: int
    nope_dim: int  # per head, q and k without position
    rope_dim: int  # per head in q, once for all heads in k
    v_dim: int  # per head


@dataclass(frozen=True)
class IndexerShape:
    """Sizes of the sparse-attention indexer, and the layers that have one."""

    num_heads: int
    head_dim: int
    topk: int
    is_full: tuple[bool, ...]  # per decoder layer: computes its own top-k (else it reuses the one before)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes that decide names and rows of weights."""

    family: str  # HF model_type
    num_layers: int  # decoder layers, without MTP
    hidden: int
    num_heads: int
    num_kv_groups: int  # as many as heads with MLA
    head_dim: int  # of q and k; with MLA nope_dim + rope_dim
    vocab: int  # true size, without padding
    is_tied: bool  # output layer is the embedding
    ffn: int  # inner size of a dense MLP
    num_dense_layers: int  # the first ones; the rest have experts
    has_qkv_bias: bool = False
    has_qk_norm: bool = False  # of the heads; the norms of MLA's latents always exist
    num_experts: int = 0  # routed ones per layer; 0 = dense
    expert_ffn: int = 0
    num_shared: int = 0  # shared experts: one MLP of num_shared * expert_ffn
    has_router_bias: bool = False
    mla: MLAShape | None = None
    indexer: IndexerShape | None = None
    num_mtp_layers: int = 0  # what the config counts; the folder may hold them or not

    def is_dense(self, layer: int) -> bool:
        """Whether a layer (global number, MTP layers follow the decoder's) has a dense MLP."""
        return layer < self.num_dense_layers

    def has_indexer(self, layer: int) -> bool:
        """Whether a layer (global number) has an indexer of its own; an MTP layer always has."""
        return self.indexer is not None and (layer >= self.num_layers or self.indexer.is_full[layer])


@dataclass(frozen=True)
class Yarn:
    """YaRN's stretch of rotary positions."""

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float


@dataclass(frozen=True)
class Rope:
    """Rotary positions."""

    base: float
    share: float  # of the head dim that is rotated; MLA: of rope_dim, always 1
    yarn: Yarn | None


_WITH_ROUTER_BIAS = ("glm4_moe", "deepseek_v3", "glm_moe_dsa")  # sigmoid scores, shared experts, first layers dense
_WITH_MLA = ("deepseek_v3", "glm_moe_dsa")
MTP_COUNT = ("num_nextn_predict_layers", "num_mtp_layers")  # its field in config.json
FAMILIES = ("qwen3", "qwen3_moe", *_WITH_ROUTER_BIAS)

# Fields that change what the model computes and of which only some readings are built. Absent = the first of them.
_PLAIN_ROPE = {
    "rope_scaling.type": ("default",),
    "rope_scaling.rope_type": ("default",),
    "rope_parameters.type": ("default",),
    "rope_parameters.rope_type": ("default",),
}
_ALL_DIMS_ROTATED = {
    "partial_rotary_factor": (1,),
    "rope_scaling.partial_rotary_factor": (1,),
    "rope_parameters.partial_rotary_factor": (1,),
}
_ANY = {
    "hidden_act": ("silu",),
    "use_sliding_window": (False,),
    "mlp_bias": (False,),
    "quantization_config": (None,),  # tensors of a quantised folder have other names, shapes and types
    "rope_scaling.attention_factor": (None,),
    "rope_parameters.attention_factor": (None,),
    "rope_scaling.truncate": (True,),  # Megatron's latent attention rounds the range that YaRN stretches
    "rope_parameters.truncate": (True,),
}
_ROPE_PLACES = ("rope_scaling", "rope_parameters")  # transformers 5 reads the same fields in either
_ROPE_FIELDS = (
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings",
    "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate",
)  # fmt: skip
_QWEN3 = _PLAIN_ROPE | _ALL_DIMS_ROTATED | {
    "attention_bias": (False,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
}  # fmt: skip
_SIGMOID_ROUTER = {
    "norm_topk_prob": (True,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
}
_ROUTER_FIELDS = ("scoring_func", "topk_method")  # of families whose engine has a choice (vLLM 0.32, deepseek_v2.py)
_MLA = _SIGMOID_ROUTER | _ALL_DIMS_ROTATED | {"attention_bias": (False,), "rope_interleave": (True,)}
_YARN_TOO = {path: (*allowed, "yarn") for path, allowed in _PLAIN_ROPE.items()}
_ONLY = {
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3,
    "glm4_moe": _SIGMOID_ROUTER | _PLAIN_ROPE,
    "deepseek_v3": _MLA | _YARN_TOO,
    "glm_moe_dsa": _MLA | _PLAIN_ROPE | {"indexer_rope_interleave": (True,)},
}


def required(hf_config: dict[str, Any], name: str) -> Any:
    """A field of `config.json` that must be there: no silent default. Raises: CheckpointError."""
    if hf_config.get(name) is None:
        raise CheckpointError(f"config.json of model_type {hf_config.get('model_type')} lacks {name!r}")
    return hf_config[name]


def read_shape(hf_config: dict[str, Any]) -> ModelShape:
    """The `ModelShape` of a parsed `config.json`.

    Raises: CheckpointError for a family without a weight table, a missing field, two fields that disagree, or a
        feature that is not built (it would train another model than the engine serves).
    """
    family = hf_config.get("model_type")
    if family not in FAMILIES:
        raise CheckpointError(f"config.json: model_type = {family!r} has no weight table; known: {', '.join(FAMILIES)}")
    _refuse_unknown_rope_fields(hf_config)
    _refuse_what_is_not_built(hf_config, _ANY | _ONLY[family])
    heads, hidden = required(hf_config, "num_attention_heads"), required(hf_config, "hidden_size")
    sizes: dict[str, Any] = dict(
        family=family,
        num_layers=required(hf_config, "num_hidden_layers"),
        hidden=hidden,
        num_heads=heads,
        num_kv_groups=required(hf_config, "num_key_value_heads"),
        head_dim=hf_config.get("head_dim") or hidden // heads,
        vocab=required(hf_config, "vocab_size"),
        is_tied=bool(hf_config.get("tie_word_embeddings", False)),
        ffn=required(hf_config, "intermediate_size"),
        num_dense_layers=required(hf_config, "num_hidden_layers"),
    )
    if family == "qwen3_moe":
        # transformers 5 writes the second name
        sizes["num_experts"] = _one_value(hf_config, ("num_experts", "num_local_experts"), "the number of experts")
        sizes |= dict(num_dense_layers=0, expert_ffn=required(hf_config, "moe_intermediate_size"))
    if family.startswith("qwen3"):
        sizes["has_qk_norm"] = True
    if family == "glm4_moe":
        read_rope(hf_config)  # refuses a folder that does not say how much of a head is rotated
        sizes["has_qk_norm"] = bool(required(hf_config, "use_qk_norm"))
        sizes["has_qkv_bias"] = bool(required(hf_config, "attention_bias"))
    if family in _WITH_ROUTER_BIAS:
        sizes |= _experts_with_router_bias(hf_config)
    if family in _WITH_MLA:
        for name in _ROUTER_FIELDS:
            if hf_config.get(name) is None:
                raise CheckpointError(
                    f"config.json lacks {name!r}: transformers computes the same without, vLLM takes another router;"
                    f' add "{name}": "{_SIGMOID_ROUTER[name][0]}", which released folders of {family} have'
                )
        sizes |= _latent_attention(hf_config)
    if family == "glm_moe_dsa":
        sizes["indexer"] = _indexer(hf_config, sizes["num_mtp_layers"])
    return ModelShape(**sizes)


def layers_that_may_start_a_stage(shape: ModelShape) -> tuple[bool, ...]:
    """Per decoder layer, whether a pipeline stage may begin with it: a layer cannot share an indexer across stages."""
    return (True,) * shape.num_layers if shape.indexer is None else shape.indexer.is_full


def check_stage_starts(shape: ModelShape, parallel: Parallel) -> None:
    """Raises ConfigError when the layers cannot be cut into stages so, or a stage begins where none may."""
    why = "it takes its choice of tokens (top-k) from the layer before it, which does not cross stages"
    faults = stage_faults(shape.num_layers, parallel, "the model's num_hidden_layers") or stage_start_faults(
        shape.num_layers, parallel, layers_that_may_start_a_stage(shape), why
    )
    if faults:
        raise ConfigError("\n  ".join(faults))


def _refuse_what_is_not_built(hf_config: dict[str, Any], only: dict[str, tuple]) -> None:
    for path, allowed in only.items():
        found = _at(hf_config, path)
        if found is not None and found not in allowed:
            said = " or ".join(repr(value) for value in allowed)
            raise CheckpointError(f"config.json: {path} = {found!r} is not built here; allowed: {said}")


def _refuse_unknown_rope_fields(hf_config: dict[str, Any]) -> None:
    for place in _ROPE_PLACES:
        held = hf_config.get(place) or {}
        if not isinstance(held, dict):
            raise CheckpointError(f"config.json: {place} = {held!r} is no object of rotary fields")
        unknown = [name for name, value in held.items() if name not in _ROPE_FIELDS and value is not None]
        if unknown:
            raise CheckpointError(
                f"config.json: {place}.{unknown[0]} = {held[unknown[0]]!r} is not known here, and may change what the"
                f" model computes; known: {', '.join(_ROPE_FIELDS)}"
            )


def _experts_with_router_bias(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Sizes of GLM's and DeepSeek's experts, and of their MTP layers."""
    # "num_experts" may stand there too, a default of the config's class that is no fact of this model.
    experts, topk = required(hf_config, "n_routed_experts"), required(hf_config, "num_experts_per_tok")
    groups, chosen = hf_config.get("n_group") or 1, hf_config.get("topk_group") or 1
    if topk < 2:
        raise CheckpointError(
            f"config.json: num_experts_per_tok = {topk} is not built for {hf_config['model_type']}: Megatron does not"
            " normalise a single weight; allowed: 2 or more"
        )
    if experts % groups or chosen > groups:
        raise CheckpointError(
            f"config.json: n_routed_experts = {experts} cannot stand in n_group = {groups} of which topk_group ="
            f" {chosen} are chosen"
        )
    if chosen < groups and topk // chosen != 2:
        raise CheckpointError(
            f"config.json: num_experts_per_tok = {topk} with topk_group = {chosen} is not built here: Megatron scores a"
            f" group by its best {topk // chosen} experts, the engine by its best 2; allowed: {2 * chosen} or"
            f" {2 * chosen + 1} experts per token, or topk_group = n_group"
        )
    num_shared = required(hf_config, "n_shared_experts")
    if num_shared < 1:
        raise CheckpointError(f"config.json: n_shared_experts = {num_shared} is not built here; allowed: 1 or more")
    return dict(
        num_experts=experts,
        expert_ffn=required(hf_config, "moe_intermediate_size"),
        num_shared=num_shared,
        num_dense_layers=_dense_layers(hf_config),
        has_router_bias=True,
        num_mtp_layers=_one_value(hf_config, MTP_COUNT, "the number of MTP layers", absent=0),
    )


def _dense_layers(hf_config: dict[str, Any]) -> int:
    """How many of the first layers are dense: from their number, or from one kind for each layer."""
    layers, said = required(hf_config, "num_hidden_layers"), hf_config.get("first_k_dense_replace")
    kinds = hf_config.get("mlp_layer_types")
    if kinds is None:
        return min(required(hf_config, "first_k_dense_replace"), layers)
    first = next((i for i, kind in enumerate(kinds) if kind != "dense"), len(kinds))
    if kinds != ["dense"] * first + ["sparse"] * (layers - first):
        raise CheckpointError(
            f"config.json: mlp_layer_types = {kinds} is not built here; allowed: 'dense' for the first layers,"
            f" 'sparse' for the rest of the {layers}"
        )
    if said is not None and min(said, layers) != first:
        raise CheckpointError(
            f"config.json: first_k_dense_replace = {said}, but mlp_layer_types begins with {first} dense layers"
        )
    return first


def _latent_attention(hf_config: dict[str, Any]) -> dict[str, Any]:
    if hf_config.get("q_lora_rank") is None:
        raise CheckpointError("config.json: q_lora_rank = None (queries without a latent) is not built here; set it")
    heads, groups = hf_config["num_attention_heads"], hf_config["num_key_value_heads"]
    if heads != groups:
        raise CheckpointError(
            f"config.json: num_key_value_heads = {groups} with num_attention_heads = {heads} is not built for"
            f" multi-head latent attention; allowed: {heads}"
        )
    mla = MLAShape(
        q_rank=hf_config["q_lora_rank"],
        kv_rank=required(hf_config, "kv_lora_rank"),
        nope_dim=required(hf_config, "qk_nope_head_dim"),
        rope_dim=required(hf_config, "qk_rope_head_dim"),
        v_dim=required(hf_config, "v_head_dim"),
    )
    return dict(mla=mla, head_dim=mla.nope_dim + mla.rope_dim)  # "head_dim" of the config is another size here


def _indexer(hf_config: dict[str, Any], num_mtp: int) -> IndexerShape:
    return IndexerShape(
        num_heads=required(hf_config, "index_n_heads"),
        head_dim=required(hf_config, "index_head_dim"),
        topk=required(hf_config, "index_topk"),
        is_full=_full_indexer_layers(hf_config, num_mtp),
    )


_INDEXER_KINDS = {"full": True, "F": True, "shared": False, "S": False}


def _full_indexer_layers(hf_config: dict[str, Any], num_mtp: int) -> tuple[bool, ...]:
    """Which layers compute their own top-k: from a kind for each layer, or from a schedule. All that is said agrees."""
    layers = required(hf_config, "num_hidden_layers")
    said: dict[str, tuple[bool, ...]] = {}
    for name in ("indexer_types", "index_topk_pattern"):
        kinds = hf_config.get(name)
        if kinds is None:
            continue
        unknown = sorted(set(kinds) - set(_INDEXER_KINDS))
        if unknown:
            raise CheckpointError(f"config.json: {name} holds {unknown[0]!r}; allowed: {', '.join(_INDEXER_KINDS)}")
        if len(kinds) not in (layers, layers + num_mtp):
            raise CheckpointError(f"config.json: {name} speaks of {len(kinds)} layers, num_hidden_layers is {layers}")
        said[name] = tuple(_INDEXER_KINDS[kind] for kind in kinds[:layers])
    frequency = hf_config.get("index_topk_freq")
    if frequency is not None or not said:
        # 2 where absent: transformers and vLLM agree on it. Megatron's own default is another one.
        offset = hf_config.get("index_skip_topk_offset")
        offset = 2 if offset is None else offset
        said["index_topk_freq"] = tuple(
            max(layer - offset + 1, 0) % max(frequency or 1, 1) == 0 for layer in range(layers)
        )
    if len(set(said.values())) != 1:
        layer = next(i for i, kinds in enumerate(zip(*said.values(), strict=True)) if len(set(kinds)) > 1)
        views = ", ".join(f"{name}: {'full' if full[layer] else 'shared'}" for name, full in said.items())
        raise CheckpointError(f"config.json disagrees with itself about the indexer of layer {layer} ({views})")
    found = next(iter(said.values()))
    if not found[0]:
        raise CheckpointError("config.json: the first layer shares an indexer, but none comes before it; make it full")
    return found


def check_engine_reads_alike(hf_config: dict[str, Any]) -> None:
    """Refuse a `config.json` from which vLLM 0.32 would build another model than is trained, in silence.

    It does not know `indexer_types`, takes only "S" of `index_topk_pattern` for shared, and turns an indexer's rotary
    pairs the other way where `indexer_rope_interleave` is absent.
    Raises: CheckpointError.
    """
    shape = read_shape(hf_config)
    if shape.indexer is None:
        return
    pattern = hf_config.get("index_topk_pattern")
    frequency, offset = hf_config.get("index_topk_freq") or 1, hf_config.get("index_skip_topk_offset")
    offset = 2 if offset is None else offset
    for layer, is_full in enumerate(shape.indexer.is_full):
        if pattern is None:
            is_shared = max(layer - offset + 1, 0) % frequency != 0
        else:
            is_shared = layer < len(pattern) and pattern[layer] == "S"
        if is_shared is is_full:
            wanted = "".join("F" if full else "S" for full in shape.indexer.is_full)
            raise CheckpointError(
                f"config.json: vLLM would {'share' if is_shared else 'build'} the indexer of layer {layer}, which is"
                f" {'full' if is_full else 'shared'} here; add index_topk_pattern = {wanted!r} to that config.json"
            )
    if hf_config.get("indexer_rope_interleave") is not True:
        raise CheckpointError(
            "config.json lacks indexer_rope_interleave, which vLLM then takes for false; add it as true, which is what"
            " the model computes"
        )


def rope_base(hf_config: dict[str, Any]) -> float:
    """The rotary base, from every place where transformers versions keep it. Raises: as `_one_value`."""
    return float(_rope_value(hf_config, ("rope_theta", *_nested("rope_theta")), "the rotary base"))


def read_rope(hf_config: dict[str, Any]) -> Rope:
    """Rotary positions, from every place where transformers versions keep them.

    Raises: CheckpointError where places disagree or something is missing: for GLM-4.5 also the rotated share of a head.
    """

    def one(*names: str, absent: Any = None) -> Any:
        return _rope_value(hf_config, _nested(*names), names[0], absent)

    absent = None if hf_config.get("model_type") == "glm4_moe" else 1.0
    share_places = ("partial_rotary_factor", *_nested("partial_rotary_factor"))
    share = _rope_value(hf_config, share_places, "the rotated share of a head", absent)
    yarn = None
    if one("rope_type", "type", absent="default") == "yarn":
        yarn = Yarn(
            factor=float(one("factor")),
            original_positions=int(one("original_max_position_embeddings")),
            beta_fast=float(one("beta_fast", absent=32)),  # as transformers, vLLM and Megatron
            beta_slow=float(one("beta_slow", absent=1)),
            mscale=float(one("mscale")),
            mscale_all_dim=float(one("mscale_all_dim")),
        )
    return Rope(base=rope_base(hf_config), share=float(share), yarn=yarn)


def _nested(*names: str) -> tuple[str, ...]:
    return tuple(f"{place}.{name}" for place in _ROPE_PLACES for name in names)


def _rope_value(hf_config: dict[str, Any], paths: tuple[str, ...], what: str, absent: Any = None) -> Any:
    return _one_value({path: _at(hf_config, path) for path in paths}, paths, what, absent)


def _at(hf_config: dict[str, Any], path: str) -> Any:
    """The field at a path like "rope_scaling.factor"; None where it, or what should hold it, is absent."""
    found: Any = hf_config
    for key in path.split("."):
        found = (found or {}).get(key)
    return found


def _one_value(fields: dict[str, Any], names: tuple[str, ...], what: str, absent: Any = None) -> Any:
    """The one value that stands under `names`; `absent`, if given, where none does.

    Raises: CheckpointError when they disagree or all are absent: a default here would train a wrong model silently.
    """
    found = {name: fields[name] for name in names if fields.get(name) is not None}
    if not found and absent is not None:
        return absent
    if len(set(found.values())) != 1:
        said = ", ".join(f"{name} = {value}" for name, value in found.items()) or "nothing"
        raise CheckpointError(f"config.json gives {said} for {what}; it needs one of {', '.join(names)}, or equal ones")
    return next(iter(found.values()))
