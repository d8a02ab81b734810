"""What can a card, and a machine made of cards, do? Numbers of the data sheet and curves of what is reached of them.

Rates are bytes or operations per second of one card, one direction. Nothing here is looked up: ``triax.plan.catalogue``
fills these values by name, and what a user's cluster file says wins over it.
"""

from dataclasses import dataclass
from typing import Literal

MatmulDtype = Literal["fp32", "fp16", "bf16", "fp8", "fp4"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]


@dataclass(frozen=True, slots=True)
class GemmCurve:
    """What a card reaches of its peak in a matrix product, by tiles and waves.

    Time is the least over tile shapes of ``waves x 2ab(K + k0) / (peak x efficiency / sms)``, at least the bytes over
    ``bandwidth_part`` of the bandwidth, plus ``launch_s``. Seven numbers fitted to measured tables; the defaults are
    those of an H100 in bf16.
    """

    large: float = 0.82
    """Efficiency of 128 x 256 tiles, as a part of the peak."""
    middle: float = 0.90
    """Efficiency of 128 x 128 tiles, as a part of ``large``."""
    small: float = 0.70
    """Efficiency of 64 x 128 tiles, as a part of ``large``."""
    k0: float = 200.0
    """What a tile's start and end cost, in steps of the inner dimension."""
    bandwidth_part: float = 0.8
    launch_s: float = 3e-6
    smoothing: float = 0.5
    """0: waves are whole; 1: a part of a wave costs a part."""


@dataclass(frozen=True, slots=True)
class Card:
    """One card. Peaks are dense; 0 means that it does not compute in that type."""

    name: str
    memory_bytes: int
    """Usable by a process before its context and libraries are loaded."""
    memory_bytes_per_s: float
    peak_bf16: float
    """FLOP/s in bf16; 0 on cards before Ampere."""
    peak_fp16: float
    peak_fp8: float = 0.0
    peak_fp4: float = 0.0
    peak_fp32: float = 0.0
    """FLOP/s of fp32 matrix products as frameworks run them: TF32 where the card has it."""
    sms: int = 132
    """Units that work on tiles side by side."""
    power_w: float = 700.0
    gemm: GemmCurve = GemmCurve()
    gemm_fp8: GemmCurve = GemmCurve()
    host_bytes_per_s: float = 25e9
    """To and from the memory of the server."""

    def peak(self, dtype: MatmulDtype) -> float:
        """Return FLOP/s in ``dtype``; a card without it computes in the next wider type."""
        fp16 = self.peak_fp16 or self.peak_bf16 or self.peak_fp32
        by_dtype = {
            "fp32": self.peak_fp32 or fp16 / 2,
            "fp16": fp16,
            "bf16": self.peak_bf16 or fp16,
            "fp8": self.peak_fp8 or fp16,
            "fp4": self.peak_fp4 or self.peak_fp8 or fp16,
        }
        return by_dtype[dtype]


@dataclass(frozen=True, slots=True)
class Machine:
    """Servers of equal cards and what joins them."""

    card: Card
    servers: int
    cards_per_server: int
    domain: int
    """Cards that reach each other at the inside rates: those of a server, or of a rack (NVL72)."""
    inside_all_reduce: float
    """Bus bandwidth as nccl-tests count it: bytes each card moves in a ring, over time."""
    inside_all_gather: float
    """The same for all-gather and reduce-scatter."""
    inside_all_to_all: float
    inside_send: float
    """From one card to one other."""
    server_bytes_per_s: float
    """All network cards of a server together, what is reached of the line rate."""
    nics_per_server: int = 8
    """Rails: a group of cards that uses one of them has this part of the server's bandwidth."""
    oversubscription: float = 1.0
    """How many times more can leave the servers of a leaf than the leaf can send on."""
    servers_per_leaf: int = 32
    has_network_reduction: bool = False
    """Switches add (SHARP): a reduction across servers moves each byte once."""
    inside_latency_s: float = 10e-6
    """Of one collective with small messages, inside a domain."""
    across_latency_s: float = 20e-6
    """Of one hop between servers."""
    name: str = ""

    @property
    def cards(self) -> int:
        """All cards."""
        return self.servers * self.cards_per_server

    @property
    def card_network_bytes_per_s(self) -> float:
        """A card's share of its server's network."""
        return self.server_bytes_per_s / self.cards_per_server

    def inside(self, collective: Collective) -> float:
        """Return the bus bandwidth of ``collective`` inside a domain."""
        by_collective = {
            "all_reduce": self.inside_all_reduce,
            "all_gather": self.inside_all_gather,
            "reduce_scatter": self.inside_all_gather,
            "all_to_all": self.inside_all_to_all,
            "send": self.inside_send,
        }
        return by_collective[collective]
