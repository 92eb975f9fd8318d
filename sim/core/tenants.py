"""Tenants: who shares a replica, with which weight, and how many blocks each may hold.

    alice:weight=2,blocks=4000 bob:blocks=1000 *:weight=1

A tenant's ceiling is on the blocks that its running requests may hold when they end; a prefix that they share
counts for each of them. `*` stands for all others. Where a weight is given, tenants take turns in the queue
and lose cached content by weighted fairness.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pagecast.sim.core.errors import BadInput, check_given_once
from pagecast.sim.core.option import option

OTHERS = "*"


@dataclass(frozen=True)
class TenantShare:
    """One tenant's weight, and the blocks it may hold (None: any number)."""

    weight: float = 1.0
    blocks: int | None = None


@dataclass(frozen=True)
class Tenants:
    """The shares by name. `fair`: queue and eviction follow the weights."""

    shares: Mapping[str, TenantShare] = field(default_factory=dict)
    fair: bool = False

    @classmethod
    def parse(cls, text: str) -> Tenants:
        """Reads `NAME:weight=W,blocks=B` with spaces between.

        Errors: BadInput for another form, numbers out of range, and what is given twice.
        """
        shares: dict[str, TenantShare] = {}
        fair = False
        for part in text.split():
            name, colon, options = part.rpartition(":")
            if not (colon and name) or name in shares:
                raise BadInput(f"tenant {part!r}: write NAME:weight=W,blocks=B, each name once")
            values: dict[str, str] = {}
            for setting in options.split(","):
                field_name, _, value = setting.partition("=")
                check_given_once(field_name, values, f"tenant {part!r}: field {field_name!r}")
                values[field_name] = value
            try:
                weight = float(values.pop("weight", "1"))
                blocks = int(values.pop("blocks")) if "blocks" in values else None
            except ValueError:
                raise BadInput(f"tenant {part!r}: weight and blocks are numbers") from None
            if values or not 0 < weight < float("inf") or (blocks is not None and blocks < 1):
                raise BadInput(
                    f"tenant {part!r}: weight is above 0, blocks at least 1, and there is no other"
                )
            fair |= "weight=" in options
            shares[name] = TenantShare(weight, blocks)
        return cls(shares, fair)

    def __str__(self) -> str:
        return " ".join(f"{name}:{self._share_text(share)}" for name, share in self.shares.items())

    def _share_text(self, share: TenantShare) -> str:
        weight = [f"weight={share.weight}"] if self.fair else []
        return ",".join(weight + ([] if share.blocks is None else [f"blocks={share.blocks}"]))

    def share(self, tenant: str) -> TenantShare:
        """The share of a tenant."""
        return self.shares.get(tenant) or self.shares.get(OTHERS) or _DEFAULT

    @property
    def limited(self) -> bool:
        """Whether some tenant has a ceiling."""
        return any(share.blocks is not None for share in self.shares.values())


_DEFAULT = TenantShare()


@dataclass(frozen=True)
class Tenancy:
    """How tenants share a replica, and what they share with one another."""

    shares: Tenants | None = option(
        "shares of tenants, as NAME:weight=W,blocks=B with spaces between (*: all others): "
        "weights make queue and eviction fair, and a tenant's requests hold at most B blocks",
        None,
        flat="tenants",
        read=Tenants.parse,
    )
    isolation: Literal["salt", "tenant"] = option(
        "who shares no prefixes: requests with different salts, or of different tenants as well",
        "salt",
        needs=("tenants in the trace", ("tenant",)),
    )
    public_namespaces: tuple[str, ...] | None = option(
        "namespaces whose tokens all tenants share, with spaces between (default: none)",
        None,
        read=lambda text: tuple(text.split()),
        write=" ".join,
        needs=("namespaces and public_tokens in the trace", ("namespace", "public_tokens")),
    )
    scrub_private_blocks: bool = option(
        "overwrite evicted blocks of tenants before others use them, at the rate of HBM",
        False,
        needs=("tenants in the trace", ("tenant",)),
    )
