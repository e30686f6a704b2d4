"""Python objects and tensors as bytes and back, and what peers may name and run here."""
