"""On which machine was a row measured? From the card's name and what the row says of its network."""

import re
from dataclasses import replace
from typing import Final

from benchmarks.published_networks import Unclear
from triax.plan.catalogue import card, card_names, machine
from triax.plan.hardware import Card, Machine
from triax.spec.cluster import Cluster

CARDS: Final = {name: card(name) for name in (*card_names(), "a100-80gb")}
_NAMES: Final = (
    (r"gb300", "gb300"), (r"gb200", "gb200"), (r"b300", "b300"), (r"b200", "b200"), (r"h200|gh200", "h200"),
    (r"h[18]00.*(hbm2e|500 ?w|96 ?gb|95 ?gi?b|lowtdp)", "h100-500w"), (r"h[18]00.*pcie", "h100-pcie"),
    (r"h[18]00|hopper", "h100"), (r"a[18]00.*40 ?gb", "a100-40"), (r"a[18]00|ampere", "a100-80"),
    (r"v100.*16 ?gb", "v100-16"), (r"v100", "v100-32"), (r"mi300", "mi300x"), (r"mi325", "mi325x"),
    (r"mi35", "mi355x"), (r"4090", "rtx-4090"), (r"5090", "rtx-5090"), (r"rtx.?pro", "rtx-pro-6000"), (r"l40s", "l40s"),
    (r"a10g", "a10g"),
)  # fmt: skip
_REACHED: Final = 0.92
"""Part of a network's line rate that is reached, as the catalogue assumes it."""


def card_of(text: str) -> Card:
    """Return the card that a row's text names; raise Unclear where it names none that is known."""
    for pattern, name in _NAMES:
        if re.search(pattern, text, re.I):
            return capped(CARDS[name], text)
    raise Unclear(f"its card is not known: {text[:60]!r}")


def machine_of(of: Card, network_text: str, cards: int, cards_per_server: int | None) -> Machine:
    """Return the machine of a row. A server has as many cards as the row says, or as such servers usually have."""
    usual = 4 if of.name.startswith("gb") else 8
    per_server = max(min(cards_per_server or usual, cards), 1)
    base = of.name.split("@")[0]
    is_cut = per_server > 8
    cluster = Cluster(
        servers=-(-cards // per_server),
        cards_per_server=per_server,
        device=base,
        domain_cards=per_server if is_cut else None,
        network="omni-path" if re.search("omni-?path", network_text, re.I) else None,
    )
    found = replace(machine(cluster), card=of)
    # The catalogue speaks of whole servers: a row that used a part of one had a part of its network.
    found = replace(
        found, server_bytes_per_s=found.server_bytes_per_s * min(per_server / (cards_per_server or usual), 1)
    )
    given = _network_bytes_per_s(network_text, per_server)
    if given is not None:
        found = replace(found, server_bytes_per_s=given * _REACHED)
    if re.search(
        r"cube mesh|NV1/NV2", network_text
    ):  # pairs of cards that share a bus to the processor are in every ring
        found = replace(found, inside_all_reduce=60e9, inside_all_gather=60e9, inside_all_to_all=30e9, inside_send=20e9)
    return found


def _network_bytes_per_s(text: str, per_server: int) -> float | None:
    """Return bytes per second of a server's network, one direction, where the text says it."""
    text = text.replace("ONE InfiniBand EDR", "1 x")
    several = re.search(r"(\d+) ?x ?(?:HDR )?(\d+) ?Gb/s", text)
    if several:
        return int(several[1]) * int(several[2]) / 8 * 1e9
    one = re.search(r"(\d+) ?Gb(?:/s|ps)", text)
    if one is None:
        return None
    each = per_server if re.search(r"per (gpu|card)", text, re.I) else 1
    return int(one[1]) * each / 8 * 1e9


def capped(of: Card, text: str) -> Card:
    """Return ``of`` with the power limit that the text names; its calibration is kept apart."""
    match = re.search(r"(?:limited to|cap(?:ped)? (?:at|to)) (\d+) ?W", text)
    if match is None or float(match[1]) >= of.power_w:
        return of
    return replace(of, name=f"{of.name}@{match[1]}w", power_w=float(match[1]))
