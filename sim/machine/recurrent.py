"""Recurrent layers, which keep a state of fixed size instead of a KV cache.

A layer's state has two parts: the last inputs of its convolution, and a matrix per head. Three forms are
known: gated delta rule (Qwen3-Next, Qwen3.5), Kimi's delta attention (Kimi Linear, Kimi-K3, GLM-5.3 Flash)
and Mamba 2 (Nemotron-H).

Source: the models' modelling code; vllm/model_executor/layers/mamba/mamba_utils.py (0.33).
"""

from __future__ import annotations

from dataclasses import dataclass

from pagecast.sim.machine.gpus import Gpu
from pagecast.sim.machine.matrix import Matrix


@dataclass(frozen=True, slots=True)
class RecurrentLayers:
    """`layers` recurrent layers with the matrix products `matrices`.

    `small`: parameters of one layer that are in no matrix product. `convolved`: channels of the convolution,
    `kernel` its width; of these `groups` times `group_channels` belong to groups that tensor parallelism
    copies where it can't split them. `state`: elements of the matrices of all heads, of `state_bytes` bytes
    each (0: the model's own dtype). `leads`: the model's first layer with a cache is one of them. `form`:
    "delta", "kimi" or "mamba". `blocks`: states that a sequence holds in each layer, `drafts` of them for
    draft tokens. `step_tokens`: blocks beside the states have a multiple of so many tokens. `cached`: states
    can be found again; `exports`: kernels hand out states within a prompt, `step_tokens` apart.
    """

    layers: int
    matrices: tuple[Matrix, ...]
    small: int
    convolved: int
    kernel: int
    state: int
    state_bytes: int = 0
    groups: int = 0
    group_channels: int = 0
    leads: bool = True
    form: str = ""
    blocks: int = 1
    drafts: int = 0
    step_tokens: int = 1
    cached: bool = False
    exports: bool = False

    def exported_on(self, gpu: Gpu) -> bool:
        """Whether kernels on this GPU hand out states within a prompt (vLLM 0.33)."""
        return self.form == "mamba" or (self.form == "delta" and (gpu.hopper or gpu.blackwell))

    def bytes_of_state(self, tensor_parallel_size: int, dtype_bytes: int) -> int:
        """Bytes of one sequence's state in one layer, on one of so many GPUs."""
        tp = tensor_parallel_size
        copied = tp - self.groups if self.groups and self.groups % tp else 0
        channels = (self.convolved + copied * self.group_channels) // tp
        convolution = channels * (self.kernel - 1) * dtype_bytes
        return convolution + self.state // tp * (self.state_bytes or dtype_bytes)


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Heads of a delta rule: `key_dim` and `value_dim` are per head."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def keys(self) -> int:
        """Width of all heads' keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all heads' values."""
        return self.value_heads * self.value_dim


def gated_delta_rule(
    layers: int, hidden: int, heads: DeltaHeads, kernel: int, state_bytes: int = 0, *, leads: bool = True
) -> RecurrentLayers:
    """Layers whose heads have one decay and one step each; queries, keys, values and a gate are projected."""
    h, convolved = heads, 2 * heads.keys + heads.values
    return RecurrentLayers(
        layers=layers,
        matrices=(
            Matrix("recurrent_in", hidden, convolved + h.values, layers, "outputs"),
            Matrix("recurrent_gates", hidden, 2 * h.value_heads, layers, "outputs"),
            Matrix("recurrent_out", h.values, hidden, layers, "inputs"),
        ),
        small=convolved * kernel + 2 * h.value_heads + h.value_dim,
        convolved=convolved,
        kernel=kernel,
        state=h.value_heads * h.key_dim * h.value_dim,
        state_bytes=state_bytes,
        leads=leads,
        form="delta",
    )


def kimi_delta_attention(
    layers: int, hidden: int, heads: DeltaHeads, kernel: int, *, full_gate: bool = False, leads: bool = True
) -> RecurrentLayers:
    """Layers whose heads decay each channel of their keys, with states in float32.

    Decay and output gate come from projections of the rank of one head; `full_gate`: the output gate's has
    full rank.
    """
    wide, rank = heads.values, heads.value_dim
    gate = (
        (Matrix("recurrent_gate", hidden, wide, layers, "outputs"),)
        if full_gate
        else (
            Matrix("recurrent_gate_a", hidden, rank, layers),
            Matrix("recurrent_gate_b", rank, wide, layers, "outputs"),
        )
    )
    return RecurrentLayers(
        layers=layers,
        matrices=(
            Matrix("recurrent_in", hidden, 3 * wide, layers, "outputs"),
            Matrix("recurrent_decay_a", hidden, rank, layers),
            Matrix("recurrent_decay_b", rank, wide, layers, "outputs"),
            Matrix("recurrent_step", hidden, heads.value_heads, layers, "outputs"),
            *gate,
            Matrix("recurrent_out", wide, hidden, layers, "inputs"),
        ),
        small=3 * wide * kernel + wide + heads.value_heads + rank,
        convolved=3 * wide,
        kernel=kernel,
        state=heads.value_heads * heads.value_dim * heads.value_dim,
        state_bytes=4,
        leads=leads,
        form="kimi",
    )


@dataclass(frozen=True, slots=True)
class MambaHeads:
    """Heads of Mamba 2 layers, their groups, and the size of a state's rows."""

    heads: int
    head_dim: int
    groups: int
    state_size: int


def mamba2(
    layers: int, hidden: int, heads: MambaHeads, kernel: int, state_bytes: int = 0, *, leads: bool = True
) -> RecurrentLayers:
    """Mamba 2 layers with a convolution that has a bias."""
    inner, group_channels = heads.heads * heads.head_dim, 2 * heads.state_size
    convolved = inner + heads.groups * group_channels
    return RecurrentLayers(
        layers=layers,
        matrices=(
            Matrix("recurrent_in", hidden, inner + convolved + heads.heads, layers, "outputs"),
            Matrix("recurrent_out", inner, hidden, layers, "inputs"),
        ),
        small=convolved * (kernel + 1) + 3 * heads.heads + inner,
        convolved=convolved,
        kernel=kernel,
        state=inner * heads.state_size,
        state_bytes=state_bytes,
        groups=heads.groups,
        group_channels=group_channels,
        leads=leads,
        form="mamba",
    )
