"""Which learning rate does a step have? A pure function of its number: nothing to save, nothing to fast-forward."""

import math

from triax.spec.run import LearningRateSpec


def learning_rate(step: int, spec: LearningRateSpec, num_steps: int) -> float:
    """Return the rate of update ``step`` (0 is the first) in a run of ``num_steps``.

    Warm-up is linear and reaches the peak with update ``warmup_steps - 1``. Then
    cosine: half a period from the peak to the final rate (Loshchilov and Hutter 2016, arXiv:1608.03983, eq. 5);
    wsd: constant, then linear to the final rate over the last ``decay_steps`` (Hu et al. 2024, arXiv:2404.06395);
    constant: the peak.
    """
    final = spec.peak * spec.final_ratio
    if step < spec.warmup_steps:
        return spec.peak * (step + 1) / spec.warmup_steps
    if spec.schedule == "constant":
        return spec.peak
    if spec.schedule == "cosine":
        length = spec.decay_steps or max(num_steps - spec.warmup_steps, 1)
        progress = min((step - spec.warmup_steps + 1) / length, 1.0)
        return final + (spec.peak - final) * 0.5 * (1.0 + math.cos(math.pi * progress))
    length = min(spec.decay_steps or max(num_steps // 10, 1), num_steps - spec.warmup_steps)
    progress = (step - (num_steps - length) + 1) / length if length > 0 else 0.0
    return spec.peak + (final - spec.peak) * min(max(progress, 0.0), 1.0)
