"""Records what forward and backward passes of a training loop tell about the curvature."""
