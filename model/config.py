"""The architecture of a model, in the field names of Hugging Face's config.json."""

import dataclasses
import difflib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model.config_rules import architecture_faults

PRESETS_FOLDER = Path(__file__).resolve().parent / "presets"

# What a published config.json says about itself or its loader, and what has no effect on training here.
_IGNORED_KEYS = frozenset(
    "_name_or_path architectures auto_map aux_loss_alpha dtype ep_size head_dim num_experts num_local_experts "
    "output_router_logits pretraining_tp qk_head_dim quantization_config seq_aux torch_dtype transformers_version "
    "use_cache".split()
)
# Switches that the published models leave at one value; any other would be a different architecture.
_FIXED_KEYS: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "attention_dropout": (0, 0.0, None),
    "mlp_bias": (False, None),
    "moe_layer_freq": (1, None),
}
_ALIASES = {"num_mtp_layers": "num_nextn_predict_layers"}
# What a config.json that names only its family means (transformers' class of that family has no such field).
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True},
    "deepseek_v2": {"topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False},
    "deepseek": {
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "rope_interleave": False,
    },
}
_ARCHITECTURES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek": "DeepseekForCausalLM",
}


class ConfigError(ValueError):
    """An architecture that cannot work, or a config.json that cannot be read.

    Args:
        faults: every fault found, one line each, beginning with the field.
    """

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = list(faults)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One architecture; checks itself and names all its faults at once.

    Lengths are in tokens, sizes in elements. `None` means that the architecture lacks the part: no kv_lora_rank is
    plain multi-head attention, no q_lora_rank an uncompressed query, no n_routed_experts a dense model.

    Raises:
        ConfigError: with every fault, by field.
    Source: the published config.json of DeepSeek-V3, V2, V2-Lite and DeepSeekMoE 16B.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    model_type: str = "deepseek_v3"
    num_key_value_heads: int | None = None
    num_nextn_predict_layers: int = 0
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    n_routed_experts: int | None = None
    n_shared_experts: int = 0
    moe_intermediate_size: int | None = None
    num_experts_per_tok: int | None = None
    first_k_dense_replace: int = 0
    n_group: int = 1
    topk_group: int = 1
    topk_method: str = "noaux_tc"
    scoring_func: str = "sigmoid"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    hidden_act: str = "silu"
    max_position_embeddings: int = 4096
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_interleave: bool = True
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.006  # V3 sec. 4.2
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    bias_update_speed: float = 0.001  # gamma, V3 sec. 4.2
    balance_loss_alpha: float = 0.0001  # alpha of eq. 17, V3 sec. 4.2
    mtp_loss_weight: float = 0.3  # lambda of eq. 25, V3 sec. 4.2
    extras: dict[str, Any] = field(default_factory=dict)  # keys of other tools, written back as they came

    def __post_init__(self) -> None:
        faults = architecture_faults(dataclasses.asdict(self))
        if faults:
            raise ConfigError(faults)
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)

    @property
    def uses_latent_attention(self) -> bool:
        return self.kv_lora_rank is not None

    @property
    def rotary_dim(self) -> int:
        """Elements of each head that are rotated."""
        return self.qk_rope_head_dim or self.hidden_size // self.num_attention_heads

    @property
    def qk_head_dim(self) -> int:
        return (self.qk_nope_head_dim or 0) + self.rotary_dim

    @property
    def value_head_dim(self) -> int:
        return self.v_head_dim or self.qk_head_dim

    @property
    def balances_by_bias(self) -> bool:
        """Whether routers carry e_score_correction_bias (V3 sec. 2.1.2)."""
        return self.topk_method == "noaux_tc"

    def is_moe_layer(self, layer_index: int) -> bool:
        """Whether that layer's feed-forward part is a mixture of experts; MTP layers follow the last main one."""
        return self.n_routed_experts is not None and layer_index >= self.first_k_dense_replace

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ModelConfig":
        """Read a config.json's content, the published ones and transformers 5's unchanged.

        Raises:
            ConfigError: every fault, by field: misspelt keys, fixed switches, values that cannot work.
        """
        faults: list[str] = []
        known = {f.name for f in dataclasses.fields(cls)} - {"extras"}
        fields: dict[str, Any] = {}
        extras: dict[str, Any] = {}
        for key, value in values.items():
            key = _ALIASES.get(key, key)
            if key in _FIXED_KEYS:
                if value not in _FIXED_KEYS[key]:
                    faults.append(f"{key}: {value!r} is not supported; write {_FIXED_KEYS[key][0]!r}")
            elif key in known:
                if value is not None:
                    fields[key] = value
            elif key not in _IGNORED_KEYS and key != "rope_parameters":
                near = difflib.get_close_matches(key, known, n=1, cutoff=0.85)
                if near:
                    faults.append(f"{key}: unknown field; did you mean {near[0]}?")
                else:
                    extras[key] = value
        fields = _FAMILY_DEFAULTS.get(fields.get("model_type", "deepseek_v3"), {}) | fields
        _merge_rope(fields, values.get("rope_parameters"))
        for required in (f.name for f in dataclasses.fields(cls) if f.default is f.default_factory):
            fields.setdefault(required, None)
        try:
            config = cls(**fields, extras=extras)
        except ConfigError as error:
            raise ConfigError(faults + error.faults) from None
        if faults:
            raise ConfigError(faults)
        return config

    @classmethod
    def from_file(cls, path: str | Path) -> "ModelConfig":
        """Read a config.json. Raises ConfigError when it is absent, is not JSON, or cannot work."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError([f"{path}: cannot be read ({error.strerror})"]) from None
        except ValueError as error:
            raise ConfigError([f"{path}: not valid JSON ({error})"]) from None
        if not isinstance(values, dict):
            raise ConfigError([f"{path}: must hold a JSON object, not a {type(values).__name__}"])
        try:
            return cls.from_dict(values)
        except ConfigError as error:
            raise ConfigError([f"{path}: {fault}" for fault in error.faults]) from None

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json, as Hugging Face's classes and `from_dict` read it; absent parts are left out."""
        values: dict[str, Any] = {"architectures": [_ARCHITECTURES[self.model_type]]}
        values |= {key: value for key, value in dataclasses.asdict(self).items() if value is not None}
        extras = values.pop("extras")
        # transformers' classes have defaults of their own for these: an absent q_lora_rank would be 1536.
        written_out = ("q_lora_rank", "bos_token_id", "eos_token_id", "pad_token_id")
        return values | {key: getattr(self, key) for key in written_out} | extras


def _merge_rope(fields: dict[str, Any], rope_parameters: dict[str, Any] | None) -> None:
    """Bring both spellings of the rotary parameters to rope_theta and rope_scaling {"type": "yarn", ...}, in place."""
    scaling = rope_parameters or fields.pop("rope_scaling", None)
    fields.pop("rope_scaling", None)
    if not isinstance(scaling, dict):
        if scaling is not None:
            fields["rope_scaling"] = scaling  # the rules name the fault
        return
    scaling = dict(scaling)
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    if scaling.get("rope_theta") is not None:
        fields["rope_theta"] = scaling["rope_theta"]
    scaling.pop("rope_theta", None)
    if kind != "default":
        fields["rope_scaling"] = {"type": kind} | {key: value for key, value in scaling.items() if value is not None}


def preset_names() -> list[str]:
    """The names that `load_model_config` knows, sorted."""
    return sorted(path.stem for path in PRESETS_FOLDER.glob("*.json"))


def load_model_config(name_or_file: str | Path) -> ModelConfig:
    """A preset by its name, or a config.json by its path (a folder means the config.json in it).

    Raises:
        ConfigError: neither a preset nor a file, or the file's faults.
    """
    path = PRESETS_FOLDER / f"{name_or_file}.json"
    if str(name_or_file) not in preset_names():
        path = Path(name_or_file)
        if path.is_dir():
            path = path / "config.json"
        if not path.is_file():
            presets = ", ".join(preset_names())
            raise ConfigError([f"{name_or_file}: neither a preset ({presets}) nor a config.json file"])
    return ModelConfig.from_file(path)
