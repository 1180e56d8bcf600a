"""What forward and backward passes of a training loop tell its optimizer."""
