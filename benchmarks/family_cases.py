"""All cases of `family_gpu.py`, by name."""

from collections.abc import Callable

import family_pairs as pairs
import family_queries as queries
from family_case import DENSE, Case, Given, formula
from torch import Tensor

from megabatch.bench import accuracy as inputs

# The most important first.
CASES: dict[str, Callable[[Tensor, Tensor, Given], Case]] = {
    "info_nce_loss": queries.one_direction,
    "info_nce_loss, both directions": queries.both_directions,
    "info_nce_loss, hard negatives": queries.hard_negatives,
    "nt_xent_loss, 2 × B/2 rows": pairs.half_views,
    "sup_con_loss, out": pairs.labelled,
    "info_nce_loss, GTE": queries.gte,
    "info_nce_loss, margin": queries.with_margin,
    "info_nce_loss, memory bank": queries.memory_bank,
    "siglip, several positives": pairs.several_positives,
    "clip, label smoothing": pairs.smoothed,
    "matryoshka": pairs.matryoshka,
    "soft_clip_loss": pairs.distilled,
    "info_nce_loss, guide": queries.guided,
    "dcl_loss": queries.decoupled,
    "hcl_loss": queries.reweighted,
    "nt_xent_loss, 2 × B rows": pairs.views,
    "sup_con_loss, in": pairs.labelled_in,
    "pairwise_symmetric_logsumexp": pairs.against_themselves,
    "info_nce_loss, bank alone": queries.moco,
}


def case(name: str, rows: int, width: int, device: str) -> Case:
    """One of CASES for a batch; with the dense formula as its peer where it has no other."""
    q, k, _ = inputs.pairs(rows, width, device)
    made = CASES[name](q, k, Given(rows, width, device))
    if not made.peers:
        made.peers[DENSE] = formula(made.dense)
    return made
