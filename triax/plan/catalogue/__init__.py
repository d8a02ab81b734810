"""What is known of cards, servers and networks by name? Numbers in TOML files, each with its source.

``card`` and ``machine`` turn names into the values of ``triax.plan.hardware``; what a user says of a cluster
wins over what stands here. Numbers without a published source are marked *assumed*, and ``assumed_numbers`` names them.
"""

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from triax.errors import BadInput
from triax.plan.hardware import Card, GemmCurve, Machine
from triax.spec.cluster import Cluster
from triax.spec.legal_values import either

_FOLDER: Final = Path(__file__).parent
_FLOPS_PER_BYTE: Final = 250.0
"""Of a card that the catalogue does not know: operations for each byte of its memory's rate (*assumed*)."""
_PEAKS: Final = ("peak_bf16", "peak_fp16", "peak_fp8", "peak_fp4", "peak_fp32")
_SENSE: Final[Mapping[str, tuple[float, float]]] = MappingProxyType(
    {
        "memory_bytes": (1e6, 1e15),
        "peak_flops": (1e6, 1e20),
        "matmul_flops_per_s": (1e6, 1e20),
        "memory_bytes_per_s": (1e3, 1e16),
        "inside_bytes_per_s": (1e3, 1e16),
        "across_bytes_per_s": (1e3, 1e16),
        "usd_per_card_hour": (1e-6, 1e6),
    }
)
"""Far below and above any machine, by key of a cluster."""
_SEGMENT: Final = 64
"""Cards of a rack of 72 that jobs use where their number is no multiple of 72: 16 trays of 4 (*assumed*)."""


@cache
def _table(name: str) -> Mapping[str, Any]:
    return MappingProxyType(tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8")))


@cache
def _cards_by_name() -> Mapping[str, str]:
    """Return the name of a card by each of its names."""
    cards = _table("cards")["cards"]
    return MappingProxyType({each: name for name, said in cards.items() for each in (name, *said["aliases"])})


def card_names() -> tuple[str, ...]:
    """Return the names of all cards, in the order of the catalogue."""
    return tuple(_table("cards")["cards"])


def network_names() -> tuple[str, ...]:
    """Return the names of all networks."""
    return tuple(_table("networks")["networks"])


def find_card(name: str) -> str:
    """Return the catalogue's name of a card; raise BadInput with the nearest names where it has none."""
    return _found(name, _cards_by_name(), "card", card_names())


def card_called(text: str) -> str | None:
    """Return the catalogue's name of a card that a driver calls ``text``, such as ``NVIDIA H100 80GB HBM3``; None
    where it has none such."""
    words = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    known = [name for name in _cards_by_name() if f"-{name}-" in f"-{words}-"]
    if not known:
        return None
    family, memory = max(known, key=lambda name: len(name.split("-")[0])), re.search(r"-(\d+)gb", words)
    kinds = [f"{family}-pcie"] if "pcie" in words else []
    kinds += [f"{family}-{memory[1]}"] if memory else []
    return next((_cards_by_name()[kind] for kind in (*kinds, family) if kind in _cards_by_name()), None)


def _found(name: str, known: Mapping[str, str], what: str, all_names: Iterable[str]) -> str:
    word = name.strip().lower().replace("_", "-").removeprefix("nvidia-").removeprefix("amd-")
    if word in known:
        return known[word]
    near = list(dict.fromkeys(known[each] for each in difflib.get_close_matches(word, known, n=3, cutoff=0.5)))
    hint = f"did you mean {either(near)}?" if near else f"triax knows {', '.join(all_names)}."
    raise BadInput(f"there is no {what} {name[:60]!r} in the catalogue: {hint}")


def card(name: str) -> Card:
    """Return what the card called ``name`` can do; raise BadInput with the nearest names."""
    found = find_card(name)
    said = _table("cards")["cards"][found]
    plain = [0.0, "absent"]
    return Card(
        name=found,
        memory_bytes=int(said["memory_bytes"][0]),
        memory_bytes_per_s=float(said["memory_bytes_per_s"][0]),
        peak_bf16=float(said["peak_bf16"][0]),
        peak_fp16=float(said["peak_fp16"][0]),
        peak_fp8=float(said.get("peak_fp8", plain)[0]),
        peak_fp4=float(said.get("peak_fp4", plain)[0]),
        peak_fp32=float(said["peak_fp32"][0]),
        sms=int(said["sms"][0]),
        power_w=float(said["power_w"][0]),
        gemm=_curve(said["gemm"][0]),
        gemm_fp8=_curve(said.get("gemm_fp8", said["gemm"])[0]),
    )


def _curve(numbers: list[float]) -> GemmCurve:
    large, middle, small, k0, bandwidth_part, launch_us, smoothing = numbers
    return GemmCurve(large, middle, small, k0, bandwidth_part, launch_us * 1e-6, smoothing)


def _own_card(cluster: Cluster) -> Card:
    """Return the card of ``cluster``: the catalogue's with the cluster's own numbers, or one made of them alone."""
    if cluster.device.lower() in _cards_by_name() or cluster.memory_bytes is None or cluster.peak_flops is None:
        found = card(cluster.device)
    else:
        peak = cluster.peak_flops
        found = Card(cluster.device, cluster.memory_bytes, peak / _FLOPS_PER_BYTE, peak, peak, peak_fp32=peak / 2)
    if cluster.memory_bytes is not None:
        found = replace(found, memory_bytes=cluster.memory_bytes)
    if cluster.peak_flops is not None:
        factor = cluster.peak_flops / (found.peak_bf16 or found.peak_fp16)
        found = replace(found, **{key: getattr(found, key) * factor for key in _PEAKS})
    if cluster.memory_bytes_per_s is not None:
        found = replace(found, memory_bytes_per_s=cluster.memory_bytes_per_s)
    return found if cluster.matmul_flops_per_s is None else _as_measured(found, cluster)


def _as_measured(found: Card, cluster: Cluster) -> Card:
    """Return ``found`` with the rate of large products that was measured: of the peak that was said, else of a peak
    that is as much higher."""
    reached = (found.peak_bf16 or found.peak_fp16) * found.gemm.large
    factor = (cluster.matmul_flops_per_s or reached) / reached
    if cluster.peak_flops is None:
        return replace(found, **{key: getattr(found, key) * factor for key in _PEAKS})
    return replace(
        found,
        gemm=replace(found.gemm, large=found.gemm.large * factor),
        gemm_fp8=replace(found.gemm_fp8, large=found.gemm_fp8.large * factor),
    )


def machine(cluster: Cluster) -> Machine:
    """Return the machine that ``cluster`` says, numbers of its own first; raise BadInput where there is none such."""
    _refuse_nonsense(cluster)
    own = _own_card(cluster)
    link = _link_of(own.name)
    _refuse_impossible(cluster, own.name, link)
    network_name = cluster.network or link["network"]
    names = {each: each for each in network_names()}
    network = _table("networks")["networks"][_found(network_name, names, "network", network_names())]
    shape = _table("networks")["shape"]
    rates = {key: float(link[key][0]) for key in ("all_reduce", "all_gather", "all_to_all", "send")}
    if cluster.inside_bytes_per_s is not None:
        factor = cluster.inside_bytes_per_s / rates["send"]
        rates = {key: rate * factor for key, rate in rates.items()}
    server = network["bits_per_s"][0] / 8 * network["reached"][0]
    said = cluster.oversubscription
    return Machine(
        card=own,
        servers=cluster.servers,
        cards_per_server=cluster.cards_per_server,
        domain=_domain(cluster, link),
        inside_all_reduce=rates["all_reduce"],
        inside_all_gather=rates["all_gather"],
        inside_all_to_all=rates["all_to_all"],
        inside_send=rates["send"],
        server_bytes_per_s=server if cluster.across_bytes_per_s is None else cluster.across_bytes_per_s,
        nics_per_server=int(network["ports"]),
        oversubscription=float(shape["oversubscription"][0]) if said is None else said,
        servers_per_leaf=int(shape["servers_per_leaf"][0]),
        has_network_reduction=bool(network["reduces"]),
        inside_latency_s=float(link["latency_s"][0]),
        across_latency_s=float(network["latency_s"][0]),
        name=f"{cluster.servers} x {cluster.cards_per_server} {own.name}",
    )


def _link_of(name: str) -> Mapping[str, Any]:
    """Return what joins cards of one server; for a card of the user's own PCI Express (*assumed*)."""
    links = _table("links")["links"]
    found: Mapping[str, Any] = next((link for link in links.values() if name in link["cards"]), links["pcie-5"])
    return found


def _domain(cluster: Cluster, link: Mapping[str, Any]) -> int:
    if cluster.domain_cards is not None:
        return min(cluster.domain_cards, cluster.num_cards)
    if link["kind"] != "rack":
        return cluster.cards_per_server
    whole = int(link["domain"])
    if cluster.num_cards <= whole or cluster.num_cards % whole == 0:
        return min(whole, cluster.num_cards)
    return _SEGMENT


def _refuse_nonsense(cluster: Cluster) -> None:
    """Raise BadInput for numbers that are no machine's: sums over them would be endless, or zero."""
    for key, (least, most) in _SENSE.items():
        value = getattr(cluster, key)
        if value is not None and not least <= value <= most:
            raise BadInput(f"{key} = {value:g} of the cluster cannot be: use {least:g} to {most:g}.")


def _refuse_impossible(cluster: Cluster, name: str, link: Mapping[str, Any]) -> None:
    most = int(link["domain"]) * (2 if link["kind"] == "pcie" else 1)
    if cluster.domain_cards is None and cluster.cards_per_server > most:
        raise BadInput(
            f"{cluster.servers}x{cluster.cards_per_server}x{cluster.device} cannot be: a server of {name} has at most "
            f"{most} cards; write {-(-cluster.num_cards // most)}x{most}x{cluster.device}, or a cluster file with "
            f"domain_cards."
        )
    if cluster.domain_cards is not None and cluster.domain_cards % cluster.cards_per_server:
        raise BadInput(
            f"domain_cards={cluster.domain_cards} is no multiple of cards_per_server={cluster.cards_per_server}: a "
            f"domain is made of whole servers."
        )


def usd_per_card_hour(cluster: Cluster) -> tuple[float, bool]:
    """Return the price of one card for an hour, and whether it is a default that was assumed."""
    if cluster.usd_per_card_hour is not None:
        return cluster.usd_per_card_hour, False
    prices = _table("prices")["usd_per_card_hour"]
    name = _cards_by_name().get(cluster.device.lower(), "")
    return float(prices.get(name, max(prices.values()))), True


def energy() -> tuple[float, float, float]:
    """Return the factor of servers and cooling, the part of a card's power that training draws, and US dollars per
    kWh; all assumed."""
    said = _table("prices")["energy"]
    return float(said["overhead"]), float(said["load"]), float(said["usd_per_kwh"])


def assumed_numbers(name: str) -> tuple[str, ...]:
    """Return which numbers of a card, its links and its usual network have no published source."""
    found = find_card(name)
    said, link = _table("cards")["cards"][found], _link_of(found)
    network = _table("networks")["networks"][link["network"]]
    sides = ((said, "card"), (link, "links"), (network, link["network"]))
    return tuple(
        f"{key} ({where})" for side, where in sides for key, value in side.items()
        if isinstance(value, list) and len(value) == 2 and value[1] == "assumed"
    )  # fmt: skip


def title(name: str) -> str:
    """Return the full name of a card; the name itself where the catalogue does not know it."""
    known = _cards_by_name().get(name.lower())
    return name if known is None else str(_table("cards")["cards"][known]["title"])
