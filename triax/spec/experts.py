"""How do tokens choose among experts, and what keeps them from all choosing the same?

A mixture of experts (Shazeer et al. 2017, arXiv:1701.06538) replaces the feed-forward network of a layer by many, of
which each token goes through a few. Fields in the names of Hugging Face's ``config.json``.
"""

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from triax.spec.legal_values import divisors, either, nearest
from triax.spec.value import Count, Counts, Value


class ExpertSpec(Value):
    """The experts of a model and the router before them; E num_experts."""

    num_experts: Count = Field(ge=1, le=1 << 14)
    """Called ``num_local_experts`` or ``n_routed_experts`` by some families."""
    num_experts_per_tok: Count = Field(ge=1)
    """Experts that each token goes through. None is ever dropped: an expert takes all tokens that choose it."""
    moe_intermediate_size: Count = Field(ge=1, le=1 << 24)
    """Width inside each expert."""
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    """softmax: scores of a token sum to one. sigmoid: each expert is scored alone (DeepSeek-V3, arXiv:2412.19437)."""
    norm_topk_prob: bool = True
    """Scores of the chosen experts are divided by their sum (Mixtral: always)."""
    routed_scaling_factor: float = Field(default=1.0, gt=0)
    """Scale of what the chosen experts give together."""
    n_group: Count = Field(default=1, ge=1)
    """Groups that experts stand in; a token chooses among those of its best groups alone."""
    topk_group: Count = Field(default=1, ge=1)
    """Groups that a token chooses from, by the sum of the two best scores in each."""
    selection_bias: bool = False
    """A number for each expert that is added to scores where experts are chosen, and nowhere else."""
    shared_expert_intermediate_size: Count = Field(default=0, ge=0, le=1 << 24)
    """Width of a feed-forward network that every token goes through besides; 0: none. DeepSeek's ``n_shared_experts``
    of ``moe_intermediate_size`` each are one of their widths together."""
    first_k_dense_replace: Count = Field(default=0, ge=0)
    """Layers at the start without experts."""
    decoder_sparse_step: Count = Field(default=1, ge=1)
    """Every how many layers one has experts: 2 means the second, the fourth and so on."""
    mlp_only_layers: Counts = ()
    """Further layers without experts."""
    router_aux_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the balance loss: of each layer with experts, the mean over the sequences of a step of what
    ``triax.nn.balance`` defines; 1.0 is a balanced sequence."""
    router_z_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the mean square of log-sum-exp of the router's logits (ST-MoE, arXiv:2202.08906, equation 5)."""
    router_bias_update_speed: float = Field(default=0.0, ge=0, le=1)
    """After each step the selection bias of an expert moves by this, up where it had fewer tokens than the mean and
    down where it had more: balance without a loss (Wang et al. 2024, arXiv:2408.15664)."""

    @model_validator(mode="after")
    def _choices_fit(self) -> Self:
        faults = [*(self._group_faults() or self._choice_faults()), *self._balance_faults()]
        if faults:
            raise ValueError("\n".join(faults))
        return self

    def _group_faults(self) -> list[str]:
        experts, groups = self.num_experts, self.n_group
        if groups == 1:
            return [f"topk_group={self.topk_group} of n_group=1 cannot be: use 1."] if self.topk_group > 1 else []
        fitting = [divisor for divisor in divisors(experts) if divisor == 1 or experts // divisor >= 2]
        if groups not in fitting:
            return [
                f"n_group={groups} does not cut num_experts={experts} into equal groups of two or more: use "
                f"{either(nearest(fitting, groups))}."
            ]
        if self.topk_group > groups:
            return [f"topk_group={self.topk_group} is more than n_group={groups}: use at most {groups}."]
        return []

    def _choice_faults(self) -> list[str]:
        most = self.num_experts // self.n_group * min(self.topk_group, self.n_group)
        if self.num_experts_per_tok <= most:
            return []
        there = f"num_experts={self.num_experts}"
        if self.n_group > 1:
            there = f"the {most} experts of topk_group={self.topk_group} of n_group={self.n_group} groups"
        return [f"num_experts_per_tok={self.num_experts_per_tok} is more than {there}: use at most {most}."]

    def _balance_faults(self) -> list[str]:
        faults = []
        if self.router_bias_update_speed and not self.selection_bias:
            faults.append(
                f"router_bias_update_speed={self.router_bias_update_speed} moves a selection bias, and there is none: "
                f"use selection_bias=true, or 0."
            )
        if self.router_z_loss_coef and self.scoring_func != "softmax":
            faults.append(
                f"router_z_loss_coef={self.router_z_loss_coef} is about scores by softmax, and scoring_func="
                f"{self.scoring_func} has no sum over experts: use 0."
            )
        return faults

    def layer_faults(self, num_layers: int) -> list[str]:
        """Return what cannot be in a model of ``num_layers`` layers."""
        last = num_layers - 1
        if foreign := [layer for layer in self.mlp_only_layers if layer > last]:
            return [f"experts.mlp_only_layers names layer {foreign[0]}, and there are layers 0 to {last}."]
        if not self.sparse_layers(num_layers):
            return [
                f"no layer of {num_layers} has experts, by experts.first_k_dense_replace={self.first_k_dense_replace}, "
                f"experts.decoder_sparse_step={self.decoder_sparse_step} and experts.mlp_only_layers: leave out "
                f"experts, or let a layer have them."
            ]
        return []

    def sparse_layers(self, num_layers: int) -> Sequence[int]:
        """Return which of ``num_layers`` layers have experts, ascending."""
        dense = set(self.mlp_only_layers)
        candidates = range(self.first_k_dense_replace, num_layers)
        return [layer for layer in candidates if (layer + 1) % self.decoder_sparse_step == 0 and layer not in dense]
