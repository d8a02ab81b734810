"""How many floating-point operations does an operation of torch do? Multiplications and additions of matrix products.

As ``triax.spec.flops``: two for each multiplication with its addition, attention over the positions that a query may
see. What is computed again counts, since it is computed.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.attention.varlen  # it defines attention inside documents
from torch.utils.flop_counter import flop_registry

from triax.spec.flops import mean_attended

aten = torch.ops.aten


def _attended(q: Any, k: Any, is_causal: bool) -> int:
    """Return the pairs of a query and a key that it may see, over all sequences and heads."""
    batch, heads, queries, _ = q.shape
    keys = k.shape[2]
    pairs = queries * (queries + 1) // 2 if is_causal else queries * keys
    return int(batch * heads * pairs)


def _attention(args: Any, kwargs: Any, _out: Any) -> int:
    q, k, v, is_causal = args[0], args[1], args[2], _is_causal(args, kwargs, 4)
    return int(2 * _attended(q, k, is_causal) * (q.shape[3] + v.shape[3]))


def _attention_backward(args: Any, kwargs: Any, _out: Any) -> int:
    """Scores once more, and the gradients of queries, keys, values and powers."""
    q, k, v, is_causal = args[1], args[2], args[3], _is_causal(args, kwargs, 7)
    return int(2 * _attended(q, k, is_causal) * (3 * q.shape[3] + 2 * v.shape[3]))


def _documents(args: Any, kwargs: Any, _out: Any) -> int:
    """Attention inside the documents of packed sequences, of (T, N, H) queries."""
    q, v = args[0], args[2]
    return int(2 * q.shape[1] * _seen(args[3], args, kwargs, 9) * (q.shape[2] + v.shape[2]))


def _documents_backward(args: Any, kwargs: Any, _out: Any) -> int:
    q, v = args[1], args[3]
    return int(2 * q.shape[1] * _seen(args[6], args, kwargs, 13) * (3 * q.shape[2] + 2 * v.shape[2]))


def _seen(bounds: Any, args: Any, kwargs: Any, place: int) -> int:
    """Return the pairs of a query and a key that it may see in documents with ``bounds``."""
    lengths: list[int] = bounds.diff().tolist()
    before = kwargs.get("window_size", args[place] if len(args) > place else None) or (-1, 0)
    window = None if before[0] < 0 else before[0] + 1
    return round(float(mean_attended(lengths, window)) * sum(lengths))


def _is_causal(args: Any, kwargs: Any, place: int) -> bool:
    return bool(kwargs.get("is_causal", args[place] if len(args) > place else False))


def _grouped(args: Any, _kwargs: Any, out: Any) -> int:
    """Each row meets one matrix; of two factors cut by rows, each group is a product of its own."""
    first, second = args[0], args[1]
    if first.ndim == 2 and second.ndim == 2:
        return int(2 * first.shape[0] * first.shape[1] * second.shape[1])
    return int(2 * first.shape[-2] * first.shape[-1] * out.shape[-1])


def _products(args: Any, _kwargs: Any, out: Any) -> int:
    """A product of each pair of matrices, in whatever type it comes out: torch's registry takes no ``out_dtype``."""
    return int(2 * args[0].shape[2] * out.numel())


_OWN: Final[dict[Any, Callable[[Any, Any, Any], int]]] = {
    aten.bmm: _products,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten._grouped_mm: _grouped,
    torch.ops.torch_attn._varlen_attn: _documents,
    torch.ops.torch_attn._varlen_attn_backward: _documents_backward,
}
"""What torch's own registry does not count, or counts as if every query saw every key."""


def flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the operations of one call of ``func``."""
    packet = func._overloadpacket
    own = _OWN.get(packet)
    if own is not None:
        return own(args, kwargs, out)
    counted = flop_registry.get(packet)
    return 0 if counted is None else int(counted(*args, **kwargs, out_val=out))
