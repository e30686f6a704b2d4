"""What peers need: their environments, and what they do not ship."""
