"""Training objectives: functions of (draft logits, target logits, labels) -> loss per place.

Each takes the draft's logits [N, vocabulary], the target's [N, vocabulary] and the text's tokens [N], and
returns [N]. q is the target's distribution, p the draft's, both at temperature 1. Computed in float32.
"""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional as F

from outpace_lab.names import check_known
from outpace_lab.train.trained import Objective


def ground_truth(draft: Tensor, target: Tensor, labels: Tensor) -> Tensor:
    """-log p(label). On the target's own answers this is sequence-level distillation (Kim and Rush 2016,
    arXiv 1606.07947, section 3.2).
    """
    return F.cross_entropy(draft.float(), labels, reduction="none")


def forward_kl(draft: Tensor, target: Tensor, labels: Tensor) -> Tensor:
    """KL(q || p), word-level distillation (Hinton et al. 2015, arXiv 1503.02531; Kim and Rush 2016, section
    3.1).
    """
    log_p, log_q = _logs(draft, target)
    return (log_q.exp() * (log_q - log_p)).sum(dim=-1)


def reverse_kl(draft: Tensor, target: Tensor, labels: Tensor) -> Tensor:
    """KL(p || q) (Gu et al. 2023, MiniLLM, arXiv 2306.08543, section 2.1; Zhou et al. 2023, DistillSpec,
    arXiv 2310.08461).
    """
    log_p, log_q = _logs(draft, target)
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)


def jensen_shannon(draft: Tensor, target: Tensor, labels: Tensor) -> Tensor:
    """The mean of KL(q || m) and KL(p || m), m the mean of q and p (Agarwal et al. 2023, GKD, arXiv
    2306.13649, section 2, at weight 1/2; DistillSpec).
    """
    log_p, log_q = _logs(draft, target)
    mean = log_p.logaddexp(log_q) - math.log(2)
    return ((log_q.exp() * (log_q - mean)) + (log_p.exp() * (log_p - mean))).sum(dim=-1) / 2


def total_variation(draft: Tensor, target: Tensor, labels: Tensor) -> Tensor:
    """Half of sum |p - q|: the chance that speculative sampling rejects (DistillSpec, section 4)."""
    log_p, log_q = _logs(draft, target)
    return (log_p.exp() - log_q.exp()).abs().sum(dim=-1) / 2


def _logs(draft: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return draft.float().log_softmax(dim=-1), target.float().log_softmax(dim=-1)


OBJECTIVES: dict[str, Objective] = {
    function.__name__: function
    for function in (ground_truth, forward_kl, reverse_kl, jensen_shannon, total_variation)
}


def objective(name: str) -> Objective:
    """Look up an objective by name.

    Raises:
        OutpaceError: there is none of this name.
    """
    check_known("objective", name, OBJECTIVES)
    return OBJECTIVES[name]
