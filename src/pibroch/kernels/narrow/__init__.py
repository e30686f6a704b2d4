"""Weights of 16 bits: bfloat16 in row records, float32 while an optimizer works on them."""
