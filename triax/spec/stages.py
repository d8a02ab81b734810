"""Which layers does each pipeline stage own? Cut by cost, so that none keeps the others waiting."""

from triax.spec.model import ModelSpec
from triax.spec.weights import weights_table


def stage_layers(model: ModelSpec, num_stages: int, cuts: tuple[int, ...] | None) -> tuple[range, ...]:
    """Return the layers of each stage, first stage first: every layer once, at least one in each.

    ``cuts`` are layers in each stage; None cuts so that the dearest stage is as cheap as can be, the head counted with
    the last one. Raises ValueError where the cuts do not make up the layers, or where there are too few layers.
    """
    layers = model.num_hidden_layers
    if num_stages > layers:
        raise ValueError(f"{num_stages} stages need a layer each, and the model has {layers}")
    if cuts is None:
        cuts = cheapest_cuts(layers, num_stages, head_cost_in_layers(model))
    if len(cuts) != num_stages or sum(cuts) != layers or min(cuts) < 1:
        raise ValueError(f"stage cuts {list(cuts)} are not {num_stages} counts of at least 1 that sum to {layers}")
    firsts = [sum(cuts[:stage]) for stage in range(num_stages)]
    return tuple(range(first, first + count) for first, count in zip(firsts, cuts, strict=True))


def head_cost_in_layers(model: ModelSpec) -> float:
    """Return what the head and the loss cost, in layers: the matmul weights that a token meets there beside those of
    the mean layer."""
    inside = (weight for weight in weights_table(model) if weight.layer is not None and weight.is_matmul)
    of_layer = sum(weight.numel_per_token for weight in inside) / model.num_hidden_layers
    return model.vocab_size * model.hidden_size / of_layer


def cheapest_cuts(layers: int, num_stages: int, head_cost: float) -> tuple[int, ...]:
    """Return layers of each stage: spread evenly after giving the last stage as many fewer as its head is worth.

    The dearest of the other stages then has ceil((layers - last) / (stages - 1)) layers; every possible size of the
    last stage is tried, and of equally good ones the largest is taken.
    """
    if num_stages == 1:
        return (layers,)
    others = num_stages - 1

    def dearest(last: int) -> float:
        return max(-(-(layers - last) // others), last + head_cost)

    last = min(range(1, layers - others + 1), key=lambda last: (dearest(last), -last))
    few, more = divmod(layers - last, others)
    # The first stages hold the most microbatches at once, so that the remainder goes to the later ones.
    return (*(few + (stage >= others - more) for stage in range(others)), last)
