"""Mixtures of experts, with experts that the batch axis shards and tokens that go to the devices of their experts.

layers             `MixtureOfExperts`: a Keras layer
expert_kind        `ExpertKind`: the kind of variable that `experts=` chooses
parallel_experts   the computation of experts on one device and on a mesh
routes             the rows of experts that tokens become
hub_experts        the experts of KerasHub's models
expert_traffic     the largest traffic of tokens in a step
"""

from tfshard.contrib.experts import hub_experts as _hub_experts
from tfshard.contrib.experts.expert_kind import ExpertKind
from tfshard.contrib.experts.layers import MixtureOfExperts
from tfshard.layouts import variable_kind

variable_kind.register(ExpertKind)
del _hub_experts

__all__ = ["MixtureOfExperts"]
