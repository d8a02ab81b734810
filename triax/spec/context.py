"""Which positions of a sequence does each rank of the ``cp`` axis have?

A sequence is cut into 2 x cp equal chunks, and rank r gets the r-th from the head and the r-th from the tail. A late
position looks back at more keys than an early one; so each rank has as much causal attention to do as any other.
"""


def chunk_length(seq_len: int, cp: int) -> int:
    """Return the positions of one of the chunks that ``seq_len`` is cut into."""
    if seq_len % chunk_count(cp):
        raise ValueError(f"{seq_len} positions do not make {chunk_count(cp)} equal chunks")
    return seq_len // chunk_count(cp)


def chunk_count(cp: int) -> int:
    """Return how many chunks a sequence is cut into; one rank has all of it."""
    return 2 * cp if cp > 1 else 1


def positions_of(seq_len: int, cp: int, cp_index: int) -> list[range]:
    """Return the positions that rank ``cp_index`` has, ascending: one chunk from the head and one from the tail."""
    if cp == 1:
        return [range(seq_len)]
    size = chunk_length(seq_len, cp)
    return [range(chunk * size, (chunk + 1) * size) for chunk in (cp_index, 2 * cp - 1 - cp_index)]
