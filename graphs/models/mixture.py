"""Mixtures of experts: the keys of each family's `config.json` for them, read into one type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paged_kv.graphs.models.fields import Fields

COUNT_KEYS = ("n_routed_experts", "num_experts", "num_local_experts")
"""Keys of the number of experts; transformers writes the last for most of them."""


@dataclass(frozen=True, kw_only=True)
class ClampedUnits:
    """Gated units `(up + 1) gate sigmoid(alpha gate)` (GPT-OSS): gate is at most `limit`, up within `-limit` and it."""

    alpha: float
    limit: float


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts in place of the MLP: some for each token and, where there are shared ones, one for all."""

    count: int
    chosen: int
    """Experts of each token, those of the greatest scores; scores are the softmax over all experts, unless
    `sigmoid`.
    """
    inner: int
    """The inner dimension of each expert."""
    layers: tuple[bool, ...]
    """Whether each layer is a mixture; the others have an MLP."""
    shared_inner: int = 0
    """Inner dimension of the shared expert, an MLP that all tokens go through; 0: none."""
    shared_gate: bool = False
    """The shared expert's output is multiplied by the sigmoid of a score of the token."""
    groups: int = 1
    """Number of groups of experts; a token chooses from the `chosen_groups` groups of the greatest scores."""
    chosen_groups: int = 1
    sigmoid: bool = False
    """Scores are sigmoids. Experts are chosen by their scores plus a bias of each, `e_score_correction_bias`, which the
    weights are without; a group's score is the sum of its two greatest (DeepSeek-V3)."""
    choice_bias: bool = False
    """Scores of a softmax, too, have a bias by which experts are chosen."""
    sums_to_one: bool = False
    """The weights of the chosen experts are their scores divided by the sum of these: the softmax over them alone."""
    scale: float = 1.0
    """The scale of the weights of the chosen experts."""
    router: str = "gate"
    """Name of the router among a mixture's weights."""
    bias: bool = False
    """The router and the experts have biases."""
    gated: bool = True
    """An expert multiplies by a gate; else it is `down(relu(up(x))^2)`."""
    units: ClampedUnits | None = None
    """The experts' gated units, where they are not SiLU's."""
    jitter: float | None = None
    """Two experts are chosen, one after the other: the greatest of the scores s that are left. Its weight is a softmax
    over those near to it, `(greatest - s) / max(|s|, greatest) <= 2 jitter` (SparseMixer, arXiv:2409.12136)."""
    parallel: bool = False
    """Experts run in parallel with the layer's MLP (Gemma 4): each has norms of its input and output, the router norms
    its input without weights and scales it, and each expert's weight has a factor."""
    scales_input: bool = False
    """An expert's weight, the sigmoid of its score, multiplies what goes into it instead of what comes out."""
    transposed: bool = False
    """In the checkpoint, stacks are `[count, in, out]`."""
    alternating: bool = False
    """In the checkpoint, gate and up alternate in one stack."""
    separate_gate_up: bool = False
    """Gate and up are two stacks, as GGUF files have them; else one, with gate above up."""


def read_experts(
    fields: Fields, layers: Sequence[bool], *, count_keys: Sequence[str] = COUNT_KEYS[1:],
    inner_key: str = "moe_intermediate_size", sigmoid: bool = False, **switches: Any,
) -> Experts | None:  # fmt: skip
    """The experts of the layers that have them, None where no layer has; `switches` are what the family adds.

    Args:
        count_keys: What the family calls the number of experts; the first one is named where all are missing.
        inner_key: What it calls their inner dimension.
        sigmoid: As in `Experts`.

    Raises:
        CheckpointError: a key is missing, of a wrong type, or says what this package does not compute.
    """
    if not any(layers):
        return None
    fields.one_of("scoring_func", {"sigmoid" if sigmoid else "softmax": None})
    methods = {"noaux_tc": True} if sigmoid else {"greedy": False, "group_limited_greedy": True}
    limited = fields.one_of("topk_method", methods)
    present = [key for key in count_keys if fields.get(key) is not None] or list(count_keys[:1])
    count, chosen = fields.integer(present[0]), fields.integer("num_experts_per_tok")
    for key in COUNT_KEYS:  # to transformers, most are other names of one number
        if fields.get(key) not in (None, count):
            raise fields.error(key, f"expected {present[0]} = {count}")
    groups = fields.integer("n_group") if limited else 1
    chosen_groups = fields.integer("topk_group", most=groups) if limited else 1
    if count % groups:
        raise fields.error("n_group", f"expected a divisor of {present[0]} = {count}")
    if sigmoid and count == groups:
        raise fields.error("n_group", "expected groups of several experts, of which two give the score")
    if chosen > count // groups * chosen_groups:
        problem = f"expected at most the {count // groups * chosen_groups} experts that a token chooses from"
        raise fields.error("num_experts_per_tok", problem)
    return Experts(
        count=count,
        chosen=chosen,
        inner=fields.integer(inner_key),
        layers=tuple(layers),
        groups=groups,
        chosen_groups=chosen_groups,
        sigmoid=sigmoid,
        scale=fields.number("routed_scaling_factor", default=1.0),
        **switches,
    )
