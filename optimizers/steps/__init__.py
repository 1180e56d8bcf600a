"""Step rules: from gradients and a preconditioner to a displacement of the parameters."""
