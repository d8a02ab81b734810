"""How does one process become any rank of a cluster that is not there?

Three things stand in for what is missing. A process group that moves nothing stands in for the peers. Fake tensors,
which have shapes and no memory, stand in for the cards. And whole numbers stay real: which token is looked up, which
expert a row goes to, how many rows arrive. The engine asks the host for these, so that every size that follows from
them is what it would be; only what is computed is fake.

Where a real run would have whole numbers from a peer, the peer is taken to have what this rank has. That is so where
routing is balanced (``triax.verify.observe``), and where stages tell each other that shapes are known beforehand.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from triax.nn.card import standing_for_cards
from triax.verify.ghosts import Ghosts
from triax.verify.operands import tensors_in

_WHOLE: Final = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})

_AS_GIVEN: Final = frozenset({torch.ops.aten.arange, torch.ops.aten.full, torch.ops.aten.scalar_tensor})
"""What makes whole numbers where it is given such and no dtype."""

_GROUPED: Final = torch.ops.aten._grouped_mm.default


@contextmanager
def standing_in(rank: int, world_size: int, *, on_cards: bool = False) -> Iterator[None]:
    """Be ``rank`` of ``world_size`` inside the ``with``: floating-point tensors made there have no memory.

    ``on_cards``: the engine does what it does on cards (``triax.nn.card``).
    """
    # A store of its own kind: nobody is there to meet.
    # DTensor remembers how results are laid out, and with that the mesh and this rank's place on it, under a key that
    # does not say of which rank: what this process does next as another one would be given that place.
    _clear_sharding_prop_cache()
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        ghosts = Ghosts()
        with (
            standing_for_cards(on_cards), ghosts.watched(), FakeTensorMode(allow_non_fake_inputs=True) as fake,
            WholeNumbers(fake, ghosts),
        ):  # fmt: skip
            yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()


class WholeNumbers(TorchDispatchMode):
    """Inside the ``with``, what is made of whole numbers alone is computed; all else is ``fake``."""

    def __init__(self, fake: FakeTensorMode, ghosts: Ghosts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake, self._ghosts = fake, ghosts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)  # a question about a tensor
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back as operations on local tensors
        if self._ghosts.are_about:
            return func(*args, **kwargs)
        tensors = tensors_in((*args, *kwargs.values()))
        is_plain = all(map(_is_plain, tensors)) if tensors else _makes_plain(func, args, kwargs)
        if func is _GROUPED and tensors[0].dtype == torch.float32:
            return _in_wider_numbers(func, args, kwargs)
        if not is_plain or _leaves_meta(tensors, kwargs):
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            return _with_peers_alike(func, args, kwargs)
        with unset_fake_temporarily():
            result = func(*args, **kwargs)
        return pytree.tree_map_only(Tensor, self._kept, result)

    def _kept(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` if it may stay what it is, else a fake in its place."""
        return tensor if _is_plain(tensor) else self._fake.from_tensor(tensor)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether ``tensor`` needs no fake in its place: whole numbers, and what is on ``meta`` before it is made.

    Networks are built there by every run, and parts of modules could not be exchanged were they fakes.
    """
    return not isinstance(tensor, FakeTensor) and (tensor.is_meta or tensor.dtype in _WHOLE)


def _makes_plain(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether ``func`` makes such from no tensor at all."""
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    if device is not None and torch.device(device).type == "meta":
        return True
    if dtype is None and func._overloadpacket in _AS_GIVEN:
        return not any(isinstance(leaf, float) for leaf in pytree.tree_leaves(args))
    return dtype in _WHOLE


def _leaves_meta(tensors: list[Tensor], kwargs: Any) -> bool:
    """Return whether something on ``meta`` is made elsewhere."""
    device = kwargs.get("device")
    return device is not None and torch.device(device).type != "meta" and any(tensor.is_meta for tensor in tensors)


def _in_wider_numbers(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the fake result of a grouped matmul in fp32, which CPUs do; torch 2.13 knows a rule for bf16 alone."""

    def narrow(leaf: Any) -> Any:
        return leaf.to(torch.bfloat16) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    result = func(*pytree.tree_map(narrow, args), **pytree.tree_map(narrow, kwargs))
    return torch.empty_like(result, dtype=torch.float32)


def _with_peers_alike(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a collective of whole numbers as if every peer had brought what this rank has."""
    with unset_fake_temporarily():
        result = func(*args, **kwargs)
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        _RESULTS[func._schema.name](given)
    return result


def _exchanged(given: dict[str, Any]) -> None:
    """Each peer sends the part that is for this rank: the one that this rank would keep."""
    group = dist.ProcessGroup.unbox(given["process_group"])
    mine = given["input"].chunk(group.size())[group.rank()]
    given["output"].copy_(torch.cat([mine] * group.size()))


def _voted(given: dict[str, Any]) -> None:
    """A stage that comes before or after votes as this one does: that shapes are known."""
    for tensor in given["tensors"]:
        tensor.fill_(1)


def _nothing(_given: dict[str, Any]) -> None:
    """What is sent stays as it is."""


_RESULTS: Final[dict[str, Callable[[dict[str, Any]], None]]] = {
    "c10d::alltoall_base_": _exchanged,
    "c10d::recv_": _voted,
    "c10d::send": _nothing,
}
"""What collectives of whole numbers come to; the engine has no others."""
