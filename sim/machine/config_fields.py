"""Fields of a config.json: looked up under their several names, checked, and none that matters left unread.

A field matters that says something of attention, caches, experts or weights: its name has one of a few words
in it. `unread` names those that nobody asked for, so that an architecture which is described by fields that
pagecast does not know is refused instead of misread.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pagecast.sim.core.errors import BadInput

Config = Mapping[str, Any]
_MOST_LAYERS = 10_000

_MATTERS = re.compile(
    r"(^|_)(head|heads|kv|attn|attention|layer|layers|expert|experts|moe|lora|rank|index|indexer|compress|"
    r"window|chunk|latent|linear|conv|ssm|mamba|state|intermediate|hidden|ffn|mlp|dim|dims|sparse|mla|expand|"
    r"engram|memory|block|blocks|quantization|groups|shared?|hc|mhc|cross|sinks?|nope|ngram|lightning|kda|"
    r"delta|vocab|candidate|dspark|embedding|embeddings)(_|\d|$)"
)
# Fields with such a word that change neither what a cache keeps nor a weight's shape.
_HARMLESS = re.compile(
    r"""^(
    .*rope.* | .*rotary.* | mrope.* | .*_token.* | .*dropout.* | .*_drop | .*_loss.* | .*eps(ilon)? |
    .*_init.* | .*initializer.* | .*_act(ivation)?(_.*)? | hidden_act.* | .*softcap.* | .*logit.* |
    .*_dtype | .*_implementation | output_(attentions|hidden_states) | .*_fp32 | pretraining_tp |
    .*_multiplier | .*_scalar | attn_temperature.* | do_layer_norm_before | .*scal(e|ing)(_.*)? |
    attention_value_scale | time_step_.* | max_window_layers |
    original_max_position_embeddings | layers?_norm.* | layernorm.* | (shared|moe)_.*_overlap |
    moe_(router|renormalize).* | moe_norm.* | hidden_activation | mtp_.* | num_mtp.* |
    num_nextn.* | mlp_hidden_act | tie_.* | use_bidirectional_attention | qk_head_dim |
    .*vision.* | .*audio.* | image_.* | video_.* | .*_processor.* | base_model.*plan |
    chunk_size_feed_forward | cross_attention_hidden_size | add_cross_attention | pruned_heads |
    index_(share_for_mtp|kpool_always|skip_topk|topk_(freq|pattern)).* | indexer_rope.* | _attn.* |
    dspark_.* | hc_(eps|sinkhorn_iters) | compress_rope.* | norm_type | use_mamba_kernels |
    linear_lower_bound | mla_use_nope | use_grouped_topk | chunk_size | layer_rope_theta | .*qk_scale.* |
    sparse_topk.* | vocab_size_per_layer_input | use_unified.* | moe_token.* | expert_bias_.* |
    num_hash_layers | num_reward_heads | img_token.* | sliding_window_size | use_conv_bias |
    linear_activation.* | no_rope.* | nope_layer.* |
    cache_.* | use_cache | attn_res_block_size | embedding_multiplier | swiglu.* | n_group | expand |
    index_topk | hidden_states.* | use_sliding_window | quantization_config | full_attention_interval |
    ignore_index | .*project(or|ion)_.* | out_hidden_size | index_kpool_compress | mhc |
    activation_situ.* | latent_moe_use_norm | mamba_ssm_cache_dtype | num_expert_group |
    initial_context_length
    )$""",
    re.VERBOSE,
)


class ConfigFields:
    """The fields of one configuration; `where` names the file in messages."""

    def __init__(self, config: Config, where: str, around: Config | None = None) -> None:
        """`around`: fields of the whole that stand for those that `config`, a part of it, lacks."""
        self._own, self.where = config, where
        self._config = {**(around or {}), **config}
        self._asked: set[str] = set()

    def get(self, field: str, default: Any = None) -> Any:
        """The field's value as it is; `default` where it is absent."""
        self._asked.add(field)
        return self._config.get(field, default)

    def has(self, *names: str) -> bool:
        """Whether one of these fields says something but no, none or 0."""
        return bool([name for name in names if self.get(name)])

    def wrong(self, field: str, must: str) -> BadInput:
        """The error for a field that is not what it must be."""
        return BadInput(f"{self.where}: {field} is {str(self.get(field))[:80]!r}; it must be {must}")

    def integer(self, *names: str, default: int | None = None) -> int:
        """A positive whole number under the first of these names that is there."""
        for field in names:
            value = self.get(field)
            if value is None:
                continue
            if isinstance(value, list):  # some vision models list one size per layer
                value = value[0] if value and all(each == value[0] for each in value) else value
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise BadInput(f"{self.where}: {field} is {value!r}; it must be a positive integer")
            return value
        if default is None:
            raise BadInput(f"{self.where}: {names[0]} is missing; it is needed to size the model")
        return default

    def count(self, *names: str, default: int = 0) -> int:
        """A whole number of 0 or more; `default` where no field of these names says one."""
        for field in names:
            value = self.get(field)
            if value is None or value is False:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise self.wrong(field, "a whole number of 0 or more")
            return value
        return default

    def numbers(self, field: str, layers: int) -> list[int]:
        """One whole number of 0 or more for each layer; entries beyond the layers are of draft layers."""
        values = self.get(field)
        if not isinstance(values, list) or any(type(value) is not int or value < 0 for value in values):
            raise self.wrong(field, "a list of whole numbers of 0 or more")
        if len(values) < layers:
            raise BadInput(f"{self.where}: {field} has {len(values)} entries for {layers} layers")
        return values[:layers]

    def names(self, field: str, layers: int | None = None) -> tuple[str, ...]:
        """One name for each layer, draft layers left out; empty where the file does not have it."""
        values = self.get(field)
        if not values:
            return ()
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise self.wrong(field, "a list of names")
        if layers is None:
            return tuple(values)
        if len(values) not in (layers, layers + self.count("num_nextn_predict_layers")):
            raise BadInput(f"{self.where}: {field} has {len(values)} entries for {layers} layers")
        return tuple(values[:layers])

    def layer_list(self, field: str) -> set[int]:
        """Numbers of layers."""
        layers = self.get(field) or []
        if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
            raise self.wrong(field, "a list of layer numbers")
        return set(layers)

    def number(self, field: str) -> float:
        """A number above 0."""
        value = self.get(field)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise self.wrong(field, "a number above 0")
        return value

    def said(self) -> list[str]:
        """The names of fields that say something but no, none or 0."""
        return [field for field, value in self._config.items() if value]

    def part(self, field: str) -> ConfigFields:
        """The fields of a part of the configuration; none where it is absent."""
        value = self.get(field) or {}
        if not isinstance(value, Mapping):
            raise self.wrong(field, "an object")
        return ConfigFields(value, f"{self.where}: {field}")

    def layers(self) -> int:
        """How many layers the decoder has."""
        listed = (
            self.get("layers_block_type") or self.get("hybrid_override_pattern") or self.get("layer_types")
        )
        counted = len(listed) if isinstance(listed, (list, str)) and listed else None
        layers = self.integer("num_hidden_layers", "n_layer", "num_layers", default=counted)
        if layers > _MOST_LAYERS:
            raise BadInput(
                f"{self.where}: {layers:,} layers are more than the {_MOST_LAYERS:,} that are read"
            )
        return layers

    def unread(self) -> list[str]:
        """Fields that matter, say something, and were not asked for."""
        return [
            field
            for field, value in self._own.items()
            if field not in self._asked
            and (value is True or value not in (None, False, 0, 1, "", [], {}))
            and _MATTERS.search(field)
            and not _HARMLESS.match(field)
        ]
