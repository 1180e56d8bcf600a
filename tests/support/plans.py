"""The plans that the package has learnt for a model."""

from torch import nn

from curvature.gradients.plans import Plan
from curvature.recording.model_call import FACTS


def plans_of(model: nn.Module) -> list[Plan]:
    return [plan for facts in FACTS.get(model, {}).values() for plan in facts.plans.values()]
