"""megabatch: exact contrastive losses in memory that grows linearly with the batch.

The package imports torch and its submodules only when a public name is used for the first time, so `megabatch --help` starts
quickly.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megabatch.cached import Encoded, HostSource, ReplayMismatchError, ReplaySource, Source, cached_backward
    from megabatch.late import Tokens, maxsim_logsumexp, maxsim_scores, maxsim_topk
    from megabatch.losses import (
        ClipLoss,
        DistillClipLoss,
        Negatives,
        SigLipLoss,
        clip_loss,
        dcl_loss,
        hcl_loss,
        info_nce_loss,
        late_distillation_loss,
        late_interaction_loss,
        matryoshka_clip_loss,
        nt_xent_loss,
        siglip_loss,
        soft_clip_loss,
        sup_con_loss,
    )
    from megabatch.pairwise import (
        pairwise_logsumexp,
        pairwise_rank,
        pairwise_softplus,
        pairwise_symmetric_logsumexp,
        pairwise_topk,
    )
    from megabatch.ring import RingError

__version__ = "0.1.0"

__all__ = [
    "ClipLoss",
    "DistillClipLoss",
    "Encoded",
    "HostSource",
    "Negatives",
    "ReplayMismatchError",
    "ReplaySource",
    "RingError",
    "SigLipLoss",
    "Source",
    "Tokens",
    "cached_backward",
    "clip_loss",
    "dcl_loss",
    "hcl_loss",
    "info_nce_loss",
    "late_distillation_loss",
    "late_interaction_loss",
    "matryoshka_clip_loss",
    "maxsim_logsumexp",
    "maxsim_scores",
    "maxsim_topk",
    "nt_xent_loss",
    "pairwise_logsumexp",
    "pairwise_rank",
    "pairwise_softplus",
    "pairwise_symmetric_logsumexp",
    "pairwise_topk",
    "siglip_loss",
    "soft_clip_loss",
    "sup_con_loss",
]

_SUBMODULES = ("cached", "late", "losses", "pairwise", "ring")  # attributes of the package, such as `megabatch.losses`
_DEFINING_MODULES = ("cached", "late", "losses", "pairwise", "ring")  # the modules that define the public names


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"megabatch.{name}")
    if name in __all__:
        for module in _DEFINING_MODULES:
            members = vars(importlib.import_module(f"megabatch.{module}"))
            globals().update((public, members[public]) for public in __all__ if public in members)
        return globals()[name]
    raise AttributeError(f"module 'megabatch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
