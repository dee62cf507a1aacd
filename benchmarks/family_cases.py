"""All cases of `family_gpu.py`, by name."""

from collections.abc import Callable

import family_pairs as pairs
import family_queries as queries
from family_case import DENSE, Case, Given, formula
from torch import Tensor

from megabatch.bench import inputs

# The most important first.
CASES: dict[str, Callable[[Tensor, Tensor, Given], Case]] = {
    "info_nce": queries.one_direction,
    "info_nce, both directions": queries.both_directions,
    "info_nce, hard negatives": queries.hard_negatives,
    "nt_xent, 2 × B/2 rows": pairs.half_views,
    "sup_con, out": pairs.labelled,
    "info_nce, GTE": queries.gte,
    "info_nce, margin": queries.with_margin,
    "info_nce, memory bank": queries.memory_bank,
    "siglip, several positives": pairs.several_positives,
    "clip, label smoothing": pairs.smoothed,
    "matryoshka": pairs.matryoshka,
    "soft_clip_loss": pairs.distilled,
    "info_nce, guide": queries.guided,
    "dcl": queries.decoupled,
    "hcl": queries.reweighted,
    "nt_xent, 2 × B rows": pairs.views,
    "sup_con, in": pairs.labelled_in,
    "pairwise_self_logsumexp": pairs.against_themselves,
    "info_nce, bank alone": queries.moco,
}


def case(name: str, rows: int, width: int, device: str) -> Case:
    """One of CASES for a batch; with the dense formula as its peer where it has no other."""
    q, k, _ = inputs.pairs(rows, width, device)
    made = CASES[name](q, k, Given(rows, width, device))
    if not made.peers:
        made.peers[DENSE] = formula(made.dense)
    return made
