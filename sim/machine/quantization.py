"""How a checkpoint stores its weights: from `quantization_config`, or a `hf_quant_config.json` beside.

Each matrix of each layer is looked up by the name of its module: formats may differ by module, and modules
may be left out, with their names given in full, as globs, or as regular expressions (`re:`).

Source: transformers' and compressed-tensors' configuration files, NVIDIA ModelOpt's, and how vLLM 0.33 reads
them (model_executor/layers/quantization).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, NamedTuple

from pagecast.sim.core.errors import BadInput
from pagecast.sim.machine.matrix import Linear

# Modules of each matrix in checkpoints, below their block; `|` separates the spellings of one module.
_MODULES: dict[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj|wo_b",),
    "q": ("q_proj",),
    "q_a": ("q_a_proj|wq_a",),
    "q_b": ("q_b_proj|wq_b",),
    "kv_a": ("kv_a_proj_with_mqa|wkv|kv_proj",),
    "kv_b": ("kv_b_proj",),
    "o_a": ("wo_a|o_a_proj",),
    "gate": ("g_proj|gate_proj",),
    "head_gate": ("g_proj",),
    "index_q": ("indexer.wq_b|indexer.q_proj|index_q_proj",),
    "index_k": ("indexer.wk|indexer.k_proj|index_k_proj",),
    "recurrent_in": ("in_proj_qkv|in_proj_qkvz|in_proj|q_proj",),
    "recurrent_gates": ("in_proj_b|in_proj_ba",),
    "recurrent_decay_a": ("f_a_proj|forget_gate.f_a_proj",),
    "recurrent_decay_b": ("f_b_proj|forget_gate.f_b_proj",),
    "recurrent_step": ("b_proj",),
    "recurrent_gate": ("g_proj",),
    "recurrent_gate_a": ("g_a_proj",),
    "recurrent_gate_b": ("g_b_proj",),
    "recurrent_out": ("out_proj|o_proj",),
    "up": ("gate_proj|up_proj", "up_proj"),
    "down": ("down_proj",),
    "expert_up": ("experts.0.gate_proj|experts.0.w1|experts.0.up_proj",),
    "expert_down": ("experts.0.down_proj|experts.0.w2",),
    "shared_up": (
        "shared_experts.gate_proj|shared_expert.gate_proj|share_expert.gate_proj|shared_experts.up_proj",
    ),
    "shared_down": ("shared_experts.down_proj|shared_expert.down_proj|share_expert.down_proj",),
    "latent_in": ("fc1_latent_proj|routed_expert_down_proj",),
    "latent_out": ("fc2_latent_proj|routed_expert_up_proj",),
}
_PREFIXES = ("", "model.", "language_model.model.", "model.language_model.")
_ELSEWHERE = re.compile(r"^(re:)?[.*^]*(mtp|vis|audio|multi_modal|mm_|embed_vision|embed_audio)")
_LAYER = re.compile(r"^(?!re:).*?layers\.(\d+|\*)([.*].*)?$")
_UNQUANTIZED_BITS = 16
_ALWAYS_PLAIN = ("index_weights", "index_gate")


class Format(NamedTuple):
    """A way to store a weight: its name, and bits with the scales' share."""

    name: str
    bits: float


FP8 = Format("fp8", 8.002)
MXFP8 = Format("mxfp8", 8.25)
INT8 = Format("int8", 8.002)
NVFP4 = Format("nvfp4", 4.5)
MXFP4 = Format("mxfp4", 4.25)
_INT4 = Format("int4", 4.156)
# ModelOpt's names.
_ALGORITHMS = {
    "FP8": FP8,
    "FP8_PB_WO": FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": FP8,
    "FP8_BLOCK_SCALES": FP8,
    "MXFP8": MXFP8,
    "NVFP4": NVFP4,
    "W4A16_NVFP4": NVFP4,
    "NVFP4_AWQ": NVFP4,
    "W4A8_NVFP4_FP8": NVFP4,
    "MXFP4": MXFP4,
    "W4A8_MXFP4_FP8": MXFP4,
    "W4A16_MXFP4": MXFP4,
    "W4A16_AWQ": _INT4,
    "W4A8_AWQ": _INT4,
    "INT4_AWQ": _INT4,
    "W8A8_SQ_PER_CHANNEL": INT8,
    "INT8_SQ": INT8,
}
_MIXED = "MIXED_PRECISION"
_BY_MODULE = ("modelopt", "compressed-tensors")
_KV_DTYPES = {"fp8": "fp8", "fp8_e4m3": "fp8", "nvfp4": "nvfp4"}


class Placed(NamedTuple):
    """A matrix, the numbers of its layers, and the module that holds it in each of them."""

    linear: Linear
    layers: tuple[int, ...]
    block: str


@dataclass(frozen=True, slots=True)
class Quantization:
    """What a checkpoint's description says: see the fields of the same names of `ModelFacts`."""

    weight_dtype: str | None = None
    covers: str = "all"
    weight_bits: tuple[tuple[str, float], ...] = ()
    kv_dtype: str = "auto"
    draft_plain: bool = False


def read_quantization(
    scheme: Any,
    where: str,
    placed: tuple[Placed, ...],
    dtype: str,
    expert_dtype: object = None,
    depth: int = 0,
) -> Quantization:
    """The quantisation that `scheme` describes, of the matrices `placed`; none where it is no object.

    `expert_dtype`: what the configuration says of its experts apart ("fp4": in mxfp4). `depth`: layers of the
    decoder, after which draft layers come. Errors: BadInput for methods and formats that are not known.
    """
    if not isinstance(scheme, Mapping):
        return Quantization()
    if isinstance(scheme.get("quantization"), Mapping):  # as in hf_quant_config.json
        scheme = {"quant_method": "modelopt", **scheme["quantization"]}
    rules = _Rules(scheme, where, scheme.get("expert_dtype", expert_dtype))
    bits: dict[str, float] = {}
    sizes: defaultdict[str, float] = defaultdict(float)
    plain_bits = 32.0 if dtype == "fp32" else 16.0
    for linear, layers, block in placed:
        shares = rules.shares(linear.name, layers, block)
        bits[linear.name] = sum(share * (each.bits if each else plain_bits) for each, share in shares.items())
        for each, share in shares.items():
            if each:
                sizes[each.name] += share * linear.params
    formats = set(sizes)
    if not formats:
        return Quantization(kv_dtype=rules.kv_dtype)
    of_experts = {name for name in bits if name.startswith("expert")}
    quantized = {name for name in bits if bits[name] < plain_bits}
    main = max(formats, key=lambda name: sizes[name])
    covers = "some"
    if len(formats) == 1 and quantized == {name for name in bits if name not in _ALWAYS_PLAIN}:
        covers = "all"
    elif quantized == of_experts:
        covers = "experts"
    return Quantization(main, covers, tuple(bits.items()), rules.kv_dtype, rules.leaves_out_drafts(depth))


class _Rules:
    """Which format a module of a layer has."""

    def __init__(self, scheme: Mapping[str, Any], where: str, expert_dtype: object) -> None:
        self._where = where
        self._scheme = scheme
        self._method = str(scheme.get("quant_method", "")).lower()
        if not self._method and scheme.get("quant_algo"):
            self._method = "modelopt"
        self._exact = self._listed_formats()
        self._groups = self._group_formats()
        self._default = self._default_format()
        self._experts = self._expert_format(expert_dtype)
        self._left_out = _Names(self._left_out_names())
        self.kv_dtype = self._kv()

    def shares(self, name: str, layers: tuple[int, ...], block: str) -> dict[Format | None, float]:
        """The formats of one matrix over its layers, None for unquantised, with their shares."""
        modules = _MODULES.get(name)
        if modules is None or not layers:
            return {None: 1.0}
        found: Counter[Format | None] = Counter()
        for module in modules:
            spelled = tuple(f"{block}.{each}" if block else each for each in module.split("|"))
            found.update(self._format(name, layer, spelled) for layer in layers)
        return {each: count / found.total() for each, count in found.items()}

    def _format(self, name: str, layer: int, spelled: tuple[str, ...]) -> Format | None:
        for module in spelled:
            parts = module.split(".")
            for end in range(len(parts), 0, -1):
                found = self._exact.get(f"{layer}.{'.'.join(parts[:end])}")
                if found:
                    return found
        if self._exact and self._default is None:
            return None
        if self._left_out.match(layer, spelled):
            return None
        if name.startswith("expert") and self._experts:
            return self._experts
        for names, each in self._groups:
            if names is None or names.match(layer, spelled):
                return each
        if self._method == "mxfp4" and not name.startswith("expert"):
            return None
        return self._default

    def leaves_out_drafts(self, layers: int) -> bool:
        """Whether the MLPs of draft layers, which come after so many layers, are unquantised."""
        if self._exact and self._default is None:
            listed = self._scheme["quantized_layers"]
            return not any("mtp." in name or f"layers.{layers}." in name for name in listed)
        drafted = [
            f"{layer}.{mlp}"
            for layer in (f"model.layers.{layers}", "mtp.layers.0", "mtp.0")
            for mlp in ("mlp.down_proj", "mlp.experts.0.down_proj", "ffn.experts.0.w2")
        ]
        return any(_covers(name, each) for name in self._left_out_names() for each in drafted)

    # -- what the description says

    def _default_format(self) -> Format | None:
        scheme, method = self._scheme, self._method
        bits = scheme.get("bits") or scheme.get("w_bit")
        if bits not in (None, 4, 8):
            raise BadInput(
                f"{self._where}: quantization_config.bits is {str(bits)[:40]!r}; "
                "pagecast sizes weights of 4 or 8"
            )
        if method == "mxfp4":
            return MXFP4
        if method in ("fp8", "fbgemm_fp8", "deepseek_v4_fp8"):
            return FP8
        if method in ("mxfp8", "modelopt_mxfp8"):
            return MXFP8
        if method in ("awq", "gptq", "auto-round", "bitsandbytes"):
            four = bits == 4 or scheme.get("load_in_4bit") or (bits is None and method == "awq")
            return (
                _grouped_int4(scheme.get("group_size") or scheme.get("q_group_size"), points=True)
                if four
                else INT8
            )
        if method.startswith(_BY_MODULE):
            algorithm = str(scheme.get("quant_algo") or "").upper()
            if algorithm == _MIXED or self._groups:
                return None
            if algorithm:
                return self._algorithm(algorithm, "quant_algo")
            return NVFP4 if "nvfp4" in str(scheme.get("format", "")) else FP8
        raise BadInput(
            f"{self._where}: quantization_config.quant_method {method!r} is unknown; "
            "remove it and give the weights' size another way, or use a bf16 configuration"
        )

    def _algorithm(self, name: Any, field: str) -> Format:
        found = _ALGORITHMS.get(str(name).upper())
        if found is None:
            raise BadInput(
                f"{self._where}: quantization_config has {field} {str(name)[:40]!r}, "
                "which pagecast can't size"
            )
        return found

    def _listed_formats(self) -> dict[str, Format]:
        listed = self._scheme.get("quantized_layers")
        if not listed:
            return {}
        if not isinstance(listed, Mapping):
            raise BadInput(f"{self._where}: quantization_config.quantized_layers is not an object")
        formats: dict[str, Format] = {}
        for module, each in listed.items():
            match = _LAYER.match(module)
            if match and not _ELSEWHERE.match(module) and isinstance(each, Mapping):
                name = f"{match[1]}{match[2] or ''}"
                formats[name] = self._algorithm(each.get("quant_algo"), f"quantized_layers.{module}")
        return formats

    def _group_formats(self) -> tuple[tuple[_Names | None, Format], ...]:
        groups = self._scheme.get("config_groups")
        if not groups or self._exact or not self._method.startswith(_BY_MODULE):
            return ()
        if not isinstance(groups, Mapping):
            raise self._odd_groups()
        found: list[tuple[_Names | None, Format]] = []
        for group in groups.values():
            weights = (group.get("weights") or {}) if isinstance(group, Mapping) else None
            if not isinstance(weights, Mapping):
                raise self._odd_groups()
            targets = group.get("targets") or ["Linear"]
            names = [each for each in targets if isinstance(each, str) and ("." in each or ":" in each)]
            every = any(each in ("Linear", "FusedMoE", "MoEGMM") for each in targets)
            found.append((None if every else _Names(names), self._weights_format(weights, group)))
        # Groups for named modules come before the one for all.
        return tuple(sorted(found, key=lambda each: each[0] is None))

    def _weights_format(self, weights: Mapping[str, Any], group: Mapping[str, Any]) -> Format:
        words = str(group.get("format") or self._scheme.get("format") or "") + str(
            self._scheme.get("quant_algo") or ""
        )
        bits, size = weights.get("num_bits"), weights.get("group_size")
        whole = str(weights.get("type") or "float") == "float"
        if "nvfp4" in words.lower() and bits in (4, None):
            return NVFP4
        if bits == 4 and whole:
            return MXFP4 if size == 32 or "mxfp4" in words else NVFP4
        if bits == 4:
            return _grouped_int4(size, points=weights.get("symmetric") is False)
        if bits in (8, None):
            return (MXFP8 if size == 32 else FP8) if whole else INT8
        raise BadInput(
            f"{self._where}: quantization_config stores weights in num_bits {str(bits)[:40]!r}; "
            "pagecast sizes 4 and 8"
        )

    def _odd_groups(self) -> BadInput:
        return BadInput(
            f"{self._where}: quantization_config.config_groups is not made of groups with `weights`; "
            "give the config.json that the quantised checkpoint came with"
        )

    def _expert_format(self, expert_dtype: object) -> Format | None:
        if expert_dtype is None:
            return None
        known = {"fp4": MXFP4, "mxfp4": MXFP4, "nvfp4": NVFP4, "fp8": FP8}
        if expert_dtype not in known:
            raise BadInput(
                f"{self._where}: expert_dtype is {str(expert_dtype)[:40]!r}; "
                f"it must be one of {', '.join(known)}"
            )
        return known[str(expert_dtype)]

    def _left_out_names(self) -> list[str]:
        scheme = self._scheme
        names: list[str] = []
        # A mixed checkpoint's `ignore` is of the pass that made its quantized_layers; others keep its method.
        fields = ["modules_to_not_convert", "llm_int8_skip_modules"]
        if not (self._exact and self._default):
            fields += ["ignore", "exclude_modules", "ignored_layers"]
        for field in fields:
            listed = scheme.get(field) or []
            if not isinstance(listed, list):
                raise BadInput(f"{self._where}: quantization_config.{field} is not a list of names")
            names += [each for each in listed if isinstance(each, str)]
        extra = scheme.get("extra_config")
        if isinstance(extra, Mapping):  # auto-round's: bits of single modules
            names += [
                name
                for name, each in extra.items()
                if isinstance(each, Mapping) and (each.get("bits") or 0) >= _UNQUANTIZED_BITS
            ]
        return names

    def _kv(self) -> str:
        said = self._scheme.get("kv_cache_scheme") or self._scheme.get("kv_cache_quant_algo")
        if isinstance(said, Mapping):
            form = f"{said.get('type')} of {said.get('num_bits')} bits"
            said = {"float of 8 bits": "fp8", "float of 4 bits": "nvfp4"}.get(form, form)
        if not said:
            return "auto"
        if str(said).lower() not in _KV_DTYPES:
            raise BadInput(
                f"{self._where}: the checkpoint's KV cache is in {str(said)[:40]!r}; give kv_cache_dtype"
            )
        return _KV_DTYPES[str(said).lower()]


class _Names:
    """Modules by name: in full, as a glob, or as a regular expression after `re:`."""

    def __init__(self, names: list[str]) -> None:
        self._plain: set[str] = set()
        self._globs: defaultdict[str, list[re.Pattern[str]]] = defaultdict(list)
        self._expressions: list[re.Pattern[str]] = []
        for name in names:
            if _ELSEWHERE.match(name):
                continue
            if name.startswith("re:"):
                self._expressions.append(re.compile(name[3:]))
                continue
            layer = _LAYER.match(name)
            short = f"{layer[1]}{layer[2] or ''}" if layer else name
            if "*" in short:
                self._globs[layer[1] if layer else "*"].append(_glob(short))
            else:
                self._plain.add(short)

    def match(self, layer: int, spelled: tuple[str, ...]) -> bool:
        """Whether a module of that layer, under one of its spellings, is named."""
        return any(self._match_one(layer, module) for module in spelled)

    def _match_one(self, layer: int, module: str) -> bool:
        parts = module.split(".")
        above = {f"{layer}"} | {f"{layer}.{'.'.join(parts[:end])}" for end in range(1, len(parts) + 1)}
        if self._plain & above or self._plain & set(parts) or module in self._plain:
            return True
        name = f"{layer}.{module}"
        if any(glob.search(name) for glob in (*self._globs["*"], *self._globs[str(layer)])):
            return True
        return any(each.match(f"{prefix}layers.{name}") for each in self._expressions for prefix in _PREFIXES)


def _covers(name: str, module: str) -> bool:
    """Whether a name of a list is that of a draft layer's module, or of one above it."""
    if name.startswith("re:"):
        return re.match(name[3:], module) is not None
    return fnmatchcase(module, name.removeprefix("*.")) or module.startswith(f"{name}.")


@cache
def _glob(name: str) -> re.Pattern[str]:
    """A glob over whole parts of a name; what follows it is below."""
    inner = ".*".join(re.escape(part) for part in name.split("*"))
    return re.compile(rf"(^|\.){inner}($|\.)")


def _grouped_int4(group: object, *, points: bool) -> Format:
    """Weights of 4 bits whose groups have a scale of 16 bits, and with `points` a zero point of 4."""
    size = group if isinstance(group, int) and group > 0 else 128
    return Format("int4", 4 + (20 if points else 16) / size)
