"""What rows and gradients need on their way between ranks."""
