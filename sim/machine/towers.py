"""Parameters of the vision and audio towers that stand beside a decoder, by the tower's form.

Towers are served in the model's own dtype. A form is a line of `_FORMS`; counts were compared with the
modelling code of transformers 5.24 (within 3% of the tower).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Form:
    """`gated`: three matrices in an MLP. `merger`: how patches become the decoder's rows.

    "square": a square matrix of the merged patches' width, then one to the decoder; "inner": through a given
    inner width; "linear": one matrix; "narrow": to the tower's width, to the decoder's, and a square one of
    that. `mergers`: so many of them. `placed`: each patch of an image has a learned position.
    """

    gated: bool = False
    merger: str = "square"
    mergers: int = 1
    placed: bool = False


_FORMS = {
    "qwen2_vl": _Form(),
    "qwen2_5_vl": _Form(gated=True),
    "qwen3_vl": _Form(mergers=4),
    "qwen3_vl_moe": _Form(mergers=4),
    "qwen3_5": _Form(),
    "qwen3_5_moe": _Form(),
    "gemma3": _Form(merger="linear", placed=True),
    "mistral3": _Form(gated=True, merger="narrow"),
    "gemma4": _Form(gated=True, merger="linear"),
    "kimi_k25": _Form(),
    "kimi_k3": _Form(),
    "muse_glimmer": _Form(merger="inner"),
    "glm5_next": _Form(gated=True, merger="inner"),
    "llama4": _Form(merger="inner"),
    "minimax_m3_vl": _Form(merger="inner"),
}


_NO_TOWERS = ("text_config", "llm_config", "language_config", "quantization_config")
_WIDTHS = ("hidden_size", "vt_hidden_size", "width", "d_model", "embed_dim", "depth", "model_name", "dim")


def _is_tower(part: object) -> bool:
    return isinstance(part, Mapping) and any(part.get(name) for name in _WIDTHS)


def tower_params(config: Config, hidden: int) -> tuple[int, bool]:
    """Parameters of the vision tower of a whole configuration, and whether all towers are counted.

    `hidden`: the width of the decoder that it feeds.
    """
    vision = config.get("vision_config")
    form = _FORMS.get(str(config.get("model_type")))
    towers = [key for key, part in config.items() if key not in _NO_TOWERS and _is_tower(part)]
    if not isinstance(vision, Mapping) or form is None or set(towers) - {"vision_config"}:
        return 0, not towers
    sizes = _Sizes(vision, config)
    width, inner, layers = (
        sizes("hidden_size", "vt_hidden_size"),
        sizes("intermediate_size", "vt_intermediate_size"),
        sizes("num_hidden_layers", "depth", "vt_num_hidden_layers"),
    )
    qkv = sizes("qkv_hidden_size") or width
    patch = sizes("patch_size")
    if not (width and inner and layers and patch):
        return 0, False
    block = 4 * width * qkv + (3 if form.gated else 2) * width * inner
    embedded = 3 * patch**2 * (sizes("temporal_patch_size", "patch_temporal") or 1) * width
    positions = sizes("num_position_embeddings", "position_embedding_size") * width
    if sizes("position_embedding_size"):
        positions *= 2  # one table for each side
    if form.placed:
        positions += (sizes("image_size") // patch) ** 2 * width
    grid = sizes("pos_emb_height", "init_pos_emb_height") * sizes("pos_emb_width", "init_pos_emb_width")
    merged = width * (sizes("spatial_merge_size", "merge_size") or 2) ** 2
    if form.merger == "linear":
        merger = width * hidden
    elif form.merger == "narrow":
        merger = merged * width + width * hidden + hidden * hidden
    elif form.merger == "inner":
        between = (
            sizes("projection_intermediate_size", "projector_hidden_size", "projector_input_dim") or hidden
        )
        merger = merged * between + between * hidden
    else:
        merger = merged * merged + merged * hidden
    return layers * block + embedded + positions + grid * width + form.mergers * merger, True


class _Sizes:
    """Sizes under the first of several names that the tower, or the whole configuration, has."""

    def __init__(self, vision: Config, whole: Config) -> None:
        self._vision, self._whole = vision, whole

    def __call__(self, *names: str) -> int:
        for part in (self._vision, self._whole):
            for name in names:
                value = part.get(name)
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
        return 0
