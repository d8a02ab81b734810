"""Which machine is trained on: servers, cards in each, what a card and a link can do."""

import re

from pydantic import Field

from triax.errors import BadInput
from triax.spec.value import ByteCount, Count, Text, Value

_SHORT_FORM = re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,3})x([a-z][a-z0-9._-]{0,39})")


class Cluster(Value):
    """Servers of equal cards. Rates a user knows better than a catalogue are given here and win."""

    servers: Count = Field(default=1, ge=1, le=10**6)
    cards_per_server: Count = Field(default=1, ge=1, le=10**4)
    device: Text = Field(default="cpu", max_length=40)
    """Name of the card, such as ``h100``; ``cpu`` for local processes."""
    memory_bytes: ByteCount | None = Field(default=None, ge=1)
    """Memory of one card that training may use."""
    peak_flops: float | None = Field(default=None, gt=0)
    """FLOP/s of one card in the run's compute precision, for utilisation; absent means measured at the start."""
    matmul_flops_per_s: float | None = Field(default=None, gt=0)
    """FLOP/s that large matrix products reach on one card in the run's compute precision; absent means as a catalogue
    says."""
    memory_bytes_per_s: float | None = Field(default=None, gt=0)
    """Rate at which one card reads and writes its memory; absent means as a catalogue says."""
    inside_bytes_per_s: float | None = Field(default=None, gt=0)
    """Bandwidth of one card to another of its server, one direction."""
    across_bytes_per_s: float | None = Field(default=None, gt=0)
    """Bandwidth of one server's uplink to the others, one direction."""
    domain_cards: Count | None = Field(default=None, ge=1, le=10**6)
    """Cards that reach each other at the inside rate; absent means those of a server, or of a rack where cards are so
    joined."""
    network: Text | None = Field(default=None, max_length=40)
    """Name of what joins the servers, such as ``infiniband-ndr`` or ``ethernet-100g``; absent means what servers of
    such cards usually have."""
    oversubscription: float | None = Field(default=None, ge=1, le=1000)
    """How many times more the servers below a switch can send than the switch can send on."""
    usd_per_card_hour: float | None = Field(default=None, gt=0)
    """What one card costs for an hour; absent means a default that says it is assumed."""

    @property
    def num_cards(self) -> int:
        """All cards: the number of ranks of a run that uses the whole cluster."""
        return self.servers * self.cards_per_server


def parse_cluster(text: str) -> Cluster:
    """Return the cluster that the short form says: ``16x8xh100`` is 16 servers of 8 h100 cards."""
    match = _SHORT_FORM.fullmatch(text.strip().lower())
    if match is None:
        raise BadInput(
            f"{text[:80]!r} is no cluster: write servers x cards x device, such as 16x8xh100 or 1x4xcpu, or the path "
            f"of a .toml file."
        )
    return Cluster(servers=int(match[1]), cards_per_server=int(match[2]), device=match[3])
