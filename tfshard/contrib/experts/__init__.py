from tfshard.contrib.experts.expert_kind import ExpertKind
from tfshard.contrib.experts.layers import MixtureOfExperts
from tfshard.layouts import variable_kind

variable_kind.register(ExpertKind)

__all__ = ["MixtureOfExperts"]
